"""Tests MLPs in FP8 in training: whose maxima scale what, and what must not be in FP8."""

# ruff: noqa: F811 (fixtures are imported)

from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from golden_inputs import prefetch_exchange, same_bits
from test_distributed import build, few_layers, first_batch, run_steps  # noqa: F401 (a fixture)
from test_switches import cfg  # noqa: F401 (a fixture)

FP8 = tg.TORCH_BACKEND._replace(fp8=True)


@pytest.fixture(autouse=True)
def few_exact_steps(monkeypatch):
    """Lets the scales of proj come from the step before, as late in a run."""
    monkeypatch.setattr(tg, "FP8_EXACT_STEPS", 2)


def watch_steps(rank, world_size, cfg):
    """Returns of each step what each product had and gave: (scale of activations, of proj, maximum)."""
    tg.FP8_EXACT_STEPS, steps_seen = 2, [[]]

    def watched(h8, amax, weights, dtype):
        result = tg.relu_square_fp8(h8, amax, weights, dtype)
        scales = weights.act_scale.item(), weights.proj_scale.item()
        steps_seen[-1].append((*scales, result[0].max().item()))
        return result

    _, model, optimizer = build(rank, world_size, cfg, backend=FP8._replace(relu_square_fp8=watched))
    for _ in run_steps(model, optimizer):
        steps_seen.append([])
    return steps_seen[:-1]


@pytest.mark.numeric
def test_slices_share_a_scale(cfg):
    """All slices use the maximum over those of the step before; the first step's scale is 1."""
    n = sum(layer.mlps for layer in cfg.layers)
    scales, second_counts = [1.0] * n, False
    for seen in watch_steps(0, 1, cfg):
        first, second = seen[:n], seen[n:]
        assert [use[0] for use in first] == [use[0] for use in second] == scales
        largest = torch.tensor([[use[2] for use in part] for part in (first, second)]).amax(0)
        second_counts |= (torch.tensor([use[2] for use in first]) != largest).any().item()
        scales = (largest * (1.8 / 448)).tolist()
    assert second_counts


@pytest.mark.slow
@pytest.mark.numeric
def test_scales_do_not_depend_on_the_number_of_ranks(workers, cfg):
    alone, ranks = watch_steps(0, 1, cfg), workers(2, watch_steps, cfg)
    for step, seen in enumerate(alone):
        parts = [rank[step] for rank in ranks]
        assert [use[:2] for use in parts[0]] == [use[:2] for use in parts[1]]
        spread = [number for part in parts for use in part for number in use]
        together = [number for use in seen for number in use]
        assert spread == (together if step == 0 else pytest.approx(together, rel=0.05)), step


@pytest.mark.numeric
def test_a_checkpoint_holds_the_scales(cfg):
    _, model, optimizer = build(0, 1, cfg, backend=FP8)
    assert len(list(run_steps(model, optimizer))) == cfg.steps
    state = tg.training_state(model, optimizer)
    _, other, other_optimizer = build(0, 1, cfg, seed=5, backend=FP8)
    tg.restore(state, other, other_optimizer)
    assert same_bits(state, tg.training_state(other, other_optimizer))
    for scales in (model.act_scale, other.act_scale), (model.proj_scale, other.proj_scale):
        assert torch.equal(*scales) and (scales[0] != 1).all()


@pytest.mark.slow
def test_the_warm_up_leaves_no_scales(cfg):
    exchange, model, optimizer = build(0, 1, cfg, backend=FP8)
    data = tg.open_dataset(cfg)
    before = tg.training_state(model, optimizer)
    tg.warm_up(data, model, optimizer, tg.ValLoader(cfg, data.val), prefetch_exchange(0, 1))
    assert same_bits(before, tg.training_state(model, optimizer)) and (model.act_scale == 1).all()


@pytest.mark.numeric
def test_what_is_not_in_fp8(cfg):
    """Validation never is, nor is training without the switch; the backward's factors are not either."""
    cfg, states, losses, squares = replace(cfg, main_grad=True), [], [], []
    plan, batch = tg.plan_step(cfg, 0), first_batch(cfg)
    for backend, on in ((FP8, True), (FP8, False), (tg.TORCH_BACKEND, True)):

        def watched(dy, proj, square):
            squares.append((proj, square))
            return tg.relu_square_grad(dy, proj, square)

        backend = backend._replace(relu_square_grad=watched)
        _, model, optimizer = build(0, 1, replace(cfg, fp8_mlp=on), backend=backend)
        losses.append(model.token_losses(batch.micro_batches[0], plan.windows))
        optimizer.step = lambda *_: None
        seen = model.hidden_states

        def hidden_states(*args, seen=seen):
            states.append(seen(*args))
            return states[-1]

        model.hidden_states = hidden_states
        tg.train_step(model, optimizer, batch)
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
    in_fp8, *others = states[::2]
    assert torch.equal(*others) and 0 < (in_fp8 - others[0]).norm() < 0.2 * others[0].norm()
    assert all(proj.dtype == square.dtype == torch.float32 for proj, square in squares)


@pytest.mark.numeric
def test_gradients_are_those_of_the_rounded_forward():
    """Checks that gradients pass straight through: with the weights, the input and the square in full."""
    g = torch.Generator().manual_seed(1)
    h, dy = torch.randn(2, 33, 16, generator=g)
    bank = torch.randn(1, 2, 48, 16, generator=g)
    fc, proj, fc_scale, proj_scale, _ = tg.fp8_mlp_weights(bank.flatten(0, 1), torch.zeros(1))
    largest = (h @ bank[0, 0].T).square().max()
    layer = tg.FP8MLP(fc[0], proj[0], fc_scale[0], proj_scale[0], largest / 448, torch.zeros(()))
    weights = [w.clone().requires_grad_() for w in bank[0]]
    h.requires_grad_()
    tg.MLP.apply(h, tuple(map(tg.Weight, weights)), *weights, FP8, layer).backward(dy)
    square, _ = tg.relu_square_fp8(*tg.amax_to_fp8(h.detach()), layer, h.dtype)
    da = tg.relu_square_grad(dy, bank[0, 1], square)
    for grad, want in zip((h.grad, *(w.grad for w in weights)), (da @ bank[0, 0], da.T @ h, square.T @ dy)):
        torch.testing.assert_close(grad, want)
