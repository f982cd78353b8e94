"""Short whole runs on 1, 2, 4 and 8 real processes: the same training whatever the world, the orders, or a warm-up before."""
import hashlib
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train_gpt as tg
from golden_inputs import random_documents, write_shard


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """All roles, four stages of two steps, the split after step 5 and embed's own update in step 7; fp64, widths of 16."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(1)
    for split, count in (("train", 2500), ("train", 2500), ("val", 400)):
        number = len(list(folder.iterdir()))
        write_shard(folder / f"x_{split}_{number:06d}.bin", random_documents(rng, count, 61, 60, 50), 61, 60)
    stages = (tg.Stage(2, 128, 24, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
              tg.Stage(2, 256, 40, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
              tg.Stage(2, 384, 40, 5, 11, 1.73, (1.0,), (1.0,)),
              tg.Stage(2, 384, 40, 6, 13, 0.15, (1.0,), (1.0,)))
    return replace(tg.CPU, data=str(folder), vocab_size=61, padded_vocab=64, start_token=60, bigram_rows=320, heads=2,
                   head_dim=8, mlp_dim=32, window_unit=3, slices=8, stages=stages, val_slices=3, val_slice_tokens=100,
                   val_every=0, momentum_warmup=3, momentum_cooldown=2, head_chunk=20, dtype="float64", polar_dtype="float64")


def build(rank, world, cfg, seed=0, ops=tg.PLAIN):
    ranks = tg.Ranks(rank, world, torch.device("cpu"))
    exchange = tg.Exchange(rank, world)
    tg.check_config(cfg, world)
    model = tg.GPT(cfg, world, seed=seed, ops=ops)
    with torch.no_grad():  # away from zeros, which hide mistakes
        noise = torch.Generator().manual_seed(99)
        for name, p in model.named_parameters():
            if name != "embed":
                full = torch.randn(tg.param_shapes(cfg, 1)[name], generator=noise)
                p[:full.size(0)] += 0.03 * full
        model.embed.copy_(model.lm_head.T)
    for p in model.parameters():
        exchange.broadcast(p.data)
    return ranks, exchange, model, tg.Optimizer(cfg, dict(model.named_parameters()), exchange, ops)


def batches_of(cfg, rank, world):
    return tg.Batches(tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, False),
                      [tg.plan(cfg, step) for step in range(cfg.steps)])


def digest(model):
    """Of all parameters' bits and the rotary state."""
    h = hashlib.sha256()
    for name, value in sorted(model.state().items()):
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        h.update(f"{name} {value}".encode())
    return h.hexdigest()


def train(rank, world, cfg, warm=False, keep=True):
    """A whole run. -> this rank's losses, a digest of the parameters after each step, the final loss and parameters."""
    ranks, exchange, model, optimizer = build(rank, world, cfg)
    data = tg.find_data(cfg)
    val = tg.ValLoader(cfg, data.val, rank, world, False)
    untouched = True
    if warm:
        before, parts = digest(model), tg.snapshot(model, optimizer)
        tg.warm_up(cfg, ranks, data, model, optimizer, val)
        untouched = digest(model) == before and all(map(tg.same_state, parts, tg.snapshot(model, optimizer)))
        untouched &= all(p.grad is None for p in model.parameters())
    batches, losses, digests, ties = batches_of(cfg, rank, world), [], [], []
    for step in range(cfg.steps):
        losses.append(tg.train_step(model, optimizer, batches.next()).item())
        digests.append(digest(model))
        ties.append(torch.equal(model.embed, model.lm_head.T))
    windows = tuple(w * cfg.window_unit for w in cfg.final_windows)
    rows = tg.param_shapes(cfg, 1)
    final = {name: p.detach()[:rows[name][0]] for name, p in model.named_parameters()} if keep else None
    val_loss = tg.validate(model, val, exchange, windows)
    return dict(losses=losses, digests=digests, ties=ties, val=val_loss, final=final, untouched=untouched)


def same_on_all_ranks(results):
    assert all(r["digests"] == results[0]["digests"] and r["val"] == results[0]["val"] for r in results)
    return results[0]


def dense(cfg):
    """Every table is exchanged whole."""
    return replace(cfg, params=tuple(replace(row, exchange="reduce_scatter") if row.rows else row for row in cfg.params))


def reduced(cfg, how):
    return tg.override(cfg, f"params.*.reduction={how}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype, reduction", [("float64", "backend"), ("float32", "fp32")])
