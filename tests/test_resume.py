"""Tests checkpoints: runs killed at any moment, also while writing one, resume bit for bit.

Checkpoints are only written after a multiple of four steps, when no gradient awaits its update. Errors of
--resume are in test_bad_input.py.
"""

import dataclasses
import functools
import itertools
import math
import random
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt as tg
from golden_inputs import same_bits
from launch import TINY, FaultAtCall, FaultAtWrite, Launch, die, list_checkpoints, make_corpus, settings

SMALL = """
warmup=false microbatches=2 val_slice_tokens=64 dtype=bfloat16 stages.3.steps=8
stages.0.batch_tokens=96 stages.1.batch_tokens=128 stages.2.batch_tokens=192 stages.3.batch_tokens=192
""".split()
ATTEMPTS = Path("records", "other", "attempts")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder of two shards; both end in mid-run."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder, train=(900, 900))
    return folder


def make_config(corpus, *change):
    cfg = dataclasses.replace(tg.CPU, data=str(corpus))
    for setting in TINY + SMALL + list(change):
        cfg = tg.override(cfg, setting)
    return cfg


@pytest.fixture(scope="module")
def launch(corpus):
    """Returns launch(folder, *arguments, ...): it starts a small run there. change: more settings."""

    def launch(folder, *arguments, change=(), **options):
        folder.mkdir(exist_ok=True)
        run_settings = settings(*SMALL, *change)
        return Launch(folder, "--preset", "cpu", "--data", corpus, *run_settings, *arguments, **options)

    return launch


@pytest.fixture(scope="module")
def uninterrupted(launch, tmp_path_factory):
    """Returns uninterrupted(world_size, *change): it returns the folder of such a run."""

    @functools.cache
    def uninterrupted(world_size, *change):
        folder = tmp_path_factory.mktemp("uninterrupted")
        run = launch(
            folder, "--checkpoint-every", 3, "--save", "model.pt", change=change, world_size=world_size
        )
        with run:
            assert set(run.wait()) == {0}, run.err
        return folder

    return uninterrupted


def on_all_ranks(world_size, fault):
    """Returns the same fault for each rank, as Launch takes it."""
    ranks = range(max(world_size, 1))
    return dict.fromkeys(ranks, fault)


@pytest.fixture
def stopped(launch, tmp_path):
    """Returns stopped(world_size, step, *change): it makes a folder with a run killed at a checkpoint."""

    def stopped(world_size, step, *change):
        folder = tmp_path / "stopped"
        faults = on_all_ranks(world_size, FaultAtCall("train_step", step + 1, die))
        run = launch(folder, "--checkpoint-every", 2, change=change, world_size=world_size, faults=faults)
        with run:
            run.wait()
        checkpoints = [path.name for path in folder.glob("records/**/*.checkpoint/*")]
        assert checkpoints == [f"step{step:08d}"], run.err
        return folder

    return stopped


def logs(folder):
    """Returns the text of each log below `folder`, without the script's source, by name.

    It looks only for logs, since a run may be changing its checkpoints there.
    """
    source = Path(tg.__file__).read_text(encoding="utf-8")
    paths = folder.glob("records/*/*/*.txt")
    return {path.name: path.read_text(encoding="utf-8").removeprefix(source) for path in paths}


def found_in_logs(folder, pattern):
    """Returns what a pattern finds in all logs, as a set."""
    found = set()
    for text in logs(folder).values():
        found.update(re.findall(pattern, text, re.MULTILINE))
    return found


def closing_block(text):
    """Returns the closing block of a complete log."""
    return dict(re.findall(r"^(\w.*): (\S+)$", text[text.rindex("\nstep:") :], re.MULTILINE))


def log_of(folder):
    """Returns the log of the run in `folder`, as --resume takes it there, if it has a checkpoint."""
    for step in folder.glob("records/**/*.checkpoint/step????????"):
        return step.parent.with_suffix(".txt").relative_to(folder)


def newest(folder):
    """Returns the checkpoint that --resume would take, or None."""
    log = log_of(folder)
    if log is None:
        return None
    return tg.find_checkpoint(str(folder / log))


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step"))


def complete(folder):
    """Returns the closing blocks of the complete logs.

    There are several only if a run was killed between the end of its log and its own.
    """
    return [closing_block(text) for text in logs(folder).values() if text.endswith("complete: yes\n")]


def assert_same_end(folder, expected):
    """Checks that the run in `folder` ended as the one in `expected`, and left no checkpoint."""
    ends = set()
    for end in complete(folder) + complete(expected):
        ends.add((end["val_loss"], end["epochs"]))
    assert complete(folder) and complete(expected)
    assert len(ends) == 1, ends
    saved = torch.load(folder / "model.pt", weights_only=True)
    want = torch.load(expected / "model.pt", weights_only=True)
    assert same_bits(saved["weights"], want["weights"])
    assert not list(folder.glob("records/**/*.checkpoint"))


# ---- killed at random moments ------------------------------------------------------------------------------


