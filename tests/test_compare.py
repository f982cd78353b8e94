"""Tests records/compare.py: log formats and their traps, statistics, reports, what --update makes."""

import itertools
import json
import math
import os
import re
import resource
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
from compare import Point
from tracks import TRACKS

from launch import ROOT

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
# Published runs: five of a change and three of its baseline (seconds).
LOSSES = [3.2789, 3.2772, 3.2804, 3.277, 3.2792]
TIMES = [95.168, 95.219, 95.069, 95.277, 95.303]
BASE_LOSSES = [3.2781, 3.2790, 3.2776]
BASE_TIMES = [95.972, 95.914, 95.985]


def steps(loss=3.2785, seconds=95.0, total=500, first=0, last=None):
    """Returns lines of steps `first` to `last` (default: all), validated every 125 steps and at the end."""
    last = last or total
    lines = []
    for step in range(first, last + 1, 25):
        time = f"train_time:{seconds * 1000 * step / total:.0f}ms step_avg:9.00ms"
        lines.append(f"step:{step}/{total} {time}")
        value = loss if step == last else 11 - 7 * step / total
        if step % 125 == 0 or step == last:
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} {time}")
    return "\n".join(lines)


RULE = "=" * 100
COMPLETE = "complete: yes\n"


def own_log(
    loss=3.2785,
    seconds=95.0,
    seed=None,
    source="import torch\n",
    header=HEADER,
    config=(),
    data="ab12 (9 tokens)",
    closing=f"val_loss_per_byte: 0.9\n{COMPLETE}",
    **options,
):
    """Returns a log as train_gpt.py writes it."""
    settings = TRACKS["gpt2-small"] | {"track": "gpt2-small", "preset": "record", "length": 1.0}
    settings["seed"] = next(SEEDS) if seed is None else seed
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


def write_group(folder, seconds, loss=3.27, last_run=(), **options):
    """Writes four of our logs, of seeds 0 to 3, whose times and losses rise; the last with other options."""
    logs = []
    for i in range(4):
        run = {"loss": loss + i / 1000, "seconds": seconds + i / 9, "seed": i} | options
        if i == 3:
            run |= dict(last_run)
        logs.append(own_log(**run))
    write(folder, *logs)


def write_referee(folder, script_hash="0123", preset="record", **results):
    """Writes a referee.txt that says ok to every rule but those that are given."""
    table = referee.table(dict.fromkeys(referee.RULES, "ok") | results)
    text = f"script: train_gpt.py sha256 {script_hash:0<64}\npreset: {preset}\nlog: 0.txt\n\n{table}\n"
    Path(folder, referee.FILE_NAME).write_text(text)


def last_line(run, command):
    """Returns the last line of what compare.py prints, which is the verdict."""
    return run(command)[1].splitlines()[-1]


def read(text):
    """Returns the runs in a log, and the notes on it."""
    Path("log").write_text(text)
    return compare.read_log("log")


def read_json(run, command):
    code, out, err = run(f"{command} --json")
    assert code == 0, err
    return json.loads(out), err


# ------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture["era"])
def test_formats_and_odd_lines(run, fixture):
    for end in "\n", "\r\n":
        (found,), notes = read(end.join(fixture["tail"]))
        assert len(notes) == 1 and compare.run_as_json(found).items() >= fixture["expect"].items()
        if "training" in fixture:
            training = list(map(list, found.training))
            assert repr(training) == repr(fixture["training"])  # nan is not equal to nan


SCREENS = [  # what is put before a line
    "\x1b[0m\x1b(B\x1b[1;32m",
    "[default0]:",
    "\r 38%|#  | 3/8 [00:12<00:20]\r      \r",
    "[default0]: 38%|#  | 3/8 [00:12<00:20][default0]:",
    "2026-11-27T10:00:00.123Z ",
    "2026-11-27 10:00:00,123 [rank0]: ",
    "Nov  7 10:00:00 host run[12]: ",
]


def test_what_screens_and_launchers_do_to_lines(run):
    """After any other text losses, epochs and the target are read, on which a verdict depends."""
    text = f"\n{HEADER}\n{steps()}\npeak memory allocated: 9 MiB\nepochs: 2\ntarget 1.07: below; one run"
    text += "\nmy target 9: \nsample: 'target 9: below; one run step:9/9 val_loss:1'"
    (plain,), notes = read(text)
    assert notes[0].endswith("validation included")
    assert (plain.curve[-1].loss, plain.peak_mem_mib, plain.target, plain.epochs) == (3.2785, 9, 1.07, "2")
    for before in SCREENS:
        assert read(text.replace("\n", f"\n{before}")) == ([plain], notes), before
    (found,), _ = read(text.replace("\n", "\nINFO trainer "))
    assert (found.curve, found.target, found.epochs) == (plain.curve, plain.target, plain.epochs)


def test_without_a_target_there_is_no_verdict(run):
    """A target that is no number, or none above 0, is none."""
    Path("log").write_text(f"{steps(3.2)}\ntarget nan: not below; one run\ntarget 0.0: not below; one run\n")
    assert "  verdict            no log names a target: " in run("log")[1]


