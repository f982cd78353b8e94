"""Tests data/synthetic.py: what it writes and refuses, and that the record preset can train on it."""

import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest

import synthetic
import train_gpt as tg
from tokenize_text import Header, read_header, read_tokens

VAL = "synthetic_val_000000.bin"
TRAIN = ["synthetic_train_000001.bin", "synthetic_train_000002.bin"]


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
    assert os.listdir(tmp_path) == [TRAIN[1]]


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
