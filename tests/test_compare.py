"""Tests records/compare.py: log formats and their traps, statistics, reports, what --update makes."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import compare

FIXTURES = json.loads((ROOT / "tests" / "log_fixtures.json").read_text())
SEEDS = itertools.count()  # distinct: runs of one seed in a group cause a warning
VALIDATION = {"val_slices": 128, "val_slice_tokens": 4096}
HEADER = """Running Python 3.12.7
Running PyTorch 2.13.0 compiled for CUDA 12.8 on NVIDIA H100 with world_size 8"""
ON_A100, ON_1_GPU = HEADER.replace("H100", "A100"), HEADER.replace("size 8", "size 1")
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

# Published runs: five of a change and three of its baseline (seconds); losses before and with sharding.
# fmt: off
LOSSES = [3.2789, 3.2772, 3.2804, 3.277, 3.2792]
TIMES = [95.168, 95.219, 95.069, 95.277, 95.303]
BASE_TIMES = [95.972, 95.914, 95.985]
BEFORE_SHARDING = [
    3.2836, 3.2801, 3.2798, 3.2796, 3.2785, 3.2811, 3.2806, 3.2807, 3.2815, 3.2822, 3.2808,
    3.2813, 3.2806, 3.2801, 3.2799, 3.2828, 3.2831, 3.2794, 3.2806, 3.2799, 3.2794,
]
SHARDED = [
    3.28, 3.2817, 3.2805, 3.2796, 3.2772, 3.2807, 3.2841, 3.2829, 3.2818, 3.2819, 3.2817, 3.2822, 3.2806,
]


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
    config=None,
    data="ab12 (9 tokens)",
    closing="val_loss_per_byte: 0.9\ncomplete: yes\n",
    resumed="",
    **options,
):
    """Returns a log as train_gpt.py writes it. resumed: "RUN after step N", if it continues a checkpoint."""
    rule = "=" * 100
    config = json.dumps(config or {"target": 3.28, "preset": "record", "seed": next(SEEDS)} | VALIDATION)
    if resumed:
        after = int(resumed.split()[3].strip(";"))
        data += f"\nresumed: {resumed}"
        closing = f"resumed_after_step: {after}\n" + closing
        options.setdefault("first", 25 * (after // 25 + 1))
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


def write(folder, texts):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def write_runs(folder, losses, times):
    return write(folder, [own_log(loss, time) for loss, time in zip(losses, times)])


def read_one(tmp_path, text):
    """Returns the only run in a log, and the notes on it."""
    (tmp_path / "log").write_text(text)
    (run,), notes = compare.read_log(str(tmp_path / "log"))
    return run, notes


def read_json(run, *arguments):
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out), err


# ------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("fixture", FIXTURES, ids=[f["expect"]["format_era"] for f in FIXTURES])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_published_formats(fixture, end, tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes((end or "\n").join(fixture["tail"]).encode() + end.encode())  # "": no final newline
    (run,), notes = compare.read_log(str(path))
    want, train_time_ms = fixture["expect"], fixture["expect"]["final_train_time_ms"]
    assert (run.final_step, run.total_steps) == (want["final_step"], want["total_steps"])
    assert (run.val_loss, run.peak_mem_mib) == (want["final_val_loss"], want["peak_mem_mib"])
    assert (run.complete, notes) == (want["complete"], [])
    if train_time_ms is None:
        assert run.train_time_s is None
    else:
        assert run.train_time_s == pytest.approx(train_time_ms / 1000, abs=1e-9)


def test_a_last_line_cut_off_in_the_middle_shows_that_the_run_went_on(tmp_path):
    run, _ = read_one(tmp_path, steps(3.27, 90, last=250) + "\nstep:275/500 train_ti\nstep:27")
    assert (run.final_step, run.counted, run.last_line[:13]) == (275, False, b"step:275/500 ")


def test_own_log(tmp_path):
    run, _ = read_one(tmp_path, own_log(3.2771, 94.5, header=f"{HEADER}\ncommit: 12ab (clean)"))
    assert (run.final_step, run.val_loss, run.train_time_s) == (500, 3.2771, 94.5)
    assert (run.peak_mem_mib, run.per_byte, run.complete) == (31253, 0.9, True)
    assert (run.header.torch, run.header.hardware) == ("2.13.0", "8 x NVIDIA H100")
    assert (run.header.data, run.header.commit) == ("ab12 (9 tokens)", "12ab")
    assert run.header.config["preset"] == "record"
    assert [point[0] for point in run.curve] == [0, 125, 250, 375, 500]


def test_source_look_alikes_are_not_read(tmp_path):
    run, notes = read_one(tmp_path, own_log(source=LOOK_ALIKES))
    assert (run.final_step, run.peak_mem_mib, run.header.torch, notes) == (500, 31253, "2.13.0", [])


@pytest.mark.parametrize("rules", (1, 2, 3, 4))
def test_any_number_of_rules_may_follow_the_source(rules, tmp_path):
    blocks = ["Running Python 3.12.7", "Running PyTorch 2.6.0 compiled for CUDA 12.6", SMI, ""]
    header = "".join(f"\n{'=' * 100}\n{block}" for block in blocks[:rules])
    run, notes = read_one(tmp_path, f"{LOOK_ALIKES}{header}\n{steps(3.27, 90)}")
    assert (run.final_step, run.val_loss, run.peak_mem_mib, notes) == (500, 3.27, None, [])
    assert run.header.torch == ("2.6.0" if rules > 1 else None)
    assert run.header.hardware == ("2 x NVIDIA H100 80GB HBM3" if rules > 2 else None)


def test_hardware_from_nvidia_smi(tmp_path):
    header = f"Running Python 3.12\nRunning pytorch 2.6.0.dev20241231+cu126 compiled for CUDA 12.6\n{SMI}"
    run, _ = read_one(tmp_path, own_log(header=header))
    assert (run.header.torch, run.header.hardware) == ("2.6.0.dev20241231+cu126", "2 x NVIDIA H100 80GB HBM3")


def test_final_time_is_the_last_validations_and_clock_restarts_are_no_runs(tmp_path):
    run, _ = read_one(
        tmp_path,
        "step:9/20 train_time:243813ms step_avg:nanms\nsome other line\n"
        "step:11/20 train_time:135ms step_avg:nanms\n"
        "step:20/20 train_time:1900ms step_avg:90.00ms\n"
        "step:20/20 val_loss:3.2 train_time:1966ms step_avg:98.30ms\n",
    )
    assert (run.train_time_s, run.complete) == (1.966, True)


def test_seconds_and_extra_fields(tmp_path):
    before, after = "step:8/8 val_loss:3.123456 val_ema_loss:3.1", "step_avg:9.1ms lr:0.1 note:x=y\n"
    run, _ = read_one(tmp_path, f"{before} train_time:12.345s {after}")
    assert (run.val_loss, run.train_time_s) == (3.123456, 12.345)


@pytest.mark.slow
def test_several_runs_in_a_file(run, tmp_path):
    text = own_log(3.27, 90) + own_log(3.26, 91, header=HEADER.replace("2.13.0", "2.14.0"))
    text += steps(3.25, 92, total=400) + f"\n{HEADER}\n{steps(3.24, 93)}"
    out, _ = read_json(run, write(tmp_path, [text]) / "000.txt")
    runs = out["groups"][0]["runs"]
    assert [(r["run_index"], r["val_loss"], r["train_time_s"], r["total_steps"]) for r in runs] == [
        (0, 3.27, 90.0, 500),
        (1, 3.26, 91.0, 500),
        (2, 3.25, 92.0, 400),
        (3, 3.24, 93.0, 500),
    ]
    # The third run has the header before it, whose config means that there must be a closing line. The
    # fourth's header has no config.
    assert [r["torch"] for r in runs] == ["2.13.0", "2.14.0", "2.14.0", "2.13.0"]
    assert [r["complete"] for r in runs] == [True, True, False, True]


def test_llmc_log_cut_after_a_training_line_is_incomplete(tmp_path):
    first = "s:0 tel:11.0\ns:0 trl:11.0 lr:0.000001 norm:15.37\n"
    run, _ = read_one(tmp_path, f"{first}s:250 tel:6.17\ns:250 trl:6.18 lr:0.0002 norm:0.90\n")
    assert (run.counted, run.complete, run.final_step, run.total_steps) == (False, False, 251, None)


LLMC_LINE = "s:{} trl:{} lr:0.000001 norm:15.37\n".format
OUR_LINE = "step:{}/4 train_time:{}ms step_avg:9.00ms{}\n".format
PUBLIC_LINE = "step:{}/4 train_loss:{} train_time:{}ms step_avg:nanms\n".format
# fmt: off
TRAINING_LOGS = {  # name: text, (step, loss, seconds)
    "ours": (OUR_LINE(1, 100, " train_loss:5.5@1") + OUR_LINE(2, 210, " train_loss:4.25@2"),
             [(1, 5.5, 0.1), (2, 4.25, 0.21)]),
    # Step 1's loss arrives while step 2 is done, step 2's with step 3's.
    "late": (OUR_LINE(1, 100, "") + OUR_LINE(2, 210, " train_loss:5.5@1")
             + OUR_LINE(3, 330, " train_loss:5.5@1") + OUR_LINE(4, 450, " train_loss:3.5@3"),
             [(1, 5.5, 0.1), (3, 3.5, 0.33)]),
    "public": (PUBLIC_LINE(1, 9.5, 100) + PUBLIC_LINE(2, "nan", 200), [(1, 9.5, 0.1), (2, math.nan, 0.2)]),
    "llm.c": (LLMC_LINE(0, 11.5) + "s:1 tel:11.0\n" + LLMC_LINE(1, 10.5), [(1, 11.5, None), (2, 10.5, None)]),
    "none": (steps(), []),
    "none of ours": (OUR_LINE(1, 100, ""), []),
}
# fmt: on


@pytest.mark.parametrize("name", TRAINING_LOGS)
def test_training_losses(name, tmp_path):
    text, expected = TRAINING_LOGS[name]
    run, _ = read_one(tmp_path, text)
    assert repr(run.training) == repr(expected)


# ----------------------------------------------------------------------------------------------------- groups


def test_folders_globs_names_with_spaces_and_equals_signs(run, tmp_path):
    write(tmp_path / "my runs" / "baseline", [own_log(3.30)])
    write(tmp_path / "my runs", [own_log(3.27), own_log(3.26), "no log at all"])
    (tmp_path / "my runs" / "README.md").write_text(steps(1.0))
    (tmp_path / "lr=2.txt").write_text(own_log(3.25))
    paths = ["new=my runs", "my runs/00[01].txt", "lr=2.txt", "old=my runs/baseline", "my runs"]
    out, err = read_json(run, *paths)
    assert [(g["label"], round(g["loss_mean"], 4)) for g in out["groups"]] == [
        ("new", 3.265),
        ("my runs/00[01].txt", 3.265),
        ("lr=2", 3.25),
        ("old", 3.3),
        ("my runs", 3.265),
    ]
    assert "002.txt: holds no run" in err
    assert [c["baseline"] for c in out["comparisons"]] == ["new"] * 4


def test_paths_of_one_label_are_one_group_and_folders_of_one_name_are_two(run, tmp_path):
    for i, name in enumerate("abc"):
        write(tmp_path / name / "runs", [own_log(3.27 + i / 1000)])
    out, _ = read_json(run, "x=a/runs", "x=b/runs", "b/runs", "c/runs")
    assert [(g["label"], g["n"]) for g in out["groups"]] == [("x", 2), ("runs", 1), ("c/runs", 1)]


def test_repeats_are_dropped_and_named(run, tmp_path):
    folder = write_runs(tmp_path / "runs", [3.27, 3.27, 3.28, 3.27], [90, 90, 90, 91])
    # The screen's copy sorts before the log, and has no header.
    (folder / "002.stdout").write_text(steps(3.28, 90))
    out, err = read_json(run, "runs")
    assert out["groups"][0]["n"] == 3
    assert "001.txt: dropped, the same run as runs/000.txt" in err
    assert "002.stdout: dropped, the same run as runs/002.txt" in err
    assert all(r["torch"] == "2.13.0" for r in out["groups"][0]["runs"])


def test_incomplete_runs_are_listed_and_left_out(run, tmp_path):
    cut = [own_log(seconds=t, last=n, validate_last=False, closing="") for t, n in ((91, 500), (92, 150))]
    write(tmp_path / "runs", [own_log(3.27, 90), *cut])
    out, err = read_json(run, "runs")
    group = out["groups"][0]
    assert (group["n"], group["loss_mean"], group["steps"]) == (1, 3.27, [500])
    assert [(r["final_step"], r["val_loss"], r["train_time_s"], r["complete"]) for r in group["runs"]] == [
        (500, 3.27, 90.0, True),
        (500, None, None, False),
        (150, None, None, False),
    ]
    assert "001.txt: incomplete, left out: step 500 of 500" in err
    assert "002.txt: incomplete, left out: step 150 of 500" in err


def test_runs_of_several_epochs_are_left_out(run, tmp_path):
    again = own_log(3.2, 80, closing="epochs: 2\ncomplete: yes\n")
    write(tmp_path / "runs", [own_log(3.27, 90, closing="epochs: 1\ncomplete: yes\n"), again])
    out, err = read_json(run, "runs")
    assert (out["groups"][0]["n"], out["groups"][0]["loss_mean"]) == (1, 3.27)
    assert "001.txt: trained on its data in 2 epochs, left out" in err


# fmt: off
@pytest.mark.parametrize("change, warning", [
    (dict(total=525), "mixed steps: 500; 525"),
    (dict(header=ON_A100), "mixed hardware: 8 x NVIDIA A100; 8 x NVIDIA H100"),
    (dict(header=ON_1_GPU), "mixed hardware: 1 x NVIDIA H100; 8 x NVIDIA H100"),
    (dict(header=ON_1_GPU), "mixed numbers of processes: 1; 8"),
    (dict(config={"target": 3.28, "val_slices": 64, "val_slice_tokens": 4096}),
     "mixed validation sizes: 128 x 4096 tokens; 64 x 4096 tokens"),
    (dict(data="cd34 (9 tokens)"), "mixed data fingerprints: ab12 (9 tokens); cd34 (9 tokens)"),
    (dict(config={"target": 2.92}), "mixed targets: 2.92 3.28; the lowest is used"),
])
# fmt: on
def test_warnings_about_mixed_groups(run, tmp_path, change, warning):
    write(tmp_path / "runs", [own_log(3.27, 90), own_log(3.26, 91, **change)])
    text = run("runs")[1]
    assert warning in text and f"the target {change.get('config', {}).get('target', 3.28)}" in text
    write(tmp_path / "runs", [own_log(3.27, 90), own_log(3.26, 91)])
    assert "warning" not in run("runs")[1]


def test_warnings_about_groups_with_other_hardware_or_data_or_shared_runs(run, tmp_path):
    write(tmp_path / "a", [own_log(3.27, 90)])
    write(tmp_path / "b", [own_log(3.27, 90)])
    write(tmp_path / "c", [own_log(3.27, 91, header=ON_A100, data="cd34")])
    _, err = read_json(run, "a", "b", "c")
    assert "b: 1 of its runs are also in a" in err
    assert "c: not the same hardware as a" in err and "c: not the same data fingerprints as a" in err
    assert "b: not the same" not in err and "c: 1 of" not in err


def test_no_percentage_between_machines_or_data(run, tmp_path):
    write(tmp_path / "a", [own_log(3.27, 90)])
    write(tmp_path / "same", [own_log(3.27, 91)])
    write(tmp_path / "machine", [own_log(3.27, 91, header=ON_A100)])
    write(tmp_path / "data", [own_log(3.27, 91, data="cd34")])
    assert "(+1.11 %)" in run("a", "same")[1] and "warning" not in run("a", "same")[1]
    for other, word in (("machine", "hardware"), ("data", "data")):
        out = run("a", other)[1]
        assert out.startswith("warning: ") and word in out.splitlines()[0] and " %" not in out
        assert "+1.000 s" in out and "(+1.11 %)" in run("a", other, "--anyway")[1]


def test_a_records_readme_is_begun_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_COMMAND", "./run.sh --runs 2 --name Idea")
    write(tmp_path / "2026-11-24_Idea", [own_log(3.27, 90), own_log(3.26, 91)])
    code, out, err = run("--begin", "2026-11-24_Idea")
    text = (tmp_path / "2026-11-24_Idea/README.md").read_text()
    assert code == 0 and text.startswith("# Idea\n") and "    ./run.sh --runs 2 --name Idea\n" in text
    table = run("2026-11-24_Idea")[1].splitlines()
    assert "".join(f"    {line}\n" for line in table) in text and out.splitlines()[: len(table)] == table
    (tmp_path / "2026-11-24_Idea/README.md").write_text("mine")
    assert run("--begin", "2026-11-24_Idea")[0] == 0
    assert (tmp_path / "2026-11-24_Idea/README.md").read_text() == "mine"


def test_a_warning_about_runs_of_one_seed(run, tmp_path):
    """Checks that seeds may repeat between groups, but not within one."""
    seeds = enumerate([3, 4, 3, 3, 3])
    write(tmp_path / "runs", [own_log(3.27 + i / 1e4, 90, config={"seed": seed}) for i, seed in seeds])
    write(tmp_path / "base", [own_log(3.28, 91, config={"seed": 3})])
    _, err = read_json(run, "base", "runs")
    warning = "4 runs of seed 3, which are not independent: runs/000.txt, runs/002.txt, runs/003.txt, …"
    assert err == f"compare.py: warning: runs: {warning}\n"


# -------------------------------------------------------------------------------------- a run in several logs


@pytest.fixture
def parts(tmp_path, run):
    """Returns a function of logs by name: their group's JSON, the warnings, the plotted curve's steps."""

    def call(**texts):
        for name, text in texts.items():
            (tmp_path / "runs").mkdir(exist_ok=True)
            (tmp_path / "runs" / (name.replace("_from", ".from") + ".txt")).write_text(text)
        out, err = read_json(run, "runs")
        (group,), _ = compare.read_groups(["runs"], None)
        return out["groups"][0], err, [point[0] for point in compare.mean_curve(group)]

    return call


def test_a_resumed_run_counts_once(parts):
    """Checks a first log that ends in a validation, since it was stopped right after one."""
    config = {"target": 3.28, "seed": 1}
    group, err, curve = parts(
        seed1=own_log(4.0, 90, last=250, closing="", config=config),
        seed1_from100=own_log(3.27, 91, resumed="seed1 after step 100", config=config),
        seed2=own_log(3.26, 92),
    )
    assert [(r["path"], r["val_loss"], r["train_time_s"], r["complete"]) for r in group["runs"]] == [
        ("runs/seed1.from100.txt", 3.27, 91.0, True),
        ("runs/seed2.txt", 3.26, 92.0, True),
    ]
    assert (group["n"], curve) == (2, [0, 125, 250, 375, 500])  # the step before 100 is from the first log
    warning = "runs/seed1.from100.txt: stopped and resumed, one run with runs/seed1.txt, and taken for it"
    assert err == f"compare.py: warning: runs: {warning}\n"


def test_training_losses_of_a_resumed_run_are_those_of_what_went_on(tmp_path):
    """Checks that those of the first log end with the checkpoint's step."""
    first = [OUR_LINE(step, step, f" train_loss:{step}.5@{step}") for step in (1, 2, 3)]
    second = [OUR_LINE(step, step, f" train_loss:{step}.25@{step}") for step in (3, 4)]
    (tmp_path / "seed1.txt").write_text("config: {}\n" + "".join(first))
    (tmp_path / "seed1.from2.txt").write_text("config: {}\nresumed: seed1 after step 2\n" + "".join(second))
    (group,), _ = compare.read_groups([str(tmp_path)], None)
    assert [loss for _, loss, _ in group.runs[0].training] == [1.5, 2.5, 3.25, 4.25]


