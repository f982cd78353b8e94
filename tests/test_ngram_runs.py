"""Tests runs with an n-gram table, with real processes: failures, validation, resuming, saving, input, bytes.

Each rank has a thread that makes collectives of its own. Whatever ends a rank must end them all.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import synthetic
import train_gpt as tg
from launch import TINY, WAIT, FaultAtCall, Launch, SetGlobal, die, disk_full, make_corpus, settings, wrap
from test_bad_input import hang

SOON = WAIT / 10  # seconds in which all ranks end after one has failed
SETTINGS = (
    *("warmup=false", "microbatches=2", "val_slice_tokens=64"),
    *(f"stages.{i}.batch_tokens={4 * T}" for i, T in enumerate((24, 32, 48, 48))),
    *("ngrams.orders=2,3", "ngrams.rows=301", "ngrams.width=12"),
)
ATTEMPTS = Path("records", "other", "attempts")
BOTH = pytest.mark.parametrize("placement", ["sharded", "host"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder of shards, the first of which ends in mid-run."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder, train=(2200, 8000))
    return folder


@pytest.fixture
def launch(corpus, tmp_path):
    """Returns launch(*arguments, ...): it starts a small run in tmp_path. change: more settings."""

    def launch(*arguments, change=(), folder=tmp_path, **options):
        arguments = ["--preset", "cpu", "--data", corpus, *settings(*SETTINGS, *change), *arguments]
        return Launch(folder, *arguments, **options)

    return launch


def make_config(corpus, *change):
    cfg = tg.CPU
    for setting in (*TINY, *SETTINGS, f"data={corpus}", *change):
        cfg = tg.override(cfg, setting)
    return cfg


def log_of(folder):
    """Returns the text of the one log below `folder`, without the script's source."""
    (path,) = folder.glob("records/*/*/*.txt")
    source = Path(tg.__file__).read_text(encoding="utf-8")
    return path.read_text(encoding="utf-8").removeprefix(source)


# ---- failures while the other rank's thread waits in a collective ------------------------------------------


class Faults:
    """Applies several faults to one rank."""

    def __init__(self, *faults):
        self.faults = faults

    def __call__(self):
        for fault in self.faults:
            fault()


class TellWhenWaiting:
    """Makes the file "waiting" when this rank's thread makes the first collective of its `call`-th batch."""

    def __init__(self, call):
        self.call = call

    def __call__(self):
        FaultAtCall("Prefetcher._build", self.call, partial(Path.touch, Path("waiting")))()


def wait_for(path, process=None):
    """Waits for a file, and then a little longer. Fails if the process that should make it has ended."""
    end = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < end and (process is None or process.poll() is None), f"no {path}"
        time.sleep(0.01)
    time.sleep(0.2)


def fail_when_other_waits(error=None):
    wait_for(Path("waiting"))
    Path("failed").touch()
    raise error or RuntimeError("injected")


class UnreadableShard:
    """Fails to read the tokens of the shard of that name, when the other rank waits."""

    def __init__(self, name):
        self.name = name

    def __call__(self):
        def around(fromfile):
            def read(path, *args, **kwargs):
                if Path(path).name == self.name and "offset" in kwargs:
                    fail_when_other_waits(OSError(errno.EIO, os.strerror(errno.EIO)))
                return fromfile(path, *args, **kwargs)

            return read

        wrap("np.fromfile", around)


def first_batch_of_second_shard(corpus):
    cfg = make_config(corpus)
    loader = tg.TrainLoader(cfg, tg.find_shards(str(corpus), "train"), 0, 2)
    for step in range(cfg.steps):
        plan = tg.plan_step(cfg, step)
        loader.advance(plan.batch_tokens, plan.max_doc_len)
        if loader.opened == 1:
            loader.close()
            return step + 1


