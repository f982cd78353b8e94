#!/usr/bin/env python3
"""Compares groups of speedrun logs: do they meet the target loss, how do they differ from the first group?

    python records/compare.py [LABEL=]PATH... [--target 3.28] [--json] [--anyway] [--curves FILE.png]
    python records/compare.py --diff A B
    python records/compare.py --begin FOLDER
    python records/compare.py --update

A PATH is a log, a quoted pattern of logs, or a folder. A folder means the logs directly in it or, if they
hold no run, those in its sub-folders; so a record's `baseline/` is a separate group. Each PATH is a group,
PATHs of one LABEL are one group, and the first is the baseline. Reads the logs of train_gpt.py, what its runs
print on the screen, also through a launcher that puts [default0]: before lines, and every format of the
public speedrun.

A run counts if the last step it logged has a validation; its loss and time are that validation's. A log of
train_gpt.py must also end with `complete: yes`. One that says `epochs: 2` or more does not count: the run
had used up its training data, and read some again. A run that was stopped and resumed has several logs, and
counts once, as the one that went furthest. A mean loss is shown to be below the target if a one-sided
one-sample t-test rejects, at p < 0.01, that it is not. Groups are compared by Welch's t-test, two-sided. If
their machines, data or validation differ, the first line warns of it and no percentage is printed, unless
--anyway is given. The exit code is 2 if something could not be read; all else is still reported.

A group is a record over the baseline if its mean loss is below its track's target and its mean time below
the baseline's, both with p < 0.01. All logs must name their track, which is not `other`. Within each group
the steps, scripts, machines, data and validation must be equal, and the seeds different. Machines, data and
validation must be equal in both groups.

--curves draws losses over steps and over training time. With dots: validation loss, mean and standard
deviation of a group's runs, at the steps that all validated; up to four dots are not joined by lines. A
default run of the `cpu` preset validates only before its first step and at its end: make the runs of a
picture with --set val_every=20. Thin, if logged: training loss, mean of the runs, smoothed by a centred
window of 5 % of the steps, shorter at both ends. train_gpt.py logs the first process's, which is higher in
stages that also predict later tokens. It is dotted if a stage has a sampled softmax, whose loss is lower
because it leaves out columns. Dashed: the target. The loss axis is logarithmic, and fits the losses after a
group's first 10 % of steps.

--begin prints the table of a new record, beside that of its `baseline/` if there is one, and begins its
README.md if there is none. --update writes the tables of records/README.md, and draws the pictures whose logs
or drawing code have changed: a record's curves.png, README.md's in bench/curves, records/history.png.

    Logs                  read_log finds the runs in a file
    Groups                find and read logs, drop repeats, warn
    Statistics            scipy's tests
    Reports               text, JSON, curves, differences of two logs
    What --update makes   tables and pictures: of our records, from logs, of the public ones, from history.csv
"""

import argparse
import csv
import difflib
import glob
import hashlib
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = {".txt", ".log", ".stdout", ".out"}  # of logs in a folder; a file named directly may have any
DEFAULT_TARGET = 3.28  # nats per token: the public speedrun's, if no log's config names another
ALPHA = 0.01  # the public speedrun's level for "the mean loss is below the target"
SMOOTHED = 0.05  # of the steps: the window that training losses are averaged over
FEW = 4  # validations, which make no curve: these are not joined by lines
STEEP = 0.1  # of the steps: the first, whose losses may lie above the picture


class UserError(Exception):
    """Reports what the user can fix, in one line."""


# ============================================================================================================
# Logs. A log begins with the script's source, whose f-strings look like log lines. So every pattern is
# anchored at the start of a line and needs numbers. Bytes are searched, without splitting into lines: most of
# a log is source and training lines.
# ============================================================================================================

TERMINAL_CODES = re.compile(rb"\x1b(?:\[[ -?]*[@-~]|\][^\x07\n]*\x07|[ -/]*[0-~])")
# Where a line begins on the screen, also within a line of the file: after a carriage return, as progress bars
# print, after a launcher's [default0]: or [rank0]:, and with the result of a step.
LINE_BEGINS = re.compile(
    rb"\r|\[[\w,]*\d\](?:<\w+>)?: ?|(?<!\n)(?=step:\d+/\d+ (?:val_loss|train_loss|train_time):)"
)


def clean(raw: bytes) -> bytes:
    """Returns a file's lines without terminal codes, a line break before each. Added breaks are CR LF."""
    text = TERMINAL_CODES.sub(b"", raw.replace(b"\r\n", b"\n"))
    return b"\n" + LINE_BEGINS.sub(b"\r\n", text) + b"\n"


def pattern(text: str) -> re.Pattern[bytes]:
    number = r"[-+]?(?:\d{1,20}\.?\d{0,20}(?:e[-+]?\d{1,4})?|nan|inf)"
    return re.compile((r"\n" + text.replace("NUM", number).replace("INT", r"\d{1,15}")).encode())


