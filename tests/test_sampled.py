"""Tests the sampled softmax: candidates, loss and gradients against golden numbers and plain programs; runs.

tests/golden/README.md defines the inputs of the golden numbers.
"""

# ruff: noqa: F811 (fixtures are imported)

import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE
from golden_inputs import GOLDEN92, batch_plan, distance, fill, golden_prefixes, head_model, head_of
from test_distributed import assert_close, everything, merge, one_rank, train  # noqa: F401
from test_main_grad import TensorRecorder
from test_resume import assert_same_end, corpus, launch, log_of, stopped, uninterrupted  # noqa: F401

SETS = GOLDEN92["b_sampled"]["candidates"]
LOSS = GOLDEN92["b_sampled"]["loss"]


# ------------------------------------------------------------------------------------------------- candidates


@pytest.mark.pinned("the choice of sampled columns")
def test_golden_candidates():
    """Checks successive micro-batches of a rank."""
    offset = 512 * 5 // 8
    for case in SETS["tiny"]:
        targets = np.array(case["targets"])
        assert offset == case["offset_before"]
        chosen, offset = tg.choose_sampled_columns(targets, case["P"], 512, offset)
        assert (chosen.tolist(), offset) == (case["candidates"], case["offset_after"])
        places = tg.index_in(torch.from_numpy(targets), chosen)
        assert places.tolist() == case["target_positions"]
        assert tg.index_in(golden_prefixes()[targets], chosen).tolist() == case["prefix_positions"]


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


# --------------------------------------------------------------------------------------------------- the head


def run_head(inputs, sets):
    """Runs the head on a micro-batch, once for each of the `sets` of candidates.

    Returns the last loss and gradient of x, and lm_head's gradient, the sum of all.
    """
    x, w, targets, weights = inputs
    model = head_model(w, 2)
    head = head_of(w)
    head.main_grad.fill_(math.nan)  # to be overwritten
    for candidates in sets:
        loss, dx = tg.GPT.head_loss_and_grad(model, x, targets, weights, head, candidates)
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
    case, inputs = golden_loss(name)
    x, w, targets, weights = inputs
    places = tg.index_in(targets, CANDIDATES)
    assert places[:, [0, -1]].T.tolist() == [LOSS["target_positions"], LOSS["prefix_positions"]]
    losses, _ = tg.softcap_loss(x @ w[:, CANDIDATES], places, weights)
    assert losses.tolist() == pytest.approx(case["loss"], rel=1e-12)
    loss, dx, dw = run_head(inputs, [CANDIDATES])
    assert loss.item() == pytest.approx(case["sum"], rel=1e-12)
    assert dx.flatten().tolist() == pytest.approx(case["dx"], abs=1e-11 * dx.abs().max().item())
    assert distance(dw, case["dlm_head"]) < 1e-11
    assert dw.any(0).nonzero()[:, 0].tolist() == LOSS["candidates"]


@pytest.mark.numeric
def test_all_columns_as_candidates_change_no_bit():
    """Checks two micro-batches of several chunks; and that gradients of different candidates add up."""
    _, inputs = golden_loss("mtp3_prefix")
    loss, dx, dw = run_head(inputs, [None, None])
    _, _, part = run_head(inputs, [CANDIDATES])
    cases = ([ALL, ALL], dw), ([CANDIDATES, ALL], part + dw / 2), ([ALL, CANDIDATES], part + dw / 2)
    for sets, want in cases:
        last_loss, last_dx, grad = run_head(inputs, sets)
        assert (grad - want).abs().max() < 1e-12 * dw.abs().max()
        if sets[1] is ALL:
            assert torch.equal(last_loss, loss) and torch.equal(last_dx, dx)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_head_makes_nothing_of_the_vocabularys_size(fp8):
    """Checks the second micro-batch: the first one sets all columns of the gradient to 0."""
    x = torch.randn(32, 16)
    w = torch.randn(16, 4096)
    targets = torch.arange(32)[:, None]
    candidates = torch.arange(0, 4096, 64, dtype=torch.int32)
    head = head_of(w)
    model = head_model(w, 1, tg.TORCH_BACKEND._replace(fp8=fp8))
    inputs = model, x, targets, torch.ones(1), head, candidates
    tg.GPT.head_loss_and_grad(*inputs)
    with TensorRecorder() as recorder:
        tg.GPT.head_loss_and_grad(*inputs)
    assert (16, 64) in recorder.shapes
    assert all(math.prod(shape) < w.numel() for shape in recorder.shapes)
    assert head.main_grad.any(0).sum() == 64


