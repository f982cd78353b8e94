"""Runs checks of a GPU one after the other, each with a time limit, whatever happens to one of them.

A check is a generator of Rows. One process runs the checks. If a check raises, its last row says FAILED. If
it hangs, kills the process or breaks the GPU's context, a new process goes on with the next check. Rows are
printed and written as soon as they arrive, so a killed call has what it saw.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

import train_gpt as tg

LINE = "{:<7} {:<7} {:<58} {:<42} {}"
HEAD = LINE.format("", "step", "what", "expected", "seen")
UNCHECKED = "not checked: "  # how rows begin that could not be checked


def without_paths(text: str) -> str:
    """Cuts absolute paths to their last names, as rows may be published."""
    return re.sub(r"(?<![\w./~])/(?:[^\s/'\":;,]+/)+", "", text)


def all_without_paths(tree: Any) -> Any:
    """Does so in all strings of what json can write."""
    if isinstance(tree, str):
        return without_paths(tree)
    if isinstance(tree, dict):
        return {all_without_paths(key): all_without_paths(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [all_without_paths(value) for value in tree]
    return tree


class Unable(Exception):
    """Raised by a check that this machine cannot run. Its row is no failure."""


@dataclass
class Row:
    what: str
    expected: str = ""
    seen: str = ""
    ok: bool | None = None  # None: only measured, or not checked
    feature: str = ""  # which feature of the config this judges
    operation: str = ""  # of the feature, which `ms` times
    ms: tuple[float, ...] = ()  # with the feature, without it
    form: str | None = None  # the settings of a whole step
    off: str = ""  # the setting that this machine needs, because it lacks a feature
    numbers: dict[str, Any] = field(default_factory=dict)
    details: str = ""  # for errors.txt
    step: str = ""

    def line(self) -> str:
        status = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        return LINE.format(status, self.step, self.what, self.expected, self.seen).rstrip()


@dataclass
class Check:
    step: str
    name: str
    function: Callable[..., Iterator[Row]]  # (setup, *args)
    args: tuple = ()
    judges: dict[str, Any] = field(default_factory=dict)  # `feature` or `form` of its row if it fails
    limit: float = 300  # seconds


def failure(check: Check, error: Exception) -> Row:
    text = str(error).strip()
    if isinstance(error, Unable):
        return Row(check.name, seen=UNCHECKED + text, step=check.step)
    line = text.split("\n")[0]
    if "Traceback" in text:
        line = text.splitlines()[-1]
    seen = f"{type(error).__name__}: {line}"
    details = traceback.format_exc()
    return Row(check.name, "no error", seen, False, details=details, step=check.step, **check.judges)


def serve(pipe: Connection, make_setup: Callable, checks: Sequence[Check]) -> None:
    """Runs checks, in a process of its own. Sends None, each one's rows, then whether the process goes on."""
    os.setsid()  # so that it can be killed with all that it starts
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: it ends with the call, however that ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    setup = None
    for check in checks:
        pipe.send(None)  # its limit counts from here, else a slow start of the process would count
        try:
            setup = setup or make_setup()
            for row in check.function(setup, *check.args):
                pipe.send(replace(row, step=check.step))
        except Exception as e:
            pipe.send(failure(check, e))
        goes_on = setup is not None and not setup.is_lost()
        pipe.send(goes_on)
        if not goes_on:
            return


class Worker:
    """A process that runs checks until one breaks it."""

    def __init__(self, make_setup: Callable, checks: Sequence[Check]):
        context = multiprocessing.get_context("spawn")  # a GPU survives no fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make_setup, checks))
        self.process.start()
        theirs.close()

    def rows(self, check: Check, seconds: float) -> Generator[Row, None, bool]:
        """Yields the rows of the check that comes now, for `seconds` at most. Returns whether it goes on."""
        last = time.monotonic() + seconds
        end = last
        judged: dict[str, Any] = {"expected": "no error", "ok": False} | check.judges
        try:
            while self.pipe.poll(max(0, end - time.monotonic())):
                answer = self.pipe.recv()
                if isinstance(answer, bool):
                    return answer
                if answer is None:
                    end = min(last, time.monotonic() + check.limit)
                else:
                    yield answer
            seen = f"no end after {check.limit:.0f} s"
            if end == last:
                seen = f"{UNCHECKED}stopped, the time is over"
                judged = {}
        except (EOFError, OSError):
            self.process.join()
            seen = f"its process ended with status {self.process.exitcode}"
        yield Row(check.name, seen=seen, step=check.step, **judged)
        return False

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have had its group yet
        self.process.join(10)  # a process that waits for the driver cannot be killed


def run_checks(checks: Sequence[Check], seconds: float, make_setup: Callable) -> Iterator[Row]:
    """Yields the rows of all checks. After `seconds` the rest is not checked."""
    end = time.monotonic() + seconds
    worker = None
    bar = tqdm(checks, unit="check", mininterval=0.1 if sys.stderr.isatty() else 10)
    try:
        for i, check in enumerate(bar):
            bar.set_postfix_str(check.name)
            left = end - time.monotonic()
            if left <= 0:
                yield Row(check.name, seen=f"{UNCHECKED}the time is over", step=check.step)
                continue
            worker = worker or Worker(make_setup, checks[i:])
            if not (yield from worker.rows(check, left)):
                worker.stop()
                worker = None
    finally:
        bar.close()
        if worker:
            worker.stop()


class Report:
    """Prints rows and appends them to OUT/rows.jsonl, tracebacks to OUT/errors.txt, without paths of the
    machine.
    """

    def __init__(self, out: Path):
        self.out = out
        self.rows: list[Row] = []
        self.began = time.monotonic()
        with tg.user_error_on(f"--out {out} cannot be written to", "name another folder", OSError):
            out.mkdir(parents=True, exist_ok=True)
            rows = out / "rows.jsonl"
            is_ours = rows.exists() and rows.read_bytes().startswith(b'{"call": ')
            tg.require(
                is_ours or not os.listdir(out),
                f"--out {out} has other files; name a new folder, or one of this script",
            )
            self.file = open(rows, "a", buffering=1)
        self.write({"call": sys.argv[1:], "began": time.strftime("%F %T")})
        print(HEAD, flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        tqdm.write(row.line())
        sys.stdout.flush()
        values = asdict(row) | {"at": round(time.monotonic() - self.began, 1)}
        details = values.pop("details")
        if details:
            with open(self.out / "errors.txt", "a") as file:
                text = f"==== {row.step}: {row.what}: {row.seen}\n{details}\n"
                file.write(without_paths(text))
        self.write(values)

    def write(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(all_without_paths(values)) + "\n")

    def close(self, closing: list[str]) -> int:
        """Prints what failed, what was not checked, and `closing`; OUT/summary.txt gets all rows too.

        Returns the exit status.
        """
        self.file.close()
        failed = []
        unchecked = []
        has_details = False
        for row in self.rows:
            if row.ok is False:
                failed.append(row.what)
                has_details = has_details or bool(row.details)
            if row.seen.startswith(UNCHECKED):
                unchecked.append(row.what)
        lines = ["", f"not checked: {', '.join(unchecked) or 'nothing'}"]
        lines.append(f"FAILED: {', '.join(failed) or 'nothing'}")
        if has_details:
            lines.append(f"see {self.out / 'errors.txt'}")
        lines += closing
        print("\n".join(lines), flush=True)
        every_line = [HEAD] + [row.line() for row in self.rows] + lines
        (self.out / "summary.txt").write_text(without_paths("\n".join(every_line)) + "\n")
        return 1 if failed else 0
