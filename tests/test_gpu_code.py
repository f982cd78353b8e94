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
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import gpu_code
import launches
import train_gpt as tg

pytestmark = pytest.mark.slow

SOURCES = [Path(tg.__file__), Path(gpu_code.__file__), gpu_code.ROOT / "bench" / "step_time.py"]
# What generated code may leave to libraries.
ALLOWED = {
    "extern_kernels.mm": "Inductor leaves matmuls to cuBLAS",
    "extern_kernels.addmm": "the same, added to a gradient or a bias",
    "extern_kernels._scaled_mm": "the same, in FP8",
    "torch.ops.train_gpt.write_grad.default": "a matmul that writes to main_grad",
    "torch.ops.torch_attn._varlen_attn.default": "FlashAttention",
    "torch.ops.torch_attn._varlen_attn_backward.default": "FlashAttention",
    "extern_kernels.bmm": "the same, for batches",
    "extern_kernels.baddbmm": "the same, added to a matrix",
    "relu_square_kernel.run": "the script's kernel",
    "cast_and_transpose_kernel.run": "the script's kernel",
}
# Functions that change a few rows, or all, of tables and main_grads: in place.
IN_PLACE = {"gather_rows", "row_adam_update", "transpose_copy", "add_columns"}
# Two steps of the record preset's first stage, of which 277 has Adam, and what rank 0 of 8 launches at most.
MOST_LAUNCHES = {278: 619, 277: 650}


def bad_for_a_gpu(graph):
    """Says what a graph's code does that kernels should do."""
    where = f"{graph['function']}, forward: "
    if graph["backward"]:
        where = f"{graph['function']}, backward: "
    if not graph["kernels"] and not graph["others"] and graph["function"] != "loss_targets":  # one column
        yield where + "nothing runs on the GPU"
    for name in graph["others"]:
        if re.sub(r"_\d+\.run$", ".run", name) not in ALLOWED:  # numbered by their constants
            yield where + f"calls {name}"
    if graph["function"] in IN_PLACE and (not graph["mutated"] or set(graph["made"]) & set(graph["mutated"])):
        yield where + f"makes tensors of {graph['made']} numbers to change {graph['mutated']}"
    for name in graph["reads"]:
        yield where + f"reads {name}, which is not an argument on the host"
    for phase, n in graph["copies"].items():
        if n:
            yield where + f"{phase} copies {n} inputs that are not aligned to 16 bytes"


def bad_kernel(kernel):
    """Says why a generated kernel does not compile, or that it spills registers.

    Inductor chooses among variants by their times. The last mix reads twelve streams, in one variant: with
    triton 3.7.1 it keeps 1,432 bytes on the stack, and its backward 520.
    """
    where = f"{kernel['name']} of {kernel['function']}: "
    if kernel["error"]:
        yield where + kernel["error"]
    elif not kernel["usage"]:
        yield where + "was not compiled"
    spilled = [usage["STACK"] + usage["LOCAL"] for usage in kernel["usage"] if usage]  # None: no cuobjdump
    if min(spilled, default=0) > 1432:
        yield where + f"spills registers: {kernel['usage']}"


@pytest.mark.long
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"),
    reason=f"uses internals of torch 2.13's Inductor, this is torch {torch.__version__}",
)
@pytest.mark.skipif(tg.triton is None, reason="needs triton, which is not installed")
@pytest.mark.skipif(not gpu_code.cpp_compiler(), reason="needs a C++ compiler (g++, clang++)")
def test_generated_code(tmp_path):
    """Checks Inductor's code for an H100, of every function that the record and the n-gram preset compile."""
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {tg.triton.__version__}".encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    kept = Path(default_cache_dir(), f"train_gpt_{digest.hexdigest()[:16]}.json")
    new = tmp_path / "found.json"
    if not kept.exists():
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, gpu_code.__file__, str(new)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        # torch lists an operation's kernels for every device in some errors
        errors = [line for line in done.stderr.splitlines() if "registered at" not in line]
        assert done.returncode == 0, "\n".join(errors[-40:])
        found = json.loads(new.read_text())
    else:
        found = json.loads(kept.read_text())
    graphs = found["graphs"]
    functions = set(found["functions"])
    of_rows = found["of rows"]
    # Offsets into over 2^31 numbers need 64 bits.
    assert {graph["function"] for graph in of_rows if graph["wide"]} == {"gather_rows", "row_adam_update"}
    decorated = tg.adam_update.__code__  # compiled() makes functions of one code
    used = {"trunk", "pointer_inputs"}
    for name, value in vars(tg).items():
        if getattr(value, "__code__", None) is decorated and name != "row_adam_update":
            used.add(name)
    assert used <= functions, f"the record preset does not run {used - functions}"
    layers = [graph["backward"] for graph in graphs if graph["function"] == "trunk"]
    assert sorted(layers) == [False, False, True]  # of validation and of training, for all stages
    assert functions == {graph["function"] for graph in graphs}
    problems = []
    for graph in graphs + of_rows:
        problems += bad_for_a_gpu(graph)
    for kernel in found["kernels"]:
        problems += bad_kernel(kernel)
    assert found["kernels"] and not problems, "\n".join(problems)

    counted = launches.Counts()
    backend = launches.make_backend(gpu_code.BIGRAMS, counted)
    steps = launches.run_steps(gpu_code.BIGRAMS, 0, 8, backend, counted)
    for (step, most), counts in zip(MOST_LAUNCHES.items(), steps[2:], strict=True):
        launched = Counter()
        for graph in graphs:
            runs = graph["runs"].get(f"step {step}", 0)
            launched[graph["function"]] += launches.launches_of(graph) * runs
        for (_, column), n in counts.items():
            if column in ("eager", "triton"):
                launched[column] += n
        assert counts["optimizer", "calls"] < 40  # on a GPU Adam takes a parameter at once
        assert launched.total() <= most, (step, launched)
    if new.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(new, kept)


def test_most_memory():
    """Storages count once, views not, and no longer than they live; temporaries of kernels never."""
    counts = launches.Counts()
    with launches.Memory(counts) as memory:
        kept = torch.zeros(1000, device="meta")
        view = kept[10:].view(99, 10).T
        for _ in range(3):
            temporary = view + 1  # 990 numbers; the last one's place is not free before the next is made
        del temporary
        assert memory.live == 4000 and memory.peak == 4000 + 2 * 3960
        counts.as_kernel(lambda x: (x[None] * x[:, None]).sum(0))(kept)
        assert memory.peak == 4000 + 2 * 3960
        del kept
        assert memory.live == 4000  # the view holds it
        del view
        assert memory.live == 0
