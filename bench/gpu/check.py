#!/usr/bin/env python3
"""Checks and times train_gpt.py's record preset on this machine's GPUs, in one call.

    python bench/gpu/check.py [--minutes 25] [--only STEP,...] [--out gpu_check]

    start     what is here; train_gpt.py for a twentieth of its run
    kernels   each Triton kernel, FlashAttention and the FP8 products against fp64
    steps     compiled graphs after the warm-up; loss and every gradient of a full-width step, with several
              settings, against plain fp32; steps that may not wait for the GPU
    times     host and device ms of each stage's step, and the batch builder's of CPU; each kernel, and
              FlashAttention 2 and 3, against plain torch and measured ceilings
    run       a twentieth of train_gpt.py's run on synthetic tokens, with a trace; again with plain settings
    nccl      all calls of Collectives, and training by other exchanges, on all GPUs (collectives.py); on two
              or more, runs with fp32 sums and with dense tables, against the run before
    host      what single operations take of the host (host.py)
    launches  one rank of 8 with CUDA graphs and without: host, device and builder, by function, operation
              and kernel (launching.py)
    graphs    losses, time and memory of train_gpt.py with CUDA graphs and without
    rates     products and FlashAttention of a rank of 8, alone (rates.py)

The last four each take at most four minutes of one GPU.

Prints each row as soon as it is known. OUT gets the rows (rows.jsonl), tracebacks (errors.txt), the machine's
description (environment.txt), the runs' logs, traces for ui.perfetto.dev, and all rows with the settings for
this card (summary.txt). It is a new folder, or one of an earlier call. Needs no internet. Exit status: 1 if a
check failed.

A check that raises, hangs or kills its process costs its own rows only (runner.py). When --minutes are over,
the running check is stopped; what was left out is listed. Without a GPU everything runs on the cpu preset at
tiny sizes, with plain torch in the kernels' place: a test of this program alone.
"""

import argparse
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import host
import launching
import rates
import step_time as st
import train_gpt as tg
from collectives import exchange_rank
from kernels import BF16, compare, double, kernel_cases, rel_err, run
from machine import (
    FEW_ROWS,
    OFF,
    PLAIN,
    TINY,
    Setup,
    device_ms,
    loss_and_errors,
    near,
    run_script,
    with_settings,
)
from runner import Check, Report, Row, Unable, run_checks, without_paths

# ---- start -------------------------------------------------------------------------------------------------


def environment(setup: Setup) -> Iterator[Row]:
    """Describes the machine, and names the features that it lacks."""
    lines = tg.describe_environment(setup.device, setup.ranks)
    machine = f"{os.cpu_count()} cores, no GPU: the cpu preset at tiny sizes"
    software = f"torch {torch.__version__}, triton {getattr(tg.triton, '__version__', 'none')}"
    software += f", numpy {np.__version__}"
    if setup.on_gpu:
        p = torch.cuda.get_device_properties(setup.device)
        memory = f"{p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors"
        machine = f"{setup.gpus} x {p.name} ({p.major}.{p.minor}), {memory}; {os.cpu_count()} cores"
        software += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    described = lines + [machine, software]
    if shutil.which("nvidia-smi"):
        described.append(subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout)
    (setup.out / "environment.txt").write_text(without_paths("\n".join(described)))
    yield Row("machine", seen=machine, numbers={"gpus": setup.gpus})
    yield Row("software", seen=software)
    yield Row("code", seen="; ".join(lines[2:]))
    yield from setup.missing


# ---- kernels -----------------------------------------------------------------------------------------------


def backend_with(setup: Setup, feature: str) -> tuple[tg.Config, tg.Backend]:
    """Returns the config and the backend with only this kernel, or only this FlashAttention.

    Raises Unable if this GPU cannot run it.
    """
    attention = {"attention": "varlen", "fa3": "fa3"}.get(feature, "dense")
    kernels = feature if feature in tg.RECORD.kernels else ""
    cfg = with_settings(setup.cfg, f"kernels={kernels} attention_impl={attention} compile=false")
    if not setup.on_gpu:
        return cfg, tg.TORCH_BACKEND
    try:
        variant = st.Variant("", cfg, setup.device)
    except tg.UserError as e:
        raise Unable(str(e)) from None
    variant.activate()
    return cfg, variant.backend


