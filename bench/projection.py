#!/usr/bin/env python3
"""Estimates a training step's time on 8 H100s, stage by stage, without a GPU.

    python bench/projection.py [--set NAME=VALUE ...] [--what-if "NAME=VALUE ..."] ...
    python bench/projection.py --what-if "layers.*.xsa=false" --what-if "mlp_dim=2560 fp8_mlp=false"

All times are estimates, but for those called published. --set changes the record preset, and each --what-if
that. A default run takes a minute of a free core, a what-if 15 s more.

It runs two steps of rank 0 of 8 in each stage, as bench/launches.py does, on torch's "meta" device, and lists
what they launch: the FLOPs of matmuls and attention, the bytes that are read and written, and those that this
rank sends. A call of compiled code counts as one kernel, besides its matmuls: it reads its inputs and writes
its results once, and a backward computes again what it needs of its forward. Tokens are synthetic, documents
as long as web text's; sparse exchanges send about twice as many rows of bigrams as for real text.

    step's ms    slowdown * (sum over launches) + (1 - hidden) * (sum over collectives) + fixed
    launch       the most of FLOPs / rate, bytes / memory's rate, kernel_us
    collective   bytes sent / exchange's rate + collective_us

Rates (1e12/s: FLOPs or bytes) are assumed, as fractions of an H100 SXM's peaks by NVIDIA's data sheet: of
matmuls what large ones attain under the power limit, of attention FlashAttention-3's, of memory streaming
kernels', of the exchange NCCL's. Only slowdown and fixed are fitted, to record 80's published ms. Not
counted: waiting for the host, and second reads of what FP8 scales by its maximum, 0.2 ms in stage 1.

Stages are in ms of a step, the mean of one with Adam and one without. tokens: of each GPU's micro-batch;
matmuls, attention, other: the sum over launches; exchange: what is not hidden of
collectives; total: seconds of all steps, without validation. Record 89's total is published, its stages are
estimates from logs of other configurations.

Record 80 is this script with its parts switched off, as far as settings go, and layer 10 and the head reading
no saved streams but "back". Not expressed: one graph for the whole model, dense gradients of tables, its
gates' products, a second result of the squared ReLU. Estimated differences of records are of stage 1, whose
batch is the mean over a run; published ones are means over a run.
"""

import argparse
import contextlib
import sys
from collections import Counter
from dataclasses import replace
from functools import reduce
from typing import Any, Iterable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

import launches  # it finds the others
import step_time
import train_gpt as tg
from launches import on_meta

RANKS = 8
PARTS = "matmuls", "attention", "other", "exchange", "fixed", "ms"  # of what is printed
PEAKS = {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12, "attention": 989e12}  # FLOP/s
PEAKS |= {"memory": 3.35e12, "exchange": 450e9}  # bytes/s; NVLink's each way
KINDS = {1: "fp8", 2: "bf16", 4: "fp32"}  # of matmuls, by bytes of a factor's entry
MATMULS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # first factor's place
# Of an entry of the first factor and a column of the result.
KERNEL_FLOPS = {"gram": 1, "relu_square": 2, "relu_square_grad": 2, "relu_square_fp8": 2}
# These read or change no more of their first argument than the largest of the others, or the result, has.
SPARSE = {"embedding", "index", "index_select", "index_add_", "index_copy_", "index_fill_", "index_put_"}
WRITE_ONLY = {"copy_", "zero_", "fill_", "index_copy_", "index_fill_", "index_put_"}


class Model(NamedTuple):
    bf16: float = 0.65
    fp8: float = 0.55
    fp32: float = 0.60
    attention: float = 0.35
    memory: float = 0.87
    exchange: float = 0.80
    kernel_us: float = 3.0
    collective_us: float = 20.0
    hidden: float = 0.5  # share of collectives during which the GPU computes
    slowdown: float = 1.0
    fixed: float = 0.0  # ms


class Op(NamedTuple):
    name: str  # of a launch or collective
    nbytes: int  # read and written, each tensor once; sent
    kind: str = ""  # of its FLOPs, if any count; exchange: a collective
    flops: float = 0.0


class Access(NamedTuple):
    storage: torch.UntypedStorage  # of a view that is read or written
    offset: int
    nbytes: int


def access(t: Tensor, most: int = sys.maxsize) -> Access:
    """Describes t, or `most` bytes of it."""
    return Access(t.untyped_storage(), int(t.storage_offset()), min(t.nbytes, most))


