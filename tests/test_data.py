"""Tests data/ and bench/ngram.py: texts survive the trip through shards, and nothing is half-written."""

import gzip
import hashlib
import json
import math
import os
import random
import sys
import types
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import local_corpus
import tokenize_text as tt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import ngram

BOS = 256


def tokenize(out, *files, options=()):
    tt.main([str(out), *map(str, files), "--encoding", "bytes", *options])


def documents_in(out: Path, split: str) -> list[bytes]:
    """Returns the texts of all shards of a split, in order."""
    texts = []
    for path in sorted(out.glob(f"*_{split}_*.bin")):
        tokens = tt.read_tokens(path)
        assert tokens[0] == BOS, "a shard begins with a document"
        for document in np.split(tokens, np.flatnonzero(tokens == BOS))[1:]:
            texts.append(document[1:].astype(np.uint8).tobytes())
    return texts


def is_validation(text: bytes, one_in: int) -> bool:
    return int(hashlib.sha256(text).hexdigest(), 16) % one_in == 0


def text_for(split: str, one_in: int = 1000) -> str:
    """Returns a short text of that split."""
    return next(
        text for text in map(str, range(100_000)) if is_validation(text.encode(), one_in) == (split == "val")
    )


@pytest.fixture
def files(tmp_path):
    """Returns six files and their documents: one of each kind, two gzipped, two with byte order marks."""
    texts = [f"text {i}: naïve 🙂 <|endoftext|>\r\n" * (i + 1) for i in range(6)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(texts[0].encode("utf-8-sig"))
    (folder / "b.md").write_bytes(texts[1].encode())
    (folder / "c.py.gz").write_bytes(gzip.compress(texts[2].encode()))
    lines = "\n\n".join(json.dumps({"text": t, "body": "x"}) for t in texts[3:5])
    (folder / "d.jsonl").write_text(lines + "\n", encoding="utf-8-sig")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": texts[5]}).encode()))
    (folder / "empty.txt").write_bytes(b"")
    return sorted(folder.iterdir()), [t.encode() for t in texts]


# ---- tokenize_text.py --------------------------------------------------------------------------------------


def test_round_trip_split_and_header(tmp_path, files, capsys):
    paths, texts = files
    out = tmp_path / "out"
    tokenize(out, *paths, options=["--val-one-in", "2"])
    train, val = documents_in(out, "train"), documents_in(out, "val")
    assert train == [t for t in texts if not is_validation(t, 2)]
    assert val == [t for t in texts if is_validation(t, 2)]
    assert train and val
    for split, number, documents in (("train", 1, train), ("val", 0, val)):
        path = out / f"out_{split}_{number:06d}.bin"
        size = sum(map(len, documents))
        words = np.frombuffer(path.read_bytes()[:1024], "<i4")
        assert words[:6].tolist() == [20240520, 1, size + len(documents), 257, BOS, size]
        assert not words[6:].any()
        assert path.stat().st_size == 1024 + 2 * words[2]
    assert "0 bad documents (named above), 1 empty ones" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [
        "out_train_000001.bin",
        "out_val_000000.bin",
        "vocabulary.txt",
    ]


def test_bytes_encoding_is_a_tiktoken_encoding_that_decodes():
    encoding = tt.get_encoding("bytes")
    text = "".join(map(chr, list(range(0xD7FF)) + [0xFFFF, 0x10FFFF])) + " " * 1000
    ((tokens,),) = tt.encode([tt.Text(None, [text.encode()], False)], encoding)
    assert tokens.tolist() == encoding.encode(text, disallowed_special=())
    assert encoding.decode(tokens.tolist()) == text
    assert (encoding.n_vocab, encoding.eot_token) == (257, BOS)


def test_the_vocabulary_of_bytes(tmp_path, files):
    tokenize(tmp_path / "out", *files[0], options=["--val-one-in", "2"])
    assert (tmp_path / "out/vocabulary.txt").read_text() == "".join(f"{i:02x}\n" for i in range(256)) + "\n"


def test_the_vocabulary_has_a_line_per_token_with_its_bytes(tmp_path):
    """Also with several special tokens, and numbers without a token."""
    ranks = {bytes([i]): i for i in range(256)} | {b"\r\n": 256, "🙂".encode(): 299}
    special = {"<|a|>": 270, "<|endoftext|>": 300}
    encoding = tiktoken.Encoding("gaps", pat_str=r"\W", mergeable_ranks=ranks, special_tokens=special)
    tt.write_token_bytes(tmp_path, tt.token_bytes(encoding))
    assert [path.name for path in tmp_path.iterdir()] == ["vocabulary.txt"]
    lines = (tmp_path / "vocabulary.txt").read_bytes().split(b"\n")
    assert len(lines) == 302 and lines[301] == b""  # 301 lines, the last of which is ended too
    have = {bytes.fromhex(line.decode()): i for i, line in enumerate(lines) if line}
    assert have == ranks and b"0d0a" in lines and b"f09f9982" in lines


def test_shards_hold_whole_documents(tmp_path):
    val = text_for("val")
    lines = [json.dumps({"text": text}) for text in [*("x" * n for n in (10, 10, 50, 5, 5, 5, 23, 1)), val]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    written = tt.write_shards(
        tmp_path,
        "n",
        tt.read_documents([tmp_path / "a.jsonl"], "text"),
        "bytes",
        shard_tokens=24,
        val_one_in=1000,
    )
    shards = sorted(tmp_path.glob("*train*.bin"))
    assert [p.name for p in shards] == [f"n_train_{i:06d}.bin" for i in range(1, 6)]
    # 51: a document longer than a shard.
    assert [tt.read_header(p).tokens for p in shards] == [22, 51, 18, 24, 2]
    assert [tt.read_header(p).text_bytes for p in shards] == [20, 50, 15, 23, 1]
    assert (written.train.tokens, written.train.text_bytes, written.val.tokens) == (117, 109, 1 + len(val))
    assert documents_in(tmp_path, "val") == [val.encode()] and documents_in(tmp_path, "train")[2] == b"x" * 50


def test_long_documents_are_cut_into_passages(tmp_path, capsys):
    """All passages of a document are in its split."""
    one_in, names = 3, iter(range(10**6))

    def first_of(split, make):
        """Returns the parts of the first text of that split."""
        return next(
            parts
            for parts in map(make, names)
            if is_validation("".join(parts).encode(), one_in) == (split == "val")
        )

    # Paragraphs of 422 bytes, two of which exceed a passage; a paragraph of 2,000 bytes; a line; a word.
    paragraphs = first_of("val", lambda name: [f"{'naïve 🙂 ' * 30}{name + i}\n\n" for i in range(40)])
    lines = first_of("train", lambda name: [f"{name:099d}\n"] * 20)
    words = first_of("train", lambda name: [f"{name:09d} "] * 100)
    faces = first_of("val", lambda name: ["🙂"] * 300 + [str(name)])
    texts = ["".join(parts) for parts in (paragraphs, lines, words, faces)] + ["short"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:3]))
    for name, text in zip(("b.py", "c.txt"), texts[3:]):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = sorted(path for path in tmp_path.iterdir() if path.is_file())
    tokenize(tmp_path / "cut", *files, options=["--val-one-in", str(one_in)])
    output = capsys.readouterr().out
    for split in ("val", "train"):
        expected = [
            text.encode() for text in texts if is_validation(text.encode(), one_in) == (split == "val")
        ]
        passages = documents_in(tmp_path / "cut", split)
        assert b"".join(passages) == b"".join(expected) and max(map(len, passages)) <= 512
        assert [passage.decode() for passage in passages]  # no character is cut
        assert f"{len(expected)} documents in {len(passages)} passages" in output
    for split, passage in (
        ("val", paragraphs[7]),
        ("train", "".join(lines[:5])),
        ("train", "".join(words[:51])),
        ("val", "🙂" * 128),
    ):
        assert passage.encode() in documents_in(tmp_path / "cut", split)
    assert "Documents above 512 bytes were cut into passages; --passage-bytes 0 cuts none." in output
    tokenize(tmp_path / "uncut", *files, options=["--val-one-in", str(one_in), "--passage-bytes", "0"])
    assert sorted(
        documents_in(tmp_path / "uncut", "val") + documents_in(tmp_path / "uncut", "train")
    ) == sorted(text.encode() for text in texts)
    assert "passages" not in capsys.readouterr().out


