"""Compares short whole runs on 1, 2, 4 and 8 processes: bit by bit where nothing rounds differently."""

import functools
import hashlib
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE
from golden_inputs import (
    CountingCollectives,
    bits_of,
    flatten,
    generator,
    prefetch_exchange,
    random_documents,
    same_bits,
    train_loader,
    training_of,
    val_loader,
    write_shard,
)

SETTINGS = """
vocab_size=61 padded_vocab=64 bos_id=60 ngrams.orders= bigram_vocab_size=320 heads=2 head_dim=8 mlp_dim=32
window_unit=3 microbatches=8 val_slices=3 val_slice_tokens=100 val_every=0 two_momenta_from=2
momentum_warmup=3 momentum_cooldown=2 head_chunk=20 dtype=float64 bank_dtype=float64 pointer_dim=8
pointer_window=17
""".split()
STAGES = (
    tg.Stage(2, 128, 24, tg.Windows(1, 3), 1.00, (1.0, 0.5, 0.25)),
    tg.Stage(2, 256, 40, tg.Windows(3, 7), 1.52, (1.0, 0.5)),
    tg.Stage(1, 384, 40, tg.Windows(5, 11), 1.73),
    tg.Stage(3, 384, 40, tg.Windows(6, 13), 0.15),
)
# A layer of each kind.
LAYERS = (
    tg.Layer("paired", narrow_qk=True, value=True, gate=True, x0=True, ngram=True),
    tg.Layer("plain", "long", key_shift=True, xsa=True, gate=True, x0=True),
    tg.Layer("", ngram=True, mlps=2),
    tg.Layer("plain", narrow_v=True, value=True, xsa=True, gate=True, mudd=True),
)


def make_config(folder):
    """Writes shards, and returns a config with all layers and four stages, eight steps, in fp64, of width 16.

    Untying follows step 5; embed has its own update in step 7.
    """
    rng = np.random.default_rng(1)
    for name, count in {"train_000000": 2500, "train_000001": 2500, "val_000002": 400}.items():
        write_shard(folder / f"x_{name}.bin", random_documents(rng, count, 61, 60, 50), 61, 60)
    (folder / "vocabulary.txt").write_text("".join(f"{token:02x}\n" for token in range(61)))
    return tg.with_settings(replace(BASE, data=str(folder), stages=STAGES), SETTINGS)


def with_few_layers(cfg):
    return replace(cfg, layers=LAYERS, skip_from=0, backout_from=1, skip_to=2)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory):
    """Returns the same with a layer of each kind, prefixes, candidates, and two micro-batches."""
    changes = """
    microbatches=2 padded_vocab=128 stages.0.prefix=0.25 stages.1.prefix=0.25
    stages.0.sampled_columns=96,80 stages.1.sampled_columns=64
    """
    cfg = with_few_layers(make_config(tmp_path_factory.mktemp("shards")))
    return tg.with_settings(cfg, changes.split())


def ngram_config(folder):
    """Returns the same with n-grams. What has the cadence 2, 4 is updated after steps 1, 3 and 7."""
    changes = """
    ngrams.orders=3,2,5,4 ngrams.rows_per_order=301 ngrams.width=12 ngrams.dtype=float64
    ngrams.update_every=2,4 late_updates_from=2 pointer_dim=0
    """
    return tg.with_settings(with_few_layers(make_config(folder)), changes.split())


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
    return replace(ngram_config(tmp_path_factory.mktemp("shards")), averages=AVERAGES)


def with_dtype(cfg, dtype):
    return tg.with_settings(cfg, f"dtype={dtype} bank_dtype={dtype} ngrams.dtype={dtype}".split())


def dense(cfg):
    """Makes the exchange of all tables whole, with the fp32 sum."""
    settings = ["params.*.exchange=reduce_scatter"]
    for spec in cfg.params:
        if spec.kind == "embedding":
            settings.append(f"params.{spec.name}.reduction=fp32")
    return tg.with_settings(cfg, settings)


def shuffled(cfg, seed):
    """Returns the config with a random order of scatter, and of work."""
    rng = random.Random(seed)
    rows = rng.sample(cfg.params, len(cfg.params))
    return replace(cfg, params=tuple(replace(row, update_order=rng.random()) for row in rows))


