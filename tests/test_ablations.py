"""Tests bench/ablations.py: pairs by seed, standard errors, what is not run again, and what ends it."""

import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats

import ablations
import train_gpt as tg
import worth
from launch import TINY, WAIT, make_corpus


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Goes to a folder with a script, and replaces its runs. Returns what was run: script, seed, settings."""
    runs = []

    def train(script, preset, settings, seed):
        runs.append((script.read_text(), seed, " ".join(settings)))
        loss = 2.0 - seed
        if "x=2" in settings:
            loss -= 0.25
        if "x=edit" in settings:
            script.write_text("two")
        if "x=nan" in settings:
            loss = math.nan
        return {"loss": loss, "log": "a.txt"}

    monkeypatch.setattr(ablations, "train", train)
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("one\n")
    return runs


def ablate(command):
    """Runs ablations.py with the script of `trained`."""
    ablations.main(shlex.split(f"{command} --script script.py"))


def test_a_difference_is_that_of_pairs():
    """Compares with scipy's paired t-test: t is the difference in standard errors."""
    rng = np.random.default_rng(1)
    base = rng.normal(1, 0.5, 7)
    losses = base - 0.1 + rng.normal(0, 0.01, 7)
    difference, error, p = ablations.paired(losses, base)
    test = scipy.stats.ttest_rel(losses, base)
    assert (difference / error, p) == pytest.approx((test.statistic, test.pvalue))
    assert difference == pytest.approx(np.mean(losses - base))
    # Pairs without spread; so written, their differences differ in the last bits.
    assert repr(ablations.paired([1.0533, 1.0446], [1.0523, 1.0436])) == "(0.001, nan, nan)"


def test_variants_run_seed_by_seed_and_not_again(trained, capsys):
    command = "'more: x=2 y=3' --set c=1 d=2 --set e=3 --seeds"
    base = "c=1 d=2 e=3"
    more = f"{base} x=2 y=3"
    ablate(f"{command} 2")
    assert trained == [("one\n", 0, base), ("one\n", 0, more), ("one\n", 1, base), ("one\n", 1, more)]
    assert "| more | 1.2500 | -0.2500 |  | no error: equal in all pairs |" in capsys.readouterr().out
    ablate(f"{command} 3")
    assert trained[4:] == [("one\n", 2, base), ("one\n", 2, more)]
    with pytest.raises(SystemExit, match="seed 0, x=nan: the loss is nan"):
        ablate("x=nan")


def test_a_variant_that_changes_nothing_is_refused(trained):
    with pytest.raises(SystemExit, match="again: it changes nothing"):
        ablations.main(["again: heads=4", "--set", "heads=4"])
    assert not trained


def test_runs_on_other_data_are_made_again(trained):
    """Or another vocabulary. The folder's name is the same. Whatever a variant's own data are, they count."""
    for folder in "ab":
        Path(folder).mkdir()
        Path(folder, "mine_train_000001.bin").write_text(folder)
    command = "x=1 data=b --seeds 1 --set data=a"
    ablate(command)
    Path("b/mine_train_000001.bin").write_text("other data")
    ablate(command)
    Path("b/vocabulary.txt").touch()
    ablate(command)
    assert [run[2] for run in trained] == ["data=a", "data=a x=1", *3 * ["data=a data=b"]]


@pytest.mark.parametrize(
    "line",
    (
        '{"run": ["0123", "cpu", "", 0], "lo',
        "",
        '{"run": 5, "loss": 2}',
        10**5 * "[",
        '{"run": ["1", "cpu", "", 0], "loss": true}',
        '{"run": ["0", "cpu", "", 0], "loss": 3.0}',
    ),
)
def test_a_line_that_is_no_run_is_named_before_any_run(trained, line):
    content = f'{{"run": ["0", "cpu", "", 0], "label": "a", "loss": 2.0}}\n{line}\n'
    Path("out.jsonl").write_text(content)
    with pytest.raises(SystemExit, match="^ablations.py: out.jsonl:2 is no run"):
        ablate("x=1 --out out.jsonl")
    assert Path("out.jsonl").read_text() == content and not trained


WRONG = {
    "'x: script.py other.py'": "there is no other.py",
    "'x: script.py script.py'": "names two scripts",
    "x=1 --out notes.md": "another kind of file",
}


@pytest.mark.parametrize("command", WRONG)
def test_odd_scripts_and_results_are_refused(trained, command, capsys):
    Path("notes.md").write_text("mine")
    with pytest.raises(SystemExit):
        ablate(command)
    assert WRONG[command] in capsys.readouterr().err and not trained