# By what fails: the rank in which it does; the batch whose collectives the other's thread then waits in; the
# faults.
FAILURES = {
    "a forward of rank 0": (
        *(0, 5, FaultAtCall("Prefetcher._build", 5, hang)),
        FaultAtCall("GPT.head_loss_and_grad", 4, fail_when_other_waits),
    ),
    "an update of rank 1": (
        *(1, 5, FaultAtCall("Prefetcher._build", 5, hang)),
        FaultAtCall("NgramTable.update", 3, fail_when_other_waits),
    ),
    "the first batch": (1, 1, FaultAtCall("Prefetcher._build", 1, fail_when_other_waits)),
    "a batch": (0, 5, FaultAtCall("Prefetcher._build", 5, fail_when_other_waits)),
    "the last batch": (1, 8, FaultAtCall("Prefetcher._build", 8, fail_when_other_waits)),
    "a batch, between its collectives": (
        *(0, 6),
        FaultAtCall("Prefetcher._route_ngrams", 6, fail_when_other_waits),
    ),
}
# The other rank must learn of it at once, not after a timeout.
NO_TIMEOUT = SetGlobal("COLLECTIVE_TIMEOUT", tg.timedelta(minutes=60))


def assert_all_end(run, folder):
    wait_for(folder / "failed")
    statuses = run.wait(SOON)
    assert all(statuses), run.err


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_ends_all_ranks(launch, tmp_path, what):
    """An unforeseen error in either thread of one rank, while the other rank's thread waits for it."""
    rank, batch, *failures = FAILURES[what]
    faults = {
        rank: Faults(NO_TIMEOUT, *failures),
        1 - rank: Faults(NO_TIMEOUT, TellWhenWaiting(batch)),
    }
    with launch(world_size=2, faults=faults) as run:
        assert_all_end(run, tmp_path)
    assert "RuntimeError: injected\n" in run.err


@pytest.mark.slow
def test_a_read_error_ends_all_ranks(launch, corpus, tmp_path):
    """In mid-run, of the next shard, on one rank."""
    batch = first_batch_of_second_shard(corpus)
    assert 3 < batch < 8
    faults = {
        0: Faults(NO_TIMEOUT, TellWhenWaiting(batch)),
        1: Faults(NO_TIMEOUT, UnreadableShard("tiny_train_000001.bin")),
    }
    with launch(world_size=2, faults=faults) as run:
        assert_all_end(run, tmp_path)
    assert "Input/output error" in run.err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_ctrl_c_ends_all_ranks(launch, tmp_path, ranks):
    """Rank 0 waits for its thread, which waits in a collective for rank 1's, which hangs."""
    faults = {
        0: Faults(NO_TIMEOUT, TellWhenWaiting(5)),
        1: Faults(NO_TIMEOUT, FaultAtCall("Prefetcher._build", 5, hang)),
    }
    with launch(world_size=2, faults=faults) as run:
        wait_for(tmp_path / "waiting")
        for rank in ranks:
            os.kill(run.processes[rank].pid, signal.SIGINT)
        statuses = run.wait(SOON)
    assert all(
        statuses[rank] == (-signal.SIGINT if rank in ranks else statuses[rank] or 1) for rank in (0, 1)
    )


