#!/usr/bin/env python3
"""Says where the time of training steps goes, from the traces that all ranks of a run have written.

    ./run.sh --profile 8
    python bench/timeline.py records/other/attempts/RUN.rank*.trace.json.gz [--picture FILE.png] [--step 9]

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

--picture draws a step (--step, else the first traced): a lane for each thread and stream, and a black line
along the critical path. All ranks must share one machine's clock. Tracing slows threads: an operation takes
microseconds more. Tested on traces of gloo processes, and of GPUs on small ones written by hand, never a real
GPU's.
"""

import argparse
import gzip
import itertools
import json
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


class UserError(Exception):
    """Reports what the user can fix, in one line."""


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
    """Holds a rank's trace. A lane's spans are ascending and disjoint."""

    path: Path
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
        spans = [s for lane in self.lanes.values() for s in lane if kind_of(s.lane) in ("gloo", "nccl")]
        spans.sort(key=lambda s: s.launch)
        return [s for s in spans if any(start <= s.launch < end for start, end in self.steps.values())]

    def windows(self, lane: str) -> dict[int, tuple[int, int]]:
        """Returns the steps' times on a lane. On a stream one lasts until the next one's first kernel."""
        if lane != "stream":
            return self.steps
        spans, starts = self.lanes[lane], [start for start, _ in self.steps.values()]
        firsts = [next((s.start for s in spans if s.launch >= start), spans[-1].end) for start in starts]
        return dict(zip(self.steps, zip(firsts, [*firsts[1:], spans[-1].end])))


def exclusive(labels: Iterable[Label]) -> list[Label]:
    """Cuts nested labels into disjoint ones, ascending: the innermost counts, but in index only waiting.

    What touches and is the same becomes one.
    """
    outer_first = sorted(labels, key=lambda label: (label[0], -label[1]))
    times = sorted({time for label in outer_first for time in label[:2]})
    found: list = [None] * len(times)  # section and name from each time to the next
    for start, end, section, name in outer_first:
        for i in range(bisect_left(times, start), bisect_left(times, end)):
            in_index = found[i] and found[i][0] == "index" and section != "waiting"
            found[i] = ("index" if in_index else section), name
    changes = [i for i in range(len(times)) if i == 0 or found[i] != found[i - 1]]
    return [(times[i], times[j], *found[i]) for i, j in zip(changes, changes[1:]) if found[i]]


def read_trace(path: Path) -> Trace:
    """Reads one rank's trace in Chrome's format, gzipped or not. Raises UserError."""
    labels, ops, gloo = defaultdict(list), defaultdict(list), defaultdict(list)  # by thread
    kernels, launches, steps, main = [], {}, {}, None
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as f:
            data = json.load(f)
        run = data.get("distributedInfo", {})
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
            raise ValueError("no step in it")
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no trace of --profile: {type(error).__name__}: {error}") from None
    for step, (start, end) in steps.items():
        taken = [at for at, *_, section, name in labels[main] if (section, name) == ("waiting", "batch")]
        steps[step] = min((at for at in taken if start <= at < end), default=start), end
    steps, rank, lanes = dict(sorted(steps.items())), run.get("rank", 0), defaultdict(list)
    builder = next((t for t, found in labels.items() if any(label[2] == "index" for label in found)), None)
    starts, ends = zip(*steps.values())
    labels[main].append((starts[0], ends[-1], "other", ""))
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
        thread, launch = launches.get(correlation, (main, start))
        is_nccl = name.startswith("nccl")
        lane, default = (f"nccl {stream}", "exchange") if is_nccl else (f"stream {stream}", "other")
        add(lane, start, end, thread, launch, default)
    if streams := [lane for lane in lanes if lane.startswith("stream")]:
        busiest = max(streams, key=lambda lane: sum(s.end - s.start for s in lanes[lane]))
        lanes["stream"] = [s._replace(lane="stream") for s in lanes.pop(busiest)]
    return Trace(path, rank, run.get("world_size", 1), steps, dict(lanes))


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """Reads the traces of one run's ranks; returns them by rank. Raises UserError."""
    traces = sorted(map(read_trace, paths), key=lambda trace: trace.rank)
    first, ranks = traces[0], [trace.rank for trace in traces]
    if ranks != list(range(first.world_size)):
        raise UserError(f"the traces are of ranks {ranks}; give one of each of the run's {first.world_size}")
    for trace in traces:
        steps = zip(first.steps.values(), trace.steps.values())
        calls = zip(first.collectives, trace.collectives)
        if trace.steps.keys() != first.steps.keys():
            problem = f"trace steps {list(first.steps)} and {list(trace.steps)}"
        elif any(max(a, c) >= min(b, d) for (a, b), (c, d) in steps):
            problem = "trace steps at other times"
        elif any(a[2:4] != b[2:4] for a, b in calls):
            problem = "have other collectives"
        else:
            continue
        raise UserError(f"{first.path} and {trace.path} {problem}; give traces of one run, on one machine")
    return traces


