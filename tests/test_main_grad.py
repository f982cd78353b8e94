"""Gradients written straight into main_grad: the contract, equality with autograd's, delayed, and that nothing as large as a
bank is made on the way."""
import importlib.util
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
from test_distributed import batches_of, build, cfg, same_on_all_ranks, train  # noqa: F401 (cfg is a fixture)

NEAR = dict(rtol=1e-12, atol=1e-13)
PRODUCTS = ("qk_bank", "vo_bank", "mlp_bank", "lm_head")


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- the contract

# Each operation with one weight under watch: its forward and backward through `grad`, and in plain torch.

def run_linear(x, w, grad):
    tg.linear(x, torch.tensor(0.7, dtype=x.dtype, requires_grad=True), [tg.Part(w, 0, grad)]).square().sum().backward()


def plain_linear(x, w):
    (x @ (0.7 * w).T).square().sum().backward()


def run_fc(x, w, grad):
    tg.mlp(x, tg.Part(w, 0, grad), tg.Part(OTHER)).square().sum().backward()


def plain_fc(x, w):
    ((x @ w.T).relu().square() @ OTHER).square().sum().backward()


def run_proj(x, w, grad):
    tg.mlp(x, tg.Part(OTHER), tg.Part(w, 0, grad)).square().sum().backward()


def plain_proj(x, w):
    ((x @ OTHER.T).relu().square() @ w).square().sum().backward()


def run_head(x, w, grad):
    model = tg.GPT.__new__(tg.GPT)  # its head is all that is needed
    torch.nn.Module.__init__(model)
    model.cfg, model.lm_head = replace(tg.CPU, head_chunk=3, dtype="float64"), w
    model.in_flight, model.ops = {}, tg.PLAIN
    _, begin = model.head(x, TARGETS, (1.0, 0.5), grad)
    torch.autograd.backward(*zip(*begin))


def plain_head(x, w):
    z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
    logp = z.log_softmax(-1)
    rows = torch.arange(len(x))
    (-logp[rows, TARGETS].sum() - 0.5 * logp[rows[:-1], TARGETS[1:]].sum()).backward()


OTHER = randn(8, 6, seed=1)
TARGETS = torch.tensor([3, 0, 7, 7, 2])
OPERATIONS = {"linear": (run_linear, plain_linear, (8, 6)), "fc": (run_fc, plain_fc, (8, 6)),
              "proj": (run_proj, plain_proj, (8, 6)), "head": (run_head, plain_head, (6, 8))}
ROWS = {  # main_grad, delayed, weight has grad_added_to_main_grad
    "plain": (False, False, False), "delayed": (False, True, False),
    "in place": (True, False, False), "in place, with dummy": (True, False, True),
    "in place, delayed": (True, True, False), "in place, delayed, with dummy": (True, True, True)}


class Given(tg.WeightGrad):
    """Notes where the memory of what it hands to autograd lies; a reference would make autograd copy it."""

    given = None

    def give(self, *args, **more):
        given = super().give(*args, **more)
        self.given = None if given is None else given.data_ptr()
        return given


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("row", ROWS)
def test_contract(row, operation, micro_batches):
    """Two optimizer steps. The gradient is autograd's, in the one place that the row names, and not in the other."""
    (in_place, delayed, dummy), (run, plain, shape) = ROWS[row], OPERATIONS[operation]
    w = randn(*shape, seed=2).requires_grad_(not in_place or dummy)
    grad = Given(w, torch.full(shape, torch.nan, dtype=w.dtype) if in_place else None)  # what was there is overwritten
    grad.delayed, fired = delayed, []
    if dummy:
        w.grad_added_to_main_grad = False

        def hook(p):  # drops the dummy, which autograd has kept as it came
            assert p.grad_added_to_main_grad and p.grad.shape == p.shape and p.grad.data_ptr() == grad.given
            assert p.grad.untyped_storage().data_ptr() != grad.main_grad.untyped_storage().data_ptr()
            p.grad, p.grad_added_to_main_grad = None, False
            fired.append(len(fired))
        w.register_post_accumulate_grad_hook(hook)

    for step in range(2):
        twin = w.detach().clone().requires_grad_()
        for i in range(micro_batches):
            x = randn(5, 6, seed=10 * step + i)
            plain(x, twin)
            run(x.requires_grad_(), w, grad)
            grad.written()
            gave = dummy or row == "plain" and operation != "head"  # which makes all of it before autograd is asked
            assert (grad.given is not None) == gave
        assert len(fired) == (step + 1) * micro_batches * dummy
        if delayed:
            assert len(grad.queue) == micro_batches * (3 if operation == "head" else 2) and w.grad is None  # two chunks
            assert not in_place or step > 0 or grad.main_grad.isnan().all()
            grad.run()
            assert not grad.queue
            grad.run()  # has nothing to do
        found, other = (grad.main_grad, w.grad) if in_place else (w.grad, grad.main_grad)
        torch.testing.assert_close(found, twin.grad, **NEAR)
        assert other is None
        grad.fresh, w.grad = True, None  # the optimizer's step


