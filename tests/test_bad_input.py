"""Tests the ways in which input or environment can be wrong, in one table of cases.

By default a case runs the command line of a tiny run in this process, says why in one line, fails and writes
nothing. `ranks` starts that many processes instead (0: one, without torchrun's environment). `steps`: a log
is written, with this many finished steps.
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
    name: str  # of options: the arguments
    corrupt: Callable = lambda folder: None  # called with the folder that the run starts in
    arguments: str = ""
    said: bool = True  # by train_gpt.py; not if argparse says it, or there is nothing to set right
    fixture: str = ""  # that folder, in folders(); by default "stopped" if the case resumes, else "fresh"
    ranks: int | None = None
    statuses: dict = field(default_factory=dict)  # by rank; any failure by default
    steps: int | None = None
    last: str = r"(?!complete: yes).*"  # last line of the log
    kept: tuple = ()  # new checkpoints that are complete
    faults: dict = field(default_factory=dict)  # by rank, as for Launch; likewise:
    rank_arguments: dict = field(default_factory=dict)
    world_size: str = ""  # of torchrun's environment

    @property
    def words(self):
        return (self.name if self.name.startswith("--") else self.arguments).split()


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


def make_folder(name):
    return lambda folder: (folder / name).mkdir()


def make_zip(folder):
    with zipfile.ZipFile(folder / "photos.zip", "w") as file:
        file.writestr("data.pkl", "mine")


def other_corpus(folder):
    shutil.copytree(folder / "corpus", folder / "other")
    set_token(FIRST, 9, 0)(folder)


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


def add_code(folder):
    path = next(folder.glob(f"{FILES}/rank0.pt"))
    torch.save(torch.load(path, weights_only=True) | {"more": CodeInPickle()}, path)


def change_script(folder):
    """Makes the checkpoint one of another script."""
    path = next(folder.glob(f"{FILES}/rank0.pt"))
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["task"]["script"] += 1
    torch.save(checkpoint, path)


def long_documents(folder):
    """Makes the training text two documents, most of which is never used."""
    for path in (FIRST, SECOND):
        words = np.fromfile(folder / path, "<u2")
        tokens = words[tg.HEADER_BYTES // 2 :]
        tokens[tokens == 256] = 97
        tokens[0] = 256
        words.tofile(folder / path)


def hang():
    time.sleep(1000)


# ---- cases -------------------------------------------------------------------------------------------------

FIRST = "corpus/tiny_train_000000.bin"
SECOND = "corpus/tiny_train_000001.bin"
VAL = "corpus/tiny_val_000000.bin"
ATTEMPTS = "records/other/attempts"
FILES = f"{ATTEMPTS}/*.checkpoint/step00000004"
RESUME = "--resume LOG"  # the folder's
EVERY = "--checkpoint-every 2"
TWO = f"{EVERY} --set stages.3.steps=8"  # checkpoints, after steps 4 and 8
ONE_STEP = "--set stages.*.steps=0 stages.0.steps=1"
SETTINGS = ("warmup=false", "microbatches=2", "val_slices=2")

WRONG = """--preset huge
--nmae x
--seed one
--save no/model.pt
--save corpus/
--save m.pt.ngrams0
--checkpoint-every -1
--checkpoint-every 100
--profile 0
--name ../../../elsewhere
--data=
--data nowhere
--set val_slices=1 --set val_slice_tokens=1500
--set stages.0.batch_tokens=12000
--save=
--resume=
--resume nowhere
--set data=
--set data=another
--set adam_lr
--set adm_lr=1
--set track=../elsewhere
--set params.embd.lr_mul=1
--set stages.9.steps=1
--set stages.0=1
--set microbatches=1.5
--set params.embed.betas=.9,b
--set warmup=maybe
--set layers.0.attention=piared
--set kernels=gram,transpse
--set padded_vocab=100
--set pointer_dim=8 padded_vocab=257
--set stages.2.sampled_columns=300
--set padded_vocab=20011 stages.0.sampled_columns=4096
--set layers.6.attention= layers.6.gate=true
--set layers.6.attention= layers.6.value=true
--set layers.*.value=false
--set layers.6.attention= layers.6.mudd=true
--set skip_from=3 skip_to=3
--set backout_from=99
--set heads=3
--set head_dim=6
--set mix_groups=3
--set adam_lr=nan
--set bank_lr=inf
--set bank_wd=-1
--set params.embed.betas=.9,1.5
--set params.embed.betas=.9
--set params.embed.kind=bank
--set params.lm_head.update_every=2,4
--set params.*.update_every=2,4
--set params.embed.update_every=1,1
--set params.embed.optimizer=anvil
--set params.value_embeds.update_every=2
--set params.qk_bank.update_every=2,1
--set head_chunk=0
--set mlp_dim=0
--set val_slices=0
--set val_slice_tokens=0
--set stages.0.batch_tokens=0
--set windows.long=0
--set stages.*.windows.long=0
--set stages.*.steps=0
--set stages.0.steps=-1
--set stages.1.mtp=0
--set sign_rows=65537
--set length=0
--set length=nan
--set fp8=true fp8_mlp=false
--set layers.0.attention=paired layers.0.xsa=true
--set layers.0.attention=paired layers.0.key_shift=true
--set microbatches=5
--set averages.0.params=lm_haed
--set averages.0.every=4 averages.0.offset=4
--set averages.0.rate=1.5
--set params.scalars.optimizer=anvil
--set params.qk_bank.optimizer=anvli
--set params.qk_bank.exchange=sparse
--set params.qk_bank.optimizer=anvil params.qk_bank.betas=.8,.9
--set params.qk_bank.optimizer=anvil params.*.betas=.8,.9
--set params.lm_head.matrix_lr_mul=2
--set params.mlp_bank.optimizer=adam params.mlp_bank.matrix_lr_mul=1,2
--set layers.8.attention=plain layers.8.value=true layers.8.mudd=true
--set ngrams.rows_per_order=1
--set ngrams.orders=2,3 ngrams.width=8 ngrams.rows_per_order=1073741824
--set ngrams.orders=2,2 ngrams.width=8
--set ngrams.orders=2,1 ngrams.width=8
--set ngrams.contexts=copy,copy
--set vocab_size=300 padded_vocab=304 ngrams.contexts=word
--set ngrams.orders=2 --set ngrams.width=4096""".splitlines()


INTERRUPT = FaultAtCall("train_step", 5, interrupt)


def disk_full_for(rank):
    fault = FaultAtCall("torch.save", 2, disk_full)
    name = f"a disk too full for rank {rank}'s checkpoint"
    return Case(name, arguments=TWO, ranks=2, faults={rank: fault}, steps=8, kept=("step00000004",))


def ended(number, rank, name, fault, **options):
    """Returns a case in which a signal, brought by a fault, ends a rank."""
    options |= {"faults": {rank: fault}, "statuses": {rank: -number}}
    return Case(name, said=False, **options)


# fmt: off
CASES = [
    # data
    Case("no shards for one rank", ranks=2, rank_arguments={1: ["--data", "nowhere"]}),
    Case("no validation shard", lambda folder: (folder / VAL).unlink()),
    Case("not a shard: truncated", truncate(SECOND, 13014)),
    Case("not a shard: another count", set_word(SECOND, 2, 5000)),
    Case("not a shard: another version", set_word(SECOND, 1, 7)),
    Case("a token outside the vocabulary", set_token(FIRST, 5999, 300), steps=0),
    Case("such a token in a shard that is reached in mid-run", set_token(SECOND, 5999, 300),
         "--set stages.3.steps=10", steps=8),
    Case("no whole batch in any shard", long_documents, ranks=2, steps=0),
    Case("data of GPT-2's vocabulary", set_word(FIRST, 3, 0)),
    Case("no vocabulary for the loss on prefixes",
         lambda folder: (folder / "corpus/vocabulary.txt").unlink()),
    Case("a vocabulary of other digits", write_text("corpus/vocabulary.txt", "the\nan\n")),
    Case("a vocabulary of other size", write_text("corpus/vocabulary.txt", "61\n6162\n")),
    # options and settings; below, those of WRONG
    Case("--set microbatches=4", world_size="3"),
    Case("--set padded_vocab=265", world_size="2"),
    Case("--set ngrams.orders= --set bigram_vocab_size=322 --set microbatches=4", world_size="4"),
    # what --save would replace
    Case("a folder in place of the n-gram rows", make_folder("model.pt.ngrams0"), "--save model.pt"),
    Case("such a folder for one rank", make_folder("model.pt.ngrams1"), "--save model.pt", ranks=2),
    Case("another program's zip file in place of the model", make_zip, "--save photos.zip"),
    Case("a text in place of the model", write_text("notes.json", '{"preset": "mine"}'), "--save notes.json"),
    Case("a text in place of the n-gram rows", write_text("c.ngrams0", "the deadbeef0123"), "--save c"),
    Case("a text whose name looks like a table", write_text("my.ngrams", "the cat"), "--save my.ngrams"),
    Case("a pipe in place of the model", lambda folder: os.mkfifo(folder / "pipe"), "--save pipe"),
    Case("a link to a missing folder", lambda folder: (folder / "link.pt").symlink_to("none/model.pt"),
         "--save link.pt"),
    # variables that a launcher has left
    Case("two processes, of which one was started", world_size="2"),
    Case("no process", world_size="0"),
    Case("many processes", world_size="many"),
    # numbers that go wrong
    Case("a training loss that is not finite", arguments="--set adam_lr=1e30", ranks=2, steps=2,
         last="step:2/8 .*"),
    Case("no finite loss after the last step", arguments=f"{ONE_STEP} bank_lr=1e30 --save model.pt", ranks=2,
         steps=1),
    Case("no finite loss before the second step", arguments="--set bank_lr=1e30 val_every=1", ranks=0,
         steps=1),
    # ranks that do not fit together
    Case("ranks with other options", ranks=2, rank_arguments={1: ["--set", "adam_lr=.5"]}),
    Case("ranks with other data", other_corpus, ranks=2, rank_arguments={1: ["--data", "other"]}),
    Case("ranks with other scripts", ranks=2,
         faults={1: SetGlobal("SOURCE", b"other")}),
    # disk and screen
    Case("a file in place of the logs' folder", write_text("records/other", "")),
    Case("a disk full within a line", ranks=0, steps=5, last="step:6/8 ",
         faults={0: FaultAtCall("train_step", 6, partial(fill_disk, 9))}),
    Case("a closed screen", ranks=2, faults={0: lose_reader}, steps=0),
    disk_full_for(0),
    disk_full_for(1),
    # --resume
    Case(f"{RESUME} --set params.embed.wd_mul=7"),
    Case(f"{RESUME} --seed 1"),
    Case(f"{RESUME} --name Another"),
    Case("a folder in place of the log", arguments=f"--resume {ATTEMPTS}", fixture="stopped"),
    Case("resumed with other data", set_token(FIRST, 9, 0), RESUME),
    Case("resumed with fewer processes", arguments=RESUME, fixture="stopped_pair"),
    Case("a checkpoint with a flipped bit", flip_bit, RESUME),
    Case("a checkpoint that would run code", add_code, RESUME),
    Case("a checkpoint of another script", change_script, RESUME),
    Case("one rank's part is truncated", truncate(f"{FILES}/rank1.pt", 999), RESUME,
         fixture="stopped_pair", ranks=2),
    # Ctrl-C
    ended(signal.SIGINT, 0, "Ctrl-C in one process", INTERRUPT, ranks=0, steps=4),
    ended(signal.SIGINT, 1, "Ctrl-C in rank 1 of 2", INTERRUPT, ranks=2, steps=4),
    # A rank hangs, which neither torchrun nor the backend ends: the other one times out.
    Case("a silent rank", said=False, ranks=2, steps=4,
         faults={0: SetGlobal("COLLECTIVE_TIMEOUT", timedelta(seconds=15)),
                 1: FaultAtCall("Collectives.all_gather", 34, hang)},
         statuses={0: 1, 1: -signal.SIGTERM}),
    # A finished step is on disk, whatever comes after it: no line waits in a buffer.
    ended(signal.SIGKILL, 0, "a process dies when a step is logged", FaultAtCall("tqdm.update", 4, die),
          ranks=0, steps=4),
    # a rank is killed, by a call; the log's finished steps; complete checkpoints
    ended(signal.SIGKILL, 1, "a rank killed before its thread sends row counts",
          FaultAtCall("route_rows", 3, die), ranks=2, steps=1),
    ended(signal.SIGKILL, 0, "a rank killed while it writes a checkpoint", FaultAtCall("torch.save", 2, die),
          ranks=2, steps=8, arguments=TWO, kept=("step00000004",)),
]
# fmt: on
for arguments in WRONG:
    CASES.append(Case(arguments))


# ---- tests -------------------------------------------------------------------------------------------------


def command_line(arguments):
    return ["--preset", "cpu", "--data", "corpus", *settings(*SETTINGS), *arguments]


def launch(folder, *arguments, **options):
    return Launch(folder, *command_line(arguments), **options)


STEP = re.compile(
    r"^step:(\d+)/\d+ train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d+\.\d+@\1$", re.MULTILINE
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns folders by name: with data; also with a run that was killed, of one process, or of two.

    The runs have finished five steps, and have a checkpoint after four.
    """
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in ("fresh", "stopped", "stopped_pair")}
    make_corpus(folders["fresh"] / "corpus")
    for name, world_size in (("stopped", 0), ("stopped_pair", 2)):
        shutil.copytree(folders["fresh"], folders[name])
        faults = dict.fromkeys((0, 1), FaultAtCall("train_step", 6, die))
        with launch(folders[name], *EVERY.split(), world_size=world_size, faults=faults) as run:
            assert set(run.wait()) == {-signal.SIGKILL}
    return folders


