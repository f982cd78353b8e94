#!/usr/bin/env python3
"""Estimates a training step's time on 8 H100s, phase by phase of a run, without a GPU.

    python bench/projection.py [--what-if "NAME=VALUE ..."] ... [--measured ROWS.jsonl ...]
    python bench/projection.py --what-if "layers.*.xsa=false" --what-if "mlp_dim=2560 fp8_mlp=false"

All times are estimates, but for those called published. Each --what-if changes the record preset. A default
run takes two minutes of a free core, each --what-if 30 s more.

A phase is a stage, or a part of one in which the sampled softmax computes as many columns of the head. The
program runs steps of rank 0 of 8 in each, as bench/launches.py does, on torch's "meta" device, and lists
what four of them launch: the FLOPs of matmuls and attention, the bytes that are read and written, and those
that this rank sends. A call of compiled code counts as one kernel, besides its matmuls: it reads its inputs
and writes its results once, and a backward computes again what it needs of its forward. The layers' code has
many kernels, which read some tensors again: LAYERS_TRAFFIC. Tokens are synthetic, documents as long as web
text's; sparse exchanges send about twice as many rows of bigrams as for real text. Other ranks ask for, and
send, as many rows as this one.

    step's ms    the larger of the device's and the host's
    device       slowdown * (sum over launches) + (1 - hidden) * (sum over collectives) + fixed
    launch       the most of FLOPs / rate, bytes / memory's rate, kernel_us
    collective   bytes sent / exchange's rate + collective_us
    host         host * (call_us * calls of compiled code + launch_us * launches); CUDA graphs make it 0

Rates (1e12/s: FLOPs or bytes) are assumed, as fractions of an H100 SXM's peaks by NVIDIA's data sheet: of
matmuls what large ones attain under the power limit, of memory streaming kernels', of the exchange NCCL's,
of attention_impl fa3 FlashAttention-3's, of varlen and the pointer's kernel, FlashAttention-2, half of that.
Kernels with matmuls have a library's rate: on H100s relu_square's tiles are as large as a library's. Slowdown
and fixed are fitted to the published ms of the stages of records 80 and 92. Both used FlashAttention-3;
record 92 had CUDA graphs, and record 80 is taken to be bound by the device without. Not counted: gaps between
launches, the prefetch thread's share of the host.

The second projection rests on rows of bench/gpu/check.py, by default one H100's. Copies, kernels and
attention have the rates that it measured for as much work; products too, if the rows have them. The rest
keeps its assumptions, and slowdown and fixed, which are fitted to the device's ms of one rank of 8, alone.
Collectives and the host's share are added: the host as it was on that machine, and with CUDA graphs. No rank
waits for another in it. Its last table has estimates of further work, each alone and after those above it.

Phases are in ms of a step. tokens: of each GPU's micro-batch; columns: of the head; matmuls, attention,
other: the sum over launches; exchange: what is not hidden of collectives; seconds: of all the phase's steps;
total: with the published 0.21 s of averages and the fetch of validation's rows.

Record 92 is the record preset without the pointer, with record 92's steps, CUDA graphs and the TECHNIQUES,
each a factor on counted parts. Not expressed of it: its kernels' fusions, FP8 logits' faster sigmoid,
conversions to FP8, products that read both layouts. Record 80 is this script with parts switched off, as far
as settings go, and a head that reads no saved streams but "back". Not expressed of it: logits in bf16 from
FP8 products, one graph for the whole model, dense gradients of tables, NorMuon's five iterations and one rail
instead of ANVIL's six and two.

The first projection's host is one CPU, which was not such a machine's. PR 379 is record 92 with the copy
pointer and the record preset's schedule: it tests how the model's phases add up.
"""

import argparse
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import launches  # it finds the others
import step_time
import train_gpt as tg
from launches import on_meta, patched
from measured import SAVINGS, Measurements
from scripts import make_parser, run_script

RECORD = tg.PRESETS["record"]
STEPS_92 = "stages.0.steps=320 stages.1.steps=361 stages.2.steps=426 stages.3.steps=67"
RECORD92 = reduce(tg.override, f"pointer_dim=0 {STEPS_92}".split(), RECORD)

ROWS = launches.ROOT / "bench/gpu/h100/6_times.jsonl"  # this check had its GPU for itself

