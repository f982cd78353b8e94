"""Bad input: one table of what can be wrong with the message that a person gets, and what every row of it must keep to.

In a message <n> stands for a number, <log>, <why> and the like for anything; all other words are as they appear, after
"train_gpt.py: error: ". Unless a row says otherwise two ranks of a tiny run are started, both end with status 1, and nothing is
written. `steps` says that a log is, with so many finished steps; its last line then is "stopped: " and the message.
"""
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from typing import Callable

import numpy as np
import pytest

import train_gpt as tg
from launch import At, Launch, Put, die, disk_full, fill_disk, interrupt, lose_reader, make_corpus, no_memory, settings


@dataclass
class Row:
    name: str
    arguments: str
    message: str
    damage: Callable = lambda folder: None     # of the folder that the run starts in
    world: int = 2
    statuses: tuple = ()
    steps: int | None = None
    last: str = ""                             # last line of the log
    kept: tuple = ()                           # new checkpoints that are complete
    faults: dict = field(default_factory=dict) # by rank, as for Launch; likewise:
    rank_arguments: dict = field(default_factory=dict)
    environments: dict = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- damage

def word(path, at, value, kind="<i4"):
    """Sets word number `at` of a shard's header; with kind "<u2", of the shard as those."""
    def damage(folder):
        words = np.fromfile(folder / path, kind)
        words[at] = value
        words.tofile(folder / path)
    return damage


