"""Checks gradients written straight into main_grad: the contract, equality with autograd's, memory."""

# ruff: noqa: F811 (fixtures are imported)

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt as tg
from golden_inputs import generator, head_of, targets_of, tensors_of
from test_distributed import build, cfg, first_batch, run_steps, with_dtype  # noqa: F401 (a fixture)

NEAR = dict(rtol=1e-12, atol=1e-13)
BANKS = [row.name for row in tg.PARAMS if row.kind == "bank"]


def randn(*shape, seed):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------- the contract

OTHER = randn(8, 6, seed=1)  # the MLP's weight that is not under test


def run_mlp(x, fc, proj):
    return tg.MLP.apply(x, (fc, proj), fc.w, proj.w, tg.TORCH_BACKEND, None)


OPERATIONS = {  # with one weight under test: how the script runs it, in plain torch
    "linear": (tg.linear, lambda x, w: x @ w.T),
    "transposed": (
        lambda x, weight: tg.linear(x @ OTHER.T, weight, transposed=True),
        lambda x, w: x @ OTHER.T @ w,
    ),
    "fc": (
        lambda x, weight: run_mlp(x, weight, tg.BankMatrix(OTHER)),
        lambda x, w: tg.relu_square(x, w) @ OTHER,
    ),
    "proj": (
        lambda x, weight: run_mlp(x, tg.BankMatrix(OTHER), weight),
        lambda x, w: tg.relu_square(x, OTHER) @ w,
    ),
}


@pytest.mark.forms("a gradient by hand (relu_square_grad, MLP.backward) and autograd's")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_contract(compiled, in_place, marked, operation):
    """Checks two optimizer steps: the gradient is autograd's, in main_grad alone (in_place), or in .grad.

    marked: the weight has grad_added_to_main_grad. Hooks run once for each micro-batch, when its gradient is
    in place.
    """
    run, plain = OPERATIONS[operation]
    w = randn(8, 6, seed=2)
    param = head_of(w)
    param.main_grad = None
    if in_place:
        param.main_grad = torch.full_like(w, math.nan)  # to be overwritten
    w.requires_grad_(not in_place or marked)
    graphs = counters["stats"]["unique_graphs"]
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    fired = 0

    def hook(p):
        nonlocal fired
        assert p.grad_added_to_main_grad and p.grad.shape == p.shape
        assert p.grad.untyped_storage().data_ptr() != param.main_grad.untyped_storage().data_ptr()
        assert torch.allclose(param.main_grad, twin.grad, **NEAR)
        p.grad = None
        p.grad_added_to_main_grad = False
        fired += 1

    if marked:
        w.grad_added_to_main_grad = False
        if in_place:
            w.register_post_accumulate_grad_hook(hook)

    for step in range(2):
        twin = w.detach().clone().requires_grad_()
        for i in range(3):
            x = randn(5, 6, seed=10 * step + i).requires_grad_()
            y = x.detach().clone().requires_grad_()
            plain(x, twin).square().sum().backward()
            run(y, tg.BankMatrix(*param.bank())).square().sum().backward()
            torch.testing.assert_close(y.grad, x.grad, **NEAR)
            param.end_backward()
            if marked:
                assert not w.grad_added_to_main_grad
        if in_place:
            assert fired == 3 * (step + 1) * marked and w.grad is None
        else:
            assert param.grad() is w.grad
        torch.testing.assert_close(param.grad(), twin.grad, **NEAR)
        param.clear()  # the optimizer's step
        assert w.grad is None
    assert counters["stats"]["unique_graphs"] == graphs + compiled  # one graph overwrites and adds


