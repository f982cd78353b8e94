"""Tests records/compare.py: log formats and their traps, statistics, reports, what --update makes."""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import compare
import numpy as np
import pytest
import referee
from compare import MeanPoint, Point
from matplotlib.figure import Figure
from tracks import TRACKS

ROOT = Path(compare.__file__).resolve().parent.parent
FIXTURES = json.loads((ROOT / "tests" / "log_fixtures.json").read_text())
SEEDS = itertools.count()  # distinct: runs of one seed in a group cause a warning
HEADER = """Running Python 3.12.7
Running PyTorch 2.13.0 compiled for CUDA 12.8 on NVIDIA H100 with world_size 8
commit: 12ab (clean)
script: train_gpt.py (sha256 0123)"""
ON_A100 = HEADER.replace("H100", "A100")
LOOK_ALIKES = '''import torch
print0(f"step:{step}/{steps} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms step_avg:{avg:.2f}ms")
print0(f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda}")
"""The lines this script writes look like this:
step:250/1480 val_loss:4.5452 train_time:8488ms step_avg:33.95ms
peak memory allocated: 1 MiB reserved: 2 MiB
"""
step:{step}/{steps} val_loss:{loss}
====================
'''
SMI = """+-----------------------------------------+
| NVIDIA-SMI 550.127.05             Driver Version: 550.127.05     CUDA Version: 12.6     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |                    0 |
| N/A   28C    P0            124W /  700W |    7746MiB /  81559MiB |      0%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:62:00.0 Off |                    0 |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |"""

# Published runs: five of a change and three of its baseline (seconds).
LOSSES = [3.2789, 3.2772, 3.2804, 3.277, 3.2792]
TIMES = [95.168, 95.219, 95.069, 95.277, 95.303]
BASE_LOSSES = [3.2781, 3.2790, 3.2776]
BASE_TIMES = [95.972, 95.914, 95.985]


def steps(loss=3.2785, seconds=95.0, total=500, first=0, last=None, validate_last=True):
    """Returns lines of steps `first` to `last` (default: all), validated every 125 steps and at the end."""
    last = last or total
    lines = []
    for step in range(first, last + 1, 25):
        average = "9.00" if step else "nan"
        time = f"train_time:{seconds * 1000 * step / total:.0f}ms step_avg:{average}ms"
        if step:
            lines.append(f"step:{step}/{total} {time}")
        value = None
        if step < last and step % 125 == 0:
            value = 11 - 7 * step / total
        if step == last and validate_last:
            value = loss
        if value is not None:
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} {time}")
    return "\n".join(lines)


RULE = "=" * 100