def test_world_size_does_not_matter(workers, cfg, dtype, reduction):
    """The same losses and parameters, up to rounding: ranks add gradients in another order than micro-batches do, which
    moves a gradient by a few units eps of the arithmetic, and polar may blow that up a thousandfold where a gradient has small
    singular values; hence 1000 eps. Measured after these eight steps: 6 eps, 0.5 eps in the losses, in fp64 as in fp32."""
    cfg = reduced(replace(cfg, dtype=dtype, polar_dtype=dtype), reduction)
    bound = 1000 * torch.finfo(tg.dtype_of(dtype)).eps
    single = workers(1, train, cfg)[0]
    assert single["ties"] == [True] * 7 + [False]
    assert len(set(single["digests"])) == cfg.steps
    alone = train(0, 1, cfg)  # without a process group
    assert alone["digests"] == single["digests"] and alone["val"] == single["val"]
    for world in (4, 8) if dtype == "float64" else (2,):
        results = workers(world, train, cfg)
        first = same_on_all_ranks(results)
        mean = np.mean([r["losses"] for r in results], axis=0)
        assert mean == pytest.approx(single["losses"], rel=bound)
        assert first["val"] == pytest.approx(single["val"], rel=bound)
        assert first["ties"] == single["ties"]
        for name, want in single["final"].items():
            worst = ((first["final"][name] - want).norm() / want.norm()).item()
            assert worst < bound, (world, name, worst)


def first_gradients(rank, world, cfg):
    """Mean over the ranks of the first batch's gradients, of this rank's part."""
    _, exchange, model, optimizer = build(rank, world, cfg)
    optimizer.step = lambda now: None
    tg.train_step(model, optimizer, batches_of(cfg, rank, world).next())
    hows = {row.name: row.exchange for row in cfg.params}
    return {name: (hows[name], exchange.reduce(name, hows[name], optimizer.whole(name, optimizer.gradient(name)),
                                               optimizer.room.get(name)).wait())
            for name in optimizer.params}


@pytest.mark.slow
def test_eight_ranks_sum_as_eight_micro_batches_do(workers, cfg):
    """With the fp32 sum, one slice a rank: slice after slice is added in both worlds, and factors of 1/8 are exact. So the
    mean gradients are the same bits (where autograd adds up micro-batches; written in place, a product is added inside its own
    sum, and the bits are other ones)."""
    cfg = dense(reduced(replace(cfg, dtype="float32", polar_dtype="float32", main_grad=False), "fp32"))
    single, parts = workers(1, first_gradients, cfg)[0], workers(8, first_gradients, cfg)
    for name, (exchange, want) in single.items():
        got = torch.cat([part[name][1] for part in parts]) if exchange == "reduce_scatter" else parts[3][name][1]
        rows = min(len(got), len(want))  # banks have other padding
        assert want.any() and torch.equal(got[:rows], want[:rows]), name
        assert not got[rows:].any() and not want[rows:].any()


@pytest.mark.slow
def test_every_parameter_trains(cfg):
    """Otherwise the test above says little."""
    start = {name: p.detach().clone() for name, p in build(0, 1, cfg)[2].named_parameters()}
    final = train(0, 1, cfg)["final"]
    for name, p in final.items():
        assert ((p - start[name]).norm() / start[name].norm()).item() > 1e-5, name


@pytest.mark.slow
def test_warm_up_leaves_no_trace(workers, cfg):
    cfg = replace(cfg, dtype="bfloat16", polar_dtype="bfloat16")
    warm, cold = (workers(2, train, cfg, w, False) for w in (True, False))
    assert all(r["untouched"] for r in warm)
    for a, b in zip(warm, cold):
        assert a["digests"] == b["digests"] and a["losses"] == b["losses"] and a["val"] == b["val"]


def shuffled(names, seed):
    names = list(names)
    random.Random(seed).shuffle(names)
    return tuple(names)


@pytest.mark.slow
def test_orders_do_not_matter(workers, cfg):
    """The same order again, a random one and the reverse give the same bits in whole runs."""
    cfg = replace(cfg, dtype="float32", polar_dtype="float32")
    want = same_on_all_ranks(workers(4, train, cfg, False, False))
    for order in (lambda names: names, lambda names: shuffled(names, len(names[0])), lambda names: names[::-1]):
        orders = dict(scatter_order=order(cfg.scatter_order), work_order=order(cfg.work_order))
        results = workers(4, train, replace(cfg, **orders), False, False)
        assert same_on_all_ranks(results)["digests"] == want["digests"], orders


