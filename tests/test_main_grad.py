"""Checks gradients written straight into main_grad: the contract, equality with autograd's, delay, memory."""

# ruff: noqa: F811 (fixtures are imported)

import importlib.util
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from test_distributed import (
    batches_of,
    build,
    cfg,  # noqa: F401 (a fixture)
    same_on_all_ranks,
    train,
    with_dtype,
)

NEAR = dict(rtol=1e-12, atol=1e-13)
PRODUCTS = ("qk_bank", "vo_bank", "mlp_bank", "lm_head")


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------- the contract

# Each operation with one weight under test: its forward and backward through `grad`, and in plain torch.


def run_scaled(x, w, grad):
    def part(t):
        return t.view(1, 6, 6)

    scales, slices = torch.tensor([[1.0], [0.7]], dtype=x.dtype, requires_grad=True), [QK, V]
    slices = [tg.WeightSlice(other) for other in slices] + [tg.WeightSlice(part(w), part, grad)]
    _, out = tg.scaled_weights(scales, *slices)
    (x @ out[0].T).square().sum().backward()


def plain_scaled(x, w):
    (x @ (0.7 * w).T).square().sum().backward()


def run_fc(x, w, grad):
    tg.mlp(x, tg.WeightSlice(w, grad=grad), tg.WeightSlice(OTHER)).square().sum().backward()


def plain_fc(x, w):
    ((x @ w.T).relu().square() @ OTHER).square().sum().backward()


def run_proj(x, w, grad):
    tg.mlp(x, tg.WeightSlice(OTHER), tg.WeightSlice(w, grad=grad)).square().sum().backward()


def plain_proj(x, w):
    ((x @ OTHER.T).relu().square() @ w).square().sum().backward()


def run_head(x, w, grad):
    model = tg.GPT.__new__(tg.GPT)  # only its head is needed
    torch.nn.Module.__init__(model)
    model.cfg, model.lm_head = replace(tg.CPU, head_chunk=3, dtype="float64"), w
    model.in_flight, model.backend = {}, tg.TORCH_BACKEND
    targets = tg.loss_targets(TARGETS, 2, PREFIXES)
    _, backward_roots = model.head_loss_and_grad(x, targets, (1.0, 0.5, 0.25), grad)
    torch.autograd.backward(*zip(*backward_roots))


def plain_head(x, w):
    z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
    logp = z.log_softmax(-1)
    rows = torch.arange(len(x))
    loss = -logp[rows, TARGETS].sum() - 0.5 * logp[rows[:-1], TARGETS[1:]].sum()
    prefixes = PREFIXES[TARGETS]
    (loss - 0.25 * logp[rows, prefixes][prefixes >= 0].sum()).backward()


OTHER, QK, V = randn(8, 6, seed=1), randn(1, 12, 6, seed=3), randn(1, 6, 6, seed=4)
TARGETS, PREFIXES = torch.tensor([3, 0, 7, 7, 2]), torch.tensor([-1, 0, 0, 1, -1, 3, 2, 6])
OPERATIONS = {
    "scaled": (run_scaled, plain_scaled, (6, 6)),
    "fc": (run_fc, plain_fc, (8, 6)),
    "proj": (run_proj, plain_proj, (8, 6)),
    "head": (run_head, plain_head, (6, 8)),
}
# fmt: off
CASES = {  # main_grad, delayed, weight has grad_added_to_main_grad
    "plain":                        (False, False, False),
    "delayed":                      (False, True,  False),
    "in place":                     (True,  False, False),
    "in place, with dummy":         (True,  False, True),
    "in place, delayed":            (True,  True,  False),
    "in place, delayed, with dummy": (True, True,  True),
}
# fmt: on