def own_log(
    loss=3.2785,
    seconds=95.0,
    source="import torch\n",
    header=HEADER,
    config=(),
    data="ab12 (9 tokens)",
    closing="val_loss_per_byte: 0.9\ncomplete: yes\n",
    **options,
):
    """Returns a log as train_gpt.py writes it."""
    settings = TRACKS["gpt2-small"] | {"track": "gpt2-small", "preset": "record", "length": 1.0}
    settings |= {"seed": next(SEEDS)} | dict(config)
    config = f"config: {json.dumps(settings)}\ndata: {data}"
    ending = f"peak memory allocated: 31253 MiB reserved: 46520 MiB\n{closing}"
    return f"{source}\n{RULE}\n{header}\n{config}\n{RULE}\n{steps(loss, seconds, **options)}\n{ending}"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Returns a function that runs compare.py in an empty folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(command):
        code = compare.main(shlex.split(command))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def write(folder, *texts):
    """Writes logs 0.txt, 1.txt, ...; of a number, our log with this loss."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        if isinstance(text, float):
            text = own_log(text, 90 + i)
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")


def write_runs(folder, losses, times, **options):
    """Writes our logs 0.txt, 1.txt, ... with these losses and times (s)."""
    logs = []
    for loss, time in zip(losses, times, strict=True):
        logs.append(own_log(loss, time, **options))
    write(folder, *logs)


def write_referee(folder, script_hash="0123", preset="record", **results):
    """Writes a referee.txt that says ok to every rule but those that are given."""
    lines = [f"script: train_gpt.py sha256 {script_hash:0<64}", f"preset: {preset}", "log: 0.txt", ""]
    for i, rule in enumerate(referee.RULES, 1):
        lines.append(f"{i:2}  {rule:30} {results.get(rule, 'ok')}")
    Path(folder, referee.FILE_NAME).write_text("\n".join(lines) + "\n")


def last_line(run, command):
    """Returns the last line of what compare.py prints, which is the verdict."""
    return run(command)[1].splitlines()[-1]


def read(text):
    """Returns the runs in a log, and the notes on it."""
    Path("log").write_text(text)
    return compare.read_log("log")


def read_group(path="."):
    """Returns the group of the logs at `path`."""
    (group,), _ = compare.read_groups([path], None)
    return group


def read_json(run, command):
    code, out, err = run(f"{command} --json")
    assert code == 0, err
    return json.loads(out), err


# ------------------------------------------------------------------------------------------------------- logs


def text_of(fixture, end="\n"):
    """Returns the lines of a fixture, each with this end."""
    return end.join(fixture["tail"]) + end


@pytest.mark.parametrize("fixture", FIXTURES, ids=[f["expect"]["format_era"] for f in FIXTURES])
def test_formats_and_odd_lines(run, fixture):
    want = fixture["expect"]
    no_final_newline = text_of(fixture).removesuffix("\n")
    for text in (no_final_newline, text_of(fixture), text_of(fixture, "\r\n")):
        (found,), notes = read(text)
        for name in ("final_step", "total_steps", "peak_mem_mib", "complete"):
            assert getattr(found, name) == want[name]
        assert (found.val_loss, notes) == (want["final_val_loss"], [])
        time = want["final_train_time_ms"]
        assert found.train_time_s == (time and pytest.approx(time / 1000))
        if "training" in want:
            training = list(map(Point._make, want["training"]))
            assert repr(found.training) == repr(training)  # nan is not equal to nan


def test_any_number_of_rules_may_follow_the_source(run):
    version = "Running pytorch 2.6.0.dev20241231+cu126 compiled for CUDA 12.6"
    text = LOOK_ALIKES
    for count, block in enumerate(["Running Python 3.12.7", version, SMI, ""]):
        text += f"\n{RULE}\n{block}"
        (found,), notes = read(f"{text}\n{steps(3.27, 90)}")
        assert (found.final_step, found.val_loss, found.peak_mem_mib, notes) == (500, 3.27, None, [])
        assert found.header.torch == ("2.6.0.dev20241231+cu126" if count else None)
        assert found.header.hardware == ("2 x NVIDIA H100 80GB HBM3" if count > 1 else None)


SCREENS = [  # what a line becomes
    "\x1b[1;32m{}\x1b[0m\x1b(B",
    "[default0]:{}",
    "[rank0]: {}",
    "\r 38%|#  | 3/8 [00:12<00:20]\r      \r{}",
    "[default0]: 38%|#  | 3/8 [00:12<00:20][default0]:{}",
    "12:00:01 {}",
    "2026-11-27T10:00:00.123Z {}",
    "[2026-11-27 10:00:00] {}",
    "2026-11-27 10:00:00,123 [rank0]: {}",
    "Nov  7 10:00:00 host run[12]: {}",
]


def test_what_screens_and_launchers_do_to_lines(run):
    closing = "peak memory allocated: 9 MiB\nepochs: 2\ntarget 1.07: above"
    text = f"{HEADER}\n{steps()}\n{closing}"
    (plain,), _ = read(text)
    assert (plain.curve[-1].loss, plain.peak_mem_mib, plain.target, plain.epochs) == (3.2785, 9, 1.07, "2")
    for form in SCREENS:
        assert read("\n".join(map(form.format, text.splitlines()))) == ([plain], []), form


def test_what_a_verdict_needs_is_read_after_any_text(run):
    """Losses, epochs and the target, though not the rest."""
    text = f"{HEADER}\n{steps()}\nepochs: 2\ntarget 1.07: above"
    (found,), _ = read("\n".join(f"INFO trainer {line}" for line in text.splitlines()))
    assert (found.curve[-1].loss, found.target, found.epochs, found.counted) == (3.2785, 1.07, "2", False)


def test_without_a_target_there_is_no_verdict(run):
    """A target that is no number, or none above 0, is none."""
    Path("screen.log").write_text(f"{steps(3.2)}\ntarget nan: not below\ntarget 0.0: not below\n")
    Path("other.log").write_text(steps(3.1))
    code, out, _ = run("a=screen.log a=other.log")
    assert code == 0 and re.findall("verdict +(.*?):", out) == ["no log names a target"]
    (group,) = read_json(run, "a=screen.log a=other.log")[0]["groups"]
    assert (group["p_target"], group["meets_target"]) == (None, False)
    assert "below the target 3.28" in run("a=screen.log a=other.log --target 3.28")[1]


@pytest.mark.parametrize(
    "line",
    [
        "step:250/500 val_lo",
        "ep:250/500 val_loss:3.2 train_time:9ms step_avg:9ms",
        "step:250/500 val_loss:3,2 train_time:9ms step_avg:9ms",
    ],
)
def test_a_validation_that_cannot_be_read_is_named(run, line):
    first, rest = own_log(3.27, 90).split("\nstep:375", 1)
    Path("log").write_text(f"{first}\n 9%|\r{line}\nstep:375{rest}")
    code, out, err = run("log")
    assert (code, "3.2700" in out) == (2, True)
    assert err == f"compare.py: log:{first.count(chr(10)) + 2}: cannot read this validation: {line!r}\n"


@pytest.mark.parametrize("value", ["-95000ms", "nanms", "9,5ms"])
def test_a_time_that_is_none_is_named(run, value):
    """A negative time would make any group a faster one."""
    text = own_log(3.27, 95)
    log = re.sub(r"(val_loss:3.2700 train_time:)\S+", rf"\g<1>{value}", text)
    assert log != text
    Path("log").write_text(log)
    code, out, err = run("log")
    assert (code, "cannot read this validation" in err, "no run of log counts" in out) == (2, True, True)


@pytest.mark.parametrize("value", ["-3.27", "-inf", "-1e3"])
def test_a_negative_loss_is_named(run, value):
    Path("log").write_text(own_log(3.27, 95).replace("val_loss:3.2700", f"val_loss:{value}"))
    code, _, err = run("log")
    assert code == 2 and "cannot read this validation" in err


OURS = text_of(FIXTURES[-3])
LATE = text_of(FIXTURES[-2])
LLMC = "s:0 trl:11.5 lr:0\ns:1 tel:11.0\ns:1 trl:10.5 lr:0\ns:500 tel:3.27\n"


def test_several_runs_in_a_file(run):
    """Also one whose first step is not below the last one's, since its number of steps is another."""
    text = own_log(3.27, 90) + own_log(3.26, 91, header=HEADER.replace("2.13.0", "2.14.0"))
    text += steps(3.25, 92, total=400, first=25) + f"\n{HEADER}\n{steps(3.24, 93)}\n"
    # The end is repeated, with closing lines.
    text += "\n".join(text.splitlines()[-4:]) + "\npeak memory allocated: 77 MiB reserved: 88 MiB\n"
    runs, notes = read(text)
    form = "{0.val_loss} {0.train_time_s} {0.total_steps} {0.header.torch} {0.peak_mem_mib}".format
    assert list(map(form, runs)) == [
        "3.27 90.0 500 2.13.0 31253",
        "3.26 91.0 500 2.14.0 31253",
        "None None 400 2.14.0 None",  # the header before it, whose config means that it must be closed
        "3.24 93.0 500 2.13.0 77",
    ]
    assert [r.index for r in runs if r.complete] == [0, 1, 3] and len(notes) == 1
    (late, ours), _ = read(LATE + OURS)
    assert [point.step for point in late.training] == [1, 3]
    assert [point.step for point in ours.training] == [1, 2]


# ----------------------------------------------------------------------------------------------------- groups


def test_paths_and_labels(run):
    write("my runs/baseline", 3.30)
    write("my runs", 3.27, 3.26, "no log at all")
    Path("my runs/README.md").write_text(steps(1.0))
    Path("lr=2.txt").write_text(own_log(3.25))
    write("rec/this pr", 3.24)
    write("rec", "torch==2.13.0\n")  # a .txt, but no log
    write("other/my runs", 3.23)
    paths = (
        "'new=my runs' 'my runs/[01].txt' lr=2.txt 'old=my runs/baseline' 'my runs' new=rec 'other/my runs'"
    )
    out, _ = read_json(run, paths)
    assert [f"{g['label']}: {g['n']} {g['loss_mean']:.3f}" for g in out["groups"]] == [
        "new: 3 3.257",
        "my runs/[01].txt: 2 3.265",
        "lr=2: 1 3.250",
        "old: 1 3.300",
        "my runs: 2 3.265",
        "other/my runs: 1 3.230",
    ]
    for name in "01":
        Path(f"my runs/{name}.txt").unlink()
    assert run("'my runs'")[0] == 2  # a record is not its baseline


def test_repeats_are_dropped_and_named(run):
    write_runs("runs", [3.27, 3.27, 3.28, 3.27], [90, 90, 90, 91])
    Path("runs/10.stdout").write_text(steps(3.28, 90))  # sorts before the log, and has no header
    out, err = read_json(run, "runs")
    assert [r["path"] for r in out["groups"][0]["runs"]] == ["runs/0.txt", "runs/2.txt", "runs/3.txt"]
    assert "runs/1.txt: dropped, the same run as runs/0.txt" in err
    assert "runs/10.stdout: dropped, the same run as runs/2.txt" in err


