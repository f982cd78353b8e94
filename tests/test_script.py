"""The command line as a user has it: real processes in an empty folder, logs line by line, errors as people see them."""
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


def start(folder, *arguments, processes=0, script=SCRIPT):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if processes:  # torchrun leaves a folder there
        (temporary := folder.parent / "temporary").mkdir(exist_ok=True)
        environment["TMPDIR"] = str(temporary)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    return subprocess.run([sys.executable, *launcher, str(script), *arguments], cwd=folder, env=environment, text=True,
                          capture_output=True, timeout=WAIT)


def run(folder, *arguments, **options):
    """A run that must succeed. -> its screen output and its one new log."""
    before = set(folder.glob("records/**/*.txt"))
    result = start(folder, "--preset", "cpu", *arguments, **options)
    assert result.returncode == 0, result.stderr
    (log,) = set(folder.glob("records/**/*.txt")) - before
    return result, log


def forked(folder, *arguments):
    """Likewise, in a tenth of the time: a process that has torch loaded."""
    before = set(folder.glob("records/**/*.txt"))
    with Launch(folder, "--preset", "cpu", "--data", "corpus", *arguments) as process:
        assert process.wait() == [0], process.err
    (log,) = set(folder.glob("records/**/*.txt")) - before
    return process.out, log


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny corpus of bytes in it."""
    folder = tmp_path_factory.mktemp("place")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def single(place, tmp_path_factory):
    """One process of a copy of the script elsewhere, everything given by absolute paths."""
    copy = tmp_path_factory.mktemp("elsewhere") / "my_copy.py"
    copy.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    return run(place, *settings(), "--data", str(place / "corpus"), "--save", str(place / "model.pt"), "--seed", "3", script=copy)


@pytest.fixture(scope="module")
def double(place):
    return run(place, *settings(), "--data", "corpus", "--save", "two.pt", "--seed", "3", "--name", "MyIdea", processes=2)


# --------------------------------------------------------------------------------------------------------------- logs

# A step's training loss stands behind @ and its number: on a GPU it arrives some steps late.
STEP = re.compile(r"step:(\d+)/(\d+) (?:val_loss:(\d+\.\d{4}) )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
                  r"(?(3)| train_loss:(\d+\.\d{4})@\1)")


def parse(log):
    """The parts of a complete log, each line accounted for."""
    text = log.read_text(encoding="utf-8")
    source, rule = SCRIPT.read_text(encoding="utf-8"), "=" * 100
    assert text.startswith(source + "\n" + rule + "\n")  # the script's own source, to the letter
    environment, rest = text[len(source) + 102:].split("\n" + rule + "\n")
    lines = rest.splitlines()
    assert rest.endswith("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("step:"))
    last = max(i for i, line in enumerate(lines) if line.startswith("step:"))
    steps = [STEP.fullmatch(line) for line in lines[first:last + 1]]
    assert all(steps)
    return environment.splitlines(), lines[:first], [m.groups() for m in steps], lines[last + 1:]


def closing(lines):
    pairs = [line.split(": ", 1) for line in lines]
    assert all(len(pair) == 2 for pair in pairs)
    return dict(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("which, world", [("single", 1), ("double", 2)])
def test_log(which, world, request):
    _, log = request.getfixturevalue(which)
    environment, warm, steps, end = parse(log)

    patterns = [r"Running Python 3\.\d+\.\d+\S* on \w+ \w+",
                rf"Running PyTorch {re.escape(torch.__version__)} compiled for CUDA \S+ on .+ with world_size {world}",
                r"commit: (unknown|[0-9a-f]{40} \((clean|modified)\))",
                r"attention: .+", r"config: \{.*\}",
                r"data: [0-9a-f]{16} \(12000 training tokens in 2 shards, 1500 for validation\)"]
    for pattern in patterns:
        assert sum(bool(re.fullmatch(pattern, line)) for line in environment) == 1, pattern
    values = json.loads(next(line for line in environment if line.startswith("config: "))[len("config: "):])
    assert values["seed"] == 3 and values["heads"] == 2 and values["name"] == ("MyIdea" if world == 2 else "")
    assert sum(stage["steps"] for stage in values["stages"]) == STEPS

    assert [line for line in warm if re.fullmatch(r"warm-up: .*", line)] == warm and warm
    # Before steps 0, 3, 6, then after each step, and last the final validation.
    order = [(int(step), val is not None) for step, _, val, *_ in steps]
    assert order == [(0, True), (1, False), (2, False), (3, False), (3, True), (4, False), (5, False), (6, False), (6, True),
                     (7, False), (8, False), (8, True)]
    times = [int(row[3]) for row in steps]
    assert times == sorted(times) and {row[1] for row in steps} == {str(STEPS)}
    for step, _, _, total, average, _ in steps:
        assert float(average) == pytest.approx(int(total) / max(int(step), 1), abs=1)

    assert re.fullmatch(r"peak memory allocated: \d+ MiB( reserved: \d+ MiB)?", end[0])
    assert end[-1] == "complete: yes"
    block = closing(end[1:])
    assert f"{float(block['val_loss']):.4f}" == steps[-1][2] and block["steps"] == str(STEPS) and block["seed"] == "3"
    assert block["tokens"] == str(2 * 8 * (24 + 32 + 48 + 48)) and int(block["train_time_ms"]) == times[-1]
    per_byte = float(block["val_loss"]) * 1500 / tg.read_header(log.parents[3] / "corpus" / "tiny_val_000000.bin").text_bytes
    assert float(block["val_loss_per_byte"]) == pytest.approx(per_byte, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["single", "double"])
def test_it_learns(which, request):
    """Eight characters: from chance over 264 columns to well below, in validation and in training."""
    rows = parse(request.getfixturevalue(which)[1])[2]
    for column, fall in ((2, 0.5), (5, 0.2)):
        losses = [float(row[column]) for row in rows if row[column]]
        assert losses[0] == pytest.approx(math.log(264), abs=0.2) and losses[-1] < losses[0] - fall


@pytest.mark.slow
def test_worlds_agree(single, double):
    """One process and two train the same model: fp32 rounding, in eight steps, on losses of about 4."""
    a, b = ([float(row[2]) for row in parse(log)[2] if row[2]] for _, log in (single, double))
    assert a == pytest.approx(b, abs=2e-3)


@pytest.mark.slow
def test_no_absolute_path_in_a_log(place, single):
    """Not even where everything was given by one."""
    rest = single[1].read_text(encoding="utf-8")[len(SCRIPT.read_text(encoding="utf-8")):]
    assert str(place.parent) not in rest and str(SCRIPT.parent) not in rest
    assert not re.search(r'(?<![\w.*)])/(?:[\w.-]+/)+', rest)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_progress_bar(place):
    """With loss, time and the time left; the lines of record stand above it, whole."""
    import fcntl
    import pty
    import struct
    import termios
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # a terminal of no size shows no bar
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen([sys.executable, str(SCRIPT), "--preset", "cpu", "--data", "corpus", *settings()], cwd=place,
                               env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                               stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # Linux says so when the other end has closed
        pass
    os.close(ours)
    assert process.wait(timeout=WAIT) == 0
    text = shown.decode()
    assert re.search(rf"\d+%\|.*\| \d+/{STEPS} \[\d\d:\d\d<\S+, .*loss \d+\.\d+ time \d+\.\ds\]", text)
    lines = [re.split(r"\r", line.rstrip("\r"))[-1] for line in text.split("\n")]
    assert sum(bool(STEP.fullmatch(line.strip())) for line in lines) == 4
    assert not re.search(rf"step \d+/{STEPS}  loss", text)  # not the plain form besides


@pytest.mark.slow
def test_where_logs_go(place, single, double):
    """Records of a changed task are not the preset's track; unnamed runs are attempts."""
    assert single[1].parent == place / "records" / "other" / "attempts"
    assert double[1].parent == place / "records" / "other" / f"{date.today()}_MyIdea"
    assert re.fullmatch(r"seed3_[0-9a-f]+\.txt", single[1].name)


