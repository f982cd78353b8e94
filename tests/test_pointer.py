"""Checks the copy pointer against golden numbers, computed independently, and what a mixture must satisfy."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE
from golden_inputs import head_of
from test_distributed import build
from test_kernels import interpreted  # noqa: F401 (a fixture)

pytestmark = pytest.mark.numeric

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden_pointer.json").read_text())
HEAD = GOLDEN["d_head"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def close(ours, want, dtype, fp64=1e-11, fp32=1e-4):
    """Compares with arrays of golden numbers, relative to their largest entry."""
    want = torch.tensor(want, dtype=torch.float64)
    near = fp32
    if dtype == torch.float64:
        near = fp64
    limit = near * want.abs().max().clamp_min(1e-300)
    assert (ours.detach().double() - want).abs().max() <= limit


def text_of(case):
    """Returns the micro-batch of a golden case."""
    return text(case["tokens"], case["targets"], case["cu_seqlens"])


def text(tokens, targets, ends):
    """Returns a micro-batch of lists of tokens, targets and documents' ends, the first of which is 0."""
    tokens = torch.tensor(tokens, dtype=torch.int32)
    ends = torch.tensor(ends, dtype=torch.int32)
    return tg.MicroBatch(tokens, torch.tensor(targets), None, None, ends, len(tokens))


def window_of(case):
    kind, size = case["band"]
    return {"none": 1000, "window": size}.get(kind)


ATTENDS = [case for case in GOLDEN["a_pointer"]["cases"] if window_of(case)]


def check_golden(pointer, pointer_grad, case, dtype):
    q = torch.tensor(case["q"], dtype=dtype, requires_grad=True)
    k = torch.tensor(case["k"], dtype=dtype, requires_grad=True)
    sink = torch.tensor(case["sink"], dtype=dtype, requires_grad=True)
    queries = tg.PointerInputs(q, k, q @ sink * len(sink) ** -0.5)
    weights, lse = pointer(queries, text_of(case), window_of(case))
    fp64, fp32 = 1e-11, 2e-6
    hard = case["name"] in ("large_scores", "a_sink_near_1")
    if hard:
        fp64, fp32 = 1e-9, 1e-5
    for ours, name in (weights[0], "p_copy"), (weights[1], "a_sink"), (lse, "lse"):
        close(ours, case[name], dtype, fp64, fp32)
    if hard and dtype == torch.float32:
        return
    grad = torch.tensor([case["d_p_copy"], case["d_a_sink"]], dtype=dtype)
    d_queries = pointer_grad(queries, text_of(case), window_of(case), weights, lse, grad)
    close(d_queries.sink_scores, case["d_sink_scores"], dtype, fp64)
    torch.autograd.backward(queries, d_queries)
    for t, name in (q, "d_q"), (k, "d_k"), (sink, "d_sink"):
        close(t.grad, case[name], dtype, fp64)


def queries_of(x, bank, gain, sink):
    model = SimpleNamespace(pointer_bank=bank, pointer_gain=gain, pointer_sink=sink)
    return tg.GPT.pointer_inputs(model, x)


CASES = pytest.mark.parametrize("case", ATTENDS, ids=lambda case: case["name"])


@pytest.mark.pinned("the copy pointer of PR 379")
@DTYPES
@CASES
def test_golden_weights_and_gradients(case, dtype):
    check_golden(tg.pointer, tg.pointer_grad, case, dtype)


@pytest.mark.pinned("the copy pointer of PR 379")
@DTYPES
def test_golden_queries(dtype):
    case = GOLDEN["b_projection"]
    names = "x", "bank", "gain", "sink"
    inputs = [torch.tensor(case[name], dtype=dtype, requires_grad=True) for name in names]
    queries = queries_of(*inputs)
    batch = text_of(case)
    weights, lse = tg.pointer(queries, batch, 1000)
    for ours, name in (queries.q, "q"), (queries.k, "k"), (weights[0], "p_copy"), (weights[1], "a_sink"):
        close(ours, case[name], dtype, fp32=2e-6)
    grad = torch.tensor([case["d_p_copy"], case["d_a_sink"]], dtype=dtype)
    torch.autograd.backward(queries, tg.pointer_grad(queries, batch, 1000, weights, lse, grad))
    for t, name in zip(inputs, names):
        close(t.grad, case[f"d_{name}"], dtype)


