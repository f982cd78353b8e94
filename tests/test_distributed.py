"""Compares short whole runs on 1, 2, 4 and 8 processes: bit by bit where nothing rounds differently."""

import functools
import hashlib
import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import (
    CountingExchange,
    flatten,
    prefetch_exchange,
    random_documents,
    same_bits,
    write_shard,
)
from test_ngrams import ngram_config


def make_config(folder):
    """Returns a config with all layers and four stages, eight steps, in fp64, of width 16.

    Untying follows step 5; embed has its own update in step 7.
    """
    rng = np.random.default_rng(1)
    for i, (split, count) in enumerate((("train", 2500), ("train", 2500), ("val", 400))):
        path = folder / f"x_{split}_{i:06d}.bin"
        write_shard(path, random_documents(rng, count, 61, 60, 50), 61, 60)
    (folder / "vocabulary.txt").write_text("".join(f"{token:02x}\n" for token in range(61)))
    # fmt: off
    stages = (
        tg.Stage(2, 128, 24, tg.Windows(1, 3), 1.00, (1.0, 0.5, 0.25)),
        tg.Stage(1, 256, 40, tg.Windows(3, 7), 1.52, (1.0, 0.5)),
        tg.Stage(1, 384, 40, tg.Windows(5, 11), 1.73),
        tg.Stage(4, 384, 40, tg.Windows(6, 13), 0.15),
    )
    return replace(
        tg.CPU, data=str(folder), vocab_size=61, padded_vocab=64, bos_id=60, ngrams=tg.Ngrams(),
        bigram_vocab_size=320, heads=2, head_dim=8, mlp_dim=32, window_unit=3, microbatches=8, stages=stages,
        val_slices=3, val_slice_tokens=100, val_every=0, momentum_warmup=3, momentum_cooldown=2,
        two_momenta_from=2, head_chunk=20, dtype="float64", bank_dtype="float64", pointer_dim=8,
        pointer_window=17,
    )
    # fmt: on


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory):
    """Returns the same with a layer of each kind, prefixes, candidates, and two micro-batches."""
    cfg = make_config(tmp_path_factory.mktemp("shards"))
    layers = (
        tg.Layer("paired", narrow_qk=True, value=True, gate=True, x0=True, ngram=True),
        tg.Layer("plain", "long", key_shift=True, xsa=True, gate=True, x0=True),
        tg.Layer("", ngram=True, mlps=2),
        tg.Layer("plain", narrow_v=True, value=True, xsa=True, gate=True, mudd=True),
    )
    parts = zip(cfg.stages, ((0.25,), (0.25,), (), ()), ((96, 80), (64,), (), ()))
    stages = tuple(replace(stage, prefix=prefix, sampled_columns=counts) for stage, prefix, counts in parts)
    cfg = replace(cfg, layers=layers, skip_from=0, backout_from=1, skip_to=2, microbatches=2, stages=stages)
    return replace(cfg, padded_vocab=128)


