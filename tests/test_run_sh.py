"""run.sh and test.sh, in a copy of the repository whose programs only say how they were called.

Most tests put stub packages before the real ones, among them a torchrun that prints its arguments, and a stub
nvidia-smi. Some go through the real torchrun. The installation of .venv runs with a stub Python.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import WAIT

ROOT = Path(__file__).resolve().parent.parent

TORCHRUN = """
import json, os, signal, warnings
from pathlib import Path
from types import SimpleNamespace
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

def failure(exitcode, timestamp):
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, signal_name=lambda: signal.Signals(-exitcode).name)

def main(argv):
    standalone, processes, signals, *script = argv
    assert (standalone, signals) == ("--standalone", "--signals-to-handle=")
    print("torchrun", json.dumps({"processes": processes.removeprefix("--nproc_per_node="), "argv": script,
                                  "omp": os.environ["OMP_NUM_THREADS"], "cwd": os.getcwd()}))
    warnings.warn("not for the user")
    if os.environ.get("FAIL_ON_SEED") in script:
        raise ChildFailedError({rank: failure(*how) for rank, how in json.loads(os.environ["FAILURES"]).items()})
    if "--name" in script and "--seed" in script and "NO_LOG" not in os.environ:
        name, seed = (script[script.index(option) + 1] for option in ("--name", "--seed"))
        folder = Path("records/cpu", f"{os.environ.get('DAY' + seed, '2026-11-21')}_{name}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"seed{seed}_ab.txt").write_text("")
"""
COMPARE = """
import os, sys
print("table of", *sys.argv[1:])
print()
print("its end")
sys.exit("UNREADABLE" in os.environ and 2 or 0)
"""
ERRORS = """
class ChildFailedError(Exception):
    def __init__(self, failures):
        self.failures = failures
"""
PYTHON = """#!/usr/bin/env bash
# A Python that has nothing; its .venv has what pip_install was asked for. Says what it is asked on $LOG.
venv=$(dirname "$(dirname "$0")")
case "$1 $2" in
    "- "*) cat >/dev/null; [[ -e $venv/torch && -e $venv/others && ( $2 == 0 || -e $venv/cuda ) ]] ;;
    "-V ") echo Python 3.12.0 ;;
    "-c "*) exit "${TOO_OLD:-0}" ;;
    "-m venv") echo "$*" >>"$LOG"; [[ ! ${NO_VENV-} ]] || exit 1; rm -rf .venv; mkdir -p .venv/bin
               cp "$0" .venv/bin/python ;;
    "-m pip") [[ $3 != --version ]] || exit 0
              echo "pip ${*:3}" >>"$LOG"
              case "$*" in
                  *--index-url*) [[ ! ${CPU_INDEX-} ]] || touch "$venv/torch"; [[ ${CPU_INDEX-} ]] ;;
                  *"torch=="*) touch "$venv/torch" $HAS_CUDA ;;
                  *) [[ ! ${INTERRUPT-} ]] && touch "$venv/others" ;;
              esac ;;
    *) echo "python $*" ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    """A copy of the repository in tmp_path/repo, and stub packages in tmp_path/stubs."""
    repo, stubs = tmp_path / "repo", tmp_path / "stubs"
    for name in ("run.sh", "test.sh", "requirements.txt"):
        repo.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, repo)
    (repo / "train_gpt.py").write_text("print('train_gpt')")
    (repo / "records").mkdir()
    (repo / "records/compare.py").write_text(COMPARE)
    (repo / "data").mkdir()
    for name in ("fineweb.py", "local_corpus.py"):
        (repo / "data" / name).write_text(f"print('fetching with {name}')")
    (stubs / "torch/distributed/elastic/multiprocessing").mkdir(parents=True)
    for name in ("numpy", "tiktoken", "huggingface_hub", "tqdm", "torch/distributed/__init__"):
        (stubs / f"{name}.py").write_text("")
    (stubs / "torch/__init__.py").write_text("class version: cuda = '12.8'\n__version__ = '2.11.0+cu128'")
    (stubs / "torch/distributed/run.py").write_text(TORCHRUN)
    (stubs / "torch/distributed/elastic/multiprocessing/errors.py").write_text(ERRORS)
    (tmp_path / "bin").mkdir()
    return repo


