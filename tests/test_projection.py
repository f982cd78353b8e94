"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import json
import subprocess
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
from golden_inputs import RECORD92

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import measured
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


@pytest.mark.pinned("the record preset")
def test_record_92_has_its_steps():
    assert sum(STEPS_92) == projection.RECORD92.steps
    assert projection.RECORD92 == RECORD92


def test_it_starts_without_the_tests():
    """As a program of its own it finds none of their modules."""
    program = Path(projection.__file__)
    subprocess.run([sys.executable, program, "--help"], check=True, capture_output=True)


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


def test_the_fit_finds_what_made_the_times():
    rng = np.random.default_rng(1)
    model = Model(slowdown=1.3, fixed=4.0)
    stages, times = [], []
    for n in 10, 20, 40, 45:
        ops = [Op("", 8, "bf16", n * 1e12), Op("", int(1e8 * rng.random()), "exchange")]
        stages.append(ops)
        times.append(projection.step_ms(ops, model)["device"])
    found = projection.calibrate(stages, times, Model())
    assert (found.slowdown, found.fixed) == pytest.approx((1.3, 4.0))


# ---- measured rates ----------------------------------------------------------------------------------------


def measured_row(what, seen, ms=(), numbers=None):
    return {
        "what": what,
        "seen": seen,
        "ms": list(ms),
        "operation": what.split()[0],
        "numbers": numbers or {},
    }


def measurements(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ({"call": ["--only", "times"]}, *rows)]
    path.write_text("\n".join(lines) + "\n")
    return measured.Measurements([path])


def test_rates_of_rows(tmp_path):
    """Rates between two sizes are interpolated, outside they stay; of a shape's two rows the last counts."""
    rows = measurements(
        tmp_path,
        measured_row("copies", "3010 GB/s, read and written"),
        measured_row("softcap_loss 4 x 10, 1 targets, bfloat16", "9.0 ms; 9 GB/s", (9.0, 10.0)),
        measured_row("softcap_loss 4 x 10, 1 targets, e5m2", "5.0 ms; 100 GB/s", (5.0, 10.0)),
        measured_row("softcap_loss 4 x 10, 1 targets, e5m2", "1.0 ms; 1000 GB/s", (1.0, 10.0)),
        measured_row("softcap_loss 8 x 10, 1 targets, e5m2", "1.5 ms; 2000 GB/s", (1.5, 10.0)),
        measured_row("both_layouts 4 x 4", "1.0 ms; 500 GB/s", (1.0, 10.0)),
        measured_row("fp8 logits", "2 ms", numbers={"kind": "fp8", "flops": 1e12, "ms": 2.0}),
        measured_row("times of fa3", "not checked: it cannot be used"),
    )
    assert rows.copies == 3010e9
    assert rows.ms("softcap_loss", 1e9) == pytest.approx(1.0)
    assert rows.ms("softcap_loss", 2e9) == pytest.approx(2e9 / 1.5e9)
    assert rows.ms("softcap_loss", 6e9) == pytest.approx(3.0)
    assert rows.ms("cast_and_transpose", 5e8) == pytest.approx(1.0)
    assert rows.ms("fp8", 5e11) == pytest.approx(1.0)
    assert rows.ms("fa3", 1.0) == 0
    assert rows.source("softcap_loss", 0).split()[1:] == ["1", "to", "2,", "measured"]
    assert rows.source("memory", 3.01e12).split()[1:] == ["3.01,", "measured"]
    assert rows.source("bf16", 643e12).split()[1:] == ["643,", "assumed"]


def test_measured_times_are_not_slowed_down(tmp_path):
    rows = measurements(tmp_path, measured_row("softcap_loss 4", "1.0 ms; 1000 GB/s", (1.0, 10.0)))
    ops = 4 * [Op("softcap_loss", int(2e9)), Op("", 8, "bf16", 0.65 * 989e9)]
    found = projection.step_ms(ops, Model(slowdown=3.0, kernel_us=0, measured=rows))
    assert (found["other"], found["matmuls"]) == pytest.approx((2.0, 3.0))


