"""Tests the Triton kernels against plain torch, in Triton's interpreter; what FlashAttention is given."""

import importlib.util
import math
import re
import sys

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import train_gpt as tg
from golden_inputs import fp8_buffers, generator, same_bits
from launch import SOURCE

pytestmark = [pytest.mark.numeric, pytest.mark.forms("a Triton kernel and its plain form")]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def rel_err(actual, ref):
    """Returns ||actual - ref|| / ||ref||. A NaN in either gives NaN, which no bound accepts."""
    actual, ref = actual.double(), ref.double()
    return ((actual - ref).norm() / ref.norm()).item()


def nan_filled(*shape, dtype=torch.float32):
    """Returns a tensor with all bits set: NaN in every float format."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 255, dtype=torch.uint8).view(dtype)


def nan_padded(t):
    """Copies t into a larger tensor of NaN, so that reads beyond its edge show. Its last axis stays dense."""
    buffer = nan_filled(*(n + 6 for n in t.shape), dtype=t.dtype)
    inner = buffer[tuple(slice(3, n + 3) for n in t.shape)]
    inner.copy_(t)
    return inner


LAYOUTS = {  # memory layouts of a matrix, or of a batch of matrices
    "dense": lambda t: t,
    "nan padded": nan_padded,
    "transposed": lambda t: nan_padded(t.mT.contiguous()).mT,
    "every other": lambda t: nan_padded(t.repeat_interleave(2, -1))[..., ::2],
    "expanded": lambda t: t[..., :1, :].expand(t.shape),
    "constant": lambda t: t[..., :1, :1].expand(t.shape),  # the gradient of a sum comes like this
}


# ------------------------------------------------------------------------------------ in Triton's interpreter


class Guard(TorchFunctionMode):
    """Surrounds new tensors with a wide margin of NaN."""

    margin = 1 << 16

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.empty_like, torch.Tensor.new_empty) and out.numel():
            buffer = nan_filled(out.numel() + 2 * self.margin, dtype=out.dtype)
            self.buffers.append(buffer)
            out = buffer[self.margin : -self.margin].view(out.shape)
        return out


def pop_triton_modules():
    """Removes triton's Python modules from sys.modules and returns them."""
    return {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "triton" and not name.startswith("triton._C")
    }


