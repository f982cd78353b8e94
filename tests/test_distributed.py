"""Short whole runs on 1, 2 and 4 real processes: the same training whatever the world, the orders, or a warm-up before it."""
import hashlib
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
    return replace(tg.CPU, data=str(folder), vocab_size=61, padded_vocab=64, start_token=60, bigram_rows=320, heads=2, head_dim=8,
                   mlp_dim=32, window_unit=3, slices=4, stages=stages, val_slices=3, val_slice_tokens=100, val_every=0,
                   momentum_warmup=3, momentum_cooldown=2, head_chunk=20, dtype="float64", polar_dtype="float64")


def build(rank, world, cfg, seed=0):
    ranks = tg.Ranks(rank, world, torch.device("cpu"))
    exchange = tg.Exchange(rank, world)
    tg.check_config(cfg, world)
    model = tg.GPT(cfg, world, seed=seed)
    with torch.no_grad():  # away from zeros, which hide mistakes
        noise = torch.Generator().manual_seed(99)
        for name, p in model.named_parameters():
            if name != "embed":
                full = torch.randn(tg.param_shapes(cfg, 1)[name], generator=noise)
                p[:full.size(0)] += 0.03 * full
        model.embed.copy_(model.lm_head.T)
    for p in model.parameters():
        exchange.broadcast(p.data)
    return ranks, exchange, model, tg.Optimizer(cfg, dict(model.named_parameters()), exchange)


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
    loader, losses, digests, ties = tg.TrainLoader(cfg, data.train, rank, world, False), [], [], []
    for step in range(cfg.steps):
        losses.append(tg.train_step(model, optimizer, loader, tg.plan(cfg, step)).item())
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


def test_world_size_does_not_matter(workers, cfg):
    """Equal in fp64. Ranks add gradients in another order than micro-batches do: 1e-16 of them. Measured: 1e-15 in the end. Polar
    may blow rounding up a thousandfold where a gradient has small singular values, hence 1e-12."""
    single = workers(1, train, cfg)[0]
    assert single["ties"] == [True] * 7 + [False]
    assert len(set(single["digests"])) == cfg.steps
    alone = train(0, 1, cfg)  # without a process group
    assert alone["digests"] == single["digests"] and alone["val"] == single["val"]
    for world in (2, 4):
        results = workers(world, train, cfg)
        first = same_on_all_ranks(results)
        mean = np.mean([r["losses"] for r in results], axis=0)
        assert mean == pytest.approx(single["losses"], rel=1e-12)
        assert first["val"] == pytest.approx(single["val"], rel=1e-12)
        assert first["ties"] == single["ties"]
        for name, want in single["final"].items():
            worst = ((first["final"][name] - want).norm() / want.norm()).item()
            assert worst < 1e-12, (world, name, worst)


def test_every_parameter_trains(cfg):
    """Otherwise the test above says little."""
    start = {name: p.detach().clone() for name, p in build(0, 1, cfg)[2].named_parameters()}
    final = train(0, 1, cfg)["final"]
    for name, p in final.items():
        assert ((p - start[name]).norm() / start[name].norm()).item() > 1e-5, name


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_warm_up_leaves_no_trace(workers, cfg, world, dtype):
    cfg = replace(cfg, dtype=dtype, polar_dtype=dtype)
    warm, cold = (workers(world, train, cfg, w, False) for w in (True, False))
    assert all(r["untouched"] for r in warm)
    for a, b in zip(warm, cold):
        assert a["digests"] == b["digests"] and a["losses"] == b["losses"] and a["val"] == b["val"]


def shuffled(names, seed):
    names = list(names)
    random.Random(seed).shuffle(names)
    return tuple(names)


def test_orders_do_not_matter(workers, cfg):
    """Any scatter and work order gives the same bits: every parameter's arithmetic is its own."""
    cfg = replace(cfg, dtype="float32", polar_dtype="float32")
    want = same_on_all_ranks(workers(2, train, cfg, False, False))
    for seed in range(4):
        orders = dict(scatter_order=shuffled(cfg.scatter_order, seed), work_order=shuffled(cfg.work_order, seed + 100))
        if seed == 3:
            orders = dict(scatter_order=cfg.scatter_order[::-1], work_order=cfg.work_order[::-1])
        results = workers(2, train, replace(cfg, **orders), False, False)
        assert same_on_all_ranks(results)["digests"] == want["digests"], orders


@pytest.mark.parametrize("world", [1, 4])
def test_a_run_repeats_bitwise(workers, cfg, world):
    cfg = replace(cfg, dtype="float32", polar_dtype="float32")
    first, second = (workers(world, train, cfg, False, False) for _ in range(2))
    same_on_all_ranks(first)
    assert [r["digests"] for r in first] == [r["digests"] for r in second]
    assert [r["losses"] for r in first] == [r["losses"] for r in second]


