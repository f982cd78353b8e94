#!/usr/bin/env python3
"""Compares groups of speedrun logs: do they meet the target loss, how do they differ from the first group?

    python records/compare.py [LABEL=]PATH... [--target LOSS] [--json] [--anyway] [--curves FILE.png]
    python records/compare.py --diff A B
    python records/compare.py --begin FOLDER
    python records/compare.py --update

A PATH is a log, a quoted pattern of logs, or a folder. A folder means the logs directly in it or, if they
hold no run, those in its sub-folders; so a record's `baseline/` is a separate group. Logs in a folder end in
.txt, .log, .stdout or .out; other files in it whose names begin with `seed` are named as not read. Each PATH
is a group, PATHs of one LABEL are one group, and the first is the baseline. Reads the logs of train_gpt.py,
what its runs print on the screen, also through a launcher that puts [default0]: before lines, and every
format of the public speedrun.

A run counts if the last step it logged has a validation; its loss and time are that validation's. A log of
train_gpt.py must also end with `complete: yes`, and its closing lines must repeat that loss and time, and its
seed. A run that names a target counts only if it read its data once. A text of one's own is of the track
`other`, which has no target: such runs count though they read a small text in several epochs. A run that was
stopped and resumed has several logs, and counts once, as the one that went furthest.

The target is the logs'; public logs name none, so --target 3.28 must name theirs. A mean loss is shown to be
below it if a one-sided one-sample t-test rejects, at p < 0.01, that it is not. Groups are compared by Welch's
t-test, two-sided. If both have the same seeds, losses are also compared in pairs of one seed, by a paired
t-test; and so are times, if the groups are a folder and its `baseline/`, whose runs alternate. If machines,
data or validation differ, the first line warns of it and no percentage is printed, unless --anyway is given.
A machine includes its torch, Python and operating system. If vocabularies or validations differ, no
difference of losses is printed, whatever is given.
The exit code is 2 if something could not be read, or --update refused a folder; all else is still reported.

A group is a record over the baseline if its mean loss is below its track's target and its mean time below the
baseline's, both with p < 0.01 (in Welch's test). All logs must name their track, script, machine, data and
seed, and have the target, data, vocabulary and validation that records/tracks.py gives. Within each group the
steps, scripts, settings, machines, data and validation must be equal, and the seeds different. Machines, data
and validation must be equal in both groups, and no run may be in both. The baseline must be the folder's own
`baseline/`, whose runs alternate with its own. The script must have passed records/referee.py, whose
referee.txt is beside the logs. Records that are listed already need none.

--curves draws losses over steps and over training time. With dots: validation loss, mean and standard
deviation of a group's runs, at the steps that all validated; up to four dots are not joined by lines. A
default run of the `cpu` preset validates only before its first step and at its end: make the runs of a
picture with --set val_every=20. Thin, if logged: training loss, mean of the runs, smoothed by a centred
window of 5 % of the steps, shorter at both ends. train_gpt.py logs the first process's, which is higher in
stages that also predict later tokens. It is dotted if a stage has a sampled softmax, whose loss is lower
because it leaves out columns. Dashed: the target. The loss axis is logarithmic, and fits the losses after a
group's first 10 % of steps.

--begin prints the table of a folder. If it has a `baseline/`, it compares them, and begins the README.md of a
record if there is none. If it is no record, it says what to do with the folder. --update writes the
records' tables in README.md and records/README.md, and draws the curves.png of a record if its logs or the
drawing code have changed. It lists a new folder only if it is a record over its `baseline/`, and none of its
runs is in another record. It writes nothing if fewer runs of a listed record, or of its baseline, count than
its row says.

    Logs                  read_log finds the runs in a file
    Groups                find and read logs, drop repeats, warn
    Statistics            scipy's tests
    Reports               text, JSON, curves, differences of two logs
    What --update makes   tables and pictures of our records, from their logs
"""

import argparse
import difflib
import glob
import hashlib
import inspect
import json
import math
import os
import re
import shlex
import signal
import sys
import textwrap
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "data"))
import referee
import tracks

from scripts import UserError, make_parser, missing_package, new_figure, number, png, replacing, save_figure

# Of logs in a folder, in capitals too. A file named directly may have any other.
SUFFIXES = {".txt", ".log", ".stdout", ".out"}
ALPHA = 0.01  # the public speedrun's level for "the mean loss is below the target"
SMOOTHED = 0.05  # of the steps: the window that training losses are averaged over
MOST_STEPS = 10**7  # of a log that is read: a training curve has a place for each
FEW = 4  # validations, which make no curve: these are not joined by lines
STEEP = 0.1  # of the steps: the first, whose losses may lie above the picture


# ============================================================================================================
# Logs. A log begins with the script's source, whose f-strings look like log lines. So every pattern is
# anchored at the start of a line and needs numbers. Bytes are searched, without splitting into lines: most of
# a log is source and training lines.
# ============================================================================================================

TERMINAL_CODES = re.compile(rb"\x1b(?:\[[ -?]*[@-~]|\][^\x07\n\x1b]*\x07|[ -/]*[0-~])")
# Where a line begins on the screen, also within a line of the file: after a carriage return, as progress bars
# print, after a date or a time, after a launcher's [default0]: or [rank0]:, and with all that a verdict
# depends on, whatever a program put before it.
DECIDES = (
    rb"step:\d+/\d+ (?:val_loss|train_loss|train_time):|epochs: \d+\s*$"
    rb"|target [\d.]+: (?:not )?below; one run"
)
DESCRIBES = (
    rb"Running [Pp]y(?:thon|[Tt]orch) \d|commit: \S+(?: \(\w+\))?\s*$|script: \S+ \(sha256|data: \w+ \(\d"
    rb"|(?:steps|seed|train_time_ms|val_loss|val_loss_per_byte): [-\d.]+\s*$|peak memory \w+: \d"
    rb"|resumed: \S+ after step|this CPU has AMX:"
)
LINE_BEGINS = re.compile(
    rb"\r|^\[?(?:\d{4}-\d\d-\d\d[T ]|[A-Z][a-z][a-z] [ \d]\d )?\d\d:\d\d:\d\d[^\s\]]*\]?:? "
    rb"|\[[\w,]*\d\](?:<\w+>)?: ?|(?<!\n)(?=" + DECIDES + rb")|(?<![\n\"'\w])(?=" + DESCRIBES + rb")",
    re.MULTILINE,
)
SAMPLE = re.compile(rb"sample: ['\"][^\r\n]*")  # a model's text, which may look like log lines


def clean(raw: bytes) -> bytes:
    """Returns a file's lines without terminal codes and samples, a line break before each.

    Added breaks are CR LF.
    """
    text = SAMPLE.sub(b"", TERMINAL_CODES.sub(b"", raw.replace(b"\r\n", b"\n")))
    return LLMC.sub(modernize, b"\n" + LINE_BEGINS.sub(b"\r\n", text) + b"\n")


def modernize(line: re.Match[bytes]) -> bytes:
    """Returns a line of llm.c in the later format, which counts updates from 1 in training lines, too."""
    step = int(line[1])
    kind = b"val"
    if line[2] == b"trl":
        step += 1
        kind = b"train"
    return b"\nstep:%d/0 %s_loss:%s train_time:-ms step_avg:nanms" % (step, kind, line[3])


def pattern(text: str) -> re.Pattern[bytes]:
    kinds = {"INT": r"\d{1,15}", "DECIMAL": r"\d{1,20}\.?\d{0,20}"}  # no loss and no time is negative
    kinds["NUM"] = rf"(?:{kinds['DECIMAL']}(?:e[-+]?\d{{1,4}})?|nan|inf)"
    for name, kind in kinds.items():
        text = text.replace(name, kind)
    return re.compile(rb"\n" + text.encode())


STEP = pattern(r"step:(INT)/(INT) ")
VALIDATION = pattern(
    r"step:(INT)/INT val_loss:(NUM)(?: val_\w+:NUM)* train_time:(DECIMAL|-)(ms|s) step_avg:NUMms"
    r"(?: \w+:\S+)*[ \t\r]*(?=\n)"
)
# The loss is the line's own step's in public logs, in ours the last that had arrived, with its step.
TRAINING = pattern(
    r"step:(INT)/(INT) (?:train_loss:(NUM) )?train_time:(DECIMAL|-)(ms|s) step_avg:NUMms"
    r"(?: train_loss:(NUM)@(INT))?[ \t\r]*(?=\n)"
)
# The first logs of 2024, written by llm.c: no times, no number of steps.
LLMC = pattern(r"s:(INT) (tel|trl):(NUM)(?: lr:[^\n]*)?[ \t\r]*(?=\n)")
# Lines that hold the loss of a validation, or began to.
LOSS = re.compile(rb"\n(?:[^\n]*(?:step:\d+/\d+ v|val_loss:[-+]?\d)|s:\d+ tel:)[^\r\n]*")