@pytest.mark.parametrize("culprit", ["view", "never overwrites", "always overwrites"])
def test_contract_fails_for(culprit, monkeypatch):
    """The mistakes that the test above is there to find; the first is the one that TransformerEngine's review found."""
    give, write = tg.WeightGrad.give, tg.write_grad
    if culprit == "view":
        def give_view(self, *args, **more):
            given = give(self, *args, **more)
            return given if given is None or self.main_grad is None else self.main_grad.view(given.shape)
        monkeypatch.setattr(tg.WeightGrad, "give", give_view)
    else:
        monkeypatch.setattr(tg, "write_grad", lambda main_grad, start, a, b, fresh, scale: write(
            main_grad, start, a, b, culprit == "always overwrites", scale))
    with pytest.raises(AssertionError):
        test_contract("in place, with dummy", "fc", 3)


def test_a_view_of_main_grad_counts_twice():
    """Why the dummy is memory of its own."""
    w = randn(8, 6, seed=2).requires_grad_()
    w.grad_added_to_main_grad = False
    grad = tg.WeightGrad(w, torch.zeros_like(w, requires_grad=False))
    give = grad.give
    grad.give = lambda *args: grad.main_grad if give(*args) is not None else None
    twin, sums = w.detach().clone().requires_grad_(), []
    for i in range(2):
        x = randn(5, 6, seed=i)
        plain_fc(x, twin)
        run_fc(x.requires_grad_(), w, grad)
        grad.written()
        sums.append(twin.grad.clone())
    torch.testing.assert_close(grad.main_grad, sums[1], **NEAR)
    torch.testing.assert_close(w.grad, sums[0] + sums[1], **NEAR)  # the first micro-batch's twice