RANKS = 8
PARTS = "matmuls", "attention", "other", "exchange", "fixed"  # of the device's ms
PEAKS = dict.fromkeys(("bf16", "varlen", "fa3", "pointer"), 989e12)  # FLOP/s
PEAKS |= {"fp8": 1979e12, "fp32": 67e12}
PEAKS |= {"memory": 3.35e12, "exchange": 450e9}  # bytes/s; NVLink's each way
KINDS = {1: "fp8", 2: "bf16", 4: "fp32"}  # of matmuls, by bytes of a factor's entry
MATMULS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # first factor's place
# Compiled code of the layers: bytes that the kernels of generated code read and write, 6.18 and 9.78 GB in
# stage 0, over what is counted if each tensor is read and written once, 2.01 and 3.61 GB. The GPUs that were
# measured ran such code; what it has lost since is the first of measured.py's SAVINGS.
LAYERS_TRAFFIC = {"trunk": 3.1, "layers backward": 2.7}
# Its elementwise kernels, beside the one that is listed. In stage 0 bench/launches.py counts 589 launches a
# step, and 618 with Adam's updates; 299 and 325 are listed. All these are of the script without the pointer,
# with the MLPs' backward in bf16, and with several compiled calls for the update of a bank.
LAYERS_LAUNCHES = {"trunk": 145, "layers backward": 145}
PART_OF = {"": "other", "exchange": "exchange"}  # by kind of FLOPs
PART_OF |= dict.fromkeys(("varlen", "fa3", "pointer"), "attention")
# These read or change no more of their first argument than the largest of the others, or the result, has.
SPARSE = {"embedding", "index", "index_select", "index_add_", "index_copy_", "index_fill_", "index_put_"}
WRITE_ONLY = {"copy_", "zero_", "fill_", "index_copy_", "index_fill_", "index_put_"}


class Model(NamedTuple):
    bf16: float = 0.65
    fp8: float = 0.55
    fp32: float = 0.60
    fa3: float = 0.35
    varlen: float = 0.175  # FlashAttention-2 is about half as fast on Hopper
    pointer: float = 0.175  # taken to be as fast
    memory: float = 0.87
    exchange: float = 0.80
    kernel_us: float = 3.0
    collective_us: float = 20.0
    hidden: float = 0.5  # share of collectives during which the GPU computes
    slowdown: float = 1.0
    fixed: float = 0.0  # ms
    # With empty kernels the main thread takes 5.8 ms a step, 7.0 with Adam's updates, for 29 and 35 calls.
    call_us: float = 200.0
    launch_us: float = 6.2  # 4 to 5 ms for 700 to 760 launches
    host: float = 1.0  # how many times as slow as that; 0: CUDA graphs leave nothing to wait for
    measured: Measurements | None = None  # to which slowdown does not apply
    savings: tuple[Callable[["Op", float], float], ...] = ()  # what further work makes of an operation's ms


class Op(NamedTuple):
    name: str  # of a launch or collective
    nbytes: int  # read and written, each tensor once; sent
    kind: str = ""  # of its FLOPs, if any count; exchange: a collective
    flops: float = 0.0
    part: str = ""  # of the step
    calls: int = 0  # of compiled code


class Phase(NamedTuple):
    stage: int
    columns: int  # of the head
    steps: int
    ops: list[Op]  # of four steps


class Access(NamedTuple):
    storage: torch.UntypedStorage  # of a view that is read or written
    offset: int
    nbytes: int


def access(t: Tensor, most: int = sys.maxsize) -> Access:
    """Describes t, or `most` bytes of it."""
    return Access(t.untyped_storage(), int(t.storage_offset()), min(t.nbytes, most))


def total(found: Iterable[Access]) -> int:
    """Returns the bytes of accesses: each view once, and no more of a storage than it has."""
    by_storage: Counter = Counter()
    for a in set(found):
        by_storage[a.storage] += a.nbytes
    return sum(min(nbytes, storage.nbytes()) for storage, nbytes in by_storage.items())


def accesses(tree: Any, most: int = sys.maxsize) -> set[Access]:
    return {access(t, most) for t in on_meta(tree)}