def test_a_diverged_run_counts_against_its_group(run, tmp_path):
    write(tmp_path / "runs", [own_log(3.27, 90), own_log(float("nan"), 91), own_log(3.26, 92)])
    out, err = read_json(run, "runs")
    group = out["groups"][0]
    assert (group["n"], group["loss_mean"]) == (3, None)
    assert (group["p_target"], group["meets_target"]) == (None, False)
    assert "001.txt: its final loss is nan, counted" in err
    assert "does not meet the target" in run("runs")[1]


# ------------------------------------------------------------------------------------------------- statistics


def test_one_sided_p_of_the_target(run, tmp_path):
    write_runs(tmp_path / "runs", LOSSES, TIMES)
    out, _ = read_json(run, "runs")
    group = out["groups"][0]
    assert round(group["p_target"], 4) == 0.0423
    assert (round(group["loss_mean"], 4), round(group["loss_std"], 4)) == (3.2785, 0.0014)
    assert (group["n"], group["time_mean_s"], group["meets_target"]) == (5, pytest.approx(95.2072), False)
    text = run("runs")[1]
    assert "0.0423" in text and "not shown to meet the target 3.28" in text
    assert read_json(run, "runs", "--target", "3.29")[0]["groups"][0]["meets_target"] is True
    assert "meets the target 3.29 (p < 0.01)" in run("runs", "--target", "3.29")[1]


