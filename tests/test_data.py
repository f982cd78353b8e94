"""Tests data/ and bench/ngram.py: texts survive the trip through shards, and nothing is half-written."""

import gc
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import random
import re
import resource
import shlex
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import local_corpus
import ngram
import scripts
import shakespeare
import synthetic
import tokenize_text as tt
from golden_inputs import write_shard

BYTES = tt.get_encoding("bytes")
# GPT-2's vocabulary needs a download; this one also merges bytes, and has token ids as large.
MERGING = tiktoken.Encoding(
    "merging",
    pat_str=r"\s?\w+|\W",
    mergeable_ranks={bytes([i]): i for i in range(256)} | {b"te": 256, b"xt": 50_254, b"text": 50_255},
    special_tokens={"<|endoftext|>": 50_256, "<|a|>": 300},
)


def tokenize(out, files, options="--val-one-in 2"):
    arguments = ["--encoding", "bytes"] + options.split()
    tt.main([str(out)] + list(map(str, files)) + arguments)


def documents_in(out, split, encoding=BYTES):
    """Returns the texts of all shards of a split, in order."""
    texts = []
    for path in sorted(out.glob(f"*_{split}_*.bin")):
        tokens = tt.read_tokens(path)
        starts = np.flatnonzero(tokens == encoding.eot_token)
        assert starts[0] == 0, "a shard begins with a document"
        for document in np.split(tokens, starts[1:]):
            texts.append(encoding.decode_bytes(document[1:].tolist()))
    return texts


def read_splits(out, encoding=BYTES):
    """Returns the texts for training, and those for validation."""
    return documents_in(out, "train", encoding), documents_in(out, "val", encoding)


def is_validation(text, one_in=2):
    return int(hashlib.sha256(text).hexdigest(), 16) % one_in == 0


def in_split(texts, split):
    """Returns which of the texts (bytes) belong to the split."""
    return [text for text in texts if is_validation(text) == (split == "val")]


NUMBERS = [b"%d" % i for i in range(99)]
TRAIN = in_split(NUMBERS, "train")[0].decode()
VAL = in_split(NUMBERS, "val")[0].decode()


def encode_all(texts):
    return list(map(str.encode, texts))


