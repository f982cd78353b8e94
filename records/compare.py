#!/usr/bin/env python3
"""Compares groups of speedrun logs: do they meet the target loss, how do they differ from the first group?

    python records/compare.py [LABEL=]PATH... [--target 3.28] [--json] [--anyway]
    python records/compare.py [LABEL=]PATH... --curves FILE.png
    python records/compare.py --diff A B
    python records/compare.py --begin FOLDER
    python records/compare.py --table | --update

A PATH is a log, a glob, or a folder. A folder means the logs directly in it or, if they hold no run, those in
its sub-folders; so a record's `baseline/` is a separate group. Each PATH is a group, PATHs of one LABEL are
one group, and the first is the baseline. Reads the logs of train_gpt.py and every format of the public
speedrun. Times and losses of other machines or data are no comparison: the first line then warns, and no
percentage is printed, unless --anyway is given.

--begin prints the table of a new record's folder, and begins its README.md if there is none. --table prints
the tables of records/README.md. --update writes them there, and draws the pictures whose logs or data have
changed: a record's curves.png, README.md's in bench/curves, records/history.png.

A run counts if the last step it logged has a validation; its loss and time are that validation's. One whose
log says `epochs: 2` or more does not count: it ran out of training data, and read some again. A run that was
stopped and resumed has several logs, and counts once, as the one that went furthest. A group meets the target
if a one-sided one-sample t-test rejects, at p < 0.01, that its mean loss is not below the target.
Groups are compared by Welch's t-test, two-sided. The exit code is 2 if something could not be read; all else
is still reported.

--curves draws losses over steps and over training time. Thick: validation loss, mean and standard deviation
of a group's runs, at the steps that all validated. Thin, if logged: training loss, mean of the runs, smoothed
by a centred window of 5 % of the steps, shorter at both ends. train_gpt.py logs the first process's, which is
higher in stages that also predict later tokens. Dashed: the target. The loss axis is logarithmic, and fits
the losses after a group's first 10 % of steps. By default a run validates every 250 steps, which is three
times in the `cpu` preset; runs for a picture need --set val_every=20.

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
import json
import math
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

SUFFIXES = {".txt", ".log", ".stdout", ".out"}  # of logs in a folder; a file named directly may have any
DEFAULT_TARGET = 3.28  # nats per token: the public speedrun's, if no log's config names another
ALPHA = 0.01  # the public speedrun's level for "the mean loss is below the target"
SHOWN = 24  # values printed before "…"
SMOOTHED = 0.05  # of the steps: the window that training losses are averaged over
STEEP = 0.1  # of the steps: the first, whose losses may lie above the picture


class UserError(Exception):
    """Reports what the user can fix, in one line."""


# ============================================================================================================
# Logs. A log begins with the script's source, whose f-strings look like log lines. So every pattern is
# anchored at the start of a line and needs numbers. Bytes are searched, without splitting into lines: most of
# a log is source and training lines.
# ============================================================================================================


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
PEAK = pattern(r"peak memory (?:consumption|allocated): (INT) MiB")
PER_BYTE = pattern(r"val_loss_per_byte: (NUM)\s")
EPOCHS = pattern(r"epochs: (INT)\s")
COMPLETE = pattern(r"complete: yes\s")
TORCH = pattern(
    r"Running [Pp]y[Tt]orch (\d\S*) compiled for CUDA \S+(?: on (.+?)\s+with world_size (INT))?[ \t\r]*(?=\n)"
)
GPU = pattern(r"\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off)\s*\|")  # a row of nvidia-smi's table
COMMIT = pattern(r"commit: (\S+)( \(modified\))?")
CONFIG = pattern(r"config: (\{.*\})")
DATA = pattern(r"data: (.+?)[ \t\r]*(?=\n)")
RESUMED = pattern(r"resumed: (\S+) after step (INT)[ \t\r;\n]")
SOURCE_END = pattern(r"={20,}\s*\nRunning ")  # other rules of `=` vary in number, and occur in the source too
RULE = pattern(r"={100}\s*\n")


@dataclass
class Header:
    """Holds what a log says before its first step."""

    torch: str | None = None
    hardware: str | None = None
    processes: int | None = None
    commit: str | None = None  # the hash, with " (modified)" if the log says so
    config: dict | None = None
    data: str | None = None  # the fingerprint
    resumed: tuple[str, int] | None = None  # the run that this log continues, and after which step

    @property
    def validation(self) -> str | None:
        """Returns the size of a validation."""
        slices, tokens = (self.config or {}).get("val_slices"), (self.config or {}).get("val_slice_tokens")
        return None if slices is None or tokens is None else f"{slices} x {tokens} tokens"


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
    last_line: bytes
    peak_mem_mib: int | None = None
    per_byte: float | None = None
    epochs: int = 1  # how often training began to read its data
    closed: bool = False  # `complete: yes` was written

    @property
    def counted(self) -> bool:
        """Tells whether the last logged step has a validation, and no training data was read twice."""
        return bool(self.curve) and self.curve[-1][0] == self.final_step and self.epochs == 1

    @property
    def val_loss(self) -> float | None:
        return self.curve[-1][1] if self.counted else None

    @property
    def train_time_s(self) -> float | None:
        return self.curve[-1][2] if self.counted else None

    @property
    def complete(self) -> bool:
        """Tells whether the run reached its end. Our logs, which have a config line, must be closed too."""
        closed = self.closed or self.header.config is None
        return self.counted and self.final_step == self.total_steps and closed

    @property
    def after(self) -> int:
        """Returns the step after which its log begins."""
        return self.header.resumed[1] if self.header.resumed else 0

    @property
    def identity(self) -> str:
        """Returns a key that is equal for two copies of one run, as its log and its screen output are."""
        return repr((self.curve, self.final_step, None if self.counted else self.last_line))

    @property
    def name(self) -> str:
        return self.path if self.index == 0 else f"{self.path} (run {self.index})"


def read_log(path: str) -> tuple[list[Run], list[str]]:
    """Returns a file's runs, and notes on it. Raises OSError; UserError if a config line is not JSON."""
    text = b"\n" + Path(path).read_bytes() + b"\n"
    source_end = SOURCE_END.search(text)
    header_start = source_end.start() if source_end else 0
    steps, validations = scan(text, header_start)

    # A run begins where the step falls or the number of steps changes. Times do not show it: some formats
    # restart the clock near step 10.
    firsts = []
    for i, (_, step, total) in enumerate(steps):
        if i == 0 or step < steps[i - 1][1] or total != steps[i - 1][2]:
            firsts.append(i)
    runs, notes, header, lines_of_runs = [], [], Header(), []
    for first, next_first in zip(firsts, firsts[1:] + [len(steps)]):
        (start, _, _), (last, final_step, total) = steps[first], steps[next_first - 1]
        end = steps[next_first][0] if next_first < len(steps) else len(text)
        lines = step_lines(text[start:end]) if len(firsts) > 1 else set()
        if any(lines <= earlier for earlier in lines_of_runs):
            notes.append(f"{path}: a run's lines occur twice; the repetition is left out")
        else:
            header = read_header(text[header_start : start + 1], path, header)
            curve = [validation for position, *validation in validations if start <= position < end]
            if total is None and curve and curve[-1][0] == final_step:
                total = final_step  # llm.c does not log it, but validates the last step
            training = read_training(text[start : end + 1])
            last_line = text[last + 1 : text.index(b"\n", last + 1)]
            runs.append(Run(path, len(runs), header, final_step, total, curve, training, last_line))
            lines_of_runs.append(lines)
        # A repetition's too: it may hold closing lines that the run lacks.
        read_closing(text[last : end + 1], runs[-1])
        header_start = last
    return runs, notes