WHICH = {  # a log; its loss, time, whether it is complete; a note
    own_log(last=150, validate_last=False, closing=""): "None None False: incomplete",
    own_log(3.2, 80, closing="epochs: 2\ncomplete: yes\n"): "None None False: 2 epochs",
    own_log(3.2, 80, closing=""): "None None False: complete: yes",
    f"{HEADER}\n{steps(3.2, 80, last=450)}": "None None False: incomplete",  # our screen
    steps(3.2, 90, last=450): "3.2 81.0 False: stopped",
    own_log(math.nan, 80, closing="epochs: 1\ncomplete: yes\n"): "None 80.0 True: ",
}


def test_which_runs_count(run):
    for text, expected in WHICH.items():
        write("runs", 3.27, text)
        out, err = read_json(run, "runs")
        (group,) = out["groups"]
        found, note = expected.split(": ", 1)
        assert "{val_loss} {train_time_s} {complete}".format_map(group["runs"][1]) == found
        assert group["n"] == 2 - found.startswith("None None") and note in err and bool(note) == bool(err)
    # The last has diverged, which counts against its group.
    assert (group["loss_mean"], group["p_target"], group["meets_target"]) == (None, None, False)


CLOSINGS = {  # lines after the last step; why the run is left out
    "val_loss: 3.269951\n": "",
    "val_loss: 3.2601\n": "its line 'val_loss: 3.2601' contradicts 3.27 before it",
    "val_loss: nan\n": "its line 'val_loss: nan' contradicts",
    "val_loss: low\n": "its line 'val_loss: low' contradicts",
    "train_time_ms: 95000\n": "",
    "train_time_ms: 94999\n": "its line 'train_time_ms: 94999' contradicts 95000 before it",
    "steps: 499\n": "its line 'steps: 499' contradicts 500",
    "epochs: 1\n": "",
    "epochs: 3\n": "trained in 3 epochs",
    "epochs: two\n": "trained in two epochs",
    "epochs: 2\nepochs: 1\n": "trained in 2 and 1 epochs",
    "complete: no\n": "without 'complete: yes'",
    "steps: 500\nsteps: 400\n": "'steps: 500 and 400' contradicts",
    "epochs: 1.5\n": "trained in 1.5 epochs",
    "epochs: -1\n": "trained in -1 epochs",
    "epochs:\n": "",  # no line of ours
}


@pytest.mark.parametrize("line", CLOSINGS)
def test_a_closing_line_that_says_something_else_voids_the_run(run, line):
    Path("log.txt").write_text(own_log(3.27, 95, closing=f"{line}complete: yes\n"))
    code, out, _ = run("log.txt")
    reason = CLOSINGS[line]
    assert code == 0
    if reason:
        assert out.startswith("no run of log counts (") and reason in out
    else:
        assert "losses             3.2700" in out


def test_edited_lines_before_the_closing_ones_void_the_run(run):
    text = own_log(3.27, 95)
    line = "step:500/500 train_time:95000ms step_avg:9.00ms\n"
    assert line in text
    later = line.replace("95000", "95100").replace("\n", " train_loss:3.3000@500\n")
    Path("log.txt").write_text(text.replace(line, later))
    code, out, _ = run("log.txt")
    assert code == 0 and "a step ended after 95.1 s, and its last validation says 95 s" in out
    Path("log.txt").write_text(text.replace("\nconfig: ", '\nconfig: {"target": 4.0}\nconfig: '))
    code, _, err = run("log.txt")
    assert code == 2 and "log.txt: it has config lines that differ" in err


def test_a_diverged_run_agrees_with_its_closing_line(run):
    """It counts against its group."""
    Path("log.txt").write_text(own_log(math.nan, 95, closing="val_loss: nan\ncomplete: yes\n"))
    assert "runs (n)           1" in run("log.txt")[1]


def test_a_group_without_runs_that_count_says_so_and_nothing_else(run):
    write("a", 3.27, 3.26)
    write("b", *[own_log(3.2, 80, closing="epochs: 2\ncomplete: yes\n")] * 2)
    for command in ("a b", "b a"):
        code, out, _ = run(command)
        text = "no run of b counts (trained in 2 epochs)\n"
        parts = out.strip().split("\n\n")
        assert code == 0 and len(parts) == 2 and text.strip() in parts
    out, _ = read_json(run, "a b")
    (comparison,) = out["comparisons"]
    assert (comparison["record"], comparison["because"]) == (False, text.strip())


OWN_TEXT = {"track": "other", "data": "data/mine", "target": 1.07}


def test_a_small_text_is_compared_without_a_target(run):
    """Its runs read it in several epochs. They are no record, and nothing says that they should be one."""
    for name, loss in ("a", 2.1), ("b", 2.0):
        texts = []
        for i in range(3):
            closing = "epochs: 5\ncomplete: yes\n"
            texts.append(own_log(loss + i / 100, 90 + i, config=OWN_TEXT, closing=closing))
        write(name, *texts)
    code, out, _ = run("a b")
    assert code == 0 and out.count("runs (n)           3") == 2 and out.count("trained in 5 epochs") == 2
    assert "  loss    -0.1000               -12.25" in out
    for word in ("target", "verdict", "record:", "1.07"):
        assert word not in out
    assert "below the target 3" in run("a b --target 3")[1]


MIXED = [  # what the second of two runs has, and the warning
    (dict(total=525), "steps (500; 525)"),
    (
        dict(header=HEADER.replace("0123", "45")),
        "scripts (train_gpt.py (sha256 0123); train_gpt.py (sha256 45))",
    ),
    (dict(config={"track": "other"}), "tracks (gpt2-small; other)"),
    (dict(header=ON_A100), "hardware (8 x NVIDIA A100; 8 x NVIDIA H100)"),
    (dict(config={"val_slices": 64}), "val_slices (40; 64)"),
    (dict(data="cd34 (9 tokens)"), "data (ab12; cd34)"),
    (dict(config={"target": 2.92}), "targets (2.92; 3.28)"),
]


def test_warnings_about_what_is_mixed(run):
    write("base", own_log(3.27, 90, config={"seed": 3}), own_log(3.27, 91, config={"seed": 4}))
    for change, warning in MIXED:
        write("mixed", own_log(3.27, 92), own_log(3.26, 93, **change))
        name = warning.partition(" ")[0]
        _, err = read_json(run, "base mixed")
        assert f"mixed: its runs differ in {warning}\n" in err and "warning: base" not in err
        within_only = name in ("steps", "scripts", "tracks")
        assert (f"mixed: it differs from base in {name}\n" in err) != within_only
    assert "the target 2.92" in run("mixed")[1]  # the lowest
    # Seeds may repeat between groups, but not within one.
    write("mixed")
    for i, seed in enumerate([3, 4, 3, 3]):
        Path(f"mixed/{i}.txt").write_text(own_log(3.26, 90 + i, config={"seed": seed}))
    assert read_json(run, "base mixed")[1].count("warning") == 1


