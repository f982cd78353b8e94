"""Tests data/synthetic.py: what it draws, writes and refuses, and that the record preset can train on it."""

import contextlib
from dataclasses import replace
from itertools import islice
from statistics import NormalDist

import numpy as np
import pytest

import synthetic
import train_gpt as tg
from tokenize_text import Header, read_header, read_tokens

VAL = "synthetic_val_000000.bin"
TRAIN = ["synthetic_train_000001.bin", "synthetic_train_000002.bin"]


# ---- What is drawn -----------------------------------------------------------------------------------------


def draw(bos_id, seed, count):
    """Returns the tokens and document lengths of the first `count` draws, each of 512 documents."""
    return list(islice(synthetic.draw_documents(bos_id, seed), count))


def assert_frequency(count, n, p):
    """Checks a binomial count: within four standard deviations of its mean, and the table's resolution."""
    assert abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5 + n / synthetic.RESOLUTION


def test_token_k_is_drawn_in_proportion_to_its_rank():
    words = 50256
    counts = np.zeros(words + 1, int)
    for tokens, _ in draw(words, 1, 12):
        counts += np.bincount(tokens, minlength=words + 1)
    counts = counts[:words]  # without BOS
    p = 1 / np.arange(1, words + 1)
    p /= p.sum()
    for i in range(16):
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


# ---- What is written ---------------------------------------------------------------------------------------


def test_shards(monkeypatch, tmp_path):
    """All begin with other documents. More tokens leave the first as they are, in each.

    A second call writes all again, so no damage stays, also where the size is right, and no shard that the
    new options do not give.
    """
    monkeypatch.setattr(synthetic, "SHARD_TOKENS", 500_000)
    synthetic.write_shards(tmp_path, 700_000, 500_000, 301)
    sizes = {TRAIN[0]: 500_000, TRAIN[1]: 200_000, VAL: 500_000}
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == list(sizes)
    shards = {}
    for name, size in sizes.items():
        shards[name] = tokens = read_tokens(tmp_path / name)
        assert read_header(tmp_path / name) == Header(size, 301, 300, 0)
        assert tokens[0] == 300 == tokens.max()
    assert len({tokens[:1000].tobytes() for tokens in shards.values()}) == 3
    (tmp_path / TRAIN[1]).replace(tmp_path / TRAIN[0])
    synthetic.write_shards(tmp_path, 500_000, 300_000, 301)
    assert not (tmp_path / TRAIN[1]).exists()
    for path in tmp_path.glob("*.bin"):
        tokens = read_tokens(path)
        assert np.array_equal(tokens, shards[path.name][: len(tokens)])


@pytest.mark.parametrize(
    "options", ("--train-tokens 0", "--val-tokens -5", "--vocab-size 1", "--vocab-size 65537", "")
)
def test_bad_input_is_one_line(tmp_path, options):
    """Without options, a file that is no shard in the place of one."""
    (tmp_path / TRAIN[1]).write_bytes(b"mine")
    small = f"{tmp_path} --train-tokens 10 --val-tokens 10 {options}"
    with pytest.raises(SystemExit, match=f"^synthetic.py: .*{options[:8] or 'another kind'}.*$"):
        synthetic.main(small.split())
    assert [path.name for path in tmp_path.iterdir()] == [TRAIN[1]]


# ---- Training on it ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_is_enough_for_the_record_preset(tmp_path):
    """Checks the whole validation, and a thirtieth of the schedule on a thirtieth of the training tokens."""
    synthetic.write_shards(tmp_path, synthetic.TRAIN_TOKENS // 30)
    cfg = replace(tg.RECORD, data=str(tmp_path))
    data = tg.open_dataset(cfg)
    with contextlib.closing(tg.TrainLoader(cfg, data.train, 0, 1)) as loader:
        for stage in cfg.stages:
            for _ in range(stage.steps // 30):
                loader.advance(stage.batch_tokens, stage.max_doc_len)
        assert loader.shard_number == 0  # the only one
    last = tg.ValLoader(cfg, data.val).slice(cfg.val_slices - 1)
    assert len(last.inputs) == cfg.val_slice_tokens
