"""Section 7's kernels compiled for GPUs that are not here: matrix units, shared memory, spills, and what would be compiled anew."""
import functools
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import train_gpt as tg

pytestmark = pytest.mark.slow

WEIGHTS = [(1.0,), (1.0, 0.5), (1.0, 0.5, 0.25)]


class Launch(Exception):
    """A kernel's arguments, in place of its start."""
    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.given = args, kwargs
        raise self


def test_nothing_is_compiled_for_another_number_of_rows():
    """It differs from step to step; specialised, as integers are by default, half of a run's first multiples of 16 would compile
    another kernel on the clock. Of other kernels only the grid varies."""
    pytest.importorskip("triton", reason="the kernels need triton, which is not installed")
    kernels = {name: kernel for name, kernel in vars(tg).items() if name.endswith("_kernel")}
    assert len(kernels) == 5
    assert {(name, p.name) for name, kernel in kernels.items() for p in kernel.params if p.do_not_specialize} == {
        ("transpose_kernel", "count")}
    varying = set()
    for n in (4000, 4001):
        calls = {"sum_rows_kernel": lambda: tg.triton_sum_rows(meta(50304, 5, 768), meta(16384, 5, 768), index_like(16384, n)),
                 "transpose_kernel": lambda: tg.triton_transpose_add(meta(768, 50304), meta(50304, 768), meta(n, dtype=torch.int32))}
        for name, call in calls.items():
            launch = Launch()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tg, name, launch)
                with pytest.raises(Launch):
                    call()
            varying |= {(n, name, i, value) for i, value in enumerate(launch.given[0]) if type(value) is int}
    first, second = ({each[1:] for each in varying if each[0] == n} for n in (4000, 4001))
    assert first - second == {("transpose_kernel", 3, 4000)} and kernels["transpose_kernel"].arg_names[3] == "count"


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def index_like(T, n):
    return tg.RowIndex(*(meta(k, dtype=dtype) for k, dtype in
                         ((n, torch.int32), (T, torch.int32), (n + 1, torch.int32), (n, torch.bool))))


def kernel_cases():
    """name -> kernel, tiles or None for the wrapper's, the wrapper's call at the record preset's shapes."""
    cases, d, width, V, T, chunk = {}, 768, 3072, 50304, 16384, 8192
    for size in tg.GRAM_TILES:
        for name, x, add in (("wide", meta(3, d, width), None), ("tall", meta(3, width, d).mT, None),
                             ("symmetric", meta(3, d, d), meta(3, d, d))):
            cases[f"gram {size} {name}"] = ("gram_kernel", tg.GRAM_TILES[size],
                                            lambda x=x, add=add: tg.triton_gram(x, add, .5, -.5))
    for size, tiles in tg.RELU_SQUARE_TILES.items():
        if size != "large backward":
            cases[f"relu_square {size}"] = ("relu_square_kernel", tiles,
                                            lambda: tg.triton_relu_square(meta(T, d), meta(width, d)))
        if size != "large":
            cases[f"relu_square_grad {size.split()[0]}"] = ("relu_square_kernel", tiles, lambda: tg.triton_relu_square_grad(
                meta(T, d), meta(width, d), meta(T, width)))
    for weights, unit in itertools.product(WEIGHTS, (0.0, tg.FP8_GRAD)):
        cases[f"softcap_loss {len(weights)} {'e5m2' if unit else 'bf16'}"] = (
            "softcap_loss_kernel", None, lambda weights=weights, unit=unit: tg.triton_softcap_loss(
                meta(chunk, V), meta(chunk + len(weights) - 1, dtype=torch.int64), weights, unit))
    cases["sum_rows"] = "sum_rows_kernel", None, lambda: tg.triton_sum_rows(meta(V, 5, d), meta(T, 5, d), index_like(T, 4000))
    cases["transpose_copy bf16"] = "transpose_kernel", None, lambda: tg.triton_transpose_copy(meta(V, d), meta(d, V))
    cases["transpose_copy e5m2"] = "transpose_kernel", None, lambda: tg.triton_transpose_copy(
        meta(V, chunk, dtype=torch.float8_e5m2), meta(chunk, V, dtype=torch.float8_e5m2))
    cases["transpose_add"] = "transpose_kernel", None, lambda: tg.triton_transpose_add(
        meta(d, V), meta(V, d), meta(4000, dtype=torch.int32))
    return cases


CASES = kernel_cases()
TARGETS = [(arch, name) for arch in (80, 90, 100) for name in CASES if arch >= 90 or "large" not in name]
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e5m2: "*fp8e5", torch.int32: "*i32",
            torch.int64: "*i64", torch.uint8: "*u8"}
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block may have
CONSUMER = 99 << 10
MATRIX_UNIT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@functools.cache
def compiled(arch, name):
    """As a launch with the wrapper's arguments would compile it: numbers that are 1, or that 16 divides, are known to be so."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel_name, tiles, call = CASES[name]
    kernel, launch = getattr(tg, kernel_name), Launch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, kernel_name, launch)
        with pytest.raises(Launch):
            call()
    args, kwargs = launch.given
    given = dict(zip(kernel.arg_names, args)) | kwargs | (tiles or {})
    options = {key: given.pop(key) for key in ("num_warps", "num_stages") if key in given}
    assert given.keys() == set(kernel.arg_names)
    signature, constants, attrs = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        special = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or special and value == 1:
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = {float: "fp32", int: "i32"}.get(type(value)) or ("fp32",) * len(value)
        if isinstance(value, torch.Tensor) or special and value % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return tg.triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    pytest.importorskip("triton", reason="the kernels need triton, which is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    with pytest.MonkeyPatch.context() as patch:  # what an earlier run has left could hide anything
        patch.setenv("TRITON_CACHE_DIR", str(folder := tmp_path_factory.mktemp("triton")))
        yield
        assert any(folder.iterdir())  # it is where they went
    compiled.cache_clear()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch, name", TARGETS, ids=lambda value: f"sm_{value}" if isinstance(value, int) else value)
def test_compiles(compiler, arch, name):
    """On each card's own matrix unit, or with loads and stores of 8 bytes and more a thread."""
    kernel = compiled(arch, name)
    ptx, shared = kernel.asm["ptx"], kernel.metadata.shared
    assert f".target sm_{arch}" in ptx and shared <= SHARED[arch]
    if name.startswith("gram") or "small" in name:
        assert shared <= CONSUMER
    if name.startswith(("gram", "relu_square")):
        assert [unit for unit in MATRIX_UNIT.values() if unit in ptx] == [MATRIX_UNIT[arch]]
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*, (0x)?10", ptx)  # 16 bytes at a time
    else:
        for what in ("ld", "st")[:1 if name == "transpose_add" else 2]:  # which writes to columns wherever they are
            assert re.search(rf"{what}\.global\S*\.v[24]\.b(32|64)", ptx), what


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch, name", TARGETS, ids=lambda value: f"sm_{value}" if isinstance(value, int) else value)
def test_spills_nothing(compiler, arch, name, tmp_path):
    tool = Path(tg.triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton brings no cuobjdump")
    (file := tmp_path / "kernel.cubin").write_bytes(compiled(arch, name).asm["cubin"])
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    assert found.pop("REG") and found == {"STACK": "0", "LOCAL": "0"}, usage
