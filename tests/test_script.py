"""Tests the command line with real processes: logs line by line, screen output, options."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt as tg
from launch import SOURCE, WAIT, Launch, SetGlobal, ascii_screen, isolate, make_corpus, settings

TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=2".split()


def start(folder, *command):
    """Starts Python in `folder`, without torchrun's variables, for one thread and no GPU."""
    environment = dict(os.environ, TMPDIR=str(folder.parent))  # torchrun leaves a folder there
    isolate(environment)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a tiny corpus of bytes."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    make_corpus(folder / "corpus")
    return folder


def run(folder, *command):
    """Runs Python to its end, which must be good.

    Returns its output, and the log's text after the script's source.
    """
    process = start(folder, *command)
    out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 0, err
    log = folder / re.search(r"^log: (.*)\n\Z", out, re.MULTILINE)[1]
    source, text = log.read_text(encoding="utf-8").split(f"\n{'=' * 100}\n", 1)
    assert source == SOURCE
    return out, text


# ---- logs and screen ---------------------------------------------------------------------------------------

LOG = rf"""Running Python 3\.\S+ on \w+ \w+
Running PyTorch {re.escape(torch.__version__)} compiled for CUDA \S+ on .+ with world_size (?P<world_size>\d)
script: train_gpt\.py \(sha256 [0-9a-f]{{12}}\)
commit: (?:unknown|[0-9a-f]{{40}} \((?:clean|modified)\))
config: (?P<config>.*)
data: [0-9a-f]{{16}} \(12000 training tokens in 2 shards, 1500 for validation\)
={{100}}
warm-up: .*
(?:this CPU has AMX: .*\n)?(?P<steps>(?:step:.*\n)*)peak memory allocated: \d+ MiB
val_loss: (?P<val_loss>\d\.\d{{6}})
train_time_ms: (?P<train_time_ms>\d+)
steps: 8
epochs: 1
seed: (?P<seed>\d)
val_loss_per_byte: (?P<val_loss_per_byte>\d\.\d{{6}})
complete: yes
"""
# After @ comes the step of a training loss: on a GPU it arrives some steps late.
STEP = re.compile(
    r"step:(\d+)/8 (?:val_loss:(\d+\.\d{4}) )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    r"(?(2)| train_loss:(\d+\.\d{4})@\1)"
)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, seed, name", [(1, 3, ""), (2, 4, "MyIdea")])
def test_log_and_screen(world_size, seed, name, folder):
    """Runs one process with absolute paths in all options; or two, named."""
    command = [tg.__file__, "--data", folder / "corpus", "--save", folder / "model.pt"]
    if world_size == 2:
        command = TORCHRUN + [tg.__file__, "--data", "corpus", "--name", name]
    out, text = run(folder, *command, "--preset", "cpu", "--seed", str(seed), *settings())
    found = re.fullmatch(LOG, text)
    # No absolute path, not even of a run with absolute paths in its options.
    assert not re.search(r"(?<![\w.*)])/(?:[\w.-]+/)+", text)
    config = json.loads(found["config"])
    assert (found["world_size"], found["seed"]) == (str(world_size), str(seed))
    assert (config["seed"], config["name"], config["heads"], config["track"]) == (seed, name, 2, "other")

    order, times, val_losses, train_losses = [], [], [], []
    for line in found["steps"].splitlines():
        step, val_loss, total, average, loss = STEP.fullmatch(line).groups()
        if val_loss is None:
            order.append(step)
            train_losses.append(float(loss))
        else:
            order.append(f"{step}v")
            val_losses.append(float(val_loss))
        times.append(int(total))
        assert float(average) == pytest.approx(int(total) / max(int(step), 1), abs=1)
    # Validation before steps 0, 3 and 6 and at the end; a line after each step.
    assert " ".join(order) == "0v 1 2 3 3v 4 5 6 6v 7 8 8v"
    assert times == sorted(times)
    assert int(found["train_time_ms"]) == times[-1]
    for losses, fall in (val_losses, 0.4), (train_losses, 0.2):
        assert losses[0] == pytest.approx(math.log(264), abs=0.4)  # chance over 264 tokens
        assert losses[-1] < losses[0] - fall
    loss = float(found["val_loss"])
    assert round(loss, 4) == pytest.approx(val_losses[-1])
    shard = tg.read_header(folder / "corpus/tiny_val_000000.bin")
    assert float(found["val_loss_per_byte"]) == pytest.approx(loss * 1500 / shard.text_bytes, abs=2e-6)

    # The screen has no source, and no target: another text has none.
    assert not re.search("\r|\x1b|import argparse|target", out)
    lines = out.splitlines()
    assert sum(bool(STEP.fullmatch(line)) for line in lines) == 4
    assert set(re.findall("^(?:val_loss|train_time_ms).*", text, re.MULTILINE)) < set(lines)
    group = "attempts"
    if name:
        group = f"{date.today()}_{name}"
    # In no track, for the task is changed.
    assert lines[-1].startswith(f"log: records/other/{group}/seed{seed}_")
    assert lines[-1] in lines[:-1]