# Of runs of eight steps. embed is untied after step 5.
AVERAGES = (
    tg.WeightAverage(("lm_head", "embed"), 5, 0.4, 0.65, every=2, also=(3,), last_rate=0.3),
    tg.WeightAverage(("vo_bank", "mlp_bank"), 4, 0.3, every=2, offset=1),
    tg.WeightAverage(("value_embeds",), 6, 0.2, every=3, offset=2, keep_norm=False),
    tg.WeightAverage(("qk_bank", "vo_bank", "mlp_bank"), 3, 0.4, 0.5),
)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Returns a config of eight steps, in fp64, with n-grams, sparse exchange, all cadences and averages."""
    cfg = ngram_config(tmp_path_factory.mktemp("shards"), 8, last=3, update_every=(2, 4))
    return with_dtype(replace(cfg, averages=AVERAGES), "float64")


def with_dtype(cfg, dtype):
    cfg = replace(cfg, dtype=dtype, bank_dtype=dtype)
    return tg.override(cfg, f"ngrams.dtype={dtype}")


def dense(cfg, names=("value_embeds", "bigram_embed", "embed")):
    """Makes the exchange of these tables whole, with the fp32 sum."""
    change = dict(exchange="reduce_scatter", reduction="fp32")
    params = (replace(row, **change) if row.name in names else row for row in cfg.params)
    return replace(cfg, params=tuple(params))


def shuffled(cfg, seed):
    """Returns the config with a random order of scatter, and of work."""
    rng, n = random.Random(seed), len(cfg.params)
    rows = zip(rng.sample(cfg.params, n), rng.sample(range(n), n))
    return replace(cfg, params=tuple(replace(row, update_order=order) for row, order in rows))


def build(rank, world_size, cfg, seed=0, backend=tg.TORCH_BACKEND):
    """Returns exchange, model and optimizer of a rank."""
    exchange = CountingExchange(rank, world_size)
    tg.check_config(cfg, world_size)
    model = tg.GPT(cfg, world_size, seed=seed, backend=backend)
    with torch.no_grad():  # away from zeros, which hide mistakes
        noise = torch.Generator().manual_seed(99)
        for name, shape in sorted(tg.param_shapes(cfg, 1).items()):  # in any order of the table
            if name != "embed":
                getattr(model, name)[: shape[0]] += 0.03 * torch.randn(shape, generator=noise)
        model.embed.copy_(model.lm_head.T)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), exchange)
    model.ngrams = optimizer.ngrams
    return exchange, model, optimizer


def start_values(cfg):
    """Returns rows and state of the table of n-grams, away from zeros; a quarter of the moments are 0."""
    g, n = torch.Generator().manual_seed(6), cfg.ngrams
    rows = torch.randn(len(n.orders) * n.rows_per_order, n.width, generator=g).to(tg.dtype_of(n.dtype))
    moments = torch.rand(len(rows), generator=g, dtype=tg.acc_dtype(cfg)) * (torch.arange(len(rows)) % 4 > 0)
    return rows, moments * 1e-3, torch.zeros(len(rows), dtype=torch.int32)


def join(ranks):
    """Returns a table and its state from the ranks' parts; row r is on rank r modulo their number."""
    return [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*ranks)]


def spoil_grads(optimizer, value):
    """Sets a step's gradients to `value`. What no step writes, like unread parts of banks, stays 0."""
    for param in optimizer.params.values():
        param.written = torch.tensor(True)  # of those that have it
        if param.main_grad is None:
            param.p.grad = torch.full_like(param.p, value)
        else:
            param.main_grad.masked_fill_(param.main_grad != 0, value)


def states(model, optimizer):
    """Yields each parameter's name and state, on one rank; of small parameters their parts of a vector's."""
    small = [param for param in optimizer.params.values() if isinstance(param, tg.SmallParams)]
    vectors = {param.p.data_ptr(): param.name for param in small}
    for name, p in model.named_parameters():
        vector = vectors.get(p.untyped_storage().data_ptr())
        state = optimizer.params[vector or name].state
        if vector:
            part = slice(p.storage_offset(), p.storage_offset() + p.numel())
            state = {
                key: t[..., part].view(*t.shape[:-1], *p.shape) if t.dim() else t for key, t in state.items()
            }
        yield name, state


def batches_of(cfg, rank, world_size, first=0, position=(0, 0)):
    """Returns the batches of a run from step `first` on."""
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size, position)
    plans = [tg.plan_step(cfg, step) for step in range(first, cfg.steps)]
    return tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))


def first_batch(cfg, rank=0, world_size=1):
    batches = batches_of(cfg, rank, world_size)
    batch = batches.next()
    batches.loader.close()
    return batch


def run_steps(model, optimizer, first=0, position=(0, 0)):
    """Trains from step `first` to the end; yields every batch and its loss."""
    exchange = optimizer.exchange
    batches = batches_of(model.cfg, exchange.rank, exchange.world_size, first, position)
    try:
        while batch := batches.next():
            yield batch, tg.train_step(model, optimizer, batch, batches.peek)
    finally:
        batches.loader.close()


def whole(model, optimizer):
    """Copies all parameters, after their gathers, without padding, which must be 0."""
    shapes, found = tg.param_shapes(model.cfg, 1), {}
    optimizer.wait()
    for name, (rows, *_) in shapes.items():
        p = getattr(model, name).detach()
        found[name] = p[:rows].clone()
        assert not p[rows:].any(), name
    return found


def digest(model, optimizer):
    """Hashes all parameters' bits, after their gathers."""
    optimizer.wait()
    return digest_of(dict(model.named_parameters()))


def digest_of(state):
    """Hashes a nest of dicts of tensors and numbers."""
    h = hashlib.sha256()
    for name, value in sorted(flatten(state).items()):
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes()
        h.update(f"{name} {value}".encode())
    return h.hexdigest()


