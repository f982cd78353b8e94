"""Compares short whole runs on 1, 2, 4 and 8 processes: world sizes, orders, with and without warm-up."""

import hashlib
import math
import os
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train_gpt as tg
from golden_inputs import (
    BIGRAMS,
    give_grad,
    plans_of_all_rows,
    prefetch_exchange,
    random_documents,
    row_plans,
    same_bits,
    write_shard,
)

WINDOWS = {"short": 6, "long": 20}  # of validation, in tokens


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """Returns a config with all roles and four stages, eight steps, in fp64, of width 16.

    Untying follows step 5; embed has its own update in step 7.
    """
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(1)
    for split, count in (("train", 2500), ("train", 2500), ("val", 400)):
        number = len(list(folder.iterdir()))
        path = folder / f"x_{split}_{number:06d}.bin"
        write_shard(path, random_documents(rng, count, 61, 60, 50), 61, 60)
    # fmt: off
    stages = (
        tg.Stage(2, 128, 24, tg.Windows(1, 3), 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        tg.Stage(1, 256, 40, tg.Windows(3, 7), 1.52, (1.0, 0.5), (1.0, 0.0)),
        tg.Stage(1, 384, 40, tg.Windows(5, 11), 1.73, (1.0,), (1.0,)),
        tg.Stage(4, 384, 40, tg.Windows(6, 13), 0.15, (1.0,), (1.0,)),
    )
    return replace(
        tg.CPU, data=str(folder), vocab_size=61, padded_vocab=64, bos_id=60, ngrams=tg.Ngrams(),
        bigram_vocab_size=320, heads=2, head_dim=8, mlp_dim=32, window_unit=3, microbatches=8, stages=stages,
        val_slices=3, val_slice_tokens=100, val_every=0, momentum_warmup=3, momentum_cooldown=2,
        rails_step=2, head_chunk=20, dtype="float64", bank_dtype="float64",
    )
    # fmt: on


def build(rank, world_size, cfg, seed=0, backend=tg.TORCH_BACKEND):
    """Returns exchange, model and optimizer of a rank."""
    exchange = tg.Exchange(rank, world_size)
    tg.check_config(cfg, world_size)
    model = tg.GPT(cfg, world_size, seed=seed, backend=backend)
    with torch.no_grad():  # away from zeros, which hide mistakes
        noise = torch.Generator().manual_seed(99)
        for name, shape in sorted(tg.param_shapes(cfg, 1).items()):  # in any order of the table
            if name != "embed":
                getattr(model, name)[: shape[0]] += 0.03 * torch.randn(shape, generator=noise)
        model.embed.copy_(model.lm_head.T)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), exchange, backend)
    model.ngrams = optimizer.ngrams
    return exchange, model, optimizer


def spoil_grads(optimizer, value):
    """Sets a step's gradients to `value`. What no step writes, like unread parts of banks, stays 0."""
    for grad in optimizer.grads.values():
        grad.written = set(range(1000))
        if grad.main_grad is None:
            grad.p.grad = torch.full_like(grad.p, value)
        else:
            grad.main_grad.masked_fill_(grad.main_grad != 0, value)


def batches_of(cfg, rank, world_size):
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size)
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    return tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))


def digest(model):
    """Hashes all parameters' bits, after their gathers."""
    return digest_of({name: model.weight(name) for name, _ in model.named_parameters()})


def digest_of(state):
    """Hashes a nest of dicts of tensors and numbers."""
    h = hashlib.sha256()
    for name, value in sorted(tg.flatten(state).items()):
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        h.update(f"{name} {value}".encode())
    return h.hexdigest()


def train(rank, world_size, cfg, warm=False, keep=True):
    """Trains a whole run.

    Returns this rank's losses, a digest of the parameters after each step, the final loss and, with `keep`,
    the final parameters; with `warm`, whether warm_up restored everything.
    """
    exchange, model, optimizer = build(rank, world_size, cfg)
    data = tg.open_dataset(cfg)
    val = tg.ValLoader(cfg, data.val)
    restored = True
    if warm:
        before, state = digest(model), tg.training_state(model, optimizer)
        tg.warm_up(data, model, optimizer, val, prefetch_exchange(rank, world_size))
        restored = digest(model) == before and same_bits(state, tg.training_state(model, optimizer))
        restored &= all(p.grad is None for p in model.parameters())
    batches, losses, digests, ties = batches_of(cfg, rank, world_size), [], [], []
    for step in range(cfg.steps):
        loss = tg.train_step(model, optimizer, batches.next(), batches.peek)
        losses.append(loss.item())
        digests.append(digest(model))
        ties.append(torch.equal(model.embed, model.lm_head.T))
    batches.loader.close()
    shapes, final = tg.param_shapes(cfg, 1), None
    if keep:
        final = {name: p.detach()[: shapes[name][0]] for name, p in model.named_parameters()}
    val_loss = tg.validate(model, val, exchange, tg.window_tokens(cfg, cfg.val_windows))
    return dict(losses=losses, digests=digests, ties=ties, val=val_loss, final=final, restored=restored)