@pytest.mark.parametrize("preset", tg.PRESETS)
def test_tracks(preset):
    cfg = tg.PRESETS[preset]
    assert tg.track_of(cfg, 2) == {"record": "gpt2-small", "cpu": "cpu"}[preset]
    for same in ("adam_lr=1", "stages.0.steps=7", "heads=2"):  # a method may change
        assert tg.track_of(tg.override(cfg, same), 2) == cfg.track
    for other in ("val_slices=1", "val_slice_tokens=8", "slices=4", "data=elsewhere", "dtype=float64", "target=9"):  # the task may not
        assert tg.track_of(tg.override(cfg, other), 2) == "other"
    assert tg.track_of(cfg, 8) == cfg.track and tg.track_of(cfg, 16) == "other"  # more ranks than slices cut other slices


@pytest.mark.slow
def test_screen_output_is_plain_and_says_where_the_log_is(place, single, double):
    for result, log in (single, double):
        assert "\r" not in result.stdout and "\x1b" not in result.stdout and "%|" not in result.stdout + result.stderr
        assert "import argparse" not in result.stdout  # no source
        lines = result.stdout.splitlines()
        progress = [line for line in lines if re.fullmatch(rf"step \d+/{STEPS}  loss \d+\.\d+  time \d+s  ETA \d+s", line)]
        assert len(progress) == STEPS
        assert len([line for line in lines if STEP.fullmatch(line)]) == 4
        assert str(log.relative_to(place)) in result.stdout
        loss = closing(parse(log)[3][1:])["val_loss"]
        assert f"{float(loss):.4f} nats per token" in result.stdout and "per byte" in result.stdout
    assert single[0].stderr == ""


