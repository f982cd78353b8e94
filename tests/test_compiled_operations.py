"""Tests the operations that are compiled where they are called, as they are and compiled."""

import inspect

import pytest
import torch

import train_gpt as tg
from golden_inputs import fp8_buffers, generator, same_bits
from test_compiled import compile  # noqa: F401 (a fixture)
from test_kernels import (
    assert_codes_near,
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
def device(request, compile):  # noqa: F811
    """Returns the device of an operation's tensors; operations are plain, or compiled."""
    if request.param != "plain":
        compile()
    return "cuda" if "GPU" in request.param else "cpu"


def on(device, *tensors):
    """Copies tensors to a device with what surrounds them: strides and neighbours stay as they are."""
    for t in tensors:
        whole = t
        if t._base is not None:
            whole = t._base.view(t.dtype)
        whole = whole.to(device, copy=True)
        yield whole.as_strided(t.shape, t.stride(), t.storage_offset())


F32, BF16 = torch.float32, torch.bfloat16
FLOATS = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def test_places_among(device):
    candidates = torch.tensor([0, 3, 4, 9, 40]).int()
    ids = torch.tensor([[-1, 0, 1], [9, 40, 41], [3, 4, 39]])
    ids, candidates = on(device, ids, candidates)
    found = tg.index_in(ids, candidates)
    assert found.tolist() == [[-1, 0, -1], [3, 4, -1], [1, 2, -1]]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
def test_gather_rows(device, dtype, out_dtype, signed):
    """Checks bits: sums in fp32, in order, rounded once. Table and output lie in NaN."""
    for n, ranges in ((23, 3), (40, 3), (23, 1)):
        ids = torch.randint(0, 3 * n, (ranges, n), generator=generator(n), dtype=torch.int32)
        table = nan_padded(nan_filled(3 * n, 101, dtype=dtype))
        read = ids.unique().long()
        size = 2.0 ** torch.randint(-10, 11, (len(read), 101), generator=generator(n + 1))
        table[read] = (randn(len(read), 101, seed=n + 2) * size).to(dtype)
        arguments = [table, ids]
        parts = table[ids].float()
        if signed:
            signs = random_signs(9, 101, out_dtype)
            sign_ids = torch.randint(0, 9, (ranges, n), generator=generator(n + 3)).int()
            arguments += [signs, sign_ids]
            parts = parts * signs[sign_ids]
        want = torch.zeros(n, 101)
        for part in parts:
            want = want + part
        buffer = nan_filled(n + 4, 101, dtype=out_dtype).to(device)
        tg.gather_rows(buffer[2:-2], *on(device, *arguments))
        assert torch.equal(buffer[2:-2].cpu(), want.to(out_dtype))
        assert buffer[:2].isnan().all() and buffer[-2:].isnan().all()


TIME = 5  # of an update of rows


def update_case(N, n, columns, dtype, seed):
    """Returns table, moments, rows, gradients. Rows that are not updated are NaN, and what surrounds them.

    The first row to update has a gradient of 0 and none before.
    """
    rows = torch.randperm(N, generator=generator(seed))[:n].int()
    table = nan_filled(N + 4, columns, dtype=dtype)[2:-2]
    moments = nan_filled(N + 4)[2:-2]
    last = torch.arange(N + 4, dtype=torch.int32)[2:-2] % TIME
    size = 10.0 ** torch.randint(-4, 5, (n, 1), generator=generator(seed + 1))
    grads = randn(n, columns, seed=seed + 2) * size
    table[rows] = randn(n, columns, seed=seed + 3, dtype=dtype)
    moments[rows] = (randn(n, seed=seed + 4) * size[:, 0]).square() * (torch.arange(n) % 3 > 0)
    grads[:1] = 0
    return table, moments, last, rows, grads


def updated_in_fp64(table, moments, last, rows, grads, beta2, lr, decay):
    """Returns the rows of both after an update."""
    squares = grads.double().square().mean(-1)
    old = table[rows].double()
    new = beta2 ** (TIME - last[rows]).double() * moments[rows].double() + (1 - beta2) * squares
    update = lr * grads.double() / (new.sqrt() + tg.ROW_EPS)[:, None]
    update += decay * old * (update * old > 0)
    return old - update, new, update


@pytest.mark.parametrize("beta2", [0.95, 0.5])
@FLOATS
def test_update_rows(device, dtype, beta2):
    """Checks moments and weights within a few roundings of fp64; nothing else may change."""
    decays = (beta2 ** torch.arange(TIME + 1).double()).float().to(device)
    time = torch.tensor(TIME).int()
    for N, n in ((40, 23), (31, 31)):
        case = update_case(N, n, 65, dtype, n)
        there = list(on(device, *case))
        weights, total, update = updated_in_fp64(*case, beta2, 0.3, 0.01)
        one_minus_beta2, step_size, decay = torch.tensor([1 - beta2, 0.3, 0.01])
        tg.row_adam_update(*there, decays, time, one_minus_beta2, step_size, decay)
        after = [t.cpu() for t in there]
        table, moments, last, rows, _ = after
        old = case[0][rows]
        bound = 2.0**-21 * (old.double().abs() + update.abs())
        if dtype == BF16:
            bound += torch.finfo(dtype).eps / 2 * weights.abs() + 1e-7
        torch.testing.assert_close(moments[rows].double(), total, rtol=2.0**-21, atol=0)
        assert ((table[rows].double() - weights).abs() <= bound).all()
        assert same_bits(table[rows[0]], old[0])
        assert (last[rows] == TIME).all() and torch.equal(after[4], case[4])
        others = torch.ones(N, dtype=torch.bool)
        others[rows.long()] = False
        for ours, before in zip(after[:3], case):
            assert same_bits(ours[others], before[others])


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_transpose_copy(device, dtype):
    """Checks random bits, NaNs and -0 among them."""
    for n, m in (130, 67), (64, 192):
        numbers = torch.randint(0, 256, (n, m * dtype.itemsize), generator=generator(n)).byte()
        (x,) = on(device, numbers.view(dtype))
        out = nan_filled(m, n, dtype=dtype).to(device)
        tg.write_transpose(out, x)
        assert same_bits(out, x.T)


@FLOATS
def test_add_columns(device, dtype):
    """Checks that only the given columns change. All others are NaN."""
    for k in 63, 64, 299:
        columns = torch.randperm(300, generator=generator(k))[:k].sort().values.int()
        x = randn(k, 65, dtype=dtype)
        before = nan_filled(65, 300, dtype=dtype)
        before[:, columns] = randn(65, k, seed=1, dtype=dtype)
        out, there, x_there = on(device, before, columns, x)
        tg.add_columns(out, there, x_there.T)
        before[:, columns] += x.T
        assert same_bits(out, before)


@FLOATS
def test_conversion_to_fp8(device, dtype):
    """Checks numbers and scales. Compiled code rounds quotients of bf16 numbers to fp32."""
    rounding = 0
    if dtype == BF16:
        rounding = 2**-8
    elif device != "cpu":
        rounding = 1e-6
    bank = randn(6, 48, 32, dtype=dtype)
    bank[5] = 0
    delayed = torch.tensor([[1.2, 0.4], [9.0, 3.0], [3.0, 1e-12]])  # cuts, leaves room
    for before in (torch.zeros(3, 2), delayed):
        ours = *fp8_buffers(bank), torch.ones(3, 3, 2, 1, 1), before.clone()
        inspect.unwrap(tg.convert_mlp_bank)(ours[:2], bank, *ours[2:])
        there, scales, amax = on(device, bank, torch.ones(3, 3, 2, 1, 1), before)
        theirs = *fp8_buffers(there), scales, amax
        tg.convert_mlp_bank(theirs[:2], there, scales, amax)
        for found, expected in zip(theirs, ours):
            found = found.cpu()
            assert found.dtype == expected.dtype and found.shape == expected.shape
            if found.element_size() > 1 or dtype == F32:
                torch.testing.assert_close(found.float(), expected.float(), rtol=rounding, atol=0)
            else:
                assert_codes_near(found, expected, 0.2)
