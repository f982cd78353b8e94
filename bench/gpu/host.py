"""Checks of the step `host`: what single operations take of the host, and what CUDA adds to each."""

import os
import time
from collections.abc import Callable, Iterator

import torch

import train_gpt as tg
from machine import Setup
from runner import Row, Unable

ROUNDS = 5
KERNELS = 20  # of the larger compiled function
NODES = 500  # of the CUDA graph


@tg.jit
def empty_kernel(pointer):
    return


def us_of(setup: Setup, function: Callable, calls: int = 1000) -> float:
    """Returns the host's microseconds of a call, without waiting for the GPU: the least of some rounds."""
    found = []
    for _ in range(ROUNDS):
        for _ in range(10):
            function()
        setup.synchronize()  # or a full queue of launches would make the host wait
        began = time.perf_counter()
        for _ in range(calls):
            function()
        found.append(1e6 * (time.perf_counter() - began) / calls)
    setup.synchronize()
    return min(found)


def row(what: str, us: float) -> Row:
    return Row(what, seen=f"{us:.2f} us", numbers={"us": us})


def machine(setup: Setup) -> Iterator[Row]:
    """Describes the host, and how busy it is."""
    load, _, _ = os.getloadavg()
    usable = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    yield Row("host", seen=f"{tg.describe_cpu()}, {usable} cores for this process, load {load:.1f}")


def loop() -> None:
    for _ in range(1000):
        pass


def plain_operations(setup: Setup) -> Iterator[Row]:
    """Times the interpreter, and operations of torch that launch nothing."""
    x = torch.ones(4)
    on_device = torch.empty(16384, 768, dtype=torch.bfloat16, device=setup.device)
    size = on_device.shape
    yield row("a loop of 1000 turns", us_of(setup, loop, 200))
    yield row("adding 4 numbers on the CPU", us_of(setup, lambda: x + x))
    yield row("torch.tensor(0.5)", us_of(setup, lambda: torch.tensor(0.5)))
    yield row("a view", us_of(setup, lambda: on_device.view(16384, 6, 128)))
    yield row("an empty tensor", us_of(setup, lambda: on_device.new_empty(size)))


def launches(setup: Setup) -> Iterator[Row]:
    """Times operations that launch one small kernel each."""
    small = setup.rand(64, 64)
    out = torch.empty_like(small)
    yield row("torch.mm, 64 x 64", us_of(setup, lambda: torch.mm(small, small, out=out), 300))
    yield row("out.copy_(), 64 x 64", us_of(setup, lambda: out.copy_(small), 300))
    if not setup.cfg.fp8:
        raise Unable("this GPU has no FP8")
    small8 = small.to(torch.float8_e4m3fn)
    scale = torch.ones((), device=setup.device)
    args = small8, small8.T, (scale, scale), torch.bfloat16, True, out.bfloat16()
    yield row("torch._scaled_mm, 64 x 64", us_of(setup, lambda: tg.fp8_matmul(*args), 300))


@torch.library.custom_op("check::nothing", mutates_args={"x"})
def nothing(x: torch.Tensor, y: torch.Tensor, n: int) -> None:
    return


def wrappers(setup: Setup) -> Iterator[Row]:
    """Times what torch wraps around operations of ours, whose bodies are empty."""
    x = torch.ones(4)
    wrapped = torch.ops.check.nothing.default
    yield row("a torch.library.custom_op that changes a tensor", us_of(setup, lambda: wrapped(x, x, 3), 300))
    library = torch.library.Library("check_plainly", "FRAGMENT")
    library.define("nothing(Tensor(a!) x, Tensor y, int n) -> ()")
    library.impl("nothing", lambda x, y, n: None, "CompositeExplicitAutograd")
    plain = torch.ops.check_plainly.nothing.default
    yield row("the same by Library.impl", us_of(setup, lambda: plain(x, x, 3), 300))


def doubled_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Doubles tensors of several sizes: one kernel each, if compiled."""
    return [2 * t for t in tensors]


def compiled_calls(setup: Setup) -> Iterator[Row]:
    """Times calls of compiled code with one kernel, and with more: so each further kernel's time, too."""
    backend = "inductor"
    if not setup.on_gpu:
        backend = "eager"  # the other takes long to compile
    compiled = torch.compile(doubled_all, fullgraph=True, dynamic=False, backend=backend)
    tensors = [setup.rand(64 + i) for i in range(KERNELS)]
    one = us_of(setup, lambda: compiled(tensors[:1]), 300)
    all_of_them = us_of(setup, lambda: compiled(tensors), 100)
    yield row("a compiled call, 1 kernel", one)
    yield row(f"a compiled call, {KERNELS} kernels", all_of_them)
    yield row("each kernel more, with its new tensor", (all_of_them - one) / (KERNELS - 1))


def triton_and_graphs(setup: Setup) -> Iterator[Row]:
    """Times an empty Triton kernel, launched one by one, and 500 of them in a CUDA graph."""
    if not setup.on_gpu:
        raise Unable("it needs a GPU")
    x = setup.rand(64)

    def launch() -> None:
        empty_kernel[(1,)](x)

    launch()  # compiles it
    yield row("an empty Triton kernel, by JITFunction", us_of(setup, launch, 300))
    graph = torch.cuda.CUDAGraph()
    began = time.perf_counter()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NODES):
            launch()
    yield row(f"capturing {NODES} of them", 1e6 * (time.perf_counter() - began))
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    yield row(f"launching the graph of {NODES}", us_of(setup, graph.replay, 10))
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    yield row("the GPU's time of each in the graph", 100 * begin.elapsed_time(end) / NODES)


CHECKS = {
    "host": machine,
    "plain operations": plain_operations,
    "small launches": launches,
    "wrappers of operations": wrappers,
    "compiled calls": compiled_calls,
    "Triton and graphs": triton_and_graphs,
}