class Traffic(launches.Counts):
    """Lists what a step launches. `sources`: what in memory unwritten results of compiled code depend on."""

    def __init__(self, cfg: tg.Config):
        super().__init__()
        self.cfg = cfg
        self.found: Any = []
        self.in_compiled = False

    @contextlib.contextmanager
    def step(self, batch: tg.Batch) -> Iterator[None]:
        self.sources: dict[torch.UntypedStorage, set[Access]] = {}
        with super().step(batch):
            yield

    def add(self, column: str, n: int = 1) -> None:
        pass

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = function._schema
        name = schema.name.split("::")[1]
        out = function(*args, **kwargs)
        if name in launches.NO_LAUNCH or not on_meta(out) or (self.is_paused and not self.in_compiled):
            return out
        most = sys.maxsize
        if name in SPARSE:
            others = on_meta(args[1:])
            if not schema.is_mutable:
                others += on_meta(out)
            most = max((t.nbytes for t in others), default=0)
        reads = accesses((args, kwargs), most)
        writes = accesses(out, most)
        if name in WRITE_ONLY or "out" in kwargs:
            reads -= writes
        if self.in_compiled and name not in MATMULS and not name.startswith("_varlen_attn"):
            self.fuse(reads, writes, schema.is_mutable)
            return out
        self.write(reads)  # a matmul's factors must be in memory
        kind = ""
        flops = 0.0
        if name in MATMULS:
            first = MATMULS[name]
            a, b = args[first : first + 2]
            kind = KINDS[a.itemsize]
            flops = 2.0 * a.numel() * b.size(-1)
        elif name.startswith("_varlen_attn"):
            names = [argument.name for argument in schema.arguments]
            values = dict(zip(names, args)) | kwargs
            batch = self.batch.micro_batches[0]
            query = values["query"]
            rows = len(query) // len(batch.inputs)  # of a token: paired heads have two
            keys = step_time.mean_keys((rows * batch.cu_seqlens).numpy(), values["window_size"][0])
            products = 5 if name.endswith("backward") else 2
            kind = "attention"
            flops = 2.0 * products * query.numel() * keys
        self.append(name, total(reads) + total(writes), kind, flops)
        return out

    def append(self, name: str, nbytes: int, kind: str = "", flops: float = 0.0, calls: int = 0) -> None:
        self.found.append(Op(name, nbytes, kind, flops, self.phase, calls))

    def fuse(self, reads: set[Access], writes: set[Access], in_place: bool) -> None:
        """Takes an operation into the compiled code that runs."""
        needed: set[Access] = set()
        for a in reads:
            needed |= self.sources.get(a.storage, {a})
        for a in writes:
            if in_place and a.storage not in self.sources:
                self.reads |= needed
                self.writes.add(a)
            else:
                self.sources[a.storage] = needed | self.sources.get(a.storage, set())

    def write(self, found: Iterable[Access]) -> None:
        """Makes compiled code write these, unless they are in memory, and read what they depend on."""
        for a in found:
            if a.storage in self.sources:
                self.reads |= self.sources[a.storage]
                self.writes.add(a)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with patched(self, in_compiled=False), super().paused():
            yield

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[list]:
        self.reads: set[Access] = set()
        self.writes: set[Access] = set()
        with super().inside(name) as results, patched(self, in_compiled=True):
            yield results
        self.write(accesses(results))
        for a in self.writes:
            self.sources.pop(a.storage, None)
        if self.writes:
            nbytes = total(self.reads) + total(self.writes)
            self.append(name, round(LAYERS_TRAFFIC.get(name, 1) * nbytes), calls=1)

    def add_kernel(self, name: str, tensors: Any) -> None:
        found = on_meta(tensors)
        if self.in_compiled:  # its arguments must be in memory
            self.write(accesses(tensors))
        nbytes = total(accesses(tensors))
        kind = ""
        flops = 0.0
        if name == "segment_sum_rows":
            arguments, _ = tensors
            table, grad, segments = arguments[:3]
            nbytes = len(segments.perm) * grad[:1].nbytes + 2 * len(segments.ids) * table[:1].nbytes
        elif name.startswith("relu_square"):  # the result is larger than the factors
            largest = max(t.numel() for t in found)
            kind = KINDS[found[0].itemsize]
            flops = 2.0 * found[0].size(-1) * largest
        elif name in ("pointer", "pointer_grad"):  # scores, and one product of their gradient
            products = 1 if name == "pointer" else 2
            documents = self.batch.micro_batches[0].cu_seqlens.numpy()
            # Without the token itself.
            sources = step_time.mean_keys(documents, self.cfg.pointer_window) - 1
            kind = "pointer"
            flops = 2.0 * products * found[0].numel() * sources
        self.append(name, nbytes, kind, flops)

    def add_collective(self, kind: str, name: str, nbytes: int) -> None:
        self.append(f"{kind} {name}", nbytes, "exchange")


