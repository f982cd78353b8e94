"""Checks n-grams against plain Python: their hash, the index of rows, who sends which row when, the rule."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import random_documents, same_bits, write_shard

LAYERS = (
    tg.Layer("plain", value=0, x0=True, bigram=True),
    tg.Layer("plain", narrow_qk=True, narrow_v=True, xsa=True, bigram=True),
    tg.Layer("paired", "long", value=1, gate=True, connections=True),
)
WINDOWS = [tg.Windows(n, 2 * n) for n in (1, 2, 3, 3)]


def ngram_config(folder, microbatches=12, last=1, **ngrams):
    """Returns a config of three small layers and four stages, which 1, 2, 3, 4 and 8 ranks can share.

    What is updated every 4 steps is updated after steps 1, 3 and 7. There are 5 + `last` steps: with one, the
    gradients of the last two are lost; with three, embed is untied after step 5 and has an update of its own.
    """
    rng = np.random.default_rng(3)
    for name, count in ("train_0", 2500), ("train_1", 2500), ("val_0", 400):
        write_shard(folder / f"x_{name}.bin", random_documents(rng, count, 61, 60, 40), 61, 60)
    weights, stages = ((1.0, 0.5), (1.0, 0.5), (1.0,), (1.0,)), []
    for i, (steps, T) in enumerate(zip((2, 2, 1, last), (12, 16, 24, 24))):
        stage = tg.Stage(steps, microbatches * T, 30, WINDOWS[i], 1.0, weights[i], weights[i])
        stages.append(stage)
    table = dict(orders=(3, 2, 5, 4), rows=301, width=12, dtype="float32", every=1) | ngrams
    return replace(
        tg.CPU,
        data=str(folder),
        vocab_size=61,
        padded_vocab=72,
        bos_id=60,
        bigram_vocab_size=360,
        heads=2,
        head_dim=8,
        mlp_dim=16,
        layers=LAYERS,
        skip_from=0,
        skip_to=1,
        back_from=1,
        window_unit=4,
        val_windows=WINDOWS[3],
        microbatches=microbatches,
        stages=tuple(stages),
        slow_from=2,
        val_slices=3,
        val_slice_tokens=50,
        val_every=0,
        momentum_warmup=3,
        momentum_cooldown=2,
        rails_step=2,
        head_chunk=20,
        ngrams=tg.Ngrams(**table),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


# ------------------------------------------------------------------------------------------------- the hash


def python_hash(gram, rows, sign_rows):
    """Hashes one n-gram, its last token first, in Python's integers; returns its row and its row of signs."""
    h, low = 0, 2**32 - 1
    for token in gram:
        h = (h + token) * 0x9E3779B1 & low
    sign = ((h * 0x27D4EB2F & low) >> 16) * sign_rows >> 16
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1):
        h = (h ^ h >> shift) * factor & low
    return h % (rows - 1), sign


def python_rows(tokens, ngrams, sign_rows):
    """Returns the rows and the rows of signs of every position, by ranges. Before the text are zeros."""
    rows, signs = [], []
    for i, n in enumerate(ngrams.orders):
        padded = [0] * (n - 1) + tokens
        hashed = [python_hash(padded[t : t + n][::-1], ngrams.rows, sign_rows) for t in range(len(tokens))]
        places = [ngrams.rows - 1 if t < n - 1 else row for t, (row, _) in enumerate(hashed)]
        rows.append([i * ngrams.rows + place for place in places])
        signs.append([sign for _, sign in hashed])
    return rows, signs


@pytest.mark.parametrize("rows", [3, 97, 1 << 26])
def test_the_hash_is_pythons(rows):
    """Checks texts that cross documents, the largest token, and texts shorter than an n-gram."""
    rng = random.Random(1)
    for orders, sign_rows in ((2,), 1), ((3, 2), 0), ((2, 3, 4, 5), 8192):
        for T in (1, 2, 4, 300):
            tokens = [rng.choice([0, 1, 7, 255, 256, 50256, 65535]) for _ in range(T)]
            ngrams = tg.Ngrams(orders, rows)
            got, signs = tg.hash_ngrams(np.array(tokens, np.int32), ngrams, sign_rows)
            want = python_rows(tokens, ngrams, sign_rows)
            assert got.dtype == np.int32 and got.tolist() == want[0]
            assert signs is None if sign_rows == 0 else signs.tolist() == want[1]