RECORDS = [  # which logs are changed, how; whether the group `new` is a record over `base`, None: not said
    ("new", {}, "yes"),
    ("new", {"total": 400}, "yes"),
    ("new/4", {"closing": "", "loss": 3.4}, "yes"),  # left out
    ("new/4", {"total": 400}, "no"),
    ("new", {"loss": 3.28}, "no"),
    ("new", {"seconds": 94.99}, "no"),
    ("new", {"seconds": 99}, "no"),
    ("new", {"config": {"seed": 1}}, "no"),
    ("new", {"config": {"track": "other"}}, "no"),
    ("", {"config": {"track": "other"}}, None),
    ("new/4", {"config": {"track": None}}, "no"),
    ("base", {"header": HEADER.replace("world_size 8", "world_size 4")}, "no"),
]


def test_record(run):
    for changed, change, answer in RECORDS:
        for group, seconds in (("base", 95), ("new", 90)):
            write(group)
            for i in range(5):
                name = f"{group}/{i}.txt"
                options = {"loss": 3.27, "seconds": seconds}
                if name.startswith(changed):
                    options |= change
                options["loss"] += i / 999
                options["seconds"] += i / 9
                Path(name).write_text(own_log(**options))
        write_referee("new")
        out = run("base new --target 9")[1]  # a record is of the track's target
        answers = re.findall("^record: (.*?), because", out, re.MULTILINE)
        assert answers == ([answer] if answer else []), change
        assert ("steps and base 500" in out) == ("total" in change)


EDITED = {  # a setting of the preset in the log; what the verdict says of it
    "target": (3.5, "target is 3.5, not 3.28"),
    "val_slices": (1, "val_slices is 1, not 40"),
    "val_slice_tokens": (4096, "val_slice_tokens is 4096, not 262144"),
    "vocab_size": (257, "vocab_size is 257, not 50257"),
    "data": ("data/mine", "data is data/mine, not data/fineweb10B"),
}


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_preset_is_not_of_the_track(run, name):
    """Whatever the log says: it would call itself below a target of its own."""
    value, reason = EDITED[name]
    for group, seconds in (("base", 95), ("new", 90)):
        write_runs(group, LOSSES, [seconds + i / 9 for i in range(5)], config={name: value})
    write_referee("new")
    assert f"record: no, because not of the track `gpt2-small`: {reason}; of base: not " in last_line(
        run, "base new"
    )


def test_a_slower_group_is_above_its_baseline(run):
    """The p of such a difference may be small, too."""
    write_runs("base", [3.27, 3.271, 3.272], [90, 90.1, 90.2])
    write_runs("new", [3.27, 3.271, 3.273], [99, 99.1, 99.2])
    assert "the mean time is above base's, although the mean loss" in last_line(run, "base new")


def test_logs_that_name_no_track_are_no_record_of_this_project(run):
    """Those of the public speedrun. What they show is said all the same."""
    for group, seconds in (("old", 95), ("new", 90)):
        texts = []
        for i in range(4):
            texts.append(steps(3.27 + i / 1000, seconds + i / 9))
        write(group, *texts)
    assert last_line(run, "old new --target 3.28") == (
        "faster to the target (the logs name no track): yes, because the mean loss is below the target 3.28 "
        "(p 0.0005 < 0.01) and the mean time is below old's (p 4.6e-09 < 0.01)"
    )
    assert read_json(run, "old new --target 3.28")[0]["comparisons"][0]["record"] is False


def write_pair_of_groups(base, new):
    """Writes two groups of the same seeds: that of a record, if these are its folders."""
    for folder, seconds in ((base, 95), (new, 90)):
        texts = []
        for i in range(4):
            texts.append(own_log(3.27 + i / 1000, seconds + i / 9, config={"seed": i}))
        write(folder, *texts)


REFEREES = {  # what referee.txt says; what the verdict says
    "ok": ({}, "yes, because the mean loss"),
    "other script": ({"script_hash": "4567"}, "no, because there is no new/referee.txt of this script: "),
    "other preset": ({"preset": "cpu"}, "no, because there is no new/referee.txt of this script: "),
    "broken": ({"causal": "broken: at 7"}, "no, because new/referee.txt does not say ok to each rule"),
    "not shown": (
        {"the clock": "not shown: why"},
        "no, because new/referee.txt does not say ok to each rule",
    ),
}


@pytest.mark.parametrize("says, answer", REFEREES.values(), ids=REFEREES)
def test_a_record_needs_the_referee(run, monkeypatch, says, answer):
    monkeypatch.setattr(referee, "PRESETS", ["record"])
    write_pair_of_groups("base", "new")
    write_referee("new", **says)
    assert last_line(run, "base new").startswith(f"record: {answer}")
    assert "referee.txt" not in run("new")[1]  # it is no log


def test_presets_without_a_referee_need_none(run):
    write_pair_of_groups("base", "new")
    assert last_line(run, "base new").startswith("record: yes")


def test_the_referees_command_is_named_when_all_else_is_shown(run, monkeypatch):
    monkeypatch.setattr(referee, "PRESETS", ["record"])
    write_pair_of_groups("base", "new")
    command = "python records/referee.py train_gpt.py --preset record --log new/0.txt"
    assert f"no new/referee.txt of this script: `{command}` makes it, although the mean" in last_line(
        run, "base new"
    )
    write("new", own_log(3.4, 90.0, config={"seed": 0}))
    assert "referee" not in last_line(run, "base new")


def test_a_run_in_both_groups_makes_no_record(run):
    write_pair_of_groups("base", "new")
    write_referee("new")
    shutil.copy("base/0.txt", "new/4.txt")
    assert "1 of its runs are base's, too; " in last_line(run, "base new")
    Path("new/4.txt").write_text(steps(3.27, 95))  # what it printed on the screen
    assert "1 of its runs are base's, too; " in last_line(run, "base new")


def test_no_percentage_between_machines_or_data(run):
    write("a", own_log(3.27, 90))
    write("same", own_log(3.27, 91))
    write("packed", own_log(3.27, 91, data="ab12 (9 tokens), packed otherwise"))
    write("machines", own_log(3.27, 91, header=ON_A100))
    write("data", own_log(3.27, 91, data="cd34 (9 tokens)"))
    Path("public.txt").write_text(steps(3.27, 91))  # says neither
    for alike in ("same", "packed", "public.txt"):
        assert "(+1.11 %)" in run(f"a {alike}")[1]
    for other, name in (("machines", "hardware"), ("data", "data")):
        out = run(f"a same {other}")[1]
        assert re.match(f"warning: .*{name}", out) and " %" not in out and "+1.000 s" in out
        assert run(f"a same {other} --anyway")[1].count("(+1.11 %)") == 2