def scaled(op: Op, share: float) -> Op:
    return op._replace(nbytes=int(share * op.nbytes), flops=share * op.flops)


def renamed(old: str, new: str, part: str = "") -> Callable[[Op], Op]:
    """Makes a technique that gives FLOPs of a kind, in one part or in all, the rate of another."""

    def technique(op: Op) -> Op:
        if op.kind == old and part in ("", op.part):
            return op._replace(kind=new)
        return op

    return technique


def unpadded(op: Op) -> Op:
    """Two of four products of the forward's, three of five of the backward's have the queries' width."""
    if op.part in NARROW_ATTENTION:
        return scaled(op, NARROW_ATTENTION[op.part])
    if op.name == "constant_pad_nd":
        return op._replace(nbytes=0)
    return op


def pulled_rows(op: Op) -> Op:
    """A rank's four batches of a cycle have about 0.3 of all tokens."""
    if op.name == "all_gather value_embeds":
        return scaled(op, 0.3)
    return op


NARROW_ATTENTION = {"narrow attention": 3 / 4, "narrow attention backward": 7 / 10}
# What record 92 has and this script may lack: how an operation changes with it. One that the script has
# finds nothing to change.
TECHNIQUES = {
    "FlashAttention-3": renamed("varlen", "fa3"),
    "FP8 of QKV": renamed("bf16", "fp8", "QKV"),
    "unpadded narrow attention": unpadded,
    "value_embeds by pulled rows": pulled_rows,
}
PUBLISHED_ENDINGS = 0.21  # s
PUBLISHED_80 = 31.1, 56.3, 82.0, 82.4  # ms by stage
PUBLISHED_PHASES_92 = 17.0, 30.3, 45.0, 47.9, 46.7, 22.6  # ms by phase
PUBLISHED_92 = 39.914  # s
PUBLISHED_379 = 40.575, 36.009  # s, of record 92 and of PR 379, on one node

SETTINGS_80 = """
    mudd_gates=false mudd_weights=false layers.*.xsa=false fp8_mlp=false sign_rows=0 ngrams.orders=
    bigram_vocab_size=251520 mlp_dim=3072 stages.*.prefix= attention_cap=0 stages.*.sampled_columns=
    params.value_embeds.exchange=reduce_scatter params.embed.exchange=reduce_scatter
    params.value_embeds.update_every=2,2 layers.*.narrow_qk=false layers.*.narrow_v=false layers.*.mlps=1
    layers.*.x0=true layers.*.ngram=true layers.10.mudd=false
    layers.4.attention=plain layers.7.attention=plain layers.9.attention=paired
    layers.9.value=true layers.*.gate=true layers.6.gate=false
    stages.2.max_doc_len=2048 attention_impl=fa3"""


def config_80() -> tg.Config:
    """Returns record 80's settings, as far as there are such."""
    cfg = reduce(tg.override, SETTINGS_80.split(), RECORD92)
    third = cfg.stages[2]
    fourth = replace(third, steps=15, windows=tg.Windows(6, 13))
    return replace(cfg, averages=(), stages=cfg.stages[:3] + (fourth,))


def norm_of_two(x: Tensor, weights: Tensor, streams: list[Tensor]) -> Tensor:
    """Does lm_head_input() as before record 81: takes "back" off."""
    return tg.norm(x + weights[1:2].T * streams[1])