def total(accesses: Iterable[Access]) -> int:
    """Returns the bytes of accesses: each view once, and no more of a storage than it has."""
    by_storage: Counter = Counter()
    for a in set(accesses):
        by_storage[a.storage] += a.nbytes
    return sum(min(nbytes, storage.nbytes()) for storage, nbytes in by_storage.items())


class Traffic(launches.Counts):
    """Lists what a step launches. `sources`: what in memory unwritten results of compiled code depend on."""

    def begin_step(self) -> None:
        super().begin_step()
        self.ops: list[Op] = []
        self.sources: dict[torch.UntypedStorage, set[Access]] = {}
        self.in_compiled = False

    def end_step(self) -> Any:
        return self.ops

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        name, out = schema.name.split("::")[1], function(*args, **kwargs)
        if name in launches.NO_LAUNCH or not on_meta(out) or (self.is_paused and not self.in_compiled):
            return out
        sizes = [t.nbytes for t in on_meta((args[1:], () if schema.is_mutable else out))]
        most = max(sizes, default=0) if name in SPARSE else sys.maxsize
        reads, writes = ({access(t, most) for t in on_meta(tree)} for tree in ((args, kwargs), out))
        if name in WRITE_ONLY or "out" in kwargs:
            reads -= writes
        if self.in_compiled and name not in MATMULS:
            self.fuse(reads, writes, schema.is_mutable)
            return out
        self.write(reads)  # a matmul's factors must be in memory
        kind, flops = "", 0.0
        if name in MATMULS:
            a, b = args[MATMULS[name] :][:2]
            kind, flops = KINDS[a.itemsize], 2.0 * a.numel() * b.size(-1)
        elif name.startswith("_varlen_attn"):
            values = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
            batch, query = self.batch.micro_batches[0], values["query"]
            rows = len(query) // len(batch.inputs)  # of a token: paired heads have two
            keys = step_time.mean_keys((rows * batch.cu_seqlens).numpy(), values["window_size"][0])
            products = 5 if name.endswith("backward") else 2
            kind, flops = "attention", 2.0 * products * query.numel() * keys
        self.ops.append(Op(name, total(reads) + total(writes), kind, flops))
        return out

    def fuse(self, reads: set[Access], writes: set[Access], in_place: bool) -> None:
        """Takes an operation into the compiled code that runs."""
        needed = set().union(*(self.sources.get(a.storage, {a}) for a in reads))
        for a in writes:
            if in_place and a.storage not in self.sources:
                self.reads |= needed
                self.writes.add(a)
            else:
                self.sources[a.storage] = needed | self.sources.get(a.storage, set())

    def write(self, accesses: Iterable[Access]) -> None:
        """Makes compiled code write these, unless they are in memory, and read what they depend on."""
        for a in accesses:
            if a.storage in self.sources:
                self.reads |= self.sources[a.storage]
                self.writes.add(a)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[list]:
        self.in_compiled, self.reads, self.writes = True, set(), set()
        with super().inside(name) as results:
            yield results
        self.in_compiled = False
        self.write(map(access, on_meta(results)))
        for a in self.writes:
            self.sources.pop(a.storage, None)
        if self.writes:
            self.ops.append(Op(name, total(self.reads) + total(self.writes)))

    def add_kernel(self, name: str, tensors: Any, *sizes: Any) -> None:
        found, kind, flops = on_meta(tensors), "", 0.0
        nbytes = total(map(access, found))
        if name == "segment_sum_rows":
            (table, grad, index, _), _ = tensors
            nbytes = grad.nbytes + len(index.row_ids) * table[:1].nbytes
        elif name in KERNEL_FLOPS:
            kind = KINDS[found[0].itemsize]
            flops = 1.0 * KERNEL_FLOPS[name] * found[0].numel() * found[-1].size(-1)
        self.ops.append(Op(name, nbytes, kind, flops))

    def add_collective(self, kind: str, name: str, nbytes: int) -> None:
        self.ops.append(Op(f"{kind} {name}", nbytes, "exchange"))


@tg.compiled
def read_no_streams(
    x: Tensor,
    first: Tensor,
    back: Tensor,
    value: Tensor,
    weights: Tensor,
    output_weight: Tensor,
    out_scale: Tensor,
):
    """Does connect() as before record 81: gates a value embedding."""
    return weights[:, 6:7] * value, x, output_weight * out_scale


