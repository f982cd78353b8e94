#!/usr/bin/env python3
"""Compare groups of speedrun logs: do they meet the target loss, and how do they differ from the first group?

    python records/compare.py [LABEL=]PATH... [--target 3.28] [--json | --markdown] [--plot FILE.png]
    python records/compare.py --diff A B
    python records/compare.py --table | --update

A PATH is a log, a glob, or a folder. A folder stands for the logs directly in it, or, if no run is there, for those in
its sub-folders; so a record's `baseline/` is a group of its own. Each PATH is a group, and PATHs of one LABEL are
one group; the first is the baseline. Reads the logs of train_gpt.py and every format of the public speedrun.
--table prints the tables of records/README.md, --update writes them there.

A run counts when the last step it logged has a validation; its loss and time are that validation's. A run that was stopped
and resumed has several logs, and counts once, as the one that went furthest. A group meets the
target when a one-sided one-sample t-test rejects, at p < 0.01, that its mean loss is not below the target. Groups are compared
by Welch's t-test, two-sided. The exit code is 2 if something could not be read, and everything else is still reported.

    Reading a log         read_log: bytes -> runs
    Groups                find and read the logs, drop repeats, warn
    Statistics            scipy's tests
    Reports               text, Markdown, JSON, plot, differences of two logs
    records/README.md     its tables: our records from their logs, the public ones from history.csv, and these drawn
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

SUFFIXES = {".txt", ".log", ".stdout", ".out"}  # what counts as a log in a folder; a file given by name may have any
DEFAULT_TARGET = 3.28  # nats per token: the public speedrun's, where no log's config names another
ALPHA = 0.01           # the public speedrun's level for "the mean loss is below the target"
SHOWN = 24             # values printed one by one before "…"


class BadInput(Exception):
    """One line for the person at the terminal."""


# ======================================================================================================================
# Reading a log. Everything is anchored at the start of a line and asks for numbers, because a log begins with the
# script's source, which holds f-strings that look like the lines sought. Bytes are searched, never a list of lines:
# most of a log is source and training lines.
# ======================================================================================================================

def pattern(text: str) -> re.Pattern[bytes]:
    number = r"[-+]?(?:\d{1,20}\.?\d{0,20}(?:e[-+]?\d{1,4})?|nan|inf)"
    return re.compile((r"\n" + text.replace("NUM", number).replace("INT", r"\d{1,15}")).encode())


STEP = pattern(r"step:(INT)/(INT) ")
VALIDATION = pattern(r"step:(INT)/INT val_loss:(NUM)(?: val_\w+:NUM)* train_time:(NUM)(ms|s) step_avg:NUMms"
                     r"(?: \w+:\S+)*[ \t\r]*(?=\n)")
LLMC_STEP = pattern(r"s:(INT) (tel|trl):NUM")  # the first logs of 2024, written by llm.c: no times, no number of steps
LLMC_VALIDATION = pattern(r"s:(INT) tel:(NUM)[ \t\r]*(?=\n)")
PEAK = pattern(r"peak memory (?:consumption|allocated): (INT) MiB")
PER_BYTE = pattern(r"val_loss_per_byte: (NUM)\s")
COMPLETE = pattern(r"complete: yes\s")
TORCH = pattern(r"Running [Pp]y[Tt]orch (\d\S*) compiled for CUDA \S+(?: on (.+?)\s+with world_size (INT))?[ \t\r]*(?=\n)")
GPU = pattern(r"\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off)\s*\|")  # a row of nvidia-smi's table
CONFIG = pattern(r"config: (\{.*\})")
DATA = pattern(r"data: (.+?)[ \t\r]*(?=\n)")
RESUMED = pattern(r"resumed: (\S+) after step (INT)[ \t\r;\n]")
SOURCE_END = pattern(r"={20,}\s*\nRunning ")  # other rules of `=` vary in number, and stand in the source too
RULE = pattern(r"={100}\s*\n")


@dataclass
class Header:
    """What a log says before its first step."""
    torch: str | None = None
    hardware: str | None = None
    processes: int | None = None
    config: dict | None = None
    data: str | None = None                 # the fingerprint line
    resumed: tuple[str, int] | None = None  # the name of the run that this log goes on with, and after which step

    @property
    def validation(self) -> str | None:
        """How much is validated on, and in which pieces."""
        slices, tokens = (self.config or {}).get("val_slices"), (self.config or {}).get("val_slice_tokens")
        return None if slices is None or tokens is None else f"{slices} x {tokens} tokens"


@dataclass
class Run:
    path: str
    index: int                # in its file
    header: Header
    final_step: int           # the last one logged
    total_steps: int | None   # None: not logged (llm.c), and the run was cut off
    curve: list[list]         # validations: step, loss (nats per token), training time (s) or None
    last_line: bytes
    peak_mem_mib: int | None = None
    per_byte: float | None = None
    closed: bool = False      # `complete: yes` was written

    @property
    def counted(self) -> bool:
        """The last logged step has a validation."""
        return bool(self.curve) and self.curve[-1][0] == self.final_step

    @property
    def val_loss(self) -> float | None:
        return self.curve[-1][1] if self.counted else None

    @property
    def train_time_s(self) -> float | None:
        return self.curve[-1][2] if self.counted else None

    @property
    def complete(self) -> bool:
        """Reached the end; only our own logs, which have a config line, promise a closing line too."""
        return self.counted and self.final_step == self.total_steps and (self.closed or self.header.config is None)

    @property
    def after(self) -> int:
        """The step after which its log begins."""
        return self.header.resumed[1] if self.header.resumed else 0

    @property
    def identity(self) -> str:
        """Equal for two records of one run, though one be the log and the other what the screen showed."""
        return repr((self.curve, self.final_step, None if self.counted else self.last_line))

    @property
    def name(self) -> str:
        return self.path if self.index == 0 else f"{self.path} (run {self.index})"


def read_log(path: str) -> tuple[list[Run], list[str]]:
    """The runs in a file, and remarks about it. Raises OSError, and BadInput for a config line that is not JSON."""
    text = b"\n" + Path(path).read_bytes() + b"\n"
    cut = SOURCE_END.search(text)
    before = cut.start() if cut else 0
    steps, validations = scan(text, before)

    # A run begins where the step number falls or the number of steps changes. The time tells nothing: some formats restart
    # the clock near step 10.
    firsts = [i for i, now in enumerate(steps) if i == 0 or now[1] < steps[i - 1][1] or now[2] != steps[i - 1][2]]
    runs, remarks, header, lines_of_runs = [], [], Header(), []
    for first, next_first in zip(firsts, firsts[1:] + [len(steps)]):
        (start, _, _), (last, final_step, total) = steps[first], steps[next_first - 1]
        end = steps[next_first][0] if next_first < len(steps) else len(text)
        lines = step_lines(text[start:end]) if len(firsts) > 1 else set()
        if any(lines <= earlier for earlier in lines_of_runs):
            remarks.append(f"{path}: a run's lines stand there twice; the repetition is left out")
        else:
            header = read_header(text[before:start + 1], path, header)
            curve = [validation for position, *validation in validations if start <= position < end]
            if total is None and curve and curve[-1][0] == final_step:
                total = final_step  # llm.c does not log it, but validates the last step
            runs.append(Run(path, len(runs), header, final_step, total, curve, text[last + 1:text.index(b"\n", last + 1)]))
            lines_of_runs.append(lines)
        read_closing(text[last:end + 1], runs[-1])  # of a repetition too: it may hold what the run's own end lacks
        before = last
    return runs, remarks


def scan(text: bytes, begin: int) -> tuple[list[tuple[int, int, int | None]], list[tuple[int, int, float, float | None]]]:
    """(position, step, number of steps) of each step line; (position, step, loss, seconds) of each validation."""
    if b"\nstep:" in text:
        return ([(m.start(), int(m[1]), int(m[2])) for m in find_steps(text, begin, STEP, b"\nstep:")],
                [(m.start(), int(m[1]), float(m[2]), float(m[3]) / (1000 if m[4] == b"ms" else 1))
                 for m in VALIDATION.finditer(text, begin)])
    # llm.c's training line s is update s itself, after which s + 1 are done; the other formats log the number done.
    return ([(m.start(), int(m[1]) + (m[2] == b"trl"), None) for m in find_steps(text, begin, LLMC_STEP, b"\ns:")],
            [(m.start(), int(m[1]), float(m[2]), None) for m in LLMC_VALIDATION.finditer(text, begin)])


def find_steps(text: bytes, begin: int, line: re.Pattern[bytes], prefix: bytes) -> list[re.Match[bytes]]:
    """The step lines; of a single run only the first and the last, because a match object for each takes twice the time."""
    numbers = line.findall(text, begin)
    steps = [int(step) for step, _ in numbers]
    if not steps or steps != sorted(steps) or (line is STEP and numbers[0][1] != numbers[-1][1]):
        return list(line.finditer(text, begin))
    at, last = len(text), None
    while last is None:  # the last line with the prefix may have been cut off
        at = text.rfind(prefix, begin, at)
        last = line.match(text, at)
    return [line.search(text, begin), last]


def step_lines(text: bytes) -> set[bytes]:
    return {line.rstrip() for line in text.split(b"\n") if line.startswith((b"step:", b"s:"))}


def read_closing(text: bytes, run: Run) -> None:
    """What a log says after its last step."""
    for m in PEAK.finditer(text):
        run.peak_mem_mib = int(m[1])
    for m in PER_BYTE.finditer(text):
        run.per_byte = float(m[1])
    run.closed |= bool(COMPLETE.search(text))


def read_header(text: bytes, path: str, before: Header) -> Header:
    """From the lines before a run; without any (several runs under one header), the header before it."""
    found = TORCH.findall(text)
    config, data, resumed = CONFIG.findall(text), DATA.findall(text), RESUMED.findall(text)
    if not (found or config or data or resumed):
        return before
    torch, device, world = found[-1] if found else (b"", b"", b"")
    counts = Counter(dict(GPU.findall(text)).values())
    hardware = [f"{int(world)} x {decode(device)}"] if device else [f"{n} x {decode(name)}" for name, n in counts.items()]
    try:
        settings = json.loads(config[-1]) if config else None
    except ValueError:
        raise BadInput(f"{path}: its config line is not JSON") from None
    return Header(decode(torch) or None, " + ".join(hardware) or None, int(world) if world else None, settings,
                  decode(data[-1]) if data else None, (decode(resumed[-1][0]), int(resumed[-1][1])) if resumed else None)


def decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


# ======================================================================================================================
# Groups.
# ======================================================================================================================

# What should be equal in a group and between groups: (name, value of a run, None where its log does not say).
ALIKE = (("hardware", lambda r: r.header.hardware),
         ("numbers of processes", lambda r: r.header.processes),
         ("data fingerprints", lambda r: r.header.data),
         ("validation sizes", lambda r: r.header.validation))


@dataclass
class Group:
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
        return [r.train_time_s for r in self.counted if r.train_time_s is not None and math.isfinite(r.train_time_s)]

    def distinct(self, value) -> list:
        """What value(run) is over the counted runs, each once, sorted, without None."""
        return sorted({value(r) for r in self.counted} - {None})


def split_label(argument: str) -> tuple[str | None, str]:
    """"new=a.txt" -> ("new", "a.txt"); a file whose own name has a "=", or a glob that matches, needs no label."""
    label, equals, path = argument.partition("=")
    labelled = equals and label and not Path(argument).exists() and not glob.glob(argument)
    return (label, path) if labelled else (None, argument)


def find_logs(path: str) -> list[list[Path]]:
    """Lists of files, the first of which with runs in it is meant."""
    folder = Path(path)
    if folder.is_dir():
        next(os.scandir(folder), None)  # rglob is silent about a folder that it may not read
        files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and (p.is_file() or p.is_symlink()))
        deeper = [p for p in files if p.parent != folder and folder / "baseline" not in p.parents]
        return [[p for p in files if p.parent == folder], deeper]
    if folder.exists():
        return [[folder]]
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise BadInput(f"{path}: no such file or folder, and no file matches it")
    return [[p for match in matches for p in (find_logs(match)[0] if Path(match).is_dir() else [Path(match)])]]


def read_groups(arguments: list[str], target: float | None) -> tuple[list[Group], list[str]]:
    """The groups in the order given, and a line for each thing that could not be read."""
    groups, errors = {}, []
    for argument in arguments:
        try:
            label, path = split_label(argument)
            if label is None:
                label = name_of(path)
                label = path if label in groups else label  # two folders of one name are two groups
            group = groups.setdefault(label, Group(label))
            errors += read_into(group, path)
        except BadInput as e:
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
    return Path(path).resolve().name if Path(path).is_dir() else Path(path).stem if Path(path).exists() else path


def read_into(group: Group, path: str) -> list[str]:
    """Adds the runs that `path` stands for to the group; returns what could not be read."""
    errors = []
    for files in find_logs(path):
        results = read_all(list(map(str, files)))
        errors += [error for _, _, error in results if error]
        if any(runs for runs, _, _ in results):
            for file, (runs, remarks, error) in zip(files, results):
                group.runs += runs
                group.notes += remarks
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
    """(runs, remarks, why it could not be read)."""
    try:
        return *read_log(file), None
    except OSError as e:
        return [], [], f"{file}: cannot be read: {e.strerror}"
    except BadInput as e:
        return [], [], str(e)


def drop_repeats(group: Group) -> None:
    kept: dict[str, Run] = {}
    for run in group.runs:
        same = kept.setdefault(run.identity, run)
        if same is run:
            continue
        if same.header.torch is None and run.header.torch is not None:  # `same` is what the screen showed
            kept[run.identity], run, same = run, same, run
        group.notes.append(f"{run.name}: dropped, the same run as {same.name}")
    group.runs = list(kept.values())


def join_resumed(group: Group) -> None:
    """Of the logs of one run, RUN.txt and those that resumed it, RUN.fromSTEP.txt, keeps the one that went furthest.

    The others may end in a validation too, where the run was stopped, and would count as runs of their own. The curve
    becomes that of the whole run; loss and time are the whole run's as they stand, since a resumed clock goes on.
    """
    parts: dict[str, list[Run]] = {run.header.resumed[0]: [] for run in group.runs if run.header.resumed}
    for run in group.runs:
        name = run.header.resumed[0] if run.header.resumed else Path(run.path).stem
        if name in parts:
            parts[name].append(run)
    for logs in parts.values():
        whole = max(logs, key=lambda r: (r.final_step, r.counted, r.after))
        others = [r for r in logs if r is not whole]
        if others:
            names = ", ".join(r.name for r in others)
            group.notes.append(f"{whole.name}: stopped and resumed, one run with {names}, and taken for it")
        earlier = sorted((r for r in others if r.after < whole.after), key=lambda r: (r.after, r.final_step))
        if whole.after and not (earlier and earlier[0].after == 0):
            group.notes.append(f"{whole.name}: resumed after step {whole.after}; the log of the run's beginning is not here")
        curve = []
        for run in [*earlier, whole]:
            curve = [point for point in curve if point[0] < run.after] + run.curve
        whole.curve = curve
        group.runs = [r for r in group.runs if not any(r is other for other in others)]


def choose_target(group: Group, target: float | None) -> None:
    named = sorted({t for r in group.runs if isinstance(t := (r.header.config or {}).get("target"), (int, float))})
    group.target = target if target is not None else named[0] if named else DEFAULT_TARGET
    if target is None and len(named) > 1:
        group.notes.append(f"mixed targets: {' '.join(map(str, named))}; the lowest is used")


def warn(group: Group) -> None:
    for run in group.runs:
        of = "an unknown number" if run.total_steps is None else run.total_steps
        if not run.counted:
            group.notes.append(f"{run.name}: incomplete, left out: step {run.final_step} of {of} was logged "
                               "but not validated")
        elif run.final_step != run.total_steps:
            group.notes.append(f"{run.name}: stopped at step {run.final_step} of {of}, counted")
        elif not run.complete:
            group.notes.append(f"{run.name}: has no line 'complete: yes', counted")
        if run.counted and not math.isfinite(run.val_loss):
            group.notes.append(f"{run.name}: its final loss is {run.val_loss}, counted")
    for what, value in (("steps", lambda r: r.final_step), *ALIKE):
        values = group.distinct(value)
        if len(values) > 1:
            group.notes.append(f"mixed {what}: {'; '.join(map(str, values))}")
    seeds: dict[int, list[str]] = {}
    for run in group.counted:
        if isinstance(seed := (run.header.config or {}).get("seed"), int):
            seeds.setdefault(seed, []).append(run.name)
    for seed, names in sorted(seeds.items()):
        if len(names) > 1:
            more = ", …" if len(names) > 3 else ""
            group.notes.append(f"{len(names)} runs of seed {seed}, which are not independent: {', '.join(names[:3])}{more}")
    if group.times and len(group.times) < len(group.counted):
        group.notes.append(f"only {len(group.times)} of {len(group.counted)} runs have a time")
    if len(group.losses) > 1 and min(group.losses) == max(group.losses):
        group.notes.append("all losses are equal, as with one seed on a deterministic machine: no t-test is possible")


def warn_between(group: Group, base: Group) -> list[str]:
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


# ======================================================================================================================
# Statistics. None stands for what is not defined: a mean of nothing, a spread of one value, a test without spread.
# ======================================================================================================================

def mean_and_sd(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and the sample standard deviation (ddof 1)."""
    import numpy as np
    mean = finite(np.mean(values)) if values else None
    return mean, finite(np.std(values, ddof=1)) if mean is not None and len(values) > 1 else None


