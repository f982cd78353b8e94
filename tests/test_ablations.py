"""Tests bench/ablations.py: pairs by seed, standard errors, what is run and what is not run again."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "records")]
import ablations


def test_a_difference_is_that_of_pairs():
    """Compares with scipy's paired t-test: t is the difference in standard errors."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    base = rng.normal(1, 0.5, 7)
    losses = base - 0.1 + rng.normal(0, 0.01, 7)
    difference, error, p = ablations.paired(losses.tolist(), base.tolist())
    assert difference == pytest.approx((losses - base).mean()) and error < 0.02
    assert difference / error == pytest.approx(stats.ttest_rel(losses, base).statistic)
    assert p == stats.ttest_rel(losses, base).pvalue < 1e-4
    for undefined in ([1.0], [2.0]), ([1.0, 2.0], [0.5, 1.5]):  # one pair; pairs without spread
        assert ablations.paired(*undefined)[0] in (-1.0, 0.5)
        assert all(map(math.isnan, ablations.paired(*undefined)[1:]))


def test_variants_run_seed_by_seed_and_not_again(tmp_path, monkeypatch, capsys):
    runs = []

    def train(script, preset, settings, seed):
        runs.append((seed, settings))
        loss = 2.0 - seed - (0.25 if "x=2" in settings else 0)
        return {"loss": loss, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    script = tmp_path / "script.py"
    script.write_text("one")
    options = ["--script", str(script), "--out", str(tmp_path / "out.jsonl"), "--common", "c=1"]
    ablations.main(["more: x=2 y=3", "--seeds", "2", *options])
    want = [(s, settings) for s in (0, 1) for settings in (["c=1"], ["c=1", "x=2", "y=3"])]
    assert runs == want
    assert "| more | 1.2500 | -0.2500 +- nan | nan | not resolved |" in capsys.readouterr().out
    ablations.main(["more: x=2 y=3", "--seeds", "3", *options])
    assert runs == want + [(2, ["c=1"]), (2, ["c=1", "x=2", "y=3"])]
    assert len([json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]) == 6
    script.write_text("two")
    ablations.main(["x=2", "--seeds", "1", *options])
    assert runs[6:] == [(0, ["c=1"]), (0, ["c=1", "x=2"])]


@pytest.mark.slow
def test_a_real_run_and_one_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train_gpt.py"
    script.write_text((ROOT / "train_gpt.py").read_text())
    tokens = np.random.default_rng(1).integers(0, 256, 40_000)
    tokens[::200] = 256
    for split, number in ("train", 1), ("val", 0):
        header = np.zeros(256, "<i4")
        header[:5] = 20240520, 1, len(tokens), 257, 256
        with open(tmp_path / f"x_{split}_{number:06}.bin", "wb") as file:
            file.write(header.tobytes() + tokens.astype("<u2").tobytes())
    common = f"data={tmp_path} stages.*.steps=1 val_slices=1"
    options = [
        "--script",
        str(script),
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "out.jsonl"),
        "--common",
        common,
    ]
    ablations.main(["adam_lr=0.1", *options])
    entry, _ = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert 4 < entry["loss"] < 6 and f"| as it is | {entry['loss']:.4f} |" in capsys.readouterr().out
    assert f"val_loss:{entry['loss']}" in Path(entry["log"]).read_text()
    with pytest.raises(SystemExit, match="failed: train_gpt.py: error: padded_vocab "):
        ablations.main(["padded_vocab=9", *options])