STEP = pattern(r"step:(INT)/(INT) ")
VALIDATION = pattern(
    r"step:(INT)/INT val_loss:(NUM)(?: val_\w+:NUM)* train_time:(NUM)(ms|s) step_avg:NUMms"
    r"(?: \w+:\S+)*[ \t\r]*(?=\n)"
)
# The loss is the line's own step's in public logs, in ours the last that had arrived, with its step.
TRAINING = pattern(
    r"step:(INT)/INT (?:train_loss:(NUM) )?train_time:(NUM)(ms|s) step_avg:NUMms"
    r"(?: train_loss:(NUM)@(INT))?[ \t\r]*(?=\n)"
)
# The first logs of 2024, written by llm.c: no times, no number of steps.
LLMC_STEP = pattern(r"s:(INT) (tel|trl):NUM")
LLMC_VALIDATION = pattern(r"s:(INT) tel:(NUM)[ \t\r]*(?=\n)")
LLMC_TRAINING = pattern(r"s:(INT) trl:(NUM) ")
# Lines that hold the loss of a validation, or began to.
LOSS = re.compile(rb"\n(?:[^\n]*(?:step:\d+/\d+ v|val_loss:[-+]?\d)|s:\d+ tel:)[^\r\n]*")
CLOSING = (  # lines after the last step, and the fields of Run that they set
    (pattern(r"peak memory (?:consumption|allocated): (INT) MiB"), "peak_mem_mib", int),
    (pattern(r"val_loss_per_byte: (NUM)\s"), "per_byte", float),
    (pattern(r"epochs: (INT)\s"), "epochs", int),
    (pattern(r"complete: (yes)\s"), "closed", bool),
    (pattern(r"target (NUM): "), "target", float),
)
HEADER = {
    "torch": r"Running [Pp]y[Tt]orch (\d\S*) compiled for CUDA \S+(?: on (.+?)\s+with world_size (\d+))?",
    "commit": r"commit: (\S+)(?: \((?:clean|(.+?))\))?",  # and `modified`, or git's letters: M, ??, !!
    "script": r"script: (.+?)",
    "config": r"config: (\{.*\})",
    "data": r"data: (.+?)",
    "resumed": r"resumed: (\S+) after step (\d+)(?:;.*)?",
}
GPU = r"\n\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off)\s*\|"  # a row of nvidia-smi's table
# Other rules of `=` vary in number, and occur in the source, too.
SOURCE_END = pattern(r"={20,}\s*\n(?:Running|script:) ")


@dataclass
class Header:
    """Holds what a log says before its first step."""

    torch: str | None = None
    hardware: str | None = None
    commit: str | None = (
        None  # the hash, with " (modified)" unless the log says that the script is the commit's
    )
    script: str | None = None  # the name, and the hash of its text
    data: str | None = None  # the fingerprint, and what it is of
    config: dict = field(default_factory=dict)
    origin: str | None = None  # the run that this log continues, and after which step
    after: int = 0


@dataclass
class Run:
    """Holds one training run. A file may have several."""

    path: str
    index: int  # in its file
    header: Header
    final_step: int  # the last one logged
    total_steps: int | None  # None: not logged (llm.c), and the run was cut off
    curve: list[list]  # validations: step, loss (nats per token), training time (s) or None
    training: list[tuple]  # the same of training losses
    peak_mem_mib: int | None = None
    per_byte: float | None = None
    epochs: int = 1  # how often training began to read its data
    closed: bool = False  # `complete: yes` was written
    target: float | None = None  # that the screen names

    @property
    def counted(self) -> bool:
        """Tells whether the last logged step has a validation, and no training data was read twice.

        A run of ours must have ended, too. Its log says so; its screen lacks that line, and the config.
        """
        ended = self.closed if self.header.config else self.final_step == self.total_steps
        validated = bool(self.curve) and self.curve[-1][0] == self.final_step
        return validated and self.epochs == 1 and (ended or not (self.header.config or self.header.commit))

    @property
    def val_loss(self) -> float | None:
        return self.curve[-1][1] if self.counted else None

    @property
    def train_time_s(self) -> float | None:
        return self.curve[-1][2] if self.counted else None

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
        """Returns a key that is equal for two copies of one run, as its log and its screen output are."""
        return repr((self.curve, self.final_step)) if self.curve else self.name

    @property
    def name(self) -> str:
        return self.path if self.index == 0 else f"{self.path} (run {self.index})"


def read_log(path: str, errors: list[str] | None = None) -> tuple[list[Run], list[str]]:
    """Returns a file's runs, and notes on it. Raises OSError; UserError if a config line is not JSON.

    Adds validations that cannot be read to `errors`, or to the notes if that is not given.
    """
    text = clean(Path(path).read_bytes())
    source_end = SOURCE_END.search(text)
    header_start = source_end.start() if source_end else 0
    steps, validations = scan(text, header_start)
    runs, notes, header, lines_of_runs = [], [], Header(), []
    read = {position for position, *_ in validations}
    for m in LOSS.finditer(text, header_start):
        if m.start() not in read:
            before = text[: m.start() + 1]
            number = before.count(b"\n") - before.count(b"\r\n")
            (notes if errors is None else errors).append(
                f"{path}:{number}: cannot read this validation: {decode(m[0].strip())[:100]!r}"
            )

    # A run begins where the step falls or the number of steps changes. Times do not show it: some formats
    # restart the clock near step 10.
    pairs = enumerate(zip(steps, steps[1:]), 1)
    firsts = [0] * bool(steps) + [i for i, (a, b) in pairs if b[1] < a[1] or b[2] != a[2]]
    for first, next_first in zip(firsts, firsts[1:] + [len(steps)]):
        (start, _, _), (last, final_step, total) = steps[first], steps[next_first - 1]
        end = steps[next_first][0] if next_first < len(steps) else len(text)
        lines = set(re.findall(rb"\n(?:step|s):.*\S", text[start:end]))
        if any(lines <= earlier for earlier in lines_of_runs):
            notes.append(f"{path}: a run's lines occur twice; the repetition is left out")
        else:
            header = read_header(decode(text[header_start : start + 1]), path, header)
            curve = [validation for position, *validation in validations if start <= position < end]
            if total is None and curve and curve[-1][0] == final_step:
                total = final_step  # llm.c does not log it, but validates the last step
            training = read_training(text[start : end + 1])
            runs.append(Run(path, len(runs), header, final_step, total, curve, training))
            lines_of_runs.append(lines)
        # A repetition's too: it may hold closing lines that the run lacks.
        for line, name, kind in CLOSING:
            for m in line.finditer(text, last, end + 1):
                setattr(runs[-1], name, kind(m[1]))
        header_start = last
    return runs, notes


