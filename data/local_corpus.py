#!/usr/bin/env python3
"""Build the corpus that every machine has: the source of the running Python's standard library, and pydoc's topics.

    python data/local_corpus.py [--out data/local]

The text is the library's .py files, without tests, and each pydoc topic, under the name pydoc_data/topics/NAME. Files
are long, and training takes only the beginning of a document; so a file is cut at blank lines into passages of about
1 KiB, and each is a document. The SHA-256 of the file's name decides between training and validation (one file in 20);
that of the name with the passage's number orders the documents. They are encoded as bytes, always, so that runs on
different machines compare; Python versions differ, and a log names the data's fingerprint. Does nothing if the shards
are there, whole, and from this Python's text.
"""
import argparse
import hashlib
import json
import platform
import sys
import sysconfig
from pathlib import Path

from pydoc_data.topics import topics
from tokenize_text import Document, InputError, cut, read_header, write_shards

VAL_ONE_IN = 20
PASSAGE_BYTES = 1024
# Folders and files that are not the library's text: packages, tests, and what differs between builds of one version.
LEFT_OUT_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config-*")
LEFT_OUT_FILES = ("test_*.py", "*_test.py", "_sysconfigdata*.py", "sitecustomize.py", "usercustomize.py")


def corpus(stdlib: Path) -> list[Document]:
    """All documents, bytes as they are on disk, in order of the hash of their names and numbers."""
    def kept(path: Path) -> bool:
        return not (any(Path(folder).match(pattern) for folder in path.parts[:-1] for pattern in LEFT_OUT_FOLDERS)
                    or any(path.match(pattern) for pattern in LEFT_OUT_FILES)
                    or path.as_posix() == "pydoc_data/topics.py")   # its topics are taken one by one

    names = filter(kept, (path.relative_to(stdlib) for path in stdlib.rglob("*.py")))
    texts = {path.as_posix(): (stdlib / path).read_bytes() for path in names}
    texts |= {f"pydoc_data/topics/{name}": text.encode() for name, text in topics.items()}
    parts = {f"{name}#{i}": (name, raw) for name, text in texts.items() for i, raw in enumerate(cut(text, PASSAGE_BYTES))}
    return [Document(path=name, line=1, raw=raw, key=name)
            for _, (name, raw) in sorted(parts.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())]


def source(documents: list[Document]) -> dict:
    """What the shards are made from: equal for equal corpora."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.key} {len(document.raw)}\n".encode() + document.raw)
    return {"python": platform.python_version(), "documents": len(documents), "sha256": digest.hexdigest()}


def is_whole(out: Path, made_from: dict) -> bool:
    """Whether `out` holds the shards of this source, as long as they were when they were written."""
    try:
        noted = json.loads((out / "source.json").read_text())
        tokens = {path.name: read_header(path).tokens for path in sorted(out.glob("*.bin"))}
    except (FileNotFoundError, ValueError, InputError):
        return False
    return noted == made_from | {"tokens": tokens}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "local",
                        help="folder for the shards (default: data/local)")
    args = parser.parse_args(argv)
    documents = corpus(Path(sysconfig.get_path("stdlib")))
    made_from = source(documents)
    if is_whole(args.out, made_from):
        print(f"{args.out.name}: the text of Python {made_from['python']} is there already")
        return
    try:
        written = write_shards(args.out, "python", documents, "bytes", val_one_in=VAL_ONE_IN)
    except (InputError, OSError) as error:
        sys.exit(f"local_corpus.py: {error}")
    tokens = {path.name: read_header(path).tokens for path in sorted(args.out.glob("*.bin"))}
    (args.out / "source.json").write_text(json.dumps(made_from | {"tokens": tokens}, indent=1) + "\n")
    print(f"{args.out.name}: {written.train.tokens:,} training tokens ({written.train.documents:,} documents), "
          f"{written.val.tokens:,} validation tokens ({written.val.documents:,} documents), from the standard library "
          f"of Python {made_from['python']}; {written.bad} left out that are not UTF-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("local_corpus.py: interrupted; start it again", file=sys.stderr)
        sys.exit(130)
