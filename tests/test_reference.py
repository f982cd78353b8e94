"""Checks section 6, the layers, the head and the update rules against naive float64 programs in this file."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt as tg
from golden_inputs import WINDOWS, WORLD, backward, fill_model, tiny_batch, tiny_config

pytestmark = pytest.mark.numeric

FP64 = dict(rtol=1e-11, atol=1e-11)  # sums of some hundred float64 terms of size 1


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, g, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=dtype)


def integers(low, high, g, n=1):
    return torch.randint(low, high + 1, (n,), generator=g).tolist()


# -------------------------------------------------------------------------------------------------- attention


def dense_attention(q, k, v, ends, window, scale):
    """Attends with a full mask: i sees j if both lie in one document and 0 <= i - j <= window."""
    T = q.size(0)
    doc = [sum(t >= end for end in ends) for t in range(T)]
    mask = [[doc[i] == doc[j] and 0 <= i - j <= window for j in range(T)] for i in range(T)]
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    probs = scores.masked_fill(~torch.tensor(mask), -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", probs, v)


def attention_case(seed):
    """Draws lengths, windows from 1 to beyond T, documents some of which are empty, entries that repeat T."""
    g = generator(seed)
    T, window = integers(2, 150, g)[0], integers(1, 100, g)[0] * (3 if seed % 5 == 0 else 1)
    cuts = sorted(integers(0, T, g, n=seed % 6))
    if seed % 3 == 0 and cuts:
        cuts = sorted(cuts + [cuts[0], cuts[-1]])
    ends = [0] + cuts + [T] * integers(1, 4, g)[0]
    q, k, v = randn(3, T, 2, 4, g=g)
    max_doc_len = max(b - a for a, b in zip(ends, ends[1:]))
    return q, k, v, ends, max(max_doc_len, 1), window


@pytest.mark.parametrize("seed", range(30))
def test_attention(seed):
    q, k, v, ends, max_doc_len, window = attention_case(seed)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    for bound in (max_doc_len, 10 * max_doc_len):
        y = tg.attention(q, k, v, cu_seqlens, bound, window, 0.3)
        torch.testing.assert_close(y, dense_attention(q, k, v, ends[1:], window, 0.3), **FP64)


def test_attention_spans_several_blocks():
    """Takes a length above the largest block of queries, and not a multiple of it."""
    g = generator(0)
    q, k, v = randn(3, 611, 1, 4, g=g)
    for window, ends in ((5, [0, 611]), (300, [0, 257, 258, 600, 611, 611]), (1000, [0, 611, 611])):
        y = tg.attention(q, k, v, torch.tensor(ends, dtype=torch.int32), 611, window, 0.5)
        torch.testing.assert_close(y, dense_attention(q, k, v, ends[1:], window, 0.5), **FP64)


def test_attention_to_one_token_is_its_value():
    q, k, v = randn(3, 1, 2, 4, g=generator(1))
    y = tg.attention(q, k, v, torch.tensor([0, 1, 1], dtype=torch.int32), 1, 7, 1.0)
    torch.testing.assert_close(y, v, **FP64)


def test_attention_gradients():
    for seed in (1, 4, 9):
        q, k, v, ends, max_doc_len, window = attention_case(seed)
        T = min(len(q), 12)
        ends = torch.tensor([min(end, T) for end in ends], dtype=torch.int32)

        def attend(q, k, v):
            return tg.attention(q, k, v, ends, min(max_doc_len, T), window, 0.7)

        assert torch.autograd.gradcheck(attend, [t[:T].clone().requires_grad_() for t in (q, k, v)])


# --------------------------------------------------------------------------- the model's layers, head by head


@pytest.mark.parametrize("layer", [0, 2, 1, 3, 8, 10])
def test_attention_layer(layer):
    """Checks whole layers, head by head.

    0 and 2 are paired, 2 with a value table; 1 and 8 are plain with one; 3 is long and shifts keys; 10 is
    long, shifts keys and has a value table.
    """
    model, g = fill_model(tg.GPT(tiny_config("float64"), WORLD)), generator(layer)
    cfg, row = model.cfg, model.cfg.layers[layer]
    T, H, D, d = 21, cfg.heads, cfg.head_dim, cfg.dim
    h, ve = randn(T, d, g=g), randn(T, d, g=g)
    qkv, out = randn(3 * d, d, g=g) / 14, randn(d, d, g=g) / 14
    scales, ends = torch.tensor([[0.7], [1.3]], dtype=torch.float64), [0, 6, 6, 17, 21, 21]
    n, window = (2 if row.attention == "paired" else 1), 9 if layer in (3, 10) else 4
    seq = n * torch.tensor(ends, dtype=torch.int32), n * 11, window
    value = None if row.value is None else ve
    with torch.no_grad():
        ve_gate = None if value is None else model.ve_gate_bank[row.value]
        gate = model.attn_gate_bank[model.attention_index[layer]]
        slices = [tg.WeightSlice(w[None]) for w in (qkv[: 2 * d], qkv[2 * d :], out)]
        (scaled_qkv,), (scaled_out,) = tg.scaled_weights(scales, *slices)
        y = model.attention(layer, h, scaled_qkv, seq, value, ve_gate)
        one, x = torch.ones((), dtype=torch.float64), torch.zeros_like(h)
        y, normed = tg.attention_output(y, h, gate, scaled_out, [one, one], x, [])
        torch.testing.assert_close(normed, tg.norm(y))

        q, k, v = ((h @ (0.7 * w).T).view(T, H, D) for w in qkv.view(3, d, d))
        q, k = (x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt() for x in (q, k))
        if value is not None:
            gate_input = h[:, :12] if row.attention == "paired" else torch.cat([h[:, :6], ve[:, :6]], 1)
            ve_gates = 2 / (1 + (-gate_input @ model.ve_gate_bank[row.value].T).exp())
            v = v + ve_gates[:, :, None] * ve.view(T, H, D)
        freq = (1 / 1024) ** torch.linspace(0, 1, D // 4, dtype=torch.float64)

        def rotate(x, t):  # x (D,) at time t; pairs (0, 1), (2, 3), ... of the first half
            x = x.clone()
            c, s = (t * freq).cos(), (t * freq).sin()
            a, b = x[0 : D // 2 : 2].clone(), x[1 : D // 2 : 2].clone()
            x[0 : D // 2 : 2], x[1 : D // 2 : 2] = c * a + s * b, c * b - s * a
            return x

        paired = row.attention == "paired"
        for x in (q, k):
            for t in range(T):
                for head in range(H):
                    x[t, head] = rotate(x[t, head], 2 * t + head % 2 if paired else t)
        if layer in (3, 10):
            k[1:, :, D // 2 :] = k[:-1, :, D // 2 :].clone()
        if paired:  # streams of heads (n, n + H/2), row 2t the first, row 2t + 1 the second
            streams = [[x[:, [n, n + H // 2]].reshape(2 * T, 1, D) for x in (q, k, v)] for n in range(H // 2)]
            want = torch.empty(T, H, D, dtype=torch.float64)
            for n, (a, b, c) in enumerate(streams):
                attended = dense_attention(a, b, c, [2 * e for e in ends[1:]], window, 0.1)
                want[:, [n, n + H // 2]] = attended.view(T, 2, D)
        else:
            want = dense_attention(q, k, v, ends[1:], window, 0.1)
        index = [i for i, r in enumerate(cfg.layers) if r.attention].index(layer)
        want = want / (1 + (-h[:, :12] @ model.attn_gate_bank[index].T).exp())[:, :, None]
        want = want.reshape(T, d) @ (1.3 * out).T
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)


def test_arguments_of_attention():
    """Checks document ends, a bound on their lengths and the window; of paired heads in rows, two a token."""
    calls, batch = [], tiny_batch()

    def attention(q, k, v, cu_seqlens, max_seqlen, window, scale):
        calls.append((len(q), cu_seqlens.tolist(), max_seqlen, window))
        return tg.attention(q, k, v, cu_seqlens, max_seqlen, window, scale)

    backend = tg.TORCH_BACKEND._replace(attention=attention)
    model = fill_model(tg.GPT(tiny_config("float64"), WORLD, backend=backend))
    model.hidden_states(batch, WINDOWS)
    assert batch.max_doc_len >= batch.cu_seqlens.diff().max()
    want = []
    for layer in model.cfg.layers:
        if layer.attention:
            n = 2 if layer.attention == "paired" else 1
            ends, max_seqlen = (n * batch.cu_seqlens).tolist(), n * batch.max_doc_len
            want.append((64 * n, ends, max_seqlen, 48 if layer.window == "long" else 16))
    assert calls == want


def test_named_scalars():
    """Checks each name's place in `scalars`: every layer's two attention scales, then one number each."""
    model = tg.GPT(tiny_config("float32"))
    with torch.no_grad():
        model.scalars.copy_(torch.arange(25))
    scalars = {name: [int(x) for x in values] for name, values in model.named_scalars().items()}
    assert scalars == {"attn_scales": list(range(22)), "smear": [22], "backout": [23], "skip": [24]}


# -------------------------------------------------------------------------------- small functions, one by one


def test_norm():
    x = randn(7, 12, g=generator(2)) * 1e-3  # small, so that eps shows
    torch.testing.assert_close(tg.norm(x), x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt(), **FP64)


def test_norm_has_one_eps_for_all_dtypes():
    x = torch.full((1, 8), 2**-11)  # its square is 2 * eps
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        assert tg.norm(x.to(dtype)).double()[0, 0].item() == pytest.approx((2 / 3) ** 0.5, rel=near)


def test_rotate_turns_pairs():
    g = generator(3)
    x, angle = randn(5, 3, 16, g=g), randn(5, 1, 4, g=g) * 3
    rotated = tg.rotate(x, angle.cos(), angle.sin())
    as_complex = torch.view_as_complex(x[..., :8].reshape(5, 3, 4, 2)) * torch.exp(-1j * angle)
    torch.testing.assert_close(rotated[..., :8], torch.view_as_real(as_complex).flatten(-2), **FP64)
    assert torch.equal(rotated[..., 8:], x[..., 8:])


def test_shift_keys():
    k = randn(9, 2, 8, g=generator(4))
    shifted = tg.shift_keys(k)
    for t in range(9):
        assert torch.equal(shifted[t, :, :4], k[t, :, :4])
        assert torch.equal(shifted[t, :, 4:], k[max(t - 1, 0), :, 4:])


def test_mlp():
    g = generator(5)
    x, fc, proj = randn(6, 4, g=g), randn(10, 4, g=g), randn(10, 4, g=g)
    want = torch.zeros(6, 4, dtype=torch.float64)
    for t in range(6):
        for f in range(10):
            product = sum(x[t, i] * fc[f, i] for i in range(4)).item()
            want[t] += max(0.0, product) ** 2 * proj[f]
    torch.testing.assert_close(tg.mlp(x, tg.WeightSlice(fc), tg.WeightSlice(proj)), want, **FP64)


@pytest.mark.parametrize("function", ["rotate", "shift_keys", "mlp", "norm"])
def test_gradients_of_small_functions(function):
    g = generator(6)
    angle = randn(4, 1, 2, g=g)
    arguments = {
        "rotate": [randn(4, 2, 8, g=g)],
        "shift_keys": [randn(4, 2, 8, g=g)],
        "norm": [randn(4, 8, g=g)],
        "mlp": [randn(4, 3, g=g), randn(5, 3, g=g), randn(5, 3, g=g)],
    }[function]
    extra = [angle.cos(), angle.sin()] if function == "rotate" else []

    def run(x, *weights):
        if function == "mlp":
            return tg.mlp(x, *map(tg.WeightSlice, weights))
        return getattr(tg, function)(x, *extra)

    assert torch.autograd.gradcheck(run, [a.requires_grad_() for a in arguments])


# ------------------------------------------------------------------------------------------------------- loss


def naive_losses(logits, targets, weights):
    z = 23 / (1 + (-(logits + 5) / 7.5).exp())
    logp = z - z.exp().sum(1, keepdim=True).log()
    losses = []
    for i in range(len(z)):
        kept = [(w, targets[i + k]) for k, w in enumerate(weights) if i + k < len(targets)]
        losses.append(sum(-w * logp[i, target] for w, target in kept))
    return torch.stack(losses)


WEIGHTS = [(1.0,), (1.0, 0.3), (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), (0.2, 0.0, 0.9)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("more", [0, 1, 2])  # targets beyond the rows, as a chunk in the middle has
def test_softcap_loss(weights, more):
    g = generator(len(weights) + 10 * more)
    logits = (randn(11, 7, g=g) * 9).requires_grad_()
    targets = torch.tensor(integers(0, 6, g, n=11 + min(more, len(weights) - 1)))
    targets[3:6] = targets[3]  # weights of one row that meet on one column
    want = naive_losses(logits, targets, weights)
    losses, grad = tg.softcap_loss(logits.detach(), targets, weights)
    torch.testing.assert_close(losses, want.detach(), **FP64)
    want.sum().backward()
    torch.testing.assert_close(grad, logits.grad, **FP64)  # the last rows included


def test_softcap_loss_of_bf16_logits_is_fp32():
    g = generator(8)
    logits, targets = randn(6, 50, g=g).bfloat16() * 4, torch.tensor(integers(0, 49, g, n=6))
    losses, grad = tg.softcap_loss(logits, targets, (1.0, 0.5))
    exact, exact_grad = tg.softcap_loss(logits.double(), targets, (1.0, 0.5))
    assert losses.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2**-8, atol=1e-8)  # rounded once


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_logits_have_the_cross_entropies_of_token_losses(dtype):
    """Compares the losses of a micro-batch of several head chunks."""
    model, batch = fill_model(tg.GPT(tiny_config(dtype, head_chunk=20), WORLD)), tiny_batch()
    with torch.no_grad():
        x = model.hidden_states(batch, WINDOWS)
        logits = model.logits(x)
    near = FP64 if dtype == "float64" else dict(rtol=1e-6, atol=1e-6)  # fp32 from the logits on
    assert logits.shape == (64, 512) and logits.dtype == tg.acc_dtype(model.cfg)
    want = 23 / (1 + (-((x @ model.lm_head).to(logits.dtype) + 5) / 7.5).exp())
    torch.testing.assert_close(logits, want, **near)
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    torch.testing.assert_close(model.token_losses(batch, WINDOWS), losses, **near)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 17, 100])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.5, 0.25)], ids=str)
def test_head(chunk, weights):
    """Checks that any chunk gives the loss and gradients of all tokens at once."""
    g = generator(chunk)
    model = tg.GPT(tiny_config("float64", head_chunk=chunk))
    x = (randn(17, model.cfg.dim, g=g) / 9).requires_grad_()
    with torch.no_grad():
        model.lm_head.copy_(randn(*model.lm_head.shape, g=g))
    targets = torch.tensor(integers(0, 8, g, n=17))
    want = naive_losses(x @ model.lm_head, targets, weights).sum()
    want_grads = torch.autograd.grad(want, [x, model.lm_head])
    loss, backward_roots = model.head_loss_and_grad(x, targets, weights)
    torch.autograd.backward(*zip(*backward_roots))
    torch.testing.assert_close(loss, want.detach(), **FP64)
    for grad, want_grad in zip((x.grad, model.lm_head.grad), want_grads):
        torch.testing.assert_close(grad, want_grad, **FP64)


@pytest.mark.parametrize("n", [1, 8])
def test_fp8_head(n):
    """Checks loss and gradients of one of n micro-batches, over several chunks, to the rounding of 8 bits.

    The units scale with the gradients of a micro-batch, so these are exactly n times smaller.
    """
    results = []
    for fp8, count in ((False, n), (True, n), (True, 1)):
        g = generator(3)
        backend = tg.TORCH_BACKEND._replace(fp8=fp8)
        model = tg.GPT(tiny_config("float32", head_chunk=16), backend=backend)
        x = tg.norm(randn(64, model.cfg.dim, g=g, dtype=torch.float32)).requires_grad_()
        with torch.no_grad():
            model.lm_head.copy_(0.05 * randn(*model.lm_head.shape, g=g, dtype=torch.float32))
        targets = torch.tensor(integers(0, 511, g, n=64))
        grad = tg.WeightGrad(model.lm_head, torch.zeros_like(model.lm_head))
        weights = (1.0 / count, 0.5 / count)
        loss, backward_roots = model.head_loss_and_grad(x, targets, weights, grad, 1 / count)
        results.append((loss, *(root_grad for _, root_grad in backward_roots), grad.main_grad))
    for fp32, fp8, fp8_of_one in zip(*results):
        assert (fp8 - fp32).norm() < 0.1 * fp32.norm() and torch.equal(n * fp8, fp8_of_one)


def test_a_scales_gradient_is_summed_in_its_own_dtype():
    g = generator(5)
    w, dw = (randn(3, 4, 24, 24, g=g, dtype=torch.bfloat16) for _ in range(2))
    scales = torch.tensor([[0.7, -1.0, 2.0], [0.3, 0.2, 0.1]], requires_grad=True)
    qk, v, out = w[:, :2].flatten(1, 2), w[:, 2], w[:, 3]
    torch.autograd.backward(
        tg.scaled_weights(scales, *map(tg.WeightSlice, (qk, v, out))), (dw[:, :3].flatten(1, 2), dw[:, 3])
    )
    want = (dw.double() * w.double()).sum((2, 3)).float()
    assert scales.grad.dtype == torch.float32
    torch.testing.assert_close(
        scales.grad, torch.stack([want[:, :3].sum(1), want[:, 3]]), rtol=1e-5, atol=1e-3
    )


def test_head_chunk_does_not_matter_to_the_model():
    batch, results = tiny_batch(), []
    for chunk in (7, 64):
        model = fill_model(tg.GPT(tiny_config("float64", head_chunk=chunk), WORLD))
        plan = tg.plan_step(model.cfg, 0)._replace(windows=WINDOWS, mtp=(1.0, 0.5, 0.25))
        loss = backward(model, batch, plan)
        results.append((loss, model.token_losses(batch, WINDOWS), model.lm_head.grad, model.embed.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradient_of_the_whole_model():
    """Compares every parameter's gradient with differences of the loss along a random direction."""
    model, batch, g = (
        fill_model(tg.GPT(tiny_config("float64"), WORLD), tied=False),
        tiny_batch(),
        generator(11),
    )
    plan = tg.plan_step(model.cfg, 0)._replace(windows=WINDOWS, mtp=(1.0, 0.5, 0.25))
    backward(model, batch, plan)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=g, dtype=p.dtype)
        direction /= direction.norm()
        losses = []
        for h in (1e-4, -1e-4):
            with torch.no_grad():
                p += h * direction
                x = model.hidden_states(batch, plan.windows)
                losses.append(model.head_loss_and_grad(x, batch.targets, plan.mtp)[0].item())
                p -= h * direction
        # Second-order differences: error h^2 times a third derivative, and 1e-13 * 900 / h of rounding.
        want = (losses[0] - losses[1]) / 2e-4
        assert (grads[name] * direction).sum().item() == pytest.approx(want, rel=1e-4, abs=2e-5), name


