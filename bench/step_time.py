#!/usr/bin/env python3
"""Times a training step, stage by stage; with --against, of several settings in turns.

    python bench/step_time.py [--preset record|cpu|words] [--set NAME=VALUE ...] [--stages 0,1,2,3]
                              [--steps N] [--against "NAME=VALUE ..." ...]
                              [--scale [width,tokens,rows,processes]]

Times each stage's steps in one process, synchronizing with the device before and after each, in two setups:

    whole step     world size 1: all micro-batches of the batch, the whole optimizer
    one rank of 8  rank 0 of 8, alone: its micro-batches, an eighth of the sharded optimizer. Collectives
                   return at once, with this rank's data; of this rank's rows of a table the others touch as
                   many each as it does itself. Not included: communication, waiting for others, copies into
                   reduced shards

    pair      two successive steps, an Adam period: ANVIL updates after both, Adam after the second
    ms        half a pair: median over pairs, with quartiles
    host      median ms until train_step has returned, while the GPU may still compute. Close to ms: the
              GPU waits for launches. On a CPU it is ms
    wait      median ms of waiting for the prefetched batch; not in ms
    builder   ms of CPU that the thread which builds batches takes for one, a mean; not in ms. It works while
              steps train, but each of the two threads waits while the other holds the interpreter's lock.
              Further threads of its torch operations are not counted: OMP_NUM_THREADS=1 avoids them
    tokens/s  tokens of this process / ms
    MFLOP     of a token, forward and backward: 6 (qk + vo + mlp + head) + 12 H D (sum of keys over layers).
              Keys are those that a query sees, in its window and document; the head has the columns that
              a sampled softmax computes. Counts weights without a bank's padding, H heads of D, and FP8
              FLOPs like others. Does not count embeddings, the optimizer, or recomputation
    MFU       model FLOP utilization: MFLOP x tokens/s / the matmul ceiling, which is measured first: median
              of large torch.mm on random numbers, bf16 on a GPU, fp32 on a CPU, for any config
    MiB       on a GPU the peak of this variant's tensors in a timed step. On a CPU the process's peak
              resident set so far, which cannot be reset: it includes earlier lines and other variants
    first s   the variant's first step, with compilation; the second setup reuses what the first compiled.
              compile=true: with a validation forward, as in train_gpt.py's warm-up, since the first call
              decides what is compiled for any length. Further warm-up steps are not timed
    ratio     to the base's pairs: median with quartiles; steps of all variants are interleaved, A B A B

A stage repeats its first steps, so of several numbers of candidates it times the first. From the third
stage on embed and lm_head are untied, as after the untie step. Each line starts from initial weights. Without
shards in the config's folder, tokens are synthetic: those of data/synthetic.py, with the frequencies and
document lengths of web text.

--scale times one stage instead, the last of --stages, at growing sizes. The exponent is the slope of the
least-squares fit of log(ms) on log(size); the local one is between the two largest sizes. Expect:

    width      heads and mlp_dim 1, 2 and 4 times the config's: at most 2, since matrices grow with width^2
    tokens     of a batch, 1/4 to 4 times the stage's: at most 1, and less where fixed costs count
    rows       of the n-gram table, all orders together, 2^14 to 2^24: 0, since a step touches at most one row
               for each token and order, however many there are
    processes  1, 2 and 4 with one thread each, which share a batch: -1 if each has a core and communication
               costs nothing, 0 if they share cores; above 0 they get in each other's way

The sizes of width, tokens and rows are interleaved in one process. Processes are those of train_gpt.py under
torchrun, one number after another; their ms are its log's, with waiting for batches and other processes.
"""

import argparse
import contextlib
import gc
import operator
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import train_gpt as tg
from scripts import make_parser, run_script, tied
from synthetic import draw_documents
from tokenize_text import shard_header

