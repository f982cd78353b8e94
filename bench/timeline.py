#!/usr/bin/env python3
"""Says where the time of training steps goes, from the traces that all ranks of a run have written.

    ./run.sh --profile 8
    python bench/timeline.py RUN.rank*.trace.json.gz [--picture FILE.png]

Prints milliseconds a step, the mean over the traced steps, by rank. A step begins where it takes its batch;
validation is left out. Of nested sections the innermost counts, so they add up to the step:

    forward, head, backward    the layers; loss and gradient of the head; autograd
    exchange, gather           start of a gradient's exchange, and of an updated parameter's gather
    rows                       gradients of tables' rows, and rows of n-grams on their way
    update                     update rules, with what precedes and follows them
    index                      the batches to come, with their tables' rows, on the thread that builds them
    waiting                    for a collective, or for a batch to be built
    other                      none of these
    idle                       nothing: no kernel on the stream, no batch to build

A kernel is in the section that launched it. Collectives are gloo's operations or NCCL's kernels, but for
those of the builder's thread. `collectives` is the time in which any ran, `hidden` the share of it in which
the main thread did not wait or, on a GPU, other kernels ran.

`critical` is the critical path, from which the step's end follows. It is walked back from the rank that ends
last, along its main thread or, on a GPU, its main stream. Where that waits or is idle, it goes on to what
finished last before: a collective, a batch, or the launch of the next kernel. A collective takes the time
since the last rank started it. From there the walk goes on with that rank: with what finished last of the
launch, the collective before, and the kernels launched before. The time between is waiting; that of a
collective is in exchange, rows or gather. Not seen: a host that waits for its GPU, and builders that wait for
each other.

--picture draws the first traced step: a lane for each thread and stream, and a black line
along the critical path. All ranks must share one machine's clock. Tracing slows threads: an operation takes
microseconds more. Tested on traces of gloo processes and, of GPUs, on small ones written by hand; it has read
real ones of one H200.
"""

import argparse
import gzip
import itertools
import json
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

COLOURS = {
    "forward": "tab:blue",
    "head": "tab:cyan",
    "backward": "tab:orange",
    "exchange": "tab:red",
    "rows": "tab:pink",
    "update": "tab:green",
    "gather": "tab:purple",
    "index": "tab:brown",
    "waiting": "0.85",
    "other": "0.6",
}
# What a lane may wait for, besides a launch.
WAITS_FOR = {
    "main": ("gloo", "builder"),
    "stream": ("nccl",),
    "nccl": ("stream",),
    "builder": ("builder gloo",),
}
Label = tuple[int, int, str, str]  # start, end, section, name


class Span(NamedTuple):
    """A lane's time in one section. Times are nanoseconds."""

    rank: int
    # "main", "builder", "gloo 0", "builder gloo 2"; of a GPU "stream", the busiest, "stream 9", "nccl 7".
    lane: str
    section: str
    name: str  # of the parameter, or "ngrams", "tokens"; else ""
    start: int
    end: int
    launch: int  # when a thread launched it; a thread's own time: its start


def kind_of(lane: str) -> str:
    return lane.rstrip(" 0123456789")


@dataclass
class Trace:
    """A rank's trace. A lane's spans are ascending and disjoint."""

    rank: int
    world_size: int
    steps: dict[int, tuple[int, int]]  # of the main thread
    lanes: dict[str, list[Span]]

    @property
    def compute(self) -> str:
        """Returns the lane that computes."""
        return "stream" if "stream" in self.lanes else "main"

    @property
    def collectives(self) -> list[Span]:
        """Returns those that the main thread launched in steps, in order."""
        spans = [s for lane, spans in self.lanes.items() if kind_of(lane) in ("gloo", "nccl") for s in spans]
        spans.sort(key=lambda s: s.launch)
        return [s for s in spans if any(start <= s.launch < end for start, end in self.steps.values())]

    def windows(self, lane: str) -> dict[int, tuple[int, int]]:
        """Returns the steps' times on a lane. On a stream one lasts until the next one's first kernel."""
        if lane != "stream":
            return self.steps
        spans = self.lanes[lane]
        end = spans[-1].end
        firsts = [next((s.start for s in spans if s.launch >= at), end) for at, _ in self.steps.values()]
        return dict(zip(self.steps, itertools.pairwise([*firsts, end])))


def exclusive(labels: Iterable[Label]) -> list[Label]:
    """Cuts nested labels into disjoint ones, ascending: the innermost counts, but in index only waiting."""
    outer_first, found = sorted(labels, key=lambda label: (label[0], -label[1])), []
    for start, end in itertools.pairwise(sorted({time for label in outer_first for time in label[:2]})):
        around = [label[2:] for label in outer_first if label[0] <= start < label[1]]
        if around:
            section, name = around[-1]
            in_index = section != "waiting" and any(outer == "index" for outer, _ in around)
            found.append((start, end, "index" if in_index else section, name))
    return found