@pytest.mark.parametrize(
    "line",
    [
        "step:250/500 val_lo",
        "ep:250/500 val_loss:3.2 train_time:9ms step_avg:9ms",
        "step:250/500 val_loss:3,2 train_time:9ms step_avg:9ms",
        "step:250/500 val_loss:-3.2 train_time:9ms step_avg:9ms",
        "step:250/500 val_loss:3.2 train_time:-9ms step_avg:9ms",
        "step:250/500 val_loss:3.2 train_time:nanms step_avg:9ms",
    ],
)
def test_a_validation_that_cannot_be_read_is_named(run, line):
    """A negative loss or time would make any group a better one."""
    first, rest = own_log(3.27).split("\nstep:375", 1)
    Path("log").write_text(f"{first}\n 9%|\r{line}\n{line}\nstep:375{rest}")
    code, out, err = run("log")
    assert code == 2 and "3.2700" in out
    number = first.count("\n") + 2
    says = f"cannot read this validation: {line!r}\n"
    assert err == f"compare.py: log:{number}: {says}compare.py: log:{number + 1}: {says}"


def test_blanks_take_no_time(run):
    """To look for the end of the line after each of them would take days."""
    line = "a" + " " * 10**6
    torch = f"Running PyTorch 2 compiled for CUDA 1 on {line}"
    (found,), _ = read(f"data: {line}\vb\nscript: {line}b\n{torch}b\n|  0  {line}b\n{steps()}")
    assert found.header.script == f"{line}b"


def test_several_runs_in_a_file(run):
    """Also one whose first step is not below the last one's, since its number of steps is another."""
    text = own_log(3.27, 90) + own_log(3.26, 91, header=HEADER.replace("2.13.0", "2.14.0"))
    text += steps(3.25, 92, total=600, first=525) + f"\n{HEADER}\n{steps(3.24, 93)}\n"
    # The end is repeated, with closing lines.
    text += "\n".join(text.splitlines()[-4:]) + "\npeak memory allocated: 77 MiB reserved: 88 MiB\n"
    runs, notes = read(text)
    form = "{0.val_loss} {0.train_time_s} {0.total_steps} {0.header.torch} {0.peak_mem_mib}".format
    assert list(map(form, runs)) == [
        "3.27 90.0 500 2.13.0 31253",
        "3.26 91.0 500 2.14.0 31253",
        "None None 600 2.14.0 None",  # the header before it, whose config means that it must be closed
        "3.24 93.0 500 2.13.0 77",
    ]
    assert len(notes) == 1


@pytest.mark.parametrize("prefix", ["", "trainer-1  | ", "2026-11-28T21:16:36Z stdout F ", "log.txt:"])
def test_a_header_begins_a_run_of_a_screen(run, prefix):
    """Each has its last validation alone. Seeds are in closing lines. A launcher's prefix hides nothing."""
    ends = [f"{HEADER}\n{steps(loss, 90, first=500)}\nseed: 7\n" for loss in (3.1, 3.2)]
    runs, _ = read("".join(prefix + line for line in "".join(ends).splitlines(keepends=True)))
    found = [(each.val_loss, compare.seed_of(each), each.header.torch) for each in runs]
    assert found == [(3.1, 7, "2.13.0"), (3.2, 7, "2.13.0")]


def test_another_validation_of_one_step_begins_a_run(run):
    """A page that quotes the ends of runs has those runs, which count once beside their logs."""
    write("logs", *(own_log(loss, 90 + loss) for loss in (3.1, 3.2)))
    quotes = "".join(f"best: {steps(loss, 90 + loss, first=500)}\n" for loss in (3.1, 3.2))
    assert [each.val_loss for each in read(quotes)[0]] == [3.1, 3.2]
    Path("logs/notes.txt").write_text(quotes)
    assert "runs (n)           2\n" in run("logs")[1]


def test_public_logs_of_two_scripts_are_named(run):
    public = [
        f"lr = {lr}\n{RULE}\n{HEADER}\n{RULE}\n{steps(3.2, lr)}".replace("script:", "") for lr in (91, 92)
    ]
    write("logs", *public)
    assert "its runs differ in scripts" in run("logs --target 3.28")[1]


def test_a_log_without_its_config_is_damaged(run):
    Path("cut.txt").write_text(own_log().replace("}\n", "\n"))
    assert "its config line is missing or cut" in run("cut.txt")[2]


def test_training_losses_of_a_resumed_run_are_those_of_what_went_on(run):
    """Those of the first log end with the checkpoint's step. A warning names another machine."""
    form = "step:{0}/9 train_time:1ms step_avg:1ms train_loss:{1}@{0}\n".format
    first = form(1, 6.5) + form(2, 5.5) + form(3, 4.5)
    resumed = f"{ON_A100}\nconfig: {{}}\nresumed: 0 after step 2\n{form(3, 3.5)}"
    write("runs", f"{HEADER}\nconfig: {{}}\n{first}", resumed)
    (group,), _ = compare.read_groups(["runs"], None)
    assert "runs/1.txt: its logs differ in hardware" in group.notes
    assert [point[:2] for point in group.runs[0].training] == [(1, 6.5), (2, 5.5), (3, 3.5)]


# ----------------------------------------------------------------------------------------------------- groups


