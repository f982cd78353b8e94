"""Makes the code that Inductor would generate for a GPU, on a machine without one.

    python bench/gpu_code.py OUT.json

tests/test_gpu_code.py starts it as a process of its own: what it replaces in torch and Triton stays replaced.
It runs the record preset's warm-up at full size on torch's "meta" device, whose tensors have shapes, strides
and addresses, but no values.
"""

import ast
import contextlib
import copy
import ctypes
import functools
import gc
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
for folder in "bench", "data", "":
    sys.path.insert(0, str(ROOT / folder))

import train_gpt as tg
from step_time import SingleRankCollectives, synthetic_shard

BIGRAMS = replace(tg.RECORD, ngrams=tg.Ngrams())  # the record preset with bigram_embed
CUDA = torch.device("cuda", 0)
META = torch.device("meta")
IS_CUDA = property(lambda t: t.device.type in ("cuda", "meta"))
H100 = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
)
# As Triton's driver names them; clocks in kHz. Inductor judges by them whether a matmul is worth padding.
H100_IN_TRITON = {
    "multiprocessor_count": 132,
    "max_shared_mem": 227 << 10,
    "max_num_regs": 65536,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 5120,
}


# ------------------------------------------------------------------------------------------------------------
# A GPU that is not there
# ------------------------------------------------------------------------------------------------------------


def fake_gpu():
    """Shows Triton an H100, on which it launches nothing; "meta" tensors look like those on the GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        def __init__(self):
            self.utils = types.SimpleNamespace(get_device_properties=lambda device: H100_IN_TRITON)
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    tg.triton.runtime.driver.set_active(Driver())
    torch.cuda.get_device_properties = lambda *device: H100
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.synchronize = lambda *device: None
    torch.Tensor.is_cuda = IS_CUDA
    tg.triton.knobs.runtime.jit_cache_hook = lambda **options: True


def fake_gpu_for_inductor():
    """Lets Inductor generate code for the H100 of fake_gpu(), and stops it where it would load that code."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    # Dynamo does not ask the tensor.
    TensorVariable.method_attr_is_cuda = lambda self, tx: ConstantVariable.create(self.device.type != "cpu")

    def answer(owner, wrap, **answers):
        for name, value in answers.items():
            setattr(owner, name, wrap(lambda *args, value=value: value))

    def plain(gm, example_inputs):
        return compile_fx(gm, example_inputs, inner_compile=lambda gm, inputs, **options: boxed(gm.forward))

    def stop(graph):
        code = graph.codegen()[0]
        code = getattr(code, "value", code)
        made, mutated = [], []
        for name in sorted(set(re.findall(r"(buf\d+) = empty_strided_cuda", code))):
            made.append(numel(graph.get_buffer(name).get_size()))
        for name in sorted(set(graph.mutated_inputs)):
            mutated.append(numel(graph.graph_inputs[name].get_size()))
        raise Generated(code, sorted(made), sorted(mutated))

    def numel(size):
        return int(torch._inductor.virtualized.V.graph.sizevars.optimization_hint(math.prod(size)))

    add_device_guard()
    config.fx_graph_cache = functorch_config.enable_autograd_cache = False
    config.compile_threads = 1
    answer(
        CudaInterface,
        staticmethod,
        is_available=True,
        current_device=0,
        get_device_properties=H100,
        get_compute_capability=90,
        is_triton_capable=True,
        raise_if_triton_unavailable=None,
    )
    answer(CudaInterface.Worker, staticmethod, get_device_properties=H100)
    # Inductor traces its patterns once, on a GPU if torch.cuda names one; there they would need a real one.
    for device in ("cpu", "meta"):
        torch.compile(lambda x: x + 1, backend=plain)(torch.ones(2, device=device))
    torch._dynamo.reset()
    torch.version.cuda = torch.version.cuda or "13.0"
    answer(
        torch.cuda,
        lambda function: function,
        is_available=True,
        device_count=1,
        current_device=0,
        get_device_name=H100.name,
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_rng_state=None,
        _lazy_init=None,
        device=contextlib.nullcontext(),
    )
    GraphLowering.compile_to_module = stop


