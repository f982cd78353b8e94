"""Tests run.sh and test.sh in a copy of the repository, with a stub Python or with the real one."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from launch import WAIT, make_corpus, settings

ROOT = Path(__file__).resolve().parent.parent

# A Python without packages, but for those that pip installed. It logs its commands.
PYTHON = """#!/usr/bin/env bash
venv=$(dirname "$(dirname "$0")")
case "$*" in
    "-c import sys, hugging"*) [[ -e $venv/complete && ( ${*: -1} == 0 || ${HAS_CUDA-} ) ]]; exit ;;
    "-c import sys; "*) exit "${TOO_OLD:-0}" ;;
    "-c import pytest, "*) exit ;;
esac
echo "$*" >>"$LOG"
echo "threads: $OMP_NUM_THREADS; vectors: ${ATEN_CPU_CAPABILITY-}"
case "$*" in
    "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-r requirements.txt") [[ ! ${INTERRUPT-} ]] && touch "$venv/complete" ;;
    *"${FAILS-no command}"*) exit 3 ;;
    *"--name Idea"*) mkdir -p records/cpu/2026-11-21_Idea ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    for name in ("run.sh", "test.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train_gpt.py").write_text('add("--check")')
    (tmp_path / "old.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bare").write_text(PYTHON)
    return tmp_path