def test_a_records_readme_is_begun_once(run, monkeypatch):
    folder = "2026-11-24_My_Idea"
    readme = Path(folder, "README.md")
    write(folder, 3.27, 3.26)
    table = run(folder)[1]
    monkeypatch.setenv("RUN_COMMAND", "./run.sh --name My_Idea")
    for command in ("    ./run.sh --name My_Idea\n\n", ""):
        code, out, _ = run(f"--begin {folder}")
        assert code == 0 and out.endswith(table)
        assert readme.read_text() == (
            "# My_Idea\n\n![Losses over steps and over training time](curves.png)\n\n"
            f"(What was changed, against which record, and why.)\n\n{command}"
            f"What `python records/compare.py {folder}` prints:\n\n{textwrap.indent(table, '    ')}"
        )
        readme.write_text("mine")
        assert run(f"--begin {folder}")[0] == 0 and readme.read_text() == "mine"
        readme.unlink()
        monkeypatch.delenv("RUN_COMMAND", raising=False)
    write(f"{folder}/baseline", 3.29)
    run(f"--begin {Path(folder).absolute()}/")
    compared = readme.read_text()
    assert f"compare.py {folder}/baseline {folder}`" in compared and "record: no" in compared
    readme.unlink()
    write(folder, "config: {broken}\n" + steps())
    assert run(f"--begin {folder}")[0] == 2 and not readme.exists()


# -------------------------------------------------------------------------------------- a run in several logs

RESUMED = {
    # Logs of seed 1: name, seconds, resumed after, last step, whether that is validated. The one that counts;
    # its curve: step, seconds of the log that it is from
    "the first went further": (
        "seed1 90 0 375 1, seed1.from100 91 100 250 1",
        "seed1: 125 90, 250 90, 375 90",
    ),
    "twice": (
        "seed1 90 0 225 0, seed1.from100 91 100 375 1, seed1.from100_2 92 100 250 1, "
        "seed1.from300 93 300 500 1",
        "seed1.from300: 125 91, 250 91, 375 93, 500 93",
    ),
}


def write_resumed(name, seconds, after, last, validated):
    """Writes the log of a run of seed 1 that was resumed after this step; 0: that began."""
    data = "ab12"
    if after:
        data += f"\nresumed: seed1 after step {after}; by another script"
    closing = "complete: yes\n" if last == 500 else ""
    first = math.ceil(after / 125) * 125
    text = own_log(3.0, seconds, data=data, closing=closing, first=first, last=last, validate_last=validated)
    Path(f"{name}.txt").write_text(text)