TORCHRUN_SCRIPT = """
import os, sys
sys.path[:0] = {path!r}
import train_gpt as tg
from launch import FaultAtCall, run_main
from test_ngram_runs import TellWhenWaiting, hang
faults = TellWhenWaiting(5), FaultAtCall("Prefetcher._build", 5, hang)
faults[int(os.environ["RANK"])]()
run_main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal to a process group")
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_to_torchrun(corpus, tmp_path, whole_group):
    """torchrun alone gets SIGINT, as from a scheduler, or all processes, as from a terminal."""
    script = tmp_path / "script.py"
    tests = Path(__file__).resolve().parent
    script.write_text(TORCHRUN_SCRIPT.format(path=[str(tests / part) for part in (".", "..", "../data")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    command += ["--preset", "cpu", "--data", corpus, *settings(*SETTINGS)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment["TMPDIR"] = str(tmp_path)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **streams)
    try:
        wait_for(tmp_path / "waiting", process)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        process.communicate(timeout=SOON)  # the ranks hold its pipes open
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode != 0


# ---- validation while a batch is built ---------------------------------------------------------------------


IN_FP64 = ("dtype=float64", "bank_dtype=float64", "ngrams.dtype=float64")


class BuildBetweenValidations:
    """Lets this rank build batch i + 1 only when its i-th validation is done. Prints their losses.

    The other rank's thread waits for it in a collective, and both main threads validate meanwhile.
    """

    def __call__(self):
        validations, batches = threading.Semaphore(0), []

        def validating(validate):
            def call(*args):
                print(f"validated: {(loss := validate(*args))!r}", flush=True)
                validations.release()
                return loss

            return call

        def building(build):
            def call(*args):
                batches.append(1)
                if len(batches) > 1:
                    assert validations.acquire(timeout=WAIT)
                return build(*args)

            return call

        wrap("validate", validating)
        wrap("Prefetcher._build", building)


def closing_block(log):
    """Returns the closing block of a complete log."""
    return dict(re.findall(r"^(\w.*): (\S+)$", log[log.rindex("\nstep:") :], re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [3, 1])
def test_validation_of_slices_that_ranks_cannot_share_evenly(launch, tmp_path, slices):
    """Before every step. The rank without a slice takes part in the fetch of rows."""
    losses = []
    for world_size in (1, 2):
        change = (f"val_slices={slices}", "val_every=1", *IN_FP64)
        folder = tmp_path / str(world_size)
        folder.mkdir()
        faults = {world_size - 1: BuildBetweenValidations()}
        with launch(change=change, folder=folder, world_size=world_size, faults=faults) as run:
            assert run.wait() == [0] * world_size, run.err
        losses.append([float(loss) for loss in re.findall("^validated: (.+)", run.out, re.MULTILINE)])
    assert len(losses[0]) == 9 and losses[0][0] - losses[0][-1] > 0.2
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


# ---- checkpoints -------------------------------------------------------------------------------------------

FILES = f"{ATTEMPTS}/*.checkpoint/step00000004"


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """Returns stopped(*change): it makes a folder with a run of two ranks, killed after its checkpoint of
    step 4."""
    runs = {}

    def stopped(*change):
        if change not in runs:
            runs[change] = folder = tmp_path_factory.mktemp("stopped")
            arguments = ["--preset", "cpu", "--data", corpus, *settings(*SETTINGS, *change)]
            faults = dict.fromkeys((0, 1), FaultAtCall("AsyncLoss.poll", 9, die))
            with Launch(folder, *arguments, *EVERY, world_size=2, faults=faults) as run:
                assert -signal.SIGKILL in run.wait(), run.err
            assert len(list(folder.glob(FILES))) == 1
        return shutil.copytree(runs[change], tmp_path_factory.mktemp("copy") / "run")

    return stopped


EVERY = ("--checkpoint-every", 2)
RESUME = ("--resume", ATTEMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [("warmup=true",), ("ngrams.dtype=bfloat16",)],
    ids=["fp32", "bf16"],
)
def test_a_killed_run_ends_as_if_never_stopped(launch, stopped, tmp_path, change):
    """All digits of its loss, all bits of its weights and its table."""
    resumed = stopped(*change)
    with launch("--save", "model.pt", change=change, world_size=2) as run:
        assert run.wait() == [0, 0], run.err
    with launch("--save", "model.pt", *RESUME, change=change, folder=resumed, world_size=2) as run:
        assert run.wait() == [0, 0], run.err
    (log,) = resumed.glob(f"{ATTEMPTS}/*.from4_*.txt")
    ends = closing_block(log_of(tmp_path)), closing_block(log.read_text(encoding="utf-8"))
    assert ends[0]["val_loss"] == ends[1]["val_loss"] and ends[1]["resumed_after_step"] == "4"
    for name in ("model.pt", "model.pt.ngrams"):
        assert (resumed / name).read_bytes() == (tmp_path / name).read_bytes()
    assert any((tmp_path / "model.pt.ngrams").read_bytes())


class BreakTable:
    """Puts an infinite number into the last row of this rank's table before its second checkpoint."""

    def __call__(self):
        def around(save):
            def save_checkpoint(run, about, progress, model, optimizer):
                if progress["step"] == 4:
                    optimizer.ngrams.finish()
                    optimizer.ngrams.block[-1, -1] = torch.inf
                save(run, about, progress, model, optimizer)

            return save_checkpoint

        wrap("save_checkpoint", around)