def look(model, optimizer):
    """Returns the digest, and whether embed is lm_head's transpose."""
    return digest(model, optimizer), torch.equal(model.embed, model.lm_head.T)


def warm_up(model, optimizer, steps, prefetch):
    """Warms up with these steps, and checks that nothing is left of it."""
    cfg, table = model.cfg, optimizer.ngrams
    data, before = tg.open_dataset(cfg), tg.training_state(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "warmup_steps", lambda cfg: steps)
        tg.warm_up(tg.Training(data, model, optimizer, tg.ValLoader(cfg, data.val), prefetch))
    assert same_bits(before, tg.training_state(model, optimizer))
    for param in optimizer.params.values():
        assert param.p.grad is None
        assert not (param.written if isinstance(param, tg.DenseParam) else param.main_grad.any())
    assert not any(t.any() for t in (*table.state_dict().values(), table.main_grad))
    assert optimizer.begun is None


def train(rank, world_size, cfg, warm=(), after_step=look):
    """Trains a whole run, with its averages and validations before and after. Returns what it found, by name.

    warm: steps of a warm-up. steps: what after_step(model, optimizer) returned. sent: this rank's bytes in
    training.
    """
    exchange, model, optimizer = build(rank, world_size, cfg)
    if warm:
        warm_up(model, optimizer, warm, prefetch_exchange(rank, world_size))
    if optimizer.ngrams:
        for t, value in zip(optimizer.ngrams.state_dict().values(), start_values(cfg)):
            own = value if len(t) == len(value) else value[rank::world_size]
            t[: len(own)] = own
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    windows = tg.window_tokens(cfg, cfg.val_windows)
    model.use_stage(len(cfg.stages) - 1)
    found = {"start": tg.validate(model, val, exchange, windows), "losses": [], "steps": []}
    exchange.bytes_sent.clear()
    batches = batches_of(cfg, rank, world_size)
    for _ in range(cfg.steps):
        found["losses"].append(tg.train_step(model, optimizer, batches.next(), batches.peek).item())
        found["steps"].append(after_step(model, optimizer))
    batches.loader.close()
    found["sent"] = dict(exchange.bytes_sent | batches.exchange.bytes_sent)
    optimizer.apply_averages()
    found["val"] = tg.validate(model, val, exchange, windows)
    found["final"] = whole(model, optimizer)
    if optimizer.ngrams:
        found["table"] = [optimizer.ngrams.state_dict()[key].clone() for key in ("block", "moments", "last")]
    return found


def same_on_all_ranks(results):
    for r in results[1:]:
        assert all(same_bits(r[key], results[0][key]) for key in ("start", "steps", "val", "final"))
    return results[0]


@functools.cache
def one_rank(cfg):
    """Trains a run in this process, without a process group."""
    return train(0, 1, cfg)


# ------------------------------------------------------------------------------------------------ whole runs


def test_everything_trains(everything):
    """Checks what the tests below rely on: every number of a run moves, and embed is untied when it must."""
    run, cfg = one_rank(everything), everything
    digests, ties = zip(*run["steps"])
    assert ties == (True,) * 7 + (False,) and len(set(digests)) == cfg.steps
    _, model, optimizer = build(0, 1, cfg)
    for name, p in whole(model, optimizer).items():
        assert (run["final"][name] - p).norm() > 1e-5 * p.norm(), name
    rows, moments, last = run["table"]
    changed = (rows != start_values(cfg)[0]).any(-1)
    assert 300 < changed.sum() < len(rows)
    assert set(last[changed].tolist()) == {1, 3, 5} and not last[~changed].any()  # steps 1, 3 and 7


def touched_rows(cfg, rank, world_size):
    """Returns the rows that a rank reads in every step: of tokens, of bigrams or n-grams."""
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size)
    steps = []
    for plan in (tg.plan_step(cfg, step) for step in range(cfg.steps)):
        parts = loader.micro_batches(plan)
        found = [[part.inputs for part in parts], [part.hashed_rows.flatten() for part in parts]]
        steps.append([set(torch.cat(ids).tolist()) for ids in found])
    loader.close()
    return steps


