"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import measured
import projection
import train_gpt as tg
from golden_inputs import RECORD92
from projection import Model, Op


def test_time_by_hand():
    peaks = Model(bf16=1.0, varlen=1.0, memory=1.0, exchange=1.0)
    model = peaks._replace(
        kernel_us=2, collective_us=5, hidden=0.75, slowdown=2, fixed=3, call_us=4000, launch_us=1000, host=0.5
    )
    ops = [
        Op("", 8, "bf16", 989e9),  # 1 ms
        Op("", 3350000000, "varlen", 8.0),  # 1 ms
        Op("trunk", 8, calls=3),  # 2 us; its code has 145 kernels more than are listed
        Op("", 450000000, "exchange"),  # 1.005 ms
    ]
    want = {"matmuls": 2, "attention": 2, "other": 0.004, "exchange": 1.005 / 4, "fixed": 3}
    want |= {"device": sum(want.values()), "host": 0.5 * (3 * 4 + 3 + 145)}
    want["ms"] = want["host"]
    assert projection.step_ms(4 * ops, model) == pytest.approx(want)
    assert projection.step_ms(4 * ops, projection.with_graphs(model))["ms"] == pytest.approx(want["device"])


def test_flops_of_the_pointer():
    """Queries see 0, 1 and 7 earlier tokens in all. A gradient has two products."""
    traffic = projection.Traffic(replace(tg.RECORD, pointer_window=2))
    traffic.found = []
    documents = SimpleNamespace(cu_seqlens=torch.tensor([0, 1, 3, 8]))
    traffic.batch = SimpleNamespace(micro_batches=[documents])
    queries = torch.empty(8, 16, device="meta")
    for name in "pointer", "pointer_grad":
        traffic.add_kernel(name, (queries, queries, 8, 16))
    product = 2 * 16 * (0 + 1 + 7)
    assert [op.flops for op in traffic.found] == pytest.approx([product, 2 * product])


@pytest.mark.pinned("the record preset")
def test_record_92_is_the_golden_one():
    assert projection.RECORD92 == RECORD92


# ---- measured rates ----------------------------------------------------------------------------------------


def measured_row(what, seen="", ms=(), numbers=()):
    return {"what": what, "seen": seen, "ms": ms, "operation": what.split()[0], "numbers": dict(numbers)}


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
        measured_row("fp8 logits", numbers={"kind": "fp8", "flops": 1e12, "ms": 2.0}),
        measured_row("times of fa3", "not checked: it cannot be used"),
    )
    assert rows.copies == 3010e9
    found = [rows.ms("softcap_loss", nbytes) for nbytes in (1e9, 2e9, 6e9)]
    assert found == pytest.approx([1.0, 2e9 / 1.5e9, 3.0])
    assert rows.ms("fp8", 5e11) == pytest.approx(1.0)
    assert rows.ms("fa3", 1.0) == 0


def test_the_second_projection_finds_the_measured_steps(tmp_path, capsys):
    """Two stages of 20 and 35 ms, whose products are assumed to take 5 and 10 ms; exchange comes on top.

    Both have 1 ms of a measured kernel, which is not slowed down.
    """
    found = measurements(
        tmp_path,
        measured_row("copies", "3000 GB/s"),
        measured_row("softcap_loss 4", "1.0 ms; 1000 GB/s", (1.0, 10.0)),
        measured_row("stage 0, one rank of 8", numbers={"device": 20.0, "host": 30.0}),
        measured_row("stage 1, plain", numbers={"device": 35.0, "host": 30.0}),
    )
    phases = []
    for stage, n in enumerate((5, 10)):
        ops = [Op("", 8, "bf16", n * 0.65 * 989e9), Op("softcap_loss", int(1e9))]
        ops.append(Op("all", int(2 * 0.8 * 450e6), "exchange"))
        phases.append(projection.Phase(stage, 8, 100, 4 * ops))
    model = projection.fit_measured(phases, found)
    assert (model.slowdown, model.fixed) == pytest.approx((3.0, 4.0))
    graphs = projection.with_graphs(model)._replace(collective_us=0)
    assert projection.run_seconds(phases, graphs) == pytest.approx(2.1 + 3.6 + 0.21)
    assert "1 to 1, measured" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.pinned("the MLPs, whose products are in FP8,")
def test_flops_of_a_step_are_those_of_the_config():
    """Checks the products in FP8 of four steps of a rank of 8: 6 FLOPs a weight and token."""
    cfg = tg.RECORD
    stage = cfg.stages[1]
    (columns,) = stage.sampled_columns
    weights = np.prod(tg.param_shapes(cfg, 1)["mlp_bank"]) + cfg.dim * columns
    flops = sum(op.flops for op in projection.count(cfg, 1) if op.kind == "fp8")
    assert flops == 4 * stage.batch_tokens // 8 * 6 * weights


@pytest.mark.long
def test_a_run(capsys):
    """Checks that the estimates of published times, to which the model is fitted, are near."""
    projection.main([])
    # By the rows' first words: the percent that an estimate may be off.
    bounds = {"80": 6, "92": 6, "92,": 6, "its": 2, "0": 6, "1": 6, "2": 6, "3": 6}
    seen = 0
    for line in capsys.readouterr().out.splitlines():
        first, *_, last = line.split() or [""] * 2
        if first in bounds:
            seen += 1
            assert abs(float(last.rstrip("%"))) < bounds[first], line
    assert seen == 16


@pytest.mark.parametrize(
    "name, message",
    [("none.jsonl", "there is no /"), ("a.txt", "a.txt has no rows"), ("a.jsonl", "rows lack copies")],
)
def test_what_holds_no_rows_is_refused_at_once(name, message, tmp_path):
    (tmp_path / "a.txt").write_text("ok  softcap_loss")
    (tmp_path / "a.jsonl").write_text('{"call": []}\n')
    with pytest.raises(SystemExit, match=message):
        projection.main(["--measured", str(tmp_path / name)])
