"""Compares runs of four steps with each technique's switch, alone and in seeded pairs, with the plain run.

They agree to the bit or within a stated bound. Triton's kernels run in its interpreter. test_compiled.py
tests compile alone.
"""

import multiprocessing
import pickle
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import train_gpt as tg
from interpreter import skip_without_interpreter
from test_distributed import batches_of, build, dense, with_dtype
from test_distributed import cfg as every_layer  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def cfg(every_layer):  # noqa: F811
    """Returns a config with a layer of each kind, in fp32, with widths and lengths of 16 for FP8.

    Every stage is one step, so that step 3 is the untied one's.
    """
    layers = (
        tg.Layer("paired", value=0, saves="skip"),
        tg.Layer("plain", "long", key_shift=True, saves="back"),
        tg.Layer(None, adds="skip"),
        tg.Layer("plain", value=1, reads="back"),
    )
    sizes = zip(every_layer.stages, (64, 128, 96, 96))
    stages = tuple(replace(stage, steps=1, batch_tokens=tokens) for stage, tokens in sizes)
    cfg = replace(dense(with_dtype(every_layer, "float32")), layers=layers, stages=stages, microbatches=2)
    return replace(cfg, attention="dense", head_chunk=16, main_grad=False, flat_adam=False)


@pytest.fixture(scope="module")
def run_interpreted():
    """Returns run(function, *args), which calls the function in a process with Triton's interpreter.

    Triton chooses its interpreter when it is imported.
    """
    skip_without_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,))
        pool.apply(len, ("",))  # it has started
    with pool:
        yield lambda function, *args: pickle.loads(pool.apply(pickled, (function, *args)))


def pickled(function, *args):
    """Returns the result as bytes: tensors would travel in shared memory."""
    return pickle.dumps(function(*args))


# Bounds on the relative difference of losses, and of each parameter's change over the run, by its norm.
# Rounding differently is 1e-7 of a gradient, which polar_express and Adam's first steps, close to signs, blow
# up. FP8's gradients have two bits of mantissa: what they do to one number is large, to the loss it is small.
ROUNDING, FP8, EQUAL = (1e-5, 2e-2), (1e-2, None), (0, 0)
SWITCHES = {
    "main_grad": (["main_grad=true"], ROUNDING),
    "flat_adam": (["flat_adam=true"], ROUNDING),
    "delay_head_grad": (["delay_head_grad=true"], ROUNDING),
    "reduction": (["params.*.reduction=fp32"], ROUNDING),
    "sparse value_embeds": (["main_grad=true", "params.value_embeds.exchange=sparse"], ROUNDING),
    "sparse bigram_embed": (["main_grad=true", "params.bigram_embed.exchange=sparse"], ROUNDING),
    "sparse embed": (["main_grad=true", "params.embed.exchange=sparse"], ROUNDING),
    "ngrams.prefetch": (["ngrams.prefetch=false"], EQUAL),
    "ngrams.placement": (["ngrams.placement=host"], EQUAL),
    **{f"kernel {name}": (["main_grad=true", f"kernels={name}"], ROUNDING) for name in tg.KERNELS},
    "fp8": (["fp8=true"], FP8),
    "compile": (["compile=true"], ROUNDING),
}
# Switches that are compared in a run with a table of n-grams.
NEED_NGRAMS = "ngrams.prefetch", "ngrams.placement", "kernel gather_rows", "kernel update_rows"
PAIRS = random.Random(6).sample([(a, b) for a in SWITCHES for b in SWITCHES if a < b], 6)


def train(cfg, backend):
    """Trains a run; returns its losses and each parameter's change, and that of the table of n-grams."""
    _, _, model, optimizer = build(0, 1, cfg, backend=backend)
    batches, losses = batches_of(cfg, 0, 1), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(cfg.steps):
        loss = tg.train_step(model, optimizer, batches.next(), batches.peek)["train_loss"]
        losses.append(loss.item())
    batches.loader.close()
    optimizer.finish_gathers()
    changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    if optimizer.ngrams:
        optimizer.ngrams.finish()
        changes |= {"ngrams": optimizer.ngrams.block, "moments": optimizer.ngrams.stored[1]}
    return losses, changes


def train_switched(cfg, names):
    """Trains with these switches on, in a process with the interpreter."""
    kernels = set()
    for name in names:
        for setting in SWITCHES[name][0]:
            cfg = tg.override(cfg, setting)
            kernels |= set(cfg.kernels)
    backend = tg.select_backend(replace(cfg, kernels=tuple(kernels)), torch.device("cpu"))
    if cfg.compile:  # traces only; test_compiled.py tests the generated code
        compile_eager = partial(torch.compile, fullgraph=True, backend="eager")
        backend = backend._replace(compiled=cache(compile_eager))
    return train(cfg, backend)


@pytest.fixture(scope="module")
def plain():
    """Returns plain(cfg): it trains a run without switches, once with n-grams and once without."""
    runs = {}

    def plain(cfg):
        orders = cfg.ngrams.orders
        return runs.get(orders) or runs.setdefault(orders, train(cfg, tg.TORCH_BACKEND))

    return plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [(name,) for name in SWITCHES if name != "compile"] + PAIRS, ids=" and ".join
)
def test_a_switch_changes_nothing_but_rounding(cfg, plain, run_interpreted, names):
    if set(names) & set(NEED_NGRAMS):
        cfg = replace(cfg, ngrams=tg.Ngrams(orders=(2, 3), rows=50, width=12))
    losses, changes = run_interpreted(train_switched, cfg, names)
    want_losses, want_changes = plain(cfg)
    loss_bound, bound = max((SWITCHES[name][1] for name in names), key=lambda bounds: bounds[0])
    assert losses == pytest.approx(want_losses, rel=loss_bound, abs=0)
    assert losses[0] != losses[-1]
    assert changes.keys() == want_changes.keys()
    for name, want in want_changes.items():
        if bound is not None:
            assert (changes[name] - want).norm() <= bound * want.norm(), name
        elif want.any():  # in the same direction, if not as far to the last digit
            assert F.cosine_similarity(changes[name].flatten(), want.flatten(), dim=0) > 0.5, name


def test_every_switch_of_the_config_is_here():
    """Checks that every switch of Config is tried, except those of attention, which need a GPU."""
    tried = {
        setting.split("=")[0].split(".")[-1] for settings, _ in SWITCHES.values() for setting in settings
    }
    switches = {
        "main_grad",
        "flat_adam",
        "delay_head_grad",
        "reduction",
        "exchange",
        "kernels",
        "fp8",
        "compile",
        "prefetch",
        "placement",
    }
    fields = vars(tg.RECORD) | vars(tg.RECORD.ngrams)
    booleans = {field for field, value in fields.items() if isinstance(value, bool)}
    assert tried == switches and booleans - {"warmup"} <= switches
