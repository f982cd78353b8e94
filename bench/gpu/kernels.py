"""Operations that have kernels, with operands of real steps, and how far they are from fp64: for check.py."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import step_time
import train_gpt as tg


class Case(NamedTuple):
    """An operation with its operands."""

    operation: str
    shapes: str
    args: tuple
    flops: float = 0.0
    nbytes: int = 0


def run(operation: str, args: Any, backend: tg.Backend) -> tuple:
    """Returns an operation's results; of attention also its inputs' gradients, for the gradient 1.

    A transposed gradient of logits is transposed back.
    """
    function = getattr(backend, operation)
    if operation == "attention":
        inputs = [x.detach().requires_grad_() for x in args[:3]]
        y = function(*inputs, *args[3:])
        return y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))
    results = function(*args)
    if operation == "softcap_loss":
        return *results[:2], *(t.T for t in results[2:])
    return results if isinstance(results, tuple) else (results,)


# ---- operands ----------------------------------------------------------------------------------------------


def stage_cases(cfg: tg.Config, stage: int, paths: list[Path], device: torch.device) -> Iterator[Case]:
    """Yields the operations, on the operands of a stage's micro-batch on one GPU."""
    plan, loader = tg.plan_step(cfg, cfg.stage_starts[stage]), tg.TrainLoader(cfg, paths, 0, 1)
    *_, batch = tg.Prefetcher(loader, [plan], tg.Exchange(0, 1)).next().micro_batches
    loader.close()
    keys = step_time.layer_keys(cfg, plan, batch.cu_seqlens.numpy())
    T, d, F, dtype = len(batch.inputs), cfg.dim, cfg.mlp_dim, tg.dtype_of(cfg.dtype)
    sources = step_time.mean_keys(batch.cu_seqlens.numpy(), cfg.pointer_window)
    segments = tg.move(batch.segments, device)
    batch = tg.move(batch._replace(segments={}), device)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    h, fc, square, dy = rand(T, d), rand(F, d), rand(T, F).relu().square(), rand(T, d)
    before, amax = torch.zeros(2, 1, 2, device=device)
    scales = torch.tensor([[tg.FP8_H, tg.FP8_DY], [0, 0], [1, 1]], device=device)[None, ..., None, None]
    weights8 = tg.fp8_mlp_weights(torch.stack([fc, fc]), scales, before)
    scales[0, 2, :, 0, 0] = square.max() / torch.tensor([tg.E4M3_MAX, tg.E5M2_MAX], device=device)
    fp8_mlp = tg.FP8MLP(*(t[0] for t in (*weights8, scales)), amax)  # type: ignore[call-arg]
    h8, dy8 = tg.to_fp8(h, tg.FP8_H, torch.float8_e4m3fn), tg.to_fp8(dy, tg.FP8_DY, torch.float8_e5m2)
    square8 = tg.to_fp8(square, scales[0, 2, 0], torch.float8_e4m3fn)
    products = [
        ("relu_square", (h, fc)),
        ("relu_square_grad", (dy, fc, square)),
        ("relu_square_fp8", (h8, fp8_mlp)),
        ("relu_square_fp8", (dy8, fp8_mlp, square8)),
    ]
    for operation, args in products:
        direction = " backward" if len(args) == 3 else ""
        yield Case(operation, f"{T} x {d} x {F}{direction}", args, flops=2 * T * F * d)
    for x, scale8, dtype8 in ((h, scales[0, 0, 0], h8.dtype), (dy, scales[0, 0, 1], dy8.dtype)):
        yield Case("cast_and_transpose", f"{T} x {d}, {dtype8}", (x, scale8, dtype8), nbytes=4 * x.numel())

    V, K = plan.sampled_columns or cfg.padded_vocab, len(batch.loss_weights)
    n = min(cfg.head_chunk * (cfg.padded_vocab // V), T)
    prefixes = torch.arange(-1, cfg.padded_vocab - 1, device=device) if plan.prefix else None
    logits, targets = rand(n, V), tg.loss_targets(batch.targets, len(plan.mtp), prefixes)[:n]
    if plan.sampled_columns:
        targets = tg.index_in(targets, batch.sampled_columns)
    # In FP8 the gradient comes in two layouts.
    grad_dtypes = {cfg.dtype: (0.0, 2 * logits.element_size()), "e5m2": (tg.FP8_GRAD / cfg.microbatches, 3)}
    for grad_dtype, (unit, size) in grad_dtypes.items():
        logits = logits.to(torch.float8_e4m3fn) if unit else logits
        head_args, nbytes = (logits, targets, batch.loss_weights, unit), size * logits.numel()
        yield Case("softcap_loss", f"{n} x {V}, {K} targets, {grad_dtype}", head_args, nbytes=nbytes)

    if D := cfg.pointer_dim:
        q, k, sink_scores = (tg.norm(rand(T, n)) for n in (D, D, 1))
        pointer_args = tg.PointerInputs(q, k, sink_scores[:, 0].float()), batch, cfg.pointer_window
        what, product = f"stage {stage}: {T} x {D}, {sources:.0f} sources", 2 * T * D * sources
        yield Case("pointer", what, pointer_args, flops=product)
        weights_grad = torch.randn(2, T, device=device)
        grad_args = *pointer_args, *tg.pointer(*pointer_args), weights_grad
        yield Case("pointer_grad", what, grad_args, flops=4 * product)

    hashed_table = "ngrams" if cfg.ngrams.orders else "bigram_embed"
    for name, ids in {"value_embeds": "inputs", hashed_table: "hashed_rows"}.items():
        if index := segments.get(ids):
            # A step has more rows of n-grams than this batch reads.
            ngrams_shape = int(index.ids.max()) + 1, cfg.ngrams.width
            rows, *columns = tg.param_shapes(cfg, 1).get(name, ngrams_shape)
            out, grad, signs = rand(rows, *columns), rand(T, *columns), rand(cfg.sign_rows, columns[-1])
            positions, count = len(index.perm), len(index.ids)
            nbytes = positions * grad[0].nbytes + count * out[0].nbytes * 2
            what, table_args = f"{name}: {positions} to {count} rows", (out, grad, index, signs.sign())
            yield Case("segment_sum_rows", what, table_args, nbytes=nbytes)

    # Each kind of layer once: FlashAttention pads narrow queries and keys where values are wide.
    attending = [(a.attention, a.window, a.narrow_qk, a.narrow_v) for a in cfg.layers if a.attention]
    for (kind, name, *narrow), seen_keys in dict(zip(attending, keys)).items():
        rows, window = 2 if kind == "paired" else 1, plan.windows[name]
        qk, v = (cfg.head_dim // (1 + half) for half in narrow)
        q, *kv = (tg.norm(rand(T * rows, cfg.heads // rows, width)) for width in (qk, qk, v))
        scale = cfg.narrow_attn_scale if narrow[0] else cfg.attn_scale
        attention_args = scale * q, *kv, batch.cu_seqlens * rows, batch.max_doc_len * rows, window
        what = f"stage {stage}, {kind} {name}, {qk} and {v} wide: {T * rows}, window {window}"
        yield Case("attention", what, attention_args, flops=6 * cfg.heads * (qk + v) * seen_keys * T)


def kernel_cases(
    cfg: tg.Config, stages: list[int], paths: list[Path], device: torch.device
) -> Iterator[Case]:
    """Yields each operation that the config does not leave to plain torch, once for equal shapes."""
    operations, seen = {name for name in tg.KERNELS if name.startswith(cfg.kernels)}, set()
    if cfg.attention_impl != "dense":
        operations.add("attention")
    if not (cfg.fp8 and cfg.fp8_mlp):  # the GPU may have no FP8
        operations -= {"relu_square_fp8", "cast_and_transpose"}
    for stage in stages:
        for case in stage_cases(cfg, stage, paths, device):
            if case.operation in operations and case[:2] not in seen:
                seen.add(case[:2])
                yield case


# ---- errors ------------------------------------------------------------------------------------------------

# Relative errors. One rounding to bf16 is at most 2^-9, and the square of a rounded number has three times
# that. FlashAttention also rounds probabilities.
BF16, ATTENTION = 2.5 * 2.0**-9, 0.02
# Hopper keeps few bits of FP8 sums: some e4m3 numbers are the next, 6 % of them away.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: BF16, torch.float8_e5m2: 0.01, torch.float8_e4m3fn: 0.02}


def double(x: Any) -> Any:
    """Returns a nest's tensors of floats in fp64; others, and what is no tensor, as they are."""

    def doubled(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return (t.float() if t.element_size() == 1 else t).double()

    return tg.map_tensors(doubled, x)


def rel_err(actual: Tensor, exact: Tensor) -> float:
    """Returns ||actual - exact|| / ||exact||."""
    actual, exact = double(actual), double(exact)
    return ((actual - exact).norm() / exact.norm()).item()


def compare(case: Case, backend: tg.Backend) -> tuple[float, float]:
    """Compares all that an operation returns, or else changes, with plain torch's in fp64.

    Returns the error that is the largest for its bound, and that bound.
    """
    args = [x.clone() if isinstance(x, Tensor) else x for x in case.args]
    exact_args, tail = list(case.args), slice(None)
    if case.operation == "softcap_loss":  # fp64 takes much memory: only the last rows
        tail = slice(-min(512, len(args[0])), None)
        exact_args[:2] = (double(x[tail]) for x in exact_args[:2])
    in_fp8 = torch.float8_e4m3fn, torch.float8_e5m2  # the result has the dtype of such operands
    exact_args = [x if isinstance(x, Tensor) and x.dtype in in_fp8 else double(x) for x in exact_args]
    actual = run(case.operation, args, backend)
    exact = run(case.operation, exact_args, tg.TORCH_BACKEND)
    if actual[0] is None:
        before, after = double(case.args[0]), double(args[0])
        changed = (after != before) | (exact_args[0] != before)
        compared = [(args[0].dtype, after[changed], exact_args[0][changed])]
    else:
        compared = [(a.dtype, a[tail], e) for a, e in zip(actual, exact, strict=True)]
    errors = []
    for dtype, a, e in compared:
        if a.shape != e.shape:
            raise RuntimeError(f"{case.operation}: shapes {a.shape} and {e.shape}")
        bound = ATTENTION if case.operation == "attention" else BOUNDS.get(dtype, 0.0)
        if dtype in in_fp8:  # a number halfway between two may become either: of few numbers, one is much
            bound += torch.finfo(dtype).eps * float(e.double().abs().max() / e.double().norm())
        errors.append((rel_err(a, e), bound))
    return max(errors, key=lambda e: math.inf if math.isnan(e[0]) else e[0] / max(e[1], 1e-9))