@pytest.mark.slow
def test_a_table_that_is_not_finite_is_not_saved(launch, tmp_path):
    """On one rank. The checkpoint before it stays the last."""
    with launch(*EVERY, world_size=2, faults={1: BreakTable()}) as run:
        assert all(run.wait())
    assert "the n-gram table is not finite after step 4" in run.err
    assert [path.name for path in tmp_path.glob("records/**/step????????")] == ["step00000002"]


# ---- saved models ------------------------------------------------------------------------------------------


def row_values(rows, width, dtype):
    """Returns a table (rows, width) whose every number is of its own."""
    return (
        torch.arange(1, rows * width + 1, dtype=torch.int64)
        .mul_(0x9E3779B1)
        .remainder_(30011)
        .view(rows, width)
        .to(dtype)
    )


def save_table(rank, world_size, path, cfg, chunk):
    tg.SAVED_ROWS = chunk
    model = tg.GPT(cfg, world_size)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(rank, world_size))
    table = model.ngrams = optimizer.ngrams
    own = row_values(table.rows, cfg.ngrams.width, table.block.dtype)[rank::world_size]
    table.block[: len(own)] = own
    tg.save_model(path, model, rank)


def test_other_ranks_save_nothing(corpus, tmp_path):
    model = tg.GPT(make_config(corpus, "ngrams.orders="))
    tg.save_model(str(tmp_path / "model.pt"), model, rank=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_tables_have_rows_in_order(workers, corpus, tmp_path, dtype, world_size):
    """From any number of ranks, whose blocks differ in length; 602 rows in chunks of one, 100, and all."""
    change = ("microbatches=6", f"ngrams.dtype={dtype}")
    cfg, path = make_config(corpus, *change), tmp_path / "model.pt"
    expected = row_values(602, 12, tg.dtype_of(dtype)).view(torch.uint8).numpy().tobytes()
    for chunk in (1, 100, 1000):
        workers(world_size, save_table, str(path), cfg, chunk)
        assert (tmp_path / "model.pt.ngrams").read_bytes() == expected


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """Returns saved(*change): it makes the folder of a run of two ranks with --save."""
    runs = {}

    def saved(*change):
        if change not in runs:
            runs[change] = folder = tmp_path_factory.mktemp("saved")
            arguments = ["--preset", "cpu", "--data", corpus, *settings(*SETTINGS, *change)]
            with Launch(folder, *arguments, "--save", "model.pt", world_size=2) as run:
                assert run.wait() == [0, 0], run.err
        return runs[change]

    return saved


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [("warmup=true",), ("ngrams.placement=host", "warmup=true")],
    ids=["warm_up", "host_and_warm_up"],
)
def test_what_does_not_change_the_table(saved, change):
    """Nor any digit of the loss."""
    first, second = saved("ngrams.dtype=float32"), saved("ngrams.dtype=float32", *change)
    assert closing_block(log_of(first))["val_loss"] == closing_block(log_of(second))["val_loss"]
    assert (first / "model.pt.ngrams").read_bytes() == (second / "model.pt.ngrams").read_bytes()


