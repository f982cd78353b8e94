#!/usr/bin/env python3
"""Compares weight gradients written into main_grad with autograd's: memory, traffic, time.

    python bench/grad_accumulation.py [--sizes cpu,quarter] [--micro-batches 1,8] [--processes 1] [--pairs 20]

Claim: with main_grad, the banks' gradients move less than half of the bytes, and a step takes no longer.
Variants of the same training, in one process, each with its own model:

    autograd  main_grad=false: autograd sums the banks' gradients; .grad is dropped after use, not cleared
    in place  main_grad=true
    delayed   main_grad=true, delay_head_grad=true

Sizes: "cpu" has that preset's widths; "quarter" has the record preset's proportions of banks, head and
tables, at a quarter of its vocabulary and width. Both are fp32, with one thread a process, and tokens drawn
with probabilities as 1/rank.

    peak     memory for weight gradients in one Adam period, two steps: main_grad, and what is allocated
             before the update with the size of a weight, of a bank's used layers, or of one layer's matrices.
             In brackets: main_grad and all that the two steps allocate, updates included
    traffic  bytes a step that operations of the backward read and write of tensors with those shapes: mean of
             two steps. Not weights. Operations by row count only those rows, views nothing. What an operation
             does inside is not seen, like clearing its result before it adds to it
    time     of a whole step with its update: median. The ratio is the median of the ratios of successive
             steps, with quartiles. The order rotates from step to step; two warm-up steps go before
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import train_gpt as tg
from tokenize_text import shard_header

CPU = replace(tg.CPU, ngrams=tg.Ngrams())  # a table of n-grams has no gradient of its own size
QUARTER = replace(
    CPU,
    heads=2,
    head_dim=96,
    mlp_dim=768,
    padded_vocab=12576,
    vocab_size=12565,
    bos_id=12564,
    bigram_vocab_size=5 * 12576,
)
# Config and tokens of a micro-batch, odd, so that no activation has the shape of a weight.
SIZES = {"cpu": (CPU, 511), "quarter": (QUARTER, 255)}
VARIANTS: dict[str, dict[str, Any]] = {
    "autograd": {"main_grad": False},
    "in place": {},
    "delayed": {"delay_head_grad": True},
}
KINDS = ("banks", "head", "tables")
LINE = "{:<8} {:>5} {:>5} {:<9} {:>6} {:>7} {:>6} {:>6} {:>6} {:>6} {:>8} {:>6} {:>12}".format
HEAD = "\n".join(
    (
        LINE(*" ,micro-,proc-, ,peak, , ,banks,head,tables,step,time, ".split(",")),
        LINE(*"size,batch,esses,variant,MB,(all),ratio,MB,MB,MB,ms,ratio,quartiles".split(",")),
    )
)


def config(size: str, micro_batches: int, world_size: int, variant: str, folder: str) -> tg.Config:
    cfg, T = SIZES[size]
    count = micro_batches * world_size
    stage = replace(cfg.stages[1], steps=1000, batch_tokens=T * count)
    cfg = replace(cfg, data=folder, microbatches=count, stages=(stage,), max_docs=T, val_every=0)
    return replace(cfg, **VARIANTS[variant])


def write_shard(path: Path, cfg: tg.Config, count: int) -> None:
    """Writes tokens with probabilities as 1/rank, and bos_id at every 200th position."""
    rng = np.random.default_rng(0)
    odds = 1 / np.arange(1, cfg.bos_id + 1)
    tokens = rng.choice(cfg.bos_id, count, p=odds / odds.sum())
    tokens[::200] = cfg.bos_id
    header = shard_header(count, cfg.vocab_size, cfg.bos_id)
    path.write_bytes(header + tokens.astype("<u2").tobytes())


class Training:
    """Trains one variant. `group` is for the prefetch thread's collectives, alone."""

    def __init__(self, cfg: tg.Config, rank: int, world_size: int, group: Any):
        self.model, exchange = tg.GPT(cfg, world_size), tg.Exchange(rank, world_size)
        self.optimizer = tg.Optimizer(cfg, dict(self.model.named_parameters()), exchange)
        paths = tg.find_shards(cfg.data, "train")
        self.loader = tg.TrainLoader(cfg, paths, rank, world_size)
        plans = (tg.plan_step(cfg, step) for step in range(cfg.steps))
        self.batches = tg.Prefetcher(self.loader, plans, tg.Exchange(rank, world_size, group))

    def step(self) -> float:
        """Trains on a batch. Returns the seconds."""
        batch, began = self.batches.next(), time.perf_counter()
        tg.train_step(self.model, self.optimizer, batch)
        return time.perf_counter() - began

    def weight_shapes(self) -> dict[tuple[int, ...], str]:
        """Returns the kind of each shape of a weight's gradient, with transposed and per-layer shapes."""
        cfg, d = self.model.cfg, self.model.cfg.dim
        n = sum(layer.attention is not None for layer in cfg.layers)
        layers = {
            "qk_bank": (n, 2 * d),
            "vo_bank": (2 * n, d),
            "mlp_bank": (2 * len(cfg.layers), cfg.mlp_dim),
        }
        shapes: dict[tuple[int, ...], str] = {}
        for spec in cfg.params:
            if spec.kind == "plain":
                continue
            shape = tuple(getattr(self.model, spec.name).shape)
            kind, flat = "head", (shape[0], math.prod(shape[1:]))
            if spec.is_table:
                kind = "tables"
            elif spec.name in layers:
                kind, (count, rows), all_rows = "banks", layers[spec.name], math.prod(shape[:-1])
                used = (rows, d), (count, rows, d), (count * rows, d)
                shapes |= dict.fromkeys((*used, (all_rows, d), (all_rows // rows, rows, d)), kind)
            shapes |= {shape: kind, flat: kind}
        transposed = {shape[::-1]: kind for shape, kind in shapes.items() if len(shape) == 2}
        return transposed | shapes


class Traffic(TorchDispatchMode):
    """Counts the bytes read and written of tensors with a weight's shape, by kind, except of weights."""

    def __init__(self, shapes: dict[tuple[int, ...], str], parameters: list[Tensor]):
        super().__init__()
        self.shapes, self.moved = shapes, Counter()
        self.weights = {p.untyped_storage().data_ptr() for p in parameters}

    def run(self, function: Callable, *args) -> Any:
        """Returns function(*args), and counts what it moves."""
        with self:
            return function(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func in (torch.ops.aten.empty_like.default, torch.ops.aten.detach.default):
            return result
        name, schema = func._schema.name.removeprefix("aten::"), func._schema
        if name in ("index", "index_copy_"):  # reads or writes rows of a tensor
            self.count(args[0], (result if name == "index" else args[3]).nbytes)
            return result
        keyword_arguments = [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        for argument, value in [*zip(schema.arguments, args), *keyword_arguments]:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            only_writes = argument.kwarg_only or name in ("copy_", "zero_", "fill_")
            for t in tree_leaves(value):
                self.count(t, times=2 if writes and not only_writes else 1)
        results = result if isinstance(result, (tuple, list)) else [result]
        for returned, value in zip(schema.returns, results):
            if returned.alias_info is None:
                for t in tree_leaves(value):
                    self.count(t)
        return result

    def count(self, t: Any, nbytes: int | None = None, times: int = 1) -> None:
        if not isinstance(t, Tensor) or tuple(t.shape) not in self.shapes:
            return
        if t.untyped_storage().data_ptr() not in self.weights:
            self.moved[self.shapes[tuple(t.shape)]] += times * (t.nbytes if nbytes is None else nbytes)


def measure_peaks(training: Training, folder: str) -> tuple[float, float]:
    """Returns peak bytes of weight gradients, and of all that two steps allocate; both with main_grad."""
    sizes, optimizer = {math.prod(shape) * 4 for shape in training.weight_shapes()}, training.optimizer
    original_work = optimizer.work

    def recorded_work(*args):
        with torch.profiler.record_function("update"):
            original_work(*args)

    optimizer.work = recorded_work
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        training.step()
        training.step()
    delattr(optimizer, "work")
    path = os.path.join(folder, f"trace{os.getpid()}.json")
    profiled.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    updates = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "update" and "dur" in e]
    live, of_weights, of_all, peak, peak_of_all = {}, 0, 0, 0, 0
    memory_events = [e for e in events if e.get("name") == "[memory]"]
    for event in sorted(memory_events, key=lambda e: e["args"]["Ev Idx"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        in_update = any(start <= event["ts"] <= end for start, end in updates)
        if nbytes > 0:
            live[address] = nbytes, nbytes in sizes and not in_update
            is_weights = live[address][1]
        elif address in live:
            nbytes, is_weights = live.pop(address)
            nbytes = -nbytes
        else:
            continue
        of_all += nbytes
        of_weights += nbytes if is_weights else 0
        peak, peak_of_all = max(peak, of_weights), max(peak_of_all, of_all)
    main_grads = sum(
        grad.main_grad.untyped_storage().nbytes()
        for grad in optimizer.grads.values()
        if grad.main_grad is not None
    )
    return peak + main_grads, peak_of_all + main_grads


def measure_traffic(training: Training) -> dict[str, float]:
    """Returns the bytes of gradient traffic a step, by kind: the mean over an Adam period."""
    model, optimizer = training.model, training.optimizer
    traffic = Traffic(training.weight_shapes(), list(model.parameters()))
    backward = torch.autograd.backward
    methods = [(model, "head_loss_and_grad"), (optimizer, "add_row_grads")]
    methods += [(grad, "take") for grad in optimizer.grads.values()]
    for owner, name in methods:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, method=method: traffic.run(method, *args))
    torch.autograd.backward = lambda *args: traffic.run(backward, *args)
    try:
        training.step()
        training.step()
    finally:
        torch.autograd.backward = backward
        for owner, name in methods:
            delattr(owner, name)
    return {kind: traffic.moved[kind] / 2 for kind in KINDS}


def time_steps(trainings: dict[str, Training], steps: int, world_size: int) -> dict[str, list[float]]:
    """Returns the seconds of the slowest rank, by variant. The order rotates."""
    times, names = {name: [] for name in trainings}, list(trainings)
    for i in range(steps):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if world_size > 1:
                dist.barrier()
            seconds = torch.tensor(trainings[name].step())
            if world_size > 1:
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(seconds.item())
    return times


def measure(
    rank: int, world_size: int, size: str, micro_batches: int, args: argparse.Namespace, folder: str
) -> None:
    trainings = {}
    for variant in VARIANTS:
        cfg = config(size, micro_batches, world_size, variant, folder)
        group = dist.new_group(backend="gloo") if world_size > 1 else None
        trainings[variant] = Training(cfg, rank, world_size, group)
    for training in trainings.values():
        training.step()
        training.step()
    times, autograd_peak = time_steps(trainings, args.pairs, world_size), None
    for variant, training in trainings.items():
        peak, peak_of_all = measure_peaks(training, folder)
        moved = measure_traffic(training)
        autograd_peak = autograd_peak or peak
        ratios = [a / b for a, b in zip(times[variant], times["autograd"])]
        low, _, high = quantiles(ratios, n=4)
        columns = [f"{peak / 1e6:.1f}", f"({peak_of_all / 1e6:.0f})", f"{peak / autograd_peak:.3f}"]
        columns += [f"{nbytes / 1e6:.1f}" for nbytes in moved.values()]
        columns += [f"{1000 * median(times[variant]):.1f}", f"{median(ratios):.3f}", f"{low:.3f}..{high:.3f}"]
        if rank == 0:
            print(LINE(size, micro_batches, world_size, variant, *columns), flush=True)
        training.loader.close()


def run_rank(rank: int, world_size: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    for size in args.sizes:
        for micro_batches in args.micro_batches:
            measure(rank, world_size, size, micro_batches, args, os.path.join(folder, size))
    if world_size > 1:
        dist.destroy_process_group()


def names(text: str) -> list[str]:
    return text.split(",")


def integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=names, default=list(SIZES), metavar="SIZE,...", help=f"default: {','.join(SIZES)}")
    add("--micro-batches", type=integers, default=[1, 8], metavar="N,...", help="default: 1,8")
    add("--processes", type=int, default=1, metavar="N", help="default: %(default)s")
    add(
        "--pairs", type=int, default=20, metavar="N", help="timed steps of each variant; default: %(default)s"
    )
    args = parser.parse_args(argv)
    positive = min(*args.micro_batches, args.processes) >= 1 and args.pairs >= 2
    if not set(args.sizes) <= set(SIZES) or not positive or args.pairs % 2:
        sizes = ", ".join(SIZES)
        parser.error(f"sizes are {sizes}; numbers at least 1, pairs even: every second step updates all")
    began, world_size = time.perf_counter(), args.processes
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            os.mkdir(os.path.join(folder, size))
            cfg, T = SIZES[size]
            count = 3 * (args.pairs + 6) * max(args.micro_batches) * world_size * (T + 1)
            write_shard(Path(folder, size, "x_train_000000.bin"), cfg, count)
        machine = f"CPU, {os.cpu_count()} cores, {world_size} processes of one thread"
        print(f"torch {torch.__version__}, {machine}\n\n{HEAD}", flush=True)
        if world_size == 1:
            run_rank(0, 1, folder, args)
        else:
            multiprocessing.set_forkserver_preload(["train_gpt"])
            rank_args = world_size, folder, args
            torch.multiprocessing.start_processes(
                run_rank, rank_args, nprocs=world_size, start_method="forkserver"
            )
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
