"""Compares prefixes, losses, XSA and MLPs in FP8 with golden numbers of a reference.

tests/golden/README.md says how they were made.
"""

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import (
    GOLDEN,
    WORLD,
    distance,
    fill,
    tiny_config,
)

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.pinned("the losses, XSA or FP8 of record 89 or 92"),
]


def check_stats(t, golden):
    """Compares with statistics of fp64."""
    assert distance(t, golden) < 1e-11
    assert t.abs().sum().item() == pytest.approx(golden["abs"], rel=1e-11)
    near = 1e-11 * golden["l2"]
    flat = t.flatten()
    assert flat[:4].tolist() == pytest.approx(golden["first"], abs=near)
    assert flat[golden["argmax_index"]].item() == pytest.approx(golden["argmax_value"], abs=near)


# --------------------------------------------------------------------------------------------------- i prefix

PREFIX = GOLDEN["i_prefix"]


def prefix_loss(case, dtype, unit=0.0):
    loss = PREFIX["loss"]
    golden = loss["cases"][case]
    prefix = [golden["prefix_weight"]] if golden["prefix_weight"] else []
    logits = fill((loss["T"], loss["V"]), 900, 6, -2).to(dtype)
    targets = tg.loss_targets(torch.tensor(loss["targets"]), len(golden["mtp_weights"]), None)
    if prefix:
        targets = torch.cat([targets, torch.tensor(loss["prefix_targets"])[:, None]], dim=1)
    weights = torch.tensor([*golden["mtp_weights"], *prefix], dtype=torch.promote_types(dtype, torch.float32))
    return tg.softcap_loss(logits, targets, weights, unit)


PREFIX_CASES = PREFIX["loss"]["cases"]


@pytest.mark.parametrize("case", PREFIX_CASES)
def test_losses_with_prefixes(case):
    golden = PREFIX_CASES[case]
    losses, grad = prefix_loss(case, torch.float64)
    assert losses.tolist() == pytest.approx(golden["loss_fp64"], rel=1e-12)
    check_stats(grad, golden["dlogits_derivative_fp64"])
    for row, want in zip((0, 1, 6), golden["dlogits_derivative_rows_0_1_6_fp64"], strict=True):
        assert grad[row].tolist() == pytest.approx(want, abs=1e-14)


@pytest.mark.parametrize("case", PREFIX_CASES)
def test_fp8_gradient_of_bf16_logits(case):
    """Compares e5m2 codes. The reference's sigmoids are rounded: few codes are one step off."""
    _, grad, _ = prefix_loss(case, torch.bfloat16, 0.75 / 448)
    want = np.array(PREFIX_CASES[case]["bf16_logits_e5m2_codes_row_1"])
    steps = grad[1].view(torch.uint8).numpy().astype(int) - want
    assert np.abs(steps).max() <= 1 and np.count_nonzero(steps) < 6


# ------------------------------------------------------------------------------------------------------ l xsa

XSA = GOLDEN["l_xsa"]


def test_xsa():
    """Checks also that a value of zero leaves the output, and has no gradient."""
    T, H, D = XSA["T"], XSA["H"], XSA["D"]
    y, v, alpha = fill((T, H, D), 811), fill((T, H, D), 812), fill((T, H), 814, 2.5)
    v[3, 1], v[5, 0] = 0, torch.tensor(XSA["v_5_0"])
    y, v, alpha = (t.double().requires_grad_() for t in (y, v, alpha))
    out = tg.without_own_value(y, v, alpha)
    out.backward(fill((T, H, D), 813).double())
    assert out.flatten().tolist() == pytest.approx(XSA["out"], abs=1e-14)
    check_stats(out.detach(), XSA["out_stats"])
    for name, t in {"y": y, "v": v, "alpha": alpha}.items():
        assert t.grad.flatten().tolist() == pytest.approx(XSA[f"grad_{name}"], rel=1e-12, abs=1e-13)
        check_stats(t.grad, XSA["grad_stats"][name])
    assert torch.equal(out[3, 1], y[3, 1]) and not v.grad[3, 1].any() and not alpha.grad[3, 1].any()


# -------------------------------------------------------------------------------------- j: MLPs in FP8

FP8 = GOLDEN["j_fp8"]


def codes(t):
    return t.contiguous().view(torch.uint8).flatten().tolist()


def fp8_model(world_size=WORLD):
    """Returns a model in bf16 whose MLPs have the shapes of the golden ones, with 11 layers."""
    backend = tg.TORCH_BACKEND._replace(fp8=True)
    return tg.GPT(tiny_config("bfloat16", mlp_dim=768), world_size, backend=backend)


def fp8_layers(model, step):
    return [*model.convert_mlps_to_fp8(step < tg.FP8_EXACT_STEPS).split()]


def kept(scales):
    """Returns golden scales, but the first one where the reference's come from no maximum: ours stay then."""
    return [1.0 if scale < 1e-12 else scale for scale in np.float32(scales).tolist()]


def test_fp8_scales_of_steps():
    """Follows the scales of layers 0, 1, 2 over 21 steps, each with one forward."""
    model = fp8_model()
    sequences = FP8["scale_sequences"]
    with torch.no_grad():
        model.mlp_bank.zero_()
    layers = fp8_layers(model, 0)
    for step, golden in enumerate(FP8["steps"]):
        act_scales, proj_scales = zip(*[(mlp.scales[2, 0].item(), mlp.scales[1, 1].item()) for mlp in layers])
        assert [*act_scales[:3]] == kept(golden["act_scale_used"][:3]), step
        assert [*proj_scales[:3]] == np.float32(golden["proj_scale_used"][:3]).tolist(), step
        assert not model.fp8_amax.any()
        for layer, amax in zip(layers, golden["amax_p"]):
            layer.amax[layer.i, 0] = amax
        model.set_fp8_scales(model.fp8_amax)
        found = model.fp8_scales[:3, 2, 0].flatten().tolist()
        assert found == kept(golden["act_scale_after"][:3]), step
        for i in range(3):
            proj = fill((768, 192), 700 + i, sequences["a_after_step"][str(i)][step])
            model.mlp_bank.data[2 * i + 1] = proj.bfloat16()
            assert model.mlp_bank[2 * i + 1].abs().max().item() == golden["amax_proj_after"][i]
        layers = fp8_layers(model, step + 1)
        found = (model.weight_amax[:3, 1] * (1.12 / 448)).tolist()
        assert found == np.float32(golden["proj_next_after"][:3]).tolist(), step
        for i, count in enumerate(golden["entries_beyond_448"][:3]):
            units = model.mlp_bank[2 * i + 1].float() / layers[i].scales[1, 1]
            assert (units.abs() > 448).sum() == count, (step, i)
            assert codes(layers[i].weights[1]) == codes(units.clamp(-448, 448).to(torch.float8_e4m3fn))
