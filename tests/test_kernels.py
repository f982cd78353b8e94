"""Section 7's kernels: in Triton's interpreter against section 6 in float64, and on a GPU where there is one."""
import importlib.util
import math
import sys

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import train_gpt as tg
from interpreter import skip_without_interpreter

pytestmark = pytest.mark.numeric

F16 = 2.0 ** -11  # half a unit in the last place: what one rounding to float16 may do to a number
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def off(own, ref):
    """||own - ref|| / ||ref||; NaN, and so above every bound, if either holds one."""
    own, ref = own.double(), ref.double()
    return ((own - ref).norm() / ref.norm()).item()


def bits(t):
    """Whose equality tells -0 from 0 and calls a NaN equal to itself."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def poisoned(*shape, dtype=torch.float32):
    """All bits set: NaN in every float format."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 255, dtype=torch.uint8).view(dtype)


def framed(t, margin=3):
    """t within a larger tensor of NaN: whatever is read beyond its edge shows. Its last axis stays dense."""
    room = poisoned(*(n + 2 * margin for n in t.shape), dtype=t.dtype)
    inner = room[tuple(slice(margin, margin + n) for n in t.shape)]
    inner.copy_(t)
    return inner


LAYOUTS = {  # of a batch of matrices, or a matrix
    "dense": lambda t: t,
    "framed": framed,
    "transposed": lambda t: framed(t.mT.contiguous()).mT,
    "every other": lambda t: framed(t.repeat_interleave(2, -1))[..., ::2],
    "expanded": lambda t: t[..., :1, :].expand(t.shape),
    "constant": lambda t: t[..., :1, :1].expand(t.shape),  # as the gradient of a sum comes
}


# ------------------------------------------------------------------------------------------------------- the interpreter

class Guard(TorchFunctionMode):
    """Gives new tensors NaN and a wide margin, which must still be there at the end."""
    margin = 1 << 16

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.empty_like, torch.Tensor.new_empty) and out.numel():
            room = poisoned(out.numel() + 2 * self.margin, dtype=out.dtype)
            self.rooms.append(room)
            out = room[self.margin:-self.margin].view(out.shape)
        return out

    def __enter__(self):
        self.rooms = []
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for room in self.rooms:
            for margin in (room[:self.margin], room[-self.margin:]):
                assert (margin.view(torch.uint8) == 255).all(), "written beyond the end"


def own_triton():
    """Takes triton's Python modules out of sys.modules."""
    return {name: sys.modules.pop(name) for name in list(sys.modules)
            if name.split(".")[0] == "triton" and not name.startswith("triton._C")}


def mend(interpreter):
    """Two faults of triton 3.9's interpreter: a scalar condition that meets a block of them becomes int32, and is then refused
    as a mask; and rounding to 8 or 16 bits loses the carry into the exponent (1.9 becomes 1) and truncates small numbers."""
    splat, convert = interpreter.InterpreterBuilder.create_splat, interpreter._convert_float

    def create_splat(self, ret_ty, arg):
        out = splat(self, ret_ty, arg)
        out.data = out.data.astype(arg.data.dtype)
        return out

    def convert_float(x, from_dtype, to_dtype, rounding):
        if (from_dtype.name, to_dtype.name) not in (("fp32", "bf16"), ("fp32", "fp8e5")):
            return convert(x, from_dtype, to_dtype, rounding)
        dtype = {"bf16": torch.bfloat16, "fp8e5": torch.float8_e5m2}[to_dtype.name]
        return bits(torch.from_numpy(np.ascontiguousarray(x)).to(dtype)).numpy().view(interpreter._get_np_dtype(to_dtype))

    interpreter.InterpreterBuilder.create_splat, interpreter._convert_float = create_splat, convert_float


