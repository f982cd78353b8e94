"""Tests bench/ablations.py: pairs by seed, standard errors, what is not run again, and what ends it."""

import argparse
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

import ablations
import train_gpt as tg
import worth
from launch import TINY, WAIT, make_corpus


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
    assert "| more | 1.2500 | -0.2500 |  | no error: equal in all pairs |" in capsys.readouterr().out
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


def test_a_variant_that_changes_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(ablations, "train", lambda *args: pytest.fail("it trained"))
    with pytest.raises(SystemExit, match="wide: it changes nothing"):
        ablations.main([f"wide: mlp_dim={tg.CPU.mlp_dim}"])
    with pytest.raises(SystemExit, match="again: it changes nothing"):
        ablations.main(["again: heads=4", "--set", "heads=4"])


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
    one = tmp_path / "one.py"
    other = tmp_path / "other.py"
    one.touch()
    with pytest.raises(argparse.ArgumentTypeError, match=f"there is no {other}"):
        ablations.parse_variant(f"x: {one} {other}")
    other.touch()
    with pytest.raises(argparse.ArgumentTypeError, match="names two scripts"):
        ablations.parse_variant(f"x: {one} {other}")
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    with pytest.raises(argparse.ArgumentTypeError, match="another kind of file"):
        ablations.results_file(str(notes))


def test_without_scipy_nothing_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ablations, "train_all", lambda *args: pytest.fail("it trained"))
    with pytest.raises(SystemExit, match="needs scipy"):
        ablations.main(["x=1", "--out", str(tmp_path / "runs.jsonl")])


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


def test_one_seed_has_no_error(capsys):
    table = ablations.table({"as it is": [2.0], "x=1": [1.5]})
    assert table.splitlines()[-1] == "| x=1 | 1.5000 | -0.5000 |  | one seed: no error |"


def test_a_results_file_of_before_is_read():
    """The oldest kind has no data."""
    found = ablations.read_results(Path(worth.REPOSITORY, "bench", "ablations", "tables.jsonl"))
    assert found[("b940102e1916", "cpu", "", 40), None] == 1.052


def test_a_lower_loss_is_worth_steps():
    """A loss that falls evenly over the logarithm of the steps: an idea with the loss of 1 / 0.9 as many
    steps, whose steps take 6 % longer, needs 0.9 * 1.06 of the time.
    """
    noise = np.array([0.01, -0.02, 0.01])  # of the seeds, the same on both sides

    def losses(steps):
        return list(1 - 0.2 * math.log(steps) + noise)

    text = worth.in_time(losses(1 / 0.9), losses(1), losses(0.8), np.full(6, 1.06))
    assert "its steps take 1.060 +- 0.000 of the time" in text
    assert (
        "about 5 % less time to the baseline's loss, in 90 % of the steps (95 %: 5 % less to 5 % less)"
        in text
    )
    assert "extrapolated" not in text
    text = worth.in_time(losses(0.7), losses(1), losses(0.8), np.full(6, 1.06))
    assert "about 51 % more time" in text and text.endswith(", extrapolated")


def test_the_interval_of_the_time_holds_what_is_true():
    """In 300 simulated comparisons of three seeds, with the noise of the `cpu` preset's runs."""
    rng = np.random.default_rng(5)
    true = 100 * (1 - 0.95 * 1.03)
    held = 0
    for _ in range(300):
        seeds = rng.normal(0, 0.008, 3)
        found = []
        for steps in 1 / 0.95, 1, 0.8:
            found.append(list(1 - 0.2 * math.log(steps) + seeds + rng.normal(0, 0.004, 3)))
        text = worth.in_time(*found, rng.normal(1.03, 0.02, 6))
        bounds = []
        for bound in text.partition("95 %: ")[2].rstrip(")").split(" to "):
            percent, _, word = bound.partition(" % ")
            bounds.append(float(percent) * (1 if word == "less" else -1))
        held += bounds[1] - 0.5 <= true <= bounds[0] + 0.5
    assert 270 < held < 300


def test_without_seeds_or_a_slope_there_is_no_estimate():
    ratios = np.full(6, 1.05)
    assert worth.in_time([1.0], [1.1], [], ratios).endswith(
        "one seed: no estimate of the time to the baseline's loss"
    )
    text = worth.in_time([1.0, 1.1], [1.1, 1.1], [1.0, 1.3], ratios)
    assert "what steps are worth is not resolved" in text and "about" not in text


