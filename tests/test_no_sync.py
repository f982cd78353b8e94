"""No step waits for the GPU: the whole of it on torch's "meta" device, whose tensors have shapes and no values.

What would bring a number from the GPU to the host (item, tolist, nonzero, a tensor as a condition, a copy) cannot be done there,
and operations that mix host and device are errors, as they are on a GPU; the layouts that FlashAttention and FP8 products
demand are checked besides. What comes from the host comes by MicroBatch.to, from page-locked memory if there is a GPU.
"""
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import train_gpt as tg
from test_distributed import batches_of, cfg as every_layer  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def cfg(every_layer):  # noqa: F811
    """A layer of each kind, two micro-batches: "meta" is slow."""
    layers = (tg.Layer("paired", value=0, saves="skip"), tg.Layer("plain", "long", saves="back"), tg.Layer(None, adds="skip"),
              tg.Layer("plain", value=1, reads="back"))
    return replace(every_layer, layers=layers, slices=2, val_slices=1)


class Event:
    """Of CUDA, without it."""

    def record(self):
        pass

    def synchronize(self):
        pass


def sum_rows(out, grad, index):
    """Meta has no segment sums."""
    assert {t.device.type for t in (out, grad, *index)} == {"meta"} and len(grad) == len(index.order)


def from_the_host(make, *args, **options):
    """A tensor of numbers: for a GPU the host would wait until they are there."""
    made = make(*args, **options)
    if made.device.type == "meta":
        raise RuntimeError("numbers are copied to the GPU")
    return made


def run(cfg, monkeypatch, **ops):
    """All steps of a run in which everything that is on a GPU lies on "meta"; the copies that it made to there."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tg.GPT, "initialize", lambda self, seed: None)
    ops = tg.PLAIN._replace(sum_rows=sum_rows, **ops)
    model = tg.GPT(cfg, 1, "meta", 0, ops)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(0, 1), ops)
    batches = batches_of(cfg, 0, 1)
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, partial(from_the_host, getattr(torch, name)))
    try:
        for _ in range(cfg.steps):
            loss = tg.train_step(model, optimizer, batches.next())
            assert loss.device.type == "meta" and loss.shape == ()
    finally:
        batches.close()
    optimizer.finish()
    assert not optimizer.is_tied and {t.device.type for t in optimizer.tensors.values()} == {"meta"}
    return model, optimizer


FORMS = {"in place": {}, "delayed": dict(delay_head_grad=True), "autograd": dict(main_grad=False)}


@pytest.mark.slow
@pytest.mark.parametrize("form, fp8", [("in place", True), ("delayed", False), ("autograd", True)])
def test_no_step_waits_for_the_gpu(cfg, monkeypatch, form, fp8):
    """In every stage, with and without Adam, tied and not."""
    cfg = replace(cfg, dtype="bfloat16", polar_dtype="bfloat16", head_chunk=16, **FORMS[form])
    run(cfg, monkeypatch, fp8=fp8, attention=tg.flash_attention)


CULPRITS = {
    "reads the loss": ("GPT.head", lambda head: lambda *args: (found := head(*args))[:1] + (found[0].item(), found[1])[1:]),
    "looks whether a gradient is finite": ("Optimizer.gradient", lambda f: lambda *args: f(*args) if f(*args).isfinite().all() else 0),
    "sends a schedule's number as a tensor": ("normuon_update", lambda f: lambda p, low, x, lr, *rest: f(
        p, low, x, lr * torch.tensor([1.0]), *rest)),
    "makes a number on the GPU": ("GPT.head", lambda head: lambda self, x, *rest: (
        torch.tensor(1.0, device=x.device), head(self, x, *rest))[1]),
    "selects by a mask": ("adam_arithmetic", lambda f: lambda p, g, *rest: (g[g > 0], f(p, g, *rest))[1]),
}


@pytest.mark.parametrize("culprit", CULPRITS)
def test_what_waits_is_found(cfg, monkeypatch, culprit):
    path, change = CULPRITS[culprit]
    *owner, name = path.split(".")
    place = getattr(tg, owner[0]) if owner else tg
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    with pytest.raises(RuntimeError):  # or a kind of it
        run(cfg, monkeypatch)


@pytest.mark.slow
def test_numbers_for_compiled_code_stay_on_the_host(cfg, monkeypatch):
    """As 0-d tensors, which a GPU's operations take as they take a Python number."""
    run(cfg, monkeypatch, number=lambda value: torch.tensor(value, dtype=tg.wide_dtype(cfg)))


class Copied:
    """An event behind a copy: as CUDA's it is over if it was never recorded."""

    def __init__(self):
        self.recorded = self.over = False

    def record(self):
        self.recorded = True

    def query(self):
        return self.over or not self.recorded

    def synchronize(self):
        self.over = True


def test_a_loss_is_read_when_it_has_arrived(cfg, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Copied()) or events[-1])
    watch = tg.LossWatch(cfg, torch.device("cpu"))
    watch.on_gpu = True
    seen = []
    for step in range(5):
        watch.push(step, torch.tensor(float(step)))
        if step == 2:
            events[0].over = events[1].over = True
            watch.poll()
        seen.append((watch.latest, watch.latest_step))
    assert seen == [(None, None)] * 2 + [(1.0, 1)] * 3
    watch.poll(wait=True)
    assert watch.latest == 4.0 and all(event.over for event in events) and not watch.queue
    for bad in (math.inf, -math.inf, math.nan):
        watch.push(5, torch.tensor(bad))
        with pytest.raises(tg.UserError, match=f"the training loss is {bad} at step 5"):
            watch.poll(wait=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_step_waits_on_a_gpu(cfg):
    """With every form of the record preset; torch says where it would have to wait."""
    cfg = replace(cfg, heads=2, head_dim=32, dtype="bfloat16", polar_dtype="bfloat16", head_chunk=16, mlp_dim=128,
                  kernels=tg.RECORD.kernels, attention="varlen", compile=True,
                  fp8=torch.cuda.get_device_capability() >= (8, 9))
    device = torch.device("cuda", 0)
    ops = tg.choose_ops(cfg, device)
    model = tg.GPT(cfg, 1, device, 0, ops)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(0, 1), ops)
    for mode in ("default", "error"):  # the first time round things are compiled and allocated
        loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1, True)
        batches = tg.Batches(loader, [tg.plan(cfg, step) for step in range(cfg.steps)])
        for _ in range(cfg.steps):
            batch = batches.next()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                tg.train_step(model, optimizer, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        batches.close()
