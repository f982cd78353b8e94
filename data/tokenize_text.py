#!/usr/bin/env python3
"""Turns text files into the .bin shards that train_gpt.py reads.

    python data/tokenize_text.py OUT FILE... --encoding bytes     for the `cpu` preset
    python data/tokenize_text.py OUT FILE...                      for the `record` preset: GPT-2's tokens

Each line of a .jsonl or .ndjson file is a document, a JSON object with its text under --field, and so is each
line of a file that begins as such an object, {"key":, whatever its name. Any other file is one document. A
name may also end in .gz, and in capitals. Bad documents are named and left out: lines without a text, and
what is not UTF-8. A file counts as one bad document if it has NUL bytes, as UTF-16 does, if it is a JSON
array, object or text in quotes, or a damaged array, if it is named .json and has no such lines, or if it is a
table by its name (.csv, .tsv). Empty documents are left out, too.

Training uses only the beginning of a document, so documents of more than --passage-bytes are cut into
passages: at blank lines if possible, else at line ends, else at spaces. A passage never spans two shards, and
a BOS token precedes it. The SHA-256 of a document's text chooses between training and validation, so all its
passages are in the same split, whatever else is tokenized with it. With few documents (fewer than ten times
--val-one-in) one split could be empty, so one passage in --val-one-in is for validation, the last ones of
documents that have several. The same files in the same order give the same shards.

Format of a shard, NAME_train_000001.bin (training counts from 1, validation from 0), little-endian:
    256 int32   20240520, 1, tokens, vocabulary size, BOS token, bytes of UTF-8 text without BOS, 0, 0, ...
    uint16      the tokens
A 0 after the token count means unknown. data/local_corpus.py writes its shards through this file.

Beside them is vocabulary.txt, with each token's bytes, so that training knows which tokens begin others: line
i, from 0, is the lower-case hexadecimal of token i's bytes, and is empty if it has none, as BOS.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import fcntl
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from tqdm import tqdm

from scripts import (
    UserError,
    make_parser,
    number,
    replacing,
    require_distinct,
    run_script,
    target,
    unfinished,
)

if TYPE_CHECKING:
    import tiktoken

    Encoding: TypeAlias = "ByteEncoding | tiktoken.Encoding"

MAGIC = 20240520
VERSION = 1
HEADER_WORDS = 256
SHARD_TOKENS = 100_000_000
# About what the presets use of a document: `cpu` 512 tokens, of a byte; `record` 2048, of about 4 bytes.
PASSAGE_BYTES = {"bytes": 512, "gpt2": 8192}
VOCABULARY = "vocabulary.txt"
# The names of shards, which training reads. Other files, such as copies of shards, are the user's.
SHARD = re.compile(r"(?!\._).+_(train|val)_\d+\.bin")
# Folders of presets' data, and whose shards each may have.
PRESET_FOLDERS = {"fineweb10B": "fineweb", "local": "python", "words": "python"}
HERE = Path(__file__).resolve().parent
# How the files here begin; no other file of these names is replaced.
SHARD_BEGINS = re.escape(struct.pack("<2i", MAGIC, VERSION))
VOCABULARY_BEGINS = rb"(00|21)\n[0-9a-f\n]*\Z"  # the first token is a zero byte, or GPT-2's "!"
FEW = 10  # times --val-one-in: with fewer documents, hashes might leave one split empty
# The names of other scripts' shards, which those replace.
OTHER_MAKERS = ("fineweb", "python", "shakespeare", "synthetic", "torch")
NAMED = 20  # bad documents; more are only counted
LINES = (".jsonl", ".ndjson")  # ends of the names of files with a document on each line
# How such files begin under other names. The first objects may be empty, and \x1e may stand before each.
LINES_BEGIN = re.compile(rb'[\s\x1e]*(\{\s*\}[\s\x1e]*)*\{\s*"[^"\n]*"\s*:')
# How arrays of objects or texts begin. A text may begin with "[1]".
ARRAY_BEGIN = re.compile(rb'\s*\[[\s\[]*(\{\s*"[^"\n]*"\s*:|"[^"\n]*"\s*,)')
TABLES = (".csv", ".tsv")


# ---- Shards ------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    tokens: int
    vocab_size: int  # 0 means unknown, here and below
    bos_id: int
    text_bytes: int


def shard_header(tokens: int, vocab_size: int = 0, bos_id: int = 0, text_bytes: int = 0) -> bytes:
    """Returns a shard's first 1024 bytes. 0 means unknown, except for `tokens`."""
    words = np.zeros(HEADER_WORDS, "<i4")
    words[:5] = MAGIC, VERSION, tokens, vocab_size, bos_id
    words[5] = text_bytes if text_bytes < 2**31 else 0
    return words.tobytes()


