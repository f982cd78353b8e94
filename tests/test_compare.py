"""Tests records/compare.py: log formats and their traps, statistics, reports, what --update makes."""

import itertools
import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import compare

FIXTURES = json.loads((ROOT / "tests" / "log_fixtures.json").read_text())
SEEDS = itertools.count()  # distinct: runs of one seed in a group cause a warning
HEADER = """Running Python 3.12.7
Running PyTorch 2.13.0 compiled for CUDA 12.8 on NVIDIA H100 with world_size 8
commit: 12ab (clean)"""
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
BASE_LOSSES, BASE_TIMES = [3.2781, 3.2790, 3.2776], [95.972, 95.914, 95.985]


def steps(loss=3.2785, seconds=95.0, total=500, first=0, last=None, validate_last=True):
    """Returns lines of steps `first` to `last` (default: all), validated every 125 steps and at the end."""
    last, lines = total if last is None else last, []
    for step in range(first, last + 1, 25):
        prefix, ms = f"step:{step}/{total}", seconds * 1000 * step / total
        train_time = f"train_time:{ms:.0f}ms"
        if step:
            lines.append(f"{prefix} {train_time} step_avg:{ms / step:.2f}ms")
        if step % 125 == 0 and step < last:
            average = "nan" if step < 10 else "9.00"
            lines.append(f"{prefix} val_loss:{11 - 7 * step / total:.4f} {train_time} step_avg:{average}ms")
    if validate_last:
        lines.append(f"{prefix} val_loss:{loss:.4f} {train_time} step_avg:9.00ms")
    return "\n".join(lines)


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
    settings = {"target": 3.28, "seed": next(SEEDS), "val_slices": 128, "val_slice_tokens": 4096}
    rule, config = "=" * 100, json.dumps(settings | dict(config))
    lines = [source, rule, header, f"config: {config}", f"data: {data}", rule]
    lines += [steps(loss, seconds, **options), "peak memory allocated: 31253 MiB reserved: 46520 MiB"]
    return "\n".join(lines) + "\n" + closing


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Returns a function that runs compare.py in an empty folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = compare.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


def write(folder, *texts):
    """Writes logs 0.txt, 1.txt, ...; of a number, our log with this loss."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        text = own_log(text, 90 + i) if isinstance(text, float) else text
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


def write_runs(folder, losses, times):
    return write(folder, *map(own_log, losses, times))


def read(tmp_path, text):
    """Returns the runs in a log, and the notes on it."""
    (tmp_path / "log").write_text(text)
    return compare.read_log(str(tmp_path / "log"))


def read_json(run, *arguments):
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out), err


# ------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("fixture", FIXTURES, ids=[f["expect"]["format_era"] for f in FIXTURES])
def test_published_formats(fixture, tmp_path):
    want = fixture["expect"]
    for end in ("", "\n", "\r\n"):  # "": no final newline
        path = tmp_path / "log.txt"
        path.write_bytes((end or "\n").join(fixture["tail"]).encode() + end.encode())
        ((run,), notes), time = compare.read_log(str(path)), want["final_train_time_ms"]
        assert (run.final_step, run.total_steps) == (want["final_step"], want["total_steps"])
        assert (run.val_loss, run.peak_mem_mib) == (want["final_val_loss"], want["peak_mem_mib"])
        assert (run.complete, notes) == (want["complete"], [])
        assert run.train_time_s == (None if time is None else pytest.approx(time / 1000, abs=1e-9))


def test_own_log(tmp_path):
    """Checks that the source's look-alikes are not read."""
    (run,), notes = read(tmp_path, own_log(3.2771, 94.5, source=LOOK_ALIKES))
    assert (run.final_step, run.val_loss, run.train_time_s, notes) == (500, 3.2771, 94.5, [])
    assert (run.peak_mem_mib, run.per_byte, run.complete) == (31253, 0.9, True)
    assert (run.header.torch, run.header.hardware) == ("2.13.0", "8 x NVIDIA H100")
    assert (run.header.data, run.header.commit) == ("ab12 (9 tokens)", "12ab")
    assert [point[0] for point in run.curve] == [0, 125, 250, 375, 500]


def test_any_number_of_rules_may_follow_the_source(tmp_path):
    version = "Running pytorch 2.6.0.dev20241231+cu126 compiled for CUDA 12.6"
    blocks = ["Running Python 3.12.7", version, SMI, ""]
    for rules in (1, 2, 3, 4):
        header = "".join(f"\n{'=' * 100}\n{block}" for block in blocks[:rules])
        (run,), notes = read(tmp_path, f"{LOOK_ALIKES}{header}\n{steps(3.27, 90)}")
        assert (run.final_step, run.val_loss, run.peak_mem_mib, notes) == (500, 3.27, None, [])
        assert run.header.torch == ("2.6.0.dev20241231+cu126" if rules > 1 else None)
        assert run.header.hardware == ("2 x NVIDIA H100 80GB HBM3" if rules > 2 else None)


