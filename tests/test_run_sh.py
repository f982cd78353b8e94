"""Tests run.sh and test.sh in a copy of the repository, with a stub Python or with the real one."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import date

import pytest

from launch import LAST_STATEMENT, ROOT, SCRIPT, WAIT, make_corpus, settings

SCRIPTS = ("run.sh", "environment.sh", "test.sh", "requirements.txt")

# A Python without packages, but for those that pip installed. It logs its commands.
PYTHON = """#!/usr/bin/env bash
venv=$(dirname "$(dirname "$0")")
case "$*" in
    "-c "*"${LACKS-no package}"*) echo "no $LACKS"; exit 1 ;;
    "-c "*version_info*) exit "${TOO_OLD:-0}" ;;
    "-c "*device_count*)
        fake="from types import SimpleNamespace as S; torch = S(cuda=S(device_count=lambda: $GPUS))"
        exec python3 -c "${2/import torch/$fake}" ;;
    "-c "*"'yes' and not"*) echo no CUDA; [[ -e $venv/complete && ${HAS_CUDA-} ]]; exit ;;
    "-c "*numpy*) echo no torch; [[ -e $venv/complete ]]; exit ;;
    "-c "*) exit ;;
esac
echo "$*" >>"$LOG"
echo "threads: $OMP_NUM_THREADS; vectors: ${ATEN_CPU_CAPABILITY-}; interface: ${GLOO_SOCKET_IFNAME-}"
echo "safe path: ${PYTHONSAFEPATH-}; GPUs: ${CUDA_VISIBLE_DEVICES-all}; user: ${PIP_USER-}"
case "$*" in
    "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"${FAILS-no command}"*) exit 3 ;;
    *"${HANGS-no command}"*) echo hangs; exec sleep 3600 ;;
    *"-r requirements.txt") touch "$venv/complete" ;;
    data/*) mkdir -p "${MEANWHILE-.}" ;;
    *"--check "*)
        track=cpu
        [[ $* != *"--data="* ]] || track=other
        slices="; validation: 128 slices"
        [[ $* != *val_slices=4* ]] || slices="; validation: 4 slices"
        echo "2 processes can run this here, on the track $track${NAMES_TRACK_ALONE-$slices}" ;;
    *" --name="*)
        command=$*
        name=${command##*--name=}
        folder=records/cpu/${RUN_DATE}_${name%% *}
        mkdir -p "$folder"
        touch "$folder/seed$RANDOM.txt" ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    tmp_path /= "a b"
    tmp_path.mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train_gpt.py").write_text('add("--check")')
    (tmp_path / "old.py").touch()  # an early script has no --check
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bare-python").write_text(PYTHON)
    return tmp_path


@contextmanager
def started(repository, *arguments, script="run.sh", gpus=0, **environment):
    """Starts a script in a process group of its own, with an nvidia-smi that lists `gpus`."""
    (repository / "bin/nvidia-smi").write_text("#!/bin/sh\n" + "echo 'GPU 0: NVIDIA H100'\n" * gpus)
    for program in repository.glob("bin/*"):
        program.chmod(0o755)
    inherited = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "PYTHONPATH"):
        inherited.pop(name, None)
    inherited |= {"PYTHON": "bare-python", "GPUS": str(gpus)}
    inherited["PATH"] = f"{repository / 'bin'}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [repository / script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=repository,
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


def run(repository, command="", status=0, **options):
    """Returns the commands that the stub Python got; run.text is what the script printed before `status`."""
    log = repository / "log"
    log.write_text("")
    options["LOG"] = str(log)
    with started(repository, *shlex.split(command), **options) as process:
        run.text, _ = process.communicate(timeout=WAIT)
    assert process.returncode == status, run.text
    # Each rank's own command, `setpriv --pdeathsig KILL PYTHON -u SCRIPT`, is tested by killing run.sh.
    return re.sub(r"--no-python (--nproc_per_node=\d+) .* -u ", r"\1 ", log.read_text()).splitlines()


def refused(repository, command="", **options):
    """Returns the only line that the script prints. It fails, and starts nothing."""
    assert run(repository, command, 1, **options) == []
    (line,) = run.text.splitlines()
    return line


@pytest.fixture
def ready(repository):
    """Returns a repository whose Python needs no installation."""
    (repository / "complete").touch()
    return repository


STANDALONE = "-m torch.distributed.run --standalone --local_addr=localhost --nproc_per_node="


TINY = "--set length=0.05 warmup=false val_slices=4 samples=1"  # what --tiny means
SHORT = "--set samples=3 length=0.05 length=2 a=1 --set=length=0.05 --save ./length=2.pt"

# ---- What is started ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, processes", ((1, 1), (3, 2), (9, 8)))
def test_gpus_train_the_record_preset(ready, gpus, processes):
    commands = run(ready, gpus=gpus, HAS_CUDA="1")
    assert commands == [
        f"train_gpt.py --preset=record --check {processes}",
        "data/fineweb.py",
        f"{STANDALONE}{processes} train_gpt.py --seed=0 --preset=record",
    ]
    assert "threads: 1;" in run.text and "GPUs: all" in run.text


STARTED = {  # options; the commands that follow without GPUs, or whose preset needs none
    "": [
        "train_gpt.py --preset=cpu --check 2",
        "data/local_corpus.py",
        f"{STANDALONE}2 train_gpt.py --seed=0 --preset=cpu",
    ],
    # It stays short, whatever the user's length is. Two settings in one word are for the script to refuse.
    "--preset words --tiny --set samples=3 length=0.9 'length=2 a=1' --set=length=2 --save ./length=2.pt": [
        f"train_gpt.py {TINY} --preset=words {SHORT} --check 2",
        "data/local_corpus.py --encoding gpt2",
        f"{STANDALONE}2 train_gpt.py --seed=0 {TINY} --preset=words {SHORT}",
    ],
    # Data of the user are not fetched.
    "old.py --seed=10 --set a=1 data=mine --preset=words --name '$A b'": [
        f"{STANDALONE}2 old.py --seed=10 --preset=words --data=mine --name=$A b --set a=1 data=mine",
    ],
}


@pytest.mark.parametrize("options", STARTED)
def test_what_options_start(ready, options):
    assert run(ready, options) == STARTED[options]
    assert run.text.count("means nothing") == options.count("--tiny")


def test_the_cpu_preset_takes_no_gpu(ready):
    """Its programs import from their own folder, too, which PYTHONSAFEPATH would forbid."""
    assert run(ready, gpus=8, CUDA_VISIBLE_DEVICES="-1") == STARTED[""]
    assert run(ready, "--preset cpu", gpus=8, PYTHONSAFEPATH="1") == STARTED[""]
    assert run.text.count("safe path: ; GPUs: ;") == 2
    assert ("interface: lo\n" in run.text) == (sys.platform == "linux")


def test_variables_of_the_user_have_priority(ready):
    commands = run(ready, "--preset=record --data .", NPROC_PER_NODE="3", OMP_NUM_THREADS="5")
    assert commands[1] == f"{STANDALONE}3 train_gpt.py --seed=0 --preset=record --data=."
    assert "threads: 5" in run.text


def test_a_users_module_here_is_no_reason_for_another_environment(repository):
    (repository / "random.py").touch()
    run(repository, "--data .", 1, PYTHON=sys.executable)
    assert "making .venv" not in run.text


@pytest.mark.parametrize("is_link", (False, True))
def test_an_environment_of_the_user_is_kept(repository, tmp_path, is_link):
    (tmp_path / "mine").mkdir()
    if is_link:
        (repository / ".venv").symlink_to(tmp_path / "mine")
    else:
        (tmp_path / "mine").rename(repository / ".venv")
    assert run(repository, "--data .", 1) == [] and "remove .venv" in run.text
    assert (repository / ".venv").is_dir()


def test_a_script_must_be_committed_before_a_race(ready):
    """A script that git does not know, a committed one, and the same when it was edited, though git is told
    to ignore that, or to look elsewhere. The baseline's text must be in git, under any name.
    """
    git = "git init -q && git add old.py && git -c user.name=I -c user.email=i@i commit -q -m Idea"
    subprocess.run(git, shell=True, cwd=ready, check=True)
    race = "--against train_gpt.py --name Idea"
    assert run(ready, race, 1) == [] and "commit train_gpt.py first" in run.text
    (ready / "edited.py").write_text("slower")
    assert "commit edited.py, too" in refused(ready, "old.py --against edited.py --name Idea")
    git = "git add edited.py && mv edited.py before.py && git update-index --assume-unchanged old.py"
    subprocess.run(git, shell=True, cwd=ready, check=True)
    assert len(run(ready, "old.py --against before.py --name Idea", GIT_DIR="/tmp")) > 2
    (ready / "old.py").write_text("edited")
    assert "commit old.py first" in refused(ready, "old.py --against before.py --name Idea")
    # As in a folder of another user, which git does not trust.
    (ready / ".git/HEAD").unlink()
    assert (
        run(ready, "old.py --against before.py --name Idea", 1) == []
        and "fatal: not a git repository" in run.text
    )


def test_a_tiny_race_is_a_rehearsal(ready):
    """Of any script: it need not be committed. No log has a name, and no referee follows."""
    subprocess.run("git init -q", shell=True, cwd=ready, check=True)
    commands = run(ready, "old.py --against train_gpt.py --tiny --name Idea --data .")
    assert commands == [
        f"{STANDALONE}2 {script} --seed=0 {TINY} --preset=cpu --data=."
        for script in ("old.py", "train_gpt.py")
    ]


def test_seeds_count_up_and_a_table_of_named_runs_follows(ready):
    commands = run(ready, "--runs 2 --seed 8 --name Idea")
    assert re.findall(r"run .*--seed=(\d+)", "\n".join(commands)) == ["8", "9"]
    assert commands[-1] == f"records/compare.py --begin records/cpu/{date.today()}_Idea"
    assert "give another --name" in refused(ready, "--runs 2 --seed 10 --name Idea")
    taken = f"records/cpu/{date.today()}_Other"
    assert len(run(ready, "--runs 2 --name Other", 1, MEANWHILE=taken)) == 2  # no run
    assert "train_gpt.py" in run(ready, "--name Alone")[-1]


def test_a_baseline_runs_in_turn_and_the_referee_follows(ready):
    """It gets the same preset, data and seed, and a folder in that of the runs, of which a table follows.

    The settings are the script's alone, so that a script can be its own baseline.
    """
    options = "--against train_gpt.py --set a=1 --data . --seed 3 --runs 2 --name Idea"
    *runs, referee, table = run(ready, options, FAILS="referee.py")
    idea = f"{STANDALONE}2 train_gpt.py --seed=%d --preset=cpu --data=. --name=Idea --set a=1"
    baseline = f"{STANDALONE}2 train_gpt.py --seed=%d --preset=cpu --data=. --name=Idea/baseline"
    assert runs[2:] == [idea % 3, baseline % 3, idea % 4, baseline % 4]
    folder = f"records/cpu/{date.today()}_Idea"
    assert re.fullmatch(
        f"records/referee.py train_gpt.py --preset cpu --log {folder}/seed[0-9]+.txt", referee
    )
    assert table == f"records/compare.py --begin {folder}"


def test_a_race_with_another_validation_than_the_baseline_is_refused(ready):
    """Of scripts that name only the track, the tracks are compared."""
    race = "--against train_gpt.py --set val_slices=4 --data . --name Idea"
    commands = run(ready, race, 1)
    assert len(commands) == 2 and "validation: 4 slices, but train_gpt.py" in run.text  # and no run
    assert len(run(ready, race, NAMES_TRACK_ALONE="")) > 4


def test_failures_end_the_rest(ready):
    """One of several runs, after which the name is free; a baseline; what the script refuses, which is not
    fetched.
    """
    assert "--seed=0 " in run(ready, "--runs 3 --name Idea", 3, FAILS="--seed=0 ")[-1]
    commands = run(ready, "--against old.py --name Idea --runs 2", 3, FAILS="Idea/baseline")
    assert commands[-1].endswith("old.py --seed=0 --preset=cpu --name=Idea/baseline")
    commands = run(ready, "--set x=1", 3, FAILS="--check ")
    assert commands == ["train_gpt.py --preset=cpu --set x=1 --check 2"]


def test_what_a_run_needs_is_there_before_it_begins(ready):
    assert run(ready, "", 1, gpus=1, HAS_CUDA="1", LACKS="import triton") == []
    assert "it needs a C compiler" in run.text
    assert run(ready, "--against old.py --name New", 1, LACKS="scipy") == [] and "scipy" in run.text


@pytest.mark.parametrize("screen", (">&-", ">&- 2>&-", "| true; exit ${PIPESTATUS[0]}"))
def test_a_run_goes_on_without_a_screen(ready, screen):
    """Closed from the beginning, or by what read it, as `head` does. The log is a file."""
    assert "--seed=8 " in run(ready, f"-c './run.sh --runs 2 --seed 7 {screen}'", script="/bin/bash")[-1]


# ---- What is refused ---------------------------------------------------------------------------------------

WRONG = {
    "--runs=0": "--runs",
    "--seed": "--seed",
    "--seed=1234567890": "--seed",
    "--data ''": "--data",
    "--check": "--check",
    "--runs 2 --save m.pt": "--save",
    "none.py": "none.py",
    "old.py train_gpt.py": "one script",
    "--name X/baseline": "baseline",
    "--against none.py --name X": "none.py",
    "--against old.py": "--name",
    "old.py --against old.py --name X": "the same",
    "--against old.py --name X --resume a.txt": "--resume",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_one_line_says_which_option_is_wrong(ready, wrong):
    assert WRONG[wrong] in refused(ready, wrong)


def test_one_line_says_which_variable_is_wrong(ready):
    assert "NPROC_PER_NODE must be" in refused(ready, NPROC_PER_NODE="0")
    assert run(ready, "", 1, PYTHON="none") == [] and "there is no none" in run.text


# ---- The environment ---------------------------------------------------------------------------------------

PIP = "-m pip install -qq --disable-pip-version-check"
CPU_TORCH = "--timeout 5 --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
INSTALLED = ["-m venv --clear .venv", f"{PIP} {CPU_TORCH}", f"{PIP} -r requirements.txt"]


def test_environment_is_made_once(repository):
    """A complete one that cannot train is left, and says why."""
    assert run(repository, PIP_USER="1")[:3] == INSTALLED
    assert "user: 0" in run.text
    assert len(run(repository)) == 3 and ".venv/bin/python" in run.text
    assert run(repository, "", 1, gpus=1) == [] and "no CUDA" in run.text
    with open(repository / "requirements.txt", "a") as file:
        file.write("another\n")
    assert run(repository)[:3] == INSTALLED


def test_a_line_says_that_torch_for_cuda_comes_instead_of_that_for_cpus(repository):
    assert run(repository, FAILS="/whl/cpu")[:3] == INSTALLED
    assert "2 GB" in run.text


def test_an_old_python_makes_no_environment(repository):
    assert run(repository, "", 1, TOO_OLD="1") == []
    assert "older than Python 3.10" in run.text


def test_only_data_that_is_not_there_needs_more_packages(ready):
    """Without them there comes an environment. The stub's lacks the package, too."""
    for options in "", "--preset words --data mine":
        assert "train_gpt.py" in run(ready, options, LACKS="tiktoken")[0]
    assert run(ready, "--preset words", 1, LACKS="tiktoken") == INSTALLED and "no tiktoken" in run.text


def test_lines_end_as_a_shell_reads_them_in_a_clone_by_git_for_windows():
    """Git turns LF into CR LF there, unless .gitattributes forbids it."""
    assert (ROOT / ".gitattributes").read_text().endswith("\n* text=auto eol=lf\n")


def test_help_is_no_run(repository):
    assert run(repository, "-h") == [] and "--runs N" in run.text


# ---- test.sh -----------------------------------------------------------------------------------------------

CHECKS = ["-m ruff format --check .", "-m ruff check .", "-m mypy"]
TESTED = {  # the commands that follow from a command line; -n stands for the number of processes
    "": [*CHECKS, "-m pytest -m not long -n"],
    "--all": [*CHECKS, "-m pytest -m  -n"],
    "-x": ["-m pytest -m not long -n -x"],
    "--fast -x": ["-m pytest -m not slow -n -x"],
    "--idea": ["-m pytest -m not slow and not pinned -n"],
    "tests/test_a.py -x": ["-m pytest -m  -n tests/test_a.py -x"],
}


def run_tests(repository, command, status=0, **options):
    """Returns the commands of test.sh, with -n for the number of processes."""
    commands = run(repository, command, status, script="test.sh", **options)
    return [re.sub(r"--num\S+ --max\S+ --dist=worksteal", "-n", command) for command in commands]


@pytest.mark.parametrize("command", TESTED)
def test_test_sh_runs_all_tests_or_those_named(ready, command):
    assert run_tests(ready, command) == TESTED[command]


def test_what_a_checker_or_a_test_finds_is_the_status_of_test_sh(ready):
    assert run_tests(ready, "", 3, FAILS="ruff check") == CHECKS[:2]
    assert len(run_tests(ready, "--fast", 3, FAILS="pytest")) == 1


def test_test_sh_installs_what_is_missing(ready):
    assert run_tests(ready, "--fast", LACKS="import triton")[0].startswith(f"{PIP} triton==3.7.1")
    assert run_tests(ready, "--fast", LACKS="xdist")[0] == f"{PIP} -r tests/requirements.txt"


def test_numeric_tests_run_as_on_older_cpus(ready):
    shutil.copytree(ROOT / ".ci", ready / ".ci")
    assert run_tests(ready, "--cpus -x") == ["-m pytest -m not long -n -q -m numeric -x"] * 2
    assert re.findall("vectors: (.*);", run.text) == ["avx2", "default"]


# ---- Whatever is killed, nobody is left behind -------------------------------------------------------------

# Ranks that only wait; they begin as the real script does, with its last statement.
RANK = f"""import contextlib, ctypes, os, signal, sys, time

def main():
    if "--check" not in sys.argv:
        os.write(1, f"up {{os.getpid()}} {{os.getppid()}}\\n".encode())  # at once, beside the other rank's
        time.sleep(3600)
    return 0

{ast.unparse(LAST_STATEMENT)}
"""


@pytest.fixture
def waiting(repository):
    """Starts run.sh with two ranks that wait; it has the ids of a `rank` and of `torchrun`."""
    (repository / "idea.py").write_text(RANK)
    with started(repository, "idea.py", "--runs", "2", "--data", ".", PYTHON=sys.executable) as process:
        count = 0
        while count < 2:
            line = process.stdout.readline()
            assert line, "run.sh ended"
            if line.startswith("up "):
                count += 1
                process.rank, process.torchrun = map(int, line.split()[1:])
        yield process


@pytest.fixture
def untied(repository):
    """Lets the repository find no setpriv that can tie."""
    (repository / "bin/setpriv").write_text("#!/bin/sh\nexit 1\n")


def rest_of_output(process):
    """Returns it when nothing holds the output any more: run.sh, torchrun and the ranks have ended."""
    text, _ = process.communicate(timeout=WAIT)
    return text


# Whether the kernel can be asked to kill a child with its parent.
can_tie = not subprocess.call("setpriv --pdeathsig KILL true", shell=True, stderr=subprocess.DEVNULL)
needs_ties = pytest.mark.skipif(not can_tie, reason="needs setpriv --pdeathsig")


@needs_ties
@pytest.mark.slow
@pytest.mark.parametrize(
    "send, name", ((os.killpg, "INT"), (os.kill, "TERM"), (os.killpg, "HUP"), (os.kill, "KILL"))
)
def test_a_signal_ends_all(waiting, send, name):
    """A terminal sends it to run.sh's process group, which the ranks are not in; `kill` to run.sh alone."""
    number = getattr(signal, f"SIG{name}")
    send(waiting.pid, number)
    assert rest_of_output(waiting) == "" and waiting.returncode == -number


@pytest.mark.slow
def test_ctrl_c_ends_all_where_nothing_can_be_tied(untied, waiting):
    """Systems older than 2019 lack the option. torchrun then ends the ranks, and says so at length."""
    os.killpg(waiting.pid, signal.SIGINT)
    assert "seed 1" not in rest_of_output(waiting) and waiting.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("killed, status", (("rank", 1), ("torchrun", 128 + signal.SIGKILL)))
def test_a_killed_process_ends_the_others_and_the_runs(waiting, killed, status):
    os.kill(getattr(waiting, killed), signal.SIGKILL)
    assert "seed 1" not in rest_of_output(waiting) and waiting.returncode == status


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_ranks_end_with_torchrun_without_run_sh(tmp_path):
    """Also while they import torch, which the real script does after the statement that ties them."""
    (tie,) = [node for node in SCRIPT.body if isinstance(node, ast.If) and "prctl" in ast.unparse(node)]
    imports = "import ctypes, os, signal, sys, time"
    wait = "os.write(1, b'up\\n'); time.sleep(3600)"
    (tmp_path / "idea.py").write_text(f"{imports}\n{ast.unparse(tie)}\n{wait}\n")
    arguments = "-m torch.distributed.run --standalone --nproc_per_node=2 idea.py".split()
    command = [sys.executable] + arguments
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as torchrun:
        assert [torchrun.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        torchrun.kill()
        assert torchrun.communicate(timeout=WAIT)[0] == ""  # nothing holds the output any more


@needs_ties
def test_an_installation_ends_with_the_shell_and_begins_again(repository):
    """The kernel sends SIGKILL when there is no memory left."""
    with started(repository, LOG="/dev/null", HANGS="-r requirements.txt") as process:
        while "hangs" not in process.stdout.readline():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        rest_of_output(process)
    assert run(repository)[:3] == INSTALLED


# ---- A real run --------------------------------------------------------------------------------------------


def train(repository, *change):
    """Runs the real script with settings for a second; returns its exit status and its output."""
    shutil.copy(ROOT / "train_gpt.py", repository)
    make_corpus(repository / "corpus")
    arguments = ["--tiny", "--data", "corpus", *settings(*change)]
    with started(repository, *arguments, PYTHON=sys.executable, OMP_NUM_THREADS="1") as process:
        text = rest_of_output(process)
    return process.returncode, text


@pytest.mark.long
def test_the_cpu_preset_trains_without_packages_that_only_others_need(repository):
    (repository / "tiktoken.py").write_text("raise ImportError('not here')")
    status, text = train(repository, "length=1")
    assert status == 0 and "val_loss: " in text and "means nothing" in text
    assert list(repository.glob("records/other/attempts/seed0_*.txt"))


@pytest.mark.slow
def test_a_failed_run_ends_with_the_error_of_the_rank_that_failed_first(repository):
    status, text = train(repository, "adam_lr=1e30")
    *above, last = text.splitlines()
    assert last == "run.sh: train_gpt.py failed; its error is above the line of ==="
    assert status == 1 and "".join(above).rstrip("= ").endswith("; lower the learning rates")
