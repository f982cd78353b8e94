"""Tests bench/plain_gpt.py: validation, a run and its log; and that it and ngram.py check their shards."""

import math

import compare
import numpy as np
import pytest
import torch

import ngram
import plain_gpt
from golden_inputs import write_shard
from launch import make_corpus


def test_every_target_is_validated_once():
    tokens = torch.arange(301)

    def losses(inputs, targets, reduction):
        assert reduction == "none" and torch.equal(inputs + 1, targets) and inputs.size(1) == 6
        return targets.flatten().double() ** 2

    expected = np.mean(np.arange(1, 301) ** 2)
    assert plain_gpt.validate(losses, tokens, 6) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_run_learns_and_its_log_can_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_gpt.os, "cpu_count", lambda: 1)
    make_corpus(tmp_path / "corpus", val=300)
    options = "--steps 30 --batch-tokens 128 --lr 1e-2 --layers 1 --width 32 --heads 2 --context 16"
    options += f" --val-every 10 --val-tokens 256 --data {tmp_path}/corpus --log {tmp_path}/log.txt"
    plain_gpt.main(options.split())
    (group,), errors = compare.read_groups([f"plain={tmp_path}/log.txt"], None)
    (run,) = group.counted
    assert run.closed and not errors  # by "complete: yes"
    assert [point.step for point in run.curve] == [10, 20, 30]
    assert run.val_loss < 2.5 < math.log(257)  # the loss of uniform guesses
    assert [value(run) for value in compare.OF_LOSS.values()] == [257, 1, 256, 256]
    assert run.header.data and run.target is None


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    for split in "train", "val":
        write_shard(tmp_path / f"a_{split}_0.bin", 9999 * [257], 257, 256)
    for script in ngram, plain_gpt:
        with pytest.raises(SystemExit, match="has tokens outside the vocabulary of 257"):
            script.main(["--data", str(tmp_path)])
