#!/usr/bin/env python3
"""Writes Tiny Shakespeare (1.1 MB) as bytes, for the `cpu` preset. The last tenth validates, as in nanoGPT.

    python data/shakespeare.py [FILE] [--out data/shakespeare]

Without FILE the text is downloaded from where nanoGPT has it, Karpathy's char-rnn. Training reads only the
beginning of a document, so the training text is cut into passages of at most 512 bytes. They come in random
order: a run is about one pass, and in the text's order its end would depend on which play comes last. The
validation text is one document: every position sees as far back as the model's windows allow.
"""

import argparse
import random
import urllib.request
from pathlib import Path

import numpy as np

from tokenize_text import (
    PASSAGE_BYTES,
    SHARD_TOKENS,
    SplitWriter,
    cut_passages,
    get_encoding,
    make_parser,
    run_script,
    token_bytes,
    write_token_bytes,
)

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def run(args: argparse.Namespace) -> None:
    if args.file:
        text = args.file.read_bytes()
    else:
        with urllib.request.urlopen(URL, timeout=60) as response:
            text = response.read()
    encoding = get_encoding("bytes")
    val_begin = len(text) * 9 // 10
    train_passages = cut_passages(text[:val_begin], PASSAGE_BYTES["bytes"])
    random.Random(0).shuffle(train_passages)
    splits = {"train": train_passages, "val": [text[val_begin:]]}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "input.txt").write_bytes(text)  # for bench/nanogpt.py, which gives it to nanoGPT
    for split, passages in splits.items():
        writer = SplitWriter(args.out, "shakespeare", split, encoding, SHARD_TOKENS)
        tokens = [np.frombuffer(passage, np.uint8) for passage in passages]  # a byte is its token
        writer.add(tokens, list(map(len, passages)))
        writer.close()
        print(f"{args.out}: {writer.tokens:,} tokens in {len(passages):,} passages for {split}")
    write_token_bytes(args.out, token_bytes(encoding))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("shakespeare.py", __doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the text, if it is here already")
    folder = Path(__file__).resolve().parent / "shakespeare"
    parser.add_argument(
        "--out", type=Path, default=folder, help="folder of the shards (default: %(default)s)"
    )
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
