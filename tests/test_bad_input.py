"""Tests the ways in which input or environment can be wrong, in one table of cases.

By default a case runs the command line of a tiny run in this process, says why in one line, fails and writes
nothing. `ranks` starts that many processes instead (0: one, without torchrun's environment). `steps`: a log
is written, with this many finished steps. The message is what is said, for the reader: its wording is not
compared. Without a message there is nothing that a user could set right.
"""

import os
import re
import shutil
import signal
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch

import train_gpt as tg
from launch import (
    WAIT,
    FaultAtCall,
    Launch,
    SetGlobal,
    die,
    disk_full,
    fill_disk,
    interrupt,
    lose_reader,
    make_corpus,
    settings,
)


@dataclass
class Case:
    name: str
    arguments: str
    message: str
    corrupt: Callable = lambda folder: None  # called with the folder that the run starts in
    fixture: str = ""  # makes that folder; by default "stopped" if the case resumes, else "fresh"
    ranks: int | None = None
    statuses: dict = field(default_factory=dict)  # by rank; any failure by default
    steps: int | None = None
    last: str = ""  # last line of the log: a regular expression
    kept: tuple = ()  # new checkpoints that are complete
    faults: dict = field(default_factory=dict)  # by rank, as for Launch; likewise:
    rank_arguments: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)


# ---- corruptions -------------------------------------------------------------------------------------------


def set_word(path, at, value, dtype="<i4"):
    """Sets word `at` of a shard, taken as an array of `dtype`: by default, of its header."""

    def corrupt(folder):
        words = np.fromfile(folder / path, dtype)
        words[at] = value
        words.tofile(folder / path)

    return corrupt


def set_token(path, at, value):
    return set_word(path, tg.HEADER_BYTES // 2 + at, value, "<u2")


def truncate(path, size):
    return lambda folder: os.truncate(next(folder.glob(path)), size)


def write_text(path, content):
    """Writes a text file, in a new folder if there is none."""

    def corrupt(folder):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)

    return corrupt


def other_corpus(folder):
    shutil.copytree(folder / "corpus", folder / "other")
    set_token(FIRST, 9, 0)(folder)


def another_run(folder):
    shutil.copytree(next(folder.glob(f"{ATTEMPTS}/*.checkpoint")), folder / ATTEMPTS / "seed1_b.checkpoint")


