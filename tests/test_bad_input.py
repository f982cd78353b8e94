"""Bad input: one table of what can be wrong with the message that a person gets, and what every row of it must keep to.

In a message <n> stands for a number, <log>, <why> and the like for anything; all other words are as they appear, after
"train_gpt.py: error: ". Unless a row says otherwise the command line of a tiny run is executed in this process, ends with
status 1, and writes nothing. `ranks` starts that many real processes instead (0: one, without torchrun's environment). `steps`
says that a log is written, with so many finished steps; its last line then is "stopped: " and the message.
"""
import functools
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import partial
from typing import Callable

import numpy as np
import pytest
import torch

import train_gpt as tg
from launch import TINY, WAIT, At, Launch, Put, die, disk_full, fill_disk, interrupt, lose_reader, make_corpus, no_memory, settings


@dataclass
class Row:
    name: str
    arguments: str
    message: str
    damage: Callable = lambda folder: None     # of the folder that the run starts in
    start: str = ""                            # the fixture that makes that folder; by default "stopped" to resume, else "fresh"
    ranks: int | None = None
    statuses: tuple = ()
    steps: int | None = None
    last: str = ""                             # last line of the log
    kept: tuple = ()                           # new checkpoints that are complete
    faults: dict = field(default_factory=dict) # by rank, as for Launch; likewise:
    rank_arguments: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)


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


