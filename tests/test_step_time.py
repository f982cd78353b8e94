"""Tests bench/step_time.py: what it counts and prints. Asserts no times."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import step_time
import train_gpt as tg
from launch import TINY

SETTINGS = TINY + ["compile=false", "attention_impl=dense", "stages.*.steps=2", "stages.3.steps=0"]


def test_mean_keys_are_those_of_the_reference_attention():
    """Checks which queries see which keys, by giving each key a column of its own."""
    cu_seqlens = torch.tensor([0, 5, 21, 30, 30], dtype=torch.int32)
    zeros = torch.zeros(30, 1, 4)
    values = torch.eye(30)[:, None]
    for window in (1, 4, 40):
        seen = tg.dense_attention(zeros, zeros, values, cu_seqlens, 16, window) > 0
        assert step_time.mean_keys(cu_seqlens.numpy(), window) == pytest.approx(seen.sum().item() / 30)


def test_flops_by_hand():
    """Counts for two layers of width 12: one with narrow queries and keys, one with two MLPs alone."""
    layers = tg.Layer("plain", narrow_qk=True), tg.Layer("", mlps=2)
    cfg = replace(tg.CPU, heads=2, head_dim=6, mlp_dim=20, padded_vocab=32, layers=layers)
    qk = 2 * 12 * 6
    vo = 2 * 12 * 12
    mlps = 3 * (2 * 20 * 12)
    head = 12 * 32
    scores = 2 * (2 * (3 + 6) * 7.5)  # q k^T and p v of two heads, with 7.5 keys
    assert step_time.flops_per_token(cfg, [7.5], 32) == 6 * (qk + vo + mlps + head) + 3 * scores


def test_every_rank_sends_as_many_rows():
    owner, place = np.array([[0, 0, 0, 1, 2], [1, 4, 6, 2, 0]], np.int32)
    plan = tg.route_rows(step_time.SingleRankCollectives(0, 3), "tokens", np.arange(5), owner, place)
    assert plan.output_splits == [3, 3, 3]
    assert plan.local_row_ids[:3].tolist() == [1, 4, 6]


@pytest.fixture
def run_step_time(tmp_path, monkeypatch, capsys):
    """Returns run(more): it times steps on synthetic data, on the CPU, and returns what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*more):
        command = "--preset cpu --steps 2 --set".split() + SETTINGS + ["--stages"] + list(more)
        step_time.main(command)
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_output(run_step_time):
    """Runs before and after the untie step, in both setups, with two variants."""
    out = run_step_time("0,2", "--against", "main_grad=false head_chunk=7")
    lines = [line.split() for line in out.splitlines() if line.startswith(("base ", "A "))]
    assert [(line[0], len(line)) for line in lines] == [("base", 12), ("A", 14)] * 4
    stages = tg.with_settings(tg.CPU, SETTINGS).stages
    whole = [stages[0].batch_tokens, stages[2].batch_tokens]
    assert [int(line[1]) for line in lines[::4]] == whole
    assert [8 * int(line[1]) for line in lines[3::4]] == whole


@pytest.mark.slow
def test_scale_of_tokens(run_step_time):
    """The printed exponents are those of the printed times."""
    table = run_step_time("2", "--scale", "tokens").split("\n\n")[1]
    lines = table.splitlines()
    sizes, times = np.loadtxt(lines[1:-1], usecols=(0, 1), unpack=True)
    assert sizes.tolist() == [96, 192, 384, 768, 1536]
    exponents = [float(word) for word in lines[-1].replace(",", "").split()[1::2]]
    assert exponents == pytest.approx(step_time.exponents(sizes, times), abs=0.02)