def test_paths_and_labels(run):
    """Folders whose names are no text stay apart, too."""
    write("my runs/baseline", 3.30)
    write("my runs", 3.27, 3.26, "no log at all")
    Path("my runs/README.md").write_text(steps(1.0))
    Path("lr=2.txt").write_text(own_log(3.25))
    write("rec/this pr", 3.24)
    write("rec", "torch==2.13.0\n")  # a .txt, but no log
    write("other/my runs", 3.23)
    write("r\udce9", 3.22)
    paths = "'new=my runs' 'my runs/[01].txt' lr=2.txt 'old=my runs/baseline' 'my runs' new=rec"
    out, _ = read_json(run, paths + " 'other/my runs' r\udce9")
    assert [f"{g['label']}: {g['n']} {g['loss_mean']:.3f}" for g in out["groups"]] == [
        "new: 3 3.257",
        "my runs/[01].txt: 2 3.265",
        "lr=2: 1 3.250",
        "old: 1 3.300",
        "my runs: 2 3.265",
        "other/my runs: 1 3.230",
        "r\\udce9: 1 3.220",
    ]
    write("my runs", "no log", "no log")
    assert run("'my runs'")[0] == 2  # a record is not its baseline


def test_files_that_are_no_logs_by_name_are_named(run):
    write("runs", 3.27, 3.26)
    Path("runs/0.txt").rename("runs/seed0.TXT")
    for name in "seed2.md", "seed3.txt.gz", "seed4.rank0.trace.json.gz", "4.txt.gz":
        shutil.copy("runs/1.txt", f"runs/{name}")
    out, err = read_json(run, "runs")
    assert out["groups"][0]["n"] == 2
    assert re.findall("runs/(.*): not read", err) == ["4.txt.gz", "seed2.md", "seed3.txt.gz"]


def test_a_fifo_is_no_log_of_a_folder(run):
    """A link to a log is one, and a link to nothing must be named."""
    write("runs", 3.27)
    os.mkfifo("runs/fifo.log")
    Path("runs/gone.log").symlink_to("nowhere")
    Path("runs/link.log").symlink_to("0.txt")
    assert [file.name for file in compare.find_logs("runs")[0]] == ["0.txt", "gone.log", "link.log"]


def test_repeats_are_dropped(run):
    write("runs", *map(own_log, [3.27, 3.27, 3.28, 3.27], [90, 90, 90, 91]))
    Path("runs/10.stdout").write_text(steps(3.28, 90))  # sorts before the log, and has no header
    dropped = re.findall("(runs/.*): dropped, the same run as (.*)", read_json(run, "runs")[1])
    assert dropped == [("runs/1.txt", "runs/0.txt"), ("runs/10.stdout", "runs/2.txt")]


LATER = "step:500/500 train_time:95100ms step_avg:9.00ms train_loss:3.3000@500\n"
CLOSINGS = {  # lines after the last step; why the run is left out
    "val_loss: 3.269951\ntrain_time_ms: 95000\nepochs: 1\n": "",
    "val_loss: 3.2601\n": "its line 'val_loss: 3.2601' contradicts 3.27 before it",
    "val_loss: nan\n": "its line 'val_loss: nan' contradicts",
    "val_loss: low\n": "its line 'val_loss: low' contradicts",
    "train_time_ms: 94999\n": "its line 'train_time_ms: 94999' contradicts 95000 before it",
    "seed: -1\n": "its line 'seed: -1' contradicts",
    "steps: 499\n": "its line 'steps: 499' contradicts 500",
    "epochs: two\n": "trained in two epochs",
    "epochs: 2\nepochs: 1\n": "trained in 2 and 1 epochs",
    "complete: no\n": "without 'complete: yes'",
    LATER: "a step ended after 95.1 s, and its last validation says 95 s",
}
LEFT_OUT = {  # a log; why its run is left out
    own_log().partition("step:500/500 val")[
        0
    ]: "incomplete: it ends at step 500 of 500, without a validation",
    own_log(closing=""): "without 'complete: yes'",
    f"{HEADER}\n{steps(last=450)}": "incomplete: it ends at step 450 of 500",  # our screen
    steps(last=450): "",
    own_log(math.nan, closing=f"val_loss: nan\n{COMPLETE}"): "",  # it has diverged
    own_log(math.nan, closing=f"val_loss: 3.2\n{COMPLETE}"): "contradicts nan before it",
}
for line, reason in CLOSINGS.items():
    LEFT_OUT[own_log(3.27, closing=line + COMPLETE)] = reason


@pytest.mark.parametrize("text, reason", LEFT_OUT.items(), ids=itertools.count())
def test_which_runs_count(run, text, reason):
    Path("log").write_text(text)
    (group,), _ = compare.read_groups(["log"], None)
    assert reason in group.lacks_runs and bool(reason) == bool(group.lacks_runs)


def test_a_group_without_runs_that_count_says_so_and_nothing_else(run):
    write("a", 3.27, 3.26)
    write("b", own_log(closing=f"epochs: 2\n{COMPLETE}"))
    text = "no run of b counts (trained in 2 epochs)"
    for command in "a b", "b a":
        parts = run(command)[1].strip().split("\n\n")
        assert len(parts) == 2 and text in parts
    out, err = read_json(run, "a b")
    assert out["comparisons"][0]["because"] == text and "b/0.txt: left out, trained in 2 epochs" in err


