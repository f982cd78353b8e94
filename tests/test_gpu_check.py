"""Tests bench/gpu/check.py without a GPU: its run at tiny sizes, what it notices, and what stops it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_gpt as tg
from golden_inputs import BIGRAMS
from launch import WAIT

BENCH = Path(tg.__file__).resolve().parent / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "gpu")]
import check
import collectives
import runner
import step_time
from runner import Check, Row

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def setup(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "draw_once", lambda: None)
    return check.Setup(tmp_path, tmp_path)


def rows_in(folder):
    begin, *lines = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    assert begin.keys() == {"call", "began"}
    return [Row(**line) for line in lines]


@pytest.mark.slow
def test_everything_runs_without_a_gpu(tmp_path):
    command = [sys.executable, str(BENCH / "gpu/check.py"), "--out", "answers"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3 * WAIT)
    rows = rows_in(tmp_path / "answers")
    assert done.returncode == 0, [row.line() for row in rows if row.ok is False]
    assert "no GPU" in done.stdout.splitlines()[0]
    assert {row.step for row in rows} == {each.step for each in check.CHECKS}
    unchecked = {row.what for row in rows if row.unchecked}
    assert unchecked >= {
        *tg.KERNELS,
        "attention",
        "fp8",
        "compile",
    }
    for row in rows:
        assert done.stdout.count(row.line()) == 2, row.line()  # as it came, and in the table
        assert row.ok is not None or row.unchecked or row.seen
    compared = {row.what.split()[0] for row in rows if row.step == "kernels"}
    assert compared == {operation for kernel in tg.KERNELS.values() for operation in kernel} | {
        "attention",
        "fp8",
    }
    sizes = [row.numbers["errors"] for row in rows if row.form is not None]
    assert len(sizes) == 3 and all(errors.keys() == tg.param_shapes(BIGRAMS, 1).keys() for errors in sizes)
    names = {path.name for path in (tmp_path / "answers").iterdir()}
    assert names == {
        *("rows.jsonl", "environment.txt", "summary.txt"),
        *("run.txt", "run.rank0.trace.json.gz", "short_run.txt"),
    }
    assert (tmp_path / "answers/run.txt").read_text().endswith("complete: yes\n")


# ------------------------------------------------------------------------------- checks that fail, and time

# They are pickled by name, for a process of their own.


def pass_check(setup):
    yield Row("it runs", seen=str(os.getpid()), ok=True)


def raise_error(setup):
    yield Row("before the error", seen=str(os.getpid()), ok=True)
    raise ValueError("a bad number. With details")


def kill_process(setup):
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def hang(setup):
    yield Row("before it hangs", seen=str(os.getpid()), ok=True)
    time.sleep(WAIT)


def lose_context(setup):
    yield Row("before the fault", seen=str(os.getpid()), ok=True)
    setup.is_lost = lambda: True


def main_of(checks, out, *arguments):
    """Runs gpu_check's command line on these checks, in a process of its own."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import check, test_gpu_check as t;"
        f"sys.exit(check.main({['--out', str(out), *arguments]!r}, t.{checks}))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


FAILING = [
    Check("start", "first", pass_check),
    Check("kernels", "raises", raise_error, (), {"feature": "gram"}),
    Check("kernels", "dies", kill_process, (), {"form": ""}),
    Check("kernels", "loses its context", lose_context),
    Check("steps", "left out", pass_check),
    Check("nccl", "hangs", hang, limit=2),
    Check("run", "last", pass_check),
]


@pytest.mark.slow
def test_a_failure_costs_only_its_own_rows(tmp_path):
    process = main_of("FAILING", tmp_path, "--only", "kernels,nccl,run")
    out = process.communicate(timeout=WAIT)[0]
    assert process.returncode == 1
    rows = rows_in(tmp_path)
    seen = [(row.step, row.what, row.ok) for row in rows]
    assert seen == [
        ("start", "it runs", True),
        ("kernels", "before the error", True),
        ("kernels", "raises", False),
        ("kernels", "dies", False),
        ("kernels", "before the fault", True),
        ("nccl", "before it hangs", True),
        ("nccl", "hangs", False),
        ("run", "it runs", True),
    ]
    # A new process after each check that breaks one, and only then.
    first, before_error, before_fault, before_hanging, last = (row.seen for row in rows if row.ok)
    assert first == before_error and len({first, before_fault, before_hanging, last}) == 4
    failed = [row for row in rows if row.ok is False]
    assert [row.seen for row in failed] == [
        "ValueError: a bad number",
        "its process ended with status -9",
        "no end after 2 s",
    ]
    assert [(row.feature, row.form) for row in failed] == [("gram", None), ("", ""), ("", None)]
    assert "FAILED: raises, dies, hangs, see errors.txt" in out
    assert "in raise_error" in (tmp_path / "errors.txt").read_text()


