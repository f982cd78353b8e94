"""Trains tables of n-grams: the bits of a whole table on every rank; warm-up, memory."""

import contextlib
import hashlib
import itertools
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import prefetch_exchange, same_bits
from test_ngrams import ngram_config


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """Returns test_ngrams' config for 1, 2, 4 and 8 ranks."""
    cfg = ngram_config(tmp_path_factory.mktemp("shards"), rows=301)
    stages = tuple(
        replace(stage, batch_tokens=tokens) for stage, tokens in zip(cfg.stages, (96, 128, 192, 192))
    )
    return replace(cfg, padded_vocab=64, bigram_vocab_size=320, microbatches=8, stages=stages)


# ------------------------------------------------------------ the reference: all rows and state on every rank


class WholeTable:
    """Reads and updates a whole table, and sums whole gradients over ranks: no row is sent or planned.

    A micro-batch's gradient is rounded once, to the table's dtype.
    """

    def __init__(self, cfg, exchange, device):
        n = self.cfg = cfg.ngrams
        self.exchange, self.dtype, self.acc_dtype = exchange, tg.dtype_of(n.dtype), tg.acc_dtype(cfg)
        self.decays = (n.beta2 ** torch.arange(cfg.steps + 1).double()).to(self.acc_dtype)
        self.table = torch.zeros(len(n.orders) * n.rows, n.width, dtype=self.dtype)
        self.moments = torch.zeros(len(self.table), dtype=self.acc_dtype)
        self.last, self.clock = torch.zeros(len(self.table), dtype=torch.int32), [0, 0]
        self.main_grad = torch.zeros(tg.ngram_bounds(cfg, exchange.world_size)[0], n.width)  # never read
        self.looked_up = []  # since the last update

    def begin(self, batch):
        pass

    def arrived(self):
        pass

    def fetch(self, row_ids):
        pass

    def finish(self):
        pass

    def local_grad(self):
        """Returns the gradient of this rank's micro-batches since the last update, for all rows."""
        grad, dtype = torch.zeros_like(self.table), torch.promote_types(self.dtype, torch.float32)
        for ids, signs, leaf in self.looked_up:
            sums = torch.zeros_like(self.table, dtype=dtype)
            for row, sign in zip(ids, signs):
                sums.index_add_(0, row, sign.to(dtype) * leaf.grad.to(dtype))
            grad = (grad.to(dtype) + sums).to(self.dtype)
        return grad

    def send_grads(self):
        grad, n = self.local_grad(), self.exchange.world_size
        self.touched = torch.zeros(len(grad), dtype=torch.int32)
        for ids, *_ in self.looked_up:
            self.touched[ids.flatten()] = 1
        dist.all_reduce(self.touched)
        self.looked_up, parts = [], [torch.empty_like(grad) for _ in range(n)]
        dist.all_gather(parts, grad)
        total, every_row = torch.zeros_like(grad, dtype=self.acc_dtype), torch.arange(len(grad))
        for part in parts:
            total.index_add_(0, every_row, part.to(self.acc_dtype))
        return tg.Pending(total / n)

    def update(self, grads, plan):
        n, rows, slowdown = self.cfg, self.touched.nonzero()[:, 0].int(), plan.slowdown(self.cfg.every)
        self.clock = [self.clock[0] + 1, self.clock[1] + slowdown]
        beta2, lr = n.beta2**slowdown, n.lr * plan.lr_mul
        numbers = 1 - beta2, lr * (1 - beta2 ** self.clock[0]) ** 0.5, lr * lr * n.wd * slowdown
        numbers = [torch.tensor(number, dtype=self.acc_dtype) for number in numbers]
        state = self.table, self.moments, self.last
        with torch.no_grad():
            tg.update_rows(*state, rows, grads[rows], self.decays, self.clock[1], *numbers)


hidden_states = tg.GPT.hidden_states


