"""Checks n-grams against plain Python: their hash, the index of rows, who sends which row when, the rule."""

import random
import threading
from collections import Counter
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


def ngram_config(folder, **ngrams):
    """Returns a config of three small layers and six steps, whose batches 1, 2, 3 and 4 ranks can share.

    What is updated every 4 steps is updated after steps 1 and 3: the gradients of the last two are lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    for name, count in ("train_0", 2500), ("train_1", 2500), ("val_0", 400):
        tokens = random_documents(rng, count, 61, 60, 40)
        write_shard(folder / f"x_{name}.bin", tokens, 61, 60)
    tokens, mtp = (144, 192, 288, 288), ((1.0, 0.5), (1.0, 0.5), (1.0,), (1.0,))
    steps = (2, 2, 1, 1)
    stages = (tg.Stage(*row, 30, WINDOWS[i], 1.0, mtp[i], mtp[i]) for i, row in enumerate(zip(steps, tokens)))
    table = dict(orders=(3, 2, 5, 4), rows=997, width=12, dtype="float32", every=1) | ngrams
    return replace(
        tg.CPU,
        data=str(folder),
        vocab_size=61,
        padded_vocab=72,
        bos_id=60,
        heads=2,
        head_dim=8,
        mlp_dim=16,
        layers=LAYERS,
        skip_from=0,
        skip_to=1,
        back_from=1,
        window_unit=4,
        val_windows=WINDOWS[3],
        microbatches=12,
        stages=tuple(stages),
        slow_from=2,
        val_slices=3,
        val_slice_tokens=50,
        val_every=0,
        momentum_warmup=3,
        momentum_cooldown=2,
        head_chunk=20,
        ngrams=tg.Ngrams(**table),
    )


# ------------------------------------------------------------------------------------------------- the hash


def python_hash(gram, rows):
    """Hashes one n-gram, its last token first, in Python's integers."""
    mix, low = 0x9E3779B1, 2**32 - 1
    h = 0
    for token in gram:
        h = (h + token) * mix & low
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1):
        h = (h ^ h >> shift) * factor & low
    return h % (rows - 1)


def python_rows(tokens, ngrams):
    """Returns the table's rows of every position, by ranges."""
    ranges = []
    for n in ngrams.orders:
        first = len(ranges) * ngrams.rows
        row = [first + ngrams.rows - 1] * min(n - 1, len(tokens))
        for t in range(n - 1, len(tokens)):
            row.append(first + python_hash(tokens[t - n + 1 : t + 1][::-1], ngrams.rows))
        ranges.append(row)
    return ranges


@pytest.mark.parametrize("rows", [3, 97, 100_003, 1 << 26])
@pytest.mark.parametrize("orders", [(2,), (3, 2), (2, 3, 4, 5)])
def test_the_hash_is_pythons(orders, rows):
    """Checks texts that cross documents, the largest token, and texts shorter than an n-gram."""
    ngrams, rng = tg.Ngrams(orders, rows), random.Random(1)
    for T in (1, 2, 4, 300):
        tokens = [rng.choice([0, 1, 7, 255, 256, 50256, 65535]) for _ in range(T)]
        for sign_rows in 0, 1, 8192:
            got, signs = tg.hash_ngrams(np.array(tokens, np.int32), ngrams, sign_rows)
            assert got.dtype == np.int32 and got.tolist() == python_rows(tokens, ngrams)
            assert (signs is None) == (sign_rows == 0)


def test_each_order_has_a_range_of_its_own():
    """Checks also that only the first positions, without a full n-gram, have a range's last row."""
    tokens, rows = np.random.default_rng(2).integers(0, 300, 5000), 50
    ngrams = tg.Ngrams((4, 2, 3), rows)
    for i, row in enumerate(tg.hash_ngrams(tokens, ngrams, 0)[0]):
        n = ngrams.orders[i]
        assert set(row) == set(range(i * rows, (i + 1) * rows))
        assert np.flatnonzero(row == (i + 1) * rows - 1).tolist() == list(range(n - 1))


