"""Tests the averages: averages of parameters over the last steps, which replace their last values."""

# ruff: noqa: F811 (fixtures are imported)

import copy
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from golden_inputs import GOLDEN92, distance, fill, same_bits, stats, training_of
from launch import wrap
from test_distributed import (  # noqa: F401 (a fixture)
    AVERAGES,
    build,
    digest_of,
    everything,
    run_steps,
    train,
    whole,
    with_dtype,
)

PINNED = pytest.mark.pinned("averages of the record preset")
GOLDEN = GOLDEN92["f_endings"]
TINY = GOLDEN["tiny"]
# The golden names of the rows of the record preset's averages.
ACCUMULATORS = "tail_ema", "tail_average", "value_average", "bank_blend", "bank_blend"


# ---- the record's table ------------------------------------------------------------------------------------


@PINNED
@pytest.mark.parametrize("row, name", list(enumerate(ACCUMULATORS)))
def test_the_records_averages(row, name):
    golden = GOLDEN["full_size"][name]
    rates = tg.tick_rates(tg.RECORD.averages[row], 1194)
    assert len(rates) == golden["ticks"]
    assert sum(rates) == golden["steps_sum"]
    ticks = sorted(rates.items())
    wanted = golden["first3"] + golden["last3"]
    assert [step for step, _ in ticks[:3] + ticks[-3:]] == [step for step, _ in wanted]
    assert ticks[0][1] == 1  # a copy, for which the golden rate is null
    rates = [rate for _, rate in ticks[1:3] + ticks[-3:]]
    assert rates == pytest.approx([rate for _, rate in wanted[1:]], rel=1e-11)


def test_tick_rates_of_runs_shorter_than_the_window():
    average = tg.WeightAverage((), 9, 0.5, every=2, last_rate=0.1)
    assert tg.tick_rates(average, 4) == {1: 1, 3: 0.1}
    assert tg.tick_rates(average, 1) == {0: 1}


# ---- tiny runs of given weights ----------------------------------------------------------------------------

