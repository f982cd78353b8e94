"""Tests runs with an n-gram table, with real processes: failures, resuming, saving, input, the record preset.

Each rank has a thread that makes collectives of its own. Whatever ends a rank must end them all.
"""

# ruff: noqa: F811 (fixtures are imported)

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import synthetic
import train_gpt as tg
from golden_inputs import generator, same_bits
from launch import WAIT, FaultAtCall, Launch, die
from saved_model import load_model
from test_resume import ATTEMPTS, corpus, launch, log_of, logs, make_config  # noqa: F401 (fixtures)

SOON = WAIT / 10  # seconds in which all ranks end after one has failed
NGRAMS = "ngrams.orders=2,3", "ngrams.rows_per_order=301", "ngrams.width=12"


@pytest.fixture(scope="module")
def launch_two(launch):  # noqa: F811
    """Returns launch_two(folder, arguments, change, faults): it starts a small run of two ranks there."""

    def launch_two(folder, arguments, change, faults=None):
        return launch(folder, arguments, NGRAMS + change, world_size=2, faults=faults)

    return launch_two


def one_log(folder):
    (text,) = logs(folder).values()
    return text


# ---- failures while the other rank's thread waits in a collective ------------------------------------------


def wait_for(path):
    """Waits for a file, and then a little longer."""
    end = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.01)
    time.sleep(0.2)


def fail_when_other_waits():
    wait_for(Path("waiting"))
    Path("failed").touch()
    raise OSError("injected")


def fail_in_update():
    """Lets the third update fail, while this rank's thread does not build batch 5."""
    FaultAtCall("Prefetcher._build", 5, signal.pause)()
    FaultAtCall("NgramTable.update", 3, fail_when_other_waits)()


