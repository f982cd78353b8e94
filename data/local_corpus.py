#!/usr/bin/env python3
"""Builds a corpus from what every machine has: the source of Python's standard library, and pydoc's topics.

    python data/local_corpus.py [--out data/local]                    bytes, for the `cpu` preset
    python data/local_corpus.py --encoding gpt2 [--out data/words]    GPT-2's tokens, for `words`
    python data/local_corpus.py --headers [--out data/headers]

The text is the library's .py files, without tests, and the pydoc topics, named pydoc_data/topics/NAME; with
--headers, instead, the C++ headers in the torch package: to check on other text what was found on the first.
Training uses only the beginning of a document, so files are cut at blank lines into passages of about 1 KiB;
each passage is a document. With --encoding gpt2 those of more than 4 KiB are left out; most are tables of
character codes. The SHA-256 of a file's name chooses between training and validation (one file in 20). The
SHA-256 of name and passage number orders the documents. Versions of Python and torch have different text; a
run's log names the data's fingerprint. Does nothing if this version's files exist, none of them damaged.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sysconfig
from pathlib import Path

from scripts import UserError, make_parser, replacing, run_script, target
from tokenize_text import VOCABULARY, Document, cut, find_earlier, write_shards

SOURCE_BEGINS = rb'\{\n "(python|torch)": '  # how source.json begins
VAL_ONE_IN = 20
PASSAGE_BYTES = 1024
# Passages without a blank line in more bytes are mostly tables of character codes, which are long in GPT-2's
# tokens: one was a ninth of the validation text of `words`, and made its loss differ by 0.1 between seeds.
LONGEST_PASSAGE = {"gpt2": 4096, "bytes": None}
# Left out: packages, tests, and files that differ between builds of one version.
LEFT_OUT_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config-*")
LEFT_OUT_FILES = ("test_*.py", "*_test.py", "_sysconfigdata*.py", "sitecustomize.py", "usercustomize.py")
HEADER_SUFFIXES = (".h", ".hpp", ".cuh")


def is_left_out(path: Path) -> bool:
    """Tells whether this file of the library, a path relative to it, is left out."""
    for folder in path.parts[:-1]:
        if any(Path(folder).match(pattern) for pattern in LEFT_OUT_FOLDERS):
            return True
    if any(path.match(pattern) for pattern in LEFT_OUT_FILES):
        return True
    return path.as_posix() == "pydoc_data/topics.py"  # its topics are documents of their own


def stdlib_texts(stdlib: Path) -> dict[str, bytes]:
    """Returns the library's files and pydoc's topics, bytes as on disk, by name.

    Raises UserError for a Python without them: it may have its library compiled, or in an archive.
    """
    texts = {}
    for file in stdlib.rglob("*.py"):
        path = file.relative_to(stdlib)
        if not is_left_out(path):
            texts[path.as_posix()] = file.read_bytes()
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    lacks = None
    if not texts:
        lacks = f"the source of its library, .py files in {stdlib}"
    elif not topics:
        lacks = "pydoc_data.topics"
    if lacks:
        raise UserError(f"this Python lacks {lacks}; run this script with another Python")
    for name, text in topics.items():
        texts[f"pydoc_data/topics/{name}"] = text.encode()
    return texts


def torch_folder() -> Path:
    torch = importlib.util.find_spec("torch")
    if not torch or not torch.submodule_search_locations:
        raise UserError("no torch here, whose headers are the text; use .venv/bin/python")
    return Path(torch.submodule_search_locations[0])


def header_texts(package: Path) -> dict[str, bytes]:
    """Returns the package's C++ headers, bytes as on disk, by name."""
    texts = {}
    for suffix in HEADER_SUFFIXES:
        for path in (package / "include").rglob(f"*{suffix}"):
            texts[path.relative_to(package).as_posix()] = path.read_bytes()
    return texts


def corpus(texts: dict[str, bytes], longest: int | None = None) -> list[Document]:
    """Returns the documents, ordered by the hash of name and passage number.

    Passages of more than `longest` bytes are left out.
    """
    passages: dict[str, Document] = {}
    for name, text in texts.items():
        for i, raw in enumerate(cut(text, PASSAGE_BYTES)):
            if not longest or len(raw) <= longest:
                passages[f"{name}#{i}"] = Document(path=name, line=1, raw=raw, key=name)
    order = sorted(passages, key=lambda passage: hashlib.sha256(passage.encode()).digest())
    return [passages[passage] for passage in order]


def describe_source(documents: list[Document], name: str, version: str, encoding: str) -> dict:
    """Returns what identifies the shards: the text's origin and version, its documents, and the encoding."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.key} {len(document.raw)}\n".encode() + document.raw)
    return {
        name: version,
        "documents": len(documents),
        "sha256": digest.hexdigest(),
        "encoding": encoding,
    }


def hash_files(out: Path, name: str) -> dict[str, str]:
    """Returns the SHA-256 of each shard of this name and of the vocabulary in `out`, by the files' names.

    Raises UserError if there are other shards.
    """
    hashes = {}
    for path in [*find_earlier(out, name), *out.glob(VOCABULARY)]:
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def read_source(out: Path) -> object:
    """Returns what source.json says of the shards in `out`; None: nothing."""
    try:
        return json.loads((out / "source.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def run(args: argparse.Namespace) -> None:
    if args.headers:
        texts = header_texts(torch_folder())
        origin = "torch"
        version = importlib.metadata.version("torch")
        usual_folder = "headers"
    else:
        texts = stdlib_texts(Path(sysconfig.get_path("stdlib")))
        origin = "python"
        version = platform.python_version()
        usual_folder = "words" if args.encoding == "gpt2" else "local"
    out = args.out or Path(__file__).resolve().parent / usual_folder
    documents = corpus(texts, LONGEST_PASSAGE[args.encoding])
    source = describe_source(documents, origin, version, args.encoding)
    saved = read_source(out)
    found = hash_files(out, origin)
    if saved == source | {"files": found}:
        print(f"{out.name}: the text of {origin.title()} {version} is there already")
        return
    out.mkdir(parents=True, exist_ok=True)
    target(out / "source.json", SOURCE_BEGINS)
    written = write_shards(out, origin, documents, args.encoding, val_one_in=VAL_ONE_IN, replaced=origin)
    files = hash_files(out, origin)
    complete = source | {"files": files}
    if saved == complete:
        damaged = sorted({name for name, _ in found.items() ^ files.items()})
        print(f"{out.name}: {', '.join(damaged)} was damaged, missing or new; built again")
    with replacing(out / "source.json", SOURCE_BEGINS) as path:
        path.write_text(json.dumps(complete, indent=1) + "\n")
    print(
        f"{out.name}: {written.train.tokens:,} training tokens ({written.train.documents:,} documents), "
        f"{written.val.tokens:,} validation tokens ({written.val.documents:,} documents), the text of "
        f"{origin.title()} {version}; {written.bad} left out that are not UTF-8"
    )


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("local_corpus.py", __doc__)
    parser.add_argument("--headers", action="store_true", help="the headers in torch, not Python's library")
    parser.add_argument("--encoding", choices=("bytes", "gpt2"), default="bytes", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder (default: data/local, data/words or data/headers)")
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