def write_lines(path, texts):
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(lines))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- tokenize_text.py --------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", (BYTES, MERGING), ids=("bytes", "merging"))
def test_round_trip_split_header_and_vocabulary(tmp_path, encoding, monkeypatch, capsys):
    """Of files of each kind, two gzipped, two with byte order marks."""
    texts = [f"text {i}: naïve 🙂 <|endoftext|>\r\n" * (i + 1) for i in range(6)]
    a, b, c, d, e, f = texts
    line_d = json.dumps({"text": d, "body": "x"})
    line_e = json.dumps({"text": e, "body": "x"})
    files = {
        "a.txt": a.encode("utf-8-sig"),
        "b.md": b.encode(),
        "c.py.gz": gzip.compress(c.encode()),
        "d.JSONL": f"{line_d}\n\n{line_e}".encode("utf-8-sig"),
        "e.ndjson.GZ": gzip.compress(json.dumps({"text": f}).encode()),
        "empty.txt": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    bos = encoding.eot_token
    monkeypatch.setattr(tt, "get_encoding", lambda name: encoding)
    tokenize(out, map(tmp_path.joinpath, files))
    for name, split in (("out_train_000001.bin", "train"), ("out_val_000000.bin", "val")):
        documents = in_split(encode_all(texts), split)
        assert documents_in(out, split, encoding) == documents != []
        tokens = sum(len(encoding.encode_ordinary(text.decode())) + 1 for text in documents)
        words = np.frombuffer((out / name).read_bytes()[:1024], "<i4").tolist()
        assert words[:6] == [20240520, 1, tokens, bos + 1, bos, sum(map(len, documents))]
        assert words[6:] == [0] * 250
    assert re.search("^Left out: 0 bad .* 1 empty ones", capsys.readouterr().out, re.MULTILINE)
    assert len(contents(out)) == 3
    vocabulary = (out / "vocabulary.txt").read_text()
    tokens = vocabulary.splitlines()
    assert len(tokens) == vocabulary.count("\n") == bos + 1 and vocabulary.endswith("\n")
    known = {i: f"{i:02x}" for i in range(256)}
    if encoding is MERGING:
        known |= {256: "7465", 50_254: "7874", 50_255: "74657874"}
    assert {i: token for i, token in enumerate(tokens) if token} == known


def test_shards_hold_whole_documents(tmp_path):
    texts = [b"x" * size for size in (10, 10, 50, 5, 5, 5, 23, 1)]
    documents = [tt.Document("a", 1, text, key=TRAIN) for text in texts]
    documents.append(tt.Document("a", 1, b"y", key=VAL))
    written = tt.write_shards(tmp_path, "n", documents, "bytes", shard_tokens=24, val_one_in=2)
    tokens = []
    text_bytes = []
    for i in range(1, 6):
        header = tt.read_header(tmp_path / f"n_train_{i:06d}.bin")
        tokens.append(header.tokens)
        text_bytes.append(header.text_bytes)
    assert tokens == [22, 51, 18, 24, 2]  # 51: a document longer than a shard
    assert text_bytes == [20, 50, 15, 23, 1]
    assert (written.train.tokens, written.train.text_bytes, written.val.tokens) == (117, 109, 2)
    assert read_splits(tmp_path) == (texts, [b"y"])


def test_long_documents_are_cut_into_passages(tmp_path, capsys, monkeypatch):
    """All passages of a document are in its split. No character is cut."""
    monkeypatch.setattr(tt, "FEW", 0)
    paragraphs = [f"{'naïve 🙂 ' * 30}{i}\n\n" for i in range(40)]  # two exceed a passage
    line = f"{1:099d}\n"
    word = f"{1:09d} "
    texts = ["".join(paragraphs), line * 20, word * 100, "🙂" * 300, TRAIN, VAL]
    file = write_lines(tmp_path / "a.jsonl", texts)
    tokenize(tmp_path / "cut", [file])
    output = capsys.readouterr().out
    tokenize(tmp_path / "uncut", [file], options="--val-one-in 2 --passage-bytes 0")
    found = set()
    for split in ("val", "train"):
        expected = in_split(encode_all(texts), split)
        passages = documents_in(tmp_path / "cut", split)
        assert b"".join(passages) == b"".join(expected) and len(expected) > 1
        assert documents_in(tmp_path / "uncut", split) == expected
        assert max(map(len, passages)) <= 512
        assert f"{len(expected)} documents in {len(passages)} passages" in output
        found.update(map(bytes.decode, passages))
    assert {paragraphs[7], line * 5, word * 51, "🙂" * 128} <= found


def test_few_documents_are_split_by_passages(tmp_path):
    """Of each document the last passages are for validation, one in two."""
    a = [f"a {i} {'x' * 490}\n\n" for i in range(5)]
    b = [f"b {i} {'x' * 490}\n\n" for i in range(2)]
    (tmp_path / "a").write_text("".join(a))
    (tmp_path / "b").write_text("".join(b))
    tokenize(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    train, val = read_splits(tmp_path / "out")
    assert train == encode_all(a[:2] + b[:1])
    assert val == encode_all(a[2:] + b[1:])


def test_cut():
    parts = [b"a" * 450 + b"\n\n" + b"b" * 450 + b"\n \n\n", b"c" * 450 + b"\r\n\r\n", b"d" * 5000 + b"\n\n"]
    assert tt.cut(b"".join(parts), 1024) == parts  # no empty last part
    assert tt.cut(b"".join(parts) + b"e\n", 1024) == parts + [b"e\n"]
    assert tt.cut(b"x", 1024) == [b"x"] and tt.cut(b"aa\nb\nccc", 4, tt.LINE_END) == [b"aa\n", b"b\n", b"ccc"]
    assert b"|".join(tt.cut_passages(b"aa bb ccccccc\ndd", 4)) == b"aa |bb |cccc|ccc\n|dd"


def test_bad_documents_are_counted_and_located(tmp_path, capsys, monkeypatch):
    """Also files of another kind, and what GPT-2's regex cannot tokenize: it fails at a million spaces."""

    def give_up(texts, **options):
        if any(map(str.isspace, texts)):
            raise ValueError("stack")
        return list(map(BYTES.encode_ordinary, texts))

    monkeypatch.setattr(tt, "get_encoding", lambda name: MERGING)
    monkeypatch.setattr(MERGING, "encode_batch", give_up)
    text = tmp_path / "a.txt"
    lines = tmp_path / "b.jsonl"
    cut = tmp_path / "c.jsonl.gz"
    spaces = tmp_path / "d.txt"
    utf16 = tmp_path / "e.jsonl"
    array = tmp_path / "f.JSON"
    text.write_bytes(b"fine\nfine\n\xc3(\n")
    lines.write_bytes(
        b'{"text": null}\n{"text": \n{"other": 1}\n[1]\n{"text": "\\ud800"}\n{"text": "\xff"}\n'
        + b"[" * 100_000
        + f'\n{{"text": "good"}}\n{{"text": "{TRAIN}"}}\n{{"text": "{VAL}"}}'.encode()
    )
    cut.write_bytes(gzip.compress(b'{"text": "first"}\n' + os.urandom(100_000).hex().encode())[:60_000])
    spaces.write_text("   ")
    utf16.write_text('{"text": "x"}\n' * 9, encoding="utf-16-le")
    array.write_text('[\n{"text": "x"},\n{"text": "y"}\n]')
    tokenize(tmp_path / "out", [text, lines, cut, spaces, utf16, array])
    train, val = read_splits(tmp_path / "out", MERGING)
    assert sorted(train + val) == sorted([b"good", b"first", TRAIN.encode(), VAL.encode()])
    printed = capsys.readouterr()
    places = ["a.txt:3"]
    places += [f"b.jsonl:{i}" for i in range(1, 8)]
    places += ["c.jsonl.gz:2", "d.txt:1", "e.jsonl:1", "f.JSON:1"]
    named = re.findall(rf"^left out: {tmp_path}/(.*?): ", printed.err, re.MULTILINE)
    assert sorted(named) == places and "12 bad documents" in printed.out


@pytest.mark.parametrize("texts, missing", (([VAL], "training"), ([TRAIN], "validation"), ([], "training")))
def test_a_split_without_documents_is_an_error(tmp_path, texts, missing):
    """Nothing is written, so OUT is free for another try."""
    file = write_lines(tmp_path / "a.jsonl", [""] + texts)
    problem = f"none of 1 documents fell to {missing}" if texts else "no document has text"
    message = rf"^tokenize_text.py: {problem} \(0 bad and 1 empty ones left out\), .*$"
    with pytest.raises(SystemExit, match=message):
        tokenize(tmp_path / "out", [file])
    assert list((tmp_path / "out").iterdir()) == []


def test_the_field_of_a_jsonl_is_an_option(tmp_path):
    file = tmp_path / "a.jsonl"
    first = json.dumps({"text": "no", "body": VAL})
    second = json.dumps({"text": "no", "body": TRAIN})
    file.write_text(f"{first}\n{second}")
    tokenize(tmp_path / "out", [file], options="--field body --val-one-in 2")
    assert documents_in(tmp_path / "out", "val") == [VAL.encode()]
    with pytest.raises(SystemExit, match="^.*text, body.*$"):
        tokenize(tmp_path / "wrong", [file], options="--field bdy")


def test_names_are_those_of_the_folder(tmp_path, monkeypatch):
    """Training ignores hidden files. A screen shows what its encoding lacks as escapes."""
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", screen)
    file = write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])
    tokenize(f"{tmp_path}/.\u00e9_val_2/", [file])
    names = sorted(path.name for path in tmp_path.glob(".*/*.bin"))
    assert names == ["\u00e9_val_2_train_000001.bin", "\u00e9_val_2_val_000000.bin"]
    with pytest.raises(SystemExit, match="^0$"):
        ngram.main(["--help"])
    assert rb".\xe9_val_2: 2 training tokens" in screen.buffer.getvalue()


