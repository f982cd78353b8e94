#!/usr/bin/env python3
"""Estimates a training step's time on 8 H100s, stage by stage, without a GPU.

    python bench/projection.py
    python bench/projection.py --what-if "layers.*.xsa=false" --what-if "mlp_dim=2560 fp8_mlp=false"
                               [--set NAME=VALUE ...] [--assume NAME=VALUE ...]

All times are estimates, but for those called published. --set changes the record preset, and --what-if that,
each by itself.

It runs two steps of rank 0 of 8 in each stage, as bench/launches.py does, on torch's "meta" device, and lists
the FLOPs of matmuls and attention, the bytes that each operation reads and writes, and those that this rank
sends. A piece of compiled code counts as one kernel, besides its matmuls: it reads its inputs and writes its
results once, and a backward computes again what it needs of its forward. Tokens are synthetic, documents as
long as web text's; sparse exchanges send about twice as many rows of bigrams as for real text.

A step's ms: slowdown * (sum over operations) + (1 - hidden) * (sum over collectives) + fixed

    operation    the most of FLOPs / rate, bytes / memory's rate, kernel_us * launches
    collective   bytes sent / exchange's rate + collective_us
    host         instead of both sums, if longer: host_us * launches, of which such a piece is one

--assume changes these parameters. Rates are fractions of an H100 SXM's peaks, by NVIDIA's data sheet: dense
bf16 989 TFLOP/s, FP8 1979, fp32 67; memory 3.35 TB/s; NVLink 450 GB/s each way.

    bf16, fp8, fp32   of matmuls: what large ones attain under the power limit
    attention         of bf16's peak, FlashAttention-3 on keys in window and document, and composed heads
    memory, exchange  what streaming kernels, and NCCL's large collectives on eight GPUs, attain
    hidden            share of collectives during which the GPU computes
    slowdown, fixed   fitted to record 80's published ms of four stages: what is not counted

The default run prints the fit; how published differences of records come out, to which nothing is fitted; the
record preset's stages and training time, beside record 89's, whose time is published, and whose stages are
estimates from published logs of other configurations. Columns, in ms of a step, the mean of one with Adam and
one without:

    tokens     of a micro-batch, which each GPU has one of
    matmuls, attention, other   the sum over operations, by kind
    exchange   the collectives' share that is not hidden; host: further waiting for the host
    total      seconds of all steps, without validation
    change     to the base's ms

With bf16 from 0.55 to 0.75, or FP8 from 0.45 to 0.65, the whole run varies from 71.8 to 74.0 s, and what FP8
gains in the up-projection from a fifth of what is published to 1.3 times that; other rates matter less.

Record 80 is this script with its parts switched off, as far as settings go, and layer 10 and the head reading
no saved streams but "back". Not expressed: one graph for the whole model, dense gradients of tables, its
gates' products, a second result of the squared ReLU. FP8 in the up-projection alone, and a table of 192
columns, take changes of the script's functions too. Published differences are means over a run, from official
times or from one machine.

A default run takes two minutes on two slow cores, a new config 15 s more. Counts are kept in torch's cache
folder until the config, or the code that counts or is counted, changes.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
import launches
import step_time
import train_gpt as tg

RANKS = 8
PEAKS = {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12, "attention": 989e12}  # FLOP/s
PEAKS |= {"memory": 3.35e12, "exchange": 450e9}  # bytes/s
KINDS = {1: "fp8", 2: "bf16", 4: "fp32"}  # of FLOPs, by bytes of a factor's entry
MATMULS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # first factor's place
GATHERS = {"embedding", "index", "index_select"}  # read as much as they write
SCATTERS = {"index_add_", "index_copy_", "index_fill_", "index_put_"}  # change few rows
WRITE_ONLY = {"copy_", "zero_", "fill_", *SCATTERS} - {"index_add_"}
# FLOPs of Triton kernels: of an entry of the first factor and column of the result (gram computes half of a
# symmetric one); of composed heads, of an entry of the queries and a key.
KERNEL_FLOPS = {"gram": 1, "relu_square": 2, "relu_square_grad": 2, "relu_square_fp8": 2}
COMPOSE_FLOPS = {"kernel": 4, "kernel backward": 6, "key_grad_kernel": 4}
LONG_SUM = 8192  # entries that do not fit in a block: what needs their sum waits for a pass over them


class Model(NamedTuple):
    bf16: float = 0.65
    fp8: float = 0.55
    fp32: float = 0.60
    attention: float = 0.35
    memory: float = 0.87
    exchange: float = 0.80
    kernel_us: float = 3.0
    collective_us: float = 20.0
    hidden: float = 0.5
    host_us: float = 25.0
    slowdown: float = 1.0
    fixed: float = 0.0  # ms


class Op(NamedTuple):
    name: str
    kind: str  # of its FLOPs; "": none that count; exchange: a collective
    flops: float
    nbytes: int  # read and written, each tensor once; sent
    launches: int


class Access(NamedTuple):
    """A view that is read or written."""

    storage: int
    size: int  # the storage's bytes
    view: tuple
    nbytes: int


def access(t: Tensor, nbytes: float = math.inf, rows: int = 0) -> Access:
    """Describes all of t, or `nbytes` in rows that `rows` names. Repeated entries count once."""
    storage, shape = t.untyped_storage(), zip(t.shape, t.stride())
    dense = math.prod(n if step else min(n, 1) for n, step in shape) * t.element_size()
    view = t.storage_offset(), t.shape, t.stride(), rows
    return Access(storage._cdata, storage.nbytes(), view, int(min(dense, nbytes)))


def total(accesses: Iterable[Access]) -> int:
    """Returns the bytes of accesses: each view once, and no more of a storage than it has."""
    by_storage: Counter = Counter()
    for a in set(accesses):
        by_storage[a.storage, a.size] += a.nbytes
    return sum(min(nbytes, size) for (_, size), nbytes in by_storage.items())


def on_meta(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_meta and t.numel()]


class Traffic(launches.Counts):
    """Lists the operations of each step in `steps`.

    `sources` has, for what compiled code does not write, which tensors in memory it depends on: inputs of
    the piece, results of its matmuls, or of long sums.
    """

    def __init__(self):
        self.steps: list[list[Op]] = []
        super().__init__()

    def begin_step(self) -> None:
        super().begin_step()
        self.ops: list[Op] = []
        self.sources: dict[int, set[Access]] = {}
        self.held: dict[int, Any] = {}  # storages, so that no other takes their addresses
        self.begin_piece(False)

    def begin_piece(self, in_piece: bool) -> None:
        self.in_piece, self.reads, self.writes, self.changed = in_piece, set(), set(), set()
        self.sums, self.passes = {}, {}  # what long sums read; those that must end before the piece does

    def begin_batch(self, batch: tg.Batch) -> None:
        super().begin_batch(batch)
        self.batch = batch

    def end_step(self) -> launches.Step:
        self.steps.append(self.ops)
        return super().end_step()

    def access(self, t: Tensor, *options) -> Access:
        a = access(t, *options)
        self.held[a.storage] = t.untyped_storage()
        return a

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, schema = function(*args, **(kwargs or {})), function._schema
        name, results = schema.name.split("::")[1], on_meta(out)
        if name in launches.NO_LAUNCH or not results or (self.is_paused and not self.in_piece):
            return out
        values = {a.name: value for a, value in zip(schema.arguments, args)} | (kwargs or {})
        reads, writes, limits = [], [], {}
        for argument in schema.arguments:
            found = on_meta(values.get(argument.name))
            writes += found if argument.is_write else []
            reads += [] if argument.is_write and (argument.is_out or name in WRITE_ONLY) else found
        if name in GATHERS:
            limits[id(reads[0])] = results[0].nbytes, results[0].untyped_storage()._cdata
        if name in SCATTERS:
            table, moved = values["self"], values.get("source", values.get("values"))
            rows = moved.numel() / table[0].numel() if name != "index_fill_" else len(values["index"])
            limits[id(table)] = (rows * table[:1].nbytes,)
        read, written = ([self.access(t, *limits.get(id(t), ())) for t in ts] for ts in (reads, writes))
        changed = {a.storage for a in written}
        written += [a for a in map(self.access, results) if a.storage not in changed]
        if self.in_piece and name not in MATMULS:
            self.fuse(read, written, changed)
            return out
        for a in read:
            if a.storage in self.sources:  # a matmul's factors must be in memory
                self.need(a)
        kind, flops = "", 0.0
        if name in MATMULS:
            a, b = args[MATMULS[name] :][:2]
            kind, flops = KINDS[a.itemsize], 2.0 * a.numel() * b.size(-1)
        elif name.startswith("_varlen_attn"):
            query, (window, _) = values["query"], values["window_size"]
            batches = [(len(query) // len(m.inputs), m.cu_seqlens) for m in self.batch.micro_batches]
            keys = np.mean([step_time.mean_keys((rows * docs).numpy(), window) for rows, docs in batches])
            products = 5 if name.endswith("backward") else 2
            kind, flops = "attention", 2.0 * products * query.numel() * float(keys)
        self.add_op(name, total(read) + total(written), kind, flops, launches.LAUNCHES.get(name, 1))
        return out

    def fuse(self, reads: list[Access], writes: list[Access], changed: set[int]) -> None:
        """Takes an operation into the piece that runs."""
        needed = set().union(*(self.sources.get(a.storage, {a}) for a in reads))
        for a in writes:
            if a.storage in changed and a.storage not in self.sources:
                self.changed.add(a.storage)
            if a.storage in self.changed:
                self.writes.add(a)
            self.sources[a.storage] = needed | self.sources.get(a.storage, set())
        if not changed and max((a.nbytes for a in reads), default=0) >= LONG_SUM * writes[0].nbytes:
            self.sums[writes[0].storage], self.sources[writes[0].storage] = needed, {writes[0]}

    def need(self, a: Access) -> None:
        """Makes the piece write `a`, and read what it depends on."""
        self.writes.add(a)
        for source in self.sources[a.storage]:
            if source.storage not in self.sums:
                self.reads.add(source)
            elif a.nbytes <= source.nbytes:
                self.reads |= self.sums[source.storage]
            else:
                self.passes[source.storage] = self.sums[source.storage]

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[list]:
        with super().inside(name) as results:
            self.begin_piece(True)
            yield results
        for a in [*self.writes, *map(self.access, on_meta(results))]:
            if a.storage in self.sources:
                self.need(a)
        for a in self.writes:
            self.sources.pop(a.storage, None)
        for reads in self.passes.values():
            self.add_op(name, total(reads))
        if self.writes:
            self.add_op(name, total(self.reads) + total(self.writes))
        self.begin_piece(False)

    def add_op(self, name: str, nbytes: int, kind: str = "", flops: float = 0.0, count: int = 1) -> None:
        self.ops.append(Op(name, kind, flops, nbytes, count))

    def add_kernel(self, name: str, tensors: Any, *sizes: Any) -> None:
        super().add_kernel(name, tensors, *sizes)
        found, kind, flops = on_meta(tensors), "", 0.0
        nbytes = total(map(self.access, found))
        if name == "segment_sum_rows":
            (table, grad, index, _), _ = tensors
            nbytes = grad.nbytes + len(index.row_ids) * table[:1].nbytes
        elif name in KERNEL_FLOPS:
            kind = KINDS[found[0].itemsize]
            flops = 1.0 * KERNEL_FLOPS[name] * found[0].numel() * found[-1].size(-1)
        elif name.startswith("compose_heads_"):
            (T, H, _, window, D), each = sizes, COMPOSE_FLOPS[name.removeprefix("compose_heads_")]
            kind, flops = "attention", 1.0 * each * T * H * D * (window + tg.COMPOSE_TILES["BLOCK"])
        self.add_op(name, nbytes, kind, flops)

    def add_collective(self, kind: str, name: str, nbytes: int) -> None:
        super().add_collective(kind, name, nbytes)
        self.add_op(f"{kind} {name}", nbytes, "exchange")


# ------------------------------------------------------------------------------------------------------------
# Records of the public speedrun, as settings of this script, and as changes that no setting makes
# ------------------------------------------------------------------------------------------------------------


def read_no_streams(x: Tensor, first: Tensor, back: Tensor, value: Tensor, weights: Tensor):
    """Does connect() as before record 81: gates a value embedding."""
    return weights[:, 6:7] * value, x


def norm_of_two(x: Tensor, weights: Tensor, streams: list[Tensor]) -> Tensor:
    """Does final_norm() as before record 81: takes "back" off."""
    return tg.norm(x + weights[:, 1:2] * streams[1])


def up_in_fp8(ctx, h, slices, backend, weights, fc, proj):
    """Does MLP's forward as before record 89: the down-projection in bf16."""
    ctx.slices, ctx.backend = slices, backend
    square, _ = backend.relu_square_fp8(*backend.compiled(tg.amax_to_fp8)(h), weights, h.dtype)
    ctx.save_for_backward(h, square, fc, proj)
    return square @ proj