def build(rank, world_size, cfg, seed=0, backend=tg.TORCH_BACKEND):
    """Returns exchange, model and optimizer of a rank."""
    comm = CountingCollectives(rank, world_size)
    tg.check_config(cfg, world_size)
    model = tg.GPT(cfg, world_size, seed=seed, backend=backend)
    model.longest_prefix.copy_(torch.arange(cfg.padded_vocab) - 9).clamp_min_(-1)
    with torch.no_grad():  # away from zeros, which hide mistakes
        noise = generator(99)
        for name, shape in sorted(tg.param_shapes(cfg, 1).items()):  # in any order of the table
            if name != "embed":
                getattr(model, name)[: shape[0]] += 0.03 * torch.randn(shape, generator=noise)
        model.embed.copy_(model.lm_head.T)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), comm, backend)
    model.ngrams = optimizer.ngrams
    return comm, model, optimizer


def start_values(cfg):
    """Returns rows and state of the table of n-grams, away from zeros; a quarter of the moments are 0."""
    g = generator(6)
    ngrams = cfg.ngrams
    count = ngrams.rows_per_token * ngrams.rows_per_order
    rows = torch.randn(count, ngrams.width, generator=g).to(tg.dtype_of(ngrams.dtype))
    moments = torch.rand(count, generator=g, dtype=tg.acc_dtype(cfg)) * 1e-3
    moments[::4] = 0
    return rows, moments, torch.zeros(count, dtype=torch.int32)


def join(ranks):
    """Returns a table and its state from the ranks' parts; row r is on rank r modulo their number."""
    return [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*ranks)]


def states(model, optimizer):
    """Yields each parameter's name and state, on one rank; of small parameters their parts of a vector's."""
    by_storage = {param.p.data_ptr(): param.state for param in optimizer.params.values()}
    for name, p in model.named_parameters():
        state = by_storage[p.untyped_storage().data_ptr()]
        if name not in optimizer.params:
            begin = p.storage_offset()
            part = {}
            for key, t in state.items():
                if t.dim():  # else it is the count of steps
                    t = t[..., begin : begin + p.numel()].unflatten(-1, p.shape)
                part[key] = t
            state = part
        yield name, state


def batches_of(cfg, rank, world_size, first=0, position=(0, 0)):
    """Returns the batches of a run from step `first` on."""
    loader = train_loader(cfg, rank, world_size, position)
    plans = [tg.plan_step(cfg, step) for step in range(first, cfg.steps)]
    return tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))


def first_batch(cfg, rank=0, world_size=1):
    batches = batches_of(cfg, rank, world_size)
    batch = batches.next()
    batches.loader.close()
    return batch


def run_steps(model, optimizer, first=0, position=(0, 0)):
    """Trains from step `first` to the end; yields every batch and its loss."""
    comm = optimizer.comm
    batches = batches_of(model.cfg, comm.rank, comm.world_size, first, position)
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
        h.update(f"{name} {bits_of(value)}".encode())
    return h.hexdigest()


def look(model, optimizer):
    """Returns the digest, and whether embed is lm_head's transpose."""
    return digest(model, optimizer), torch.equal(model.embed, model.lm_head.T)