def test_one_document_is_split_by_passages(tmp_path):
    """Of any file's text, its last tenth of passages is for validation."""
    long = tmp_path / "one.rst"
    short = tmp_path / "short.c"
    long.write_text("".join(f"line {i} of a text\n" for i in range(200)))
    tokenize(tmp_path / "out", [long], options="--passage-bytes 100")
    train, val = read_splits(tmp_path / "out")
    assert b"".join(train + val) == long.read_bytes() and len(val) == len(train + val) // 10
    short.write_text("int x;\n")
    with pytest.raises(SystemExit):
        tokenize(tmp_path / "short", [short])


OBJECT = {"id": 1, "text": "x"}


@pytest.mark.parametrize(
    "name, compact", (("a.json", False), ("a.jsonlines", True), ("a.jsonl.txt", False), ("a", True))
)
def test_lines_of_json_are_documents_under_any_name(tmp_path, name, compact):
    """Those that are no JSON are named, as in a .jsonl file."""
    file = write_lines(tmp_path / name, [TRAIN, VAL])
    if compact:
        file.write_text("\ufeff" + file.read_text().replace(": ", ":"))
    with open(file, "a") as more:
        more.write("\n{broken")
    tokenize(tmp_path / "out", [file])
    assert read_splits(tmp_path / "out") == ([TRAIN.encode()], [VAL.encode()])


