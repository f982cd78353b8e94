"""Tests bench/timeline.py, and the labels and traces of --profile that it reads.

Traces of runs are of two gloo processes; those of GPUs are written here by hand.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import timeline
from launch import Launch, make_corpus, settings

SECTIONS = list(timeline.COLOURS)


# ---- traces written by hand, in milliseconds ---------------------------------------------------------------

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
        "baseTimeNanoseconds": 7,
        "traceEvents": [{"ph": "M", "name": "process_name"}] + events,
        "distributedInfo": {"rank": rank, "world_size": world_size},
    }
    path.write_text(json.dumps(trace))
    return path


def on_cpu(late=0, end=100):
    """Returns a step of one of two ranks, whose backward ends `late` ms later than the other's."""
    backward = 60 + late
    start = 63 + late
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
        event("gloo:all_reduce", start, 79, GLOO),
        # The next batch's numbers, exchanged by another group.
        event("index", 50, 58, BUILDER),
        op(51, "c10d::alltoall_base_", BUILDER),
        event("waiting", 52, 55, BUILDER),
        event("rows tokens", 50, 56, BUILDER),
        event("gloo:all_to_all", 52, 54, OTHER_GLOO),
    ]


@pytest.fixture
def two_ranks(tmp_path):
    """Returns traces of two ranks, of which the first has a late backward, and the second ends last."""
    first = write_trace(tmp_path / "0.json", on_cpu(late=10), 0, 2)
    second = write_trace(tmp_path / "1.json", on_cpu(end=101), 1, 2)
    return [second, first]


def to_ms(time):
    """Returns a trace's time in ms from its base time, which write_trace sets."""
    return (time - 7) / 1e6


def in_ms(spans):
    return [(s.rank, s.lane, s.section, s.name, to_ms(s.start), to_ms(s.end)) for s in spans]


def test_spans_have_their_sections_and_names(two_ranks):
    _, trace = timeline.read_traces(two_ranks)
    assert trace.steps == {3: (10_000_007, 101_000_007)}  # it begins where it takes its batch
    assert [span[2:] for span in in_ms(trace.lanes["main"])] == [
        ("waiting", "batch", 10, 12),
        ("forward", "", 12, 35),
        ("head", "", 35, 40),
        ("backward", "", 40, 60),
        ("exchange", "a", 60, 62),
        ("update", "", 62, 64),
        ("waiting", "", 64, 80),
        ("update", "a", 80, 90),
        ("update", "", 90, 95),
        ("other", "", 95, 101),
    ]
    assert in_ms(trace.collectives) == [(1, "gloo 0", "exchange", "a", 63, 79)]
    builder = [(1, "builder", "index", "tokens", 50, 52), (1, "builder", "waiting", "", 52, 55)]
    assert in_ms(trace.lanes["builder"])[:2] == builder
    assert in_ms(trace.lanes["builder gloo 1"]) == [(1, "builder gloo 1", "index", "tokens", 52, 54)]


def test_a_table(two_ranks):
    """Main threads compute during 1 ms of collectives of 6 and 16 ms."""
    lines = timeline.table(timeline.read_traces(two_ranks), "main")
    assert {" ".join(line.split()) for line in lines} == {
        "main rank 0 rank 1 critical",
        "forward 23.0 23.0 23.0",
        "head 5.0 5.0 5.0",
        "backward 30.0 20.0 30.0",
        "exchange 2.0 2.0 7.0",
        "update 17.0 17.0 15.0",
        "waiting 8.0 18.0 5.0",
        "other 5.0 6.0 6.0",
        "step 90.0 91.0 91.0",
        "collectives 6.0 16.0 -",
        "hidden 17% 6% -",
    }


def test_the_critical_path_goes_through_the_rank_that_comes_last(two_ranks):
    """A collective takes the time from its last participant's start; what precedes it is that one's."""
    path = in_ms(timeline.critical_path(timeline.read_traces(two_ranks), 3))
    assert path == [
        (0, "main", "waiting", "", 10, 12),
        (0, "main", "forward", "", 12, 35),
        (0, "main", "head", "", 35, 40),
        (0, "main", "backward", "", 40, 70),
        (0, "main", "exchange", "a", 70, 71),
        (0, "gloo 0", "waiting", "", 71, 73),
        (1, "gloo 0", "exchange", "a", 73, 79),
        (1, "main", "waiting", "", 79, 80),
        (1, "main", "update", "a", 80, 90),
        (1, "main", "update", "", 90, 95),
        (1, "main", "other", "", 95, 101),
    ]