def same_on_all_ranks(results):
    assert all(r["digests"] == results[0]["digests"] and r["val"] == results[0]["val"] for r in results)
    return results[0]


def dense(cfg):
    """Makes every table's exchange whole."""
    params = (replace(row, exchange="reduce_scatter") if row.is_table else row for row in cfg.params)
    return replace(cfg, params=tuple(params))


def with_reduction(cfg, reduction):
    return tg.override(cfg, f"params.*.reduction={reduction}")


def with_dtype(cfg, dtype):
    return replace(cfg, dtype=dtype, bank_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, reduction", [("float64", "backend"), ("float32", "fp32")])
def test_world_size_does_not_matter(workers, cfg, dtype, reduction):
    """Gives the same losses and parameters, up to rounding.

    Ranks add gradients in another order than micro-batches do, which moves a gradient by a few units eps of
    the arithmetic. orthogonalize may blow that up a thousandfold where a gradient has small singular values:
    hence 1000 eps. Measured after these eight steps: 6 eps, 0.5 eps in the losses, in fp64 as in fp32.
    """
    cfg = with_reduction(with_dtype(cfg, dtype), reduction)
    bound = 1000 * torch.finfo(tg.dtype_of(dtype)).eps
    single = workers(1, train, cfg)[0]
    assert single["ties"] == [True] * 7 + [False]
    assert len(set(single["digests"])) == cfg.steps
    ungrouped = train(0, 1, cfg)  # without a process group
    assert ungrouped["digests"] == single["digests"] and ungrouped["val"] == single["val"]
    for world_size in (4, 8) if dtype == "float64" else (2,):
        results = workers(world_size, train, cfg)
        first = same_on_all_ranks(results)
        mean = np.mean([r["losses"] for r in results], axis=0)
        assert mean == pytest.approx(single["losses"], rel=bound)
        assert first["val"] == pytest.approx(single["val"], rel=bound)
        assert first["ties"] == single["ties"]
        for name, want in single["final"].items():
            worst = ((first["final"][name] - want).norm() / want.norm()).item()
            assert worst < bound, (world_size, name, worst)


def first_gradients(rank, world_size, cfg):
    """Returns the first batch's mean gradients: by parameter, its exchange and this rank's part."""
    exchange, model, optimizer = build(rank, world_size, cfg)
    optimizer.step = lambda *_: None
    batches = batches_of(cfg, rank, world_size)
    tg.train_step(model, optimizer, batches.next())
    batches.loader.close()
    grads = {}
    for row in cfg.params:
        grad = optimizer.grads[row.name].take()
        recv_buffer = optimizer.recv_buffers.get(row.name)
        grads[row.name] = row.exchange, exchange.reduce(row.name, row.exchange, grad, recv_buffer).wait()
    return grads


@pytest.mark.slow
def test_eight_ranks_sum_as_eight_micro_batches_do(workers, cfg):
    """Compares mean gradients bit by bit, with the fp32 sum and one micro-batch a rank.

    Micro-batch after micro-batch is added at both world sizes, and factors of 1/8 are exact. That holds where
    autograd adds up micro-batches, and in tables. Written in place, as the head's always is, a product is
    added inside its own sum, and the bits may differ.
    """
    cfg = dense(with_reduction(replace(with_dtype(cfg, "float32"), main_grad=False), "fp32"))
    single, parts = workers(1, first_gradients, cfg)[0], workers(8, first_gradients, cfg)
    for name, (exchange, want) in single.items():
        grad = parts[3][name][1]
        if exchange == "reduce_scatter":
            grad = torch.cat([part[name][1] for part in parts])
        rows = min(len(grad), len(want))  # banks have other padding
        if name == "lm_head":
            torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6 * want.abs().max().item())
        assert want.any() and (name == "lm_head" or torch.equal(grad[:rows], want[:rows])), name
        assert not grad[rows:].any() and not want[rows:].any()


@pytest.mark.slow
def test_every_parameter_trains(cfg):
    """Checks what the tests above rely on."""
    start = {name: p.detach().clone() for name, p in build(0, 1, cfg)[1].named_parameters()}
    for name, p in train(0, 1, cfg)["final"].items():
        assert ((p - start[name]).norm() / start[name].norm()).item() > 1e-5, name


