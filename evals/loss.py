#!/usr/bin/env python3
"""Prints a saved model's loss on files: nats per token, and bits per byte, which other tokenizers share.

    python evals/loss.py MODEL FILE... [--passage-bytes N] [--field text]
    python evals/loss.py MODEL SHARD.bin [--slices 128:161]

Each number comes with its standard error, that of a ratio of sums: passages count as independent draws, which
neighbours in a text are not quite. Of one passage there is none: nan.

A FILE is text, of any name; of a .jsonl or .ndjson file each line is a document. A name may end in .gz. As in
data/tokenize_text.py, documents are cut into passages of at most --passage-bytes (default: 512 for bytes,
8,192 for GPT-2's tokens). Each begins after a BOS token; the next BOS, by which a passage ends, is a token
too, of no bytes. A passage of more than val_slice_tokens goes through the model in pieces, which do not see
each other.

A shard is cut as for validation, into slices of val_slice_tokens, wherever documents end. --slices FIRST:END
chooses; by default they are those that a run takes, and its last loss is this one, if it had this shard (its
log has the data's fingerprint), up to the rounding of other kernels and numbers of processes. The `cpu`
preset's are 0:128; what follows has decided nothing about it.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from generate import load, make_parser, number, run_script, tg, tokenize_text
from saved_model import token_losses
from scripts import require_distinct


def parse_slices(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:END, like 128:161")
    return int(first), int(end)


def read_text(path: Path, field: str | None, passage_bytes: int, encoding) -> np.ndarray:
    """Returns the tokens (n,) uint16 of a file's passages, each after BOS, and a last BOS."""
    bos = np.array([encoding.eot_token])
    parts = []
    for document in tokenize_text.read_documents([path], field):
        text = tokenize_text.prepare(document, 1, passage_bytes)
        passages = tokenize_text.encode([text], encoding)[0]
        if isinstance(passages, tokenize_text.BadDocument):
            raise passages
        for passage in passages:
            parts += [bos, passage]
    parts.append(bos)
    return np.concatenate(parts).astype(np.uint16)


def cut_text(tokens: np.ndarray, bos_id: int, size: int) -> Iterator[np.ndarray]:
    """Yields parts of at most `size` tokens and a last target; at documents' ends where it can."""
    starts = np.flatnonzero(tokens == bos_id)
    begin = 0
    while begin < len(tokens) - 1:
        end = starts[np.searchsorted(starts, begin + size, "right") - 1]
        if end <= begin:  # this document is longer
            end = min(begin + size, len(tokens) - 1)
        yield tokens[begin : end + 1]
        begin = end


def cut_shard(path: Path, cfg: tg.Config, slices: tuple[int, int] | None) -> Iterator[np.ndarray]:
    """Yields slices of val_slice_tokens of a shard, and a last target."""
    first, end = slices or (0, cfg.val_slices)
    size = tg.read_header(path).vocab_size
    if size != cfg.vocab_size:
        raise tg.UserError(f"{path} has a vocabulary of {size} tokens, the model {cfg.vocab_size}")
    T = cfg.val_slice_tokens
    tokens = tg.read_shard(path, cfg).tokens
    have = (len(tokens) - 1) // T
    if end > have:
        raise tg.UserError(f"{path} has {have} slices of {T} tokens, not {end}; choose others by --slices")
    return (tokens[i * T : (i + 1) * T + 1] for i in range(first, end))


def document_losses(model: tg.GPT, tokens: np.ndarray, token_bytes: np.ndarray) -> np.ndarray:
    """Returns nats, tokens and bytes of the n documents in T + 1 tokens: (3, n) float64.

    The last token is only a target.
    """
    cfg = model.cfg
    starts = np.flatnonzero(tokens[:-1] == cfg.bos_id)
    longest = int(np.diff(starts, prepend=0, append=len(tokens) - 1).max())
    nats = token_losses(model, tg.pack(tg.make_micro_batch(tokens, starts, longest, cfg)))
    counts = np.stack([nats, np.ones(len(nats)), token_bytes[tokens[1:]]])
    return np.add.reduceat(counts, np.union1d(0, starts), axis=1)


def ratio(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns sum(x) / sum(y) and its standard error, linearized (Cochran 1977, Sampling Techniques)."""
    n = len(x)
    mean = x.sum() / y.sum()
    if n == 1:
        return mean, math.nan
    return mean, math.sqrt(n / (n - 1) * ((x - mean * y) ** 2).sum()) / y.sum()


def ratio_text(x: np.ndarray, y: np.ndarray) -> str:
    mean, error = ratio(x, y)
    return f"{mean:.4f} +- {error:.4f}"


def report(losses: np.ndarray, name: str) -> str:
    """Returns a line on what `name` holds."""
    nats, tokens, nbytes = losses
    return (
        f"{ratio_text(nats, tokens)} nats per token, "
        f"{ratio_text(nats / math.log(2), nbytes)} bits per byte: "
        f"{name}, {tokens.sum():,.0f} tokens, {nbytes.sum():,.0f} bytes, {len(nats):,} passages"
    )


def run(args: argparse.Namespace) -> None:
    are_shards = [path.suffix == ".bin" for path in args.files]
    tg.require(any(are_shards) or not args.slices, "--slices is for shards, SHARD.bin; no FILE is one")
    of_texts = args.passage_bytes or args.field
    tg.require(not all(are_shards) or not of_texts, "--passage-bytes and --field are for texts, not shards")
    require_distinct(args.files)
    model, encoding = load(args.model)
    token_bytes = np.array([len(token) for token in tokenize_text.token_bytes(encoding)])
    size = args.passage_bytes or tokenize_text.PASSAGE_BYTES[encoding.name]
    found = []
    for path in args.files:
        if path.suffix == ".bin":
            parts = cut_shard(path, model.cfg, args.slices)
        else:
            tokens = read_text(path, args.field, size, encoding)
            parts = cut_text(tokens, model.cfg.bos_id, model.cfg.val_slice_tokens)
        progress = tqdm(parts, desc=path.name, disable=None, leave=False)
        losses: list[np.ndarray] = []
        for part in progress:
            counts = document_losses(model, part, token_bytes)
            if losses and path.suffix != ".bin" and part[0] != model.cfg.bos_id:  # of the passage before
                losses[-1][:, -1] += counts[:, 0]
                counts = counts[:, 1:]
            if counts.size:
                losses.append(counts)
        tg.require(sum(part[2].sum() for part in losses), f"{path} has no text")
        found.append(np.hstack(losses))
        print(report(found[-1], str(path)), flush=True)
    if len(found) > 1:
        print(report(np.hstack(found), "all"))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loss.py", __doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE")
    add("--slices", type=parse_slices, metavar="FIRST:END", help="of shards")
    add("--passage-bytes", type=number(int, 4), metavar="N")
    add("--field", help="key of the text in a .jsonl line (default: text)")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