def test_welch_against_the_baseline(run, tmp_path):
    """Checks t = (m1 - m2) / sqrt(v1 + v2), v = s^2 / n, and df = (v1 + v2)^2 / sum(v^2 / (n - 1))."""
    base_losses = [3.2781, 3.2790, 3.2776]
    write_runs(tmp_path / "base", base_losses, BASE_TIMES)
    write_runs(tmp_path / "new", LOSSES, TIMES)
    out, _ = read_json(run, "old=base", "new")
    (result,) = out["comparisons"]
    assert (result["group"], result["baseline"]) == ("new", "old")

    def mean_and_variance(x):
        mean = sum(x) / len(x)
        return mean, sum((a - mean) ** 2 for a in x) / (len(x) - 1) / len(x)

    for what, here, there in (("time", TIMES, BASE_TIMES), ("loss", LOSSES, base_losses)):
        (m1, v1), (m2, v2) = mean_and_variance(here), mean_and_variance(there)
        df = (v1 + v2) ** 2 / (v1**2 / (len(here) - 1) + v2**2 / (len(there) - 1))
        assert result["time_delta_s" if what == "time" else "loss_delta"] == pytest.approx(m1 - m2)
        assert result[f"{what}_t"] == pytest.approx((m1 - m2) / (v1 + v2) ** 0.5)
        assert result[f"{what}_df"] == pytest.approx(df)
    assert result["time_delta_s"] == pytest.approx(-0.7498)
    assert result["time_p"] < 1e-4 and result["loss_p"] > 0.5
    assert "-0.750 s (-0.78 %)" in run("old=base", "new")[1]