class RecordingWeightGrad(tg.WeightGrad):
    """Keeps the address of what it returns to autograd; a reference would make autograd copy it."""

    returned = None

    def accumulate(self, *args, **kwargs):
        return self.record(super().accumulate(*args, **kwargs))

    def accumulate_scaled(self, *args):
        return self.record(super().accumulate_scaled(*args))

    def record(self, grad):
        self.returned = None if grad is None else grad.data_ptr()
        return grad


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("case", CASES)
def test_contract(case, operation, micro_batches):
    """Checks two optimizer steps: the gradient is autograd's, in the one place that the case names."""
    (in_place, delayed, dummy), (run, plain, shape) = CASES[case], OPERATIONS[operation]
    w = randn(*shape, seed=2).requires_grad_(not in_place or dummy)
    main_grad = torch.full(shape, torch.nan, dtype=w.dtype) if in_place else None  # NaN: to be overwritten
    grad, fired = RecordingWeightGrad(w, main_grad), []
    grad.delay = delayed
    if dummy:
        w.grad_added_to_main_grad = False

        def hook(p):  # drops the dummy, which autograd has kept without a copy
            assert (
                p.grad_added_to_main_grad and p.grad.shape == p.shape and p.grad.data_ptr() == grad.returned
            )
            assert p.grad.untyped_storage().data_ptr() != main_grad.untyped_storage().data_ptr()
            p.grad, p.grad_added_to_main_grad = None, False
            fired.append(len(fired))

        w.register_post_accumulate_grad_hook(hook)

    for step in range(2):
        twin = w.detach().clone().requires_grad_()
        for i in range(micro_batches):
            x = randn(5, 6, seed=10 * step + i)
            plain(x, twin)
            run(x.requires_grad_(), w, grad)
            grad.end_backward()
            # The head's plain gradient is whole before autograd gets it.
            returns = dummy or case == "plain" and operation != "head"
            assert (grad.returned is not None) == returns
        assert len(fired) == (step + 1) * micro_batches * dummy
        if delayed:
            products = 2 if operation == "head" else 1  # its chunks
            assert len(grad.delayed) == micro_batches * products and w.grad is None
            assert not in_place or step > 0 or main_grad.isnan().all()
            grad.flush()
            assert not grad.delayed
            grad.flush()  # has nothing to do
        found, other = (main_grad, w.grad) if in_place else (w.grad, main_grad)
        torch.testing.assert_close(found, twin.grad, **NEAR)
        assert other is None
        grad.overwrite, w.grad = True, None  # the optimizer's step


@pytest.mark.parametrize("mutant", ["view", "never overwrites", "always overwrites"])
def test_contract_fails_for(mutant, monkeypatch):
    """Makes mistakes that the test above must find; TransformerEngine's review found the first."""
    accumulate, write_grad = tg.WeightGrad.accumulate, tg.write_grad

    def return_view(self, *args, **kwargs):
        grad = accumulate(self, *args, **kwargs)
        return grad if grad is None or self.main_grad is None else self.main_grad.view(grad.shape)

    def write(out, a, b, overwrite, scale):
        write_grad(out, a, b, mutant == "always overwrites", scale)

    if mutant == "view":
        monkeypatch.setattr(tg.WeightGrad, "accumulate", return_view)
    else:
        monkeypatch.setattr(tg, "write_grad", write)
    with pytest.raises(AssertionError):
        test_contract("in place, with dummy", "fc", 3)


def test_a_view_of_main_grad_counts_twice():
    """Shows why the dummy has memory of its own."""
    w = randn(8, 6, seed=2).requires_grad_()
    w.grad_added_to_main_grad = False
    grad = tg.WeightGrad(w, torch.zeros_like(w, requires_grad=False))
    accumulate = grad.accumulate
    grad.accumulate = lambda *args: grad.main_grad if accumulate(*args) is not None else None
    twin, sums = w.detach().clone().requires_grad_(), []
    for i in range(2):
        x = randn(5, 6, seed=i)
        plain_fc(x, twin)
        run_fc(x.requires_grad_(), w, grad)
        grad.end_backward()
        sums.append(twin.grad.clone())
    torch.testing.assert_close(grad.main_grad, sums[1], **NEAR)
    torch.testing.assert_close(w.grad, sums[0] + sums[1], **NEAR)  # the first micro-batch's twice