@pytest.mark.parametrize("logs, counts", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_counts_once(run, logs, counts):
    names = []
    for log in logs.split(","):
        name, seconds, after, last, validated = log.split()
        names.append(f"{name}.txt")
        write_resumed(name, int(seconds), int(after), int(last), bool(int(validated)))
    Path("seed2.txt").write_text(own_log(3.1, 95))
    group = read_group()
    kept, other = group.runs
    points = []
    for point in kept.curve:
        if point.step:
            points.append(f"{point.step} {500 * point.time_s / point.step:.0f}")
    assert f"{Path(kept.path).stem}: {', '.join(points)}" == counts
    assert other.val_loss == 3.1
    (joined,) = [note for note in group.notes if "resumed, one run with" in note]
    for name in names:
        assert name in joined


def test_training_losses_of_a_resumed_run_are_those_of_what_went_on(run):
    """Checks that those of the first log end with the checkpoint's step."""
    Path("seed1.txt").write_text(f"config: {{}}\n{OURS}")
    Path("seed1.from1.txt").write_text(
        f"config: {{}}\nresumed: seed1 after step 1\n{LATE.replace('@1', '@2')}"
    )
    assert [point[:2] for point in read_group().runs[0].training] == [(1, 5.5), (2, 5.5), (3, 3.5)]


# ------------------------------------------------------------------------------------------------- statistics


REPORT = """old
  runs (n)           3
  steps              500
  length             1.0
  loss: mean, sd     3.2782, 0.0007
  loss per byte      0.9000
  time, s: mean, sd  95.957, 0.038
  peak memory        31253 MiB
  hardware           8 x NVIDIA H100
  torch              2.13.0
  script             train_gpt.py (sha256 0123)
  p (mean < target)  0.0249
  verdict            the mean loss is not shown to be below the target 3.28 (p 0.0249, needs < 0.01)
  losses             3.2781 3.2790 3.2776
  times, s           95.972 95.914 95.985

new
  runs (n)           5
  steps              500
  length             1.0
  loss: mean, sd     3.2785, 0.0014
  loss per byte      0.9000
  time, s: mean, sd  95.207, 0.093
  peak memory        31253 MiB
  hardware           8 x NVIDIA H100
  torch              2.13.0
  script             train_gpt.py (sha256 0123)
  p (mean < target)  0.0423
  verdict            the mean loss is not shown to be below the target 3.28 (p 0.0423, needs < 0.01)
  losses             3.2789 3.2772 3.2804 3.2770 3.2792
  times, s           95.168 95.219 95.069 95.277 95.303

new against old
          difference            Welch t    df      p (two-sided)
  time    -0.750 s (-0.78 %)    -15.92     5.6     6.6e-06
  loss    +0.0003               0.40       6.0     0.7006
record: no, because the mean loss is not shown to be below the target 3.28 (p 0.0423, needs < 0.01), \
although the mean time is below old's (p 6.6e-06 < 0.01)
"""


def test_a_report(run):
    """Checks numbers that numpy gave: t = (m1 - m2) / sqrt(v1 + v2), v = s^2 / n; look-alikes are not read.

    The degrees of freedom are (v1 + v2)^2 / sum(v^2 / (n - 1)).
    """
    write_runs("base", BASE_LOSSES, BASE_TIMES)
    write_runs("new", LOSSES, TIMES, source=LOOK_ALIKES)
    assert run("old=base new") == (0, REPORT, "")
    out, _ = read_json(run, "old=base new")
    (result,) = out["comparisons"]
    assert " ".join(f"{value:.5g}" for value in list(result.values())[2:-3]) == (
        "-0.7498 -15.922 5.6432 6.621e-06 0.00030667 0.40359 5.9511 0.70062"
    )


def test_verdicts(run):
    write_runs("runs", LOSSES, TIMES, config={"target": 3.285})
    (group,) = read_json(run, "runs")[0]["groups"]
    assert group["meets_target"]
    assert "the mean loss is above the target 3.27\n" in run("runs --target 3.27")[1]


def test_what_is_not_defined_is_null(run, recwarn):
    write("one", own_log(3.27, 90))
    write("same", own_log(3.27, 90), own_log(3.27, 91))
    write("times", own_log(3.26, 92), own_log(3.27, 92))
    Path("llmc.log").write_text("s:0 tel:11.0\ns:500 tel:3.27\n")
    out, _ = read_json(run, "one same llmc.log")
    form = "{loss_mean} {loss_std} {time_mean_s} {p_target} {meets_target}".format_map
    assert list(map(form, out["groups"])) == [
        "3.27 None 90.0 None False",
        "3.27 0.0 90.5 None False",
        "3.27 None None None False",
    ]
    known = {name: value for name, value in out["comparisons"][1].items() if value is not None}
    assert "there is no mean time to compare with one's" in known.pop("because")
    expected = {"group": "llmc", "baseline": "one", "loss_delta": 0.0, "paired": {}, "record": False}
    assert known == expected
    assert run("same times")[0] == 0 and not recwarn.list  # one of the two does not vary


PAIRED = """
          difference            Welch t    df      p (two-sided)
  time    -0.950 s (-1.14 %)    -0.53      6.0     0.6182
  loss    -0.0100               -1.11      6.0     0.3113
          in 4 pairs of seeds   paired t   df      p (two-sided)
  time    -0.950 s (-1.14 %)    -14.72     3.0     0.0007
  loss    -0.0100               -24.49     3.0     0.0001
record:"""


def write_pairs(base, new, seeds=(0, 1, 2, 3)):
    """Writes runs of seeds 0 to 3, and others with these seeds, in the other order of files."""
    logs = []
    base_logs = []
    for i, (loss, time) in enumerate([(0.009, 0.9), (0.011, 1.0), (0.010, 0.8), (0.010, 1.1)]):
        base_loss = 3.26 + i / 100
        base_time = 80 + 2 * i
        base_logs.append(own_log(base_loss, base_time, config={"seed": i}))
        logs.append(own_log(base_loss - loss, base_time - time, config={"seed": seeds[i]}))
    write(base, *base_logs)
    write(new, *reversed(logs))


def test_runs_of_equal_seeds_are_compared_in_pairs(run):
    """Checks numbers that numpy gave: t = mean(d) / (sd(d) / sqrt(4)), d the difference of each pair."""
    write_pairs("new/baseline", "new")
    assert PAIRED in run("new/baseline new")[1]
    paired = read_json(run, "new/baseline new")[0]["comparisons"][0]["paired"]
    assert " ".join(f"{value:.5g}" for value in paired["loss"].values()) == "-0.01 -24.495 3 0.00014916"


def test_times_are_paired_only_if_the_runs_alternated(run):
    write_pairs("base", "new")
    out = run("base new")[1]
    assert PAIRED.replace("  time    -0.950 s (-1.14 %)    -14.72     3.0     0.0007\n", "") in out


@pytest.mark.parametrize("seeds", [(0, 1, 2, 4), (0, 1, 2, 2), (0, 1, 2, None)])
def test_other_seeds_are_not_paired(run, seeds):
    write_pairs("new/baseline", "new", seeds)
    assert "pairs" not in run("new/baseline new")[1]


def test_pairs_that_all_differ_alike_have_no_test(run, recwarn):
    write("base", own_log(3.27, 90, config={"seed": 1}), own_log(3.28, 91, config={"seed": 2}))
    write("new", own_log(3.27, 92, config={"seed": 1}), own_log(3.28, 93, config={"seed": 2}))
    assert "  loss    +0.0000               -          -       -\n" in run("base new")[1]
    assert not recwarn.list


# ---------------------------------------------------------------------------------------------------- reports


@pytest.mark.slow
def test_curves_are_drawn(run):
    """Also of runs that diverged, lack times, or were cut off."""
    write_runs("a", LOSSES, TIMES)
    write("diverged", math.nan)
    Path("llmc.log").write_text(LLMC)
    Path("cut.log").write_text(steps(last=150, validate_last=False))
    code, _, err = run("a diverged llmc.log cut.log --curves loss.png")
    assert code == 0 and Path("loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_an_empty_path_is_an_error(run):
    """As from a=$UNSET: it does not mean this folder, and all logs in it."""
    write("a", 3.27)
    code, _, err = run("a=")
    assert code != 0
    assert "an empty path" in err


CANNOT = ("missing/loss.png", "no folder for it"), ("readme.md", "another kind")


@pytest.mark.parametrize("path, reason", CANNOT)
def test_curves_that_cannot_be_written_are_named_before_all_else(run, capsys, path, reason):
    write("a", 3.27)
    Path("readme.md").write_text("mine")
    with pytest.raises(SystemExit) as error:
        run(f"a --curves {path}")
    printed = capsys.readouterr()
    assert (error.value.code, printed.out, Path("readme.md").read_text()) == (2, "", "mine")
    assert reason in printed.err.splitlines()[-1]


TRAINED = "step:500/500 train_time:95000ms step_avg:9.00ms train_loss:3.5@500\ncomplete: yes\n"


@pytest.mark.slow
def test_what_is_no_curve_is_not_drawn_as_one(run, monkeypatch):
    """Few validations are not joined. The legend names a training loss over some columns only."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())
    cases = (0, [], "-", "candidates"), (0, [4096], "-", "candidates"), (400, [], "None", "sampled_columns")
    for first, columns, line, name in (*cases, (0, [4096], "-", "sampled_columns")):
        config = {"stages": [{name: columns}, {}]}
        write("a", own_log(first=first, config=config, closing=TRAINED))
        run("a --curves a.png")
        figure = figures.pop()
        (dotted,) = [curve for curve in figure.axes[0].lines if curve.get_marker() == "o"]
        assert dotted.get_linestyle() == line
        validation, training = figure.legends[1].get_texts()
        assert "sampled" not in validation.get_text()
        assert ("sampled" in training.get_text()) == bool(columns)


def test_the_mark_of_curves_changes_with_what_is_drawn_only(run):
    def mark(name="a", label="label", target=3.28, lines=(), **options):
        write(name, own_log(**options))
        groups, _ = compare.read_groups([f"{label}={name}"], target)
        return compare.Picture(groups, list(lines)).mark

    assert mark() == mark("b", source="y = 2\n") == mark(config={"seed": 2})
    marks = {
        mark(),
        mark(lines=[("4-gram", 1.5)]),
        mark(loss=3.26),
        mark(seconds=96),
        mark(closing=TRAINED),
        mark(target=3.3),
        mark(label="other"),
    }
    assert len(marks) == 7


def group_of(*trainings):
    """Returns a group of counted runs with these training losses, each of (step, loss, seconds or None)."""
    runs = []
    for training in trainings:
        points = list(map(Point._make, training))
        runs.append(compare.Run("log", 0, compare.Header(), 9, 9, [Point(9, 3.0, 9.0)], points))
    return compare.Group("label", runs)


def test_smoothed_training_loss():
    """Checks means over both runs, and over steps s - w to s + w, w a fortieth of the last step."""
    a = [(step, step, step) for step in range(3, 131)]
    b = [(step, 3 * step, step + 1) for step in range(9, 99)]
    curve = compare.training_curve(group_of(a, b))
    assert curve[0][:3] == (9, 9.5, 2 * 10)
    assert curve[-1][:3] == (98, 98.5, 2 * 97)


LACKING = [  # training losses of runs; the curve: step, time, loss
    ([[(1, 4.0, 1.0), (2, math.nan, 1.5), (3, 2.0, 2.0)]], [(1, 1.0, 4.0), (2, 1.5, 3.0), (3, 2.0, 2.0)]),
    # the clock restarted
    ([[(1, 5.0, 2.5), (2, 5.0, 0.5), (3, 4.0, 3.0)]], [(1, math.nan, 5.0), (2, 0.5, 5.0), (3, 3.0, 4.0)]),
    ([[(1, 4.0, None)], []], []),
]


def test_curves_of_what_lacks_something():
    for trainings, curve in LACKING:
        expected = [MeanPoint(step, time, loss) for step, time, loss in curve]
        assert repr(compare.training_curve(group_of(*trainings))) == repr(expected)
    # Validations are those that all runs share.
    group = group_of([], [])
    restarted = [Point(0, 9.0, 500.0), Point(5, 4.0, 1.0), Point(9, 3.0, 2.0)]  # its clock did
    group.runs[0].curve = restarted
    group.runs[1].curve = [Point(0, 9.0, 0.1), Point(5, 5.0, 3.0), Point(7, 3.5, 3.5), Point(9, 3.0, 4.0)]
    expected = [(0, math.nan, 9, math.nan), (5, 2, 4.5, 0.5**0.5), (9, 3, 3, math.nan)]
    np.testing.assert_allclose(compare.mean_curve(group), expected)


def test_diff(run):
    config = {"seed": 1, "layers": [{"window": "long"}, {"window": "short"}]}
    Path("a.txt").write_text(own_log(source="x = 1\ny = 2", config=config))
    config |= {"layers": [{"window": "long"}, {"window": "long"}], "new": 0.5}
    Path("b.txt").write_text(own_log(source="x = 1\ny = 3", config=config, header=HEADER + "4"))
    code, out, _ = run("--diff a.txt b.txt")
    changes = re.findall(r"^[-+](?!.*\.txt).*", out, re.MULTILINE)
    assert " ".join(changes) == (
        '-layers.1.window: "short" +layers.1.window: "long" +new: 0.5 -script: "train_gpt.py (sha256 0123)" '
        '+script: "train_gpt.py (sha256 0123)4" -y = 2 +y = 3'
    )
    assert run("--diff a.txt a.txt")[1] == "config\n  no difference\nscript\n  no difference\n"
    Path("screen").write_text(steps())
    assert code == 0
    assert run("--diff a.txt screen")[0] == run("--diff a.txt gone")[0] == 2


# -------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_read_is_named_and_the_rest_reported(run):
    write("runs", 3.27)
    write("broken", "config: {broken}\n" + steps())
    Path("runs/dangling.txt").symlink_to("nowhere")
    Path("empty.txt").write_bytes(b"")
    Path("binary.txt").write_bytes(bytes(range(256)) * 40)
    Path("folder").mkdir()
    others = f"empty.txt binary.txt broken/0.txt folder gone.txt *.missing {'x' * 300}"
    code, out, err = run(f"runs {others}")
    assert code == 2 and "3.2700" in out
    named = re.findall("^compare.py: (.*?): .*\n", err, re.MULTILINE)
    named[-1] = Path(named[-1]).name  # the system names the whole path
    assert named == ["runs/dangling.txt"] + others.split()
    latin = own_log(3.27, source="\xff\xfe", header=HEADER.replace("H100", "H\xe9"))
    Path("latin.txt").write_bytes(latin.encode("latin-1"))
    code, out, err = run("latin.txt")
    assert (code, err) == (0, "") and "NVIDIA H\ufffd" in out


ODD = [  # values that a fork's or an edited config may have
    '"target": 0',
    '"target": -1.07',
    '"val_slices": 0',
    '"val_slice_tokens": -4096',
    '"vocab_size": 0',
    '"seed": [1]',
    '"val_slices": {"a": 1}',
    '"val_slice_tokens": "4096"',
    '"target": "1.07"',
    '"target": NaN',
    '"target": -Infinity',
    '"length": []',
    '"track": 5',
    '"deep": ' + "[" * 100_000,
]


@pytest.mark.parametrize("odd", ODD, ids=[odd[:20] for odd in ODD])
def test_an_odd_config_is_named_and_the_rest_reported(run, odd):
    write("runs", 3.27, f"config: {{{odd}}}\n{steps()}")
    code, out, err = run("runs --curves a.png")
    assert code == 2 and "3.2700" in out and Path("a.png").exists()
    assert re.fullmatch(r"compare.py: runs/1.txt: its config .*\n", err)


@pytest.mark.slow
def test_curves_need_no_notebook(run):
    """A notebook sets MPLBACKEND to a package that other environments lack."""
    write("runs", 3.27)
    command = [sys.executable, compare.__file__, "runs", "--curves", "a.png"]
    environment = os.environ | {"MPLBACKEND": "module://no_such_package.backend"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and Path("a.png").exists()


def test_curves_are_written_through_a_link(run):
    write("runs", 3.27)
    Path("old.png").write_bytes(b"\x89PNG old, by Matplotlib")
    Path("link.png").symlink_to("old.png")
    assert run("runs --curves link.png")[0] == 0
    assert Path("link.png").is_symlink() and len(Path("old.png").read_bytes()) > 1000


BAD_USAGE = ["", "x --diff a b", "--begin a --update"]
# Options that would have no effect.
BAD_USAGE += [f"--diff a b {option}" for option in ("--json", "--anyway", "--curves a.png", "--target 3")]
BAD_USAGE += [f"--update {option}" for option in ("--json", "--anyway", "--curves a.png", "--target 3")]
BAD_USAGE += ["--begin a --json", "a b --json --anyway"]
BAD_USAGE += [f"x --target {target}" for target in ("low", "nan", "inf", "0", "-1")]


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage(run, arguments):
    with pytest.raises(SystemExit) as e:
        run(arguments)
    assert e.value.code == 2


def test_folders_whose_names_are_no_text_stay_apart(run):
    for name in b"r\xe9", b"r\xe8":
        os.mkdir(name)
        (Path(os.fsdecode(name)) / "log.txt").write_text(own_log(3.27, 95))
    groups, errors = compare.read_groups([os.fsdecode(b"r\xe9"), os.fsdecode(b"r\xe8")], None)
    assert not errors and len({group.label.encode() for group in groups}) == 2


@pytest.mark.parametrize("package", ("numpy", "scipy.stats"))
def test_a_missing_package_is_one_line(run, monkeypatch, package):
    write("a", 3.27, 3.28)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run("a --curves a.png")
    name = package.partition(".")[0]
    assert code == 2 and f"needs {name}," in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------ records/README.md

CPU = TRACKS["cpu"] | {"track": "cpu", "preset": "cpu"}
FIRST = "cpu/2026-01-02_First"
NEXT = "cpu/2026-01-03_Next"


def cpu_log(loss, seconds, **options):
    """Returns a log of the track `cpu`."""
    return own_log(loss, seconds, config=CPU | options.pop("config", {}), **options)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes another records/: a listed record, one that is not listed yet, and logs of no record."""
    folder = tmp_path / "records"
    write(folder / FIRST, cpu_log(1.06, 100), cpu_log(1.061, 102), "no log")
    (folder / FIRST / "README.md").write_text("# First: the preset\n\nMore.\n")
    modified = HEADER.replace("12ab (clean)", "56cd (modified)")
    untracked = HEADER.replace("12ab (clean)", "78ef (??)")
    write(
        folder / NEXT,
        cpu_log(1.06, 90),
        cpu_log(1.061, 92, header=modified),
        cpu_log(1.062, 91, header=untracked),
    )
    (folder / NEXT / "README.md").write_text("# Next, which is faster\n")
    write(folder / NEXT / "baseline", cpu_log(1.06, 100), cpu_log(1.061, 101), cpu_log(1.062, 101.5))
    write_referee(folder / NEXT, preset="cpu")
    write(folder / "cpu" / "attempts", 3.2)
    write(folder / "other" / "2026-01-02_Other", 3.2)
    marks = "<!-- {0} -->\nold\n<!-- /{0} -->\n".format
    # First is listed, from times when nothing was asked.
    listed = marks("records").replace("old", f"| [First]({FIRST}) |")
    (folder / "README.md").write_text(f"# Records\n{listed}after\n")
    (tmp_path / "README.md").write_text(f"before\n{marks('leaderboard')}")
    monkeypatch.setattr(compare, "HERE", folder)
    return folder


README = f"""# Records
<!-- records -->
### `cpu`

| {" | ".join(compare.RECORD_COLUMNS)} |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 2026-01-02 | [First]({FIRST}) | 2 | 1.0605 | 0.0167 | 101.0 s | - | 8 x NVIDIA H100 | 12ab |
| 2026-01-03 | [Next]({NEXT}) | 3 | 1.0610 | 0.0020 | 91.0 s | -9.8 %, p 0.0003 | 8 x NVIDIA H100 | \
12ab; 56cd (modified); 78ef (modified) |

### `words`

None yet.

### `gpt2-small`

None yet.
<!-- /records -->
after
"""
FRONT = f"""before
<!-- leaderboard -->
| {" | ".join(compare.LEADERBOARD_COLUMNS)} |
| --- | --- | --- | --- |
| 2026-01-02 | [First](records/{FIRST}) | First: the preset | - |
| 2026-01-03 | [Next](records/{NEXT}) | Next, which is faster | -9.8 % |
<!-- /leaderboard -->
"""


@pytest.mark.slow
def test_update_writes_tables_and_draws_what_changed(run, records):
    assert run("--update") == (0, "", "")
    readme = records / "README.md"
    assert (readme.read_text(), Path("README.md").read_text()) == (README, FRONT)
    first = Path(f"records/{FIRST}/curves.png")
    following = Path(f"records/{NEXT}/curves.png")
    assert sorted(Path().rglob("*.png")) == [first, following]
    for picture in first, following:
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.write_bytes(picture.read_bytes() + b"not drawn again")
    write(records / NEXT / "baseline", cpu_log(1.06, 99, header=ON_A100))
    assert run("--update")[0] == 0
    for picture in first, following:
        assert picture.read_bytes().endswith(b"not drawn again") == (picture == first)
    assert "91.0 s | - | 8 x" in readme.read_text()  # another machine: no percentage
    # Nothing is written if a log is broken.
    readme.write_text(README)
    write(records / NEXT, "config: {broken}\n" + steps())
    assert run("--update")[:2] == (2, "") and readme.read_text() == README


REFUSED = {  # what is changed in the folder that is not listed, and the reason
    "no referee": (lambda folder: (folder / referee.FILE_NAME).unlink(), "there is no .*referee.txt"),
    "slow": (lambda folder: write(folder, *[cpu_log(1.06, 110 + i) for i in range(3)]), "time is above base"),
    "cut off": (lambda folder: write(folder, *[own_log(closing="")] * 3), "no run of .* counts"),
    "track": (lambda folder: write(folder, *[own_log(3.27, i) for i in (1, 2, 3)]), "not of the track `cpu`"),
    "alone": (lambda folder: shutil.rmtree(folder / "baseline"), "it has no baseline/"),
}


@pytest.mark.parametrize("change, reason", REFUSED.values(), ids=REFUSED)
def test_what_is_no_record_is_not_listed(run, records, change, reason):
    change(records / NEXT)
    code, _, err = run("--update")
    assert code == 2
    assert re.fullmatch(rf"compare.py: \S*{NEXT}: not listed, because .*{reason}.*\n", err)
    assert "First" in Path("README.md").read_text()
    assert "Next" not in Path("README.md").read_text() + (records / "README.md").read_text()


def test_a_listed_record_stays_listed(run, records):
    run("--update")
    (records / NEXT / referee.FILE_NAME).unlink()
    assert run("--update")[0] == 0
    assert (records / "README.md").read_text() == README
    assert last_line(run, f"records/{NEXT}/baseline records/{NEXT}").startswith("record: yes")


@pytest.mark.parametrize("page", ["README.md", "records/README.md"])
def test_a_page_without_marks_is_named(run, records, page):
    Path(page).write_text("mine\n")
    other = Path({"README.md": "records/README.md", "records/README.md": "README.md"}[page])
    before = other.read_text()
    code, _, err = run("--update")
    assert code == 2 and err.count("\n") == 1
    assert f"/{page}: needs a line <!-- " in err
    assert (Path(page).read_text(), other.read_text()) == ("mine\n", before)


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """Goes to a copy of records/ with the records that README.md links: a run may just have made others."""
    records = ROOT / "records"
    copy = tmp_path / "records"
    shutil.copytree(records, copy, ignore=shutil.ignore_patterns("[0-9]*_*", "attempts"))
    for folder in re.findall(r"\((\w.*?/\d.*?_.*?)\)", (records / "README.md").read_text()):
        shutil.copytree(records / folder, copy / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(compare, "HERE", copy)
    monkeypatch.chdir(tmp_path)


def without_indentation(text):
    """Returns the text without indentation and empty lines."""
    return re.sub(r"\n\s*", "\n", text.strip())


def test_the_tables_and_pictures_are_what_the_logs_give(committed, capsys):
    """So are the records' READMEs, without indentation and empty lines."""
    errors = []
    fix = "python records/compare.py --update"
    records, refused = compare.read_records(errors)
    assert errors + refused == [] and len(records) >= 4
    for path, text in compare.pages(records).items():
        assert path.read_text() == text, fix
    for record in records:
        picture = record.folder / "curves.png"
        mark = compare.Picture(record.groups, []).mark
        assert mark.encode() in picture.read_bytes() and picture.stat().st_size < 200_000, fix
    capsys.readouterr()
    for record in records:
        folder = record.folder.relative_to(Path.cwd())
        paths = [str(folder)]
        if (folder / "baseline").exists():
            paths.insert(0, str(folder / "baseline"))
        assert compare.main(paths) == 0
        table = without_indentation(capsys.readouterr().out)
        readme = without_indentation((folder / "README.md").read_text())
        assert table in readme and "](curves.png)" in readme, folder