def warm_up(model, optimizer, steps, prefetch):
    """Warms up with these steps, and checks that the table of n-grams is as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "warmup_ranges", lambda cfg: steps)
        tg.warm_up(training_of(model, optimizer, prefetch))
    for t in optimizer.ngrams.state_dict().values():
        assert not t.any()


def train(rank, world_size, cfg, warm=(), after_step=look):
    """Trains a whole run, with its averages and validations before and after. Returns what it found, by name.

    warm: steps of a warm-up. steps: what after_step(model, optimizer) returned. reads: the rows that each
    step reads, by MicroBatch's field. sent: this rank's bytes in training.
    """
    comm, model, optimizer = build(rank, world_size, cfg)
    if warm:
        warm_up(model, optimizer, warm, prefetch_exchange(rank, world_size))
    if optimizer.ngrams:
        for t, value in zip(optimizer.ngrams.state_dict().values(), start_values(cfg)):
            if len(t) < len(value):  # a rank has its own rows only
                value = value[rank::world_size]
            t[: len(value)] = value
    val = val_loader(cfg)
    windows = tg.window_tokens(cfg, cfg.val_windows)
    model.use_rotary(len(cfg.stages) - 1)
    found = {"start": tg.validate(model, val, comm, windows), "losses": [], "steps": [], "reads": []}
    comm.bytes_sent.clear()
    batches = batches_of(cfg, rank, world_size)
    for _ in range(cfg.steps):
        batch = batches.next()
        reads = {"inputs": set(), "hashed_rows": set()}
        for part in batch.micro_batches:
            for field, rows in reads.items():
                rows.update(getattr(part, field).flatten().tolist())
        found["reads"].append(reads)
        found["losses"].append(tg.train_step(model, optimizer, batch, batches.peek).item())
        found["steps"].append(after_step(model, optimizer))
    batches.loader.close()
    found["sent"] = dict(comm.bytes_sent | batches.comm.bytes_sent)
    optimizer.apply_averages()
    found["val"] = tg.validate(model, val, comm, windows)
    found["final"] = whole(model, optimizer)
    if optimizer.ngrams:
        state = optimizer.ngrams.state_dict()
        found["table"] = [
            state["block"].clone(),
            state["second_moment"].clone(),
            state["last_update"].clone(),
        ]
    return found


def same_on_all_ranks(results):
    """Checks that all ranks found the same; returns what the first one did."""
    for rank in results:
        for key in ("start", "steps", "val", "final"):
            assert same_bits(rank[key], results[0][key]), key
    return results[0]


def merge(results):
    """Checks that all ranks found the same; returns it, with the mean of the losses and the whole table."""
    run = same_on_all_ranks(results)
    run["losses"] = np.mean([rank["losses"] for rank in results], axis=0)
    run["table"] = join([rank["table"] for rank in results])
    return run


@functools.cache
def one_rank(cfg):
    """Trains a run in this process, without a process group."""
    return train(0, 1, cfg)


# ------------------------------------------------------------------------------------------------ whole runs


def test_everything_trains(everything):
    """Checks what the tests below rely on: every number of a run moves, and embed is untied when it must."""
    run = one_rank(everything)
    digests, ties = zip(*run["steps"])
    assert ties == (True,) * 7 + (False,)
    assert len(set(digests)) == everything.steps
    _, model, optimizer = build(0, 1, everything)
    for name, p in whole(model, optimizer).items():
        assert (run["final"][name] - p).norm() > 1e-5 * p.norm(), name


def bytes_sent(cfg, ranks):
    """Returns what all ranks together must send in training, by kind of exchange and name.

    ranks: what train() found on each.
    """
    n = len(ranks)
    _, _, optimizer = build(0, n, cfg)
    sent = Counter()
    for moment in "exp_avg", "exp_avg_sq":  # at untying
        block = optimizer.params["lm_head"].state[moment]
        sent[f"all_gather lm_head.{moment}"] = n * block.nbytes * (n - 1)
    for name, param in optimizer.trainables.items():
        read = [set() for _ in ranks]  # since the last update
        for step in range(cfg.steps):
            plan = tg.plan_step(cfg, step)
            is_due = plan.is_update_step(param.spec.update_every)
            is_copy = name == "embed" and plan.tied
            if name == "ngrams" or param.spec.exchange == "sparse":
                for rows, found in zip(read, ranks):
                    rows |= found["reads"][step][param.rows_by]
                if is_due:
                    add_rows_sent(sent, param, read, is_copy)
                    read = [set() for _ in ranks]
            elif is_due and not is_copy:
                reduce = "all_to_all" if param.spec.reduction == "fp32" else "reduce_scatter"
                sent[f"{reduce} {name}"] += param.p.nbytes * (n - 1)
                sent[f"all_gather {name}"] += param.p.nbytes * (n - 1)
    return sent


def add_rows_sent(sent, param, read, is_copy):
    """Counts an exchange of rows that the ranks have read. is_copy: gradients go with lm_head's."""
    n = len(read)
    away = 0  # rows of other ranks, counted for each rank
    for rank, rows in enumerate(read):
        for row in rows:
            if param.name == "ngrams":
                owner = row % n
            else:
                owner = row // len(param.block)
            away += owner != rank
    row_bytes = param.block[0].nbytes
    sent[f"counts {param.name}"] += 8 * n * (n - 1)
    sent[f"row ids {param.name}"] += 4 * away
    if param.name == "ngrams":
        sent["rows ngrams"] += away * row_bytes
    elif not is_copy:
        sent[f"all_gather {param.name}"] += param.p.nbytes * (n - 1)
    if not is_copy:
        sent[f"gradient rows {param.name}"] += away * row_bytes


