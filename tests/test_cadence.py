"""Checks after which steps parameters are updated, and Adam and rare updates against record 92's numbers.

test_distributed.py trains whole runs with all cadences.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE
from golden_inputs import GOLDEN92, RECORD92, distance, fill, generator, golden_signs, spec_of, tiny_config

SCHEDULE, ADAM = GOLDEN92["g_schedule"], GOLDEN92["d_adam"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HALF, RARE = (2, 2), (2, 4)

# ---------------------------------------------------------------------------------------------- the schedule


@pytest.mark.pinned("the schedule or an entry of PARAMS of the record preset")
def test_updates_of_the_record():
    plans = [tg.plan_step(RECORD92, step) for step in range(SCHEDULE["total_steps"])]
    assert sum(plan.is_update_step(HALF) for plan in plans) == SCHEDULE["adam_steps"]
    rare = [plan.step for plan in plans if plan.is_update_step(RARE)]
    assert (len(rare), rare[-1]) == (SCHEDULE["table_events"], SCHEDULE["last_table_event"])
    for row in SCHEDULE["rows"]:
        plan = plans[row["step"]]
        assert (plan.is_update_step(HALF), plan.is_update_step(RARE)) == (row["adam"], row["table_event"])
        assert plan.interval_ratio(RARE) == row["table_wd_mul"] / 5
        assert plan.interval_ratio(HALF) == 1


# ------------------------------------------------------------------------------------------------ golden Adam


def coarse(shape, k):
    """Returns stream k in sixteenths, fp64: sums of such gradients are exact in any dtype."""
    return (fill(shape, k).double() * 16).round() / 16


STREAMS = {
    "value_embeds": 50000,
    "lm_head": 51000,
    "mudd_w2g": 52000,
    "scalars": 53000,
    "resid_lambdas": 54000,
}


def adam_events(name, dtype):
    """Yields the golden event, p and state after each update in steps 332 .. 344, from summed gradients."""
    golden, row = ADAM[name], spec_of(name.removesuffix("g"))
    p = fill((golden["n"],), STREAMS[name] + 900, 0.2).to(DTYPES[golden["dtype"]]).to(dtype)
    moments = torch.promote_types(dtype, torch.float32)
    state, grad, events = tg.adam_init(p, row, moments, 0), torch.zeros(p.shape), iter(golden["events"])
    for step in ADAM["steps"]:
        grad += coarse(p.shape, STREAMS[name] + step - 332)
        plan = tg.plan_step(RECORD92, step)
        if plan.is_update_step(row.update_every):
            want = next(events)
            assert want["step"] == step
            plan = plan._replace(lr_mul=want["eta"] / (0.008 * row.lr_mul))
            tg.adam(p, grad.to(dtype), state, row, plan, tg.RECORD)
            yield want, p, state
            grad.zero_()
    assert next(events, None) is None


@pytest.mark.pinned("Adam, as record 92 has it,")
@pytest.mark.parametrize("name", STREAMS)
def test_golden_adam(name):
    """Compares fp64; as it is stored, the bits of bf16, and fp32 within its bound."""
    for want, p, state in adam_events(name, torch.float64):
        for key, t in (("m", state["exp_avg"]), ("v", state["exp_avg_sq"]), ("p", p)):
            golden = want["fp64"][key]
            assert t.tolist() == pytest.approx(golden, abs=1e-11 * max(map(abs, golden)), rel=0), key
    stored = ADAM[name]["dtype"]
    for want, p, _ in adam_events(name, DTYPES[stored]):
        if stored == "bf16":
            assert p.view(torch.uint16).tolist() == want["p_bf16_bits"]
        else:
            assert p.tolist() == pytest.approx(want["p_fp32"], abs=1e-7)


@pytest.mark.pinned("Adam, as record 92 has it,")
def test_golden_untying():
    """Updates lm_head with both gradients up to step 1175, then each by its own."""
    golden = ADAM["untie"]
    rows = spec_of("embed"), spec_of("lm_head")
    cfg = replace(tg.RECORD, params=rows, heads=1, head_dim=3, padded_vocab=5, dtype="float64")
    cfg = replace(cfg, ngrams=tg.Ngrams())
    params = {"lm_head": fill((3, 5), 58900, 0.2).double()}
    params["embed"] = params["lm_head"].T.contiguous()
    five = torch.arange(5, dtype=torch.int32)
    all_rows = tg.RowRoutes([5], [5], five, five, tg.make_segments(five))
    optimizer, events = tg.Optimizer(cfg, params, tg.Collectives(0, 1)), iter(golden["fp64_after_adam_steps"])
    for step in golden["steps"]:
        for name, k in (("lm_head", 58000), ("embed", 58100)):
            optimizer.params[name].main_grad += coarse(params[name].shape, k + step - 1172)
        optimizer.routes, t = {"embed": all_rows}, min(1.0, (step - 234) / 940)
        changes = {"lr_mul": 1.73 * math.sqrt(20 / 24) * (1 - t) + 0.3 * t}
        optimizer.step(tg.plan_step(RECORD92, step)._replace(**changes))
        optimizer.wait()
        if step % 2:
            want = next(events)
            assert want["step"] == step
            for name, p in params.items():
                assert distance(p, want[name]) < 1e-11, (step, name)
            optimizer.params["lm_head"].main_grad.zero_()  # a matmul would overwrite it


# ---------------------------------------------------------------------------------- Adam of joined parameters

# Powers of two, so that factors may be multiplied in any order.
SMALL = (
    tg.ParamSpec("smear_gate", lr_mul=4.0, wd_mul=0.5),
    tg.ParamSpec("mudd_gate_scale", lr_mul=0.125, wd_mul=0.0, betas=(0.5, 0.95)),
    tg.ParamSpec("post_lambdas", lr_mul=0.5, wd_mul=64.0),
    tg.ParamSpec("scalars", lr_mul=2.0, update_every=RARE),
)


def small_values(seed):
    g, shapes = generator(seed), tg.param_shapes(SMALL_CFG, 1)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


SMALL_CFG = replace(BASE, params=SMALL, ngrams=tg.Ngrams(), dtype="float64", late_updates_from=2)


def test_joined_parameters_are_updated_as_each_alone():
    """Compares bits. Each has its own rates; the first and the third share betas, so a vector."""
    params = small_values(99)
    optimizer = tg.Optimizer(SMALL_CFG, params, tg.Collectives(0, 1))
    plans = [tg.plan_step(SMALL_CFG, step) for step in range(8)]
    for plan in plans:
        for name, grad in small_values(plan.step).items():
            params[name].grad += grad
        optimizer.step(plan)
        optimizer.wait()
    assert len(optimizer.params) == 3
    for row in SMALL:
        p = small_values(99)[row.name]
        grad = torch.zeros_like(p)
        state = tg.adam_init(p, row, torch.float64, 0)
        for plan in plans:
            grad += small_values(plan.step)[row.name]
            if plan.is_update_step(row.update_every):
                tg.adam(p, grad, state, row, plan, SMALL_CFG)
                grad.zero_()
        assert torch.equal(params[row.name], p), row.name


# ------------------------------------------------------------------------------------------ golden n-grams

TABLE = GOLDEN92["e_table"]["training"]


def golden_rows(x, half, sign_rows):
    """Returns the record's rows of bigrams and trigrams, and of signs, (2, T) each, of tokens x int64."""
    before, first = (np.append([0] * n, x[:-n]) for n in (1, 2))
    rows = np.stack([36313 * x ^ 27191 * before, 17351 * x ^ 60961 * before ^ 45259 * first]) % (half - 1)
    signs = np.stack([30011 * before ^ 48271 * x, 26801 * first ^ 39779 * before ^ 58699 * x]) & sign_rows - 1
    for n in range(2):
        rows[n, : n + 1], signs[n, : n + 1] = half - 1, 0
        rows[n] += n * half
    return rows, signs


