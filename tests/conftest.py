"""Fixtures of all tests: the script on the path, one thread, and pools of real processes as ranks."""

import gc
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parent / "data"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from launch import CONTEXT, WAIT

torch.set_num_threads(1)


def _serve(rank, world_size, store, pipe):
    """Joins the group, then runs the functions that arrive until the pipe closes."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=WAIT),
    )
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = True, fn(rank, world_size, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))  # plain pickle: tensors travel as copies


class Pool:
    """Keeps `world_size` processes in a gloo group. A failure ends the pool: ranks may be out of step."""

    def __init__(self, world_size):
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            mine, theirs = CONTEXT.Pipe()
            store = os.path.join(self.folder.name, "store")
            process = CONTEXT.Process(target=_serve, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, fn, args, timeout):
        """Returns fn(rank, world_size, *args) of every rank, in rank order."""
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(pickle.dumps((fn, args)))
            except BrokenPipeError:
                raise RuntimeError(f"rank {rank} died before {fn.__name__}") from None
        answers, end = {}, time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(open_pipes), max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"{fn.__name__}: no answer from ranks {sorted(open_pipes.values())} after {timeout} s"
                )
            for pipe in ready:
                rank = open_pipes[pipe]
                try:
                    good, answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"rank {rank} died in {fn.__name__}") from None
                if not good:  # the others may hang in a collective, waiting for this rank
                    raise RuntimeError(f"rank {rank} raised in {fn.__name__}:\n{answers[rank]}")
        return [answers[rank] for rank in range(len(self.pipes))]

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


@pytest.fixture(scope="session", autouse=True)
def unfreeze():
    """Undoes gc.freeze() of runs that failed in this process: Triton would report leaks at exit."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def workers():
    """Returns workers(world_size, fn, *args): it runs fn(rank, world_size, *args) on every rank of a group.

    It returns the ranks' results. `fn` is a module's top-level function. A rank that raises, dies or hangs
    fails the test.
    """
    pools = {}

    def run(world_size, fn, *args, timeout=WAIT + 20):
        pool = pools.get(world_size) or pools.setdefault(world_size, Pool(world_size))
        try:
            return pool.run(fn, args, timeout)
        except BaseException:
            for process in pools.pop(world_size).processes:
                process.kill()
            pool.close()
            raise

    yield run
    for pool in pools.values():
        pool.close()