def test_parts_of_a_bank():
    """Two parts as one operand, under one scale: each gradient lands on its own rows, the scale's is that of plain torch."""
    a, b, scale = randn(3, 4, 6, seed=1), randn(2, 2, 3, 6, seed=2), torch.tensor(-1.3, dtype=torch.float64, requires_grad=True)
    grads = [tg.WeightGrad(bank, torch.full_like(bank, 9.0)) for bank in (a, b)]
    twins = [bank.clone().requires_grad_() for bank in (a, b)]
    twin_scale, h = scale.detach().clone().requires_grad_(), randn(5, 6, seed=3).requires_grad_()
    for i in range(2):
        up = randn(5, 7, seed=4 + i)
        (h.detach() @ (twin_scale * torch.cat([twins[0][1], twins[1][1, 0]])).T * up).sum().backward()
        (tg.linear(h, scale, [tg.Part(a[1], 4, grads[0]), tg.Part(b[1, 0], 6, grads[1])]) * up).sum().backward()
        for grad in grads:
            grad.written()
    torch.testing.assert_close(scale.grad, twin_scale.grad, **NEAR)
    for grad, twin, mine in zip(grads, twins, (slice(4, 8), slice(6, 9))):
        want = torch.full_like(twin, 9.0).view(-1, 6)  # rows of other layers are left alone
        want[mine] = twin.grad.view(-1, 6)[mine]
        torch.testing.assert_close(grad.main_grad.view(-1, 6), want, **NEAR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("overwrite", [True, False])
def test_write_grad(dtype, overwrite):
    """A product, or a gradient that is there, on some rows; a product that is added is rounded once."""
    a, b, old = randn(70, 5, seed=1).to(dtype), randn(70, 4, seed=2).to(dtype), randn(3, 6, 4, seed=3).to(dtype)
    product = a.double().T @ b.double()
    for second, bound in ((b, 1), (torch.tensor(-0.3), 2)):  # the latter's first factor is rounded besides
        main_grad = old.clone()
        tg.write_grad(main_grad, 7, a if second.dim() else product.to(dtype), second, overwrite)
        flat, was = main_grad.view(-1, 4), old.view(-1, 4)
        want = product * (1 if second.dim() else second.double()) + (0 if overwrite else was[7:12].double())
        inside = 40 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # the product's sum
        allowed = (bound * torch.finfo(dtype).eps / 2 + inside) * want.abs().max()
        assert (flat[7:12].double() - want).abs().max() <= allowed
        assert torch.equal(flat[:7], was[:7]) and torch.equal(flat[12:], was[12:])


def test_a_second_copy_of_the_script_can_be_imported():
    """As a script under its own name beside its copy in a test: both write gradients afterwards."""
    spec = importlib.util.spec_from_file_location("my_copy", Path(tg.__file__))
    copy, gradients = importlib.util.module_from_spec(spec), []
    sys.modules["my_copy"] = copy  # dataclasses look there
    try:
        spec.loader.exec_module(copy)
        for module in (tg, copy):
            x, w = randn(5, 6, seed=1).requires_grad_(), randn(8, 6, seed=2)
            grad = module.WeightGrad(w, torch.zeros_like(w))
            module.mlp(x, module.Part(w, 0, grad), module.Part(OTHER)).sum().backward()
            gradients.append(grad.main_grad)
        assert gradients[0].any() and torch.equal(*gradients)
    finally:
        del sys.modules["my_copy"]


# --------------------------------------------------------------------------------------------------------- whole runs

FORMS = {"autograd": dict(main_grad=False), "autograd, delayed": dict(main_grad=False, delay_head_grad=True),
         "in place": dict(main_grad=True), "in place, delayed": dict(main_grad=True, delay_head_grad=True)}


@pytest.mark.slow
def test_all_forms_train_alike(workers, cfg):  # noqa: F811
    """Runs of 4 ranks through all stages and the split, with two micro-batches a rank, in fp64. When the product is computed
    changes no bit. Where it is added does: autograd rounds a product before it adds it, and writing in place adds it inside
    the product's sum; within 1e-12, for eps is 2e-16 and polar may blow that up a thousandfold."""
    runs = {form: same_on_all_ranks(workers(4, train, replace(cfg, **changes), False)) for form, changes in FORMS.items()}
    assert runs["in place"]["digests"] == runs["in place, delayed"]["digests"]
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs["autograd"]["losses"], rel=1e-12)
        for name, p in runs["autograd"]["final"].items():
            torch.testing.assert_close(run["final"][name], p, rtol=1e-12, atol=1e-13, msg=name)


