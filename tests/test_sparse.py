"""The row-sparse exchange of table gradients: to the bit what the dense exchange with the fp32 sum gives, and what it sends."""
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
from golden_inputs import next_batch
from launch import TINY, Launch, make_corpus, settings
from test_distributed import batches_of, build, cfg, digest, same_on_all_ranks, train  # noqa: F401 (cfg is a fixture)

TABLES = ("value_embeds", "bigram_embed", "embed")


def exchanged(cfg, how, tables=TABLES):
    """The tables' exchange: sparse, or dense with the fp32 sum."""
    change = dict(exchange="sparse") if how == "sparse" else dict(exchange="reduce_scatter", reduction="fp32")
    return replace(cfg, params=tuple(replace(row, **change) if row.name in tables else row for row in cfg.params))


# --------------------------------------------------------------------------------------------------------- whole runs

@pytest.mark.slow
@pytest.mark.parametrize("world, dtype", [(3, "float32"), (8, "bfloat16")])
def test_sparse_runs_are_dense_runs(workers, cfg, world, dtype):  # noqa: F811
    """Whole runs, through all stages and the split, with 2 and 1 micro-batches a rank: the same bits after every step."""
    cfg = replace(cfg, dtype=dtype, polar_dtype=dtype)
    if world == 3:
        stages = tuple(replace(stage, tokens=stage.tokens // 8 * 6) for stage in cfg.stages)
        cfg = replace(cfg, slices=6, bigram_rows=330, padded_vocab=66, head_dim=12, stages=stages)
    want = same_on_all_ranks(workers(world, train, exchanged(cfg, "dense"), False, False))
    got = same_on_all_ranks(workers(world, train, exchanged(cfg, "sparse"), False, False))
    assert got["digests"] == want["digests"] and got["losses"] == want["losses"]
    assert len(set(want["digests"])) == cfg.steps


@pytest.mark.slow
def test_each_tables_switch_alone(workers, cfg):  # noqa: F811
    cfg = exchanged(replace(cfg, dtype="float32", polar_dtype="float32"), "dense")
    want = same_on_all_ranks(workers(2, train, cfg, False, False))
    for tables in [TABLES, *((name,) for name in TABLES)]:
        got = same_on_all_ranks(workers(2, train, exchanged(cfg, "sparse", tables), False, False))
        assert got["digests"] == want["digests"] and got["losses"] == want["losses"], tables


# ---------------------------------------------------------------------------------------------------------- exchanges

# Large sets before small ones, so that what an exchange leaves behind meets one that does not overwrite it.
CASES = ("some", "all", "last", "same", "none", "one owner", "one sender", "some empty", "next", "some")
ROWS = {"tokens": 8, "bigrams": 40}  # of a rank
SHAPES = {"a": ("tokens", (3, 5)), "b": ("tokens", (4,)), "c": ("bigrams", (7,))}  # of a row


def case_of(kind, turn):
    """The two kinds of rows meet with different cases."""
    return CASES[turn if kind == "bigrams" else (3 * turn + 1) % len(CASES)]


def draw(rank, world, dtype, turn):
    """This rank's touched rows by kind; gradients by table, with values over 2^-16 to 2^16."""
    marks, grads = {}, {}
    for kind, block in ROWS.items():
        case, rows = case_of(kind, turn), block * world
        g = torch.Generator().manual_seed(1000 * turn + (0 if case == "same" else rank))
        some, mark = torch.rand(rows, generator=g) < 0.3, torch.zeros(rows, dtype=torch.bool)
        if case in ("some", "same") or case == "one sender" and rank == world // 2 or case == "some empty" and rank % 2:
            mark = some
        elif case == "all":
            mark[:] = True
        elif case == "last":
            mark[-1] = True
        elif case == "one owner":
            owner = (world - 1) // 2 * block
            mark[owner:owner + block] = some[owner:owner + block]
        elif case == "next":  # one row, and nothing for its own
            mark[(rank + 1) % world * block] = True
        marks[kind] = mark
    g = torch.Generator().manual_seed(77 * turn + rank)
    for name, (kind, shape) in SHAPES.items():
        size = 2.0 ** torch.randint(-16, 17, (ROWS[kind] * world, *shape), generator=g)
        grads[name] = (torch.randn(size.shape, generator=g, dtype=torch.float64) * size).to(dtype)
        grads[name][~marks[kind]] = 0
    return marks, grads


def adding(order):
    """add_rows, but in the order order(rank, world) of the senders."""
    def add_rows(block, values, route):
        rank, world = dist.get_rank(), dist.get_world_size()
        numbers = route.numbers.wait()
        parts = list(zip(numbers.split(route.received), values.split(route.received)))
        for sender in order(rank, world):
            rows, part = parts[sender]
            block.index_add_(0, rows, part.to(block.dtype))
        return block.index_copy_(0, numbers.long(), block[numbers].div_(world))
    return add_rows


def rounding(block, values, route):
    """add_rows, but in the gradient's own dtype."""
    right, numbers = add_rows(torch.zeros_like(block, dtype=values.dtype), values, route), route.numbers.wait().long()
    return block.index_copy_(0, numbers, right[numbers].to(block.dtype))


add_rows = tg.add_rows
WAYS = {"as it is": add_rows, "rank order": adding(lambda rank, world: range(world)),
        "own first": adding(lambda rank, world: sorted(range(world), key=lambda sender: (sender != rank, sender))),
        "reversed": adding(lambda rank, world: reversed(range(world))),
        "rotated": adding(lambda rank, world: [(sender + 1) % world for sender in range(world)]), "rounding": rounding}


def bits(t):
    return t.contiguous().view(torch.uint8)


def compare(rank, world, dtype, way):
    """Sparse exchanges beside dense ones, turn after turn. -> [(case, table, same bits)]; whether what was sent should have
    been sent, in the sparse exchanges and the dense."""
    exchange, other, same = tg.Exchange(rank, world), tg.Exchange(rank, world), []
    blocks = {name: torch.zeros((ROWS[kind], *shape)) for name, (kind, shape) in SHAPES.items()}
    room = {name: torch.empty((world, *block.shape), dtype=dtype) for name, block in blocks.items()}
    want, tg.add_rows = Counter(), WAYS[way]
    try:
        for turn in range(len(CASES)):
            marks, grads = draw(rank, world, dtype, turn)
            touched = {kind: tg.touched_rows(mark.numpy(), world, torch.empty(len(mark), dtype=torch.int32))
                       for kind, mark in marks.items()}
            counts = exchange.announce(touched)
            routes = exchange.route(touched, counts)
            pending = {}
            for name, (kind, _) in SHAPES.items():
                stale = grads[name].clone()
                stale[~marks[kind]] = torch.nan  # nobody may read it
                pending[name] = exchange.reduce_rows(name, stale, routes[kind], blocks[name])
            for name in reversed(SHAPES):
                kind, shape = SHAPES[name]
                mean = other.reduce(name, "reduce_scatter", grads[name], room[name]).wait()
                got = pending[name].wait()
                same.append((case_of(kind, turn), name, torch.equal(bits(got), bits(mean))))
                assert got.data_ptr() == blocks[name].data_ptr()
                got.index_fill_(0, routes[kind].numbers.result.long(), 0)  # as the optimizer does
                assert not got.any()
                away = marks[kind].view(world, -1)[[owner for owner in range(world) if owner != rank]].sum().item()
                want[f"rows {name}"] += away * math.prod(shape) * dtype.itemsize
                if name != "a":  # whose row numbers b's are
                    want[f"row numbers {kind}"] += 4 * away
            want["counts tokens bigrams"] += (world - 1) * 2 * 8
    finally:
        tg.add_rows = add_rows
    dense = {f"all_to_all {name}": len(CASES) * (world - 1) * room[name][0].nbytes for name in SHAPES}
    return same, exchange.sent == dict(want), other.sent == dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [3, 8])
def test_touched_rows_are_averaged_like_all_rows(workers, world, dtype):
    """To the bit, whoever touches what, several exchanges on end; and the bytes are those of the rows that went to others."""
    for same, sent, sent_dense in workers(world, compare, dtype, "as it is"):
        assert len(same) == 3 * len(CASES) and all(good for *_, good in same), same
        assert {case for case, name, _ in same if name == "b"} == set(CASES)
        assert sent and sent_dense


@pytest.mark.slow
@pytest.mark.parametrize("way, dtype", [(way, torch.float32) for way in WAYS if way not in ("as it is", "rounding")]
                         + [(way, torch.bfloat16) for way in WAYS if way != "as it is"])
@pytest.mark.parametrize("world", [4])
def test_the_numbers_tell_wrong_sums(workers, world, way, dtype):
    """The test above fails for every order but the ranks', where all ranks touch a row; and for a sum in bf16."""
    for rank, (same, *_) in enumerate(workers(world, compare, dtype, way)):
        told = [not good for case, _, good in same if case in ("all", "same")]
        if way == "rank order" or way == "own first" and rank < 2:  # b + a is a + b
            assert all(good for *_, good in same)
        else:
            assert any(told) and len(told) == 6, (rank, same)


# ------------------------------------------------------------------------------------------------------------- counts

def bytes_sent(cfg, rank, world, steps):
    """What a rank sends, by the formulas, in steps [(plan, the rows it touched since the last Adam step, by kind)]."""
    sent, shapes, tied = Counter(), tg.param_shapes(cfg, world), True
    item = {"model": tg.dtype_of(cfg.dtype).itemsize, "float32": 4}
    share = lambda nbytes: nbytes * (world - 1) // world
    for now, touched in steps:
        kinds = {}
        for row in cfg.params:
            if row.optimizer == "adam" and not now.do_adam or tied and row.tied_to:
                continue
            nbytes = item[row.dtype] * math.prod(shapes[row.name])
            if row.exchange == "sparse":
                rows = shapes[row.name][0]
                kinds[row.rows] = sum(number // (rows // world) != rank for number in touched[row.rows])
                sent[f"rows {row.name}"] += kinds[row.rows] * nbytes // rows
            elif row.exchange == "all_reduce":
                sent[f"all_reduce {row.name}"] += 2 * share(nbytes)
            else:
                sent[f"{'all_to_all' if row.reduction == 'fp32' else 'reduce_scatter'} {row.name}"] += share(nbytes)
            if row.exchange != "all_reduce":
                sent[f"all_gather {row.name}"] += share(nbytes)
        if kinds:
            sent[f"counts {' '.join(kinds)}"] += (world - 1) * 8 * len(kinds)
        for kind, away in kinds.items():
            sent[f"row numbers {kind}"] += 4 * away
        if now.split:
            tied = False
            for moment in "mv":
                sent[f"all_gather lm_head.{moment}"] += share(4 * math.prod(shapes["lm_head"]))
    return dict(sent)


def steps_of(cfg, rank, world):
    """Plans and touched rows of a run, from a loader alone."""
    loader, steps, seen = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, False), [], None
    for now in (tg.plan(cfg, step) for step in range(cfg.steps)):
        seen = seen or {"tokens": set(), "bigrams": set()}
        for m in next_batch(loader, now.tokens, now.longest):
            seen["tokens"].update(m.inputs.tolist())
            seen["bigrams"].update(m.bigram.tolist())
        steps.append((now, {kind: set(rows) for kind, rows in seen.items()}))
        seen = None if now.do_adam else seen
    loader.close()
    return steps


def account(rank, world, cfg):
    """A run's bytes, and whether nothing of a gradient was left after any step that should not be."""
    _, exchange, model, optimizer = build(rank, world, cfg)
    batches, sparse = batches_of(cfg, rank, world), {row.name for row in cfg.params if row.exchange == "sparse"}
    clean = optimizer.blocks.keys() == sparse
    for step in range(cfg.steps):
        batch = batches.next()
        tg.train_step(model, optimizer, batch)
        clean &= not any(block.any() for block in optimizer.blocks.values())
        for name in TABLES:  # stale only where the next micro-batch overwrites and nobody else reads
            clean &= bool(optimizer.main_grad[name].any()) == (name in sparse or not batch.now.do_adam)
        clean &= all(grad.fresh == (name != "lm_head" or batch.now.do_adam) for name, grad in optimizer.weight_grads.items())
        clean &= bool(optimizer.gradients()) != batch.now.do_adam and not optimizer.routes
        clean &= all(p.grad is None for name, p in model.named_parameters() if batch.now.do_adam or name in optimizer.main_grad)
    batches.close()
    return exchange.sent, clean


@pytest.mark.slow
@pytest.mark.parametrize("world, tables", [(4, TABLES), (2, ("embed",)), (2, ())])
def test_a_runs_bytes(workers, cfg, world, tables):  # noqa: F811
    cfg = exchanged(exchanged(replace(cfg, dtype="bfloat16", polar_dtype="bfloat16"), "dense"), "sparse", tables)
    for rank, (sent, clean) in enumerate(workers(world, account, cfg)):
        assert sent == bytes_sent(cfg, rank, world, steps_of(cfg, rank, world))
        assert clean


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    make_corpus(folder / "corpus")
    return folder


def closing_bytes(place, *more):
    before = set(place.glob("records/**/*.txt"))
    with Launch(place, "--preset", "cpu", "--data", "corpus", *settings(*more), world=2) as launch:
        assert launch.wait() == [0, 0], launch.err
    (log,) = set(place.glob("records/**/*.txt")) - before
    end = log.read_text(encoding="utf-8").rsplit("peak memory", 1)[1]
    lines = re.findall(r"^bytes sent by rank 0, (.+): (\d+)$", end, re.M)
    assert len(lines) == end.count("bytes sent") and lines == sorted(lines)
    return {what: int(n) for what, n in lines}


@pytest.mark.slow
def test_the_bytes_are_in_the_log(place):
    """In its closing block, warm-up left out; fewer than without the sparse exchange, everything else alike."""
    dense = [f"params.{name}.exchange=reduce_scatter" for name in TABLES]
    for name, more in (("sparse", []), ("dense", dense)):
        cfg = replace(tg.CPU, data=str(place / "corpus"))  # noqa: F811
        for setting in (*TINY, *more):
            cfg = tg.override(cfg, setting)
        want = bytes_sent(cfg, 0, 2, steps_of(cfg, 0, 2))
        assert closing_bytes(place, *more) == want
        if name == "sparse":
            sparse = want
    differing = dict(sparse.items() - want.items()), dict(want.items() - sparse.items())
    assert differing[0].keys() == {"counts tokens bigrams", "row numbers tokens", "row numbers bigrams",
                                   *(f"rows {name}" for name in TABLES)}
    assert differing[1].keys() == {f"reduce_scatter {name}" for name in TABLES}
    assert sum(differing[0].values()) < 0.2 * sum(differing[1].values())


def test_a_table_of_any_size(cfg):  # noqa: F811
    """Tables are not padded; where no rank owns a part, any size will do."""
    cfg = replace(cfg, bigram_rows=321)
    tg.check_config(cfg, 1)
    tg.check_config(tg.override(cfg, "params.bigram_embed.exchange=all_reduce"), 2)
    with pytest.raises(tg.UserError, match="321 rows of bigram_embed do not divide"):
        tg.check_config(cfg, 2)


# ------------------------------------------------------------------------------------------------------------- memory

WATCHED = ("announce", "route", "collect", "scatter", "release")


class Watch(TorchDispatchMode):
    """seen[label]: bytes of the largest tensor that an operation made, elements of the largest that one cleared or copied into;
    the label is that of the innermost watched call."""

    def __init__(self):
        super().__init__()
        self.inside, self.seen = ["rest"], {"rest": [0, 0]}

    def call(self, owner, name):
        original, self.seen[name] = getattr(owner, name), [0, 0]

        def watched(*args, **kwargs):
            self.inside.append(name)
            answer = original(*args, **kwargs)
            self.inside.pop()
            return answer
        setattr(owner, name, watched)
        return lambda: setattr(owner, name, original)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, seen = func(*args, **(kwargs or {})), self.seen[self.inside[-1]]
        given, made = ([t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in ((args, kwargs), result))
        old = {t.untyped_storage().data_ptr() for t in given}
        seen[0] = max([seen[0], *(s.nbytes() for s in (t.untyped_storage() for t in made) if s.data_ptr() not in old)])
        if func.__name__.split(".")[0] in ("zero_", "fill_", "copy_", "mul_", "add_", "masked_fill_"):
            seen[1] = max(seen[1], given[0].numel())
        return result


def largest(rank, world, cfg, steps):
    """What is seen in these steps, of which the first begins with no gradient."""
    _, _, model, optimizer = build(rank, world, cfg)
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, False)
    batches, watch = tg.Batches(loader, [tg.plan(cfg, step) for step in steps]), Watch()
    undo = [watch.call(*each) for each in ((tg, "adam_update"), (tg, "add_rows"), *((optimizer, name) for name in WATCHED))]
    try:
        with watch:
            for _ in steps:
                tg.train_step(model, optimizer, batches.next())
    finally:
        for each in undo:
            each()
    batches.close()
    return watch.seen


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_no_table_is_allocated_or_cleared(workers, cfg, world):  # noqa: F811
    """In steps before and after the split, with tables far larger than what belongs to a token: by what takes over, announces,
    sends, adds up and drops gradients, less than half of the smallest table; by all else but Adam's arithmetic, less than
    half of the next larger one, for logits and the head's gradient are no smaller."""
    stages = tuple(replace(stage, tokens=4 * 12) for stage in cfg.stages)
    cfg = replace(cfg, dtype="bfloat16", polar_dtype="bfloat16", padded_vocab=6_000, bigram_rows=60_000, head_chunk=6,
                  slices=4, stages=stages)
    cfg = tg.override(cfg, "params.lm_head.reduction=fp32")  # the backend's takes memory for what comes
    small, middle, large = (math.prod(tg.param_shapes(cfg, 1)[name]) for name in ("embed", "value_embeds", "bigram_embed"))
    assert 4 * small < middle < large
    for seen in workers(world, largest, cfg, range(4, 8)):
        # The watch sees what there is to see: Adam's fp32 numbers of a table, and some for the tokens.
        assert seen["adam_update"][0] >= 4 * large / world and seen["adam_update"][1] >= large / world
        assert seen["collect"][0] >= 12 * cfg.dim * 2
        assert (seen["announce"][0] > 0) == (seen["route"][0] > 0) == (seen["add_rows"][0] > 0) == (world > 1)
        for limit, names in ((small / 2, (*WATCHED, "add_rows")), (middle / 2, ("rest",))):
            for name in names:
                assert seen[name][0] < 2 * limit and seen[name][1] < limit, (name, seen)


@pytest.mark.slow
def test_the_watch_sees_autograds_tables(workers, cfg):  # noqa: F811
    """The test above would fail without main_grad."""
    stages = tuple(replace(stage, tokens=4 * 12) for stage in cfg.stages)
    cfg = replace(cfg, dtype="bfloat16", polar_dtype="bfloat16", bigram_rows=20_000, main_grad=False, slices=2, stages=stages)
    (seen,) = workers(1, largest, cfg, range(4, 5))
    assert seen["rest"][0] >= 2 * 20_000 * cfg.dim


# --------------------------------------------------------------------------------------------- gradients kept and put back

def leave_and_go_on(rank, world, cfg, left):
    """A run, and another that takes over after `left` steps. -> what was handed over, and whether they are one."""
    _, _, model, optimizer = build(rank, world, cfg)
    batches = batches_of(cfg, rank, world)
    for _ in range(left):
        batch = batches.next()
        tg.train_step(model, optimizer, batch)
    saved, parts = tg.host_copy(optimizer.gradients()), tg.snapshot(model, optimizer)
    kept = {name: grad.clone() for name, grad in optimizer.main_grad.items()}
    rest = []
    for _ in range(left, cfg.steps):
        tg.train_step(model, optimizer, batches.next())
        rest.append(digest(model))
    batches.close()

    _, _, model, optimizer = build(rank, world, cfg, seed=1)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    for grad in optimizer.main_grad.values():
        grad.fill_(torch.nan)
    for part, state in zip((model, optimizer), parts):
        part.load_state(state)
    touched = optimizer.load_gradients(saved)
    good = touched.keys() == ({"tokens", "bigrams"} if left % 2 else set())
    for name, grad in optimizer.main_grad.items():
        want = kept[name] if name in saved else torch.zeros_like(grad)
        if touched and name in TABLES:
            rows = touched[optimizer.rows[name].rows].long()
            want[rows] = kept[name][rows]
        good &= torch.equal(bits(grad), bits(want))
    in_place = optimizer.main_grad
    good &= all((p.grad is not None) == (name in saved and name not in in_place) for name, p in model.named_parameters())
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, False, batch.position)
    batches = tg.Batches(loader, [tg.plan(cfg, step) for step in range(left, cfg.steps)], touched)
    again = []
    for _ in rest:
        tg.train_step(model, optimizer, batches.next())
        again.append(digest(model))
    batches.close()
    return set(saved), good, again == rest