@pytest.mark.parametrize("orders, sign_rows", [((), 50), ((), 0), ((2, 3), 50), ((2, 3), 0)])
def test_micro_batches_have_rows_and_signs(folder, orders, sign_rows):
    """Checks rows of bigrams or n-grams, of the inputs alone."""
    cfg = tg.override(ngram_config(folder, orders=orders), f"sign_rows={sign_rows}")
    tokens = np.random.default_rng(8).integers(0, 60, 38).astype(np.uint16)
    batch = tg.make_micro_batch(tokens, np.array([7, 20]), 30, 8, cfg)
    ngrams = cfg.ngrams if orders else tg.Ngrams((2,), 360)
    rows, signs = python_rows(tokens[:-1].tolist(), ngrams, sign_rows)
    assert batch.hashed_rows.tolist() == rows
    assert batch.signs is None if sign_rows == 0 else batch.signs.tolist() == signs


# ------------------------------------------------------------------------------------------------- the index


def python_index(ranges):
    """Returns RowIndex's three lists of rows by range, and position."""
    index = [], [], []
    for row in ranges:
        for row_id in sorted(set(row)):
            index[2].append(len(index[1]))
            index[0].append(row_id)
            index[1].extend(t for t, r in enumerate(row) if r == row_id)
    index[2].append(len(index[1]))
    return index


def test_index_rows():
    """Checks one range and several, with signs, which follow the positions."""
    rng = np.random.default_rng(4)
    cases = [rng.integers(0, high, T) for high in (1, 300, 65_537, 2**29) for T in (1, 2, 50)]
    cases.append(np.array([65_535, 65_536, 0, 131_072, 65_536, 1, 65_537]))  # of equal lower halves
    for ids in cases:
        first = np.arange(3)[:, None] * (int(ids.max()) + 1)
        for rows in ids[None].astype(np.int32), (ids + first).astype(np.int32):
            signs = rng.integers(0, 8192, rows.shape).astype(np.int32)
            index, want = tg.index_rows(rows, signs), python_index(rows.tolist())
            assert [part.tolist() for part in index[:3]] == list(want)
            assert {part.dtype for part in index} == {torch.int32}
            order = index.perm.view(rows.shape).tolist()
            assert index.signs.tolist() == [s[t] for s, places in zip(signs, order) for t in places]
            assert tg.index_rows(rows).signs is None
    assert [part.tolist() for part in tg.index_rows(tg.NO_ROWS)[:3]] == [[], [], [0]]


# ------------------------------------------------------------------------------------------------- the plans


class ThreadExchange(tg.Exchange):
    """Swaps row ids between threads of this process, one a rank."""

    def __init__(self, rank, world_size, board, barrier):
        super().__init__(rank, world_size)
        self.board, self.barrier, self.calls = board, barrier, []

    def send_ids(self, name, ids, send_counts):
        assert len(ids) == sum(send_counts)
        self.calls.append(name)
        if len(send_counts) == 1:
            return ids, send_counts
        self.board[self.rank] = np.split(ids, np.cumsum(send_counts)[:-1])
        self.barrier.wait(60)
        received = [parts[self.rank] for parts in self.board]
        self.barrier.wait(60)
        return np.concatenate(received), [len(part) for part in received]


