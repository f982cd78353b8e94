"""Tests bench/timeline.py, and the labels and traces of --profile that it reads.

Traces of runs are of two gloo processes; those of GPUs are written here by hand.
"""

import itertools
import json

import pytest

import timeline
from launch import Launch, make_corpus, settings

# ---- traces written by hand, in milliseconds ---------------------------------------------------------------

BASE = 7  # ns
MAIN, BUILDER, GLOO, OTHER_GLOO = 1, 2, 3, 4


def event(name, start, end, thread=MAIN, kind="user_annotation", **args):
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 9,
        "tid": thread,
        "ts": 1000.0 * start,
        "dur": 1000.0 * (end - start),
        "args": args,
    }


def op(start, name="c10d::allreduce_", thread=MAIN):
    return event(name, start, start + 0.1, thread, "cpu_op")


def kernel(name, start, end, stream, correlation):
    return event(name, start, end, stream, "kernel", stream=stream, correlation=correlation)


def launch_call(start, correlation, thread=MAIN):
    return event("cudaLaunchKernel", start, start + 0.5, thread, "cuda_runtime", correlation=correlation)


def write_trace(path, events, rank=0, world_size=1):
    trace = {
        "baseTimeNanoseconds": BASE,
        "traceEvents": [{"ph": "M", "name": "process_name"}] + events,
        "distributedInfo": {"rank": rank, "world_size": world_size},
    }
    path.write_text(json.dumps(trace))
    return path


def on_cpu(late=0, end=100):
    """Returns a step of one of two ranks, whose backward ends `late` ms later than the other's."""
    backward = 60 + late
    return [
        event("ProfilerStep#3", 0, end),
        event("waiting batch", 10, 12),
        event("forward", 12, 40),
        event("head", 35, 40),
        event("backward", 40, backward),
        event("exchange a", backward, backward + 2),
        op(backward + 1),
        event("update", backward + 2, 95),
        event("waiting", backward + 4, 80),
        event("update a", 80, 90),
        event("gloo:all_reduce", backward + 3, 79, GLOO),
        # The next batch's numbers, exchanged by another group.
        event("index", 50, 58, BUILDER),
        op(51, "c10d::alltoall_base_", BUILDER),
        event("waiting", 52, 55, BUILDER),
        event("rows tokens", 50, 56, BUILDER),
        event("gloo:all_to_all", 52, 54, OTHER_GLOO),
        op(98),
    ]


@pytest.fixture
def two_ranks(tmp_path):
    """Returns traces of two ranks, of which the first has a late backward, and the second ends last.

    The second stops tracing before gloo begins the last collective.
    """
    last = event("gloo:all_gather", 99, 100, GLOO)
    first = write_trace(tmp_path / "0.json", on_cpu(late=10) + [last], 0, 2)
    second = write_trace(tmp_path / "1.json", on_cpu(end=101), 1, 2)
    return timeline.read_traces([second, first])


def as_text(spans):
    """Returns a line for each span: rank, lane, section with name, start and end in ms."""
    lines = []
    for s in spans:
        start = (s.start - BASE) / 1e6
        end = (s.end - BASE) / 1e6
        lines.append(f"{s.rank} {s.lane}: {s.section} {s.name} {start:g} {end:g}")
    return "\n".join(lines)


def test_spans_have_their_sections_and_names(two_ranks):
    """A step begins where it takes its batch."""
    _, trace = two_ranks
    lanes = []
    for spans in trace.lanes.values():
        lanes.append(as_text(spans))
    want = """\
1 main: waiting batch 10 12
1 main: forward  12 35
1 main: head  35 40
1 main: backward  40 60
1 main: exchange a 60 62
1 main: update  62 64
1 main: waiting  64 80
1 main: update a 80 90
1 main: update  90 95
1 main: other  95 101
1 builder: index tokens 50 52
1 builder: waiting  52 55
1 builder: index tokens 55 56
1 builder: index  56 58
1 gloo 0: exchange a 63 79
1 builder gloo 1: index tokens 52 54"""
    assert "\n".join(lanes) == want


def test_a_table(two_ranks):
    """Main threads compute during 2 ms of collectives of 7 ms, and 1 ms of 16."""
    want = """\
main            rank 0    rank 1  critical
forward           23.0      23.0      23.0
head               5.0       5.0       5.0
backward          30.0      20.0      30.0
exchange           2.0       2.0       7.0
update            17.0      17.0      15.0
waiting            8.0      18.0       5.0
other              5.0       6.0       6.0
step              90.0      91.0      91.0
collectives        7.0      16.0         -
hidden             29%        6%         -"""
    assert "\n".join(timeline.table(two_ranks, "main")) == want


def test_the_critical_path_goes_through_the_rank_that_comes_last(two_ranks):
    """A collective takes the time from its last participant's start; what precedes it is that one's."""
    want = """\
0 main: waiting  10 12
0 main: forward  12 35
0 main: head  35 40
0 main: backward  40 70
0 main: exchange a 70 71
0 gloo 0: waiting  71 73
1 gloo 0: exchange a 73 79
1 main: waiting  79 80
1 main: update a 80 90
1 main: update  90 95
1 main: other  95 101"""
    assert as_text(timeline.critical_path(two_ranks, 3)) == want


