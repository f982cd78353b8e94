"""Every technique's switch, alone and in seeded pairs (compile alone is in test_compiled.py): runs of four steps against the plain run, bit for bit or within a bound
that is stated. Triton's kernels run in its interpreter."""
import multiprocessing
import pickle
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import train_gpt as tg
from interpreter import skip_without_interpreter
from test_distributed import batches_of, build, cfg as every_layer  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def cfg(every_layer):  # noqa: F811
    """A layer of each kind, fp32, widths and lengths of 16 for FP8; every stage a step, so that step 3 is the untied one's."""
    layers = (tg.Layer("paired", value=0, saves="skip"), tg.Layer("plain", "long", saves="back"), tg.Layer(None, adds="skip"),
              tg.Layer("plain", value=1, reads="back"))
    stages = tuple(replace(stage, steps=1, tokens=tokens) for stage, tokens in zip(every_layer.stages, (64, 128, 96, 96)))
    return replace(every_layer, layers=layers, slices=2, stages=stages, attention="dense", head_chunk=16, dtype="float32", polar_dtype="float32",
                   main_grad=False, params=tuple(replace(row, exchange="reduce_scatter") if row.rows else row
                                                 for row in every_layer.params))


@pytest.fixture(scope="module")
def elsewhere():
    """elsewhere(function, *args): its result, computed by a process that has Triton's interpreter: that is chosen when Triton is
    imported."""
    skip_without_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,))
        pool.apply(len, ("",))  # it has started
    with pool:
        yield lambda function, *args: pickle.loads(pool.apply(pickled, (function, *args)))


def pickled(function, *args):
    """As bytes: tensors would travel in shared memory."""
    return pickle.dumps(function(*args))


# The bound on the relative difference of losses, and of each parameter's change over the run, by its norm. Rounding of another
# kind is 1e-7 of a gradient, which polar and Adam's first steps, close to signs, blow up. FP8's gradients have two bits of
# mantissa: what they do to one number is large, to the loss it is small.
ROUNDING, EIGHT_BITS = (1e-5, 2e-2), (1e-2, None)
SWITCHES = {
    "main_grad": (["main_grad=true"], ROUNDING),
    "delay_head_grad": (["delay_head_grad=true"], ROUNDING),
    "reduction": (["params.*.reduction=fp32"], ROUNDING),
    "sparse value_embeds": (["main_grad=true", "params.value_embeds.exchange=sparse"], ROUNDING),
    "sparse bigram_embed": (["main_grad=true", "params.bigram_embed.exchange=sparse"], ROUNDING),
    "sparse embed": (["main_grad=true", "params.embed.exchange=sparse"], ROUNDING),
    **{f"kernel {name}": (["main_grad=true", f"kernels={name}"], ROUNDING) for name in tg.KERNEL_NAMES},
    "fp8": (["fp8=true"], EIGHT_BITS),
    "compile": (["compile=true"], ROUNDING),
}
PAIRS = random.Random(6).sample([(a, b) for a in SWITCHES for b in SWITCHES if a < b], 6)


def train(rank, world, cfg, ops):
    _, exchange, model, optimizer = build(rank, world, cfg, ops=ops)
    batches, losses = batches_of(cfg, rank, world), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(cfg.steps):
        losses.append(tg.train_step(model, optimizer, batches.next()).item())
    batches.close()
    optimizer.finish()
    return losses, {name: p.detach() - before[name] for name, p in model.named_parameters()}


def train_switched(cfg, names):
    """A run with these switches on, in a process with the interpreter."""
    kernels = set()
    for name in names:
        for setting in SWITCHES[name][0]:
            cfg = tg.override(cfg, setting)
            kernels |= set(cfg.kernels)
    ops = tg.choose_ops(replace(cfg, kernels=tuple(kernels)), torch.device("cpu"))
    if cfg.compile:  # traced only; what is made of that, test_compiled.py looks at
        ops = ops._replace(compiled=cache(partial(torch.compile, fullgraph=True, backend="eager")))
    return train(0, 1, cfg, ops)


@pytest.fixture(scope="module")
def plain(cfg):
    return train(0, 1, cfg, tg.PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("names", [(name,) for name in SWITCHES if name != "compile"] + PAIRS, ids=" and ".join)
def test_a_switch_changes_nothing_but_rounding(cfg, plain, elsewhere, names):
    losses, changes = elsewhere(train_switched, cfg, names)
    near, nearer = max((SWITCHES[name][1] for name in names), key=lambda bounds: bounds[0])
    assert losses == pytest.approx(plain[0], rel=near)
    assert losses[0] != losses[-1]
    for name, want in plain[1].items():
        if nearer:
            assert (changes[name] - want).norm() <= nearer * want.norm(), name
        elif want.any():  # the same way, if not as far to the last digit
            assert torch.nn.functional.cosine_similarity(changes[name].flatten(), want.flatten(), dim=0) > 0.5, name


def test_every_switch_of_the_config_is_here():
    """A field of Config that turns a technique on is tried above, but for those of attention, which need a GPU."""
    tried = {setting.split("=")[0].split(".")[-1] for settings, _ in SWITCHES.values() for setting in settings}
    switches = {"main_grad", "delay_head_grad", "reduction", "exchange", "kernels", "fp8", "compile"}
    booleans = {field for field, value in vars(tg.RECORD).items() if isinstance(value, bool)}
    assert tried == switches and booleans - {"warmup"} <= switches