def flip_bit(folder):
    path = next(folder.glob(f"{FILES}/rank0.pt"))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:  # between its parts is padding, whose bits mean nothing
        largest = max(file.infolist(), key=lambda part: part.file_size)
        content = file.read(largest)
    data[data.index(content) + len(content) // 2] ^= 1
    path.write_bytes(data)


class CodeInPickle:
    """Makes a folder when unpickled."""

    def __reduce__(self):
        return os.mkdir, ("run by a pickle",)


def change_shard(change):
    """Applies `change`, in place, to what rank 0's file of a checkpoint holds."""

    def corrupt(folder):
        path = next(folder.glob(f"{FILES}/rank0.pt"))
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return corrupt


def long_documents(folder):
    """Makes the training text two documents, most of which is never used."""
    for path in (FIRST, SECOND):
        words = np.fromfile(folder / path, "<u2")
        tokens = words[tg.HEADER_BYTES // 2 :]
        tokens[tokens == 256] = 97
        tokens[0] = 256
        words.tofile(folder / path)


def die_late():
    """Dies when the other ranks have joined, too."""
    time.sleep(2)
    die()


def hang():
    time.sleep(1000)


# ---- cases -------------------------------------------------------------------------------------------------

FIRST, SECOND, VAL = (f"corpus/tiny_{name}.bin" for name in ("train_000000", "train_000001", "val_000000"))
ATTEMPTS = "records/other/attempts"
RUN = f"{ATTEMPTS}/<run>.checkpoint"
HEAD = f"{RUN}/step00000002"
FILES = f"{ATTEMPTS}/*.checkpoint/step00000002"
RESUME = f"--resume {ATTEMPTS}"
EVERY = "--checkpoint-every 2"
SETTINGS = ("warmup=false", "microbatches=2", "val_slices=2")

# fmt: off
NOT_A_SHARD = "not a whole token shard of version 1; delete it, and download or build it again"
OUTSIDE = ("has tokens outside the vocabulary of 257: it is damaged, or another tokenizer's; build it again")
NO_SHARDS = ("make them with data/fineweb.py (record), data/local_corpus.py (cpu), data/tokenize_text.py "
             "(your text) or data/synthetic.py (random tokens), or use another --data")
NEEDS = "cannot read corpus/vocabulary.txt"
NO_PREFIXES = ("make it with the script in data/ that made the shards, or train without one: --set "
               "samples=0 --set stages.*.prefix=")
MATCHING = "choose the matching --preset or --data"
MORE_DOCS = "cu_seqlens room for {room}; use --set max_docs=128"
WRITABLE = "give a file in a folder that can be written to"
CHANGE = "change one of these numbers"
ADVICE = "lower the learning rate that was raised last, or look at that batch"
OTHER_RUN = "give its options, its data and as many processes"
SAME = "start all machines with the same script, options, torch and data"
NO_LOG = f"cannot write the log {ATTEMPTS}/<log>: <why>"
NO_SCREEN = "cannot write to the screen: Broken pipe; send the output to a file"
ONE_RUN = "runs are there; give the log of one run with --checkpoint-every that did not finish"
DAMAGED = f"<why>; if it is damaged, remove {RUN}, and start again"

CASES = [
    # data
    Case("no shards", "--data nowhere", f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}"),
    Case("no shards for one rank", "", f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}",
         ranks=2, rank_arguments={1: ["--data", "nowhere"]}),
    Case("no validation shard", "", f"no val shards (*_val_*.bin) in corpus: {NO_SHARDS}",
         lambda folder: (folder / VAL).unlink()),
    *[Case(f"not a shard: {name}", "", f"{SECOND}: {NOT_A_SHARD}", corrupt) for name, corrupt in (
        ("truncated", truncate(SECOND, 13014)), ("another count", set_word(SECOND, 2, 5000)),
        ("text", write_text(SECOND, "<!DOCTYPE html>")), ("empty", write_text(SECOND, "")),
        ("another version", set_word(SECOND, 1, 7)))],
    Case("a shard that is a broken link", "",
         "corpus/x_train_9.bin: No such file or directory; download or build the data again",
         lambda folder: (folder / "corpus/x_train_9.bin").symlink_to("gone")),
    Case("a token outside the vocabulary", "", f"tiny_train_000000.bin {OUTSIDE}",
         set_token(FIRST, 5999, 300), steps=0),
    Case("such a token in a shard that is reached in mid-run", "--set stages.3.steps=10",
         f"tiny_train_000001.bin {OUTSIDE}", set_token(SECOND, 5999, 300), steps=8),
    Case("such a token in validation", "", f"tiny_val_000000.bin {OUTSIDE}", set_token(VAL, 5, 300), steps=0),
    Case("no whole batch in any shard", "",
         "no training shard holds a batch of 192 tokens, documents cut to 40; add larger shards, or lower "
         "batch_tokens", long_documents, ranks=2, steps=0),
    Case("too little validation data", "--set val_slices=9",
         "corpus: 1,500 validation tokens, of 2,305 needed; add some, or lower val_slices"),
    Case("a validation token too few", "--set val_slices=1 --set val_slice_tokens=1500",
         "corpus: 1,500 validation tokens, of 1,501 needed; add some, or lower val_slices"),
    Case("data of another vocabulary",
         "--preset record --set kernels= --set attention=dense --set fp8=false --set compile=false",
         f"{FIRST}: its vocabulary has 257 tokens and bos_id 256, the config 50257 and 50256; {MATCHING}"),
    Case("data of GPT-2's vocabulary", "",
         f"{FIRST}: its vocabulary has 50257 tokens and bos_id 50256, the config 257 and 256; {MATCHING}",
         set_word(FIRST, 3, 0)),
    Case("no vocabulary for the loss on prefixes", "", f"{NEEDS}: No such file or directory; {NO_PREFIXES}",
         lambda folder: (folder / "corpus/vocabulary.txt").unlink()),
    Case("a vocabulary of other digits", "",
         f"{NEEDS}: non-hexadecimal number found in fromhex() arg at position 0; {NO_PREFIXES}",
         write_text("corpus/vocabulary.txt", "the\nan\n")),
    Case("a vocabulary of another size", "",
         f"corpus/vocabulary.txt: 2 tokens, the config has 257; {NO_PREFIXES}",
         write_text("corpus/vocabulary.txt", "61\n6162\n")),
    Case("more documents than max_docs", "--set max_docs=3",
         f"a micro-batch of 96 tokens has <n> documents, {MORE_DOCS.format(room=2)}", steps=0),
    Case("more documents than max_docs in a later batch", "--set max_docs=8",
         f"a micro-batch of 128 tokens has 8 documents, {MORE_DOCS.format(room=7)}", steps=3),
    Case("a run that ends before its trace", "--set max_docs=3 --profile 1",
         f"a micro-batch of 96 tokens has <n> documents, {MORE_DOCS.format(room=2)}", steps=0),
    # options
    Case("an unknown preset", "--preset huge",
         "argument --preset: invalid choice: 'huge' (choose from <presets>); -h lists the options"),
    Case("an unknown option", "--nmae x", "unrecognized arguments: --nmae x; -h lists the options"),
    Case("an option without its value", "--seed",
         "argument --seed: expected one argument; -h lists the options"),
    Case("a seed that is no number", "--seed one",
         "argument --seed: give a whole number, 0 or more, not 'one'; -h lists the options"),
    Case("--save to no folder", "--save no/model.pt", f"--save no/model.pt: {WRITABLE}"),
    Case("a model that cannot be written", "--save model.pt",
         "--save model.pt: No space left on device; the run itself is complete, its log is <log>",
         ranks=2, faults={0: FaultAtCall("save_model", 1, disk_full)}, statuses={1: 0}, steps=8,
         last="complete: yes"),
    # settings
    *[Case(f"--set {setting}", f"--set {setting}", f"--set {message}") for setting, message in (
        ("adam_lr", "adam_lr: write name=value"),
        ("=1", ": unknown; use the fields of Config"),
        ("adm_lr=1", "adm_lr: unknown; use adam_lr, bank_lr, adam_wd"),
        ("track=../elsewhere", "track: it follows from --preset"),
        ("params.embd.lr_mul=1", "params.embd.lr_mul: unknown; use params.embed.lr_mul, <others>"),
        ("stages.9.steps=1", "stages.9.steps: unknown; use stages.3.steps, stages.2.steps, stages.1.steps"),
        ("stages.0=1", "stages.0: unknown; use stages.0.steps, stages.0.lr_mul, stages.0.mtp_end"),
        ("microbatches=1.5", "microbatches=1.5: use a value of type int"),
        ("stages.*.windows.long=b", "stages.0.windows.long=b: use a value of type int"),
        ("params.embed.betas=.9,b", "params.embed.betas=b: use a value of type float"),
        ("warmup=maybe", "warmup=maybe: use true, false"),
        ("dtype=float16", "dtype=float16: use bfloat16, float32, float64"),
        ("layers.0.attention=piared", "layers.0.attention=piared: use plain, paired"),
        ("kernels=gram,transpse", "kernels=transpse: use gram, relu_square, <others>"))],
    # a config that would train something else
    Case("a vocabulary larger than its padding", "--set padded_vocab=100",
         "padded_vocab must not be below vocab_size"),
    *[Case(f"unused: {setting}", f"--set {setting}", f"layers.{layer} has what attention={kind} does not use")
      for setting, layer, kind in (
        ("layers.6.gate=true", 6, None), ("layers.6.value=0", 6, None), ("layers.0.xsa=true", 0, "paired"),
        ("layers.0.key_shift=true", 0, "paired"))],
    Case("weights of more losses at a stage's start", "--set stages.0.mtp_end=1",
         "stages.0: mtp_start and mtp_end must have as many weights"),
    Case("micro-batches that do not divide the batches", "--set microbatches=5",
         "stages.0.batch_tokens: use a multiple of the 5 micro-batches"),
    *[Case(f"{world_size} processes: {message}", arguments, message,
           environment={"WORLD_SIZE": str(world_size)}) for world_size, arguments, message in (
        (3, "--set microbatches=4", f"3 processes cannot share 4 micro-batches; {CHANGE}"),
        (4, "--set bigram_vocab_size=322 --set microbatches=4",
         f"4 processes cannot share the rows of bigram_embed; {CHANGE}"),
        (2, "--set padded_vocab=265", f"2 processes cannot share the rows of value_embeds; {CHANGE}"))],
    # numbers that go wrong
    Case("a training loss that is not finite", "--set adam_lr=1e30",
         f"train_loss is <value> at step 3; {ADVICE}", ranks=2, steps=2),
    Case("a weight that is not finite at a checkpoint", f"--set adam_lr=1e38 {EVERY}",
         "<name> is not finite after step 2, which was not saved; lower the learning rate that was raised "
         "last", steps=2),
    # ranks that do not fit together
    Case("ranks with many other options", "",
         "rank 1 differs from rank 0 (there, here): config.params.0.reduction (fp32, backend); "
         "config.params.1.reduction (fp32, backend); config.params.2.reduction (fp32, backend); "
         f"{SAME}", ranks=2, rank_arguments={1: ["--set", "params.*.reduction=fp32"]}),
    Case("ranks with other options", "",
         f"rank 1 differs from rank 0 (there, here): seed (5, 0); config.adam_lr (0.5, 0.008); {SAME}",
         ranks=2, rank_arguments={1: ["--seed", "5", "--set", "adam_lr=.5"]}),
    Case("ranks with other data", "",
         f"rank 1 differs from rank 0 (there, here): data (<data>, <data>); {SAME}",
         other_corpus, ranks=2, rank_arguments={1: ["--data", "other"]}),
    Case("ranks with other scripts", "",
         f"rank 1 differs from rank 0 (there, here): script (<hash>, <hash>); {SAME}", ranks=2,
         faults={1: SetGlobal("__file__", os.path.abspath(__file__))}),
    # disk and screen
    Case("a file in place of the logs' folder", "",
         f"{NO_LOG}; remove what is in its way, or make the folder writable",
         write_text("records/other", "")),
    *[Case(f"a disk full {where}", "", f"{NO_LOG}; it holds the run up to here; make room and start again",
           ranks=ranks, faults={0: FaultAtCall("train_step", 6, partial(fill_disk, free))}, steps=5,
           last=last)
      for where, ranks, free, last in (
          ("in mid-run", 2, 0, "step:5/8 .+"), ("within a line", 0, 9, "step:6/8 "))],
    Case("a closed screen", "", NO_SCREEN, ranks=2, faults={0: lose_reader}, steps=0),
    Case("a screen closed at the end", "", NO_SCREEN, ranks=2,
         faults={0: FaultAtCall("print_samples", 1, lose_reader)}, statuses={1: 0}, steps=8,
         last="complete: yes"),
    *[Case(f"a disk too full for rank {rank}'s checkpoint", EVERY,
           f"cannot write the checkpoint {RUN}/step00000004: No space left on device; make room, in a folder "
           "that all machines see, and go on from the one before with --resume", ranks=2,
           faults={rank: FaultAtCall("torch.save", 2, disk_full)}, steps=4, kept=("step00000002",))
      for rank in (0, 1)],
    # --resume
    Case("--resume without a checkpoint", "--resume nowhere",
         f"--resume nowhere: checkpoints of 0 {ONE_RUN}"),
    Case("--resume of several runs", RESUME,
         f"{RESUME}: checkpoints of 2 {ONE_RUN}", another_run),
    Case("--resume with nothing", "--resume=",
         "--resume: give a path, not nothing; -h lists the options"),
    Case("--resume with another config",
         f"{RESUME} --set adam_lr=.5 --set stages.1.windows.short=2 --set params.embed.wd_mul=7",
         f"{HEAD} is of another run (there, here): config.stages.1.windows.short (4, 2); "
         f"config.params.18.wd_mul (150, 7.0); config.adam_lr (0.008, 0.5); {OTHER_RUN}"),
    Case("--resume with another seed", f"{RESUME} --seed 1",
         f"{HEAD} is of another run (there, here): seed (0, 1); {OTHER_RUN}"),
    Case("--resume with other data", RESUME,
         f"{HEAD} is of another run (there, here): data (<hash> (12000 training tokens in 2 shards, 1500 for "
         f"validation), <hash> (12000 training tokens in 2 shards, 1500 for validation)); {OTHER_RUN}",
         set_token(FIRST, 9, 0)),
    Case("--resume with fewer processes", RESUME,
         f"{HEAD} is of another run (there, here): processes (2, 1); {OTHER_RUN}", fixture="stopped_pair"),
    Case("--resume with more processes", RESUME,
         f"{HEAD} is of another run (there, here): processes (1, 2); {OTHER_RUN}", ranks=2),
    Case("a shard with a flipped bit", RESUME,
         f"cannot read {HEAD}/rank0.pt: checksum of {DAMAGED}", flip_bit),
    Case("a shard that would run code", RESUME, f"cannot read {HEAD}/rank0.pt: {DAMAGED}",
         change_shard(lambda state: state.update(more=CodeInPickle()))),
    Case("one rank's shard is truncated", RESUME, f"cannot read {HEAD}/rank1.pt: {DAMAGED}",
         truncate(f"{FILES}/rank1.pt", 999), fixture="stopped_pair", ranks=2, steps=0),
    Case("no shard", RESUME, f"cannot read {HEAD}/rank0.pt: No such file or directory{DAMAGED[5:]}",
         lambda folder: next(folder.glob(f"{FILES}/rank0.pt")).unlink()),
    # Ctrl-C
    *[Case(f"Ctrl-C {what}", "", "", ranks=world_size, steps=steps,
           faults=dict.fromkeys(ranks, FaultAtCall(where, call, interrupt)),
           statuses=dict.fromkeys(ranks, -signal.SIGINT))
      for what, world_size, ranks, where, call, steps in (
          ("in one process", 0, (0,), "train_step", 5, 4),
          ("before there is a log", 0, (0,), "open_dataset", 1, None),
          ("in all ranks", 2, (0, 1), "train_step", 5, 4),
          ("in rank 0", 2, (0,), "train_step", 5, 4),
          ("in rank 1", 2, (1,), "train_step", 5, 4))],
    # a rank is killed: when, by which call; the log's finished steps; complete checkpoints
    *[Case(f"rank {rank} of {world_size} killed {when}", arguments, "", ranks=world_size,
           faults={rank: FaultAtCall(where, call, do)}, steps=steps,
           statuses={rank: -signal.SIGKILL}, kept=kept)
      for rank, world_size, when, arguments, where, call, do, steps, kept in (
          (1, 2, "at the data", "", "open_dataset", 1, die_late, None, ()),
          (1, 2, "at the log", "", "RunLog", 1, die, 0, ()),
          (0, 2, "at the model", "", "Exchange.gather", 3, die, 0, ()),
          (1, 2, "in warm-up", "--set warmup=true", "train_step", 2, die, 0, ()),
          (0, 2, "in the first step", "", "GPT.head_loss_and_grad", 1, die, 0, ()),
          (1, 2, "in a later step", "", "GPT.head_loss_and_grad", 5, die, 4, ()),
          (1, 2, "before its thread sends row counts", "", "Exchange.send_ids", 3, die, 1, ()),
          (0, 2, "before its thread sends row ids", "", "Exchange.send_rows", 6, die, 1, ()),
          (0, 2, "between two tables' rows", "", "Gradient.take", 38, die, 1, ()),
          (0, 2, "between scatter and gather", "", "Exchange.gather", 14, die, 1, ()),
          (1, 2, "between scatter and gather", "", "Exchange.gather", 14, die, 1, ()),
          (3, 4, "between scatter and gather", "", "Exchange.gather", 14, die, 1, ()),
          (1, 2, "in validation", "", "Exchange.all_reduce", 2, die, 3, ()),
          (0, 2, "while it writes a checkpoint", EVERY, "torch.save", 2, die, 4, ("step00000002",)),
          (1, 2, "while it writes a checkpoint", EVERY, "torch.save", 2, die, 4, ("step00000002",)))],
]
# fmt: on


# ---- tests -------------------------------------------------------------------------------------------------


def command_line(arguments):
    return ["--preset", "cpu", "--data", "corpus", *settings(*SETTINGS), *arguments]


def launch(folder, *arguments, **options):
    return Launch(folder, *command_line(arguments), **options)


STEP = re.compile(
    r"^step:(\d+)/\d+ train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d+\.\d+@\1$", re.MULTILINE
)


def finished_steps(log):
    """Returns the numbers of the steps with complete lines, and the last line."""
    text = log.read_text(encoding="utf-8")
    return [int(step) for step in STEP.findall(text)], text.splitlines()[-1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Returns a folder with data."""
    folder = tmp_path_factory.mktemp("fresh")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def stopped(fresh, tmp_path_factory):
    """Returns a folder with data and a run: one process, killed after three steps, a checkpoint after two."""
    return killed_run(fresh, tmp_path_factory.mktemp("stopped"), 0)


@pytest.fixture(scope="module")
def stopped_pair(fresh, tmp_path_factory):
    """Returns such a folder with a run of two ranks."""
    return killed_run(fresh, tmp_path_factory.mktemp("stopped"), 2)


def killed_run(fresh, folder, world_size):
    folder = shutil.copytree(fresh, folder / "run")
    faults = {rank: FaultAtCall("train_step", 4, die) for rank in range(max(1, world_size))}
    with launch(folder, *EVERY.split(), world_size=world_size, faults=faults) as run:
        assert set(run.wait()) == {-signal.SIGKILL}
    return folder


def change_times(folder):
    """Returns when each thing below `folder` was last changed."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def run_case(case, folder, monkeypatch, capsys):
    """Returns exit statuses by rank, and stderr."""
    if case.ranks is None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        try:
            status = tg.main(command_line(case.arguments.split()))
        except SystemExit as e:  # argparse's
            status = e.code
        return [status], capsys.readouterr().err
    options = {"world_size": case.ranks, "faults": case.faults, "rank_arguments": case.rank_arguments}
    with launch(folder, *case.arguments.split(), **options) as run:
        return run.wait(), run.err


def possible_steps(case):
    """Returns how many steps rank 0 may have finished when another rank's death ends it.

    What a rank had sent before may suffice for the step in which it is killed between scatter and gather.
    Rank 0 then misses the gather in the next one. A thread kills its rank at any time in a step, or after it,
    and rank 0 may be a step behind.
    """
    if "thread" in case.name:
        return case.steps - 1, case.steps, case.steps + 1
    goes_on = "between scatter" in case.name and not case.name.startswith("rank 0")
    return case.steps, case.steps + goes_on


PARAMETERS = [
    pytest.param(case, id=case.name, marks=[] if case.ranks is None else pytest.mark.slow) for case in CASES
]


# What torch raises in ranks that lose their peer.
LOST = "RuntimeError", "torch.distributed.DistBackendError"


@pytest.mark.parametrize("case", PARAMETERS)
def test_bad_input_is_one_line(case, tmp_path, request, monkeypatch, capsys):
    """Every rank fails and none hangs. What was finished is on disk."""
    folder, fixture = tmp_path / "run", "stopped" if case.arguments.startswith(RESUME) else "fresh"
    shutil.copytree(request.getfixturevalue(case.fixture or fixture), folder)
    case.corrupt(folder)
    before = change_times(folder)
    statuses, err = run_case(case, folder, monkeypatch, capsys)
    for rank, status in enumerate(statuses):
        assert case.statuses.get(rank, status or 1) == status, err
    said = [line for line in err.splitlines() if line.startswith("train_gpt.py: error")]
    assert bool(said) == bool(case.message), err
    if not case.ranks:
        assert len(said) <= 1 and "Traceback" not in err, err
    raised = re.findall(r"^([\w.]+): ", err.partition("Traceback")[2], re.MULTILINE)
    assert set(raised) <= {*LOST, "train_gpt.py"}, err
    written = set(folder.rglob("*")) - before.keys()
    if case.steps is None:
        assert change_times(folder) == before
        return
    assert before.keys() <= set(folder.rglob("*"))
    logs = [path for path in written if path.is_file() and path.parent == folder / ATTEMPTS]
    steps, last = finished_steps(*logs)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) in possible_steps(case)
    assert re.fullmatch(case.last, last) if case.last else last != "complete: yes"
    checkpoints = {
        path for path in written if path.parent.suffix == ".checkpoint" and path.suffix != ".partial"
    }
    assert sorted(path.name for path in checkpoints) == list(case.kept)
    for path in checkpoints:
        assert sorted(part.name for part in path.iterdir()) == ["rank0.pt", "rank1.pt"]


@pytest.mark.slow
def test_a_silent_rank_times_out(fresh, tmp_path):
    """A rank that hangs, which neither torchrun nor the backend ends."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    timeout = SetGlobal("COLLECTIVE_TIMEOUT", timedelta(seconds=15))
    faults = {0: timeout, 1: FaultAtCall("Exchange.gather", 5, hang)}
    with launch(folder, world_size=2, faults=faults) as run:
        run.processes[0].join(WAIT)
        assert [process.exitcode for process in run.processes] == [1, None]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_finished_step_is_on_disk(fresh, tmp_path, step):
    """The process dies right after it logs the step: no line waits in a buffer."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, faults={0: FaultAtCall("tqdm.update", step, die)}) as run:
        assert run.wait() == [-signal.SIGKILL]
    assert finished_steps(next(folder.glob(f"{ATTEMPTS}/*.txt")))[0] == list(range(1, step + 1))


@pytest.mark.slow
def test_ctrl_c_while_one_rank_waits_for_another(fresh, tmp_path):
    """All ranks get SIGINT, as from a terminal, while rank 0 waits in a collective for rank 1."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    faults = {1: FaultAtCall("train_step", 5, partial(time.sleep, 60))}
    with launch(folder, world_size=2, faults=faults) as run:
        end = time.monotonic() + WAIT
        while not any(
            finished_steps(log)[0][-1:] == [4]
            for log in folder.glob(f"{ATTEMPTS}/*.txt")
            if log.stat().st_size
        ):
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.2)
        for process in run.processes:
            os.kill(process.pid, signal.SIGINT)
        assert run.wait() == [-signal.SIGINT] * 2
    (log,) = folder.glob(f"{ATTEMPTS}/*.txt")
    assert finished_steps(log)[0] == [1, 2, 3, 4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_at_once(tmp_path):
    """By the first line that cannot be written."""
    log = tg.RunLog(tmp_path / "run.txt")
    log.file = open("/dev/full", "w", buffering=1)
    with pytest.raises(OSError, match="No space left on device"):
        log.print0("step:1/8", console=False)