def add_device_guard():
    """Registers a device guard for CUDA that does nothing, which copies between fake tensors look up.

    A CUDA build of torch has one to register if it finds no GPU; a CPU build lacks the call.
    """
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    source = """
        #include <c10/core/impl/DeviceGuardImplInterface.h>
        using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
        static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());
    """
    folder = tempfile.mkdtemp()
    torch_folder = Path(torch.__file__).parent
    library = f"{folder}/guard.so"
    command = [cpp_compiler(), "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include"]
    command += ["-x", "c++", "-", "-o", library, f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run(command, input=source, text=True, check=True)
    ctypes.CDLL(library)
    shutil.rmtree(folder)


def cpp_compiler():
    """Returns the path of a C++ compiler, or None."""
    for name in "g++", "clang++", "c++":
        path = shutil.which(name)
        if path:
            return path
    return None


class Generated(BaseException):
    """Ends Inductor where it would load the code. It catches every Exception."""


def boxed(function):
    """Returns a function of a list, which it empties, as AOTAutograd calls compiled code."""

    def call(args):
        values = list(args)
        args.clear()
        return function(*values)

    call._boxed_call = True
    return call


# ------------------------------------------------------------------------------------------------------------
# The record preset's run, without values
# ------------------------------------------------------------------------------------------------------------


def scaled_mm(*args, out=None, scaled_mm=torch._scaled_mm, **options):
    """Does torch._scaled_mm with `out`, which "meta" has without it only."""
    new = scaled_mm(*args, **options)
    if out is None:
        return new
    assert out.shape == new.shape and out.dtype == new.dtype and out.stride() == new.stride()
    return out


def fetch_nothing(table, row_ids):
    """Does NgramTable.fetch on "meta", where row_ids have no values."""
    return table.cache.new_empty(len(row_ids), table.cache.size(1), requires_grad=False)


def validate(model, loader, comm, windows, slices):
    """Does the forwards of train_gpt.validate, whose losses have no values; nor have rows to fetch."""
    with mock.patch.object(torch.Tensor, "unique", lambda ids, return_inverse: (ids.flatten(), ids)):
        for i in range(loader.cfg.val_slices):
            model.token_losses(tg.move(loader.slice(i), model.device), windows)


class MetaRun:
    """Runs the steps of rank 0 of `world_size`, with everything that a GPU would hold on "meta"."""

    def __init__(self, cfg, world_size, compiler=None):
        torch._scaled_mm = scaled_mm
        tg.GPT.initialize = lambda self, seed: None
        tg.training_state = lambda *args: None  # nothing to keep: there are no values
        tg.restore = lambda *args: None
        tg.validate = validate
        tg.NgramTable.fetch = fetch_nothing
        tg.configure_compiler = lambda cfg: compiler
        tg.AsyncLoss = lambda: types.SimpleNamespace(push=lambda *args: None)  # type: ignore
        self.cfg = replace(cfg, val_slices=1)
        self.world_size = world_size
        backend = tg.select_backend(self.cfg, CUDA)
        kind = tg.Collectives
        if world_size > 1:
            kind = SingleRankCollectives
        comm = kind(0, world_size)
        self.loader_comm = kind(0, world_size)
        comm.device = META
        self.model, self.optimizer = tg.build(self.cfg, backend, comm, 0)
        self.folder = tempfile.TemporaryDirectory()
        paths = synthetic_shard(self.folder.name, self.cfg, range(len(cfg.stages)), 20)
        self.data = tg.Dataset(paths, paths, 1, 0.0, "", ())
        self.val = tg.ValLoader(self.cfg, paths)

    def warm_up(self):
        training = tg.Training(self.data, self.model, self.optimizer, self.val, self.loader_comm)
        tg.warm_up(training)


# ------------------------------------------------------------------------------------------------------------
# Inductor
# ------------------------------------------------------------------------------------------------------------


def map_devices(graph, device_of):
    """Replaces each node's `device` argument by device_of(node, device)."""
    for node in graph.nodes:
        device = node.kwargs.get("device")
        if isinstance(device, torch.device):
            node.kwargs = dict(node.kwargs, device=device_of(node, device))


def moved(t, mode):
    """Returns a fake tensor on the GPU for one on "meta", with its strides and offset; others as they are."""
    if not isinstance(t, torch.Tensor) or t.device != META:
        return t
    size = t.size()
    stride = t.stride()
    offset = t.storage_offset()
    with mode:
        if offset == 0:
            return torch.empty_strided(size, stride, dtype=t.dtype, device=CUDA)
        end = offset + sum((n - 1) * step for n, step in zip(size, stride)) + 1
        return torch.empty(end, dtype=t.dtype, device=CUDA).as_strided(size, stride, offset)


def move_to_gpu(graph):
    """Moves the results of a graph's nodes from "meta" to the GPU; a pass before Inductor's own.

    Its passes compute constants where `device` says, so that is the CPU until they have run.
    """
    from torch._dynamo.utils import detect_fake_mode

    map_devices(graph, lambda node, device: torch.device("cpu") if device == META else device)
    for node in graph.nodes:
        values = node.meta.get("val")
        mode = detect_fake_mode(torch.utils._pytree.tree_leaves(values))
        if mode:
            node.meta["val"] = torch.utils._pytree.tree_map(functools.partial(moved, mode=mode), values)


def called(code):
    """Returns code's calls by name, its kernels' sources by name, and the inputs that should be aligned."""
    tree = ast.parse(code)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sources = {
        call.args[0].value: call.args[1].value
        for call in calls
        if ast.unparse(call.func) == "async_compile.triton"
    }
    (main,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
    aligned = [call.args[0].id for call in calls if ast.unparse(call.func) == "copy_if_misaligned"]
    return Counter(ast.unparse(call.func) for call in calls), sources, aligned


# What generated code calls on the host, and what it needs no launch for.
HOST_CALLS = re.compile(
    r"args\.clear|\w+\.size|max|assert_\w+|copy_if_misaligned|empty_strided_cuda|reinterpret_tensor"
    r"|get_raw_stream|torch\.cuda\._DeviceGuard|torch\.cuda\.set_device"
)


def sort_calls(calls, sources):
    """Sorts what generated code calls.

    Returns the kernels, which have sources, and other launches with their numbers, and what it reads.
    """
    kernels, others, reads = {}, {}, set()
    for call, n in calls.items():
        name = call.removesuffix(".run")
        if HOST_CALLS.fullmatch(call):
            continue
        if call.endswith(".item"):
            reads.add(call.removesuffix(".item"))
        elif name != call and name in sources:
            kernels[name] = n
        else:
            others[call] = n
    return kernels, others, reads


class GeneratedCode:
    """Collects the code that Inductor generates for the functions of `compiler`, and what their runs launch.

    graphs: of each, the kernels and other calls of one run, the sizes of the tensors that it makes and of the
    inputs that it changes, and by phase its runs and copies of inputs that are not aligned.
    """

    def __init__(self):
        self.functions = []
        self.graphs = []
        self.phase = "none"
        self.compiler = functools.cache(self.compile)
        tg.configure_compiler(tg.RECORD)  # torch's settings, as in a run

    def compile(self, function):
        self.functions.append(function.__name__)
        backend = functools.partial(self.backend, function.__name__)
        return torch.compile(function, fullgraph=True, backend=backend)

    def backend(self, function, gm, example_inputs):
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(joint_custom_pre_pass=move_to_gpu):
            return compile_fx(gm, example_inputs, inner_compile=functools.partial(self.generate, function))

    def generate(self, function, gm, example_inputs, **options):
        """Generates a graph's code for a GPU. Returns a function that runs the graph on "meta"."""
        from torch._dynamo.utils import detect_fake_mode
        from torch._inductor.compile_fx import compile_fx_inner

        mode = detect_fake_mode(example_inputs)
        on_meta = copy.deepcopy(gm)
        map_devices(gm.graph, lambda node, device: node.meta["val"].device)
        map_devices(on_meta.graph, lambda node, device: META if node.meta["val"].device == CUDA else device)
        on_meta.recompile()
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        try:
            compile_fx_inner(gm, [moved(t, mode) for t in example_inputs], **options)
        except Generated as generated:
            code, made, mutated = generated.args
        calls, sources, aligned = called(code)
        on_host = set()
        for node in inputs:
            if getattr(node.meta["val"], "device", None) != CUDA:
                on_host.add(node.name)
        kernels, others, reads = sort_calls(calls, sources)
        graph = {
            "function": function,
            "backward": options.get("is_backward", False),
            "kernels": kernels,
            "sources": sources,
            "others": others,
            "reads": sorted(reads - on_host),
            "made": made,
            "mutated": mutated,
            "wide": any("'xnumel': 'i64'" in source for source in sources.values()),
            "runs": Counter(),
            "copies": Counter(),
        }
        self.graphs.append(graph)
        positions = [i for i, node in enumerate(inputs) if node.name in aligned]

        def run(*args):
            graph["runs"][self.phase] += 1
            graph["copies"][self.phase] += sum(args[i].data_ptr() % 16 > 0 for i in positions)
            return on_meta.forward(*args)

        return boxed(run)


def resource_usage(cubin, folder):
    """Returns a kernel's registers, and bytes of stack and local memory, from cuobjdump; None without it."""
    tool = Path(tg.triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    file = Path(folder, "kernel.cubin")
    file.write_bytes(cubin)
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def compile_kernels(graphs):
    """Compiles each distinct Triton kernel of generated code, in all variants that Inductor would time.

    Returns, for each: its name, what uses it, the error or the resources of its variants.
    """
    binaries = []
    triton_compile = tg.triton.compile
    results: dict[str, dict] = {}

    def record(*args, **options):
        binaries.append(triton_compile(*args, **options))
        return binaries[-1]

    tg.triton.compile = record
    with tempfile.TemporaryDirectory() as folder:
        for graph in graphs:
            for name, source in graph.pop("sources").items():
                source = source.replace(name, "triton_")
                if source in results:
                    continue
                results[source] = {"name": name, "function": graph["function"], "error": "", "usage": []}
                path = Path(folder, f"kernel{len(results)}.py")
                path.write_text(source)
                spec = importlib.util.spec_from_file_location(path.stem, path)
                module = importlib.util.module_from_spec(spec)
                binaries.clear()
                try:
                    spec.loader.exec_module(module)
                    for config in module.triton_.configs:
                        module.triton_._precompile_config(config)
                except Exception as e:  # whatever the compiler raises is the result
                    results[source]["error"] = f"{type(e).__name__}: {e}"
                results[source]["usage"] = [resource_usage(b.asm["cubin"], folder) for b in binaries]
    tg.triton.compile = triton_compile
    return list(results.values())


def main(out):
    """Generates the code of what 8 ranks' warm-up compiles.

    With n-grams, that of the functions of their rows only, on one rank: there the table, and the rows that
    steps of the third stage read, have over 2^31 numbers.
    """
    torch.set_num_threads(1)
    gc.disable()  # compilers allocate much and free little
    fake_gpu()
    fake_gpu_for_inductor()
    code = GeneratedCode()
    of_rows = GeneratedCode()

    def in_phase(function, phase_of):
        def call(*args):
            code.phase = phase_of(*args)
            return function(*args)

        return call

    def compile_of_rows(function):
        if function in (tg.gather_rows.__wrapped__, tg.row_adam_update.__wrapped__):
            return of_rows.compiler(function)
        return function

    tg.train_step = in_phase(tg.train_step, lambda model, optimizer, batch, *args: f"step {batch.plan.step}")
    tg.GPT.token_losses = in_phase(tg.GPT.token_losses, lambda *args: "validation")
    MetaRun(BIGRAMS, 8, code.compiler).warm_up()
    stages = tuple(replace(stage, sampled_columns=()) for stage in tg.RECORD.stages[1:3])
    cfg = replace(tg.RECORD, microbatches=1, stages=stages)
    MetaRun(cfg, 1, compile_of_rows).warm_up()
    report = {
        "functions": code.functions,
        "graphs": code.graphs,
        "of rows": of_rows.graphs,
        "kernels": compile_kernels(code.graphs + of_rows.graphs),
    }
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