NARROW = 192  # columns of bigram_embed in record 83
param_shapes, mix_streams, mix_streams_grad = tg.param_shapes, tg.mix_streams, tg.mix_streams_grad


def narrow_shapes(cfg: tg.Config, world_size: int) -> dict[str, tuple[int, ...]]:
    shapes = param_shapes(cfg, world_size)
    return shapes | {"bigram_embed": (shapes["bigram_embed"][0], NARROW)}


def lookup_narrow(self, batch, leaves, training):
    """Does lookup_sums() without padding."""
    rows, ids = self.weight("bigram_embed").detach(), batch.ngrams
    found = rows.new_empty(ids.size(1), NARROW)
    self.backend.compiled(tg.gather_rows)(found, rows, ids.int(), self.signs[:, :NARROW], batch.signs)
    leaves["bigram_embed"] = found.requires_grad_()
    return found


def widen(streams):
    return [F.pad(x, (0, streams[0].size(1) - x.size(1))) if x.size(1) == NARROW else x for x in streams]


def mix_narrow(scales, streams, normed):
    return mix_streams(scales, widen(streams), normed)


def mix_narrow_grad(scales, streams, sums, *grads):
    dscales, wide = mix_streams_grad(scales, widen(streams), [None] * len(sums), *grads)
    dstreams = [dx[:, : x.size(1)] for x, dx in zip(streams, wide)]
    return dscales, [dx if so_far is None else so_far.add_(dx) for so_far, dx in zip(sums, dstreams)]