def hidden_states_whole(model, batch, *more):
    """Hashes the tokens again: in training, a batch has places among what is fetched."""
    cfg = model.cfg
    rows, sign_ids = tg.hash_ngrams(batch.inputs.numpy(), cfg.ngrams, cfg.sign_rows)
    model.whole_ids = torch.from_numpy(rows).long()
    model.whole_signs = torch.ones((), dtype=model.signs.dtype)
    if sign_ids is not None:
        model.whole_signs = model.signs[torch.from_numpy(sign_ids)]
    return hidden_states(model, batch, *more)


def look_up_whole(model, batch, leaves):
    """Replaces GPT.lookup_sums: sums rows of the whole table in plain torch, and keeps what it returns.

    Signs have the model's dtype, of which sums are then at least.
    """
    cfg, ids, table = model.cfg, model.whole_ids, model.ngrams.table
    dtype = torch.promote_types(table.dtype, torch.float32)
    signs = model.whole_signs.expand(*ids.shape, table.size(1))
    found = F.embedding(ids[0], table).to(dtype) * signs[0]
    for row, sign in zip(ids[1:], signs[1:]):
        found = found + F.embedding(row, table).to(dtype) * sign
    found = found.to(tg.dtype_of(cfg.dtype))
    if leaves is not None:
        leaves["ngrams"] = found.requires_grad_()
        model.ngrams.looked_up.append((ids, signs, found))
    return F.pad(found, (0, cfg.dim - cfg.ngrams.width))


@contextlib.contextmanager
def placed(cfg, placement):
    """Yields the config with this placement, or, for "whole", while the reference is in place."""
    with pytest.MonkeyPatch.context() as patch:
        if placement == "whole":
            patch.setattr(tg, "NgramTable", WholeTable)
            patch.setattr(tg.GPT, "lookup_sums", look_up_whole)
            patch.setattr(tg.GPT, "hidden_states", hidden_states_whole)
            placement = "sharded"
        yield tg.override(cfg, f"ngrams.placement={placement}")


# ------------------------------------------------------------------------------------------------- whole runs


def start_values(cfg):
    """Returns rows and state to start from: away from zeros, which hide mistakes."""
    g, n = torch.Generator().manual_seed(6), cfg.ngrams
    rows = torch.randn(len(n.orders) * n.rows, n.width, generator=g).to(tg.dtype_of(n.dtype))
    moments = torch.rand(len(rows), generator=g, dtype=tg.acc_dtype(cfg)) * (torch.arange(len(rows)) % 4 > 0)
    return rows, moments * 1e-3, torch.zeros(len(rows), dtype=torch.int32)


def build(rank, world_size, cfg, start=True):
    """Returns model and optimizer of a rank."""
    tg.check_config(cfg, world_size)
    exchange = tg.Exchange(rank, world_size)
    model = tg.GPT(cfg, world_size)
    noise = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for name, shape in sorted(tg.param_shapes(cfg, 1).items()):  # in any order of the table
            getattr(model, name)[: shape[0]] += 0.03 * torch.randn(shape, generator=noise)
        model.embed.copy_(model.lm_head.T)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), exchange)
    model.ngrams = optimizer.ngrams
    if start:
        fill(optimizer.ngrams, start_values(cfg))
    return model, optimizer


def tensors_of(table):
    """Returns a table's rows and state on this rank, live."""
    if isinstance(table, WholeTable):
        return table.table.detach(), table.moments, table.last
    return tuple(table.stored[:3])


def fill(table, values):
    """Gives a rank its rows of the `values` of a whole table."""
    exchange = table.exchange
    first, step = (0, 1) if isinstance(table, WholeTable) else (exchange.rank, exchange.world_size)
    for t, value in zip(tensors_of(table), values):
        own = value[first::step]
        t[: len(own)] = own


