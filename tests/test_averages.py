"""Tests the averages: averages of parameters over the last steps, which replace their last values."""

# ruff: noqa: F811 (fixtures are imported)

from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from golden_inputs import GOLDEN92, distance, fill, same_bits, stats
from test_distributed import (  # noqa: F401 (a fixture)
    AVERAGES,
    batches_of,
    build,
    digest,
    everything,
    run_steps,
    spoil_grads,
    train,
    whole,
    with_dtype,
)

GOLDEN = GOLDEN92["f_endings"]
TINY = GOLDEN["tiny"]
# By the golden name of an accumulator, the rows of the record preset's averages that keep it.
ROWS = {"tail_ema": [0], "tail_average": [1], "value_average": [2], "bank_blend": [3, 4]}


def close(value, golden):
    return value == pytest.approx(golden, rel=1e-11)


# ---- the record's table ------------------------------------------------------------------------------------


def as_golden(rates):
    """Returns ticks as [step, rate], ascending, with null for the first, a copy."""
    ticks = [[step, rate] for step, rate in sorted(rates.items())]
    assert ticks[0][1] == 1
    ticks[0][1] = None
    return ticks


def weights_of(rates):
    """Returns the weight of the parameters after each tick's step in the average of all ticks."""
    weights = {}
    for step, rate in sorted(rates.items()):
        for earlier in weights:
            weights[earlier] *= 1 - rate
        weights[step] = rate
    return weights


@pytest.mark.pinned("averages of the record preset")
@pytest.mark.parametrize("name", ROWS)
def test_the_records_averages(name):
    """Compares the ticks, and the weights of the parameters after them."""
    golden = GOLDEN["full_size"][name]
    for row in ROWS[name]:
        rates = tg.tick_rates(tg.RECORD.averages[row], 1194)
        assert len(rates) == golden["ticks"]
        assert sum(rates) == golden["steps_sum"]
        ticks = as_golden(rates)
        for (step, rate), (want_step, want_rate) in zip(
            ticks[:3] + ticks[-3:], golden["first3"] + golden["last3"]
        ):
            assert step == want_step
            assert rate == want_rate or close(rate, want_rate)
        weights = weights_of(rates)
        assert close(list(weights.values())[-3:], golden["weight_of_last3"])
        assert close(sum(w * (1193 - step) for step, w in weights.items()), golden["mean_age"])


@pytest.mark.pinned("averages of the record preset")
def test_the_last_iterates_weight_in_what_is_shipped():
    want = GOLDEN["full_size"]["last_iterates_weight_in_what_is_shipped"]
    want |= {"embed": want["lm_head"], "vo_bank": want["vo_and_mlp"], "mlp_bank": want["vo_and_mlp"]}
    for name in ("lm_head", "embed", "qk_bank", "vo_bank", "mlp_bank"):
        share = 1.0
        for row in tg.RECORD.averages:
            if name in row.params:
                share = (1 - row.blend) * share + row.blend * weights_of(tg.tick_rates(row, 1194))[1193]
        assert close(share, want[name])


@pytest.mark.parametrize(
    "row, steps, want",
    [
        (tg.WeightAverage((), 9, 0.5, every=2), 4, {1: 1, 3: 0.5}),  # a run shorter than the window
        (tg.WeightAverage((), 9, 0.5, every=2, last_rate=0.1), 1, {0: 1}),
        (tg.WeightAverage((), 4, 0.5, every=4, offset=2, also=(3, 5)), 10, {6: 1, 7: 0.5}),
        (tg.WeightAverage((), 0, 0.5), 10, {}),
    ],
)
def test_tick_rates(row, steps, want):
    assert tg.tick_rates(row, steps) == want


# ---- tiny runs of given weights ----------------------------------------------------------------------------