@tg.compiled
def norm_of_two(x: Tensor, weights: Tensor, streams: list[Tensor]) -> Tensor:
    """Does final_norm() as before record 81: takes "back" off."""
    return tg.norm(x + weights[:, 1:2] * streams[1])


class UpInFP8(tg.MLP):
    @staticmethod
    def forward(ctx, h, slices, backend, weights, fc, proj):
        """Does the down-projection in bf16, as before record 89."""
        ctx.slices, ctx.backend = slices, backend
        square, _ = backend.relu_square_fp8(*tg.amax_to_fp8(h), weights, h.dtype)
        ctx.save_for_backward(h, square, fc, proj)
        return square @ proj


ROWS, COLUMNS = 754560, 192  # of bigram_embed in record 83
param_shapes, mix_streams = tg.param_shapes, tg.mix_streams


class NarrowGPT(tg.GPT):
    def lookup_sums(self, batch, leaves):
        """Does the same without padding."""
        rows, ids = self.weight("bigram_embed").detach(), batch.hashed_rows
        found = rows.new_empty(ids.size(1), COLUMNS)
        tg.gather_rows(found, rows, ids.int(), self.signs[:, :COLUMNS], batch.signs)
        leaves["bigram_embed"] = found.requires_grad_()
        return found


@tg.compiled
def mix_narrow(scales, streams, normed):
    wide = [torch.nn.functional.pad(x, (0, streams[0].size(1) - x.size(1))) for x in streams]
    return mix_streams(scales, wide, normed)


SETTINGS_80 = """
    mudd_gates=false mudd_connections=false layers.*.xsa=false fp8_mlp=false sign_rows=0
    bigram_vocab_size=251520 stages.*.prefix=
    params.value_embeds.exchange=reduce_scatter params.embed.exchange=reduce_scatter
    layers.*.gate=true layers.6.gate=false"""
BEFORE_81: dict[str, Any] = {"connect": read_no_streams, "final_norm": norm_of_two}
NARROW_TABLE = BEFORE_81 | {"GPT": NarrowGPT, "mix_streams": mix_narrow}
NARROW_TABLE["param_shapes"] = lambda *args: param_shapes(*args) | {"bigram_embed": (ROWS, COLUMNS)}
XSA = " ".join(f"layers.{i}.xsa=true" for i in (1, 3, 4, 7))
PUBLISHED_80, ESTIMATED_89 = (31.1, 56.3, 82.0, 82.4), (31.6, 57.1, 82.6, 83.5)  # ms by stage
DIFFERENCES = (  # from which variant; settings and replacements; published ms
    ("MUDD connections", "record 80", "mudd_connections=true", {}, 0.80),
    ("XSA in four layers", "record 80", XSA, BEFORE_81, 0.30),
    ("FP8 up-projection", "record 80", "fp8_mlp=true", BEFORE_81 | {"MLP": UpInFP8}, -0.71),
    ("FP8 down-projection", "FP8 up-projection", "fp8_mlp=true", BEFORE_81, -0.75),
    ("narrower table, signs", "record 80", f"sign_rows=8192 bigram_vocab_size={ROWS}", NARROW_TABLE, -0.65),
)


def count(cfg: tg.Config, stage: int, changes: dict[str, Any] | None = None) -> list[Op]:
    """Lists what two successive steps launch, with the script's functions and classes replaced."""
    traffic = Traffic()
    with launches.patched(tg, **(changes or {})):
        backend = launches.make_backend(cfg, traffic)
        steps: Any = launches.run_steps(cfg, stage, RANKS, backend, traffic, validated=False)
    return steps[0] + steps[1]


def op_ms(op: Op, model: Model) -> float:
    """Estimates the ms of a launch or collective alone."""
    rate = {name: peak * getattr(model, name) / 1e3 for name, peak in PEAKS.items()}
    if op.kind == "exchange":
        return op.nbytes / rate["exchange"] + model.collective_us / 1e3
    return max(op.flops / rate[op.kind or "bf16"], op.nbytes / rate["memory"], model.kernel_us / 1e3)


