#!/usr/bin/env python3
"""Turn text files into the .bin shards that train_gpt.py reads.

    python data/tokenize_text.py OUT FILE...     (.txt .md .py .jsonl, each also as .gz)

A .txt, .md or .py file is one document; each line of a .jsonl file is one, its text under --field. Training takes only
the beginning of a document, so one of more than --passage-bytes is cut into passages: at blank lines where it can be,
else at line ends, else at spaces. Each passage is stored whole in one shard, a start token before it; empty documents
are left out. The SHA-256 of the whole text decides between training and validation, so all passages of a document are
on one side, whatever else is tokenized with it. The same files in the same order give the same shards.

A shard, NAME_train_000001.bin (training counts from 1, validation from 0), all of it little-endian:
    256 int32   20240520, 1, tokens, vocabulary size, start token, bytes of UTF-8 text without start tokens, 0, 0, ...
    uint16      the tokens
A 0 in the words after the token count means: not known. data/local_corpus.py writes its shards through this file.
"""
import argparse
import codecs
import functools
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

MAGIC, VERSION, HEADER_WORDS = 20240520, 1, 256
SHARD_TOKENS = 100_000_000
# About the tokens of a document that the presets use: `cpu`, on bytes, at most 512; `record` 2048, of about 4 bytes each.
PASSAGE_BYTES = {"bytes": 512, "gpt2": 8192}
ENDINGS = (".txt", ".md", ".py", ".jsonl")


class InputError(Exception):
    """Input that cannot be used; the message is one line that says what is wrong and what to do."""


# ---- Shards ------------------------------------------------------------------------------------------------------

class Header(NamedTuple):
    tokens: int
    vocabulary: int   # 0 = not known, and so below
    start_token: int
    text_bytes: int


def read_header(path: Path) -> Header:
    """The header of a shard that is whole. Raises InputError if the file is anything else."""
    size = path.stat().st_size
    words = np.fromfile(path, "<i4", count=HEADER_WORDS)
    if len(words) < HEADER_WORDS or words[0] != MAGIC or words[1] != VERSION:
        raise InputError(f"{path}: not a shard (wrong header); remove it and make it again")
    header = Header(*map(int, words[2:6]))
    expected = 4 * HEADER_WORDS + 2 * header.tokens
    if size != expected:
        raise InputError(f"{path}: {size} bytes, but its header promises {expected}; remove it and make it again")
    return header


def read_tokens(path: Path) -> np.ndarray:
    """All tokens of a shard, (tokens,) uint16, mapped from the file. Raises InputError as read_header does."""
    header = read_header(path)
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER_WORDS, shape=(header.tokens,))


class SplitWriter:
    """Writes documents, in order, to FOLDER/NAME_SPLIT_<number>.bin, beginning a new shard where one is full.

    Tokens go straight to the file, so memory holds a document, never a shard."""

    def __init__(self, folder: Path, name: str, split: str, encoding: tiktoken.Encoding, shard_tokens: int):
        self.stem, self.number = folder / f"{name}_{split}", 0 if split == "val" else 1
        self.encoding, self.shard_tokens = encoding, shard_tokens
        self.file = None
        self.documents = self.passages = self.tokens = self.text_bytes = 0   # of all shards
        self.shard = (0, 0)                                                  # tokens and bytes of text in the open one

    def add(self, passages: list[np.ndarray], text_bytes: list[int]) -> None:
        """Write a document: the tokens of each passage, without start token, and the bytes of text they stand for. A passage
        longer than a shard gets a longer shard of its own."""
        for tokens, size in zip(passages, text_bytes):
            count = 1 + len(tokens)
            if self.file and self.shard[0] + count > self.shard_tokens:
                self.close()
            if not self.file:
                self.file = open(f"{self.stem}_{self.number:06d}.bin", "wb")
                self.file.write(bytes(4 * HEADER_WORDS))                     # the real header follows when the counts are known
            self.file.write(np.concatenate(([self.encoding.eot_token], tokens)).astype("<u2").data)
            self.shard = (self.shard[0] + count, self.shard[1] + size)
            self.tokens, self.text_bytes = self.tokens + count, self.text_bytes + size
        self.documents, self.passages = self.documents + 1, self.passages + len(passages)

    def close(self) -> None:
        if not self.file:
            return
        tokens, text_bytes = self.shard
        header = np.zeros(HEADER_WORDS, "<i4")
        header[:5] = MAGIC, VERSION, tokens, self.encoding.n_vocab, self.encoding.eot_token
        header[5] = text_bytes if text_bytes < 2**31 else 0
        self.file.seek(0)
        self.file.write(header.data)
        self.file.close()
        self.file, self.shard, self.number = None, (0, 0), self.number + 1


