"""Tests MLPs in FP8 in training: whose maxima scale what, and what must not be in FP8."""

# ruff: noqa: F811 (fixtures are imported)

from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from golden_inputs import same_bits, training_of
from launch import wrap
from test_distributed import build, digest_of, few_layers, first_batch, run_steps  # noqa: F401 (a fixture)
from test_switches import cfg  # noqa: F401 (a fixture)

FP8 = tg.TORCH_BACKEND._replace(fp8=True)
OF_MLPS = pytest.mark.pinned("the MLPs' activation, of which FP8 has no other form,")


@pytest.fixture(autouse=True)
def few_exact_steps(monkeypatch):
    """Lets the weights' scales come from the step before, as late in a run."""
    monkeypatch.setattr(tg, "FP8_EXACT_STEPS", 2)


def watch_steps(rank, world_size, cfg):
    """Returns what each product of each step had and gave: (backward, its scales, maximum, codes' digest).

    Gradients are those of all micro-batches' shares together.
    """
    tg.FP8_EXACT_STEPS = 2
    steps_seen = [[]]
    count = tg.num_microbatches(cfg, world_size) // world_size

    def watched(a8, mlp, square8=None):
        backward = int(square8 is not None)
        maxima = mlp.amax[mlp.i]
        before = maxima.clone()
        maxima.zero_()
        result = tg.relu_square_fp8(a8, mlp, square8)
        largest = maxima[backward].item()
        maxima.copy_(torch.maximum(maxima, before))
        weight_scale = mlp.scales[1, backward].item()
        scale = mlp.scales[2, backward, 0, 0].item()
        if backward:
            largest *= count
            scale *= count
        codes = digest_of({"codes": result[0].view(torch.uint8)})
        steps_seen[-1].append((backward, weight_scale, scale, largest, codes))
        return result

    _, model, optimizer = build(rank, world_size, cfg, backend=FP8._replace(relu_square_fp8=watched))
    for _ in run_steps(model, optimizer):
        steps_seen.append([])
    return steps_seen[:-1]


@OF_MLPS
@pytest.mark.numeric
@pytest.mark.parametrize("main_grad", [False, True])
def test_slices_share_a_scale(cfg, main_grad):
    """All slices use the maxima over those of the step before, which differ."""
    n = sum(layer.mlps for layer in cfg.layers)
    count = tg.num_microbatches(cfg, 1)
    steps = watch_steps(0, 1, replace(cfg, main_grad=main_grad))
    for backward, first_scale, factor in (0, 1.0, 1.8 / 448), (1, 2**-6, 1.25 / 57344):
        scales = torch.full((n,), first_scale)
        later_ones_count = False
        for seen in steps:
            # By micro-batch and MLP; the last MLP's backward is the first.
            uses = [use for use in seen if use[0] == backward]
            used = torch.tensor([use[2] for use in uses]).view(count, n)
            largest = torch.tensor([use[3] for use in uses]).view(count, n)
            if backward:
                used = used.flip(1)
                largest = largest.flip(1)
            assert torch.equal(used, scales.expand(count, n))
            later_ones_count |= (largest[0] < largest.amax(0)).any().item()
            scales = largest.amax(0) * factor
        assert later_ones_count


def scales_of(uses):
    """Returns of each product whether it is the backward's, and its scales."""
    return [use[:3] for use in uses]


@OF_MLPS
@pytest.mark.slow
@pytest.mark.numeric
def test_codes_do_not_depend_on_the_number_of_ranks(workers, cfg):
    """Compares scales, maxima and codes: in the first step all, later scales, as gradients round."""
    alone = watch_steps(0, 1, cfg)
    first, second = workers(2, watch_steps, cfg)
    assert sorted(first[0] + second[0]) == sorted(alone[0])
    for step, seen in enumerate(alone):
        scales = scales_of(first[step])
        assert scales_of(second[step]) == scales
        for found, want in zip(sorted(2 * scales), sorted(scales_of(seen)), strict=True):
            assert found == pytest.approx(want, rel=0.05), step


def test_a_maximum_of_0_or_nan_leaves_a_scale(cfg):
    _, model, _ = build(0, 1, cfg, backend=FP8)
    before = model.fp8_state.scales.clone()
    for maximum in 0, torch.nan:
        model.fp8_state.end_step(torch.full_like(model.fp8_state.amax, maximum))
        assert torch.equal(model.fp8_state.scales, before)


def test_weights_and_their_transposes_have_memory_of_their_own(cfg):
    """As wide as the model, the MLPs' transposes have the shapes of their weights."""
    _, model, _ = build(0, 1, replace(cfg, mlp_dim=cfg.dim), backend=FP8)
    mlps = model.fp8_state.begin_step(model.mlp_bank, exact=True)
    assert mlps.weights.float().any()
    assert torch.equal(mlps.weights_T.float(), mlps.weights.float().mT)


@OF_MLPS
@pytest.mark.numeric
def test_a_checkpoint_holds_the_scales(cfg):
    _, model, optimizer = build(0, 1, cfg, backend=FP8)
    assert len(list(run_steps(model, optimizer))) == cfg.steps
    state = tg.training_state(model, optimizer)
    _, other, other_optimizer = build(0, 1, cfg, seed=5, backend=FP8)
    tg.restore(state, other, other_optimizer)
    saved, restored = model.fp8_state, other.fp8_state
    assert torch.equal(saved.scales, restored.scales) and (restored.scales[:, 2, 0] != 1).all()
    assert torch.equal(saved.weight_amax, restored.weight_amax) and restored.weight_amax.all()


@pytest.mark.slow
def test_the_warm_up_leaves_no_scales(cfg):
    comm, model, optimizer = build(0, 1, cfg, backend=FP8)
    before = tg.training_state(model, optimizer)
    tg.warm_up(training_of(model, optimizer, comm))
    assert same_bits(before, tg.training_state(model, optimizer))
    assert (model.fp8_state.scales[:, 2, 0] == 1).all() and not model.fp8_state.weight_amax.any()


@OF_MLPS
@pytest.mark.numeric
def test_what_is_not_in_fp8(cfg, monkeypatch):
    """Validation never is, nor is training without the switch."""
    states, losses = [], []

    def keep(forward, *args):
        states.append(forward(*args))
        return states[-1]

    wrap("GPT.forward", keep, monkeypatch.setattr)
    plan = tg.plan_step(cfg, 0)
    batch = first_batch(cfg)
    for backend, on in ((FP8, True), (FP8, False), (tg.TORCH_BACKEND, True)):
        _, model, optimizer = build(0, 1, replace(cfg, fp8_mlp=on), backend=backend)
        losses.append(model.token_losses(batch.micro_batches[0], plan.windows))
        optimizer.step = lambda *_: None
        for _ in range(3):  # the first find scales
            optimizer.drop_grads()
            tg.train_step(model, optimizer, batch)
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
    in_fp8, without, plain = states[6::7]  # the first is the validation's
    assert torch.equal(without, plain)
    assert 0 < (in_fp8 - plain).norm() < 0.2 * plain.norm()