CLOSING = (  # lines after the last step, and the fields of Run that they set
    (pattern(r"peak memory (?:consumption|allocated): (INT) MiB"), "peak_mem_mib", int),
    (pattern(r"val_loss_per_byte: (NUM)\s"), "per_byte", float),
    (pattern(r"target (DECIMAL): (?:not )?below; one run"), "screen_target", float),
)
# Of these lines the text is kept, so that one that cannot be read is not taken for none.
CLOSING_TEXT = pattern(r"(epochs|complete|val_loss|train_time_ms|steps|seed): ([^\r\n]*)")
ROUNDING = 0.00006  # of a step's loss, which has four decimals: its closing line has six
# A value ends with \S, since it takes quadratic time to try the end of a line after each of many blanks.
HEADER = {
    "torch": r"Running [Pp]y[Tt]orch (\d\S*) compiled for CUDA \S+(?: on (.*\S)\s+with world_size (\d+))?",
    "python": r"Running [Pp]ython (\d\S*(?: on \S+ \S+)?).*",  # and the system; public logs add the build
    "commit": r"commit: (\S+)(?: \((?:clean|(.+?))\))?",  # and `modified`, or git's letters: M, ??, !!
    "script": r"script: (.*\S)",
    "config": r"config: (\{.*\})",
    "data": r"data: (.*\S)",
    "resumed": r"resumed: (\S+) after step (\d+)(?:;.*)?",
    "amx": r"this CPU has AMX: (.*\S)",
    "profiled": r"profiled: (yes)",
}
# Types of the settings that are read here. All numbers but the seed are above 0.
CONFIG: dict[str, Any] = {"seed": int, "val_slices": int, "val_slice_tokens": int, "vocab_size": int}
CONFIG |= {
    "val_tokens": int,
    "bf16_mlp": bool,
    "target": int | float,
    "length": int | float,
    "track": str,
    "preset": str,
    "data": str,
}
GPU = r"\n\|\s+(\d+)\s+(\S[^\n|]*[^\s|])\s+(?:On|Off)\s*\|"  # a row of nvidia-smi's table
# Other rules of `=` vary in number, and occur in the source, too.
SOURCE_END = pattern(r"={20,}\s*\n(?:Running|script:) ")
HEADER_BEGIN = pattern(r"Running [Pp]y[Tt]orch \d")


@dataclass
class Header:
    """Holds what a log says before its first step."""

    torch: str | None = None
    python: str | None = None
    hardware: str | None = None
    # The hash, with " (modified)" unless the log says that the script is the commit's.
    commit: str | None = None
    script: str | None = None  # the name, and the hash of its text
    source: str | None = None  # the hash of the log's source; None: it is only a screen
    data: str | None = None  # the fingerprint, and what it is of
    amx: bool = False  # the MLPs' products are in bf16, because the CPU has AMX
    profiled: bool = False  # some steps took longer
    config: dict = field(default_factory=dict)
    origin: str | None = None  # the run that this log continues, and after which step
    after: int = 0


class Point(NamedTuple):
    """Holds one logged loss."""

    step: int
    loss: float  # nats per token
    time_s: float | None  # training time; None: not logged


@dataclass
class Run:
    """Holds one training run. A file may have several."""

    path: str
    index: int  # in its file
    header: Header
    final_step: int  # the last one logged
    total_steps: int | None  # None: not logged (llm.c), and the run was cut off
    curve: list[Point]  # validation losses
    training: list[Point]  # training losses
    peak_mem_mib: int | None = None
    per_byte: float | None = None
    screen_target: float | None = None
    closing: dict[str, str] = field(default_factory=dict)  # the text of CLOSING_TEXT's lines

    @property
    def closed(self) -> bool:
        return self.closing.get("complete") == "yes"

    @property
    def epochs(self) -> str:
        """Returns how often training began to read its data, as the log says it."""
        return self.closing.get("epochs", "1")

    @property
    def track(self) -> str | None:
        return self.header.config.get("track")

    @property
    def target(self) -> float | None:
        """Returns the target that the run names. A text of the track `other` has none."""
        if self.track == "other":
            return None
        return self.header.config.get("target", self.screen_target) or None

    @property
    def left_out(self) -> str:
        """Returns why the run does not count, "" if it does.

        It needs a validation at its last step. A run of ours must have ended, too: its log says so, while its
        screen lacks that line, and the config. A run with a target must have read its data once.
        """
        if self.target is not None and self.epochs != "1":
            return f"trained in {self.epochs} epochs"
        ends = f"incomplete: it ends at {self.reached}"
        if not self.curve or self.curve[-1].step != self.final_step:
            return f"{ends}, without a validation"
        if self.header.config:
            return self.contradiction if self.closed else f"{ends}, without 'complete: yes'"
        if self.header.commit and self.final_step != self.total_steps:
            return ends
        return ""

    @property
    def reached(self) -> str:
        return f"step {self.final_step} of {self.total_steps or 'an unknown number'}"

    @property
    def contradiction(self) -> str:
        """Returns which closing line says something else than the log before it, "" if none does."""
        last = self.curve[-1]
        logged = {
            "val_loss": last.loss,
            "steps": self.final_step,
            "train_time_ms": 1000 * (last.time_s or 0),
            "seed": seed_of(self),
        }
        for name, value in logged.items():
            text = self.closing.get(name)
            if text is None or value is None:
                continue
            try:
                # As texts, too, because nan is not close to nan.
                agrees = text == str(value) or math.isclose(float(text), value, abs_tol=ROUNDING)
            except ValueError:
                agrees = False
            if not agrees:
                return f"its line '{name}: {text}' contradicts {value:g} before it"
        latest = max((point.time_s or 0 for point in self.training), default=0)
        if latest > (last.time_s or math.inf) + ROUNDING:
            return f"a step ended after {latest:g} s, and its last validation says {last.time_s:g} s"
        return ""

    @property
    def counted(self) -> bool:
        return not self.left_out

    @property
    def val_loss(self) -> float | None:
        return self.curve[-1].loss if self.counted else None

    @property
    def train_time_s(self) -> float | None:
        return self.curve[-1].time_s if self.counted else None

    @property
    def complete(self) -> bool:
        """Tells whether the run reached its end, and counts."""
        return self.counted and self.final_step == self.total_steps

    @property
    def origin(self) -> str:
        """Returns the name of the run's first log, which those that resumed it repeat."""
        return self.header.origin or Path(self.path).stem

    @property
    def identity(self) -> str:
        """Returns a key that is equal for two copies of one run, such as its log and a part of its screen.

        The last validation is enough if it has a time, since no two runs take the same milliseconds to the
        same loss.
        """
        if not self.curve:
            return self.name
        seen = self.curve[-1:] if self.curve[-1].time_s else self.curve
        return repr((seen, self.final_step))

    @property
    def name(self) -> str:
        return self.path if self.index == 0 else f"{self.path} (run {self.index})"


class StepLine(NamedTuple):
    """Holds what a line says of its step."""

    position: int  # where the line begins in the file
    step: int
    total: int | None  # number of steps; None: not logged (llm.c)


def read_log(path: str, errors: list[str] | None = None) -> tuple[list[Run], list[str]]:
    """Returns a file's runs, and notes on it. Raises OSError; UserError if a config line is not JSON.

    Adds validations that cannot be read to `errors`, or to the notes if that is not given.
    """
    text = clean(Path(path).read_bytes())
    source_end = SOURCE_END.search(text)
    header_start = source_end.start() if source_end else 0
    source = hashlib.sha256(text[:header_start]).hexdigest()[:12] if source_end else None
    steps = [StepLine(m.start(), int(m[1]), int(m[2]) or None) for m in STEP.finditer(text, header_start)]
    validations: dict[int, Point] = {}  # by where their lines begin
    for m in VALIDATION.finditer(text, header_start):
        validations[m.start()] = Point(int(m[1]), float(m[2]), seconds(m[3], m[4]))
    runs: list[Run] = []
    notes: list[str] = []
    unreadable = name_unreadable(text, header_start, validations, path)
    if errors is None:
        notes += unreadable
    else:
        errors += unreadable

    header = Header()
    lines_of_runs: list[set[bytes]] = []
    headers = [m.start() for m in HEADER_BEGIN.finditer(text, header_start)]
    steps_of_runs = split_runs(steps, headers, validations)
    starts = [run_steps[0].position for run_steps in steps_of_runs]
    ends = [*starts[1:], len(text)]
    for run_steps, start, end in zip(steps_of_runs, starts, ends):
        last = run_steps[-1]
        lines = set(re.findall(rb"\nstep:.*\S", text[start:end]))
        if any(lines <= earlier for earlier in lines_of_runs):
            notes.append(f"{path}: a run's lines occur twice; the repetition is left out")
        else:
            header = replace(read_header(decode(text[header_start : start + 1]), path, header), source=source)
            curve = [point for position, point in validations.items() if start <= position < end]
            training = read_training(text[start : end + 1], path)
            total = last.total
            if total is None and curve and curve[-1].step == last.step:
                total = last.step  # llm.c does not log it, but validates the last step
            runs.append(Run(path, len(runs), header, last.step, total, curve, training))
            lines_of_runs.append(lines)
        # A repetition's too: it may hold closing lines that the run lacks.
        read_closing(runs[-1], text, last.position, end + 1)
        header_start = last.position
    if source_end and header.script and not any(run.header.config for run in runs):
        raise UserError(f"{path}: its config line is missing or cut: the log is damaged")
    if source_end is None:
        unknown = "its script and its settings are unknown, validation included"
        notes.append(f"{path}: no whole log, only what a run printed: {unknown}")
    return runs, notes


