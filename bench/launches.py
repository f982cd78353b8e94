#!/usr/bin/env python3
"""Counts what a training step launches on a GPU and dispatches on the host, phase by phase, without a GPU.

    python bench/launches.py [--preset record|cpu|words] [--set NAME=VALUE ...] [--stage 0] [--ranks 8]

Runs steps of rank 0 at the preset's real shapes on torch's "meta" device, where nothing is computed. Shows
one that updates the banks alone, and one with all updates. Collectives return at once.

    launches     kernels, copies and fills on the GPU: the next three columns
    eager        of operations of torch, called one by one. Here and in compiled code FlashAttention's forward
                 counts 2 (it fills its random state), its backward 3; baddbmm 2 (it copies what it adds to)
    triton       of the script's own kernels, called one by one
    inductor     of compiled code, as torch.compile generates it for an H100; with its matmuls, FlashAttention
                 and kernels
    calls        of compiled code, forward or backward
    dispatches   operations of torch on the host, views too, without those inside compiled code
    collectives  that the step starts; their own kernels are not among the launches. What the prefetch thread
                 exchanges is not counted: those are numbers in host memory

The phase "n-grams" fetches their rows, sends their gradients and updates them; "pointer" makes targets, too.
With `cuda_graphs` forward, pointer, head and backward are one launch for each micro-batch: "outside" has what
stays.

The last line has the most bytes that the rank's tensors take at once, in its steps and the validation of a
slice. It counts what autograd keeps of uncompiled code; compiled, it keeps less. Temporaries inside compiled
code are left out; with compile=false they count, and launches and dispatches are those of uncompiled code.
Stage 2 has the largest micro-batches.

These counts are no measurement: a library's operation may launch more than one kernel, and use a workspace;
an allocator, a process's context and NCCL's buffers come on top of the tensors.
"""

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "data")]
import gpu_code
import train_gpt as tg
from scripts import make_parser, run_script
from step_time import SingleRankCollectives, synthetic_shard

# Operations that only make or view tensors.
NO_LAUNCH = set(
    "_reshape_alias _unsafe_view alias as_strided detach diagonal empty empty_like empty_strided expand "
    "lift_fresh new_empty new_empty_strided permute reshape select slice split split_with_sizes squeeze t "
    "transpose unbind unsqueeze view".split()
)
LAUNCHES = {"_varlen_attn": 2, "_varlen_attn_backward": 3, "baddbmm": 2}


def launches_of(graph: dict) -> int:
    """Returns the launches of one run of a graph of gpu_code."""
    launches = sum(graph["kernels"].values())
    for name, n in graph["others"].items():
        operation = name.removesuffix(".default").split(".")[-1]
        launches += n * LAUNCHES.get(operation, 1)
    return launches


GRAPHED = "forward", "pointer", "head", "backward"  # what cuda_graphs makes one launch
PHASES = "copies", *GRAPHED, "rows", "n-grams", "optimizer", "other"
COLUMNS = "launches", "eager", "triton", "inductor", "calls", "dispatches", "collectives"


def print_line(name: str, cells: Iterable[Any]) -> None:
    print(f"{name:<12}" + "".join(f"{cell:>12}" for cell in cells))


def on_meta(tree: Any) -> list[Tensor]:
    """Returns the tensors on "meta", but for empty ones, for which torch launches nothing."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_meta and t.numel()]


@contextlib.contextmanager
def patched(owner: Any, **changes) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors on "meta" that are alive, and the most that ever were.

    Temporaries of compiled code, and of a kernel's plain form, are left out.
    """

    def __init__(self, counts: "Counts"):
        super().__init__()
        self.live = 0  # bytes
        self.peak = 0
        self.known: set[int] = set()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in on_meta(out):
            storage = t.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self.known:
                self.known.add(key)
                self.live += nbytes
                weakref.finalize(storage, self.free, key, nbytes)
        if not self.counts.is_paused:
            self.peak = max(self.peak, self.live)
        return out

    def free(self, key: int, nbytes: int) -> None:
        self.known.remove(key)
        self.live -= nbytes


