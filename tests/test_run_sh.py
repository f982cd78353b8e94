"""Tests run.sh and test.sh in a copy of the repository whose programs only print how they were called.

Most tests use stub packages, among them a torchrun that prints its arguments, and a stub nvidia-smi. Some use
the real torchrun. The installation of .venv runs with a stub Python.
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
    name = lambda: signal.Signals(-exitcode).name
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, signal_name=name)

def main(argv):
    standalone, processes, signals, *script = argv
    assert (standalone, signals) == ("--standalone", "--signals-to-handle=")
    print("torchrun", json.dumps({"processes": processes.removeprefix("--nproc_per_node="), "argv": script,
                                  "omp": os.environ["OMP_NUM_THREADS"], "cwd": os.getcwd()}))
    warnings.warn("not for the user")
    if os.environ.get("FAIL_ON_SEED") in script:
        failures = json.loads(os.environ["FAILURES"])
        raise ChildFailedError({rank: failure(*how) for rank, how in failures.items()})
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
# A Python without packages; its .venv has what pip installed. It logs its commands in $LOG.
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
    """Makes stub packages in tmp_path/stubs. Returns a copy of the repository, tmp_path/repo."""
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
    """Starts the program in a process group of its own, with an nvidia-smi that lists `gpus`."""
    tmp_path = repository.parent
    smi = tmp_path / "bin/nvidia-smi"
    listed = "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: {i})'\necho '  MIG 1g'\n" for i in range(gpus))
    smi.write_text(f"#!/bin/sh\n{listed}exit {int(not gpus)}\n")
    smi.chmod(0o755)
    removed = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    inherited |= {"PYTHON": sys.executable, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment = inherited | {"LOG": str(tmp_path / "log"), "HAS_CUDA": ""} | environment
    if stubs:
        environment["PYTHONPATH"] = str(tmp_path / "stubs")
    # If pytest runs in the background or under nohup it ignores these, and run.sh would inherit that.
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)}
    command = [repository / program, *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {"cwd": cwd or repository, "env": environment, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **streams, **options)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_program(*arguments, timeout=WAIT, **options):
    """Runs the program to its end. Returns the finished process.

    All processes with its stdout or stderr must end: one that is left behind fails the test.
    """
    with started(*arguments, **options) as process:
        stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def torchruns(ran) -> list[dict]:
    """Returns what each stub torchrun printed."""
    return [
        json.loads(line.split(" ", 1)[1]) for line in ran.stdout.splitlines() if line.startswith("torchrun ")
    ]


def arguments_of(ran) -> tuple[str, list[str]]:
    """Returns the only run's processes, and its script with arguments."""
    assert ran.returncode == 0, ran.stderr
    (run,) = torchruns(ran)
    return run["processes"], run["argv"]


