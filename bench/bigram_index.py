#!/usr/bin/env python3
"""What it takes to number the rows that a micro-batch touches, beside the plain way of doing less.

    python bench/bigram_index.py [--repeats 30]

Claimed: the builder of row indices is never the bottleneck. train_gpt.py builds them on a thread while the GPU works on the
batch before, so they must take well under the GPU's time. Timed, in ms for one micro-batch, on one thread:

    hash     bigram_index, into memory made once
    index    index_rows: distinct rows, the positions that touch each, in the text's order, and which rows are new
    touched  touched_rows: all rows touched since then, by owner (8 ranks); and clearing the marks
    ours     the three together; "+ tokens" with index and touched of the token tables besides: all that there is to do
    plain    hash in torch into a new tensor, mask over the whole table, nonzero: distinct rows without an order, which a
             sum of gradients by row would have to find by itself
    sorted   that hash, torch.sort(stable=True), unique_consecutive, running sum: rows, order and starts, as index has them

In one process, in turns, each time on the next piece of text; medians; all three must agree. The text is the corpus of
data/local_corpus.py, Python's standard library, as word pieces numbered by frequency, in place of GPT-2's 50,257 tokens.
"""
import argparse
import re
import sys
import sysconfig
import time
import zlib
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import train_gpt as tg  # noqa: E402
from local_corpus import corpus  # noqa: E402

PIECES = re.compile(r" ?[^\W\d_]+|\d+|\s+(?!\S)|\s+|.")  # nearly GPT-2's: a word takes the space before it
PUBLISHED_MS = 33.8  # a step of 16,384 tokens a rank: the public speedrun's record 80, its first stage


def word_pieces(cfg: tg.Config) -> tuple[np.ndarray, int]:
    """The corpus as one stream of uint16 word pieces, every document behind the start token; how many pieces differ."""
    texts = [PIECES.findall(doc.raw.decode(errors="replace")) for doc in corpus(Path(sysconfig.get_path("stdlib")))]
    counts = Counter(piece for text in texts for piece in text)
    # Should there be more pieces than numbers, the rarest share the last few thousand.
    ids = {piece: i if i < cfg.start_token else cfg.start_token - 1 - zlib.crc32(piece.encode()) % 4096
           for i, (piece, _) in enumerate(counts.most_common())}
    return np.array([i for text in texts for i in (cfg.start_token, *map(ids.get, text))], dtype=np.uint16), len(ids)


def ours(tokens: np.ndarray, room: tg.Room, marks: dict[str, np.ndarray]) -> tuple[list[float], tg.RowIndex]:
    """Milliseconds of hash, index and touched of the bigrams, index and touched of the tokens; the bigrams' index."""
    bigrams, at, indices = room.bigram.numpy(), [time.perf_counter()], []
    tg.bigram_index(tokens, len(marks["bigrams"]), bigrams)
    at.append(time.perf_counter())
    for kind, numbers in (("bigrams", bigrams), ("tokens", tokens)):
        indices.append(tg.index_rows(numbers, marks[kind], room.index[kind]))
        at.append(time.perf_counter())
        tg.touched_rows(marks[kind], 8, room.touched[kind])
        marks[kind][:] = False
        at.append(time.perf_counter())
    return [1000 * (b - a) for a, b in zip(at, at[1:])], indices[0]


def others(tokens: torch.Tensor, rows: int) -> tuple[list[float], torch.Tensor, tuple[torch.Tensor, ...]]:
    """Milliseconds of plain and sorted, and what each gives."""
    def hashed() -> torch.Tensor:
        numbers = torch.bitwise_xor(36313 * tokens[1:], 27191 * tokens[:-1]) % (rows - 1)
        return torch.cat([numbers.new_full((1,), rows - 1), numbers])
    at = [time.perf_counter()]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[hashed()] = True
    plain = mask.nonzero().flatten()
    at.append(time.perf_counter())
    ranked, order = torch.sort(hashed(), stable=True)
    distinct, counts = ranked.unique_consecutive(return_counts=True)
    in_order = distinct, order, torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    at.append(time.perf_counter())
    return [1000 * (b - a) for a, b in zip(at, at[1:])], plain, in_order


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    torch.set_num_threads(1)
    cfg, line = tg.RECORD, "{:>7} {:>6} {:>6} {:>8} {:>6} {:>9}   {:>6} {:>7}   {:>10} {:>11}   {:>9} {:>9}".format
    stream, pieces = word_pieces(cfg)
    print(f"{len(stream):,} word pieces, {pieces:,} distinct; {cfg.bigram_rows:,} rows for bigrams; torch {torch.__version__}, "
          f"numpy {np.__version__}, one thread\nms a micro-batch, medians of {args.repeats}\n")
    print(line(*"tokens,hash,index,touched,ours,+ tokens,plain,sorted,ours/plain,ours/sorted,of GPU's*,distinct".split(",")))
    for T in (16384, 32768, 49152):
        room = tg.Room(cfg, T, 1, pin=False)
        marks = {kind: np.zeros(n, dtype=bool) for kind, n in tg.row_kinds(cfg).items()}
        runs = []
        for i in range(args.repeats + 3):  # the first three warm up
            begin = i * T % (len(stream) - T)
            tokens = stream[begin:begin + T].astype(np.int32)
            parts, index = ours(tokens, room, marks)
            other, plain, in_order = others(torch.from_numpy(tokens), cfg.bigram_rows)
            if not all(torch.equal(a.long(), b) for a, b in zip((*index[:3], plain), (*in_order, in_order[0]))):
                sys.exit("bigram_index.py: the three ways disagree")
            mine = sum(parts[:3])
            runs.append((*parts[:3], mine, sum(parts), *other, mine / other[0], mine / other[1], len(plain)))
        *ms, over_plain, over_sorted, distinct = map(median, zip(*runs[3:]))
        print(line(T, *(f"{x:.2f}" for x in (*ms, over_plain, over_sorted)), f"{ms[4] / PUBLISHED_MS:.1%}", int(distinct)))
    print(f"""
plain: distinct rows without an order; sorted: with it, as ours. * {PUBLISHED_MS} ms, published, not measured here: a step of
the public speedrun's first stage, 16,384 tokens a rank (record 80); larger micro-batches take a GPU longer.""")


if __name__ == "__main__":
    main()