def test_scaled_weights_of_banks():
    """Scales two layers' weights, of banks with padding: each gradient lands on its own matrices."""
    qk, vo = randn(9, 4, 6, seed=1), randn(6, 6, 6, seed=2)  # of three layers' room
    scales = torch.tensor([[-1.3, 0.4], [0.7, 2.0]], dtype=torch.float64, requires_grad=True)
    grads = [tg.WeightGrad(bank, torch.full_like(bank, 9.0)) for bank in (qk, vo)]
    parts = [lambda t: t.view(-1, 6)[:24].view(2, 12, 6), lambda t: t[:4:2], lambda t: t[1:4:2]]
    slices = [
        tg.WeightSlice(part(b), part, g)
        for part, b, g in zip(parts, (qk, vo, vo), (grads[0], *grads[1:] * 2))
    ]
    twins = [bank.clone().requires_grad_() for bank in (qk, vo)]
    twin_scales = scales.detach().clone().requires_grad_()
    for i in range(2):
        qkv, out = tg.scaled_weights(scales, *slices)
        loss = twin_loss = 0
        for m in range(2):
            dqkv, dout = randn(18, 6, seed=4 + 2 * i + m), randn(6, 6, seed=14 + 2 * i + m)
            twin_qkv = twin_scales[0, m] * torch.cat([twins[0].view(-1, 12, 6)[m], twins[1][2 * m]])
            torch.testing.assert_close(qkv[m], twin_qkv, **NEAR)
            loss = loss + (qkv[m] * dqkv).sum() + (out[m] * dout).sum()
            twin_out = twin_scales[1, m] * twins[1][2 * m + 1]
            twin_loss = twin_loss + (twin_qkv * dqkv).sum() + (twin_out * dout).sum()
        loss.backward()
        twin_loss.backward()
        for grad in grads:
            grad.end_backward()
    torch.testing.assert_close(scales.grad, twin_scales.grad, **NEAR)
    for grad, twin, used in zip(grads, twins, (6, 4)):
        want = torch.cat([twin.grad[:used], torch.full_like(twin[used:], 9.0)])  # padding stays
        torch.testing.assert_close(grad.main_grad, want, **NEAR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("overwrite", [True, False])
def test_write_grad(dtype, overwrite):
    """Writes a product to some rows, or adds it: rounded once."""
    a, b = randn(70, 5, seed=1).to(dtype), randn(70, 4, seed=2).to(dtype)
    old = randn(3, 6, 4, seed=3).to(dtype)
    grad = tg.WeightGrad(old, old.clone())
    grad.overwrite = overwrite
    assert grad.accumulate(lambda t: t.view(-1, 4)[7:12], a, b) is None
    flat, before = grad.main_grad.view(-1, 4), old.view(-1, 4)
    want = a.double().T @ b.double() + (0 if overwrite else before[7:12].double())
    inside = 40 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # the product's sum
    assert (flat[7:12].double() - want).abs().max() <= (
        torch.finfo(dtype).eps / 2 + inside
    ) * want.abs().max()
    assert torch.equal(flat[:7], before[:7]) and torch.equal(flat[12:], before[12:])


def test_a_second_copy_of_the_script_can_be_imported():
    """Imports the script beside a copy of it: both write gradients afterwards."""
    spec = importlib.util.spec_from_file_location("my_copy", Path(tg.__file__))
    copy, grads = importlib.util.module_from_spec(spec), []
    sys.modules["my_copy"] = copy  # dataclasses look there
    try:
        spec.loader.exec_module(copy)
        for module in (tg, copy):
            x, w = randn(5, 6, seed=1).requires_grad_(), randn(8, 6, seed=2)
            grad = module.WeightGrad(w, torch.zeros_like(w))
            module.mlp(x, module.WeightSlice(w, grad=grad), module.WeightSlice(OTHER)).sum().backward()
            grads.append(grad.main_grad)
        assert grads[0].any() and torch.equal(*grads)
    finally:
        del sys.modules["my_copy"]


@pytest.mark.parametrize("main_grad", [True, False])
@pytest.mark.parametrize("sign_rows", [0, 1, 8192])
def test_rows_and_their_gradients_have_signs(cfg, sign_rows, main_grad):
    """Checks the bigrams' rows against a loop over positions; without rows of signs, no sign is there."""
    _, model, optimizer = build(0, 1, replace(cfg, sign_rows=sign_rows, main_grad=main_grad))
    batches = batches_of(model.cfg, 0, 1)
    batch = batches.next().micro_batches[0]
    batches.loader.close()
    leaves = {} if main_grad else None
    for name in ("value_embeds", "embed"):
        found = model.lookup(name, batch, leaves)
        found.backward(torch.zeros_like(found))
    bigrams = model.lookup_sums(batch, leaves, True)
    db = randn(*bigrams.shape, seed=1)
    bigrams.backward(db)
    optimizer.accumulate_row_grads(leaves, batch.index, model.signs)
    want, ones = torch.zeros_like(model.bigram_embed), torch.ones(model.cfg.dim)
    for t, row in enumerate(batch.ngrams[0].tolist()):
        sign = model.signs[batch.signs[0, t]] if sign_rows else ones
        assert set(sign.tolist()) <= {-1, 1} and torch.equal(bigrams[t], sign * model.bigram_embed[row])
        want[row] += sign * db[t]
    torch.testing.assert_close(optimizer.grad_of("bigram_embed"), want, **NEAR)
    assert (batch.signs is None) == (sign_rows == 0) and model.signs.size(0) == sign_rows


# ------------------------------------------------------------------------------------------------- whole runs

VARIANTS = {
    "autograd": dict(main_grad=False),
    "autograd, delayed": dict(main_grad=False, delay_head_grad=True),
    "in place": dict(main_grad=True),
    "in place, delayed": dict(main_grad=True, delay_head_grad=True),
}


@pytest.mark.slow
def test_all_variants_train_alike(workers, cfg):
    """Trains on 4 ranks through all stages and untying, with two micro-batches a rank, in fp64.

    When the product is computed changes no bit. Where it is added does: autograd rounds a product before it
    adds it, writing in place adds it inside the product's sum. Within 1e-12: eps is 2e-16, polar_express may
    blow that up a thousandfold.
    """
    runs = {}
    for variant, changes in VARIANTS.items():
        runs[variant] = same_on_all_ranks(workers(4, train, replace(cfg, **changes), False))
    assert runs["in place"]["digests"] == runs["in place, delayed"]["digests"]
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs["autograd"]["losses"], rel=1e-12)
        for name, p in runs["autograd"]["final"].items():
            torch.testing.assert_close(run["final"][name], p, rtol=1e-12, atol=1e-13, msg=name)


