#!/usr/bin/env python3
"""Writes Tiny Shakespeare (1.1 MB) as bytes, for the `cpu` preset. The last tenth validates, as in nanoGPT.

    python data/shakespeare.py [FILE] [--out data/shakespeare]

Without FILE the text is downloaded from where nanoGPT has it, Karpathy's char-rnn, and must have its SHA-256.
A FILE may have any text, as data/tokenize_text.py reads it, of at least ten bytes. Training reads only the
beginning of a document, so the training text is cut into passages of at most 512 bytes. They come in random
order: a run is about one pass, and in the text's order its end would depend on which play comes last. The
validation text is one document: every position sees as far back as the model's windows allow.
"""

import argparse
import hashlib
import http.client
import random
import urllib.request
from pathlib import Path

import numpy as np

from scripts import UserError, make_parser, run_script, target
from tokenize_text import (
    PASSAGE_BYTES,
    SHARD_TOKENS,
    SplitWriter,
    cut_passages,
    get_encoding,
    new_shards,
    prepare,
    read_documents,
    token_bytes,
    write_token_bytes,
)

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def read(file: Path) -> bytes:
    """Returns the text of a file as UTF-8. Raises UserError if it has none."""
    text = b""
    for document in read_documents([file]):
        text += b"".join(prepare(document, 1, 0).passages)
    if len(text) < 10:
        raise UserError(f"{file} has {len(text)} bytes of text; at least ten are needed")
    return text


def download() -> bytes:
    """Returns Tiny Shakespeare. Raises UserError if something else arrives."""
    with urllib.request.urlopen(URL, timeout=60) as response:
        text = response.read()
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise UserError(f"{URL} gave another text, as networks with a log-in page do; give a FILE")
    return text


def place_of(text: bytes, path: Path) -> Path:
    """Returns target() of a file that is to hold the text. Raises UserError if it holds another."""
    path = target(path, b"")
    if path.exists() and path.read_bytes() not in (b"", text):
        raise UserError(f"{path}: another text is there; remove it, or choose another folder")
    return path


def run(args: argparse.Namespace) -> None:
    text = read(args.file) if args.file else download()
    encoding = get_encoding("bytes")
    val_begin = len(text) * 9 // 10
    train_passages = cut_passages(text[:val_begin], PASSAGE_BYTES["bytes"])
    random.Random(0).shuffle(train_passages)
    splits = {"train": train_passages, "val": [text[val_begin:]]}
    with new_shards(args.out, "shakespeare") as folder:
        place_of(text, args.out / "input.txt")
        (folder / "input.txt").write_bytes(text)  # for bench/nanogpt.py, which gives it to nanoGPT
        for split, passages in splits.items():
            writer = SplitWriter(folder, "shakespeare", split, encoding, SHARD_TOKENS)
            tokens = [np.frombuffer(passage, np.uint8) for passage in passages]  # a byte is its token
            writer.add(tokens, list(map(len, passages)))
            writer.close()
            print(f"{args.out}: {writer.tokens:,} tokens in {len(passages):,} passages for {split}")
        write_token_bytes(folder, token_bytes(encoding))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("shakespeare.py", __doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the text, if it is here already")
    folder = Path(__file__).resolve().parent / "shakespeare"
    parser.add_argument(
        "--out", type=Path, default=folder, help="folder of the shards (default: %(default)s)"
    )
    run_script(run, parser, argv, http.client.HTTPException)


if __name__ == "__main__":
    main()