class Variant(NamedTuple):
    cfg: tg.Config
    changes: tuple = ()  # (owner, attribute, replacement)


def override(cfg: tg.Config, settings: str) -> tg.Config:
    for setting in settings.split():
        cfg = tg.override(cfg, setting)
    return cfg


SETTINGS_80 = """
    mudd_gates=false mudd_connections=false layers.*.xsa=false layers.*.dc=false fp8_mlp=false sign_rows=0
    bigram_vocab_size=251520 stages.*.prefix_start=0 stages.*.prefix_end=0
    params.value_embeds.exchange=reduce_scatter params.embed.exchange=reduce_scatter
    stages.0.steps=480 stages.1.steps=480 stages.2.steps=480 stages.3.steps=40
""" + " ".join(f"layers.{i}.gate=true" for i, layer in enumerate(tg.LAYERS) if layer.attention)
NO_CONNECTIONS = (tg, "connect", read_no_streams), (tg, "final_norm", norm_of_two)
UP_ALONE = (*NO_CONNECTIONS, (tg.MLP, "forward", staticmethod(up_in_fp8)))
NARROW_TABLE: tuple = (tg, "param_shapes", narrow_shapes), (tg.GPT, "lookup_sums", lookup_narrow)
NARROW_TABLE += (tg, "mix_streams", mix_narrow), (tg, "mix_streams_grad", mix_narrow_grad), *NO_CONNECTIONS
PUBLISHED_80, ESTIMATED_89 = (31.1, 56.3, 82.0, 82.4), (31.6, 57.1, 82.6, 83.5)  # ms by stage