def count(cfg: tg.Config, stage: int, **changes) -> list[Op]:
    """Lists what four successive steps launch, with functions of the script replaced."""
    traffic = Traffic(cfg)

    def in_part(function: Callable, which: Sequence[bool]) -> Callable:
        """Wraps a function: of every len(which) calls those count in the part QKV for which it is true."""
        inner = traffic.in_phase("QKV", function)
        turns = itertools.cycle(which)

        def call(ctx, *args):
            if next(turns):
                return inner(ctx, *args)
            return function(ctx, *args)

        return staticmethod(call)

    # A layer's products are of queries and keys, of values, and of attention's output.
    forward = in_part(tg.Linear.forward, [True, True, False])
    backward = in_part(tg.Linear.backward, [False, True, True])
    with patched(tg, **changes), patched(tg.Linear, forward=forward, backward=backward):
        backend = launches.make_backend(cfg, traffic)
        steps: Any = launches.run_steps(cfg, stage, RANKS, backend, traffic, validated=False)
    # A step's attention is that of its layers, then their backwards.
    forwards = []
    backwards = []
    for layer in cfg.layers:
        if layer.attention and cfg.attention_impl != "dense":  # that is of matmuls
            is_narrow = layer.narrow_qk and not layer.narrow_v
            forwards.append("narrow attention" if is_narrow else "")
            backwards.append("narrow attention backward" if is_narrow else "")
    names = forwards + backwards[::-1]
    ops = sum(steps, [])
    attention = [i for i, op in enumerate(ops) if op.kind == "attention"]
    for i, name in zip(attention, len(steps) * names, strict=True):
        ops[i] = ops[i]._replace(kind=cfg.attention_impl, part=name)
    return ops


def count_all(cfg: tg.Config) -> list[Phase]:
    """Counts each phase of a run."""
    steps: Counter = Counter()
    for step in range(cfg.steps):
        plan = tg.plan_step(cfg, step)
        steps[plan.stage, plan.sampled_columns] += 1
    phases = []
    for (stage, columns), n in tqdm(steps.items(), "counting", unit="phase"):
        ops = count(tg.override(cfg, f"stages.{stage}.sampled_columns={columns}"), stage)
        phases.append(Phase(stage, columns or cfg.padded_vocab, n, ops))
    return phases


def with_techniques(phases: list[Phase], names: Iterable[str] = TECHNIQUES) -> list[Phase]:
    changed = []
    for phase in phases:
        ops = phase.ops
        for name in names:
            ops = [TECHNIQUES[name](op) for op in ops]
        changed.append(phase._replace(ops=ops))
    return changed


def with_steps_of(others: list[Phase], phases: list[Phase]) -> list[Phase]:
    return [phase._replace(steps=other.steps) for other, phase in zip(others, phases, strict=True)]


def op_ms(op: Op, model: Model) -> float:
    """Estimates the ms of a launch or collective alone."""

    def rate(kind: str) -> float:
        """Returns it in 1 / ms."""
        return PEAKS[kind] * getattr(model, kind) / 1e3

    if op.kind == "exchange":
        return op.nbytes / rate("exchange") + model.collective_us / 1e3
    return max(op.flops / rate(op.kind or "bf16"), op.nbytes / rate("memory"), model.kernel_us / 1e3)


def measured_ms(op: Op, rows: Measurements) -> float:
    """Returns the ms of a launch by the measured rate of as much work; 0 if there is none."""
    work = op.flops or op.nbytes
    if op.kind != "varlen":
        return rows.ms(op.name, work) or rows.ms(op.kind, work)
    # Measured was a layer's forward with its backward, which has 5 of the 7 products, and counts as 4 of 6.
    share = 5 / 7 if op.name.endswith("backward") else 2 / 7
    return share * rows.ms(op.kind, unpadded(op).flops / share * 6 / 7)


def step_ms(ops: list[Op], model: Model) -> dict[str, float]:
    """Estimates a step's ms, of the device by part and of the host: the mean of the counted four."""
    parts = dict.fromkeys(PARTS, 0.0) | {"fixed": model.fixed}
    host = 0.0
    for op in ops:
        part = PART_OF.get(op.kind, "matmuls")
        launched = 0
        if part == "exchange":
            ms = (1 - model.hidden) * op_ms(op, model)
        else:
            ms = model.slowdown * op_ms(op, model)
            if model.measured:
                ms = measured_ms(op, model.measured) or ms
            launched = 1 + LAYERS_LAUNCHES.get(op.name, 0)
        for saving in model.savings:
            ms = saving(op, ms)
        parts[part] += ms / 4
        host += model.host * (model.call_us * op.calls + model.launch_us * launched) / 4000
    device = sum(parts.values())
    return parts | {"device": device, "host": host, "ms": max(device, host)}