def scan(text: bytes, start: int) -> tuple[list[tuple], list[tuple]]:
    """Returns (position, step, number of steps) of step lines, (position, step, loss, s) of validations."""
    if b"\nstep:" in text:
        steps = [(m.start(), int(m[1]), int(m[2])) for m in STEP.finditer(text, start)]
        found = VALIDATION.finditer(text, start)
        return steps, [(m.start(), int(m[1]), float(m[2]), seconds(m[3], m[4])) for m in found]
    # llm.c's training line s is update s, after which s + 1 are done; other formats log the number done.
    steps = [(m.start(), int(m[1]) + (m[2] == b"trl"), None) for m in LLMC_STEP.finditer(text, start)]
    return steps, [(m.start(), int(m[1]), float(m[2]), None) for m in LLMC_VALIDATION.finditer(text, start)]


def seconds(time: bytes, unit: bytes) -> float:
    return float(time) / (1000 if unit == b"ms" else 1)


def read_training(text: bytes) -> list[tuple[int, float, float | None]]:
    """Returns (step, training loss, training time in s or None) of a run's lines, of each step once."""
    times: dict[int, float] = {}
    losses = {int(update) + 1: float(loss) for update, loss in LLMC_TRAINING.findall(text)}
    for step, loss, time, unit, late_loss, at in TRAINING.findall(text):
        times[int(step)] = seconds(time, unit)
        if loss or late_loss:
            losses[int(at or step)] = float(loss or late_loss)
    return [(step, loss, times.get(step)) for step, loss in losses.items()]


def read_header(text: str, path: str, before: Header) -> Header:
    """Reads the lines before a run. Returns `before`, the previous run's header, if there are none."""
    found = {name: re.findall(rf"\n{line}[ \t\r]*(?=\n)", text) for name, line in HEADER.items()}
    last = {name: matches[-1] for name, matches in found.items() if matches}
    if not last:
        return before
    torch, device, world_size = last.get("torch", ("", "", ""))
    devices = Counter({device: int(world_size)}) if device else Counter(dict(re.findall(GPU, text)).values())
    try:
        config = json.loads(last.get("config", "{}"))
    except ValueError:
        raise UserError(f"{path}: its config line is not JSON") from None
    origin, after = last.get("resumed", (None, 0))
    hardware = " + ".join(f"{n} x {name}" for name, n in devices.items())
    commit, state = last.get("commit", (None, ""))
    if state:
        commit += " (modified)"
    script, data = map(last.get, ("script", "data"))
    return Header(torch or None, hardware or None, commit, script, data, config, origin, int(after))


def decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


# ============================================================================================================
# Groups.
# ============================================================================================================


Value = Callable[[Run], Any]  # of a run; None if its log has none

# What should be equal between groups, or else their difference says nothing of the change that was made.
# After the data's fingerprint a log may say how batches are packed, which is a setting like others.
ALIKE: dict[str, Value] = {
    "hardware": lambda r: r.header.hardware,
    "data": lambda r: r.header.data and r.header.data.split()[0],
    "targets": lambda r: r.header.config.get("target", r.target),
    "val_slices": lambda r: r.header.config.get("val_slices"),
    "val_slice_tokens": lambda r: r.header.config.get("val_slice_tokens"),
}
WITHIN: dict[str, Value] = ALIKE | {  # what should be equal in a group, too
    "steps": lambda r: r.final_step,
    "tracks": lambda r: r.header.config.get("track"),
    "scripts": lambda r: r.header.script,
}


@dataclass
class Group:
    """Holds runs that are compared as one sample, and warnings about them."""

    label: str
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # warnings with which there is no record
    target: float = DEFAULT_TARGET

    @property
    def counted(self) -> list[Run]:
        return [r for r in self.runs if r.counted]

    @property
    def losses(self) -> list[float]:
        return [r.val_loss for r in self.counted]

    @property
    def times(self) -> list[float]:
        return [time for r in self.counted if (time := finite(r.train_time_s)) is not None]

    @property
    def means(self) -> tuple:
        """Returns mean and standard deviation of the losses, and of the times."""
        return mean_and_sd(self.losses), mean_and_sd(self.times)

    def distinct(self, value: Value) -> list:
        """Returns the distinct values of value(run) over the counted runs, sorted, without None."""
        return sorted({value(r) for r in self.counted} - {None})

    def listed(self, value: Value) -> str:
        return "; ".join(map(str, self.distinct(value))) or "-"


def find_logs(path: str) -> list[list[Path]]:
    """Returns lists of files to try in order: `path` means the first list that has runs."""
    folder = Path(path)
    if folder.is_dir():
        logs = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and not p.is_dir())
        deeper = [p for p in logs if p.parent != folder and folder / "baseline" not in p.parents]
        return [[p for p in logs if p.parent == folder], deeper]
    files = [path] if folder.exists() else sorted(glob.glob(path, recursive=True))
    if not files:
        raise UserError(f"{path}: no such file or folder, and no file matches it")
    return [list(map(Path, files))]


def read_groups(arguments: list[str], target: float | None) -> tuple[list[Group], list[str]]:
    """Returns the groups, in the arguments' order, and a line for each thing that could not be read."""
    groups: dict[str, Group] = {}
    errors: list[str] = []
    for argument in arguments:
        try:
            label, equals, path = argument.partition("=")
            if not (label and equals) or Path(argument).exists() or glob.glob(argument):  # a file's own "="
                label = path = argument
                here = Path(os.path.abspath(path))
                if here.exists():
                    label = here.name if here.is_dir() else here.stem
                label = path if label in groups else label  # two folders of one name are two groups
            read_into(groups.setdefault(label, Group(label)), path, errors)
        except UserError as e:
            errors.append(str(e))
        except OSError as e:
            errors.append(f"{argument}: cannot be read: {e.strerror}")
            groups.setdefault(argument, Group(argument))
    for group in groups.values():
        drop_repeats(group)
        join_resumed(group)
        group.target = target or min(group.distinct(ALIKE["targets"]), default=DEFAULT_TARGET)
        warn(group)
    base, *others = groups.values()
    for group in others:
        group.faults += [f"it differs from {base.label} in {name}" for name in differences(group, base)]
        steps, base_steps = (g.listed(WITHIN["steps"]) for g in (group, base))
        if steps != base_steps:
            group.notes.append(
                f"it has {steps} steps and {base.label} {base_steps}: "
                "only the p (mean < target) of its own runs shows its loss"
            )
    return list(groups.values()), errors