def test_without_scipy_nothing_is_trained(trained, monkeypatch):
    monkeypatch.setattr(ablations.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs scipy"):
        ablate("x=1")
    assert not trained


PATCH = """--- a/train_gpt.py
+++ b/train_gpt.py
@@ -1 +1 @@
-{}
+{}
"""


def test_a_patch_changes_a_copy_of_a_script(trained, tmp_path, monkeypatch):
    """A variant's patches are applied, in order, and its runs count as another script's. So do those of a
    variant's own script.
    """
    Path("two.patch").write_text(PATCH.format("one", "two"))
    Path("three.patch").write_text(PATCH.format("two", "three"))
    Path("other.py").write_text("two\n")
    subprocess.run(["git", "init", "-q"], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ablate("'patched: x=1 two.patch three.patch' 'other: other.py' --seeds 1")
    ablate("'again: x=1 two.patch three.patch' 'patched, too: other.py three.patch' --seeds 1")
    assert trained == [("one\n", 0, ""), ("three\n", 0, "x=1"), ("two\n", 0, ""), ("three\n", 0, "")]
    with pytest.raises(SystemExit, match="three.patch does not fit"):
        ablate("'x=1 three.patch'")
    Path("new.patch").write_text("--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+1\n")
    with pytest.raises(SystemExit, match="new.patch: no change of train_gpt.py"):
        ablate("'x=1 new.patch'")


def test_a_lower_loss_is_worth_steps():
    """A loss that falls evenly over the logarithm of the steps: an idea with the loss of 1 / 0.9 as many
    steps, whose steps take 6 % longer, needs 0.9 * 1.06 of the time.
    """
    noise = np.array([0.01, -0.02, 0.01])  # of the seeds, the same on both sides

    def losses(steps):
        return 1 - 0.2 * math.log(steps) + noise

    def estimate(steps, ratios):
        """Says what an idea is worth that has the loss of so many times the steps."""
        return worth.in_time(losses(steps), losses(1), losses(0.8), ratios)

    ratios = np.full(6, 1.06)
    text = estimate(1 / 0.9, ratios)
    assert "its steps take 1.060 +- 0.000 of the time" in text
    what = "about 5 % less time to the baseline's loss, in 90 % of the steps (95 %: 5 % less to 5 % less)"
    assert text.endswith(what)
    text = estimate(1 / 0.9, [0.8, 1, 1.2])
    assert re.search("loss: .* less to .* more .95 %., best guess 10 % less: undecided$", text)
    text = estimate(0.7, ratios)
    assert "about 51 % more time" in text and text.endswith(", extrapolated")
    assert estimate(2, ratios).endswith("a look at the future: python records/referee.py COPY.py")


def test_the_interval_of_the_time_holds_what_is_true():
    """In 300 simulated comparisons of three seeds, with the noise of the `cpu` preset's runs."""
    rng = np.random.default_rng(5)
    true = 100 * (1 - 0.95 * 1.03)
    held = 0
    for _ in range(300):
        seeds = rng.normal(0, 0.008, 3)
        found = []
        for steps in 1 / 0.95, 1, 0.8:
            found.append(1 - 0.2 * math.log(steps) + seeds + rng.normal(0, 0.004, 3))
        text = worth.in_time(*found, rng.normal(1.03, 0.02, 6))
        text = re.sub(r"(\d+) % more", r"-\1 % less", text)
        most, least = map(int, re.search(r"(-?\d+) % less to (-?\d+) % less", text).groups())
        held += least - 0.5 <= true <= most + 0.5
    assert 270 < held < 300


def test_without_seeds_or_a_slope_there_is_no_estimate():
    ratios = np.full(6, 1.05)
    assert worth.in_time([1.0], [1.1], [], ratios).endswith(
        "one seed: no estimate of the time to the baseline's loss"
    )
    text = worth.in_time([1.0, 1.1], [1.1, 1.1], [1.0, 1.3], ratios)
    assert "what steps are worth is not resolved" in text and "about" not in text


def test_the_baseline_also_runs_with_fewer_steps(trained, monkeypatch, capsys):
    """A script with --check has a length. It stands behind the common settings, so that it counts.

    The data are those of its own preset.
    """
    monkeypatch.setattr(ablations, "start", lambda *args: "")
    monkeypatch.setattr(ablations, "what_losses_are_of", lambda *args: {"data": "mine"})
    monkeypatch.setattr(ablations, "time_ratios", lambda *args: np.ones(6))
    Path("script.py").write_text('"--check"')
    ablate("x=1 --seeds 2 --set length=0.5")
    assert [run[2] for run in trained] == 2 * ["length=0.5", "length=0.5 length=0.4", "length=0.5 x=1"]
    assert "| 0.8 of the steps |" in capsys.readouterr().out
    trained.clear()
    Path("mine").mkdir()
    Path("mine/vocabulary.txt").touch()
    ablate("x=1 --seeds 2 --set length=0.5 --losses-only")
    assert [run[2] for run in trained] == 2 * ["length=0.5", "length=0.5 x=1"]


def test_a_script_that_is_edited_meanwhile_is_refused(trained):
    with pytest.raises(SystemExit, match="script.py was edited while it ran"):
        ablate("x=edit --seeds 3")


def test_losses_of_another_validation_are_refused(trained, monkeypatch):
    monkeypatch.setattr(ablations, "start", lambda *args: "")
    with pytest.raises(SystemExit, match="b: its losses are of other data or another validation"):
        ablations.main(["b: val_slices=2"])
    assert not trained


def test_tiny_keeps_no_losses(trained, capsys):
    """Its settings stand before the user's, which therefore count. But the length stays, unless it is a word
    that the script will refuse.
    """
    ablate("x=2 --tiny --set val_slices=2 length=0.9 'length=1 y'")
    tiny = "length=0.05 warmup=false val_slices=4 samples=0 val_slices=2 length=1 y"
    assert [run[2] for run in trained] == [tiny, f"{tiny} x=2"]
    assert "1.75" not in str(capsys.readouterr())
    assert not Path("ablations.jsonl").exists()


def timer_of(counts):
    """Stands in for the timer of a script whose stages have so many steps, of 1 ms each."""
    stages = tuple(replace(tg.CPU.stages[0], steps=steps) for steps in counts)
    timer = Mock(Variant=lambda name, cfg, device: cfg)
    timer.Training = lambda cfg, *_: Mock(cfg=cfg, pairs=lambda: np.ones(worth.PAIRS))
    timer.tg.PRESETS = {"cpu": replace(tg.CPU, stages=stages)}
    return timer


@pytest.mark.parametrize("counts, ratio", (((2,), 0.2), ((2, 3, 5, 0, 10), 2.0)))
def test_variants_may_have_other_stages(monkeypatch, counts, ratio):
    """The baseline has 10 steps in four stages."""
    monkeypatch.setattr(worth, "timer_of", timer_of)
    sides = worth.Side((1, 2, 3, 4), []), worth.Side(counts, [])
    assert worth.time_ratios("cpu", *sides) == pytest.approx(ratio)


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


@pytest.mark.parametrize("how", ("SIGTERM", "SIGKILL"))
def test_an_end_ends_the_runs(tmp_path, how):
    """Two run at once, two wait. None trains on, and none is begun."""
    if how == "SIGKILL" and sys.platform != "linux":
        pytest.skip("only Linux kills a child with its parent")
    (tmp_path / "script.py").write_text(ENDLESS)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, ablations.__file__, *"x=1 --script script.py --seeds 2 --jobs 2".split()]
    environment = os.environ | {"FIFO": str(path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=pipe, text=True) as process:
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


@pytest.mark.long
def test_real_runs_and_one_that_fails(tmp_path, monkeypatch, capsys):
    """With the script itself and with a setting. Times are printed for both, of more steps than a run has."""
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "corpus")
    options = ["--script", tg.__file__, "--seeds", "1", "--set", "warmup=false", "data=corpus", *TINY]
    options += ["ngrams.orders=2", "ngrams.rows_per_order=64", "ngrams.width=16"]
    ablations.main([f"copy: {tg.__file__}", "adam_lr=0.1", *options])
    out = Path("ablations.jsonl")
    entry = json.loads(out.read_text().splitlines()[0])
    printed = capsys.readouterr().out
    assert f"| copy | {entry['loss']:.4f} | +0.0000 |  | one seed: no error |" in printed
    assert len(re.findall(r"\n(?:copy|adam_lr=0.1): its steps take \d\.\d+ ", printed)) == 2
    assert f"val_loss:{entry['loss']}" in Path(entry["log"]).read_text()
    out.unlink()
    with pytest.raises(SystemExit, match="failed: train_gpt.py: error: padded_vocab "):
        ablations.main(["padded_vocab=9", *options])
    assert not out.exists()  # the baseline did not run first
