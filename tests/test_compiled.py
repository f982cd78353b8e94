"""torch.compile of what stands between the products, and of the updates: the same training as without, each kind of layer and of
update compiled once, and nothing at all after the warm-up."""
import os
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import train_gpt as tg
from test_distributed import batches_of, build, cfg as every_layer  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

WINDOWS = (9, 33)


@pytest.fixture(scope="module")
def cfg(every_layer):  # noqa: F811
    """A layer of each kind, and two of one kind."""
    layers = (tg.Layer("paired", value=0, saves="skip"), tg.Layer("plain", "long", saves="back"), tg.Layer(None, adds="skip"),
              tg.Layer("plain", value=1, reads="back"), tg.Layer("plain", value=2, reads="back"))
    return replace(every_layer, layers=layers, slices=2)


@pytest.fixture
def compiled(monkeypatch):
    """compiled(cfg, ...): the forms of a compiled run, as choose_ops gives them but for arguments to torch.compile."""
    # Torch's cache does not tell vectors of 16 numbers from those of 8: what was made under another ATEN_CPU_CAPABILITY would
    # be compiled for this one, and compute NaN.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(default_cache_dir(), torch.backends.cpu.get_cpu_capability()))
    def ops(cfg, **arguments):
        return tg.PLAIN._replace(compiled=cache(partial(torch.compile, fullgraph=True, **arguments)),
                                 number=partial(torch.tensor, dtype=tg.wide_dtype(cfg)))

    with torch._dynamo.config.patch(recompile_limit=64):
        torch._dynamo.reset()
        counters.clear()
        yield ops
        torch._dynamo.reset()


def train(cfg, ops):
    """-> losses, how many graphs were compiled by the end of each step, the model's state."""
    _, exchange, model, optimizer = build(0, 1, cfg, ops=ops)
    batches, losses, graphs = batches_of(cfg, 0, 1), [], []
    val = tg.ValLoader(cfg, tg.find_data(cfg).val, 0, 1, False)
    for _ in range(cfg.steps):
        losses.append(tg.train_step(model, optimizer, batches.next()).item())
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


def test_machine_code(cfg, compiled):
    """Forward and backward of a batch by torch.compile's own backend, in fp32: losses and gradients of the plain one."""
    layers = (tg.Layer("plain", "long", value=0, saves="skip"), tg.Layer("plain", "long", value=1, saves="back", adds="skip"))
    cfg, found = replace(cfg, dtype="float32", polar_dtype="float32", layers=layers, slices=1), []
    for ops in (tg.PLAIN, compiled(cfg)):
        _, _, model, optimizer = build(0, 1, cfg, ops=ops)
        optimizer.step = lambda now: None
        batches = batches_of(cfg, 0, 1)
        loss = tg.train_step(model, optimizer, batches.next()).item()
        batches.close()
        found.append((loss, {name: optimizer.gradient(name) for name in optimizer.params}))
    (want, gradients), (got, compiled_gradients) = found
    assert got == pytest.approx(want, rel=1e-6) and counters["stats"]["unique_graphs"] > 5
    for name, gradient in gradients.items():
        assert (compiled_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_updates_in_machine_code(compiled):
    g, changed = torch.Generator().manual_seed(0), []
    p, grad = (torch.randn(3, 10, 8, generator=g) for _ in range(2))
    for ops in (tg.PLAIN, compiled(tg.CPU)):
        adam, m, v = p.bfloat16(), torch.zeros_like(p), torch.zeros_like(p)
        muon, momentum, second = p.clone(), torch.zeros_like(p), torch.zeros(3, 10, 1)
        for t in (1, 2):
            tg.adam_update(adam, grad * t, m, v, t, 0.01 / t, (0.5, 0.95), 1e-10, 0.5, ops)
            x = tg.normuon_direction(grad * t, momentum, second, 0.85 + t / 100, 0.9, torch.float32, ops)
            tg.normuon_update(muon, None, x, torch.full((3, 1, 1), 0.02 / t), 0.1, ops)
        changed.append((adam.float(), m, v, muon, momentum, second))
    for plain, own in zip(*changed):
        assert (own - plain).norm() <= 1e-5 * plain.norm() and plain.any()


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
