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
        self.operations, self.makers, self.kept = [], {}, []

    def describe(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dtype == torch.bool and not x.dim():
            return x.item()  # DenseParam.written, which only the host reads
        address = x.untyped_storage().data_ptr()
        place = self.makers.get(address, f"at {address}")
        return x.dtype, x.shape, x.stride(), x.storage_offset(), place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs or {}))
        self.operations.append((str(function), *map(self.describe, given)))
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage()).data_ptr() not in known:
                self.kept.append(storage)  # no later tensor gets its address
                self.makers.setdefault(storage.data_ptr(), len(self.operations))
        return result


@contextmanager
def recorded(model, optimizer):
    """Yields what micro-batches do, their losses' weights and operations, by what a graph would be for."""
    found, train_step, at = defaultdict(list), tg.train_step, {}
    look_up, add_rows = model.look_up, optimizer.add_rows

    def begin(micro_batch, training):
        if training:
            at["weights"], at["recording"] = micro_batch.loss_weights.tolist(), Recording()
            at["recording"].__enter__()
        return look_up(micro_batch, training)

    def end(*args):
        at["recording"].__exit__(None, None, None)
        plan, weights = at["plan"], at["weights"]
        key = plan.stage, plan.sampled_columns, len(weights), at["later"], plan.step % 2
        found[key].append((weights, at["recording"].operations))
        at["later"] = True
        add_rows(*args)

    def step(model, optimizer, batch, *args):
        at.update(plan=batch.plan, later=False)
        return train_step(model, optimizer, batch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "look_up", begin)
        patch.setattr(optimizer, "add_rows", end)
        patch.setattr(tg, "train_step", step)
        yield found


@pytest.fixture(scope="module")
def cfg(few_layers):  # noqa: F811
    """Returns a config with four or more steps of each number of candidates and of losses."""
    parts = zip(few_layers.stages, (8, 4, 4, 6), ((0.25, 0.0), (0.25,), (), ()))
    stages = tuple(replace(stage, steps=steps, prefix=prefix) for stage, steps, prefix in parts)
    cfg = replace(few_layers, stages=stages, head_chunk=16, late_updates_from=10)
    return replace(cfg, dtype="float32", bank_dtype="float32")


def first_difference(a, b):
    pairs = [(i, *pair) for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]]
    return pairs[:1] or (len(a), len(b))


VARIANTS = {"bigrams": {}, "ngrams": dict(ngrams=NGRAMS), "fp8": dict(fp8=True)}
# The MLPs' weights in FP8 and their scales are new tensors in every step.
MARKS = {"fp8": pytest.mark.xfail(strict=True, raises=AssertionError)}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param(name, marks=MARKS.get(name, ())) for name in VARIANTS])
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
    assert len(found) == 20 and min(map(len, found.values())) >= 4, {k: len(v) for k, v in found.items()}
    ramps = [key for key, steps in found.items() if len({tuple(weights) for weights, _ in steps}) > 1]
    assert len(ramps) >= 8
    for key, (_, (_, second), *others) in found.items():
        assert len(second) > 500
        for _, operations in others:
            assert operations == second, (key, first_difference(second, operations))


def test_what_comes_between_steps_changes_no_bit(cfg):
    """Validates with other stages' rotary tables between steps, where a step's inputs stay in place."""
    cfg, results = replace(cfg, ngrams=NGRAMS), []
    for between in (False, True):
        exchange, model, optimizer = build(0, 1, cfg)
        val, losses = tg.ValLoader(cfg, tg.open_dataset(cfg).val), []
        for batch, loss in run_steps(model, optimizer):
            losses.append(loss.item())
            if between:
                model.use_stage((batch.plan.stage + batch.plan.step) % len(cfg.stages))
                tg.validate(model, val, exchange, batch.plan.windows)
        results.append((losses, digest(model, optimizer)))
    assert len(losses) == cfg.steps and results[0] == results[1]