@pytest.mark.slow
def test_a_tied_copy_follows_an_all_reduced_target(workers, cfg):
    """Checks that embed is lm_head's transpose until untied, where every rank updates all of lm_head."""
    cfg = tg.override(cfg, "params.lm_head.exchange=all_reduce")
    first = same_on_all_ranks(workers(2, train, cfg, False, False))
    assert first["ties"] == [True] * 7 + [False]


@pytest.mark.slow
def test_warm_up_leaves_no_trace(workers, cfg):
    cfg = with_dtype(cfg, "bfloat16")
    warm, cold = (workers(2, train, cfg, w, False) for w in (True, False))
    assert all(r["restored"] for r in warm)
    for a, b in zip(warm, cold):
        assert a["digests"] == b["digests"] and a["losses"] == b["losses"] and a["val"] == b["val"]


# ------------------------------------------------------ orders of scatter (the parameter table's) and of work


def shuffled(items, seed):
    items = list(items)
    random.Random(seed).shuffle(items)
    return tuple(items)


def work_order(cfg):
    """Returns the parameters' names in the order of their updates."""
    return tuple(row.name for row in sorted(cfg.params, key=lambda row: row.work))


def with_work(params, names):
    """Returns rows of the table whose updates are in the order of `names`."""
    return tuple(replace(row, work=names.index(row.name)) for row in params)


@pytest.mark.slow
def test_orders_do_not_matter(workers, cfg):
    """Gives the same bits in whole runs: the same order again, a random one and the reverse."""
    cfg = with_dtype(cfg, "float32")
    want = same_on_all_ranks(workers(4, train, cfg, False, False))
    for order in (lambda items: items, lambda items: shuffled(items, 7), lambda items: items[::-1]):
        params = with_work(order(cfg.params), order(work_order(cfg)))
        results = workers(4, train, replace(cfg, params=params), False, False)
        assert same_on_all_ranks(results)["digests"] == want["digests"], params


class TiesLate(tg.Optimizer):
    """Drops embed's gradient if lm_head's was scattered before: a mutant that depends on the order."""

    def scatter(self, plan):
        order = [row.name for row in self.cfg.params]
        if self.is_tied and order.index("embed") > order.index("lm_head"):
            self.grads["embed"].main_grad.zero_()
        return super().scatter(plan)


class LeaksState(tg.Optimizer):
    """Lets an Adam update change the next one's gradient: a mutant that depends on the work order."""

    last_norm = 0.0

    def work(self, plan, pending, *following):
        rule = tg.OPTIMIZERS["adam"]

        def update(p, grad, *args):
            rule.update(p, grad * (1 + 0.01 * self.last_norm), *args)
            self.last_norm = grad.norm().clamp_max(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tg.OPTIMIZERS, "adam", rule._replace(update=update))
            super().work(plan, pending, *following)