def test_lines_of_arrays_are_bad_documents_under_any_name(tmp_path, capsys):
    (tmp_path / "a.json").write_text('["a", "b"]\n["c", "d"]\n')
    with pytest.raises(SystemExit, match="2 bad"):
        tokenize(tmp_path / "out", [tmp_path / "a.json"])
    assert "a.json:2: no JSON object" in capsys.readouterr().err


def test_lines_of_json_are_read_from_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = write_lines(tmp_path / "a", [TRAIN, VAL]).read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    tokenize(tmp_path / "out", [pipe])
    writer.join()
    assert read_splits(tmp_path / "out") == ([TRAIN.encode()], [VAL.encode()])


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.json", json.dumps(OBJECT), "one JSON value"),
        ("a.txt", json.dumps([OBJECT]), "one JSON value"),
        ("a", json.dumps({"data": [OBJECT]}, indent=1), "one JSON value"),
        ("a.CSV", "id,text\n1,x\n", "a table"),
        ("a.tsv.gz", "id\ttext\n", "a table"),
    ],
)
def test_one_json_value_or_a_table_is_no_document(tmp_path, capsys, name, content, reason):
    raw = content.encode()
    if name.endswith(".gz"):
        raw = gzip.compress(raw)
    (tmp_path / name).write_bytes(raw)
    good = write_lines(tmp_path / "good.jsonl", [TRAIN, VAL])
    tokenize(tmp_path / "out", [tmp_path / name, good])
    assert f"left out: {tmp_path / name}:1: {reason}" in capsys.readouterr().err
    assert read_splits(tmp_path / "out") == ([TRAIN.encode()], [VAL.encode()])


@pytest.mark.parametrize("text", ("[Music]\n", "{x\n}\n", '{ "a", 1 },\n', "[1, 2] and more\n"))
def test_a_text_may_begin_with_a_bracket(tmp_path, text):
    (tmp_path / "a.txt").write_text(text * 8)
    tokenize(tmp_path / "out", [tmp_path / "a.txt"], options="--passage-bytes 16")
    train, val = read_splits(tmp_path / "out")
    assert b"".join(train + val) == text.encode() * 8


# ---- what an output replaces -------------------------------------------------------------------------------


def make_shards(maker, tmp_path, out):
    """Calls one of the scripts that fill a folder with shards."""
    if maker == "shakespeare":
        (tmp_path / "play.txt").write_text("To be, or not to be.")
        shakespeare.main([str(tmp_path / "play.txt"), "--out", str(out)])
    elif maker == "corpus":
        local_corpus.main(["--out", str(out)])
    elif maker == "synthetic":
        synthetic.main([str(out), "--train-tokens", "9", "--val-tokens", "9", "--vocab-size", "9"])
    else:
        tokenize(out, [write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])])


