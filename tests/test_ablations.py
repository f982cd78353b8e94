"""Tests bench/ablations.py: pairs by seed, standard errors, what is not run again, and what ends it."""

import argparse
import json
import math
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

import ablations
import train_gpt as tg
from launch import TINY, make_corpus


def test_a_difference_is_that_of_pairs():
    """Compares with scipy's paired t-test: t is the difference in standard errors."""
    rng = np.random.default_rng(1)
    base = rng.normal(1, 0.5, 7)
    losses = base - 0.1 + rng.normal(0, 0.01, 7)
    difference, error, _ = ablations.paired(losses.tolist(), base.tolist())
    assert difference == pytest.approx((losses - base).mean())
    assert difference / error == pytest.approx(scipy.stats.ttest_rel(losses, base).statistic)
    for losses, base in ([1.0], [2.0]), ([1.0, 2.0], [2.0, 3.0]):  # one pair; pairs without spread
        difference, error, p = ablations.paired(losses, base)
        assert difference == -1
        assert math.isnan(error) and math.isnan(p)


def test_variants_run_seed_by_seed_and_not_again(tmp_path, monkeypatch, capsys):
    runs = []

    def train(script, preset, settings, seed):
        runs.append(f"{seed} {' '.join(settings)}")
        loss = 2.0 - seed
        if "x=2" in settings:
            loss -= 0.25
        return {"loss": loss, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    script = tmp_path / "script.py"
    script.write_text("one")
    out = tmp_path / "out.jsonl"
    options = f"--script {script} --out {out} --set c=1 d=2 --set e=3 --seeds".split()
    ablations.main(["more: x=2 y=3"] + options + ["2"])
    want = ["0 c=1 d=2 e=3", "0 c=1 d=2 e=3 x=2 y=3", "1 c=1 d=2 e=3", "1 c=1 d=2 e=3 x=2 y=3"]
    assert runs == want
    assert "| more | 1.2500 | -0.2500 +- nan | nan | not resolved |" in capsys.readouterr().out
    ablations.main(["more: x=2 y=3"] + options + ["3"])
    want += ["2 c=1 d=2 e=3", "2 c=1 d=2 e=3 x=2 y=3"]
    assert runs == want and len(out.read_text().splitlines()) == 6
    script.write_text("two")
    ablations.main(["x=2"] + options + ["1"])
    want += ["0 c=1 d=2 e=3", "0 c=1 d=2 e=3 x=2"]
    assert runs == want
    monkeypatch.setattr(ablations, "train", lambda *args: {"loss": math.nan})
    for change, count in ("x=3", "1"), ("x=2", "0"):  # a loss that is no number; nothing to average
        with pytest.raises(SystemExit):
            ablations.main([change] + options + [count])


def test_runs_on_other_data_are_made_again(tmp_path, monkeypatch):
    """The folder's name is the same. Whatever a variant's own data are, they count."""
    seen = []

    def train(script, preset, settings, seed):
        seen.append(" ".join(settings))
        return {"loss": 2.0, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    (tmp_path / "script.py").write_text("one")
    options = f"--script {tmp_path}/script.py --out {tmp_path}/out.jsonl --seeds 1 --set data={tmp_path}/a"
    variants = ["x=1", f"data={tmp_path}/b"]
    shards = [tmp_path / name / "mine_train_000001.bin" for name in "ab"]
    for i, shard in enumerate([*shards, *shards[1:]]):
        shard.parent.mkdir(exist_ok=True)
        shard.write_text(f"shard {i}")
        ablations.main([*variants, *options.split()])
    both = f"data={tmp_path}/a data={tmp_path}/b"
    first = [f"data={tmp_path}/a", f"data={tmp_path}/a x=1", both]
    assert seen == first + [both, both]


@pytest.mark.parametrize(
    "line",
    ('{"run": ["0123", "cpu", "", 0], "label": "as it is", "lo', "", "[1]", '{"run": 5, "loss": 2}', "\0"),
)
def test_a_line_that_is_no_run_is_named_before_any_run(tmp_path, monkeypatch, line):
    monkeypatch.setattr(ablations, "train", lambda *args: pytest.fail("it trained"))
    (tmp_path / "script.py").write_text("one")
    out = tmp_path / "out.jsonl"
    content = json.dumps({"run": ["0", "cpu", "", 0], "label": "a", "loss": 2.0}) + f"\n{line}\n"
    out.write_text(content)
    with pytest.raises(SystemExit, match=f"^ablations.py: {out}:2 is no run"):
        ablations.main(["x=1", "--script", str(tmp_path / "script.py"), "--out", str(out)])
    assert out.read_text() == content


def test_two_scripts_and_odd_results_are_refused(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="names two scripts"):
        ablations.parse_variant("x: one.py other.py")
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    with pytest.raises(argparse.ArgumentTypeError, match="another kind of file"):
        ablations.results_file(str(notes))


def test_without_scipy_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ablations, "train_all", lambda *args: pytest.fail("it trained"))
    with pytest.raises(SystemExit):
        ablations.main(["x=1", "--out", str(tmp_path / "runs.jsonl")])
    assert "needs scipy" in capsys.readouterr().err


def test_a_script_prints_its_log_twice_and_beside_itself(tmp_path, monkeypatch):
    """Runs a script without --check, as early records are."""
    run = SimpleNamespace(curve=[(9, 1.0, 1.0)])
    monkeypatch.setattr(ablations.compare, "read_log", lambda path: ([run], 0))
    script = tmp_path / "script.py"
    log = tmp_path / "a.txt"
    script.write_text("print('log: a.txt\\nlog: a.txt')")
    log.touch()
    assert Path(ablations.train(script, "cpu", [], 0)["log"]).resolve() == log


def test_a_patch_changes_a_copy_of_a_script(tmp_path, monkeypatch):
    """A variant's patches are applied, in order, and its runs count as another script's. So do those of a
    variant's own script.
    """
    ran = []

    def train(script, preset, settings, seed):
        ran.append((script.read_text(), settings))
        return {"loss": 1.0, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    script = tmp_path / "mine.py"
    out = tmp_path / "out.jsonl"
    script.write_text("one\n")
    head = "--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -1 +1 @@\n"
    to_two = tmp_path / "two.patch"
    to_two.write_text(head + "-one\n+two\n")
    to_three = tmp_path / "three.patch"
    to_three.write_text(head + "-two\n+three\n")
    options = f"--script {script} --out {out} --seeds 1".split()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ablations.main([f"patched: x=1 {to_two} {to_three}"] + options)
    assert ran == [("one\n", []), ("three\n", ["x=1"])]
    ablations.main([f"again: x=1 {to_two} {to_three}"] + options)
    assert len(ran) == 2
    other = tmp_path / "other.py"
    other.write_text("two\n")
    ablations.main([f"other: {other}", f"patched, too: {other} {to_three}"] + options)
    assert ran[2:] == [("two\n", []), ("three\n", [])]
    with pytest.raises(SystemExit, match="three.patch does not fit"):
        ablations.main([f"x=1 {to_three}"] + options)


@pytest.mark.slow
def test_a_real_run_and_one_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "corpus")
    out = tmp_path / "out.jsonl"
    options = ["--script", tg.__file__, "--seeds", "1", "--out", str(out)]
    options += ["--set", "warmup=false", f"data={tmp_path}/corpus"] + TINY
    ablations.main(["adam_lr=0.1"] + options)
    entry = json.loads(out.read_text().splitlines()[0])
    assert f"| as it is | {entry['loss']:.4f} |" in capsys.readouterr().out
    assert f"val_loss:{entry['loss']}" in Path(entry["log"]).read_text()
    out.unlink()
    with pytest.raises(SystemExit, match="failed: train_gpt.py: error: padded_vocab "):
        ablations.main(["padded_vocab=9"] + options)
    assert not out.exists()  # the baseline did not run first
