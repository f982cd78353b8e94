"""Tests that no training step waits for the GPU, by running all steps on torch's "meta" device.

Its tensors have no values, so reading one (item, tolist, nonzero, a tensor as a condition, a copy) fails. So
do operations that mix host and device, as on a GPU, and FlashAttention and FP8 matmuls on wrong layouts.
Data reaches the device through move(), from page-locked memory if there is a GPU.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import gpu_code
import train_gpt as tg
from launch import wrap
from test_distributed import batches_of, few_layers  # noqa: F401 (a fixture)


def segment_sum_rows(out, grad, index, signs=None):
    """Does nothing: "meta" has no segment_reduce."""
    for t in (out, grad, signs) + index:
        assert t is None or t.device.type == "meta"


def fail_on_device(make, numbers, **options):
    """Raises if a tensor is made of Python numbers on the GPU: the host would wait for their copy."""
    made = make(numbers, **options)
    if made.device.type == "meta":
        raise RuntimeError("numbers are copied to the GPU")
    return made


def train_on_meta(cfg, monkeypatch, backend=tg.TORCH_BACKEND):
    """Runs all steps, with everything that a GPU would hold on "meta"."""
    monkeypatch.setattr(torch, "_scaled_mm", gpu_code.scaled_mm)
    monkeypatch.setattr(tg.GPT, "initialize", lambda self, seed: None)
    comm = tg.Collectives(0, 1, device=torch.device("meta"))
    backend = backend._replace(segment_sum_rows=segment_sum_rows)
    model, optimizer = tg.build(cfg, backend, comm, 0)
    batches = batches_of(cfg, 0, 1)
    for name in "torch.tensor", "torch.as_tensor":
        wrap(name, fail_on_device, monkeypatch.setattr)
    try:
        for _ in range(cfg.steps):
            loss = tg.train_step(model, optimizer, batches.next(), batches.peek)
            assert loss.device.type == "meta"
    finally:
        batches.loader.close()
    optimizer.apply_averages()


VARIANTS = {
    "in place": {"averages": tg.AVERAGES},
    "ngrams": {"ngrams": tg.Ngrams(orders=(2, 3), rows_per_order=200, width=12)},
    "autograd": {"main_grad": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_step_waits_for_the_gpu(few_layers, monkeypatch, variant):  # noqa: F811
    """Runs every stage, with and without Adam, tied and untied; rows of n-grams are fetched ahead."""
    cfg = replace(few_layers, dtype="bfloat16", bank_dtype="bfloat16", head_chunk=16)
    cfg = replace(cfg, **VARIANTS[variant])
    backend = tg.TORCH_BACKEND._replace(fp8=variant != "ngrams", attention=tg.flash_attention)
    train_on_meta(cfg, monkeypatch, backend)


MUTANTS = {
    "reads": lambda loss: loss.item(),
    "makes a number": lambda loss: torch.tensor(1.0, device=loss.device),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_step_that_waits_fails(few_layers, monkeypatch, mutant):  # noqa: F811
    def waiting(head, *args, **options):
        loss, dx = head(*args, **options)
        mutant(loss)
        return loss, dx

    wrap("GPT.head_loss_and_grad", waiting, monkeypatch.setattr)
    with pytest.raises(RuntimeError):
        train_on_meta(few_layers, monkeypatch)


def test_a_loss_counts_when_it_has_arrived():
    losses = tg.AsyncLoss()
    arrived = []
    losses.queue = [(1, torch.tensor(5.0), SimpleNamespace(query=lambda: arrived))]
    losses.poll()
    assert losses.latest == (0, None)
    arrived.append(True)
    losses.poll()
    assert losses.latest == (1, 5.0)