@pytest.mark.parametrize("signs", [False, True])
def test_no_hash_looks_ahead(signs):
    """Checks that a token changes the n rows, of order n, that end at it or soon after, and no other.

    So it does the rows of signs, if there are many, but for the first positions: they have no full n-gram.
    """
    rng, ngrams = np.random.default_rng(3), tg.Ngrams((2, 3, 5), 1 << 26)
    tokens = rng.integers(0, 256, 60)

    def hash_all(tokens):
        found = tg.hash_ngrams(tokens, ngrams, 65536)[signs].copy()
        for i, n in enumerate(ngrams.orders):
            found[i, : n - 1] = 0
        return found

    before = hash_all(tokens)
    for t in range(len(tokens)):
        other = tokens.copy()
        other[t] += 1
        changed = hash_all(other) != before
        for i, n in enumerate(ngrams.orders):
            want = range(max(t, n - 1), min(t + n, len(tokens)))
            assert np.flatnonzero(changed[i]).tolist() == list(want), (t, i)


def test_rows_spread_evenly():
    """Counts distinct n-grams by row: chi-square has mean 498 and standard deviation 32.

    The n-grams are all pairs of few tokens, or differ in the oldest token only.
    """
    rows, few = 500, np.arange(150)
    pairs = np.stack(np.meshgrid(few, few), -1).reshape(-1, 2)
    triples = np.stack([np.arange(20000), np.full(20000, 5), np.full(20000, 9)], -1)
    for grams in pairs, triples:
        n = grams.shape[1]
        for row in tg.hash_ngrams(grams.reshape(-1), tg.Ngrams((n,), rows), 0)[0]:
            counts = np.bincount(row[n - 1 :: n] % rows, minlength=rows)
            assert counts.sum() == len(grams) and counts[-1] == 0
            expected = len(grams) / (rows - 1)
            assert ((counts[:-1] - expected) ** 2 / expected).sum() < 498 + 6 * 32


# --------------------------------------------------------------------------------------------- rows of signs


def all_pairs(count):
    """Returns the pairs of `count` tokens, one after the other; every second position ends one."""
    return np.stack(np.meshgrid(np.arange(count), np.arange(count)), -1).reshape(-1).astype(np.int32)


@pytest.mark.parametrize("sign_rows", [1, 2, 97, 8192, 65536])
def test_rows_of_signs_are_in_range(sign_rows):
    """Checks the largest tokens and texts shorter than an n-gram; a large text reaches every row."""
    ngrams, rng = tg.Ngrams((5, 2, 3), 97), np.random.default_rng(7)
    for T in 1, 2, 4, 3000:
        signs = tg.hash_ngrams(rng.integers(0, 65536, T).astype(np.int32), ngrams, sign_rows)[1]
        assert signs.dtype == np.int32 and signs.shape == (3, T)
        assert signs.min() >= 0 and signs.max() < sign_rows
        assert T < 3000 or sign_rows > 97 or all(len(set(row)) == sign_rows for row in signs.tolist())


@pytest.mark.parametrize("sign_rows", [61, 8192])
def test_rows_of_signs_spread_evenly(sign_rows):
    """Counts distinct pairs by row of signs: chi-square within 6 standard deviations of its mean."""
    for signs in tg.hash_ngrams(all_pairs(300), tg.Ngrams((2,), 1001), sign_rows)[1]:
        counts, expected = np.bincount(signs[1::2], minlength=sign_rows), 300**2 / sign_rows
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < sign_rows - 1 + 6 * (2 * sign_rows) ** 0.5


def test_ngrams_that_share_a_row_have_different_signs():
    """Checks pairs that collide: about one in 512 has one row of signs too, as chance has it."""
    rows, signs = tg.hash_ngrams(all_pairs(100), tg.Ngrams((2,), 1001), 512)
    for row, sign in zip(rows[:, 1::2], signs[:, 1::2]):
        order = np.argsort(row, kind="stable")
        collide = np.diff(row[order]) == 0
        again = collide & (np.diff(sign[order]) == 0)
        assert collide.sum() > 8000 and again.sum() < 2.5 * collide.sum() / 512


def test_each_order_has_rows_of_signs_of_its_own():
    """Compares every two of them, at 5000 positions: about one in 512 is equal by chance."""
    tokens = np.random.default_rng(8).integers(0, 300, 5000).astype(np.int32)
    signs = tg.hash_ngrams(tokens, tg.Ngrams((4, 2, 3), 1001), 512)[1]
    for i in range(3):
        for j in range(i):
            assert (signs[i] == signs[j]).sum() < 2.5 * 5000 / 512, (i, j)