@pytest.mark.slow
@pytest.mark.parametrize("world, left, how", [(1, 3, "sparse"), (2, 4, "sparse"), (2, 7, "dense")])
def test_gradients_can_be_handed_over(workers, cfg, world, left, how):  # noqa: F811
    """After a step without Adam: the tables' touched rows and other Adam parameters' gradients, before and after the split;
    after one with it, nothing."""
    cfg = exchanged(replace(cfg, dtype="bfloat16", polar_dtype="bfloat16"), how)
    adam = {row.name for row in cfg.params if row.optimizer == "adam"} - set(TABLES)
    want = adam | {f"{name} rows" for name in TABLES} | {"touched tokens", "touched bigrams"} if left % 2 else set()
    for keys, good, same in workers(world, leave_and_go_on, cfg, left):
        assert keys == want and good and same


def warm(rank, world, cfg):
    ranks, exchange, model, optimizer = build(rank, world, cfg)
    data = tg.find_data(cfg)
    tg.warm_up(cfg, ranks, data, model, optimizer, tg.ValLoader(cfg, data.val, rank, world, False))
    left = [*optimizer.main_grad.values(), *optimizer.blocks.values()]
    return len(left), any(t.any() for t in left), optimizer.gradients(), optimizer.touched, exchange.sent