HANGING = [Check("start", "first", pass_check), Check("run", "hangs", hang), Check("run", "last", pass_check)]


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


CLOCK = Clock()


class SlowWorker:
    """Stands in for Worker: a check takes 60 seconds, or until it is stopped."""

    usable = True

    def __init__(self, make_setup):
        pass

    def run(self, check, seconds, why):
        CLOCK.now += min(60, seconds)
        yield Row(check.name, seen="done" if seconds >= 60 else why)

    def stop(self):
        pass


def test_time_limits(monkeypatch):
    monkeypatch.setattr(runner, "Worker", SlowWorker)
    monkeypatch.setattr(runner, "time", CLOCK)
    names = {
        "first": {},
        "hangs": {"limit": 5},
        "large": {"need": 200},
        "second": {},
        "third": {},
        "last": {},
    }
    checks = [Check("run", name, pass_check, **options) for name, options in names.items()]
    rows = list(runner.run_checks(checks, 150, None))
    assert {row.what: row.seen for row in rows} == {
        "first": "done",
        "hangs": "no end after 5 s",
        "large": "not checked: 85 s left, it needs 200",
        "second": "done",
        "third": "stopped: the time is over",
        "last": "not checked: 0 s left, it needs 2",
    }
    assert [row.what for row in rows if row.unchecked] == ["large", "third", "last"]


# ------------------------------------------------------------------------------------- the chosen settings


def row(feature="", ok=None, ms=(), **more):
    return Row("x", feature=feature, ok=ok, ms=ms, **more)


ALL = tg.RECORD.kernels


@pytest.mark.parametrize(
    "rows, want",
    [
        ([row(name, ok=True, ms=(1.0, 2.0)) for name in (*ALL, "fp8", "attention")], {}),
        ([row("gram", ok=True), row("gram", ok=False)], {"kernels": [k for k in ALL if k != "gram"]}),
        # Times of several shapes add up; 3% are noise.
        ([row("gram", ms=(1.0, 2.0)), row("gram", ms=(3.1, 2.0))], {}),
        ([row("gram", ms=(1.0, 2.0)), row("gram", ms=(3.2, 1.9))], {"kernels": [*ALL[1:]]}),
        ([row("kernels", ms=(5.0, 4.0))], {"kernels": []}),
        ([row("attention", ok=False)], {"attention": ["dense"]}),
        ([row("fa3", ok=True, ms=(1.0, 2.0))], {"attention": ["fa3"]}),
        ([row("fa3", ok=True, ms=(2.1, 2.0))], {}),
        ([row("fa3", ok=False, ms=(1.0, 2.0))], {}),
        ([row("attention", ok=False), row("fa3", ok=True, ms=(1.0, 2.0))], {"attention": ["dense"]}),
        ([row("fp8", ms=(9.0, 8.0))], {"fp8": ["false"]}),
        ([row("compile", ok=False)], {"compile": ["false"]}),
        # What the machine lacks.
        ([row(off="fp8=false"), row(off="kernels=")], {"kernels": [], "fp8": ["false"]}),
        # The whole step failed: the passing settings that change the least.
        (
            [row(form="", ok=False), row(form=check.PLAIN, ok=True), row(form="fp8=false", ok=True)],
            {"fp8": ["false"]},
        ),
        ([row("gram", ok=True), row(form="", ok=False), row(form="fp8=false", ok=False)], {}),
        ([row(form="", ok=True), row(form="fp8=false", ok=True)], {}),
    ],
)
def test_chosen_settings(rows, want):
    settings = check.choose_settings(rows)
    assert settings == " ".join(f"--set {name}={','.join(values)}" for name, values in want.items())
    for setting in settings.split()[1::2]:
        tg.override(tg.RECORD, setting)