def copies_of(case, dtype, slot):
    weights = torch.tensor([case["p_copy"], case["a_sink"]], dtype=dtype)
    return tg.PointerProbs(weights, torch.tensor([slot]), torch.empty_like(weights))


@pytest.mark.pinned("the copy pointer of PR 379")
@DTYPES
@pytest.mark.parametrize("case", GOLDEN["c_mixture"]["cases"], ids=lambda case: case["name"])
def test_golden_mixture(case, dtype):
    logits = torch.tensor(case["logits"], dtype=dtype)
    targets = torch.tensor(case["targets"])
    copies = copies_of(case, dtype, 24)
    losses, grad = tg.softcap_loss(
        logits, targets, torch.tensor(case["weights"], dtype=dtype), pointer_probs=copies
    )
    hard = dtype == torch.float32 and case["name"] in ("floor", "gate_fully_open")
    close(losses, case["losses"], dtype, fp32=2e-6)
    if not hard:
        close(grad, case["d_logits"], dtype)
        close(copies.grad[0], case["d_p_copy"], dtype)
        close(copies.grad[1], case["d_a_sink"], dtype)
    if case["weights"] == [1.0]:
        close(tg.next_token_losses(logits, targets[:, 0], copies), case["losses"], dtype, fp32=4e-6)
    elif hard:
        assert grad.isfinite().all()


@pytest.mark.pinned("the copy pointer of PR 379")
@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN["c_mixture"]["cases"], ids=lambda case: case["name"])
def test_golden_mixture_of_the_kernel(interpreted, case):  # noqa: F811
    """Compares with plain torch where fp32 has no digits for the golden numbers; and a row without target."""
    dtype = torch.float32
    logits = torch.tensor(case["logits"])
    copies = copies_of(case, dtype, 24)
    targets = torch.tensor(case["targets"])
    weights = torch.tensor(case["weights"])
    losses, grad = interpreted.triton_softcap_loss(logits, targets, weights, pointer_probs=copies)
    close(losses, case["losses"], dtype, fp32=2e-6)
    want = case["d_logits"]
    plain = copies._replace(grad=torch.empty_like(copies.probs))
    copy_want = [case["d_p_copy"], case["d_a_sink"]]
    if case["name"] in ("floor", "gate_fully_open"):
        want = tg.softcap_loss(logits, targets, weights, pointer_probs=plain)[1].tolist()
        copy_want = plain.grad.tolist()
    close(grad, want, dtype)
    for ours, numbers in zip(copies.grad, copy_want):
        close(ours, numbers, dtype)
    targets[0] = -1
    interpreted.triton_softcap_loss(logits, targets, weights, pointer_probs=copies)
    assert not copies.grad[:, 0].any()


# -------------------------------------------------------------------------------------------------- the head


