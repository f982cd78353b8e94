"""Tests bench/gpu/check.py without a GPU: its run at tiny sizes, what it notices, and what stops it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import check
import kernels
import launching
import machine
import runner
import train_gpt as tg
from launch import ROOT, WAIT
from runner import Check, Row


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def setup(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "draw_once", lambda: None)
    return check.Setup(tmp_path, tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_everything_runs_without_a_gpu(tmp_path):
    command = [sys.executable, str(ROOT / "bench/gpu/check.py"), "--out", "answers"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=5 * WAIT)
    lines = (tmp_path / "answers/rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    assert done.returncode == 0, [row for row in rows if row["ok"] is False]
    assert "no GPU" in done.stdout.splitlines()[0]
    assert {row["step"] for row in rows} == {each.step for each in check.CHECKS}
    assert (tmp_path / "answers/run.txt").read_text().endswith("complete: yes\n")


# ------------------------------------------------------------------------------- checks that fail, and time

# They are pickled by name, for a process of their own.


class Nothing:
    lost = False

    def is_lost(self):
        return self.lost


def pass_check(setup):
    yield Row("it runs", seen=str(os.getpid()), ok=True)


def raise_error(setup):
    yield from pass_check(setup)
    raise ValueError("a bad number\nWith details")


def kill_process(setup):
    yield from pass_check(setup)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(setup):
    yield from pass_check(setup)
    time.sleep(WAIT)


def lose_context(setup):
    yield from pass_check(setup)
    setup.lost = True


@pytest.mark.slow
def test_a_failure_costs_only_its_own_rows():
    """A new process follows each check that breaks one, and only then."""
    functions = raise_error, kill_process, lose_context, hang, pass_check
    checks = [Check("run", function.__name__, function) for function in functions]
    checks[3].limit = 1  # a new process takes longer to start, which does not count
    rows = list(runner.run_checks(checks, WAIT, Nothing))
    failures = []
    processes = []
    for row in rows:
        if row.ok:
            processes.append(row.seen)
        else:
            failures.append((row.what, row.seen))
    assert failures == [
        ("raise_error", "ValueError: a bad number"),
        ("kill_process", "its process ended with status -9"),
        ("hang", "no end after 1 s"),
    ]
    assert "in raise_error" in rows[1].details
    assert processes[0] == processes[1]
    assert len(processes) == 5 and len(set(processes)) == 4


@pytest.mark.slow
def test_the_time_is_over():
    checks = [Check("run", "hangs", hang), Check("run", "last", pass_check)]
    rows = list(runner.run_checks(checks, 2, Nothing))
    assert [row.seen for row in rows if not row.ok] == [
        "not checked: stopped, the time is over",
        "not checked: the time is over",
    ]


# ---------------------------------------------------------------------------------------- what is written


def test_a_row_is_on_disk_when_it_is_printed(tmp_path):
    """So that a machine which goes away has left what it found; without its paths, in any depth."""
    report = runner.Report(tmp_path)
    seen = "(/opt/a/b/z) 3 GB/s, bench/gpu/check.py, https://a.org/b"
    report.add(Row("a", seen=seen, numbers={"table": ["in /usr/lib/y"]}, details="/opt/a/b/x"))
    _, line = (tmp_path / "rows.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["seen"] == "(z) 3 GB/s, bench/gpu/check.py, https://a.org/b"
    assert row["numbers"] == {"table": ["in y"]}
    assert (tmp_path / "errors.txt").read_text().endswith("x\n")
    report.close([])
    runner.Report(tmp_path).close([])  # a second call adds its rows


def test_a_folder_of_other_files_is_left_as_it_is(tmp_path):
    """Also if one of them has the name of ours."""
    for name in "summary.txt", "rows.jsonl":
        (tmp_path / name).write_text("{}")
        with pytest.raises(tg.UserError, match="has other files"):
            runner.Report(tmp_path)
        assert (tmp_path / name).read_text() == "{}"


@pytest.mark.parametrize("option, value", [("--only", "host,graphs"), ("--minutes", "nan")])
def test_bad_options(option, value, tmp_path):
    """There is no GPU, which the first needs, and no time."""
    out = tmp_path / "answers"
    with pytest.raises(SystemExit, match=f"^check.py: error: {option}"):
        check.main([option, value, "--out", str(out)])
    assert not out.exists()


# --------------------------------------------------------------------------------------------- CUDA graphs


def run_with(losses, ms=10.0):
    by_step = dict(enumerate(losses))
    return machine.Run(losses[-1], 2, ms=20.0, mib=100.0, warm_up=1.0, losses=by_step, fastest=ms)


@pytest.mark.parametrize(
    "graphs, again, ok",
    [
        ((8.0, 7.004), (8.0, 7.0), False),
        ((8.0, 7.004), (8.0, 7.001), True),  # two plain runs differ by a fourth of that
        ((8.01, 7.0), (8.0, 7.0), False),  # only an early loss is wrong
        ((8.0, math.nan), (8.0, 7.0), False),
    ],
)
def test_other_losses_with_graphs_are_noticed(graphs, again, ok):
    row = launching.judge("x", run_with((8.0, 7.0)), run_with(graphs, ms=5.0), run_with(again))
    assert row.ok is ok
    assert "0.50 of the time, +0 MiB" in row.seen


def test_what_a_log_says():
    """A step's ms is also that between two validations, of which the second two are faster."""
    log = """warm-up: it took 9.5 s and was undone
step:0/6 val_loss:9.0 train_time:0ms step_avg:0.00ms
step:2/6 train_time:9ms step_avg:4.50ms train_loss:7.1234@1
step:2/6 val_loss:7.0 train_time:20ms step_avg:4.00ms
step:6/6 val_loss:6.1235 train_time:36ms step_avg:4.00ms
peak memory allocated: 432 MiB
val_loss: 6.123456
train_time_ms: 36
steps: 6
"""
    assert machine.read_run(log) == machine.Run(6.123456, 6, 6.0, 432.0, 9.5, {1: 7.1234}, 4.0)