def gradients_of_a_batch(rank, world, cfg):
    """Of every parameter, after the first batch's backward; which parameters had a .grad, and which require one."""
    _, _, model, optimizer = build(rank, world, cfg)
    optimizer.step = lambda now: [grad.run() for grad in optimizer.weight_grads.values()]
    tg.train_step(model, optimizer, batches_of(cfg, rank, world).next())
    return ({name: optimizer.gradient(name).clone() for name in optimizer.params},
            {name for name, p in model.named_parameters() if p.grad is not None},
            {name for name, p in model.named_parameters() if p.requires_grad})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_micro_batch_gives_the_same_bits(cfg, dtype):  # noqa: F811
    """For products of the same numbers. (Tables differ in bf16: autograd adds a row's gradients in it, we in fp32.)"""
    stages = tuple(replace(stage, tokens=stage.tokens // 8) for stage in cfg.stages)
    cfg = replace(cfg, dtype=dtype, polar_dtype=dtype, slices=1, stages=stages)
    plain, had, required = gradients_of_a_batch(0, 1, replace(cfg, main_grad=False))
    own, small, in_need = gradients_of_a_batch(0, 1, cfg)
    large = {*PRODUCTS, "value_embeds", "bigram_embed", "embed"}
    assert had == required == set(plain) and small == in_need == set(plain) - large
    for name in set(plain) - large | set(PRODUCTS):
        assert plain[name].any() and torch.equal(own[name], plain[name]), name
    for name in large - set(PRODUCTS):
        torch.testing.assert_close(own[name], plain[name], rtol=2**-6 if dtype == "bfloat16" else 1e-6, atol=1e-9)


def kinds_of_grad(rank, world, cfg):
    """Names of parameters with a .grad, after every backward and every step of a run."""
    _, _, model, optimizer = build(rank, world, cfg)
    batches, seen, collect = batches_of(cfg, rank, world), [], optimizer.collect
    with_grad = lambda: {name for name, p in model.named_parameters() if p.grad is not None}

    def watch(*args):
        seen.append(("backward", with_grad()))
        collect(*args)

    optimizer.collect = watch
    for step in range(cfg.steps):
        tg.train_step(model, optimizer, batches.next())
        seen.append((step, with_grad()))
    batches.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_only_small_parameters_have_a_grad(cfg, delayed):  # noqa: F811
    small = {row.name for row in cfg.params if not row.in_place}
    assert small == {"scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "post_lambdas", "x0_lambdas",
                     "bigram_lambdas", "resid_lambdas"}
    seen = kinds_of_grad(0, 1, replace(cfg, delay_head_grad=delayed))
    assert len(seen) == 9 * cfg.steps
    for when, names in seen:
        assert names == (set() if when in (1, 3, 5, 7) else small), when


# ------------------------------------------------------------------------------------------------------------ delaying

def events_of(rank, world, cfg):
    """What is launched and computed in each step's scatter, in order."""
    _, exchange, model, optimizer = build(rank, world, cfg)
    batches, events, steps = batches_of(cfg, rank, world), [], []
    reduce, write, scatter, backward = exchange.reduce, tg.write_grad, optimizer.scatter, torch.autograd.backward
    exchange.reduce = lambda name, *args: (events.append(name), reduce(name, *args))[1]
    optimizer.scatter = lambda now: (events.append("scatter"), scatter(now))[1]

    def writing(main_grad, *args):
        if main_grad is optimizer.weight_grads["lm_head"].main_grad:
            events.append("head's product")
        write(main_grad, *args)

    tg.write_grad, torch.autograd.backward = writing, lambda *args: (events.append("backward"), backward(*args))[1]
    try:
        for _ in range(cfg.steps):
            tg.train_step(model, optimizer, batches.next())
            steps.append(list(events))
            events.clear()
    finally:
        tg.write_grad, torch.autograd.backward = write, backward
    batches.close()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_when_the_heads_product_runs(workers, cfg, delayed):  # noqa: F811
    """At once, before its micro-batch's backward; or the last one where the scatter order has lm_head, behind the banks, on
    steps that do not send it too."""
    for steps in workers(2, events_of, replace(cfg, delay_head_grad=delayed, head_chunk=1000)):
        for step, events in enumerate(steps):
            before, scatter = events[:events.index("scatter")], events[events.index("scatter") + 1:]
            assert before == ["head's product", "backward"] * 3 + (["backward"] if delayed else ["head's product", "backward"])
            late = ["head's product"] if delayed else []
            if tg.plan(cfg, step).do_adam:
                assert scatter[:9 + delayed] == [*cfg.scatter_order[:8], *late, "lm_head"]
            else:
                assert scatter == ["qk_bank", "vo_bank", "mlp_bank", *late]


@pytest.mark.slow
def test_an_order_with_the_head_first(cfg):  # noqa: F811
    """Gives the same bits: whatever the order, the product has run when it is sent."""
    order = ("lm_head", *(name for name in reversed(cfg.scatter_order) if name != "lm_head"))
    want, got = (train(0, 1, replace(cfg, delay_head_grad=True, **more)) for more in ({}, {"scatter_order": order}))
    assert got["digests"] == want["digests"]


# ------------------------------------------------------------------------------------------------------------- memory

class Made(TorchDispatchMode):
    """Shapes of all tensors that operations made, and of those they cleared."""

    def __init__(self):
        super().__init__()
        self.made, self.cleared = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fresh = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in old]
        self.made |= {tuple(t.shape) for t in fresh}
        if func.__name__.split(".")[0] in ("zero_", "fill_", "zeros", "zeros_like", "full"):
            self.cleared |= {tuple(t.shape) for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)}
        return result