# ------------------------------------------------------------------------------ what the checks must notice


def off_by(factor):
    """Returns a mutant of an operation: its first result, or what it changed in place, times a factor."""

    def mutate(operation):
        def mutant(*args):
            result = operation(*args)
            out = args[0] if result is None else result[0] if isinstance(result, tuple) else result
            out.mul_(factor)
            return result

        return mutant

    return mutate


def next_row(operation):
    """Returns a mutant that writes to the next row of a table."""
    return lambda out, grad, index: operation(out.roll(-1, 0), grad, index) or out.roll_(1, 0)


@pytest.fixture
def cases(setup):
    cfg = replace(setup.cfg, kernels=tuple(tg.KERNELS), attention="varlen")
    return list(step_time.kernel_cases(cfg, [0], setup.paths, CPU))


def test_compare_accepts_plain_torch(cases):
    for case in cases:
        error, bound = check.compare(case, tg.TORCH_BACKEND)
        assert error <= bound, case[:2]


def test_compare_notices_wrong_kernels(cases):
    for case in cases:
        operation = getattr(tg.TORCH_BACKEND, case.operation)
        if case.operation in ("attention", "compose_heads"):
            mutant = lambda *args, operation=operation: operation(*args) * 1.05  # noqa: E731
        else:
            mutant = off_by(1.02)(operation)
        error, bound = check.compare(case, tg.TORCH_BACKEND._replace(**{case.operation: mutant}))
        assert not error <= bound, case[:2]


def nan_in_grad(*args):
    losses, grad = tg.softcap_loss(*args)
    grad[-1, 0] = math.nan
    return losses, grad


def other_row(out, *args):
    """Sums rows into the table's last row too, which no position touches."""
    tg.segment_sum_rows(out, *args)
    out[-1] += 1


def test_compare_notices_one_wrong_number(cases):
    mutants = {"softcap_loss": nan_in_grad, "segment_sum_rows": other_row}
    for case in cases:
        if case.operation in mutants:
            backend = tg.TORCH_BACKEND._replace(**{case.operation: mutants[case.operation]})
            error, bound = check.compare(case, backend)
            assert not error <= bound, case[:2]


def test_gradients_notice_a_wrong_form(setup, monkeypatch):
    (plain,) = check.gradients(setup, check.PLAIN)
    assert plain.ok and plain.numbers["errors"].keys() == tg.param_shapes(BIGRAMS, 1).keys()
    backward = tg.MLP.backward
    monkeypatch.setattr(tg.MLP, "backward", staticmethod(lambda ctx, dy: backward(ctx, 1.3 * dy)))
    (wrong,) = check.gradients(setup, "compile=false")
    assert wrong.ok is False and wrong.numbers["errors"]["mlp_bank"] > 0.2


class WrongExchange(tg.Exchange):
    """Forgets to gather, receives zeros for numbers, and mixes up rows."""

    def gather(self, name, t):
        return tg.Pending(t)

    def send_rows(self, kind, *args):
        pending = super().send_rows(kind, *args)
        if kind == "counts":
            return pending
        return pending._replace(finish=lambda rows: rows.flip(0) * (rows > 0 if kind == "rows" else 0))


def wrong_calls(rank, world_size, kind):
    exchange = kind(rank, world_size)
    calls = collectives.exchange_calls(exchange, CPU)
    return [name for name, result, wanted in calls if not torch.equal(result, wanted)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchange_calls(workers, world_size):
    assert workers(world_size, wrong_calls, tg.Exchange) == [[]] * world_size
    if world_size > 1:
        wrong = workers(world_size, wrong_calls, WrongExchange)
        sparse = "row ids with", "sparse"
        for dtype in ("bfloat16", "float32"):
            for name in (
                "gather {}",
                *(f"{what} {{}}, uneven" for what in sparse),
                "sparse {}, one rank empty",
            ):
                assert name.format(dtype) in wrong[0] + wrong[-1]