def p_below(values: list[float], target: float) -> float | None:
    """One-sided p of the one-sample t-test whose alternative is a mean below the target."""
    if len(values) < 2 or min(values) == max(values):
        return None
    from scipy.stats import ttest_1samp
    return finite(ttest_1samp(values, target, alternative="less").pvalue)


def welch(values: list[float], base: list[float]) -> tuple[float | None, float | None, float | None]:
    """(t, degrees of freedom, two-sided p) of Welch's test; t is positive where the mean of `values` is the larger."""
    if min(len(values), len(base)) < 2 or (min(values) == max(values) and min(base) == max(base)):
        return None, None, None
    from scipy.stats import ttest_ind
    with warnings.catch_warnings():  # that one of the two does not vary
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ttest_ind(values, base, equal_var=False)
    return finite(result.statistic), finite(result.df), finite(result.pvalue)


def finite(x) -> float | None:
    return float(x) if x is not None and math.isfinite(x) else None


def summarize(group: Group) -> dict:
    loss_mean, loss_std = mean_and_sd(group.losses)
    time_mean, time_std = mean_and_sd(group.times)
    p = p_below(group.losses, group.target)
    return {"label": group.label, "n": len(group.counted), "steps": group.distinct(lambda r: r.final_step),
            "loss_mean": loss_mean, "loss_std": loss_std, "time_mean_s": time_mean, "time_std_s": time_std,
            "p_target": p, "meets_target": p is not None and p < ALPHA,
            "runs": [{"path": r.path, "run_index": r.index, "final_step": r.final_step, "total_steps": r.total_steps,
                      "val_loss": finite(r.val_loss), "train_time_s": finite(r.train_time_s),
                      "peak_mem_mib": r.peak_mem_mib, "torch": r.header.torch, "complete": r.complete}
                     for r in group.runs]}