@pytest.mark.parametrize("orders", [(), (2, 3)], ids=["bigrams", "n-grams"])
@pytest.mark.parametrize("sign_rows", [0, 50])
def test_micro_batches_have_rows_of_signs(folder, orders, sign_rows):
    cfg = tg.override(ngram_config(folder), f"sign_rows={sign_rows}")
    cfg = replace(cfg, ngrams=replace(cfg.ngrams, orders=orders))
    tokens = np.random.default_rng(8).integers(0, 60, 38).astype(np.uint16)
    batch, inputs = tg.make_micro_batch(tokens, np.array([7, 20]), 30, 8, cfg), tokens[:-1].astype(np.int32)
    hashed = tg.hash_ngrams(inputs, cfg.ngrams if orders else tg.Ngrams((2,), 9), 50)[1]
    assert batch.signs is None if sign_rows == 0 else batch.signs.dtype == torch.int32
    assert sign_rows == 0 or (batch.signs.numpy() == hashed).all() and batch.signs.shape == hashed.shape


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


def index_cases():
    rng = np.random.default_rng(4)
    for high in 1, 5, 300, 65_536, 65_537, 70_000, 2**31 - 1:
        for T in 1, 2, 50, 300:
            yield rng.integers(0, high, T).astype(np.int32)
    yield np.array([65_535, 65_536, 0, 131_072, 65_536, 1, 65_537], np.int32)  # of equal lower halves
    yield np.array([], np.int32)


def test_sort_by_row():
    for ids in index_cases():
        parts = tg.sort_by_row(ids)
        assert [part.dtype for part in parts] == [np.int32] * 3
        assert [part.tolist() for part in parts] == list(python_index([ids.tolist()]))


def test_index_rows():
    """Checks one range, and several."""
    for ids in index_cases():
        if not len(ids):
            continue
        first = np.arange(3, dtype=np.int64)[:, None] * (int(ids.max()) + 1)
        ranges = ids + first if first.max() + ids.max() < 2**31 else ids[None]
        for rows in ids, ranges.astype(np.int32):
            index, want = tg.index_rows(rows), python_index(np.atleast_2d(rows).tolist())
            assert [part.tolist() for part in index[:3]] == list(want) and index.signs is None
            assert [part.dtype for part in index[:3]] == [torch.int32] * 3


def test_index_of_signs():
    """Checks that signs are in the order of positions, range by range, and change nothing else."""
    rng = np.random.default_rng(5)
    for ids in index_cases():
        if not 1 < len(ids) or ids.max() > 2**29:
            continue
        ranges = (ids + np.arange(3, dtype=np.int32)[:, None] * (ids.max() + 1)).astype(np.int32)
        for rows in ids[None], ranges:
            signs = rng.integers(0, 8192, rows.shape).astype(np.int32)
            index, plain = tg.index_rows(rows, signs), tg.index_rows(rows)
            assert all(map(torch.equal, index[:3], plain[:3]))
            perm = index.perm.view(rows.shape)
            want = [[row[t] for t in order] for row, order in zip(signs.tolist(), perm.tolist())]
            assert index.signs.dtype == torch.int32 and index.signs.view(rows.shape).tolist() == want


def test_an_index_of_nothing():
    index = tg.index_rows(np.array([], np.int32))
    assert [part.tolist() for part in index[:3]] == [[], [], [0]]


