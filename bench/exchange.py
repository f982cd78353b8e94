#!/usr/bin/env python3
"""Gradients of tables, averaged over ranks whole and by their touched rows, side by side.

    python bench/exchange.py [--worlds 2,4,8] [--stages 0,1,2] [--tables NAME,...] [--repeats 3]

Claimed: the row-sparse exchange sends, of the bytes that the whole gradient takes, the fraction of rows that a rank touches
between two Adam steps, times (1 + index overhead), an int32 number beside every row; and its result has the same bits as the
dense exchange summed in fp32 in rank order.

One process a rank, one thread each; tables of the record config at their real shapes, bf16, one at a time. Batches are those
that train_gpt.py's loader deals to the rank in the first two steps of a stage, one Adam period, from a shard of the corpus of
data/local_corpus.py, Python's standard library, as word pieces numbered by frequency (byte tokens would touch 1% of the rows).
Timed, in turns, from a barrier until the last rank is through; medians:

    dense   reduce-scatter by the backend, which rounds at every hop. gloo makes an all-reduce of it: twice the bytes listed
    fp32    all-to-all of the whole gradient, summed in rank order
    sparse  announce, route, reduce_rows, and clearing the block, all in a row: training hides the first two behind a forward.
            (What dense needs besides, main_grad.zero_(), is not counted.)

Blocks of a token table are touched unevenly: with numbers by frequency, the first rank owns nearly every row that is touched,
and gets most of what is sent; "busiest rank" has its bytes. GPT-2's numbers, in order of merges, are less extreme. Bigrams are
hashed, so their rows are even.

This is gloo over loopback on CPU, where all ranks share the cores and the memory: it says nothing about NVLink but the bytes.
Nor is Python's library FineWeb: fractions, and so ratios, there are estimates: at the largest batch about 98,000 bigrams a rank
(of 8) between two Adam steps, of 251,520 rows about a fifth distinct.
"""
import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg  # noqa: E402
from bigram_index import word_pieces  # noqa: E402