def name_unreadable(text: bytes, start: int, validations: dict[int, Point], path: str) -> list[str]:
    """Returns a message for each validation line that is not in `validations`, with its line number."""
    messages = []
    number = 0
    counted = 0  # how much of the text
    for m in LOSS.finditer(text, start):
        if m.start() not in validations:
            before = text[counted : m.start() + 1]
            number += before.count(b"\n") - before.count(b"\r\n")
            counted = m.start() + 1
            line = decode(m[0].strip())[:100]
            messages.append(f"{path}:{number}: cannot read this validation: {line!r}")
    return messages


def split_runs(
    steps: list[StepLine], headers: list[int], validations: dict[int, Point]
) -> list[list[StepLine]]:
    """Splits a file's step lines into those of each run, given where headers and validations begin.

    A run begins after a header, and where the step falls, the number of steps changes, or the same step has
    another validation. Times do not show it: some formats restart the clock near step 10.
    """
    runs: list[list[StepLine]] = []
    previous = StepLine(-1, 0, None)
    validation: Point | None = None  # the run's last one
    for line in steps:
        has_header = bisect(headers, previous.position) < bisect(headers, line.position)
        begins = not runs or has_header or line.step < previous.step or line.total != previous.total
        here = validations.get(line.position)
        if here and validation and here.step == validation.step and here != validation:
            begins = True
        if begins:
            runs.append([])
            validation = None
        validation = here or validation
        runs[-1].append(line)
        previous = line
    return runs


def seconds(time: bytes, unit: bytes) -> float | None:
    if time == b"-":
        return None  # llm.c logs none
    return float(time) / (1000 if unit == b"ms" else 1)


def read_training(text: bytes, path: str) -> list[Point]:
    """Returns the training losses in a run's lines, of each step once. Raises UserError if one is too late.

    A curve has a place for each step, so a damaged number of a step could take all memory.
    """
    times: dict[int, float | None] = {}
    losses: dict[int, float] = {}
    for step, total, loss, time, unit, late_loss, at in TRAINING.findall(text):
        if int(step) > MOST_STEPS:
            raise UserError(f"{path}: a line of step {int(step)}: runs have at most {MOST_STEPS:,}")
        times[int(step)] = seconds(time, unit)
        if loss or late_loss:
            of = int(at or step)
            if of > int(step) or of > int(total) > 0:  # llm.c's total is 0
                at = f"step {int(step)} of {int(total)}"
                raise UserError(f"{path}: a line of {at} has the loss of step {of}: mend that line")
            losses[of] = float(loss or late_loss)
    return [Point(step, loss, times.get(step)) for step, loss in losses.items()]


def read_closing(run: Run, text: bytes, start: int, end: int) -> None:
    """Sets the fields of `run` that lines between `start` and `end` name."""
    for m in CLOSING_TEXT.finditer(text, start, end):
        name = decode(m[1])
        said = decode(m[2]).strip()
        if run.closing.setdefault(name, said) != said:
            run.closing[name] += f" and {said}"
    for line, name, kind in CLOSING:
        for m in line.finditer(text, start, end):
            setattr(run, name, kind(m[1]))


def read_header(text: str, path: str, before: Header) -> Header:
    """Reads the lines before a run. Returns `before`, the previous run's header, if there are none."""
    last: dict[str, Any] = {}
    for name, line in HEADER.items():
        matches = re.findall(rf"\n{line}[ \t\r]*(?=\n)", text)
        if matches:
            last[name] = matches[-1]
        if name == "config" and len(set(matches)) > 1:
            raise UserError(f"{path}: it has config lines that differ")
    if not last:
        return before
    header = Header(python=last.get("python"), script=last.get("script"), data=last.get("data"))
    header.amx = "amx" in last
    header.profiled = "profiled" in last
    device = None
    if "torch" in last:
        header.torch, device, world_size = last["torch"]
    if device:
        header.hardware = f"{int(world_size)} x {device}"
    else:
        gpus = dict(re.findall(GPU, text))  # by number, since the table may be there twice
        counts = Counter(gpus.values())
        header.hardware = " + ".join(f"{count} x {name}" for name, count in counts.items()) or None
    if "commit" in last:
        header.commit, state = last["commit"]
        if state:
            header.commit += " (modified)"
    if "config" in last:
        try:
            header.config = json.loads(last["config"], parse_constant=int)  # int("NaN") is an error
        except (ValueError, RecursionError):
            raise UserError(f"{path}: its config line is not JSON, or has numbers that are none") from None
        for name, kind in CONFIG.items():
            value = header.config.get(name)
            is_too_low = isinstance(value, int | float) and name not in ("seed", "bf16_mlp") and value <= 0
            if is_too_low or not isinstance(value, kind | None):
                raise UserError(f"{path}: its config has {name} = {value!r}")
    if "resumed" in last:
        header.origin, after = last["resumed"]
        header.after = int(after)
    return header


def decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


# ============================================================================================================
# Groups.
# ============================================================================================================


Value = Callable[[Run], Any]  # of a run; None if its log has none


def setting(name: str) -> Value:
    return lambda run: run.header.config.get(name)


def seed_of(run: Run) -> int | None:
    """Returns a run's seed, by its config, or by its closing lines, if only the screen is there."""
    said = run.closing.get("seed", "")
    if "seed" not in run.header.config and re.fullmatch(r"\d{1,9}", said):
        return int(said)
    return run.header.config.get("seed")


# A loss per token depends on these.
OF_LOSS = {name: setting(name) for name in ("vocab_size", "val_slices", "val_slice_tokens", "val_tokens")}
# What should be equal between groups, or else their difference says nothing of the change that was made.
# After the data's fingerprint a log may say how batches are packed, which is a setting like others.
ALIKE: dict[str, Value] = {
    "hardware": lambda r: r.header.hardware,
    "torch": lambda r: r.header.torch,
    "Python or operating system": lambda r: r.header.python,
    "data": lambda r: r.header.data and r.header.data.split()[0],
    "targets": lambda r: r.target,
    "profiling": lambda r: r.header.profiled,
    # Logs of earlier scripts have no such setting.
    "MLPs' dtype, which AMX changes": lambda r: r.header.config.get("bf16_mlp") and r.header.amx,
    **OF_LOSS,
}
WITHIN: dict[str, Value] = ALIKE | {  # what should be equal in a group, too
    "steps": lambda r: r.final_step,
    "tracks": setting("track"),
    # Public logs do not name their script.
    "scripts": lambda r: r.header.script or r.header.source,
}
# Settings that may differ in a group, and those whose differences WITHIN names. A text may be in any folder.
NOT_COMPARED = {"seed", "name", "samples", "data", "target", "track", *OF_LOSS}


@dataclass
class Group:
    """Holds runs that are compared as one sample, and warnings about them."""

    label: str
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # warnings with which there is no record
    target: float | None = None  # None: no log names one

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if run.counted]

    @property
    def lacks_runs(self) -> str:
        """Says that no run counts, and why; "" if one does."""
        if self.counted:
            return ""
        reasons = dict.fromkeys(run.left_out for run in self.runs)
        return f"no run of {self.label} counts ({'; '.join(reasons) or 'none could be read'})"

    @property
    def losses(self) -> list[float]:
        return [run.val_loss for run in self.counted]

    @property
    def times(self) -> list[float]:
        """Returns the training times in s, without those that are not logged."""
        times = [run.train_time_s for run in self.counted]
        return [time for time in times if time is not None]

    @property
    def loss(self) -> "Summary":
        return mean_and_sd(self.losses)

    @property
    def time(self) -> "Summary":
        return mean_and_sd(self.times)

    @property
    def warnings(self) -> list[str]:
        return self.notes + self.faults

    def distinct(self, value: Value) -> list:
        """Returns the distinct values of value(run) over the counted runs, sorted, without None."""
        values = set(map(value, self.counted))
        return sorted(values - {None})

    def listed(self, value: Value) -> str:
        return "; ".join(map(str, self.distinct(value))) or "-"


def find_logs(path: str) -> list[list[Path]]:
    """Returns lists of files to try in order: `path` means the first list that has runs."""
    folder = Path(path)
    if not folder.is_dir():
        files = [path] if folder.exists() else sorted(glob.glob(path, recursive=True))
        if not files:
            raise UserError(f"{path}: no such file or folder, and no file matches it")
        return [list(map(Path, files))]
    in_folder = []
    in_subfolders = []
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() not in SUFFIXES or file.name == referee.FILE_NAME:
            continue
        # A FIFO would be waited for. A link to nothing is an error when it is read.
        if file.exists() and not file.is_file():
            continue
        if file.parent == folder:
            in_folder.append(file)
        elif folder / "baseline" not in file.parents:
            in_subfolders.append(file)
    return [in_folder, in_subfolders]