def on_gpu():
    """Returns two steps of a rank, whose last backward kernel runs during its NCCL kernel."""
    return [
        event("ProfilerStep#1", 0, 50),
        event("ProfilerStep#2", 50, 130),
        event("forward", 0, 20),
        launch_call(5, 1),
        event("exchange a", 20, 25),
        launch_call(22, 3),
        event("update a", 25, 40),
        launch_call(30, 4),
        event("backward", 40, 50),
        launch_call(45, 5, thread=5),  # by a thread of autograd's
        event("head", 55, 65),
        launch_call(60, 6),
        kernel("gemm", 10, 60, 7, 1),
        kernel("gemm", 61, 66, 7, 5),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 60, 80, 20, 3),
        kernel("adam", 85, 95, 7, 4),
        kernel("loss", 110, 115, 7, 6),
        event("forward", 10, 60, 7, "gpu_user_annotation"),
    ]


def test_kernels_are_in_the_section_that_launched_them(tmp_path):
    """A step lasts until the next one's first kernel; the third has none."""
    events = on_gpu() + [event("ProfilerStep#3", 130, 140)]
    trace = timeline.read_trace(write_trace(tmp_path / "a.json", events))
    want = """\
0 stream: forward  10 60
0 stream: backward  61 66
0 stream: update a 85 95
0 stream: head  110 115
0 nccl 20: exchange a 60 80"""
    assert as_text(trace.lanes["stream"] + trace.collectives) == want
    times = [10_000_007, 110_000_007, 115_000_007, 115_000_007]
    assert list(trace.windows("stream").values()) == list(itertools.pairwise(times))


def test_what_is_no_whole_run_is_refused(tmp_path):
    no_step = write_trace(tmp_path / "a.json", [event("forward", 0, 1)])
    with pytest.raises(SystemExit, match="a.json has no step"):
        timeline.main([str(no_step)])
    traces = []
    for rank, start in (0, 100), (1, 300):
        step = [event("ProfilerStep#2", start, start + 9)]
        traces.append(write_trace(tmp_path / f"{rank}.json", step, rank, 2))
    with pytest.raises(ValueError, match="of several runs"):
        timeline.read_traces(traces)


def test_operations_of_the_gpu_and_of_threads(tmp_path, capsys):
    """Each is a mean over the two steps, without what began outside of them. Launches take 0.5 ms.

    An operation's time is its own: those inside it are taken off. Of a kernel in a CUDA graph the launch
    decides.
    """
    more = [
        event("aten::add", 131, 135, kind="cpu_op"),
        launch_call(132, 8),
        kernel("gemm", 133, 140, 7, 8),
        event("aten::linear", 41, 49, kind="cpu_op"),
        event("aten::mm", 42, 44, kind="cpu_op"),
        event("aten::mm", 45, 48, kind="cpu_op"),
        event("cudaGraphLaunch", 70, 72, kind="cuda_runtime", correlation=9),
        kernel("a", 131, 132, 7, 9),
        kernel("b", 140, 143, 7, 9),
    ]
    timeline.main([str(write_trace(tmp_path / "a.json", on_gpu() + more)), "--operations", "7"])
    want = """\
steps 1 to 2, 1 ranks; milliseconds a step

       ms  share   calls  the GPU's kernels
   47.000 100.0%     3.5  all
   27.500  58.5%     1.0  gemm
   10.000  21.3%     0.5  ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)
    5.000  10.6%     0.5  adam
    2.500   5.3%     0.5  loss
    1.500   3.2%     0.5  b
    0.500   1.1%     0.5  a

       ms  share   calls  the main thread's operations
   65.000 100.0%     7.5  all
   34.000  52.3%     1.0  Python outside sections
    9.750  15.0%     0.5  Python in forward
    7.250  11.2%     0.5  Python in update
    4.750   7.3%     0.5  Python in head
    2.500   3.8%     1.0  aten::mm
    2.250   3.5%     0.5  Python in exchange
    1.500   2.3%     0.5  aten::linear
    3.000   4.6%     3.0  3 more

       ms  share   calls  operations of other threads
    0.250 100.0%     0.5  all
    0.250 100.0%     0.5  cudaLaunchKernel
"""
    assert capsys.readouterr().out == want


# ---- a run of two gloo processes ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_run(tmp_path, capsys):
    """Each section has time on its thread, and sections add up to each step; a validation is among them."""
    make_corpus(tmp_path / "corpus")
    change = settings("warmup=false", "ngrams.orders=2,3", "ngrams.rows_per_order=301", "ngrams.width=12")
    options = "--preset cpu --data corpus --profile 2".split() + change
    Launch(tmp_path, *options, world_size=2).succeed()
    paths = sorted(tmp_path.glob("records/other/attempts/*.rank[01].trace.json.gz"))
    assert paths[0].with_name(paths[0].name.split(".")[0] + ".txt").exists()  # beside the log
    for trace in timeline.read_traces(paths):
        assert list(trace.steps) == [2, 3, 4, 5]
        for start, end in trace.steps.values():
            found = timeline.by_section(trace.lanes["main"], start, end)
            assert found.pop("step") == found.total() == end - start
            assert set(found) | {"index"} == set(timeline.COLOURS)
        assert {span.section for span in trace.lanes["builder"]} == {"index", "waiting"}
    timeline.main([*map(str, paths), "--picture", str(tmp_path / "a.png")])
    assert "steps 2 to 5, 2 ranks; milliseconds a step\n\nmain  " in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
