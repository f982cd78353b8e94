"""Compares MLPs and logits in FP8 with golden numbers: tests/golden/README.md says how they were made."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import GOLDEN_FP8, bits_of, distance, fill, fp8_buffers, head_model, head_of
from test_kernels import fp8_steps_apart

pytestmark = [pytest.mark.numeric, pytest.mark.pinned("FP8 of record 92")]

MLP = GOLDEN_FP8["b_mlp"]
STEPS = range(len(MLP["steps"]))


def codes(t):
    return bits_of(t)[1].hex()


def bf16(text, like):
    """Returns bf16 numbers from hexadecimal digits, in the shape of `like`."""
    words = np.frombuffer(bytes.fromhex(text), dtype=np.int16)
    return torch.from_numpy(words.copy()).view(torch.bfloat16).view(like.shape)


def close(found, want):
    """Whether they are at most one bf16 number apart, of those near a 1000th of the largest or more."""
    size = torch.maximum(want.abs(), 1e-3 * want.abs().max()).float()
    return ((found.float() - want.float()).abs() <= 2**-7 * size).all()


def mlp_inputs(step):
    """Returns h, fc, proj, and the gradient of the result."""
    T = MLP["T"]
    d = MLP["dim"]
    F = MLP["F"]
    h = torch.roll(1.7 * fill((T, d), 1200), 5 * step, 0).bfloat16()
    h[5, 3] = 25
    fc = ((1, 1.1, 1.1, 1.4)[step] * 0.25 * fill((F, d), 1201)).bfloat16()
    proj = ((0, 0.5, 1, 0.9)[step] * 0.2 * fill((F, d), 1202)).bfloat16()
    dy = torch.roll(0.4 * fill((T, d), 1203).double() ** 5, 3 * step, 0).bfloat16()
    return h, fc, proj, dy


@pytest.fixture(scope="module")
def mlps():
    """Returns of each step: the MLP in FP8, its inputs, results and gradients, and its square.

    The golden factor p of the result is in the scale of proj; the gradient of proj is that before it.
    """
    steps = []
    scales = torch.tensor([[tg.FP8_MLP_H_SCALE, tg.FP8_MLP_DY_SCALE], [0, 0], [1, tg.FP8_MLP_DY_SCALE]])[
        None, ..., None, None
    ]
    before, amax = torch.zeros(2, 1, 2)
    rooms = torch.tensor([1.03 / tg.E4M3_MAX, tg.FP8_GRAD_MARGIN / tg.E5M2_MAX])  # the golden ones
    state = SimpleNamespace(scales=scales, scale_per_amax=rooms)
    for step, golden in enumerate(MLP["steps"]):
        h, fc, proj, dy = mlp_inputs(step)
        if step < MLP["exact_refreshes"]:
            before.zero_()
        bank = torch.stack([fc, proj])
        weights, transposed = out = fp8_buffers(bank)
        tg.convert_mlp_bank(out, bank, scales, before)
        used = scales.clone()
        used[:, 1, 1] *= golden["p"]
        mlp = tg.FP8Operands(weights[0], transposed[0], used[0], amax.zero_()[0])
        for t in (h, fc, proj):
            t.requires_grad_()
        y = tg.MLP.apply(h, (tg.BankMatrix(fc), tg.BankMatrix(proj)), fc, proj, tg.TORCH_BACKEND, mlp)
        y.backward(dy)
        results = {"y": y.detach(), "dproj": proj.grad, "dfc": fc.grad, "dh": h.grad}
        steps.append((mlp._replace(amax=amax[0].clone()), scales[0].clone(), (h, fc, proj, dy), results))
        tg.FP8State.end_step(state, amax)
    return steps


@pytest.mark.parametrize("step", STEPS)
def test_scales_and_maxima(mlps, step):
    golden, (mlp, scales, *_) = MLP["steps"][step], mlps[step]
    names = "fc_scale", "proj_scale", "act_scale", "dpre_scale"
    assert scales[1:].flatten().tolist() == [golden[name] for name in names]
    assert mlp.amax.tolist() == [golden["act_amax"], golden["dpre_amax"]]


@pytest.mark.parametrize("step", STEPS)
def test_results_and_gradients(mlps, step):
    golden, (*_, results) = MLP["steps"][step], mlps[step]
    for name, t in results.items():
        assert t.dtype == torch.bfloat16 and distance(t, golden[name]) < 1e-4, name
        if f"{name}_bf16" in golden:
            assert close(t, bf16(golden[f"{name}_bf16"], t)), name


def test_codes(mlps):
    (step,) = (i for i in STEPS if "square8" in MLP["steps"][i])
    golden, (mlp, _, (h, _, _, dy), _) = MLP["steps"][step], mlps[step]
    h8 = tg.to_fp8(h.detach(), tg.FP8_MLP_H_SCALE, torch.float8_e4m3fn)
    dy8 = tg.to_fp8(dy, tg.FP8_MLP_DY_SCALE, torch.float8_e5m2)
    square8, square8_turned = tg.relu_square_fp8(h8, mlp)
    da8, da8_turned = tg.relu_square_fp8(dy8, mlp, square8)
    for name, t in {"g8": dy8, "square8": square8, "dpre8": da8}.items():
        assert codes(t) == golden[name], name
    assert codes(square8_turned.T) == golden["square8"] and codes(da8_turned.T) == golden["dpre8"]
    assert (square8 == 0).sum() - (h8.float() @ mlp.weights[0].float().T <= 0).sum() == golden[
        "square_to_zero"
    ]


def test_head():
    """Compares 8-bit logits, losses, and gradients with those of unrounded sigmoids.

    A CPU rounds products to bf16 before e4m3: a few logits are one number off. The loss gets the golden ones.
    """
    golden = GOLDEN_FP8["c_head"]
    n = golden["n"]
    V = golden["V"]
    d = golden["dim"]
    streams = golden["streams"]
    weights = torch.tensor(golden["weights"])
    x = (3 * fill((n, d), streams[0])).bfloat16()
    w = 1.2 * fill((d, V), streams[1])
    w[:, :4] *= 2
    w, targets = w.bfloat16(), torch.tensor(golden["targets"])
    seen = []

    def watched(logits, *args):
        golden_logits = torch.tensor(list(bytes.fromhex(golden["logits8"])), dtype=torch.uint8)
        golden_logits = golden_logits.view(torch.float8_e4m3fn).view(logits.shape)
        losses, *grads = tg.softcap_loss(golden_logits, *args)
        seen.append((fp8_steps_apart(logits, golden_logits), losses, grads[0]))
        return losses, *grads

    backend = tg.TORCH_BACKEND._replace(fp8=True, softcap_loss=watched)
    model = head_model(w, n, backend)
    head = head_of(w)
    loss, dx = tg.GPT.head_loss_and_grad(model, x, targets, weights, head)
    ((apart, losses, dlogits8),) = seen
    assert codes(tg.to_fp8(w, tg.FP8_HEAD_W_SCALE, torch.float8_e4m3fn)) == golden["w8"]
    assert apart.max() <= 1 and (apart > 0).sum() < 8
    want = golden["sigma_exact"]
    assert losses.tolist() == pytest.approx(want["losses"], rel=1e-6)
    assert loss.item() == pytest.approx(sum(want["losses"]), rel=1e-6)
    assert codes(dlogits8) == want["dlogits8"]
    assert distance(dx, want["dx"]) < 1e-4 and distance(head.main_grad, want["dW"]) < 1e-4