@contextmanager
def started(repository, *arguments, gpus=0, cwd=None, stubs=True, program="run.sh", **environment):
    """The process, in a process group of its own, with a nvidia-smi that lists `gpus`."""
    tmp_path = repository.parent
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: {i})'\necho '  MIG 1g'\n" for i in range(gpus))
                   + f"exit {int(not gpus)}\n")
    smi.chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    environment = inherited | {"PYTHON": sys.executable, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                               "LOG": str(tmp_path / "log"), "HAS_CUDA": ""} | environment
    if stubs:
        environment["PYTHONPATH"] = str(tmp_path / "stubs")
    # In the background, or under nohup, pytest has these ignored, and so would run.sh have.
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)}
    process = subprocess.Popen([repository / program, *map(str, arguments)], cwd=cwd or repository, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def call(*arguments, timeout=WAIT, **options):
    """The finished process. It and all that have its stdout or stderr must end: what is left behind fails the test."""
    with started(*arguments, **options) as process:
        stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def torchruns(ran) -> list[dict]:
    return [json.loads(line.split(" ", 1)[1]) for line in ran.stdout.splitlines() if line.startswith("torchrun ")]


def arguments_of(ran) -> tuple[str, list[str]]:
    """(processes, script and its arguments) of the only run."""
    assert ran.returncode == 0, ran.stderr
    (run,) = torchruns(ran)
    return run["processes"], run["argv"]


@pytest.mark.parametrize("gpus, processes", ((0, "2"), (1, "1"), (2, "2"), (3, "2"), (7, "4"), (8, "8"), (16, "8")))
def test_processes_preset_and_data_follow_the_gpus(repository, gpus, processes):
    ran = call(repository, gpus=gpus)
    preset, data = ("record", "fineweb.py") if gpus else ("cpu", "local_corpus.py")
    assert arguments_of(ran) == (processes, ["train_gpt.py", "--preset", preset])
    assert f"fetching with {data}" in ran.stdout and ran.stdout.count("fetching") == 1
    omp = "1" if gpus else str(max(1, os.sysconf("SC_NPROCESSORS_ONLN") // 2))
    assert torchruns(ran)[0]["omp"] == omp


@pytest.mark.parametrize("visible, processes", (("0,2,3", "2"), ("", "2"), ("-1", "2"), ("GPU-1f", "1"),
                                                ("0,1,2,3,4,5,6,7", "4")))
def test_visible_devices_count(repository, visible, processes):
    ran = call(repository, gpus=4, CUDA_VISIBLE_DEVICES=visible)
    preset = "cpu" if visible in ("", "-1") else "record"
    assert arguments_of(ran) == (processes, ["train_gpt.py", "--preset", preset])


def test_options_of_the_user_win(repository):
    ran = call(repository, "--preset=cpu", "--set", "a b=1", gpus=4, OMP_NUM_THREADS="3")
    assert arguments_of(ran) == ("4", ["train_gpt.py", "--preset", "cpu", "--set", "a b=1"])
    assert "fetching with local_corpus.py" in ran.stdout and torchruns(ran)[0]["omp"] == "3"
    ran = call(repository, "--data", "my shards", "--seed", "5", "--name", "x")
    assert arguments_of(ran)[1] == ["train_gpt.py", "--preset", "cpu", "--seed", "5", "--data", "my shards", "--name", "x"]
    assert "fetching" not in ran.stdout
    assert "fetching with fineweb.py" in call(repository, "--preset", "record").stdout


def test_paths_are_the_callers(repository, tmp_path):
    (tmp_path / "my.py").write_text("")
    ran = call(repository, "my.py", "--data", "d", "--save=w.pt", "--resume", "x", cwd=tmp_path)
    script = str(tmp_path / "my.py")
    assert arguments_of(ran)[1] == [script, "--preset", "cpu", "--data", f"{tmp_path}/d", "--save", f"{tmp_path}/w.pt",
                                    "--resume", f"{tmp_path}/x"]
    assert torchruns(ran)[0]["cwd"] == str(repository)
    assert "no such file" in call(repository, "none.py").stderr


def test_runs_count_seeds_up(repository):
    ran = call(repository, "--runs", "3", "--seed=08", "--name", "idea")
    assert ran.returncode == 0, ran.stderr
    assert [run["argv"] for run in torchruns(ran)] == [
        ["train_gpt.py", "--preset", "cpu", "--seed", str(seed), "--name", "idea"] for seed in (8, 9, 10)]
    assert ran.stdout.count("fetching") == 1
    unnamed = call(repository, "--runs", "2")   # these are attempts
    assert unnamed.returncode == 0 and "table of" not in unnamed.stdout
    assert [run["argv"] for run in torchruns(unnamed)] == [["train_gpt.py", "--preset", "cpu", "--seed", seed] for seed in "01"]


def test_named_runs_end_with_their_table_and_a_readme(repository):
    old = [repository / "records" / folder for folder in ("cpu/2026-11-20_idea", "other/2026-11-20_idea")]   # other calls'
    for folder in old:
        folder.mkdir(parents=True)
        (folder / "seed0_cd.txt").write_text("")
    ran = call(repository, "--runs", "2", "--name=idea", "--set", "a b=1")
    assert ran.returncode == 0 and ran.stderr == ""
    readme = "records/cpu/2026-11-21_idea/README.md"
    assert ran.stdout.endswith("\ntable of records/cpu/2026-11-21_idea\n\nits end\n\n"
                               f"run.sh: {readme} begins with this table; say in it what was changed\n")
    assert ran.stdout.count("table of") == 1
    assert [[p.name for p in folder.iterdir()] for folder in old] == [["seed0_cd.txt"]] * 2
    assert (repository / readme).read_text() == (
        "# idea\n\n(What was changed, against which record, and why.)\n\n    ./run.sh --runs 2 --name=idea --set a\\ b=1\n\n"
        "What `python records/compare.py records/cpu/2026-11-21_idea` prints:\n\n"
        "    table of records/cpu/2026-11-21_idea\n\n    its end\n")


def test_a_readme_that_is_there_stays_as_it_is(repository):
    readme = repository / "records/cpu/2026-11-21_idea/README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("By hand.\n")
    ran = call(repository, "--runs", "1", "--name", "idea")
    assert ran.returncode == 0 and readme.read_text() == "By hand.\n" and "table of records/cpu/2026-11-21_idea" in ran.stdout
    assert ran.stdout.endswith("run.sh: records/cpu/2026-11-21_idea/README.md was there, and is left as it is\n")


@pytest.mark.parametrize("others", ([], ["seed0_cd.txt", "seed2_cd.txt"]))
def test_runs_across_midnight_are_one_record(repository, others):
    """The second and third run begin on the next day; in that day's folder there may be logs of another call."""
    cpu = repository / "records/cpu"
    for name in others:
        (cpu / "2026-11-22_idea").mkdir(parents=True, exist_ok=True)
        (cpu / "2026-11-22_idea" / name).write_text("another call's")
    ran = call(repository, "--runs", "3", "--name", "idea", DAY1="2026-11-22", DAY2="2026-11-22")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("the log is now in records/cpu/2026-11-21_idea") == 2
    assert "table of records/cpu/2026-11-21_idea\n" in ran.stdout
    folders = {p.name: sorted(q.name for q in p.iterdir()) for p in cpu.iterdir()}
    assert folders == {"2026-11-21_idea": ["README.md", *(f"seed{i}_ab.txt" for i in range(3))]} | (
        {"2026-11-22_idea": others} if others else {})


def test_named_runs_without_a_log_or_a_table_are_told(repository):
    ran = call(repository, "--runs", "2", "--name", "idea", NO_LOG="1")
    assert ran.returncode == 1 and len(torchruns(ran)) == 1
    assert ran.stderr == "run.sh: the run is over, but there is no new log records/*/*_idea/seed0_*.txt\n"
    ran = call(repository, "--runs", "2", "--name", "idea", UNREADABLE="1")
    assert ran.returncode == 1 and len(torchruns(ran)) == 2 and "table of" in ran.stdout
    assert ran.stderr.startswith("run.sh: the runs are complete, but not their table: see above, then '")
    assert not list(repository.rglob("README.md"))


def test_what_the_script_refuses_is_refused_before_anything_is_fetched(repository):
    (repository / "train_gpt.py").write_text(
        "import sys\nprint('fine')\nif sys.argv[-2] == \"--check\" and 'cpuu' in sys.argv: sys.exit(f'no such preset {sys.argv[1:]}')")
    ran = call(repository, "--preset", "cpuu", "--set", "a b=1", "--runs", "3", "--name", "x", "--seed", "4", gpus=5)
    assert ran.returncode == 1 and "fetching" not in ran.stdout and not torchruns(ran)
    asked = ["--preset", "cpuu", "--seed", "4", "--set", "a b=1", "--name", "x", "--check", "4"]
    assert ran.stderr == f"no such preset {asked}\n"
    ran = call(repository, "--preset", "cpu")
    assert torchruns(ran) and "fine" not in ran.stdout
    ran = call(repository, "--check", "2")
    assert ran.returncode == 1 and ran.stderr.startswith("run.sh: --check is for the script") and not torchruns(ran)


def test_a_script_of_an_earlier_record_is_not_asked(repository):
    assert '"--check"' in (ROOT / "train_gpt.py").read_text()  # by which run.sh knows one that can be asked
    (repository / "before.py").write_text("import sys\nsys.exit('unknown option')")
    assert torchruns(call(repository, "before.py"))


def test_named_runs_without_scipy_do_not_begin(repository):
    hide = "import importlib.util\nfind = importlib.util.find_spec\n" \
           "importlib.util.find_spec = lambda name, *more: None if name == 'scipy' else find(name, *more)"
    (repository.parent / "stubs/sitecustomize.py").write_text(hide)
    ran = call(repository, "--runs", "2", "--name", "idea")
    assert ran.returncode == 1 and "fetching" not in ran.stdout and not torchruns(ran)
    assert ran.stderr == (f"run.sh: the runs' table needs scipy, which {sys.executable} lacks: install it there "
                          "('-m pip install scipy'), or leave out --name\n")
    assert torchruns(call(repository, "--runs", "2"))


def last_line(what, hint=""):
    return f"run.sh: {what}; its log, if it began one, lacks 'complete: yes' and does not count{hint}"


def test_a_failed_run_stops_the_others(repository):
    ran = call(repository, "--runs", "3", "--name", "idea", FAIL_ON_SEED="1", FAILURES='{"0": [7, 50]}')
    assert ran.returncode == 7 and len(torchruns(ran)) == 2
    assert ran.stderr.splitlines() == [last_line("training failed (exit code 7)")]


@pytest.mark.parametrize("failures, status, said", (   # rank: exit code, second
    ({0: (1, 50), 1: (-9, 50)}, 137, ["run.sh: rank 1 was killed by SIGKILL; the machine may have run out of memory"]),
    ({0: (3, 50), 1: (-9, 80)}, 3, []),    # torchrun killed one that did not end when it was told to
    ({0: (-15, 50), 1: (3, 50)}, 3, []),   # this one it told to end
    ({1: (-11, 50)}, 139, ["run.sh: rank 1 was killed by SIGSEGV"])))
def test_the_first_failure_is_the_status(repository, failures, status, said):
    ran = call(repository, "--seed", "0", FAIL_ON_SEED="0", FAILURES=json.dumps(failures))
    assert ran.returncode == status
    assert ran.stderr.splitlines() == [*said, last_line(f"training failed (exit code {status})")]


def test_a_killed_launcher_is_one_line(repository, tmp_path):
    (tmp_path / "stubs/torch/distributed/run.py").write_text("import os; os.kill(os.getpid(), 9)")
    ran = call(repository)
    assert ran.returncode == 137 and ran.stderr.splitlines() == [last_line("training failed (exit code 137)")]


@pytest.mark.parametrize("option", (["--checkpoint-every", "50"], ["--checkpoint-every=50"]))
def test_a_run_with_checkpoints_can_be_continued(repository, option):
    ran = call(repository, "--seed", "0", *option, FAIL_ON_SEED="0", FAILURES='{"0": [130, 50]}')
    assert torchruns(ran)[0]["argv"][-len(option):] == option
    assert ran.stderr.splitlines() == [last_line("interrupted", "; if it wrote a checkpoint, --resume LOG_FOLDER continues from it")]


@pytest.mark.parametrize("arguments, message", (
    (["--runs", "0", "--name", "x"], "positive number"),
    (["--runs=two", "--name", "x"], "positive number"), (["--runs", "2", "--seed", "x", "--name", "x"], "--seed needs"),
    (["--data"], "--data needs a value"), (["--runs", "2", "--resume", "x"], "leave out --runs")))
def test_refusals_are_one_line(repository, arguments, message):
    ran = call(repository, *arguments)
    assert ran.returncode == 1 and message in ran.stderr and len(ran.stderr.splitlines()) == 1 and not ran.stdout


def test_failing_data_stops_before_training(repository):
    (repository / "data/local_corpus.py").write_text("import sys; sys.exit('disk full')")
    ran = call(repository)
    assert ran.returncode == 1 and ran.stderr == "disk full\n" and not torchruns(ran)


def test_help_explains_itself_and_the_script(repository):
    (repository / "train_gpt.py").write_text("import sys; print('script got', sys.argv[1:])")
    ran = call(repository, "-h")
    assert ran.returncode == 0 and "--runs N" in ran.stdout and "script got ['--help']" in ran.stdout
    assert "set -euo" not in ran.stdout and "fetching" not in ran.stdout


def wait_for(*paths):
    end = time.monotonic() + WAIT
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"not all there: {paths}"
        time.sleep(0.05)


@pytest.mark.parametrize("program, said", (
    ("repo/data/local_corpus.py", None),
    ("stubs/torch/distributed/run.py", [last_line("interrupted")])))   # the launcher, which imports for seconds
def test_ctrl_c_before_the_ranks_start(repository, tmp_path, program, said):
    (tmp_path / program).write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(3600)")
    with started(repository) as process:
        wait_for(repository / "up")
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == -signal.SIGINT and "torchrun" not in stdout
    assert said is None or stderr.splitlines() == said


# ---- Through the real torchrun -----------------------------------------------------------------------------------

@pytest.mark.slow
def test_real_torchrun_starts_two_ranks_quietly(repository):
    (repository / "my_copy.py").write_text(
        "import os, sys\n"
        "env = [os.environ[k] for k in ('LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')]\n"
        "sys.stdout.write(f'{env} {sys.argv[1:]}\\n')\n")
    ran = call(repository, "my_copy.py", "--seed", "3", stubs=False, OMP_NUM_THREADS="1")
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    for rank in (0, 1):
        assert f"['{rank}', '2', '1'] ['--preset', 'cpu', '--seed', '3']" in ran.stdout


@pytest.mark.slow
def test_real_named_runs_end_with_the_table_of_compare(repository):
    """A log as short as can be, and the real torchrun and compare.py."""
    shutil.copy(ROOT / "records/compare.py", repository / "records")
    (repository / "train_gpt.py").write_text(
        "import os, pathlib, sys\n"
        "seed = sys.argv[sys.argv.index('--seed') + 1]\n"
        "log = pathlib.Path('records/cpu/2026-11-21_idea', f'seed{seed}_ab.txt')\n"
        "log.parent.mkdir(parents=True, exist_ok=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    log.write_text(f'step:8/8 val_loss:3.2{seed} train_time:1{seed}000ms step_avg:9.00ms\\n')\n")
    ran = call(repository, "--runs", "1", "--seed", "1", "--name", "idea", stubs=False)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    table = ["2026-11-21_idea", "  runs (n)           1", "  loss: mean, sd     3.2100, -", "  times, s           11.000"]
    assert all(f"\n{line}\n" in ran.stdout for line in table)
    readme = (repository / "records/cpu/2026-11-21_idea/README.md").read_text()
    assert all(f"\n    {line}\n" in readme for line in table)


@pytest.mark.slow
@pytest.mark.parametrize("end, status, said", (
    ("sys.exit('out of luck')", 1, "out of luck"),
    ("os.kill(os.getpid(), 9)", 137, "run.sh: rank 1 was killed by SIGKILL; the machine may have run out of memory")))
def test_real_torchrun_failure_is_two_lines(repository, end, status, said):
    (repository / "train_gpt.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep({10 * WAIT})")
    ran = call(repository, stubs=False)
    assert ran.returncode == status
    assert ran.stderr.splitlines() == [said, last_line(f"training failed (exit code {status})")]


TAKES_LEAVE = """
import os, signal, sys, time
from pathlib import Path

def leave(*_):
    Path("leaving" + os.environ["RANK"]).touch()
    time.sleep(2)
    Path("left" + os.environ["RANK"]).touch()
    sys.exit(1)

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, leave)
Path("up" + os.environ["RANK"]).touch()
time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number, send", ((signal.SIGINT, os.killpg), (signal.SIGHUP, os.killpg), (signal.SIGTERM, os.kill)))
def test_a_signal_ends_all(repository, number, send):
    """A terminal sends to the whole process group, which the ranks are not in; others send to run.sh alone."""
    (repository / "train_gpt.py").write_text(TAKES_LEAVE)
    with started(repository, "--runs", "2", stubs=False) as process:
        for state in ("up", "leaving"):   # the second signal is an impatient user's
            wait_for(*(repository / f"{state}{rank}" for rank in (0, 1)))
            send(process.pid, number)
        process.wait(WAIT)
        assert (repository / "left0").exists() and (repository / "left1").exists(), "run.sh ended before the ranks"
        stdout, stderr = process.communicate(timeout=WAIT)   # returns when all are gone that have them: launcher and ranks
    assert process.returncode == -number   # a shell says 128 + number
    assert stderr.splitlines() == [last_line("interrupted")]
    assert "run 1 of 2" in stdout and "run 2 of 2" not in stdout


@pytest.mark.slow
def test_a_signal_while_ranks_are_started_leaves_none_behind(repository, tmp_path):
    """The launcher gets it between the starts of the first and of the second rank."""
    (repository / "train_gpt.py").write_text("import time; time.sleep(3600)")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "starts = []\n"
        "def hook(event, args):\n"
        "    if event == 'subprocess.Popen' and 'train_gpt.py' in args[1]:\n"
        "        starts.append(1)\n"
        "        if len(starts) == 2: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.addaudithook(hook)\n")
    ran = call(repository, stubs=False, timeout=WAIT, PYTHONPATH=str(tmp_path / "site"))
    assert ran.returncode == 143 and ran.stderr.splitlines() == [last_line("interrupted")]


# ---- The environment ---------------------------------------------------------------------------------------------

@pytest.fixture
def bare(repository):
    """call() with a Python that has nothing; the log of what it was asked."""
    python = repository.parent / "bin/bare-python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    log = repository.parent / "log"

    def bare_call(*arguments, **environment):
        log.write_text("")
        ran = call(repository, *arguments, **{"PYTHON": "bare-python", "stubs": False} | environment)
        return ran, log.read_text().splitlines()
    return bare_call


CPU_TORCH = ("pip install -qq --disable-pip-version-check --timeout 5 --retries 0 --no-deps "
             "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0")
TORCH = "pip install -qq --disable-pip-version-check torch==2.13.0"
OTHERS = "pip install -qq --disable-pip-version-check -r requirements.txt"
VENV = "-m venv --clear .venv"


@pytest.mark.parametrize("cpu_index, asked", (("", [VENV, CPU_TORCH, TORCH, OTHERS]), ("1", [VENV, CPU_TORCH, OTHERS])))
def test_environment_is_made_once(bare, repository, cpu_index, asked):
    ran, log = bare(CPU_INDEX=cpu_index)
    assert ran.returncode == 0, ran.stderr
    assert log == asked
    assert " --standalone --nproc_per_node=2 --signals-to-handle= train_gpt.py --preset cpu" in ran.stdout
    ran, log = bare()
    assert ran.returncode == 0 and log == [] and "using .venv" in ran.stdout


def test_interrupted_environment_is_completed(bare):
    ran, log = bare(INTERRUPT="1")
    assert ran.returncode == 1 and "pip could not install" in ran.stderr
    ran, log = bare(CPU_INDEX="1")
    assert ran.returncode == 0 and log == [CPU_TORCH, OTHERS] and "completing .venv" in ran.stdout


@pytest.mark.slow
def test_changed_requirements_are_installed(bare, repository):
    bare()
    with open(repository / "requirements.txt", "a") as file:
        file.write("another\n")
    assert bare(CPU_INDEX="1")[1] == [CPU_TORCH, OTHERS]
    assert bare()[1] == []


@pytest.mark.slow
def test_torch_without_cuda_is_replaced_where_there_are_gpus(bare, repository):
    bare()
    ran, log = bare(gpus=1, HAS_CUDA=".venv/cuda")
    assert ran.returncode == 0 and log == [VENV, TORCH, OTHERS]
    ran, log = bare(gpus=1)
    assert log == []
    shutil.rmtree(repository / ".venv")
    ran, log = bare(gpus=1)
    assert ran.returncode == 1 and "built without CUDA" in ran.stderr


def test_unusable_pythons_are_one_line(bare):
    for environment, message in (({"TOO_OLD": "1"}, "Python 3.10 or newer is needed"), ({"NO_VENV": "1"}, "venv' failed"),
                                 ({"PYTHON": "no-such-python"}, "no no-such-python here")):
        ran, _ = bare(**environment)
        assert ran.returncode == 1 and message in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.stderr


# ---- test.sh -----------------------------------------------------------------------------------------------------

@pytest.fixture
def run_test_sh(repository, tmp_path):
    """run_test_sh(*arguments): the finished process, in a repository with three tests."""
    (repository / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", repository)
    (repository / "tests/test_one.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "@pytest.mark.slow\ndef test_fails(): assert 0\n"
        "@pytest.mark.numeric\ndef test_numbers():\n"
        "    names = 'OPENBLAS_CORETYPE ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA MKL_ENABLE_INSTRUCTIONS'.split()\n"
        "    print('had', *(f'{name}={os.environ.get(name)}' for name in names))\n"
        "    assert os.environ.get('ATEN_CPU_CAPABILITY') != 'default'\n")
    for name in ("scipy", "matplotlib", "triton"):
        (tmp_path / "stubs" / f"{name}.py").write_text("")
    return lambda *arguments, **options: call(repository, *arguments, program="test.sh", ATEN_CPU_CAPABILITY="", **options)


@pytest.mark.slow
def test_test_sh(run_test_sh, tmp_path):
    """All tests; those that are named; a failure is the status."""
    ran = run_test_sh(cwd=tmp_path)
    assert ran.returncode == 1 and "1 failed, 2 passed" in ran.stdout and sys.executable in ran.stdout
    ran = run_test_sh("tests/test_one.py::test_passes")
    assert ran.returncode == 0 and "1 passed" in ran.stdout
    ran = run_test_sh("--fast")
    assert ran.returncode == 0 and "2 passed" in ran.stdout


@pytest.mark.slow
def test_test_sh_with_the_settings_of_other_cpus(run_test_sh):
    """Of the numeric tests alone; the first failure ends it."""
    ran = run_test_sh("--cpus", "-rP", "--numprocesses=0")
    assert ran.returncode == 1
    said, had = (re.findall(rf"^{word} (.+)", ran.stdout, re.M) for word in ("test.sh: with", "had"))
    assert said == had and len(said) == 2 and all(line.count("=") == 4 and "None" not in line for line in said)
    assert ran.stdout.count("1 passed") == 1 and ran.stdout.count("1 failed") == 1
