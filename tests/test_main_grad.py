"""Checks gradients written straight into main_grad: the contract, equality with autograd's, memory."""

# ruff: noqa: F811 (fixtures are imported)

import importlib.util
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import head_of, targets_of
from test_distributed import batches_of, build, cfg, first_batch, run_steps, with_dtype  # noqa: F401 (a fixture)

NEAR = dict(rtol=1e-12, atol=1e-13)
BANKS = ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank")
TABLES = ("value_embeds", "bigram_embed", "embed")


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------- the contract

# Each operation with one weight under test, and in plain torch. The head does its backward.


def run_head(x, w, head):
    model = tg.GPT.__new__(tg.GPT)  # only its head is needed
    torch.nn.Module.__init__(model)
    model.cfg, model.lm_head = replace(tg.RECORD, head_chunk=3, dtype="float64"), w
    model.wait_for, model.backend = lambda name: None, tg.TORCH_BACKEND
    targets = tg.loss_targets(TARGETS, 2, PREFIXES)
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=x.dtype)
    _, dx = model.head_loss_and_grad(x, targets, weights, head, 1.0)
    x.backward(dx)


def plain_head(x, w):
    z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
    logp = z.log_softmax(-1)
    rows = torch.arange(len(x))
    loss = -logp[rows, TARGETS].sum() - 0.5 * logp[rows[:-1], TARGETS[1:]].sum()
    prefixes = PREFIXES[TARGETS]
    (loss - 0.25 * logp[rows, prefixes][prefixes >= 0].sum()).backward()


def mlp(x, fc, proj):
    return tg.MLP.apply(x, (fc, proj), fc.w, proj.w, tg.TORCH_BACKEND, None)


OTHER = randn(8, 6, seed=1)
TARGETS, PREFIXES = torch.tensor([3, 0, 7, 7, 2]), torch.tensor([-1, 0, 0, 1, -1, 3, 2, 6])
OPERATIONS = {
    "linear": (lambda x, weight: tg.Linear.apply(x, weight, weight.w), lambda x, w: x @ w.T, (8, 6)),
    "fc": (
        lambda x, weight: mlp(x, weight, tg.Weight(OTHER)),
        lambda x, w: (x @ w.T).relu().square() @ OTHER,
        (8, 6),
    ),
    "proj": (
        lambda x, weight: mlp(x, tg.Weight(OTHER), weight),
        lambda x, w: (x @ OTHER.T).relu().square() @ w,
        (8, 6),
    ),
    "head": (run_head, plain_head, (6, 8)),
}
# fmt: off
CASES = {  # main_grad, weight has grad_added_to_main_grad
    "plain":                (False, False),
    "in place":             (True,  False),
    "in place, with dummy": (True,  True),
}
# fmt: on
FORMS, MATMULS = {"eager": None, "in a graph": "aot_eager"}, ("linear", "fc", "proj")


# The head's gradient is never autograd's: its backward runs in the forward.
@pytest.mark.parametrize(
    "form, case, operation",
    [(form, case, name) for case in CASES for name in MATMULS for form in FORMS]
    + [("eager", case, "head") for case in CASES if case != "plain"],
)
def test_contract(form, case, operation):
    """Checks two optimizer steps: the gradient is autograd's, in the one place that the case names.

    Hooks run once for each micro-batch, when its gradient is in place.
    """
    (in_place, dummy), (run, plain, shape) = CASES[case], OPERATIONS[operation]
    w = randn(*shape, seed=2)
    main_grad = torch.full(shape, torch.nan, dtype=w.dtype) if in_place else None  # NaN: to be overwritten
    param, fired = head_of(w), []
    param.main_grad = main_grad
    w.requires_grad_(not in_place or dummy)
    graphs = counters["stats"]["unique_graphs"]
    if FORMS[form]:
        torch._dynamo.reset()
        run = torch.compile(run, backend=FORMS[form], fullgraph=True)
    if dummy:
        w.grad_added_to_main_grad = False

        def hook(p):
            assert p.grad_added_to_main_grad and p.grad.shape == p.shape
            assert p.grad.untyped_storage().data_ptr() != main_grad.untyped_storage().data_ptr()
            assert torch.allclose(main_grad, twin.grad, **NEAR)
            p.grad, p.grad_added_to_main_grad = None, False
            fired.append(len(fired))

        w.register_post_accumulate_grad_hook(hook)

    for step in range(2):
        twin = w.detach().clone().requires_grad_()
        for i in range(3):
            x, y = randn(5, 6, seed=10 * step + i), randn(5, 6, seed=10 * step + i)
            want, args = (
                plain(x.requires_grad_(), twin),
                (w, param) if operation == "head" else (param.weight(),),
            )
            found = run(y.requires_grad_(), *args)
            for output in (want, found) if operation != "head" else ():
                output.square().sum().backward()
            torch.testing.assert_close(y.grad, x.grad, **NEAR)
            param.end_backward()
        assert len(fired) == (step + 1) * 3 * dummy
        found = param.grad()
        assert found is (main_grad if in_place else w.grad) and (w.grad is None) == in_place
        torch.testing.assert_close(found, twin.grad, **NEAR)
        param.clear()  # the optimizer's step
        assert w.grad is None
    # One graph overwrites and adds.
    assert counters["stats"]["unique_graphs"] == graphs + (FORMS[form] is not None)