def change_times(folder):
    """Returns when each thing below `folder` was last changed."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def run_case(case, folder, monkeypatch, capsys):
    """Returns exit statuses by rank, and stderr."""
    words = case.words
    if "LOG" in words:
        (log,) = folder.glob(f"{ATTEMPTS}/*.txt")
        words[words.index("LOG")] = str(log)
    if case.ranks is None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        if case.world_size:
            monkeypatch.setenv("WORLD_SIZE", case.world_size)
        try:
            status = tg.main(command_line(words))
        except SystemExit as e:  # argparse's
            status = e.code
        return [status], capsys.readouterr().err
    options = {"world_size": case.ranks, "faults": case.faults, "rank_arguments": case.rank_arguments}
    with launch(folder, *words, **options) as run:
        return run.wait(), run.err


# What torch raises in ranks that lose their peer.
LOST = "RuntimeError", "torch.distributed.DistBackendError"


def parameters():
    """Returns the cases; those that start processes are slow."""
    cases = []
    for case in CASES:
        marks = () if case.ranks is None else pytest.mark.slow
        cases.append(pytest.param(case, id=case.name, marks=marks))
    return cases


@pytest.mark.parametrize("case", parameters())
def test_bad_input_is_one_line(case, tmp_path, folders, monkeypatch, capsys):
    """Every rank fails and none hangs. What was finished is on disk."""
    folder, fixture = tmp_path / "run", "stopped" if "LOG" in case.words else "fresh"
    shutil.copytree(folders[case.fixture or fixture], folder)
    case.corrupt(folder)
    before = change_times(folder)
    statuses, err = run_case(case, folder, monkeypatch, capsys)
    for rank, status in enumerate(statuses):
        assert case.statuses.get(rank, status or 1) == status, err
    said = err.count("train_gpt.py: error")
    assert bool(said) == case.said, err
    assert "disk" not in case.name or ATTEMPTS in err  # the file that could not be written
    assert case.ranks or said <= 1 and "Traceback" not in err, err
    raised = re.findall(r"^([\w.]+): ", err.partition("Traceback")[2], re.MULTILINE)
    assert set(raised) <= {*LOST, "train_gpt.py"}, err
    after = change_times(folder)
    if case.steps is None:
        assert after == before
        return
    written = after.keys() - before.keys()
    assert before.keys() <= after.keys() and folder / "model.pt" not in written
    (log,) = (path for path in written if path.is_file() and path.parent == folder / ATTEMPTS)
    text = log.read_text(encoding="utf-8")
    steps = list(map(int, STEP.findall(text)))
    # Ranks may be a step apart when one of them is killed.
    assert steps == list(range(1, len(steps) + 1)) and abs(len(steps) - case.steps) <= ("killed" in case.name)
    assert re.fullmatch(case.last, text.splitlines()[-1])
    checkpoints = [path for path in written if re.search(r"\.checkpoint/step\d+$", str(path))]
    assert sorted(path.name for path in checkpoints) == list(case.kept)
    for path in checkpoints:
        assert sorted(part.name for part in path.iterdir()) == ["rank0.pt", "rank1.pt"]
