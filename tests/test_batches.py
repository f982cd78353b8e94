"""Tests prefetched batches: indices, plans and sums of rows against naive programs, copies, errors."""

import math
import threading
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import prefetch_exchange, random_documents, row_plans, same_bits, write_shard
from launch import WAIT

VOCAB, BOS = 257, 256


# ------------------------------------------------------------------------------------------------ row indices


def naive_index(row_ids):
    """Returns RowIndex's three lists for `row_ids` (T,)."""
    positions = {}
    for position, row in enumerate(row_ids.tolist()):
        positions.setdefault(row, []).append(position)
    rows = sorted(positions)
    perm = [position for row in rows for position in positions[row]]
    offsets = [sum(len(positions[row]) for row in rows[:i]) for i in range(len(rows) + 1)]
    return rows, perm, offsets


def check_index(index, row_ids):
    """Compares with naive lists; signs are for the caller to check."""
    assert [t.dtype for t in index[:3]] == [torch.int32] * 3
    assert tuple(t.tolist() for t in index[:3]) == naive_index(row_ids)


def random_row_ids(distribution, rows, T, rng):
    """Draws the row ids of T positions, int32."""
    if distribution == "one":
        row_ids = np.full(T, rng.integers(rows))
    elif distribution == "last":
        row_ids = np.full(T, rows - 1)
    elif distribution == "distinct":
        row_ids = rng.permutation(rows)[:T]
    elif distribution == "skewed":  # most positions on few rows, as in text
        row_ids = rows * rng.random(T) ** 8
    elif distribution == "equal halves":  # many equal in their lower or upper 16 bits
        row_ids = rng.integers(0, 3, T) + 65536 * rng.integers(0, rows // 65536 + 1, T)
        row_ids = row_ids.clip(0, rows - 1)
    else:
        row_ids = rng.integers(0, rows, T, dtype=np.int32)
    return row_ids.astype(np.int32)


DISTRIBUTIONS = ["uniform", "skewed", "distinct", "one", "last", "equal halves"]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rows", [2, 300, 65535, 65536, 65537, 251520])
def test_index(rows, distribution):
    """Checks sizes around 2^16, above which the sort takes two passes. Within a row, positions ascend."""
    rng = np.random.default_rng(rows)
    for T in (0, 1, 2, 37, 900):
        row_ids = random_row_ids(distribution, rows, T, rng)
        check_index(tg.index_rows(row_ids), row_ids)


# ---------------------------------------------------------------------------------------------- plans of rows

TABLE_ROWS = {"tokens": 264, "bigrams": 24 * 40}


def check_plan(plan, by_rank, rank, rows):
    """Checks a rank's RowRoutes of a table of `rows`, if the ranks have touched these rows."""
    world_size = len(by_rank)
    shard = rows // world_size
    own = range(rank * shard, (rank + 1) * shard)
    assert plan.rows.dtype == torch.int32 and plan.rows.tolist() == sorted(by_rank[rank])
    counts = [sum(row // shard == owner for row in by_rank[rank]) for owner in range(world_size)]
    assert plan.send_counts == counts
    arriving = [sorted(row - own.start for row in touched if row in own) for touched in by_rank]
    assert plan.recv_counts == list(map(len, arriving))
    assert all(type(n) is int for n in plan.send_counts + plan.recv_counts)
    assert plan.arriving.dtype == torch.int32 and plan.arriving.tolist() == sum(arriving, [])


def cases_of_rows(world_size, rows, rank):
    rng, shard = np.random.default_rng(rank), rows // world_size
    return {
        "none": [],
        "all": range(rows),
        "one rank has none": range(0, rows if rank else 0, 3),
        "last": [rows - 1],
        "first": [0],
        "some": rng.permutation(rows)[: rows // 20],
        "one owner": (world_size // 2) * shard + rng.permutation(shard)[: shard // 10],
        "edges": [edge for owner in range(world_size) for edge in (owner * shard, (owner + 1) * shard - 1)],
    }


def check_plans(rank, world_size, folder):
    """Plans a step for each case, of which the two tables have different ones."""
    cfg, exchange = config(folder, bigram_vocab_size=24 * 40), prefetch_exchange(rank, world_size)
    cases = {
        kind: [list(cases_of_rows(world_size, rows, r).values()) for r in range(world_size)]
        for kind, rows in TABLE_ROWS.items()
    }
    for i in range(len(cases["tokens"][0])):
        by_rank = {
            "tokens": [own[i] for own in cases["tokens"]],
            "bigrams": [own[i - 2] for own in cases["bigrams"]],
        }
        ids = {kind: np.array(rows[rank], np.int32) for kind, rows in by_rank.items()}
        plans = row_plans(cfg, exchange, ids)
        for kind, rows in TABLE_ROWS.items():
            check_plan(plans[kind], [set(map(int, own)) for own in by_rank[kind]], rank, rows)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_plans_of_rows(workers, tmp_path, world_size):
    workers(world_size, check_plans, tmp_path)


# ---------------------------------------------------------------------------------------------------- batches


def config(folder, steps=(3, 2, 3, 3), microbatches=8, **changes):
    """Returns a config with stages that start at odd and even steps, and micro-batches of 30 to 60 tokens."""
    stages = [
        replace(stage, steps=n, batch_tokens=microbatches * T, max_doc_len=max_doc_len)
        for stage, n, T, max_doc_len in zip(tg.CPU.stages, steps, (30, 60, 45, 60), (20, 50, 50, 50))
    ]
    changes = dict(bigram_vocab_size=640, microbatches=microbatches, stages=tuple(stages)) | changes
    return replace(tg.CPU, data=str(folder), ngrams=tg.Ngrams(), **changes)


def with_max_doc_len(cfg, max_doc_len):
    return replace(cfg, stages=tuple(replace(stage, max_doc_len=max_doc_len) for stage in cfg.stages))


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(4)
    for i, count in enumerate((2500, 3500, 5000)):
        tokens = random_documents(rng, count, VOCAB, BOS, 60)
        write_shard(tmp_path / f"x_train_{i:06d}.bin", tokens, VOCAB, BOS)
    return tmp_path


def train_loader(cfg, rank=0, world_size=1, position=(0, 0)):
    return tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size, position)


def plans_of(cfg, first=0):
    return [tg.plan_step(cfg, step) for step in range(first, cfg.steps)]


def prefetcher(loader, plans, rank=0, world_size=1):
    return tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))


def tensors_of(nest):
    """Returns all tensors of a micro-batch, or of a packed nest, but its buffer."""
    tensors, nest = [], dict(nest if isinstance(nest, dict) else vars(nest), buffer=None)
    tg.map_tensors(tensors.append, nest)
    return tensors


def nothing_seen(world_size=1):
    return [{"tokens": set(), "bigrams": set()} for _ in range(world_size)]


def check_batch(batch, plan, want, seen, rank=0):
    """Compares a rank's batch with `want`, by rank the micro-batches of a loader alone.

    seen: by rank, the rows touched since the last Adam step, by what indexes the tables; updated.
    """
    assert batch.plan == plan and len(batch.micro_batches) == len(want[rank])
    for i, (actual, expected) in enumerate(zip(batch.micro_batches, want[rank])):
        for name in ("inputs", "targets", "hashed_rows", "signs", "cu_seqlens"):
            a, b = getattr(actual, name), getattr(expected, name)
            assert a.dtype == b.dtype and torch.equal(a, b), (plan.step, i, name)
        assert actual.max_doc_len == expected.max_doc_len
        assert actual.index.keys() == {"tokens", "bigrams"}
        for kind, ids in (("tokens", expected.inputs), ("bigrams", expected.hashed_rows[0])):
            check_index(actual.index[kind], ids.numpy())
        assert actual.index["tokens"].signs is None
        perm = actual.index["bigrams"].perm
        assert torch.equal(actual.index["bigrams"].signs, expected.signs[0, perm])
    for other, micro_batches in enumerate(want):
        for micro_batch in micro_batches:
            seen[other]["tokens"] |= set(micro_batch.inputs.tolist())
            seen[other]["bigrams"] |= set(micro_batch.hashed_rows[0].tolist())
    tables = {"value_embeds": "tokens", "embed": "tokens", "bigram_embed": "bigrams"}
    assert batch.rows.keys() == {"buffer", *(tables if plan.updates(2) else ())}
    if plan.updates(2):
        for name, kind in tables.items():
            rows = {"tokens": 264, "bigrams": 640}[kind]
            check_plan(batch.rows[name], [own[kind] for own in seen], rank, rows)
        seen[:] = nothing_seen(len(want))


def check_batches(rank, world_size, cfg):
    """Compares with loaders alone, through all stages and shards, after all batches have been built."""
    alone, seen = (
        [train_loader(cfg, other, world_size) for other in range(world_size)],
        nothing_seen(world_size),
    )
    batches = prefetcher(train_loader(cfg, rank, world_size), plans_of(cfg), rank, world_size)
    shards = set()
    for plan, batch in [(plan, batches.next()) for plan in plans_of(cfg)]:
        want = [loader.batch(plan.batch_tokens, plan.max_doc_len) for loader in alone]
        check_batch(batch, plan, want, seen, rank)
        assert batch.position == alone[rank].position()
        shards.add(batch.position[0])
    assert batches.peek() is None and shards == {0, 1, 2}
    for loader in (batches.loader, *alone):
        loader.close()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_batches_are_the_loaders(workers, folder, world_size):
    """Checks that the position, too, is the loader's after this batch, not after a prefetched one."""
    workers(world_size, check_batches, config(folder))


def test_batches_are_built_ahead(folder):
    """Checks how many are, and that peek() takes none."""
    cfg = config(folder)
    loader, built = train_loader(cfg), []
    build = loader.batch
    loader.batch = lambda *args: (built.append(args), build(*args))[1]
    batches = prefetcher(loader, plans_of(cfg))
    for step, plan in enumerate(plans_of(cfg)):
        wait(batches.queue)
        assert len(built) == min(step + cfg.ngrams.every, cfg.steps)
        ahead = batches.peek()
        assert ahead is batches.peek() is batches.next() and ahead.plan == plan
    assert batches.peek() is None
    loader.close()


@pytest.mark.parametrize("first", [2, 4, 6])
def test_batches_resume(folder, first):
    """Compares batches from the position after an Adam step with those of an uninterrupted run."""
    cfg = config(folder)
    uninterrupted = prefetcher(train_loader(cfg), plans_of(cfg))
    for _ in range(first):
        batch = uninterrupted.next()
    assert batch.plan.updates(2)
    alone, seen = train_loader(cfg, position=batch.position), nothing_seen()
    resumed = prefetcher(train_loader(cfg, position=batch.position), iter(plans_of(cfg, first)))
    for plan in plans_of(cfg, first):
        a, b = uninterrupted.next(), resumed.next()
        check_batch(b, plan, [alone.batch(plan.batch_tokens, plan.max_doc_len)], seen)
        assert a.position == b.position and a.plan == b.plan
        assert len(tensors_of(a.rows)) == 6 * plan.updates(2)
        assert all(map(torch.equal, tensors_of(a.rows), tensors_of(b.rows)))
        for x, y in zip(a.micro_batches, b.micro_batches):
            assert all(same_bits(x.index[kind]._asdict(), y.index[kind]._asdict()) for kind in x.index)
    for loader in (uninterrupted.loader, resumed.loader, alone):
        loader.close()


# ----------------------------------------------------------------------------------------------------- copies


def test_all_tensors_are_copied_asynchronously(folder, monkeypatch):
    """Checks one copy to "meta" of a micro-batch, one of the plans, and that the CPU needs none."""
    cfg = config(folder)
    batches = prefetcher(train_loader(cfg), plans_of(cfg))
    batch = [batches.next(), batches.next()][-1]
    micro_batch = batch.micro_batches[-1]
    batches.loader.close()
    assert micro_batch.to(torch.device("cpu")).inputs is micro_batch.inputs
    assert tg.move(batch.rows, torch.device("cpu")) is batch.rows
    log, to = [], torch.Tensor.to

    def recording_to(self, *args, **options):
        log.append(options)
        return to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", recording_to)
    moved = micro_batch.to(torch.device("meta"))
    assert log == [{"non_blocking": True}]
    rows = tg.move(batch.rows, torch.device("meta"))
    assert log == [{"non_blocking": True}] * 2
    assert [(t.shape, t.dtype) for t in tensors_of(moved)] == [
        (t.shape, t.dtype) for t in tensors_of(micro_batch)
    ]
    assert {t.device.type for t in tensors_of(moved)} == {"meta"}
    assert moved.max_doc_len == micro_batch.max_doc_len
    assert moved.index.keys() == {"tokens", "bigrams"}
    assert rows.keys() - {"buffer"} == {"value_embeds", "bigram_embed", "embed"}
    for name, plan in batch.rows.items():
        if name != "buffer":
            counts = "send_counts", "recv_counts"
            assert all(getattr(rows[name], n) == getattr(plan, n) for n in counts)
            assert rows[name].arriving.device.type == "meta"
            assert rows[name].arriving.shape == plan.arriving.shape


def test_packed_tensors_lie_in_one_buffer(folder):
    """Checks values and dtypes, where each begins (at a multiple of 16 bytes), and the buffer's length."""
    cfg = config(folder)
    loader = train_loader(cfg)
    (micro_batch, *_) = loader.batch(8 * 30, 20)
    loader.close()
    micro_batch.index["tokens"] = tg.index_rows(micro_batch.inputs.numpy())
    signs = micro_batch.signs.numpy()
    micro_batch.index["bigrams"] = tg.index_rows(micro_batch.hashed_rows.numpy(), signs)
    packed, size = micro_batch.pack(), 0
    for actual, want in zip(tensors_of(packed), tensors_of(micro_batch)):
        assert actual.dtype == want.dtype and torch.equal(actual, want)
        assert actual.data_ptr() == packed.buffer.data_ptr() + size
        size += -(-want.nbytes // 16) * 16
    assert len(tensors_of(packed)) == len(tensors_of(micro_batch)) == 12 and packed.buffer.nbytes == size


# ----------------------------------------------------------------------------------------------------- errors


def test_too_many_documents(tmp_path):
    """Checks that next() raises the thread's error for its own batch, not for the good one before."""
    write_shard(tmp_path / "x_train_000001.bin", [BOS] + 29 * [1] + 300 * [BOS], VOCAB, BOS)
    cfg = config(tmp_path, microbatches=1, max_docs=6)
    batches = prefetcher(train_loader(cfg), plans_of(with_max_doc_len(cfg, 40)))
    wait(batches.queue)
    assert batches.next().micro_batches[0].inputs.tolist() == [BOS] + 29 * [1]
    for call in (batches.peek, batches.peek, batches.next):
        with pytest.raises(tg.UserError, match="of 30 tokens has 31 documents.*--set max_docs="):
            call()
    batches.loader.close()


def test_the_first_shard_follows_the_last(tmp_path):
    write_shard(tmp_path / "x_train_000001.bin", [BOS] + 80 * [1, 2], VOCAB, BOS)
    write_shard(tmp_path / "x_train_000002.bin", ([BOS] + 30 * [3]) * 2, VOCAB, BOS)
    cfg = config(tmp_path, microbatches=1)
    batches = prefetcher(train_loader(cfg), plans_of(with_max_doc_len(cfg, 1000)))
    positions = [batches.next().position for _ in range(5)]
    assert positions == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 2)]
    batches.loader.close()


@pytest.mark.parametrize("when", ["building", "failed", "at the end"])
def test_close(folder, when):
    """Checks that close() waits for a build under way, and leaves no thread behind."""
    cfg = config(folder, steps=(1, 0, 1, 0))
    threads_before = set(threading.enumerate())
    loader = train_loader(cfg)
    building, may_end, build = threading.Event(), threading.Event(), loader.batch

    def slow_build(*args):
        building.set()
        assert may_end.wait(WAIT)
        if when == "failed":
            raise tg.UserError("on purpose")
        return build(*args)

    loader.batch = slow_build
    batches = prefetcher(loader, plans_of(cfg))
    assert building.wait(WAIT)
    if when == "at the end":
        may_end.set()
        for _ in range(cfg.steps):
            batches.next()
    elif when == "failed":
        may_end.set()
        wait(batches.queue[:1])
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(0.1)
    may_end.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(WAIT)
        assert not thread.is_alive()


# ----------------------------------------------------------------------------------------------- sums of rows


def cancelling_numbers(shape, dtype, generator):
    """Draws numbers of 2^-16 to 2^16, most of them also with the opposite sign.

    Where they cancel, what remains depends on the order of additions and on every rounding.
    """
    size = 2.0 ** torch.randint(-16, 17, shape, generator=generator)
    x, half = torch.randn(shape, generator=generator, dtype=torch.float64) * size, shape[0] // 2
    x[shape[0] - half :] = -x[torch.randperm(half, generator=generator)]
    return x.to(dtype)


def naive_sums(out, grad, index, signs=None, backwards=False, rounding="once", overwrites=False):
    """Sums row by row, position by position, in at least fp32. Non-default options are mutants."""
    if signs is not None:
        grad = grad.clone()
        for position, sign in zip(index.perm.tolist(), index.signs.tolist()):
            grad[position] *= signs[sign].view(grad[position].shape)
    out, acc_dtype = out.clone(), torch.promote_types(out.dtype, torch.float32)
    for i, row in enumerate(index.row_ids.tolist()):
        positions = index.perm[index.offsets[i] : index.offsets[i + 1]].tolist()
        total = torch.zeros_like(out[row], dtype=acc_dtype)
        for position in reversed(positions) if backwards else positions:
            total = total + grad[position].to(acc_dtype)
            if rounding == "every addition":
                total = total.to(out.dtype).to(acc_dtype)
        if rounding == "twice":
            total = total.to(out.dtype).to(acc_dtype)
        out[row] = (total if overwrites else out[row].to(acc_dtype) + total).to(out.dtype)
    return out


def bits(t):
    return t.contiguous().view(torch.uint8)


def indices_and_grads(shape, dtype, sign_rows=1):
    """Yields (index, gradient) of eight micro-batches."""
    rng, g = np.random.default_rng(5), torch.Generator().manual_seed(6)
    for _ in range(2):
        for distribution, T in (("one", 60), ("skewed", 90), ("uniform", 90), ("uniform", 1)):
            row_ids = random_row_ids(distribution, shape[0], T, rng)
            signs = rng.integers(0, sign_rows, (1, T)).astype(np.int32)
            yield tg.index_rows(row_ids, signs), cancelling_numbers((T, *shape[1:]), dtype, g)


SHAPES = [(40, 1), (300, 5), (30, 3, 7), (17, 769), (9, 5, 320), (70000, 2), (40, 768), (5, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_segment_sum_rows(shape, dtype):
    """Checks all bits. Rows that nothing touches stay NaN."""
    out = torch.full(shape, torch.nan, dtype=dtype)
    for index, _ in indices_and_grads(shape, dtype):
        out[index.row_ids.long()] = 0
    out[::3] = 7
    for i, (index, grad) in enumerate(indices_and_grads(shape, dtype)):
        out_before, grad_before = out.clone(), grad.clone()
        tg.segment_sum_rows(out, grad, index)
        assert torch.equal(bits(out), bits(naive_sums(out_before, grad, index))), i
        assert out[index.row_ids].isfinite().all() and torch.equal(grad, grad_before)
        others = torch.ones(shape[0], dtype=torch.bool)
        others[index.row_ids.long()] = False
        assert torch.equal(bits(out[others]), bits(out_before[others]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_segment_sum_rows_with_signs(shape, dtype):
    """Checks all bits, of columns that are summed in several chunks too."""
    g = torch.Generator().manual_seed(9)
    signs = (torch.randint(0, 2, (11, math.prod(shape[1:])), generator=g) * 2 - 1).to(dtype)
    out, unsigned = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for i, (index, grad) in enumerate(indices_and_grads(shape, dtype, len(signs))):
        before, grad_before = out.clone(), grad.clone()
        tg.segment_sum_rows(out, grad, index, signs)
        assert torch.equal(bits(out), bits(naive_sums(before, grad, index, signs))), i
        assert torch.equal(grad, grad_before)
        tg.segment_sum_rows(unsigned, grad, index)
    assert not torch.equal(out, unsigned)


MUTANTS = [
    dict(backwards=True),
    dict(rounding="every addition"),
    dict(rounding="twice"),
    dict(overwrites=True),
]