def read_trace(path: Path) -> Trace:
    """Reads one rank's trace in Chrome's format, gzipped or not."""
    labels, ops, gloo = defaultdict(list), defaultdict(list), defaultdict(list)  # by thread
    kernels, launches, steps, main = [], {}, {}, None
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        data = json.load(file)
    for event in data["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, kind, thread, args = event["name"], event.get("cat"), event["tid"], event.get("args", {})
        start = data.get("baseTimeNanoseconds", 0) + round(1000 * event["ts"])
        end, (section, _, about) = start + round(1000 * event["dur"]), name.partition(" ")
        if kind == "user_annotation" and name.startswith("ProfilerStep#"):
            steps[int(name[13:])], main = (start, end), thread
        elif kind == "user_annotation" and section in COLOURS:
            labels[thread].append((start, end, section, about))
        elif name.startswith("c10d::"):
            ops[thread].append(start)
        elif name.startswith("gloo:"):
            gloo[thread].append((start, end, name))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append((start, end, name, args["stream"], args["correlation"]))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[args["correlation"]] = thread, start
    if not steps:
        raise ValueError(f"{path} has no step")
    taken = [start for start, *_, section, name in labels[main] if (section, name) == ("waiting", "batch")]
    for step, (start, end) in steps.items():
        steps[step] = min((at for at in taken if start <= at < end), default=start), end
    run, lanes = data.get("distributedInfo", {}), defaultdict(list)
    rank = run.get("rank", 0)
    builder = next((t for t, found in labels.items() if any(label[2] == "index" for label in found)), None)
    labels[main].append((min(steps.values())[0], max(steps.values())[1], "other", ""))
    for lane, thread in (("main", main), ("builder", builder)):
        found = exclusive(labels[thread])
        lanes[lane] = [Span(rank, lane, what, name, at, end, at) for at, end, what, name in found]

    def add(lane: str, start: int, end: int, thread: Any, launch: int, default: str) -> None:
        """Adds what a thread launched, in the section of that moment; `default` where there is none."""
        launcher = lanes["builder" if thread == builder else "main"]  # autograd's threads: the main one's
        i = bisect_right(launcher, launch, key=lambda s: s.start)
        sections = (s[2:4] for s in launcher[max(0, i - 1) : i] if launch < s.end and s.section != "other")
        lanes[lane].append(Span(rank, lane, *next(sections, (default, "")), start, end, launch))

    # A group of processes runs its operations in their order, on threads of its own. The builder's group is
    # not the main thread's, and knows no operation but all_to_all.
    groups = {"gloo": [], "builder gloo": []}
    for i, calls in enumerate(gloo.values()):
        is_builders = ops[builder] and {name for *_, name in calls} == {"gloo:all_to_all"}
        group = "builder gloo" if is_builders else "gloo"
        groups[group] += [(start, end, f"{group} {i}") for start, end, _ in calls]
    for thread, calls in zip((main, builder), groups.values()):
        waiting = deque(sorted(ops[thread]))
        for start, end, lane in sorted(calls):
            if waiting and waiting[0] <= start:  # else it was launched before the trace began
                add(lane, start, end, thread, waiting.popleft(), "exchange")
    for start, end, name, stream, correlation in sorted(kernels):
        is_nccl = name.startswith("nccl")
        lane, default = (f"nccl {stream}", "exchange") if is_nccl else (f"stream {stream}", "other")
        add(lane, start, end, *launches.get(correlation, (main, start)), default)
    if streams := [lane for lane in lanes if lane.startswith("stream")]:
        busiest = max(streams, key=lambda lane: sum(s.end - s.start for s in lanes[lane]))
        lanes["stream"] = [s._replace(lane="stream") for s in lanes.pop(busiest)]
    return Trace(rank, run.get("world_size", 1), dict(sorted(steps.items())), dict(lanes))


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """Reads the traces of one run's ranks; returns them by rank."""
    traces = sorted(map(read_trace, paths), key=lambda trace: trace.rank)
    if [trace.rank for trace in traces] != list(range(traces[0].world_size)):
        raise ValueError(f"give one trace of each of the run's {traces[0].world_size} ranks")
    return traces


def overlap(a: Sequence[Span], b: Sequence[Span]) -> int:
    """Returns the time that lies in a span of `a` and in one of `b`, each moment once."""
    times = np.unique([time for s in [*a, *b] for time in (s.start, s.end)])
    is_in_both = np.ones(len(times), bool)
    for spans in (a, b):
        started, ended = (
            np.searchsorted(sorted(ends), times, "right") for ends in zip(*(s[4:6] for s in spans))
        )
        is_in_both &= started > ended
    return int(np.diff(times) @ is_in_both[:-1])


def by_section(spans: Iterable[Span], start: int, end: int) -> Counter[str]:
    """Returns nanoseconds from start to end by section; "idle": in no span; "step": in all."""
    found: Counter[str] = Counter()
    for s in spans:
        found[s.section] += max(0, min(s.end, end) - max(s.start, start))
    return found + Counter(idle=end - start - found.total(), step=end - start)


def critical_path(traces: list[Trace], step: int) -> list[Span]:
    """Returns what a step's end follows from, by the model of -h: spans that meet, in ascending order."""
    busy = [
        {lane: [s for s in spans if s.section != "waiting"] for lane, spans in trace.lanes.items()}
        for trace in traces
    ]
    # Not strict: a trace lacks the last collectives if its rank stopped tracing before gloo began them.
    joint = {call: calls for calls in zip(*(trace.collectives for trace in traces)) for call in calls}
    begins, ends = zip(*(trace.windows(trace.compute)[step] for trace in traces))
    rank, lane, time, path = ends.index(max(ends)), traces[0].compute, max(ends), []
    while time > begins[rank]:
        here, spans, kind = (rank, lane), busy[rank][lane], kind_of(lane)
        i = bisect_left(spans, time, key=lambda s: s.start)
        before, after = spans[i - 1] if i else None, spans[i] if i < len(spans) else None
        what = "waiting", ""
        if before and before.end >= time:
            last = max(joint.get(before, (before,)), key=lambda call: call.start)
            what, to, rank, lane = before[2:4], last.start, last.rank, last.lane
        else:
            since = before.end if before else begins[rank]
            lanes = (busy[rank][other] for other in busy[rank] if kind_of(other) in WAITS_FOR.get(kind, ()))
            others = [s for s in itertools.chain(*lanes) if kind != "nccl" or s.launch < after.launch]
            options = [(since, lane), *((s.end, s.lane) for s in others if since < s.end <= time)]
            if after and kind not in ("main", "builder"):
                options.append((after.launch, "builder" if kind == "builder gloo" else "main"))
            to, lane = max(options)
        start = max(to, begins[here[0]])
        if start < time:
            path.append(Span(*here, *what, start, time, start))
        time = min(time, to)
    return path[::-1]


def table(traces: list[Trace], lane: str) -> list[str]:
    """Returns the lines about a lane; about the one that computes also collectives and the critical path."""
    columns, steps, is_compute = {}, traces[0].steps, lane == traces[0].compute
    for trace in traces:
        spans, ran = trace.lanes.get(lane, []), trace.collectives
        column = sum((by_section(spans, *window) for window in trace.windows(lane).values()), Counter())
        if is_compute and ran:
            column["collectives"] = overlap(ran, ran)
            column["hidden"] = overlap(ran, [s for s in spans if s.section != "waiting"])
        columns[f"rank {trace.rank}"] = column
    if is_compute:
        paths = (critical_path(traces, step) for step in steps)
        columns["critical"] = sum((by_section(p, p[0].start, p[-1].end) for p in paths), Counter())
    lines = [f"{lane:<12}" + "".join(f"{name:>10}" for name in columns)]
    for row in (*COLOURS, "idle", "step", "collectives", "hidden"):
        if any(column[row] for column in columns.values()):
            texts = [f"{c[row] / len(steps) / 1e6:.1f}" if c[row] else "-" for c in columns.values()]
            if row == "hidden":
                texts = [f"{c[row] / c['collectives']:.0%}" if row in c else "-" for c in columns.values()]
            lines.append(f"{row:<12}" + "".join(f"{text:>10}" for text in texts))
    return lines


def draw(traces: list[Trace], path: Path) -> None:
    """Writes a PNG of the first step: its lanes, coloured by section, and its critical path."""
    from matplotlib.figure import Figure  # here: without a picture it is not needed

    step = next(iter(traces[0].steps))
    begins, ends = zip(*(trace.windows(trace.compute)[step] for trace in traces))
    rows = {(trace.rank, lane): spans for trace in traces for lane, spans in trace.lanes.items()}
    figure = Figure(figsize=(16, 1.5 + 0.4 * len(rows)), layout="constrained")
    ax = figure.subplots()
    for section, colour in COLOURS.items():
        for y, spans in enumerate(rows.values()):
            bars = [
                ((s.start - min(begins)) / 1e6, (s.end - s.start) / 1e6)
                for s in spans
                if s.section == section
            ]
            ax.broken_barh(bars, (y - 0.4, 0.8), color=colour, label=f"{'_' * (y > 0)}{section}")
    along, lanes = critical_path(traces, step), list(rows)
    times = [(t - min(begins)) / 1e6 for s in along for t in (s.start, s.end)]
    ax.plot(times, [lanes.index(s[:2]) for s in along for _ in range(2)], color="black")
    ax.set(xlim=(0, (max(ends) - min(begins)) / 1e6), xlabel=f"step {step}, ms", ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    figure.legend(loc="outside upper center", ncols=len(COLOURS))
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    try:
        traces = read_traces(tqdm(args.traces, "reading", unit="trace"))
        tables = [table(traces, lane) for lane in ("main", "stream", "builder") if lane in traces[0].lanes]
        if args.picture:
            draw(traces, args.picture)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"timeline.py: these are not the traces of a run: {type(error).__name__}: {error}")
    steps = list(traces[0].steps)
    print(f"steps {steps[0]} to {steps[-1]}, {len(traces)} ranks; milliseconds a step")
    for lines in tables:
        print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