def test_a_copy_of_the_script_leaves_its_operation():
    """A process may import two copies: torch would replace an operation of the same name."""
    spec = importlib.util.spec_from_file_location("my.copy", tg.__file__)
    sys.modules[spec.name] = copy = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(copy)
    del sys.modules[spec.name]
    assert torch.ops.train_gpt.write_grad.default is tg.write_grad_op


@pytest.mark.parametrize("written", [True, False])
def test_write_grad(written):
    """Writes a product to the first rows and columns, or adds it: rounded once."""
    shapes = (70, 5), (70, 4), (18, 6)
    a, b, old = (randn(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes))
    main_grad, want = old.clone(), old.double()
    tg.write_grad(main_grad, a, b, (), torch.tensor(written))
    want[:5, :4] = a.double().T @ b.double() + (want[:5, :4] if written else 0)
    torch.testing.assert_close(main_grad.double(), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
def test_mlp_in_bf16(in_place):
    """Roundings of 2^-9 leave an fp32 MLP near its fp32 result; its gradients are fp32, and summed."""
    shapes = (70, 8), (24, 8), (24, 8), (70, 8)
    inputs = [randn(*shape, seed=seed).float() for seed, shape in enumerate(shapes)]
    in_bf16 = {"mlp_dtype": torch.bfloat16, "relu_square_grad": tg.relu_square_grad_bf16}
    found = []
    for backend in (tg.TORCH_BACKEND, tg.TORCH_BACKEND._replace(**in_bf16)):
        h, *bank, dy = (t.clone() for t in inputs)
        h.requires_grad_()
        grads = [torch.full_like(w, torch.nan) for w in bank]
        for written in (False, True):
            if in_place:
                weights = [tg.Weight(w, grad, torch.tensor(written)) for w, grad in zip(bank, grads)]
            else:
                weights = [tg.Weight(w.requires_grad_()) for w in bank]
            casted = [t.to(backend.mlp_dtype or t.dtype) for t in (h, *bank)]
            y = tg.MLP.apply(casted[0], weights, *casted[1:], backend, None).float()
            y.backward(dy)
        grads = grads if in_place else [w.grad for w in bank]
        assert {t.dtype for t in (y, h.grad, *grads)} == {torch.float32}
        found.append([y.detach(), h.grad, *grads])
    for plain, rounded in zip(*found):
        assert 0 < (rounded - plain).norm() / plain.norm() < 2**-7


# ----------------------------------------------------------------------------------------------- whole models


def gradients_of_a_batch(cfg, marked=()):
    """Returns the first batch's gradients, and which parameters have a .grad."""
    _, model, optimizer = build(0, 1, cfg)
    for name in marked:
        model.get_parameter(name).grad_added_to_main_grad = False
    optimizer.step = lambda *_: None
    tg.train_step(model, optimizer, first_batch(cfg))
    with_grad = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {}
    for name, param in optimizer.params.items():
        if not isinstance(param, tg.SmallParams):
            grads[name] = param.p.grad if param.main_grad is None else param.main_grad
    return grads | with_grad, set(with_grad)


def autograds_gradients(cfg):
    """Returns the first batch's gradients as autograd sums all of them: in banks, tables and head too."""
    _, model, _ = build(0, 1, cfg)
    batch = first_batch(cfg)
    for p in model.parameters():
        p.requires_grad_()
    for micro_batch in batch.micro_batches:
        x = model.forward(micro_batch, batch.plan.windows)
        z = cfg.softcap.scale * torch.sigmoid((x @ model.lm_head + cfg.softcap.shift) / cfg.softcap.span)
        targets, logp = targets_of(model, micro_batch, batch.plan), z.log_softmax(-1)
        # The copy pointer, by all scores of a micro-batch at once.
        queries, T = model.pointer_inputs(x), len(x)
        documents = tg.document_numbers(micro_batch.cu_seqlens, T)
        back = torch.arange(T)[:, None] - torch.arange(T)
        seen = (documents[:, None] == documents) & (back > 0) & (back <= cfg.pointer_window)
        scores = (queries.q @ queries.k.T * cfg.pointer_dim**-0.5).masked_fill(~seen, -math.inf)
        sink, *weights = torch.cat([queries.sink_scores[:, None], scores], 1).softmax(1).split([1, T], 1)
        copied = (weights[0] * (micro_batch.inputs == micro_batch.targets[:, None])).sum(1)
        alpha, slot = logp[:, cfg.vocab_size].exp(), torch.arange(cfg.padded_vocab) == cfg.vocab_size
        by_head = z.masked_fill(slot, -math.inf).softmax(-1)[torch.arange(T), micro_batch.targets]
        mixed = by_head * (1 - alpha * (1 - sink[:, 0])) + alpha * copied + tg.PROB_FLOOR
        for k, (weight, column) in enumerate(zip(batch.plan.loss_weights, targets.T)):
            rows = (column >= 0).nonzero()[:, 0]
            right = logp[rows, column[rows]] if k else mixed.log()
            (-weight / cfg.microbatches * right.sum()).backward(retain_graph=True)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("changes", [{"main_grad": False}, {}])
def test_gradients_of_a_batch_are_autograds(cfg, changes):
    """Compares all parameters' sums over eight micro-batches, in fp64, with gradients of plain torch.

    Only what autograd sums has a .grad: small parameters, and banks without main_grad.
    """
    (grads, with_grad), want = gradients_of_a_batch(replace(cfg, **changes)), autograds_gradients(cfg)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-11, msg=name)
    small = {row.name for row in cfg.params if row.kind == "small"}
    assert with_grad == small | (set(BANKS) if "main_grad" in changes else set())