OWN_TEXT = {"track": "other", "data": "data/mine", "target": 1.07}


def test_a_small_text_is_compared_without_a_target(run):
    """Its runs read it in several epochs. They are no record, and nothing says that they should be one."""
    for name, loss in ("a", 2.1), ("b", 2.0):
        write_group(name, 90, loss, config=OWN_TEXT, closing=f"epochs: 5\n{COMPLETE}")
    out = run("a b")[1]
    assert out.count("runs (n)           4") == out.count("trained in 5 epochs") == 2
    assert "  loss    -0.1000 " in out
    assert not re.search("target|verdict|record:|1.07", out)


MIXED = [  # what the second of two runs has, and the warning
    ({"total": 525}, "steps (500; 525)"),
    (
        {"header": HEADER.replace("0123", "45")},
        "scripts (train_gpt.py (sha256 0123); train_gpt.py (sha256 45))",
    ),
    ({"config": {"track": "other"}}, "tracks (gpt2-small; other)"),
    ({"header": ON_A100}, "hardware (8 x NVIDIA A100; 8 x NVIDIA H100)"),
    ({"header": HEADER.replace("3.12.7", "3.9 on A b")}, "Python or operating system (3.12.7; 3.9 on A b)"),
    ({"config": {"lr": 1, "bank_lr": [2], "samples": 3}}, "settings (bank_lr, lr)"),
    ({"config": {"val_slices": 64}}, "val_slices (40; 64)"),
    ({"data": "cd34 (9 tokens)"}, "data (ab12; cd34)"),
    ({"config": {"target": 2.92}}, "targets (2.92; 3.28)"),
]


def test_warnings_about_what_is_mixed(run):
    for change, warning in MIXED:
        write("mixed", 3.27, own_log(3.26, **change))
        assert f"mixed: its runs differ in {warning}\n" in read_json(run, "mixed")[1]
    assert "the target 2.92" in run("mixed")[1]  # the lowest


RECORDS = [  # which groups are changed, how; whether `new` is a record over `base`
    ("new", {"last_run": {"config": {"name": "b"}}}, "yes"),
    ("new", {"total": 400}, "yes"),
    ("new", {"last_run": {"closing": "", "loss": 3.4}}, "yes"),  # left out
    ("new", {"last_run": {"total": 400}}, "no"),
    ("new", {"loss": 3.28}, "no"),
    ("new", {"seconds": 94.99}, "no"),
    ("new", {"last_run": {"config": {"lr": 1}}}, "no"),
    ("new", {"seed": 1}, "no"),
    ("new", {"config": {"track": "other"}}, "no"),
    ("new", {"last_run": {"config": {"track": None}}}, "no"),
    ("base", {"header": HEADER.replace("world_size 8", "world_size 4")}, "no"),
    # A run whose preset was edited is not of the track, whatever its log says.
    ("base and new", {"config": {"target": 3.5}}, "no"),
]


def test_record(run):
    for changed, change, answer in RECORDS:
        for group, folder, seconds in ("base", "new/baseline", 95), ("new", "new", 90):
            write_group(folder, **{"seconds": seconds} | (change if group in changed else {}))
        write_referee("new")
        out = run("base=new/baseline new --target 9")[1]  # a record is of the track's target
        assert f"\nrecord: {answer}, because" in out, change
    assert "because not of the track `gpt2-small`: target is 3.5, not 3.28; of base: not " in out


UNNAMED = {
    "hardware": {"header": "script: train_gpt.py (sha256 0123)"},
    "data": {"data": ""},
    "script": {"header": HEADER.partition("script")[0]},
    "seed": {"config": {"seed": None}},
}


def test_what_logs_do_not_name_makes_no_record(run):
    """What is named in no log differs in none."""
    write_group("base", 95)
    for what, change in UNNAMED.items():
        write_group("new", 90, **change)
        assert last_line(run, "base new").startswith(f"record: no, because 4 of its runs do not name {what}")


def test_logs_that_name_no_track_are_no_record_of_this_project(run):
    """Those of the public speedrun. What they show is said all the same."""
    for group, seconds in (("old", 95), ("new", 90)):
        write(group, *[steps(3.27 + i / 1000, seconds + i / 9) for i in range(4)])
    assert last_line(run, "old new --target 3.28") == (
        "faster to the target (the logs name no track): yes, because the mean loss is below the target 3.28 "
        "(p 0.0005 < 0.01) and the mean time is below old's (p 4.6e-09 < 0.01)"
    )
    out, _ = read_json(run, "old new --target 3.28")
    assert out["groups"][1]["meets_target"] and not out["comparisons"][0]["record"]


NO_VERDICT = (
    "no, because there is no my new/referee.txt of this script: "
    "`python records/referee.py train_gpt.py --preset record --log 'my new/0.txt'` makes it, although the "
)
NOT_OK = "no, because my new/referee.txt does not say ok to each rule"
REFEREES = {  # what referee.txt says; what the verdict says
    "ok": ({}, "yes, because the mean loss"),
    "other script": ({"script_hash": "4567"}, NO_VERDICT),
    "other preset": ({"preset": "cpu"}, NO_VERDICT),
    "broken": ({"causal": "broken: at 7"}, NOT_OK),
}


