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
from datetime import date
from pathlib import Path

import pytest

from launch import WAIT, make_corpus, settings

ROOT = Path(__file__).resolve().parent.parent

# A Python without packages, but for those that pip installed. It logs its commands: modules as with -m, of
# torchrun's what each process runs.
PYTHON = """#!/usr/bin/env bash
venv=$(dirname "$(dirname "$0")")
case "$*" in
    *runpy*) shift 2; set -- -m "$@" ;;
    *hugging*) echo no CUDA; [[ -e $venv/complete && ( $2 == *"or 0 and"* || ${HAS_CUDA-} ) ]]; exit ;;
    *version_info*) exit "${TOO_OLD:-0}" ;;
    *pinned*|*"import triton"*) echo no compiler; exit "${LACKS:-0}" ;;
    "-c "*) exit ;;
esac
command=$*
echo "${command/--no-python *python /}" >>"$LOG"
echo "threads: $OMP_NUM_THREADS; vectors: ${ATEN_CPU_CAPABILITY-}; interface: ${GLOO_SOCKET_IFNAME-}"
echo "safe path: ${PYTHONSAFEPATH-}"
[[ $* != *"pip install"* ]] || echo "user: $PIP_USER; target: $PIP_TARGET"
case "$*" in
    "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"${FAILS-no command}"*) exit 3 ;;
    *"${HANGS-no command}"*) touch hangs; sleep 3600 & sleep 3600 ;;
    *"-r requirements.txt") touch "$venv/complete" ;;
    *--seed=*) seed=${command##*--seed=}; eval "echo ${PRINTS-}" ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    tmp_path /= "a b"
    tmp_path.mkdir()
    for name in ("run.sh", "environment.sh", "test.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train_gpt.py").write_text('parser.add_argument("--check")')
    (tmp_path / "old.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bare-python").write_text(PYTHON)
    return tmp_path


@contextmanager
def started(repository, *arguments, script="run.sh", gpus=0, cwd=None, **environment):
    """Starts a script in a process group of its own, with an nvidia-smi that lists `gpus`."""
    smi = repository / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H100'\n" for i in range(gpus)))
    for program in repository.glob("bin/*"):
        program.chmod(0o755)
    removed = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    inherited |= {"PYTHON": "bare-python", "PATH": f"{repository / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [repository / script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd or repository,
        env=inherited | environment,
        start_new_session=True,
        # A shell without job control ignores it in what it starts in the background, these tests too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


STANDALONE = "-m torch.distributed.run --standalone --local_addr=localhost --nproc_per_node="


@pytest.mark.parametrize("case", "0 all 2;1 all 1;3 all 2;7 all 4;16 all 8;8 0,1 2;8 -1 2".split(";"))
def test_processes_preset_and_data_follow_the_gpus(ready, case):
    """The cases: how many GPUs there are, which are visible, how many processes are started."""
    gpus, visible, processes = case.split()
    environment = {} if visible == "all" else {"CUDA_VISIBLE_DEVICES": visible}
    on_gpu = gpus != "0" and visible != "-1"
    preset, fetched = ("record", "fineweb") if on_gpu else ("cpu", "local_corpus")
    status, commands = run(ready, gpus=int(gpus), HAS_CUDA="1", **environment)
    assert status == 0 and commands == [
        f"train_gpt.py --preset={preset} --check {processes}",
        f"data/{fetched}.py",
        f"{STANDALONE}{processes} train_gpt.py --seed=0 --preset={preset}",
    ]


def test_the_words_preset_gets_its_data(ready):
    status, commands = run(ready, "--preset words")
    assert status == 0 and commands[:2] == [
        "train_gpt.py --preset=words --check 2",
        "data/local_corpus.py --encoding gpt2",
    ]
    assert ("interface: lo\n" in run.text) == (sys.platform == "linux")


def test_programs_import_from_their_own_folder(ready):
    """PYTHONSAFEPATH would forbid it."""
    assert run(ready, PYTHONSAFEPATH="1")[0] == 0 and run.text.count("safe path: \n") == 2


def test_options_of_the_user_have_priority(ready):
    """Nothing is checked or fetched."""
    options = "old.py --data mine --seed=010 --set a=1 b=2 --preset=record --name '$A b' --checkpoint-every 9"
    status, commands = run(ready, options, NPROC_PER_NODE="3", OMP_NUM_THREADS="5")
    assert status == 0 and "threads: 5" in run.text
    want = "3 old.py --seed=10 --set a=1 b=2 --checkpoint-every 9 --preset=record --data=mine --name=$$A b"
    assert commands == [STANDALONE + want]  # torchrun makes one $ of two


def test_several_machines(ready):
    """The number of all processes is checked. Nodes other than the first say what they are."""
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    status, commands = run(ready, "--name Idea --runs 1", **nodes)
    assert status == 0 and commands[0].endswith("--check 4") and "interface: lo" not in run.text
    how = "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=1234 --nproc_per_node=2"
    assert commands[-1].startswith(f"-m torch.distributed.run {how} train_gpt.py --seed=0")  # no table
    assert run(ready, NNODES="2")[0] != 0  # MASTER_ADDR is missing


@pytest.mark.parametrize(
    "prints, table",
    (
        ("log: records/b/21_Idea/seed$seed", True),
        ("'log      ideas/records/b/21_Idea/'seed", True),  # of an early record, relative to the repository
        ("log: records/b/attempts/seed", False),
        ("log: records/b/2${seed%% *}_Idea/seed", False),
    ),
)
def test_seeds_count_up_and_a_table_of_the_folder_that_the_runs_name_follows(ready, prints, table):
    """Runs without a name have none, nor runs in folders of two days."""
    (ready / "ideas/records/b/21_Idea").mkdir(parents=True)
    (ready / "ideas/new.py").touch()
    status, commands = run(ready, "ideas/new.py --runs 2 --seed 8 --data .", PRINTS=f"{prints}.txt")
    assert status == 0 and re.findall(r"run .*--seed=(\d+)", "\n".join(commands)) == ["8", "9"]
    assert commands[2:] == ["records/compare.py --begin ideas/records/b/21_Idea"] * table
    assert ("28_Idea records/b/29_Idea" in run.text) == ("seed%" in prints)


def test_a_baseline_runs_in_turn(ready):
    """It gets the same preset, data and seed, and a folder in that of the runs, of which a table follows."""
    (ready / "records/b/21_Idea/baseline").mkdir(parents=True)
    prints = "log: records/b/21_Idea/$([[ $* == *baseline ]] && echo baseline/)seed${seed%% *}.txt"
    options = "old.py --against train_gpt.py --set a=1 --data . --seed 3 --runs 2 --name Idea"
    status, commands = run(ready, options, PRINTS=prints)
    start = f"{STANDALONE}2"
    assert status == 0 and commands == [
        f"{start} old.py --seed=3 --set a=1 --preset=cpu --data=. --name=Idea",
        f"{start} train_gpt.py --seed=3 --preset=cpu --data=. --name=Idea/baseline",
        f"{start} old.py --seed=4 --set a=1 --preset=cpu --data=. --name=Idea",
        f"{start} train_gpt.py --seed=4 --preset=cpu --data=. --name=Idea/baseline",
        "records/compare.py --begin records/b/21_Idea",
    ]
    status, commands = run(ready, options, FAILS="Idea/baseline")
    assert status == 3 and "--seed=3 --preset=cpu --data=. --name=Idea/baseline" in commands[-1]
    one = options.replace("--runs 2", "")
    assert "compare.py --begin" in run(ready, one, PRINTS=prints)[1][-1]
    refused = "none.py --name X;train_gpt.py;train_gpt.py --name X --resume a.txt"
    for wrong in refused.split(";"):
        assert run(ready, f"old.py --against {wrong}") == (1, []) and len(run.text.splitlines()) == 1, wrong
    (ready / f"records/cpu/{date.today()}_Idea").mkdir(parents=True)
    assert run(ready, options) == (1, []) and "_Idea" in run.text  # its seeds may be the same


def test_failures_end_the_rest(ready):
    """One of several runs; what the script refuses, which is not fetched; kernels without a compiler."""
    status, commands = run(ready, "--runs 3 --name Idea", FAILS="--seed=1 ")
    assert status == 3 and "--seed=1 " in commands[-1]
    refused = ["train_gpt.py --set x=1 --preset=cpu --check 2"]
    assert run(ready, "--set x=1", FAILS="--check ") == (3, refused)
    status, commands = run(ready, gpus=1, HAS_CUDA="1", LACKS="1")
    assert status == 1 and len(commands) == 1 and "no compiler" in run.text


@pytest.mark.parametrize("screen", (">&-", ">&- 2>&-", "| true; exit ${PIPESTATUS[0]}"))
def test_a_run_goes_on_without_a_screen(ready, screen):
    """Closed from the beginning, or by what read it, as `head` does. The log is a file."""
    unseen = ready / "unseen.sh"
    unseen.write_text(f"#!/usr/bin/env bash\n./run.sh --runs 2 --seed 7 {screen}\n")
    unseen.chmod(0o755)
    status, commands = run(ready, script="unseen.sh")
    assert status == 0 and "--seed=8 " in commands[-1]


WRONG = f"""--runs=0 --runs=x --runs= --seed --seed=-1 --seed={2**63 - 1} --seed={2**64 + 1} --check
--data= --name= --save= --checkpoint-every=
--seed=0x1 none.py NPROC_PER_NODE=auto NPROC_PER_NODE=0 NNODES=1:2 NODE_RANK=1 PYTHON=none TOO_OLD=1"""


@pytest.mark.parametrize(
    "wrong",
    [*WRONG.split(), "--data ''", "--name '' --runs 2", "--runs 2 --save m.pt", "--runs 2 --resume a.txt"],
)
def test_one_line_says_what_is_wrong(repository, wrong):
    name, _, value = wrong.partition("=")
    result = run(repository, wrong) if wrong[0] in "-n" else run(repository, **{name: value})
    assert result == (1, []) and len(run.text.splitlines()) == 1


def test_lines_end_as_a_shell_reads_them_in_a_clone_by_git_for_windows(repository):
    """Git turns LF into CR LF there, unless .gitattributes forbids it."""
    shutil.copy(ROOT / ".gitattributes", repository)
    names = ("run.sh", "environment.sh", "test.sh", "train_gpt.py")
    git = ["git", "-c", "core.autocrlf=true"]
    for words in ("init -q", f"add .gitattributes {' '.join(names)}", "checkout-index --prefix=clone/ -a"):
        subprocess.run([*git, *words.split()], cwd=repository, check=True)
    for name in names:
        assert (repository / "clone" / name).read_bytes() == (repository / name).read_bytes(), name


def test_help_is_no_run(repository):
    assert run(repository, "-h") == (0, []) and "--runs N" in run.text


CPU_TORCH = "--timeout 5 --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
INSTALLED = ["-m venv --clear .venv"] + [
    f"-m pip install -qq --disable-pip-version-check {what}" for what in (CPU_TORCH, "-r requirements.txt")
]


def test_environment_is_made_once(repository):
    """An interrupted installation begins again. A complete one that cannot train is left, and says why."""
    with started(repository, LOG="/dev/null", HANGS="-r requirements.txt") as process:
        wait_for(process, repository / "hangs")
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=WAIT)  # what pip has started is gone, too
    assert process.returncode == 143
    assert run(repository, PIP_USER="1", PIP_TARGET="elsewhere")[1][:3] == INSTALLED
    assert "user: 0; target: \n" in run.text
    status, commands = run(repository)
    assert status == 0 and len(commands) == 3 and ".venv/bin/python" in run.text
    assert run(repository, gpus=1) == (1, []) and "no CUDA" in run.text
    with open(repository / "requirements.txt", "a") as file:
        file.write("another\n")
    assert run(repository)[1][:3] == INSTALLED


def test_a_killed_shell_ends_an_installation(repository):
    """The kernel sends SIGKILL when there is no memory left."""
    with started(repository, LOG="/dev/null", HANGS="-r requirements.txt") as process:
        wait_for(process, repository / "hangs")
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=WAIT)  # returns when nothing holds the output any more


def test_test_sh(ready):
    """Runs all tests, or those named. A failure, and what a checker finds, is the status."""

    def run_tests(command="", **options):
        status, commands = run(ready, command, script="test.sh", **options)
        return status, [re.sub(r"--num\S+ --max\S+ --dist=worksteal", "-n", command) for command in commands]

    checks = ["-m ruff format --check .", "-m ruff check .", "-m mypy"]
    assert run_tests() == (0, [*checks, "-m pytest -n -m not long"])
    assert run_tests("--all") == (0, [*checks, "-m pytest -n"])
    assert run_tests("-x") == (0, ["-m pytest -n -m not long -x"])
    assert run_tests(FAILS="ruff check") == (3, checks[:2])
    assert run_tests("--fast -x", FAILS="pytest") == (3, ["-m pytest -n -m not slow -x"])
    assert run_tests("tests/test_a.py -x") == (0, ["-m pytest tests/test_a.py -x"])
    assert run_tests("--cpus") == (0, ["-m pytest -n -q -m numeric"] * 2)
    assert re.findall("vectors: (.*);", run.text) == ["avx2", "default"]
    assert "triton==3.7.1" in run_tests(LACKS="1")[1][0]


# ---- With the real Python and torchrun ---------------------------------------------------------------------


@pytest.mark.long
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


def wait_for(process, *paths):
    until = time.monotonic() + WAIT
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)


IDEA = """import os, sys, time
from pathlib import Path
run = Path("records/cpu/1_A b/seed0_a")
run.with_suffix(".checkpoint").joinpath("step00000020").mkdir(parents=True, exist_ok=True)
run.with_suffix(".txt").touch()
if os.environ["RANK"] == "0": print(f"log: {run}.txt", flush=True)
up = Path("up" + os.environ["RANK"])
up.with_suffix(".new").write_text(str(os.getppid()))
up.with_suffix(".new").rename(up)
while "--resume=" not in " ".join(sys.argv): time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, send", (("INT", os.killpg), ("TERM", os.kill), ("HUP", os.killpg)))
def test_a_signal_ends_all_and_the_last_line_resumes(repository, name, send):
    """A terminal sends to run.sh's process group, which the ranks are not in; `kill` to run.sh alone.

    The script is the caller's, and in run.sh's folder lie files named like modules.
    """
    (repository / "my").mkdir()
    (repository / "my/idea.py").write_text(IDEA)
    for module in ("random", "types", "copy", "tempfile"):
        (repository / f"{module}.py").write_text("raise SystemExit('not the library')")
    real = {"PYTHON": sys.executable, "cwd": repository / "my"}
    with started(repository, "idea.py", "--runs", "2", "--data", ".", **real) as process:
        wait_for(process, repository / "up0", repository / "up1")
        send(process.pid, getattr(signal, f"SIG{name}"))
        # Returns when all that hold its output are gone: torchrun and the ranks.
        text, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 128 + getattr(signal, f"SIG{name}")
    assert not re.search("Traceback|Killed|seed 1", text)
    command = shlex.split(text.splitlines()[-1])
    assert command[-1] == str(repository / "records/cpu/1_A b/seed0_a.txt")
    if name == "TERM":
        with started(repository, *command[1:], **real) as process:
            assert process.wait(WAIT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("killed", ("run.sh", "its group", "torchrun"))
def test_whatever_is_killed_all_ends(repository, killed):
    """run.sh alone, also with its process group, in which the ranks are not; or torchrun alone."""
    (repository / "idea.py").write_text(IDEA)
    with started(repository, "idea.py", "--data", ".", PYTHON=sys.executable) as process:
        wait_for(process, repository / "up0", repository / "up1")
        if killed == "its group":
            os.killpg(process.pid, signal.SIGKILL)
        elif killed == "run.sh":
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.kill(int((repository / "up0").read_text()), signal.SIGKILL)
        text, _ = process.communicate(timeout=WAIT)  # returns when nothing holds the output any more
    if killed == "torchrun":
        assert process.returncode == 137 and "--resume" in text.splitlines()[-1]