def read_groups(arguments: list[str], target: float | None) -> tuple[list[Group], list[str]]:
    """Returns the groups, in the arguments' order, and a line for each thing that could not be read."""
    groups: dict[str, Group] = {}
    errors: list[str] = []
    for argument in arguments:
        label = argument
        try:
            label, path = split_label(argument, groups)
            read_into(groups.setdefault(label, Group(label)), path, errors)
        except (UserError, OSError) as e:
            errors.append(explain(e))
            groups.setdefault(label, Group(label))
    for group in groups.values():
        drop_repeats(group)
        join_resumed(group)
        group.target = target or min(group.distinct(ALIKE["targets"]), default=None)
        warn(group)
    base, *others = groups.values()
    for group in others:
        warn_of_baseline(group, base)
    return list(groups.values()), errors


def explain(error: UserError | OSError) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def split_label(argument: str, groups: dict[str, Group]) -> tuple[str, str]:
    """Returns label and path of [LABEL=]PATH. Without a label, it is the name of the file or folder."""
    label, equals, path = argument.partition("=")
    has_label = label and equals
    if has_label and not Path(argument).exists() and not glob.glob(argument):  # a name may have a "="
        return printable(label), path
    label = argument
    here = Path(os.path.abspath(argument))
    if here.exists():
        label = here.name if here.is_dir() else here.stem
    label = printable(label)
    if label in groups:
        label = printable(argument)  # two folders of one name are two groups
    return label, argument


def printable(text: str) -> str:
    """Returns a line with escapes for bytes that are no text here, and for control characters."""
    letters = []
    for letter in text:
        if not letter.isprintable():
            letter = letter.encode("unicode_escape").decode()
        letters.append(letter)
    return "".join(letters)


def read_into(group: Group, path: str, errors: list[str]) -> None:
    """Adds the runs of `path` to the group, and what could not be read to `errors`."""
    if not path:
        errors.append("an empty path: give LABEL=PATH")
        return
    runs_before = len(group.runs)
    errors_before = len(errors)
    for files in find_logs(path):
        notes = []
        for file in map(str, files):
            try:
                runs, file_notes = read_log(file, errors)
                group.runs += runs
                if not runs:
                    file_notes = [f"{file}: holds no run"]
                notes += file_notes
            except (UserError, OSError) as e:
                errors.append(explain(e))
        if len(group.runs) > runs_before:
            group.notes += notes
            for other in sorted(Path(path).glob("*")):
                # Such as 3.txt.gz, a packed log.
                is_log = other.name.startswith("seed") or SUFFIXES & set(other.suffixes[:-1])
                if is_log and other not in files and other.is_file() and ".trace." not in other.name:
                    group.notes.append(f"{other}: not read, because no log has this suffix")
            return
    if len(errors) == errors_before:
        errors.append(
            f"{path}: holds no run: no line like 'step:9/9 val_loss:3.28 train_time:9ms step_avg:1ms'"
        )


def drop_repeats(group: Group) -> None:
    """Keeps one of the copies of a run: rather its log than its screen output, which has no header."""
    kept: dict[str, Run] = {}
    for run in sorted(group.runs, key=lambda r: (not r.header.config, not r.header.torch)):
        same = kept.setdefault(run.identity, run)
        if same is not run:
            group.notes.append(f"{run.name}: dropped, the same run as {same.name}")
    group.runs = [run for run in group.runs if kept[run.identity] is run]


def join_resumed(group: Group) -> None:
    """Keeps one of the logs of a run, RUN.txt and RUN.fromSTEP.txt of those that resumed it: the furthest.

    The others may end in a validation too, and would count as more runs. The curves become the whole run's.
    Loss and time are the whole run's already, since a resumed clock continues.
    """
    origins = [run.origin for run in group.runs if run.header.after]
    for origin in dict.fromkeys(origins):
        logs = [run for run in group.runs if run.origin == origin]
        logs.sort(key=lambda r: (r.header.after, r.final_step))
        kept = max(logs, key=lambda r: (r.final_step, r.counted, r.header.after))
        if len(logs) > 1:
            names = ", ".join(run.name for run in logs if run is not kept)
            group.notes.append(f"{kept.name}: stopped and resumed, one run with {names}, and taken for it")
        for what, value in ALIKE.items():
            if len(set(map(value, logs)) - {None}) > 1:
                group.notes.append(f"{kept.name}: its logs differ in {what}")
        after = kept.header.after
        for run in reversed(logs[: logs.index(kept)]):
            # A validation of step `after` itself is taken from the log that resumed.
            kept.curve = [point for point in run.curve if point.step < after] + kept.curve
            kept.training = [point for point in run.training if point.step <= after] + kept.training
            after = run.header.after
        group.runs = [run for run in group.runs if run is kept or run.origin != origin]


def warn(group: Group) -> None:
    """Adds notes on runs that are incomplete, and on what differs within the group."""
    for run in group.runs:
        if not run.counted:
            group.notes.append(f"{run.name}: left out, {run.left_out}")
        elif run.final_step != run.total_steps:
            group.notes.append(f"{run.name}: stopped at {run.reached}, counted")
    epochs = group.distinct(lambda r: r.epochs)
    if epochs not in ([], ["1"]):
        group.faults.append(f"trained in {' or '.join(epochs)} epochs")
    for what, value in WITHIN.items():
        if len(group.distinct(value)) > 1:
            group.faults.append(f"its runs differ in {what} ({group.listed(value)})")
    settings = different_settings(group)
    if settings:
        group.faults.append(f"its runs differ in settings ({', '.join(settings)})")
    # Early scripts did not log their name. Public logs have no config, and are of another project.
    ours = [run.header for run in group.counted if run.header.config and not is_listed(run.path)]
    for what in "hardware", "data", "script", "seed":
        count = [(header.config | vars(header)).get(what) for header in ours].count(None)
        if count:
            group.faults.append(f"{count} of its runs do not name {what}")
    group.faults += group.distinct(unlike_track)
    for seed, count in Counter(map(seed_of, group.counted)).items():
        if seed is not None and count > 1:
            group.faults.append(f"{count} of its runs have seed {seed}, so they are not independent")


def different_settings(group: Group) -> list[str]:
    """Returns the names of settings in which the group's logs differ. A screen has none."""
    configs = [run.header.config for run in group.counted if run.header.config]
    names: set[str] = set()
    for config in configs:
        for name in config.keys() | configs[0].keys():
            if config.get(name) != configs[0].get(name):
                names.add(name)
    return sorted(names - NOT_COMPARED)


def unlike_track(run: Run) -> str | None:
    """Returns why the run is of no track that holds records, None if it is of one, or names none."""
    if run.track is None:
        return None
    if run.track not in tracks.TRACKS:
        return f"it has runs of the track `{run.track}`, which holds no records"
    different = tracks.differences(run.track, run.header.config, is_listed(run.path))
    if not different:
        return None
    return f"not of the track `{run.track}`: {'; '.join(different)}"


def is_listed(path: str | Path) -> bool:
    """Tells whether a path is a record's folder that records/README.md lists, or a log of it.

    A copy elsewhere, with the same names of folders, is not.
    """
    folder = Path(path).resolve()
    if folder.is_file():
        folder = folder.parent
    if folder.name == "baseline":
        folder = folder.parent
    return folder in listed_runs()


def listed_runs() -> dict[Path, list[int]]:
    """Returns the folders in the tables of records/README.md, and how many runs each has there.

    The second number is of its baseline, which older rows do not have.
    """
    listed = {}
    page = read_page(HERE / "README.md")
    for folder, runs in re.findall(r"\]\(([^)]+)\) \| (\d+(?: \+ \d+)?) \|", page):
        listed[HERE / folder] = list(map(int, runs.split(" + ")))
    return listed