def test_attention_by_the_rate_of_forward_and_backward(tmp_path):
    """A layer of 64 GFLOP as measured counts 7 products of 64 / 6; narrow queries fill 3/4 of a forward."""
    row = measured_row("attention stage 0", "2.0 ms; 32 TFLOP/s", (2.0, 10.0))
    rows = measurements(tmp_path, row)
    product = 64e9 / 6
    forward = Op("_varlen_attn", 8, "varlen", 2 * product)
    backward = Op("_varlen_attn_backward", 8, "varlen", 5 * product)
    both = projection.measured_ms(forward, rows) + projection.measured_ms(backward, rows)
    assert both == pytest.approx(2.0)
    narrow = forward._replace(part="narrow attention")
    assert projection.measured_ms(narrow, rows) == pytest.approx(
        projection.measured_ms(forward, rows) * 3 / 4
    )


def test_savings_by_hand():
    """Each works on its own operations only, and makes none slower."""
    names = {
        "MLPs' first products at 1000 TFLOP/s": (Op("relu_square_fp8", 8, "fp8", 1e12), 2.0, 1.0),
        "40 passes over streams less": (Op("trunk", 8), 98.0, 86.0),
        "the head's loss at 60 % of a copy": (Op("softcap_loss", int(1.8e9)), 2.0, 1.0),
        "banks' products two at once": (Op("bmm", 8, "bf16", 1e9), 2.0, 1.0),
        "sums of rows at 60 % of a copy": (Op("segment_sum_rows", int(3.6e9)), 1.0, 1.0),
        "3/4 of collectives hidden, not 1/2": (Op("all_gather a", 8, "exchange"), 2.0, 1.0),
    }
    assert list(names) == list(measured.SAVINGS)
    for name, (own, before, after) in names.items():
        for other, saving in measured.SAVINGS.items():
            assert saving(own, before) == pytest.approx(after if other == name else before), (name, other)


def test_the_second_projection_finds_the_measured_steps(tmp_path, capsys):
    """Two stages of 20 and 40 ms, whose products are assumed to take 5 and 10 ms; exchange comes on top."""
    steps = {0: (20.0, 30.0), 1: (40.0, 30.0)}
    rows = []
    for stage, (device, host) in steps.items():
        name = ("one rank of 8", "plain")[stage]  # as the steps `times` and `launches` of check.py call it
        rows.append(measured_row(f"stage {stage}, {name}", "", numbers={"device": device, "host": host}))
    found = measurements(tmp_path, measured_row("copies", "3000 GB/s"), *rows)
    phases = []
    for stage, n in enumerate((5, 10)):
        ops = [Op("", 8, "bf16", n * 0.65 * 989e9), Op("all", int(2 * 0.8 * 450e6), "exchange")]
        phases.append(projection.Phase(stage, 8, 100, 4 * ops))
    model = projection.fit_measured(phases, found)
    assert (model.slowdown, model.fixed) == pytest.approx((4.0, 0.0))
    graphs = projection.with_graphs(model)._replace(collective_us=0)
    assert projection.run_seconds(phases, graphs) == pytest.approx(2.1 + 4.1 + 0.21)
    assert "memory" in capsys.readouterr().out


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
        if words[:1] in (["0"], ["1"], ["2"], ["3"]):  # the measured device's ms of a stage
            seen["stage"] += 1
            assert abs(float(words[-1].rstrip("%"))) < 6
    assert seen == {"record": 11, "schedule": 1, "total": 3, "stage": 4}


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.jsonl", "No such file"), ("a.txt", "a.txt has no rows"), ("a.jsonl", "rows lack copies")],
)
def test_what_holds_no_rows_is_refused_at_once(name, message, tmp_path):
    (tmp_path / "a.txt").write_text("ok  softcap_loss")
    (tmp_path / "a.jsonl").write_text('{"call": []}\n')
    with pytest.raises(SystemExit, match=message):
        projection.main(["--measured", str(tmp_path / name)])