def read_into(group: Group, path: str, errors: list[str]) -> None:
    """Adds the runs of `path` to the group, and what could not be read to `errors`."""
    had_runs, had_errors = len(group.runs), len(errors)
    for files in find_logs(path):
        notes = []
        for file in map(str, files):
            try:
                runs, of_file = read_log(file, errors)
                group.runs += runs
                notes += of_file if runs else [f"{file}: holds no run"]
            except OSError as e:
                errors.append(f"{file}: cannot be read: {e.strerror}")
            except UserError as e:
                errors.append(str(e))
        if len(group.runs) > had_runs:
            group.notes += notes
            return
    if len(errors) == had_errors:
        errors.append(
            f"{path}: holds no run: no line like 'step:9/9 val_loss:3.28 train_time:9ms step_avg:1ms'"
        )


def drop_repeats(group: Group) -> None:
    kept: dict[str, Run] = {}
    for run in sorted(group.runs, key=lambda r: (not r.header.config, not r.header.torch)):  # screens last
        same = kept.setdefault(run.identity, run)
        if same is not run:
            group.notes.append(f"{run.name}: dropped, the same run as {same.name}")
    group.runs = [run for run in group.runs if kept[run.identity] is run]


def join_resumed(group: Group) -> None:
    """Keeps one of the logs of a run, RUN.txt and RUN.fromSTEP.txt of those that resumed it: the furthest.

    The others may end in a validation too, and would count as more runs. The curves become the whole run's.
    Loss and time are the whole run's already, since a resumed clock continues.
    """
    for origin in dict.fromkeys(r.origin for r in group.runs if r.header.after):
        logs = [r for r in group.runs if r.origin == origin]
        logs.sort(key=lambda r: (r.header.after, r.final_step))
        kept = max(logs, key=lambda r: (r.final_step, r.counted, r.header.after))
        if len(logs) > 1:
            names = ", ".join(r.name for r in logs if r is not kept)
            group.notes.append(f"{kept.name}: stopped and resumed, one run with {names}, and taken for it")
        after = kept.header.after
        for run in reversed(logs[: logs.index(kept)]):
            kept.curve = [point for point in run.curve if point[0] < after] + kept.curve
            kept.training = [point for point in run.training if point[0] <= after] + kept.training
            after = run.header.after
        group.runs = [r for r in group.runs if r is kept or r.origin != origin]


def warn(group: Group) -> None:
    """Adds notes on runs that are incomplete, and on what differs within the group."""
    for run in group.runs:
        reached = f"step {run.final_step} of {run.total_steps or 'an unknown number'}"
        if run.epochs > 1:
            group.notes.append(f"{run.name}: trained on its data in {run.epochs} epochs, left out")
        elif not run.counted:
            ends = f"ends at {reached}, without a validation or without 'complete: yes'"
            group.notes.append(f"{run.name}: incomplete, left out: {ends}")
        elif run.final_step != run.total_steps:
            group.notes.append(f"{run.name}: stopped at {reached}, counted")
    for what, value in WITHIN.items():
        if group.distinct(value)[1:]:
            group.faults.append(f"its runs differ in {what} ({group.listed(value)})")
    for seed, count in Counter(r.header.config.get("seed") for r in group.counted).items():
        if seed is not None and count > 1:
            group.faults.append(f"{count} of its runs have seed {seed}, so they are not independent")
    if "other" in group.distinct(WITHIN["tracks"]):
        group.faults.append("it has runs of the track `other`, which holds no records")


def differences(group: Group, base: Group) -> list[str]:
    """Returns which values of ALIKE both groups have, and not the same."""
    found = {name: (group.distinct(value), base.distinct(value)) for name, value in ALIKE.items()}
    return [name for name, (here, there) in found.items() if here and there and here != there]


# ============================================================================================================
# Statistics. What is not defined is None: a mean of nothing, a spread of one value, a test without spread.
# ============================================================================================================


def mean_and_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the mean and the sample standard deviation (ddof 1)."""
    import numpy as np

    mean = finite(np.mean(values)) if values else None
    return mean, finite(np.std(values, ddof=1)) if mean is not None and len(values) > 1 else None


def varies(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) < max(values)


def p_below(values: list[float], target: float) -> float | None:
    """Returns the one-sided p of the one-sample t-test whose alternative is a mean below the target."""
    if not varies(values):
        return None
    from scipy.stats import ttest_1samp

    return finite(ttest_1samp(values, target, alternative="less").pvalue)


def difference(values: list[float], base: list[float]) -> tuple[float | None, ...]:
    """Returns mean(values) - mean(base) and Welch's t, degrees of freedom and two-sided p."""
    (mean, _), (base_mean, _) = mean_and_sd(values), mean_and_sd(base)
    delta = None if mean is None or base_mean is None else mean - base_mean
    if not (varies(values) and varies(base)):
        return delta, None, None, None
    from scipy.stats import ttest_ind

    result = ttest_ind(values, base, equal_var=False)
    return delta, finite(result.statistic), finite(result.df), finite(result.pvalue)


def finite(x) -> float | None:
    return float(x) if x is not None and math.isfinite(x) else None