def test_cut():
    paragraphs = [
        b"a" * 450 + b"\n\n",
        b"b" * 450 + b"\n \n\n",
        b"c" * 450 + b"\r\n\r\n",
        b"d" * 5000 + b"\n\n",
        b"e\n",
    ]
    assert tt.cut(b"".join(paragraphs), 1024) == [b"".join(paragraphs[:2]), *paragraphs[2:]]
    # No empty last part.
    assert tt.cut(b"".join(paragraphs[:4]), 1024) == [b"".join(paragraphs[:2]), *paragraphs[2:4]]
    assert tt.cut(b"x", 1024) == [b"x"] and tt.cut(b"aa\nb\nccc", 4, tt.LINE_END) == [b"aa\n", b"b\n", b"ccc"]
    assert tt.cut_passages(b"aa bb ccccccc\ndd", 4) == [b"aa ", b"bb ", b"cccc", b"ccc\n", b"dd"]
    raw = Path(local_corpus.__file__).read_bytes()
    assert b"".join(tt.cut(raw, 1024)) == raw


def bad_files(tmp_path) -> tuple[Path, Path, Path]:
    text, lines, cut = tmp_path / "bad.txt", tmp_path / "bad.jsonl", tmp_path / "cut.jsonl.gz"
    text.write_bytes(b"fine\nfine\n\xc3(\n")
    lines.write_bytes(
        b'{"text": "good"}\n{"text": \n{"other": 1}\n[1]\n{"text": "\\ud800"}\n{"text": "\xff"}\n'
        + b"[" * 100_000
        + b"\n"
        + b'{"text": "good too"}'
    )
    cut.write_bytes(gzip.compress(b'{"text": "first"}\n' + os.urandom(100_000).hex().encode())[:60_000])
    return text, lines, cut


