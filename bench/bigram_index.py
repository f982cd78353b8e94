#!/usr/bin/env python3
"""Times the row indices of a micro-batch: of bigrams against plain torch, of n-grams against bigrams.

    python bench/bigram_index.py [--repeats 30]

Claim: building row indices is never the bottleneck. train_gpt.py builds them on a thread while the GPU works
on the batch before, so they must take well under the GPU's time. Columns, in ms a micro-batch, on one thread:

    hash      hash_ngrams, with signs
    index     index_rows: distinct rows, each row's positions in the text's order
    plan      merge_rows and _route_rows: the rows touched since the last Adam step, by owner (8 ranks), and
              the index of as many that 8 ranks ask for
    ours      the three together
    + tokens  with index and plan of the token tables: all that a batch needs
    plain     hash in torch into a new tensor, mask over the whole table, nonzero: distinct rows without the
              positions, which a sum of gradients by row would have to find by itself
    sorted    that hash, torch.sort(stable=True), unique_consecutive, cumsum: row ids, perm and offsets

Claim: a row of n-grams takes no longer than one of bigrams. Columns, in ns a row that positions look up (a
position looks up one of each order), alone and beside a thread that multiplies matrices:

    hash, index, merge, place    hash_ngrams, index_rows, merge_rows, place_rows
    all                          the four together
    bigram                       hash_ngrams, index_rows, merge_rows, of the same tokens
    ratio                        of these two

All are interleaved in one process, each time on the next part of the text; results must be equal. Times of
bigrams are medians. Those of n-grams are minima: they are so long beside the other thread that whatever else
runs on the machine would count more.
The text is data/local_corpus.py's, the Python standard library, as word pieces numbered by frequency, which
replace GPT-2's 50,257 tokens.
"""

import argparse
import contextlib
import re
import sys
import sysconfig
import threading
import time
import types
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import train_gpt as tg
from local_corpus import corpus, stdlib_texts

# Like GPT-2's pattern: a word includes the space before it.
WORD_PIECE = re.compile(r" ?[^\W\d_]+|\d+|\s+(?!\S)|\s+|.")
PUBLISHED_MS = 33.8  # of a step of 16,384 tokens a rank: the public speedrun's record 80, its first stage
RANKS = 8
LINE = "{:>7} {:>6} {:>6} {:>8} {:>6} {:>9}   {:>6} {:>7}   {:>10} {:>11}   {:>9} {:>9}".format
COLUMNS = "tokens,hash,index,plan,ours,+ tokens,plain,sorted,ours/plain,ours/sorted,of GPU's*,distinct"
NGRAM_LINE = "{:>7} {:>8} {:>6}   {:>6} {:>6} {:>6} {:>6}   {:>6} {:>7} {:>6}   {:>9}".format
NGRAM_COLUMNS = "tokens,orders,beside,hash,index,merge,place,all,bigram,ratio,ms"


def word_pieces(cfg: tg.Config) -> tuple[np.ndarray, int]:
    """Returns the corpus as uint16 word pieces, bos_id before every document; and how many are distinct."""
    documents = corpus(stdlib_texts(Path(sysconfig.get_path("stdlib"))))
    texts = [WORD_PIECE.findall(document.raw.decode(errors="replace")) for document in documents]
    counts, ids = Counter(piece for text in texts for piece in text), {}
    for i, (piece, _) in enumerate(counts.most_common()):
        # If there are more pieces than ids, the rarest share the last 4096.
        ids[piece] = i if i < cfg.bos_id else cfg.bos_id - 1 - zlib.crc32(piece.encode()) % 4096
    stream = [i for text in texts for i in (cfg.bos_id, *map(ids.get, text))]
    return np.array(stream, dtype=np.uint16), len(ids)


def intervals(times: list[float]) -> list[float]:
    return [1000 * (end - start) for start, end in zip(times, times[1:])]


SIGN_ROWS = tg.RECORD.sign_rows


class EqualRanks(tg.Exchange):
    """Stands in for ranks that ask rank 0 for the same rows as it does."""

    def send_ids(self, kind, ids, send_counts):
        own = ids[: send_counts[0]]
        return np.tile(own, RANKS), [len(own)] * RANKS


def time_ours(tokens: np.ndarray, batches: tg.Prefetcher) -> tuple[list[float], tg.RowIndex]:
    """Returns the ms of hash, index, plan of bigrams, index, plan of tokens; and the bigrams' index."""
    times, indices = [time.perf_counter()], []
    bigrams, signs = tg.hash_ngrams(tokens, tg.Ngrams((2,), batches.table_rows["bigrams"]), SIGN_ROWS)
    times.append(time.perf_counter())
    for name, ids, rows in (("bigram_embed", bigrams, signs), ("value_embeds", tokens, None)):
        indices.append(tg.index_rows(ids, signs=rows))
        times.append(time.perf_counter())
        touched = tg.merge_rows(tg.NO_ROWS, indices[-1].row_ids.numpy())
        rows_a_rank = batches.table_rows["bigrams" if rows is not None else "tokens"] // RANKS
        batches._route(name, *np.divmod(touched, rows_a_rank), RANKS)
        times.append(time.perf_counter())
    return intervals(times), indices[0]


