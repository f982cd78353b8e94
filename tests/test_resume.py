"""Tests checkpoints: runs killed between steps, or while writing a checkpoint, resume bit for bit.

Checkpoints are only written after a multiple of four steps, when no gradient awaits its update. Errors of
--resume are in test_bad_input.py.
"""

import functools
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt as tg
from golden_inputs import ALONE, same_bits, tensors_of
from launch import (
    SOURCE,
    TINY,
    FaultAtCall,
    FaultAtWrite,
    Launch,
    die,
    list_checkpoints,
    make_corpus,
    settings,
)

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
    return tg.with_settings(tg.CPU, [f"data={corpus}"] + TINY + SMALL + list(change))


@pytest.fixture(scope="module")
def launch(corpus):
    """Returns launch(folder, arguments, ...): it starts a small run there. change: more settings."""

    def launch(folder, arguments, change=(), **options):
        folder.mkdir(exist_ok=True)
        command = ["--preset", "cpu", "--data", corpus] + settings(*SMALL, *change) + arguments.split()
        return Launch(folder, *command, **options)

    return launch


@pytest.fixture(scope="module")
def uninterrupted(launch, tmp_path_factory):
    """Returns uninterrupted(world_size, change): it returns the folder of such a run."""

    @functools.cache
    def uninterrupted(world_size, change=()):
        folder = tmp_path_factory.mktemp("uninterrupted")
        launch(folder, "--checkpoint-every 3 --save model.pt", change, world_size=world_size).succeed()
        return folder

    return uninterrupted


@pytest.fixture
def stopped(launch, tmp_path):
    """Returns stopped(world_size, step, change): it makes a folder with a run killed at a checkpoint."""

    def stopped(world_size, step, change=()):
        folder = tmp_path / "stopped"
        faults = dict.fromkeys(range(4), FaultAtCall("train_step", step + 1, die))
        with launch(folder, "--checkpoint-every 2", change, world_size=world_size, faults=faults) as run:
            run.wait()
        checkpoints = [path.name for path in folder.glob("records/**/*.checkpoint/*")]
        assert checkpoints == [f"step{step:08d}"], run.err
        return folder

    return stopped


def logs(folder):
    """Returns the text of each log below `folder`, without the script's source, by name.

    It looks only for logs, since a run may be changing its checkpoints there.
    """
    paths = folder.glob("records/*/*/*.txt")
    return {path.name: path.read_text(encoding="utf-8").removeprefix(SOURCE) for path in paths}


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
    """Returns the checkpoint that --resume would take."""
    return tg.find_checkpoint(str(folder / log_of(folder)))


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step"))


def end_of(folder):
    """Returns the closing block of the only complete log."""
    (text,) = (text for text in logs(folder).values() if text.endswith("complete: yes\n"))
    return closing_block(text)


def assert_same_end(folder, expected):
    """Checks that the run in `folder` ended as the one in `expected`, and left no checkpoint."""
    end, want = end_of(folder), end_of(expected)
    assert (end["val_loss"], end["epochs"]) == (want["val_loss"], want["epochs"])
    saved = torch.load(folder / "model.pt", weights_only=True)
    want = torch.load(expected / "model.pt", weights_only=True)
    assert same_bits(saved["weights"], want["weights"])
    assert not list(folder.glob("records/**/*.checkpoint"))


# ---- killed between steps ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, change",
    [(0, ()), pytest.param(4, ("params.*.reduction=fp32",), marks=pytest.mark.long)],
)
def test_killed_runs_end_as_if_never_stopped(launch, uninterrupted, tmp_path, world_size, change):
    """Kills it twice: after a step without a checkpoint, and after one with."""
    folder = tmp_path / "run"
    expected = uninterrupted(world_size, change)
    resumed = []
    for call in 6, 5, 99:  # of train_step, before which it dies; the third run ends before that
        options = "--save model.pt --checkpoint-every 1"
        if log_of(folder):
            resumed.append(step_of(newest(folder)))
            options += f" --resume {log_of(folder)}"
        faults = dict.fromkeys(range(4), FaultAtCall("train_step", call, die))
        with launch(folder, options, change, world_size=world_size, faults=faults) as run:
            codes = run.wait()
        assert -9 in codes or call == 99, run.err
    assert resumed == [4, 8]
    assert_same_end(folder, expected)
    for pattern in r"^step:(\d+)/\d+ val_loss:(\S+)", r" train_loss:(\d\S+)@(\d+)$":
        found = found_in_logs(folder, pattern)
        assert found == found_in_logs(expected, pattern) != set()


def litter():
    """Leaves a file, as NFS does when another machine has a removed one open, and a user's link and copy."""
    (folder,) = ATTEMPTS.glob("*.checkpoint")
    (folder / ".nfs0001").touch()
    (folder / "newest").symlink_to("step00000004")
    (folder / "step00000004.backup").mkdir()


@pytest.mark.slow
def test_other_files_beside_checkpoints_end_no_run(launch, tmp_path):
    faults = {0: FaultAtCall("save_checkpoint", 2, litter)}
    launch(tmp_path, "--checkpoint-every 4", faults=faults).succeed()
    assert found_in_logs(tmp_path, r"^checkpoint: after step (\d+);") == {"4", "8"}
    assert [path.name for path in tmp_path.rglob("step*")] == ["step00000004.backup"]