def test_bad_documents_are_counted_and_located(tmp_path, capsys):
    out = tmp_path / "out"
    (tmp_path / "fine.txt").write_text(text_for("val"))
    tokenize(out, *bad_files(tmp_path), tmp_path / "fine.txt", options=["--val-one-in", "1000"])
    assert documents_in(out, "train") == [b"good", b"good too", b"first"]
    printed = capsys.readouterr()
    for message in (
        "bad.txt:3: not UTF-8 (byte 0xc3)",
        "bad.jsonl:2: not JSON",
        "bad.jsonl:3: no text under 'text'",
        "bad.jsonl:4: no text",
        "bad.jsonl:5: half of a surrogate pair",
        "bad.jsonl:6: not UTF-8",
        "bad.jsonl:7: not JSON",
        "cut.jsonl.gz:2: broken gzip data",
    ):
        assert message in printed.err
    assert "Left out: 8 bad documents" in printed.out and printed.err.count("left out: ") == 8


@pytest.mark.parametrize("split, missing", (("val", "training"), ("train", "validation"), (None, "training")))
def test_a_split_without_documents_is_an_error(tmp_path, capsys, split, missing):
    """Nothing is written, so OUT is free for another try."""
    out = tmp_path / "out"
    (tmp_path / "a.jsonl").write_text(
        '{"text": ""}\n{}\n' + (json.dumps({"text": text_for(split)}) if split else "")
    )
    with pytest.raises(SystemExit) as error:
        tokenize(out, tmp_path / "a.jsonl", options=["--val-one-in", "1000"])
    message = f"none of {1 if split else 0} documents fell to {missing} (1 bad and 1 empty ones left out)"
    assert str(error.value).startswith(f"tokenize_text.py: {message}") and "\n" not in error.value.code
    assert list(out.iterdir()) == []
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text_for(s)}) for s in ("val", "train")))
    tokenize(out, tmp_path / "b.jsonl", options=["--val-one-in", "1000"])
    assert documents_in(out, "val") == [text_for("val").encode()]


def test_the_field_of_a_jsonl_is_an_option(tmp_path):
    texts = [text_for("val"), text_for("train")]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "no", "body": text}) for text in texts))
    tokenize(tmp_path / "out", tmp_path / "a.jsonl", options=["--field", "body", "--val-one-in", "1000"])
    assert [documents_in(tmp_path / "out", split) for split in ("val", "train")] == [
        [text.encode()] for text in texts
    ]

    with pytest.raises(SystemExit) as error:  # one line, not one for each document
        tokenize(tmp_path / "wrong", tmp_path / "a.jsonl", options=["--field", "bdy"])
    assert "text, body" in error.value.code and "\n" not in error.value.code