def changed_80(settings: str = "", changes: tuple = NO_CONNECTIONS) -> Variant:
    return Variant(override(override(tg.RECORD, SETTINGS_80), settings), changes)


RECORD_80, UP_IN_FP8 = changed_80(), changed_80("fp8_mlp=true", UP_ALONE)
XSA, TABLE = (
    " ".join(f"layers.{i}.xsa=true" for i in (1, 3, 4, 7)),
    "sign_rows=8192 bigram_vocab_size=754560",
)
DIFFERENCES = (  # what, without, with, published ms of a step: means over a run
    ("MUDD connections", RECORD_80, changed_80("mudd_connections=true", ()), 0.80),
    ("XSA in four layers", RECORD_80, changed_80(XSA), 0.30),
    ("FP8 up-projection", RECORD_80, UP_IN_FP8, -0.71),
    ("FP8 down-projection", UP_IN_FP8, changed_80("fp8_mlp=true"), -0.75),
    ("narrower table, signs", RECORD_80, changed_80(TABLE, NARROW_TABLE), -0.65),
)

Steps = list[list[list[Op]]]  # by stage with steps, two successive steps


def count(variant: Variant) -> Steps:
    """Counts the operations of a variant's steps, or takes them from the cache."""
    cfg, changes = variant
    digest = hashlib.sha256(repr((torch.__version__, cfg, [change[1] for change in changes])).encode())
    for module in (tg, launches, launches.gpu_code, step_time, sys.modules[__name__]):
        digest.update(Path(str(module.__file__)).read_bytes())
    kept = Path(default_cache_dir(), "train_gpt", f"projection_{digest.hexdigest()[:16]}.json")
    if not kept.exists():
        stages = []
        with contextlib.ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(launches.patched(owner, **{name: value}))
            for stage in (i for i, stage in enumerate(cfg.stages) if stage.steps):
                traffic = Traffic()
                backend = launches.make_backend(cfg, traffic)
                launches.run_steps(cfg, stage, RANKS, backend, traffic, validated=False)
                stages.append(traffic.steps[-2:])
        kept.parent.mkdir(parents=True, exist_ok=True)
        (new := kept.with_suffix(f".{os.getpid()}")).write_text(json.dumps(stages))
        new.rename(kept)
    return [[[Op(*op) for op in step] for step in stage] for stage in json.loads(kept.read_text())]


