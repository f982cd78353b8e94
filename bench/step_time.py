#!/usr/bin/env python3
"""The time of a training step, stage by stage, and of the operations that have kernels.

    python bench/step_time.py [--preset record|cpu] [--set NAME=VALUE ...] [--stages 0,1,2,3] [--steps N]
                              [--against NAME=VALUE ...] [--kernels] [--data DIR]

Steps of each stage are timed in one process, the device waited for before and after each, as two shapes of work:

    one GPU        world 1: all micro-batches of the batch, the whole optimizer
    one rank of 8  world 8, rank 0, alone: its micro-batches, an eighth of the sharded optimizer. Every collective is answered
                   at once, with what this rank has itself. Left out: sending, receiving, and waiting for other ranks; adding
                   the touched rows that they send, about seven eighths of that work; copying into a reduced block

    pair      two successive steps, an Adam period: NorMuon updates after both, Adam after the second
    ms        half a pair, median over pairs, with quartiles; "first" and "second" are the medians of a pair's steps
    wait      ms until the batch was built, which a thread does during the step before; not in ms; median
    tokens/s  tokens of this process by ms
    keys      that a query sees, in its window and document: mean over the timed batches and the layers that attend
    MFLOP     of a token, forward and backward: 6 (qk + vo + mlp + head) + 12 H D (sum of the keys over the layers). Weights in
              use, without a bank's padding; H heads of D. FP8 FLOPs of the head count like the others. Nothing else counts:
              embeddings, optimizer, what is computed again
    MFU       model FLOP utilisation: MFLOP x tokens/s by the matmul ceiling, which is measured in the same run: the median of
              large torch.mm on random numbers, bf16 on a GPU, fp32 on a CPU, whatever the config's dtype
    MiB       on a GPU the most that this form's tensors took in a timed step. On a CPU the process's largest resident set so
              far, which cannot be reset: earlier lines and other forms count
    first s   the form's first step here, compilation included; the second shape of work finds what the first compiled. With
              compile=true a validation forward goes before a form's very first step, and counts, as in train_gpt.py's warm-up:
              what comes first decides what is compiled for any length. 1 more step, or 3 on a GPU or with compile=true, is
              not timed
    ratio     to the base's pairs, median with quartiles; steps of all forms take turns, A B A B

A stage's steps are its own, from its start on, over and over; from the third stage on embed and lm_head are apart, as after the
split step. Weights start afresh for each line. Without --data and shards in the preset's folder, tokens are made: probabilities
as 1/rank, lengths of documents log-normal with median 400 and sigma 1.05 (mean 694), a guess at web text.

--kernels, instead: each kernel that the config names, and FlashAttention forward and backward, against the plain form, in
turns, medians of 20 in ms; the rate is the kernel's. TFLOP/s are of the plain form's products: gram does half of them. GB/s
count each operand once. Plain forms are not compiled. Caches are not cleared between.
"""
import argparse
import contextlib
import gc
import json
import math
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg  # noqa: E402

WORKS = {"one GPU": 1, "one rank of 8": 8}  # the world each is cut for
MEDIAN_LENGTH, SIGMA = 400, 1.05            # of made documents
LINE = "{:<4} {:>7} {:>8} {:>17} {:>8} {:>8} {:>6} {:>9} {:>6} {:>8} {:>6} {:>7} {:>7} {:>6} {:>12}".format
HEAD = LINE(*"form,tokens,ms,quartiles,first,second,wait,tokens/s,keys,MFLOP,MFU,MiB,first s,ratio,quartiles".split(","))
KERNEL_LINE = "{:<18} {:<40} {:>9} {:>9} {:>7} {:>8} {:<7}".format