def test_target_comes_from_the_config(run, tmp_path):
    losses = [2.9191, 2.9185, 2.9188, 2.9190]
    write(tmp_path / "runs", [own_log(loss, 90, config={"target": 2.92}) for loss in losses])
    assert "meets the target 2.92" in run("runs")[1]
    assert "does not meet the target 2.9\n" in run("runs", "--target", "2.9")[1]


def test_what_is_not_defined_is_null(run, tmp_path):
    write(tmp_path / "one", [own_log(3.27, 90)])
    write(tmp_path / "same", [own_log(3.27, 90), own_log(3.27, 91)])
    (tmp_path / "llmc.log").write_text("s:0 tel:11.0\ns:500 tel:3.27\n")
    out, err = read_json(run, "one", "same", "llmc.log")
    one, same, llmc = out["groups"]
    assert one["loss_std"] is one["time_std_s"] is one["p_target"] is None and one["meets_target"] is False
    assert (same["loss_std"], same["p_target"]) == (0.0, None) and "same: all losses are equal" in err
    assert (llmc["loss_mean"], llmc["time_mean_s"], llmc["runs"][0]["train_time_s"]) == (3.27, None, None)
    assert out["comparisons"][0]["time_delta_s"] == pytest.approx(0.5)
    known = {name: value for name, value in out["comparisons"][1].items() if value is not None}
    assert known == {"group": "llmc", "baseline": "one", "loss_delta": 0.0}