def compare(group: Group, base: Group) -> dict:
    out = {"group": group.label, "baseline": base.label}
    for what, unit, here, there in (("time", "_s", group.times, base.times), ("loss", "", group.losses, base.losses)):
        mean, base_mean = mean_and_sd(here)[0], mean_and_sd(there)[0]
        t, df, p = welch(here, there)
        out |= {f"{what}_delta{unit}": None if mean is None or base_mean is None else mean - base_mean,
                f"{what}_t": t, f"{what}_df": df, f"{what}_p": p}
    return out


# ======================================================================================================================
# Reports.
# ======================================================================================================================

def show(x: float | None, form: str = ".4f") -> str:
    return "-" if x is None else format(x, form)


def show_p(p: float | None) -> str:
    return "-" if p is None else f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def show_all(values: list, form: str = "") -> str:
    more = f" … ({len(values)} in all)" if len(values) > SHOWN else ""
    return " ".join(format(v, form) for v in values[:SHOWN]) + more if values else "-"


def verdict(group: Group, summary: dict) -> str:
    if summary["meets_target"]:
        return f"meets the target {group.target:g} (p < {ALPHA:g})"
    if summary["loss_mean"] is not None and summary["loss_mean"] <= group.target:
        return f"not shown to meet the target {group.target:g}: the mean does, but p is not < {ALPHA:g}; needs more runs"
    return f"does not meet the target {group.target:g}"