# ---- Documents ---------------------------------------------------------------------------------------------------

class Document(NamedTuple):
    path: str
    line: int                  # where `raw` begins in the file, from 1
    raw: bytes
    field: str | None = None   # `raw` is a JSON object that holds the text under this name; None: `raw` is the text
    key: str | None = None     # hashed to choose training or validation; None: the text is


class Text(NamedTuple):
    document: Document
    passages: list[bytes]      # UTF-8, none of them empty; they make up the text
    validation: bool


class BadDocument(Exception):
    """A document that cannot be read; the message names file and line."""


def read_documents(paths: list[Path], field: str) -> Iterator[Document | BadDocument]:
    """The documents of `paths`, in order, a file's byte order mark left out. Where a .gz file breaks off, a BadDocument takes
    the place of its rest."""
    for path in paths:
        line = 1
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            try:
                if path.name.removesuffix(".gz").endswith(".jsonl"):
                    for raw in file:
                        if line == 1:
                            raw = raw.removeprefix(codecs.BOM_UTF8)
                        if raw.strip():
                            yield Document(str(path), line, raw, field)
                        line += 1
                else:
                    yield Document(str(path), line, file.read().removeprefix(codecs.BOM_UTF8))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                yield BadDocument(f"{path}:{line}: broken gzip data ({error})")


def text_of(document: Document) -> str:
    """Raises BadDocument where the bytes are not UTF-8, or the line is not JSON with a text in its field."""
    def bad(reason, offset=0):
        line = document.line + document.raw.count(b"\n", 0, offset)
        return BadDocument(f"{document.path}:{line}: {reason}")

    try:
        text = document.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8 (byte 0x{document.raw[error.start]:02x})", error.start) from error
    if document.field is None:
        return text
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(f"not JSON ({error})") from error
    text = record.get(document.field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise bad(f"no text under {document.field!r} (choose with --field)")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad("half of a surrogate pair in the text") from error
    return text


BLANK_LINES, LINE_END, SPACE = rb"\n(?:[ \t\r]*\n)+", rb"\n", rb"\s+"
CHARACTER = rb"(?=[^\x80-\xbf])"   # where one of UTF-8 begins


def cut(raw: bytes, size: int, boundary: bytes = BLANK_LINES) -> list[bytes]:
    """Cut `raw` behind matches of the pattern `boundary` into parts of at most `size` bytes, but of at least one piece (what
    lies between two matches). The parts make up `raw`."""
    if len(raw) <= size:
        return [raw]
    begin, end, parts = 0, 0, []
    for match in re.finditer(boundary + rb"|\Z", raw):
        if match.end() > end > begin and match.end() - begin > size:
            parts.append(raw[begin:end])
            begin = end
        end = match.end()
    return parts + [raw[begin:]]


def passages_of(raw: bytes, size: int) -> list[bytes]:
    """Cut UTF-8 text into passages of at most `size` bytes, at least 4, each by the coarsest boundaries that make it fit."""
    parts = [raw]
    for boundary in (BLANK_LINES, LINE_END, SPACE, CHARACTER):
        parts = [piece for part in parts for piece in cut(part, size, boundary)]
    return parts


def divide(document: Document | BadDocument, val_one_in: int, passage_bytes: int) -> Text:
    """Cut a document into passages (0: keep it whole) and choose its side. Raises BadDocument as text_of does."""
    if isinstance(document, BadDocument):
        raise document
    utf8 = text_of(document).encode("utf-8")
    digest = hashlib.sha256(utf8 if document.key is None else document.key.encode()).digest()
    passages = passages_of(utf8, passage_bytes) if passage_bytes else [utf8]
    return Text(document, [part for part in passages if part], int.from_bytes(digest, "big") % val_one_in == 0)


# ---- Encoding ----------------------------------------------------------------------------------------------------

@functools.lru_cache
def encoding_named(name: str) -> tiktoken.Encoding:
    """`gpt2`, or `bytes`: the 256 bytes and a start token, 256. Raises InputError if GPT-2's cannot be had."""
    if name == "bytes":
        # For its vocabulary, and to decode: `encode` needs no tokenizer, a byte is its own token. No two bytes ever merge.
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot get tiktoken's encoding {name!r} ({type(error).__name__}): it is downloaded on first "
                         "use, so connect to the internet once, or use --encoding bytes") from error