# By what fails: the rank in which it does; the batch whose collectives the other's thread then waits in; the
# fault. The fourth read is of the second shard.
FAILURES = {
    "an update": (1, 5, fail_in_update),
    "a batch": (0, 5, FaultAtCall("Prefetcher._build", 5, fail_when_other_waits)),
    "a batch, between its collectives": (0, 6, FaultAtCall("Prefetcher._finish", 6, fail_when_other_waits)),
    "a read": (1, 2, FaultAtCall("read_shard", 4, fail_when_other_waits)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_ends_all_ranks(launch_two, tmp_path, what):
    """An error in either thread of one rank, while the other rank's thread waits for it.

    The other rank learns of it long before its collectives time out, which they do after a minute.
    """
    rank, batch, failure = FAILURES[what]
    tell = FaultAtCall("Prefetcher._build", batch, Path("waiting").touch)
    faults = {rank: failure, 1 - rank: tell}
    with launch_two(tmp_path, "", ("ngrams.update_every=1,1",), faults) as run:
        wait_for(tmp_path / "failed")
        assert all(run.wait(SOON)), run.err
    assert "injected" in run.err


# ---- a whole run, its saved model, and the same run in two parts -------------------------------------------

CHANGE = "warmup=true", "late_updates_from=2", "ngrams.update_every=2,4", "ngrams.lr=3"


@pytest.fixture(scope="module")
def saved(launch_two, tmp_path_factory):
    """Returns the folder of a run with --save."""
    folder = tmp_path_factory.mktemp("saved")
    launch_two(folder, "--save model.pt", CHANGE).succeed()
    return folder


@pytest.mark.slow
def test_a_killed_run_ends_as_if_never_stopped(launch_two, saved, tmp_path):
    """With all bits of its weights and its table.

    Checkpoints wait for the rarest updates, so it goes on from step 4.
    """
    options = "--checkpoint-every 1 --save model.pt"
    dies = FaultAtCall("AsyncLoss.poll", 12, die)  # in step 7
    with launch_two(tmp_path, options, CHANGE, {0: dies, 1: dies}) as run:
        assert -signal.SIGKILL in run.wait(), run.err
    launch_two(tmp_path, f"{options} --resume {log_of(tmp_path)}", CHANGE).succeed()
    (log,) = tmp_path.glob(f"{ATTEMPTS}/*.from4_*.txt")
    ours = torch.load(tmp_path / "model.pt")
    theirs = torch.load(saved / "model.pt")
    run_id = log.name.split(".")[0][-12:]
    assert ours.pop("id") == run_id != theirs.pop("id")
    assert same_bits(ours, theirs)
    for name in "model.pt.ngrams0", "model.pt.ngrams1":
        ours = (tmp_path / name).read_bytes()
        assert ours[:-20] == (saved / name).read_bytes()[:-20]
        assert ours[-20:-8].decode() == run_id


def save_table(rank, world_size, folder, cfg):
    """Saves a table of random rows; returns them."""
    model = tg.GPT(cfg, world_size)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Collectives(rank, world_size))
    model.ngrams = optimizer.ngrams
    rows = torch.randn(602, 12, generator=generator(1)).bfloat16()
    own = rows[rank::world_size]
    optimizer.ngrams.block[: len(own)] = own
    tg.save_model(f"{folder}/m.pt", model, "0123456789ab", optimizer.comm)
    return rows


def test_saved_rows_are_the_tables(workers, corpus, tmp_path):
    """From three ranks, whose blocks differ in length. All rows, and some in any order, are found again.

    Symbolic links stay. What they point to need not be there.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    for name in "m.pt", "m.pt.ngrams1":
        (tmp_path / name).symlink_to(disk / name)
    cfg = make_config(corpus, *NGRAMS, "microbatches=6", "ngrams.dtype=bfloat16")
    rows = workers(3, save_table, tmp_path, cfg)[0]
    table = load_model(f"{tmp_path}/m.pt").ngrams
    for ids in torch.arange(602), torch.tensor([601, 0, 4, 4, 300, 1]):
        assert torch.equal(table.fetch(ids), rows[ids])
    names = ["m.pt", "m.pt.ngrams0", "m.pt.ngrams1", "m.pt.ngrams2"]
    assert sorted(os.listdir(tmp_path)) == ["disk"] + names
    assert sorted(os.listdir(disk)) == ["m.pt", "m.pt.ngrams1"]


# ---- input that is wrong -----------------------------------------------------------------------------------


MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 KiB.\nSee the manual."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError("out of memory"),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=repr)
def test_a_table_that_does_not_fit_is_one_line(corpus, monkeypatch, error):
    """It has the allocator's reason, which says how much was asked for, and the setting to lower."""

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(torch, "zeros", fail)
    reason = re.escape(str(error).splitlines()[0])
    message = rf"^the n-gram table does not fit in memory: {reason}; lower ngrams.rows_per_order [^\n]*$"
    with pytest.raises(tg.UserError, match=message):
        tg.make_ngram_table(make_config(corpus, *NGRAMS), tg.Collectives(0, 2))


# ---- the preset --------------------------------------------------------------------------------------------

# Matrices and tables of the preset, without what needs a GPU.
SMALL = """
heads=6 head_dim=16 mlp_dim=96 mudd_dim=16 window_unit=16 head_chunk=512
vocab_size=785 padded_vocab=792 bos_id=784 ngrams.rows_per_order=4096 ngrams.width=96
val_slice_tokens=256 val_slices=8 val_every=0 samples=0 warmup=false
stages.0.batch_tokens=256 stages.1.batch_tokens=512 stages.2.batch_tokens=768 stages.3.batch_tokens=640
stages.4.batch_tokens=256 stages.*.max_doc_len=256 stages.*.steps=1 stages.4.steps=2
stages.*.sampled_columns=128,256 kernels= attention_impl=dense fp8=false compile=false
""".split()


@pytest.mark.slow
def test_the_record_preset_at_a_small_size_on_8_processes(tmp_path):
    synthetic.write_shards(tmp_path / "shards", 100_000, 10_000, 785)
    command = "--preset record --data shards --set".split() + SMALL
    with Launch(tmp_path, *command, world_size=8) as run:
        assert run.wait(2 * WAIT) == [0] * 8, run.err
    losses = re.findall(r"^step:\d/6 val_loss:(\S+)", one_log(tmp_path), re.M)
    assert len(losses) == 1 and 4 < float(losses[0]) < np.log(785)
