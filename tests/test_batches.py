"""Batches built ahead: indices and sums of rows against naive programs; which memory is used and when; errors of the thread."""
import threading
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import next_batch, random_documents, write_shard
from launch import WAIT

VOCAB, START = 257, 256


# ------------------------------------------------------------------------------------------------------------ indices

def naive_index(numbers, touched):
    """Rows in ascending order, all positions row by row, where each row's begin, and whether it is not among `touched`."""
    positions = {}
    for position, row in enumerate(numbers.tolist()):
        positions.setdefault(row, []).append(position)
    rows = sorted(positions)
    starts = [sum(len(positions[row]) for row in rows[:i]) for i in range(len(rows) + 1)]
    return rows, [position for row in rows for position in positions[row]], starts, [row not in touched for row in rows]


def room_for(T):
    """Full of what no index has."""
    ints = lambda n: torch.full((n,), -7, dtype=torch.int32)
    return tg.RowIndex(ints(T), ints(T), ints(T + 1), torch.zeros(T, dtype=torch.bool))


def check_index(index, numbers, touched):
    assert [t.dtype for t in index] == [torch.int32, torch.int32, torch.int32, torch.bool]
    assert tuple(t.tolist() for t in index) == naive_index(numbers, touched)


def draw(kind, rows, T, rng):
    """Row numbers of T positions, int32."""
    if kind == "one":
        return np.full(T, rng.integers(rows), dtype=np.int32)
    if kind == "last":
        return np.full(T, rows - 1, dtype=np.int32)
    if kind == "distinct":
        return rng.permutation(rows)[:T].astype(np.int32)
    if kind == "skewed":  # most positions on few rows, like text
        return (rows * rng.random(T) ** 8).astype(np.int32)
    if kind == "folded":  # numbers that differ in one half of 16 bits only
        return (rng.integers(0, 3, T) + 65536 * rng.integers(0, rows // 65536 + 1, T)).clip(0, rows - 1).astype(np.int32)
    return rng.integers(0, rows, T, dtype=np.int32)


@pytest.mark.parametrize("kind", ["uniform", "skewed", "distinct", "one", "last", "folded"])
@pytest.mark.parametrize("rows", [2, 300, 65535, 65536, 65537, 251520])
def test_index(rows, kind):
    """At sizes on both sides of where one pass of the sort is enough. Positions of one row stay in the text's order."""
    rng = np.random.default_rng(rows)
    for T in (1, 2, 37, 900):
        numbers, marks = draw(kind, rows, T, rng), np.zeros(rows, dtype=bool)
        room = room_for(len(numbers))
        index = tg.index_rows(numbers, marks, room)
        check_index(index, numbers, set())
        assert marks.nonzero()[0].tolist() == sorted(set(numbers.tolist()))
        assert [t.data_ptr() for t in index] == [t.data_ptr() for t in room]


@pytest.mark.parametrize("rows", [50, 70000])
def test_fresh_rows(rows):
    """A row is fresh in the first micro-batch that touches it, and again when the marks were cleared."""
    rng = np.random.default_rng(1)
    marks, seen = np.zeros(rows, dtype=bool), set()
    room = room_for(200)
    for i in range(30):
        if i % 5 == 4:
            marks[:], seen = False, set()
        numbers = draw("skewed", rows, int(rng.integers(1, 200)), rng)
        check_index(tg.index_rows(numbers, marks, room), numbers, seen)
        seen |= set(numbers.tolist())
        assert set(marks.nonzero()[0].tolist()) == seen


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_touched_rows(world):
    rng, rows = np.random.default_rng(world), 24 * 1000
    block = rows // world
    cases = {"none": [], "all": range(rows), "last": [rows - 1], "first": [0], "some": rng.permutation(rows)[:500],
             "one owner": (world // 2) * block + rng.permutation(block)[:50],
             "edges": [edge for owner in range(world) for edge in (owner * block, (owner + 1) * block - 1)]}
    room = torch.full((rows,), -7, dtype=torch.int32)
    for case, numbers in cases.items():
        numbers = sorted(map(int, numbers))
        marks = np.zeros(rows, dtype=bool)
        marks[numbers] = True
        touched = tg.touched_rows(marks, world, room)
        assert touched.rows.dtype == torch.int32 and touched.rows.tolist() == numbers, case
        assert touched.rows.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
        assert touched.owners == [sum(number // block == owner for number in numbers) for owner in range(world)], case
        assert touched.block == block and all(type(n) is int for n in touched.owners)
        assert marks.sum() == len(numbers)


# -------------------------------------------------------------------------------------------------------- whole batches

def config(folder, steps=(3, 2, 3, 3), slices=8, **changes):
    """Stages that change at odd and even steps, with slices of 30, 60, 45 and 60 tokens."""
    stages = [replace(stage, steps=n, tokens=slices * T, longest=longest) for stage, n, T, longest in
              zip(tg.CPU.stages, steps, (30, 60, 45, 60), (20, 50, 50, 50))]
    return replace(tg.CPU, data=str(folder), bigram_rows=640, slices=slices, stages=tuple(stages), **changes)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(4)
    for i, count in enumerate((2500, 3500, 5000)):
        write_shard(tmp_path / f"x_train_{i:06d}.bin", random_documents(rng, count, VOCAB, START, 60), VOCAB, START)
    return tmp_path


def loader_of(cfg, rank=0, world=1, position=(0, 0, 0)):
    return tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, False, position)


def plans_of(cfg, first=0):
    return [tg.plan(cfg, step) for step in range(first, cfg.steps)]


def numbers_of(micro_batch):
    return {"tokens": micro_batch.inputs.numpy(), "bigrams": micro_batch.bigram.numpy()}


def check_batch(batch, now, want, seen, world):
    """`batch` is of step `now` and has `want`, micro-batches from a loader alone; `seen` are the rows touched since the last
    Adam step, by kind, and are brought up to date."""
    assert batch.now == now and len(batch.micro_batches) == len(want)
    for i, (got, expected) in enumerate(zip(batch.micro_batches, want)):
        for name in ("inputs", "targets", "bigram", "cu_seqlens"):
            a, b = getattr(got, name), getattr(expected, name)
            assert a.dtype == b.dtype and torch.equal(a, b), (now.step, i, name)
        assert got.longest == expected.longest
        assert got.index.keys() == {"tokens", "bigrams"}
        for kind, numbers in numbers_of(expected).items():
            check_index(got.index[kind], numbers, seen[kind])
            seen[kind] |= set(numbers.tolist())
        assert bool(got.touched) == (i == len(want) - 1)
    for kind, touched in batch.micro_batches[-1].touched.items():
        assert touched.rows.tolist() == sorted(seen[kind]), (now.step, kind)
        block = {"tokens": 264, "bigrams": 640}[kind] // world
        assert touched.block == block
        assert touched.owners == [sum(row // block == owner for row in seen[kind]) for owner in range(world)]
    if now.do_adam:
        for rows in seen.values():
            rows.clear()


def test_index_batch(folder):
    cfg = config(folder, slices=4)
    (*_, last) = want = next_batch(loader_of(cfg), 240, 50)
    got = next_batch(loader_of(cfg), 240, 50)
    seen = {"tokens": {3, 256}, "bigrams": {639, 5, 100}}
    marks = {"tokens": np.zeros(264, dtype=bool), "bigrams": np.zeros(640, dtype=bool)}
    for kind, rows in seen.items():
        marks[kind][list(rows)] = True
    assert not last.index and not last.touched
    tg.index_batch(got, marks, 2)
    now = tg.plan(cfg, 0)
    check_batch(tg.Batch(now, got, (0, 0, 0)), now, want, seen, 2)
    for kind, rows in seen.items():
        assert set(marks[kind].nonzero()[0].tolist()) == rows


@pytest.mark.parametrize("rank, world", [(0, 1), (0, 2), (1, 2), (2, 4), (7, 8)])
def test_batches_are_the_loaders(folder, rank, world):
    """Through all stages and shards: each as the loader makes it, still so when the next one has been built, with the rows that
    were touched since the last Adam step, and with the loader's position behind it, not behind the one built ahead."""
    cfg = config(folder)
    alone, seen = loader_of(cfg, rank, world), {"tokens": set(), "bigrams": set()}
    batches = tg.Batches(loader_of(cfg, rank, world), plans_of(cfg))
    shards = set()
    for now in plans_of(cfg):
        want = next_batch(alone, now.tokens, now.longest)
        batch = batches.next()
        if batches.coming:
            wait([batches.coming])
        check_batch(batch, now, want, seen, world)
        assert batch.position == alone.position()
        shards.add(batch.position[0])
    assert batches.coming is None and shards == {0, 1, 2}
    batches.close()
    alone.close()


@pytest.mark.parametrize("first", [1, 4, 5])
def test_batches_go_on(folder, first):
    """From the position and the touched rows that a run left: as if it had not been left."""
    cfg = config(folder)
    whole, seen = tg.Batches(loader_of(cfg), plans_of(cfg)), {"tokens": set(), "bigrams": set()}
    for _ in range(first):
        batch = whole.next()
    touched = None
    if not batch.now.do_adam:
        touched = {kind: t.rows.clone() for kind, t in batch.micro_batches[-1].touched.items()}
        seen = {kind: set(rows.tolist()) for kind, rows in touched.items()}
        assert all(seen.values())
    alone = loader_of(cfg, position=batch.position)
    rest = tg.Batches(loader_of(cfg, position=batch.position), iter(plans_of(cfg, first)), touched)
    for now in plans_of(cfg, first):
        a, b = whole.next(), rest.next()
        check_batch(b, now, next_batch(alone, now.tokens, now.longest), seen, 1)
        assert a.position == b.position and a.now == b.now
        for x, y in zip(a.micro_batches, b.micro_batches):
            assert all(torch.equal(s, t) for kind in x.index for s, t in zip(x.index[kind], y.index[kind]))
        for kind, t in a.micro_batches[-1].touched.items():
            assert torch.equal(t.rows, b.micro_batches[-1].touched[kind].rows)
    for each in (whole, rest, alone):
        each.close()


# ------------------------------------------------------------------------------------------------------------- memory

def storages(batch):
    """Addresses of all memory in which a batch lies."""
    tensors = [t.rows for t in batch.micro_batches[-1].touched.values()]
    for m in batch.micro_batches:
        tensors += [m.inputs, m.targets, m.bigram, m.cu_seqlens, *(t for index in m.index.values() for t in index)]
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_memory_is_allocated_once(folder, monkeypatch):
    """Two sets of rooms in turn, of the largest stage's size, made before the first batch."""
    made, of_room = [], tg.Room.__init__
    monkeypatch.setattr(tg.Room, "__init__", lambda self, *args: (made.append(self), of_room(self, *args))[1])
    cfg = config(folder)
    batches = tg.Batches(loader_of(cfg, 1, 2), plans_of(cfg))
    assert len(made) == 8 and all(room.inputs.numel() == 60 for room in made)
    rooms = {t.untyped_storage().data_ptr() for room in made for t in (
        room.inputs, room.targets, room.bigram, room.cu_seqlens, *room.touched.values(),
        *(t for index in room.index.values() for t in index))}
    used = []
    for _ in range(cfg.steps):
        used.append(storages(batches.next()))
        assert used[-1] <= rooms
    batches.close()
    assert not used[0] & used[1] and len(made) == 8
    assert all(later == earlier for earlier, later in zip(used, used[2:]))


class Copying:
    """An event whose copy is on its way until `arrive` is called."""

    def __init__(self, room):
        self.room, self.asked, self.arrived, self.before = room, threading.Event(), threading.Event(), self.contents(room)

    @staticmethod
    def contents(room):
        fields = [room.inputs, room.targets, room.bigram, room.cu_seqlens, *room.touched.values()]
        return [t.clone() for t in fields + [t for index in room.index.values() for t in index]]

    def unchanged(self):
        return all(torch.equal(a, b) for a, b in zip(self.before, self.contents(self.room)))

    def synchronize(self):
        self.asked.set()
        assert self.arrived.wait(WAIT)


@pytest.mark.parametrize("late", [0, 3])
def test_a_room_is_not_written_before_its_copy_has_finished(folder, late):
    """Whichever of a batch's rooms is copied last: it keeps its contents until its event is over, then gets the next but one
    batch's."""
    cfg = config(folder)
    plans, alone = plans_of(cfg), loader_of(cfg, 0, 2)
    batches = tg.Batches(loader_of(cfg, 0, 2), plans)
    want = [next_batch(alone, now.tokens, now.longest) for now in plans]
    first = batches.next()
    wait([batches.coming])
    events = [Copying(micro_batch.room) for micro_batch in first.micro_batches]
    for i, event in enumerate(events):
        event.room.copied = event
        if i != late:
            event.arrived.set()
    batches.next()
    assert events[late].asked.wait(WAIT)
    done, _ = wait([batches.coming], timeout=0.2)
    assert not done and events[late].unchanged()
    events[late].arrived.set()
    wait([batches.coming])
    assert all(event.asked.is_set() for event in events)
    assert not any(event.unchanged() for event in events)
    for got, expected in zip(batches.next().micro_batches, want[2]):
        assert torch.equal(got.inputs, expected.inputs) and got.room in [event.room for event in events]
    batches.close()
    alone.close()


def test_a_moved_micro_batch_leaves_an_event(folder, monkeypatch):
    """Recorded when all copies have been started. With CUDA's event replaced, and a device that takes any copy."""
    log = []

    class Event:
        def record(self):
            log.append("record")

    cfg = config(folder)
    batches = tg.Batches(loader_of(cfg), plans_of(cfg))
    micro_batch = batches.next().micro_batches[-1]
    assert micro_batch.to(torch.device("cpu")) is micro_batch and micro_batch.room.copied is None
    monkeypatch.setattr(torch.cuda, "Event", Event)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **how: (log.append(how), to(self, *args, **how))[1])
    moved = micro_batch.to(torch.device("meta"))
    assert isinstance(micro_batch.room.copied, Event) and moved.room is None
    assert log == 14 * [{"non_blocking": True}] + ["record"]
    assert moved.longest == micro_batch.longest
    for kind, index in micro_batch.index.items():
        assert [t.shape for t in moved.index[kind]] == [t.shape for t in index]
        assert moved.touched[kind].owners == micro_batch.touched[kind].owners
        assert moved.touched[kind].block == micro_batch.touched[kind].block
        assert moved.touched[kind].rows.device.type == "meta"
    batches.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu(folder):
    """Page-locked, copied without waiting; what arrives is right although later batches follow at once."""
    cfg, device = config(folder), torch.device("cuda")
    alone = loader_of(cfg)
    batches = tg.Batches(tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1, True), plans_of(cfg))
    got = []
    for _ in range(cfg.steps):
        batch = batches.next()
        for m in batch.micro_batches:
            assert m.inputs.is_pinned() and m.targets.is_pinned() and m.index["bigrams"].order.is_pinned()
        torch.cuda._sleep(10_000_000)
        got.append([m.to(device) for m in batch.micro_batches])
        assert isinstance(batch.micro_batches[0].room.copied, torch.cuda.Event)
    batches.close()
    seen = {"tokens": set(), "bigrams": set()}
    for now, moved in zip(plans_of(cfg), got):
        here = [replace(m, inputs=m.inputs.cpu(), targets=m.targets.cpu(), bigram=m.bigram.cpu(), cu_seqlens=m.cu_seqlens.cpu(),
                        index={kind: tg.RowIndex(*(t.cpu() for t in index)) for kind, index in m.index.items()},
                        touched={kind: t._replace(rows=t.rows.cpu()) for kind, t in m.touched.items()}) for m in moved]
        check_batch(tg.Batch(now, here, ()), now, next_batch(alone, now.tokens, now.longest), seen, 1)


# ------------------------------------------------------------------------------------------------------------- errors

def test_too_many_documents(tmp_path):
    """The thread's error comes when its batch is asked for, not before: the batch in use is good."""
    write_shard(tmp_path / "x_train_000001.bin", [START] + 29 * [1] + 300 * [START], VOCAB, START)
    cfg = config(tmp_path, slices=1, doc_slots=6)
    batches = tg.Batches(loader_of(cfg), plans_of(replace(cfg, stages=tuple(replace(s, longest=40) for s in cfg.stages))))
    batch = batches.next()
    wait([batches.coming])
    assert batch.micro_batches[0].inputs.tolist() == [START] + 29 * [1]
    for _ in range(2):  # and again if somebody asks again
        with pytest.raises(tg.UserError, match="a slice of 30 tokens has 31 documents.*--set doc_slots="):
            batches.next()
    batches.close()


def test_data_run_out(tmp_path):
    write_shard(tmp_path / "x_train_000001.bin", [START] + 80 * [1, 2], VOCAB, START)
    cfg = config(tmp_path, slices=1)
    plans = plans_of(replace(cfg, stages=tuple(replace(s, longest=1000) for s in cfg.stages)))
    write_shard(tmp_path / "x_train_000002.bin", ([START] + 30 * [3]) * 2, VOCAB, START)
    batches = tg.Batches(loader_of(cfg), plans)
    positions = [batches.next().position for _ in range(3)]
    assert positions == [(0, 1, 30), (1, 1, 60), (1, 2, 90)]
    with pytest.raises(tg.UserError, match="ran out after 90 tokens.*add training shards"):
        batches.next()
    batches.close()


def test_a_bad_shard(tmp_path):
    """Found by the thread that reads ahead, passed on by the one that builds ahead."""
    write_shard(tmp_path / "x_train_000001.bin", [START] + 40 * [1], VOCAB, START)
    write_shard(tmp_path / "x_train_000002.bin", [START] + 40 * [300], VOCAB, START)
    cfg = config(tmp_path, slices=1)
    batches = tg.Batches(loader_of(cfg), plans_of(replace(cfg, stages=tuple(replace(s, longest=40) for s in cfg.stages))))
    batches.next()
    with pytest.raises(tg.UserError, match="x_train_000002.bin: token 300 is outside the vocabulary"):
        batches.next()
    batches.close()


@pytest.mark.parametrize("when", ["building", "failed", "at the end"])
def test_close(folder, when):
    """Comes back, with a build under way when that is over; no thread of it stays."""
    cfg = config(folder, steps=(1, 0, 1, 0))
    before = set(threading.enumerate())
    loader = loader_of(cfg)
    began, end, build = threading.Event(), threading.Event(), loader.batch

    def slow(*args):
        began.set()
        assert end.wait(WAIT)
        if when == "failed":
            raise tg.UserError("on purpose")
        return build(*args)
    loader.batch = slow
    batches = tg.Batches(loader, plans_of(cfg))
    assert began.wait(WAIT)
    if when == "at the end":
        end.set()
        for _ in range(cfg.steps):
            batches.next()
    elif when == "failed":
        end.set()
        wait([batches.coming])
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(0.1)
    end.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT)
        assert not thread.is_alive()


# -------------------------------------------------------------------------------------------------------- sums of rows

def spread(shape, dtype, generator):
    """Numbers over 2^-16 to 2^16, most of them twice with opposite signs: where they cancel, what stays is what the order of
    additions and every rounding left."""
    size = 2.0 ** torch.randint(-16, 17, shape, generator=generator)
    numbers, half = torch.randn(shape, generator=generator, dtype=torch.float64) * size, shape[0] // 2
    numbers[shape[0] - half:] = -numbers[torch.randperm(half, generator=generator)]
    return numbers.to(dtype)


def naive_sums(out, grad, index, backwards=False, rounding="once"):
    """Row after row, position after position, in at least fp32. The other ways are wrong."""
    out, wide = out.clone(), torch.promote_types(out.dtype, torch.float32)
    for i, row in enumerate(index.rows.tolist()):
        positions = index.order[index.starts[i]:index.starts[i + 1]].tolist()
        total = torch.zeros_like(out[row], dtype=wide)
        for position in reversed(positions) if backwards else positions:
            total = total + grad[position].to(wide)
            if rounding == "every addition":
                total = total.to(out.dtype).to(wide)
        if rounding == "twice":
            total = total.to(out.dtype).to(wide)
        out[row] = (total if index.fresh[i] else out[row].to(wide) + total).to(out.dtype)
    return out


def bits(t):
    return t.contiguous().view(torch.uint8)


def micro_batches(shape, dtype):
    """(index, gradient) of four micro-batches between two Adam steps, twice."""
    rng, g = np.random.default_rng(5), torch.Generator().manual_seed(6)
    for _ in range(2):
        marks = np.zeros(shape[0], dtype=bool)
        for kind, T in (("one", 60), ("skewed", 90), ("uniform", 90), ("uniform", 1)):
            numbers = draw(kind, shape[0], T, rng)
            yield tg.index_rows(numbers, marks, room_for(T)), spread((T, *shape[1:]), dtype, g)


SHAPES = [(40, 1), (300, 5), (30, 3, 7), (17, 769), (9, 5, 320), (70000, 2), (40, 768), (5, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_rows(shape, dtype):
    """To the bit. Before the first micro-batch the table holds NaN, which stays only where nothing touches it."""
    got = torch.full(shape, torch.nan, dtype=dtype)
    got[::3] = 7
    for i, (index, grad) in enumerate(micro_batches(shape, dtype)):
        before, kept = got.clone(), grad.clone()
        tg.sum_rows(got, grad, index)
        assert torch.equal(bits(got), bits(naive_sums(before, grad, index))), i
        assert got[index.rows].isfinite().all() and torch.equal(grad, kept)
        others = torch.ones(shape[0], dtype=torch.bool)
        others[index.rows.long()] = False
        assert torch.equal(bits(got[others]), bits(before[others]))


WRONG = [dict(backwards=True), dict(rounding="every addition"), dict(rounding="twice"), dict(fresh=True), dict(fresh=False)]


@pytest.mark.parametrize("dtype, wrong", [(dtype, wrong) for dtype in (torch.float32, torch.bfloat16) for wrong in WRONG
                                          if "rounding" not in wrong or dtype == torch.bfloat16], ids=str)
def test_the_sums_tell_wrong_ones(dtype, wrong):
    """The numbers above do show another order, another rounding, and a wrong first write."""
    right, other = torch.zeros(30, 50, dtype=dtype), torch.zeros(30, 50, dtype=dtype)
    seen = False
    for index, grad in micro_batches((30, 50), dtype):
        how = dict(wrong)
        fresh = torch.full_like(index.fresh, how.pop("fresh")) if "fresh" in how else index.fresh
        right, other = naive_sums(right, grad, index), naive_sums(other, grad, index._replace(fresh=fresh), **how)
        seen |= not torch.equal(right, other)
    assert seen


def test_sums_of_a_leaf_gradient():
    """A gradient need not lie in one piece, as autograd may leave it."""
    g = torch.Generator().manual_seed(7)
    grad = spread((5, 40, 6), torch.float32, g).transpose(0, 1)
    numbers = draw("skewed", 20, 40, np.random.default_rng(8))
    index, out = tg.index_rows(numbers, np.zeros(20, dtype=bool), room_for(40)), torch.zeros(20, 5, 6)
    want = naive_sums(out, grad, index)
    tg.sum_rows(out, grad, index)
    assert torch.equal(bits(out), bits(want))