# ---------------------------------------------------------------------------------------------- polar express


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12), (1, 48, 32)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_polar_is_about_orthogonal(shape, dtype):
    """Checks that singular values end in 0.86 .. 1.14 for condition numbers up to 100.

    In bf16 they end a little further off: its roundings are 1/256.
    """
    u, _, v = torch.linalg.svd(randn(*shape, g=generator(shape[1])), full_matrices=False)
    values = torch.logspace(0, -2, u.size(-1), dtype=torch.float64)
    x = tg.polar_express(37.0 * (u * values) @ v, dtype)
    slack = 0.05 if dtype == torch.bfloat16 else 0.0
    singular = torch.linalg.svdvals(x.double())
    assert 0.855 - slack < singular.min() and singular.max() < 1.145 + slack
    if dtype == torch.float64:  # and the singular vectors stay: u^T x v is diagonal
        inner = u.mT @ x @ v.mT
        diagonal = torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
        torch.testing.assert_close(inner, diagonal, rtol=0, atol=1e-9)


def test_polar_of_the_transpose():
    x = randn(2, 9, 4, g=generator(12))
    wide, tall = tg.polar_express(x.mT, torch.float64), tg.polar_express(x, torch.float64)
    torch.testing.assert_close(wide, tall.mT, rtol=1e-9, atol=1e-9)