StepLine = tuple[int, int, int | None]  # position, step, number of steps
ValidationLine = tuple[int, int, float, float | None]  # position, step, loss, seconds


def scan(text: bytes, start: int) -> tuple[list[StepLine], list[ValidationLine]]:
    """Returns the step lines, of a single run only the first and the last, and all validations."""
    steps: list[StepLine] = []
    validations: list[ValidationLine] = []
    if b"\nstep:" in text:
        for m in find_steps(text, start, STEP, b"\nstep:"):
            steps.append((m.start(), int(m[1]), int(m[2])))
        for m in VALIDATION.finditer(text, start):
            seconds = float(m[3]) / (1000 if m[4] == b"ms" else 1)
            validations.append((m.start(), int(m[1]), float(m[2]), seconds))
    else:
        # llm.c's training line s is update s, after which s + 1 are done; other formats log the number done.
        for m in find_steps(text, start, LLMC_STEP, b"\ns:"):
            steps.append((m.start(), int(m[1]) + (m[2] == b"trl"), None))
        for m in LLMC_VALIDATION.finditer(text, start):
            validations.append((m.start(), int(m[1]), float(m[2]), None))
    return steps, validations


def find_steps(text: bytes, start: int, line: re.Pattern[bytes], prefix: bytes) -> list[re.Match[bytes]]:
    """Returns the step lines; of a single run the first and the last: match objects for all are slow."""
    found = line.findall(text, start)
    steps = [int(step) for step, _ in found]
    if not steps or steps != sorted(steps) or (line is STEP and found[0][1] != found[-1][1]):
        return list(line.finditer(text, start))
    at, last = len(text), None
    while last is None:  # the last line with the prefix may have been cut off
        at = text.rfind(prefix, start, at)
        last = line.match(text, at)
    return [line.search(text, start), last]


def step_lines(text: bytes) -> set[bytes]:
    return {line.rstrip() for line in text.split(b"\n") if line.startswith((b"step:", b"s:"))}


def read_training(text: bytes) -> list[tuple[int, float, float | None]]:
    """Returns (step, training loss, training time in s or None) of a run's lines, of each step once."""
    times: dict[int, float] = {}
    losses: dict[int, float] = {}
    if b" train_loss:" in text:
        for step, loss, time, unit, late_loss, at in TRAINING.findall(text):
            times[int(step)] = float(time) / (1000 if unit == b"ms" else 1)
            if loss or late_loss:
                losses[int(at or step)] = float(loss or late_loss)
    else:
        losses = {int(update) + 1: float(loss) for update, loss in LLMC_TRAINING.findall(text)}
    return [(step, loss, times.get(step)) for step, loss in losses.items()]


def read_closing(text: bytes, run: Run) -> None:
    """Reads the lines after a log's last step."""
    for m in PEAK.finditer(text):
        run.peak_mem_mib = int(m[1])
    for m in PER_BYTE.finditer(text):
        run.per_byte = float(m[1])
    for m in EPOCHS.finditer(text):
        run.epochs = int(m[1])
    run.closed |= bool(COMPLETE.search(text))


def read_header(text: bytes, path: str, before: Header) -> Header:
    """Reads the lines before a run. Returns `before`, the previous run's header, if there are none."""
    versions, commits = TORCH.findall(text), COMMIT.findall(text)
    config, data, resumed = CONFIG.findall(text), DATA.findall(text), RESUMED.findall(text)
    if not (versions or config or data or resumed):
        return before
    torch, device, world_size = versions[-1] if versions else (b"", b"", b"")
    devices = Counter({device: int(world_size)}) if device else Counter(dict(GPU.findall(text)).values())
    try:
        settings = json.loads(config[-1]) if config else None
    except ValueError:
        raise UserError(f"{path}: its config line is not JSON") from None
    return Header(
        torch=decode(torch) or None,
        hardware=" + ".join(f"{n} x {decode(name)}" for name, n in devices.items()) or None,
        processes=int(world_size) if world_size else None,
        commit=decode(b"".join(commits[-1])) if commits else None,
        config=settings,
        data=decode(data[-1]) if data else None,
        resumed=(decode(resumed[-1][0]), int(resumed[-1][1])) if resumed else None,
    )


def decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


# ============================================================================================================
# Groups.
# ============================================================================================================