def optimize(rank, world_size, cfg, optimizer_class, steps, orders):
    """Returns a digest of parameters and optimizer state after `steps` for each order, a table of parameters.

    All start from one state. Gradients differ from rank to rank, with sizes over many powers of two.
    """
    cfg = replace(cfg, main_grad=False)
    exchange, model, optimizer = build(rank, world_size, cfg)
    if steps[0] > tg.untie_step(cfg):
        optimizer.untie()
    start, digests = tg.training_state(model, optimizer), []
    for params in orders:
        optimizer = optimizer_class(replace(cfg, params=params), dict(model.named_parameters()), exchange)
        tg.restore(start, model, optimizer)
        optimizer.gather_all()
        g = torch.Generator().manual_seed(rank)
        for step in steps:
            sizes = {"tokens": cfg.padded_vocab, "bigrams": cfg.bigram_vocab_size}
            masks = {kind: torch.rand(n, generator=g) < 0.3 for kind, n in sizes.items()}
            for name, p in model.named_parameters():
                size = 2.0 ** torch.randint(-12, 12, p.shape, generator=g)
                grad = torch.randn(p.shape, generator=g) * size
                if optimizer.specs[name].is_table:
                    grad[~masks[optimizer.specs[name].kind]] = 0
                give_grad(optimizer, name, grad.to(p.dtype))
            plan = tg.plan_step(cfg, step)
            if plan.updates(2):
                ids = {kind: mask.nonzero().int().flatten().numpy() for kind, mask in masks.items()}
                by_kind = row_plans(cfg, prefetch_exchange(rank, world_size), ids)
                tables = (spec for spec in optimizer.specs.values() if spec.is_table)
                optimizer.rows = {spec.name: by_kind[spec.kind] for spec in tables}
            optimizer.step(plan)
            optimizer.finish_gathers()
        digests.append(digest_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    return digests


PERIODS = {"before": range(4), "across": range(4, 8), "after": range(6, 8)}  # untying, which ends step 5


@pytest.mark.slow
@pytest.mark.parametrize("world_size, dtype, reduction", [(2, "float32", "backend"), (4, "bfloat16", "fp32")])
def test_no_order_matters(workers, cfg, world_size, dtype, reduction):
    """Permutes each order alone and both together: gives the same bits of parameters and moments."""
    cfg = with_reduction(with_dtype(cfg, dtype), reduction)
    params, work = cfg.params, work_order(cfg)
    orders = [params, with_work(params[::-1], work), with_work(params, work[::-1])]
    orders += [with_work(shuffled(params, seed), shuffled(work, seed + 1000)) for seed in range(13)]
    for period in PERIODS.values():
        for digests in workers(world_size, optimize, cfg, tg.Optimizer, period, orders):
            assert len(set(digests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mutant, periods", [(TiesLate, ["before", "across"]), (LeaksState, list(PERIODS))])
def test_the_test_of_orders_catches(workers, cfg, mutant, periods):
    """Shows that the test above fails for optimizers that depend on an order, in the periods when they do."""
    cfg = with_dtype(cfg, "float32")
    work = work_order(cfg)
    orders = [with_work(shuffled(cfg.params, seed), shuffled(work, seed + 1000)) for seed in range(3)]
    orders.append(cfg.params)  # here embed comes after lm_head
    for period in periods:
        for digests in workers(2, optimize, cfg, mutant, PERIODS[period], orders):
            assert len(set(digests)) > 1, period


# ------------------------------------------------------------------------------------------------- validation


@pytest.mark.slow
def test_validation_is_bitwise_the_same_at_any_world_size(workers, cfg):
    """Compares bits: a slice's mean is computed on one rank, the mean of them in the slices' order."""
    stages = tuple(replace(stage, steps=0) for stage in cfg.stages)
    cfg = replace(with_dtype(cfg, "float32"), stages=stages)
    losses = {loss for world_size in (1, 2, 4) for loss in workers(world_size, validate, cfg)}
    assert len(losses) == 1


def validate(rank, world_size, cfg):
    exchange, model, _ = build(rank, world_size, cfg)
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    return tg.validate(model, val, exchange, WINDOWS)


def test_validation_losses_are_averaged_in_fp32(cfg):
    """Validates a bf16 model: with its 8 bits the mean would be off in the third digit."""
    cfg = replace(with_dtype(cfg, "bfloat16"), val_slices=3)
    exchange, model, _ = build(0, 1, cfg)
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    losses = [model.token_losses(batch, WINDOWS).mean().item() for batch in map(val.batch, range(3))]
    assert len(set(losses)) == 3
    assert tg.validate(model, val, exchange, WINDOWS) == pytest.approx(np.mean(losses), rel=1e-6)


# ----------------------------------------------------------------------------------------------------- shards


class OneRank(tg.Exchange):
    """Stands in for all ranks' exchange on one rank, as if all had its gradient."""

    def reduce(self, name, how, grad, recv_buffer=None):
        return tg.Pending(self.shard(grad) if how == "reduce_scatter" else grad)

    def gather(self, name, t):
        return tg.Pending(t)


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_shards_make_up_the_whole_update(cfg, tied):
    """Puts together each rank's update of its shards at 8, 16 and 64 ranks, without processes.

    The result equals one rank's. At 8 a rank owns 3 of 24 MLP matrices, the last two of them padding, so fc
    and proj, with its double rate, change places from rank to rank. At 64 some ranks own padding only.
    """
    cfg = dense(replace(cfg, heads=4, head_dim=16, bigram_vocab_size=640, main_grad=False))
    plan, g, results = tg.plan_step(cfg, 3), torch.Generator().manual_seed(1), {}
    values, grads = (
        {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
        for shapes in [tg.param_shapes(cfg, 1)] * 2
    )
    for world_size in (1, 8, 16, 64):
        stages = tuple(replace(stage, batch_tokens=64) for stage in cfg.stages)
        tg.check_config(replace(cfg, stages=stages), world_size)
        shards = {}
        for rank in range(world_size):
            shapes = tg.param_shapes(cfg, world_size)
            params = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
            for name, p in params.items():
                p[: len(values[name])] = values[name]
            optimizer = tg.Optimizer(cfg, params, OneRank(rank, world_size))
            for name, p in params.items():
                grad = torch.zeros_like(p, requires_grad=False)
                grad[: len(values[name])] = grads[name]
                give_grad(optimizer, name, grad)
            optimizer.is_tied, optimizer.rows = tied, plans_of_all_rows(cfg)
            optimizer.step(plan)
            optimizer.finish_gathers()
            for name, p in params.items():
                if rank == 0 or optimizer.specs[name].sharded:
                    shards.setdefault(name, []).append(optimizer.shard_of(name, p))
        updated = {name: torch.cat(parts) for name, parts in shards.items()}
        if tied:
            del updated["embed"]
        results[world_size] = updated
        for name, full in updated.items():
            want = results[1][name]
            rows = min(len(full), len(want))
            torch.testing.assert_close(full[:rows], want[:rows], rtol=1e-12, atol=1e-12)
            assert not full[rows:].any(), name  # padding stays zero
    moved = (results[8]["mlp_bank"][:22] - values["mlp_bank"]).flatten(1).norm(dim=1)
    assert (moved[1::2] > 1.8 * moved[::2]).all()


@pytest.mark.parametrize("world_size", [8, 16, 64])
def test_shards_of_the_record_configuration(world_size):
    """Checks every rank's shapes of parameters and state: equal blocks that tile the whole."""
    cfg, shapes = BIGRAMS, tg.param_shapes(BIGRAMS, world_size)
    tg.check_config(cfg, world_size)
    dtypes = {"model": torch.bfloat16, "float32": torch.float32}
    for rank in range(world_size):
        params = {
            row.name: torch.empty(shapes[row.name], dtype=dtypes[row.dtype], device="meta")
            for row in cfg.params
        }
        optimizer = tg.Optimizer(with_reduction(cfg, "fp32"), params, tg.Exchange(rank, world_size))
        for name, p in params.items():
            shard, full = optimizer.shard_of(name, p), p
            row, state = optimizer.specs[name], optimizer.state[name]
            if row.sharded:
                assert len(shard) * world_size == len(full)
                assert shard.storage_offset() == rank * shard.numel()
            else:
                assert shard.shape == p.shape
            if row.exchange == "sparse":
                assert optimizer.grads[name].mean.shape == shard.shape
                assert optimizer.grads[name].mean.dtype == torch.float32
            else:
                assert optimizer.recv_buffers[name].shape == (world_size, *shard.shape)
            if row.optimizer == "adam":
                assert state.keys() == {"steps", "exp_avg", "exp_avg_sq"}
                assert state["exp_avg"].shape == state["exp_avg_sq"].shape == shard.shape
            else:
                n, rows, cols = shard.shape
                second = (n, rows, 1) if rows >= cols else (n, 1, cols)
                wide = {"fast_rail", "slow_rail", "mantissa"}
                assert state.keys() == {*wide, "second_momentum_buffer", "matrix_lr_mul"}
                assert all(state[key].shape == shard.shape for key in wide)
                assert state["second_momentum_buffer"].shape == second
                assert state["matrix_lr_mul"].shape == (n, 1, 1)


# ------------------------------------------------------------------------------ update rules in the optimizer


def anvil_direction(grad, state, plan, cfg):
    """Returns the direction of ANVIL's next update, and the slow rail then; `state` stays as it is."""
    mixed, fast, slow = plan.step >= cfg.rails_step, state["fast_rail"].clone(), state["slow_rail"].clone()
    beta, weight = (cfg.fast_beta, cfg.fast_weight) if mixed else (plan.momentum, 1.0)
    numbers = cfg.slow_rate, 1 - beta, weight, plan.momentum
    x = tg.mix_rails(grad, fast, slow, *numbers, tg.dtype_of(cfg.bank_dtype))
    x = tg.orthogonalize(x, cfg.bank_margin)
    return tg.normuon_variance_reduction(x, state["second_momentum_buffer"].clone(), cfg.bank_beta2), slow


@pytest.mark.parametrize("name", ["qk_bank", "vo_bank", "mlp_bank"])
def test_a_banks_multipliers(cfg, name):
    """Checks the row's factors of learning rate and weight decay, and its matrices' factors, in an update."""
    cfg = tg.override(tg.override(cfg, f"params.{name}.lr_mul=2"), f"params.{name}.wd_mul=3")
    _, model, optimizer = build(0, 1, replace(cfg, main_grad=False))
    plan, row, state = tg.plan_step(cfg, 3), optimizer.specs[name], optimizer.state[name]
    p = optimizer.shard_of(name, getattr(model, name))
    before, (n, rows, cols) = p.clone(), p.shape
    grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (x, slow), cycle = anvil_direction(grad, state, plan, cfg), row.matrix_lr_mul or (1.0,)
    lr = torch.tensor([2 * cycle[i % len(cycle)] for i in range(n)], dtype=torch.float64).view(n, 1, 1)
    lr *= cfg.bank_lr * plan.lr_mul * max(1, rows / cols) ** 0.5
    decay = torch.where(slow * before >= 0, before, 0) * lr * 3 * cfg.bank_wd * cfg.bank_lr * plan.lr_mul
    tg.anvil(p, grad, state, row, plan, cfg, tg.TORCH_BACKEND)
    torch.testing.assert_close(p, before - decay - lr * x, rtol=1e-12, atol=1e-14)


def train_bf16(rank, world_size, cfg):
    """Updates banks with given gradients, equal on all ranks, beside full fp32 copies.

    Returns, by step and bank, whether the merged weights equal the copies, whether the bf16 weights are their
    upper halves and whether any mantissa is set; and a digest of the model.
    """
    cfg = dense(replace(cfg, main_grad=False))
    exchange, model, optimizer = build(rank, world_size, cfg)
    banks = [row.name for row in cfg.params if row.optimizer == "anvil"]
    copies = {name: optimizer.shard_of(name, getattr(model, name)).float() for name in banks}
    g, report = torch.Generator().manual_seed(5), []
    for step in range(4):
        plan = tg.plan_step(cfg, step)
        for name in tg.param_shapes(cfg, 1):
            p = getattr(model, name)
            give_grad(optimizer, name, torch.randn(p.shape, generator=g).to(p.dtype))
        optimizer.rows = plans_of_all_rows(cfg)
        for name in banks:
            grad = optimizer.shard_of(name, getattr(model, name).grad)
            n, rows, cols = grad.shape
            x, slow = anvil_direction(grad, optimizer.state[name], plan, cfg)
            factors = torch.ones(n, 1, 1)
            if name == "mlp_bank":  # proj matrices, the odd ones, at twice the rate
                factors[(rank * n + 1) % 2 :: 2] = 2
            lr = cfg.bank_lr * plan.lr_mul * max(1, rows / cols) ** 0.5
            decay = cfg.bank_wd * cfg.bank_lr * plan.lr_mul
            tg.anvil_update(copies[name], None, x, slow, factors, lr, decay)
        optimizer.step(plan)
        optimizer.finish_gathers()
        for name in banks:
            shard, mantissa = (
                optimizer.shard_of(name, getattr(model, name)),
                optimizer.state[name]["mantissa"],
            )
            words = copies[name].view(torch.int32)
            exact = torch.equal(tg.merge_mantissa(shard, mantissa).view(torch.int32), words)
            truncated = torch.equal(shard.view(torch.int16).int() & 0xFFFF, words >> 16 & 0xFFFF)
            report.append((name, exact, truncated, bool(mantissa.any())))
    return report, digest(model)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bf16_weights_with_mantissas_are_fp32_weights(workers, cfg, world_size):
    results = workers(world_size, train_bf16, with_dtype(cfg, "bfloat16"))
    for report, model_digest in results:
        assert all(exact and truncated and used for _, exact, truncated, used in report), report
        assert model_digest == results[0][1]


@pytest.mark.slow
def test_bf16_training(workers, cfg):
    """Compares its losses with fp32's: 8 bits of mantissa, 11 layers, losses of about 4."""
    fp32, bf16 = (workers(2, train, with_dtype(cfg, d), False, False) for d in ("float32", "bfloat16"))
    assert same_on_all_ranks(bf16)["val"] == pytest.approx(fp32[0]["val"], abs=0.2)
    assert bf16[0]["losses"] == pytest.approx(fp32[0]["losses"], abs=0.3)


def sgd(p, grad, state, row, plan, cfg, backend):
    p -= tg.learning_rate(0.5, row, plan) * grad


def train_sgd(rank, world_size, cfg):
    """Trains a step with SGD on mlp_bank; returns its shard before, its mean gradient, the bank after."""
    with pytest.MonkeyPatch.context() as patch:
        rule = tg.UpdateRule(lambda p, row, dtype, first: {}, sgd)
        patch.setitem(tg.OPTIMIZERS, "sgd", rule)
        params = (replace(row, optimizer="sgd") if row.name == "mlp_bank" else row for row in cfg.params)
        cfg = replace(cfg, params=tuple(params))
        _, grad = first_gradients(rank, world_size, cfg)["mlp_bank"]
        _, model, optimizer = build(rank, world_size, cfg)
        before = optimizer.shard_of("mlp_bank", model.mlp_bank).clone()
        batches = batches_of(cfg, rank, world_size)
        tg.train_step(model, optimizer, batches.next())
        batches.loader.close()
        optimizer.finish_gathers()
        return before, grad, model.mlp_bank.detach()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_third_optimizer(workers, cfg, world_size):
    results = workers(world_size, train_sgd, cfg)
    before, grad = (torch.cat(parts) for parts in list(zip(*results))[:2])
    assert grad.any() and tg.plan_step(cfg, 0).lr_mul == 1
    for _, _, bank in results:
        torch.testing.assert_close(bank, before - 0.5 * grad, rtol=1e-14, atol=1e-14)


# --------------------------------------------------------------------------------------------------- exchange


def run_exchanges(rank, world_size):
    exchange = tg.Exchange(rank, world_size)
    t = torch.arange(24, dtype=torch.float64).view(8, 3) * (rank + 1)
    owner = torch.arange(8)[:, None] // (8 // world_size)

    def buffer(rows):
        return torch.empty((world_size, rows, 3), dtype=torch.float64) if world_size > 1 else None

    return dict(
        all_reduce=exchange.reduce("x", "all_reduce", t.clone()).wait(),
        all_reduce_fp32=exchange.reduce("x", "all_reduce", t.clone(), buffer(8)).wait(),
        reduce_scatter=exchange.reduce("x", "reduce_scatter", t.clone()).wait(),
        reduce_scatter_fp32=exchange.reduce("x", "reduce_scatter", t.clone(), buffer(8 // world_size)).wait(),
        gather=exchange.gather("x", torch.where(owner == rank, t, -1.0)).wait(),
        sum=exchange.all_reduce(t.clone()).wait(),
        objects=exchange.all_gather_object({"rank": rank}),
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_exchange(workers, world_size):
    base = torch.arange(24, dtype=torch.float64).view(8, 3)
    total, rows = base * sum(range(1, world_size + 1)), 8 // world_size
    owner = torch.arange(8)[:, None] // rows
    for rank, results in enumerate(workers(world_size, run_exchanges)):
        assert torch.equal(results["sum"], total)
        mean = total / world_size
        for suffix in ("", "_fp32"):
            torch.testing.assert_close(results["all_reduce" + suffix], mean)
            block = mean[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(results["reduce_scatter" + suffix], block)
        assert torch.equal(results["gather"], base * (owner + 1))
        assert results["objects"] == [{"rank": r} for r in range(world_size)]


def wide_range(rank, dtype):
    """Returns numbers over many powers of two, so that the order of additions shows."""
    g = torch.Generator().manual_seed(rank)
    size = 2.0 ** torch.randint(-10, 10, (64, 5), generator=g)
    return (torch.randn(64, 5, generator=g, dtype=torch.float64) * size).to(dtype)


def reduce_fp32(rank, world_size, dtype):
    exchange, grad, pending = tg.Exchange(rank, world_size), wide_range(rank, dtype), []
    for how, rows in (("all_reduce", 64), ("reduce_scatter", 64 // world_size)):
        recv_buffer = torch.empty((world_size, rows, 5), dtype=dtype)
        pending.append(exchange.reduce("x", how, grad, recv_buffer))
    return pending[0].wait(), pending[1].wait(), torch.equal(grad, wide_range(rank, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [4, 8])
def test_the_fp32_sum_is_in_rank_order(workers, world_size, dtype):
    """Compares it to the bit, on all ranks, from unrounded gradients; another order would show."""
    acc_dtype = torch.promote_types(dtype, torch.float32)

    def mean(ranks):
        total = torch.zeros(64, 5, dtype=acc_dtype)
        for rank in ranks:
            total = total + wide_range(rank, dtype).to(acc_dtype)
        return total / world_size

    want, rows = mean(range(world_size)), 64 // world_size
    assert not torch.equal(want, mean(reversed(range(world_size))))
    assert not torch.equal(want, mean([1, 2, 0, *range(3, world_size)]))
    for rank, (full, shard, untouched) in enumerate(workers(world_size, reduce_fp32, dtype)):
        assert full.dtype == shard.dtype == acc_dtype and untouched
        assert torch.equal(full, want) and torch.equal(shard, want[rank * rows : (rank + 1) * rows])


# -------------------------------------------------------------------------- the pools of processes themselves


def misbehave(rank, world_size, how):
    if how == "raise" and rank == 1:
        raise ValueError("on purpose")
    if how == "die" and rank == 1:
        os._exit(3)
    if how == "hang":
        time.sleep(60)
    if how in ("raise", "die"):
        dist.barrier()
    return rank * 10


@pytest.mark.slow
def test_failing_workers_fail_the_test_and_the_pool_recovers(workers):
    with pytest.raises(RuntimeError, match=r"rank 1 raised in misbehave(.|\n)*on purpose"):
        workers(2, misbehave, "raise")
    assert workers(2, misbehave, "") == [0, 10]
    with pytest.raises(RuntimeError, match="rank"):
        workers(2, misbehave, "die")
    with pytest.raises(TimeoutError, match=r"no answer from ranks \[0, 1\]"):
        workers(2, misbehave, "hang", timeout=3)
    assert workers(2, misbehave, "") == [0, 10]


# ---------------------------------------------------------------------------------- a step's loss and gathers


def test_the_loss_of_a_step_is_a_mean(cfg):
    """Takes a head of zeros, which loses log V on each prediction; last tokens have fewer of them."""
    _, model, optimizer = build(0, 1, cfg)
    batches = batches_of(cfg, 0, 1)
    batch = batches.next()
    with torch.no_grad():
        model.lm_head.zero_()
    loss = tg.train_step(model, optimizer, batch)
    batches.loader.close()
    T, weights = len(batch.micro_batches[0].inputs), batch.plan.mtp
    share = sum(weight * (T - k) for k, weight in enumerate(weights)) / (T * sum(weights))
    assert len(weights) == 3
    assert loss.item() == pytest.approx(share * math.log(cfg.padded_vocab), rel=1e-12)


def test_fp8_gradients_are_in_units_of_a_micro_batchs_share(cfg, monkeypatch):
    """Checks the unit's scale; the losses' weights hold that share already.

    With more micro-batches smaller gradients are then as far from underflow.
    """
    _, model, optimizer = build(0, 1, cfg)
    scales, head_loss_and_grad = [], tg.GPT.head_loss_and_grad

    def record(self, x, targets, weights, grad, grad_scale, *more):
        scales.append((grad_scale, weights))
        return head_loss_and_grad(self, x, targets, weights, grad, grad_scale, *more)

    monkeypatch.setattr(tg.GPT, "head_loss_and_grad", record)
    batches = batches_of(cfg, 0, 1)
    batch = batches.next()
    tg.train_step(model, optimizer, batch)
    batches.loader.close()
    assert scales == [(1 / 8, tuple(weight / 8 for weight in batch.plan.mtp))] * 8


class LateGather:
    """Brings nothing, not even this rank's own block, before wait()."""

    def __init__(self, name, t, waited):
        self.name, self.t, self.values, self.waited = name, t, t.clone(), waited
        t.fill_(torch.nan)

    def wait(self):
        if self.values is not None:
            self.t.copy_(self.values)
            self.values = None
            self.waited.append(self.name)


def test_gather_all_waits(cfg, monkeypatch):
    _, model, optimizer = build(0, 1, cfg)
    waited = []
    monkeypatch.setattr(tg.Exchange, "gather", lambda self, name, t: LateGather(name, t, waited))
    optimizer.gather_all()
    assert waited == [row.name for row in cfg.params if row.sharded]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_gathers_are_waited_for_where_they_are_first_needed(cfg, monkeypatch):
    """Makes a parameter NaN until its gather is waited for.

    No gather is waited for in the step that starts it. The next step needs two tables first (embed is
    lm_head's copy until it is untied), then layer 0's matrices, then layer 1's values.
    """
    want, waited, orders = train(0, 1, cfg), [], []

    def record(model):
        orders.append(list(waited))
        waited.clear()

    def gather(self, name, t):
        return tg.Pending(t, LateGather(name, t, waited))

    monkeypatch.setattr(tg.Exchange, "gather", gather)
    with pytest.MonkeyPatch.context() as patch:  # train looks at all parameters after each step
        patch.setitem(globals(), "digest", record)
        patch.setattr(torch, "equal", lambda *each: True)
        run = train(0, 1, cfg)
    assert run["losses"] == want["losses"] and run["val"] == want["val"]
    for name, p in want["final"].items():
        assert run["final"][name].tolist() == p.tolist(), name
    banks = ["qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank"]
    moments = ["lm_head.exp_avg", "lm_head.exp_avg_sq"]  # on untying
    every = ["bigram_embed", "lm_head", *banks, "value_embeds"]
    assert orders == [[], banks, every, banks, every, [*banks, *moments], every, banks]
    assert train(0, 1, cfg)["digests"] == want["digests"]