def kill_soon(run, folder, before, rng):
    """Sends SIGKILL to all ranks, up to a tenth of a second after one of the first steps."""
    steps = rng.randrange(4)
    while run.running:
        done = 0
        for name, text in logs(folder).items():
            if name not in before:
                done += len(re.findall(r"^step:\d+/\d+ train_time", text, re.MULTILINE))
        if done >= steps:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    run.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, change",
    [(0, ()), pytest.param(4, ("params.*.reduction=fp32",), marks=pytest.mark.long)],
)
def test_killed_runs_end_as_if_never_stopped(launch, uninterrupted, tmp_path, world_size, change):
    """Four kills: after a step without a checkpoint, after one with, and two at any time."""
    rng = random.Random(f"{world_size} {change}")
    folder = tmp_path / "run"
    expected = uninterrupted(world_size, *change)
    resumed = []
    for kill in (6, 5, "soon", "soon", None):  # the calls of train_step before which it dies
        options = ["--save", "model.pt"]
        checkpoint = newest(folder)
        if checkpoint is not None:
            resumed.append(step_of(checkpoint))
            options += ["--resume", log_of(folder)]
        before = set(logs(folder))
        # All checkpoints if the call is known; else now and then.
        if isinstance(kill, int):
            every = 1
            faults = on_all_ranks(world_size, FaultAtCall("train_step", kill, die))
        else:
            every = rng.randint(1, 5)
            faults = {}
        options += ["--checkpoint-every", every]
        with launch(folder, *options, change=change, world_size=world_size, faults=faults) as run:
            if kill == "soon":
                kill_soon(run, folder, before, rng)
            codes = set(run.wait())
        assert codes == {0} or kill and -9 in codes, run.err
        if complete(folder) and not newest(folder):
            break
    assert resumed[:2] == [4, 8] and set(resumed) == {4, 8}
    assert ".from4_" in "\n".join(logs(folder))
    assert len(logs(folder)) <= len(resumed) + 1  # a kill may come before there is a log
    assert_same_end(folder, expected)
    pattern = r"^step:(\d+)/\d+ val_loss:(\S+)"
    assert found_in_logs(folder, pattern) == found_in_logs(expected, pattern) != set()
    pattern = r" train_loss:(\d\S+)@(\d+)$"
    losses = found_in_logs(folder, pattern)
    assert losses <= found_in_logs(expected, pattern)
    steps = {int(step) for _, step in losses}
    assert steps.issuperset(range(resumed[-1] + 1, 13))


def litter():
    """Leaves a file, as NFS does when another machine has a removed one open, and a user's link."""
    (folder,) = ATTEMPTS.glob("*.checkpoint")
    (folder / ".nfs0001").touch()
    (folder / "newest").symlink_to("step00000004")


@pytest.mark.slow
def test_other_files_beside_checkpoints_end_no_run(launch, tmp_path):
    faults = {0: FaultAtCall("save_checkpoint", 2, litter)}
    with launch(tmp_path, "--checkpoint-every", 4, faults=faults) as run:
        assert run.wait() == [0], run.err
    assert found_in_logs(tmp_path, r"^checkpoint: after step (\d+);") == {"4", "8"}


# ---- killed while writing ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_killed_at_every_change_to_files(launch, uninterrupted, stopped, tmp_path, monkeypatch):
    """One of two ranks dies before each change that saving makes. An earlier kill has left files behind."""
    change = ("stages.3.steps=12",)
    start = stopped(2, 4, *change)
    changes = []
    monkeypatch.setattr("launch.GRACE", 0)
    left = newest(start).with_name("step00000008.partial")
    left.mkdir()
    (left / "rank1.pt").write_bytes(b"half")
    for n in itertools.count(1):
        folder = shutil.copytree(start, tmp_path / str(n))
        options = ["--resume", log_of(folder), "--checkpoint-every", 2, "--save", "model.pt"]
        faults = {0: FaultAtWrite("save_checkpoint", n, die), 1: FaultAtCall("save_checkpoint", 2, die)}
        with launch(folder, *options, change=change, world_size=2, faults=faults) as run:
            codes = run.wait()
        changes += re.findall(r"^change: (.+)", run.out, re.MULTILINE)
        if len(changes) < n:  # there are no more: both reached the next checkpoint
            assert -9 in codes
            break
        assert codes[0] == -9
        step = step_of(newest(folder))
        if "os.rename" in changes[: n - 1]:
            assert step == 8
        else:
            assert step == 4
        faults = {0: FaultAtCall("train_step", 6, list_checkpoints)}
        with launch(folder, *options, change=change, world_size=2, faults=faults) as run:
            assert set(run.wait()) == {0}, run.err
        assert f"checkpoints: step{step + 4:08d}\n" in run.out  # and nothing half written or older
        assert_same_end(folder, uninterrupted(2, *change))
    write_shard = ["open", "half of torch.save"]
    remove_earlier = ["os.remove", "os.remove", "os.rmdir"]
    assert changes == ["os.mkdir"] + write_shard + ["os.rename"] + remove_earlier