def test_merge_rows():
    """Merges ascending lists, some of them empty."""
    rng = np.random.default_rng(5)
    for high in 10, 100, 2**31 - 1:
        lists = [np.unique(rng.integers(0, high, n)).astype(np.int32) for n in (0, 1, 30, 60)]
        for some in lists[:1], lists[1:2], lists[:2], lists[2:], lists:
            got = tg.merge_rows(*some)
            assert got.tolist() == sorted(set().union(*(part.tolist() for part in some)))
            assert got.dtype == np.int32


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
    """Holds the batches of every step and rank, and the rows that they read.

    cycles: the steps from one update of n-grams to the next, which are planned together.
    """

    def __init__(self, cfg, world_size):
        self.cfg, self.world_size = cfg, world_size
        board, barrier = [None] * world_size, threading.Barrier(world_size)
        self.exchanges = [ThreadExchange(r, world_size, board, barrier) for r in range(world_size)]
        paths = tg.find_shards(cfg.data, "train")
        plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
        loaders = [tg.TrainLoader(cfg, paths, r, world_size) for r in range(world_size)]
        prefetchers = [
            tg.Prefetcher(loader, plans, exchange) for loader, exchange in zip(loaders, self.exchanges)
        ]
        with ThreadPoolExecutor(world_size) as pool:
            self.batches = [list(pool.map(lambda p: p.next(), prefetchers)) for _ in plans]
            self.peeked = [p.peek() for p in prefetchers]
        for loader in loaders:
            loader.close()
        # By step and rank, the rows that micro-batches read, of shape (K, T) each.
        self.reads = [
            [
                [tg.hash_ngrams(m.inputs.numpy(), cfg.ngrams, 0)[0] for m in batch.micro_batches]
                for batch in ranks
            ]
            for ranks in self.batches
        ]
        self.cycles = {
            1: [[0], [1], [2], [3], [4], [5]],
            2: [[0, 1], [2, 3], [4, 5]],
            4: [[0, 1], [2, 3], [4, 5]],  # the last one has no update
        }[cfg.ngrams.every]

    def routes(self, cycle, rank):
        return self.batches[cycle[0]][rank].ngrams["ngrams"]

    def asked(self, cycle, rank):
        """Returns the distinct rows that a rank reads in a cycle, ascending."""
        return sorted(
            {row for step in cycle for ids in self.reads[step][rank] for row in ids.ravel().tolist()}
        )

    def sends(self, cycle, owner):
        """Returns the rows that an owner sends to every rank."""
        routes = self.routes(cycle, owner)
        places = routes.owned[routes.arriving.long()].long()
        rows = (places * self.world_size + owner).split(routes.recv_counts)
        return [part.tolist() for part in rows]

    def arrives(self, cycle, rank):
        """Returns the rows that reach a rank, by sender: as they lie in the compact table."""
        arrived = [self.sends(cycle, owner)[rank] for owner in range(self.world_size)]
        assert self.routes(cycle, rank).send_counts == [len(rows) for rows in arrived]
        return arrived

    def compact(self, cycle, rank):
        return np.concatenate(self.arrives(cycle, rank)).astype(int)

    def __iter__(self):
        """Yields every cycle and rank."""
        return ((cycle, rank) for cycle in self.cycles for rank in range(self.world_size))

    def micro_batches(self, cycle, rank):
        """Yields the micro-batches of a cycle, and the rows that each reads."""
        for step in cycle:
            yield from zip(self.batches[step][rank].micro_batches, self.reads[step][rank])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


KINDS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (1, 2), (3, 4)]  # ranks, steps from update to update


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def plans(request, folder):
    world_size, every = request.param
    return Plans(ngram_config(folder, every=every), world_size)


def test_every_row_that_is_read_arrives_once_by_owner_ascending(plans):
    for cycle, rank in plans:
        assert sorted(plans.compact(cycle, rank).tolist()) == plans.asked(cycle, rank)
        for owner, rows in enumerate(plans.arrives(cycle, rank)):
            assert rows == sorted(rows) and {row % plans.world_size for row in rows} <= {owner}


def test_positions_read_their_rows(plans):
    for cycle, rank in plans:
        compact = plans.compact(cycle, rank)
        for batch, want in plans.micro_batches(cycle, rank):
            assert batch.hashed_rows.dtype == torch.int32 and (compact[batch.hashed_rows] == want).all()


def test_only_the_first_batch_after_an_update_has_routes(plans):
    firsts = {cycle[0] for cycle in plans.cycles}
    for step, ranks in enumerate(plans.batches):
        assert {bool(batch.ngrams) for batch in ranks} == {step in firsts}


def test_gradients_reach_their_owner(plans):
    """Checks that an owner gets the ranks' gradients in rank order, and their rows' places."""
    n = plans.world_size
    for cycle, owner in plans:
        routes, received = plans.routes(cycle, owner), []
        for rank in range(n):
            counts = plans.routes(cycle, rank).send_counts
            sent = np.split(plans.compact(cycle, rank), np.cumsum(counts)[:-1])[owner]
            assert len(sent) == routes.recv_counts[rank]
            received += sent.tolist()
        owned = (routes.owned.long() * n + owner).tolist()
        touched = {row for rank in range(n) for row in plans.asked(cycle, rank)}
        assert owned == sorted(row for row in touched if row % n == owner)
        assert [owned[place] for place in routes.arriving.tolist()] == received