def step_ms(ops: list[Op], model: Model) -> dict[str, float]:
    """Estimates a step's ms and its parts: the mean of the two that were counted."""
    parts = dict.fromkeys(PARTS, 0.0) | {"fixed": model.fixed}
    for op in ops:
        part = op.kind if op.kind in PARTS else "matmuls" if op.kind else "other"
        parts[part] += op_ms(op, model) / 2 * (1 - model.hidden if part == "exchange" else model.slowdown)
    return parts | {"ms": sum(parts.values())}


def calibrate(stages: list[list[Op]], published: tuple[float, ...]) -> Model:
    """Fits slowdown and fixed to published ms of stages: least squares of relative residuals."""
    parts = [step_ms(ops, Model()) for ops in stages]
    exposed, ms = np.array([(part["exchange"], part["ms"]) for part in parts]).T
    slowdown, fixed = np.polyfit(ms - exposed, published - exposed, 1, w=1 / np.array(published))
    return Model(slowdown=float(slowdown), fixed=float(fixed))


def line(name: Any, *cells: Any) -> None:
    text = "".join(f"{cell if isinstance(cell, (str, int)) else format(cell, '.2f'):>10}" for cell in cells)
    print(f"{name:<24}{text}".rstrip(), flush=True)


def fit(compared: bool) -> Model:
    """Fits the model to record 80. Prints it and, if `compared`, differences from that record."""
    cfg = reduce(tg.override, SETTINGS_80.split(), tg.RECORD)
    counted = [count(cfg, stage, BEFORE_81) for stage in range(len(cfg.stages))]
    model = calibrate(counted, PUBLISHED_80)
    print("estimates for 8 H100s: what is not called published was never measured\n")
    line("parameter", "value", "1e12/s")
    for name, value in model._asdict().items():
        line(name, f"{value:.4g}", f"{value * PEAKS[name] / 1e12:.4g}" if name in PEAKS else "")
    print("\nrecord 80, to which slowdown and fixed are fitted: ms of a step")
    line("stage", "published", "estimate", "residual")
    ms = [step_ms(ops, model)["ms"] for ops in counted]
    for stage, (estimate, published) in enumerate(zip(ms, PUBLISHED_80)):
        line(stage, published, estimate, f"{estimate / published - 1:+.1%}")
    if compared:
        print("\ndifferences of records, to which nothing is fitted: ms of a step")
        line("", "published", "estimate", "ratio")
        by_name = {"record 80": ms[1]}
        for name, before, settings, changes, published in DIFFERENCES:
            ops = count(reduce(tg.override, settings.split(), cfg), 1, changes)
            by_name[name] = step_ms(ops, model)["ms"]
            estimate = by_name[name] - by_name[before]
            line(name, f"{published:+.2f}", f"{estimate:+.2f}", estimate / published)
    return model


def print_run(title: str, cfg: tg.Config, model: Model) -> float:
    """Prints the parts of a config's stages. Returns the seconds of all steps."""
    print(f"\n{title}")
    line("stage", "tokens", *PARTS, "record 89" if cfg == tg.RECORD else "")
    seconds = 0.0
    for i, stage in enumerate(cfg.stages):
        if stage.steps:
            parts = step_ms(count(cfg, i), model)
            seconds += stage.steps * parts["ms"] / 1e3
            tokens = stage.batch_tokens // tg.num_microbatches(cfg, RANKS)
            line(i, tokens, *parts.values(), ESTIMATED_89[i] if cfg == tg.RECORD else "")
    return seconds


def main(argv: list[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    add("--what-if", action="append", default=[], metavar="'NAME=VALUE ...'")
    try:
        args = parser.parse_args(argv)
        base = reduce(tg.override, args.set, tg.RECORD)
        changed = {changes: reduce(tg.override, changes.split(), base) for changes in args.what_if}
        for cfg in (base, *changed.values()):
            launches.check(cfg, RANKS)
            tg.select_backend(replace(cfg, attention="varlen"), torch.device("cuda", 0), (9, 0))
        model = fit(compared=base == tg.RECORD and not changed)
        seconds = print_run(" ".join(["the record preset", *args.set]), base, model)
        print(f"total {seconds:.2f} s" + (", published for record 89: 73.8 s" if base == tg.RECORD else ""))
        for changes, cfg in changed.items():
            new = print_run(changes, cfg, model)
            print(f"total {new:.2f} s, change {new - seconds:+.2f} s")
    except tg.UserError as e:
        print(f"projection.py: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
