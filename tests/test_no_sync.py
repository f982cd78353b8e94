"""Tests that no training step waits for the GPU, by running all steps on torch's "meta" device.

Its tensors have no values, so reading one (item, tolist, nonzero, a tensor as a condition, a copy) fails. So
do operations that mix host and device, as on a GPU, and FlashAttention and FP8 matmuls on wrong layouts.
Data reaches the device through MicroBatch.to, from page-locked memory if there is a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

import gpu_code
import train_gpt as tg
from test_distributed import cfg as every_layer  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def cfg(every_layer):  # noqa: F811
    """Returns a config with a layer of each kind and two micro-batches: "meta" is slow."""
    layers = (
        tg.Layer("paired", narrow_qk=True, value=0, x0=True, bigram=True),
        tg.Layer("plain", "long", key_shift=True, xsa=True, gate=True),
        tg.Layer(None, bigram=True, mlps=2),
        tg.Layer("plain", narrow_v=True, value=1, gate=True, connections=True),
    )
    stages = tuple(replace(stage, prefix=(0.25,)) for stage in every_layer.stages[:2])
    stages += every_layer.stages[2:]
    return replace(
        every_layer,
        layers=layers,
        skip_from=0,
        back_from=1,
        skip_to=2,
        microbatches=2,
        val_slices=1,
        stages=stages,
    )


def prefetch(cfg):
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1)
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    return tg.Prefetcher(loader, plans, tg.Exchange(0, 1))


def segment_sum_rows(out, grad, index, signs):
    """Does nothing: "meta" has no segment_reduce."""
    tensors = [t for t in (out, grad, signs, *index) if t is not None]
    assert {t.device.type for t in tensors} == {"meta"} and len(index.perm) % len(grad) == 0


def fail_on_device(make, *args, **options):
    """Raises if a tensor is made of Python numbers on the GPU: the host would wait for their copy."""
    made = make(*args, **options)
    if made.device.type == "meta":
        raise RuntimeError("numbers are copied to the GPU")
    return made


def train_on_meta(cfg, monkeypatch, **backend):
    """Runs all steps, with everything that a GPU would hold on "meta"."""
    monkeypatch.setattr(torch, "_scaled_mm", gpu_code.scaled_mm)
    monkeypatch.setattr(tg.GPT, "initialize", lambda self, seed: None)
    backend = tg.TORCH_BACKEND._replace(segment_sum_rows=segment_sum_rows, **backend)
    model = tg.GPT(cfg, 1, "meta", 0, backend)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(0, 1), backend)
    batches = prefetch(cfg)
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, partial(fail_on_device, getattr(torch, name)))
    try:
        for _ in range(cfg.steps):
            loss = tg.train_step(model, optimizer, batches.next(), batches.peek)
            assert loss.device.type == "meta" and loss.shape == ()
    finally:
        batches.loader.close()
    optimizer.apply_endings()
    devices = set()
    tg.map_tensors(lambda t: devices.add(t.device.type), optimizer.state_dict())
    assert not optimizer.is_tied and devices == {"meta"}


NGRAMS = tg.Ngrams(orders=(2, 3), rows=200, width=12)
VARIANTS = {
    "in place": {},
    "delayed": dict(delay_head_grad=True),
    "autograd": dict(main_grad=False),
    "n-grams": dict(ngrams=NGRAMS),
    "n-grams, autograd": dict(ngrams=NGRAMS, main_grad=False),
    "endings": dict(endings=tg.ENDINGS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, fp8",
    [(variant, variant != "delayed") for variant in VARIANTS],
)
def test_no_step_waits_for_the_gpu(cfg, monkeypatch, variant, fp8):
    """Runs every stage, with and without Adam, tied and untied; rows of n-grams are fetched ahead."""
    cfg = replace(cfg, dtype="bfloat16", bank_dtype="bfloat16", head_chunk=16, **VARIANTS[variant])
    train_on_meta(cfg, monkeypatch, fp8=fp8, attention=tg.flash_attention)


def read_loss(head):
    def mutant(*args):
        loss, roots = head(*args)
        loss.item()
        return loss, roots

    return mutant


def check_gradient(take):
    def mutant(*args):
        grad = take(*args)
        return grad if grad.isfinite().all() else 0

    return mutant


def send_schedule(anvil_update):
    return lambda p, mantissa, x, slow_rail, lr_mul, *args: anvil_update(
        p, mantissa, x, slow_rail, lr_mul * torch.tensor([1.0]), *args
    )


def make_number(head):
    def mutant(model, x, *args):
        torch.tensor(1.0, device=x.device)
        return head(model, x, *args)

    return mutant


def select_by_mask(adam_update):
    def mutant(p, *args):
        p[p > 0]
        return adam_update(p, *args)

    return mutant


def read_rows(send_grads):
    def mutant(self):
        self.routes.owned.tolist()
        return send_grads(self)

    return mutant


MUTANTS = {
    "reads the loss": ("GPT.head_loss_and_grad", read_loss),
    "checks whether a gradient is finite": ("Gradient.take", check_gradient),
    "sends a learning rate as a tensor": ("anvil_update", send_schedule),
    "makes a number on the GPU": ("GPT.head_loss_and_grad", make_number),
    "selects by a mask": ("adam_update", select_by_mask),
    "reads which rows to update": ("NgramTable.send_grads", read_rows),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_step_that_waits_fails(cfg, monkeypatch, mutant):
    path, mutate = MUTANTS[mutant]
    *owner, name = path.split(".")
    owner = getattr(tg, owner[0]) if owner else tg
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))
    with pytest.raises(RuntimeError):
        train_on_meta(replace(cfg, ngrams=NGRAMS), monkeypatch)