# What should be equal in a group and between groups: (name, a run's value, None if its log has none).
ALIKE = (
    ("hardware", lambda r: r.header.hardware),
    ("numbers of processes", lambda r: r.header.processes),
    ("data fingerprints", lambda r: r.header.data),
    ("validation sizes", lambda r: r.header.validation),
)


@dataclass
class Group:
    """Holds runs that are compared as one sample, and warnings about them."""

    label: str
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    target: float = DEFAULT_TARGET

    @property
    def counted(self) -> list[Run]:
        return [r for r in self.runs if r.counted]

    @property
    def losses(self) -> list[float]:
        return [r.val_loss for r in self.counted]

    @property
    def times(self) -> list[float]:
        times = (r.train_time_s for r in self.counted)
        return [time for time in times if time is not None and math.isfinite(time)]

    def distinct(self, value) -> list:
        """Returns the distinct values of value(run) over the counted runs, sorted, without None."""
        return sorted({value(r) for r in self.counted} - {None})


def split_label(argument: str) -> tuple[str | None, str]:
    """Splits "new=a.txt" into label and path. The label is None if files have that name, with a "="."""
    label, equals, path = argument.partition("=")
    labelled = equals and label and not Path(argument).exists() and not glob.glob(argument)
    return (label, path) if labelled else (None, argument)


def find_logs(path: str) -> list[list[Path]]:
    """Returns lists of files to try in order: `path` means the first list that has runs."""
    folder = Path(path)
    if folder.is_dir():
        next(os.scandir(folder), None)  # raises for an unreadable folder, unlike rglob
        logs = (p for p in folder.rglob("*") if p.suffix in SUFFIXES)
        files = sorted(p for p in logs if p.is_file() or p.is_symlink())
        deeper = [p for p in files if p.parent != folder and folder / "baseline" not in p.parents]
        return [[p for p in files if p.parent == folder], deeper]
    if folder.exists():
        return [[folder]]
    matches = list(map(Path, sorted(glob.glob(path, recursive=True))))
    if not matches:
        raise UserError(f"{path}: no such file or folder, and no file matches it")
    of_matches = (find_logs(str(match))[0] if match.is_dir() else [match] for match in matches)
    return [[file for files in of_matches for file in files]]


def read_groups(arguments: list[str], target: float | None) -> tuple[list[Group], list[str]]:
    """Returns the groups, in the arguments' order, and a line for each thing that could not be read."""
    groups: dict[str, Group] = {}
    errors: list[str] = []
    for argument in arguments:
        try:
            label, path = split_label(argument)
            if label is None:
                label = name_of(path)
                label = path if label in groups else label  # two folders of one name are two groups
            group = groups.setdefault(label, Group(label))
            errors += read_into(group, path)
        except UserError as e:
            errors.append(str(e))
        except OSError as e:
            errors.append(f"{argument}: cannot be read: {e.strerror}")
            groups.setdefault(argument, Group(argument))
    for group in groups.values():
        drop_repeats(group)
        join_resumed(group)
        choose_target(group, target)
        warn(group)
    return list(groups.values()), errors


def name_of(path: str) -> str:
    if Path(path).is_dir():
        return Path(path).resolve().name
    return Path(path).stem if Path(path).exists() else path


def read_into(group: Group, path: str) -> list[str]:
    """Adds the runs of `path` to the group. Returns what could not be read."""
    errors = []
    for files in find_logs(path):
        results = read_all(list(map(str, files)))
        errors += [error for _, _, error in results if error]
        if any(runs for runs, _, _ in results):
            for file, (runs, notes, error) in zip(files, results):
                group.runs += runs
                group.notes += notes
                if not (runs or error):
                    group.notes.append(f"{file}: holds no run")
            return errors
    example = "step:1480/1480 val_loss:3.2785 train_time:95168ms step_avg:64.30ms"
    return errors or [f"{path}: holds no run: no line such as '{example}'"]


def read_all(files: list[str]) -> list[tuple[list[Run], list[str], str | None]]:
    if len(files) < 100:  # less work than starting processes
        return list(map(try_read, files))
    with ProcessPoolExecutor() as pool:
        return list(pool.map(try_read, files, chunksize=16))


def try_read(file: str) -> tuple[list[Run], list[str], str | None]:
    """Returns (runs, notes, why the file could not be read)."""
    try:
        return *read_log(file), None
    except OSError as e:
        return [], [], f"{file}: cannot be read: {e.strerror}"
    except UserError as e:
        return [], [], str(e)


def drop_repeats(group: Group) -> None:
    kept: dict[str, Run] = {}
    for run in group.runs:
        same = kept.setdefault(run.identity, run)
        if same is run:
            continue
        if same.header.torch is None and run.header.torch is not None:  # `same` is the screen's copy
            kept[run.identity], run, same = run, same, run
        group.notes.append(f"{run.name}: dropped, the same run as {same.name}")
    group.runs = list(kept.values())


def join_resumed(group: Group) -> None:
    """Keeps one of the logs of a run, RUN.txt and RUN.fromSTEP.txt of those that resumed it: the furthest.

    The others may end in a validation too, and would count as more runs. The curves become the whole run's.
    Loss and time are the whole run's already, since a resumed clock continues.
    """
    logs_of: dict[str, list[Run]] = {run.header.resumed[0]: [] for run in group.runs if run.header.resumed}
    for run in group.runs:
        name = run.header.resumed[0] if run.header.resumed else Path(run.path).stem
        if name in logs_of:
            logs_of[name].append(run)
    for logs in logs_of.values():
        kept = max(logs, key=lambda r: (r.final_step, r.counted, r.after))
        others = [r for r in logs if r is not kept]
        if others:
            names = ", ".join(r.name for r in others)
            group.notes.append(f"{kept.name}: stopped and resumed, one run with {names}, and taken for it")
        earlier = sorted((r for r in others if r.after < kept.after), key=lambda r: (r.after, r.final_step))
        if kept.after and not (earlier and earlier[0].after == 0):
            missing = "the log of the run's beginning is not here"
            group.notes.append(f"{kept.name}: resumed after step {kept.after}; {missing}")
        curve: list[list] = []
        training: list[tuple] = []
        for run in [*earlier, kept]:
            curve = [point for point in curve if point[0] < run.after] + run.curve
            training = [point for point in training if point[0] <= run.after] + run.training
        kept.curve, kept.training = curve, training
        group.runs = [r for r in group.runs if not any(r is other for other in others)]


