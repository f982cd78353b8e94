"""Operations that have kernels, with operands of real steps, and how far they are from fp64: for check.py."""

import math
from collections.abc import Iterator
from functools import partial
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
        return (y.detach(),) + torch.autograd.grad(y, inputs, torch.ones_like(y))
    results = function(*args)
    if not isinstance(results, tuple):
        return (results,)
    if operation == "softcap_loss":
        return results[:2] + tuple(t.T for t in results[2:])
    return results


# ---- operands ----------------------------------------------------------------------------------------------


class StageOperands:
    """Operands of a stage's micro-batch on one GPU: T tokens of d channels."""

    def __init__(self, cfg: tg.Config, stage: int, paths: list[Path], device: torch.device):
        self.cfg = cfg
        self.stage = stage
        self.device = device
        self.dtype = tg.dtype_of(cfg.dtype)
        self.plan = tg.plan_step(cfg, cfg.stage_starts[stage])
        loader = tg.TrainLoader(cfg, paths, 0, 1)
        batch = tg.Prefetcher(loader, [self.plan], tg.Collectives(0, 1)).next().micro_batches[-1]
        loader.close()
        documents = batch.cu_seqlens.numpy()
        self.layer_keys = step_time.layer_keys(cfg, self.plan, documents)
        self.pointer_sources = step_time.mean_keys(documents, cfg.pointer_window)
        self.segments = tg.move(batch.segments, device)
        self.batch = tg.move(batch._replace(segments={}), device)
        self.T = len(self.batch.inputs)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def cases(self) -> Iterator[Case]:
        yield from self.mlp_cases()
        yield from self.loss_cases()
        if self.cfg.pointer_dim:
            yield from self.pointer_cases()
        yield from self.table_cases()
        yield from self.attention_cases()

    def mlp_cases(self) -> Iterator[Case]:
        T, d, F = self.T, self.cfg.dim, self.cfg.mlp_dim
        h = self.rand(T, d)
        fc = self.rand(F, d)
        square = self.rand(T, F).relu().square()
        dy = self.rand(T, d)
        before, amax = torch.zeros(2, 1, 2, device=self.device)
        scales = torch.tensor([[tg.FP8_MLP_H_SCALE, tg.FP8_MLP_DY_SCALE], [0, 0], [1, 1]], device=self.device)
        scales = scales[None, ..., None, None]
        bank = torch.stack([fc, fc])
        empty = partial(torch.empty, dtype=torch.float8_e4m3fn, device=self.device)
        weights8 = [empty((1, 2, F, d)), empty((1, 2, d, F))]
        tg.convert_mlp_bank(weights8, bank, scales, before)
        largest = torch.tensor([tg.E4M3_MAX, tg.E5M2_MAX], device=self.device)
        scales[0, 2, :, 0, 0] = square.max() / largest
        fp8_mlp = tg.FP8Operands(weights8[0][0], weights8[1][0], scales[0], amax)
        h8 = tg.to_fp8(h, tg.FP8_MLP_H_SCALE, torch.float8_e4m3fn)
        dy8 = tg.to_fp8(dy, tg.FP8_MLP_DY_SCALE, torch.float8_e5m2)
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
            args = (x, scale8, dtype8)
            yield Case("cast_and_transpose", f"{T} x {d}, {dtype8}", args, nbytes=4 * x.numel())

    def loss_cases(self) -> Iterator[Case]:
        cfg, plan, batch = self.cfg, self.plan, self.batch
        V = plan.sampled_columns or cfg.padded_vocab
        K = len(batch.loss_weights)
        n = min(cfg.head_chunk * (cfg.padded_vocab // V), self.T)
        prefixes = None
        if plan.prefix:
            prefixes = torch.arange(-1, cfg.padded_vocab - 1, device=self.device)
        logits = self.rand(n, V)
        targets = tg.loss_targets(batch.targets, len(plan.mtp), prefixes)[:n]
        if plan.sampled_columns:
            targets = tg.index_in(targets, batch.sampled_columns)
        what = f"{n} x {V}, {K} targets"
        args = (logits, targets, batch.loss_weights, 0.0)
        nbytes = 2 * logits.element_size() * logits.numel()
        yield Case("softcap_loss", f"{what}, {cfg.dtype}", args, nbytes=nbytes)
        # In FP8 the gradient comes in two layouts.
        unit = tg.FP8_DLOGITS_SCALE / cfg.microbatches
        args = (logits.to(torch.float8_e4m3fn), targets, batch.loss_weights, unit)
        yield Case("softcap_loss", f"{what}, e5m2", args, nbytes=3 * logits.numel())

    def pointer_cases(self) -> Iterator[Case]:
        T, D = self.T, self.cfg.pointer_dim
        q = tg.norm(self.rand(T, D))
        k = tg.norm(self.rand(T, D))
        sink_scores = tg.norm(self.rand(T, 1))
        args = tg.PointerInputs(q, k, sink_scores[:, 0].float()), self.batch, self.cfg.pointer_window
        sources = self.pointer_sources
        what = f"stage {self.stage}: {T} x {D}, {sources:.0f} sources"
        product = 2 * T * D * sources
        yield Case("pointer", what, args, flops=product)
        weights_grad = torch.randn(2, T, device=self.device)
        grad_args = args + tg.pointer(*args) + (weights_grad,)
        yield Case("pointer_grad", what, grad_args, flops=4 * product)

    def table_cases(self) -> Iterator[Case]:
        cfg = self.cfg
        hashed = "ngrams" if cfg.ngrams.orders else "bigram_embed"
        for name, ids in (("value_embeds", "inputs"), (hashed, "hashed_rows")):
            index = self.segments.get(ids)
            if not index:
                continue
            # A step has more rows of n-grams than this batch reads.
            ngrams_shape = int(index.ids.max()) + 1, cfg.ngrams.width
            shape = tg.param_shapes(cfg, 1).get(name, ngrams_shape)
            out = self.rand(*shape)
            grad = self.rand(self.T, *shape[1:])
            signs = self.rand(cfg.sign_rows, shape[-1]).sign()
            positions, count = len(index.perm), len(index.ids)
            nbytes = positions * grad[0].nbytes + count * out[0].nbytes * 2
            what = f"{name}: {positions} to {count} rows"
            yield Case("segment_sum_rows", what, (out, grad, index, signs), nbytes=nbytes)

    def attention_cases(self) -> Iterator[Case]:
        # Each kind of layer once: FlashAttention pads narrow queries and keys where values are wide.
        cfg = self.cfg
        keys_by_kind = {}
        attending = [layer for layer in cfg.layers if layer.attention]
        for a, keys in zip(attending, self.layer_keys):
            keys_by_kind[a.attention, a.window, a.narrow_qk, a.narrow_v] = keys
        for (kind, name, narrow_qk, narrow_v), keys in keys_by_kind.items():
            rows = 2 if kind == "paired" else 1
            window = self.plan.windows[name]
            qk_dim = cfg.head_dim // (1 + narrow_qk)
            v_dim = cfg.head_dim // (1 + narrow_v)
            n, heads = self.T * rows, cfg.heads // rows
            q = tg.norm(self.rand(n, heads, qk_dim))
            k = tg.norm(self.rand(n, heads, qk_dim))
            v = tg.norm(self.rand(n, heads, v_dim))
            scale = cfg.narrow_attn_scale if narrow_qk else cfg.attn_scale
            args = (scale * q, k, v, self.batch.cu_seqlens * rows, self.batch.max_seqlen * rows, window)
            what = f"stage {self.stage}, {kind} {name}, {qk_dim} and {v_dim} wide: {n}, window {window}"
            flops = 6 * cfg.heads * (qk_dim + v_dim) * keys * self.T
            yield Case("attention", what, args, flops=flops)


def kernel_cases(
    cfg: tg.Config, stages: list[int], paths: list[Path], device: torch.device
) -> Iterator[Case]:
    """Yields each operation that the config does not leave to plain torch, once for equal shapes."""
    operations = {name for kernel in cfg.kernels for name in tg.KERNELS[kernel]}
    if cfg.attention_impl != "dense":
        operations.add("attention")
    if not (cfg.fp8 and cfg.fp8_mlp):  # the GPU may have no FP8
        operations -= {"relu_square_fp8", "cast_and_transpose"}
    seen = set()
    for stage in stages:
        for case in StageOperands(cfg, stage, paths, device).cases():
            if case.operation in operations and case[:2] not in seen:
                seen.add(case[:2])
                yield case


# ---- errors ------------------------------------------------------------------------------------------------

# Relative errors. One rounding to bf16 is at most 2^-9, and the square of a rounded number has three times
# that. FlashAttention also rounds probabilities.
BF16 = 2.5 * 2.0**-9
ATTENTION = 0.02
# Hopper keeps few bits of FP8 sums: some e4m3 numbers are the next, 6 % of them away.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: BF16, torch.float8_e5m2: 0.01, torch.float8_e4m3fn: 0.02}


IN_FP8 = torch.float8_e4m3fn, torch.float8_e5m2  # a result has the dtype of such operands


def double(x: Any) -> Any:
    """Returns a nest's tensors of floats in fp64; others, and what is no tensor, as they are."""

    def doubled(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        if t.element_size() == 1:
            t = t.float()
        return t.double()

    return tg.map_tensors(doubled, x)


def rel_err(actual: Tensor, exact: Tensor) -> float:
    """Returns ||actual - exact|| / ||exact||; 0 if both are 0."""
    exact = double(exact)
    difference = (double(actual) - exact).norm()
    return (difference / exact.norm()).item() if difference else 0.0  # nan counts as a difference


def compare(case: Case, backend: tg.Backend) -> tuple[float, float]:
    """Compares all that an operation returns, or else changes, with plain torch's in fp64.

    Returns the error that is the largest for its bound, and that bound.
    """
    args = [x.clone() if isinstance(x, Tensor) else x for x in case.args]
    exact_args = list(case.args)
    tail = slice(None)
    if case.operation == "softcap_loss":  # fp64 takes much memory: only the last rows
        tail = slice(-min(512, len(args[0])), None)
        for i in (0, 1):
            exact_args[i] = double(exact_args[i][tail])
    for i, x in enumerate(exact_args):
        if not (isinstance(x, Tensor) and x.dtype in IN_FP8):
            exact_args[i] = double(x)
    actual = run(case.operation, args, backend)
    exact = run(case.operation, exact_args, tg.TORCH_BACKEND)
    compared = []
    if actual[0] is None:
        before = double(case.args[0])
        after = double(args[0])
        changed = (after != before) | (exact_args[0] != before)
        compared.append((args[0].dtype, after[changed], exact_args[0][changed]))
    else:
        for a, e in zip(actual, exact, strict=True):
            compared.append((a.dtype, a[tail], e))
    errors = []
    for dtype, a, e in compared:
        if a.shape != e.shape:
            raise RuntimeError(f"{case.operation}: shapes {a.shape} and {e.shape}")
        bound = BOUNDS.get(dtype, 0.0)
        if case.operation == "attention":
            bound = ATTENTION
        if dtype in IN_FP8:  # a number halfway between two may become either: of few numbers, one is much
            bound += torch.finfo(dtype).eps * float(e.double().abs().max() / e.double().norm())
        errors.append((rel_err(a, e), bound))

    def severity(found: tuple[float, float]) -> float:
        error, bound = found
        return math.inf if math.isnan(error) else error / max(bound, 1e-9)

    return max(errors, key=severity)