def bytes_sent(cfg, rank, n):
    """Computes what one rank of n must send in training, from the batches alone."""
    sent, shapes, others = Counter(), tg.param_shapes(cfg, n), n - 1
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    reads = [touched_rows(cfg, r, n) for r in range(n)]
    accurate, groups, numbers = tg.acc_dtype(cfg).itemsize, defaultdict(list), itertools.count()
    for row in tg.used_params(cfg):
        name = "" if row.kind == "small" else row.name
        groups[name, row.dtype, row.betas, row.update_every, row.reduction].append(row)
    for (name, *_), rows in groups.items():
        row, sizes = rows[0], [math.prod(shapes[row.name]) for row in rows]
        size = sizes[0] if name else tg.padded(sum(tg.padded(size, 8) for size in sizes), 8 * n)
        row = row if name else replace(row, name=f"small_{next(numbers)}")
        itemsize = tg.dtype_of(cfg.dtype).itemsize if row.dtype == "model" else accurate
        nbytes, shape = itemsize * size, shapes.get(name)
        touched, fp32 = set(), row.reduction == "fp32"
        for plan in plans:
            touched |= reads[rank][plan.step][row.kind == "hashed"]
            if not plan.updates(row.update_every):
                continue
            is_due = row.name != "embed" or plan.step > tg.untie_step(cfg)
            if row.exchange == "sparse":
                away = sum(id // (shape[0] // n) != rank for id in touched)
                sent[f"counts {row.name}"] += 8 * others
                sent[f"row ids {row.name}"] += 4 * away
                if is_due:
                    sent[f"gradient rows {row.name}"] += away * nbytes // shape[0]
                touched = set()
            elif is_due:
                sent[f"{'all_to_all' if fp32 else 'reduce_scatter'} {row.name}"] += nbytes * others // n
            if is_due:
                sent[f"all_gather {row.name}"] += nbytes * others // n
    for moment in "exp_avg", "exp_avg_sq":
        sent[f"all_gather lm_head.{moment}"] += accurate * math.prod(shapes["lm_head"]) * others // n
    if cfg.ngrams.orders:
        row_bytes = cfg.ngrams.width * tg.dtype_of(cfg.ngrams.dtype).itemsize
        read = [set() for _ in range(n)]
        for plan in plans:
            for ids, steps in zip(read, reads):
                ids |= steps[plan.step][1]
            if plan.updates(cfg.ngrams.update_every):
                away = sum(id % n != rank for id in read[rank])
                asked = sum(id % n == rank for r in range(n) if r != rank for id in read[r])
                sent["counts ngrams"] += 8 * others
                sent["row ids ngrams"] += 4 * away
                sent["gradient rows ngrams"] += away * row_bytes
                sent["rows ngrams"] += asked * row_bytes
                read = [set() for _ in range(n)]
    return sent


def assert_close(run, want, bound):
    """Compares losses, parameters and the table, by their norms."""
    assert run["losses"] == pytest.approx(want["losses"], rel=bound)
    assert run["val"] == pytest.approx(want["val"], rel=bound)
    tensors = [(name, run["final"][name], p) for name, p in want["final"].items()]
    for name, ours, p in (*tensors, *zip("rml", run.get("table", ()), want.get("table", ()))):
        difference = ours[: len(p)] - p
        assert difference.double().norm() < bound * p.double().norm(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, changes",
    [(2, ["main_grad=false"]), (4, ["params.*.reduction=fp32"]), (8, [])],
)
def test_world_size_does_not_matter(workers, everything, world_size, changes):
    """Gives the same losses, parameters and table up to rounding, and the first validation's bits.

    Ranks add gradients in another order than micro-batches do, which moves a gradient by a few units eps of
    the arithmetic. orthogonalize may blow that up a thousandfold where a gradient has small singular values:
    hence 1000 eps. Every rank sends the bytes that it must.
    """
    want, cfg = one_rank(everything), functools.reduce(tg.override, changes, everything)
    results = workers(world_size, train, cfg)
    run = same_on_all_ranks(results)
    run["losses"] = np.mean([r["losses"] for r in results], axis=0)
    run["table"] = join([r["table"] for r in results])
    assert run["start"] == want["start"] and [t for _, t in run["steps"]] == [t for _, t in want["steps"]]
    assert_close(run, want, 1000 * torch.finfo(torch.float64).eps)
    for rank in range(0, world_size, 3):
        assert results[rank]["sent"] == bytes_sent(cfg, rank, world_size)


@pytest.mark.slow
def test_what_changes_no_bit(workers, everything):
    """Checks orders of scatter and of work, sparse and dense exchange, on four ranks.

    Where it is dense, a table takes the bytes of all rows.
    """
    cfg = with_dtype(tg.override(everything, "ngrams.orders="), "float32")
    reverse = replace(
        cfg, params=tuple(replace(row, update_order=-row.update_order) for row in cfg.params[::-1])
    )
    variants = [
        cfg,
        dense(shuffled(cfg, 7)),
        dense(reverse, ("embed",)),
        dense(shuffled(cfg, 8), ("bigram_embed",)),
    ]
    ranks = [workers(4, train, variant) for variant in variants]
    want, *others = map(same_on_all_ranks, ranks)
    for run, results in zip(others, ranks[1:]):
        assert all(run[key] == want[key] for key in ("steps", "val", "start"))
        assert [r["losses"] for r in results] == [r["losses"] for r in ranks[0]]
        assert same_bits(run["final"], want["final"])
    for variant, results in zip(variants[:2], ranks):
        assert results[1]["sent"] == bytes_sent(variant, 1, 4)
    sparse, whole = (results[1]["sent"] for results in ranks[:2])
    for name in "value_embeds", "bigram_embed", "embed":
        rows = sum(sparse[f"{kind} {name}"] for kind in ("gradient rows", "counts", "row ids"))
        assert rows < whole[f"all_to_all {name}"], name


@pytest.mark.slow
def test_warm_up_leaves_no_trace(workers, everything):
    """Compares the bits of bf16 runs with and without one that ends between updates."""
    cfg = with_dtype(everything, "bfloat16")
    warm, cold = (workers(2, train, cfg, steps) for steps in ([range(0, 8, 3), range(5)], ()))
    for a, b in zip(warm, cold):
        assert all(map(torch.equal, a.pop("table"), b.pop("table")))
        assert same_bits(a, b)
    assert cold[0]["val"] == pytest.approx(one_rank(everything)["val"], abs=0.2)


def first_gradients(rank, world_size, cfg):
    """Returns this rank's blocks of the first batch's mean gradients."""
    exchange, model, optimizer = build(rank, world_size, cfg)
    optimizer.step = lambda *_: None
    tg.train_step(model, optimizer, first_batch(cfg, rank, world_size))
    found = {}
    for name, param in optimizer.params.items():
        grad = param.p.grad if param.main_grad is None else param.main_grad
        found[name] = exchange.reduce(name, grad, in_rank_order=True).wait()
    return found


@pytest.mark.slow
def test_eight_ranks_sum_as_eight_micro_batches_do(workers, everything):
    """Compares mean gradients bit by bit, with the fp32 sum and one micro-batch a rank.

    Micro-batch after micro-batch is added at both world sizes, and factors of 1/8 are exact. That holds where
    autograd adds up micro-batches, and in tables. Written in place, as the head's always is, a product is
    added inside its own sum, and the bits may differ.
    """
    cfg = with_dtype(tg.override(everything, "ngrams.orders="), "float32")
    cfg = tg.override(dense(replace(cfg, main_grad=False)), "params.*.reduction=fp32")
    single, parts = workers(1, first_gradients, cfg)[0], workers(8, first_gradients, cfg)
    for name, want in single.items():
        grad = torch.cat([part[name] for part in parts])
        rows = min(len(grad), len(want))  # banks and vectors have other padding
        if name == "lm_head":
            torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6 * want.abs().max().item())
        assert want.any() and (name == "lm_head" or torch.equal(grad[:rows], want[:rows])), name
        assert not grad[rows:].any() and not want[rows:].any()


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