def test_a_record_needs_the_referee(run, monkeypatch):
    """Presets without a referee need none. The command that makes its verdict can be pasted."""
    write_group("my new/baseline", 95)
    write_group("my new", 90)
    both = "'my new/baseline' 'my new'"
    assert last_line(run, both).startswith("record: yes")
    monkeypatch.setattr(referee, "PRESETS", ["record"])
    assert last_line(run, both).startswith(f"record: {NO_VERDICT}")
    for says, answer in REFEREES.values():
        write_referee("my new", **says)
        assert last_line(run, both).startswith(f"record: {answer}")
    assert "referee" not in run("'my new'")[1]  # it is no log


def test_a_run_in_both_groups_makes_no_record(run):
    write_group("base", 95)
    write_group("new", 90)
    Path("new/4.txt").write_text(steps(3.27, 95))  # what a run of base printed on the screen
    assert "1 of its runs are base's, too; " in last_line(run, "base new")


def test_no_percentage_between_machines(run):
    """How batches are packed makes no difference. A public log may name no machine."""
    write("a", own_log(seconds=90))
    write("packed", own_log(seconds=91, data="ab12 (9 tokens), packed otherwise"))
    Path("public.txt").write_text(steps(seconds=91))
    assert run("a packed public.txt")[1].count("+1.000 s (+1.11 %)") == 2
    for folder, line in ("fp32", ""), ("bf16", "\nthis CPU has AMX: so"):
        write(folder, own_log(seconds=91, config={"bf16_mlp": True}, header=HEADER + line))
    assert run("fp32 bf16")[1].startswith("warning: not the same MLPs' dtype, which AMX changes, ")
    write("traced", own_log(seconds=91, header=HEADER + "\nprofiled: yes"))
    assert run("a traced")[1].startswith("warning: not the same profiling, ")
    write("other", own_log(seconds=91, header=ON_A100.replace("2.13", "2.14")))
    out = run("a packed other")[1]
    assert out.startswith("warning: not the same hardware and torch, ") and " %" not in out
    assert run("a packed other --anyway")[1].count("+1.000 s (+1.11 %)") == 2


def test_losses_of_other_tokens_are_not_compared(run):
    write_group("runs", 95)
    write_group("new", 90, config={"vocab_size": 257})
    out = run("runs new")[1]
    assert out.count("  loss    -  ") == 2 and "\n  the vocabulary or the validation differs, so" in out
    assert "below runs' (" in out


def test_a_records_readme_is_begun_once(run, monkeypatch):
    folder = "2026-11-24_My_Idea"
    readme = Path(folder, "README.md")
    write(folder, 3.27, 3.26)
    assert run(f"--begin {folder}") == run(folder)
    assert not readme.exists()  # a try, which was no race
    write(f"{folder}/baseline", 3.29, 3.28)
    table = run(f"{folder}/baseline {folder}")[1]
    monkeypatch.setenv("RUN_COMMAND", "./run.sh --name My_Idea")
    out = run(f"--begin {Path(folder).absolute()}/")[1]
    assert out.splitlines()[-1].startswith(table.splitlines()[-1] + f". Remove {folder}, or")
    assert readme.read_text() == (
        "# My_Idea\n\n![Losses over steps and over training time](curves.png)\n\n"
        "(What was changed, against which record, and why.)\n\n    ./run.sh --name My_Idea\n\n"
        f"What `python records/compare.py {folder}/baseline {folder}` prints:\n\n"
        f"{textwrap.indent(table, '    ')}"
    )
    readme.write_text("mine")
    run(f"--begin {folder}")
    assert readme.read_text() == "mine"


# -------------------------------------------------------------------------------------- a run in several logs

RESUMED = {
    # Logs of seed 1: name, seconds, resumed after, last step. The one that counts; its curve: step, seconds
    # of the log that it is from
    "the first went further": (
        "seed1 90 0 375, seed1.from100 91 100 250",
        "seed1: 125 90, 250 90, 375 90",
    ),
    "twice": (
        "seed1 90 0 225, seed1.from125 91 125 375, seed1.from125_2 92 125 250, seed1.from300 93 300 500",
        "seed1.from300: 125 91, 250 91, 375 93, 500 93",
    ),
}


