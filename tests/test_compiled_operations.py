"""Tests the operations of section 6 that are compiled where they are called, as they are and compiled."""

import math
import os
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import train_gpt as tg
from test_kernels import (
    bits,
    fp8_steps_apart,
    generator,
    nan_filled,
    nan_padded,
    needs_gpu,
    randn,
    random_signs,
)

pytestmark = pytest.mark.numeric

FORMS = [
    "plain",
    pytest.param("compiled", marks=pytest.mark.slow),
    pytest.param("compiled for a GPU", marks=needs_gpu),
]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Returns (compiled, device): what wraps an operation, and where its tensors are."""
    counters.clear()
    if request.param == "plain":
        yield tg.TORCH_BACKEND.compiled, "cpu"
        return
    # Torch's cache does not distinguish vectors of 16 numbers from those of 8.
    capability = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(default_cache_dir(), capability))
    with torch._dynamo.config.patch(recompile_limit=64):
        torch._dynamo.reset()
        device = "cuda" if "GPU" in request.param else "cpu"
        yield cache(partial(torch.compile, fullgraph=True)), device
        torch._dynamo.reset()


def on(device, *tensors):
    """Copies tensors to a device with what surrounds them: strides and neighbours stay as they are."""
    for t in tensors:
        whole = (t if t._base is None else t._base.view(t.dtype)).to(device, copy=True)
        yield whole.as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_grad(form, dtype):
    """Checks matrices that lie apart, as those of banks do: `out` rounds once, dots are sums in fp32."""
    (compiled, device), half = form, torch.finfo(dtype).eps / 2 * 1.01
    run = compiled(tg.scaled_grad)
    for n, rows, columns, row, overwrite in (
        (3, 4, 300, 0, True),
        (3, 4, 300, 1, False),
        (2, 7, 64, 1, True),
    ):
        banks = [randn(2 * n, rows, columns, seed=k, dtype=dtype) for k in range(3)]
        if overwrite:
            banks[0].copy_(nan_filled(*banks[0].shape, dtype=dtype))
        (bank, *others), scales = on(device, *banks), randn(2, n, seed=3, dtype=dtype).to(device)
        out, product, w = bank[::2], others[0][1::2], others[1][::2]
        dots, before = nan_filled(n, 2 * rows).to(device)[:, rows:], bank.clone()
        run(out, dots, product, scales, row, w, overwrite)
        want = product.double() * scales[row].double()[:, None, None]
        want = want if overwrite else before[::2].double() + want
        # In fp32 a product may be rounded before its sum.
        bound = half * want.abs() + 1e-7 * (1 + want.abs() + before[::2].nan_to_num().abs())
        assert ((out.double() - want).abs() <= bound).all()
        assert torch.equal(bits(bank[1::2]), bits(before[1::2]))
        exact = product.double() * w.double()
        assert ((dots - exact.sum(-1)).abs() <= 1e-6 * exact.abs().sum(-1)).all()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype, out_dtype", [("float32", "float32"), ("float32", "bfloat16")])
def test_gather_rows(form, dtype, out_dtype, signed):
    """Checks bits: sums in fp32, in order, rounded once. Table and output lie in NaN."""
    (compiled, device), columns = form, 101
    dtype, out_dtype = getattr(torch, dtype), getattr(torch, out_dtype)
    run = compiled(tg.gather_rows)
    for n, ranges in ((23, 3), (40, 3), (31, 3), (23, 1)):
        N = 3 * n + 5
        ids = torch.randint(0, N, (ranges, n), generator=generator(n), dtype=torch.int32)
        table, read = nan_padded(nan_filled(N, columns, dtype=dtype)), ids.unique().long()
        size = 2.0 ** torch.randint(-10, 11, (len(read), columns), generator=generator(n + 1))
        table[read] = (randn(len(read), columns, seed=n + 2) * size).to(dtype)
        buffer, signs, want = (
            nan_filled(n + 4, columns, dtype=out_dtype).to(device),
            (),
            torch.zeros(n, columns),
        )
        parts = [table[rows].float() for rows in ids]
        if signed:
            sign_ids = torch.randint(0, 9, (ranges, n), generator=generator(n + 3)).int()
            signs = random_signs(9, columns, out_dtype), sign_ids
            parts = [part * signs[0][rows] for part, rows in zip(parts, sign_ids)]
            signs = on(device, *signs)
        for part in parts:
            want = want + part
        run(buffer[2:-2], *on(device, table, ids), *signs)
        assert torch.equal(buffer[2:-2].cpu(), want.to(out_dtype))
        assert buffer[:2].isnan().all() and buffer[-2:].isnan().all()
        backwards = sum(parts[-2::-1], parts[-1])
        assert ranges == 1 or out_dtype != torch.float32 or not torch.equal(backwards, want)


def update_case(N, n, columns, dtype=torch.float32, seed=0):
    """Returns table, moments, rows, gradients. Rows that are not updated are NaN, and what surrounds them.

    The first row to update has a gradient of 0 and none before.
    """
    rows = torch.randperm(N, generator=generator(seed))[:n].int()
    table, moments = nan_filled(N + 4, columns, dtype=dtype)[2:-2], nan_filled(N + 4)[2:-2]
    size = 10.0 ** torch.randint(-4, 5, (n, 1), generator=generator(seed + 1))
    grads = randn(n, columns, seed=seed + 2) * size
    table[rows] = randn(n, columns, seed=seed + 3, dtype=dtype)
    moments[rows] = (randn(n, seed=seed + 4) * size[:, 0]).square() * (torch.arange(n) % 3 > 0)
    grads[:1] = 0
    return table, moments, rows, grads


def updated_in_fp64(table, moments, rows, grads, lr, beta2):
    """Returns the rows of both after an update."""
    squares, old = grads.double().square().mean(-1), moments[rows].double()
    decayed = torch.where(old == 0, squares, beta2 * old + (1 - beta2) * squares)
    new = old + squares if beta2 == 1 else decayed
    update = lr * grads.double() / (new.sqrt() + tg.ROW_EPS)[:, None]
    return table[rows].double() - update, new, update


@pytest.mark.parametrize("beta2", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_update_rows(form, dtype, beta2):
    """Checks moments and weights within a few roundings of fp64; nothing else may change."""
    compiled, device = form
    run, lr = compiled(tg.update_rows), torch.tensor(0.3)
    for N, n in ((40, 23), (50, 31), (31, 31)):
        case = update_case(N, n, 64 + 1, dtype, n)
        table, moments, rows, grads = on(device, *case)
        weights, total, update = updated_in_fp64(*case, 0.3, beta2)
        run(
            table, moments, rows, grads, lr, beta2, tg.seed_rows(rows * 3 + 1, 5), tg.seed_columns(65, device)
        )
        (old, old_moments, rows, old_grads), table, moments = case, table.cpu(), moments.cpu()
        bound = 2.0**-21 * (old[rows].double().abs() + update.abs())
        if dtype == torch.bfloat16:  # rounded to either neighbour
            bound += torch.finfo(dtype).eps * weights.abs() + 1e-7
        torch.testing.assert_close(moments[rows].double(), total, rtol=2.0**-21, atol=0)
        assert ((table[rows].double() - weights).abs() <= bound).all()
        assert torch.equal(bits(table[rows[0]]), bits(old[rows[0]]))
        assert torch.equal(grads.cpu(), old_grads)
        others = torch.ones(N, dtype=torch.bool)
        others[rows.long()] = False
        assert torch.equal(bits(table[others]), bits(old[others]))
        assert torch.equal(bits(moments[others]), bits(old_moments[others]))


def test_stochastic_rounding(form):
    """Compares bits with plain torch on the CPU: hashes are of int32, which wraps, and NaN passes."""
    (compiled, device), row_ids = (
        form,
        torch.randint(-(2**31), 2**31 - 1, (33,), generator=generator(3)).int(),
    )
    values = randn(33, 300) * 10.0 ** torch.randint(-3, 4, (33, 300), generator=generator(4))
    values[:, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    values[0] = torch.tensor([0x7FFFFFFF]).int().view(torch.float32)  # a NaN to which a carry must not come
    for step in (0, 1, 2, 12345, 2**20):
        args = values, tg.seed_rows(row_ids, step), tg.seed_columns(300)
        rounded = compiled(tg.round_stochastically)(*(t.to(device) for t in args))
        assert torch.equal(bits(rounded.cpu()), bits(tg.round_stochastically(*args)))
    assert not rounded.cpu().equal(values) and rounded[0].bfloat16().isnan().all()
    assert counters["stats"]["unique_graphs"] <= 1  # steps compile nothing new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_transpose_copy(form, dtype):
    """Checks random bits, NaNs and -0 among them."""
    (compiled, device) = form
    for n, m in (130, 67), (63, 65), (64, 192):
        random_bytes = torch.randint(
            0, 256, (n, m * dtype.itemsize), generator=generator(n), dtype=torch.uint8
        )
        (x,), out = on(device, random_bytes.view(dtype)), nan_filled(m, n, dtype=dtype).to(device)
        compiled(tg.transpose_copy)(out, x)
        assert torch.equal(bits(out), bits(x.T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transpose_add(form, dtype):
    """Checks that only the given rows are added. All others are NaN, in the input and in the output."""
    compiled, device = form
    for n, m, k in (300, 65, 63), (300, 65, 64), (300, 65, 299):
        row_ids = torch.randperm(n, generator=generator(k))[:k].sort().values.int()
        x, out = nan_filled(n, m, dtype=dtype), nan_filled(m, n, dtype=dtype)
        x[row_ids], out[:, row_ids] = randn(k, m, dtype=dtype), randn(m, k, seed=1, dtype=dtype)
        want = out.clone()
        want[:, row_ids] += x[row_ids].T
        out, x, row_ids = on(device, out, x, row_ids)
        compiled(tg.transpose_add)(out, x, row_ids)
        assert torch.equal(bits(out.cpu()), bits(want))


def test_no_row_and_one_row_are_not_compiled():
    """Checks that numbers of rows which torch.compile would take as constants cost no compilation."""
    table = object.__new__(tg.NgramTable)
    table.backend = tg.TORCH_BACKEND._replace(compiled=lambda function: "compiled")
    rows = torch.arange(3, dtype=torch.int32)
    chosen = [table.on_rows(tg.gather_rows, rows[:n]) for n in range(4)]
    assert chosen == [tg.gather_rows, tg.gather_rows, "compiled", "compiled"]
    for n in (0, 1):
        out, rows = torch.full((n, 5), torch.nan), torch.full((n,), 2, dtype=torch.int32)
        weights, moments = randn(4, 5), torch.zeros(4)
        tg.gather_rows(out, weights, rows[None])
        assert torch.equal(out, weights[2:][:n])
        tg.update_rows(weights, moments, rows, randn(n, 5, seed=1), torch.tensor(0.3), 0.9, rows, rows)
        assert (
            (weights != randn(4, 5)).any(1).tolist()
            == (moments > 0).tolist()
            == [False, False, n == 1, False]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conversion_to_fp8(form, dtype):
    """Checks numbers and scales. Compiled code rounds quotients of bf16 numbers to fp32."""
    compiled, device = form
    rounding = 2**-8 if dtype == torch.bfloat16 else 0 if device == "cpu" else 1e-6
    bank, h = randn(3, 2, 48, 32, dtype=dtype), randn(21, 32, seed=1, dtype=dtype)
    bank[2, 1] = 0
    delayed = torch.tensor([0.003, 0.001, 2.5e-15])  # cuts, leaves room
    for function, args in (
        (tg.amax_to_fp8, (h,)),
        (tg.fp8_mlp_weights, (bank, torch.zeros(3))),
        (tg.fp8_mlp_weights, (bank, delayed)),
    ):
        want = function(*args)
        moved = on(device, *args)
        for found, expected in zip(compiled(function)(*moved), want, strict=True):
            found = found.cpu()
            assert found.dtype == expected.dtype and found.shape == expected.shape
            if found.element_size() > 1 or dtype == torch.float32:
                torch.testing.assert_close(found.float(), expected.float(), rtol=rounding, atol=0)
            else:
                apart = fp8_steps_apart(found, expected)
                assert apart.max() <= 1 and apart.float().mean() < 0.2