def test_autograds_gradient_of_a_marked_parameter(cfg, monkeypatch):
    """Without a main_grad autograd sums the gradient: another one, not initialized, must not follow."""
    cfg = replace(cfg, main_grad=False)
    want, _ = gradients_of_a_batch(cfg)
    monkeypatch.setattr(torch, "empty_like", lambda t, **options: torch.full_like(t, math.nan, **options))
    found, _ = gradients_of_a_batch(cfg, BANKS)
    assert all(torch.equal(found[name], want[name]) for name in BANKS)


def test_when_the_heads_product_runs(cfg, monkeypatch):
    """Checks that it runs at once, before its micro-batch's backward, on steps that do not send it too."""
    cfg = replace(cfg, head_chunk=1000, microbatches=2)
    exchange, model, optimizer = build(0, 1, cfg)
    batches, events, write_grad = batches_of(cfg, 0, 1), [], tg.write_grad

    def record(event, function):
        def recording(*args, **options):
            events.append(event or args[0])
            return function(*args, **options)

        return recording

    def record_head(out, *args):
        if out.data_ptr() == optimizer.params["lm_head"].main_grad.data_ptr():
            events.append("head's product")
        write_grad(out, *args)

    exchange.reduce = record(None, exchange.reduce)  # by parameter
    optimizer.step = record("step", optimizer.step)
    monkeypatch.setattr(tg, "write_grad", record_head)
    monkeypatch.setattr(torch.autograd, "backward", record("backward", torch.autograd.backward))
    micro_batch = ["head's product", "backward"]
    want = [*micro_batch * 2, "step", *BANKS]
    for step in range(2):  # the second one sends lm_head, too
        tg.train_step(model, optimizer, batches.next())
        assert [event for event in events if event in (*want, "lm_head")] == want + ["lm_head"] * step
        events.clear()
    batches.loader.close()


# ----------------------------------------------------------------------------------------------------- memory


def tensors_in(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class TensorRecorder(TorchDispatchMode):
    """Keeps the shapes of all tensors that operations allocated, and of those they cleared."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        old = {t.untyped_storage().data_ptr() for t in inputs}
        seen = [t for t in outputs if t.untyped_storage().data_ptr() not in old]
        if func.__name__.split(".")[0] in ("zero_", "fill_", "masked_fill_"):
            seen += inputs
        self.shapes |= {tuple(t.shape) for t in seen}
        return result


def record_shapes(rank, world_size, cfg):
    """Returns the shapes of what two steps allocate and clear, the second of which updates all."""
    _, model, optimizer = build(rank, world_size, cfg)
    steps = run_steps(model, optimizer)
    next(steps), next(steps)
    with TensorRecorder() as recorder:
        next(steps), next(steps)
    steps.close()
    return recorder.shapes


@pytest.mark.slow
def test_nothing_as_large_as_a_bank_or_table_is_allocated_or_cleared(workers, cfg):
    """Checks two ranks' forward, backward, exchange and update, which need no more than their shards.

    Of a table they do not even need a shard, but in Adam's arithmetic, on vectors. Autograd allocates banks.
    """
    stages = tuple(replace(stage, batch_tokens=2 * 37) for stage in cfg.stages)  # 37 is no weight's size
    sizes = dict(padded_vocab=280, bigram_vocab_size=1400, mudd_dim=20)
    cfg = replace(with_dtype(cfg, "bfloat16"), microbatches=2, stages=stages, **sizes)
    shapes = tg.param_shapes(cfg, 2)
    large = [shapes[row.name] for row in cfg.params if row.kind != "small"]
    large += [(rows // 2, *rest) for rows, *rest in (shapes[name] for name in TABLES)]
    flat = {(s[0], math.prod(s[1:])) for s in large} | {(math.prod(s[:-1]), s[-1]) for s in large}
    large = {*large, *flat, *(s[::-1] for s in flat)}
    for seen in workers(2, record_shapes, cfg):
        assert (20, 280) in seen and (37, 280) not in seen  # a chunk's logits, not those of all tokens
        assert large.isdisjoint(seen), large & seen
    for seen in workers(2, record_shapes, replace(cfg, main_grad=False)):
        assert {(math.prod(shapes[name][:-1]), cfg.dim) for name in BANKS} <= seen
