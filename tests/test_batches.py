"""Tests prefetched batches: their routes and sums of rows against naive programs, copies, errors."""

# ruff: noqa: F811 (fixtures are imported)

import math
import threading
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import ALONE, generator, same_bits, tensors_of, train_loader, write_shard
from launch import WAIT, wrap
from test_distributed import batches_of, cfg, ngram_config  # noqa: F401 (a fixture)

# ---------------------------------------------------------------------------------------------------- batches


def check_routes(routes, touched, rank, rows):
    """Checks a rank's RowRoutes of a table of `rows`, if the ranks have touched these rows."""
    world_size = len(touched)
    block = rows // world_size
    own = sorted(touched[rank])
    owners = [row // block for row in own]
    assert routes.row_ids.tolist() == own
    assert routes.input_splits == [owners.count(owner) for owner in range(world_size)]
    arriving = []
    counts = []
    for rows_of_other in touched:
        local_rows = [row % block for row in sorted(rows_of_other) if row // block == rank]
        arriving += local_rows
        counts.append(len(local_rows))
    assert routes.local_row_ids.tolist() == arriving
    assert routes.output_splits == counts
    assert routes.row_ids.dtype == routes.local_row_ids.dtype == torch.int32


def check_micro_batch(actual, read, plan, world_size):
    """Compares a micro-batch with what a loader has read, to which a Prefetcher adds segments and weights."""
    segments = {name: make(read) for name, make in tg.SEGMENT_MAKERS.items()}
    shares = torch.tensor(plan.loss_weights, dtype=torch.float64) * world_size / 8
    want = tensors_of(read._replace(segments=segments, loss_weights=shares))
    assert same_bits(tensors_of(actual), want)
    assert actual.max_seqlen == read.max_seqlen


def check_batches(rank, world_size, cfg):
    """Compares with loaders alone, through all stages, after all batches have been built."""
    alone = [train_loader(cfg, other, world_size) for other in range(world_size)]
    batches = batches_of(cfg, rank, world_size)
    built = [batches.next() for _ in range(cfg.steps)]
    assert batches.peek() is None
    tables = [row for row in tg.used_specs(cfg) if row.kind == "embedding"]
    shapes = tg.param_shapes(cfg, world_size)
    touched = defaultdict(set)  # by table and rank: the rows of micro-batches since the table's last update
    for step, batch in enumerate(built):
        plan = tg.plan_step(cfg, step)
        read = [loader.micro_batches(plan) for loader in alone]
        assert batch.plan == plan
        assert batch.position == alone[rank].position()
        for actual, expected in zip(batch.micro_batches, read[rank], strict=True):
            check_micro_batch(actual, expected, plan, world_size)
        for row in tables:
            name = row.name
            for other, micro_batches in enumerate(read):
                for micro_batch in micro_batches:
                    touched[name, other].update(getattr(micro_batch, row.rows_by).flatten().tolist())
            assert (name in batch.routes) == plan.is_update_step(row.update_every)
            if name in batch.routes:
                by_rank = [touched.pop((name, other)) for other in range(world_size)]
                check_routes(batch.routes[name], by_rank, rank, shapes[name][0])
    assert batch.position[0] == 1  # the second shard
    for loader in alone + [batches.loader]:
        loader.close()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_batches_are_the_loaders(workers, cfg, world_size):
    """Checks that the position, too, is the loader's after this batch, not after a prefetched one."""
    workers(world_size, check_batches, cfg)


def test_batches_are_built_ahead(tmp_path):
    """Checks how many are, and that peek() takes none."""
    cfg = ngram_config(tmp_path)
    batches = batches_of(cfg, 0, 1)
    for step in range(cfg.steps):
        assert len(batches.queue) == max(cfg.ngrams.update_every)
        ahead = batches.peek()
        assert ahead is batches.peek() is batches.next() and ahead.plan.step == step
    assert batches.peek() is None
    batches.loader.close()


# ----------------------------------------------------------------------------------------------------- copies


def test_one_asynchronous_copy_takes_packed_tensors_to_a_device(tmp_path, monkeypatch):
    """Checks also that in the buffer each begins at a multiple of 16 bytes."""
    batches = batches_of(ngram_config(tmp_path), 0, 1)
    batch = batches.next()
    batches.loader.close()
    copies = []

    def recording_copy(copy_, self, source, non_blocking=False):
        copies.append(non_blocking)
        return copy_(self, source, non_blocking)

    wrap("torch.Tensor.copy_", recording_copy, monkeypatch.setattr)
    micro_batch = batch.micro_batches[-1]
    for nest in micro_batch._replace(segments={}), micro_batch.segments, batch.routes["ngrams"]:
        tensors = tensors_of(nest)
        moved = tensors_of(tg.move(nest, torch.device("cpu")))
        assert copies == [True]
        copies.clear()
        assert same_bits(moved, tensors)
        storage = moved[0].untyped_storage().data_ptr()
        assert storage != tensors[0].untyped_storage().data_ptr()
        for before, after in zip(tensors, moved):
            assert before.storage_offset() * before.itemsize % 16 == 0
            assert after.untyped_storage().data_ptr() == storage


# ----------------------------------------------------------------------------------------------------- errors


def test_an_error_in_the_thread(cfg, tmp_path):
    """Checks that next() raises the thread's error for its own batch, not for the good one before."""
    for i, other in enumerate((1, cfg.vocab_size)):
        write_shard(tmp_path / f"x_train_{i:06d}.bin", ([cfg.bos_id] + 19 * [other]) * 8, 61, cfg.bos_id)
    batches = batches_of(replace(cfg, data=str(tmp_path)), 0, 1)
    wait(batches.queue)
    assert len(batches.next().micro_batches) == 8
    for call in batches.peek, batches.peek, batches.next:
        with pytest.raises(tg.UserError, match="outside the vocabulary"):
            call()
    batches.loader.close()


def test_close(cfg):
    """Checks that close() waits for a build under way, and leaves no thread behind."""
    threads_before = threading.enumerate()
    loader = train_loader(cfg)
    may_end = threading.Event()

    def slow_build(plan):
        assert may_end.wait(WAIT)
        raise tg.UserError("on purpose")

    loader.micro_batches = slow_build
    tg.Prefetcher(loader, [tg.plan_step(cfg, 0)], ALONE)
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_end.set()
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


def naive_sums(out, grad, ids, signs):
    """Sums position by position, in at least fp32. grad, ids and signs are by position."""
    out = out.clone()
    acc_dtype = torch.promote_types(out.dtype, torch.float32)
    for row in ids.unique().tolist():
        total = torch.zeros_like(out[row], dtype=acc_dtype)
        for t in (ids == row).nonzero().flatten().tolist():
            total += grad[t].to(acc_dtype) * signs[t]
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
    g = generator(6)
    out = torch.full(shape, torch.nan, dtype=dtype)
    signs = (torch.randint(0, 2, (11, math.prod(shape[1:])), generator=g) * 2 - 1).to(dtype)
    # Most positions are on few rows, as in text; with the power of 99 nearly all are on one.
    for T, power in (60, 99), (90, 8), (1, 8), (60, 99):
        ids = tg.int32(shape[0] * rng.random(T) ** power)
        sign_ids = torch.randint(0, 11, (1, T), generator=g, dtype=torch.int32)
        grad = cancelling_numbers((T, *shape[1:]), dtype, g)
        if signed:
            segments = tg.make_segments(ids, sign_ids)
            by_position = signs[sign_ids[0]].view(grad.shape)
        else:
            segments = tg.make_segments(ids)
            by_position = torch.ones_like(grad)
        touched = segments.ids.long()
        out[touched] = out[touched].nan_to_num(7)
        want = naive_sums(out, grad, ids, by_position)
        tg.segment_sum_rows(out, grad, segments, signs)
        assert same_bits(out, want)
