"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import sys
from pathlib import Path

import numpy as np
import pytest

import train_gpt as tg

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import projection
from projection import Model, Op


def test_time_by_hand():
    rates = dict.fromkeys(("bf16", "memory", "exchange"), 1.0)
    model = Model(**rates, kernel_us=2, collective_us=5, hidden=0.75, slowdown=2, fixed=3, launch_us=4)
    ops = [
        Op("", 8, "bf16", 989e9),  # 1 ms
        Op("", 3350000000, "bf16", 8.0),  # 1 ms
        Op("", 8),  # 2 us
        Op("", 450000000, "exchange"),  # 1.005 ms
    ]
    want = {"matmuls": 4, "attention": 0, "other": 0.004, "exchange": 1.005 / 4, "fixed": 3}
    want |= {"launches": 3 * 0.004}
    want["ms"] = sum(want.values())
    assert projection.step_ms(4 * ops, model) == pytest.approx(want)


def test_the_fit_finds_what_made_the_times():
    rng, model = np.random.default_rng(1), Model(slowdown=1.3, fixed=4.0)
    stages = [
        [Op("", 8, "bf16", n * 1e12), Op("", int(1e8 * rng.random()), "exchange")] for n in (10, 20, 40, 45)
    ]
    found = projection.calibrate(stages, [projection.step_ms(ops, model)["ms"] for ops in stages])
    assert (found.slowdown, found.fixed) == pytest.approx((1.3, 4.0))


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_the_config():
    """Checks against 6 FLOPs a weight and token, and ANVIL's on an eighth of the banks' matrices."""
    cfg, steps, (columns,) = tg.RECORD, 4, tg.RECORD.stages[1].candidates
    ops = projection.count(cfg, 1)
    tokens, d, banks = steps * cfg.stages[1].batch_tokens // 8, cfg.dim, {}
    anvil = 0.0
    for name in ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank"):
        *n, rows, cols = tg.param_shapes(cfg, 8)[name]
        small, large = sorted((rows, cols))
        grams = small * small * large + small**3  # half of a symmetric result each
        anvil += steps * 6 * np.prod(n) / 8 * (grams + 2 * small * small * large)
        banks[name] = np.prod(tg.param_shapes(cfg, 1)[name])
    assert sum(op.flops for op in ops if op.name in ("gram", "baddbmm")) == anvil
    unread = sum(layer.narrow_v for layer in cfg.layers) * d * d  # half of two matrices
    want = 6.0 * tokens * (sum(banks.values()) - unread + d * columns)
    counted = {kind: sum(op.flops for op in ops if op.kind == kind) for kind in ("bf16", "fp8")}
    # Not in it: small MLPs and gates.
    assert want < counted["bf16"] + counted["fp8"] - anvil < 1.006 * want
    assert counted["fp8"] == tokens * (2 * banks["mlp_bank"] + 6 * d * columns)


@pytest.mark.slow
def test_a_run(capsys):
    """Checks that the estimates of published times, to which the model is fitted, are near."""
    projection.main([])
    lines = capsys.readouterr().out.splitlines()
    residuals = [float(line.split()[-1][:-1]) for line in lines if line.startswith(("80 ", "92 "))]
    assert len(residuals) == 10 and max(map(abs, residuals)) < 10
    seconds = [float(line.split()[1]) for line in lines if line.startswith("total")]
    assert len(seconds) == 1 and seconds[0] > projection.PUBLISHED_92