def golden_slices(step):
    """Yields the record's rows of each micro-batch of a step, and of signs."""
    i = np.arange(12)
    for k in range(TABLE["slices"]):
        tokens = (i**2 + 3 * i * (step % 5) + 7 * step + 5 * k) % 15
        tokens[0] = 255
        rows, signs = golden_rows(tokens, TABLE["half"], TABLE["sign_rows"])
        yield torch.tensor(rows), torch.tensor(signs)


def table_events(dtype):
    """Yields the golden event, the touched rows, their mean gradients and the table, after each update."""
    ngrams = tg.Ngrams((2, 3), TABLE["half"], width=TABLE["width"], dtype=dtype)
    table = tg.NgramTable(tiny_config(dtype, ngrams=ngrams), tg.Collectives(0, 1))
    grads = torch.zeros_like(table.block, dtype=table.state["second_moment"].dtype)
    all_signs = golden_signs((TABLE["sign_rows"], TABLE["width"])).to(grads)
    events, touched = iter(TABLE["events"]), set()
    for step in TABLE["steps"]:
        for k, (rows, signs) in enumerate(golden_slices(step)):
            db = coarse((12, TABLE["width"]), 60000 + 100 * (step - 328) + k).to(grads)
            for row, sign in zip(rows, signs):
                grads.index_add_(0, row, all_signs[sign] * db / 2)
            touched.update(rows.flatten().tolist())
        plan = tg.plan_step(RECORD92, step)
        if plan.is_update_step(ngrams.update_every):
            want = next(events)
            assert want["step"] == step
            ids = sorted(touched)
            plan = plan._replace(lr_mul=want["eta"] / 0.56)
            tg.row_adam(
                table.block,
                tg.int32(np.array(ids)),
                grads[ids],
                table.state,
                table.beta2_powers,
                ngrams,
                plan,
            )
            yield want, ids, grads[ids], table
            grads.zero_()
            touched.clear()
    assert next(events, None) is None


