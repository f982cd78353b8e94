#!/usr/bin/env python3
"""Says where the time of training steps goes, from the traces that all ranks of a run have written.

    ./run.sh --profile 8
    python bench/timeline.py RUN.rank*.trace.json.gz [--picture FILE.png] [--operations N]

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

--operations prints in the sections' place what took the most time, N rows a table: the GPU's kernels, and the
operations of the main thread, of the thread that builds batches and of all others, of which autograd's is
one. ms and calls are those of a step, the mean over steps and ranks; shares are of the table's sum. An
operation's time is its own, without that of operations inside it. "Python in forward" is what no operation
took of that section. Kernels of one CUDA graph belong to the step that launched it.

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "data"))
from scripts import UserError, make_parser, new_figure, number, png, run_script, save_figure

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


class Label(NamedTuple):
    """A time that a thread has marked. Times are nanoseconds, here and below."""

    start: int
    end: int
    section: str
    name: str  # of the parameter, or "ngrams", "tokens"; else ""


class Span(NamedTuple):
    """A lane's time in one section."""

    rank: int
    # "main", "builder", "gloo 0", "builder gloo 2"; of a GPU "stream", the busiest, "stream 9", "nccl 7".
    lane: str
    section: str
    name: str  # as of a label
    start: int
    end: int
    launch: int  # when a thread launched it; a thread's own time: its start


PLACES = {
    "device": "the GPU's kernels",
    "main": "the main thread's operations",
    "builder": "operations of the thread that builds batches",
    "others": "operations of other threads",
}


def kind_of(lane: str) -> str:
    return lane.rstrip(" 0123456789")


class Call(NamedTuple):
    """An operation or kernel by name, from its start to its end."""

    start: int
    end: int
    name: str


class Own(NamedTuple):
    """A call's own time, without that of the calls inside it."""

    name: str
    time: int


@dataclass
class Trace:
    """A rank's trace. A lane's spans are ascending and disjoint."""

    rank: int
    world_size: int
    steps: dict[int, tuple[int, int]]  # of the main thread
    lanes: dict[str, list[Span]]
    operations: dict[str, list[Own]]  # of all steps, by place: a key of PLACES

    @property
    def compute(self) -> str:
        """Returns the lane that computes."""
        return "stream" if "stream" in self.lanes else "main"

    @property
    def collectives(self) -> list[Span]:
        """Returns those that the main thread launched in steps, in order."""
        spans = []
        for lane, found in self.lanes.items():
            if kind_of(lane) in ("gloo", "nccl"):
                spans += found
        spans.sort(key=lambda s: s.launch)
        return [s for s in spans if any(start <= s.launch < end for start, end in self.steps.values())]

    def windows(self, lane: str) -> dict[int, tuple[int, int]]:
        """Returns the steps' times on a lane. On a stream one lasts until the next one's first kernel."""
        if lane != "stream":
            return self.steps
        spans = self.lanes[lane]
        end = spans[-1].end
        firsts = []
        for start, _ in self.steps.values():
            firsts.append(min((s.start for s in spans if s.launch >= start), default=end))
        return dict(zip(self.steps, itertools.pairwise(firsts + [end])))


def exclusive(labels: Iterable[Label]) -> list[Label]:
    """Cuts nested labels into disjoint ones, ascending: the innermost counts, but in index only waiting."""
    outer_first = sorted(labels, key=lambda label: (label.start, -label.end))
    times = set()
    for label in outer_first:
        times |= {label.start, label.end}
    found = []
    for start, end in itertools.pairwise(sorted(times)):
        around = [label for label in outer_first if label.start <= start < label.end]
        if not around:
            continue
        section = around[-1].section
        if section != "waiting" and any(label.section == "index" for label in around):
            section = "index"
        found.append(Label(start, end, section, around[-1].name))
    return found


class Kernel(NamedTuple):
    start: int
    end: int
    name: str
    stream: int
    correlation: int  # a number that it shares with its launch


