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
BANKS = [row.name for row in tg.PARAMS if row.kind == "bank"]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------- the contract

# Each operation with one weight under test, and in plain torch. The head does its backward.


def run_head(x, w, head):
    model = tg.GPT.__new__(tg.GPT)  # only its head is needed
    torch.nn.Module.__init__(model)
    model.cfg = replace(tg.RECORD, head_chunk=3, dtype="float64")
    model.lm_head = w
    model.backend = tg.TORCH_BACKEND
    targets = tg.loss_targets(TARGETS, 2, PREFIXES)
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=x.dtype)
    _, dx = model.head_loss_and_grad(x, targets, weights, head, 1.0)
    x.backward(dx)


def plain_head(x, w):
    cap = tg.RECORD.softcap
    z = cap.scale * torch.sigmoid((x @ w + cap.shift) / cap.span)
    logp = z.log_softmax(-1)
    rows = torch.arange(len(x))
    loss = -logp[rows, TARGETS].sum() - 0.5 * logp[rows[:-1], TARGETS[1:]].sum()
    prefixes = PREFIXES[TARGETS]
    (loss - 0.25 * logp[rows, prefixes][prefixes >= 0].sum()).backward()


TARGETS = torch.tensor([3, 0, 7, 7, 2])
PREFIXES = torch.tensor([-1, 0, 0, 1, -1, 3, 2, 6])
OTHER = randn(8, 6, seed=1)  # the MLP's weight that is not under test


def run_linear(x, weight):
    return tg.Linear.apply(x, weight, weight.w)


def plain_linear(x, w):
    return x @ w.T


def run_mlp(x, fc, proj):
    return tg.MLP.apply(x, (fc, proj), fc.w, proj.w, tg.TORCH_BACKEND, None)


def run_fc(x, weight):
    return run_mlp(x, weight, tg.Weight(OTHER))


def plain_fc(x, w):
    return tg.relu_square(x, w) @ OTHER


def run_proj(x, weight):
    return run_mlp(x, tg.Weight(OTHER), weight)


def plain_proj(x, w):
    return tg.relu_square(x, OTHER) @ w


OPERATIONS = {  # how the script runs it, in plain torch, the weight's shape
    "linear": (run_linear, plain_linear, (8, 6)),
    "fc": (run_fc, plain_fc, (8, 6)),
    "proj": (run_proj, plain_proj, (8, 6)),
    "head": (run_head, plain_head, (6, 8)),
}
# fmt: off
CASES = {  # main_grad, weight has grad_added_to_main_grad
    "plain":                (False, False),
    "in place":             (True,  False),
    "in place, with dummy": (True,  True),
}
# fmt: on
FORMS = {"eager": None, "in a graph": "aot_eager"}  # torch.compile's backend
CONTRACTS = []
for case in CASES:
    for operation in ("linear", "fc", "proj"):
        for form in FORMS:
            CONTRACTS.append((form, case, operation))
    # The head's gradient is never autograd's: its backward runs in the forward.
    if case != "plain":
        CONTRACTS.append(("eager", case, "head"))


def differentiate(operation, run, x, *weights):
    """Differentiates an operation, with the sum of squares as the loss; the head does its own backward."""
    y = run(x, *weights)
    if operation != "head":
        y.square().sum().backward()