def read_header(path: Path) -> Header:
    """Returns a shard's header. Raises UserError if the file is not a shard of the declared length."""
    size = path.stat().st_size
    words = np.fromfile(path, "<i4", count=HEADER_WORDS)
    if len(words) < HEADER_WORDS or words[0] != MAGIC or words[1] != VERSION:
        raise UserError(f"{path}: not a shard (wrong header); remove it and build it again")
    header = Header(*map(int, words[2:6]))
    expected = 4 * HEADER_WORDS + 2 * header.tokens
    if size != expected:
        raise UserError(
            f"{path}: {size} bytes, but its header declares {expected}; remove it and build it again"
        )
    return header


def read_tokens(path: Path) -> np.ndarray:
    """Returns a shard's tokens, (tokens,) uint16, memory-mapped. Raises UserError as read_header does."""
    header = read_header(path)
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER_WORDS, shape=(header.tokens,))


class SplitWriter:
    """Writes documents in order to FOLDER/NAME_SPLIT_<number>.bin, and starts a new shard where one is full.

    Tokens go straight to the file, so memory holds a document, never a shard.
    """

    def __init__(self, folder: Path, name: str, split: str, encoding: Encoding, shard_tokens: int):
        self.stem = folder / f"{name}_{split}"
        self.number = 0 if split == "val" else 1
        self.encoding = encoding
        self.shard_tokens = shard_tokens
        self.file: BinaryIO | None = None  # the open shard
        self.file_tokens = 0
        self.file_text_bytes = 0
        # In all shards:
        self.documents = 0
        self.passages = 0
        self.tokens = 0
        self.text_bytes = 0

    def add(self, passages: list[np.ndarray], text_bytes: list[int]) -> None:
        """Writes a document: each passage's tokens, without BOS, and bytes of text.

        A passage longer than a shard gets a longer shard of its own.
        """
        for tokens, size in zip(passages, text_bytes):
            count = 1 + len(tokens)
            if self.file and self.file_tokens + count > self.shard_tokens:
                self.close()
            if not self.file:
                self.file = open(f"{self.stem}_{self.number:06d}.bin", "wb")
                self.file.write(shard_header(0))  # replaced in close(), when the counts are known
            self.file.write(np.concatenate(([self.encoding.eot_token], tokens)).astype("<u2").data)
            self.file_tokens += count
            self.file_text_bytes += size
            self.tokens += count
            self.text_bytes += size
        self.documents += 1
        self.passages += len(passages)

    def close(self) -> None:
        if not self.file:
            return
        header = shard_header(
            self.file_tokens, self.encoding.n_vocab, self.encoding.eot_token, self.file_text_bytes
        )
        self.file.seek(0)
        self.file.write(header)
        self.file.close()
        self.file = None
        self.file_tokens = 0
        self.file_text_bytes = 0
        self.number += 1


# ---- Documents ---------------------------------------------------------------------------------------------


class Document(NamedTuple):
    path: str
    line: int  # where `raw` begins in the file, from 1
    raw: bytes
    field: str | None = None  # `raw` is a JSON object with the text under this key; None: `raw` is the text
    key: str | None = None  # its hash chooses training or validation; None: the text's hash


class Text(NamedTuple):
    document: Document
    passages: list[bytes]  # UTF-8, none empty; joined they are the text
    validation: bool


class BadDocument(UserError):
    """Reports a document that cannot be read. The message names file and line."""


def is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
        return True
    except (ValueError, RecursionError):
        return False