def choose_target(group: Group, target: float | None) -> None:
    named = {(r.header.config or {}).get("target") for r in group.runs}
    targets = sorted(t for t in named if isinstance(t, (int, float)))
    group.target = target if target is not None else targets[0] if targets else DEFAULT_TARGET
    if target is None and len(targets) > 1:
        group.notes.append(f"mixed targets: {' '.join(map(str, targets))}; the lowest is used")


def warn(group: Group) -> None:
    """Adds notes on runs that are incomplete, on what differs within the group, and on its statistics."""
    notes = group.notes
    for run in group.runs:
        total = "an unknown number" if run.total_steps is None else run.total_steps
        if run.epochs > 1:
            notes.append(f"{run.name}: trained on its data in {run.epochs} epochs, left out")
        elif not run.counted:
            reached = f"step {run.final_step} of {total} was logged but not validated"
            notes.append(f"{run.name}: incomplete, left out: {reached}")
        elif run.final_step != run.total_steps:
            notes.append(f"{run.name}: stopped at step {run.final_step} of {total}, counted")
        elif not run.complete:
            notes.append(f"{run.name}: has no line 'complete: yes', counted")
        if run.counted and not math.isfinite(run.val_loss):
            notes.append(f"{run.name}: its final loss is {run.val_loss}, counted")
    for what, value in (("steps", lambda r: r.final_step), *ALIKE):
        values = group.distinct(value)
        if len(values) > 1:
            notes.append(f"mixed {what}: {'; '.join(map(str, values))}")
    seeds: dict[int, list[str]] = {}
    for run in group.counted:
        if isinstance(seed := (run.header.config or {}).get("seed"), int):
            seeds.setdefault(seed, []).append(run.name)
    for seed, names in sorted(seeds.items()):
        if len(names) > 1:
            first = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            notes.append(f"{len(names)} runs of seed {seed}, which are not independent: {first}")
    if group.times and len(group.times) < len(group.counted):
        notes.append(f"only {len(group.times)} of {len(group.counted)} runs have a time")
    if len(group.losses) > 1 and min(group.losses) == max(group.losses):
        cause = "as with one seed on a deterministic machine"
        notes.append(f"all losses are equal, {cause}: no t-test is possible")


def unlike_groups(groups: list[Group]) -> list[str]:
    """Names what makes times or losses of these groups no comparison: other machines, other data."""
    kinds = [(what, [group.distinct(value) for group in groups]) for what, value in ALIKE]
    return [
        what
        for what, values in kinds
        if what in ("hardware", "data fingerprints")
        and any(v and values[0] and v != values[0] for v in values)
    ]


def warn_between(group: Group, base: Group) -> list[str]:
    """Returns notes on what should be equal in both groups, and is not."""
    notes = []
    for what, value in ALIKE:
        here, there = group.distinct(value), base.distinct(value)
        if here and there and here != there:
            notes.append(f"not the same {what} as {base.label}")
    if group.target != base.target:
        notes.append(f"its target is {group.target:g}, that of {base.label} {base.target:g}")
    shared = {r.identity for r in group.counted} & {r.identity for r in base.counted}
    if shared:
        notes.append(f"{len(shared)} of its runs are also in {base.label}: the groups are not independent")
    return notes


# ============================================================================================================
# Statistics. What is not defined is None: a mean of nothing, a spread of one value, a test without spread.
# ============================================================================================================


def mean_and_sd(values: list[float]) -> tuple[float | None, float | None]:
    """Returns the mean and the sample standard deviation (ddof 1)."""
    import numpy as np

    mean = finite(np.mean(values)) if values else None
    return mean, finite(np.std(values, ddof=1)) if mean is not None and len(values) > 1 else None


def p_below(values: list[float], target: float) -> float | None:
    """Returns the one-sided p of the one-sample t-test whose alternative is a mean below the target."""
    if len(values) < 2 or min(values) == max(values):
        return None
    from scipy.stats import ttest_1samp

    return finite(ttest_1samp(values, target, alternative="less").pvalue)


def welch(values: list[float], base: list[float]) -> tuple[float | None, float | None, float | None]:
    """Returns (t, degrees of freedom, two-sided p) of Welch's test; t > 0 if the mean of values is larger."""
    if min(len(values), len(base)) < 2 or (min(values) == max(values) and min(base) == max(base)):
        return None, None, None
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():  # scipy warns if one of the two does not vary
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ttest_ind(values, base, equal_var=False)
    return finite(result.statistic), finite(result.df), finite(result.pvalue)


def finite(x) -> float | None:
    return float(x) if x is not None and math.isfinite(x) else None