@pytest.mark.slow
@pytest.mark.parametrize("world, last", [(1, 2), (2, 1)])
def test_warm_up_leaves_no_gradient(workers, cfg, world, last):  # noqa: F811
    """Nor counts bytes, whether it ends with an Adam step or, with one step in the last stage, without."""
    cfg = replace(cfg, stages=(*cfg.stages[:3], replace(cfg.stages[3], steps=last)))
    assert tg.warmup_steps(cfg)[-1] % 2 == (last == 2)
    for count, left, gradients, touched, sent in workers(world, warm, cfg):
        assert count == (7 if world == 1 else 10) and not left
        assert gradients == {} and touched == {} and sent == {}


# -------------------------------------------------------------------------------------------------------- collective order

def recorded(rank, world, cfg, silent):
    """All collectives of a run from step 1 on, and passes, in order; the last of `silent` ranks have nothing to send."""
    _, _, model, optimizer = build(rank, world, cfg)
    batches, events, undo = batches_of(cfg, rank, world), [], []

    def record(owner, name, label):
        original = getattr(owner, name)

        def recording(*args, **kwargs):
            tensor = f" {args[0].dtype}"[7:] if "_" in label else ""
            events.append((label + tensor, threading.current_thread() is threading.main_thread()))
            return original(*args, **kwargs)
        setattr(owner, name, recording)
        undo.append(lambda: setattr(owner, name, original))

    try:
        for name in ("all_to_all_single", "all_reduce", "broadcast"):
            record(dist, name, f"{name}_")
        for name in ("_reduce_scatter", "_all_gather"):
            record(tg, name, name)
        record(torch.autograd, "backward", "backward")
        record(model, "activations", "forward")
        record(optimizer, "collect", "collect")
        record(optimizer, "scatter", "scatter")
        for _ in range(cfg.steps):
            batch = batches.next()
            if rank >= world - silent:
                last = batch.micro_batches[-1]
                last.touched = {kind: t._replace(rows=t.rows[:0], owners=[0] * world) for kind, t in last.touched.items()}
            tg.train_step(model, optimizer, batch)
            events.append(("step", True))
    finally:
        for each in undo:
            each()
    batches.close()
    return [label for label, _ in events], all(main for _, main in events)