@pytest.mark.forms("a gradient by hand (relu_square_grad, MLP.backward, the head's) and autograd's")
@pytest.mark.parametrize("form, case, operation", CONTRACTS)
def test_contract(form, case, operation):
    """Checks two optimizer steps: the gradient is autograd's, in the one place that the case names.

    Hooks run once for each micro-batch, when its gradient is in place.
    """
    in_place, dummy = CASES[case]
    run, plain, shape = OPERATIONS[operation]
    w = randn(*shape, seed=2)
    main_grad = None
    if in_place:
        main_grad = torch.full(shape, torch.nan, dtype=w.dtype)  # to be overwritten
    param = head_of(w)
    param.main_grad = main_grad
    w.requires_grad_(not in_place or dummy)
    graphs = counters["stats"]["unique_graphs"]
    if FORMS[form]:
        torch._dynamo.reset()
        run = torch.compile(run, backend=FORMS[form], fullgraph=True)
    fired = 0
    if dummy:
        w.grad_added_to_main_grad = False

        def hook(p):
            nonlocal fired
            assert p.grad_added_to_main_grad and p.grad.shape == p.shape
            assert p.grad.untyped_storage().data_ptr() != main_grad.untyped_storage().data_ptr()
            assert torch.allclose(main_grad, twin.grad, **NEAR)
            p.grad = None
            p.grad_added_to_main_grad = False
            fired += 1

        w.register_post_accumulate_grad_hook(hook)

    for step in range(2):
        twin = w.detach().clone().requires_grad_()
        for i in range(3):
            x = randn(5, 6, seed=10 * step + i)
            y = x.clone()
            differentiate(operation, plain, x.requires_grad_(), twin)
            if operation == "head":
                differentiate(operation, run, y.requires_grad_(), w, param)
            else:
                differentiate(operation, run, y.requires_grad_(), param.weight())
            torch.testing.assert_close(y.grad, x.grad, **NEAR)
            param.end_backward()
        if dummy:
            assert fired == (step + 1) * 3
        found = param.grad()
        if in_place:
            assert found is main_grad and w.grad is None
        else:
            assert found is w.grad and found is not None
        torch.testing.assert_close(found, twin.grad, **NEAR)
        param.clear()  # the optimizer's step
        assert w.grad is None
    # One graph overwrites and adds.
    assert counters["stats"]["unique_graphs"] == graphs + (FORMS[form] is not None)