def run_head(case, dtype, chunk):
    """Returns losses by position, and the gradients of x, lm_head, bank, gain and sink, of a golden case."""
    x = torch.tensor(HEAD["x"], dtype=dtype, requires_grad=True)
    bank = torch.tensor(HEAD["bank"], dtype=dtype, requires_grad=True)
    gain = torch.tensor(HEAD["gain"], dtype=dtype, requires_grad=True)
    sink = torch.tensor(HEAD["sink"], dtype=dtype, requires_grad=True)
    w = torch.tensor(HEAD["lm_head"], dtype=dtype)
    tokens = HEAD["tokens"]
    batch = text(tokens[:-1], tokens[1:], case["cu_seqlens"])
    losses = []

    def softcap_loss(*args):
        of_chunk, grad = tg.softcap_loss(*args)
        losses.append(of_chunk)
        return of_chunk, grad

    backend = tg.TORCH_BACKEND._replace(softcap_loss=softcap_loss)
    cfg = replace(tg.RECORD, head_chunk=chunk, padded_vocab=HEAD["V"])
    head = head_of(w)
    model = SimpleNamespace(cfg=cfg, lm_head=w, backend=backend)
    weights = list(case["weights"])
    prefixes = None
    if case["prefix_weight"]:
        prefixes = torch.tensor(HEAD["prefix_table"])
    targets = tg.loss_targets(batch.targets, len(weights), prefixes)
    if case["prefix_weight"]:
        weights.append(case["prefix_weight"])
    weights = torch.tensor(weights, dtype=dtype)
    candidates = None
    if "target_places" in case:
        candidates = torch.tensor(HEAD["candidates"]).int()
    queries = queries_of(x, bank, gain, sink)
    found, lse = tg.pointer(queries, batch, window_of(case))
    copies = tg.PointerProbs(found, torch.tensor([HEAD["column"]]), torch.empty_like(found))
    loss, dx = tg.GPT.head_loss_and_grad(model, x.detach(), targets, weights, head, 1.0, candidates, copies)
    query_grads = tg.pointer_grad(queries, batch, window_of(case), found, lse, copies.grad)
    torch.autograd.backward(queries, query_grads)
    grads = {
        "x": x.grad + dx,
        "bank": bank.grad,
        "gain": gain.grad,
        "sink": sink.grad,
        "lm_head": head.main_grad,
    }
    close(loss, case["sum"], dtype, fp64=1e-12, fp32=1e-6)
    return torch.cat(losses), grads


@pytest.mark.pinned("the copy pointer of PR 379")
@DTYPES
@pytest.mark.parametrize("chunk", [1, 5, 24])
@pytest.mark.parametrize("name", [name for name, case in HEAD["cases"].items() if window_of(case)])
def test_golden_head(name, dtype, chunk):
    case = HEAD["cases"][name]
    losses, grads = run_head(case, dtype, chunk)
    close(losses, case["losses"], dtype, fp32=2e-6)
    for name, grad in grads.items():
        close(grad, case[f"d_{name}"], dtype)


def distribution(tokens, cu_seqlens, sampled_columns=None):
    """Returns the probabilities (T, columns) of all next tokens of a golden text: a loss for each."""
    golden = {}
    for name in "x", "bank", "gain", "sink", "lm_head":
        golden[name] = torch.tensor(HEAD[name], dtype=torch.float64)
    x = golden["x"]
    columns = torch.tensor(sampled_columns or range(HEAD["V"]))
    slot = (columns == HEAD["column"]).nonzero()[0]
    logits = x @ golden["lm_head"][:, columns]
    queries = queries_of(x, golden["bank"], golden["gain"], golden["sink"])
    probs = []
    for i, token in enumerate(columns.tolist()):
        batch = text(tokens[:-1], [token] * len(x), cu_seqlens)
        weights, _ = tg.pointer(queries, batch, 1000)
        losses = tg.next_token_losses(
            logits, torch.full((len(x),), i), tg.PointerProbs(weights, slot, weights)
        )
        probs.append((-losses).exp() - tg.PROB_FLOOR)
    return torch.stack(probs, dim=1)


@pytest.mark.pinned("the copy pointer of PR 379")
def test_golden_distributions():
    golden = GOLDEN["e_distribution"]
    case = HEAD["cases"]["one_target"]
    whole = distribution(HEAD["tokens"], case["cu_seqlens"])
    close(whole[golden["positions"]], golden["next_token_probabilities"], torch.float64)
    close(whole.sum(1), golden["sums_over_all_columns"], torch.float64)
    assert whole[:, HEAD["column"]].abs().max() < 1e-15
    some = golden["with_candidates"]
    sampled = distribution(HEAD["tokens"], case["cu_seqlens"], HEAD["candidates"])
    close(sampled[golden["positions"]], some["next_token_probabilities"], torch.float64)
    close(sampled.sum(1), some["sums_over_candidates"], torch.float64)
    alone = golden["one_document"]  # its first token is no target, and so no candidate
    sampled = distribution(alone["tokens"], alone["cu_seqlens"], alone["candidates"])
    close(sampled.sum(1), alone["sums_over_candidates"], torch.float64)


