#!/usr/bin/env python3
"""Times a training step, stage by stage, and the operations that have kernels.

    python bench/step_time.py [--preset record|cpu] [--set NAME=VALUE ...] [--stages 0,1,2,3]
                              [--steps N] [--against NAME=VALUE ...] [--kernels] [--data DIR]

Times each stage's steps in one process, synchronizing with the device before and after each, in two setups:

    one GPU        world size 1: all micro-batches of the batch, the whole optimizer
    one rank of 8  rank 0 of 8, alone: its micro-batches, an eighth of the sharded optimizer. Collectives
                   return at once, with this rank's data. Not included: communication, waiting for others,
                   adding the touched rows that they send (7/8 of that work), reading the rows of n-grams
                   that they ask for, copies into reduced shards

    pair      two successive steps, an Adam period: ANVIL updates after both, Adam after the second
    ms        half a pair: median over pairs, with quartiles; "first", "second": medians of a pair's steps
    host      median ms until train_step has returned, while the GPU may still compute. Close to ms: the
              GPU waits for launches. On a CPU it is ms
    wait      median ms of waiting for the prefetched batch; not in ms
    tokens/s  tokens of this process / ms
    keys      keys that a query sees, in its window and document: mean over batches and attention layers
    MFLOP     of a token, forward and backward: 6 (qk + vo + mlp + head) + 12 H D (sum of keys over layers).
              Counts weights without a bank's padding, H heads of D, and FP8 FLOPs like others. Does not
              count embeddings, the optimizer, or recomputation
    MFU       model FLOP utilization: MFLOP x tokens/s / the matmul ceiling, which is measured first: median
              of large torch.mm on random numbers, bf16 on a GPU, fp32 on a CPU, for any config
    MiB       on a GPU the peak of this variant's tensors in a timed step. On a CPU the process's peak
              resident set so far, which cannot be reset: it includes earlier lines and other variants
    first s   the variant's first step, with compilation; the second setup reuses what the first compiled.
              compile=true: with a validation forward, as in train_gpt.py's warm-up, since the first call
              decides what is compiled for any length. Further warm-up steps are not timed
    ratio     to the base's pairs: median with quartiles; steps of all variants are interleaved, A B A B

A stage repeats its own steps. From the third stage on embed and lm_head are untied, as after the untie step.
Each line starts from initial weights. Without --data and shards in the preset's folder, tokens are synthetic:
those of data/synthetic.py, with the frequencies and document lengths of web text.

--kernels times each kernel that the config names, and FlashAttention, against plain torch, interleaved;
FlashAttention forward and backward; medians of 20. TFLOP/s are the kernel's, for plain
torch's products: gram does half of them. GB/s count each operand once. Plain torch is not compiled. Caches
are not cleared between calls.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import train_gpt as tg
from synthetic import draw_documents
from tokenize_text import shard_header

SETUPS = {"one GPU": 1, "one rank of 8": 8}  # world sizes
LINE = (
    "{:<7} {:>7} {:>8} {:>17} {:>8} {:>8} {:>8} {:>6} {:>9} {:>6} {:>8} {:>6} {:>7} {:>7} {:>6} {:>12}".format
)
COLUMNS = (
    "variant,tokens,ms,quartiles,first,second,host,wait,tokens/s,keys,MFLOP,MFU,MiB,first s,ratio,quartiles"
)
HEAD = LINE(*COLUMNS.split(","))
KERNEL_LINE = "{:<18} {:<40} {:>9} {:>9} {:>7} {:>8} {:<7}".format


def mean_keys(cu_seqlens: np.ndarray, window: int) -> float:
    """Returns the keys that a query sees, 0 <= i - j <= window in its document: the mean over positions."""
    n = np.diff(cu_seqlens.astype(np.int64))
    w = np.minimum(window, n - 1)  # -1, so 0 keys, for the empty documents that fill cu_seqlens
    return float(((w + 1) * (w + 2) // 2 + (n - w - 1) * (w + 1)).sum() / n.sum())


def layer_keys(cfg: tg.Config, plan: tg.StepPlan, cu_seqlens: np.ndarray) -> list[float]:
    """Returns mean_keys of each attention layer. A paired layer has two rows a token; windows count rows."""
    attending = [layer for layer in cfg.layers if layer.attention]
    kinds = [(2 if layer.attention == "paired" else 1, plan.windows[layer.window]) for layer in attending]
    keys = {(rows, window): mean_keys(rows * cu_seqlens, window) for rows, window in set(kinds)}
    return [keys[kind] for kind in kinds]


def flops_per_token(cfg: tg.Config, keys: list[float]) -> float:
    """Counts FLOPs forward and backward, from the keys per query of each attention layer.

    A paired layer's token has two queries of half the heads, so the same products.
    """
    d, weights, scores = cfg.dim, cfg.dim * cfg.padded_vocab, 0.0
    for layer in cfg.layers:
        weights += layer.mlps * 2 * cfg.mlp_dim * d
    for layer, seen in zip((layer for layer in cfg.layers if layer.attention), keys, strict=True):
        width = (d // 2 if layer.narrow_qk else d) + (d // 2 if layer.narrow_v else d)
        weights, scores = weights + 2 * d * width, scores + width * seen
    return 6 * (weights + scores)


class SingleRankExchange(tg.Exchange):
    """Exchanges as one rank of several, without the others: collectives return at once, with its own data."""

    def reduce(self, name: str, how: str, grad: Tensor, recv_buffer: Tensor | None = None) -> tg.Pending:
        part = grad if how == "all_reduce" else self.shard(grad)
        if recv_buffer is None:
            return tg.Pending(part)
        return tg.Pending(recv_buffer.copy_(part), None, tg.rank_order_mean)

    def send_ids(self, kind: str, ids: np.ndarray, send_counts: list[int]) -> tuple[np.ndarray, list[int]]:
        """Returns what this rank sends itself: others ask for nothing."""
        recv_counts = [n if rank == self.rank else 0 for rank, n in enumerate(send_counts)]
        start = sum(send_counts[: self.rank])
        return ids[start : start + send_counts[self.rank]], recv_counts

    def send_rows(
        self,
        kind: str,
        name: str,
        rows: Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        out: Tensor | None = None,
    ) -> tg.Pending:
        """Fills this rank's part of `out`; others' keep what they have, 0 if it is new."""
        out = rows.new_zeros((sum(recv_counts), *rows.shape[1:])) if out is None else out
        out.split(recv_counts)[self.rank].copy_(rows.split(send_counts)[self.rank])
        return tg.Pending(out)

    def gather(self, name: str, t: Tensor) -> tg.Pending:
        return tg.Pending(t)

    def all_reduce(self, t: Tensor, op=dist.ReduceOp.SUM) -> tg.Pending:
        return tg.Pending(t)


@dataclass
class Variant:
    """Describes a config to time."""

    name: str
    cfg: tg.Config
    backend: tg.Backend
    compiler: Callable | None = None  # of tg.compiled, while it trains
    validated: bool = False  # its validation forward has run


def activate(variant: Variant) -> None:
    """Makes the script's functions those of a variant: what compiles them is one for the whole process."""
    tg.compiled.compiler = variant.compiler
    activate_flash_attention(variant.cfg)