LLMC = "s:{} trl:{} lr:0.000001 norm:15.37\n".format
OURS = "step:{}/4 train_time:{}ms step_avg:9.00ms{}\n".format
PUBLIC = "step:{}/4 train_loss:{} train_time:{}ms step_avg:nanms\n".format
RESTART = "step:9/20 train_time:243813ms step_avg:nanms\nsome other line\n"
RESTART += "step:11/20 train_time:135ms step_avg:nanms\nstep:20/20 train_time:1900ms step_avg:90.00ms\n"
# fmt: off
ODD_LOGS = [  # text, what is read: final step, number of steps, loss, seconds
    # A line that was cut off shows that the run went on.
    (steps(3.27, 90, last=250) + "\nstep:275/500 train_ti\nstep:27", 275, 500, None, None),
    # The clock restarts; the time is the last validation's.
    (RESTART + "step:20/20 val_loss:3.2 train_time:1966ms step_avg:98.30ms\n", 20, 20, 3.2, 1.966),
    ("step:8/8 val_loss:3.123456 val_ema_loss:3.1 train_time:12.345s step_avg:9.1ms lr:0.1 note:x=y\n",
     8, 8, 3.123456, 12.345),
    ("s:0 tel:11.0\n" + LLMC(0, 11.0) + "s:250 tel:6.17\n" + LLMC(250, 6.18), 251, None, None, None),
]
TRAINING_LOGS = [  # text, (step, loss, seconds)
    (OURS(1, 100, " train_loss:5.5@1") + OURS(2, 210, " train_loss:4.2@2"), [(1, 5.5, 0.1), (2, 4.2, 0.21)]),
    # Step 1's loss arrives while step 2 is done, step 2's with step 3's.
    (OURS(1, 100, "") + OURS(2, 210, " train_loss:5.5@1") + OURS(3, 330, " train_loss:5.5@1")
     + OURS(4, 450, " train_loss:3.5@3"), [(1, 5.5, 0.1), (3, 3.5, 0.33)]),
    (PUBLIC(1, 9.5, 100) + PUBLIC(2, "nan", 200), [(1, 9.5, 0.1), (2, math.nan, 0.2)]),
    (LLMC(0, 11.5) + "s:1 tel:11.0\n" + LLMC(1, 10.5), [(1, 11.5, None), (2, 10.5, None)]),
    (steps(), []),
]
# fmt: on


def test_odd_lines_and_training_losses(tmp_path):
    for text, *expected in ODD_LOGS:
        (found,), _ = read(tmp_path, text)
        assert [found.final_step, found.total_steps, found.val_loss, found.train_time_s] == expected
        assert found.complete == (found.val_loss is not None)
    for text, training in TRAINING_LOGS:
        (found,), _ = read(tmp_path, text)
        assert repr(found.training) == repr(training)


def test_several_runs_in_a_file(tmp_path):
    """Also one whose first step is not below the last one's, since its number of steps is another."""
    text = own_log(3.27, 90) + own_log(3.26, 91, header=HEADER.replace("2.13.0", "2.14.0"))
    text += steps(3.25, 92, total=400, first=25) + f"\n{HEADER}\n{steps(3.24, 93)}\n"
    # The end is repeated, with closing lines.
    text += "\n".join(text.splitlines()[-4:]) + "\npeak memory allocated: 77 MiB reserved: 88 MiB\n"
    runs, notes = read(tmp_path, text)
    assert [(r.index, r.val_loss, r.train_time_s, r.total_steps, r.header.torch) for r in runs] == [
        (0, 3.27, 90.0, 500, "2.13.0"),
        (1, 3.26, 91.0, 500, "2.14.0"),
        (2, 3.25, 92.0, 400, "2.14.0"),  # the header before it, whose config means that it must be closed
        (3, 3.24, 93.0, 500, "2.13.0"),
    ]
    assert [r.complete for r in runs] == [True, True, False, True]
    assert [r.peak_mem_mib for r in runs] == [31253, 31253, None, 77] and len(notes) == 1
    (text, losses), (second, more) = TRAINING_LOGS[1::-1]
    runs, _ = read(tmp_path, text + second)
    assert [run.training for run in runs] == [losses, more]


# ----------------------------------------------------------------------------------------------------- groups