def validation_loss(model, corpus):
    cfg = model.cfg
    val = tg.ValLoader(cfg, tg.find_shards(str(corpus), "val"))
    return tg.validate(model, val, tg.Exchange(0, 1), tg.window_tokens(cfg, cfg.val_windows))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_gives_the_runs_loss(saved, corpus, dtype):
    """Its table is mapped, for reading only."""
    folder = saved(f"ngrams.dtype={dtype}", "ngrams.lr=3")
    path = folder / "model.pt.ngrams"
    assert path.stat().st_size == 602 * 12 * tg.dtype_of(dtype).itemsize
    path.chmod(0o444)
    model = tg.load_model(str(folder / "model.pt"))
    assert isinstance(model.ngrams.rows, np.memmap) and model.ngrams.rows.mode == "r"
    assert not model.ngrams.rows.flags.writeable
    loss = float(closing_block(log_of(folder))["val_loss"])
    assert validation_loss(model, corpus) == pytest.approx(loss, abs=2e-5)
    model.ngrams = model.ngrams._replace(rows=np.zeros_like(model.ngrams.rows))
    assert abs(validation_loss(model, corpus) - loss) > 2e-4  # the rows matter


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's list of mappings")
def test_a_fetch_reads_few_pages(tmp_path):
    """Of a table of a gigabyte, which is a file without blocks."""
    path, ngrams = tmp_path / "model.pt.ngrams", tg.Ngrams(orders=(2,), rows=1 << 22, width=64)
    with open(path, "wb") as file:
        file.truncate(1 << 30)
        file.seek(256 * 77)
        file.write(np.arange(64, dtype=np.float32).tobytes())

    def resident():
        """Returns the KiB of the file that are in this process's memory."""
        (mapping,) = re.findall(
            rf"{path}\n(?:\w+: .*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text()
        )
        return int(mapping)

    rows = np.memmap(path, np.uint8, "r").reshape(ngrams.rows, -1)
    table = tg.NgramFile(rows, torch.float32, "cpu")
    assert resident() == 0
    rows = table.fetch(torch.tensor([5, 77, (1 << 22) - 1], dtype=torch.int32))
    assert torch.equal(rows, torch.stack([torch.zeros(64), torch.arange(64.0), torch.zeros(64)]))
    assert 0 < resident() < 1 << 14


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 602 * 12 * 4 - 1, 602 * 12 * 4 + 1, 0])
def test_a_table_that_is_missing_or_of_another_size_is_refused(saved, tmp_path, size):
    folder = shutil.copytree(saved("ngrams.dtype=float32"), tmp_path / "run")
    path = folder / "model.pt.ngrams"
    if size is None:
        path.unlink()
    else:
        path.chmod(0o644)
        os.truncate(path, size)
    with pytest.raises(tg.UserError) as error:
        tg.load_model(str(folder / "model.pt"))
    assert str(error.value).startswith(f"cannot load {folder / 'model.pt'}: ")
    assert "\n" not in str(error.value)


class DiskFullInTable:
    """Fails to write the table, with the second part of it."""

    def __call__(self):
        def around(save):
            def save_model(*args):
                FaultAtCall("NgramTable.fetch", 2, disk_full)()
                save(*args)

            return save_model

        wrap("save_model", around)


@pytest.mark.slow
def test_a_table_that_cannot_be_written_ends_all_ranks(launch, tmp_path):
    """The run is complete; the other rank waits for rank 0 to fetch rows."""
    chunks = SetGlobal("SAVED_ROWS", 100)
    faults = {0: Faults(NO_TIMEOUT, chunks, DiskFullInTable())}
    faults[1] = Faults(NO_TIMEOUT, chunks)
    with launch("--save", "model.pt", world_size=2, faults=faults) as run:
        assert all(run.wait())
    assert re.search("train_gpt.py: error on rank 0: .*No space left on device", run.err)
    assert log_of(tmp_path).endswith("complete: yes\n")


# ---- input that is wrong -----------------------------------------------------------------------------------


