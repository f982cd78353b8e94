"""Checks section 6, the layers, the head and the update rules against naive float64 programs in this file."""

import math
from dataclasses import replace
from functools import partial

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


def test_attention_gradients():
    for seed in (1, 4, 9):
        q, k, v, ends, max_doc_len, window = attention_case(seed)
        T = min(len(q), 12)
        ends = torch.tensor([min(end, T) for end in ends], dtype=torch.int32)

        attend = partial(
            tg.attention, cu_seqlens=ends, max_seqlen=min(max_doc_len, T), window=window, scale=0.7
        )
        assert torch.autograd.gradcheck(attend, [t[:T].clone().requires_grad_() for t in (q, k, v)])


# -------------------------------------------------------------------------------- small functions, one by one


def test_norm():
    x = randn(7, 12, g=generator(2)) * 1e-3  # small, so that eps shows
    torch.testing.assert_close(tg.norm(x), x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt(), **FP64)


def test_norm_has_one_eps_for_all_dtypes():
    x = torch.full((1, 8), 2**-11)  # its square is 2 * eps
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        assert tg.norm(x.to(dtype)).double()[0, 0].item() == pytest.approx((2 / 3) ** 0.5, rel=near)


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
        hidden = u @ model.mudd_gate_w1[block].T
        gelu = hidden / 2 * (1 + torch.erf(hidden / math.sqrt(2)))
        outputs = gelu @ model.mudd_gate_w2[block].T + outputs
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