def encode(texts: list[Text], encoding: tiktoken.Encoding) -> list[list[np.ndarray] | BadDocument]:
    """Each text's passages as tokens, or the BadDocument that it turns out to be."""
    if encoding.name == "bytes":
        return [[np.frombuffer(part, np.uint8) for part in text.passages] for text in texts]
    try:   # in tiktoken's threads; "<|endoftext|>" in a text is plain text
        passages = iter(encoding.encode_batch([part.decode("utf-8") for text in texts for part in text.passages],
                                              num_threads=os.cpu_count(), disallowed_special=()))
    except ValueError as error:   # the pattern's engine gives up, at a million spaces in a row for instance
        if len(texts) > 1:
            return [result for text in texts for result in encode([text], encoding)]
        (text,) = texts
        return [BadDocument(f"{text.document.path}:{text.document.line}: cannot be tokenized ({error})")]
    return [[np.array(next(passages), np.uint16) for _ in text.passages] for text in texts]


def batches(documents: Iterable[Document | BadDocument], size: int = 1 << 20) -> Iterator[list]:
    """Lists of documents of about `size` bytes: what is encoded at once."""
    batch, total = [], 0
    for document in documents:
        batch.append(document)
        total += len(document.raw) if isinstance(document, Document) else 0
        if total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


# ---- The whole ---------------------------------------------------------------------------------------------------

class Written(NamedTuple):
    train: SplitWriter
    val: SplitWriter
    bad: int
    empty: int


