"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import sys
from pathlib import Path

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
    model, op = Model(call_us=0, launch_us=1000), Op("run_layers", 8, calls=1)
    assert projection.step_ms(4 * [op], model)["host"] == pytest.approx(146)


@pytest.mark.parametrize(
    ("kind", "tflops"), [("fa3", 346.15), ("varlen", 173.075), ("relu_square_grad", 375.82), ("bf16", 642.85)]
)
def test_rates(kind, tflops):
    assert projection.op_ms(Op("", 8, kind, tflops * 1e12), Model()) == pytest.approx(1000)


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(("dtype", "kind"), [(BF16, "relu_square_grad"), (FP8, "fp8")])
def test_flops_of_relu_square_grad(dtype, kind):
    """Its factors are (7, 4) and (4, 6): 2 * 7 * 4 * 6 FLOPs, also if it returns another layout."""
    dy, proj, square = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((7, 4), (6, 4), (7, 6)))
    traffic = projection.Traffic()
    traffic.found = []
    traffic.add_kernel("relu_square_grad", ((dy, proj, square), (square, square.T.contiguous())))
    (op,) = traffic.found
    assert (op.kind, op.flops) == (kind, 336)


@pytest.mark.parametrize(("dtype", "share"), [(BF16, 2 / 3), (FP8, 1)])
def test_logits_of_a_byte_need_no_technique(dtype, share):
    logits, grad = (torch.empty(4, 6, dtype=t, device="meta") for t in (dtype, FP8))
    traffic = projection.Traffic()
    traffic.found = []
    traffic.add_kernel("softcap_loss", (logits, grad))
    (before,), (after,) = traffic.found, projection.apply(traffic.found, ["FP8 logits"])
    assert after.nbytes == share * before.nbytes


@pytest.mark.parametrize(
    ("name", "kind", "part", "want"),
    [
        ("FlashAttention-3", "varlen", "", "fa3"),
        ("FlashAttention-3", "fa3", "", "fa3"),
        ("FlashAttention-3", "bf16", "", "bf16"),
        ("relu_square_grad's tile", "relu_square_grad", "MLP backward", "bf16"),
        ("FP8 of QKV", "bf16", "QKV", "fp8"),
        ("FP8 of QKV", "bf16", "MLP backward", "bf16"),
        ("FP8 in the MLPs' backward", "bf16", "MLP backward", "fp8"),
        ("FP8 in the MLPs' backward", "relu_square_grad", "MLP backward", "fp8"),
        ("FP8 in the MLPs' backward", "fp8", "MLP backward", "fp8"),
        ("FP8 in the MLPs' backward", "bf16", "QKV", "bf16"),
    ],
)
def test_techniques_by_hand(name, kind, part, want):
    op = Op("", 8, kind, 9.0, part)
    assert projection.apply([op], [name]) == [op._replace(kind=want)]


def test_pointer_by_hand():
    phase = projection.Phase(0, 8, 5, [], 100.0)
    model = Model(slowdown=1, fixed=0, kernel_us=0)
    ms = projection.step_ms(projection.with_pointer(phase, 2000).ops, model)
    assert ms["matmuls"] == pytest.approx(2000 * 1.18e6 / (0.65 * 989e9))
    assert ms["attention"] == pytest.approx(2000 * 1280 * 100 / (0.175 * 989e9))


def phases_of_92(sources: float = 0.0) -> list[projection.Phase]:
    """Returns its steps by phase, without launches."""
    steps, columns = (320, 361, 284, 142, 67, 20), 8
    return [projection.Phase(i, columns, n, [], sources) for i, n in zip((0, 1, 2, 2, 3, 4), steps)]


def test_steps_of_pr_379():
    """Checks the phases' steps by its stages: 279, 314, 378 of which 126 have more columns, 59, 20."""
    assert sum(phase.steps for phase in phases_of_92()) == tg.RECORD.steps
    assert projection.STEPS_379 == (279, 314, 378 - 126, 126, 59, 20) and sum(projection.STEPS_379) == 1050


def test_share_of_pr_379_by_hand(capsys):
    """Each step takes 10 ms: the schedule's share is that of its steps, endings included.

    The pointer adds its products for 289.5M tokens, on 8 GPUs, whatever attention record 92 has.
    """
    projection.print_379(phases_of_92(500.0), Model(fixed=10.0, kernel_us=0))
    schedule, pointer = (line.split()[3:] for line in capsys.readouterr().out.splitlines()[-2:])
    before, after, published = 11.94 + 0.21, 10.50 + 0.21, 36.009 / 40.575
    assert schedule == [f"{share:.4f}" for share in (published, after / before)] + [
        f"{after / before / published - 1:+.1%}"
    ]
    after += 289.5e6 / 8 * (1.18e6 / (0.65 * 989e12) + 500 * 1280 / (0.175 * 989e12))
    assert float(pointer[1]) == pytest.approx(after / before, abs=2e-4)


def test_host_of_92_by_hand():
    """A device's 10 ms and 1194 steps; a host of 1 ms must be 10 + 3830 / 1194 times as slow."""
    ops = 4 * [Op("", 0, calls=1)]
    phases = [phase._replace(ops=ops) for phase in phases_of_92()]
    model = Model(fixed=10.0, kernel_us=0, call_us=1000, launch_us=0)
    assert projection.host_of_92(phases, model) == pytest.approx(10 + 3830 / 1194, abs=0.01)


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
    counted = {kind: sum(op.flops for op in ops if op.kind == kind) for kind in projection.PEAKS}
    of_weights = sum(counted[kind] for kind in ("bf16", "relu_square_grad", "fp8")) - anvil
    # Not in it: small MLPs and gates.
    assert want < of_weights < 1.006 * want
    assert counted["fp8"] == tokens * (2 * banks["mlp_bank"] + 6 * d * columns)


@pytest.mark.slow
def test_a_run(capsys):
    """Checks that the estimates of published times, to which the model is fitted, are near.

    Also that FlashAttention-3 as a setting saves what it saves as a technique.
    """
    projection.main(["--what-if", "attention_impl=fa3"])
    lines = capsys.readouterr().out.splitlines()
    residuals = [float(line.split()[-1][:-1]) for line in lines if line.startswith(("80 ", "92 ", "92, "))]
    assert len(residuals) == 11 and max(map(abs, residuals)) < 6
    (share,) = (line for line in lines if line.startswith("its schedule"))
    assert abs(float(share.split()[-1][:-1])) < 2
    seconds = [float(line.split()[1]) for line in lines if line.startswith("total")]
    assert len(seconds) == 2 and seconds[0] > seconds[1] > projection.PUBLISHED_92
    (fa3,) = (line for line in lines if line.startswith("FlashAttention-3"))
    (change,) = (line for line in lines if line.startswith("change"))
    assert fa3.split()[-1] == change.split()[1]