# ---------------------------------------------------------------------------------------------------- reports


def test_text_has_every_field(run, tmp_path):
    write_runs(tmp_path / "a", LOSSES, TIMES)
    _, out, err = run("a")
    fields = dict(line.strip().split("  ", 1) for line in out.splitlines()[1:])
    assert {k: v.strip() for k, v in fields.items()} == {
        "runs (n)": "5",
        "steps": "500",
        "loss: mean, sd": "3.2785, 0.0014",
        "loss per byte": "0.9000",
        "time, s: mean, sd": "95.207, 0.093",
        "peak memory": "31253 MiB",
        "hardware": "8 x NVIDIA H100",
        "torch": "2.13.0",
        "p (mean < target)": "0.0423",
        "verdict": "not shown to meet the target 3.28: the mean does, but p is not < 0.01; needs more runs",
        "losses": "3.2789 3.2772 3.2804 3.2770 3.2792",
        "times, s": "95.168 95.219 95.069 95.277 95.303",
    }
    assert err == ""


@pytest.mark.slow
def test_curves_are_a_png_with_their_mark(run, tmp_path):
    write_runs(tmp_path / "a", LOSSES, TIMES)
    write(tmp_path / "diverged", [own_log(float("nan"))])
    llmc = LLMC_LINE(0, 11.5) + "s:0 tel:11.0\n" + LLMC_LINE(499, 3.3) + "s:500 tel:3.27\n"
    (tmp_path / "llmc.log").write_text(llmc)
    (tmp_path / "cut.log").write_text(steps(last=150, validate_last=False))
    paths = ["a", "_m$_$x=a/000.txt", "diverged", "llmc.log", "cut.log"]  # matplotlib reads $ and _
    code, out, err = run(*paths, "--curves", "loss.png")
    assert (code, err) == (0, "")
    groups, lines = compare.read_groups(paths, None)[0], []
    image = (tmp_path / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) > 20_000
    assert compare.is_current(tmp_path / "loss.png", compare.curves_mark(groups, lines))
    assert run("cut.log", "--curves", "empty.png")[0] == 0  # nothing to draw is no error
    code, out, err = run("a", "--curves", "missing/loss.png")
    assert code == 2 and "missing/loss.png: cannot be written" in err and "3.2785" in out