@pytest.fixture
def script(corpus, tmp_path, monkeypatch, capsys):
    """Returns script(*arguments): it runs the command line in this process, up to where a model is built.

    It returns the exit status, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def build(*args):
        raise tg.UserError("a model was built")

    monkeypatch.setattr(tg, "GPT", build)
    make = tg.NgramTable.__init__

    def init(self, cfg, exchange, device, backend):
        assert device.type == "meta"
        make(self, cfg, exchange, device, backend)

    monkeypatch.setattr(tg.NgramTable, "__init__", init)

    def script(*arguments):
        start = ["--preset", "cpu", "--data", str(corpus), *settings(*SETTINGS)]
        return tg.main([*start, *map(str, arguments)]), *capsys.readouterr()

    return script


@pytest.mark.parametrize(
    "setting, message",
    [
        *(
            (f"ngrams.orders={bad}", "ngrams.orders: use different numbers")
            for bad in ("2,3,2", "1,2", "3,0")
        ),
        (f"ngrams.rows={1 << 30}", "ngrams: use fewer than 2**31 rows"),
        ("ngrams.placement=disk", "--set ngrams.placement=disk: give sharded or host"),
        ("ngrams.reduction=fp32", "--set ngrams.reduction: unknown; use "),
        ("params.ngrams.exchange=sparse", "--set params.ngrams.exchange: unknown; use "),
    ],
)
def test_a_wrong_setting_is_refused(script, tmp_path, setting, message):
    status, out, err = script("--set", setting)
    assert status == 1 and not out and err.count("\n") == 1
    assert err.startswith(f"train_gpt.py: error: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pages, status", [(602 * (12 * 4 + 8) - 1, 1), (602 * (12 * 4 + 8), 0)])
def test_a_table_that_does_not_fit_is_refused(script, tmp_path, monkeypatch, pages, status):
    """Before anything is made. Just as much as is needed fits, however many processes share it."""
    monkeypatch.setattr(tg.os, "sysconf", {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 1}.__getitem__)
    found, _, err = script("--check", 2)
    assert found == status and ("does not fit in memory: use --set ngrams.rows=300" in err) == status
    assert not list(tmp_path.iterdir())


def test_no_orders_switch_the_table_off(script):
    status, out, _ = script("--set", "ngrams.orders=", "--check", 1)
    assert status == 0 and "n-grams" not in out
    assert "bigram_embed" not in tg.param_shapes(tg.RECORD, 1)
    assert "bigram_embed" in tg.param_shapes(tg.override(tg.RECORD, "ngrams.orders="), 1)


def test_settings_of_bigrams_are_accepted_beside_the_table(script):
    status, out, err = script("--set", "params.bigram_embed.lr_mul=2", "--check", 2)
    assert status == 0 and not err


# ---- the log, and the bytes sent ---------------------------------------------------------------------------


class TellBytes:
    """Prints what this rank has counted as sent, by its exchanges, at the end of training."""

    def __call__(self):
        def around(train):
            def call(*args):
                result, (exchange, prefetch) = train(*args), args[2:4]
                print(f"sent: {json.dumps([exchange.sent, prefetch.sent])}", flush=True)
                return result

            return call

        wrap("train", around)


def rows_by_step(cfg, rank, world_size=2):
    """Returns the set of n-grams' rows that a rank touches in each step."""
    paths = tg.find_shards(cfg.data, "train")
    loader, steps = tg.TrainLoader(cfg, paths, rank, world_size), []
    for plan in (tg.plan_step(cfg, step) for step in range(cfg.steps)):
        batch = loader.batch(plan.batch_tokens, plan.max_doc_len)
        steps.append({row for micro_batch in batch for row in micro_batch.hashed_rows.flatten().tolist()})
    loader.close()
    return steps


def rows_sent(cfg):
    """Counts the rows that travel from rank 0 of two: gradients, and rows for the other's steps."""
    count = Counter()
    for mine, theirs in zip(rows_by_step(cfg, 0), rows_by_step(cfg, 1)):
        count["gradient rows"] += sum(row % 2 for row in mine)
        count["rows"] += sum(row % 2 == 0 for row in theirs)
    return count


WIDE = ("head_dim=32", "ngrams.width=64", "val_every=0")


@pytest.fixture(scope="module")
def counted(corpus, tmp_path_factory):
    """Returns counted(*change): it returns a run's log, and what rank 0's two exchanges have sent."""
    runs = {}

    def counted(*change):
        if change not in runs:
            folder = tmp_path_factory.mktemp("counted")
            arguments = ["--preset", "cpu", "--data", corpus, *settings(*SETTINGS, *WIDE, *change)]
            with Launch(folder, *arguments, world_size=2, faults={0: TellBytes()}) as run:
                assert run.wait() == [0, 0], run.err
            runs[change] = log_of(folder), json.loads(re.search("^sent: (.+)", run.out, re.MULTILINE)[1])
        return runs[change]

    return counted