class Events:
    """Sorts the events of a trace by kind, and those of threads by thread."""

    def __init__(self, data: dict):
        self.main: Any = None  # the thread that runs the steps
        self.steps: dict[int, tuple[int, int]] = {}
        self.labels: dict[Any, list[Label]] = defaultdict(list)
        self.ops: dict[Any, list[int]] = defaultdict(list)  # when a thread starts a collective
        self.gloo: dict[Any, list[Call]] = defaultdict(list)
        self.calls: dict[Any, list[Call]] = defaultdict(list)  # of all operations of a thread
        self.kernels: list[Kernel] = []
        self.launches: dict[int, tuple[Any, int]] = {}  # thread and time, by correlation
        for event in data["traceEvents"]:
            if event.get("ph") == "X":
                self.add(event, data.get("baseTimeNanoseconds", 0))

    def add(self, event: dict, base: int) -> None:
        """Adds an event, whose own times are microseconds since `base`."""
        name = event["name"]
        kind = event.get("cat")
        thread = event["tid"]
        args = event.get("args", {})
        start = base + round(1000 * event["ts"])
        end = start + round(1000 * event["dur"])
        section, _, about = name.partition(" ")
        if kind in ("cpu_op", "cuda_runtime", "cuda_driver"):
            self.calls[thread].append(Call(start, end, name))
        elif kind == "user_annotation" and section in COLOURS:
            self.calls[thread].append(Call(start, end, f"Python in {section}"))
        if kind == "user_annotation" and name.startswith("ProfilerStep#"):
            self.steps[int(name[13:])] = (start, end)
            self.main = thread
        elif kind == "user_annotation" and section in COLOURS:
            self.labels[thread].append(Label(start, end, section, about))
        elif name.startswith("c10d::"):
            self.ops[thread].append(start)
        elif name.startswith("gloo:"):
            self.gloo[thread].append(Call(start, end, name))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            self.kernels.append(Kernel(start, end, name, args["stream"], args["correlation"]))
        elif kind in ("cuda_runtime", "cuda_driver"):
            self.launches[args["correlation"]] = (thread, start)

    def in_steps(self, calls: Iterable[Call]) -> list[Call]:
        """Returns those that began in a step."""
        found = []
        for call in calls:
            if any(start <= call.start < end for start, end in self.steps.values()):
                found.append(call)
        return found

    def operations(self) -> dict[str, list[Own]]:
        """Returns the calls in all steps by place."""
        found: dict[str, list[Own]] = {place: [] for place in PLACES}
        for thread, calls in self.calls.items():
            place = "others"
            calls = self.in_steps(calls)
            if thread == self.main:
                place = "main"
                calls += [Call(start, end, "Python outside sections") for start, end in self.steps.values()]
            elif thread == self.builder:
                place = "builder"
            found[place] += own_times(calls)
        for kernel in self.kernels:
            _, launch = self.launches.get(kernel.correlation, (self.main, kernel.start))
            if self.in_steps([Call(launch, launch, "")]):
                found["device"].append(Own(kernel.name, kernel.end - kernel.start))
        return found

    @property
    def builder(self) -> Any:
        """Returns the thread that builds batches; None: there is none."""
        for thread, labels in self.labels.items():
            if any(label.section == "index" for label in labels):
                return thread
        return None

    def begin_steps_at_batches(self) -> None:
        """Lets each step begin where its thread takes a batch."""
        taken = []
        for label in self.labels[self.main]:
            if (label.section, label.name) == ("waiting", "batch"):
                taken.append(label.start)
        for step, (start, end) in self.steps.items():
            begin = min((time for time in taken if start <= time < end), default=start)
            self.steps[step] = (begin, end)

    def gloo_groups(self) -> tuple[list[Call], list[Call]]:
        """Returns the calls of the main thread's group, and those of the builder's, in order.

        A group of processes runs its operations in their order, on threads of its own. The builder's group
        is not the main thread's, and knows no operation but all_to_all.
        """
        groups: dict[str, list[Call]] = {"gloo": [], "builder gloo": []}
        has_builders = bool(self.ops[self.builder])
        for i, calls in enumerate(self.gloo.values()):
            names = {call.name for call in calls}
            group = "gloo"
            if has_builders and names == {"gloo:all_to_all"}:
                group = "builder gloo"
            groups[group] += [call._replace(name=f"{group} {i}") for call in calls]
        return sorted(groups["gloo"]), sorted(groups["builder gloo"])


def own_times(calls: Iterable[Call]) -> list[Own]:
    """Takes the times of one thread's nested calls apart."""
    outer_first = sorted(calls, key=lambda call: (call.start, -call.end))
    times = [call.end - call.start for call in outer_first]
    around: list[int] = []  # places of the calls that have begun and not ended, the outermost first
    for i, call in enumerate(outer_first):
        while around and outer_first[around[-1]].end <= call.start:
            around.pop()
        if around:
            outer = around[-1]
            times[outer] -= min(call.end, outer_first[outer].end) - call.start
        around.append(i)
    return [Own(call.name, time) for call, time in zip(outer_first, times)]