def read_page(path: Path) -> str:
    """Returns the text of a page. Raises UserError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not in UTF-8: save it in UTF-8") from None


def warn_of_baseline(group: Group, base: Group) -> None:
    """Adds notes on what differs between the group and its baseline, or should."""
    same = shared(group, base)
    if same:
        group.faults.append(f"{len(same)} of its runs are {possessive(base.label)}, too")
    for name in differences(group, base):
        group.faults.append(f"it differs from {base.label} in {name}")
    steps = group.listed(WITHIN["steps"])
    base_steps = base.listed(WITHIN["steps"])
    if group.counted and base.counted and steps != base_steps:
        group.notes.append(
            f"it has {steps} steps and {base.label} {base_steps}: "
            "only the p (mean < target) of its own runs shows its loss"
        )


def shared(group: Group, base: Group) -> set[str]:
    """Returns the identities of the runs that count in both groups."""
    return {run.identity for run in group.counted} & {run.identity for run in base.counted}


def differences(group: Group, base: Group) -> list[str]:
    """Returns which values of ALIKE both groups have, and not the same."""
    names = []
    for name, value in ALIKE.items():
        here = group.distinct(value)
        there = base.distinct(value)
        if here and there and here != there:
            names.append(name)
    return names


# ============================================================================================================
# Statistics. What is not defined is None: a mean of nothing, a spread of one value, a test without spread.
# ============================================================================================================


class Summary(NamedTuple):
    """Holds mean and sample standard deviation of n values: sd^2 = sum((value - mean)^2) / (n - 1)."""

    mean: float | None
    sd: float | None


class Difference(NamedTuple):
    """Holds the difference of two means, and a t-test of it."""

    delta: float | None
    t: float | None
    df: float | None  # degrees of freedom
    p: float | None  # two-sided


def mean_and_sd(values: Sequence[float]) -> Summary:
    import numpy as np

    if not values:
        return Summary(None, None)
    mean = finite(np.mean(values))
    if mean is None or len(values) == 1:
        return Summary(mean, None)
    return Summary(mean, finite(np.std(values, ddof=1)))


def varies(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) < max(values)


def p_below(values: list[float], target: float | None) -> float | None:
    """Returns the one-sided p of the one-sample t-test whose alternative is a mean below the target, if any.

    t = (mean - target) / (sd / sqrt(n)), and p = P(T <= t) for Student's T with n - 1 degrees of freedom.
    """
    if target is None or not varies(values):
        return None
    from scipy.stats import ttest_1samp

    return finite(ttest_1samp(values, target, alternative="less").pvalue)


def difference(values: list[float], base: list[float], in_pairs: bool = False) -> Difference:
    """Returns mean(values) - mean(base), and a t-test of it.

    Welch's t-test allows unequal variances. With v = sd^2 / n of each sample, 1 and 2:
        t  = (mean1 - mean2) / sqrt(v1 + v2)
        df = (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1))
        p  = P(|T| >= |t|) for Student's T with df degrees of freedom
    In pairs: with d = value - base of each pair, t = mean(d) / (sd(d) / sqrt(n)), and df = n - 1.
    """
    mean = mean_and_sd(values).mean
    base_mean = mean_and_sd(base).mean
    delta = None if mean is None or base_mean is None else mean - base_mean
    from scipy.stats import ttest_ind, ttest_rel

    # Rounded, because equal differences of decimals differ in their last bits.
    if in_pairs and varies([round(value - other, 9) for value, other in zip(values, base)]):
        test = ttest_rel(values, base)
    elif not in_pairs and varies(values) and varies(base):
        test = ttest_ind(values, base, equal_var=False)
    else:
        return Difference(delta, None, None, None)
    return Difference(delta, finite(test.statistic), finite(test.df), finite(test.pvalue))


def comparable_losses(group: Group, base: Group) -> list[float]:
    """Returns the group's losses, [] if they are of other tokens than the base's."""
    if OF_LOSS.keys() & differences(group, base):
        return []
    return group.losses


def unpaired(group: Group, base: Group) -> dict[str, Difference]:
    return {
        "time": difference(group.times, base.times),
        "loss": difference(comparable_losses(group, base), base.losses),
    }


def side_by_side(group: Group, base: Group) -> bool:
    """Tells whether the groups are a folder and its `baseline/`, whose runs alternate."""
    folders = {Path(run.path).resolve().parent / "baseline" for run in group.runs}
    return folders == {Path(run.path).resolve().parent for run in base.runs}


def paired(group: Group, base: Group) -> dict[str, Difference]:
    """Returns the differences in pairs, if both groups have the same seeds, each once; else an empty dict.

    Times only of a folder and its `baseline/`, whose runs alternate: both of a pair met the same machine.
    """
    seeds = group.distinct(seed_of)
    if seeds != base.distinct(seed_of) or not 1 < len(seeds) == len(group.counted) == len(base.counted):
        return {}
    group = replace(group, runs=sorted(group.counted, key=seed_of))
    base = replace(base, runs=sorted(base.counted, key=seed_of))
    tests = {}
    if side_by_side(group, base):
        tests["time"] = difference(group.times, base.times, in_pairs=True)
    tests["loss"] = difference(comparable_losses(group, base), base.losses, in_pairs=True)
    return tests


def finite(x) -> float | None:
    return float(x) if x is not None and math.isfinite(x) else None


# ============================================================================================================
# Reports.
# ============================================================================================================


class Verdict(NamedTuple):
    """Holds whether something is shown, and a clause that says so."""

    shown: bool
    text: str
    claim: str = "record"  # what is shown; "": nothing that could be said


def show(x: float | None, spec: str = ".4f") -> str:
    return "-" if x is None else format(x, spec)


def show_p(p: float | None) -> str:
    if p is None:
        return "-"
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def possessive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def show_all(values: list, spec: str) -> str:
    return " ".join(format(v, spec) for v in values) or "-"


def mean_verdict(what: str, mean: float | None, limit: float | None, name: str, p: float | None) -> Verdict:
    """Tells whether the mean is shown to be below the limit, which is called `name`."""
    if mean is None or limit is None:
        return Verdict(False, f"there is no mean {what} to compare with {name}")
    if mean >= limit:
        where = "above" if mean > limit else "not below"
        return Verdict(False, f"the mean {what} is {where} {name}")
    level = "one run, or equal ones, give no p" if p is None else f"p {show_p(p)}"
    if p is None or p >= ALPHA:
        return Verdict(False, f"the mean {what} is not shown to be below {name} ({level}, needs < {ALPHA:g})")
    return Verdict(True, f"the mean {what} is below {name} ({level} < {ALPHA:g})")


def target_verdict(group: Group, target: float | None) -> Verdict:
    """Tells whether the group's mean loss is shown to be below the target."""
    if target is None:
        return Verdict(False, "no log names a target: give it by --target (3.28 in the public speedrun)")
    p = p_below(group.losses, target)
    return mean_verdict("loss", group.loss.mean, target, f"the target {target:g}", p)


def record_verdict(group: Group, base: Group) -> Verdict:
    """Tells whether the group is a record over the baseline, and why.

    Public logs name no track, so what they show is no record here. Runs of `other` claim nothing.
    """
    lacks_runs = group.lacks_runs or base.lacks_runs
    if lacks_runs:
        return Verdict(False, lacks_runs)
    reasons_against = list(group.faults)
    for fault in base.faults:
        reasons_against.append(f"of {base.label}: {fault}")
    named = set(map(WITHIN["tracks"], group.counted + base.counted))
    claim = "record"
    if named == {None}:
        claim = "faster to the target (the logs name no track)"
    elif named == {"other"}:
        claim = ""
    elif None in named:
        reasons_against.append("not every log names its track")
    if claim == "record" and not side_by_side(group, base):
        reasons_against.append("they did not run side by side, as a folder and its baseline/ do")

    target = min(group.distinct(ALIKE["targets"]), default=group.target)  # the track's, not --target's
    time_p = unpaired(group, base)["time"].p
    reasons_for = []
    for verdict in (
        target_verdict(group, target),
        mean_verdict("time", group.time.mean, base.time.mean, possessive(base.label), time_p),
    ):
        if verdict.shown:
            reasons_for.append(verdict.text)
        else:
            reasons_against.append(verdict.text)
    if claim == "record" and not reasons_against:
        reasons_against += ask_referee(group.counted[0])
    because = filter(None, ["; ".join(reasons_against), " and ".join(reasons_for)])
    return Verdict(not reasons_against, ", although ".join(because), claim)


def ask_referee(run: Run) -> list[str]:
    """Returns [] if the referee.txt beside the log says ok to its script; else what is missing.

    A record that is listed already was one by the rules of its time. Presets for GPUs have no referee.
    """
    preset = run.header.config.get("preset", "cpu")
    if is_listed(run.path) or preset not in referee.PRESETS:
        return []
    path = Path(run.path).parent / referee.FILE_NAME
    name, _, digits = run.header.script.partition(" (sha256 ")
    if path.exists():
        verdict = referee.read_verdict(path)
        if digits and verdict.script_hash.startswith(digits[:-1]) and verdict.preset == preset:
            return [] if verdict.passed else [f"{path} does not say ok to each rule"]
    command = shlex.join(["python", "records/referee.py", name, "--preset", preset, "--log", run.path])
    return [f"there is no {path} of this script: `{command}` makes it"]


def as_json(groups: list[Group]) -> dict:
    """Returns all numbers of the groups and their comparisons."""
    base, *others = groups
    return {
        "groups": list(map(group_as_json, groups)),
        "comparisons": [comparison_as_json(group, base) for group in others],
    }