def time_bigrams(tokens: np.ndarray, rows: int) -> float:
    """Returns the ns a row of the bigrams' index."""
    began = time.perf_counter()
    bigrams, signs = tg.hash_ngrams(tokens, tg.Ngrams((2,), rows), SIGN_ROWS)
    tg.merge_rows(tg.NO_ROWS, tg.index_rows(bigrams, signs=signs).row_ids.numpy())
    return 1e9 * (time.perf_counter() - began) / len(tokens)


def time_ngrams(tokens: np.ndarray, ngrams: tg.Ngrams) -> list[float]:
    """Returns the ns a row of hash, index, merge and place of n-grams."""
    times = [time.perf_counter()]
    ids, signs = tg.hash_ngrams(tokens, ngrams, SIGN_ROWS)
    times.append(time.perf_counter())
    index = tg.index_rows(ids, signs=signs)
    times.append(time.perf_counter())
    rows = tg.merge_rows(tg.NO_ROWS, index.row_ids.numpy())
    times.append(time.perf_counter())
    placed = tg.place_rows(torch.from_numpy(ids), index, tg.int32(np.arange(len(rows))))
    times.append(time.perf_counter())
    if not np.array_equal(rows[placed.numpy()], ids):
        sys.exit("bigram_index.py: the places are wrong")
    return [1e6 * ms / ids.size for ms in intervals(times)]


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Multiplies matrices in another thread, which then does not hold Python's lock."""
    done = threading.Event()

    def work() -> None:
        torch.set_num_threads(1)  # for this thread
        a = torch.ones(512, 512)
        while not done.is_set():
            a @ a

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def compare_ngrams(cfg: tg.Config, stream: np.ndarray, repeats: int) -> None:
    """Prints the table of n-grams."""
    print(NGRAM_LINE(*NGRAM_COLUMNS.split(",")))
    for T in (16384, 49152):
        for orders in ((2, 3), (2, 3, 4, 5)):
            ngrams, runs = replace(cfg.ngrams, orders=orders), {"quiet": [], "busy": []}
            for i in range(repeats + 3):
                tokens = stream[i * T % (len(stream) - T) :][:T].astype(np.int32)
                for beside, of_kind in runs.items():
                    with busy_thread() if beside == "busy" else contextlib.nullcontext():
                        bigram, parts = (
                            time_bigrams(tokens, cfg.bigram_vocab_size),
                            time_ngrams(tokens, ngrams),
                        )
                    of_kind.append((*parts, sum(parts), bigram))
            for beside, of_kind in runs.items():
                ns = [*map(min, zip(*of_kind[3:]))]
                text, ms = ",".join(map(str, orders)), f"{ns[4] * T * len(orders) / 1e6:.2f}"
                print(NGRAM_LINE(T, text, beside, *(f"{x:.1f}" for x in ns), f"{ns[4] / ns[5]:.2f}", ms))


def time_torch(tokens: Tensor, rows: int) -> tuple[list[float], Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Returns the ms of plain and sorted, and their results."""

    def hashed() -> Tensor:
        ids = torch.bitwise_xor(36313 * tokens[1:], 27191 * tokens[:-1]) % (rows - 1)
        return torch.cat([ids.new_full((1,), rows - 1), ids])

    times = [time.perf_counter()]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[hashed()] = True
    distinct = mask.nonzero().flatten()
    times.append(time.perf_counter())
    sorted_ids, perm = torch.sort(hashed(), stable=True)
    row_ids, counts = sorted_ids.unique_consecutive(return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    times.append(time.perf_counter())
    return intervals(times), distinct, (row_ids, perm, offsets)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    torch.set_num_threads(1)
    cfg = tg.RECORD
    stream, distinct_pieces = word_pieces(cfg)
    versions = f"torch {torch.__version__}, numpy {np.__version__}, one thread"
    print(f"{len(stream):,} word pieces, {distinct_pieces:,} distinct; {versions}")
    print(f"{cfg.bigram_vocab_size:,} rows for bigrams; ms a micro-batch, medians of {args.repeats}\n")
    print(LINE(*COLUMNS.split(",")))
    for T in (16384, 32768, 49152):
        loader: Any = types.SimpleNamespace(cfg=cfg)  # of no batches
        batches, runs = tg.Prefetcher(loader, [], EqualRanks(0, RANKS)), []
        for i in range(args.repeats + 3):  # the first three warm up
            start = i * T % (len(stream) - T)
            tokens = stream[start : start + T].astype(np.int32)
            ours, index = time_ours(tokens, batches)
            torch_ms, distinct, sorted_index = time_torch(torch.from_numpy(tokens), cfg.bigram_vocab_size)
            pairs = zip((*index[:3], distinct), (*sorted_index, sorted_index[0]))
            if not all(torch.equal(a.long(), b) for a, b in pairs):
                sys.exit("bigram_index.py: the results differ")
            total = sum(ours[:3])
            ratios = [total / ms for ms in torch_ms]
            runs.append((*ours[:3], total, sum(ours), *torch_ms, *ratios, len(distinct)))
        *medians, rows = map(median, zip(*runs[3:]))
        of_gpu = f"{medians[4] / PUBLISHED_MS:.1%}"
        print(LINE(T, *(f"{x:.2f}" for x in medians), of_gpu, int(rows)))
    print(
        f"\n* {PUBLISHED_MS} ms, published, not measured here: a step of the public speedrun's first stage,\n"
        "16,384 tokens a rank (record 80). Larger micro-batches take a GPU longer.\n"
    )
    compare_ngrams(cfg, stream, args.repeats)


if __name__ == "__main__":
    main()
