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

import pytest
import torch

import train_gpt as tg
from golden_inputs import same_bits
from launch import TINY, FaultAtCall, FaultAtWrite, Launch, die, list_checkpoints, make_corpus, settings

SMALL = (
    *("warmup=false", "microbatches=2", "val_slice_tokens=64", "dtype=bfloat16", "stages.3.steps=8"),
    *(f"stages.{i}.batch_tokens={4 * T}" for i, T in enumerate((24, 32, 48, 48))),
)
ATTEMPTS = Path("records", "other", "attempts")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder of two shards; both end in mid-run."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder, train=(900, 900))
    return folder


def make_config(corpus, *change):
    cfg = dataclasses.replace(tg.CPU, data=str(corpus))
    for setting in (*TINY, *SMALL, *change):
        cfg = tg.override(cfg, setting)
    return cfg


@pytest.fixture(scope="module")
def launch(corpus):
    """Returns launch(folder, *arguments, ...): it starts a small run there. change: more settings."""

    def launch(folder, *arguments, change=(), **options):
        folder.mkdir(exist_ok=True)
        arguments = ["--preset", "cpu", "--data", corpus, *settings(*SMALL, *change), *arguments]
        return Launch(folder, *arguments, **options)

    return launch


@pytest.fixture(scope="module")
def uninterrupted(launch, tmp_path_factory):
    """Returns uninterrupted(world_size, *change): it returns the folder of such a run."""

    @functools.cache
    def uninterrupted(world_size, *change):
        folder, options = tmp_path_factory.mktemp("uninterrupted"), ["--checkpoint-every", 3]
        with launch(folder, *options, "--save", "model.pt", change=change, world_size=world_size) as run:
            assert set(run.wait()) == {0}, run.err
        return folder

    return uninterrupted


@pytest.fixture
def stopped(launch, tmp_path):
    """Returns stopped(world_size, step, *change): it makes a folder with a run killed at a checkpoint."""

    def stopped(world_size, step, *change):
        fault, folder = FaultAtCall("train_step", step + 1, die), tmp_path / "stopped"
        faults = dict.fromkeys(range(max(world_size, 1)), fault)
        options = {"change": change, "world_size": world_size, "faults": faults}
        with launch(folder, "--checkpoint-every", 2, **options) as run:
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
    return {found for text in logs(folder).values() for found in re.findall(pattern, text, re.MULTILINE)}


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
    return tg.find_checkpoint(str(folder / log)) if log else None


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step"))


def complete(folder):
    """Returns the closing blocks of the complete logs.

    There are several only if a run was killed between the end of its log and its own.
    """
    return [closing_block(text) for text in logs(folder).values() if text.endswith("complete: yes\n")]


def assert_same_end(folder, expected):
    """Checks that the run in `folder` ended as the one in `expected`, and left no checkpoint."""
    ours, theirs = ({(end["val_loss"], end["epochs"]) for end in complete(f)} for f in (folder, expected))
    assert ours == theirs and len(ours) == 1
    weights, want = (torch.load(f / "model.pt", weights_only=True)["weights"] for f in (folder, expected))
    assert same_bits(weights, want)
    assert not list(folder.glob("records/**/*.checkpoint"))


# ---- killed at random moments ------------------------------------------------------------------------------


def kill_soon(run, folder, before, rng):
    """Sends SIGKILL to all ranks, up to a tenth of a second after one of the first steps."""
    steps, step = rng.randrange(4), re.compile(r"^step:\d+/\d+ train_time", re.MULTILINE)
    while run.running:
        new = [text for name, text in logs(folder).items() if name not in before]
        if sum(len(step.findall(text)) for text in new) >= steps:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    run.kill()


@pytest.mark.slow
@pytest.mark.parametrize("world_size, change", [(0, ()), (4, ("params.*.reduction=fp32",))])
def test_killed_runs_end_as_if_never_stopped(launch, uninterrupted, tmp_path, world_size, change):
    """Four kills: after a step without a checkpoint, after one with, and two at any time."""
    rng, folder = random.Random(f"{world_size} {change}"), tmp_path / "run"
    expected, resumed = uninterrupted(world_size, *change), []
    for kill in (6, 5, "soon", "soon", None):  # the calls of train_step before which it dies
        found, before = newest(folder), set(logs(folder))
        resumed += [step_of(found)] if found else []
        # All checkpoints if the call is known; else now and then.
        every = 1 if isinstance(kill, int) else rng.randint(1, 5)
        options = ["--checkpoint-every", every, "--save", "model.pt"]
        options += ["--resume", log_of(folder)] if found else []
        faults = {}
        if isinstance(kill, int):
            faults = {rank: FaultAtCall("train_step", kill, die) for rank in range(max(world_size, 1))}
        with launch(folder, *options, change=change, world_size=world_size, faults=faults) as run:
            if kill == "soon":
                kill_soon(run, folder, before, rng)
            codes = set(run.wait())
        assert codes == {0} or kill and -9 in codes, run.err
        if complete(folder) and not newest(folder):
            break
    assert len(resumed) >= 2 and resumed[:2] == [4, 8] and {*resumed} == {4, 8}
    assert any(f".from{resumed[0]}_" in name for name in logs(folder))
    assert len(logs(folder)) <= len(resumed) + 1  # a kill may come before there is a log
    assert_same_end(folder, expected)
    pattern = r"^step:(\d+)/\d+ val_loss:(\S+)"
    assert found_in_logs(folder, pattern) == found_in_logs(expected, pattern) != set()
    losses, want = (found_in_logs(f, r" train_loss:(\d\S+)@(\d+)$") for f in (folder, expected))
    assert losses <= want and {int(step) for _, step in losses} >= {*range(resumed[-1] + 1, 13)}


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


