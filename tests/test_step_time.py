"""Tests bench/step_time.py: what it counts and prints. Asserts no times."""

import sys
import time
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as tg
from launch import TINY

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import step_time

SETTINGS = TINY + ["compile=false", "attention_impl=dense", "stages.*.steps=2", "stages.3.steps=0"]
OPTIONS = ["--preset", "cpu", "--steps", "2", "--set"] + SETTINGS


def test_mean_keys_are_those_of_the_reference_attention():
    """Checks which queries see a key, by giving that key alone a value."""
    cu_seqlens = torch.tensor([0, 5, 21, 30, 30], dtype=torch.int32)
    T = 30
    zeros = torch.zeros(T, 1, 4)
    for window in (1, 4, 40):
        seen = 0.0
        for key in range(T):
            v = zeros.clone()
            v[key] = 1
            y = tg.dense_attention(zeros, zeros, v, cu_seqlens, 16, window)
            seen += (y[:, 0, 0] > 0).sum().item()
        assert step_time.mean_keys(cu_seqlens.numpy(), window) == pytest.approx(seen / T)


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
    plan = step_time.SingleRankExchange(0, 3).route_rows("tokens", np.arange(5), owner, place)
    assert plan.output_splits == [3, 3, 3]
    own, second, third = plan.local_rows.view(3, 3).tolist()
    assert own == [1, 4, 6]
    for rows in second, third:
        assert len(set(rows)) == 3
        assert set(rows) != set(own)
        assert max(rows) <= 6


def test_builder_ms_are_those_of_a_batch(tmp_path, monkeypatch):
    """Builds of twelve batches the first and those ahead of it, each in at least 50 ms of CPU."""
    build = tg.Prefetcher._build

    def slow_build(self, plan):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return build(self, plan)

    monkeypatch.setattr(tg.Prefetcher, "_build", slow_build)
    cfg = reduce(tg.override, SETTINGS, tg.CPU)
    paths = step_time.synthetic_shard(tmp_path, cfg, [0], 10)
    variant = step_time.Variant("base", cfg, torch.device("cpu"))
    training = step_time.Training(variant, 0, 8, paths, 12)
    training.step()
    training.loader.close()
    assert training.builder_ms() >= 50


@pytest.mark.slow
def test_output(tmp_path, capsys, monkeypatch):
    """Runs on synthetic data, before and after the untie step, in both setups, with two variants."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step_time.main(OPTIONS + ["--stages", "0,2", "--against", "main_grad=false head_chunk=7"])
    out = capsys.readouterr().out
    assert "synthetic tokens" in out and "A: main_grad=false head_chunk=7" in out
    ceiling = float(out.split("matmul ceiling: ")[1].split()[0]) * 1e12
    lines = [line.split() for line in out.splitlines() if line.startswith(("base ", "A "))]
    # Stages 0 and 2, each as one rank of one and as one of eight; the baseline, then the variant.
    assert [line[0] for line in lines] == ["base", "A"] * 4
    assert [len(line) for line in lines] == [12, 14] * 4
    cfg = reduce(tg.override, SETTINGS, tg.CPU)
    whole = [cfg.stages[stage].batch_tokens for stage in (0, 2)]
    assert [int(line[1]) for line in lines[::2]] == [whole[0], whole[0] // 8, whole[1], whole[1] // 8]
    for line in lines:
        low, high = map(float, line[3].split(".."))
        tokens, ms, host = int(line[1]), float(line[2]), float(line[4])
        builder, rate, mflop, mfu = map(float, line[6:10])
        assert 0 < low <= ms <= high
        assert host <= ms
        assert builder > 0
        assert rate == pytest.approx(1000 * tokens / ms, rel=0.01, abs=0.5)
        assert mfu == pytest.approx(rate * mflop * 1e6 / ceiling, rel=0.01, abs=1e-4)


def test_exponents_by_hand():
    """Powers of the size give their exponent; the fit and the local exponent differ where the slope does."""
    for power in (-1.0, 0.0, 1.5, 2.0):
        sizes = [3, 5, 64, 100]
        times = [7 * n**power for n in sizes]
        assert step_time.exponents(sizes, times) == pytest.approx((power, power))
    # In log2 sizes are -1, 0, 1 from their mean, and times 0, 0, 3.
    assert step_time.exponents([1, 2, 4], [1, 1, 8]) == pytest.approx((1.5, 3))


@pytest.mark.slow
def test_scale_of_tokens(tmp_path, capsys, monkeypatch):
    """Runs on synthetic data; the printed exponents are those of the printed times."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step_time.main(OPTIONS + ["--stages", "2", "--scale", "tokens"])
    _, table = capsys.readouterr().out.split("\n\n")
    header, *lines, last = table.splitlines()
    assert header.split() == ["tokens", "ms", "quartiles"]
    sizes, times = [], []
    for line in lines:
        size, ms, _ = line.split()
        sizes.append(int(size))
        times.append(float(ms))
    assert sizes == [96, 192, 384, 768, 1536]
    overall, local = step_time.exponents(sizes, times)
    assert last == f"exponent: {overall:.2f}, local: {local:.2f}"
    with pytest.raises(SystemExit, match="--scale: of width,tokens,rows,processes"):
        step_time.main(OPTIONS + ["--stages", "2", "--scale", "depth"])