def calibrate(stages: list[list[Op]], published: Iterable[float], model: Model) -> Model:
    """Fits slowdown and fixed to published ms of stages: least squares of relative residuals."""
    known, slowed = [], []  # ms of a step that slowdown leaves as they are, and the others
    for ops in stages:
        device = step_ms(ops, model)["device"]
        slowed.append(step_ms(ops, model._replace(slowdown=2.0))["device"] - device)
        known.append(device - slowed[-1])
    measured = np.array(list(published))
    slowdown, fixed = np.polyfit(slowed, measured - known, 1, w=1 / measured)
    return model._replace(slowdown=float(slowdown), fixed=float(fixed))


def line(name: Any, cells: Iterable[Any]) -> None:
    text = f"{name:<28}"
    for cell in cells:
        if isinstance(cell, float):
            cell = f"{cell:.2f}"
        text += f"{cell:>10}"
    print(text.rstrip(), flush=True)


def run_seconds(phases: list[Phase], model: Model) -> float:
    """Estimates the seconds of a run."""
    return sum(phase.steps * step_ms(phase.ops, model)["ms"] for phase in phases) / 1e3 + PUBLISHED_ENDINGS


def fit(of_92: list[Phase]) -> Model:
    """Fits the model to records 80 and 92, and prints it."""
    cfg = config_80()
    names, stages = [], []
    for stage in range(len(PUBLISHED_80)):
        names.append(f"80 {stage}")
        stages.append(count(cfg, stage, lm_head_input=norm_of_two))
    for phase in of_92:
        names.append(f"92 {phase.stage}, {phase.columns}")
        stages.append(phase.ops)
    all_published = PUBLISHED_80 + PUBLISHED_PHASES_92
    model = calibrate(stages, all_published, Model())
    print(model)
    print("\nto which slowdown and fixed are fitted: ms of a step")
    line("record, stage, columns", ["published", "estimate", "residual"])
    for name, ops, published in zip(names, stages, all_published, strict=True):
        residual(name, published, step_ms(ops, model)["device"])
    residual("92, seconds", PUBLISHED_92, run_seconds(of_92, with_graphs(model)))
    return model


def with_graphs(model: Model) -> Model:
    return model._replace(host=0.0)


def print_379(of_record: list[Phase], of_92: list[Phase], model: Model) -> None:
    """Prints how much of PR 379's time its schedule explains, and how much its pointer, in this model."""
    model = with_graphs(model)
    before = run_seconds(of_92, model)
    with_schedule = run_seconds(with_steps_of(of_record, of_92), model)
    with_pointer = run_seconds(with_techniques(of_record), model)
    published = PUBLISHED_379[1] / PUBLISHED_379[0]
    print("\nPR 379's seconds as a share of record 92's, to which nothing is fitted")
    line("", ["published", "estimate", "residual"])
    residual("its schedule alone", published, with_schedule / before, digits=4)
    residual("and its pointer", published, with_pointer / before, digits=4)


def residual(name: str, published: float, estimate: float, digits: int = 2) -> None:
    numbers = [f"{published:.{digits}f}", f"{estimate:.{digits}f}"]
    line(name, numbers + [f"{estimate / published - 1:+.1%}"])


def print_run(title: str, cfg: tg.Config, phases: list[Phase], model: Model) -> float:
    """Prints the parts of a run's phases. Returns the seconds of the run."""
    print(f"\n{title}")
    line("stage, tokens, columns", ("steps",) + PARTS + ("device", "host", "bound", "seconds"))
    for phase in phases:
        tokens = cfg.stages[phase.stage].batch_tokens // tg.num_microbatches(cfg, RANKS)
        estimate = step_ms(phase.ops, model)
        bound = "device" if estimate["device"] >= estimate["host"] else "host"
        cells: list[Any] = [phase.steps]
        cells += [estimate[part] for part in PARTS + ("device", "host")]
        cells += [bound, phase.steps * estimate["ms"] / 1e3]
        line(f"{phase.stage}, {tokens}, {phase.columns}", cells)
    seconds = run_seconds(phases, model)
    print(f"total {seconds:.2f} s, with {PUBLISHED_ENDINGS} s besides the steps")
    return seconds


def print_changes(base: list[Phase], without: dict[str, list[Phase]], model: Model) -> None:
    """Prints what record 92's techniques would save the record preset, and what its parts cost."""
    graphs = with_graphs(model)
    seconds = {"as it is": run_seconds(base, model)}
    for name in TECHNIQUES:
        seconds[name] = run_seconds(with_techniques(base, [name]), model)
    seconds["CUDA graphs"] = run_seconds(base, graphs)
    seconds["all of these, PR 379"] = run_seconds(with_techniques(base), graphs)
    for name, phases in without.items():
        seconds[name] = run_seconds(phases, model)
    seconds["host twice as slow"] = run_seconds(base, model._replace(host=2.0))
    print("\nchanges of the record preset: seconds of a run, and the change")
    for name, new in seconds.items():
        line(name, [new, f"{new - seconds['as it is']:+.2f}"])


