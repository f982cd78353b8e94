"""Runs checks of a GPU one after the other, each with a time limit, whatever happens to one of them.

A check is a generator of Rows, and runs in a worker process. If it raises, its last row says FAILED. If it
hangs, kills its process or breaks the GPU's context, a new process runs the next check. Rows are printed and
written as soon as they arrive, so a killed call has what it saw.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import train_gpt as tg

LINE = "{:<7} {:<7} {:<58} {:<42} {}".format
HEAD = LINE("", "step", "what", "expected", "seen")
UNCHECKED = "not checked: "  # how rows begin that could not be checked
TIME_IS_OVER = "stopped: the time is over"


@dataclass
class Row:
    what: str
    expected: str = ""
    seen: str = ""
    ok: bool | None = None  # None: only measured, or not checked
    feature: str = ""  # which feature of the config this judges
    ms: tuple[float, ...] = ()  # with the feature, without it
    form: str | None = None  # the settings of a whole step
    off: str = ""  # the setting that this machine needs, for lack of a feature
    numbers: dict[str, Any] = field(default_factory=dict)
    details: str = ""  # for errors.txt
    step: str = ""
    at: float = 0.0  # seconds after the call began

    def line(self) -> str:
        status = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        return LINE(status, self.step, self.what, self.expected, self.seen).rstrip()

    @property
    def unchecked(self) -> bool:
        return self.ok is None and self.seen.startswith((UNCHECKED, TIME_IS_OVER))


@dataclass
class Check:
    step: str
    name: str
    function: Callable[..., Iterator[Row]]  # (setup, *args)
    args: tuple = ()
    judges: dict[str, Any] = field(default_factory=dict)  # `feature` or `form` of its row if it fails
    limit: float = 300  # seconds; then it hangs
    need: float = 2  # seconds; with less time left it is not started
    fresh: bool = False  # needs a process in which nothing has run


LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Makes Linux kill this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def failure(check: Check, error: Exception) -> Row:
    text = str(error).strip()
    seen = text.splitlines()[-1] if "Traceback" in text else tg.first_line(error)
    seen = seen if isinstance(error, tg.UserError) else f"{type(error).__name__}: {seen}"
    return Row(check.name, "no error", seen, False, details=traceback.format_exc(), **check.judges)


def serve(pipe, make_setup: Callable) -> None:
    """Runs the checks that arrive, in a process of its own.

    Sends True when it has started; of each check the rows, then True, or False if the process ends.
    """
    os.setsid()  # so that it can be killed with all that it starts
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # this is one process, whatever started the call
    end_with_parent()
    pipe.send(True)
    setup = None
    while True:
        try:
            check = pipe.recv()
        except EOFError:
            return
        try:
            setup = setup or make_setup()
            setup.enter(check.step)
            for row in check.function(setup, *check.args):
                pipe.send(row)
        except Exception as e:
            reason = setup.excuse(e) if setup else ""
            pipe.send(Row(check.name, seen=UNCHECKED + reason) if reason else failure(check, e))
        usable = setup is not None and not setup.is_lost()
        pipe.send(usable)
        if not usable:
            return


class Worker:
    """A process that runs checks until one breaks it."""

    def __init__(self, make_setup: Callable):
        context = multiprocessing.get_context("spawn")  # a GPU survives no fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make_setup))
        self.process.start()
        theirs.close()
        self.usable = True
        with contextlib.suppress(EOFError, OSError):  # if it has died, run() says so
            self.pipe.poll(120) and self.pipe.recv()  # starting counts for no check

    def run(self, check: Check, seconds: float, why: str) -> Iterator[Row]:
        """Yields a check's rows; after `seconds` gives up, and says `why`."""
        end, self.usable = time.monotonic() + seconds, False
        try:
            self.pipe.send(check)
            while self.pipe.poll(max(0, end - time.monotonic())):
                answer = self.pipe.recv()
                if isinstance(answer, bool):
                    self.usable = answer
                    return
                yield answer
        except (EOFError, OSError):
            self.process.join()
            why = f"its process ended with status {self.process.exitcode}"
        if why == TIME_IS_OVER:
            yield Row(check.name, seen=why)
        else:
            yield Row(check.name, "no error", why, False, **check.judges)

    def stop(self) -> None:
        for kill in (os.killpg, os.kill):  # the process alone, if it has not got its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)  # a process that waits for the driver cannot be killed


def run_checks(checks: Sequence[Check], seconds: float, make_setup: Callable) -> Iterator[Row]:
    """Yields the rows of all checks, each with its step. Ends if the first one breaks its process."""
    began, worker = time.monotonic(), None
    try:
        for check in checks:
            left = began + seconds - time.monotonic()
            if left < check.need:
                reason = f"{UNCHECKED}{max(0, left):.0f} s left, it needs {check.need:.0f}"
                yield Row(check.name, seen=reason, step=check.step)
                continue
            if worker and check.fresh:
                worker.stop()
                worker = None
            worker = worker or Worker(make_setup)
            limits = (check.limit, f"no end after {check.limit:.0f} s"), (left, TIME_IS_OVER)
            for row in worker.run(check, *min(limits)):
                yield replace(row, step=check.step, at=round(time.monotonic() - began, 1))
            if not worker.usable:
                worker.stop()
                worker = None
                if check is checks[0]:
                    return
    finally:
        if worker:
            worker.stop()


class Report:
    """Prints rows and appends them to OUT/rows.jsonl, tracebacks to OUT/errors.txt."""

    def __init__(self, out: Path):
        self.out, self.rows = out, []
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.file = open(out / "rows.jsonl", "a", buffering=1, encoding="utf-8")
        except OSError as e:
            raise tg.UserError(f"--out {out}: {e.strerror}; name a folder that can be written to") from None
        self.file.write(json.dumps({"call": sys.argv[1:], "began": time.strftime("%F %T")}) + "\n")
        print(HEAD, flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.line(), flush=True)
        values = asdict(row)
        if details := values.pop("details"):
            with open(self.out / "errors.txt", "a", encoding="utf-8") as file:
                file.write(f"==== {row.step}: {row.what}: {row.seen}\n{details}\n")
        self.file.write(json.dumps(values) + "\n")

    def close(self, closing: list[str]) -> int:
        """Prints the table and `closing`, and keeps them in OUT/summary.txt. Returns the exit status."""
        self.file.close()
        failed = [row.what for row in self.rows if row.ok is False]
        unchecked = [row.what for row in self.rows if row.unchecked]
        lines = [HEAD, *(row.line() for row in self.rows), ""]
        lines += [f"not checked: {', '.join(unchecked) or 'nothing'}"]
        hint = ", see errors.txt" if any(row.details for row in self.rows) else ""
        lines += [f"FAILED: {', '.join(failed) or 'nothing'}{hint}"]
        text = "\n".join(lines + closing) + "\n"
        print(f"\n{text}", end="", flush=True)
        (self.out / "summary.txt").write_text(text, encoding="utf-8")
        return 1 if failed else 0
