"""Tests bench/nanogpt.py on programs that print what nanoGPT and run.sh print."""

import pytest

import nanogpt

# The lines of nanoGPT's train.py; the second iteration, which holds an evaluation, takes longer.
NANOGPT = """\
print("step 0: train loss 4.2, val loss 4.1000")
print("iter 0: loss 4.2, time 900.00ms, mfu -100.00%")
print("iter 1: loss 4.0, time 40.00ms, mfu 1.00%")
print("step 2: train loss 2.0, val loss 1.9000")
print("iter 2: loss 1.9, time 700.00ms, mfu 1.00%")
print("iter 3: loss 1.8, time 60.00ms, mfu 1.00%")
import os, sys; open("done"); assert os.path.isdir(sys.argv[-1].removeprefix("--out_dir="))
"""
OURS = """\
print("step:0/4 val_loss:5.5 train_time:0ms step_avg:nanms")
print("step:2/4 val_loss:1.8 train_time:50ms step_avg:25ms")
print("step:4/4 val_loss:1.5 train_time:120ms step_avg:30ms")
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Makes a folder "nanoGPT", a text, and our repository, and goes to the folder that has them."""
    monkeypatch.chdir(tmp_path)
    prepared = tmp_path / "nanoGPT/data/shakespeare_char"
    prepared.mkdir(parents=True)
    (prepared / "prepare.py").write_text("open('data/shakespeare_char/input.txt').read(); open('done', 'w')")
    (tmp_path / "nanoGPT/train.py").write_text(NANOGPT)
    (tmp_path / "input.txt").write_text("text")
    run = tmp_path / "run.sh"
    run.write_text(f"#!/usr/bin/env python3\n{OURS}")
    run.chmod(0o755)
    monkeypatch.setattr(nanogpt, "DATA", tmp_path)
    monkeypatch.setattr(nanogpt, "REPOSITORY", tmp_path)
    return tmp_path / "nanoGPT"


def test_both_in_turns(clone, capsys):
    nanogpt.main("nanoGPT --runs 2 --picture curves.png".split())
    printed = capsys.readouterr().out
    # An iteration without an evaluation takes 50 ms, so two take 0.1 s.
    pair = ["nanoGPT's recipe: 1.9000 after 0.1 s", "the cpu preset: 1.5000 after 0.1 s"]
    assert [line for line in printed.splitlines() if line in pair] == pair + pair
    assert "| nanoGPT's recipe | 1.9000 | 0.1 | 1.9000 1.9000 | 0.1 0.1 |" in printed
    assert "is at nanoGPT's mean loss, 1.9000, after (s): [0.05, 0.05]" in printed
    assert (clone.parent / "curves.png").stat().st_size
