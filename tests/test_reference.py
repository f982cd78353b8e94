"""Checks attention, losses, the head, prefixes and mantissas against naive float64 programs in this file."""

import math

import pytest
import torch

import train_gpt as tg
from golden_inputs import generator, head_model, head_of

pytestmark = pytest.mark.numeric

FP64 = dict(rtol=1e-11, atol=1e-11)  # sums of some hundred float64 terms of size 1


def randn(*shape, g, dtype=torch.float64):
    return torch.randn(shape, generator=g, dtype=dtype)


def integers(low, high, g, n=1):
    return torch.randint(low, high + 1, (n,), generator=g).tolist()


# -------------------------------------------------------------------------------------------------- attention


def dense_attention(q, k, v, ends, window, scale=1.0):
    """Attends with a full mask: i sees j if both lie in one document and 0 <= i - j <= window."""
    position = torch.arange(len(q))
    document = (position >= ends[:, None]).sum(0)
    distance = position[:, None] - position
    mask = (document[:, None] == document) & (0 <= distance) & (distance <= window)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    probs = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", probs, v)


def attention_case(seed):
    """Draws lengths, windows from 1 to beyond T, documents some of which are empty, entries that repeat T."""
    g = generator(seed)
    T, window = integers(2, 150, g, n=2)
    cuts = integers(0, T, g, n=seed % 6)
    if seed % 3 == 0:
        cuts *= 2
    ends = [0] + sorted(cuts) + [T] * (1 + seed % 4)
    q, k, v = randn(3, T, 2, 4, g=g)
    max_doc_len = max(b - a for a, b in zip(ends, ends[1:]))
    return q, k, v, ends, max_doc_len, window


@pytest.mark.parametrize("seed", range(30))
def test_attention(seed):
    q, k, v, ends, max_doc_len, window = attention_case(seed)
    v = v[..., :3].contiguous()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    ends = torch.tensor(ends, dtype=torch.int32)
    want = dense_attention(q, k, v, ends, window, 0.3)
    dy = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, inputs, dy)
    for bound in (max_doc_len, 10 * max_doc_len):
        y = tg.dense_attention(0.3 * q, k, v, ends, bound, window)
        torch.testing.assert_close(y, want, **FP64)
        torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), want_grads, **FP64)


def test_attention_sees_changed_documents():
    """Masks are kept from layer to layer, but not when the same tensor has other documents."""
    q, k, v = randn(3, 40, 1, 4, g=generator(1))
    ends = torch.tensor([0, 30, 40], dtype=torch.int32)
    for cut in (30, 10):
        ends[1] = cut
        want = dense_attention(q, k, v, ends, 100)
        torch.testing.assert_close(tg.dense_attention(q, k, v, ends, 40, 100), want, **FP64)


def mix_four(a, scales, b, one_scale, c, d):
    return tg.weighted_sum([(None, a), (scales, b), (one_scale, c), (None, d)])


# Functions with a form of their own for what is not compiled, and the shapes of their arguments.
UNCOMPILED = {
    "norm": (tg.norm, [(7, 2, 8)]),
    "rotate all": (tg.rotate, [(7, 2, 8), (7, 1, 4), (7, 1, 4)]),
    "rotate half": (tg.rotate, [(7, 2, 8), (7, 1, 2), (7, 1, 2)]),
    "mix": (mix_four, [(7, 8), (7, 1), (7, 8), (1, 1), (7, 8), (7, 8)]),
    "mix groups": (lambda scales, x: tg.weighted_sum([(scales, x)]), [(7, 4, 1), (7, 4, 2)]),
    "one stream": (lambda x: tg.weighted_sum([(None, x)]), [(7, 8)]),
}


@pytest.mark.forms("what runs compiled and what runs as written")
@pytest.mark.parametrize("case", UNCOMPILED)
def test_forms_of_what_is_not_compiled(case, monkeypatch):
    """Compares values and gradients with the form that is compiled."""
    function, shapes = UNCOMPILED[case]
    g = generator(3)
    inputs = [randn(*shape, g=g).requires_grad_() for shape in shapes]
    wanted = inputs
    if "rotate" in case:  # sines and cosines have no gradient
        wanted = inputs[:1]
    found = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=is_compiling: answer)
        y = function(*inputs)
        found.append([y, torch.autograd.grad(y, wanted, torch.ones_like(y).cumsum(0))])
    torch.testing.assert_close(*found, **FP64)