@contextmanager
def started(repository, *arguments, script="run.sh", gpus=0, **environment):
    """Starts a script in a process group of its own, with an nvidia-smi that lists `gpus`."""
    smi = repository / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H100'\n" for i in range(gpus)))
    for program in repository.glob("bin/*"):
        program.chmod(0o755)
    removed = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    inherited |= {"PYTHON": "bare", "PATH": f"{repository / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [repository / script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=inherited | environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(repository, command="", **options):
    """Returns the script's status, and the commands that the stub Python got; run.text is what it printed."""
    log = repository / "log"
    log.write_text("")
    with started(repository, *shlex.split(command), LOG=str(log), **options) as process:
        run.text, _ = process.communicate(timeout=WAIT)
    return process.returncode, log.read_text().splitlines()


@pytest.fixture
def ready(repository):
    """Returns a repository whose Python needs no installation."""
    (repository / "complete").touch()
    return repository


STANDALONE = "-m torch.distributed.run --standalone --nproc_per_node="


@pytest.mark.parametrize("case", "0 all 2;1 all 1;3 all 2;7 all 4;16 all 8;8 0,1 2;8 -1 2".split(";"))
def test_processes_preset_and_data_follow_the_gpus(ready, case):
    """The cases: how many GPUs there are, which are visible, how many processes are started."""
    gpus, visible, processes = case.split()
    environment = {} if visible == "all" else {"CUDA_VISIBLE_DEVICES": visible}
    on_gpu = gpus != "0" and visible != "-1"
    preset, fetched = ("record", "fineweb") if on_gpu else ("cpu", "local_corpus")
    status, commands = run(ready, gpus=int(gpus), HAS_CUDA="1", **environment)
    assert status == 0 and commands == [
        f"train_gpt.py --preset {preset} --check {processes}",
        f"data/{fetched}.py",
        f"{STANDALONE}{processes} train_gpt.py --seed 0 --preset {preset}",
    ]


def test_the_words_preset_gets_its_data(ready):
    status, commands = run(ready, "--preset words")
    assert status == 0 and commands[:2] == [
        "train_gpt.py --preset words --check 2",
        "data/local_corpus.py --encoding gpt2",
    ]


def test_options_of_the_user_have_priority(ready):
    """Nothing is checked or fetched."""
    options = "old.py --data=mine --seed 7 --set adam_lr=0.1 --preset=record --name 'A b'"
    status, commands = run(ready, options, NPROC_PER_NODE="3", OMP_NUM_THREADS="5")
    assert status == 0 and "threads: 5" in run.text
    want = "3 old.py --seed 7 --data mine --set adam_lr=0.1 --name A b --preset record"
    assert commands == [STANDALONE + want]


def test_several_machines(ready):
    """The number of all processes is checked. Nodes other than the first say what they are."""
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    status, commands = run(ready, "--name Idea --runs 1", **nodes)
    assert status == 0 and commands[0].endswith("--check 4") and "node 1 of 2" in run.text
    how = "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=1234 --nproc_per_node=2"
    assert commands[-1].startswith(f"-m torch.distributed.run {how} train_gpt.py --seed 0")  # no table
    assert run(ready, NNODES="2")[0] != 0  # MASTER_ADDR is missing


def test_named_runs_count_seeds_up_and_end_with_their_table(ready):
    status, commands = run(ready, "--runs 3 --seed 8 --name Idea")
    assert status == 0 and re.findall(r"run .*--seed (\d+)", "\n".join(commands)) == ["8", "9", "10"]
    assert commands[-1] == "records/compare.py --begin records/cpu/2026-11-21_Idea"


def test_failures_end_the_rest(ready):
    """One of several runs; what the script refuses, which is not fetched; wrong options; but not --help."""
    status, commands = run(ready, "--runs 3 --name Idea", FAILS="--seed 1 ")
    assert status == 3 and "--seed 1 " in commands[-1]
    refused = ["train_gpt.py --set x=1 --preset cpu --check 2"]
    assert run(ready, "--set x=1", FAILS="--check ") == (3, refused)
    for arguments in ("--runs 0", "--runs x", "--seed -1", "--name", "none.py"):
        assert run(ready, arguments) == (1, []) and len(run.text.splitlines()) == 1
    assert run(ready, "-h") == (0, []) and "--runs N" in run.text


CPU_TORCH = "--timeout 5 --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
INSTALLED = ["-m venv --clear .venv"] + [
    f"-m pip install -qq --disable-pip-version-check {what}" for what in (CPU_TORCH, "-r requirements.txt")
]


def test_environment_is_made_once(repository):
    assert run(repository, INTERRUPT="1")[0] == 1  # and begins again
    assert run(repository)[1][:3] == INSTALLED
    status, commands = run(repository)
    assert status == 0 and len(commands) == 3 and ".venv/bin/python" in run.text
    with open(repository / "requirements.txt", "a") as file:
        file.write("another\n")
    assert run(repository)[1][:3] == INSTALLED
    assert run(repository, gpus=1)[0] == 1 and "lacks CUDA" in run.text  # what was installed, too


def test_unusable_pythons(repository):
    for environment in ({"TOO_OLD": "1"}, {"PYTHON": "no-such-python"}):
        assert run(repository, **environment) == (1, []) and len(run.text.splitlines()) == 1


def test_test_sh(ready):
    """Runs all tests, or those named. A failure, and what a checker finds, is the status."""

    def run_tests(command="", **options):
        status, commands = run(ready, command, script="test.sh", **options)
        return status, [re.sub(r"--num\S+ --max\S+ --dist=worksteal", "-n", command) for command in commands]

    checks = ["-m ruff format --check .", "-m ruff check .", "-m mypy"]
    assert run_tests() == (0, [*checks, "-m pytest -n"])
    assert run_tests(FAILS="mypy") == (3, checks)
    assert run_tests("--fast -x", FAILS="pytest") == (3, ["-m pytest -n -m not slow -x"])
    assert run_tests("tests/test_a.py -x") == (0, ["-m pytest tests/test_a.py -x"])
    assert run_tests("--cpus") == (0, ["-m pytest -n -q -m numeric"] * 2)
    assert re.findall("vectors: (.*)", run.text) == ["avx2", "default"]


# ---- With the real Python and torchrun ---------------------------------------------------------------------


@pytest.mark.slow
def test_two_machines_train_as_two_processes_on_one(repository):
    """Each of two run.sh starts one process. The losses have the same digits."""
    shutil.copy(ROOT / "train_gpt.py", repository)
    make_corpus(repository / "corpus")
    arguments = ["--preset", "cpu", "--data", "corpus", *settings("samples=0")]
    real = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared["MASTER_PORT"] = str(free.getsockname()[1])
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(repository, *arguments, **real | more))
            for more in (shared | {"NODE_RANK": "0"}, shared | {"NODE_RANK": "1"}, {})
        ]
        first, second, alone = [process.communicate(timeout=2 * WAIT)[0] for process in processes]
    assert processes[1].returncode == 0 and "val_loss" not in second
    losses = [re.findall(r"val_loss:? ?([\d.]+)", text) for text in (first, alone)]
    assert losses[0] == losses[1] and len(losses[0]) > 1, (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("number, send", ((signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)))
def test_a_signal_ends_all(repository, number, send):
    """A terminal sends to run.sh's process group, which the ranks are not in; `kill` to run.sh alone."""
    (repository / "train_gpt.py").write_text(
        "import os, time\nopen('up' + os.environ['RANK'], 'w')\ntime.sleep(3600)"
    )
    arguments = ("--runs", "2", "--preset", "cpu", "--data", ".")
    with started(repository, *arguments, PYTHON=sys.executable) as process:
        until = time.monotonic() + WAIT
        while not all((repository / f"up{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        send(process.pid, number)
        # Returns when all that hold its output are gone: torchrun and the ranks.
        text, _ = process.communicate(timeout=WAIT)
    # 130, or torchrun's status if the same signal ended it first.
    assert process.returncode in (1, 130) and "seed 1" not in text
