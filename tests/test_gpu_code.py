"""Tests the code that a GPU would run, without one: bench/gpu_code.py makes it, in a process of its own.

What it found is kept beside torch's own cache until the script, this code, torch or Triton change.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import gpu_code
import launches
import train_gpt as tg

pytestmark = pytest.mark.slow

SOURCES = [Path(tg.__file__), Path(gpu_code.__file__), gpu_code.ROOT / "bench" / "step_time.py"]
# What generated code may leave to libraries, and the script's own kernels.
ALLOWED = {
    "extern_kernels.mm",
    "extern_kernels.addmm",  # added to a gradient or a bias
    "extern_kernels._scaled_mm",
    "extern_kernels.bmm",
    "extern_kernels.baddbmm",
    "torch.ops.train_gpt.write_grad.default",  # a matmul that writes to main_grad
    "torch.ops.torch_attn._varlen_attn.default",
    "torch.ops.torch_attn._varlen_attn_backward.default",
    "relu_square_kernel.run",
    "cast_and_transpose_kernel.run",
}
# Functions that change a few rows, or all, of tables and main_grads: in place.
IN_PLACE = {"gather_rows", "row_adam_update", "write_transpose", "add_columns"}
# Two steps of the record preset's first stage, of which 277 has Adam, and what rank 0 of 8 launches at most.
MOST_LAUNCHES = {278: 622, 277: 653}


def check_graph(graph):
    """Checks that kernels do all that a graph's code does."""
    name = graph["function"]
    assert graph["kernels"] or graph["others"] or name == "loss_targets", graph  # that has one column
    for called in graph["others"]:
        assert re.sub(r"_\d+\.run$", ".run", called) in ALLOWED, graph  # numbered by their constants
    if name in IN_PLACE:
        assert graph["mutated"] and not set(graph["made"]) & set(graph["mutated"]), graph
    assert not graph["reads"], graph  # of what is no argument, on the host
    assert not any(graph["copies"].values()), graph  # of inputs that are not aligned to 16 bytes


def check_kernel(kernel):
    """Checks that a generated kernel compiles, and spills no more registers than is known.

    Inductor chooses among variants by their times. The last mix reads twelve streams, in one variant: with
    triton 3.7.1 it keeps 1,432 bytes on the stack, and its backward 520.
    """
    assert kernel["usage"] and not kernel["error"], kernel
    spilled = [usage["STACK"] + usage["LOCAL"] for usage in kernel["usage"] if usage]  # None: no cuobjdump
    assert min(spilled, default=0) <= 1432, kernel


@pytest.mark.pinned("what the record preset runs on a GPU")
@pytest.mark.long
@pytest.mark.skipif(
    not (torch.__version__.startswith("2.13") and tg.triton and gpu_code.cpp_compiler()),
    reason="uses internals of torch 2.13's Inductor, triton, and a C++ compiler (g++, clang++)",
)
def test_generated_code(tmp_path):
    """Checks Inductor's code for an H100, of every function that the record and the n-gram preset compile."""
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {tg.triton.__version__}".encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    kept = Path(default_cache_dir(), f"train_gpt_{digest.hexdigest()}.json")
    source = kept
    if not kept.exists():
        source = tmp_path / "found.json"
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, gpu_code.__file__, source]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
    found = json.loads(source.read_text())
    graphs = found["graphs"]
    of_rows = found["of rows"]
    # Offsets into over 2^31 numbers need 64 bits.
    assert {graph["function"] for graph in of_rows if graph["wide"]} == {"gather_rows", "row_adam_update"}
    decorated = tg.adam_update.__code__  # compiled() makes functions of one code
    used = {"trunk", "pointer_inputs"}
    for name, value in vars(tg).items():
        if getattr(value, "__code__", None) is decorated and name != "row_adam_update":
            used.add(name)
    assert {graph["function"] for graph in graphs} == used
    for graph in graphs + of_rows:
        check_graph(graph)
    for kernel in found["kernels"]:
        check_kernel(kernel)

    counted = launches.Counts()
    backend = launches.make_backend(gpu_code.BIGRAMS, counted)
    steps = launches.run_steps(gpu_code.BIGRAMS, 0, 8, backend, counted)
    for (step, most), counts in zip(MOST_LAUNCHES.items(), steps[2:]):
        launched = 0
        for graph in graphs:
            launched += graph["runs"].get(f"step {step}", 0) * launches.launches_of(graph)
        for (_, column), n in counts.items():
            if column in ("eager", "triton"):
                launched += n
        assert launched <= most, step
    if source != kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, kept)


def test_most_memory():
    """Storages count once, views not, and no longer than they live; temporaries of kernels never."""
    counts = launches.Counts()
    with launches.Memory(counts) as memory:
        kept = torch.zeros(1000, device="meta")
        view = kept[10:]
        for _ in range(3):
            temporary = view + 1  # 990 numbers; the last one's place is not free before the next is made
        del temporary
        assert memory.live == 4000
        counts.as_kernel(lambda x: (x[None] * x[:, None]).sum(0))(kept)
        assert memory.peak == 4000 + 2 * 3960
        del kept
        assert memory.live == 4000  # the view holds it