def activate_flash_attention(cfg: tg.Config) -> None:
    """Activates the config's FlashAttention: torch has one for the whole process."""
    attention = torch.nn.attention
    wanted = "FA3" if cfg.attention == "fa3" else None
    if cfg.attention == "dense" or attention.current_flash_attention_impl() == wanted:
        return
    if wanted:
        attention.activate_flash_attention_impl("FA3")
    else:
        attention.restore_flash_attention_impl(False)


class Training:
    """Trains and times one variant, in one stage and setup."""

    def __init__(
        self,
        variant: Variant,
        stage: int,
        world_size: int,
        paths: list[Path],
        steps: int,
        device: torch.device,
    ):
        self.variant, self.device, cfg = variant, device, variant.cfg
        self.paths, self.on_gpu = paths, device.type == "cuda"
        allocated_before = self.allocated()
        self.model = tg.GPT(cfg, world_size, device, backend=variant.backend)
        exchange = (SingleRankExchange if world_size > 1 else tg.Exchange)(0, world_size)
        self.optimizer = tg.Optimizer(cfg, dict(self.model.named_parameters()), exchange, variant.backend)
        self.optimizer.is_tied = stage < 2  # untie() would also copy the moments, which are still 0
        start, count = cfg.stage_starts[stage], cfg.stages[stage].steps
        plans = [tg.plan_step(cfg, start + i % count) for i in range(steps)]
        first = tg.padded(start, 4)  # no gradient awaits its update then
        plans = [plan._replace(step=first + i, untie=False) for i, plan in enumerate(plans)]
        self.loader = tg.TrainLoader(cfg, paths, 0, world_size)
        self.batches = tg.Prefetcher(self.loader, plans, type(exchange)(0, world_size))
        self.persistent = self.allocated() - allocated_before  # bytes of this variant's tensors between steps
        self.reset()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Drops all measurements."""
        self.ms, self.host, self.waits, self.keys, self.losses = [], [], [], [], []
        self.tokens, self.peak = 0, 0

    def validate(self) -> None:
        """Runs a validation forward, on training tokens."""
        plan, self.model.ngrams = tg.plan_step(self.variant.cfg, 0), self.optimizer.ngrams
        one_slice = replace(self.variant.cfg, val_slices=1)
        batch = tg.ValLoader(one_slice, self.paths).batch(0)
        self.model.token_losses(batch.to(self.device), plan.windows)
        self.variant.validated = True

    def warm_up(self, steps: int) -> float:
        """Runs `steps` steps. Returns the seconds until the end of the first."""
        activate(self.variant)
        began = time.perf_counter()
        if self.variant.cfg.compile and not self.variant.validated:
            self.validate()
        self.step()
        first = time.perf_counter() - began
        for _ in range(steps - 1):
            self.step()
        self.reset()
        return first

    def step(self) -> None:
        activate(self.variant)
        allocated_before = self.allocated()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        batch = self.batches.next()
        self.synchronize()
        ready = time.perf_counter()
        loss = tg.train_step(self.model, self.optimizer, batch, self.batches.peek)
        self.host.append(1000 * (time.perf_counter() - ready))
        self.synchronize()
        self.ms.append(1000 * (time.perf_counter() - ready))
        self.waits.append(1000 * (ready - began))
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device) - allocated_before
            self.peak = max(self.peak, self.persistent + peak)
            self.persistent += self.allocated() - allocated_before
        self.losses.append(loss)
        self.tokens += sum(len(m.inputs) for m in batch.micro_batches)
        for m in batch.micro_batches:
            self.keys.append(layer_keys(self.variant.cfg, batch.plan, m.cu_seqlens.numpy()))

    def pairs(self) -> np.ndarray:
        """Returns, for every two successive steps, the ms of one."""
        return np.array(self.ms).reshape(-1, 2).mean(axis=1)

    def report(self, base: "Training", ceiling: float, first: float) -> None:
        if not torch.stack(self.losses).isfinite().all():  # a GPU multiplies NaN faster than numbers
            problem = "the loss is not finite, so the times mean nothing; lower the learning rate"
            raise tg.UserError(f"{self.variant.name}: {problem}")
        low, ms, high = np.quantile(self.pairs(), (0.25, 0.5, 0.75))
        tokens, keys = self.tokens // len(self.ms), np.mean(self.keys, axis=0).tolist()
        rate, flops = tokens / ms * 1000, flops_per_token(self.variant.cfg, keys)
        memory = self.peak
        if not self.on_gpu:
            unit = 1 if sys.platform == "darwin" else 1024
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        ratio = "", ""
        if self is not base:
            down, middle, up = np.quantile(self.pairs() / base.pairs(), (0.25, 0.5, 0.75))
            ratio = f"{middle:.3f}", f"{down:.3f}..{up:.3f}"
        medians = (f"{median(times):.2f}" for times in (self.ms[::2], self.ms[1::2], self.host, self.waits))
        line = LINE(
            self.variant.name,
            tokens,
            f"{ms:.2f}",
            f"{low:.2f}..{high:.2f}",
            *medians,
            f"{rate:.0f}",
            f"{np.mean(keys):.1f}",
            f"{flops / 1e6:.5g}",
            f"{rate * flops / ceiling:.4f}",
            f"{memory / 2**20:.0f}",
            f"{first:.2f}",
            *ratio,
        )
        print(line.rstrip(), flush=True)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def warmup_steps(variants: list[Variant], device: torch.device) -> int:
    """Returns the same number for all variants, so that they get the same batches."""
    return 4 if device.type == "cuda" or any(variant.cfg.compile for variant in variants) else 2


def time_stage(
    variants: list[Variant],
    stage: int,
    world_size: int,
    paths: list[Path],
    steps: int,
    device: torch.device,
    ceiling: float,
) -> list[Variant]:
    """Prints a line for each variant. Returns those for which there is memory."""
    first_seconds, warmup = {}, warmup_steps(variants, device)
    while True:
        error, at = None, 0
        with contextlib.ExitStack() as stack:
            try:
                trainings = []
                for variant in variants:
                    trainings.append(Training(variant, stage, world_size, paths, warmup + steps, device))
                    stack.callback(trainings[-1].loader.close)
                for training in trainings:
                    first_seconds.setdefault(training.variant.name, training.warm_up(warmup))
                gc.collect()
                for _ in range(steps):
                    for training in trainings:
                        training.step()
            except (RuntimeError, MemoryError) as e:
                if not is_out_of_memory(e):
                    raise
                error = tg.first_line(e)
            else:
                for training in trainings:
                    training.report(trainings[0], ceiling, first_seconds[training.variant.name])
            trainings = training = None  # frees memory before the next ones are built
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if error is None:
            return variants
        if len(variants) == 1:
            raise tg.UserError(f"out of memory: {error}; shrink head_chunk, batch_tokens or the model")
        at = at or len(variants) - 1  # if the base fails, the last of the others goes
        print(f"{variants[at].name}: out of memory next to the others; continuing without it", flush=True)
        variants = variants[:at] + variants[at + 1 :]


def timed(functions: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Returns the median ms of each, interleaved; three more calls of each go first."""
    times = [[] for _ in functions]
    for _ in range(repeats + 3):
        for function, ms in zip(functions, times):
            if device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(4_000_000)  # about 2 ms, while launches queue; they outlast short kernels
                begin.record()
                function()
                end.record()
                end.synchronize()
                ms.append(begin.elapsed_time(end))
            else:
                began = time.perf_counter()
                function()
                ms.append(1000 * (time.perf_counter() - began))
    return [median(ms[3:]) for ms in times]