@pytest.mark.pinned("the choice of sampled columns")
def test_golden_candidates():
    golden = GOLDEN["g_candidate_sets"]
    offset = None
    for step in golden["steps"]:
        if offset is not None:
            assert offset == step["offset_before"]
        needed = np.array([*step["targets"], golden["copy"]])
        chosen, offset = tg.choose_sampled_columns(needed, golden["P"], golden["V"], step["offset_before"])
        assert chosen.tolist() == step["candidates"] and offset == step["offset_after"]
        assert tg.index_in(torch.tensor([golden["copy"]]), chosen).item() == step["place_of_copy"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("columns", [2, 30])
def test_what_is_trained_sums_to_one(seed, columns):
    """Draws logits, the pointer's weights on some columns, and the slot: of all columns, or of candidates."""
    g = torch.Generator().manual_seed(seed)
    logits = 8 * torch.randn(1, columns, generator=g, dtype=torch.float64)
    slot = int(torch.randint(columns, (1,), generator=g))
    found = torch.rand(columns + 1, generator=g, dtype=torch.float64) ** 4  # the last one is the sink's
    found[slot] = 0
    found /= found.sum()
    total = 0.0
    for token in range(columns):
        weights = torch.stack([found[token], found[-1]])[:, None]
        copies = tg.PointerProbs(weights, torch.tensor([slot]), torch.empty_like(weights))
        target = torch.tensor([[token]])
        one = torch.ones(1, dtype=torch.float64)
        loss, _ = tg.softcap_loss(logits, target, one, pointer_probs=copies)
        if token != slot:
            total += (-loss).exp().item() - tg.PROB_FLOOR
    assert total == pytest.approx(1, abs=1e-12)


# --------------------------------------------------------------------------------------------------- a model


@pytest.fixture(scope="module", params=[8, 0])
def model(request):
    """Returns a model with and without pointer; its head has as many columns as these tokens, or one more."""
    layers = tuple(replace(layer, mudd=False) for layer in tg.LAYERS[:4])
    dim = request.param
    cfg = replace(
        BASE, vocab_size=61, padded_vocab=61 + bool(dim), bos_id=60, heads=4, head_dim=8,
        mlp_dim=32, dtype="float64", bank_dtype="float64", layers=layers, skip_from=0, skip_to=2,
        backout_from=1, head_chunk=7, ngrams=tg.Ngrams((2,), 64, 16, "float64"), pointer_dim=dim,
        pointer_val_window=9, val_slice_tokens=64, microbatches=1,
    )  # fmt: skip
    _, model, _ = build(0, 1, cfg)
    return model


def document(seed, length=20):
    rng = np.random.default_rng(seed)
    return np.append(60, rng.integers(0, 7, length)).astype(np.uint16)


def losses_of(model, *documents):
    starts = np.cumsum([len(part) for part in documents[:-1]])
    tokens = np.concatenate([*documents, [60]])
    batch = tg.make_micro_batch(tokens, starts, 64, model.cfg)
    return model.token_losses(batch, tg.window_tokens(model.cfg, model.cfg.val_windows))


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_sum_to_one_and_are_those_of_the_losses(model, seed):
    tokens = document(seed)
    losses = losses_of(model, tokens)
    for i in range(len(tokens)):
        probs = model.next_token_probs(tokens[: i + 1].tolist())
        assert probs.shape == (61,) and probs.sum() == pytest.approx(1, abs=1e-12)
        target = [*tokens, 60][i + 1]
        floor = tg.PROB_FLOOR * bool(model.cfg.pointer_dim)
        assert (probs[target] + floor).log() == pytest.approx(-losses[i].item(), rel=1e-9)


def test_a_token_changes_nothing_before_it(model):
    tokens = document(0)
    before = losses_of(model, tokens)
    tokens[15] = 7 - tokens[15]
    after = losses_of(model, tokens)
    assert torch.equal(before[:14], after[:14]) and not torch.isclose(before[14:], after[14:]).all()


def test_no_source_is_in_another_document():
    tokens = torch.arange(24) % 3
    g = torch.Generator().manual_seed(0)
    q = torch.randn(24, 8, generator=g)
    k = torch.randn(24, 8, generator=g)
    sink_scores = torch.randn(24, generator=g)
    queries = tg.PointerInputs(q, k, sink_scores)
    ends = [0, 5, 17, 24]
    batch = text(tokens.tolist(), tokens.tolist(), ends)
    whole, _ = tg.pointer(queries, batch, 1000)
    for begin, end in zip(ends, ends[1:]):
        alone = tokens[begin:end].tolist()
        part = tg.PointerInputs(q[begin:end], k[begin:end], sink_scores[begin:end])
        weights, _ = tg.pointer(part, text(alone, alone, [0, end - begin]), 1000)
        torch.testing.assert_close(weights, whole[:, begin:end])


def test_all_columns_as_candidates_change_nothing(model):
    """To the bit, but for lm_head's gradient: there a chunk's product is added, not summed in place."""
    if not model.cfg.pointer_dim:
        pytest.skip("test_sampled.py has the head without pointer")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(21, 32, dtype=torch.float64, generator=g)
    targets = torch.randint(61, (21, 2), generator=g)
    weights = torch.tensor([1.0, 0.5]).double()
    copied = torch.rand(2, 21, dtype=torch.float64, generator=g) / 2
    found = []
    for candidates in (None, torch.arange(62, dtype=torch.int32)):
        head = head_of(model.lm_head)
        copies = tg.PointerProbs(copied, model.gate_column, torch.empty_like(copied))
        loss, dx = model.head_loss_and_grad(x, targets, weights, head, 1.0, candidates, copies)
        found.append((loss, dx, copies.grad, head.main_grad))
    without, with_candidates = found
    for i in range(3):
        assert torch.equal(without[i], with_candidates[i])
    summed = without[3]
    added = with_candidates[3]
    bound = 1e-14 * summed.abs().max().item()
    torch.testing.assert_close(added, summed, rtol=0, atol=bound)


def test_the_pointer_needs_a_column_of_its_own():
    with pytest.raises(tg.UserError, match="padded_vocab"):
        tg.check_config(replace(BASE, pointer_dim=8, padded_vocab=257), 1)


@pytest.mark.pinned("the schedule of the record preset")
def test_the_schedule_of_pr_379():
    want = GOLDEN["h_schedule"]
    cfg = tg.RECORD
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    assert [*cfg.stage_starts, cfg.steps] == want["stage_ends"]
    assert sum(plan.batch_tokens for plan in plans) == want["training_tokens"]
    for name in ("sampled_columns", "prefix"):
        changes = [b.step for a, b in zip(plans, plans[1:]) if getattr(a, name) != getattr(b, name)]
        assert changes == want["candidates_change_at" if name == "sampled_columns" else "prefix_changes_at"]
    assert [plan.step for plan in plans if plan.untie] == [want["untie_step"]]
    assert sum(plan.lr_mul for plan in plans) == pytest.approx(want["sum_of_lr_mul"], rel=1e-4)
    for row in want["rows"]:
        plan = plans[row["step"]]
        assert (plan.batch_tokens, plan.sampled_columns) == (row["batch_tokens"], row["candidates"])
        assert (plan.mtp, plan.prefix) == (pytest.approx(row["mtp"]), pytest.approx(row["prefix"]))
        assert plan.lr_mul == pytest.approx(row["lr_mul"], rel=1e-4)
        assert plan.momentum == pytest.approx(row["momentum"])