def accuracy(setup: Setup, feature: str) -> Iterator[Row]:
    """Compares a feature's operations with fp64, on the operands of the first and the third stage."""
    cfg, backend = backend_with(setup, feature)
    seen = set()
    for stage in (0, 2):
        # The later stage's operands, but as few tokens as the first one's: fp64 scores take much memory.
        short = replace(cfg, microbatches=max(cfg.microbatches, cfg.stages[stage].batch_tokens // 16384))
        for case in kernel_cases(short, [stage], setup.paths, setup.device):
            if case[:2] in seen:
                continue
            seen.add(case[:2])
            error, bound = compare(case, backend)
            what = f"{case.operation} {case.shapes}"
            yield Row(what, f"error <= {bound:.1e}", f"{error:.1e}", error <= bound, feature)


# Relative errors of one rounding; e4m3's are 2 to 3 %.
ROUNDING = {torch.bfloat16: BF16, torch.float8_e4m3fn: 0.03}


def fp8_products(setup: Setup) -> Iterator[Row]:
    """Compares the head's three products, and the MLPs' but the first, with fp64, and times them.

    As in a step, scales are numbers of one tensor, 16 bytes apart, and the result has its place.
    """
    cfg = setup.cfg
    if not cfg.fp8:
        raise Unable("this GPU has no FP8")
    n = min(2048, cfg.head_chunk)
    d = cfg.dim
    V = tg.plan_step(cfg, 0).sampled_columns or cfg.padded_vocab
    x = setup.rand(n, d).to(torch.float8_e4m3fn)
    w = setup.rand(V, d).to(torch.float8_e4m3fn)
    grad = setup.rand(n, V).to(torch.float8_e5m2)
    square = setup.rand(n, cfg.mlp_dim).to(torch.float8_e4m3fn)
    proj = setup.rand(d, cfg.mlp_dim).to(torch.float8_e4m3fn)
    dy = setup.rand(n, d).to(torch.float8_e5m2)
    da = setup.rand(n, cfg.mlp_dim).to(torch.float8_e5m2)
    scales = torch.tensor([0.0, 0.37, 0.5], device=setup.device)[:, None].repeat(1, 4)[:, 0]

    products = {
        "logits": (x, w.T, torch.float8_e4m3fn, True),
        "gradient of x": (grad, tg.transposed_copy(w).T, torch.bfloat16, False),
        "gradient of w": (tg.transposed_copy(x), tg.transposed_copy(grad).T, torch.float32, False),
        "MLP": (square, proj.T, torch.bfloat16, True),
        "gradient of proj": (tg.transposed_copy(square), tg.transposed_copy(dy).T, torch.float32, False),
        "gradient of h": (da, proj.T, torch.bfloat16, False),
        "gradient of fc": (tg.transposed_copy(da), tg.transposed_copy(x).T, torch.float32, False),
    }
    for name, (a, b, dtype, fast) in products.items():
        out = torch.empty(len(a), b.size(1), dtype=dtype, device=setup.device)
        call = partial(tg.fp8_matmul, a, b, (scales[1], scales[2]), dtype, fast, out)
        error = rel_err(call(), 0.37 * 0.5 * (double(a) @ double(b)))
        bound = 2e-3 + ROUNDING.get(dtype, 0)  # Hopper keeps few bits of fp8 sums
        rate = 2 * a.numel() * b.size(1) / st.timed([call], setup.device, 10)[0] / 1e9
        what = f"fp8 {name}, {a.size(0)} x {a.size(1)} x {b.size(1)}"
        seen = f"{error:.1e}, {rate:.4g} TFLOP/s"
        yield Row(what, f"error <= {bound:.1e}", seen, error <= bound, "fp8")


# ---- steps -------------------------------------------------------------------------------------------------

FORMS = {PLAIN: "plain torch", "compile=false": "compile=false", "": "the config"}  # settings: name
FORMS |= {"fp8_mlp=false": "fp8_mlp=false", "fp8=false": "fp8=false"}
FORMS["kernels= fp8=false"] = "kernels= fp8=false"
# A form may have 1.5 times plain bf16's errors (4 times, for few numbers: chance), and this more. The head's
# FP8 is in the gradient of its input, so in all: at full width, for 512 tokens on a CPU, 0.02 to 0.07. The
# MLPs' alone makes about 0.1 in their weights' gradients.
PLAIN_SLACK = 0.005
HEAD_SLACK = 0.1
MLP_SLACK = 0.2
FEW = 1000


def graphs(setup: Setup) -> Iterator[Row]:
    """Counts graphs while train_gpt.py's own loop trains two steps a stage, with warm-up and validation."""
    from torch._dynamo.utils import counters  # slow

    # Steps of all kinds: with one rail and with two, with updates of tables often and rarely.
    few = f"stages.*.steps=2 late_updates_from=2 two_momenta_from=4 val_slices=1 val_every=0 {FEW_ROWS}"
    cfg = with_settings(setup.cfg, few)
    data = tg.Dataset(setup.paths, setup.paths, 1, 0.0, "")
    backend = tg.select_backend(cfg, setup.device)
    comm = tg.Collectives(0, 1, device=setup.device)
    built = tg.build(cfg, backend, comm, 0)
    training = tg.Training(data, *built, tg.ValLoader(cfg, setup.paths), tg.Collectives(0, 1))
    stats = counters["stats"]
    tg.warm_up(training)
    warm = stats["unique_graphs"]
    tg.train(training, tg.RunLog(), tg.Progress())
    new = stats["unique_graphs"] - warm
    seen = f"{new} more than {warm} in {cfg.steps} steps"
    yield Row("compiled graphs after the warm-up", "0 more", seen, new == 0)


def gradients(setup: Setup, form: str) -> Iterator[Row]:
    """Compares a form's loss and gradients with plain fp32's; plain bf16's errors are the yardstick."""
    cfg = with_settings(setup.cfg, form)
    what = f"gradients: {FORMS[form]}"
    twin = next(twin for twin in FORMS if with_settings(setup.cfg, twin) == cfg)
    if twin != form:
        yield Row(what, seen=f"here the same as {FORMS[twin]}")
        return
    exact_loss, exact = setup.exact
    loss, plain = setup.plain
    errors = plain
    if form != PLAIN:
        loss, errors = loss_and_errors(setup, cfg)
    slack = PLAIN_SLACK
    if cfg.fp8:
        slack = MLP_SLACK if cfg.fp8_mlp else HEAD_SLACK
    ratios = {}
    for name, error in errors.items():
        numbers = exact[name].numel()
        bound = (4 if numbers < FEW else 1.5) * plain[name] + slack
        if numbers == 1:  # it may be a small rest of large sums
            bound = 1.0
        if setup.on_gpu:  # tiny sizes have larger errors
            bound = min(bound, 0.5)
        ratios[name] = math.inf if math.isnan(error) else error / bound
    worst = max(ratios, key=lambda name: ratios[name])
    ok = ratios[worst] <= 1 and median(plain.values()) < 0.1 and abs(loss - exact_loss) < 0.01
    expected = f"loss {exact_loss:.4f}, errors <= 1.5 plain + {slack}"
    seen = f"loss {loss:.4f}, worst: {worst} {errors[worst]:.1e}, plain {plain[worst]:.1e}"
    yield Row(what, expected, seen, ok, form=form, numbers={"loss": loss, "errors": errors})


def no_wait(setup: Setup, stage: int, world_size: int) -> Iterator[Row]:
    """Runs two steps, one with Adam, in which torch raises where the host would wait for the GPU."""
    cfg = with_settings(setup.cfg, FEW_ROWS)
    with setup.training(cfg, stage, world_size, 7) as training:  # the last is only fetched for
        training.warm_up(setup.warmup_ranges)
        for step in range(2):
            batch = training.batches.next()
            training.synchronize()
            if setup.on_gpu:
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss = tg.train_step(training.model, training.optimizer, batch, training.batches.peek)
                tg.AsyncLoss().push(step, loss)
            finally:
                if setup.on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
    if not setup.on_gpu:
        raise Unable("a CPU never waits")
    what = f"stage {stage}, 1 rank of {world_size}: waiting forbidden"
    yield Row(what, "two steps run", f"they do, loss {loss.item():.4f}", True)


# ---- times -------------------------------------------------------------------------------------------------


def ceilings(setup: Setup) -> Iterator[Row]:
    dtype = "bf16" if setup.on_gpu else "fp32"
    yield Row("products", seen=f"{setup.matmul_rate / 1e12:.4g} TFLOP/s, {dtype}")
    yield Row("copies", seen=f"{setup.copy_rate / 1e9:.4g} GB/s, read and written")


def stage_times(setup: Setup, stage: int, name: str) -> Iterator[Row]:
    """Times a stage's step: a mean over an Adam period, the median over periods."""
    with setup.training(setup.cfg, stage, st.SETUPS[name], 6 + setup.timed_steps) as training:
        training.warm_up(setup.warmup_ranges)
        gc.collect()
        for _ in range(setup.timed_steps):
            training.step()
        numbers = training.measured(setup.matmul_rate) | {"device": device_ms(training)}
    seen = "{ms:.1f} ms, host {host:.1f} ms, device {device:.1f} ms, builder {builder:.1f} ms of CPU, "
    seen += "{tokens/s:.0f} tokens/s, MFU {MFU:.2f}, {MiB:.0f} MiB"
    yield Row(f"stage {stage}, {name}", seen=seen.format(**numbers), numbers=numbers)


def kernel_times(setup: Setup, feature: str) -> Iterator[Row]:
    """Times a feature's operations against plain torch and the measured ceilings."""
    cfg, backend = backend_with(setup, feature)
    for case in kernel_cases(cfg, [0, 2], setup.paths, setup.device):
        own = partial(run, case.operation, case.args, backend)
        plain = partial(run, case.operation, case.args, tg.TORCH_BACKEND)
        ms, torch_ms = st.timed([own, plain], setup.device, 10)
        if case.flops:
            rate = f"{case.flops / ms / 1e9:.0f} TFLOP/s"
            share = case.flops / setup.matmul_rate
        else:
            rate = f"{case.nbytes / ms / 1e6:.0f} GB/s"
            share = case.nbytes / setup.copy_rate
        seen = f"{ms:.3f} ms, torch {torch_ms:.3f} ms ({ms / torch_ms:.2f}); "
        seen += f"{rate}, {1000 * share / ms:.0%} of the ceiling"
        what = f"{case.operation} {case.shapes}"
        yield Row(
            what, "faster than torch", seen, feature=feature, operation=case.operation, ms=(ms, torch_ms)
        )


# ---- run ---------------------------------------------------------------------------------------------------


def timed_run(setup: Setup, name: str, settings: str, gpus: int) -> Iterator[Row]:
    """Trains by train_gpt.py, on all GPUs, on synthetic tokens. Keeps the log, and the traces of "run".

    It must end near the validation loss of "run", if that came before.
    """
    if setup.gpus < gpus:
        raise Unable(f"it needs {gpus} GPU{'s' * (gpus > 1)}")
    settings = f"{setup.settings} val_slices=2 val_every=0 {settings}"
    profiled = "1"
    if setup.on_gpu:
        settings += " length=0.05"
        profiled = "8"
    more = []
    if name == "run":
        more = ["--profile", profiled]
    seen = run_script(setup, name, settings, more)
    kept = setup.scratch / "run_val_loss.txt"
    if name != "run" and kept.exists():
        expected, ok = near(seen.val_loss, float(kept.read_text()))
    else:
        uniform = math.log(tg.PRESETS[setup.preset].vocab_size)
        expected = f"val_loss < {uniform:.2f}, of a uniform guess"
        ok = seen.val_loss < uniform
    if name == "run":
        kept.write_text(str(seen.val_loss))
    what = f"{name}: {seen.steps} steps, {setup.ranks} process(es)"
    yield Row(what, expected, seen.line(), ok, numbers={"val_loss": seen.val_loss, "ms": seen.ms})


# ---- nccl --------------------------------------------------------------------------------------------------


def exchanges(setup: Setup) -> Iterator[Row]:
    """Runs exchange_rank on the largest of 8, 4, 2 and 1 GPUs; without one on two gloo ranks."""
    n = 2
    library = "gloo"
    if setup.on_gpu:
        n = setup.ranks
        library = "NCCL"
    scratch = Path(tempfile.mkdtemp(dir=setup.scratch))
    cfg = with_settings(tg.CPU, f"{TINY} stages.*.steps=2 dtype=float32 bank_dtype=float32 fp8=false")
    (shard,) = st.synthetic_shard(str(scratch), cfg, [0, 1, 2, 3], 10)
    try:
        args = n, setup.on_gpu, cfg, shard
        torch.multiprocessing.start_processes(exchange_rank, args, nprocs=n, start_method="spawn")
    finally:
        results: dict[str, list[bool]] = {}
        for path in scratch.glob("rank*.jsonl"):
            for name, right in map(json.loads, path.read_text().splitlines()):
                results.setdefault(name, []).append(right)
        for name, rights in results.items():
            yield Row(
                f"{library}, {n} rank(s): {name}",
                "the right bits",
                f"on {sum(rights)} of {n}",
                sum(rights) == n,
            )


# ---- all checks --------------------------------------------------------------------------------------------

OPERATIONS = tg.RECORD.kernels + ("attention", "fa3")
NOISE = 1.03  # of a ratio of times
DENSE = " ".join(
    f"params.{spec.name}.exchange=reduce_scatter" for spec in tg.PARAMS if spec.kind == "embedding"
)


def all_checks() -> list[Check]:
    checks = [
        Check("start", "environment", environment),
        Check("start", "short run", timed_run, ("short run", "val_slices=8", 1), limit=900),
    ]
    for name in OPERATIONS:
        checks.append(Check("kernels", f"accuracy of {name}", accuracy, (name,), {"feature": name}))
    checks.append(Check("kernels", "fp8 products", fp8_products, (), {"feature": "fp8"}))
    checks.append(Check("steps", "compiled graphs", graphs, (), {"feature": "compile"}, 900))
    for form, name in FORMS.items():
        checks.append(Check("steps", f"gradients: {name}", gradients, (form,), {"form": form}, 900))
    for stage, world_size in ((0, 8), (2, 1)):
        checks.append(Check("steps", f"no wait in stage {stage}", no_wait, (stage, world_size), limit=900))
    checks.append(Check("times", "ceilings", ceilings))
    for name in ("one rank of 8", "whole step"):
        for stage in range(4):
            checks.append(Check("times", f"stage {stage}, {name}", stage_times, (stage, name), limit=900))
    for name in OPERATIONS:
        checks.append(Check("times", f"times of {name}", kernel_times, (name,)))
    checks += [
        Check("run", "run", timed_run, ("run", "", 0), limit=900),
        Check("run", "plain run", timed_run, ("plain run", "kernels= fp8=false compile=false", 1), limit=600),
        Check("nccl", "exchange", exchanges),
        Check("nccl", "fp32 run", timed_run, ("fp32 run", "params.*.reduction=fp32", 2), limit=600),
        Check("nccl", "dense run", timed_run, ("dense run", DENSE, 2), limit=600),
    ]
    return checks + device_checks()


def device_checks() -> list[Check]:
    """Returns the checks of DEVICE_STEPS, the most telling first."""
    checks = []
    for name, function in host.CHECKS.items():
        checks.append(Check("host", name, function, limit=60))
    for stage in (0, 2, 1):
        name = f"stage {stage}, launches"
        checks.append(Check("launches", name, launching.host_and_device, (stage,), limit=600))
    for name, settings in launching.RUNS.items():
        checks.append(Check("graphs", name, launching.compare_runs, (name, settings), limit=600))
    checks.append(Check("rates", "ceilings", ceilings))
    for name, check in rates.CHECKS.items():
        for stage in (0, 2):
            checks.append(Check("rates", f"stage {stage}, {name}", check, (stage,)))
    return checks


DEVICE_STEPS = {"host", "graphs", "launches", "rates"}  # say nothing without a GPU
CHECKS = all_checks()


def time_ratios(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Returns, by feature and operation, the time of all its shapes over plain torch's."""
    times = {}
    for row in rows:
        if row.ms:
            key = row.feature, row.operation
            times[key] = np.add(times.get(key, 0), row.ms)
    return {key: own / plain for key, (own, plain) in times.items()}


def choose_settings(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the settings for this card: without what failed, what is slower, what cannot run.

    A kernel of several operations is slower if all of them are: the plain form of one may be one that no run
    would use, so their times do not add up.
    """
    ratios = time_ratios(rows)
    off = [row.off for row in rows if row.off]
    forms = {row.form: row.ok for row in rows if row.form is not None}
    if forms.get("") is False:  # then the passing settings that change the least
        passing = [form for form, ok in forms.items() if ok]
        off.append(min(passing, key=lambda form: len(form.split()), default=""))
    bad = {feature for feature, _ in ratios}
    for (feature, _), ratio in ratios.items():
        if ratio <= NOISE:
            bad.discard(feature)
    for row in rows:
        if row.ok is False:
            bad.add(row.feature)
    for feature, setting in OFF.items():
        if feature in bad:
            off.append(setting)
    chosen = dict(setting.split("=") for setting in " ".join(off).split())
    if bad & set(tg.RECORD.kernels):
        chosen.setdefault("kernels", ",".join(kernel for kernel in tg.RECORD.kernels if kernel not in bad))
    if "relu_square" in bad:  # without its kernel FP8 is slower
        chosen.setdefault("fp8_mlp", "false")
    attention = {feature: ratio for (feature, _), ratio in ratios.items()}
    if "fa3" not in bad and attention.get("fa3", math.inf) < attention.get("attention", math.inf):
        chosen.setdefault("attention_impl", "fa3")
    return chosen


def closing(rows: Sequence[Row]) -> list[str]:
    """Returns the last lines: the settings for this card, and what they do not rest on."""
    if not any(row.numbers.get("gpus") for row in rows):
        return ["no GPU: nothing of the above says anything about one"]
    judged = set()
    forms = []
    for row in rows:
        if row.ok is not None:
            judged.add(row.feature)
        if row.form is not None:
            forms.append(row.ok)
    features = tg.RECORD.kernels + ("attention", "fp8")
    unknown = [feature for feature in features if feature not in judged]
    if not forms:
        unknown.append("whole steps")
    lines = []
    if unknown:
        lines.append(f"not judged: {', '.join(unknown)}")
    for (_, operation), ratio in time_ratios(rows).items():
        if ratio > NOISE:
            lines.append(f"slower than plain torch: {operation}, {ratio:.2f} of its time")
    if forms and not any(forms):
        chosen = "none: whole steps are wrong with all that were tried"
    else:
        settings = [f"--set {name}={value}" for name, value in choose_settings(rows).items()]
        chosen = " ".join(settings) or "the preset as it is"
    return lines + [f"settings for this card: {chosen}"]


def main(argv: list[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    steps = list(dict.fromkeys(check.step for check in CHECKS))
    add = parser.add_argument
    default = "default: %(default)s"
    add("--minutes", type=float, default=25.0, metavar="M", help=f"time for everything; {default}")
    add("--only", default=",".join(steps), metavar="STEP,...", help=default)
    add("--out", type=Path, default=Path("gpu_check"), metavar="DIR", help=default)
    args = parser.parse_args(argv)
    only = args.only.split(",")
    minutes = "some minutes"
    if not set(only) <= set(steps):
        parser.error(f"--only {args.only}: name steps of {','.join(steps)}")
    try:
        tg.require(args.minutes > 0, "--minutes: give more than 0")  # nan is no more than that
        has_any = torch.cuda.is_available() or not set(only) <= DEVICE_STEPS
        tg.require(has_any, f"--only {args.only} needs a GPU, and there is none")
        if torch.cuda.is_available():
            minutes = f"up to {args.minutes:g} minutes"
        else:
            print("There is no GPU: this tries only the program's own plumbing, at tiny sizes.")
        print(f"This takes {minutes}; each row is printed when it is known.")
        report = Report(args.out.absolute())
    except tg.UserError as e:
        sys.exit(f"check.py: error: {e}")
    if sys.platform == "linux":  # a container's name may lead nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number in (signal.SIGTERM, signal.SIGHUP):  # the last lines come whatever ends it
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        # The environment goes first, always: the settings depend on it.
        chosen = [check for check in checks if check.step in only or check is checks[0]]
        try:
            for row in run_checks(chosen, 60 * args.minutes, partial(Setup, Path(scratch), report.out)):
                report.add(row)
        except KeyboardInterrupt:
            report.add(Row("this call", "ends by itself", "interrupted", False))
    return report.close(closing(report.rows))


if __name__ == "__main__":
    sys.exit(main())