def test_micro_batches_add_to_their_rows(plans):
    """Checks perm and offsets by place in main_grad."""
    for cycle, rank in plans:
        compact = plans.compact(cycle, rank)
        for batch, ids in plans.micro_batches(cycle, rank):
            row_ids, perm, offsets = (part.tolist() for part in batch.index["ngrams"][:3])
            assert [compact[row_ids].tolist(), perm, offsets] == list(python_index(ids.tolist()))


def test_positions_keep_their_signs(plans):
    """Checks that signs are those of the positions, which lie by row."""
    for cycle, rank in plans:
        for batch, _ in plans.micro_batches(cycle, rank):
            signs = tg.hash_ngrams(batch.inputs.numpy(), plans.cfg.ngrams, plans.cfg.sign_rows)[1]
            assert (batch.signs.numpy() == signs).all()
            index, want = batch.index["ngrams"], [[] for _ in batch.index["ngrams"].row_ids]
            order = {place: i for i, place in enumerate(index.row_ids.tolist())}
            for places, sign in zip(batch.hashed_rows.tolist(), signs.tolist()):
                for place, s in zip(places, sign):
                    want[order[place]].append(s)
            assert index.signs.tolist() == sum(want, [])


def test_owners_are_told_once_an_update_and_nothing_after_the_last_step(plans):
    assert plans.peeked == [None] * plans.world_size
    for exchange in plans.exchanges:
        assert Counter(exchange.calls)["ngrams"] == len(plans.cycles)


# ------------------------------------------------------------------------------------ batches and validation


class Elsewhere(str):
    """Names the CPU, and says that it is another device."""

    type = "cuda"


def tensors_of(nest):
    """Returns a nest without its buffer, RowIndex and the like as dicts."""
    if hasattr(nest, "_asdict"):
        nest = nest._asdict()
    if isinstance(nest, dict):
        return {str(key): tensors_of(value) for key, value in nest.items() if key != "buffer"}
    return nest


def test_packed_micro_batches_keep_their_rows(folder):
    cfg = ngram_config(folder)
    tokens = np.random.default_rng(8).integers(0, 60, 38).astype(np.uint16)
    batch = tg.make_micro_batch(tokens, np.array([7, 20]), 30, 8, cfg)
    assert batch.hashed_rows.shape == (4, 37)
    batch.index["ngrams"] = tg.index_rows(batch.hashed_rows.numpy(), batch.signs.numpy())
    want, packed = tensors_of(vars(batch)), batch.pack()
    for each in packed, packed.to(Elsewhere("cpu")):
        assert same_bits(tensors_of(vars(each)), want)
        inside = [each.hashed_rows, each.signs, *each.index["ngrams"], each.inputs]
        assert {t.untyped_storage().data_ptr() for t in inside} == {each.buffer.untyped_storage().data_ptr()}
    assert batch.hashed_rows.untyped_storage().data_ptr() != packed.hashed_rows.untyped_storage().data_ptr()


def test_packed_plans_keep_their_numbers(plans):
    routes = plans.batches[plans.cycles[-1][0]][-1].ngrams
    assert len(routes["ngrams"].owned)
    assert same_bits(tensors_of(tg.move(routes, Elsewhere("cpu"))), tensors_of(routes))
    again = tg.pack({"ngrams": routes["ngrams"]})
    assert same_bits(tensors_of(again), tensors_of(routes))


def test_validation_reads_the_same_rows(folder):
    cfg = ngram_config(folder)
    loader = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))
    for batch in map(loader.batch, range(cfg.val_slices)):
        rows, signs = tg.hash_ngrams(batch.inputs.numpy(), cfg.ngrams, cfg.sign_rows)
        assert not batch.index
        assert (batch.hashed_rows.numpy() == rows).all() and (batch.signs.numpy() == signs).all()


# ------------------------------------------------------------------------------------------ the rule and the


def numpy_update(table, moments, last, rows, grads, beta2, time, lr, decay):
    """Updates rows one by one in float64."""
    for row, g in zip(rows, grads):
        moments[row] = beta2 ** float(time - last[row]) * moments[row] + (1 - beta2) * np.mean(g * g)
        update = lr * g / (np.sqrt(moments[row]) + 1e-10)
        table[row] -= update + decay * table[row] * (update * table[row] > 0)
        last[row] = time


def decays_of(beta2, dtype, count=30):
    return (beta2 ** torch.arange(count).double()).to(dtype)


