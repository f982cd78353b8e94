"""Tests bench/step_time.py: what it counts and prints, and its rank without others. Asserts no times."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_gpt as tg
from launch import TINY

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import step_time

SETTINGS = [*TINY, "compile=false", "attention=dense", "stages.*.steps=2", "stages.3.steps=0"]
SETTINGS += ["ngrams.rows=300", "ngrams.width=12"]  # of a variant that has n-grams
TEXT_COLUMNS = {"variant", "quartiles", "ratio quartiles", "wait", "ratio"}
CPU = torch.device("cpu")


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def cfg():
    cfg = tg.CPU
    for setting in SETTINGS:
        cfg = tg.override(cfg, setting)
    return cfg


@pytest.fixture
def shards(cfg, tmp_path):
    return step_time.synthetic_shard(str(tmp_path), cfg, [0, 1, 2], 8)[0]


def bench(*arguments):
    return step_time.main(["--preset", "cpu", "--steps", "2", "--set", *SETTINGS, *arguments])


def table_lines(out):
    """Returns the table's lines as dicts by column, with the heading above each as "work"."""
    columns = step_time.COLUMNS.split(",")
    columns[-1] = "ratio quartiles"
    work, lines = None, []
    for line in out.splitlines():
        work = line.split(":")[0] if line.startswith("stage ") else work
        words = line.split()
        if len(words) >= 13 and words[0] in ("base", "A", "B"):
            lines.append({"work": work, **dict(zip(columns, words))})
    return lines


def test_mean_keys_are_those_of_the_reference_attention():
    """Checks which queries see a key, by giving that key alone a value."""
    cu_seqlens, T = torch.tensor([0, 5, 21, 30, 30], dtype=torch.int32), 30
    zeros = torch.zeros(T, 1, 4)
    for window in (1, 4, 40):
        seen = 0.0
        for key in range(T):
            v = zeros.clone()
            v[key] = 1
            y = tg.attention(zeros, zeros, v, cu_seqlens, 16, window, 1.0)
            seen += (y[:, 0, 0] > 0).sum().item()
        assert step_time.mean_keys(cu_seqlens.numpy(), window) == pytest.approx(seen / T)


def test_flops_by_hand(cfg):
    """Counts for two layers of width 12, one of them without attention."""
    layers = tg.Layer("plain"), tg.Layer(None)
    cfg = replace(cfg, heads=2, head_dim=6, mlp_dim=20, padded_vocab=32, layers=layers)
    qk, vo, mlps, head = 2 * 12 * 12, 2 * 12 * 12, 2 * (2 * 20 * 12), 12 * 32
    scores = 2 * (2 * 2 * 6 * 7.5)  # q k^T and p v of two heads, with 7.5 keys
    assert step_time.flops_per_token(cfg, [7.5]) == 6 * (qk + vo + mlps + head) + 3 * scores


def test_flops_of_the_record_preset_are_those_of_its_banks():
    shapes = tg.param_shapes(tg.RECORD, 1)
    weights = sum(
        math.prod(shapes[name]) for name in ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank", "lm_head")
    )
    weights -= 2 * 768 * 768  # of values and outputs, layers 1 and 8 read half
    assert step_time.flops_per_token(tg.RECORD, [0.0] * 7) == 6 * weights


@pytest.mark.slow
def test_output(cpu, cfg, tmp_path, capsys, monkeypatch):
    """Runs on synthetic data, before and after the untie step, in both setups, with two variants."""
    monkeypatch.chdir(tmp_path)
    assert bench("--stages", "0,2", "--against", "main_grad=false head_chunk=7") == 0
    out = capsys.readouterr().out
    assert "synthetic tokens" in out and "A: main_grad=false head_chunk=7" in out and "matmul ceiling" in out
    (changed,) = [line for line in out.splitlines() if line.startswith("preset cpu; ")]
    assert "head_dim (32, 8)" in changed and "window_unit" not in changed and torch.__version__ in out
    ceiling = float(out.split("matmul ceiling: ")[1].split()[0]) * 1e12
    lines = table_lines(out)
    assert len(lines) == 2 * 2 * 2
    for line in lines:
        number = {name: float(text) for name, text in line.items() if name not in TEXT_COLUMNS | {"work"}}
        assert all(value > 0 and math.isfinite(value) for value in number.values()), line
        assert float(line["wait"]) >= 0 and 0 < number["MFU"] < 1.2
        low, high = map(float, line["quartiles"].split(".."))
        assert low <= number["ms"] <= high
        only_pair = (number["first"] + number["second"]) / 2
        assert number["ms"] == pytest.approx(only_pair, abs=0.02)
        rate = number["tokens"] / number["ms"] * 1000
        assert number["tokens/s"] == pytest.approx(rate, rel=0.005 / number["ms"] + 1e-3, abs=0.5)
        mfu = number["tokens/s"] * number["MFLOP"] * 1e6 / ceiling
        assert number["MFU"] == pytest.approx(mfu, rel=1e-2, abs=1e-4)
        stage, setup = line["work"].split(", ")
        batch_tokens = cfg.stages[int(stage.split()[1])].batch_tokens
        assert number["tokens"] == (batch_tokens if setup == "one GPU" else batch_tokens / 8)
        assert ("ratio" in line) == (line["variant"] == "A")
        if line["variant"] == "A":
            low, high = map(float, line["ratio quartiles"].split(".."))
            assert 0 < low <= float(line["ratio"]) <= high


# -------------------------------------------------------------------------------- one rank without the others


# ---------------------------------------------------------------------------------------------------- kernels


def test_kernel_cases_run(cfg, shards):
    """Runs every case of --kernels with plain torch in the kernels' place."""
    cfg = replace(cfg, kernels=tuple(tg.KERNELS), attention="varlen", fp8=True)
    results = {}
    for case in step_time.kernel_cases(cfg, [0, 2], shards, CPU):
        assert case[:2] not in results and (case.flops > 0) != (case.nbytes > 0)
        results[case[:2]] = case.run(tg.TORCH_BACKEND)
    operations = {*tg.TORCH_BACKEND._fields} - {"fp8"}
    assert {operation for operation, _ in results} == operations
    losses = [result for (operation, _), result in results.items() if operation == "softcap_loss"]
    assert {grad.dtype for _, grad in losses} == {torch.float32, torch.float8_e5m2}
    grams = [shapes for operation, shapes in results if operation == "gram"]
    assert sum(" of 8" in shapes for shapes in grams) == sum(" of 1" in shapes for shapes in grams) == 8
    sums = [shapes for operation, shapes in results if operation == "segment_sum_rows"]
    assert any(shapes.startswith("bigram_embed") for shapes in sums)