# ------------------------------------------------------------------------------------------------------------
# The model, and what is printed
# ------------------------------------------------------------------------------------------------------------

PARTS = "matmuls", "attention", "other", "exchange", "host", "fixed"


def op_ms(op: Op, model: Model) -> float:
    """Estimates the ms of an operation or collective alone."""

    def ms(n: float, kind: str) -> float:
        return 1e3 * n / (PEAKS[kind] * getattr(model, kind))

    if op.kind == "exchange":
        return ms(op.nbytes, "exchange") + model.collective_us / 1e3
    compute = ms(op.flops, op.kind) if op.kind else 0.0
    return max(compute, ms(op.nbytes, "memory"), op.launches * model.kernel_us / 1e3)


def step_ms(ops: list[Op], model: Model) -> dict[str, float]:
    """Estimates a step's ms by PARTS."""
    parts = dict.fromkeys(PARTS, 0.0)
    for op in ops:
        part = {"": "other", "attention": "attention", "exchange": "exchange"}.get(op.kind, "matmuls")
        parts[part] += op_ms(op, model) * (1 - model.hidden if part == "exchange" else model.slowdown)
    host = sum(op.launches for op in ops if op.kind != "exchange") * model.host_us / 1e3
    return parts | {"host": max(0.0, host - sum(parts.values())), "fixed": model.fixed}


def stage_ms(steps: list[list[Op]], model: Model) -> dict[str, float]:
    """Estimates the mean of a stage's two steps by PARTS."""
    first, second = (step_ms(ops, model) for ops in steps)
    return {part: (first[part] + second[part]) / 2 for part in PARTS}


def stages_ms(steps: Steps, model: Model) -> np.ndarray:
    return np.array([sum(stage_ms(stage, model).values()) for stage in steps])


def calibrate(model: Model, steps: Steps, published: Iterable[float]) -> Model:
    """Fits slowdown and fixed to published ms of stages: least squares of relative residuals."""
    target = np.array(list(published))
    parts = [stage_ms(stage, model._replace(slowdown=1.0, host_us=0.0)) for stage in steps]
    exposed = np.array([part["exchange"] for part in parts])
    device = np.array([part["matmuls"] + part["attention"] + part["other"] for part in parts])
    system = np.stack([device, np.ones(len(device))], axis=1) / target[:, None]
    (slowdown, fixed), *_ = np.linalg.lstsq(system, 1 - exposed / target, rcond=None)
    return model._replace(slowdown=float(slowdown), fixed=float(fixed))


def run_seconds(cfg: tg.Config, ms: np.ndarray) -> float:
    """Returns the training time, from ms of a step by stage."""
    return float(np.array([stage.steps for stage in cfg.stages if stage.steps]) @ ms) / 1e3


def line(name: Any, *cells: Any) -> None:
    text = "".join(f"{cell if isinstance(cell, (str, int)) else format(cell, '.2f'):>10}" for cell in cells)
    print(f"{name:<24}{text}".rstrip(), flush=True)


