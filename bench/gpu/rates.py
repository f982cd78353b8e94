"""Checks of the step `rates`: what the products and FlashAttention of a micro-batch attain, alone."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import step_time as st
import train_gpt as tg
from kernels import StageOperands, run
from machine import Setup, with_settings
from runner import Row, Unable

REPEATS = 10
ENTRIES = 64, 96, 128  # of cu_seqlens
FAST = "MLP's second", "logits"  # which FP8 products train_gpt.py gives fast accumulation


def product_row(setup: Setup, what: str, kind: str, flops: float, call: Callable) -> Row:
    """Times a product. projection.py reads rates by `kind`."""
    ms = st.timed([call], setup.device, REPEATS)[0]
    rate = flops / ms / 1e9
    share = rate * 1e12 / setup.matmul_rate
    numbers = {"kind": kind, "flops": flops, "ms": ms}
    return Row(what, seen=f"{ms:.3f} ms, {rate:.4g} TFLOP/s, {share:.0%} of the ceiling", numbers=numbers)


def fp8_pair(setup: Setup, n: int, k: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns random factors (n, k) and (k, m), the second column-major, one of them e4m3."""
    a = setup.rand(n, k).to(dtype)
    b = setup.rand(m, k).to(torch.float8_e4m3fn).T
    return a, b


def fp8_rates(setup: Setup, stage: int) -> Iterator[Row]:
    """Times the FP8 products of a rank of 8 with and without fast accumulation, but the MLPs' first."""
    cfg = setup.cfg
    if not cfg.fp8:
        raise Unable("this GPU has no FP8")
    plan = tg.plan_step(cfg, cfg.stage_starts[stage])
    T = plan.batch_tokens // tg.num_microbatches(cfg, 8)
    d = cfg.dim
    width = cfg.mlp_dim
    columns = plan.sampled_columns or cfg.padded_vocab
    scale = torch.ones((), device=setup.device)
    e4m3 = torch.float8_e4m3fn
    e5m2 = torch.float8_e5m2
    shapes = {  # (n, k, m), dtypes of the first factor and of the result
        "MLP's second": (T, width, d, e4m3, torch.bfloat16),
        "gradient of an MLP's input": (T, width, d, e5m2, torch.bfloat16),
        "gradient of fc": (width, T, d, e5m2, torch.float32),
        "gradient of proj": (width, T, d, e4m3, torch.float32),
        "logits": (T, d, columns, e4m3, e4m3),
        "gradient of the head's input": (T, columns, d, e5m2, torch.bfloat16),
        "gradient of lm_head": (d, T, columns, e4m3, torch.float32),
    }
    for name, (n, k, m, first, result) in shapes.items():
        a, b = fp8_pair(setup, n, k, m, first)
        out = torch.empty(n, m, dtype=result, device=setup.device)
        for fast in False, True:
            call = partial(tg.fp8_matmul, a, b, (scale, scale), result, fast, out)
            kind = "fp8"
            if fast != (name in FAST):
                kind = "fp8, not as train_gpt.py has it"
            what = f"fp8 {name}: {n} x {k} x {m}, {'fast' if fast else 'exact'} accumulation"
            yield product_row(setup, what, kind, 2.0 * n * k * m, call)


def bf16_rates(setup: Setup, stage: int) -> Iterator[Row]:
    """Times products as those of queries and keys, of values and of attention's output."""
    cfg = setup.cfg
    T = cfg.stages[stage].batch_tokens // tg.num_microbatches(cfg, 8)
    d = cfg.dim
    x = setup.rand(T, d)
    for width in d // 2, d, 2 * d:
        w = setup.rand(width, d)
        dy = setup.rand(T, width)
        y = torch.empty_like(dy)
        dx = torch.empty_like(x)
        dw = torch.empty_like(w)
        calls = {
            "forward": partial(torch.mm, x, w.T, out=y),
            "gradient of the input": partial(torch.mm, dy, w, out=dx),
            "gradient of the weight": partial(torch.mm, dy.T, x, out=dw),
        }
        for name, call in calls.items():
            what = f"projection {T} x {d} x {width}, {name}"
            yield product_row(setup, what, "bf16", 2.0 * T * d * width, call)


def kernels_of(setup: Setup, call: Callable) -> dict[str, float]:
    """Returns the ms of each kernel of a call, by name."""
    with torch.profiler.profile() as profiler:
        for _ in range(REPEATS):
            call()
        setup.synchronize()
    found = {}
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.key] = event.self_device_time_total / REPEATS / 1000
    return found


def attention_rates(setup: Setup, stage: int) -> Iterator[Row]:
    """Times attention forward and backward by kernel, with more and fewer entries of cu_seqlens."""
    if not setup.on_gpu:
        backend = tg.TORCH_BACKEND
        cfg = with_settings(setup.cfg, "attention_impl=varlen")
    else:
        cfg = with_settings(setup.cfg, "attention_impl=varlen compile=false")
        backend = tg.select_backend(cfg, setup.device)
    one_rank = with_settings(cfg, f"microbatches={max(8, cfg.microbatches)}")
    for case in StageOperands(one_rank, stage, setup.paths, setup.device).attention_cases():
        q, k, v, cu_seqlens, *rest = case.args
        documents = cu_seqlens[: int((cu_seqlens < cu_seqlens[-1]).sum()) + 1]
        for entries in ENTRIES:
            if len(documents) > entries:
                continue
            padded = F.pad(documents, (0, entries - len(documents)), value=int(documents[-1]))
            call = partial(run, "attention", (q, k, v, padded, *rest), backend)
            ms = st.timed([call], setup.device, REPEATS)[0]
            kernels = kernels_of(setup, call)
            what = f"attention {case.shapes}; {len(documents) - 1} documents, {entries} entries"
            parts = ", ".join(f"{name[:40]} {each:.3f}" for name, each in kernels.items())
            kind = "varlen"
            if entries != len(cu_seqlens):
                kind = "varlen, not as train_gpt.py has it"
            numbers = {"kind": kind, "flops": case.flops, "ms": ms, "kernels": kernels}
            seen = f"{ms:.3f} ms, {case.flops / ms / 1e9:.4g} TFLOP/s; {parts}"
            yield Row(what, seen=seen.rstrip("; "), numbers=numbers)


CHECKS = {"FP8 products": fp8_rates, "projections": bf16_rates, "FlashAttention by kernel": attention_rates}
