"""Tests bench/timeline.py, and the labels and traces of --profile that it reads.

Traces of runs are of two gloo processes; those of GPUs are written here by hand.
"""

import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import timeline
import train_gpt as tg
from launch import Launch, make_corpus, settings

SECTIONS = list(timeline.COLOURS)


# ---- labels in train_gpt.py --------------------------------------------------------------------------------


def test_without_a_profiler_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(tg, "TRACING", False)
    monkeypatch.setattr(torch.profiler, "record_function", None)
    add = tg.section("update {0}")(lambda a, b: a + b)
    assert add(2, b=3) == 5


@pytest.mark.slow
def test_a_label_has_arguments(monkeypatch):
    monkeypatch.setattr(tg, "TRACING", True)
    spec = next(spec for spec in tg.RECORD.params if spec.name == "lm_head")
    label = tg.section("update {1.name}")(lambda a, spec, b: a + b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        assert label(2, spec, b=3) == 5
    assert "update lm_head" in {event.key for event in profiled.key_averages()}


# ---- sections ----------------------------------------------------------------------------------------------


def nested_labels(rng, start, end, depth=0):
    """Yields random labels (start, end, section, name) within one another, outer ones first."""
    while start < end and rng.random() < 0.8:
        a = rng.randint(start, end)
        b = rng.randint(a, min(end - (a == start), a + 30))  # no label is all of another
        yield a, b, rng.choice(SECTIONS), rng.choice(["", "lm_head"])
        if depth < 4:
            yield from nested_labels(rng, a, b, depth + 1)
        start = b


@pytest.mark.parametrize("seed", range(40))
def test_the_innermost_label_counts(seed):
    """Compares with labels that are painted over each other, and sums sections up to the window's time."""
    rng, end = random.Random(seed), 200
    labels = [(0, end, "other", ""), *nested_labels(rng, 0, end)]
    painted = [None] * end
    for a, b, section, name in labels:
        for t in range(a, b):
            is_index = painted[t] and painted[t][0] == "index" and section != "waiting"
            painted[t] = ("index" if is_index else section), name
    pieces = timeline.exclusive(rng.sample(labels, len(labels)))
    assert [piece[2:] for piece in pieces for _ in range(piece[0], piece[1])] == painted
    assert all(a[1] == b[0] and a[2:] != b[2:] for a, b in zip(pieces, pieces[1:]))

    spans = [timeline.Span(0, "main", section, name, a, b, a) for a, b, section, name in pieces]
    start = rng.randint(0, end - 1)
    found = timeline.by_section(spans, start, end)
    assert found["step"] == end - start == sum(found[section] for section in SECTIONS)
    assert +found == Counter(section for section, _ in painted[start:]) + Counter(step=end - start)


def test_time_outside_labels_is_idle():
    spans = [timeline.Span(0, "stream", "forward", "", a, b, a) for a, b in ((0, 10), (15, 20), (30, 50))]
    assert timeline.by_section(spans, 5, 40) == Counter(forward=20, idle=15, step=35)


@pytest.mark.parametrize("seed", range(20))
def test_overlapping_time_counts_once(seed):
    rng = random.Random(seed)
    a, b = ([(x, x + rng.randint(0, 9)) for x in rng.choices(range(60), k=8)] for _ in range(2))
    both = [any(x <= t < y for x, y in a) and any(x <= t < y for x, y in b) for t in range(80)]
    assert timeline.overlap(a, b) == sum(both)


# ---- traces written by hand, in milliseconds ---------------------------------------------------------------

MAIN, BUILDER, GLOO, OTHER_GLOO = 1, 2, 3, 4


def event(name, start, end, thread=MAIN, kind="user_annotation", **args):
    times = {"ts": 1000.0 * start, "dur": 1000.0 * (end - start)}
    return {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, **times, "args": args}


def op(start, name="c10d::allreduce_", thread=MAIN):
    return event(name, start, start + 0.1, thread, "cpu_op")


def kernel(name, start, end, stream, correlation):
    return event(name, start, end, stream, "kernel", stream=stream, correlation=correlation)


def launch_call(start, correlation, thread=MAIN):
    return event("cudaLaunchKernel", start, start + 0.5, thread, "cuda_runtime", correlation=correlation)


def retimed(events, ms):
    return [event | {"ts": event["ts"] + 1000 * ms} for event in events]


def write_trace(path, events, rank=0, world_size=1):
    trace = {"baseTimeNanoseconds": 7, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}
    trace["distributedInfo"] = {"rank": rank, "world_size": world_size}
    path.write_text(json.dumps(trace))
    return path


def on_cpu(late=0, end=100):
    """Returns a step of one of two ranks, whose backward ends `late` ms later than the other's."""
    backward, start = 60 + late, 63 + late
    return [
        event("ProfilerStep#3", 0, end),
        *(event("waiting batch", 10, 12), event("forward", 12, 40), event("head", 35, 40)),
        *(event("backward", 40, backward), event("exchange a", backward, backward + 2), op(backward + 1)),
        *(event("update", backward + 2, 95), event("waiting", backward + 4, 80), event("update a", 80, 90)),
        event("gloo:all_reduce", start, 79, GLOO),
        # The next batch's numbers, exchanged by another group.
        *(event("index", 50, 58, BUILDER), op(51, "c10d::alltoall_base_", BUILDER)),
        *(event("waiting", 52, 55, BUILDER), event("rows tokens", 50, 56, BUILDER)),
        event("gloo:all_to_all", 52, 54, OTHER_GLOO),
    ]


@pytest.fixture
def two_ranks(tmp_path):
    """Returns traces of two ranks, of which the first has a late backward, and the second ends last."""
    ranks = (1, on_cpu(end=101)), (0, on_cpu(late=10))
    return [write_trace(tmp_path / f"{rank}.json", events, rank, 2) for rank, events in ranks]


def in_ms(spans):
    return [(s.rank, s.lane, s.section, s.name, (s.start - 7) / 1e6, (s.end - 7) / 1e6) for s in spans]


def test_spans_have_their_sections_and_names(two_ranks):
    _, trace = timeline.read_traces(two_ranks)
    assert trace.steps == {3: (10_000_007, 101_000_007)}  # it begins where it takes its batch
    assert [span[2:] for span in in_ms(trace.lanes["main"])] == [
        *(("waiting", "batch", 10, 12), ("forward", "", 12, 35), ("head", "", 35, 40)),
        *(("backward", "", 40, 60), ("exchange", "a", 60, 62), ("update", "", 62, 64)),
        *(("waiting", "", 64, 80), ("update", "a", 80, 90), ("update", "", 90, 95), ("other", "", 95, 101)),
    ]
    assert in_ms(trace.collectives) == [(1, "gloo 0", "exchange", "a", 63, 79)]
    builder = [(1, "builder", "index", "tokens", 50, 52), (1, "builder", "waiting", "", 52, 55)]
    assert in_ms(trace.lanes["builder"])[:2] == builder
    assert in_ms(trace.lanes["builder gloo 1"]) == [(1, "builder gloo 1", "index", "tokens", 52, 54)]


def test_a_collective_without_a_label_is_an_exchange(tmp_path):
    events = [event("ProfilerStep#3", 0, 100), op(47), event("gloo:all_reduce", 50, 60, GLOO)]
    trace = timeline.read_trace(write_trace(tmp_path / "a.json", events))
    assert in_ms(trace.collectives) == [(0, "gloo 0", "exchange", "", 50, 60)]


def test_between_labels_there_is_no_section(tmp_path):
    events = [
        *(event("ProfilerStep#3", 0, 100), event("index", 10, 20, BUILDER), event("index", 30, 40, BUILDER)),
        *(op(25, "c10d::alltoall_base_", BUILDER), event("gloo:all_to_all", 26, 50, OTHER_GLOO)),
    ]
    trace = timeline.read_trace(write_trace(tmp_path / "a.json", events))
    assert [span[2:] for span in in_ms(trace.lanes["builder"])] == [
        ("index", "", 10, 20),
        ("index", "", 30, 40),
    ]
    assert in_ms(trace.lanes["builder gloo 0"]) == [(0, "builder gloo 0", "exchange", "", 26, 50)]


def test_a_table(two_ranks):
    """Main threads compute during 1 ms of collectives of 6 and 16 ms."""
    lines = timeline.table(timeline.read_traces(two_ranks), "main")
    assert {line.split()[0]: line.split()[1:] for line in lines} == {
        "main": ["rank", "0", "rank", "1", "critical"],
        **{"forward": ["23.0"] * 3, "head": ["5.0"] * 3, "backward": ["30.0", "20.0", "30.0"]},
        **{"exchange": ["2.0", "2.0", "7.0"], "update": ["17.0", "17.0", "15.0"]},
        **{"waiting": ["8.0", "18.0", "5.0"], "other": ["5.0", "6.0", "6.0"]},
        **{"step": ["90.0", "91.0", "91.0"], "collectives": ["6.0", "16.0", "6.0"]},
        "hidden": ["17%", "6%", "-"],
    }


def test_the_critical_path_goes_through_the_rank_that_comes_last(two_ranks):
    """A collective takes the time from its last participant's start; what precedes it is that one's."""
    path = in_ms(timeline.critical_path(timeline.read_traces(two_ranks), 3))
    assert path == [
        *((0, "main", "waiting", "", 10, 12), (0, "main", "forward", "", 12, 35)),
        *((0, "main", "head", "", 35, 40), (0, "main", "backward", "", 40, 70)),
        *((0, "main", "exchange", "a", 70, 71), (0, "gloo 0", "waiting", "", 71, 73)),
        *((1, "gloo 0", "exchange", "a", 73, 79), (1, "main", "waiting", "", 79, 80)),
        *((1, "main", "update", "a", 80, 90), (1, "main", "update", "", 90, 95)),
        (1, "main", "other", "", 95, 101),
    ]


@pytest.mark.parametrize("ms", (-30, -9, 9, 30))
def test_the_critical_path_with_clocks_that_differ(tmp_path, ms):
    """Its spans still meet: no time counts twice."""
    ranks = on_cpu(late=10, end=140), retimed(on_cpu(), ms)
    paths = (write_trace(tmp_path / f"{rank}.json", events, rank, 2) for rank, events in enumerate(ranks))
    path = timeline.critical_path(timeline.read_traces(paths), 3)
    assert all(span.start < span.end for span in path)
    assert all(a.end == b.start for a, b in zip(path, path[1:]))


def path_of(path, events):
    """Returns the critical path through step 3 of a single rank's events: (lane, section, start, end)."""
    spans = timeline.critical_path([timeline.read_trace(write_trace(path, events))], 3)
    return [(lane, section, start, end) for _, lane, section, _, start, end in in_ms(spans)]


def test_the_critical_path_goes_through_a_late_batch(tmp_path):
    """The batch is late because of an exchange of the thread that builds it."""
    events = [
        *(event("ProfilerStep#3", 0, 100), event("forward", 0, 50), event("waiting rows", 50, 90)),
        *(event("index", 45, 88, BUILDER), event("rows tokens", 46, 48, BUILDER)),
        *(op(47, "c10d::alltoall_base_", BUILDER), event("waiting", 48, 80, BUILDER)),
        event("gloo:all_to_all", 49, 79, OTHER_GLOO),
    ]
    assert path_of(tmp_path / "a.json", events) == [
        *(("builder", "waiting", 0, 45), ("builder", "index", 45, 46), ("builder", "index", 46, 47)),
        *(("builder gloo 0", "waiting", 47, 49), ("builder gloo 0", "index", 49, 79)),
        *(("builder", "waiting", 79, 80), ("builder", "index", 80, 88)),
        *(("main", "waiting", 88, 90), ("main", "other", 90, 100)),
    ]


def test_the_critical_path_goes_through_a_queue(tmp_path):
    """A collective begins when the one before it on its thread ends."""
    events = [
        *(event("ProfilerStep#3", 0, 100), event("exchange a", 0, 10), op(1)),
        *(event("exchange b", 10, 20), op(11), event("waiting", 20, 42), event("forward", 42, 100)),
        *(event("gloo:all_reduce", 2, 30, GLOO), event("gloo:all_reduce", 31, 40, GLOO)),
    ]
    assert path_of(tmp_path / "a.json", events) == [
        *(("main", "exchange", 0, 1), ("gloo 0", "waiting", 1, 2), ("gloo 0", "exchange", 2, 30)),
        *(("gloo 0", "waiting", 30, 31), ("gloo 0", "exchange", 31, 40), ("main", "waiting", 40, 42)),
        ("main", "forward", 42, 100),
    ]


def on_gpu(late=0):
    """Returns two steps of one of two ranks; its NCCL kernel begins `late` ms after the other's."""
    return [
        *(event("ProfilerStep#1", 0, 50), event("ProfilerStep#2", 50, 130)),
        *(event("forward", 0, 20), launch_call(5, 1), launch_call(10, 2)),
        *(event("exchange a", 20, 25), launch_call(22, 3), event("update a", 25, 40), launch_call(30, 4)),
        *(event("backward", 40, 50), launch_call(45, 5, thread=5)),  # by a thread of autograd's
        *(event("head", 55, 65), launch_call(60, 6), event("gather a", 112, 119), launch_call(118, 7)),
        *(kernel("gemm", 10, 30, 7, 1), kernel("gemm", 30, 60, 7, 2), kernel("gemm", 61, 66, 7, 5)),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 60 + late, 80, 20, 3),
        *(kernel("adam", 85, 95, 7, 4), kernel("loss", 110, 115, 7, 6), kernel("copy", 120, 125, 7, 7)),
        event("forward", 10, 60, 7, "gpu_user_annotation"),
    ]


