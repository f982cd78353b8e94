"""Tests data/ and bench/ngram.py: texts survive the trip through shards, and nothing is half-written."""

import fcntl
import gzip
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

import local_corpus
import ngram
import scripts
import shakespeare
import synthetic
import tokenize_text as tt
import train_gpt as tg
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


def documents_in(out, split, encoding):
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


TRAIN, VAL = "0", "3"  # by their hashes, if one document in two is for validation


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
    """Of files of each kind, two gzipped, two with byte order marks. The text of JSON is in a field."""
    texts = [f"text {i}: naïve 🙂 <|endoftext|>\r\n" * (i + 1) for i in range(5)]
    lines = [json.dumps({"text": "x", "body": text}) for text in texts[2:]]
    files = {
        "a.txt": texts[0].encode("utf-8-sig"),
        "b.py.gz": gzip.compress(texts[1].encode()),
        "c.JSONL": f"{lines[0]}\n\n{lines[1]}".encode("utf-8-sig"),
        "d.ndjson.GZ": gzip.compress(lines[2].encode()),
        "empty.txt": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    bos = encoding.eot_token
    monkeypatch.setattr(tt, "get_encoding", lambda name: encoding)
    tokenize(out, map(tmp_path.joinpath, files), "--val-one-in 2 --field body")
    for name, split in (("out_train_000001.bin", "train"), ("out_val_000000.bin", "val")):
        documents = in_split(encode_all(texts), split)
        assert documents_in(out, split, encoding) == documents != []
        tokens = sum(len(encoding.encode_ordinary(text.decode())) + 1 for text in documents)
        words = np.frombuffer((out / name).read_bytes()[:1024], "<i4").tolist()
        assert words == [20240520, 1, tokens, bos + 1, bos, sum(map(len, documents))] + [0] * 250
    assert re.search("^Left out: 0 bad .* 1 empty ones", capsys.readouterr().out, re.MULTILINE)
    known = {i: f"{i:02x}" for i in range(256)}
    if encoding is MERGING:
        known |= {256: "7465", 50_254: "7874", 50_255: "74657874"}
    vocabulary = "".join(known.get(i, "") + "\n" for i in range(bos + 1))
    assert (out / "vocabulary.txt").read_text() == vocabulary and len(contents(out)) == 3


def test_shards_hold_whole_documents(tmp_path):
    texts = [b"x" * size for size in (10, 10, 50, 5, 5, 5, 23, 1)]
    documents = [tt.Document("a", 1, text, key=TRAIN) for text in texts]
    documents.append(tt.Document("a", 1, b"y", key=VAL))
    tt.write_shards(tmp_path, "n", documents, "bytes", shard_tokens=24, val_one_in=2)
    sizes = []
    for path in sorted(tmp_path.glob("n_train_*.bin")):
        header = tt.read_header(path)
        sizes.append((header.tokens, header.text_bytes))
    assert sizes == [(22, 20), (51, 50), (18, 15), (24, 23), (2, 1)]  # 51: a document longer than a shard
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
    cut = read_splits(tmp_path / "cut")
    uncut = read_splits(tmp_path / "uncut")
    for split, passages, whole in zip(("train", "val"), cut, uncut):
        assert whole == in_split(encode_all(texts), split) != []
        assert b"".join(passages) == b"".join(whole)
        assert max(map(len, passages)) <= 512
        assert f"{len(whole)} documents in {len(passages)} passages" in output
    assert set(encode_all([paragraphs[7], line * 5, word * 51, "🙂" * 128])) <= set(cut[0] + cut[1])


def test_few_documents_are_split_by_passages(tmp_path):
    """One passage in two is for validation, the last ones of documents. A text may begin like JSON.

    Empty documents and bad ones do not make them many.
    """
    a = [f"[1, 2] {i} {'x' * 490}\n\n" for i in range(5)]
    b = [f'{{ "b", {i} {"x" * 490}\n\n' for i in range(2)]
    files = [tmp_path / "a.txt", tmp_path / "b", write_lines(tmp_path / "c", 15 * [""] + 5 * [0])]
    files[0].write_text("".join(a))
    files[1].write_text("".join(b))
    tokenize(tmp_path / "out", files)
    train, val = read_splits(tmp_path / "out")
    assert train == encode_all(a[:2] + b[:1])
    assert val == encode_all(a[2:] + b[1:])
    tokenize(tmp_path / "less", files[:2], "--val-one-in 10")
    assert [len(texts) for texts in read_splits(tmp_path / "less")] == [6, 1]


def test_bad_documents_are_counted_and_located(tmp_path, capsys, monkeypatch):
    """Also files of another kind, and what GPT-2's regex cannot tokenize: it fails at a million spaces."""

    def give_up(texts, **options):
        if any(map(str.isspace, texts)):
            raise ValueError("stack")
        return list(map(BYTES.encode_ordinary, texts))

    monkeypatch.setattr(tt, "get_encoding", lambda name: MERGING)
    monkeypatch.setattr(MERGING, "encode_batch", give_up)
    lines = b'{"text": null}\n{"text": \n{"other": 1}\n[1]\n{"text": "\\ud800"}\n{"text": "\xff"}\n'
    lines += b"[" * 100_000
    lines += f'\n{{"text": "good"}}\n{{"text": "{TRAIN}"}}\n{{"text": "{VAL}"}}'.encode()
    files = {
        "a.txt": b"fine\nfine\n\xc3(\n",
        "b.jsonl": lines,
        "c.jsonl.gz": gzip.compress(b'{"text": "first"}\n' + os.urandom(100_000).hex().encode())[:60_000],
        "d.txt": b"   ",
        "e.jsonl": ('{"text": "x"}\n' * 9).encode("utf-16-le"),
        "f.JSON": b'[\n{"text": "x"},\n{"text": "y"}\n]',
        "g": b'{\n"data": [{"text": "x"}]\n}',
        "h.json": b'["a", "b"]\n["c", "d"]\n',
        "h1": b'[\n{"text": "x"},\n',
        "h2": b'"one text"',
        "i.CSV": b"id,text\n1,x\n",
        "j.tsv.gz": gzip.compress(b"id\ttext\n"),
        "k.json": b'"one text"\n"another"\n',
        "l.txt": 9000 * b"text\n" + b"\0",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    tokenize(tmp_path / "out", map(tmp_path.joinpath, files))
    train, val = read_splits(tmp_path / "out", MERGING)
    assert sorted(train + val) == sorted([b"good", b"first", TRAIN.encode(), VAL.encode()])
    printed = capsys.readouterr()
    places = ["a.txt:3"]
    places += [f"b.jsonl:{i}" for i in range(1, 8)]
    others = "c.jsonl.gz:2 d.txt:1 e.jsonl:1 f.JSON:1 g:1 h.json:1 h1:1 h2:1 i.CSV:1 j.tsv.gz:1 k.json:1"
    places += others.split() + ["l.txt:9001"]
    named = re.findall(rf"^left out: {tmp_path}/(.*?): ", printed.err, re.MULTILINE)
    assert sorted(named) == places and "20 bad documents" in printed.out


@pytest.mark.parametrize(
    "texts, problem",
    [
        ([VAL], "none of 1 documents fell to training"),
        ([], "no document has text"),
    ],
)
def test_a_split_without_documents_is_an_error(tmp_path, texts, problem):
    """Nothing is written, so OUT is free for another try."""
    file = write_lines(tmp_path / "a.jsonl", ["", *texts])
    with pytest.raises(
        SystemExit, match=rf"^tokenize_text.py: {problem} \(0 bad and 1 empty .* too little: "
    ):
        tokenize(tmp_path / "out", [file])
    assert not os.listdir(tmp_path / "out")


def test_names_are_those_of_the_folder(tmp_path, monkeypatch):
    """Training ignores hidden files. A screen shows what its encoding lacks as escapes."""
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", screen)
    file = write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])
    tokenize(f"{tmp_path}/.\u00e9_val_2/", [file])
    names = sorted(path.name for path in tmp_path.glob(".*/*.bin"))
    assert names == ["\u00e9_val_2_train_000001.bin", "\u00e9_val_2_val_000000.bin"]
    assert rb".\xe9_val_2: 2 training tokens" in screen.buffer.getvalue()


