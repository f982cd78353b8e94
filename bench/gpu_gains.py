"""Measures what changes of train_gpt.py would gain on this GPU: checks of the step "gains" of gpu_check.py.

Each row gives the ms of a step that a change would save, as one rank of 8 in the first stage, and says
whether that is worth it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import step_time as st
import train_gpt as tg
from check_runner import UNCHECKED, Row

if TYPE_CHECKING:
    from gpu_check import Setup

NEEDS_GPU = f"{UNCHECKED}needs a GPU"
WORTH = 0.3  # ms: 1% of such a step on an H100


def gain(setup: Setup, what: str, change: str, details: str, saved_ms: float) -> Row:
    seen = f"{saved_ms:.2f} ms: {'do it' if saved_ms >= WORTH else 'leave it'} ({details})"
    expected = f"{change}, if it saves {WORTH} ms"
    return Row(what, expected, seen if setup.on_gpu else NEEDS_GPU, numbers={"saved_ms": saved_ms})


def host_ms(function: Callable[[], Any], setup: Setup) -> float:
    """Returns the host's ms of a call whose kernels take less than that."""
    times, calls = [], 50 if setup.on_gpu else 2
    for _ in range(5):
        setup.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - began) * 1000 / calls)
    return min(times)


def tokens_of(cfg: tg.Config) -> int:
    """Returns the tokens of a micro-batch in the first stage."""
    return cfg.stages[0].batch_tokens // cfg.microbatches


def attention_layers(cfg: tg.Config) -> int:
    return sum(layer.attention is not None for layer in cfg.layers)


class DirectFlash(torch.autograd.Function):
    """Calls aten's FlashAttention as torch's varlen_attn does, without a custom op around it."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen, window, scale):
        ctx.sizes = (max_seqlen, max_seqlen, 0.0, False)  # no dropout; the window makes it causal
        ctx.options = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        tensors = (q, k, v, cu_seqlens, cu_seqlens)
        out, lse, *rng, _ = torch.ops.aten._flash_attention_forward(
            *tensors, *ctx.sizes, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, cu_seqlens, out, lse, *rng)
        return out

    @staticmethod
    def backward(ctx, dy):
        q, k, v, cu_seqlens, out, lse, *rng = ctx.saved_tensors
        tensors = (dy, q, k, v, out, lse, cu_seqlens, cu_seqlens)
        grads = torch.ops.aten._flash_attention_backward(*tensors, *ctx.sizes, *rng, **ctx.options)
        return *grads, None, None, None, None


def varlen_overhead(setup: Setup) -> Iterator[Row]:
    """Compares the host time of varlen_attn with that of a Function around the same kernels."""
    cfg, T = setup.cfg, 256  # so short that the host takes longer than the device
    ends = torch.tensor([0, T // 2, T, T], dtype=torch.int32, device=setup.device)
    q, k, v = (setup.rand(T, cfg.heads, cfg.head_dim).requires_grad_() for _ in range(3))
    dy, usable = torch.ones_like(q), setup.on_gpu and cfg.attention != "dense"

    def both_ways(attention: Callable) -> None:
        torch.autograd.grad(attention(q, k, v, ends, T // 2, 64, 0.1), (q, k, v), dy)

    forms = (tg.flash_attention, DirectFlash.apply) if usable else (tg.attention, tg.attention)
    custom_op, function = (host_ms(partial(both_ways, form), setup) for form in forms)
    details = f"forward and backward {1000 * custom_op:.0f} us, as a Function {1000 * function:.0f} us"
    saved = attention_layers(cfg) * (custom_op - function)
    yield gain(setup, "host time of FlashAttention", "an autograd.Function around aten's", details, saved)


def static_lengths(setup: Setup) -> Iterator[Row]:
    """Compares the device's time of steps compiled for any length with steps compiled for their length."""
    cfg, times = setup.cfg, []
    if setup.on_gpu and not cfg.compile:
        return
    for compiler in (None, cache(partial(setup.compile, dynamic=False))):
        with setup.training(cfg, 0, 8, 6, compiler) as training:
            training.warm_up(4)
            times.append(setup.device_ms(training))
    details = f"device {times[0]:.2f} ms, for one length {times[1]:.2f} ms"
    yield gain(setup, "code for one length", "torch.compile(dynamic=False)", details, times[0] - times[1])


