#!/usr/bin/env python3
"""Downloads FineWeb, tokenized with GPT-2's encoding: the validation shard and the first N training shards.

    python data/fineweb.py [N | all] [--out data/fineweb10B]

Shards of 100M tokens (200 MB) come from the Hugging Face dataset kjj0/fineweb10B-gpt2, which has 103 for
training. The `record` preset needs 9, the default. Complete shards are not downloaded again, and partial
downloads continue. A download is named NAME.<checksum>.tmp until its SHA-256, header, size and tokens are
verified. vocabulary.txt, beside the shards, tells training the bytes of each token; it is written last, with
tiktoken, which downloads GPT-2's encoding. data/synthetic.py makes shards without a network, to time and try
out the preset.
"""

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts import UserError, make_parser, missing_package, target
from tokenize_text import (
    VOCABULARY,
    VOCABULARY_BEGINS,
    find_earlier,
    get_encoding,
    read_tokens,
    token_bytes,
    write_token_bytes,
)


def name_setting(error: Exception) -> str:
    """Returns which of the environment's variables an error is about, and the error; if none, raises it."""
    settings = {}
    for name, value in os.environ.items():
        if re.match("HF_|HUGGING|SSL|.*_PROXY$", name, re.IGNORECASE):
            settings[name] = value
    if isinstance(error, UnicodeError):
        found = [name for name, value in settings.items() if not value.isascii()]
        if not found:
            found = ["the file of your HF token"]
    elif isinstance(error, ImportError):  # of a package that SOCKS needs
        found = [name for name, value in settings.items() if value.lower().startswith("socks")]
    else:
        found = [name for name, value in settings.items() if repr(value) in str(error)]
        if not found:
            usual = "SSL" if isinstance(error, OSError) else "HF_ENDPOINT|.*_PROXY"
            found = [name for name in settings if re.match(usual, name, re.IGNORECASE)]
    if not found:
        raise error
    return f"{', '.join(found)}: {str(error).rstrip('.')}; fix or unset it"


try:  # not from huggingface_hub itself, which would print the error
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get
    from huggingface_hub.utils import HfHubHTTPError, build_hf_headers, get_session, logging
except ModuleNotFoundError as error:
    sys.exit(f"fineweb.py: {missing_package(error)}")
except ValueError as error:  # the hub reads these settings when it is imported
    sys.exit(f"fineweb.py: {name_setting(error)}")

DATASET = "kjj0/fineweb10B-gpt2"
TRAINING_SHARDS = 103  # in the dataset
VOCAB_SIZE = 50257
MAX_PARALLEL = 4
WITHOUT_NETWORK = (
    "\nfineweb.py: without it: './run.sh --preset cpu' trains on text of this machine "
    "(data/local_corpus.py); to try out the record preset on GPUs, 'python data/synthetic.py data/synthetic' "
    "makes 1.2 GB of random tokens, and './run.sh --data data/synthetic' trains on them"
)
# The hub's own errors are OSErrors. Those of its HTTP client, which depends on its version, are not.
ERRORS: tuple[type[BaseException], ...] = (UserError, OSError, *HfHubHTTPError.__bases__)


def shard_count(text: str) -> int:
    if text == "all":
        return TRAINING_SHARDS
    if not text.isdecimal() or int(text) > TRAINING_SHARDS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0..{TRAINING_SHARDS} nor `all`")
    return int(text)


def check(path: Path) -> None:
    """Raises UserError unless `path` is a complete shard of GPT-2's tokens."""
    largest = read_tokens(path).max(initial=0)
    if largest >= VOCAB_SIZE:
        raise UserError(f"{path}: token {largest}, but GPT-2's are below {VOCAB_SIZE}")


def check_settings(url: str) -> None:
    """Raises UserError if the environment's settings do not allow a request to `url`. Needs no network."""
    try:
        request = get_session().build_request("HEAD", url, headers=build_hf_headers())
        if not request.url.scheme.startswith("http"):
            raise ValueError(f"{ENDPOINT!r} does not begin with https://")
    except Exception as error:  # nothing but settings can be wrong; of which kind depends on the client
        raise UserError(name_setting(error)) from error