WINDOWS = TINY["windows"]
TINY_CHANGES = {
    "tail_ema": {
        "window": WINDOWS["tail_ema"],
        "rate": 1 - (1 - 2 / 15) ** 2,
        "last_rate": 2 / 15,
        "also": (WINDOWS["tail_ema"] - 1,),
    },
    "tail_average": {"window": WINDOWS["tail_average"]},
    "value_average": {"window": WINDOWS["value_average"]},
    "bank_blend": {"window": WINDOWS["bank_blend"], "rate": 2 / (WINDOWS["bank_blend"] // 4 + 1)},
}
ACCUMULATORS = "tail_ema", "tail_average", "value_average", "bank_blend", "bank_blend"  # of these rows


def tiny_averages():
    """Returns the record preset's averages, for a run as short as the golden one."""
    return tuple(replace(row, **TINY_CHANGES[name]) for row, name in zip(tg.RECORD.averages, ACCUMULATORS))


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

    Returns {(row, parameter): [(step, this rank's average after it)]}, for the steps that tick, and the
    parameters after the averages.
    """
    # Two stages: lm_head and embed are untied in the second one.
    stages = tuple(replace(tg.CPU.stages[0], steps=steps) for steps in (TINY["N"] - 2, 2))
    rows = tuple(row for row in tg.PARAMS if row.name in TINY["shapes"])
    cfg = replace(with_dtype(tg.CPU, dtype), stages=stages, averages=tiny_averages(), params=rows)
    params = {}
    for name, t in tiny_weights(0).items():
        params[name] = torch.nn.Parameter(t.to(tg.dtype_of(dtype)))
    optimizer = tg.Optimizer(cfg, params, tg.Exchange(rank, world_size))
    averages = {}
    for step in range(TINY["N"]):
        with torch.no_grad():
            for name, t in tiny_weights(step).items():
                params[name].copy_(t)
            optimizer.last_plan = tg.plan_step(cfg, step)
            if step < TINY["N"] - 1:
                optimizer.tick()
            else:
                optimizer.apply_averages()
        for name, param in optimizer.params.items():
            for average in param.averages:
                if tg.plan_step(cfg, step).average_rates[average.number]:
                    averages.setdefault((average.number, name), []).append((step, average.value.clone()))
    return averages, {name: p.detach() for name, p in params.items()}


@pytest.mark.pinned("averages of the record preset")
def test_the_tiny_run():
    """Compares all averages after each of their ticks, and what is shipped, in fp64."""
    averages, final = run_tiny(0, 1, "float64")
    compared = set()
    for (i, name), ticks in averages.items():
        golden = TINY["tensors"][name]["accumulators"][ACCUMULATORS[i]]
        for (step, average), want in zip(ticks, golden["after_each_tick_step_sum_wsum"], strict=True):
            actual = stats(average)
            numbers = step, actual["sum"], actual["wsum"]
            assert numbers == pytest.approx(want, rel=0, abs=1e-11 * actual["l2"])
        assert distance(ticks[-1][1], golden["end"]) < 1e-11
        compared.add((name, ACCUMULATORS[i]))
    assert len(compared) == len(averages)
    assert final.keys() == TINY["tensors"].keys()
    for name, p in final.items():
        golden = TINY["tensors"][name]
        assert {key for of, key in compared if of == name} == golden["accumulators"].keys()
        want = torch.tensor(golden["final_fp64_all"], dtype=torch.float64)
        assert (p.flatten() - want).abs().max() <= 1e-11 * want.abs().max(), name


def tiny_bits(rank, world_size):
    _, final = run_tiny(rank, world_size, "bfloat16")
    bits = {}
    for name, p in final.items():
        bits[name] = p.flatten().view(torch.uint16).tolist()
    return bits


@pytest.mark.pinned("averages of the record preset")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bits_that_the_tiny_run_ships(workers, world_size):
    """Weights in bf16, averages in fp32, each write rounded to bf16."""
    want = {name: golden["final_bf16_bits"] for name, golden in TINY["tensors"].items()}
    assert workers(world_size, tiny_bits) == [want] * world_size


def test_parameters_or_averages_of_zero_stay_zero(everything):
    """Without a norm there is nothing to restore."""
    cfg = replace(everything, averages=(tg.WeightAverage(("qk_bank", "vo_bank"), 1, 1.0),))
    _, model, optimizer = build(0, 1, cfg)
    with torch.no_grad():
        model.qk_bank.zero_()
    assert optimizer.last_plan is None  # averages stay as they began
    optimizer.apply_averages()
    assert not model.qk_bank.any() and not model.vo_bank.any()


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
@pytest.mark.parametrize("params", [("lm_head",), ("embed",)])
def test_what_is_still_tied_is_shipped_as_a_transpose(workers, everything, params):
    stages = (replace(everything.stages[0], steps=4),)  # with one stage nothing is untied
    cfg = replace(everything, stages=stages, averages=(replace(AVERAGES[0], params=params),))
    for run in workers(2, train, cfg, (), whole):
        final, last = run["final"], run["steps"][-1]
        assert torch.equal(final["embed"], final["lm_head"].T)
        assert torch.equal(final["lm_head"], last["lm_head"]) == (params == ("embed",))


def test_no_averages_of_what_is_not_there(everything):
    """Checks rows without steps, and rows of parameters that the model lacks."""
    averages = (
        tg.WeightAverage((), 9, 0.5),
        tg.WeightAverage(("qk_bank",), 0, 0.5),
        tg.WeightAverage(("bigram_embed",), 9, 0.5),
    )
    _, model, optimizer = build(0, 1, replace(everything, averages=averages))
    before = digest(model, optimizer)
    optimizer.apply_averages()
    for param in optimizer.params.values():
        assert not param.averages
    assert digest(model, optimizer) == before


@pytest.mark.slow
def test_endings_are_on_the_clock_and_before_the_final_validation(everything, monkeypatch):
    cfg = replace(everything, val_every=3)
    calls = []

    def record(owner, name):
        original = getattr(owner, name)

        def recorded(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    record(tg.Optimizer, "apply_averages")
    record(tg.Clock, "synchronized")
    record(tg, "validate")
    data = tg.open_dataset(cfg)
    exchange, model, optimizer = build(0, 1, cfg)
    training = tg.Training(data, model, optimizer, tg.ValLoader(cfg, data.val), exchange)
    tg.train(training, tg.RunLog(), tg.Progress())
    validation = ["synchronized", "validate", "synchronized"]
    # The clock starts; validation before steps 0, 3 and 6 is of the raw weights.
    assert calls == ["synchronized"] + validation * 3 + ["apply_averages"] + validation


# ---- checkpoints -------------------------------------------------------------------------------------------


def go_on(model, optimizer, position=(0, 0), first=0, save=None):
    """Trains from step `first` to the end; save(step, position) is called before every second step."""
    if save:
        save(0, position)
    for step, (batch, _) in enumerate(run_steps(model, optimizer, first, position), first + 1):
        if save and step % 2 == 0 and step < model.cfg.steps:
            save(step, batch.position)
    state = tg.training_state(model, optimizer)
    return state | {"ngrams": optimizer.ngrams.state_dict()}


def resume_each(rank, world_size, cfg, folder):
    """Returns by step whether a run that goes on from the checkpoint before it ends with the same bits.

    What goes on was at work before: it has gradients, which must not count, and rows are under way.
    """
    exchange, model, optimizer = build(rank, world_size, cfg)
    found = {}

    def save(step, position):
        run = folder / f"{step}.checkpoint"
        tg.save_checkpoint(run, {}, {"step": step, "position": position}, model, optimizer)
        exchange.from_rank_0(None)  # it has renamed it
        path = tg.find_checkpoint(str(run.with_suffix(".txt")))
        found[step] = tg.read_saved(path / f"rank{rank}.pt", "")

    want = go_on(model, optimizer, save=save)
    same = {}
    for step, checkpoint in found.items():
        _, model, optimizer = build(rank, world_size, cfg, seed=1)
        started = run_steps(model, optimizer)
        next(started), next(started)
        started.close()
        assert optimizer.ngrams.in_flight
        optimizer.wait()
        spoil_grads(optimizer, torch.nan)
        for param in optimizer.params.values():
            for average in param.averages:
                average.value.fill_(7)
        tg.restore(checkpoint, model, optimizer)
        same[step] = same_bits(go_on(model, optimizer, checkpoint["position"], step), want)
    return same


@pytest.mark.slow
@pytest.mark.parametrize("main_grad", [True, False])
def test_every_checkpoint_resumes(workers, everything, tmp_path, main_grad):
    """Before, between and after the first ticks of every row, which are in steps 2 to 5."""
    cfg = replace(with_dtype(everything, "bfloat16"), late_updates_from=99, main_grad=main_grad)
    results = workers(2, resume_each, cfg, tmp_path)
    assert results == [dict.fromkeys((0, 2, 4, 6), True)] * 2