def test_time_passes_with_the_steps_of_n_grams():
    """Not with their updates: the first of every fourth step may come after fewer steps."""
    ngrams = tg.Ngrams((2,), 4, width=8, dtype="float32", update_every=(1, 4))
    cfg = tiny_config("float32", ngrams=ngrams, late_updates_from=5)
    table = tg.NgramTable(cfg, tg.Collectives(0, 1))
    times = []
    for step in range(cfg.steps):
        plan = tg.plan_step(cfg, step)
        if plan.is_update_step(ngrams.update_every):
            rows = torch.arange(4, dtype=torch.int32)
            tg.row_adam(table.block, rows, torch.ones(4, 8), table.state, table.beta2_powers, ngrams, plan)
            times.append(table.state["last_update"][0].item())
    assert times == [1, 2, 3, 4, 5, *range(8, cfg.steps + 1, 4)]


@pytest.mark.pinned("the table of n-grams, as record 92 has it,")
def test_golden_ngrams():
    for want, rows, grads, table in table_events("float64"):
        assert rows == want["rows"]
        since = table.state["clock"][1] - table.state["last_update"]
        decay = table.spec.beta2 ** since.double()
        parts = {
            "g": grads,
            "table": table.block,
            "v_of_all_rows_if_decayed_at_every_event": table.state["second_moment"] * decay,
        }
        for name, t in parts.items():
            assert distance(t, want[name]) < 1e-11, (want["step"], name)


@pytest.mark.pinned("the table of n-grams, as record 92 has it,")
def test_golden_ngrams_as_stored():
    """Compares rows' bits, and their moments."""
    for want, _, _, table in table_events("bfloat16"):
        for row, listed in want["listed"].items():
            bits = table.block[int(row)].view(torch.uint16)
            assert bits.tolist() == listed["p_bf16_bits"], (want["step"], row)
            moment = table.state["second_moment"][int(row)].item()
            assert moment == pytest.approx(listed["v_fp32"], rel=1e-6)
