"""Starts the script's ranks as real processes, and injects faults into them.

`Launch` starts every rank of one run in a folder, each with its own environment, arguments, output and exit
status. The processes are forks of one that has torch loaded, so a start takes a tenth of a second. A fault
happens in one rank, at a given call of a given function.
"""

import ast
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
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from torch.distributed import TCPStore

import train_gpt as tg
from golden_inputs import random_documents, write_shard

# Timeout in seconds of whatever a test waits for: enough for a slow or busy machine.
WAIT = 200
GRACE = 3
STEPS = 8
# The cpu preset at a size that takes seconds: all layers and stages. It validates before steps 0, 3 and 6,
# and at the end; embed is untied after step 5. It has bigram_embed, tests of n-grams set theirs. And all that
# the model can have: signs, XSA, prefixes.
TINY = [
    *("heads=2", "head_dim=8", "mlp_dim=32", "ngrams.orders=", "bigram_vocab_size=320"),
    *("val_slices=3", "val_slice_tokens=256", "val_every=3"),
    *(f"stages.{i}.steps={n}" for i, n in enumerate((2, 1, 1, 4))),
    *("stages.3.lr_mul=1", "stages.*.max_doc_len=40"),
    *("samples=0", "microbatches=8"),
    *("sign_rows=64", *(f"layers.{i}.xsa=true" for i in (1, 3))),
    *("stages.0.prefix=0.25", "stages.1.prefix=0.2,0.1"),
    *(f"stages.{i}.batch_tokens={8 * T}" for i, T in enumerate((24, 32, 48, 48))),
]


def settings(*more):
    """Returns the --set options of TINY and `more`."""
    return [word for setting in (*TINY, *more) for word in ("--set", setting)]


def make_corpus(folder, train=(6000, 6000), val=1500):
    """Writes shards of an easy text of seven tokens: training shards of `train` tokens, one for validation.

    The vocabulary makes each of the seven, 97 to 103, the prefix of the next.
    """
    folder.mkdir(parents=True)
    words = [b"x" * max(0, i - 96) if i < 104 else b"" for i in range(257)]
    (folder / "vocabulary.txt").write_text("".join(word.hex() + "\n" for word in words))
    rng = np.random.default_rng(2)
    for split, number, count in [("train", i, count) for i, count in enumerate(train)] + [("val", 0, val)]:
        tokens = random_documents(rng, count, 257, 256, 120)
        tokens = np.where(tokens < 256, tokens % 7 + 97, 256)
        write_shard(
            folder / f"tiny_{split}_{number:06d}.bin", tokens, 257, 256, text_bytes=int((tokens < 256).sum())
        )


CONTEXT = multiprocessing.get_context("forkserver")
# The first backward of a process imports the last one, which takes half a second for sympy.
CONTEXT.set_forkserver_preload(["train_gpt", "launch", "torch.fx.experimental.symbolic_shapes"])


def _rank(folder, arguments, environment, output, fault):
    """Runs one rank as `python train_gpt.py ARGUMENTS` does after its imports."""
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
    tg.COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # no torchrun here ends ranks that gloo leaves waiting
    if fault:
        fault()
    run_main(arguments)


LAST_STATEMENT = ast.Module([ast.parse(Path(tg.__file__).read_text(encoding="utf-8")).body[-1]], [])


def run_main(arguments):
    """Runs the script's last statement, as `python train_gpt.py ARGUMENTS` does. Does not return."""
    sys.argv = ["train_gpt.py", *arguments]
    exec(compile(LAST_STATEMENT, "train_gpt.py", "exec"), vars(tg) | {"__name__": "__main__"})


def wrap(where, around):
    """Replaces `where`, "function", "Class.method" or "module.function", with `around(original)`."""
    *owner, name = where.split(".")
    owner = functools.reduce(getattr, owner, tg)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(around(original)))


class FaultAtCall:
    """Runs `do()` before the `call`-th call (from 1) of `where`, named as in wrap()."""

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


class FaultAtWrite:
    """Runs `do()` before the `n`-th change (from 1) that the first call of `where` makes to files.

    Half of what torch.save writes counts as a change. Prints the change's name.
    """

    def __init__(self, where, n, do):
        self.where, self.n, self.do = where, n, do

    def __call__(self):
        changes, inside = [], []  # inside[-1]: in the first call of `where`

        def change(name):
            if inside and inside[-1]:
                changes.append(name)
                if len(changes) == self.n:
                    os.write(1, f"change: {name}\n".encode())
                    self.do()

        def audit(event, args):
            opens = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
            if opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                change(event)

        def marking(original):
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

        for where, around in ((self.where, marking), ("os.fsync", syncing), ("torch.save", saving)):
            wrap(where, around)
        sys.addaudithook(audit)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def lose_reader():
    """Turns standard output into a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def fill_disk(free):
    """Limits file sizes so that `free` more bytes of the log can be written."""
    size = free + max(path.stat().st_size for path in Path().rglob("*.txt"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


class SetGlobal:
    """Sets a global of the script to `value`, as a fault does: in one rank, before it begins."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def __call__(self):
        setattr(tg, self.name, self.value)


def list_checkpoints():
    print("checkpoints:", *sorted(path.name for path in Path().rglob("*.checkpoint/*")), flush=True)


class Launch:
    """Runs `world_size` ranks, as a context manager. 0: one process without torchrun's environment.

    By rank: `faults`, picklable, are called before it begins; `environments` are extra variables;
    `rank_arguments` are extra arguments.
    """

    def __init__(self, folder, *arguments, world_size=0, faults=None, environments=None, rank_arguments=None):
        self.output = Path(tempfile.mkdtemp(prefix="launch"))
        # torchrun's agent keeps such a store too.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.final_output = [], {}
        for rank in range(max(world_size, 1)):
            environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            if sys.platform == "linux":
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            if world_size:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            environment |= (environments or {}).get(rank, {})
            extra, fault = (rank_arguments or {}).get(rank, []), (faults or {}).get(rank)
            output = str(self.output / f"rank{rank}")
            args = (str(folder), [*map(str, arguments), *extra], environment, output, fault)
            self.processes.append(CONTEXT.Process(target=_rank, daemon=True, args=args))
        for process in self.processes:
            process.start()

    def wait(self, seconds=WAIT):
        """Returns the exit statuses by rank (killed: minus the signal). Fails after `seconds`.

        When a rank fails, those that still run after GRACE seconds are terminated, as torchrun does.
        """
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            if any(process.exitcode for process in self.processes):
                time.sleep(GRACE)
                for process in self.processes:
                    process.terminate()
                    process.join()
            wait([process.sentinel for process in self.processes if process.exitcode is None], 1)
        running = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        assert not running, f"ranks {running} still run after {seconds} s; their output: {self.err}"
        return [process.exitcode for process in self.processes]

    @property
    def running(self):
        return any(process.exitcode is None for process in self.processes)

    def _read_output(self, name):
        if name in self.final_output:
            return self.final_output[name]
        paths = [self.output / f"rank{rank}.{name}" for rank in range(len(self.processes))]
        return "".join(path.read_text() for path in paths if path.exists())

    @property
    def out(self):
        return self._read_output("out")

    @property
    def err(self):
        return self._read_output("err")

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
        self.final_output = {"out": self.out, "err": self.err}
        shutil.rmtree(self.output)
