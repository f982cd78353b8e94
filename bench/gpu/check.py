#!/usr/bin/env python3
"""Checks and times train_gpt.py's record preset on this machine's GPUs, in one call.

    python bench/gpu/check.py [--minutes 25] [--only STEP,...] [--out gpu_check]

    start     what is here; train_gpt.py for two steps a stage; whether a step runs with plain settings
    kernels   each Triton kernel, FlashAttention and the FP8 products against fp64
    steps     loss and every gradient of a full-width step, with several settings, against plain fp32; steps
              that may not wait for the GPU; compiled graphs after the warm-up; the same step twice; a step's
              memory and time by the size of the table of n-grams
    times     host and device ms of each stage's step, each kernel against plain torch and measured ceilings
    run       train_gpt.py for 12 steps a stage on synthetic tokens, with a trace; again with plain settings
    nccl      every call of Exchange, on all GPUs; n-grams sharded against in host memory, and late against
              ahead; on two or more, sparse against dense (collectives.py); a run with fp32 sums, and a run
              with dense tables, against the run before; a run with n-grams

Prints each row as soon as it is known. OUT gets the rows (rows.jsonl), tracebacks (errors.txt), the machine's
description (environment.txt), the runs' logs, traces for ui.perfetto.dev, and the closing table with the
settings for this card (summary.txt). Needs no internet. Exit status: 1 if a check failed.

A check that raises, hangs or kills its process costs its own rows only (runner.py). When --minutes are
over, the running check is stopped; what was left out is listed. Without a GPU everything runs on the cpu
preset at tiny sizes, with plain torch in the kernels' place: a test of this program alone.
"""

import argparse
import contextlib
import gc
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from collectives import exchange_rank
from runner import UNCHECKED, Check, Report, Row, end_with_parent, run_checks

import step_time as st
import train_gpt as tg

# A feature of the record preset, or one of its kernels, and the setting without it.
NEEDS_GPU = f"{UNCHECKED}needs a GPU"
OFF = {"kernels": "kernels=", "attention": "attention=dense", "fp8": "fp8=false", "compile": "compile=false"}
PLAIN = " ".join(OFF.values())
FEATURES = (*tg.KERNELS, "attention", "fp8", "compile")
NGRAMS, BIGRAMS = "ngrams.orders=2,3", "ngrams.orders="
FEWER_ROWS = "ngrams.rows=5287680"  # an eighth of the record preset's, so that one GPU holds them
SMALL_CARD = 40e9  # bytes; below it micro-batches are halved, and out of memory is no failure
TINY = (  # the cpu preset in seconds; multiples of 16, for FP8
    "heads=2 head_dim=16 mlp_dim=64 padded_vocab=272 ngrams.orders= bigram_vocab_size=320 head_chunk=64 "
    "ngrams.rows=4096 ngrams.width=32 fp8=true "
    "dtype=bfloat16 bank_dtype=bfloat16 microbatches=2 stages.*.steps=1 stages.0.steps=2 "
    "stages.*.batch_tokens=256 stages.2.batch_tokens=384 stages.*.max_doc_len=40 "
    "val_slices=1 val_slice_tokens=256 val_every=0"
)


def with_settings(cfg: tg.Config, settings: str) -> tg.Config:
    for setting in settings.split():
        cfg = tg.override(cfg, setting)
    return cfg


def draw_once() -> None:
    """Makes GPT.initialize copy what it drew before: at full width drawing takes many seconds."""
    draw, drawn = tg.GPT.initialize, {}

    @torch.no_grad()
    def initialize(self: tg.GPT, seed: int) -> None:
        shapes = tg.param_shapes(self.cfg, 1) | {"signs": tuple(self.signs.shape)}
        key = seed, *shapes.items()
        if key not in drawn:
            draw(self, seed)
            own = {name: getattr(self, name)[: shape[0]] for name, shape in shapes.items()}
            drawn[key] = {name: t.to("cpu", copy=True) for name, t in own.items()}
        for name, value in drawn[key].items():
            getattr(self, name)[: len(value)].copy_(value)

    tg.GPT.initialize = initialize  # type: ignore[method-assign]