def open_text(path: Path) -> io.BufferedReader | gzip.GzipFile:
    """Opens a file to read its bytes, without compression."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    return open(path, "rb")


def read_documents(paths: list[Path], field: str | None = None) -> Iterator[Document | BadDocument]:
    """Yields the documents of `paths` in order, without byte order marks.

    field: None means "text". Raises UserError at the end if it is given, and no file has lines.
    One BadDocument replaces a file that is no UTF-8 text, one JSON value, a damaged array or a table, or what
    a broken .gz file lacks: all of it, if the beginning is broken.
    """
    has_lines = False
    for path in paths:
        name = path.name.lower().removesuffix(".gz")
        is_lines = name.endswith(LINES)
        line = 1
        with open_text(path) as file:
            content: BinaryIO | gzip.GzipFile = file
            try:
                if not path.is_file():  # a pipe cannot be read again
                    content = io.BytesIO(file.read())
                # peek() may give fewer, of a .gz file with short members.
                begin = content.read(8192).removeprefix(codecs.BOM_UTF8)
                content.seek(0)
                first = begin.lstrip()[:1]
                whole = b""  # a file that may be one JSON value
                if first in (b"[", b'"') or (first == b"{" and not is_lines):
                    whole = content.read()
                    content = io.BytesIO(whole)
                if b"\0" in begin:
                    yield BadDocument(f"{path}:1: UTF-16, or no text: it has NUL bytes; convert it to UTF-8")
                elif is_json(whole):
                    yield BadDocument(f"{path}:1: one JSON value; write a .jsonl file, each object on a line")
                elif name.endswith(TABLES):
                    yield BadDocument(f"{path}:1: a table; write a .jsonl file, an object for each row")
                elif is_lines or LINES_BEGIN.match(begin):
                    has_lines = True
                    for raw in content:
                        if line == 1:
                            raw = raw.removeprefix(codecs.BOM_UTF8)
                        raw = raw.lstrip(b"\x1e")  # the separator of RFC 7464
                        if raw.strip():
                            yield Document(str(path), line, raw, field or "text")
                        line += 1
                elif name.endswith(".json") or ARRAY_BEGIN.match(begin):
                    yield BadDocument(f"{path}:1: damaged JSON, or several values; write a .jsonl file")
                else:
                    yield Document(str(path), line, content.read().removeprefix(codecs.BOM_UTF8))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                yield BadDocument(f"{path}:{line}: broken gzip data ({error})")
    if field and not has_lines:
        raise UserError(f"--field: {paths[0]} has no JSON object on each line; leave it out")


def decode(document: Document) -> str:
    """Returns a document's text. Raises BadDocument if it is not UTF-8, or lacks a text in its field."""

    def bad(reason, offset=0):
        line = document.line + document.raw.count(b"\n", 0, offset)
        return BadDocument(f"{document.path}:{line}: {reason}")

    if b"\0" in document.raw:
        raise bad("no text: it has NUL bytes", document.raw.index(b"\0"))
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
    if not isinstance(record, dict):
        raise bad("no JSON object")
    if document.field not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise bad(f"no text under {document.field!r}; its keys are {keys}: use --field")
    value = record[document.field]
    if not isinstance(value, str):
        raise bad(f"no text under {document.field!r}, but {json.dumps(value)[:40]}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad("half of a surrogate pair in the text") from error
    return value


BLANK_LINES = rb"\n(?:[ \t\r]*\n)+"
LINE_END = rb"\n"
SPACE = rb"\s+"
CHARACTER = rb"(?=[^\x80-\xbf])"  # where a UTF-8 character begins


def cut(raw: bytes, size: int, boundary: bytes = BLANK_LINES) -> list[bytes]:
    """Cuts `raw` after matches of `boundary` into parts of at most `size` bytes, which joined are `raw`.

    A part is longer only if there is no match to cut it at.
    """
    if len(raw) <= size:
        return [raw]
    parts = []
    begin = 0  # of the next part
    end = 0  # of the last match
    for match in re.finditer(boundary + rb"|\Z", raw):
        if match.end() > end > begin and match.end() - begin > size:
            parts.append(raw[begin:end])
            begin = end
        end = match.end()
    return parts + [raw[begin:]]


def cut_passages(raw: bytes, size: int) -> list[bytes]:
    """Cuts UTF-8 text into passages of at most `size` >= 4 bytes, at the coarsest sufficient boundaries."""
    parts = [raw]
    for boundary in (BLANK_LINES, LINE_END, SPACE, CHARACTER):
        smaller = []
        for part in parts:
            smaller += cut(part, size, boundary)
        parts = smaller
    return parts


def prepare(document: Document | BadDocument, val_one_in: int, passage_bytes: int) -> Text:
    """Cuts a document into passages (0: into one) and chooses its split. Raises BadDocument."""
    if isinstance(document, BadDocument):
        raise document
    utf8 = decode(document).encode("utf-8")
    digest = hashlib.sha256(utf8 if document.key is None else document.key.encode()).digest()
    passages = cut_passages(utf8, passage_bytes) if passage_bytes else [utf8]
    validation = int.from_bytes(digest, "big") % val_one_in == 0
    return Text(document, [part for part in passages if part], validation)


# ---- Encoding ----------------------------------------------------------------------------------------------


class ByteEncoding:
    """Bytes as tokens, and 256 as BOS, with the methods of tiktoken.Encoding that are used here."""

    name = "bytes"
    n_vocab = 257
    eot_token = 256

    def is_special_token(self, token: int) -> bool:
        return token == self.eot_token

    def decode_single_token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        return bytes(tokens)


@functools.lru_cache
def get_encoding(name: str, vocabulary: tuple[bytes, ...] = ()) -> Encoding:
    """Returns `gpt2` or `bytes`. Raises UserError if GPT-2's is unavailable.

    vocabulary: the bytes of GPT-2's tokens, which are then not downloaded.
    """
    if name == "bytes":
        return ByteEncoding()
    import tiktoken  # here, because bytes do not need it
    from tiktoken_ext.openai_public import r50k_pat_str

    if vocabulary:
        ranks = {token: i for i, token in enumerate(vocabulary) if token}
        if not all(bytes([i]) in ranks for i in range(256)):  # tiktoken would panic
            raise UserError(f"{VOCABULARY} lacks tokens of single bytes; build the data again")
        special = {"<|endoftext|>": len(vocabulary) - 1}
        return tiktoken.Encoding(name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot get tiktoken's encoding {name!r} ({type(error).__name__}): it is downloaded on first "
            "use, so connect to the internet once, or use bytes: --encoding bytes, or the preset cpu"
        ) from error


def write_token_bytes(folder: Path, tokens: Iterable[bytes]) -> None:
    """Writes FOLDER/vocabulary.txt: a line of hexadecimal for each token's bytes."""
    with replacing(folder / VOCABULARY, VOCABULARY_BEGINS) as path:
        path.write_text("".join(f"{token.hex()}\n" for token in tokens), encoding="ascii")


def token_bytes(encoding: Encoding) -> list[bytes]:
    """Returns each of encoding.n_vocab tokens' bytes; b"" of special ones, and of numbers without a token."""

    def bytes_of(token: int) -> bytes:
        if encoding.is_special_token(token):
            return b""
        try:
            return encoding.decode_single_token_bytes(token)
        except KeyError:  # an encoding's numbers may have gaps
            return b""

    return [bytes_of(token) for token in range(encoding.n_vocab)]


def encode(texts: list[Text], encoding: Encoding) -> list[list[np.ndarray] | BadDocument]:
    """Returns each text's passages as tokens, or a BadDocument for a text that cannot be tokenized."""
    if isinstance(encoding, ByteEncoding):
        return [[np.frombuffer(part, np.uint8) for part in text.passages] for text in texts]
    strings = []
    for text in texts:
        strings += [passage.decode("utf-8") for passage in text.passages]
    results: list[list[np.ndarray] | BadDocument] = []
    try:  # in tiktoken's threads; "<|endoftext|>" in a text is ordinary text
        encoded = encoding.encode_batch(strings, num_threads=os.cpu_count() or 1, disallowed_special=())
    except ValueError as error:  # the regex engine gives up, for instance at a million spaces in a row
        if len(texts) == 1:
            document = texts[0].document
            return [BadDocument(f"{document.path}:{document.line}: cannot be tokenized ({error})")]
        for text in texts:
            results += encode([text], encoding)
        return results
    begin = 0
    for text in texts:
        end = begin + len(text.passages)
        results.append([np.array(tokens, np.uint16) for tokens in encoded[begin:end]])
        begin = end
    return results


def batches(texts: Iterable[Text], size: int = 1 << 20) -> Iterator[list[Text]]:
    """Yields lists of texts of about `size` bytes, which are encoded together."""
    batch = []
    total = 0
    for text in texts:
        batch.append(text)
        total += len(text.document.raw)
        if total >= size:
            yield batch
            batch = []
            total = 0
    if batch:
        yield batch


# ---- Everything together -----------------------------------------------------------------------------------


class LeftOut:
    """Counts the documents that are left out, and names the bad ones on stderr."""

    def __init__(self) -> None:
        self.bad = 0
        self.empty = 0
        self.last: BadDocument | None = None

    def add(self, error: BadDocument) -> None:
        self.bad += 1
        self.last = error
        if self.bad <= NAMED:
            tqdm.write(f"left out: {error}", file=sys.stderr)  # above the bar

    def kept_texts(
        self, documents: Iterable[Document | BadDocument], val_one_in: int, passage_bytes: int
    ) -> Iterator[Text]:
        """Yields the documents' texts without the bad and the empty ones, which are counted."""
        for document in documents:
            try:
                text = prepare(document, val_one_in, passage_bytes)
            except BadDocument as error:
                self.add(error)
                continue
            if text.passages:
                yield text
            else:
                self.empty += 1


def find_earlier(out: Path, name: str) -> list[Path]:
    """Returns the shards NAME_{train,val}_<number>.bin in `out`, sorted.

    Raises UserError if others are there.
    """
    earlier = sorted(path for path in out.glob("*.bin") if SHARD.fullmatch(path.name))
    for path in earlier:
        if path.name.rpartition("_")[0] not in (f"{name}_train", f"{name}_val"):
            raise UserError(
                f"{out} already has shards ({path.name}), and training would read those too: choose another "
                "folder"
            )
    return earlier


@contextlib.contextmanager
def new_shards(out: Path, replaced: str = "") -> Iterator[Path]:
    """Yields a folder for shards and their vocabulary, which appear in `out` when the block ends.

    Of earlier shards in `out`, those named REPLACED_{train,val}_<number>.bin are replaced, or removed if
    there are fewer new ones. Others raise UserError before the block, and so do a vocabulary of another kind,
    and a folder of a preset's data. Of processes that fill one folder, each waits until the one before has
    ended.
    """
    for name, maker in PRESET_FOLDERS.items():  # runs on what is there count for the preset's track
        if replaced != maker and os.path.realpath(out) == os.path.realpath(HERE / name):
            raise UserError(f"{out} is for a preset's own data; choose another folder, such as data/mine")
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems of networks have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        earlier = find_earlier(out, replaced)
        for path in earlier:
            target(path, SHARD_BEGINS)
        target(out / VOCABULARY, VOCABULARY_BEGINS)
        with unfinished(out) as folder:
            yield folder
            names = sorted(os.listdir(folder))
            for path in earlier:  # training would read those of the other text, too
                if path.name not in names:
                    path.unlink()
            for name in names:
                os.replace(folder / name, (out / name).resolve())
    finally:
        os.close(lock)


class Written(NamedTuple):
    train: SplitWriter
    val: SplitWriter
    bad: int
    empty: int


def write_shards(
    out: Path,
    name: str,
    documents: Iterable[Document | BadDocument],
    encoding_name: str = "gpt2",
    *,
    shard_tokens: int = SHARD_TOKENS,
    val_one_in: int = 10,
    passage_bytes: int = 0,
    replaced: str = "",
) -> Written:
    """Tokenizes `documents` into OUT/NAME_{train,val}_<number>.bin, and writes OUT/vocabulary.txt.

    The files appear only once all are written. `replaced` is new_shards()'s.
    passage_bytes: longer documents are cut into passages; 0: none are. Bad documents are reported on stderr
    and counted. A split without documents raises UserError and leaves no shards: half a corpus is useless,
    and would block the folder for the full one.
    """
    with new_shards(out, replaced) as folder:
        encoding = get_encoding(encoding_name)
        if encoding.n_vocab > 2**16:
            raise UserError(
                f"encoding {encoding_name!r} has {encoding.n_vocab} tokens; shards hold at most {2**16}"
            )
        train = SplitWriter(folder, name, "train", encoding, shard_tokens)
        val = SplitWriter(folder, name, "val", encoding, shard_tokens)
        left_out = LeftOut()
        is_divided = False
        due = val_one_in - 1  # passages that have been read since the last one for validation
        texts = left_out.kept_texts(documents, val_one_in, passage_bytes)
        first = list(itertools.islice(texts, FEW * val_one_in))
        few = len(first) < FEW * val_one_in
        for batch in batches(itertools.chain(first, texts)):
            for text, passages in zip(batch, encode(batch, encoding)):
                sizes = list(map(len, text.passages))
                if isinstance(passages, BadDocument):
                    left_out.add(passages)
                elif few and len(passages) > 1:
                    due += len(passages)
                    count = len(passages) - min(due // val_one_in, len(passages) - 1)  # those for training
                    due -= (len(passages) - count) * val_one_in
                    train.add(passages[:count], sizes[:count])
                    val.add(passages[count:], sizes[count:])
                    is_divided = True
                elif text.validation:
                    val.add(passages, sizes)
                else:
                    train.add(passages, sizes)
        train.close()
        val.close()
        if is_divided:
            print(f"few documents: one passage in {val_one_in} is for validation, the last ones of documents")
        check_splits(train, val, left_out)
        write_token_bytes(folder, token_bytes(encoding))
    return Written(train, val, left_out.bad, left_out.empty)


def check_splits(train: SplitWriter, val: SplitWriter, left_out: LeftOut) -> None:
    """Raises UserError if a split has no documents."""
    fix = "so small a text is too little: give more, or another --val-one-in (see docs/own-text.md)"
    if left_out.last:
        fix = f"the last bad one is {left_out.last}"
    count = train.documents + val.documents
    for what, split in (("training", train), ("validation", val)):
        problem = f"none of {count} documents fell to {what}" if count else "no document has text"
        if not split.tokens:
            raise UserError(
                f"{problem} ({left_out.bad} bad and {left_out.empty} empty ones left out), and train_gpt.py "
                f"needs both splits: nothing was written; {fix}"
            )


def run(args: argparse.Namespace) -> None:
    require_distinct(args.files)
    total = sum(path.stat().st_size for path in args.files)
    for path in args.files:
        if path.is_dir():
            raise UserError(f"{path} is a folder: name the files in it")
    passage_bytes = args.passage_bytes
    if passage_bytes is None:
        passage_bytes = PASSAGE_BYTES[args.encoding]
    if 0 < passage_bytes < 4:
        raise UserError("--passage-bytes must be 0 or at least 4, which a character may take")
    name = Path(args.name or os.path.realpath(args.out)).name.lstrip(".") or "text"
    if name in OTHER_MAKERS:
        raise UserError(f"--name {name}: another script replaces shards of this name; give another --name")
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="tokenizing") as bar:

        def documents():
            for document in read_documents(args.files, args.field):
                if isinstance(document, Document):
                    bar.update(len(document.raw))
                yield document

        written = write_shards(
            args.out,
            name,
            documents(),
            args.encoding,
            shard_tokens=args.shard_tokens,
            val_one_in=args.val_one_in,
            passage_bytes=passage_bytes,
        )
    cut_any = False
    for what, split in (("training", written.train), ("validation", written.val)):
        line = f"{args.out}: {split.tokens:,} {what} tokens, {split.documents:,} documents"
        if split.passages > split.documents:
            line += f" in {split.passages:,} passages"
            cut_any = True
        print(line)
    if cut_any:
        print(f"Documents above {passage_bytes:,} bytes were cut into passages; --passage-bytes 0 cuts none.")
    if written.bad or written.empty:
        bad = f"{written.bad:,} bad documents (named above, at most {NAMED})"
        print(f"Left out: {bad}, {written.empty:,} empty ones.")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("tokenize_text.py", __doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder for the shards; it must have none yet")
    add("files", type=Path, nargs="+", metavar="FILE")
    add("--field", help="key of the text in a .jsonl line (default: text)")
    add(
        "--encoding",
        choices=("gpt2", "bytes"),
        default="gpt2",
        help="tiktoken's GPT-2 (default), or single bytes",
    )
    add("--name", help="prefix of the shards' names (default: the folder's name)")
    add(
        "--shard-tokens",
        type=number(int, 1, 2**31 - 1),
        default=SHARD_TOKENS,
        metavar="N",
        help="default: %(default)s",
    )
    add(
        "--val-one-in",
        type=number(int, 1),
        default=10,
        metavar="N",
        help="about one document in N is for validation, chosen by its hash (default: %(default)s)",
    )
    add(
        "--passage-bytes",
        type=number(int, 0),
        metavar="N",
        help="cut longer documents into passages of at most N bytes; 0: never cut "
        "(default: 8192, about 2,048 of GPT-2's tokens; 512 with --encoding bytes)",
    )
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
