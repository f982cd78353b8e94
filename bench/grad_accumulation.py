#!/usr/bin/env python3
"""Weight gradients written in place, against autograd's: memory, traffic, time.

    python bench/grad_accumulation.py [--sizes cpu,quarter] [--micro-batches 1,8] [--processes 1] [--pairs 20]

Claimed: with main_grad, gradients of banks, head and tables take at least 25% less memory at their peak and move fewer bytes,
and a step does not take longer. Forms of the same training, side by side in one process, each with a model of its own:

    autograd  main_grad=false: autograd adds up; one lookup a table; .grad is dropped after its use, not cleared
    in place  main_grad=true
    delayed   main_grad=true, delay_head_grad=true

Sizes: "cpu", that preset's widths; "quarter", a model with the record preset's proportions of banks, head and tables, at a
quarter of its vocabulary and of its width. Both in fp32, tokens drawn with probabilities as 1/rank. One thread a process.

    peak     of memory for weight gradients in one Adam period, two steps: main_grad, and what the allocator reported, before
             the update, of allocations of exactly the size of a weight, of a bank's used layers, or of one layer's part;
             in brackets the peak of everything that the two steps allocate, and main_grad, updates included
    traffic  bytes a step that operations of the backward read and write of tensors with those shapes, mean of the two steps;
             weights, and what is made of them to multiply with, left out. Of operations by row only those rows; a view is none;
             what an operation does inside, like clearing its result before it adds to it, is not seen
    time     of a whole step with its update, median; the ratio is the median of the ratios of successive steps, with quartiles.
             Turns change from step to step. Two steps go before
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
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg  # noqa: E402

SIZES = {  # config, tokens of a micro-batch: odd ones, so that no activation has the shape of a weight
    "cpu": (tg.CPU, 511),
    "quarter": (replace(tg.CPU, heads=2, head_dim=96, mlp_dim=768, padded_vocab=12576, vocab_size=12565, start_token=12564,
                        bigram_rows=5 * 12576), 255)}
FORMS = {"autograd": dict(main_grad=False), "in place": {}, "delayed": dict(delay_head_grad=True)}
LINE = "{:<8} {:>5} {:>5} {:<9} {:>6} {:>7} {:>6} {:>6} {:>6} {:>6} {:>8} {:>6} {:>12}".format
HEAD = "\n".join((LINE("", "micro-", "proc-", "", "peak", "", "", "banks", "head", "tables", "step", "time", ""),
                  LINE("size", "batch", "esses", "form", "MB", "(all)", "ratio", "MB", "MB", "MB", "ms", "ratio", "quartiles")))


def config(size: str, micro_batches: int, world: int, form: str, folder: str) -> tg.Config:
    cfg, T = SIZES[size]
    slices = micro_batches * world
    stage = replace(cfg.stages[1], steps=1000, tokens=T * slices)
    return replace(cfg, data=folder, slices=slices, stages=(stage,), doc_slots=T, val_every=0, **FORMS[form])


def write_shard(path: Path, cfg: tg.Config, count: int) -> None:
    """Tokens with probabilities as 1/rank, a start token about every 200."""
    rng = np.random.default_rng(0)
    odds = 1 / np.arange(1, cfg.start_token + 1)
    tokens = rng.choice(cfg.start_token, count, p=odds / odds.sum())
    tokens[::200] = cfg.start_token
    header = np.zeros(tg.HEADER_BYTES // 4, dtype="<i4")
    header[:5] = tg.MAGIC, tg.VERSION, count, cfg.vocab_size, cfg.start_token
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


class Training:
    def __init__(self, cfg: tg.Config, rank: int, world: int):
        self.model, exchange = tg.GPT(cfg, world), tg.Exchange(rank, world)
        self.optimizer = tg.Optimizer(cfg, dict(self.model.named_parameters()), exchange)
        loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, pin=False)
        self.batches = tg.Batches(loader, (tg.plan(cfg, step) for step in range(cfg.steps)))

    def step(self) -> float:
        """One training step; seconds."""
        batch, began = self.batches.next(), time.perf_counter()
        tg.train_step(self.model, self.optimizer, batch)
        return time.perf_counter() - began

    def weight_shapes(self) -> dict[tuple[int, ...], str]:
        """Shapes in which gradients of banks, head and tables appear, a layer's own and transposed ones too."""
        cfg, d, n, shapes = self.model.cfg, self.model.cfg.dim, len(self.model.attention_index), {}
        layers = {"qk_bank": (n, 2 * d), "vo_bank": (2 * n, d), "mlp_bank": (2 * len(cfg.layers), cfg.mlp_dim)}
        for row in cfg.params:
            if not row.in_place:
                continue
            shape = tuple(getattr(self.model, row.name).shape)
            kind, flat = "head", (shape[0], math.prod(shape[1:]))
            if row.rows:  # sum_rows takes 768 columns at a time
                kind = "tables"
                shapes |= {(shape[0], min(768, flat[1] - i)): kind for i in range(0, flat[1], 768)}
            elif row.name in layers:
                kind, (count, rows), every = "banks", layers[row.name], math.prod(shape[:-1])
                parts = (rows, d), (count, rows, d), (count * rows, d), (every, d), (every // rows, rows, d)
                shapes |= dict.fromkeys(parts, kind)
            shapes |= {shape: kind, flat: kind}
        return shapes | {shape[::-1]: kind for shape, kind in shapes.items() if len(shape) == 2 and shape[::-1] not in shapes}


class Traffic(TorchDispatchMode):
    """Bytes read and written of tensors that have a weight's shape and are no weights themselves, by kind."""

    def __init__(self, shapes: dict[tuple[int, ...], str], parameters: list[torch.Tensor]):
        super().__init__()
        self.shapes, self.moved = shapes, Counter()
        self.weights = {p.untyped_storage().data_ptr() for p in parameters}
        self.operands, self.make_operand = [], tg.operand

    def operand(self, *args) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            made = self.make_operand(*args)
        self.operands.append(made)  # kept, so that nothing else comes to lie in its place
        self.weights.add(made.untyped_storage().data_ptr())
        return made

    def run(self, fn: Callable, *args) -> Any:
        """fn(*args), watched."""
        tg.operand = self.operand
        try:
            with self:
                return fn(*args)
        finally:
            tg.operand = self.make_operand
            self.weights -= {t.untyped_storage().data_ptr() for t in self.operands}
            self.operands.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func in (torch.ops.aten.empty_like.default, torch.ops.aten.detach.default):
            return result
        name, schema = func._schema.name.removeprefix("aten::"), func._schema
        named = [*zip(schema.arguments, args), *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)]
        if name in ("index", "index_copy_"):  # rows out of a tensor, or into it
            self.count(args[0], (result if name == "index" else args[3]).nbytes)
            return result
        for argument, value in named:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for t in tree_leaves(value):
                if isinstance(t, torch.Tensor):
                    only = argument.kwarg_only or name in ("copy_", "zero_", "fill_")  # written without being read
                    self.count(t, t.nbytes * (2 if writes and not only else 1))
        for returned, value in zip(schema.returns, result if isinstance(result, (tuple, list)) else [result]):
            if returned.alias_info is None:
                for t in tree_leaves(value):
                    if isinstance(t, torch.Tensor):
                        self.count(t, t.nbytes)
        return result

    def count(self, t: torch.Tensor, nbytes: int) -> None:
        if t.untyped_storage().data_ptr() not in self.weights and tuple(t.shape) in self.shapes:
            self.moved[self.shapes[tuple(t.shape)]] += nbytes