def test_paths_and_labels(run, tmp_path):
    write(tmp_path / "my runs" / "baseline", 3.30)
    write(tmp_path / "my runs", 3.27, 3.26, "no log at all")
    (tmp_path / "my runs" / "README.md").write_text(steps(1.0))
    (tmp_path / "lr=2.txt").write_text(own_log(3.25))
    write(tmp_path / "rec" / "this pr", 3.24)
    write(tmp_path / "rec", "torch==2.13.0\n")  # a .txt, but no log
    write(tmp_path / "other" / "my runs", 3.23)
    paths = ["new=my runs", "my runs/[01].txt", "lr=2.txt", "old=my runs/baseline", "my runs", "new=rec"]
    out, err = read_json(run, *paths, "other/my runs")
    assert [(g["label"], g["n"], round(g["loss_mean"], 3)) for g in out["groups"]] == [
        ("new", 3, 3.257),
        ("my runs/[01].txt", 2, 3.265),
        ("lr=2", 1, 3.25),
        ("old", 1, 3.3),
        ("my runs", 2, 3.265),
        ("other/my runs", 1, 3.23),
    ]
    assert "2.txt: holds no run" in err
    assert [c["baseline"] for c in out["comparisons"]] == ["new"] * 5
    (tmp_path / "my runs/0.txt").unlink()
    (tmp_path / "my runs/1.txt").unlink()
    assert run("my runs")[0] == 2  # a record is not its baseline


def test_repeats_are_dropped_and_named(run, tmp_path):
    folder = write_runs(tmp_path / "runs", [3.27, 3.27, 3.28, 3.27], [90, 90, 90, 91])
    (folder / "10.stdout").write_text(steps(3.28, 90))  # sorts before the log, and has no header
    out, err = read_json(run, "runs")
    assert [r["path"] for r in out["groups"][0]["runs"]] == ["runs/0.txt", "runs/2.txt", "runs/3.txt"]
    assert "runs/1.txt: dropped, the same run as runs/0.txt" in err
    assert "runs/10.stdout: dropped, the same run as runs/2.txt" in err


# fmt: off
@pytest.mark.parametrize("text, loss, time, complete, note", [
    (own_log(last=150, validate_last=False, closing=""), None, None, False, "incomplete"),
    (own_log(3.2, 80, closing="epochs: 2\ncomplete: yes\n"), None, None, False, "2 epochs"),
    (own_log(3.2, 80, closing=""), 3.2, 80, False, "complete: yes"),
    (steps(3.2, 90, last=450), 3.2, 81, False, "stopped"),
    (own_log(math.nan, 80, closing="epochs: 1\ncomplete: yes\n"), None, 80, True, None),
])
# fmt: on
def test_which_runs_count(run, tmp_path, text, loss, time, complete, note):
    write(tmp_path / "runs", 3.27, text)
    out, err = read_json(run, "runs")
    (group,) = out["groups"]
    found = group["runs"][1]
    assert (found["val_loss"], found["train_time_s"], found["complete"]) == (loss, time, complete)
    assert group["n"] == (1 if time is None else 2)
    assert note in err if note else err == ""
    if not note:  # a diverged run counts against its group
        assert (group["loss_mean"], group["p_target"], group["meets_target"]) == (None, None, False)


# fmt: off
@pytest.mark.parametrize("change, name, values", [
    (dict(total=525), "steps", "500; 525"),
    (dict(header=ON_A100), "hardware", "8 x NVIDIA A100; 8 x NVIDIA H100"),
    (dict(config={"val_slices": 64}), "val_slices", "64; 128"),
    (dict(config={"val_slice_tokens": 64}), "val_slice_tokens", "64; 4096"),
    (dict(data="ab12 (8 tokens)"), "data fingerprints", "ab12 (8 tokens); ab12 (9 tokens)"),
    (dict(config={"target": 2.92}), "targets", "2.92; 3.28"),
])
# fmt: on
def test_warnings_about_what_is_mixed(run, tmp_path, change, name, values):
    write(tmp_path / "base", 3.27, 3.26)
    write(tmp_path / "mixed", own_log(3.27, 92), own_log(3.26, 93, **change))
    out, err = read_json(run, "base", "mixed")
    assert f"mixed: mixed {name}: {values}" in err and "warning: base" not in err
    assert (f"mixed: not the same {name} as base" in err) == (name != "steps")
    assert f"the target {2.92 if name == 'targets' else 3.28}" in run("mixed")[1]  # the lowest


