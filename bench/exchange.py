#!/usr/bin/env python3
"""Compares ways to average a table's gradient over ranks: whole, or by its touched rows.

    python bench/exchange.py [--worlds 2,4,8] [--stages 0,1,2] [--tables NAME,...] [--repeats 3]

Claim: of the bytes of the whole gradient, the sparse exchange sends the fraction of rows that a rank touches
between two Adam steps, times (1 + index overhead), an int32 id with every row. Its result has the bits of the
dense exchange summed in fp32 in rank order.

Runs one process a rank, with one thread each, on the record preset's tables at full size, bf16, one at a
time. Batches are those that train_gpt.py's loader gives the rank in a stage's first two steps, one Adam
period. Their text is data/local_corpus.py's, the Python standard library, as word pieces numbered by
frequency (byte tokens would touch 1% of the rows). Times, from a barrier until the last rank is done;
interleaved, medians:

    dense   reduce_scatter by the backend, which rounds at every hop. gloo runs it as an all-reduce: twice the
            bytes listed
    fp32    all-to-all of the whole gradient, summed in rank order
    sparse  send_ids, send_rows, mean_rows, and clearing shard_grad, one after the other. In
            training the prefetch thread does the first two. Dense also needs main_grad.zero_(), which is not
            counted

Shards of a token table are touched unevenly: since ids are by frequency, the first rank owns nearly every
touched row, and receives most of what is sent; "busiest rank" has its bytes. GPT-2's ids, in order of merges,
are less extreme. Bigrams are hashed, so their rows are even.

This is gloo over loopback on a CPU, where ranks share cores and memory: of NVLink it shows only the bytes.
And the Python library is not FineWeb, so fractions and ratios are estimates. At the largest batch a rank (of
8) has about 98,000 bigrams between two Adam steps; they touch some 50,000 of 377,280 rows.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bigram_index import word_pieces

import train_gpt as tg
from tokenize_text import shard_header

CFG = replace(tg.RECORD, max_docs=4096)  # the corpus has more documents in a micro-batch than FineWeb
SPECS = {spec.name: spec for spec in CFG.params if spec.exchange == "sparse"}
LINE = "{:>5} {:>5}  {:<12} {:>8} {:>8} {:>8} {:>7}  {:>6} {:>8}  {:>7} {:>7} {:>7}  {:>7} {:>6}".format
HEAD = "\n".join(
    (
        LINE(*" , , ,distinct,MB sent,MB sent,busiest,bytes, ,ms,ms,ms,sparse,over".split(",")),
        LINE(
            *"stage,world,table,rows,dense,sparse,rank,ratio,formula,dense,fp32,sparse,dense,fp32".split(",")
        ),
    )
)
NOTES = """
distinct rows: of the table, touched by a rank in two steps, mean over ranks. MB sent: by a rank, mean;
busiest rank: the most that one rank sends or receives. formula: distinct rows x (1 + 4 bytes of id / bytes of
a row). dense is gloo's all-reduce, which moves twice the bytes listed; fp32 moves just those. Sparse had the
bits of fp32 every time. Measured over loopback on a CPU, on the Python library's text: neither NVLink nor
FineWeb."""


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = shard_header(len(tokens), CFG.vocab_size, CFG.bos_id)
    path.write_bytes(header + tokens.astype("<u2").tobytes())


def touched_in(stage: int, shard: Path, rank: int, world_size: int) -> dict[str, tg.RowRoutes]:
    """Plans the rows that the rank touches in the stage's first two steps, on the shard's first batches."""
    first = CFG.stage_starts[stage]
    loader = tg.TrainLoader(CFG, [shard], rank, world_size)
    plans = [tg.plan_step(CFG, first), tg.plan_step(CFG, first + 1)]
    batches = tg.Prefetcher(loader, plans, tg.Exchange(rank, world_size))  # while this thread makes no calls
    batches.next()
    rows = batches.next().rows
    loader.close()
    return rows


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the ms from when all ranks are there until the last is done, and the function's result."""
    dist.barrier()
    began = time.perf_counter()
    result = function()
    ms = torch.tensor(1000 * (time.perf_counter() - began))
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item(), result