SETUPS = {"whole step": 1, "one rank of 8": 8}  # world sizes
COLUMNS = "variant,tokens,ms,quartiles,host,wait,builder,tokens/s,MFLOP,MFU,MiB,first s".split(",")
COLUMNS += ["ratio", "quartiles"]
LINE = "{:<7} {:>7} {:>8} {:>17} {:>8} {:>6} {:>7} {:>9} {:>8} {:>6} {:>7} {:>7} {:>6} {:>12}"

PROCESSES = 1, 2, 4
SCALES = "width", "tokens", "rows", "processes"
SCALE_LINE = "{:>10} {:>9} {:>19}  {}".format


def table_line(cells: Sequence[Any]) -> str:
    return LINE.format(*cells).rstrip()


def mean_keys(cu_seqlens: np.ndarray, window: int) -> float:
    """Returns the keys that a query sees, 0 <= i - j <= window in its document: the mean over positions."""
    n = np.diff(cu_seqlens.astype(np.int64))
    w = np.minimum(window, n - 1)  # -1, so 0 keys, for the empty documents that fill cu_seqlens
    return float(((w + 1) * (w + 2) // 2 + (n - w - 1) * (w + 1)).sum() / n.sum())


def layer_keys(cfg: tg.Config, plan: tg.StepPlan, cu_seqlens: np.ndarray) -> list[float]:
    """Returns mean_keys of each attention layer. A paired layer has two rows a token; windows count rows."""
    found = []
    known = {}  # many layers are alike
    for layer in cfg.layers:
        if layer.attention:
            rows = 2 if layer.attention == "paired" else 1
            kind = (rows, plan.windows[layer.window])
            if kind not in known:
                known[kind] = mean_keys(rows * cu_seqlens, plan.windows[layer.window])
            found.append(known[kind])
    return found


def flops_per_token(cfg: tg.Config, keys: Iterable[float], columns: int) -> float:
    """Counts FLOPs forward and backward, from the keys per query of each attention layer, and from the head's
    columns.

    A paired layer's token has two queries of half the heads, so the same products.
    """
    d = cfg.dim
    weights = d * columns
    scores = 0.0
    attending = [layer for layer in cfg.layers if layer.attention]
    for layer, seen in zip(attending, keys, strict=True):
        qk_width = d // 2 if layer.narrow_qk else d
        v_width = d // 2 if layer.narrow_v else d
        weights += 2 * d * (qk_width + v_width)
        scores += (qk_width + v_width) * seen
    for layer in cfg.layers:
        weights += 2 * d * layer.mlps * cfg.mlp_dim
    return 6 * (weights + scores)


class SingleRankCollectives(tg.Collectives):
    """Exchanges as one rank of several, without the others: collectives return at once, with its own data."""

    def reduce_scatter(self, name: str, grad: Tensor, in_rank_order: bool = False) -> tg.Pending:
        part = self.block(grad)
        if not in_rank_order:
            return tg.Pending(part)
        parts = part.new_empty((self.world_size,) + part.shape)
        return tg.Pending(parts.copy_(part), None, tg.rank_order_mean)

    def all_to_all(
        self,
        kind: str,
        name: str,
        rows: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        out: Tensor | None = None,
    ) -> tg.Pending:
        """Fills this rank's part of `out`; others' keep what they have, 0 if it is new.

        While batches are built, this rank sends its own rows to itself, and every other rank sends as many,
        of rows next to these.
        """
        own = rows.split(input_splits)[self.rank]
        if kind == "counts":
            return tg.Pending(own.repeat(self.world_size))
        if kind == "row ids":
            ids = own.cpu().numpy()
            others = np.arange(self.world_size, dtype=np.int32)[:, None] - self.rank
            ids = (ids + others) % (ids.max(initial=0) + 1)
            return tg.Pending(tg.int32(ids.ravel()).to(own.device))
        if out is None:
            out = rows.new_zeros((sum(output_splits),) + rows.shape[1:])
        out.split(output_splits)[self.rank].copy_(own)
        return tg.Pending(out)

    def all_gather(self, name: str, t: Tensor) -> tg.Pending:
        return tg.Pending(t)

    def all_reduce(self, t: Tensor, op=dist.ReduceOp.SUM) -> tg.Pending:
        return tg.Pending(t)


class Variant:
    """A config to time, and how it runs on a device."""

    def __init__(self, name: str, cfg: tg.Config, device: torch.device):
        self.name = name
        self.cfg = cfg
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.backend = tg.select_backend(cfg, device)
        self.compiler = tg.configure_compiler(cfg)
        self.validated = False  # its validation forward has run

    def activate(self) -> None:
        """Makes the script's functions this variant's: a process has one compiler and one FlashAttention."""
        tg.COMPILER = self.compiler
        attention = torch.nn.attention
        active = attention.current_flash_attention_impl()
        if self.cfg.attention_impl == "fa3":
            if active != "FA3":
                attention.activate_flash_attention_impl("FA3")
        elif active:
            attention.restore_flash_attention_impl(False)


class Training:
    """Trains and times one variant, in one stage and setup."""

    def __init__(self, variant: Variant, stage: int, world_size: int, paths: list[Path], steps: int):
        self.variant = variant
        self.cfg = variant.cfg
        self.on_gpu = variant.on_gpu
        self.paths = paths
        allocated_before = self.allocated()
        self.model = tg.GPT(self.cfg, world_size, variant.device, backend=variant.backend)
        kind = SingleRankCollectives if world_size > 1 else tg.Collectives
        comm = kind(0, world_size, device=variant.device)
        # More steps may be timed than the run has, and the table of n-grams counts them.
        last = replace(self.cfg.stages[-1], steps=steps)
        longer = replace(self.cfg, stages=(*self.cfg.stages, last))
        params: dict[str, Tensor] = dict(self.model.named_parameters())
        self.optimizer = tg.Optimizer(longer, params, comm, variant.backend)
        self.model.ngrams = self.optimizer.ngrams
        start = self.cfg.stage_starts[stage]
        count = self.cfg.stages[stage].steps
        first = tg.padded(start, 4)  # no gradient awaits its update then
        tied = stage < 2
        plans = []
        for i in range(steps):
            plan = tg.plan_step(self.cfg, start + i % count)
            # Nothing is untied: that would also copy the moments, which are still 0.
            plans.append(plan._replace(step=first + i, tied=tied, untie=False))
        self.loader = tg.TrainLoader(self.cfg, paths, 0, world_size)
        self.steps = steps
        self.plans = iter(plans)
        self.batches = tg.Prefetcher(self.loader, self.plans, kind(0, world_size))
        self.persistent = self.allocated() - allocated_before  # bytes of this variant's tensors between steps
        self.first_seconds = 0.0
        self.is_builder_idle = False  # while a step is timed: the next batches are built before
        self.reset()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def reset(self) -> None:
        """Drops all measurements."""
        self.ms: list[float] = []
        self.host: list[float] = []
        self.waits: list[float] = []
        self.flops: list[float] = []  # of a token, by micro-batch
        self.losses: list[Tensor] = []
        self.tokens = 0
        self.peak = 0

    def validate(self) -> None:
        """Runs a validation forward, on training tokens."""
        plan = tg.plan_step(self.cfg, 0)
        self.optimizer.wait()
        batch = tg.ValLoader(replace(self.cfg, val_slices=1), self.paths).slice(0)
        self.model.token_losses(tg.move(batch, self.variant.device), plan.windows)
        self.variant.validated = True

    def warm_up(self, steps: int) -> None:
        self.variant.activate()
        began = time.perf_counter()
        if self.cfg.compile and not self.variant.validated:
            self.validate()
        self.step()
        self.first_seconds = time.perf_counter() - began
        for _ in range(steps - 1):
            self.step()
        self.reset()

    def step(self) -> None:
        self.variant.activate()
        allocated_before = self.allocated()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        batch = self.batches.next()
        # The thread reads its clock after the batches that it has been told to build.
        self.builder_seconds = self.loader.builder.submit(time.thread_time)
        if self.is_builder_idle:
            self.builder_seconds.result()
        self.synchronize()
        ready = time.perf_counter()
        loss = tg.train_step(self.model, self.optimizer, batch, self.batches.peek)
        launched = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        self.host.append(1000 * (launched - ready))
        self.ms.append(1000 * (done - ready))
        self.waits.append(1000 * (ready - began))
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated() - allocated_before
            self.peak = max(self.peak, self.persistent + peak)
            self.persistent += self.allocated() - allocated_before
        self.losses.append(loss)
        for m in batch.micro_batches:
            self.tokens += len(m.inputs)
            keys = layer_keys(self.cfg, batch.plan, m.cu_seqlens.numpy())
            columns = batch.plan.sampled_columns or self.cfg.padded_vocab
            self.flops.append(flops_per_token(self.cfg, keys, columns))

    def builder_ms(self) -> float:
        """Returns the ms of CPU that the builder's thread has taken for a batch: a mean over those built.

        Waits until the batches that it was told to build are built.
        """
        seconds = self.builder_seconds.result()
        return 1000 * seconds / (self.steps - operator.length_hint(self.plans))

    def pairs(self) -> np.ndarray:
        """Returns, for every two successive steps, the ms of one."""
        return np.array(self.ms).reshape(-1, 2).mean(axis=1)

    def measured(self, ceiling: float) -> dict[str, float]:
        """Returns numbers of the timed steps, most of them by column."""
        if not torch.stack(self.losses).isfinite().all():  # a GPU multiplies NaN faster than numbers
            problem = "the loss is not finite, so the times mean nothing; lower the learning rate"
            raise tg.UserError(f"{self.variant.name}: {problem}")
        ms = float(np.median(self.pairs()))
        tokens = self.tokens // len(self.ms)
        flops = float(np.mean(self.flops))
        peak = self.peak
        if not self.on_gpu:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        rate = tokens / ms * 1000
        return {
            "tokens": tokens,
            "ms": ms,
            "host": median(self.host),
            "wait": median(self.waits),
            "builder": self.builder_ms(),
            "tokens/s": rate,
            "MFLOP": flops / 1e6,
            "MFU": rate * flops / ceiling,
            "MiB": peak / 2**20,
        }

    def report(self, base: "Training", ceiling: float) -> None:
        found = self.measured(ceiling)
        low, high = np.quantile(self.pairs(), (0.25, 0.75))
        cells = [self.variant.name, found["tokens"], f"{found['ms']:.2f}", f"{low:.2f}..{high:.2f}"]
        cells += [f"{found['host']:.2f}", f"{found['wait']:.2f}", f"{found['builder']:.2f}"]
        cells.append(f"{found['tokens/s']:.0f}")
        cells += [f"{found['MFLOP']:.5g}", f"{found['MFU']:.4f}", f"{found['MiB']:.0f}"]
        cells.append(f"{self.first_seconds:.2f}")
        if self is base:
            cells += ["", ""]
        else:
            down, middle, up = np.quantile(self.pairs() / base.pairs(), (0.25, 0.5, 0.75))
            # Of fewer pairs quartiles say nothing.
            cells += [f"{middle:.3f}", f"{down:.3f}..{up:.3f}" if len(self.pairs()) >= 4 else "-"]
        tqdm.write(table_line(cells))


def warmup_ranges(variants: Sequence[Variant]) -> int:
    """Returns the same number for all variants, so that they get the same batches."""
    for variant in variants:
        if variant.on_gpu or variant.cfg.compile:
            return 4
    return 2


def train_interleaved(
    variants: Sequence[Variant], stage: int, world_size: int, paths: list[Path], steps: int
) -> list[Training]:
    """Times `steps` steps of each variant, after its warm-up."""
    warmup = warmup_ranges(variants)
    gc.collect()  # the last line's models
    with contextlib.ExitStack() as stack:
        trainings = []
        for variant in variants:
            trainings.append(Training(variant, stage, world_size, paths, warmup + steps))
            stack.callback(trainings[-1].loader.close)
        for training in trainings:
            training.warm_up(warmup)
        gc.collect()
        for _ in tqdm(range(steps), "steps", unit="step", leave=False, mininterval=1):
            for training in trainings:
                training.step()
    return trainings


def time_stage(
    variants: Sequence[Variant], stage: int, world_size: int, paths: list[Path], steps: int, ceiling: float
) -> None:
    """Prints a line for each variant."""
    trainings = train_interleaved(variants, stage, world_size, paths, steps)
    for training in trainings:
        training.report(trainings[0], ceiling)


def timed(functions: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Returns the median ms of each, interleaved; three more calls of each go first."""
    times = [[] for _ in functions]
    for _ in range(repeats + 3):
        for function, ms in zip(functions, times):
            if device.type == "cuda":
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
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
    n, dtype, count = 1024, torch.float32, 1
    if device.type == "cuda":
        n, dtype, count = 8192, torch.bfloat16, 10
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    ms = timed([multiply], device, 20)[0]
    return count * 2 * n**3 / ms * 1000


def synthetic_shard(folder: str, cfg: tg.Config, stages: Sequence[int], steps: int) -> list[Path]:
    """Writes random tokens, enough for `steps` steps of each stage. Returns the shard's path."""
    used = [cfg.stages[i] for i in stages]
    microbatches = max(8, cfg.microbatches)
    cut = min(stage.max_doc_len for stage in used)
    # Every micro-batch may drop the rest of a document.
    largest = max(stage.batch_tokens + microbatches * stage.max_doc_len for stage in used)
    need = largest * steps + cfg.val_slice_tokens
    parts = []
    for tokens, lengths in draw_documents(cfg.bos_id, seed=0):
        parts.append(tokens)
        need -= np.minimum(lengths, cut).sum()
        if need < 0:
            break
    tokens = np.concatenate(parts)
    path = Path(folder, "synthetic_train_000000.bin")
    path.write_bytes(shard_header(len(tokens), cfg.vocab_size, cfg.bos_id) + tokens.astype("<u2").tobytes())
    return [path]


def find_shards(
    args: argparse.Namespace, cfg: tg.Config, folder: str, stages: Sequence[int], steps: int
) -> list[Path]:
    """Returns the config's training shards, or a synthetic one in `folder`. Prints which."""
    source = cfg.data
    try:
        paths = tg.find_shards(cfg.data, "train")
    except tg.UserError:
        tg.require(cfg.data == tg.PRESETS[args.preset].data, f"{cfg.data} has no training shards")
        source = "synthetic tokens"
        paths = synthetic_shard(folder, cfg, stages, steps)
    print(f"data: {source}")
    return paths


def exponents(sizes: Sequence[float], ms: Sequence[float]) -> tuple[float, float]:
    """Returns the slopes of log(ms) on log(size): least squares, and between the two largest sizes."""
    x, y = np.log(sizes), np.log(ms)
    return np.polyfit(x, y, 1)[0], (y[-1] - y[-2]) / (x[-1] - x[-2])


def scale_changes(cfg: tg.Config, stage: int, name: str) -> dict[int, str]:
    """Returns the settings that change `cfg`, by size in ascending order."""
    changes = {}
    if name == "width":
        for n in (1, 2, 4):
            changes[n * cfg.dim] = f"heads={n * cfg.heads} mlp_dim={n * cfg.mlp_dim}"
    elif name == "tokens":
        for n in (1, 2, 4, 8, 16):
            tokens = n * cfg.stages[stage].batch_tokens // 4
            changes[tokens] = f"stages.{stage}.batch_tokens={tokens}"
    elif name == "rows":
        fix = "name other sizes, or --set ngrams.orders=2,3"
        tg.require(cfg.ngrams.orders, f"--scale rows: there is no n-gram table; {fix}")
        for n in range(14, 25, 2):
            changes[2**n] = f"ngrams.rows_per_order={2**n // cfg.ngrams.rows_per_token}"
    else:
        # The same number of micro-batches for all: others would pack documents differently.
        microbatches = max(cfg.microbatches, max(PROCESSES))
        gpus = torch.cuda.device_count()
        for n in PROCESSES:
            if not gpus or n <= gpus:
                changes[n] = f"microbatches={microbatches}"
    return changes


def time_processes(
    args: argparse.Namespace, stage: int, count: int, changes: str, shard: Path, warmup: int
) -> np.ndarray:
    """Trains `stage` in `count` processes. Returns, for every two successive steps, the ms of one."""
    schedule = f"stages.*.steps=0 stages.{stage}.steps={warmup + args.steps}"
    changes += f" {schedule} warmup=false samples=0 val_every=0 val_slices=1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [str(ROOT / "train_gpt.py"), "--preset", args.preset, "--data", str(shard.parent.resolve())]
    command += ["--set"] + args.settings + changes.split()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(
            tied(command), cwd=folder, env=environment, capture_output=True, encoding="utf-8"
        )
        said = re.findall(r"^train_gpt\.py: error.*", done.stderr, re.M) or [done.stderr]
        tg.require(not done.returncode, f"{count} processes failed: {said[0]}")
        (log,) = Path(folder).glob("records/*/attempts/*.txt")
        clock = re.findall(r"^step:\d+/\d+ train_time:(\d+)ms", log.read_text(encoding="utf-8"), re.M)
    times = np.diff(np.array(clock, np.int64), prepend=0)[warmup:]
    return times.reshape(-1, 2).mean(axis=1)


def report_scale(name: str, pairs: dict[int, np.ndarray]) -> None:
    """Prints a line for each size, from its ms of every two successive steps, and the exponents."""
    print("\n" + SCALE_LINE(name, "ms", "quartiles", "").rstrip())
    for size, ms in pairs.items():
        low, middle, high = np.quantile(ms, (0.25, 0.5, 0.75))
        note = ""
        if name == "processes" and size > os.cpu_count():
            note = f"more than the {os.cpu_count()} cores"
        print(SCALE_LINE(size, f"{middle:.2f}", f"{low:.2f}..{high:.2f}", note).rstrip())
    if len(pairs) > 1:
        overall, local = exponents(list(pairs), [float(np.median(ms)) for ms in pairs.values()])
        print(f"exponent: {overall:.2f}, local: {local:.2f}", flush=True)


def scale(args: argparse.Namespace, cfg: tg.Config, stage: int, device: torch.device) -> None:
    """Times the stage's steps at all sizes of --scale."""
    names = args.scale.split(",")
    tg.require(
        set(names) <= set(SCALES) and not args.against,
        f"--scale: of {','.join(SCALES)}, without --against",
    )
    sizes = {}  # settings by size, by name
    variants = {}
    every = []
    for name in names:
        sizes[name] = scale_changes(cfg, stage, name)
        variants[name] = []
        for changes in sizes[name].values():
            changed = reduce(tg.override, changes.split(), cfg)
            tg.check_config(changed, 1)
            variants[name].append(Variant(name, changed, device))
        every += variants[name]
    torch._dynamo.config.recompile_limit *= len(every)
    warmup = warmup_ranges(every)
    largest = max(every, key=lambda v: v.cfg.stages[stage].batch_tokens).cfg
    with tempfile.TemporaryDirectory() as folder:
        paths = find_shards(args, largest, folder, [stage], args.steps + warmup)
        if paths[0].parent == Path(folder):
            os.link(paths[0], Path(folder, "synthetic_val_000000.bin"))  # train_gpt.py validates in the end
        print(f"stage {stage}, {warmup} + {args.steps} steps of each size: minutes with the cpu preset")
        for name in names:
            pairs = {}
            if name == "processes":
                for count, changes in sizes[name].items():
                    pairs[count] = time_processes(args, stage, count, changes, paths[0], warmup)
            else:
                trainings = train_interleaved(variants[name], stage, 1, paths, args.steps)
                for size in sizes[name]:
                    pairs[size] = trainings.pop(0).pairs()  # which frees its model
            report_scale(name, pairs)


def choose_stages(args: argparse.Namespace, configs: Sequence[tg.Config]) -> list[int]:
    """Returns the stages of --stages, or else all that have steps in every config."""
    with_steps = []
    for stage in range(len(configs[0].stages)):
        if all(cfg.stages[stage].steps for cfg in configs):
            with_steps.append(str(stage))
    wanted = args.stages.split(",") if args.stages else with_steps
    known = ",".join(with_steps) or "none"
    tg.require(wanted and set(wanted) <= set(with_steps), f"--stages: those with steps are {known}")
    return [int(stage) for stage in wanted]


def run(args: argparse.Namespace) -> None:
    cfg = reduce(tg.override, args.settings, tg.PRESETS[args.preset])
    device = torch.device("cpu")
    if cfg.device == "gpu" and torch.cuda.is_available():  # as in a run
        device = torch.device("cuda", 0)
    names = ["base"]
    configs = [cfg]
    for changes in args.against:
        names.append(chr(ord("A") + len(names) - 1))
        configs.append(reduce(tg.override, changes.split(), cfg))
    for each in configs:
        tg.require(each.data == cfg.data, "--against: all variants read the same data; use --set data=")
        tg.check_config(each, max(SETUPS.values()))
    variants = [Variant(name, each, device) for name, each in zip(names, configs)]
    stages = choose_stages(args, configs)
    if args.steps is None:
        args.steps = 8 if args.scale else 20
    tg.require(
        args.steps >= 2 and args.steps % 2 == 0,
        "--steps: give an even number: Adam updates every second step",
    )
    for line in tg.describe_environment(device, 1):
        print(line)
    print(f"preset {args.preset} {' '.join(args.settings)}")
    if args.scale:
        return scale(args, cfg, stages[-1], device)
    # Every variant compiles its own functions, and each stage's length may compile them again.
    torch._dynamo.config.recompile_limit *= len(variants)
    warmup = warmup_ranges(variants)
    with tempfile.TemporaryDirectory() as folder:
        paths = find_shards(args, cfg, folder, stages, args.steps + warmup)
        ceiling = matmul_ceiling(device)
        print(f"matmul ceiling: {ceiling / 1e12:.4g} TFLOP/s")
        print("\n".join(f"{name}: {changes}" for name, changes in zip(names[1:], args.against)))
        lines = len(stages) * len(SETUPS) * len(variants)
        print(f"{lines} lines of {warmup} + {args.steps} steps: ten seconds each with the cpu preset; with")
        print("compile=true minutes more")
        for stage in stages:
            for setup, world_size in SETUPS.items():
                count = tg.num_microbatches(cfg, world_size)
                sizes = f"{count // world_size} x {cfg.stages[stage].batch_tokens // count} tokens"
                print(f"\nstage {stage}, {setup}: {sizes}")
                print(table_line(COLUMNS), flush=True)
                time_stage(variants, stage, world_size, paths, args.steps, ceiling)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("step_time.py", __doc__)
    add = parser.add_argument
    preset = "record" if torch.cuda.is_available() else "cpu"
    add("--preset", choices=tg.PRESETS, default=preset)
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="settings")
    add("--stages", metavar="N,...", help="default: all")
    add("--steps", type=int, metavar="N", help="timed in each line, even; default: 20, with --scale 8")
    variants = "'NAME=VALUE ...'"
    add("--against", nargs="+", action="extend", default=[], metavar=variants, help="a variant each")
    sizes = ",".join(SCALES)
    add("--scale", nargs="?", const=sizes, metavar="NAME,...", help=f"time growing sizes; default: {sizes}")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
