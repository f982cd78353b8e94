"""Tests that steps of one kind do the same operations on the same memory, as a replayed CUDA graph would.

Recorded is what a graph would hold: a micro-batch's forward, head and backward. Copies of inputs, rows of
tables, exchanges and updates are outside.
"""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import prefetch_exchange
from test_distributed import build, digest, few_layers, run_steps  # noqa: F401 (a fixture)

NGRAMS = tg.Ngrams(orders=(2, 3), rows_per_order=200, width=12, dtype="float32")


class Recording(TorchDispatchMode):
    """Lists operations, with numbers, and shapes and places of tensors.

    The place of a tensor that was there before is its address; of others, the operation that made it.
    """

    def __init__(self):
        super().__init__()
        self.operations = []
        self.makers = {}
        self.kept = []

    def describe(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dtype == torch.bool and not x.dim():
            return x.item()  # DenseParam.written, which only the host reads
        address = x.untyped_storage().data_ptr()
        place = self.makers.get(address, f"at {address}")
        return x.dtype, x.shape, x.stride(), x.storage_offset(), place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = set()
        described = [str(function)]
        for x in tree_leaves((args, kwargs)):
            described.append(self.describe(x))
            if isinstance(x, torch.Tensor):
                known.add(x.untyped_storage().data_ptr())
        self.operations.append(described)
        result = function(*args, **kwargs)
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                storage = t.untyped_storage()
                self.kept.append(storage)  # no later tensor gets its address
                self.makers.setdefault(storage.data_ptr(), len(self.operations))
        return result


@contextmanager
def recorded(model, optimizer):
    """Yields what micro-batches do, their losses' weights and operations, by what a graph would be for."""
    train_step = tg.train_step
    look_up = model.look_up
    add_rows = optimizer.add_rows
    found = defaultdict(list)
    plan = None
    micro_batches = 0  # of this step, that have ended
    weights = None
    recording = None

    def begin(micro_batch, training):
        nonlocal weights, recording
        if training:
            weights = micro_batch.loss_weights.tolist()
            recording = Recording()
            recording.__enter__()
        return look_up(micro_batch, training)

    def end(*args):
        nonlocal micro_batches
        recording.__exit__(None, None, None)
        key = plan.stage, plan.sampled_columns, len(weights), micro_batches > 0, plan.step % 2
        found[key].append((weights, recording.operations))
        micro_batches += 1
        add_rows(*args)

    def step(model, optimizer, batch, *args):
        nonlocal plan, micro_batches
        plan = batch.plan
        micro_batches = 0
        return train_step(model, optimizer, batch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "look_up", begin)
        patch.setattr(optimizer, "add_rows", end)
        patch.setattr(tg, "train_step", step)
        yield found


@pytest.fixture(scope="module")
def cfg(few_layers):  # noqa: F811
    """Returns a config with four or more steps of each number of candidates and of losses."""
    first, second, third, last = few_layers.stages
    stages = (
        replace(first, steps=8, prefix=(0.25, 0.0)),
        replace(second, steps=4, prefix=(0.25,)),
        replace(third, steps=4),
        replace(last, steps=6),
    )
    cfg = replace(few_layers, stages=stages, head_chunk=16, late_updates_from=10)
    return replace(cfg, dtype="float32", bank_dtype="float32")


def first_difference(a, b):
    for i, (ours, theirs) in enumerate(zip(a, b)):
        if ours != theirs:
            return i, ours, theirs
    return len(a), len(b)


# The MLPs' weights in FP8 and their scales are new tensors in every step.
FP8_FAILS = pytest.mark.xfail(strict=True, raises=AssertionError)
VARIANTS = {"bigrams": {}, "ngrams": {"ngrams": NGRAMS}, "fp8": {"fp8": True}}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bigrams", "ngrams", pytest.param("fp8", marks=FP8_FAILS)])
def test_steps_of_one_kind_do_the_same_at_the_same_addresses(cfg, variant):
    """Compares the steps of a warm-up and a run, with validations in between.

    The first of a kind, which no graph replays, may make tensors that the others find: device_scalar's.
    """
    cfg = replace(cfg, **VARIANTS[variant])
    exchange, model, optimizer = build(0, 1, cfg, backend=tg.TORCH_BACKEND._replace(fp8=cfg.fp8))
    data = tg.open_dataset(cfg)
    val = tg.ValLoader(cfg, data.val)
    with recorded(model, optimizer) as found:
        tg.warm_up(tg.Training(data, model, optimizer, val, prefetch_exchange(0, 1)))
        for batch, _ in run_steps(model, optimizer):
            if batch.plan.step % 3 == 0:
                tg.validate(model, val, exchange, batch.plan.windows)
    assert len(found) == 20
    ramps = 0
    for key, micro_batches in found.items():
        assert len(micro_batches) >= 4, key
        second_weights, second = micro_batches[1]
        assert len(second) > 500
        for _, operations in micro_batches[2:]:
            assert operations == second, (key, first_difference(second, operations))
        if any(weights != second_weights for weights, _ in micro_batches):
            ramps += 1
    assert ramps >= 8


def test_what_comes_between_steps_changes_no_bit(cfg):
    """Validates with other stages' rotary tables between steps, where a step's inputs stay in place."""
    cfg = replace(cfg, ngrams=NGRAMS)
    results = []
    for between in (False, True):
        exchange, model, optimizer = build(0, 1, cfg)
        val = tg.ValLoader(cfg, tg.open_dataset(cfg).val)
        losses = []
        for batch, loss in run_steps(model, optimizer):
            losses.append(loss.item())
            if between:
                model.use_stage((batch.plan.stage + batch.plan.step) % len(cfg.stages))
                tg.validate(model, val, exchange, batch.plan.windows)
        results.append((losses, digest(model, optimizer)))
    assert len(losses) == cfg.steps and results[0] == results[1]
