"""Compiles the kernels for GPUs that are not here: matrix units, shared memory, spills, recompilation."""

import functools
import itertools
import os
import re
from unittest import mock

import pytest
import torch

import train_gpt as tg
from gpu_code import resource_usage
from test_kernels import WEIGHTS

pytestmark = pytest.mark.slow


def launch_arguments(kernel_name, call):
    """Returns the arguments with which `call()` launches a kernel first."""
    with mock.patch.object(tg, kernel_name, mock.MagicMock()) as kernel:
        call()
    return kernel[None].call_args_list[0]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


INT32 = torch.int32


def meta_index(T, n, sign_rows=None):
    perm = meta(T, dtype=INT32)
    return tg.Segments(meta(n, dtype=INT32), perm, meta(n + 1, dtype=INT32), sign_rows)


def test_the_number_of_touched_rows_does_not_recompile():
    """Checks that no integer argument varies with the number of rows, which varies by step.

    Triton specializes integers: a run's first count that 16 divides would compile on the clock.
    """
    pytest.importorskip("triton")
    out = meta(50304, 4, 768)
    grad = meta(16384, 4, 768)
    integers = []
    for n in (4000, 4001):
        call = functools.partial(tg.triton_segment_sum_rows, out, grad, meta_index(16384, n))
        args, _ = launch_arguments("segment_sum_rows_kernel", call)
        integers.append([value for value in args if type(value) is int])
    assert integers[0] == integers[1] and integers[0]


def kernel_cases():
    """Returns, by case: the kernel's tiles (None: the wrapper's), and the wrapper's call.

    A case's name begins with the kernel's. Shapes are those of the record preset.
    """
    d, width, V, T, chunk = 768, 2816, 50304, 16384, 8192
    fp32, int64, e4m3, e5m2 = torch.float32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2
    cases = {}

    def add(name, function, *args, tiles=None):
        cases[name] = tiles, functools.partial(function, *args)

    x = meta(T, d)
    scales = meta(12, 3, 2, 4, 1, dtype=fp32)[1, :, :, :1]  # as the model has them
    for dtype in (e4m3, e5m2):
        add(f"cast_and_transpose fp8 {dtype}", tg.triton_cast_and_transpose, x[1:], scales[0, 1], dtype)
    fc = meta(width, d)
    # In generated code T may vary, so Triton does not learn that 16 divides it: as if it were odd.
    x8 = meta(T - 1, d, dtype=e4m3)
    dy8 = meta(T - 1, d, dtype=e5m2)
    square8 = meta(T - 1, width, dtype=e4m3)
    mlp = tg.FP8Operands(meta(2, width, d, dtype=e4m3), None, scales, meta(12, 2, dtype=fp32), 1)
    products = {
        "": (tg.triton_relu_square, x, fc),
        " backward": (tg.triton_relu_square_grad, x, fc, meta(T, width)),
        " fp8": (tg.triton_relu_square_fp8, x8, mlp),
        " fp8 backward": (tg.triton_relu_square_fp8, dy8, mlp, square8),
    }
    for kind, call in products.items():
        large = "large fp8" if "fp8" in kind else "large"
        add(f"relu_square{kind} small", *call, tiles=tg.RELU_SQUARE_TILES["small"])
        add(f"relu_square{kind} large", *call, tiles=tg.RELU_SQUARE_TILES[large])
    numbers = meta(2, T, dtype=fp32)[:, :chunk]
    copies = tg.PointerOutput(numbers, meta(1, dtype=int64), numbers)
    for weights, unit, probs in itertools.product(WEIGHTS, (0.0, tg.FP8_DLOGITS_SCALE), (None, copies)):
        kind = "e5m2" if unit else "bf16"
        logits = meta(chunk, V, dtype=e4m3 if unit else torch.bfloat16)
        targets = meta(chunk, len(weights), dtype=int64)
        name = f"softcap_loss {len(weights)} {kind}" + " copies" * bool(probs)
        add(name, tg.triton_softcap_loss, logits, targets, weights.to("meta"), unit, probs)
    text = tg.MicroBatch(meta(T, dtype=INT32), meta(T, dtype=int64), None, None, meta(64, dtype=INT32), T)
    weights = meta(2, T, dtype=fp32)
    lse = meta(T, dtype=fp32)
    for D in (16, 128):
        args = tg.PointerInputs(meta(T, D), meta(T, D), lse), text, 2560
        add(f"pointer {D}", tg.triton_pointer, *args)
        args += weights, lse, weights
        add(f"pointer_grad {D} queries", tg.triton_pointer_grad, *args)
        add(f"pointer_grad {D} keys", tg.triton_pointer_grad, *args, tiles={"KEYS": True})
    sums = tg.triton_segment_sum_rows
    add("segment_sum_rows", sums, meta(V, 4, d), meta(T, 4, d), meta_index(T, 4000))
    index = meta_index(T, 4000, meta(T, dtype=INT32))
    add("segment_sum_rows signed", sums, meta(V * 15 // 2, d), meta(T, d), index, meta(8192, d))
    return cases


CASES = kernel_cases()
TARGETS = []
for arch in (80, 90, 100):
    for name in CASES:
        if arch >= 90 or not re.search("large|fp8|e5m2", name):
            TARGETS.append((arch, name))
# The most that a block may have, by architecture.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CONSUMER_SHARED_BYTES = 99 << 10
MATRIX_UNIT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compile_kernel(arch, name):
    """Compiles as a launch would, specialized for integers that are 1 or that 16 divides."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    tiles, call = CASES[name]
    kernel_name = f"{name.split()[0]}_kernel"
    kernel = getattr(tg, kernel_name)
    args, kwargs = launch_arguments(kernel_name, call)
    arguments = dict(zip(kernel.arg_names, args)) | kwargs | (tiles or {})
    options = {key: arguments.pop(key) for key in ("num_warps", "num_stages") if key in arguments}
    signature = {}
    constants = {}
    attrs = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind = "constexpr"
        if not parameter.is_constexpr:
            kind = mangle_type(value, specialize=True)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor) or type(value) is int and value % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return tg.triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    with pytest.MonkeyPatch.context() as patch:  # an earlier run's cache could hide failures
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield
        assert any(folder.iterdir())  # the variable had an effect


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch, name", TARGETS, ids=str)
def test_compiles(compiler, arch, name, tmp_path):
    """Checks for the GPU's matrix instructions, or loads and stores of 8 bytes or more a thread; spills."""
    kernel = compile_kernel(arch, name)
    ptx = kernel.asm["ptx"]
    shared = kernel.metadata.shared
    usage = resource_usage(kernel.asm["cubin"], tmp_path)
    assert f".target sm_{arch}" in ptx and shared <= SHARED_BYTES[arch]
    assert usage is None or usage["REG"] and not usage["STACK"] and not usage["LOCAL"], usage
    if name.startswith("pointer") or "small" in name:
        assert shared <= CONSUMER_SHARED_BYTES
    if "fp8" in name:
        assert not re.search(r"st\.global\S*\.b(8|16)\b", ptx)
    if name.startswith(("relu_square", "pointer")):
        assert [unit for unit in MATRIX_UNIT.values() if unit in ptx] == [MATRIX_UNIT[arch]]
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*, (0x)?10", ptx)  # 16 bytes at a time
    else:
        for instruction in ("ld", "st"):
            assert re.search(rf"{instruction}\.global\S*\.v[24]\.b(32|64)", ptx), instruction
