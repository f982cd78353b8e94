"""Checks attention, losses, the head, prefixes and mantissas against naive float64 programs in this file."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt as tg
from golden_inputs import WINDOWS, head_of, tiny_batch, tiny_config
from test_kernels import generator

pytestmark = pytest.mark.numeric

FP64 = dict(rtol=1e-11, atol=1e-11)  # sums of some hundred float64 terms of size 1


def randn(*shape, g, dtype=torch.float64):
    return torch.randn(shape, generator=g, dtype=dtype)


def integers(low, high, g, n=1):
    return torch.randint(low, high + 1, (n,), generator=g).tolist()


# -------------------------------------------------------------------------------------------------- attention


def dense_attention(q, k, v, ends, window, scale):
    """Attends with a full mask: i sees j if both lie in one document and 0 <= i - j <= window."""
    T = q.size(0)
    doc = [sum(t >= end for end in ends) for t in range(T)]
    mask = torch.zeros(T, T, dtype=torch.bool)
    for i in range(T):
        for j in range(max(0, i - window), i + 1):
            mask[i, j] = doc[i] == doc[j]
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    probs = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", probs, v)


def attention_case(seed):
    """Draws lengths, windows from 1 to beyond T, documents some of which are empty, entries that repeat T."""
    g = generator(seed)
    T = integers(2, 150, g)[0]
    window = integers(1, 100, g)[0]
    if seed % 5 == 0:
        window *= 3
    cuts = sorted(integers(0, T, g, n=seed % 6))
    if seed % 3 == 0 and cuts:
        cuts = sorted(cuts + [cuts[0], cuts[-1]])
    ends = [0] + cuts + [T] * integers(1, 4, g)[0]
    q, k, v = randn(3, T, 2, 4, g=g)
    max_doc_len = max(b - a for a, b in zip(ends, ends[1:]))
    return q, k, v, ends, max(max_doc_len, 1), window


# Of a length above the largest block of queries, and not a multiple of it: windows, ends.
LONG = ((5, [0, 611]), (300, [0, 257, 258, 600, 611, 611]), (1000, [0, 611, 611]))


@pytest.mark.parametrize("seed", range(33))
def test_attention(seed):
    if seed < 30:
        q, k, v, ends, max_doc_len, window = attention_case(seed)
    else:
        q, k, v = randn(3, 611, 1, 4, g=generator(0))
        max_doc_len = 611
        window, ends = LONG[seed - 30]
    v = v[..., :3].contiguous()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    want = dense_attention(q, k, v, ends[1:], window, 0.3)
    dy = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, inputs, dy)
    for bound in (max_doc_len, 10 * max_doc_len):
        y = tg.dense_attention(0.3 * q, k, v, torch.tensor(ends, dtype=torch.int32), bound, window)
        torch.testing.assert_close(y, want, **FP64)
        torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), want_grads, **FP64)


def test_attention_sees_changed_documents():
    """Masks are kept from layer to layer, but not when the same tensor has other documents."""
    q, k, v = randn(3, 40, 1, 4, g=generator(1))
    ends = torch.tensor([0, 30, 40], dtype=torch.int32)
    for cut in (30, 10):
        ends[1] = cut
        want = dense_attention(q, k, v, [cut, 40], 100, 1)
        torch.testing.assert_close(tg.dense_attention(q, k, v, ends, 40, 100), want, **FP64)


def broadcasts(g):
    """Draws a sum of streams with all kinds of scales."""
    tensors = []
    for scale in (None, randn(7, 1, g=g), randn(1, 1, g=g), None):
        tensors += [scale, randn(7, 8, g=g)]
    return tensors


def mix(*tensors):
    return tg.mix(list(zip(tensors[::2], tensors[1::2])))


# Functions with a form of their own for what is not compiled, and their arguments.
UNCOMPILED = {
    "norm": lambda g: (tg.norm, [randn(7, 2, 8, g=g)]),
    "rotate all": lambda g: (tg.rotate, [randn(7, 2, 8, g=g), randn(7, 1, 4, g=g), randn(7, 1, 4, g=g)]),
    "rotate half": lambda g: (tg.rotate, [randn(7, 2, 8, g=g), randn(7, 1, 2, g=g), randn(7, 1, 2, g=g)]),
    "mix": lambda g: (mix, broadcasts(g)),
    "mix groups": lambda g: (mix, [randn(7, 4, 1, g=g), randn(7, 4, 2, g=g)]),
    "one stream": lambda g: (mix, [None, randn(7, 8, g=g)]),
}


@pytest.mark.forms("what runs compiled and what runs as written")
@pytest.mark.parametrize("case", UNCOMPILED)
def test_forms_of_what_is_not_compiled(case, monkeypatch):
    """Compares values and gradients with the form that is compiled."""
    function, inputs = UNCOMPILED[case](generator(3))
    inputs = [None if t is None else t.requires_grad_() for t in inputs]
    found = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=is_compiling: answer)
        y = function(*inputs)
        wanted = [t for t in inputs if t is not None and (t.size(-1) > 4 or "rotate" not in case)]
        found.append([y, torch.autograd.grad(y, wanted, torch.ones_like(y).cumsum(0))])
    uncompiled, compiled = found
    torch.testing.assert_close(uncompiled, compiled, **FP64)


def test_norm_has_one_eps_for_all_dtypes():
    x = torch.full((1, 8), 2**-11)  # its square is 2 * eps
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        assert tg.norm(x.to(dtype)).double()[0, 0].item() == pytest.approx((2 / 3) ** 0.5, rel=near)


def test_norm_of_bf16_is_rounded_once():
    x = randn(64, 256, g=generator(2)).bfloat16()
    torch.testing.assert_close(tg.norm(x).double(), tg.norm(x.double()), rtol=2**-8, atol=0)


def test_gates_without_an_mlp_are_constants():
    model = tg.GPT(tiny_config("float64", mudd_gates=False))
    constants = torch.nn.init.normal_(model.mudd_gate_b2) * model.mudd_gate_scale
    for block in range(2):
        gates = model.gates(block, torch.ones(5, model.cfg.dim).double())
        found = torch.cat([gate.expand(5, -1) for gate in gates.values()], dim=1)
        torch.testing.assert_close(found, constants[block, : found.size(1)].expand(5, -1), **FP64)


# ------------------------------------------------------------------------------------------------------- loss


def test_targets_have_prefixes_while_they_have_a_weight():
    """Checks texts that are shorter than a position has targets, too."""
    model = tg.GPT(tiny_config("float64"))
    targets = torch.tensor([5, 7, 2])
    model.prefixes[7] = 3
    plan = tg.plan_step(model.cfg, 0)._replace(mtp=(1.0, 0.5), prefix=0.25)
    found = tg.loss_targets(targets, 2, model.prefixes)
    assert found.tolist() == [[5, 7, -1], [7, 2, 3], [2, -1, -1]]
    assert found.dtype == torch.int64 and found.is_contiguous()
    assert plan.loss_weights == (1.0, 0.5, 0.25)
    assert tg.loss_targets(targets, 2, None).tolist() == [[5, 7], [7, 2], [2, -1]]
    assert plan._replace(prefix=0.0).loss_weights == (1.0, 0.5)
    assert tg.loss_targets(targets[:1], 3, model.prefixes).tolist() == [[5, -1, -1, -1]]


def test_softcap_loss_of_bf16_logits_is_fp32():
    g = generator(8)
    logits = randn(6, 50, g=g).bfloat16() * 4
    targets = torch.tensor(integers(-1, 49, g, n=12)).view(6, 2)
    weights = torch.tensor([1.0, 0.5])
    losses, grad = tg.softcap_loss(logits, targets, weights)
    exact, exact_grad = tg.softcap_loss(logits.double(), targets, weights)
    assert losses.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2**-8, atol=1e-8)  # rounded once


@pytest.mark.parametrize("softcap", [tg.Softcap(), tg.Softcap(30.0, 0.0, 7.5)], ids=["asymmetric", "tanh"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_token_losses_are_cross_entropies_of_capped_logits(dtype, softcap):
    """Compares the losses of a micro-batch of several head chunks."""
    model = tg.GPT(tiny_config(dtype, softcap=softcap))
    batch = tiny_batch()
    g = generator(4)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=g)
        x = model.forward(model.look_up(batch, training=False), batch, WINDOWS)
        logits = (x @ model.lm_head).to(tg.acc_dtype(model.cfg))
    near = FP64 if dtype == "float64" else dict(rtol=1e-6, atol=1e-6)  # fp32 from the logits on
    if softcap.shift == 0:
        z = 15 * (logits / 15).tanh()
    else:
        z = softcap.scale / (1 + (-(logits + softcap.shift) / softcap.span).exp())
    losses = F.cross_entropy(z, batch.targets, reduction="none")
    torch.testing.assert_close(model.token_losses(batch, WINDOWS), losses, **near)


def test_fp8_head():
    """Checks loss and gradients of one of 8 micro-batches, over several chunks, to the rounding of 8 bits.

    The units scale with the gradients of a micro-batch, so these are exactly 8 times smaller.
    """
    results = []
    for fp8, count in ((False, 8), (True, 8), (True, 1)):
        g = generator(3)
        backend = tg.TORCH_BACKEND._replace(fp8=fp8)
        model = tg.GPT(tiny_config("float32", head_chunk=16), backend=backend)
        x = tg.norm(randn(64, model.cfg.dim, g=g, dtype=torch.float32)).requires_grad_()
        with torch.no_grad():
            model.lm_head.copy_(0.05 * randn(*model.lm_head.shape, g=g, dtype=torch.float32))
        targets = torch.tensor(integers(-1, 511, g, n=128)).view(64, 2)
        head = head_of(model.lm_head)
        weights = torch.tensor([1.0, 0.5]) / count
        loss, dx = model.head_loss_and_grad(x, targets, weights, head, 1 / count)
        results.append((loss, dx, head.main_grad))
    for fp32, fp8, fp8_of_one in zip(*results):
        assert (fp8 - fp32).norm() < 0.1 * fp32.norm() and torch.equal(8 * fp8, fp8_of_one)


# --------------------------------------------------------------------------------------------------- prefixes


def test_prefix_table_skips_prefixes_that_are_no_tokens():
    assert tg.prefix_table([b"abcd", b"a", b"abc", b"", b"bc", b"ab!"], 6).tolist() == [2, -1, 1, -1, -1, 1]


def test_read_vocabulary(tmp_path):
    """Reads what is written, with upper-case digits and without a last newline too."""
    tokens = [b"", b"a", bytes(range(256)), b"\n"]
    path = tmp_path / "vocabulary.txt"
    text = "\n".join(token.hex() for token in tokens)
    for written in (text + "\n", text.upper()):
        path.write_text(written)
        assert tg.read_vocabulary(path, len(tokens)) == tokens


# -------------------------------------------------------------------------------------------------- mantissas


def test_mantissa_round_trip():
    """Checks random words, and zeros, denormal numbers, infinities and NaNs."""
    special = np.array([0, 1 << 31, 1, 0x7FFFFF, 0x3F808000, 0x7F800000, 0x7F800001, 0xFF7FFFFF], np.uint32)
    words = np.append(special, np.random.default_rng(0).integers(0, 2**32, 4088, dtype=np.uint32))
    x = torch.from_numpy(words.view(np.int32)).view(torch.float32).view(8, -1, 16)
    high = torch.empty(x.shape, dtype=torch.bfloat16)
    low = torch.empty(x.shape, dtype=torch.uint16)
    tg.split_mantissa(x, high, low)
    assert torch.equal(tg.merge_mantissa(high, low).view(torch.int32), x.view(torch.int32))
    bits = []
    for half in (high, low):
        bits.append(half.view(torch.int16).numpy().view(np.uint16).ravel())
    assert (bits[0] == words >> 16).all() and (bits[1] == words & 0xFFFF).all()  # truncated, not rounded