def test_one_document_is_split_by_passages(tmp_path, capsys):
    """Of any file's text, its last tenth of passages is for validation."""
    text = "".join(f"line {i} of a text\n" for i in range(200))
    (tmp_path / "one.rst").write_text(text)
    tokenize(tmp_path / "out", tmp_path / "one.rst", options=["--passage-bytes", "100"])
    train, val = (documents_in(tmp_path / "out", split) for split in ("train", "val"))
    assert b"".join(train + val) == text.encode() and len(val) == (len(train) + len(val)) // 10
    assert "a single document" in capsys.readouterr().out
    (tmp_path / "short.c").write_text("int x;\n")
    with pytest.raises(SystemExit):
        tokenize(tmp_path / "short", tmp_path / "short.c")


def test_round_trip_with_tokens_of_several_bytes(tmp_path, files, monkeypatch):
    """GPT-2's vocabulary needs a download; this one also merges bytes, and has token ids as large."""
    ranks = {bytes([i]): i for i in range(256)} | {b"te": 256, b"xt": 50_254, b"text": 50_255}
    encoding = tiktoken.Encoding(
        "merging", pat_str=r"\s?\w+|\W", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50_256}
    )
    monkeypatch.setattr(tt, "get_encoding", lambda name: encoding)
    tokenize(tmp_path / "out", *files[0], options=["--val-one-in", "2"])
    for split in ("train", "val"):
        tokens = np.concatenate(
            [tt.read_tokens(path) for path in sorted((tmp_path / "out").glob(f"*_{split}_*"))]
        )
        texts = [
            encoding.decode_bytes(document[1:].tolist())
            for document in np.split(tokens, np.flatnonzero(tokens == 50_256))[1:]
        ]
        assert texts == [t for t in files[1] if is_validation(t, 2) == (split == "val")] and 50_255 in tokens
    header = tt.read_header(tmp_path / "out/out_train_000001.bin")
    assert (header.vocab_size, header.bos_id) == (50_257, 50_256)


def test_nothing_appears_before_everything_is_written(tmp_path):
    def documents():
        yield tt.Document("a", 1, b"x" * 2_000_000)
        yield tt.Document("b", 1, b"y" * 2_000_000)
        assert not list(tmp_path.glob("*.bin"))
        raise RuntimeError("the machine stops here")

    with pytest.raises(RuntimeError):
        tt.write_shards(tmp_path, "n", documents(), "bytes", shard_tokens=1000)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path, files, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x_train_000001.bin").write_text("x")
    for arguments, message in (
        (["out", tmp_path / "none.txt"], "no such file"),
        (["out", tmp_path], "a folder"),
        ([tmp_path / "full", files[0][0]], "already has shards"),
        (["out", files[0][0], "--shard-tokens", "0"], "--shard-tokens must be"),
    ):
        with pytest.raises(SystemExit) as error:
            tt.main(list(map(str, arguments)))
        assert error.value.code == 2 and message in capsys.readouterr().err


# ---- local_corpus.py ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "local"
    local_corpus.main(["--out", str(out)])
    return out


@pytest.mark.slow
def test_corpus_is_the_library_split_by_name(corpus):
    documents = local_corpus.corpus(
        local_corpus.stdlib_texts(Path(local_corpus.sysconfig.get_path("stdlib")))
    )
    documents = [d for d in documents if d.raw]
    names = {d.key for d in documents}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py", "pydoc_data/topics/lambda"} < names
    assert not [
        n for n in names if "site-packages" in n or "test" in n.split("/")[:-1] or n == "pydoc_data/topics.py"
    ]
    val = [is_validation(d.key.encode(), 20) for d in documents]  # so all passages of a file are in one split
    assert documents_in(corpus, "val") == [d.raw for d, v in zip(documents, val) if v]
    assert documents_in(corpus, "train") == [d.raw for d, v in zip(documents, val) if not v]
    assert 0.02 < sum(val) / len(val) < 0.12


