"""
A NanoGPT speedrun in one file: trains a GPT-2-small-class language model on FineWeb to a validation loss of 3.28 nats
per token, in as little time as possible on 8 H100s, and runs the same steps, in plain torch, on a two-core laptop.

    torchrun --standalone --nproc_per_node=8 train_gpt.py                  # the record preset, 8 GPUs, FineWeb
    torchrun --standalone --nproc_per_node=2 train_gpt.py --preset cpu     # the cpu preset, no GPU, the built-in corpus
    python train_gpt.py -h

What it attains
    cpu preset     1.046 nats per token on the Python library's own text (mean of 5 runs, sd 0.009; a 4-gram count model has
                   1.47), 440 steps, 150 s on two cores of an AMD EPYC server, PyTorch 2.13, two processes
    record preset  not timed on GPUs yet. The configuration is that of the public speedrun's record 80, which took 84.4 s on
                   8 H100s

Map of the file; a section uses only what stands above it
    1  This text, imports
    2  Config       presets, layer table, parameter table, stage table; --set name=value; errors meant for people
    3  Schedule     plan(cfg, step): learning rate, windows, batch size, loss weights of one step
    4  Runtime      ranks and devices, the log
    5  Data         shards, slices of whole documents, the bigram index
    6  Reference    the operations in plain torch: attention, the head's loss, sums of rows, polar factor
    7  Kernels      section 6 in Triton; which forms a run uses; products that write their weight's gradient in place
    8  Model        rotary tables, the trunk, training and validation loss
    9  Exchange     averages gradients over ranks, whole or by touched rows, gathers updated parameters
    10 Update rules Adam and NorMuon on one shard
    11 Optimizer    scatter, work, gather, in explicit orders
    12 Step         train_step, validate
    13 Main         build, warm up, reset, timed loop, summary

Everything that is computed follows the public NanoGPT speedrun (github.com/KellerJordan/modded-nanogpt, commit 2c702746,
"the reference" below). Sources of single methods are named where they are used: "PR 130" is a pull request there, "record 9"
an entry of its table of records. Shapes in comments: T tokens of one
micro-batch, d = H * D model width, H heads of D, L layers, V rows of the padded vocabulary.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import gc
import glob
import hashlib
import inspect
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import typing
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch's CPU build brings none
    triton = None


# ======================================================================================================================
# 2  Config. What a reader edits: one table each for layers, parameters and stages; every other number is a field.
# ======================================================================================================================

class UserError(Exception):
    """Something a person can mend. The message is one line: what is wrong, and what to do."""


def brief(error: Exception) -> str:
    """The gist of a library's error: its first sentence, without the place and the test in the library's source."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    sentences = (str(error) or type(error).__name__).splitlines()[0].split("] ", 1)[-1].split(". ")
    return next((sentence for sentence in sentences if sentence and "==" not in sentence), type(error).__name__)


@dataclass(frozen=True)
class Layer:
    attention: str | None = "plain"  # plain, paired (two heads share one stream of twice the length), None (MLP only)
    window: str = "short"            # short or long; long plain layers also shift half of each key by one token
    value: int | None = None         # the value embedding table added to this layer's values
    reads: str = "stream"            # what attention reads: the stream, or the saved "back"
    saves: str | None = None         # name under which the stream after this layer's MLP is kept: skip or back
    adds: str | None = None          # a saved activation added, gated, to the stream before the layer: skip


LAYERS = (
    Layer("paired"),
    Layer("plain", value=0),
    Layer("paired", value=1),
    Layer("plain", "long", saves="skip"),
    Layer("plain"),
    Layer("paired"),
    Layer(None, adds="skip"),
    Layer("plain", saves="back"),
    Layer("plain", value=2, reads="back"),
    Layer("paired", value=3, reads="back"),
    Layer("plain", "long", value=4, reads="back"),
)


@dataclass(frozen=True)
class Param:
    name: str
    optimizer: str                        # adam or normuon
    exchange: str                         # all_reduce: every rank updates it all; the others: each rank a block of it,
                                          # whose gradient comes by reduce_scatter, or, sparse, as the rows that were touched
    betas: tuple[float, ...] = ()         # Adam's
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    dtype: str = "model"                  # model: the config's dtype; float32
    tied_to: str = ""                     # until the split step this is the transpose of that parameter
    reduction: str = "backend"            # backend: its own order and rounding; fp32, as sparse ever: by us, in rank order
    rows: str = ""                        # of a table: what numbers its rows, the inputs' tokens or bigrams
    product: bool = False                 # a matrix product's weight, or a bank of them: its backward writes the gradient
    matrix_lr_mul: tuple[float, ...] = () # NorMuon: factors of successive matrices, repeating

    @property
    def sharded(self) -> bool:
        return self.exchange != "all_reduce"

    @property
    def in_place(self) -> bool:
        """Whether its gradient can go to main_grad, past autograd."""
        return self.product or bool(self.rows)


PARAMS = (
    #     name              optimizer   exchange          betas        lr_mul  wd_mul
    Param("scalars",        "adam",    "all_reduce",     (.90, .99),   5.00,    0, "float32"),
    Param("smear_gate",     "adam",    "all_reduce",     (.90, .99),   0.01,    0),
    Param("skip_gate",      "adam",    "all_reduce",     (.90, .99),   0.05,    0),
    Param("attn_gate_bank", "adam",    "all_reduce",     (.90, .99),   1.00,    1),
    Param("ve_gate_bank",   "adam",    "all_reduce",     (.90, .99),   1.00,    1),
    Param("post_lambdas",   "adam",    "all_reduce",     (.90, .95),   1.00,    0, "float32"),
    Param("x0_lambdas",     "adam",    "all_reduce",     (.90, .95),   1.00,    0, "float32"),
    Param("bigram_lambdas", "adam",    "all_reduce",     (.90, .95),   1.00,    0, "float32"),
    Param("resid_lambdas",  "adam",    "all_reduce",     (.90, .95),   5.00,    0, "float32"),
    Param("value_embeds",   "adam",    "sparse",         (.75, .95),  75.00,    5, rows="tokens"),
    Param("bigram_embed",   "adam",    "sparse",         (.75, .95),  75.00,    5, rows="bigrams"),
    Param("lm_head",        "adam",    "reduce_scatter", (.50, .95),   1.00,  150, product=True),
    Param("embed",          "adam",    "sparse",         (.50, .95),   1.00,  150, rows="tokens", tied_to="lm_head"),
    Param("qk_bank",        "normuon", "reduce_scatter", product=True),
    Param("vo_bank",        "normuon", "reduce_scatter", product=True),
    Param("mlp_bank",       "normuon", "reduce_scatter", product=True, matrix_lr_mul=(1.0, 2.0)),
)


KERNEL_NAMES = ("gram", "relu_square", "softcap_loss", "sum_rows", "transpose")


@dataclass(frozen=True)
class Stage:
    steps: int
    tokens: int                 # per batch, over all ranks and micro-batches
    longest: int                # documents are cut to this many tokens
    short: int                  # attention windows, in units of Config.window_unit tokens
    long: int
    lr_mul: float
    # Weights of the losses on the next, second and third next token. The later ones teach more a token while there is much to
    # learn, and fade, for the next token alone is what counts in the end (PR 178; Gloeckle et al. 2024, arXiv:2404.19737).
    mtp_start: tuple[float, ...]
    mtp_end: tuple[float, ...]    # reached, linearly, at the stage's end


