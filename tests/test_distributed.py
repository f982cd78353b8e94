"""Compares short whole runs on 1, 2, 4 and 8 processes: bit by bit where nothing rounds differently."""

import functools
import hashlib
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE
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
    for name, count in {"train_000000": 2500, "train_000001": 2500, "val_000002": 400}.items():
        write_shard(folder / f"x_{name}.bin", random_documents(rng, count, 61, 60, 50), 61, 60)
    (folder / "vocabulary.txt").write_text("".join(f"{token:02x}\n" for token in range(61)))
    # fmt: off
    stages = (
        tg.Stage(2, 128, 24, tg.Windows(1, 3), 1.00, (1.0, 0.5, 0.25)),
        tg.Stage(1, 256, 40, tg.Windows(3, 7), 1.52, (1.0, 0.5)),
        tg.Stage(1, 384, 40, tg.Windows(5, 11), 1.73),
        tg.Stage(4, 384, 40, tg.Windows(6, 13), 0.15),
    )
    return replace(
        BASE, data=str(folder), vocab_size=61, padded_vocab=64, bos_id=60, ngrams=tg.Ngrams(),
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
    first, second, third, last = cfg.stages
    first = replace(first, prefix=(0.25,), sampled_columns=(96, 80))
    second = replace(second, prefix=(0.25,), sampled_columns=(64,))
    stages = first, second, third, last
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
    for name in names:
        cfg = tg.override(cfg, f"params.{name}.exchange=reduce_scatter")
        cfg = tg.override(cfg, f"params.{name}.reduction=fp32")
    return cfg


def shuffled(cfg, seed):
    """Returns the config with a random order of scatter, and of work."""
    rng = random.Random(seed)
    rows = list(cfg.params)
    rng.shuffle(rows)
    orders = list(range(len(rows)))
    rng.shuffle(orders)
    return with_orders(cfg, rows, orders)


def with_orders(cfg, rows, orders):
    """Returns the config with these rows of parameters, updated in these orders."""
    params = [replace(row, update_order=order) for row, order in zip(rows, orders)]
    return replace(cfg, params=tuple(params))


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
    g = torch.Generator().manual_seed(6)
    ngrams = cfg.ngrams
    count = ngrams.rows_per_token * ngrams.rows_per_order
    rows = torch.randn(count, ngrams.width, generator=g).to(tg.dtype_of(ngrams.dtype))
    moments = torch.rand(count, generator=g, dtype=tg.acc_dtype(cfg)) * 1e-3
    moments[::4] = 0
    return rows, moments, torch.zeros(count, dtype=torch.int32)


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
    vectors = {}
    for param in optimizer.params.values():
        if isinstance(param, tg.SmallParams):
            vectors[param.p.data_ptr()] = param
    for name, p in model.named_parameters():
        vector = vectors.get(p.untyped_storage().data_ptr())
        if vector is None:
            yield name, optimizer.params[name].state
        else:
            yield name, part_of_state(vector.state, p)


def part_of_state(state, p):
    """Returns what a vector's state has for the parameter p, a view of the vector, in p's shape."""
    begin = p.storage_offset()
    part = {}
    for key, t in state.items():
        if t.dim():  # else it is the count of steps
            t = t[..., begin : begin + p.numel()].unflatten(-1, p.shape)
        part[key] = t
    return part


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
        for _ in range(first, model.cfg.steps):
            batch = batches.next()
            yield batch, tg.train_step(model, optimizer, batch, batches.peek)
    finally:
        batches.loader.close()


def whole(model, optimizer):
    """Copies all parameters, after their gathers, without padding, which must be 0."""
    found = {}
    optimizer.wait()
    for name, shape in tg.param_shapes(model.cfg, 1).items():
        p = getattr(model, name).detach()
        rows = shape[0]
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
    cfg = model.cfg
    data = tg.open_dataset(cfg)
    before = tg.training_state(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "warmup_steps", lambda cfg: steps)
        tg.warm_up(tg.Training(data, model, optimizer, tg.ValLoader(cfg, data.val), prefetch))
    assert same_bits(before, tg.training_state(model, optimizer))
    for param in optimizer.params.values():
        assert param.p.grad is None
        if isinstance(param, tg.DenseParam):
            assert not param.written
        else:
            assert not param.main_grad.any()
    assert not optimizer.ngrams.main_grad.any()
    for t in optimizer.ngrams.state_dict().values():
        assert not t.any()
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
            if len(t) < len(value):  # a rank has its own rows only
                value = value[rank::world_size]
            t[: len(value)] = value
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    windows = tg.window_tokens(cfg, cfg.val_windows)
    model.use_rotary(len(cfg.stages) - 1)
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
        state = optimizer.ngrams.state_dict()
        found["table"] = [state["block"].clone(), state["moments"].clone(), state["last"].clone()]
    return found


def same_on_all_ranks(results):
    """Checks that all ranks found the same; returns what the first one did."""
    for rank in results:
        for key in ("start", "steps", "val", "final"):
            assert same_bits(rank[key], results[0][key]), key
    return results[0]


@functools.cache
def one_rank(cfg):
    """Trains a run in this process, without a process group."""
    return train(0, 1, cfg)


# ------------------------------------------------------------------------------------------------ whole runs


def test_everything_trains(everything):
    """Checks what the tests below rely on: every number of a run moves, and embed is untied when it must."""
    cfg = everything
    run = one_rank(cfg)
    digests, ties = zip(*run["steps"])
    assert ties == (True,) * 7 + (False,)
    assert len(set(digests)) == cfg.steps
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
    for step in range(cfg.steps):
        tokens, hashed = set(), set()
        for part in loader.micro_batches(tg.plan_step(cfg, step)):
            tokens.update(part.inputs.tolist())
            hashed.update(part.hashed_rows.flatten().tolist())
        steps.append((tokens, hashed))
    loader.close()
    return steps


class Sent:
    """Computes what one rank of n must send in training, from the batches alone.

    bytes: by kind of exchange and name.
    """

    def __init__(self, cfg, rank, n):
        self.cfg = cfg
        self.rank = rank
        self.n = n
        self.bytes = Counter()
        self.plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
        self.reads = [touched_rows(cfg, r, n) for r in range(n)]
        self.accurate = tg.acc_dtype(cfg).itemsize
        self.shapes = tg.param_shapes(cfg, n)
        for row in tg.used_params(cfg):
            if row.exchange == "sparse":
                self.add_sparse(row)
            elif row.kind != "small":
                self.add_whole(row, row.name, math.prod(self.shapes[row.name]))
        self.add_small()
        for moment in "exp_avg", "exp_avg_sq":  # at untying
            self.add_part(f"all_gather lm_head.{moment}", self.accurate * math.prod(self.shapes["lm_head"]))
        if cfg.ngrams.orders:
            self.add_ngrams()

    def add_part(self, what, nbytes):
        """Counts that all ranks but this one send or get their parts of `nbytes`."""
        self.bytes[what] += nbytes * (self.n - 1) // self.n

    def itemsize(self, row):
        if row.dtype == "model":
            return tg.dtype_of(self.cfg.dtype).itemsize
        return self.accurate

    def is_due(self, row, plan):
        """Returns whether a step updates the parameter; until it is untied, embed is lm_head's copy."""
        return plan.updates(row.update_every) and (row.name != "embed" or plan.step > tg.untie_step(self.cfg))

    def add_small(self):
        """Counts the exchange of small parameters, which are parts of vectors."""
        vectors = defaultdict(list)
        for row in tg.used_params(self.cfg):
            if row.kind == "small":
                vectors[row.betas, row.dtype, row.update_every, row.reduction].append(row)
        for number, rows in enumerate(vectors.values()):
            size = sum(tg.padded(math.prod(self.shapes[row.name]), 8) for row in rows)
            self.add_whole(rows[0], f"small_{number}", tg.padded(size, 8 * self.n))

    def add_whole(self, row, name, size):
        """Counts the exchange of a parameter or vector of `size` numbers as a whole."""
        nbytes = self.itemsize(row) * size
        reduce = "reduce_scatter"
        if row.reduction == "fp32":
            reduce = "all_to_all"
        for plan in self.plans:
            if self.is_due(row, plan):
                self.add_part(f"{reduce} {name}", nbytes)
                self.add_part(f"all_gather {name}", nbytes)

    def add_sparse(self, row):
        """Counts the exchange of a table's touched rows; block r of the rows is rank r's."""
        count, *width = self.shapes[row.name]
        row_bytes = self.itemsize(row) * math.prod(width)
        touched = set()
        for plan in self.plans:
            tokens, hashed = self.reads[self.rank][plan.step]
            if row.kind == "hashed":
                touched |= hashed
            else:
                touched |= tokens
            if not plan.updates(row.update_every):
                continue
            away = sum(id // (count // self.n) != self.rank for id in touched)
            touched = set()
            self.bytes[f"counts {row.name}"] += 8 * (self.n - 1)
            self.bytes[f"row ids {row.name}"] += 4 * away
            if self.is_due(row, plan):
                self.bytes[f"gradient rows {row.name}"] += away * row_bytes
                self.add_part(f"all_gather {row.name}", count * row_bytes)

    def add_ngrams(self):
        """Counts the exchange of rows of n-grams; row r is on rank r modulo n."""
        ngrams = self.cfg.ngrams
        row_bytes = ngrams.width * tg.dtype_of(ngrams.dtype).itemsize
        read = [set() for _ in range(self.n)]
        for plan in self.plans:
            for rank in range(self.n):
                _, hashed = self.reads[rank][plan.step]
                read[rank] |= hashed
            if not plan.updates(ngrams.update_every):
                continue
            asked = 0
            for rank in range(self.n):
                if rank != self.rank:
                    asked += sum(id % self.n == self.rank for id in read[rank])
            away = sum(id % self.n != self.rank for id in read[self.rank])
            self.bytes["counts ngrams"] += 8 * (self.n - 1)
            self.bytes["row ids ngrams"] += 4 * away
            self.bytes["gradient rows ngrams"] += away * row_bytes
            self.bytes["rows ngrams"] += asked * row_bytes
            read = [set() for _ in range(self.n)]


def bytes_sent(cfg, rank, n):
    return Sent(cfg, rank, n).bytes


def assert_close(run, want, bound):
    """Compares losses, parameters and the table, by their norms."""
    assert run["losses"] == pytest.approx(want["losses"], rel=bound)
    assert run["val"] == pytest.approx(want["val"], rel=bound)
    for name, p in want["final"].items():
        assert_near(name, run["final"][name], p, bound)
    for name, ours, t in zip(("rows", "moments", "last"), run["table"], want["table"]):
        assert_near(name, ours[: len(t)], t, bound)  # the rest is padding


def assert_near(name, ours, want, bound):
    difference = (ours - want).double()
    assert difference.norm() < bound * want.double().norm(), name


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
    want = one_rank(everything)
    cfg = functools.reduce(tg.override, changes, everything)
    results = workers(world_size, train, cfg)
    run = same_on_all_ranks(results)
    run["losses"] = np.mean([rank["losses"] for rank in results], axis=0)
    run["table"] = join([rank["table"] for rank in results])
    assert run["start"] == want["start"]
    for (_, tied), (_, wanted) in zip(run["steps"], want["steps"], strict=True):
        assert tied == wanted
    assert_close(run, want, 1000 * torch.finfo(torch.float64).eps)
    for rank in range(0, world_size, 3):
        assert results[rank]["sent"] == bytes_sent(cfg, rank, world_size)


def assert_same_bits(ranks, wanted):
    """Compares two runs: each rank's losses, and what all ranks of a run have in common."""
    for rank, want in zip(ranks, wanted, strict=True):
        assert rank["losses"] == want["losses"]
    run = same_on_all_ranks(ranks)
    want = same_on_all_ranks(wanted)
    for key in ("steps", "val", "start"):
        assert run[key] == want[key], key
    assert same_bits(run["final"], want["final"])


@pytest.mark.slow
def test_what_changes_no_bit(workers, everything):
    """Checks orders of scatter and of work, sparse and dense exchange, on four ranks.

    Where it is dense, a table takes the bytes of all rows.
    """
    cfg = with_dtype(tg.override(everything, "ngrams.orders="), "float32")
    rows = cfg.params[::-1]
    reverse = with_orders(cfg, rows, [-row.update_order for row in rows])
    all_dense = dense(shuffled(cfg, 7))
    sparse = workers(4, train, cfg)
    whole = workers(4, train, all_dense)
    assert_same_bits(whole, sparse)
    for variant in dense(reverse, ("embed",)), dense(shuffled(cfg, 8), ("bigram_embed",)):
        assert_same_bits(workers(4, train, variant), sparse)

    sparse_bytes = sparse[1]["sent"]
    whole_bytes = whole[1]["sent"]
    assert sparse_bytes == bytes_sent(cfg, 1, 4)
    assert whole_bytes == bytes_sent(all_dense, 1, 4)
    for row in tg.used_params(cfg):
        if row.is_table:
            sent = sparse_bytes[f"gradient rows {row.name}"]
            sent += sparse_bytes[f"counts {row.name}"] + sparse_bytes[f"row ids {row.name}"]
            assert sent < whole_bytes[f"all_to_all {row.name}"], row.name


@pytest.mark.slow
def test_warm_up_leaves_no_trace(workers, everything):
    """Compares the bits of bf16 runs with and without one that ends between updates."""
    cfg = with_dtype(everything, "bfloat16")
    warm = workers(2, train, cfg, [range(0, 8, 3), range(5)])
    cold = workers(2, train, cfg)
    for a, b in zip(warm, cold):
        assert same_bits(a, b)
    assert cold[0]["val"] == pytest.approx(one_rank(everything)["val"], abs=0.2)


def first_gradients(rank, world_size, cfg):
    """Returns this rank's blocks of the first batch's mean gradients."""
    exchange, model, optimizer = build(rank, world_size, cfg)
    optimizer.step = lambda *_: None
    tg.train_step(model, optimizer, first_batch(cfg, rank, world_size))
    found = {}
    for name, param in optimizer.params.items():
        grad = param.main_grad
        if grad is None:
            grad = param.p.grad
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
    (single,) = workers(1, first_gradients, cfg)
    parts = workers(8, first_gradients, cfg)
    for name, want in single.items():
        grad = torch.cat([part[name] for part in parts])
        rows = min(len(grad), len(want))  # banks and vectors have other padding
        assert want.any(), name
        if name == "lm_head":
            torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6 * want.abs().max().item())
        else:
            assert torch.equal(grad[:rows], want[:rows]), name
        assert not grad[rows:].any() and not want[rows:].any()


class LateGather:
    """Brings nothing, not even this rank's own block, before wait()."""

    def __init__(self, name, t, waited):
        self.name = name
        self.t = t
        self.values = t.clone()
        self.waited = waited
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
    want = one_rank(everything)
    waited, orders = [], []

    def gather(self, name, t):
        return tg.Pending(t, LateGather(name, t, waited))

    def record(model, optimizer):
        orders.append(list(waited))
        waited.clear()

    monkeypatch.setattr(tg.Exchange, "gather", gather)
    run = train(0, 1, everything, after_step=record)
    assert run["losses"] == want["losses"] and run["val"] == want["val"]
    assert same_bits(run["final"], want["final"])
    banks = [row.name for row in everything.params if row.kind == "bank"]
    _, _, optimizer = build(0, 1, everything)
    small = [name for name, param in optimizer.params.items() if isinstance(param, tg.SmallParams)]
    moments = ["lm_head.exp_avg", "lm_head.exp_avg_sq"]
    every = banks + ["lm_head", "value_embeds"] + small
    # Untying, after step 5, gathers moments. In step 5 value_embeds is not updated.
    first_steps = [[], banks, every, banks, every]
    assert orders == first_steps + [banks + moments, banks + ["lm_head"] + small, banks]


# -------------------------------------------------------------------------------------------------- exchange


def wide_range(rank):
    """Returns numbers over many powers of two, bf16, so that the order of additions shows."""
    g = torch.Generator().manual_seed(rank)
    numbers = torch.randn(64, 5, generator=g)
    exponents = torch.randint(-10, 10, (64, 5), generator=g)
    return (numbers * 2.0**exponents).bfloat16()


def run_exchanges(rank, world_size):
    exchange = tg.Exchange(rank, world_size)
    t = wide_range(rank)
    owner = torch.arange(64)[:, None] // (64 // world_size)
    pending = [
        exchange.reduce("x", t.clone()),
        exchange.reduce("x", t.clone(), in_rank_order=True),
        exchange.all_reduce(t.clone()),
        exchange.gather("x", torch.where(owner == rank, t, -1)),
    ]
    return [p.wait() for p in pending], exchange.from_rank_0({"rank": rank})


def test_exchange(workers):
    """Compares the fp32 sum to the bit, on all ranks: in rank order, of unrounded gradients."""
    parts = [wide_range(rank).float() for rank in range(4)]
    want = parts[0] + parts[1] + parts[2] + parts[3]
    other = parts[3] + parts[2] + parts[1] + parts[0]
    assert not torch.equal(want, other)
    means = (want / 4).chunk(4)
    gathered = torch.cat([part.chunk(4)[rank] for rank, part in enumerate(parts)]).bfloat16()
    bound = 2**-6 * want.abs().max().item()
    for rank, (results, value) in enumerate(workers(4, run_exchanges)):
        block, block_fp32, total, gather = results
        torch.testing.assert_close(block.float(), means[rank], rtol=0, atol=bound)
        torch.testing.assert_close(total.float(), want, rtol=0, atol=bound)
        assert block_fp32.dtype == torch.float32 and torch.equal(block_fp32, means[rank])
        assert gather.dtype == torch.bfloat16 and torch.equal(gather, gathered)
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
    head_loss_and_grad = tg.GPT.head_loss_and_grad
    scales = []

    def record(self, x, targets, weights, head, loss_share, **options):
        scales.append((loss_share, weights.tolist()))
        return head_loss_and_grad(self, x, targets, weights, head, loss_share, **options)

    monkeypatch.setattr(tg.GPT, "head_loss_and_grad", record)
    batch = first_batch(cfg)
    loss = tg.train_step(model, optimizer, batch)
    T = len(batch.micro_batches[0].inputs)
    weights = batch.plan.mtp
    assert len(weights) == 3
    predictions = weights[0] * T + weights[1] * (T - 1) + weights[2] * (T - 2)
    share = predictions / (T * sum(weights))
    assert loss.item() == pytest.approx(share * math.log(cfg.padded_vocab), rel=1e-12)
    assert scales == [(1 / 8, [weight / 8 for weight in weights])] * 8


def test_validation_losses_are_averaged_in_fp32(cfg):
    """Validates a bf16 model: with its 8 bits the mean would be off in the third digit."""
    cfg = with_dtype(cfg, "bfloat16")
    exchange, model, _ = build(0, 1, cfg)
    val = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    windows = {"short": 6, "long": 20}
    losses = [model.token_losses(val.slice(i), windows).mean().item() for i in range(3)]
    assert len(set(losses)) == 3
    assert tg.validate(model, val, exchange, windows) == pytest.approx(np.mean(losses), rel=1e-6)