def rows(group: Group, summary: dict) -> list[tuple[str, str]]:
    """(name, value) of each line in a group's table."""
    if not group.counted:
        return [("runs (n)", "0")]
    per_byte, _ = mean_and_sd([r.per_byte for r in group.counted if r.per_byte is not None])
    peaks = group.distinct(lambda r: r.peak_mem_mib)
    mean, sd, time, time_sd = (summary[k] for k in ("loss_mean", "loss_std", "time_mean_s", "time_std_s"))
    return [("runs (n)", str(summary["n"])),
            ("steps", show_all(summary["steps"])),
            ("loss: mean, sd", f"{show(mean)}, {show(sd)}"),
            *([("loss per byte", show(per_byte))] if per_byte is not None else []),
            ("time, s: mean, sd", f"{show(time, '.3f')}, {show(time_sd, '.3f')}"),
            ("peak memory", "-" if not peaks else f"{peaks[0]} MiB" if len(peaks) == 1 else f"{peaks[0]} to {peaks[-1]} MiB"),
            ("hardware", "; ".join(group.distinct(lambda r: r.header.hardware)) or "-"),
            ("torch", "; ".join(group.distinct(lambda r: r.header.torch)) or "-"),
            ("p (mean < target)", show_p(summary["p_target"])),
            ("verdict", verdict(group, summary)),
            ("losses", show_all(group.losses, ".4f")),
            ("times, s", show_all(group.times, ".3f"))]