def write_shards(out: Path, name: str, documents: Iterable[Document | BadDocument], encoding_name: str = "gpt2", *,
                 shard_tokens: int = SHARD_TOKENS, val_one_in: int = 100, passage_bytes: int = 0,
                 strict: bool = False) -> Written:
    """Tokenize `documents` into OUT/NAME_{train,val}_<number>.bin, which appear only once all are written.

    With `passage_bytes` longer documents are cut into passages.
    Bad documents are reported on stderr and counted; with `strict` the first raises InputError. So does a split that
    gets no document: half of a corpus is of no use, and would keep the folder from being used for the whole."""
    encoding = encoding_named(encoding_name)
    if encoding.n_vocab > 2**16:
        raise InputError(f"encoding {encoding_name!r} has {encoding.n_vocab} tokens; shards hold at most {2**16}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", suffix=".tmp", dir=out) as folder:
        train, val = (SplitWriter(Path(folder), name, split, encoding, shard_tokens) for split in ("train", "val"))
        bad = empty = 0

        def leave_out(error: BadDocument) -> None:
            nonlocal bad
            if strict:
                raise InputError(str(error))
            tqdm.write(f"left out: {error}", file=sys.stderr)
            bad += 1

        for batch in batches(documents):
            texts = []
            for document in batch:
                try:
                    texts.append(divide(document, val_one_in, passage_bytes))
                except BadDocument as error:
                    leave_out(error)
            for text, passages in zip(texts, encode(texts, encoding)):
                if isinstance(passages, BadDocument):
                    leave_out(passages)
                elif passages:
                    (val if text.validation else train).add(passages, list(map(len, text.passages)))
                else:
                    empty += 1
        train.close(), val.close()
        for what, split in (("training", train), ("validation", val)):
            if not split.documents:
                all_documents = train.documents + val.documents
                raise InputError(f"none of {all_documents} documents fell to {what} ({bad} bad and {empty} "
                                 "empty ones left out), and train_gpt.py needs both: nothing was written; "
                                 + ("a document is never divided between them: cut the file into several"
                                    if all_documents == 1 else "give more documents, or another --val-one-in"))
        for path in sorted(Path(folder).iterdir()):
            os.replace(path, out / path.name)
    return Written(train, val, bad, empty)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the shards, without shards so far")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--field", default="text", help="where a .jsonl line has its text (default: %(default)s)")
    parser.add_argument("--encoding", choices=("gpt2", "bytes"), default="gpt2",
                        help="tiktoken's GPT-2 (default), or the 256 bytes themselves")
    parser.add_argument("--name", help="what the shards' names begin with (default: the folder's name)")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--val-one-in", type=int, default=100, metavar="N",
                        help="one document in N, by its hash, is for validation (default: %(default)s)")
    parser.add_argument("--passage-bytes", type=int, metavar="N",
                        help="cut documents of more than N bytes into passages of at most as many; 0: keep them whole "
                             "(default: 8192, about 2,048 of GPT-2's tokens; 512 with --encoding bytes)")
    parser.add_argument("--strict", action="store_true",
                        help="stop at the first document with bad bytes or bad JSON, instead of leaving it out")
    args = parser.parse_args(argv)
    for path in args.files:
        if not path.is_file():
            parser.error(f"{path}: {'a folder: name the files in it' if path.is_dir() else 'no such file'}")
        if not path.name.removesuffix(".gz").endswith(ENDINGS):
            parser.error(f"{path}: unknown kind of file; it must end in {' '.join(ENDINGS)}, each also with .gz")
    passage_bytes = PASSAGE_BYTES[args.encoding] if args.passage_bytes is None else args.passage_bytes
    if not 0 < args.shard_tokens < 2**31 or 0 < passage_bytes < 4 or passage_bytes < 0 or args.val_one_in < 1:
        parser.error("--shard-tokens must lie in 1..2147483647, --passage-bytes be 0 or at least 4, --val-one-in at least 1")
    if next(args.out.glob("*.bin"), None):
        parser.error(f"{args.out} already has shards, and training would read old and new: choose another folder")

    total = None if any(path.suffix == ".gz" for path in args.files) else sum(p.stat().st_size for p in args.files)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="tokenizing") as bar:
        def documents():
            for document in read_documents(args.files, args.field):
                bar.update(len(document.raw) if isinstance(document, Document) else 0)
                yield document
        try:
            written = write_shards(args.out, args.name or args.out.resolve().name, documents(), args.encoding,
                                   shard_tokens=args.shard_tokens, val_one_in=args.val_one_in,
                                   passage_bytes=passage_bytes, strict=args.strict)
        except (InputError, OSError) as error:
            bar.close()
            sys.exit(f"tokenize_text.py: {error}")
        except KeyboardInterrupt:
            bar.close()
            print("tokenize_text.py: interrupted; nothing was written", file=sys.stderr)
            sys.exit(130)
    for what, split in (("training", written.train), ("validation", written.val)):
        print(f"{args.out}: {split.tokens:,} {what} tokens, {split.documents:,} documents"
              + (f" in {split.passages:,} passages" if split.passages > split.documents else ""))
    if sum(split.passages - split.documents for split in written[:2]):
        print(f"Documents of more than {passage_bytes:,} bytes were cut into passages; --passage-bytes 0 keeps them whole.")
    if written.bad or written.empty:
        print(f"Left out: {written.bad:,} bad documents (named above), {written.empty:,} empty ones.")


if __name__ == "__main__":
    main()