def print_estimates(changed: dict[str, tg.Config], rows: Measurements) -> None:
    """Prints all tables, and of each changed config the run's."""
    print("estimates for 8 H100s: what is not called published was never measured")
    print("takes some minutes, each what-if more\n", flush=True)
    of_record = count_all(RECORD)
    no_pointer = count_all(RECORD92)
    of_92 = with_techniques(no_pointer)
    without = {
        "pointer_dim=0": with_steps_of(of_record, no_pointer),
        "fp8_mlp=false": count_all(tg.override(RECORD, "fp8_mlp=false")),
    }
    model = fit(of_92)
    print_379(of_record, of_92, model)
    seconds = print_run("the record preset: ms of a step", RECORD, of_record, model)
    print_changes(of_record, without, model)
    for changes, cfg in changed.items():
        new = print_run(changes, cfg, count_all(cfg), model)
        print(f"change {new - seconds:+.2f} s")
    print_measured(of_record, rows)


def fit_measured(phases: list[Phase], rows: Measurements) -> Model:
    """Fits the model to the device's measured ms by stage. Prints where its rates come from, and the fit."""
    model = Model(measured=rows, memory=rows.copies / PEAKS["memory"])
    print("\nrates of the tables below, in TFLOP/s, or TB/s of what has no FLOPs")
    for name in sorted(rows.points.keys() | PEAKS.keys()):
        print(rows.source(name, PEAKS.get(name, 0) * getattr(model, name, 0)))
    first_phases = {phase.stage: phase for phase in reversed(phases)}
    stages, device, hosts = [], [], []
    for stage, step in rows.steps.items():
        ops = first_phases[stage].ops
        stages.append([op for op in ops if op.kind != "exchange"])
        device.append(step["device"])
        hosts.append(step["host"] / step_ms(ops, model)["host"])
    model = calibrate(stages, device, model)._replace(host=float(np.mean(hosts)))
    print(f"\nslowdown {model.slowdown:.2f}, fixed {model.fixed:.2f} ms, host {model.host:.1f} times as slow")
    line("stage: the device's ms", ["measured", "estimate", "residual"])
    for stage, ops, ms in zip(rows.steps, stages, device):
        residual(str(stage), ms, step_ms(ops, model)["device"])
    return model


def print_measured(phases: list[Phase], rows: Measurements) -> None:
    """Prints the second projection, and what further work would save in it."""
    model = fit_measured(phases, rows)
    print_run("with measured rates: ms of a step", RECORD, phases, model)
    model = with_graphs(model)
    before = print_run("with measured rates and CUDA graphs: ms of a step", RECORD, phases, model)
    print("\nfurther work: seconds of a run with it alone, the change, seconds with all so far")
    for name, saving in SAVINGS.items():
        alone = run_seconds(phases, model._replace(savings=(saving,)))
        model = model._replace(savings=(*model.savings, saving))
        print(f"{alone:8.2f} {alone - before:+8.2f} {run_seconds(phases, model):8.2f}  {name}")


def check(cfg: tg.Config) -> None:
    """Checks as bench/launches.py does."""
    if cfg.attention_impl == "fa3":  # a package of its own, which no count needs
        cfg = replace(cfg, attention_impl="varlen")
    launches.check(cfg, RANKS)


def run(args: argparse.Namespace) -> None:
    changed = {changes: reduce(tg.override, changes.split(), RECORD) for changes in args.what_if}
    check(RECORD)
    for cfg in changed.values():
        check(cfg)
    rows = Measurements(args.measured)
    complete = rows.copies and len(rows.steps) > 1
    tg.require(complete, "--measured: the rows lack copies, or two stages' times, of one rank of 8")
    print_estimates(changed, rows)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("projection.py", __doc__)
    parser.add_argument("--what-if", action="append", default=[], metavar="'NAME=VALUE ...'")
    parser.add_argument("--measured", nargs="+", type=Path, default=[ROWS], metavar="ROWS.jsonl")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