class Counts(TorchDispatchMode):
    """Counts what runs on "meta", except while paused. Compiled functions count as calls.

    found: what the step has done: numbers by (phase, column).
    """

    def __init__(self):
        super().__init__()
        self.phase = "other"
        self.is_paused = False
        self.found = Counter()

    @contextlib.contextmanager
    def step(self, batch: tg.Batch) -> Iterator[None]:
        """Counts a step on this batch, whose numbers are on the CPU."""
        self.batch = batch
        self.found = type(self.found)()
        with self:
            yield

    def add(self, column: str, n: int = 1) -> None:
        if not self.is_paused:
            self.found[self.phase, column] += n

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        out = function(*args, **(kwargs or {}))
        self.add("dispatches")
        if on_meta(out) and name not in NO_LAUNCH:
            self.add("eager", LAUNCHES.get(name, 1))
        return out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing, not even calls of compiled code, while the returned context is open."""
        with patched(self, is_paused=True), patched(tg, COMPILER=None):
            yield

    def in_phase(self, phase: str, function: Callable) -> Callable:
        """Wraps a function: what it launches counts in that phase."""

        def call(*args, **kwargs):
            with patched(self, phase=phase):
                return function(*args, **kwargs)

        return call

    def add_kernel(self, name: str, tensors: Any) -> None:
        """Counts the launch of a Triton kernel, with what it reads and writes."""
        self.add("triton")

    def add_collective(self, kind: str, name: str, nbytes: int) -> None:
        """Counts a collective, in which each rank sends so many bytes."""
        self.add("collectives")

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[list]:
        """Counts a call of compiled code. Whoever runs it appends its results to the list."""
        self.add("calls")
        with self.paused():
            yield []

    def as_kernel(self, plain: Callable) -> Callable:
        """Wraps an operation as one launch of a Triton kernel."""

        def call(*args):
            with self.paused():
                out = plain(*args)
            self.add_kernel(plain.__name__, (args, out))
            return out

        return call

    def as_jit_kernel(self, name: str) -> dict[tuple, Callable]:
        """Makes what replaces a Triton kernel: its launch, for any grid, is counted."""
        return defaultdict(lambda: lambda *args, **_: self.add_kernel(name, args))

    def as_compiled(self, function: Callable) -> Callable:
        """Makes a function's compiled form, as torch.compile would. All backwards are one, the layers'."""

        def call(*args, **kwargs):
            with self.inside(function.__name__) as results:
                results.append(function(*args, **kwargs))
            return results[0]

        return call

    def as_compiled_backward(self, backward: Callable) -> Callable:
        """Makes the compiled form of the layers' backward, which autograd derives from plain code."""

        def call(*args, **kwargs):
            with self.inside("layers backward"):
                backward(*args, **kwargs)

        return call


