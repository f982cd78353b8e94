"""Starts the script's ranks as real processes, and injects faults into them.

`Launch` starts every rank of one run in a folder, each with its own environment, arguments, output and exit
status. The processes are forks of one that has torch loaded, so a start takes a tenth of a second. A fault
happens in one rank, at a given call of a given function.
"""

import ast
import errno
import functools
import io
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore

import train_gpt as tg
from golden_inputs import random_documents, write_shard

if "ONEDNN_MAX_CPU_ISA" in os.environ:  # ./test.sh --cpus
    # For FP8 torch asks the CPU what it has, which oneDNN then may not use. Let torch emulate it, as it does
    # on a CPU without AMX.
    torch._scaled_mm = torch.backends.mkldnn.flags(enabled=False)(torch._scaled_mm)

# Timeout in seconds of whatever a test waits for: enough for a slow or busy machine.
WAIT = 200
GRACE = 3
# The cpu preset at a size that takes seconds: all layers and stages. It validates before steps 0, 3 and 6,
# and at the end; embed is untied after step 5. It has bigram_embed, tests of n-grams set orders. And all that
# the model can have: the copy pointer, signs, XSA, later targets, prefixes. What another cpu preset may have
# otherwise is set, too, but for the number of its stages.
TINY = """
heads=2 head_dim=8 mlp_dim=32 mix_groups=4 mudd_dim=64 ngrams.orders= bigram_vocab_size=320 padded_vocab=264
ngrams.contexts=word,above,copy ngrams.lr=0.56
pointer_dim=8 pointer_window=2560 sign_rows=64 layers.1.xsa=true layers.3.xsa=true window_unit=16
softcap.scale=30 softcap.shift=0 softcap.span=7.5 attn_scale=0.25 narrow_attn_scale=0.4
samples=0 microbatches=8 val_slices=3 val_slice_tokens=256 val_every=3 val_windows.short=6 val_windows.long=20
attention_cap=0 adam_lr=0.008 bank_lr=0.023 bank_wd=2.25 late_updates_from=58 two_momenta_from=90
cooldown_frac=0.4 momentum_max=0.93 momentum_warmup=90 momentum_cooldown=16
stages.*.max_doc_len=40 stages.*.mtp=1 stages.*.prefix=
stages.0.windows.short=3 stages.1.windows.short=4 stages.2.windows.short=5 stages.3.windows.short=6
stages.0.windows.long=9 stages.1.windows.long=10 stages.2.windows.long=11 stages.3.windows.long=13
stages.0.steps=2 stages.1.steps=1 stages.2.steps=1 stages.3.steps=4
stages.0.lr_mul=1 stages.1.lr_mul=1.52 stages.2.lr_mul=1.73 stages.3.lr_mul=1
stages.0.prefix=0.25 stages.1.prefix=0.2,0.1 stages.0.mtp=1,0.5,0.25 stages.1.mtp=1,0.5
stages.0.batch_tokens=192 stages.1.batch_tokens=256 stages.2.batch_tokens=384 stages.3.batch_tokens=384
""".split()


def settings(*more):
    """Returns the --set option of TINY and `more`."""
    return ["--set"] + TINY + list(more)


def make_corpus(folder, train=(6000, 6000), val=1500):
    """Writes shards of an easy text of seven tokens: training shards of `train` tokens, one for validation.

    The vocabulary makes each of the seven, 97 to 103, the prefix of the next.
    """
    folder.mkdir(parents=True)
    words = [""] * 257
    for token in range(97, 104):
        words[token] = (b"x" * (token - 96)).hex()
    (folder / "vocabulary.txt").write_text("\n".join(words) + "\n")
    sizes = {}
    for i, count in enumerate(train):
        sizes[f"train_{i:06d}"] = count
    sizes["val_000000"] = val
    rng = np.random.default_rng(2)
    for name, count in sizes.items():
        tokens = random_documents(rng, count, 257, 256, 120)
        tokens = np.where(tokens < 256, tokens % 7 + 97, 256)
        write_shard(folder / f"tiny_{name}.bin", tokens, 257, 256, text_bytes=int((tokens < 256).sum()))


CONTEXT = multiprocessing.get_context("forkserver")
# The first backward of a process imports the last one, which takes half a second for sympy.
CONTEXT.set_forkserver_preload(["train_gpt", "launch", "torch.fx.experimental.symbolic_shapes"])


def isolate(environment):
    """Takes torchrun's variables and all GPUs out of an environment; asks for one thread."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"


def _rank(rank, world_size, port, folder, arguments, output, fault):
    """Runs one rank as `python train_gpt.py ARGUMENTS` does after its imports."""
    os.setsid()
    os.chdir(folder)
    isolate(os.environ)
    if world_size:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(f"{output}/rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    tg.torch.set_num_threads(1)
    tg.COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # no torchrun here ends ranks that gloo leaves waiting
    if fault:
        fault()
    run_main(arguments)


ROOT = Path(tg.__file__).resolve().parent
SOURCE = Path(tg.__file__).read_text(encoding="utf-8")
SCRIPT = ast.parse(SOURCE)
LAST_STATEMENT = ast.Module([SCRIPT.body[-1]], [])


def run_main(arguments):
    """Runs the script's last statement, as `python train_gpt.py ARGUMENTS` does. Does not return."""
    sys.argv = ["train_gpt.py"] + arguments
    exec(compile(LAST_STATEMENT, "train_gpt.py", "exec"), vars(tg) | {"__name__": "__main__"})


