"""Section 6 and the update rules of section 10 against naive float64 programs that stand here."""
import math

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import WORLD, backward, fill_model, tiny_batch, tiny_config

pytestmark = pytest.mark.numeric

FP64 = dict(rtol=1e-11, atol=1e-11)  # sums of some hundred float64 terms of size 1


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, g, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=dtype)


def integers(low, high, g, n=1):
    return torch.randint(low, high + 1, (n,), generator=g).tolist()


# --------------------------------------------------------------------------------------------------------- attention

def dense_attention(q, k, v, ends, window, scale):
    """Position by position in words: i sees j if both lie in one document and 0 <= i - j <= window."""
    T = q.size(0)
    document = [sum(t >= end for end in ends) for t in range(T)]
    mask = torch.tensor([[document[i] == document[j] and 0 <= i - j <= window for j in range(T)] for i in range(T)])
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def attention_case(seed):
    """Random lengths; windows from 1 to beyond T; documents some of which have no tokens; slots that repeat T."""
    g = generator(seed)
    T, window, = integers(2, 150, g)[0], integers(1, 100, g)[0] * (3 if seed % 5 == 0 else 1)
    cuts = sorted(integers(0, T, g, n=seed % 6))
    if seed % 3 == 0 and cuts:
        cuts = sorted(cuts + [cuts[0], cuts[-1]])
    ends = [0] + cuts + [T] * integers(1, 4, g)[0]
    q, k, v = randn(3, T, 2, 4, g=g)
    longest = max(b - a for a, b in zip(ends, ends[1:]))
    return q, k, v, ends, max(longest, 1), window


@pytest.mark.parametrize("seed", range(30))
def test_attention(seed):
    q, k, v, ends, longest, window = attention_case(seed)
    for bound in (longest, 10 * longest):
        own = tg.attention(q, k, v, torch.tensor(ends, dtype=torch.int32), bound, window, 0.3)
        torch.testing.assert_close(own, dense_attention(q, k, v, ends[1:], window, 0.3), **FP64)


def test_attention_spans_several_blocks():
    """Longer than the largest block of queries, and not a multiple of it."""
    g = generator(0)
    q, k, v = randn(3, 611, 1, 4, g=g)
    for window, ends in ((5, [0, 611]), (300, [0, 257, 258, 600, 611, 611]), (1000, [0, 611, 611])):
        own = tg.attention(q, k, v, torch.tensor(ends, dtype=torch.int32), 611, window, 0.5)
        torch.testing.assert_close(own, dense_attention(q, k, v, ends[1:], window, 0.5), **FP64)


def test_attention_is_one_for_one_token():
    q, k, v = randn(3, 1, 2, 4, g=generator(1))
    torch.testing.assert_close(tg.attention(q, k, v, torch.tensor([0, 1, 1], dtype=torch.int32), 1, 7, 1.0), v, **FP64)


def test_attention_gradients():
    for seed in (1, 4, 9):
        q, k, v, ends, longest, window = attention_case(seed)
        T = min(len(q), 12)
        ends = torch.tensor([min(end, T) for end in ends], dtype=torch.int32)
        inputs = [t[:T].clone().requires_grad_() for t in (q, k, v)]
        assert torch.autograd.gradcheck(lambda q, k, v: tg.attention(q, k, v, ends, min(longest, T), window, 0.7), inputs)


# ------------------------------------------------------------------------------------- the model's layers, head by head