def measure(
    name: str, rank: int, world_size: int, touched: dict[str, tg.RowRoutes], repeats: int
) -> tuple[str, ...]:
    """Measures one table. Returns the columns of its line, from the distinct rows on."""
    kind, shape = SPECS[name].kind, tg.param_shapes(CFG, world_size)[name]
    row_ids, send_counts = touched[kind].rows, touched[kind].send_counts
    rows_per_rank = shape[0] // world_size
    request = kind, (row_ids % rows_per_rank).numpy(), send_counts
    # The gradient is 0 except in touched rows, which repeat 251 random ones: a random table takes seconds.
    grad, generator = torch.zeros(shape, dtype=torch.bfloat16), torch.Generator().manual_seed(rank)
    random_rows = torch.randn(251, *shape[1:], generator=generator).bfloat16()
    grad[row_ids] = random_rows[torch.arange(len(row_ids)) % len(random_rows)]
    recv_buffer = torch.zeros(world_size, rows_per_rank, *shape[1:], dtype=torch.bfloat16)
    shard_grad = torch.zeros(recv_buffer.shape[1:])
    exchange = tg.Exchange(rank, world_size)

    def sparse() -> tg.RowRoutes:
        places, recv_counts = exchange.send_ids(*request)
        plan = tg.RowRoutes(send_counts, recv_counts, torch.from_numpy(places), row_ids)
        row_grads = exchange.send_rows("rows", name, grad[row_ids], send_counts, recv_counts).wait()
        tg.mean_rows(shard_grad, row_grads, plan)
        return plan

    runs = []
    for _ in range(repeats):
        dense_ms, dense_mean = timed(lambda: exchange.reduce(name, "reduce_scatter", grad).wait())
        fp32_ms, fp32_mean = timed(lambda: exchange.reduce(name, "reduce_scatter", grad, recv_buffer).wait())
        sparse_ms, plan = timed(sparse)
        if not torch.equal(shard_grad.view(torch.int32), fp32_mean.view(torch.int32)):
            raise RuntimeError(f"{name}: sparse and the dense fp32 sum differ on rank {rank} of {world_size}")
        if (dense_mean[::64] - fp32_mean[::64]).abs().max() > 0.1:  # the backend rounds at every hop
            raise RuntimeError(f"{name}: the backend's mean is wrong on rank {rank} of {world_size}")
        # Optimizer.work clears shard_grad like this.
        arriving = plan.arriving.long()
        clear_ms, _ = timed(partial(shard_grad.index_fill_, 0, arriving, 0))
        runs.append((dense_ms, fp32_ms, sparse_ms + clear_ms))

    sent = {key: nbytes // repeats for key, nbytes in exchange.sent.items()}
    dense_sent, fp32_sent = sent.pop(f"reduce_scatter {name}"), sent.pop(f"all_to_all {name}")
    sparse_sent, row_bytes = sum(sent.values()), grad[0].nbytes
    expected = (row_bytes + 4) * (len(row_ids) - send_counts[rank]) + 8 * (world_size - 1)
    if dense_sent != fp32_sent or sparse_sent != expected:
        counted = f"{dense_sent}, {fp32_sent} and {sent} bytes"
        raise RuntimeError(f"{name}: rank {rank} of {world_size} counted {counted}")
    recv_counts = plan.recv_counts
    received_bytes = (row_bytes + 4) * (sum(recv_counts) - recv_counts[rank])
    of_rank = len(row_ids) / shape[0], sparse_sent, max(sparse_sent, received_bytes)
    of_ranks = np.array(exchange.all_gather_object(of_rank))
    (distinct, sparse_sent, _), busiest = of_ranks.mean(axis=0), of_ranks[:, 2].max()
    dense_ms, fp32_ms, sparse_ms = map(median, zip(*runs))
    return (
        f"{distinct:.2%}",
        *(f"{nbytes / 1e6:.1f}" for nbytes in (dense_sent, sparse_sent, busiest)),
        *(f"{ratio:.4f}" for ratio in (sparse_sent / dense_sent, distinct * (1 + 4 / row_bytes))),
        *(f"{ms:.0f}" for ms in (dense_ms, fp32_ms, sparse_ms)),
        *(f"{ratio:.3f}" for ratio in (sparse_ms / dense_ms, sparse_ms / fp32_ms)),
    )


def run_rank(rank: int, world_size: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    for stage in args.stages:
        touched = touched_in(stage, Path(folder, "pieces_train_000000.bin"), rank, world_size)
        for name in args.tables:
            columns = measure(name, rank, world_size, touched, args.repeats)
            if rank == 0:
                print(LINE(stage, world_size, name, *columns), flush=True)
    dist.destroy_process_group()


def names(text: str) -> list[str]:
    return text.split(",")


def integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, tables, stages = parser.add_argument, ",".join(SPECS), range(len(CFG.stages))
    add("--worlds", type=integers, default=[2, 4, 8], metavar="N,...", help="default: 2,4,8")
    add("--stages", type=integers, default=[0, 1, 2], metavar="N,...", help="default: 0,1,2")
    add("--tables", type=names, default=list(SPECS), metavar="NAME,...", help=f"default: {tables}")
    add("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    known = (
        set(args.worlds) <= {2, 4, 8} and set(args.stages) <= set(stages) and set(args.tables) <= set(SPECS)
    )
    if not known or args.repeats < 1:
        parser.error(f"worlds are 2, 4, 8, stages 0 to {stages[-1]}, tables {tables}, repeats at least 1")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        stream, distinct_pieces = word_pieces(CFG)
        write_shard(Path(folder, "pieces_train_000000.bin"), stream)
        print(f"{len(stream):,} word pieces, {distinct_pieces:,} distinct; torch {torch.__version__}, gloo")
        print(f"over loopback on CPU, {os.cpu_count()} cores for all ranks; medians of {args.repeats}")
        print(f"\n{HEAD}", flush=True)
        multiprocessing.set_forkserver_preload(["train_gpt"])  # loads torch once, not once a rank
        for world_size in args.worlds:
            rank_args = world_size, folder, args
            torch.multiprocessing.start_processes(
                run_rank, rank_args, nprocs=world_size, start_method="forkserver"
            )
    print(f"{NOTES}\n{time.perf_counter() - began:.0f} s in all.")


if __name__ == "__main__":
    main()