def wrap(where, around, set_attribute=setattr):
    """Lets around(original, *arguments) run in place of `where`: for good, or with monkeypatch.setattr.

    `where` is "function", "Class.method" or "module.function".
    """
    *path, name = where.split(".")
    owner = tg
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return around(original, *args, **kwargs)

    set_attribute(owner, name, wrapped)


@dataclass
class FaultAtCall:
    """Runs `do()` before the `call`-th call (from 1) of `where`, named as in wrap()."""

    where: str
    call: int
    do: Callable

    def __call__(self):
        calls = itertools.count(1)

        def faulty(original, *args, **kwargs):
            if next(calls) == self.call:
                self.do()
            return original(*args, **kwargs)

        wrap(self.where, faulty)


@dataclass
class FaultAtWrite:
    """Runs `do()` before the `n`-th change (from 1) that the first call of `where` makes to files.

    Half of what torch.save writes counts as a change. Prints the change's name.
    """

    where: str
    n: int
    do: Callable

    def __call__(self):
        calls = itertools.count(1)
        changes = itertools.count(1)
        is_inside = False  # the first call of `where`

        def change(name):
            if is_inside and next(changes) == self.n:
                os.write(1, f"change: {name}\n".encode())
                self.do()

        def audit(event, args):
            opens = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
            if opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                change(event)

        def mark(original, *args, **kwargs):
            nonlocal is_inside
            is_inside = next(calls) == 1
            original(*args, **kwargs)
            is_inside = False

        def save_in_halves(original, content, file):
            if not is_inside:
                original(content, file)
                return
            buffer = io.BytesIO()
            original(content, buffer)
            data = buffer.getvalue()
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            change("half of torch.save")
            file.write(data[half:])

        wrap(self.where, mark)
        wrap("torch.save", save_in_halves)
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
    sys.stdout = open(1, "w", closefd=False)


def ascii_screen():
    """Makes standard output a screen that has ASCII letters only."""
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)


def fill_disk(free):
    """Limits file sizes so that `free` more bytes of the log can be written."""
    size = free + max(path.stat().st_size for path in Path().rglob("*.txt"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@dataclass
class SetGlobal:
    """Sets a global of the script to `value`, as a fault does: in one rank, before it begins."""

    name: str
    value: object

    def __call__(self):
        setattr(tg, self.name, self.value)


def list_checkpoints():
    names = sorted(path.name for path in Path().rglob("*.checkpoint/*"))
    print("checkpoints:", " ".join(names), flush=True)


class Launch:
    """Runs `world_size` ranks, as a context manager. 0: one process without torchrun's environment.

    By rank: `faults`, picklable, are called before it begins; `rank_arguments` are extra arguments. `out` and
    `err` are what all ranks have printed.
    """

    def __init__(self, folder, *arguments, world_size=0, faults=None, rank_arguments=None):
        self.output = tempfile.TemporaryDirectory(prefix="launch")
        # torchrun's agent keeps such a store too.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank in range(max(world_size, 1)):
            words = [str(argument) for argument in arguments]
            if rank_arguments:
                words += rank_arguments.get(rank, [])
            fault = (faults or {}).get(rank)
            args = rank, world_size, self.store.port, folder, words, self.output.name, fault
            self.processes.append(CONTEXT.Process(target=_rank, daemon=True, args=args))
        for process in self.processes:
            process.start()

    def wait(self, seconds=WAIT):
        """Returns the exit statuses by rank (killed: minus the signal). Fails after `seconds`.

        When a rank fails, those that still run after GRACE seconds are terminated, as torchrun does.
        """
        end = time.monotonic() + seconds
        while self.running:
            running = self.running
            assert time.monotonic() < end, f"{running} still run after {seconds} s; their output: {self.err}"
            if any(self.statuses):
                graced = time.monotonic() + GRACE
                for process in running:
                    process.join(max(0.0, graced - time.monotonic()))  # most have ended by then
                    process.terminate()
                    process.join()
            wait([process.sentinel for process in running], 1)
        return self.statuses

    def succeed(self):
        """Waits until all ranks have ended well."""
        with self:
            assert not any(self.wait()), self.err

    @property
    def statuses(self):
        return [process.exitcode for process in self.processes]

    @property
    def running(self):
        return [process for process in self.processes if process.exitcode is None]

    def read(self, stream):
        paths = sorted(Path(self.output.name).glob(f"*.{stream}"))
        return "".join(map(Path.read_text, paths))

    out = property(lambda self: self.read("out"))
    err = property(lambda self: self.read("err"))

    def kill(self):
        for process in self.processes:
            process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        for process in self.processes:
            process.join()