def test_kernels_are_in_the_section_that_launched_them(tmp_path):
    trace = timeline.read_trace(write_trace(tmp_path / "a.json", on_gpu()))
    assert trace.compute == "stream"
    assert [(section, name) for _, _, section, name, *_ in in_ms(trace.lanes["stream"])] == [
        *(("forward", ""), ("forward", ""), ("backward", ""), ("update", "a"), ("head", ""), ("gather", "a")),
    ]
    assert in_ms(trace.collectives) == [(0, "nccl 20", "exchange", "a", 60, 80)]
    windows = {step: ((a - 7) / 1e6, (b - 7) / 1e6) for step, (a, b) in trace.windows("stream").items()}
    assert windows == {1: (10, 110), 2: (110, 125)}


def test_a_gpu_s_table(tmp_path):
    """A kernel runs during a quarter of the collective."""
    traces = timeline.read_traces(
        write_trace(tmp_path / f"{rank}.json", on_gpu(), rank, 2) for rank in range(2)
    )
    rows = {line.split()[0]: line.split()[1:] for line in timeline.table(traces, "stream")[1:]}
    assert {name: row[0] for name, row in rows.items()} == {
        **{"forward": "25.0", "head": "2.5", "backward": "2.5", "update": "5.0", "gather": "2.5"},
        **{"idle": "20.0", "step": "57.5", "collectives": "10.0", "hidden": "25%"},
        **{"exchange": "0.0", "waiting": "0.0", "other": "0.0"},  # the critical path has them
    }
    assert float(rows["step"][2]) == 57.5


