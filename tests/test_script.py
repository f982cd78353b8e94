"""Tests the command line with real processes: logs line by line, screen output, saved models, options."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

import train_gpt as tg
from launch import STEPS, WAIT, Launch, make_corpus, settings

SCRIPT = Path(tg.__file__).resolve()


def make_environment():
    """Returns this process's environment without torchrun's variables, for one thread and no GPU."""
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in torchrun}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def start(folder, *arguments, processes=0, script=SCRIPT):
    """Runs the script to its end, under torchrun if `processes`."""
    environment, launcher = make_environment(), []
    if processes:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        environment["TMPDIR"] = str(folder.parent / "temporary")  # torchrun leaves a folder there
        Path(environment["TMPDIR"]).mkdir(exist_ok=True)
    command = [sys.executable, *launcher, str(script), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=WAIT)


def run(folder, *arguments, **options):
    """Runs the script, which must succeed. Returns the result and its one new log."""
    before = set(folder.glob("records/**/*.txt"))
    result = start(folder, "--preset", "cpu", *arguments, **options)
    assert result.returncode == 0, result.stderr
    (log,) = set(folder.glob("records/**/*.txt")) - before
    return result, log


def run_forked(folder, *arguments):
    """Runs the script in a fork that has torch loaded: ten times faster. Returns its output and log."""
    before = set(folder.glob("records/**/*.txt"))
    with Launch(folder, "--preset", "cpu", "--data", "corpus", *arguments) as process:
        assert process.wait() == [0], process.err
    (log,) = set(folder.glob("records/**/*.txt")) - before
    return process.out, log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a tiny corpus of bytes."""
    folder = tmp_path_factory.mktemp("folder")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def single(folder, tmp_path_factory):
    """Runs one process of a copy of the script, with absolute paths in all options."""
    copy = tmp_path_factory.mktemp("elsewhere") / "my_copy.py"
    copy.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    options = ["--data", str(folder / "corpus"), "--save", str(folder / "model.pt"), "--seed", "3"]
    return run(folder, *settings(), *options, script=copy)


@pytest.fixture(scope="module")
def double(folder):
    """Runs two processes, named."""
    options = ["--data", "corpus", "--save", "two.pt", "--seed", "3", "--name", "MyIdea"]
    return run(folder, *settings(), *options, processes=2)


# ---- logs --------------------------------------------------------------------------------------------------

# After @ comes the step of a training loss: on a GPU it arrives some steps late.
STEP = re.compile(
    r"step:(\d+)/(\d+) (?:val_loss:(\d+\.\d{4}) )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    r"(?(3)| train_loss:(\d+\.\d{4})@\1)"
)