class Setup:
    """What the checks of a process share. The costly parts are made when they are first used."""

    def __init__(self, scratch: Path, out: Path):
        _, self.world_size, device = tg.init_distributed()
        self.gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        if self.gpus and torch.cuda.get_device_capability(device) < (8, 0):
            self.gpus = 0  # no bf16
        self.on_gpu, self.device = self.gpus > 0, device if self.gpus else torch.device("cpu")
        self.scratch, self.out = scratch, out
        self.memory = torch.cuda.get_device_properties(0).total_memory if self.on_gpu else math.inf
        self.preset, self.settings = ("record", FEWER_ROWS) if self.on_gpu else ("cpu", TINY)
        self.missing = [] if self.on_gpu else [Row(feature, seen=NEEDS_GPU) for feature in FEATURES]
        for feature, off in OFF.items() if self.on_gpu else ():
            alone = with_settings(tg.RECORD, " ".join(other for other in OFF.values() if other != off))
            try:
                tg.select_backend(alone, self.device)
            except tg.UserError as e:
                self.settings += f" {off}"
                self.missing.append(Row(feature, seen=f"{UNCHECKED}{e}", off=off))
        self.cfg = with_settings(tg.PRESETS[self.preset], self.settings)
        self.validated = False  # a validation has compiled its code, as before a run's first step
        self.step, self.made = "", {}
        self.timed_steps = 6 if self.on_gpu else 2
        if not self.on_gpu:
            os.environ["OMP_NUM_THREADS"] = "1"  # of processes that checks start
            torch.set_num_threads(1)
        draw_once()

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns make(), made at the first call."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def enter(self, step: str) -> None:
        """Drops tensors that an earlier step of the list made."""
        if step != self.step:
            self.made = {name: value for name, value in self.made.items() if not isinstance(value, tuple)}
            self.step = step

    @property
    def paths(self) -> list[Path]:
        stages = list(range(len(self.cfg.stages)))
        return self.once("paths", lambda: st.synthetic_shard(str(self.scratch), self.cfg, stages, 16)[0])

    @property
    def copy_rate(self) -> float:
        """Returns bytes/s of a copy, read and written."""

        def measure() -> float:
            n = 1 << (30 if self.on_gpu else 20)
            a, b = (torch.zeros(n, dtype=torch.uint8, device=self.device) for _ in range(2))
            return 2 * n / st.timed([lambda: b.copy_(a)], self.device, 10)[0] * 1000

        return self.once("copy rate", measure)

    @property
    def matmul_rate(self) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return self.once("matmul rate", lambda: st.matmul_ceiling(self.device))

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(tg.dtype_of(self.cfg.dtype))

    def scaled_mm(self, a: Tensor, b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
        """Returns 0.37 * 0.5 a b, for fp8 a, row-major, and b, column-major.

        As in a step, the scales are numbers of a vector, which are not aligned, and the result has its place.
        """
        scales = torch.tensor([0.0, 0.37, 0.5], device=self.device)
        out = torch.empty(len(a), b.size(1), dtype=dtype, device=self.device)
        return tg.fp8_matmul(a, b, scales[1], out, fast, scales[2])

    def compile(self, function: Callable, **options) -> Callable:
        return torch.compile(function, fullgraph=True, **options) if self.on_gpu else function

    @contextlib.contextmanager
    def training(
        self, cfg: tg.Config, stage: int, world_size: int, steps: int, compiler: Callable | None = None
    ) -> Iterator[st.Training]:
        """Builds a training; the script's functions are compiled as it needs while the context is open."""
        backend = tg.select_backend(cfg, self.device)
        variant = st.Variant("", cfg, backend, compiler or tg.compiler_of(cfg), self.validated)
        training = st.Training(variant, stage, world_size, self.paths, steps, self.device)
        st.activate(variant)
        try:
            yield training
        finally:
            tg.compiled.compiler = None
            training.loader.close()
            self.validated |= variant.validated

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def device_ms(self, training: st.Training) -> float:
        """Returns the GPU's ms of a step, without waiting for launches: a mean over an Adam period.

        The GPU first sleeps for 0.1 s, while the host launches what its queue takes: about a step of one
        micro-batch. On a CPU returns 0.
        """
        total = 0.0
        for _ in range(2 if self.on_gpu else 0):
            batch = training.batches.next()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.synchronize()
            torch.cuda._sleep(180_000_000)
            begin.record()
            tg.train_step(training.model, training.optimizer, batch, training.batches.peek)
            end.record()
            end.synchronize()
            total += begin.elapsed_time(end)
        return total / 2

    def ranks(self) -> int:
        """Returns how many processes a run has here: the largest of 8, 4, 2 and 1 GPUs."""
        return next((n for n in (8, 4, 2) if n <= self.gpus), 1)

    def is_lost(self) -> bool:
        """Frees memory. Returns True if the GPU's context is lost: after a fault every later call raises."""
        try:
            gc.collect()
            self.synchronize()
            if self.on_gpu:
                torch.cuda.empty_cache()
        except RuntimeError:
            return True
        return False

    def excuse(self, error: Exception) -> str:
        """Returns why an error is no failure, "" if it is one."""
        short = isinstance(error, torch.OutOfMemoryError) and self.memory < SMALL_CARD
        return f"out of this card's {self.memory / 1e9:.0f} GB" if short else ""


# ---- start -------------------------------------------------------------------------------------------------


def environment(setup: Setup) -> Iterator[Row]:
    """Describes the machine, and names the features that it lacks."""
    lines, triton = (
        tg.describe_environment(setup.device, setup.world_size),
        tg.triton.__version__ if tg.triton else "none",
    )
    machine = "no GPU of compute capability 8.0 or newer: the cpu preset, tiny"
    software = f"torch {torch.__version__}, triton {triton}, numpy {np.__version__}"
    if setup.on_gpu:
        p = torch.cuda.get_device_properties(setup.device)
        memory = f"{p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors"
        machine = f"{setup.gpus} x {p.name} ({p.major}.{p.minor}), {memory}"
        software += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    machine += f", {os.cpu_count()} cores"
    lines += [machine, software]
    if shutil.which("nvidia-smi"):
        lines += [subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout]
    (setup.out / "environment.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield Row("machine", seen=machine, numbers={"gpus": setup.gpus})
    yield Row("software", seen=software)
    yield Row("commit", seen=lines[2].removeprefix("commit: "))
    yield from setup.missing


def first_step(setup: Setup, name: str, settings: str) -> Iterator[Row]:
    """Trains one step, as one rank of 8, in the first stage."""
    began = time.perf_counter()
    with setup.training(with_settings(setup.cfg, settings), 0, 8, 2) as training:
        training.step()
        loss, uniform = training.losses[0].item(), math.log(setup.cfg.padded_vocab)
        seconds = time.perf_counter() - began
        seen = f"loss {loss:.4f}, {training.ms[0]:.0f} ms, {seconds:.0f} s with building the model"
        yield Row(name, f"loss {uniform:.2f} +- 0.5", seen, abs(loss - uniform) < 0.5)


# ---- kernels -----------------------------------------------------------------------------------------------

# Relative errors. One rounding to bf16 is at most 2^-9, and the square of a rounded number has three times
# that. FlashAttention also rounds probabilities.
BF16, ATTENTION = 2.5 * 2.0**-9, 0.02
# Hopper keeps few bits of FP8 sums: some e4m3 numbers are the next, 6 % of them away.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: BF16, torch.float8_e5m2: 0.01, torch.float8_e4m3fn: 0.02}


def double(x: Tensor) -> Tensor:
    return (x.float() if x.element_size() == 1 else x).double()


def rel_err(actual: Tensor, exact: Tensor) -> float:
    """Returns ||actual - exact|| / ||exact||; of e5m2 numbers the share that are one apart, inf if more."""
    if exact.dtype == torch.float8_e5m2:
        codes = [t.view(torch.uint8).int() for t in (actual, exact)]
        a, b = ((code & 127) * (1 - 2 * (code >> 7)) for code in codes)
        apart = (a - b).abs()
        return apart.double().mean().item() if apart.max() <= 1 else math.inf
    actual, exact = double(actual), double(exact)
    return ((actual - exact).norm() / exact.norm()).item()


def operands(case: st.KernelCase) -> list:
    """Returns the arguments with which a case calls its operation."""
    args: list = []
    recorder: dict[str, Any] = {case.operation: lambda *values: args.extend(values)}
    case.run(tg.TORCH_BACKEND._replace(**recorder))
    return args


Compared = Iterator[tuple[torch.dtype, Tensor, Tensor]]  # the operation's dtype, actual, exact


def compare_operation(case: st.KernelCase, backend: tg.Backend) -> Compared:
    """Yields all that an operation returns, or else changes; exact: plain, in fp64."""

    def is_float(x) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point()

    args, tail = operands(case), slice(None)
    actual_args = [x.clone() if is_float(x) else x for x in args]
    actual = getattr(backend, case.operation)(*actual_args)
    if case.operation == "softcap_loss":  # fp64 takes much memory: only the last rows
        tail = slice(max(0, len(args[0]) - 512), None)
        args[:2] = args[0][tail], args[1][tail]
    exact_args = [double(x) if is_float(x) else x for x in args]
    before = [x.clone() if is_float(x) else x for x in exact_args]
    exact = getattr(tg.TORCH_BACKEND, case.operation)(*exact_args)
    if actual is not None:
        for a, e in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, exact))):
            yield a.dtype, a[tail], e
        return
    for a, e, b in zip(actual_args, exact_args, before):
        if is_float(a) and (changed := (double(a) != b) | (e != b)).any():
            yield a.dtype, double(a)[changed], e[changed]