def test_a_gpu_s_critical_path(tmp_path):
    """It leaves the stream for NCCL's kernel on the rank that is late, and for a late launch."""
    traces = timeline.read_traces(
        write_trace(tmp_path / f"{rank}.json", on_gpu(8 * rank), rank, 2) for rank in range(2)
    )
    assert in_ms(timeline.critical_path(traces, 1)) == [
        *((1, "stream", "forward", "", 10, 30), (1, "stream", "forward", "", 30, 60)),
        *((1, "nccl 20", "waiting", "", 60, 68), (0, "nccl 20", "exchange", "a", 68, 80)),
        *((0, "stream", "waiting", "", 80, 85), (0, "stream", "update", "a", 85, 95)),
        (0, "stream", "waiting", "", 95, 110),
    ]
    assert in_ms(timeline.critical_path(traces, 2)) == [
        *((0, "main", "other", "", 110, 112), (0, "main", "gather", "a", 112, 118)),
        *((0, "stream", "waiting", "", 118, 120), (0, "stream", "gather", "a", 120, 125)),
    ]


# ---- a run of two gloo processes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Returns traces of a run with n-grams, and a validation among the traced steps."""
    folder = tmp_path_factory.mktemp("folder")
    make_corpus(folder / "corpus")
    change = ("warmup=false", "ngrams.orders=2,3", "ngrams.rows=301", "ngrams.width=12")
    options = ["--preset", "cpu", "--data", "corpus", "--profile", "2", *settings(*change)]
    with Launch(folder, *options, world_size=2) as run:
        assert run.wait() == [0, 0], run.err
    paths = folder.glob("records/other/attempts/*.rank[01].trace.json.gz")
    return timeline.read_traces(paths)