def test_polar_against_its_scalar_polynomial():
    """Checks that it acts on each entry of a diagonal matrix alone."""
    values = torch.tensor([3.0, 1.0, 0.2, 0.01], dtype=torch.float64)
    x = values / (values.norm() * 1.02 + 1e-6)
    for a, b, c in tg.POLAR_STEPS:
        x = a * x + b * x**3 + c * x**5
    out = tg.polar_express(values.diag()[None], torch.float64)[0]
    torch.testing.assert_close(out, x.diag(), rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------- mantissas

# fmt: off
SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x0000FFFF, 0x00010000, 0x3F800000,
    0x3F807FFF, 0x3F808000, 0x3F80FFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x007FFFFF, 0x807FFFFF,
]
# fmt: on


def test_mantissa_round_trip():
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, 2**14 - len(SPECIAL), dtype=np.uint32)
    words = np.concatenate([np.array(SPECIAL, dtype=np.uint32), random])
    x = torch.from_numpy(words.view(np.int32).copy()).view(torch.float32).view(8, -1, 16)
    high, low = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape, dtype=torch.uint16)
    tg.split_mantissa(x, high, low)
    assert torch.equal(tg.merge_mantissa(high, low).view(torch.int32), x.view(torch.int32))
    high, low = (t.view(torch.int16).numpy().view(np.uint16).ravel() for t in (high, low))
    assert (high == words >> 16).all()  # truncated, not rounded
    assert (low == words & 0xFFFF).all()


