"""Tests bench/projection.py: its counts against closed formulas, its model, and a run of it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as tg

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import launches
import projection
from projection import Model, Op

T, D, F = 96, 32, 80
N = 2 * T * D  # bytes of (T, D) in bf16


def meta(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


def operations(run, batch=None):
    """Returns what run(backend) launches."""
    traffic = projection.Traffic()
    traffic.batch = batch
    backend = launches.make_backend(tg.RECORD, traffic)
    with (
        launches.patched(torch, _scaled_mm=launches.gpu_code.scaled_mm),
        launches.patched(tg.compiled, compiler=traffic.as_compiled),
        traffic,
    ):
        run(backend)
    return traffic.ops


def flops(ops):
    """Returns FLOPs by kind."""
    kinds = {op.kind for op in ops if op.flops}
    return {kind: sum(op.flops for op in ops if op.kind == kind) for kind in kinds}


@pytest.mark.parametrize(
    "matmul, kind, products, entries",
    [
        (lambda a, b: torch.mm(a, b, out=meta(T, F)), "bf16", 1, T * D + D * F + T * F),
        (lambda a, b: torch.addmm(meta(F), a, b), "bf16", 1, F + T * D + D * F + T * F),
        (lambda a, b: a.float() @ b.float(), "fp32", 1, 2 * (T * D + D * F + T * F)),
        (lambda a, b: a.expand(3, T, D) @ b.expand(3, D, F), "bf16", 3, T * D + D * F + 3 * T * F),
    ],
)
def test_matmuls(matmul, kind, products, entries):
    *_, op = operations(lambda _: matmul(meta(T, D), meta(D, F)))
    assert (op.kind, op.flops, op.nbytes) == (kind, products * 2 * T * D * F, 2 * entries)


@tg.compiled
def pointwise(x, y):
    return x * y + x.square()


@tg.compiled
def looked_up(x, rows):
    return x[rows] * 2


@tg.compiled
def projected_and_kept(x, y):
    doubled = 2 * x
    return doubled @ y.T, doubled + 1


RAILS = meta(T, D, dtype=torch.float32), meta(T, D, dtype=torch.float32)


@pytest.mark.parametrize(
    "function, args, want",
    [
        (pointwise, (meta(T, D), meta(T, D)), [3 * N]),
        (tg.compiled(torch.Tensor.add_), (meta(T, D), meta(T, D)), [3 * N]),
        (looked_up, (meta(5000, D), meta(T, dtype=torch.int64)), [8 * T + 2 * N]),
        (projected_and_kept, (meta(T, D), meta(F, D)), [3 * N, N + 2 * F * D + 2 * T * F]),
        (tg.transpose_copy, (meta(D, T), meta(T, D)), [2 * N]),
        # Two fp32 rails, read and written; the gradient, read; its momentum, written.
        (tg.mix_rails, (meta(T, D), *RAILS, 0.02, 0.1, 0.4, 0.9, torch.bfloat16), [N + 4 * 2 * N + N]),
    ],
)
def test_bytes_of_compiled_code(function, args, want):
    ops = operations(lambda _: function(*args))
    assert sorted(op.nbytes for op in ops) == sorted(want)


def test_a_backward_computes_again_what_it_needs():
    def run(_):
        x, y = meta(T, D, requires_grad=True), meta(T, D, requires_grad=True)
        tg.compiled(lambda x, y: x * y.float().sigmoid())(x, y).sum().backward()

    forward, *_, backward = (op.nbytes for op in operations(run))
    assert forward == 2 * N + 2 * N  # two inputs, and a result in fp32
    assert backward == 2 * N + 4 + 2 * N  # the inputs, one gradient for all results, two gradients


@pytest.mark.parametrize("in_fp8", [False, True])
def test_flops_of_an_mlp(in_fp8):
    fp8 = [meta(F, D, dtype=torch.float8_e4m3fn), meta(D, F, dtype=torch.float8_e4m3fn)]
    scales = [meta(1, dtype=torch.float32)[0] for _ in range(4)]
    weights = tg.FP8MLP(*fp8, *scales) if in_fp8 else None

    def run(backend):
        h, fc, proj = (meta(n, D, requires_grad=True) for n in (T, F, F))
        tg.mlp(h, tg.WeightSlice(fc), tg.WeightSlice(proj), weights, backend).backward(meta(T, D))

    forward, backward = 4.0 * T * D * F, 8.0 * T * D * F
    want = {"fp8": forward, "bf16": backward} if in_fp8 else {"bf16": forward + backward}
    assert flops(operations(run)) == want


@pytest.mark.parametrize("window, rows", [(3, 1), (100, 1), (5, 2)])
def test_flops_of_attention_are_those_of_what_queries_see(window, rows):
    docs = torch.tensor([0, 5, 40, T, T], dtype=torch.int32)
    batch = SimpleNamespace(micro_batches=[SimpleNamespace(inputs=torch.zeros(T), cu_seqlens=docs)])
    seen = sum(min(i, window) + 1 for n in docs.diff().tolist() for i in range(rows * n))

    def run(_):
        q, k, v = (meta(rows * T, 2 // rows, 16, requires_grad=True) for _ in range(3))
        tg.flash_attention(q, k, v, docs.to("meta"), T, window, 1.0).backward(meta(rows * T, 2 // rows, 16))

    products = 2 + 5  # of the forward; of the backward, which computes scores again
    assert flops(operations(run, batch)) == {"attention": products * 2.0 * seen * (2 // rows) * 16}


def test_collectives_send_what_the_scripts_own_do(monkeypatch):
    """Checks against the bytes that train_gpt.Exchange counts, on 8 ranks."""
    for owner, names in ((tg.dist, "all_reduce all_to_all_single"), (tg, "_reduce_scatter _all_gather")):
        for name in names.split():
            monkeypatch.setattr(owner, name, lambda *args, **options: None)
    traffic = projection.Traffic()
    real, counting = tg.Exchange(0, 8), launches.CountingExchange(8, traffic)
    counts = [6, 0, 1, 2, 3, 4, 2, 2], [6, 2, 3, 4, 5, 6, 7, 8]
    for exchange in (real, counting):
        exchange.reduce("a", "all_reduce", meta(64))
        exchange.reduce("b", "all_reduce", meta(64), meta(8, 64))
        exchange.reduce("c", "reduce_scatter", meta(64, 3))
        exchange.reduce("d", "reduce_scatter", meta(64, 3), meta(8, 8, 3))
        exchange.gather("e", meta(64, 3))
        exchange.send_rows("rows", "f", meta(20, 5), *counts)
    assert [(op.kind, op.nbytes) for op in traffic.ops] == [("exchange", n) for n in real.sent.values()]
    assert len(traffic.ops) == 6


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


def test_techniques():
    """Checks that each changes its part alone."""
    parts = "head", "QKV", "MLP backward", "narrow attention", "backward"
    ops = [Op("", 900, "bf16", 900.0, part) for part in parts]
    ops += [Op("constant_pad_nd", 90), Op("all_gather value_embeds", 90, "exchange")]
    found = projection.apply(ops, tg.RECORD.padded_vocab // 2)
    assert [op.nbytes for op in found] == [350, 900, 900, 675, 900, 0, 27]
    assert [op.flops for op in found] == [450, 900, 900, 675, 900, 0, 0]
    assert [op.kind for op in found[:5]] == ["bf16", "fp8", "fp8", "bf16", "bf16"]


def fake_count(cfg, stage, **changes):
    """Counts a matmul that grows with the stage's tokens and the MLP."""
    return [Op("", 8, "bf16", cfg.mlp_dim * 1e5 * cfg.stages[stage].batch_tokens)]