def as_json(groups: list[Group]) -> dict:
    """Returns all numbers of the groups and their comparisons."""
    base, *others = groups
    names = [f"{what}_{name}" for what in ("time", "loss") for name in ("delta", "t", "df", "p")]
    names = ["group", "baseline", "time_delta_s", *names[1:], "record", "because"]
    comparisons = []
    for group in others:
        tests = difference(group.times, base.times) + difference(group.losses, base.losses)
        comparisons.append(dict(zip(names, (group.label, base.label, *tests, *record(group, base)))))
    return {"groups": list(map(group_as_json, groups)), "comparisons": comparisons}


def group_as_json(group: Group) -> dict:
    (loss_mean, loss_std), (time_mean, time_std) = group.means
    return {
        "label": group.label,
        "n": len(group.counted),
        "steps": group.distinct(lambda r: r.final_step),
        "loss_mean": loss_mean,
        "loss_std": loss_std,
        "time_mean_s": time_mean,
        "time_std_s": time_std,
        "p_target": p_below(group.losses, group.target),
        "meets_target": below_target(group, group.target)[0],
        "runs": [
            {
                "path": r.path,
                "run_index": r.index,
                "final_step": r.final_step,
                "total_steps": r.total_steps,
                "val_loss": finite(r.val_loss),
                "train_time_s": finite(r.train_time_s),
                "peak_mem_mib": r.peak_mem_mib,
                "torch": r.header.torch,
                "complete": r.complete,
            }
            for r in group.runs
        ],
    }


# ============================================================================================================
# Reports.
# ============================================================================================================


def show(x: float | None, spec: str = ".4f") -> str:
    return "-" if x is None else format(x, spec)


def show_p(p: float | None) -> str:
    return "-" if p is None else f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def show_all(values: list, spec: str) -> str:
    return " ".join(format(v, spec) for v in values) or "-"


def below(what: str, mean: float | None, limit: float | None, name: str, p: float | None) -> tuple[bool, str]:
    """Tells whether the mean is shown to be below the limit, and says so."""
    lower = mean is not None and limit is not None and mean < limit
    shown = lower and p is not None and p < ALPHA
    is_ = "is" if shown else "is not shown to be" if lower else "is not"
    level = f"{'no p' if p is None else f'p {show_p(p)}'}{'' if shown else ', needs'} < {ALPHA:g}"
    return shown, f"the mean {what} {is_} below {name} ({level})"


def below_target(group: Group, target: float) -> tuple[bool, str]:
    p = p_below(group.losses, target)
    return below("loss", mean_and_sd(group.losses)[0], target, f"the target {target:g}", p)


def record(group: Group, base: Group) -> tuple[bool, str]:
    """Tells whether the group is a record over the baseline, and why."""
    no = [*group.faults, *(f"of {base.label}: {fault}" for fault in base.faults)]
    if not all(map(WITHIN["tracks"], group.counted + base.counted)):
        no.append("not every log names its track")
    yes, (time, _), (limit, _) = [], mean_and_sd(group.times), mean_and_sd(base.times)
    target = min(group.distinct(ALIKE["targets"]), default=group.target)  # the track's, not --target's
    for shown, text in (
        below_target(group, target),
        below("time", time, limit, f"{base.label}'s", difference(group.times, base.times)[3]),
    ):
        (yes if shown else no).append(text)
    return not no, "; ".join(" and ".join(clauses) for clauses in (no, yes) if clauses)


def table(group: Group) -> list[tuple[str, str]]:
    """Returns (name, value) of each line in a group's table. What no log has is left out."""
    per_byte, _ = mean_and_sd([r.per_byte for r in group.counted if r.per_byte is not None])
    peaks = group.distinct(lambda r: r.peak_mem_mib)
    peak_range = " to ".join(map(str, peaks[:1] + peaks[1:][-1:]))
    (mean, sd), (time, time_sd) = group.means
    rows = [
        ("runs (n)", str(len(group.counted))),
        ("steps", group.listed(WITHIN["steps"])),
        ("length", group.listed(lambda r: r.header.config.get("length"))),
        ("loss: mean, sd", f"{show(mean)}, {show(sd)}"),
        ("loss per byte", show(per_byte)),
        ("time, s: mean, sd", f"{show(time, '.3f')}, {show(time_sd, '.3f')}"),
        ("peak memory", f"{peak_range} MiB" if peaks else "-"),
        ("hardware", group.listed(ALIKE["hardware"])),
        ("torch", group.listed(lambda r: r.header.torch)),
        ("script", group.listed(WITHIN["scripts"])),
        ("p (mean < target)", show_p(p_below(group.losses, group.target))),
        ("verdict", below_target(group, group.target)[1] if group.counted else "-"),
        ("losses", show_all(group.losses, ".4f")),
        ("times, s", show_all(group.times, ".3f")),
    ]
    return [(name, value) for name, value in rows if value.strip("-, ")]


def percentage(delta: float | None, base: Group, digits: int) -> str:
    """Returns a difference of times relative to the base's, "" if it is not defined."""
    mean, _ = mean_and_sd(base.times)
    return f"{100 * delta / mean:+.{digits}f} %" if delta is not None and mean else ""


def text_report(groups: list[Group], anyway: bool) -> str:
    out, (base, *others), line = [], groups, "  {:6}  {:20}  {:9}  {:6}  {}".format
    unlike = {name: None for group in others for name in differences(group, base) if not anyway}
    if unlike:
        out += [f"warning: not the same {' and '.join(unlike)}, so no percentages; --anyway prints them", ""]
    for group in groups:
        out += [
            group.label,
            *(f"  {name:18} {value}" for name, value in table(group)),
            *(f"  warning: {note}" for note in group.notes + group.faults),
            "",
        ]
    for group in others:
        delta, *time_test = difference(group.times, base.times)
        percent = "" if unlike else percentage(delta, base, 2)
        time = "-" if delta is None else f"{delta:+.3f} s" + (f" ({percent})" if percent else "")
        loss, *loss_test = difference(group.losses, base.losses)
        out += [
            f"{group.label} against {base.label}",
            line("", "difference", "Welch t", "df", "p (two-sided)"),
        ]
        for what, shown, (t, df, p) in (("time", time, time_test), ("loss", show(loss, "+.4f"), loss_test)):
            out.append(line(what, shown, show(t, ".2f"), show(df, ".1f"), show_p(p)))
        yes, because = record(group, base)
        out += [f"record: {'yes' if yes else 'no'}, because {because}", ""]
    return "\n".join(out).rstrip()