def test_a_copy_of_the_script_leaves_its_operation():
    """A process may import two copies: torch would replace an operation of the same name."""
    spec = importlib.util.spec_from_file_location("my.copy", tg.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # dataclasses look there
    spec.loader.exec_module(copy)
    del sys.modules[spec.name]
    assert torch.ops.train_gpt.write_grad.default is tg.write_grad_op


@pytest.mark.parametrize("written", [True, False])
def test_write_grad(written):
    """Writes a product to the first rows and columns, or adds it: rounded once."""
    a = randn(70, 5, seed=0).bfloat16()
    b = randn(70, 4, seed=1).bfloat16()
    old = randn(18, 6, seed=2).bfloat16()
    main_grad = old.clone()
    tg.write_grad(main_grad, a, b, (), torch.tensor(written))
    want = old.double()
    if not written:
        want[:5, :4] = 0
    want[:5, :4] += a.double().T @ b.double()
    torch.testing.assert_close(main_grad.double(), want, rtol=2**-8, atol=1e-4)


def run_mlp_twice(backend, in_place):
    """Runs forward and backward of an fp32 MLP twice; returns y and the gradients of h, fc and proj."""
    h = randn(70, 8, seed=0).float().requires_grad_()
    fc = randn(24, 8, seed=1).float()
    proj = randn(24, 8, seed=2).float()
    dy = randn(70, 8, seed=3).float()
    fc_grad = torch.full_like(fc, torch.nan)
    proj_grad = torch.full_like(proj, torch.nan)
    dtype = backend.mlp_dtype or torch.float32
    for written in (False, True):
        if in_place:
            flag = torch.tensor(written)
            weights = tg.Weight(fc, fc_grad, flag), tg.Weight(proj, proj_grad, flag)
        else:
            weights = tg.Weight(fc.requires_grad_()), tg.Weight(proj.requires_grad_())
        y = tg.MLP.apply(h.to(dtype), weights, fc.to(dtype), proj.to(dtype), backend, None).float()
        y.backward(dy)
    if in_place:
        return [y.detach(), h.grad, fc_grad, proj_grad]
    return [y.detach(), h.grad, fc.grad, proj.grad]


@pytest.mark.parametrize("in_place", [True, False])
def test_mlp_in_bf16(in_place):
    """Roundings of 2^-9 leave an fp32 MLP near its fp32 result; its gradients are fp32, and summed."""
    in_bf16 = tg.TORCH_BACKEND._replace(mlp_dtype=torch.bfloat16, relu_square_grad=tg.relu_square_grad_bf16)
    plain = run_mlp_twice(tg.TORCH_BACKEND, in_place)
    rounded = run_mlp_twice(in_bf16, in_place)
    for want, found in zip(plain, rounded):
        assert want.dtype == found.dtype == torch.float32
        assert 0 < (found - want).norm() / want.norm() < 2**-7


# ----------------------------------------------------------------------------------------------- whole models


def gradients_of_a_batch(cfg, marked=()):
    """Returns the first batch's gradients, and which parameters have a .grad."""
    _, model, optimizer = build(0, 1, cfg)
    for name in marked:
        model.get_parameter(name).grad_added_to_main_grad = False
    optimizer.step = lambda *_: None
    tg.train_step(model, optimizer, first_batch(cfg))
    grads = {}
    with_grad = set()
    for name, param in optimizer.params.items():
        if not isinstance(param, tg.SmallParams) and param.main_grad is not None:
            grads[name] = param.main_grad
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads[name] = p.grad
            with_grad.add(name)
    return grads, with_grad


def plain_pointer(model, x, micro_batch):
    """Computes the copy pointer by all scores of a micro-batch, (T, T), at once.

    Returns the sink's probability, (T,), and that of copying the right target, (T,).
    """
    cfg = model.cfg
    T = len(x)
    queries = model.pointer_inputs(x)
    documents = tg.document_numbers(micro_batch.cu_seqlens, T)
    back = torch.arange(T)[:, None] - torch.arange(T)
    seen = (documents[:, None] == documents) & (back > 0) & (back <= cfg.pointer_window)
    scores = queries.q @ queries.k.T * cfg.pointer_dim**-0.5
    scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.cat([queries.sink_scores[:, None], scores], 1).softmax(1)
    is_right = micro_batch.inputs == micro_batch.targets[:, None]
    return probs[:, 0], (probs[:, 1:] * is_right).sum(1)


def plain_losses(model, x, micro_batch, plan):
    """Returns a micro-batch's loss of each target column, summed over tokens, in plain torch."""
    cfg = model.cfg
    z = cfg.softcap.scale * torch.sigmoid((x @ model.lm_head + cfg.softcap.shift) / cfg.softcap.span)
    logp = z.log_softmax(-1)
    # The next token is the head's or a copy.
    sink, copied = plain_pointer(model, x, micro_batch)
    alpha = logp[:, cfg.vocab_size].exp()
    is_gate = torch.arange(cfg.padded_vocab) == cfg.vocab_size
    by_head = z.masked_fill(is_gate, -math.inf).softmax(-1)[torch.arange(len(x)), micro_batch.targets]
    mixed = by_head * (1 - alpha * (1 - sink)) + alpha * copied + tg.PROB_FLOOR
    losses = [-mixed.log().sum()]
    for column in targets_of(model, micro_batch, plan).T[1:]:
        rows = (column >= 0).nonzero()[:, 0]
        losses.append(-logp[rows, column[rows]].sum())
    return losses


def autograds_gradients(cfg):
    """Returns the first batch's gradients as autograd sums all of them: in banks, tables and head too."""
    _, model, _ = build(0, 1, cfg)
    batch = first_batch(cfg)
    for p in model.parameters():
        p.requires_grad_()
    for micro_batch in batch.micro_batches:
        x = model.forward(model.look_up(micro_batch, training=False), micro_batch, batch.plan.windows)
        losses = plain_losses(model, x, micro_batch, batch.plan)
        assert len(losses) == len(batch.plan.loss_weights)
        total = sum(weight * loss for weight, loss in zip(batch.plan.loss_weights, losses))
        (total / cfg.microbatches).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.forms("a gradient by hand (the MLP's, the head's, the pointer's, a table's) and autograd's")
@pytest.mark.parametrize("changes", [{"main_grad": False}, {}])
def test_gradients_of_a_batch_are_autograds(cfg, changes):
    """Compares all parameters' sums over eight micro-batches, in fp64, with gradients of plain torch.

    Only what autograd sums has a .grad: small parameters, and banks without main_grad.
    """
    grads, with_grad = gradients_of_a_batch(replace(cfg, **changes))
    want = autograds_gradients(cfg)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-11, msg=name)
    kinds = ["small"]
    if "main_grad" in changes:
        kinds.append("bank")
    assert with_grad == {row.name for row in cfg.params if row.kind in kinds}