def group_of(*trainings):
    """Returns a group of counted runs with these training losses, each of (step, loss, seconds or None)."""
    runs = []
    for training in trainings:
        last = training[-1][0] if training else 9
        runs.append(compare.Run("path", 0, compare.Header(), last, last, [[last, 3.0, 9.0]], training, b""))
    return compare.Group("label", runs)


@pytest.mark.parametrize("seed", range(5))
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


def test_plotted_curve_is_over_the_steps_all_runs_share(tmp_path):
    group = compare.Group("g")
    for path in sorted(write(tmp_path, [own_log(3.27, 90), own_log(3.29, 92, last=450)]).iterdir()):
        group.runs += compare.read_log(str(path))[0]
    curve = compare.mean_curve(group)
    assert [point[0] for point in curve] == [0, 125, 250, 375]
    assert curve[-1][1] == pytest.approx(91 * 375 / 500) and curve[-1][3] == pytest.approx(0)


def test_diff(run, tmp_path):
    config = {"target": 3.28, "seed": 1, "layers": [{"window": "long"}, {"window": "short"}]}
    (tmp_path / "a.txt").write_text(own_log(source="x = 1\ny = 2\n", config=config))
    config |= {"layers": [{"window": "long"}, {"window": "long"}], "new": 0.5}
    (tmp_path / "b.txt").write_text(own_log(source="x = 1\ny = 3\n", config=config))
    code, out, _ = run("--diff", "a.txt", "b.txt")
    settings, script = out.split("script\n")
    assert code == 0
    assert settings == 'config\n  layers.1.window: "short" -> "long"\n  new: absent -> 0.5\n'
    changes = [line for line in script.splitlines() if line[0] in "+-"]
    assert changes == ["--- a.txt", "+++ b.txt", "-y = 2", "+y = 3"]
    assert run("--diff", "a.txt", "a.txt")[1] == "config\n  no difference\nscript\n  no difference\n"


# -------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_read_is_named_and_the_rest_reported(run, tmp_path):
    write(tmp_path / "runs", [own_log(3.27)])
    (tmp_path / "runs" / "dangling.txt").symlink_to(tmp_path / "nowhere")
    code, out, err = run("runs")
    assert code == 2 and "3.2700" in out
    assert err == "compare.py: runs/dangling.txt: cannot be read: No such file or directory\n"
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "folder").mkdir()
    missing, without_runs = ["gone.txt", "*.missing"], ["empty.txt", "binary.txt", "folder"]
    code, out, err = run("runs/000.txt", *missing, *without_runs)
    assert code == 2 and "3.2700" in out
    starts = [f"compare.py: {path}: no such file" for path in missing]
    starts += [f"compare.py: {path}: holds no run" for path in without_runs]
    assert len(err.splitlines()) == len(starts)
    assert all(line.startswith(start) for line, start in zip(err.splitlines(), starts))