@dataclass(frozen=True)
class Config:
    """One run's settings; a preset is `replace(RECORD, ...)`. Defaults are the 1480-step record configuration."""
    # the task
    preset: str = "record"
    track: str = "gpt2-small"           # folder of records/ that this preset's runs belong to
    data: str = "data/fineweb10B"       # folder with *_train_*.bin and *_val_*.bin
    target: float = 3.28                # mean validation loss, nats per token, that a record must reach
    val_slice_tokens: int = 262144      # one validation forward
    val_slices: int = 40
    val_every: int = 250                # steps; 0: only at the end
    # the model
    vocab_size: int = 50257
    padded_vocab: int = 50304           # rows of the embedding tables, columns of the head; the padding is ordinary
    start_token: int = 50256
    bigram_rows: int = 5 * 50304
    heads: int = 6
    head_dim: int = 128
    mlp_dim: int = 3072
    layers: tuple[Layer, ...] = LAYERS
    window_unit: int = 128
    final_windows: tuple[int, ...] = (6, 20)  # short, long at the final validation
    attn_scale: float = 0.1             # of the softmax before any window grows
    dtype: str = "bfloat16"             # weights and activations: bfloat16, float32, float64
    # The schedule. Batches and windows grow (PR 163, record 13): small ones learn fast while gradients agree, large ones average
    # out noise at the end. The last stage is the extension, trained at the final learning rate.
    stages: tuple[Stage, ...] = (
        Stage(480, 131072,  896, 1,  3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        Stage(480, 262144, 2048, 3,  7, 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage(480, 393216, 2048, 5, 11, 1.73, (1.0,), (1.0,)),
        Stage( 40, 393216, 2048, 6, 13, 0.15, (1.0,), (1.0,)),
    )
    cooldown: float = 0.60              # last part of the scheduled steps, over which the rate falls to final_lr
    final_lr: float = 0.15
    momentum_low: float = 0.85          # low first, and again last: old gradients mislead while the loss falls fast (record 9)
    momentum_high: float = 0.95
    momentum_warmup: int = 300          # steps from low to high
    momentum_cooldown: int = 50         # last steps, back towards low
    slices: int = 8                     # micro-batches of a global batch; at least one a rank. Another number is other data
    doc_slots: int = 0                  # entries of a training slice's cu_seqlens; 0: by its length
    # optimizers
    params: tuple[Param, ...] = PARAMS
    scatter_order: tuple[str, ...] = (
        "qk_bank", "vo_bank", "mlp_bank", "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank",
        "lm_head", "bigram_embed", "post_lambdas", "x0_lambdas", "bigram_lambdas", "resid_lambdas", "value_embeds", "embed")
    work_order: tuple[str, ...] = (
        "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "post_lambdas", "x0_lambdas",
        "bigram_lambdas", "resid_lambdas", "value_embeds", "bigram_embed", "lm_head", "embed", "qk_bank", "vo_bank", "mlp_bank")
    adam_lr: float = 0.008
    adam_eps: float = 1e-10
    adam_wd: float = 0.005
    muon_lr: float = 0.023
    muon_wd: float = 1.2
    muon_beta2: float = 0.9
    polar_dtype: str = "bfloat16"       # arithmetic of the orthogonalisation
    # the run
    warmup: bool = True                 # rehearse every stage off the clock, then reset
    main_grad: bool = True              # gradients of banks, head, tables are written in place; false: autograd adds them up
    delay_head_grad: bool = False       # the head's, of the last micro-batch, is computed while the banks' are exchanged
    head_chunk: int = 8192              # tokens whose logits exist at once; the head's gradient is rounded once for each
    kernels: tuple[str, ...] = KERNEL_NAMES  # operations done in Triton; none: all in plain torch
    attention: str = "varlen"           # dense: plain torch; varlen: torch's FlashAttention; fa3: FlashAttention-3
    fp8: bool = True                    # the head's products in 8 bits, in training
    compile: bool = True                # what stands between products, and the updates, by torch.compile

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def stage_starts(self) -> list[int]:
        return [sum(stage.steps for stage in self.stages[:i]) for i in range(len(self.stages))]


RECORD = Config()

# All layers and every role, at widths that two laptop cores train in three minutes, on bytes. Slices hold 256 and 512
# tokens, so a document gives at most that much; `longest` lies above, for a document may give the last target besides.
CPU = replace(
    RECORD, preset="cpu", track="cpu", data="data/local", target=1.07, val_slice_tokens=4096, val_slices=128,
    vocab_size=257, padded_vocab=264, start_token=256, bigram_rows=16384, heads=2, head_dim=32, mlp_dim=256, window_unit=16,
    attn_scale=0.3, dtype="float32", polar_dtype="float32", momentum_warmup=125, momentum_cooldown=20,
    kernels=(), attention="dense", fp8=False, compile=False,
    stages=(
        Stage(140, 2048,  512, 3,  9, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        Stage(140, 4096, 1024, 4, 10, 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage(140, 4096, 1024, 5, 11, 1.73, (1.0,), (1.0,)),
        Stage( 20, 4096, 1024, 6, 13, 0.15, (1.0,), (1.0,)),
    ))

PRESETS = {"record": RECORD, "cpu": CPU}


def dtype_of(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]


def wide_dtype(cfg: Config) -> torch.dtype:
    """Of moments, lambdas, angles: fp32, or fp64 for an fp64 model."""
    return torch.promote_types(dtype_of(cfg.dtype), torch.float32)


def slices_of(cfg: Config, world: int) -> int:
    return max(cfg.slices, world)


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def param_shapes(cfg: Config, world: int) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter when `world` ranks share it: banks are padded so that each owns equally many whole matrices."""
    d, pair, V, L = cfg.dim, 2 * cfg.head_dim, cfg.padded_vocab, len(cfg.layers)
    attention = sum(layer.attention is not None for layer in cfg.layers)
    tables = sum(layer.value is not None for layer in cfg.layers)
    return {
        "scalars": (2 * L + 3,), "smear_gate": (1, 12), "skip_gate": (1, 12),
        "attn_gate_bank": (attention, cfg.heads, 12), "ve_gate_bank": (tables, cfg.heads, 12),
        "post_lambdas": (L, 2), "x0_lambdas": (L,), "bigram_lambdas": (L,), "resid_lambdas": (L, 2),
        "value_embeds": (V, tables, d), "bigram_embed": (cfg.bigram_rows, d), "lm_head": (d, V), "embed": (V, d),
        "qk_bank": (padded(attention * cfg.heads, world), pair, d),
        "vo_bank": (padded(attention * 2, world), d, d),
        "mlp_bank": (padded(2 * L, math.lcm(2, world)) // 2, 2, cfg.mlp_dim, d),
    }


def check_order(kind: str, order: tuple[str, ...], names: list[str]) -> None:
    for what, wrong in (("twice", {n for n in order if order.count(n) > 1}), ("unknown", set(order) - set(names)),
                        ("missing", set(names) - set(order))):
        if wrong:
            raise UserError(f"{kind}: {what}: {', '.join(sorted(wrong))}; it must name each parameter exactly once")


def check_config(cfg: Config, world: int) -> None:
    """Raises UserError if the tables contradict each other or `world` ranks cannot share the work."""
    names = [row.name for row in cfg.params]
    check_order("parameter table", tuple(names), list(param_shapes(cfg, 1)))
    check_order("scatter_order", cfg.scatter_order, names)
    check_order("work_order", cfg.work_order, names)
    floats = ("bfloat16", "float32", "float64")
    tables = [("", (cfg,), {"dtype": floats, "polar_dtype": floats, "attention": ("dense", "varlen", "fa3")}),
              ("layers", cfg.layers, {"attention": ("plain", "paired", None), "window": ("short", "long"),
                                      "reads": ("stream", "back"), "saves": ("skip", "back", None), "adds": ("skip", None)}),
              ("params", cfg.params, {"optimizer": ("adam", "normuon"), "exchange": ("all_reduce", "reduce_scatter", "sparse"),
                                      "reduction": ("backend", "fp32"), "dtype": ("model", "float32"),
                                      "tied_to": ("", *names)})]
    for table, rows, columns in tables:
        for i, row in enumerate(rows):
            for column, allowed in columns.items():
                if (value := getattr(row, column)) not in allowed:
                    path = f"{table}.{getattr(row, 'name', i)}.{column}" if table else column
                    raise UserError(f"{path}={value}: use {', '.join(str(a) or 'nothing' for a in allowed)}")
    if unknown := set(cfg.kernels) - set(KERNEL_NAMES):
        raise UserError(f"kernels: unknown {', '.join(sorted(unknown))}; use any of {', '.join(KERNEL_NAMES)}, or kernels= for "
                        "none")
    for role, key in (("skip", "saves"), ("back", "saves"), ("skip", "adds")):
        if sum(getattr(layer, key) == role for layer in cfg.layers) != 1:
            raise UserError(f'layer table: exactly one layer must have {key}="{role}"')
    kept = set()
    for i, layer in enumerate(cfg.layers):
        for need in {layer.adds, layer.reads if layer.attention else None} - {None, "stream"} - kept:
            raise UserError(f"layers.{i} uses {need}, which no layer above it saves")
        if layer.value is not None and layer.attention is None:
            raise UserError(f"layers.{i}: value={layer.value}, but the layer has no attention")
        kept.add(layer.saves)
    values = [layer.value for layer in cfg.layers if layer.value is not None]
    if sorted(values) != list(range(len(values))):
        raise UserError(f"layer table: value tables are {values}; number them 0, 1, ... and use each once")
    if cfg.heads % 2 or cfg.head_dim % 4 or cfg.dim < 12:
        raise UserError(f"heads={cfg.heads} must be even, head_dim={cfg.head_dim} a multiple of 4, their product at least 12")
    if not cfg.start_token < cfg.vocab_size <= cfg.padded_vocab:
        raise UserError(f"start_token={cfg.start_token} < vocab_size={cfg.vocab_size} <= padded_vocab={cfg.padded_vocab} "
                        "must hold")
    if cfg.bigram_rows >= 2 ** 31:
        raise UserError(f"bigram_rows={cfg.bigram_rows} must be below {2 ** 31}: they are numbered in int32")
    if len(cfg.final_windows) != 2:
        raise UserError(f"final_windows={cfg.final_windows}: two numbers, short and long")
    least = [(name, getattr(cfg, name), 1) for name in
             ("val_slice_tokens", "val_slices", "mlp_dim", "window_unit", "slices", "head_chunk")]
    least += [("bigram_rows", cfg.bigram_rows, 2), ("cooldown", cfg.cooldown, 0), ("doc_slots", cfg.doc_slots, 0)]
    least += [("final_windows", window, 1) for window in cfg.final_windows]
    for i, stage in enumerate(cfg.stages):
        least += [(f"stages.{i}.{name}", getattr(stage, name), 1) for name in ("tokens", "longest", "short", "long")]
        least += [(f"stages.{i}.steps", stage.steps, 0)]
        if not stage.mtp_start or len(stage.mtp_start) != len(stage.mtp_end):
            raise UserError(f"stages.{i}: mtp_start and mtp_end must have as many weights, at least one")
    for name, value, minimum in least:
        if value < minimum:
            raise UserError(f"{name}={value} must be at least {minimum}")
    batches = [stage.tokens for stage in cfg.stages]
    if (common := math.gcd(*batches)) % cfg.slices:
        near = sorted((n for n in range(1, 4 * cfg.slices + 9) if not common % n), key=lambda n: (abs(n - cfg.slices), n))[:3]
        raise UserError(f"slices={cfg.slices} does not divide all batches, of {', '.join(map(str, dict.fromkeys(batches)))} "
                        f"tokens; use {' or '.join(map(str, sorted(near)))}, or change stages.*.tokens")
    for row in cfg.params:
        if row.optimizer == "adam" and len(row.betas) != 2:
            raise UserError(f"params.{row.name}.betas={row.betas}: Adam takes two")
        if row.optimizer == "normuon" and not row.name.endswith(("qk_bank", "vo_bank", "mlp_bank")):
            raise UserError(f"params.{row.name}.optimizer=normuon: it is for banks of matrices")
        if row.rows != (expected := {"value_embeds": "tokens", "embed": "tokens", "bigram_embed": "bigrams"}.get(row.name, "")):
            raise UserError(f"params.{row.name}.rows={row.rows}: must be {expected or 'empty'}")
        if row.product != (row.name in ("lm_head", "qk_bank", "vo_bank", "mlp_bank")):
            raise UserError(f"params.{row.name}.product={row.product}: must be {not row.product}")
        if row.exchange == "sparse" and not row.rows:
            raise UserError(f"params.{row.name}.exchange=sparse: only tables of rows are exchanged so; use reduce_scatter")
        if row.dtype == "float32" and not row.name.endswith(("lambdas", "scalars")):
            raise UserError(f"params.{row.name}.dtype=float32: only the lambdas and scalars may differ from the model's dtype")

    def fits(n: int) -> str:
        slices = slices_of(cfg, n)
        if slices % n:
            return f"{slices} slices of a batch do not divide by it"
        for stage in cfg.stages:
            if stage.tokens % slices:
                return f"{stage.tokens} tokens of a batch do not divide into {slices} slices"
        for row in cfg.params:
            rows = param_shapes(cfg, n)[row.name][0]
            if row.sharded and row.optimizer == "adam" and rows % n:
                return f"{rows} rows of {row.name} do not divide by it"
        return ""

    if why := fits(world):
        near = sorted((n for n in range(1, 4 * world + 9) if not fits(n)), key=lambda n: (abs(n - world), n))[:3]
        if not near:
            raise UserError(f"no number of processes can share the work: {why}")
        raise UserError(f"a world of {world} processes cannot share the work: {why}; "
                        f"start torchrun with {' or '.join(str(n) for n in sorted(near))} processes")


def override(cfg, setting: str):
    """`cfg` with one "name=value" applied. Dots reach into tables, by index, by a row's name, or by * for every row:
    stages.0.steps=10, params.embed.lr_mul=2, params.*.reduction=fp32."""
    path, eq, text = setting.partition("=")
    if not eq:
        raise UserError(f"--set {setting}: write name=value")
    if path in ("preset", "track"):
        raise UserError(f"--set {path}: it follows from --preset")
    return _override(cfg, path.split("."), text, path)


def _override(node, keys: list[str], text: str, path: str):
    if isinstance(node, tuple):  # a table
        if keys[0] == "*":
            for i in range(len(node)):
                node = _override(node, [str(i), *keys[1:]], text, path)
            return node
        names = [getattr(row, "name", str(i)) for i, row in enumerate(node)]
        if keys[0].isdecimal() and int(keys[0]) < len(node):
            i = int(keys[0])
        else:
            _known(keys[0], names, path)
            i = names.index(keys[0])
        if len(keys) == 1:
            raise UserError(f"--set {path}: names a row; add one of its columns: "
                            f"{', '.join(f.name for f in dataclasses.fields(node[i]))}")
        return node[:i] + (_override(node[i], keys[1:], text, path),) + node[i + 1:]
    hints = typing.get_type_hints(type(node))
    _known(keys[0], hints, path)
    old, hint = getattr(node, keys[0]), hints[keys[0]]
    is_table = isinstance(old, tuple) and old and dataclasses.is_dataclass(old[0])
    if len(keys) > 1 and not is_table:
        raise UserError(f"--set {path}: {keys[0]} is not a table")
    if len(keys) == 1 and is_table:
        raise UserError(f"--set {path}: a table; name an entry, like {path}.0.{dataclasses.fields(old[0])[0].name}")
    return replace(node, **{keys[0]: _override(old, keys[1:], text, path) if is_table else _parse(text, hint, path)})


def _known(name: str, names, path: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, list(names), n=3) or (list(names) if len(names) <= 16 else [])
        raise UserError(f"--set {path}: unknown name {name!r}; "
                        + (f"did you mean {', '.join(near)}?" if near else "the names are the fields of Config in the script"))


def _parse(text: str, hint, path: str):
    """`text` as a value of the type `hint`: bool, int, float, str, tuple of one of them, or one of them or None."""
    args = typing.get_args(hint)
    if type(None) in args:
        return None if text.lower() == "none" else _parse(text, args[0], path)
    if typing.get_origin(hint) is tuple:
        return tuple(_parse(part, args[0], path) for part in text.split(",") if part)
    try:
        if hint is bool:
            return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[text.lower()]
        value = hint(text)
        if hint is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a finite number"}[hint]
        raise UserError(f"--set {path}={text}: {path} takes {kind}") from None


# ======================================================================================================================
# 3  Schedule. Pure functions of the config and the step.
# ======================================================================================================================

class StepPlan(NamedTuple):
    step: int
    stage: int
    lr_mul: float            # of every learning rate
    momentum: float          # NorMuon's
    short: int               # attention windows, tokens
    long: int
    tokens: int              # per batch
    longest: int             # piece of a document, tokens
    mtp: tuple[float, ...]   # weights of the losses on the next tokens
    # Adam parameters update after this step, from the gradients since their last update: every second step, for that halves the
    # traffic of the tables and costs next to nothing in loss (PR 136).
    do_adam: bool
    # After this step's update embed and lm_head are no longer tied: one matrix learns faster from both ends, two fit better
    # later (PRs 175, 178).
    split: bool


def split_step(cfg: Config) -> int:
    """The first step of the third stage, made odd so that Adam updates on it; with fewer stages, never."""
    return cfg.stage_starts[2] | 1 if len(cfg.stages) > 2 else cfg.steps


def plan(cfg: Config, step: int) -> StepPlan:
    """What step `step` (from 0) does."""
    starts, scheduled = cfg.stage_starts, cfg.steps - cfg.stages[-1].steps
    index = max(i for i, start in enumerate(starts) if start <= step)
    stage = cfg.stages[index]
    lr_mul, cool = stage.lr_mul, int(scheduled * (1 - cfg.cooldown))
    if step > cool:
        t = min(1.0, (step - cool) / max(1, scheduled - cool))
        lr_mul = lr_mul * (1 - t) + cfg.final_lr * t
    momentum = cfg.momentum_low + (cfg.momentum_high - cfg.momentum_low) * min(1.0, step / max(1, cfg.momentum_warmup))
    cool = cfg.steps - cfg.momentum_cooldown
    if step > cool:
        momentum = cfg.momentum_high - (cfg.momentum_high - cfg.momentum_low) * (step - cool) / cfg.momentum_cooldown
    t = (step - starts[index]) / stage.steps
    mtp = tuple(a + (b - a) * t for a, b in zip(stage.mtp_start, stage.mtp_end))
    return StepPlan(step, index, lr_mul, momentum, stage.short * cfg.window_unit, stage.long * cfg.window_unit,
                    stage.tokens, stage.longest, mtp, do_adam=step % 2 == 1, split=step == split_step(cfg))


def warmup_steps(cfg: Config) -> list[int]:
    """Steps that between them do everything a run does: the first two, and two on either side of a stage's start."""
    steps = {0, 1} | {s + k for s in cfg.stage_starts[1:] for k in (-2, -1, 0, 1)}
    return sorted(s for s in steps if 0 <= s < cfg.steps)


def validates(cfg: Config, step: int) -> bool:
    return cfg.val_every > 0 and step % cfg.val_every == 0


def train_tokens(cfg: Config) -> int:
    return sum(stage.steps * stage.tokens for stage in cfg.stages)


# ======================================================================================================================
# 4  Runtime. Ranks and devices; the log of record and the screen.
# ======================================================================================================================

@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    @property
    def master(self) -> bool:
        return self.rank == 0


# How long a rank waits for another. If one is killed torchrun ends the others at once; gloo tells them too, but not always
# those that were just sending to it.
PATIENCE = timedelta(minutes=10)


class LostContact(UserError):
    """Another rank is gone; what happened, that rank knows."""


@contextlib.contextmanager
def in_contact():
    """Around what waits for other ranks: its RuntimeErrors, but for want of memory, mean that one of them is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        raise LostContact(f"another process of this run was killed or failed ({brief(e)}); look for its own message, and "
                          "start the run again") from None


def world_size() -> int:
    """Of torchrun's environment; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"WORLD_SIZE={text}: a number of processes; start the script with torchrun, or unset it")
    return int(text)


def start_runtime() -> Ranks:
    """Reads torchrun's environment and joins the process group; without torchrun there is one rank and no group."""
    world = world_size()
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 and name not in os.environ]
    if missing:
        raise UserError(f"WORLD_SIZE={world} is set, {', '.join(missing)} not; start the script with torchrun, or unset it")
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:  # a killed torchrun would leave its ranks running
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)                       # PR_SET_PDEATHSIG
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if here > torch.cuda.device_count():
            raise UserError(f"{here} processes for {torch.cuda.device_count()} GPUs; start torchrun with "
                            f"--nproc_per_node={torch.cuda.device_count()} or fewer")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # parts of a product, too, are added in fp32
    if world > 1:
        try:
            dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE,
                                    **({"device_id": device} if cuda else {}))
        except (RuntimeError, ValueError) as e:
            raise LostContact(f"the {world} processes cannot meet: {brief(e)}; start them with torchrun, and leave another "
                              "run's port alone") from None
    return Ranks(rank, world, device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Counts training time: everything the device was given, from start to stop, in milliseconds."""

    def __init__(self, device: torch.device, ms: float = 0.0):
        self.device, self.ms = device, ms

    def start(self) -> None:
        synchronize(self.device)
        self.began = time.perf_counter()

    def stop(self) -> None:
        synchronize(self.device)
        self.ms = self.read()

    def read(self) -> float:
        """While it runs, without waiting for the device."""
        return self.ms + 1000 * (time.perf_counter() - self.began)


class RunLog:
    """The run's log file and its screen output; silent on every rank but the first.

    The file is opened once, before the clock starts, and each line is handed to the operating system as it is written, so
    that the file holds every finished step whatever ends the process.
    """

    def __init__(self, folder: Path | None, steps: int, run_id: str):
        self.path = None if folder is None else folder / f"{run_id}.txt"
        self.file, self.bar, self.steps = None, None, steps
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "x", buffering=1, encoding="utf-8")
            except OSError as e:
                raise UserError(f"cannot write the log {self.path}: {e.strerror}; remove what is in its way, or make the "
                                "folder writable") from None

    def write(self, text: str) -> None:
        if self.file:
            try:
                self.file.write(text + "\n")
            except OSError as e:
                raise UserError(f"cannot write the log {self.path}: {e.strerror}; it holds the run up to here; make room and "
                                "start again") from None

    def say(self, text: str) -> None:
        if self.file:
            try:
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()
            except OSError as e:
                sys.stdout = open(os.devnull, "w")  # or Python complains once more when it flushes at its end
                raise UserError(f"cannot write to the screen: {e.strerror}; send the output to a file, and read that") from None

    def both(self, text: str) -> None:
        self.write(text)
        self.say(text)

    def progress(self, step: int, loss: float | None, train_ms: float) -> None:
        """`step` steps are done. A bar on a terminal; elsewhere a plain line every twentieth of the run."""
        if not self.file:
            return
        text = "" if loss is None else f"loss {loss:.3f}"
        if sys.stdout.isatty():
            if self.bar is None:
                self.bar = tqdm(total=self.steps, initial=step - 1, unit="step", dynamic_ncols=True, file=sys.stdout)
            self.bar.set_postfix_str(f"{text} time {train_ms / 1000:.1f}s", refresh=False)
            self.bar.update(step - self.bar.n)
        elif step * 20 // self.steps > (step - 1) * 20 // self.steps:
            eta = train_ms / step * (self.steps - step) / 1000
            self.say(f"step {step}/{self.steps}  {text}  time {train_ms / 1000:.0f}s  ETA {eta:.0f}s")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.file:
            with contextlib.suppress(OSError):  # the disk may be full: that is what is being reported then
                if error is not None:
                    why = {KeyboardInterrupt: "interrupted"}.get(kind, kind.__name__)
                    why = str(error).replace(os.getcwd() + os.sep, "") if isinstance(error, UserError) else why
                    self.file.write(f"stopped: {why}\n")
                self.file.close()


def describe_environment(ranks: Ranks) -> list[str]:
    """Log lines that say what the run ran on. No absolute path stands in them."""
    def git(*args):
        out = subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).resolve().parent)
        return out.stdout.strip() if out.returncode == 0 else None

    if ranks.device.type == "cuda":
        device = torch.cuda.get_device_name(ranks.device)
    else:
        device = platform.processor() or platform.machine()
        if os.path.exists("/proc/cpuinfo"):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            device = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), device)
        device += f" ({os.cpu_count()} cores, {torch.get_num_threads()} threads a process)"
    try:
        commit, dirty = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
        dirty = dirty or ("" if git("ls-files", "--error-unmatch", Path(__file__).name) else "this script is not in it")
    except FileNotFoundError:  # no git on this machine
        commit, dirty = None, None
    return [
        f"Running Python {sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda} on {device} with world_size {ranks.world}",
        f"commit: {commit or 'unknown'}{'' if not commit else ' (clean)' if dirty == '' else ' (modified)'}",
    ]


# ======================================================================================================================
# 5  Data. Shards of tokens to micro-batches of whole documents, the same whatever the number of ranks.
# ======================================================================================================================

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024


class Header(NamedTuple):
    tokens: int
    vocab_size: int   # 0: GPT-2's
    start_token: int
    text_bytes: int   # of the text the tokens stand for; 0: unknown


def read_header(path: Path) -> Header:
    """Checks magic, version and length of a .bin shard: 256 int32, then `tokens` uint16, little-endian."""
    try:
        words, size = np.fromfile(path, dtype="<i4", count=256), path.stat().st_size
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}; download or build the data again") from None
    if len(words) < 256 or words[0] != MAGIC:
        raise UserError(f"{path}: not a token shard (its first word is not {MAGIC}); delete it, and download or build it again")
    if words[1] != VERSION:
        raise UserError(f"{path}: shard format version {words[1]}, this script reads {VERSION}; build it again")
    header = Header(int(words[2]), int(words[3]), int(words[4]), int(words[5]))
    if size != HEADER_BYTES + 2 * header.tokens:
        raise UserError(f"{path}: {size} bytes, but its header promises {header.tokens} tokens, which take "
                        f"{HEADER_BYTES + 2 * header.tokens}; delete it, and download or build it again")
    return header


def find_shards(folder: str, split: str) -> list[Path]:
    paths = [Path(p) for p in sorted(glob.glob(os.path.join(glob.escape(folder), f"*_{split}_*.bin")))]
    if not paths:
        raise UserError(f"no {split} shards (*_{split}_*.bin) in {folder}: make them with data/fineweb.py (record preset), "
                        "data/local_corpus.py (cpu preset) or data/tokenize_text.py (your own text), or use another --data")
    return paths


class Data(NamedTuple):
    """The shards of a run, their headers checked against the config."""
    train: list[Path]
    val: list[Path]
    bytes_per_token: float  # of the validation text; 0: unknown
    fingerprint: str


def find_data(cfg: Config) -> Data:
    train, val = find_shards(cfg.data, "train"), find_shards(cfg.data, "val")
    headers = {path: read_header(path) for path in train + val}
    for path, header in headers.items():
        vocab, start = (header.vocab_size, header.start_token) if header.vocab_size else (50257, 50256)
        if (vocab, start) != (cfg.vocab_size, cfg.start_token):
            raise UserError(f"{path}: made for a vocabulary of {vocab} with start token {start}, the config has "
                            f"{cfg.vocab_size} and {cfg.start_token}; choose the matching --preset or --data")
    need, have = cfg.val_slices * cfg.val_slice_tokens + 1, sum(headers[p].tokens for p in val)
    if have < need:
        fits = max(0, have - 1) // cfg.val_slice_tokens
        raise UserError(f"{cfg.data}: {have:,} validation tokens, validation takes {need:,}; add validation shards"
                        + (f", or --set val_slices={fits}" if fits else ""))
    tokens, text = sum(headers[p].tokens for p in val), [headers[p].text_bytes for p in val]
    count = sum(headers[p].tokens for p in train)
    fingerprint = f"{fingerprint_of(train + val)} ({count} training tokens in {len(train)} shards, {tokens} for validation)"
    return Data(train, val, sum(text) / tokens if all(text) else 0.0, fingerprint)


def fingerprint_of(paths: list[Path]) -> str:
    """Hash of every shard's name, size, and of 64 blocks of 64 KiB spread evenly over it (all of a small one)."""
    digest, block = hashlib.sha256(), 1 << 16
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as f:
            for i in range(64):
                f.seek(max(0, size - block) * i // 63)
                digest.update(f.read(block))
    return digest.hexdigest()[:16]


class Shard(NamedTuple):
    tokens: np.ndarray  # uint16
    starts: np.ndarray  # int64: positions of start tokens


def read_shard(path: Path, vocab_size: int, start_token: int, count: int = -1) -> Shard:
    """The whole shard in memory, or its first `count` tokens."""
    read_header(path)
    tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES, count=count)
    if len(tokens) and tokens.max() >= vocab_size:
        raise UserError(f"{path}: token {tokens.max()} is outside the vocabulary of {vocab_size}; the file is damaged, or made "
                        "with another tokenizer: build it again")
    return Shard(tokens, np.flatnonzero(tokens == start_token))


def bigram_index(tokens: np.ndarray, rows: int, out: np.ndarray) -> None:
    """Hashes each token with its predecessor into `out` (int32, like `tokens`); position 0 gets the reserved last row.

    The products wrap in int32. The hash crosses document starts: masking it was measured to be slower and no better.
    """
    out[0] = rows - 1
    out[1:] = ((np.int32(36313) * tokens[1:]) ^ (np.int32(27191) * tokens[:-1])) % np.int32(rows - 1)


def doc_slots(tokens: int) -> int:
    """Entries of cu_seqlens for a slice of `tokens`: fixed, so that shapes do not change from step to step."""
    return {16384: 64, 32768: 96, 49152: 128}.get(tokens) or max(128, padded(tokens // 300, 128))


class RowIndex(NamedTuple):
    """The rows of a table that a micro-batch touches, and which of its T positions touch each."""
    rows: Tensor    # (n,) int32, ascending
    order: Tensor   # (T,) int32: the positions by row, those of one row in the text's order
    starts: Tensor  # (n + 1,) int32: order[starts[i]:starts[i + 1]] are the positions of rows[i]
    fresh: Tensor   # (n,) bool: not touched since the last Adam step before this micro-batch


class Touched(NamedTuple):
    """The rows of a table that this rank has touched since the last Adam step."""
    rows: Tensor    # (k,) int32, ascending
    owners: list    # of int: how many of them belong to each rank
    block: int      # rows of the table that a rank owns


def row_kinds(cfg: Config) -> dict[str, int]:
    """What numbers the rows of tables, with how many rows those have."""
    return {row.rows: param_shapes(cfg, 1)[row.name][0] for row in cfg.params if row.rows}


class Room:
    """Memory for micro-batches of up to `tokens` tokens, one after another; page-locked if `pin`."""

    def __init__(self, cfg: Config, tokens: int, slots: int, pin: bool):
        new = lambda n, dtype=torch.int32: torch.empty(n, dtype=dtype, pin_memory=pin)
        self.inputs, self.targets, self.bigram, self.cu_seqlens = new(tokens), new(tokens, torch.int64), new(tokens), new(slots)
        self.index = {kind: RowIndex(new(tokens), new(tokens), new(tokens + 1), new(tokens, torch.bool))
                      for kind in row_kinds(cfg)}
        self.touched = {kind: new(n) for kind, n in row_kinds(cfg).items()}
        self.copied = None  # a CUDA event: the last micro-batch has reached the GPU

    def wait(self) -> None:
        """Until it may be written again."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass
class MicroBatch:
    inputs: Tensor      # (T,) int32
    targets: Tensor     # (T,) int64
    bigram: Tensor      # (T,) int32 rows of bigram_embed
    cu_seqlens: Tensor  # (slots,) int32: 0, the ends of the documents, then T
    longest: int        # bound on a document's length
    room: Room | None = None
    index: dict[str, RowIndex] = dataclasses.field(default_factory=dict)   # for training
    touched: dict[str, Touched] = dataclasses.field(default_factory=dict)  # a batch's last has it

    def to(self, device: torch.device) -> "MicroBatch":
        """Copies that need not finish before the call returns: the tensors are page-locked if there is a GPU."""
        if device.type == "cpu":
            return self
        move = lambda t: t.to(device, non_blocking=True)
        moved = MicroBatch(move(self.inputs), move(self.targets), move(self.bigram), move(self.cu_seqlens), self.longest, None,
                           {kind: RowIndex(*map(move, index)) for kind, index in self.index.items()},
                           {kind: t._replace(rows=move(t.rows)) for kind, t in self.touched.items()})
        self.room.copied = torch.cuda.Event()
        self.room.copied.record()
        return moved


def make_micro_batch(tokens: np.ndarray, ends: np.ndarray, longest: int, slots: int, rows: int, room: Room) -> MicroBatch:
    """From T+1 tokens (uint16) and the ends of all documents but the last; its tensors lie in `room`."""
    T = len(tokens) - 1
    if len(ends) + 2 > slots:
        raise UserError(f"a slice of {T} tokens has {len(ends) + 1} documents, cu_seqlens has room for {slots - 1}; "
                        f"use --set doc_slots={padded(len(ends) + 2, 128)}")
    batch = MicroBatch(room.inputs[:T], room.targets[:T], room.bigram[:T], room.cu_seqlens[:slots], longest, room)
    batch.inputs.numpy()[:] = tokens[:-1]
    batch.targets.numpy()[:] = tokens[1:]
    bounds = batch.cu_seqlens.numpy()
    bounds[0], bounds[1:len(ends) + 1], bounds[len(ends) + 1:] = 0, ends, T
    bigram_index(batch.inputs.numpy(), rows, batch.bigram.numpy())
    return batch


def index_rows(numbers: np.ndarray, marks: np.ndarray, room: RowIndex) -> RowIndex:
    """The index, in `room`, of a micro-batch whose positions touch the rows `numbers` (T,) int32; sets their `marks`, bool."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")  # of 16 bits numpy makes a radix sort, in a third of the time
    if len(marks) > 1 << 16:
        order = order[np.argsort((numbers >> 16).astype(np.uint16)[order], kind="stable")]
    ranked = numbers[order]
    first = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    n, rows = len(first), ranked[first]
    index = RowIndex(room.rows[:n], room.order[:len(numbers)], room.starts[:n + 1], room.fresh[:n])
    for tensor, values in zip(index, (rows, order, np.append(first, len(numbers)), ~marks[rows])):
        tensor.numpy()[:] = values
    marks[rows] = True
    return index


def touched_rows(marks: np.ndarray, world: int, room: Tensor) -> Touched:
    """The marked rows, in `room`."""
    rows, block = np.flatnonzero(marks), len(marks) // world
    room[:len(rows)].numpy()[:] = rows
    return Touched(room[:len(rows)], np.diff(np.searchsorted(rows, np.arange(world + 1) * block)).tolist(), block)


def index_batch(micro_batches: list[MicroBatch], marks: dict[str, np.ndarray], world: int) -> None:
    """Gives each its index, the last what was touched; `marks` are the rows touched since the last Adam step, by what numbers
    them, and are brought up to date."""
    for batch in micro_batches:
        numbers = {"tokens": batch.inputs.numpy(), "bigrams": batch.bigram.numpy()}
        batch.index = {kind: index_rows(numbers[kind], marks[kind], room) for kind, room in batch.room.index.items()}
    batch.touched = {kind: touched_rows(marks[kind], world, room) for kind, room in batch.room.touched.items()}


class DataRanOut(UserError):
    """The schedule needs more batches than the training shards give."""


class TrainLoader:
    """Cuts training shards into batches of `slices` slices of whole documents; slice m * world + r is rank r's m-th.

    A slice takes documents in order, each cut to its first `longest` tokens, until it holds T + 1 tokens; the rest of a
    cut document is dropped. A batch that does not fit before the end of a shard starts over in the next one, which is
    read on a thread meanwhile. `position` is what `position()` of an earlier loader gave.
    """

    def __init__(self, cfg: Config, paths: list[Path], rank: int, world: int, pin: bool, position: tuple[int, ...] = (0, 0, 0)):
        self.cfg, self.rank, self.world, self.pin = cfg, rank, world, pin
        self.slices = slices_of(cfg, world)
        self.paths, self.reader = list(paths), ThreadPoolExecutor(1)
        shard, document, self.delivered = position  # delivered: tokens, over all ranks
        self.upcoming = self._read(shard)
        self._open(shard)
        self.document = document

    def position(self) -> tuple[int, int, int]:
        """Where the next batch begins: the shard's number, the document's in it, tokens delivered before."""
        return self.opened, self.document, self.delivered

    def _read(self, i: int):
        if i >= len(self.paths):
            return None
        return self.reader.submit(read_shard, self.paths[i], self.cfg.vocab_size, self.cfg.start_token)

    def _open(self, i: int) -> None:
        if self.upcoming is None:
            raise DataRanOut(f"training data ran out after {self.delivered:,} tokens; add training shards")
        self.opened, self.shard, self.upcoming = i, self.upcoming.result(), self._read(i + 1)
        self.document = 0
        self.ends = {}  # longest piece -> running total of piece lengths

    def close(self) -> None:
        self.reader.shutdown(wait=False, cancel_futures=True)

    def _cut(self, T: int, longest: int) -> list[tuple[int, int]] | None:
        """For each slice its first document and the one after its last; None if the shard is too short."""
        if longest not in self.ends:
            lengths = np.minimum(np.diff(np.append(self.shard.starts, len(self.shard.tokens))), longest)
            self.ends[longest] = np.concatenate(([0], np.cumsum(lengths)))
        ends, cuts, first = self.ends[longest], [], self.document
        for _ in range(self.slices):
            last = int(np.searchsorted(ends, ends[first] + T + 1))
            if last == len(ends):
                return None
            cuts.append((first, last))
            first = last
        return cuts

    def rooms(self) -> list[Room]:
        """Memory for this rank's share of any batch."""
        sizes = [stage.tokens // self.slices for stage in self.cfg.stages]
        slots = self.cfg.doc_slots or max(map(doc_slots, sizes))
        return [Room(self.cfg, max(sizes), slots, self.pin) for _ in range(self.slices // self.world)]

    def advance(self, tokens: int, longest: int) -> list[tuple[int, int]]:
        """Skips the next batch of `tokens` tokens. -> for each of its slices the first document and the one after the last.
        Raises DataRanOut."""
        while (cuts := self._cut(tokens // self.slices, longest)) is None:
            self._open(self.opened + 1)
        self.document = cuts[-1][1]
        self.delivered += tokens
        return cuts

    def batch(self, tokens: int, longest: int, rooms: list[Room]) -> list[MicroBatch]:
        """This rank's micro-batches of the next batch of `tokens` tokens."""
        T, cuts = tokens // self.slices, self.advance(tokens, longest)
        ends, micro_batches = self.ends[longest], []
        for (first, last), room in zip(cuts[self.rank::self.world], rooms):
            begin, lengths = self.shard.starts[first:last], np.diff(ends[first:last + 1])
            pieces = np.concatenate([self.shard.tokens[b:b + n] for b, n in zip(begin, lengths)])[:T + 1]
            slots = self.cfg.doc_slots or doc_slots(T)
            micro_batches.append(make_micro_batch(pieces, ends[first + 1:last] - ends[first], longest, slots,
                                                  self.cfg.bigram_rows, room))
        return micro_batches


def count_batches(cfg: Config, paths: list[Path], world: int) -> int:
    """How many of the schedule's batches the training shards give: the loader's own walk, in which no batch is built. It stops
    where the schedule ends, so of many shards it reads few."""
    loader = TrainLoader(cfg, paths, 0, world, pin=False)
    try:
        for step in range(cfg.steps):
            now = plan(cfg, step)
            try:
                loader.advance(now.tokens, now.longest)
            except DataRanOut:
                return step
    finally:
        loader.close()
    return cfg.steps


def check_schedule(cfg: Config, paths: list[Path], world: int) -> None:
    """Raises UserError, with a shorter schedule that would fit, if the training shards run out before the last step."""
    if (batches := count_batches(cfg, paths, world)) == cfg.steps:
        return
    kept, shorter = sum(plan(cfg, step).tokens for step in range(batches)) / train_tokens(cfg), cfg
    while shorter.steps:  # every stage by one factor; a guess, for batches use up documents in different measure
        shorter = replace(cfg, stages=tuple(replace(stage, steps=int(stage.steps * kept)) for stage in cfg.stages))
        if shorter.steps and count_batches(shorter, paths, world) == shorter.steps:
            break
        kept *= 0.95
    used = max(min(stage.longest, stage.tokens // slices_of(cfg, world) + 1) for stage in cfg.stages if stage.steps)
    fits = " ".join(f"--set stages.{i}.steps={stage.steps}" for i, stage in enumerate(shorter.stages))
    raise UserError(f"{cfg.data}: the training documents, of each of which at most {used:,} tokens are used, give {batches:,} of "
                    f"the schedule's {cfg.steps:,} batches, which take {train_tokens(cfg):,} tokens; add text, or cut long "
                    "documents into passages as data/tokenize_text.py does"
                    + (f"; this would fit: {fits}" if shorter.steps else ""))


class Batch(NamedTuple):
    now: StepPlan
    micro_batches: list[MicroBatch]
    position: tuple[int, int, int]  # of the loader, behind it


class Batches:
    """The batches of the planned steps, each built on a thread while the one before it is used.

    Two sets of rooms take turns, so a batch is good until the next one is asked for. `touched` are the rows touched since the
    last Adam step before the first plan.
    """

    def __init__(self, loader: TrainLoader, plans: Iterable[StepPlan], touched: dict[str, Tensor] | None = None):
        self.loader, self.plans, self.thread = loader, iter(plans), ThreadPoolExecutor(1)
        self.marks = {kind: np.zeros(n, dtype=bool) for kind, n in row_kinds(loader.cfg).items()}
        for kind, rows in (touched or {}).items():
            self.marks[kind][rows.cpu().numpy()] = True
        self.rooms = [loader.rooms(), loader.rooms()]
        self._begin()

    def _begin(self) -> None:
        now = next(self.plans, None)
        self.rooms.reverse()
        self.coming = self.thread.submit(self._build, now, self.rooms[0]) if now else None

    def _build(self, now: StepPlan, rooms: list[Room]) -> Batch:
        for room in rooms:
            room.wait()
        micro_batches = self.loader.batch(now.tokens, now.longest, rooms)
        index_batch(micro_batches, self.marks, self.loader.world)
        if now.do_adam:
            for marks in self.marks.values():
                marks[:] = False
        return Batch(now, micro_batches, self.loader.position())

    def next(self) -> Batch:
        batch = self.coming.result()
        self._begin()
        return batch

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        self.loader.close()


class ValLoader:
    """The first val_slices * val_slice_tokens validation tokens, in consecutive slices; rank r has slices r, r + world, ..."""

    def __init__(self, cfg: Config, paths: list[Path], rank: int, world: int, pin: bool):
        self.cfg, self.rank, self.world, self.pin = cfg, rank, world, pin
        parts, need = [], cfg.val_slices * cfg.val_slice_tokens + 1
        for path in paths:
            if need > 0:
                parts.append(read_shard(path, cfg.vocab_size, cfg.start_token, min(need, read_header(path).tokens)).tokens)
                need -= len(parts[-1])
        self.tokens = np.concatenate(parts)
        self.slots = max(cfg.doc_slots, doc_slots(cfg.val_slice_tokens))
        self.rooms = [Room(cfg, cfg.val_slice_tokens, self.slots, pin) for _ in range(2)]  # one is filled while one is copied

    def __iter__(self):
        """Yields (slice number, micro-batch)."""
        T = self.cfg.val_slice_tokens
        for i in range(self.rank, self.cfg.val_slices, self.world):
            self.rooms.reverse()
            self.rooms[0].wait()
            tokens = self.tokens[i * T:(i + 1) * T + 1]
            starts = np.flatnonzero(tokens[:-1] == self.cfg.start_token)
            longest = int(np.diff(starts, prepend=0, append=T).max())
            yield i, make_micro_batch(tokens, starts, longest, self.slots, self.cfg.bigram_rows, self.rooms[0])


# ======================================================================================================================
# 6  Reference. The operations in plain torch: what section 7's kernels must equal, and what runs where there are none.
# ======================================================================================================================

NORM_EPS = 2.0 ** -23  # for every dtype


def norm(x: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis, without weight; reduced in at least fp32 (Zhang, Sennrich 2019,
    arXiv:1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: int, scale: float) -> Tensor:
    """Causal attention within documents: position i sees j of its document with 0 <= i - j <= window.

    q, k, v (T, H, D); cu_seqlens (slots,) int32, document boundaries; longest bounds a document's length. -> (T, H, D).
    Queries go in blocks, each against the keys of its own block and of `window` positions before: T * (window + block)
    scores instead of T * T.
    """
    T, H, D = q.shape
    window = min(window, longest - 1, T - 1)
    block = min(max(32, window), 256)
    n = padded(T, block) // block
    tail = n * block - T
    place = torch.arange(T, device=q.device, dtype=cu_seqlens.dtype)
    doc = torch.searchsorted(cu_seqlens, place, right=True)
    doc_q = F.pad(doc, (0, tail), value=-1).view(n, block, 1)
    doc_k = F.pad(doc, (window, tail), value=-1).unfold(0, window + block, block).unsqueeze(1)
    distance = torch.arange(block, device=q.device)[:, None] - torch.arange(-window, block, device=q.device)
    mask = (doc_q == doc_k) & (distance >= 0) & (distance <= window)
    q = F.pad(q, (0, 0, 0, 0, 0, tail)).view(n, block, H, D).transpose(1, 2)
    k, v = (F.pad(t, (0, 0, 0, 0, window, tail)).unfold(0, window + block, block).transpose(2, 3) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), scale=scale)
    return y.transpose(1, 2).reshape(n * block, H, D)[:T]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first half of x (..., D) by angles given as cos, sin (..., D/4); the second half stays."""
    turning, still = x.chunk(2, dim=-1)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([torch.stack([cos * a + sin * b, cos * b - sin * a], dim=-1).flatten(-2), still], dim=-1)


def shift_keys(k: Tensor) -> Tensor:
    """The second half of each key (T, H, D) from the token before; token 0 keeps its own.

    A query can then find the token that followed an earlier copy of its own in one layer; otherwise that induction takes two
    (PR 169). It is the half that is not rotated, so that it matches content, not distance.
    """
    turning, still = k.chunk(2, dim=-1)
    return torch.cat([turning, torch.cat([still[:1], still[:-1]])], dim=-1)


# Logits are capped, so that none runs away and gradients stay small (record 9; Gemma 2, arXiv:2408.00118). Asymmetrically,
# 0 to 23, for most tokens are never right: their logits are far below the few that may be (PR 181).
SOFTCAP_SCALE, SOFTCAP_SHIFT, SOFTCAP_SPAN = 23.0, 5.0, 7.5


def relu_square(h: Tensor, fc: Tensor) -> tuple[Tensor, Tensor]:
    """The MLP's first half: r = relu(h fc^T) and r^2, (T, F), for h (T, d), fc (F, d). The square does better than GELU at the
    same cost (record 5; Primer: So et al. 2021, arXiv:2109.08668)."""
    r = F.linear(h, fc).relu()
    return r, r.square()


def relu_square_grad(dy: Tensor, proj: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Its backward, for dy (T, d), proj (F, d): d(h fc^T) = 2 r (dy proj^T), and r^2 again, cheaper to make than to keep."""
    return (dy @ proj.T).mul_(2 * r), r.square()


def softcap_loss(logits: Tensor, targets: Tensor, weights: tuple[float, ...], unit: float = 0.0) -> tuple[Tensor, Tensor]:
    """Multi-token cross-entropy of z = 23 sigmoid((logits + 5) / 7.5), and its gradient.

    logits (n, V); targets (n .. n+K-1,) int64: entry i + k is what row i's k-th weight asks for, and weights that reach
    past the end are dropped. -> losses (n,) fp32 (fp64 for fp64 logits); d(sum of losses)/d(logits), in logits' dtype, or with
    `unit` in e5m2 and in units of it, saturating.
    """
    n = logits.size(0)
    s = torch.sigmoid((logits.to(torch.promote_types(logits.dtype, torch.float32)) + SOFTCAP_SHIFT) / SOFTCAP_SPAN)
    z = SOFTCAP_SCALE * s
    lse = z.logsumexp(dim=-1)
    p = (z - lse[:, None]).exp()
    losses, total = torch.zeros_like(lse), torch.zeros_like(lse)
    wanted = torch.zeros_like(z)
    for k, weight in enumerate(weights):
        target = targets[k:k + n, None]
        rows = target.size(0)
        losses[:rows] += weight * (lse[:rows] - z[:rows].gather(1, target)[:, 0])
        total[:rows] += weight
        wanted[:rows].scatter_add_(1, target, torch.full_like(target, weight, dtype=z.dtype))
    gradient = (total[:, None] * p - wanted) * (s * (1 - s)) * (SOFTCAP_SCALE / SOFTCAP_SPAN)
    return losses, to_fp8(gradient, unit, torch.float8_e5m2) if unit else gradient.to(logits.dtype)


def to_fp8(x: Tensor, unit: float, dtype: torch.dtype) -> Tensor:
    """x in units of `unit`, rounded to nearest, saturating, contiguous."""
    most = torch.finfo(dtype).max
    return (x.float() / unit).clamp(-most, most).to(dtype, memory_format=torch.contiguous_format)


def sum_rows(out: Tensor, grad: Tensor, index: RowIndex) -> None:
    """Adds to each touched row of `out` (N, ...) the gradients of the positions that touch it; a fresh row is written.

    grad (T, ...); one row's are summed in at least fp32, in the text's order, and rounded once to out's dtype. Columns go
    piece by piece, so that no temporary has a table's size.
    """
    out, grad, rows, wide = out.flatten(1), grad.flatten(1), index.rows, torch.promote_types(out.dtype, torch.float32)
    lengths = index.starts.diff().long()
    for i in range(0, out.size(1), 768):
        part = out[:, i:i + 768]
        sums = torch.segment_reduce(grad[index.order, i:i + 768].to(wide), "sum", lengths=lengths, unsafe=True)
        sums = torch.where(index.fresh[:, None], sums, part[rows].to(wide) + sums)
        part.index_copy_(0, rows.long(), sums.to(out.dtype))


POLAR_STEPS = (  # Polar Express: Amsel, Persson, Musco, Gower 2025, arXiv:2505.16932; five steps, safety factor 1.02
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def add_product(add: Tensor, x: Tensor, y: Tensor, beta: float, alpha: float) -> Tensor:
    """beta add + alpha x y, of batches of matrices, summed in at least fp32 and rounded once."""
    if x.is_cuda:  # the tensor cores sum so
        return torch.baddbmm(add, x, y, beta=beta, alpha=alpha)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.baddbmm(add.to(wide), x.to(wide), y.to(wide), beta=beta, alpha=alpha).to(x.dtype)


def gram(x: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """alpha x x^T + beta add, (n, M, M), for x (n, M, K) of any strides and symmetric `add`; rounded once."""
    return add_product(x.new_zeros(()) if add is None else add, x, x.mT, beta, alpha)


def polar(g: Tensor, dtype: torch.dtype, gram: Callable = gram) -> Tensor:
    """About the orthogonal polar factor of each matrix of g (n, rows, cols), computed in `dtype`.

    Singular values end in 0.86 .. 1.14. In bf16 every product is summed in fp32 and rounded once.
    """
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR_STEPS:
        A = gram(x.mT if tall else x)
        B = gram(A, A, b, c)  # A is symmetric
        x = add_product(x, x, B, a, 1.0) if tall else add_product(x, B, x, a, 1.0)
    return x


def transpose_copy(out: Tensor, x: Tensor) -> None:
    """out (n, m) = x^T, for x (m, n)."""
    out.copy_(x.T)


def transpose_add(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """Adds to columns `rows` (k,) int32, distinct, of out (m, n) those rows of x (n, m)."""
    out.T.index_add_(0, rows, x[rows])


# ======================================================================================================================
# 7  Kernels. Section 6's operations in Triton, with the same arguments and results; which forms a run uses; products that
#    write their weight's gradient where it stays.
# ======================================================================================================================

if triton is not None:
    @triton.jit
    def tile_product(left, right, K, left_k, right_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
        """The product of rows and columns of length K, summed in fp32: left (BLOCK_M, BLOCK_K), right (BLOCK_K, BLOCK_N) point
        to their first pieces."""
        k = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            a = tl.load(left, mask=k[None, :] < K - start, other=0.0)
            b = tl.load(right, mask=k[:, None] < K - start, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            left += BLOCK_K * left_k
            right += BLOCK_K * right_k
        return total

    @triton.jit
    def gram_kernel(x, add, out, M, K, x_n, x_m, x_k, beta, alpha,
                    ADD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
        """A tile of alpha x x^T + beta add on or above the diagonal, and its mirror image: half of the products.

        The result is symmetric to the bit by construction: a matrix unit need not sum the two halves of a diagonal tile in
        the same order, so its lower half is a copy of its upper one.
        """
        i, j, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if i > j:
            return
        rows, cols, k = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        left = x + n * x_n + (rows % M)[:, None] * x_m + k[None, :] * x_k  # % M: within bounds; what it yields is not stored
        right = x + n * x_n + (cols % M)[None, :] * x_m + k[:, None] * x_k
        total = alpha * tile_product(left, right, K, x_k, x_k, BLOCK, BLOCK, BLOCK_K)
        here, mask = n * M * M + rows[:, None] * M + cols[None, :], (rows[:, None] < M) & (cols[None, :] < M)
        if ADD:
            total += beta * tl.load(add + here, mask=mask, other=0.0).to(tl.float32)
        if i == j:
            total = tl.where(rows[:, None] <= cols[None, :], total, tl.trans(total))
        tile = total.to(out.dtype.element_ty)
        tl.store(out + here, tile, mask=mask)
        if i < j:
            there = n * M * M + cols[:, None] * M + rows[None, :]
            tl.store(out + there, tl.trans(tile), mask=(cols[:, None] < M) & (rows[None, :] < M))

    @triton.jit
    def relu_square_kernel(a, b, r, square, da, M, N, K, a_m, a_k, b_n, b_k, BACKWARD: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
        """A tile of a b^T, and what is made of it. Tiles go in groups of GROUP rows, whose operands stay in the L2 cache."""
        tiles_m, tiles_n, tile = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.program_id(0)
        first = tile // (GROUP * tiles_n) * GROUP
        height = min(tiles_m - first, GROUP)
        within = tile % (GROUP * tiles_n)
        rows = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        left = a + (rows % M).to(tl.int64)[:, None] * a_m + k[None, :] * a_k
        right = b + (cols % N)[None, :] * b_n + k[:, None] * b_k
        total = tile_product(left, right, K, a_k, b_k, BLOCK_M, BLOCK_N, BLOCK_K)
        here, mask = rows.to(tl.int64)[:, None] * N + cols[None, :], (rows[:, None] < M) & (cols[None, :] < N)
        if BACKWARD:
            kept = tl.load(r + here, mask=mask, other=0.0)
            tl.store(da + here, (2 * kept.to(tl.float32) * total).to(da.dtype.element_ty), mask=mask)
        else:
            kept = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL).to(r.dtype.element_ty)
            tl.store(r + here, kept, mask=mask)
        wide = kept.to(tl.float32)
        tl.store(square + here, (wide * wide).to(square.dtype.element_ty), mask=mask)

    @triton.jit
    def softcap_loss_kernel(logits, targets, weights, losses, gradient, V, count, stride, SCALE: tl.constexpr,
                            SHIFT: tl.constexpr, PER_SPAN: tl.constexpr, most, factor, BLOCK: tl.constexpr):
        """A row's loss and gradient. z lies in 0 .. 23, so that its exponentials need no maximum taken off before their sum."""
        row, lane = tl.program_id(0), tl.arange(0, BLOCK)
        logits += row.to(tl.int64) * stride
        gradient += row.to(tl.int64) * V
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
            sums += tl.where(start + lane < V, tl.exp(SCALE * tl.sigmoid((x + SHIFT) * PER_SPAN)), 0.0)
        lse = tl.log(tl.sum(sums))
        loss, total = 0.0, 0.0
        for k in tl.static_range(len(weights)):
            if row + k < count:
                x = tl.load(logits + tl.load(targets + row + k)).to(tl.float32)
                loss += weights[k] * (lse - SCALE * tl.sigmoid((x + SHIFT) * PER_SPAN))
                total += weights[k]
        tl.store(losses + row, loss)
        for start in range(0, V, BLOCK):
            cols = start + lane
            s = tl.sigmoid((tl.load(logits + cols, mask=cols < V, other=0.0).to(tl.float32) + SHIFT) * PER_SPAN)
            g = total * tl.exp(SCALE * s - lse)
            for k in tl.static_range(len(weights)):
                wanted = tl.load(targets + row + k, mask=row + k < count, other=-1)
                g -= tl.where(cols == wanted, weights[k], 0.0)
            g *= s * (1 - s) * factor
            g = tl.clamp(g, -most, most, propagate_nan=tl.PropagateNan.ALL)  # a NaN is to be seen, not to be hidden
            tl.store(gradient + cols, g.to(gradient.dtype.element_ty), mask=cols < V)

    @triton.jit
    def sum_rows_kernel(out, grad, rows, order, starts, fresh, columns, grad_stride, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
        """A piece of a row: the sum over its positions, in their order; UNROLL loads are on their way at once."""
        i, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        first, last = tl.load(starts + i), tl.load(starts + i + 1)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, last, UNROLL):
            for k in tl.static_range(UNROLL):
                position = tl.load(order + start + k, mask=start + k < last, other=0).to(tl.int64)
                width = tl.where(start + k < last, columns, 0)
                total += tl.load(grad + position * grad_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        here = out + tl.load(rows + i).to(tl.int64) * columns + cols
        width = tl.where(tl.load(fresh + i) == 0, columns, 0)
        total += tl.load(here, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(here, total.to(out.dtype.element_ty), mask=cols < columns)

    @triton.jit(do_not_specialize=["count"])  # which differs from step to step: nothing shall be compiled for it on the clock
    def transpose_kernel(out, x, rows, count, n, m, out_stride, x_stride, ADD: tl.constexpr, BLOCK: tl.constexpr):
        """A tile of out (m, n) = x^T; or added to those columns of out that `rows` (count,) names, from those rows of x."""
        n = count if ADD else n
        i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = (tl.load(rows + i, mask=i < n, other=0) if ADD else i).to(tl.int64)
        tile = tl.trans(tl.load(x + row[:, None] * x_stride + j[None, :], mask=(i[:, None] < n) & (j[None, :] < m)))
        here, mask = out + j.to(tl.int64)[:, None] * out_stride + row[None, :], (j[:, None] < m) & (i[None, :] < n)
        if ADD:
            tile = (tl.load(here, mask=mask).to(tl.float32) + tile.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(here, tile, mask=mask)


# Tiles, warps and stages of loads under way. Matrix products by how much shared memory a block may have: 99 KiB on consumers'
# cards, 163 on the A100, 227 on H100 and B200. Not tuned on a GPU yet.
GRAM_TILES = {size: dict(BLOCK=size, BLOCK_K=64, num_warps=size // 16, num_stages=3) for size in (64, 128)}
RELU_SQUARE_TILES = {
    "small": dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, GROUP=8, num_warps=8, num_stages=4),
    "large": dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=3),
    "large backward": dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=4)}  # 256 columns spill
LOSS_TILES, SUM_ROWS_TILES = dict(BLOCK=4096, num_warps=8), dict(BLOCK=256, UNROLL=8, num_warps=2)
TRANSPOSE_TILES = dict(BLOCK=64, num_warps=4)


def triton_gram(x: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    n, M, K = x.shape
    out, half = x.new_empty(n, M, M), n * math.ceil(M / 128) ** 2 // 2
    size = 128 if x.is_cuda and half >= torch.cuda.get_device_properties(x.device).multi_processor_count else 64
    blocks = triton.cdiv(M, size)
    gram_kernel[(blocks, blocks, n)](x, out if add is None else add.contiguous(), out, M, K, *x.stride(), beta, alpha,
                                     ADD=add is not None, **GRAM_TILES[size])
    return out


def _relu_square(a: Tensor, b: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
    (M, K), N = a.shape, b.size(0)
    out, square = a.new_empty(M, N), a.new_empty(M, N)
    large = a.is_cuda and torch.cuda.get_device_capability(a.device)[0] in (9, 10)
    tiles = RELU_SQUARE_TILES["small" if not large else "large" if r is None else "large backward"]
    blocks = triton.cdiv(M, tiles["BLOCK_M"]) * triton.cdiv(N, tiles["BLOCK_N"])
    relu_square_kernel[(blocks,)](a, b, out if r is None else r, square, out, M, N, K, *a.stride(), *b.stride(),
                                  BACKWARD=r is not None, **tiles)
    return out, square


def triton_relu_square(h: Tensor, fc: Tensor) -> tuple[Tensor, Tensor]:
    return _relu_square(h, fc, None)


def triton_relu_square_grad(dy: Tensor, proj: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return _relu_square(dy, proj, r)


def triton_softcap_loss(logits: Tensor, targets: Tensor, weights: tuple[float, ...], unit: float = 0.0
                        ) -> tuple[Tensor, Tensor]:
    n, V = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    gradient = torch.empty_like(logits, dtype=torch.float8_e5m2 if unit else None, memory_format=torch.contiguous_format)
    softcap_loss_kernel[(n,)](logits, targets, weights, losses, gradient, V, len(targets), logits.stride(0), SOFTCAP_SCALE,
                              SOFTCAP_SHIFT, 1 / SOFTCAP_SPAN, torch.finfo(gradient.dtype).max,
                              SOFTCAP_SCALE / SOFTCAP_SPAN / (unit or 1.0), **LOSS_TILES)
    return losses, gradient


def triton_sum_rows(out: Tensor, grad: Tensor, index: RowIndex) -> None:
    out, grad = out.view(out.size(0), -1), grad.flatten(1)
    grid = (len(index.rows), triton.cdiv(out.size(1), SUM_ROWS_TILES["BLOCK"]))
    sum_rows_kernel[grid](out, grad, index.rows, index.order, index.starts, index.fresh.view(torch.uint8), out.size(1),
                          grad.stride(0), **SUM_ROWS_TILES)


def triton_transpose_copy(out: Tensor, x: Tensor) -> None:
    if x.element_size() == 1:  # no card's fp8 is needed for it
        out, x = out.view(torch.uint8), x.view(torch.uint8)
    n, m = x.shape
    grid = (triton.cdiv(n, TRANSPOSE_TILES["BLOCK"]), triton.cdiv(m, TRANSPOSE_TILES["BLOCK"]))
    transpose_kernel[grid](out, x, x, 0, n, m, out.stride(0), x.stride(0), ADD=False, **TRANSPOSE_TILES)


def triton_transpose_add(out: Tensor, x: Tensor, rows: Tensor) -> None:
    grid = (triton.cdiv(len(rows), TRANSPOSE_TILES["BLOCK"]), triton.cdiv(x.size(1), TRANSPOSE_TILES["BLOCK"]))
    transpose_kernel[grid](out, x, rows, len(rows), *x.shape, out.stride(0), x.stride(0), ADD=True, **TRANSPOSE_TILES)


class Ops(NamedTuple):
    """The forms of the operations that a run uses."""
    attention: Callable = attention
    gram: Callable = gram
    relu_square: Callable = relu_square
    relu_square_grad: Callable = relu_square_grad
    softcap_loss: Callable = softcap_loss
    sum_rows: Callable = sum_rows
    transpose_copy: Callable = transpose_copy
    transpose_add: Callable = transpose_add
    compiled: Callable = lambda function: function
    number: Callable = float  # of what changes from step to step, for a compiled function to multiply by
    fp8: bool = False


PLAIN = Ops()

KERNELS = {  # what Config.kernels names
    "gram": {"gram": triton_gram},
    "relu_square": {"relu_square": triton_relu_square, "relu_square_grad": triton_relu_square_grad},
    "softcap_loss": {"softcap_loss": triton_softcap_loss},
    "sum_rows": {"sum_rows": triton_sum_rows},
    "transpose": {"transpose_copy": triton_transpose_copy, "transpose_add": triton_transpose_add},
}


def flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: int, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # not above: the import takes a second, and sets an environment variable
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(window, 0))


def flash_attention_refusal(name: str, dtype: str, capability: tuple[int, int]) -> str:
    """Why torch's FlashAttention, for "fa3" in version 3, which this activates, cannot run; "" if it can. (0, 0): no GPU."""
    if not capability[0] or dtype != "bfloat16":
        return f"FlashAttention is for bf16, not {dtype}" if capability[0] else "FlashAttention needs a GPU, there is none here"
    from torch.nn.attention.varlen import varlen_attn
    if not {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"torch {torch.__version__}'s varlen_attn knows no window, torch 2.13's does"
    if name == "fa3" and capability[0] != 9:
        return ("FlashAttention-3 is for compute capability 9.0 (H100), "
                f"this GPU's compute capability is {capability[0]}.{capability[1]}")
    if name == "fa3":
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as e:
            return f"FlashAttention-3 cannot be used ({brief(e)}), README.md says how to get it"
    return ""


def choose_ops(cfg: Config, device: torch.device, capability: tuple[int, int] | None = None, world: int = 1) -> Ops:
    """The forms that the config asks for, for a run of `world` processes; `capability` of the GPU, by default the device's.
    Raises UserError if one cannot run here, with what would: a timed run is never given another form than it asked for."""
    gpu, interpreted = device.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    capability = capability or (torch.cuda.get_device_capability(device) if gpu else (0, 0))
    card = f"this GPU's compute capability is {capability[0]}.{capability[1]}" if gpu else "there is no GPU here"
    dtype = "float32" if cfg.kernels and triton and interpreted else cfg.dtype  # of what would run
    wrong = {}  # setting that would run -> why what was asked for cannot
    if gpu and capability < (8, 0) and (cfg.dtype == "bfloat16" or cfg.kernels or cfg.attention != "dense"):
        raise UserError(f"bf16, the kernels and FlashAttention need compute capability 8.0 (A100, RTX 30) or newer, {card}; "
                        "--preset cpu, which computes in fp32, would run")
    if cfg.kernels and triton is None:
        wrong["kernels="] = "the kernels need the package triton (pip install triton)"
    elif cfg.kernels and not gpu and not interpreted:
        wrong["kernels="] = f"the kernels need a GPU (or TRITON_INTERPRET=1, for tests), {card}"
    elif interpreted and cfg.kernels and (cfg.dtype, cfg.polar_dtype) != ("float32", "float32"):
        wrong["dtype=float32 --set polar_dtype=float32"] = "Triton's interpreter is right in fp32 only"
    elif not interpreted and cfg.kernels and (cfg.dtype, cfg.polar_dtype) != ("bfloat16", "bfloat16"):
        wrong["kernels="] = f"the kernels are for bf16, not dtype={cfg.dtype}, polar_dtype={cfg.polar_dtype}"
    if cfg.attention != "dense" and (refusal := flash_attention_refusal(cfg.attention, dtype, capability)):
        wrong["attention=dense" if flash_attention_refusal("varlen", dtype, capability) else "attention=varlen"] = refusal
    if cfg.fp8 and gpu and capability < (8, 9):
        wrong["fp8=false"] = f"FP8 needs compute capability 8.9 (RTX 40, H100) or newer, {card}"
    if cfg.fp8 and dtype == "float64":
        wrong["fp8=false"] = "FP8 is for dtype bfloat16 or float32"
    odd = [f"{n} {what}" for n, what in ((cfg.dim, "is the model's width"), (cfg.padded_vocab, "is padded_vocab"),
                                         (cfg.head_chunk, "is head_chunk")) if n % 16]
    odd += [f"{stage.tokens} tokens a batch make slices" for stage in cfg.stages if stage.tokens % (16 * slices_of(cfg, world))]
    if cfg.fp8 and odd:
        wrong["fp8=false"] = f"FP8 products take multiples of 16, and {odd[0]}"
    compiler = any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang", os.environ.get("CXX", "g++"), "clang++")))
    if cfg.compile and not compiler:
        wrong["compile=false"] = "torch.compile needs a C++ compiler (g++, clang++)"
    if cfg.kernels and gpu and not interpreted and not compiler:
        wrong["kernels="] = "Triton needs a C compiler (gcc, clang)"
    if wrong:
        raise UserError("; ".join(wrong.values()) + "; this would run: "
                        + ("" if gpu or cfg.preset == "cpu" else "--preset cpu; or, slowly, this model with ")
                        + " ".join(f"--set {setting}" for setting in wrong))
    chosen = {field: form for name in cfg.kernels for field, form in KERNELS[name].items()}
    if cfg.compile:
        torch._dynamo.config.recompile_limit = 64  # 8 by default, but one function serves all kinds of layers
        chosen |= {"compiled": cache(partial(torch.compile, fullgraph=True)),
                   "number": partial(torch.tensor, dtype=wide_dtype(cfg))}
    return Ops(**chosen, attention=attention if cfg.attention == "dense" else flash_attention, fp8=cfg.fp8)


def fp8_product(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """scale a b for fp8 a (n, k), row by row in memory, and b (k, m), column by column; scale 0-d fp32; -> dtype."""
    return torch._scaled_mm(a, b, scale, torch.ones_like(scale), out_dtype=dtype, use_fast_accum=fast)


def write_grad(main_grad: Tensor, start: int, a: Tensor, b: Tensor, overwrite: bool, scale: Tensor | None = None) -> None:
    """Writes a^T b, or a times b if b is a number, to the rows of main_grad (.., cols), taken as one matrix, that begin with
    `start`, or adds it to them.

    a (T, rows), b (T, cols); or a (rows, cols), b 0-d of any float dtype. Rounded once, what is there included. If a and b are
    fp8, both column by column in memory, it is scale a^T b, which is made in fp32 beside main_grad.
    """
    rows = a.size(1) if b.dim() else a.size(0)
    out = main_grad.view(-1, main_grad.size(-1))[start:start + rows]
    if a.element_size() == 1:
        product = fp8_product(a.T, b, scale, torch.float32)
        out.copy_(product) if overwrite else out.add_(product)
    elif b.dim():
        torch.mm(a.T, b, out=out) if overwrite else out.addmm_(a.T, b)
    else:
        torch.mul(a, b, out=out) if overwrite else out.addcmul_(a, b)


class WeightGrad:
    """What a product's backward does with the gradient of its weight. The contract is TransformerEngine's (pull request 2871):

        main_grad   delayed   weight has grad_added_to_main_grad   autograd is given
        none        no        -                                    the gradient
        none        yes       -                                    None; `run` adds it to weight.grad
        a buffer    either    no                                   None
        a buffer    either    yes (it becomes True)                a new tensor, so that the hooks of the weight fire

    main_grad, of the weight's shape and dtype, stays. While it is `fresh`, nothing having been written since the optimizer
    used it, a backward overwrites it, else adds to it; so every row in use must be given in every backward, and once; and
    whoever calls the backward says afterwards that it was `written`. The new tensor is not initialised; a hook is to drop it.
    A view of main_grad in its place would count the gradient twice, for autograd adds what it is given.
    """

    def __init__(self, weight: Tensor | None = None, main_grad: Tensor | None = None):
        self.weight, self.main_grad = weight, main_grad
        self.fresh, self.delayed, self.queue = True, False, []

    def give(self, start: int, a: Tensor, b: Tensor, first: bool = True,
             scale: Tensor | None = None) -> Tensor | None:
        """Takes the gradient, as `write_grad` does, of the weight's rows from `start`; not `first`: more of what this backward
        has given already. -> for autograd."""
        if self.delayed:
            self.queue.append((start, a, b, first, scale))
        elif self.main_grad is None:
            return a.T @ b if b.dim() else a * b
        else:
            write_grad(self.main_grad, start, a, b, self.fresh and first, scale)
        if self.main_grad is None or not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        return a.new_empty(a.size(1), b.size(1)) if b.dim() else torch.empty_like(a)

    def written(self) -> None:
        """After a backward."""
        if self.queue:
            self.queue.append(None)
        else:
            self.fresh = False

    @torch.no_grad()
    def run(self) -> None:
        """Computes what was delayed."""
        if self.queue and self.main_grad is None and self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        for product in self.queue:
            if product is None:  # a backward's end
                self.fresh = False
                continue
            start, a, b, first, scale = product
            if self.main_grad is None:
                write_grad(self.weight.grad, start, a, b, False, scale)
            else:
                write_grad(self.main_grad, start, a, b, self.fresh and first, scale)
        self.queue.clear()


TO_AUTOGRAD = WeightGrad()

# Units of the head's fp8 numbers (records 19, 51): the largest that the format holds, 448 in e4m3, stands for x = 100, w = 1.6;
# gradients, in e5m2 for its range, are in units of this times their scale. Fixed, so that no maximum is looked for in a step.
FP8_X, FP8_W, FP8_GRAD = 100 / 448, 1.6 / 448, 0.75 / 448


class Part(NamedTuple):
    """A product's weight: some rows of a bank, or all of a parameter."""
    w: Tensor  # (rows, cols)
    start: int = 0  # where they begin in the bank, taken as one matrix
    grad: WeightGrad = TO_AUTOGRAD


def operand(scale: Tensor, weights: list[Tensor]) -> Tensor:
    """scale * the weights one below another, rounded to their dtype."""
    return scale * (torch.cat(weights) if len(weights) > 1 else weights[0])


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, scale, places, *weights):
        ctx.places = places
        ctx.save_for_backward(h, scale, *weights)
        return F.linear(h, operand(scale, weights))

    @staticmethod
    def backward(ctx, dy):
        h, scale, *weights = ctx.saved_tensors
        dscale, given = 0, []
        for (start, grad), w, part in zip(ctx.places, weights, dy.split([w.size(0) for w in weights], dim=1)):
            product = part.T @ h  # of the operand; main_grad gets it times the scale
            dscale = dscale + (product.to(scale.dtype) * w).sum()
            given.append(grad.give(start, product, scale))
        return dy @ operand(scale, weights), dscale, None, *given


def linear(h: Tensor, scale: Tensor, parts: list[Part]) -> Tensor:
    """h (T, cols) @ operand(scale, parts)^T; scale 0-d, at least fp32, its gradient summed so."""
    return Linear.apply(h, scale, tuple((part.start, part.grad) for part in parts), *(part.w for part in parts))


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, places, ops, fc, proj):
        r, square = ops.relu_square(h, fc)
        ctx.places, ctx.ops = places, ops
        ctx.save_for_backward(h, r, fc, proj)
        return square @ proj

    @staticmethod
    def backward(ctx, dy):
        h, r, fc, proj = ctx.saved_tensors
        (fc_start, fc_grad), (proj_start, proj_grad) = ctx.places
        da, square = ctx.ops.relu_square_grad(dy, proj, r)
        given = proj_grad.give(proj_start, square, dy)
        return da @ fc, None, None, fc_grad.give(fc_start, da, h), given


def mlp(h: Tensor, fc: Part, proj: Part, ops: Ops = PLAIN) -> Tensor:
    """relu(h fc^T)^2 proj: h (T, d), fc and proj both (F, d)."""
    return MLP.apply(h, ((fc.start, fc.grad), (proj.start, proj.grad)), ops, fc.w, proj.w)


class Handed(torch.autograd.Function):
    """A number whose backward hands autograd a weight's gradient out of a list. Autograd copies what anybody else holds: what
    is passed to torch.autograd.backward itself would be copied."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, one):
        return ctx.gradient.pop(), None


# ======================================================================================================================
# 8  Model. Parameters under the names of the parameter table; a trunk from embedding rows to the head's input, and from
#    that, with section 6's head, the training and validation loss.
# ======================================================================================================================

class Rotary:
    """Tables of cos and sin for positions 0 .. 2 * length - 1, and the softmax scale, which change together (YaRN).

    Rotary embedding: Su et al. 2021, arXiv:2104.09864. Half of each head is not rotated, to match content at any distance
    (record 17), so a row holds head_dim / 4 angles. Plain heads use rows t; paired heads stand at rows 2t and 2t + 1. YaRN
    keeps what was learnt in short windows right in longer ones (PR 122; Peng, Quesnelle, Fan, Shippole 2023,
    arXiv:2309.00071).
    """

    def __init__(self, cfg: Config, length: int, device: torch.device):
        self.length, self.dtype, self.wide = 2 * length, dtype_of(cfg.dtype), wide_dtype(cfg)
        self.freq = (1 / 1024) ** torch.linspace(0, 1, cfg.head_dim // 4, dtype=self.wide, device=device)
        self.scale = cfg.attn_scale
        self.window = cfg.stages[0].long * cfg.window_unit
        self._tabulate()

    def _tabulate(self) -> None:
        angles = torch.arange(self.length, dtype=self.wide, device=self.freq.device)[:, None] * self.freq
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def extend(self, window: int) -> None:
        """Adapts to long windows of `window` tokens: slow frequencies stretch with the window, fast ones stay."""
        if window == self.window:
            return
        ratio = self.window / window
        turns = self.window * self.freq / (2 * math.pi)
        keep = ((turns - 1) / (32 - 1)).clamp(0, 1)
        self.freq = self.freq * (ratio + keep * (1 - ratio))
        self.scale *= 0.2 * math.log(window / self.window) + 1
        self.window = window
        self._tabulate()


# What stands between the products: pure functions, each compiled on its own. They differ only with a layer's kind, so that all
# layers together take few compilations; products, FlashAttention and our kernels are called as they are.

def enter(embed_rows: Tensor, bigram_rows: Tensor, smear: Tensor, smear_gate: Tensor, bigram_lambda: Tensor
          ) -> tuple[Tensor, Tensor, Tensor]:
    """-> x0, each token's row (T, d) with a gated share of the one before mixed in, normalised; the stream x; norm(x)."""
    # Smear: what attention would spend a head on, looking one token back, comes for nothing (PR 130).
    gate = smear * torch.sigmoid(F.linear(embed_rows[1:, :12], smear_gate))
    x0 = norm(torch.cat([embed_rows[:1], embed_rows[1:] + gate * embed_rows[:-1]]))
    # An embedding of the hashed pair of this token and the one before: frequent pairs need no layer to be recognised (PR 201).
    x = x0 + bigram_lambda * bigram_rows
    return x0, x, norm(x)


def add_saved(x: Tensor, x0: Tensor, saved: Tensor, skip: Tensor, skip_gate: Tensor) -> tuple[Tensor, Tensor]:
    """The stream with a saved activation added, gated; its norm. As in a U-net, a late layer gets an early one's view back
    (record 11, gate of PR 186)."""
    x = x + torch.sigmoid(skip) * 2 * torch.sigmoid(F.linear(x0[:, :12], skip_gate)) * saved
    return x, norm(x)


def blend(scales: list[Tensor], tensors: list[Tensor], normed: bool) -> tuple[Tensor, Tensor | None]:
    """The sum, from left to right, of 0-d scales times tensors (T, d); its norm, if it is asked for.

    With learnt scales for the stream, the layer's output, x0 and the bigram: each layer can lean on the input again (record 9).
    """
    x = scales[0] * tensors[0]
    for scale, t in zip(scales[1:], tensors[1:]):
        x = x + scale * t
    return x, norm(x) if normed else None


def make_heads(qkv: Tensor, h: Tensor, value_row: Tensor | None, ve_gate: Tensor | None, cos: Tensor, sin: Tensor, heads: int,
               paired: bool, shift: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a layer (T, H, D), or (2T, H/2, D) for paired heads, from their product (T, 3d) and its input h (T, d);
    cos, sin (2T, D/4); value_row (T, d) or None."""
    T, d = h.shape
    D = d // heads
    q, k, v = qkv.view(T, 3, heads, D).unbind(1)
    q, k = norm(q), norm(k)  # keeps scores bounded at high learning rates (record 5; Henry et al. 2020, arXiv:2010.04245)
    if value_row is not None:
        # A further embedding of the token, straight into the values, which early layers' mixing need not carry (records 14, 17;
        # value residuals: Zhou et al. 2024, arXiv:2410.17897), gated by a few channels (PR 186).
        gate_input = h[:, :12] if paired else torch.cat([h[:, :6], value_row[:, :6]], dim=-1)
        v = v + 2 * torch.sigmoid(F.linear(gate_input, ve_gate))[:, :, None] * value_row.view(T, heads, D)
    if paired:
        # Two heads share one stream of twice the length, so that each query sees both heads' keys and values: more to attend
        # to for the same products (PR 191).
        # Memory order (T, H, D) read as 2T rows of H/2 heads: head h stands at time 2t + h mod 2 for the rotation, and in row
        # 2t + h // (H/2) for the attention, whose window still counts rows.
        cos, sin = (t.view(T, 1, 2, D // 4) for t in (cos, sin))
        q, k = (rotate(t.view(T, heads // 2, 2, D), cos, sin).view(2 * T, heads // 2, D) for t in (q, k))
        return q, k, v.reshape(2 * T, heads // 2, D)
    q, k = (rotate(t, cos[:T, None], sin[:T, None]) for t in (q, k))
    return q, shift_keys(k) if shift else k, v


def gate_heads(y: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    """Attention's output y (T, H, D), each head times its gate of h (T, d); -> (T, d).

    A head that has nothing to say can be shut, instead of attending to some first token as a sink (PR 117).
    """
    return (y * torch.sigmoid(F.linear(h[:, :12], gate))[:, :, None]).flatten(1)


def leave(x: Tensor, back: Tensor, backout: Tensor) -> Tensor:
    """The head's input: part of what early layers wrote served later layers only, and is taken back (PR 140)."""
    return norm(x - backout * back)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the softcapped cross-entropies of the next token, in at least fp32, for logits (n, V) of any float dtype."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = SOFTCAP_SCALE * torch.sigmoid((logits + SOFTCAP_SHIFT) / SOFTCAP_SPAN)
    return F.cross_entropy(z, targets, reduction="sum")


class Sequences(NamedTuple):
    """What attention needs to know of a micro-batch besides its activations."""
    cu_seqlens: Tensor
    paired_cu_seqlens: Tensor  # of paired heads, whose streams have two rows a token
    longest: int
    short: int
    long: int


class GPT(nn.Module):
    """The language model; parameters shaped as `param_shapes(cfg, world)` says, initial values drawn from `seed`."""

    def __init__(self, cfg: Config, world: int = 1, device: torch.device | str = "cpu", seed: int = 0, ops: Ops = PLAIN):
        super().__init__()
        self.cfg, self.ops = cfg, ops
        self.in_flight = {}  # parameters that an optimizer is still gathering, by name: what is to be waited for before use
        shapes = param_shapes(cfg, world)
        for row in cfg.params:
            dtype = dtype_of(cfg.dtype) if row.dtype == "model" else wide_dtype(cfg)
            self.register_parameter(row.name, nn.Parameter(torch.zeros(shapes[row.name], dtype=dtype, device=device)))
        length = max([cfg.val_slice_tokens] + [stage.tokens // slices_of(cfg, world) for stage in cfg.stages])
        self.rotary = Rotary(cfg, length, torch.device(device))
        attending = [i for i, layer in enumerate(cfg.layers) if layer.attention]
        self.attention_index = {layer: n for n, layer in enumerate(attending)}  # a layer's place in the attention banks
        self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Drawn on the CPU, bank by bank without its padding, so that neither device nor world size changes the values."""
        generator, cfg, L = torch.Generator().manual_seed(seed), self.cfg, len(self.cfg.layers)
        shapes = param_shapes(cfg, 1)

        def uniform(rows, *shape):
            bound = math.sqrt(3) * 0.5 * cfg.dim ** -0.5
            return (torch.rand(rows, *shape, generator=generator) * 2 - 1) * bound

        # Drawn for one layer more than there are, as when the bank was padded by one: a seed keeps its values.
        mlp_bank = uniform(L + 1, *shapes["mlp_bank"][1:])[:L]
        mlp_bank[:, 1] = 0
        lm_head = 0.005 * torch.randn(shapes["lm_head"], generator=generator)
        values = {
            "qk_bank": uniform(*shapes["qk_bank"]), "vo_bank": uniform(*shapes["vo_bank"]), "mlp_bank": mlp_bank,
            "lm_head": lm_head, "embed": lm_head.T,
            "value_embeds": 0.01 * torch.randn(shapes["value_embeds"], generator=generator),
            "post_lambdas": torch.ones(L, 2), "resid_lambdas": torch.full((L, 2), math.sqrt(1.1)),
            "bigram_lambdas": torch.full((L,), 0.05), "scalars": torch.tensor([0.5, 1.0] * L + [0.0, 0.5, -1.5]),
        }
        for name, value in values.items():
            getattr(self, name)[:value.size(0)].copy_(value)

    def weight(self, name: str) -> Tensor:
        """The parameter, complete."""
        if name in self.in_flight:
            with torch.no_grad():
                self.in_flight.pop(name).wait()
        return getattr(self, name)

    def parts(self, name: str, rows: int, count: int, grads: dict[str, WeightGrad]) -> list[Part]:
        """The first `count` matrices, of `rows` rows, of a bank."""
        # One unbind a bank: autograd, if it has to, assembles the bank's gradient once; of slices it would add up whole banks.
        matrices = self.weight(name).view(-1, self.cfg.dim)[:count * rows].view(count, rows, self.cfg.dim).unbind()
        return [Part(w, i * rows, grads.get(name, TO_AUTOGRAD)) for i, w in enumerate(matrices)]

    def trunk(self, embed_rows: Tensor, bigram_rows: Tensor, value_rows: Tensor, seq: Sequences,
              grads: dict[str, WeightGrad]) -> Tensor:
        """Rows of the three tables, (T, d), (T, d), (T, tables, d), to the head's input (T, d). The backward gives the banks'
        gradients to `grads`, where it names them, else to autograd."""
        cfg, L, dtype = self.cfg, len(self.cfg.layers), embed_rows.dtype
        *attn_scales, smear, backout, skip = self.scalars.unbind()
        post, resid, x0_lambda, bigram_lambda = (t.to(dtype).flatten().unbind() for t in (
            self.post_lambdas, self.resid_lambdas, self.x0_lambdas, self.bigram_lambdas))
        attn_gates, ve_gates = self.attn_gate_bank.unbind(), self.ve_gate_bank.unbind()
        n = len(self.attention_index)
        piece = self.ops.compiled
        x0, x, h = piece(enter)(embed_rows, bigram_rows, smear, self.smear_gate, bigram_lambda[0])
        qk = self.parts("qk_bank", 2 * cfg.dim, n, grads)
        vo = self.parts("vo_bank", cfg.dim, 2 * n, grads)
        values, matrices, saved = value_rows.unbind(1), None, {}
        for i, layer in enumerate(cfg.layers):
            if layer.adds:
                x, h = piece(add_saved)(x, x0, saved[layer.adds], skip, self.skip_gate)
            if layer.attention:
                m = self.attention_index[i]
                value = (None, None) if layer.value is None else (values[layer.value], ve_gates[layer.value])
                y = self.attention(i, h if layer.reads == "stream" else saved["normed back"], *value,
                                   [qk[m], vo[2 * m]], vo[2 * m + 1], attn_scales[2 * i:2 * i + 2], attn_gates[m], seq)
                scales, tensors = [resid[2 * i], post[2 * i], x0_lambda[i]], [x, y, x0]
                if i > 0:  # layer 0's share of the bigram row went in before it
                    scales.append(bigram_lambda[i])
                    tensors.append(bigram_rows)
                x, h = piece(blend)(scales, tensors, True)
            matrices = matrices or self.parts("mlp_bank", cfg.mlp_dim, 2 * L, grads)
            y = self.mlp(i, h, matrices[2 * i], matrices[2 * i + 1])
            after = cfg.layers[i + 1] if i + 1 < L else None
            normed = layer.saves == "back" or after and not after.adds and (after.reads == "stream" or not after.attention)
            x, h = piece(blend)([resid[2 * i + 1], post[2 * i + 1]], [x, y], bool(normed))
            if layer.saves:
                saved[layer.saves] = x
                if layer.saves == "back":
                    saved["normed back"] = h
        return piece(leave)(x, saved["back"], backout)

    def mlp(self, i: int, h: Tensor, fc: Part, proj: Part) -> Tensor:
        """Layer i's MLP on h (T, d). A method, like attention, so that a subclass can watch or replace one layer's."""
        return mlp(h, fc, proj, self.ops)

    def attention(self, i: int, h: Tensor, value_row: Tensor | None, ve_gate: Tensor | None, qkv: list[Part], out: Part,
                  scales: list[Tensor], gate: Tensor, seq: Sequences) -> Tensor:
        """Layer i's attention on h (T, d) with weights scales[0] * qkv (3d, d) and scales[1] * out (d, d); value_row (T, d),
        ve_gate and gate (H, 12)."""
        (T, d), layer, rotary = h.shape, self.cfg.layers[i], self.rotary
        paired, long = layer.attention == "paired", layer.window == "long"
        q, k, v = self.ops.compiled(make_heads)(linear(h, scales[0], qkv), h, value_row, ve_gate, rotary.cos[:2 * T],
                                                rotary.sin[:2 * T], self.cfg.heads, paired, long and not paired)
        ends, longest = (seq.paired_cu_seqlens, 2 * seq.longest) if paired else (seq.cu_seqlens, seq.longest)
        y = self.ops.attention(q, k, v, ends, longest, seq.long if long else seq.short, rotary.scale)
        y = self.ops.compiled(gate_heads)(y.view(T, self.cfg.heads, -1), h, gate)
        return linear(y, scales[1], [out])

    def look_up(self, batch: MicroBatch, leaves: bool = False) -> dict[str, Tensor]:
        """The tables' rows at a micro-batch's positions, (T, d), of value_embeds (T, tables, d), by the table's name; with
        `leaves` their gradients come to rest on them, else they go on into the tables, all of whose rows autograd fills."""
        numbers, rows = {"tokens": batch.inputs, "bigrams": batch.bigram}, {}
        for row in self.cfg.params:
            if row.rows:
                table = self.weight(row.name)
                found = F.embedding(numbers[row.rows], (table.detach() if leaves else table).flatten(1))
                rows[row.name] = found.unflatten(1, table.shape[1:]).requires_grad_(found.requires_grad or leaves)
        return rows

    def activations(self, batch: MicroBatch, short: int, long: int, rows: dict[str, Tensor] | None = None,
                    grads: dict[str, WeightGrad] | None = None) -> Tensor:
        """The head's input (T, d), for a micro-batch on this model's device; windows in tokens; rows from `look_up`."""
        rows = rows or self.look_up(batch)
        return self.trunk(rows["embed"], rows["bigram_embed"], rows["value_embeds"],
                          Sequences(batch.cu_seqlens, 2 * batch.cu_seqlens, batch.longest, short, long), grads or {})

    def head(self, x: Tensor, targets: Tensor, weights: tuple[float, ...], grad: WeightGrad = TO_AUTOGRAD,
             grad_scale: float = 1.0) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Forward and backward of the head at once, for x (T, d) and targets (T,) int64, `head_chunk` tokens at a time: logits
        exist for no more, nor does their gradient, unless its product with x is delayed. lm_head's gradient goes to `grad`.
        `grad_scale`, which is in the weights already, sets the unit of FP8 gradients.

        -> the multi-token loss summed over the tokens, 0-d, at least fp32; and where the backward of the rest begins, tensors
        with their gradients: x, and what leads to lm_head if autograd is to be given something.
        """
        to_autograd, n = grad.main_grad is None and not grad.delayed, self.cfg.head_chunk
        w = self.weight("lm_head")
        with torch.no_grad():
            sink = WeightGrad(None, torch.empty_like(w)) if to_autograd else grad
            dx, loss = torch.empty_like(x), torch.zeros((), dtype=wide_dtype(self.cfg), device=x.device)
            products = (self.fp8_products if self.ops.fp8 else self.products)(x.detach(), w, weights, grad_scale)
            for i in range(0, x.size(0), n):
                losses, *given = products(slice(i, i + n), targets[i:i + n + len(weights) - 1], dx[i:i + n])
                loss += losses.sum()
                given = sink.give(0, *given[:2], i == 0, *given[2:])
        given = [sink.main_grad] if to_autograd else [given]
        begin = [(x, dx)]
        if self.lm_head.requires_grad and given[0] is not None:
            begin.append((Handed.apply(self.lm_head, given), self.lm_head.new_ones(())))
        return loss, begin

    def products(self, x: Tensor, w: Tensor, weights: tuple[float, ...], grad_scale: float) -> Callable:
        """-> for a chunk of tokens: writes its dx, gives losses and the two factors of w's gradient."""
        def chunk(part: slice, targets: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            losses, gradient = self.ops.softcap_loss(x[part] @ w, targets, weights)
            torch.mm(gradient, w.T, out=dx)
            return losses, x[part], gradient
        return chunk

    def fp8_products(self, x: Tensor, w: Tensor, weights: tuple[float, ...], grad_scale: float) -> Callable:
        """The same in 8 bits, with fixed units; also gives the factors' unit. A product takes its second factor column by
        column, so that all three are needed both ways."""
        unit, turned = FP8_GRAD * grad_scale, lambda t: t.new_empty(t.size(1), t.size(0))
        forward, dx_scale, dw_scale = (torch.full((), scale, device=x.device)
                                       for scale in (FP8_X * FP8_W, unit * FP8_W, FP8_X * unit))
        x8, w8 = (self.ops.compiled(to_fp8)(t, u, torch.float8_e4m3fn) for t, u in ((x, FP8_X), (w, FP8_W)))
        xt8, wt8 = turned(x8), turned(w8)
        self.ops.transpose_copy(xt8, x8)
        self.ops.transpose_copy(wt8, w8)

        def chunk(part: slice, targets: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            logits = fp8_product(x8[part], wt8.T, forward, torch.bfloat16, fast=True)
            losses, gradient = self.ops.softcap_loss(logits, targets, weights, unit)
            dx.copy_(fp8_product(gradient, w8.T, dx_scale, dx.dtype))
            self.ops.transpose_copy(gradient_t := turned(gradient), gradient)
            return losses, xt8[:, part].T, gradient_t.T, dw_scale
        return chunk

    @torch.no_grad()
    def validation_loss(self, batch: MicroBatch, short: int, long: int) -> Tensor:
        """Mean cross-entropy of the next token, in at least fp32 from the logits on."""
        x, w = self.activations(batch, short, long), self.weight("lm_head")
        total = torch.zeros((), dtype=wide_dtype(self.cfg), device=x.device)
        for i in range(0, x.size(0), self.cfg.head_chunk):
            part = slice(i, i + self.cfg.head_chunk)
            total += self.ops.compiled(next_token_loss)(x[part] @ w, batch.targets[part])
        return total / x.size(0)

    def state(self) -> dict:
        """Everything that training changes here: live tensors and numbers, by name."""
        return {**{name: self.weight(name) for name, _ in self.named_parameters()}, "rotary.freq": self.rotary.freq,
                "rotary.scale": self.rotary.scale, "rotary.window": self.rotary.window}

    @torch.no_grad()
    def load_state(self, state: dict) -> None:
        """From `state()` of the same config; banks may come from another world size, whose padding differs."""
        for name, _ in self.named_parameters():
            p = self.weight(name)
            rows = min(p.size(0), state[name].size(0))
            p[:rows].copy_(state[name][:rows])
        self.rotary.freq.copy_(state["rotary.freq"])
        self.rotary.scale, self.rotary.window = state["rotary.scale"], state["rotary.window"]
        self.rotary._tabulate()


# ======================================================================================================================
# 9  Exchange. Averages over ranks, of whole gradients or of a table's touched rows, asynchronous: a Pending is waited for where
#    its result is first used. Counts the bytes that it sends.
# ======================================================================================================================

# torch 2.13 renamed these two and warns of the old names, which are all that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(NamedTuple):
    result: Tensor
    work: dist.Work | None = None
    finish: Callable[[Tensor], Tensor] | None = None  # what is left to do with the result when it has arrived

    def wait(self) -> Tensor:
        if self.work is not None:
            with in_contact():
                self.work.wait()
        return self.result if self.finish is None else self.finish(self.result)


def rank_order_mean(parts: Tensor) -> Tensor:
    """Mean over the first axis of `parts` (n, ...), summed from 0 in at least fp32 and in order."""
    total = torch.zeros_like(parts[0], dtype=torch.promote_types(parts.dtype, torch.float32))
    for part in parts:
        total += part
    return total.div_(len(parts))


class Route(NamedTuple):
    """Which rows go from this rank to each rank, and come from each, in one exchange of touched rows."""
    rows: Tensor         # (k,) int32 of the table, ascending, so by owner
    sent: list[int]      # how many to each rank
    received: list[int]  # how many from each rank
    numbers: Pending     # (sum(received),) int32: the rows that come, counted within this rank's block, by sender


def add_rows(block: Tensor, values: Tensor, route: Route) -> Tensor:
    """Mean over ranks of the rows that came, in `block` (N / world, ...), which is 0 elsewhere: `values` (sum(received), ...)
    are added in the order of the ranks, to the bits of rank_order_mean. A sender's rows differ, so no two additions meet."""
    numbers = route.numbers.wait()
    for rows, part in zip(numbers.split(route.received), values.split(route.received)):
        block.index_add_(0, rows, part.to(block.dtype))
    return block.div_(len(route.received))  # all of it: the rows came several times over, and finding them costs more


class Exchange:
    """Collectives of one process group; with one rank they do nothing. All ranks must call in the same order, from one thread.

    sent: bytes this rank has sent, by kind and parameter, taking a ring for the backend's own reductions and gathers.
    """

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup | None = None, host: dist.ProcessGroup | None = None):
        self.rank, self.world, self.group = rank, world, group
        self.host = host or group  # a group for tensors in host memory
        self.sent = {}

    def count(self, kind: str, name: str, nbytes: int) -> None:
        self.sent[f"{kind} {name}"] = self.sent.get(f"{kind} {name}", 0) + nbytes

    def shard(self, t: Tensor) -> Tensor:
        """This rank's block of t's first axis, a view."""
        rows = t.size(0) // self.world
        return t[self.rank * rows:(self.rank + 1) * rows]

    def reduce(self, name: str, how: str, grad: Tensor, room: Tensor | None = None) -> Pending:
        """Mean over ranks: of all of `grad` (all_reduce), or of this rank's block (otherwise).

        The backend adds as it sends, in grad's dtype, which rounds at every hop and may reuse `grad`. With `room`
        (world, rows of the result, ...), of grad's dtype, the ranks' gradients are sent as they are, the same number of bytes
        for a block, and summed here: exact to fp32, in rank order. -> grad's dtype; with `room` at least fp32.
        """
        if self.world == 1:
            return Pending(grad)
        group, away = dict(group=self.group, async_op=True), grad.nbytes * (self.world - 1) // self.world
        if room is not None and how == "all_reduce":
            self.count("all_gather", name, grad.nbytes * (self.world - 1))
            return Pending(room, _all_gather(room.flatten(0, 1), grad, **group), rank_order_mean)
        if room is not None:
            self.count("all_to_all", name, away)
            return Pending(room, dist.all_to_all_single(room.flatten(0, 1), grad, **group), rank_order_mean)
        if how == "all_reduce":
            self.count("all_reduce", name, 2 * away)
            return Pending(grad, dist.all_reduce(grad, dist.ReduceOp.AVG, **group))
        self.count("reduce_scatter", name, away)
        out = torch.empty_like(self.shard(grad))
        return Pending(out, _reduce_scatter(out, grad, op=dist.ReduceOp.AVG, **group))

    def announce(self, touched: dict[str, Touched]) -> Pending:
        """Tells every owner how many rows of each kind it will get. -> what this rank will get, (world, kinds) int64, in
        host memory: no GPU takes part, so that it can be waited for while one computes."""
        counts = torch.tensor([t.owners for t in touched.values()]).T.contiguous()
        self.count("counts", " ".join(touched), counts.nbytes * (self.world - 1) // self.world)
        got = torch.empty_like(counts)
        return Pending(got, dist.all_to_all_single(got, counts, group=self.host, async_op=True))

    def route(self, touched: dict[str, Touched], counts: Pending) -> dict[str, Route]:
        """Sends the numbers of the rows, which tables of a kind share; `counts` from `announce`."""
        routes = {}
        for (kind, t), received in zip(touched.items(), counts.wait().T.tolist()):
            numbers, got = t.rows % t.block, t.rows.new_empty(sum(received))
            self.count("row numbers", kind, numbers.element_size() * (sum(t.owners) - t.owners[self.rank]))
            work = dist.all_to_all_single(got, numbers, received, t.owners, group=self.group, async_op=True)
            routes[kind] = Route(t.rows, t.owners, received, Pending(got, work))
        return routes

    def reduce_rows(self, name: str, grad: Tensor, route: Route, block: Tensor) -> Pending:
        """Mean over ranks of this rank's block of a table's gradient, of which only the routed rows are read and sent, in
        grad's dtype. `block` (N / world, ...), at least fp32 and 0, receives it."""
        rows = grad[route.rows]
        got = rows.new_empty((sum(route.received), *rows.shape[1:]))
        self.count("rows", name, rows.nbytes // max(1, len(rows)) * (sum(route.sent) - route.sent[self.rank]))
        work = dist.all_to_all_single(got, rows, route.received, route.sent, group=self.group, async_op=True)
        return Pending(got, work, lambda values: add_rows(block, values, route))

    def gather(self, name: str, t: Tensor) -> Pending:
        """Fills t, of which each rank has brought its own block up to date, from all ranks."""
        if self.world == 1:
            return Pending(t)
        self.count("all_gather", name, t.nbytes * (self.world - 1) // self.world)
        return Pending(t, _all_gather(t, self.shard(t), group=self.group, async_op=True))

    def sum(self, t: Tensor) -> Tensor:
        if self.world > 1:
            Pending(t, dist.all_reduce(t, group=self.group, async_op=True)).wait()
        return t

    def broadcast(self, t: Tensor) -> None:
        """From rank 0, in place."""
        if self.world > 1:
            Pending(t, dist.broadcast(t, 0, group=self.group, async_op=True)).wait()

    def collect(self, value) -> list:
        """Every rank's value, something small, in rank order. Waits for all ranks: not for the timed loop."""
        values = [value]
        if self.world > 1:
            values = [None] * self.world
            with in_contact():
                dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, fn: Callable, *args):
        """fn(*args) on every rank. What one rank alone finds wrong, a UserError, is raised on all."""
        result, error = None, None
        try:
            result = fn(*args)
        except UserError as e:
            error = str(e)
        for said in self.collect(error):
            if said:
                raise UserError(said)
        return result


# ======================================================================================================================
# 10  Update rules. In place, on one shard, in the moments' dtype (fp32; fp64 for an fp64 model).
# ======================================================================================================================

def adam_update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, betas: tuple[float, float], eps: float,
                wd: float, ops: Ops = PLAIN) -> None:
    """Adam (Kingma, Ba 2015, arXiv:1412.6980) as update number t (from 1), with weight decay lr^2 wd p only where it points
    the way the update goes (cautious decay: Chen et al. 2025, arXiv:2510.12402). eps is added to the uncorrected root.

    p any float dtype, rounded once; g likewise; m, v moments of p's shape.
    """
    step = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
    # As vectors, so that compiled code for any length serves every parameter.
    ops.compiled(adam_arithmetic)(p.view(-1), g.reshape(-1), m.view(-1), v.view(-1), betas, ops.number(step),
                                  ops.number(lr * lr * wd), eps)


def adam_arithmetic(p: Tensor, g: Tensor, m: Tensor, v: Tensor, betas: tuple[float, float], step: float | Tensor,
                    decay: float | Tensor, eps: float) -> None:
    g = g.to(m.dtype)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    update = step * m / (v.sqrt() + eps)
    wide = p.to(m.dtype)
    p.copy_(wide - update - decay * wide * (update * wide > 0))


# bf16 weights would lose most updates: one in 256 is the least that they can change by. The bits below are kept beside them, in
# the optimizer alone, so that products read 16 bits and training is that of fp32 weights (PR 190).

def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """fp32 from its upper 16 bits, held as bf16, and its lower ones, uint16."""
    high, low = (half.view(torch.int16).to(torch.int32) for half in (high, low))
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split_halves(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Writes fp32 x into `high` (bf16, truncated) and `low` (uint16)."""
    bits = x.view(torch.int32)
    high.view(torch.int16).copy_(bits >> 16)
    low.view(torch.int16).copy_(bits)  # keeps the lower half


def nesterov(g: Tensor, momentum: Tensor, new: float | Tensor) -> Tensor:
    """The momentum that looks ahead, as Muon takes it (record 3; Jordan et al. 2024, kellerjordan.github.io/posts/muon); brings
    `momentum` up to date, of which g shall be the part `new`, 1 - mu."""
    g = g.to(momentum.dtype)  # no lerp: compiled, it would compute with `new` on the host, and a GPU's code with the result
    momentum.add_(new * (g - momentum))
    return momentum + new * (g - momentum)


def even_out(x: Tensor, second: Tensor, beta2: float) -> Tensor:
    """x (n, rows, cols) with its rows, or columns of wide matrices, brought to even size by their running mean squares.

    Orthogonal updates still favour some neurons; NorMuon evens that out and keeps the update's norm (PRs 144, 168).
    """
    wide = x.to(second.dtype)
    axis = -1 if x.size(-2) >= x.size(-1) else -2
    mean = wide.square().mean(dim=axis, keepdim=True)
    second.lerp_(mean, 1 - beta2)
    scale = second.clamp_min(1e-10).rsqrt()
    old = (mean.sum(dim=(-2, -1), keepdim=True) * x.size(axis)).sqrt()
    new = ((mean * scale.square()).sum(dim=(-2, -1), keepdim=True) * x.size(axis)).sqrt()
    return x * (scale * (old / new.clamp_min(1e-10))).to(x.dtype)


def normuon_direction(g: Tensor, momentum: Tensor, second: Tensor, mu: float, beta2: float, polar_dtype: torch.dtype,
                      ops: Ops = PLAIN) -> Tensor:
    """Nesterov momentum, orthogonalised, its rows (or columns) brought to even size (NorMuon: Li et al. 2025,
    arXiv:2510.05491). g, momentum (n, rows, cols); second (n, rows, 1), or (n, 1, cols) for wide matrices."""
    x = polar(ops.compiled(nesterov)(g, momentum, ops.number(1 - mu)), polar_dtype, ops.gram)
    return ops.compiled(even_out)(x, second, beta2)


def normuon_update(p: Tensor, low: Tensor | None, x: Tensor, lr: Tensor, wd: float, ops: Ops = PLAIN) -> None:
    """p - p [x p >= 0] wd lr - lr x, exact to fp32 for bf16 p with `low`, its lower 16 bits.

    p, x, low (n, rows, cols); lr (n, 1, 1)."""
    ops.compiled(normuon_arithmetic)(p, low, x, lr, wd * lr)


def normuon_arithmetic(p: Tensor, low: Tensor | None, x: Tensor, lr: Tensor, decay: Tensor) -> None:
    wide = p if low is None else join_halves(p, low)
    x = x.to(wide.dtype)
    new = wide - wide * (x * wide >= 0) * decay - lr * x
    if low is None:
        p.copy_(new)
    else:
        split_halves(new, p, low)


# ======================================================================================================================
# 11  Optimizer. Scatter the gradients, work on what arrives, gather the parameters; knows parameters by their table row.
# ======================================================================================================================

class Optimizer:
    """Sharded Adam and NorMuon. Gradients are launched in `scatter_order`, updates done in `work_order`; every
    parameter's own arithmetic is the same under any order.

    params: tensors by name. Gradients are sums over micro-batches, for Adam over two steps, in the parameter's dtype, and are
    exchanged in it; within a micro-batch those of banks and tables are sums in fp32, the head's within head_chunk tokens. With
    cfg.main_grad those of banks, head and tables lie in buffers that stay, main_grad, and these parameters cease to require
    grad: a backward that is given `weight_grads` writes the products', `collect` the rows of tables that were touched; the
    first write after an update overwrites, later ones add. All others are in `.grad`, which is dropped after use. Until the
    split, a parameter tied to another, its transpose, adds its gradient to that one's and copies its values.

    Why the order cannot matter: a parameter's update reads only its own gradient, moments and count; the sum over ranks has an
    order of its own; what two parameters share, the tie, is added before its sum and copied after its gather, wherever
    either stands in the orders. The ancestor of this code gave other results under other orders.
    """

    def __init__(self, cfg: Config, params: dict[str, Tensor], exchange: Exchange, ops: Ops = PLAIN):
        self.cfg, self.params, self.exchange, self.ops = cfg, params, exchange, ops
        self.rows = {row.name: row for row in cfg.params}
        check_order("optimizer's parameters", tuple(params), list(self.rows))
        self.tied = {row.name: row.tied_to for row in cfg.params if row.tied_to}
        self.tied_copy = {host: name for name, host in self.tied.items()}
        self.is_tied, wide = True, wide_dtype(cfg)
        self.tensors, self.adam_steps = {}, {}  # moments and low bits, by "parameter.kind"; Adam steps, by parameter
        self.main_grad = {}     # by parameter that is a product's weight or a table
        self.weight_grads = {}  # by product's weight: WeightGrad, with or without main_grad
        self.touched = {}       # by what numbers the rows of tables: Touched
        self.counts, self.routes = None, {}    # of the step's exchange of touched rows
        self.in_flight = {}     # by parameter: its gather, which whoever reads the parameter waits for, and takes out
        self.blocks = {}  # by table with sparse exchange: this rank's block of the mean gradient, 0 between steps
        self.room = {}    # for other ranks' gradients, where reduction is fp32
        self.factors = {}  # of the learning rate, one a matrix; made once, for a copy to the GPU would make the step wait
        for name, p in params.items():
            row, own = self.rows[name], self.own(name, p)
            zeros = lambda shape, dtype=wide: torch.zeros(shape, dtype=dtype, device=p.device)
            if row.in_place and cfg.main_grad:
                self.main_grad[name] = torch.zeros_like(p, requires_grad=False)
            p.requires_grad_(name not in self.main_grad)
            if row.product:
                self.weight_grads[name] = WeightGrad(p, self.main_grad.get(name))
            if row.exchange == "sparse" and exchange.world > 1:
                self.blocks[name] = zeros(own.shape)
            elif row.reduction == "fp32" and exchange.world > 1:
                self.room[name] = torch.empty((exchange.world, *own.shape), dtype=p.dtype, device=p.device)
            if row.optimizer == "adam":
                self.tensors |= {f"{name}.m": zeros(own.shape), f"{name}.v": zeros(own.shape)}
                self.adam_steps[name] = 0
            else:
                n, rows, cols = own.shape
                self.tensors |= {f"{name}.momentum": zeros(own.shape),
                                 f"{name}.second": zeros((n, rows, 1) if rows >= cols else (n, 1, cols))}
                if p.dtype == torch.bfloat16:
                    self.tensors[f"{name}.low"] = zeros(own.shape, torch.uint16)
                cycle = row.matrix_lr_mul or (1.0,)
                first = exchange.rank * n if row.sharded else 0
                factors = [cycle[(first + i) % len(cycle)] for i in range(n)]
                self.factors[name] = torch.tensor(factors, dtype=wide, device=p.device).view(n, 1, 1)

    def whole(self, name: str, t: Tensor) -> Tensor:
        """A parameter or its gradient as the exchange sees it: NorMuon's banks as (matrices, rows, cols)."""
        return t if self.rows[name].optimizer == "adam" else t.view(-1, *t.shape[-2:])

    def own(self, name: str, t: Tensor) -> Tensor:
        """The part of `t` that this rank updates."""
        whole = self.whole(name, t.detach())
        return self.exchange.shard(whole) if self.rows[name].sharded else whole

    def updates(self, name: str, now: StepPlan) -> bool:
        """Whether the parameter's own update happens in this step."""
        return (now.do_adam or self.rows[name].optimizer == "normuon") and not (self.is_tied and name in self.tied)

    def announce(self, now: StepPlan, touched: dict[str, Touched]) -> None:
        """Before the last micro-batch's forward: tells the owners how many rows they will get, if this step sends any."""
        self.touched = touched
        kinds = [self.rows[name].rows for name in self.blocks if self.updates(name, now)]
        self.sending = {kind: touched[kind] for kind in dict.fromkeys(kinds)}
        self.counts = self.exchange.announce(self.sending) if kinds else None

    def route(self) -> None:
        """Between that forward and its backward: the row numbers."""
        self.routes = self.exchange.route(self.sending, self.counts) if self.counts else {}

    @torch.no_grad()
    def collect(self, rows: dict[str, Tensor], index: dict[str, RowIndex]) -> None:
        """After a micro-batch's backward: what it gave is written; takes over the gradients of the rows that the model looked
        up."""
        for grad in self.weight_grads.values():
            grad.written()
        for name, main_grad in self.main_grad.items():
            if self.rows[name].rows:
                self.ops.sum_rows(main_grad, rows[name].grad, index[self.rows[name].rows])

    def gradient(self, name: str) -> Tensor:
        grad = self.main_grad.get(name, self.params[name].grad)
        if grad is None:
            raise RuntimeError(f"{name} has no gradient")
        return grad

    def release(self, name: str) -> None:
        """The gradient is used up. A table's main_grad, if exchanged whole, must be 0 where the next one does not write."""
        self.params[name].grad = None
        if name in self.weight_grads:
            self.weight_grads[name].fresh = True
        if self.rows[name].rows and name in self.main_grad and name not in self.blocks:
            if self.exchange.world > 1:
                self.main_grad[name].zero_()
            else:
                self.main_grad[name].index_fill_(0, self.touched[self.rows[name].rows].rows.long(), 0)

    @torch.no_grad()
    def step(self, now: StepPlan) -> None:
        self.work(now, self.scatter(now))
        self.routes = {}
        if now.do_adam:
            self.touched = {}
        if now.split:
            self.untie()

    def scatter(self, now: StepPlan) -> dict[str, Pending]:
        pending = {}
        for name in self.cfg.scatter_order:
            if name in self.weight_grads:
                self.weight_grads[name].run()  # while what stands before it in the order is on its way
            if not self.updates(name, now):
                continue
            grad, row = self.gradient(name), self.rows[name]
            if self.is_tied and name in self.tied_copy:
                self.add_tied(grad, self.tied_copy[name])
            if name in self.blocks:
                pending[name] = self.exchange.reduce_rows(name, grad, self.routes[row.rows], self.blocks[name])
            else:
                pending[name] = self.exchange.reduce(name, row.exchange, self.whole(name, grad), self.room.get(name))
        return pending

    def add_tied(self, grad: Tensor, name: str) -> None:
        """Adds the gradient of `name`, (n, m), to that of its host, (m, n); of a table, where it was touched."""
        tied = self.gradient(name)
        if name in self.main_grad:
            rows = self.touched[self.rows[name].rows].rows
            self.ops.transpose_add(grad, tied, rows)
        else:
            grad += tied.T
        self.release(name)

    def work(self, now: StepPlan, pending: dict[str, Pending]) -> None:
        self.finish()
        for name in self.cfg.work_order:
            if name not in pending:
                continue
            row, own = self.rows[name], self.own(name, self.params[name])
            grad = pending[name].wait()
            self.adam(row, own, grad, now) if row.optimizer == "adam" else self.normuon(row, own, grad, now)
            self.release(name)
            if name in self.blocks:
                grad.index_fill_(0, self.routes[row.rows].numbers.result.long(), 0)
            if row.sharded:
                self.in_flight[name] = self.exchange.gather(name, self.whole(name, self.params[name].detach()))
        if self.is_tied:
            for name, host in self.tied.items():
                if host in self.in_flight:  # the copy waits for the host's gather, and for whoever needs it
                    copy = partial(self.ops.transpose_copy, self.params[name])
                    self.in_flight[name] = self.in_flight[host]._replace(finish=copy)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for all gathers that nobody has waited for."""
        while self.in_flight:
            self.in_flight.pop(next(iter(self.in_flight))).wait()

    def adam(self, row: Param, p: Tensor, grad: Tensor, now: StepPlan) -> None:
        cfg, name = self.cfg, row.name
        self.adam_steps[name] += 1
        adam_update(p, grad, self.tensors[f"{name}.m"], self.tensors[f"{name}.v"], self.adam_steps[name],
                    cfg.adam_lr * now.lr_mul * row.lr_mul, row.betas, cfg.adam_eps, cfg.adam_wd * row.wd_mul, self.ops)

    def normuon(self, row: Param, p: Tensor, grad: Tensor, now: StepPlan) -> None:
        cfg, name = self.cfg, row.name
        x = normuon_direction(grad, self.tensors[f"{name}.momentum"], self.tensors[f"{name}.second"], now.momentum,
                              cfg.muon_beta2, dtype_of(cfg.polar_dtype), self.ops)
        lr = cfg.muon_lr * now.lr_mul * row.lr_mul * math.sqrt(max(1, p.size(-2) / p.size(-1))) * self.factors[name]
        normuon_update(p, self.tensors.get(f"{name}.low"), x, lr, cfg.muon_wd * row.wd_mul * cfg.muon_lr * now.lr_mul, self.ops)

    @torch.no_grad()
    def gather(self) -> None:
        """Completes every sharded parameter from the ranks' own parts, at once."""
        for name, row in self.rows.items():
            if row.sharded:
                self.exchange.gather(name, self.whole(name, self.params[name].detach())).wait()

    def untie(self) -> None:
        """From now on tied parameters train on their own, from their host's moments, transposed and sharded anew."""
        for name, host in self.tied.items():
            for kind in ("m", "v"):
                full = torch.empty_like(self.params[host], dtype=self.tensors[f"{host}.{kind}"].dtype)
                self.own(host, full).copy_(self.tensors[f"{host}.{kind}"])
                full = self.exchange.gather(f"{host}.{kind}", full).wait()
                self.tensors[f"{name}.{kind}"].copy_(self.own(name, full.T))
            self.adam_steps[name] = self.adam_steps[host]
        self.is_tied = False

    def state(self) -> dict:
        """Everything that training changes here: live tensors and numbers, by name."""
        return {**self.tensors, **{f"{name}.steps": n for name, n in self.adam_steps.items()}, "is_tied": self.is_tied}

    def load_state(self, state: dict) -> None:
        for name, t in self.tensors.items():
            t.copy_(state[name])
        self.adam_steps = {name: state[f"{name}.steps"] for name in self.adam_steps}
        self.is_tied = state["is_tied"]

    def gradients(self) -> dict:
        """Those that await the next Adam step: of tables the touched rows, and which they are."""
        kept = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        for name, main_grad in self.main_grad.items():
            if name in self.weight_grads and not self.weight_grads[name].fresh:
                kept[name] = main_grad
            elif self.rows[name].rows and self.touched:
                kept[f"{name} rows"] = main_grad[self.touched[self.rows[name].rows].rows]
        return kept | {f"touched {kind}": t.rows for kind, t in self.touched.items()}

    @torch.no_grad()
    def load_gradients(self, saved: dict) -> dict[str, Tensor]:
        """From `gradients()`; with {} there are none. -> the touched rows, by what numbers them."""
        touched = {key.removeprefix("touched "): rows for key, rows in saved.items() if key.startswith("touched ")}
        self.touched = {}
        for name, p in self.params.items():
            p.grad = saved[name].to(p.device) if name in saved and name not in self.main_grad else None
        for name, main_grad in self.main_grad.items():
            if name in self.weight_grads:
                self.weight_grads[name].fresh = name not in saved
            main_grad.copy_(saved[name]) if name in saved else main_grad.zero_()
            if f"{name} rows" in saved:
                main_grad[touched[self.rows[name].rows]] = saved[f"{name} rows"].to(main_grad.device)
        return touched


# ======================================================================================================================
# 12  Step. The one body of a training step, for warm-up and timed run alike; validation.
# ======================================================================================================================

def train_step(model: GPT, optimizer: Optimizer, batch: Batch) -> Tensor:
    """One batch and one optimizer step. -> mean loss of this rank's predictions, 0-d, on the device."""
    now, micro_batches = batch.now, batch.micro_batches
    model.rotary.extend(now.long)
    model.in_flight = optimizer.in_flight
    weights, total = tuple(weight / len(micro_batches) for weight in now.mtp), 0.0
    grads, head_grad = optimizer.weight_grads, optimizer.weight_grads["lm_head"]
    for i, micro_batch in enumerate(micro_batches):
        micro_batch, last = micro_batch.to(model.embed.device), i == len(micro_batches) - 1
        if last:
            optimizer.announce(now, micro_batch.touched)
        rows = model.look_up(micro_batch, leaves=model.cfg.main_grad)
        x = model.activations(micro_batch, now.short, now.long, rows, grads)
        head_grad.delayed = last and model.cfg.delay_head_grad
        loss, begin = model.head(x, micro_batch.targets, weights, head_grad, 1 / len(micro_batches))
        if last:
            optimizer.route()
        torch.autograd.backward(*zip(*begin))
        optimizer.collect(rows, micro_batch.index)
        total = total + loss / (micro_batch.inputs.size(0) * sum(now.mtp))
    optimizer.step(now)
    return total


def validate(model: GPT, loader: ValLoader, exchange: Exchange, windows: tuple[int, int]) -> float:
    """Mean over the slices of their mean losses: the same number however the slices are spread over ranks."""
    losses = torch.zeros(model.cfg.val_slices, dtype=wide_dtype(model.cfg), device=model.embed.device)
    for i, batch in loader:
        losses[i] = model.validation_loss(batch.to(losses.device), *windows)
    return exchange.sum(losses).mean().item()


class LossWatch:
    """Reads training losses without making the GPU wait: copied asynchronously, looked at when the copy has finished."""

    def __init__(self, cfg: Config, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.losses = torch.empty(cfg.steps, dtype=wide_dtype(cfg), pin_memory=self.on_gpu)
        self.queue = []  # the step, and an event after which its loss is here
        self.latest, self.latest_step = None, None

    def push(self, step: int, loss: Tensor) -> None:
        """`loss` 0-d, of step `step`. Raises UserError once a loss that is not finite has arrived."""
        self.losses[step].copy_(loss, non_blocking=True)
        arrived = torch.cuda.Event() if self.on_gpu else None
        if arrived:
            arrived.record()
        self.queue.append((step, arrived))
        self.poll()

    def poll(self, wait: bool = False) -> None:
        while self.queue:
            step, arrived = self.queue[0]
            if arrived and not wait and not arrived.query():
                return
            if arrived:
                arrived.synchronize()
            self.queue.pop(0)
            self.latest, self.latest_step = self.losses[step].item(), step
            if not math.isfinite(self.latest):
                raise UserError(f"the training loss is {self.latest} at step {step}; lower the learning rate that was raised "
                                "last, or look at that batch")


# ======================================================================================================================
# 13  Main. Build, warm up, reset, run against the clock, sum up.
# ======================================================================================================================

def config_json(cfg: Config, **more) -> str:
    return json.dumps({**dataclasses.asdict(cfg), **more})


def config_from_dict(values: dict, kind=Config):
    """The inverse of dataclasses.asdict after a trip through JSON. Raises UserError if a field is unknown or missing."""
    hints = typing.get_type_hints(kind)
    if wrong := sorted(hints.keys() ^ values.keys()):
        raise UserError(f"a saved {kind.__name__} and this script's differ in {', '.join(wrong)}; use the script that saved it")

    def value(hint, v):
        if typing.get_origin(hint) is tuple:
            return tuple(value(typing.get_args(hint)[0], x) for x in v)
        return config_from_dict(v, hint) if dataclasses.is_dataclass(hint) else v
    return kind(**{name: value(hint, values[name]) for name, hint in hints.items()})


def save_model(path: str, model: GPT) -> None:
    """Full weights without a world size's padding, rotary state, and the config as JSON."""
    state = model.state()
    shapes = param_shapes(model.cfg, 1)
    state |= {name: p.detach()[:shapes[name][0]].cpu() for name, p in model.named_parameters()}
    torch.save({"config": config_json(model.cfg), "state": state}, path)


def load_model(path: str, device: torch.device | str = "cpu") -> GPT:
    """The model that `--save` wrote; it gives the same validation loss."""
    saved = torch.load(path, map_location=device, weights_only=True)
    model = GPT(config_from_dict(json.loads(saved["config"])), device=device)
    model.load_state(saved["state"])
    return model


def host_copy(state: dict) -> dict:
    return {name: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for name, v in state.items()}


def snapshot(*parts) -> list[dict]:
    """Copies, in host memory, of the parts' states."""
    return [host_copy(part.state()) for part in parts]


def same_state(a: dict, b: dict) -> bool:
    def same(x, y):
        if not isinstance(x, Tensor):
            return x == y
        return torch.equal(*(t.detach().cpu().contiguous().view(torch.uint8) for t in (x, y)))  # bits, NaN and -0 too
    return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)


def warm_up(cfg: Config, ranks: Ranks, data: Data, model: GPT, optimizer: Optimizer, val: ValLoader) -> None:
    """Runs a step of every kind, so that nothing is done for the first time on the clock, and undoes all of it."""
    before = snapshot(model, optimizer)
    loader = TrainLoader(cfg, data.train, ranks.rank, ranks.world, ranks.device.type == "cuda")
    plans = [plan(cfg, step) for step in warmup_steps(cfg)]
    batches = Batches(loader, plans)
    for now in plans:
        model.rotary.extend(now.long)
        for _, batch in val:
            model.validation_loss(batch.to(ranks.device), now.short, now.long)
            break
        train_step(model, optimizer, batches.next())
    batches.close()
    for part, state in zip((model, optimizer), before):
        part.load_state(state)
    optimizer.load_gradients({})
    optimizer.exchange.sent.clear()
    for part, state in zip((model, optimizer), before):
        assert same_state(part.state(), state), "warm-up left a trace"


def track_of(cfg: Config, world: int) -> str:
    """The preset's track if its task was left alone: data and its slices, validation, target, precision; else "other"."""
    preset = PRESETS[cfg.preset]
    task = lambda c: (c.data, c.val_slice_tokens, c.val_slices, c.target, c.dtype)
    return cfg.track if task(cfg) == task(preset) and slices_of(cfg, world) == preset.slices else "other"


def peak_memory(device: torch.device) -> str:
    mib = 1 << 20
    if device.type == "cuda":
        return (f"peak memory allocated: {torch.cuda.max_memory_allocated(device) // mib} MiB "
                f"reserved: {torch.cuda.max_memory_reserved(device) // mib} MiB")
    import resource  # not on Windows, where nothing else here runs either
    unit = 1 if sys.platform == "darwin" else 1024
    return f"peak memory allocated: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // mib} MiB"


class Checkpoint(NamedTuple):
    """A folder like RUN.checkpoint/step00000120, beside the run's log: about.json, and rank0.pt, rank1.pt ... with each
    rank's own shards. It gets that name when all of it is written, so a folder so named is complete, whatever ended the run.
    """
    path: Path
    about: dict  # step, train_ms, the loader's position, script, torch; task: what must be equal to go on

    @classmethod
    def find(cls, where: str) -> "Checkpoint":
        """The newest of a run, given by its log, its .checkpoint folder, or a folder that holds one such folder."""
        path = Path(where)
        runs = sorted(run for run in path.glob("*.checkpoint") if any(run.glob("step????????")))
        if not runs and path.suffix in (".checkpoint", ".txt"):
            runs = [path.with_name(path.name.split(".")[0] + ".checkpoint")]
        if len(runs) > 1:
            raise UserError(f"--resume {where}: several runs have checkpoints there; name one: {', '.join(map(str, runs))}")
        steps = [step for run in runs for step in run.glob("step????????")]
        if not steps:
            raise UserError(f"--resume {where}: no checkpoint there; give the folder of the log of a run that was started with "
                            "--checkpoint-every and did not finish")
        path = max(steps)
        try:
            about = json.loads((path / "about.json").read_text(encoding="utf-8"))
            return cls(path, {key: about[key] for key in ("step", "train_ms", "position", "task", "script", "torch")})
        except OSError as e:
            raise UserError(f"cannot read {path / 'about.json'}: {brief(e)}; is the run still going?") from None
        except (ValueError, LookupError, TypeError) as e:
            raise UserError(f"{path / 'about.json'} is damaged ({brief(e)}); remove {path.parent}, and start again") from None

    def load(self, model: GPT, optimizer: Optimizer, exchange: Exchange) -> dict[str, Tensor]:
        """Puts both back to where they were, gradients that await the next Adam step included. -> those rows of tables."""
        path = self.path / f"rank{exchange.rank}.pt"
        try:
            with zipfile.ZipFile(path) as file:  # torch.load compares no checksums
                if bad := file.testzip():
                    raise ValueError(f"checksum of {bad}")
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved["rank"] != exchange.rank:
                raise ValueError(f"rank {saved['rank']}'s share")
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except OSError as e:
            raise UserError(f"cannot read {path}: {brief(e)}; is the run still going, and do all machines see its folder?"
                            ) from None
        except Exception as e:  # what torch.load raises depends on the damage
            raise UserError(f"{path} is damaged ({brief(e)}); remove {path.parents[1]}, and start again") from None
        try:
            for name, p in model.named_parameters():
                optimizer.own(name, p.detach()).copy_(saved["model"][name])
            model.load_state(saved["model"] | dict(model.named_parameters()))
            optimizer.load_state(saved["optimizer"])
            return optimizer.load_gradients(saved["gradients"])
        except KeyError as e:  # a script may change between, but not what there is to save
            raise UserError(f"{path} lacks {e}; go on with the script that wrote it: the run's log holds it") from None


def save_checkpoint(run: Path, about: dict, model: GPT, optimizer: Optimizer, exchange: Exchange) -> None:
    """Writes the checkpoint after `about["step"]` steps into `run`, by all ranks; then removes the one before."""
    final, master, params = run / f"step{about['step']:08d}", exchange.rank == 0, dict(model.named_parameters())
    partial = final.with_suffix(".partial")

    def write_file(name: str, write: Callable) -> None:
        with open(partial / name, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())

    def begin():
        for left in run.glob("*.partial"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)

    def share():
        state = {"rank": exchange.rank,
                 "model": host_copy(model.state() | {name: optimizer.own(name, p) for name, p in params.items()}),
                 "optimizer": host_copy(optimizer.state()),
                 "gradients": host_copy(optimizer.gradients())}
        for name in params:
            if not state["model"][name].isfinite().all():
                raise UserError(f"{name} is not finite after step {about['step'] - 1}, which was not saved; lower the learning "
                                "rate that was raised last")
        try:
            write_file(f"rank{exchange.rank}.pt", lambda f: torch.save(state, f))
        except RuntimeError as e:  # torch.save raises it when the disk is full
            raise OSError(brief(e)) from None

    def finish():
        write_file("about.json", lambda f: f.write(json.dumps(about, indent=1).encode()))
        earlier = list(run.glob("step????????"))
        partial.rename(final)
        for path in earlier:
            shutil.rmtree(path.rename(path.with_suffix(".partial")))

    def told(part):
        try:
            part()
        except OSError as e:
            raise UserError(f"cannot write the checkpoint {final}: {brief(e)}; make room, in a folder that all machines see, "
                            "and go on from the one before with --resume") from None

    for part, takes_part in ((begin, master), (share, True), (finish, master)):
        exchange.together(told, part if takes_part else lambda: None)


def differing(a, b, path: str = "") -> list[str]:
    """Dotted names of what differs between two JSON values, with both."""
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b])]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a, b))]
    else:
        return [] if a == b else [f"{path} ({a}, {b})"]
    return [line for key, x, y in pairs for line in differing(x, y, f"{path}.{key}" if path else str(key))]


def few(differences: list[str]) -> str:
    """The first three, in one line."""
    return "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")


class Parser(argparse.ArgumentParser):
    """Wrong options are UserErrors, of one line, with near names; help comes from one process of a machine."""

    def error(self, message: str) -> typing.NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split(" ")[0].split("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=3)
            message = f"unknown option {word!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
        raise UserError(f"{message}; -h lists the options")

    def print_help(self, file=None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def whole(least: int) -> Callable[[str], int]:
        def parse(text: str) -> int:
            if not text.isdecimal() or not least <= int(text) < 2 ** 63:
                raise argparse.ArgumentTypeError(f"give a whole number, {least} or more, not {text!r}")
            return int(text)
        return parse

    parser = Parser(
        prog="train_gpt.py", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description="Trains a GPT-2-small-class language model against the clock. Start it with torchrun, one process a GPU\n"
                    "(or a few processes without one); ./run.sh does that, and fetches the data before.",
        epilog="examples:\n"
               "  torchrun --standalone --nproc_per_node=8 train_gpt.py --name MyIdea --seed 3\n"
               "  torchrun --standalone --nproc_per_node=2 train_gpt.py --preset cpu --set stages.0.steps=50\n"
               "settings for --set are the fields of Config; tables are reached by dots: stages.0.lr_mul,\n"
               "params.embed.wd_mul, params.*.reduction")
    parser.add_argument("--preset", choices=PRESETS, default="record" if torch.cuda.is_available() else "cpu",
                        help="record: the 8-GPU configuration; cpu: a small one for any machine (default here: %(default)s)")
    parser.add_argument("--name", default="", help="keep the log in records/TRACK/DATE_NAME/, not in records/TRACK/attempts/")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the initial weights (default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
                        help="change one setting; may be repeated")
    parser.add_argument("--data", metavar="DIR", help="folder of .bin shards (default: the preset's)")
    parser.add_argument("--save", metavar="FILE", help="write the final weights and the config there")
    parser.add_argument("--checkpoint-every", metavar="N", type=whole(1), default=0,
                        help="save everything beside the log after every N steps; such a run counts for no track")
    parser.add_argument("--profile", metavar="STEP", nargs="?", type=whole(1), const=8, default=0,
                        help="trace four steps from STEP on (default 8) into RUN.trace.json.gz beside the log, for "
                             "ui.perfetto.dev; such a run counts for no track")
    parser.add_argument("--check", metavar="PROCESSES", type=whole(1), default=0,
                        help="say whether that many processes could run this here, data aside, and stop")
    parser.add_argument("--resume", metavar="LOG_FOLDER",
                        help="go on from the last checkpoint there, with the options of the run that wrote it; or the path "
                             "of its log, where several runs left checkpoints")
    args = parser.parse_args(argv)
    if args.name and not all(c.isalnum() or c in "_-." for c in args.name):
        parser.error(f"--name {args.name!r}: letters, digits, and . _ - only: it becomes a folder's name")
    if args.resume == "":
        parser.error("--resume: give the folder of a log")
    if args.profile and args.resume:
        parser.error("--profile and --resume: trace a run from its start; leave one of them out")
    if args.name and args.resume:
        parser.error("--name and --resume: a resumed run's log goes beside the first one; leave --name out")
    return args


def run(args: argparse.Namespace, script: str) -> None:
    cfg = PRESETS[args.preset]
    for setting in args.settings:
        cfg = override(cfg, setting)
    if args.data:
        cfg = replace(cfg, data=args.data)
    if args.save and (not os.access(Path(args.save).resolve().parent, os.W_OK) or Path(args.save).is_dir()):
        raise UserError(f"--save {args.save}: give a file in a folder that can be written to")
    check_config(cfg, args.check or world_size())
    if args.profile and args.profile + 4 > cfg.steps:
        raise UserError(f"--profile {args.profile} traces steps {args.profile} to {args.profile + 3}, the run has steps 0 to "
                        f"{cfg.steps - 1}; give an earlier one")
    if args.check:
        choose_ops(cfg, torch.device("cuda" if torch.cuda.is_available() else "cpu"), world=args.check)
        if args.resume:
            Checkpoint.find(args.resume)
        print(f"{args.check} process{'' if args.check == 1 else 'es'} could run this here")
        return

    ranks = start_runtime()
    ops = choose_ops(cfg, ranks.device, world=ranks.world)
    on_gpus = ranks.world > 1 and ranks.device.type == "cuda"
    exchange = Exchange(ranks.rank, ranks.world, host=dist.new_group(backend="gloo", timeout=PATIENCE) if on_gpus else None)
    data = exchange.together(find_data, cfg)
    task = {"seed": args.seed, "processes": ranks.world, "data": data.fingerprint,
            "config": json.loads(config_json(replace(cfg, data="")))}
    everything = task | {"script": hashlib.sha256(script.encode()).hexdigest()[:16], "torch": torch.__version__,
                         "--checkpoint-every": args.checkpoint_every, "--resume": args.resume, "--profile": args.profile}
    setups = exchange.collect(everything)
    for rank, setup in enumerate(setups):
        if differences := differing(setup, setups[0]):
            raise UserError(f"rank {rank} differs from rank 0 (there, here): {few(differences)}; start all machines "
                            "with the same script, options, torch and data")
    exchange.together(partial(check_schedule, cfg, data.train, ranks.world) if ranks.master else lambda: None)
    resumed = exchange.together(Checkpoint.find, args.resume) if args.resume else None
    if resumed and (differences := differing(resumed.about["task"], task)):
        raise UserError(f"{resumed.path} is of another run (there, here): {few(differences)}; give its options, its data "
                        "and as many processes")

    track = "other" if args.checkpoint_every or args.profile or resumed else track_of(cfg, ranks.world)
    folder = Path("records", track, f"{date.today()}_{args.name}" if args.name else "attempts")
    run_id = f"seed{args.seed}_{uuid.uuid4().hex[:12]}"
    folder, run_id = (resumed.path.parents[1], resumed.path.parent.stem) if resumed else exchange.collect((folder, run_id))[0]
    with open_log(folder if ranks.master else None, run_id, cfg.steps, args.seed, resumed) as log:
        log.write(script)
        log.write("=" * 100)
        for line in describe_environment(ranks) if ranks.master else []:
            log.both(line)
        log.both(f"attention: {cfg.attention}; kernels: {', '.join(cfg.kernels) or 'none, plain torch'}; head: "
                 f"{'fp8' if cfg.fp8 else cfg.dtype}; compiled: {'yes' if cfg.compile else 'no'}")
        log.write("config: " + config_json(replace(cfg, data=os.path.relpath(cfg.data)), name=args.name, seed=args.seed))
        slices, usual = slices_of(cfg, ranks.world), PRESETS[cfg.preset].slices
        log.both(f"data: {data.fingerprint}"
                 + ("" if slices == usual else f", packed in {slices} slices a batch, not {usual}: not the track's batches"))
        if resumed:
            log.both(f"resumed: {run_id} after step {resumed.about['step']}"
                     + "".join(f"; {key} {resumed.about[key]} wrote the checkpoint, this is {everything[key]}"
                               for key in ("script", "torch") if resumed.about[key] != everything[key]))
        log.write("=" * 100)

        def save(about: dict, model: GPT, optimizer: Optimizer) -> None:
            about |= {"task": task, "script": everything["script"], "torch": everything["torch"]}
            save_checkpoint(folder / f"{run_id}.checkpoint", about, model, optimizer, exchange)

        try:
            with contextlib.ExitStack() as traced:  # a failed run, too, writes what it has traced: that is worth most
                profile = trace_steps(folder / f"{run_id}.trace.json.gz", args.profile, log) if args.profile else None
                model, summary = train(cfg, ranks, ops, exchange, data, args.seed, log, args.checkpoint_every, save, resumed,
                                       partial(traced.enter_context, profile) if profile and ranks.master else None)
        except (RuntimeError, MemoryError) as e:
            if not isinstance(e, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(e):
                raise
            raise UserError(f"out of memory: {brief(e)}; use more processes, or shrink what was last made "
                            "larger (head_chunk, tokens of a stage, the model)") from None
        for key, value in summary.items():
            log.write(f"{key}: {value}")
        log.write("complete: yes")
    if not ranks.master:
        return
    if args.save:
        try:
            save_model(args.save, model)
        except (OSError, RuntimeError) as e:
            raise UserError(f"--save {args.save}: {brief(e)}; the run itself is complete, its log is {log.path}") from None
    done = folder / f"{run_id}.checkpoint"  # there is nothing left to resume
    with contextlib.suppress(OSError):
        done = done.rename(done.with_suffix(".partial"))
    shutil.rmtree(done, ignore_errors=True)
    logs = Path("records", track).glob("[0-9]*/seed*.txt")
    earlier = sorted({path.parent for path in logs if path.parent != folder and is_complete(path)})
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    per_byte = f", {float(summary['val_loss_per_byte']):.4f} per byte" if "val_loss_per_byte" in summary else ""
    log.say(f"\nvalidation loss  {float(summary['val_loss']):.4f} nats per token{per_byte}\n"
            f"training time    {int(summary['train_time_ms']) / 1000:.1f} s, {cfg.steps} steps, {train_tokens(cfg):,} tokens\n"
            f"log              {log.path}\n"
            f"compare          {python} records/compare.py {f'{earlier[-1]} ' if earlier else ''}{log.path}")


def trace_steps(path: Path, first: int, log: RunLog) -> torch.profiler.profile:
    """A profiler of steps first .. first + 3, told of every step's end by step(); it writes what it saw to `path`."""
    def write(profiler):
        try:
            profiler.export_chrome_trace(str(path))
            log.say(f"trace: {path}; writing it was on the clock")
        except (OSError, RuntimeError) as e:
            raise UserError(f"cannot write the trace {path}: {brief(e)}; make room, or leave --profile out") from None
    return torch.profiler.profile(schedule=torch.profiler.schedule(wait=first - 1, warmup=1, active=4, repeat=1),
                                  on_trace_ready=write)


def is_complete(log: Path) -> bool:
    return log.read_text(encoding="utf-8", errors="replace").endswith("complete: yes\n")


def open_log(folder: Path | None, run_id: str, steps: int, seed: int, resumed: Checkpoint | None) -> RunLog:
    """The log of a run that begins; refused if its record folder has a complete run with the same seed."""
    name = run_id
    if resumed and folder:
        name, n = f"{run_id}.from{resumed.about['step']}", 1
        while (folder / f"{name}.txt").exists():
            n += 1
            name = f"{run_id}.from{resumed.about['step']}_{n}"
    elif folder and folder.name != "attempts":
        for path in folder.glob(f"seed{seed}_*.txt"):
            if is_complete(path):
                raise UserError(f"{path} is a complete run with this seed; choose another --seed or --name")
    return RunLog(folder, steps, name)


def train(cfg: Config, ranks: Ranks, ops: Ops, exchange: Exchange, data: Data, seed: int, log: RunLog, every: int = 0,
          save: Callable | None = None, resumed: Checkpoint | None = None,
          trace: Callable | None = None) -> tuple[GPT, dict[str, object]]:
    """Builds the model, warms up, trains against the clock. -> the trained model, and the log's closing lines.

    After every `every` steps (0: never) `save(about, model, optimizer)` keeps a checkpoint; `resumed` is one to go on from;
    `trace()` starts a profiler, which is told of every step.
    """
    pin = ranks.device.type == "cuda"
    model = GPT(cfg, ranks.world, ranks.device, seed, ops)
    for p in model.parameters():
        exchange.broadcast(p.data)
    optimizer = Optimizer(cfg, dict(model.named_parameters()), exchange, ops)
    val = ValLoader(cfg, data.val, ranks.rank, ranks.world, pin)

    # Warm up, reset.
    if cfg.warmup:
        if cfg.compile:
            log.say("compiling, off the clock: at the first start that takes minutes")
        began = time.perf_counter()
        warm_up(cfg, ranks, data, model, optimizer, val)
        log.both(f"warm-up: steps {' '.join(map(str, warmup_steps(cfg)))} took {time.perf_counter() - began:.1f} s "
                 "and was undone")
    first, train_ms, position, touched = 0, 0.0, (0, 0, 0), None
    if resumed:
        touched = exchange.together(resumed.load, model, optimizer, exchange)
        optimizer.gather()
        first, train_ms, position = (resumed.about[key] for key in ("step", "train_ms", "position"))
    watch, clock = LossWatch(cfg, ranks.device), Clock(ranks.device, train_ms)
    gc.collect()  # what building and warm-up left behind is not collected on the clock

    # Train. The clock runs except while validating and saving; the loader opens its first shard on it.
    profiler = trace() if trace else None
    clock.start()
    loader = TrainLoader(cfg, data.train, ranks.rank, ranks.world, pin, position)
    batches = Batches(loader, (plan(cfg, step) for step in range(first, cfg.steps)), touched)
    for step in range(first, cfg.steps + 1):
        done = step == cfg.steps
        if done or validates(cfg, step):
            clock.stop()
            watch.poll(wait=True)
            if done:
                windows = tuple(w * cfg.window_unit for w in cfg.final_windows)
            else:
                now = plan(cfg, step)
                model.rotary.extend(now.long)
                windows = now.short, now.long
            val_loss = validate(model, val, exchange, windows)
            if not math.isfinite(val_loss):
                raise UserError(f"the validation loss is {val_loss} at step {step}; undo what was changed last, learning rates "
                                "first")
            log.both(f"step:{step}/{cfg.steps} val_loss:{val_loss:.4f} train_time:{clock.ms:.0f}ms "
                     f"step_avg:{clock.ms / max(step, 1):.2f}ms")
            clock.start()
        if done:
            break
        batch = batches.next()
        watch.push(step, train_step(model, optimizer, batch))
        if profiler:
            profiler.step()
        elapsed = clock.read()
        arrived = "" if watch.latest is None else f" train_loss:{watch.latest:.4f}@{watch.latest_step + 1}"
        log.write(f"step:{step + 1}/{cfg.steps} train_time:{elapsed:.0f}ms step_avg:{elapsed / (step + 1):.2f}ms{arrived}")
        log.progress(step + 1, watch.latest, elapsed)
        if every and (step + 1) % every == 0 and step + 1 < cfg.steps:
            clock.stop()
            watch.poll(wait=True)
            save({"step": step + 1, "train_ms": clock.ms, "position": batch.position}, model, optimizer)
            log.write(f"checkpoint: after step {step + 1}")
            clock.start()
    batches.close()

    log.both(peak_memory(ranks.device))
    summary = {"val_loss": f"{val_loss:.6f}", "train_time_ms": f"{clock.ms:.0f}", "steps": cfg.steps,
               "tokens": train_tokens(cfg), "seed": seed}
    if resumed:
        summary["resumed_after_step"] = first
    for what, nbytes in sorted(exchange.sent.items()):
        summary[f"bytes sent by rank 0, {what}"] = nbytes
    if data.bytes_per_token:
        summary["val_loss_per_byte"] = f"{val_loss / data.bytes_per_token:.6f}"
    return model, summary


def first_to_say(error: UserError) -> bool:
    """Whether this rank shall print it: of what ranks find, each in words of its own, the first is said; that contact with
    another rank is lost, only if no rank has said anything. Known by the store that torchrun keeps for the ranks."""
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=10))
        else:
            return True
        earlier = store.add("said", 1) - 1
        return earlier == 0 if isinstance(error, LostContact) else store.add("said of itself", 1) == 1
    except RuntimeError:  # the store is gone: better said twice than not at all
        return True


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None when the shell closed it
    try:
        run(parse_args(argv), Path(__file__).read_text(encoding="utf-8"))
    except UserError as e:
        if first_to_say(e):
            print(f"train_gpt.py: error: {e}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end this in a traceback
        if first_to_say(UserError("interrupted")):
            print("train_gpt.py: interrupted", file=sys.stderr, flush=True)
        return 130
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main()
    if status:  # at once: what is left of this process may wait for ranks that no longer answer
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
