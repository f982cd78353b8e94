"""Tests data/synthetic.py: what it draws, writes and refuses, and that the record preset can train on it."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import synthetic
import train_gpt as tg
from launch import WAIT
from tokenize_text import VOCABULARY, Header, read_header, read_tokens

SCRIPT = Path(synthetic.__file__).resolve()
VAL, TRAIN = "synthetic_val_000000.bin", "synthetic_train_000001.bin"


def contents(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def error_of(*arguments) -> str:
    """Returns the error of main(), which must be one line."""
    with pytest.raises(SystemExit) as error:
        synthetic.main(list(map(str, arguments)))
    assert re.fullmatch(r"synthetic\.py: [^\n]+", error.value.code)
    return error.value.code


# ---- What is drawn -----------------------------------------------------------------------------------------


def assert_frequency(count, n, p, what):
    """Checks a binomial count: within four standard deviations of its mean, and the table's resolution."""
    assert abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5 + n / synthetic.RESOLUTION, (what, count, n * p)


@pytest.mark.parametrize("words", (50256, 256, 1))
def test_token_k_is_drawn_in_proportion_to_its_rank(words):
    drawn = list(islice(synthetic.draw_documents(words, 1), 12))
    counts = np.bincount(np.concatenate([tokens for tokens, _ in drawn]), minlength=words + 1)
    assert len(counts) == words + 1 and counts[words] == 12 * 512
    n, p = counts[:words].sum(), 1 / np.arange(1, words + 1)
    p /= p.sum()
    for k in range(min(words, 100)):
        assert_frequency(counts[k], n, p[k], k)
    for begin in 2 ** np.arange(17):
        group = slice(begin - 1, 2 * begin - 1)  # ranks begin to 2 * begin - 1
        assert_frequency(counts[:words][group].sum(), n, p[group].sum(), group)


def test_document_lengths_are_log_normal():
    drawn = list(islice(synthetic.draw_documents(50256, 2), 80))
    for tokens, lengths in drawn:
        starts = np.flatnonzero(tokens == 50256)
        assert np.array_equal(np.diff(starts, append=len(tokens)), lengths) and starts[0] == 0
    lengths = np.concatenate([lengths for _, lengths in drawn])
    logarithm = NormalDist(np.log(400), 1.05)
    for length in (40, 100, 200, 400, 800, 1600, 4000):
        below = (lengths < length).sum()  # a rounded down length is below it if the length is
        assert_frequency(below, len(lengths), logarithm.cdf(np.log(length)), length)


@pytest.mark.parametrize("vocab_size", (2, 257, 1000, 50257))
def test_made_up_tokens_are_distinct_and_begin_with_others(vocab_size):
    """As in GPT-2's vocabulary. BOS, the last, has no bytes."""
    *tokens, bos = synthetic.make_up_tokens(vocab_size)
    known = set(tokens)
    assert bos == b"" and len(tokens) == len(known) == vocab_size - 1
    assert tokens[:256] == [bytes([i]) for i in range(min(256, len(tokens)))]
    assert all(len(token) > 1 and token[:-1] in known for token in tokens[256:])


def test_the_seed_determines_the_documents():
    first, again, other = (next(synthetic.draw_documents(256, seed))[0] for seed in (3, 3, [3, 1]))
    assert np.array_equal(first, again) and not np.array_equal(first[:100], other[:100])


# ---- What is written ---------------------------------------------------------------------------------------


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(synthetic, "SHARD_TOKENS", 500_000)