def baddbmm_copies(setup: Setup) -> Iterator[Row]:
    """Times what baddbmm's addend costs in ANVIL's maps: torch copies it first."""
    times, shapes = [0.0, 0.0], tg.param_shapes(setup.cfg, 8)
    for spec in setup.cfg.params:
        if spec.kind != "bank":
            continue
        *bank, rows, cols = shapes[spec.name]
        x = setup.rand(math.prod(bank) // 8, rows, cols)
        square = setup.rand(len(x), min(rows, cols), min(rows, cols))
        factors = (x, square) if rows > cols else (square, x)
        calls = [partial(torch.baddbmm, x, *factors, beta=beta, alpha=1.0) for beta in (1.5, 0.0)]
        for i, ms in enumerate(st.timed(calls, setup.device, 20)):
            times[i] += len(tg.ANVIL_MAPS) * ms
    details = f"with addends {times[0]:.2f} ms, without {times[1]:.2f} ms"
    yield gain(setup, "addends in ANVIL's maps", "a kernel for a x + B x", details, times[0] - times[1])


def prefetch_thread(setup: Setup) -> Iterator[Row]:
    """Compares the host time of steps while the prefetch thread works with that of steps after it is done."""
    n = setup.timed_steps
    with setup.training(setup.cfg, 0, 8, 4 + 2 * n) as training:
        training.warm_up(4)
        for _ in range(n):
            training.step()
        during = median(training.host)
        ready = [training.batches.next() for _ in range(n)]
        training.batches.next = lambda: ready.pop(0)  # type: ignore[method-assign]
        training.reset()
        for _ in range(n):
            training.step()
        alone = median(training.host)
    details = f"host {during:.2f} ms, {alone:.2f} ms without it"
    yield gain(setup, "no prefetch thread", "build batches in a process", details, during - alone)


def small_fp8_product(setup: Setup) -> Iterator[Row]:
    """Tries an FP8 product as small as tests use."""
    expected = "5.92; if refused, head_chunk=64 in tests/test_no_sync.py"
    if setup.cfg.fp8:
        a, b = (torch.ones(64, 16, device=setup.device).to(torch.float8_e4m3fn) for _ in "ab")
        try:
            seen = f"{setup.scaled_mm(a, b.T, torch.bfloat16)[0, 0].item():.2f}"
        except RuntimeError as e:  # cuBLAS need not have it
            seen = f"refused: {tg.first_line(e)}"
        yield Row("an FP8 product over 16 numbers", expected, seen)


def compiled_relu_square(setup: Setup) -> Iterator[Row]:
    """Compares the relu_square kernel, forward and backward, with a product and compiled code."""
    cfg, T = setup.cfg, tokens_of(setup.cfg)
    backend = tg.select_backend(cfg, setup.device)
    h, dy, fc = (setup.rand(n, cfg.dim) for n in (T, T, cfg.mlp_dim))
    square = setup.rand(T, cfg.mlp_dim).square()

    def activate(product: Tensor) -> Tensor:
        return product.relu().square()

    def activate_grad(product: Tensor, square: Tensor) -> Tensor:
        return (product.float() * (2 * square.float().sqrt())).to(product.dtype)

    compiled, compiled_grad = setup.compile(activate), setup.compile(activate_grad)
    calls = [
        lambda: backend.relu_square(h, fc),
        lambda: backend.relu_square_grad(dy, fc, square),
        lambda: compiled(F.linear(h, fc)),
        lambda: compiled_grad(dy @ fc.T, square),
    ]
    ms = st.timed(calls, setup.device, 20)
    details = f"{ms[0]:.3f} + {ms[1]:.3f} ms, compiled {ms[2]:.3f} + {ms[3]:.3f} ms"
    saved = len(cfg.layers) * (ms[0] + ms[1] - ms[2] - ms[3])
    yield gain(setup, "compiled relu_square", "a product and compiled code", details, saved)


def gate_products(setup: Setup) -> Iterator[Row]:
    """Compares the gates' thin products with compiled sums of products, forward and backward."""
    cfg, T = setup.cfg, tokens_of(setup.cfg)
    h, gate = setup.rand(T, cfg.dim).requires_grad_(), setup.rand(cfg.heads, tg.GATE_DIM).requires_grad_()
    dy = setup.rand(T, cfg.heads)

    def product(h: Tensor, gate: Tensor) -> Tensor:
        return F.linear(h[:, : tg.GATE_DIM], gate)

    def summed(h: Tensor, gate: Tensor) -> Tensor:
        return (h[:, : tg.GATE_DIM, None] * gate.T).sum(1)

    def both_ways(form: Callable) -> None:
        torch.autograd.grad(form(h, gate), (h, gate), dy)

    forms = [partial(both_ways, setup.compile(form)) for form in (product, summed)]
    product_ms, sum_ms = st.timed(forms, setup.device, 20)
    count = sum(layer.value is not None and not layer.connections for layer in cfg.layers) + 1
    details = f"{count} times {product_ms:.3f} ms, as sums {sum_ms:.3f} ms"
    saved = count * (product_ms - sum_ms)
    yield gain(setup, "gates as sums", "(h[:, :12, None] * gate.T).sum(1)", details, saved)


def flash_attention_3(setup: Setup) -> Iterator[Row]:
    """Compares FlashAttention-3's errors and times with version 2's."""
    try:
        tg.select_backend(replace(setup.cfg, kernels=(), attention="fa3"), setup.device)
    except tg.UserError as e:
        yield Row("FlashAttention-3", seen=f"{UNCHECKED}{e}")
        return
    cfg = replace(setup.cfg, kernels=(), attention="varlen")
    backend = tg.select_backend(cfg, setup.device)
    try:
        for case in st.kernel_cases(cfg, [0, 1, 2], setup.paths, setup.device):
            times, results = [], []
            for name in ("fa3", "varlen"):
                st.activate_flash_attention(replace(cfg, attention=name))
                results.append(case.run(backend))
                times += st.timed([partial(case.run, backend)], setup.device, 20)
            error = max(((a - b).norm() / b.norm()).item() for a, b in zip(*results))
            seen = f"{times[0]:.3f} ms, version 2 {times[1]:.3f} ms, gradients differ by {error:.1e}"
            options = {"ok": error < 0.02, "feature": "fa3", "ms": tuple(times)}
            yield Row(f"FlashAttention-3, {case.shapes}", "faster, differ by < 2.0e-02", seen, **options)
    finally:
        st.activate_flash_attention(cfg)


GAINS = {  # limits in seconds; static_lengths compiles everything again
    varlen_overhead: 120,
    static_lengths: 900,
    baddbmm_copies: 60,
    prefetch_thread: 300,
    small_fp8_product: 60,
    compiled_relu_square: 120,
    gate_products: 120,
    flash_attention_3: 120,
}
