"""Tests the sampled softmax: candidates, loss and gradients against golden numbers and plain programs; runs.

tests/golden/README.md defines the inputs of the golden numbers.
"""

# ruff: noqa: F811 (fixtures are imported)

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import test_golden92 as golden92
import train_gpt as tg
from configs import BASE
from golden_inputs import (
    GOLDEN92,
    batch_plan,
    distance,
    fill,
    golden_prefixes,
    hash_words,
    head_of,
)
from test_distributed import assert_close, everything, join, one_rank, same_on_all_ranks, train  # noqa: F401
from test_kernels import interpreted, rel_err  # noqa: F401 (a fixture)
from test_resume import assert_same_end, corpus, launch, log_of, stopped, uninterrupted  # noqa: F401

SETS, LOSS, MODEL = GOLDEN92["b_sampled"].values()


# ------------------------------------------------------------------------------------------------- candidates


def golden_targets(case):
    if "targets" in case:
        return np.array(case["targets"])
    targets = 50257
    at = np.arange(case["T"])
    for j in range(case["factors"]):
        targets = hash_words(at, case["target_stream"] + j) % 50257 * targets // 50257
    return targets.astype(np.int64)


def listed(numbers, like):
    """Returns numbers as the golden file lists some: all, or two sums, the first and the last."""
    numbers = numbers.tolist()
    if isinstance(like, list):
        return numbers
    return {
        "sum": sum(numbers),
        "position_weighted_sum": int(np.dot(numbers, np.arange(1, len(numbers) + 1))),
        "first8": numbers[:8],
        "last4": numbers[-4:],
    }


