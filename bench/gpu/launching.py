"""Checks of the steps `launches` and `graphs`: what CUDA graphs save, and whether they train the same."""

import cProfile
import gc
import pstats
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import step_time as st
import timeline
from machine import Run, Setup, device_ms, near, run_script, with_settings
from runner import Row, Unable

WARM_UP = 6  # steps: a rank of 8 makes two kinds of calls in a stage, and the second of each captures it
PROFILED = 5
TRACED = 3
TABLE_ROWS = 60


def graphs_setting(setup: Setup) -> str:
    """Returns the setting that makes CUDA graphs, which a CPU has not."""
    return "cuda_graphs=true" if setup.on_gpu else "cuda_graphs=false"


# ---- launches ----------------------------------------------------------------------------------------------


def host_and_device(setup: Setup, stage: int) -> Iterator[Row]:
    """Times a stage's steps as one rank of 8 without CUDA graphs, and with them.

    Says of both what takes the main thread's time, by function and by operation, and the GPU's, by kernel.
    """
    base = setup.cfg
    if not setup.on_gpu:
        base = with_settings(base, "stages.*.steps=16")  # the tiny config's run is shorter than what follows
    # One compiles for both.
    plain = st.Variant("", with_settings(base, "cuda_graphs=false"), setup.device)
    for name, setting in (("plain", "cuda_graphs=false"), ("CUDA graphs", graphs_setting(setup))):
        cfg = with_settings(base, setting)
        timed = 3 * setup.timed_steps
        steps = WARM_UP + 2 * timed + 2 + PROFILED + 1 + TRACED + 1  # the last is only fetched for
        what = f"stage {stage}, {name}"
        with setup.training(cfg, stage, 8, steps, compiled_by=plain) as training:
            yield warmed_up(setup, training, what)
            yield times(setup, training, what, timed)
            yield idle_builder(training, what, timed)
            yield python_times(setup, training, what)
            yield from operation_times(setup, training, what)
        del training
        gc.collect()  # or the second would have the first one's memory too


def warmed_up(setup: Setup, training: st.Training, what: str) -> Row:
    """Does the first steps, which compile and capture."""
    seconds = []
    reserved = []
    for i in range(WARM_UP):
        began = time.perf_counter()
        if i == 0:
            training.warm_up(1)
        else:
            training.step()
        seconds.append(time.perf_counter() - began)
        if setup.on_gpu:
            reserved.append(torch.cuda.memory_reserved() >> 20)
    captured = sum(1 for graph in training.model.graphs.captured.values() if graph)
    took = ", ".join(f"{s:.2f}" for s in seconds)
    seen = f"{captured} graphs; {took} s; MiB reserved {reserved}"
    return Row(f"{what}: first steps", seen=seen, numbers={"seconds": seconds, "reserved": reserved})


def times(setup: Setup, training: st.Training, what: str, steps: int) -> Row:
    gc.collect()
    training.reset()
    for _ in range(steps):
        training.step()
    numbers = training.measured(setup.matmul_rate) | {"device": device_ms(training)}
    seen = "{ms:.1f} ms, host {host:.1f} ms, device {device:.1f} ms, builder {builder:.1f} ms of CPU, "
    seen += "wait {wait:.2f} ms, {MiB:.0f} MiB"
    return Row(what, seen=seen.format(**numbers), numbers=numbers)


def idle_builder(training: st.Training, what: str, steps: int) -> Row:
    """Times steps during which no batch is built: the builder's thread would hold the interpreter's lock."""
    training.reset()
    training.is_builder_idle = True
    for _ in range(steps):
        training.step()
    training.is_builder_idle = False
    ms = median(training.ms)
    host = median(training.host)
    seen = f"{ms:.1f} ms, host {host:.1f} ms"
    return Row(f"{what}: batches built before", seen=seen, numbers={"ms": ms, "host": host})