def overlap(a: Iterable[tuple[int, int]], b: Iterable[tuple[int, int]]) -> int:
    """Returns the time that lies in an interval of `a` and in one of `b`, each moment once."""
    ends = [(t, d, i) for i, spans in enumerate((a, b)) for span in spans for t, d in zip(span, (1, -1))]
    depth, total, before = [0, 0], 0, 0
    for time, change, i in sorted(ends):
        total += time - before if all(depth) else 0
        depth[i] += change
        before = time
    return total


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
        windows, spans = trace.windows(lane).values(), trace.lanes.get(lane, [])
        column = sum((by_section(spans, *window) for window in windows), Counter())
        if is_compute and (ran := [(s.start, s.end) for s in trace.collectives]):
            computed = [(s.start, s.end) for s in spans if s.section != "waiting"]
            column["collectives"], column["hidden"] = overlap(ran, ran), overlap(ran, computed)
        columns[f"rank {trace.rank}"] = column
    if is_compute:
        paths = [critical_path(traces, step) for step in steps]
        column = sum((by_section(path, path[0].start, path[-1].end) for path in paths), Counter())
        for s in itertools.chain(*paths):
            is_call = kind_of(s.lane) in ("gloo", "nccl") and s.section != "waiting"
            column["collectives"] += (s.end - s.start) * is_call
        columns["critical"] = column
    lines = [f"{lane:<12}" + "".join(f"{name:>10}" for name in columns)]
    for row in (*COLOURS, "idle", "step", "collectives", "hidden"):
        if any(row in column for column in columns.values()):
            ms = (f"{column[row] / len(steps) / 1e6:.1f}" for column in columns.values())
            share = (f"{c[row] / c['collectives']:.0%}" if row in c else "-" for c in columns.values())
            lines.append(f"{row:<12}" + "".join(f"{text:>10}" for text in (share if row == "hidden" else ms)))
    return lines


def draw(traces: list[Trace], step: int, path: str) -> None:
    """Writes a PNG of a step: its lanes, coloured by section, and its critical path."""
    from matplotlib.figure import Figure  # here: without a picture it is not needed
    from matplotlib.patches import Patch

    windows = [trace.windows(trace.compute)[step] for trace in traces]
    begin, end = min(start for start, _ in windows), max(end for _, end in windows)
    rows = {}
    for trace in traces:
        for lane, spans in sorted(trace.lanes.items(), key=lambda item: (item[0] != "main", item[0])):
            if shown := [s for s in spans if s.start < end and s.end > begin]:
                rows[trace.rank, lane] = shown
    fig = Figure(figsize=(16, 1.5 + 0.4 * len(rows)), layout="constrained")
    ax = fig.subplots()
    for y, spans in enumerate(rows.values()):
        bars = [((s.start - begin) / 1e6, (s.end - s.start) / 1e6) for s in spans]
        ax.broken_barh(bars, (y - 0.4, 0.8), color=[COLOURS[s.section] for s in spans])
    height, along = {at: y for y, at in enumerate(rows)}, critical_path(traces, step)
    times = [(t - begin) / 1e6 for s in along for t in (s.start, s.end)]
    ax.plot(times, [height[s.rank, s.lane] for s in along for _ in range(2)], color="black", linewidth=1.5)
    ax.set(xlim=(0, (end - begin) / 1e6), xlabel=f"step {step}, ms", ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    patches = [Patch(color=colour, label=section) for section, colour in COLOURS.items()]
    fig.legend(handles=patches, loc="outside upper center", ncols=len(COLOURS), frameon=False)
    fig.savefig(path, format="png", dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--picture", metavar="FILE.png")
    parser.add_argument("--step", type=int)
    args = parser.parse_args(argv)
    try:
        traces = read_traces(args.traces)
        steps = list(traces[0].steps)
        step = steps[0] if args.step is None else args.step
        if step not in steps:
            raise UserError(f"--step {step} is not among the traced steps, {steps[0]} to {steps[-1]}")
        print(f"steps {steps[0]} to {steps[-1]}, {len(traces)} ranks; milliseconds a step")
        for lane in ("main", "stream", "builder"):
            if any(trace.lanes.get(lane) for trace in traces):
                print("", *table(traces, lane), sep="\n")
        if args.picture:
            draw(traces, step, args.picture)
    except (OSError, UserError) as error:
        sys.exit(f"timeline.py: {error}")


if __name__ == "__main__":
    main()