# ------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def sampled(everything):
    """Returns a config of eight steps with a copy pointer; the first three stages have candidates."""
    changes = """
    padded_vocab=480 pointer_dim=8
    stages.0.sampled_columns=96 stages.1.sampled_columns=96,64 stages.2.sampled_columns=64
    """
    return tg.with_settings(everything, changes.split())


def test_ranks_share_the_candidates_of_micro_batches(sampled):
    """Checks each micro-batch's candidates, and its offset in its rank's position, on 1, 2, 4 and 8 ranks.

    The column of the pointer's gate is always one of them.
    """
    V = sampled.padded_vocab
    paths = tg.find_shards(sampled.data, "train")
    seen = {}
    for ranks, rank in [(n, rank) for n in (1, 2, 4, 8) for rank in range(n)]:
        loader = tg.TrainLoader(sampled, paths, rank, ranks)
        offsets = loader.position()[2:]
        assert offsets == tuple(V * m // 8 for m in range(rank, 8, ranks))
        for step in range(5):
            count = tg.plan_step(sampled, step).sampled_columns
            parts = loader.micro_batches(tg.plan_step(sampled, step))
            after = loader.position()[2:]
            for i, part in enumerate(parts):
                needed = np.append(part.targets.numpy(), sampled.vocab_size)
                columns, offset = tg.choose_sampled_columns(needed, count, V, offsets[i])
                found = part.sampled_columns.tolist(), after[i]
                assert found == (columns.tolist(), offset)
                assert seen.setdefault((step, i * ranks + rank), found) == found
            offsets = after
        assert loader.micro_batches(batch_plan(192, 30))[0].sampled_columns is None
        assert loader.position()[2:] == after
    assert len({after for _, after in seen.values()}) > 20


@pytest.mark.slow
def test_world_size_does_not_matter(workers, sampled):
    """Gives the same run up to rounding, as test_distributed.py's test of this name."""
    want = one_rank(sampled)
    assert_close(merge(workers(4, train, sampled)), want, 1000 * torch.finfo(torch.float64).eps)
    assert want["losses"][0] < math.log(100) < want["losses"][-1]  # of 96 columns, and of 480


RUN = ("padded_vocab=1024", "stages.*.sampled_columns=40", "stages.3.sampled_columns=24,0")


@pytest.mark.slow
def test_a_sampled_run_resumes(launch, uninterrupted, stopped):
    """Checks two ranks, whose offsets differ."""
    folder = stopped(2, 4, RUN)
    saved = [tg.read_saved(path, "") for path in folder.glob("records/**/rank?.pt")]
    a, b = (each["position"] for each in saved)
    assert a[:2] == b[:2] and a[2] != b[2]
    launch(folder, f"--resume {log_of(folder)} --save model.pt", RUN, world_size=2).succeed()
    assert_same_end(folder, uninterrupted(2, RUN))


@pytest.mark.slow
def test_too_few_candidates_end_a_run(launch, tmp_path):
    """Every rank fails; those that see the reason say it in one line."""
    with launch(tmp_path / "run", "", ["stages.1.sampled_columns=3"], world_size=2) as run:
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
        rehearsed = {step for steps in tg.warmup_ranges(cfg) for step in steps}
        assert all({step - 1, step, step + 1} <= rehearsed for step in steps)


def kind_of(cfg, step):
    """Returns what a step's CUDA graph depends on. lm_head is updated after every second step."""
    plan = tg.plan_step(cfg, step)
    return plan.stage, plan.sampled_columns, len(plan.loss_weights), step % 2


def test_the_warm_up_captures_what_the_record_does():
    """Counts how often the warm-up does each kind of step of the record preset: the second time captures."""
    cfg = tg.RECORD
    counts = Counter()
    for steps in tg.warmup_ranges(cfg):
        counts.update(kind_of(cfg, step) for step in steps)
    for step in range(cfg.steps):
        assert counts[kind_of(cfg, step)] >= 2, step