def summarize(group: Group) -> dict:
    loss_mean, loss_std = mean_and_sd(group.losses)
    time_mean, time_std = mean_and_sd(group.times)
    p = p_below(group.losses, group.target)
    return {
        "label": group.label,
        "n": len(group.counted),
        "steps": group.distinct(lambda r: r.final_step),
        "loss_mean": loss_mean,
        "loss_std": loss_std,
        "time_mean_s": time_mean,
        "time_std_s": time_std,
        "p_target": p,
        "meets_target": p is not None and p < ALPHA,
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


def compare(group: Group, base: Group) -> dict:
    out: dict[str, Any] = {"group": group.label, "baseline": base.label}
    for what, unit, here, there in (
        ("time", "_s", group.times, base.times),
        ("loss", "", group.losses, base.losses),
    ):
        mean, base_mean = mean_and_sd(here)[0], mean_and_sd(there)[0]
        t, df, p = welch(here, there)
        out |= {
            f"{what}_delta{unit}": None if mean is None or base_mean is None else mean - base_mean,
            f"{what}_t": t,
            f"{what}_df": df,
            f"{what}_p": p,
        }
    return out


# ============================================================================================================
# Reports.
# ============================================================================================================


def show(x: float | None, spec: str = ".4f") -> str:
    return "-" if x is None else format(x, spec)


def show_p(p: float | None) -> str:
    return "-" if p is None else f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def show_all(values: list, spec: str = "") -> str:
    more = f" … ({len(values)} in all)" if len(values) > SHOWN else ""
    return " ".join(format(v, spec) for v in values[:SHOWN]) + more if values else "-"


def verdict(group: Group, summary: dict) -> str:
    if summary["meets_target"]:
        return f"meets the target {group.target:g} (p < {ALPHA:g})"
    if summary["loss_mean"] is not None and summary["loss_mean"] <= group.target:
        reason = f"the mean does, but p is not < {ALPHA:g}; needs more runs"
        return f"not shown to meet the target {group.target:g}: {reason}"
    return f"does not meet the target {group.target:g}"


def rows(group: Group, summary: dict) -> list[tuple[str, str]]:
    """Returns (name, value) of each line in a group's table."""
    if not group.counted:
        return [("runs (n)", "0")]
    per_byte, _ = mean_and_sd([r.per_byte for r in group.counted if r.per_byte is not None])
    peaks = group.distinct(lambda r: r.peak_mem_mib)
    peak_range = " to ".join(map(str, peaks[:1] + peaks[1:][-1:]))
    mean, sd, time, time_sd = (summary[k] for k in ("loss_mean", "loss_std", "time_mean_s", "time_std_s"))
    return [
        ("runs (n)", str(summary["n"])),
        ("steps", show_all(summary["steps"])),
        ("loss: mean, sd", f"{show(mean)}, {show(sd)}"),
        *([("loss per byte", show(per_byte))] if per_byte is not None else []),
        ("time, s: mean, sd", f"{show(time, '.3f')}, {show(time_sd, '.3f')}"),
        ("peak memory", f"{peak_range} MiB" if peaks else "-"),
        ("hardware", "; ".join(group.distinct(lambda r: r.header.hardware)) or "-"),
        ("torch", "; ".join(group.distinct(lambda r: r.header.torch)) or "-"),
        ("p (mean < target)", show_p(summary["p_target"])),
        ("verdict", verdict(group, summary)),
        ("losses", show_all(group.losses, ".4f")),
        ("times, s", show_all(group.times, ".3f")),
    ]


COMPARISON = ["", "difference", "Welch t", "df", "p (two-sided)"]


def comparison_rows(result: dict, base: dict, comparable: bool) -> list[list[str]]:
    delta, reference = result["time_delta_s"], base["time_mean_s"]
    percent = f" ({100 * delta / reference:+.2f} %)" if comparable and delta is not None and reference else ""
    deltas = {
        "time": "-" if delta is None else f"{delta:+.3f} s{percent}",
        "loss": show(result["loss_delta"], "+.4f"),
    }
    out = []
    for what, difference in deltas.items():
        t, df = show(result[f"{what}_t"], ".2f"), show(result[f"{what}_df"], ".1f")
        out.append([what, difference, t, df, show_p(result[f"{what}_p"])])
    return out


def print_warnings(groups: list[Group]) -> None:
    for group in groups:
        for note in group.notes:
            print(f"compare.py: warning: {group.label}: {note}", file=sys.stderr)


def text_report(
    groups: list[Group], summaries: list[dict], comparisons: list[dict], anyway: bool = False
) -> str:
    unlike = [] if anyway else unlike_groups(groups)
    out = []
    if unlike:
        out += [f"warning: the groups differ in {' and '.join(unlike)}; --anyway prints percentages", ""]
    for group, summary in zip(groups, summaries):
        out += [
            group.label,
            *(f"  {name:18} {value}" for name, value in rows(group, summary)),
            *(f"  warning: {note}" for note in group.notes),
            "",
        ]
    for result in comparisons:
        out.append(f"{result['group']} against {result['baseline']}")
        for line in [COMPARISON, *comparison_rows(result, summaries[0], not unlike)]:
            cells = (f"{cell:{width}}" for cell, width in zip(line, (6, 20, 9, 6, 13)))
            out.append("  " + "  ".join(cells).rstrip())
        out.append("")
    return "\n".join(out).rstrip()


def begin_readme(folder: Path, table: str) -> str:
    """Begins a record's README.md with the command of its runs and their table. Says what was done."""
    path = folder / "README.md"
    if path.exists():
        return f"{path} was there, and is left as it is"
    command = f"    {os.environ['RUN_COMMAND']}\n\n" if "RUN_COMMAND" in os.environ else ""
    printed = "".join(f"    {line}".rstrip() + "\n" for line in table.splitlines())
    path.write_text(
        f"# {folder.name.partition('_')[2]}\n\n"
        f"(What was changed, against which record, and why.)\n\n{command}"
        f"What `python records/compare.py {folder}` prints:\n\n{printed}",
        encoding="utf-8",
    )
    return f"{path} begins with this table; say in it what was changed"


def markdown_table(head: list[str], body: list[list[str]]) -> list[str]:
    """Returns the table's lines, and an empty one."""
    cells = [[c.replace("|", "\\|") for c in line] for line in [head, *body]]
    cells.insert(1, ["---"] * len(head))
    return ["| " + " | ".join(line) + " |" for line in cells] + [""]


Line = tuple[str, float]  # a constant to draw: label, loss
Picture = tuple[list[Group], list[Line]]


def draw_curves(
    groups: list[Group], lines: list[Line], path: str | Path, over: Sequence[int] = (0, 1)
) -> None:
    """Writes a PNG of losses over steps (0) and time (1), and of the constants, with `curves_mark` in it."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, NullLocator

    size = (10 if len(over) > 1 else 8, 4.6)
    fig, axes = plt.subplots(1, len(over), figsize=size, sharey=True, squeeze=False, layout="constrained")
    axes = axes[0]
    levels = [("target", target) for target in sorted({g.target for g in groups})] + lines
    thick: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4}
    thin: dict[str, Any] = {"linewidth": 0.8}
    shown, handles = [level for _, level in levels], []
    for number, group in enumerate(groups):
        color, summary = f"C{number}", summarize(group)
        # matplotlib reads $ as mathematics, and hides labels that begin with _ from the legend.
        name = group.label.replace("$", r"\$").lstrip("_") + f" (n={summary['n']})"
        name += f": {show(summary['loss_mean'])}"
        name += f" after {summary['time_mean_s']:.1f} s" if group.times else ""
        handles.append(Line2D([], [], color=color, linewidth=2, label=name))
        for curve, style in ((mean_curve(group), thick), (training_curve(group), thin)):
            points = [point for point in curve if math.isfinite(point[2])]
            shown += [point[2] for point in points if point[0] >= STEEP * points[-1][0]]
            for column, ax in zip(over, axes):
                drawn = [(point[column], *point[2:]) for point in points if math.isfinite(point[column])]
                if drawn:
                    ax.errorbar(*zip(*drawn), color=color, **style)  # x, loss, sd of validations
    for column, ax in zip(over, axes):
        ax.set(
            xlabel=("step", "training time, s")[column],
            xlim=(0, None),
            title="" if ax.lines else "none logged",
        )
        for _, level in levels:
            ax.axhline(level, color="0.4", linestyle="--", linewidth=1)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    for name, level in levels:
        right = axes[-1].get_yaxis_transform()
        axes[-1].text(1.01, level, f"{name} {level:g}".replace("$", r"\$"), transform=right, va="center")
    axes[0].set(ylabel="loss, nats per token", yscale="log", ylim=(0.98 * min(shown), 1.02 * max(shown)))
    ticks = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
    axes[0].yaxis.set(major_locator=ticks, major_formatter="{x:g}", minor_locator=NullLocator())
    fig.legend(handles=handles, loc="outside upper left")
    kinds = [
        Line2D([], [], color="0.4", label="validation", **thick),
        Line2D([], [], color="0.4", label="training, smoothed, if logged", **thin),
    ]
    fig.legend(handles=kinds, loc="outside upper right")
    fig.savefig(path, format="png", dpi=100, metadata={"Source": curves_mark(groups, lines)})
    plt.close(fig)


def curves_mark(groups: list[Group], lines: list[Line]) -> str:
    """Returns a hash of what is drawn. (A picture's bytes vary with matplotlib's version.)"""
    inputs = [(g.label, g.target, [(r.curve, r.training) for r in g.counted]) for g in groups]
    return "curves " + hashlib.sha256(repr((inputs, lines)).encode()).hexdigest()[:16]


def is_current(path: Path, mark: str) -> bool:
    return path.exists() and mark.encode() in path.read_bytes()


def mean_curve(group: Group) -> list[tuple[int, float, float, float]]:
    """Returns (step, mean time in s, mean loss, sd of the loss) at the steps that every run validated.

    A mean over some of the runs would jump where one drops out. The time is nan where a run has none.
    """
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in group.counted:
        for step, loss, time in run.curve:
            # Formats that restart the clock near step 10 may show more time before it than at the end.
            known = time is not None and time <= run.train_time_s
            by_step.setdefault(step, []).append((time if known else math.nan, loss))
    points = []
    for step, values in sorted(by_step.items()):
        if len(values) == len(group.counted):
            times, losses = map(list, zip(*values))
            mean_time, mean_loss = sum(times) / len(times), sum(losses) / len(losses)
            points.append((step, mean_time, mean_loss, mean_and_sd(losses)[1] or 0.0))
    return points


def training_curve(group: Group) -> list[tuple[int, float, float]]:
    """Returns (step, mean time in s, mean training loss, smoothed) at each step that all runs' logs cover.

    Smoothed: the mean of the covered steps from step - w to step + w, where 2 w is SMOOTHED of the last step.
    """
    import numpy as np

    logged = [[point for point in run.training if math.isfinite(point[1])] for run in group.counted]
    if not logged or not all(logged):
        return []
    # On a GPU some losses are not logged, those that arrive together with a later one: they are interpolated.
    steps = np.arange(max(run[0][0] for run in logged), min(run[-1][0] for run in logged) + 1)
    times, losses = np.zeros(len(steps)), np.zeros(len(steps))
    for run in logged:
        at, loss, time = np.array(run, float).T
        time[time > np.fmin.accumulate(time[::-1])[::-1]] = math.nan  # before the clock restarted
        times += np.interp(steps, at, time) / len(logged)
        losses += np.interp(steps, at, loss) / len(logged)
    w, i = round(SMOOTHED * steps.max(initial=0) / 2), np.arange(len(steps))
    first, end = np.maximum(i - w, 0), np.minimum(i + w + 1, len(steps))
    sums = np.concatenate([[0], losses.cumsum()])
    return list(zip(steps.tolist(), times.tolist(), ((sums[end] - sums[first]) / (end - first)).tolist()))


def diff_report(path_a: str, path_b: str) -> str:
    """Reports what changed in script and config from log A to log B."""
    sources, configs = [], []
    for path in (path_a, path_b):
        try:
            text = b"\n" + Path(path).read_bytes() + b"\n"
        except OSError as e:
            raise UserError(f"{path}: cannot be read: {e.strerror}") from None
        source_end = SOURCE_END.search(text) or RULE.search(text)
        if source_end is None:
            raise UserError(f"{path}: holds no source: no line of = after it")
        sources.append(decode(text[1 : source_end.start() + 1]).splitlines())
        configs.append(flatten(read_header(text[source_end.start() :], path, Header()).config))
    changes = list(difflib.unified_diff(sources[0], sources[1], path_a, path_b, lineterm=""))
    (a, b), settings = configs, []
    for key in a | b:
        before, after = a.get(key, "absent"), b.get(key, "absent")
        if before != after:
            settings.append(f"  {key}: {before} -> {after}")
    settings = settings or ["  no difference" if a or b else "  not in these logs"]
    return "\n".join(["config", *settings, "script", *(changes or ["  no difference"])])


def flatten(config, name: str = "") -> dict[str, str]:
    """Flattens nested JSON to {"layers.3.window": "long", ...}, so that a changed cell is one line."""
    if isinstance(config, (dict, list)) and config:
        items = config.items() if isinstance(config, dict) else enumerate(config)
        return {k: v for key, value in items for k, v in flatten(value, f"{name}.{key}".lstrip(".")).items()}
    return {name: json.dumps(config)} if name else {}


# ============================================================================================================
# What --update makes: what is between the lines <!-- NAME --> and <!-- end of NAME --> of records/README.md,
# and pictures, which keep a mark of what was drawn, so that they are drawn again only if that changes.
# ============================================================================================================

HERE = Path(__file__).resolve().parent
TRACKS = ("cpu", "gpt2-small")  # those with records
DATED = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*"
RECORD_COLUMNS = (
    *("date", "record", "runs", "loss, mean", "p (mean < target)", "time, mean", "against its baseline"),
    *("machine", "commit"),
)
# README.md's pictures in bench/curves: {label: log}, then target and constants, which bench/ngram.py printed.
# They are single runs that validated often, by --set val_every=20 and --val-every: training is the same.
PICTURES = {
    "curves.png": {"plain GPT with AdamW": "plain_gpt.txt", "cpu preset": "cpu.txt"},
    "ngrams.png": {"with n-grams, 311 steps": "ngrams.txt", "with bigrams, 431 steps": "no_ngrams.txt"},
}
PICTURES_TARGET, PICTURES_LINES = 1.07, [("4-gram", 1.469), ("5-gram", 1.350)]
# Public records that history.png names, and the name's place: points right of and above the mark.
NAMED = {
    1: ("llm.c", 8, -3),
    3: ("Muon", 8, 2),
    12: ("FlexAttention", 8, 2),
    21: ("timed by other rules from here on", 4, 12),
    53: ("several next tokens", 8, 2),
    92: ("sampled softmax, ANVIL; the `record` preset is like it, but not timed yet", -8, -4),
}


def read_records(errors: list[str]) -> dict[Path, list[Group]]:
    """Returns each record's group, and its baseline's, by folder. Adds what could not be read to `errors`."""
    records = {}
    for folder in sorted(p for track in TRACKS for p in HERE.glob(f"{track}/{DATED}") if p.is_dir()):
        baseline = [f"baseline={folder / 'baseline'}"] if (folder / "baseline").is_dir() else []
        groups, unreadable = read_groups([str(folder), *baseline], None)
        errors += unreadable
        for base in groups[1:]:
            base.notes += warn_between(base, groups[0])
        print_warnings(groups)
        if groups[0].counted:
            records[folder] = groups
        else:
            print(f"compare.py: warning: {folder}: left out, holds no finished run", file=sys.stderr)
    return records


def record_tables(records: dict[Path, list[Group]]) -> str:
    """Returns a Markdown table of each track's records."""
    out = []
    for track in TRACKS:
        body = [record_row(track, p.name, groups) for p, groups in records.items() if p.parent.name == track]
        out += [f"### `{track}`", ""]
        out += markdown_table(list(RECORD_COLUMNS), body) if body else ["None yet.", ""]
    return "\n".join(out)


def record_row(track: str, folder: str, groups: list[Group]) -> list[str]:
    """Returns the cells of a record, groups[0], compared with its baseline, groups[1], if it has one."""
    day, name = folder.split("_", 1)
    record, *baseline = groups
    summary, change = summarize(record), "-"
    for base in baseline:
        result = compare(record, base)
        if result["time_delta_s"] is not None:
            percent = 100 * result["time_delta_s"] / summarize(base)["time_mean_s"]
            change = f"{percent:+.1f} %, p {show_p(result['time_p'])}"
    machines = (re.sub(r" \(.*?\)", "", machine) for machine in record.distinct(lambda r: r.header.hardware))
    commits = record.distinct(lambda r: r.header.commit)
    return [
        day,
        f"[{name}]({track}/{folder})",
        str(summary["n"]),
        show(summary["loss_mean"]),
        show_p(summary["p_target"]),
        show(summary["time_mean_s"], ".1f") + " s",
        change,
        "; ".join(machines) or "-",
        "; ".join(commits) or "-",
    ]


def read_history() -> list[dict[str, str]]:
    """Returns the public records, in order. A repeated number is the same record, timed again."""
    path = HERE / "history.csv"
    columns = ["number", "minutes", "date", "change", "source"]
    lines = list(csv.reader(path.read_text(encoding="utf-8", errors="replace").splitlines()))
    if lines[:1] != [columns] or len(lines) == 1:
        raise UserError(f"{path}: needs the columns {','.join(columns)} and a line for each record")
    for i, line in enumerate(lines[1:], 2):
        try:
            number, minutes, day, *texts = line
            date.fromisoformat(day)
            valid = int(number) > 0 and 0 < float(minutes) < math.inf and len(texts) == 2 and all(texts)
        except ValueError:
            valid = False
        if not valid:
            raise UserError(f"{path}, line {i}: not a record's {', '.join(columns)}")
    return [dict(zip(columns, line)) for line in lines[1:]]


def history_table(history: list[dict[str, str]]) -> str:
    """Returns Markdown: which records there are, and a table of them."""
    found = {int(row["number"]) for row in history}
    missing = ", ".join(str(n) for n in range(1, max(found)) if n not in found)
    head, body = ["#", "minutes", "date", "change", "source"], [list(row.values()) for row in history]
    summary = f"Records 1 to {max(found)}; missing: {missing or 'none'}."
    return "\n".join([summary, "", *markdown_table(head, body)])


def plot_history(history: list[dict[str, str]], path: Path, mark: str) -> None:
    """Plots the public records' times over their dates. Stores `mark` in the file, for `is_current`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    days: list[Any] = [date.fromisoformat(row["date"]) for row in history]
    times = [60 * float(row["minutes"]) for row in history]
    numbers = [int(row["number"]) for row in history]
    fig, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    ax.step(days, times, "C0", where="post", linewidth=1)
    for i, (day, seconds, number) in enumerate(zip(days, times, numbers)):
        again = number in numbers[:i]
        ax.plot(day, seconds, "C0o", markersize=4, markerfacecolor="white" if again else "C0")
        if number in NAMED and not again:
            name, right, above = NAMED[number]
            text, align = f"{number}: {name}", "right" if right < 0 else "left"
            points: dict[str, Any] = {"xytext": (right, above), "textcoords": "offset points"}
            ax.annotate(text, (day, seconds), fontsize=9, horizontalalignment=align, **points)
    ax.set_yscale("log")
    minutes = [0.5, 1, 2, 3, 5, 10, 20, 45]
    labels = [f"{m:g} min" if m >= 1 else f"{60 * m:.0f} s" for m in minutes]
    ax.set_yticks([60 * m for m in minutes], labels)
    ax.minorticks_off()
    ax.set(ylim=(30, 3600), title="Public NanoGPT speedrun: time to a validation loss of 3.28 on 8 H100s")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, format="png", dpi=100, metadata={"Source": mark})
    plt.close(fig)


def history_mark() -> str:
    drawn = (HERE / "history.csv").read_bytes() + repr(NAMED).encode()
    return "history.csv " + hashlib.sha256(drawn).hexdigest()[:16]


def readme_parts(records: dict[Path, list[Group]]) -> dict[str, str]:
    """Returns the generated parts of records/README.md, by name."""
    return {"records": record_tables(records), "history": history_table(read_history())}


def find_pictures(records: dict[Path, list[Group]], errors: list[str]) -> dict[Path, Picture]:
    """Returns what to draw in each record's picture and in README.md's, by file. Adds to `errors`."""
    pictures: dict[Path, Picture] = {}
    for folder, (record, *baseline) in records.items():
        pictures[folder / "curves.png"] = [*baseline, record], []
    folder = HERE.parent / "bench" / "curves"
    for name, logs in PICTURES.items():
        paths = [f"{label}={folder / log}" for label, log in logs.items()]
        groups, unreadable = read_groups(paths, PICTURES_TARGET)
        errors += unreadable
        pictures[folder / name] = groups, PICTURES_LINES
    return pictures


def update_files(parts: dict[str, str], pictures: dict[Path, Picture]) -> None:
    """Writes the parts into records/README.md, and draws the pictures whose marks differ."""
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise UserError(f"{path}: needs one line '{start.strip()}' and after it one '{end.strip()}'")
        text = text[: text.index(start) + len(start)] + part + text[text.index(end) :]
    path.write_text(text, encoding="utf-8")
    if not is_current(HERE / "history.png", history_mark()):
        plot_history(read_history(), HERE / "history.png", history_mark())
    for path, (groups, lines) in pictures.items():
        if not is_current(path, curves_mark(groups, lines)):
            draw_curves(groups, lines, path, over=(1,) if path.name == "curves.png" and lines else (0, 1))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    paths_help = "log, folder or glob; the first is the baseline"
    add("paths", nargs="*", metavar="[LABEL=]PATH", help=paths_help)
    target_help = f"mean loss to reach (default: the logs' config, else {DEFAULT_TARGET})"
    add("--target", type=float, help=target_help)
    add("--json", action="store_true", help="print one JSON object; warnings go to stderr")
    add("--curves", metavar="FILE.png", help="draw losses over steps and over training time")
    add("--anyway", action="store_true", help="print percentages though machines or data differ")
    diff_help = "what changed in script and config from log A to log B"
    add("--diff", nargs=2, metavar=("A", "B"), help=diff_help)
    begin_help = "print the table of a new record, and begin its README.md"
    add("--begin", type=Path, metavar="FOLDER", help=begin_help)
    add("--table", action="store_true", help="print the tables of records/README.md")
    update_help = "write them there, and draw the pictures of records and of README.md"
    add("--update", action="store_true", help=update_help)
    args = parser.parse_intermixed_args(argv)
    if sum(map(bool, (args.paths, args.diff, args.begin, args.table, args.update))) != 1:
        parser.error("give logs to compare, or one of --diff, --begin, --table and --update")
    if args.target is not None and not math.isfinite(args.target):
        parser.error("--target: not a finite number")

    try:
        if args.diff:
            print(diff_report(*args.diff))
            return 0
        if args.table or args.update:
            return make_tables(args.update)
        groups, errors = read_groups(args.paths or [str(args.begin)], args.target)
        base = groups[0]
        for group in groups[1:]:
            group.notes += warn_between(group, base)
        summaries = [summarize(g) for g in groups]
        comparisons = [compare(g, base) for g in groups[1:]]
        if args.json:
            print(json.dumps({"groups": summaries, "comparisons": comparisons}, indent=1, allow_nan=False))
            print_warnings(groups)
        else:
            report = text_report(groups, summaries, comparisons, args.anyway)
            print(report)
            if args.begin and not errors:
                print(begin_readme(args.begin, report))
        if args.curves:
            try:
                draw_curves(groups, [], args.curves)
            except OSError as e:
                errors.append(f"--curves {args.curves}: cannot be written: {e.strerror}")
    except UserError as e:
        errors = [str(e)]
    except ModuleNotFoundError as e:
        if e.name.split(".")[0] not in ("numpy", "scipy", "matplotlib"):
            raise
        errors = [f"needs {e.name.split('.')[0]}, which this Python lacks: pip install -r requirements.txt"]
    return exit_code(errors)


def exit_code(errors: list[str]) -> int:
    """Prints the errors. Returns the exit code."""
    for error in errors:
        print(f"compare.py: {error}", file=sys.stderr)
    return 2 if errors else 0


def make_tables(update: bool) -> int:
    """Runs --table or --update, which writes nothing if something could not be read."""
    errors: list[str] = []
    try:
        records = read_records(errors)
        parts = readme_parts(records)
        if not update:
            print("\n".join(parts.values()).rstrip())
        else:
            pictures = find_pictures(records, errors)
            if not errors:
                update_files(parts, pictures)
    except OSError as e:
        errors.append(f"{e.filename}: {e.strerror}")
    return exit_code(errors)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `compare.py ... | head` ends quietly
    sys.exit(main())