def test_a_rank_may_lack_the_last_collectives(tmp_path):
    """A rank that stops tracing before gloo begins a collective has no span of it."""
    last = [event("gather a", 96, 98), op(97)]
    ran = event("gloo:all_gather", 97, 99, GLOO)
    first = write_trace(tmp_path / "0.json", on_cpu(late=10) + last + [ran], 0, 2)
    second = write_trace(tmp_path / "1.json", on_cpu(end=101) + last, 1, 2)
    traces = timeline.read_traces([first, second])
    assert [len(trace.collectives) for trace in traces] == [2, 1]
    path = in_ms(timeline.critical_path(traces, 3))
    assert path[-2:] == [(1, "main", "gather", "a", 96, 98), (1, "main", "other", "", 98, 101)]


def on_gpu():
    """Returns two steps of a rank, whose last backward kernel runs during its NCCL kernel."""
    return [
        event("ProfilerStep#1", 0, 50),
        event("ProfilerStep#2", 50, 130),
        event("forward", 0, 20),
        launch_call(5, 1),
        launch_call(10, 2),
        event("exchange a", 20, 25),
        launch_call(22, 3),
        event("update a", 25, 40),
        launch_call(30, 4),
        event("backward", 40, 50),
        launch_call(45, 5, thread=5),  # by a thread of autograd's
        event("head", 55, 65),
        launch_call(60, 6),
        event("gather a", 112, 119),
        launch_call(118, 7),
        kernel("gemm", 10, 30, 7, 1),
        kernel("gemm", 30, 60, 7, 2),
        kernel("gemm", 61, 66, 7, 5),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 60, 80, 20, 3),
        kernel("adam", 85, 95, 7, 4),
        kernel("loss", 110, 115, 7, 6),
        kernel("copy", 120, 125, 7, 7),
        event("forward", 10, 60, 7, "gpu_user_annotation"),
    ]


def test_kernels_are_in_the_section_that_launched_them(tmp_path):
    trace = timeline.read_trace(write_trace(tmp_path / "a.json", on_gpu()))
    assert trace.compute == "stream"
    assert [(section, name) for _, _, section, name, *_ in in_ms(trace.lanes["stream"])] == [
        ("forward", ""),
        ("forward", ""),
        ("backward", ""),
        ("update", "a"),
        ("head", ""),
        ("gather", "a"),
    ]
    assert in_ms(trace.collectives) == [(0, "nccl 20", "exchange", "a", 60, 80)]
    windows = {}
    for step, (start, end) in trace.windows("stream").items():
        windows[step] = to_ms(start), to_ms(end)
    assert windows == {1: (10, 110), 2: (110, 125)}


def test_a_picture_replaces_a_picture_only(tmp_path, capsys):
    """It says so before it reads a trace."""
    (tmp_path / "a.md").write_text("mine")
    with pytest.raises(SystemExit):
        timeline.main([str(tmp_path / "none.json"), "--picture", str(tmp_path / "a.md")])
    assert "a.md: another kind of file is there" in capsys.readouterr().err
    assert (tmp_path / "a.md").read_text() == "mine"


def test_steps_that_a_trace_lacks(tmp_path):
    with pytest.raises(SystemExit, match="a.json has no step"):
        timeline.main([str(write_trace(tmp_path / "a.json", [event("forward", 0, 1)]))])
    late = event("ProfilerStep#3", 130, 140)  # without kernels
    trace = timeline.read_trace(write_trace(tmp_path / "b.json", on_gpu() + [late]))
    start, end = trace.windows("stream")[3]
    assert start == end


def test_traces_of_two_runs_are_refused(tmp_path):
    def write_rank(rank, start):
        trace = [event("ProfilerStep#2", start, start + 9), event("forward", start, start + 1)]
        path = write_trace(tmp_path / f"{rank}.json", trace)
        whole = json.loads(path.read_text())
        path.write_text(json.dumps(whole | {"distributedInfo": {"rank": rank, "world_size": 2}}))
        return path

    traces = [write_rank(0, 100), write_rank(1, 104)]
    assert len(timeline.read_traces(traces)) == 2
    traces[1] = write_rank(1, 300)
    with pytest.raises(ValueError, match="of several runs"):
        timeline.read_traces(traces)


def in_tables(path, capsys, *more):
    """Returns the lines of each table of --operations, as words."""
    timeline.main([str(path), "--operations", "9", *more])
    tables = []
    for line in capsys.readouterr().out.splitlines()[1:]:
        if line:
            tables[-1].append(line.split())
        else:
            tables.append([])
    return tables


