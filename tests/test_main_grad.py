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
BANKS = ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank")
PRODUCTS = (*BANKS, "lm_head")


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------- the contract

# Each operation with one weight under test: its forward and backward through `grad`, and in plain torch.


def run_linear(x, w, grad):
    (y,) = tg.linear(x, tg.WeightSlice(w, grad=grad))
    y.square().sum().backward()


def plain_linear(x, w):
    (x @ w.T).square().sum().backward()


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
    model.wait_for, model.backend = lambda name: None, tg.TORCH_BACKEND
    targets = tg.loss_targets(TARGETS, 2, PREFIXES)
    _, backward_roots = model.head_loss_and_grad(x, targets, (1.0, 0.5, 0.25), grad, 1.0, [])
    torch.autograd.backward(*zip(*backward_roots))


def plain_head(x, w):
    z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
    logp = z.log_softmax(-1)
    rows = torch.arange(len(x))
    loss = -logp[rows, TARGETS].sum() - 0.5 * logp[rows[:-1], TARGETS[1:]].sum()
    prefixes = PREFIXES[TARGETS]
    (loss - 0.25 * logp[rows, prefixes][prefixes >= 0].sum()).backward()


OTHER = randn(8, 6, seed=1)
TARGETS, PREFIXES = torch.tensor([3, 0, 7, 7, 2]), torch.tensor([-1, 0, 0, 1, -1, 3, 2, 6])
OPERATIONS = {
    "linear": (run_linear, plain_linear, (8, 6)),
    "fc": (run_fc, plain_fc, (8, 6)),
    "proj": (run_proj, plain_proj, (8, 6)),
    "head": (run_head, plain_head, (6, 8)),
}
# fmt: off
CASES = {  # main_grad, delayed, weight has grad_added_to_main_grad
    "plain":                        (False, False, False),
    "in place":                     (True,  False, False),
    "in place, with dummy":         (True,  False, True),
    "in place, delayed":            (True,  True,  False),
    "in place, delayed, with dummy": (True, True,  True),
}
# fmt: on


class RecordingGradient(tg.Gradient):
    """Keeps the address of what it returns to autograd; a reference would make autograd copy it."""

    returned = None

    def add(self, *args, **kwargs):
        grad = super().add(*args, **kwargs)
        self.returned = None if grad is None else grad.data_ptr()
        return grad


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "case, operation",
    # The head's gradient is never autograd's: its backward runs in the forward.
    [
        (case, operation)
        for case in CASES
        for operation in OPERATIONS
        if (case, operation) != ("plain", "head")
    ],
)
def test_contract(case, operation, micro_batches):
    """Checks two optimizer steps: the gradient is autograd's, in the one place that the case names."""
    (in_place, delayed, dummy), (run, plain, shape) = CASES[case], OPERATIONS[operation]
    w = randn(*shape, seed=2).requires_grad_(not in_place or dummy)
    main_grad = torch.full(shape, torch.nan, dtype=w.dtype) if in_place else None  # NaN: to be overwritten
    grad, fired = RecordingGradient("w", w, main_grad), []
    grad.delay = delayed
    if dummy:
        w.grad_added_to_main_grad = False

        def hook(p):  # drops the dummy, which autograd has kept without a copy, if not as a root's gradient
            assert p.grad_added_to_main_grad and p.grad.shape == p.shape
            assert p.grad.data_ptr() == grad.returned or operation == "head"
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
            assert (grad.returned is not None) == (dummy or case == "plain")
        assert len(fired) == (step + 1) * micro_batches * dummy
        if delayed:
            products = 2 if operation == "head" else 1  # its chunks
            assert len(grad.delayed) == micro_batches * products and w.grad is None
            assert step > 0 or main_grad.isnan().all()
        found = grad.take()
        assert not grad.delayed and grad.take() is found  # again: there is nothing left to compute
        assert found is (main_grad if in_place else w.grad) and (w.grad is None) == in_place
        torch.testing.assert_close(found, twin.grad, **NEAR)
        grad.reset()  # the optimizer's step
        assert w.grad is None


