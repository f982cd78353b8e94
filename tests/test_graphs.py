"""Tests of CUDA graphs, for which a CPU has a stand-in: operations that are recorded, and replayed.

A replay does the recorded operations again on the same memory, and runs no Python of the script. So what it
computes depends on nothing that Python decides between two replays. What a stand-in cannot show is whether a
GPU can capture these operations, and how its streams and allocator behave.
"""

import contextlib
import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import prefetch_exchange, training_of
from launch import wrap
from test_distributed import build, digest, few_layers, run_steps  # noqa: F401 (a fixture)

NGRAMS = tg.Ngrams(orders=(2, 3), rows_per_order=200, width=12, dtype="float32")
VARIANTS = {
    "bigrams": {},
    "ngrams, no pointer": {"ngrams": NGRAMS, "pointer_dim": 0},
    "fp8": {"fp8": True},
    "one micro-batch": {"microbatches": 1},
}

SAVED_AFTER = 12  # steps: then no gradient awaits its update


class Recorder(TorchDispatchMode):
    """Lists operations, with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, results))
        return results


class StandInGraph:
    """Takes the place of torch.cuda.CUDAGraph."""

    count = 0

    def __init__(self):
        self.operations = []
        self.recorded_now = True
        StandInGraph.count += 1

    @torch.no_grad()
    def replay(self):
        if self.recorded_now:  # recording has done the work already, which a capture does not
            self.recorded_now = False
            return
        for function, args, kwargs, results in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def record(graph, pool, capture_error_mode):
    """Takes the place of torch.cuda.graph."""
    assert pool == "pool" and capture_error_mode == "thread_local"
    with Recorder() as recorder:
        yield
    graph.operations = recorder.operations


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(StandInGraph, "count", 0)


@pytest.fixture(scope="module")
def cfg(few_layers):  # noqa: F811
    """Returns a config with four or more steps of each number of sampled columns and of losses."""
    changes = """
    stages.0.steps=8 stages.1.steps=4 stages.2.steps=4 stages.3.steps=6
    stages.0.prefix=0.25,0 stages.1.prefix=0.25
    head_chunk=16 late_updates_from=10 dtype=float32 bank_dtype=float32
    """
    return tg.with_settings(few_layers, changes.split())


def train(cfg, saved=None):
    """Trains after a warm-up, or goes on from a checkpoint. Returns losses, parameters, and a checkpoint.

    The graphs' run validates between steps, with other stages' rotary tables; a step's inputs stay in place.
    """
    _, model, optimizer = build(0, 1, cfg, backend=tg.TORCH_BACKEND._replace(fp8=cfg.fp8))
    training = training_of(model, optimizer, prefetch_exchange(0, 1))
    tg.warm_up(training)
    warmed_up = StandInGraph.count
    first, position = 0, (0, 0)
    if saved:
        tg.restore(saved, model, optimizer)
        first, position = saved["step"], saved["position"]
    losses = []
    checkpoint = None
    for batch, loss in run_steps(model, optimizer, first, position):
        step = batch.plan.step
        losses.append(loss.item())
        if step + 1 == SAVED_AFTER:
            optimizer.wait()
            checkpoint = tg.training_state(model, optimizer)
            checkpoint |= {"step": step + 1, "position": batch.position}
            if optimizer.ngrams:
                checkpoint["ngrams"] = copy.deepcopy(optimizer.ngrams.state_dict())
        elif cfg.cuda_graphs:
            model.use_rotary((batch.plan.stage + step) % len(cfg.stages))
            tg.validate(model, training.val, optimizer.comm, batch.plan.windows)
    if cfg.cuda_graphs:
        assert StandInGraph.count == warmed_up, "a graph was captured on the clock"
        for captured in model.graphs.captured.values():
            assert captured is not None, "a call of the warm-up never came again"
            graph, _ = captured
            assert len(graph.operations) > 500
    return losses, digest(model, optimizer), checkpoint


train_once = functools.cache(train)  # without graphs


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_change_no_bit(cfg, variant, stand_ins):
    cfg = replace(cfg, **VARIANTS[variant])
    losses, parameters, _ = train_once(cfg)
    assert StandInGraph.count == 0
    by_graphs = train(replace(cfg, cuda_graphs=True))
    assert StandInGraph.count >= 8
    assert by_graphs[:2] == (losses, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ngrams, no pointer", "fp8"])
def test_a_resumed_run_replays_its_own_graphs(cfg, variant, stand_ins):
    cfg = replace(cfg, **VARIANTS[variant])
    losses, parameters, checkpoint = train_once(cfg)
    resumed = train(replace(cfg, cuda_graphs=True), checkpoint)
    assert resumed[:2] == (losses[SAVED_AFTER:], parameters)


def forget_to_accumulate(patch):
    patch.setattr(tg.Optimizer, "accumulate_flags", lambda self: ())


def add_a_number_of_the_host(patch):
    """Multiplies each micro-batch's gradient by another number, which a replay does not see."""
    calls = itertools.count(1)

    def head_times_number(head, *args, **kwargs):
        loss, dx = head(*args, **kwargs)
        return loss, dx * (1 + next(calls) / 1000)

    wrap("GPT.head_loss_and_grad", head_times_number, patch.setattr)


def make_inputs_anew(patch):
    def with_new_tensors(initialize, self, seed):
        initialize(self, seed)
        self.micro_batch_buffer = torch.empty

    wrap("GPT.initialize", with_new_tensors, patch.setattr)


def make_signs_anew(patch):
    def with_new_signs(train_step, model, *args):
        model.signs = -model.signs
        return train_step(model, *args)

    wrap("train_step", with_new_signs, patch.setattr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate", [forget_to_accumulate, add_a_number_of_the_host, make_inputs_anew, make_signs_anew]
)
def test_what_a_graph_cannot_see_is_found(cfg, mutate, stand_ins):
    """Checks that the tests above can fail: runs differ, or graphs are captured on the clock or never."""
    cfg = replace(cfg, stages=cfg.stages[2:], late_updates_from=2)

    def mutated_train(cfg):
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            return train(cfg)[:2]

    plain = mutated_train(cfg)
    with pytest.raises(AssertionError):
        assert mutated_train(replace(cfg, cuda_graphs=True)) == plain