# ---- contents of a checkpoint ------------------------------------------------------------------------------


def tensors(nest):
    """Returns the tensors in nested dicts and lists."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = list(nest.values())
    found = []
    if isinstance(nest, list):
        for value in nest:
            found += tensors(value)
    return found


def check_shards(saved, name):
    """Checks a parameter's shards in the ranks' files; returns how many numbers they hold."""
    shapes = set()
    numbers = 0
    for rank in saved:
        shard = rank["params"][name]["block"]
        state = rank["params"][name]["state"]
        if "slow_momentum" in state:  # ANVIL's
            assert state["mantissa"].dtype == torch.uint16
            moments = state["slow_momentum"]
        else:
            moments = state["exp_avg"]
        shapes |= {shard.shape, moments.shape}
        numbers += shard.numel()
    assert len(shapes) == 1, name
    return numbers


def check_size(path, saved):
    """Checks that a file is not much larger than its tensors; a view would save the full table."""
    sizes = 0
    count = 0
    for t in tensors(saved):
        assert t.untyped_storage().nbytes() == t.nbytes
        sizes += t.nbytes
        count += 1
    assert sizes < path.stat().st_size < sizes + 500 * count + 20000


@pytest.mark.slow
def test_each_rank_saves_its_own_shards(stopped, corpus):
    """After step 8 embed and lm_head are untied."""
    world_size = 2
    step = 8
    folder = stopped(world_size, step)
    checkpoint = newest(folder)
    paths = sorted(checkpoint.iterdir())
    assert [path.name for path in paths] == ["rank0.pt", "rank1.pt"]
    saved = [torch.load(path, weights_only=True) for path in paths]
    numbers = {name: check_shards(saved, name) for name in saved[0]["params"]}
    cfg = make_config(corpus)
    shapes = tg.param_shapes(cfg, world_size)
    small = 0
    for row in tg.used_params(cfg):
        count = math.prod(shapes[row.name])
        if row.kind == "small":
            small += tg.padded(count, 8)
        else:
            assert numbers.pop(row.name) == count
    assert small <= sum(numbers.values()) < small + 8 * world_size * len(numbers)  # vectors are padded
    for path, content in zip(paths, saved):
        assert content["params"]["lm_head"]["state"]["steps"] == step // 2
        check_size(path, content)


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoint_every(uninterrupted):
    """Rounds up to a multiple of four steps. After the last step there is no checkpoint."""
    folder = uninterrupted(0)
    assert found_in_logs(folder, r"^checkpoint: after step (\d+);") == {"4", "8"}
    assert not list(folder.glob("records/**/*.checkpoint"))


def test_a_resumed_run_keeps_its_name(tmp_path):
    """The same command gives it again; it may be left out; another one has no effect, so it is refused."""
    log = tmp_path / "2026-01-01_Mine" / "seed0_0123456789ab.txt"
    (log.with_suffix(".checkpoint") / "step00000004").mkdir(parents=True)
    for name in ("", "Mine", "ine", "Another"):
        args = SimpleNamespace(name=name, seed=0, resume=str(log))
        if name in ("", "Mine"):
            path, _ = tg.name_run(args, "other", tg.Exchange(0, 1), {"step": 4})
            assert path == log.with_suffix("")
        else:
            with pytest.raises(tg.UserError, match=f"^--name {name}: .* another name"):
                tg.name_run(args, "other", tg.Exchange(0, 1), {"step": 4})


@pytest.mark.slow
def test_the_log_of_a_resumed_run(launch, uninterrupted, stopped):
    folder = stopped(0, 4)
    path = newest(folder)
    saved = torch.load(path / "rank0.pt", weights_only=True)
    saved["train_ms"] = 1e6
    torch.save(saved, path / "rank0.pt")
    # How many samples are printed at the end may differ.
    with launch(folder, "--resume", log_of(folder), "--save", "model.pt", change=("samples=0",)) as run:
        assert run.wait() == [0], run.err
    name = path.parent.stem
    first, resumed = sorted(logs(folder), key=len)
    assert first == f"{name}.txt" and resumed.startswith(f"{name}.from4_")
    text = logs(folder)[resumed]
    assert f"\nresumed: {name} after step 4\n" in text and f"resumed: {name} after step 4\n" in run.out
    lines = re.findall(r"^step:(\d+)/12 (?:val_loss:\S+ )?train_time:(\d+)ms", text, re.MULTILINE)
    end = closing_block(text)
    assert end["steps"] == "12"
    assert [int(step) for step, _ in lines] == [5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12]
    times = [int(ms) for _, ms in lines]
    times.append(int(end["train_time_ms"]))
    assert 1e6 <= min(times) and max(times) < 1.06e6
    assert "resumed" not in logs(folder)[first]
    assert_same_end(folder, uninterrupted(0))
    with launch(folder, "--resume", ATTEMPTS / first) as again:  # it is complete
        assert again.wait() == [1] and "it has no checkpoint" in again.err