def group_as_json(group: Group) -> dict:
    return {
        "label": group.label,
        "n": len(group.counted),
        "steps": group.distinct(WITHIN["steps"]),
        "loss_mean": group.loss.mean,
        "loss_std": group.loss.sd,
        "time_mean_s": group.time.mean,
        "time_std_s": group.time.sd,
        "p_target": p_below(group.losses, group.target),
        "meets_target": target_verdict(group, group.target).shown,
        "runs": list(map(run_as_json, group.runs)),
    }


def run_as_json(run: Run) -> dict:
    return {
        "path": run.path,
        "run_index": run.index,
        "final_step": run.final_step,
        "total_steps": run.total_steps,
        "val_loss": finite(run.val_loss),
        "train_time_s": run.train_time_s,
        "peak_mem_mib": run.peak_mem_mib,
        "torch": run.header.torch,
        "complete": run.complete,
    }


def comparison_as_json(group: Group, base: Group) -> dict:
    time, loss = unpaired(group, base).values()
    verdict = record_verdict(group, base)
    return {
        "group": group.label,
        "baseline": base.label,
        "time_delta_s": time.delta,
        "time_t": time.t,
        "time_df": time.df,
        "time_p": time.p,
        "loss_delta": loss.delta,
        "loss_t": loss.t,
        "loss_df": loss.df,
        "loss_p": loss.p,
        "paired": {what: test._asdict() for what, test in paired(group, base).items()},
        "record": verdict.shown and verdict.claim == "record",
        "because": verdict.text,
    }


def table(group: Group) -> list[tuple[str, str]]:
    """Returns (name, value) of each line in a group's table. What no log has is left out."""
    per_byte = mean_and_sd([run.per_byte for run in group.counted if run.per_byte is not None]).mean
    verdict = "-"
    if group.target is not None or not group.distinct(WITHIN["tracks"]):
        verdict = target_verdict(group, group.target).text
    loss = group.loss
    time = group.time
    rows = [
        ("runs (n)", str(len(group.counted))),
        ("steps", group.listed(WITHIN["steps"])),
        ("length", group.listed(setting("length"))),
        ("loss: mean, sd", f"{show(loss.mean)}, {show(loss.sd)}"),
        ("loss per byte", show(per_byte)),
        ("time, s: mean, sd", f"{show(time.mean, '.3f')}, {show(time.sd, '.3f')}"),
        ("peak memory", peak_memory(group)),
        ("hardware", group.listed(ALIKE["hardware"])),
        ("torch", group.listed(ALIKE["torch"])),
        ("script", group.listed(lambda r: r.header.script)),
        ("p (mean < target)", show_p(p_below(group.losses, group.target))),
        ("verdict", verdict),
        ("losses", show_all(group.losses, ".4f")),
        ("times, s", show_all(group.times, ".3f")),
    ]
    return [(name, value) for name, value in rows if value.strip("-, ")]


def peak_memory(group: Group) -> str:
    peaks = group.distinct(lambda r: r.peak_mem_mib)
    if not peaks:
        return "-"
    if len(peaks) == 1:
        return f"{peaks[0]} MiB"
    return f"{peaks[0]} to {peaks[-1]} MiB"


def percentage(delta: float | None, base: Group, digits: int) -> str:
    """Returns a difference of times relative to the base's, "" if it is not defined."""
    mean = base.time.mean
    return f"{100 * delta / mean:+.{digits}f} %" if delta is not None and mean else ""


def text_report(groups: list[Group], anyway: bool) -> str:
    """Returns a table of each group, and of its differences from the first."""
    base, *others = groups
    unlike = [name for group in others for name in differences(group, base) if not anyway]
    lines = []
    if unlike:
        names = " and ".join(dict.fromkeys(unlike))
        lines += [f"warning: not the same {names}, so no percentages; --anyway prints them", ""]
    for group in groups:
        lines.append(group.lacks_runs or group.label)
        if group.counted:
            lines += [f"  {name:18} {value}" for name, value in table(group)]
            lines += [f"  warning: {warning}" for warning in group.warnings]
        lines.append("")
    for group in others:
        if group.counted and base.counted:
            lines += comparison_lines(group, base, with_percentage=not unlike)
            lines.append("")
    return "\n".join(map(printable, lines)).rstrip()


def comparison_lines(group: Group, base: Group, with_percentage: bool) -> list[str]:
    """Returns the lines of a group's differences from the baseline."""
    lines = [f"{group.label} against {base.label}"]
    row = "  {:6}  {:20}  {:9}  {:6}  {}".format
    pairs = f"in {len(group.counted)} pairs of seeds"
    for heading, method, tests in (
        ("difference", "Welch t", unpaired(group, base)),
        (pairs, "paired t", paired(group, base)),
    ):
        if tests:
            lines.append(row("", heading, method, "df", "p (two-sided)"))
        for what, test in tests.items():
            delta = show(test.delta, "+.4f")
            if what == "time" and test.delta is not None:
                percent = percentage(test.delta, base, 2)
                delta = f"{test.delta:+.3f} s"
                if with_percentage and percent:
                    delta += f" ({percent})"
            lines.append(row(what, delta, show(test.t, ".2f"), show(test.df, ".1f"), show_p(test.p)))
    if not comparable_losses(group, base):
        lines.append("  the vocabulary or the validation differs, so losses cannot be compared")
    verdict = record_verdict(group, base)
    if verdict.claim:
        lines.append(f"{verdict.claim}: {'yes' if verdict.shown else 'no'}, because {verdict.text}")
    return lines


def begin_readme(folder: Path, paths: list[str], table: str) -> str:
    """Begins a record's README.md with the command of its runs and their table. Returns what was done."""
    path = folder / "README.md"
    if path.exists():
        return f"{path} was there, and is left as it is"
    name = folder.resolve().name
    parts = [
        f"# {name.partition('_')[2] or name}",
        "![Losses over steps and over training time](curves.png)",
        "(What was changed, against which record, and why.)",
    ]
    command = os.environ.get("RUN_COMMAND")
    if command:
        parts.append(textwrap.indent(command, "    "))
    parts += [f"What `python records/compare.py {shlex.join(paths)}` prints:", textwrap.indent(table, "    ")]
    write_page(path, "\n\n".join(parts) + "\n")
    return f"{path} is begun, with the table below; say in it what was changed, in the title in a few words"


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Returns the table's lines, and an empty one."""
    lines = [markdown_row(head), markdown_row(["---"] * len(head))]
    lines += map(markdown_row, body)
    return [*lines, ""]


def markdown_row(cells: Sequence[str]) -> str:
    # A backslash before the one of an escape would end the cell.
    return "| " + " | ".join(re.sub(r"\\*\|", r"\\|", cell) for cell in cells) + " |"


# What curves are, as the legend says, and how they are drawn.
VALIDATED = "validation; bars: standard deviation"
TRAINED = "training, smoothed"
TRAINED_SAMPLED = "training, over sampled columns: not comparable"
STYLES: dict[str, dict[str, Any]] = {
    VALIDATED: {"linewidth": 2, "marker": "o", "markersize": 4},
    TRAINED: {"linewidth": 0.8},
    TRAINED_SAMPLED: {"linewidth": 0.8, "linestyle": ":"},
}


class MeanPoint(NamedTuple):
    """Holds what the runs of a group have at one step."""

    step: int
    time_s: float  # mean; nan where a run has none
    loss: float  # mean
    sd: float = math.nan  # standard deviation of the loss; nan: not defined, or not drawn


def digest(drawn_by: Sequence[type], *inputs: Any) -> str:
    """Returns a hash of what is drawn, and of the code. (A picture's bytes vary with matplotlib.)"""
    code = list(map(inspect.getsource, drawn_by))
    return hashlib.sha256(repr((code, inputs)).encode()).hexdigest()[:16]


@dataclass
class Curve:
    """Draws the validation or training losses of a group."""

    kind: str  # a key of STYLES
    color: str
    points: list[MeanPoint]  # with finite losses

    @property
    def style(self) -> dict[str, Any]:
        style = dict(STYLES[self.kind])
        if len(self.points) <= FEW:
            style["linestyle"] = "none"
        return style

    def fitted_losses(self) -> list[float]:
        """Returns the losses that the picture must have room for."""
        return [point.loss for point in self.points if point.step >= STEEP * self.points[-1].step]

    def draw(self, ax, over: str) -> bool:
        """Draws the losses over "step", else over training time. Tells whether there are any."""
        x = []
        losses = []
        sds = []
        for point in self.points:
            at = point.step if over == "step" else point.time_s
            if math.isfinite(at):
                x.append(at)
                losses.append(point.loss)
                sds.append(point.sd)
        if not x:
            return False
        bars = sds if self.kind == VALIDATED else None
        ax.errorbar(x, losses, bars, color=self.color, capsize=3, **self.style)
        return True