def print_fit(model: Model, ms: np.ndarray) -> None:
    print("estimates for 8 H100s: what is not called published was never measured\n")
    for name, value in model._asdict().items():
        per, unit = (1e9, "GB/s") if name in ("memory", "exchange") else (1e12, "TFLOP/s")
        peak = PEAKS.get(name, 0.0) / per
        print(f"{name:<24}{value:>10.4g}" + (f" of {peak:.0f} {unit}: {value * peak:.0f}" if peak else ""))
    print("\nrecord 80, to which slowdown and fixed are fitted: ms of a step")
    line("stage", "published", "estimate", "residual")
    for stage, (estimate, target) in enumerate(zip(ms, PUBLISHED_80)):
        line(stage, target, estimate, f"{estimate / target - 1:+.1%}")


def print_differences(model: Model) -> None:
    print("\ndifferences of records, to which nothing is fitted: ms of a step by stage, mean over a run")
    line("", *(f"stage {i}" for i in range(4)), "mean", "published", "ratio")
    good = 0
    for name, without, changed, published in DIFFERENCES:
        ms = stages_ms(count(changed), model) - stages_ms(count(without), model)
        mean = 1e3 * run_seconds(changed.cfg, ms) / changed.cfg.steps
        good += 0.5 <= mean / published <= 2
        line(name, *(f"{x:+.2f}" for x in (*ms, mean, published)), mean / published)
    print(f"{good} of {len(DIFFERENCES)} have the published sign, and lie within a factor of 2")


def print_run(title: str, cfg: tg.Config, model: Model, base: np.ndarray | None = None) -> np.ndarray:
    """Prints a config's stages, beside what is known or the change to the base's ms. Returns ms by stage."""
    steps, stages = count(Variant(cfg)), [(i, stage) for i, stage in enumerate(cfg.stages) if stage.steps]
    ms = stages_ms(steps, model)
    more, heading = [""] * len(ms), ""
    if cfg == tg.RECORD:
        more, heading = [f"{x:.1f}" for x in ESTIMATED_89], "record 89"
    elif base is not None and len(base) == len(ms):
        more, heading = [f"{x:+.2f}" for x in ms - base], "change"
    print(f"\n{title}")
    line("stage", "tokens", *PARTS, "ms", heading)
    for (i, stage), ops, x, last in zip(stages, steps, ms, more):
        parts, tokens = stage_ms(ops, model), stage.batch_tokens // tg.num_microbatches(cfg, RANKS)
        line(i, tokens, *parts.values(), x, last)
    return ms


def run(args: argparse.Namespace) -> None:
    base = override(tg.RECORD, " ".join(args.settings))
    changed = [(changes, override(base, changes)) for changes in args.what_if]
    for cfg in (base, *(cfg for _, cfg in changed)):
        launches.check(cfg, RANKS)
        tg.select_backend(replace(cfg, attention="varlen"), torch.device("cuda", 0), (9, 0), RANKS)
    assumed: dict[str, Any] = {}
    for setting in args.assume:
        name, _, number = setting.partition("=")
        if name not in Model._fields:
            raise tg.UserError(f"--assume {setting}: give NAME=NUMBER, of {', '.join(Model._fields)}")
        assumed[name] = tg.parse(number, float, name)
    steps = count(RECORD_80)
    model = calibrate(Model(**assumed), steps, PUBLISHED_80)._replace(**assumed)
    print_fit(model, stages_ms(steps, model))
    if base == tg.RECORD and not changed:
        print_differences(model)
    ms = print_run("; ".join(["the record preset", *args.settings]), base, model)
    seconds = run_seconds(base, ms)
    print(f"total {seconds:.2f} s" + (", published for record 89: 73.8 s" if base == tg.RECORD else ""))
    for changes, cfg in changed:
        new = run_seconds(cfg, print_run(changes, cfg, model, ms))
        print(f"total {new:.2f} s, change {new - seconds:+.2f} s")


def main(argv: list[str] | None = None) -> int:
    parser = tg.Parser(
        prog="projection.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="settings")
    add("--what-if", action="append", default=[], metavar="'NAME=VALUE ...'")
    add("--assume", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    try:
        run(parser.parse_args(argv))
    except tg.UserError as e:
        print(f"projection.py: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