def matmul_ceiling(device: torch.device) -> float:
    """Measures FLOP/s. On a GPU ten products in a row: short bursts run at a clock that no step can keep."""
    n, dtype, count = (8192, torch.bfloat16, 10) if device.type == "cuda" else (1024, torch.float32, 1)
    a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    (ms,) = timed([lambda: [torch.mm(a, b, out=out) for _ in range(count)]], device, 20)
    rate = count * 2 * n**3 / ms * 1000
    measured = f"median of 20 times {count} of {n}^3, {str(dtype)[6:]}"
    print(f"matmul ceiling: {rate / 1e12:.4g} TFLOP/s ({measured})")
    return rate


class KernelCase(NamedTuple):
    """Holds an operation with its operands, of which --kernels times two implementations."""

    operation: str
    shapes: str
    run: Callable[[tg.Backend], Any]
    flops: float = 0.0
    nbytes: int = 0


def call_operation(operation: str, *args) -> Callable[[tg.Backend], Any]:
    return lambda backend: getattr(backend, operation)(*args)


def call_with_grad(operation: str, inputs: Sequence[Tensor], *options) -> Callable[[tg.Backend], Any]:
    """Returns a function that runs an operation and its backward, by the gradient 1."""
    inputs = [x.requires_grad_() for x in inputs]
    dy = torch.ones_like(inputs[0])
    return lambda b: torch.autograd.grad(getattr(b, operation)(*inputs, *options), inputs, dy)