# ------------------------------------------------------------------------------------- the chosen settings


def row(feature="", ok=None, ms=(), **more):
    return Row("x", feature=feature, ok=ok, ms=ms, **more)


GRAD_LOSES = row("relu_square", ms=(1.2, 1.0), operation="relu_square_grad")
FP8_WINS = row("relu_square", ms=(0.1, 1.4), operation="relu_square_fp8")


def kernels_without(name):
    return "kernels=" + ",".join(kernel for kernel in tg.RECORD.kernels if kernel != name)


@pytest.mark.parametrize(
    "rows, want",
    [
        ([row("pointer", ok=True), row("pointer", ok=False)], kernels_without("pointer")),
        ([FP8_WINS, GRAD_LOSES], ""),
        ([GRAD_LOSES], kernels_without("relu_square") + " fp8_mlp=false"),
        # Times of several shapes add up; 3% are noise.
        ([row("attention", ms=(1.0, 2.0)), row("attention", ms=(3.1, 2.0))], ""),
        ([row("attention", ms=(1.0, 2.0)), row("attention", ms=(3.2, 1.9))], "attention_impl=dense"),
        ([row("attention", ms=(1.5, 2.0)), row("fa3", ok=True, ms=(1.0, 2.0))], "attention_impl=fa3"),
        ([row(off="fp8=false"), row(off="kernels=")], "fp8=false kernels="),
        # The whole step failed: the passing settings that change the least.
        (
            [row(form="", ok=False), row(form=check.PLAIN, ok=True), row(form="fp8=false", ok=True)],
            "fp8=false",
        ),
    ],
)
def test_chosen_settings(rows, want):
    chosen = check.choose_settings(rows)
    assert " ".join(f"{name}={value}" for name, value in chosen.items()) == want


# ------------------------------------------------------------------------------ what the checks must notice


def nan_in_grad(*args):
    results = tg.softcap_loss(*args)
    results[-1][-1, -1] = math.nan  # in FP8 only in the second layout
    return results


def other_row(out, *args):
    """Sums rows into the table's last row too, which no position touches."""
    tg.segment_sum_rows(out, *args)
    out[-1] += 1


def backend_with(operation, function):
    """Returns plain torch's backend with another function for an operation."""
    return tg.TORCH_BACKEND._replace(**{operation: function})


def with_larger_result(function):
    """Returns the function with its first result 5 % larger, or 10 % in FP8."""

    def larger(*args):
        result = function(*args)
        if isinstance(result, tuple):
            return (enlarge(result[0]),) + result[1:]
        return enlarge(result)

    return larger


def enlarge(t):
    factor = 1.05
    if t.itemsize == 1:
        factor = 1.1
    return (t.float() * factor).to(t.dtype)


def test_compare_accepts_plain_torch_and_notices_mutants(setup):
    """A result that is 5 % too large, or 10 % in FP8, is noticed, and one wrong number."""
    cfg = replace(setup.cfg, kernels=tg.RECORD.kernels, attention_impl="varlen")
    mutants = {"softcap_loss": nan_in_grad, "segment_sum_rows": other_row}
    compared = set()
    for case in kernels.kernel_cases(cfg, [0], setup.paths, setup.device):
        error, bound = kernels.compare(case, tg.TORCH_BACKEND)
        assert error <= bound, case[:2]
        larger = with_larger_result(getattr(tg.TORCH_BACKEND, case.operation))
        mutant = mutants.get(case.operation, larger)
        error, bound = kernels.compare(case, backend_with(case.operation, mutant))
        assert not error <= bound, case[:2]
        compared.add(case.operation)
    operations = {name for kernel in tg.KERNELS.values() for name in kernel}
    assert compared == operations | {"attention"}


def test_gradients_notice_a_wrong_form(setup, monkeypatch):
    (plain,) = check.gradients(setup, check.PLAIN)
    assert plain.ok, plain.seen
    backward = tg.Linear.backward

    def wrong_backward(ctx, dy):
        return backward(ctx, 1.3 * dy)

    monkeypatch.setattr(tg.Linear, "backward", staticmethod(wrong_backward))
    (wrong,) = check.gradients(setup, "compile=false")
    assert wrong.ok is False and wrong.numbers["errors"]["vo_bank"] > 0.2, wrong.seen
