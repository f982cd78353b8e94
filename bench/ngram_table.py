#!/usr/bin/env python3
"""Measures what a table of n-grams costs a step, for tables of 2^14 to 2^24 rows.

    python bench/ngram_table.py [--rows 14,20,24] [--dense 14,16,18,20] [--world 2] [--rounds 30]

Claims: time, bytes sent, gradients and temporaries of a step follow the rows that it touches, not the rows of
the table. Dense Adam on a replicated table of bigrams, beside it, costs the whole table in each.

Trains the cpu preset's first stage (2,048 tokens a step) on random bytes, 64 columns in fp32, one process a
rank, one thread each. Rows are drawn, not hashed: distinct rows in every micro-batch and range, so that all
tables are touched alike. The sizes take turns, forwards and backwards, in the same processes; a figure is the
median over rounds of pairs of steps, as every second step updates the other parameters too, and a ratio is
the median of the rounds' ratios to the first size. "cold" is the first pairs of steps, whose memory the
system still has to give; before the others every page is written once.

    ms       of two steps, on the slowest rank
    sent     bytes that rank 0 sends for n-grams in two steps, and their ratio to (rows asked of it + rows
             whose gradients it sends) x width x 4; the rest is row ids and counts
    buffers  MB of the rows that a step reads and of their gradients, allocated once
    peak     MB of temporaries, at most at once, torch's and NumPy's, in two steps

On a CPU, over loopback: ratios, not times, say something about other machines.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "data"))
import train_gpt as tg
from tokenize_text import shard_header

WIDTH, ORDERS = 64, (2, 3, 4, 5)
LINE = "{:>12} {:>10} {:>8} {:>7} {:>8} {:>10} {:>7} {:>8} {:>7} {:>8}".format
HEAD = LINE("table", "rows", "ms", "ratio", "cold ms", "sent", "ratio", "buffers", "peak", "ratio")


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that operations make, and the most that lived at once."""

    def __init__(self):
        super().__init__()
        self.known, self.live, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for t in tree_leaves(result):
            if torch.is_tensor(t) and (key := t.untyped_storage()._cdata) not in self.known | given:
                nbytes = t.untyped_storage().nbytes()
                self.known.add(key)
                self.live += nbytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(t.untyped_storage(), self.release, key, nbytes)
        return result

    def release(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes


def drawn_rows(rank: int):
    """Returns a stand-in for hash_ngrams: distinct random rows of every range."""
    rng = np.random.default_rng(rank)

    def draw(tokens: np.ndarray, ngrams: tg.Ngrams, sign_rows: int) -> tuple[np.ndarray, np.ndarray]:
        T, K = len(tokens), len(ngrams.orders)
        rows = [rng.choice(ngrams.rows, T, replace=False) + k * ngrams.rows for k in range(K)]
        signs = rng.integers(sign_rows, size=(K, T), dtype=np.int32)
        return np.array(rows, dtype=np.int32), signs

    return draw


class Training:
    """Trains one size of table, two steps at a time."""

    def __init__(self, cfg: tg.Config, shard: Path, rank: int, world_size: int, pairs: int):
        self.exchange, self.collect = tg.Exchange(rank, world_size), False
        self.prefetch = tg.Exchange(rank, world_size, dist.new_group(backend="gloo"))
        self.model = tg.GPT(cfg, world_size)
        self.optimizer = tg.Optimizer(cfg, dict(self.model.named_parameters()), self.exchange)
        self.loader = tg.TrainLoader(cfg, [shard], rank, world_size)
        plans = [tg.plan_step(cfg, step) for step in range(2 * pairs)]
        self.batches, self.routes = tg.Prefetcher(self.loader, plans, self.prefetch), []

    def pair(self) -> float:
        """Returns the ms of two steps."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(2):
            if self.collect:
                gc.collect()
            batch = self.batches.next()
            if batch.ngrams:
                self.routes.append(batch.ngrams["ngrams"])
            tg.train_step(self.model, self.optimizer, batch, self.batches.peek)
        self.optimizer.finish_gathers()
        ms = torch.tensor(1000 * (time.perf_counter() - began))
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return ms.item()

    def sent(self) -> dict[str, int]:
        both = self.exchange.sent | self.prefetch.sent
        return {key: nbytes for key, nbytes in both.items() if key.endswith("ngrams")}


def config(rows: int, steps: int, dense: bool) -> tg.Config:
    first, *others = tg.CPU.stages
    stages = replace(first, steps=steps), *(replace(first, steps=0) for _ in others)
    cfg = replace(tg.CPU, stages=stages, microbatches=2)
    if dense:
        return replace(cfg, ngrams=tg.Ngrams(), bigram_vocab_size=rows)
    return replace(cfg, ngrams=tg.Ngrams(ORDERS, rows // len(ORDERS), WIDTH, "float32", every=1))


def wanted_bytes(routes: list[tg.RowRoutes], rank: int) -> int:
    """Returns the bytes of the rows that others asked of a rank, and of the gradient rows it sent."""
    counts = [counts for each in routes for counts in (each.send_counts, each.recv_counts)]
    return sum(sum(each) - each[rank] for each in counts) * WIDTH * 4


def run_rank(rank: int, world_size: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    tg.hash_ngrams, cold = drawn_rows(rank), 3
    pairs = cold + args.rounds + 3
    sizes = [(False, n) for n in args.rows] + [(True, n) for n in args.dense]
    shard, trainings, cold_ms, times = Path(folder, "random_train_000000.bin"), {}, {}, {}
    for size in sizes:
        cfg = config(1 << size[1], 2 * pairs, size[0])
        training = trainings[size] = Training(cfg, shard, rank, world_size, pairs)
        cold_ms[size], times[size] = median(training.pair() for _ in range(cold)), []
        if table := training.optimizer.ngrams:
            for t in table.stored:
                t.add_(0)
    for i in range(args.rounds):
        for size in sizes if i % 2 else reversed(sizes):
            times[size].append(trainings[size].pair())
    first = {}
    for size in sizes:
        training, (dense, bits) = trainings[size], size
        training.collect = True  # else what a step left behind counts with the next
        tracemalloc.start()
        for _ in range(2):  # the first makes what stays
            training.routes.clear()
            tracemalloc.reset_peak()
            before, held = training.sent(), tracemalloc.get_traced_memory()[0]
            with Peak() as peak:
                training.pair()
        temporaries = peak.peak + tracemalloc.get_traced_memory()[1] - held
        tracemalloc.stop()
        table, columns = training.optimizer.ngrams, ["", "", ""]
        if table:
            sent = {key: nbytes - before.get(key, 0) for key, nbytes in training.sent().items()}
            buffers = sum(t.nbytes for name, t in vars(table).items() if torch.is_tensor(t))
            columns = [f"{sum(sent.values()):,}", ""]
            if world_size > 1:
                columns[1] = f"{sum(sent.values()) / wanted_bytes(training.routes, rank):.3f}"
            columns.append(f"{buffers / 1e6:.2f}")
        base = first.setdefault(dense, (times[size], temporaries))
        ratio = median(b / a for a, b in zip(base[0], times[size]))
        if rank == 0:
            name = "dense Adam" if dense else "n-grams"
            ms = f"{median(times[size]):.0f}", f"{ratio:.3f}", f"{cold_ms[size]:.0f}"
            peaks = f"{temporaries / 1e6:.2f}", f"{temporaries / base[1]:.3f}"
            print(LINE(name, f"2^{bits}", *ms, *columns, *peaks), flush=True)
    for training in trainings.values():
        training.loader.close()
    dist.destroy_process_group()


def integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=integers, default=[14, 20, 24], metavar="N,...", help="log2; default: 14,20,24")
    add("--dense", type=integers, default=[14, 16, 18, 20], metavar="N,...", help="default: 14,16,18,20")
    add("--world", type=int, default=2, metavar="N", help="processes; default: %(default)s")
    add("--rounds", type=int, default=30, metavar="N", help="pairs of steps; default: %(default)s")
    args = parser.parse_args(argv)
    if not args.rows or min(args.rows) < 14 or args.world not in (1, 2) or args.rounds < 1:
        parser.error("rows start at 14, world is 1 or 2, rounds at least 1")
    with tempfile.TemporaryDirectory() as folder:
        steps = 2 * (args.rounds + 7)
        tokens = np.random.default_rng(0).integers(0, 256, (steps + 2) * 3 * 2048).astype("<u2")
        tokens[::200] = tg.CPU.bos_id
        header = shard_header(len(tokens), tg.CPU.vocab_size, tg.CPU.bos_id)
        Path(folder, "random_train_000000.bin").write_bytes(header + tokens.tobytes())
        print(
            f"{args.world} processes, {os.cpu_count()} cores, torch {torch.__version__}\n{HEAD}", flush=True
        )
        multiprocessing.set_forkserver_preload(["train_gpt"])
        torch.multiprocessing.start_processes(
            run_rank, (args.world, folder, args), nprocs=args.world, start_method="forkserver"
        )


if __name__ == "__main__":
    main()