def python_times(setup: Setup, training: st.Training, what: str) -> Row:
    """Profiles the main thread's functions, by their own time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(PROFILED):
        training.step()
    profile.disable()
    found = []
    for (file, line, function), (_, calls, own, *_) in pstats.Stats(profile).stats.items():  # type: ignore
        found.append([1000 * own / PROFILED, calls / PROFILED, f"{Path(file).name}:{line} {function}"])
    found.sort(reverse=True)
    lines = [f"{ms:9.3f} {calls:9.1f}  {name}" for ms, calls, name in found[:TABLE_ROWS]]
    write_text(setup, f"{what} functions", ["ms a step, calls a step, function"] + lines)
    ms, _, name = found[0]
    seen = f"most: {ms:.2f} ms a step in {name}"
    return Row(f"{what}: functions", seen=seen, numbers={"functions": found[:TABLE_ROWS]})


def operation_times(setup: Setup, training: st.Training, what: str) -> Iterator[Row]:
    """Traces steps. OUT gets the trace, and what it says by kernel and operation; so do rows."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    path = setup.out / f"{file_name(what)}.trace.json.gz"
    with torch.profiler.profile(experimental_config=config) as profiler:
        training.step()  # the profiler's own start
        for i in range(TRACED):
            with torch.profiler.record_function(f"ProfilerStep#{i}"):
                training.step()
    profiler.export_chrome_trace(str(path))
    trace = timeline.read_trace(path)
    for place in timeline.PLACES:
        if not trace.operations[place]:
            continue
        lines = timeline.operation_table([trace], place, TABLE_ROWS)
        write_text(setup, f"{what} {place}", lines)
        ms, *_ = lines[1].split()
        yield Row(f"{what}: {place}", seen=f"{ms} ms a step", numbers={"table": lines})


def file_name(what: str) -> str:
    return what.replace(",", "").replace(" ", "_")


def write_text(setup: Setup, what: str, lines: list[str]) -> None:
    (setup.out / f"{file_name(what)}.txt").write_text("\n".join(lines) + "\n")


# ---- graphs ------------------------------------------------------------------------------------------------

# One micro-batch a step, of the length that a rank of 8 has. There are two stages, so that the
# warm-up captures every call of the first.
ONE_RANK = (
    "microbatches=1 stages.*.steps=0 stages.0.steps=40 stages.1.steps=8 stages.0.batch_tokens=16384 "
    "stages.1.batch_tokens=32768"
)
ONE_RANK_ALL = (
    "microbatches=1 stages.*.steps=8 late_updates_from=20 two_momenta_from=24 stages.0.batch_tokens=16384 "
    "stages.1.batch_tokens=32768 stages.2.batch_tokens=49152 stages.3.batch_tokens=40960 "
    "stages.4.batch_tokens=40960"
)
RUNS = {
    "one micro-batch": ONE_RANK,
    "eight micro-batches": "stages.*.steps=0 stages.0.steps=12 stages.1.steps=4",
    "all stages": ONE_RANK_ALL,
}


def compare_runs(setup: Setup, name: str, settings: str) -> Iterator[Row]:
    """Trains by train_gpt.py without CUDA graphs, with them, and again without.

    Two runs without them differ too, as atomic additions come in any order: that is the yardstick.
    """
    settings = f"{setup.settings} val_slices=2 val_every=10 {settings}"
    if not setup.on_gpu:
        if name != next(iter(RUNS)):
            raise Unable("it needs a GPU")
        settings = f"{setup.settings} val_every=4 stages.0.steps=8"
    runs: list[Run] = []
    for kind, setting in (
        ("plain", "cuda_graphs=false"),
        ("CUDA graphs", graphs_setting(setup)),
        ("plain again", "cuda_graphs=false"),
    ):
        what = f"{name}, {kind}"
        seen = run_script(setup, file_name(what), f"{settings} {setting}")
        runs.append(seen)
        expected, ok = near(seen.val_loss, runs[0].val_loss)
        line = f"{seen.line()}; fastest steps {seen.fastest:.1f} ms"
        yield Row(what, expected, line, ok, numbers=asdict(seen))
    yield judge(name, *runs)


def judge(name: str, plain: Run, graphs: Run, again: Run) -> Row:
    """Compares the training losses of the runs with graphs and without."""
    bound = 3 * largest_difference(plain, again) + 0.002
    difference = largest_difference(plain, graphs)
    expected = f"losses of all steps +- {bound:.4f}"
    share = graphs.fastest / plain.fastest
    seen = f"+- {difference:.4f}, {share:.2f} of the time, {graphs.mib - plain.mib:+.0f} MiB"
    return Row(f"{name}: CUDA graphs against plain", expected, seen, difference <= bound)


def largest_difference(a: Run, b: Run) -> float:
    """Returns that of the two runs' losses. Both log nearly all steps; a nan is no small difference."""
    differences = [abs(a.val_loss - b.val_loss)]
    for step in a.losses.keys() & b.losses.keys():
        differences.append(abs(a.losses[step] - b.losses[step]))
    return float(torch.tensor(differences).max())
