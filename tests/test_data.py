"""data/ and bench/ngram.py: what goes into shards comes out of them, and nothing is half-written."""
import gzip
import hashlib
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "bench")]
import fineweb  # noqa: E402
import local_corpus  # noqa: E402
import ngram  # noqa: E402
import tokenize_text as tt  # noqa: E402

START = 256


def tokenize(out, *files, options=()):
    tt.main([str(out), *map(str, files), "--encoding", "bytes", "--workers", "1", *options])


def documents_in(out: Path, split: str) -> list[bytes]:
    """The texts of all shards of a split, in order."""
    texts = []
    for path in sorted(out.glob(f"*_{split}_*.bin")):
        tokens = tt.read_tokens(path)
        assert tokens[0] == START, "a shard begins with a document"
        for piece in np.split(tokens, np.flatnonzero(tokens == START))[1:]:
            texts.append(piece[1:].astype(np.uint8).tobytes())
    return texts


def validates(text: bytes, one_in: int) -> bool:
    return int(hashlib.sha256(text).hexdigest(), 16) % one_in == 0


@pytest.fixture
def files(tmp_path):
    """Six files, one of each kind, two of them gzipped; and their documents in order."""
    texts = [f"text {i}: naïve 🙂 <|endoftext|>\r\n" * (i + 1) for i in range(6)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(texts[0].encode())
    (folder / "b.md").write_bytes(texts[1].encode())
    (folder / "c.py.gz").write_bytes(gzip.compress(texts[2].encode()))
    (folder / "d.jsonl").write_text("\n\n".join(json.dumps({"text": t, "body": "x"}) for t in texts[3:5]) + "\n")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": texts[5]}).encode()))
    (folder / "empty.txt").write_bytes(b"")
    return sorted(folder.iterdir()), [t.encode() for t in texts]


# ---- tokenize_text.py --------------------------------------------------------------------------------------------

def test_round_trip_split_and_header(tmp_path, files, capsys):
    paths, texts = files
    out = tmp_path / "out"
    tokenize(out, *paths, options=["--val-one-in", "2"])
    train, val = documents_in(out, "train"), documents_in(out, "val")
    assert train == [t for t in texts if not validates(t, 2)]
    assert val == [t for t in texts if validates(t, 2)]
    assert train and val
    for split, number, documents in (("train", 1, train), ("val", 0, val)):
        path = out / f"out_{split}_{number:06d}.bin"
        size = sum(map(len, documents))
        words = np.frombuffer(path.read_bytes()[:1024], "<i4")
        assert words[:6].tolist() == [20240520, 1, size + len(documents), 257, START, size] and not words[6:].any()
        assert path.stat().st_size == 1024 + 2 * words[2]
    assert "0 bad documents (named above), 1 empty ones" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == ["out_train_000001.bin", "out_val_000000.bin"]


def test_bytes_encoding_is_a_tiktoken_encoding_that_decodes():
    encoding = tt.encoding_named("bytes")
    text = "".join(map(chr, list(range(0xD7FF)) + [0xFFFF, 0x10FFFF])) + " " * 1000
    tokens = encoding.encode_to_numpy(text, disallowed_special=())
    assert tokens.astype(np.uint8).tobytes() == text.encode() and encoding.decode(tokens.tolist()) == text
    assert (encoding.n_vocab, encoding.eot_token) == (257, START)


def test_shards_hold_whole_documents(tmp_path):
    lines = [json.dumps({"text": "x" * n}) for n in (10, 10, 50, 5, 5, 5, 23, 1)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    written = tt.write_shards(tmp_path, "n", tt.read_documents([tmp_path / "a.jsonl"], "text"), "bytes",
                              shard_tokens=24, val_one_in=10**9)
    shards = sorted(tmp_path.glob("*.bin"))
    assert [p.name for p in shards] == [f"n_train_{i:06d}.bin" for i in range(1, 6)]
    assert [tt.read_header(p).tokens for p in shards] == [22, 51, 18, 24, 2]   # 51: a document longer than a shard
    assert [tt.read_header(p).text_bytes for p in shards] == [20, 50, 15, 23, 1]
    assert (written.train.tokens, written.train.text_bytes, written.val.tokens) == (117, 109, 0)


def test_same_shards_on_any_number_of_workers(tmp_path):
    paths = []
    for i in range(30):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text(str(i) * 100_000)
    paths.insert(7, tmp_path / "bad.txt")
    paths[7].write_bytes(b"\xff")
    hashes = []
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        tt.write_shards(out, "n", tt.read_documents(paths, "text"), "bytes", shard_tokens=1_000_000, val_one_in=5,
                        workers=workers)
        hashes.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()})
    assert hashes[0] == hashes[1] and len(hashes[0]) > 2