WINDOWS = TINY["windows"]
TINY_CHANGES = {
    "tail_ema": {"rate": 1 - (1 - 2 / 15) ** 2, "last_rate": 2 / 15, "also": (WINDOWS["tail_ema"] - 1,)},
    "bank_blend": {"rate": 2 / (WINDOWS["bank_blend"] // 4 + 1)},
}
# The record preset's averages, for a run as short as the golden one.
TINY_AVERAGES = tuple(
    replace(row, window=WINDOWS[key], **TINY_CHANGES.get(key, {}))
    for row, key in zip(tg.RECORD.averages, ACCUMULATORS)
)


def tiny_weights(step):
    """Returns the golden weights after a step, bf16, by name, in our shapes."""
    weights = {}
    for i, (name, shape) in enumerate(TINY["shapes"].items()):
        t = fill(shape, 70037 + 1000 * i + step, 0.1, 0.02).bfloat16()
        if t.dim() == 4:
            t = t.flatten(0, 1)
        weights[name] = t
    return weights


def run_tiny(rank, world_size, dtype):
    """Goes through the golden weights.

    Returns {(parameter, accumulator): [(step, this rank's average after it)]}, for the steps that tick, and
    the parameters after the averages.
    """
    # Two stages: lm_head and embed are untied in the second one.
    stages = tuple(replace(tg.CPU.stages[0], steps=steps) for steps in (TINY["N"] - 2, 2))
    rows = tuple(row for row in tg.PARAMS if row.name in TINY["shapes"])
    cfg = replace(with_dtype(tg.CPU, dtype), stages=stages, averages=TINY_AVERAGES, params=rows)
    params = {name: t.to(tg.dtype_of(dtype)) for name, t in tiny_weights(0).items()}
    optimizer = tg.Optimizer(cfg, params, tg.Collectives(rank, world_size))
    averages = defaultdict(list)
    for step in range(TINY["N"]):
        for name, t in tiny_weights(step).items():
            params[name].copy_(t)
        plan = optimizer.last_plan = tg.plan_step(cfg, step)
        if step < TINY["N"] - 1:
            optimizer.tick()
        else:
            optimizer.apply_averages()
        for name, param in optimizer.params.items():
            for average in param.averages:
                if plan.average_rates[average.number]:
                    key = name, ACCUMULATORS[average.number]
                    averages[key].append((step, average.value.clone()))
    return averages, params


@PINNED
def test_the_tiny_run():
    """Compares all averages after each of their ticks, and what is shipped, in fp64."""
    averages, final = run_tiny(0, 1, "float64")
    for name, golden in TINY["tensors"].items():
        for accumulator, golden_average in golden["accumulators"].items():
            ticks = averages.pop((name, accumulator))
            wanted = golden_average["after_each_tick_step_sum_wsum"]
            for (step, average), want in zip(ticks, wanted, strict=True):
                actual = stats(average)
                numbers = step, actual["sum"], actual["wsum"]
                assert numbers == pytest.approx(want, rel=0, abs=1e-11 * actual["l2"])
            assert distance(ticks[-1][1], golden_average["end"]) < 1e-11
        want = torch.tensor(golden["final_fp64_all"], dtype=torch.float64)
        assert (final[name].flatten() - want).abs().max() <= 1e-11 * want.abs().max(), name
    assert not averages


def tiny_bits(rank, world_size):
    _, final = run_tiny(rank, world_size, "bfloat16")
    return {name: p.flatten().view(torch.uint16).tolist() for name, p in final.items()}


@PINNED
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bits_that_the_tiny_run_ships(workers, world_size):
    """Weights in bf16, averages in fp32, each write rounded to bf16."""
    want = {name: golden["final_bf16_bits"] for name, golden in TINY["tensors"].items()}
    assert workers(world_size, tiny_bits) == [want] * world_size


def test_parameters_or_averages_of_zero_stay_zero(everything):
    """Without a norm there is nothing to restore. No row without ticks, or without its parameter, matters."""
    averages = (
        tg.WeightAverage(("qk_bank", "vo_bank"), 1, 1.0),
        tg.WeightAverage(("mlp_bank",), 0, 0.5),
        tg.WeightAverage(("bigram_embed",), 9, 0.5),
    )
    _, model, optimizer = build(0, 1, replace(everything, averages=averages))
    before = digest_of(model.mlp_bank)
    with torch.no_grad():
        model.qk_bank.zero_()
    optimizer.apply_averages()  # without a step they stay as they began
    assert not model.qk_bank.any() and not model.vo_bank.any()
    assert digest_of(model.mlp_bank) == before


# ---- whole runs --------------------------------------------------------------------------------------------


def ship(history):
    """Returns what AVERAGES make of the parameters after each step."""
    final = {name: p.clone() for name, p in history[-1].items()}
    for row in AVERAGES:
        for name in row.params:
            average = torch.zeros_like(final[name])
            for step, rate in sorted(tg.tick_rates(row, len(history)).items()):
                average = average + rate * (history[step][name] - average)
            final[name] = final[name] + row.blend * (average - final[name])
    for name in ("lm_head", "embed", "qk_bank", "vo_bank", "mlp_bank"):
        final[name] *= history[-1][name].norm() / final[name].norm()
    return final


@pytest.mark.slow
def test_what_a_run_ships(everything):
    """Compares with averages of the whole weights, also of what was a tied copy in the first ticks."""
    run = train(0, 1, everything, after_step=whole)
    history, final = run["steps"], run["final"]
    for name, want in ship(history).items():
        torch.testing.assert_close(final[name], want, rtol=1e-12, atol=1e-14)
        named = any(name in row.params for row in AVERAGES)
        assert torch.equal(want, history[-1][name]) != named, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm_head", "embed"])
def test_what_is_still_tied_is_shipped_as_a_transpose(everything, name):
    stages = (replace(everything.stages[0], steps=4),)  # with one stage nothing is untied
    averages = (replace(AVERAGES[0], params=(name,)),)
    run = train(0, 1, replace(everything, stages=stages, averages=averages), after_step=whole)
    final, last = run["final"], run["steps"][-1]
    assert torch.equal(final["embed"], final["lm_head"].T)
    assert torch.equal(final["lm_head"], last["lm_head"]) == (name == "embed")


@pytest.mark.slow
def test_endings_are_on_the_clock_and_before_the_final_validation(everything, monkeypatch):
    calls = []

    def record(original, *args):
        calls.append(original.__name__)
        return original(*args)

    for where in "Optimizer.apply_averages", "Clock.synchronized", "validate":
        wrap(where, record, monkeypatch.setattr)
    comm, model, optimizer = build(0, 1, everything)
    tg.train(training_of(model, optimizer, comm), tg.RunLog(), tg.Progress())
    # The clock starts, and stops while the averages are validated.
    assert calls == ["synchronized", "apply_averages", "synchronized", "validate", "synchronized"]


# ---- checkpoints -------------------------------------------------------------------------------------------


def go_on(model, optimizer, position=(0, 0), first=0):
    """Trains from step `first` to the end. Returns the checkpoints after every second step, by step."""
    found = {}
    for step, (batch, _) in enumerate(run_steps(model, optimizer, first, position), first + 1):
        if step % 2 == 0:
            found[step] = tg.training_state(model, optimizer)
            found[step]["ngrams"] = copy.deepcopy(optimizer.ngrams.state_dict())
            found[step] |= {"step": step, "position": batch.position}
    return found


def resume_each(rank, world_size, cfg):
    """Returns by step whether a run that goes on from the checkpoint there ends with the same bits.

    What goes on was at work before: it has averages, and gradients, which must not count.
    """
    _, model, optimizer = build(rank, world_size, cfg)
    checkpoints = go_on(model, optimizer)
    end = checkpoints.pop(cfg.steps)
    _, model, optimizer = build(rank, world_size, cfg, seed=1)
    started = run_steps(model, optimizer)
    for _ in range(5):
        next(started)
    started.close()
    same = {}
    for step, checkpoint in checkpoints.items():
        tg.restore(checkpoint, model, optimizer)
        found = go_on(model, optimizer, checkpoint["position"], step)
        same[step] = same_bits(found[cfg.steps], end)
    return same


@pytest.mark.slow
@pytest.mark.parametrize("main_grad", [True, False])
def test_every_checkpoint_resumes(workers, everything, main_grad):
    """Before, between and after the first ticks of every row, which are in steps 2 to 5."""
    cfg = replace(with_dtype(everything, "bfloat16"), late_updates_from=99, main_grad=main_grad)
    for spec in cfg.params:
        if spec.update_every[0] > 2:  # a gradient would await its update when a checkpoint is made
            cfg = tg.override(cfg, f"params.{spec.name}.update_every=2,4")
    results = workers(2, resume_each, cfg)
    assert results == [dict.fromkeys((2, 4, 6), True)] * 2