def test_a_warning_about_runs_of_one_seed(run, tmp_path):
    """Checks that seeds may repeat between groups, but not within one."""
    write(tmp_path / "runs", *(own_log(3.27, 90 + i, config={"seed": s}) for i, s in enumerate([3, 4, 3, 3])))
    write(tmp_path / "base", own_log(3.28, 91, config={"seed": 3}))
    _, err = read_json(run, "base", "runs")
    assert err == "compare.py: warning: runs: 3 runs of seed 3, which are not independent\n"


def test_no_percentage_between_machines_or_data(run, tmp_path):
    write(tmp_path / "a", own_log(3.27, 90))
    write(tmp_path / "same", own_log(3.27, 91))
    write(tmp_path / "packed", own_log(3.27, 91, data="ab12 (9 tokens), packed otherwise"))
    write(tmp_path / "machines", own_log(3.27, 91, header=ON_A100))
    write(tmp_path / "data", own_log(3.27, 91, data="cd34 (9 tokens)"))
    (tmp_path / "public.txt").write_text(steps(3.27, 91))  # says neither
    for alike in ("same", "packed", "public.txt"):
        assert "(+1.11 %)" in run("a", alike)[1]
    for other in ("machines", "data"):
        out = run("a", "same", other)[1]
        assert out.startswith("warning: ") and other in out.splitlines()[0]
        assert " %" not in out and "+1.000 s" in out
        assert run("a", "same", other, "--anyway")[1].count("(+1.11 %)") == 2


def test_a_records_readme_is_begun_once(run, tmp_path, monkeypatch):
    folder, readme = "2026-11-24_My_Idea", tmp_path / "2026-11-24_My_Idea/README.md"
    write(folder, 3.27, 3.26)
    table = run(folder)[1]
    for command in ("    ./run.sh --runs 2 --name My_Idea\n\n", ""):
        monkeypatch.setenv("RUN_COMMAND", command.strip())
        if not command:
            monkeypatch.delenv("RUN_COMMAND")
        code, out, _ = run("--begin", folder)
        assert code == 0 and out.startswith(table) and "README.md begins" in out
        assert readme.read_text() == (
            f"# My_Idea\n\n(What was changed, against which record, and why.)\n\n{command}"
            f"What `python records/compare.py {folder}` prints:\n\n{textwrap.indent(table, '    ')}"
        )
        readme.write_text("mine")
        assert "left as it is" in run("--begin", folder)[1] and readme.read_text() == "mine"
        readme.unlink()
    write(folder, "config: {broken}\n" + steps())
    assert run("--begin", folder)[0] == 2 and not readme.exists()


# -------------------------------------------------------------------------------------- a run in several logs

UNFINISHED = dict(validate_last=False, closing="")
# fmt: off
CUT = dict(closing="")
RESUMED = {  # the logs of seed 1, {name: (seconds, resumed after, options)}; which counts; its curve's
    # (step, seconds of the log that it is from)
    "stopped after a validation": (
        {"seed1": (90, 0, dict(last=250, **CUT)), "seed1.from100": (91, 100, {})},
        "seed1.from100", [(125, 91), (250, 91), (375, 91), (500, 91)]),
    "validated again": (
        {"seed1": (90, 0, dict(last=375, **CUT)), "seed1.from250": (91, 250, dict(first=250))},
        "seed1.from250", [(125, 90), (250, 91), (375, 91), (500, 91)]),
    "the first went further": (
        {"seed1": (90, 0, dict(last=375, **CUT)), "seed1.from100": (91, 100, dict(last=250, **CUT))},
        "seed1", [(125, 90), (250, 90), (375, 90)]),
    "not validated": (
        {"seed1": (90, 0, dict(last=250, **CUT)), "seed1.from225": (91, 225, dict(last=300, **UNFINISHED))},
        None, None),
    "twice": (
        {"seed1": (90, 0, dict(last=225, **UNFINISHED)),
         "seed1.from100": (91, 100, dict(last=375, **CUT)),
         "seed1.from100_2": (92, 100, dict(last=250, **CUT)),
         "seed1.from300": (93, 300, {})},
        "seed1.from300", [(125, 91), (250, 91), (375, 93), (500, 93)]),
}
# fmt: on