@pytest.mark.parametrize("preset", tg.PRESETS)
def test_tracks(preset):
    """A run may change the method and stay in the track, but not the task."""
    cfg = tg.PRESETS[preset]
    args = tg.parse_args([])
    for setting in "adam_lr=1 stages.0.steps=7 heads=2 dtype=float64".split():
        assert tg.track_of(tg.override(cfg, setting), 2, args) == cfg.track
    for setting in "data=x val_slices=1 val_slice_tokens=8 microbatches=64 target=9".split():
        assert tg.track_of(tg.override(cfg, setting), 2, args) == "other"
    # More ranks than micro-batches pack other micro-batches.
    assert tg.track_of(cfg, cfg.microbatches, args) == cfg.track
    assert tg.track_of(cfg, 2 * cfg.microbatches, args) == "other"
    assert tg.track_of(cfg, 2, tg.parse_args(["--profile"])) == "other"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "option", "said"),
    [
        (9.0, "", "target 9.0: below; one run proves nothing"),
        (0.1, "", "target 0.1: not below; one run proves nothing"),
        (9.0, "--profile=1", ""),  # such a run belongs to no track
    ],
)
def test_the_target_is_named_in_its_track_only(folder, target, option, said):
    """The preset's track has the tiny text here."""
    cpu = replace(tg.CPU, data="corpus", val_slices=3, val_slice_tokens=256, microbatches=8, target=target)
    presets = tg.PRESETS | {"cpu": cpu}
    arguments = ["--preset", "cpu"] + option.split() + settings("warmup=false", "length=0.1")
    with Launch(folder, *arguments, faults={0: SetGlobal("PRESETS", presets)}) as process:
        process.succeed()
        found = [line for line in process.out.splitlines() if "target" in line]
        assert found == said.splitlines()


@pytest.mark.parametrize("named, start, first", [(6, 0, 6), (6, 4, 6), (2, 4, 5), (99, 4, 16)])
def test_four_steps_are_profiled(named, start, first, monkeypatch):
    """They follow the named one of 20 steps, or are the last ones, also if the run goes on after a step."""
    monkeypatch.setattr(tg, "TRACING", False)
    profiler = tg.trace_steps(SimpleNamespace(profile=named), Path("trace"), start, 20)
    actions = {step: profiler.schedule(step - start).name for step in range(start, 20)}
    recorded = [step for step, action in actions.items() if action.startswith("RECORD")]
    assert recorded == list(range(first, first + 4))