@pytest.mark.parametrize(
    "gpus, processes", ((0, "2"), (1, "1"), (2, "2"), (3, "2"), (7, "4"), (8, "8"), (16, "8"))
)
def test_processes_preset_and_data_follow_the_gpus(repository, gpus, processes):
    ran = run_program(repository, gpus=gpus)
    preset, data = ("record", "fineweb.py") if gpus else ("cpu", "local_corpus.py")
    assert arguments_of(ran) == (processes, ["train_gpt.py", "--preset", preset])
    assert f"fetching with {data}" in ran.stdout and ran.stdout.count("fetching") == 1
    omp = "1" if gpus else str(max(1, os.sysconf("SC_NPROCESSORS_ONLN") // 2))
    assert torchruns(ran)[0]["omp"] == omp


def test_an_earlier_versions_data_is_completed(repository):
    """Its folders have shards, but no vocabulary.txt: the scripts must be called, and decide themselves."""
    for folder, preset, script in (("fineweb10B", "record", "fineweb"), ("local", "cpu", "local_corpus")):
        (repository / "data" / folder).mkdir()
        for split in ("train_000001", "val_000000"):
            (repository / "data" / folder / f"x_{split}.bin").write_text("")
        assert f"fetching with {script}.py" in run_program(repository, "--preset", preset).stdout


@pytest.mark.parametrize(
    "visible, processes", (("0,2,3", "2"), ("", "2"), ("-1", "2"), ("GPU-1f", "1"), ("0,1,2,3,4,5,6,7", "4"))
)
def test_visible_devices_count(repository, visible, processes):
    ran = run_program(repository, gpus=4, CUDA_VISIBLE_DEVICES=visible)
    preset = "cpu" if visible in ("", "-1") else "record"
    assert arguments_of(ran) == (processes, ["train_gpt.py", "--preset", preset])


def test_options_of_the_user_have_priority(repository):
    ran = run_program(repository, "--preset=cpu", "--set", "a b=1", gpus=4, OMP_NUM_THREADS="3")
    assert arguments_of(ran) == ("4", ["train_gpt.py", "--preset", "cpu", "--set", "a b=1"])
    assert "fetching with local_corpus.py" in ran.stdout and torchruns(ran)[0]["omp"] == "3"
    ran = run_program(repository, "--data", "my shards", "--seed", "5", "--name", "x")
    assert arguments_of(ran)[1] == [
        "train_gpt.py",
        "--preset",
        "cpu",
        "--seed",
        "5",
        "--data",
        "my shards",
        "--name",
        "x",
    ]
    assert "fetching" not in ran.stdout
    assert "fetching with fineweb.py" in run_program(repository, "--preset", "record").stdout


def test_paths_are_relative_to_the_caller(repository, tmp_path):
    (tmp_path / "my.py").write_text("")
    ran = run_program(repository, "my.py", "--data", "d", "--save=w.pt", "--resume", "x", cwd=tmp_path)
    script = str(tmp_path / "my.py")
    assert arguments_of(ran)[1] == [
        script,
        "--preset",
        "cpu",
        "--data",
        f"{tmp_path}/d",
        "--save",
        f"{tmp_path}/w.pt",
        "--resume",
        f"{tmp_path}/x",
    ]
    assert torchruns(ran)[0]["cwd"] == str(repository)
    assert "no such file" in run_program(repository, "none.py").stderr


def test_runs_count_seeds_up(repository):
    ran = run_program(repository, "--runs", "3", "--seed=08", "--name", "idea")
    assert ran.returncode == 0, ran.stderr
    assert [run["argv"] for run in torchruns(ran)] == [
        ["train_gpt.py", "--preset", "cpu", "--seed", str(seed), "--name", "idea"] for seed in (8, 9, 10)
    ]
    assert ran.stdout.count("fetching") == 1
    unnamed = run_program(repository, "--runs", "2")  # these are attempts
    assert unnamed.returncode == 0 and "table of" not in unnamed.stdout
    assert [run["argv"] for run in torchruns(unnamed)] == [
        ["train_gpt.py", "--preset", "cpu", "--seed", seed] for seed in "01"
    ]


def test_named_runs_end_with_their_table_and_a_readme(repository):
    earlier = ("cpu/2026-11-20_idea", "other/2026-11-20_idea")
    old = [repository / "records" / folder for folder in earlier]
    for folder in old:
        folder.mkdir(parents=True)
        (folder / "seed0_cd.txt").write_text("")
    ran = run_program(repository, "--runs", "2", "--name=idea", "--set", "a b=1")
    assert ran.returncode == 0 and ran.stderr == ""
    readme = "records/cpu/2026-11-21_idea/README.md"
    assert ran.stdout.endswith(
        "\ntable of records/cpu/2026-11-21_idea\n\nits end\n\n"
        f"run.sh: {readme} begins with this table; say in it what was changed\n"
    )
    assert ran.stdout.count("table of") == 1
    assert [[p.name for p in folder.iterdir()] for folder in old] == [["seed0_cd.txt"]] * 2
    assert (repository / readme).read_text() == (
        "# idea\n\n(What was changed, against which record, and why.)\n\n"
        "    ./run.sh --runs 2 --name=idea --set a\\ b=1\n\n"
        "What `python records/compare.py records/cpu/2026-11-21_idea` prints:\n\n"
        "    table of records/cpu/2026-11-21_idea\n\n    its end\n"
    )


def test_an_existing_readme_is_not_changed(repository):
    readme = repository / "records/cpu/2026-11-21_idea/README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("By hand.\n")
    ran = run_program(repository, "--runs", "1", "--name", "idea")
    assert (
        ran.returncode == 0
        and readme.read_text() == "By hand.\n"
        and "table of records/cpu/2026-11-21_idea" in ran.stdout
    )
    assert ran.stdout.endswith(
        "run.sh: records/cpu/2026-11-21_idea/README.md was there, and is left as it is\n"
    )


@pytest.mark.parametrize("others", ([], ["seed0_cd.txt", "seed2_cd.txt"]))
def test_runs_across_midnight_are_one_record(repository, others):
    """The second and third run begin on the next day, whose folder may have logs of another call."""
    cpu = repository / "records/cpu"
    for name in others:
        (cpu / "2026-11-22_idea").mkdir(parents=True, exist_ok=True)
        (cpu / "2026-11-22_idea" / name).write_text("another call's")
    ran = run_program(repository, "--runs", "3", "--name", "idea", DAY1="2026-11-22", DAY2="2026-11-22")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("the log is now in records/cpu/2026-11-21_idea") == 2
    assert "table of records/cpu/2026-11-21_idea\n" in ran.stdout
    folders = {p.name: sorted(q.name for q in p.iterdir()) for p in cpu.iterdir()}
    assert folders == {"2026-11-21_idea": ["README.md", *(f"seed{i}_ab.txt" for i in range(3))]} | (
        {"2026-11-22_idea": others} if others else {}
    )


def test_named_runs_without_a_log_or_a_table_fail(repository):
    ran = run_program(repository, "--runs", "2", "--name", "idea", NO_LOG="1")
    assert ran.returncode == 1 and len(torchruns(ran)) == 1
    assert ran.stderr == "run.sh: the run is over, but there is no new log records/*/*_idea/seed0_*.txt\n"
    ran = run_program(repository, "--runs", "2", "--name", "idea", UNREADABLE="1")
    assert ran.returncode == 1 and len(torchruns(ran)) == 2 and "table of" in ran.stdout
    assert ran.stderr.startswith("run.sh: the runs are complete, but not their table: see above, then '")
    assert not list(repository.rglob("README.md"))


def test_options_are_checked_before_data_is_fetched(repository):
    (repository / "train_gpt.py").write_text(
        "import sys\n"
        "print('fine')\n"
        "if sys.argv[-2] == \"--check\" and 'cpuu' in sys.argv: sys.exit(f'no such preset {sys.argv[1:]}')"
    )
    ran = run_program(
        repository, "--preset", "cpuu", "--set", "a b=1", "--runs", "3", "--name", "x", "--seed", "4", gpus=5
    )
    assert ran.returncode == 1 and "fetching" not in ran.stdout and not torchruns(ran)
    options = ["--preset", "cpuu", "--seed", "4", "--set", "a b=1", "--name", "x", "--check", "4"]
    assert ran.stderr == f"no such preset {options}\n"
    ran = run_program(repository, "--preset", "cpu")
    assert torchruns(ran) and "fine" not in ran.stdout
    ran = run_program(repository, "--check", "2")
    assert ran.returncode == 1 and not torchruns(ran)
    assert ran.stderr.startswith("run.sh: --check is for the script")


def test_a_script_without_check_is_not_checked(repository):
    assert '"--check"' in (ROOT / "train_gpt.py").read_text()  # how run.sh recognizes a script with it
    (repository / "before.py").write_text("import sys\nsys.exit('unknown option')")
    assert torchruns(run_program(repository, "before.py"))


def test_named_runs_without_scipy_do_not_begin(repository):
    hide = (
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'scipy' else find(name, *more)"
    )
    (repository.parent / "stubs/sitecustomize.py").write_text(hide)
    ran = run_program(repository, "--runs", "2", "--name", "idea")
    assert ran.returncode == 1 and "fetching" not in ran.stdout and not torchruns(ran)
    assert ran.stderr == (
        f"run.sh: the runs' table needs scipy, which {sys.executable} lacks: install it there "
        "('-m pip install scipy'), or leave out --name\n"
    )
    assert torchruns(run_program(repository, "--runs", "2"))


def last_line(what, hint=""):
    return f"run.sh: {what}; its log, if it began one, lacks 'complete: yes' and does not count{hint}"


def test_a_failed_run_stops_the_others(repository):
    ran = run_program(
        repository, "--runs", "3", "--name", "idea", FAIL_ON_SEED="1", FAILURES='{"0": [7, 50]}'
    )
    assert ran.returncode == 7 and len(torchruns(ran)) == 2
    assert ran.stderr.splitlines() == [last_line("training failed (exit code 7)")]


@pytest.mark.parametrize(
    "failures, status, message",  # failures: (exit code, second) by rank
    (
        (
            {0: (1, 50), 1: (-9, 50)},
            137,
            ["run.sh: rank 1 was killed by SIGKILL; the machine may have run out of memory"],
        ),
        ({0: (3, 50), 1: (-9, 80)}, 3, []),  # torchrun killed rank 1, which did not end on SIGTERM
        ({0: (-15, 50), 1: (3, 50)}, 3, []),  # torchrun ended rank 0 with SIGTERM
        ({1: (-11, 50)}, 139, ["run.sh: rank 1 was killed by SIGSEGV"]),
    ),
)
def test_the_first_failure_is_the_status(repository, failures, status, message):
    ran = run_program(repository, "--seed", "0", FAIL_ON_SEED="0", FAILURES=json.dumps(failures))
    assert ran.returncode == status
    assert ran.stderr.splitlines() == [*message, last_line(f"training failed (exit code {status})")]


def test_a_killed_launcher_is_one_line(repository, tmp_path):
    (tmp_path / "stubs/torch/distributed/run.py").write_text("import os; os.kill(os.getpid(), 9)")
    ran = run_program(repository)
    assert ran.returncode == 137 and ran.stderr.splitlines() == [last_line("training failed (exit code 137)")]


@pytest.mark.parametrize("option", (["--checkpoint-every", "50"], ["--checkpoint-every=50"]))
def test_a_failed_run_with_checkpoints_mentions_resume(repository, option):
    ran = run_program(repository, "--seed", "0", *option, FAIL_ON_SEED="0", FAILURES='{"0": [130, 50]}')
    assert torchruns(ran)[0]["argv"][-len(option) :] == option
    hint = "; if it wrote a checkpoint, --resume LOG_FOLDER continues from it"
    assert ran.stderr.splitlines() == [last_line("interrupted", hint)]


@pytest.mark.parametrize(
    "arguments, message",
    (
        (["--runs", "0", "--name", "x"], "positive number"),
        (["--runs=two", "--name", "x"], "positive number"),
        (["--runs", "2", "--seed", "x", "--name", "x"], "--seed needs"),
        (["--data"], "--data needs a value"),
        (["--runs", "2", "--resume", "x"], "leave out --runs"),
    ),
)
def test_wrong_options_are_one_line(repository, arguments, message):
    ran = run_program(repository, *arguments)
    assert ran.returncode == 1 and not ran.stdout
    assert message in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_failing_data_stops_before_training(repository):
    (repository / "data/local_corpus.py").write_text("import sys; sys.exit('disk full')")
    ran = run_program(repository)
    assert ran.returncode == 1 and ran.stderr == "disk full\n" and not torchruns(ran)


def test_help_explains_itself_and_the_script(repository):
    (repository / "train_gpt.py").write_text("import sys; print('script got', sys.argv[1:])")
    ran = run_program(repository, "-h")
    assert ran.returncode == 0 and "--runs N" in ran.stdout and "script got ['--help']" in ran.stdout
    assert "set -euo" not in ran.stdout and "fetching" not in ran.stdout


def wait_for(*paths):
    end = time.monotonic() + WAIT
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"missing some of {paths}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "program, message",
    (
        ("repo/data/local_corpus.py", None),
        ("stubs/torch/distributed/run.py", [last_line("interrupted")]),  # imports for seconds
    ),
)
def test_ctrl_c_before_the_ranks_start(repository, tmp_path, program, message):
    (tmp_path / program).write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(3600)")
    with started(repository) as process:
        wait_for(repository / "up")
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == -signal.SIGINT and "torchrun" not in stdout
    assert message is None or stderr.splitlines() == message


# ---- Through the real torchrun -----------------------------------------------------------------------------


@pytest.mark.slow
def test_real_torchrun_starts_two_ranks_quietly(repository):
    (repository / "my_copy.py").write_text(
        "import os, sys\n"
        "env = [os.environ[k] for k in ('LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')]\n"
        "sys.stdout.write(f'{env} {sys.argv[1:]}\\n')\n"
    )
    ran = run_program(repository, "my_copy.py", "--seed", "3", stubs=False, OMP_NUM_THREADS="1")
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    for rank in (0, 1):
        assert f"['{rank}', '2', '1'] ['--preset', 'cpu', '--seed', '3']" in ran.stdout


@pytest.mark.slow
def test_real_named_runs_end_with_the_table_of_compare(repository):
    """With a minimal log, the real torchrun and the real compare.py."""
    shutil.copy(ROOT / "records/compare.py", repository / "records")
    (repository / "train_gpt.py").write_text(
        "import os, pathlib, sys\n"
        "seed = sys.argv[sys.argv.index('--seed') + 1]\n"
        "log = pathlib.Path('records/cpu/2026-11-21_idea', f'seed{seed}_ab.txt')\n"
        "log.parent.mkdir(parents=True, exist_ok=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    log.write_text(f'step:8/8 val_loss:3.2{seed} train_time:1{seed}000ms step_avg:9.00ms\\n')\n"
    )
    ran = run_program(repository, "--runs", "1", "--seed", "1", "--name", "idea", stubs=False)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    table = [
        "2026-11-21_idea",
        "  runs (n)           1",
        "  loss: mean, sd     3.2100, -",
        "  times, s           11.000",
    ]
    assert all(f"\n{line}\n" in ran.stdout for line in table)
    readme = (repository / "records/cpu/2026-11-21_idea/README.md").read_text()
    assert all(f"\n    {line}\n" in readme for line in table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, status, message",
    (
        ("sys.exit('out of luck')", 1, "out of luck"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "run.sh: rank 1 was killed by SIGKILL; the machine may have run out of memory",
        ),
    ),
)
def test_real_torchrun_failure_is_two_lines(repository, end, status, message):
    (repository / "train_gpt.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep({10 * WAIT})"
    )
    ran = run_program(repository, stubs=False)
    assert ran.returncode == status
    assert ran.stderr.splitlines() == [message, last_line(f"training failed (exit code {status})")]


SLOW_TO_END = """
import os, signal, sys, time
from pathlib import Path

def end(*_):
    Path("ending" + os.environ["RANK"]).touch()
    time.sleep(2)
    Path("ended" + os.environ["RANK"]).touch()
    sys.exit(1)

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
Path("up" + os.environ["RANK"]).touch()
time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, send", ((signal.SIGINT, os.killpg), (signal.SIGHUP, os.killpg), (signal.SIGTERM, os.kill))
)
def test_a_signal_ends_all(repository, number, send):
    """A terminal sends to run.sh's process group, which the ranks are not in; others send to run.sh alone."""
    (repository / "train_gpt.py").write_text(SLOW_TO_END)
    with started(repository, "--runs", "2", stubs=False) as process:
        for state in ("up", "ending"):  # the second signal is an impatient user's
            wait_for(*(repository / f"{state}{rank}" for rank in (0, 1)))
            send(process.pid, number)
        process.wait(WAIT)
        assert (repository / "ended0").exists() and (repository / "ended1").exists(), (
            "run.sh ended before the ranks"
        )
        # Returns when all processes that hold them are gone: launcher and ranks.
        stdout, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == -number  # 128 + number in a shell
    assert stderr.splitlines() == [last_line("interrupted")]
    assert "run 1 of 2" in stdout and "run 2 of 2" not in stdout


@pytest.mark.slow
def test_a_signal_while_ranks_are_started_leaves_none_behind(repository, tmp_path):
    """The launcher gets it after the first rank is started and before the second."""
    (repository / "train_gpt.py").write_text("import time; time.sleep(3600)")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "starts = []\n"
        "def hook(event, args):\n"
        "    if event == 'subprocess.Popen' and 'train_gpt.py' in args[1]:\n"
        "        starts.append(1)\n"
        "        if len(starts) == 2: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.addaudithook(hook)\n"
    )
    ran = run_program(repository, stubs=False, timeout=WAIT, PYTHONPATH=str(tmp_path / "site"))
    assert ran.returncode == 143 and ran.stderr.splitlines() == [last_line("interrupted")]


