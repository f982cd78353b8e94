"""Trains tables of n-grams: the bits of a whole table on every rank; memory; saving."""

import tracemalloc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import ALONE, prefetch_exchange, same_bits, training_of, val_loader
from launch import wrap
from saved_model import load_model
from test_distributed import batches_of, build, join, ngram_config, same_on_all_ranks, start_values, train


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """Returns a config of six steps. Those every=2,4 update after 1 and 3; the last gradients are lost."""
    return tg.override(ngram_config(tmp_path_factory.mktemp("shards")), "stages.3.steps=1")


# ------------------------------------------------------------ the reference: all rows and state on every rank


class WholeTable(tg.NgramTable):
    """Reads and updates a whole table, and sums whole gradients over ranks: no row is sent or planned.

    A micro-batch's gradient is rounded once, to the table's dtype. What the model does with the cache and
    with main_grad is of no use here.
    """

    def __init__(self, cfg, comm, backend):
        super().__init__(cfg, ALONE, backend)
        self.world_size = comm.world_size
        self.looked_up = []  # since the last update

    def do_nothing(self, *_):
        pass

    start_fetch = add_looked_up_grads = clear = do_nothing

    def fetch(self, rows):
        return self.block[: len(rows)]

    def local_grad(self):
        """Returns the gradient of this rank's micro-batches since the last update, for all rows."""
        grad = torch.zeros_like(self.block)
        for ids, signs, leaf in self.looked_up:
            sums = torch.zeros_like(tg.upcast(grad))
            for row, sign in zip(ids, signs):
                sums.index_add_(0, row, sign.to(sums.dtype) * leaf.grad.to(sums.dtype))
            grad = (grad + sums).to(grad.dtype)
        return grad

    def scatter(self):
        touched = torch.zeros(len(self.block), dtype=torch.bool)
        for ids, *_ in self.looked_up:
            touched[ids.flatten()] = True
        parts = [None] * self.world_size
        dist.all_gather_object(parts, (self.local_grad(), touched))
        self.looked_up = []
        self.touched = torch.zeros_like(touched)
        total = torch.zeros_like(self.block, dtype=self.state["second_moment"].dtype)
        for grad, touched in parts:
            total += grad
            self.touched |= touched
        return tg.Pending(total / self.world_size)

    def update(self, grad, plan):
        rows = self.touched.nonzero()[:, 0].int()
        tg.row_adam(self.block, rows, grad[rows], self.state, self.beta2_powers, self.spec, plan)


look_up = tg.GPT.look_up


def whole_ids(model, batch):
    """Hashes the tokens again, for in training a batch has places among what is fetched; looks up signs."""
    cfg = model.cfg
    rows, sign_ids = tg.hash_ngrams(batch.inputs.numpy(), cfg.ngrams, cfg.sign_rows, cfg.bos_id)
    return rows.long(), model.signs[sign_ids]


def ngram_sums_whole(model, batch, training):
    """Sums rows of the whole table in plain torch."""
    sums = 0
    for row, sign in zip(*whole_ids(model, batch)):
        sums = sums + tg.upcast(model.ngrams.block[row]) * sign
    return sums.to(tg.dtype_of(model.cfg.dtype))


def look_up_whole(model, batch, training):
    """Keeps the leaf in which autograd leaves the sums' gradient."""
    looked_up = look_up(model, batch, training)
    if training:
        model.ngrams.looked_up.append((*whole_ids(model, batch), looked_up["ngrams"]))
    return looked_up