def peaks(training: Training, folder: str) -> tuple[float, float]:
    """Peak bytes of weight gradients, and of all that two steps allocate besides main_grad; main_grad counts in both."""
    sizes, optimizer = {math.prod(shape) * 4 for shape in training.weight_shapes()}, training.optimizer
    original = optimizer.work

    def work(*args):
        with torch.profiler.record_function("update"):
            original(*args)

    optimizer.work = work
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        training.step()
        training.step()
    del optimizer.work
    path = os.path.join(folder, f"trace{os.getpid()}.json")
    profiled.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    updating = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "update" and "dur" in e]
    live, weights, everything, peak, top = {}, 0, 0, 0, 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["args"]["Ev Idx"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        updates = any(start <= event["ts"] <= end for start, end in updating)
        if nbytes > 0:
            live[address] = nbytes, nbytes in sizes and not updates
        elif address in live:
            nbytes = -live[address][0]
        else:
            continue
        of_weights = live[address][1] if nbytes > 0 else live.pop(address)[1]
        everything += nbytes
        weights += nbytes if of_weights else 0
        peak, top = max(peak, weights), max(top, everything)
    kept = sum(t.untyped_storage().nbytes() for t in optimizer.main_grad.values())
    return peak + kept, top + kept


def traffic_of(training: Training) -> dict[str, float]:
    """Bytes of gradient traffic a step, by kind, mean of an Adam period's two."""
    model, optimizer = training.model, training.optimizer
    traffic = Traffic(training.weight_shapes(), list(model.parameters()))
    backward, collect, head = torch.autograd.backward, optimizer.collect, model.head
    model.head = lambda *args: traffic.run(head, *args)
    torch.autograd.backward = lambda *args: traffic.run(backward, *args)
    optimizer.collect = lambda *args: traffic.run(collect, *args)
    runs = [(grad, grad.run) for grad in optimizer.weight_grads.values()]
    for grad, run in runs:
        grad.run = lambda run=run: traffic.run(run)
    try:
        training.step()
        training.step()
    finally:
        torch.autograd.backward = backward
        del optimizer.collect, model.head
        for grad, _ in runs:
            del grad.run
    return {kind: traffic.moved[kind] / 2 for kind in ("banks", "head", "tables")}


def measure(rank: int, world: int, size: str, micro_batches: int, args: argparse.Namespace, folder: str) -> None:
    configs = {form: config(size, micro_batches, world, form, folder) for form in FORMS}
    trainings = {form: Training(cfg, rank, world) for form, cfg in configs.items()}
    for training in trainings.values():
        training.step(), training.step()

    times = {form: [] for form in FORMS}
    for turn in range(args.pairs):
        order = list(FORMS)[turn % 3:] + list(FORMS)[:turn % 3]
        for form in order:
            if world > 1:
                dist.barrier()
            seconds = torch.tensor(trainings[form].step())
            if world > 1:
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[form].append(seconds.item())

    first = None
    for form, training in trainings.items():
        peak, top = peaks(training, folder)
        moved = traffic_of(training)
        first = first or peak
        ratios = [a / b for a, b in zip(times[form], times["autograd"])]
        low, _, high = quantiles(ratios, n=4)
        if rank == 0:
            print(LINE(size, micro_batches, world, form, f"{peak / 1e6:.1f}", f"({top / 1e6:.0f})", f"{peak / first:.3f}",
                       *(f"{nbytes / 1e6:.1f}" for nbytes in moved.values()),
                       f"{1000 * median(times[form]):.1f}", f"{median(ratios):.3f}", f"{low:.3f}..{high:.3f}"), flush=True)
    for training in trainings.values():
        training.batches.close()


def work(rank: int, world: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if world > 1:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for size in args.sizes:
        for micro_batches in args.micro_batches:
            measure(rank, world, size, micro_batches, args, os.path.join(folder, size))
    if world > 1:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES), metavar="SIZE,...")
    parser.add_argument("--micro-batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8], metavar="N,...")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="timed steps of each form; default: %(default)s")
    args = parser.parse_args(argv)
    if not set(args.sizes) <= set(SIZES) or min(*args.micro_batches, args.processes) < 1 or args.pairs < 2 or args.pairs % 2:
        parser.error(f"sizes are {', '.join(SIZES)}; numbers at least 1, pairs even: every second step updates all")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            os.mkdir(os.path.join(folder, size))
            steps = args.pairs + 6
            count = 3 * steps * max(args.micro_batches) * args.processes * (SIZES[size][1] + 1)
            write_shard(Path(folder, size, "x_train_000000.bin"), SIZES[size][0], count)
        print(f"torch {torch.__version__}, CPU, {os.cpu_count()} cores, {args.processes} processes of one thread\n\n{HEAD}",
              flush=True)
        if args.processes == 1:
            work(0, 1, folder, args)
        else:
            multiprocessing.set_forkserver_preload(["train_gpt"])
            torch.multiprocessing.start_processes(work, (args.processes, folder, args), nprocs=args.processes,
                                                  start_method="forkserver")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