class Picture(NamedTuple):
    """Draws losses of groups, and constants, over steps and over training time."""

    groups: list[Group]
    lines: list[tuple[str, float]]  # constants to draw: label, loss
    over: tuple[str, ...] = ("step", "training time, s")

    @property
    def mark(self) -> str:
        inputs = []
        for group in self.groups:
            curves = [(run.curve, run.training) for run in group.counted]
            inputs.append((group.label, group.target, curves))
        return digest([Picture, Curve], inputs, self.lines, self.over, STYLES)

    def draw(self, path: str | Path) -> None:
        """Writes a PNG with its mark."""
        fig = new_figure(6 + 2 * len(self.over), 4.6)
        from matplotlib.lines import Line2D

        axes = fig.subplots(1, len(self.over), sharey=True, squeeze=False)[0]
        labels = []
        kinds = {}
        losses = []
        for i, group in enumerate(self.groups):
            color = f"C{i}"
            final = f"{show(group.loss.mean)} after {show(group.time.mean, '.1f')} s"
            label = f"{group.label} (n={len(group.counted)}): {final}"
            labels.append(Line2D([], [], color=color, linewidth=2, label=label))
            for curve in self.curves(group, color):
                losses += curve.fitted_losses()
                for ax, over in zip(axes, self.over):
                    if curve.draw(ax, over):
                        kinds[curve.kind] = Line2D([], [], color="0.4", **curve.style)
        self.draw_levels(axes)
        self.scale_axes(axes, losses)
        fig.legend(handles=labels, loc="outside upper left")
        names = list(kinds)
        if all(len(group.counted) <= 1 for group in self.groups):
            names = [kind.partition(";")[0] for kind in kinds]  # there are no bars
        fig.legend(kinds.values(), names, loc="outside upper right")
        save_figure(fig, path, metadata={"Source": self.mark})

    def curves(self, group: Group, color: str) -> list[Curve]:
        """Returns the group's validation and training losses, where they are finite."""
        training = TRAINED
        for run in group.counted:
            # `candidates` is the name until 1cdcaab.
            if re.search(r"'(candidates|sampled_columns)': \[[1-9]", str(run.header.config.get("stages"))):
                training = TRAINED_SAMPLED
        curves = []
        for kind, points in ((VALIDATED, mean_curve(group)), (training, training_curve(group))):
            curves.append(Curve(kind, color, [point for point in points if math.isfinite(point.loss)]))
        return curves

    def levels(self) -> list[tuple[str, float]]:
        """Returns label and loss of the dashed lines."""
        targets = sorted({group.target for group in self.groups} - {None})
        return [("target", target) for target in targets] + self.lines

    def draw_levels(self, axes) -> None:
        for name, level in self.levels():
            for ax in axes:
                ax.axhline(level, color="0.4", linestyle="--", linewidth=1)
            right_of_axes = axes[-1].get_yaxis_transform()  # x in widths of the axes, y a loss
            axes[-1].text(1.01, level, f"{name} {level:g}", transform=right_of_axes, va="center")

    def scale_axes(self, axes, losses: list[float]) -> None:
        """Fits the loss axis to these losses and the levels."""
        from matplotlib.ticker import MaxNLocator, NullLocator

        for ax, over in zip(axes, self.over):
            ax.set(xlabel=over, xlim=(0, None))
            clear(ax)
        shown = losses + [level for _, level in self.levels()]
        axes[0].set(yscale="log")
        if shown:
            axes[0].set(ylim=(0.98 * min(shown), 1.02 * max(shown)))
        axes[0].set_ylabel("loss, nats per token (logarithmic)")
        ticks = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
        axes[0].yaxis.set(major_locator=ticks, major_formatter="{x:g}", minor_locator=NullLocator())


def clear(ax) -> None:
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def columns(points: list[Point]) -> Any:
    """Returns arrays of steps, losses and times. Before a restart of the clock times are nan."""
    import numpy as np

    steps, losses, times = np.array(points, float).T
    least_from_here = np.fmin.accumulate(times[::-1])[::-1]
    times[times > least_from_here] = math.nan
    return steps, losses, times


def mean_curve(group: Group) -> list[MeanPoint]:
    """Returns the mean validation losses at the steps that every run validated.

    A mean over some of the runs would jump where one drops out.
    """
    import numpy as np

    if not group.counted:
        return []
    runs = []
    for run in group.counted:
        points = [Point(int(step), loss, time) for step, loss, time in zip(*columns(run.curve))]
        runs.append({point.step: point for point in points})
    curve = []
    for step in sorted(set.intersection(*map(set, runs))):
        points = [at_step[step] for at_step in runs]
        losses = [point.loss for point in points]
        times = [point.time_s for point in points]
        sd = mean_and_sd(losses).sd or math.nan  # no bar for equal losses
        curve.append(MeanPoint(step, float(np.mean(times)), float(np.mean(losses)), sd))
    return curve


def training_curve(group: Group) -> list[MeanPoint]:
    """Returns the mean training losses, smoothed, at each step that all runs' logs cover.

    Smoothed: the mean of the covered steps from step - w to step + w, where 2 w is SMOOTHED of the last step.
    """
    import numpy as np

    logged = []
    for run in group.counted:
        points = [point for point in run.training if math.isfinite(point.loss)]
        if not points:
            return []
        logged.append(points)
    if not logged:
        return []
    # On a GPU some losses are not logged, those that arrive together with a later one: they are interpolated.
    first = max(points[0].step for points in logged)
    last = min(points[-1].step for points in logged)
    steps = np.arange(first, last + 1)
    times = np.zeros(len(steps))
    losses = np.zeros(len(steps))
    for points in logged:
        at, loss, time = columns(points)
        times += np.interp(steps, at, time) / len(logged)
        losses += np.interp(steps, at, loss) / len(logged)
    w = round(SMOOTHED * last / 2)
    curve = []
    for i, step in enumerate(steps.tolist()):
        smoothed = losses[max(i - w, 0) : i + w + 1].mean()
        curve.append(MeanPoint(step, float(times[i]), float(smoothed)))
    return curve


def diff_report(path_a: str, path_b: str) -> str:
    """Reports what changed in config and script from log A to log B."""
    config_a, source_a = config_and_source(path_a)
    config_b, source_b = config_and_source(path_b)
    lines = ["config", *changed_lines(config_a, config_b, path_a, path_b, context=0)]
    lines += ["script", *changed_lines(source_a, source_b, path_a, path_b, context=3)]
    return "\n".join(lines)


def config_and_source(path: str) -> tuple[list[str], list[str]]:
    """Returns the lines of a log's config, flattened and sorted, and of its source."""
    text = b"\n" + Path(path).read_bytes() + b"\n"
    source_end = SOURCE_END.search(text)
    if source_end is None:
        raise UserError(f"{path}: holds no source: no line of = after it")
    source = decode(text[1 : source_end.start() + 1]).splitlines()
    header = read_header(decode(text[source_end.start() :]), path, Header())
    config = flatten(header.config | {"script": header.script})
    return sorted(config), source


def changed_lines(a: list[str], b: list[str], path_a: str, path_b: str, context: int) -> list[str]:
    if a == b:
        return ["  no difference"]
    return list(difflib.unified_diff(a, b, printable(path_a), printable(path_b), lineterm="", n=context))


def flatten(config, name: str = "") -> list[str]:
    """Flattens nested JSON to ["layers.3.window: long", ...], so that a changed cell is one line."""
    if isinstance(config, dict) and config:
        items = list(config.items())
    elif isinstance(config, list) and config:
        items = []
        for i, row in enumerate(config):
            name_of_row = i
            if isinstance(row, dict):
                name_of_row = row.get("name", i)  # as --set has them
            items.append((name_of_row, row))
    else:
        return [f"{name}: {json.dumps(config)}"]
    lines = []
    for key, value in items:
        lines += flatten(value, f"{name}.{key}".lstrip("."))
    return lines


# ============================================================================================================
# What --update makes: what is between the lines <!-- NAME --> and <!-- /NAME --> of README.md and
# records/README.md, and pictures, which keep a mark of what was drawn and how, and are drawn again only if
# that changes.
# ============================================================================================================

HERE = Path(__file__).resolve().parent
DATED = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*"
RECORD_COLUMNS = ["date", "record", "runs + baseline's", "loss, mean", "p (mean < target)", "time, mean"]
RECORD_COLUMNS += ["against its baseline", "machine", "commit"]
LEADERBOARD_COLUMNS = ["date", "record", "what", "time, against its baseline"]


@dataclass
class Record:
    """Holds the runs of a record, after those that it was compared with, if there are any."""

    folder: Path
    groups: list[Group]

    @property
    def group(self) -> Group:
        return self.groups[-1]

    @property
    def counts(self) -> list[int]:
        """Returns how many of its own runs count, and of its baseline's, if there is one."""
        return [len(group.counted) for group in reversed(self.groups)]

    @property
    def track(self) -> str:
        return self.folder.parent.name