def test_lines_of_json_are_documents_under_any_name(tmp_path, capsys):
    """Also in a pipe or a .gz file that gives few bytes first, and after RFC 7464's separators. Those that
    are no JSON, or have no text, are named.
    """
    text = f'\ufeff{{}}\n\x1e{{"text":"{TRAIN}"}}\n\x1e{{"text":"{VAL}"}}\n{{broken'
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.system(f"(printf %s '{text[:2]}'; sleep 0.3; printf %s '{text[2:]}') > {pipe} &")
    parts = tmp_path / "parts.gz"
    parts.write_bytes(gzip.compress(text[:2].encode()) + gzip.compress(text[2:].encode()))
    for file in pipe, parts:
        out = tmp_path / f"out_{file.stem}"
        tokenize(out, [file])
        assert read_splits(out) == ([TRAIN.encode()], [VAL.encode()])
        assert re.findall(rf"{file.name}:(\d): (?:no text|not JSON)", capsys.readouterr().err) == ["1", "4"]


# ---- what an output replaces -------------------------------------------------------------------------------


def make_shards(maker, tmp_path, out):
    """Calls one of the scripts that fill a folder with shards."""
    if maker == "shakespeare":
        (tmp_path / "play.txt").write_text(PLAY)
        shakespeare.main([str(tmp_path / "play.txt"), "--out", str(out)])
    elif maker == "corpus":
        local_corpus.main(["--out", str(out)])
    elif maker == "synthetic":
        synthetic.main([str(out), "--train-tokens", "9", "--val-tokens", "9", "--vocab-size", "9"])
    else:
        tokenize(out, [write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])])


