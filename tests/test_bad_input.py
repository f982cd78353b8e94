"""Tests every way in which input or environment can be wrong: one table of cases with the exact message.

In a message <n> stands for a number, and <log>, <why> and the like for any text. All other words appear as
they are, after "train_gpt.py: error: ". By default a case runs the command line of a tiny run in this
process, ends with status 1 and writes nothing. `ranks` starts that many processes instead (0: one, without
torchrun's environment). `steps`: a log is written, with this many finished steps, and its last line is
"stopped: " and the message.
"""

import functools
import os
import re
import shutil
import signal
import time
import zipfile
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import partial
from typing import Callable

import numpy as np
import pytest
import torch

import train_gpt as tg
from launch import (
    TINY,
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
    no_memory,
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
    statuses: tuple = ()
    steps: int | None = None
    last: str = ""  # last line of the log
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


def write_meta(content):
    return lambda folder: next(folder.glob(f"{FILES}/meta.json")).write_text(content)


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


def swap_shards(folder):
    path = next(folder.glob(f"{FILES}/rank0.pt"))
    shutil.copy(path, path.with_name("rank1.pt"))


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
DONE = f"records/other/{date.today()}_x/seed0_a.txt"
NAMES = tg.CPU.work_order
SETTINGS = ("warmup=false", "microbatches=2", "val_slices=2")

# fmt: off
REBUILD = "delete it, and download or build it again"
NOT_A_SHARD = f"not a token shard (its first word is not 20240520); {REBUILD}"
OUTSIDE = ("token 300 is outside the vocabulary of 257; the file is damaged or made with another tokenizer: "
           "build it again")
NO_SHARDS = ("make them with data/fineweb.py (record), data/local_corpus.py (cpu), data/tokenize_text.py "
             "(your text) or data/synthetic.py (random tokens), or use another --data")
CANNOT_FIT = ("the training documents, of which at most 40 tokens each are used, give {have} of the "
              "schedule's {need} batches, <n> tokens; add text or cut long documents into passages as "
              "data/tokenize_text.py does")
NEEDS = "cannot read corpus/vocabulary.txt"
NO_PREFIXES = ("make it with the script in data/ that made the shards, or train without one: --set "
               "samples=0 --set stages.*.prefix_start=0 --set stages.*.prefix_end=0")
MATCHING = "choose the matching --preset or --data"
MORE_DOCS = "cu_seqlens room for {room}; use --set max_docs=128"
WRITABLE = "give a file in a folder that can be written to"
FLOATS = "bfloat16, float32, float64"
CHANGE = "change one of these numbers"
ONCE = "it must name each parameter exactly once"
SIZES = "must be even, head_dim={head_dim} a multiple of 4, their product at least 12"
UNSAVED = "which no layer above it saves"
ADVICE = "lower the learning rate that was raised last, or look at that batch"
TORCHRUN = "not a number of processes; start with torchrun, or unset it"
MEET = "the 2 processes cannot meet: <why>; start them with torchrun, and do not use another run's port"
OTHER_RUN = "give its options, its data and as many processes"
SAME = "start all machines with the same script, options, torch and data"
NO_MEMORY = ("out of memory: <why>; use more processes, or shrink what grew last (head_chunk, "
             "batch_tokens, the model)")
NO_LOG = f"cannot write the log {ATTEMPTS}/<log>: <why>"
NO_SCREEN = "cannot write to the screen: Broken pipe; send the output to a file"
NO_CHECKPOINT = ("no checkpoint there; give the log's folder of a run started with --checkpoint-every that "
                 "did not finish")
DAMAGED = f"is damaged: <why>; remove {RUN}, and start again"
LOST = ("another process of this run was killed or failed (<why>); look for its own message, and start "
        "the run again")

CASES = [
    # data
    Case("no shards", "--data nowhere", f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}"),
    Case("no shards for one rank", "", f"no train shards (*_train_*.bin) in nowhere: {NO_SHARDS}",
         ranks=2, rank_arguments={1: ["--data", "nowhere"]}),
    Case("no validation shard", "", f"no val shards (*_val_*.bin) in corpus: {NO_SHARDS}",
         lambda folder: (folder / VAL).unlink()),
    Case("a truncated shard", "",
         f"{SECOND}: 13014 bytes, but its header declares 6000 tokens, 13024; {REBUILD}",
         truncate(SECOND, 13014)),
    *[Case(f"a shard of 6000 tokens with {count} in its header", "",
           f"{SECOND}: 13024 bytes, but its header declares {count} tokens, {1024 + 2 * count}; {REBUILD}",
           set_word(SECOND, 2, count)) for count in (5000, 7000)],
    Case("not a shard", "", f"{VAL}: {NOT_A_SHARD}", write_text(VAL, "<!DOCTYPE html>")),
    Case("an empty shard", "", f"{FIRST}: {NOT_A_SHARD}", write_text(FIRST, "")),
    Case("a shard of another version", "",
         f"{FIRST}: shard format version 7, this script reads 1; build it again", set_word(FIRST, 1, 7)),
    Case("a shard that is a broken link", "",
         "corpus/x_train_9.bin: No such file or directory; download or build the data again",
         lambda folder: (folder / "corpus/x_train_9.bin").symlink_to("gone")),
    Case("a token outside the vocabulary", "", f"{FIRST}: {OUTSIDE}", set_token(FIRST, 5999, 300)),
    Case("such a token in a shard that is reached in mid-run", "--set stages.3.steps=10",
         f"{SECOND}: {OUTSIDE}", set_token(SECOND, 5999, 300)),
    Case("such a token in validation", "", f"{VAL}: {OUTSIDE}", set_token(VAL, 5, 300), steps=0),
    Case("too little training data", "--set stages.0.steps=99",
         f"corpus: {CANNOT_FIT.format(have='<n>', need=105)}; this would fit: --set stages.0.steps=<n> --set "
         "stages.1.steps=<n> --set stages.2.steps=<n> --set stages.3.steps=<n>"),
    Case("training data of long documents, for several ranks", "",
         f"corpus: {CANNOT_FIT.format(have=0, need=8)}", long_documents, ranks=2),
    Case("too little validation data", "--set val_slices=9",
         "corpus: 1,500 validation tokens, of 2,305 needed; add validation shards, or --set val_slices=5"),
    Case("a validation token too few", "--set val_slices=1 --set val_slice_tokens=1500",
         "corpus: 1,500 validation tokens, of 1,501 needed; add validation shards"),
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
    Case("a trace of steps after the last", "--profile 6",
         "--profile 6 traces steps 6 to 9, the run has steps 0 to 7; give an earlier one"),
    Case("an unknown preset", "--preset huge",
         "argument --preset: invalid choice: 'huge' (choose from <presets>); -h lists the options"),
    Case("an unknown option", "--nmae x", "unrecognized arguments: --nmae x; -h lists the options"),
    Case("an option without its value", "--seed",
         "argument --seed: expected one argument; -h lists the options"),
    Case("a seed that is no number", "--seed one",
         "argument --seed: give a whole number, 0 or more, not 'one'; -h lists the options"),
    Case("a name that cannot be a folder's", "--name ../up",
         "--name '../up': letters, digits, and . _ - only: it becomes a folder's name; -h lists the options"),
    Case("checkpoints every 0 steps", "--checkpoint-every 0",
         "argument --checkpoint-every: give a whole number, 1 or more, not '0'; -h lists the options"),
    Case("--save to no folder", "--save no/model.pt", f"--save no/model.pt: {WRITABLE}"),
    Case("--save to a folder", "--save corpus", f"--save corpus: {WRITABLE}"),
    Case("a model that cannot be written", "--save model.pt",
         "--save model.pt: No space left on device; the run itself is complete, its log is <log>",
         ranks=2, faults={0: FaultAtCall("save_model", 1, disk_full)}, statuses=(1, 0), steps=8,
         last="complete: yes"),
    Case("a seed done before", "--name x",
         f"{DONE} is a complete run with this seed; choose another --seed or --name",
         write_text(DONE, "complete: yes\n")),
    # settings
    *[Case(f"--set {setting}", f"--set {setting}", f"--set {message}") for setting, message in (
        ("adam_lr", "adam_lr: write name=value"),
        ("=1", ": unknown; use the fields of Config"),
        ("adm_lr=1", "adm_lr: unknown; use adam_lr, muon_lr, adam_wd"),
        ("foo=1", "foo: unknown; use the fields of Config"),
        ("track=../elsewhere", "track: it follows from --preset"),
        ("stages.0.stepz=1", "stages.0.stepz: unknown; use stages.0.steps, <others>"),
        ("params.embd.lr_mul=1", "params.embd.lr_mul: unknown; use params.embed.lr_mul, <others>"),
        ("params.0.lr_mul=1", "params.0.lr_mul: unknown; use params.embed.lr_mul, <others>"),
        ("stages.9.steps=1", "stages.9.steps: unknown; use stages.3.steps, stages.2.steps, stages.1.steps"),
        ("stages.0=1", "stages.0: unknown; use stages.0.steps, stages.0.lr_mul, stages.0.mtp_end"),
        ("stages.1.param_lr_mul=2", "stages.1.param_lr_mul: unknown; use stages.1.param_lr_mul.*, <others>"),
        ("params.embed.*=2", "params.embed.*: unknown; use params.embed.<others>"),
        ("val_windows=3,4", "val_windows: unknown; use val_windows.*, past_windows, dc_window"),
        ("adam_lr.x=1", "adam_lr.x: unknown; use adam_lr, adam_wd"),
        ("microbatches=1.5", "microbatches=1.5: microbatches takes a value of type int"),
        ("val_windows.long=b", "val_windows.long=b: val_windows.long takes a value of type int"),
        ("params.embed.betas=.9,b", "params.embed.betas=b: params.embed.betas takes a value of type float"),
        ("warmup=maybe", "warmup=maybe: warmup takes true or false"))],
    # a config that contradicts itself
    *[Case(f"an unknown choice: {setting}", f"--set {setting}", f"{setting}: use {choices}")
      for setting, choices in (
        ("dtype=float16", FLOATS),
        ("muon_dtype=int8", FLOATS),
        ("attention=sparse", "dense, varlen, fa3"),
        ("layers.0.attention=piared", "plain, paired, None"),
        ("layers.1.window=wide", "short, long, or add it to windows of every stage and to val_windows"),
        ("layers.0.reads=bakc", "stream, back"),
        ("params.scalars.optimizer=sgd", "adam, normuon"),
        ("params.scalars.exchange=reduce", "all_reduce, reduce_scatter, sparse"),
        ("params.post_lambdas.tied_to=resid_lambdas", "nothing, lm_head"),
        ("params.scalars.reduction=fp16", "backend, fp32"))],
    Case("no value table", "--set layers.*.value=none",
         "layers.10 has connections: it needs a value table, and a layer above it with saves=back"),
    Case("a window that validation lacks", "--set stages.*.windows.wide=1",
         "stages.0.windows and val_windows differ in wide: name the same windows"),
    Case("another rate for an unknown parameter", "--set stages.1.param_lr_mul.qk=2",
         "stages.1.param_lr_mul: unknown qk; use names of the parameter table"),
    Case("an unknown kernel", "--set kernels=gram,transpse",
         "kernels.1=transpse: use gram, relu_square, softcap_loss, segment_sum_rows, compose_heads"),
    *[Case(f"outside: {setting}", f"--set {setting}", f"{setting} must be finite, and at least {least}")
      for setting, least in (
        ("head_chunk=0", 1), ("max_docs=-5", 0), ("stages.1.steps=-1", 0), ("microbatches=0", 1),
        ("stages.2.batch_tokens=0", 1), ("cooldown_frac=-0.5", 0), ("val_windows.short=-1", 1),
        ("stages.0.windows.long=0", 1), ("adam_lr=nan", 0), ("adam_lr=-inf", 0), ("muon_lr=inf", 0))],
    Case("a name missing in the order", f"--set work_order={','.join(NAMES[1:])}",
         f"work_order: {NAMES[0]}: {ONCE}"),
    Case("an unknown name in the order", f"--set work_order={','.join(NAMES)},ghost",
         f"work_order: ghost: {ONCE}"),
    Case("a name twice in the order", f"--set work_order={','.join(NAMES)},embed",
         f"work_order: embed: {ONCE}"),
    Case("a renamed parameter", "--set params.embed.name=ghost", f"parameter table: embed, ghost: {ONCE}"),
    Case("heads that cannot be paired", "--set heads=3", f"heads=3 {SIZES.format(head_dim=8)}"),
    Case("a head dimension without quarters", "--set head_dim=30", f"heads=2 {SIZES.format(head_dim=30)}"),
    Case("too narrow for gates", "--set head_dim=4", f"heads=2 {SIZES.format(head_dim=4)}"),
    Case("a vocabulary larger than its padding", "--set padded_vocab=100",
         "bos_id=256 < vocab_size=257 <= padded_vocab=100 must hold"),
    Case("a layer that reads what is not saved", "--set layers.2.reads=back",
         f"layers.2 uses back, {UNSAVED}"),
    Case("a layer that adds what is not saved", "--set layers.6.adds=none --set layers.1.adds=skip",
         f"layers.1 uses skip, {UNSAVED}"),
    Case("nothing is added", "--set layers.6.adds=none",
         "layer table: exactly one layer must have adds=skip"),
    Case("nothing is saved", "--set layers.7.saves=none",
         "layer table: exactly one layer must have saves=back"),
    Case("no connections", "--set layers.*.connections=false",
         "layer table: exactly one layer must have connections=True"),
    Case("connections too early", "--set layers.10.connections=false --set layers.1.connections=true",
         "layers.1 has connections: it needs a value table, and a layer above it with saves=back"),
    Case("connections without values",
         "--set layers.10.connections=false --set layers.10.value=none --set layers.7.connections=true",
         "layers.7 has connections: it needs a value table, and a layer above it with saves=back"),
    Case("a gate without attention", "--set layers.6.gate=true", "layers.6 has a gate, but no attention"),
    Case("a first layer without attention", "--set layers.0.attention=none",
         "layers.0 has no attention; the first layer needs it"),
    Case("XSA in paired attention", "--set layers.0.xsa=true",
         "layers.0.xsa=true: only for plain attention"),
    Case("more signs than their hash reaches", "--set sign_rows=65537", "sign_rows=65537: use at most 65536"),
    Case("values without attention", "--set layers.1.value=none --set layers.6.value=0",
         "layers.6 has a value table, but no attention"),
    Case("a key shift in paired attention", "--set layers.0.key_shift=true",
         "layers.0.key_shift=true: only for plain attention"),
    Case("misnumbered value tables", "--set layers.1.value=4",
         "layer table: value tables are [4, 1, 2, 3, 4]; number them 0, 1, ... and use each once"),
    Case("weights of more losses at a stage's start", "--set stages.0.mtp_end=1",
         "stages.0: mtp_start and mtp_end must have as many weights, at least one"),
    Case("one beta", "--set params.embed.betas=0.9", "params.embed.betas=(0.9,): Adam takes two below 1"),
    Case("NorMuon for a table", "--set params.embed.optimizer=normuon",
         "params.embed.optimizer=normuon: only for banks of matrices"),
    Case("sparse exchange of what is no table", "--set params.lm_head.exchange=sparse",
         "params.lm_head.exchange=sparse: only for tables"),
    Case("a table in another dtype", "--set params.lm_head.dtype=float32",
         "params.lm_head.dtype=float32: only for lambdas, scalars, scales"),
    Case("micro-batches that do not divide the batches", "--set microbatches=5",
         "stages.0: 192 tokens of a batch do not divide into 5 micro-batches, at least one a process"),
    *[Case(f"{world_size} processes: {message}", arguments, message,
           environment={"WORLD_SIZE": str(world_size)}) for world_size, arguments, message in (
        (3, "", "stages.1: 256 tokens of a batch do not divide into 3 micro-batches, at least one a process"),
        (3, "--set microbatches=4", f"3 processes cannot share 4 micro-batches; {CHANGE}"),
        (4, "--set bigram_vocab_size=322 --set microbatches=4",
         f"4 processes cannot share 322 rows of bigram_embed; {CHANGE}"),
        (2, "--set padded_vocab=265", f"2 processes cannot share 265 rows of value_embeds; {CHANGE}"))],
    # numbers that go wrong
    Case("too large for any memory", "--set mlp_dim=20000000000", NO_MEMORY, steps=0),
    Case("too large for one rank", "", NO_MEMORY, ranks=2,
         faults={1: FaultAtCall("GPT.head_loss_and_grad", 2, no_memory)}, steps=1, last=f"stopped: {LOST}"),
    Case("a training loss that is not finite", "--set adam_lr=1e30",
         f"train_loss is <value> at step 3; {ADVICE}", ranks=2, steps=2),
    Case("a validation loss that is not finite", "--set attn_scale=1e39",
         "the validation loss is <value> at step 0; undo what was changed last, learning rates first",
         steps=0),
    Case("a weight that is not finite at a checkpoint", f"--set adam_lr=1e38 {EVERY}",
         "<name> is not finite after step 2, which was not saved; lower the learning rate that was raised "
         "last", steps=2),
    # ranks that do not fit together
    *[Case(f"WORLD_SIZE={value}", "", f"WORLD_SIZE={value}: {TORCHRUN}", environment={"WORLD_SIZE": value})
      for value in ("two", "0")],
    Case("WORLD_SIZE alone", "", MEET, environment={"WORLD_SIZE": "2"}),
    Case("an invalid MASTER_PORT", "", MEET,
         environment={"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1x"}),
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
          ("in mid-run", 2, 0, "step:5/8 <time>"), ("within a line", 0, 9, "step:6/8 "))],
    Case("a closed screen", "", NO_SCREEN, ranks=2, faults={0: lose_reader}, steps=0),
    Case("a screen closed at the end", "", NO_SCREEN, ranks=2,
         faults={0: FaultAtCall("Path.rename", 1, lose_reader)}, statuses=(1, 0), steps=8,
         last="complete: yes"),
    *[Case(f"a disk too full for rank {rank}'s checkpoint", EVERY,
           f"cannot write the checkpoint {RUN}/step00000004: No space left on device; make room, in a folder "
           "that all machines see, and go on from the one before with --resume", ranks=2,
           faults={rank: FaultAtCall("torch.save", 2, disk_full)}, steps=4, kept=("step00000002",))
      for rank in (0, 1)],
    # --resume
    Case("--resume without a checkpoint", "--resume nowhere", f"--resume nowhere: {NO_CHECKPOINT}"),
    Case("--resume of several runs", RESUME,
         f"{RESUME}: several runs have checkpoints; name one: {RUN}, {ATTEMPTS}/seed1_b.checkpoint",
         another_run),
    Case("--resume with a name", f"{RESUME} --name x",
         "--name and --resume: a resumed run's log goes beside the first one; leave --name out; -h lists the "
         "options"),
    Case("--resume with nothing", "--resume=",
         "--resume and --init: give a path, not nothing; -h lists the options"),
    Case("--check with no model", "--check 2 --init no.pt",
         "cannot load no.pt: No such file or directory; give a file that --save of this script wrote"),
    Case("--resume with --profile", f"{RESUME} --profile",
         "--profile and --resume: trace a run from its start; leave one of them out; -h lists the options"),
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
    Case("--resume with another vocabulary", RESUME,
         f"{HEAD} is of another run (there, here): vocabulary (<n>, <n>); {OTHER_RUN}",
         write_text("corpus/vocabulary.txt", "61\n" * 257)),
    Case("--resume with fewer processes", RESUME,
         f"{HEAD} is of another run (there, here): processes (2, 1); {OTHER_RUN}", fixture="stopped_pair"),
    Case("--resume with more processes", RESUME,
         f"{HEAD} is of another run (there, here): processes (1, 2); {OTHER_RUN}", ranks=2),
    *[Case(f"a meta.json that is {what}", RESUME, f"{HEAD}/meta.json {DAMAGED}", write_meta(content))
      for what, content in (("truncated", '{"step": 2'), ("empty", "{}"), ("a list", "[]"))],
    Case("no meta.json", RESUME,
         f"cannot read {HEAD}/meta.json: No such file or directory; is the run still going?",
         lambda folder: next(folder.glob(f"{FILES}/meta.json")).unlink()),
    Case("a shard with a flipped bit", RESUME, f"{HEAD}/rank0.pt {DAMAGED}", flip_bit, steps=0),
    Case("a shard that would run code", RESUME, f"{HEAD}/rank0.pt {DAMAGED}",
         change_shard(lambda state: state.update(more=CodeInPickle())), steps=0),
    Case("a shard of another script", RESUME,
         f"{HEAD}/rank0.pt lacks what this script saves: 'embed'; resume with the script that wrote it, "
         "which the log holds",
         change_shard(lambda state: state["model"].pop("embed")), steps=0),
    Case("one rank's shard is truncated", RESUME, f"{HEAD}/rank1.pt {DAMAGED}",
         truncate(f"{FILES}/rank1.pt", 999), fixture="stopped_pair", ranks=2, steps=0),
    Case("another rank's shard", RESUME,
         f"{HEAD}/rank1.pt is damaged: rank 0's share; remove {RUN}, and start again", swap_shards,
         fixture="stopped_pair", ranks=2, steps=0),
    Case("no shard", RESUME,
         f"cannot read {HEAD}/rank0.pt: No such file or directory; is the run still going, and do all "
         "machines see its folder?", lambda folder: next(folder.glob(f"{FILES}/rank0.pt")).unlink(), steps=0),
    # Ctrl-C: the message is no error
    Case("Ctrl-C, one process", "", "interrupted",
         ranks=0, faults={0: FaultAtCall("train_step", 5, interrupt)}, statuses=(130,), steps=4),
    Case("Ctrl-C before there is a log", "", "interrupted",
         ranks=0, faults={0: FaultAtCall("open_dataset", 1, interrupt)}, statuses=(130,)),
    Case("Ctrl-C", "", "interrupted", ranks=2,
         faults=dict.fromkeys((0, 1), FaultAtCall("train_step", 5, interrupt)), statuses=(130, 130), steps=4),
    Case("Ctrl-C in rank 0", "", "interrupted", ranks=2,
         faults={0: FaultAtCall("train_step", 5, interrupt)}, statuses=(130, 1), steps=4),
    Case("Ctrl-C in rank 1", "", "interrupted", ranks=2,
         faults={1: FaultAtCall("train_step", 5, interrupt)}, statuses=(1, 130), steps=4,
         last=f"stopped: {LOST}"),
    # a rank is killed: when, by which call; the log's finished steps; complete checkpoints
    *[Case(f"rank {rank} of {world_size} killed {when}", arguments, LOST, ranks=world_size,
           faults={rank: FaultAtCall(where, call, do)}, steps=steps,
           statuses=tuple(-signal.SIGKILL if r == rank else 1 for r in range(world_size)),
           last="" if rank else "<line>", kept=kept)
      for rank, world_size, when, arguments, where, call, do, steps, kept in (
          (1, 2, "at the data", "", "open_dataset", 1, die_late, None, ()),
          (1, 2, "at the log", "", "open_log", 1, die, 0, ()),
          (0, 2, "at the model", "", "Exchange.gather", 3, die, 0, ()),
          (1, 2, "in warm-up", "--set warmup=true", "train_step", 2, die, 0, ()),
          (0, 2, "in the first step", "", "GPT.head_loss_and_grad", 1, die, 0, ()),
          (1, 2, "in a later step", "", "GPT.head_loss_and_grad", 5, die, 4, ()),
          (1, 2, "before its thread sends row counts", "", "Exchange.send_ids", 3, die, 1, ()),
          (0, 2, "before its thread sends row ids", "", "Exchange.send_numbers", 6, die, 1, ()),
          (0, 2, "between two tables' rows", "", "Optimizer.grad_of", 19, die, 1, ()),
          (0, 2, "between scatter and gather", "", "Exchange.gather", 12, die, 1, ()),
          (1, 2, "between scatter and gather", "", "Exchange.gather", 12, die, 1, ()),
          (3, 4, "between scatter and gather", "", "Exchange.gather", 12, die, 1, ()),
          (1, 2, "in validation", "", "Exchange.all_reduce", 2, die, 3, ()),
          (0, 2, "while it writes a checkpoint", EVERY, "torch.save", 2, die, 4, ("step00000002",)),
          (1, 2, "while it writes a checkpoint", EVERY, "torch.save", 2, die, 4, ("step00000002",)))],
]
# fmt: on