def test_shards(small_shards, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    arguments = ["--train-tokens", "1_100_000", "--val-tokens", "500_000", "--vocab-size", "301"]
    synthetic.main([str(out), *arguments])
    assert capsys.readouterr() == (
        f"{out}: 1,100,000 training tokens, 500,000 validation tokens, without meaning; "
        "shards written now: 4\n",
        "",
    )
    sizes = {f"synthetic_train_{i:06d}.bin": n for i, n in ((1, 500_000), (2, 500_000), (3, 100_000))}
    assert {p.name: read_header(p) for p in out.glob("*.bin")} == {
        name: Header(tokens, 301, 300, 0) for name, tokens in (sizes | {VAL: 500_000}).items()
    }
    shards = [read_tokens(path) for path in sorted(out.glob("*.bin"))]
    for i, shard in enumerate(shards):
        assert shard[0] == 300 and shard.max() == 300 and 400 < (shard == 300).sum() * 5e5 / len(shard) < 1200
        assert all(not np.array_equal(shard[:1000], other[:1000]) for other in shards[:i])
    again = tmp_path / "again"
    synthetic.write_shards(again, 700_000, 300_000, 301)
    for name, size in ((TRAIN, 500_000), ("synthetic_train_000002.bin", 200_000), (VAL, 300_000)):
        assert np.array_equal(read_tokens(again / name), read_tokens(out / name)[:size])


def test_only_missing_and_broken_shards_are_written(small_shards, tmp_path):
    assert len(synthetic.write_shards(tmp_path, 1_000_000, 1000)) == 3
    complete, names = contents(tmp_path), sorted(path.name for path in tmp_path.glob("*.bin"))
    assert synthetic.write_shards(tmp_path, 1_000_000, 1000) == []
    (tmp_path / VAL).write_bytes(complete[VAL][:-2])
    (tmp_path / TRAIN).unlink()
    assert sorted(synthetic.write_shards(tmp_path, 1_000_000, 1000)) == [TRAIN, VAL]
    assert contents(tmp_path) == complete
    assert synthetic.write_shards(tmp_path, 1_000_000, 2000) == [VAL]
    assert sorted(synthetic.write_shards(tmp_path, 1_000_000, 2000, 301)) == names
    assert read_header(tmp_path / TRAIN).vocab_size == 301


def test_the_vocabulary_is_the_made_up_tokens(tmp_path):
    """The same in another process, and written anew if it is missing."""
    expected = "".join(f"{token.hex()}\n" for token in synthetic.make_up_tokens(301))
    options = ["--train-tokens", "10", "--val-tokens", "10", "--vocab-size", "301"]
    subprocess.run([sys.executable, SCRIPT, tmp_path, *options], check=True, timeout=WAIT)
    for _ in range(2):
        assert (tmp_path / VOCABULARY).read_text() == expected
        (tmp_path / VOCABULARY).unlink()
        assert synthetic.write_shards(tmp_path, 10, 10, 301) == []


def test_bad_input(tmp_path):
    out = tmp_path / "out"
    assert "must be at least 1" in error_of(out, "--train-tokens", "0")
    assert "must be at least 1" in error_of(out, "--val-tokens", "-5")
    for size in (1, 65537):
        assert f"--vocab-size {size}: must be 2 to 65536" in error_of(out, "--vocab-size", size)
    assert not out.exists()
    (tmp_path / "file").write_text("mine")
    small = "--train-tokens", "10", "--val-tokens", "10"
    assert "exists" in error_of(tmp_path / "file", *small)
    out.mkdir()
    for name in ("fineweb_train_000001.bin", "synthetic_train_000002.bin"):
        (out / name).write_bytes(b"mine")
        assert f"{out / name}: not a shard that these options give" in error_of(out, *small)
        assert contents(out) == {name: b"mine"}
        (out / name).unlink()


# ---- Training on it ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_is_enough_for_the_record_preset(tmp_path):
    """Checks the whole validation, and a thirtieth of the schedule on a thirtieth of the training tokens."""
    synthetic.write_shards(tmp_path, synthetic.TRAIN_TOKENS // 30)
    stages = tuple(replace(stage, steps=stage.steps // 30) for stage in tg.RECORD.stages)
    cfg = replace(tg.RECORD, data=str(tmp_path), stages=stages)
    data = tg.open_dataset(cfg)
    assert data.bytes_per_token == 0 and f"{synthetic.VAL_TOKENS} for validation" in data.fingerprint
    loader = tg.TrainLoader(cfg, data.train, 0, 1)
    try:
        for stage in stages:
            micro_batches = loader.batch(stage.batch_tokens, stage.max_doc_len)
            assert len(micro_batches) == 8
            for m in micro_batches:
                starts = m.cu_seqlens.unique()[:-1]
                assert np.array_equal(np.flatnonzero(m.inputs == cfg.bos_id), starts)
                assert m.cu_seqlens.diff().max() <= stage.max_doc_len
            documents = sum((m.inputs == cfg.bos_id).sum().item() for m in micro_batches)
            assert 400 < stage.batch_tokens / documents < 800
    finally:
        loader.close()
    val = tg.ValLoader(cfg, data.val)
    assert all(len(val.batch(i).inputs) == cfg.val_slice_tokens for i in range(cfg.val_slices))