def flush_only(optimizer):
    """Returns a stand-in for optimizer.step that only computes delayed products."""
    return lambda plan: [grad.flush() for grad in optimizer.weight_grads.values()]


def gradients_of_a_batch(cfg):
    """Returns the first batch's gradients, which parameters have a .grad, and which require one."""
    _, model, optimizer = build(0, 1, cfg)
    optimizer.step, batches = flush_only(optimizer), batches_of(cfg, 0, 1)
    tg.train_step(model, optimizer, batches.next())
    batches.loader.close()
    grads = {name: optimizer.grad_of(name).clone() for name in optimizer.params}
    with_grad = {name for name, p in model.named_parameters() if p.grad is not None}
    return grads, with_grad, {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_micro_batch_gives_the_same_bits(cfg, dtype):
    """Compares products of the same numbers.

    Tables differ in bf16: autograd adds a row's gradients in bf16, we in fp32.
    """
    stages = tuple(replace(stage, batch_tokens=stage.batch_tokens // 8) for stage in cfg.stages)
    cfg = replace(with_dtype(cfg, dtype), microbatches=1, stages=stages)
    plain, *all_names = gradients_of_a_batch(replace(cfg, main_grad=False))
    in_place, *small_names = gradients_of_a_batch(cfg)
    tables = {"value_embeds", "bigram_embed", "embed"}
    small = set(plain) - tables - set(PRODUCTS)
    assert all_names == [set(plain)] * 2 and small_names == [small] * 2
    for name in small | set(PRODUCTS):
        assert plain[name].any() and torch.equal(in_place[name], plain[name]), name
    rtol = 2**-6 if dtype == "bfloat16" else 1e-6
    for name in tables:
        torch.testing.assert_close(in_place[name], plain[name], rtol=rtol, atol=1e-9)


def names_with_grad(cfg):
    """Returns the parameters with a .grad after every backward and every step of a run."""
    _, model, optimizer = build(0, 1, cfg)
    batches, seen, accumulate_row_grads = batches_of(cfg, 0, 1), [], optimizer.accumulate_row_grads

    def record(when):
        seen.append((when, {name for name, p in model.named_parameters() if p.grad is not None}))

    def record_backward(*args):
        record("backward")
        accumulate_row_grads(*args)

    optimizer.accumulate_row_grads = record_backward
    for step in range(cfg.steps):
        tg.train_step(model, optimizer, batches.next())
        record(step)
    batches.loader.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_only_small_parameters_have_a_grad(cfg, delayed):
    mudd = {f"mudd_{name}" for name in ("w1", "w2", "b2")}
    mudd |= {f"mudd_gate_{name}" for name in ("w1", "w2", "b2", "scale")}
    small = mudd | {"smear_gate", "ve_gate_bank", "scalars", "post_lambdas", "resid_lambdas"}
    assert small == {row.name for row in cfg.params if not row.is_matmul_weight and not row.indexed_by}
    seen = names_with_grad(replace(cfg, delay_head_grad=delayed))
    assert len(seen) == 9 * cfg.steps
    for when, names in seen:
        assert names == (set() if when in (1, 3, 5, 7) else small), when


# ------------------------------------------------------------------------------------------------------ delay


def record_scatter(rank, world_size, cfg):
    """Returns what each step launches and computes, in order."""
    exchange, model, optimizer = build(rank, world_size, cfg)
    batches, events, steps = batches_of(cfg, rank, world_size), [], []
    write_grad = tg.write_grad

    def record(event, function):
        def recording(*args):
            events.append(event or args[0])
            return function(*args)

        return recording

    def record_head(out, *args):
        if out.data_ptr() == optimizer.weight_grads["lm_head"].main_grad.data_ptr():
            events.append("head's product")
        write_grad(out, *args)

    exchange.reduce = record(None, exchange.reduce)  # by parameter
    optimizer.scatter = record("scatter", optimizer.scatter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "write_grad", record_head)
        patch.setattr(torch.autograd, "backward", record("backward", torch.autograd.backward))
        for _ in range(cfg.steps):
            tg.train_step(model, optimizer, batches.next())
            steps.append(list(events))
            events.clear()
    batches.loader.close()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_when_the_heads_product_runs(workers, cfg, delayed):
    """Checks that it runs at once, before its micro-batch's backward.

    Delayed, the last one runs where the parameter table has lm_head, behind the banks, on steps that do not
    send it too.
    """
    micro_batch, late = ["head's product", "backward"], ["head's product"] if delayed else []
    last = ["backward"] if delayed else micro_batch
    for steps in workers(2, record_scatter, replace(cfg, delay_head_grad=delayed, head_chunk=1000)):
        for step, events in enumerate(steps):
            start = events.index("scatter")
            before, scatter = events[:start], events[start + 1 :]
            assert before == micro_batch * 3 + last
            if tg.plan_step(cfg, step).do_adam:
                names = [row.name for row in cfg.params]
                first = names[: names.index("lm_head")]
                assert scatter[: len(first) + 1 + delayed] == [*first, *late, "lm_head"]
            else:
                assert scatter == ["qk_bank", "vo_bank", "mlp_bank", *late]


@pytest.mark.slow
def test_an_order_with_the_head_first(cfg):
    """Gives the same bits: whatever the order, the product has run when it is sent."""
    cfg = replace(cfg, delay_head_grad=True)
    params = tuple(sorted(reversed(cfg.params), key=lambda row: row.name != "lm_head"))
    assert params[0].name == "lm_head"
    want, head_first = (train(0, 1, replace(cfg, params=rows)) for rows in (cfg.params, params))
    assert head_first["digests"] == want["digests"]


# ----------------------------------------------------------------------------------------------------- memory


def tensors_in(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class TensorRecorder(TorchDispatchMode):
    """Keeps the shapes of all tensors that operations allocated, and of those they cleared."""

    def __init__(self):
        super().__init__()
        self.allocated, self.cleared = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        old = {t.untyped_storage().data_ptr() for t in inputs}
        new = [t for t in outputs if t.untyped_storage().data_ptr() not in old]
        self.allocated |= {tuple(t.shape) for t in new}
        if func.__name__.split(".")[0] in ("zero_", "fill_", "zeros", "zeros_like", "full"):
            self.cleared |= {tuple(t.shape) for t in inputs + outputs}
        return result


def large_shapes(cfg):
    """Returns shapes of banks, of their used layers, of head and tables: as they are, flat and transposed."""
    shapes, n, L, d = tg.param_shapes(cfg, 1), 10, 11, cfg.dim
    large = [shapes[row.name] for row in cfg.params if row.is_matmul_weight or row.indexed_by]
    large += [(n, 2 * d, d), (2 * n, d, d), (2 * L, cfg.mlp_dim, d)]
    flat = [(s[0], math.prod(s[1:])) for s in large] + [(math.prod(s[:-1]), s[-1]) for s in large]
    return {*large, *flat, *(s[::-1] for s in flat)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_as_large_as_a_bank_is_allocated_or_cleared(cfg, variant):
    """Checks forward, backward and accumulation of two micro-batches. Autograd allocates such tensors."""
    stages = tuple(replace(stage, batch_tokens=2 * 37) for stage in cfg.stages)  # 37 is no weight's size
    cfg = replace(
        cfg, microbatches=2, stages=stages, padded_vocab=70, bigram_vocab_size=350, **VARIANTS[variant]
    )
    _, model, optimizer = build(0, 1, cfg)
    batches, recorder = batches_of(cfg, 0, 1), TensorRecorder()
    tg.train_step(model, optimizer, batches.next())
    optimizer.step = flush_only(optimizer)
    batch = batches.next()
    with recorder:
        tg.train_step(model, optimizer, batch)
    batches.loader.close()
    allocated, large = recorder.allocated, large_shapes(cfg)
    assert (20, 70) in allocated  # a chunk's logits
    if variant.startswith("in place"):
        # The scaled weights of all attention layers are made at once, and so are their gradients.
        scaled = {(10, rows * cfg.dim, cfg.dim) for rows in (1, 2, 3)}
        assert (10, 3 * cfg.dim, cfg.dim) in allocated
        assert not (large - scaled) & (allocated | recorder.cleared)
    else:
        shapes = tg.param_shapes(cfg, 1)
        assert {shapes[name] for name in ("qk_bank", "vo_bank", "bigram_embed", "embed")} <= allocated
        assert (22, cfg.mlp_dim, cfg.dim) in allocated
    assert (37, 70) not in allocated  # the logits of all tokens


@pytest.mark.slow
def test_the_bench_measures():
    """Finds less memory and less traffic for gradients of every kind; counts are not timings."""
    root = Path(__file__).resolve().parent.parent
    script, options = root / "bench" / "grad_accumulation.py", "--sizes cpu --micro-batches 1 --pairs 2"
    command = [sys.executable, script, *options.split()]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {}
    for variant in ("autograd", "in place", "delayed"):
        numbers = r" +([\d.]+) +\(\d+\)" + r" +([\d.]+)" * 4 + " "
        match = re.search(rf"^cpu +1 +1 {variant}{numbers}", out, re.M)
        rows[variant] = list(map(float, match.groups()))
    assert rows["in place"] == rows["delayed"] and rows["autograd"][1] == 1
    assert rows["in place"][1] <= 0.85
    assert all(ours < autograd for ours, autograd in zip(rows["in place"], rows["autograd"]))