class CountingCollectives(SingleRankCollectives):
    """Exchanges as one rank of several, alone, and counts collectives."""

    def __init__(self, world_size: int, counts: Counts):
        super().__init__(0, world_size, device=torch.device("meta"))
        self.counts = counts

    def count(self, kind: str, name: str, nbytes: int) -> None:
        """Counts a collective of so many bytes, of which this rank keeps its own share."""
        self.counts.add_collective(kind, name, nbytes * (self.world_size - 1) // self.world_size)

    def reduce_scatter(self, name: str, grad: Tensor, in_rank_order: bool = False) -> tg.Pending:
        self.count("reduce_scatter", name, grad.nbytes)
        return super().reduce_scatter(name, grad, in_rank_order)

    def all_to_all(self, *args) -> tg.Pending:
        kind, name, rows, input_splits = args[:4]
        others = 1 - input_splits[self.rank] / max(1, len(rows))
        self.counts.add_collective(kind, name, round(others * rows.nbytes))
        with self.counts.paused():
            return super().all_to_all(*args)

    def all_reduce(self, t: Tensor, op=torch.distributed.ReduceOp.SUM) -> tg.Pending:
        self.count("all_reduce", "", 2 * t.nbytes)
        return super().all_reduce(t, op)

    def all_gather(self, name: str, t: Tensor) -> tg.Pending:
        self.count("all_gather", name, t.nbytes)
        return super().all_gather(name, t)


class GeneratedCounts(Counts):
    """Counts what compiled functions launch, in the code that torch.compile generates for an H100."""

    def __init__(self):
        gpu_code.fake_gpu()
        gpu_code.fake_gpu_for_inductor()
        self.code = gpu_code.GeneratedCode()
        super().__init__()

    @property
    def phase(self) -> str:
        return self.code.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.code.phase = phase

    def as_compiled(self, function: Callable) -> Callable:
        return self.code.compiler(function)

    def as_compiled_backward(self, backward: Callable) -> Callable:
        return backward

    def add(self, column: str, n: int = 1) -> None:
        pass

    @contextlib.contextmanager
    def step(self, batch: tg.Batch) -> Iterator[None]:
        """Counts a step. torch.compile compiles nothing inside a TorchDispatchMode."""
        self.found = Counter()
        for graph in self.code.graphs:
            graph["runs"].clear()
        yield
        for graph in self.code.graphs:
            for phase, runs in graph["runs"].items():
                self.found[phase, "inductor"] += runs * launches_of(graph)


PHASE_OF = [
    (tg, "move", "copies"),
    (tg.Optimizer, "ensure_batch", "copies"),
    (tg, "forward_backward", "pointer"),
    (tg.GPT, "look_up", "forward"),
    (tg.GPT, "forward", "forward"),
    (tg.GPT, "head_loss_and_grad", "head"),
    (torch.autograd, "backward", "backward"),
    (tg.Optimizer, "add_looked_up_grads", "rows"),
    (tg.Optimizer, "step", "optimizer"),
    (tg.NgramTable, "start_fetch", "n-grams"),
    (tg.NgramTable, "scatter", "n-grams"),
    (tg.NgramTable, "update", "n-grams"),
    (tg.NgramTable, "fetch", "n-grams"),
]


def run_steps(
    cfg: tg.Config, stage: int, world_size: int, backend: tg.Backend, counts: Counts, validated: bool = True
) -> list[Any]:
    """Runs steps of rank 0 of `world_size` in a stage. Returns what was found in the last four.

    Four are a period of all updates. With `validated`, validation comes first, as in a run, so that compiled
    code is for any length from the first step on; four more steps then precede the last four. Without it
    nothing is compiled, so one step before them is enough.
    """
    found = []
    count = 5
    if validated:
        count = 8
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def patch(owner: Any, **changes) -> None:
            stack.enter_context(patched(owner, **changes))

        patch(tg.GPT, initialize=lambda self, seed: None)
        patch(tg.NgramTable, fetch=gpu_code.fetch_nothing)
        patch(torch.Tensor, is_cuda=gpu_code.IS_CUDA)
        patch(tg, COMPILER=None)
        if cfg.compile:
            patch(tg, COMPILER=counts.as_compiled)
            patch(torch.autograd, backward=counts.as_compiled_backward(torch.autograd.backward))
        patch(torch, _scaled_mm=gpu_code.scaled_mm)
        patch(tg, pointer_kernel=counts.as_jit_kernel("pointer"))
        patch(tg, pointer_grad_kernel=counts.as_jit_kernel("pointer_grad"))
        for owner, name, phase in PHASE_OF:
            patch(owner, **{name: counts.in_phase(phase, getattr(owner, name))})
        model = tg.GPT(cfg, world_size, "meta", 0, backend)
        comm = CountingCollectives(world_size, counts)
        optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), comm, backend)
        model.ngrams = optimizer.ngrams
        start = cfg.stage_starts[stage]
        tied = start <= tg.untie_step(cfg)
        paths = synthetic_shard(folder, cfg, [stage], 17)
        loader = tg.TrainLoader(cfg, paths, 0, world_size)
        stack.callback(loader.close)
        first = tg.padded(start, 4)  # no gradient awaits its update then
        plan = tg.plan_step(cfg, start + cfg.stages[stage].steps // 2)
        # Rows are fetched for steps after those that run.
        plans = [plan._replace(step=first + i, tied=tied, untie=False) for i in range(count + 8)]
        batches = tg.Prefetcher(loader, plans, SingleRankCollectives(0, world_size))
        if validated:
            val = tg.ValLoader(dataclasses.replace(cfg, val_slices=1), paths)
            gpu_code.validate(model, val, comm, plan.windows, 1)
        for _ in tqdm(range(count), "steps", unit="step", leave=False):
            batch = batches.next()
            with counts.step(batch):
                tg.train_step(model, optimizer, batch, batches.peek)
            found.append(counts.found)
    return found[-4:]


def h100_backend(cfg: tg.Config) -> tg.Backend:
    with patched(torch.cuda, get_device_capability=lambda device: (9, 0)):
        return tg.select_backend(cfg, gpu_code.CUDA)


def make_backend(cfg: tg.Config, counts: Counts) -> tg.Backend:
    """Returns the config's implementations, each of which counts itself and runs on "meta"."""
    chosen: dict[str, Any] = {}
    for kernel in cfg.kernels:
        if kernel == "pointer":
            chosen |= tg.KERNELS[kernel]  # launch other things too, which are counted one by one
            continue
        for name in tg.KERNELS[kernel]:
            chosen[name] = counts.as_kernel(getattr(tg, name))
    if cfg.attention_impl != "dense":
        chosen["attention"] = tg.flash_attention
    return tg.TORCH_BACKEND._replace(**chosen, fp8=cfg.fp8)


def count_steps(cfg: tg.Config, stage: int, world_size: int) -> tuple[list[Counter], int]:
    """Counts a step that updates the banks, and one with all updates; also returns the most bytes."""
    counts = Counts()
    memory = Memory(counts)
    with memory:
        steps = run_steps(cfg, stage, world_size, make_backend(cfg, counts), counts)[2:]
    if cfg.compile:
        generated = GeneratedCounts()
        backend = h100_backend(cfg)  # compiled code has the kernels themselves
        for step, inside in zip(steps, run_steps(cfg, stage, world_size, backend, generated)[2:]):
            step.update(inside)
    for step in steps:
        for phase in PHASES:
            step[phase, "launches"] = sum(step[phase, column] for column in COLUMNS[1:4])
        for column in COLUMNS:
            step["all", column] = sum(step[phase, column] for phase in PHASES)
            step["outside", column] = step["all", column]
            for phase in GRAPHED:
                step["outside", column] -= step[phase, column]
    return steps, memory.peak


def check(cfg: tg.Config, world_size: int) -> None:
    """Raises UserError for a config that no H100 runs, or whose steps cannot be counted."""
    tg.require(
        tg.triton is not None, "this needs the package triton, without a GPU too: ./test.sh installs it"
    )
    tg.check_config(cfg, world_size)
    h100_backend(cfg)


def run(args: argparse.Namespace) -> None:
    cfg = reduce(tg.override, args.settings, tg.PRESETS[args.preset])
    with_steps = [i for i, stage in enumerate(cfg.stages) if stage.steps]
    tg.require(args.stage in with_steps, f"--stage: those with steps are {with_steps}")
    tg.require(args.ranks >= 1, "--ranks: give 1 or more")
    check(cfg, args.ranks)
    print("generates code: takes one to four minutes", flush=True)
    steps, peak = count_steps(cfg, args.stage, args.ranks)
    for name, step in zip(("banks only", "all updates"), steps):
        print_line(name, COLUMNS)
        for phase in PHASES + ("all", "outside"):
            print_line(phase, [step[phase, column] for column in COLUMNS])
        print()
    print(f"memory of tensors: at most {peak / 2**30:.1f} GiB")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("launches.py", __doc__)
    add = parser.add_argument
    add("--preset", choices=tg.PRESETS, default="record")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="settings")
    add("--stage", type=int, default=0)
    add("--ranks", type=int, default=8)
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