# ----------------------------------------------------------------------------------------------- update rules


def adam(p, grads, lr, betas, eps, wd):
    """Updates p once for each gradient; returns Adam's state."""
    cfg = replace(tg.RECORD, adam_lr=lr, adam_eps=eps, adam_wd=wd)
    row, plan = tg.Param("p", "adam", "all_reduce", betas), tg.plan_step(cfg, 0)._replace(lr_mul=1.0)
    state = tg.adam_init(p, row, torch.promote_types(p.dtype, torch.float32), 0)
    for grad in grads:
        tg.adam(p, [grad], state, [row], plan, cfg, tg.TORCH_BACKEND)
    return state


def naive_adam(p, grads, lr, betas, eps, wd):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) * m / (np.sqrt(v) + eps)
        p = p - u - lr**2 * wd * p * (u * p > 0)
    return p, m, v


@pytest.mark.parametrize("seed", range(5))
def test_adam(seed):
    g = generator(seed)
    betas, wd = [((0.9, 0.99), 0.0), ((0.5, 0.95), 0.75), ((0.75, 0.95), 0.025)][seed % 3]
    start, grads = randn(6, 5, g=g), [randn(6, 5, g=g) for _ in range(4)]
    grads[1][0] = 0
    for grad in grads:
        grad[1] = 0  # eps alone below the line never divides by zero
    p = start.clone()
    state = adam(p, grads, 0.3, betas, 1e-10, wd)
    want = naive_adam(start.numpy(), [grad.numpy() for grad in grads], 0.3, betas, 1e-10, wd)
    for t, want_t in zip((p, state["exp_avg"], state["exp_avg_sq"]), want):
        torch.testing.assert_close(t, torch.from_numpy(want_t), **FP64)
    assert torch.equal(p[1], start[1])  # no gradient yet: no update, so no decay either
    assert state["steps"] == 4


