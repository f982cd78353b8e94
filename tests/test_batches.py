"""Tests prefetched batches: their routes and sums of rows against naive programs, copies, errors."""

import math
import threading
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from configs import BASE
from golden_inputs import prefetch_exchange, random_documents, same_bits, write_shard
from launch import WAIT

VOCAB, BOS = 257, 256


# ---------------------------------------------------------------------------------------------------- batches


def config(folder, microbatches=8, **changes):
    """Returns a config with stages that start at odd and even steps, and micro-batches of 30 to 60 tokens."""
    stages = []
    for stage, steps, T, max_doc_len in zip(BASE.stages, (3, 2, 3, 3), (30, 60, 45, 60), (20, 50, 50, 50)):
        stage = replace(stage, steps=steps, batch_tokens=microbatches * T, max_doc_len=max_doc_len)
        stages.append(stage)
    cfg = replace(BASE, data=str(folder), ngrams=tg.Ngrams(), bigram_vocab_size=640)
    return replace(cfg, microbatches=microbatches, stages=tuple(stages), **changes)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(4)
    for i, count in enumerate((2500, 3500, 5000)):
        tokens = random_documents(rng, count, VOCAB, BOS, 60)
        write_shard(tmp_path / f"x_train_{i:06d}.bin", tokens, VOCAB, BOS)
    return tmp_path


def train_loader(cfg, rank=0, world_size=1):
    return tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size)


def plans_of(cfg):
    return [tg.plan_step(cfg, step) for step in range(cfg.steps)]


def prefetcher(loader, plans, rank=0, world_size=1):
    return tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))


def tensors_of(nest):
    return [t for t in tree_leaves(nest) if isinstance(t, torch.Tensor)]