MAKERS = "shakespeare", "corpus", "synthetic", "tokenizer"


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    for i in range(40):
        (tmp_path / f"library/{i}.py").write_text("pass")
    monkeypatch.setattr(local_corpus.sysconfig, "get_path", lambda name: str(tmp_path / "library"))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ("vocabulary.txt", "input.txt", "source.json"))
def test_a_users_file_is_not_replaced(tmp_path, small_library, maker, name):
    """Where a script would write one of this name, it writes nothing. Otherwise the file just stays."""
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("a word of mine\n")
    writes = {"input.txt": ["shakespeare"], "source.json": ["corpus"]}.get(name, MAKERS)
    if maker in writes:
        with pytest.raises(SystemExit, match=f"{name}: .*another (kind of file|text)"):
            make_shards(maker, tmp_path, out)
    else:
        make_shards(maker, tmp_path, out)
    assert (out / name).read_text() == "a word of mine\n"
    assert (maker in writes) == (len(contents(out)) == 1)


def test_text_beside_shakespeare_is_not_replaced_unless_it_is_the_same(tmp_path):
    """Also if it begins with the new text."""
    (tmp_path / "play.txt").write_text("To be, or not to be.")
    for more in ("", " That is the question."):
        out = tmp_path / f"out{len(more)}"
        out.mkdir()
        before = (tmp_path / "play.txt").read_text() + more
        (out / "input.txt").write_text(before)
        if more:
            with pytest.raises(SystemExit, match="^shakespeare.py: .*input.txt: another text is there"):
                make_shards("shakespeare", tmp_path, out)
        else:
            make_shards("shakespeare", tmp_path, out)
        assert (out / "input.txt").read_text() == before
        assert (len(contents(out)) == 1) == bool(more)


def test_a_users_list_of_hexadecimal_words_is_no_vocabulary(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "vocabulary.txt").write_text("cafe\nbabe\n")
    with pytest.raises(SystemExit, match="vocabulary.txt: another kind of file"):
        make_shards("tokenizer", tmp_path, out)
    assert contents(out) == {"vocabulary.txt": b"cafe\nbabe\n"}


@pytest.mark.parametrize("name", tt.OTHER_MAKERS)
def test_the_names_of_other_scripts_shards_are_refused(tmp_path, name):
    """By --name, or as the folder's: those scripts would replace the shards, or take them for their own."""
    file = write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])
    for out, options in (("mine", f"--name {name}"), (name, "")):
        with pytest.raises(SystemExit, match=f"^tokenize_text.py: --name {name}: .* give another --name$"):
            tokenize(tmp_path / out, [file], options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_makers_use_these_names(tmp_path, small_library):
    """Of headers and of FineWeb, which need torch's files and a network, the names are in their scripts."""
    names = set()
    for maker in MAKERS[:3]:
        make_shards(maker, tmp_path, tmp_path / maker)
        for path in (tmp_path / maker).glob("*.bin"):
            names.add(path.name.split("_")[0])
    assert names | {"fineweb", "torch"} == set(tt.OTHER_MAKERS)


@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
def test_one_folder_has_the_shards_of_one_script(tmp_path, small_library, first, second):
    """Of its own shards a script makes the same again, except the tokenizer, which has any text."""
    out = tmp_path / "out"
    make_shards(first, tmp_path, out)
    before = contents(out)
    if first == second != "tokenizer":
        make_shards(second, tmp_path, out)
    else:
        with pytest.raises(SystemExit, match="shard"):
            make_shards(second, tmp_path, out)
    assert contents(out) == before


def test_two_tokenizers_do_not_share_a_folder(tmp_path, monkeypatch):
    """The second waits for the first, and then finds its shards. Real processes, started together."""
    file = write_lines(tmp_path / "a.jsonl", list(map(bytes.decode, NUMBERS)))
    command = [sys.executable, tt.__file__, str(tmp_path / "out"), str(file), "--encoding", "bytes", "--name"]
    started = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "ab"]
    errors = [process.communicate()[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 1]
    (failed,) = [error for error in errors if "already has shards" in error]
    assert failed.splitlines()[-1].startswith("tokenize_text.py: ")
    names = {path.name.partition("_")[0] for path in (tmp_path / "out").glob("*.bin")}
    assert len(names) == 1


def test_a_text_of_which_nothing_is_for_training_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 900)
    with pytest.raises(SystemExit, match="fell to training"):
        tt.main([str(tmp_path / "out"), str(tmp_path / "a.txt"), "--encoding=bytes", "--val-one-in=1"])
    assert not list((tmp_path / "out").glob("*.bin"))


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n" * 900)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tt.get_encoding.cache_clear()
    with pytest.raises(SystemExit, match="^tokenize_text.py: needs tiktoken, .* pip install"):
        tt.main([str(tmp_path / "out"), str(tmp_path / "a.txt")])