# ---- The environment ---------------------------------------------------------------------------------------


@pytest.fixture
def bare(repository):
    """Returns bare_call(): it runs run.sh with a bare Python, and returns the process and its commands."""
    python = repository.parent / "bin/bare-python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    log = repository.parent / "log"

    def bare_call(*arguments, **environment):
        log.write_text("")
        ran = run_program(repository, *arguments, **{"PYTHON": "bare-python", "stubs": False} | environment)
        return ran, log.read_text().splitlines()

    return bare_call


CPU_TORCH = (
    "pip install -qq --disable-pip-version-check --timeout 5 --retries 0 --no-deps "
    "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
)
TORCH = "pip install -qq --disable-pip-version-check torch==2.13.0"
OTHERS = "pip install -qq --disable-pip-version-check -r requirements.txt"
VENV = "-m venv --clear .venv"


@pytest.mark.parametrize(
    "cpu_index, commands", (("", [VENV, CPU_TORCH, TORCH, OTHERS]), ("1", [VENV, CPU_TORCH, OTHERS]))
)
def test_environment_is_made_once(bare, repository, cpu_index, commands):
    ran, log = bare(CPU_INDEX=cpu_index)
    assert ran.returncode == 0, ran.stderr
    assert log == commands
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
    for environment, message in (
        ({"TOO_OLD": "1"}, "Python 3.10 or newer is needed"),
        ({"NO_VENV": "1"}, "venv' failed"),
        ({"PYTHON": "no-such-python"}, "no no-such-python here"),
    ):
        ran, _ = bare(**environment)
        assert ran.returncode == 1 and message in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.stderr