def check_exchange(exchange, touched, rank, rows):
    """Checks a rank's RowRoutes of a table of `rows`, if the ranks have touched these rows."""
    world_size = len(touched)
    block = rows // world_size
    sent = [0] * world_size
    for row in touched[rank]:
        sent[row // block] += 1
    arriving, received = [], []
    for other in touched:
        own = [row % block for row in sorted(other) if row // block == rank]
        arriving += own
        received.append(len(own))
    assert exchange.rows.dtype == exchange.local_rows.dtype == torch.int32
    assert exchange.rows.tolist() == sorted(touched[rank])
    assert exchange.local_rows.tolist() == arriving
    assert exchange.input_splits == sent
    assert exchange.output_splits == received


def check_micro_batch(actual, read, plan, world_size):
    """Compares a micro-batch with what a loader has read, to which a Prefetcher adds segments and weights."""
    segments = {
        "inputs": tg.make_segments(read.inputs),
        "hashed_rows": tg.make_segments(read.hashed_rows, read.sign_ids),
    }
    shares = torch.tensor([weight * world_size / 8 for weight in plan.loss_weights])
    want = tensors_of(read._replace(segments=segments, loss_weights=shares))
    found = tensors_of(actual)
    assert len(found) == 13
    assert same_bits(found, want)
    assert actual.max_doc_len == read.max_doc_len


def check_batches(rank, world_size, cfg):
    """Compares with loaders alone, through all stages and shards, after all batches have been built."""
    alone = [train_loader(cfg, other, world_size) for other in range(world_size)]
    batches = prefetcher(train_loader(cfg, rank, world_size), plans_of(cfg), rank, world_size)
    built = [batches.next() for _ in plans_of(cfg)]
    assert batches.peek() is None
    tables = [row for row in tg.used_params(cfg) if row.is_table]
    shapes = tg.param_shapes(cfg, world_size)
    seen = [{"tokens": set(), "hashed": set()} for _ in alone]  # the rows touched since the last Adam step
    shards = set()
    for plan, batch in zip(plans_of(cfg), built):
        read = [loader.micro_batches(plan) for loader in alone]
        assert batch.plan == plan
        assert batch.position == alone[rank].position()
        shards.add(batch.position[0])
        for actual, expected in zip(batch.micro_batches, read[rank], strict=True):
            check_micro_batch(actual, expected, plan, world_size)
        for own, micro_batches in zip(seen, read):
            for micro_batch in micro_batches:
                own["tokens"].update(micro_batch.inputs.tolist())
                own["hashed"].update(micro_batch.hashed_rows[0].tolist())
        if not plan.updates((2, 2)):
            assert not batch.routes
            continue
        assert batch.routes.keys() == {row.name for row in tables}
        for row in tables:
            touched = [own[row.kind] for own in seen]
            check_exchange(batch.routes[row.name], touched, rank, shapes[row.name][0])
        for own in seen:
            own["tokens"].clear()
            own["hashed"].clear()
    assert shards == {0, 1, 2}
    batches.loader.close()
    for loader in alone:
        loader.close()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_batches_are_the_loaders(workers, folder, world_size):
    """Checks that the position, too, is the loader's after this batch, not after a prefetched one."""
    workers(world_size, check_batches, config(folder))


def test_batches_are_built_ahead(folder):
    """Checks how many are, and that peek() takes none."""
    cfg = config(folder)
    loader = train_loader(cfg)
    build = loader.micro_batches
    built = 0

    def counted_build(plan):
        nonlocal built
        built += 1
        return build(plan)

    loader.micro_batches = counted_build
    batches = prefetcher(loader, plans_of(cfg))
    for step, plan in enumerate(plans_of(cfg)):
        wait(batches.queue)
        assert built == min(step + max(cfg.ngrams.update_every), cfg.steps)
        ahead = batches.peek()
        assert ahead is batches.peek() is batches.next() and ahead.plan == plan
    assert batches.peek() is None
    loader.close()


# ----------------------------------------------------------------------------------------------------- copies


def test_one_asynchronous_copy_takes_packed_tensors_to_a_device(folder, monkeypatch):
    """Checks also where each lies in the buffer, at multiples of 16 bytes."""
    cfg = config(folder, ngrams=tg.Ngrams((2, 3), 301, 12, update_every=(1, 1)))
    batches = prefetcher(train_loader(cfg), plans_of(cfg))
    batches.next()
    batch = batches.next()
    batches.loader.close()
    copy_ = torch.Tensor.copy_
    copies = []

    def recording_copy(self, *args, **options):
        copies.append(options)
        return copy_(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", recording_copy)
    micro_batch = batch.micro_batches[-1]
    inputs = micro_batch._replace(segments={})
    for nest, count in (inputs, 7), (micro_batch.segments, 7), (batch.routes, 15):
        tensors = tensors_of(nest)
        assert len(tensors) == count
        moved = tensors_of(tg.move(nest, torch.device("cpu")))
        assert copies == [{"non_blocking": True}]
        copies.clear()
        start = tensors[0].data_ptr()
        size = 0
        for t, copy in zip(tensors, moved, strict=True):
            assert t.data_ptr() == start + size
            assert t.dtype == copy.dtype and torch.equal(t, copy)
            assert copy.untyped_storage().data_ptr() == moved[0].data_ptr() != start
            size += tg.padded(t.nbytes, 16)
        assert tensors[0].untyped_storage().nbytes() == size


def test_inputs_of_equal_shapes_have_equal_addresses(folder):
    """Moves all micro-batches of a run, each of which must keep its values until the next one's move."""
    cfg = config(folder, ngrams=tg.Ngrams((2, 3), 301, 12, update_every=(1, 1)))
    model = tg.GPT(cfg)
    batches = prefetcher(train_loader(cfg), plans_of(cfg))
    addresses = {}
    for _ in range(cfg.steps):
        for part in batches.next().micro_batches:
            packed = part._replace(segments={})
            moved = tg.move(packed, torch.device("cpu"), model.micro_batch_buffer)
            assert same_bits(tensors_of(moved), tensors_of(packed))
            assert moved.inputs.data_ptr() != packed.inputs.data_ptr()
            found = [t.data_ptr() for t in tensors_of(moved)]
            shape = len(part.inputs), len(part.loss_weights)
            assert found == addresses.setdefault(shape, found)
    batches.loader.close()
    assert len(addresses) >= 3


# ----------------------------------------------------------------------------------------------------- errors


def test_an_error_in_the_thread(tmp_path):
    """Checks that next() raises the thread's error for its own batch, not for the good one before."""
    for i, other in enumerate((1, VOCAB)):
        write_shard(tmp_path / f"x_train_{i:06d}.bin", ([BOS] + 19 * [other]) * 2, VOCAB, BOS)
    cfg = config(tmp_path, microbatches=1)
    batches = prefetcher(train_loader(cfg), plans_of(cfg))
    wait(batches.queue)
    assert len(batches.next().micro_batches[0].inputs) == 30
    for call in (batches.peek, batches.peek, batches.next):
        with pytest.raises(tg.UserError, match="outside the vocabulary"):
            call()
    batches.loader.close()


@pytest.mark.parametrize("fails", [False, True])
def test_close(folder, fails):
    """Checks that close() waits for a build under way, and leaves no thread behind."""
    threads_before = threading.enumerate()
    loader = train_loader(config(folder))
    build = loader.micro_batches
    building = threading.Event()
    may_end = threading.Event()

    def slow_build(*args):
        building.set()
        assert may_end.wait(WAIT)
        if fails:
            raise tg.UserError("on purpose")
        return build(*args)

    loader.micro_batches = slow_build
    prefetcher(loader, plans_of(loader.cfg))
    assert building.wait(WAIT)
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_end.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    for thread in threading.enumerate():
        if thread not in threads_before:
            thread.join(WAIT)
            assert not thread.is_alive()


# ----------------------------------------------------------------------------------------------- sums of rows


def cancelling_numbers(shape, dtype, generator):
    """Draws numbers of 2^-16 to 2^16, most of them also with the opposite sign.

    Where they cancel, what remains depends on the order of additions and on every rounding.
    """
    size = 2.0 ** torch.randint(-16, 17, shape, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * size
    half = shape[0] // 2
    x[shape[0] - half :] = -x[torch.randperm(half, generator=generator)]
    return x.to(dtype)


def naive_sums(out, grad, segments, signs):
    """Sums row by row, position by position, in at least fp32."""
    out = out.clone()
    acc_dtype = torch.promote_types(out.dtype, torch.float32)
    for i, row in enumerate(segments.ids.tolist()):
        total = torch.zeros_like(out[row], dtype=acc_dtype)
        for place in range(segments.offsets[i], segments.offsets[i + 1]):
            part = grad[segments.perm[place]].to(acc_dtype)
            if segments.sign_ids is not None:
                part = part * signs[segments.sign_ids[place]].view(part.shape)
            total = total + part
        out[row] = (out[row].to(acc_dtype) + total).to(out.dtype)
    return out


SHAPES = [(300, 5), (30, 3, 7), (17, 769), (9, 5, 320), (70000, 2), (5, 1, 1)]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_segment_sum_rows(shape, dtype, signed):
    """Checks all bits. Columns may be summed in several chunks. Rows that nothing touches stay NaN.

    The model's signs do not reach rows that have none, as tokens' do not.
    """
    rng = np.random.default_rng(5)
    g = torch.Generator().manual_seed(6)
    out = torch.full(shape, torch.nan, dtype=dtype)
    signs = (torch.randint(0, 2, (11, math.prod(shape[1:])), generator=g) * 2 - 1).to(dtype)
    # Most positions are on few rows, as in text; with the power of 99 nearly all are on one.
    for T, power in (60, 99), (90, 8), (90, 8), (1, 8), (60, 99):
        ids = tg.int32(shape[0] * rng.random(T) ** power)
        sign_ids = None
        if signed:
            sign_ids = tg.int32(rng.integers(0, 11, (1, T)))
        segments = tg.make_segments(ids, sign_ids)
        touched = segments.ids.long()
        out[touched] = out[touched].nan_to_num(7)
        before = out.clone()
        grad = cancelling_numbers((T, *shape[1:]), dtype, g)
        grad_before = grad.clone()
        tg.segment_sum_rows(out, grad, segments, signs)
        assert same_bits(out, naive_sums(before, grad, segments, signs))
        assert torch.equal(grad, grad_before)