def test_validation_is_bitwise_the_same_at_any_world(workers, cfg):
    """Each slice's mean is made on one rank, and the mean of them in the slices' order."""
    cfg = replace(cfg, dtype="float32", polar_dtype="float32", stages=tuple(replace(stage, steps=0) for stage in cfg.stages))
    losses = {r["val"] for world in (1, 2, 4) for r in workers(world, just_validate, cfg)}
    assert len(losses) == 1


def just_validate(rank, world, cfg):
    _, exchange, model, _ = build(rank, world, cfg)
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"), rank, world, False)
    return dict(val=tg.validate(model, val, exchange, (6, 20)))


def test_an_odd_number_of_matrices_a_rank(cfg):
    """At world 8 a rank owns 3 of the 24 MLP matrices, so that fc and proj, with its double rate, change places from rank to rank. No
    processes: each rank's update of its own part, put together, is world 1's."""
    cfg, step, results = replace(cfg, slices=8), tg.plan(cfg, 3), {}
    for world in (1, 8):
        parts = []
        for rank in range(world):
            model = tg.GPT(cfg, world, seed=1).requires_grad_(False)
            optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(rank, world))
            model.mlp_bank.copy_(torch.randn(model.mlp_bank.shape, generator=torch.Generator().manual_seed(1)))
            grad = torch.randn(model.mlp_bank.shape, generator=torch.Generator().manual_seed(2)).double()
            own = optimizer.own("mlp_bank", model.mlp_bank)
            assert own.size(0) == 24 // world
            optimizer.normuon(optimizer.rows["mlp_bank"], own, optimizer.own("mlp_bank", grad), step)
            parts.append(own)
        results[world] = torch.cat(parts)
    torch.testing.assert_close(results[8], results[1], rtol=1e-12, atol=1e-12)
    moved = (results[1] - torch.randn(results[1].shape, generator=torch.Generator().manual_seed(1))).flatten(1).norm(dim=1)
    assert (moved[1::2] > 1.8 * moved[::2]).all()


# ---------------------------------------------------------------------------------------------------- bf16 parameters

def low_bits(rank, world, cfg):
    """Optimizer steps with given gradients, the same on all ranks, beside a full fp32 copy of the banks."""
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
        for name in banks:
            own, low = optimizer.own(name, getattr(model, name)), optimizer.tensors[f"{name}.low"]
            words = copies[name].view(torch.int32)
            report.append((name, torch.equal(tg.join_halves(own, low).view(torch.int32), words),
                           torch.equal(own.view(torch.int16).int() & 0xFFFF, words >> 16 & 0xFFFF), bool(low.any())))
    return report, digest(model)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bf16_weights_with_low_words_are_fp32_weights(workers, cfg, world):
    results = workers(world, low_bits, replace(cfg, dtype="bfloat16", polar_dtype="bfloat16"))
    for report, bits in results:
        assert all(exact and truncated and used for _, exact, truncated, used in report), report
        assert bits == results[0][1]


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
    return dict(all_reduce=exchange.reduce("all_reduce", mine.clone()).wait(),
                scatter=exchange.reduce("reduce_scatter", mine.clone()).wait(),
                gather=exchange.gather(torch.where(torch.arange(8)[:, None] // (8 // world) == rank, mine, -1.0)).wait(),
                sum=exchange.sum(mine.clone()))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_exchange(workers, world):
    base = torch.arange(24, dtype=torch.float64).view(8, 3)
    total, rows = base * sum(range(1, world + 1)), 8 // world
    owner = torch.arange(8)[:, None] // rows
    for rank, got in enumerate(workers(world, exchanges)):
        assert torch.equal(got["sum"], total)
        torch.testing.assert_close(got["all_reduce"], total / world)
        torch.testing.assert_close(got["scatter"], (total / world)[rank * rows:(rank + 1) * rows])
        assert torch.equal(got["gather"], base * (owner + 1))


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


def test_failing_workers_fail_the_test_and_the_pool_recovers(workers):
    with pytest.raises(RuntimeError, match=r"rank 1 raised in misbehave(.|\n)*on purpose"):
        workers(2, misbehave, "raise", timeout=30)
    assert workers(2, misbehave, "") == [0, 10]
    with pytest.raises(RuntimeError, match="rank"):
        workers(2, misbehave, "die", timeout=30)
    with pytest.raises(TimeoutError, match=r"no answer from ranks \[0, 1\]"):
        workers(2, misbehave, "hang", timeout=3)
    assert workers(2, misbehave, "") == [0, 10]