@pytest.mark.parametrize("logs, counts", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_counts_once(run, logs, counts):
    for log in logs.split(","):
        name, *numbers = log.split()
        seconds, after, last = map(int, numbers)
        data = f"ab12\nresumed: seed1 after step {after}; by another script" if after else "ab12"
        Path(f"{name}.txt").write_text(own_log(3.0, seconds, data=data, first=after, last=last))
    (group,), _ = compare.read_groups(["."], None)
    (kept,) = group.runs
    points = [f"{point.step} {500 * point.time_s / point.step:.0f}" for point in kept.curve if point.step]
    assert f"{Path(kept.path).stem}: {', '.join(points)}" == counts


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
record: no, because they did not run side by side, as a folder and its baseline/ do; \
the mean loss is not shown to be below the target 3.28 (p 0.0423, needs < 0.01), \
although the mean time is below old's (p 6.6e-06 < 0.01)
"""


def test_a_report(run):
    """Checks numbers that numpy gave: t = (m1 - m2) / sqrt(v1 + v2), v = s^2 / n; look-alikes are not read.

    The degrees of freedom are (v1 + v2)^2 / sum(v^2 / (n - 1)).
    """
    write("base", *map(own_log, BASE_LOSSES, BASE_TIMES))
    write("new", *[own_log(loss, time, source=LOOK_ALIKES) for loss, time in zip(LOSSES, TIMES)])
    assert run("old=base new") == (0, REPORT, "")


def test_what_is_not_defined_is_null(run, recwarn):
    write("one", 3.27)
    write("same", 3.27, 3.27)
    write("diverged", 3.27, math.nan)
    Path("llmc.log").write_text("s:0 tel:11.0\ns:500 tel:3.27\n")
    out, _ = read_json(run, "one same diverged llmc.log")
    form = "{loss_mean} {loss_std} {time_mean_s} {p_target} {meets_target}".format_map
    assert list(map(form, out["groups"])) == [
        "3.27 None 90.0 None False",
        "3.27 0.0 90.5 None False",
        "None None 90.5 None False",
        "3.27 None None None False",
    ]
    assert "there is no mean time to compare with one's" in out["comparisons"][2]["because"]
    assert not recwarn.list


PAIRED = """
          difference            Welch t    df      p (two-sided)
  time    -0.950 s (-1.14 %)    -0.53      6.0     0.6182
  loss    -0.0100               -1.11      6.0     0.3113
          in 4 pairs of seeds   paired t   df      p (two-sided)
  time    -0.950 s (-1.14 %)    -14.72     3.0     0.0007
  loss    -0.0100               -24.49     3.0     0.0001
record:"""


def write_pairs(base, new):
    """Writes runs of seeds 0 to 3, and others with these seeds, in the other order of files."""
    write(base, *map(own_log, [3.26, 3.27, 3.28, 3.29], [80, 82, 84, 86], [0, 1, 2, 3]))
    write(new, *map(own_log, [3.28, 3.27, 3.259, 3.251], [84.9, 83.2, 81, 79.1], [3, 2, 1, 0]))


def test_runs_of_equal_seeds_are_compared_in_pairs(run):
    """Checks numbers that numpy gave: t = mean(d) / (sd(d) / sqrt(4)), d the difference of each pair.

    Times are paired only if the runs alternated, and nothing is with other seeds.
    """
    write_pairs("new/baseline", "new")
    assert PAIRED in run("new/baseline new")[1]
    write_pairs("base", "new")
    without_times = PAIRED.replace("  time    -0.950 s (-1.14 %)    -14.72     3.0     0.0007\n", "")
    assert without_times in run("base new")[1]
    Path("new/3.txt").write_text(own_log(seed=4))
    assert "pairs" not in run("base new")[1]


def test_pairs_that_all_differ_alike_have_no_test(run, recwarn):
    write_group("base", 90)
    write_group("new", 92)
    assert "  loss    +0.0000               -          -       -\n" in run("base new")[1]
    assert not recwarn.list


# ---------------------------------------------------------------------------------------------------- reports


@pytest.mark.slow
def test_curves_are_drawn(run, monkeypatch):
    """Also of runs that diverged, lack times, or were cut off; and after a notebook, which sets MPLBACKEND
    to a package that other environments lack.
    """
    write("a", 3.27, 3.26)
    write("diverged", math.nan)
    Path("llmc.log").write_text("s:0 trl:11.5 lr:0\ns:1 tel:11.0\ns:1 trl:10.5 lr:0\ns:500 tel:3.27\n")
    Path("cut.log").write_text(steps().partition("step:500/500 val")[0])
    monkeypatch.setenv("MPLBACKEND", "module://no_such_package.backend")
    command = f"'{sys.executable}' '{compare.__file__}' a diverged llmc.log cut.log --curves loss.png"
    subprocess.run(command, shell=True, check=True)
    assert Path("loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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


def test_validations_are_those_that_all_runs_share():
    """Times before a restart of the clock are unknown."""
    group = group_of([], [])
    group.runs[0].curve = [Point(0, 9.0, 500.0), Point(9, 3.0, 2.0)]
    group.runs[1].curve = [Point(0, 8.0, 0.1), Point(7, 3.5, 3.5), Point(9, 3.0, 4.0)]
    expected = [(0, math.nan, 8.5, 0.5**0.5), (9, 3, 3, math.nan)]
    np.testing.assert_allclose(compare.mean_curve(group), expected)


DIFF = """config
--- a.txt
+++ b.txt
@@ -3 +3 @@
-layers.1: "short"
+layers.1: "long"
script
--- a.txt
+++ b.txt
@@ -1,2 +1,2 @@
 x = 1
-y = 2
+y = 3
"""


def test_diff(run):
    log = own_log(seed=1, source="x = 1\ny = 2", config={"layers": ["long", "short"]})
    Path("a.txt").write_text(log)
    Path("b.txt").write_text(log.replace("short", "long").replace("y = 2", "y = 3"))
    assert run("--diff a.txt b.txt")[1] == DIFF
    assert run("--diff a.txt a.txt") == (0, "config\n  no difference\nscript\n  no difference\n", "")
    Path("screen").write_text(steps())
    assert run("--diff a.txt screen")[0] == 2


# -------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_read_is_named_and_the_rest_reported(run):
    """An empty path, as in a=$UNSET, does not mean this folder, and all logs in it. A bell does not ring."""
    Path("latin.txt").write_bytes(own_log(3.27, header=HEADER.replace("H100", "H\xe9\a")).encode("latin-1"))
    Path("broken.txt").write_text("config: {broken}\n" + steps())
    Path("twice.txt").write_text('config: {}\nconfig: {"seed": 1}\n' + steps())
    Path("dangling.txt").symlink_to("nowhere")
    Path("binary.txt").write_bytes(bytes(range(256)) * 40)
    late = "step:8/9 train_time:1ms step_avg:1ms train_loss:1.2@"
    Path("late.txt").write_text(f"{late}9\n")
    Path("beyond.txt").write_text(f"{late.replace('8/9', '80/9')}80\n")
    others = "broken.txt twice.txt dangling.txt binary.txt late.txt beyond.txt gone\a.txt *.missing"
    code, out, err = run(f"latin.txt {others} a=")
    assert code == 2 and "NVIDIA H\ufffd\\x07\n" in out
    named = re.findall("^compare.py: (.*?): .*\n", err, re.MULTILINE)
    assert named == [*others.replace("\a", "\\x07").split(), "an empty path"]


ODD = [  # values that a fork's or an edited config may have
    '"target": 0',
    '"val_slices": -1',
    '"seed": [1]',
    '"target": "1.07"',
    '"target": NaN',
    '"track": 5',
    '"deep": ' + "[" * 100_000,
]


@pytest.mark.parametrize("odd", ODD, ids=[odd[:20] for odd in ODD])
def test_an_odd_config_is_named(run, odd):
    Path("log").write_text(f"config: {{{odd}}}\n{steps()}")
    assert re.fullmatch(r"compare.py: log: its config .*\n", run("log")[2])


# No argument at all; then also options that would have no effect.
BAD_USAGE = """
x --diff a b
--begin a --update
--diff a b --json
--update --target 3
--begin a --json
a b --json --anyway
x --target nan
x --target 0
x --curves missing/a.png
x --curves readme.md"""


@pytest.mark.parametrize("arguments", BAD_USAGE.split("\n"))
def test_bad_usage(run, arguments):
    Path("readme.md").write_text("mine")
    with pytest.raises(SystemExit) as e:
        run(arguments)
    assert e.value.code == 2


def test_a_missing_package_is_one_line(run, monkeypatch):
    write("a", 3.27, 3.28)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert re.fullmatch("compare.py: needs scipy, .*\n", run("a")[2])


# ------------------------------------------------------------------------------------------ records/README.md

CPU = TRACKS["cpu"] | {"track": "cpu", "preset": "cpu"}
FIRST = "cpu/2026-01-02_First"
NEXT = "cpu/2026-01-03_Next"


def cpu_log(loss, seconds, commit="12ab (clean)", header=HEADER):
    """Returns a log of the track `cpu`."""
    return own_log(loss, seconds, config=CPU, header=header.replace("12ab (clean)", commit))


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes another records/: a listed record, and one that is not listed yet."""
    folder = tmp_path / "records"
    write(folder / FIRST, cpu_log(1.06, 100), cpu_log(1.061, 102), "no log")
    # Some editors write a byte order mark.
    (folder / FIRST / "README.md").write_text("\ufeff# First: the preset\n\nMore.\n")
    commits = "12ab (clean)", "56cd (modified)", "78ef (??)"
    write(folder / NEXT, *map(cpu_log, [1.06, 1.061, 1.062], [90, 92, 91], commits))
    (folder / NEXT / "README.md").write_text("# Next, a|b\\|c\n")
    write(folder / NEXT / "baseline", *map(cpu_log, [1.06, 1.061, 1.062], [100.1, 101, 101.4]))
    write_referee(folder / NEXT, preset="cpu")
    # First is listed, from times when nothing was asked.
    listed = f"<!-- records -->\n| 2026-01-02 | [First]({FIRST}) | 2 |\n<!-- /records -->\n"
    (folder / "README.md").write_text(f"# Records\n{listed}after\n")
    (tmp_path / "README.md").write_text("before\n<!-- leaderboard -->\nold\n<!-- /leaderboard -->\n")
    monkeypatch.setattr(compare, "HERE", folder)
    return folder


README = f"""# Records
<!-- records -->
### `cpu`

| {" | ".join(compare.RECORD_COLUMNS)} |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 2026-01-02 | [First]({FIRST}) | 2 | 1.0605 | 0.0167 | 101.0 s | - | 8 x NVIDIA H100 | 12ab |
| 2026-01-03 | [Next]({NEXT}) | 3 + 3 | 1.0610 | 0.0020 | 91.0 s | -9.8 %, p 0.0003 | 8 x NVIDIA H100 | \
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
| 2026-01-03 | [Next](records/{NEXT}) | Next, a\\|b\\|c | -9.8 % |
<!-- /leaderboard -->
"""


@pytest.mark.slow
def test_update_writes_tables_and_draws_what_changed(run, records):
    """A record that is listed stays listed."""
    assert run("--update") == (0, "", "")
    readme = records / "README.md"
    assert (readme.read_text(), Path("README.md").read_text()) == (README, FRONT)
    pictures = [records / FIRST / "curves.png", records / NEXT / "curves.png"]
    for picture in pictures:
        picture.write_bytes(picture.read_bytes() + b"not drawn again")
    (records / NEXT / referee.FILE_NAME).unlink()
    write(records / NEXT / "baseline", cpu_log(1.06, 99, header=ON_A100))
    assert run("--update")[0] == 0
    assert [path.read_bytes().endswith(b"not drawn again") for path in pictures] == [True, False]
    assert "91.0 s | - | 8 x" in readme.read_text()  # another machine: no percentage


REFUSED = {  # what is changed in the folder that is not listed, and the reason
    "no referee": (lambda folder: (folder / referee.FILE_NAME).unlink(), "there is no .*referee.txt"),
    "track": (lambda folder: write(folder, 3.27, 3.26, 3.25), "not of the track `cpu`"),
    "alone": (lambda folder: shutil.rmtree(folder / "baseline"), "it has no baseline/"),
}


@pytest.mark.parametrize("change, reason", REFUSED.values(), ids=REFUSED)
def test_what_is_no_record_is_not_listed(run, records, change, reason):
    change(records / NEXT)
    code, _, err = run("--update")
    assert code == 2
    assert re.fullmatch(rf"compare.py: \S*{NEXT}: not listed, because .*{reason}.*\n", err)
    assert "Next" not in (records / "README.md").read_text()


def test_a_copy_of_a_listed_record_is_refused_though_its_date_is_earlier(records):
    shutil.copytree(records / FIRST, records / "cpu/2026-01-01_Copy")
    _, (reason,) = compare.read_records([])
    assert f"_Copy: not listed, because runs of it are in {records / FIRST}, too" in reason


LOST = {  # what happens to a listed record's folder, and what --update says
    "a run": (lambda folder: (folder / "0.txt").unlink(), "1 of its 2 listed runs count"),
    "all": (shutil.rmtree, "no such file or folder"),
    "the baseline": (
        lambda folder: (folder / "../../README.md").write_text(f"[]({FIRST}) | 2 + 1 |"),
        "0 of its 1 listed runs count",
    ),
    "another's among them": (
        lambda folder: (folder / "9.txt").write_text(own_log()),
        "3 runs count, and 2 are listed",
    ),
}


@pytest.mark.parametrize("change, says", LOST.values(), ids=LOST)
def test_tables_stay_if_a_listed_record_has_lost_runs(run, records, change, says):
    change(records / FIRST)
    before = (records / "README.md").read_text()
    code, _, err = run("--update")
    assert code == 2
    assert re.fullmatch(rf"compare.py: \S*/{FIRST}(/baseline)?: {says}.*\n", err)
    assert (records / "README.md").read_text() == before


def test_a_listed_record_is_listed_only_in_its_place(run, records):
    write(FIRST, 3.27)
    places = records / FIRST / "0.txt", Path(FIRST, "0.txt"), records / FIRST / "a"
    assert list(map(compare.is_listed, places)) == [True, False, False]


def test_no_page_is_written_if_marks_or_a_title_are_missing_or_a_log_is_broken(run, records):
    before = (records / "README.md").read_text()
    Path("README.md").write_text("mine\n")
    assert "/README.md: needs a line <!-- leaderboard -->" in run("--update")[2]
    Path("README.md").write_text(FRONT)
    (records / FIRST / "README.md").write_text("\n# Late\n")
    assert f"{FIRST}/README.md: its first line has no title: " in run("--update")[2]
    (records / FIRST / "README.md").write_text("# First", "utf-16")
    assert f"{FIRST}/README.md: is not in UTF-8: " in run("--update")[2]
    write(records / NEXT, "config: {broken}\n" + steps())
    assert run("--update")[0] == 2
    assert (records / "README.md").read_text() == before


def test_a_full_disk_leaves_pages_as_they_were(run, records):
    """As does a limit on the size of files."""
    before = (records / "README.md").read_text()
    readme = records / NEXT / "README.md"
    readme.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        codes = run("--update")[0], run(f"--begin {records / NEXT}")[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert codes == (2, 2) and (records / "README.md").read_text() == before
    assert not readme.exists()


def without_indentation(text):
    """Returns the text without indentation and empty lines."""
    return re.sub(r"\n\s*", "\n", text.strip())


def test_the_tables_and_pictures_are_what_the_logs_give(monkeypatch):
    """So are the records' READMEs, without indentation and empty lines. A run may just have made others."""
    monkeypatch.chdir(ROOT)
    fix = "python records/compare.py --update"
    records = [record for record in compare.read_records([])[0] if compare.is_listed(record.folder)]
    assert len(records) >= 4
    for path, text in compare.pages(records).items():
        assert path.read_text() == text, fix
    for record in records:
        picture = record.folder / "curves.png"
        mark = compare.Picture(record.groups, []).mark
        assert mark.encode() in picture.read_bytes() and picture.stat().st_size < 200_000, fix
        table = compare.text_report(record.groups, False).replace(f"{ROOT}/", "")
        readme = without_indentation((record.folder / "README.md").read_text())
        assert without_indentation(table) in readme and "](curves.png)" in readme, record.folder