class Plans:
    """Holds every step's and rank's batches, and the rows that its micro-batches read, (K, T) each.

    cycles: the steps from one update of n-grams to the next, which are planned together.
    """

    def __init__(self, cfg, n):
        self.cfg, self.world_size, board, barrier = cfg, n, [None] * n, threading.Barrier(n)
        self.exchanges = [ThreadExchange(rank, n, board, barrier) for rank in range(n)]
        paths, plans = tg.find_shards(cfg.data, "train"), [tg.plan_step(cfg, step) for step in range(6)]
        loaders = [tg.TrainLoader(cfg, paths, rank, n) for rank in range(n)]
        prefetchers = [tg.Prefetcher(loader, plans, e) for loader, e in zip(loaders, self.exchanges)]
        with ThreadPoolExecutor(n) as pool:
            self.batches = [list(pool.map(lambda p: p.next(), prefetchers)) for _ in plans]
            assert [p.peek() for p in prefetchers] == [None] * n
        for loader in loaders:
            loader.close()
        # With every=4 the last cycle has no update.
        self.cycles = [[0], [1], [2], [3], [4], [5]] if cfg.ngrams.every == 1 else [[0, 1], [2, 3], [4, 5]]

    def routes(self, cycle, rank):
        return self.batches[cycle[0]][rank].ngrams["ngrams"]

    def reads(self, cycle, rank):
        """Yields a cycle's micro-batches, with the rows that each reads."""
        for step in cycle:
            for part in self.batches[step][rank].micro_batches:
                yield part, tg.hash_ngrams(part.inputs.numpy(), self.cfg.ngrams, 0)[0]

    def asked(self, cycle, rank):
        """Returns the distinct rows that a rank reads in a cycle."""
        return {row for _, rows in self.reads(cycle, rank) for row in rows.ravel().tolist()}

    def arrives(self, cycle, rank):
        """Returns the rows that reach a rank, a list by owner: as they lie in the compact table."""
        arrived = []
        for owner in range(self.world_size):
            routes = self.routes(cycle, owner)
            rows = routes.owned[routes.arriving.long()] * self.world_size + owner
            arrived.append(rows.split(routes.recv_counts)[rank].tolist())
        assert self.routes(cycle, rank).send_counts == [len(rows) for rows in arrived]
        return arrived

    def __iter__(self):
        """Yields every cycle and rank."""
        return ((cycle, rank) for cycle in self.cycles for rank in range(self.world_size))


@pytest.fixture(scope="module", params=[(1, 4), (3, 1), (4, 4)], ids=["1 rank", "3 ranks", "4 ranks"])
def plans(request, folder):
    world_size, every = request.param
    return Plans(ngram_config(folder, every=every, rows=997), world_size)


def test_every_row_arrives_once_and_is_read_at_its_place(plans):
    """Checks also that an owner's rows ascend."""
    for cycle, rank in plans:
        arrived = plans.arrives(cycle, rank)
        compact = np.concatenate(arrived).astype(int)
        assert sorted(compact.tolist()) == sorted(plans.asked(cycle, rank))
        for owner, rows in enumerate(arrived):
            assert rows == sorted(rows) and {row % plans.world_size for row in rows} <= {owner}
        for batch, want in plans.reads(cycle, rank):
            assert batch.hashed_rows.dtype == torch.int32 and (compact[batch.hashed_rows] == want).all()


def test_gradients_reach_their_owner_in_rank_order(plans):
    n = plans.world_size
    for cycle, owner in plans:
        routes = plans.routes(cycle, owner)
        received = [plans.arrives(cycle, rank)[owner] for rank in range(n)]
        assert [len(rows) for rows in received] == routes.recv_counts
        touched = set().union(*(plans.asked(cycle, rank) for rank in range(n)))
        owned = sorted(row for row in touched if row % n == owner)
        assert (routes.owned * n + owner).tolist() == owned
        assert [owned[place] for place in routes.arriving.tolist()] == sum(received, [])


def test_micro_batches_add_to_their_rows(plans):
    """Checks perm, offsets and signs by place in main_grad."""
    for cycle, rank in plans:
        compact = np.concatenate(plans.arrives(cycle, rank)).astype(int)
        for batch, rows in plans.reads(cycle, rank):
            index = batch.index["ngrams"]
            parts = compact[index.row_ids].tolist(), index.perm.tolist(), index.offsets.tolist()
            assert parts == python_index(rows.tolist())
            order = index.perm.view(rows.shape).long()
            assert torch.equal(index.signs.view(rows.shape), batch.signs.gather(1, order))


def test_owners_are_told_once_an_update(plans):
    firsts = {cycle[0] for cycle in plans.cycles}
    for step, ranks in enumerate(plans.batches):
        assert {bool(batch.ngrams) for batch in ranks} == {step in firsts}
    assert all(exchange.calls.count("ngrams") == len(plans.cycles) for exchange in plans.exchanges)


class Elsewhere(str):
    """Names the CPU, and says that it is another device."""

    type = "cuda"