@pytest.mark.parametrize("written", [True, False])
def test_write_grad(written):
    """Writes a product to the first rows and columns, or adds it: rounded once."""
    a = randn(70, 5, seed=0).bfloat16()
    b = randn(70, 4, seed=1).bfloat16()
    old = randn(18, 6, seed=2).bfloat16()
    main_grad = old.clone()
    tg.write_grad(main_grad, a, b, (), torch.tensor(written))
    want = old.double()
    want[:5, :4] *= written
    want[:5, :4] += a.double().T @ b.double()
    torch.testing.assert_close(main_grad.double(), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("written", [True, False])
def test_write_grad_in_fp8(written):
    """Writes a product of codes times both scales, or adds it: rounded once. All sums are exact in fp32."""
    g = generator(0)
    a, b = torch.randint(-8, 9, (2, 16, 256), generator=g).float()
    old = (torch.randint(-99, 100, (16, 16), generator=g) / 8).bfloat16()
    main_grad = old.clone()
    scales = torch.tensor(0.5), torch.tensor(0.25)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    tg.write_grad(main_grad, a8.T, b8.T, scales, torch.tensor(written))
    assert torch.equal(main_grad, (old * written + a @ b.T / 8).bfloat16())


def test_mlp_in_bf16():
    """Roundings of 2^-9 leave an fp32 MLP near its fp32 result; its gradients are fp32, and summed."""
    fc = randn(24, 8, seed=1).float()
    proj = randn(24, 8, seed=2).float()
    results = []
    for dtype in torch.float32, torch.bfloat16:
        h = randn(70, 8, seed=0).float().requires_grad_()
        fc_grad = torch.full_like(fc, math.nan)
        proj_grad = torch.full_like(proj, math.nan)
        for written in torch.tensor([False, True]):
            weights = tg.BankMatrix(fc, fc_grad, written), tg.BankMatrix(proj, proj_grad, written)
            y = tg.MLP.apply(
                h.to(dtype), weights, fc.to(dtype), proj.to(dtype), tg.TORCH_BACKEND, None
            ).float()
            y.backward(randn(70, 8, seed=3).float())
        results.append([y.detach(), h.grad, fc_grad, proj_grad])
    for want, found in zip(*results):
        assert want.dtype == found.dtype == torch.float32
        assert 0 < (found - want).norm() / want.norm() < 2**-7


# ----------------------------------------------------------------------------------------------- whole models


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
@pytest.mark.parametrize("main_grad", [False, True])
def test_gradients_of_a_batch_are_autograds(cfg, main_grad):
    """Compares all parameters' sums over eight micro-batches, in fp64, with gradients of plain torch.

    Only what autograd sums has a .grad: small parameters, and banks without main_grad.
    """
    cfg = replace(cfg, main_grad=main_grad)
    _, model, optimizer = build(0, 1, cfg)
    optimizer.step = lambda *_: None
    tg.train_step(model, optimizer, first_batch(cfg))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    kinds = ["small"]
    if not main_grad:
        kinds.append("bank")
    assert grads.keys() == {row.name for row in cfg.params if row.kind in kinds}
    for name, param in optimizer.params.items():
        if not isinstance(param, tg.SmallParams) and param.main_grad is not None:
            grads[name] = param.main_grad
    want = autograds_gradients(cfg)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-11, msg=name)


# ----------------------------------------------------------------------------------------------------- memory


class TensorRecorder(TorchDispatchMode):
    """Keeps the shapes of all tensors that operations allocated, and of those they cleared."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = tensors_of((args, kwargs))
        old = {t.untyped_storage().data_ptr() for t in inputs}
        clears = func.__name__.split(".")[0] in ("zero_", "fill_", "masked_fill_")
        for t in tensors_of(result):
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
    # A micro-batch has 37 tokens, which is no weight's size.
    sizes = "microbatches=2 stages.*.batch_tokens=74 padded_vocab=280 bigram_vocab_size=1400 mudd_dim=20"
    cfg = tg.with_settings(with_dtype(cfg, "bfloat16"), sizes.split())
    shapes = tg.param_shapes(cfg, 2)
    large = set()
    for row in tg.used_specs(cfg):
        if row.kind != "small":
            large |= flat_shapes(shapes[row.name])
        if row.kind == "embedding":
            rows, *width = shapes[row.name]
            large |= flat_shapes((rows // 2, *width))
    for seen in workers(2, record_shapes, cfg):
        assert (20, 280) in seen and (37, 280) not in seen  # a chunk's logits, not those of all tokens
        assert large.isdisjoint(seen), large & seen
    banks = {(math.prod(shapes[name][:-1]), cfg.dim) for name in BANKS}
    for seen in workers(2, record_shapes, replace(cfg, main_grad=False)):
        assert banks <= seen