@pytest.fixture(scope="module")
def ti():
    """The script a second time, with its kernels interpreted. What @triton.jit makes is settled where it decorates, triton's
    own functions included; so triton, too, is imported a second time, and both copies stay out of everybody else's way."""
    skip_without_interpreter()
    kept = own_triton()
    spec = importlib.util.spec_from_file_location("train_gpt_interpreted", tg.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            spec.loader.exec_module(module)
            module.triton.knobs.runtime.interpret = True  # asked for again when a kernel runs
            interpreter = sys.modules["triton.runtime.interpreter"]
        finally:
            own_triton()
            sys.modules.update(kept)

    mend(interpreter)
    with np.errstate(all="ignore"):
        yield module
    del sys.modules[spec.name]


@pytest.fixture
def guarded():
    with Guard():
        yield


GRAM_SHAPES = [(1, 1, 1), (2, 1, 7), (3, 5, 1), (2, 63, 65), (1, 64, 64), (2, 65, 63), (1, 37, 131), (2, 130, 67), (1, 193, 5)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", GRAM_SHAPES, ids=str)
def test_gram(ti, guarded, shape, layout):
    n, M, K = shape
    x, extra = LAYOUTS[layout](randn(*shape, seed=M)), randn(n, M, M, seed=K)
    own = ti.triton_gram(x)
    assert off(own, tg.gram(x.double())) < 2e-6
    assert own.is_contiguous() and torch.equal(own, own.mT)
    symmetric = framed(extra + extra.mT)  # a batch of matrices as views
    own = ti.triton_gram(x, symmetric, 0.7, -0.3)
    assert off(own, tg.gram(x.double(), symmetric.double(), 0.7, -0.3)) < 2e-6
    assert torch.equal(own, own.mT)
    own = ti.triton_gram(x, extra, 0.7, -0.3)  # by construction: of what is no symmetric sum, the upper half counts
    assert torch.equal(own, own.mT)


@pytest.mark.parametrize("layout", ["framed", "transposed"])
def test_gram_in_float16(ti, guarded, layout):
    """Summed in float32 and rounded once."""
    x = LAYOUTS[layout](randn(2, 70, 129, dtype=torch.float16))
    assert off(own := ti.triton_gram(x), tg.gram(x.double())) < F16
    assert torch.equal(own, own.mT)
    assert off(ti.triton_gram(own, own, -0.7, 0.01), tg.gram(own.double(), own.double(), -0.7, 0.01)) < F16
    # What rounding took away: nothing would be left of it, had the product been rounded before the sum.
    assert off(ti.triton_gram(x, own, -1.0, 1.0), tg.gram(x.double(), own.double(), -1.0, 1.0)) < 5e-3


@pytest.mark.parametrize("shape", [(2, 70, 30), (3, 30, 70), (1, 65, 65), (2, 1, 9), (1, 9, 1)], ids=str)
def test_polar(ti, guarded, shape):
    g = randn(*shape, seed=1)
    own, exact = ti.polar(g, torch.float32, gram=ti.triton_gram), tg.polar(g.double(), torch.float64)
    assert off(own, exact) < 2e-5  # five steps, in which the products of ill-conditioned squares lose digits
    assert off(own, tg.polar(g, torch.float32)) < 2e-5


SQUARE_SHAPES = [(1, 1, 1), (127, 33, 129), (128, 32, 128), (129, 31, 127), (5, 70, 300), (300, 7, 5), (1100, 3, 257)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SQUARE_SHAPES, ids=str)  # the last: more tiles than one group, whose last is not full
def test_relu_square(ti, guarded, shape, layout):
    T, d, width = shape
    h, w = LAYOUTS[layout](randn(T, d, seed=T)), framed(randn(width, d, seed=width))
    r, square = ti.triton_relu_square(h, w)
    exact = tg.relu_square(h.double(), w.double())
    torch.testing.assert_close(r.double(), exact[0], rtol=1e-5, atol=1e-6 * d ** 0.5)
    torch.testing.assert_close(square.double(), exact[1], rtol=1e-5, atol=1e-5 * d)
    assert torch.equal(square, r * r)

    dy, w, kept = h, LAYOUTS["every other"](randn(width, d, seed=d)), randn(T, width, seed=2).relu()
    r = kept.clone()
    da, again = ti.triton_relu_square_grad(dy, w, r)
    torch.testing.assert_close(da.double(), tg.relu_square_grad(dy.double(), w.double(), kept.double())[0],
                               rtol=1e-5, atol=1e-5 * d ** 0.5)
    assert torch.equal(again, kept * kept) and torch.equal(r, kept)


def test_relu_square_in_float16(ti, guarded):
    h, w = randn(130, 40, dtype=torch.float16), randn(70, 40, seed=1, dtype=torch.float16)
    r, square = ti.triton_relu_square(h, w)
    assert off(r, tg.relu_square(h.double(), w.double())[0]) < F16
    assert torch.equal(square, r * r)  # of r as it is kept: the backward makes the same numbers of it
    da, again = ti.triton_relu_square_grad(h, w, r)
    assert off(da, tg.relu_square_grad(h.double(), w.double(), r.double())[0]) < F16
    assert torch.equal(again, square)


def test_relu_square_keeps_nan(ti):
    h, w = randn(5, 4), randn(3, 4, seed=1)
    w[1, 2] = math.nan
    for own, exact in zip(ti.triton_relu_square(h, w), tg.relu_square(h, w)):
        assert torch.equal(own.isnan(), exact.isnan())


@pytest.mark.parametrize("unit", [0.0, 1e-3])
def test_loss_keeps_nan(ti, unit):
    logits = randn(3, 50)
    logits[1, 7] = math.nan
    targets = torch.tensor([1, 2, 3])
    for own, exact in zip(*(loss(logits, targets, (1.0,), unit) for loss in (ti.triton_softcap_loss, tg.softcap_loss))):
        assert torch.equal(own.float().isnan(), exact.float().isnan())


WEIGHTS = [(1.0,), (1.0, 0.5), (1.0, 0.5, 0.25)]


def loss_case(n, V, K, seed):
    """Logits as rows of something wider; targets that often meet within a row's K; from none to all rows lack the last ones."""
    g = generator(seed)
    logits = framed(torch.randn(n, V, generator=g) * 20)
    targets = torch.randint(0, V if seed % 2 else min(V, 3), (n + seed % K,), generator=g)
    return logits, targets


def check_loss(own, exact):
    """z reaches 23, of whose digits its exponential takes some: errors of 23 * 2^-23 in p."""
    (losses, gradient), (exact_losses, exact_gradient) = own, exact
    assert losses.dtype == torch.float32 and gradient.is_contiguous()
    torch.testing.assert_close(losses.double(), exact_losses, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=1e-5)
    if exact_gradient.norm() > 1e-2:
        assert off(gradient, exact_gradient) < 1e-5


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("V", [1, 2, 131, 4095, 4096, 4097, 8209])
def test_softcap_loss(ti, guarded, V, weights):
    for seed, n in enumerate((1, 2, 3, 7)):
        logits, targets = loss_case(n, V, len(weights), seed)
        own = ti.triton_softcap_loss(logits, targets, weights)
        check_loss(own, tg.softcap_loss(logits.double(), targets, weights))


def test_softcap_loss_reads_no_target_beyond_the_last(ti, guarded):
    """Nor takes its weight for one that is there: what follows in memory is a token like others."""
    logits, room, weights = randn(4, 200) * 9, torch.arange(20), (1.0, 0.5, 0.25)
    for targets in (room[:4], room[:5], room[:6]):
        check_loss(ti.triton_softcap_loss(logits, targets, weights), tg.softcap_loss(logits.double(), targets, weights))


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
def test_softcap_loss_of_extreme_logits(ti, guarded, weights):
    extreme = torch.tensor([1e4, -1e4, 3e38, -3e38, 65504, -65504, 80, -80, 1e-40, -0.0, 0.0, -5.0])
    for row in (extreme, extreme.flip(0), extreme[:1].expand(12), extreme[1:2].expand(12), extreme[2:4].repeat(6)):
        logits = framed(torch.stack([row, row.roll(1), row.roll(5)]))
        for targets in (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([9, 9, 9, 9]), torch.tensor([11, 3, 2])):
            targets = targets[:2 + len(weights)]
            check_loss(ti.triton_softcap_loss(logits, targets, weights), tg.softcap_loss(logits.double(), targets, weights))


def test_softcap_loss_in_float16(ti, guarded):
    logits, targets = loss_case(5, 4999, 3, seed=1)
    logits = logits.half()
    losses, gradient = ti.triton_softcap_loss(logits, targets, (1.0, 0.5, 0.25))
    exact = tg.softcap_loss(logits.double(), targets, (1.0, 0.5, 0.25))
    assert gradient.dtype == torch.float16 and off(losses, exact[0]) < 2e-6
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1.1 * F16, atol=2.0 ** -24)  # its smallest number


def steps(a, b):
    """How many e5m2 numbers lie between, each way."""
    places = [(t.view(torch.uint8) & 127).int() * (1 - 2 * (t.view(torch.uint8) >> 7).int()) for t in (a, b)]
    return (places[0] - places[1]).abs()


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("unit", [tg.FP8_GRAD, tg.FP8_GRAD / 64, 1e-3, 1.0])
def test_softcap_loss_in_fp8(ti, guarded, unit, weights):
    for V, seed in ((131, 0), (4097, 1)):
        logits, targets = loss_case(5, V, len(weights), seed)
        losses, own = ti.triton_softcap_loss(logits, targets, weights, unit)
        exact = tg.softcap_loss(logits.double(), targets, weights)
        torch.testing.assert_close(losses.double(), exact[0], rtol=1e-6, atol=2e-5)
        apart = steps(own, tg.to_fp8(exact[1], unit, torch.float8_e5m2))
        assert own.dtype == torch.float8_e5m2 and own.is_contiguous()
        assert apart.max() <= 1 and apart.float().mean() < 0.01  # only where rounding is in the balance


def test_softcap_loss_in_fp8_saturates(ti, guarded):
    logits, targets = randn(4, 300) * 9, torch.tensor([5, 6, 7, 299])
    own = ti.triton_softcap_loss(logits, targets, (1.0,), 1e-12)[1]
    plain = tg.softcap_loss(logits, targets, (1.0,), 1e-12)[1]
    assert torch.equal(bits(own), bits(plain)) and own.float().abs().max() == 57344 and own[0, 5].float() == -57344


def row_index(numbers, N, seed):
    """By the loader's own hand; about half of the rows are fresh."""
    T, marks = len(numbers), torch.rand(N, generator=generator(seed)).numpy() < 0.5
    room = tg.RowIndex(*(torch.empty(n, dtype=dtype) for n, dtype in
                         ((T, torch.int32), (T, torch.int32), (T + 1, torch.int32), (T, torch.bool))))
    return tg.index_rows(numbers.to(torch.int32).numpy(), marks, room)


def check_sum_rows(ti, numbers, N, shape, seed, dtype=torch.float32, layout=lambda t: t):
    """Bit by bit: the additions are the same, in the same order. Fresh rows, untouched ones and what surrounds the table are
    NaN before, and the latter two stay so."""
    index, grad = row_index(numbers, N, seed), layout(randn(len(numbers), *shape, seed=seed, dtype=dtype))
    room = poisoned(N + 4, *shape, dtype=dtype)
    old = index.rows[~index.fresh].long() + 2
    room[old] = randn(len(old), *shape, seed=seed + 1, dtype=dtype)
    expected = room.clone()
    tg.sum_rows(expected[2:-2], grad, index)
    ti.triton_sum_rows(room[2:-2], grad, index)
    assert torch.equal(bits(room), bits(expected))
    assert not room[index.rows.long() + 2].isnan().any()


@pytest.mark.parametrize("columns", [1, 5, 255, 256, 257, 769])
@pytest.mark.parametrize("layout", ["dense", "framed"])
def test_sum_rows(ti, columns, layout):
    for seed, (T, N) in enumerate(((1, 1), (9, 40), (50, 7))):
        numbers = torch.randint(0, N, (T,), generator=generator(seed))
        check_sum_rows(ti, numbers, N, (columns,), seed, layout=LAYOUTS[layout])


def test_sum_rows_of_every_length(ti):
    """Around multiples of the loads that are on their way at once, and one much longer."""
    lengths = [*range(1, 18), 700]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    check_sum_rows(ti, numbers[torch.randperm(len(numbers), generator=generator(0))], len(lengths) + 3, (3,), seed=0)


@pytest.mark.parametrize("layout", [lambda t: t, framed, lambda t: framed(t.transpose(0, 1)).transpose(0, 1),
                                    lambda t: t[:, :1].expand(t.shape)], ids=["dense", "framed", "table by table", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sum_rows_of_several_tables(ti, dtype, layout):
    """In bf16, which has too few digits to hide a sum that was rounded between."""
    numbers = torch.randint(0, 9, (60,), generator=generator(3))
    check_sum_rows(ti, numbers, 11, (3, 101), 3, dtype, layout)


def test_sum_rows_in_rows_beyond_16_bits(ti):
    numbers = torch.tensor([70000, 3, 70000, 69999, 65536, 0])
    check_sum_rows(ti, numbers, 70001, (2,), seed=4)


TRANSPOSE_SHAPES = [(1, 1), (1, 70), (70, 1), (63, 65), (64, 64), (65, 63), (5, 193), (130, 67)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transpose_copy(ti, dtype):
    """Any bits, NaNs and -0 among them."""
    for n, m in TRANSPOSE_SHAPES:
        x = framed(torch.randint(0, 256, (n, m * dtype.itemsize), generator=generator(n), dtype=torch.uint8).view(dtype))
        room = poisoned(m + 6, n + 6, dtype=dtype)
        expected = room.clone()
        tg.transpose_copy(expected[3:-3, 3:-3], x)
        ti.triton_transpose_copy(room[3:-3, 3:-3], x)
        assert torch.equal(bits(room), bits(expected)), (n, m)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 70), (300, 63), (300, 64), (300, 65), (70, 193)], ids=str)
def test_transpose_add(ti, shape, dtype):
    """Rows that are not named are NaN, there and here: they are neither added nor changed."""
    n, m = shape
    for k in {0, 1, min(n, 63), min(n, 64), min(n, 65), n}:
        rows = torch.randperm(n, generator=generator(k))[:k].sort().values.int()
        x, out = framed(poisoned(n, m, dtype=dtype)), framed(poisoned(m, n, dtype=dtype))
        x[rows], out[:, rows] = randn(k, m, dtype=dtype), randn(m, k, seed=1, dtype=dtype)
        room = out._base
        expected = room.clone()
        tg.transpose_add(expected[3:-3, 3:-3], x, rows)
        ti.triton_transpose_add(out, x, rows)
        assert torch.equal(bits(room), bits(expected)), k


# ----------------------------------------------------------------------------------------------------------- on a GPU

BF16 = 2.0 ** -9 * 1.01  # one rounding, and some sums in fp32


def gpu(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@needs_gpu
@pytest.mark.parametrize("shape", [(3, 3072, 768), (3, 768, 768), (66, 256, 768), (1, 131, 77)], ids=str)
def test_gpu_gram(shape):
    g = gpu(*shape)
    for x in (g, g.mT):
        own = tg.triton_gram(x)
        assert off(own, tg.gram(x.double())) < BF16 and torch.equal(own, own.mT)
        mixed = tg.triton_gram(own, own, -2.5, 1e-4)
        assert off(mixed, tg.gram(own.double(), own.double(), -2.5, 1e-4)) < BF16 and torch.equal(mixed, mixed.mT)


@needs_gpu
@pytest.mark.parametrize("shape", [(3, 3072, 768), (2, 768, 3072), (4, 768, 768)], ids=str)
def test_gpu_polar(shape):
    """As far from the exact one as the plain form is, whose products round in the same places."""
    g = gpu(*shape)
    exact = tg.polar(g.double(), torch.float64)
    own, plain = (tg.polar(g, torch.bfloat16, gram=gram) for gram in (tg.triton_gram, tg.gram))
    assert off(own, exact) < 1.5 * off(plain, exact)


@needs_gpu
@pytest.mark.parametrize("shape", [(16384, 768, 3072), (1109, 77, 301)], ids=str)
def test_gpu_relu_square(shape):
    T, d, width = shape
    h, w, dy = gpu(T, d), gpu(width, d, seed=1) / d ** 0.5, gpu(T, d, seed=2)
    r, square = tg.triton_relu_square(h, w)
    assert off(r, tg.relu_square(h.double(), w.double())[0]) < BF16
    assert torch.equal(square, r.square())
    for dy in (dy, dy.T.contiguous().T, dy[:1].expand(T, d)):
        da, again = tg.triton_relu_square_grad(dy, w, r)
        assert off(da, tg.relu_square_grad(dy.double(), w.double(), r.double())[0]) < BF16
        assert torch.equal(again, square)


@needs_gpu
@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("shape", [(8192, 50304), (37, 50257)], ids=str)
def test_gpu_softcap_loss(shape, weights):
    n, V = shape
    logits = gpu(n, V) * 10
    targets = torch.randint(0, V, (n + len(weights) // 2,), generator=generator(0)).cuda()
    losses, gradient = tg.triton_softcap_loss(logits, targets, weights)
    losses_too, eighth = tg.triton_softcap_loss(logits, targets, weights, tg.FP8_GRAD)
    assert torch.equal(losses, losses_too)
    for i in range(0, n, 512):  # the exact ones take 16 times the memory
        part = slice(i, i + 512)
        exact = tg.softcap_loss(logits[part].double(), targets[i:i + 511 + len(weights)], weights)
        assert off(losses[part], exact[0]) < 1e-5 and off(gradient[part], exact[1]) < BF16
        apart = steps(eighth[part], tg.to_fp8(exact[1], tg.FP8_GRAD, torch.float8_e5m2))
        assert apart.max() <= 1 and apart.float().mean() < 0.01


@needs_gpu
@pytest.mark.parametrize("N, shape", [(251520, (768,)), (50304, (5, 768))], ids=str)
def test_gpu_sum_rows(N, shape):
    """Bit by bit what the plain form makes on the CPU; most positions touch few rows, as words do."""
    numbers = (N * torch.rand(16384, generator=generator(0)) ** 8).long()
    index, grad, out = row_index(numbers, N, 1), gpu(len(numbers), *shape), poisoned(N, *shape, dtype=torch.bfloat16)
    old = index.rows[~index.fresh].long()
    out[old] = randn(len(old), *shape, dtype=torch.bfloat16)
    own = out.cuda()
    tg.triton_sum_rows(own, grad, tg.RowIndex(*(t.cuda() for t in index)))
    tg.sum_rows(out, grad.cpu(), index)
    assert torch.equal(bits(own.cpu()), bits(out))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(768, 50304), (8192, 768), (77, 131)], ids=str)
def test_gpu_transpose_copy(shape, dtype):
    for x in (gpu(*shape, dtype=dtype), gpu(*shape[::-1], dtype=dtype)):
        out = torch.empty(x.size(1), x.size(0), dtype=dtype, device="cuda")
        tg.triton_transpose_copy(out, x)
        assert torch.equal(bits(out), bits(x.T))


@needs_gpu
def test_gpu_transpose_add():
    x, out = gpu(50304, 768), gpu(768, 50304, seed=1)
    rows = torch.randperm(50304, generator=generator(0))[:9001].sort().values.int().cuda()
    expected = out.clone()
    expected[:, rows.long()] += x[rows.long()].T
    tg.triton_transpose_add(out, x, rows)
    assert torch.equal(bits(out), bits(expected))


def test_what_flash_attention_is_told(monkeypatch):
    """The window counts the positions before a query, as ours does; documents are the same for queries and keys."""
    from torch.nn.attention import varlen
    told = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **options: told.append((args, options)) or "y")
    assert tg.flash_attention("q", "k", "v", "ends", 2300, 128, 0.12) == "y"
    assert told == [(("q", "k", "v", "ends", "ends", 2300, 2300), dict(scale=0.12, window_size=(128, 0)))]


@needs_gpu
@pytest.mark.parametrize("window", [128, 1, 5000])
def test_gpu_flash_attention(window):
    T, H, D = 4096, 6, 128
    ends = torch.tensor([0, 1, 700, 700, 701, 1500, 1500, 3800, T, T, T, T], dtype=torch.int32, device="cuda")
    results = []
    for attention, dtype in ((tg.flash_attention, torch.bfloat16), (tg.attention, torch.float32)):
        q, k, v = (gpu(T, H, D, seed=seed).to(dtype).requires_grad_() for seed in range(3))
        y = attention(q, k, v, ends, 2300, window, 0.12)
        y.backward(gpu(T, H, D, seed=3).to(dtype))
        results.append((y, q.grad, k.grad, v.grad))
    for name, own, exact in zip(("y", "q", "k", "v"), *results):
        assert off(own, exact) < 0.02 and own.shape == exact.shape, name  # probabilities are rounded before their product


@needs_gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="the card has no FP8")
@pytest.mark.parametrize("fast", [False, True])
def test_gpu_fp8_product(fast):
    """The head's three: logits; the gradient of x; that of the head."""
    n, d, V = 2048, 768, 50304
    x, w, g = (gpu(*shape, seed=i).to(dtype) for i, (shape, dtype) in enumerate(
        (((n, d), torch.float8_e4m3fn), ((V, d), torch.float8_e4m3fn), ((n, V), torch.float8_e5m2))))
    turned = lambda t: t.view(torch.uint8).T.contiguous().view(t.dtype)
    for a, b in ((x, w.T), (g, turned(w).T), (turned(x), turned(g).T)):
        exact = a.float().double() @ b.float().double() * 0.37
        for dtype, bound in ((torch.bfloat16, BF16 + 2e-3), (torch.float32, 2e-3)):  # sums keep 14 bits on Hopper
            assert off(tg.fp8_product(a, b, torch.full((), 0.37, device="cuda"), dtype, fast), exact) < bound
