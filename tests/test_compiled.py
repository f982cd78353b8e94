"""torch.compile of what stands between the products, and of the updates: the same training as without, nothing compiled for the
second time, and nothing at all after the warm-up."""
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters

import train_gpt as tg
from test_distributed import batches_of, build, cfg as every_layer  # noqa: F401 (a fixture)

WINDOWS = (9, 33)


@pytest.fixture(scope="module")
def cfg(every_layer):  # noqa: F811
    """A layer of each kind, and two of one kind."""
    layers = (tg.Layer("paired", value=0, saves="skip"), tg.Layer("plain", "long", saves="back"), tg.Layer(None, adds="skip"),
              tg.Layer("plain", value=1, reads="back"), tg.Layer("plain", value=2, reads="back"))
    return replace(every_layer, layers=layers, slices=2)


@pytest.fixture
def compiled():
    """compiled(cfg, ...): the forms of a compiled run, as choose_ops gives them but for arguments to torch.compile."""
    def ops(cfg, **arguments):
        return tg.PLAIN._replace(compiled=cache(partial(torch.compile, fullgraph=True, **arguments)),
                                 number=partial(torch.tensor, dtype=tg.wide_dtype(cfg)))

    with torch._dynamo.config.patch(recompile_limit=64):
        torch._dynamo.reset()
        counters.clear()
        yield ops
        torch._dynamo.reset()


def train(cfg, ops, steps=None, validate=True):
    """-> losses, how many graphs were compiled by the end of each step, the model's state."""
    _, exchange, model, optimizer = build(0, 1, cfg, ops=ops)
    batches, losses, graphs = batches_of(cfg, 0, 1), [], []
    val = tg.ValLoader(cfg, tg.find_data(cfg).val, 0, 1, False)
    for _ in range(steps or cfg.steps):
        losses.append(tg.train_step(model, optimizer, batches.next()).item())
        if validate:
            losses.append(tg.validate(model, val, exchange, WINDOWS))
        graphs.append(counters["stats"]["unique_graphs"])
    batches.close()
    return losses, graphs, {name: p for name, p in model.state().items() if isinstance(p, torch.Tensor)}


def test_a_compiled_run_is_the_plain_run(cfg, compiled):
    """Through all stages and the split, as torch.compile traces and differentiates it, before code is made of that. Shapes change
    with the stages; rates, windows and momentum change with every step and compile nothing."""
    want, none, state = train(cfg, tg.PLAIN)
    got, graphs, compiled_state = train(cfg, compiled(cfg, backend="aot_eager"))
    assert none == [0] * cfg.steps
    assert got == pytest.approx(want, rel=1e-12)
    for name, p in state.items():
        torch.testing.assert_close(compiled_state[name], p, rtol=1e-11, atol=1e-12, msg=name)
    # Steps 0 and 1 update banks and Adam's parameters for the first time; step 2 has another length, from then on lengths are
    # free; embed's own update in step 7 has the shape of another table's.
    assert 0 < graphs[0] < graphs[1] < graphs[2] == graphs[-1] <= 60


def test_two_layers_of_a_kind_are_compiled_once(cfg, compiled):
    counts = []
    for layers in (cfg.layers[:4], cfg.layers):
        torch._dynamo.reset()
        counters.clear()
        counts.append(train(replace(cfg, layers=layers), compiled(cfg, backend="aot_eager"), steps=1, validate=False)[1])
    assert counts[0] == counts[1] != [0]


def test_machine_code(cfg, compiled, tmp_path, monkeypatch):
    """By torch.compile's own backend, in fp32, for two steps with Adam's: losses and parameters of the plain run within what fp32
    gives after polar. And a second process's worth of compiling finds it in the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = (tg.Layer("paired", value=0, saves="skip"), tg.Layer("plain", "long", saves="back", adds="skip"))
    cfg = replace(cfg, dtype="float32", polar_dtype="float32", layers=layers)
    want, _, state = train(cfg, tg.PLAIN, 2, False)
    got, _, compiled_state = train(cfg, compiled(cfg), 2, False)
    assert got == pytest.approx(want, rel=1e-5)
    for name, p in state.items():
        assert (compiled_state[name] - p).norm() <= 1e-3 * p.norm(), name
    hits = counters["inductor"]["fxgraph_cache_hit"]
    torch._dynamo.reset()
    again, _, _ = train(cfg, compiled(cfg), 2, False)
    assert again == got and counters["inductor"]["fxgraph_cache_hit"] > hits


def test_low_words_compiled(compiled):
    """bf16 weights with their lower halves, by machine code: the bits of the plain update."""
    g = torch.Generator().manual_seed(0)
    high, x = (torch.randn(2, 8, 6, generator=g).bfloat16() for _ in range(2))
    low, lr = torch.randint(0, 65536, (2, 8, 6), generator=g).to(torch.uint16), torch.tensor([[[0.02]], [[0.04]]])
    results = []
    for ops in (tg.PLAIN, compiled(tg.RECORD)):
        p, rest = high.clone(), low.clone()
        tg.normuon_update(p, rest, x, lr, 0.1, ops)
        results.append((p, rest))
    (p, rest), (q, other) = results
    difference = (tg.join_halves(p, rest) - tg.join_halves(q, other)).abs()
    assert not torch.equal(p, high) and (difference <= 2 ** -22 * tg.join_halves(p, rest).abs()).all()  # one may fuse a product
