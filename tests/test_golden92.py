"""Checks the model against golden numbers of record 92, computed independently: tests/golden/README.md."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import (
    GOLDEN92,
    RECORD92,
    WORLD,
    backward,
    distance,
    fill,
    fill_model,
    golden_layout,
    loss_weights,
    targets_of,
    tiny_config,
)

pytestmark = [pytest.mark.numeric, pytest.mark.pinned("the model or the schedule of record 92")]

MODEL = GOLDEN92["a_model"]
DTYPES = {"fp32": "float32", "fp64": "float64"}
CASES = pytest.mark.parametrize("case", MODEL["cases"])
KINDS = pytest.mark.parametrize("kind", DTYPES)
# A token's loss. fp32: twice what the reference's own fp32 and fp64 differ by, and for two programs.
LOSS_NEAR = {"fp32": 2e-6, "fp64": 1e-12}
# Bounds on statistics of gradients, in units of l2. fp32: the reference's own differ by up to 1.8e-5.
NEAR = {"fp32": 5e-4, "fp64": 1e-11}


class Table:
    """Gives the whole table of n-grams as the rows that a step has fetched."""

    def __init__(self, rows):
        self.cache = rows

    def fetch(self, ids):
        return self.cache[ids.long()]


def golden_config(dtype):
    ngrams = tg.Ngrams((2, 3), 512, width=192, dtype=dtype)
    return tiny_config(dtype, ngrams=ngrams, window_unit=128)


def golden_batch(want, cfg, cap):
    ngrams = ("bigram", "trigram")
    tokens = np.array(want["tokens"], np.uint16)
    starts = np.array(want["starts"][1:])
    batch = tg.make_micro_batch(tokens, starts, 64, cfg, cap)
    rows, signs = (
        torch.tensor([want[f"{name}_{what}"] for name in ngrams], dtype=torch.int32)
        for what in ("rows", "signs")
    )
    return batch._replace(hashed_rows=rows, slots=rows, sign_ids=signs)  # the cache is the table


@functools.cache
def golden_model(case, kind):
    """Returns a golden case, and its model and plan."""
    cfg = golden_config(DTYPES[kind])
    want = MODEL["cases"][case]
    model = fill_model(tg.GPT(cfg, WORLD), want["tied"])
    model.ngrams = Table(fill((1024, 192), 16, 0.4).to(model.signs.dtype))
    model.use_rotary(want["rotary_stage"])
    windows = dict(zip(("short", "long"), want["windows"]))
    plan = tg.plan_step(cfg, 0)
    plan = plan._replace(windows=windows, mtp=tuple(want["mtp_weights"]), prefix=want["prefix_weight"])
    return want, model, plan


@KINDS
@CASES
def test_training_losses(case, kind):
    want, model, plan = golden_model(case, kind)
    batch = golden_batch(want, model.cfg, want["cap"] or 0)
    with torch.no_grad():
        x = model.forward(model.look_up(batch, training=False), batch, plan.windows)
        logits = x @ model.lm_head
        losses, _ = tg.softcap_loss(logits, targets_of(model, batch, plan), loss_weights(plan, model))
    assert losses.tolist() == pytest.approx(want["losses"], rel=LOSS_NEAR[kind])


@pytest.mark.parametrize(
    "case", GOLDEN92["g_schedule"]["attention_cap"], ids=lambda case: str(case["pieces"])
)
def test_attention_cap(case):
    ends = np.cumsum(case["pieces"])
    tokens = np.zeros(ends[-1] + 1, np.uint16)
    cfg = golden_config("float32")
    batch = tg.make_micro_batch(tokens, ends[:-1], 6000, cfg, attention_cap=2560)
    want = case["cu_seqlens"]
    padding = len(batch.cu_seqlens) - len(want)
    assert batch.cu_seqlens.tolist() == want + padding * want[-1:] and batch.max_seqlen == 2560


@KINDS
@CASES
def test_validation_losses(case, kind):
    want, model, plan = golden_model(case, kind)
    losses = model.token_losses(golden_batch(want, model.cfg, 0), plan.windows)
    assert losses.mean().item() == pytest.approx(want["eval_mean"], rel=LOSS_NEAR[kind])
    assert losses[:8].tolist() == pytest.approx(want["eval_first8"], rel=LOSS_NEAR[kind])


@functools.cache
def gradients(case, kind):
    """Returns gradients by golden name in the reference's layout."""
    want, model, plan = golden_model(case, kind)
    model.zero_grad()
    batch = golden_batch(want, model.cfg, want["cap"] or 0)
    leaves = backward(model, batch, plan)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name in ("embed", "value_embeds"):
        p = getattr(model, name)
        grads[name] = torch.zeros_like(p).index_add_(0, batch.inputs, leaves[name].grad)
    table = torch.zeros_like(model.ngrams.cache)
    index = tg.make_segments(batch.hashed_rows, batch.sign_ids)
    tg.segment_sum_rows(table, leaves["ngrams"].grad, index, model.signs)
    return golden_layout(grads, model.cfg) | {"bigram_embed.weight": table}


@KINDS
@CASES
def test_gradients(case, kind):
    grads = gradients(case, kind)
    for name, golden in MODEL["cases"][case]["gradients"].items():
        assert distance(grads[name], golden) < NEAR[kind], name


@CASES
def test_every_entry_of_small_gradients(case):
    grads = gradients(case, "fp64")
    for name, golden in MODEL["cases"][case]["small_gradients_in_full"].items():
        grad = grads[name].flatten()
        assert grad.tolist() == pytest.approx(np.ravel(golden).tolist(), abs=1e-11 * grad.norm().item()), name


# ----------------------------------------------------------------------------------------------- the schedule

SCHEDULE = GOLDEN92["g_schedule"]


@pytest.mark.parametrize("row", SCHEDULE["rows"], ids=lambda row: str(row["step"]))
def test_schedule_rows(row):
    plan = tg.plan_step(RECORD92, row["step"])
    unit = tg.RECORD.window_unit
    assert plan.stage == row["stage"] and plan.batch_tokens == row["batch_tokens"]
    assert plan.lr_mul == pytest.approx(row["lr_mul"], rel=1e-4 if plan.stage >= 3 else 1e-12)
    short, long = row["windows_blocks"]
    assert plan.windows["short"] == short * unit and plan.windows["long"] == long * unit
    assert plan.max_doc_len == row["longest_piece"]
    assert min(plan.max_doc_len, tg.RECORD.attention_cap) == row["attention_cap"]
    assert tg.cu_seqlens_capacity(plan.batch_tokens // 8) == row["slots"]
    assert plan.mtp == pytest.approx(row["mtp_weights"], rel=1e-12) and plan.prefix == row["prefix_weight"]
    for name in "momentum", "fast_beta", "fast_weight":
        assert getattr(plan, name) == pytest.approx(row[name], rel=1e-14)


@pytest.mark.parametrize("want", SCHEDULE["yarn"], ids=lambda want: str(want["stage"]))
def test_rotary(want):
    cfg = replace(tg.RECORD, dtype="float64")
    for name, layer in ("narrow", cfg.layers[0]), ("wide", cfg.layers[3]):
        family = tg.rotary_tables(cfg, want["stage"], layer, 2, torch.device("cpu"))
        assert family.scale == pytest.approx(want[f"{name}_scale"], rel=1e-14)
        angles = torch.atan2(family.sin[1], family.cos[1])
        assert angles.tolist() == pytest.approx(want[f"{name}_frequencies"], rel=1e-12)
