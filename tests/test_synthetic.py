"""Tests data/synthetic.py: what it draws, writes and refuses, and that the record preset can train on it."""

import contextlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import synthetic
import train_gpt as tg
from golden_inputs import batch_plan
from tokenize_text import VOCABULARY, Header, read_header, read_tokens

VAL = "synthetic_val_000000.bin"
TRAIN = ["synthetic_train_000001.bin", "synthetic_train_000002.bin", "synthetic_train_000003.bin"]


def contents(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


# ---- What is drawn -----------------------------------------------------------------------------------------


def draw(bos_id, seed, count):
    """Returns the tokens and document lengths of the first `count` draws, each of 512 documents."""
    return list(islice(synthetic.draw_documents(bos_id, seed), count))


def assert_frequency(count, n, p):
    """Checks a binomial count: within four standard deviations of its mean, and the table's resolution."""
    assert abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5 + n / synthetic.RESOLUTION


@pytest.mark.parametrize("words", (50256, 1))
def test_token_k_is_drawn_in_proportion_to_its_rank(words):
    counts = np.zeros(words + 1, int)
    for tokens, _ in draw(words, 1, 12):
        assert tokens.max() <= words
        counts += np.bincount(tokens, minlength=words + 1)
    assert counts[words] == 12 * 512  # BOS
    counts = counts[:words]
    p = 1 / np.arange(1, words + 1)
    p /= p.sum()
    for k in range(min(words, 100)):
        assert_frequency(counts[k], counts.sum(), p[k])
    for i in range(17):
        group = slice(2**i - 1, 2 ** (i + 1) - 1)
        assert_frequency(counts[group].sum(), counts.sum(), p[group].sum())


def test_document_lengths_are_log_normal():
    drawn = draw(50256, 2, 80)
    for tokens, lengths in drawn:
        starts = np.flatnonzero(tokens == 50256)
        assert np.array_equal(np.diff(starts, append=len(tokens)), lengths) and starts[0] == 0
    lengths = np.concatenate([lengths for _, lengths in drawn])
    logarithm = NormalDist(np.log(400), 1.05)
    for length in (40, 100, 400, 1600, 4000):
        below = (lengths < length).sum()  # a rounded down length is below it if the length is
        assert_frequency(below, len(lengths), logarithm.cdf(np.log(length)))


def test_made_up_tokens_are_distinct_and_begin_with_others():
    """As in GPT-2's vocabulary. BOS, the last, has no bytes."""
    tokens = synthetic.make_up_tokens(1000)
    assert tokens.pop() == b""
    assert len(tokens) == len(set(tokens)) == 999
    assert tokens[:256] == [bytes([i]) for i in range(256)]
    for token in tokens[256:]:
        assert len(token) > 1 and token[:-1] in tokens
    assert synthetic.make_up_tokens(2) == [b"\0", b""]


# ---- What is written ---------------------------------------------------------------------------------------


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Returns a function that writes 1,100,000 training tokens, or as the options say, into small shards."""
    monkeypatch.setattr(synthetic, "SHARD_TOKENS", 500_000)

    def write(val_tokens=500_000, vocab_size=301):
        return synthetic.write_shards(tmp_path / "deep" / "out", 1_100_000, val_tokens, vocab_size)

    return write


def test_shards(write, tmp_path):
    """All begin with other documents. More tokens leave the first as they are, in each."""
    out = tmp_path / "deep" / "out"
    sizes = {TRAIN[0]: 500_000, TRAIN[1]: 500_000, TRAIN[2]: 100_000, VAL: 500_000}
    write()
    assert sorted(path.name for path in out.glob("*.bin")) == list(sizes)
    shards = {}
    beginnings = set()
    for name, size in sizes.items():
        tokens = read_tokens(out / name)
        assert read_header(out / name) == Header(size, 301, 300, 0)
        assert tokens[0] == 300 == tokens.max() and 400 < 5e5 * np.mean(tokens == 300) < 1200
        shards[name] = tokens
        beginnings.add(tokens[:1000].tobytes())
    assert len(beginnings) == 4
    synthetic.write_shards(tmp_path / "again", 700_000, 300_000, 301)
    for path in (tmp_path / "again").glob("*.bin"):
        tokens = read_tokens(path)
        assert np.array_equal(tokens, shards[path.name][: len(tokens)])


def test_a_second_call_writes_all_again(write, tmp_path):
    """So no damage stays, also where the size is right, and no shard that the new options do not give."""
    out = tmp_path / "deep" / "out"
    write()
    complete = contents(out)
    damaged = bytearray(complete[VAL])
    damaged[5000] ^= 1
    (out / VAL).write_bytes(damaged)
    (out / TRAIN[0]).write_bytes(complete[TRAIN[0]][:-2])
    (out / TRAIN[1]).unlink()
    write()
    assert contents(out) == complete
    synthetic.write_shards(out, 700_000, 500_000, 302)
    assert sorted(path.name for path in out.glob("*.bin")) == [*TRAIN[:2], VAL]
    assert read_header(out / TRAIN[0]).vocab_size == 302


def test_the_vocabulary_is_the_made_up_tokens(tmp_path):
    synthetic.main(f"{tmp_path} --train-tokens 10 --val-tokens 10 --vocab-size 301".split())
    expected = "".join(f"{token.hex()}\n" for token in synthetic.make_up_tokens(301))
    assert (tmp_path / VOCABULARY).read_text() == expected


@pytest.mark.parametrize(
    "options", ("--train-tokens 0", "--val-tokens -5", "--vocab-size 1", "--vocab-size 65537", "")
)
def test_bad_input_is_one_line(tmp_path, options):
    """Without options, a file that is no shard in the place of one."""
    (tmp_path / TRAIN[1]).write_bytes(b"mine")
    small = f"{tmp_path} --train-tokens 10 --val-tokens 10 {options}"
    with pytest.raises(SystemExit, match=f"^synthetic.py: .*{options[:8] or 'another kind'}.*$"):
        synthetic.main(small.split())
    assert contents(tmp_path) == {TRAIN[1]: b"mine"}


def test_data_of_presets_is_protected():
    folders = {Path(preset.data).name for preset in tg.PRESETS.values()}
    assert folders == set(synthetic.PRESET_FOLDERS)
    for folder in folders:
        with pytest.raises(synthetic.UserError, match="preset's own data"):
            synthetic.write_shards(Path(synthetic.__file__).parent / folder, 10, 10)


# ---- Training on it ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_is_enough_for_the_record_preset(tmp_path):
    """Checks the whole validation, and a thirtieth of the schedule on a thirtieth of the training tokens."""
    synthetic.write_shards(tmp_path, synthetic.TRAIN_TOKENS // 30)
    stages = tuple(replace(stage, steps=stage.steps // 30) for stage in tg.RECORD.stages)
    cfg = replace(tg.RECORD, data=str(tmp_path), stages=stages)
    data = tg.open_dataset(cfg)
    assert data.bytes_per_token == 0 and f"{synthetic.VAL_TOKENS} for validation" in data.fingerprint
    with contextlib.closing(tg.TrainLoader(cfg, data.train, 0, 1)) as loader:
        for stage in stages:
            micro_batches = loader.micro_batches(batch_plan(stage.batch_tokens, stage.max_doc_len))
            documents = sum((m.inputs == cfg.bos_id).sum().item() for m in micro_batches)
            assert len(micro_batches) == 8 and 400 < stage.batch_tokens / documents < 800
    last = tg.ValLoader(cfg, data.val).slice(cfg.val_slices - 1)
    assert len(last.inputs) == cfg.val_slice_tokens
