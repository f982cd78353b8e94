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
from compare import MeanPoint, Point
from matplotlib.figure import Figure

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
    settings = {"track": "cpu", "target": 3.28, "seed": next(SEEDS), "val_slices": 128, "length": 1.0}
    config = f"config: {json.dumps(settings | dict(config))}\ndata: {data}"
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
    assert (plain.curve[-1].loss, plain.peak_mem_mib, plain.target, plain.epochs) == (3.2785, 9, 1.07, 2)
    for form in SCREENS:
        assert read("\n".join(map(form.format, text.splitlines()))) == ([plain], []), form


def test_what_a_verdict_needs_is_read_after_any_text(run):
    """Losses, epochs and the target, though not the rest."""
    text = f"{HEADER}\n{steps()}\nepochs: 2\ntarget 1.07: above"
    (found,), _ = read("\n".join(f"INFO trainer {line}" for line in text.splitlines()))
    assert (found.curve[-1].loss, found.target, found.epochs, found.counted) == (3.2785, 1.07, 2, False)


def test_without_a_target_there_is_no_verdict(run):
    """A target that is no number is none."""
    Path("screen.log").write_text(f"{steps(3.2)}\ntarget nan: not below\n")
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


MIXED = [  # what the second of two runs has, and the warning
    (dict(total=525), "steps (500; 525)"),
    (
        dict(header=HEADER.replace("0123", "45")),
        "scripts (train_gpt.py (sha256 0123); train_gpt.py (sha256 45))",
    ),
    (dict(config={"track": "other"}), "tracks (cpu; other)"),
    (dict(header=ON_A100), "hardware (8 x NVIDIA A100; 8 x NVIDIA H100)"),
    (dict(config={"val_slices": 64}), "val_slices (64; 128)"),
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
        Path(f"mixed/{i}.txt").write_text(own_log(3.27, 90 + i, config={"seed": seed}))
    assert read_json(run, "base mixed")[1].count("warning") == 1


RECORDS = [  # which logs are changed, how; whether the group `new` is a record over `base`
    ("new", {}, "yes"),
    ("new", {"total": 400}, "yes"),
    ("new/4", {"closing": "", "loss": 3.4}, "yes"),  # left out
    ("new/4", {"total": 400}, "no"),
    ("new", {"loss": 3.28}, "no"),
    ("new", {"seconds": 94.99}, "no"),
    ("new", {"seconds": 99}, "no"),
    ("new", {"config": {"seed": 1}}, "no"),
    ("", {"config": {"track": "other"}}, "no"),
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
        out = run("base new --target 9")[1]  # a record is of the track's target
        assert f"\nrecord: {answer}, because" in out, change
        assert ("steps and base 500" in out) == ("total" in change)


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
record: no, because the mean loss is not shown to be below the target 3.28 (p 0.0423, needs < 0.01); \
the mean time is below old's (p 6.6e-06 < 0.01)
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
    assert " ".join(f"{value:.5g}" for value in list(result.values())[2:-2]) == (
        "-0.7498 -15.922 5.6432 6.621e-06 0.00030667 0.40359 5.9511 0.70062"
    )


def test_verdicts(run):
    write_runs("runs", LOSSES, TIMES, config={"target": 3.285})
    (group,) = read_json(run, "runs")[0]["groups"]
    assert group["meets_target"]
    assert "the mean loss is not below the target 3.27 (p" in run("runs --target 3.27")[1]


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
    assert "no p" in known.pop("because")
    assert known == {"group": "llmc", "baseline": "one", "loss_delta": 0.0, "record": False}
    assert run("same times")[0] == 0 and not recwarn.list  # one of the two does not vary


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
        '-layers.1.window: "short" +layers.1.window: "long" -script: "train_gpt.py (sha256 0123)" +new: 0.5 '
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
    assert named == ["runs/dangling.txt"] + others.split()
    latin = own_log(3.27, source="\xff\xfe", header=HEADER.replace("H100", "H\xe9"))
    Path("latin.txt").write_bytes(latin.encode("latin-1"))
    code, out, err = run("latin.txt")
    assert (code, err) == (0, "") and "NVIDIA H\ufffd" in out


ODD = [  # values that a fork's or an edited config may have
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
BAD_USAGE += [f"x --target {target}" for target in ("low", "nan", "inf", "0", "-1")]


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage(run, arguments):
    with pytest.raises(SystemExit) as e:
        run(arguments)
    assert e.value.code == 2


def test_a_missing_package_is_one_line(run, monkeypatch):
    write("a", 3.27, 3.28)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    code, _, err = run("a")
    assert code == 2 and "needs scipy," in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------ records/README.md

FIRST = "cpu/2026-01-02_First"
NEXT = "cpu/2026-01-03_Next"


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes another records/, with two records, one of them with a baseline, and logs of no record."""
    folder = tmp_path / "records"
    write(folder / FIRST, own_log(3.27, 100), own_log(3.271, 102), "no log")
    modified = HEADER.replace("12ab (clean)", "56cd (modified)")
    untracked = HEADER.replace("12ab (clean)", "78ef (??)")
    write(
        folder / NEXT,
        own_log(3.27, 90),
        own_log(3.271, 92, header=modified),
        own_log(3.272, 91, header=untracked),
    )
    write(folder / NEXT / "baseline", own_log(3.27, 100), own_log(3.271, 101))
    write(folder / "cpu" / "attempts", 3.2)
    write(folder / "other" / "2026-01-02_Other", 3.2)
    write(folder / "gpt2-small/2026-01-04_Aborted", own_log(last=100, validate_last=False, closing=""))
    (folder / "history.csv").write_text(
        'number,minutes,date,change,source\n1,45,2024-05-28,"all, at first",PR 1\n'
        "3,24.9,2024-10-04,Muon | more,PR 2\n3,25.0,2024-11-04,timed again,PR 3\n"
    )
    marks = "<!-- {0} -->\nold\n<!-- end of {0} -->\n".format
    (folder / "README.md").write_text(f"# Records\n{marks('records')}between\n{marks('history')}after\n")
    monkeypatch.setattr(compare, "HERE", folder)
    write(tmp_path / "bench" / "curves", 3.27, 3.3)
    pictures = {"a.png": ({"one": "0.txt", "two": "1.txt"}, ("training time, s",))}
    monkeypatch.setattr(compare, "PICTURES", pictures)
    return folder


README = f"""# Records
<!-- records -->
### `cpu`

| {" | ".join(compare.RECORD_COLUMNS)} |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 2026-01-02 | [First]({FIRST}) | 2 | 3.2705 | 0.0167 | 101.0 s | - | 8 x NVIDIA H100 | 12ab |
| 2026-01-03 | [Next]({NEXT}) | 3 | 3.2710 | 0.0020 | 91.0 s | -9.5 %, p 0.0014 | 8 x NVIDIA H100 | \
12ab; 56cd (modified); 78ef (modified) |

### `words`

None yet.

### `gpt2-small`

None yet.
<!-- end of records -->
between
<!-- history -->
| # | minutes | date | change | source |
| --- | --- | --- | --- | --- |
| 1 | 45 | 2024-05-28 | all, at first | PR 1 |
| 3 | 24.9 | 2024-10-04 | Muon \\| more | PR 2 |
| 3 | 25.0 | 2024-11-04 | timed again | PR 3 |
<!-- end of history -->
after
"""


@pytest.mark.slow
def test_update_writes_tables_and_draws_what_changed(run, records):
    code, out, err = run("--update")
    readme = records / "README.md"
    assert (code, out, readme.read_text()) == (0, "", README)
    assert "0.txt: incomplete" in err and "2026-01-04_Aborted: left out" in err
    first = Path(f"records/{FIRST}/curves.png")
    following = Path(f"records/{NEXT}/curves.png")
    pictures = [first, following, Path("bench/curves/a.png"), Path("records/history.png")]
    assert sorted(Path().rglob("*.png")) == sorted(pictures)
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.write_bytes(picture.read_bytes() + b"not drawn again")
    with open(records / "history.csv", "a") as history:
        history.write("4,20,2025-01-01,a,b\n")
    write(records / NEXT / "baseline", own_log(3.26, 99, header=ON_A100))
    assert run("--update")[0] == 0
    changed = [following, Path("records/history.png")]
    for picture in pictures:
        assert picture.read_bytes().endswith(b"not drawn again") == (picture not in changed)
    assert "| 4 | 20 |" in readme.read_text()
    assert "91.0 s | - | 8 x" in readme.read_text()  # another machine: no percentage
    # Nothing is written if a log is broken.
    readme.write_text(README)
    write("bench/curves", "config: {broken}\n" + steps())
    assert run("--update")[:2] == (2, "") and readme.read_text() == README


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """Goes to a copy of records/ with the records that README.md links: a run may just have made others."""
    records = ROOT / "records"
    copy = tmp_path / "records"
    shutil.copytree(records, copy, ignore=shutil.ignore_patterns("[0-9]*_*", "attempts"))
    for folder in re.findall(r"\((\w.*?/\d.*?_.*?)\)", (records / "README.md").read_text()):
        shutil.copytree(records / folder, copy / folder)
    shutil.copytree(ROOT / "bench" / "curves", tmp_path / "bench" / "curves")
    monkeypatch.setattr(compare, "HERE", copy)
    monkeypatch.chdir(tmp_path)


def without_indentation(text):
    """Returns the text without indentation and empty lines."""
    return re.sub(r"\n\s*", "\n", text.strip())


def test_the_tables_and_pictures_are_what_the_logs_give(committed, capsys):
    """So are the records' READMEs, without indentation and empty lines."""
    errors = []
    fix = "python records/compare.py --update"
    records = compare.read_records(errors)
    pictures = compare.find_pictures(records, errors)
    assert errors == [] and len(records) >= 4, capsys.readouterr().err
    readme = Path("records/README.md").read_text()
    for name, part in compare.readme_parts(records).items():
        assert f"<!-- {name} -->\n{part}<!-- end of {name} -->\n" in readme, fix
    for path, picture in pictures.items():
        assert compare.is_current(path, picture.mark) and path.stat().st_size < 100_000, fix
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


def test_the_public_history():
    rows = compare.read_history().rows
    numbers = dict.fromkeys(row.number for row in rows)
    assert list(numbers) == list(map(str, range(1, 93)))
    days = [row.date for row in rows]
    assert days == sorted(days)
    for row in rows:
        assert row.change and row.source
    # Each record is faster than the one before, except record 21 when it was timed again.
    times = [float(row.minutes) for row in rows]
    assert [i for i in range(1, len(times)) if times[i] >= times[i - 1]] == [21, 22]
