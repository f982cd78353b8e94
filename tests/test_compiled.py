"""Compares compiled training with plain.

The layers are one graph in training and one in validation; nothing compiles after the warm-up.
"""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import train_gpt as tg
from configs import BASE
from golden_inputs import generator, spec_of, training_of, val_loader
from gpu_code import SingleRankCollectives
from test_distributed import build, few_layers, run_steps  # noqa: F401 (a fixture)
from test_reference import dense_attention

pytestmark = pytest.mark.slow


def masked_attention(q, k, v, cu_seqlens, max_seqlen, window):
    """Attends as tg.dense_attention; but one graph takes any window, as with FlashAttention."""
    return dense_attention(q, k, v, cu_seqlens, torch.sym_min(window, max_seqlen - 1))


MASKED = tg.TORCH_BACKEND._replace(attention=masked_attention)


class Graphs:
    """Compiles functions as a run does, and counts the graphs of each."""

    def __init__(self, monkeypatch, backend):
        self.counts = Counter()
        self.backend = backend
        self.torch_compile = torch.compile
        monkeypatch.setattr(torch, "compile", self.compile)

    def compile(self, function, options, **more):
        compiled = self.torch_compile(function, backend=self.backend, **more)

        def call(*args, **kwargs):
            before = counters["stats"]["unique_graphs"]
            result = compiled(*args, **kwargs)
            self.counts[function.__name__] += counters["stats"]["unique_graphs"] - before
            return result

        return call


@pytest.fixture
def compile(monkeypatch):
    """Returns compile(): from its call on torch.compile compiles the script's functions.

    Before it they are plain.
    """
    # Torch's cache does not distinguish vectors of 16 numbers from those of 8: code compiled under another
    # ATEN_CPU_CAPABILITY would be used here, and compute NaN.
    capability = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(default_cache_dir(), capability))

    def compile():
        monkeypatch.setattr(tg, "COMPILER", cache(partial(torch.compile, fullgraph=True)))

    monkeypatch.setattr(tg, "COMPILER", None)
    with torch._dynamo.config.patch(recompile_limit=64):
        torch._dynamo.reset()
        counters.clear()
        yield compile
        torch._dynamo.reset()


def train(cfg, backend):
    """Trains a run, with a validation after every step; returns losses and the model's tensors."""
    comm, model, optimizer = build(0, 1, cfg, backend=backend)
    val = val_loader(cfg)
    losses = []
    for batch, loss in run_steps(model, optimizer):
        losses += [loss.item(), tg.validate(model, val, comm, batch.plan.windows)]
    return losses, model.state_dict()


@pytest.mark.parametrize("main_grad", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_compiled_run_is_the_plain_run(few_layers, compile, monkeypatch, main_grad):  # noqa: F811
    """Trains through all stages and untying, with two micro-batches: traces and differentiates, generates no
    code. Lengths, windows, longest documents and scales of the softmax change with the stages.
    """
    cfg = replace(few_layers, compile=True, main_grad=main_grad)
    want, tensors = train(cfg, MASKED)
    graphs = Graphs(monkeypatch, "aot_eager")
    monkeypatch.setattr(tg, "COMPILER", tg.configure_compiler(cfg))
    losses, compiled_tensors = train(cfg, MASKED)
    assert losses == pytest.approx(want, rel=1e-12)
    for name, t in tensors.items():
        torch.testing.assert_close(compiled_tensors[name], t, rtol=1e-11, atol=1e-12, msg=name)
    assert graphs.counts["trunk"] == 2, graphs.counts


@pytest.mark.long
def test_nothing_is_traced_after_the_warm_up(few_layers, compile, monkeypatch):  # noqa: F811
    """Trains as rank 0 of 8: warm-up, training, validation. As on a GPU, the backward has a thread."""
    backward = torch.autograd.backward
    layers = few_layers.layers[0], replace(few_layers.layers[3], value=1)
    changes = """
    skip_from=0 skip_to=1 backout_from=0 compile=true microbatches=8 val_every=3 val_slices=8
    val_slice_tokens=48
    """
    cfg = tg.with_settings(replace(few_layers, layers=layers), changes.split())
    comm = SingleRankCollectives(0, 8)
    graphs = Graphs(monkeypatch, "aot_eager")
    with ThreadPoolExecutor(1) as thread:

        def in_thread(*args, **options):
            return thread.submit(backward, *args, **options).result()

        monkeypatch.setattr(torch.autograd, "backward", in_thread)
        training = training_of(*tg.build(cfg, MASKED, comm, 0), comm)
        validate = tg.validate

        def validate_alone(*args):
            """Hides the loss, which is not finite for one rank of 8 alone, and would end the run."""
            validate(*args)
            return 1.0

        monkeypatch.setattr(tg, "validate", validate_alone)
        tg.warm_up(training)
        warm = dict(graphs.counts)
        tg.train(training, tg.RunLog(), tg.Progress())
    assert warm == graphs.counts and warm["trunk"] == 2


def update_twice(name, optimizer):
    """Updates bf16 (3, 10, 8) numbers as the parameter `name`, by the rule `optimizer`. Returns the numbers
    and those of the rule's state, in fp32.
    """
    cfg = replace(BASE, bank_wd=5.0, two_momenta_from=2)
    g = generator(0)
    p = torch.randn(3, 10, 8, generator=g).bfloat16()
    grad = torch.randn(3, 10, 8, generator=g)
    row = replace(spec_of(name), optimizer=optimizer)
    rule = tg.UPDATE_RULES[optimizer]
    state = rule.init(p, row, torch.float32, 0)
    if optimizer == "adam":
        state["muls"] = torch.rand(2, 240, generator=g)  # of small parameters' vectors
    for t in 1, 2:
        plan = tg.plan_step(cfg, t)._replace(lr_mul=1 / t, momentum=0.85 + t / 100)
        rule.update(p, grad * t, state, row, plan, cfg)
    if "mantissa" in state:
        p = tg.merge_mantissa(p, state.pop("mantissa"))
    return [t.float() for t in (p, *state.values())]


def test_updates_in_generated_code(compile):
    """Of bf16 weights with their mantissas, which count as one number in fp32, too."""
    plain = update_twice("embed", "adam") + update_twice("mlp_bank", "anvil")
    compile()
    generated = update_twice("embed", "adam") + update_twice("mlp_bank", "anvil")
    assert counters["stats"]["unique_graphs"] == 2
    for want, found in zip(plain, generated, strict=True):
        assert want.any()
        assert (found - want).norm() <= 1e-5 * want.norm()