PLAY = "To be, or not to be."
MAKERS = "shakespeare", "corpus", "synthetic", "tokenizer"


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    for i in range(40):
        (tmp_path / f"library/{i}.py").write_text("pass")
    monkeypatch.setattr(local_corpus.sysconfig, "get_path", lambda name: str(tmp_path / "library"))


@pytest.mark.parametrize(
    "maker, name",
    [(maker, "vocabulary.txt") for maker in MAKERS]
    + [("shakespeare", "input.txt"), ("corpus", "source.json")],
)
def test_a_users_file_is_not_replaced(tmp_path, small_library, maker, name):
    """A script writes nothing where one of its files has this name. A text may begin as its own."""
    out = tmp_path / "out"
    out.mkdir()
    text = f"{PLAY} That is the question." if name == "input.txt" else "cafe\nbabe\n"
    (out / name).write_text(text)
    with pytest.raises(SystemExit, match=f"{name}: .*another (kind of file|text)"):
        make_shards(maker, tmp_path, out)
    assert contents(out) == {name: text.encode()}


def test_the_names_of_other_scripts_shards_are_refused(tmp_path, small_library):
    """By --name, or as the folder's: those scripts would replace the shards, or take them for their own."""
    names = ["fineweb", "torch"]  # whose scripts need a network, and torch's headers
    for maker in MAKERS[:3]:
        make_shards(maker, tmp_path, tmp_path / maker)
        names += {path.name.split("_")[0] for path in (tmp_path / maker).glob("*.bin")}
    file = write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])
    for name in names:
        for out, options in (("mine", f"--name {name}"), (f"new/{name}", "")):
            with pytest.raises(SystemExit, match=f"^tokenize_text.py: --name {name}: another script "):
                tokenize(tmp_path / out, [file], options)
            assert not (tmp_path / out).exists()


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


def test_presets_data_are_of_their_own_scripts(tmp_path, monkeypatch):
    """Runs on other text would count for their tracks."""
    assert {Path(preset.data).name for preset in tg.PRESETS.values()} == set(tt.PRESET_FOLDERS)
    monkeypatch.setattr(tt, "HERE", tmp_path)
    for name, maker in tt.PRESET_FOLDERS.items():
        with pytest.raises(SystemExit, match="preset's own data"):
            make_shards("tokenizer", tmp_path, tmp_path / name)
        with tt.new_shards(tmp_path / name, maker):
            pass


def test_scripts_that_fill_one_folder_wait_for_each_other(tmp_path, monkeypatch):
    """Before they look at what is there, until they have written."""
    other = os.open(tmp_path, os.O_RDONLY)

    def assert_locked(*args):
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return []

    monkeypatch.setattr(tt, "find_earlier", assert_locked)
    with tt.new_shards(tmp_path):
        assert_locked()
    os.close(other)