@pytest.mark.slow
def test_gathers_end_in_the_next_step(everything, monkeypatch):
    """Makes a parameter NaN until its gather is waited for.

    No gather is waited for in the step that starts it. The next step, or a validation, waits for all.
    """
    want, waited, orders = one_rank(everything), [], []

    def gather(self, name, t):
        return tg.Pending(t, LateGather(name, t, waited))

    def record(model, optimizer):
        orders.append(list(waited))
        waited.clear()

    monkeypatch.setattr(tg.Exchange, "gather", gather)
    run = train(0, 1, everything, after_step=record)
    assert run["losses"] == want["losses"] and run["val"] == want["val"]
    assert same_bits(run["final"], want["final"])
    banks = ["qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank"]
    small, moments = ["small_0", "small_1", "small_2"], ["lm_head.exp_avg", "lm_head.exp_avg_sq"]
    every = [*banks, "lm_head", "value_embeds", *small]
    # Untying, after step 5, gathers moments. In step 5 value_embeds is not updated.
    assert orders == [[], banks, every, banks, every, [*banks, *moments], [*banks, "lm_head", *small], banks]


# -------------------------------------------------------------------------------------------------- exchange


def wide_range(rank):
    """Returns numbers over many powers of two, bf16, so that the order of additions shows."""
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(64, 5, generator=g) * 2.0 ** torch.randint(-10, 10, (64, 5), generator=g)).bfloat16()


