"""Compares compiled training with plain: the code between products, and the updates.

Each kind of layer and of update compiles once, and nothing compiles after the warm-up.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import train_gpt as tg
from gpu_code import SingleRankExchange
from test_distributed import build, few_layers, run_steps  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

WINDOWS = {"short": 9, "long": 33}


@pytest.fixture(scope="module")
def cfg(few_layers):  # noqa: F811
    """Returns a config with two layers of one kind."""
    *layers, last = few_layers.layers
    twins = (replace(last, value=value, connections=False) for value in (1, 2))
    return replace(few_layers, layers=(*layers, *twins, replace(last, value=True)))


@pytest.fixture
def compile(monkeypatch):
    """Returns compile(**arguments): from its call on torch.compile compiles the script's functions.

    Before it they are plain.
    """
    # Torch's cache does not distinguish vectors of 16 numbers from those of 8: code compiled under another
    # ATEN_CPU_CAPABILITY would be used here, and compute NaN.
    capability = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(default_cache_dir(), capability))

    def compile(**arguments):
        compiler = cache(partial(torch.compile, fullgraph=True, **arguments))
        monkeypatch.setattr(tg.compiled, "compiler", compiler)

    monkeypatch.setattr(tg.compiled, "compiler", None)
    with torch._dynamo.config.patch(recompile_limit=64):
        torch._dynamo.reset()
        counters.clear()
        yield compile
        torch._dynamo.reset()


def train(cfg):
    """Trains a run; returns losses, the number of compiled graphs after each step, the model's tensors."""
    exchange, model, optimizer = build(0, 1, cfg)
    model.prefixes.copy_(torch.arange(cfg.padded_vocab) - 9).clamp_min_(-1)
    losses, graphs = [], []
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    for _, loss in run_steps(model, optimizer):
        losses += [loss.item(), tg.validate(model, val, exchange, WINDOWS)]
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs, model.state_dict()


def test_a_compiled_run_is_the_plain_run(cfg, compile):
    """Trains through all stages and untying: torch.compile traces and differentiates, generates no code.

    Shapes change with the stages. Rates, windows and momentum change with every step and compile nothing.
    """
    want, no_graphs, tensors = train(cfg)
    compile(backend="aot_eager")
    losses, graphs, compiled_tensors = train(cfg)
    assert no_graphs == [0] * cfg.steps
    assert losses == pytest.approx(want, rel=1e-12)
    for name, t in tensors.items():
        torch.testing.assert_close(compiled_tensors[name], t, rtol=1e-11, atol=1e-12, msg=name)
    # Steps 0 and 1 update banks and Adam's parameters for the first time. Step 2 has another length; from
    # then on lengths are dynamic. embed's own update in step 7 has the shape of another table's.
    assert 0 < graphs[0] < graphs[1] < graphs[2] == graphs[-1] < 115


def test_nothing_is_traced_after_the_warm_up(cfg, compile, monkeypatch):
    """Trains as rank 0 of 8: warm-up, training, validation. As on a GPU, the backward has a thread."""
    torch_compile, backward, warm_up, warm = torch.compile, torch.autograd.backward, tg.warm_up, []
    cfg = replace(cfg, compile=True, microbatches=8, val_every=3, val_slices=8, val_slice_tokens=48)

    def compile_without_code(function, options, **more):
        return torch_compile(function, backend="aot_eager", **more)

    def counting_warm_up(*args):
        warm_up(*args)
        warm.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(torch, "compile", compile_without_code)
    monkeypatch.setattr(tg, "warm_up", counting_warm_up)
    ranks = [SingleRankExchange(0, 8) for _ in range(2)]
    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(
            torch.autograd, "backward", lambda *roots: thread.submit(backward, *roots).result()
        )
        tg.train(cfg, tg.TORCH_BACKEND, *ranks, tg.open_dataset(cfg), 0, tg.RunLog())
    assert warm == [counters["stats"]["unique_graphs"]] and warm[0] > 9


def test_updates_in_generated_code(compile):
    cfg, g, results = replace(tg.CPU, bank_wd=5.0, rails_step=2), torch.Generator().manual_seed(0), []
    start, grad = (torch.randn(3, 10, 8, generator=g) for _ in range(2))
    plans = [tg.plan_step(cfg, t)._replace(lr_mul=1 / t, momentum=0.85 + t / 100) for t in (1, 2)]
    rows = {row.name: row for row in cfg.params}
    for prepare in (lambda: None, compile):
        prepare()
        results.append([])
        for row, p in ((rows["embed"], start.bfloat16()), (rows["mlp_bank"], start.clone())):
            rule = tg.OPTIMIZERS[row.optimizer]
            state = rule.init(p, row, torch.float32, 0)
            for t, plan in enumerate(plans, 1):
                rule.update(p, grad * t, state, row, plan, cfg, tg.TORCH_BACKEND)
            results[-1] += [p.float(), *(t for t in state.values() if isinstance(t, torch.Tensor))]
    assert counters["stats"]["unique_graphs"] > 2
    for plain, generated in zip(*results):
        assert (generated - plain).norm() <= 1e-5 * plain.norm() and plain.any()


def test_mantissas_in_generated_code(compile):
    """Updates bf16 weights with their mantissas: to fp32's rounding as the plain update."""
    g, results = torch.Generator().manual_seed(0), []
    high, x = (torch.randn(2, 8, 6, generator=g).bfloat16() for _ in range(2))
    low = torch.randint(0, 65536, (2, 8, 6), generator=g).to(torch.uint16)
    lr, slow = torch.tensor([[[0.02]], [[0.04]]]), torch.randn(2, 8, 6, generator=g)
    for prepare in (lambda: None, compile):
        prepare()
        p, mantissa = high.clone(), low.clone()
        tg.anvil_update(p, mantissa, x, slow, lr, torch.tensor(1.0), torch.tensor(0.1))
        assert not torch.equal(p, high)
        results.append(tg.merge_mantissa(p, mantissa))
    assert counters["stats"]["unique_graphs"] == 1
    plain, generated = results
    assert ((generated - plain).abs() <= 2**-22 * plain.abs()).all()  # one may fuse a product