def large_shapes(cfg):
    """Of banks, of their used layers, of head and tables, seen as they are, flat and transposed."""
    shapes, n, L, d = tg.param_shapes(cfg, 1), 10, 11, cfg.dim
    whole = [shapes[row.name] for row in cfg.params if row.in_place]
    whole += [(n, 2 * d, d), (2 * n, d, d), (2 * L, cfg.mlp_dim, d)]
    flat = [(s[0], int(torch.tensor(s[1:]).prod())) for s in whole] + [(int(torch.tensor(s[:-1]).prod()), s[-1]) for s in whole]
    return {*whole, *flat, *(s[::-1] for s in flat)}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_as_large_as_a_bank_is_made_or_cleared(cfg, form):  # noqa: F811
    """In forward, backward and accumulation of a step's two micro-batches. Autograd makes what the watch looks for."""
    stages = tuple(replace(stage, tokens=2 * 37) for stage in cfg.stages)  # 37 is no weight's size
    cfg = replace(cfg, slices=2, stages=stages, padded_vocab=70, bigram_rows=350, **FORMS[form])
    _, _, model, optimizer = build(0, 1, cfg)
    batches, made = batches_of(cfg, 0, 1), Made()
    tg.train_step(model, optimizer, batches.next())
    optimizer.step = lambda now: [grad.run() for grad in optimizer.weight_grads.values()]
    batch = batches.next()
    with made:
        tg.train_step(model, optimizer, batch)
    batches.close()
    large = large_shapes(cfg)
    assert (3 * cfg.dim, cfg.dim) in made.made and (20, 70) in made.made  # it sees operands, and a chunk's logits
    if form.startswith("in place"):
        assert not large & (made.made | made.cleared)
    else:
        shapes = tg.param_shapes(cfg, 1)
        assert {shapes[name] for name in ("qk_bank", "vo_bank", "bigram_embed", "embed")} <= made.made
        assert (22, cfg.mlp_dim, cfg.dim) in made.made
    assert (37, 70) not in made.made  # the logits of all tokens


@pytest.mark.slow
def test_the_bench_measures():
    """Less memory and less traffic for gradients of every kind; counts are not timings."""
    root = Path(__file__).resolve().parent.parent
    options = ["--sizes", "cpu", "--micro-batches", "1", "--pairs", "2"]
    out = subprocess.run([sys.executable, root / "bench" / "grad_accumulation.py", *options],
                         capture_output=True, text=True, check=True).stdout
    rows = {form: list(map(float, re.search(rf"^cpu +1 +1 {form} +([\d.]+) +\(\d+\) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) ",
                                            out, re.M).groups())) for form in ("autograd", "in place", "delayed")}
    assert rows["in place"] == rows["delayed"] and rows["autograd"][1] == 1
    assert rows["in place"][1] <= 0.75
    assert all(own < plain for own, plain in zip(rows["in place"], rows["autograd"]))