def assert_sent(cfg, ranks):
    """Checks that all ranks together have sent the bytes that they must."""
    sent = sum((Counter(rank["sent"]) for rank in ranks), Counter())
    assert sent == bytes_sent(cfg, ranks)


def assert_close(run, want, bound):
    """Compares losses, parameters and the table, by their norms."""
    assert run["losses"] == pytest.approx(want["losses"], rel=bound)
    assert run["val"] == pytest.approx(want["val"], rel=bound)
    pairs = [(run["final"][name], p) for name, p in want["final"].items()]
    pairs += zip(run["table"], want["table"])
    for ours, t in pairs:
        difference = (ours[: len(t)] - t).double()  # the rest of a table is padding
        assert difference.norm() < bound * t.double().norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, change",
    [(2, "main_grad=false"), (4, "params.*.reduction=fp32"), (8, "main_grad=true")],
)
def test_world_size_does_not_matter(workers, everything, world_size, change):
    """Gives the same losses, parameters and table up to rounding, and the first validation's bits.

    Ranks add gradients in another order than micro-batches do, which moves a gradient by a few units eps of
    the arithmetic. orthogonalize may blow that up a thousandfold where a gradient has small singular values:
    hence 1000 eps. Every rank sends the bytes that it must.
    """
    want = one_rank(everything)
    cfg = tg.override(everything, change)
    results = workers(world_size, train, cfg)
    run = merge(results)
    assert run["start"] == want["start"]
    assert [tied for _, tied in run["steps"]] == [tied for _, tied in want["steps"]]
    assert_close(run, want, 1000 * torch.finfo(torch.float64).eps)
    assert_sent(cfg, results)


@pytest.mark.slow
def test_what_changes_no_bit(workers, everything):
    """Checks orders of scatter and of work, sparse and dense exchange, on four ranks."""
    cfg = with_dtype(tg.override(everything, "ngrams.orders="), "float32")
    want = workers(4, train, cfg)
    whole_tables = dense(shuffled(cfg, 7))
    for variant in whole_tables, shuffled(cfg, 8):
        ranks = workers(4, train, variant)
        same_on_all_ranks(ranks)
        for rank, wanted in zip(ranks, want):
            for key in ("losses", "steps", "val", "final"):
                assert same_bits(rank[key], wanted[key]), key
        assert_sent(variant, ranks)


@pytest.mark.slow
def test_warm_up_leaves_no_trace(workers, everything):
    """Compares the bits of bf16 runs with and without one that ends between updates."""
    cfg = with_dtype(everything, "bfloat16")
    warm = workers(2, train, cfg, [range(0, 8, 3), range(5)])
    cold = workers(2, train, cfg)
    for a, b in zip(warm, cold):
        assert same_bits(a, b)


def first_gradients(rank, world_size, cfg):
    """Returns this rank's blocks of the first batch's mean gradients."""
    comm, model, optimizer = build(rank, world_size, cfg)
    optimizer.step = lambda *_: None
    tg.train_step(model, optimizer, first_batch(cfg, rank, world_size))
    found = {}
    for name, param in optimizer.params.items():
        grad = param.main_grad
        if grad is None:
            grad = param.p.grad
        found[name] = comm.reduce_scatter(name, grad, in_rank_order=True).wait()
    return found