def test_a_record_folder_has_a_seed_once(tmp_path):
    """Seed 10's complete run is not seed 1's; a run that did not complete does not count."""
    (tmp_path / "seed10_a.txt").write_text("complete: yes\n")
    (tmp_path / "seed1_a.txt").write_text("stopped: interrupted\n")
    with tg.open_log(tmp_path, "seed1_b", 8, 1, None) as log:
        assert log.path == tmp_path / "seed1_b.txt"
    with pytest.raises(tg.UserError, match="seed10_a.txt is a complete run with this seed"):
        tg.open_log(tmp_path, "seed10_b", 8, 10, None)


def test_progress_tells_the_time_that_is_left(tmp_path, capsys):
    """By the mean time of a step so far."""
    with tg.RunLog(tmp_path, 10, "run") as log:
        log.progress(4, 2.5, 8000.0)
        log.progress(10, None, 20_500.0)
    assert capsys.readouterr().out == "step 4/10  loss 2.500  time 8s  ETA 12s\nstep 10/10    time 20s  ETA 0s\n"


# ------------------------------------------------------------------------------------------------------- saved models

def validation_of(model, folder):
    """The validation loss, from the parts of the script."""
    cfg = model.cfg
    val = tg.ValLoader(cfg, tg.find_shards(str(folder / "corpus"), "val"), 0, 1, False)
    return tg.validate(model, val, tg.Exchange(0, 1), tuple(w * cfg.window_unit for w in cfg.final_windows))


@pytest.mark.slow
def test_saved_model_gives_the_same_loss(place, single):
    model = tg.load_model(str(place / "model.pt"))
    block = closing(parse(single[1])[3][1:])
    assert f"{validation_of(model, place):.6f}" == block["val_loss"]
    # The rotary tables of the last stage: the wider final windows do not change them.
    assert model.rotary.window == 13 * 16 and model.rotary.scale != model.cfg.attn_scale


@pytest.mark.slow
def test_a_model_saved_by_two_ranks_loads_in_one(place, double):
    assert f"{validation_of(tg.load_model(str(place / 'two.pt')), place):.4f}" == parse(double[1])[2][-1][2]


# --------------------------------------------------------------------------------------------------------- repetition

