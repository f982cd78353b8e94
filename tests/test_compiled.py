"""torch.compile of what stands between the products, and of the updates: the same training as without, and nothing is compiled
after the warm-up."""
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters

import train_gpt as tg
from test_distributed import batches_of, build, cfg  # noqa: F401 (cfg is a fixture)


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def compiled(monkeypatch):
    """compiled(cfg, backend): a run's forms, compiled as choose_ops does it but by that backend."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)
    torch._dynamo.reset()
    counters.clear()
    yield lambda cfg, backend: tg.PLAIN._replace(  # noqa: F811
        compiled=cache(partial(torch.compile, fullgraph=True, backend=backend)),
        number=partial(torch.tensor, dtype=tg.wide_dtype(cfg)))
    torch._dynamo.reset()


def train(cfg, ops):  # noqa: F811
    """-> losses and, after each step, the graphs compiled so far; the model."""
    _, exchange, model, optimizer = build(0, 1, cfg, ops=ops)
    batches, losses, compiled_so_far = batches_of(cfg, 0, 1), [], []
    val = tg.ValLoader(cfg, tg.find_data(cfg).val, 0, 1, False)
    for _ in range(cfg.steps):
        losses.append(tg.train_step(model, optimizer, batches.next()).item())
        losses.append(tg.validate(model, val, exchange, (9, 33)))
        compiled_so_far.append(graphs())
    batches.close()
    return losses, compiled_so_far, model.state()


@pytest.mark.parametrize("main_grad", [True, False])
def test_a_compiled_run_is_the_plain_run(cfg, compiled, main_grad):  # noqa: F811
    """Through all stages and the split, as traced and differentiated by torch.compile, before code is made of it."""
    cfg = replace(cfg, main_grad=main_grad)
    want, none, state = train(cfg, tg.PLAIN)
    assert none == [0] * cfg.steps
    torch._dynamo.reset()
    got, so_far, compiled_state = train(cfg, compiled(cfg, "aot_eager"))
    print(so_far)
    assert got == pytest.approx(want, rel=1e-12)
    for name, p in state.items():
        if isinstance(p, torch.Tensor):
            torch.testing.assert_close(compiled_state[name], p, rtol=1e-11, atol=1e-12, msg=name)