def run_exchanges(rank, world_size):
    exchange, t = tg.Exchange(rank, world_size), wide_range(rank)
    pending = [exchange.reduce("x", t.clone(), in_rank_order) for in_rank_order in (False, True)]
    pending.append(exchange.all_reduce(t.clone()))
    owner = torch.arange(64)[:, None] // (64 // world_size)
    pending.append(exchange.gather("x", torch.where(owner == rank, t, -1)))
    return [p.wait() for p in pending], exchange.from_rank_0({"rank": rank})


def test_exchange(workers):
    """Compares the fp32 sum to the bit, on all ranks: in rank order, of unrounded gradients."""
    parts = [wide_range(rank).float() for rank in range(4)]
    want, other = parts[0] + parts[1] + parts[2] + parts[3], parts[3] + parts[2] + parts[1] + parts[0]
    assert not torch.equal(want, other)
    gathered = torch.cat([part[16 * rank : 16 * rank + 16] for rank, part in enumerate(parts)])
    near = dict(rtol=0, atol=2**-6 * want.abs().max().item())
    for rank, (results, value) in enumerate(workers(4, run_exchanges)):
        block, block_fp32, total, gather = results
        own = slice(16 * rank, 16 * rank + 16)
        for t, expected in (block, want[own] / 4), (total, want):
            torch.testing.assert_close(t.float(), expected, **near)
        for t, expected in (block_fp32, want[own] / 4), (gather, gathered.bfloat16()):
            assert t.dtype == expected.dtype and torch.equal(t, expected)
        assert value == {"rank": 0}


def misbehave(rank, world_size, how):
    if rank == 1 and how:
        raise ValueError("on purpose")
    return rank * 10


def test_a_failing_worker_fails_the_test_and_the_pool_recovers(workers):
    with pytest.raises(RuntimeError, match=r"rank 1 raised in misbehave(.|\n)*on purpose"):
        workers(3, misbehave, True)
    assert workers(3, misbehave, False) == [0, 10, 20]


# --------------------------------------------------------------------------------- the losses of single steps


def test_the_loss_of_a_step_is_a_mean(cfg, monkeypatch):
    """Takes a head of zeros, which loses log V on each prediction; last tokens have fewer of them.

    FP8 gradients are in units of a micro-batch's share, which the losses' weights hold already: with more
    micro-batches smaller gradients are then as far from underflow.
    """
    cfg = replace(cfg, head_chunk=6, pointer_dim=0)  # chunks of 16 tokens
    _, model, optimizer = build(0, 1, cfg)
    with torch.no_grad():
        model.lm_head.zero_()
    scales, head_loss_and_grad = [], tg.GPT.head_loss_and_grad

    def record(self, x, targets, weights, head, loss_share, **options):
        scales.append((loss_share, weights.tolist()))
        return head_loss_and_grad(self, x, targets, weights, head, loss_share, **options)

    monkeypatch.setattr(tg.GPT, "head_loss_and_grad", record)
    batch = first_batch(cfg)
    loss = tg.train_step(model, optimizer, batch)
    T, weights = len(batch.micro_batches[0].inputs), batch.plan.mtp
    share = sum(weight * (T - k) for k, weight in enumerate(weights)) / (T * sum(weights))
    assert len(weights) == 3
    assert loss.item() == pytest.approx(share * math.log(cfg.padded_vocab), rel=1e-12)
    assert scales == [(1 / 8, [weight / 8 for weight in weights])] * 8


def test_validation_losses_are_averaged_in_fp32(cfg):
    """Validates a bf16 model: with its 8 bits the mean would be off in the third digit."""
    cfg = with_dtype(cfg, "bfloat16")
    exchange, model, _ = build(0, 1, cfg)
    val, windows = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val")), {"short": 6, "long": 20}
    losses = [model.token_losses(batch, windows).mean().item() for batch in map(val.slice, range(3))]
    assert len(set(losses)) == 3
    assert tg.validate(model, val, exchange, windows) == pytest.approx(np.mean(losses), rel=1e-6)