def print_warnings(groups: list[Group]) -> None:
    for group in groups:
        for note in group.notes + group.faults:
            print(f"compare.py: warning: {group.label}: {note}", file=sys.stderr)


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
    if command := os.environ.get("RUN_COMMAND"):
        parts.append(textwrap.indent(command, "    "))
    parts += [f"What `python records/compare.py {' '.join(paths)}` prints:", textwrap.indent(table, "    ")]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return f"{path} is begun, with the table below; say in it what was changed"


def markdown_table(head: list[str], body: list[list[str]]) -> list[str]:
    """Returns the table's lines, and an empty one."""
    cells = [[c.replace("|", "\\|") for c in line] for line in [head, *body]]
    cells.insert(1, ["---"] * len(head))
    return ["| " + " | ".join(line) + " |" for line in cells] + [""]


STYLES: dict[str, dict[str, Any]] = {  # of curves: what they are, as the legend says
    "validation; bars: standard deviation": {"linewidth": 2, "marker": "o", "markersize": 4},
    "training, smoothed": {"linewidth": 0.8},
    "training, over sampled columns: not comparable": {"linewidth": 0.8, "linestyle": ":"},
}


def digest(drawn_by: type, *inputs: Any) -> str:
    """Returns a hash of what is drawn, and of the code. (A picture's bytes vary with matplotlib.)"""
    return hashlib.sha256(repr((inspect.getsource(drawn_by), inputs)).encode()).hexdigest()[:16]


class Picture(NamedTuple):
    """Draws losses of groups, and constants, over steps and over training time."""

    groups: list[Group]
    lines: list[tuple[str, float]]  # constants to draw: label, loss
    over: tuple[str, ...] = ("step", "training time, s")

    @property
    def mark(self) -> str:
        inputs = [(g.label, g.target, [(r.curve, r.training) for r in g.counted]) for g in self.groups]
        return digest(Picture, inputs, self[1:], STYLES)

    def draw(self, path: str | Path) -> None:
        """Writes a PNG with its mark."""
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator, NullLocator

        fig = Figure(figsize=(6 + 2 * len(self.over), 4.6), layout="constrained")
        axes = fig.subplots(1, len(self.over), sharey=True, squeeze=False)[0]
        levels = [("target", target) for target in sorted({g.target for g in self.groups})] + self.lines
        shown, handles, kinds = [level for _, level in levels], [], {}
        for number, group in enumerate(self.groups):
            color, ((loss, _), (time, _)) = f"C{number}", group.means
            label = f"{group.label} (n={len(group.counted)}): {show(loss)} after {show(time, '.1f')} s"
            handles.append(Line2D([], [], color=color, linewidth=2, label=label))
            stages = [stage for run in group.counted for stage in run.header.config.get("stages", [])]
            validation, *trainings = STYLES
            training = trainings[any(stage.get("candidates") for stage in stages)]
            for curve, kind in ((mean_curve(group), validation), (training_curve(group), training)):
                points, style = [point for point in curve if math.isfinite(point[2])], STYLES[kind]
                if len(points) <= FEW:
                    style = style | {"linestyle": "none"}
                shown += [point[2] for point in points if point[0] >= STEEP * points[-1][0]]
                for ax, label in zip(axes, self.over):
                    column = int(label != "step")
                    drawn = [(point[column], *point[2:]) for point in points if math.isfinite(point[column])]
                    if drawn:
                        ax.errorbar(*zip(*drawn), color=color, capsize=3, **style)  # x, loss, sd
                        kinds[kind] = Line2D([], [], color="0.4", **style)
        for ax, label in zip(axes, self.over):
            ax.set(xlabel=label, xlim=(0, None))
            for _, level in levels:
                ax.axhline(level, color="0.4", linestyle="--", linewidth=1)
            clear(ax)
        for name, level in levels:
            axes[-1].text(1.01, level, f"{name} {level:g}", transform=ax.get_yaxis_transform(), va="center")
        axes[0].set(yscale="log", ylim=(0.98 * min(shown), 1.02 * max(shown)))
        axes[0].set_ylabel("loss, nats per token (logarithmic)")
        ticks = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
        axes[0].yaxis.set(major_locator=ticks, major_formatter="{x:g}", minor_locator=NullLocator())
        fig.legend(handles=handles, loc="outside upper left")
        has_bars = any(len(group.counted) > 1 for group in self.groups)
        names = [kind if has_bars else kind.partition(";")[0] for kind in kinds]
        fig.legend(kinds.values(), names, loc="outside upper right")
        fig.savefig(path, format="png", metadata={"Source": self.mark})


def clear(ax) -> None:
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def columns(points: list) -> Any:
    """Returns arrays of steps, losses and times. Before a restart of the clock times are nan."""
    import numpy as np

    steps, losses, times = np.array(points, float).T
    times[times > np.fmin.accumulate(times[::-1])[::-1]] = math.nan
    return steps, losses, times


def mean_curve(group: Group) -> list[tuple]:
    """Returns (step, mean time in s, mean loss, sd of the loss) at the steps that every run validated.

    A mean over some of the runs would jump where one drops out. The time is nan where a run has none.
    """
    import numpy as np

    runs = [{int(step): values for step, *values in zip(*columns(r.curve))} for r in group.counted]
    points = []
    for step in sorted(set.intersection(*map(set, runs))) if runs else []:
        losses, times = zip(*(run[step] for run in runs))
        points.append((step, np.mean(times), np.mean(losses), mean_and_sd(losses)[1] or math.nan))
    return points