def test_autograds_gradient_of_a_marked_parameter(cfg, monkeypatch):
    """Without a main_grad autograd sums the gradient: another one, not initialized, must not follow."""
    cfg = replace(cfg, main_grad=False)
    want, _ = gradients_of_a_batch(cfg)
    monkeypatch.setattr(torch, "empty_like", lambda t, **options: torch.full_like(t, math.nan, **options))
    found, _ = gradients_of_a_batch(cfg, BANKS)
    for name in BANKS:
        assert torch.equal(found[name], want[name]), name


def test_when_the_heads_product_runs(cfg, monkeypatch):
    """Checks that it runs at once, before its micro-batch's backward, on steps that do not send it too."""
    cfg = replace(cfg, head_chunk=1000, microbatches=2)
    exchange, model, optimizer = build(0, 1, cfg)
    batches = batches_of(cfg, 0, 1)
    reduce = exchange.reduce
    write_grad = tg.write_grad
    events = []

    def record(event, function):
        def recording(*args, **options):
            events.append(event)
            return function(*args, **options)

        return recording

    def record_reduce(name, *args, **options):
        if name in [*BANKS, "lm_head"]:
            events.append(name)
        return reduce(name, *args, **options)

    def record_head(out, *args):
        if out.data_ptr() == optimizer.params["lm_head"].main_grad.data_ptr():
            events.append("head's product")
        write_grad(out, *args)

    exchange.reduce = record_reduce
    optimizer.step = record("step", optimizer.step)
    monkeypatch.setattr(tg, "write_grad", record_head)
    monkeypatch.setattr(torch.autograd, "backward", record("backward", torch.autograd.backward))
    two_micro_batches = ["head's product", "backward"] * 2
    want = two_micro_batches + ["step"] + BANKS
    tg.train_step(model, optimizer, batches.next())
    assert events == want
    events.clear()
    tg.train_step(model, optimizer, batches.next())  # it sends lm_head, too
    assert events == want + ["lm_head"]
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
        inputs = tensors_in((args, kwargs))
        old = {t.untyped_storage().data_ptr() for t in inputs}
        clears = func.__name__.split(".")[0] in ("zero_", "fill_", "masked_fill_")
        for t in tensors_in(result):
            if clears or t.untyped_storage().data_ptr() not in old:
                self.shapes.add(tuple(t.shape))
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


def flat_shapes(shape):
    """Returns a shape, and the matrices of the same numbers, with their transposes."""
    first = shape[0], math.prod(shape[1:])
    last = math.prod(shape[:-1]), shape[-1]
    return {shape, first, last, first[::-1], last[::-1]}


@pytest.mark.slow
def test_nothing_as_large_as_a_bank_or_table_is_allocated_or_cleared(workers, cfg):
    """Checks two ranks' forward, backward, exchange and update, which need no more than their shards.

    Of a table they do not even need a shard, but in Adam's arithmetic, on vectors. Autograd allocates banks.
    """
    stages = tuple(replace(stage, batch_tokens=2 * 37) for stage in cfg.stages)  # 37 is no weight's size
    sizes = dict(padded_vocab=280, bigram_vocab_size=1400, mudd_dim=20)
    cfg = replace(with_dtype(cfg, "bfloat16"), microbatches=2, stages=stages, **sizes)
    shapes = tg.param_shapes(cfg, 2)
    large = set()
    for row in tg.used_params(cfg):
        if row.kind != "small":
            large |= flat_shapes(shapes[row.name])
        if row.is_table:
            rows, *width = shapes[row.name]
            large |= flat_shapes((rows // 2, *width))
    for seen in workers(2, record_shapes, cfg):
        assert (20, 280) in seen and (37, 280) not in seen  # a chunk's logits, not those of all tokens
        assert large.isdisjoint(seen), large & seen
    banks = {(math.prod(shapes[name][:-1]), cfg.dim) for name in BANKS}
    for seen in workers(2, record_shapes, replace(cfg, main_grad=False)):
        assert banks <= seen
