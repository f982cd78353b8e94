"""Compares XSA and MLPs in FP8 with golden numbers of a reference.

tests/golden/README.md says how they were made.
"""

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import GOLDEN, WORLD, fill, same_bits, tiny_config

pytestmark = [pytest.mark.numeric, pytest.mark.pinned("XSA or FP8 of record 89 or 92")]


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
    for name, t in {"y": y, "v": v, "alpha": alpha}.items():
        assert t.grad.flatten().tolist() == pytest.approx(XSA[f"grad_{name}"], rel=1e-12, abs=1e-13)
    assert torch.equal(out[3, 1], y[3, 1]) and not v.grad[3, 1].any() and not alpha.grad[3, 1].any()


# -------------------------------------------------------------------------------------- j: MLPs in FP8

FP8 = GOLDEN["j_fp8"]


def fp8_layers(model, step):
    return list(model.fp8_state.begin_step(model.mlp_bank, step < tg.FP8_EXACT_STEPS).split())


def kept(scales):
    """Returns golden scales, but the first one where the reference's come from no maximum: ours stay then."""
    return [1.0 if scale < 1e-12 else scale for scale in np.float32(scales).tolist()]


def test_fp8_scales_of_steps():
    """Follows the scales of layers 0, 1, 2 of 11, in bf16, over 21 steps, each with one forward."""
    backend = tg.TORCH_BACKEND._replace(fp8=True)
    model = tg.GPT(tiny_config("bfloat16", mlp_dim=768), WORLD, backend=backend)
    sequences = FP8["scale_sequences"]
    with torch.no_grad():
        model.mlp_bank.zero_()
    layers = fp8_layers(model, 0)
    for step, golden in enumerate(FP8["steps"]):
        act_scales = [mlp.scales[2, 0].item() for mlp in layers[:3]]
        proj_scales = [mlp.scales[1, 1].item() for mlp in layers[:3]]
        assert act_scales == kept(golden["act_scale_used"][:3]), step
        assert proj_scales == np.float32(golden["proj_scale_used"][:3]).tolist(), step
        assert not model.fp8_state.amax.any()
        for layer, amax in zip(layers, golden["amax_p"]):
            layer.amax[layer.i, 0] = amax
        model.fp8_state.end_step(model.fp8_state.amax)
        found = model.fp8_state.scales[:3, 2, 0].flatten().tolist()
        assert found == kept(golden["act_scale_after"][:3]), step
        for i in range(3):
            proj = fill((768, 192), 700 + i, sequences["a_after_step"][str(i)][step])
            model.mlp_bank.data[2 * i + 1] = proj.bfloat16()
            assert model.mlp_bank[2 * i + 1].abs().max().item() == golden["amax_proj_after"][i]
        layers = fp8_layers(model, step + 1)
        found = (model.fp8_state.weight_amax[:3, 1] * (1.12 / 448)).tolist()
        assert found == np.float32(golden["proj_next_after"][:3]).tolist(), step
        for i, count in enumerate(golden["entries_beyond_448"][:3]):
            units = model.mlp_bank[2 * i + 1].float() / layers[i].scales[1, 1]
            assert (units.abs() > 448).sum() == count, (step, i)
            assert same_bits(layers[i].weights[1], units.clamp(-448, 448).to(torch.float8_e4m3fn))
