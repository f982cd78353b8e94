"""Checks the copy pointer against golden numbers, computed independently, and what a mixture must satisfy."""

import pytest
import torch

import train_gpt as tg
from golden_inputs import head_model, head_of, read_golden
from test_kernels import interpreted  # noqa: F401 (a fixture)

pytestmark = pytest.mark.numeric

GOLDEN = read_golden("golden_pointer")
HEAD = GOLDEN["d_head"]
PINNED = pytest.mark.pinned("the copy pointer of PR 379")
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def close(ours, want, dtype, fp64=1e-11, fp32=1e-4):
    """Compares with arrays of golden numbers, relative to their largest entry."""
    want = torch.as_tensor(want, dtype=torch.float64)
    near = fp32
    if dtype == torch.float64:
        near = fp64
    limit = near * want.abs().max().clamp_min(1e-300)
    assert (ours.detach().double() - want).abs().max() <= limit


def text(tokens, targets, ends):
    """Returns a micro-batch of lists of tokens, targets and documents' ends, the first of which is 0."""
    tokens = torch.tensor(tokens, dtype=torch.int32)
    ends = torch.tensor(ends, dtype=torch.int32)
    return tg.MicroBatch(tokens, torch.tensor(targets), None, None, ends, len(tokens))


def window_of(case):
    """Returns None for bands of blocks, which ours lacks."""
    kind, size = case["band"]
    return {"none": 1000, "window": size}.get(kind)


ATTENDS = [case for case in GOLDEN["a_pointer"]["cases"] if window_of(case)]


@PINNED
@DTYPES
@pytest.mark.parametrize("case", ATTENDS, ids=lambda case: case["name"])
def test_golden_weights_and_gradients(case, dtype):
    q = torch.tensor(case["q"], dtype=dtype, requires_grad=True)
    k = torch.tensor(case["k"], dtype=dtype, requires_grad=True)
    sink = torch.tensor(case["sink"], dtype=dtype, requires_grad=True)
    queries = tg.PointerInputs(q, k, q @ sink * len(sink) ** -0.5)
    batch = text(case["tokens"], case["targets"], case["cu_seqlens"])
    weights, lse = tg.pointer(queries, batch, window_of(case))
    fp64, fp32 = 1e-11, 2e-6
    hard = case["name"] in ("large_scores", "a_sink_near_1")
    if hard:
        fp64, fp32 = 1e-9, 1e-5
    for ours, name in (weights[0], "p_copy"), (weights[1], "a_sink"), (lse, "lse"):
        close(ours, case[name], dtype, fp64, fp32)
    if hard and dtype == torch.float32:
        return
    grad = torch.tensor([case["d_p_copy"], case["d_a_sink"]], dtype=dtype)
    d_queries = tg.pointer_grad(queries, batch, window_of(case), weights, lse, grad)
    close(d_queries.sink_scores, case["d_sink_scores"], dtype, fp64)
    torch.autograd.backward(queries, d_queries)
    for t, name in (q, "d_q"), (k, "d_k"), (sink, "d_sink"):
        close(t.grad, case[name], dtype, fp64)


MIXTURES = pytest.mark.parametrize("case", GOLDEN["c_mixture"]["cases"], ids=lambda case: case["name"])
MIXTURE_GRADS = "d_logits", "d_p_copy", "d_a_sink"
NO_DIGITS_IN_FP32 = "floor", "gate_fully_open"  # of the gradients


def mixture_inputs(case, dtype):
    """Returns logits, targets, weights of the targets, and the pointer's probabilities."""
    probs = torch.tensor([case["p_copy"], case["a_sink"]], dtype=dtype)
    copies = tg.PointerOutput(probs, torch.tensor([24]), torch.empty_like(probs))
    logits = torch.tensor(case["logits"], dtype=dtype)
    return logits, torch.tensor(case["targets"]), torch.tensor(case["weights"], dtype=dtype), copies


@PINNED
@DTYPES
@MIXTURES
def test_golden_mixture(case, dtype):
    logits, targets, weights, copies = mixture_inputs(case, dtype)
    losses, grad = tg.softcap_loss(logits, targets, weights, pointer_out=copies)
    close(losses, case["losses"], dtype, fp32=2e-6)
    if dtype == torch.float64 or case["name"] not in NO_DIGITS_IN_FP32:
        for ours, name in zip((grad, *copies.dprobs), MIXTURE_GRADS):
            close(ours, case[name], dtype)
    if case["weights"] == [1.0]:
        close(tg.next_token_losses(logits, targets[:, 0], copies), case["losses"], dtype, fp32=4e-6)


