"""Tests bench/projection.py: its counts against closed formulas, its model, and published differences."""

import sys
from dataclasses import replace
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
from step_time import flops_per_token

T, D, F, V = 96, 32, 80, 160
N = 2 * T * D  # bytes of (T, D) in bf16
CFG = replace(tg.RECORD, heads=2, head_dim=D // 2, mlp_dim=F, vocab_size=V, padded_vocab=V, bos_id=0)


def meta(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


def operations(run, batch=None):
    """Returns what run(backend) does."""
    traffic = projection.Traffic()
    traffic.batch = batch
    backend = launches.make_backend(CFG, traffic)
    with launches.patched(torch, _scaled_mm=launches.gpu_code.scaled_mm), traffic:
        run(backend)
    return traffic.ops


def flops(ops):
    """Returns FLOPs by kind."""
    return {
        kind: sum(op.flops for op in ops if op.kind == kind) for kind in {op.kind for op in ops if op.flops}
    }


@pytest.mark.parametrize(
    "matmul, kind, flops, nbytes",
    [
        (torch.mm, "bf16", 2 * T * D * F, 2 * (T * D + D * F + T * F)),
        (lambda a, b: torch.mm(a, b, out=meta(T, F)), "bf16", 2 * T * D * F, 2 * (T * D + D * F + T * F)),
        (lambda a, b: torch.addmm(meta(F), a, b), "bf16", 2 * T * D * F, 2 * (F + T * D + D * F + T * F)),
        (
            lambda a, b: a[: T // 2].float() @ b.float(),
            "fp32",
            T * D * F,
            4 * (T * D // 2 + D * F + T * F // 2),
        ),
        (
            lambda a, b: torch.bmm(a.expand(3, T, D), b.expand(3, D, F)),
            "bf16",
            6 * T * D * F,
            2 * (T * D + D * F + 3 * T * F),
        ),
    ],
)
def test_matmuls(matmul, kind, flops, nbytes):
    *_, op = operations(lambda _: matmul(meta(T, D), meta(D, F)))
    assert (op.kind, op.flops) == (kind, flops) and op.nbytes == nbytes


def pointwise(x, y):
    return x * y + x.square()


def centred(x, y):
    return x - y.mean()


def normed(x, y):
    return (x - x.mean(dim=1, keepdim=True)) * y


def looked_up(x, rows):
    return x[rows] * 2


def projected(x, y):
    return (2 * x) @ y.T + 1


def projected_and_kept(x, y):
    doubled = 2 * x
    return doubled @ y.T, doubled + 1


def add_in_place(x, y):
    x.add_(y.square())


def shifted(x):
    return torch.cat([x[:1], x[1:] + x[:-1]])


def add_one(x):
    return x + 1


def in_parts(x, y):
    out = x.new_empty(2 * T, D)
    out[:T].copy_(x)
    out[T:].copy_(y)
    return out


@pytest.mark.parametrize(
    "function, args, want",
    [
        (pointwise, (meta(T, D), meta(T, D)), [3 * N]),
        (pointwise, (meta(T, D), meta(99, D)[:1].expand(T, D)), [2 * N + 2 * D]),
        (pointwise, (meta(2, T, D)[0], meta(T, D)), [3 * N]),
        (normed, (meta(T, D), meta(T, D)), [3 * N]),
        (centred, (meta(T, D), meta(300, 300)), [2 * 300 * 300, 2 * N]),  # two passes
        (looked_up, (meta(5000, D), meta(T, dtype=torch.int64)), [8 * T + 2 * N]),
        (projected, (meta(T, D), meta(F, D)), [2 * N + 2 * 2 * T * F, N + 2 * F * D + 2 * T * F]),
        (projected_and_kept, (meta(T, D), meta(F, D)), [3 * N, N + 2 * F * D + 2 * T * F]),
        (shifted, (meta(T, D),), [2 * N]),
        (in_parts, (meta(T, D), meta(T, D)), [4 * N]),
        (tg.transpose_copy, (meta(D, T), meta(T, D)), [2 * N]),
        (add_in_place, (meta(T, D), meta(T, D)), [3 * N]),
        (tg.amax_to_fp8, (meta(400, D),), [400 * D * 2, 400 * D * 3 + 4]),
        (tg.nesterov, (meta(T, D), meta(T, D, dtype=torch.float32), 0.1), [N + 3 * 2 * N]),
    ],
)
def test_bytes_of_compiled_code(function, args, want):
    ops = operations(lambda backend: backend.compiled(function)(*args))
    assert sorted(op.nbytes for op in ops) == sorted(want)


def test_what_is_written_is_read_again():
    def run(backend):
        backend.compiled(add_one)(backend.compiled(torch.mul)(meta(T, 1), meta(1, D)))

    assert [op.nbytes for op in operations(run)] == [2 * T + 2 * D + N, 2 * N]


def test_a_backward_computes_again_what_it_needs():
    def run(backend):
        x, y = meta(T, D, requires_grad=True), meta(T, D, requires_grad=True)
        backend.compiled(lambda x, y: x.float() * y.float().sigmoid())(x, y).backward(
            meta(T, D, dtype=torch.float32)
        )

    forward, backward = (op.nbytes for op in operations(run) if op.nbytes)
    assert forward == 2 * N + 2 * N  # two inputs, and a result in fp32
    assert backward == 2 * N + 2 * N + 2 * N  # the inputs, the result's gradient, two gradients


@pytest.mark.parametrize("in_fp8", [False, True])
def test_flops_of_an_mlp(in_fp8):
    fp8 = [meta(F, D, dtype=torch.float8_e4m3fn), meta(D, F, dtype=torch.float8_e4m3fn)]
    scales = [meta(1, dtype=torch.float32)[0] for _ in range(4)]
    weights = tg.FP8MLP(*fp8, *scales) if in_fp8 else None

    def run(backend):
        h, fc, proj = (meta(n, D, requires_grad=True) for n in (T, F, F))
        tg.mlp(h, tg.WeightSlice(fc), tg.WeightSlice(proj), backend, weights).backward(meta(T, D))

    forward, backward = 4.0 * T * D * F, 8.0 * T * D * F
    want = {"fp8": forward, "bf16": backward} if in_fp8 else {"bf16": forward + backward}
    assert flops(operations(run)) == want


@pytest.mark.parametrize("fp8", [False, True])
def test_the_head(fp8, monkeypatch):
    monkeypatch.setattr(tg.GPT, "initialize", lambda self, seed: None)
    chunk = 32
    cfg = replace(CFG, head_chunk=chunk, val_slice_tokens=64)

    def run(backend):
        model = tg.GPT(cfg, 1, "meta", 0, backend._replace(fp8=fp8))
        model.head_loss_and_grad(meta(T, D), meta(T, 2, dtype=torch.int64), (1.0, 0.5))

    ops = operations(run)
    assert flops(ops) == {"fp8" if fp8 else "bf16": 6.0 * T * D * V}
    losses = [op.nbytes for op in ops if op.name == "softcap_loss"]
    assert losses == [chunk * (V * (3 if fp8 else 4) + 2 * 8 + 4)] * (T // chunk)


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
    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(tg.dist, name, lambda *args, **options: None)
    for name in ("_reduce_scatter", "_all_gather"):
        monkeypatch.setattr(tg, name, lambda *args, **options: None)
    counted = []
    traffic = projection.Traffic()
    traffic.add_collective = lambda kind, name, nbytes: counted.append(nbytes)
    real, counting = tg.Exchange(0, 8), launches.CountingExchange(8, traffic)
    transfer = tg.Transfer(meta(20, dtype=torch.int32), [6, 0, 1, 2, 3, 4, 2, 2], [6, 2, 3, 4, 5, 6, 7, 8])
    calls = [
        lambda exchange: exchange.reduce("a", "all_reduce", meta(64)),
        lambda exchange: exchange.reduce("b", "all_reduce", meta(64), meta(8, 64)),
        lambda exchange: exchange.reduce("c", "reduce_scatter", meta(64, 3)),
        lambda exchange: exchange.reduce("d", "reduce_scatter", meta(64, 3), meta(8, 8, 3)),
        lambda exchange: exchange.gather("e", meta(64, 3)),
        lambda exchange: exchange.send_rows("rows", "f", meta(20, 5), transfer),
    ]
    for call in calls:
        call(real), call(counting)
    assert counted == list(real.sent.values()) and len(counted) == len(calls)


KINDS = ("", "bf16", "fp8", "fp32", "attention", "exchange")


def test_time_grows_with_every_count():
    rng = np.random.default_rng(0)
    for _ in range(300):
        size = 10.0 ** rng.uniform(3, 13, 2)
        op = Op("", KINDS[rng.integers(len(KINDS))], size[0], int(size[1]), int(rng.integers(1, 4)))
        more = op._replace(flops=2 * op.flops, nbytes=2 * op.nbytes, launches=2 * op.launches)
        ms = projection.op_ms(op, Model())
        assert 0 < ms <= projection.op_ms(more, Model()) <= 2 * ms
        for field in ("flops", "nbytes", "launches"):
            assert ms <= projection.op_ms(op._replace(**{field: getattr(more, field)}), Model())


def test_time_by_hand():
    model = Model(
        bf16=1, memory=1, exchange=1, kernel_us=2, collective_us=5, hidden=0.75, host_us=0, slowdown=2
    )
    ops = [
        Op("", "bf16", 989e9, 8, 1),  # 1 ms
        Op("", "bf16", 8.0, 3350000000, 1),  # 1 ms
        Op("", "", 0.0, 8, 3),  # 6 us
        Op("", "exchange", 0.0, 450000000, 1),  # 1.005 ms
    ]
    want = {"matmuls": 4, "attention": 0, "other": 0.012, "exchange": 1.005 / 4, "host": 0, "fixed": 0}
    assert projection.step_ms(ops, model) == pytest.approx(want)
    host = projection.step_ms(ops, model._replace(host_us=2000))  # 5 launches
    assert sum(host.values()) == pytest.approx(10)


def test_the_fit_finds_what_made_the_times():
    rng, model = np.random.default_rng(1), Model(slowdown=1.3, fixed=4.0)
    steps = [
        [[Op("", "bf16", n * 1e12, 8, 1), Op("", "exchange", 0.0, int(1e8 * rng.random()), 1)]] * 2
        for n in (10, 20, 40, 45)
    ]
    found = projection.calibrate(Model(), steps, projection.stages_ms(steps, model))
    assert (found.slowdown, found.fixed) == pytest.approx((1.3, 4.0))


def fake_count(variant):
    """Counts a matmul of a token's size in each stage, twice as large an exchange."""
    stages = [stage for stage in variant.cfg.stages if stage.steps]
    size = variant.cfg.mlp_dim / 3072 * 1e8
    return [
        [[Op("", "bf16", size * stage.batch_tokens, 8, 1), Op("", "exchange", 0.0, 10**8, 1)]] * 2
        for stage in stages
    ]


def test_what_if(monkeypatch, capsys):
    monkeypatch.setattr(projection, "count", fake_count)
    assert projection.main(["--what-if", "mlp_dim=3072 dc_window=112", "--what-if", "mlp_dim=6144"]) == 0
    out = capsys.readouterr().out
    changes = [
        line.split("change ")[1] for line in out.splitlines() if line.startswith("total") and "ch" in line
    ]
    ms = [line.split()[-2] for line in out.split("the record preset")[1].splitlines()[2:6]]
    assert changes[0] == "+0.00 s" and float(changes[1].split()[0]) > 1
    total = sum(stage.steps * float(x) for stage, x in zip(tg.RECORD.stages, ms)) / 1000
    assert f"\ntotal {total:.0f}" in out


@pytest.mark.parametrize(
    "options, part",
    [
        (["--what-if", "layers.99.xsa=true"], "layers.99.xsa: unknown"),
        (["--what-if", "mlp_dim=2500"], "multiples of 16"),
        (["--set", "microbatches=12"], "8 processes cannot share 12"),
        (["--set", "ngrams.orders=2", "ngrams.placement=host"], "meta device"),
        (["--assume", "memroy=1"], "memory"),
        (["--assume", "memory=fast"], "float"),
    ],
)
def test_bad_input(options, part, capsys):
    assert projection.main(options) == 1
    captured = capsys.readouterr()
    assert part in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.fixture
def one_stage(monkeypatch, tmp_path):
    """Returns a count of a variant's second stage alone."""
    monkeypatch.setattr(projection, "default_cache_dir", lambda: str(tmp_path))

    def count(variant):
        stages = [replace(s, steps=s.steps if i == 1 else 0) for i, s in enumerate(variant.cfg.stages)]
        return projection.count(variant._replace(cfg=replace(variant.cfg, stages=tuple(stages))))

    return count


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_the_config(one_stage, monkeypatch):
    """Checks against 6 FLOPs a weight and token, and NorMuon's on an eighth of the banks' matrices."""
    cfg = tg.RECORD
    ((step, _),) = one_stage(projection.Variant(cfg))
    tokens, d = cfg.stages[1].batch_tokens // 8, cfg.dim
    polar = 0.0
    for name in tg.BANKS:
        *n, rows, cols = tg.param_shapes(cfg, 8)[name]
        small, large = sorted((rows, cols))
        grams = small * small * large + small**3  # half of a symmetric result each
        polar += 5 * np.prod(n) / 8 * (grams + 2 * small * small * large)
    assert sum(op.flops for op in step if op.name in ("gram", "baddbmm")) == polar
    want, counted = flops_per_token(cfg, [0.0] * 10) * tokens, flops(step)
    # Not in it: small MLPs and gates.
    assert want < counted["bf16"] + counted["fp8"] - polar < 1.004 * want
    mlps = 4 * d * cfg.mlp_dim * len(cfg.layers) * tokens
    assert counted["fp8"] == mlps + 6 * d * cfg.padded_vocab * tokens
    monkeypatch.setattr(launches, "run_steps", None)
    assert one_stage(projection.Variant(cfg))[0][0] == step  # from the cache


@pytest.mark.slow
def test_published_differences(one_stage):
    """Checks sign, and a factor of 2, in the second stage, whose ms are about a run's mean."""
    good = []
    for name, without, changed, published in projection.DIFFERENCES:
        before, after = (projection.stages_ms(one_stage(v), Model())[0] for v in (without, changed))
        assert (after - before) * published > 0, name
        good.append(0.5 <= (after - before) / published <= 2)
    assert sum(good) >= 4
