#!/usr/bin/env python3
"""Download FineWeb, tokenized with GPT-2's encoding: the validation shard and the first N training shards.

    python data/fineweb.py [N | all] [--out data/fineweb10B]

Shards of 100M tokens (200 MB) come from the Hugging Face dataset kjj0/fineweb10B-gpt2, which has 103 for training.
The `record` preset needs 9, the default. What is there and whole is not downloaded again.
"""
import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import logging
from tokenize_text import InputError, read_header

DATASET, TRAINING_SHARDS = "kjj0/fineweb10B-gpt2", 103


def shard_count(text: str) -> int:
    if text == "all":
        return TRAINING_SHARDS
    if not text.isdecimal() or int(text) > TRAINING_SHARDS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0..{TRAINING_SHARDS} nor `all`")
    return int(text)


def fetch(out: Path, name: str) -> None:
    """Download OUT/NAME unless it is there and whole. Raises InputError if what arrives is not a whole shard."""
    path = out / name
    if path.exists():
        try:
            read_header(path)
            return
        except InputError as error:
            print(f"{name}: removing a broken file ({error})", flush=True)
            path.unlink()   # otherwise the hub's client takes it for the finished download
    hf_hub_download(DATASET, name, repo_type="dataset", local_dir=out)
    try:
        read_header(path)
    except InputError as error:
        path.unlink()
        raise InputError(f"{name} arrived broken, and was removed") from error
    print(f"{name}: downloaded", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=shard_count, nargs="?", default=9, metavar="N",
                        help=f"number of training shards, 0..{TRAINING_SHARDS}, or `all` (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="folder for the shards (default: data/fineweb10B)")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()   # its retries say nothing that the line below does not
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    pool = ThreadPoolExecutor(4)
    try:
        fetch(args.out, names[0])   # alone, so that a missing network is found, and told, once
        for _ in pool.map(lambda name: fetch(args.out, name), names[1:]):
            pass
    except (InputError, OSError) as error:   # the hub's errors are OSErrors
        pool.shutdown(cancel_futures=True)
        reason = " ".join(str(error).split()).rstrip(".")
        sys.exit(f"fineweb.py: cannot get {DATASET}: {reason}. Start it again: it continues where it stopped.")
    print(f"{args.out.name}: validation shard and {args.shards} training shards are there")


if __name__ == "__main__":
    main()