def download(url: str, part: Path, size: int, name: str) -> None:
    """Appends to `part` what it lacks of the file at `url`, which has `size` bytes.

    hf_hub_download would start from 0 after every stop. Two processes may download one file at once: they
    write the same bytes to the same places.
    """
    while True:
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            have = file.seek(0, os.SEEK_END)
            try:
                return http_get(
                    url,
                    file,
                    resume_size=have,
                    headers=build_hf_headers(),
                    expected_size=size,
                    displayed_filename=name,
                )
            except ERRORS:
                # http_get itself retries after some errors only, not after a reset.
                if file.seek(0, os.SEEK_END) <= have:
                    raise
        time.sleep(1)


def fetch(out: Path, name: str, dataset: str = DATASET, check: Callable[[Path], None] = check) -> None:
    """Downloads OUT/NAME unless it is complete. Raises UserError if what arrives is not, by `check`."""
    path = (out / name).resolve()  # a link stays one
    out = path.parent
    if path.exists():
        try:
            return check(path)
        except UserError as error:
            tqdm.write(f"{name}: a broken file is there ({error}), which a new one is to replace")
    url = hf_hub_url(dataset, name, repo_type="dataset")
    check_settings(url)
    hub = get_hf_file_metadata(url)
    if not hub.etag or not hub.size:
        raise UserError(
            f"{url} answers without checksum or size, so it is not the hub; look at HF_ENDPOINT and proxies"
        )
    tag = "".join(c for c in hub.etag if c.isalnum())[:16]
    part = out / f"{name}.{tag}.tmp"  # so that a download never continues another version's
    for old in out.glob(f"{name}.*.tmp"):
        if old != part or old.stat().st_size > hub.size:
            old.unlink()
    try:
        download(url, part, hub.size, name)
        # The hub's ETag of so large a file is its SHA-256. A mirror's may be something else.
        if len(hub.etag) == 64 and hashlib.sha256(np.memmap(part, mode="r").data).hexdigest() != hub.etag:
            raise UserError("its checksum is not the hub's")
        check(part)
        os.replace(part, path)
    except UserError as error:
        part.unlink()
        raise UserError(f"{name} arrived broken, and was removed ({error})") from error
    except FileNotFoundError:
        if not path.exists():
            raise
        return check(path)  # another process has just completed the same shard
    tqdm.write(f"{name}: downloaded")


def make_vocabulary(out: Path) -> None:
    """Writes OUT/vocabulary.txt unless it is complete. Raises UserError if the encoding is unavailable."""
    path = out / VOCABULARY
    if path.exists() and path.read_bytes().count(b"\n") == VOCAB_SIZE:
        return
    try:
        encoding = get_encoding("gpt2")
    except UserError as error:
        raise UserError(
            f"the shards are there, but not {path}: tiktoken could not download GPT-2's encoding "
            f"({type(error.__cause__).__name__}); connect to the internet once, or copy the file from a "
            "machine that has it"
        ) from error
    write_token_bytes(out, token_bytes(encoding))
    tqdm.write(f"{VOCABULARY}: written")


def stop(status: int, message: str, more: str = "") -> None:
    """Ends the process at once: sys.exit would wait for the other downloads. Partial files stay anyway."""
    message = f"fineweb.py: {message} Start it again: it continues where it stopped.{more}"
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("fineweb.py", __doc__)
    parser.add_argument(
        "shards",
        type=shard_count,
        nargs="?",
        default=9,
        metavar="N",
        help=f"number of training shards, 0..{TRAINING_SHARDS}, or `all` (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "fineweb10B",
        help="folder for the shards (default: data/fineweb10B)",
    )
    args = parser.parse_args(argv)
    logging.set_verbosity_error()  # of its retries; the last error is reported below
    training = [f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    pool = ThreadPoolExecutor(MAX_PARALLEL)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        find_earlier(args.out, "fineweb")
        target(args.out / VOCABULARY, VOCABULARY_BEGINS)
        fetch(args.out, "fineweb_val_000000.bin")  # alone, so that a missing network is reported once
        downloads = [pool.submit(fetch, args.out, name) for name in training]
        for future in as_completed(downloads):
            future.result()  # raises the download's error
        make_vocabulary(args.out)  # last: the shards arrive even if tiktoken's server cannot be reached
    except KeyboardInterrupt:
        stop(130, "interrupted.")
    except ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        more = WITHOUT_NETWORK
        if isinstance(error, UserError):
            more = ""  # a network would not help
        stop(1, f"cannot get {DATASET}: {reason}.", more)
    print(f"{args.out.name}: validation shard and {args.shards} training shards are there")


if __name__ == "__main__":
    main()