def bad_files(tmp_path) -> tuple[Path, Path, Path]:
    text, lines, cut = tmp_path / "bad.txt", tmp_path / "bad.jsonl", tmp_path / "cut.jsonl.gz"
    text.write_bytes(b"fine\nfine\n\xc3(\n")
    lines.write_bytes(b'{"text": "good"}\n{"text": \n{"other": 1}\n[1]\n{"text": "\\ud800"}\n{"text": "\xff"}\n'
                      + b"[" * 100_000 + b"\n" + b'{"text": "good too"}')
    cut.write_bytes(gzip.compress(b'{"text": "first"}\n' + os.urandom(100_000).hex().encode())[:60_000])
    return text, lines, cut


def test_bad_documents_are_counted_and_named(tmp_path, capsys):
    out = tmp_path / "out"
    tokenize(out, *bad_files(tmp_path), options=["--val-one-in", str(10**9)])
    assert documents_in(out, "train") == [b"good", b"good too", b"first"]
    printed = capsys.readouterr()
    for what in ("bad.txt:3: not UTF-8 (byte 0xc3)", "bad.jsonl:2: not JSON", "bad.jsonl:3: no text under 'text'",
                 "bad.jsonl:4: no text", "bad.jsonl:5: half of a surrogate pair", "bad.jsonl:6: not UTF-8",
                 "bad.jsonl:7: not JSON", "cut.jsonl.gz:2: broken gzip data"):
        assert what in printed.err
    assert "Left out: 8 bad documents" in printed.out
    assert "No document fell to validation" in printed.out


@pytest.mark.parametrize("which, message", [(0, "bad.txt:3: not UTF-8"), (1, "bad.jsonl:2: not JSON"), (2, ":2: broken")])
def test_strict_stops_and_leaves_nothing(tmp_path, which, message):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        tokenize(out, bad_files(tmp_path)[which], options=["--strict", "--shard-tokens", "5"])
    assert message in str(stopped.value) and "\n" not in str(stopped.value)
    assert list(out.iterdir()) == []


def test_nothing_appears_before_everything_is_written(tmp_path):
    def documents():
        yield tt.Document("a", 1, b"x" * 2_000_000)
        yield tt.Document("b", 1, b"y" * 2_000_000)
        assert not list(tmp_path.glob("*.bin"))
        raise RuntimeError("the machine stops here")
    with pytest.raises(RuntimeError):
        tt.write_shards(tmp_path, "n", documents(), "bytes", shard_tokens=1000)
    assert list(tmp_path.iterdir()) == []


def test_clear_refusals(tmp_path, files, capsys):
    (tmp_path / "a.pdf").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x_train_000001.bin").write_text("x")
    for arguments, message in ((["out", tmp_path / "none.txt"], "no such file"), (["out", tmp_path], "a folder"),
                               (["out", tmp_path / "a.pdf"], "unknown kind of file"),
                               ([tmp_path / "full", files[0][0]], "already has shards"),
                               (["out", files[0][0], "--shard-tokens", "0"], "--shard-tokens must lie")):
        with pytest.raises(SystemExit) as stopped:
            tt.main(list(map(str, arguments)))
        assert stopped.value.code == 2 and message in capsys.readouterr().err