def truncate(path, size):
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
    path = next(folder.glob(f"{FILES}/rank0.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(folder):
    share = next(folder.glob(f"{FILES}/rank0.pt"))
    shutil.copy(share, share.with_name("rank1.pt"))


class Harm:
    """Does something when unpickled."""

    def __reduce__(self):
        return os.mkdir, ("run by a pickle",)


def harm(folder):
    path = next(folder.glob(f"{FILES}/rank0.pt"))
    torch.save(torch.load(path, weights_only=True) | {"more": Harm()}, path)


def long_documents(folder):
    """Training text of two documents: most of it is never used."""
    for path in (FIRST, SECOND):
        words = np.fromfile(folder / path, "<u2")
        tokens = words[tg.HEADER_BYTES // 2:]
        tokens[tokens == 256] = 97
        tokens[0] = 256
        words.tofile(folder / path)


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
SETTINGS = ("warmup=false", "slices=2", "val_slices=2")
LOST = "another process of this run was killed or failed (<why>); look for its own message, and start the run again"
OUTSIDE = "token 300 is outside the vocabulary of 257; the file is damaged, or made with another tokenizer: build it again"
NO_SHARDS = ("make them with data/fineweb.py (record preset), data/local_corpus.py (cpu preset) or data/tokenize_text.py "
             "(your own text), or use another --data")

CANNOT_FIT = ("the training documents, of each of which at most 40 tokens are used, give {have} of the schedule's {want} batches, "
              "which take <n> tokens; add text, or cut long documents into passages as data/tokenize_text.py does")
ONCE = "it must name each parameter exactly once"
OTHER_RUN = "give its options, its data and as many processes"
SAME = "start all machines with the same script, options, torch and data"
NO_MEMORY = ("out of memory: <why>; use more processes, or shrink what was last made larger (head_chunk, tokens of a stage, the "
             "model)")
DAMAGED = f"is damaged (<why>); remove {RUN}, and start again"

ROWS = [
    # data
    Row("no shards", "--data nowhere", f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}"),
    Row("no shards for one rank", "",
        f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}", ranks=2, rank_arguments={1: ["--data", "nowhere"]}),
    Row("no validation shard", "",
        f"no val shards (*_val_*.bin) in corpus: {NO_SHARDS}", lambda folder: (folder / VAL).unlink()),
    Row("a shard is cut short", "",
        f"{SECOND}: 13014 bytes, but its header promises 6000 tokens, which take 13024; delete it, and download or build it "
        "again", truncate(SECOND, 13014)),
    *[Row(f"a shard of 6000 tokens with {count} in its header", "",
          f"{SECOND}: 13024 bytes, but its header promises {count} tokens, which take {1024 + 2 * count}; delete it, and download "
          "or build it again", word(SECOND, 2, count)) for count in (5000, 7000)],
    Row("not a shard", "",
        f"{VAL}: not a token shard (its first word is not 20240520); delete it, and download or build it again",
        text(VAL, "<!DOCTYPE html>")),
    Row("an empty shard", "",
        f"{FIRST}: not a token shard (its first word is not 20240520); delete it, and download or build it again",
        text(FIRST, "")),
    Row("a shard of another version", "",
        f"{FIRST}: shard format version 7, this script reads 1; build it again", word(FIRST, 1, 7)),
    Row("a shard that is a broken link", "",
        "corpus/x_train_9.bin: No such file or directory; download or build the data again",
        lambda folder: (folder / "corpus/x_train_9.bin").symlink_to("gone")),
    Row("a token outside the vocabulary", "", f"{FIRST}: {OUTSIDE}", token(FIRST, 5999, 300)),
    Row("such a token in a shard that is reached in mid-run", "--set stages.3.steps=10",
        f"{SECOND}: {OUTSIDE}", token(SECOND, 5999, 300)),
    Row("such a token in validation", "", f"{VAL}: {OUTSIDE}", token(VAL, 5, 300), steps=0),
    Row("too little training data", "--set stages.0.steps=99",
        f"corpus: {CANNOT_FIT.format(have='<n>', want=105)}; this would fit: --set stages.0.steps=<n> --set "
        "stages.1.steps=<n> --set stages.2.steps=<n> --set stages.3.steps=<n>"),
    Row("training data of long documents, for several ranks", "",
        f"corpus: {CANNOT_FIT.format(have=0, want=8)}", long_documents, ranks=2),
    Row("too little validation data", "--set val_slices=9",
        "corpus: 1,500 validation tokens, validation takes 2,305; add validation shards, or --set val_slices=5"),
    Row("a validation token too few", "--set val_slices=1 --set val_slice_tokens=1500",
        "corpus: 1,500 validation tokens, validation takes 1,501; add validation shards"),
    Row("data of another vocabulary", "--preset record --set kernels= --set attention=dense --set fp8=false --set compile=false",
        f"{FIRST}: made for a vocabulary of 257 with start token 256, the config has 50257 and 50256; choose the matching "
        "--preset or --data"),
    Row("data of GPT-2's vocabulary", "",
        f"{FIRST}: made for a vocabulary of 50257 with start token 50256, the config has 257 and 256; choose the matching "
        "--preset or --data", word(FIRST, 3, 0)),
    Row("more documents than slots", "--set doc_slots=3",
        "a slice of 96 tokens has <n> documents, cu_seqlens has room for 2; use --set doc_slots=128", steps=0),
    Row("more documents than slots in a later batch", "--set doc_slots=8",
        "a slice of 128 tokens has 8 documents, cu_seqlens has room for 7; use --set doc_slots=128", steps=3),
    Row("a run that ends before its trace", "--set doc_slots=3 --profile 1",
        "a slice of 96 tokens has <n> documents, cu_seqlens has room for 2; use --set doc_slots=128", steps=0),
    # options
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
        "--save model.pt: No space left on device; the run itself is complete, its log is <log>", ranks=2,
        faults={0: At("save_model", 1, disk_full)}, statuses=(1, 0), steps=8, last="complete: yes"),
    Row("a seed done before", "--name x",
        f"records/other/{date.today()}_x/seed0_a.txt is a complete run with this seed; choose another --seed or --name",
        text(f"records/other/{date.today()}_x/seed0_a.txt", "complete: yes\n")),
    # settings
    Row("a setting without a value", "--set adam_lr", "--set adam_lr: write name=value"),
    Row("a setting without a name", "--set =1", "--set : unknown name ''; the names are the fields of Config in the script"),
    Row("a setting unknown", "--set adm_lr=1", "--set adm_lr: unknown name 'adm_lr'; did you mean adam_lr, muon_lr, adam_wd?"),
    Row("a setting unlike any", "--set foo=1",
        "--set foo: unknown name 'foo'; the names are the fields of Config in the script"),
    Row("a setting that is not free", "--set track=../elsewhere", "--set track: it follows from --preset"),
    Row("a column unknown", "--set stages.0.stepz=1", "--set stages.0.stepz: unknown name 'stepz'; did you mean steps?"),
    Row("a row unknown", "--set params.embd.lr_mul=1", "--set params.embd.lr_mul: unknown name 'embd'; did you mean embed?"),
    Row("a row beyond the last", "--set stages.9.steps=1", "--set stages.9.steps: unknown name '9'; did you mean 0, 1, 2, 3?"),
    Row("a row like none", "--set params.0x1.lr_mul=1",
        f"--set params.0x1.lr_mul: unknown name '0x1'; did you mean {', '.join(row.name for row in tg.PARAMS)}?"),
    Row("a table for a value", "--set stages=1", "--set stages: a table; name an entry, like stages.0.steps"),
    Row("a row for a value", "--set stages.0=1",
        "--set stages.0: names a row; add one of its columns: steps, tokens, longest, short, long, lr_mul, mtp_start, mtp_end"),
    Row("a value for a table", "--set adam_lr.x=1", "--set adam_lr.x: adam_lr is not a table"),
    Row("no whole number", "--set slices=1.5", "--set slices=1.5: slices takes a whole number"),
    Row("no whole number in a list", "--set final_windows=1,b", "--set final_windows=b: final_windows takes a whole number"),
    Row("no number", "--set adam_lr=fast", "--set adam_lr=fast: adam_lr takes a finite number"),
    *[Row(f"{number} for a number", f"--set adam_lr={number}", f"--set adam_lr={number}: adam_lr takes a finite number")
      for number in ("nan", "inf", "-inf")],
    Row("neither true nor false", "--set warmup=maybe", "--set warmup=maybe: warmup takes true or false"),
    # a config against itself
    *[Row(f"a choice unknown: {setting}", f"--set {setting}", f"{setting}: use {choices}") for setting, choices in (
        ("dtype=float16", "bfloat16, float32, float64"), ("polar_dtype=int8", "bfloat16, float32, float64"),
        ("attention=sparse", "dense, varlen, fa3"), ("layers.0.attention=piared", "plain, paired, None"),
        ("layers.1.window=wide", "short, long"), ("layers.0.reads=bakc", "stream, back"),
        ("params.scalars.optimizer=sgd", "adam, normuon"),
        ("params.scalars.exchange=reduce", "all_reduce, reduce_scatter, sparse"),
        ("params.scalars.reduction=fp16", "backend, fp32"))],
    Row("a kernel unknown", "--set kernels=gramm",
        "kernels: unknown gramm; use any of gram, relu_square, softcap_loss, sum_rows, transpose, or kernels= for none"),
    *[Row(f"too small: {setting}", f"--set {setting}", f"{setting} must be at least {least}") for setting, least in (
        ("head_chunk=0", 1), ("doc_slots=-5", 0), ("stages.1.steps=-1", 0), ("bigram_rows=1", 2), ("slices=0", 1),
        ("stages.2.tokens=0", 1), ("cooldown=-0.5", 0))],
    Row("a window of nothing", "--set final_windows=-1,3", "final_windows=-1 must be at least 1"),
    Row("one window", "--set final_windows=20", "final_windows=(20,): two numbers, short and long"),
    Row("more rows than int32 numbers", "--set bigram_rows=2147483648",
        "bigram_rows=2147483648 must be below 2147483648: they are numbered in int32"),
    Row("a name missing in an order", f"--set work_order={','.join(NAMES[1:])}", f"work_order: missing: {NAMES[0]}; {ONCE}"),
    Row("a name unknown in an order", f"--set scatter_order={','.join(NAMES)},ghost", f"scatter_order: unknown: ghost; {ONCE}"),
    Row("a name twice in an order", f"--set work_order={','.join(NAMES)},embed", f"work_order: twice: embed; {ONCE}"),
    Row("a parameter's name changed", "--set params.embed.name=ghost", f"parameter table: unknown: ghost; {ONCE}"),
    Row("heads that make no pairs", "--set heads=3",
        "heads=3 must be even, head_dim=8 a multiple of 4, their product at least 12"),
    Row("a head that has no quarter", "--set head_dim=30",
        "heads=2 must be even, head_dim=30 a multiple of 4, their product at least 12"),
    Row("too narrow for gates", "--set head_dim=4",
        "heads=2 must be even, head_dim=4 a multiple of 4, their product at least 12"),
    Row("a vocabulary larger than its padding", "--set padded_vocab=100",
        "start_token=256 < vocab_size=257 <= padded_vocab=100 must hold"),
    Row("a layer that reads what is not there", "--set layers.2.reads=back",
        "layers.2 uses back, which no layer above it saves"),
    Row("a layer that adds what is not there", "--set layers.6.adds=none --set layers.1.adds=skip",
        "layers.1 uses skip, which no layer above it saves"),
    Row("nothing is added", "--set layers.6.adds=none", 'layer table: exactly one layer must have adds="skip"'),
    Row("nothing is saved", "--set layers.7.saves=none", 'layer table: exactly one layer must have saves="back"'),
    Row("values without attention", "--set layers.1.value=none --set layers.6.value=0",
        "layers.6: value=0, but the layer has no attention"),
    Row("value tables misnumbered", "--set layers.1.value=4",
        "layer table: value tables are [4, 1, 2, 3, 4]; number them 0, 1, ... and use each once"),
    Row("weights for other losses", "--set stages.0.mtp_end=1",
        "stages.0: mtp_start and mtp_end must have as many weights, at least one"),
    Row("one beta", "--set params.embed.betas=0.9", "params.embed.betas=(0.9,): Adam takes two"),
    Row("NorMuon for a table", "--set params.embed.optimizer=normuon",
        "params.embed.optimizer=normuon: it is for banks of matrices"),
    Row("a table's rows denied", "--set params.embed.rows=", "params.embed.rows=: must be tokens"),
    Row("a product denied", "--set params.lm_head.product=false", "params.lm_head.product=False: must be True"),
    Row("rows of what is no table", "--set params.lm_head.exchange=sparse",
        "params.lm_head.exchange=sparse: only tables of rows are exchanged so; use reduce_scatter"),
    Row("a table in another dtype", "--set params.lm_head.dtype=float32",
        "params.lm_head.dtype=float32: only the lambdas and scalars may differ from the model's dtype"),
    Row("slices that no batch divides into", "--set slices=3",
        "slices=3 does not divide all batches, of 192, 256, 384 tokens; use 1 or 2 or 4, or change stages.*.tokens"),
    *[Row(f"a world of {world}: {why}", arguments,
          f"a world of {world} processes cannot share the work: {why}; start torchrun with {near} processes",
          environment={"WORLD_SIZE": str(world)}) for world, arguments, why, near in (
        (3, "", "256 tokens of a batch do not divide into 3 slices", "1 or 2 or 4"),
        (3, "--set slices=4", "4 slices of a batch do not divide by it", "1 or 2 or 4"),
        (4, "--set bigram_rows=322 --set slices=4", "322 rows of bigram_embed do not divide by it", "1 or 2"),
        (2, "--set padded_vocab=265", "265 rows of value_embeds do not divide by it", "1"))],
    # numbers that go wrong
    Row("too large for any memory", "--set mlp_dim=20000000000", NO_MEMORY, steps=0),
    Row("too large for one rank", "", NO_MEMORY, ranks=2, faults={1: At("GPT.head", 2, no_memory)}, steps=1,
        last=f"stopped: {LOST}"),
    Row("a training loss not finite", "--set adam_lr=1e30",
        "the training loss is <value> at step 2; lower the learning rate that was raised last, or look at that batch", ranks=2,
        steps=2),
    Row("a validation loss not finite", "--set attn_scale=1e39",
        "the validation loss is <value> at step 0; undo what was changed last, learning rates first", steps=0),
    # ranks that do not fit together
    Row("WORLD_SIZE that is no number", "",
        "WORLD_SIZE=two: a number of processes; start the script with torchrun, or unset it", environment={"WORLD_SIZE": "two"}),
    Row("WORLD_SIZE of 0", "", "WORLD_SIZE=0: a number of processes; start the script with torchrun, or unset it",
        environment={"WORLD_SIZE": "0"}),
    Row("WORLD_SIZE alone", "",
        "WORLD_SIZE=2 is set, RANK, MASTER_ADDR, MASTER_PORT not; start the script with torchrun, or unset it",
        environment={"WORLD_SIZE": "2"}),
    Row("MASTER_PORT that is none", "",
        "the 2 processes cannot meet: <why>; start them with torchrun, and leave another run's port alone",
        environment={"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1x"}),
    Row("ranks of many other options", "",
        "rank 1 differs from rank 0 (there, here): config.params.0.reduction (fp32, backend); config.params.1.reduction (fp32, "
        f"backend); config.params.2.reduction (fp32, backend); and 13 more; {SAME}", ranks=2,
        rank_arguments={1: ["--set", "params.*.reduction=fp32"]}),
    Row("ranks of other options", "",
        f"rank 1 differs from rank 0 (there, here): seed (5, 0); config.adam_lr (0.5, 0.008); {SAME}", ranks=2,
        rank_arguments={1: ["--seed", "5", "--set", "adam_lr=.5"]}),
    Row("ranks of other data", "",
        f"rank 1 differs from rank 0 (there, here): data (<data>, <data>); {SAME}", other_corpus, ranks=2,
        rank_arguments={1: ["--data", "other"]}),
    Row("ranks of other scripts", "",
        f"rank 1 differs from rank 0 (there, here): script (<hash>, <hash>); {SAME}", ranks=2,
        faults={1: Put("__file__", os.path.abspath(__file__))}),
    # disk and screen
    Row("a file where the logs' folder should be", "",
        f"cannot write the log {ATTEMPTS}/<log>: <why>; remove what is in its way, or make the folder writable",
        text("records/other", "")),
    *[Row(f"a disk full {where}", "",
          f"cannot write the log {ATTEMPTS}/<log>: <why>; it holds the run up to here; make room and start again",
          ranks=ranks, faults={0: At("train_step", 6, partial(fill_disk, room))}, steps=5, last=last)
      for where, ranks, room, last in (("in mid-run", 2, 0, "step:5/8 <time>"), ("within a line", 0, 9, "step:6/8 "))],
    Row("nobody reads the screen", "",
        "cannot write to the screen: Broken pipe; send the output to a file, and read that", ranks=2, faults={0: lose_reader},
        steps=0),
    Row("a screen that is gone at the end", "",
        "cannot write to the screen: Broken pipe; send the output to a file, and read that", ranks=2,
        faults={0: At("shutil.rmtree", 1, lose_reader)}, statuses=(1, 0), steps=8, last="complete: yes"),
    *[Row(f"a disk too full for rank {rank}'s checkpoint", EVERY,
          f"cannot write the checkpoint {RUN}/step00000004: No space left on device; make room, in a folder that all machines "
          "see, and go on from the one before with --resume", ranks=2, faults={rank: At("torch.save", 2, disk_full)}, steps=4,
          kept=("step00000002",)) for rank in (0, 1)],
    # --resume
    Row("--resume where nothing is", "--resume nowhere",
        "--resume nowhere: no checkpoint there; give the folder of the log of a run that was started with --checkpoint-every "
        "and did not finish"),
    Row("--resume of several runs", RESUME,
        f"{RESUME}: several runs have checkpoints there; name one: {RUN}, {ATTEMPTS}/seed1_b.checkpoint", another_run),
    Row("--resume with a name", f"{RESUME} --name x",
        "--name and --resume: a resumed run's log goes beside the first one; leave --name out; -h lists the options"),
    Row("--resume with another config", f"{RESUME} --set adam_lr=.5 --set stages.1.short=2 --set params.embed.wd_mul=7",
        f"{HEAD} is of another run (there, here): config.stages.1.short (4, 2); config.params.12.wd_mul (150, 7.0); "
        f"config.adam_lr (0.008, 0.5); {OTHER_RUN}"),
    Row("--resume with another seed", f"{RESUME} --seed 1", f"{HEAD} is of another run (there, here): seed (0, 1); {OTHER_RUN}"),
    Row("--resume with other data", RESUME,
        f"{HEAD} is of another run (there, here): data (<hash> (12000 training tokens in 2 shards, 1500 for validation), "
        f"<hash> (12000 training tokens in 2 shards, 1500 for validation)); {OTHER_RUN}", token(FIRST, 9, 0)),
    Row("--resume by fewer processes", RESUME,
        f"{HEAD} is of another run (there, here): processes (2, 1); {OTHER_RUN}", start="stopped_pair"),
    Row("--resume by more processes", RESUME,
        f"{HEAD} is of another run (there, here): processes (1, 2); {OTHER_RUN}", ranks=2),
    *[Row(f"an about.json that is {what}", RESUME, f"{HEAD}/about.json {DAMAGED}",
          lambda folder, content=content: next(folder.glob(f"{FILES}/about.json")).write_text(content))
      for what, content in (("cut", '{"step": 2'), ("empty", "{}"), ("a list", "[]"))],
    Row("no about.json", RESUME, f"cannot read {HEAD}/about.json: No such file or directory; is the run still going?",
        lambda folder: next(folder.glob(f"{FILES}/about.json")).unlink()),
    Row("a share with a bit changed", RESUME, f"{HEAD}/rank0.pt {DAMAGED}", flip, steps=0),
    Row("a share that would run code", RESUME, f"{HEAD}/rank0.pt {DAMAGED}", harm, steps=0),
    Row("a share cut short, of one rank", RESUME, f"{HEAD}/rank1.pt {DAMAGED}", truncate(f"{FILES}/rank1.pt", 999),
        start="stopped_pair", ranks=2, steps=0),
    Row("another rank's share", RESUME, f"{HEAD}/rank1.pt is damaged (rank 0's share); remove {RUN}, and start again",
        swap, start="stopped_pair", ranks=2, steps=0),
    Row("no share", RESUME,
        f"cannot read {HEAD}/rank0.pt: No such file or directory; is the run still going, and do all machines see its folder?",
        lambda folder: next(folder.glob(f"{FILES}/rank0.pt")).unlink(), steps=0),
    # Ctrl-C: the message is not an error's
    Row("Ctrl-C, one process", "", "interrupted",
        ranks=0, faults={0: At("train_step", 5, interrupt)}, statuses=(130,), steps=4),
    Row("Ctrl-C before there is a log", "", "interrupted", ranks=0, faults={0: At("find_data", 1, interrupt)}, statuses=(130,)),
    Row("Ctrl-C", "", "interrupted", ranks=2,
        faults=dict.fromkeys((0, 1), At("train_step", 5, interrupt)), statuses=(130, 130), steps=4),
    Row("Ctrl-C for rank 0", "", "interrupted", ranks=2, faults={0: At("train_step", 5, interrupt)}, statuses=(130, 1), steps=4),
    Row("Ctrl-C for rank 1", "", "interrupted", ranks=2,
        faults={1: At("train_step", 5, interrupt)}, statuses=(1, 130), steps=4, last=f"stopped: {LOST}"),
    # a rank is killed: what it was doing, where, the log's finished steps
    *[Row(f"rank {rank} of {world} killed {doing}", arguments, LOST, ranks=world, faults={rank: fault}, steps=steps,
          statuses=tuple(-signal.SIGKILL if r == rank else 1 for r in range(world)), last="" if rank else "<line>", kept=kept)
      for rank, world, doing, arguments, fault, steps, kept in [
          (1, 2, "at the data", "", At("find_data", 1, die_later), None, ()),
          (1, 2, "at the log", "", At("open_log", 1, die), 0, ()),
          (0, 2, "at the model", "", At("Exchange.broadcast", 3, die), 0, ()),
          (1, 2, "in warm-up", "--set warmup=true", At("train_step", 2, die), 0, ()),
          (0, 2, "in the first step", "", At("GPT.head", 1, die), 0, ()),
          (1, 2, "in a later step", "", At("GPT.head", 5, die), 4, ()),
          (1, 2, "before row counts are exchanged", "", At("Exchange.announce", 2, die), 3, ()),
          (0, 2, "before row numbers are exchanged", "", At("Exchange.route", 2, die), 3, ()),
          (1, 2, "between two tables' rows", "", At("Exchange.reduce_rows", 2, die), 1, ()),
          (0, 2, "between scatter and gather", "", At("Exchange.gather", 5, die), 1, ()),
          (1, 2, "between scatter and gather", "", At("Exchange.gather", 5, die), 1, ()),
          (3, 4, "between scatter and gather", "", At("Exchange.gather", 5, die), 1, ()),
          (1, 2, "in validation", "", At("Exchange.sum", 2, die), 3, ()),
          *[(rank, 2, "while it writes a checkpoint", EVERY, At("torch.save", 2, die), 4, ("step00000002",)) for rank in (0, 1)]]],
]


# -------------------------------------------------------------------------------------------------------------- tests

def pattern(message):
    return re.sub(r"<(\w+)>", lambda part: r"[\d,]+" if part[1] == "n" else ".+", re.escape(message))


def command_line(arguments):
    return ["--preset", "cpu", "--data", "corpus", *settings(*SETTINGS), *arguments]


def launch(folder, *arguments, **options):
    return Launch(folder, *command_line(arguments), **options)


def finished(log):
    """Numbers of the steps whose lines are whole, and the last line."""
    said = log.read_text(encoding="utf-8")
    steps = re.findall(r"^step:(\d+)/\d+ train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d+\.\d+@\1$", said, re.M)
    return [int(step) for step in steps], said.splitlines()[-1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def stopped(fresh, tmp_path_factory):
    """And a run of one process that was killed after three steps, with a checkpoint after two."""
    return killed_run(fresh, tmp_path_factory.mktemp("stopped"), 0)


@pytest.fixture(scope="module")
def stopped_pair(fresh, tmp_path_factory):
    """Likewise of two ranks."""
    return killed_run(fresh, tmp_path_factory.mktemp("stopped"), 2)


def killed_run(fresh, folder, world):
    folder = shutil.copytree(fresh, folder / "run")
    faults = {rank: At("train_step", 4, die) for rank in range(max(1, world))}
    with launch(folder, *EVERY.split(), world=world, faults=faults) as run:
        assert set(run.wait()) == {-signal.SIGKILL}
    return folder


def changes(folder):
    """When each thing below `folder` was last changed."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def ended(row, folder, monkeypatch, capsys):
    """-> exit statuses, lines of stderr, whether anything was on stdout."""
    if row.ranks is None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in row.environment.items():
            monkeypatch.setenv(name, value)
        status = tg.main(command_line(row.arguments.split()))
        out, err = capsys.readouterr()
        return [status], err.splitlines(), bool(out)
    with launch(folder, *row.arguments.split(), world=row.ranks, faults=row.faults, rank_arguments=row.rank_arguments) as run:
        return run.wait(), run.err.splitlines(), bool(run.out)


def rank_0_went_on(row, steps):
    """What a killed rank sent before may have reached rank 0, which then ends its step, and finds the gather missing in the next."""
    return not row.name.startswith("rank 0") and steps == list(range(1, row.steps + 2))


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=[] if row.ranks is None else pytest.mark.slow)
                                 for row in ROWS])
def test_one_line_says_what_to_do(row, tmp_path, request, monkeypatch, capsys):
    """On every rank: no status 0, no hang, no traceback. On all together: one line. On disk: all that was finished."""
    folder = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(row.start or ("stopped" if row.arguments.startswith(RESUME) else "fresh")), folder)
    row.damage(folder)
    before = changes(folder)
    statuses, lines, shown = ended(row, folder, monkeypatch, capsys)
    assert len(lines) == 1, "\n".join(lines)
    said = "train_gpt.py: " if row.message == "interrupted" else "train_gpt.py: error: "
    assert re.fullmatch(said + pattern(row.message), lines[0]), lines[0]
    assert len(lines[0]) < 400
    assert statuses == list(row.statuses or [1] * max(row.ranks or 0, 1))
    written = set(folder.rglob("*")) - before.keys()
    if row.steps is None:
        assert changes(folder) == before and not shown
        return
    assert before.keys() <= set(folder.rglob("*"))
    logs = [path for path in written if path.is_file() and path.parent == folder / ATTEMPTS]
    steps, last = finished(*logs)
    assert steps == list(range(1, row.steps + 1)) or "between scatter" in row.name and rank_0_went_on(row, steps)
    assert re.fullmatch(pattern(row.last or f"stopped: {row.message}"), last)
    assert last == row.last or last != "complete: yes"
    checkpoints = {path for path in written if path.parent.suffix == ".checkpoint" and path.suffix != ".partial"}
    assert sorted(path.name for path in checkpoints) == list(row.kept)
    for path in checkpoints:
        assert sorted(part.name for part in path.iterdir()) == ["about.json", "rank0.pt", "rank1.pt"]


def test_the_schedule_that_is_proposed_fits(fresh, monkeypatch):
    monkeypatch.chdir(fresh)
    cfg = functools.reduce(tg.override, [*TINY, *SETTINGS, "stages.0.steps=99"], replace(tg.CPU, data="corpus"))
    train = tg.find_data(cfg).train
    with pytest.raises(tg.UserError) as refusal:
        tg.check_schedule(cfg, train, 1)
    proposed = str(refusal.value).split("this would fit: ")[1].split("--set ")[1:]
    shorter = functools.reduce(tg.override, map(str.strip, proposed), cfg)
    assert 20 < shorter.steps == tg.count_batches(shorter, train, 1)
    tg.check_schedule(shorter, train, 1)


@pytest.mark.slow
def test_patience_ends(fresh, tmp_path):
    """With a rank that lives and says nothing, which neither torchrun nor the backend ends."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    faults = {0: Put("PATIENCE", timedelta(seconds=15)), 1: At("Exchange.gather", 5, fall_silent)}
    with launch(folder, world=2, faults=faults) as run:
        run.processes[0].join(WAIT)
        assert [process.exitcode for process in run.processes] == [1, None]
        assert re.fullmatch(f"train_gpt.py: error: {pattern(LOST)}\n", run.err)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_step_is_on_disk_when_it_is_done(fresh, tmp_path, step):
    """The first process dies as soon as it has handed the step's line on: no line waits in a buffer."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, faults={0: At("RunLog.progress", step, die)}) as run:
        assert run.wait() == [-signal.SIGKILL]
    assert finished(next(folder.glob(f"{ATTEMPTS}/*.txt")))[0] == list(range(1, step + 1))


@pytest.mark.slow
def test_ctrl_c_while_one_rank_waits_for_another(fresh, tmp_path):
    """As a terminal sends it, to all at once, rank 0 deep in a collective that rank 1 does not come to."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, world=2, faults={1: At("train_step", 5, partial(time.sleep, 60))}) as run:
        end = time.monotonic() + WAIT
        while not any(finished(log)[0][-1:] == [4] for log in folder.glob(f"{ATTEMPTS}/*.txt") if log.stat().st_size):
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.2)
        for process in run.processes:
            os.kill(process.pid, signal.SIGINT)
        assert run.wait() == [130, 130]
        assert run.err == "train_gpt.py: interrupted\n"
    assert finished(next(folder.glob(f"{ATTEMPTS}/*.txt"))) == ([1, 2, 3, 4], "stopped: interrupted")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_said_by_the_line_that_meets_it(tmp_path):
    with pytest.raises(tg.UserError, match=r"cannot write the log .*run\.txt: No space left on device; .* make room"):
        with tg.RunLog(tmp_path, 8, "run") as log:
            log.file.close()
            log.file = open("/dev/full", "w", buffering=1)
            log.write("step:1/8")


def test_why_a_run_stopped_is_logged_without_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tg.UserError):
        with tg.RunLog(tmp_path / "logs", 8, "run"):
            raise tg.UserError(f"{tmp_path}/corpus/x.bin: damaged")
    assert (tmp_path / "logs/run.txt").read_text() == "stopped: corpus/x.bin: damaged\n"