def gram_cases(cfg: tg.Config, device: torch.device) -> Iterator[KernelCase]:
    """Yields the products of the orthogonalization of each bank, on one rank and on one of eight."""
    for spec in cfg.params:
        for world_size in (1, 8) if spec.optimizer == "anvil" else ():
            *bank, rows, cols = tg.param_shapes(cfg, world_size)[spec.name]
            n = math.prod(bank) // (world_size if spec.sharded else 1)
            x = torch.randn(n, rows, cols, device=device).to(tg.dtype_of(cfg.bank_dtype))
            # Of spectral norm about 1, as there: both terms of the second product then count.
            x = (x.mT if rows > cols else x) / (math.sqrt(rows) + math.sqrt(cols))
            (_, M, K), A, name = x.shape, tg.gram(x), f"{spec.name} of {world_size}: {n}"
            run = call_operation("gram", x)
            yield KernelCase("gram", f"{name} x {M} x {K}", run, flops=2 * n * M * M * K)
            run = call_operation("gram", A, A, *tg.ANVIL_MAPS[0][1:])
            yield KernelCase("gram", f"{name} x {M} x {M} +", run, flops=2 * n * M**3)


NGRAM_ORDERS = 2, 3  # of a config that has none
MOST_ROWS = 1 << 16  # of a range: more than caches hold; fp64 copies of them must fit