@pytest.mark.parametrize("screen", ("2>&-", ">&- 2>&-", "| true; exit ${PIPESTATUS[0]}"))
def test_a_closed_screen(tmp_path, screen):
    """Closed from the beginning it ends nothing; a reader that goes, as `head` does, ends the script."""
    file = write_lines(tmp_path / "a.jsonl", list(map(bytes.decode, NUMBERS)))
    command = f"{shlex.join([sys.executable, tt.__file__, 'out', str(file), '--encoding', 'bytes'])} {screen}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == screen.count("|") and "Traceback" not in done.stderr
    assert len(list((tmp_path / "out").glob("*.bin"))) == 2


def test_shards_of_a_longer_text_go(tmp_path):
    """Training would read them beside the new ones."""
    for count in 3, 1:
        with tt.new_shards(tmp_path, "mine") as folder:
            for i in range(count):
                write_shard(folder / f"mine_train_{i:06d}.bin", [256, 1, 2])
    assert [path.name for path in tmp_path.glob("*.bin")] == ["mine_train_000000.bin"]


def test_links_are_written_through(tmp_path, small_library):
    """To files of any name in other folders, and to none."""
    out = tmp_path / "out"
    elsewhere = tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    for name in ("vocabulary.txt", "source.json", "python_train_000001.bin"):
        (out / name).symlink_to(elsewhere / f"my {name}")
    for _ in range(2):
        make_shards("corpus", tmp_path, out)
        assert all((out / path.name[3:]).is_symlink() for path in elsewhere.iterdir())
        assert len(contents(elsewhere)) == 3
        (elsewhere / "my python_train_000001.bin").write_bytes((out / "python_val_000000.bin").read_bytes())


def test_an_output_replaces_files_of_its_kind_only(tmp_path):
    """Or an empty one. A folder, a pipe or another file stays, and so does the file if the block fails."""
    path = tmp_path / "a.png"
    ours = b"\x89PNG\r\n\0 old, Software Matplotlib"
    for content, fits in ((ours, True), (b"", True), (b"\x89PNG a photo", False), (b"GIF", False)):
        path.write_bytes(content)
        if fits:
            with pytest.raises(OSError, match=str(tmp_path)), scripts.replacing(path, scripts.PNG):
                raise OSError(28, "No space left on device")
            assert path.read_bytes() == content
            with scripts.replacing(path, scripts.PNG) as new:
                new.write_bytes(b"new")
                assert path.read_bytes() == content
            assert path.read_bytes() == b"new"
        else:
            with pytest.raises(tt.UserError, match="another kind"), scripts.replacing(path, scripts.PNG):
                pytest.fail("the work began")
            assert path.read_bytes() == content
    path.unlink()
    os.mkfifo(path)
    for other in (path, tmp_path):
        with pytest.raises(tt.UserError, match="another kind"):
            scripts.target(other, b"")
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_a_full_disk_names_the_folder(tmp_path, capsys):
    """Nothing is left there."""
    file = tmp_path / "a.txt"
    file.write_text("a line\n" * 5000)
    out = tmp_path / "out"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))  # as a full disk
    try:
        with pytest.raises(SystemExit, match=f"^tokenize_text.py: .*large: '{out}'$"):
            tokenize(out, [file])
        gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(out.iterdir()) == [] and "Exception" not in capsys.readouterr().err