COMPARISON = ["", "difference", "Welch t", "df", "p (two-sided)"]


def comparison_rows(result: dict, base: dict) -> list[list[str]]:
    delta, reference = result["time_delta_s"], base["time_mean_s"]
    percent = f" ({100 * delta / reference:+.2f} %)" if delta is not None and reference else ""
    return [["time", "-" if delta is None else f"{delta:+.3f} s{percent}", show(result["time_t"], ".2f"),
             show(result["time_df"], ".1f"), show_p(result["time_p"])],
            ["loss", show(result["loss_delta"], "+.4f"), show(result["loss_t"], ".2f"),
             show(result["loss_df"], ".1f"), show_p(result["loss_p"])]]


def print_warnings(groups: list[Group]) -> None:
    for group in groups:
        for note in group.notes:
            print(f"compare.py: warning: {group.label}: {note}", file=sys.stderr)


def text_report(groups: list[Group], summaries: list[dict], comparisons: list[dict]) -> str:
    out = []
    for group, summary in zip(groups, summaries):
        out += [group.label, *(f"  {name:18} {value}" for name, value in rows(group, summary)),
                *(f"  warning: {note}" for note in group.notes), ""]
    for result in comparisons:
        out.append(f"{result['group']} against {result['baseline']}")
        out += ["  " + "  ".join(f"{cell:{width}}" for cell, width in zip(line, (6, 20, 9, 6, 13))).rstrip()
                for line in [COMPARISON, *comparison_rows(result, summaries[0])]]
        out.append("")
    return "\n".join(out).rstrip()