@pytest.mark.parametrize("beta2", [0.95, 0.5, 0.0])
@pytest.mark.parametrize(
    "dtype, eps, rounding", [("float64", 1e-14, 0), ("float32", 2e-6, 0), ("bfloat16", 2e-6, 2**-8)]
)
def test_the_rule(dtype, eps, rounding, beta2):
    """Compares four updates, each from the state that the one before has left. bf16: rounds once."""
    dtype = tg.dtype_of(dtype)
    acc = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(1)
    table = torch.randn(40, 7, generator=g, dtype=acc).to(dtype)
    moments = torch.rand(40, generator=g, dtype=acc) * (torch.arange(40) % 3 > 0)
    last, decays = torch.zeros(40, dtype=torch.int32), decays_of(beta2, acc)
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


@pytest.mark.parametrize("beta2", [0.95, 0.9])
def test_a_rows_first_step_does_not_depend_on_the_gradients_scale(beta2):
    """Checks that the root of the row's mean square is lr / sqrt(1 - beta2), whenever the step comes."""
    grads = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)) * torch.tensor([[1e-6], [1], [1e6]])
    table, moments, rows = torch.zeros(5, 8), torch.zeros(5), torch.tensor([4, 0, 2], dtype=torch.int32)
    last, decays = torch.zeros(5, dtype=torch.int32), decays_of(beta2, torch.float32)
    tg.update_rows(table, moments, last, rows, grads, decays, 20, 1 - beta2, 0.3, 0.1)
    rms, want = table.square().mean(-1).sqrt(), 0.3 / (1 - beta2) ** 0.5
    torch.testing.assert_close(rms, torch.tensor([1.0, 0, 1, 0, 1]) * want, rtol=1e-3, atol=0)
    assert last.tolist() == [20, 0, 20, 0, 20]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_rows_are_rounded_once(dtype):
    """Compares with float64 sums, which numbers of few bits make exact in the arithmetic too."""
    g = torch.Generator().manual_seed(3)
    table = (
        torch.randint(-255, 256, (50, 9), generator=g) * 2.0 ** torch.randint(0, 9, (50, 9), generator=g)
    ).to(dtype)
    ids = torch.randint(0, 50, (5, 70), generator=g, dtype=torch.int32)
    out, exact = torch.full((70, 9), torch.nan, dtype=dtype), table.double()[ids.long()].sum(0)
    tg.gather_rows(out, table, ids)
    assert torch.equal(out, exact.to(dtype))
    if dtype == torch.bfloat16:
        assert not torch.equal(out.double(), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_rows_with_signs(dtype):
    """Compares with a loop over positions and ranges; without rows of signs, signs have no effect."""
    g = torch.Generator().manual_seed(5)
    table, signs = torch.randn(50, 9, generator=g).to(dtype), torch.randint(0, 2, (6, 9), generator=g) * 2 - 1
    ids, sign_ids = (torch.randint(0, n, (3, 20), generator=g).int() for n in (50, 6))
    out, plain, unsigned = (torch.full((20, 9), torch.nan, dtype=dtype) for _ in range(3))
    tg.gather_rows(out, table, ids, signs.to(dtype), sign_ids)
    for t in range(20):
        rows = [table[ids[k, t]].double() * signs[sign_ids[k, t]] for k in range(3)]
        exact = rows[0] + rows[1] + rows[2]
        eps = torch.finfo(dtype).eps / 2 * exact.abs() + 4e-7 * sum(row.abs() for row in rows)
        assert ((out[t].double() - exact).abs() <= eps).all()
    tg.gather_rows(plain, table, ids)
    tg.gather_rows(unsigned, table, ids, signs.to(dtype), None)
    assert torch.equal(plain, unsigned) and not torch.equal(plain, out)


def test_sums_of_rows_are_in_the_order_of_ranges():
    g = torch.Generator().manual_seed(4)
    table, ids = torch.randn(50, 9, generator=g), torch.randint(0, 50, (5, 70), generator=g).int()
    out, rows = torch.empty(70, 9), table[ids.long()].numpy()
    tg.gather_rows(out, table, ids)
    want = rows[0]
    for part in rows[1:]:
        want = want + part
    assert np.array_equal(out.numpy(), want)
    assert not np.array_equal(want, rows[4] + rows[3] + rows[2] + rows[1] + rows[0])