def test_nothing_appears_before_everything_is_written(tmp_path):
    def documents():
        yield tt.Document("a", 1, b"x" * 2_000_000)
        yield tt.Document("b", 1, b"y" * 2_000_000)
        assert not list(tmp_path.glob("*.bin"))
        raise RuntimeError("the machine stops here")

    with pytest.raises(RuntimeError):
        tt.write_shards(tmp_path, "n", documents(), "bytes", shard_tokens=1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "out, file, options", (("b", "none", ""), ("b", ".", ""), (".", "a", ""), ("b", "a", "--shard-tokens 0"))
)
def test_wrong_arguments(tmp_path, out, file, options):
    """A missing file, a folder as a file, a folder that has shards, shards of no tokens."""
    (tmp_path / "a").write_text("x")
    (tmp_path / "x_train_000001.bin").write_text("x")
    with pytest.raises(SystemExit) as error:
        tokenize(tmp_path / out, [tmp_path / file], options=options)
    assert error.value.code and not (tmp_path / "b").exists()


# ---- shakespeare.py ----------------------------------------------------------------------------------------


def test_the_last_tenth_of_shakespeare_is_one_document(tmp_path, monkeypatch):
    text = b"".join(b"SPEAKER %d:\nA line of speech.\n\n" % i for i in range(1000))
    (tmp_path / "input.txt").write_bytes(text)
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "input.txt").as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(text).hexdigest())
    begin = int(len(text) * 0.9)  # as nanoGPT's prepare.py has it
    passages = tt.cut_passages(text[:begin], 512)
    written = []
    for source, arguments in (("file", [str(tmp_path / "input.txt")]), ("download", [])):
        out = tmp_path / source
        shakespeare.main(arguments + ["--out", str(out)])
        train, val = read_splits(out)
        written.append(train)
        assert train != passages and sorted(train) == sorted(passages) and val == [text[begin:]]
        assert len((out / "vocabulary.txt").read_text().splitlines()) == 257
        assert (out / "input.txt").read_bytes() == text
    assert written[0] == written[1]  # the random order is always the same
    (tmp_path / "input.txt").write_text("Log in to the network")
    with pytest.raises(SystemExit, match="^shakespeare.py: .*another text"):
        shakespeare.main(["--out", str(tmp_path / "c")])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "No such file"),
        (b"", "0 bytes of text"),
        ("déjà vu, déjà vu".encode("latin-1"), "not UTF-8"),
        ("a text of a few lines".encode("utf-16"), "UTF-16"),
        (b"ten bytes.", None),
    ],
)
def test_shakespeare_takes_utf8_text_only(tmp_path, content, reason):
    file = tmp_path / "a.txt"
    out = tmp_path / "out"
    if content is not None:
        file.write_bytes(content)
    if reason is None:
        shakespeare.main([str(file), "--out", str(out)])
        assert read_splits(out) == ([content[:9]], [content[9:]])
        return
    with pytest.raises(SystemExit, match=f"^shakespeare.py: .*{reason}"):
        shakespeare.main([str(file), "--out", str(out)])
    assert not out.exists()


# ---- local_corpus.py ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_corpus_is_the_library_split_by_name(tmp_path):
    local_corpus.main(["--out", str(tmp_path)])
    stdlib = Path(local_corpus.sysconfig.get_path("stdlib"))
    texts = local_corpus.stdlib_texts(stdlib)
    documents = [document for document in local_corpus.corpus(texts) if document.raw]
    names = {document.key for document in documents}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py", "pydoc_data/topics/lambda"} < names
    left_out = {"site-packages", "test", "topics.py"}
    for name in names:
        assert left_out.isdisjoint(name.split("/")), name
    train = []
    val = []
    for document in documents:
        if is_validation(document.key.encode(), 20):  # so all passages of a file are in one split
            val.append(document.raw)
        else:
            train.append(document.raw)
    assert read_splits(tmp_path) == (train, val)