def markdown_report(groups: list[Group], summaries: list[dict], comparisons: list[dict]) -> str:
    columns = [dict(rows(g, s)) for g, s in zip(groups, summaries)]
    names = max(columns, key=len)  # a group may lack some lines
    out = markdown_table(["", *(g.label for g in groups)], [[name, *(c.get(name, "-") for c in columns)] for name in names])
    for result in comparisons:
        out += markdown_table([f"{result['group']} against {result['baseline']}", *COMPARISON[1:]],
                              comparison_rows(result, summaries[0]))
    out += [f"- {g.label}: {note}" for g in groups for note in g.notes]
    return "\n".join(out).rstrip()


def markdown_table(head: list[str], body: list[list[str]]) -> list[str]:
    """Its lines, and an empty one."""
    cells = [[c.replace("|", "\\|") for c in line] for line in [head, *body]]
    cells.insert(1, ["---"] * len(head))
    return ["| " + " | ".join(line) + " |" for line in cells] + [""]


def plot(groups: list[Group], path: str) -> None:
    """Loss over steps and over time, above the whole runs, below their ends. Line: the mean; band: one sd either side."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    levels = sorted({g.target for g in groups})
    for column, label in enumerate(("step", "training time, s")):
        whole, end = axes[:, column]
        drawn = []
        for number, group in enumerate(groups):
            curve = [point for point in mean_curve(group) if math.isfinite(point[column]) and math.isfinite(point[2])]
            if not curve:
                continue
            x, loss, sd = ([point[i] for point in curve] for i in (column, 2, 3))
            drawn.append((x, loss))
            name = group.label.replace("$", r"\$").lstrip("_")  # neither mathematics, nor hidden from the legend
            for ax in (whole, end):
                ax.plot(x, loss, f"C{number}", marker="o", markersize=3, label=f"{name} (n={len(group.counted)})")
                ax.fill_between(x, [y - s for y, s in zip(loss, sd)], [y + s for y, s in zip(loss, sd)],
                                color=f"C{number}", alpha=0.25, linewidth=0)
        for ax in (whole, end):
            for level in levels:
                ax.axhline(level, color="0.4", linestyle="--", linewidth=1, label=f"target {level:g}")
            ax.set(xlabel=label, ylabel="validation loss, nats per token")
            ax.grid(alpha=0.3)
        if not drawn:
            whole.set_title("none logged")
            continue
        # The ends: from just before the first group finishes, scaled to the losses there, of which the rest would make a line.
        left, right = 0.9 * min(x[-1] for x, _ in drawn), max(x[-1] for x, _ in drawn)
        seen = levels + [b for x, loss in drawn for a, b in zip(x, loss) if a >= left]
        x_margin, y_margin = 0.05 * (right - left) or 1, 0.1 * (max(seen) - min(seen)) or 0.01
        end.set(xlim=(left, right + x_margin), ylim=(min(seen) - y_margin, max(seen) + y_margin), title="the end")
        whole.legend(loc="upper right")
    fig.savefig(path, format="png", dpi=120)
    plt.close(fig)


def mean_curve(group: Group) -> list[tuple[int, float, float, float]]:
    """(step, mean time in s, mean loss, sd of the loss) at the steps that every run validated: a mean over some of the runs
    would jump where one drops out. The time is nan where a run has none."""
    by_step = {}
    for run in group.counted:
        for step, loss, time in run.curve:
            # Formats that restart the clock near step 10 may show more time before it than at the end.
            known = time is not None and time <= run.train_time_s
            by_step.setdefault(step, []).append((time if known else math.nan, loss))
    points = []
    for step, values in sorted(by_step.items()):
        if len(values) == len(group.counted):
            times, losses = map(list, zip(*values))
            points.append((step, sum(times) / len(times), sum(losses) / len(losses), mean_and_sd(losses)[1] or 0.0))
    return points


def diff_report(path_a: str, path_b: str) -> str:
    """What changed in script and config from log A to log B."""
    sources, configs = [], []
    for path in (path_a, path_b):
        try:
            text = b"\n" + Path(path).read_bytes() + b"\n"
        except OSError as e:
            raise BadInput(f"{path}: cannot be read: {e.strerror}") from None
        cut = SOURCE_END.search(text) or RULE.search(text)
        if cut is None:
            raise BadInput(f"{path}: holds no source: no line of = after it")
        sources.append(decode(text[1:cut.start() + 1]).splitlines())
        configs.append(flatten(read_header(text[cut.start():], path, Header()).config))
    changes = list(difflib.unified_diff(*sources, path_a, path_b, lineterm=""))
    a, b = configs
    settings = [f"  {key}: {a.get(key, 'absent')} -> {b.get(key, 'absent')}" for key in a | b
                if a.get(key, "absent") != b.get(key, "absent")]
    return "\n".join(["config", *(settings or ["  no difference" if a or b else "  not in these logs"]),
                      "script", *(changes or ["  no difference"])])


def flatten(config, name: str = "") -> dict[str, str]:
    """{"layers.3.window": "long", ...}: so that one changed cell of a table is one line."""
    if isinstance(config, (dict, list)) and config:
        items = config.items() if isinstance(config, dict) else enumerate(config)
        return {k: v for key, value in items for k, v in flatten(value, f"{name}.{key}".lstrip(".")).items()}
    return {name: json.dumps(config)} if name else {}


# ======================================================================================================================
# records/README.md. What lies between its lines <!-- NAME --> and <!-- end of NAME --> is made here.
# ======================================================================================================================

HERE = Path(__file__).resolve().parent
TRACKS = ("cpu", "gpt2-small")  # what counts for no track is no record
# Public records that the plot names, and where the name ends or begins: points right of and above the mark.
NAMED = {1: ("llm.c", 8, -3), 3: ("Muon", 8, 2), 12: ("FlexAttention", 8, 2), 21: ("timed by other rules from here on", 4, 12),
         80: ("train_gpt.py has its configuration", -8, -22), 92: ("sampled softmax, ANVIL", -8, -4)}


def record_tables(errors: list[str]) -> str:
    """Markdown: a table for each track of the records that lie in it. What could not be read is added to `errors`."""
    out = []
    for track in TRACKS:
        body = []
        for folder in sorted(p for p in HERE.glob(f"{track}/[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*") if p.is_dir()):
            before = [f"baseline={folder / 'baseline'}"] if (folder / "baseline").is_dir() else []
            groups, problems = read_groups([str(folder), *before], None)
            errors += problems
            for base in groups[1:]:
                base.notes += warn_between(base, groups[0])
            print_warnings(groups)
            if groups[0].counted:
                body.append(record_row(track, folder.name, groups))
            else:
                print(f"compare.py: warning: {folder}: left out, holds no finished run", file=sys.stderr)
        out += [f"### `{track}`", ""]
        head = ["date", "record", "runs", "loss, mean", "p (mean < target)", "time, mean", "against its baseline", "machine"]
        out += markdown_table(head, body) if body else ["None yet.", ""]
    return "\n".join(out)


def record_row(track: str, folder: str, groups: list[Group]) -> list[str]:
    """The cells for a record: groups[0], and, where it has one, its baseline, groups[1]."""
    day, name = folder.split("_", 1)
    record, *baseline = groups
    summary, change = summarize(record), "-"
    for base in baseline:
        result = compare(record, base)
        if result["time_delta_s"] is not None:
            change = f"{100 * result['time_delta_s'] / summarize(base)['time_mean_s']:+.1f} %, p {show_p(result['time_p'])}"
    machines = (re.sub(r" \(.*?\)", "", machine) for machine in record.distinct(lambda r: r.header.hardware))
    return [day, f"[{name}]({track}/{folder})", str(summary["n"]), show(summary["loss_mean"]), show_p(summary["p_target"]),
            show(summary["time_mean_s"], ".1f") + " s", change, "; ".join(machines) or "-"]


def read_history() -> list[dict[str, str]]:
    """The public records, in order. A number that comes again is the same record, timed again."""
    path = HERE / "history.csv"
    columns = ["number", "minutes", "date", "change", "source"]
    lines = list(csv.reader(path.read_text(encoding="utf-8", errors="replace").splitlines()))
    if lines[:1] != [columns] or len(lines) == 1:
        raise BadInput(f"{path}: needs the columns {','.join(columns)} and a line for each record")
    for i, line in enumerate(lines[1:], 2):
        try:
            number, minutes, day, *words = line
            date.fromisoformat(day)
            good = int(number) > 0 and 0 < float(minutes) < math.inf and len(words) == 2 and all(words)
        except ValueError:
            good = False
        if not good:
            raise BadInput(f"{path}, line {i}: not a record's {', '.join(columns)}")
    return [dict(zip(columns, line)) for line in lines[1:]]


def history_table(history: list[dict[str, str]]) -> str:
    """Markdown: which records are there, and a line for each."""
    numbers = {int(row["number"]) for row in history}
    missing = [str(n) for n in range(1, max(numbers)) if n not in numbers]
    return "\n".join([f"Records 1 to {max(numbers)}; missing: {', '.join(missing) or 'none'}.", "",
                      *markdown_table(["#", "minutes", "date", "change", "source"], [list(row.values()) for row in history])])


def plot_history(history: list[dict[str, str]], path: Path, mark: str) -> None:
    """The public records' times over their dates. `mark` is kept in the file, where `drawn` finds it."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    points = [(date.fromisoformat(row["date"]), 60 * float(row["minutes"]), int(row["number"])) for row in history]
    fig, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    days, times, numbers = zip(*points)
    ax.step(days, times, "C0", where="post", linewidth=1)
    for i, (day, seconds, number) in enumerate(points):
        again = number in numbers[:i]
        ax.plot(day, seconds, "C0o", markersize=4, markerfacecolor="white" if again else "C0")
        if number in NAMED and not again:
            name, right, above = NAMED[number]
            ax.annotate(f"{number}: {name}", (day, seconds), (right, above), textcoords="offset points", fontsize=9,
                        horizontalalignment="right" if right < 0 else "left")
    ax.set_yscale("log")
    minutes = [0.5, 1, 2, 3, 5, 10, 20, 45]
    ax.set_yticks([60 * m for m in minutes], [f"{m:g} min" if m >= 1 else f"{60 * m:.0f} s" for m in minutes])
    ax.minorticks_off()
    ax.set(ylim=(30, 3600), title="Public NanoGPT speedrun: time to a validation loss of 3.28 on 8 H100s")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, format="png", dpi=100, metadata={"Source": mark})
    plt.close(fig)


