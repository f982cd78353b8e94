"""Checks the copy pointer against golden numbers, computed independently, and what a mixture must satisfy."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as tg
from test_kernels import interpreted  # noqa: F401 (a fixture)

pytestmark = pytest.mark.numeric

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden_pointer.json").read_text())
HEAD = GOLDEN["d_head"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def close(ours, want, dtype, fp64=1e-11, fp32=1e-4):
    """Compares with arrays of golden numbers, relative to their largest entry."""
    want = torch.tensor(want, dtype=torch.float64)
    limit = (fp64 if dtype == torch.float64 else fp32) * want.abs().max().clamp_min(1e-300)
    assert (ours.detach().double() - want).abs().max() <= limit


def text(case, tokens=None, targets=None):
    """Returns the micro-batch of a golden case."""
    tokens = torch.tensor(case["tokens"] if tokens is None else tokens, dtype=torch.int32)
    targets = torch.tensor(case["targets"] if targets is None else targets)
    ends = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    return tg.MicroBatch(tokens, targets, None, None, ends, len(tokens))


def window_of(case):
    kind, size = case["band"]
    return {"none": 1000, "window": size}.get(kind)


ATTENDS = [case for case in GOLDEN["a_pointer"]["cases"] if window_of(case)]


@DTYPES
@pytest.mark.parametrize("case", ATTENDS, ids=lambda case: case["name"])
def test_golden_weights_and_gradients(case, dtype):
    q, k, sink, *grads = (
        torch.tensor(case[name], dtype=dtype) for name in ("q", "k", "sink", "d_p_copy", "d_a_sink")
    )
    q.requires_grad_(), k.requires_grad_(), sink.requires_grad_()
    queries = tg.Queries(q, k, q @ sink * len(sink) ** -0.5)
    weights, lse = tg.pointer(queries, text(case), window_of(case))
    hard = case["name"] in ("large_scores", "a_sink_near_1")
    near = {"fp64": 1e-9, "fp32": 1e-5} if hard else {}
    for ours, name in (weights[0], "p_copy"), (weights[1], "a_sink"), (lse, "lse"):
        close(ours, case[name], dtype, **{"fp32": 2e-6} | near)
    d_queries = tg.pointer_grad(queries, text(case), window_of(case), weights, lse, torch.stack(grads))
    if dtype == torch.float64 or not hard:
        close(d_queries.sink_scores, case["d_sink_scores"], dtype, **near)
        torch.autograd.backward(queries, d_queries)
        for t, name in (q, "d_q"), (k, "d_k"), (sink, "d_sink"):
            close(t.grad, case[name], dtype, **near)


@DTYPES
def test_golden_queries(dtype):
    case = GOLDEN["b_projection"]
    names = "x", "bank", "gain", "sink"
    inputs = [torch.tensor(case[name], dtype=dtype, requires_grad=True) for name in names]
    queries, batch = tg.pointer_queries(*inputs), text(case)
    weights, lse = tg.pointer(queries, batch, 1000)
    for ours, name in (queries.q, "q"), (queries.k, "k"), (weights[0], "p_copy"), (weights[1], "a_sink"):
        close(ours, case[name], dtype, fp32=2e-6)
    grad = torch.tensor([case["d_p_copy"], case["d_a_sink"]], dtype=dtype)
    torch.autograd.backward(queries, tg.pointer_grad(queries, batch, 1000, weights, lse, grad))
    for t, name in zip(inputs, names):
        close(t.grad, case[f"d_{name}"], dtype)


def copies_of(case, dtype, slot):
    weights = torch.tensor([case["p_copy"], case["a_sink"]], dtype=dtype)
    return tg.Copies(weights, torch.empty_like(weights), torch.tensor([slot]))


@DTYPES
@pytest.mark.parametrize("case", GOLDEN["c_mixture"]["cases"], ids=lambda case: case["name"])
def test_golden_mixture(case, dtype):
    logits = torch.tensor(case["logits"], dtype=dtype)
    targets, copies = torch.tensor(case["targets"]), copies_of(case, dtype, 24)
    losses, grad = tg.softcap_loss(logits, targets, torch.tensor(case["weights"], dtype=dtype), copies=copies)
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


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN["c_mixture"]["cases"], ids=lambda case: case["name"])
def test_golden_mixture_of_the_kernel(interpreted, case):
    """Compares with plain torch where fp32 has no digits for the golden numbers; and a row without target."""
    dtype = torch.float32
    logits, copies = torch.tensor(case["logits"]), copies_of(case, dtype, 24)
    targets, weights = torch.tensor(case["targets"]), torch.tensor(case["weights"])
    losses, grad = interpreted.triton_softcap_loss(logits, targets, weights, copies=copies)
    close(losses, case["losses"], dtype, fp32=2e-6)
    want, plain = case["d_logits"], copies._replace(grad=torch.empty_like(copies.weights))
    copy_want = [case["d_p_copy"], case["d_a_sink"]]
    if case["name"] in ("floor", "gate_fully_open"):
        want = tg.softcap_loss(logits, targets, weights, copies=plain)[1].tolist()
        copy_want = plain.grad.tolist()
    close(grad, want, dtype)
    for ours, numbers in zip(copies.grad, copy_want):
        close(ours, numbers, dtype)
    targets[0] = -1
    interpreted.triton_softcap_loss(logits, targets, weights, copies=copies)
    assert not copies.grad[:, 0].any()
