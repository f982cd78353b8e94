"""Checkpoints: runs killed at any moment, also while they write one, go on bit for bit. Refusals are in test_bad_input.py."""
import dataclasses
import itertools
import json
import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import write_shard
from launch import TINY, At, AtWrite, Launch, die, list_checkpoints, make_corpus, settings

SMALL = ("warmup=false", "slices=2", "val_slice_tokens=64",
         *(f"stages.{i}.tokens={4 * T}" for i, T in enumerate((24, 32, 48, 48))))
LONG = tuple(f"stages.{i}.steps=3" for i in range(4))  # 12 steps; else 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Its first training shard ends in the middle of a run."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder, train=(2200, 8000))
    return folder


@pytest.fixture(scope="module")
def launch(corpus):
    """launch(folder, *arguments, ...): a small run there. `change` are settings besides."""
    def launch(folder, *arguments, change=(), data=corpus, **options):
        folder.mkdir(exist_ok=True)
        return Launch(folder, "--preset", "cpu", "--data", data, *settings(*SMALL, *change), *arguments, **options)
    return launch


@pytest.fixture(scope="module")
def whole(launch, tmp_path_factory):
    """whole(world, *change): the folder and the screen output of a run that nothing stopped, with no checkpoints."""
    runs = {}

    def whole(world, *change):
        if (world, change) not in runs:
            folder = tmp_path_factory.mktemp("whole")
            with launch(folder, "--save", "model.pt", change=change, world=world) as run:
                assert set(run.wait()) == {0}, run.err
            runs[world, change] = folder, run.out
        return runs[world, change]
    return whole


@pytest.fixture
def stopped(launch, tmp_path_factory, tmp_path):
    """stopped(world, step, *change): a folder of its own with a run killed after it wrote the checkpoint of `step` steps."""
    def stopped(world, step, *change):
        if (world, step, change) not in STOPPED:
            STOPPED[world, step, change] = folder = tmp_path_factory.mktemp("stopped")
            with launch(folder, "--checkpoint-every", 1, change=change, world=world,
                        faults={rank: At("validates", step + 1, die) for rank in range(max(world, 1))}) as run:
                run.wait()
            assert [path.name for path in folder.glob("records/**/*.checkpoint/*")] == [f"step{step:08d}"], run.err
        return shutil.copytree(STOPPED[world, step, change], tmp_path / "stopped")
    return stopped


STOPPED = {}
ATTEMPTS = Path("records", "other", "attempts")


def logs(folder):
    """The text of each log below `folder`, without the script's source, by name; a run may be changing its checkpoints there."""
    source = Path(tg.__file__).read_text(encoding="utf-8")
    return {path.name: path.read_text(encoding="utf-8").removeprefix(source) for path in folder.glob("records/*/*/*.txt")}