def token(path, at, value):
    return word(path, tg.HEADER_BYTES // 2 + at, value, "<u2")


def cut(path, size):
    return lambda folder: os.truncate(next(folder.glob(path)), size)


def text(path, content):
    """A file of that text, in a folder made for it."""
    def damage(folder):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return damage


def other_corpus(folder):
    shutil.copytree(folder / "corpus", folder / "other")
    token(FIRST, 9, 0)(folder)


def another_run(folder):
    shutil.copytree(next(folder.glob(f"{ATTEMPTS}/*.checkpoint")), folder / ATTEMPTS / "seed1_b.checkpoint")


def flip(folder):
    path = next(folder.glob(f"{FILES}/rank1.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(folder):
    share = next(folder.glob(f"{FILES}/rank0.pt"))
    shutil.copy(share, share.with_name("rank1.pt"))


def die_later():
    """When the others have joined, too."""
    time.sleep(2)
    die()


def fall_silent():
    time.sleep(1000)


# -------------------------------------------------------------------------------------------------------------- table

FIRST, SECOND, VAL = (f"corpus/tiny_{name}.bin" for name in ("train_000000", "train_000001", "val_000000"))
ATTEMPTS = "records/other/attempts"
RUN = f"{ATTEMPTS}/<run>.checkpoint"
HEAD = f"{RUN}/step00000002"
FILES = f"{ATTEMPTS}/*.checkpoint/step00000002"
RESUME = f"--resume {ATTEMPTS}"
EVERY = "--checkpoint-every 2"
NAMES = tg.CPU.work_order
LOST = "another process of this run was killed or failed (<why>); look for its own message, and start the run again"
OUTSIDE = "token 300 is outside the vocabulary of 257; the file is damaged, or made with another tokenizer: build it again"
NO_SHARDS = ("make them with data/fineweb.py (record preset), data/local_corpus.py (cpu preset) or data/tokenize_text.py "
             "(your own text), or use another --data")

ROWS = [
    # data
    Row("no shards", "--data nowhere", f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}"),
    Row("no shards for one rank", "",
        f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}", rank_arguments={1: ["--data", "nowhere"]}),
    Row("no validation shard", "",
        f"no val shards (*_val_*.bin) in corpus: {NO_SHARDS}", lambda folder: (folder / VAL).unlink()),
    Row("a shard is cut short", "",
        f"{SECOND}: 13014 bytes, but its header promises 6000 tokens, which take 13024; delete it, and download or build it "
        "again", cut(SECOND, 13014)),
    Row("a shard of another count", "",
        f"{SECOND}: 13024 bytes, but its header promises 7000 tokens, which take 15024; delete it, and download or build it "
        "again", word(SECOND, 2, 7000)),
    Row("not a shard", "",
        f"{VAL}: not a token shard (its first word is not 20240520); delete it, and download or build it again",
        text(VAL, "<!DOCTYPE html>")),
    Row("a shard of another version", "",
        f"{FIRST}: shard format version 7, this script reads 1; build it again", word(FIRST, 1, 7)),
    Row("a shard that is a broken link", "",
        "corpus/x_train_9.bin: No such file or directory; download or build the data again",
        lambda folder: (folder / "corpus/x_train_9.bin").symlink_to("gone")),
    Row("a token outside the vocabulary", "", f"{FIRST}: {OUTSIDE}", token(FIRST, 5999, 300), steps=0),
    Row("such a token in a shard opened in mid-run", "--set stages.3.steps=10",
        f"{SECOND}: {OUTSIDE}", token(SECOND, 5999, 300), steps=9),
    Row("such a token in validation", "", f"{VAL}: {OUTSIDE}", token(VAL, 5, 300), steps=0),
    Row("too little training data", "--set stages.0.steps=99",
        "corpus: 12,000 training tokens, the schedule takes at least 21,056; add training shards, or shorten it: --set "
        "stages.0.steps=..., likewise stages 1 to 3"),
    Row("training data that runs out", "--set stages.3.steps=24",
        "training data ran out after 5,888 tokens, the schedule takes 10,880 (what is cut from long documents not counted); "
        "add training shards, or cut long documents into shorter ones", steps=17),
    Row("too little validation data", "--set val_slices=9",
        "corpus: 1,500 validation tokens, validation takes 2,305; add validation shards, or --set val_slices=5"),
    Row("data of another vocabulary", "--preset record --set kernels= --set attention=dense",
        f"{FIRST}: made for a vocabulary of 257 with start token 256, the config has 50257 and 50256; choose the matching "
        "--preset or --data"),
    Row("more documents than slots", "--set doc_slots=3",
        "a slice of 96 tokens has <n> documents, cu_seqlens has room for 2; use --set doc_slots=128", steps=0),
    # options
    Row("kernels and attention for which there is no GPU", "--set kernels=gram,sum_rows --set attention=varlen",
        "the kernels need a GPU (or TRITON_INTERPRET=1, for tests), there is no GPU here; FlashAttention needs a GPU, there is none "
        "here; this would run: --set kernels= --set attention=dense"),
    Row("a kernel unknown", "--set kernels=gramm",
        "kernels: unknown gramm; use any of gram, relu_square, softcap_loss, sum_rows, transpose, or kernels= for none"),
    Row("a trace of steps that are not run", "--profile 6",
        "--profile 6 traces steps 6 to 9, the run has steps 0 to 7; give an earlier one"),
    Row("a preset unknown", "--preset huge",
        "argument --preset: invalid choice: 'huge' (choose from <presets>); -h lists the options"),
    Row("an option unknown", "--nmae x", "unknown option '--nmae'; did you mean --name, --save?; -h lists the options"),
    Row("an option without its value", "--seed", "argument --seed: expected one argument; -h lists the options"),
    Row("a seed that is no number", "--seed one",
        "argument --seed: give a whole number, 0 or more, not 'one'; -h lists the options"),
    Row("a name that is no folder's", "--name ../up",
        "--name '../up': letters, digits, and . _ - only: it becomes a folder's name; -h lists the options"),
    Row("checkpoints every 0 steps", "--checkpoint-every 0",
        "argument --checkpoint-every: give a whole number, 1 or more, not '0'; -h lists the options"),
    Row("--save to no folder", "--save no/model.pt", "--save no/model.pt: give a file in a folder that can be written to"),
    Row("--save to a folder", "--save corpus", "--save corpus: give a file in a folder that can be written to"),
    Row("a model that cannot be written", "--save model.pt",
        "--save model.pt: No space left on device; the run itself is complete, its log is <log>",
        faults={0: At("save_model", 1, disk_full)}, statuses=(1, 0), steps=8, last="complete: yes"),
    Row("a seed done before", "--name x",
        f"records/other/{date.today()}_x/seed0_a.txt is a complete run with this seed; choose another --seed or --name",
        text(f"records/other/{date.today()}_x/seed0_a.txt", "complete: yes\n")),
    # settings
    Row("a setting without a value", "--set adam_lr", "--set adam_lr: write name=value"),
    Row("a setting unknown", "--set adm_lr=1", "--set adm_lr: unknown name 'adm_lr'; did you mean adam_lr, muon_lr, adam_wd?"),
    Row("a column unknown", "--set stages.0.stepz=1", "--set stages.0.stepz: unknown name 'stepz'; did you mean steps?"),
    Row("a row unknown", "--set params.embd.lr_mul=1", "--set params.embd.lr_mul: unknown name 'embd'; did you mean embed?"),
    Row("a row like none", "--set params.0x1.lr_mul=1",
        f"--set params.0x1.lr_mul: unknown name '0x1'; did you mean {', '.join(row.name for row in tg.PARAMS)}?"),
    Row("a table for a value", "--set stages=1", "--set stages: a table; name an entry, like stages.0.steps"),
    Row("a row for a value", "--set stages.0=1",
        "--set stages.0: names a row; add one of its columns: steps, tokens, longest, short, long, lr_mul, mtp_start, mtp_end"),
    Row("a value for a table", "--set adam_lr.x=1", "--set adam_lr.x: adam_lr is not a table"),
    Row("no whole number", "--set slices=1.5", "--set slices=1.5: slices takes a whole number"),
    Row("no number", "--set adam_lr=fast", "--set adam_lr=fast: adam_lr takes a finite number"),
    Row("no finite number", "--set adam_lr=nan", "--set adam_lr=nan: adam_lr takes a finite number"),
    Row("neither true nor false", "--set warmup=maybe", "--set warmup=maybe: warmup takes true or false"),
    Row("a choice unknown", "--set layers.1.window=wide", "layers.1.window=wide: use short, long"),
    Row("a number too small", "--set head_chunk=0", "head_chunk=0 must be at least 1"),
    Row("a name missing in an order", f"--set work_order={','.join(NAMES[1:])}",
        f"work_order: missing: {NAMES[0]}; it must name each parameter exactly once"),
    Row("a name unknown in an order", f"--set scatter_order={','.join(NAMES)},ghost",
        "scatter_order: unknown: ghost; it must name each parameter exactly once"),
    Row("a name twice in an order", f"--set work_order={','.join(NAMES)},embed",
        "work_order: twice: embed; it must name each parameter exactly once"),
    Row("a config against itself", "--set heads=3",
        "heads=3 must be even, head_dim=8 a multiple of 4, their product at least 12"),
    Row("a layer that reads what is not there", "--set layers.2.reads=back",
        "layers.2 uses back, which no layer above it saves"),
    Row("weights for other losses", "--set stages.0.mtp_end=1",
        "stages.0: mtp_start and mtp_end must have as many weights, at least one"),
    Row("3 processes", "",
        "a world of 3 processes cannot share the work: 256 tokens of a batch do not divide into 3 slices; start torchrun "
        "with 1 or 2 or 4 processes", world=3),
    Row("slices that no batch divides into", "--set slices=3",
        "slices=3 does not divide all batches, of 192, 256, 384 tokens; use 1 or 2 or 4, or change stages.*.tokens"),
    Row("slices that ranks cannot share", "--set slices=4",
        "a world of 3 processes cannot share the work: 4 slices of a batch do not divide by it; start torchrun with 1 or 2 or 4 "
        "processes", world=3),
    Row("too large for any memory", "--set mlp_dim=20000000000",
        "out of memory: <why>; use more processes, or shrink what was last made larger (head_chunk, tokens of a stage, the "
        "model)", steps=0),
    Row("too large for one rank", "",
        "out of memory: <why>; use more processes, or shrink what was last made larger (head_chunk, tokens of a stage, the "
        "model)", faults={1: At("GPT.head", 2, no_memory)}, steps=1, last=f"stopped: {LOST}"),
    Row("a training loss not finite", "--set adam_lr=1e30",
        "the training loss is <value> at step 2; lower the learning rate that was raised last, or look at that batch", steps=2),
    Row("a validation loss not finite", "--set attn_scale=1e39",
        "the validation loss is <value> at step 0; undo what was changed last, learning rates first", steps=0),
    Row("a setting unlike any", "--set foo=1",
        "--set foo: unknown name 'foo'; the names are the fields of Config in the script"),
    Row("no slots", "--set doc_slots=-5", "doc_slots=-5 must be at least 0"),
    Row("a window of nothing", "--set final_windows=-1,3", "final_windows=-1 must be at least 1"),
    # ranks that do not fit together
    Row("WORLD_SIZE that is no number", "",
        "WORLD_SIZE=two: a number of processes; start the script with torchrun, or unset it", world=0,
        environments={0: {"WORLD_SIZE": "two"}}),
    Row("WORLD_SIZE of 0", "", "WORLD_SIZE=0: a number of processes; start the script with torchrun, or unset it", world=0,
        environments={0: {"WORLD_SIZE": "0"}}),
    Row("MASTER_PORT that is none", "",
        "the 2 processes cannot meet: <why>; start them with torchrun, and leave another run's port alone", world=0,
        environments={0: {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1x"}}),
    Row("ranks of many other options", "",
        "rank 1 differs from rank 0 (there, here): config.params.0.reduction (fp32, backend); config.params.1.reduction (fp32, "
        "backend); config.params.2.reduction (fp32, backend); and 13 more; start all machines with the same script, options, "
        "torch and data", rank_arguments={1: ["--set", "params.*.reduction=fp32"]}),
    Row("a screen that is gone at the end", "",
        "cannot write to the screen: Broken pipe; send the output to a file, and read that",
        faults={0: At("shutil.rmtree", 1, lose_reader)}, statuses=(1, 0), steps=8, last="complete: yes"),
    Row("an about.json of nothing", RESUME, f"{HEAD}/about.json is damaged (<why>); remove {RUN}, and start again",
        lambda folder: next(folder.glob(f"{FILES}/about.json")).write_text("{}")),
    Row("an about.json that is a list", RESUME, f"{HEAD}/about.json is damaged (<why>); remove {RUN}, and start again",
        lambda folder: next(folder.glob(f"{FILES}/about.json")).write_text("[]")),
    Row("a share with a bit changed", RESUME, f"{HEAD}/rank1.pt is damaged (<why>); remove {RUN}, and start again",
        flip, steps=0),
    Row("another rank's share", RESUME, f"{HEAD}/rank1.pt is damaged (rank 0's share); remove {RUN}, and start again",
        swap, steps=0),
    Row("rank 1 killed at the log", "", LOST, faults={1: At("open_log", 1, die)}, statuses=(1, -9), steps=0),
    Row("WORLD_SIZE alone", "",
        "WORLD_SIZE=2 is set, RANK, MASTER_ADDR, MASTER_PORT not; start the script with torchrun, or unset it", world=0,
        environments={0: {"WORLD_SIZE": "2"}}),
    Row("ranks of other options", "",
        "rank 1 differs from rank 0 (there, here): seed (5, 0); config.adam_lr (0.5, 0.008); start all machines with the "
        "same script, options, torch and data", rank_arguments={1: ["--seed", "5", "--set", "adam_lr=.5"]}),
    Row("ranks of other data", "",
        "rank 1 differs from rank 0 (there, here): data (<data>, <data>); start all machines with the same script, options, "
        "torch and data", other_corpus, rank_arguments={1: ["--data", "other"]}),
    Row("ranks of other scripts", "",
        "rank 1 differs from rank 0 (there, here): script (<hash>, <hash>); start all machines with the same script, "
        "options, torch and data", faults={1: Put("__file__", os.path.abspath(__file__))}),
    # disk and screen
    Row("a file where the logs' folder should be", "",
        f"cannot write the log {ATTEMPTS}/<log>: <why>; remove what is in its way, or make the folder writable",
        text("records/other", "")),
    Row("a disk full in mid-run", "",
        f"cannot write the log {ATTEMPTS}/<log>: <why>; it holds the run up to here; make room and start again",
        faults={0: At("train_step", 6, partial(fill_disk, 0))}, steps=5, last="step:5/8 <time>"),
    Row("a disk full within a line", "",
        f"cannot write the log {ATTEMPTS}/<log>: <why>; it holds the run up to here; make room and start again",
        faults={0: At("train_step", 6, partial(fill_disk, 9))}, steps=5, last="step:6/8 "),
    Row("nobody reads the screen", "",
        "cannot write to the screen: Broken pipe; send the output to a file, and read that", faults={0: lose_reader}, steps=0),
    *[Row(f"a disk too full for rank {rank}'s checkpoint", EVERY,
          f"cannot write the checkpoint {RUN}/step00000004: No space left on device; make room, in a folder that all machines "
          "see, and go on from the one before with --resume", faults={rank: At("torch.save", 2, disk_full)}, steps=4, kept=("step00000002",)) for rank in (0, 1)],
    # --resume
    Row("--resume where nothing is", "--resume nowhere",
        "--resume nowhere: no checkpoint there; give the folder of the log of a run that was started with --checkpoint-every "
        "and did not finish"),
    Row("--resume of several runs", RESUME,
        f"{RESUME}: several runs have checkpoints there; name one: {RUN}, {ATTEMPTS}/seed1_b.checkpoint", another_run),
    Row("--resume with a name", f"{RESUME} --name x",
        "--name and --resume: a resumed run's log goes beside the first one; leave --name out; -h lists the options"),
    Row("--resume with another config", f"{RESUME} --set adam_lr=.5",
        f"{HEAD} is of another run (there, here): config.adam_lr (0.008, 0.5); give its options, its data and as many "
        "processes"),
    Row("--resume with another seed", f"{RESUME} --seed 1",
        f"{HEAD} is of another run (there, here): seed (0, 1); give its options, its data and as many processes"),
    Row("--resume with other data", RESUME,
        f"{HEAD} is of another run (there, here): data (<data>, <data>); give its options, its data and as many processes",
        token(FIRST, 9, 0)),
    Row("--resume by fewer processes", RESUME,
        f"{HEAD} is of another run (there, here): processes (2, 1); give its options, its data and as many processes", world=0),
    Row("a damaged about.json", RESUME,
        f"{HEAD}/about.json is damaged (<why>); remove {RUN}, and start again", cut(f"{FILES}/about.json", 99)),
    Row("a damaged share of rank 1", RESUME,
        f"{HEAD}/rank1.pt is damaged (<why>); remove {RUN}, and start again", cut(f"{FILES}/rank1.pt", 999), steps=0),
    Row("no share of rank 0", RESUME,
        f"cannot read {HEAD}/rank0.pt: No such file or directory; is the run still going, and do all machines see its folder?",
        lambda folder: next(folder.glob(f"{FILES}/rank0.pt")).unlink(), steps=0),
    # Ctrl-C: the message is not an error's
    Row("Ctrl-C, one process", "", "interrupted",
        faults={0: At("train_step", 5, interrupt)}, world=0, statuses=(130,), steps=4),
    Row("Ctrl-C before there is a log", "", "interrupted", faults={0: At("find_data", 1, interrupt)}, world=0, statuses=(130,)),
    Row("Ctrl-C", "", "interrupted",
        faults=dict.fromkeys((0, 1), At("train_step", 5, interrupt)), statuses=(130, 130), steps=4),
    Row("Ctrl-C for rank 0", "", "interrupted", faults={0: At("train_step", 5, interrupt)}, statuses=(130, 1), steps=4),
    Row("Ctrl-C for rank 1", "", "interrupted",
        faults={1: At("train_step", 5, interrupt)}, statuses=(1, 130), steps=4, last=f"stopped: {LOST}"),
    # a rank is killed: what it was doing, where, the log's finished steps
    *[Row(f"rank {rank} of {world} killed {doing}", arguments, LOST, faults={rank: fault}, world=world, steps=steps,
          statuses=tuple(-signal.SIGKILL if r == rank else 1 for r in range(world)), last="" if rank else "<line>", kept=kept)
      for doing, arguments, fault, steps, kept in [
          ("at the data", "", At("find_data", 1, die_later), None, ()),
          ("at the model", "", At("Exchange.broadcast", 3, die), 0, ()),
          ("in warm-up", "--set warmup=true", At("train_step", 2, die), 0, ()),
          ("in the first step", "", At("GPT.head", 1, die), 0, ()),
          ("in a later step", "", At("GPT.head", 5, die), 4, ()),
          ("between scatter and gather", "", At("Exchange.gather", 5, die), 1, ()),
          ("in validation", "", At("Exchange.sum", 2, die), 3, ()),
          ("while it writes a checkpoint", EVERY, At("torch.save", 2, die), 4, ("step00000002",))]
      for rank, world in ((0, 2), (1, 2), (3, 4)) if world == 2 or doing == "between scatter and gather"],
]


# -------------------------------------------------------------------------------------------------------------- tests

def pattern(message):
    return re.sub(r"<(\w+)>", lambda part: r"[\d,]+" if part[1] == "n" else ".+", re.escape(message))


def launch(folder, *arguments, **options):
    tiny = settings("warmup=false", "slices=2", "val_slices=2")
    return Launch(folder, "--preset", "cpu", "--data", "corpus", *tiny, *arguments, **options)


def finished(log):
    """Numbers of the steps whose lines are whole, and the last line."""
    said = log.read_text(encoding="utf-8")
    steps = re.findall(r"^step:(\d+)/\d+ train_time:\d+ms step_avg:\d+\.\d\dms$", said, re.M)
    return [int(step) for step in steps], said.splitlines()[-1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def interrupted(fresh, tmp_path_factory):
    """And a run that was killed after three steps, with a checkpoint after two."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, *EVERY.split(), world=2, faults={0: At("train_step", 4, die)}) as run:
        assert run.wait() == [-signal.SIGKILL, 1]
    return folder


def rank_0_went_on(row, steps):
    """What a killed rank sent before may have reached rank 0, which then ends its step, and finds the gather missing in the next."""
    return not row.name.startswith("rank 0") and steps == list(range(1, row.steps + 2))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_one_line_says_what_to_do(row, tmp_path, request):
    """On every rank: no status 0, no hang, no traceback. On all together: one line. On disk: all that was finished."""
    folder = tmp_path / "run"
    shutil.copytree(request.getfixturevalue("interrupted" if row.arguments.startswith(RESUME) else "fresh"), folder)
    row.damage(folder)
    before = set(folder.rglob("*"))
    with launch(folder, *row.arguments.split(), world=row.world, faults=row.faults, rank_arguments=row.rank_arguments,
                environments=row.environments) as run:
        statuses = run.wait(60)
        lines, shown = run.err.splitlines(), run.out
    assert len(lines) == 1, "\n".join(lines)
    assert re.fullmatch("train_gpt.py: " + ("" if row.message == "interrupted" else "error: ") + pattern(row.message), lines[0])
    assert len(lines[0]) < 350
    assert statuses == list(row.statuses or [1] * max(row.world, 1))
    written = set(folder.rglob("*")) - before
    if row.steps is None:
        assert not written and not shown
        return
    logs = [path for path in written if path.is_file() and path.parent == folder / ATTEMPTS]
    steps, last = finished(*logs)
    assert steps == list(range(1, row.steps + 1)) or "between scatter" in row.name and rank_0_went_on(row, steps)
    assert re.fullmatch(pattern(row.last or f"stopped: {row.message}"), last)
    assert last == row.last or last != "complete: yes"
    checkpoints = {path for path in written if path.parent.suffix == ".checkpoint" and path.suffix != ".partial"}
    assert sorted(path.name for path in checkpoints) == list(row.kept)
    for path in checkpoints:
        assert sorted(part.name for part in path.iterdir()) == ["about.json", "rank0.pt", "rank1.pt"]


def test_patience_ends(fresh, tmp_path):
    """With a rank that lives and says nothing, which neither torchrun nor the backend ends."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, world=2, faults={0: Put("PATIENCE", timedelta(seconds=8)), 1: At("Exchange.gather", 5, fall_silent)}) as run:
        run.processes[0].join(60)
        assert [process.exitcode for process in run.processes] == [1, None]
        assert re.fullmatch(f"train_gpt.py: error: {pattern(LOST)}\n", run.err)


@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_step_is_on_disk_when_it_is_done(fresh, tmp_path, step):
    """The first process dies as soon as it has handed the step's line on: no line waits in a buffer."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, faults={0: At("RunLog.progress", step, die)}) as run:
        assert run.wait() == [-signal.SIGKILL]
    assert finished(next(folder.glob(f"{ATTEMPTS}/*.txt")))[0] == list(range(1, step + 1))


def test_ctrl_c_while_one_rank_waits_for_another(fresh, tmp_path):
    """As a terminal sends it, to all at once, rank 0 deep in a collective that rank 1 does not come to."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, world=2, faults={1: At("train_step", 5, partial(time.sleep, 60))}) as run:
        end = time.monotonic() + 30
        while not any(finished(log)[0][-1:] == [4] for log in folder.glob(f"{ATTEMPTS}/*.txt") if log.stat().st_size):
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.2)
        for process in run.processes:
            os.kill(process.pid, signal.SIGINT)
        assert run.wait(30) == [130, 130]
        assert run.err == "train_gpt.py: interrupted\n"
    assert finished(next(folder.glob(f"{ATTEMPTS}/*.txt"))) == ([1, 2, 3, 4], "stopped: interrupted")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_said_by_the_line_that_meets_it(tmp_path):
    with pytest.raises(tg.UserError, match=r"cannot write the log .*run\.txt: No space left on device; .* make room"):
        with tg.RunLog(tmp_path, 8, "run") as log:
            log.file.close()
            log.file = open("/dev/full", "w", buffering=1)
            log.write("step:1/8")