def mean_keys(cu_seqlens: np.ndarray, window: int) -> float:
    """Keys that a query sees, 0 <= i - j <= window within its document, mean over positions."""
    n = np.diff(cu_seqlens.astype(np.int64))
    w = np.minimum(window, n - 1)  # -1 for the empty documents that fill cu_seqlens: 0 keys
    return float(((w + 1) * (w + 2) // 2 + (n - w - 1) * (w + 1)).sum() / n.sum())


def layer_keys(cfg: tg.Config, now: tg.StepPlan, cu_seqlens: np.ndarray) -> list[float]:
    """mean_keys of each layer that attends; a paired one's rows are twice the tokens, and its window counts rows."""
    kinds = [(2 if layer.attention == "paired" else 1, now.long if layer.window == "long" else now.short)
             for layer in cfg.layers if layer.attention]
    keys = {(rows, window): mean_keys(rows * cu_seqlens, window) for rows, window in set(kinds)}
    return [keys[kind] for kind in kinds]


def flops_per_token(cfg: tg.Config, keys: list[float]) -> float:
    """Forward and backward, for the keys per query of each layer that attends. A paired layer's token has two queries of half
    the heads, so the same product."""
    d = cfg.dim
    weights = len(keys) * (2 * d * d + 2 * d * d) + len(cfg.layers) * 2 * cfg.mlp_dim * d + d * cfg.padded_vocab
    return 6 * weights + 12 * d * sum(keys)


class Alone(tg.Exchange):
    """One rank of several without the others: every collective is answered at once with what this rank has itself."""

    def reduce(self, name: str, how: str, grad: torch.Tensor, room: torch.Tensor | None = None) -> tg.Pending:
        part = grad if how == "all_reduce" else self.shard(grad)
        return tg.Pending(part) if room is None else tg.Pending(room.copy_(part), None, tg.rank_order_mean)

    def announce(self, touched: dict[str, tg.Touched]) -> tg.Pending:
        counts = torch.zeros(self.world, len(touched), dtype=torch.int64)
        counts[self.rank] = torch.tensor([t.owners[self.rank] for t in touched.values()])
        return tg.Pending(counts)

    def route(self, touched: dict[str, tg.Touched], counts: tg.Pending) -> dict[str, tg.Route]:
        return {kind: tg.Route(t.rows, t.owners, received, tg.Pending(self.kept(t.rows % t.block, t.owners)))
                for (kind, t), received in zip(touched.items(), counts.wait().T.tolist())}

    def reduce_rows(self, name: str, grad: torch.Tensor, route: tg.Route, block: torch.Tensor) -> tg.Pending:
        rows = grad[route.rows]  # all of them, as if to be sent
        return tg.Pending(self.kept(rows, route.sent), None, lambda values: tg.add_rows(block, values, route))

    def kept(self, t: torch.Tensor, sent: list[int]) -> torch.Tensor:
        """What goes to this rank itself of what goes to all."""
        return t.split(sent)[self.rank]

    def gather(self, name: str, t: torch.Tensor) -> tg.Pending:
        return tg.Pending(t)


@dataclass
class Form:
    """A config that is timed."""
    name: str
    cfg: tg.Config
    ops: tg.Ops
    rehearsed: bool = False  # its validation forward is done


def select_flash(cfg: tg.Config) -> None:
    """torch has one FlashAttention for the whole process: gives it the version that this config asks for."""
    attention = torch.nn.attention
    wanted = "FA3" if cfg.attention == "fa3" else None
    if cfg.attention != "dense" and attention.current_flash_attention_impl() != wanted:
        attention.activate_flash_attention_impl("FA3") if wanted else attention.restore_flash_attention_impl(False)


class Training:
    def __init__(self, form: Form, stage: int, world: int, paths: list[Path], steps: int, device: torch.device):
        self.form, self.device, cfg, began = form, device, form.cfg, self.allocated(device)
        self.paths, self.pin = paths, device.type == "cuda"
        self.model = tg.GPT(cfg, world, device, ops=form.ops)
        self.optimizer = tg.Optimizer(cfg, dict(self.model.named_parameters()), (Alone if world > 1 else tg.Exchange)(0, world),
                                      form.ops)
        self.optimizer.is_tied = stage < 2  # untie() would besides copy moments, which are 0 yet
        start, count = cfg.stage_starts[stage], cfg.stages[stage].steps
        plans = [tg.plan(cfg, start + i % count)._replace(do_adam=i % 2 == 1, split=False) for i in range(steps)]
        self.batches = tg.Batches(tg.TrainLoader(cfg, paths, 0, world, self.pin), plans)
        self.own = self.allocated(device) - began  # bytes that this form's tensors take between its steps
        self.reset()

    @staticmethod
    def allocated(device: torch.device) -> int:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def reset(self) -> None:
        """Forgets what was measured."""
        self.ms, self.waits, self.keys, self.tokens, self.peak, self.losses = [], [], [], 0, 0, []

    def rehearse(self) -> None:
        """A validation forward, on training tokens."""
        cfg, model = self.form.cfg, self.model
        now = tg.plan(cfg, 0)
        for _, batch in tg.ValLoader(replace(cfg, val_slices=1), self.paths, 0, 1, self.pin):
            model.validation_loss(batch.to(self.device), now.short, now.long)
        self.form.rehearsed = True

    def warm_up(self, steps: int) -> float:
        """-> seconds to the end of the first step."""
        select_flash(self.form.cfg)
        began = time.perf_counter()
        if self.form.cfg.compile and not self.form.rehearsed:
            self.rehearse()
        self.step()
        first = time.perf_counter() - began
        for _ in range(steps - 1):
            self.step()
        self.reset()
        return first

    def step(self) -> None:
        select_flash(self.form.cfg)
        before = self.allocated(self.device)
        if self.pin:
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        batch = self.batches.next()
        tg.synchronize(self.device)
        ready = time.perf_counter()
        loss = tg.train_step(self.model, self.optimizer, batch)
        tg.synchronize(self.device)
        self.ms.append(1000 * (time.perf_counter() - ready))
        self.waits.append(1000 * (ready - began))
        if self.pin:
            self.peak = max(self.peak, self.own + torch.cuda.max_memory_allocated(self.device) - before)
            self.own += self.allocated(self.device) - before
        self.losses.append(loss)
        self.tokens += sum(len(micro_batch.inputs) for micro_batch in batch.micro_batches)
        self.keys += [layer_keys(self.form.cfg, batch.now, m.cu_seqlens.numpy()) for m in batch.micro_batches]

    def pairs(self) -> np.ndarray:
        """ms of a step, as half of every two."""
        return np.array(self.ms).reshape(-1, 2).mean(axis=1)

    def report(self, base: "Training", ceiling: float, first: float) -> None:
        if not torch.stack(self.losses).isfinite().all():  # a GPU multiplies NaN faster than numbers
            raise tg.UserError(f"{self.form.name}: the loss is not finite, times would say nothing; lower the learning rate")
        cfg, (low, ms, high) = self.form.cfg, np.quantile(self.pairs(), (0.25, 0.5, 0.75))
        tokens, keys = self.tokens // len(self.ms), np.mean(self.keys, axis=0).tolist()
        rate, flops = tokens / ms * 1000, flops_per_token(cfg, keys)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peak = self.peak if self.pin else resident
        ratio = ("", "")
        if self is not base:
            down, middle, up = np.quantile(self.pairs() / base.pairs(), (0.25, 0.5, 0.75))
            ratio = f"{middle:.3f}", f"{down:.3f}..{up:.3f}"
        times = f"{ms:.2f}", f"{low:.2f}..{high:.2f}", *(f"{median(t):.2f}" for t in (self.ms[::2], self.ms[1::2], self.waits))
        print(LINE(self.form.name, tokens, *times, f"{rate:.0f}", f"{np.mean(keys):.1f}", f"{flops / 1e6:.5g}",
                   f"{rate * flops / ceiling:.4f}", f"{peak / 2 ** 20:.0f}", f"{first:.2f}", *ratio).rstrip(), flush=True)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def warm_steps(forms: list[Form], device: torch.device) -> int:
    """The same for all forms, so that they get the same batches."""
    return 4 if device.type == "cuda" or any(form.cfg.compile for form in forms) else 2


def time_stage(forms: list[Form], stage: int, world: int, paths: list[Path], steps: int, device: torch.device, ceiling: float
               ) -> list[Form]:
    """Prints a line for each form. -> the forms for which there is memory."""
    firsts, warm = {}, warm_steps(forms, device)
    while True:
        error, at = None, 0
        with contextlib.ExitStack() as stack:
            try:
                live = []
                for at, form in enumerate(forms):
                    live.append(Training(form, stage, world, paths, warm + steps, device))
                    stack.callback(live[-1].batches.close)
                for at, training in enumerate(live):
                    firsts.setdefault(training.form.name, training.warm_up(warm))
                gc.collect()
                for _ in range(steps):
                    for at, training in enumerate(live):
                        training.step()
            except (RuntimeError, MemoryError) as e:
                if not is_out_of_memory(e):
                    raise
                error = tg.brief(e)
            else:
                for training in live:
                    training.report(live[0], ceiling, firsts[training.form.name])
            live = training = None  # before the next ones are built
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if error is None:
            return forms
        if len(forms) == 1:
            raise tg.UserError(f"out of memory: {error}; shrink head_chunk, tokens of a stage, or the model")
        at = at or len(forms) - 1  # the base goes on without the last of the others
        print(f"{forms[at].name}: out of memory beside the others; going on without it", flush=True)
        forms = forms[:at] + forms[at + 1:]


def timed(functions: list[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Median ms of each; they take turns."""
    times = [[] for _ in functions]
    for turn in range(repeats + 3):
        for function, own in zip(functions, times):
            if device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(4_000_000)  # about 2 ms, in which all launches queue: of short kernels they would be the time
                begin.record()
                function()
                end.record()
                end.synchronize()
                own.append(begin.elapsed_time(end))
            else:
                began = time.perf_counter()
                function()
                own.append(1000 * (time.perf_counter() - began))
    return [median(own[3:]) for own in times]


def matmul_ceiling(device: torch.device) -> float:
    """FLOP/s. On a GPU ten products in a row, for short ones run at a higher clock than a step can keep."""
    n, dtype, row = (8192, torch.bfloat16, 10) if device.type == "cuda" else (1024, torch.float32, 1)
    a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    (ms,) = timed([lambda: [torch.mm(a, b, out=out) for _ in range(row)]], device, 20)
    rate = row * 2 * n ** 3 / ms * 1000
    print(f"matmul ceiling: {rate / 1e12:.4g} TFLOP/s (median of 20 times {row} of {n}^3, {str(dtype)[6:]})")
    return rate


def kernel_cases(cfg: tg.Config, ops: tg.Ops, stages: list[int], paths: list[Path], device: torch.device) -> Iterator[tuple]:
    """What --kernels times: (operation, shapes, plain form, the config's form, FLOPs, bytes)."""
    fields, dtype, d, V = {f for k in cfg.kernels for f in tg.KERNELS[k]}, tg.dtype_of(cfg.dtype), cfg.dim, cfg.padded_vocab
    told, rand = set(), lambda *shape, dtype=dtype: torch.randn(shape, device=device).to(dtype)

    def case(field: str, shapes: str, flops: float, moved: int, *args) -> Iterator[tuple]:
        if field in fields and (field, shapes) not in told:
            told.add((field, shapes))
            yield field, shapes, *(lambda form=form: getattr(form, field)(*args) for form in (tg.PLAIN, ops)), flops, moved

    for row in cfg.params:
        for world in (1, 8) if row.optimizer == "normuon" and "gram" in fields else ():
            *n, rows, cols = tg.param_shapes(cfg, world)[row.name]
            n = math.prod(n) // (world if row.sharded else 1)
            x = rand(n, rows, cols, dtype=tg.dtype_of(cfg.polar_dtype)) / math.sqrt(rows * cols)
            x = x.mT if rows > cols else x
            (_, M, K), A, bank = x.shape, tg.gram(x), f"{row.name} of {world}: {n}"
            yield from case("gram", f"{bank} x {M} x {K}", 2 * n * M * M * K, 0, x)
            yield from case("gram", f"{bank} x {M} x {M} +", 2 * n * M ** 3, 0, A, A, *tg.POLAR_STEPS[0][1:])
    for stage in stages:
        now = tg.plan(cfg, cfg.stage_starts[stage])
        batches = tg.Batches(tg.TrainLoader(cfg, paths, 0, 1, device.type == "cuda"), [now])
        batch = batches.next().micro_batches[-1]
        T, keys, batch = len(batch.inputs), layer_keys(cfg, now, batch.cu_seqlens.numpy()), batch.to(device)
        h, fc, r, dy = rand(T, d), rand(cfg.mlp_dim, d), rand(T, cfg.mlp_dim).relu(), rand(T, d)
        yield from case("relu_square", f"{T} x {d} x {cfg.mlp_dim}", 2 * r.numel() * d, 0, h, fc)
        yield from case("relu_square_grad", f"{T} x {d} x {cfg.mlp_dim}", 2 * r.numel() * d, 0, dy, fc, r)
        n = min(cfg.head_chunk, T)
        logits, targets = rand(n, V), batch.targets[:n + len(now.mtp) - 1]
        for unit, out, size in (0.0, cfg.dtype, logits.element_size()), (tg.FP8_GRAD / cfg.slices, "e5m2", 1):
            yield from case("softcap_loss", f"{n} x {V}, {len(now.mtp)} targets, {out}", 0,
                            logits.nbytes + size * logits.numel(), logits, targets, now.mtp, unit)
        del logits
        for name in "value_embeds", "bigram_embed":
            shape, row = tg.param_shapes(cfg, 1)[name], next(row for row in cfg.params if row.name == name)
            index, out, grad = batch.index[row.rows], rand(*shape), rand(T, *shape[1:])
            moved = grad.nbytes + out[0].nbytes * (2 * len(index.rows) - int(index.fresh.sum()))
            yield from case("sum_rows", f"{name}: {T} to {len(index.rows)} rows", 0, moved, out, grad, index)
            del out, grad
        fp8 = [(T, d, torch.float8_e4m3fn), (d, V, torch.float8_e4m3fn), (n, V, torch.float8_e5m2)] if cfg.fp8 else []
        for rows, cols, kind in [(d, V, dtype), *fp8]:
            x, out = rand(rows, cols).to(kind), torch.empty(cols, rows, dtype=kind, device=device)
            yield from case("transpose_copy", f"{rows} x {cols}, {str(kind)[6:]}", 0, 2 * x.nbytes, out, x)
        out, x, rows = rand(d, V), rand(V, d), batch.touched["tokens"].rows
        yield from case("transpose_add", f"{len(rows)} rows of {V} x {d}", 0, 3 * len(rows) * x[0].nbytes, out, x, rows)
        del out, x
        attending = [(layer.attention, layer.window) for layer in cfg.layers if layer.attention]
        for (kind, width), seen in dict(zip(attending, keys)).items() if cfg.attention != "dense" else ():
            rows = 2 if kind == "paired" else 1
            q, k, v = (tg.norm(rand(T * rows, cfg.heads // rows, cfg.head_dim)).requires_grad_() for _ in range(3))
            window, dy = now.long if width == "long" else now.short, torch.ones_like(q)
            about = batch.cu_seqlens * rows, now.longest * rows, window, cfg.attn_scale
            functions = [lambda form=form: torch.autograd.grad(form(q, k, v, *about), (q, k, v), dy)
                         for form in (tg.attention, ops.attention)]
            label = f"stage {stage}, {kind} {width}: {T * rows}, window {window}"
            yield f"{cfg.attention} attention", label, *functions, 12 * d * seen * T, 0
        batches.close()


def time_kernels(form: Form, stages: list[int], paths: list[Path], device: torch.device) -> None:
    print(KERNEL_LINE("operation", "shapes", "plain ms", "own ms", "ratio", "rate", ""))
    select_flash(form.cfg)
    for name, shapes, plain, own, flops, moved in kernel_cases(form.cfg, form.ops, stages, paths, device):
        try:
            plain_ms, own_ms = timed([plain, own], device, 20)
        except torch.OutOfMemoryError:
            print(KERNEL_LINE(name, shapes, "out of", "memory", "", "", ""), flush=True)
            continue
        rate = (f"{flops / own_ms / 1e9:.1f}", "TFLOP/s") if flops else (f"{moved / own_ms / 1e6:.0f}", "GB/s")
        print(KERNEL_LINE(name, shapes, f"{plain_ms:.4f}", f"{own_ms:.4f}", f"{own_ms / plain_ms:.3f}", *rate), flush=True)


def made_shard(folder: str, cfg: tg.Config, stages: list[int], steps: int) -> tuple[list[Path], str]:
    """A shard of made tokens, enough for `steps` steps of each stage."""
    rng, words, longest = np.random.default_rng(0), cfg.start_token, min(cfg.stages[s].longest for s in stages)
    need = max(cfg.stages[s].tokens + max(8, cfg.slices) * cfg.stages[s].longest for s in stages) * steps + cfg.val_slice_tokens
    lengths = []
    while sum(np.minimum(part, longest).sum() for part in lengths) <= need:
        lengths.append(np.maximum(2, rng.lognormal(math.log(MEDIAN_LENGTH), SIGMA, 512)).astype(np.int64))
    lengths = np.concatenate(lengths)
    odds = np.cumsum(1 / np.arange(1, words + 1))
    tokens = np.searchsorted(odds, odds[-1] * rng.random(lengths.sum()), side="right").clip(max=words - 1)
    tokens[np.cumsum(lengths) - lengths] = cfg.start_token
    header = np.zeros(tg.HEADER_BYTES // 4, dtype="<i4")
    header[:5] = tg.MAGIC, tg.VERSION, len(tokens), cfg.vocab_size, cfg.start_token
    path = Path(folder, "made_train_000000.bin")
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return [path], f"data: {len(tokens):,} made tokens in {len(lengths):,} documents"


def run(args: argparse.Namespace) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if args.kernels and device.type == "cpu":
        raise tg.UserError("--kernels: Triton kernels cannot be timed on a CPU: the interpreter's time says nothing; use a GPU")
    forms, base = [], tg.PRESETS[args.preset]
    settings = [f"data={args.data}"] * bool(args.data)
    for name, changes in [("base", []), *zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(str.split, args.against))]:
        cfg = base
        for setting in [*args.settings, *settings, *changes]:
            cfg = tg.override(cfg, setting)
        for world in WORKS.values():
            tg.check_config(cfg, world)
        forms.append(Form(name, cfg, tg.choose_ops(cfg, device)))
    cfg, numbers = forms[0].cfg, [text for text in args.stages.split(",")] if args.stages else None
    stages = [i for i in range(len(cfg.stages)) if (str(i) in numbers if numbers else cfg.stages[i].steps)]
    if numbers and sorted(set(numbers)) != [str(i) for i in stages] or any(
            i >= len(form.cfg.stages) or not form.cfg.stages[i].steps for i in stages for form in forms) or not stages:
        raise tg.UserError(f"--stages {args.stages}: name stages with steps, 0 to {len(cfg.stages) - 1}, like 0,2")
    if args.steps < 2 or args.steps % 2:
        raise tg.UserError(f"--steps {args.steps}: give an even number: Adam updates every second step")
    if args.kernels and not cfg.kernels:
        raise tg.UserError("--kernels: this config names none; give --set kernels=" + ",".join(tg.KERNEL_NAMES))
    # What torch.compile may hold of one function: every form has its own, every stage's length another.
    torch._dynamo.config.recompile_limit *= len(forms)
    for line in tg.describe_environment(tg.Ranks(0, 1, device)):
        print(line)
    json_of = lambda cfg: json.loads(tg.config_json(cfg))
    print(f"preset {args.preset}" + "".join(f"; {change}" for change in tg.differing(json_of(base), json_of(cfg))))
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = tg.find_shards(cfg.data, "train")
            source = f"data: {len(paths)} shards of {cfg.data}"
        except tg.UserError:
            if cfg.data != base.data:
                raise
            paths, source = made_shard(folder, cfg, stages, args.steps + warm_steps(forms, device))
        print(source)
        for path in paths:
            header = tg.read_header(path)
            if header.vocab_size not in (0, cfg.vocab_size):
                raise tg.UserError(f"{path}: made for a vocabulary of {header.vocab_size}, the config has {cfg.vocab_size}")
        if args.kernels:
            return time_kernels(forms[0], stages, paths, device)
        ceiling = matmul_ceiling(device)
        for form, changes in zip(forms[1:], args.against):
            print(f"{form.name}: {changes}")
        for stage in stages:
            for work, world in WORKS.items():
                now, slices = tg.plan(cfg, cfg.stage_starts[stage]), tg.slices_of(cfg, world)
                print(f"\nstage {stage}, {work}: {slices // world} micro-batches of {now.tokens // slices} tokens, windows "
                      f"{now.short} and {now.long}, documents to {now.longest}\n{HEAD}", flush=True)
                forms = time_stage(forms, stage, world, paths, args.steps, device, ceiling)


def main(argv: list[str] | None = None) -> int:
    parser = tg.Parser(prog="step_time.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tg.PRESETS, default="record" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="settings")
    parser.add_argument("--stages", default="", metavar="N,...", help="default: all")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed in each line, even; default: %(default)s")
    parser.add_argument("--against", action="append", default=[], metavar="'NAME=VALUE ...'",
                        help="another form, with these settings besides; may be repeated")
    parser.add_argument("--kernels", action="store_true", help="time operations instead of steps")
    parser.add_argument("--data", metavar="DIR", help="folder of .bin shards")
    try:
        run(parser.parse_args(argv))
    except tg.UserError as e:
        print(f"step_time.py: error: {e}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