# ---- killed while writing ----------------------------------------------------------------------------------


@pytest.mark.long
def test_killed_at_every_change_to_files(launch, uninterrupted, stopped, tmp_path, monkeypatch):
    """One of two ranks dies before each change that saving makes. An earlier kill has left files behind."""
    change = ("stages.3.steps=12",)
    start = stopped(2, 4, change)
    changes = []
    monkeypatch.setattr("launch.GRACE", 0)
    left = newest(start).with_name("step00000008.partial")
    left.mkdir()
    (left / "rank1.pt").write_bytes(b"half")
    for n in itertools.count(1):
        folder = shutil.copytree(start, tmp_path / str(n))
        options = f"--resume {log_of(folder)} --checkpoint-every 2 --save model.pt"
        faults = {0: FaultAtWrite("save_checkpoint", n, die), 1: FaultAtCall("save_checkpoint", 2, die)}
        with launch(folder, options, change, world_size=2, faults=faults) as run:
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
        with launch(folder, options, change, world_size=2, faults=faults) as run:
            run.succeed()
        assert f"checkpoints: step{step + 4:08d}\n" in run.out  # and nothing half written or older
        assert_same_end(folder, uninterrupted(2, change))
    write_shard = ["open", "half of torch.save"]
    remove_earlier = ["os.remove", "os.remove", "os.rmdir"]
    assert changes == ["os.mkdir"] + write_shard + ["os.rename"] + remove_earlier


# ---- contents of a checkpoint ------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_rank_saves_its_own_shards(stopped, corpus):
    """Checks that a file is not much larger than its tensors; a view would save the full table.

    After step 8 embed and lm_head are untied.
    """
    paths = sorted(newest(stopped(2, 8)).iterdir())
    assert [path.name for path in paths] == ["rank0.pt", "rank1.pt"]
    saved = [torch.load(path, weights_only=True) for path in paths]
    for path, content in zip(paths, saved):
        assert content["params"]["lm_head"]["state"]["updates"] == 4
        tensors = tensors_of(content)
        size = sum(t.nbytes for t in tensors)
        assert size == sum(t.untyped_storage().nbytes() for t in tensors)
        assert size < path.stat().st_size < size + 500 * len(tensors) + 20000
    cfg = make_config(corpus)
    shapes = tg.param_shapes(cfg, 2)
    for row in tg.used_specs(cfg):
        if row.kind != "small":
            blocks = [content["params"][row.name]["block"] for content in saved]
            assert torch.cat(blocks).shape == shapes[row.name]


@pytest.mark.slow
def test_only_its_own_files_and_only_when_no_run_has_them(launch, stopped):
    """Starts two ranks whose files are exchanged, and then a run that another one still has."""
    folder = stopped(2, 4)
    checkpoint = newest(folder)
    zero = checkpoint / "rank0.pt"
    one = checkpoint / "rank1.pt"
    other = checkpoint / "other"
    for fault in "another rank", "still goes on":
        zero.rename(other)  # the second time they come back
        one.rename(zero)
        other.rename(one)
        if fault == "still goes on":
            tg.lock_checkpoints(checkpoint.parent)
        with launch(folder, f"--resume {log_of(folder)} --checkpoint-every 2", world_size=2) as run:
            assert run.wait()[0] == 1 and fault in run.err


# ---- the command line --------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_name(tmp_path):
    """The same command gives it again; it may be left out; another one has no effect, so it is refused."""
    log = tmp_path / "2026-01-01_Mine" / "seed0_0123456789ab.txt"
    (log.with_suffix(".checkpoint") / "step00000004").mkdir(parents=True)
    resume = functools.partial(SimpleNamespace, seed=0, resume=str(log))
    for name in "", "Mine":
        path, _ = tg.name_run(resume(name=name), "other", ALONE, {"step": 4})
        assert path == log.with_suffix("")
    with pytest.raises(tg.UserError, match="^--name ine: .* another name"):
        tg.name_run(resume(name="ine"), "other", ALONE, {"step": 4})


@pytest.mark.slow
def test_the_log_of_a_resumed_run(launch, uninterrupted, stopped):
    folder = stopped(0, 4)
    path = newest(folder)
    saved = torch.load(path / "rank0.pt", weights_only=True)
    saved["train_ms"] = 1e6
    torch.save(saved, path / "rank0.pt")
    # How many samples are printed at the end may differ.
    with launch(folder, f"--resume {log_of(folder)} --save model.pt", ["samples=0"]) as run:
        run.succeed()
    name = path.parent.stem
    first, resumed = sorted(logs(folder), key=len)
    assert first == f"{name}.txt" and resumed.startswith(f"{name}.from4_")
    text = logs(folder)[resumed]
    assert f"\nresumed: {name} after step 4\n" in text and f"resumed: {name} after step 4\n" in run.out
    steps = []
    for step, ms in re.findall(r"^step:(\d+)/12 (?:val_loss:\S+ )?train_time:(\d+)ms", text, re.MULTILINE):
        steps.append(int(step))
        assert 1e6 <= int(ms) < 1.06e6
    assert steps == [5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12]
    assert_same_end(folder, uninterrupted(0))
    with launch(folder, f"--resume {ATTEMPTS / first}") as again:  # it is complete
        assert again.wait() == [1] and "it has no checkpoint" in again.err