def history_mark() -> str:
    return "history.csv " + hashlib.sha256((HERE / "history.csv").read_bytes()).hexdigest()[:16]


def drawn(path: Path) -> bool:
    """Whether the plot is there and was drawn from history.csv as it is. (Its bytes vary with matplotlib's version.)"""
    return path.exists() and history_mark().encode() in path.read_bytes()


def tables(errors: list[str]) -> dict[str, str]:
    """The text of each part of records/README.md that is made here."""
    return {"records": record_tables(errors), "history": history_table(read_history())}


def update_readme(parts: dict[str, str]) -> None:
    """Writes them into records/README.md, and draws history.png if history.csv has changed."""
    path, plot_path = HERE / "README.md", HERE / "history.png"
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise BadInput(f"{path}: needs one line '{begin.strip()}' and after it one '{end.strip()}'")
        text = text[:text.index(begin) + len(begin)] + part + text[text.index(end):]
    path.write_text(text, encoding="utf-8")
    if not drawn(plot_path):
        plot_history(read_history(), plot_path, history_mark())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="[LABEL=]PATH", help="log, folder or glob; the first is the baseline")
    parser.add_argument("--target", type=float, help=f"mean loss to reach (default: the logs' config, else {DEFAULT_TARGET})")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object; warnings go to stderr")
    form.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--plot", metavar="FILE.png", help="draw loss over steps and over time")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what changed in script and config from log A to log B")
    parser.add_argument("--table", action="store_true", help="print the tables of records/README.md")
    parser.add_argument("--update", action="store_true", help="write them there, and draw history.png from history.csv")
    args = parser.parse_intermixed_args(argv)
    if sum(map(bool, (args.paths, args.diff, args.table, args.update))) != 1:
        parser.error("give logs to compare, or --diff A B, or --table, or --update")
    if not args.paths:
        for option in ("json", "markdown", "plot", "target"):
            if getattr(args, option) != parser.get_default(option):
                parser.error(f"--{option} is for logs to compare; leave it out")
    if args.target is not None and not math.isfinite(args.target):
        parser.error("--target: not a finite number")

    try:
        if args.diff:
            print(diff_report(*args.diff))
            return 0
        if args.table or args.update:
            return make_tables(args.update)
        groups, errors = read_groups(args.paths, args.target)
        base = groups[0]
        for group in groups[1:]:
            group.notes += warn_between(group, base)
        summaries = [summarize(g) for g in groups]
        comparisons = [compare(g, base) for g in groups[1:]]
        if args.json:
            print(json.dumps({"groups": summaries, "comparisons": comparisons}, indent=1, allow_nan=False))
            print_warnings(groups)
        else:
            print((markdown_report if args.markdown else text_report)(groups, summaries, comparisons))
        if args.plot:
            try:
                plot(groups, args.plot)
            except OSError as e:
                errors.append(f"--plot {args.plot}: cannot be written: {e.strerror}")
    except BadInput as e:
        errors = [str(e)]
    except ModuleNotFoundError as e:
        if e.name.split(".")[0] not in ("numpy", "scipy", "matplotlib"):
            raise
        errors = [f"needs {e.name.split('.')[0]}, which this Python lacks: pip install -r requirements.txt"]
    return report(errors)


def report(errors: list[str]) -> int:
    for error in errors:
        print(f"compare.py: {error}", file=sys.stderr)
    return 2 if errors else 0


def make_tables(update: bool) -> int:
    """--table and --update. Nothing is written if something could not be read."""
    errors: list[str] = []
    try:
        parts = tables(errors)
        if not update:
            print("\n".join(parts.values()).rstrip())
        elif not errors:
            update_readme(parts)
    except OSError as e:
        errors.append(f"{e.filename}: {e.strerror}")
    return report(errors)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `compare.py ... | head` ends quietly
    sys.exit(main())
