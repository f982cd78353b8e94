"""Tests the endings: averages of parameters over the last steps, which replace their last values."""

import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from golden_inputs import GOLDEN92, distance, fill, prefetch_exchange, same_bits, stats
from test_distributed import batches_of, build, digest, with_dtype
from test_distributed import cfg as every_layer  # noqa: F401 (a fixture)

GOLDEN = GOLDEN92["f_endings"]
TINY = GOLDEN["tiny"]
TAIL_EMA, TAIL_AVERAGE, VALUE_AVERAGE, *BANK_BLEND = tg.ENDINGS
# By the golden name of an accumulator, the rows that keep it.
ROWS = {
    "tail_ema": [TAIL_EMA],
    "tail_average": [TAIL_AVERAGE],
    "value_average": [VALUE_AVERAGE],
    "bank_blend": BANK_BLEND,
}


def as_golden(rates):
    """Returns ticks as [step, rate], ascending, with null for the first, a copy."""
    (first, one), *others = sorted(rates.items())
    assert one == 1
    return [[first, None], *map(list, others)]


def weights_of(rates):
    """Returns the weight of the parameters after each tick's step in the average of all ticks."""
    ticks = sorted(rates.items())
    return {step: rate * math.prod(1 - r for _, r in ticks[i + 1 :]) for i, (step, rate) in enumerate(ticks)}


def close(value, golden):
    return value == pytest.approx(golden, rel=1e-11)


# Of the fixture's runs of eight steps. embed is untied after step 5; resid_lambdas are on all ranks.
ENDINGS = (
    tg.Ending(("lm_head", "embed"), 5, 0.4, 0.65, every=2, also=(3,), last_rate=0.3),
    tg.Ending(("vo_bank", "mlp_bank"), 4, 0.3, every=2, offset=1),
    tg.Ending(("value_embeds",), 6, 0.2, every=3, offset=2, keep_norm=False),
    tg.Ending(("qk_bank", "vo_bank", "mlp_bank", "resid_lambdas"), 3, 0.4, 0.5),
)
TICKS = (  # of these rows: steps, rates
    ((3, 4, 5, 7), (1, 0.4, 0.4, 0.3)),
    ((4, 6), (1, 0.3)),
    ((2, 5), (1, 0.2)),
    ((5, 6, 7), (1, 0.4, 0.4)),
)


@pytest.fixture
def cfg(every_layer):  # noqa: F811
    return replace(every_layer, endings=ENDINGS)


# ---- the record's table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_the_records_ticks(name):
    golden = GOLDEN["full_size"][name]
    for row in ROWS[name]:
        ticks = as_golden(tg.tick_rates(row, 1194))
        assert len(ticks) == golden["ticks"] and sum(step for step, _ in ticks) == golden["steps_sum"]
        for tick, want in zip(ticks[:3] + ticks[-3:], golden["first3"] + golden["last3"]):
            assert tick[0] == want[0] and (tick[1] is want[1] is None or close(tick[1], want[1]))


@pytest.mark.parametrize("name", ROWS)
def test_the_records_weights(name):
    golden = GOLDEN["full_size"][name]
    for row in ROWS[name]:
        weights = weights_of(tg.tick_rates(row, 1194))
        values = list(weights.values())
        assert close(values[-3:], golden["weight_of_last3"]) and close(sum(values), 1)
        assert "weight_of_the_seed" not in golden or close(values[0], golden["weight_of_the_seed"])
        assert close(sum(w * (1193 - step) for step, w in weights.items()), golden["mean_age"])


def test_the_last_iterates_weight_in_what_is_shipped():
    want = GOLDEN["full_size"]["last_iterates_weight_in_what_is_shipped"]
    want |= {"embed": want["lm_head"], "vo_bank": want["vo_and_mlp"], "mlp_bank": want["vo_and_mlp"]}
    for name in ("lm_head", "embed", "qk_bank", "vo_bank", "mlp_bank"):
        share = 1.0
        for row in tg.ENDINGS:
            if name in row.params:
                average = weights_of(tg.tick_rates(row, 1194))[1193]
                share = (1 - row.blend) * share + row.blend * average
        assert close(share, want[name])