def parse(log):
    """Splits a complete log into environment, warm-up, steps (groups of STEP) and end. Checks every line."""
    text = log.read_text(encoding="utf-8")
    source, rule = SCRIPT.read_text(encoding="utf-8"), "=" * 100
    assert text.startswith(source + "\n" + rule + "\n")  # the script's own source
    environment, rest = text[len(source) + 102 :].split("\n" + rule + "\n")
    lines = rest.splitlines()
    assert rest.endswith("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("step:"))
    last = max(i for i, line in enumerate(lines) if line.startswith("step:"))
    steps = [STEP.fullmatch(line) for line in lines[first : last + 1]]
    assert all(steps)
    return environment.splitlines(), lines[:first], [m.groups() for m in steps], lines[last + 1 :]


def closing_block(lines):
    """Returns the closing block's values by name."""
    pairs = [line.split(": ", 1) for line in lines]
    assert all(len(pair) == 2 for pair in pairs)
    return dict(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("which, world_size", [("single", 1), ("double", 2)])
def test_log(which, world_size, request):
    _, log = request.getfixturevalue(which)
    environment, warm, steps, end = parse(log)

    version = re.escape(torch.__version__)
    patterns = [
        r"Running Python 3\.\d+\.\d+\S* on \w+ \w+",
        rf"Running PyTorch {version} compiled for CUDA \S+ on .+ with world_size {world_size}",
        r"commit: (unknown|[0-9a-f]{40} \((clean|modified)\))",
        r"config: \{.*\}",
        r"data: [0-9a-f]{16} \(12000 training tokens in 2 shards, 1500 for validation\), packed in 8 .*",
    ]
    for pattern in patterns:
        assert sum(bool(re.fullmatch(pattern, line)) for line in environment) == 1, pattern
    values = json.loads(next(line for line in environment if line.startswith("config: "))[len("config: ") :])
    assert (
        values["seed"] == 3
        and values["heads"] == 2
        and values["name"] == ("MyIdea" if world_size == 2 else "")
    )
    assert sum(stage["steps"] for stage in values["stages"]) == STEPS

    assert [line for line in warm if re.fullmatch(r"warm-up: .*", line)] == warm and warm
    # Validation before steps 0, 3 and 6 and at the end; a line after each step.
    order = [(int(step), val is not None) for step, _, val, *_ in steps]
    trained, validated = [(step, False) for step in range(1, 9)], [(step, True) for step in (0, 3, 6, 8)]
    assert order == sorted(trained + validated)
    times = [int(step[3]) for step in steps]
    assert times == sorted(times) and {step[1] for step in steps} == {str(STEPS)}
    for step, _, _, total, average, _ in steps:
        assert float(average) == pytest.approx(int(total) / max(int(step), 1), abs=1)

    assert re.fullmatch(r"peak memory allocated: \d+ MiB( reserved: \d+ MiB)?", end[0])
    assert end[-1] == "complete: yes"
    block = closing_block(end[1:])
    assert (
        f"{float(block['val_loss']):.4f}" == steps[-1][2]
        and block["steps"] == str(STEPS)
        and block["seed"] == "3"
        and block["epochs"] == "1"
    )
    assert block["tokens"] == str(8 * (2 * 24 + 32 + 48 + 4 * 48))
    assert int(block["train_time_ms"]) == times[-1]
    val_shard = log.parents[3] / "corpus" / "tiny_val_000000.bin"
    per_byte = float(block["val_loss"]) * 1500 / tg.read_header(val_shard).text_bytes
    assert float(block["val_loss_per_byte"]) == pytest.approx(per_byte, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["single", "double"])
def test_it_learns(which, request):
    """Validation and training loss fall from chance over 264 tokens: the text has eight characters."""
    steps = parse(request.getfixturevalue(which)[1])[2]
    for column, fall in ((2, 0.4), (5, 0.2)):
        losses = [float(step[column]) for step in steps if step[column]]
        assert losses[0] == pytest.approx(math.log(264), abs=0.4) and losses[-1] < losses[0] - fall


@pytest.mark.slow
def test_no_absolute_path_in_a_log(folder, single):
    """Not even of a run with absolute paths in its options."""
    rest = single[1].read_text(encoding="utf-8")[len(SCRIPT.read_text(encoding="utf-8")) :]
    assert str(folder.parent) not in rest and str(SCRIPT.parent) not in rest
    assert not re.search(r"(?<![\w.*)])/(?:[\w.-]+/)+", rest)


@pytest.mark.slow
def test_where_logs_go(folder, single, double):
    """Runs of a changed task are not in the preset's track; unnamed runs are attempts."""
    assert single[1].parent == folder / "records" / "other" / "attempts"
    assert double[1].parent == folder / "records" / "other" / f"{date.today()}_MyIdea"
    assert re.fullmatch(r"seed3_[0-9a-f]+\.txt", single[1].name)


@pytest.mark.parametrize("preset", tg.PRESETS)
def test_tracks(preset):
    """A run may change the method and stay in the track, but not the task."""
    cfg = tg.PRESETS[preset]
    assert tg.track_of(cfg, 2) == ("cpu" if preset == "cpu" else "gpt2-small")
    for method in ("adam_lr=1", "stages.0.steps=7", "heads=2"):
        assert tg.track_of(tg.override(cfg, method), 2) == cfg.track
    data = ("data=elsewhere", "val_slices=1", "val_slice_tokens=8", "microbatches=4")
    for task in (*data, "dtype=float64", "target=9"):
        assert tg.track_of(tg.override(cfg, task), 2) == "other"
    # More ranks than micro-batches pack other micro-batches.
    count = cfg.microbatches
    assert tg.track_of(cfg, count) == cfg.track and tg.track_of(cfg, 2 * count) == "other"


@pytest.mark.slow
def test_the_screen_has_the_results_and_names_the_log(folder, single, double):
    for result, log in (single, double):
        assert "\r" not in result.stdout and "\x1b" not in result.stdout
        assert "import argparse" not in result.stdout  # no source
        lines = result.stdout.splitlines()
        assert len([line for line in lines if STEP.fullmatch(line)]) == 4
        assert str(log.relative_to(folder)) in lines[-1]
        block = closing_block(parse(log)[3][1:])
        for name in ("val_loss", "val_loss_per_byte", "train_time_ms"):
            assert f"{name}: {block[name]}" in lines
        assert f"| {STEPS}/{STEPS} [" in result.stderr  # tqdm's, where there is no terminal, too


# ---- saved models ------------------------------------------------------------------------------------------


def validation_loss(model, folder):
    """Returns a model's final validation loss, as the script computes it."""
    cfg = model.cfg
    val = tg.ValLoader(cfg, tg.find_shards(str(folder / "corpus"), "val"))
    return tg.validate(model, val, tg.Exchange(0, 1), tg.window_tokens(cfg, cfg.val_windows))


@pytest.mark.slow
def test_saved_model_gives_the_same_loss(folder, single):
    model = tg.load_model(str(folder / "model.pt"))
    block = closing_block(parse(single[1])[3][1:])
    assert f"{validation_loss(model, folder):.6f}" == block["val_loss"]
    # The rotary tables are those of the last stage: the wider validation windows do not change them.
    assert model.rotary.stage == 3 and model.rotary.wide.scale != model.cfg.attn_scale


@pytest.mark.slow
def test_a_model_saved_by_two_ranks_loads_in_one(folder, double):
    model = tg.load_model(str(folder / "two.pt"))
    assert f"{validation_loss(model, folder):.4f}" == parse(double[1])[2][-1][2]


# ---- repetition --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_gives_the_same_digits(folder, single):
    """With and without warm-up. Another seed gives others."""

    def losses(log):
        return [step[2] for step in parse(log)[2] if step[2]] + [closing_block(parse(log)[3][1:])["val_loss"]]

    logs = [run_forked(folder, *settings("warmup=false"), "--seed", seed)[1] for seed in ("3", "4")]
    same, other = map(losses, logs)
    assert same == losses(single[1]) != other


@pytest.mark.slow
def test_the_log_names_other_packing(folder):
    """compare.py reads this line. With val_every=0 only the final validation runs."""
    out, log = run_forked(folder, *settings("microbatches=4", "warmup=false", "val_every=0"))
    line = "for validation), packed in 4 micro-batches a batch, not 2: not the track's batches\n"
    assert line in out and line in log.read_text(encoding="utf-8")
    assert log.parent.parent.name == "other"
    assert [step[0] for step in parse(log)[2] if step[2]] == [str(STEPS)]


# ---- help and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    (
        ("--preset cpu --check 2", ""),
        ("--preset cpu --check 3", "3 processes cannot share the rows of lm_head"),
        ("--preset cpu --set adm_lr=1 --check 2", "--set adm_lr: unknown"),
        ("--preset record --set kernels= --check 8", "FlashAttention needs a GPU"),
        ("--preset cpu --resume nowhere --check 2", "--resume nowhere: checkpoints of 0 runs "),
    ),
)
def test_check_needs_no_data_and_does_nothing_else(tmp_path, monkeypatch, capsys, arguments, message):
    """It tests the config, the number of processes and the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert tg.main(arguments.split()) == bool(message)
    out, err = capsys.readouterr()
    assert ("here: 2\n" in out) != bool(message)
    assert message in err and err.count("\n") == bool(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_torchrun_leaves_nothing_running(folder):
    """Its ranks hold stdout open: it is closed when they are gone, long before their last step."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(SCRIPT),
    ]
    command += ["--preset", "cpu", "--data", "corpus", *settings("warmup=false", "stages.0.steps=8")]
    before = set(folder.glob("records/**/*.txt"))
    environment = make_environment() | {"TMPDIR": str(folder.parent)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment, **streams)
    while not process.stdout.readline().startswith("step:3/"):
        assert process.poll() is None
    process.kill()
    assert process.communicate(timeout=WAIT)[0].count("log: ") == 0
    (log,) = set(folder.glob("records/**/*.txt")) - before
    assert "complete: yes" not in log.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_profile(folder):
    """The trace beside the log has four numbered steps with their operations. The run is in no track."""
    _, log = run_forked(folder, *settings("warmup=false", "microbatches=2"), "--profile", "2")
    assert log.parent.parent.name == "other"
    trace = log.with_name(f"{log.stem}.rank0.trace.json.gz")
    with gzip.open(trace, "rt") as f:
        events = json.load(f)["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    spans = {event["name"]: event for event in complete if event["name"].startswith("ProfilerStep#")}
    assert sorted(spans) == [f"ProfilerStep#{step}" for step in range(2, 6)]
    for span in spans.values():
        end = span["ts"] + span["dur"]
        within = {event["name"] for event in complete if span["ts"] <= event["ts"] < end}
        assert {"aten::mm", "MLP", "MLPBackward"} <= within
