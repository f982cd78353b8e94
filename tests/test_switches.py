"""Compares runs of four steps with each technique's switch, alone and in seeded pairs, with the plain run.

They agree to the bit or within a stated bound. Triton's kernels run in its interpreter. test_compiled.py
tests compile alone.
"""

import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import train_gpt as tg
from test_distributed import build, dense, few_layers, run_steps, states, with_dtype  # noqa: F401 (a fixture)
from test_kernels import interpreted  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def cfg(few_layers):  # noqa: F811
    """Returns a config in fp32, with lengths of 16 for FP8.

    Every stage is one step, so that step 3 is the untied one's.
    """
    changes = """
    stages.*.steps=1 stages.*.batch_tokens=96 stages.0.batch_tokens=64 stages.1.batch_tokens=128
    head_chunk=16 main_grad=false pointer_dim=16 bf16_mlp=false
    """
    return tg.with_settings(dense(with_dtype(few_layers, "float32")), changes.split())


# Bounds on the relative difference of losses, and of each parameter's change over the run, by its norm.
# Rounding differently is 1e-7 of a gradient, which orthogonalize and Adam's first steps, close to signs, blow
# up. FP8's gradients have two bits of mantissa: what they do to one number is large, to the loss it is small.
ROUNDING = (1e-5, 1e-4)
FP8 = (1e-2, None)
# Adam moves an entry whose gradients are noise as far as any other. So those entries are compared whose
# root mean square gradient is above this share of the tensor's largest.
NOISE = 1e-5
SWITCHES = {  # settings
    "main_grad": "main_grad=true",
    "reduction": "params.*.reduction=fp32",
    "sparse value_embeds": "params.value_embeds.exchange=sparse",
    "sparse bigram_embed": "params.bigram_embed.exchange=sparse",
    "sparse embed": "params.embed.exchange=sparse",
    "fp8": "fp8=true",
    "fp8 head": "fp8=true fp8_mlp=false",
}
for kernel in tg.RECORD.kernels:
    SWITCHES[f"kernel {kernel}"] = f"kernels={kernel}"
NGRAMS = tg.Ngrams((2, 3), rows_per_order=50, width=12, dtype="float32", contexts=("word", "above", "copy"))
PAIRS = random.Random(6).sample([(a, b) for a in SWITCHES for b in SWITCHES if a < b], 4)
CASES = [(name,) for name in SWITCHES] + PAIRS
SWITCHES["compile"] = "compile=true"
CASES.append(pytest.param(("compile", "fp8"), marks=pytest.mark.long))


def train(cfg, backend):
    """Trains a run; returns its losses, each parameter's change, that of the table of n-grams, and which
    entries of parameters had gradients, and which of them more than noise.
    """
    _, model, optimizer = build(0, 1, cfg, backend=backend)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = [loss.item() for _, loss in run_steps(model, optimizer)]
    optimizer.wait()
    changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    if optimizer.ngrams:
        changes["ngrams"] = optimizer.ngrams.block
        changes["moments"] = optimizer.ngrams.state["second_moment"]
    known = {}
    for name, state in states(model, optimizer):
        if "exp_avg_sq" in state:
            square = state["exp_avg_sq"]
            known[name] = square > 0, square > NOISE**2 * square.max()
    return losses, changes, known


train_plain = cache(partial(train, backend=tg.TORCH_BACKEND))


# Settings that leave out a part of the model, and the parameters that go with it.
PARTS = {
    "mudd_gates=false": {"mudd_gate_w1", "mudd_gate_w2"},
    "mudd_weights=false": {"mudd_w1", "mudd_w2"},
    "pointer_dim=0": {"pointer_bank", "pointer_gain", "pointer_sink"},
    "sign_rows=0": set(),
    "layers.*.xsa=false": set(),
    "layers.*.gate=false": set(),
    "layers.*.x0=false": set(),
    "layers.*.ngram=false": set(),
    "ngrams.contexts=": set(),
    "stages.*.prefix=": set(),
}