@pytest.mark.parametrize("module", ("json", "torch"))
def test_a_file_beside_the_script_with_a_modules_name_is_a_line(tmp_path, module):
    (tmp_path / "train_gpt.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / f"{module}.py").touch()
    process = start(tmp_path, "train_gpt.py")
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1 and len(err.splitlines()) == 1 and module in err


@pytest.mark.slow
def test_the_log_has_what_runs(folder, tmp_path):
    """Checks that it is not what somebody has made of the script since it began."""
    script = tmp_path / "idea.py"
    first = "    args = parse_args(argv)\n"
    text = SOURCE.replace(first, f"    Path(__file__).write_text('edited')\n{first}")
    script.write_text(text)
    process = start(folder, script, "--data", "corpus", "--preset", "cpu", *settings("length=0.1"))
    out, err = process.communicate(timeout=WAIT)
    log = (folder / re.search("^log: (.*)", out, re.MULTILINE)[1]).read_text()
    assert script.read_text() == "edited" and log.startswith(text), err
    assert f"\nscript: idea.py (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})\n" in log


def test_commit(tmp_path, monkeypatch):
    """It is clean only with the text that is committed, whatever git is told to ignore or to look at."""

    def git(*words):
        command = "git -c user.name=x -c user.email=x@x".split() + list(words)
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    script, copy = tmp_path / "train_gpt.py", tmp_path / "ideas/b.py"
    git("init", "-q")
    (tmp_path / "ideas").mkdir()
    for path in (script, copy):
        path.write_text(SOURCE, encoding="utf-8")
        assert tg.describe_commit(path, path.read_bytes()) == "unknown"  # nothing is committed
    git("commit", "-qm", "theirs", "--allow-empty")
    assert tg.describe_commit(script, script.read_bytes()) == f"{git('rev-parse', 'HEAD')} (modified)"
    odd = shutil.copy(script, tmp_path / ":(top)train_gpt.py")
    git("add", "train_gpt.py")
    git("commit", "-qm", "ours")
    commit = git("rev-parse", "HEAD")
    assert tg.describe_commit(script, script.read_bytes()) == f"{commit} (clean)"
    script.write_text(SOURCE + "\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("ideas\n")
    git("update-index", "--assume-unchanged", "train_gpt.py")
    git("init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    for path in (script, copy, Path(odd)):
        assert tg.describe_commit(path, path.read_bytes()) == f"{commit} (modified)"


@pytest.mark.slow
def test_any_seed_and_any_screen(folder, tmp_path):
    """A seed may have any number of digits, and a sample letters that the screen lacks."""
    data = shutil.copytree(folder / "corpus", tmp_path / "run/corpus")
    (data / "vocabulary.txt").write_text("ff\n" * 257)
    change = settings("warmup=false", "stages.*.prefix=", "samples=1", "length=0.1")
    arguments = ["--preset", "cpu", "--data", "corpus", "--seed", str(10**20)] + change
    with Launch(data.parent, *arguments, faults={0: ascii_screen}) as process:
        process.succeed()
        assert "sample: '\\ufffd" in process.out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_workers_end_with_torchrun(folder):
    command = TORCHRUN + [tg.__file__, "--preset", "cpu", "--data", "corpus"] + settings("length=99")
    process = start(folder, *command)
    assert any(line.startswith("step:3/") for line in process.stdout), "it did not train"
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    end = time.monotonic() + WAIT
    assert len(workers) == 2
    for worker in workers:
        while Path(f"/proc/{worker}").exists():
            assert time.monotonic() < end
            time.sleep(0.1)


# ---- --check, and a kill -----------------------------------------------------------------------------------


CHECKS = {  # whether the config, the number of processes and the machine are good
    "--preset cpu --check 2": True,
    "--preset cpu --check 3": False,
    "--preset record --set kernels= --check 8": False,
    "--preset cpu --resume nowhere --check 2": False,
}


@pytest.mark.parametrize("arguments", CHECKS)
def test_check_needs_no_data_and_does_nothing_else(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("WORLD_SIZE", "2")  # somebody's; no other process joins
    bad = not CHECKS[arguments]
    assert tg.main(arguments.split()) == bad
    out, err = capsys.readouterr()
    assert ("2 processes can" in out) != bad
    assert err.count("\n") == bad
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset, device", (("cpu", "cpu"), ("record", "cuda")))
def test_presets_for_cpus_leave_the_gpu_alone(monkeypatch, preset, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert tg.init_process(tg.PRESETS[preset].device)[-1].type == device


def test_the_date_of_run_sh_names_the_folder(monkeypatch):
    monkeypatch.setenv("RUN_DATE", "2026-01-01")
    log = tg.name_run(tg.parse_args(["--name", "Idea"]), "cpu", tg.Collectives(0, 1), {})[0]
    assert log.parent == Path("records/cpu/2026-01-01_Idea")


def test_closed_streams_are_no_error(tmp_path):
    command = f"{sys.executable} {tg.__file__} --preset cpu --check 1 >&- 2>&-"
    assert not subprocess.run(["bash", "-c", command], cwd=tmp_path).returncode