class TiesLate(tg.Optimizer):
    """Order-dependent on purpose: embed's gradient joins lm_head's when the scatter order comes to embed, be it too late."""

    def scatter(self, now):
        order = self.cfg.scatter_order
        if self.is_tied and order.index("embed") > order.index("lm_head"):
            self.params["embed"].grad.zero_()
        return super().scatter(now)


class Meddles(tg.Optimizer):
    """Order-dependent on purpose: what one update leaves behind, its gradient's size, touches the next in the work order."""
    last = 0.0

    def adam(self, row, p, grad, now):
        super().adam(row, p, grad * (1 + 0.01 * self.last), now)
        self.last = grad.norm().clamp_max(1)


def optimize(rank, world, cfg, kind, steps, orders):
    """For each (scatter, work) order: a digest of parameters and optimizer state after the given steps, from one initial state
    and with gradients that differ from rank to rank and whose sizes are spread over many powers of two."""
    cfg = replace(cfg, main_grad=False)
    _, exchange, model, optimizer = build(rank, world, cfg)
    if steps[0] > tg.split_step(cfg):
        optimizer.untie()
    parts, digests = tg.snapshot(model, optimizer), []
    for scatter, work in orders:
        optimizer = kind(replace(cfg, scatter_order=scatter, work_order=work), dict(model.named_parameters()), exchange)
        for part, state in zip((model, optimizer), parts):
            part.load_state(state)
        g = torch.Generator().manual_seed(rank)
        for step in steps:
            marks = {what: torch.rand(n, generator=g) < 0.3 for what, n in tg.row_kinds(cfg).items()}
            for name, p in model.named_parameters():
                size = 2.0 ** torch.randint(-12, 12, p.shape, generator=g)
                p.grad = (torch.randn(p.shape, generator=g) * size).to(p.dtype)
                if numbers := optimizer.rows[name].rows:
                    p.grad[~marks[numbers]] = 0
            touched = {what: tg.touched_rows(mark.numpy(), world, torch.empty(len(mark), dtype=torch.int32))
                       for what, mark in marks.items()}
            optimizer.announce(tg.plan(cfg, step), touched)
            optimizer.route()
            optimizer.step(tg.plan(cfg, step))
            optimizer.finish()
        states = [p for part in (model, optimizer) for _, p in sorted(part.state().items())]
        digests.append(hashlib.sha256(b"".join(
            t.detach().contiguous().view(torch.uint8).numpy().tobytes() if isinstance(t, torch.Tensor) else str(t).encode()
            for t in states)).hexdigest())
    return digests


PERIODS = {"before": range(4), "across": range(4, 8), "after": range(6, 8)}  # the split, which ends step 5


@pytest.mark.slow
@pytest.mark.parametrize("world, dtype, reduction", [
    (2, "float32", "backend"), (4, "bfloat16", "fp32")])