@pytest.mark.slow
@pytest.mark.forms("a fast form, which a setting switches on, and the plain one")
@pytest.mark.parametrize("names", CASES, ids=" and ".join)
def test_a_switch_changes_nothing_but_rounding(cfg, interpreted, monkeypatch, names):  # noqa: F811
    switched = cfg
    kernels = set()
    for name in names:
        switched = tg.with_settings(switched, SWITCHES[name].split())
        kernels |= set(switched.kernels)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend = interpreted.select_backend(replace(switched, kernels=tuple(kernels)), torch.device("cpu"))
    if switched.compile:  # traces only; test_compiled.py tests the generated code
        compiler = cache(partial(torch.compile, fullgraph=True, backend="eager"))
        monkeypatch.setattr(tg, "COMPILER", compiler)
    with torch._dynamo.config.patch(recompile_limit=64):
        losses, changes, _ = train(switched, backend)
    want_losses, want_changes, known = train_plain(cfg)
    loss_bound, bound = FP8 if switched.fp8 else ROUNDING
    assert losses == pytest.approx(want_losses, rel=loss_bound, abs=0)
    assert losses[0] != losses[-1]
    assert changes.keys() == want_changes.keys()
    for name, want in want_changes.items():
        if bound is not None:
            moved, kept = known.get(name, (want != 0,) * 2)
            assert kept.sum() >= 0.95 * moved.sum(), name
            kept = kept | ~moved  # what must not move
            assert (changes[name] - want)[kept].norm() <= bound * want[kept].norm(), name
        elif want.any() and want.numel() > 1:  # in the same direction, if not as far to the last digit
            assert F.cosine_similarity(changes[name].flatten(), want.flatten(), dim=0) > 0.5, name


@pytest.mark.parametrize("preset", tg.PRESETS)
def test_every_parameter_and_gate_trains(cfg, preset):
    """Checks that a preset's layers leave none unused, and that no two factors are both 0 at first."""
    preset = tg.PRESETS[preset]
    kept = {name: getattr(preset, name) for name in ("layers", "skip_from", "skip_to", "backout_from")}
    cfg = replace(cfg, **kept)
    _, changes, _ = train_plain(cfg)
    for name, change in changes.items():
        assert change.any(), f"{name} does not change: use it, and do not multiply two zeros"
    for gates, change in zip(tg.gate_table(cfg), changes["mudd_gate_b2"]):
        used = change[: sum(gate.columns for gate in gates)]
        assert used.all(), f"a gate does not change: use it where it acts; the changes of {gates} are {used}"


@pytest.mark.parametrize("setting", PARTS)
def test_a_part_of_the_model_can_be_left_out(cfg, setting):
    """Checks that the run is another, that only the part's parameters go, and that others train."""
    cfg = replace(cfg, ngrams=NGRAMS)
    losses, changes, _ = train_plain(cfg)
    other_losses, other_changes, _ = train_plain(tg.override(cfg, setting))
    assert tg.override(cfg, setting) != cfg, "the test's config has this value: write the other one in PARTS"
    assert changes.keys() ^ other_changes.keys() == PARTS[setting]
    for loss, other_loss in zip(losses[-2:], other_losses[-2:]):
        assert loss != other_loss, (
            "it does nothing in these steps: PARTS has parts of the model, no schedules"
        )
        assert abs(loss - other_loss) < 0.5
    for name, change in other_changes.items():
        assert change.any() or name in changes and not changes[name].any(), name


def random_layer(rng):
    """Draws a row of the table; three of four rows have only what their attention uses."""
    flags = {}
    for name in ("narrow_qk", "narrow_v", "x0", "ngram", "gate", "key_shift", "xsa", "value", "mudd"):
        flags[name] = rng.random() < 0.3
    attention = rng.choice(["plain", "paired", ""])
    if rng.random() < 0.9:  # it fits
        plain = attention == "plain"
        flags["xsa"] &= plain
        flags["key_shift"] &= plain and not flags["narrow_qk"]
        flags["value"] = bool(attention) and (flags["value"] or flags["mudd"])
        flags["mudd"] &= bool(attention)
        flags["gate"] &= bool(attention)
    window = rng.choice(["short", "long"])
    mlps = rng.choice([0, 1, 1, 2])
    return tg.Layer(attention, window, mlps=mlps, **flags)


def test_any_layers_train_or_are_refused(cfg):
    """Draws tables of layers, and switches of what serves them all."""
    refused = 0
    count = 40
    for seed in range(count):
        rng = random.Random(seed)
        layers = tuple(random_layer(rng) for _ in range(rng.choice([1, 2, 4])))
        if rng.random() < 0.4:  # none of a kind
            none = rng.choice([{"mlps": 0}, {"ngram": False}, {"value": False, "mudd": False}])
            layers = tuple(replace(layer, **none) for layer in layers)
        drawn = replace(
            cfg,
            layers=layers,
            skip_from=rng.randrange(len(layers)),
            skip_to=rng.randrange(1, 5),
            backout_from=rng.randrange(len(layers)),
            ngrams=rng.choice([cfg.ngrams, NGRAMS]),
            main_grad=rng.random() < 0.5,
            mudd_gates=rng.random() < 0.5,
            mix_groups=rng.choice([1, 4]),
        )
        try:
            tg.check_config(drawn, 1)
        except tg.UserError:
            refused += 1
            continue
        losses, _, _ = train_plain(drawn)
        assert torch.tensor(losses).isfinite().all(), seed
    assert 0 < refused < 0.75 * count