@pytest.mark.parametrize("logs, counts, curve", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_counts_once(tmp_path, logs, counts, curve):
    for name, (seconds, after, options) in logs.items():
        data = f"ab12\nresumed: seed1 after step {after}; by another script" if after else "ab12"
        text = own_log(3.0, seconds, data=data, **{"first": after // 25 * 25 + 25 if after else 0} | options)
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "seed2.txt").write_text(own_log(3.1, 95))
    (group,), errors = compare.read_groups([str(tmp_path)], None)
    assert errors == [] and [r.val_loss for r in group.counted] == ([3.0, 3.1] if counts else [3.1])
    if counts:
        run = group.counted[0]
        assert Path(run.path).stem == counts
        assert [(s, round(500 * time / s)) for s, _, time in run.curve if s] == curve
    (joined,) = (note for note in group.notes if "resumed, one run with" in note)
    assert all(f"{name}.txt" in joined for name in logs)


def test_training_losses_of_a_resumed_run_are_those_of_what_went_on(tmp_path):
    """Checks that those of the first log end with the checkpoint's step."""
    first = [OURS(step, step, f" train_loss:{step}.5@{step}") for step in (1, 2, 3)]
    second = [OURS(step, step, f" train_loss:{step}.25@{step}") for step in (3, 4)]
    (tmp_path / "seed1.txt").write_text("config: {}\n" + "".join(first))
    (tmp_path / "seed1.from2.txt").write_text("config: {}\nresumed: seed1 after step 2\n" + "".join(second))
    (group,), _ = compare.read_groups([str(tmp_path)], None)
    assert [loss for _, loss, _ in group.runs[0].training] == [1.5, 2.5, 3.25, 4.25]


# ------------------------------------------------------------------------------------------------- statistics


def test_one_sided_p_of_the_target(run, tmp_path):
    write_runs(tmp_path / "runs", LOSSES, TIMES)
    (group,) = read_json(run, "runs")[0]["groups"]
    assert (round(group["p_target"], 4), group["meets_target"]) == (0.0423, False)
    assert (round(group["loss_mean"], 4), round(group["loss_std"], 4)) == (3.2785, 0.0014)
    assert (group["n"], group["time_mean_s"]) == (5, pytest.approx(95.2072))
    assert group["time_std_s"] == pytest.approx(np.std(TIMES, ddof=1))
    text = run("runs")[1]
    assert "0.0423" in text and "not shown to meet the target 3.28" in text
    assert "  meets the target 3.29 (p < 0.01)" in run("runs", "--target", "3.29")[1]
    # However significant: the mean is above.
    (group,) = read_json(run, "runs", "--target", "3.27")[0]["groups"]
    assert group["p_target"] > 0.99 and group["meets_target"] is False
    assert "  does not meet the target 3.27" in run("runs", "--target", "3.27")[1]
    write(tmp_path / "own", *(own_log(loss, 90 + loss, config={"target": 3.285}) for loss in LOSSES))
    assert "  meets the target 3.285" in run("own")[1]


def test_welch_against_the_baseline(run, tmp_path):
    """Checks t = (m1 - m2) / sqrt(v1 + v2), v = s^2 / n, and df = (v1 + v2)^2 / sum(v^2 / (n - 1))."""
    write_runs(tmp_path / "base", BASE_LOSSES, BASE_TIMES)
    write_runs(tmp_path / "new", LOSSES, TIMES)
    (result,) = read_json(run, "old=base", "new")[0]["comparisons"]
    assert (result["group"], result["baseline"]) == ("new", "old")
    for what, unit, here, there in (("time", "_s", TIMES, BASE_TIMES), ("loss", "", LOSSES, BASE_LOSSES)):
        delta, (v1, v2) = np.mean(here) - np.mean(there), (np.var(x, ddof=1) / len(x) for x in (here, there))
        df = (v1 + v2) ** 2 / (v1**2 / (len(here) - 1) + v2**2 / (len(there) - 1))
        assert result[f"{what}_delta{unit}"] == pytest.approx(delta)
        assert result[f"{what}_t"] == pytest.approx(delta / (v1 + v2) ** 0.5)
        assert result[f"{what}_df"] == pytest.approx(df)
    assert result["time_p"] < 1e-4 and result["loss_p"] > 0.5
    assert "-0.750 s (-0.78 %)" in run("old=base", "new")[1]


def test_what_is_not_defined_is_null(run, tmp_path, recwarn):
    write(tmp_path / "one", own_log(3.27, 90))
    write(tmp_path / "same", own_log(3.27, 90), own_log(3.27, 91))
    write(tmp_path / "times", own_log(3.26, 92), own_log(3.27, 92))
    (tmp_path / "llmc.log").write_text("s:0 tel:11.0\ns:500 tel:3.27\n")
    out, _ = read_json(run, "one", "same", "llmc.log")
    one, same, llmc = out["groups"]
    assert one["loss_std"] is one["time_std_s"] is one["p_target"] is None and one["meets_target"] is False
    assert (same["loss_std"], same["p_target"]) == (0.0, None)
    assert (llmc["loss_mean"], llmc["time_mean_s"], llmc["runs"][0]["train_time_s"]) == (3.27, None, None)
    known = {name: value for name, value in out["comparisons"][1].items() if value is not None}
    assert known == {"group": "llmc", "baseline": "one", "loss_delta": 0.0}
    assert run("same", "times")[0] == 0 and not recwarn.list  # one of the two does not vary


# ---------------------------------------------------------------------------------------------------- reports


@pytest.mark.slow
def test_curves_are_a_png_with_their_mark(run, tmp_path):
    write_runs(tmp_path / "a", LOSSES, TIMES)
    write(tmp_path / "diverged", math.nan)
    (tmp_path / "llmc.log").write_text(LLMC(0, 11.5) + "s:0 tel:11.0\n" + LLMC(499, 3.3) + "s:500 tel:3.27\n")
    (tmp_path / "cut.log").write_text(steps(last=150, validate_last=False))
    paths = ["a", "diverged", "llmc.log", "cut.log"]
    code, _, err = run(*paths, "--curves", "loss.png")
    picture = compare.Picture(compare.read_groups(paths, None)[0], [])
    assert code == 0 and "val_every" in err and compare.is_current(tmp_path / "loss.png", picture.mark)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert run("a", "--curves", "a.png") == (0, run("a")[1], "")  # five validations are enough
    code, out, err = run("a", "--curves", "missing/loss.png")
    assert code == 2 and "missing/loss.png" in err and "3.2785" in out


def test_the_mark_of_curves_changes_with_what_is_drawn_only(tmp_path):
    def mark(*text, name="a", label="label", target=3.28, lines=(), **options):
        write(tmp_path / name, *text or [own_log(3.27, **options)])
        groups, _ = compare.read_groups([f"{label}={tmp_path / name}"], target)
        return compare.Picture(groups, list(lines)).mark

    before = mark()
    assert before == mark(source="y = 2\n", name="b") == mark(config={"seed": 2})
    training = own_log(3.27) + PUBLIC(500, 3.5, 95000).replace("/4", "/500")
    changed = [mark(own_log(3.26)), mark(seconds=96), mark(training), mark(target=3.3), mark(label="other")]
    assert len({before, *changed, mark(lines=[("4-gram", 1.5)])}) == 7


def group_of(*trainings):
    """Returns a group of counted runs with these training losses, each of (step, loss, seconds or None)."""
    lasts = [training[-1][0] if training else 9 for training in trainings]
    runs = (("log", 0, compare.Header(), n, n, [[n, 3.0, 9.0]], t) for n, t in zip(lasts, trainings))
    return compare.Group("label", [compare.Run(*run) for run in runs])


@pytest.mark.parametrize("seed", range(3))
def test_smoothed_training_loss(seed):
    """Compares with the mean over steps s - w to s + w, w a fortieth of the last step, over all runs."""
    rng = np.random.default_rng(seed)
    ends, firsts = rng.integers(50, 300, 3), rng.integers(1, 20, 3)
    runs = [
        {step: (rng.uniform(1, 9), rng.uniform(0, 0.5) + step) for step in range(first, end + 1)}
        for first, end in zip(firsts, ends)
    ]
    curve = compare.training_curve(group_of(*([(step, *v) for step, v in run.items()] for run in runs)))
    steps = range(max(firsts), min(ends) + 1)
    assert [step for step, _, _ in curve] == list(steps)
    w = round(0.025 * min(ends))
    for step, time, loss in curve:
        window = [run[s][0] for s in range(step - w, step + w + 1) if s in steps for run in runs]
        assert loss == pytest.approx(sum(window) / len(window), rel=1e-12)
        assert time == pytest.approx(sum(run[step][1] for run in runs) / 3, rel=1e-12)


# fmt: off
@pytest.mark.parametrize("trainings, curve", [
    ([[(1, 4.0, 1.0), (2, math.nan, 1.5), (3, 2.0, 2.0), (4, 2.0, 4.0)]],  # not logged: interpolated
     [(1, 1.0, 4.0), (2, 1.5, 3.0), (3, 2.0, 2.0), (4, 4.0, 2.0)]),
    ([[(1, 5.0, 2.5), (2, 5.0, 0.5), (3, 4.0, 3.0)]],  # the clock restarted
     [(1, math.nan, 5.0), (2, 0.5, 5.0), (3, 3.0, 4.0)]),
    ([[(1, 4.0, None)], []], []),
    ([[(1, 4.0, None)], [(3, 4.0, None)]], []),
])
# fmt: on
def test_training_losses_that_lack_something(trainings, curve):
    assert repr(compare.training_curve(group_of(*trainings))) == repr(curve)


def test_plotted_validations_are_those_that_all_runs_share():
    group = group_of([], [])
    group.runs[0].curve = [[0, 9.0, 500.0], [5, 4.0, 1.0], [9, 3.0, 2.0]]  # the clock restarted
    group.runs[1].curve = [[0, 9.0, 0.1], [5, 5.0, 3.0], [7, 3.5, 3.5], [9, 3.5, 4.0]]
    expected = [(0, math.nan, 9, 0), (5, 2, 4.5, 0.5**0.5), (9, 3, 3.25, 0.125**0.5)]
    np.testing.assert_allclose(compare.mean_curve(group), expected)


def test_diff(run, tmp_path):
    config = {"seed": 1, "layers": [{"window": "long"}, {"window": "short"}]}
    (tmp_path / "a.txt").write_text(own_log(source="x = 1\ny = 2\n", config=config))
    config |= {"layers": [{"window": "long"}, {"window": "long"}], "new": 0.5}
    (tmp_path / "b.txt").write_text(own_log(source="x = 1\ny = 3\n", config=config))
    code, out, _ = run("--diff", "a.txt", "b.txt")
    assert code == 0
    changes = [line for line in out.splitlines() if line[0] in "+-" and ".txt" not in line]
    config = ['-layers.1.window: "short"', '+layers.1.window: "long"', "+new: 0.5"]
    assert changes == [*config, "-y = 2", "+y = 3"]
    assert run("--diff", "a.txt", "a.txt")[1] == "config\n  no difference\nscript\n  no difference\n"
    (tmp_path / "screen").write_text(steps())
    assert run("--diff", "a.txt", "screen")[0] == run("--diff", "a.txt", "gone")[0] == 2


# -------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_read_is_named_and_the_rest_reported(run, tmp_path):
    write(tmp_path / "runs", 3.27)
    (tmp_path / "runs" / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "broken.txt").write_text("config: {broken}\n" + steps())
    (tmp_path / "folder").mkdir()
    others = ["empty.txt", "binary.txt", "broken.txt", "folder", "gone.txt", "*.missing", "x" * 300]
    code, out, err = run("runs", *others)
    assert code == 2 and "3.2700" in out
    starts = [f"compare.py: {path}: " for path in ["runs/dangling.txt", *others]]
    assert all(line.startswith(start) for line, start in zip(err.splitlines(), starts, strict=True))
    latin = own_log(3.27, header=HEADER.replace("H100", "H\u00e9"))
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe source\n" + latin.encode("latin-1"))
    code, out, err = run("latin.txt")
    assert (code, err) == (0, "") and "NVIDIA H\ufffd" in out


@pytest.mark.parametrize("arguments", ["", "x --target low", "x --diff a b", "--begin a --update"])
def test_bad_usage(run, arguments):
    with pytest.raises(SystemExit) as e:
        run(*arguments.split())
    assert e.value.code == 2


def test_a_missing_package_is_one_line(run, tmp_path, monkeypatch):
    write(tmp_path / "a", 3.27, 3.28)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    code, _, err = run("a")
    assert code == 2 and "needs scipy," in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------ records/README.md

FIRST, NEXT = "2026-01-02_First", "2026-01-03_Next"


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes another records/, with two records, one of them with a baseline, and logs of no record."""
    folder = tmp_path / "records"
    modified = HEADER.replace("12ab (clean)", "56cd (modified)")
    write(folder / "cpu" / FIRST, own_log(3.27, 100), own_log(3.271, 102), "no log")
    runs = zip((3.27, 3.271, 3.272), (90, 92, 91), (HEADER, modified, HEADER))
    write(folder / "cpu" / NEXT, *(own_log(loss, time, header=header) for loss, time, header in runs))
    write_runs(folder / "cpu" / NEXT / "baseline", [3.27, 3.271], [100, 101])
    write(folder / "cpu" / "attempts", 3.2)
    write(folder / "other" / "2026-01-02_Other", 3.2)
    write(folder / "gpt2-small" / "2026-01-04_Aborted", own_log(last=100, **UNFINISHED))
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


ROW = "| 2026-01-0{} | [{}]({}) | {} | 8 x NVIDIA H100 | {} |".format
README = f"""# Records
<!-- records -->
### `cpu`

| {" | ".join(compare.RECORD_COLUMNS)} |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{ROW(2, "First", f"cpu/{FIRST}", "2 | 3.2705 | 0.0167 | 101.0 s | -", "12ab")}
{ROW(3, "Next", f"cpu/{NEXT}", "3 | 3.2710 | 0.0020 | 91.0 s | -9.5 %, p 0.0014", "12ab; 56cd (modified)")}

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
    assert (code, out, (records / "README.md").read_text()) == (0, "", README)
    assert "0.txt: incomplete" in err and "2026-01-04_Aborted: left out" in err
    folder = records.parent / "bench" / "curves"
    paths = [records / "cpu" / FIRST / "curves.png", records / "cpu" / NEXT / "curves.png", folder / "a.png"]
    paths.append(records / "history.png")
    assert sorted(records.parent.rglob("*.png")) == sorted(paths)
    kept = b"not drawn again"
    base = records / "cpu" / NEXT / "baseline/0.txt"
    for changed in ([], [folder / "0.txt"], [base, records / "history.csv"]):
        for path in paths:
            assert path.read_bytes().startswith(b"\x89PNG")
            path.write_bytes(path.read_bytes() + kept)
        for path in changed:
            is_log = path.suffix == ".txt"
            path.write_text(own_log(3.26, 99) if is_log else path.read_text() + "4,20,2025-01-01,a,b\n")
        assert run("--update")[0] == 0
        again = [not path.read_bytes().endswith(kept) for path in paths]
        assert again == [False, len(changed) == 2, len(changed) == 1, len(changed) == 2]
    assert "| 4 | 20 |" in (records / "README.md").read_text()
    write(records / "cpu" / NEXT / "baseline", *[own_log(3.27, 100, header=ON_A100)] * 2)
    assert run("--update")[0] == 0
    assert "91.0 s | - | 8 x" in (records / "README.md").read_text()  # another machine: no percentage


def test_update_writes_nothing_if_a_log_is_broken(run, records):
    (records.parent / "bench/curves/0.txt").write_text("config: {broken}\n" + steps())
    before = (records / "README.md").read_text()
    assert run("--update")[:2] == (2, "") and (records / "README.md").read_text() == before
    assert not (records / "history.png").exists()


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Copies records/ with the records that README.md links: a run may just have made other folders."""
    records, copy = ROOT / "records", tmp_path_factory.mktemp("committed") / "records"
    shutil.copytree(records, copy, ignore=shutil.ignore_patterns("[0-9]*_*", "attempts"))
    for folder in re.findall(r"\((\w.*?/\d.*?_.*?)\)", (records / "README.md").read_text()):
        shutil.copytree(records / folder, copy / folder)
    shutil.copytree(ROOT / "bench" / "curves", copy.parent / "bench" / "curves")
    return copy


def test_the_tables_and_pictures_are_what_the_logs_give(committed, monkeypatch, capsys):
    monkeypatch.setattr(compare, "HERE", committed)
    errors, fix = [], "python records/compare.py --update"
    records = compare.read_records(errors)
    parts, pictures = compare.readme_parts(records), compare.find_pictures(records, errors)
    readme = (committed / "README.md").read_text()
    assert errors == [], capsys.readouterr().err
    for name, part in parts.items():
        assert f"<!-- {name} -->\n{part}<!-- end of {name} -->\n" in readme, fix
    stale = [path for path, picture in pictures.items() if not compare.is_current(path, picture.mark)]
    assert stale == [], fix
    assert all(path.stat().st_size < 100_000 for path in pictures)


def test_every_record_has_a_readme_with_its_curves_and_what_compare_prints(committed, monkeypatch, capsys):
    """Compares without indentation and empty lines."""
    monkeypatch.chdir(committed.parent)
    folders = [p for track in compare.TRACKS for p in Path("records").glob(f"{track}/[0-9]*") if p.is_dir()]
    assert len(folders) >= 4

    def stripped(text):
        return "\n".join(line.strip() for line in text.splitlines() if line.strip())

    for folder in folders:
        base = [str(folder / "baseline")] if (folder / "baseline").is_dir() else []
        assert compare.main([*base, str(folder)]) == 0
        readme = (folder / "README.md").read_text()
        assert stripped(capsys.readouterr().out) in stripped(readme) and "](curves.png)" in readme, folder


def test_the_public_history():
    numbers, minutes, days, changes, sources = zip(*compare.read_history().rows)
    assert list(dict.fromkeys(numbers)) == [str(n) for n in range(1, 93)]
    assert list(days) == sorted(days) and all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days)
    # Each record is faster than the one before, except record 21 when it was timed again.
    times = list(map(float, minutes))
    assert [i for i in range(1, len(times)) if times[i] >= times[i - 1]] == [21, 22]
    assert [minutes[numbers.index(n)] for n in ("1", "24", "80", "92")] == ["45", "2.966", "1.406", "0.665"]
    source = re.compile(r"PR \d+|\d{4}-\d\d-\d\d_\w+|README|https://\S+")
    assert all(changes) and all(map(source.fullmatch, sources))