def read_records(errors: list[str]) -> tuple[list[Record], list[str]]:
    """Returns the records, and why other folders hold none. Adds what could not be read to `errors`."""
    listed = listed_runs()
    folders = set(listed)  # also those that are missing, which is an error
    for track in tracks.TRACKS:
        folders.update(filter(Path.is_dir, HERE.glob(f"{track}/{DATED}")))
    records = []
    refused = []
    # Listed ones first, so that of a record and its copy the copy is refused, whatever its date is.
    for folder in sorted(folders, key=lambda folder: (folder not in listed, folder)):
        groups, unreadable = read_groups(with_baseline(folder), None)
        record = Record(folder, groups)
        reason = ""
        if folder in listed:
            errors += unreadable or unlike_row(record, listed[folder])
        else:
            reason = "; ".join(unreadable) or refuse(record, records)
        if reason:
            refused.append(f"{folder}: not listed, because {reason}")
        else:
            records.append(record)
    records.sort(key=lambda record: record.folder)
    return records, refused


def unlike_row(record: Record, listed: list[int]) -> list[str]:
    """Returns a line for each number of runs that is not the row's: of its own, and of its baseline's."""
    lines = []
    folder = record.folder
    for count, before in zip([*record.counts, 0], listed):  # 0, if the baseline is missing
        if count < before:
            lines.append(f"{folder}: {count} of its {before} listed runs count: restore the other logs")
        elif count > before:
            lines.append(f"{folder}: {count} runs count, and {before} are listed: move the others away")
        folder /= "baseline"
    return lines


def with_baseline(folder: Path) -> list[str]:
    """Returns a record's paths to compare: its `baseline/`, if there is one, and itself."""
    return [*map(str, folder.glob("baseline")), str(folder)]


def refuse(record: Record, others: list[Record]) -> str:
    """Returns why a new folder holds no record beside the others, "" if it holds one."""
    for other in others:
        for mine in record.groups:
            if any(shared(mine, group) for group in other.groups):
                return f"runs of it are in {other.folder}, too: make new runs, or remove the copies"
    if record.group.distinct(WITHIN["tracks"]) not in ([], [record.track]):
        return f"its runs are not of the track `{record.track}`"
    if len(record.groups) == 1:
        return record.group.lacks_runs or "it has no baseline/, which it must be faster than"
    verdict = record_verdict(record.group, record.groups[0])
    if verdict.shown:
        return ""
    return verdict.text


def remarks(records: list[Record], listed: dict[Path, list[int]]) -> list[str]:
    """Says of new records which are slower than the one before, if that ran on such a machine."""
    lines = []
    latest: dict[str, Record] = {}  # by track
    for record in records:
        before = latest.get(record.track)
        latest[record.track] = record
        if before is None or record.folder in listed or differences(record.group, before.group):
            continue
        if record.group.time.mean > before.group.time.mean:
            lines.append(f"{record.folder} is slower than {before.folder.name}: was that its baseline?")
    return lines


def record_tables(records: list[Record]) -> str:
    """Returns a Markdown table of each track's records."""
    lines = []
    for track in tracks.TRACKS:
        lines += [f"### `{track}`", ""]
        rows = [record_row(record) for record in records if record.track == track]
        if rows:
            lines += markdown_table(RECORD_COLUMNS, rows)
        else:
            lines += ["None yet.", ""]
    return "\n".join(lines)


def leaderboard(records: list[Record]) -> str:
    """Returns README.md's table of the track `cpu`. What a record is, is the title of its README.md."""
    rows = []
    for record in records:
        if record.track == "cpu":
            readme = record.folder / "README.md"
            line, _, _ = read_page(readme).partition("\n")
            title = line.lstrip("\ufeff# \t")  # some editors begin with a byte order mark
            if not title:
                raise UserError(f"{readme}: its first line has no title: write '# ' and a few words")
            day, name = record.folder.name.split("_", 1)
            link = f"[{name}](records/cpu/{record.folder.name})"
            time, _, _ = time_change(record).partition(",")
            rows.append([day, link, title, time])
    return "\n".join(markdown_table(LEADERBOARD_COLUMNS, rows))


def record_row(record: Record) -> list[str]:
    """Returns the cells of a record's row."""
    day, name = record.folder.name.split("_", 1)
    group = record.group
    return [
        day,
        f"[{name}]({record.track}/{record.folder.name})",
        " + ".join(map(str, record.counts)),
        show(group.loss.mean),
        show_p(p_below(group.losses, group.target)),
        show(group.time.mean, ".1f") + " s",
        time_change(record),
        re.sub(r" \(.*?\)", "", group.listed(ALIKE["hardware"])),
        group.listed(lambda r: r.header.commit),
    ]


def time_change(record: Record) -> str:
    """Returns by how many percent the record is faster than its baseline, if they can be compared."""
    base = record.groups[0]
    if base is record.group or differences(record.group, base):
        return "-"
    time = difference(record.group.times, base.times)
    percent = percentage(time.delta, base, 1)
    return f"{percent}, p {show_p(time.p)}" if percent else "-"


def with_part(path: Path, name: str, part: str) -> str:
    """Returns the page's text with this part between the lines <!-- NAME --> and <!-- /NAME -->."""
    pieces = re.split(f"(<!-- /?{name} -->\n)", read_page(path))
    if len(pieces) != 5:
        raise UserError(f"{path}: needs a line <!-- {name} --> and a line <!-- /{name} -->, for its table")
    pieces[2] = part
    return "".join(pieces)


def pages(records: list[Record]) -> dict[Path, str]:
    """Returns the new texts of the pages that have tables of the records."""
    readme = HERE / "README.md"
    front = HERE.parent / "README.md"
    return {
        readme: with_part(readme, "records", record_tables(records)),
        front: with_part(front, "leaderboard", leaderboard(records)),
    }


def write_page(path: Path, text: str) -> None:
    """Writes a page, which appears when it is complete: if the disk is full, the old one stays."""
    with replacing(path, b"") as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


def draw_if_changed(picture: Any, path: Path) -> None:
    if not path.exists() or picture.mark.encode() not in path.read_bytes():
        picture.draw(path)


def update() -> list[str]:
    """Writes tables and pictures. Returns what is no record.

    If something could not be read, or a listed record has lost runs, writes nothing, and returns that.
    """
    errors: list[str] = []
    listed = listed_runs()
    records, refused = read_records(errors)
    if errors:
        return errors
    for line in remarks(records, listed):
        print(printable(f"compare.py: warning: {line}"), file=sys.stderr)
    for path, text in pages(records).items():
        write_page(path, text)
    for record in records:
        draw_if_changed(Picture(record.groups, []), record.folder / "curves.png")
    return refused


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("compare.py", __doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="[LABEL=]PATH", help="log, folder or pattern; the first is the baseline")
    add("--target", type=number(float, 1e-9), help="loss to reach (default: the logs')")
    add("--json", action="store_true", help="print one JSON object; warnings go to stderr")
    add("--anyway", action="store_true", help="print percentages though machines, data or validation differ")
    add("--curves", type=png, metavar="FILE.png", help="draw losses over steps and over training time")
    add("--diff", nargs=2, metavar=("A", "B"), help="what changed in script and config from log A to log B")
    add("--begin", metavar="FOLDER", help="print a folder's table; after a race also begin its README.md")
    add("--update", action="store_true", help="write the tables and pictures of the records and README.md")
    args = parser.parse_intermixed_args(argv)
    if sum(map(bool, (args.paths, args.diff, args.begin, args.update))) != 1:
        parser.error("give logs to compare, or one of --diff, --begin and --update")
    ignored = []
    if args.diff or args.update:
        ignored = ["target", "json", "anyway", "curves"]
    elif args.begin:
        ignored = ["json"]
    elif args.json:
        ignored = ["anyway"]
    for option in ignored:
        if getattr(args, option):
            parser.error(f"--{option} has no effect with the other options")

    errors: list[str] = []
    try:
        if args.diff:
            print(diff_report(*args.diff))
        elif args.update:
            errors = update()
        else:
            errors = report(args)
    except (UserError, OSError) as e:
        errors = [explain(e)]
    except MemoryError:
        errors = ["there is not enough memory for these files"]
    except ModuleNotFoundError as e:
        errors = [missing_package(e)]
    for error in errors:
        print(printable(f"compare.py: {error}"), file=sys.stderr)
    return 2 if errors else 0


def report(args: argparse.Namespace) -> list[str]:
    """Prints what the logs say; begins a record, draws curves. Returns what could not be read."""
    paths = args.paths
    if args.begin:
        folder = Path(os.path.relpath(args.begin))
        paths = with_baseline(folder)
    groups, errors = read_groups(paths, args.target)
    if args.json:
        print(json.dumps(as_json(groups), indent=1, allow_nan=False))
        for group in groups:
            for warning in group.warnings:
                print(printable(f"compare.py: warning: {group.label}: {warning}"), file=sys.stderr)
    else:
        text = text_report(groups, args.anyway)
        if args.begin and len(groups) > 1 and not errors:
            print(printable(begin_readme(folder, paths, text)) + "\n")
            if "\nrecord: no" in text:
                text += printable(
                    f". Remove {folder}, or move it out of records/, before another race of this name"
                )
        print(text)
    if args.curves:
        Picture(groups, []).draw(args.curves)
    return errors


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `compare.py ... | head` ends quietly
    sys.exit(main())