@PINNED
@pytest.mark.slow
@MIXTURES
def test_golden_mixture_of_the_kernel(interpreted, case):  # noqa: F811
    """Compares with plain torch where fp32 has no digits for the golden numbers; and a row without target."""
    logits, targets, weights, copies = mixture_inputs(case, torch.float32)
    wants = [case[name] for name in MIXTURE_GRADS]
    if case["name"] in NO_DIGITS_IN_FP32:
        _, grad = tg.softcap_loss(logits, targets, weights, pointer_out=copies)
        wants = [grad, *copies.dprobs.clone()]
    losses, grad = interpreted.triton_softcap_loss(logits, targets, weights, pointer_out=copies)
    close(losses, case["losses"], torch.float32, fp32=2e-6)
    for ours, want in zip((grad, *copies.dprobs), wants):
        close(ours, want, torch.float32)
    targets[0] = -1
    interpreted.triton_softcap_loss(logits, targets, weights, pointer_out=copies)
    assert not copies.dprobs[:, 0].any()


@PINNED
@DTYPES
@pytest.mark.parametrize("chunk", [1, 5, 24])
@pytest.mark.parametrize("name", [name for name, case in HEAD["cases"].items() if window_of(case)])
def test_golden_head(name, dtype, chunk):
    """Compares the loss and all gradients; each position's last target is a prefix."""
    case = HEAD["cases"][name]
    x, bank, gain, sink = (
        torch.tensor(HEAD[key], dtype=dtype, requires_grad=True) for key in ("x", "bank", "gain", "sink")
    )
    w = torch.tensor(HEAD["lm_head"], dtype=dtype)
    model = head_model(w, chunk)
    model.pointer_bank, model.pointer_gain, model.pointer_sink = bank, gain, sink
    tokens = HEAD["tokens"]
    batch = text(tokens[:-1], tokens[1:], case["cu_seqlens"])
    targets = tg.loss_targets(batch.targets, len(case["weights"]), torch.tensor(HEAD["prefix_table"]))
    weights = torch.tensor(case["weights"] + [case["prefix_weight"]], dtype=dtype)
    candidates = None
    if "target_places" in case:
        candidates = torch.tensor(HEAD["candidates"]).int()
    head = head_of(w)
    queries = tg.GPT.pointer_inputs(model, x)
    found, lse = tg.pointer(queries, batch, window_of(case))
    copies = tg.PointerOutput(found, torch.tensor([HEAD["column"]]), torch.empty_like(found))
    loss, dx = tg.GPT.head_loss_and_grad(model, x.detach(), targets, weights, head, candidates, copies)
    query_grads = tg.pointer_grad(queries, batch, window_of(case), found, lse, copies.dprobs)
    torch.autograd.backward(queries, query_grads)
    close(loss, case["sum"], dtype, fp64=1e-12, fp32=1e-6)
    close(x.grad + dx, case["d_x"], dtype)
    close(head.main_grad, case["d_lm_head"], dtype)
    for t, key in (bank, "d_bank"), (gain, "d_gain"), (sink, "d_sink"):
        close(t.grad, case[key], dtype)


# ----------------------------------------------------------------------------------------------- the schedule


@pytest.mark.pinned("the schedule of the record preset")
def test_the_schedule_of_pr_379():
    want = GOLDEN["h_schedule"]
    cfg = tg.RECORD
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    for name, key in ("sampled_columns", "candidates_change_at"), ("prefix", "prefix_changes_at"):
        assert [b.step for a, b in zip(plans, plans[1:]) if getattr(a, name) != getattr(b, name)] == want[key]
    assert [plan.step for plan in plans if plan.untie] == [want["untie_step"]]
    assert sum(plan.lr_mul for plan in plans) == pytest.approx(want["sum_of_lr_mul"], rel=1e-4)
    for row in want["rows"]:
        plan = plans[row["step"]]
        assert (plan.batch_tokens, plan.sampled_columns) == (row["batch_tokens"], row["candidates"])
        assert (plan.mtp, plan.prefix) == (pytest.approx(row["mtp"]), pytest.approx(row["prefix"]))
        assert plan.lr_mul == pytest.approx(row["lr_mul"], rel=1e-4)
        assert plan.momentum == pytest.approx(row["momentum"])
