#!/usr/bin/env python3
"""Writes shards of random tokens for the `record` preset, for timing and trying out without FineWeb.

    python data/synthetic.py data/synthetic [--train-tokens N] [--val-tokens N] [--vocab-size N]
    ./run.sh --data data/synthetic

Like web text, but without meaning: document lengths are log-normal with median 400 and sigma 1.05 (mean 693),
token k has probability proportional to 1/(k + 1), and a BOS, the vocabulary's last token, begins a document.
Tokens are independent, so no model's loss gets below their entropy: 7.57 nats per token at the default size.
The tokens' bytes, in vocabulary.txt beside the shards, are made up too: most tokens are another and one byte
more, as in GPT-2's vocabulary.

The default is enough for all of the preset's steps: 6 training shards of 100M tokens, 1.2 GB, in seconds. A
shard's name and vocabulary determine its tokens. All are written each time, and take the place of earlier
ones. Folders of a preset's own data are refused, so runs on these tokens belong to the track `other`.
"""

import argparse
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts import UserError, make_parser, run_script
from tokenize_text import (
    SHARD_TOKENS,
    Header,
    new_shards,
    shard_header,
    write_token_bytes,
)

# The record preset's schedule uses up 481M tokens, since it cuts long documents; its validation 10,485,761.
TRAIN_TOKENS = 600_000_000
VAL_TOKENS = 10_500_000
VOCAB_SIZE = 50257  # GPT-2's
MEDIAN_LENGTH = 400  # of documents, in tokens with BOS
SIGMA = 1.05  # standard deviation of the lengths' natural logarithm
RESOLUTION = 1 << 24  # entries of the table of tokens; the rarest of GPT-2's has 29


@functools.lru_cache(1)
def token_table(words: int) -> np.ndarray:
    """Returns (RESOLUTION,) uint16, in which token k < words has a share proportional to 1/(k + 1)."""
    cumulative = np.cumsum(1 / np.arange(1, words + 1))
    ends = np.rint(RESOLUTION * cumulative / cumulative[-1]).astype(np.int64)
    return np.repeat(np.arange(words, dtype=np.uint16), np.diff(ends, prepend=0))


def make_up_tokens(vocab_size: int) -> list[bytes]:
    """Returns the bytes of each token, all distinct: single bytes, then longer ones, and at last BOS, empty.

    A longer one is a random earlier one and a random byte. The same size gives the same tokens.
    """
    words = vocab_size - 1
    tokens = [bytes([i]) for i in range(min(256, words))]
    known = set(tokens)
    rng = np.random.default_rng(0)
    while len(tokens) < words:
        token = tokens[rng.integers(len(tokens))] + bytes([rng.integers(256)])
        if token not in known:
            known.add(token)
            tokens.append(token)
    return tokens + [b""]


def draw_documents(bos_id: int, seed: int | list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields 512 documents at a time, without end: their tokens (n,) uint16, and lengths (512,) int64.

    A document is BOS, then at least one token below it. Bounded memory: n is about 355,000.
    """
    rng = np.random.default_rng(seed)
    table = token_table(bos_id)
    while True:
        lengths = np.maximum(2, rng.lognormal(math.log(MEDIAN_LENGTH), SIGMA, 512)).astype(np.int64)
        # A table lookup takes a ninth of the time of a binary search in cumulative probabilities.
        tokens = table[rng.integers(RESOLUTION, size=lengths.sum(), dtype=np.uint32)]
        tokens[np.cumsum(lengths) - lengths] = bos_id
        yield tokens, lengths


def plan_shards(train_tokens: int, val_tokens: int, vocab_size: int) -> dict[str, Header]:
    """Returns the headers of the shards to write, by name. Training counts from 1, validation from 0."""
    headers = {}
    for split, total, first in (("train", train_tokens, 1), ("val", val_tokens, 0)):
        for i, begin in enumerate(range(0, total, SHARD_TOKENS), first):
            tokens = min(SHARD_TOKENS, total - begin)
            header = Header(tokens, vocab_size, bos_id=vocab_size - 1, text_bytes=0)
            headers[f"synthetic_{split}_{i:06d}.bin"] = header
    return headers


def write_shards(
    out: Path, train_tokens: int = TRAIN_TOKENS, val_tokens: int = VAL_TOKENS, vocab_size: int = VOCAB_SIZE
) -> None:
    """Writes OUT/synthetic_{train,val}_<number>.bin, of SHARD_TOKENS tokens each, and the rest in the last.

    Beside them is OUT/vocabulary.txt. All appear when all are complete. A shard's last document is cut where
    the shard ends. Raises UserError for numbers out of range, a preset's own folder, or a folder with other
    shards.
    """
    if train_tokens < 1 or val_tokens < 1:
        raise UserError("--train-tokens and --val-tokens must be at least 1: training needs both splits")
    if not 2 <= vocab_size <= 1 << 16:
        raise UserError(f"--vocab-size {vocab_size}: must be 2 to 65536, since a shard's tokens are uint16")
    headers = plan_shards(train_tokens, val_tokens, vocab_size)
    progress = tqdm(
        total=train_tokens + val_tokens, unit=" tokens", unit_scale=True, disable=None, desc="writing"
    )
    with new_shards(out, "synthetic") as folder, progress as bar:
        for name, header in headers.items():
            left = header.tokens
            with open(folder / name, "wb") as file:
                file.write(shard_header(*header))
                for tokens, _ in draw_documents(vocab_size - 1, list(name.encode())):
                    tokens = tokens[:left]
                    file.write(tokens.astype("<u2").data)
                    bar.update(len(tokens))
                    left -= len(tokens)
                    if not left:
                        break
        write_token_bytes(folder, make_up_tokens(vocab_size))


def run(args: argparse.Namespace) -> None:
    write_shards(args.out, args.train_tokens, args.val_tokens, args.vocab_size)
    counts = f"{args.train_tokens:,} training tokens, {args.val_tokens:,} validation tokens"
    print(f"{args.out}: {counts}, without meaning")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("synthetic.py", __doc__)
    parser.add_argument("out", type=Path, metavar="DIR", help="folder for the shards, such as data/synthetic")
    for option, default in (
        ("--train-tokens", TRAIN_TOKENS),
        ("--val-tokens", VAL_TOKENS),
        ("--vocab-size", VOCAB_SIZE),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help="default: %(default)s")
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