def test_norm_has_one_eps_for_all_dtypes():
    x = torch.full((1, 8), 2**-11)  # its square is 2 * eps
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        assert tg.norm(x.to(dtype)).double()[0, 0].item() == pytest.approx((2 / 3) ** 0.5, rel=near)


# ------------------------------------------------------------------------------------------------------- loss


def test_targets_end_with_the_text():
    """Checks prefixes, too, and a text that is shorter than a position has targets."""
    prefixes = torch.tensor([-1, -1, 3, -1])
    found = tg.loss_targets(torch.tensor([1, 2, 0]), 2, prefixes)
    assert found.tolist() == [[1, 2, -1], [2, 0, 3], [0, -1, -1]]
    assert found.dtype == torch.int64 and found.is_contiguous()
    assert tg.loss_targets(torch.tensor([2]), 3, None).tolist() == [[2, -1, -1]]


def test_losses_of_bf16_logits_are_fp32():
    g = generator(8)
    logits = randn(6, 50, g=g).bfloat16() * 4
    targets = torch.tensor(integers(-1, 49, g, n=12)).view(6, 2)
    weights = torch.tensor([1.0, 0.5])
    losses, grad = tg.softcap_loss(logits, targets, weights)
    exact, exact_grad = tg.softcap_loss(logits.double(), targets, weights)
    assert losses.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2**-8, atol=1e-8)  # rounded once
    next_tokens = torch.arange(6)
    losses = tg.next_token_losses(logits, next_tokens)
    exact = tg.next_token_losses(logits.double(), next_tokens)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)


SOME_COLUMNS = torch.arange(0, 512, 3, dtype=torch.int32)


@pytest.mark.parametrize("candidates", [None, SOME_COLUMNS], ids=["all columns", "some"])
def test_fp8_head(candidates):
    """Checks loss and gradients of one of 8 micro-batches, over several chunks, to the rounding of 8 bits.

    The units scale with the gradients of a micro-batch, so these are exactly 8 times smaller.
    """
    g = generator(3)
    x = tg.norm(randn(64, 96, g=g, dtype=torch.float32))
    w = 0.4 * randn(96, 512, g=g, dtype=torch.float32)
    targets = torch.tensor(integers(-1, 511, g, n=128)).view(64, 2)
    results = []
    for fp8, count in ((False, 8), (True, 8), (True, 1)):
        model = head_model(w, 16, tg.TORCH_BACKEND._replace(fp8=fp8), 1 / count)
        head = head_of(w)
        weights = torch.tensor([1.0, 0.5]) / count
        loss, dx = tg.GPT.head_loss_and_grad(model, x, targets, weights, head, candidates)
        results.append((loss, dx, head.main_grad))
    for fp32, fp8, fp8_of_one in zip(*results):
        assert (fp8 - fp32).norm() < 0.1 * fp32.norm() and torch.equal(8 * fp8, fp8_of_one)


# --------------------------------------------------------------------------------------------------- prefixes


def test_prefix_table_skips_prefixes_that_are_no_tokens():
    assert tg.prefix_table([b"abcd", b"a", b"abc", b"", b"bc", b"ab!"], 6).tolist() == [2, -1, 1, -1, -1, 1]


def test_read_vocabulary(tmp_path):
    tokens = [b"", b"a", bytes(range(256)), b"\n"]
    path = tmp_path / "vocabulary.txt"
    path.write_text("\n".join(token.hex() for token in tokens))
    assert tg.read_vocabulary(path, len(tokens)) == tokens


# -------------------------------------------------------------------------------------------------- mantissas


def test_mantissa_round_trip():
    """Checks random bits: denormal numbers and NaNs, too. The upper half is truncated."""
    words = torch.randint(-(2**31), 2**31, (4096,), generator=generator(0), dtype=torch.int32)
    x = words.view(torch.float32)
    high = torch.empty(x.shape, dtype=torch.bfloat16)
    low = torch.empty(x.shape, dtype=torch.uint16)
    tg.split_mantissa(x, high, low)
    assert torch.equal(high.view(torch.int16), (words >> 16).short())
    assert torch.equal(low.int(), words & 0xFFFF)
    assert torch.equal(tg.merge_mantissa(high, low).view(torch.int32), words)
