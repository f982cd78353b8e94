"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt as tg

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import projection
from projection import Model, Op


def test_time_by_hand():
    rates = dict.fromkeys(("bf16", "varlen", "memory", "exchange"), 1.0)
    model = Model(**rates, kernel_us=2, collective_us=5, hidden=0.75, slowdown=2, fixed=3)
    model = model._replace(call_us=4000, launch_us=1000, host=0.5)
    ops = [
        Op("", 8, "bf16", 989e9),  # 1 ms
        Op("", 3350000000, "varlen", 8.0),  # 1 ms
        Op("", 8, calls=3),  # 2 us
        Op("", 450000000, "exchange"),  # 1.005 ms
    ]
    want = {"matmuls": 2, "attention": 2, "other": 0.004, "exchange": 1.005 / 4, "fixed": 3}
    want |= {"device": sum(want.values()), "host": 0.5 * (3 * 4 + 3)}
    want["ms"] = want["host"]
    assert projection.step_ms(4 * ops, model) == pytest.approx(want)
    assert projection.step_ms(4 * ops, projection.with_graphs(model))["ms"] == pytest.approx(want["device"])


def test_the_layers_launch_more_kernels_than_are_listed():
    model, op = Model(call_us=0, launch_us=1000), Op("trunk", 8, calls=1)
    assert projection.step_ms(4 * [op], model)["host"] == pytest.approx(146)


@pytest.mark.parametrize(
    ("kind", "tflops"), [("fa3", 346.15), ("varlen", 173.075), ("pointer", 173.075), ("bf16", 642.85)]
)
def test_rates(kind, tflops):
    assert projection.op_ms(Op("", 8, kind, tflops * 1e12), Model()) == pytest.approx(1000)


def kernel(name: str, tensors: Any, **settings) -> Op:
    """Returns what is listed of a kernel's launch, for documents of 1, 2 and 5 tokens."""
    traffic = projection.Traffic(replace(tg.RECORD, **settings))
    documents = SimpleNamespace(cu_seqlens=torch.tensor([0, 1, 3, 8]))
    traffic.found, traffic.batch = [], SimpleNamespace(micro_batches=[documents])
    traffic.add_kernel(name, tensors)
    (op,) = traffic.found
    return op


BF16, FP8 = torch.bfloat16, torch.float8_e5m2


@pytest.mark.parametrize(("dtype", "kind"), [(BF16, "bf16"), (FP8, "fp8")])
def test_flops_of_relu_square_grad(dtype, kind):
    """Its factors are (7, 4) and (4, 6): 2 * 7 * 4 * 6 FLOPs, also if it returns another layout."""
    dy, proj, square = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((7, 4), (6, 4), (7, 6)))
    op = kernel("relu_square_grad", ((dy, proj, square), (square, square.T.contiguous())))
    assert (op.kind, op.flops) == (kind, 336)


@pytest.mark.parametrize(("window", "pairs"), [(9, 0 + 1 + 10), (2, 0 + 1 + 7)])
def test_flops_of_the_pointer(window, pairs):
    """Queries see earlier tokens of their documents, within the window. A gradient has two products."""
    queries = torch.empty(8, 16, dtype=BF16, device="meta")
    for name, products in ("pointer", 1), ("pointer_grad", 2):
        op = kernel(name, (queries, queries, 8, 16), pointer_window=window)
        assert (op.kind, op.flops) == ("pointer", pytest.approx(2 * products * 16 * pairs))


@pytest.mark.parametrize(
    ("name", "kind", "part", "want"),
    [
        ("FlashAttention-3", "varlen", "", "fa3"),
        ("FlashAttention-3", "fa3", "", "fa3"),
        ("FlashAttention-3", "pointer", "", "pointer"),
        ("FP8 of QKV", "bf16", "QKV", "fp8"),
        ("FP8 of QKV", "bf16", "backward", "bf16"),
    ],
)
def test_techniques_by_hand(name, kind, part, want):
    op = Op("", 8, kind, 9.0, part)
    assert projection.TECHNIQUES[name](op) == op._replace(kind=want)


def phases(*steps: int, ops: Sequence[Op] = ()) -> list[projection.Phase]:
    return [projection.Phase(i, 8, n, list(ops)) for i, n in enumerate(steps)]


STEPS_92 = 320, 361, 284, 142, 67, 20