def ngram_cases(cfg: tg.Config, tokens: np.ndarray, device: torch.device) -> Iterator[KernelCase]:
    """Yields the sum of the gradients of n-grams' rows, of those of a micro-batch."""
    ngrams = replace(cfg.ngrams, orders=cfg.ngrams.orders or NGRAM_ORDERS)
    ngrams = replace(ngrams, rows=min(ngrams.rows, MOST_ROWS), width=min(ngrams.width, cfg.dim))
    ids, sign_ids = tg.hash_ngrams(tokens, ngrams, cfg.sign_rows)
    index = tg.index_rows(ids, signs=sign_ids)
    (K, T), n = ids.shape, len(index.row_ids)

    def rand(rows: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(rows, ngrams.width, device=device).to(dtype)

    out, model_dtype = rand(n, tg.dtype_of(ngrams.dtype)), tg.dtype_of(cfg.dtype)
    found, signs = rand(T, model_dtype), rand(cfg.sign_rows, model_dtype).sign()
    index = index._replace(row_ids=torch.arange(n, dtype=torch.int32))
    index = tg.map_tensors(lambda t: t.to(device), index)
    run = call_operation("segment_sum_rows", out, found, index, signs)
    nbytes = K * found.nbytes + 2 * out.nbytes
    yield KernelCase("segment_sum_rows", f"n-grams: {K} x {T} to {n} rows", run, nbytes=nbytes)


def stage_cases(
    cfg: tg.Config, plan: tg.StepPlan, paths: list[Path], device: torch.device
) -> Iterator[KernelCase]:
    """Yields the other operations, on the operands of a stage's micro-batch on one GPU."""
    loader = tg.TrainLoader(cfg, paths, 0, 1)
    batches = tg.Prefetcher(loader, [plan], tg.Exchange(0, 1))
    *_, batch = batches.next().micro_batches
    keys = layer_keys(cfg, plan, batch.cu_seqlens.numpy())
    inputs, batch = batch.inputs.numpy(), batch.to(device)
    T, d, V, F, model_dtype = (
        len(batch.inputs),
        cfg.dim,
        cfg.padded_vocab,
        cfg.mlp_dim,
        tg.dtype_of(cfg.dtype),
    )

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(model_dtype)

    h, fc, square, dy = rand(T, d), rand(F, d), rand(T, F).relu().square(), rand(T, d)
    for operation, args in {"relu_square": (h, fc), "relu_square_grad": (dy, fc, square)}.items():
        yield KernelCase(operation, f"{T} x {d} x {F}", call_operation(operation, *args), flops=2 * T * F * d)
    fc8, proj8, fc_scale, proj_scale, _ = (
        t[0] for t in tg.fp8_mlp_weights(torch.stack([fc, fc]), torch.zeros(1, device=device))
    )
    act_scale, act_amax = square.max().float() / tg.E4M3_MAX, torch.zeros((), device=device)
    weights = tg.FP8MLP(fc8, proj8, fc_scale, proj_scale, act_scale, act_amax)
    run = call_operation("relu_square_fp8", *tg.amax_to_fp8(h), weights, model_dtype)
    yield KernelCase("relu_square_fp8", f"{T} x {d} x {F}", run, flops=2 * T * F * d)

    n, K = min(cfg.head_chunk, T), len(plan.loss_weights)
    prefixes = torch.arange(-1, V - 1, device=device) if plan.prefix else None
    logits, targets = rand(n, V), tg.loss_targets(batch.targets, len(plan.mtp), prefixes)[:n]
    grad_dtypes = {cfg.dtype: (0.0, logits.element_size()), "e5m2": (tg.FP8_GRAD / cfg.microbatches, 1)}
    for out_dtype, (scale_inv, size) in grad_dtypes.items():
        run = call_operation("softcap_loss", logits, targets, plan.loss_weights, scale_inv)
        nbytes = logits.nbytes + size * logits.numel()
        yield KernelCase("softcap_loss", f"{n} x {V}, {K} targets, {out_dtype}", run, nbytes=nbytes)
    del logits

    for spec in tg.used_params(cfg):
        if spec.name in ("value_embeds", "bigram_embed"):
            shape, index = tg.param_shapes(cfg, 1)[spec.name], batch.index[spec.kind]
            out, grad, count = rand(*shape), rand(T, *shape[1:]), len(index.row_ids)
            nbytes = grad.nbytes + out[0].nbytes * 2 * count
            signs = rand(cfg.sign_rows, d).sign()
            run = call_operation("segment_sum_rows", out, grad, index, signs)
            yield KernelCase("segment_sum_rows", f"{spec.name}: {T} to {count} rows", run, nbytes=nbytes)
            del out, grad

    yield from ngram_cases(cfg, inputs, device)

    attending = [(layer.attention, layer.window) for layer in cfg.layers if layer.attention]
    for (kind, name), seen_keys in dict(zip(attending, keys)).items():
        rows, window = 2 if kind == "paired" else 1, plan.windows[name]
        head_shape = T * rows, cfg.heads // rows, cfg.head_dim
        qkv = [tg.norm(rand(*head_shape)) for _ in range(3)]
        options = batch.cu_seqlens * rows, plan.max_doc_len * rows, window, cfg.attn_scale
        run = call_with_grad("attention", qkv, *options)
        shapes, flops = f"{kind} {name}: {T * rows}, window {window}", 12 * d * seen_keys * T
        yield KernelCase("attention", f"stage {plan.stage}, {shapes}", run, flops=flops)
    loader.close()


def kernel_cases(
    cfg: tg.Config, stages: list[int], paths: list[Path], device: torch.device
) -> Iterator[KernelCase]:
    """Yields what --kernels times: each operation that is not plain torch, once for equal shapes."""
    operations, seen = {name for kernel in cfg.kernels for name in tg.KERNELS[kernel]}, set()
    if cfg.attention != "dense":
        operations.add("attention")
    if not (cfg.fp8 and cfg.fp8_mlp):  # the GPU may have no FP8
        operations.discard("relu_square_fp8")
    plans = (tg.plan_step(cfg, cfg.stage_starts[stage]) for stage in stages)
    of_stages = (stage_cases(cfg, plan, paths, device) for plan in plans)
    for case in itertools.chain(gram_cases(cfg, device), *of_stages):
        if case.operation in operations and case[:2] not in seen:
            seen.add(case[:2])
            yield case


def time_kernels(variant: Variant, stages: list[int], paths: list[Path], device: torch.device) -> None:
    print(KERNEL_LINE("operation", "shapes", "torch ms", "kernel ms", "ratio", "rate", ""))
    activate_flash_attention(variant.cfg)
    for case in kernel_cases(variant.cfg, stages, paths, device):
        calls = [partial(case.run, backend) for backend in (tg.TORCH_BACKEND, variant.backend)]
        try:
            torch_ms, kernel_ms = timed(calls, device, 20)
        except torch.OutOfMemoryError:
            print(KERNEL_LINE(case.operation, case.shapes, "out of", "memory", "", "", ""), flush=True)
            continue
        if case.flops:
            rate = f"{case.flops / kernel_ms / 1e9:.1f}", "TFLOP/s"
        else:
            rate = f"{case.nbytes / kernel_ms / 1e6:.0f}", "GB/s"
        times = f"{torch_ms:.4f}", f"{kernel_ms:.4f}", f"{kernel_ms / torch_ms:.3f}"
        print(KERNEL_LINE(case.operation, case.shapes, *times, *rate), flush=True)


def synthetic_shard(folder: str, cfg: tg.Config, stages: list[int], steps: int) -> tuple[list[Path], str]:
    """Writes random tokens, enough for `steps` steps of each stage. Returns the paths and a summary."""
    cut = min(cfg.stages[s].max_doc_len for s in stages)
    microbatches = max(8, cfg.microbatches)
    # Every micro-batch may drop the rest of a document.
    largest = max(cfg.stages[s].batch_tokens + microbatches * cfg.stages[s].max_doc_len for s in stages)
    need, parts, documents = largest * steps + cfg.val_slice_tokens, [], 0
    for tokens, lengths in draw_documents(cfg.bos_id, seed=0):
        parts.append(tokens)
        need, documents = need - np.minimum(lengths, cut).sum(), documents + len(lengths)
        if need < 0:
            break
    tokens = np.concatenate(parts)
    path = Path(folder, "synthetic_train_000000.bin")
    path.write_bytes(shard_header(len(tokens), cfg.vocab_size, cfg.bos_id) + tokens.astype("<u2").tobytes())
    return [path], f"data: {len(tokens):,} synthetic tokens in {documents:,} documents"


def make_variants(args: argparse.Namespace, device: torch.device) -> list[Variant]:
    variants, data = [], [f"data={args.data}"] if args.data else []
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for name, changes in [("base", []), *zip(names, map(str.split, args.against))]:
        cfg = tg.PRESETS[args.preset]
        for setting in [*args.settings, *data, *changes]:
            cfg = tg.override(cfg, setting)
        for world_size in SETUPS.values():
            tg.check_config(cfg, world_size)
        variants.append(Variant(name, cfg, tg.select_backend(cfg, device), tg.compiler_of(cfg)))
    return variants


def choose_stages(args: argparse.Namespace, variants: list[Variant]) -> list[int]:
    all_stages = variants[0].cfg.stages
    with_steps = [str(i) for i, stage in enumerate(all_stages) if stage.steps]
    chosen = set(args.stages.split(",") if args.stages else with_steps)
    everywhere = all(
        variant.cfg.stages[int(i)].steps for i in chosen & set(with_steps) for variant in variants
    )
    if not chosen or not chosen <= set(with_steps) or not everywhere:
        last = len(all_stages) - 1
        raise tg.UserError(f"--stages {args.stages}: name stages with steps, 0 to {last}, like 0,2")
    return sorted(map(int, chosen))


def changed_settings(base: tg.Config, cfg: tg.Config) -> list[str]:
    before, after = (tg.flatten(json.loads(tg.config_json(c))) for c in (base, cfg))
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return [f"{name} ({before.get(name)}, {after.get(name)})" for name in names]


def run(args: argparse.Namespace) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if args.kernels and device.type == "cpu":
        raise tg.UserError("--kernels: Triton kernels cannot be timed on a CPU, only interpreted; use a GPU")
    variants = make_variants(args, device)
    cfg, base = variants[0].cfg, tg.PRESETS[args.preset]
    stages = choose_stages(args, variants)
    if args.steps < 2 or args.steps % 2:
        raise tg.UserError(f"--steps {args.steps}: give an even number: Adam updates every second step")
    if args.kernels and not cfg.kernels:
        raise tg.UserError(f"--kernels: this config names none; give --set kernels={','.join(tg.KERNELS)}")
    # Every variant compiles its own functions, and each stage's length may compile them again.
    torch._dynamo.config.recompile_limit *= len(variants)
    for line in tg.describe_environment(device, 1):
        print(line)
    print("; ".join([f"preset {args.preset}", *changed_settings(base, cfg)]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = tg.find_shards(cfg.data, "train")
            source = f"data: {len(paths)} shards of {cfg.data}"
        except tg.UserError:
            if cfg.data != base.data:
                raise
            paths, source = synthetic_shard(folder, cfg, stages, args.steps + warmup_steps(variants, device))
        print(source)
        for path in paths:
            vocab_size = tg.read_header(path).vocab_size
            if vocab_size != cfg.vocab_size:
                problem = f"made for a vocabulary of {vocab_size}, the config has {cfg.vocab_size}"
                raise tg.UserError(f"{path}: {problem}")
        if args.kernels:
            return time_kernels(variants[0], stages, paths, device)
        ceiling = matmul_ceiling(device)
        for variant, changes in zip(variants[1:], args.against):
            print(f"{variant.name}: {changes}")
        for stage in stages:
            for setup, world_size in SETUPS.items():
                plan = tg.plan_step(cfg, cfg.stage_starts[stage])
                count = tg.num_microbatches(cfg, world_size)
                windows = ", ".join(f"{name} {window}" for name, window in plan.windows.items())
                print(
                    f"\nstage {stage}, {setup}: {count // world_size} micro-batches of "
                    f"{plan.batch_tokens // count} tokens, windows {windows}, documents to "
                    f"{plan.max_doc_len}\n{HEAD}",
                    flush=True,
                )
                variants = time_stage(variants, stage, world_size, paths, args.steps, device, ceiling)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="step_time.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    preset = "record" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--preset", choices=tg.PRESETS, default=preset)
    help_set, help_against = "change settings of all variants", "add a variant with these settings"
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="settings", help=help_set)
    add("--stages", default="", metavar="N,...", help="default: all")
    add("--steps", type=int, default=20, metavar="N", help="timed in each line, even; default: %(default)s")
    add("--against", action="append", default=[], metavar="'NAME=VALUE ...'", help=help_against)
    add("--kernels", action="store_true", help="time operations instead of steps")
    add("--data", metavar="DIR", help="folder of .bin shards")
    try:
        run(parser.parse_args(argv))
    except tg.UserError as e:
        print(f"step_time.py: error: {e}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