def test_operations_of_the_gpu_and_of_threads(tmp_path, capsys):
    """Each is a mean over the two steps, without what began outside of them."""
    outside = [
        event("aten::add", 131, 135, kind="cpu_op"),
        launch_call(132, 8),
        kernel("gemm", 133, 140, 7, 8),
    ]
    device, main, others = in_tables(write_trace(tmp_path / "a.json", on_gpu() + outside), capsys)
    assert device[0][3:] == ["the", "GPU's", "kernels"]
    assert device[1:3] == [["47.500", "100.0%", "3.5", "all"], ["27.500", "57.9%", "1.5", "gemm"]]
    # Launches take 0.5 ms each of their sections.
    assert main[1] == ["65.000", "100.0%", "7.0", "all"]
    assert ["9.500", "14.6%", "0.5", "Python", "in", "forward"] in main
    assert ["1.500", "2.3%", "3.0", "cudaLaunchKernel"] in main
    assert others[1:] == [["0.250", "100.0%", "0.5", "all"], ["0.250", "100.0%", "0.5", "cudaLaunchKernel"]]


def test_an_operation_s_time_is_its_own(tmp_path, capsys):
    """Those inside it, and inside these, are taken off; of a kernel in a CUDA graph the launch decides."""
    inner = [
        event("aten::linear", 10, 30, kind="cpu_op"),
        event("aten::mm", 12, 20, kind="cpu_op"),
        event("cudaLaunchKernel", 15, 16, kind="cuda_runtime", correlation=1),
        event("aten::mm", 22, 25, kind="cpu_op"),
        event("cudaGraphLaunch", 38, 40, kind="cuda_runtime", correlation=2),
        kernel("a", 50, 51, 7, 2),
        kernel("b", 100, 103, 7, 2),
    ]
    path = write_trace(tmp_path / "a.json", [event("ProfilerStep#1", 5, 45)] + inner)
    device, main = in_tables(path, capsys)
    assert [row[:1] + row[3:] for row in device[2:]] == [["3.000", "b"], ["1.000", "a"]]
    assert [row[:1] + row[2:] for row in main[1:]] == [
        ["40.000", "6.0", "all"],
        ["18.000", "1.0", "Python", "outside", "sections"],
        ["10.000", "2.0", "aten::mm"],
        ["9.000", "1.0", "aten::linear"],
        ["2.000", "1.0", "cudaGraphLaunch"],
        ["1.000", "1.0", "cudaLaunchKernel"],
    ]
    *_, rest = in_tables(path, capsys, "--operations", "2")[1]
    assert rest == ["12.000", "30.0%", "3.0", "3", "more"]


def test_a_table_needs_a_row(tmp_path, capsys):
    with pytest.raises(SystemExit):
        timeline.main([str(tmp_path / "none.json"), "--operations", "0"])
    assert "give a number from 1 " in capsys.readouterr().err


# ---- a run of two gloo processes ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    """Each section has time on its thread, and sections add up to each step; a validation is among them."""
    make_corpus(tmp_path / "corpus")
    change = settings("warmup=false", "ngrams.orders=2,3", "ngrams.rows_per_order=301", "ngrams.width=12")
    options = ["--preset", "cpu", "--data", "corpus", "--profile", "2"] + change
    with Launch(tmp_path, *options, world_size=2) as run:
        assert run.wait() == [0, 0], run.err
    paths = sorted(tmp_path.glob("records/other/attempts/*.rank[01].trace.json.gz"))
    assert paths[0].with_name(paths[0].name.split(".")[0] + ".txt").exists()  # beside the log
    for trace in timeline.read_traces(paths):
        assert list(trace.steps) == [2, 3, 4, 5]
        for start, end in trace.steps.values():
            found = timeline.by_section(trace.lanes["main"], start, end)
            total = 0
            for section in SECTIONS:
                assert section == "index" or found[section] > 0, section
                total += found[section]
            assert total == found["step"] == end - start
        assert {span.section for span in trace.lanes["builder"]} == {"index", "waiting"}
    first, second = map(str, paths)
    timeline.main([first, second, "--picture", str(tmp_path / "a.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps 2 to 5, 2 ranks; milliseconds a step"
    assert lines[2].split() == ["main", "rank", "0", "rank", "1", "critical"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    timeline.main([first, second, "--operations", "999"])
    named = {line[26:] for line in capsys.readouterr().out.splitlines()}
    assert {"aten::mm", "Python in update", "operations of other threads"} <= named
    with pytest.raises(SystemExit, match="of each of the run's 2 ranks"):
        timeline.main([first])