def join(ranks, rows):
    """Returns the whole table of the ranks' parts, of which row r is on rank r modulo their number."""
    wholes = []
    for parts in zip(*ranks):
        whole = parts[0].new_empty(rows, *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            own = whole[rank :: len(parts)]
            own.copy_(part[: len(own)])
            assert not part[len(own) :].any()
        wholes.append(whole)
    return tuple(wholes)


def digest(model):
    h = hashlib.sha256()
    for name, _ in sorted(model.named_parameters()):
        h.update(model.weight(name).detach().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def train(rank, world_size, cfg, placement, warm=False):
    """Trains a whole run; returns this rank's losses, digests of the parameters, and part of the table."""
    with placed(cfg, placement) as cfg:
        model, optimizer = build(rank, world_size, cfg, start=False)
        prefetch, data = prefetch_exchange(rank, world_size), tg.open_dataset(cfg)
        val = tg.ValLoader(cfg, data.val)
        if warm:
            tg.warm_up(data, model, optimizer, val, prefetch)
        fill(optimizer.ngrams, start_values(cfg))
        loader, losses, digests = tg.TrainLoader(cfg, data.train, rank, world_size), [], []
        batches = tg.Prefetcher(loader, [tg.plan_step(cfg, step) for step in range(cfg.steps)], prefetch)
        for _ in range(cfg.steps):
            losses.append(tg.train_step(model, optimizer, batches.next(), batches.peek).item())
            digests.append(digest(model))
        loader.close()
        windows = tg.window_tokens(cfg, cfg.val_windows)
        losses.append(tg.validate(model, val, optimizer.exchange, windows))
        optimizer.ngrams.finish()
        return losses, digests, tuple(t.clone() for t in tensors_of(optimizer.ngrams))


def train_all(rank, world_size, variants):
    """Trains runs of (config, placement and whether to warm up), one after the other."""
    return [train(rank, world_size, *variant) for variant in variants]


def results_of(results, cfg, placement, warm=False):
    """Joins the ranks' results of one run."""
    losses, digests, tables = zip(*results)
    assert all(each == digests[0] for each in digests)
    assert all(each[-1] == losses[0][-1] for each in losses)  # of validation
    if placement == "whole":
        assert all(same_bits(dict(enumerate(t)), dict(enumerate(tables[0]))) for t in tables)
        return losses, digests[0], tables[0]
    return losses, digests[0], join(tables, len(cfg.ngrams.orders) * cfg.ngrams.rows)


def run_variants(workers, world_size, variants):
    """Returns the joined results of runs of (config, placement)."""
    ranks = workers(world_size, train_all, variants)
    return [results_of([rank[i] for rank in ranks], *variant) for i, variant in enumerate(variants)]


def assert_same(got, want, what):
    """Compares losses, parameters' digests after each step, and the table's bits at the end."""
    assert got[0] == want[0] and got[1] == want[1], what
    assert same_bits(dict(enumerate(got[2])), dict(enumerate(want[2]))), what


def with_dtypes(cfg, model, table):
    cfg = replace(cfg, dtype=model, bank_dtype=model)
    return tg.override(cfg, f"ngrams.dtype={table}")


def shuffled(cfg, seed):
    """Returns the config with a random scatter order and a random work order."""
    rng, n = random.Random(seed), len(cfg.params)
    rows = zip(rng.sample(cfg.params, n), rng.sample(range(n), n))
    return replace(cfg, params=tuple(replace(row, work=work) for row, work in rows))


# Ranks, micro-batches a rank, main_grad, and from update to update steps and the decay of second moments.
CASES = [(1, 1, True), (1, 2, False), (2, 1, False), (2, 2, True), (4, 1, False), (8, 1, True), (8, 2, False)]
CASES = [(*case, *more) for case, more in zip(CASES, itertools.cycle([(4, 0.9), (1, 0.5), (2, 0.95)]))]


@pytest.mark.slow
@pytest.mark.parametrize("world_size, per_rank, main_grad, every, beta2", CASES)
def test_placements_are_the_reference(workers, cfg, world_size, per_rank, main_grad, every, beta2):
    cfg = tg.override(tg.override(cfg, f"ngrams.beta2={beta2}"), f"ngrams.every={every}")
    cfg = replace(cfg, microbatches=world_size * per_rank, main_grad=main_grad)
    want, got = run_variants(workers, world_size, [(cfg, "whole"), (cfg, "sharded")])
    assert len(set(want[1])) == cfg.steps
    changed = (want[2][0] != start_values(cfg)[0]).any(-1)
    assert 300 < changed.sum() < len(changed) and len(set(want[2][2].tolist())) > 2
    assert_same(got, want, "sharded")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, table",
    [
        ("float64", "float64"),
        ("float64", "float32"),
        ("float64", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_placements_are_the_reference_in_every_dtype(workers, cfg, model, table):
    each = replace(with_dtypes(cfg, model, table), microbatches=4)
    variants = [(each, placement) for placement in ("whole", "sharded")]
    want, *results = run_variants(workers, 2, variants)
    assert want[2][0].dtype == tg.dtype_of(table)
    for variant, got in zip(variants[1:], results):
        assert_same(got, want, variant)


@pytest.mark.slow
def test_orders_do_not_matter_nor_does_a_second_run(workers, cfg):
    """Checks random orders of scatter and of work, and the same run twice."""
    variants = [(cfg, "sharded"), (cfg, "sharded")]
    for seed in range(2):
        variants.append((shuffled(cfg, seed), "sharded"))
    want, *results = run_variants(workers, 4, variants)
    for variant, got in zip(variants[1:], results):
        assert_same(got, want, variant)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_world_size_does_not_matter(workers, cfg, dtype):
    """Compares up to rounding, within the bound of test_distributed.py."""
    cfg = tg.override(with_dtypes(cfg, dtype, dtype), "params.*.reduction=fp32")
    bound = 1000 * torch.finfo(tg.dtype_of(dtype)).eps
    (single,) = run_variants(workers, 1, [(cfg, "sharded")])
    for world_size in (4, 8) if dtype == "float64" else (2,):
        (got,) = run_variants(workers, world_size, [(cfg, "sharded")])
        assert np.mean(got[0], axis=0) == pytest.approx(single[0][0], rel=bound)
        for ours, want in zip(got[2], single[2]):
            assert ((ours - want).double().norm() / want.double().norm()).item() < bound


# ---------------------------------------------------------------------------------------------------- warm-up


def warm_up_and_look(rank, world_size, cfg):
    """Returns whether warm_up leaves everything as it was; the table's part before; what is fetched after."""
    model, optimizer = build(rank, world_size, cfg, start=False)
    table, prefetch, data = optimizer.ngrams, prefetch_exchange(rank, world_size), tg.open_dataset(cfg)
    val = tg.ValLoader(cfg, data.val)
    before = [t.clone() for t in tensors_of(table)], tg.training_state(model, optimizer)
    changes, update = [], table.update

    def record(grads, plan):
        changes.append(len(grads))
        update(grads, plan)

    table.update = record
    tg.warm_up(data, model, optimizer, val, prefetch)
    after = [t.clone() for t in tensors_of(table)], tg.training_state(model, optimizer)
    same = [same_bits(dict(enumerate(a)), dict(enumerate(b))) for a, b in zip(before, after)]
    left = table.batch, table.pending
    return same, left, changes, before[0], table.fetch(torch.arange(table.rows, dtype=torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_warm_up_leaves_no_trace(workers, cfg, world_size):
    """Checks a table of zeros, with rows that several steps change."""
    results = workers(world_size, warm_up_and_look, cfg)
    whole, *state = join([result[3] for result in results], len(cfg.ngrams.orders) * cfg.ngrams.rows)
    assert not whole.any() and not any(t.any() for t in state)
    for same, left, changes, _, fetched in results:
        assert same == [True, True] and left == (None, None)
        assert len(changes) == sum(map(len, tg.warmup_steps(cfg))) and sum(changes) > len(whole) / world_size
        assert same_bits(fetched, whole)


@pytest.mark.slow
def test_training_after_warm_up_is_training(workers, cfg):
    """Compares the bits of runs with and without warm-up; buffers are not new then."""
    cfg = tg.override(cfg, "ngrams.every=4")
    variants = [(cfg, "sharded", False), (cfg, "sharded", True)]
    cold, warm = run_variants(workers, 2, variants)
    assert_same(warm, cold, "warm-up")


# ---------------------------------------------------------------------------------------- going back mid-run


@pytest.mark.slow
def test_a_checkpoint_loads_while_rows_are_under_way(cfg, tmp_path):
    """Goes back from step 5 to step 2, and trains on as before: no row of the steps undone comes back."""
    (model, optimizer), exchange = build(0, 1, cfg), tg.Exchange(0, 1)
    paths, position = tg.find_shards(cfg.data, "train"), (0, 0)
    runs = []
    for first, last in (0, 2), (2, 5), (2, cfg.steps):
        if runs:
            tg.Checkpoint.find(str(tmp_path)).load(model, optimizer)
            optimizer.gather_all()
        loader, losses = tg.TrainLoader(cfg, paths, 0, 1, position), []
        plans = [tg.plan_step(cfg, step) for step in range(first, cfg.steps)]
        batches = tg.Prefetcher(loader, plans, exchange)
        for _ in range(first, last):
            batch = batches.next()
            losses.append(tg.train_step(model, optimizer, batch, batches.peek).item())
        loader.close()
        runs.append(losses)
        if not first:
            position = batch.position
            about = dict(task={}, script="", torch="")
            progress = dict(step=last, train_ms=0.0, position=position)
            tg.save_checkpoint(tmp_path / "x.checkpoint", about, progress, model, optimizer)
    assert runs[2][:3] == runs[1] and optimizer.ngrams.pending is None


# ----------------------------------------------------------------------------------------------------- memory


def mapped_file(address):
    """Returns the name of the file that is mapped to this address, if any."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return Path(line).name
    return ""


class Storages(TorchDispatchMode):
    """Finds the torch storages of `limit` bytes or more that an operation makes or returns.

    mapped: the names of files of which they are mappings.
    """

    def __init__(self, limit):
        super().__init__()
        self.limit, self.large, self.mapped = limit, {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() >= self.limit:
                address = t.untyped_storage().data_ptr()
                if (name := mapped_file(address)).endswith(".pt"):
                    self.mapped.add(name)
                else:
                    self.large.setdefault(address, f"{func}: {tuple(t.shape)} {t.dtype}")
        return out


class Memory:
    """Watches phases of a run, on all threads: torch's storages, the peak of Python's and NumPy's memory."""

    def __init__(self, limit):
        self.limit, self.known, self.peaks, self.found, self.mapped = limit, set(), {}, {}, {}

    @contextlib.contextmanager
    def phase(self, name):
        mode, build = Storages(self.limit), tg.Prefetcher._build

        def watched(*args):  # a mode belongs to one thread
            with mode:
                return build(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg.Prefetcher, "_build", watched)
            tracemalloc.reset_peak()  # does nothing where it has not started
            start = tracemalloc.get_traced_memory()[0]
            with mode:
                yield
            self.peaks[name] = tracemalloc.get_traced_memory()[1] - start
        self.found[name] = [what for place, what in mode.large.items() if place not in self.known]
        self.mapped[name] = mode.mapped


def live(rank, world_size, cfg, folder, limit):
    """Runs all that a table goes through; returns what has `limit` bytes or more, and peaks, by phase."""
    memory, prefetch = Memory(limit), prefetch_exchange(rank, world_size)
    data = tg.open_dataset(cfg)
    with memory.phase("build"):
        model, optimizer = build(rank, world_size, cfg, start=False)
    own = {t.untyped_storage().data_ptr() for t in tensors_of(optimizer.ngrams)}
    built, memory.known = len(memory.found["build"]), own
    exchange, windows = optimizer.exchange, tg.window_tokens(cfg, cfg.val_windows)
    with memory.phase("warm-up"):
        val = tg.ValLoader(cfg, data.val)
        tg.warm_up(data, model, optimizer, val, prefetch)
    with memory.phase("training"):
        loader = tg.TrainLoader(cfg, data.train, rank, world_size)
        batches = tg.Prefetcher(loader, [tg.plan_step(cfg, step) for step in range(cfg.steps)], prefetch)
        for _ in range(cfg.steps):
            tg.train_step(model, optimizer, batches.next(), batches.peek)
        loader.close()
    with memory.phase("validation"):
        loss = tg.validate(model, val, exchange, windows)
    with memory.phase("checkpoint"):
        about = dict(task={}, script="", torch="")
        progress = dict(step=cfg.steps, train_ms=0.0, position=[0, 0])
        tg.save_checkpoint(folder / "x.checkpoint", about, progress, model, optimizer)
        exchange.all_gather_object(None)  # rank 0 has renamed it
    with memory.phase("resume"):
        tg.Checkpoint.find(str(folder)).load(model, optimizer)
        optimizer.gather_all()
    with memory.phase("save"):
        tg.save_model(str(folder / "model.pt"), model, rank)
        exchange.all_gather_object(None)  # rank 0 has written it
    with memory.phase("load"):
        loaded = tg.load_model(str(folder / "model.pt"))
        val = tg.ValLoader(cfg, data.val)
        loss_loaded = tg.validate(loaded, val, tg.Exchange(0, 1), windows)
    assert folder.name == "small" or f"rank{rank}.pt" in memory.mapped["resume"]
    return built, memory.found, memory.peaks, (loss, loss_loaded)


def live_twice(rank, world_size, cfg, large, folder, limit):
    """Runs a small table first, so that what is imported or made once is there; watches the large one."""
    with pytest.MonkeyPatch.context() as patch:
        # Constants, but more than `limit`.
        patch.setattr(tg, "FIRST_READ", 1 << 12)
        live(rank, world_size, cfg, folder / "small", limit)
        tracemalloc.start()
        try:
            return live(rank, world_size, large, folder / "large", limit)
        finally:
            tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_has_the_tables_size(workers, cfg, tmp_path, world_size):
    """Checks that after its rows and their state nothing is made of a byte for each row or more.

    NumPy's arrays count together, with all of Python's memory, on all threads.
    """
    N = 1 << 22
    table = dict(orders=(2, 3), width=4)
    cfg = replace(cfg, ngrams=replace(cfg.ngrams, **table), microbatches=2)
    large = tg.override(cfg, f"ngrams.rows={N // 2}")
    for size in "small", "large":
        (tmp_path / size).mkdir()
    limit = N // world_size
    for built, found, peaks, losses in workers(world_size, live_twice, cfg, large, tmp_path, limit):
        assert built == 3, found["build"]
        assert not any(found[name] for name in found if name != "build"), found
        assert max(peaks.values()) < limit, peaks
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ----------------------------------------------------------------------------------------------- saved models


def test_saving_again_leaves_a_loaded_table_alone(cfg, tmp_path):
    """A process may have mapped the file: changed or cut under it, its rows would change, or end it."""
    path, ids = str(tmp_path / "model.pt"), torch.arange(0, len(cfg.ngrams.orders) * cfg.ngrams.rows, 5)
    model, optimizer = build(0, 1, cfg)
    tg.save_model(path, model)
    loaded = tg.load_model(path)
    before = loaded.ngrams.fetch(ids)
    optimizer.ngrams.block.add_(1)
    tg.save_model(path, model)
    assert torch.equal(loaded.ngrams.fetch(ids), before) and before.any()
    assert torch.equal(tg.load_model(path).ngrams.fetch(ids), before + 1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.pt", "model.pt.ngrams"]
