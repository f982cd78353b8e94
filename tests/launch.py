"""The script as a user's processes run it, started by a fork of a process that has torch loaded: a tenth of a second each.

`Launch` starts every rank of one run in a folder; each is a real process with its own environment, arguments, output and exit
status, and can be told to meet a fault at a certain call of a certain function.
"""
import errno
import functools
import io
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
from torch.distributed import TCPStore

import train_gpt as tg
from golden_inputs import random_documents, write_shard

# Seconds that a test waits for what must come, at most: enough for a machine that is slow, or has other work.
WAIT = 200
STEPS = 8
# The cpu preset at a size that takes seconds: all layers and stages, two steps each; validation before steps 0, 3, 6, and last.
TINY = ["heads=2", "head_dim=8", "mlp_dim=32", "bigram_rows=320", "val_slices=3", "val_slice_tokens=256", "val_every=3"] + [
    f"stages.{i}.{name}={value}" for i, T in enumerate((24, 32, 48, 48))
    for name, value in (("steps", 2), ("tokens", 8 * T), ("longest", 40))]


def settings(*more):
    return [word for setting in (*TINY, *more) for word in ("--set", setting)]


def make_corpus(folder, train=(6000, 6000), val=1500):
    """Training shards and one for validation, of so many tokens, of an easy text of bytes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(2)
    for split, number, count in [("train", i, count) for i, count in enumerate(train)] + [("val", 0, val)]:
        tokens = random_documents(rng, count, 257, 256, 120)
        tokens = np.where(tokens < 256, tokens % 7 + 97, 256)
        write_shard(folder / f"tiny_{split}_{number:06d}.bin", tokens, 257, 256, text_bytes=int((tokens < 256).sum()))


CONTEXT = multiprocessing.get_context("forkserver")
# The last is what the first backward of a process imports: half a second, for sympy.
CONTEXT.set_forkserver_preload(["train_gpt", "launch", "torch.fx.experimental.symbolic_shapes"])


def _rank(folder, arguments, environment, output, fault):
    """One rank's life: what `python train_gpt.py ARGUMENTS` does after its imports."""
    os.setsid()
    os.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    tg.torch.set_num_threads(1)
    tg.PATIENCE = timedelta(seconds=60)  # no torchrun ends those that gloo leaves waiting
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fault:
        fault()
    status = tg.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def wrap(where, around):
    """Puts `around(original)` in the place of `where`, a function of the script, "Class.method" or "module.function"."""
    *owner, name = where.split(".")
    owner = functools.reduce(getattr, owner, tg)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(around(original)))


class At:
    """A fault: `do()` instead of the `call`-th call (from 1) of `where`, a function of the script or "Class.method"."""

    def __init__(self, where, call, do):
        self.where, self.call, self.do = where, call, do

    def __call__(self):
        calls = []

        def faulty(original):
            def call(*args, **kwargs):
                calls.append(1)
                if len(calls) == self.call:
                    self.do()
                return original(*args, **kwargs)
            return call
        wrap(self.where, faulty)


class AtWrite:
    """A fault: `do()` before the `n`-th change (from 1) that the first call of `where` makes to files, whichever way it makes
    it; half of what torch.save writes is one. The change is named on the screen."""

    def __init__(self, where, n, do):
        self.where, self.n, self.do = where, n, do

    def __call__(self):
        changes, inside = [], []  # whether in the first call, from its begin on

        def change(name):
            if inside and inside[-1]:
                changes.append(name)
                if len(changes) == self.n:
                    os.write(1, f"change: {name}\n".encode())
                    self.do()

        def hear(event, args):
            opens = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
            if opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                change(event)

        def noting(original):
            def call(*args, **kwargs):
                inside.append(not inside)
                result = original(*args, **kwargs)
                inside.append(False)
                return result
            return call

        def syncing(original):
            def fsync(file):
                change("os.fsync")
                original(file)
            return fsync

        def saving(original):
            def save(state, file):
                if not hasattr(file, "write"):
                    return original(state, file)
                original(state, data := io.BytesIO())
                data, half = data.getvalue(), len(data.getvalue()) // 2
                file.write(data[:half])
                file.flush()
                change("half of torch.save")
                file.write(data[half:])
            return save

        for where, around in ((self.where, noting), ("os.fsync", syncing), ("torch.save", saving)):
            wrap(where, around)
        sys.addaudithook(hear)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def no_memory():
    raise MemoryError


def lose_reader():
    """Standard output becomes a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def fill_disk(room):
    """From now on the disk has so many bytes left for the log."""
    size = room + max(path.stat().st_size for path in Path().rglob("*.txt"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


class Put:
    """A fault: a name of the script stands for `value`."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def __call__(self):
        setattr(tg, self.name, self.value)


def list_checkpoints():
    print("checkpoints:", *sorted(path.name for path in Path().rglob("*.checkpoint/*")), flush=True)


class Launch:
    """A run of `world` ranks. `faults` maps a rank to what it calls before it begins (picklable); `environments`, to what
    its environment has besides. A world of 0 is one process without torchrun's environment. Use as a context manager."""

    def __init__(self, folder, *arguments, world=0, faults=None, environments=None, rank_arguments=None):
        self.output = Path(tempfile.mkdtemp(prefix="launch"))
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent keeps one so
        self.processes, self.said = [], {}
        for rank in range(max(world, 1)):
            environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            if sys.platform == "linux":
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            if world:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port),
                                "TORCHELASTIC_USE_AGENT_STORE": "True"}
            environment |= (environments or {}).get(rank, {})
            own = (rank_arguments or {}).get(rank, [])
            self.processes.append(CONTEXT.Process(target=_rank, daemon=True, args=(
                str(folder), [*map(str, arguments), *own], environment, str(self.output / f"rank{rank}"), (faults or {}).get(rank))))
        for process in self.processes:
            process.start()

    def wait(self, seconds=WAIT):
        """-> the exit statuses, by rank, negative signal numbers for the killed; fails if one still runs after `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        running = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        assert not running, f"ranks {running} still run after {seconds} s; they said: {self.err}"
        return [process.exitcode for process in self.processes]

    @property
    def running(self):
        return any(process.exitcode is None for process in self.processes)

    def _said(self, name):
        if name in self.said:
            return self.said[name]
        paths = [self.output / f"rank{rank}.{name}" for rank in range(len(self.processes))]
        return "".join(path.read_text() for path in paths if path.exists())

    @property
    def out(self):
        return self._said("out")

    @property
    def err(self):
        return self._said("err")

    def kill(self):
        for process in self.processes:
            if process.exitcode is None:
                process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        for process in self.processes:
            process.join()
        self.said = {"out": self.out, "err": self.err}
        shutil.rmtree(self.output)