def test_corpus_is_rebuilt_only_if_needed(tmp_path, monkeypatch, capsys):
    out, library = tmp_path / "out", tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text("pass")
    monkeypatch.setattr(local_corpus.sysconfig, "get_path", lambda name: str(library))

    def builds() -> bool:
        local_corpus.main(["--out", str(out)])
        return "there already" not in capsys.readouterr().out

    assert builds() and not builds()
    (out / "vocabulary.txt").unlink()  # an older corpus has none, and needs none
    assert not builds()
    train = out / "python_train_000001.bin"
    complete = train.read_bytes()
    train.write_bytes(complete[:-1])
    assert builds() and train.read_bytes() == complete
    (library / "a.py").write_text("pass\n")
    assert builds() and not builds()


def test_the_second_corpus_is_a_packages_headers(tmp_path, monkeypatch, capsys):
    package, out = tmp_path / "torch", tmp_path / "out"
    texts = {
        f"include/{n}/{n}.{suffix}": f"// {n}\n" for n in range(9) for suffix in ("h", "hpp", "cuh", "txt")
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(
        local_corpus.importlib.util,
        "find_spec",
        lambda name: types.SimpleNamespace(submodule_search_locations=[str(package)]),
    )
    monkeypatch.setattr(local_corpus.importlib.metadata, "version", lambda name: f"{name} 1.2")
    local_corpus.main(["--headers", "--out", str(out)])
    assert "the headers of torch torch 1.2" in capsys.readouterr().out
    documents = sorted(documents_in(out, "train") + documents_in(out, "val"))
    assert documents == sorted(text.encode() for name, text in texts.items() if not name.endswith(".txt"))
    assert json.loads((out / "source.json").read_text())["torch"] == "torch 1.2"
    local_corpus.main(["--headers", "--out", str(out)])
    assert "there already" in capsys.readouterr().out
    monkeypatch.setattr(local_corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="no torch here"):
        local_corpus.main(["--headers", "--out", str(out)])


# ---- bench/ngram.py ----------------------------------------------------------------------------------------


def naive_losses(train, val, vocabulary, orders):
    """Computes the formula in bench/ngram.py's docstring, token by token."""
    followers = defaultdict(Counter)
    for n in range(1, orders + 1):
        for i in range(n - 1, len(train)):
            followers[tuple(train[i - n + 1 : i])][train[i]] += 1

    def p(w, h, n):
        if n == 0:
            return 1 / vocabulary
        counts, lower = followers[h], p(w, h[1:], n - 1)
        return (counts[w] + len(counts) * lower) / (counts.total() + len(counts)) if counts else lower

    return [
        [-math.log(p(val[i], tuple(val[max(0, i - n + 1) : i]), min(n, i + 1))) for i in range(1, len(val))]
        for n in range(1, orders + 1)
    ]


@pytest.mark.parametrize("vocabulary, orders", ((3, 5), (257, 4), (50257, 4)))
def test_ngram_equals_the_naive_model(vocabulary, orders):
    draw = random.Random(0)
    symbols = [0, 1, vocabulary - 1]
    train, val = ([draw.choice(symbols) for _ in range(n)] for n in (300, 100))
    val[50] = vocabulary // 2  # never seen, if the vocabulary is larger than 3
    got = ngram.losses_by_order(np.array(train, np.uint16), np.array(val, np.uint16), vocabulary, orders)
    assert np.allclose(got, naive_losses(train, val, vocabulary, orders), rtol=1e-12)


def test_text_that_cannot_be_tokenized_is_a_bad_document(tmp_path, monkeypatch, capsys):
    """GPT-2's regex fails at a million spaces in a row."""

    class GivesUp:
        name, n_vocab, eot_token = "gives up", 257, BOS

        def is_special_token(self, token):
            return True

        def encode_batch(self, texts, **options):
            if any(text.isspace() for text in texts):
                raise ValueError("stack")
            return [[0] * len(text) for text in texts]

    monkeypatch.setattr(tt, "get_encoding", lambda name: GivesUp())
    for name, text in (("a", text_for("train")), ("b", "   "), ("c", text_for("val"))):
        (tmp_path / f"{name}.txt").write_text(text)
    tokenize(tmp_path / "out", *sorted(tmp_path.glob("*.txt")), options=["--val-one-in", "1000"])
    printed = capsys.readouterr()
    assert f"left out: {tmp_path / 'b.txt'}:1: cannot be tokenized (stack)" in printed.err
    assert "1 bad documents" in printed.out