def training_curve(group: Group) -> list[tuple]:
    """Returns (step, mean time in s, mean training loss, smoothed) at each step that all runs' logs cover.

    Smoothed: the mean of the covered steps from step - w to step + w, where 2 w is SMOOTHED of the last step.
    """
    import numpy as np

    logged = [[point for point in run.training if math.isfinite(point[1])] for run in group.counted]
    if not logged or not all(logged):
        return []
    # On a GPU some losses are not logged, those that arrive together with a later one: they are interpolated.
    last = min(run[-1][0] for run in logged)
    steps = np.arange(max(run[0][0] for run in logged), last + 1)
    times, losses = np.zeros(len(steps)), np.zeros(len(steps))
    for at, loss, time in map(columns, logged):
        times += np.interp(steps, at, time) / len(logged)
        losses += np.interp(steps, at, loss) / len(logged)
    w = round(SMOOTHED * last / 2)
    smoothed = (float(losses[max(i - w, 0) : i + w + 1].mean()) for i in range(len(steps)))
    return list(zip(steps.tolist(), times.tolist(), smoothed))


def diff_report(path_a: str, path_b: str) -> str:
    """Reports what changed in config and script from log A to log B."""
    sources, configs = [], []
    for path in (path_a, path_b):
        text = b"\n" + Path(path).read_bytes() + b"\n"
        source_end = SOURCE_END.search(text)
        if source_end is None:
            raise UserError(f"{path}: holds no source: no line of = after it")
        sources.append(decode(text[1 : source_end.start() + 1]).splitlines())
        header = read_header(decode(text[source_end.start() :]), path, Header())
        configs.append(sorted(flatten(header.config | {"script": header.script})))
    out = []
    for what, (a, b), context in (("config", configs, 0), ("script", sources, 3)):
        changes = difflib.unified_diff(a, b, path_a, path_b, lineterm="", n=context)
        out += [what, *changes] if a != b else [what, "  no difference"]
    return "\n".join(out)


def flatten(config, name: str = "") -> list[str]:
    """Flattens nested JSON to ["layers.3.window: long", ...], so that a changed cell is one line."""
    if isinstance(config, (dict, list)) and config:
        items = config.items() if isinstance(config, dict) else enumerate(config)
        return [line for key, value in items for line in flatten(value, f"{name}.{key}".lstrip("."))]
    return [f"{name}: {json.dumps(config)}"]


# ============================================================================================================
# What --update makes: what is between the lines <!-- NAME --> and <!-- end of NAME --> of records/README.md,
# and pictures, which keep a mark of what was drawn and how, and are drawn again only if that changes.
# ============================================================================================================

HERE = Path(__file__).resolve().parent
TRACKS = ("cpu", "words", "gpt2-small")  # those with records
DATED = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*"
RECORD_COLUMNS = ["date", "record", "runs", "loss, mean", "p (mean < target)", "time, mean"]
RECORD_COLUMNS += ["against its baseline", "machine", "commit"]
# README.md's pictures in bench/curves: {label: log}, then target and constants, which bench/ngram.py printed.
# They are single runs that validated often, by --set val_every=20 and --val-every: training is the same.
PICTURES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "curves.png": ({"plain GPT with AdamW": "plain_gpt.txt", "cpu preset": "cpu.txt"}, ("training time, s",)),
    "ngrams.png": (
        {"with n-grams, 311 steps": "ngrams.txt", "with bigrams, 431 steps": "no_ngrams.txt"},
        ("step", "training time, s"),
    ),
}
PICTURES_LINES = [("4-gram", 1.469), ("5-gram", 1.350)]
# Public records that history.png names, and the name's place: points right of and above the mark.
NAMED = {
    1: ("llm.c", 8, -3),
    3: ("Muon", 8, 2),
    12: ("FlexAttention", 8, 2),
    21: ("timed by other rules from here on", 4, 12),
    53: ("several next tokens", 8, 2),
    92: ("sampled softmax, ANVIL", -150, -4),
}


def read_records(errors: list[str]) -> dict[Path, list[Group]]:
    """Returns each record's group, and its baseline's, by folder. Adds what could not be read to `errors`."""
    records = {}
    for folder in sorted(p for track in TRACKS for p in HERE.glob(f"{track}/{DATED}")):
        baseline = [f"baseline={path}" for path in folder.glob("baseline")]
        groups, unreadable = read_groups([str(folder), *baseline], None)
        errors += unreadable
        print_warnings(groups[:1])  # the baseline's would compare it with the record
        if groups[0].counted:
            records[folder] = groups
        else:
            print(f"compare.py: warning: {folder}: left out, holds no finished run", file=sys.stderr)
    return records


def record_tables(records: dict[Path, list[Group]]) -> str:
    """Returns a Markdown table of each track's records."""
    out = []
    for track in TRACKS:
        body = [record_row(p, groups) for p, groups in records.items() if p.parent.name == track]
        out += [f"### `{track}`", ""]
        out += markdown_table(RECORD_COLUMNS, body) if body else ["None yet.", ""]
    return "\n".join(out)


def record_row(folder: Path, groups: list[Group]) -> list[str]:
    """Returns the cells of a record, groups[0], compared with its baseline, groups[1], if it has one."""
    day, name = folder.name.split("_", 1)
    group, *baseline = groups
    ((loss, _), (time, _)), change = group.means, "-"
    for base in baseline:
        delta, _, _, p = difference(group.times, base.times)
        percent = percentage(delta, base, 1)
        if percent and not differences(group, base):
            change = f"{percent}, p {show_p(p)}"
    return [
        day,
        f"[{name}]({folder.parent.name}/{folder.name})",
        str(len(group.counted)),
        show(loss),
        show_p(p_below(group.losses, group.target)),
        show(time, ".1f") + " s",
        change,
        re.sub(r" \(.*?\)", "", group.listed(ALIKE["hardware"])),
        group.listed(lambda r: r.header.commit),
    ]