@pytest.mark.slow
def test_killed_at_every_change_to_files(launch, uninterrupted, stopped, tmp_path, monkeypatch):
    """One of two ranks dies before each change that saving makes. An earlier kill has left files behind."""
    change = ("stages.3.steps=12",)
    start, changes = stopped(2, 4, *change), []
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
        assert step == (8 if "os.rename" in changes[: n - 1] else 4)
        faults = {0: FaultAtCall("train_step", 6, list_checkpoints)}
        with launch(folder, *options, change=change, world_size=2, faults=faults) as run:
            assert set(run.wait()) == {0}, run.err
        assert f"checkpoints: step{step + 4:08d}\n" in run.out  # and nothing half written or older
        assert_same_end(folder, uninterrupted(2, *change))
    write_shard, remove_earlier = ["open", "half of torch.save"], ["os.remove"] * 2 + ["os.rmdir"]
    assert changes == ["os.mkdir", *write_shard, "os.rename", *remove_earlier]


# ---- contents of a checkpoint ------------------------------------------------------------------------------


def tensors(nest):
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, list):
        return [t for value in nest for t in tensors(value)]
    return [nest] if isinstance(nest, torch.Tensor) else []


@pytest.mark.slow
def test_each_rank_saves_its_own_shards(stopped, corpus):
    """After step 8 embed and lm_head are untied."""
    world_size, step = 2, 8
    folder = stopped(world_size, step)
    path = newest(folder)
    files = [f"rank{rank}.pt" for rank in range(world_size)]
    assert sorted(p.name for p in path.iterdir()) == files
    saved = [torch.load(path / name, weights_only=True) for name in files]
    cfg, numbers = make_config(corpus), {}
    for name in saved[0]["params"]:
        shards = [rank["params"][name]["block"] for rank in saved]
        states = [rank["params"][name]["state"] for rank in saved]
        is_anvil = "slow_momentum" in states[0]
        moments = [state["slow_momentum" if is_anvil else "exp_avg"] for state in states]
        assert len({t.shape for t in (*shards, *moments)}) == 1
        assert not is_anvil or all(state["mantissa"].dtype == torch.uint16 for state in states)
        numbers[name] = sum(p.numel() for p in shards)
    needed = {name: math.prod(shape) for name, shape in tg.param_shapes(cfg, world_size).items()}
    small = sum(tg.padded(needed.pop(row.name), 8) for row in tg.used_params(cfg) if row.kind == "small")
    assert all(numbers.pop(name) == count for name, count in needed.items())
    assert small <= sum(numbers.values()) < small + 8 * world_size * len(numbers)  # vectors are padded
    for name, s in zip(files, saved):
        assert s["params"]["lm_head"]["state"]["steps"] == step // 2
        sizes = [t.nbytes for t in tensors(s)]
        assert [t.untyped_storage().nbytes() for t in tensors(s)] == sizes  # a view would save the full table
        assert sum(sizes) < (path / name).stat().st_size < sum(sizes) + 500 * len(sizes) + 20000


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoint_every(uninterrupted):
    """Rounds up to a multiple of four steps. After the last step there is no checkpoint."""
    folder = uninterrupted(0)
    assert found_in_logs(folder, r"^checkpoint: after step (\d+);") == {"4", "8"}
    assert not list(folder.glob("records/**/*.checkpoint"))


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
    (first, resumed) = sorted(logs(folder), key=len)
    assert first == f"{name}.txt" and resumed.startswith(f"{name}.from4_")
    text = logs(folder)[resumed]
    assert f"\nresumed: {name} after step 4\n" in text and f"resumed: {name} after step 4\n" in run.out
    lines = re.findall(r"^step:(\d+)/12 (?:val_loss:\S+ )?train_time:(\d+)ms", text, re.MULTILINE)
    assert [int(step) for step, _ in lines] == [5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12]
    end = closing_block(text)
    assert all(1e6 <= int(ms) < 1.06e6 for ms in (*(ms for _, ms in lines), end["train_time_ms"]))
    assert end["steps"] == "12"
    assert "resumed" not in logs(folder)[first]
    assert_same_end(folder, uninterrupted(0))
    with launch(folder, "--resume", ATTEMPTS / first) as again:  # it is complete
        assert again.wait() == [1] and "it has no checkpoint" in again.err