def test_packed_batches_keep_their_numbers(plans):
    """Checks all tensors of a micro-batch and of routes, which move in one buffer."""

    def tensors_of(nest):
        nest = nest._asdict() if hasattr(nest, "_asdict") else nest
        if isinstance(nest, dict):
            return {key: tensors_of(value) for key, value in nest.items() if key != "buffer"}
        return nest

    batch = plans.batches[plans.cycles[-1][0]][-1]
    for nest in vars(batch.micro_batches[0]), batch.ngrams:
        packed = tg.pack({key: value for key, value in nest.items() if key != "buffer"})
        for each in packed, tg.move(packed, Elsewhere("cpu")):
            assert same_bits(tensors_of(each), tensors_of(nest))
            inside = {t.untyped_storage().data_ptr() for t in tg.tree_leaves(each) if hasattr(t, "dtype")}
            assert inside == {each["buffer"].untyped_storage().data_ptr()}


# ------------------------------------------------------------------------------------------ the rule and the


def numpy_update(table, moments, last, rows, grads, beta2, time, lr, decay):
    """Updates rows one by one in float64."""
    for row, g in zip(rows, grads):
        moments[row] = beta2 ** float(time - last[row]) * moments[row] + (1 - beta2) * np.mean(g * g)
        update = lr * g / (np.sqrt(moments[row]) + 1e-10)
        table[row] -= update + decay * table[row] * (update * table[row] > 0)
        last[row] = time


@pytest.mark.parametrize(
    "dtype, eps, rounding, beta2", [("float64", 1e-14, 0, 0.95), ("bfloat16", 2e-6, 2**-8, 0.5)]
)
def test_the_rule(dtype, eps, rounding, beta2):
    """Compares four updates, each from the state that the one before has left. bf16: rounds once."""
    dtype = tg.dtype_of(dtype)
    acc = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(1)
    table = torch.randn(40, 7, generator=g, dtype=acc).to(dtype)
    moments = torch.rand(40, generator=g, dtype=acc) * (torch.arange(40) % 3 > 0)
    last, decays = torch.zeros(40, dtype=torch.int32), (beta2 ** torch.arange(30).double()).to(acc)
    for step in range(4):
        rows = torch.randperm(40, generator=g)[:25].int()
        size = 10.0 ** torch.randint(-6, 3, (25, 1), generator=g)
        grads = torch.randn(25, 7, generator=g, dtype=acc) * size
        grads[3] = 0  # of a row that only others' zeros touch
        before = table.clone(), moments.clone(), last.clone()
        want = [t.double().numpy().copy() for t in before]
        lr, decay, time = 0.1 * (step + 1), 0.02, 2 * step + 1
        numpy_update(*want, rows.tolist(), grads.double().numpy(), beta2, time, lr, decay)
        tg.update_rows(table, moments, last, rows, grads, decays, time, 1 - beta2, lr, decay)
        assert table.dtype == dtype and moments.dtype == acc
        np.testing.assert_allclose(table.double().numpy(), want[0], rtol=eps + rounding, atol=eps)
        np.testing.assert_allclose(moments.double().numpy(), want[1], rtol=eps)
        np.testing.assert_array_equal(last.numpy(), want[2])
        others = np.setdiff1d(np.arange(40), rows.numpy())
        assert all(torch.equal(t[others], old[others]) for t, old in zip((table, moments, last), before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_rows_are_rounded_once(dtype):
    """Compares with float64 sums, with signs and without; numbers of few bits make the arithmetic exact."""
    g = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(0, 9, (50, 9), generator=g)
    table = (torch.randint(-255, 256, (50, 9), generator=g) * sizes).to(dtype)
    signs = torch.randint(0, 2, (6, 9), generator=g) * 2.0 - 1
    ids, sign_ids = (torch.randint(0, n, (5, 70), generator=g).int() for n in (50, 6))
    rows = table.double()[ids.long()]
    for chosen, exact in (None, rows.sum(0)), (sign_ids, (rows * signs[sign_ids.long()]).sum(0)):
        out = torch.full((70, 9), torch.nan, dtype=dtype)
        tg.gather_rows(out, table, ids, signs.to(dtype), chosen)
        assert torch.equal(out, exact.to(dtype))
        assert torch.equal(out.double(), exact) == (dtype == torch.float32)