def compare_with_grad(case: st.KernelCase, backend: tg.Backend) -> Compared:
    """Yields the output and the gradients."""
    operation, plain = (getattr(b, case.operation) for b in (backend, tg.TORCH_BACKEND))

    def exact_operation(q: Tensor, *args) -> Tensor:
        exact = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in (q, *args))
        return plain(*exact).to(q.dtype)

    results = []
    for function in (operation, exact_operation):
        outputs: list[Tensor] = []

        def keep(*args, function=function, outputs=outputs) -> Tensor:
            outputs.append(function(*args))
            return outputs[0]

        recorder: dict[str, Any] = {case.operation: keep}
        gradients = case.run(backend._replace(**recorder))
        results.append([outputs[0].detach(), *gradients])
    for actual, exact in zip(*results):
        yield actual.dtype, actual, exact


def compare(case: st.KernelCase, backend: tg.Backend) -> tuple[float, float]:
    """Returns the error that is the largest for its bound, and that bound."""
    with_grad = case.operation == "attention"
    errors, yields = [], compare_with_grad if with_grad else compare_operation
    for dtype, actual, exact in yields(case, backend):
        if actual.shape != exact.shape:
            raise RuntimeError(f"{case.operation}: shapes {actual.shape} and {exact.shape}")
        bound = ATTENTION if with_grad else BOUNDS.get(dtype, 0.0)
        errors.append((rel_err(actual, exact), bound))
    return max(errors, key=lambda e: math.inf if math.isnan(e[0]) else e[0] / max(e[1], 1e-9))


def backend_with(setup: Setup, feature: str) -> tuple[tg.Config, tg.Backend]:
    """Returns the config and the backend with only this kernel, or only FlashAttention."""
    kernels, attention = ("", "varlen") if feature == "attention" else (feature, "dense")
    cfg = reduce(tg.override, (f"kernels={kernels}", f"attention={attention}"), setup.cfg)
    return cfg, tg.select_backend(cfg, setup.device) if setup.on_gpu else tg.TORCH_BACKEND


def is_missing(setup: Setup, feature: str) -> bool:
    """True on a GPU that cannot run it."""
    usable = (*setup.cfg.kernels, *(["attention"] if setup.cfg.attention != "dense" else []))
    return setup.on_gpu and feature not in usable


