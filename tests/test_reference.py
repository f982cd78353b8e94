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
    return torch.randn(shape, generator=g, dtype=dtype)


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


def finish_case(seed, T=5, H=3, D=4):
    """Returns y, v, the gradient by the result; xsa, gate. One head's v is below the least norm."""
    y, v, grad = randn(3, T, H, D, g=generator(seed))
    v[2, 1] *= 1e-6
    v[3, 0] = 0
    xsa, gate = randn(2, T, H, g=generator(seed + 50))
    return y, v, grad, xsa, gate


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("has_xsa", [True, False])
def test_finish_heads(has_xsa, has_gate):
    """Checks each head: what lies along v is taken off, as far as tanh says, before the gate."""
    y, v, _, xsa, gate = finish_case(0)
    actual, want = tg.finish_heads(y, v, xsa if has_xsa else None, gate if has_gate else None), y.clone()
    for t in range(y.size(0)):
        for h in range(y.size(1)):
            if has_xsa:
                along = (y[t, h] * v[t, h]).sum() / max((v[t, h] * v[t, h]).sum().item(), 1e-8)
                want[t, h] -= math.tanh(xsa[t, h]) * along * v[t, h]
            if has_gate:
                want[t, h] *= gate[t, h]
    torch.testing.assert_close(actual, want, **FP64)