CFG = replace(tg.RECORD, doc_slots=4096)  # the corpus has short documents: more in a slice than FineWeb has
TABLES = [row.name for row in CFG.params if row.exchange == "sparse"]
LINE = "{:>5} {:>5}  {:<12} {:>8} {:>8} {:>8} {:>7}  {:>6} {:>8}  {:>7} {:>7} {:>7}  {:>7} {:>6}".format
HEAD = "\n".join((
    LINE(*" , , ,distinct,MB sent,MB sent,busiest,bytes, ,ms,ms,ms,sparse,over".split(",")),
    LINE(*"stage,world,table,rows,dense,sparse,rank,ratio,formula,dense,fp32,sparse,dense,fp32".split(","))))


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(tg.HEADER_BYTES // 4, dtype="<i4")
    header[:5] = tg.MAGIC, tg.VERSION, len(tokens), CFG.vocab_size, CFG.start_token
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def touched_in(stage: int, shard: Path, rank: int, world: int) -> dict[str, tg.Touched]:
    """What the rank touches in the stage's first two steps, if they are the shard's first."""
    first = CFG.stage_starts[stage]
    batches = tg.Batches(tg.TrainLoader(CFG, [shard], rank, world, pin=False), [tg.plan(CFG, first), tg.plan(CFG, first + 1)])
    batches.next()
    touched = batches.next().micro_batches[-1].touched
    batches.close()
    return touched


def timed(fn: Callable) -> tuple[float, Any]:
    """Milliseconds from when all ranks are there until the last is through; what `fn` gives."""
    dist.barrier()
    began = time.perf_counter()
    result = fn()
    ms = torch.tensor(1000 * (time.perf_counter() - began))
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item(), result


def measure(name: str, rank: int, world: int, touched: dict[str, tg.Touched], repeats: int) -> tuple:
    """The entries of a line of the table, from the distinct rows on."""
    kind = next(row.rows for row in CFG.params if row.name == name)
    only, rows, shape = {kind: touched[kind]}, touched[kind].rows, tg.param_shapes(CFG, world)[name]
    # A gradient is 0 but in the touched rows; these repeat a few random ones, for a table of random numbers takes seconds.
    grad = torch.zeros(shape, dtype=torch.bfloat16)
    few = torch.randn(251, *shape[1:], generator=torch.Generator().manual_seed(rank)).bfloat16()
    grad[rows] = few[torch.arange(len(rows)) % len(few)]
    room = torch.zeros(world, shape[0] // world, *shape[1:], dtype=torch.bfloat16)
    block = torch.zeros(room.shape[1:])
    exchange = tg.Exchange(rank, world)

    def sparse() -> tg.Route:
        route = exchange.route(only, exchange.announce(only))[kind]
        exchange.reduce_rows(name, grad, route, block).wait()
        return route

    runs = []
    for _ in range(repeats):
        dense_ms, rough = timed(lambda: exchange.reduce(name, "reduce_scatter", grad).wait())
        fp32_ms, mean = timed(lambda: exchange.reduce(name, "reduce_scatter", grad, room).wait())
        sparse_ms, route = timed(sparse)
        if not torch.equal(block.view(torch.int32), mean.view(torch.int32)):
            raise RuntimeError(f"{name}: sparse and dense with the fp32 sum differ on rank {rank} of {world}")
        if (rough[::64] - mean[::64]).abs().max() > 0.1:  # the backend's rounds at every hop
            raise RuntimeError(f"{name}: the backend's mean is another one on rank {rank} of {world}")
        # After the update, Optimizer.work clears the block like this.
        clear_ms, _ = timed(lambda: block.index_fill_(0, route.numbers.result.long(), 0))
        runs.append((dense_ms, fp32_ms, sparse_ms + clear_ms))
    sent = {key: n // repeats for key, n in exchange.sent.items()}
    whole, same, away = sent.pop(f"reduce_scatter {name}"), sent.pop(f"all_to_all {name}"), sum(sent.values())
    row_bytes = grad[0].nbytes
    if whole != same or away != (row_bytes + 4) * (len(rows) - route.sent[rank]) + 8 * (world - 1):
        raise RuntimeError(f"{name}: rank {rank} of {world} counted {whole}, {same} and {sent} bytes")
    most = max(away, (row_bytes + 4) * (sum(route.received) - route.received[rank]))
    of_ranks = np.array(exchange.collect((len(rows) / shape[0], away, most)))
    (distinct, away, _), busiest = of_ranks.mean(axis=0), of_ranks[:, 2].max()
    dense_ms, fp32_ms, sparse_ms = map(median, zip(*runs))
    return (f"{distinct:.2%}", f"{whole / 1e6:.1f}", f"{away / 1e6:.1f}", f"{busiest / 1e6:.1f}", f"{away / whole:.4f}",
            f"{distinct * (1 + 4 / row_bytes):.4f}", f"{dense_ms:.0f}", f"{fp32_ms:.0f}", f"{sparse_ms:.0f}",
            f"{sparse_ms / dense_ms:.3f}", f"{sparse_ms / fp32_ms:.3f}")


def work(rank: int, world: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    for stage in args.stages:
        touched = touched_in(stage, Path(folder, "pieces_train_000000.bin"), rank, world)
        for name in args.tables:
            entries = measure(name, rank, world, touched, args.repeats)
            if rank == 0:
                print(LINE(stage, world, name, *entries), flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=numbers, default=[2, 4, 8], metavar="N,...", help="default: 2,4,8")
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2], metavar="N,...", help="default: 0,1,2")
    parser.add_argument("--tables", type=lambda text: text.split(","), default=TABLES, metavar="NAME,...",
                        help=f"default: {','.join(TABLES)}")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    stages = range(len(CFG.stages))
    if not (set(args.worlds) <= {2, 4, 8} and set(args.stages) <= set(stages) and set(args.tables) <= set(TABLES)
            and args.repeats > 0):
        parser.error(f"worlds are 2, 4, 8, stages 0 to {stages[-1]}, tables {', '.join(TABLES)}, repeats at least 1")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        stream, pieces = word_pieces(CFG)
        write_shard(Path(folder, "pieces_train_000000.bin"), stream)
        print(f"{len(stream):,} word pieces, {pieces:,} distinct; torch {torch.__version__}, gloo over loopback on CPU, "
              f"{os.cpu_count()} cores for all ranks; medians of {args.repeats}\n\n{HEAD}", flush=True)
        multiprocessing.set_forkserver_preload(["train_gpt"])  # torch is loaded once, not once a rank
        for world in args.worlds:
            torch.multiprocessing.start_processes(work, (world, folder, args), nprocs=world, start_method="forkserver")
    print(f"""
distinct rows: of the table, touched by a rank in two steps, mean over ranks. MB sent: by a rank, mean; busiest rank: the most
that one rank sends or receives. formula: distinct rows x (1 + 4 bytes of number / bytes of a row). dense is gloo's all-reduce,
which moves twice the bytes listed; fp32 moves just those. Sparse had the bits of fp32 every time. Loopback on CPU, all ranks on
the same cores: not NVLink. And Python's library is not FineWeb: fractions and ratios there are estimates: at the largest batch
about 98,000 bigrams a rank (of 8) between two Adam steps, of 251,520 rows about a fifth distinct.
{time.perf_counter() - began:.0f} s in all.""")


if __name__ == "__main__":
    main()
