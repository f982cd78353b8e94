"""
A NanoGPT speedrun in one file. Trains a GPT-2-small-class language model on FineWeb to a validation loss of
3.28 nats per token, in as little time as possible on 8 H100s. Runs the same steps on a two-core laptop.

    torchrun --standalone --nproc_per_node=8 train_gpt.py                # the record preset: 8 GPUs, FineWeb
    torchrun --standalone --nproc_per_node=2 train_gpt.py --preset cpu   # the cpu preset: no GPU
    python train_gpt.py -h

Results
    cpu preset     1.051 nats per token on the Python library's own text (mean of two runs; a 4-gram model has
                   1.47): 290 steps, 94 and 133 s on two shared cores of an Intel Xeon, PyTorch 2.13
    record preset  not timed on GPUs yet. It is the configuration of the public record 89, which took 73.8 s
                   on 8 H100s

Sections; each uses only what is above it
    1  This text, imports
    2  Config       layer, parameter, scalar and stage tables; presets; --set name=value
    3  Schedule     plan_step(cfg, step): windows, batch size, learning rate, loss weights of one step
    4  Runtime      processes and devices, clock, labels in traces, log
    5  Data         shards, prefixes of tokens, micro-batches of whole documents, hashes, touched rows
    6  Reference    operations in plain torch, of kernels and others; attention; composed heads; Polar Express
    7  Kernels      some of these in Triton; the backend of a run; matmuls that write gradients into main_grad
    8  Model        rotary tables, what mixes and gates the streams, the head with its loss, logits
    9  Exchange     averages gradients over ranks, whole or by touched rows; gathers parameters
    10 Update rules Adam and NorMuon on one shard
    11 Tables       n-gram memory: sharded rows; fetch, return and update of those that a step touches
    12 Optimizer    scatter, work, gather, in explicit orders
    13 Step         train_step, validate, losses that leave the device asynchronously
    14 Checks       what a config must satisfy; memory; saved models; checkpoints
    15 Main         command line, warm-up, the timed loop

The algorithm follows the public NanoGPT speedrun (github.com/KellerJordan/modded-nanogpt, commit f411b3d3).
Each technique names its source at its line: "PR 130" is a pull request there, "record 9" an entry of its
table of records. In shapes, T is the tokens of a micro-batch, d = H * D the model width (H heads of D), L the
layers, V the padded vocabulary.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import gc
import hashlib
import inspect
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
import typing
import uuid
import zipfile
import zlib
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cache, partial, reduce, wraps
from pathlib import Path
from typing import Callable, Iterable, NamedTuple, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch's CPU build brings none
    triton = None


# ============================================================================================================
# 2  Config. What a reader edits: tables of layers, parameters, scalars and stages, and fields for the rest.
# ============================================================================================================


class UserError(Exception):
    """An error that the user can fix. Its message is one line: what is wrong, and what to do."""


def first_line(error: Exception) -> str:
    """Shortens a library's error to its first sentence, without source locations."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    sentences = str(error).partition("\n")[0].split("] ", 1)[-1].split(". ")
    useful = (sentence for sentence in sentences if sentence and "==" not in sentence)
    return next(useful, type(error).__name__)


@contextlib.contextmanager
def explain(problem: str, fix: str, *kinds: type[Exception]):
    """Turns errors of these kinds into a UserError: the problem, the error's own reason, what to do."""
    try:
        yield
    except kinds as e:
        raise UserError(f"{problem}: {first_line(e)}; {fix}") from None


@dataclass(frozen=True)
class Layer:
    attention: str | None = "plain"  # paired: two heads share one stream of twice the length. None: MLP only
    window: str = "short"  # a key of Stage.windows: its attention window
    key_shift: bool = False  # half of each key comes from the token before
    value: int | None = None  # the value embedding table added to this layer's values
    reads: str = "stream"  # attention's input: the residual stream, or the saved "back"
    saves: str | None = None  # the name under which the stream after this layer's MLP is kept: skip or back
    adds: str | None = None  # a saved activation added, gated, before the layer: skip
    xsa: bool = False  # exclusive self-attention: heads lose what lies along their own token's value
    gate: bool = False  # each head's output is gated
    dc: bool = False  # dynamically composed heads: near tokens are read with the heads' attention mixed
    connections: bool = False  # values and residual stream take in saved streams, by MUDD's weights


LAYERS = (
    Layer("paired"),
    Layer("plain", value=0, xsa=True),
    Layer("paired", value=1),
    Layer("plain", "long", key_shift=True, saves="skip", xsa=True, gate=True),
    Layer("plain", xsa=True),
    Layer("paired"),
    Layer(None, adds="skip"),
    Layer("plain", saves="back", xsa=True),
    Layer("plain", value=2, reads="back"),
    Layer("paired", value=3, reads="back"),
    Layer("plain", "long", key_shift=True, value=4, reads="back", gate=True, dc=True, connections=True),
)

BANKS = ("qk_bank", "vo_bank", "mlp_bank")  # stacks of matrices
# Tables: what selects their rows.
INDEXED_BY = {"value_embeds": "tokens", "bigram_embed": "bigrams", "embed": "tokens"}


@dataclass(frozen=True)
class Param:
    name: str
    optimizer: str  # a key of OPTIMIZERS, section 10
    # all_reduce: every rank updates all of it. Otherwise each rank updates one block, whose gradient arrives
    # by reduce_scatter or, sparse, as the touched rows.
    exchange: str
    betas: tuple[float, ...] = ()  # Adam's
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    dtype: str = "model"  # model: the config's dtype; float32
    tied_to: str = ""  # until the untie step this is the transpose of that parameter
    # backend: NCCL or gloo sums in the gradient's dtype. fp32: all-to-all, then an fp32 sum in rank order
    # (sparse always does this).
    reduction: str = "backend"
    matrix_lr_mul: tuple[float, ...] = ()  # NorMuon: factors of successive matrices, repeating

    @property
    def sharded(self) -> bool:
        return self.exchange != "all_reduce"

    @property
    def indexed_by(self) -> str:
        """Returns tokens or bigrams for a table, "" for other parameters."""
        return INDEXED_BY.get(self.name, "")

    @property
    def is_matmul_weight(self) -> bool:
        """True for weights of matmuls: their backward can write straight into main_grad."""
        return self.name == "lm_head" or self.name in BANKS


# fmt: off
PARAMS = (  # gradients are exchanged in this order
    #     name              optimizer   exchange          betas       lr_mul  wd_mul
    Param("qk_bank",        "normuon", "reduce_scatter"),
    Param("vo_bank",        "normuon", "reduce_scatter"),
    Param("mlp_bank",       "normuon", "reduce_scatter", matrix_lr_mul=(1.0, 2.0)),
    Param("scalars",        "adam",    "all_reduce",     (.90, .99),   5.00,    0, "float32"),
    Param("smear_gate",     "adam",    "all_reduce",     (.90, .99),   0.01,    0),
    Param("ve_gate_bank",   "adam",    "all_reduce",     (.90, .99),   1.00,    1),
    Param("mudd_w1",        "adam",    "all_reduce",     (.90, .99),   0.25,    1),
    Param("mudd_w2",        "adam",    "all_reduce",     (.90, .99),   0.25,    1),
    Param("mudd_b2",        "adam",    "all_reduce",     (.90, .99),   0.25,    0),
    Param("mudd_gate_w1",   "adam",    "all_reduce",     (.90, .99),   0.10,    1),
    Param("mudd_gate_w2",   "adam",    "all_reduce",     (.90, .99),   0.10,    1),
    Param("mudd_gate_b2",   "adam",    "all_reduce",     (.90, .99),   0.10,    0),
    Param("mudd_gate_scale","adam",    "all_reduce",     (.90, .99),   0.10,    0, "float32"),
    Param("lm_head",        "adam",    "reduce_scatter", (.50, .95),   1.00,  150),
    Param("bigram_embed",   "adam",    "sparse",         (.75, .95),  75.00,    5),
    Param("post_lambdas",   "adam",    "all_reduce",     (.90, .95),   1.00,    0, "float32"),
    Param("resid_lambdas",  "adam",    "all_reduce",     (.90, .95),   5.00,    0, "float32"),
    Param("value_embeds",   "adam",    "sparse",         (.75, .95),  75.00,    5),
    Param("embed",          "adam",    "sparse",         (.50, .95),   1.00,  150, tied_to="lm_head"),
)
# fmt: on


@dataclass(frozen=True)
class Ngrams:
    """The table of hashed n-grams, of which a step touches few rows. With no orders there is none."""

    orders: tuple[int, ...] = ()  # 2: bigrams. With any, bigram_embed does not exist
    hashes: int = 1  # of each order
    rows: int = 1 << 23  # of each order and hash
    width: int = 768  # columns, at most the model's width: rows are added to the stream's first channels
    dtype: str = "float32"
    placement: str = "sharded"  # row r on rank r % world_size: there on the device, or in host memory (host)
    lr: float = 1.0
    beta2: float = 0.95  # decay of a row's second moment, at each of its updates; 1: Adagrad's sum
    prefetch: bool = True  # rows of the next step that this one does not change are fetched during it

    @property
    def ranges(self) -> int:
        """Returns how many rows a position reads: one of each order and hash."""
        return len(self.orders) * self.hashes


@dataclass(frozen=True)
class Stage:
    steps: int
    batch_tokens: int  # over all ranks and micro-batches
    max_doc_len: int  # documents are cut to this many tokens
    windows: dict[str, int]  # attention windows by name, in units of Config.window_unit tokens
    lr_mul: float
    # Loss weights of the next, second and third next token, interpolated linearly over the stage. Later
    # tokens teach more while there is much to learn; the next alone counts in the end (PR 178; Gloeckle et
    # al. 2024, arXiv:2404.19737).
    mtp_start: tuple[float, ...]
    mtp_end: tuple[float, ...]
    # Loss weight of the next token's longest prefix that is a token, interpolated likewise: what a token
    # begins with is easier, and teaches early (record 88).
    prefix_start: float = 0.0
    prefix_end: float = 0.0
    param_lr_mul: dict[str, float] = field(default_factory=dict)  # further factors, by parameter


@dataclass(frozen=True)
class Config:
    """Holds one run's settings; a preset is `replace(RECORD, ...)`. Defaults: the 1285-step record preset."""

    # the task
    preset: str = "record"
    track: str = "gpt2-small"  # folder of records/ for this preset's runs
    data: str = "data/fineweb10B"  # folder with *_train_*.bin and *_val_*.bin
    target: float = 3.28  # mean validation loss, nats per token, that a record must reach
    val_slice_tokens: int = 262144  # one validation forward
    val_slices: int = 40
    val_every: int = 250  # steps; 0: only at the end
    # the model
    vocab_size: int = 50257
    padded_vocab: int = 50304  # rows of embedding tables, columns of the head; padding trains like the rest
    bos_id: int = 50256
    bigram_vocab_size: int = 50304 * 15 // 2
    ngrams: Ngrams = Ngrams()
    sign_rows: int = 8192  # of random signs, by which rows of bigrams or n-grams are multiplied; 0: none
    heads: int = 6
    head_dim: int = 128
    mlp_dim: int = 3072
    layers: tuple[Layer, ...] = LAYERS
    # Gates, and the connections' weights, come from small MLPs of every token; false: learned constants.
    mudd_gates: bool = True
    mudd_connections: bool = True
    mudd_dim: int = 64  # hidden width of these MLPs
    dc_window: int = 112  # keys that dynamically composed heads look at, the query's own with them
    window_unit: int = 128
    # At the final validation.
    val_windows: dict[str, int] = field(default_factory=lambda: {"short": 6, "long": 20})
    attn_scale: float = 0.1  # of the softmax before any window grows
    past_windows: tuple[int, ...] = ()  # tokens: the longest of each stage before --init, which sets them
    dtype: str = "bfloat16"  # weights and activations: bfloat16, float32, float64
    # The schedule. Batches and windows grow (PR 163, record 13): small batches learn fast while gradients
    # agree, large ones average out noise at the end. The last stage is the extension, trained at the final
    # learning rate.
    # fmt: off
    stages: tuple[Stage, ...] = (
        Stage(423, 131072,  896, {"short": 1, "long":  3}, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), .25, .25),
        Stage(424, 262144, 2048, {"short": 3, "long":  7}, 1.52, (1.0, 0.5), (1.0, 0.0), .25),
        Stage(423, 393216, 2048, {"short": 5, "long": 11}, 1.73, (1.0,), (1.0,)),
        Stage( 15, 393216, 2048, {"short": 6, "long": 13}, 0.15, (1.0,), (1.0,)),
    )
    # fmt: on
    cooldown_frac: float = 0.60  # last part of the scheduled steps; the rate falls to final_lr_frac
    final_lr_frac: float = 0.15
    momentum_min: float = 0.85  # at both ends: old gradients mislead while the loss falls fast (record 9)
    momentum_max: float = 0.95
    momentum_warmup: int = 300  # steps from min to max
    momentum_cooldown: int = 50  # last steps, back towards min
    microbatches: int = 8  # of a global batch, at least one a rank; other numbers pack documents differently
    max_docs: int = 0  # entries of a training micro-batch's cu_seqlens; 0: from its length
    # optimizers
    params: tuple[Param, ...] = PARAMS
    # fmt: off
    work_order: tuple[str, ...] = (  # of updates and gathers: as the next forward first reads them
        "scalars", "smear_gate", "ve_gate_bank", "mudd_w1", "mudd_w2", "mudd_b2", "mudd_gate_w1",
        "mudd_gate_w2", "mudd_gate_b2", "mudd_gate_scale", "post_lambdas", "resid_lambdas", "bigram_embed",
        "lm_head", "embed", *BANKS, "value_embeds",
    )
    # fmt: on
    adam_lr: float = 0.008
    adam_eps: float = 1e-10
    adam_wd: float = 0.005
    muon_lr: float = 0.023
    muon_wd: float = 1.2
    muon_beta2: float = 0.9
    muon_dtype: str = "bfloat16"  # of the orthogonalization
    # the run
    warmup: bool = True  # rehearse every stage off the clock, then reset
    main_grad: bool = True  # gradients of banks, head and tables are written in place; false: autograd sums
    delay_head_grad: bool = False  # compute the last head gradient while the banks' are exchanged
    head_chunk: int = 8192  # tokens whose logits exist at once; the head's gradient is rounded once per chunk
    # Operations done in Triton.
    kernels: tuple[str, ...] = ("gram", "relu_square", "softcap_loss", "segment_sum_rows", "compose_heads")
    attention: str = "varlen"  # dense: plain torch; varlen: torch's FlashAttention; fa3: FlashAttention-3
    fp8: bool = True  # the head's matmuls in 8 bits, in training
    fp8_mlp: bool = True  # with it, the forward matmuls of the MLPs too
    compile: bool = True  # torch.compile the code between kernels, and the updates
    samples: int = 3  # texts of 100 tokens, printed after the run if the data has a vocabulary.txt; 0: none

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def stage_starts(self) -> list[int]:
        return [sum(stage.steps for stage in self.stages[:i]) for i in range(len(self.stages))]

    @property
    def predicts_prefixes(self) -> bool:
        return any(stage.prefix_start or stage.prefix_end for stage in self.stages)


RECORD = Config()