@pytest.mark.parametrize("screen", (">&- 2>&-", "| true; exit ${PIPESTATUS[0]}"))
def test_a_closed_screen(tmp_path, screen):
    """Closed from the beginning it ends nothing; a reader that goes, as `head` does, ends the script."""
    write_lines(tmp_path / "a.jsonl", [TRAIN, VAL])
    command = f"{sys.executable} {tt.__file__} out a.jsonl --encoding bytes --val-one-in 2 {screen}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == screen.count("|") and "Traceback" not in done.stderr
    assert (tmp_path / "out/vocabulary.txt").exists()


def test_shards_of_a_longer_text_go(tmp_path):
    """Training would read them beside the new ones. A link is written through, also one to nothing."""
    link = tmp_path / "mine_train_000000.bin"
    link.symlink_to("disk")
    for count in 3, 1:
        with tt.new_shards(tmp_path, "mine") as folder:
            for i in range(count):
                write_shard(folder / f"mine_train_{i:06d}.bin", [256, 1, count])
        assert len(list(tmp_path.glob("*.bin"))) == count
        assert link.is_symlink() and tt.read_tokens(tmp_path / "disk")[-1] == count


@pytest.mark.parametrize("content", (b"\x89PNG\r\n\0 old, Software Matplotlib", b""))
def test_an_output_replaces_files_of_its_kind(tmp_path, content):
    """Or an empty one. The file stays until the block ends, or if it fails. A full disk is named."""
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(OSError, match=str(tmp_path)), scripts.replacing(path, scripts.PNG) as new:
        new.write_bytes(b"new")
        raise OSError(28, "No space left on device")
    assert contents(tmp_path) == {"a.png": content}
    with scripts.replacing(path, scripts.PNG) as new:
        new.write_bytes(b"new")
    assert contents(tmp_path) == {"a.png": b"new"}


def test_an_output_replaces_nothing_else(tmp_path, monkeypatch):
    """Neither another file, a folder nor a link to itself; and nothing where it cannot write."""
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG a photo")
    link = tmp_path / "b.png"
    link.symlink_to(link)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    for path in (file, tmp_path, link, tmp_path / "c.png"):
        wrong = "cannot be written to" if path.stem == "c" else "another kind"
        with pytest.raises(tt.UserError, match=wrong), scripts.replacing(path, scripts.PNG):
            pytest.fail("the work began")
    assert file.read_bytes() == b"\x89PNG a photo"


@pytest.mark.parametrize("words", ("none", ".", "a --shard-tokens 0", "a --name=", "b --field x"))
def test_wrong_arguments(tmp_path, words):
    """A missing file, a folder as a file, shards of no tokens, empty names, a field of a plain text."""
    (tmp_path / "b").write_text("a text")
    write_lines(tmp_path / "a", [TRAIN, VAL])
    with pytest.raises(SystemExit):
        tokenize(tmp_path / "out", [], f"--val-one-in 2 {tmp_path}/{words}")
    assert not list(tmp_path.glob("out/*"))


# ---- shakespeare.py ----------------------------------------------------------------------------------------