BAD_USAGE = ["", "x --target nan", "x --diff a b", "--diff a", "--table --update", "x --plot x.png"]


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage(run, arguments):
    with pytest.raises(SystemExit) as e:
        run(*arguments.split())
    assert e.value.code == 2


# ------------------------------------------------------------------------------------------ records/README.md

FIRST, NEXT = "2026-01-02_First", "2026-01-03_Next"


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes another records/, with two records, one of them with a baseline, and logs of no record."""
    folder = tmp_path / "records"
    first = [own_log(3.27, 100), own_log(3.271, 102, header=f"{HEADER}\ncommit: unknown"), "no log"]
    write(folder / "cpu" / FIRST, first)
    commits = ["56cd (clean)", "12ab (modified)", "56cd (clean)"]
    headers = [f"{HEADER}\ncommit: {commit}" for commit in commits]
    runs = zip((3.27, 3.271, 3.272), (90, 92, 91), headers)
    write(folder / "cpu" / NEXT, [own_log(loss, time, header=header) for loss, time, header in runs])
    write_runs(folder / "cpu" / NEXT / "baseline", [3.27, 3.271], [100, 101])
    write(folder / "cpu" / "attempts", [own_log(3.2, 50)])
    write(folder / "other" / "2026-01-02_Other", [own_log(3.2, 50)])
    (folder / "history.csv").write_text(
        'number,minutes,date,change,source\n1,45,2024-05-28,"all, at first",PR 1\n'
        "3,24.9,2024-10-04,Muon | more,PR 2\n3,25.0,2024-11-04,timed again,PR 3\n"
    )
    (folder / "README.md").write_text(
        "# Records\n<!-- records -->\nold\n<!-- end of records -->\nbetween\n"
        "<!-- history -->\n<!-- end of history -->\nafter\n"
    )
    monkeypatch.setattr(compare, "HERE", folder)
    write_runs(tmp_path / "bench" / "curves", [3.27, 3.3], [90, 91])
    monkeypatch.setattr(compare, "PICTURES", {"a.png": {"one": "000.txt", "two": "001.txt"}})
    return folder


ROW = "| 2026-01-0{} | [{}]({}) | {} | 8 x NVIDIA H100 | {} |".format
ROWS = (
    ROW(2, "First", f"cpu/{FIRST}", "2 | 3.2705 | 0.0167 | 101.0 s | -", "unknown"),
    ROW(3, "Next", f"cpu/{NEXT}", "3 | 3.2710 | 0.0020 | 91.0 s | -9.5 %, p 0.0014", "12ab (modified); 56cd"),
)
COLUMN_NAMES = (
    *("date", "record", "runs", "loss, mean", "p (mean < target)", "time, mean", "against its baseline"),
    *("machine", "commit"),
)
TABLES = f"""### `cpu`

| {" | ".join(COLUMN_NAMES)} |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{ROWS[0]}
{ROWS[1]}

### `gpt2-small`

None yet.
"""
HISTORY = """Records 1 to 3; missing: 2.