def test_the_corpus_of_words_leaves_out_long_passages(tmp_path, monkeypatch):
    """A table has no blank line to cut it at. The corpus of bytes keeps it."""
    parts = [b"a" * 1000, b"0, " * 2000, b"b" * 1000]
    texts = {f"{i}.py": b"\n\n".join(parts) for i in range(40)}  # enough that some validate
    monkeypatch.setattr(local_corpus, "stdlib_texts", lambda folder: texts)
    monkeypatch.setattr(local_corpus, "__file__", str(tmp_path / "local_corpus.py"))
    monkeypatch.setattr(tt, "get_encoding", lambda name: {"gpt2": MERGING, "bytes": BYTES}[name])
    for folder, encoding, name in (("words", MERGING, "gpt2"), ("local", BYTES, "bytes")):
        local_corpus.main(["--encoding", name])
        train, val = read_splits(tmp_path / folder, encoding)
        expected = {b"a", b"b"}
        if name == "bytes":
            expected.add(b"0")
        assert {text[:1] for text in train + val} == expected


def test_corpus_is_rebuilt_only_if_needed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    source = tmp_path / "a.py"
    source.write_text("pass")
    monkeypatch.setattr(local_corpus.sysconfig, "get_path", lambda name: str(tmp_path))

    def builds():
        local_corpus.main(["--out", str(out)])
        return "there already" not in capsys.readouterr().out

    assert builds()
    for name in ("._python_train_000001.bin", "notes.bin"):  # training does not read them
        (out / name).touch()
    assert not builds()
    train = out / "python_train_000001.bin"
    complete = train.read_bytes()
    train.write_bytes(complete[:-1])
    assert builds() and train.read_bytes() == complete
    (out / "vocabulary.txt").unlink()
    assert builds()
    source.write_text("pass\n")
    assert builds() and not builds()
    before = contents(out)
    source.write_text("pass\n" * 1000)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))  # as a full disk
    try:
        with pytest.raises(SystemExit, match=f"^local_corpus.py: .*large: '{out}'$"):
            builds()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert contents(out) == before and builds()
    source.unlink()
    with pytest.raises(SystemExit, match="^local_corpus.py: this Python lacks .*$"):
        builds()


def test_the_second_corpus_is_a_packages_headers(tmp_path, monkeypatch):
    include = tmp_path / "torch/include/a"
    out = tmp_path / "out"
    include.mkdir(parents=True)
    names = []
    for i in range(9):
        names += [f"{i}.h", f"{i}.hpp", f"{i}.cuh"]
    for name in names + ["not.txt", "../../not.h"]:
        (include / name).write_text(name)
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(local_corpus.importlib.util, "find_spec", lambda name: found)
    local_corpus.main(["--headers", "--out", str(out)])
    train, val = read_splits(out)
    assert sorted(train + val) == sorted(encode_all(names))
    assert json.loads((out / "source.json").read_text())["torch"] == importlib.metadata.version("torch")
    monkeypatch.setattr(local_corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^local_corpus.py: .*$"):
        local_corpus.main(["--headers", "--out", str(out)])


# ---- bench/ngram.py ----------------------------------------------------------------------------------------


def probability(train, context, token, vocabulary):
    """Computes the formula in bench/ngram.py's docstring."""
    n = len(context)
    lower = 1 / vocabulary
    if n:
        lower = probability(train, context[1:], token, vocabulary)
    followers = [train[i] for i in range(n, len(train)) if train[i - n : i] == context]
    if not followers:
        return lower
    kinds = len(set(followers))
    return (followers.count(token) + kinds * lower) / (len(followers) + kinds)


@pytest.mark.parametrize("vocabulary, orders", ((3, 5), (257, 4), (50257, 4)))
def test_ngram_equals_its_formula(vocabulary, orders):
    draw = random.Random(0)
    tokens = [draw.choice([0, 1, vocabulary - 1]) for _ in range(400)]
    train = tokens[:300]
    val = tokens[300:]
    val[50] = vocabulary // 2  # never seen, if the vocabulary is larger than 3
    got = ngram.losses_by_order(np.array(train, np.uint16), np.array(val, np.uint16), vocabulary, orders)
    want = np.empty((orders, len(val) - 1))
    for n in range(orders):
        for i in range(1, len(val)):
            want[n, i - 1] = probability(train, val[max(0, i - n) : i], val[i], vocabulary)
    np.testing.assert_allclose(got, -np.log(want), rtol=1e-12)