@pytest.mark.parametrize("layer", [0, 2, 1, 3, 8, 10])
def test_attention_layer(layer):
    """Whole layers, head by head: 0 and 2 paired, 2 with a value table; 1 and 8 plain with one; 3 long; 10 long with one."""
    model, g = fill_model(tg.GPT(tiny_config("float64"), WORLD)), generator(layer)
    cfg, row = model.cfg, model.cfg.layers[layer]
    T, H, D, d = 21, cfg.heads, cfg.head_dim, cfg.dim
    h, ve = randn(T, d, g=g), randn(T, d, g=g)
    qkv, out = randn(3 * d, d, g=g) / 14, randn(d, d, g=g) / 14
    scales, ends, windows = torch.tensor([0.7, 1.3], dtype=torch.float64), [0, 6, 6, 17, 21, 21], (4, 9)
    ends_of_rows = torch.tensor(ends, dtype=torch.int32)
    seq = tg.Sequences(ends_of_rows, 2 * ends_of_rows, 11, *windows)
    value = None if row.value is None else ve
    with torch.no_grad():
        ve_gate = None if value is None else model.ve_gate_bank[row.value]
        own = model.attention(layer, h, value, ve_gate, [tg.Part(qkv[:2 * d]), tg.Part(qkv[2 * d:])], tg.Part(out), scales,
                              model.attn_gate_bank[model.attention_index[layer]], seq)

        q, k, v = ((h @ (0.7 * w).T).view(T, H, D) for w in qkv.view(3, d, d))
        q, k = (x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt() for x in (q, k))
        if value is not None:
            gate_input = h[:, :12] if row.attention == "paired" else torch.cat([h[:, :6], ve[:, :6]], 1)
            v = v + 2 / (1 + (-gate_input @ model.ve_gate_bank[row.value].T).exp())[:, :, None] * ve.view(T, H, D)
        frequency = (1 / 1024) ** torch.linspace(0, 1, D // 4, dtype=torch.float64)

        def turn(x, times):  # x (D,) at time t; pairs (0, 1), (2, 3), ... of the first half
            x = x.clone()
            c, s = (times * frequency).cos(), (times * frequency).sin()
            a, b = x[0:D // 2:2].clone(), x[1:D // 2:2].clone()
            x[0:D // 2:2], x[1:D // 2:2] = c * a + s * b, c * b - s * a
            return x

        paired = row.attention == "paired"
        for x in (q, k):
            for t in range(T):
                for head in range(H):
                    x[t, head] = turn(x[t, head], 2 * t + head % 2 if paired else t)
        if row.window == "long":
            k[1:, :, D // 2:] = k[:-1, :, D // 2:].clone()
        window = windows[row.window == "long"]
        if paired:  # streams of heads (n, n + H/2), row 2t the first, row 2t + 1 the second
            streams = [[x[:, [n, n + H // 2]].reshape(2 * T, 1, D) for x in (q, k, v)] for n in range(H // 2)]
            y = torch.empty(T, H, D, dtype=torch.float64)
            for n, (a, b, c) in enumerate(streams):
                y[:, [n, n + H // 2]] = dense_attention(a, b, c, [2 * e for e in ends[1:]], window, 0.1).view(T, 2, D)
        else:
            y = dense_attention(q, k, v, ends[1:], window, 0.1)
        index = [i for i, r in enumerate(cfg.layers) if r.attention].index(layer)
        y = y / (1 + (-h[:, :12] @ model.attn_gate_bank[index].T).exp())[:, :, None]
        want = y.reshape(T, d) @ (1.3 * out).T
    torch.testing.assert_close(own, want, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------- small functions, one by one

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
    own = tg.rotate(x, angle.cos(), angle.sin())
    as_complex = torch.view_as_complex(x[..., :8].reshape(5, 3, 4, 2)) * torch.exp(-1j * angle)
    torch.testing.assert_close(own[..., :8], torch.view_as_real(as_complex).flatten(-2), **FP64)
    assert torch.equal(own[..., 8:], x[..., 8:])


def test_shift_keys():
    k = randn(9, 2, 8, g=generator(4))
    own = tg.shift_keys(k)
    for t in range(9):
        assert torch.equal(own[t, :, :4], k[t, :, :4])
        assert torch.equal(own[t, :, 4:], k[max(t - 1, 0), :, 4:])


def test_mlp():
    g = generator(5)
    x, fc, proj = randn(6, 4, g=g), randn(10, 4, g=g), randn(10, 4, g=g)
    want = [[sum(max(0.0, sum(x[t, i] * fc[f, i] for i in range(4)).item()) ** 2 * proj[f, o].item() for f in range(10))
             for o in range(4)] for t in range(6)]
    torch.testing.assert_close(tg.mlp(x, tg.Part(fc), tg.Part(proj)), torch.tensor(want, dtype=torch.float64), **FP64)


@pytest.mark.parametrize("function", ["rotate", "shift_keys", "mlp", "norm"])
def test_gradients_of_small_functions(function):
    g = generator(6)
    angle = randn(4, 1, 2, g=g)
    arguments = {"rotate": [randn(4, 2, 8, g=g)], "shift_keys": [randn(4, 2, 8, g=g)], "norm": [randn(4, 8, g=g)],
                 "mlp": [randn(4, 3, g=g), randn(5, 3, g=g), randn(5, 3, g=g)]}[function]
    extra = [angle.cos(), angle.sin()] if function == "rotate" else []
    run = (lambda x, *w: tg.mlp(x, *map(tg.Part, w))) if function == "mlp" else getattr(tg, function)
    assert torch.autograd.gradcheck(lambda *a: run(*a, *extra), [a.requires_grad_() for a in arguments])


# -------------------------------------------------------------------------------------------------------------- loss

def naive_losses(logits, targets, weights):
    z = 23 / (1 + (-(logits + 5) / 7.5).exp())
    logp = z - z.exp().sum(1, keepdim=True).log()
    return torch.stack([sum(-w * logp[i, targets[i + k]] for k, w in enumerate(weights) if i + k < len(targets)) for i in range(len(z))])


WEIGHTS = [(1.0,), (1.0, 0.3), (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), (0.2, 0.0, 0.9)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("more", [0, 1, 2])  # targets beyond the rows, as a chunk in the middle has
def test_softcap_loss(weights, more):
    g = generator(len(weights) + 10 * more)
    logits = (randn(11, 7, g=g) * 9).requires_grad_()
    targets = torch.tensor(integers(0, 6, g, n=11 + min(more, len(weights) - 1)))
    targets[3:6] = targets[3]  # weights of one row that meet on one column
    want = naive_losses(logits, targets, weights)
    losses, gradient = tg.softcap_loss(logits.detach(), targets, weights)
    torch.testing.assert_close(losses, want.detach(), **FP64)
    want.sum().backward()
    torch.testing.assert_close(gradient, logits.grad, **FP64)  # the last rows included


def test_softcap_loss_of_bf16_logits_is_fp32():
    g = generator(8)
    logits, targets = randn(6, 50, g=g).bfloat16() * 4, torch.tensor(integers(0, 49, g, n=6))
    losses, gradient = tg.softcap_loss(logits, targets, (1.0, 0.5))
    exact, exact_gradient = tg.softcap_loss(logits.double(), targets, (1.0, 0.5))
    assert losses.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2**-8, atol=1e-8)  # rounded once


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 17, 100])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.5, 0.25)], ids=str)
def test_head(chunk, weights):
    """Any chunk gives the loss and gradients of all tokens at once."""
    g = generator(chunk)
    model = tg.GPT(tiny_config("float64", head_chunk=chunk))
    x = (randn(17, model.cfg.dim, g=g) / 9).requires_grad_()
    with torch.no_grad():
        model.lm_head.copy_(randn(*model.lm_head.shape, g=g))
    targets = torch.tensor(integers(0, 8, g, n=17))
    want = naive_losses(x @ model.lm_head, targets, weights).sum()
    want_grads = torch.autograd.grad(want, [x, model.lm_head])
    loss, begin = model.head(x, targets, weights)
    torch.autograd.backward(*zip(*begin))
    torch.testing.assert_close(loss, want.detach(), **FP64)
    for a, b in zip((x.grad, model.lm_head.grad), want_grads):
        torch.testing.assert_close(a, b, **FP64)


@pytest.mark.parametrize("n", [1, 8])
def test_fp8_head(n):
    """Loss and gradients of a micro-batch in n, to the rounding of 8 bits, over several chunks; its units scale with the gradients
    of a micro-batch, so that these are n times smaller, to the bit."""
    results = []
    for fp8, share in ((False, n), (True, n), (True, 1)):
        g = generator(3)
        model = tg.GPT(tiny_config("float32", head_chunk=16), ops=tg.PLAIN._replace(fp8=fp8))
        x = tg.norm(randn(64, model.cfg.dim, g=g, dtype=torch.float32)).requires_grad_()
        with torch.no_grad():
            model.lm_head.copy_(0.05 * randn(*model.lm_head.shape, g=g, dtype=torch.float32))
        targets, grad = torch.tensor(integers(0, 511, g, n=64)), tg.WeightGrad(model.lm_head, torch.zeros_like(model.lm_head))
        loss, begin = model.head(x, targets, (1.0 / share, 0.5 / share), grad, 1 / share)
        results.append((loss, *(gradient for _, gradient in begin), grad.main_grad))
    for plain, own, one in zip(*results):
        assert (own - plain).norm() < 0.1 * plain.norm() and torch.equal(n * own, one)


def test_a_scales_gradient_is_summed_in_its_own_dtype():
    g = generator(5)
    h, w, dy = (randn(*shape, g=g, dtype=torch.bfloat16) for shape in ((40, 24), (56, 24), (40, 56)))
    scale = torch.tensor(0.7, requires_grad=True)
    tg.linear(h, scale, [tg.Part(w[:24]), tg.Part(w[24:])]).backward(dy)
    want = ((dy.T @ h).double() * w.double()).sum()
    assert scale.grad.dtype == torch.float32 and scale.grad.item() == pytest.approx(want.item(), rel=1e-5)


def test_what_attention_is_told():
    """Document ends, a bound on their lengths and the window, of paired heads in rows, of which a token has two."""
    told, batch = [], tiny_batch()
    def attention(q, k, v, cu_seqlens, longest, window, scale):
        told.append((len(q), cu_seqlens.tolist(), longest, window))
        return tg.attention(q, k, v, cu_seqlens, longest, window, scale)
    model = fill_model(tg.GPT(tiny_config("float64"), WORLD, ops=tg.PLAIN._replace(attention=attention)))
    model.activations(batch, 16, 48)
    assert batch.longest >= batch.cu_seqlens.diff().max()
    layers = [layer for layer in model.cfg.layers if layer.attention]
    rows = [2 if layer.attention == "paired" else 1 for layer in layers]
    assert told == [(64 * n, (n * batch.cu_seqlens).tolist(), n * batch.longest, 48 if layer.window == "long" else 16)
                    for n, layer in zip(rows, layers)]


def test_head_chunk_does_not_matter_to_the_model():
    batch, results = tiny_batch(), []
    for chunk in (7, 64):
        model = fill_model(tg.GPT(tiny_config("float64", head_chunk=chunk), WORLD))
        step = tg.plan(model.cfg, 0)._replace(short=16, long=48, mtp=(1.0, 0.5, 0.25))
        loss = backward(model, batch, step)
        results.append((loss, model.validation_loss(batch, 16, 48), model.lm_head.grad, model.embed.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradient_of_the_whole_model():
    """Directional derivatives of the loss, from differences, for every parameter."""
    model, batch, g = fill_model(tg.GPT(tiny_config("float64"), WORLD), tied=False), tiny_batch(), generator(11)
    step = tg.plan(model.cfg, 0)._replace(short=16, long=48, mtp=(1.0, 0.5, 0.25))
    backward(model, batch, step)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=g, dtype=p.dtype)
        direction /= direction.norm()
        slopes = []
        for h in (1e-4, -1e-4):
            with torch.no_grad():
                p += h * direction
                x = model.activations(batch, step.short, step.long)
                slopes.append(model.head(x, batch.targets, step.mtp)[0].item())
                p -= h * direction
        # Second-order differences: error h^2 times a third derivative, and 1e-13 * 900 / h of rounding.
        want = (slopes[0] - slopes[1]) / 2e-4
        assert (grads[name] * direction).sum().item() == pytest.approx(want, rel=1e-4, abs=2e-5), name


# ------------------------------------------------------------------------------------------------------------- polar

@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12), (1, 48, 32)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_polar_is_about_orthogonal(shape, dtype):
    """Singular values end in 0.86 .. 1.14 (bf16: a little further, its roundings are 1/256) for condition numbers up to 100."""
    u, _, v = torch.linalg.svd(randn(*shape, g=generator(shape[1])), full_matrices=False)
    values = torch.logspace(0, -2, u.size(-1), dtype=torch.float64)
    x = tg.polar(37.0 * (u * values) @ v, dtype)
    slack = 0.05 if dtype == torch.bfloat16 else 0.0
    singular = torch.linalg.svdvals(x.double())
    assert 0.855 - slack < singular.min() and singular.max() < 1.145 + slack
    if dtype == torch.float64:  # and the singular vectors stay: u^T x v is diagonal
        inner = u.mT @ x @ v.mT
        torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-9)


def test_polar_of_the_transpose():
    x = randn(2, 9, 4, g=generator(12))
    torch.testing.assert_close(tg.polar(x.mT, torch.float64), tg.polar(x, torch.float64).mT, rtol=1e-9, atol=1e-9)


def test_polar_against_its_scalar_polynomial():
    """On a diagonal matrix it acts on each entry alone."""
    values = torch.tensor([3.0, 1.0, 0.2, 0.01], dtype=torch.float64)
    x = values / (values.norm() * 1.02 + 1e-6)
    for a, b, c in tg.POLAR_STEPS:
        x = a * x + b * x**3 + c * x**5
    torch.testing.assert_close(tg.polar(values.diag()[None], torch.float64)[0], x.diag(), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ halves

SPECIAL = [0x00000000, 0x80000000, 0x00000001, 0x0000FFFF, 0x00010000, 0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F80FFFF, 0x7F7FFFFF,
           0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x007FFFFF, 0x807FFFFF]


def test_halves_round_trip():
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, 2**14 - len(SPECIAL), dtype=np.uint32)
    words = np.concatenate([np.array(SPECIAL, dtype=np.uint32), random])
    x = torch.from_numpy(words.view(np.int32).copy()).view(torch.float32).view(8, -1, 16)
    high, low = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape, dtype=torch.uint16)
    tg.split_halves(x, high, low)
    assert torch.equal(tg.join_halves(high, low).view(torch.int32), x.view(torch.int32))
    assert (high.view(torch.int16).numpy().view(np.uint16).ravel() == words >> 16).all()  # truncated, not rounded
    assert (low.view(torch.int16).numpy().view(np.uint16).ravel() == words & 0xFFFF).all()


# ------------------------------------------------------------------------------------------------------ update rules

def naive_adam(p, gradients, lr, betas, eps, wd):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = lr * np.sqrt(1 - betas[1]**t) / (1 - betas[0]**t) * m / (np.sqrt(v) + eps)
        p = p - u - lr**2 * wd * p * (u * p > 0)
    return p, m, v


@pytest.mark.parametrize("seed", range(5))
def test_adam_update(seed):
    g = generator(seed)
    betas, wd, lr = [((.9, .99), 0.0), ((.5, .95), .75), ((.75, .95), .025)][seed % 3] + (0.3,)
    start, gradients = randn(6, 5, g=g), [randn(6, 5, g=g) for _ in range(4)]
    gradients[1][0] = 0  # eps alone below the line never divides by zero
    gradients[0][1], gradients[1][1], gradients[2][1], gradients[3][1] = 0, 0, 0, 0
    p, m, v = start.clone(), torch.zeros(6, 5, dtype=torch.float64), torch.zeros(6, 5, dtype=torch.float64)
    for t, gradient in enumerate(gradients, 1):
        tg.adam_update(p, gradient, m, v, t, lr, betas, 1e-10, wd)
    for own, want in zip((p, m, v), naive_adam(start.numpy(), [x.numpy() for x in gradients], lr, betas, 1e-10, wd)):
        torch.testing.assert_close(own, torch.from_numpy(want), **FP64)
    assert torch.equal(p[1], start[1])  # no gradient yet: no update, so no decay either


def test_adam_update_rounds_a_bf16_parameter_once():
    g = generator(20)
    start, gradient = randn(64, 8, g=g).bfloat16(), randn(64, 8, g=g).bfloat16()
    p, m, v = start.clone(), torch.zeros(64, 8), torch.zeros(64, 8)
    tg.adam_update(p, gradient, m, v, 1, 0.01, (.9, .99), 1e-10, 0.5)
    exact = naive_adam(start.double().numpy(), [gradient.double().numpy()], 0.01, (.9, .99), 1e-10, 0.5)[0]
    wanted = torch.from_numpy(exact).bfloat16()
    # fp32's own error moves a rounding at most once in thousands.
    assert (p != wanted).float().mean() < 0.01
    torch.testing.assert_close(p.double(), torch.from_numpy(exact), rtol=2**-8, atol=1e-6)
    assert m.dtype == v.dtype == torch.float32


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12)])
def test_normuon(shape):
    """Three steps of momentum, orthogonalisation, variance reduction and cautious update, in loops over matrices."""
    g, mu, beta2, lr, wd = generator(shape[1]), 0.9, 0.8, 0.05, 0.4
    p = randn(*shape, g=g)
    axis = 2 if shape[1] >= shape[2] else 1
    momentum = torch.zeros(shape, dtype=torch.float64)
    second = torch.zeros([1 if i == axis else n for i, n in enumerate(shape)], dtype=torch.float64)
    naive_p, naive_m, naive_n = p.clone().numpy(), np.zeros(shape), np.zeros(second.shape)
    for _ in range(3):
        gradient = randn(*shape, g=g)
        gradient[0] = 0  # a matrix without gradient: a zero direction, which still decays
        x = tg.normuon_direction(gradient, momentum, second, mu, beta2, torch.float64)
        tg.normuon_update(p, None, x, lr, wd)
        for i in range(shape[0]):
            G = gradient[i].numpy()
            naive_m[i] = mu * naive_m[i] + (1 - mu) * G
            X = tg.polar(torch.from_numpy((1 - mu) * G + mu * naive_m[i])[None], torch.float64)[0].numpy()
            naive_n[i] = beta2 * naive_n[i] + (1 - beta2) * (X**2).mean(axis=axis - 1, keepdims=True)
            scaled = X / np.sqrt(np.maximum(naive_n[i], 1e-10))
            X = scaled * np.linalg.norm(X) / max(np.linalg.norm(scaled), 1e-10)
            np.testing.assert_allclose(x[i].numpy(), X, rtol=1e-9, atol=1e-12)
            P = naive_p[i]
            naive_p[i] = P - P * (X * P >= 0) * (wd * lr) - lr * X
    np.testing.assert_allclose(p.numpy(), naive_p, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(second.numpy(), naive_n, rtol=1e-9, atol=1e-12)
    assert not x[0].any()
    assert torch.allclose(p[0] / (1 - wd * lr) ** 3, torch.from_numpy(naive_p[0]) / (1 - wd * lr) ** 3)


def test_normuon_update_in_halves_equals_fp32():
    """A bf16 parameter with its low word goes the same way as an fp32 one, bit for bit, and its bf16 part is the truncation."""
    g = generator(30)
    p = randn(2, 16, 8, g=g, dtype=torch.float32)
    high, low = torch.empty(p.shape, dtype=torch.bfloat16), torch.empty(p.shape, dtype=torch.uint16)
    tg.split_halves(p, high, low)
    for _ in range(5):
        x = randn(2, 16, 8, g=g).bfloat16()
        lr = torch.tensor([0.01, 0.02]).view(2, 1, 1)
        tg.normuon_update(p, None, x, lr, 0.1)
        tg.normuon_update(high, low, x, lr, 0.1)
        assert torch.equal(tg.join_halves(high, low), p)
        assert ((p - high.float()).abs() <= p.abs() * 2**-7).all()