def test_the_baseline_also_runs_with_fewer_steps(tmp_path, monkeypatch, capsys):
    """A script with --check has a length. It stands behind the common settings, so that it counts."""
    runs = []

    def train(script, preset, settings, seed):
        runs.append(" ".join(settings))
        return {"loss": 2.0 + seed, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    monkeypatch.setattr(ablations, "start", lambda *args: "")
    monkeypatch.setattr(ablations, "time_ratios", lambda *args: np.ones(6))
    script = tmp_path / "script.py"
    script.write_text('"--check"')
    options = ["x=1", "--script", str(script), "--seeds", "2", "--set", "length=0.5"]
    ablations.main(options + ["--out", str(tmp_path / "a.jsonl")])
    assert runs == 2 * ["length=0.5", "length=0.5 length=0.4", "length=0.5 x=1"]
    assert "| 0.8 of the steps |" in capsys.readouterr().out
    runs.clear()
    ablations.main(options + ["--losses-only", "--out", str(tmp_path / "b.jsonl")])
    assert runs == 2 * ["length=0.5", "length=0.5 x=1"]
    with pytest.raises(SystemExit, match="length=x"):
        ablations.main(options + ["length=x", "--out", str(tmp_path / "c.jsonl")])


def test_tiny_keeps_no_losses(tmp_path, monkeypatch, capsys):
    """Its settings stand before the user's, which therefore count."""
    runs = []

    def train(script, preset, settings, seed):
        runs.append(" ".join(settings))
        return {"loss": 4.321, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    script = tmp_path / "script.py"
    script.write_text("one")
    out = tmp_path / "out.jsonl"
    ablations.main(["x=1", "--tiny", "--script", str(script), "--out", str(out), "--set", "val_slices=2"])
    tiny = "length=0.05 warmup=false val_slices=4 samples=0 val_slices=2"
    assert runs == [tiny, f"{tiny} x=1"]
    printed = capsys.readouterr()
    assert "4.321" not in printed.out + printed.err
    assert not out.exists()


# It writes its id to a FIFO, and keeps that open for as long as it lives.
ENDLESS = """
import os, sys, time
fifo = os.open(os.environ["FIFO"], os.O_WRONLY)
os.write(fifo, b"started\\n")
time.sleep(3600)
"""


def read_until(fifo, end):
    """Returns what processes write to a FIFO until `end` has come, b"": until all of them are gone."""
    found = b""
    while not end or not found.endswith(end):
        ready, _, _ = select.select([fifo], [], [], WAIT)
        assert ready, f"{found} and nothing more in {WAIT} s"
        part = os.read(fifo, 4096)
        if not part:
            break
        found += part
    return found


@pytest.mark.parametrize("how", ("SIGTERM", "SIGINT", "SIGKILL"))
def test_an_end_ends_the_runs(tmp_path, how):
    """Two run at once, two wait. None trains on, none is begun, and no copies of scripts are left."""
    if how == "SIGKILL" and sys.platform != "linux":
        pytest.skip("only Linux kills a child with its parent")
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    folder = tmp_path / "temporary"
    folder.mkdir()
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    command = [
        sys.executable,
        ablations.__file__,
        "x=1",
        "--script",
        str(script),
        "--seeds",
        "2",
        "--jobs",
        "2",
    ]
    command += ["--out", str(tmp_path / "out.jsonl")]
    environment = os.environ | {"FIFO": str(path), "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        os.set_blocking(fifo, True)
        try:
            assert read_until(fifo, b"started\nstarted\n")
            process.send_signal(getattr(signal, how))
            assert read_until(fifo, b"") == b""  # both are gone, and no other has come
            errors = process.communicate(timeout=WAIT)[1]
        finally:
            process.kill()
    os.close(fifo)
    if how != "SIGKILL":
        assert process.returncode == 130
        assert errors.endswith("ablations.py: interrupted\n")
        assert not list(folder.iterdir())


@pytest.mark.slow
def test_real_runs_and_one_that_fails(tmp_path, monkeypatch, capsys):
    """With a copy of the script and with a setting. Times are printed for both."""
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "corpus")
    out = tmp_path / "out.jsonl"
    copy = tmp_path / "my_copy.py"
    copy.write_bytes(Path(tg.__file__).read_bytes())
    options = ["--script", tg.__file__, "--seeds", "1", "--out", str(out)]
    options += ["--set", "warmup=false", f"data={tmp_path}/corpus"] + TINY
    ablations.main([f"copy: {copy}", "adam_lr=0.1"] + options)
    entry = json.loads(out.read_text().splitlines()[0])
    printed = capsys.readouterr().out
    assert f"| as it is | {entry['loss']:.4f} |" in printed
    assert f"| copy | {entry['loss']:.4f} | +0.0000 |  | one seed: no error |" in printed
    assert len(re.findall(r"^(?:copy|adam_lr=0.1): its steps take \d\.\d+ ", printed, re.MULTILINE)) == 2
    assert sys.modules["train_gpt"] is tg
    assert f"val_loss:{entry['loss']}" in Path(entry["log"]).read_text()
    out.unlink()
    with pytest.raises(SystemExit, match="failed: train_gpt.py: error: padded_vocab "):
        ablations.main(["padded_vocab=9"] + options)
    assert not out.exists()  # the baseline did not run first