def patch_interpreter(interpreter):
    """Works around a bug of Triton's interpreter.

    Rounding to 8 or 16 bits loses the carry into the exponent (1.9 becomes 1), and truncates small numbers.
    """
    convert = interpreter._convert_float

    def convert_float(x, from_dtype, to_dtype, rounding):
        dtypes = {"bf16": torch.bfloat16, "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}
        if from_dtype.name != "fp32" or to_dtype.name not in dtypes:
            return convert(x, from_dtype, to_dtype, rounding)
        dtype = dtypes[to_dtype.name]
        rounded = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
        return rounded.view(torch.uint8).numpy().view(interpreter._get_np_dtype(to_dtype))

    interpreter._convert_float = convert_float


@pytest.fixture(scope="module")
def interpreted():
    """Imports the script a second time, with interpreted kernels.

    @triton.jit chooses between compiler and interpreter when it decorates, in triton's own library too. So
    triton is imported a second time as well, and both copies are hidden from the other tests.
    """
    pytest.importorskip("triton")
    saved_modules = pop_triton_modules()
    spec = importlib.util.spec_from_file_location("train_gpt_interpreted", tg.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            spec.loader.exec_module(module)
            module.triton.knobs.runtime.interpret = True  # read again when a kernel runs
            interpreter = sys.modules["triton.runtime.interpreter"]
        finally:
            pop_triton_modules()
            sys.modules.update(saved_modules)

    patch_interpreter(interpreter)
    with np.errstate(all="ignore"):
        yield module
    del sys.modules[spec.name]
    module.LIBRARY = None  # which ends its operation: another module's fixture defines one of the same name


@pytest.fixture
def guarded():
    """Checks at the end that nothing wrote beyond the ends of new tensors."""
    with Guard() as guard:
        yield
    for buffer in guard.buffers:
        for margin in buffer[: guard.margin], buffer[-guard.margin :]:
            assert (margin.view(torch.uint8) == 255).all()


# The last one has more tiles than fit in one group, and its last group is not full.
RELU_SQUARE_SHAPES = [(1, 1, 1), (127, 33, 129), (129, 31, 127), (5, 70, 300), (1100, 3, 257)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", RELU_SQUARE_SHAPES, ids=str)
def test_relu_square(interpreted, guarded, shape, layout):
    T, d, width = shape
    h = LAYOUTS[layout](randn(T, d, seed=T))
    w = nan_padded(randn(width, d, seed=width))
    square = interpreted.triton_relu_square(h, w)
    exact = tg.relu_square(h.double(), w.double())
    torch.testing.assert_close(square.double(), exact, rtol=1e-5, atol=1e-5 * d)

    dy = h
    w = LAYOUTS["every other"](randn(width, d, seed=d))
    square = randn(T, width, seed=2).relu().square()
    before = square.clone()
    da = interpreted.triton_relu_square_grad(dy, w, square)
    exact = tg.relu_square_grad(dy.double(), w.double(), before.double())
    torch.testing.assert_close(da.double(), exact, rtol=1e-5, atol=1e-5 * d**0.5)
    assert torch.equal(square, before)


def fp8_case(T, d, width, backward):
    """Returns an MLP in FP8 whose scales cut some results, and relu_square_fp8's other arguments."""
    h = randn(T, d)
    bank = randn(2, width, d, seed=1)
    dy = randn(T, d, seed=2)
    # As the model has them: each at a multiple of 16 bytes, and nothing may be read between them.
    scales = torch.full((3, 2, 4, 1), torch.nan)[:, :, :1]
    scales[:] = torch.tensor([[2**-6, 2**-4], [0, 0], [0, 0]])[..., None, None]
    weights, transposed = out = fp8_buffers(bank)
    tg.convert_mlp_bank(out, bank, scales[None], torch.zeros(1, 2))
    square = (h @ bank[0].T).relu().square()
    da = 2 * square.sqrt() * (dy @ bank[1].T)
    scales[2, :, 0, 0] = torch.stack([square.max() / 600, da.abs().max() / 70000])
    mlp = tg.FP8Operands(weights[0], transposed[0], scales, torch.full((3, 2), 1e-9), 1)
    if not backward:
        return tg.to_fp8(h, scales[0, 0], torch.float8_e4m3fn), mlp, None
    square8 = tg.to_fp8(square, scales[2, 0], torch.float8_e4m3fn)
    return tg.to_fp8(dy, scales[0, 1], torch.float8_e5m2), mlp, square8


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("T, d, width", [(16, 16, 16), (144, 48, 144), (208, 80, 16), (32, 16, 272)])
def test_relu_square_fp8(interpreted, guarded, T, d, width, backward):
    """Compares codes, both layouts, and maxima; sums of another order may round to the next bf16 number."""
    a8, mlp, square8 = fp8_case(T, d, width, backward)
    want, _ = tg.relu_square_fp8(a8, mlp, square8)
    assert (want.float().abs() == torch.finfo(a8.dtype).max).any()
    want_amax = mlp.amax.clone()
    mlp.amax.fill_(1e-9)
    found, turned = interpreted.triton_relu_square_fp8(a8, mlp, square8)
    assert found.dtype == a8.dtype and same_bits(found.T, turned)
    assert_codes_near(found, want, 0.001)
    torch.testing.assert_close(mlp.amax, want_amax, rtol=2**-7, atol=0)
    assert (mlp.amax > 1e-6).nonzero().tolist() == [[1, int(backward)]]
    for run in (tg.relu_square_fp8, interpreted.triton_relu_square_fp8):
        mlp.amax.fill_(1e9)
        run(a8, mlp, square8)
        assert (mlp.amax == 1e9).all()  # a larger maximum stays


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("T, d", [(16, 16), (144, 48), (80, 200)])
def test_both_layouts(interpreted, guarded, T, d, dtype):
    """Compares codes, also of numbers that saturate, for a scale whose inverse is exact, as in a step."""
    x = randn(T, d) * 1000
    unit = torch.tensor([[2.0**-6]])
    x[0, 1] = math.nan
    want, want_turned = tg.cast_and_transpose(x, unit, dtype)
    found, turned = interpreted.triton_cast_and_transpose(x, unit, dtype)
    assert (want.float().abs() == torch.finfo(dtype).max).any() and found.dtype == turned.dtype == dtype
    assert same_bits([found, turned], [want, want_turned])


def test_nan_stays(interpreted):
    """Checks losses and their gradients, also in FP8, and squares."""
    x = randn(3, 50)
    x[1, 7] = math.nan
    targets = torch.tensor([[1], [2], [3]])
    for unit in 0.0, 1e-3:
        found = interpreted.triton_softcap_loss(x, targets, torch.ones(1), unit)
        for actual, exact in zip(found, tg.softcap_loss(x, targets, torch.ones(1), unit)):
            assert torch.equal(actual.isnan(), exact.isnan()) and actual.isnan().any()
    square = interpreted.triton_relu_square(randn(5, 50, seed=1), x)
    assert square.isnan().tolist() == 5 * [[False, True, False]]


WEIGHTS = [torch.tensor([1.0, 0.5, 0.125, 0.25][:count]) for count in range(1, 5)]


def loss_case(n, V, K, seed):
    """Returns strided logits (n, V) and targets (n, K), a fourth of them -1. Even seeds: 3 tokens."""
    g = generator(seed)
    logits = nan_padded(torch.randn(n, V, generator=g) * 20)
    targets = torch.randint(0, V if seed % 2 else min(V, 3), (n, K), generator=g)
    targets[torch.rand(n, K, generator=g) < 0.25] = -1
    return logits, targets


def check_loss(actual, exact):
    """Compares losses and gradients. z reaches 23, so probabilities have fp32 errors of 23 * 2^-23."""
    (losses, grad), (exact_losses, exact_grad) = actual, exact
    assert losses.dtype == torch.float32 and grad.is_contiguous()
    torch.testing.assert_close(losses.double(), exact_losses, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=1e-5)
    if exact_grad.norm() > 1e-2:
        assert rel_err(grad, exact_grad) < 1e-5


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("V", [1, 131, 4095, 4096, 4097, 8209])
def test_softcap_loss(interpreted, guarded, V, weights):
    for seed, n in enumerate((1, 2, 3, 7)):
        logits, targets = loss_case(n, V, len(weights), seed)
        actual = interpreted.triton_softcap_loss(logits, targets, weights)
        check_loss(actual, tg.softcap_loss(logits.double(), targets, weights))


def test_softcap_loss_of_extreme_logits(interpreted, guarded):
    extreme = torch.tensor([1e4, -1e4, 3e38, -3e38, 65504, -65504, 80, -80, 1e-40, -0.0, 0.0, -5.0])
    logits = nan_padded(torch.stack([extreme.roll(i) for i in range(12)] + [extreme[:1].expand(12)]))
    for weights in WEIGHTS:
        targets = torch.randint(-1, 12, (13, len(weights)), generator=generator(0))
        actual = interpreted.triton_softcap_loss(logits, targets, weights)
        check_loss(actual, tg.softcap_loss(logits.double(), targets, weights))


def fp8_steps_apart(a, b):
    """Counts the e5m2 numbers from a to b, element by element."""
    places = [(t.view(torch.uint8) & 127).int() * (1 - 2 * (t.view(torch.uint8) >> 7).int()) for t in (a, b)]
    return (places[0] - places[1]).abs()


def assert_codes_near(a, b, share):
    """Checks that codes are equal or neighbours, and that less than this share differ, those near ties."""
    apart = fp8_steps_apart(a, b)
    assert apart.max() <= 1 and apart.float().mean() < share


@pytest.mark.parametrize("unit", [tg.FP8_DLOGITS_SCALE, tg.FP8_DLOGITS_SCALE / 64, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_softcap_loss_in_fp8(interpreted, guarded, unit, dtype):
    """Compares the gradient with fp64, and its two layouts, also with a pointer; rows of several tiles."""
    for (n, V), weights in zip([(5, 131), (32, 128), (70, 300), (3, 4097)], WEIGHTS):
        logits, targets = loss_case(n, V, len(weights), seed=n)
        if dtype.itemsize == 1:
            logits = tg.to_fp8(logits, 1.0, dtype)
        found = interpreted.triton_softcap_loss(logits, targets, weights, unit)
        losses, exact = tg.softcap_loss(logits.float().double(), targets, weights)
        torch.testing.assert_close(found[0].double(), losses, rtol=1e-6, atol=2e-5)
        assert_codes_near(found[1], tg.to_fp8(exact, unit, torch.float8_e5m2), 0.01)
        numbers = torch.rand(2, n, generator=generator(2)) / 2
        copies = tg.PointerOutput(numbers, torch.tensor([V - 1]), torch.empty_like(numbers))
        pointed = interpreted.triton_softcap_loss(logits, targets, weights, unit, copies)
        for _, grad, transposed in (found, pointed):
            assert grad.dtype == torch.float8_e5m2 and transposed.is_contiguous()
            assert same_bits(transposed, grad.T)


def pointer_case(T, D, cuts, window, seed):
    """Returns pointer()'s arguments for documents that end at `cuts`, and a gradient of its weights."""
    g = generator(seed)
    ends = torch.tensor([0, *sorted(cuts), T, T, T], dtype=torch.int32)
    tokens = torch.randint(0, 4, (T + 1,), generator=g)
    q, k, sink_scores = (nan_padded(torch.randn(n, generator=g)) for n in ((T, D), (T, D), (T,)))
    micro_batch = tg.MicroBatch(tokens[:-1].int(), tokens[1:], None, None, ends, T)
    return (tg.PointerInputs(q, k, sink_scores), micro_batch, window), torch.randn(2, T, generator=g)


def pointer_and_grad(script, args, grad, prefix=""):
    """Returns the weights, the logarithms of the sums, and the gradients of the queries."""
    results = getattr(script, f"{prefix}pointer")(*args)
    return *results, *getattr(script, f"{prefix}pointer_grad")(*args, *results, grad)


def exact_pointer(args, grad):
    queries = tg.PointerInputs(*(t.double() for t in args[0]))
    return pointer_and_grad(tg, (queries, *args[1:]), grad.double())


# T, D, ends of documents, the window: among them documents of one token and none, that end at and between the
# tiles' edges.
POINTER_CASES = [
    (1, 16, [], 1),
    (2, 16, [], 9),
    (64, 16, [], 64),
    (65, 32, [1, 2, 3, 64], 2**31 - 1),
    (63, 16, range(63), 5),
    (129, 128, [64, 64, 65, 128], 1),
    (256, 16, [], 100),
    (200, 64, [10, 100, 199], 63),
    (296, 32, [7, 8, 60, 130, 131, 250], 75),
]


@pytest.mark.parametrize("case", POINTER_CASES, ids=lambda case: f"{case[0]}x{case[1]} within {case[3]}")
def test_pointer(interpreted, guarded, case):
    args, grad = pointer_case(*case, seed=case[0])
    for actual, exact in zip(pointer_and_grad(interpreted, args, grad, "triton_"), exact_pointer(args, grad)):
        assert actual.dtype == torch.float32 and actual.is_contiguous()
        torch.testing.assert_close(actual.double(), exact, rtol=2e-6, atol=4e-6)


def test_pointer_of_extreme_scores(interpreted, guarded):
    """Scores are multiples of 1e4, without rounding, so that ties are exact."""
    args, grad = pointer_case(150, 16, [70], 100, seed=3)
    q, k, sink_scores = args[0]
    q.copy_((q * 2).round() * 4e4), k.copy_(k.sign() * (torch.arange(16) == 0)), sink_scores.mul_(2e4)
    exact = exact_pointer(args, grad)
    assert exact[1].min() < -1e4 and exact[1].max() > 1e4 and ((0.1 < exact[0]) & (exact[0] < 0.9)).any()
    found = pointer_and_grad(interpreted, args, grad, "triton_")
    for actual, want, bound in zip(found, exact, (1e-6, 1e-6, 2e-3, 2e-3, 1e-6)):
        assert rel_err(actual, want) < bound  # gradients have what rounds the logarithm of a sum, 1e-7 of 1e4


@pytest.mark.parametrize("cuts, window, last", [([128], 256, 128), ([], 20, 108)])
def test_the_pointer_reads_no_tiles_that_it_does_not_see(interpreted, guarded, cuts, window, last):
    """A NaN of an earlier document, or before the window, would show, though masked: 0 * NaN is NaN."""
    args, grad = pointer_case(256, 16, cuts, window, seed=5)
    args[0].k[:last:2] = math.nan
    weights, *others = pointer_and_grad(interpreted, args, grad, "triton_")
    for result in (weights.T, *others):
        assert result[128:].isfinite().all()


@pytest.mark.parametrize("name", ["q", "k", "sink_scores"])
def test_nan_stays_in_the_pointer(interpreted, guarded, name):
    """A NaN shows in what it enters: in position 70's own results, or in those of the queries behind it."""
    args, grad = pointer_case(150, 16, [40, 120], 30, seed=4)
    getattr(args[0], name)[70] = math.nan
    weights, lse, dq, dk, sink_grad = pointer_and_grad(interpreted, args, grad, "triton_")
    seen = slice(71, 101) if name == "k" else slice(70, 71)
    for result in (*weights, lse, sink_grad):
        assert result[seen].isnan().all()
        result[seen] = 0
        assert result.isfinite().all()
    reached = dk[70:100] if name == "k" else dk[40:70]
    assert reached.isnan().all() and dq[seen, 0].isnan().all()


def random_signs(rows, columns, dtype):
    return (torch.randint(0, 2, (rows, columns), generator=generator(rows)) * 2 - 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (255,), (257,), (769,), (3, 101)], ids=str)
@pytest.mark.parametrize("signed", [False, True])
def test_segment_sum_rows(interpreted, shape, dtype, signed):
    """Checks equal bits: the kernel does the same additions in the same order.

    Untouched rows and what surrounds tensors start as NaN. The model's signs do not reach rows that have
    none, as tokens' do not.
    """
    for T, N in (1, 1), (9, 40), (50, 7):
        row_ids = torch.randint(0, N, (T,), generator=generator(T), dtype=torch.int32)
        sign_ids = torch.randint(0, 20, (1, T), generator=generator(T), dtype=torch.int32)
        index = tg.make_segments(row_ids, sign_ids if signed else None)
        signs = random_signs(20, math.prod(shape), dtype)
        grad = nan_padded(randn(T, *shape, seed=T, dtype=dtype))
        buffer = nan_filled(N + 4, *shape, dtype=dtype)
        touched = 2 + index.ids.long()
        buffer[touched] = randn(len(touched), *shape, seed=N, dtype=dtype)
        expected = buffer.clone()
        tg.segment_sum_rows(expected[2:-2], grad, index, signs)
        interpreted.triton_segment_sum_rows(buffer[2:-2], grad, index, signs)
        assert same_bits(buffer, expected) and not buffer[touched].isnan().any()


def test_no_kernel_adds_atomically():
    """Checks that no result can depend on the order in which blocks of threads run."""
    assert set(re.findall(r"atomic_\w+", SOURCE)) == {"atomic_max"}


# --------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("widths", [(8, 8), (4, 8), (8, 4)])
def test_flash_attention(monkeypatch, widths):
    """Checks that a kernel for one width computes attention of narrow queries, or of narrow values.

    The window goes left of the query only; queries and keys share the documents.
    """
    from torch.nn.attention import varlen

    def one_width(q, k, v, ends, key_ends, longest, longest_key, scale, window_size):
        assert q.shape == k.shape == v.shape and (scale, window_size) == (1, (3, 0))
        assert ends is key_ends and longest == longest_key
        return tg.dense_attention(q, k, v, ends, longest, 3)

    monkeypatch.setattr(varlen, "varlen_attn", one_width)
    q, k, v = (torch.randn(9, 2, widths[i]) for i in (0, 0, 1))
    rest = torch.tensor([0, 4, 9], dtype=torch.int32), 5, 3
    torch.testing.assert_close(tg.flash_attention(q, k, v, *rest), tg.dense_attention(q, k, v, *rest))