@pytest.mark.slow
def test_every_rank_writes_its_trace(profiled):
    first, second = profiled
    assert first.path.with_name(first.path.name.split(".")[0] + ".txt").exists()  # beside the log
    assert second.path.name == first.path.name.replace("rank0", "rank1")


@pytest.mark.slow
def test_a_run_s_sections(profiled):
    """Each section has time on its thread, and sections add up to each step."""
    for trace in profiled:
        assert list(trace.steps) == [2, 3, 4, 5]
        for start, end in trace.steps.values():
            found = timeline.by_section(trace.lanes["main"], start, end)
            assert all(found[section] > 0 for section in SECTIONS if section != "index")
            assert sum(found[section] for section in SECTIONS) == found["step"] == end - start
        assert {span.section for span in trace.lanes["builder"]} == {"index", "waiting"}


@pytest.mark.slow
def test_a_run_s_parameters(profiled):
    """What is updated has its name; each was exchanged before, by a collective that has its name too."""
    cfg = tg.override(tg.CPU, "ngrams.orders=2,3")
    expected = {spec.name for spec in tg.used_params(cfg)} - {"embed"}  # tied until the last step
    for trace in profiled:
        names = {section: {s.name for s in trace.collectives if s.section == section} for section in SECTIONS}
        updated = {s.name for s in trace.lanes["main"] if s.section == "update" and s.name}
        assert expected <= updated
        assert updated | {"ngrams"} == names["exchange"] | names["rows"]
        assert {spec.name for spec in tg.used_params(cfg) if spec.sharded} - {"embed"} <= names["gather"]
        assert all(s.launch <= s.start < s.end for s in trace.collectives)


