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
from golden_inputs import GOLDEN92, RECORD92, FixedLoader, distance, fill, golden_signs, tiny_config

SCHEDULE, ADAM = GOLDEN92["g_schedule"], GOLDEN92["d_adam"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALWAYS, HALF, RARE = (1, 1), (2, 2), (2, 4)

# ---------------------------------------------------------------------------------------------- the schedule


def updates(every, steps=SCHEDULE["total_steps"], cfg=RECORD92):
    """Returns after which steps what has this `every` is updated."""
    return [step for step in range(steps) if tg.plan_step(cfg, step).updates(every)]


@pytest.mark.pinned("the schedule or a row of PARAMS of the record preset")
def test_updates_of_the_record():
    assert updates(ALWAYS) == list(range(SCHEDULE["total_steps"]))
    assert updates(HALF) == list(range(1, SCHEDULE["total_steps"], 2))
    assert (len(updates(HALF)), len(updates(RARE))) == (SCHEDULE["adam_steps"], SCHEDULE["table_events"])
    assert updates(RARE)[-1] == SCHEDULE["last_table_event"]
    for row in SCHEDULE["rows"]:
        plan = tg.plan_step(RECORD92, row["step"])
        assert (plan.updates(HALF), plan.updates(RARE)) == (row["adam"], row["table_event"])
        assert plan.interval_ratio(RARE) == row["table_wd_mul"] / 5
        assert plan.interval_ratio(ALWAYS) == plan.interval_ratio(HALF) == 1
        assert 0.95 ** plan.interval_ratio(RARE) == pytest.approx(row["table_beta2"])
    every = {row.name: row.update_every for row in tg.RECORD.params}
    assert every["value_embeds"] == RARE
    assert every["embed"] == every["lm_head"] == every["scalars"] == HALF
    for row in tg.RECORD.params:
        if row.kind == "bank":
            assert row.update_every == ALWAYS


@pytest.mark.parametrize("late_updates_from", range(5, 9))
def test_an_update_at_four_steps_is_one_at_two(late_updates_from):
    """Checks any step of the change: after the rarest updates no gradient awaits one."""
    cfg = replace(tg.RECORD, late_updates_from=late_updates_from)
    rare = updates(RARE, 20, cfg)
    assert set(rare) <= set(updates(HALF, 20, cfg)) and rare[-1] == 19
    gaps = np.diff([-1, *rare])
    assert set(gaps) <= {2, 4} and all(b - a == 4 for a, b in zip(rare, rare[1:]) if a >= late_updates_from)


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
    golden, (row,) = ADAM[name], [row for row in tg.PARAMS if row.name == name.removesuffix("g")]
    assert [list(row.betas), row.lr_mul, row.wd_mul] == [golden[k] for k in ("betas", "lr_mul", "wd_mul")]
    start = fill((golden["n"],), STREAMS[name] + 900, 0.2)
    p = (start.bfloat16() if golden["dtype"] == "bf16" else start).to(dtype)
    moments = torch.promote_types(dtype, torch.float32)
    state, grad, events = tg.adam_init(p, row, moments, 0), torch.zeros(p.shape), iter(golden["events"])
    for step in ADAM["steps"]:
        grad += coarse(p.shape, STREAMS[name] + step - 332)
        plan = tg.plan_step(RECORD92, step)
        if plan.updates(row.update_every):
            want = next(events)
            assert want["step"] == step and grad.tolist() == want["summed_gradient"]
            plan = plan._replace(lr_mul=want["eta"] / (0.008 * row.lr_mul))
            tg.adam(p, grad.to(dtype), state, row, plan, tg.RECORD)
            assert state["steps"] == want["t"]
            yield want, p, state
            grad.zero_()
    assert grad.tolist() == golden["unused_gradient_at_the_end"] and next(events, None) is None


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
    rows = tuple(row for row in tg.PARAMS if row.name in ("lm_head", "embed"))
    cfg = replace(tg.RECORD, params=rows, heads=1, head_dim=3, padded_vocab=5, dtype="float64")
    cfg = replace(cfg, ngrams=tg.Ngrams())
    params = {"lm_head": fill((3, 5), 58900, 0.2).double()}
    params["embed"] = params["lm_head"].T.contiguous()
    five = torch.arange(5, dtype=torch.int32)
    all_rows = tg.RowRoutes([5], [5], five, five, tg.make_segments(five))
    optimizer, events = tg.Optimizer(cfg, params, tg.Exchange(0, 1)), iter(golden["fp64_after_adam_steps"])
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
            assert optimizer.params["lm_head"].state["steps"] == want["t"]
            for name, p in params.items():
                assert distance(p, want[name]) < 1e-11, (step, name)
            optimizer.params["lm_head"].main_grad.zero_()  # a matmul would overwrite it
    for name, p in params.items():
        assert p.flatten().tolist() == pytest.approx(golden[f"{name}_at_the_end"], rel=1e-11)


# ---------------------------------------------------------------------------------- Adam of joined parameters

# Powers of two, so that factors may be multiplied in any order.
SMALL = (
    tg.ParamSpec("smear_gate", lr_mul=4.0, wd_mul=0.5),
    tg.ParamSpec("mudd_gate_scale", lr_mul=0.125, wd_mul=0.0, betas=(0.5, 0.95)),
    tg.ParamSpec("post_lambdas", lr_mul=0.5, wd_mul=64.0),
    tg.ParamSpec("scalars", lr_mul=2.0, update_every=RARE),
)


def small_values(seed):
    g, shapes = torch.Generator().manual_seed(seed), tg.param_shapes(SMALL_CFG, 1)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


SMALL_CFG = replace(BASE, params=SMALL, ngrams=tg.Ngrams(), dtype="float64", late_updates_from=2, averages=())
PLANS = [tg.plan_step(SMALL_CFG, step) for step in range(8)]


def train_joined(rank, world_size):
    params = small_values(99)
    optimizer = tg.Optimizer(SMALL_CFG, params, tg.Exchange(rank, world_size))
    for plan in PLANS:
        for name, grad in small_values(10 * rank + plan.step).items():
            params[name].grad += grad
        optimizer.wait()
        optimizer.step(plan)
    optimizer.wait()
    return params, [*optimizer.params]


@pytest.mark.parametrize("world_size", [1, 2])
def test_joined_parameters_are_updated_as_each_alone(workers, world_size):
    """Compares bits. Each has its own rates; the first and the third share betas, so a vector.

    Vectors are padded.
    """
    results = workers(world_size, train_joined)
    for row in SMALL:
        p, sums = small_values(99)[row.name], [0] * world_size
        state = tg.adam_init(p, row, torch.float64, 0)
        for plan in PLANS:
            sums = [t + small_values(10 * rank + plan.step)[row.name] for rank, t in enumerate(sums)]
            if plan.updates(row.update_every):
                tg.adam(p, sum(sums) / world_size, state, row, plan, SMALL_CFG)
                sums = [0] * world_size
        for params, names in results:
            assert torch.equal(params[row.name], p) and names == ["small_0", "small_1", "small_2"]


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
    """Returns a step's micro-batches, fed with the record's rows."""
    slices, i = [], np.arange(12)
    for k in range(TABLE["slices"]):
        tokens = (i**2 + 3 * i * (step % 5) + 7 * step + 5 * k) % 15
        tokens[0] = 255
        rows, signs = map(tg.int32, golden_rows(tokens, TABLE["half"], TABLE["sign_rows"]))
        slices.append(tg.MicroBatch(tg.int32(tokens), torch.zeros(0), rows, signs, torch.zeros(0), 0))
    return slices


def table_events(dtype):
    """Yields the golden event, owned rows, their mean gradients and the table, after each update.

    Checks that every step reads the rows as the updates before it have left them.
    """
    ngrams = tg.Ngrams((2, 3), TABLE["half"], width=TABLE["width"], dtype=dtype)
    cfg = tiny_config(dtype, ngrams=ngrams, sign_rows=TABLE["sign_rows"])
    table = tg.NgramTable(cfg, tg.Exchange(0, 1))
    signs = golden_signs((TABLE["sign_rows"], TABLE["width"])).to(table.block.dtype)
    rates = {event["step"]: event["eta"] / 0.56 for event in TABLE["events"]}
    plans = [tg.plan_step(RECORD92, step)._replace(lr_mul=rates.get(step, 1.0)) for step in TABLE["steps"]]
    loader, events = FixedLoader(cfg, map(golden_slices, TABLE["steps"])), iter(TABLE["events"])
    batches = tg.Prefetcher(loader, plans, tg.Exchange(0, 1))
    for plan in plans:
        batch = batches.next()
        if "ngrams" in batch.routes:
            table.start_fetch(batch.routes["ngrams"])
            table.wait()
        for k, (micro_batch, fed) in enumerate(zip(batch.micro_batches, golden_slices(plan.step))):
            now = table.block[fed.hashed_rows.long()]
            assert torch.equal(table.cache[micro_batch.slots.long()], now)
            db = coarse((12, TABLE["width"]), 60000 + 100 * (plan.step - 328) + k).to(now.dtype)
            tg.segment_sum_rows(table.main_grad, db / 2, micro_batch.segments["hashed_rows"], signs)
        assert plan.updates(cfg.ngrams.update_every) == (plan.step in rates)
        if plan.step in rates:
            owned, grads = table.routes.segments.ids, table.scatter().wait().clone()
            table.update(grads, plan)
            table.clear()
            assert not table.main_grad.any()
            yield next(events), owned.tolist(), grads, table
    loader.close()
    assert next(events, None) is None


@pytest.mark.pinned("the table of n-grams, as record 92 has it,")
def test_golden_ngrams():
    for want, rows, grads, table in table_events("float64"):
        assert rows == want["rows"] and len(rows) == want["touched"]
        moments, clock = table.state["moments"], table.state["clock"]
        assert clock[0] == want["event"]
        parts = {
            "g": grads,
            "v_of_touched": moments[rows],
            "p_of_touched": table.block[rows],
            "table": table.block,
            "v_of_all_rows_if_decayed_at_every_event": moments
            * table.spec.beta2 ** (clock[1] - table.state["last"]).double(),
        }
        for name, t in parts.items():
            assert distance(t, want[name]) < 1e-11, (want["step"], name)
        for row, listed in want["listed"].items():
            assert grads[rows.index(int(row))].tolist() == listed["g"]
            assert moments[int(row)].item() == pytest.approx(listed["v"], rel=1e-11)
            scale = max(map(abs, listed["p"]))
            assert table.block[int(row)].tolist() == pytest.approx(listed["p"], rel=0, abs=1e-11 * scale)


@pytest.mark.pinned("the table of n-grams, as record 92 has it,")
def test_golden_ngrams_as_stored():
    """Compares rows' bits, and their moments."""
    seen = 0
    for want, _, _, table in table_events("bfloat16"):
        assert table.state["moments"].dtype == torch.float32
        for row, listed in want["listed"].items():
            bits = table.block[int(row)].view(torch.uint16)
            assert bits.tolist() == listed["p_bf16_bits"], (want["step"], row)
            moment = table.state["moments"][int(row)].item()
            assert moment == pytest.approx(listed["v_fp32"], rel=1e-6)
            seen += 1
    assert seen > 40