# ---- tests -------------------------------------------------------------------------------------------------


def pattern(message):
    """Returns the regular expression of a message with <placeholders>."""
    return re.sub(r"<(\w+)>", lambda part: r"[\d,]+" if part[1] == "n" else ".+", re.escape(message))


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
    """Returns exit statuses, lines of stderr, and whether there was output on stdout."""
    if case.ranks is None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        status = tg.main(command_line(case.arguments.split()))
        out, err = capsys.readouterr()
        return [status], err.splitlines(), bool(out)
    options = {"world_size": case.ranks, "faults": case.faults, "rank_arguments": case.rank_arguments}
    with launch(folder, *case.arguments.split(), **options) as run:
        return run.wait(), run.err.splitlines(), bool(run.out)


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


@pytest.mark.parametrize("case", PARAMETERS)
def test_one_line_says_what_to_do(case, tmp_path, request, monkeypatch, capsys):
    """Every rank fails and none hangs. Together they print one line. What was finished is on disk."""
    folder, fixture = tmp_path / "run", "stopped" if case.arguments.startswith(RESUME) else "fresh"
    shutil.copytree(request.getfixturevalue(case.fixture or fixture), folder)
    case.corrupt(folder)
    before = change_times(folder)
    statuses, lines, printed = run_case(case, folder, monkeypatch, capsys)
    assert len(lines) == 1, "\n".join(lines)
    prefix = "train_gpt.py: " if case.message == "interrupted" else "train_gpt.py: error: "
    assert re.fullmatch(prefix + pattern(case.message), lines[0]), lines[0]
    assert len(lines[0]) < 400
    assert statuses == list(case.statuses or [1] * max(case.ranks or 0, 1))
    written = set(folder.rglob("*")) - before.keys()
    if case.steps is None:
        assert change_times(folder) == before and not printed
        return
    assert before.keys() <= set(folder.rglob("*"))
    logs = [path for path in written if path.is_file() and path.parent == folder / ATTEMPTS]
    steps, last = finished_steps(*logs)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) in possible_steps(case)
    assert re.fullmatch(pattern(case.last or f"stopped: {case.message}"), last)
    assert last == case.last or last != "complete: yes"
    checkpoints = {
        path for path in written if path.parent.suffix == ".checkpoint" and path.suffix != ".partial"
    }
    assert sorted(path.name for path in checkpoints) == list(case.kept)
    for path in checkpoints:
        assert sorted(part.name for part in path.iterdir()) == ["meta.json", "rank0.pt", "rank1.pt"]


