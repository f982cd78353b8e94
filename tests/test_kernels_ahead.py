"""Compiles the kernels for GPUs that are not here: matrix units, shared memory, spills, recompilation."""

import functools
import itertools
import os
import re

import pytest
import torch

import train_gpt as tg
from gpu_code import resource_usage
from test_kernels import WEIGHTS

pytestmark = pytest.mark.slow


class Launch(Exception):
    """Replaces a kernel: records the arguments of its launch, and raises itself."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs
        raise self


def launch_arguments(kernel_name, call):
    """Returns the arguments with which `call()` launches a kernel."""
    launch = Launch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, kernel_name, launch)
        with pytest.raises(Launch):
            call()
    return launch.args, launch.kwargs


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta_index(T, n, signed=False):
    sign_rows = None
    if signed:
        sign_rows = meta(T, dtype=torch.int32)
    ids = meta(n, dtype=torch.int32)
    perm = meta(T, dtype=torch.int32)
    offsets = meta(n + 1, dtype=torch.int32)
    return tg.Segments(ids, perm, offsets, sign_rows)


def test_the_number_of_touched_rows_does_not_recompile():
    """Checks that no integer argument varies with the number of rows, which varies by step.

    Triton specializes integers: a run's first count that 16 divides would compile on the clock.
    """
    pytest.importorskip("triton", reason="the kernels need triton, which is not installed")
    kernels = {name: kernel for name, kernel in vars(tg).items() if name.endswith("_kernel")}
    assert len(kernels) == len(tg.RECORD.kernels) + 1  # the pointer has two
    assert not any(p.do_not_specialize for kernel in kernels.values() for p in kernel.params)
    out = meta(50304, 4, 768)
    grad = meta(16384, 4, 768)
    integers = []
    for n in (4000, 4001):
        call = functools.partial(tg.triton_segment_sum_rows, out, grad, meta_index(16384, n))
        args, _ = launch_arguments("segment_sum_rows_kernel", call)
        integers.append([value for value in args if type(value) is int])
    assert integers[0] == integers[1] and integers[0]


def kernel_cases():
    """Returns, by case: the kernel's name, its tiles (None: the wrapper's), and the wrapper's call.

    Shapes are those of the record preset.
    """
    d, width, V, T, chunk = 768, 2816, 50304, 16384, 8192
    cases = {}
    x = meta(T, d)
    fc = meta(width, d)
    square = meta(T, width)
    # In generated code T may vary, so Triton does not learn that 16 divides it: as if it were odd.
    x8 = meta(T - 1, d, dtype=torch.float8_e4m3fn)
    square8 = meta(T - 1, width, dtype=torch.float8_e4m3fn)
    weights8 = meta(2, width, d, dtype=x8.dtype)
    dy8 = meta(T - 1, d, dtype=torch.float8_e5m2)
    scales = meta(12, 3, 2, 4, 1, dtype=torch.float32)[1, :, :, :1]  # as the model has them
    mlp = tg.FP8MLP(weights8, None, scales, meta(12, 2, dtype=torch.float32), 1)
    for dtype in (x8.dtype, dy8.dtype):
        call = functools.partial(tg.triton_cast_and_transpose, x[1:], scales[0, 1], dtype)
        cases[f"cast_and_transpose fp8 {dtype}"] = "cast_and_transpose_kernel", None, call
    calls = {
        "": functools.partial(tg.triton_relu_square, x, fc),
        " backward": functools.partial(tg.triton_relu_square_grad, x, fc, square),
        " fp8": functools.partial(tg.triton_relu_square_fp8, x8, mlp),
        " fp8 backward": functools.partial(tg.triton_relu_square_fp8, dy8, mlp, square8),
    }
    for (kind, call), size in itertools.product(calls.items(), ("small", "large")):
        tiles = tg.RELU_SQUARE_TILES[size + " fp8" * (size == "large" and "fp8" in kind)]
        cases[f"relu_square{kind} {size}"] = "relu_square_kernel", tiles, call
    numbers = meta(2, T, dtype=torch.float32)[:, :chunk]
    for weights, unit in itertools.product(WEIGHTS, (0.0, tg.FP8_GRAD)):
        targets = meta(chunk, len(weights), dtype=torch.int64)
        if unit:
            logits = meta(chunk, V, dtype=torch.float8_e4m3fn)
            name = f"softcap_loss {len(weights)} e5m2"
        else:
            logits = meta(chunk, V)
            name = f"softcap_loss {len(weights)} bf16"
        args = logits, targets, weights.to("meta"), unit
        for copies in (None, tg.PointerProbs(numbers, meta(1, dtype=torch.int64), numbers)):
            call = functools.partial(tg.triton_softcap_loss, *args, copies)
            cases[name + " copies" * bool(copies)] = "softcap_loss_kernel", None, call
    for D in (16, 128):
        queries = tg.PointerInputs(meta(T, D), meta(T, D), meta(T, dtype=torch.float32))
        ids = meta(T, dtype=torch.int32), meta(T, dtype=torch.int64)
        text = tg.MicroBatch(*ids, None, None, meta(64, dtype=torch.int32), T)
        weights = meta(2, T, dtype=torch.float32)
        lse = meta(T, dtype=torch.float32)
        call = functools.partial(tg.triton_pointer, queries, text, 2560)
        cases[f"pointer {D}"] = "pointer_kernel", None, call
        call = functools.partial(tg.triton_pointer_grad, queries, text, 2560, weights, lse, weights)
        cases[f"pointer {D} queries"] = "pointer_grad_kernel", None, call
        cases[f"pointer {D} keys"] = "pointer_grad_kernel", {"KEYS": True}, call
    call = functools.partial(tg.triton_segment_sum_rows, meta(V, 4, d), meta(T, 4, d), meta_index(T, 4000))
    cases["segment_sum_rows"] = "segment_sum_rows_kernel", None, call
    index = meta_index(T, 4000, signed=True)
    signs = meta(8192, d)
    call = functools.partial(tg.triton_segment_sum_rows, meta(V * 15 // 2, d), meta(T, d), index, signs)
    cases["segment_sum_rows signed"] = "segment_sum_rows_kernel", None, call
    return cases


CASES = kernel_cases()
TARGETS = []
for arch in (80, 90, 100):
    for name in CASES:
        if arch >= 90 or not re.search("large|fp8|e5m2", name):
            TARGETS.append((arch, name))
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
# The most that a block may have, by architecture.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CONSUMER_SHARED_BYTES = 99 << 10
MATRIX_UNIT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compile_kernel(arch, name):
    """Compiles as a launch would, specialized for integers that are 1 or that 16 divides."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel_name, tiles, call = CASES[name]
    kernel = getattr(tg, kernel_name)
    args, kwargs = launch_arguments(kernel_name, call)
    arguments = dict(zip(kernel.arg_names, args)) | kwargs | (tiles or {})
    options = {}
    for key in ("num_warps", "num_stages"):
        if key in arguments:
            options[key] = arguments.pop(key)
    assert arguments.keys() == set(kernel.arg_names)
    signature = {}
    constants = {}
    attrs = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        specialized = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or specialized and value == 1:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = {float: "fp32", int: "i32"}.get(type(value)) or ("fp32",) * len(value)
        if isinstance(value, torch.Tensor) or specialized and value % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return tg.triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    pytest.importorskip("triton", reason="the kernels need triton, which is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    with pytest.MonkeyPatch.context() as patch:  # an earlier run's cache could hide failures
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield
        assert any(folder.iterdir())  # the variable had an effect


def case_id(value):
    if isinstance(value, int):
        return f"sm_{value}"
    return value


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch, name", TARGETS, ids=case_id)
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