def without_network(tmp_path) -> dict:
    """An environment in which every download fails at once, and no cache has anything."""
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return os.environ | proxy | {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1",
                                 "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "", "no_proxy": ""}


@pytest.mark.parametrize("command", (["tokenize_text.py", "OUT", "FILE"], ["fineweb.py", "1", "--out", "OUT"]))
def test_no_network_is_one_clear_line(tmp_path, files, command):
    names = {"OUT": tmp_path / "out", "FILE": files[0][0]}
    command = [str(names.get(word, word)) for word in command]
    ran = subprocess.run([sys.executable, ROOT / "data" / command[0], *command[1:]], env=without_network(tmp_path),
                         capture_output=True, text=True)
    assert ran.returncode == 1 and not list(tmp_path.glob("out/*.bin"))
    assert len(ran.stderr.splitlines()) == 1 and ran.stderr.startswith(command[0]), ran.stderr


# ---- fineweb.py --------------------------------------------------------------------------------------------------

def write_shard(path: Path, tokens: int = 5) -> None:
    """A shard of 5 tokens whose header says `tokens`."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    path.write_bytes(header.tobytes() + bytes(2 * 5))


def test_fineweb_takes_what_is_whole_and_replaces_what_is_not(tmp_path, monkeypatch, capsys):
    write_shard(tmp_path / "fineweb_val_000000.bin")
    write_shard(tmp_path / "fineweb_train_000001.bin", tokens=6)
    asked = []

    def download(dataset, name, repo_type, local_dir):
        assert (dataset, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset") and not (local_dir / name).exists()
        asked.append(name)
        write_shard(local_dir / name, tokens=9 if name.endswith("3.bin") else 5)

    monkeypatch.setattr(fineweb, "hf_hub_download", download)
    fineweb.main(["2", "--out", str(tmp_path)])
    assert sorted(asked) == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert "fineweb_train_000001.bin: removing a broken file" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        fineweb.main(["3", "--out", str(tmp_path)])
    assert "fineweb_train_000003.bin arrived broken" in str(stopped.value) and not (tmp_path / "fineweb_train_000003.bin").exists()


def test_fineweb_shard_counts():
    assert fineweb.shard_count("all") == 103 and fineweb.shard_count("0") == 0
    for wrong in ("104", "-1", "many"):
        with pytest.raises(fineweb.argparse.ArgumentTypeError):
            fineweb.shard_count(wrong)


# ---- local_corpus.py ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "local"
    local_corpus.main(["--out", str(out)])
    return out


def test_corpus_is_the_library_split_by_name(corpus):
    documents = local_corpus.corpus(Path(local_corpus.sysconfig.get_path("stdlib")))
    documents = [d for d in documents if d.raw]
    names = {d.key for d in documents}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py", "pydoc_data/topics/lambda"} < names
    assert not [n for n in names if "site-packages" in n or "test" in n.split("/")[:-1] or n == "pydoc_data/topics.py"]
    val = [validates(d.key.encode(), 20) for d in documents]   # so all passages of a file are on one side
    assert documents_in(corpus, "val") == [d.raw for d, v in zip(documents, val) if v]
    assert documents_in(corpus, "train") == [d.raw for d, v in zip(documents, val) if not v]
    assert 0.02 < sum(val) / len(val) < 0.12


def test_passages_are_cut_at_blank_lines():
    paragraphs = [b"a" * 450 + b"\n\n", b"b" * 450 + b"\n \n\n", b"c" * 450 + b"\r\n\r\n", b"d" * 5000 + b"\n\n", b"e\n"]
    assert local_corpus.passages(b"".join(paragraphs)) == [
        b"".join(paragraphs[:2]), paragraphs[2], paragraphs[3], paragraphs[4]]
    assert local_corpus.passages(b"x") == [b"x"]
    raw = Path(local_corpus.__file__).read_bytes()
    assert b"".join(local_corpus.passages(raw)) == raw


def test_corpus_twice_is_identical_and_not_built_again(corpus, tmp_path, capsys):
    local_corpus.main(["--out", str(tmp_path)])
    for path in sorted(corpus.iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    capsys.readouterr()
    local_corpus.main(["--out", str(tmp_path)])
    assert "there already" in capsys.readouterr().out
    train = tmp_path / "python_train_000001.bin"
    whole = train.read_bytes()
    train.write_bytes(whole[:-1])
    local_corpus.main(["--out", str(tmp_path)])
    assert "there already" not in capsys.readouterr().out and train.read_bytes() == whole


# ---- bench/ngram.py ----------------------------------------------------------------------------------------------

def naive_losses(train, val, vocabulary, orders):
    """The formula in bench/ngram.py's docstring, a token at a time."""
    followers = defaultdict(Counter)
    for n in range(1, orders + 1):
        for i in range(n - 1, len(train)):
            followers[tuple(train[i - n + 1:i])][train[i]] += 1

    def p(w, h, n):
        if n == 0:
            return 1 / vocabulary
        counts, lower = followers[h], p(w, h[1:], n - 1)
        return (counts[w] + len(counts) * lower) / (counts.total() + len(counts)) if counts else lower

    return [[-math.log(p(val[i], tuple(val[max(0, i - n + 1):i]), min(n, i + 1))) for i in range(1, len(val))]
            for n in range(1, orders + 1)]


def test_ngram_by_hand():
    # train a a b, val a b: p1(b) = (1 + 2/3)/(3 + 2) = 1/3; a is followed by a and b once: p2(b|a) = (1 + 2/3)/4
    losses = ngram.losses_by_order(np.array([0, 0, 1], np.uint16), np.array([0, 1], np.uint16), 3, 2)
    assert np.allclose(np.exp([-x[0] for x in losses]), [1 / 3, 5 / 12])


@pytest.mark.parametrize("vocabulary, orders", ((3, 5), (257, 4), (50257, 4)))
def test_ngram_equals_the_naive_model(vocabulary, orders):
    draw = random.Random(0)
    symbols = [0, 1, vocabulary - 1]
    train, val = ([draw.choice(symbols) for _ in range(n)] for n in (300, 100))
    val[50] = vocabulary // 2                      # never seen, if the vocabulary is larger than 3
    got = ngram.losses_by_order(np.array(train, np.uint16), np.array(val, np.uint16), vocabulary, orders)
    assert np.allclose(got, naive_losses(train, val, vocabulary, orders), rtol=1e-12)


def test_ngram_reads_shards(tmp_path, files, capsys):
    tokenize(tmp_path / "out", *files[0], options=["--val-one-in", "2"])
    ngram.main(["--data", str(tmp_path / "out"), "--orders", "2"])
    printed = capsys.readouterr().out
    train, val = (np.concatenate([tt.read_tokens(p) for p in (tmp_path / "out").glob(f"*_{split}_*")])
                  for split in ("train", "val"))
    loss = np.mean(naive_losses(train.tolist(), val.tolist(), 257, 2)[1])
    per_byte = loss * len(val) / (val != START).sum()
    assert f"2-gram  per token {loss:.4f}  per byte {per_byte:.4f}" in printed
    with pytest.raises(SystemExit, match="lacks training or validation shards"):
        ngram.main(["--data", str(tmp_path)])
