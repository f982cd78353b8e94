"""Fixtures of all tests: the script on the path, one thread, and pools of real processes as ranks."""

import contextlib
import gc
import os
import pickle
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
for folder in "evals", "records", "bench/gpu", "bench", "data", "", "tests":
    sys.path.insert(0, str(ROOT / folder))

from launch import CONTEXT, WAIT

torch.set_num_threads(1)


def _join(rank, world_size, store):
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=WAIT)
    dist.init_process_group("gloo", f"file://{store}", wait, world_size, rank)


def _call(request):
    """Takes and returns plain pickles, in which tensors travel as copies."""
    fn, args = pickle.loads(request)
    return pickle.dumps(fn(*args))


class Pool:
    """Keeps `world_size` processes in a gloo group. A failure ends the pool: ranks may be out of step."""

    def __init__(self, world_size):
        self.folder = tempfile.TemporaryDirectory()
        store = f"{self.folder.name}/store"
        self.ranks = []
        starts = []
        for rank in range(world_size):
            process = ProcessPoolExecutor(1, CONTEXT, _join, (rank, world_size, store))
            self.ranks.append(process)
            starts.append(process.submit(os.getpid))
        self.pids = [start.result(WAIT) for start in starts]

    def run(self, fn, args):
        """Returns fn(rank, world_size, *args) of every rank, in rank order."""
        world_size = len(self.ranks)
        futures = []
        for rank, process in enumerate(self.ranks):
            request = pickle.dumps((fn, (rank, world_size) + args))
            futures.append(process.submit(_call, request))
        for future in as_completed(futures, WAIT + 20):
            error = future.exception()
            if error:  # the others may hang in a collective, waiting for this rank
                what = f"rank {futures.index(future)} raised in {fn.__name__}: {error!r}"
                raise RuntimeError(what) from error
        return [pickle.loads(future.result()) for future in futures]

    def close(self):
        for rank in self.ranks:
            rank.shutdown()
        self.folder.cleanup()


# What a failed test says at the end, by its marker. The marker's argument says what the test compares.
HINTS = {
    "pinned": "{} has changed: for a pull request put the change behind a setting that `record` leaves off "
    "(docs/testing.md)",
    "forms": "{} differ: whoever changes one of them changes the other, too (docs/testing.md)",
}


def pytest_itemcollected(item):
    """Counts a long test as a slow one."""
    if item.get_closest_marker("long"):
        item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Gives the hints of a test's markers to the report of its failure."""
    report = yield
    if report.failed:
        for marker in item.iter_markers():
            if marker.name in HINTS:
                report.user_properties.append(("hint", HINTS[marker.name].format(*marker.args)))
    return report


def pytest_terminal_summary(terminalreporter):
    """Prints each hint of the failures once."""
    hints = set()
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        for name, text in getattr(report, "user_properties", ()):  # a file that cannot be imported has none
            if name == "hint":
                hints.add(text)
    for hint in sorted(hints):
        terminalreporter.write_line(hint)


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

    def run(world_size, fn, *args):
        if world_size not in pools:
            pools[world_size] = Pool(world_size)
        pool = pools[world_size]
        try:
            return pool.run(fn, args)
        except BaseException:
            del pools[world_size]
            for pid in pool.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pool.close()
            raise

    yield run
    for pool in pools.values():
        pool.close()