@pytest.mark.slow
def test_eight_ranks_sum_as_eight_micro_batches_do(workers, everything):
    """Compares mean gradients bit by bit, with the fp32 sum and one micro-batch a rank.

    Micro-batch after micro-batch is added at both world sizes, and factors of 1/8 are exact. That holds where
    autograd adds up micro-batches, and in tables. Written in place, as the head's always is, a product is
    added inside its own sum, and the bits may differ.
    """
    cfg = with_dtype(tg.override(everything, "ngrams.orders="), "float32")
    cfg = replace(cfg, main_grad=False)
    parts = workers(8, first_gradients, cfg)
    for name, want in first_gradients(0, 1, cfg).items():
        if name != "lm_head":
            grad = torch.cat([part[name] for part in parts])
            rows = min(len(grad), len(want))  # banks and vectors have other padding
            assert want.any() and torch.equal(grad[:rows], want[:rows]), name


class LateGather:
    """Brings nothing, not even this rank's own block, before wait()."""

    def __init__(self, t):
        self.t = t
        self.values = t.clone()
        t.fill_(torch.nan)

    def wait(self):
        if self.values is not None:
            self.t.copy_(self.values)
            self.values = None


@pytest.mark.slow
def test_gathers_end_in_the_next_step(everything, monkeypatch):
    """Makes a parameter NaN until its gather is waited for.

    No gather is waited for in the step that starts it. The next step, or a validation, waits for all.
    """
    monkeypatch.setattr(tg.Collectives, "all_gather", lambda self, name, t: tg.Pending(t, LateGather(t)))

    def check(model, optimizer):
        for param in optimizer.params.values():
            assert (param.in_flight is not None) == param.is_due(optimizer.last_plan), param.name

    run = train(0, 1, everything, after_step=check)
    want = one_rank(everything)
    assert run["losses"] == want["losses"] and run["val"] == want["val"]
    assert same_bits(run["final"], want["final"])


# -------------------------------------------------------------------------------------------------- exchange


def wide_range(rank):
    """Returns numbers over many powers of two, bf16, so that the order of additions shows."""
    g = generator(rank)
    numbers = torch.randn(64, 5, generator=g)
    exponents = torch.randint(-10, 10, (64, 5), generator=g)
    return (numbers * 2.0**exponents).bfloat16()


def mean_in_rank_order(rank, world_size):
    return tg.Collectives(rank, world_size).reduce_scatter("x", wide_range(rank), in_rank_order=True).wait()


def test_the_fp32_sum_is_in_rank_order(workers):
    """Compares all bits of a mean of bf16 gradients, which are summed without rounding."""
    parts = [wide_range(rank).float() for rank in range(4)]
    want = parts[0] + parts[1] + parts[2] + parts[3]
    found = torch.cat(workers(4, mean_in_rank_order))
    assert found.dtype == torch.float32 and torch.equal(found, want / 4)


# --------------------------------------------------------------------------------- the losses of single steps


def test_the_loss_of_a_step_is_a_mean(cfg):
    """Takes a head of zeros, which loses log V on each prediction; last tokens have fewer of them.

    FP8 gradients are in units of a micro-batch's share, which the losses' weights hold already: with more
    micro-batches smaller gradients are then as far from underflow.
    """
    cfg = replace(cfg, head_chunk=6, pointer_dim=0)  # chunks of 16 tokens
    _, model, optimizer = build(0, 1, cfg)
    with torch.no_grad():
        model.lm_head.zero_()
    batch = first_batch(cfg)
    loss = tg.train_step(model, optimizer, batch)
    T = len(batch.micro_batches[0].inputs)
    a, b, c = batch.plan.mtp
    predicted = (a * T + b * (T - 1) + c * (T - 2)) / (T * (a + b + c))
    assert loss.item() == pytest.approx(predicted * math.log(cfg.padded_vocab), rel=1e-12)
    assert model.loss_share == 1 / 8


def test_validation_losses_are_averaged_in_fp32(cfg):
    """Validates a bf16 model: with its 8 bits the mean would be off in the third digit."""
    cfg = with_dtype(cfg, "bfloat16")
    comm, model, _ = build(0, 1, cfg)
    val = val_loader(cfg)
    windows = vars(cfg.val_windows)
    losses = [model.token_losses(val.slice(i), windows).mean().item() for i in range(3)]
    assert tg.validate(model, val, comm, windows) == pytest.approx(np.mean(losses), rel=1e-6)