def test_adam_rounds_a_bf16_parameter_once():
    g = generator(20)
    start, grad = randn(64, 8, g=g).bfloat16(), randn(64, 8, g=g).bfloat16()
    p, settings = start.clone(), (0.01, (0.9, 0.99), 1e-10, 0.5)
    state = adam(p, [grad], *settings)
    exact = torch.from_numpy(naive_adam(start.double().numpy(), [grad.double().numpy()], *settings)[0])
    # fp32's own error moves a rounding at most once in thousands.
    assert (p != exact.bfloat16()).float().mean() < 0.01
    torch.testing.assert_close(p.double(), exact, rtol=2**-8, atol=1e-6)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12)])
def test_normuon(shape):
    """Checks three steps against loops over matrices.

    A step is momentum, orthogonalization, variance reduction and a cautious update.
    """
    g, mu, beta2, lr, wd = generator(shape[1]), 0.9, 0.8, 0.05, 8.0
    row, cfg = tg.Param("qk_bank", "normuon", "reduce_scatter"), tiny_config("float64")
    cfg = replace(cfg, muon_lr=lr, muon_wd=wd, muon_beta2=beta2)
    plan = tg.plan_step(cfg, 0)._replace(lr_mul=1.0, momentum=mu)
    start = randn(*shape, g=g)
    p, axis = start.clone(), 2 if shape[1] >= shape[2] else 1
    state = tg.normuon_init(p, row, torch.float64, 0)
    momentum, second = state["momentum_buffer"], state["second_momentum_buffer"]
    assert second.shape == tuple(1 if i == axis else n for i, n in enumerate(shape))
    naive_p, naive_m, naive_n = start.clone().numpy(), np.zeros(shape), np.zeros(second.shape)
    rate = lr * math.sqrt(max(1, shape[1] / shape[2]))
    decay = wd * lr * rate
    for _ in range(3):
        grad = randn(*shape, g=g)
        grad[0] = 0  # a matrix without gradient: a zero direction, which still decays
        x = tg.polar_express(tg.nesterov(grad, momentum.clone(), 1 - mu), torch.float64)
        x = tg.normuon_variance_reduction(x, second.clone(), beta2)
        tg.normuon(p, grad, state, row, plan, cfg, tg.TORCH_BACKEND)
        for i in range(shape[0]):
            G = grad[i].numpy()
            naive_m[i] = mu * naive_m[i] + (1 - mu) * G
            nesterov = torch.from_numpy((1 - mu) * G + mu * naive_m[i])
            X = tg.polar_express(nesterov[None], torch.float64)[0].numpy()
            naive_n[i] = beta2 * naive_n[i] + (1 - beta2) * (X**2).mean(axis=axis - 1, keepdims=True)
            scaled = X / np.sqrt(np.maximum(naive_n[i], 1e-10))
            X = scaled * np.linalg.norm(X) / max(np.linalg.norm(scaled), 1e-10)
            np.testing.assert_allclose(x[i].numpy(), X, rtol=1e-9, atol=1e-12)
            P = naive_p[i]
            naive_p[i] = P - P * (X * P >= 0) * decay - rate * X
    np.testing.assert_allclose(p.numpy(), naive_p, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(second.numpy(), naive_n, rtol=1e-9, atol=1e-12)
    assert not x[0].any()
    torch.testing.assert_close(p[0], start[0] * (1 - decay) ** 3)


def test_muon_update_with_a_mantissa_equals_fp32():
    """Moves a bf16 parameter with its mantissa as an fp32 one, bit for bit, whose truncation it stays."""
    g = generator(30)
    p = randn(2, 16, 8, g=g, dtype=torch.float32)
    high, low = torch.empty(p.shape, dtype=torch.bfloat16), torch.empty(p.shape, dtype=torch.uint16)
    tg.split_mantissa(p, high, low)
    lr = torch.tensor([0.01, 0.02]).view(2, 1, 1)
    for _ in range(5):
        x = randn(2, 16, 8, g=g).bfloat16()
        tg.muon_update(p, None, x, lr, 1.0, 0.1)
        tg.muon_update(high, low, x, lr, 1.0, 0.1)
        assert torch.equal(tg.merge_mantissa(high, low), p)
        assert ((p - high.float()).abs() <= p.abs() * 2**-7).all()
