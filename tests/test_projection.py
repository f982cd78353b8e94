"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import sys
from collections import Counter
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
    model = Model(bf16=1.0, varlen=1.0, memory=1.0, exchange=1.0)
    model = model._replace(kernel_us=2, collective_us=5, hidden=0.75, slowdown=2, fixed=3)
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
    model = Model(call_us=0, launch_us=1000)
    op = Op("trunk", 8, calls=1)
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
    traffic.found = []
    traffic.batch = SimpleNamespace(micro_batches=[documents])
    traffic.add_kernel(name, tensors)
    (op,) = traffic.found
    return op


BF16, FP8 = torch.bfloat16, torch.float8_e5m2


@pytest.mark.parametrize(("dtype", "kind"), [(BF16, "bf16"), (FP8, "fp8")])
def test_flops_of_relu_square_grad(dtype, kind):
    """Its factors are (7, 4) and (4, 6): 2 * 7 * 4 * 6 FLOPs, also if it returns another layout."""
    dy = torch.empty((7, 4), dtype=dtype, device="meta")
    proj = torch.empty((6, 4), dtype=dtype, device="meta")
    square = torch.empty((7, 6), dtype=dtype, device="meta")
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
    lines = capsys.readouterr().out.splitlines()[-2:]
    before = 11.94 + 0.21
    published = 36.009 / 40.575
    for line, seconds in zip(lines, (10.50, 11.55), strict=True):
        share = (seconds + 0.21) / before
        assert line.split()[3:] == [f"{published:.4f}", f"{share:.4f}", f"{share / published - 1:+.1%}"]


def test_host_of_92_by_hand():
    """A device's 10 ms and 1194 steps; a host of 1 ms must be 10 + 3830 / 1194 times as slow."""
    of_92 = phases(*STEPS_92, ops=4 * [Op("", 0, calls=1)])
    model = Model(fixed=10.0, kernel_us=0, call_us=1000, launch_us=0)
    assert projection.host_of_92(of_92, model) == pytest.approx(10 + 3830 / 1194, abs=0.01)


def test_the_fit_finds_what_made_the_times():
    rng = np.random.default_rng(1)
    model = Model(slowdown=1.3, fixed=4.0)
    stages, times = [], []
    for n in 10, 20, 40, 45:
        ops = [Op("", 8, "bf16", n * 1e12), Op("", int(1e8 * rng.random()), "exchange")]
        stages.append(ops)
        times.append(projection.step_ms(ops, model)["device"])
    found = projection.calibrate(stages, times)
    assert (found.slowdown, found.fixed) == pytest.approx((1.3, 4.0))


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_the_config():
    """Checks against 6 FLOPs a weight and token, and ANVIL's on an eighth of the banks' matrices."""
    cfg = tg.RECORD
    steps = 4
    (columns,) = cfg.stages[1].sampled_columns
    head = cfg.dim * columns
    shapes = tg.param_shapes(cfg, 1)
    padded = tg.param_shapes(cfg, 8)
    weights = np.prod(shapes["pointer_bank"])
    anvil = 0.0
    for row in cfg.params:
        if row.kind == "bank":
            weights += np.prod(shapes[row.name])
            *n, rows, cols = padded[row.name]
            small, large = sorted((rows, cols))
            anvil += steps * 6 * np.prod(n) / 8 * 2 * (small**3 + 2 * small * small * large)
    unread = sum(layer.narrow_v for layer in cfg.layers) * cfg.dim**2  # half of two matrices

    counted = Counter()
    for op in projection.count(cfg, 1):
        counted[op.kind] += op.flops
        if op.name in ("bmm", "baddbmm"):
            counted["anvil"] += op.flops
    assert counted["anvil"] == anvil
    tokens = steps * cfg.stages[1].batch_tokens // 8
    want = 6.0 * tokens * (weights - unread + head)
    # Not in it: small MLPs and gates.
    assert want < counted["bf16"] + counted["fp8"] - anvil < 1.006 * want
    assert counted["fp8"] == 6 * tokens * (np.prod(shapes["mlp_bank"]) + head)


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
    seen = Counter()
    for line in capsys.readouterr().out.splitlines():
        words = line.split()
        if line.startswith(("80 ", "92 ", "92, ")):
            seen["record"] += 1
            assert abs(float(words[-1].rstrip("%"))) < 6
        if line.startswith("its schedule"):
            seen["schedule"] += 1
            assert abs(float(words[-1].rstrip("%"))) < 2
        if line.startswith("total"):
            seen["total"] += 1
            assert 20 < float(words[1]) < 100
    assert seen == {"record": 11, "schedule": 1, "total": 1}