@pytest.mark.parametrize("mutant", ["view", "never overwrites", "always overwrites"])
def test_contract_fails_for(mutant, monkeypatch):
    """Makes mistakes that the test above must find; TransformerEngine's review found the first."""
    add, write_grad = tg.Gradient.add, tg.write_grad

    def return_view(self, *args, **kwargs):
        grad = add(self, *args, **kwargs)
        return grad if grad is None or self.main_grad is None else self.main_grad.view(grad.shape)

    def write(out, a, b, scale, overwrite):
        write_grad(out, a, b, scale, mutant == "always overwrites")

    if mutant == "view":
        monkeypatch.setattr(tg.Gradient, "add", return_view)
    else:
        monkeypatch.setattr(tg, "write_grad", write)
    with pytest.raises(AssertionError):
        test_contract("in place, with dummy", "fc", 3)


def test_a_view_of_main_grad_counts_twice():
    """Shows why the dummy has memory of its own."""
    w = randn(8, 6, seed=2).requires_grad_()
    w.grad_added_to_main_grad = False
    grad = tg.Gradient("w", w, torch.zeros_like(w, requires_grad=False))
    add = grad.add
    grad.add = lambda *args: grad.main_grad if add(*args) is not None else None
    twin, sums = w.detach().clone().requires_grad_(), []
    for i in range(2):
        x = randn(5, 6, seed=i)
        plain_fc(x, twin)
        run_fc(x.requires_grad_(), w, grad)
        sums.append(twin.grad.clone())
    torch.testing.assert_close(grad.main_grad, sums[1], **NEAR)
    torch.testing.assert_close(w.grad, sums[0] + sums[1], **NEAR)  # the first micro-batch's twice


def test_matrices_of_banks():
    """Multiplies by two matrices at once of banks with padding: each gradient lands on its own matrix."""
    model = tg.GPT.__new__(tg.GPT)  # only its banks are needed
    torch.nn.Module.__init__(model)
    model.wait_for = lambda name: None
    model.qk_bank, model.vo_bank = randn(9, 4, 6, seed=1), randn(6, 6, 6, seed=2)  # of three layers' room
    banks = {"qk_bank": (model.qk_bank, 12), "vo_bank": (model.vo_bank, 6)}  # and rows of a matrix
    grads = {name: tg.Gradient(name, bank, torch.full_like(bank, 9.0)) for name, (bank, _) in banks.items()}
    twins = {name: bank.clone().requires_grad_() for name, (bank, _) in banks.items()}
    used = {"qk_bank": 2, "vo_bank": 4}  # matrices of two layers
    for step in range(2):
        for name, (bank, rows) in banks.items():
            matrices = model.matrices(name, rows, grads)
            assert len(matrices) == bank.numel() // 6 // rows
            for i in range(0, used[name], 2):
                x, dy = randn(5, 6, seed=10 * step + i).requires_grad_(), randn(5, 2 * rows, seed=100 + i)
                (torch.cat(tg.linear(x, *matrices[i : i + 2]), dim=1) * dy).sum().backward()
                w = twins[name].view(-1, 6)[i * rows : (i + 2) * rows]
                ((x.detach() @ w.T) * dy).sum().backward()
                torch.testing.assert_close(x.grad, dy @ w.detach(), **NEAR)
    for name, (bank, rows) in banks.items():
        n, want = used[name] * rows, twins[name].grad.view(-1, 6)
        found = grads[name].main_grad.view(-1, 6)
        torch.testing.assert_close(found[:n], want[:n], **NEAR)
        assert (found[n:] == 9).all()  # padding stays


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("overwrite", [True, False])
def test_write_grad(dtype, overwrite):
    """Writes a product to some rows, or adds it: rounded once."""
    a, b = randn(70, 5, seed=1).to(dtype), randn(70, 4, seed=2).to(dtype)
    old = randn(3, 6, 4, seed=3).to(dtype)
    grad = tg.Gradient("old", old, old.clone())
    grad.written = {0, 12} if overwrite else {7}
    assert grad.add(a, b, 7) is None
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
            grad = module.Gradient("w", w, torch.zeros_like(w))
            module.mlp(x, module.WeightSlice(w, grad=grad), module.WeightSlice(OTHER)).sum().backward()
            grads.append(grad.main_grad)
        assert grads[0].any() and torch.equal(*grads)
    finally:
        del sys.modules["my_copy"]