def test_the_last_tenth_of_shakespeare_is_one_document(tmp_path, monkeypatch):
    """The other passages come in a random order, which is always the same."""
    text = b"".join(b"SPEAKER %d:\nA line of speech.\n\n" % i for i in range(1000))
    file = tmp_path / "input.txt"
    file.write_bytes(text)
    monkeypatch.setattr(shakespeare, "URL", file.as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(text).hexdigest())
    shakespeare.main([str(file), "--out", str(tmp_path / "file")])
    shakespeare.main(["--out", str(tmp_path / "download")])
    found = contents(tmp_path / "file")
    assert found == contents(tmp_path / "download")
    assert found["input.txt"] == text and found["vocabulary.txt"].count(b"\n") == 257
    begin = int(len(text) * 0.9)  # as nanoGPT's prepare.py has it
    passages = tt.cut_passages(text[:begin], 512)
    train, val = read_splits(tmp_path / "file")
    assert train != passages and sorted(train) == sorted(passages) and val == [text[begin:]]
    file.write_text("Log in to")
    for arguments, problem in (([], "another text"), ([str(file)], "9 bytes of text")):
        with pytest.raises(SystemExit, match=f"^shakespeare.py: .*{problem}"):
            shakespeare.main(arguments + ["--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


# ---- local_corpus.py ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_corpus_is_the_library_split_by_name(tmp_path):
    local_corpus.main(["--out", str(tmp_path)])
    texts = local_corpus.stdlib_texts(Path(local_corpus.sysconfig.get_path("stdlib")))
    assert texts.keys() > {"argparse.py", "json/decoder.py", "unittest/case.py", "pydoc_data/topics/lambda"}
    for name in texts:
        assert {"site-packages", "test", "topics.py"}.isdisjoint(name.split("/")), name
    train = []
    val = []
    for document in local_corpus.corpus(texts):
        split = val if is_validation(document.key.encode(), 20) else train  # by the name of its file
        if document.raw:
            split.append(document.raw)
    assert read_splits(tmp_path) == (train, val)


def test_the_corpus_of_words_leaves_out_long_passages(tmp_path, monkeypatch):
    """A table has no blank line to cut it at."""
    text = b"a" * 1000 + b"\n\n" + b"0, " * 2000 + b"\n\n" + b"b" * 1000
    texts = {f"{i}.py": text for i in range(40)}  # enough that some validate
    monkeypatch.setattr(local_corpus, "stdlib_texts", lambda folder: texts)
    monkeypatch.setattr(local_corpus, "__file__", str(tmp_path / "local_corpus.py"))
    monkeypatch.setattr(tt, "get_encoding", lambda name: MERGING)
    local_corpus.main(["--encoding", "gpt2"])
    train, val = read_splits(tmp_path / "words", MERGING)
    assert {text[:1] for text in train + val} == {b"a", b"b"}


def test_corpus_is_rebuilt_only_if_needed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    source = tmp_path / "a.py"
    source.write_text("pass")
    monkeypatch.setattr(local_corpus.sysconfig, "get_path", lambda name: str(tmp_path))

    def builds():
        local_corpus.main(["--out", str(out)])
        return "there already" not in capsys.readouterr().out

    assert builds()
    others = ["._python_train_000001.bin", "python_train_000001 (copy).bin", "python_train_1old.bin"]
    for name in others:  # training does not read them
        (out / name).touch()
    assert not builds()
    train = out / "python_train_000001.bin"
    complete = train.read_bytes()
    train.write_bytes(complete[:-2] + b"a\0")  # as long as before
    local_corpus.main(["--out", str(out)])
    assert "out: python_train_000001.bin was damaged" in capsys.readouterr().out
    assert train.read_bytes() == complete and contents(out).keys() > set(others)
    vocabulary = (out / "vocabulary.txt").read_text()
    (out / "vocabulary.txt").write_text(vocabulary.replace("61", "62"))
    assert builds() and (out / "vocabulary.txt").read_text() == vocabulary
    (out / "vocabulary.txt").unlink()
    assert builds()
    source.write_text("pass\n")
    assert builds() and not builds()
    source.unlink()
    with pytest.raises(SystemExit, match="^local_corpus.py: this Python lacks .*$"):
        builds()


def test_the_second_corpus_is_a_packages_headers(tmp_path, monkeypatch):
    include = tmp_path / "torch/include/a"
    out = tmp_path / "out"
    command = ["--headers", "--out", str(out)]
    include.mkdir(parents=True)
    names = []
    for i in range(9):
        names += [f"{i}.h", f"{i}.hpp", f"{i}.cuh"]
    for name in names + ["not.txt", "../../not.h"]:
        (include / name).write_text(name)
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(local_corpus.importlib.util, "find_spec", lambda name: found)
    local_corpus.main(command)
    train, val = read_splits(out)
    assert sorted(train + val) == sorted(encode_all(names))
    assert f'"torch": "{torch.__version__}"' in (out / "source.json").read_text()
    found.submodule_search_locations = []
    with pytest.raises(SystemExit, match="^local_corpus.py: .*$"):
        local_corpus.main(command)


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


@pytest.mark.parametrize("vocabulary, orders", ((3, 5), (50257, 4)))
def test_ngram_equals_its_formula(vocabulary, orders):
    tokens = random.Random(0).choices([0, 1, vocabulary - 1], k=400)
    train = tokens[:300]
    val = tokens[300:]
    val[50] = vocabulary // 2  # never seen, if the vocabulary is larger than 3
    got = ngram.losses_by_order(np.array(train, np.uint16), np.array(val, np.uint16), vocabulary, orders)
    want = np.empty((orders, len(val) - 1))
    for n in range(orders):
        for i in range(1, len(val)):
            want[n, i - 1] = probability(train, val[max(0, i - n) : i], val[i], vocabulary)
    np.testing.assert_allclose(got, -np.log(want), rtol=1e-12)