def test_what_if(monkeypatch, capsys):
    monkeypatch.setattr(projection, "count", fake_count)
    assert projection.main(["--what-if", "mlp_dim=2816", "--what-if", "mlp_dim=6144"]) == 0
    out = capsys.readouterr().out
    totals = [line for line in out.splitlines() if line.startswith("total")]
    assert totals[1].endswith("change +0.00 s") and float(totals[2].split()[-2]) > 1
    ms = [line.split()[-1] for line in out.split("the record preset")[1].splitlines()[2:7]]
    seconds = sum(stage.steps * float(x) for stage, x in zip(tg.RECORD.stages, ms)) / 1000 + 0.21
    assert float(totals[0].split()[1]) == pytest.approx(seconds, abs=0.02)


@pytest.mark.parametrize(
    "options, part",
    [
        (["--what-if", "layers.99.xsa=true"], "layers.99.xsa: unknown"),
        (["--set", "microbatches=12"], "8 processes cannot share 12"),
    ],
)
def test_bad_input(options, part, capsys):
    assert projection.main(options) == 1
    captured = capsys.readouterr()
    assert part in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_the_config():
    """Checks against 6 FLOPs a weight and token, and ANVIL's on an eighth of the banks' matrices."""
    cfg, steps = tg.RECORD, 4
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
    want = 6.0 * tokens * (sum(banks.values()) - unread + d * cfg.padded_vocab)
    counted = flops(ops)
    # Not in it: small MLPs and gates.
    assert want < counted["bf16"] + counted["fp8"] - anvil < 1.006 * want
    assert counted["fp8"] == tokens * (2 * banks["mlp_bank"] + 6 * d * cfg.padded_vocab)


@pytest.mark.slow
def test_a_run(capsys):
    """Checks that estimates of published times are near, of what is fitted and what is not."""
    assert projection.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    residuals = [float(line.split()[-1][:-1]) for line in lines if line.startswith(("80 ", "92 "))]
    assert len(residuals) == 10 and max(map(abs, residuals)) < 8
    stack = next(line for line in lines if line.startswith("both of the softmax")).split()
    assert float(stack[-2]) == pytest.approx(float(stack[-1]), rel=0.1)
    seconds = [float(line.split()[1]) for line in lines if line.startswith("total")]
    assert len(seconds) == 1 and seconds[0] > projection.PUBLISHED_92