# All layers, at widths that two laptop cores train in two minutes, on bytes; n-grams in the place of bigrams,
# and no prefixes, which bytes do not have. Micro-batches hold 256 and 512 tokens, so a document gives at most
# that many; max_doc_len is larger, since a document can also give the last target.
# fmt: off
WINDOWS = [stage.windows for stage in RECORD.stages]  # for the names that a row below leaves out
CPU = replace(
    RECORD, preset="cpu", track="cpu", data="data/local", target=1.07, val_slice_tokens=4096, val_slices=128,
    vocab_size=257, padded_vocab=264, bos_id=256, bigram_vocab_size=16384, heads=2, head_dim=32, mlp_dim=256,
    layers=tuple(replace(layer, xsa=False, dc=False) for layer in LAYERS),  # here they gain nothing
    ngrams=Ngrams((2, 3, 4, 5), rows=65536, width=64), window_unit=16, attn_scale=0.3, dtype="float32",
    muon_dtype="float32", momentum_warmup=125, momentum_cooldown=20, kernels=(), attention="dense", fp8=False,
    compile=False,
    stages=(
        Stage( 90, 2048,  512, WINDOWS[0] | {"short": 3, "long": 9}, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        Stage( 90, 4096, 1024, WINDOWS[1] | {"short": 4, "long": 10}, 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage( 90, 4096, 1024, WINDOWS[2] | {"short": 5, "long": 11}, 1.73, (1.0,), (1.0,)),
        Stage( 20, 4096, 1024, WINDOWS[3] | {"short": 6, "long": 13}, 0.15, (1.0,), (1.0,)),
    ))
# fmt: on

# The record preset with n-gram memory of 2^24 rows in the place of bigram_embed. Not run on GPUs, not tuned.
NGRAM = replace(RECORD, preset="ngram", ngrams=Ngrams(orders=(2, 3), dtype="bfloat16"))

PRESETS = {"record": RECORD, "ngram": NGRAM, "cpu": CPU}


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def acc_dtype(cfg: Config) -> torch.dtype:
    """Returns the dtype of sums, moments, lambdas and angles: fp32, or fp64 for an fp64 model."""
    return torch.promote_types(dtype_of(cfg.dtype), torch.float32)


def num_microbatches(cfg: Config, world_size: int) -> int:
    return max(cfg.microbatches, world_size)


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


GATE_DIM = 12  # channels that the gates of smear and value embeddings look at


class Gate(NamedTuple):
    kind: str  # xsa, output, x0, bigram, skip, dc1, dc2
    layer: int
    columns: int  # one, or one a head
    bias: float  # initial, in units of the gates' scale


def gate_table(cfg: Config) -> list[list[Gate]]:
    """Returns the outputs, in order, of the two gate MLPs: of x0, for the layers up to the one that saves
    "skip", and of what that saves, for the others.
    """
    layers, H = list(enumerate(cfg.layers)), cfg.heads
    split = next((i + 1 for i, layer in layers if layer.saves == "skip"), 0)
    tables = []
    for part in (layers[:split], layers[split:]):
        inputs = [i for i, layer in part if layer.attention and not layer.connections]
        tables.append(
            [Gate("xsa", i, H, 0.0) for i, layer in part if layer.xsa]
            + [Gate("output", i, H, 2.5) for i, layer in part if layer.gate]
            + [Gate(kind, i, 1, bias) for i in inputs for kind, bias in (("x0", 0.0), ("bigram", 0.5))]
            + [Gate("skip", i, 1, 5.0) for i, layer in part if layer.adds]
            + [Gate("dc1", i, H, 10.0) for i, layer in part if layer.dc]
            + [Gate("dc2", i, H, 0.0) for i, layer in part if layer.dc]
        )
    return tables


MUDD_SCALE = 0.1  # times the outputs of the connections' MLPs
# Initial biases of their outputs, in units of that, by columns. The layer with connections:
#   0-2    the first stream, "back" and the layer's input, into its values
#   3-5    the same, into the stream
#   6-7    the value embedding of the first and of the second half of the heads
#   8-9    the stream and attention's output
#   10-11  the first stream and the bigrams, into the stream
#   12-13  the stream and the MLP's output
# Before the head: the first stream, "back" (taken off: it served only middle layers, PR 140), the input of
# that layer, the first value embedding, "skip".
RESID_BIAS = math.sqrt(1.1) / MUDD_SCALE
MUDD_BIASES = ((0, 0, 0, 0, 0, 0, 20, 20, RESID_BIAS, 10, 0, 0.5, RESID_BIAS, 10), (0, -5, 0, 0, 0))


def param_shapes(cfg: Config, world_size: int) -> dict[str, tuple[int, ...]]:
    """Returns every parameter's shape. Padding lets each of `world_size` ranks own equally many matrices.

    An n-gram table is none of them, and takes the place of bigram_embed. Without a technique there are no
    parameters of it.
    """
    d, V, L = cfg.dim, cfg.padded_vocab, len(cfg.layers)
    attention = sum(layer.attention is not None for layer in cfg.layers)
    tables = sum(layer.value is not None for layer in cfg.layers)
    gates = max(sum(gate.columns for gate in gates) for gates in gate_table(cfg))
    mudd = max(map(len, MUDD_BIASES))
    shapes = {
        "scalars": (2 * L + 2,),
        "smear_gate": (1, GATE_DIM),
        "ve_gate_bank": (tables, cfg.heads, GATE_DIM),
        "post_lambdas": (L, 2),
        "resid_lambdas": (L, 2),
        "mudd_w1": (2, cfg.mudd_dim, d),
        "mudd_w2": (2, mudd, cfg.mudd_dim),
        "mudd_b2": (2, mudd),
        "mudd_gate_w1": (2, cfg.mudd_dim, d),
        "mudd_gate_w2": (2, gates, cfg.mudd_dim),
        "mudd_gate_b2": (2, gates),
        "mudd_gate_scale": (1,),
        "value_embeds": (V, tables, d),
        "bigram_embed": (cfg.bigram_vocab_size, d),
        "lm_head": (d, V),
        "embed": (V, d),
        "qk_bank": (padded(attention * cfg.heads, world_size), 2 * cfg.head_dim, d),
        "vo_bank": (padded(attention * 2, world_size), d, d),
        "mlp_bank": (padded(2 * L, math.lcm(2, world_size)) // 2, 2, cfg.mlp_dim, d),
    }
    if cfg.ngrams.orders:
        del shapes["bigram_embed"]
    for name, on in (("mudd", cfg.mudd_connections), ("mudd_gate", cfg.mudd_gates)):
        if not on:
            del shapes[f"{name}_w1"], shapes[f"{name}_w2"]
    return shapes


def used_params(cfg: Config) -> list[Param]:
    """Returns the parameter table's rows, without those of parameters that this model lacks."""
    shapes = param_shapes(cfg, 1)
    return [spec for spec in cfg.params if spec.name in shapes]


def config_from_dict(value, hint=Config):
    """Inverts dataclasses.asdict after JSON. Raises UserError if a field is unknown or missing."""
    if typing.get_origin(hint) is tuple:
        return tuple(config_from_dict(item, typing.get_args(hint)[0]) for item in value)
    if not dataclasses.is_dataclass(hint):
        return value
    hints = typing.get_type_hints(hint)
    if wrong := sorted(hints.keys() ^ value.keys()):
        raise UserError(
            f"a saved {hint.__name__} and this script's differ in {', '.join(wrong)}; use its own script"
        )
    return hint(**{name: config_from_dict(value[name], hints[name]) for name in hints})


def setting_paths(values: dict, kind, path: tuple[str, ...] = ()):
    """Yields (path, the dict that holds it, its type) of every setting in the dataclasses.asdict of a `kind`.

    A path is ("stages", "0", "steps"): dots in --set. It ends in * where any name may stand.
    """
    for name, hint in typing.get_type_hints(kind).items():
        args = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            yield from setting_paths(values[name], hint, (*path, name))
        elif args and dataclasses.is_dataclass(args[0]):
            for i, row in enumerate(values[name]):
                yield from setting_paths(row, args[0], (*path, name, row.get("name", str(i))))
        elif typing.get_origin(hint) is dict:
            yield (*path, name, "*"), values[name], args[1]
        else:
            yield (*path, name), values, hint


def override(cfg: Config, setting: str) -> Config:
    """Returns `cfg` with one "name=value" applied.

    Dots reach into tables by row number, by a row's name, or by * for every row: stages.0.steps=10,
    stages.*.windows.long=9, params.embed.lr_mul=2.
    """
    name, eq, text = setting.partition("=")
    if not eq:
        raise UserError(f"--set {setting}: write name=value")
    if name in ("preset", "track"):
        raise UserError(f"--set {name}: it follows from --preset")
    values, keys, found = dataclasses.asdict(cfg), name.split("."), False
    known = list(setting_paths(values, Config))
    for path, holder, hint in known:
        alike = len(path) == len(keys) and all(a == b or "*" in (a, b) for a, b in zip(path, keys))
        if alike and keys[-1] != "*":
            holder[keys[-1]], found = parse(text, hint, name), True
    if not found:
        near = difflib.get_close_matches(name, [".".join(path) for path, *_ in known])
        raise UserError(f"--set {name}: unknown; use {', '.join(near) or 'the fields of Config'}")
    return config_from_dict(values)


def parse(text: str, hint, name: str):
    """Parses a bool, int, float, str, a tuple of one of these, or one of these or None, as `hint` says."""
    args = typing.get_args(hint)
    if type(None) in args:
        return None if text.lower() == "none" else parse(text, args[0], name)
    if typing.get_origin(hint) is tuple:
        return tuple(parse(part, args[0], name) for part in text.split(",") if part)
    try:
        return {"true": True, "false": False}[text.lower()] if hint is bool else hint(text)
    except (ValueError, KeyError):
        kind = "true or false" if hint is bool else f"a value of type {hint.__name__}"
        raise UserError(f"--set {name}={text}: {name} takes {kind}") from None


# ============================================================================================================
# 3  Schedule. Pure functions of the config and the step.
# ============================================================================================================


class StepPlan(NamedTuple):
    step: int
    stage: int
    lr_mul: float  # of every learning rate, as scheduled; Param.lr_mul multiplies it
    param_lr_mul: dict[str, float]  # the stage's
    momentum: float  # NorMuon's
    windows: dict[str, int]  # attention windows by name, tokens
    batch_tokens: int
    max_doc_len: int
    mtp: tuple[float, ...]  # weights of the losses on the next tokens
    prefix: float  # of the loss on the next token's prefix; 0: none
    # Adam's parameters update only after every second step, from the gradients of both: half the traffic of
    # the tables, at next to no cost in loss (PR 136).
    do_adam: bool
    # After this step's update embed and lm_head are untied: one matrix learns faster from both ends, two fit
    # better later (PRs 175, 178).
    untie: bool

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """Returns the weights of GPT.loss_targets' columns."""
        return (*self.mtp, self.prefix) if self.prefix else self.mtp


def untie_step(cfg: Config) -> int:
    """Returns the third stage's first step, made odd so that Adam updates on it; with fewer stages, never."""
    return cfg.stage_starts[2] | 1 if len(cfg.stages) > 2 else cfg.steps


def plan_step(cfg: Config, step: int) -> StepPlan:
    """Returns what step `step` (from 0) does."""
    starts, scheduled = cfg.stage_starts, cfg.steps - cfg.stages[-1].steps
    index = max(i for i, start in enumerate(starts) if start <= step)
    stage = cfg.stages[index]
    lr_mul, cool = stage.lr_mul, int(scheduled * (1 - cfg.cooldown_frac))
    if step > cool:
        t = min(1.0, (step - cool) / max(1, scheduled - cool))
        lr_mul = lr_mul * (1 - t) + cfg.final_lr_frac * t
    momentum_span = cfg.momentum_max - cfg.momentum_min
    momentum = cfg.momentum_min + momentum_span * min(1.0, step / max(1, cfg.momentum_warmup))
    cool = cfg.steps - cfg.momentum_cooldown
    if step > cool:
        momentum = cfg.momentum_max - momentum_span * (step - cool) / cfg.momentum_cooldown
    t = (step - starts[index]) / stage.steps
    return StepPlan(
        step=step,
        stage=index,
        lr_mul=lr_mul,
        param_lr_mul=stage.param_lr_mul,
        momentum=momentum,
        windows=window_tokens(cfg, stage.windows),
        batch_tokens=stage.batch_tokens,
        max_doc_len=stage.max_doc_len,
        mtp=tuple(a + (b - a) * t for a, b in zip(stage.mtp_start, stage.mtp_end)),
        prefix=stage.prefix_start + (stage.prefix_end - stage.prefix_start) * t,
        do_adam=step % 2 == 1,
        untie=step == untie_step(cfg),
    )


def window_tokens(cfg: Config, windows: dict[str, int]) -> dict[str, int]:
    return {name: units * cfg.window_unit for name, units in windows.items()}


def longest_windows(cfg: Config, count: int) -> list[int]:
    """Returns the longest window, in tokens, of each of the first `count` stages that have steps."""
    stages = [stage for stage in cfg.stages[:count] if stage.steps] or cfg.stages[:1]
    return [max(window_tokens(cfg, stage.windows).values()) for stage in stages]


def learning_rate(base: float, spec: Param, plan: StepPlan) -> float:
    """Returns a parameter's learning rate in a step; `base` is its optimizer's."""
    return base * plan.lr_mul * spec.lr_mul * plan.param_lr_mul.get(spec.name, 1.0)


def warmup_steps(cfg: Config) -> list[int]:
    """Returns steps that do all that a run does: the first two, and two on either side of a stage's start."""
    steps = {start + k for start in cfg.stage_starts for k in (-2, -1, 0, 1)}
    return sorted(steps.intersection(range(cfg.steps)))


def validates(cfg: Config, step: int) -> bool:
    return cfg.val_every > 0 and step % cfg.val_every == 0


def train_tokens(cfg: Config) -> int:
    return sum(stage.steps * stage.batch_tokens for stage in cfg.stages)


# ============================================================================================================
# 4  Runtime. Processes and devices, the clock, labels in traces, the log and the screen.
# ============================================================================================================


# How long a rank waits in a collective. torchrun ends the others at once if one is killed; gloo tells its
# peers too, but not always those that were just sending to it.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class PeerFailure(UserError):
    """Another rank died or failed; only its own message says why."""


def section(label: str) -> Callable:
    """Returns a decorator that labels a function's calls in traces; in `label`, {1} is their argument 1.

    A label is a section of a step and, after a space, the parameter's name. Not for code that is compiled.
    """

    def decorate(function):
        @wraps(function)
        def labelled(*args, **kwargs):
            if not torch.autograd.profiler._is_profiler_enabled:  # record_function takes 10 us even so
                return function(*args, **kwargs)
            with torch.profiler.record_function(label.format(*args)):
                return function(*args, **kwargs)

        return labelled

    return decorate


@section("waiting")
def wait_for(blocking: Callable, *args) -> None:
    """Calls what waits for other ranks: a RuntimeError means that a peer died, unless it is this GPU's own.

    A GPU reports a failed kernel at any later call: that error is raised as it is.
    """
    try:
        blocking(*args)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as e:
        raise PeerFailure(
            f"another process of this run was killed or failed ({first_line(e)}); look for its own message, "
            "and start the run again"
        ) from None


def env_world_size() -> int:
    """Returns the number of processes that torchrun's environment names; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"WORLD_SIZE={text}: not a number of processes; start with torchrun, or unset it")
    return int(text)


def init_distributed() -> tuple[int, int, torch.device]:
    """Joins the process group of torchrun's environment. Returns rank, world size and this rank's device.

    Without torchrun there is one rank, and no group.
    """
    world_size, rank = env_world_size(), int(os.environ.get("RANK", 0))
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # PR_SET_PDEATHSIG: a killed torchrun would leave its ranks running.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    device, on_gpu = torch.device("cpu"), torch.cuda.is_available()
    if on_gpu:
        device, gpus = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.cuda.device_count()
        if device.index >= gpus:  # torchrun --virtual-local-rank shows each process one GPU, its 0th
            raise UserError(
                f"{os.environ.get('LOCAL_WORLD_SIZE', device.index + 1)} processes for {gpus} GPUs; start "
                f"torchrun with --nproc_per_node={gpus} or fewer"
            )
        torch.cuda.set_device(device)
        # Split-K matmuls, too, sum in fp32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if world_size > 1:
        backend, own_gpu = ("nccl", device) if on_gpu else ("gloo", None)
        fix = "start them with torchrun, and do not use another run's port"
        with explain(f"the {world_size} processes cannot meet", fix, RuntimeError, ValueError):
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=own_gpu)
    return rank, world_size, device


class Clock:
    """Counts training time in milliseconds: all that the device was given between start and stop."""

    def __init__(self, ms: float = 0.0):
        self.ms = ms

    def start(self) -> None:
        self._synchronize()
        self.began = time.perf_counter()

    def stop(self) -> None:
        self._synchronize()
        self.ms = self.read()

    def read(self) -> float:
        """Returns the time so far without waiting for the device."""
        return self.ms + 1000 * (time.perf_counter() - self.began)

    def _synchronize(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


class RunLog:
    """Writes the run's log file and screen output; silent on every rank but the first (folder=None).

    The file is line-buffered, so it holds every finished step whatever ends the process.
    """

    def __init__(self, folder: Path | None, steps: int, run_id: str):
        self.path = folder and folder / f"{run_id}.txt"
        self.file, self.steps = None, steps
        self.bar: tqdm = None
        if folder:
            fix = "remove what is in its way, or make the folder writable"
            with explain(f"cannot write the log {self.path}", fix, OSError):
                folder.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "x", buffering=1, encoding="utf-8")

    def print0(self, text: str, console: bool = True, file: bool = True) -> None:
        """Prints a line from rank 0 to the screen, to the log file, or to both."""
        if not self.file:
            return
        if file:
            fix = "it holds the run up to here; make room and start again"
            with explain(f"cannot write the log {self.path}", fix, OSError):
                self.file.write(text + "\n")
        if console:
            with explain("cannot write to the screen", "send the output to a file", OSError, UnicodeError):
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def progress(self, step: int, loss: float | None, train_ms: float) -> None:
        """Shows that `step` steps are done: a bar on a terminal, else a line every twentieth of the run."""
        if not self.file:
            return
        text = "" if loss is None else f"loss {loss:.3f}"
        if sys.stdout.isatty():
            if self.bar is None:
                self.bar = tqdm(
                    total=self.steps, initial=step - 1, unit="step", dynamic_ncols=True, file=sys.stdout
                )
            self.bar.set_postfix_str(f"{text} time {train_ms / 1000:.1f}s", refresh=False)
            self.bar.update(step - self.bar.n)
        elif step * 20 // self.steps > (step - 1) * 20 // self.steps:
            eta = train_ms / step * (self.steps - step) / 1000
            line = f"step {step}/{self.steps}  {text}  time {train_ms / 1000:.0f}s  ETA {eta:.0f}s"
            self.print0(line, file=False)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.file:
            with contextlib.suppress(OSError):  # a full disk may be what is being reported
                if error is not None:
                    why = {KeyboardInterrupt: "interrupted"}.get(kind, kind.__name__)
                    if isinstance(error, UserError):
                        why = str(error).replace(os.getcwd() + os.sep, "")
                    self.file.write(f"stopped: {why}\n")
                self.file.close()


def describe_environment(device: torch.device, world_size: int) -> list[str]:
    """Returns log lines on software, hardware and commit. They hold no absolute path."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = platform.processor() or platform.machine()
        with contextlib.suppress(OSError, TypeError):  # not Linux; no such line
            hardware = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
        hardware += f" ({os.cpu_count()} cores, {torch.get_num_threads()} threads a process)"
    script = Path(__file__).resolve()
    # Prints the commit; the script, if it is tracked; then what is changed.
    commands = (
        f"git rev-parse --verify HEAD && git ls-files --error-unmatch {shlex.quote(script.name)} && "
        "git status --porcelain --untracked-files=no"
    )
    git = subprocess.run(commands, shell=True, capture_output=True, text=True, cwd=script.parent)
    lines, commit = git.stdout.splitlines(), "unknown"
    if lines:
        commit = f"{lines[0]} {'(clean)' if git.returncode == 0 and len(lines) == 2 else '(modified)'}"
    return [
        f"Running Python {sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda} on {hardware} "
        f"with world_size {world_size}",
        f"commit: {commit}",
    ]


# ============================================================================================================
# 5  Data. Shards of tokens become micro-batches of whole documents, the same for any number of ranks.
# ============================================================================================================

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024


class Header(NamedTuple):
    tokens: int
    vocab_size: int  # 0: GPT-2's
    bos_id: int
    text_bytes: int  # of the text that the tokens encode; 0: unknown


def read_header(path: Path) -> Header:
    """Checks magic, version and length of a .bin shard: 256 int32, then `tokens` uint16, little-endian."""
    with explain(str(path), "download or build the data again", OSError):
        words, size = np.fromfile(path, dtype="<i4", count=256), path.stat().st_size
    rebuild = "delete it, and download or build it again"
    if len(words) < 256 or words[0] != MAGIC:
        raise UserError(f"{path}: not a token shard (its first word is not {MAGIC}); {rebuild}")
    if words[1] != VERSION:
        raise UserError(
            f"{path}: shard format version {words[1]}, this script reads {VERSION}; build it again"
        )
    header = Header(*map(int, words[2:6]))
    declared = HEADER_BYTES + 2 * header.tokens
    if size != declared:
        raise UserError(
            f"{path}: {size} bytes, but its header declares {header.tokens} tokens, {declared}; {rebuild}"
        )
    return header


def find_shards(folder: str, split: str) -> list[Path]:
    paths = sorted(Path(folder).glob(f"[!.]*_{split}_*.bin"))
    if not paths:
        raise UserError(
            f"no {split} shards (*_{split}_*.bin) in {folder}: make them with data/fineweb.py (record), "
            "data/local_corpus.py (cpu), data/tokenize_text.py (your text) or data/synthetic.py (random "
            "tokens), or use another --data"
        )
    return paths


class Dataset(NamedTuple):
    """A run's shards, their headers checked against the config."""

    train: list[Path]
    val: list[Path]
    bytes_per_token: float  # of the validation text; 0: unknown
    fingerprint: str
    vocabulary: Sequence[bytes] = ()  # each token's, if a loss or texts need them


def open_dataset(cfg: Config) -> Dataset:
    train, val = find_shards(cfg.data, "train"), find_shards(cfg.data, "val")
    headers = {path: read_header(path) for path in train + val}
    for path, header in headers.items():
        vocab, bos = (header.vocab_size, header.bos_id) if header.vocab_size else (50257, 50256)
        if (vocab, bos) != (cfg.vocab_size, cfg.bos_id):
            raise UserError(
                f"{path}: its vocabulary has {vocab} tokens and bos_id {bos}, the config "
                f"{cfg.vocab_size} and {cfg.bos_id}; choose the matching --preset or --data"
            )
    need, have = cfg.val_slices * cfg.val_slice_tokens + 1, sum(headers[p].tokens for p in val)
    if have < need:
        fit = max(0, have - 1) // cfg.val_slice_tokens
        hint = f", or --set val_slices={fit}" if fit else ""
        raise UserError(
            f"{cfg.data}: {have:,} validation tokens, of {need:,} needed; add validation shards{hint}"
        )
    count, text = sum(headers[p].tokens for p in train), [headers[p].text_bytes for p in val]
    counts = f"{count} training tokens in {len(train)} shards, {have} for validation"
    fingerprint, path = f"{dataset_hash(train + val)} ({counts})", Path(cfg.data, "vocabulary.txt")
    is_read = cfg.predicts_prefixes or cfg.samples and path.exists()
    vocabulary = read_vocabulary(path, cfg.vocab_size) if is_read else ()
    return Dataset(train, val, sum(text) / have if all(text) else 0.0, fingerprint, vocabulary)


def read_vocabulary(path: Path, size: int) -> list[bytes]:
    """Returns the bytes of each of `size` tokens, from a line each of hexadecimal digits; none: b""."""
    settings = "--set samples=0 --set stages.*.prefix_start=0 --set stages.*.prefix_end=0"
    fix = f"make it with the script in data/ that made the shards, or train without one: {settings}"
    with explain(f"cannot read {path}", fix, OSError, ValueError):
        vocabulary = [bytes.fromhex(line) for line in path.read_text(encoding="ascii").splitlines()]
    if len(vocabulary) != size:
        raise UserError(f"{path}: {len(vocabulary)} tokens, the config has {size}; {fix}")
    return vocabulary


def prefix_table(vocabulary: Sequence[bytes], rows: int) -> Tensor:
    """Returns for each of `rows` tokens, int64, the one that is its longest proper prefix; -1: none."""
    ids = {token: i for i, token in enumerate(vocabulary) if token}
    table = [-1] * rows
    for token, i in ids.items():
        prefixes = (token[:n] for n in range(len(token) - 1, 0, -1))
        table[i] = next((ids[prefix] for prefix in prefixes if prefix in ids), -1)
    return torch.tensor(table)


def dataset_hash(paths: list[Path]) -> str:
    """Hashes each shard's name, size, and 64 blocks of 64 KiB spread evenly over it (all of a small one)."""
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
    starts: np.ndarray  # int64: positions of BOS tokens


def read_shard(path: Path, cfg: Config, count: int = -1) -> Shard:
    """Reads a shard, or up to `count` of its first tokens, into memory."""
    read_header(path)
    tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES, count=count)
    if len(tokens) and tokens.max() >= cfg.vocab_size:
        raise UserError(
            f"{path}: token {tokens.max()} is outside the vocabulary of {cfg.vocab_size}; the file is "
            "damaged or made with another tokenizer: build it again"
        )
    return Shard(tokens, np.flatnonzero(tokens == cfg.bos_id))


def hash_bigrams(tokens: np.ndarray, rows: int, sign_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the rows (1, T) int32 of a table of `rows` for T tokens, int32, each with its predecessor; and
    the rows of signs, (1, T) int32, unless `sign_rows` is 0.

    Position 0 gets the last row, and row 0 of signs. The products wrap in int32. The hash crosses document
    starts: masking it was slower and no better.
    """
    before, after = tokens[:-1], tokens[1:]
    mixed = np.int32(36313) * after ^ np.int32(27191) * before
    hashed = np.append(np.int32(rows - 1), mixed % np.int32(rows - 1))[None]
    if not sign_rows:
        return hashed, None
    return hashed, np.append(np.int32(0), (after ^ before) % np.int32(sign_rows))[None]


MIX = 0x9E3779B1  # odd: 2^32 over the golden ratio


def hash_ngrams(tokens: np.ndarray, ngrams: Ngrams, sign_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the table's rows (K, T) int32 of the n-grams that end at each of T tokens, by ranges; and the
    rows of signs, (K, T) int32, by a second hash, unless `sign_rows` is 0.

    A range belongs to one order and hash. Its last row serves the first n - 1 positions. The hash is a
    polynomial of the tokens and the finalizer of MurmurHash3 (Appleby 2011), in uint32, which wraps. It
    crosses document starts, as hash_bigrams does.
    """
    T, size = len(tokens), ngrams.rows
    words, mixed = tokens.astype(np.uint32), np.zeros(T, np.uint32)
    rows = np.empty((ngrams.ranges, T), np.int32)
    signs = np.empty_like(rows) if sign_rows else None
    for n in range(1, max(ngrams.orders) + 1):
        mixed[n - 1 :] += words[: max(0, T - n + 1)]
        mixed *= np.uint32(MIX)
        for seed in range(ngrams.hashes) if n in ngrams.orders else ():
            i = ngrams.orders.index(n) * ngrams.hashes + seed
            h = mixed + np.uint32(seed * MIX % 2**32)
            if sign_rows:
                upper = h * np.uint32(0x27D4EB2F) >> np.uint32(16)  # another odd factor
                signs[i] = upper * np.uint32(sign_rows) >> np.uint32(16)
            h ^= h >> np.uint32(16)
            h *= np.uint32(0x85EBCA6B)
            h ^= h >> np.uint32(13)
            h *= np.uint32(0xC2B2AE35)
            h ^= h >> np.uint32(16)
            h -= h // np.uint32(size - 1) * np.uint32(size - 1)  # NumPy's % is not vectorized
            h[: n - 1] = size - 1
            rows[i] = h + np.uint32(i * size)
    return rows, signs


def default_max_docs(tokens: int) -> int:
    """Returns the entries of cu_seqlens for a micro-batch of `tokens`: fixed, so that shapes never change."""
    return {16384: 64, 32768: 96, 49152: 128}.get(tokens) or max(128, padded(tokens // 300, 128))


class RowIndex(NamedTuple):
    """The n distinct rows of a table that a micro-batch touches, and its positions sorted by row.

    A position of an n-gram table stands once for each of its rows.
    """

    row_ids: Tensor  # (n,) int32; ascending until places replace an n-gram table's rows
    perm: Tensor  # (T,) int32: positions by row, those of one row in the text's order
    offsets: Tensor  # (n + 1,) int32: perm[offsets[i]:offsets[i + 1]] are the positions of row_ids[i]
    first_touch: Tensor  # (n,) bool: no earlier micro-batch since the last update touched the row
    signs: Tensor | None = None  # (T,) int32: rows of signs of the positions, in perm's order


class Transfer(NamedTuple):
    """An exchange of rows in which every rank sends to every rank."""

    rows: Tensor  # (sum(send_counts),) int32: which rows this rank sends, by receiver
    send_counts: list[int]
    recv_counts: list[int]


class RowPlan(NamedTuple):
    """How the rows of a table that ranks have touched since its last update travel (diagram: section 9)."""

    grads: Transfer  # rows of main_grad, to their owners
    # (sum(recv_counts),) int32: the rows of its block that an owner receives; of n-grams, places in `owned`.
    arriving: Tensor
    # The others are for n-grams. (n,) int32: the rows of its block that any rank has touched.
    owned: Tensor | None = None
    # (n,) int32: their places in NgramTable.tables: themselves; with placement host, 0 .. n - 1.
    at: Tensor | None = None
    # Where the last of these, touched in the step before too, were in its `owned`.
    kept_from: Tensor | None = None
    # Rows for who asked, early and late, as places in those tables.
    fetches: dict[str, Transfer] = {}


def ngram_bounds(cfg: Config, world_size: int) -> tuple[int, int, int]:
    """Returns the most rows of the n-gram table that a step touches on a rank, and that a rank owns; the
    rows of a rank's block.
    """
    n, count = cfg.ngrams, num_microbatches(cfg, world_size)
    tokens = max(stage.batch_tokens for stage in cfg.stages) // count * (count // world_size)
    touched, block = n.ranges * min(tokens, n.rows), padded(n.ranges * n.rows, world_size) // world_size
    return touched, world_size * min(touched, block), block


map_tensors = partial(tree_map_only, Tensor)  # (function, a nest of dicts and tuples)


def pack(nest: dict) -> dict:
    """Copies all tensors of a nest into one host buffer, its entry "buffer".

    One copy then takes it to a GPU. If the process uses one, the buffer is page-locked; torch reuses such
    memory when no tensor holds it and the asynchronous copies from it are done.
    """
    sizes = [padded(t.nbytes, 16) for t in tree_leaves(nest) if isinstance(t, Tensor)]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    parts = iter(buffer.split(sizes))
    packed = map_tensors(lambda t: next(parts)[: t.nbytes].view(t.dtype).view(t.shape).copy_(t), nest)
    return packed | {"buffer": buffer}


def move(packed: dict, device: torch.device) -> dict:
    """Returns a packed nest on `device`, by one asynchronous copy to a GPU."""
    if device.type == "cpu":
        return packed
    buffer = packed["buffer"].to(device, non_blocking=True)

    def moved(t: Tensor) -> Tensor:
        start = t.storage_offset() * t.element_size()
        return buffer[start : start + t.nbytes].view(t.dtype).view(t.shape)

    return map_tensors(moved, packed)


@dataclass
class MicroBatch:
    inputs: Tensor  # (T,) int32
    targets: Tensor  # (T,) int64
    # (K, T) int32: rows of bigram_embed (K = 1), or of the n-gram table; in training, of what a step fetches.
    ngrams: Tensor
    signs: Tensor | None  # (K, T) int32: rows of the signs that multiply those rows
    cu_seqlens: Tensor  # (max_docs,) int32: 0, the ends of the documents, then T
    max_doc_len: int  # bound on a document's length
    index: dict[str, RowIndex] = field(default_factory=dict)  # in training
    buffer: Tensor | None = None  # uint8: holds all of these, once packed

    def pack(self) -> "MicroBatch":
        return MicroBatch(**pack(vars(self)))

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns it on `device`; it must be packed."""
        return MicroBatch(**move(vars(self), device))


def make_micro_batch(
    tokens: np.ndarray, ends: np.ndarray, max_doc_len: int, max_docs: int, cfg: Config
) -> MicroBatch:
    """Builds one from T+1 tokens (uint16) and the ends of all documents but the last."""
    T = len(tokens) - 1
    if len(ends) + 2 > max_docs:
        raise UserError(
            f"a micro-batch of {T} tokens has {len(ends) + 1} documents, cu_seqlens room for {max_docs - 1}; "
            f"use --set max_docs={padded(len(ends) + 2, 128)}"
        )
    inputs, cu_seqlens = int32(tokens[:-1]), torch.full((max_docs,), T, dtype=torch.int32)
    if cfg.ngrams.orders:
        ngrams, signs = hash_ngrams(inputs.numpy(), cfg.ngrams, cfg.sign_rows)
    else:
        ngrams, signs = hash_bigrams(inputs.numpy(), cfg.bigram_vocab_size, cfg.sign_rows)
    cu_seqlens.numpy()[: len(ends) + 1] = 0, *ends
    targets, sign_ids = int32(tokens[1:]).long(), None if signs is None else int32(signs)
    return MicroBatch(inputs, targets, int32(ngrams), sign_ids, cu_seqlens, max_doc_len)


def int32(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32, copy=False))


def sort_by_row(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns RowIndex's row_ids, perm and offsets of row `ids` (T,) int32."""
    # Sorts 16 bits at a time: numpy then uses a radix sort, in a third of the time.
    perm = np.argsort(ids.astype(np.uint16), kind="stable")
    if len(ids) and ids.max() >= 1 << 16:
        perm = perm[np.argsort((ids >> 16).astype(np.uint16)[perm], kind="stable")]
    sorted_ids = ids[perm]
    first = np.flatnonzero(np.diff(sorted_ids, prepend=np.int32(-1)))
    return sorted_ids[first], perm.astype(np.int32), np.append(first, len(ids)).astype(np.int32)


def merge_rows(*lists: np.ndarray) -> np.ndarray:
    """Returns the distinct numbers of ascending lists, ascending."""
    merged = np.sort(np.concatenate(lists), kind="stable")  # timsort: it merges ascending runs
    return merged[np.diff(merged, prepend=np.int32(-1)) != 0]


def is_in(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns for each of the `ids` whether it is among `rows`; both ascend."""
    return np.append(rows, -1)[np.searchsorted(rows, ids)] == ids


def inverse(permutation: np.ndarray) -> np.ndarray:
    places = np.empty(len(permutation), np.int32)
    places[permutation] = np.arange(len(permutation))
    return places


NO_ROWS = np.empty(0, np.int32)


def index_rows(ids: np.ndarray, touched: np.ndarray = NO_ROWS, signs: np.ndarray | None = None) -> RowIndex:
    """Sorts a micro-batch's positions by row `ids`, (T,) or, with ranges that ascend, (K, T) int32.

    touched: rows that earlier micro-batches since the last update have touched, ascending. signs: (K, T).
    """
    ranges = np.atleast_2d(ids)
    row_ids, perm, offsets = zip(*map(sort_by_row, ranges))
    starts = [part[:-1] + k * ranges.shape[1] for k, part in enumerate(offsets)]
    rows, ends = np.concatenate(row_ids), np.append(np.concatenate(starts), ids.size).astype(np.int32)
    parts = [rows, np.concatenate(perm), ends, ~is_in(touched, rows)]
    if signs is not None:
        parts.append(np.concatenate([row[order] for row, order in zip(signs, perm)]))
    return RowIndex(*map(torch.from_numpy, parts))


def place_rows(ids: Tensor, index: RowIndex, places: Tensor) -> Tensor:
    """Returns `ids` (K, T) with places[i] for index.row_ids[i]."""
    by_row = places.repeat_interleave(index.offsets.diff())
    return torch.empty_like(ids).scatter_(1, index.perm.view(ids.shape).long(), by_row.view(ids.shape))


FIRST_READ = 1 << 23  # tokens of a run's first shard that its first batches wait for


class OutOfData(UserError):
    """The schedule needs more batches than the training shards give."""


class TrainLoader:
    """Cuts training shards into batches of whole documents; micro-batch m * world_size + r is rank r's m-th.

    A micro-batch takes documents in order, each cut to max_doc_len tokens, until it holds T + 1 tokens; the
    rest of a cut document is dropped. A batch that does not fit before the end of a shard starts over in the
    next one, which a thread reads meanwhile. `position` continues where an earlier loader's position() was
    taken.
    """

    def __init__(
        self,
        cfg: Config,
        paths: list[Path],
        rank: int,
        world_size: int,
        position: tuple[int, ...] = (0, 0, 0),
    ):
        self.cfg, self.paths, self.rank, self.world_size = cfg, paths, rank, world_size
        self.microbatches = num_microbatches(cfg, world_size)
        # One thread reads the next shard, one builds the next batches, in order. A new thread's GPU is 0:
        # page-locking memory there would make every rank a context on it.
        on_gpu = torch.cuda.is_initialized()
        use_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
        self.reader, self.builder = (ThreadPoolExecutor(1, initializer=use_gpu) for _ in range(2))
        self.opened, self.document, self.delivered = position  # delivered: tokens, over all ranks
        self.upcoming, self.ends = self._read(self.opened), {}  # max_doc_len -> running total of lengths
        self.is_partial = not any(position)
        if self.is_partial:
            # A run starts on the clock. A batch that needs more of the last document takes it from the whole
            # shard.
            self.shard = read_shard(self.paths[0], cfg, FIRST_READ)
        else:
            self._open()

    def position(self) -> tuple[int, int, int]:
        """Returns where the next batch begins: shard number, document number, tokens delivered before."""
        return self.opened, self.document, self.delivered

    def _read(self, i: int):
        if i < len(self.paths):
            return self.reader.submit(read_shard, self.paths[i], self.cfg)

    def _open(self) -> None:
        """Opens the shard that is being read: all of the present one, or the next."""
        if self.upcoming is None:
            raise OutOfData(f"training data ran out after {self.delivered:,} tokens; add training shards")
        self.shard, self.upcoming, self.ends = self.upcoming.result(), self._read(self.opened + 1), {}

    def close(self) -> None:
        self.builder.shutdown()  # not cancelled: other ranks may be building the same batch with this one
        self.reader.shutdown(cancel_futures=True)

    def _cut(self, T: int, max_doc_len: int) -> list[tuple[int, int]] | None:
        """Returns each micro-batch's first document and the one after its last; None at a shard's end."""
        if max_doc_len not in self.ends:
            lengths = np.diff(self.shard.starts, append=len(self.shard.tokens))
            self.ends[max_doc_len] = np.append(0, np.cumsum(np.minimum(lengths, max_doc_len)))
        ends, cuts, first = self.ends[max_doc_len], [], self.document
        for _ in range(self.microbatches):
            last = int(np.searchsorted(ends, ends[first] + T + 1))
            if last == len(ends):
                return None
            cuts.append((first, last))
            first = last
        return cuts

    def advance(self, batch_tokens: int, max_doc_len: int) -> list[tuple[int, int]]:
        """Skips a batch. Returns each micro-batch's first document and the one after its last."""
        while (cuts := self._cut(batch_tokens // self.microbatches, max_doc_len)) is None:
            if not self.is_partial:
                self.opened, self.document = self.opened + 1, 0
            self._open()
            self.is_partial = False
        self.document = cuts[-1][1]
        self.delivered += batch_tokens
        return cuts

    def batch(self, batch_tokens: int, max_doc_len: int) -> list[MicroBatch]:
        """Builds this rank's micro-batches of the next batch."""
        T, cuts = batch_tokens // self.microbatches, self.advance(batch_tokens, max_doc_len)
        ends, micro_batches = self.ends[max_doc_len], []
        max_docs = self.cfg.max_docs or default_max_docs(T)
        for first, last in cuts[self.rank :: self.world_size]:
            begin, lengths = self.shard.starts[first:last], np.diff(ends[first : last + 1])
            tokens = np.concatenate([self.shard.tokens[b : b + n] for b, n in zip(begin, lengths)])[: T + 1]
            doc_ends = ends[first + 1 : last] - ends[first]
            micro_batches.append(make_micro_batch(tokens, doc_ends, max_doc_len, max_docs, self.cfg))
        return micro_batches


def count_batches(cfg: Config, paths: list[Path], world_size: int) -> int:
    """Counts how many of the schedule's batches the training shards give, without building one."""
    loader, count = TrainLoader(cfg, paths, 0, world_size), 0
    with contextlib.closing(loader), contextlib.suppress(OutOfData):
        while count < cfg.steps:
            plan = plan_step(cfg, count)
            loader.advance(plan.batch_tokens, plan.max_doc_len)
            count += 1
    return count


def check_schedule(cfg: Config, paths: list[Path], world_size: int) -> None:
    """Raises UserError, with a shorter schedule that fits, if the shards run out before the last step."""
    if (batches := count_batches(cfg, paths, world_size)) == cfg.steps:
        return
    share = sum(plan_step(cfg, step).batch_tokens for step in range(batches)) / train_tokens(cfg)
    shorter = cfg
    while shorter.steps and count_batches(shorter, paths, world_size) < shorter.steps:
        # All stages by one factor; a guess, since batches waste different shares.
        shorter = replace(cfg, stages=tuple(replace(s, steps=int(s.steps * share)) for s in cfg.stages))
        share *= 0.95
    fits = " ".join(f"--set stages.{i}.steps={stage.steps}" for i, stage in enumerate(shorter.stages))
    count = num_microbatches(cfg, world_size)
    used = max(min(stage.max_doc_len, stage.batch_tokens // count + 1) for stage in cfg.stages if stage.steps)
    raise UserError(
        f"{cfg.data}: the training documents, of which at most {used:,} tokens each are used, give "
        f"{batches:,} of the schedule's {cfg.steps:,} batches, {train_tokens(cfg):,} tokens; add text or cut "
        "long documents into passages as data/tokenize_text.py does"
        + (f"; this would fit: {fits}" if shorter.steps else "")
    )


class Batch(NamedTuple):
    plan: StepPlan
    micro_batches: list[MicroBatch]
    position: tuple[int, ...]  # of the loader, after it
    rows: dict  # packed RowPlans of the tables that this step updates, by what indexes them


class Prefetcher:
    """Builds the planned steps' batches on a thread, two ahead of the one in use.

    With it, ranks tell each other by `exchange`, used by nothing else, which rows they touch. The first plan
    must be step 0 or follow an Adam step: no rows may have been touched since.
    """

    def __init__(self, loader: TrainLoader, plans: Iterable[StepPlan], exchange: "Exchange"):
        self.loader, self.exchange, cfg = loader, exchange, loader.cfg
        self.table_rows = {"tokens": cfg.padded_vocab, "bigrams": cfg.bigram_vocab_size}
        self.is_sparse = {spec.indexed_by for spec in cfg.params if spec.exchange == "sparse"} | {"ngrams"}
        self.hashed = "ngrams" if cfg.ngrams.orders else "bigrams"
        self.touched: dict[str, np.ndarray] = {}  # by what indexes tables: rows since their last update
        # This rank's rows of n-grams in the batch before, ascending, and their places in RowPlan.owned.
        self.before: tuple[np.ndarray, np.ndarray] = NO_ROWS, NO_ROWS
        # A generator ends with its first error: no later batch's exchange meets one that other ranks wait in.
        self.batches = (self._build(plan) for plan in plans)
        self.queue = [self._submit(), self._submit()]

    def _submit(self) -> Future:
        return self.loader.builder.submit(next, self.batches, None)

    def next(self) -> Batch | None:
        """Returns the next batch; None after the last."""
        batch = self.peek()
        self.queue.pop(0)
        self.queue.append(self._submit())
        return batch

    @section("waiting batch")
    def peek(self) -> Batch | None:
        """Returns the batch that next() will return."""
        return self.queue[0].result()

    @section("index")
    def _build(self, plan: StepPlan) -> Batch:
        micro_batches = self.loader.batch(plan.batch_tokens, plan.max_doc_len)
        for batch in micro_batches:
            signs = batch.signs if batch.signs is None else batch.signs.numpy()
            for kind, ids, own_signs in (("tokens", batch.inputs, None), (self.hashed, batch.ngrams, signs)):
                touched = self.touched.get(kind, NO_ROWS)
                batch.index[kind] = index_rows(ids.numpy(), touched, own_signs)
                self.touched[kind] = merge_rows(touched, batch.index[kind].row_ids.numpy())
        updated = [kind for kind in self.touched if plan.do_adam or kind == "ngrams"]
        plans = self._plan_rows(updated, micro_batches)
        packed = [batch.pack() for batch in micro_batches]
        return Batch(plan, packed, self.loader.position(), pack(plans))

    def _plan_rows(self, kinds: list[str], micro_batches: list[MicroBatch]) -> dict[str, RowPlan]:
        """Tells the owners which of their rows are touched, for tables that are updated now."""
        plans = {}
        for kind in kinds:
            rows, n = self.touched.pop(kind), self.exchange.world_size if kind in self.is_sparse else 1
            if kind == "ngrams":
                place, owner = np.divmod(rows, n)
            else:
                owner, place = np.divmod(rows, self.table_rows[kind] // n)
            order = np.argsort(owner.astype(np.uint16), kind="stable")
            send_counts = np.bincount(owner, minlength=n).tolist()
            arriving, recv_counts = self.exchange.send_ids(kind, place[order], send_counts)
            plans[kind] = RowPlan(Transfer(int32(rows[order]), send_counts, recv_counts), int32(arriving))
            if kind == "ngrams":
                plans[kind] = self._plan_fetches(plans[kind], micro_batches)
        return plans

    def _plan_fetches(self, plan: RowPlan, micro_batches: list[MicroBatch]) -> RowPlan:
        """Plans the fetch of the n-grams' rows, and numbers them in the micro-batches as they will arrive.

        Tells who asked for a row of this rank's whether it comes late: the step before changes it.
        """
        (wanted, send_counts, recv_counts), (before, places_before) = plan.grads, self.before
        ngrams, n = self.loader.cfg.ngrams, self.exchange.world_size
        owned = merge_rows(plan.arriving.numpy())
        asked = np.searchsorted(owned, plan.arriving.numpy())  # indices of `owned`
        is_kept = is_in(before, owned)
        by_place = np.argsort(is_kept, kind="stable")  # new rows first: a HostTable reads them in one piece
        places = inverse(by_place)
        kept_from = places_before[np.searchsorted(before, owned[is_kept])]
        self.before = owned, places
        is_late = (is_kept[asked] if ngrams.prefetch else np.ones(len(asked))).astype(np.uint8)
        comes_late = self.exchange.send_numbers("late marks", "ngrams", is_late, recv_counts, send_counts)
        fetches, numbers = {}, places if ngrams.placement == "host" else owned
        askers, owners = (np.repeat(np.arange(n), counts) for counts in (recv_counts, send_counts))
        for name, flag in ("early", 0), ("late", 1):
            to = np.bincount(askers[is_late == flag], minlength=n)
            by = np.bincount(owners[comes_late == flag], minlength=n)
            fetches[name] = Transfer(int32(numbers[asked[is_late == flag]]), to.tolist(), by.tolist())
        # Early rows arrive before late ones, each sorted by owner.
        arrival = inverse(np.argsort(comes_late, kind="stable"))
        by_row = np.argsort(wanted.numpy(), kind="stable")
        rows, arrival_by_row = wanted.numpy()[by_row], arrival[by_row]
        for batch in micro_batches:
            index = batch.index["ngrams"]
            arrives = int32(arrival_by_row[np.searchsorted(rows, index.row_ids.numpy())])
            batch.ngrams = place_rows(batch.ngrams, index, arrives)
            batch.index["ngrams"] = index._replace(row_ids=arrives)
        grads = plan.grads._replace(rows=int32(arrival))
        at = int32(numbers[by_place])
        return RowPlan(grads, int32(places[asked]), int32(owned[by_place]), at, int32(kept_from), fetches)


class ValLoader:
    """Holds the first val_slices * val_slice_tokens validation tokens, and the last target."""

    def __init__(self, cfg: Config, paths: list[Path]):
        self.cfg, parts, need = cfg, [], cfg.val_slices * cfg.val_slice_tokens + 1
        for path in paths:
            parts.append(read_shard(path, cfg, need).tokens)
            need -= len(parts[-1])
        self.tokens = np.concatenate(parts)
        self.max_docs = max(cfg.max_docs, default_max_docs(cfg.val_slice_tokens))

    def batch(self, i: int) -> MicroBatch:
        """Builds slice i, packed."""
        T = self.cfg.val_slice_tokens
        tokens = self.tokens[i * T : (i + 1) * T + 1]
        starts = np.flatnonzero(tokens[:-1] == self.cfg.bos_id)
        max_doc_len = int(np.diff(starts, prepend=0, append=T).max())
        return make_micro_batch(tokens, starts, max_doc_len, self.max_docs, self.cfg).pack()


# ============================================================================================================
# 6  Reference. Operations in plain torch. Section 7 has kernels for some: this is what these must equal, and
#    what runs without them. Others are compiled where they are called.
# ============================================================================================================

NORM_EPS = 2.0**-23  # for every dtype
DC_EPS = 1e-6  # of the norm of dynamically composed heads' first weights, over heads


def upcast(x: Tensor) -> Tensor:
    """Returns x in at least fp32: as it is, if it is fp32 or fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """Applies RMSNorm without weight over the last axis, reduced in at least fp32 (arXiv:1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int, scale: float
) -> Tensor:
    """Attends causally within documents: position i sees j of its document with 0 <= i - j <= window.

    q, k, v (T, H, D); cu_seqlens (n,) int32, document boundaries; max_seqlen bounds a document's length.
    Returns (T, H, D). Queries go in blocks, each against the keys of its block and of `window` positions
    before it: T * (window + block) scores instead of T * T.
    """
    T = len(q)
    q, k, v, mask = query_blocks(q, k, v, cu_seqlens, min(window, max_seqlen - 1, T - 1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.transpose(1, 2).flatten(0, 1)[:T]


def query_blocks(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cuts queries (T, H, D) into n blocks (n, H, block, D), with the keys and values that these may see.

    Also returns a mask (n, 1, block, keys): which key is in a query's document and window.
    """
    T, block = len(q), min(max(32, window), 256)
    before, tail = padded(window, block), -T % block  # keys before a block's own; what the last block lacks
    doc = document_numbers(cu_seqlens, T)
    doc_q = F.pad(doc, (0, tail), value=-1).view(-1, block, 1)
    doc_k = F.pad(doc, (before, tail), value=-1).unfold(0, before + block, block).unsqueeze(1)
    offs = torch.arange(-before, block, device=q.device)
    distance = offs[before:, None] - offs
    mask = (doc_q == doc_k) & (distance >= 0) & (distance <= window)
    q = F.pad(q, (0, 0, 0, 0, 0, tail)).unflatten(0, (-1, block))
    # Overlapping blocks of keys from neighbouring ones: the backward of unfold() is five times as slow.
    k, v = (F.pad(t, (0, 0, 0, 0, before, tail)).unflatten(0, (-1, block)) for t in (k, v))
    k, v = (torch.cat([t[i : i + len(q)] for i in range(before // block + 1)], dim=1) for t in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask.unsqueeze(1)


def document_numbers(cu_seqlens: Tensor, T: int) -> Tensor:
    """Returns which document each of T positions belongs to, (T,) int64, from 1 on."""
    pos = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, pos, right=True)


def compose_heads(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    cu_seqlens: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Adds to attention's heads y (T, H, D) what all heads together attend to among the last `window` keys.

    Each head's softmax over these keys alone, weighted by w1 (T, H), sums to one matrix; w2 (T, H) weighs its
    products with each head's values. Dynamically composed heads: Xiao et al. 2024, arXiv:2405.08553; trimmed
    to this in record 85.
    """
    T, H, _ = q.shape
    w1, w2 = w1.expand(T, H), w2.expand(T, H)  # they may be constants, (1, H)
    q, k, v, mask = query_blocks(q, k, v, cu_seqlens, min(window - 1, T - 1))
    block = q.size(2)
    scores = (scale * upcast(q) @ upcast(k).mT).masked_fill(~mask, -math.inf)
    w1 = F.pad(w1, (0, 0, 0, -T % block)).view(-1, block, H).transpose(1, 2)
    mixed = (w1[..., None] * scores.softmax(-1)).sum(1, keepdim=True).to(q.dtype)
    return y + w2[:, :, None] * (mixed @ v).transpose(1, 2).flatten(0, 1)[:T]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first half of x (..., D), by angles given as cos, sin (..., D/4)."""
    rotated, passthrough = x.chunk(2, dim=-1)
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([cos * a + sin * b, cos * b - sin * a], dim=-1).flatten(-2)
    return torch.cat([rotated, passthrough], dim=-1)


def shift_keys(k: Tensor) -> Tensor:
    """Takes the second half of each key (T, H, D) from the token before; token 0 keeps its own.

    This makes an induction head of one layer instead of two: a query finds what followed an earlier copy of
    its token (PR 169). The half is the one that is not rotated: it matches content, not distance.
    """
    rotated, passthrough = k.chunk(2, dim=-1)
    return torch.cat([rotated, torch.cat([passthrough[:1], passthrough[:-1]])], dim=-1)


def relu_square(h: Tensor, fc: Tensor) -> Tensor:
    """Returns relu(h fc^T)^2, (T, F), for h (T, d), fc (F, d).

    The square does better than GELU at the same cost (record 5; Primer: So et al. 2021, arXiv:2109.08668).
    """
    return F.linear(h, fc).relu_().square()


def relu_square_grad(dy: Tensor, proj: Tensor, square: Tensor) -> Tensor:
    """Returns d(h fc^T) = 2 sqrt(square) (dy proj^T), for the result of relu_square (record 87); proj (F, d).

    The root is not rounded; rounded to bf16 it would be relu(h fc^T) again.
    """
    square = upcast(square)
    # No sqrt(): on CPUs with MKL it takes zeros one by one, 15 times as long.
    root = square.clamp_min(torch.finfo(square.dtype).tiny).rsqrt().mul_(square)
    return (dy @ proj.T).to(root.dtype).mul_(root.mul_(2)).to(dy.dtype)


E4M3_MAX = 448.0  # e4m3's largest number
FP8_LEAST = 1e-12  # maxima below count as that
# Factors from a maximum to the next step's: activations change more than weights.
FP8_ACT_ROOM, FP8_PROJ_ROOM = 1.80, 1.12
FP8_EXACT_STEPS = 17  # proj starts at 0, and grows by more than its room at first


class FP8MLP(NamedTuple):
    """An MLP's weights in FP8 (e4m3), and scales, 0-d fp32: weight = weight in FP8 * scale."""

    fc: Tensor  # (F, d)
    proj: Tensor  # (d, F): FP8 matmuls need a column-major second factor
    fc_scale: Tensor
    proj_scale: Tensor
    act_scale: Tensor  # of relu_square's result
    act_amax: Tensor  # its maximum in this step so far


def relu_square_fp8(h8: Tensor, h_amax: Tensor, weights: FP8MLP, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns relu(h fc^T)^2 of FP8 factors, (T, F), in `dtype`; and in FP8, divided by weights.act_scale.

    h8 (T, d) stands for h8 * h_amax / 448; h_amax 0-d fp32. The product is rounded once, after its scales.
    Raises weights.act_amax to the result's maximum.
    """
    product = h8.float() @ weights.fc.float().T
    square = (product * (weights.fc_scale * h_amax / E4M3_MAX)).to(dtype).relu_().square()
    weights.act_amax.copy_(torch.maximum(weights.act_amax, square.max()))
    square8 = (square.float() * weights.act_scale.reciprocal()).clamp_max(E4M3_MAX)
    return square, square8.to(torch.float8_e4m3fn)


def amax_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 448 / amax * x in e4m3, and amax, x's largest absolute entry, 0-d fp32."""
    amax = x.abs().amax().float().clamp_min(FP8_LEAST)
    return (x.float() * (E4M3_MAX / amax)).to(torch.float8_e4m3fn), amax


def fp8_mlp_weights(bank: Tensor, proj_scale: Tensor) -> tuple[Tensor, ...]:
    """Converts a bank (L, 2, F, d) of fc and proj for FP8 products (records 84, 89).

    Returns fc (L, F, d), proj^T (L, d, F), their scales (L,) fp32, and the next step's proj_scale (L,). Those
    of fc are exact, in the bank's dtype, compiled code may skip that rounding; proj's are from the step
    before, with room for growth, or, where proj_scale is 0, exact.
    """
    fc, proj = bank.unbind(1)
    amax = bank.abs().amax((2, 3))
    fc_scale, exact = (amax.clamp_min(FP8_LEAST) / E4M3_MAX).unbind(1)
    proj_scale = torch.where(proj_scale > 0, proj_scale, exact.float())
    fc8 = (fc / fc_scale[:, None, None]).to(torch.float8_e4m3fn)
    proj8 = to_fp8(proj.mT, proj_scale[:, None, None], torch.float8_e4m3fn)
    following = amax[:, 1].float().clamp_min(FP8_LEAST) * (FP8_PROJ_ROOM / E4M3_MAX)
    return fc8, proj8, fc_scale.float(), proj_scale, following


# Logits are capped, so that none runs away and gradients stay small (record 9; Gemma 2, arXiv:2408.00118).
# The cap is asymmetric, 0 to 23: most tokens are never right, and their logits lie far below the few that may
# be (PR 181).
SOFTCAP_SCALE, SOFTCAP_SHIFT, SOFTCAP_SPAN = 23.0, 5.0, 7.5


def softcap_sigmoid(logits: Tensor) -> Tensor:
    """Returns sigmoid((logits + 5) / 7.5) in at least fp32; 23 times that are the softcapped logits."""
    return torch.sigmoid((upcast(logits) + SOFTCAP_SHIFT) / SOFTCAP_SPAN)


def next_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropies (n,) of logits (n, V) after the softcap, in at least fp32."""
    return F.cross_entropy(SOFTCAP_SCALE * softcap_sigmoid(logits), targets, reduction="none")


def loss_targets(targets: Tensor, count: int, prefixes: Tensor | None) -> Tensor:
    """Returns the next `count` tokens of each position, (T, count) int64, from the next one, `targets` (T,).

    With `prefixes` (V,), a last column has the next token's prefix. -1: none.
    """
    columns = [F.pad(targets[k:], (0, min(k, len(targets))), value=-1) for k in range(count)]
    return torch.stack(columns if prefixes is None else [*columns, prefixes[targets]], dim=1)


def softcap_loss(
    logits: Tensor, targets: Tensor, weights: tuple[float, ...], scale_inv: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropies of softcapped logits with several targets, and their sum's gradient.

    logits (n, V); targets (n, K) int64, contiguous, -1: none; K weights. Losses (n,) are fp32 (fp64 for fp64
    logits). The gradient has the logits' dtype; with `scale_inv` it is e5m2 in units of scale_inv,
    saturating.
    """
    s = softcap_sigmoid(logits)
    z = SOFTCAP_SCALE * s
    lse = z.logsumexp(dim=-1)
    losses, total, target_probs = torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(z)
    for target, weight in zip(targets.split(1, dim=1), weights):
        at, row_weights = target.clamp_min(0), weight * (target >= 0).to(z.dtype)
        losses += row_weights[:, 0] * (lse - z.gather(1, at)[:, 0])
        total += row_weights[:, 0]
        target_probs.scatter_add_(1, at, row_weights)
    dz = total[:, None] * (z - lse[:, None]).exp() - target_probs
    grad = dz * (s * (1 - s)) * (SOFTCAP_SCALE / SOFTCAP_SPAN)
    return losses, to_fp8(grad, scale_inv, torch.float8_e5m2) if scale_inv else grad.to(logits.dtype)


def to_fp8(x: Tensor, scale_inv: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x / scale_inv, rounded to nearest, saturating, contiguous."""
    fp8_max = torch.finfo(dtype).max
    x = (x.float() / scale_inv).clamp(-fp8_max, fp8_max)
    return x.to(dtype, memory_format=torch.contiguous_format)


def scaled_grad(
    out: Tensor, dots: Tensor, product: Tensor, scales: Tensor, row: int, w: Tensor, overwrite: bool
) -> None:
    """out = scales[row] * product; += unless `overwrite`. dots = product . w, by rows, in at least fp32.

    out, product, w (n, rows, cols); dots (n, rows); scales (2, n), not one of its rows: compiled code would
    copy the second, which is not aligned to 16 bytes. Each result is rounded once.
    """
    dots.copy_((product.to(dots.dtype) * w).sum(-1))
    scale = scales[row, :, None, None]
    out.copy_(product * scale) if overwrite else out.addcmul_(product, scale)


COLUMN_CHUNK = 768  # columns of a table summed at once, so that no temporary has a table's size


def segment_sum_rows(out: Tensor, grad: Tensor, index: RowIndex, signs: Tensor | None = None) -> None:
    """Adds each touched row's position gradients to that row of `out` (N, ...); a first touch overwrites it.

    grad (T, ...), multiplied by rows index.signs of `signs`, if there are any. A row's gradients are summed
    in at least fp32, in the text's order, and rounded once.
    """
    out, grad, ids = out.flatten(1), grad.flatten(1), index.row_ids
    dtype, lengths = torch.promote_types(out.dtype, torch.float32), index.offsets.diff().long()
    for i in range(0, out.size(1), COLUMN_CHUNK):
        part = out[:, i : i + COLUMN_CHUNK]
        grad_part = grad[index.perm, i : i + COLUMN_CHUNK].to(dtype)
        if signs is not None and index.signs is not None:
            grad_part *= signs[index.signs, i : i + COLUMN_CHUNK]
        sums = torch.segment_reduce(grad_part, "sum", lengths=lengths, unsafe=True)
        sums = torch.where(index.first_touch[:, None], sums, part[ids].to(dtype) + sums)
        part.index_copy_(0, ids.long(), sums.to(out.dtype))


def gather_rows(
    out: Tensor, table: Tensor, ids: Tensor, signs: Tensor | None = None, sign_ids: Tensor | None = None
) -> None:
    """Writes the sums of rows ids[:, i] of `table` (N, w), for ids (K, n) int32, to out[i], (n, w).

    They are multiplied by rows sign_ids (K, n) of `signs`, if given; summed in order, in at least fp32, and
    rounded once.
    """
    parts = [upcast(table[rows]) for rows in ids]
    if signs is not None and sign_ids is not None:
        parts = [part * signs[rows] for part, rows in zip(parts, sign_ids)]
    out.copy_(sum(parts[1:], parts[0]))


ROW_EPS = 1e-10


def update_rows(
    table: Tensor,
    moments: Tensor,
    rows: Tensor,
    grads: Tensor,
    lr: float | Tensor,
    beta2: float,
    row_seeds: Tensor,
    column_seeds: Tensor,
) -> None:
    """Updates distinct `rows` (n,) int32 of `table` (N, w) from grads (n, w), scaled by rows' second moments.

    moments (N,), at least fp32, like the arithmetic, average the mean squares of a row's gradients over its
    updates: RMSProp (Tieleman, Hinton 2012) by row, as DLRM (arXiv:1906.00091) and FBGEMM have Adagrad (Duchi
    et al. 2011, jmlr.org/papers/v12/duchi11a.html), which sums them: beta2 = 1. The first sets a moment of 0;
    averaged with it, a row's first step would be 1 / sqrt(1 - beta2) times as long.
    A bf16 table is rounded stochastically, by int32 seeds (n,) and (w,).
    """
    at, squares, weight = rows.long(), grads.square().mean(-1), (1 - beta2) or 1
    old = moments[at]
    new = torch.where(old == 0, squares, beta2 * old + weight * squares)
    moments.index_copy_(0, at, new)
    values = table[at].to(grads.dtype) - lr * grads / (new.sqrt() + ROW_EPS)[:, None]
    if table.dtype == torch.bfloat16:
        values = round_stochastically(values.float(), row_seeds, column_seeds)
    table.index_copy_(0, at, values.to(table.dtype))


def signed(x: int) -> int:
    """Returns the int32 with the bits of a uint32."""
    return (x & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


def mix_bits(x: Tensor) -> Tensor:
    """Mixes the bits of int32 x by the finalizer of MurmurHash3, in int32, which wraps."""
    x = (x ^ (x >> 16 & 0xFFFF)) * signed(0x85EBCA6B)  # >> copies the sign, which the masks take away
    x = (x ^ (x >> 13 & 0x7FFFF)) * signed(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def seed_rows(row_ids: Tensor, step: int) -> Tensor:
    """Returns seeds for round_stochastically, (n,) int32, that differ by row and step."""
    return row_ids + signed(step * MIX)


def seed_columns(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns its seeds of columns. Outside compiled code, where an arange of int32 must not wrap."""
    return torch.arange(width, dtype=torch.int32, device=device) * signed(MIX)


def round_stochastically(x: Tensor, row_seeds: Tensor, column_seeds: Tensor) -> Tensor:
    """Returns fp32 x (n, w) without its lower 16 bits, so that bf16 holds it, and its mean over steps is x.

    Adds a hash of the seeds of row and column below bf16's last bit, and truncates. NaN passes: a carry could
    make it a zero. Rounded to nearest, a weight would not move by less than 1/512 of itself.
    """
    bits, noise = x.view(torch.int32), mix_bits(mix_bits(row_seeds)[:, None] + column_seeds) & 0xFFFF
    return torch.where(x.isnan(), bits, bits + noise & -0x10000).view(torch.float32)


# Polar Express: Amsel, Persson, Musco, Gower 2025, arXiv:2505.16932; five steps, safety factor 1.02.
POLAR_STEPS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def baddbmm_fp32(add: Tensor, x: Tensor, y: Tensor, beta: float, alpha: float) -> Tensor:
    """Returns beta add + alpha x y for batches of matrices, summed in at least fp32 and rounded once."""
    if x.is_cuda:  # tensor cores already accumulate in fp32
        return torch.baddbmm(add, x, y, beta=beta, alpha=alpha)
    return torch.baddbmm(upcast(add), upcast(x), upcast(y), beta=beta, alpha=alpha).to(x.dtype)


def gram(x: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Returns alpha x x^T + beta add, (n, M, M), rounded once, for x (n, M, K) and symmetric `add`."""
    return baddbmm_fp32(x.new_zeros(()) if add is None else add, x, x.mT, beta, alpha)


def polar_express(g: Tensor, dtype: torch.dtype, gram: Callable = gram) -> Tensor:
    """Approximates the orthogonal polar factor of each matrix of g (n, rows, cols), in `dtype`.

    Singular values end in 0.86 .. 1.14. In bf16 every product is summed in fp32 and rounded once.
    """
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR_STEPS:
        A = gram(x.mT if tall else x)
        B = gram(A, A, b, c)  # A is symmetric
        x = baddbmm_fp32(x, x, B, a, 1.0) if tall else baddbmm_fp32(x, B, x, a, 1.0)
    return x


def transpose_copy(out: Tensor, x: Tensor) -> None:
    """Writes x^T, for x (m, n), to out (n, m). FP8 moves as bytes, of which generated code rounds none."""
    if x.element_size() == 1:
        out, x = out.view(torch.uint8), x.view(torch.uint8)
    out.copy_(x.T)


def transpose_add(out: Tensor, x: Tensor, row_ids: Tensor) -> None:
    """Adds rows `row_ids` (k,) int32, distinct, of x (n, m) to those columns of out (m, n)."""
    at = row_ids.long()
    out[:, at] += x[at].T  # no index_add_, which is atomic on a GPU


# ============================================================================================================
# 7  Kernels, in Triton, with section 6's arguments and results; the backend of a run; matmuls that
#    write their weight's gradient into main_grad.
# ============================================================================================================

if triton is not None:

    @triton.jit
    def tile_matmul(
        left, right, K, left_k, right_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
    ):
        """Multiplies rows and columns of length K, summed in fp32.

        left (BLOCK_M, BLOCK_K) and right (BLOCK_K, BLOCK_N) point to their first tiles.
        """
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
    def gram_kernel(
        x,
        add,
        out,
        M,
        K,
        x_n,
        x_m,
        x_k,
        beta,
        alpha,
        ADD: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """Computes a tile of alpha x x^T + beta add on or above the diagonal, and stores its mirror image
        too.

        The result is bitwise symmetric: tensor cores may sum the halves of a diagonal tile in different
        orders, so its lower half is a copy of the upper.
        """
        i, j, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if i > j:
            return
        rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, BLOCK_K)
        left = x + n * x_n + (rows % M)[:, None] * x_m + k[None, :] * x_k  # % M stays in bounds; not stored
        right = x + n * x_n + (cols % M)[None, :] * x_m + k[:, None] * x_k
        total = alpha * tile_matmul(left, right, K, x_k, x_k, BLOCK, BLOCK, BLOCK_K)
        out_offs = n * M * M + rows[:, None] * M + cols[None, :]
        mask = (rows[:, None] < M) & (cols[None, :] < M)
        if ADD:
            total += beta * tl.load(add + out_offs, mask=mask, other=0.0).to(tl.float32)
        if i == j:
            total = tl.where(rows[:, None] <= cols[None, :], total, tl.trans(total))
        tile = total.to(out.dtype.element_ty)
        tl.store(out + out_offs, tile, mask=mask)
        if i < j:
            mirror_offs = n * M * M + cols[:, None] * M + rows[None, :]
            tl.store(out + mirror_offs, tl.trans(tile), mask=(cols[:, None] < M) & (rows[None, :] < M))

    # The FP8 scales are numbers of arrays, aligned or not: one compilation serves both.
    @triton.jit(do_not_specialize_on_alignment=["h_amax", "fc_scale", "act_scale", "act_amax"])
    def relu_square_kernel(
        a,
        b,
        square,
        out,
        h_amax,
        fc_scale,
        act_scale,
        act_amax,
        M,
        N,
        K,
        a_m,
        a_k,
        b_n,
        b_k,
        BACKWARD: tl.constexpr,
        FP8_MAX: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        """Computes a tile of a b^T and its epilogue. GROUP rows of tiles share operands in the L2 cache.

        FP8_MAX: e4m3's; `square` is the second output. 0: no FP8.
        """
        tiles_m, tiles_n, tile = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.program_id(0)
        first = tile // (GROUP * tiles_n) * GROUP
        height = min(tiles_m - first, GROUP)
        within = tile % (GROUP * tiles_n)
        rows = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        left = a + (rows % M).to(tl.int64)[:, None] * a_m + k[None, :] * a_k
        right = b + (cols % N)[None, :] * b_n + k[:, None] * b_k
        total = tile_matmul(left, right, K, a_k, b_k, BLOCK_M, BLOCK_N, BLOCK_K)
        out_offs = rows.to(tl.int64)[:, None] * N + cols[None, :]
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        if BACKWARD:
            root = tl.sqrt_rn(tl.load(square + out_offs, mask=mask, other=0.0).to(tl.float32))
            result = 2 * root * total.to(out.dtype.element_ty).to(tl.float32)
        else:
            if FP8_MAX:
                total *= tl.load(fc_scale) * tl.load(h_amax) / FP8_MAX
            relu = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL).to(out.dtype.element_ty)
            result = relu.to(tl.float32) * relu.to(tl.float32)
        result = result.to(out.dtype.element_ty)
        tl.store(out + out_offs, result, mask=mask)
        if FP8_MAX:
            tl.atomic_max(act_amax, tl.max(result.to(tl.float32)), sem="relaxed")  # exact in any order
            units = result.to(tl.float32) * (1 / tl.load(act_scale))
            units = tl.minimum(units, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
            tl.store(square + out_offs, units.to(square.dtype.element_ty), mask=mask)

    @triton.jit
    def softcap_loss_kernel(
        logits,
        targets,
        weights,
        losses,
        grad,
        V,
        stride,
        SCALE: tl.constexpr,
        SHIFT: tl.constexpr,
        PER_SPAN: tl.constexpr,
        fp8_max,
        dz_scale,
        BLOCK: tl.constexpr,
    ):
        """Computes a row's loss and gradient. z lies in 0 .. 23: exponentials need no maximum subtracted."""
        row, offs = tl.program_id(0), tl.arange(0, BLOCK)
        logits += row.to(tl.int64) * stride
        grad += row.to(tl.int64) * V
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + offs, mask=start + offs < V, other=float("-inf")).to(tl.float32)
            sums += tl.where(start + offs < V, tl.exp(SCALE * tl.sigmoid((x + SHIFT) * PER_SPAN)), 0.0)
        lse = tl.log(tl.sum(sums))
        loss, total = 0.0, 0.0
        targets += row.to(tl.int64) * len(weights)
        for k in tl.static_range(len(weights)):
            target = tl.load(targets + k)
            if target >= 0:
                x = tl.load(logits + target).to(tl.float32)
                loss += weights[k] * (lse - SCALE * tl.sigmoid((x + SHIFT) * PER_SPAN))
                total += weights[k]
        tl.store(losses + row, loss)
        for start in range(0, V, BLOCK):
            cols = start + offs
            s = tl.sigmoid(
                (tl.load(logits + cols, mask=cols < V, other=0.0).to(tl.float32) + SHIFT) * PER_SPAN
            )
            g = total * tl.exp(SCALE * s - lse)
            for k in tl.static_range(len(weights)):
                g -= tl.where(cols == tl.load(targets + k), weights[k], 0.0)
            g *= s * (1 - s) * dz_scale
            g = tl.clamp(g, -fp8_max, fp8_max, propagate_nan=tl.PropagateNan.ALL)  # a NaN must stay visible
            tl.store(grad + cols, g.to(grad.dtype.element_ty), mask=cols < V)

    @triton.jit
    def segment_sum_rows_kernel(
        out,
        grad,
        row_ids,
        perm,
        offsets,
        first_touch,
        signs,
        sign_ids,
        columns,
        grad_stride,
        SIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
        UNROLL: tl.constexpr,
    ):
        """Sums a chunk of a row over its positions, in their order, with UNROLL loads in flight."""
        i, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        first, last = tl.load(offsets + i), tl.load(offsets + i + 1)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, last, UNROLL):
            for k in tl.static_range(UNROLL):
                pos = tl.load(perm + start + k, mask=start + k < last, other=0).to(tl.int64)
                width = tl.where(start + k < last, columns, 0)
                part = tl.load(grad + pos * grad_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
                if SIGNED:
                    row = tl.load(sign_ids + start + k, mask=start + k < last, other=0).to(tl.int64)
                    part *= tl.load(signs + row * columns + cols, mask=cols < width, other=0.0).to(tl.float32)
                total += part
        out_ptrs = out + tl.load(row_ids + i).to(tl.int64) * columns + cols
        width = tl.where(tl.load(first_touch + i) == 0, columns, 0)
        total += tl.load(out_ptrs, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=cols < columns)

    @triton.jit
    def near_pairs(docs, rows, keys, T, WINDOW):
        """Returns which queries see which keys, and where a tensor (T, WINDOW) has these pairs.

        Also rows and keys in bounds, for loads of what is not seen: a row from T on sees nothing.
        """
        row_at, key_at = rows % T, tl.maximum(keys, 0) % T
        seen = (tl.load(docs + row_at) == tl.load(docs + key_at)) & (keys >= 0) & (rows < T)
        seen &= (keys <= rows) & (rows - keys < WINDOW)
        return seen, row_at * WINDOW + (WINDOW - 1 + keys - rows), row_at, key_at

    @triton.jit
    def compose_heads_kernel(
        x,
        k,
        v,
        q,
        weights,
        docs,
        mixed,
        out,
        dweights,
        dscores,
        T,
        H,
        scale,
        WINDOW: tl.constexpr,
        D: tl.constexpr,
        BACKWARD: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Composes the heads of BLOCK queries: adds to those of x (y), into `out`.

        BACKWARD: makes, of x (dy), the gradients of q (`out`), of the weights, and of the scaled scores. One
        tile has all keys that the queries see, and one their values; both are transposed.
        """
        KEYS: tl.constexpr = triton.next_power_of_2(BLOCK + WINDOW - 1)
        end, d = (tl.program_id(0) + 1) * BLOCK, tl.arange(0, D)
        rows, keys = end - BLOCK + tl.arange(0, BLOCK)[:, None], end - KEYS + tl.arange(0, KEYS)[None, :]
        seen, places, row_at, key_at = near_pairs(docs, rows, keys, T, WINDOW)
        offs, key_offs = row_at * H * D + d, key_at * H * D + d[:, None]
        total = tl.zeros((BLOCK, KEYS), tl.float32)
        if BACKWARD:
            before = tl.load(mixed + places, mask=seen, other=0.0)
            for h in range(H):
                value = tl.load(v + h * D + key_offs)
                products = tl.dot(tl.load(x + h * D + offs), value, input_precision="ieee")
                dw2 = tl.sum(products * before, 1, keep_dims=True)
                tl.store(dweights + (T + row_at) * H + h, dw2, mask=rows < T)
                total += tl.load(weights + (T + row_at) * H + h) * products
        for h in range(H):
            key = tl.load(k + h * D + key_offs)
            scores = scale * tl.dot(tl.load(q + h * D + offs), key, input_precision="ieee")
            scores = tl.where(seen, scores, float("-inf"))
            p = tl.exp(scores - tl.max(scores, 1, keep_dims=True))
            p /= tl.sum(p, 1, keep_dims=True)
            w1 = tl.load(weights + row_at * H + h)
            if BACKWARD:
                dw1 = tl.sum(p * total, 1, keep_dims=True)
                tl.store(dweights + row_at * H + h, dw1, mask=rows < T)
                ds = (w1 * p * (total - dw1)).to(key.dtype)
                tl.store(dscores + places, ds, mask=seen)
                dscores += T * WINDOW
                dquery = scale * tl.dot(ds, tl.trans(key), input_precision="ieee")
                tl.store(out + h * D + offs, dquery, mask=rows < T)
            else:
                total += w1 * p
        if not BACKWARD:
            tl.store(mixed + places, total, mask=seen)
            for h in range(H):
                value = tl.load(v + h * D + key_offs)
                weighted = tl.load(weights + (T + row_at) * H + h) * total
                added = tl.dot(weighted.to(value.dtype), tl.trans(value), input_precision="ieee")
                tl.store(out + h * D + offs, tl.load(x + h * D + offs) + added, mask=rows < T)

    @triton.jit
    def compose_heads_key_grad_kernel(
        dy,
        q,
        weights,
        docs,
        mixed,
        dscores,
        dk,
        dv,
        T,
        H,
        scale,
        WINDOW,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        QUERIES: tl.constexpr,
    ):
        """Sums the gradients of BLOCK keys and values of a head over the queries that see them, in order."""
        first, h, d = tl.program_id(0) * BLOCK, tl.program_id(1), tl.arange(0, D)
        keys, dscores = first + tl.arange(0, BLOCK)[:, None], dscores + h * T * WINDOW
        dkey, dvalue = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK, D), tl.float32)
        for start in range(first, min(T, first + BLOCK + WINDOW - 1), QUERIES):
            rows = start + tl.arange(0, QUERIES)[None, :]
            seen, places, row_at, _ = near_pairs(docs, rows, keys, T, WINDOW)
            offs = (row_at * H + h) * D + d[:, None]
            query, dout = tl.trans(tl.load(q + offs)), tl.trans(tl.load(dy + offs))
            ds = tl.load(dscores + places, mask=seen, other=0.0)
            dkey = tl.dot(ds, query, dkey, input_precision="ieee")
            total = tl.load(weights + (T + row_at) * H + h) * tl.load(mixed + places, mask=seen, other=0.0)
            dvalue = tl.dot(total.to(dout.dtype), dout, dvalue, input_precision="ieee")
        offs = (keys * H + h) * D + d
        tl.store(dk + offs, scale * dkey, mask=keys < T)
        tl.store(dv + offs, dvalue, mask=keys < T)


# Tiles, warps and pipeline stages. Matmuls are sized by a block's shared memory: 99 KiB on consumer
# GPUs, 163 on the A100, 227 on H100 and B200. Not tuned on a GPU yet.
GRAM_TILES = {size: dict(BLOCK=size, BLOCK_K=64, num_warps=size // 16, num_stages=3) for size in (64, 128)}
RELU_SQUARE_TILES = {
    "small": dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, GROUP=8, num_warps=8, num_stages=4),
    "large": dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=3),
    # 128 columns: with 256 the compiler spills registers.
    "large backward": dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=4),
    "large fp8": dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, GROUP=8, num_warps=8, num_stages=3),
}
LOSS_TILES, SEGMENT_SUM_TILES = dict(BLOCK=4096, num_warps=8), dict(BLOCK=256, UNROLL=8, num_warps=2)
# 16 queries and a window of 112 make 127 keys, close to a power of two.
COMPOSE_TILES = dict(BLOCK=16, num_warps=8, num_stages=2)
COMPOSE_GRAD_TILES = dict(BLOCK=64, QUERIES=32, num_warps=8)


def triton_gram(x: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    n, M, K = x.shape
    out, half = x.new_empty(n, M, M), n * math.ceil(M / 128) ** 2 // 2
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else math.inf
    size = 128 if half >= sms else 64
    blocks = triton.cdiv(M, size)
    addend = out if add is None else add.contiguous()
    options = {"ADD": add is not None, **GRAM_TILES[size]}
    gram_kernel[(blocks, blocks, n)](x, addend, out, M, K, *x.stride(), beta, alpha, **options)
    return out


def launch_relu_square(
    a: Tensor, b: Tensor, dtype: torch.dtype, kind: str, square: Tensor | None = None, *scales: Tensor
) -> Tensor:
    (M, K), N = a.shape, b.size(0)
    out = a.new_empty(M, N, dtype=dtype)
    large = a.is_cuda and torch.cuda.get_device_capability(a.device)[0] in (9, 10)
    tiles = RELU_SQUARE_TILES[f"large{kind}" if large else "small"]
    blocks = triton.cdiv(M, tiles["BLOCK_M"]) * triton.cdiv(N, tiles["BLOCK_N"])
    tensors, strides = (a, b, out if square is None else square, out), (*a.stride(), *b.stride())
    options = {"BACKWARD": kind == " backward", "FP8_MAX": int(E4M3_MAX) if scales else 0, **tiles}
    relu_square_kernel[(blocks,)](*tensors, *(scales or [out] * 4), M, N, K, *strides, **options)
    return out


def triton_relu_square(a: Tensor, b: Tensor, square: Tensor | None = None) -> Tensor:
    """Computes relu_square(h, fc), or, given its result, relu_square_grad(dy, proj, square)."""
    return launch_relu_square(a, b, a.dtype, "" if square is None else " backward", square)


def triton_relu_square_fp8(
    h8: Tensor, h_amax: Tensor, weights: FP8MLP, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    square8 = h8.new_empty(len(h8), len(weights.fc))
    scales = h_amax, weights.fc_scale, weights.act_scale, weights.act_amax
    return launch_relu_square(h8, weights.fc, dtype, " fp8", square8, *scales), square8


def triton_softcap_loss(
    logits: Tensor, targets: Tensor, weights: tuple[float, ...], scale_inv: float = 0.0
) -> tuple[Tensor, Tensor]:
    n, V = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    grad = torch.empty_like(
        logits, dtype=torch.float8_e5m2 if scale_inv else None, memory_format=torch.contiguous_format
    )
    tensors, sizes = (logits, targets, weights, losses, grad), (V, logits.stride(0))
    dz_scale = SOFTCAP_SCALE / SOFTCAP_SPAN / (scale_inv or 1.0)
    constants = (SOFTCAP_SCALE, SOFTCAP_SHIFT, 1 / SOFTCAP_SPAN, torch.finfo(grad.dtype).max, dz_scale)
    softcap_loss_kernel[(n,)](*tensors, *sizes, *constants, **LOSS_TILES)
    return losses, grad


def triton_segment_sum_rows(out: Tensor, grad: Tensor, index: RowIndex, signs: Tensor | None = None) -> None:
    if not len(index.row_ids):
        return
    out, grad = out.view(out.size(0), -1), grad.flatten(1)
    grid = (len(index.row_ids), triton.cdiv(out.size(1), SEGMENT_SUM_TILES["BLOCK"]))
    first_touch, signed = index.first_touch.view(torch.uint8), index.signs is not None
    tensors = (out, grad, index.row_ids, index.perm, index.offsets, first_touch)
    operands = (signs, index.signs) if signed else (out, out)
    strides = (out.size(1), grad.stride(0))
    segment_sum_rows_kernel[grid](*tensors, *operands, *strides, SIGNED=signed, **SEGMENT_SUM_TILES)


class ComposeHeads(torch.autograd.Function):
    """Does compose_heads, with both weights (2, T, H) fp32, and the positions' documents (T,) int64.

    From the forward it keeps the mixed probabilities, (T, window) fp32, which the gradients of queries and
    values need. A block of queries has all its keys, so it repeats their softmax. The scores' gradients, (H,
    T, window), rounded for the products, go to the kernel that sums over queries. No sum is atomic, so that
    results do not depend on timing. Offsets are int32: tensors have less than 2^31 numbers. A window of more
    than 497, so more than 512 keys, takes more shared memory than an H100 has at D = 128.
    """

    @staticmethod
    def forward(ctx, y, q, k, v, weights, docs, window, scale):
        T, H, D = q.shape
        y, *kvq = (t.contiguous() for t in (y, k, v, q))
        tensors, out = (*kvq, weights, docs, weights.new_empty(T, window)), torch.empty_like(y)
        ctx.save_for_backward(*tensors)
        ctx.sizes, ctx.grid = (T, H, scale, window, D), (triton.cdiv(T, COMPOSE_TILES["BLOCK"]),)
        tensors = (y, *tensors, out, out, out)
        compose_heads_kernel[ctx.grid](*tensors, *ctx.sizes, BACKWARD=False, **COMPOSE_TILES)
        return out

    @staticmethod
    def backward(ctx, dy):
        dy, tensors, H = dy.contiguous(), ctx.saved_tensors, ctx.sizes[1]
        dk, dv, dq, dweights = map(torch.empty_like, tensors[:4])
        dscores = dq.new_empty(H, *tensors[-1].shape)
        kernel, outs = compose_heads_kernel[ctx.grid], (dq, dweights, dscores)
        kernel(dy, *tensors, *outs, *ctx.sizes, BACKWARD=True, **COMPOSE_TILES)
        kernel = compose_heads_key_grad_kernel[triton.cdiv(len(dy), COMPOSE_GRAD_TILES["BLOCK"]), H]
        kernel(dy, *tensors[2:], dscores, dk, dv, *ctx.sizes, **COMPOSE_GRAD_TILES)
        return dy, dq, dk, dv, dweights, None, None, None


def triton_compose_heads(*arguments) -> Tensor:
    """Does compose_heads, with its arguments."""
    y, q, k, v, w1, w2, cu_seqlens, window, scale = arguments
    T, H, D = q.shape
    weights = torch.stack([w1.expand(T, H), w2.expand(T, H)]).float()
    missing = max(16, triton.next_power_of_2(D)) - D  # of what tl.dot takes
    if missing:
        y, q, k, v = (F.pad(t, (0, missing)) for t in (y, q, k, v))
    docs = document_numbers(cu_seqlens, T)
    return ComposeHeads.apply(y, q, k, v, weights, docs, min(window, T), scale)[..., :D]


class Backend(NamedTuple):
    """A run's implementations of operations of section 6; what compiles the others."""

    attention: Callable = attention
    gram: Callable = gram
    relu_square: Callable = relu_square
    relu_square_grad: Callable = relu_square_grad
    relu_square_fp8: Callable = relu_square_fp8
    softcap_loss: Callable = softcap_loss
    segment_sum_rows: Callable = segment_sum_rows
    compose_heads: Callable = compose_heads
    compiled: Callable = lambda function: function
    scalar: Callable = float  # wraps what changes by step, so that compiled code does not recompile
    fp8: bool = False


TORCH_BACKEND = Backend()

KERNELS: dict[str, dict[str, Callable]] = {  # by the names in Config.kernels
    "gram": {"gram": triton_gram},
    "relu_square": {
        "relu_square": triton_relu_square,
        "relu_square_grad": triton_relu_square,
        "relu_square_fp8": triton_relu_square_fp8,
    },
    "softcap_loss": {"softcap_loss": triton_softcap_loss},
    "segment_sum_rows": {"segment_sum_rows": triton_segment_sum_rows},
    "compose_heads": {"compose_heads": triton_compose_heads},
}


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int, scale: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and sets an environment variable

    options = {"scale": scale, "window_size": (window, 0)}
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)  # type: ignore


def flash_attention_unsupported(name: str, dtype: str, capability: tuple[int, int]) -> str:
    """Returns why torch's FlashAttention cannot run, "" if it can. "fa3" activates version 3."""
    if not capability[0]:
        return "FlashAttention needs a GPU, there is none here"
    if dtype != "bfloat16":
        return f"FlashAttention is for bf16, not {dtype}"
    from torch.nn.attention.varlen import varlen_attn

    if not {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"torch {torch.__version__}'s varlen_attn has no window, torch 2.13's does"
    if name == "fa3" and capability[0] != 9:
        return "FlashAttention-3 needs compute capability 9.0 (H100), this GPU's is {}.{}".format(*capability)
    if name == "fa3":
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as e:
            return f"FlashAttention-3 cannot be used ({first_line(e)}), README.md says how to get it"
    return ""


def select_backend(
    cfg: Config, device: torch.device, capability: tuple[int, int] | None = None, world_size: int = 1
) -> Backend:
    """Returns the implementations that the config names; there are no silent fallbacks.

    Raises UserError with the settings that would run, if one is unsupported here. `capability`: by default
    the device's.
    """
    on_gpu, interpreted = device.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    capability = capability or (torch.cuda.get_device_capability(device) if on_gpu else (0, 0))
    gpu = "this GPU's compute capability is {}.{}".format(*capability)
    if (
        on_gpu
        and capability < (8, 0)
        and (cfg.dtype == "bfloat16" or cfg.kernels or cfg.attention != "dense")
    ):
        raise UserError(
            "bf16, the kernels and FlashAttention need compute capability 8.0 (A100, RTX 30) or newer, "
            f"{gpu}; --preset cpu, which computes in fp32, would run"
        )
    dtype, dtypes = cfg.dtype, {cfg.dtype, cfg.muon_dtype}
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang", os.environ.get("CXX", "g++"), "clang++")
    compiler = any(map(shutil.which, compilers))
    count = num_microbatches(cfg, world_size)
    sizes = {"head_chunk": cfg.head_chunk, "padded_vocab": cfg.padded_vocab, "the model's width": cfg.dim}
    sizes |= {"mlp_dim": cfg.mlp_dim} if cfg.fp8_mlp else {}
    sizes |= {f"a micro-batch of stage {i}": s.batch_tokens // count for i, s in enumerate(cfg.stages)}
    misaligned = [f"{name} is {n}" for name, n in sizes.items() if n % 16]
    chosen = {name: function for kernel in cfg.kernels for name, function in KERNELS[kernel].items()}
    problems = {}  # by the setting that would run
    if cfg.kernels:
        if triton is None:
            problems["kernels="] = "the kernels need the package triton (pip install triton)"
        elif interpreted:
            dtype = "float32"  # the one that would run
            if dtypes != {dtype}:
                reason = "Triton's interpreter is right in fp32 only"
                problems["dtype=float32 --set muon_dtype=float32"] = reason
        elif not on_gpu:
            reason = "the kernels need a GPU (or TRITON_INTERPRET=1, for tests), there is no GPU here"
            problems["kernels="] = reason
        elif dtypes != {"bfloat16"}:
            reason = f"the kernels are for bf16, not dtype={cfg.dtype}, muon_dtype={cfg.muon_dtype}"
            problems["kernels="] = reason
        elif not compiler:
            problems["kernels="] = "Triton needs a C compiler (gcc, clang)"
    if cfg.attention != "dense":
        chosen["attention"] = flash_attention
        if reason := flash_attention_unsupported(cfg.attention, dtype, capability):
            varlen_too = flash_attention_unsupported("varlen", dtype, capability)
            problems["attention=dense" if varlen_too else "attention=varlen"] = reason
    if cfg.fp8:
        if on_gpu and capability < (8, 9):
            problems["fp8=false"] = f"FP8 needs compute capability 8.9 (RTX 40, H100) or newer, {gpu}"
        elif dtype == "float64":
            problems["fp8=false"] = "FP8 is for dtype bfloat16 or float32"
        elif misaligned:
            problems["fp8=false"] = f"FP8 matmuls take multiples of 16, but {' and '.join(misaligned)}"
    if cfg.compile and not compiler:
        problems["compile=false"] = "torch.compile needs a C++ compiler (g++, clang++)"
    if problems:
        preset = "" if on_gpu or cfg.preset == "cpu" else "--preset cpu; or, slowly, this model with "
        settings = " ".join(f"--set {setting}" for setting in problems)
        raise UserError(f"{'; '.join(problems.values())}; this would run: {preset}{settings}")
    if cfg.compile:
        torch._dynamo.config.recompile_limit = 64  # 8 by default, but one function serves all kinds of layers
        torch._inductor.config.size_asserts = False  # in every call; guards and AOTAutograd check sizes
        chosen["compiled"] = cache(partial(torch.compile, fullgraph=True))
        chosen["scalar"] = partial(torch.tensor, dtype=acc_dtype(cfg))
    return Backend(**chosen, fp8=cfg.fp8)


def fp8_matmul(
    a: Tensor, b: Tensor, scale: Tensor, out: Tensor, fast: bool = False, b_scale: Tensor | None = None
) -> Tensor:
    """Writes scale b_scale a b to `out`, for fp8 a (n, k), row-major, b (k, m), column-major.

    The scales are 0-d fp32; b_scale is 1 by default.
    """
    b_scale = constant(1.0, a.device) if b_scale is None else b_scale
    return torch._scaled_mm(a, b, scale, b_scale, out_dtype=out.dtype, use_fast_accum=fast, out=out)


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """Returns a 0-d fp32 tensor, made once: on a GPU each would be a launch."""
    return torch.full((), value, device=device)


def write_grad(
    out: Tensor, a: Tensor, b: Tensor | None, overwrite: bool, scale: Tensor | None = None
) -> None:
    """out = a^T b (a without b); += unless `overwrite`. a (T, rows), b (T, cols). The sum is rounded once.

    fp8 a and b, both column-major: scale a^T b; added through an fp32 temporary.
    """
    if b is None:
        out.copy_(a) if overwrite else out.add_(a)
    elif a.element_size() > 1:
        torch.mm(a.T, b, out=out) if overwrite else out.addmm_(a.T, b)
    elif overwrite:
        fp8_matmul(a.T, b, scale, out)
    else:
        out.add_(fp8_matmul(a.T, b, scale, torch.empty_like(out, dtype=torch.float32)))


Part = Callable[[Tensor], Tensor]  # gives a view of a weight, or of its main_grad


class WeightGrad:
    """Collects one weight's gradient in backward, by TransformerEngine's contract (its PR 2871):

        main_grad   delay    weight has grad_added_to_main_grad   autograd gets
        none        no       -                                    the gradient
        none        yes      -                                    None; `flush` adds it to weight.grad
        a buffer    either   no                                   None
        a buffer    either   yes (it becomes True)                a new tensor, for the weight's hooks

    main_grad has the weight's shape and dtype, and persists. `overwrite` holds from an optimizer step to the
    end of the next backward: every part in use must be given in every backward, once. The caller reports each
    end_backward(). The new tensor is uninitialized, for a hook to drop. A view of main_grad would count
    twice: autograd adds it.
    """

    def __init__(self, weight: Tensor | None = None, main_grad: Tensor | None = None):
        self.weight, self.main_grad = weight, main_grad
        self.overwrite, self.delay, self.delayed = True, False, []

    def accumulate(
        self,
        part: Part,
        a: Tensor,
        b: Tensor | None = None,
        scale: Tensor | None = None,
        first: bool = True,
    ) -> Tensor | None:
        """Takes the gradient of a part of the weight, as factors for `write_grad`.

        part(t) is a view of t, which has the weight's shape. first=False: this backward has given the part
        before. Returns what autograd gets.
        """
        if self.delay:
            self.delayed.append((part, a, b, self.overwrite and first, scale))
        elif self.main_grad is None:
            return a if b is None else a.T @ b
        else:
            write_grad(part(self.main_grad), a, b, self.overwrite and first, scale)
        return self.for_autograd(part)

    def accumulate_scaled(
        self,
        part: Part,
        dots: Tensor,
        product: Tensor,
        scales: Tensor,
        row: int,
        w: Tensor,
        backend: Backend,
    ) -> Tensor | None:
        """Takes scales[row] * product, the gradient of a part w of the weight, as scaled_grad does."""
        in_place = self.main_grad is not None and not self.delay
        out = part(self.main_grad) if in_place else torch.empty_like(product)
        overwrite = self.overwrite or not in_place
        backend.compiled(scaled_grad)(out, dots, product, scales, row, w, overwrite)
        return self.for_autograd(part) if in_place else self.accumulate(part, out)

    def for_autograd(self, part: Part) -> Tensor | None:
        """Returns an uninitialized gradient of a part if the weight's hooks wait for one."""
        if self.main_grad is None or not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        return torch.empty_like(part(self.main_grad))

    def end_backward(self) -> None:
        self.overwrite = False

    @torch.no_grad()
    def flush(self) -> None:
        """Computes what was delayed."""
        out = self.main_grad
        if self.delayed and out is None:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            out = self.weight.grad
        for part, a, b, overwrite, scale in self.delayed:
            write_grad(part(out), a, b, overwrite and out is self.main_grad, scale)
        self.delayed.clear()


NO_MAIN_GRAD = WeightGrad()

# The head's FP8 scales (records 19, 51), fixed, so that no step searches for a maximum: e4m3's largest number
# stands for x = 100 and w = 1.6. Gradients are e5m2, for its range, in units of FP8_GRAD times their scale.
FP8_X, FP8_W, FP8_GRAD = 100 / E4M3_MAX, 1.6 / E4M3_MAX, 0.75 / E4M3_MAX


def whole(bank: Tensor) -> Tensor:
    return bank


class WeightSlice(NamedTuple):
    """Weights of matmuls: a part of a bank, or all of a parameter."""

    w: Tensor  # (rows, cols); or (n, rows, cols), one a layer
    part: Part = whole  # gives this view of the bank, and of its main_grad
    grad: WeightGrad = NO_MAIN_GRAD


class ScaledWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scales, backend, slices, qk, v, out):
        ctx.backend, ctx.slices, ctx.dtype = backend, slices, scales.dtype
        ctx.save_for_backward(scales := scales.to(qk.dtype), qk, v, out)
        first, last = scales[:, :, None, None]
        return first * torch.cat([qk, v], dim=1), last * out

    @staticmethod
    def backward(ctx, dqkv, dout):
        scales, *weights = ctx.saved_tensors
        dqkv, dout, (n, d, _) = dqkv.contiguous(), dout.contiguous(), dout.shape
        dots, grads = dout.new_empty(n, 4 * d, dtype=ctx.dtype), []
        products = dqkv[:, : 2 * d], dqkv[:, 2 * d :], dout
        dot_parts = dots.split((2 * d, d, d), dim=1)
        for weight, out, product, row, w in zip(ctx.slices, dot_parts, products, (0, 0, 1), weights):
            factors = out, product, scales, row, w
            grads.append(weight.grad.accumulate_scaled(weight.part, *factors, ctx.backend))
        dscales = torch.stack([dots[:, : 3 * d].sum(1), dots[:, 3 * d :].sum(1)])
        return dscales, None, None, *grads


def scaled_weights(
    scales: Tensor, qk: WeightSlice, v: WeightSlice, out: WeightSlice, backend: Backend = TORCH_BACKEND
) -> tuple[Tensor, Tensor]:
    """Returns scales[0] * qk and v, stacked by rows, (n, 3d, d); and scales[1] * out, (n, d, d).

    scales (2, n), at least fp32, as are their gradients' sums, rounded to the weights' dtype; with main_grad
    they must require a gradient. qk (n, 2d, d); v, out (n, d, d).
    """
    return ScaledWeights.apply(scales, backend, (qk, v, out), qk.w, v.w, out.w)


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, slices, backend, weights, fc, proj):
        ctx.slices, ctx.backend = slices, backend
        if weights is None:
            square = backend.relu_square(h, fc)
            out = square @ proj
        else:
            square, square8 = backend.relu_square_fp8(*backend.compiled(amax_to_fp8)(h), weights, h.dtype)
            factors = square8, weights.proj.T, weights.act_scale, torch.empty_like(h)
            out = fp8_matmul(*factors, fast=True, b_scale=weights.proj_scale)
        ctx.save_for_backward(h, square, fc, proj)
        return out

    @staticmethod
    def backward(ctx, dy):
        h, square, fc, proj = ctx.saved_tensors
        to_fc, to_proj = ctx.slices
        da = ctx.backend.relu_square_grad(dy, proj, square)
        dproj = to_proj.grad.accumulate(to_proj.part, square, dy)
        return da @ fc, None, None, None, to_fc.grad.accumulate(to_fc.part, da, h), dproj


def mlp(
    h: Tensor,
    fc: WeightSlice,
    proj: WeightSlice,
    backend: Backend = TORCH_BACKEND,
    weights: FP8MLP | None = None,
) -> Tensor:
    """Returns relu(h fc^T)^2 proj, for h (T, d), fc and proj both (F, d).

    With `weights`, the same in FP8, the forward is FP8's; the gradients are those of the products without.
    """
    return MLP.apply(h, (fc, proj), backend, weights, fc.w, proj.w)


class InjectGrad(torch.autograd.Function):
    """Returns a zero whose backward gives autograd a weight's gradient, popped from a list.

    Popping it makes autograd its only owner, which saves a copy.
    """

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, one):
        return ctx.gradient.pop(), None


# ============================================================================================================
# 8  Model. Rotary tables; what mixes and gates the streams; the head with its loss and gradient; logits.
# ============================================================================================================

YARN_ALPHA, YARN_BETA = 1, 32  # full turns in a window: slower frequencies stretch with it, faster ones stay


class Rotary:
    """Tables of cos and sin for `rows` positions, and the softmax scale, which change with the stage (YaRN).

    Rotary embedding: Su et al. 2021, arXiv:2104.09864. Half of each head is not rotated, to match content at
    any distance (record 17), so a row holds head_dim / 4 angles. Plain heads use rows t, paired heads rows 2t
    and 2t + 1. YaRN keeps what was learnt in short windows right in longer ones (PR 122; Peng et al. 2023,
    arXiv:2309.00071).
    """

    def __init__(self, cfg: Config, rows: int, device: torch.device):
        self.cfg, self.rows, self.stage = cfg, rows, -1
        steps = torch.linspace(0, 1, cfg.head_dim // 4, dtype=acc_dtype(cfg), device=device)
        self.base_freq = (1 / 1024) ** steps
        self.use_stage(0)

    def use_stage(self, stage: int) -> None:
        """Computes a stage's tables and scale, adapted to the longest window of each stage before it."""
        if stage == self.stage:
            return
        self.stage, self.scale, freq = stage, self.cfg.attn_scale, self.base_freq
        window, *later = (*self.cfg.past_windows, *longest_windows(self.cfg, stage + 1))
        for new in later:
            turns, ratio = window * freq / (2 * math.pi), window / new
            keep = ((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA)).clamp(0, 1)
            freq = freq * (ratio + keep * (1 - ratio))
            self.scale *= 0.2 * math.log(new / window) + 1
            window = new
        angles = torch.arange(self.rows, dtype=freq.dtype, device=freq.device)[:, None] * freq
        self.cos, self.sin = (t.to(dtype_of(self.cfg.dtype)) for t in (angles.cos(), angles.sin()))


# The code between kernels: pure functions, each compiled by itself. They differ only by a layer's kind, so
# all layers together take few compilations. MLPs, FlashAttention and kernels are called uncompiled.


def smear_embeddings(embed: Tensor, smear: Tensor, smear_gate: Tensor) -> Tensor:
    """Returns x0, the normed rows of `embed` (T, d), each with a gated share of the one before.

    It costs next to nothing; attention would spend a head (PR 130).
    """
    gate = smear * torch.sigmoid(F.linear(embed[1:, :GATE_DIM], smear_gate))
    return norm(torch.cat([embed[:1], embed[1:] + gate * embed[:-1]]))


def token_weights(
    u: Tensor, w1: Tensor | None, w2: Tensor | None, b2: Tensor, scale: Tensor | None, count: int
) -> Tensor:
    """Returns the first outputs (count, T) of a small MLP of every row of u (T, d), times `scale`.

    None: MUDD_SCALE. w1 (hidden, d), w2 (k, hidden), b2 (k,); without w1 and w2 the outputs are constants,
    (count, 1). An output's numbers lie together: compiled code copies inputs that are not aligned to 16
    bytes. MUDD: Xiao et al. 2025, arXiv:2502.12170, trimmed in record 81; gates by it in record 85.
    """
    out = b2[:count, None]
    if w1 is not None and w2 is not None:
        out = torch.addmm(out, w2[:count], F.gelu(F.linear(u, w1)).T)
    return (MUDD_SCALE if scale is None else scale) * out


def mix_streams(
    scales: Sequence[Tensor | None], streams: Sequence[Tensor], normed: bool
) -> tuple[Tensor, Tensor | None]:
    """Sums scales times streams (T, d), left to right. Returns the sum and, if `normed`, its norm.

    A scale is learned, 0-d, or one for each token, (T, 1) or (1, 1), or None: 1. With scales of the stream,
    a layer's output, x0 and the bigrams, each layer can lean on the input again (record 9).
    """
    scaled = [x if scale is None else scale * x for scale, x in zip(scales, streams)]
    total = sum(scaled[1:], scaled[0])
    return total, norm(total) if normed else None


def mix_streams_grad(
    scales: Sequence[Tensor | None],
    streams: Sequence[Tensor],
    sums: Sequence[Tensor | None],
    total: Tensor,
    d_total: Tensor,
    d_normed: Tensor | None,
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Returns the gradients of mix_streams' scales and streams, a stream's added to its `sums`, if given."""
    if d_normed is not None:
        x, dh = upcast(total), upcast(d_normed)
        root = (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        x = x * root
        d_total = d_total + (root * (dh - x * (x * dh).mean(-1, keepdim=True))).to(d_total.dtype)
    dscales = [
        None if scale is None else (d_total * x).sum_to_size(scale.shape) for scale, x in zip(scales, streams)
    ]
    dstreams = [d_total if scale is None else scale * d_total for scale in scales]
    return dscales, [dx if so_far is None else so_far.add_(dx) for so_far, dx in zip(sums, dstreams)]


class Mix(torch.autograd.Function):
    """Computes mix_streams. Adds the gradients of shared streams up in place: autograd's sums, of pairs,
    would be a launch each, and as much memory traffic again.
    """

    @staticmethod
    def forward(ctx, compiled, normed, sums, *factors):
        ctx.compiled, ctx.sums, n = compiled, sums, len(sums)
        total, h = compiled(mix_streams)(factors[:n], factors[n:], normed)
        ctx.save_for_backward(total, *factors)
        return total, h

    @staticmethod
    def backward(ctx, d_total, d_normed):
        (total, *factors), n = ctx.saved_tensors, len(ctx.sums)
        so_far = [held[0] if held else None for held in ctx.sums]
        factors = factors[:n], factors[n:]
        dscales, dstreams = ctx.compiled(mix_streams_grad)(*factors, so_far, total, d_total, d_normed)
        for i, held in enumerate(ctx.sums):
            if held is not None:
                held[:], dstreams[i] = [dstreams[i]], None
        return None, None, None, *dscales, *dstreams


class Share(torch.autograd.Function):
    """Returns x, a stream that many Mixes share; its gradient is what they have added up in `held`."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        total = ctx.held.pop()
        return total if dx is None else total.add_(dx), None


def connect(x: Tensor, first: Tensor, back: Tensor, value: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what is added to the values, and the stream, of the layer with connections (record 81).

    x, first, back: streams (T, d); value (T, d), of value_embeds; weights (T, 8) in the order of MUDD_BIASES.
    """
    w = weights.split(1, dim=1)
    halves = weights[:, 6:8, None] * value.view(len(value), 2, -1)
    values = halves.flatten(1) + (w[0] * first + w[1] * back + w[2] * x)
    return values, (1 + w[5]) * x + w[3] * first + w[4] * back


def final_norm(x: Tensor, weights: Tensor, streams: list[Tensor]) -> Tensor:
    """Returns the head's input: the norm of x and `streams`, these times weights (T, len(streams))."""
    for weight, stream in zip(weights.split(1, dim=1), streams):
        x = x + weight * stream
    return norm(x)


def qkv_to_heads(
    h: Tensor,
    weight: Tensor,
    value: Tensor | None,
    ve_gate: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    paired: bool,
    key_shift: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes q, k, v of a layer's input h (T, d) and weight (3d, d).

    Returns them (T, H, D), for paired heads (2T, H/2, D). cos, sin (2T, D/4). `value` (T, d) is added to v,
    each head times its gate by ve_gate, if that is given.
    """
    T, d = h.shape
    D = d // heads
    q, k, v = F.linear(h, weight).view(T, 3, heads, D).unbind(1)
    # Bounds scores at high learning rates (record 5; Henry et al. 2020, arXiv:2010.04245).
    q, k = norm(q), norm(k)
    if value is not None:
        # Value embeddings: another embedding of the token, added to the values, which the early layers'
        # mixing need not carry (records 14, 17; value residuals: Zhou et al. 2024, arXiv:2410.17897), gated
        # by few channels (PR 186).
        added, half = value.view(T, heads, D), GATE_DIM // 2
        if ve_gate is not None:
            gate_input = torch.cat([h[:, :half], value[:, :half]], dim=-1)
            added = 2 * torch.sigmoid(F.linear(gate_input, ve_gate))[:, :, None] * added
        v = v + added
    if paired:
        # Paired heads: two heads share one stream of twice the length, so each query sees both heads' keys
        # and values, more to attend to for the same matmuls (PR 191). Memory (T, H, D) is read as 2T rows of
        # H/2 heads: head h rotates as time 2t + h mod 2, and is attended as row 2t + h // (H/2); the window
        # counts rows.
        cos, sin = (t.view(T, 1, 2, D // 4) for t in (cos, sin))
        q, k = (rotate(t.view(T, heads // 2, 2, D), cos, sin).view(2 * T, heads // 2, D) for t in (q, k))
        return q, k, v.reshape(2 * T, heads // 2, D)
    q, k = (rotate(t, cos[:T, None], sin[:T, None]) for t in (q, k))
    return q, shift_keys(k) if key_shift else k, v


def finish_heads(y: Tensor, v: Tensor, xsa: Tensor | None, gate: Tensor | None) -> Tensor:
    """Takes part of what lies along its own token's value v off each head's output y; multiplies by a gate.

    y, v (T, H, D); xsa and gate (T, H), or (1, H). A part of tanh(xsa): exclusive self-attention (record 82):
    the residual stream has the token's own content anyway. A head with nothing to say can shut by its gate,
    instead of attending to a first token as a sink (PR 117).
    """
    if xsa is not None:
        y32, v32 = upcast(y), upcast(v)
        along = (y32 * v32).sum(-1, keepdim=True) / v32.square().sum(-1, keepdim=True).clamp_min(1e-8)
        y = (y32 - xsa.tanh()[:, :, None] * along * v32).to(y.dtype)
    return y if gate is None else y * gate[:, :, None]


class GPT(nn.Module):
    """The language model. Parameters have the shapes of `param_shapes` and are drawn from `seed`."""

    def __init__(
        self,
        cfg: Config,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 0,
        backend: Backend = TORCH_BACKEND,
    ):
        super().__init__()
        self.cfg, self.backend, self.device = cfg, backend, torch.device(device)
        self.in_flight = {}  # by name, what the optimizer or train_step sets: to wait for before use
        self.ngrams: typing.Any = None  # an NgramTable or NgramFile: where rows of n-grams come from
        shapes = param_shapes(cfg, world_size)
        for spec in used_params(cfg):
            dtype = dtype_of(cfg.dtype) if spec.dtype == "model" else acc_dtype(cfg)
            self.register_parameter(
                spec.name, nn.Parameter(torch.zeros(shapes[spec.name], dtype=dtype, device=device))
            )
        count = num_microbatches(cfg, world_size)
        length = max([cfg.val_slice_tokens] + [stage.batch_tokens // count for stage in cfg.stages])
        self.rotary = Rotary(cfg, 2 * length, self.device)  # paired heads have two rows a token
        self.gate_table = gate_table(cfg)
        gate_biases = [
            [gate.bias for gate in gates for _ in range(gate.columns)] for gates in self.gate_table
        ]
        self.biases = {"mudd": MUDD_BIASES, "mudd_gate": gate_biases}
        # Rows of bigrams and n-grams that share a row of the table are multiplied by different random signs:
        # each sees the others' shares as noise of mean zero (record 83).
        shape = cfg.sign_rows, cfg.ngrams.width if cfg.ngrams.orders else cfg.dim
        self.signs: Tensor
        self.register_buffer("signs", torch.zeros(shape, dtype=dtype_of(cfg.dtype), device=device))
        # Of the MLPs in FP8: maxima of this step's activations, their scales, scales of proj.
        self.act_amax, self.act_scale, self.proj_scale = torch.ones(3, len(cfg.layers), device=device)
        # prefix_table(); until it is built no token has a prefix.
        self.prefixes = torch.full((cfg.padded_vocab,), -1, device=device)
        self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws on the CPU, without padding: the values depend on neither device nor world size."""
        generator, cfg, L = torch.Generator().manual_seed(seed), self.cfg, len(self.cfg.layers)
        shapes = param_shapes(cfg, 1)

        def uniform(*shape: int) -> Tensor:
            bound = math.sqrt(3) * 0.5 * cfg.dim**-0.5
            return (torch.rand(*shape, generator=generator) * 2 - 1) * bound

        # Draws one unused layer, so that old seeds still give the same weights.
        mlp_bank = uniform(L + 1, *shapes["mlp_bank"][1:])[:L]
        mlp_bank[:, 1] = 0
        lm_head = 0.005 * torch.randn(shapes["lm_head"], generator=generator)
        values = {
            "qk_bank": uniform(*shapes["qk_bank"]),
            "vo_bank": uniform(*shapes["vo_bank"]),
            "mlp_bank": mlp_bank,
            "lm_head": lm_head,
            "embed": lm_head.T,
            "value_embeds": 0.01 * torch.randn(shapes["value_embeds"], generator=generator),
            "signs": torch.randint(2, self.signs.shape, generator=generator) * 2 - 1,
            "mudd_gate_scale": torch.tensor([0.1]),
            "post_lambdas": torch.ones(L, 2),
            "resid_lambdas": torch.full((L, 2), math.sqrt(1.1)),
            # Factors of each layer's QKV and output weight; the smear's, and the skip's before a sigmoid.
            "scalars": torch.tensor([0.5, 1.0] * L + [0.0, -1.5]),
        }
        for name, biases in self.biases.items():
            if f"{name}_w1" in shapes:  # to 1 / sqrt(dim), as Kaiming
                values[f"{name}_w1"] = uniform(*shapes[f"{name}_w1"]) * (2 / math.sqrt(3))
            rows = [*map(torch.tensor, biases)]
            values[f"{name}_b2"] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for name, value in values.items():
            getattr(self, name)[: value.size(0)].copy_(value)

    def weight(self, name: str) -> Tensor:
        """Returns a parameter, after its gather."""
        if name in self.in_flight:
            with torch.no_grad():
                self.in_flight.pop(name).wait()
        return getattr(self, name)

    def mlp_weights(self, grads: dict[str, WeightGrad]) -> list[WeightSlice]:
        """Returns the layers' fc and proj matrices (F, d), in turn."""
        # One unbind: autograd then assembles the bank's gradient once. Of slices it would sum whole banks.
        matrices = self.weight("mlp_bank").flatten(0, 1).unbind()
        parts = (lambda bank, i=i: bank[i // 2, i % 2] for i in range(len(matrices)))
        grad = grads.get("mlp_bank", NO_MAIN_GRAD)
        return [WeightSlice(w, part, grad) for w, part in zip(matrices, parts)]

    def attention_weights(
        self, scales: Sequence[Tensor], grads: dict[str, WeightGrad]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns the scaled weights, QKV (3d, d) and output (d, d), of the layers with attention."""

        def bank_slice(name: str, part: Part) -> WeightSlice:
            return WeightSlice(part(self.weight(name)), part, grads.get(name, NO_MAIN_GRAD))

        cfg, d = self.cfg, self.cfg.dim
        layers = [i for i, layer in enumerate(cfg.layers) if layer.attention]
        n = len(layers)  # banks can be longer, by padding
        qk = bank_slice("qk_bank", lambda bank: bank[: n * cfg.heads].view(n, 2 * d, d))
        v = bank_slice("vo_bank", lambda bank: bank[: 2 * n : 2])
        out = bank_slice("vo_bank", lambda bank: bank[1 : 2 * n : 2])
        scale_rows = torch.stack([scales[2 * i + k] for k in range(2) for i in layers])
        weights = scaled_weights(scale_rows.view(2, n), qk, v, out, self.backend)
        return dict(zip(layers, zip(*(w.unbind() for w in weights))))

    @section("forward")
    def hidden_states(
        self,
        batch: MicroBatch,
        windows: dict[str, int],
        grads: dict[str, WeightGrad] | None = None,
        leaves: dict[str, Tensor] | None = None,
        fp8_mlps: Callable[[], list[FP8MLP]] | None = None,
    ) -> Tensor:
        """Runs all layers on a micro-batch on this device. Returns the head's input (T, d).

        windows: tokens, by name. The backward gives the banks' gradients to `grads`, or to autograd where it
        has no entry. With `leaves`, the tables' gradients stay on the looked-up rows, put there by name.
        Without `grads`, outside training, rows of n-grams are fetched first. With `fp8_mlps`, which gives
        GPT.fp8_mlps' result, MLPs are in FP8.
        """
        # Each where it is first used: the tables' gathers end one after the other.
        bigram = self.lookup_sums(batch, leaves, grads is not None)
        grads, embed = grads or {}, self.lookup("embed", batch, leaves)
        sequences = {
            "plain": (batch.cu_seqlens, batch.max_doc_len),
            "paired": (2 * batch.cu_seqlens, 2 * batch.max_doc_len),  # two rows a token
        }
        cfg, L, compiled = self.cfg, len(self.cfg.layers), self.backend.compiled
        *attn_scales, smear, skip = self.weight("scalars").unbind()
        # Backwards: code that is compiled for numbers which happen to be aligned to 16 bytes would copy all
        # others, and the first that it sees then are not.
        post, resid = (
            self.weight(f"{name}_lambdas").to(embed.dtype).flatten().flip(0).unbind()[::-1]
            for name in ("post", "resid")
        )
        ve_gates = self.weight("ve_gate_bank").unbind()
        x0 = compiled(smear_embeddings)(embed, smear, self.weight("smear_gate"))
        # Mix sums the gradients of these two in lists, from which Share takes them.
        held = [], []
        x0, bigram = (Share.apply(stream, sums) for stream, sums in zip((x0, bigram), held))
        shared = {id(x0): held[0], id(bigram): held[1]}

        def mix(scales: list, streams: list[Tensor], normed: bool = True) -> tuple[Tensor, Tensor]:
            sums = [shared.get(id(stream)) for stream in streams]
            return Mix.apply(compiled, normed, sums, *scales, *streams)

        mudd, mudd_gate = self.token_mlps("mudd"), self.token_mlps("mudd_gate")
        gates = self.split_gates(0, mudd_gate[0](x0))
        x, h = mix([None, gates["bigram", 0]], [x0, bigram])
        weights = self.attention_weights(attn_scales, grads)
        values, mlps, saved = None, None, {"first": x}
        for i, layer in enumerate(cfg.layers):
            if layer.adds:  # as in a U-net, a late layer gets an early one's view back (record 11)
                x, h = mix([None, torch.sigmoid(skip) * gates["skip", i]], [x, saved[layer.adds]])
            mlp_scales = [resid[2 * i + 1], post[2 * i + 1]]
            if layer.attention:
                qkv, out = weights[i]
                value, ve_gate = None, None
                if layer.value is not None:
                    values = values or self.lookup("value_embeds", batch, leaves).unbind(1)
                    value, ve_gate = values[layer.value], ve_gates[layer.value]
                if layer.connections:
                    saved["connected"] = x
                    before, *columns = (rows.T for rows in mudd[0](x).split([8, 1, 1, 1, 1, 1, 1]))
                    value, x = compiled(connect)(x, saved["first"], saved["back"], value, before)
                    scales, mlp_scales, inputs = columns[:4], columns[4:], [saved["first"], bigram]
                    ve_gate = None
                else:
                    scales, inputs = [resid[2 * i], post[2 * i], gates["x0", i]], [x0]
                    if i > 0:  # layer 0's share of the bigram is in x already
                        scales.append(gates["bigram", i])
                        inputs.append(bigram)
                h = h if layer.reads == "stream" else saved["normed back"]
                seq = (*sequences[layer.attention], windows[layer.window])
                y = self.attention(i, h, qkv, seq, gates, value, ve_gate)
                x, h = mix(scales, [x, F.linear(y.flatten(1), out), *inputs])
            # Here, not above: its gather is one of the last.
            mlps = mlps or self.mlp_weights(grads)
            y = self.mlp(i, h, mlps[2 * i], mlps[2 * i + 1], fp8_mlps()[i] if fp8_mlps else None)
            after = cfg.layers[i + 1] if i + 1 < L else None
            read_next = after and not after.adds and (after.reads == "stream" or not after.attention)
            x, h = mix(mlp_scales, [x, y], bool(layer.saves == "back" or read_next))
            if layer.saves:
                saved[layer.saves] = x
            if layer.saves == "skip":
                gates |= self.split_gates(1, mudd_gate[1](x))
            if layer.saves == "back":
                saved["normed back"] = h
        streams = [saved["first"], saved["back"], saved["connected"], values[0], saved["skip"]]
        return compiled(final_norm)(x, mudd[1](x).T, streams)

    def token_mlps(self, name: str) -> list[Callable[[Tensor], Tensor]]:
        """Returns the two small MLPs "mudd" or "mudd_gate": functions of u (T, d), to outputs (k, T)."""
        scale = self.weight("mudd_gate_scale").to(dtype_of(self.cfg.dtype)) if name == "mudd_gate" else None
        parts = [f"{name}_{part}" for part in ("w1", "w2")]
        # One unbind, as in mlp_weights.
        weights = (self.weight(part).unbind() if hasattr(self, part) else (None, None) for part in parts)
        b2 = self.weight(f"{name}_b2")
        b2 = F.pad(b2, (0, -b2.size(1) % 8))  # each row begins at a multiple of 16 bytes
        rows = zip(*weights, b2.unbind(), self.biases[name])
        run = partial(self.backend.compiled(token_weights), scale=scale)
        return [partial(run, w1=w1, w2=w2, b2=b2, count=len(biases)) for w1, w2, b2, biases in rows]

    def split_gates(self, block: int, outputs: Tensor) -> dict[tuple[str, int], Tensor]:
        """Returns gates (T, columns), by kind and layer, from a gate MLP's outputs (k, T)."""
        table = self.gate_table[block]
        parts = outputs.split([gate.columns for gate in table])
        return {(gate.kind, gate.layer): part.T for gate, part in zip(table, parts)}

    def mlp(self, i: int, h: Tensor, fc: WeightSlice, proj: WeightSlice, weights: FP8MLP | None) -> Tensor:
        """Runs layer i's MLP on h (T, d). A method, so that a subclass can watch or replace one layer's."""
        return mlp(h, fc, proj, self.backend, weights)

    @torch.no_grad()
    def fp8_mlps(self, step: int) -> list[FP8MLP]:
        """Converts the MLPs' weights to FP8, for all forwards of a step.

        A forward's maxima are known after it. All forwards of a step use the maxima over those of the step
        before, on all ranks: the scales do not depend on how micro-batches are spread.
        """
        bank, scale = self.weight("mlp_bank")[: len(self.act_amax)], self.proj_scale
        scale = torch.zeros_like(scale) if step < FP8_EXACT_STEPS else scale
        *weights, self.proj_scale = self.backend.compiled(fp8_mlp_weights)(bank, scale)
        act_scale = self.weight("act_scale")  # from act_amax: before that is reset
        return [FP8MLP(*row) for row in zip(*weights, act_scale, self.act_amax.zero_())]

    def set_act_scale(self, amax: Tensor) -> None:
        """Sets the scales of the next step's activations in FP8 from this one's maxima (L,)."""
        self.act_scale = amax.clamp_min(FP8_LEAST) * (FP8_ACT_ROOM / E4M3_MAX)

    def attention(
        self,
        i: int,
        h: Tensor,
        qkv: Tensor,
        seq: tuple[Tensor, int, int],
        gates: dict[tuple[str, int], Tensor],
        value: Tensor | None,
        ve_gate: Tensor | None,
    ) -> Tensor:
        """Runs layer i's attention on h (T, d), with the weight qkv (3d, d). Returns its heads (T, H, D).

        seq: cu_seqlens, longest document, window; value (T, d); ve_gate (H, GATE_DIM).
        """
        T, layer, heads, compiled = len(h), self.cfg.layers[i], self.cfg.heads, self.backend.compiled
        paired, cos, sin = layer.attention == "paired", self.rotary.cos[: 2 * T], self.rotary.sin[: 2 * T]
        q, k, v = compiled(qkv_to_heads)(h, qkv, value, ve_gate, cos, sin, heads, paired, layer.key_shift)
        y = self.backend.attention(q, k, v, *seq, self.rotary.scale).view(T, heads, -1)
        if layer.dc:
            w1, w2, window = compiled(norm)(gates["dc1", i], DC_EPS), gates["dc2", i], self.cfg.dc_window
            y = self.backend.compose_heads(y, q, k, v, w1, w2, seq[0], window, self.rotary.scale)
        xsa, gate = gates.get(("xsa", i)), gates.get(("output", i))
        return y if xsa is gate is None else compiled(finish_heads)(y, v, xsa, gate)

    def lookup(self, name: str, batch: MicroBatch, leaves: dict[str, Tensor] | None) -> Tensor:
        """Returns a table's rows at a micro-batch's tokens, (T, d), of value_embeds (T, tables, d).

        They are autograd leaves, and added to `leaves`, if that is given. Else autograd builds a dense
        gradient of the table.
        """
        table = self.weight(name)
        found = F.embedding(batch.inputs, (table if leaves is None else table.detach()).flatten(1))
        found = found.unflatten(1, table.shape[1:])
        if leaves is not None:
            leaves[name] = found.requires_grad_()
        return found

    def lookup_sums(self, batch: MicroBatch, leaves: dict[str, Tensor] | None, training: bool) -> Tensor:
        """Returns the rows of bigram_embed, or the sums of n-grams' rows, at a micro-batch's positions.

        An embedding of this token and those before, so that no layer need recognize frequent ones (PR 201).
        Rows are multiplied by their signs; the result is (T, d), padded with zeros. As lookup does, for the
        sums. Outside training, the rows of n-grams are fetched first.
        """
        name, ids = "ngrams" if self.cfg.ngrams.orders else "bigram_embed", batch.ngrams
        if name != "ngrams":
            rows = self.weight(name) if leaves is None else self.weight(name).detach()
        elif training:
            rows = self.ngrams.arrived()
        else:
            row_ids, ids = ids.unique(return_inverse=True)
            rows = self.ngrams.fetch(row_ids)
        found = rows.new_empty(ids.size(1), rows.size(1), dtype=dtype_of(self.cfg.dtype))
        # Without main_grad autograd sums the rows' gradients, which knows plain torch alone.
        gather = gather_rows if rows.requires_grad else self.backend.compiled(gather_rows)
        gather(found, rows, ids.int(), self.signs, batch.signs)
        if leaves is not None:
            leaves[name] = found.requires_grad_()
        missing = self.cfg.dim - rows.size(1)
        return F.pad(found, (0, missing)) if missing else found

    def loss_targets(self, targets: Tensor, plan: StepPlan) -> Tensor:
        """Returns what plan.loss_weights weigh: the targets (T, K) int64 of each position."""
        if len(plan.loss_weights) == 1:
            return targets[:, None]
        prefixes = self.prefixes if plan.prefix else None
        return self.backend.compiled(loss_targets)(targets, len(plan.mtp), prefixes)

    def logits(self, x: Tensor) -> Tensor:
        """Returns the softcapped logits (n, V), in at least fp32, of the head's inputs x (n, d)."""
        return SOFTCAP_SCALE * softcap_sigmoid(x @ self.weight("lm_head"))

    @torch.no_grad()
    def next_token_logits(self, tokens: Sequence[int]) -> Tensor:
        """Returns the logits (vocab_size,) of the token after `tokens`, all of which are computed again."""
        text = np.array([*tokens, 0])  # there is no target yet
        batch = make_micro_batch(text, NO_ROWS, len(tokens), 2, self.cfg).pack().to(self.device)
        x = self.hidden_states(batch, window_tokens(self.cfg, self.cfg.val_windows))
        return self.logits(x[-1:])[0, : self.cfg.vocab_size]

    @torch.no_grad()
    def token_losses(self, batch: MicroBatch, windows: dict[str, int]) -> Tensor:
        """Returns the cross-entropy (T,) of every next token, in at least fp32 from the logits on."""
        x, w, losses = self.hidden_states(batch, windows), self.weight("lm_head"), []
        for x_part, targets in zip(x.split(self.cfg.head_chunk), batch.targets.split(self.cfg.head_chunk)):
            losses.append(self.backend.compiled(next_token_losses)(x_part @ w, targets))
        return torch.cat(losses)

    @section("head")
    def head_loss_and_grad(
        self,
        x: Tensor,
        targets: Tensor,
        weights: tuple[float, ...],
        grad: WeightGrad = NO_MAIN_GRAD,
        grad_scale: float = 1.0,
        converted: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Runs the head's forward and backward at once, `head_chunk` tokens at a time.

        x (T, d); targets (T, K) int64. Memory holds one chunk's logits and their gradient at a time (a
        delayed matmul keeps the gradients). lm_head's gradient goes to `grad`. `grad_scale`, which `weights`
        contain already, sets the unit of FP8 gradients. `converted` keeps lm_head in FP8 for the next call.

        Returns the weighted loss of all targets, summed over tokens, 0-d, at least fp32; and the roots of the
        remaining backward, tensors with their gradients: x, and one for lm_head if autograd gets its
        gradient.
        """
        to_autograd, n = grad.main_grad is None and not grad.delay, self.cfg.head_chunk
        w = self.weight("lm_head")
        with torch.no_grad():
            head_grad = WeightGrad(None, torch.empty_like(w)) if to_autograd else grad
            dx, losses = torch.empty_like(x), []
            if self.backend.fp8:
                converted = [] if converted is None else converted
                chunk = self.fp8_head_chunks(x.detach(), w, weights, grad_scale, converted)
            else:
                chunk = self.head_chunks(x.detach(), w, weights)
            for i in range(0, x.size(0), n):
                part = slice(i, i + n)
                part_losses, *grad_factors = chunk(part, targets[part], dx[part])
                losses.append(part_losses)
                returned = head_grad.accumulate(whole, *grad_factors, first=i == 0)  # type: ignore[misc]
        for_autograd = [head_grad.main_grad if to_autograd else returned]
        backward_roots = [(x, dx)]
        if w.requires_grad and for_autograd[0] is not None:
            backward_roots.append((InjectGrad.apply(w, for_autograd), w.new_ones(())))
        return torch.cat(losses).sum(), backward_roots

    def head_chunks(self, x: Tensor, w: Tensor, weights: tuple[float, ...]) -> Callable:
        """Returns a function of a chunk that writes dx, and returns losses and w's gradient factors."""

        def chunk(part: slice, targets: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            losses, grad = self.backend.softcap_loss(x[part] @ w, targets, weights)
            torch.mm(grad, w.T, out=dx)
            return losses, x[part], grad

        return chunk

    def fp8_head_chunks(
        self, x: Tensor, w: Tensor, weights: tuple[float, ...], grad_scale: float, converted: list[Tensor]
    ) -> Callable:
        """Does the same in FP8 with fixed scales; the function also returns the gradient's scale.

        FP8 matmuls need a column-major second factor: x, w and the gradient are kept in both layouts.
        """

        def transposed(t: Tensor) -> Tensor:
            self.backend.compiled(transpose_copy)(out := t.new_empty(t.size(1), t.size(0)), t)
            return out

        unit = FP8_GRAD * grad_scale
        to_e4m3 = partial(self.backend.compiled(to_fp8), dtype=torch.float8_e4m3fn)
        units = (FP8_X * FP8_W, unit * FP8_W, FP8_X * unit)
        forward_scale, dx_scale, dw_scale = (constant(u, x.device) for u in units)
        x8 = to_e4m3(x, FP8_X)
        xt8 = transposed(x8)
        if not converted:
            converted += [w8 := to_e4m3(w, FP8_W), transposed(w8)]
        w8, wt8 = converted

        def chunk(part: slice, targets: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            logits = x.new_empty(len(dx), w.size(1), dtype=torch.bfloat16)
            fp8_matmul(x8[part], wt8.T, forward_scale, logits, fast=True)
            losses, grad = self.backend.softcap_loss(logits, targets, weights, unit)
            fp8_matmul(grad, w8.T, dx_scale, dx)
            return losses, xt8[:, part].T, transposed(grad).T, dw_scale

        return chunk


# ============================================================================================================
# 9  Exchange. Averages gradients over ranks, whole or by touched rows, and gathers parameters. Asynchronous:
#    a Pending is waited for where its result is first used. Counts the bytes sent.
#
#    How a table row's gradient travels, for example bigram_embed's:
#
#    prefetch thread   index_rows              which rows each micro-batch touches, and at which positions
#                      send_ids                tells every owner which of its rows are touched
#    each backward     accumulate_row_grads    adds the positions' gradients to their rows of main_grad
#    scatter           send_rows               the touched rows of main_grad, as they are
#    work              mean_rows               the owner sums in fp32, in rank order; then Adam; then zeroing
#
#        4 rows; rank 0 owns rows 0 and 1, rank 1 owns rows 2 and 3; g0 and g1 are their main_grads
#
#                           rank 0 touched 0, 3         rank 1 touched 1, 3
#        row ids            3      ------->             <------- 1
#        row gradients      g0[3]  ------->             <------- g1[1]
#        mean               row 0 = g0[0] / 2           row 2 = 0
#                           row 1 = g1[1] / 2           row 3 = (g0[3] + g1[3]) / 2
#
#    These are the bits of the dense exchange with reduction=fp32, at any number of ranks. Section 11 says
#    what is added for the rows of n-grams, of which no rank has them all.
# ============================================================================================================

# torch 2.13 renamed these two and warns of the old names, which are all that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(NamedTuple):
    result: Tensor
    work: dist.Work | None = None
    finish: Callable[[Tensor], Tensor] | None = None  # completes the result after its arrival

    def wait(self) -> Tensor:
        if self.work is not None:
            wait_for(self.work.wait)
        return self.result if self.finish is None else self.finish(self.result)


def rank_order_mean(parts: Tensor) -> Tensor:
    """Returns the mean over the first axis of `parts` (n, ...), summed from 0 in order, in at least fp32."""
    total = torch.zeros_like(parts[0], dtype=torch.promote_types(parts.dtype, torch.float32))
    for part in parts:
        total += part
    return total.div_(len(parts))


def mean_rows(out: Tensor, row_grads: Tensor, plan: RowPlan) -> Tensor:
    """Adds row_grads (sum(recv_counts), ...) to rows of `out`, 0 before; divides by the ranks. Returns `out`.

    They are added in rank order, in `out`'s dtype, at least fp32, to the bits of rank_order_mean. A sender's
    rows are distinct, so no two additions collide.
    """
    counts, row_grads = plan.grads.recv_counts, row_grads.to(out.dtype)
    for rows, part in zip(plan.arriving.split(counts), row_grads.split(counts)):
        out.index_add_(0, rows, part)
    return out.div_(len(counts))


class Exchange:
    """Collectives of one process group; with one rank they do nothing.

    Every rank must make the same calls in the same order, from one thread. sent: bytes this rank has sent, by
    kind and parameter, assuming rings for the backend's reductions and gathers.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device = torch.device("cpu"),
    ):
        self.rank, self.world_size, self.group, self.sent = rank, world_size, group, defaultdict(int)
        self.device = device  # where the group's tensors must be
        self.options: dict = {"group": group, "async_op": True}

    def shard(self, t: Tensor) -> Tensor:
        """Returns this rank's block of t's first axis, a view."""
        return t.chunk(self.world_size)[self.rank]

    @section("exchange {1}")
    def reduce(self, name: str, how: str, grad: Tensor, recv_buffer: Tensor | None = None) -> Pending:
        """Averages `grad` over ranks: all of it (all_reduce), or this rank's block (otherwise).

        The backend sums in grad's dtype, rounding at every hop, and may reuse `grad`. With `recv_buffer`
        (world_size, rows of the result, ...), of grad's dtype, ranks send their gradients as they are, the
        same number of bytes for a block, and the sum is fp32, in rank order. Returns grad's dtype; with
        `recv_buffer` at least fp32.
        """
        if self.world_size == 1:
            return Pending(grad)
        whole, others = how == "all_reduce", self.world_size - 1
        nbytes = grad.nbytes * others // self.world_size
        if recv_buffer is not None:
            collective = _all_gather if whole else dist.all_to_all_single
            kind, nbytes = ("all_gather", grad.nbytes * others) if whole else ("all_to_all", nbytes)
            self.sent[f"{kind} {name}"] += nbytes
            work = collective(recv_buffer.flatten(0, 1), grad, **self.options)
            return Pending(recv_buffer, work, rank_order_mean)
        if whole:
            self.sent[f"all_reduce {name}"] += 2 * nbytes
            return Pending(grad, dist.all_reduce(grad, dist.ReduceOp.AVG, **self.options))
        self.sent[f"reduce_scatter {name}"] += nbytes
        out = torch.empty_like(self.shard(grad))
        return Pending(out, _reduce_scatter(out, grad, op=dist.ReduceOp.AVG, **self.options))

    def send_numbers(
        self, kind: str, name: str, numbers: np.ndarray, send_counts: list[int], recv_counts: list[int]
    ) -> np.ndarray:
        """Sends numbers, by receiver, to all ranks; returns what they send here, by sender. Blocks."""
        t = torch.from_numpy(numbers).to(self.device)
        return self.send_rows(kind, name, t, Transfer(t, send_counts, recv_counts)).wait().cpu().numpy()

    def send_ids(self, kind: str, ids: np.ndarray, send_counts: list[int]) -> tuple[np.ndarray, list[int]]:
        """Sends row ids (n,) int32, by receiver; returns those sent here, by sender, with their counts.

        Blocks. With a single receiver, each rank keeps its own.
        """
        if len(send_counts) == 1:
            return ids, send_counts
        ones = [1] * self.world_size
        recv_counts = self.send_numbers("counts", kind, np.array(send_counts), ones, ones).tolist()
        return self.send_numbers("row ids", kind, ids, send_counts, recv_counts), recv_counts

    @section("rows {2}")
    def send_rows(
        self, kind: str, name: str, rows: Tensor, transfer: Transfer, out: Tensor | None = None
    ) -> Pending:
        """Sends rows (sum(send_counts), ...), by receiver; returns those sent here, by sender, in `out`."""
        if self.world_size == 1:
            return Pending(rows)
        _, send_counts, recv_counts = transfer
        out = rows.new_empty((sum(recv_counts), *rows.shape[1:])) if out is None else out
        self.sent[f"{kind} {name}"] += rows.nbytes - rows.split(send_counts)[self.rank].nbytes
        return Pending(out, dist.all_to_all_single(out, rows, recv_counts, send_counts, **self.options))

    @section("gather {1}")
    def gather(self, name: str, t: Tensor) -> Pending:
        """Fills t, of which each rank has updated its own block, from all ranks."""
        if self.world_size == 1:
            return Pending(t)
        self.sent[f"all_gather {name}"] += t.nbytes * (self.world_size - 1) // self.world_size
        return Pending(t, _all_gather(t, self.shard(t), **self.options))

    def all_reduce(self, t: Tensor, op=dist.ReduceOp.SUM) -> Pending:
        return Pending(t, None if self.world_size == 1 else dist.all_reduce(t, op, **self.options))

    def all_gather_object(self, value) -> list:
        """Returns every rank's small value, in rank order. Blocks: not for the timed loop."""
        values = [value] * self.world_size
        if self.world_size > 1:
            wait_for(dist.all_gather_object, values, value, self.group)
        return values

    def run_on_all_ranks(self, function: Callable, *args):
        """Returns function(*args). If it raises a UserError on any rank, all ranks raise it."""
        result = error = None
        try:
            result = function(*args)
        except UserError as e:
            error = str(e)
        for message in self.all_gather_object(error):
            if message:
                raise UserError(message)
        return result


# ============================================================================================================
# 10  Update rules. In place, on one shard, in at least fp32. A third rule is init, update, and an entry of
#     OPTIMIZERS.
# ============================================================================================================


class UpdateRule(NamedTuple):
    """How an optimizer updates one shard. A bf16 shard needs a mantissa in its state."""

    init: Callable  # (shard, its Param, dtype of moments, index of its first row) -> state
    # (shard, grad, state, its Param, plan, cfg, backend): updates shard and state in place.
    update: Callable
    every_step: bool  # else in steps with plan.do_adam


def adam_init(p: Tensor, spec: Param, dtype: torch.dtype, first: int) -> dict:
    return {
        "steps": 0,
        "exp_avg": torch.zeros_like(p, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(p, dtype=dtype),
    }


@section("update {3.name}")
def adam(
    p: Tensor, grad: Tensor, state: dict, spec: Param, plan: StepPlan, cfg: Config, backend: Backend
) -> None:
    """Updates p by Adam (Kingma, Ba 2015, arXiv:1412.6980), eps added to the uncorrected root.

    Weight decay, lr^2 wd p, acts only where it points the way the update goes (cautious decay: Chen et al.
    2025, arXiv:2510.12402).
    """
    t = state["steps"] = state["steps"] + 1
    (beta1, beta2), lr = spec.betas, learning_rate(cfg.adam_lr, spec, plan)
    step_size = backend.scalar(lr * math.sqrt(1 - beta2**t) / (1 - beta1**t))
    decay = backend.scalar(lr * lr * (cfg.adam_wd * spec.wd_mul))
    # As vectors, so that code compiled for any length serves every parameter.
    tensors = (x.view(-1) for x in (p, state["exp_avg"], state["exp_avg_sq"]))
    numbers = 1 - beta1, beta2, step_size, decay, cfg.adam_eps
    backend.compiled(adam_update)(*tensors, grad.flatten(), *numbers)


def adam_update(
    p: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight1: float,
    beta2: float,
    step_size: float | Tensor,
    decay: float | Tensor,
    eps: float,
) -> None:
    grad = grad.to(exp_avg.dtype)
    exp_avg.lerp_(grad, weight1)
    exp_avg_sq.mul_(beta2).addcmul_((1 - beta2) * grad, grad)
    update = step_size * exp_avg / (exp_avg_sq.sqrt() + eps)
    p32 = p.to(exp_avg.dtype)
    p.copy_(p32 - update - decay * p32 * (update * p32 > 0))


# bf16 weights would lose most updates: their least change is one in 256. The optimizer keeps the 16 bits
# below them, so that matmuls read 16 bits and training is that of fp32 weights (PR 190).


def merge_mantissa(high: Tensor, low: Tensor) -> Tensor:
    """Returns fp32 from its upper 16 bits, bf16, and its lower ones, uint16."""
    high, low = (half.view(torch.int16).to(torch.int32) for half in (high, low))
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split_mantissa(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Writes fp32 x into `high` (bf16, truncated) and `low` (uint16)."""
    bits = x.view(torch.int32)
    high.view(torch.int16).copy_(bits >> 16)
    low.view(torch.int16).copy_(bits)  # keeps the lower half


def normuon_init(p: Tensor, spec: Param, dtype: torch.dtype, first: int) -> dict:
    n, rows, cols = p.shape
    cycle = spec.matrix_lr_mul or (1.0,)
    factors = [cycle[(first + i) % len(cycle)] for i in range(n)]
    state = {
        "momentum_buffer": torch.zeros_like(p, dtype=dtype),
        "second_momentum_buffer": p.new_zeros((n, rows, 1) if rows >= cols else (n, 1, cols), dtype=dtype),
        # On the device from the start: a copy in a step would make it wait.
        "matrix_lr_mul": torch.tensor(factors, dtype=dtype, device=p.device).view(n, 1, 1),
    }
    if p.dtype == torch.bfloat16:
        state["mantissa"] = torch.zeros_like(p, dtype=torch.uint16)
    return state


@section("update {3.name}")
def normuon(
    p: Tensor, grad: Tensor, state: dict, spec: Param, plan: StepPlan, cfg: Config, backend: Backend
) -> None:
    """Updates matrices p (n, rows, cols) by NorMuon (Li et al. 2025, arXiv:2510.05491).

    The update is Nesterov momentum, orthogonalized, then scaled to even rows (columns of wide matrices).
    """
    momentum = backend.compiled(nesterov)(grad, state["momentum_buffer"], backend.scalar(1 - plan.momentum))
    x = polar_express(momentum, dtype_of(cfg.muon_dtype), backend.gram)
    x = backend.compiled(normuon_variance_reduction)(x, state["second_momentum_buffer"], cfg.muon_beta2)
    shape_mul = math.sqrt(max(1, p.size(-2) / p.size(-1)))
    lr = learning_rate(cfg.muon_lr, spec, plan) * shape_mul
    decay = cfg.muon_wd * spec.wd_mul * cfg.muon_lr * plan.lr_mul
    numbers = (backend.scalar(lr), backend.scalar(decay))
    backend.compiled(muon_update)(p, state.get("mantissa"), x, state["matrix_lr_mul"], *numbers)


def nesterov(grad: Tensor, momentum_buffer: Tensor, weight: float | Tensor) -> Tensor:
    """Returns Muon's Nesterov momentum (record 3; Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Moves `momentum_buffer` towards grad by `weight`, 1 - mu.
    """
    grad = grad.to(momentum_buffer.dtype)
    # No lerp: compiled, it would compute with `weight` on the host, and GPU code with the result.
    momentum_buffer.add_(weight * (grad - momentum_buffer))
    return momentum_buffer + weight * (grad - momentum_buffer)


def normuon_variance_reduction(x: Tensor, second_momentum_buffer: Tensor, beta2: float) -> Tensor:
    """Scales the rows of x (n, rows, cols), or columns of wide matrices, by their running root mean squares.

    Orthogonal updates still favour some neurons; NorMuon evens that out and keeps the update's norm (PRs 144,
    168).
    """
    x32 = x.to(second_momentum_buffer.dtype)
    axis = -1 if x.size(-2) >= x.size(-1) else -2
    mean = x32.square().mean(dim=axis, keepdim=True)
    second_momentum_buffer.lerp_(mean, 1 - beta2)
    scale = second_momentum_buffer.clamp_min(1e-10).rsqrt()
    old = (mean.sum(dim=(-2, -1), keepdim=True) * x.size(axis)).sqrt()
    new = ((mean * scale.square()).sum(dim=(-2, -1), keepdim=True) * x.size(axis)).sqrt()
    return x * (scale * (old / new.clamp_min(1e-10))).to(x.dtype)


def muon_update(
    p: Tensor,
    mantissa: Tensor | None,
    x: Tensor,
    lr_mul: Tensor,
    lr: float | Tensor,
    decay: float | Tensor,
) -> None:
    """p -= r x + decay r p [x p >= 0] with r = lr lr_mul, exact to fp32 for bf16 p with its `mantissa`.

    lr_mul (n, 1, 1).
    """
    lr = lr * lr_mul
    p32 = p if mantissa is None else merge_mantissa(p, mantissa)
    x = x.to(p32.dtype)
    new = p32 - p32 * (x * p32 >= 0) * (decay * lr) - lr * x
    if mantissa is None:
        p.copy_(new)
    else:
        split_mantissa(new, p, mantissa)


OPTIMIZERS = {
    "adam": UpdateRule(adam_init, adam, every_step=False),
    "normuon": UpdateRule(normuon_init, normuon, every_step=True),
}


# ============================================================================================================
# 11  Tables. N-gram memory: a table of any size, whose cost follows the rows that a step touches.
#
#    The way of a row of step s. On the left what the prefetch thread does, while steps s - 2 and s - 1 train;
#    on the right the main thread, from top to bottom:
#
#    index  hash_ngrams, index_rows          s - 1   last forward
#    ids    send_ids: asker -> owner,                early rows of s, which s - 1 does not touch: to askers
#           rank r % world_size for row r            backward, gradient rows, update of rows
#    late   send_numbers: owner -> asker,            late rows of s, just updated: to askers
#           does step s - 1 touch it?        s       forwards: lookup_sums sums rows of `compact`
#                                                    last forward; early rows of s + 1
#                                                    backward: accumulate_row_grads, to a compact main_grad
#                                                    gradient rows: to owners, first of the scatter
#                                                    update: owners' mean in rank order, and the rule
#                                                    late rows of s + 1
#
#    No other work or memory has the table's size. A forward reads rows as they are after the update of the
#    step before, whether they came early or late. Sharded rows, and fetching ahead without staleness, are
#    from recommenders (TorchRec, arXiv:2207.07684; BagPipe, arXiv:2202.12429); tables of n-grams that large
#    in language models from modded-nanogpt PRs 360 and 366 and nanochat PR 854.
# ============================================================================================================

CHUNK_BYTES = 1 << 26  # of a table that are copied, checked or sent at once, outside training


class NgramTable:
    """This rank's rows of the table of n-grams, r % world_size == rank, and buffers for what a step touches.

    It is no nn.Parameter: no code that walks parameters copies, averages or gathers it. Rows start at 0.
    """

    def __init__(self, cfg: Config, exchange: Exchange, device: torch.device, backend: Backend):
        n = self.cfg = cfg.ngrams
        self.exchange, self.backend, self.device = exchange, backend, device
        self.rows, (touched, owned, block) = n.ranges * n.rows, ngram_bounds(cfg, exchange.world_size)
        make = partial(torch.zeros, dtype=dtype_of(n.dtype), device=device)
        received = owned if exchange.world_size > 1 else 0
        self.compact, self.main_grad, self.sent_grads = (make(touched, n.width) for _ in range(3))
        self.sent, self.received = make(received, n.width), make(received, n.width)
        self.sums = torch.zeros(min(owned, block), n.width, dtype=acc_dtype(cfg), device=device)
        self.column_seeds = seed_columns(n.width, device)
        self.compact.requires_grad_(not cfg.main_grad)
        self.pending: list[Pending] = []  # fetches of the rows in `compact`
        # Of the present step; of the next, from its early rows to its late ones, which go to `compact` too.
        self.plan: RowPlan = None
        self.next_plan: RowPlan = None
        self.plans: dict[str, RowPlan] = {}  # of all tables in the step begun last, on the device
        self.make_block(block, acc_dtype(cfg), self.device)

    def make_block(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block = torch.zeros(rows, self.cfg.width, dtype=dtype_of(self.cfg.dtype), device=device)
        self.stored = [self.block, torch.zeros(rows, dtype=dtype, device=device)]  # rows, their moments
        # Where the present step's rows and their state are updated, and where the next step's are sent from.
        self.tables = self.next_tables = self.stored

    def begin(self, batch: Batch) -> None:
        """Fetches all rows of a step, if the one before has not."""
        if self.plan is None:
            self.fetch_early(batch)
            self.fetch_late()

    def fetch_early(self, batch: Batch | None) -> None:
        """Starts to fetch those rows of the next step, if there is one, that this step does not change."""
        if batch is not None:
            self.plans = move(batch.rows, self.device)
            self.next_plan = self.plans["ngrams"]
            self.read(batch.rows["ngrams"])
            self._fetch("early", 0, 0)

    def fetch_late(self) -> None:
        """Starts to fetch the others, after their update. The next step begins."""
        early = self.next_plan.fetches["early"]
        self._fetch("late", len(early.rows), sum(early.recv_counts))
        self.plan, self.next_plan = self.next_plan, None
        self.tables, self.next_tables = self.next_tables, self.tables

    def on_rows(self, function: Callable, rows: Tensor) -> Callable:
        """Compiles a function of rows, but for none or one: compiled code takes these as constants."""
        return self.backend.compiled(function) if len(rows) > 1 else function

    def _fetch(self, part: str, sent: int, received: int) -> None:
        transfer = self.next_plan.fetches[part]
        out = self.compact.detach()[received : received + sum(transfer.recv_counts)]
        rows = self.sent[sent : sent + len(transfer.rows)] if self.exchange.world_size > 1 else out
        self.on_rows(gather_rows, transfer.rows)(rows, self.next_tables[0], transfer.rows[None])
        self.pending.append(self.exchange.send_rows(f"{part} rows", "ngrams", rows, transfer, out))

    def read(self, plan: RowPlan) -> None:
        """Prepares next_tables, by the next step's plan in host memory."""

    def arrived(self) -> Tensor:
        """Returns the rows that the present step reads, after their arrival."""
        while self.pending:
            self.pending.pop(0).wait()
        return self.compact

    def send_grads(self) -> Pending:
        """Starts the return of the step's gradient rows; the result is their mean, by place in plan.owned."""
        plan, grad = self.plan, self.main_grad if self.compact.grad is None else self.compact.grad
        rows, owned = plan.grads.rows, self.sums[: len(plan.owned)]
        sent = self.sent_grads[: len(rows)]
        self.on_rows(gather_rows, rows)(sent, grad, rows[None])
        self.compact.grad = None
        received = self.received[: sum(plan.grads.recv_counts)]
        pending = self.exchange.send_rows("gradient rows", "ngrams", sent, plan.grads, received)
        return pending._replace(finish=lambda rows: mean_rows(owned.zero_(), rows, plan))

    def update(self, grads: Tensor, plan: StepPlan) -> None:
        """Updates the rows that any rank has touched, from the result of send_grads()."""
        self.apply_rule(grads, plan)
        self.plan = None
        if self.next_plan:
            self.fetch_late()

    def apply_rule(self, grads: Tensor, plan: StepPlan) -> None:
        row_ids = self.plan.owned * self.exchange.world_size + self.exchange.rank
        lr, seeds = self.backend.scalar(self.cfg.lr * plan.lr_mul), seed_rows(row_ids, plan.step)
        numbers = lr, self.cfg.beta2, seeds, self.column_seeds
        self.on_rows(update_rows, row_ids)(*self.tables, self.plan.at, grads, *numbers)

    def reset(self, rows: Tensor) -> None:
        """Sets these rows (n,) of this rank's block, and their moments, to 0, as at the start."""
        self.finish()
        for t in self.stored:
            t.index_fill_(0, rows.long().to(t.device), 0)

    def finish(self) -> None:
        """Ends what is under way, so that the block holds every row's present values."""
        self.arrived()

    @torch.no_grad()
    def fetch(self, row_ids: Tensor | None) -> Tensor:
        """Returns rows (n,), ascending, of the table, outside training; None: no rows. Waits for the device.

        All ranks must call it as often.
        """
        self.finish()
        ids, n = NO_ROWS if row_ids is None else row_ids.cpu().numpy(), self.exchange.world_size
        order = np.argsort(ids % n, kind="stable")
        counts = np.bincount(ids % n, minlength=n).tolist()
        asked, ask_counts = self.exchange.send_ids("ngrams", (ids // n)[order], counts)
        rows = self.block[torch.from_numpy(asked)].to(self.device)
        transfer = Transfer(rows, ask_counts, counts)
        received = self.exchange.send_rows("rows outside training", "ngrams", rows, transfer).wait()
        return received[torch.from_numpy(inverse(order))]

    def parts(self) -> Iterable[Tensor]:
        """Yields views of the block and its state, of at most CHUNK_BYTES each."""
        for t in self.stored:
            yield from t.split(max(1, CHUNK_BYTES // t[0].nbytes))

    def write(self, file) -> None:
        """Writes this rank's rows and state, each part with its checksum. Raises UserError if not finite."""
        self.finish()
        for part in self.parts():
            if not part.isfinite().all():
                raise UserError("the n-gram table is not finite, and was not saved; lower ngrams.lr")
            data = as_bytes(part)
            file.write(data)
            file.write(zlib.crc32(data, self.exchange.rank).to_bytes(4, "little"))

    def load(self, file) -> None:
        """Reads what `write` has written. Raises ValueError if it is damaged."""
        self.finish()
        for part in self.parts():
            data = bytearray(file.read(part.nbytes))
            checksum = zlib.crc32(data, self.exchange.rank)
            if len(data) < part.nbytes or checksum != int.from_bytes(file.read(4), "little"):
                raise ValueError("checksum of the n-gram table")
            part.copy_(torch.frombuffer(data, dtype=part.dtype).view(part.shape))

    def save(self, file) -> None:
        """Writes all rows in order to rank 0's `file`. All ranks must call it."""
        step = max(1, CHUNK_BYTES // self.block[0].nbytes)
        for start in range(0, self.rows, step):
            ids = torch.arange(start, min(start + step, self.rows), dtype=torch.int32)
            file.write(as_bytes(self.fetch(ids if self.exchange.rank == 0 else None)))


def as_bytes(t: Tensor) -> bytes:
    return t.cpu().view(torch.uint8).numpy().tobytes()


class HostTable(NgramTable):
    """Keeps the rows and their state in host memory, and on the device what a step touches: `tables`.

    The rule runs there. Rows that the step before has touched are copied from its tables, others read through
    staging buffers, page-locked for a GPU, after what the step before that has updated is written back. In
    training this thread waits for the device for that alone, with a forward launched: no row is stale.
    """

    def make_block(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().make_block(rows, dtype, torch.device("meta" if device.type == "meta" else "cpu"))
        on_gpu = device.type == "cuda"

        def make(on: torch.device, **options) -> list[Tensor]:
            return [t.new_zeros((len(self.sums), *t.shape[1:]), device=on, **options) for t in self.stored]

        self.tables, self.next_tables = make(device), make(device)
        self.staged, self.updated = (make(self.block.device, pin_memory=on_gpu) for _ in range(2))
        self.copied = torch.cuda.Event() if on_gpu else None  # after the last copy from or to these two
        self.unwritten: Tensor | None = None  # rows in `updated`

    def write_back(self) -> None:
        if self.copied:
            self.copied.synchronize()
        if self.unwritten is not None:
            for t, values in zip(self.stored, self.updated):
                t.index_copy_(0, self.unwritten.long(), values[: len(self.unwritten)])
            self.unwritten = None

    def read(self, plan: RowPlan) -> None:
        self.write_back()
        n, self.next_owned = len(plan.owned) - len(plan.kept_from), plan.owned
        for t, staged, table in zip(self.stored, self.staged, self.next_tables):
            torch.index_select(t, 0, plan.owned[:n], out=staged[:n])
            table[:n].copy_(staged[:n], non_blocking=True)
        if self.copied:
            self.copied.record()

    def fetch_late(self) -> None:
        kept_from, self.owned = self.next_plan.kept_from, self.next_owned
        n = len(self.owned)
        for table, before in zip(self.next_tables, self.tables):
            torch.index_select(before, 0, kept_from, out=table[n - len(kept_from) : n])
        super().fetch_late()

    def apply_rule(self, grads: Tensor, plan: StepPlan) -> None:
        if self.unwritten is not None:  # nothing has been read since
            self.write_back()
        super().apply_rule(grads, plan)
        for updated, table in zip(self.updated, self.tables):
            updated[: len(self.owned)].copy_(table[: len(self.owned)], non_blocking=True)
        self.unwritten = self.owned
        if self.copied:
            self.copied.record()

    def finish(self) -> None:
        super().finish()
        self.write_back()


TABLES = {"sharded": NgramTable, "host": HostTable}  # by Ngrams.placement


# ============================================================================================================
# 12  Optimizer. Scatters the gradients, works on what arrives, gathers the parameters.
# ============================================================================================================


class Optimizer:
    """Shards updates over ranks: scatters gradients, updates own shards (work), gathers parameters.

    Gradients are exchanged in the order of cfg.params, updates done in cfg.work_order; n-grams come before
    all others. A gradient is summed over micro-batches (Adam: over two steps) in its parameter's dtype. Those
    of banks, lm_head and tables are in main_grad, if cfg.main_grad: `weight_grads` take the matmuls',
    accumulate_row_grads the tables' touched rows. The first write after an update overwrites, later ones add.
    All others are in .grad, dropped after use. Until the untie step, a tied parameter, another's transpose,
    adds its gradient to that one's and copies its values.

    Neither order changes the result: an update reads only its own gradient and state; the sum over ranks has
    an order of its own; a tied gradient is added before its target's sum, a tied copy made after its target's
    gather.
    """

    def __init__(
        self, cfg: Config, params: dict[str, Tensor], exchange: Exchange, backend: Backend = TORCH_BACKEND
    ):
        self.cfg, self.params, self.exchange, self.backend = cfg, params, exchange, backend
        self.device = next(iter(params.values())).device
        self.specs = {spec.name: spec for spec in used_params(cfg)}
        self.tied_copy = {spec.tied_to: name for name, spec in self.specs.items() if spec.tied_to}
        self.is_tied = True
        # By parameter:
        self.main_grad = {}
        self.weight_grads = {}  # of matmuls' weights, with or without main_grad
        self.shard_grads = {}  # with sparse exchange: this rank's block of the mean gradient, 0 between steps
        self.recv_buffers = {}  # of other ranks' gradients, with fp32 reduction
        self.state = {}  # its rule's
        self.in_flight = {}  # its gather (also "act_scale"); whoever reads it waits for it, and takes it out
        self.rows: dict[str, RowPlan] = {}  # of this step, by what indexes tables
        for name, p in params.items():
            spec, shard = self.specs[name], self.shard_of(name, p)
            if cfg.main_grad and (spec.is_matmul_weight or spec.indexed_by):
                self.main_grad[name] = torch.zeros_like(p, requires_grad=False)
            p.requires_grad_(name not in self.main_grad)
            if spec.is_matmul_weight:
                self.weight_grads[name] = WeightGrad(p, self.main_grad.get(name))
            if exchange.world_size > 1 and spec.exchange == "sparse":
                self.shard_grads[name] = torch.zeros_like(shard, dtype=acc_dtype(cfg))
            elif exchange.world_size > 1 and spec.reduction == "fp32":
                self.recv_buffers[name] = shard.new_empty((exchange.world_size, *shard.shape))
            first = exchange.rank * len(shard) if spec.sharded else 0
            self.state[name] = OPTIMIZERS[spec.optimizer].init(shard, spec, acc_dtype(cfg), first)
        table = TABLES[cfg.ngrams.placement]
        self.ngrams = table(cfg, exchange, self.device, backend) if cfg.ngrams.orders else None

    def as_matrices(self, t: Tensor) -> Tensor:
        """Views mlp_bank, or its gradient, as (matrices, rows, cols); others stay as they are."""
        return t.view(-1, *t.shape[-2:]) if t.dim() == 4 else t

    def shard_of(self, name: str, t: Tensor) -> Tensor:
        """Returns the part of `t` that this rank updates."""
        t = self.as_matrices(t.detach())
        return self.exchange.shard(t) if self.specs[name].sharded else t

    def is_due(self, name: str, plan: StepPlan) -> bool:
        """True if this step updates the parameter; a tied one is copied instead."""
        spec = self.specs[name]
        every_step = OPTIMIZERS[spec.optimizer].every_step
        return (every_step or plan.do_adam) and not (self.is_tied and spec.tied_to)

    @torch.no_grad()
    def begin(self, batch: Batch) -> None:
        """Begins a step: takes its plans of rows."""
        if self.ngrams:
            self.ngrams.begin(batch)
        self.rows = self.ngrams.plans if self.ngrams else move(batch.rows, self.device)

    @section("rows")
    @torch.no_grad()
    def accumulate_row_grads(
        self, leaves: dict[str, Tensor] | None, index: dict[str, RowIndex], signs: Tensor
    ) -> None:
        """Ends a micro-batch's backward: adds the looked-up rows' gradients to the tables' main_grad.

        signs: the model's, by which bigrams' and n-grams' rows were multiplied.
        """
        for grad in self.weight_grads.values():
            grad.end_backward()
        for name, main_grad in self.main_grad.items():
            if kind := self.specs[name].indexed_by:
                self.backend.segment_sum_rows(main_grad, leaves[name].grad, index[kind], signs)
        if self.ngrams and leaves is not None:
            grads = leaves["ngrams"].grad
            self.backend.segment_sum_rows(self.ngrams.main_grad, grads, index["ngrams"], signs)

    def grad_of(self, name: str) -> Tensor:
        grad = self.main_grad.get(name, self.params[name].grad)
        if grad is None:
            raise RuntimeError(f"{name} has no gradient")
        return grad

    def zero_grad_of(self, name: str) -> None:
        """Drops a used gradient. Zeros a table's main_grad if sent whole: a backward writes few rows."""
        self.params[name].grad = None
        if name in self.weight_grads:
            self.weight_grads[name].overwrite = True
        kind = self.specs[name].indexed_by
        if kind and name in self.main_grad and name not in self.shard_grads:
            if self.exchange.world_size > 1:
                self.main_grad[name].zero_()
            else:
                self.main_grad[name].index_fill_(0, self.rows[kind].grads.rows.long(), 0)

    @torch.no_grad()
    def step(self, plan: StepPlan) -> None:
        self.work(plan, self.scatter(plan))
        self.rows = {}
        if plan.untie and self.is_tied:
            self.untie()

    def scatter(self, plan: StepPlan) -> dict[str, Pending]:
        """Starts the exchange of every gradient that is due: n-grams', then in the order of the table."""
        pending = {"ngrams": self.ngrams.send_grads()} if self.ngrams else {}
        for name, spec in self.specs.items():
            if name in self.weight_grads:
                self.weight_grads[name].flush()  # while earlier gradients are on their way
            if not self.is_due(name, plan):
                continue
            grad = self.grad_of(name)
            if self.is_tied and name in self.tied_copy:
                self.add_tied_grad(grad, self.tied_copy[name])
            if name in self.shard_grads:
                rows = self.rows[spec.indexed_by]
                arriving = self.exchange.send_rows("rows", name, grad[rows.grads.rows], rows.grads)
                mean = partial(mean_rows, self.shard_grads[name], plan=rows)
                pending[name] = arriving._replace(finish=mean)
            else:
                grad, recv_buffer = self.as_matrices(grad), self.recv_buffers.get(name)
                pending[name] = self.exchange.reduce(name, spec.exchange, grad, recv_buffer)
        return pending

    def add_tied_grad(self, grad: Tensor, name: str) -> None:
        """Adds the gradient of `name`, (n, m), to its target's, (m, n); of a table, only touched rows."""
        tied_grad = self.grad_of(name)
        if name in self.main_grad:
            row_ids = self.rows[self.specs[name].indexed_by].grads.rows
            self.backend.compiled(transpose_add)(grad, tied_grad, row_ids)
        else:
            grad += tied_grad.T
        self.zero_grad_of(name)

    @section("update")
    def work(self, plan: StepPlan, pending: dict[str, Pending]) -> None:
        """Updates what has a scattered gradient: rows of n-grams, then parameters in work_order and a gather.

        Mean gradients exist only here, each rank's block of them.
        """
        self.finish_gathers()
        if self.ngrams:
            self.ngrams.update(pending["ngrams"].wait(), plan)
        for name in self.cfg.work_order:
            if name not in pending:
                continue
            spec, grad = self.specs[name], pending[name].wait()
            shard, update = self.shard_of(name, self.params[name]), OPTIMIZERS[spec.optimizer].update
            update(shard, grad, self.state[name], spec, plan, self.cfg, self.backend)
            self.zero_grad_of(name)
            if name in self.shard_grads:
                grad.index_fill_(0, self.rows[spec.indexed_by].arriving.long(), 0)
            if spec.sharded:
                self.in_flight[name] = self.gather(name)
        if self.is_tied:
            for target, name in self.tied_copy.items():
                if target in pending:
                    # The copy waits for the target's gather, and for whoever needs it.
                    source = self.in_flight.get(target) or Pending(self.params[target].detach())
                    copy = partial(self.backend.compiled(transpose_copy), self.params[name])
                    self.in_flight[name] = source._replace(finish=copy)

    def gather(self, name: str) -> Pending:
        return self.exchange.gather(name, self.as_matrices(self.params[name].detach()))

    def gather_all(self) -> None:
        """Completes every sharded parameter from the ranks' own shards, and waits."""
        for name, spec in self.specs.items():
            if spec.sharded:
                self.gather(name).wait()

    @torch.no_grad()
    def finish_gathers(self) -> None:
        """Waits for all in flight that nobody has waited for."""
        while self.in_flight:
            self.in_flight.popitem()[1].wait()

    def untie(self) -> None:
        """Lets tied parameters train on their own, from their target's state, transposed and resharded."""
        for target, name in self.tied_copy.items():
            for key, value in self.state[target].items():
                if isinstance(value, Tensor):
                    whole = torch.empty_like(self.params[target], dtype=value.dtype)
                    self.shard_of(target, whole).copy_(value)
                    if self.specs[target].sharded:
                        whole = self.exchange.gather(f"{target}.{key}", whole).wait()
                    value = self.state[name][key].copy_(self.shard_of(name, whole.T))
                self.state[name][key] = value
        self.is_tied = False

    def state_dict(self) -> dict:
        """Returns all that training changes here: live tensors and numbers, by parameter and name."""
        return {**self.state, "is_tied": self.is_tied}

    def load_state_dict(self, saved: dict) -> None:
        for name, state in self.state.items():
            for key, value in state.items():
                new = saved[name][key]
                state[key] = value.copy_(new) if isinstance(value, Tensor) else new
        self.is_tied = saved["is_tied"]

    @torch.no_grad()
    def drop_grads(self) -> None:
        """Drops all gradients, as after an Adam step."""
        for p in self.params.values():
            p.grad = None
        for main_grad in self.main_grad.values():
            main_grad.zero_()
        for grad in self.weight_grads.values():
            grad.overwrite = True
        if self.ngrams:
            self.ngrams.finish()
            self.ngrams.plan = self.ngrams.next_plan = self.ngrams.compact.grad = None


# ============================================================================================================
# 13  Step. The one body of a training step, for warm-up and timed run alike; validation.
# ============================================================================================================


def train_step(
    model: GPT, optimizer: Optimizer, batch: Batch, following: Callable[[], Batch | None] = lambda: None
) -> Tensor:
    """Trains on one batch. Returns this rank's loss, the weighted mean over all targets: 0-d, on the device.

    `following()` is the next batch, whose early rows of n-grams this step fetches; None after the last.
    """
    plan, micro_batches, count = batch.plan, batch.micro_batches, len(batch.micro_batches)
    model.rotary.use_stage(plan.stage)
    model.in_flight, model.ngrams = optimizer.in_flight, optimizer.ngrams
    optimizer.begin(batch)
    weights, losses = tuple(weight / count for weight in plan.loss_weights), []
    grads, head_grad, fp8_head = optimizer.weight_grads, optimizer.weight_grads["lm_head"], []
    # Converted at the first use, after the bank's gather.
    in_fp8 = model.backend.fp8 and model.cfg.fp8_mlp
    fp8_mlps = cache(partial(model.fp8_mlps, plan.step)) if in_fp8 else None
    for i, micro_batch in enumerate(micro_batches):
        micro_batch, last = micro_batch.to(model.device), i == count - 1
        leaves = {} if model.cfg.main_grad else None
        x = model.hidden_states(micro_batch, plan.windows, grads, leaves, fp8_mlps)
        head_grad.delay = last and model.cfg.delay_head_grad
        targets = model.loss_targets(micro_batch.targets, plan)
        loss, backward_roots = model.head_loss_and_grad(x, targets, weights, head_grad, 1 / count, fp8_head)
        if last and fp8_mlps:
            maximum = optimizer.exchange.all_reduce(model.act_amax, dist.ReduceOp.MAX)
            optimizer.in_flight["act_scale"] = maximum._replace(finish=model.set_act_scale)
        if last and optimizer.ngrams:
            optimizer.ngrams.fetch_early(following())
        section("backward")(torch.autograd.backward)(*zip(*backward_roots))
        optimizer.accumulate_row_grads(leaves, micro_batch.index, model.signs)
        losses.append(loss / (micro_batch.inputs.size(0) * sum(plan.loss_weights)))
    optimizer.step(plan)
    return sum(losses[1:], losses[0])


def validate(
    model: GPT, loader: ValLoader, exchange: Exchange, windows: dict[str, int], slices: int | None = None
) -> float:
    """Returns the mean over slices of their mean losses: the same however slices are spread over ranks.

    slices: the first so many only.
    """
    slices = slices or model.cfg.val_slices
    losses = torch.zeros(slices, dtype=acc_dtype(model.cfg), device=model.device)
    for i in range(exchange.rank, padded(slices, exchange.world_size), exchange.world_size):
        if i < slices:
            losses[i] = model.token_losses(loader.batch(i).to(losses.device), windows).mean()
        elif model.ngrams:
            model.ngrams.fetch(None)
    return exchange.all_reduce(losses).wait().mean().item()


class AsyncLoss:
    """Reads steps' losses without stalling the GPU: starts an asynchronous copy, polls for its arrival.

    latest: the newest (step, loss) that has arrived; before the first (0, None).
    """

    def __init__(self):
        self.queue, self.latest = [], (0, None)

    def push(self, step: int, loss: Tensor) -> None:
        """Starts the copy of a step's loss, 0-d."""
        arrived = None
        if loss.is_cuda:
            loss, arrived = loss.to("cpu", non_blocking=True), torch.cuda.Event()  # into pinned memory
            arrived.record()
        self.queue.append((step, loss, arrived))

    def poll(self, wait: bool = False) -> None:
        """Takes what has arrived. Raises UserError if it is not finite."""
        while self.queue:
            step, loss, arrived = self.queue[0]
            if arrived:
                if not wait and not arrived.query():
                    return
                arrived.synchronize()
            self.queue.pop(0)
            self.latest = step, loss.item()
            if not loss.isfinite():
                fix = "lower the learning rate that was raised last, or look at that batch"
                raise UserError(f"train_loss is {loss.item()} at step {step}; {fix}")


# ============================================================================================================
# 14  Checks. What a config must satisfy; saved models; checkpoints.
# ============================================================================================================


def flatten(value, path: str = "") -> dict[str, object]:
    """Flattens nested dicts, lists and tuples to {"layers.3.window": "long", ...}."""
    if not isinstance(value, (dict, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, child in items for k, v in flatten(child, f"{path}.{key}".lstrip(".")).items()}


def config_diff(a: dict, b: dict, fields: tuple[str, ...] = ("",)) -> str:
    """Names the first three differences of two nested dicts, with both values; "" if there are none.

    fields: what the keys that are compared may start with.
    """
    a, b = flatten(a), flatten(b)
    changed = [key for key in a | b if key.startswith(fields) and a.get(key) != b.get(key)]
    return "; ".join(f"{key} ({a.get(key)}, {b.get(key)})" for key in changed[:3])


def check_config(cfg: Config, world_size: int) -> None:
    """Raises UserError if the tables contradict each other or `world_size` ranks cannot share the work."""
    for broken, message in config_rules(cfg, world_size):
        if broken:
            raise UserError(message)


def config_rules(cfg: Config, world_size: int):
    """Yields (whether a rule is broken, message). Later rules may assume that earlier ones hold."""
    whole = replace(cfg, ngrams=Ngrams(), mudd_gates=True, mudd_connections=True)
    names = list(param_shapes(whole, 1))
    for what, order in ("parameter table", [p.name for p in cfg.params]), ("work_order", cfg.work_order):
        wrong = sorted(name for name in {*names, *order} if order.count(name) != names.count(name))
        yield wrong, f"{what}: {', '.join(wrong)}: it must name each parameter exactly once"
    floats = ("bfloat16", "float32", "float64")
    choices = {
        "dtype": floats,
        "muon_dtype": floats,
        "attention": ("dense", "varlen", "fa3"),
        "kernels": KERNELS,
        "layers.attention": ("plain", "paired", None),
        "layers.window": list(cfg.val_windows),
        "layers.reads": ("stream", "back"),
        "layers.saves": ("skip", "back", None),
        "layers.adds": ("skip", None),
        "ngrams.dtype": floats,
        "ngrams.placement": TABLES,
        "params.optimizer": OPTIMIZERS,
        "params.exchange": ("all_reduce", "reduce_scatter", "sparse"),
        "params.dtype": ("model", "float32"),
        "params.tied_to": ("", "lm_head"),
        "params.reduction": ("backend", "fp32"),
    }
    may_be_0 = (
        "val_every max_docs bos_id momentum_warmup momentum_cooldown sign_rows samples stages.steps "
        "layers.value params.wd_mul"
    ).split()
    values = dataclasses.asdict(cfg)
    values["params"] = {spec["name"]: spec for spec in values["params"]}
    for path, value in flatten(values).items():
        column = path if path in choices else ".".join(path.split(".")[::2])
        allowed = choices.get(column, [value])
        hint = ", or add it to windows of every stage and to val_windows" if column == "layers.window" else ""
        use = ", ".join(str(a) or "nothing" for a in allowed)
        yield value not in allowed, f"{path}={value}: use {use}{hint}"
        least = 1 if type(value) is int and column not in may_be_0 else 0
        outside = isinstance(value, (int, float)) and not least <= value < math.inf
        yield outside, f"{path}={value} must be finite, and at least {least}"
    for column, role in (("saves", "skip"), ("saves", "back"), ("adds", "skip"), ("connections", True)):
        count = sum(getattr(layer, column) == role for layer in cfg.layers)
        yield count != 1, f"layer table: exactly one layer must have {column}={role}"
    yield not cfg.layers[0].attention, "layers.0 has no attention; the first layer needs it"
    for i, layer in enumerate(cfg.layers):
        saved = {"stream", None, *(above.saves for above in cfg.layers[:i])}
        for used in (layer.adds, layer.reads if layer.attention else None):
            yield used not in saved, f"layers.{i} uses {used}, which no layer above it saves"
        useless = layer.value is not None and not layer.attention
        yield useless, f"layers.{i} has a value table, but no attention"
        for column in ("key_shift", "xsa", "dc"):
            paired = getattr(layer, column) and layer.attention != "plain"
            yield paired, f"layers.{i}.{column}=true: only for plain attention"
        yield layer.gate and not layer.attention, f"layers.{i} has a gate, but no attention"
        lacks = layer.connections and (layer.value is None or "back" not in saved)
        yield (
            lacks,
            f"layers.{i} has connections: it needs a value table, and a layer above it with saves=back",
        )
    tables = [layer.value for layer in cfg.layers if layer.value is not None]
    misnumbered = sorted(tables) != list(range(len(tables)))
    yield misnumbered, f"layer table: value tables are {tables}; number them 0, 1, ... and use each once"
    shape = f"heads={cfg.heads} must be even, head_dim={cfg.head_dim} a multiple of 4"
    odd = cfg.heads % 2 or cfg.head_dim % 4 or cfg.dim < GATE_DIM
    yield odd, f"{shape}, their product at least {GATE_DIM}"
    vocab = f"bos_id={cfg.bos_id} < vocab_size={cfg.vocab_size} <= padded_vocab={cfg.padded_vocab}"
    yield not cfg.bos_id < cfg.vocab_size <= cfg.padded_vocab, f"{vocab} must hold"
    table = cfg.ngrams
    unusable = sorted({*table.orders} & {*range(2, 17)}) != sorted(table.orders)
    yield unusable, f"ngrams.orders={','.join(map(str, table.orders))}: use different numbers from 2 to 16"
    rows = table.ranges * table.rows
    yield cfg.sign_rows > 65536, f"sign_rows={cfg.sign_rows}: use at most 65536"
    yield (
        rows >= 2**31,
        f"ngrams: {rows:,} rows of all orders and hashes; use fewer than 2147483648, for int32",
    )
    wide = table.orders and table.width > cfg.dim
    yield wide, f"ngrams.width={table.width} is above the model's width; use at most {cfg.dim}"
    count, shapes = num_microbatches(cfg, world_size), param_shapes(cfg, world_size)
    cannot_share = f"{world_size} processes cannot share"
    yield count % world_size, f"{cannot_share} {count} micro-batches; change one of these numbers"
    for i, stage in enumerate(cfg.stages):
        differ = ", ".join(sorted(set(stage.windows) ^ set(cfg.val_windows)))
        yield differ, f"stages.{i}.windows and val_windows differ in {differ}: name the same windows"
        unknown = ", ".join(set(stage.param_lr_mul) - set(names))
        yield unknown, f"stages.{i}.param_lr_mul: unknown {unknown}; use names of the parameter table"
        uneven = not stage.mtp_start or len(stage.mtp_start) != len(stage.mtp_end)
        yield uneven, f"stages.{i}: mtp_start and mtp_end must have as many weights, at least one"
        rest, what = stage.batch_tokens % count, f"{stage.batch_tokens} tokens of a batch"
        yield rest, f"stages.{i}: {what} do not divide into {count} micro-batches, at least one a process"
    for spec in used_params(cfg):
        at, rows = f"params.{spec.name}", shapes[spec.name][0]
        bad_betas = spec.optimizer == "adam" and (len(spec.betas) != 2 or max(spec.betas) >= 1)
        yield bad_betas, f"{at}.betas={spec.betas}: Adam takes two below 1"
        no_bank = spec.optimizer == "normuon" and spec.name not in BANKS
        yield no_bank, f"{at}.optimizer=normuon: only for banks of matrices"
        yield spec.exchange == "sparse" and not spec.indexed_by, f"{at}.exchange=sparse: only for tables"
        no_scalar = not spec.name.endswith(("lambdas", "scalars", "scale"))
        yield spec.dtype == "float32" and no_scalar, f"{at}.dtype=float32: only for lambdas, scalars, scales"
        rest = spec.sharded and spec.name not in BANKS and rows % world_size
        yield rest, f"{cannot_share} {rows} rows of {spec.name}; change one of these numbers"


def config_json(cfg: Config, **more) -> str:
    return json.dumps(dataclasses.asdict(cfg) | more)


CGROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def available_memory() -> int:
    """Returns the bytes of memory free on this machine, at most its cgroup's limit; many where unknown."""
    free = sys.maxsize
    with contextlib.suppress(OSError):
        words = Path("/proc/meminfo").read_text().split()
        free = 1024 * int(words[words.index("MemAvailable:") + 1])
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such cgroup; no limit: "max"
            free = min(free, int(Path(path).read_text()))
    return free


def check_ngram_memory(cfg: Config, world_size: int, device: torch.device, local_ranks: int) -> str:
    """Returns a line on the n-gram table. Raises UserError if this machine cannot hold its ranks' parts."""
    n = cfg.ngrams
    if not n.orders:
        return ""
    table = TABLES[n.placement](cfg, Exchange(0, world_size), torch.device("meta"), TORCH_BACKEND)

    def nbytes(*values) -> int:
        return sum(t.nbytes for t in {t for t in tree_leaves(values) if isinstance(t, Tensor)})

    total, rows = nbytes(vars(table)), nbytes(table.stored)
    if device.type == "cpu":
        need = total
    else:  # rows on a GPU are allocated before the first step
        need = nbytes(table.stored, table.staged, table.updated) if isinstance(table, HostTable) else 0
    have, shape = available_memory() // local_ranks, f"{table.rows:,} rows x {n.width} {n.dtype}"
    if need > have:
        raise UserError(
            f"a process's part of the n-gram table ({shape}) needs {need:,} bytes of memory, it has "
            f"{have:,}; use more machines, or lower ngrams.rows or ngrams.width"
        )
    return (
        f"n-grams: orders {','.join(map(str, n.orders))}, hashes {n.hashes}, {shape}, {n.placement}; "
        f"{rows:,} bytes a process, and {total - rows:,} for the rows that a step touches"
    )


def save_model(path: str, model: GPT, rank: int = 0) -> None:
    """Saves full weights without a world size's padding, and the config as JSON.

    All ranks must call it; rank 0 writes, also the n-gram table beside it: its rows in order, nothing else.
    """
    shapes = param_shapes(model.cfg, 1)
    if model.ngrams:
        aside = f"{path}.ngrams.partial"  # a process may have mapped an earlier table
        with open(os.devnull if rank else aside, "wb") as file:
            model.ngrams.save(file)
    if rank == 0:
        weights = {name: model.weight(name).detach()[: shape[0]].cpu() for name, shape in shapes.items()}
        weights["signs"] = model.signs.cpu()
        torch.save({"config": config_json(model.cfg), "weights": weights}, path)
        if model.ngrams:
            os.replace(aside, f"{path}.ngrams")


class NgramFile:
    """The table of n-grams of a saved model, mapped: a fetch reads the rows asked for."""

    def __init__(self, path: str, cfg: Ngrams, device: torch.device | str):
        self.dtype, self.device = dtype_of(cfg.dtype), device
        fix = "keep the whole file beside the model it was saved with"
        with explain(f"cannot read {path}", fix, OSError, ValueError):
            row_bytes = cfg.width * self.dtype.itemsize
            self.rows = np.memmap(path, np.uint8, "r").reshape(cfg.ranges * cfg.rows, row_bytes)

    def fetch(self, row_ids: Tensor) -> Tensor:
        """Returns rows (n,) of the table, (n, width)."""
        return torch.from_numpy(self.rows[row_ids.cpu().numpy()]).view(self.dtype).to(self.device)


def load_model(path: str, device: torch.device | str = "cpu") -> GPT:
    """Loads the model that `--save` wrote; it gives the same validation loss."""
    fix = "give a file that --save of this script wrote"
    with explain(f"cannot load {path}", fix, Exception):  # which one depends on the damage
        saved = torch.load(path, map_location=device, weights_only=True)
        model = GPT(config_from_dict(json.loads(saved["config"])), device=device)
        model.load_state_dict(saved["weights"])
    model.rotary.use_stage(len(model.cfg.stages) - 1)
    if model.cfg.ngrams.orders:
        model.ngrams = NgramFile(f"{path}.ngrams", model.cfg.ngrams, device)
    return model


def check_init(path: str, cfg: Config) -> tuple[str, Config]:
    """Returns a saved model's hash, and `cfg` for a run from it on.

    Raises UserError if its weights do not fit a model of `cfg`.
    """
    model = (
        "vocab_size padded_vocab bos_id bigram_vocab_size sign_rows heads head_dim mlp_dim layers mudd "
        "ngrams.orders ngrams.hashes ngrams.rows ngrams.width"
    ).split()
    saved = load_model(path).cfg
    if diff := config_diff(dataclasses.asdict(saved), dataclasses.asdict(cfg), tuple(model)):
        raise UserError(f"--init {path}: another model (there, here): {diff}; give the options it had")
    windows = (*saved.past_windows, *longest_windows(saved, len(saved.stages)))
    return dataset_hash([Path(path)]), replace(cfg, past_windows=windows)


@torch.no_grad()
def start_from(path: str, model: GPT, optimizer: Optimizer) -> None:
    """Gives a model that is to be trained a saved one's weights, not the optimizer's state.

    Tied parameters train on their own from the start: they may differ.
    """
    saved, exchange = load_model(path), optimizer.exchange
    for name, value in saved.state_dict().items():
        getattr(model, name)[: len(value)].copy_(value)
    optimizer.is_tied = False
    if table := saved.ngrams:
        ids, n = torch.arange(exchange.rank, len(table.rows), exchange.world_size), 1 << 16
        for part, row_ids in zip(optimizer.ngrams.block.split(n), ids.split(n)):
            part[: len(row_ids)].copy_(table.fetch(row_ids))


OTHER_STATE = "signs", "act_scale", "proj_scale"  # of the model; no parameters


def training_state(model: GPT, optimizer: Optimizer) -> dict:
    """Copies this rank's share of all that training changes, between Adam steps, to host memory."""
    optimizer.finish_gathers()
    shards = {name: optimizer.shard_of(name, p) for name, p in model.named_parameters()}
    others = {name: getattr(model, name) for name in OTHER_STATE}
    state = {"model": shards, "optimizer": optimizer.state_dict(), "others": others}
    return map_tensors(lambda t: t.to("cpu", copy=True), state)


@torch.no_grad()
def restore(state: dict, model: GPT, optimizer: Optimizer) -> None:
    """Restores this rank's share, without gradients. Call optimizer.gather_all() afterwards."""
    for name, p in model.named_parameters():
        optimizer.shard_of(name, p).copy_(state["model"][name])
    for name in OTHER_STATE:
        getattr(model, name).copy_(state["others"][name])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.drop_grads()


class Checkpoint(NamedTuple):
    """A folder RUN.checkpoint/step00000120 beside the run's log: meta.json, and each rank's rank0.pt,
    rank1.pt, ...

    It is renamed to that when all of it is written, so a folder of that name is complete, whatever ended the
    run.
    """

    path: Path
    meta: dict  # step, train_ms, the loader's position, script, torch; task: what must be equal to resume

    @classmethod
    def find(cls, where: str) -> "Checkpoint":
        """Finds the newest of a run, named by its log, its .checkpoint folder, or the folder of one such."""
        path = Path(where)
        steps = sorted(path.glob("*.checkpoint/step????????"))
        if not steps and path.suffix in (".checkpoint", ".txt"):
            steps = sorted(path.parent.glob(path.name.split(".")[0] + ".checkpoint/step????????"))
        runs = sorted({str(step.parent) for step in steps})
        if len(runs) > 1:
            raise UserError(f"--resume {where}: several runs have checkpoints; name one: {', '.join(runs)}")
        if not steps:
            raise UserError(
                f"--resume {where}: no checkpoint there; give the log's folder of a run started with "
                "--checkpoint-every that did not finish"
            )
        path = steps[-1] / "meta.json"
        with explain(f"cannot read {path}", "is the run still going?", OSError):
            text = path.read_bytes()
        fix = f"remove {path.parents[1]}, and start again"
        with explain(f"{path} is damaged", fix, ValueError, LookupError, TypeError):
            meta, keys = json.loads(text), ("step", "train_ms", "position", "task", "script", "torch")
            return cls(path.parent, {key: meta[key] for key in keys})

    def load(self, model: GPT, optimizer: Optimizer) -> None:
        """Restores this rank's shards. Call optimizer.gather_all() afterwards."""
        rank = optimizer.exchange.rank
        path = self.path / f"rank{rank}.ngrams"
        try:
            if optimizer.ngrams:
                with open(path, "rb") as table:
                    optimizer.ngrams.load(table)
            path = path.with_suffix(".pt")
            with zipfile.ZipFile(path) as file:  # torch.load compares no checksums
                if bad := file.testzip():
                    raise ValueError(f"checksum of {bad}")
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved["rank"] != rank:
                raise ValueError(f"rank {saved['rank']}'s share")
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except OSError as e:
            raise UserError(
                f"cannot read {path}: {first_line(e)}; is the run still going, and do all machines see its "
                "folder?"
            ) from None
        except Exception as e:  # what torch.load raises depends on the damage
            raise UserError(
                f"{path} is damaged: {first_line(e)}; remove {path.parents[1]}, and start again"
            ) from None
        fix = "resume with the script that wrote it, which the log holds"
        with explain(f"{path} lacks what this script saves", fix, KeyError):
            restore(saved, model, optimizer)


def save_checkpoint(run: Path, about: dict, progress: dict, model: GPT, optimizer: Optimizer) -> None:
    """Writes the checkpoint after progress["step"] steps into `run`, from all ranks; removes the one before.

    about, progress: what its meta.json holds, of the run and of this moment.
    """
    meta = about | progress
    final, rank = run / f"step{meta['step']:08d}", optimizer.exchange.rank
    partial_path = final.with_suffix(".partial")

    def write_file(name: str, write: Callable) -> None:
        with open(partial_path / name, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())

    def begin() -> None:
        if rank:
            return
        for left in run.glob("*.partial"):
            shutil.rmtree(left)
        partial_path.mkdir(parents=True)

    state = training_state(model, optimizer) | {"rank": rank}

    def write_shard() -> None:
        for name, shard in state["model"].items():
            if not shard.isfinite().all():
                raise UserError(
                    f"{name} is not finite after step {meta['step']}, which was not saved; lower the "
                    "learning rate that was raised last"
                )
        write_file(f"rank{rank}.pt", partial(torch.save, state))
        if optimizer.ngrams:
            write_file(f"rank{rank}.ngrams", optimizer.ngrams.write)

    def finish() -> None:
        if rank:
            return
        write_file("meta.json", lambda f: f.write(json.dumps(meta, indent=1).encode()))
        earlier = list(run.glob("step????????"))
        partial_path.rename(final)
        for path in earlier:
            shutil.rmtree(path.rename(path.with_suffix(".partial")))

    fix = "make room, in a folder that all machines see, and go on from the one before with --resume"
    # torch.save raises RuntimeError when the disk is full.
    guard = explain(f"cannot write the checkpoint {final}", fix, OSError, RuntimeError)
    for part in (begin, write_shard, finish):
        optimizer.exchange.run_on_all_ranks(guard(part))


# ============================================================================================================
# 15  Main. Command line; build, warm up, reset, train against the clock, sum up.
# ============================================================================================================


class Parser(argparse.ArgumentParser):
    """Raises wrong options as UserErrors of one line; prints help from one process of a machine."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}; -h lists the options")

    def print_help(self, file=None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def whole(text: str, least: int = 1) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"give a whole number, {least} or more, not {text!r}")
        return int(text)

    parser = Parser(
        prog="train_gpt.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Trains a GPT-2-small-class language model against the clock. Start it with torchrun,\n"
        "one process per GPU (or a few without one). ./run.sh does that, and fetches the data first.",
        epilog="examples:\n"
        "  torchrun --standalone --nproc_per_node=8 train_gpt.py --name MyIdea --seed 3\n"
        "  torchrun --standalone --nproc_per_node=2 train_gpt.py --preset cpu --set stages.0.steps=50\n"
        "--set takes the fields of Config; dots reach into its tables: stages.0.lr_mul,\n"
        "stages.*.windows.long, params.embed.wd_mul, params.*.reduction",
    )
    add, preset = parser.add_argument, "record" if torch.cuda.is_available() else "cpu"
    add(
        "--preset",
        choices=PRESETS,
        default=preset,
        help="the 8-GPU one, or a small one (default here: %(default)s)",
    )
    add("--name", default="", help="keep the log in records/TRACK/DATE_NAME/, not in records/TRACK/attempts/")
    add(
        "--seed", type=partial(whole, least=0), default=0, help="of the initial weights (default %(default)s)"
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change one setting; may be repeated",
    )
    add("--data", metavar="DIR", help="folder of .bin shards (default: the preset's)")
    add("--init", metavar="FILE", help="start from a model that --save wrote; such a run counts for no track")
    add("--save", metavar="FILE", help="write the final weights and the config there")
    add(
        "--checkpoint-every",
        metavar="N",
        type=whole,
        help="save everything beside the log after every N steps; such a run counts for no track",
    )
    add(
        "--profile",
        metavar="STEP",
        nargs="?",
        type=whole,
        const=8,
        help="trace four steps from STEP on (default 8) into RUN.rank0.trace.json.gz, RUN.rank1..., "
        "beside the log, for bench/timeline.py and ui.perfetto.dev; such a run counts for no track",
    )
    add(
        "--check",
        metavar="PROCESSES",
        type=whole,
        help="say whether that many processes could run this here, data aside, and stop",
    )
    add(
        "--resume",
        metavar="LOG",
        help="continue from a run's last checkpoint, with the same options: its log, or the log's folder",
    )
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[\w.-]*", args.name):
        parser.error(f"--name {args.name!r}: letters, digits, and . _ - only: it becomes a folder's name")
    if "" in (args.resume, args.init):
        parser.error("--resume and --init: give a path, not nothing")
    if args.profile and args.resume:
        parser.error("--profile and --resume: trace a run from its start; leave one of them out")
    if args.name and args.resume:
        parser.error("--name and --resume: a resumed run's log goes beside the first one; leave --name out")
    return args


def track_of(cfg: Config, world_size: int) -> str:
    """Returns the preset's track if data, micro-batches, validation, target and dtype are its; else other."""
    preset = PRESETS[cfg.preset]
    task = ("data", "val_slice_tokens", "val_slices", "target", "dtype")
    same = all(getattr(cfg, name) == getattr(preset, name) for name in task)
    return cfg.track if same and num_microbatches(cfg, world_size) == preset.microbatches else "other"


def peak_memory() -> str:
    if torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB"
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"peak memory allocated: {kib >> 10} MiB"


def is_complete(log: Path) -> bool:
    return log.read_bytes().endswith(b"complete: yes\n")


def open_log(folder: Path | None, run_id: str, steps: int, seed: int, resumed: Checkpoint | None) -> RunLog:
    """Opens a run's log. Raises UserError if its record folder has a complete run with the same seed."""
    if folder and resumed:
        run_id = first = f"{run_id}.from{resumed.meta['step']}"
        n = 1
        while (folder / f"{run_id}.txt").exists():
            n += 1
            run_id = f"{first}_{n}"
    elif folder and folder.name != "attempts":
        for path in filter(is_complete, folder.glob(f"seed{seed}_*.txt")):
            raise UserError(f"{path} is a complete run with this seed; choose another --seed or --name")
    return RunLog(folder, steps, run_id)


def trace_steps(path: Path, first: int, log: RunLog) -> torch.profiler.profile:
    """Returns a profiler of steps first .. first + 3 that writes to `path`; it counts calls of step()."""

    def write(profiler) -> None:
        with explain(f"cannot write the trace {path}", "make room, or omit --profile", OSError, RuntimeError):
            path.parent.mkdir(parents=True, exist_ok=True)  # another machine's
            profiler.export_chrome_trace(str(path))
        log.print0(
            f"trace: {path}, and every rank's, for bench/timeline.py; writing it was on the clock", file=False
        )

    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=first - 1, warmup=1, active=4, repeat=1),
        on_trace_ready=write,
        # The thread that builds batches, too.
        experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True),
    )


def warm_up(data: Dataset, model: GPT, optimizer: Optimizer, val: ValLoader, prefetch: Exchange) -> None:
    """Runs a step of every kind, so that nothing is new on the clock; then all is as before the first."""
    before, cfg = training_state(model, optimizer), model.cfg
    loader = TrainLoader(cfg, data.train, prefetch.rank, prefetch.world_size)
    plans = [plan_step(cfg, step) for step in warmup_steps(cfg)]
    batches, one_round = Prefetcher(loader, plans, prefetch), min(cfg.val_slices, prefetch.world_size)
    for plan in plans:
        model.rotary.use_stage(plan.stage)
        validate(model, val, optimizer.exchange, plan.windows, one_round)
        batch = batches.next()
        AsyncLoss().push(plan.step, train_step(model, optimizer, batch, batches.peek))
        if optimizer.ngrams:
            optimizer.ngrams.reset(batch.rows["ngrams"].owned)
    loader.close()
    optimizer.finish_gathers()
    restore(before, model, optimizer)
    optimizer.gather_all()
    optimizer.exchange.sent.clear()
    prefetch.sent.clear()


def print_samples(model: GPT, vocabulary: Sequence[bytes], seed: int, log: RunLog) -> None:
    """Prints cfg.samples texts that follow BOS, if there is a vocabulary.

    All ranks must call it: rows of n-grams may be with any.
    """
    torch.manual_seed(seed)
    model.backend = TORCH_BACKEND  # there is nothing to compile for these lengths
    for _ in range(model.cfg.samples if vocabulary else 0):
        tokens = [model.cfg.bos_id]
        while len(tokens) <= 100:
            probs = (model.next_token_logits(tokens).cpu() / 0.8).softmax(0)
            tokens += probs.multinomial(1).tolist()
        text = b"".join(vocabulary[token] for token in tokens).decode("utf-8", "replace")
        log.print0(f"sample: {text!r}", file=False)


def run(args: argparse.Namespace, script: str) -> None:
    cfg = reduce(override, args.set, PRESETS[args.preset])
    if args.data:
        cfg = replace(cfg, data=args.data)
    if args.save and (not os.access(Path(args.save).resolve().parent, os.W_OK) or Path(args.save).is_dir()):
        raise UserError(f"--save {args.save}: give a file in a folder that can be written to")
    check_config(cfg, args.check or env_world_size())
    if args.profile and args.profile + 4 > cfg.steps:
        raise UserError(
            f"--profile {args.profile} traces steps {args.profile} to {args.profile + 3}, the run has steps "
            f"0 to {cfg.steps - 1}; give an earlier one"
        )
    if args.check:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        select_backend(cfg, device, world_size=args.check)
        ngrams = check_ngram_memory(cfg, args.check, device, args.check)
        if args.resume:
            Checkpoint.find(args.resume)
        if args.init:
            check_init(args.init, cfg)
        print(f"{args.check} process{'' if args.check == 1 else 'es'} could run this here")
        if ngrams:
            print(ngrams)
        return

    rank, world_size, device = init_distributed()
    backend = select_backend(cfg, device, world_size=world_size)
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world_size > 1 else None
    exchange = Exchange(rank, world_size, device=device)
    prefetch = Exchange(rank, world_size, group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    ngrams = exchange.run_on_all_ranks(check_ngram_memory, cfg, world_size, device, local)
    data = exchange.run_on_all_ranks(open_dataset, cfg)
    task = {
        "seed": args.seed,
        "processes": world_size,
        "data": data.fingerprint,
        "vocabulary": zlib.crc32(b"\n".join(data.vocabulary)),
        "config": dataclasses.asdict(replace(cfg, data="")),
    }
    versions = {"script": hashlib.sha256(script.encode()).hexdigest()[:16], "torch": torch.__version__}
    options = {  # with any of them a run counts for no track
        "--checkpoint-every": args.checkpoint_every,
        "--init": args.init,
        "--resume": args.resume,
        "--profile": args.profile,
    }
    setups = exchange.all_gather_object(task | versions | options)
    for other, setup in enumerate(setups):
        if diff := config_diff(setup, setups[0]):
            raise UserError(
                f"rank {other} differs from rank 0 (there, here): {diff}; start all machines with the same "
                "script, options, torch and data"
            )
    check = partial(check_schedule, cfg, data.train, world_size)
    exchange.run_on_all_ranks(check if rank == 0 else lambda: None)
    if args.init:
        task["init"], cfg = exchange.run_on_all_ranks(check_init, args.init, cfg)
    resumed = exchange.run_on_all_ranks(Checkpoint.find, args.resume) if args.resume else None
    if resumed and (diff := config_diff(resumed.meta["task"], task)):
        raise UserError(
            f"{resumed.path} is of another run (there, here): {diff}; give its options, its data and as many "
            "processes"
        )

    track = "other" if any(options.values()) else track_of(cfg, world_size)
    folder = Path("records", track, f"{date.today()}_{args.name}" if args.name else "attempts")
    run_id = f"seed{args.seed}_{uuid.uuid4().hex[:12]}"
    folder, run_id = exchange.all_gather_object((folder, run_id))[0]
    if resumed:
        folder, run_id = resumed.path.parents[1], resumed.path.parent.stem
    checkpoints = folder / f"{run_id}.checkpoint"
    with open_log(folder if rank == 0 else None, run_id, cfg.steps, args.seed, resumed) as log:
        log.print0(f"{script}\n{'=' * 100}", console=False)
        for line in describe_environment(device, world_size):
            log.print0(line)
        head = "fp8" if cfg.fp8 else cfg.dtype
        mlps = head if cfg.fp8_mlp else cfg.dtype
        log.print0(
            f"attention: {cfg.attention}; kernels: {', '.join(cfg.kernels) or 'none, plain torch'}; "
            f"head: {head}; MLPs: {mlps}; compiled: {'yes' if cfg.compile else 'no'}"
        )
        logged = config_json(replace(cfg, data=os.path.relpath(cfg.data)), name=args.name, seed=args.seed)
        log.print0(f"config: {logged}", console=False)
        count, usual = num_microbatches(cfg, world_size), PRESETS[cfg.preset].microbatches
        packing = f", packed in {count} micro-batches a batch, not {usual}: not the track's batches"
        log.print0(f"data: {data.fingerprint}{'' if count == usual else packing}")
        if ngrams:
            log.print0(ngrams)
        if args.init:
            log.print0(f"init: {os.path.relpath(args.init)} ({task['init']})")
        if resumed:
            line = f"resumed: {run_id} after step {resumed.meta['step']}"
            for name, version in versions.items():
                if resumed.meta[name] != version:
                    line += f"; {name} {resumed.meta[name]} wrote the checkpoint, this is {version}"
            log.print0(line)
        log.print0("=" * 100, console=False)

        save = partial(save_checkpoint, checkpoints, {"task": task, **versions})
        try:
            with contextlib.ExitStack() as traced:  # a failed run, too, writes what it has traced
                trace = None
                if args.profile:
                    profiler = trace_steps(folder / f"{run_id}.rank{rank}.trace.json.gz", args.profile, log)
                    trace = partial(traced.enter_context, profiler)
                every, more = args.checkpoint_every, (resumed, trace, args.init)
                model, summary = train(
                    cfg, backend, exchange, prefetch, data, args.seed, log, every, save, *more
                )
        except (RuntimeError, MemoryError) as e:
            is_full = isinstance(e, (MemoryError, torch.OutOfMemoryError))
            if not is_full and "can't allocate memory" not in str(e):
                raise
            raise UserError(
                f"out of memory: {first_line(e)}; use more processes, or shrink what grew last (head_chunk, "
                "batch_tokens, the model)"
            ) from None
        for key, value in summary.items():
            log.print0(f"{key}: {value}", console=False)
        log.print0("complete: yes", console=False)
    if args.save:
        done = f"the run itself is complete, its log is {log.path}"
        with explain(f"--save {args.save}", done, OSError, RuntimeError):
            save_model(args.save, model, rank)
    print_samples(model, data.vocabulary, args.seed, log)
    if rank:
        return
    with contextlib.suppress(OSError):  # there is nothing left to resume
        shutil.rmtree(checkpoints.rename(checkpoints.with_suffix(".partial")))
    logs = Path("records", track).glob("[0-9]*/seed*.txt")
    earlier = sorted({path.parent for path in logs if path.parent != folder and is_complete(path)})
    python, per_byte = sys.executable.removeprefix(os.getcwd() + os.sep), summary.get("val_loss_per_byte")
    log.print0(
        f"\nvalidation loss  {float(summary['val_loss']):.4f} nats per token"
        f"{f', {float(per_byte):.4f} per byte' if per_byte else ''}\n"
        f"training time    {int(summary['train_time_ms']) / 1000:.1f} s, {cfg.steps} steps, "
        f"{train_tokens(cfg):,} tokens\n"
        f"log              {log.path}\n"
        f"compare          {python} records/compare.py {f'{earlier[-1]} ' if earlier else ''}{log.path}"
        + (f"\ngenerate         {python} evals/generate.py {args.save}" if args.save else ""),
        file=False,
    )


def train(
    cfg: Config,
    backend: Backend,
    exchange: Exchange,
    prefetch: Exchange,
    data: Dataset,
    seed: int,
    log: RunLog,
    every: int | None = None,
    save: Callable | None = None,
    resumed: Checkpoint | None = None,
    trace: Callable | None = None,
    init: str | None = None,
) -> tuple[GPT, dict]:
    """Builds the model, warms up, trains against the clock. Returns the model, and the log's closing lines.

    `prefetch` is for the thread that builds batches. `save(progress, model, optimizer)` keeps a checkpoint
    after every `every` steps, if that is given; `resumed` is one to go on from. `trace()` starts a profiler,
    whose step() ends every step. `init` is a saved model to start from.
    """
    model = GPT(cfg, exchange.world_size, exchange.device, seed, backend)
    optimizer = Optimizer(cfg, dict(model.named_parameters()), exchange, backend)
    optimizer.gather_all()  # what other machines drew may differ in the last bits
    model.ngrams = optimizer.ngrams
    val = ValLoader(cfg, data.val)

    # Warm up, reset.
    if cfg.warmup:
        if cfg.compile:
            log.print0("compiling, off the clock: minutes at the first start", file=False)
        began = time.perf_counter()
        warm_up(data, model, optimizer, val, prefetch)
        steps = " ".join(map(str, warmup_steps(cfg)))
        log.print0(f"warm-up: steps {steps} took {time.perf_counter() - began:.1f} s and was undone")
    first, train_ms, position = 0, 0.0, (0, 0, 0)
    if resumed:
        exchange.run_on_all_ranks(resumed.load, model, optimizer)
        optimizer.gather_all()
        first, train_ms, position = (resumed.meta[key] for key in ("step", "train_ms", "position"))
    elif init:
        exchange.run_on_all_ranks(start_from, init, model, optimizer)
    losses, clock = AsyncLoss(), Clock(train_ms)
    gc.collect()  # what building and warm-up left behind is not collected on the clock,
    gc.freeze()  # nor searched again

    # Train. The clock runs except while validating and saving; the loader opens its first shard on it.
    profiler = trace() if trace else None
    clock.start()
    loader = TrainLoader(cfg, data.train, exchange.rank, exchange.world_size, position)
    batches = Prefetcher(loader, (plan_step(cfg, step) for step in range(first, cfg.steps)), prefetch)
    if cfg.predicts_prefixes:
        model.prefixes.copy_(prefix_table(data.vocabulary, cfg.padded_vocab))
    for step in range(first, cfg.steps + 1):
        done = step == cfg.steps
        if done or validates(cfg, step):
            clock.stop()
            losses.poll(wait=True)
            windows = window_tokens(cfg, cfg.val_windows)
            if not done:
                plan = plan_step(cfg, step)
                windows = plan.windows
                model.rotary.use_stage(plan.stage)
            val_loss = validate(model, val, exchange, windows)
            if not math.isfinite(val_loss):
                fix = "undo what was changed last, learning rates first"
                raise UserError(f"the validation loss is {val_loss} at step {step}; {fix}")
            log.print0(
                f"step:{step}/{cfg.steps} val_loss:{val_loss:.4f} train_time:{clock.ms:.0f}ms "
                f"step_avg:{clock.ms / max(step, 1):.2f}ms"
            )
            clock.start()
        if done:
            break
        batch = batches.next()
        n = step + 1  # as the log counts
        losses.push(n, train_step(model, optimizer, batch, batches.peek))
        losses.poll()
        if profiler:
            profiler.step()
        elapsed = clock.read()
        line = f"step:{n}/{cfg.steps} train_time:{elapsed:.0f}ms step_avg:{elapsed / n:.2f}ms"
        at, loss = losses.latest
        log.print0(line + (f" train_loss:{loss:.4f}@{at}" if at else ""), console=False)
        log.progress(n, loss, elapsed)
        if every and n % every < 2 and batch.plan.do_adam and n < cfg.steps:  # no gradients are pending then
            clock.stop()
            losses.poll(wait=True)
            save({"step": n, "train_ms": clock.ms, "position": batch.position}, model, optimizer)
            log.print0(f"checkpoint: after step {n}", console=False)
            clock.start()
    loader.close()
    gc.unfreeze()

    log.print0(peak_memory())
    summary = {
        "val_loss": f"{val_loss:.6f}",
        "train_time_ms": f"{clock.ms:.0f}",
        "steps": cfg.steps,
        "tokens": train_tokens(cfg),
        "seed": seed,
    }
    if resumed:
        summary["resumed_after_step"] = first
    sent = exchange.sent | {f"prefetch {what}": nbytes for what, nbytes in prefetch.sent.items()}
    summary |= {f"bytes sent by rank 0, {what}": nbytes for what, nbytes in sorted(sent.items())}
    if data.bytes_per_token:
        summary["val_loss_per_byte"] = f"{val_loss / data.bytes_per_token:.6f}"
    return model, summary


def claim_report(error: UserError) -> bool:
    """Returns True on exactly one rank, the first to report. A PeerFailure counts only if no rank has
    reported a cause.

    Ranks meet in the store that torchrun keeps for them.
    """
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, timeout=timedelta(seconds=10))
        else:
            return True
        is_first = store.add("reports", 1) == 1
        return is_first if isinstance(error, PeerFailure) else store.add("causes", 1) == 1
    except RuntimeError:  # the store is gone: better reported twice than not at all
        return True


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None when the shell closed it
    try:
        run(parse_args(argv), Path(__file__).read_text(encoding="utf-8"))
    except UserError as e:
        if claim_report(e):
            print(f"train_gpt.py: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end this in a traceback
        if claim_report(UserError("interrupted")):
            print("train_gpt.py: interrupted", file=sys.stderr)
        return 130
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    if status:  # at once: what is left of this process may wait for ranks that no longer answer
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
