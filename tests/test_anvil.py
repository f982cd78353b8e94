"""Tests ANVIL, the banks' update rule: its maps, rails and decay, against golden numbers of record 92.

tests/golden/README.md says how c_anvil was made.
"""

from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from golden_inputs import GOLDEN92, RECORD92, distance, fill, generator, spec_of
from launch import wrap

GOLDEN = GOLDEN92["c_anvil"]
STREAMS = {"wide": 30000, "square": 31000, "tall": 32000}
PINNED = pytest.mark.pinned("ANVIL, as record 92 has it,")
MARGIN = 1.05  # the golden runs'; ours is larger


def words(t):
    """Returns the 16-bit words of t."""
    return t.flatten().view(torch.uint16).tolist()


def bf16_stream(shape, stream, scale=1.0):
    return fill(shape, stream, scale).bfloat16()


# ------------------------------------------------------------------------------------------------------- maps


@PINNED
def test_maps():
    assert list(map(list, tg.ANVIL_MAPS)) == GOLDEN["maps"]


@PINNED
@pytest.mark.parametrize("shape", [(14, 14), (14, 20), (20, 14)])
def test_maps_act_on_singular_values(shape):
    """Checks them in a matrix of norm 1 / margin, in which nothing else changes."""
    sigma = torch.tensor([row["sigma"] for row in GOLDEN["sigma"]], dtype=torch.float64)
    g = generator(0)
    u, v = (torch.linalg.qr(torch.randn(n, 14, generator=g, dtype=torch.float64))[0] for n in shape)
    x = (u * sigma) @ v.T
    # What d = margin |x| + 1e-6 has to be for the singular values to stay.
    margin = (1 - 1e-6) / x.norm().item()
    out = tg.orthogonalize(x[None], margin)[0]
    want = torch.tensor([row["after_each_map"][-1] for row in GOLDEN["sigma"]], dtype=torch.float64)
    torch.testing.assert_close(out, (u * want) @ v.T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (4, 4)])
def test_rank_one_stays_bounded_in_bf16(shape):
    """Checks the worst case of the maps' upper edge: one singular value holds the whole norm.

    There are 20 such matrices, and one of ones, whose traces all round in one direction.
    """
    g = generator(0)
    u, v = (torch.randn(20, n, 1, generator=g) for n in shape)
    x = torch.cat([u @ v.mT, torch.ones(1, *shape)]).bfloat16()
    out = tg.orthogonalize(x, tg.RECORD.bank_margin)
    assert torch.linalg.matrix_norm(out.float(), 2).max() < 1.1


# ----------------------------------------------------------------------------------------------- golden steps


def golden_run(name, dtype):
    """Yields a golden step with our state, parameter and X after it."""
    golden = GOLDEN["classes"][name]
    stream = STREAMS[name]
    mode = tg.dtype_of(dtype)
    shape = golden["shape"]
    factors = golden["rate_multipliers"]
    cfg = replace(RECORD92, bank_dtype=dtype, bank_margin=MARGIN)
    row = tg.ParamSpec("bank", optimizer="anvil", matrix_lr_mul=tuple(factors))
    p = bf16_stream(shape, stream + 90, 0.1).to(mode)
    state = tg.anvil_init(p, row, torch.promote_types(mode, torch.float32), 0)
    x = []

    def recorded_update(update, *args):
        x.append(args[1])
        update(*args)

    for n, (numbers, want) in enumerate(zip(GOLDEN["steps"], golden["steps"], strict=True)):
        grad = bf16_stream(shape, stream + 100 * n, 0.5)
        if name == "wide":
            grad[1, 3:6] = 0
        if name == "square" and n == 0:
            grad[0] = 0
        plan = tg.plan_step(cfg, numbers["step"])._replace(lr_mul=numbers["s"])
        with pytest.MonkeyPatch.context() as patch:
            wrap("apply_anvil", recorded_update, patch.setattr)
            tg.anvil(p, grad, state, row, plan, cfg)
        yield want, state, p, x.pop()


@PINNED
@pytest.mark.parametrize("name", STREAMS)
def test_golden_steps_in_fp64(name):
    last = GOLDEN["classes"][name]["steps"][-1]["fp64"]
    for want, state, p, x in golden_run(name, "float64"):
        want = want["fp64"]
        ours = {
            "V0": state["fast_momentum"],
            "V1": state["slow_momentum"],
            "p": p,
            "energy": state["second_moment"],
        }
        for key, t in ours.items():
            assert distance(t, want[key]) < 1e-10, key
        if want is not last:
            assert distance(x, want["X"]) < 1e-10
    assert x.flatten().tolist() == pytest.approx(last["X"], abs=1e-10)
    assert p.flatten().tolist() == pytest.approx(last["p_all"], abs=1e-10)


@PINNED
@pytest.mark.parametrize("name", STREAMS)
def test_golden_steps_in_bf16(name):
    """Checks every bit: golden numbers are the same for exact sums, so the order of ours does not matter."""
    for want, state, p, x in golden_run(name, "bfloat16"):
        want, mantissa = want["bf16"], state["mantissa"]
        if "X_bits" in want:
            assert words(x) == want["X_bits"]
            assert (words(p), words(mantissa)) == (want["p_bits"], want["mantissa"])
        else:
            assert distance(x, want["X"]) < 1e-12
            assert distance(tg.merge_mantissa(p, mantissa), want["p_joined"]) < 1e-12
        assert state["fast_momentum"].dtype == state["slow_momentum"].dtype == torch.float32


@PINNED
def test_update_alone_bit_for_bit():
    golden = GOLDEN["update_alone"]
    shape = golden["shape"]
    one = torch.ones(())
    p = bf16_stream(shape, 33100, 0.1)
    mantissa = torch.zeros(shape, dtype=torch.uint16)
    x = bf16_stream(shape, 33101)
    slow = fill(shape, 33102, 0.3)
    slow.view(-1)[:2] = 0
    plain = p.float()
    for want in golden["repeats"]:
        for t, low in ((p, mantissa), (plain, None)):
            tg.apply_anvil(t, x, slow, one, golden["lr"], golden["wd"], low)
        assert (words(p), words(mantissa)) == (want["p_bits"], want["mantissa"])
        assert torch.equal(tg.merge_mantissa(p, mantissa), plain)


# -------------------------------------------------------------------------------------------------- the rails


def test_weight_1_is_exactly_the_fast_rail():
    """However large the slow one is."""
    shape = 1, 8, 8
    numbers = torch.tensor([0.1, 1.0, 0.9])  # the fast rail's rate and weight; the momentum
    means = []
    for size in 0, 1e4:
        rails = fill(shape, 2), fill(shape, 3, size)
        means.append(tg.nesterov_momentum(fill(shape, 1), *rails, 0.02, *numbers, torch.float32))
    assert torch.equal(*means)


@pytest.mark.pinned("an entry of PARAMS")
def test_each_rank_has_its_own_matrices_rates():
    """A rank's block may begin at an odd matrix."""
    row = spec_of("mlp_bank")
    shards = [tg.anvil_init(torch.zeros(3, 4, 4), row, torch.float32, first) for first in (0, 3)]
    assert [shard["matrix_lr_mul"].flatten().tolist() for shard in shards] == [[1, 2, 1], [2, 1, 2]]