def test_what_is_taken_off_is_parallel_to_the_value():
    """Checks that a full part leaves nothing along v, of any length that is not tiny."""
    y, v, _, xsa, _ = finish_case(1)
    v[2:4] = randn(2, 3, 4, g=generator(9)) * 100
    left = (tg.finish_heads(y, v, torch.full_like(xsa, 50.0), None) * v).sum(-1)
    torch.testing.assert_close(left, torch.zeros_like(left), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rows", ["a token", "all"])
def test_gradient_of_finished_heads(rows):
    """Compares with the derivatives on paper. A gate of one row is a learned constant."""
    y, v, grad, xsa, gate = finish_case(2)
    if rows == "all":
        xsa, gate = xsa[:1], gate[:1]
    leaves = [t.clone().requires_grad_() for t in (y, v, xsa, gate)]
    tg.finish_heads(*leaves).backward(grad)
    a, s = xsa.tanh()[:, :, None], (y * v).sum(-1, keepdim=True)
    square = (v * v).sum(-1, keepdim=True)
    n = square.clamp_min(1e-8)
    dgate = (grad * (y - a * s / n * v)).sum(-1)
    gamma = grad * gate[:, :, None]
    c = (gamma * v).sum(-1, keepdim=True)
    dxsa = (-(1 - a * a) * s / n * c)[:, :, 0]
    dy = gamma - a / n * c * v
    dv = -a / n * (c * y + s * gamma - torch.where(square >= 1e-8, 2 * s / n * c, 0 * c) * v)
    want = dy, dv, *(d.sum(0, keepdim=True) if rows == "all" else d for d in (dxsa, dgate))
    for leaf, each in zip(leaves, want):
        torch.testing.assert_close(leaf.grad, each, rtol=1e-11, atol=1e-10)


# --------------------------------------------------------------------------- the model's layers, head by head


@pytest.mark.parametrize("layer", [0, 2, 1, 3, 8, 10])
def test_attention_layer(layer):
    """Checks whole layers, head by head.

    0 and 2 are paired with narrow queries, 2 with a value table; 1 and 8 are plain and narrow with one, 1
    with XSA; 3 is long, shifts keys, has XSA and a gate; 10 is long, shifts keys, has a gate and values that
    are added as they are.
    """
    cfg = tiny_config("float64")
    model, g = fill_model(tg.GPT(cfg, WORLD)), generator(layer)
    row = cfg.layers[layer]
    T, H, D, d = 21, cfg.heads, cfg.head_dim, cfg.dim
    h, ve = randn(T, d, g=g), randn(T, d, g=g)
    widths = [D // 2 if narrow else D for narrow in (row.narrow_qk, row.narrow_qk, row.narrow_v)]
    qkv = [randn(H * width, d, g=g) / 14 for width in widths]
    scale, ends = torch.tensor(0.7, dtype=torch.float64), [0, 6, 6, 17, 21, 21]
    n, window = (2 if row.attention == "paired" else 1), 9 if layer in (3, 10) else 4
    seq = n * torch.tensor(ends, dtype=torch.int32), n * 11, window
    value = None if row.value is None else ve
    names = [name for name, has in (("xsa", row.xsa), ("output", row.gate)) if has]
    gates = {(name, layer): randn(T, H, g=g) for name in names}
    with torch.no_grad():
        ve_gate = None if value is None or row.connections else model.ve_gate_bank[row.value]
        weights = tg.WeightSlice(torch.cat(qkv[:2])), tg.WeightSlice(qkv[2])
        y = model.attention(layer, h, weights, scale, seq, gates, value, ve_gate)

        q, k, v = ((h @ (0.7 * w).T).view(T, H, -1) for w in qkv)
        q, k = (x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt() for x in (q, k))
        added = ve.view(T, H, D)[:, :, : widths[2]]
        if row.connections:
            v = v + added
        elif value is not None:
            gate_input = torch.cat([h[:, :6], ve[:, :6]], 1)
            ve_gates = 2 / (1 + (-gate_input @ model.ve_gate_bank[row.value].T).exp())
            v = v + ve_gates[:, :, None] * added
        freq = (1 / 1024) ** torch.linspace(0, 1, D // 4, dtype=torch.float64)

        def rotate(x, t):  # a head at time t; pairs (0, 1), (2, 3), ... of its first D / 2 numbers
            x = x.clone()
            c, s = (t * freq).cos(), (t * freq).sin()
            a, b = x[0 : D // 2 : 2].clone(), x[1 : D // 2 : 2].clone()
            x[0 : D // 2 : 2], x[1 : D // 2 : 2] = c * a + s * b, c * b - s * a
            return x

        paired, softmax_scale = row.attention == "paired", 0.13 if row.narrow_qk else 0.085
        for x in (q, k):
            for t in range(T):
                for head in range(H):
                    x[t, head] = rotate(x[t, head], 2 * t + head % 2 if paired else t)
        if layer in (3, 10):
            k[1:, :, D // 2 :] = k[:-1, :, D // 2 :].clone()
        if paired:  # streams of heads (n, n + H/2), row 2t the first, row 2t + 1 the second
            want = torch.empty(T, H, widths[2], dtype=torch.float64)
            for n in range(H // 2):
                a, b, c = (x[:, [n, n + H // 2]].reshape(2 * T, 1, -1) for x in (q, k, v))
                attended = dense_attention(a, b, c, [2 * e for e in ends[1:]], window, softmax_scale)
                want[:, [n, n + H // 2]] = attended.view(T, 2, -1)
        else:
            want = dense_attention(q, k, v, ends[1:], window, softmax_scale)
        if row.xsa:
            along = (want * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True)
            want = want - gates["xsa", layer].tanh()[:, :, None] * along * v
        if row.gate:
            want = want * gates["output", layer][:, :, None]
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("skip_to", [2, 3])
def test_every_mlp_reads_a_normed_stream(skip_to, monkeypatch):
    """Checks layers without attention after the one from which attention reads an earlier stream."""
    layers = [tg.Layer("plain", value=0), *[tg.Layer("plain")] * 2, *[tg.Layer(None)] * 2]
    layers.append(tg.Layer("plain", value=1, connections=True))
    places, inputs, mlp = dict(skip_from=0, back_from=1, skip_to=skip_to), [], tg.mlp
    monkeypatch.setattr(tg, "mlp", lambda h, *args: inputs.append(h) or mlp(h, *args))
    model = tg.GPT(tiny_config("float64", layers=tuple(layers), **places))
    model.hidden_states(tiny_batch(), WINDOWS)
    assert len(inputs) == 6
    for h in inputs:
        torch.testing.assert_close(
            h.square().mean(-1), torch.ones(64, dtype=torch.float64), rtol=1e-6, atol=0
        )


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


# ----------------------------------------------------------------------------------------- mixing of streams

SCALES = {"none": None, "number": (), "token": (9, 1), "constant": (1, 1)}


def mix_case(kinds, seed, dtype=torch.float64):
    """Returns leaves: scales of these kinds, which may be None, and as many streams (9, 6)."""
    g = generator(seed)
    scales = [None if SCALES[kind] is None else randn(*SCALES[kind], g=g).to(dtype) for kind in kinds]
    streams = [randn(9, 6, g=g).to(dtype) for _ in kinds]
    return [t if t is None else t.requires_grad_() for t in (*scales, *streams)]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [("none",), ("number", "token"), ("none", "constant"), ("token", "none", "number", "constant", "token")],
    ids=str,
)
def test_mix_streams(kinds, normed):
    n = len(kinds)
    leaves = mix_case(kinds, n)
    total, h = tg.mix_streams(leaves[:n], leaves[n:], normed)
    want = sum(x if scale is None else scale * x for scale, x in zip(leaves[:n], leaves[n:]))
    torch.testing.assert_close(total, want, **FP64)
    assert (h is None) == (not normed) and (not normed or torch.equal(h, tg.norm(total)))


def test_a_mixs_gradient_by_bf16_streams_is_rounded_in_few_places():
    """Compares with fp64: the norm's gradient is computed in fp32."""
    leaves, grads = mix_case(("number", "token"), 11, torch.bfloat16), []
    exact = [t.detach().double().requires_grad_() for t in leaves]
    for scale, other_scale, *streams in (leaves, exact):
        g = generator(3)
        outs = tg.mix_streams([scale, other_scale], streams, True)
        total = sum((out * randn(*out.shape, g=g).to(out.dtype)).sum() for out in outs)
        grads.append(torch.autograd.grad(total, (scale, other_scale, *streams)))
    for actual, want in zip(*grads):
        assert actual.dtype == torch.bfloat16 and (actual.double() - want).norm() < 2**-6 * want.norm()


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


def erf_gelu(x):
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def test_token_weights():
    g = generator(21)
    u, w1, w2, b2 = randn(9, 6, g=g), randn(4, 6, g=g), randn(3, 4, g=g), randn(3, g=g)
    want = 0.7 * (erf_gelu(u @ w1.T) @ w2.T + b2)
    scale = torch.tensor([0.7], dtype=torch.float64)
    torch.testing.assert_close(tg.token_weights(u, w1, w2, b2, scale, 3), want.T, **FP64)
    first_two = tg.token_weights(u, w1, w2, b2, None, 2)
    torch.testing.assert_close(first_two, want[:, :2].T / 7, **FP64)
    constants = tg.token_weights(u, None, None, b2, scale, 3)
    torch.testing.assert_close(constants, 0.7 * b2.view(3, 1), **FP64)


def test_smear_embeddings():
    """Checks that each token has a share of the one before it, as its own first channels say."""
    g = generator(22)
    embed, smear, gate = randn(9, 20, g=g), randn(1, g=g)[0], randn(1, 12, g=g)
    want = embed.clone()
    for t in range(1, 9):
        want[t] += smear / (1 + math.exp(-(embed[t, :12] * gate[0]).sum())) * embed[t - 1]
    want /= (want.square().mean(-1, keepdim=True) + 2**-23).sqrt()
    torch.testing.assert_close(tg.smear_embeddings(embed, smear, gate), want, **FP64)


@pytest.mark.parametrize("rows", [7, 1])
def test_connect(rows):
    """Checks values by halves of the channels, the stream, and the weight of attention's output.

    One row of weights is learned constants.
    """
    g = generator(23)
    x, first, back, value = randn(4, 7, 6, g=g)
    w, output_weight, out_scale = randn(rows, 8, g=g), randn(rows, 1, g=g), randn(g=g)
    values, stream, product = tg.connect(x, first, back, value, w, output_weight, out_scale)
    torch.testing.assert_close(product, out_scale * output_weight, **FP64)
    for t in range(7):
        a = w[t % rows]
        for i in range(6):
            table = a[6 if i < 3 else 7] * value[t, i]
            mixture = a[0] * first[t, i] + a[1] * back[t, i] + a[2] * x[t, i]
            torch.testing.assert_close(values[t, i], table + mixture, **FP64)
            left = x[t, i] + a[3] * first[t, i] + a[4] * back[t, i] + a[5] * x[t, i]
            torch.testing.assert_close(stream[t, i], left, **FP64)


def test_final_norm():
    g = generator(24)
    x, *streams = randn(4, 7, 6, g=g)
    weights = randn(3 + 3 * 2, 7, g=g)  # of streams, then of each stream's two groups of channels
    for count in (3, 9):
        want = x.clone()
        for i, stream in enumerate(streams):
            for group in range(2):
                own, part = weights[i].clone(), slice(3 * group, 3 * group + 3)
                if count == 9:
                    own += weights[3 + 2 * i + group]
                want[:, part] += own[:, None] * stream[:, part]
        want /= (want.square().mean(-1, keepdim=True) + 2**-23).sqrt()
        torch.testing.assert_close(tg.final_norm(x, weights[:count], streams), want, **FP64)


# The gates' order in the reference: XSA, an output gate, x0 and bigrams by layer, skip.
X0_FIRST, X0_SECOND = ((0, "x0 bigram"), (1, "x0 bigram"), (2, "x0")), ((4, "x0 bigram"), (5, "x0 bigram"))
GATES = (
    [("xsa", 1), ("xsa", 3), ("output", 3)] + [(kind, i) for i, kinds in X0_FIRST for kind in kinds.split()],
    [("output", 10)]
    + [(kind, i) for i, kinds in X0_SECOND for kind in kinds.split()]
    + [("x0", 7), ("bigram", 9), ("skip", 6)],
)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("mudd_gates", [True, False])
def test_gates(block, mudd_gates):
    """Checks names, columns and numbers of one MLP's outputs; constants without it."""
    model, g = tg.GPT(tiny_config("float64", mudd_gates=mudd_gates)), generator(25)
    parameters = dict(model.named_parameters())
    assert ("mudd_gate_w1" in parameters) == ("mudd_gate_w2" in parameters) == mudd_gates
    with torch.no_grad():
        for name, p in parameters.items():
            if name.startswith("mudd_gate"):
                p.copy_(randn(*p.shape, g=g))
    u = randn(5, model.cfg.dim, g=g)
    outputs = model.mudd_gate_b2[block][None]
    if mudd_gates:
        outputs = erf_gelu(u @ model.mudd_gate_w1[block].T) @ model.mudd_gate_w2[block].T + outputs
    outputs = outputs * model.mudd_gate_scale
    gates = model.split_gates(block, model.token_mlps("mudd_gate")[block](u))
    assert list(gates) == GATES[block]
    start = 0
    for (kind, _), gate in gates.items():
        end = start + (6 if kind in ("xsa", "output") else 1)
        torch.testing.assert_close(gate, outputs[:, start:end], **FP64)
        start = end
    assert start == (23, 13)[block] and model.mudd_gate_b2.shape == (2, 23)


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
    """Returns the losses of the targets (n, K) that are not -1."""
    z = 23 / (1 + (-(logits + 5) / 7.5).exp())
    logp = z - z.exp().sum(1, keepdim=True).log()
    losses = []
    for i, row in enumerate(targets.tolist()):
        losses.append(
            sum((-w * logp[i, target] for w, target in zip(weights, row) if target >= 0), 0 * z[i, 0])
        )
    return torch.stack(losses)


def next_tokens(targets, count):
    """Returns each position's next `count` tokens, -1 past the end."""
    n = len(targets)
    rows = [[int(targets[i + k]) if i + k < n else -1 for k in range(count)] for i in range(n)]
    return torch.tensor(rows)


@pytest.mark.parametrize("prefixes", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_loss_targets(count, prefixes):
    for T in (2, 3, 30):
        g = generator(count + T)
        targets, table = torch.tensor(integers(0, 9, g, n=T)), torch.tensor(integers(-1, 9, g, n=10))
        want = next_tokens(targets, count).tolist()
        if prefixes:
            want = [row + [table[target].item()] for row, target in zip(want, targets.tolist())]
        actual = tg.loss_targets(targets, count, table if prefixes else None)
        assert actual.dtype == torch.int64 and actual.is_contiguous() and actual.tolist() == want


def test_the_models_loss_targets_have_prefixes_while_they_have_a_weight():
    model, targets = tg.GPT(tiny_config("float64")), torch.tensor([5, 7, 2])
    model.prefixes[7] = 3
    plan = tg.plan_step(model.cfg, 0)._replace(mtp=(1.0, 0.5), prefix=0.25)
    assert model.loss_targets(targets, plan).tolist() == [[5, 7, -1], [7, 2, 3], [2, -1, -1]]
    assert plan.loss_weights == (1.0, 0.5, 0.25)
    plan = plan._replace(prefix=0.0)
    assert model.loss_targets(targets, plan).tolist() == [[5, 7], [7, 2], [2, -1]]
    assert plan.loss_weights == (1.0, 0.5)


WEIGHTS = [(1.0,), (1.0, 0.3), (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), (0.2, 0.0, 0.9), (1.0, 0.5, 0.125, 0.25)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_softcap_loss(weights, seed):
    """Compares with autograd; rows have targets that coincide, some none, one row no target at all."""
    g = generator(len(weights) + 10 * seed)
    logits = (randn(11, 7, g=g) * 9).requires_grad_()
    targets = torch.tensor(integers(-1, 6, g, n=11 * len(weights))).view(11, -1)
    targets[3:6] = targets[3:6, :1]  # weights of one row that meet on one column
    targets[7] = -1
    want = naive_losses(logits, targets, weights)
    losses, grad = tg.softcap_loss(logits.detach(), targets, weights)
    torch.testing.assert_close(losses, want.detach(), **FP64)
    want.sum().backward()
    torch.testing.assert_close(grad, logits.grad, **FP64)


def test_softcap_loss_of_bf16_logits_is_fp32():
    g = generator(8)
    logits, targets = randn(6, 50, g=g).bfloat16() * 4, torch.tensor(integers(-1, 49, g, n=12)).view(6, 2)
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
    targets = torch.tensor(integers(-1, 8, g, n=17 * len(weights))).view(17, -1)
    want = naive_losses(x @ model.lm_head, targets, weights).sum()
    want_grads = torch.autograd.grad(want, [x, model.lm_head])
    head_grad = tg.Gradient("lm_head", model.lm_head, torch.full_like(model.lm_head, torch.nan))
    loss, backward_roots = model.head_loss_and_grad(x, targets, weights, head_grad, 1.0, [])
    torch.autograd.backward(*zip(*backward_roots))
    torch.testing.assert_close(loss, want.detach(), **FP64)
    for grad, want_grad in zip((x.grad, head_grad.take()), want_grads):
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
        targets = torch.tensor(integers(-1, 511, g, n=128)).view(64, 2)
        grad = tg.Gradient("lm_head", model.lm_head, torch.zeros_like(model.lm_head))
        weights = (1.0 / count, 0.5 / count)
        loss, backward_roots = model.head_loss_and_grad(x, targets, weights, grad, 1 / count, [])
        results.append((loss, *(root_grad for _, root_grad in backward_roots), grad.main_grad))
    for fp32, fp8, fp8_of_one in zip(*results):
        assert (fp8 - fp32).norm() < 0.1 * fp32.norm() and torch.equal(n * fp8, fp8_of_one)


def test_head_chunk_does_not_matter_to_the_model():
    batch, results = tiny_batch(), []
    for chunk in (7, 64):
        model = fill_model(tg.GPT(tiny_config("float64", head_chunk=chunk), WORLD))
        plan = tg.plan_step(model.cfg, 0)._replace(windows=WINDOWS, mtp=(1.0, 0.5, 0.25), prefix=0.25)
        loss = backward(model, batch, plan)
        results.append((loss, model.token_losses(batch, WINDOWS), model.lm_head.grad, model.embed.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradient_of_the_whole_model():
    """Compares every parameter's gradient with differences of the loss along a random direction."""
    cfg = tiny_config("float64")
    model, batch, g = fill_model(tg.GPT(cfg, WORLD), tied=False), tiny_batch(), generator(11)
    plan = tg.plan_step(model.cfg, 0)._replace(windows=WINDOWS, mtp=(1.0, 0.5, 0.25))
    assert plan.prefix and model.signs.any() and (model.prefixes >= 0).any()
    backward(model, batch, plan)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=g, dtype=p.dtype)
        direction /= direction.norm()
        losses = []
        for h in (1e-5, -1e-5, 2e-5, -2e-5):
            with torch.no_grad():
                p += h * direction
                x = model.hidden_states(batch, plan.windows)
                targets = model.loss_targets(batch.targets, plan)
                own = naive_losses(x @ model.lm_head, targets, plan.loss_weights)
                losses.append(own.sum().item())
                p -= h * direction
        # Fourth-order differences: the loss curves along the gates' scale. Rounding: 1e-13 * 900 / h.
        want = (8 * (losses[0] - losses[1]) - (losses[2] - losses[3])) / 12e-5
        assert (grads[name] * direction).sum().item() == pytest.approx(want, rel=1e-4, abs=2e-5), name


# --------------------------------------------------------------------------------------------------- prefixes


def random_vocabulary(seed, size):
    """Draws tokens of 0 to 5 bytes of two or three values, so that many begin with others."""
    rng, tokens = np.random.default_rng(seed), []
    while len(tokens) < size:
        token = bytes(rng.integers(0, 2 + seed % 2, rng.integers(0, 6)).tolist())
        if not token or token not in tokens:
            tokens.append(token)
    return tokens


def longest_prefix(vocabulary, i):
    """Returns the longest other token with which token i begins; -1: none."""
    shorter = [j for j, token in enumerate(vocabulary) if token and token != vocabulary[i]]
    begins = [j for j in shorter if vocabulary[i].startswith(vocabulary[j])]
    return max(begins, key=lambda j: len(vocabulary[j]), default=-1)


@pytest.mark.parametrize("seed", range(10))
def test_prefix_table(seed):
    vocabulary = random_vocabulary(seed, 20 + seed)
    table = tg.prefix_table(vocabulary, 40)
    want = [longest_prefix(vocabulary, i) for i in range(len(vocabulary))]
    assert table.dtype == torch.int64 and table.tolist() == want + [-1] * (40 - len(vocabulary))
    assert {-1} < set(want) and any(not token for token in vocabulary)


def test_prefix_table_skips_prefixes_that_are_no_tokens():
    assert tg.prefix_table([b"abcd", b"a", b"abc", b"", b"bc", b"ab!"], 6).tolist() == [2, -1, 1, -1, -1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_read_vocabulary(seed, tmp_path):
    """Reads what is written, with upper-case digits and without a last newline too."""
    tokens, path = random_vocabulary(seed, 12) + [bytes(range(256)), b"\n"], tmp_path / "vocabulary.txt"
    text = "\n".join(token.hex() for token in tokens)
    for written in (text + "\n", text, text.upper() + "\n"):
        path.write_text(written)
        assert tg.read_vocabulary(path, len(tokens)) == tokens


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "No such file"),
        (b"61\n6\n63\n", "fromhex"),
        (b"61\nxy\n63\n", "fromhex"),
        (b"61\n\xe9\n63\n", "ascii"),
        (b"61\n62\n", "2 tokens, the config has 3"),
        (b"61\n62\n63\n64\n", "4 tokens, the config has 3"),
        (b"", "0 tokens, the config has 3"),
    ],
    ids=str,
)
def test_a_wrong_vocabulary(content, reason, tmp_path):
    """Names the file, what is wrong and a way out, in one line."""
    path = tmp_path / "vocabulary.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(tg.UserError) as error:
        tg.read_vocabulary(path, 3)
    message = str(error.value)
    assert reason in message and str(path) in message and len(message.splitlines()) == 1
    settings = message.split("train without one: ")[1].split(" --set ")
    cfg = tg.RECORD
    for setting in settings:
        cfg = tg.override(cfg, setting.removeprefix("--set "))
    assert not cfg.samples and not cfg.predicts_prefixes


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
        tg.adam(p, grad, state, row, plan, cfg, tg.TORCH_BACKEND)
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


def test_anvil_update_with_a_mantissa_equals_fp32():
    """Moves a bf16 parameter with its mantissa as an fp32 one, bit for bit, whose truncation it stays."""
    g = generator(30)
    p = randn(2, 16, 8, g=g, dtype=torch.float32)
    high, low = torch.empty(p.shape, dtype=torch.bfloat16), torch.empty(p.shape, dtype=torch.uint16)
    tg.split_mantissa(p, high, low)
    lr = torch.tensor([0.01, 0.02]).view(2, 1, 1)
    for _ in range(5):
        x, slow = randn(2, 16, 8, g=g).bfloat16(), randn(2, 16, 8, g=g, dtype=torch.float32)
        tg.anvil_update(p, None, x, slow, lr, 1.0, 0.1)
        tg.anvil_update(high, low, x, slow, lr, 1.0, 0.1)
        assert torch.equal(tg.merge_mantissa(high, low), p)
        assert ((p - high.float()).abs() <= p.abs() * 2**-7).all()