| # | minutes | date | change | source |
| --- | --- | --- | --- | --- |
| 1 | 45 | 2024-05-28 | all, at first | PR 1 |
| 3 | 24.9 | 2024-10-04 | Muon \\| more | PR 2 |
| 3 | 25.0 | 2024-11-04 | timed again | PR 3 |
"""


def test_tables_of_records(run, records):
    code, out, err = run("--table")
    assert (code, out) == (0, TABLES + "\n" + HISTORY)
    assert err.splitlines() == [f"compare.py: warning: {FIRST}: {records}/cpu/{FIRST}/002.txt: holds no run"]


@pytest.mark.slow
def test_update_writes_the_tables_and_only_them(run, records):
    assert run("--update")[:2] == (0, "")
    text, image = (records / "README.md").read_text(), (records / "history.png").read_bytes()
    assert text == (
        f"# Records\n<!-- records -->\n{TABLES}<!-- end of records -->\nbetween\n"
        f"<!-- history -->\n{HISTORY}<!-- end of history -->\nafter\n"
    )
    assert image.startswith(b"\x89PNG") and len(image) > 10_000
    (records / "history.png").write_bytes(image + b"not drawn again")
    run("--update")
    assert (records / "README.md").read_text() == text
    assert (records / "history.png").read_bytes() == image + b"not drawn again"
    with open(records / "history.csv", "a") as file:
        file.write("4,20,2025-01-01,a change,PR 4\n")
    run("--update")
    assert "| 4 | 20 |" in (records / "README.md").read_text()
    new_image = (records / "history.png").read_bytes()
    assert new_image[:8] == image[:8] and image not in new_image


@pytest.mark.slow
def test_update_draws_the_pictures_whose_logs_changed(run, records):
    folder = records.parent / "bench" / "curves"
    paths = [records / "cpu" / FIRST / "curves.png", records / "cpu" / NEXT / "curves.png", folder / "a.png"]
    assert run("--update")[0] == 0 and all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert sorted(records.parent.rglob("*.png")) == sorted([*paths, records / "history.png"])
    write_runs(folder, [3.26], [90])
    write_runs(records / "cpu" / NEXT / "baseline", [3.275], [100])
    for path in paths:
        path.write_bytes(path.read_bytes() + b"not drawn again")
    run("--update")
    assert [path.read_bytes().endswith(b"not drawn again") for path in paths] == [True, False, False]


def test_a_warning_about_a_baseline_from_another_machine(run, records):
    write(records / "cpu" / NEXT / "baseline", [own_log(3.27, 100, header=ON_A100)] * 2)
    assert f"baseline: not the same hardware as {NEXT}" in run("--table")[2]


COLUMNS = "number,minutes,date,change,source\n"
NO_FILE, BAD_LINE = "No such file or directory", "line 3: not a record's number, "
BAD_LINES = [
    "2,31,2024-06,x,y",
    "two,31,2024-06-06,x,y",
    "2,0,2024-06-06,x,y",
    "2,inf,2024-06-06,x,y",
    "2,31,2024-06-06,x",
    "2,31,2024-06-06,x,",
    "2,31,2024-06-06,x,y,z",
]
# fmt: on


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Copies records/ with the folders that git knows or README.md links: a run may just have made others."""
    records, copy = ROOT / "records", tmp_path_factory.mktemp("committed") / "records"
    copy.mkdir()
    for name in ("README.md", "history.csv", "history.png"):
        shutil.copy(records / name, copy)
    links = re.findall(r"\]\((.*?)\)", (records / "README.md").read_text())
    paths = "".join(f"records/{link}/\n" for link in links)
    if shutil.which("git"):
        ls_files = ["git", "ls-files", "records"]
        paths += subprocess.run(ls_files, cwd=ROOT, capture_output=True, text=True).stdout
    for folder in set(re.findall(r"^records/(.+?/\d{4}-\d\d-\d\d_.+?)/", paths, re.MULTILINE)):
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
    marks = {path: compare.curves_mark(*drawn) for path, drawn in pictures.items()}
    marks[committed / "history.png"] = compare.history_mark()
    assert {path for path, mark in marks.items() if not compare.is_current(path, mark)} == set(), fix
    assert all(path.stat().st_size < 100_000 for path in marks)


def test_every_record_has_a_readme_with_its_curves_and_what_compare_prints(committed, monkeypatch, capsys):
    """Compares without indentation and empty lines."""
    monkeypatch.chdir(committed.parent)
    folders = [p for track in compare.TRACKS for p in Path("records").glob(f"{track}/[0-9]*") if p.is_dir()]
    assert folders

    def stripped(text):
        return "\n".join(line.strip() for line in text.splitlines() if line.strip())

    for folder in folders:
        base = [str(folder / "baseline")] if (folder / "baseline").is_dir() else []
        assert compare.main([*base, str(folder)]) == 0
        readme = (folder / "README.md").read_text()
        assert stripped(capsys.readouterr().out) in stripped(readme) and "](curves.png)" in readme, folder


def test_the_public_history(committed, monkeypatch):
    monkeypatch.setattr(compare, "HERE", committed)
    history = compare.read_history()
    firsts = {}
    for row in history:
        firsts.setdefault(int(row["number"]), row)
    assert list(firsts) == list(range(1, max(firsts) + 1)) and max(firsts) >= 92
    days = [row["date"] for row in history]
    assert days == sorted(days)
    # Each record is faster than the one before, except record 21 when it was timed again.
    times = [(row["number"], float(row["minutes"])) for row in history]
    slower = [later for earlier, later in zip(times, times[1:]) if later[1] >= earlier[1]]
    assert slower == [("21", 2.997), ("21", 3.014)]
    seconds = {n: round(60 * float(firsts[n]["minutes"]), 1) for n in (1, 70, 71, 72, 80, 89)}
    assert seconds == {1: 2700, 70: 91.3, 71: 91.0, 72: 89.8, 80: 84.4, 89: 73.8}
    sources = {n: firsts[n]["source"] for n in (24, 71, 72)}
    assert sources == {24: "PR 102", 71: "PR 221", 72: "PR 224"} and firsts[24]["minutes"] == "2.966"
    source = re.compile(r"PR \d+|\d{4}-\d\d-\d\d_\w+|README|https://\S+")
    assert all(source.fullmatch(row["source"]) for row in history)


# -------------------------------------------------------------------------------------- odd names and numbers


def test_a_record_is_not_its_baseline(tmp_path, capsys):
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline" / "a.txt").write_text(steps(3.2))
    assert compare.main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