def test_no_order_matters(workers, cfg, world, dtype, reduction):
    """Parameters and moments, after permutations of both orders together and of each alone: the same bits."""
    cfg = reduced(replace(cfg, dtype=dtype, polar_dtype=dtype), reduction)
    scatter, work = cfg.scatter_order, cfg.work_order
    orders = [(scatter, work), (scatter[::-1], work), (scatter, work[::-1])]
    orders += [(shuffled(scatter, seed), shuffled(work, seed + 1000)) for seed in range(13)]
    for period in PERIODS.values():
        for digests in workers(world, optimize, cfg, tg.Optimizer, period, orders):
            assert len(set(digests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind, periods", [(TiesLate, ["before", "across"]), (Meddles, list(PERIODS))])
def test_the_test_of_orders_catches(workers, cfg, kind, periods):
    """What depends on the order is seen by the property above, in the periods in which it does."""
    cfg = replace(cfg, dtype="float32", polar_dtype="float32")
    orders = [(shuffled(cfg.scatter_order, seed), shuffled(cfg.work_order, seed + 1000)) for seed in range(4)]
    for period in periods:
        for digests in workers(2, optimize, cfg, kind, PERIODS[period], orders):
            assert len(set(digests)) > 1, period


@pytest.mark.slow
def test_validation_is_bitwise_the_same_at_any_world(workers, cfg):
    """Each slice's mean is made on one rank, and the mean of them in the slices' order."""
    cfg = replace(cfg, dtype="float32", polar_dtype="float32", stages=tuple(replace(stage, steps=0) for stage in cfg.stages))
    losses = {r["val"] for world in (1, 2, 4) for r in workers(world, just_validate, cfg)}
    assert len(losses) == 1


def just_validate(rank, world, cfg):
    _, exchange, model, _ = build(rank, world, cfg)
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"), rank, world, False)
    return dict(val=tg.validate(model, val, exchange, (6, 20)))


class Alone(tg.Exchange):
    """One rank of a world of which no other rank exists: all are taken to have this rank's gradient."""

    def reduce(self, name, how, grad, room=None):
        return tg.Pending(self.shard(grad) if how == "reduce_scatter" else grad)

    def gather(self, name, t):
        return tg.Pending(t)


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_own_parts_make_up_the_whole_update(cfg, tied):
    """At worlds of 8, 16 and 64, without processes: each rank's update of its own parts, put together, is world 1's. At 8 a
    rank owns 3 of 24 MLP matrices, the last two of them padding, so that fc and proj, with its double rate, change places from
    rank to rank; at 64 some own padding only."""
    cfg, now, results = dense(replace(cfg, heads=4, head_dim=16, bigram_rows=640, main_grad=False)), tg.plan(cfg, 3), {}
    g = torch.Generator().manual_seed(1)
    shapes = tg.param_shapes(cfg, 1)
    values, grads = ({name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
                     for _ in range(2))
    for world in (1, 8, 16, 64):
        tg.check_config(replace(cfg, stages=tuple(replace(s, tokens=64) for s in cfg.stages)), world)
        parts = {}
        for rank in range(world):
            params = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in tg.param_shapes(cfg, world).items()}
            for name, p in params.items():
                p[:len(values[name])] = values[name]
                p.grad = torch.zeros_like(p)
                p.grad[:len(values[name])] = grads[name]
            optimizer = tg.Optimizer(cfg, params, Alone(rank, world))
            optimizer.is_tied = tied
            optimizer.step(now)
            optimizer.finish()
            for name, p in params.items():
                sharded = optimizer.rows[name].sharded
                parts.setdefault(name, []).extend([optimizer.own(name, p)] if sharded or rank == 0 else [])
        results[world] = {name: torch.cat(owned) for name, owned in parts.items() if not (tied and name == "embed")}
        for name, whole in results[world].items():
            want = results[1][name]
            rows = min(len(whole), len(want))
            torch.testing.assert_close(whole[:rows], want[:rows], rtol=1e-12, atol=1e-12)
            assert not whole[rows:].any(), name  # padding stays zero
    moved = (results[8]["mlp_bank"][:22] - values["mlp_bank"].flatten(0, 1)).flatten(1).norm(dim=1)
    assert (moved[1::2] > 1.8 * moved[::2]).all()


@pytest.mark.parametrize("world", [8, 16, 64])
def test_shards_of_the_record_configuration(world):
    """Every rank's share of parameters and state at full size, as shapes only: equal blocks, which tile the whole."""
    cfg, shapes = tg.RECORD, tg.param_shapes(tg.RECORD, world)
    tg.check_config(cfg, world)
    for rank in range(world):
        params = {row.name: torch.empty(shapes[row.name], dtype=torch.bfloat16 if row.dtype == "model" else torch.float32,
                                        device="meta") for row in cfg.params}
        optimizer = tg.Optimizer(reduced(cfg, "fp32"), params, tg.Exchange(rank, world))
        for name, p in params.items():
            own, whole, row = optimizer.own(name, p), optimizer.whole(name, p), optimizer.rows[name]
            state = {kind: t for key, t in optimizer.tensors.items() for of, kind in [key.split(".")] if of == name}
            if row.sharded:
                assert len(own) * world == len(whole) and own.storage_offset() == rank * own.numel()
            else:
                assert own.shape == p.shape
            if row.exchange == "sparse":
                assert optimizer.blocks[name].shape == own.shape and optimizer.blocks[name].dtype == torch.float32
            else:
                assert optimizer.room[name].shape == (world, *own.shape)
            if row.optimizer == "adam":
                assert state.keys() == {"m", "v"} and all(t.shape == own.shape for t in state.values())
            else:
                n, rows, cols = own.shape
                assert state.keys() == {"momentum", "second", "low"} and len(optimizer.factors[name]) == n
                assert state["momentum"].shape == state["low"].shape == own.shape
                assert state["second"].shape == ((n, rows, 1) if rows >= cols else (n, 1, cols))


# ---------------------------------------------------------------------------------------------------- bf16 parameters

def low_bits(rank, world, cfg):
    """Optimizer steps with given gradients, the same on all ranks, beside a full fp32 copy of the banks."""
    cfg = dense(replace(cfg, main_grad=False))
    _, exchange, model, optimizer = build(rank, world, cfg)
    banks = [row.name for row in cfg.params if row.optimizer == "normuon"]
    copies = {name: optimizer.own(name, getattr(model, name)).float() for name in banks}
    g, report = torch.Generator().manual_seed(5), []
    for step in range(4):
        now = tg.plan(cfg, step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        for name in banks:
            own = optimizer.own(name, getattr(model, name).grad)
            state = [optimizer.tensors[f"{name}.{kind}"].clone() for kind in ("momentum", "second")]
            x = tg.normuon_direction(own, *state, now.momentum, cfg.muon_beta2, torch.bfloat16)
            lr = cfg.muon_lr * now.lr_mul * max(1, own.size(1) / own.size(2)) ** 0.5
            if name == "mlp_bank":  # proj matrices, the odd ones, at twice the rate
                first = rank * own.size(0)
                lr = lr * torch.tensor([1.0 + (first + i) % 2 for i in range(own.size(0))]).view(-1, 1, 1)
            tg.normuon_update(copies[name], None, x, lr, cfg.muon_wd * cfg.muon_lr * now.lr_mul)
        optimizer.step(now)
        optimizer.finish()
        for name in banks:
            own, low = optimizer.own(name, getattr(model, name)), optimizer.tensors[f"{name}.low"]
            words = copies[name].view(torch.int32)
            report.append((name, torch.equal(tg.join_halves(own, low).view(torch.int32), words),
                           torch.equal(own.view(torch.int16).int() & 0xFFFF, words >> 16 & 0xFFFF), bool(low.any())))
    return report, digest(model)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bf16_weights_with_low_words_are_fp32_weights(workers, cfg, world):
    results = workers(world, low_bits, replace(cfg, dtype="bfloat16", polar_dtype="bfloat16"))
    for report, bits in results:
        assert all(exact and truncated and used for _, exact, truncated, used in report), report
        assert bits == results[0][1]


@pytest.mark.slow
def test_bf16_training(workers, cfg):
    """Its losses stay near fp32's: 8 bits of mantissa, 11 layers, losses of about 4."""
    wide = workers(2, train, replace(cfg, dtype="float32", polar_dtype="float32"), False, False)
    narrow = workers(2, train, replace(cfg, dtype="bfloat16", polar_dtype="bfloat16"), False, False)
    assert same_on_all_ranks(narrow)["val"] == pytest.approx(wide[0]["val"], abs=0.2)
    assert narrow[0]["losses"] == pytest.approx(wide[0]["losses"], abs=0.3)


# ----------------------------------------------------------------------------------------------------------- exchange

def exchanges(rank, world):
    exchange = tg.Exchange(rank, world)
    mine = torch.arange(24, dtype=torch.float64).view(8, 3) * (rank + 1)
    room = lambda rows: torch.empty((world, rows, 3), dtype=torch.float64) if world > 1 else None
    return dict(all_reduce=exchange.reduce("x", "all_reduce", mine.clone()).wait(),
                all_reduce_summed=exchange.reduce("x", "all_reduce", mine.clone(), room(8)).wait(),
                scatter=exchange.reduce("x", "reduce_scatter", mine.clone()).wait(),
                scatter_summed=exchange.reduce("x", "reduce_scatter", mine.clone(), room(8 // world)).wait(),
                gather=exchange.gather("x", torch.where(torch.arange(8)[:, None] // (8 // world) == rank, mine, -1.0)).wait(),
                sum=exchange.sum(mine.clone()), collected=exchange.collect({"rank": rank}))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_exchange(workers, world):
    base = torch.arange(24, dtype=torch.float64).view(8, 3)
    total, rows = base * sum(range(1, world + 1)), 8 // world
    owner = torch.arange(8)[:, None] // rows
    for rank, got in enumerate(workers(world, exchanges)):
        assert torch.equal(got["sum"], total)
        for kind in ("", "_summed"):
            torch.testing.assert_close(got["all_reduce" + kind], total / world)
            torch.testing.assert_close(got["scatter" + kind], (total / world)[rank * rows:(rank + 1) * rows])
        assert torch.equal(got["gather"], base * (owner + 1))
        assert got["collected"] == [{"rank": r} for r in range(world)]


def spread(rank, dtype):
    """Numbers over many powers of two, so that the order of additions shows."""
    g = torch.Generator().manual_seed(rank)
    size = 2.0 ** torch.randint(-10, 10, (64, 5), generator=g)
    return (torch.randn(64, 5, generator=g, dtype=torch.float64) * size).to(dtype)


def sums(rank, world, dtype):
    exchange, mine = tg.Exchange(rank, world), spread(rank, dtype)
    rooms = (torch.empty((world, rows, 5), dtype=dtype) for rows in (64, 64 // world))
    pending = [exchange.reduce("x", how, mine, room) for how, room in zip(("all_reduce", "reduce_scatter"), rooms)]
    return pending[0].wait(), pending[1].wait(), torch.equal(mine, spread(rank, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", [4, 8])
def test_the_fp32_sum_is_in_rank_order(workers, world, dtype):
    """To the bit, on all ranks, from unrounded gradients; another order would be seen."""
    wide = torch.promote_types(dtype, torch.float32)

    def mean(ranks):
        total = torch.zeros(64, 5, dtype=wide)
        for rank in ranks:
            total = total + spread(rank, dtype).to(wide)
        return total / world
    want, rows = mean(range(world)), 64 // world
    assert not torch.equal(want, mean(reversed(range(world)))) and not torch.equal(want, mean([1, 2, 0, *range(3, world)]))
    for rank, (everywhere, own, untouched) in enumerate(workers(world, sums, dtype)):
        assert everywhere.dtype == own.dtype == wide and untouched
        assert torch.equal(everywhere, want) and torch.equal(own, want[rank * rows:(rank + 1) * rows])


def together(rank, world, failing):
    exchange = tg.Exchange(rank, world)

    def check():
        if rank in failing:
            raise tg.UserError(f"rank {rank} found it")
        return rank
    try:
        return exchange.together(check)
    except tg.UserError as e:
        return str(e)


@pytest.mark.parametrize("world", [1, 4])
def test_what_one_rank_finds_wrong_all_ranks_say(workers, world):
    assert workers(world, together, ()) == list(range(world))
    assert workers(world, together, (0,)) == ["rank 0 found it"] * world
    if world == 4:
        assert workers(4, together, (2, 3)) == ["rank 2 found it"] * 4


# ---------------------------------------------------------------------------------------------------- the pools themselves

def misbehave(rank, world, how):
    if how == "raise" and rank == 1:
        raise ValueError("on purpose")
    if how == "die" and rank == 1:
        import os
        os._exit(3)
    if how in ("raise", "die", "hang"):
        dist.barrier() if how != "hang" else __import__("time").sleep(60)
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


def test_the_loss_of_a_step_is_a_mean(cfg):
    """Of a head that knows nothing, log V for each prediction asked for, of which the last tokens of a micro-batch have fewer."""
    _, _, model, optimizer = build(0, 1, cfg)
    batches = batches_of(cfg, 0, 1)
    batch = batches.next()
    with torch.no_grad():
        model.lm_head.zero_()
    loss, T = tg.train_step(model, optimizer, batch), len(batch.micro_batches[0].inputs)
    batches.close()
    weights = batch.now.mtp
    asked = sum(weight * (T - k) for k, weight in enumerate(weights)) / (T * sum(weights))
    assert len(weights) == 3 and loss.item() == pytest.approx(asked * math.log(cfg.padded_vocab), rel=1e-12)


def test_validation_losses_are_averaged_in_fp32(cfg):
    """Of a bf16 model, too: with bf16's 8 bits the mean would be off in the third digit."""
    cfg = replace(cfg, dtype="bfloat16", polar_dtype="bfloat16", val_slices=3)
    _, exchange, model, _ = build(0, 1, cfg)
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"), 0, 1, False)
    losses = [model.validation_loss(batch, 6, 20).item() for _, batch in val]
    assert len(set(losses)) == 3 and tg.validate(model, val, exchange, (6, 20)) == pytest.approx(np.mean(losses), rel=1e-6)


def test_fp8_gradients_are_in_units_of_a_micro_batchs_share(cfg, monkeypatch):
    """Which its losses' weights hold already: with more micro-batches smaller gradients are as far from underflow."""
    _, _, model, optimizer = build(0, 1, cfg)
    scales, head = [], tg.GPT.head
    monkeypatch.setattr(tg.GPT, "head", lambda self, x, targets, weights, grad, scale: (
        scales.append((scale, weights)), head(self, x, targets, weights, grad, scale))[1])
    batches = batches_of(cfg, 0, 1)
    batch = batches.next()
    tg.train_step(model, optimizer, batch)
    batches.close()
    assert scales == [(1 / 8, tuple(weight / 8 for weight in batch.now.mtp))] * 8


@pytest.mark.parametrize("name", ["qk_bank", "vo_bank", "mlp_bank"])
def test_a_banks_own_numbers(cfg, name):
    """Its row's factors of learning rate and weight decay, and its matrices', in the update that they stand for."""
    cfg = tg.override(tg.override(replace(cfg, main_grad=False), f"params.{name}.lr_mul=2"), f"params.{name}.wd_mul=3")
    _, _, model, optimizer = build(0, 1, cfg)
    now, p = tg.plan(cfg, 3), dict(model.named_parameters())[name]
    row, before = optimizer.rows[name], optimizer.own(name, p).clone()
    grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    n, rows, cols = before.shape
    second = torch.zeros((n, rows, 1) if rows >= cols else (n, 1, cols), dtype=torch.float64)
    x = tg.normuon_direction(grad, torch.zeros_like(grad), second, now.momentum, cfg.muon_beta2, torch.float64)
    cycle = row.matrix_lr_mul or (1.0,)
    lr = torch.tensor([2 * cycle[i % len(cycle)] for i in range(n)], dtype=torch.float64).view(n, 1, 1)
    lr *= cfg.muon_lr * now.lr_mul * max(1, rows / cols) ** 0.5
    decay = torch.where(x * before >= 0, before, 0) * lr * 3 * cfg.muon_wd * cfg.muon_lr * now.lr_mul
    optimizer.normuon(row, optimizer.own(name, p), grad, now)
    torch.testing.assert_close(optimizer.own(name, p), before - decay - lr * x, rtol=1e-12, atol=1e-14)


def test_what_is_gathered_at_once_is_waited_for(cfg, monkeypatch):
    _, _, model, optimizer = build(0, 1, cfg)
    waited = []
    monkeypatch.setattr(tg.Exchange, "gather", lambda self, name, t: Late(name, t, waited))
    optimizer.gather()
    assert waited == [row.name for row in cfg.params if row.sharded]
    assert all(p.isfinite().all() for p in model.parameters())


class Late:
    """A gather that has brought nothing, not even this rank's own part, before it is waited for."""

    def __init__(self, name, t, waited):
        self.name, self.t, self.values, self.waited = name, t, t.clone(), waited
        t.fill_(torch.nan)

    def wait(self):
        if self.values is not None:
            self.t.copy_(self.values)
            self.values = None
            self.waited.append(self.name)


@pytest.mark.slow
def test_gathers_are_waited_for_where_they_are_first_needed(cfg, monkeypatch):
    """Whoever reads a parameter before its gather has come, reads NaN: training, validation, snapshots. None is waited for in the
    step that begins it; the next one needs the tables first, then layer 0's matrices, the head last."""
    want, waited, orders = train(0, 1, cfg), [], []
    monkeypatch.setattr(tg.Exchange, "gather", lambda self, name, t: tg.Pending(t, Late(name, t, waited)))
    with pytest.MonkeyPatch.context() as patch:  # train looks at all parameters after each step
        patch.setitem(globals(), "digest", lambda model: orders.append(list(waited)) or waited.clear())
        patch.setattr(torch, "equal", lambda *each: True)
        got = train(0, 1, cfg)
    assert got["losses"] == want["losses"] and got["val"] == want["val"]
    assert {name: t.tolist() for name, t in got["final"].items()} == {name: t.tolist() for name, t in want["final"].items()}
    banks = ["qk_bank", "vo_bank", "mlp_bank"]
    moments = ["lm_head.m", "lm_head.v"]  # on untying
    assert orders == [[], banks, ["value_embeds", "bigram_embed", "lm_head", *banks], banks,
                      ["value_embeds", "bigram_embed", "lm_head", *banks],
                      [*banks, *moments], ["value_embeds", "bigram_embed", "lm_head", *banks], banks]
    assert train(0, 1, cfg)["digests"] == want["digests"]