def ngram_bytes(exchange, prefetch):
    """Returns the bytes of n-grams' rows in training and of all that is told about them."""
    kinds = "rows", "gradient rows", "row ids"
    named = [(exchange if kind.endswith("rows") else prefetch)[f"{kind} ngrams"] for kind in kinds]
    return sum(named) + sum(nbytes for kind, nbytes in prefetch.items() if kind.startswith("counts"))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["ngrams.rows=301", "ngrams.dtype=bfloat16"])
def test_the_bytes_sent_are_those_of_touched_rows(counted, corpus, change):
    _, (exchange, prefetch) = counted(change)
    cfg = make_config(corpus, *WIDE, change)
    rows, row_bytes = rows_sent(cfg), 64 * tg.dtype_of(cfg.ngrams.dtype).itemsize
    assert min(rows.values()) > 10
    assert {kind: exchange[f"{kind} ngrams"] for kind in rows} == {
        kind: count * row_bytes for kind, count in rows.items()
    }
    # An id for each row that is fetched and has a gradient.
    assert prefetch["row ids ngrams"] == 4 * rows["gradient rows"]
    kinds = sum(1 + 2 * tg.plan_step(cfg, step).updates(2) for step in range(cfg.steps))
    assert sum(nbytes for kind, nbytes in prefetch.items() if kind.startswith("counts")) == 8 * kinds


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1 << 16, 1 << 18])
def test_the_bytes_sent_do_not_grow_with_the_table(counted, corpus, rows):
    """But for hashes that meet, the same; ids and counts are little beside the rows."""
    sent = ngram_bytes(*counted(f"ngrams.rows={rows}")[1])
    count = rows_sent(make_config(corpus, *WIDE, f"ngrams.rows={rows}"))
    assert 256 * sum(count.values()) < sent <= 1.05 * 256 * sum(count.values())
    assert sent == pytest.approx(ngram_bytes(*counted(f"ngrams.rows={1 << 17}")[1]), rel=0.05)


@pytest.mark.slow
def test_the_log_lists_all_bytes_sent(counted):
    log, sent = counted("ngrams.rows=301")
    listed = dict(re.findall(r"^bytes sent by rank 0, (.+): (\d+)$", log, re.MULTILINE))
    of_thread = {f"prefetch {kind}": nbytes for kind, nbytes in sent[1].items()}
    assert listed == {kind: str(nbytes) for kind, nbytes in (sent[0] | of_thread).items()}


# ---- the preset --------------------------------------------------------------------------------------------

A_64TH = (  # of the preset's matrices, tables and tokens, without what needs a GPU
    *("heads=6", "head_dim=16", "mlp_dim=384", "window_unit=16", "head_chunk=512"),
    *("vocab_size=785", "padded_vocab=792", "bos_id=784", "bigram_vocab_size=3930"),
    *("ngrams.rows=131072", "ngrams.width=96", "val_slice_tokens=1024", "val_slices=8", "val_every=0"),
    *(f"stages.{i}.batch_tokens={tokens}" for i, tokens in enumerate((2048, 4096, 6144, 5120, 2048))),
    *("stages.*.max_doc_len=256", "stages.*.steps=2"),
    *("kernels=", "attention=dense", "fp8=false", "compile=false"),
)


@pytest.mark.slow
def test_the_record_preset_at_a_64th_of_its_size_on_8_processes(tmp_path):
    synthetic.write_shards(tmp_path / "shards", 400_000, 10_000, 785)
    options = [word for setting in A_64TH for word in ("--set", setting)]
    arguments = ["--preset", "record", "--data", "shards", *options]
    with Launch(tmp_path, *arguments, world_size=8) as run:
        assert run.wait(4 * WAIT) == [0] * 8, run.err
    text = log_of(tmp_path)
    losses = re.findall(r"^step:10/10 val_loss:(\S+)", text, re.M)
    assert len(losses) == 1 and 4 < float(losses[0]) < np.log(785)