def accuracy(setup: Setup, feature: str) -> Iterator[Row]:
    """Compares a feature's operations with fp64, on the operands of the first and the third stage."""
    if is_missing(setup, feature):
        return
    (cfg, backend), seen = backend_with(setup, feature), set()
    for stage in (0, 2):
        # The later stage's operands, but as few tokens as the first one's: fp64 scores take much memory.
        short = replace(cfg, microbatches=max(cfg.microbatches, cfg.stages[stage].batch_tokens // 16384))
        for case in st.kernel_cases(short, [stage], setup.paths, setup.device):
            if case[:2] in seen:
                continue
            seen.add(case[:2])
            error, bound = compare(case, backend)
            what = f"{case.operation} {case.shapes}"
            yield Row(what, f"error <= {bound:.1e}", f"{error:.1e}", error <= bound, feature)


def fp8_products(setup: Setup) -> Iterator[Row]:
    """Compares the head's three products, and the MLPs' second, with fp64."""
    if not (cfg := setup.cfg).fp8:
        return
    n, d, V = min(2048, cfg.head_chunk), cfg.dim, cfg.padded_vocab
    x, w = (setup.rand(rows, d).to(torch.float8_e4m3fn) for rows in (n, V))
    grad = setup.rand(n, V).to(torch.float8_e5m2)
    square, proj = (setup.rand(rows, cfg.mlp_dim).to(torch.float8_e4m3fn) for rows in (n, d))

    def transposed(t: Tensor) -> Tensor:
        return t.view(torch.uint8).T.contiguous().view(t.dtype)

    products = {
        "logits": (x, w.T, torch.bfloat16, True),
        "gradient of x": (grad, transposed(w).T, torch.bfloat16, False),
        "gradient of w": (transposed(x), transposed(grad).T, torch.float32, False),
        "MLP": (square, proj.T, torch.bfloat16, True),
    }
    for name, (a, b, dtype, fast) in products.items():
        error = rel_err(setup.scaled_mm(a, b, dtype, fast), 0.37 * 0.5 * (double(a) @ double(b)))
        bound = 2e-3 + (BF16 if dtype == torch.bfloat16 else 0)  # Hopper keeps few bits of fp8 sums
        what = f"fp8 {name}, {a.size(0)} x {a.size(1)} x {b.size(1)}"
        yield Row(what, f"error <= {bound:.1e}", f"{error:.1e}", error <= bound, "fp8")


# ---- steps -------------------------------------------------------------------------------------------------

FORMS = {PLAIN: "plain torch", "compile=false": "compile=false", "": "the config"}  # settings: name
FORMS |= {form: form for form in ("fp8_mlp=false", "fp8=false", "kernels= fp8=false")}
# A form may have 1.5 times plain bf16's errors (4 times, for few numbers: chance), and this more. The head's
# FP8 is in the gradient of its input, so in all: at full width, for 512 tokens on a CPU, 0.02 to 0.07. The
# MLPs' alone makes about 0.1 in their weights' gradients.
PLAIN_SLACK, HEAD_SLACK, MLP_SLACK, FEW = 0.005, 0.1, 0.2, 1000


def exact_cfg(setup: Setup) -> tg.Config:
    """Returns the plain config in fp32, with few logits at once."""
    cfg = with_settings(setup.cfg, f"{PLAIN} dtype=float32 bank_dtype=float32")
    return replace(cfg, head_chunk=min(2048, cfg.head_chunk))


@contextlib.contextmanager
def one_micro_batch(setup: Setup, cfg: tg.Config) -> Iterator[tuple[st.Training, tg.Batch]]:
    """Builds a model, the same for all forms, whose steps end before the exchange; and its batch."""
    if setup.memory < SMALL_CARD:
        cfg = replace(cfg, microbatches=2 * cfg.microbatches, head_chunk=min(2048, cfg.head_chunk))
    with setup.training(cfg, 0, 8, 2) as training:
        training.optimizer.step = lambda *_: None  # type: ignore[method-assign]
        generator = torch.Generator(setup.device).manual_seed(1)
        with torch.no_grad():
            for p in training.model.parameters():  # away from zeros, which hide mistakes
                noise = torch.randn(p.shape, generator=generator, device=p.device)
                p.copy_((p + 0.02 * noise).bfloat16())
        if cfg.compile and not training.variant.validated:
            training.validate()
        batch = training.batches.next()
        yield training, batch._replace(micro_batches=batch.micro_batches[:1])


def loss_and_gradients(training: st.Training, batch: tg.Batch) -> tuple[float, dict[str, Tensor]]:
    optimizer, model = training.optimizer, training.model
    optimizer.finish_gathers()
    model.act_scale.fill_(1)
    for _ in range(2):  # the first finds the scales of FP8 activations
        optimizer.drop_grads()
        loss = tg.train_step(model, optimizer, batch).item()
    return loss, {name: grad.take() for name, grad in optimizer.grads.items()}


def errors_of(setup: Setup, cfg: tg.Config) -> tuple[float, float, dict[str, float]]:
    """Returns a form's loss, the exact one, and each gradient's relative error."""

    def exact() -> tuple[float, dict[str, Tensor]]:
        with one_micro_batch(setup, exact_cfg(setup)) as pair:
            return loss_and_gradients(*pair)

    exact_loss, exact_grads = setup.once("exact gradients", exact)
    with one_micro_batch(setup, cfg) as pair:
        loss, grads = loss_and_gradients(*pair)
        return loss, exact_loss, {name: rel_err(grad, exact_grads[name]) for name, grad in grads.items()}


def gradients(setup: Setup, form: str) -> Iterator[Row]:
    """Compares a form's loss and gradients with plain fp32's; plain bf16's errors are the yardstick."""
    cfg, what = with_settings(setup.cfg, form), f"gradients: {FORMS[form]}"
    for twin, name in FORMS.items():
        if twin == form:
            break
        if with_settings(setup.cfg, twin) == cfg:
            yield Row(what, seen=f"here the same as {name}")
            return
    plain = setup.once("plain errors", lambda: errors_of(setup, with_settings(setup.cfg, PLAIN)))
    loss, exact_loss, errors = plain if form == PLAIN else errors_of(setup, cfg)
    sizes = {name: math.prod(shape) for name, shape in tg.param_shapes(cfg, 1).items()}
    slack = (MLP_SLACK if cfg.fp8_mlp else HEAD_SLACK) if cfg.fp8 else PLAIN_SLACK
    bounds = {name: (4 if sizes[name] < FEW else 1.5) * e + slack for name, e in plain[2].items()}
    if setup.on_gpu:  # tiny sizes have larger errors
        bounds = {name: min(bound, 0.5) for name, bound in bounds.items()}
    ratios = {name: error / bounds[name] for name, error in errors.items()}
    worst = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
    ok = ratios[worst] <= 1 and median(plain[2].values()) < 0.1 and abs(loss - exact_loss) < 0.01
    expected = f"loss {exact_loss:.4f}, errors <= 1.5 plain + {slack}"
    seen = f"loss {loss:.4f}, worst: {worst} {errors[worst]:.1e}, plain {plain[2][worst]:.1e}"
    yield Row(what, expected, seen, ok, form=form, numbers={"loss": loss, "errors": errors})


def same_step_twice(setup: Setup) -> Iterator[Row]:
    """Counts gradients with the same bits again. FlashAttention's backward adds in any order."""
    with one_micro_batch(setup, setup.cfg) as (training, batch):
        first_loss, grads = loss_and_gradients(training, batch)
        first = {name: grad.clone() for name, grad in grads.items()}
        loss, grads = loss_and_gradients(training, batch)
        other = [name for name in first if not torch.equal(first[name], grads[name])]
    seen = f"losses {first_loss:.6f} and {loss:.6f}; other gradients: {', '.join(other) or 'none'}"
    yield Row("the same step twice", "the same loss", seen, loss == first_loss)


def no_wait(setup: Setup, stage: int, world_size: int, settings: str = "") -> Iterator[Row]:
    """Runs two steps, one with Adam, in which torch raises where the host would wait for the GPU."""
    cfg = with_settings(setup.cfg, settings)
    with setup.training(cfg, stage, world_size, 7) as training:  # the last is only fetched for
        training.warm_up(4)
        losses = tg.AsyncLoss()
        for step in range(2):
            batch = training.batches.next()
            training.synchronize()
            if setup.on_gpu:
                torch.cuda.set_sync_debug_mode("error")
            try:
                peek = training.batches.peek
                losses.push(step, tg.train_step(training.model, training.optimizer, batch, peek))
            finally:
                if setup.on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
        training.synchronize()
        losses.poll()
    what, ok = f"stage {stage}, 1 rank of {world_size}{', bigrams' * bool(settings)}", setup.on_gpu or None
    yield Row(f"{what}: waiting forbidden", "two steps run", "they do" if ok else NEEDS_GPU, ok)


def table_sizes(setup: Setup) -> Iterator[Row]:
    """Compares steps with a large and a small table of n-grams: it may cost its own bytes, no more."""
    rest, times = [], []
    for rows in (setup.cfg.ngrams.rows, setup.cfg.ngrams.rows >> 5):
        steps = max(20, setup.cfg.stages[0].steps)  # a table decays for no more steps than a run has
        cfg = with_settings(setup.cfg, f"{NGRAMS} ngrams.rows={rows} stages.0.steps={steps}")
        with setup.training(cfg, 0, 8, 4 + setup.timed_steps) as training:
            training.warm_up(4)
            for _ in range(setup.timed_steps):
                training.step()
            table = training.optimizer.ngrams
            own, trained = sum(t.nbytes for t in table.stored), bool(table.stored[1].any())
            rest.append(max(1, training.peak - own))  # 1: peaks are not known on a CPU
            times.append(float(np.median(training.pairs())))
            seen = f"{own / 2**20:.0f} MiB of table, {rest[-1] / 2**20:.0f} beside it; {times[-1]:.1f} ms"
            yield Row(f"n-grams, {table.rows:,} rows, a rank of 8", "rows trained", seen, trained)
    memory, ms = (large / small for large, small in (rest, times))
    what, expected = "n-grams, the large table to the small one", "memory beside it <= 1.05, time <= 1.15"
    ok, seen = memory <= 1.05, f"memory {memory:.3f}, time {ms:.3f}"
    yield Row(what, expected, *((seen, ok) if setup.on_gpu else (NEEDS_GPU, None)))


class GraphCount:
    """Stands in for a run's profiler: counts compiled graphs, after the warm-up and after every step."""

    def __init__(self):
        self.counts: list[int] = []

    def step(self) -> None:
        self.counts.append(counters["stats"]["unique_graphs"])

    start = step

    def stop(self) -> None: ...


def graphs(setup: Setup) -> Iterator[Row]:
    """Trains two steps a stage by train_gpt.py's own loop, with its warm-up and validation."""
    cfg = with_settings(setup.cfg, "stages.*.steps=2 val_slices=1 val_every=0")
    data, backend = tg.Dataset(setup.paths, setup.paths, 0.0, "", []), tg.select_backend(cfg, setup.device)
    began, profiler = time.perf_counter(), GraphCount()
    exchanges = (tg.Exchange(0, 1, device=setup.device), tg.Exchange(0, 1))
    tg.train(cfg, backend, *exchanges, data, 0, tg.RunLog(), profiler=profiler)
    counts, seconds = profiler.counts, time.perf_counter() - began
    new = counts[-1] - counts[0]
    seen = f"{new} more than {counts[0]} in {cfg.steps} steps; {seconds:.0f} s in all"
    yield Row("compiled graphs after the warm-up", "0 more", seen, new == 0, "compile")


# ---- nccl --------------------------------------------------------------------------------------------------


def exchanges(setup: Setup) -> Iterator[Row]:
    """Runs exchange_rank on the largest of 8, 4, 2 and 1 GPUs; without one on two gloo ranks."""
    n, scratch = setup.ranks() if setup.on_gpu else 2, Path(tempfile.mkdtemp(dir=setup.scratch))
    cfg = with_settings(tg.CPU, f"{TINY} stages.*.steps=2 dtype=float32 bank_dtype=float32 fp8=false")
    (shard,), _ = st.synthetic_shard(str(scratch), cfg, [0, 1, 2, 3], 10)
    try:
        args = n, setup.on_gpu, cfg, shard
        torch.multiprocessing.start_processes(exchange_rank, args, nprocs=n, start_method="spawn")
    finally:
        results: dict[str, list[bool]] = {}
        for path in scratch.glob("rank*.jsonl"):
            for name, right in map(json.loads, path.read_text().splitlines()):
                results.setdefault(name, []).append(right)
        for name, rights in results.items():
            what = f"{'NCCL' if setup.on_gpu else 'gloo'}, {n} rank(s): {name}"
            yield Row(what, "the right bits", f"on {sum(rights)} of {n}", sum(rights) == n)
    if n == 1:
        yield Row("sparse as dense exchange", seen=f"{UNCHECKED}needs two GPUs")


# ---- times -------------------------------------------------------------------------------------------------

# By stage, one rank of 8 on an H100: bench/projection.py's estimates, without the last stage's.
DEVICE_MS = (28, 48, 69, 59)


def ceilings(setup: Setup) -> Iterator[Row]:
    what = "bf16 products" if setup.on_gpu else "fp32 products"
    yield Row(what, seen=f"{setup.matmul_rate / 1e12:.4g} TFLOP/s")
    yield Row("copies", seen=f"{setup.copy_rate / 1e9:.4g} GB/s, read and written")
    n = 8192 if setup.on_gpu else 256
    for fast in (True, False) if setup.cfg.fp8 else ():
        a, b = (torch.randn(n, n, device=setup.device).to(torch.float8_e4m3fn) for _ in range(2))
        call = partial(setup.scaled_mm, a, b.T, torch.bfloat16, fast)
        (ms,) = st.timed([call], setup.device, 20)
        yield Row(f"fp8 products{', fast' if fast else ''}", seen=f"{2 * n**3 / ms / 1e9:.4g} TFLOP/s")


def measure_steps(setup: Setup, cfg: tg.Config, stage: int, world_size: int) -> dict[str, float]:
    """Returns the ms of a step (a mean over an Adam period, median over periods), and more."""
    with setup.training(cfg, stage, world_size, 6 + setup.timed_steps) as training:
        training.warm_up(4 if setup.on_gpu else 2)
        gc.collect()
        for _ in range(setup.timed_steps):
            training.step()
        if not torch.stack(training.losses).isfinite().all():
            raise RuntimeError("the loss is not finite, so times mean nothing")
        ms, keys = float(np.median(training.pairs())), np.mean(training.keys, axis=0).tolist()
        rate = training.tokens / len(training.ms) / ms * 1000
        mfu = rate * st.flops_per_token(cfg, keys) / setup.matmul_rate
        host, mib = median(training.host), training.peak / 2**20
        return dict(ms=ms, host=host, device=setup.device_ms(training), rate=rate, mfu=mfu, mib=mib)


def stage_times(setup: Setup, stage: int, name: str) -> Iterator[Row]:
    x = measure_steps(setup, setup.cfg, stage, st.SETUPS[name])
    seen = f"{x['ms']:.1f} ms, host {x['host']:.1f} ms, device {x['device']:.1f} ms, "
    seen += f"{x['rate']:.0f} tokens/s, MFU {x['mfu']:.2f}, {x['mib']:.0f} MiB"
    expected = f"H100: about {DEVICE_MS[stage]} ms" if setup.on_gpu and st.SETUPS[name] > 1 else ""
    yield Row(f"stage {stage}, {name}", expected, seen, numbers=x)


def feature_times(setup: Setup, feature: str) -> Iterator[Row]:
    """Times whole steps with and without a feature, as one rank of 8. Each kernel is judged by itself."""
    without = with_settings(setup.cfg, OFF[feature])
    for stage in (0, 2) if without != setup.cfg else ():
        times = [measure_steps(setup, cfg, stage, 8)["ms"] for cfg in (setup.cfg, without)]
        what, seen = f"stage {stage} with and without {feature}", f"{times[0]:.1f} and {times[1]:.1f} ms"
        yield Row(what, "faster with", seen, feature=feature, ms=tuple(times))


def kernel_times(setup: Setup, feature: str) -> Iterator[Row]:
    """Times a feature's operations against plain torch and the measured ceilings."""
    if is_missing(setup, feature):
        return
    cfg, backend = backend_with(setup, feature)
    for case in st.kernel_cases(cfg, [0, 2], setup.paths, setup.device):
        calls = [partial(case.run, b) for b in (backend, tg.TORCH_BACKEND)]
        ms, torch_ms = st.timed(calls, setup.device, 10)
        if case.flops:
            rate, share = f"{case.flops / ms / 1e9:.0f} TFLOP/s", case.flops / setup.matmul_rate
        else:
            rate, share = f"{case.nbytes / ms / 1e6:.0f} GB/s", case.nbytes / setup.copy_rate
        seen = f"{ms:.3f} ms, torch {torch_ms:.3f} ms ({ms / torch_ms:.2f}); "
        seen += f"{rate}, {1000 * share / ms:.0%} of the ceiling"
        what = f"{case.operation} {case.shapes}"
        yield Row(what, "faster than torch", seen, feature=feature, ms=(ms, torch_ms))


# ---- run --------------------------------------------------------------------------------------------------


def call(command: Sequence[Any], cwd: Path) -> None:
    """Runs a Python program. Raises RuntimeError with all that it printed if it fails."""
    words = [sys.executable, *map(str, command)]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=cwd, preexec_fn=end_with_parent, **output)
    if done.returncode:
        printed = done.stdout.strip().splitlines() or ["nothing"]
        raise RuntimeError("\n".join([f"status {done.returncode}: {printed[-1]}", *printed]))


def timed_run(setup: Setup, name: str, settings: str) -> Iterator[Row]:
    """Trains by train_gpt.py, on all GPUs, on synthetic tokens. Keeps the log, and the traces of "run".

    All but "short_run" and "bigram_run" must end near the validation loss of "run".
    """
    if not setup.on_gpu and name not in ("short_run", "run"):
        yield Row(name.replace("_", " "), seen=NEEDS_GPU)
        return
    steps = "stages.*.steps=12" if setup.on_gpu else ""
    settings = f"{setup.settings} val_slices=2 val_every=0 {steps} {settings}"
    cfg = with_settings(tg.PRESETS[setup.preset], settings)
    data, cwd, ranks = setup.scratch / "data", setup.out / name, setup.ranks()
    # A document has 700 tokens on average, of which a batch takes at most max_doc_len.
    tokens = tg.train_tokens(cfg) * (2 + 3000 // min(stage.max_doc_len for stage in cfg.stages))
    counts = ["--train-tokens", tokens, "--val-tokens", cfg.val_slices * cfg.val_slice_tokens + 1]
    call([ROOT / "data/synthetic.py", data, *counts, "--vocab-size", cfg.vocab_size], setup.scratch)
    command: list[Any] = [ROOT / "train_gpt.py", "--preset", setup.preset, "--data", data]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = torchrun + command
    if name == "run":
        command += ["--profile", 8 if setup.on_gpu else 1]
    for setting in settings.split():
        command += ["--set", setting]
    shutil.rmtree(cwd, ignore_errors=True)
    cwd.mkdir()
    call(command, cwd)
    (log,) = cwd.rglob("seed*.txt")
    text = log.read_text(encoding="utf-8")
    for path in [log, *cwd.rglob("*.trace.json.gz")]:
        path.rename(setup.out / (name + path.name[path.name.index(".") :]))
    shutil.rmtree(cwd)

    def last(pattern: str) -> float:
        return float(re.findall(pattern, text, re.M)[-1])

    val_loss, ms = last(r"^val_loss: (.+)$"), last(r"^train_time_ms: (.+)$") / cfg.steps
    kept, uniform = setup.scratch / "run_val_loss.txt", math.log(cfg.vocab_size)
    expected, ok = f"val_loss < {uniform:.2f}, of a uniform guess", val_loss < uniform
    if name == "run":
        kept.write_text(str(val_loss))
    elif name in ("short_run", "bigram_run"):
        pass
    elif kept.exists():
        # After few steps: other roundings move it by some thousandths, a wrong update by far more.
        before = float(kept.read_text())
        expected, ok = f"val_loss {before:.4f} +- 0.02", abs(val_loss - before) <= 0.02
    else:
        expected, ok = "compares with the first run", None
    seen = f"val_loss {val_loss:.4f}, {ms:.1f} ms a step, warm-up {last(r'took (.+) s and was'):.0f} s"
    what = f"{name.replace('_', ' ')}: {cfg.steps} steps, {ranks} process(es)"
    yield Row(what, expected, seen, ok, numbers={"val_loss": val_loss, "ms": ms})


# ---- all checks --------------------------------------------------------------------------------------------

KERNELS = (*tg.KERNELS, "attention")
TABLES = [spec.name for spec in tg.PARAMS if spec.is_table]
DENSE = " ".join(f"params.{name}.exchange=reduce_scatter" for name in TABLES)
TIMED_FEATURES, PLAIN_RUN = ("fp8", "kernels", "compile"), "kernels= fp8=false compile=false"
STAGES = [(s, name) for name in sorted(st.SETUPS, key=lambda name: -st.SETUPS[name]) for s in range(4)]
CHECKS = [
    Check("start", "environment", environment),
    Check("start", "short run", timed_run, ("short_run", "stages.*.steps=2 val_slices=8"), limit=900),
    Check("start", "first step", first_step, ("a step with plain settings", PLAIN)),
    Check("start", "uncompiled step", first_step, ("a step without compilation", "compile=false")),
    *(Check("kernels", f"accuracy of {name}", accuracy, (name,), {"feature": name}) for name in KERNELS),
    Check("kernels", "fp8 products", fp8_products, (), {"feature": "fp8"}),
    *(Check("steps", f"gradients: {FORMS[form]}", gradients, (form,), {"form": form}, 900) for form in FORMS),
    Check("steps", "the same step twice", same_step_twice, limit=900),
    *(Check("steps", f"no wait in stage {s}", no_wait, (s, n), limit=900) for s, n in ((0, 8), (2, 1))),
    Check("steps", "no wait with bigrams", no_wait, (0, 8, BIGRAMS), limit=900),
    Check("steps", "table of n-grams", table_sizes, limit=900),
    Check("steps", "compiled graphs", graphs, (), {"feature": "compile"}, 900, fresh=True),
    Check("times", "ceilings", ceilings),
    *(Check("times", f"stage {s}, {name}", stage_times, (s, name), limit=900) for s, name in STAGES),
    *(Check("times", f"steps without {name}", feature_times, (name,), limit=900) for name in TIMED_FEATURES),
    *(Check("times", f"times of {name}", kernel_times, (name,), {"feature": name}) for name in KERNELS),
    Check("run", "run", timed_run, ("run", ""), limit=900, need=30),
    Check("run", "plain run", timed_run, ("plain_run", PLAIN_RUN), limit=600, need=30),
    Check("nccl", "exchange", exchanges),
    Check("nccl", "fp32 sums", timed_run, ("fp32_run", "params.*.reduction=fp32"), limit=600, need=30),
    Check("nccl", "dense tables", timed_run, ("dense_run", DENSE), limit=600, need=30),
    Check("nccl", "bigrams", timed_run, ("bigram_run", BIGRAMS), limit=600, need=30),
]


def slower(times: list[tuple[float, ...]]) -> bool:
    """True if the first times of the pairs add up to clearly more than the second ones."""
    return sum(pair[0] for pair in times) > 1.03 * sum(pair[1] for pair in times)


def choose_settings(rows: list[Row]) -> str:
    """Returns the settings for this card: without what failed, what is slower, what cannot run."""
    off, forms = [row.off for row in rows if row.off], {row.form: row.ok for row in rows}
    if forms.get("") is False:  # then the passing settings that change the least
        passing = [form for form, ok in forms.items() if form and ok]
        off += sorted(passing, key=lambda form: len(form.split()))[:1]
    cfg, times = with_settings(tg.RECORD, " ".join(off)), {}
    for row in rows:
        if row.ms:
            times.setdefault(row.feature, []).append(row.ms)
    bad = {row.feature for row in rows if row.ok is False} | {name for name in times if slower(times[name])}
    kernels = () if "kernels" in bad else tuple(kernel for kernel in cfg.kernels if kernel not in bad)
    attention = "dense" if "attention" in bad else cfg.attention
    if attention == "varlen" and "fa3" in times and "fa3" not in bad:
        attention = "fa3"
    fp8, compiled = cfg.fp8 and "fp8" not in bad, cfg.compile and "compile" not in bad
    values = {"kernels": kernels, "attention": attention, "fp8": fp8, "compile": compiled}
    texts = {k: ",".join(v) if isinstance(v, tuple) else str(v).lower() for k, v in values.items()}
    return " ".join(f"--set {k}={texts[k]}" for k, v in values.items() if v != getattr(tg.RECORD, k))


def closing(rows: list[Row]) -> list[str]:
    """Returns the last lines: the settings for this card, and what they do not rest on."""
    if not any(row.numbers.get("gpus") for row in rows):
        return ["no GPU: nothing of the above says anything about one"]
    judged = {row.feature for row in rows if row.ok is not None or row.ms}
    unknown = [feature for feature in FEATURES if feature not in judged]
    forms = [row.ok for row in rows if row.form is not None and row.ok is not None]
    unknown += [] if forms else ["whole steps"]
    unknown += [step for step in ("nccl", "run") if not any(row.step == step and row.ok for row in rows)]
    lines = [f"not judged: {', '.join(unknown)}"] if unknown else []
    if forms and not any(forms):
        return [*lines, "settings for this card: none: whole steps are wrong with all that were tried"]
    failed = sorted({row.step for row in rows if row.ok is False and row.step in ("nccl", "run")})
    although = f", although {' and '.join(failed)} FAILED" if failed else ""
    return [*lines, f"settings for this card: {choose_settings(rows) or 'the preset as it is'}{although}"]


def refuse_unusable_gpus() -> None:
    """Raises UserError if there are GPUs that torch cannot use: the tiny run on the CPU would hide it."""
    if torch.cuda.is_available() or not shutil.which("nvidia-smi"):
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    if not listed or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    try:
        torch.cuda.init()
        reason = "no reason given"
    except (RuntimeError, AssertionError) as e:
        reason = tg.first_line(e)
    software = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
    fix = "install a torch for this driver; CUDA_VISIBLE_DEVICES= tries this program without a GPU"
    raise tg.UserError(f"nvidia-smi lists {listed} GPUs, but {software}, cannot use them ({reason}); {fix}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="check.py", description=__doc__, formatter_class=raw, allow_abbrev=False
    )
    steps = list(dict.fromkeys(check.step for check in CHECKS))
    add, default = parser.add_argument, "default: %(default)s"
    add("--minutes", type=float, default=25.0, metavar="M", help=f"time for everything; {default}")
    add("--only", default=",".join(steps), metavar="STEP,...", help=default)
    add("--out", type=Path, default=Path("gpu_check"), metavar="DIR", help=default)
    args = parser.parse_args(argv)
    args.steps = args.only.split(",")
    if not set(args.steps) <= set(steps):
        parser.error(f"--only {args.only}: name steps of {','.join(steps)}")
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes}: give a positive number")
    return args


def main(argv: list[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    try:
        args = parse_args(argv)
        refuse_unusable_gpus()
        if not torch.cuda.is_available():
            print("There is no GPU: this tries only the program's own plumbing, on tiny sizes.", flush=True)
        print(f"This takes up to {args.minutes:g} minutes; each row is printed when it is known.", flush=True)
        report = Report(args.out.resolve())
    except tg.UserError as e:
        print(f"check.py: error: {e}", file=sys.stderr, flush=True)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):  # the table comes whatever ends it
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        # The environment goes first, always: the settings depend on it.
        chosen = [check for check in checks if check.step in args.steps or check is checks[0]]
        make_setup = partial(Setup, Path(scratch), report.out)
        try:
            for row in run_checks(chosen, 60 * args.minutes, make_setup):
                report.add(row)
        except KeyboardInterrupt:
            report.add(Row("this call", "ends by itself", "interrupted", False))
    return report.close(closing(report.rows))


if __name__ == "__main__":
    sys.exit(main())