def train_whole(rank, world_size, cfg):
    """Trains a run with the reference in place of the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "NgramTable", WholeTable)
        patch.setattr(tg.GPT, "ngram_sums", ngram_sums_whole)
        patch.setattr(tg.GPT, "look_up", look_up_whole)
        return train(rank, world_size, cfg)


CASES = [  # ranks, micro-batches, dtypes of model and table, settings
    (1, 2, "float32", "float32", ["ngrams.update_every=2,4", "ngrams.beta2=0.9", "main_grad=false"]),
    (2, 4, "float64", "bfloat16", ["ngrams.update_every=1,1", "ngrams.beta2=0.5"]),
    (4, 4, "bfloat16", "bfloat16", ["ngrams.update_every=2,2", "main_grad=false"]),
    (8, 8, "bfloat16", "float32", ["ngrams.update_every=2,4"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size, microbatches, dtype, table_dtype, settings", CASES)
def test_the_table_is_the_reference(workers, cfg, world_size, microbatches, dtype, table_dtype, settings):
    """Compares losses, all parameters after each step, the table and its state bit by bit."""
    dtypes = f"dtype={dtype} bank_dtype={dtype} ngrams.dtype={table_dtype} microbatches={microbatches}"
    cfg = tg.with_settings(cfg, [*dtypes.split(), *settings])
    ranks = workers(world_size, train, cfg)
    whole = workers(world_size, train_whole, cfg)
    assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in whole]
    got, want = same_on_all_ranks(ranks), same_on_all_ranks(whole)
    for key in "start", "steps", "val", "final":
        assert same_bits(got[key], want[key]), key
    for ours, t in zip(join([rank["table"] for rank in ranks]), want["table"]):
        assert torch.equal(ours[: len(t)], t) and not ours[len(t) :].any()
    changed = (want["table"][0] != start_values(cfg)[0]).any(-1)
    assert 300 < changed.sum() < len(changed)


def test_rows_are_updated_before_all_parameters():
    """So the rows that the next step reads are on their way while parameters are updated."""
    assert tg.NgramTable.update_order < min(row.update_order for row in tg.PARAMS)


# ----------------------------------------------------------------------------------------------------- memory


class Storages(TorchDispatchMode):
    """Finds torch storages of `limit` bytes or more that operations make or return, but those in `known`."""

    def __init__(self, limit, known):
        super().__init__()
        self.limit, self.known, self.large = limit, known, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() >= self.limit:
                if t.untyped_storage().data_ptr() not in self.known:
                    self.large.append(f"{func}: {tuple(t.shape)} {t.dtype}")
        return out


def live(rank, world_size, cfg, folder, limit):
    """Runs what a table goes through; returns large storages, and the peak of Python's and NumPy's memory."""
    comm, model, optimizer = build(rank, world_size, cfg)
    mode = Storages(limit, {t.untyped_storage().data_ptr() for t in optimizer.ngrams.state_dict().values()})
    val, windows = val_loader(cfg), tg.window_tokens(cfg, cfg.val_windows)

    def watched(build, *args):  # a mode belongs to one thread
        with mode:
            return build(*args)

    with pytest.MonkeyPatch.context() as patch, mode:
        wrap("Prefetcher._build", watched, patch.setattr)
        patch.setattr(tg, "FIRST_READ", 1 << 12)  # a constant, but more than `limit`
        patch.setattr(tg, "warmup_ranges", lambda cfg: [range(2)])
        tg.warm_up(training_of(model, optimizer, prefetch_exchange(rank, world_size)))
        batches = batches_of(cfg, rank, world_size)
        for _ in range(3):
            tg.train_step(model, optimizer, batches.next(), batches.peek)
        batches.loader.close()
        model.use_rotary(3)  # the last, as a loaded model's
        tg.validate(model, val, comm, windows)
        tg.save_checkpoint(folder / "x.checkpoint", {}, {"step": 3}, model, optimizer)
        tg.save_model(str(folder / "model.pt"), model, "run", comm)
        comm.from_rank_0(None)  # all ranks have written
        tg.validate(load_model(str(folder / "model.pt")), val, ALONE, windows)
    return mode.large, tracemalloc.get_traced_memory()[1]


def live_twice(rank, world_size, small, large, folder, limit):
    """Runs a small table first, so that what is imported or made once is there."""
    live(rank, world_size, small, folder / "small", limit)
    tracemalloc.start()
    found = live(rank, world_size, large, folder / "large", limit)
    tracemalloc.stop()
    return found


@pytest.mark.slow
def test_nothing_has_the_tables_size(workers, cfg, tmp_path):
    """Checks that after its rows and their state nothing is made of a byte for each row or more."""
    rows = 1 << 22
    small = replace(tg.override(cfg, "ngrams.orders=2"), microbatches=2)
    large = replace(small, ngrams=replace(small.ngrams, rows_per_order=rows, width=4))
    for folder in "small", "large":
        (tmp_path / folder).mkdir()
    for found, peak in workers(2, live_twice, small, large, tmp_path, rows // 2):
        assert not found and peak < rows // 2