@pytest.mark.parametrize("sign_rows", [0, 1, 8192])
def test_rows_and_their_gradients_have_signs(cfg, sign_rows):
    """Checks the bigrams' rows against a loop over positions; without rows of signs, no sign is there."""
    _, model, optimizer = build(0, 1, replace(cfg, sign_rows=sign_rows))
    batches = batches_of(model.cfg, 0, 1)
    batch = batches.next().micro_batches[0]
    batches.loader.close()
    leaves = {}
    bigrams = model.lookup_sums(batch, leaves)
    db = randn(*bigrams.shape, seed=1)
    bigrams.backward(db)
    optimizer.add_row_grads(leaves, batch.index, model.signs)
    want, ones = torch.zeros_like(model.bigram_embed), torch.ones(model.cfg.dim)
    for t, row in enumerate(batch.hashed_rows[0].tolist()):
        sign = model.signs[batch.signs[0, t]] if sign_rows else ones
        assert set(sign.tolist()) <= {-1, 1} and torch.equal(bigrams[t], sign * model.bigram_embed[row])
        want[row] += sign * db[t]
    torch.testing.assert_close(optimizer.grads["bigram_embed"].take(), want, **NEAR)
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

    When the head's product is computed changes no bit. Where the banks' are added does: autograd rounds a
    product before it adds it, writing in place adds it inside the product's sum. Within 1e-12: eps is 2e-16,
    orthogonalize may blow that up a thousandfold. Adam moves any number by its rate, however small and so
    imprecise its gradient is.
    """
    runs, rates = {}, {row.name: row.lr_mul for row in cfg.params}
    for variant, changes in VARIANTS.items():
        runs[variant] = same_on_all_ranks(workers(4, train, replace(cfg, **changes), False))
    for variant in ("autograd", "in place"):
        assert runs[variant]["digests"] == runs[f"{variant}, delayed"]["digests"]
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs["autograd"]["losses"], rel=1e-12)
        for name, p in runs["autograd"]["final"].items():
            atol = 1e-13 * max(1, rates[name])
            torch.testing.assert_close(run["final"][name], p, rtol=1e-12, atol=atol, msg=name)


def take_only(optimizer):
    """Returns a stand-in for optimizer.step that only computes delayed products."""
    return lambda *_: [grad.take() for grad in optimizer.grads.values()]


def gradients_of_a_batch(cfg):
    """Returns the first batch's gradients, which parameters have a .grad, and which require one."""
    _, model, optimizer = build(0, 1, cfg)
    optimizer.step, batches = take_only(optimizer), batches_of(cfg, 0, 1)
    tg.train_step(model, optimizer, batches.next())
    batches.loader.close()
    grads = {name: grad.take().clone() for name, grad in optimizer.grads.items()}
    with_grad = {name for name, p in model.named_parameters() if p.grad is not None}
    return grads, with_grad, {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_micro_batch_gives_the_same_bits(cfg, dtype):
    """Compares the banks' products, of the same numbers; all other gradients have one form."""
    stages = tuple(replace(stage, batch_tokens=stage.batch_tokens // 8) for stage in cfg.stages)
    cfg = replace(with_dtype(cfg, dtype), microbatches=1, stages=stages)
    plain, *all_names = gradients_of_a_batch(replace(cfg, main_grad=False))
    in_place, *small_names = gradients_of_a_batch(cfg)
    tables = {"value_embeds", "bigram_embed", "embed"}
    small = set(plain) - tables - set(PRODUCTS)
    assert all_names == [small | set(BANKS)] * 2 and small_names == [small] * 2
    for name in plain:
        assert plain[name].any() and torch.equal(in_place[name], plain[name]), name


def autograds_gradients(cfg):
    """Returns the first batch's gradients as autograd sums all of them: in banks, tables and head too."""
    _, model, _ = build(0, 1, cfg)
    batches = batches_of(cfg, 0, 1)
    batch = batches.next()
    batches.loader.close()
    for p in model.parameters():
        p.requires_grad_()
    for micro_batch in batch.micro_batches:
        logits = model.hidden_states(micro_batch, batch.plan.windows) @ model.lm_head
        logp = (23 * torch.sigmoid((logits + 5) / 7.5)).log_softmax(-1)
        targets = model.loss_targets(micro_batch.targets, batch.plan)
        for weight, column in zip(batch.plan.loss_weights, targets.T):
            rows = (column >= 0).nonzero()[:, 0]
            (-weight / cfg.microbatches * logp[rows, column[rows]].sum()).backward(retain_graph=True)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_a_batch_are_autograds(cfg, variant):
    """Compares all parameters' sums over eight micro-batches, in fp64, with gradients of plain torch."""
    grads, *_ = gradients_of_a_batch(replace(cfg, **VARIANTS[variant]))
    want = autograds_gradients(cfg)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-11, msg=name)


def names_with_grad(cfg):
    """Returns the parameters with a .grad after every backward and every step of a run."""
    _, model, optimizer = build(0, 1, cfg)
    batches, seen, add_row_grads = batches_of(cfg, 0, 1), [], optimizer.add_row_grads

    def record(when):
        seen.append((when, {name for name, p in model.named_parameters() if p.grad is not None}))

    def record_backward(*args):
        record("backward")
        add_row_grads(*args)

    optimizer.add_row_grads = record_backward
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
    assert small == {row.name for row in cfg.params if row.kind == "plain"}
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
        if out.data_ptr() == optimizer.grads["lm_head"].main_grad.data_ptr():
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
            if tg.plan_step(cfg, step).updates(2):
                names = [row.name for row in cfg.params]
                first = names[: names.index("lm_head")]
                assert scatter[: len(first) + 1 + delayed] == [*first, *late, "lm_head"]
            else:
                assert scatter == [*BANKS, *late]


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
    large = [shapes[row.name] for row in cfg.params if row.kind != "plain"]
    large += [(n, 2 * d, d), (2 * n, d, d), (2 * L, cfg.mlp_dim, d)]
    flat = [(s[0], math.prod(s[1:])) for s in large] + [(math.prod(s[:-1]), s[-1]) for s in large]
    return {*large, *flat, *(s[::-1] for s in flat)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_as_large_as_a_bank_is_allocated_or_cleared(cfg, variant):
    """Checks forward, backward and accumulation of two micro-batches. Autograd allocates banks."""
    stages = tuple(replace(stage, batch_tokens=2 * 37) for stage in cfg.stages)  # 37 is no weight's size
    cfg = replace(
        cfg,
        microbatches=2,
        stages=stages,
        padded_vocab=70,
        bigram_vocab_size=350,
        mudd_dim=20,  # no bank's size either
        **VARIANTS[variant],
    )
    _, model, optimizer = build(0, 1, cfg)
    batches, recorder = batches_of(cfg, 0, 1), TensorRecorder()
    tg.train_step(model, optimizer, batches.next())
    optimizer.step = take_only(optimizer)
    batch = batches.next()
    with recorder:
        tg.train_step(model, optimizer, batch)
    batches.loader.close()
    allocated, large = recorder.allocated, large_shapes(cfg)
    assert (20, 70) in allocated  # a chunk's logits
    if variant.startswith("in place"):
        assert large.isdisjoint(allocated | recorder.cleared), large & (allocated | recorder.cleared)
    else:
        shapes = tg.param_shapes(cfg, 1)
        assert {(math.prod(shapes[name][:-1]), cfg.dim) for name in BANKS} <= allocated
        others = {shapes[row.name] for row in cfg.params if row.kind not in ("plain", "bank")}
        assert len(others) == 4 and not others & (allocated | recorder.cleared)
    assert (37, 70) not in allocated  # the logits of all tokens


@pytest.mark.slow
def test_the_bench_measures():
    """Finds less traffic for the banks' gradients, and as much for others; counts are not timings."""
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
    assert rows["in place"][2] <= 0.5 * rows["autograd"][2]
    assert rows["in place"][3:] == rows["autograd"][3:] and all(rows["in place"][3:])