class Lanes:
    """Collects a rank's spans by lane."""

    def __init__(self, rank: int, events: Events):
        self.rank = rank
        self.events = events
        self.builder = events.builder
        self.spans: dict[str, list[Span]] = defaultdict(list)
        for lane, thread in (("main", events.main), ("builder", self.builder)):
            self.spans[lane] = []
            for start, end, section, name in exclusive(events.labels[thread]):
                self.spans[lane].append(Span(rank, lane, section, name, start, end, start))

    def add(self, lane: str, start: int, end: int, thread: Any, launch: int, default: str) -> None:
        """Adds what a thread launched, in the section of that moment; `default` where there is none."""
        # Threads of autograd count as the main one.
        launcher = self.spans["builder" if thread == self.builder else "main"]
        section = default
        name = ""
        i = bisect_right(launcher, launch, key=lambda s: s.start)
        if i > 0:
            around = launcher[i - 1]
            if launch < around.end and around.section != "other":
                section = around.section
                name = around.name
        self.spans[lane].append(Span(self.rank, lane, section, name, start, end, launch))

    def add_gloo(self) -> None:
        """Adds gloo's calls, each launched by the operation of the same place in its thread's order."""
        calls_of_main, calls_of_builder = self.events.gloo_groups()
        for thread, calls in ((self.events.main, calls_of_main), (self.builder, calls_of_builder)):
            ops = deque(sorted(self.events.ops[thread]))
            for start, end, lane in calls:
                if ops and ops[0] <= start:  # else it was launched before the trace began
                    self.add(lane, start, end, thread, ops.popleft(), "exchange")

    def add_kernels(self) -> None:
        """Adds the kernels. The busiest stream's lane is "stream"."""
        for kernel in sorted(self.events.kernels):
            if kernel.name.startswith("nccl"):
                lane, default = f"nccl {kernel.stream}", "exchange"
            else:
                lane, default = f"stream {kernel.stream}", "other"
            thread, launch = self.events.launches.get(kernel.correlation, (self.events.main, kernel.start))
            self.add(lane, kernel.start, kernel.end, thread, launch, default)
        streams = [lane for lane in self.spans if lane.startswith("stream")]
        if streams:
            busiest = max(streams, key=lambda lane: sum(s.end - s.start for s in self.spans[lane]))
            self.spans["stream"] = [s._replace(lane="stream") for s in self.spans.pop(busiest)]


def read_trace(path: Path) -> Trace:
    """Reads one rank's trace in Chrome's format, gzipped or not."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        data = json.load(file)
    events = Events(data)
    steps = events.steps
    if not steps:
        raise ValueError(f"{path} has no step")
    events.begin_steps_at_batches()
    first_start = min(steps.values())[0]
    last_end = max(steps.values())[1]
    events.labels[events.main].append(Label(first_start, last_end, "other", ""))
    run = data.get("distributedInfo", {})
    lanes = Lanes(run.get("rank", 0), events)
    lanes.add_gloo()
    lanes.add_kernels()
    world_size = run.get("world_size", 1)
    return Trace(lanes.rank, world_size, dict(sorted(steps.items())), dict(lanes.spans), events.operations())


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """Reads the traces of one run's ranks; returns them by rank."""
    traces = sorted(map(read_trace, paths), key=lambda trace: trace.rank)
    if [trace.rank for trace in traces] != list(range(traces[0].world_size)):
        raise ValueError(f"give one trace of each of the run's {traces[0].world_size} ranks")
    for trace in traces:
        for step, (begin, end) in trace.steps.items():
            first = traces[0].steps.get(step)
            if first is None or begin >= first[1] or end <= first[0]:
                raise ValueError("they are of several runs")
    return traces