@pytest.mark.slow
def test_the_same_seed_gives_the_same_digits(place, single):
    """Whether there was a warm-up or not; and another seed others."""
    values = lambda log: [row[2] for row in parse(log)[2] if row[2]] + [closing(parse(log)[3][1:])["val_loss"]]
    same, other = (values(forked(place, *settings("warmup=false"), "--seed", seed)[1]) for seed in ("3", "4"))
    assert same == values(single[1]) != other


@pytest.mark.slow
def test_other_choices_are_other_data_and_are_named(place):
    """Where compare.py looks for it. With val_every=0 there is only the last validation."""
    sixteens = ["padded_vocab=272", "head_chunk=16", *(f"stages.{i}.tokens={T}" for i, T in enumerate((128, 256, 384, 384)))]
    out, log = forked(place, *settings("slices=4", "fp8=true", "warmup=false", "val_every=0", *sixteens))
    for line in ("\nattention: dense; kernels: none, plain torch; head: fp8; compiled: no\n",
                 "for validation), packed in 4 slices a batch, not 8: not the track's batches\n"):
        assert line in out and line in log.read_text(encoding="utf-8")
    assert log.parent.parent.name == "other" and [row[0] for row in parse(log)[2] if row[2]] == [str(STEPS)]


# ------------------------------------------------------------------------------------------------------ help and errors

@pytest.mark.slow
def test_help(tmp_path):
    result = start(tmp_path, "-h")
    assert result.returncode == 0 and result.stderr == ""
    for word in ("--preset", "--name", "--seed", "--set", "--data", "--save", "record", "cpu", "torchrun", "stages.0."):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments, message", (
    ("--preset cpu --check 2", ""),
    ("--preset cpu --check 3", "a world of 3 processes cannot share the work: "),
    ("--preset cpu --set adm_lr=1 --check 2", "--set adm_lr: unknown name 'adm_lr'"),
    ("--preset record --set kernels= --check 8", "FlashAttention needs a GPU, there is none here"),
    ("--preset cpu --resume nowhere --check 2", "--resume nowhere: no checkpoint there; "),
    ("--preset cpu --check 0", "argument --check: give a whole number, 1 or more, not '0'")))
def test_check_refuses_without_data_and_does_nothing_else(tmp_path, monkeypatch, capsys, arguments, message):
    """What the config, the number of processes and the machine rule out; of data there is none here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tg.main(arguments.split()) == bool(message)
    out, err = capsys.readouterr()
    assert out == ("" if message else "2 processes could run this here\n") and err.count("\n") == bool(message)
    assert err.startswith(f"train_gpt.py: error: {message}" if message else "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a lost parent")
def test_a_killed_torchrun_leaves_nothing_running(place):
    """Its ranks hold the pipe: it ends when they are gone, long before their last step."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT), "--preset", "cpu", "--data", "corpus"]
    before = set(place.glob("records/**/*.txt"))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen([sys.executable, *command, *settings("warmup=false", "stages.0.steps=8")], cwd=place,
                               env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(place.parent)},
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not process.stdout.readline().startswith("step 4/"):
        assert process.poll() is None
    process.kill()
    assert process.communicate(timeout=WAIT)[0].count("validation loss") == 0
    (log,) = set(place.glob("records/**/*.txt")) - before
    assert "complete: yes" not in log.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_profile(place):
    """Four steps, numbered, with their operations, beside the log; a run that was traced counts for no track."""
    out, log = forked(place, *settings("warmup=false", "slices=2"), "--profile", "2")
    assert log.parent.parent.name == "other"
    trace = log.with_name(f"{log.stem}.trace.json.gz")
    assert str(trace.relative_to(place)) in out
    with gzip.open(trace, "rt") as f:
        events = json.load(f)["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("name", "").startswith("ProfilerStep#") and event["ph"] == "X"}
    assert sorted(spans) == [f"ProfilerStep#{step}" for step in range(2, 6)]
    for span in spans.values():
        within = {event["name"] for event in events if event.get("ph") == "X" and span["ts"] <= event["ts"] < span["ts"] + span["dur"]}
        assert {"aten::mm", "MLP", "MLPBackward"} <= within
