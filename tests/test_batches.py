"""Tests prefetched batches: their routes and sums of rows against naive programs, copies, errors."""

import math
import threading
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import prefetch_exchange, random_documents, same_bits, write_shard
from launch import WAIT

VOCAB, BOS = 257, 256


# ---------------------------------------------------------------------------------------------------- batches


def config(folder, microbatches=8, **changes):
    """Returns a config with stages that start at odd and even steps, and micro-batches of 30 to 60 tokens."""
    sizes = zip(tg.CPU.stages, (3, 2, 3, 3), (30, 60, 45, 60), (20, 50, 50, 50))
    changes["stages"] = tuple(
        replace(stage, steps=steps, batch_tokens=microbatches * T, max_doc_len=max_doc_len)
        for stage, steps, T, max_doc_len in sizes
    )
    changes = dict(ngrams=tg.Ngrams(), bigram_vocab_size=640, microbatches=microbatches) | changes
    return replace(tg.CPU, data=str(folder), **changes)


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


TABLES = {"value_embeds": ("tokens", 264), "embed": ("tokens", 264), "bigram_embed": ("hashed", 640)}


def check_exchange(exchange, touched, rank, rows):
    """Checks a rank's RowExchange of a table of `rows`, if the ranks have touched these rows."""
    block, numbers = rows // len(touched), [sorted(own) for own in touched]
    arriving = [[row % block for row in own if row // block == rank] for own in numbers]
    assert exchange.rows.dtype == exchange.local_rows.dtype == torch.int32
    assert exchange.rows.tolist() == numbers[rank] and exchange.local_rows.tolist() == sum(arriving, [])
    owners = [row // block for row in numbers[rank]]
    assert exchange.input_splits == [owners.count(owner) for owner in range(len(touched))]
    assert exchange.output_splits == list(map(len, arriving))


def check_batches(rank, world_size, cfg):
    """Compares with loaders alone, through all stages and shards, after all batches have been built."""
    alone = [train_loader(cfg, other, world_size) for other in range(world_size)]
    batches = prefetcher(train_loader(cfg, rank, world_size), plans_of(cfg), rank, world_size)
    seen, shards = [defaultdict(set) for _ in alone], set()  # the rows touched since the last Adam step
    for plan, batch in [(plan, batches.next()) for plan in plans_of(cfg)]:
        want = [loader.micro_batches(plan) for loader in alone]
        assert batch.plan == plan and batch.position == alone[rank].position()
        for actual, expected in zip(batch.micro_batches, want[rank], strict=True):
            rows, sign_ids = expected.hashed_rows, expected.sign_ids
            shares = torch.tensor([weight * world_size / 8 for weight in plan.loss_weights])
            segments = {
                "inputs": tg.make_segments(expected.inputs),
                "hashed_rows": tg.make_segments(rows, sign_ids),
            }
            expected = expected._replace(segments=segments, loss_weights=shares)
            tensors = tensors_of(actual), tensors_of(expected)
            assert all(map(same_bits, *tensors)) and len(tensors[0]) == len(tensors[1]) == 13
            assert actual.max_doc_len == expected.max_doc_len
        for own, micro_batches in zip(seen, want):
            for micro_batch in micro_batches:
                own["tokens"].update(micro_batch.inputs.tolist())
                own["hashed"].update(micro_batch.hashed_rows[0].tolist())
        due = TABLES if plan.updates((2, 2)) else {}
        assert batch.exchanges.keys() == {*due}
        for name, (kind, rows) in due.items():
            check_exchange(batch.exchanges[name], [own[kind] for own in seen], rank, rows)
        for own in seen if due else ():
            own.clear()
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
    build = loader.micro_batches
    loader.micro_batches = lambda *args: (built.append(args), build(*args))[1]
    batches = prefetcher(loader, plans_of(cfg))
    for step, plan in enumerate(plans_of(cfg)):
        wait(batches.queue)
        assert len(built) == min(step + max(cfg.ngrams.update_every), cfg.steps)
        ahead = batches.peek()
        assert ahead is batches.peek() is batches.next() and ahead.plan == plan
    assert batches.peek() is None
    loader.close()


# ----------------------------------------------------------------------------------------------------- copies


def test_one_asynchronous_copy_takes_packed_tensors_to_a_device(folder, monkeypatch):
    """Checks also where each lies in the buffer, at multiples of 16 bytes."""
    cfg = config(folder, ngrams=tg.Ngrams((2, 3), 301, 12, update_every=(1, 1)))
    batches = prefetcher(train_loader(cfg), plans_of(cfg))
    batch = [batches.next(), batches.next()][-1]
    batches.loader.close()
    copies, copy_, micro_batch = [], torch.Tensor.copy_, batch.micro_batches[-1]

    def recording_copy(self, *args, **options):
        copies.append(options)
        return copy_(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", recording_copy)
    inputs, segments = micro_batch._replace(segments={}), micro_batch.segments
    for nest, count in (inputs, 7), (segments, 7), (batch.exchanges, 15):
        tensors, moved = (tensors_of(x) for x in (nest, tg.move(nest, torch.device("cpu"))))
        assert copies.pop() == {"non_blocking": True} and not copies
        size, start = 0, tensors[0].data_ptr()
        for t, copy in zip(tensors, moved, strict=True):
            assert t.data_ptr() == start + size and t.dtype == copy.dtype and torch.equal(t, copy)
            assert copy.untyped_storage().data_ptr() == moved[0].data_ptr() != start
            size += -(-t.nbytes // 16) * 16
        assert len(tensors) == count and tensors[0].untyped_storage().nbytes() == size


def test_inputs_of_equal_shapes_have_equal_addresses(folder):
    """Moves all micro-batches of a run, each of which must keep its values until the next one's move."""
    cfg, cpu = config(folder, ngrams=tg.Ngrams((2, 3), 301, 12, update_every=(1, 1))), torch.device("cpu")
    model, batches, addresses = tg.GPT(cfg), prefetcher(train_loader(cfg), plans_of(cfg)), defaultdict(set)
    while batch := batches.next():
        for part in batch.micro_batches:
            packed = part._replace(segments={})
            moved = tg.move(packed, cpu, model.input_buffer)
            assert all(map(same_bits, tensors_of(moved), tensors_of(packed)))
            assert moved.inputs.data_ptr() != packed.inputs.data_ptr()
            addresses[len(part.inputs), len(part.loss_weights)].add(
                tuple(t.data_ptr() for t in tensors_of(moved))
            )
    batches.loader.close()
    assert len(addresses) >= 3 and all(len(found) == 1 for found in addresses.values())


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
    threads_before, loader = set(threading.enumerate()), train_loader(config(folder))
    building, may_end, build = threading.Event(), threading.Event(), loader.micro_batches

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
    for thread in {closing, *threading.enumerate()} - threads_before:
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


def naive_sums(out, grad, segments, signs):
    """Sums row by row, position by position, in at least fp32."""
    out, acc_dtype = out.clone(), torch.promote_types(out.dtype, torch.float32)
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
    rng, g = np.random.default_rng(5), torch.Generator().manual_seed(6)
    out = torch.full(shape, torch.nan, dtype=dtype)
    signs = (torch.randint(0, 2, (11, math.prod(shape[1:])), generator=g) * 2 - 1).to(dtype)
    for T in (60, 90, 90, 1, 60):
        # Most positions are on few rows, as in text; in the last round all are on one.
        ids = tg.int32(shape[0] * rng.random(T) ** (8 if T != 60 else 99))
        segments = tg.make_segments(ids, tg.int32(rng.integers(0, 11, (1, T))) if signed else None)
        grad, touched = cancelling_numbers((T, *shape[1:]), dtype, g), segments.ids.long()
        out[touched] = out[touched].nan_to_num(7)
        before, grad_before = out.clone(), grad.clone()
        tg.segment_sum_rows(out, grad, segments, signs)
        assert same_bits(out, naive_sums(before, grad, segments, signs)) and torch.equal(grad, grad_before)
