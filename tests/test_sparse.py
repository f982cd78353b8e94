"""Checks the row-sparse exchange of table gradients: the bits of the dense one, bytes sent, memory."""

# ruff: noqa: F811 (fixtures are imported)

import math
import re
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as tg
from golden_inputs import prefetch_exchange, row_plans
from launch import TINY, Launch, make_corpus, settings
from test_distributed import (
    batches_of,
    build,
    cfg,  # noqa: F401 (a fixture)
    digest,
    same_on_all_ranks,
    spoil_grads,
    train,
    with_dtype,
)

TABLES = ("value_embeds", "bigram_embed", "embed")


def with_exchange(cfg, how, tables=TABLES):
    """Makes the tables' exchange sparse, or dense with the fp32 sum."""
    changes = {"sparse": dict(exchange="sparse"), "dense": dict(exchange="reduce_scatter", reduction="fp32")}
    params = (replace(row, **changes[how]) if row.name in tables else row for row in cfg.params)
    return replace(cfg, params=tuple(params))


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("world_size, dtype", [(3, "float32"), (8, "bfloat16")])
def test_sparse_runs_are_dense_runs(workers, cfg, world_size, dtype):
    """Compares the bits after every step of whole runs, with 2 and 1 micro-batches a rank."""
    cfg = with_dtype(cfg, dtype)
    if world_size == 3:
        stages = tuple(replace(stage, batch_tokens=stage.batch_tokens // 8 * 6) for stage in cfg.stages)
        sizes = dict(microbatches=6, bigram_vocab_size=330, padded_vocab=66, head_dim=12)
        cfg = replace(cfg, stages=stages, **sizes)
    dense, sparse = (
        same_on_all_ranks(workers(world_size, train, with_exchange(cfg, how), False, False))
        for how in ("dense", "sparse")
    )
    assert sparse["digests"] == dense["digests"] and sparse["losses"] == dense["losses"]
    assert len(set(dense["digests"])) == cfg.steps


@pytest.mark.slow
def test_each_tables_switch_alone(workers, cfg):
    cfg = with_exchange(with_dtype(cfg, "float32"), "dense")
    dense = same_on_all_ranks(workers(2, train, cfg, False, False))
    for tables in [TABLES, *((name,) for name in TABLES)]:
        results = workers(2, train, with_exchange(cfg, "sparse", tables), False, False)
        sparse = same_on_all_ranks(results)
        assert sparse["digests"] == dense["digests"] and sparse["losses"] == dense["losses"], tables


# ------------------------------------------------------------------------------------------- single exchanges

# Large sets of rows come before small ones, so a leftover of an exchange meets one that does not overwrite
# it.
CASES = (
    "some",
    "all",
    "last",
    "same",
    "none",
    "one owner",
    "one sender",
    "some empty",
    "next",
    "some",
)
ROWS_PER_RANK = {"tokens": 8, "bigrams": 40}
ROW_SHAPES = {"a": ("tokens", (3, 5)), "b": ("tokens", (4,)), "c": ("bigrams", (7,))}


def case_of(kind, i):
    """Returns the i-th exchange's case for a kind of rows; the two kinds have different ones."""
    return CASES[i if kind == "bigrams" else (3 * i + 1) % len(CASES)]


def draw(rank, world_size, dtype, i):
    """Draws this rank's touched rows by kind, and gradients by table, of sizes from 2^-16 to 2^16."""
    masks, grads = {}, {}
    for kind, rows in ROWS_PER_RANK.items():
        case = case_of(kind, i)
        g = torch.Generator().manual_seed(1000 * i + (0 if case == "same" else rank))
        some, mask = torch.rand(rows * world_size, generator=g) < 0.3, torch.zeros(rows * world_size).bool()
        sends = {"one sender": rank == world_size // 2, "some empty": rank % 2 == 1}
        if case in ("some", "same") or sends.get(case):
            mask = some
        elif case == "all":
            mask[:] = True
        elif case == "last":
            mask[-1] = True
        elif case == "one owner":
            first = (world_size - 1) // 2 * rows
            mask[first : first + rows] = some[first : first + rows]
        elif case == "next":  # one row of the next rank's block, none of its own
            mask[(rank + 1) % world_size * rows] = True
        masks[kind] = mask
    g = torch.Generator().manual_seed(77 * i + rank)
    for name, (kind, shape) in ROW_SHAPES.items():
        size = 2.0 ** torch.randint(-16, 17, (len(masks[kind]), *shape), generator=g)
        grads[name] = (torch.randn(size.shape, generator=g, dtype=torch.float64) * size).to(dtype)
        grads[name][~masks[kind]] = 0
    return masks, grads


def merge_in_order(order):
    """Returns mean_rows, but in the order order(rank, world_size) of the senders."""

    def merge(out, row_grads, plan):
        rank, counts = dist.get_rank(), plan.recv_counts
        parts = list(zip(plan.arriving.split(counts), row_grads.split(counts)))
        for sender in order(rank, len(counts)):
            sender_ids, part = parts[sender]
            out.index_add_(0, sender_ids, part.to(out.dtype))
        return out.div_(len(counts))

    return merge


def merge_rounding(out, row_grads, plan):
    """Merges as mean_rows does, but in the gradient's own dtype."""
    rounded = tg.mean_rows(torch.zeros_like(out, dtype=row_grads.dtype), row_grads, plan)
    return out.copy_(rounded)


MERGES = {
    "original": tg.mean_rows,
    "rank order": merge_in_order(lambda rank, n: range(n)),
    "own first": merge_in_order(lambda rank, n: sorted(range(n), key=lambda sender: sender != rank)),
    "reversed": merge_in_order(lambda rank, n: reversed(range(n))),
    "rotated": merge_in_order(lambda rank, n: [(sender + 1) % n for sender in range(n)]),
    "rounding": merge_rounding,
}


def bits(t):
    return t.contiguous().view(torch.uint8)


def compare(rank, world_size, dtype, merge):
    """Runs sparse exchanges beside dense ones, and checks the bytes that both count.

    Returns [(case, table, whether the bits are the same)].
    """
    sparse, dense, same = tg.Exchange(rank, world_size), tg.Exchange(rank, world_size), []
    prefetch, sizes = prefetch_exchange(rank, world_size), [n * world_size for n in ROWS_PER_RANK.values()]
    cfg = replace(tg.CPU, ngrams=tg.Ngrams(), padded_vocab=sizes[0], bigram_vocab_size=sizes[1])
    shard_grads, recv_buffers, sent, ids_sent = {}, {}, Counter(), Counter()
    for name, (kind, shape) in ROW_SHAPES.items():
        shard_grads[name] = torch.zeros((ROWS_PER_RANK[kind], *shape))
        recv_buffers[name] = torch.empty((world_size, ROWS_PER_RANK[kind], *shape), dtype=dtype)
    for i in range(len(CASES)):
        masks, grads = draw(rank, world_size, dtype, i)
        ids = {kind: mask.nonzero().int().flatten().numpy() for kind, mask in masks.items()}
        plans, pending = row_plans(cfg, prefetch, ids), {}
        for name, (kind, _) in ROW_SHAPES.items():
            grad, plan = grads[name].clone(), plans[kind]
            grad[~masks[kind]] = torch.nan  # stale rows: must not be read
            counts = plan.send_counts, plan.recv_counts
            pending[name] = sparse.send_rows("rows", name, grad[plan.rows], *counts)
        for name in reversed(ROW_SHAPES):
            kind, shape = ROW_SHAPES[name]
            want = dense.reduce(name, "reduce_scatter", grads[name], recv_buffers[name]).wait()
            received, out = pending[name].wait(), shard_grads[name]
            mean = MERGES[merge](out, received, plans[kind])
            same.append((case_of(kind, i), name, torch.equal(bits(mean), bits(want))))
            assert mean.data_ptr() == out.data_ptr()
            mean.index_fill_(0, plans[kind].arriving.long(), 0)  # as the optimizer does
            assert not mean.any()
            others = [owner for owner in range(world_size) if owner != rank]
            away = masks[kind].view(world_size, -1)[others].sum().item()
            sent[f"rows {name}"] += away * math.prod(shape) * dtype.itemsize
            table = {"a": "value_embeds", "b": "embed", "c": "bigram_embed"}[name]
            ids_sent[f"row ids {table}"] += 4 * away
            ids_sent[f"counts {table}"] += (world_size - 1) * 8
    assert sparse.sent == dict(sent) and prefetch.sent == dict(ids_sent)
    blocks = {name: recv_buffer[0].nbytes for name, recv_buffer in recv_buffers.items()}
    assert dense.sent == {
        f"all_to_all {name}": len(CASES) * (world_size - 1) * nbytes for name, nbytes in blocks.items()
    }
    return same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world_size", [3, 8])
def test_touched_rows_are_averaged_like_all_rows(workers, world_size, dtype):
    """Compares them to the bit, whichever rank touches which rows, in several exchanges in a row."""
    for same in workers(world_size, compare, dtype, "original"):
        assert len(same) == 3 * len(CASES) and all(equal for *_, equal in same), same
        assert {case for case, name, _ in same if name == "b"} == set(CASES)


ORDERS = [merge for merge in MERGES if merge not in ("original", "rounding")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "merge, dtype",
    [(merge, torch.float32) for merge in ORDERS]
    + [(merge, torch.bfloat16) for merge in (*ORDERS, "rounding")],
)
@pytest.mark.parametrize("world_size", [4])
def test_the_comparison_finds_wrong_sums(workers, world_size, merge, dtype):
    """Sums in other orders than the ranks', and in bf16: the test above fails, where all touch a row."""
    for rank, same in enumerate(workers(world_size, compare, dtype, merge)):
        wrong = [not equal for case, _, equal in same if case in ("all", "same")]
        if merge == "rank order" or merge == "own first" and rank < 2:  # b + a is a + b
            assert all(equal for *_, equal in same)
        else:
            assert any(wrong) and len(wrong) == 6, (rank, same)


# ------------------------------------------------------------------------------------------------- bytes sent


def bytes_sent(cfg, rank, world_size, steps):
    """Computes what a rank sends in `steps`: (plan, row ids touched since the last Adam step, by kind)."""
    sent, shapes, tied = Counter(), tg.param_shapes(cfg, world_size), True
    itemsize = {"model": tg.dtype_of(cfg.dtype).itemsize, "float32": 4}

    def share(nbytes):
        return nbytes * (world_size - 1) // world_size

    for plan, touched in steps:
        away = {}  # rows that other ranks own
        for row in cfg.params if plan.updates(2) else ():
            if row.exchange == "sparse":
                shard = shapes[row.name][0] // world_size
                away[row.name] = sum(row_id // shard != rank for row_id in touched[row.kind])
        for row in cfg.params:
            if row.optimizer == "adam" and not plan.updates(2) or tied and row.tied_to:
                continue
            nbytes = itemsize[row.dtype] * math.prod(shapes[row.name])
            if row.exchange == "sparse":
                sent[f"rows {row.name}"] += away[row.name] * nbytes // shapes[row.name][0]
            elif row.exchange == "all_reduce":
                sent[f"all_reduce {row.name}"] += 2 * share(nbytes)
            else:
                collective = "all_to_all" if row.reduction == "fp32" else "reduce_scatter"
                sent[f"{collective} {row.name}"] += share(nbytes)
            if row.exchange != "all_reduce":
                sent[f"all_gather {row.name}"] += share(nbytes)
        for name, count in away.items():
            sent[f"counts {name}"] += (world_size - 1) * 8
            sent[f"row ids {name}"] += 4 * count
        if plan.untie:
            tied = False
            for moment in ("exp_avg", "exp_avg_sq"):
                sent[f"all_gather lm_head.{moment}"] += share(4 * math.prod(shapes["lm_head"]))
    return dict(sent)


def touched_in_steps(cfg, rank, world_size):
    """Returns a run's plans and touched row ids, from a loader alone."""
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size)
    steps, touched = [], {"tokens": set(), "bigrams": set()}
    for plan in (tg.plan_step(cfg, step) for step in range(cfg.steps)):
        for micro_batch in loader.batch(plan.batch_tokens, plan.max_doc_len):
            touched["tokens"].update(micro_batch.inputs.tolist())
            touched["bigrams"].update(micro_batch.hashed_rows[0].tolist())
        steps.append((plan, {kind: set(row_ids) for kind, row_ids in touched.items()}))
        if plan.updates(2):
            touched = {"tokens": set(), "bigrams": set()}
    loader.close()
    return steps


def count_bytes(rank, world_size, cfg):
    """Returns a run's bytes; checks that no step leaves a gradient that it must not leave."""
    exchange, model, optimizer = build(rank, world_size, cfg)
    batches = batches_of(cfg, rank, world_size)
    sparse = {row.name for row in cfg.params if row.exchange == "sparse"}
    means = {name: grad.mean for name, grad in optimizer.grads.items() if grad.mean is not None}
    assert means.keys() == sparse
    for step in range(cfg.steps):
        tg.train_step(model, optimizer, batches.next())
        do_adam = tg.plan_step(cfg, step).updates(2)
        assert not any(mean.any() for mean in means.values())
        for name in TABLES:
            assert bool(optimizer.grads[name].main_grad.any()) == (not do_adam)
        for name in ("qk_bank", "vo_bank", "mlp_bank", "lm_head"):  # which the next backward overwrites
            assert (not optimizer.grads[name].written) == (name != "lm_head" or do_adam)
        assert not optimizer.rows
        for name, p in model.named_parameters():
            assert (p.grad is None) == (do_adam or optimizer.grads[name].main_grad is not None)
    batches.loader.close()
    assert not exchange.sent.keys() & batches.exchange.sent.keys()
    return exchange.sent | batches.exchange.sent


@pytest.mark.slow
@pytest.mark.parametrize("world_size, tables", [(4, TABLES), (2, ("embed",)), (2, ())])
def test_a_runs_bytes(workers, cfg, world_size, tables):
    cfg = with_exchange(with_exchange(with_dtype(cfg, "bfloat16"), "dense"), "sparse", tables)
    for rank, sent in enumerate(workers(world_size, count_bytes, cfg)):
        assert sent == bytes_sent(cfg, rank, world_size, touched_in_steps(cfg, rank, world_size))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_corpus(folder / "corpus")
    return folder


def logged_bytes(folder, *more):
    """Runs the script on two ranks; returns the bytes sent, as its log ends with them."""
    before = set(folder.glob("records/**/*.txt"))
    arguments = ["--preset", "cpu", "--data", "corpus", *settings(*more)]
    with Launch(folder, *arguments, world_size=2) as launch:
        assert launch.wait() == [0, 0], launch.err
    (log,) = set(folder.glob("records/**/*.txt")) - before
    end = log.read_text(encoding="utf-8").rsplit("peak memory", 1)[1]
    lines = re.findall(r"^bytes sent by rank 0, (.+): (\d+)$", end, re.M)
    assert len(lines) == end.count("bytes sent") and lines == sorted(lines)
    return {what: int(n) for what, n in lines}


@pytest.mark.slow
def test_the_bytes_are_in_the_log(run_folder):
    """Finds them at its end, without warm-up's.

    The sparse exchange sends fewer than the dense; all else is equal.
    """
    dense_tables, expected = [f"params.{name}.exchange=reduce_scatter" for name in TABLES], []
    for more in (["endings.0.window=0"], ["endings.0.window=0", *dense_tables]):
        cfg = replace(tg.CPU, data=str(run_folder / "corpus"))
        for setting in (*TINY, *more):
            cfg = tg.override(cfg, setting)
        expected.append(bytes_sent(cfg, 0, 2, touched_in_steps(cfg, 0, 2)))
        of_thread = ("counts ", "row ids ")
        named = {f"prefetch {k}" if k.startswith(of_thread) else k: n for k, n in expected[-1].items()}
        assert logged_bytes(run_folder, *more) == named
    sparse, dense = (dict(a.items() - b.items()) for a, b in (expected, expected[::-1]))
    ids = {f"{what} {name}" for what in ("counts", "row ids") for name in TABLES}
    assert sparse.keys() == ids | {f"rows {name}" for name in TABLES}
    assert dense.keys() == {f"reduce_scatter {name}" for name in TABLES}
    assert sum(sparse.values()) < 0.2 * sum(dense.values())


def test_a_table_of_any_size(cfg):
    """Accepts any size where no rank owns a block; tables are not padded."""
    cfg = replace(cfg, bigram_vocab_size=321)
    tg.check_config(cfg, 1)
    tg.check_config(tg.override(cfg, "params.bigram_embed.exchange=all_reduce"), 2)
    with pytest.raises(tg.UserError, match="cannot share the rows of bigram_embed"):
        tg.check_config(cfg, 2)


# ----------------------------------------------------------------------------------------------------- memory

WATCHED = ("begin", "add_row_grads", "scatter", "reset_grad")


def tensors_in(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class MemoryRecorder(TorchDispatchMode):
    """Keeps the largest tensors in `seen`, by the innermost watched call, "rest" outside.

    allocated: bytes of the largest that an operation allocated. cleared: elements of the largest that one
    cleared or copied into.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.seen = ["rest"], {"rest": Counter()}

    def watch(self, patch, owner, name):
        original, self.seen[name] = getattr(owner, name), Counter()

        def watched(*args, **kwargs):
            self.calls.append(name)
            result = original(*args, **kwargs)
            self.calls.pop()
            return result

        patch.setattr(owner, name, watched)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, seen = func(*args, **(kwargs or {})), self.seen[self.calls[-1]]
        inputs = tensors_in((args, kwargs))
        old = {t.untyped_storage().data_ptr() for t in inputs}
        storages = [t.untyped_storage() for t in tensors_in(result)]
        new = [storage.nbytes() for storage in storages if storage.data_ptr() not in old]
        seen["allocated"] = max([seen["allocated"], *new])
        if func.__name__.split(".")[0] in ("zero_", "fill_", "copy_", "mul_", "add_", "masked_fill_"):
            seen["cleared"] = max(seen["cleared"], inputs[0].numel())
        return result


def record_memory(rank, world_size, cfg, steps):
    """Trains these steps, of which the first begins with no gradient; returns MemoryRecorder.seen."""
    _, model, optimizer = build(rank, world_size, cfg)
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size)
    plans = [tg.plan_step(cfg, step) for step in steps]
    batches = tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))
    recorder = MemoryRecorder()
    with pytest.MonkeyPatch.context() as patch, recorder:
        recorder.watch(patch, tg, "adam_update")
        recorder.watch(patch, tg, "mean_rows")
        for name in WATCHED:
            recorder.watch(patch, optimizer, name)
        for _ in steps:
            tg.train_step(model, optimizer, batches.next())
    loader.close()
    return recorder.seen


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_table_is_allocated_or_cleared(workers, cfg, world_size):
    """Checks steps before and after untying, with tables far larger than what belongs to a token.

    Accumulating, sending, merging and dropping gradients takes less than half of the smallest table. All else
    but Adam's arithmetic takes less than three quarters of the next larger: an fp32 copy of the head's
    gradient takes half.
    """
    stages = tuple(replace(stage, batch_tokens=4 * 12) for stage in cfg.stages)
    sizes = dict(padded_vocab=6_000, bigram_vocab_size=60_000, head_chunk=6, microbatches=4)
    cfg = replace(with_dtype(cfg, "bfloat16"), stages=stages, endings=(), **sizes)  # averages are as large
    cfg = tg.override(cfg, "params.lm_head.reduction=fp32")  # the backend's allocates what it receives into
    shapes = tg.param_shapes(cfg, 1)
    small, middle, large = (math.prod(shapes[name]) for name in ("embed", "value_embeds", "bigram_embed"))
    assert 8 / 3 * small < middle < large
    for seen in workers(world_size, record_memory, cfg, range(4, 8)):
        # The recorder sees what there is to see: Adam's fp32 numbers of a table, and some for the tokens.
        assert seen["adam_update"]["allocated"] >= 4 * large / world_size
        assert seen["adam_update"]["cleared"] >= large / world_size
        assert seen["add_row_grads"]["allocated"] >= 12 * cfg.dim * 2
        assert (seen["mean_rows"]["allocated"] > 0) == (world_size > 1)
        for limit, names in ((small / 2, (*WATCHED, "mean_rows")), (middle * 3 / 4, ("rest",))):
            for name in names:
                assert seen[name]["allocated"] < 2 * limit, (name, seen)
                assert seen[name]["cleared"] < limit, (name, seen)


def test_the_recorder_sees_autograds_tables(cfg):
    """Shows that the test above would fail if autograd summed the tables' gradients."""
    cfg = replace(with_dtype(cfg, "bfloat16"), bigram_vocab_size=20_000)
    _, model, _ = build(0, 1, cfg)
    model.bigram_embed.requires_grad_()
    batches, recorder = batches_of(cfg, 0, 1), MemoryRecorder()
    batch = batches.next().micro_batches[0]
    batches.loader.close()
    with recorder:
        model.lookup_sums(batch, None).sum().backward()
    assert recorder.seen["rest"]["allocated"] >= 2 * 20_000 * cfg.dim


# ------------------------------------------------------------------------ gradients after restore and warm-up


def continue_run(rank, world_size, cfg, first):
    """Checks that a run restored after `first` steps, with NaN gradients before, goes on to the same bits."""
    _, model, optimizer = build(rank, world_size, cfg)
    batches, digests = batches_of(cfg, rank, world_size), []
    for step in range(cfg.steps):
        batch = batches.next()
        tg.train_step(model, optimizer, batch)
        if step == first - 1:
            state, position = tg.training_state(model, optimizer), batch.position
        if step >= first:
            digests.append(digest(model))
    batches.loader.close()

    _, model, optimizer = build(rank, world_size, cfg, seed=1)
    batches = batches_of(cfg, rank, world_size)
    tg.train_step(model, optimizer, batches.next())
    batches.loader.close()
    optimizer.finish_gathers()
    spoil_grads(optimizer, torch.nan)
    tg.restore(state, model, optimizer)
    optimizer.gather_all()
    shards = tg.find_shards(cfg.data, "train")
    loader = tg.TrainLoader(cfg, shards, rank, world_size, position)
    plans = [tg.plan_step(cfg, step) for step in range(first, cfg.steps)]
    batches = tg.Prefetcher(loader, plans, prefetch_exchange(rank, world_size))
    for want in digests:
        tg.train_step(model, optimizer, batches.next())
        assert digest(model) == want
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("world_size, first, how", [(1, 4, "sparse"), (2, 4, "sparse"), (2, 6, "dense")])
def test_restore_drops_gradients(workers, cfg, world_size, first, how):
    """Restores after Adam steps, before and after untying."""
    cfg = with_exchange(with_dtype(cfg, "bfloat16"), how)
    workers(world_size, continue_run, cfg, first)


def warm_up(rank, world_size, cfg):
    exchange, model, optimizer = build(rank, world_size, cfg)
    data = tg.open_dataset(cfg)
    val, prefetch = tg.ValLoader(cfg, data.val), prefetch_exchange(rank, world_size)
    tg.warm_up(data, model, optimizer, val, prefetch)
    grads = optimizer.grads.values()
    tables = [t for grad in grads if isinstance(grad, tg.TableGradient) for t in (grad.main_grad, grad.mean)]
    tables = [t for t in tables if t is not None]
    assert len(tables) == (3 if world_size == 1 else 6) and not any(t.any() for t in tables)
    assert all(p.grad is None for p in model.parameters())
    assert not any(grad.written or grad.delayed for grad in grads)
    assert optimizer.rows == exchange.sent == prefetch.sent == {}


@pytest.mark.slow
@pytest.mark.parametrize("world_size, last", [(1, 2), (2, 1)])
def test_warm_up_leaves_no_gradient(workers, cfg, world_size, last):
    """Checks gradients and bytes, whether it ends with an Adam step or, with one last step, without."""
    cfg = replace(cfg, stages=(*cfg.stages[:3], replace(cfg.stages[3], steps=last)))
    assert tg.warmup_steps(cfg)[-1][-1] % 2 == (last == 2)
    workers(world_size, warm_up, cfg)


# --------------------------------------------------------------------------------------- order of collectives


def record_collectives(rank, world_size, cfg, silent):
    """Returns a run's collectives and passes by step, and the prefetch thread's collectives, all in order.

    The last `silent` ranks have no rows to send.
    """
    _, model, optimizer = build(rank, world_size, cfg)
    group, events, prefetched, steps = prefetch_exchange(rank, world_size).group, [], [], []

    def record(patch, owner, name, collective=True):
        original = getattr(owner, name)

        def recording(*args, **kwargs):
            on_main = threading.current_thread() is threading.main_thread()
            assert on_main if not collective else (kwargs.get("group") is not group) == on_main
            dtype = str(args[0].dtype).removeprefix("torch.") if collective else ""
            (events if on_main else prefetched).append(f"{name} {dtype}".strip())
            return original(*args, **kwargs)

        patch.setattr(owner, name, recording)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_reduce", "broadcast"):
            record(patch, dist, name)
        record(patch, tg, "_reduce_scatter")
        record(patch, tg, "_all_gather")
        record(patch, torch.autograd, "backward", collective=False)
        record(patch, model, "hidden_states", collective=False)
        record(patch, optimizer, "add_row_grads", collective=False)
        record(patch, optimizer, "scatter", collective=False)
        if rank >= world_size - silent:
            patch.setattr(tg, "merge_rows", lambda *lists: tg.NO_ROWS)
        batches = batches_of(cfg, rank, world_size)
        for _ in range(cfg.steps):
            batch = batches.next()
            for name in batch.rows.keys() - {"buffer"}:
                assert bool(len(batch.rows[name].rows)) == (rank < world_size - silent)
            tg.train_step(model, optimizer, batch)
            steps.append(list(events))
            events.clear()
    batches.loader.close()
    return steps, prefetched


@pytest.mark.slow
@pytest.mark.parametrize("world_size, microbatches, silents", [(2, 2, (0, 1, 2)), (4, 8, (1,))])
def test_one_order_of_collectives(workers, cfg, world_size, microbatches, silents):
    """Checks that it is the same on all ranks, in each of two threads, even if a rank has nothing to send.

    The main thread sends rows with the other gradients. The thread that builds batches sends counts and row
    ids, in a group of its own.
    """
    cfg = replace(with_dtype(cfg, "float32"), microbatches=microbatches)
    ranks = []
    for silent in silents:
        ranks += workers(world_size, record_collectives, cfg, silent)
    counts, ids, rows = (f"all_to_all_single {dtype}" for dtype in ("int64", "int32", "float32"))
    assert all(recorded == ranks[0] for recorded in ranks)
    steps, prefetched = ranks[0]
    assert prefetched == [counts, ids] * len(TABLES) * (cfg.steps // 2)
    for step, events in enumerate(steps):
        plan = tg.plan_step(cfg, step)
        micro_batch = ["hidden_states", "backward", "add_row_grads"]
        want = micro_batch * (microbatches // world_size)
        assert events[: len(want) + 1] == [*want, "scatter"], (step, events)
        sent = Counter(events[len(want) :])
        assert sent[rows] == (0 if not plan.updates(2) else 3 if step > tg.untie_step(cfg) else 2)
        assert sent[counts] == sent[ids] == 0