def starts_and_ends(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Returns both ascending."""
    return sorted(s.start for s in spans), sorted(s.end for s in spans)


def without_waiting(spans: Iterable[Span]) -> list[Span]:
    return [s for s in spans if s.section != "waiting"]


def overlap(a: Sequence[Span], b: Sequence[Span]) -> int:
    """Returns the time that lies in a span of `a` and in one of `b`, each moment once."""
    starts_a, ends_a = starts_and_ends(a)
    starts_b, ends_b = starts_and_ends(b)
    moments = np.unique(starts_a + ends_a + starts_b + ends_b)
    is_in_both = np.ones(len(moments), bool)
    for starts, ends in ((starts_a, ends_a), (starts_b, ends_b)):
        started = np.searchsorted(starts, moments, "right")
        ended = np.searchsorted(ends, moments, "right")
        is_in_both &= started > ended
    return int(np.diff(moments) @ is_in_both[:-1])


def by_section(spans: Iterable[Span], start: int, end: int) -> Counter[str]:
    """Returns nanoseconds from start to end by section; "idle": in no span; "step": in all."""
    found: Counter[str] = Counter()
    for s in spans:
        found[s.section] += max(0, min(s.end, end) - max(s.start, start))
    return found + Counter(idle=end - start - found.total(), step=end - start)


def begins_and_ends(traces: list[Trace], step: int) -> tuple[list[int], list[int]]:
    """Returns when a step begins and ends on each rank's lane that computes."""
    begins, ends = [], []
    for trace in traces:
        begin, end = trace.windows(trace.compute)[step]
        begins.append(begin)
        ends.append(end)
    return begins, ends


def awaited(
    lanes: dict[str, list[Span]], lane: str, time: int, before: Span | None, after: Span | None, begin: int
) -> tuple[int, str]:
    """Returns when, and on which lane, the last finished that a lane needed to go on at `time`.

    lanes: without waiting. before, after: this lane's spans around `time`. begin: of the step.
    """
    kind = kind_of(lane)
    since = begin
    if before:
        since = before.end
    options = [(since, lane)]
    for other, spans in lanes.items():
        if kind_of(other) in WAITS_FOR.get(kind, ()):
            for s in spans:
                is_launched_before = kind != "nccl" or s.launch < after.launch
                if is_launched_before and since < s.end <= time:
                    options.append((s.end, other))
    if after and kind not in ("main", "builder"):
        options.append((after.launch, "builder" if kind == "builder gloo" else "main"))
    return max(options)


def critical_path(traces: list[Trace], step: int) -> list[Span]:
    """Returns what a step's end follows from, by the model of -h: spans that meet, in ascending order."""
    busy = []  # each rank's lanes
    for trace in traces:
        busy.append({lane: without_waiting(spans) for lane, spans in trace.lanes.items()})
    joint = {}  # all ranks' spans of a collective, by each of them
    # Not strict: a trace lacks the last collectives if its rank stopped tracing before gloo began them.
    for calls in zip(*(trace.collectives for trace in traces)):
        for call in calls:
            joint[call] = calls
    begins, ends = begins_and_ends(traces, step)
    time = max(ends)
    rank = ends.index(time)
    lane = traces[0].compute
    path = []
    while time > begins[rank]:
        begin = begins[rank]
        spans = busy[rank][lane]
        i = bisect_left(spans, time, key=lambda s: s.start)
        before = spans[i - 1] if i > 0 else None
        after = spans[i] if i < len(spans) else None
        if before and before.end >= time:
            section, name = before.section, before.name
            last = max(joint.get(before, (before,)), key=lambda call: call.start)
            previous, next_rank, next_lane = last.start, last.rank, last.lane
        else:
            section, name = "waiting", ""
            previous, next_lane = awaited(busy[rank], lane, time, before, after, begin)
            next_rank = rank
        start = max(previous, begin)
        if start < time:
            path.append(Span(rank, lane, section, name, start, time, start))
        time = min(time, previous)
        rank, lane = next_rank, next_lane
    return path[::-1]


def columns_of(traces: list[Trace], lane: str) -> dict[str, Counter[str]]:
    """Returns nanoseconds by section, of each rank and, where the lane computes, of the critical path."""
    is_compute = lane == traces[0].compute
    columns = {}
    for trace in traces:
        spans = trace.lanes.get(lane, [])
        column: Counter[str] = Counter()
        for start, end in trace.windows(lane).values():
            column += by_section(spans, start, end)
        ran = trace.collectives
        if is_compute and ran:
            column["collectives"] = overlap(ran, ran)
            column["hidden"] = overlap(ran, without_waiting(spans))
        columns[f"rank {trace.rank}"] = column
    if is_compute:
        critical: Counter[str] = Counter()
        for step in traces[0].steps:
            path = critical_path(traces, step)
            critical += by_section(path, path[0].start, path[-1].end)
        columns["critical"] = critical
    return columns


def cell(row: str, column: Counter[str], steps: int) -> str:
    if row == "hidden" and row in column:
        return f"{column['hidden'] / column['collectives']:.0%}"
    if column[row]:
        return f"{column[row] / steps / 1e6:.1f}"
    return "-"


def table(traces: list[Trace], lane: str) -> list[str]:
    """Returns the lines about a lane; about the one that computes also collectives and the critical path."""
    columns = columns_of(traces, lane)
    lines = [f"{lane:<12}" + "".join(f"{name:>10}" for name in columns)]
    for row in list(COLOURS) + ["idle", "step", "collectives", "hidden"]:
        if any(column[row] for column in columns.values()):
            line = f"{row:<12}"
            for column in columns.values():
                line += f"{cell(row, column, len(traces[0].steps)):>10}"
            lines.append(line)
    return lines


def operation_table(traces: list[Trace], place: str, most: int) -> list[str]:
    """Returns the lines about a place: the sum, then the `most` operations that took the most time."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    steps = 0
    for trace in traces:
        steps += len(trace.steps)
        for name, time in trace.operations[place]:
            times[name] += time
            calls[name] += 1
    rows = [("all", times.total(), calls.total())]
    for name, time in times.most_common(most):
        rows.append((name[:80], time, calls[name]))  # a kernel's name may have hundreds of characters
    rest = times.most_common()[most:]
    if rest:
        rest_calls = sum(calls[name] for name, _ in rest)
        rows.append((f"{len(rest)} more", sum(time for _, time in rest), rest_calls))
    lines = [f"{'ms':>9} {'share':>6} {'calls':>7}  {PLACES[place]}"]
    for name, time, count in rows:
        share = time / max(1, times.total())
        lines.append(f"{time / steps / 1e6:>9.3f} {share:>6.1%} {count / steps:>7.1f}  {name}")
    return lines


def draw(traces: list[Trace], path: Path) -> None:
    """Writes a PNG of the first step: its lanes, coloured by section, and its critical path."""
    step = next(iter(traces[0].steps))
    begins, ends = begins_and_ends(traces, step)
    begin, end = min(begins), max(ends)
    rows = {}
    for trace in traces:
        for lane, spans in trace.lanes.items():
            rows[trace.rank, lane] = spans
    figure = new_figure(16, 1.5 + 0.4 * len(rows))
    ax = figure.subplots()
    for section, colour in COLOURS.items():
        for y, spans in enumerate(rows.values()):
            bars = []
            for s in spans:
                if s.section == section:
                    bars.append(((s.start - begin) / 1e6, (s.end - s.start) / 1e6))
            label = section
            if y > 0:
                label = f"_{section}"  # the legend leaves it out
            ax.broken_barh(bars, (y - 0.4, 0.8), color=colour, label=label)
    lanes = list(rows)
    times = []
    heights = []
    for s in critical_path(traces, step):
        times += [(s.start - begin) / 1e6, (s.end - begin) / 1e6]
        heights += 2 * [lanes.index((s.rank, s.lane))]
    ax.plot(times, heights, color="black")
    ax.set(xlim=(0, (end - begin) / 1e6), xlabel=f"step {step}, ms", ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    figure.legend(loc="outside upper center", ncols=len(COLOURS))
    save_figure(figure, path, dpi=120)


def run(args: argparse.Namespace) -> None:
    try:
        traces = read_traces(tqdm(args.traces, "reading", unit="trace"))
        tables = []
        if args.operations:
            for place in PLACES:
                if any(trace.operations[place] for trace in traces):
                    tables.append(operation_table(traces, place, args.operations))
        else:
            for lane in "main", "stream", "builder":
                if lane in traces[0].lanes:
                    tables.append(table(traces, lane))
        if args.picture:
            draw(traces, args.picture)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"these are not the traces of a run: {type(error).__name__}: {error}") from None
    steps = list(traces[0].steps)
    print(f"steps {steps[0]} to {steps[-1]}, {len(traces)} ranks; milliseconds a step")
    for lines in tables:
        print()
        print("\n".join(lines))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("timeline.py", __doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--picture", type=png, metavar="FILE.png")
    parser.add_argument("--operations", type=number(int, 1), metavar="N")
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