def test_ticks_are_counted_from_the_end():
    for row in tg.ENDINGS:
        ticks = tg.tick_rates(row, 1194)
        assert tg.tick_rates(row, 1285) == {step + 91: rate for step, rate in ticks.items()}


@pytest.mark.parametrize(
    "row, steps, want",
    [
        (tg.Ending((), 3, 0.5), 10, {7: 1, 8: 0.5, 9: 0.5}),
        (tg.Ending((), 9, 0.5, every=2), 4, {1: 1, 3: 0.5}),  # a run shorter than the window
        (tg.Ending((), 9, 0.5, every=2, last_rate=0.1), 1, {0: 1}),
        (tg.Ending((), 4, 0.5, every=4, offset=2, also=(3, 5)), 10, {6: 1, 7: 0.5}),
        (tg.Ending((), 2, 0.5, every=4, offset=2), 10, {}),
        (tg.Ending((), 0, 0.5), 10, {}),
    ],
)
def test_tick_rates(row, steps, want):
    assert tg.tick_rates(row, steps) == want


# ---- tiny runs of given weights ----------------------------------------------------------------------------

WINDOWS = TINY["windows"]
TINY_ENDINGS = (
    replace(
        TAIL_EMA,
        window=WINDOWS["tail_ema"],
        rate=1 - (1 - 2 / 15) ** 2,
        last_rate=2 / 15,
        also=(WINDOWS["tail_ema"] - 1,),
    ),
    replace(TAIL_AVERAGE, window=WINDOWS["tail_average"]),
    replace(VALUE_AVERAGE, window=WINDOWS["value_average"]),
    *(
        replace(row, window=WINDOWS["bank_blend"], rate=2 / (WINDOWS["bank_blend"] // 4 + 1))
        for row in BANK_BLEND
    ),
)
ACCUMULATORS = "tail_ema", "tail_average", "value_average", "bank_blend", "bank_blend"  # of these rows


def run_tiny(rank, world_size, dtype):
    """Goes through the golden weights.

    Returns {(row, parameter): [(step, this rank's average after it)]}, for the steps that tick, and the
    parameters after the endings.
    """
    stages = (replace(tg.CPU.stages[0], steps=TINY["N"]),)
    cfg = replace(with_dtype(tg.CPU, dtype), stages=stages, endings=TINY_ENDINGS)
    shapes = {name: (-1, *shape[-2:]) if len(shape) == 4 else shape for name, shape in TINY["shapes"].items()}

    def weights(step):
        return {
            name: fill(shape, 70037 + 1000 * i + step, 0.1, 0.02).bfloat16().view(shapes[name])
            for i, (name, shape) in enumerate(TINY["shapes"].items())
        }

    params = {name: torch.nn.Parameter(t.to(tg.dtype_of(dtype))) for name, t in weights(0).items()}
    optimizer = tg.Optimizer(cfg, params, tg.Exchange(rank, world_size))
    optimizer.is_tied = False
    averages = {}
    for step in range(TINY["N"]):
        with torch.no_grad():
            for name, t in weights(step).items():
                params[name].copy_(t)
            if step < TINY["N"] - 1:
                optimizer.tick(step)
            else:
                optimizer.apply_endings()
        for (i, name), average in optimizer.averages.items():
            if step in tg.tick_rates(cfg.endings[i], TINY["N"]):
                averages.setdefault((i, name), []).append((step, average.clone()))
    return averages, {name: p.detach() for name, p in params.items()}


def test_the_tiny_runs_ticks():
    for name, row in zip(ACCUMULATORS, TINY_ENDINGS):
        ticks = as_golden(tg.tick_rates(row, TINY["N"]))
        for tick, want in zip(ticks, TINY["ticks"][name], strict=True):
            assert tick == [want[0], want[1] and pytest.approx(want[1], rel=1e-11)]


def test_the_averages_of_the_tiny_run():
    averages, _ = run_tiny(0, 1, "float64")
    compared = []
    for (i, name), ticks in averages.items():
        golden = TINY["tensors"][name]["accumulators"][ACCUMULATORS[i]]
        for (step, average), want in zip(ticks, golden["after_each_tick_step_sum_wsum"], strict=True):
            actual = stats(average)
            numbers = step, actual["sum"], actual["wsum"]
            assert numbers == pytest.approx(want, rel=0, abs=1e-11 * actual["l2"])
        assert distance(ticks[-1][1], golden["end"]) < 1e-11
        compared.append((name, ACCUMULATORS[i]))
    assert sorted(compared) == sorted(
        (name, key) for name, golden in TINY["tensors"].items() for key in golden["accumulators"]
    )


def test_what_the_tiny_run_ships():
    _, final = run_tiny(0, 1, "float64")
    assert final.keys() == TINY["tensors"].keys()
    for name, p in final.items():
        want = torch.tensor(TINY["tensors"][name]["final_fp64_all"], dtype=torch.float64)
        assert (p.flatten() - want).abs().max() <= 1e-11 * want.abs().max(), name


def tiny_bits(rank, world_size):
    final = run_tiny(rank, world_size, "bfloat16")[1]
    return {name: (p.flatten().view(torch.int16).int() & 0xFFFF).tolist() for name, p in final.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bits_that_the_tiny_run_ships(workers, world_size):
    """Weights in bf16, averages in fp32, each write rounded to bf16."""
    want = {name: golden["final_bf16_bits"] for name, golden in TINY["tensors"].items()}
    assert workers(world_size, tiny_bits) == [want] * world_size


def test_a_parameter_of_zeros_stays(cfg):
    cfg = replace(cfg, endings=(tg.Ending(("qk_bank",), 1, 1.0),))
    _, model, optimizer = build(0, 1, cfg)
    with torch.no_grad():
        model.qk_bank.zero_()
    optimizer.apply_endings()
    assert not model.qk_bank.any()


def ship_random_weights(rank, world_size, cfg):
    """Returns the bytes of all parameters, without padding, which were drawn anew in every step."""
    _, model, optimizer = build(rank, world_size, cfg)
    shapes, g = tg.param_shapes(cfg, 1), torch.Generator().manual_seed(1)
    optimizer.is_tied = False
    for step in range(cfg.steps):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p[: shapes[name][0]] = torch.randn(shapes[name], generator=g)
            if step < cfg.steps - 1:
                optimizer.tick(step)
    optimizer.apply_endings()
    weights = torch.cat([p[: shapes[name][0]].flatten() for name, p in model.named_parameters()])
    return weights.view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_number_of_ranks_ships_the_same_bits(workers, cfg, dtype):
    cfg = with_dtype(cfg, dtype)
    one, two, four = (workers(n, ship_random_weights, cfg) for n in (1, 2, 4))
    assert one * 4 == two * 2 == four


# ---- whole runs --------------------------------------------------------------------------------------------


def whole(model):
    """Copies all parameters, without padding."""
    shapes = tg.param_shapes(model.cfg, 1)
    return {name: p.detach()[: shapes[name][0]].clone() for name, p in model.named_parameters()}


def train(rank, world_size, cfg):
    """Returns the parameters after each step, and after the endings."""
    _, model, optimizer = build(rank, world_size, cfg)
    batches, history = batches_of(cfg, rank, world_size), []
    for _ in range(cfg.steps):
        tg.train_step(model, optimizer, batches.next(), batches.peek)
        optimizer.finish_gathers()
        history.append(whole(model))
    batches.loader.close()
    optimizer.apply_endings()
    return history, whole(model)


def ship(history):
    """Returns what ENDINGS make of the parameters after each step, by the table of TICKS."""
    final = {name: p.clone() for name, p in history[-1].items()}
    for row, (steps, rates) in zip(ENDINGS, TICKS):
        for name in row.params:
            average = torch.zeros_like(final[name])
            for step, rate in zip(steps, rates):
                average = average + rate * (history[step][name] - average)
            final[name] = final[name] + row.blend * (average - final[name])
    for name in ("lm_head", "embed", "qk_bank", "vo_bank", "mlp_bank", "resid_lambdas"):
        final[name] *= history[-1][name].norm() / final[name].norm()
    return final


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_a_run_ships(workers, cfg, world_size):
    """Compares with averages of the whole weights, also of what was a tied copy in the first ticks."""
    results = workers(world_size, train, cfg)
    assert all(same_bits(final, results[0][1]) for _, final in results)
    history, final = results[0]
    for name, want in ship(history).items():
        torch.testing.assert_close(final[name], want, rtol=1e-12, atol=1e-14)
        named = any(name in row.params for row in ENDINGS)
        assert torch.equal(want, history[-1][name]) != named, name


def test_an_average_of_zero_stays_zero(cfg):
    """Without a norm there is nothing to restore."""
    cfg = with_dtype(replace(cfg, endings=(tg.Ending(("qk_bank",), 1, 0.5),)), "float32")
    _, _, optimizer = build(0, 1, cfg)
    optimizer.tick = lambda step: None  # the average stays as it began
    assert optimizer.params["qk_bank"].any()
    optimizer.apply_endings()
    assert torch.equal(optimizer.params["qk_bank"], torch.zeros_like(optimizer.params["qk_bank"]))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("params", [("lm_head",), ("embed",), ("lm_head", "embed")])
def test_what_is_still_tied_is_shipped_as_a_transpose(workers, cfg, world_size, params):
    stages = (replace(cfg.stages[0], steps=8),)  # with one stage nothing is untied
    cfg = replace(cfg, stages=stages, endings=(replace(ENDINGS[0], params=params),))
    for history, final in workers(world_size, train, cfg):
        assert torch.equal(final["embed"], final["lm_head"].T)
        assert torch.equal(final["lm_head"], history[-1]["lm_head"]) == ("lm_head" not in params)


def test_averages_are_of_own_shards_in_fp32(workers, cfg):
    cfg = with_dtype(cfg, "bfloat16")
    rows = [(i, name) for i, row in enumerate(ENDINGS) for name in row.params]
    for found in workers(2, shapes_of_averages, cfg):
        assert [row for row, *_ in found] == rows
        for (_, name), shape, dtype in found:
            first, *rest = tg.param_shapes(cfg, 2)[name]
            assert dtype == torch.float32
            assert shape == (first if name == "resid_lambdas" else first // 2, *rest)


def shapes_of_averages(rank, world_size, cfg):
    averages = build(rank, world_size, cfg)[2].averages
    return [(row, tuple(average.shape), average.dtype) for row, average in averages.items()]


@pytest.mark.parametrize(
    "endings",
    [(), (tg.Ending((), 9, 0.5),), (tg.Ending(("qk_bank",), 0, 0.5),)],
    ids=["none", "of none", "0"],
)
def test_no_averages_without_endings(cfg, endings):
    _, model, optimizer = build(0, 1, replace(cfg, endings=endings))
    before = digest(model)
    optimizer.apply_endings()
    assert optimizer.averages == {} and optimizer.state_dict()["averages"] == {} and digest(model) == before


def test_what_the_model_lacks_is_ignored(cfg):
    layers = tuple(replace(layer, value=None) for layer in cfg.layers)
    averages = build(0, 1, replace(cfg, layers=layers))[2].averages
    assert {name for _, name in averages} == {n for row in ENDINGS for n in row.params} - {"value_embeds"}


def test_warm_up_leaves_no_averages(cfg, monkeypatch):
    cfg = with_dtype(cfg, "bfloat16")
    exchange, model, optimizer = build(0, 1, cfg)
    data, state, restore = tg.open_dataset(cfg), tg.training_state(model, optimizer), tg.restore

    def check_and_restore(*arguments):
        assert all(average.any() for average in optimizer.averages.values())
        restore(*arguments)

    monkeypatch.setattr(tg, "restore", check_and_restore)
    tg.warm_up(data, model, optimizer, tg.ValLoader(cfg, data.val), exchange)
    assert same_bits(tg.training_state(model, optimizer), state)
    assert not any(average.any() for average in optimizer.averages.values())


def test_endings_are_on_the_clock_and_before_the_final_validation(cfg, monkeypatch):
    cfg = replace(cfg, warmup=False, val_every=3)
    calls = []

    def record(owner, name):
        original = getattr(owner, name)

        def recorded(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    record(tg.Optimizer, "apply_endings")
    record(tg, "synchronized_time")
    record(tg, "validate")
    exchanges = tg.Exchange(0, 1), tg.Exchange(0, 1)
    tg.train(cfg, tg.TORCH_BACKEND, *exchanges, tg.open_dataset(cfg), 0, tg.RunLog())
    validation = ["synchronized_time", "validate", "synchronized_time"]
    # The clock starts; validation before steps 0, 3 and 6 is of the raw weights.
    assert calls == ["synchronized_time", *validation * 3, "apply_endings", *validation]


# ---- checkpoints -------------------------------------------------------------------------------------------


def go_on(model, optimizer, cfg, position, first, save=None):
    """Trains from step `first` to the end; save(step, position) is called before every second step."""
    rank, world_size = optimizer.exchange.rank, optimizer.exchange.world_size
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size, position)
    plans = [tg.plan_step(cfg, step) for step in range(first, cfg.steps)]
    batches = tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))
    for step in range(first, cfg.steps):
        if save and step % 2 == 0:
            save(step, position)
        batch = batches.next()
        position = batch.position
        tg.train_step(model, optimizer, batch, batches.peek)
    loader.close()
    optimizer.apply_endings()
    return tg.training_state(model, optimizer)


def resume_each(rank, world_size, cfg, folder):
    """Returns by step whether a run that goes on from the checkpoint before it ends with the same bits."""
    exchange, model, optimizer = build(rank, world_size, cfg)
    found = {}

    def save(step, position):
        run = folder / f"{step}.checkpoint"
        progress = {"step": step, "train_ms": None, "position": position}
        tg.save_checkpoint(run, {"task": None}, progress, model, optimizer)
        exchange.all_gather_object(None)  # rank 0 has renamed it
        found[step] = tg.Checkpoint.find(str(run))

    want, same = go_on(model, optimizer, cfg, (0, 0), 0, save), {}
    for step, checkpoint in found.items():
        _, model, optimizer = build(rank, world_size, cfg, seed=1)
        for average in optimizer.averages.values():
            average.fill_(7)
        checkpoint.load(model, optimizer)
        optimizer.gather_all()
        same[step] = same_bits(go_on(model, optimizer, cfg, checkpoint.meta["position"], step), want)
    return same


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_checkpoint_resumes(workers, cfg, tmp_path, world_size):
    """Before, between and after the first ticks of every row, which are in steps 2 to 5."""
    cfg = with_dtype(cfg, "bfloat16")
    results = workers(world_size, resume_each, cfg, tmp_path)
    assert results == [dict.fromkeys((0, 2, 4, 6), True)] * world_size


# ---- settings ----------------------------------------------------------------------------------------------


def test_presets():
    assert tg.RECORD.endings == tg.ENDINGS


@pytest.mark.parametrize(
    "setting, want",
    [
        ("endings.0.params=lm_head", dict(params=("lm_head",))),
        ("endings.0.params=", dict(params=())),
        ("endings.0.window=20", dict(window=20)),
        ("endings.0.rate=0.5", dict(rate=0.5)),
        ("endings.0.blend=0.25", dict(blend=0.25)),
        ("endings.0.every=3", dict(every=3)),
        ("endings.0.offset=1", dict(offset=1)),
        ("endings.0.also=1,5", dict(also=(1, 5))),
        ("endings.0.last_rate=0.1", dict(last_rate=0.1)),
        ("endings.0.keep_norm=false", dict(keep_norm=False)),
    ],
)
def test_every_field_can_be_set(setting, want):
    cfg = tg.override(tg.RECORD, setting)
    assert cfg == replace(tg.RECORD, endings=(replace(tg.ENDINGS[0], **want), *tg.ENDINGS[1:])) != tg.RECORD
    assert tg.config_from_dict(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


def test_an_unknown_parameter_is_refused():
    cfg = tg.override(tg.RECORD, "endings.1.params=mlp_bank,head,ngrams")
    with pytest.raises(
        tg.UserError, match="^endings.1.params: head, ngrams: unknown; use names of parameters$"
    ):
        tg.check_config(cfg, 1)