# ---- test.sh -----------------------------------------------------------------------------------------------


@pytest.fixture
def run_test_sh(repository, tmp_path):
    """Returns run_test_sh(*arguments): it runs test.sh in a repository with three tests."""
    (repository / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", repository)
    (repository / "tests/test_one.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "@pytest.mark.slow\ndef test_fails(): assert 0\n"
        "@pytest.mark.numeric\ndef test_numbers():\n"
        "    names = ['OPENBLAS_CORETYPE', 'ATEN_CPU_CAPABILITY']\n"
        "    names += ['ONEDNN_MAX_CPU_ISA', 'MKL_ENABLE_INSTRUCTIONS']\n"
        "    print('had', *(f'{name}={os.environ.get(name)}' for name in names))\n"
        "    assert os.environ.get('ATEN_CPU_CAPABILITY') != 'default'\n"
    )
    for name in ("scipy", "matplotlib", "triton"):
        (tmp_path / "stubs" / f"{name}.py").write_text("")
    for name in ("ruff", "mypy"):
        (tmp_path / "stubs" / f"{name}.py").write_text(f"import sys\nprint('{name}', *sys.argv[1:])\n")
    return lambda *arguments, **options: run_program(
        repository, *arguments, program="test.sh", ATEN_CPU_CAPABILITY="", **options
    )


@pytest.mark.slow
def test_test_sh(run_test_sh, tmp_path):
    """Runs all tests, or those named. A failure is the status."""
    ran = run_test_sh(cwd=tmp_path)
    assert ran.returncode == 1 and "1 failed, 2 passed" in ran.stdout and sys.executable in ran.stdout
    assert "\nruff format --check --quiet .\nruff check .\nmypy\n" in ran.stdout
    ran = run_test_sh("tests/test_one.py::test_passes")
    assert ran.returncode == 0 and "1 passed" in ran.stdout and "ruff" not in ran.stdout
    ran = run_test_sh("--fast")
    assert ran.returncode == 0 and "2 passed" in ran.stdout and "ruff" not in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", ("ruff", "mypy"))
def test_test_sh_ends_with_what_a_checker_finds(run_test_sh, tmp_path, tool):
    (tmp_path / "stubs" / f"{tool}.py").write_text("import sys\nsys.exit('found something')\n")
    ran = run_test_sh()
    assert ran.returncode == 1 and "found something\n" in ran.stderr and "passed" not in ran.stdout


@pytest.mark.slow
def test_test_sh_with_the_settings_of_other_cpus(run_test_sh):
    """Runs the numeric tests alone. The first failure ends it."""
    ran = run_test_sh("--cpus", "-rP", "--numprocesses=0")
    assert ran.returncode == 1
    printed, had = (
        re.findall(rf"^{word} (.+)", ran.stdout, re.MULTILINE) for word in ("test.sh: with", "had")
    )
    assert printed == had and len(printed) == 2
    assert all(line.count("=") == 4 and "None" not in line for line in printed)
    assert ran.stdout.count("1 passed") == 1 and ran.stdout.count("1 failed") == 1