@pytest.mark.slow
def test_a_run_s_critical_path(profiled):
    """Its spans meet, from the step's start, which is the ranks' own, to the last rank's end."""
    traces = profiled
    for step in traces[0].steps:
        path = timeline.critical_path(traces, step)
        assert all(a.end == b.start for a, b in zip(path, path[1:]))
        starts = [trace.steps[step][0] for trace in traces]
        assert min(starts) <= path[0].start <= max(starts)
        assert path[-1].end == max(trace.steps[step][1] for trace in traces)
    paths = (timeline.critical_path(traces, step) for step in traces[0].steps)
    assert {"main", "gloo"} <= {timeline.kind_of(span.lane) for path in paths for span in path}


@pytest.mark.slow
def test_output(profiled, tmp_path, capsys):
    picture = tmp_path / "a.png"
    timeline.main([*(str(trace.path) for trace in profiled), "--picture", str(picture), "--step", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps 2 to 5, 2 ranks; milliseconds a step"
    assert lines[2].split() == ["main", "rank", "0", "rank", "1", "critical"]
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- errors ------------------------------------------------------------------------------------------------


def renamed(events, old, new):
    return [event | {"name": event["name"].replace(old, new)} for event in events]


@pytest.mark.parametrize(
    "events, message",
    (
        (on_cpu()[1:], r"1\.json is no trace of --profile: ValueError: no step in it"),
        (
            renamed(on_cpu(), "#3", "#4"),
            r"0\.json and \S+1\.json trace steps \[3\] and \[4\]; give traces of one run",
        ),
        (retimed(on_cpu(), 500), r"0\.json and \S+1\.json trace steps at other times; "),
        (renamed(on_cpu(), "exchange a", "exchange b"), r"0\.json and \S+1\.json have other collectives; "),
    ),
)
def test_traces_of_different_runs(tmp_path, events, message):
    paths = write_trace(tmp_path / "0.json", on_cpu(), 0, 2), write_trace(tmp_path / "1.json", events, 1, 2)
    with pytest.raises(timeline.UserError, match=message):
        timeline.read_traces(paths)


@pytest.mark.parametrize("ranks, found", (((0,), [0]), ((1, 1), [1, 1]), ((0, 1, 1), [0, 1, 1])))
def test_ranks_that_are_missing_or_double(tmp_path, ranks, found):
    paths = [write_trace(tmp_path / f"{i}.json", on_cpu(), rank, 2) for i, rank in enumerate(ranks)]
    with pytest.raises(timeline.UserError) as error:
        timeline.read_traces(paths)
    assert str(error.value) == f"the traces are of ranks {found}; give one of each of the run's 2"


@pytest.mark.parametrize(
    "name, data",
    (
        ("missing.json", None),
        ("text.json", b"step:1/2 val_loss:3"),
        ("list.json", b"[]"),
        ("other.json", b'{"a": 1}'),
        ("events.json", b'{"traceEvents": [{"ph": "X"}]}'),
        ("plain.json.gz", b"{}"),
        ("cut.json.gz", gzip.compress(json.dumps({"traceEvents": on_cpu()}).encode())[:-20]),
    ),
)
def test_a_file_that_is_no_trace(tmp_path, capsys, name, data):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit) as error:
        timeline.main([str(tmp_path / name)])
    assert str(error.value.code).startswith(f"timeline.py: {tmp_path / name} is no trace of --profile: ")
    assert "\n" not in error.value.code and capsys.readouterr().out == ""


def test_a_step_that_was_not_traced(two_ranks):
    with pytest.raises(SystemExit) as error:
        timeline.main([*map(str, two_ranks), "--step", "4"])
    assert error.value.code == "timeline.py: --step 4 is not among the traced steps, 3 to 3"