@pytest.mark.slow
@pytest.mark.parametrize("world, slices, silents", [(2, 2, (0, 1, 2)), (4, 8, (1,))])
def test_one_order_of_collectives(workers, cfg, world, slices, silents):  # noqa: F811
    """On all ranks the same, from one thread, whether a rank has anything to send or not: counts before the last micro-batch's
    forward, row numbers between it and its backward, rows with the other gradients."""
    cfg = replace(cfg, dtype="float32", polar_dtype="float32", slices=slices)
    ranks = [rank for silent in silents for rank in workers(world, recorded, cfg, silent)]
    events = ranks[0][0]
    assert all(main and each == events for each, main in ranks)
    counts, numbers, rows = (f"all_to_all_single_{dtype}" for dtype in ("int64", "int32", "float32"))
    for step, got in enumerate(" ".join(events).split(" step")[:-1]):
        now, got, want = tg.plan(cfg, step), got.split(), ["forward", "backward", "collect"] * (slices // world)
        if now.do_adam:
            want[-3:] = [counts, "forward", numbers, numbers, "backward", "collect"]
        assert got[:len(want) + 1] == [*want, "scatter"], (step, got)
        sent = Counter(got[len(want):])
        assert sent[rows] == (0 if not now.do_adam else 3 if step > tg.split_step(cfg) else 2)
        assert sent[counts] == sent[numbers] == 0