class History(NamedTuple):
    """Draws the public records' times over their dates. Rows: number, minutes, date, change, source."""

    rows: list[list[str]]  # a repeated number is the same record, timed again

    @property
    def mark(self) -> str:
        return digest(History, self.rows, NAMED)

    def draw(self, path: Path) -> None:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator

        fig = Figure(figsize=(9, 5), layout="constrained")
        ax: Any = fig.subplots()
        days = [date.fromisoformat(row[2]) for row in self.rows]
        times = [float(row[1]) for row in self.rows]
        ax.step(days, times, "C0", where="post", linewidth=1)
        drawn = set()
        for (number, *_), day, time in zip(self.rows, days, times):
            ax.plot(day, time, "C0o", markersize=4, markerfacecolor="white" if number in drawn else "C0")
            if int(number) in NAMED and number not in drawn:
                name, right, above = NAMED[int(number)]
                offset = {"xytext": (right, above), "textcoords": "offset points"}
                ax.annotate(f"{number}: {name}", (day, time), fontsize=9, **offset)
            drawn.add(number)
        title = "Public NanoGPT speedrun: time to a validation loss of 3.28 on 8 H100s"
        ax.set(yscale="log", ylim=(0.5, 60), ylabel="time (logarithmic)", title=title)
        ax.set_yticks([0.5, 1, 2, 3, 5, 10, 20, 45])
        ax.yaxis.set(major_formatter="{x:g} min", minor_locator=NullLocator())
        clear(ax)
        fig.savefig(path, format="png", metadata={"Source": self.mark})


def read_history() -> History:
    """Returns the public records, in order."""
    with open(HERE / "history.csv", encoding="utf-8", newline="") as file:
        return History(list(csv.reader(file))[1:])


def is_current(path: Path, mark: str) -> bool:
    return path.exists() and mark.encode() in path.read_bytes()


def readme_parts(records: dict[Path, list[Group]]) -> dict[str, str]:
    """Returns the generated parts of records/README.md, by name."""
    history = markdown_table(["#", "minutes", "date", "change", "source"], read_history().rows)
    return {"records": record_tables(records), "history": "\n".join(history)}


def find_pictures(records: dict[Path, list[Group]], errors: list[str]) -> dict[Path, Picture | History]:
    """Returns all pictures, by file. Adds what could not be read to `errors`."""
    pictures: dict[Path, Picture | History] = {HERE / "history.png": read_history()}
    for folder, (record, *baseline) in records.items():
        pictures[folder / "curves.png"] = Picture([*baseline, record], [])
    folder = HERE.parent / "bench/curves"
    for name, (logs, over) in PICTURES.items():
        paths = [f"{label}={folder / log}" for label, log in logs.items()]
        groups, unreadable = read_groups(paths, None)
        errors += unreadable
        pictures[folder / name] = Picture(groups, PICTURES_LINES, over)
    return pictures


def update() -> list[str]:
    """Writes tables and pictures. Returns what could not be read; then it writes nothing."""
    errors: list[str] = []
    records = read_records(errors)
    pictures = find_pictures(records, errors)
    if errors:
        return errors
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, part in readme_parts(records).items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->\n")
        text = f"{before}<!-- {name} -->\n{part}<!-- end of {name} -->\n{after}"
    path.write_text(text, encoding="utf-8")
    for path, picture in pictures.items():
        if not is_current(path, picture.mark):
            picture.draw(path)
    return []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="[LABEL=]PATH", help="log, folder or pattern; the first is the baseline")
    add("--target", type=float, help=f"loss to reach (default: the logs', else {DEFAULT_TARGET})")
    add("--json", action="store_true", help="print one JSON object; warnings go to stderr")
    add("--anyway", action="store_true", help="print percentages though machines, data or validation differ")
    add("--curves", metavar="FILE.png", help="draw losses over steps and over training time")
    add("--diff", nargs=2, metavar=("A", "B"), help="what changed in script and config from log A to log B")
    add("--begin", metavar="FOLDER", help="print the table of a new record, and begin its README.md")
    add("--update", action="store_true", help="write the tables and pictures of the records and README.md")
    args = parser.parse_intermixed_args(argv)
    if sum(map(bool, (args.paths, args.diff, args.begin, args.update))) != 1:
        parser.error("give logs to compare, or one of --diff, --begin and --update")

    errors: list[str] = []
    try:
        if args.diff:
            print(diff_report(*args.diff))
        elif args.update:
            errors = update()
        else:
            errors = report(args)
    except UserError as e:
        errors = [str(e)]
    except OSError as e:
        errors = [f"{e.filename}: {e.strerror}"]
    except ModuleNotFoundError as e:
        package = e.name.split(".")[0]
        if package not in ("numpy", "scipy", "matplotlib"):
            raise
        errors = [f"needs {package}, which this Python lacks: pip install -r requirements.txt"]
    for error in errors:
        print(f"compare.py: {error}", file=sys.stderr)
    return 2 if errors else 0


def report(args: argparse.Namespace) -> list[str]:
    """Prints what the logs say; begins a record, draws curves. Returns what could not be read."""
    if args.begin:
        folder = Path(os.path.relpath(args.begin))
        args.paths = [f"{path}" for path in [*folder.glob("baseline"), folder]]
    groups, errors = read_groups(args.paths, args.target)
    if args.json:
        print(json.dumps(as_json(groups), indent=1, allow_nan=False))
        print_warnings(groups)
    else:
        text = text_report(groups, args.anyway)
        if args.begin and not errors:
            print(begin_readme(folder, args.paths, text) + "\n")
        print(text)
    if args.curves:
        Picture(groups, []).draw(args.curves)
    return errors


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `compare.py ... | head` ends quietly
    sys.exit(main())