def test_share_of_pr_379_by_hand(capsys):
    """Each step takes 10 ms, and 1 ms more with the pointer; the seconds of averages count too."""
    pointer = 4 * [Op("pointer", 8, "pointer", 0.175 * 989e9)]
    of_379 = phases(279, 314, 252, 126, 59, 20, ops=pointer)
    projection.print_379(of_379, phases(*STEPS_92), Model(fixed=10.0, kernel_us=0))
    found = [line.split()[3:] for line in capsys.readouterr().out.splitlines()[-2:]]
    before, published = 11.94 + 0.21, 36.009 / 40.575
    shares = [(10.50 + 0.21) / before, (11.55 + 0.21) / before]
    assert found == [
        [f"{published:.4f}", f"{share:.4f}", f"{share / published - 1:+.1%}"] for share in shares
    ]


def test_host_of_92_by_hand():
    """A device's 10 ms and 1194 steps; a host of 1 ms must be 10 + 3830 / 1194 times as slow."""
    of_92 = phases(*STEPS_92, ops=4 * [Op("", 0, calls=1)])
    model = Model(fixed=10.0, kernel_us=0, call_us=1000, launch_us=0)
    assert projection.host_of_92(of_92, model) == pytest.approx(10 + 3830 / 1194, abs=0.01)


def test_the_fit_finds_what_made_the_times():
    rng, model = np.random.default_rng(1), Model(slowdown=1.3, fixed=4.0)
    stages = [
        [Op("", 8, "bf16", n * 1e12), Op("", int(1e8 * rng.random()), "exchange")] for n in (10, 20, 40, 45)
    ]
    found = projection.calibrate(stages, [projection.step_ms(ops, model)["device"] for ops in stages])
    assert (found.slowdown, found.fixed) == pytest.approx((1.3, 4.0))


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_the_config():
    """Checks against 6 FLOPs a weight and token, and ANVIL's on an eighth of the banks' matrices."""
    cfg, steps, (columns,) = tg.RECORD, 4, tg.RECORD.stages[1].sampled_columns
    ops = projection.count(cfg, 1)
    tokens, d, banks = steps * cfg.stages[1].batch_tokens // 8, cfg.dim, {}
    anvil = 0.0
    for name in ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank"):
        *n, rows, cols = tg.param_shapes(cfg, 8)[name]
        small, large = sorted((rows, cols))
        anvil += steps * 6 * np.prod(n) / 8 * 2 * (small**3 + 2 * small * small * large)
        banks[name] = np.prod(tg.param_shapes(cfg, 1)[name])
    assert sum(op.flops for op in ops if op.name in ("bmm", "baddbmm")) == anvil
    unread = sum(layer.narrow_v for layer in cfg.layers) * d * d  # half of two matrices
    pointer = np.prod(tg.param_shapes(cfg, 1)["pointer_bank"])
    want = 6.0 * tokens * (sum(banks.values()) + pointer - unread + d * columns)
    counted = {kind: sum(op.flops for op in ops if op.kind == kind) for kind in projection.PEAKS}
    of_weights = sum(counted[kind] for kind in ("bf16", "fp8")) - anvil
    # Not in it: small MLPs and gates.
    assert want < of_weights < 1.006 * want
    assert counted["fp8"] == 6 * tokens * (banks["mlp_bank"] + d * columns)


@pytest.mark.slow
def test_flash_attention_3_as_a_setting_saves_what_it_saves_as_a_technique():
    varlen = projection.count(replace(tg.RECORD, attention_impl="varlen"), 1)
    fa3 = projection.count(replace(tg.RECORD, attention_impl="fa3"), 1)
    technique = projection.TECHNIQUES["FlashAttention-3"]
    changed = [technique(op) for op in varlen]
    assert "fa3" in {op.kind for op in changed}
    assert projection.step_ms(changed, Model()) == pytest.approx(projection.step_ms(fa3, Model()))


@pytest.mark.long
@pytest.mark.slow
def test_a_run(capsys):
    """Checks that the estimates of published times, to which the model is fitted, are near."""
    projection.main([])
    lines = capsys.readouterr().out.splitlines()
    residuals = [float(line.split()[-1][:-1]) for line in lines if line.startswith(("80 ", "92 ", "92, "))]
    assert len(residuals) == 11 and max(map(abs, residuals)) < 6
    (share,) = (line for line in lines if line.startswith("its schedule"))
    assert abs(float(share.split()[-1][:-1])) < 2
    (seconds,) = (float(line.split()[1]) for line in lines if line.startswith("total"))
    assert 20 < seconds < 100