@pytest.mark.pinned("the choice of sampled columns")
@pytest.mark.parametrize("size, V", [("full_size", 50304), ("tiny", 512)])
def test_golden_candidates(size, V):
    offsets = {}
    for case in SETS[size]:
        rank = case.get("rank", 5)
        targets = golden_targets(case)
        offset = offsets.get(rank, V * rank // 8)
        chosen, offsets[rank] = tg.choose_sampled_columns(targets, case["P"], V, offset)
        assert (offset, offsets[rank]) == (case["offset_before"], case["offset_after"])
        places = tg.index_in(torch.from_numpy(targets), chosen)
        prefix_places = tg.index_in(golden_prefixes(V)[targets], chosen)
        found = {"candidates": chosen, "target_positions": places, "prefix_positions": prefix_places}
        for name, numbers in found.items():
            assert listed(numbers, case[name]) == case[name], name


@pytest.mark.pinned("the choice of sampled columns")
def test_special_candidates():
    """Checks targets that leave nothing to draw, and an interval that holds too few others."""
    cases = {"no_negatives": 5 * np.arange(60), "too_few": np.arange(9, 269) * 20011 % 512}
    for name, targets in cases.items():
        case = SETS[name]
        chosen, after = tg.choose_sampled_columns(targets, case["P"], 512, case["offset_before"])
        assert len(chosen) == case["P"] and after == case["offset_after"]
        negatives = set(chosen.tolist()) - set(targets.tolist())
        assert negatives == set(case.get("negatives", ()))


def test_random_candidates():
    rng = np.random.default_rng(1)
    for _ in range(100):
        V = int(rng.integers(1, 3000))
        targets = rng.integers(0, V, rng.integers(1, 400)).astype(np.uint16)
        count = int(rng.integers(len(set(targets)), V + 1))
        chosen, after = tg.choose_sampled_columns(targets, count, V, int(rng.integers(V)))
        assert len(chosen) == count and chosen.dtype == torch.int32 and (chosen.diff() > 0).all()
        assert set(targets) <= set(chosen.tolist())
        assert 0 <= after < V
        found = tg.index_in(torch.arange(-1, V), chosen)
        assert torch.equal(found[chosen + 1], torch.arange(count))
        assert (found >= 0).sum() == count


# --------------------------------------------------------------------------------------------------- the head


def run_head(x, w, targets, weights, sets=(None,), chunk=2, backend=tg.TORCH_BACKEND):
    """Runs the head on a micro-batch, once for each of the `sets` of candidates.

    Returns the last loss and gradient of x, and lm_head's gradient, the sum of all.
    """
    cfg = replace(tg.RECORD, head_chunk=chunk, padded_vocab=w.size(1))
    model = SimpleNamespace(cfg=cfg, lm_head=w, backend=backend)
    head = head_of(w, torch.full_like(w, math.nan))  # NaN: to be overwritten
    for candidates in sets:
        loss, dx = tg.GPT.head_loss_and_grad(model, x, targets, weights, head, 1.0, candidates)
    return loss, dx, head.main_grad


def golden_loss(name):
    """Returns a golden case, and inputs of the head."""
    case = LOSS["cases"][name]
    x = fill((LOSS["T"], LOSS["d"]), 910, 2.0).double()
    w = fill((LOSS["d"], LOSS["V"]), 911, 1.5).double()
    columns = tg.loss_targets(torch.tensor(LOSS["targets"]), len(case["mtp_weights"]), None)
    targets = torch.cat([columns, torch.tensor(LOSS["prefix_targets"])[:, None]], 1)
    weights = torch.tensor(case["mtp_weights"] + [case["prefix_weight"]], dtype=torch.float64)
    return case, (x, w, targets, weights)


CANDIDATES = torch.tensor(LOSS["candidates"]).int()
ALL = torch.arange(LOSS["V"]).int()


@pytest.mark.pinned("the loss of record 92")
@pytest.mark.numeric
@pytest.mark.parametrize("name", LOSS["cases"])
def test_golden_loss(name):
    """Compares losses and gradients; a prefix that is no candidate counts for nothing."""
    case, (x, w, targets, weights) = golden_loss(name)
    places = tg.index_in(targets, CANDIDATES)
    assert places[:, [0, -1]].T.tolist() == [LOSS["target_positions"], LOSS["prefix_positions"]]
    losses, _ = tg.softcap_loss(x @ w[:, CANDIDATES], places, weights)
    assert losses.tolist() == pytest.approx(case["loss"], rel=1e-12)
    loss, dx, dw = run_head(x, w, targets, weights, [CANDIDATES])
    assert loss.item() == pytest.approx(case["sum"], rel=1e-12)
    assert dx.flatten().tolist() == pytest.approx(case["dx"], abs=1e-11 * dx.abs().max().item())
    assert distance(dw, case["dlm_head"]) < 1e-11
    assert dw.any(0).nonzero()[:, 0].tolist() == LOSS["candidates"]


@pytest.mark.numeric
def test_all_columns_as_candidates_change_no_bit():
    """Checks two micro-batches of several chunks; and that gradients of different candidates add up."""
    _, (x, w, targets, weights) = golden_loss("mtp3_prefix")
    loss, dx, dw = run_head(x, w, targets, weights, [None, None])
    _, _, part = run_head(x, w, targets, weights, [CANDIDATES])
    cases = ([ALL, ALL], dw), ([CANDIDATES, ALL], part + dw / 2), ([ALL, CANDIDATES], part + dw / 2)
    for sets, want in cases:
        last_loss, last_dx, grad = run_head(x, w, targets, weights, sets)
        assert (grad - want).abs().max() < 1e-12 * dw.abs().max()
        if sets[1] is ALL:
            assert torch.equal(last_loss, loss) and torch.equal(last_dx, dx)


class NothingAsLarge(TorchDispatchMode):
    """Fails if an operation makes a tensor of as many bytes as one of `tensors`, which exist."""

    def __init__(self, *tensors):
        super().__init__()
        self.known = {t.data_ptr() for t in tensors}
        self.limit = min(t.nbytes for t in tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            assert storage.data_ptr() in self.known or storage.nbytes() < self.limit, function
        return result


@pytest.mark.parametrize("fp8", [False, True])
def test_the_head_makes_nothing_of_the_vocabularys_size(fp8):
    """Checks two micro-batches: the first gradient overwrites, the second is added."""
    x = torch.randn(32, 16)
    w = torch.randn(16, 4096)
    targets = torch.arange(32)[:, None]
    head = head_of(w)
    backend = tg.TORCH_BACKEND._replace(fp8=fp8)
    cfg = replace(tg.RECORD, head_chunk=1, padded_vocab=4096)
    model = SimpleNamespace(cfg=cfg, lm_head=w, backend=backend)
    with NothingAsLarge(w, head.main_grad):
        for _ in range(2):
            candidates = torch.arange(0, 4096, 64, dtype=torch.int32)
            tg.GPT.head_loss_and_grad(model, x, targets, torch.ones(1), head, 1.0, candidates)
    assert head.main_grad.any(0).sum() == 64


@pytest.mark.pinned("the model of record 92")
@pytest.mark.slow
@pytest.mark.numeric
def test_golden_model(monkeypatch):
    """Compares the losses of a model's tokens, and all gradients. Validation has all columns."""
    candidates = torch.tensor(MODEL["candidates"]).int()
    head = tg.GPT.head_loss_and_grad
    found = []

    def sampled(self, x, targets, weights, grad, loss_share):
        places = tg.index_in(targets, candidates)
        losses, _ = tg.softcap_loss(x @ self.lm_head[:, candidates], places, weights)
        loss, dx = head(self, x, targets, weights, grad, loss_share, candidates)
        found.extend([losses, dx])
        return loss, dx

    monkeypatch.setattr(tg.GPT, "head_loss_and_grad", sampled)
    loss, grads = golden92.gradients.__wrapped__(MODEL["case"], "fp64")
    losses, dx = found
    assert loss == pytest.approx(MODEL["sum"], rel=1e-12)
    assert losses.tolist() == pytest.approx(MODEL["losses"], rel=1e-12)
    assert grads["lm_head.weight"].any(0).nonzero()[:, 0].tolist() == MODEL["candidates"]
    grads["dx"] = dx
    for name, want in (MODEL["gradients"] | {"dx": MODEL["dx"]}).items():
        assert distance(grads[name], want) < 1e-11, name

    model, plan = golden92.golden_model(MODEL["case"], "fp64")
    batch = golden92.golden_batch(MODEL["case"], model.cfg, 0)
    mean = model.token_losses(batch._replace(sampled_columns=candidates), plan.windows).mean().item()
    assert mean == pytest.approx(golden92.MODEL["cases"][MODEL["case"]]["eval_mean"], rel=1e-12)


def plain_fp8(logits, targets, weights, *_):
    """Rounds as the head in FP8 does: the logits to e4m3, their gradient to e5m2."""
    logits8 = tg.to_fp8(logits, 1.0, torch.float8_e4m3fn)
    losses, grad, _ = tg.softcap_loss(logits8, targets, weights, tg.FP8_GRAD)
    return losses, grad.float() * tg.FP8_GRAD


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize("fp8, kernel", [(True, False), (False, True), (True, True)])
def test_other_backends(interpreted, fp8, kernel):
    """Compares with plain torch in fp32; FP8 with products of what the 8 bits stand for."""
    g = torch.Generator().manual_seed(3)
    x = tg.norm(torch.randn(64, 32, generator=g))
    w = torch.randn(32, 64, generator=g) / 20
    targets = torch.randint(-1, 64, (64, 3), generator=g)
    candidates = torch.randperm(64, generator=g)[:32].sort().values.int()
    weights = torch.tensor([1.0, 0.5, 0.25])
    sets = [ALL, candidates]
    backend = tg.TORCH_BACKEND._replace(fp8=fp8)
    if kernel:
        backend = backend._replace(softcap_loss=interpreted.triton_softcap_loss)
    found = run_head(x, w, targets, weights, sets, 8, backend)
    plain = tg.TORCH_BACKEND
    bound = 1e-5
    if fp8:
        plain = plain._replace(softcap_loss=plain_fp8)
        x = tg.to_fp8(x, tg.FP8_X, torch.float8_e4m3fn).float() * tg.FP8_X
        w = tg.to_fp8(w, tg.FP8_W, torch.float8_e4m3fn).float() * tg.FP8_W
        bound = 1e-2  # a gradient near a tie is rounded either way
    for ours, want in zip(found, run_head(x, w, targets, weights, sets, 8, plain)):
        assert rel_err(ours, want) < bound


# ------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def sampled(everything):
    """Returns a config of eight steps; the first three stages have candidates, one of them two numbers."""
    counts = ((96,), (96, 64), (64,), (0,))
    stages = tuple(replace(stage, sampled_columns=n) for stage, n in zip(everything.stages, counts))
    return replace(everything, padded_vocab=480, stages=stages)


def test_ranks_share_the_candidates_of_micro_batches(sampled):
    """Checks each micro-batch's candidates, and its offset in its rank's position, on 1, 2, 4 and 8 ranks."""
    V = sampled.padded_vocab
    paths = tg.find_shards(sampled.data, "train")
    plans = [tg.plan_step(sampled, step) for step in range(5)]
    seen = {}
    for ranks, rank in [(n, rank) for n in (1, 2, 4, 8) for rank in range(n)]:
        loader = tg.TrainLoader(sampled, paths, rank, ranks)
        assert loader.position()[2:] == tuple(V * m // 8 for m in range(rank, 8, ranks))
        for plan in plans:
            offsets = loader.position()[2:]
            parts = loader.micro_batches(plan)
            after = loader.position()[2:]
            for i, part in enumerate(parts):
                count = plan.sampled_columns
                columns, offset = tg.choose_sampled_columns(part.targets.numpy(), count, V, offsets[i])
                found = part.sampled_columns.tolist(), after[i]
                assert found == (columns.tolist(), offset)
                assert seen.setdefault((plan.step, i * ranks + rank), found) == found
        assert loader.micro_batches(batch_plan(192, 30))[0].sampled_columns is None
        assert loader.position()[2:] == after
    assert len({after for _, after in seen.values()}) > 20


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_world_size_does_not_matter(workers, sampled, world_size):
    """Gives the same run up to rounding, as test_distributed.py's test of this name."""
    want = one_rank(sampled)
    results = workers(world_size, train, sampled)
    run = same_on_all_ranks(results)
    run["losses"] = np.mean([r["losses"] for r in results], axis=0)
    run["table"] = join([r["table"] for r in results])
    assert_close(run, want, 1000 * torch.finfo(torch.float64).eps)
    assert want["losses"][0] < math.log(100) < want["losses"][-1]  # of 96 columns, and of 480


RUN = ("padded_vocab=1024", "stages.*.sampled_columns=40", "stages.3.sampled_columns=24,0")


@pytest.mark.slow
def test_a_sampled_run_resumes(launch, uninterrupted, stopped):
    """Checks two ranks, whose offsets differ."""
    folder = stopped(2, 4, *RUN)
    saved = [tg.read_saved(path, "") for path in folder.glob("records/**/rank?.pt")]
    a, b = (each["position"] for each in saved)
    assert a[:2] == b[:2] and a[2] != b[2]
    with launch(folder, "--resume", log_of(folder), "--save", "model.pt", change=RUN, world_size=2) as run:
        assert run.wait() == [0, 0], run.err
    assert_same_end(folder, uninterrupted(2, *RUN))


@pytest.mark.slow
def test_too_few_candidates_end_a_run(launch, tmp_path):
    """Every rank fails; those that see the reason say it in one line."""
    with launch(tmp_path / "run", change=("stages.1.sampled_columns=3",), world_size=2) as run:
        assert all(run.wait())
    said = re.findall(r"^train_gpt.py: error.*", run.err, re.MULTILINE)
    start = r"train_gpt.py: error on rank \d: [789] distinct targets, 3 columns: raise"
    assert said and all(re.match(start, line) for line in said), run.err


# ----------------------------------------------------------------------------------------------- the schedule


def test_schedule():
    """Checks equal parts of a stage, and that the warm-up rehearses each change."""
    last = BASE.stage_starts[3]  # 16 steps follow
    parts = tg.override(BASE, "stages.3.sampled_columns=40,30,20,10")
    counts = [tg.plan_step(parts, step).sampled_columns for step in range(last - 1, last + 16)]
    assert counts == [0] + [40] * 4 + [30] * 4 + [20] * 4 + [10] * 4
    prefixes = tg.override(BASE, "stages.3.prefix=.1,.1,0,.1")
    slow = tg.override(BASE, "late_updates_from=40")
    at = last, last + 4, last + 8, last + 12
    counts = [tg.plan_step(tg.RECORD, step).sampled_columns for step in range(tg.RECORD.steps)]
    changes = [step for step in range(1, len(counts)) if counts[step] != counts[step - 1]]
    cases = (tg.RECORD, changes), (parts, at), (prefixes, at[:3:2]), (slow, (40,))
    for cfg, steps in cases:
        rehearsed = {step for steps in tg.warmup_steps(cfg) for step in steps}
        assert all({step - 1, step, step + 1} <= rehearsed for step in steps)