def validations(folder):
    return {pair for text in logs(folder).values() for pair in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", text, re.M)}


def training_losses(screen):
    return dict(re.findall(r"^step (\d+)/\d+  loss (\S+)", screen, re.M))


def closing(text):
    """The closing block of a complete log."""
    return dict(re.findall(r"^(\w+): (\S+)$", text[text.rindex("\nstep:"):], re.M))


def newest(folder):
    """The checkpoint that --resume would take, or None."""
    return tg.Checkpoint.find(str(folder / ATTEMPTS)) if list(folder.glob("records/**/step????????")) else None


def complete(folder):
    """The closing blocks of the complete logs there: several only if a run was killed between its log's end and its own."""
    return [closing(text) for text in logs(folder).values() if text.endswith("complete: yes\n")]


def same_end(folder, want):
    """The run in `folder`, complete now, ended as the one in `want`, and left no checkpoint."""
    assert {end["val_loss"] for end in complete(folder)} == {end["val_loss"] for end in complete(want)}
    assert (folder / "model.pt").read_bytes() == (want / "model.pt").read_bytes()
    assert not list(folder.glob("records/**/*.checkpoint"))


# ------------------------------------------------------------------------------------------- killed at random moments

def kill_soon(run, folder, before, rng):
    """SIGKILL to all ranks, within a tenth of a second after a random one of the first steps."""
    steps = rng.randrange(4)
    while run.running and sum(len(re.findall(r"^step:\d+/\d+ train_time", text, re.M))
                              for name, text in logs(folder).items() if name not in before) < steps:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    run.kill()


@pytest.mark.slow
@pytest.mark.parametrize("world, change", [
    (0, ("dtype=bfloat16",)), (4, ("dtype=bfloat16", "params.*.reduction=fp32")),
    (2, ("main_grad=false", "params.embed.exchange=reduce_scatter")),
], ids=lambda x: "-".join(x) if isinstance(x, tuple) else str(x))
def test_killed_runs_end_as_if_never_stopped(launch, whole, tmp_path, world, change):
    """Four kills: two as a random step begins, after an odd number of steps and after an even one; two at any time."""
    rng, folder, change = random.Random(f"{world} {change}"), tmp_path / "run", (*change, *LONG)
    first, second = rng.randrange(2, 8), rng.choice((2, 4))
    want, want_screen = whole(world, *change)
    resumed, screen = [], ""
    for kill in (first, second, "soon", "soon", None):
        found, before = newest(folder), set(logs(folder))
        resumed += [found.about["step"]] if found else []
        # A checkpoint after each step where the kill is to come after a known one; else now and then.
        options = ["--checkpoint-every", 1 if isinstance(kill, int) else rng.randint(1, 3), "--save", "model.pt"]
        faults = {rank: At("train_step", kill, die) for rank in range(max(world, 1))} if isinstance(kill, int) else {}
        options += ["--resume", ATTEMPTS] if found else []
        with launch(folder, *options, change=change, world=world, faults=faults) as run:
            if kill == "soon":
                kill_soon(run, folder, before, rng)
            codes = set(run.wait())
        screen += run.out
        assert codes == {0} or kill and -9 in codes, run.err
        if complete(folder) and not newest(folder):
            break
    assert len(resumed) >= 2 and resumed[:2] == [first - 1, first + second - 2]
    assert resumed == sorted(resumed) and {step % 2 for step in resumed} == {0, 1}
    assert any(f".from{resumed[0]}." in name for name in logs(folder))
    assert len(logs(folder)) <= len(resumed) + 1  # a kill may come before there is a log
    same_end(folder, want)
    assert validations(folder) == validations(want)
    assert training_losses(screen).items() <= training_losses(want_screen).items()
    assert set(training_losses(screen)) >= {str(step) for step in range(resumed[-1] + 1, 13)}


@pytest.mark.slow
def test_a_run_with_warm_up_goes_on(launch, whole, stopped):
    """The checkpoint is put back after the warm-up's traces are gone."""
    change = ("warmup=true",)
    folder = stopped(0, 5, *change)
    with launch(folder, "--resume", ATTEMPTS, "--save", "model.pt", change=change) as run:
        assert run.wait() == [0], run.err
    same_end(folder, whole(0, *change)[0])


# --------------------------------------------------------------------------------------------- killed during the write

@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_change_to_files(launch, whole, stopped, tmp_path, victim):
    """One of two ranks dies before each change that saving makes, what an earlier kill left behind lying there too."""
    start, changes = stopped(2, 5), []
    checkpoint = newest(start).path
    checkpoint.with_name("step00000006.partial").mkdir()
    (checkpoint.with_name("step00000006.partial") / "rank1.pt").write_bytes(b"half")
    for n in itertools.count(1):
        folder = shutil.copytree(start, tmp_path / str(n))
        options = ["--resume", ATTEMPTS, "--checkpoint-every", 1, "--save", "model.pt"]
        with launch(folder, *options, world=2,
                    faults={victim: AtWrite("save_checkpoint", n, die), 1 - victim: At("save_checkpoint", 2, die)}) as run:
            codes = run.wait()
        changes += re.findall(r"^change: (.+)", run.out, re.M)
        if len(changes) < n:  # there are no more: both got as far as the next checkpoint
            assert -9 in codes
            break
        assert codes[victim] == -9
        found = newest(folder)
        assert found.about["step"] == (6 if "os.rename" in changes[:n - 1] else 5)
        with launch(folder, *options, world=2, faults={0: At("train_step", 2, list_checkpoints)}) as run:
            assert set(run.wait()) == {0}, run.err
        assert f"checkpoints: step{found.about['step'] + 1:08d}\n" in run.out  # and nothing half written or older
        same_end(folder, whole(2)[0])
    own = ["open", "half of torch.save", "os.fsync"]
    assert set(own) <= set(changes)
    if victim == 0:
        assert [name for name in changes if name != "os.fsync"] == [
            "os.remove", "os.rmdir", "os.mkdir", *own[:2], "open", "os.rename", "os.rename", *["os.remove"] * 3, "os.rmdir"]


@pytest.mark.slow
def test_killed_in_the_first_checkpoint(launch, whole, tmp_path):
    """There is nothing to go on from, which is said; a run that then starts again can itself be resumed by the folder."""
    folder, options = tmp_path / "run", ["--checkpoint-every", 3, "--save", "model.pt"]
    with launch(folder, *options, faults={0: AtWrite("save_checkpoint", 5, die)}) as run:
        assert run.wait() == [-9]
    assert list(folder.glob("records/**/rank0.pt"))
    with launch(folder, *options, "--resume", ATTEMPTS) as run:
        assert run.wait() == [1] and "no checkpoint there" in run.err and len(run.err.splitlines()) == 1
    with launch(folder, *options, faults={0: At("train_step", 5, die)}) as run:
        assert run.wait() == [-9]
    with launch(folder, *options, "--resume", ATTEMPTS) as run:
        assert run.wait() == [0], run.err
    assert (folder / "model.pt").read_bytes() == (whole(0)[0] / "model.pt").read_bytes()


@pytest.mark.slow
def test_killed_as_the_end_removes_the_last_checkpoint(launch, whole, stopped):
    """What is half removed is not taken for a checkpoint."""
    folder = stopped(0, 5)
    with launch(folder, "--resume", ATTEMPTS, "--save", "model.pt", faults={0: AtWrite("shutil.rmtree", 2, die)}) as run:
        assert run.wait() == [-9], run.err
    with launch(folder, "--resume", ATTEMPTS) as run:
        assert run.wait() == [1] and "no checkpoint there" in run.err
    assert complete(folder) and (folder / "model.pt").read_bytes() == (whole(0)[0] / "model.pt").read_bytes()


# --------------------------------------------------------------------------------------------- what is in a checkpoint

def tensors(saved):
    parts = [part for part in saved.values() if isinstance(part, dict)]
    return [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("world, step", [(2, 5), (4, 6)])
def test_each_rank_keeps_its_own_shards(stopped, whole, world, step):
    folder, ranks = stopped(world, step, "dtype=bfloat16"), max(world, 1)
    path = newest(folder).path
    assert sorted(p.name for p in path.iterdir()) == ["about.json", *(f"rank{r}.pt" for r in range(ranks))]
    saved = [torch.load(path / f"rank{r}.pt", weights_only=True) for r in range(ranks)]
    (text,) = logs(folder).values()
    values = json.loads(re.search(r"^config: (.+)$", text, re.M)[1])
    cfg = tg.config_from_dict({name: value for name, value in values.items() if name not in ("name", "seed")})
    for row in cfg.params:
        shape = torch.Size(tg.param_shapes(cfg, ranks)[row.name])
        parts = [s["model"][row.name] for s in saved]
        moments = [s["optimizer"][row.name + (".m" if row.optimizer == "adam" else ".momentum")] for s in saved]
        assert [m.shape for m in moments] == [p.shape for p in parts]
        if row.sharded:
            assert len({p.shape for p in parts}) == 1 and sum(p.numel() for p in parts) == shape.numel()
        else:
            assert all(torch.equal(p, parts[0]) and p.shape == shape for p in parts)
        # A rank's own sums of gradients, over all rows, wait for the next step of Adam after an odd number of steps.
        waits = row.optimizer == "adam" and step % 2 == 1
        key = f"{row.name} rows" if row.rows else row.name  # of tables, those that were touched
        assert [key in s["gradients"] for s in saved] == [waits] * ranks
        if waits and row.rows:
            touched = [s["gradients"][f"touched {row.rows}"] for s in saved]
            assert [len(s["gradients"][key]) for s in saved] == [len(t) for t in touched]
            assert all(len(t) < shape[0] / 2 for t in touched)
        if row.optimizer == "normuon":
            assert all(s["optimizer"][f"{row.name}.low"].dtype == torch.uint16 for s in saved)
    for r, s in enumerate(saved):
        assert s["optimizer"]["is_tied"] == (step < 6) and s["optimizer"]["lm_head.steps"] == step // 2
        bytes_of = [t.nbytes for t in tensors(s)]
        assert [t.untyped_storage().nbytes() for t in tensors(s)] == bytes_of  # a view's would be the whole table's
        assert sum(bytes_of) < (path / f"rank{r}.pt").stat().st_size < sum(bytes_of) + 500 * len(bytes_of) + 5000


@pytest.mark.slow
def test_about(stopped):
    """What a person finds in about.json."""
    folder = stopped(2, 5)
    about, (text,) = newest(folder).about, logs(folder).values()
    assert set(about) == {"step", "train_ms", "position", "task", "script", "torch"} and about["step"] == 5
    logged = int(re.search(r"^step:5/8 train_time:(\d+)ms", text, re.M)[1])
    assert logged - 1 <= about["train_ms"] < logged + 60000
    assert about["task"]["processes"] == 2 and about["task"]["seed"] == 0 and about["torch"] == torch.__version__
    assert re.search(rf"^data: {re.escape(about['task']['data'])}(, packed in .*)?$", text, re.M)
    assert re.findall(r"^checkpoint: after step (\d)$", text, re.M) == ["1", "2", "3", "4", "5"]


# --------------------------------------------------------------------------------------------------- the command line

DIES = {0: At("train_step", 1, die)}  # one has seen enough when training begins


def test_forms_of_resume(stopped, monkeypatch):
    folder = stopped(0, 5)
    path = newest(folder).path
    run = path.parent.relative_to(folder)
    shutil.copytree(folder / run, folder / run.with_name("seed0_other.checkpoint"))
    monkeypatch.chdir(folder)
    log = run.with_suffix("")
    for where in (f"{log}.txt", f"{log}.checkpoint", f"{log}.checkpoint/", f"{log}.from2.txt", folder / run):
        assert tg.Checkpoint.find(str(where)).path.resolve() == path.resolve()
    assert tg.Checkpoint.find(f"{ATTEMPTS}/seed0_other.txt").path.parent.name == "seed0_other.checkpoint"
    shutil.rmtree(run.with_name("seed0_other.checkpoint"))
    for where in (ATTEMPTS, f"{ATTEMPTS}/", folder / ATTEMPTS):
        assert tg.Checkpoint.find(str(where)).path.resolve() == path.resolve()


@pytest.mark.slow
def test_the_log_of_a_resumed_run(launch, whole, stopped):
    folder = stopped(0, 5)
    path = newest(folder).path
    about = json.loads((path / "about.json").read_text())
    (path / "about.json").write_text(json.dumps(about | {"train_ms": 1e6}))
    with launch(folder, "--resume", ATTEMPTS, "--save", "model.pt") as run:
        assert run.wait() == [0], run.err
    name = path.parent.stem
    assert set(logs(folder)) == {f"{name}.txt", f"{name}.from5.txt"}
    text = logs(folder)[f"{name}.from5.txt"]
    assert f"\nresumed: {name} after step 5\n" in text and f"resumed: {name} after step 5\n" in run.out
    steps = [tuple(map(int, m)) for m in re.findall(r"^step:(\d+)/8 (?:val_loss:\S+ )?train_time:(\d+)ms", text, re.M)]
    assert [step for step, _ in steps] == [6, 6, 7, 8, 8] and all(1e6 <= ms < 1.06e6 for _, ms in steps)
    end = closing(text)
    assert 1e6 <= int(end["train_time_ms"]) < 1.06e6 and end["resumed_after_step"] == "5" and end["steps"] == "8"
    assert "resumed" not in logs(folder)[f"{name}.txt"]
    same_end(folder, whole(0)[0])
    with launch(folder, "--resume", ATTEMPTS) as again:  # it is complete
        assert again.wait() == [1] and "no checkpoint there" in again.err


@pytest.mark.slow
def test_resumed_twice_from_one_step(launch, stopped):
    folder = stopped(0, 5)
    for _ in range(2):
        with launch(folder, "--resume", ATTEMPTS, faults=DIES) as run:
            run.wait()
    assert sorted(name.split(".", 1)[1] for name in logs(folder)) == ["from5.txt", "from5_2.txt", "txt"]


@pytest.mark.slow
def test_off_by_default(whole):
    """Nothing but the log, and in it no word of checkpoints."""
    folder, screen = whole(0)
    (log,) = logs(folder)
    assert sorted(path.name for path in folder.rglob("*")) == sorted(["records", "other", "attempts", log, "model.pt"])
    assert "checkpoint" not in logs(folder)[log] + screen and "resumed" not in logs(folder)[log] + screen


@pytest.mark.slow
def test_the_end_writes_no_checkpoint(launch, tmp_path):
    """After the last step there is nothing to resume, and a run that is complete leaves none."""
    with launch(tmp_path / "run", "--checkpoint-every", 4, faults={0: At("save_checkpoint", 2, die)}) as run:
        assert run.wait() == [0]
    (text,) = logs(tmp_path / "run").values()
    assert re.findall(r"^checkpoint: .*", text, re.M) == ["checkpoint: after step 4"]
    assert not list((tmp_path / "run").glob("records/**/*.checkpoint"))


@pytest.mark.slow
def test_never_a_timed_record(tmp_path):
    """With the preset's own task too, whose track a run without checkpoints belongs to."""
    rng = np.random.default_rng(0)
    (tmp_path / "data" / "local").mkdir(parents=True)
    for split, count in (("train", 5 * tg.train_tokens(tg.CPU) // 4), ("val", tg.CPU.val_slices * tg.CPU.val_slice_tokens + 1)):
        tokens = rng.integers(0, 256, count)
        tokens[::100] = 256
        write_shard(tmp_path / "data" / "local" / f"x_{split}_000000.bin", tokens, 257, 256)
    options = ["--preset", "cpu", "--set", "warmup=false", "--set", "val_every=0"]

    def until(call, *arguments):
        with Launch(tmp_path, *options, *arguments, faults={0: At("train_step", call, die)}) as run:
            assert run.wait() == [-9], run.err
        return {path.relative_to(tmp_path / "records").parent for path in tmp_path.glob("records/**/*.txt")}
    assert until(2, "--checkpoint-every", 1) == until(1, "--resume", ATTEMPTS) == {Path("other", "attempts")}
    assert len(logs(tmp_path)) == 2
    assert until(1) == {Path("other", "attempts"), Path("cpu", "attempts")}


@pytest.mark.slow
def test_the_data_may_have_moved(launch, stopped, corpus):
    folder = stopped(0, 5)
    shutil.copytree(corpus, folder / "moved")
    with launch(folder, "--resume", ATTEMPTS, data="moved", faults=DIES) as run:
        assert run.wait() == [-9], run.err


@pytest.mark.slow
def test_another_script_or_torch_is_said(launch, stopped):
    folder = stopped(2, 5)
    path = newest(folder).path / "about.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"script": "0123456789abcdef", "torch": "2.0.0"}))
    with launch(folder, "--resume", ATTEMPTS, world=2, faults={rank: At("train_step", 1, die) for rank in (0, 1)}) as run:
        assert -9 in run.wait()
    said = (f"after step 5; script 0123456789abcdef wrote the checkpoint, this is {about['script']}; torch 2.0.0 wrote the "
            f"checkpoint, this is {torch.__version__}\n")
    assert run.out.count(said) == 1 and any(said in text for text in logs(folder).values())


def test_differing():
    base = {"seed": 1, "config": {"rows": [{"lr": 1.0, "beta": [0.9, 0.95]}, {"lr": 2.0}], "layers": None}}
    again = {"config": {"layers": None, "rows": [{"beta": [0.9, 0.95], "lr": 1.0}, {"lr": 2.0}]}, "seed": 1}
    assert tg.differing(base, again) == [] and tg.differing({}, {}) == [] and tg.differing([], []) == []
    again["config"]["rows"][0]["beta"] = [0.9, 0.99]
    again["config"]["rows"][1] = {"lr": 2.5}
    again["seed"] = "1"
    assert tg.differing(base, again) == ["seed (1, 1)", "config.rows.0.beta.1 (0.95, 0.99)", "config.rows.1.lr (2.0, 2.5)"]
    assert tg.differing({"a": 1}, {"b": 2}) == ["a (1, None)", "b (None, 2)"]
    assert tg.differing({"a": {"x": 1}}, {"a": None}) == ["a ({'x': 1}, None)"]
    assert tg.differing({"a": [1, 2]}, {"a": [1]}) == ["a ([1, 2], [1])"]
    assert tg.differing({"a": [[1], [2]]}, {"a": [[1], [3, 4]]}) == ["a.1 ([2], [3, 4])"]


# ---------------------------------------------------------------------------------------------- every step, one process

def config(corpus, *change):
    cfg = dataclasses.replace(tg.CPU, data=str(corpus))
    for setting in (*TINY, *SMALL, *change):
        cfg = tg.override(cfg, setting)
    return cfg


def build(cfg, seed=0):
    model = tg.GPT(cfg, seed=seed)
    return model, tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(0, 1))


def everything(model, optimizer):
    gradients = {f"{name}.grad": grad for name, grad in optimizer.gradients().items()}
    return tg.host_copy(model.state() | optimizer.state() | gradients)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["dtype=bfloat16", "main_grad=false"])
def test_every_step_can_be_the_last(corpus, tmp_path, change):
    """Saved after it, loaded into what began otherwise: the same state, and the same after the next step."""
    cfg = config(corpus, change, *LONG)
    data, exchange = tg.find_data(cfg), tg.Exchange(0, 1)
    model, optimizer = build(cfg)
    plans = [tg.plan(cfg, step) for step in range(cfg.steps)]
    batches, position = tg.Batches(tg.TrainLoader(cfg, data.train, 0, 1, False), plans), (0, 0, 0)
    states, found = [everything(model, optimizer)], []
    for step in range(cfg.steps):
        run = tmp_path / f"{step}.checkpoint"
        about = dict.fromkeys(("train_ms", "task", "script", "torch")) | {"step": step, "position": position}
        tg.save_checkpoint(run, about, model, optimizer, exchange)
        found.append(tg.Checkpoint.find(str(run)))
        batch = batches.next()
        position = batch.position
        tg.train_step(model, optimizer, batch)
        states.append(everything(model, optimizer))

    # All that may be forgotten comes up: gradients that wait, the untying, both shards, windows that grow.
    split, shards = tg.split_step(cfg), [checkpoint.about["position"][0] for checkpoint in found]
    waiting = "embed rows.grad" if cfg.main_grad else "embed.grad"
    assert [waiting in state for state in states[:-1]] == [step % 2 == 1 for step in range(cfg.steps)]
    assert [state["is_tied"] for state in states] == [step <= split for step in range(cfg.steps + 1)] and split == 7
    assert set(shards) == {0, 1} and 3 < shards.index(1) < 9
    assert len({state["rotary.window"] for state in states}) == 4

    for step, checkpoint in enumerate(found):
        assert checkpoint.about["step"] == step
        model, optimizer = build(cfg, seed=1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for grad in optimizer.main_grad.values():
            grad.fill_(1)
        touched = checkpoint.load(model, optimizer, exchange)
        loader = tg.TrainLoader(cfg, data.train, 0, 1, False, checkpoint.about["position"])
        tg.train_step(model, optimizer, tg.Batches(loader, plans[step:], touched).next())
        assert tg.same_state(everything(model, optimizer), states[step + 1]), step


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_loader_goes_on_from_each_position(corpus, world):
    cfg = config(corpus, *LONG)
    paths, plans = tg.find_data(cfg).train, [tg.plan(cfg, step) for step in range(cfg.steps)]
    fields = lambda batches: [[t.tolist() for t in (b.inputs, b.targets, b.bigram, b.cu_seqlens)] for b in batches]
    for rank in range(world):
        loader, batches, positions = tg.TrainLoader(cfg, paths, rank, world, False), [], []
        for now in plans:
            positions.append(json.loads(json.dumps(loader.position())))
            batches.append(fields(loader.batch(now.tokens, now.longest, loader.rooms())))
        assert positions == sorted(positions) and len({tuple(p) for p in positions}) == cfg.steps
        assert [p[2] for p in positions] == [sum(now.tokens for now in plans[:i]) for i in range(cfg.steps)]
        for step, position in enumerate(positions):
            loader = tg.TrainLoader(cfg, paths, rank, world, False, position)
            assert loader.position() == tuple(position)
            again = [fields(loader.batch(now.tokens, now.longest, loader.rooms())) for now in plans[step:step + 2]]
            assert again == batches[step:step + 2]
            loader.close()