def test_the_proposed_schedule_fits(fresh, monkeypatch):
    monkeypatch.chdir(fresh)
    cfg = functools.reduce(
        tg.override, [*TINY, *SETTINGS, "stages.0.steps=99"], replace(tg.CPU, data="corpus")
    )
    train = tg.open_dataset(cfg).train
    with pytest.raises(tg.UserError) as error:
        tg.check_schedule(cfg, train, 1)
    proposed = str(error.value).split("this would fit: ")[1].split("--set ")[1:]
    shorter = functools.reduce(tg.override, map(str.strip, proposed), cfg)
    assert 20 < shorter.steps == tg.count_batches(shorter, train, 1)
    tg.check_schedule(shorter, train, 1)


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
        assert re.fullmatch(f"train_gpt.py: error: {pattern(LOST)}\n", run.err)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_finished_step_is_on_disk(fresh, tmp_path, step):
    """The process dies right after it logs the step: no line waits in a buffer."""
    folder = tmp_path / "run"
    shutil.copytree(fresh, folder)
    with launch(folder, faults={0: FaultAtCall("RunLog.progress", step, die)}) as run:
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
        assert run.wait() == [130, 130]
        assert run.err == "train_gpt.py: interrupted\n"
    (log,) = folder.glob(f"{ATTEMPTS}/*.txt")
    assert finished_steps(log) == ([1, 2, 3, 4], "stopped: interrupted")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_at_once(tmp_path):
    """By the first line that cannot be written."""
    message = r"cannot write the log .*run\.txt: No space left on device; .* make room"
    with pytest.raises(tg.UserError, match=message):
        with tg.RunLog(tmp_path, 8, "run") as log:
            log.file.close()
            log.file = open("/dev/full", "w", buffering=1)
            log.print0("step:1/8", console=False)


def test_why_a_run_stopped_is_logged_without_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tg.UserError):
        with tg.RunLog(tmp_path / "logs", 8, "run"):
            raise tg.UserError(f"{tmp_path}/corpus/x.bin: damaged")
    assert (tmp_path / "logs/run.txt").read_text() == "stopped: corpus/x.bin: damaged\n"
