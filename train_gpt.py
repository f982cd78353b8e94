"""
A NanoGPT speedrun in one file. It trains a GPT-2-small-class language model on FineWeb to a validation loss
of 3.28 nats per token, in as little time as possible on 8 H100s. Smaller presets run the same code on two
cores in plain PyTorch, without some of the techniques.

    torchrun --standalone --nproc_per_node=8 train_gpt.py                # the record preset: 8 GPUs, FineWeb
    torchrun --standalone --nproc_per_node=2 train_gpt.py --preset cpu   # the cpu preset: no GPU
    python train_gpt.py -h

Results
    cpu preset     1.054 nats per token on the Python library's own text (a 4-gram model has 1.47): mean of 10
                   runs of 160 steps, 25 s each on two cores of an AMD EPYC, PyTorch 2.13
    record preset  no whole run yet. It combines the configuration of the public record 92 (39.9 s on 8
                   H100s) with the copy pointer and the schedule of PR 379 (36.0 s). docs/settings.md says
                   what it lacks

The words preset uses GPT-2's tokens on two cores, to test what depends on the vocabulary.

What you edit
     1  Settings      layers, parameters and stages; the other settings; the presets
     2  Shapes        layers' scalars and gates; parameters' shapes and initial values
     3  Schedule      plan_step(cfg, step): windows, batch size, learning rate, loss weights of one step
A step and the model
     4  Helpers       errors that a user can fix, labels in traces, compiled functions, dtypes
     5  Step          what a batch holds; train_step, forward_backward, validate
     6  Loop          train(), the timed loop around the step; warm-up, clock
     7  Model         GPT: embeddings, layers, head
Operations, each in plain torch, some with a Triton kernel
     8  Linear        products with a bank's matrices, whose gradients go into main_grad
     9  Layers        norm, sums of streams, rotary embedding, attention
    10  FP8           scales, casts, products
    11  MLP           squared ReLU
    12  Loss          softcapped cross-entropy, mixed with the copy pointer; the pointer
    13  Row sums      sums of looked-up rows of tables, and of their gradients
    14  Backend       the choice of operations, compilation, CUDA graphs
Updates, spread over ranks
    15  Collectives   collective operations of one process group
    16  Optimizer     scatter, update and gather of all that is trained, in explicit orders; its state
    17  Parameters    the objects that are updated: their gradients, updates and averages
    18  Update rules  Adam and ANVIL, on one block
    19  Touched rows  which rows of tables a batch reads; the exchange of their gradients between ranks
    20  N-grams       from tokens to rows of a table; the table, its update rule
A run
    21  Data          shards, prefixes of tokens, micro-batches that begin with a document, batches that a
                      thread builds ahead
    22  Overrides     settings by the names that --set takes; presets by name
    23  Command line  options
    24  Checks        what settings must satisfy
    25  Files         the log, saved models, checkpoints, what must be the same to resume a run
    26  Run           processes; build, closing lines, samples; run() is the whole story

`grep -nE '^# [0-9]+  ' train_gpt.py` lists the sections with their lines. For a single step read plan_step,
train_step, forward_backward, GPT.trunk and Optimizer.step; for a whole run read run(), prepare() and train().

The algorithm follows record 92 of the public NanoGPT speedrun (github.com/KellerJordan/modded-nanogpt).
Sources are named where a technique is computed: "PR 130" is a pull request there, "record 9" an entry of its
table of records. docs/glossary.md explains the terms.

In shapes and formulas
    T          tokens of a micro-batch
    d = H * D  the model's width: H heads of width D; Dq and Dv: widths of a head's queries and values
    F          the MLP's width (in code, F is torch.nn.functional)
    L          layers
    V          columns of the head: the padded vocabulary
    P          columns that a sampled softmax computes
    K          targets of one token
    R          rows of n-grams, or of bigrams, of one token
    M, N, K    in kernels of matrix products: the product's sizes
    a b        a times b
    [a > b]    1 if the condition holds, else 0

Words
    stream        the residual stream. It begins as x0, the smeared and normed token embeddings; if layer 0
                  has `ngram`, a gated share of the n-grams' sum is added to x0 before that layer
    bank          a stack of matrices of equal shape
    main_grad     our own buffer for a parameter's gradient, summed from one update to the next
    block         the part of a parameter that a rank updates
    touched rows  of a table: those that batches have looked up since the table's last update
    copy gate     the head's first padding column. Its softmax is the weight of the copy pointer
    tick          moves a running average of a parameter towards the parameter, after certain steps only
    ANVIL         the optimizer of the banks, a descendant of Muon (section 18)
    MUDD          mixes earlier streams into later ones, with weights that small MLPs compute per token (7)
    untie step    up to this step the token embedding embed is the transpose of lm_head
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import fcntl
import fnmatch
import gc
import hashlib
import json
import math
import os
import pickletools
import platform
import re
import resource
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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cache, lru_cache, partial, wraps
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

# Read the source before anything slow happens: the log must hold the code that runs, not a later edit.
SOURCE = Path(__file__).read_bytes()

if __name__ == "__main__" and sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
    # PR_SET_PDEATHSIG: this process ends when torchrun is killed, even while it still imports torch.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.distributed.elastic.multiprocessing.errors import record as elastic_record
    from torch.utils._pytree import tree_leaves, tree_map_only
    from tqdm import tqdm
except (ImportError, AttributeError) as error:
    # AttributeError: for example, a file json.py here hides Python's json.
    raise SystemExit(
        f"train_gpt.py: {error}; ./run.sh installs what is missing; a file here with a module's name must go"
    ) from None

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # PyTorch's CPU build has no Triton; kernels are then functions that nothing calls
    triton = None
    tl = SimpleNamespace(constexpr=float)  # so that tl.constexpr(...) at module level works

    def jit(function=None, **options):
        return function or jit


# ============================================================================================================
# 1  Settings
# ============================================================================================================

DType = Literal["bfloat16", "float32", "float64"]
Context = Literal["word", "above", "copy"]  # the keys of CONTEXTS (section 20)
# The keys of KERNELS (section 14).
Kernel = Literal["relu_square", "cast_and_transpose", "softcap_loss", "pointer", "segment_sum_rows"]
# Number types with the range that --set accepts. A number without a range must be finite and not negative.
Positive = Annotated[int, 1, 2**31 - 1]
Fraction = Annotated[float, 0, 1]
# Config.length rescales every field of these two types, which rescale() recognizes by their last item. A
# TickRate is the fraction by which a WeightAverage moves at each tick. Decay rates of gradients (betas,
# slow_rate) are Fractions and are not rescaled, nor are intervals (val_every, WeightAverage.every).
Steps = Annotated[int, 0, 2**31 - 1, "steps"]
TickRate = Annotated[float, 0, 1, "rate"]


@dataclass(frozen=True)
class Layer:
    """An entry of Config.layers: the parts of one layer."""

    # paired: two heads share one sequence of twice the length. Empty: the layer does not attend.
    attention: Literal["plain", "paired", ""] = "plain"
    # A field of Windows, to which the rotary embedding is adapted.
    window: Literal["short", "long"] = "short"
    # Less width is enough at short range (record 92).
    narrow_qk: bool = False  # queries and keys are half as wide as a head
    narrow_v: bool = False  # values are half as wide as a head
    # Half of each key comes from the token before. Only in plain layers without narrow_qk.
    key_shift: bool = False
    value: bool = False  # a value embedding, from its own part of value_embeds, is added to the values
    # Exclusive self-attention: each head's output loses its component along its own token's value. Only in
    # plain layers.
    xsa: bool = False
    gate: bool = False  # each head's output is gated
    x0: bool = False  # a gated share of x0 is added to the stream
    # A gated share of the n-grams' sum is added to the stream; in layer 0 before attention reads it.
    ngram: bool = False
    mlps: int = 1  # number of MLPs; all read the same input
    # MUDD: a small MLP computes weights per token. Earlier streams, multiplied by these weights, are added to
    # this layer's values and to its stream. Only one layer may have it, and only with `value`.
    mudd: bool = False


# Record 92's layers.
LAYERS = (
    Layer("paired", narrow_qk=True, x0=True, ngram=True),  # 0
    Layer("plain", narrow_qk=True, narrow_v=True, value=True, xsa=True, x0=True, ngram=True),  # 1
    Layer("paired", narrow_qk=True, value=True, x0=True),  # 2
    Layer("plain", "long", key_shift=True, xsa=True, gate=True),  # 3
    Layer("", x0=True, ngram=True),  # 4
    Layer("paired", narrow_qk=True, x0=True, ngram=True),  # 5
    Layer(""),  # 6
    Layer("", x0=True, mlps=0),  # 7
    Layer("plain", narrow_qk=True, narrow_v=True, value=True, mlps=2),  # 8
    Layer("", ngram=True),  # 9
    Layer("plain", "long", key_shift=True, value=True, gate=True, mudd=True),  # 10
)

# The streams of the record preset. GPT.trunk saves streams under the names in quotes.
#
#   x0              norm of the smeared embeddings
#   "ngram"         the n-grams' sums; a gated share of them is added before layer 0: then x is "start"
#   "value 0" ..    the value embeddings, one for each layer that has one
#   layers 0 .. 3   attention of norm(x), MLP of norm(x); then x is "skip"
#   layer 4         no attention; MLP
#   layer 5         attention, MLP
#   layer 6         a gated share of "skip" is added first; no attention; MLP
#   layer 7         no attention, no MLP; then x is "backout", and its norm is "normed backout"
#   layer 8         attention of "normed backout", two MLPs of norm(x)
#   layer 9         no attention; MLP; then x is "mudd"
#   layer 10        MUDD adds x, "start" and "backout" to the values, then replaces x by a sum of the three,
#                   each with its own weights; attention of "normed backout", and with its output "start"
#                   and "ngram", weighed by MUDD; MLP of norm(x), which is "mudd mlp"
#   lm_head         norm(x + the sum of lm_head_streams, each times weights per token and group of channels)


@dataclass(frozen=True)
class Windows:
    """Attention windows, in units of Config.window_unit tokens before the query's own.

    In paired layers a window counts rows, two per token, and so reaches half as far. To add a third window,
    add a field here, with a default for the stages and the val_windows that do not name it, and add its name
    to Layer.window.
    """

    short: Positive
    long: Positive


TokenWindows = dict[str, int]  # Windows in tokens, by name


@dataclass(frozen=True)
class Softcap:
    """Caps the logits x: they become scale * sigmoid((x + shift) / span).

    This bounds the logits and keeps gradients small (record 9; Gemma 2, arXiv:2408.00118). The defaults leave
    more room below than above: at any position most tokens are implausible, and their logits lie far below
    those of the few plausible ones (PR 181). Softcap(30, 0, 7.5) is symmetric: it is 15 tanh(x / 15) plus a
    constant, which cancels in the softmax.
    """

    scale: Annotated[float, 1, 77] = 23.0  # the sum of exp(77) over 50,304 columns is finite in fp32
    shift: float = 5.0
    span: Annotated[float, 1, 1e3] = 7.5


SOFTCAP = Softcap()


# How often a parameter is updated: (early, late) numbers of steps from one update to the next, before
# Config.late_updates_from and from that step on. Gradients are summed in between. The betas and decay of Adam
# and of the n-grams are stated for the early interval; ANVIL's are not adapted to the interval.
#
# Updating Adam's parameters every second step halves the embeddings' traffic and hardly changes the loss (PR
# 136). Later every fourth step is enough for value_embeds and the n-grams (PR 360). Gradients of the run's
# last steps are lost if no update follows.
UpdateIntervals = tuple[Literal[1, 2, 4], Literal[1, 2, 4]]
UPDATE_PERIOD = 4  # every interval divides it, so no gradient awaits its update after a multiple of it


@dataclass(frozen=True)
class ParamSpec:
    """An entry of PARAMS: how one parameter is trained.

    A line of param_inits() has its shape and initial value.
    """

    name: str
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    # Where the gradient comes from:
    #   small      autograd. Small parameters with equal optimizer, betas, dtype, update_every and reduction
    #              are exchanged and updated as one vector. GPT's methods read them as self.NAME.
    # Our own code writes the gradients of the other kinds to main_grad (the banks' only with
    # Config.main_grad), and autograd does not see these parameters. So GPT's methods read them only where the
    # following says:
    #   head       lm_head. In training only head_loss_and_grad() reads it.
    #   bank       a stack of matrices, padded so that each rank owns the same number. GPT.layer_weights()
    #              gives them to the layers; the backward of each product writes the gradient.
    #   embedding  a table in which each token looks up rows. GPT.trunk finds the rows in looked_up[NAME];
    #              Optimizer.add_looked_up_grads() adds their gradients.
    kind: Literal["small", "head", "bank", "embedding"] = "small"
    # For embeddings: the MicroBatch field that holds the ids of the rows. inputs: one row per token.
    # hashed_rows: the rows of bigram_embed, or of the n-gram table. To look up rows by other ids, name their
    # field here, add it with a default to MicroBatch, and fill it in make_micro_batch(). Then add a line to
    # SEGMENT_MAKERS and a look-up to GPT.look_up, which handles only `inputs` by itself.
    rows_by: Literal["", "inputs", "hashed_rows"] = ""
    # How gradients reach the rank that owns a block. reduce_scatter: the whole gradient is exchanged. sparse:
    # only the rows that were touched since the last update.
    exchange: Literal["reduce_scatter", "sparse"] = "reduce_scatter"
    # Parameters are updated and gathered in ascending order of this number, so that a gather overlaps with
    # the next parameters' updates. No result depends on the order.
    update_order: int = 0
    optimizer: str = "adam"  # a name in UPDATE_RULES
    betas: tuple[Fraction, Fraction] = (0.90, 0.99)  # Adam's
    update_every: UpdateIntervals = (2, 2)
    # model: Config.dtype. float32: fp32, or fp64 in an fp64 model.
    dtype: Literal["model", "float32"] = "model"
    # How the ranks' gradients are summed. collective: by NCCL or gloo, in the gradient's dtype. fp32: after
    # an all-to-all, in fp32 and in rank order (sparse always does this).
    reduction: Literal["collective", "fp32"] = "collective"
    matrix_lr_mul: tuple[float, ...] = ()  # ANVIL: learning-rate factors of successive matrices, repeating


# fmt: off
bank_spec = partial(ParamSpec, kind="bank", update_order=4, optimizer="anvil", update_every=(1, 1))

# Gradients are exchanged in this order, except that the n-grams' come first and the small parameters' last.
# The order of updates is n-grams (-1), small (0), bigram_embed, lm_head, embed, banks (4), value_embeds.
# Names and most numbers are record 92's where it has the parameter.
PARAMS = (
    bank_spec("qk_bank"),
    bank_spec("narrow_qk_bank"),
    bank_spec("vo_bank"),
    bank_spec("mlp_bank", matrix_lr_mul=(1.0, 2.0)),  # factors of fc and proj
    # ve_gate_bank and pointer_bank are also stacks of matrices, but small ones: their kind is not "bank".
    #         name              lr_mul wd_mul kind       rows_by        exchange
    ParamSpec("scalars",          5.00,   0, dtype="float32"),
    ParamSpec("smear_gate",       0.01,   0),
    ParamSpec("ve_gate_bank",     1.00,   1),
    # Two small MLPs, mudd_*, compute weights of streams; two others, mudd_gate_*, gates (see TO_LAYER).
    ParamSpec("mudd_w1",          0.25,   1),
    ParamSpec("mudd_w2",          0.25,   1),
    ParamSpec("mudd_b2",          0.25,   0),
    ParamSpec("mudd_gate_w1",     0.10,   1),
    ParamSpec("mudd_gate_w2",     0.10,   1),
    ParamSpec("mudd_gate_b2",     0.10,   0),
    ParamSpec("mudd_gate_scale",  0.10,   0, dtype="float32"),
    ParamSpec("post_lambdas",     1.00,   0, dtype="float32", betas=(0.90, 0.95)),
    ParamSpec("resid_lambdas",    5.00,   0, dtype="float32", betas=(0.90, 0.95)),
    ParamSpec("pointer_bank",     1.00,   1),
    ParamSpec("pointer_gain",     1.00,   0, dtype="float32"),
    ParamSpec("pointer_sink",     1.00,   0, dtype="float32"),
    # lm_head and embed need the same optimizer, because untie() copies its state. It must be able to update
    # some rows without the others, because a rank's block is only some of the rows.
    ParamSpec("lm_head",          1.00, 150, "head",      update_order=2, betas=(0.50, 0.95)),
    ParamSpec("bigram_embed",    75.00,   5, "embedding", "hashed_rows", "sparse", update_order=1,
              betas=(0.75, 0.95)),
    ParamSpec("value_embeds",    70.00,   5, "embedding", "inputs",      "sparse", update_order=5,
              betas=(0.75, 0.95), update_every=(2, 4)),
    # Until the untie step embed is the transpose of lm_head.
    ParamSpec("embed",            1.00, 150, "embedding", "inputs",      "sparse", update_order=3,
              betas=(0.50, 0.95)),
)
# fmt: on


@dataclass(frozen=True)
class WeightAverage:
    """An entry of Config.averages: a running average of parameters. At the end it replaces the parameters'
    last values or is mixed with them.

    Averages remove noise while the learning rate is still high, so a run needs less of a cooldown (record 92,
    PR 360). The table of n-grams has no average.
    """

    params: tuple[str, ...]  # names of banks, tables and lm_head; those that the model lacks are ignored
    window: Steps  # the average ticks only in the last `window` steps; 0: never
    # Each tick moves the average by this share towards the parameter; the first tick is a copy. With
    # 2 / (n + 1) the average is about the mean of the last n ticks.
    rate: TickRate
    blend: Fraction = 1.0  # at the end the parameter moves by this share towards the average
    # If n steps are left after a step (0 after the last), the average ticks if n % every == offset or n is in
    # `also`.
    every: Positive = 1
    offset: int = 0
    also: tuple[Steps, ...] = ()
    last_rate: TickRate = 0.0  # rate of the last tick; 0: `rate`
    # Averaging shrinks a parameter's norm. If any average of a parameter has keep_norm, the parameter's old
    # norm is restored after all its averages are applied.
    keep_norm: bool = True


# Record 92's averages. Some parameters have two, which run independently. At the end the parameter moves
# towards the first average, and from there towards the second. With n steps left after a step:
#   lm_head, embed  change only where n is even (every=2). One tick stands for two of the record's, which have
#                   the rate r = 2 / 299, and moves the average as far: its rate is 1 - (1 - r)^2. The last
#                   tick, at n = 0, stands for one step (last_rate=r). The first, which copies, follows the
#                   window's first step (also=(297,))
#   also=(1,)       adds a tick after the last step but one, as in the record
# fmt: off
AVERAGES = (
    #              parameters                    window  rate                     blend
    WeightAverage(("lm_head", "embed"),          298,    1 - (1 - 2 / 299) ** 2,  0.65, every=2, also=(297,),
                  last_rate=2 / 299),
    WeightAverage(("vo_bank", "mlp_bank"),       250,    4 / 53,                  1.0, every=4),
    WeightAverage(("value_embeds",),             250,    4 / 53,                  1.0, every=4, offset=2,
                  keep_norm=False),
    WeightAverage(("qk_bank", "narrow_qk_bank"), 298,    2 / 75,                  0.55, every=4, also=(1,)),
    WeightAverage(("vo_bank", "mlp_bank"),       298,    2 / 75,                  0.3493, every=4, also=(1,)),
)
# fmt: on


@dataclass(frozen=True)
class Ngrams:
    """The table of hashed n-grams. A step touches few of its rows. Without orders there is no table."""

    orders: tuple[int, ...] = ()  # 2: bigrams. With any order, bigram_embed does not exist
    rows_per_order: Annotated[int, 2, 2**31 - 1] = 42301440
    width: Positive = 768  # columns, at most the model's width: rows are added to the stream's first channels
    dtype: DType = "bfloat16"  # rounds small updates away: see merge_mantissa()
    update_every: UpdateIntervals = (2, 4)
    lr: float = 0.56
    beta2: Fraction = 0.95  # decay of a row's second moment over one early interval of update_every
    wd: float = 0.025
    # Each context adds one row per token (section 20), chosen by the word so far (word), by the byte one line
    # up, in the column of the next byte (above), or by what followed the same tokens earlier (copy). word and
    # above are for bytes. Without orders there are no contexts.
    contexts: tuple[Context, ...] = ()

    @property
    def rows_per_token(self) -> int:  # each from a range of rows_per_order rows
        return len(self.orders) + len(self.contexts)


@dataclass(frozen=True)
class Stage:
    """An entry of Config.stages: how the run trains for some steps. plan_step() reads it."""

    steps: Steps
    batch_tokens: Positive  # over all ranks and micro-batches
    max_doc_len: Positive  # longer documents are truncated to this length
    # Windows are constant within a stage, and rotary tables follow them. To change windows within a stage,
    # edit plan_step(), GPT.use_rotary and its callers and, with dense attention or CUDA graphs,
    # warmup_ranges().
    windows: Windows
    lr_mul: float  # the cooldown ends at the last stage's value
    # Loss weights of the next, second next and third next token; the last of several weights falls to 0 over
    # the stage. Later tokens teach more while there is much to learn; at the end only the next token counts
    # (PR 178; Gloeckle et al. 2024, arXiv:2404.19737).
    mtp: tuple[float, ...] = (1.0,)
    # Weights of the loss on prefixes, each for an equal part of the stage. The target is the longest token
    # that is a proper prefix of the next token: "run" for "running". It is easier to predict, and so teaches
    # early (record 88).
    prefix: tuple[float, ...] = ()
    # Sampled softmax (record 92): how many columns of the head a micro-batch computes, each number for an
    # equal part of the stage. The columns are its targets and others in rotation. Empty, or 0: all.
    sampled_columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Config:
    """Holds one run's settings. The defaults are the 1050-step record preset; other presets are copies, made
    with `replace`.

    For a new switch of the model, also add an entry to PARTS in tests/test_switches.py; for a new number, one
    to ADDED in evals/saved_model.py, for models saved before. Constants that are not settings are defined
    where they are used: GATE_DIM, MUDD_SCALE and initial values, untie_step(), ROTARY_BASE, YARN_*, FP8_*,
    PROB_FLOOR, ANVIL_MAPS, ROW_EPS, COPY_LENGTHS.
    """

    # ---- Data and goal.
    preset: str = "record"
    track: str = "gpt2-small"  # folder in records/ for this preset's runs
    data: str = "data/fineweb10B"  # folder with *_train_*.bin and *_val_*.bin
    target: float = 3.28  # mean validation loss, nats per token, that a record must reach
    val_slice_tokens: Positive = 262144  # tokens of one validation forward
    val_slices: Positive = 40
    # Validate before step 0, after every val_every steps, and at the end; 0: only at the end.
    val_every: int = 250
    samples: int = 3  # texts of 100 tokens, printed after the run if the data has a vocabulary.txt; 0: none
    # ---- The model.
    vocab_size: Positive = 50257
    # Rows of embedding tables and columns of the head. The head's padding columns train like the rest.
    padded_vocab: Positive = 50304
    bos_id: int = 50256
    # Rows of bigram_embed, which only a model without n-grams has.
    bigram_vocab_size: Annotated[int, 2, 2**31 - 1] = 50304 * 15 // 2
    ngrams: Ngrams = Ngrams((2, 3))
    # Rows of random signs, which multiply the rows of bigrams or n-grams; 0: none.
    sign_rows: Annotated[int, 0, 65536] = 8192
    heads: Positive = 6
    head_dim: Positive = 128
    mlp_dim: Positive = 2816
    layers: tuple[Layer, ...] = LAYERS
    # As in a U-net, the stream that left layer skip_from is added before layer skip_to (record 11), if layer
    # skip_to exists. In layers after backout_from, attention reads the norm of the stream that left layer
    # backout_from.
    skip_from: int = 3
    skip_to: int = 6
    backout_from: int = 7
    mudd_gates: bool = True  # small MLPs compute gate_table()'s gates per token; false: learned constants
    mudd_weights: bool = True  # the same for MUDD's weights
    mudd_dim: Positive = 64  # hidden width of these MLPs
    mix_groups: Positive = 12  # groups of channels that the mix before the head weighs separately
    softcap: Softcap = SOFTCAP
    # The copy pointer attends to earlier tokens of the document. Its result is mixed with the head's softmax
    # (section 12).
    pointer_dim: int = 128  # width of its queries and keys; 0: no pointer
    pointer_window: Positive = 2560  # how many tokens it looks back in training
    pointer_val_window: Positive = 16384  # the same in validation and samples
    window_unit: Positive = 128
    # In training, attention and the copy pointer split documents longer than this into pieces of this length,
    # and see no earlier piece; 0: they split none.
    attention_cap: int = 2560
    # Attention windows of the final validation and of samples.
    val_windows: Windows = Windows(6, 20)
    # Softmax scales of heads with wide and with narrow queries, before any window grows.
    attn_scale: float = 0.085
    narrow_attn_scale: float = 0.13
    dtype: DType = "bfloat16"  # dtype of weights and activations
    # ---- The schedule. `--set length=0.5` halves every field of type Steps, such as the stages' steps, and
    # adapts every TickRate. It rescales what earlier settings on the command line have set; later settings
    # are taken as they are. Editing this default rescales only the record preset.
    length: Annotated[float, 1e-3, 1e3] = 1.0
    # Batches and windows grow (PR 163, record 13). Small batches learn fast while gradients agree; large
    # batches average out noise later. At the end batches shrink again. The last stage trains at the rate at
    # which the cooldown ends. The numbers are PR 379's.
    # fmt: off
    stages: tuple[Stage, ...] = (  # they begin at steps 0, 279, 593, 971 and 1030
        #   steps  batch  docs   windows         lr_mul  mtp        prefix
        Stage(279, 131072,  896, Windows(1,  3), 1.00, (1.0, 0.5, 0.25), (.25,), sampled_columns=(10240,)),
        Stage(314, 262144, 2048, Windows(3,  7), 1.52, (1.0, 0.5), (.20, .15, .10, .05),
              sampled_columns=(10240,)),
        Stage(378, 393216, 3072, Windows(5, 11), 1.73, sampled_columns=(14336, 14336, 24576)),
        Stage( 59, 327680, 3072, Windows(5, 11), 1.5793),  # 1.73 * sqrt(327680 / 393216)
        Stage( 20, 131072, 3072, Windows(6, 13), 0.30),
    )
    # fmt: on
    # Micro-batches in a global batch, at least one per rank. Other numbers pack documents differently.
    microbatches: Positive = 8
    # The cooldown is this share, the last, of the steps before the last stage. In it lr_mul moves linearly
    # from the stage's value to the last stage's.
    cooldown_frac: Fraction = 0.80
    # ---- Numbers of steps that fit the stages above. They do not change with the stages: if you edit the
    # stages' steps, keep these at the same share of the run. `--set length` rescales both.
    late_updates_from: Steps = 336  # from this step on every update_every is its second number
    # ANVIL's momentum rises from min to max (below), and falls again at the end. While the loss falls fast,
    # old gradients mislead (record 9).
    momentum_warmup: Steps = 240  # steps from min to max
    momentum_cooldown: Steps = 50  # last steps, back towards min
    two_momenta_from: Steps = 514  # the first step with ANVIL's two momenta (below)
    averages: tuple[WeightAverage, ...] = AVERAGES  # parameters move towards them at the end, in this order
    # ---- The optimizers.
    params: tuple[ParamSpec, ...] = PARAMS
    # Adam, for all parameters except the banks.
    adam_lr: float = 0.008  # times ParamSpec.lr_mul and the scheduled StepPlan.lr_mul
    adam_eps: float = 1e-10
    # An update's weight decay is adam_wd * ParamSpec.wd_mul * (its learning rate)^2, times
    # StepPlan.interval_ratio(), which is 1 until updates become rarer.
    adam_wd: float = 0.005
    # ANVIL, for the banks (section 18).
    bank_lr: float = 0.023
    bank_wd: float = 2.25
    bank_beta2: Fraction = 0.9
    bank_dtype: DType = "bfloat16"  # dtype of the momentum's orthogonalization and of its result
    # A matrix is first divided by bank_margin times its norm, so that no singular value is above
    # 1 / bank_margin. ANVIL's maps diverge above 1 / 1.05, so record 92's 1.05 leaves no room for bf16's
    # rounding.
    bank_margin: Annotated[float, 1.05, 10] = 1.06
    momentum_min: Fraction = 0.85  # the least momentum of Nesterov's rule
    momentum_max: Fraction = 0.93  # the largest
    # ANVIL keeps a fast and a slow running average of the gradients. Before step two_momenta_from Nesterov's
    # rule takes only the fast one, which decays by the momentum; the slow one only decides where weight decay
    # acts. From that step on the rule takes a weighted mean of both: the fast one has the weight fast_weight
    # and decays by fast_beta. Each step moves the slow one by slow_rate.
    fast_beta: Fraction = 0.85
    fast_weight: Fraction = 0.4385
    slow_rate: Fraction = 0.02
    # ---- How the run computes. These change speed, memory and rounding, not the algorithm, except that FP8
    # also rounds small activations and gradients to 0.
    warmup: bool = True  # rehearse every kind of step off the clock, then reset
    # The banks' gradients are written in place, as the head's and the tables' always are. false: autograd
    # sums the banks' gradients.
    main_grad: bool = True
    # The head processes this many tokens at once. A larger number needs more memory, a smaller one more
    # launches. With sampled columns it processes more tokens, so that the number of logits stays about equal.
    head_chunk: Positive = 8192
    kernels: tuple[Kernel, ...] = typing.get_args(Kernel)  # operations done by Triton kernels
    # dense: plain torch; varlen: torch's FlashAttention; fa3: FlashAttention-3
    attention_impl: Literal["dense", "varlen", "fa3"] = "varlen"
    fp8: bool = True  # the head's matmuls in 8 bits, in training
    fp8_mlp: bool = True  # with fp8, also the MLPs' matmuls, forward and backward
    # On a CPU with matrix instructions (AMX) the MLPs' products are in bf16. On other CPUs bf16 is at best
    # hardly faster.
    bf16_mlp: bool = True
    device: Literal["gpu", "cpu"] = "gpu"  # gpu: a GPU if there is one
    compile: bool = True  # apply torch.compile to functions marked @compiled
    # On a GPU a micro-batch's forward and backward become one launch (docs/settings.md).
    cuda_graphs: bool = False

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def stage_starts(self) -> list[int]:
        return [0, *accumulate(stage.steps for stage in self.stages[:-1])]

    @property
    def num_value_tables(self) -> int:
        """Returns the number of layers with a value embedding; each has its own part of value_embeds."""
        return sum(layer.value for layer in self.layers)

    @property
    def copy_gate_column(self) -> int:
        """Returns the head's column that says how much the copy pointer counts: the first padding column."""
        return self.vocab_size

    @property
    def hashed_table(self) -> Ngrams:
        """Returns the table to whose rows tokens are hashed: of n-grams or, without them, of bigrams."""
        return self.ngrams if self.ngrams.orders else Ngrams((2,), self.bigram_vocab_size, self.dim)

    @property
    def predicts_prefixes(self) -> bool:
        return any(any(stage.prefix) for stage in self.stages)


RECORD = Config()

# Settings that the presets for two cores share. Edits of LAYERS, PARAMS and Config's defaults also change
# these presets, unless a preset replaces them.
TWO_CORES = replace(
    RECORD,
    length=1.0,  # so that an edit of Config.length rescales only the record preset
    val_slices=128,
    head_dim=32,
    mix_groups=4,
    bigram_vocab_size=16384,  # used with --set ngrams.orders=, when bigram_embed takes the place of n-grams
    window_unit=16,
    # Symmetric: on bytes the record's softcap raises the loss (docs/settings.md).
    softcap=Softcap(30.0, 0.0, 7.5),
    attn_scale=0.25,
    narrow_attn_scale=0.4,
    # Documents are truncated, so that a batch has parts of more documents; attention then splits none.
    attention_cap=0,
    # Small operations take a third of so short a step, so there are few micro-batches.
    microbatches=2,
    cooldown_frac=0.4,
    late_updates_from=46,
    # Without a GPU: plain torch in fp32; with AMX, the MLPs' products in bf16 (bf16_mlp).
    device="cpu",
    dtype="float32",
    bank_dtype="float32",
    kernels=(),
    attention_impl="dense",
    fp8=False,
    compile=False,
)

# The record preset's layers, without XSA and the copy pointer, on bytes. At these widths two cores train a
# model in half a minute.
CPU = replace(
    TWO_CORES,
    preset="cpu",
    track="cpu",
    # The text is in bytes.
    data="data/local",
    target=1.07,
    vocab_size=257,
    padded_vocab=264,
    bos_id=256,
    val_slice_tokens=4096,
    heads=2,
    mlp_dim=64,  # 128 and 256 gave no lower loss
    # A byte says less than a token: so there are more orders, and contexts that are not n-grams. With
    # contexts a lower learning rate gave a lower loss; without them it did not.
    ngrams=Ngrams(
        (2, 3, 4, 5, 6),
        rows_per_order=65536,
        width=64,
        dtype="float32",
        update_every=(1, 1),
        lr=0.35,
        contexts=("word", "above", "copy"),
    ),
    # On this text XSA and the pointer raise the loss (docs/settings.md). On others this is not certain.
    layers=tuple(replace(layer, xsa=False) for layer in LAYERS),
    pointer_dim=0,
    # The schedule, for 160 steps. Training on the next token alone gives a lower loss here than adding later
    # ones, and bytes have no prefixes.
    # fmt: off
    stages=(
        #  steps batch docs windows      lr_mul
        Stage(34, 2048, 256, Windows(3, 9), 1.00),
        Stage(58, 4096, 512, Windows(4, 10), 1.52),
        Stage(55, 4096, 512, Windows(5, 11), 1.73),
        Stage(13, 4096, 512, Windows(6, 13), 1.00),
    ),
    # fmt: on
    momentum_warmup=72,
    momentum_cooldown=13,
    two_momenta_from=72,
    averages=(
        WeightAverage(
            ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank", "value_embeds"),
            window=60,
            rate=2 / 31,
            blend=0.5,
        ),
    ),
)

# GPT-2's tokens and the copy pointer on two cores, to test what depends on the vocabulary.
WORDS = replace(
    TWO_CORES,
    preset="words",
    track="words",
    # The text is in GPT-2's tokens.
    data="data/words",
    target=2.5,
    val_every=0,
    # The head has many columns, so logits are made for few tokens at once.
    val_slice_tokens=512,
    head_chunk=64,
    # Only MUDD's layer has a value embedding, which it needs; the others did not lower the loss.
    layers=tuple(replace(layer, value=layer.mudd) for layer in LAYERS),
    pointer_dim=32,
    heads=4,
    mlp_dim=256,
    ngrams=Ngrams(
        (2, 3),
        rows_per_order=65536,
        width=128,
        dtype="float32",
        update_every=(1, 1),
        lr=0.56,
        contexts=("copy",),
    ),
    # The schedule, for 170 steps. So short a run learns more from the next token alone than with losses on
    # later tokens and prefixes. Only the last stage computes the logits of all columns.
    # fmt: off
    stages=(
        #  steps batch docs windows      lr_mul
        Stage(81, 1024, 256, Windows(3, 9), 1.00, sampled_columns=(4096,)),
        Stage(40, 2048, 512, Windows(4, 10), 1.52, sampled_columns=(4096,)),
        Stage(38, 2048, 512, Windows(5, 11), 1.73, sampled_columns=(4096,)),
        Stage(11, 2048, 512, Windows(6, 13), 1.00),
    ),
    # fmt: on
    momentum_warmup=68,
    momentum_cooldown=12,
    two_momenta_from=68,
    averages=(
        WeightAverage(
            ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank", "value_embeds"),
            window=57,
            rate=0.0675,
            blend=0.5,
            keep_norm=False,
        ),
    ),
    warmup=False,
    adam_lr=0.02,
    bank_lr=0.018,
)

# To add a preset, add it here. PRESETS (section 22) holds them by name, each rescaled by its `length`.
ALL_PRESETS = (RECORD, CPU, WORDS)


# ============================================================================================================
# 2  Shapes
# ============================================================================================================

# ---- Layers' scalars, gates, and outputs of MUDD -----------------------------------------------------------


# A layer's scalars and their initial values, by the parameter that has a column for each scalar.
#
#   x = resid_attention * x + post_attention * out * W_out(attention(norm(qkv * q), norm(qkv * k), values))
#       + gate * x0 + gate * n-grams,   values = qkv * v + value_embed
#   x = resid_mlp * x + post_mlp * (the sum of mlp(norm(x)) over the layer's MLPs)
#
# q, k and v are products with norm(x) or, after layer backout_from, with "normed backout". `out` and
# post_attention act only as a product, but learn at different rates, as in the record (lr_mul of `scalars`
# and of post_lambdas). A layer without attention, x0 and n-grams skips the first line. Each layer has all
# scalars, even those of parts that it lacks.
#
# To add a scalar, add it here and pass w.scalars["my_scalar"] to weighted_sum(), which returns the stream's
# dtype. Its shape is (1, 1), or (T, 1) in compiled code. A new scalar changes the parameter's shape, so
# models that were saved before do not load. If the scalar has a switch, make it an entry of PARAMS instead,
# with the shape (L if cfg.my_switch else 0,).
LAYER_SCALARS = {
    "scalars": {"qkv": 0.5, "out": 1.0},  # q and k are normed, so qkv acts only on v
    "resid_lambdas": {"resid_attention": 1.0488, "resid_mlp": 1.0488},  # sqrt(1.1), as the record rounds it
    "post_lambdas": {"post_attention": 1.0, "post_mlp": 1.0},
}
LAYER_SCALAR_NAMES = list(chain.from_iterable(LAYER_SCALARS.values()))  # the scalars' names
# The numbers at the end of the parameter `scalars` and their initial values.
MODEL_SCALARS = {"smear": 0.0, "skip": -1.5}  # skip: before its sigmoid


# The parameters of two small MLPs are stacked along their first axis.
# "mudd" computes weights of streams: one MLP for the layer with MUDD, the other for the mix before the head.
TO_LAYER, TO_LM_HEAD = 0, 1
# "mudd_gate" computes the gates of gate_table(): one MLP for layers up to skip_from, the other for the rest.
UP_TO_SKIP, AFTER_SKIP = 0, 1


class GateSpec(NamedTuple):
    """A factor that the MLPs "mudd_gate" output per token; with mudd_gates=false it is a learned constant. No
    sigmoid is applied; only the xsa gate goes through a tanh.

    To add a gate, add a field to Layer (check_layers() may have to limit it) and a line to gate_table(). Then
    multiply by gates[use, i] where it acts: in GPT.attention_branch or in GPT.trunk, for example on what
    mlp_branch returns. The smear, the value embeddings and the pointer have other kinds of gates.
    """

    use: str  # where it acts; the skip gate is also multiplied by sigmoid(scalar skip)
    layer: int
    columns: int  # 1, or one per head
    initial: float  # value; an open gate has 1


def gate_table(cfg: Config) -> tuple[list[GateSpec], list[GateSpec]]:
    """Returns the gates that each of the two gate MLPs outputs, in the order of the MLP's columns.

    The first MLP reads x0 and serves layers 0 .. skip_from. The second reads the stream that leaves
    skip_from, and serves the layers after it. The columns are in record 92's order: xsa gates, output gates,
    then all others by layer.
    """
    up_to_skip: list[GateSpec] = []
    after_skip: list[GateSpec] = []
    for i, layer in enumerate(cfg.layers):
        gates = after_skip if i > cfg.skip_from else up_to_skip
        if layer.xsa:
            gates.append(GateSpec("xsa", i, columns=cfg.heads, initial=0.0))
        if layer.gate:
            gates.append(GateSpec("output", i, columns=cfg.heads, initial=0.25))
        if layer.x0:
            gates.append(GateSpec("x0", i, columns=1, initial=0.0))
        if layer.ngram:
            gates.append(GateSpec("ngram", i, columns=1, initial=0.05))
    if cfg.skip_to < len(cfg.layers):
        after_skip.append(GateSpec("skip", cfg.skip_to, columns=1, initial=0.5))
    for gates in up_to_skip, after_skip:
        gates.sort(key=lambda gate: {"xsa": 0, "output": 1}.get(gate.use, 2))
    return up_to_skip, after_skip


GATE_DIM = 12  # channels that the gates of the smear and of value embeddings read; other gates read all
MUDD_SCALE = 0.1  # factor of the outputs of MUDD's MLPs
GATE_SCALE = 0.1  # initial factor of the outputs of the gates' MLPs
# What the first of MUDD's MLPs outputs per token, with the initial values. The order is that of the MLP's
# outputs: models that were saved in another order would be wrong. resid_* and post_* replace the layer's
# LAYER_SCALARS. The others weigh streams; x is the layer's own, whose weight in the layer's input is
# 1 + "x to input".
MUDD_OUTPUTS = {
    "start to value": 0.0,
    "backout to value": 0.0,
    "x to value": 0.0,
    "start to input": 0.0,
    "backout to input": 0.0,
    "x to input": 0.0,
    "left value": 2.0,  # the value embedding of the first half of the heads
    "right value": 2.0,
    "resid_attention": math.sqrt(1.1),  # not rounded, as the record's LAYER_SCALARS are
    "post_attention": 1.0,
    "start to output": 0.0,  # this stream and the next are added where attention's output is added
    "ngram to output": 0.05,
    "resid_mlp": math.sqrt(1.1),
    "post_mlp": 1.0,
}
# The LAYER_SCALARS that MUDD overrides.
MUDD_SCALAR_NAMES = [name for name in MUDD_OUTPUTS if name in LAYER_SCALAR_NAMES]


def lm_head_stream_weights(cfg: Config) -> dict[str, float]:
    """Returns the initial weight of each stream that lm_head_input adds, by the name that GPT.trunk saves the
    stream under, in the order of the MLP's outputs.
    """
    weights = {"start": 0.0}
    # At first half of the backout is subtracted: that stream was for the layers after it, not for the head
    # (PR 140).
    weights["backout"] = -0.5
    weights["mudd"] = 0.0
    weights["skip"] = 0.0
    for i in range(cfg.num_value_tables):
        weights[f"value {i}"] = 0.0
    weights["mudd mlp"] = 0.0
    weights["normed backout"] = 0.0
    return weights


def small_mlp_biases(cfg: Config) -> dict[str, list[list[float]]]:
    """Returns the initial biases of the two MLPs "mudd" and the two "mudd_gate": the initial values of their
    outputs, divided by the factors of the outputs.
    """
    gate_biases = []
    for gates in gate_table(cfg):
        biases = []
        for gate in gates:
            biases += gate.columns * [gate.initial / GATE_SCALE]
        gate_biases.append(biases)
    outputs = MUDD_OUTPUTS, lm_head_stream_weights(cfg)
    return {
        "mudd": [[value / MUDD_SCALE for value in initial.values()] for initial in outputs],
        "mudd_gate": gate_biases,
    }


# ---- Shapes and initial values -----------------------------------------------------------------------------


# A function that makes an initial value on the CPU, from a shape and a generator.
Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def constant(value: float) -> Draw:
    return lambda shape, generator: torch.full(shape, value)


def normal(std: float) -> Draw:
    return lambda shape, generator: std * torch.randn(shape, generator=generator)


def uniform(gain: float, fan_in: int) -> Draw:
    """Returns a Draw: uniform around 0, with standard deviation gain / sqrt(fan_in)."""
    bound = math.sqrt(3) * gain * fan_in**-0.5
    return lambda shape, generator: (torch.rand(shape, generator=generator) * 2 - 1) * bound


def given_rows(values: Sequence[list[float]]) -> Draw:
    """Returns a Draw of these rows, padded with 0 to equal length; a single row may be a vector."""
    tensors = [torch.tensor(row) for row in values]
    return lambda shape, generator: nn.utils.rnn.pad_sequence(tensors, batch_first=True).view(shape)


def zero_second_of_pairs(draw_all: Draw) -> Draw:
    """Returns a Draw like draw_all, but with 0 as the second matrix of every pair: at first MLPs output 0."""

    def draw(shape, generator):
        value = draw_all(shape, generator)
        value[1::2] = 0
        return value

    return draw


def param_inits(cfg: Config) -> dict[str, tuple[tuple[int, ...], Draw]]:
    """Returns the shape of every parameter of PARAMS, without padding, and what draws its initial value.

    A shape with a 0 means that the technique is off and the parameter does not exist.
    """
    d = cfg.dim
    H = cfg.heads
    D = cfg.head_dim
    L = len(cfg.layers)
    V = cfg.padded_vocab
    attending = [layer for layer in cfg.layers if layer.attention]
    num_narrow = sum(layer.narrow_qk for layer in attending)
    num_wide = len(attending) - num_narrow
    num_mlps = sum(layer.mlps for layer in cfg.layers)
    num_value_gates = sum(layer.value and not layer.mudd for layer in attending)
    bigram_rows = 0 if cfg.ngrams.orders else cfg.bigram_vocab_size
    # The two MLPs of a pair are stacked, so both have as many outputs as the larger one. stream_weights() and
    # compute_gates() leave out those that the smaller one has too many. The mix before the head weighs each
    # stream as a whole and by groups of the stream's channels.
    biases = small_mlp_biases(cfg)
    num_streams = len(lm_head_stream_weights(cfg))
    num_mudd_biases = max(len(MUDD_OUTPUTS), num_streams)
    num_mudd_outputs = max(len(MUDD_OUTPUTS), num_streams * (1 + cfg.mix_groups))
    mudd_dim = cfg.mudd_dim if cfg.mudd_weights else 0
    num_gates = max(len(gate_biases) for gate_biases in biases["mudd_gate"])
    gate_mlp_dim = cfg.mudd_dim if cfg.mudd_gates and num_gates else 0
    zeros = constant(0.0)
    by_layer = {param: L * [list(columns.values())] for param, columns in LAYER_SCALARS.items()}
    scalars = [*chain.from_iterable(by_layer["scalars"]), *MODEL_SCALARS.values()]
    return {
        # Two heads' queries, or keys, form one matrix, which ANVIL orthogonalizes as a whole.
        "qk_bank": ((num_wide * H, 2 * D, d), uniform(0.5, d)),
        "narrow_qk_bank": ((num_narrow * H, 2 * (D // 2), d), uniform(0.5, d)),
        "vo_bank": ((2 * len(attending), d, d), uniform(0.5, d)),
        "mlp_bank": ((2 * num_mlps, cfg.mlp_dim, d), zero_second_of_pairs(uniform(0.5, d))),
        # (2 L + 2,): "qkv" and "out" of each layer, then MODEL_SCALARS
        "scalars": ((len(scalars),), given_rows([scalars])),
        "smear_gate": ((1, GATE_DIM), zeros),
        "ve_gate_bank": ((num_value_gates, H, GATE_DIM), zeros),
        "mudd_w1": ((2, mudd_dim, d), uniform(0.577, d)),  # nn.Linear's default
        "mudd_w2": ((2, num_mudd_outputs, mudd_dim), zeros),
        "mudd_b2": ((2, num_mudd_biases), given_rows(biases["mudd"])),
        "mudd_gate_w1": ((2, gate_mlp_dim, d), uniform(0.577, d)),
        "mudd_gate_w2": ((2, num_gates, gate_mlp_dim), zeros),
        "mudd_gate_b2": ((2, num_gates), given_rows(biases["mudd_gate"])),
        "mudd_gate_scale": ((int(num_gates > 0),), constant(GATE_SCALE)),
        "post_lambdas": ((L, len(LAYER_SCALARS["post_lambdas"])), given_rows(by_layer["post_lambdas"])),
        "resid_lambdas": ((L, len(LAYER_SCALARS["resid_lambdas"])), given_rows(by_layer["resid_lambdas"])),
        "pointer_bank": ((2, cfg.pointer_dim, d), uniform(1.0, d)),
        "pointer_gain": ((int(cfg.pointer_dim > 0),), constant(1.0)),
        "pointer_sink": ((cfg.pointer_dim,), normal(max(1, cfg.pointer_dim) ** -0.5)),  # max: it may be 0
        "lm_head": ((d, V), normal(0.005)),
        "bigram_embed": ((bigram_rows, d), zeros),
        "value_embeds": ((V, cfg.num_value_tables, d), normal(0.01)),
        "embed": ((V, d), zeros),  # until GPT.initialize copies lm_head to it
    }


def param_shapes(cfg: Config, world_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter that this model has, in the order of cfg.params.

    Banks are padded so that each of `world_size` ranks owns the same number of matrices.
    """
    inits = param_inits(cfg)
    names = {spec.name for spec in PARAMS}
    require(names <= inits.keys(), f"PARAMS has {names - inits.keys()}: give each a line of param_inits()")
    require(names == inits.keys(), f"param_inits() has {inits.keys() - names}: give each an entry of PARAMS")
    shapes = {}
    for spec in cfg.params:
        shape, _ = inits[spec.name]
        if all(shape):
            first = padded(shape[0], world_size) if spec.kind == "bank" else shape[0]
            shapes[spec.name] = (first, *shape[1:])
    return shapes


def used_specs(cfg: Config) -> list[ParamSpec]:
    """Returns the entries of cfg.params whose parameters this model has."""
    shapes = param_shapes(cfg, 1)
    return [spec for spec in cfg.params if spec.name in shapes]


def initial_value(name: str, cfg: Config, seed: int) -> Tensor:
    """Returns a parameter's initial value, drawn on the CPU, without padding."""
    shape, draw = param_inits(cfg)[name]
    return draw(shape, seeded(name, seed))


# ============================================================================================================
# 3  Schedule: pure functions of the settings and the step
# ============================================================================================================


class StepPlan(NamedTuple):
    """Holds the schedule's values for one step. plan_step() makes it."""

    step: int
    stage: int
    lr_mul: float  # scheduled factor of every learning rate; ParamSpec.lr_mul multiplies it
    momentum: float  # ANVIL's momentum, in Nesterov's rule
    fast_beta: float  # decay of ANVIL's fast running average of gradients
    fast_weight: float  # that average's weight in the momentum; the slow average has the rest
    # Attention windows in tokens, by name: those of Stage.windows. GPT.use_rotary() reads Stage.windows
    # itself, so a change made only here would not reach the rotary tables.
    windows: TokenWindows
    batch_tokens: int
    max_doc_len: int
    mtp: tuple[float, ...]  # weights of the losses on the next tokens
    prefix: float  # weight of the loss on the next token's prefix; 0: no such loss
    sampled_columns: int  # columns of the head that are computed; 0: all
    late_updates: bool  # true from Config.late_updates_from on
    average_rates: tuple[float, ...]  # rates of Config.averages after this step; 0: no tick
    fp8_exact: bool  # FP8 scales of the MLPs' weights come from this step's maxima, without a margin
    # Up to the untie step's update embed is the transpose of lm_head. At first one matrix learns faster from
    # both ends; later two matrices fit better (PRs 175, 178).
    tied: bool
    untie: bool  # embed and lm_head are untied after this step's update

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """Returns the weights of loss_targets' columns."""
        return (*self.mtp, self.prefix) if self.prefix else self.mtp

    def steps_between(self, intervals: UpdateIntervals) -> int:
        """Returns the number of steps from one update to the next."""
        early, late = intervals
        return late if self.late_updates else early

    def interval_ratio(self, intervals: UpdateIntervals) -> int:
        """Returns the present interval divided by the early one: 1, 2 or 4.

        Adam raises its betas to this power and multiplies weight decay by it, so that the moments' decay and
        the weight decay per step stay about the same.
        """
        early, _ = intervals
        return self.steps_between(intervals) // early

    def is_update_step(self, intervals: UpdateIntervals) -> bool:
        """Returns whether an update with these intervals is due at the end of this step."""
        return (self.step + 1) % self.steps_between(intervals) == 0


def untie_step(cfg: Config) -> int:
    """Returns the first odd step of the last stage. Adam updates at odd steps, as its interval is 1 or 2.

    With one stage, or a last stage that is too short, the result is not a step of the run: lm_head and embed
    then stay tied.
    """
    if len(cfg.stages) == 1:
        return cfg.steps
    first = cfg.stage_starts[-1]
    return first if first % 2 else first + 1


def piecewise(t: float, parts: tuple):
    """Returns the value at t if the values divide 0 .. 1 into equal parts; 0 if `parts` is empty."""
    return parts[int(t * len(parts))] if parts else 0


def scheduled_lr_mul(cfg: Config, stage: Stage, step: int) -> float:
    """Returns the factor of all learning rates.

    The factor is stage.lr_mul until the cooldown, which is the last cooldown_frac of the steps before the
    last stage. In the cooldown it moves linearly from stage.lr_mul to the last stage's lr_mul, which the last
    stage keeps. It may jump where a stage begins.
    """
    end = cfg.stage_starts[-1]
    cooldown_from = int(end * (1 - cfg.cooldown_frac))
    if step <= cooldown_from:
        return stage.lr_mul
    t = min(1.0, (step - cooldown_from) / max(1, end - cooldown_from))
    return stage.lr_mul * (1 - t) + cfg.stages[-1].lr_mul * t


def scheduled_momentum(cfg: Config, step: int) -> float:
    """Returns the momentum. It rises linearly from min to max and stays there. In the last steps it falls
    linearly towards min, which it would reach one step after the last.
    """
    warmup_left = (cfg.momentum_warmup - step) / max(1, cfg.momentum_warmup)
    cooldown_done = (step - cfg.steps + cfg.momentum_cooldown) / max(1, cfg.momentum_cooldown)
    below_max = max(0, warmup_left, cooldown_done)  # 0: at the maximum, 1: at the minimum
    return cfg.momentum_max - (cfg.momentum_max - cfg.momentum_min) * below_max


def plan_step(cfg: Config, step: int) -> StepPlan:
    """Returns what step `step` (from 0) does.

    To add a scheduled value, add a field to StepPlan and set it here. Then,
    - if the forward or the backward reads it and it has few values, also pass it to forward_backward():
      CUDAGraphs captures a graph for each value;
    - if it has many values, make it a tensor of MicroBatch, like loss_weights;
    - if GPT.trunk reads it as a size or a Python number, make it an argument of trunk, and add it to
      DYNAMIC_ARGUMENTS;
    - if a new value needs a new compilation, add it to `kind` in warmup_ranges().
    """
    starts = cfg.stage_starts
    index = max(i for i, start in enumerate(starts) if start <= step)
    stage = cfg.stages[index]
    t = (step - starts[index]) / stage.steps
    mtp = stage.mtp
    if len(mtp) > 1:
        mtp = (*mtp[:-1], mtp[-1] - mtp[-1] * t)
    momentum = scheduled_momentum(cfg, step)
    if step < cfg.two_momenta_from:
        fast_beta, fast_weight = momentum, 1.0
    else:
        fast_beta, fast_weight = cfg.fast_beta, cfg.fast_weight
    return StepPlan(
        step=step,
        stage=index,
        lr_mul=scheduled_lr_mul(cfg, stage, step),
        momentum=momentum,
        fast_beta=fast_beta,
        fast_weight=fast_weight,
        windows=window_tokens(cfg, stage.windows),
        batch_tokens=stage.batch_tokens,
        max_doc_len=stage.max_doc_len,
        mtp=mtp,
        prefix=piecewise(t, stage.prefix),
        sampled_columns=piecewise(t, stage.sampled_columns),
        late_updates=step >= cfg.late_updates_from,
        average_rates=average_rates(cfg, step),
        fp8_exact=step < FP8_EXACT_STEPS,
        tied=step <= untie_step(cfg),
        untie=step == untie_step(cfg),
    )


@cache
def tick_rates(average: WeightAverage, steps: int) -> dict[int, float]:
    """Returns the rate of each tick of an average, by the step that it follows, in a run of `steps` steps."""
    ticks = []
    for left in reversed(range(min(average.window, steps))):  # steps left after this one
        if left % average.every == average.offset or left in average.also:
            ticks.append(steps - 1 - left)
    rates = dict.fromkeys(ticks, average.rate)
    if ticks:
        rates[ticks[-1]] = average.last_rate or average.rate
        rates[ticks[0]] = 1.0  # the first tick copies the parameter
    return rates


def average_rates(cfg: Config, step: int) -> tuple[float, ...]:
    """Returns the rate at which each of Config.averages ticks after a step; 0: it does not tick."""
    return tuple(tick_rates(average, cfg.steps).get(step, 0.0) for average in cfg.averages)


def window_tokens(cfg: Config, windows: Windows) -> TokenWindows:
    """Returns windows in tokens."""
    return {name: units * cfg.window_unit for name, units in vars(windows).items()}


def num_microbatches(cfg: Config, world_size: int) -> int:
    return max(cfg.microbatches, world_size)


def loss_share(cfg: Config, world_size: int) -> float:
    """Returns 1 / (micro-batches per rank), as nanoGPT's 1 / gradient_accumulation_steps. Loss weights are
    multiplied by it, and so gradients are, too; gradients' FP8 scales get the same factor.
    """
    return world_size / num_microbatches(cfg, world_size)


def warmup_ranges(cfg: Config) -> list[range]:
    """Returns ranges of steps for the warm-up, which together have every kind of step.

    A kind is a stage, a number of sampled columns, prefixes or none, and late updates or none. The first step
    of each kind has a range: the two or three steps before it, the step itself, and the next one. At the last
    stage's start the range goes on for four steps: embed is untied in the first or the second of them, and
    trained alone afterwards. Ranges begin at even steps, so that with the intervals 1 and 2 gradients
    overwrite and add as in the run.
    """
    first_steps: dict[tuple, int] = {}  # the first step of each kind
    for step in range(cfg.steps):
        plan = plan_step(cfg, step)
        kind = plan.stage, plan.sampled_columns, plan.prefix > 0, plan.late_updates
        first_steps.setdefault(kind, step)
    ranges = []
    for step in sorted(first_steps.values()):
        count = 4 if step == cfg.stage_starts[-1] else 2
        ranges.append(range(max(0, step - 2 - step % 2), min(step + count, cfg.steps)))
    return ranges


# ============================================================================================================
# 4  Helpers
# ============================================================================================================


class UserError(Exception):
    """An error that the user can fix. Its message is one line: what is wrong, and what to do."""


def require(ok: object, message: str) -> None:
    """Raises UserError(message) unless `ok`."""
    if not ok:
        raise UserError(message)


@contextlib.contextmanager
def user_error_on(problem: str, fix: str, *errors: type[Exception]):
    """Turns these errors into a UserError: `problem`, the error's own first line, and `fix`."""
    try:
        yield
    except errors as e:
        reason, _, _ = str(e).partition("\n")
        raise UserError(f"{problem}: {reason}; {fix}") from None


TRACING = False  # trace_steps() sets it: record_function takes 10 us even if nothing is profiled


@contextlib.contextmanager
def traced(label: str):
    """Labels a block in a trace or, as a decorator, every call of a function.

    A label says what the step does, and with which parameter. Compiled functions cannot be labelled.
    """
    if not TRACING:
        yield
        return
    with torch.profiler.record_function(label):
        yield


# Compiles a function; None: functions run as written. build() sets it, and print_samples() unsets it.
COMPILER: Callable | None = None
# Names of arguments, in every compiled function, whose sizes and numbers may vary without a new graph.
DYNAMIC_ARGUMENTS = ("looked_up", "sequence", "windows")
# Functions whose kernels Inductor does not benchmark. It would do so on copies of what they change: for this
# one the whole table of n-grams, 16 GB on each of 8 GPUs.
WITHOUT_AUTOTUNING = ("row_adam_update",)


def compiled(function: Callable) -> Callable:
    """Decorates a function so that COMPILER compiles it, if there is a COMPILER."""

    @wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or COMPILER is None:
            return function(*args, **kwargs)
        return COMPILER(function)(*args, **kwargs)

    return call


# The bar is redrawn often on a terminal, but rarely in a file, which keeps every line.
progress_bar = partial(tqdm, mininterval=0.1 if sys.stderr and sys.stderr.isatty() else 10)


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def acc_dtype(cfg: Config) -> torch.dtype:
    """Returns the dtype of sums, moments, layers' scalars and angles: fp32, or fp64 for an fp64 model."""
    return torch.promote_types(dtype_of(cfg.dtype), torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Returns x in at least fp32: unchanged if it is fp32 or fp64 already."""
    return x if x.dtype == torch.float64 else x.float()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x.to(dtype), but without the call if x has that dtype: in a compiled forward of an autograd
    Function, torch 2.11 may lose gradients through the call (pytorch issue 180642).
    """
    return x if x.dtype == dtype else x.to(dtype)


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def int32(numbers: np.ndarray) -> Tensor:
    """Returns the numbers as an int32 tensor on the host."""
    return torch.from_numpy(numbers.astype(np.int32, copy=False))


EMPTY_INT32 = np.empty(0, np.int32)


def seeded(name: str, seed: int) -> torch.Generator:
    """Returns a generator for one tensor only: its values do not depend on which other tensors exist."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))


map_tensors = partial(tree_map_only, Tensor)  # arguments: a function, a nest of dicts and tuples


@cache
def device_scalar(value: float, device: torch.device) -> Tensor:
    """Returns a 0-d fp32 tensor, made once: on a GPU, each takes a launch."""
    return torch.full((), value, device=device)


def host_scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Returns a number that changes by step as a 0-d CPU tensor, so that compiled code does not recompile."""
    return torch.tensor(value, dtype=dtype)


# ============================================================================================================
# 5  Step: the same code for the warm-up and the timed run
# ============================================================================================================

# ---- What a batch holds ------------------------------------------------------------------------------------

# A row of a table has up to three numbers, int32 in tensors:
#   row id        its place in the whole table, which a token or a hash gives
#   local row id  its place in its owner's block
#   slot          its place in this rank's buffers. Every rank has all rows of an embedding, so the slot is
#                 the row id. Of the table of n-grams a rank has only the rows that it fetched; their slots
#                 are rows of NgramTable.cache.


# Where a rank's loader stands: the shard's number, counting on in later epochs; the document; and, for each
# of the rank's micro-batches, the offset of its sampled columns.
Position = tuple[int, ...]


class Batch(NamedTuple):
    """Holds what one step trains on. The Prefetcher's thread builds it, and train_step() reads it."""

    plan: StepPlan
    micro_batches: list[MicroBatch]  # each packed in one host buffer, its segments in another
    position: Position  # after this batch; a resumed run starts there
    # The routes of the tables that this step updates, by table name, packed in one buffer. The first batch
    # after an update of the n-grams also has those of "ngrams", for all rows read up to the next update.
    routes: dict[str, RowRoutes]


class MicroBatch(NamedTuple):
    """Holds documents, laid end to end, for one forward and, in training, its backward. make_micro_batch()
    begins it on the host, and Prefetcher completes it.
    """

    inputs: Tensor  # (T,) int32
    targets: Tensor  # (T,) int64
    # (R, T) int32: each token's R rows of bigram_embed (R = 1), or of the n-gram table
    hashed_rows: Tensor
    sign_ids: Tensor | None  # (R, T) int32: rows of the signs that multiply hashed_rows
    # (n,) int32: 0, then the ends of the documents, or of the pieces that attention splits them into. The
    # last end, T, is repeated up to cu_seqlens_capacity() entries, so that the shape seldom changes.
    cu_seqlens: Tensor
    max_seqlen: int  # no document or piece is longer
    # In training:
    slots: Tensor | None = None  # (R, T) int32: slots of the n-grams' hashed_rows in NgramTable.cache
    # By ParamSpec.rows_by: "inputs" or "hashed_rows". Ids are row ids or, for n-grams, slots. Segments are
    # packed apart from the rest, because their sizes vary.
    segments: dict[str, Segments] = {}
    sampled_columns: Tensor | None = None  # (P,) int32, ascending: columns of the head; None: all
    # (K,), acc_dtype: this micro-batch's share of StepPlan.loss_weights
    loss_weights: Tensor | None = None


class Segments(NamedTuple):
    """Holds the distinct ids of a list (T,) or (R, T), and each id's positions in 0 .. T - 1, as a sparse
    matrix in CSR form.
    """

    # (n,) int32, ascending: a micro-batch's row ids, or the local row ids of RowRoutes. assign_slots()
    # replaces the row ids of n-grams by slots, which are unordered.
    ids: Tensor
    # (T,) or (R * T,) int32: perm[offsets[i]:offsets[i + 1]] are the positions of ids[i], in the list's
    # order. In (R, T) each position occurs R times.
    perm: Tensor
    offsets: Tensor  # (n + 1,) int32
    sign_ids: Tensor | None = None  # int32, like perm: rows of signs, in perm's order


class RowRoutes(NamedTuple):
    """Holds the routes by which an all-to-all sends the gradients of a table's touched rows to their owners.

    A rank has touched a row if one of its micro-batches has read it since the table's last update. N-grams
    use the same routes beforehand, in reverse: owners send the rows to the ranks that will read them.
    """

    input_splits: list[int]  # numbers of rows that this rank sends, by owner
    output_splits: list[int]  # numbers of rows that it receives as an owner, by sender
    row_ids: Tensor  # (sum(input_splits),) int32: the rows that this rank has touched, by owner
    local_row_ids: Tensor  # (sum(output_splits),) int32: the rows of its block that it receives
    segments: Segments  # segments of local_row_ids: several ranks may send the same row


# ---- The step ----------------------------------------------------------------------------------------------


def train_step(
    model: GPT, optimizer: Optimizer, batch: Batch, next_batch: Callable[[], Batch | None] = lambda: None
) -> Tensor:
    """Trains on one batch. Returns this rank's loss for the log, 0-d, on the device: the mean over tokens of
    the weighted mean of each token's targets. It is not comparable with a validation loss. Sampled columns
    lower it, as the softmax is over fewer tokens. Prefixes lower it, as a missing target counts as 0. Losses
    on later tokens raise it.

    `next_batch()` returns the next batch, or None. Its n-grams are fetched as soon as their table has been
    updated.
    """
    plan = batch.plan
    model.use_rotary(plan.stage)
    optimizer.ensure_batch(batch)
    optimizer.wait()  # for the parameters, and for this batch's rows of n-grams
    fp8_operands = None
    if model.fp8_state:
        fp8_operands = model.fp8_state.begin_step(model.mlp_bank, plan.fp8_exact)

    losses = []
    for micro_batch in batch.micro_batches:
        # Segments have a buffer of their own, because their sizes vary. The rest keeps its addresses, for
        # CUDA graphs.
        segments = move(micro_batch.segments, model.device)
        micro_batch = move(micro_batch._replace(segments={}), model.device, model.micro_batch_buffer)
        loss, looked_up_grads = model.graphs.run(
            forward_backward,
            host_state=optimizer.accumulate_flags(),
            model=model,
            optimizer=optimizer,
            micro_batch=micro_batch,
            windows=plan.windows,
            with_prefix=plan.prefix > 0,
            fp8_operands=fp8_operands,
        )
        optimizer.add_looked_up_grads(looked_up_grads, segments, model.signs)
        for param in optimizer.params.values():
            param.end_backward()  # the next micro-batch's gradients are added
        # The logged loss is a mean over tokens, gradients are of the sum over tokens. Both are means over
        # micro-batches: loss_weights have the factor loss_share().
        losses.append(loss / (len(micro_batch.inputs) * sum(plan.loss_weights)))

    if model.fp8_state:
        # Under way while parameters are updated.
        pending_amax = optimizer.comm.all_reduce(model.fp8_state.amax, dist.ReduceOp.MAX)
    optimizer.step(plan, next_batch)
    if model.fp8_state:
        model.fp8_state.end_step(pending_amax.wait())
    return sum(losses[1:], losses[0])  # sum(losses) would add 0 first, with one launch more


def forward_backward(
    model: GPT,
    optimizer: Optimizer,
    micro_batch: MicroBatch,
    windows: TokenWindows,
    with_prefix: bool,
    fp8_operands: FP8Operands | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs a micro-batch's forward and backward, which gives gradients to optimizer.params.

    with_prefix: the last of the micro-batch's loss weights is for prefixes. Returns the weighted sum of
    losses, 0-d, and the gradients (T, ...) of what tokens have looked up, by table. What changes on the host
    must be an argument: otherwise CUDAGraphs would replay its old value.
    """
    # Forward.
    looked_up = model.look_up(micro_batch, training=True)
    x = model.forward(looked_up, micro_batch, windows, optimizer.banks(), fp8_operands)  # (T, d)
    prefixes = model.longest_prefix if with_prefix else None
    num_next_tokens = len(micro_batch.loss_weights) - int(with_prefix)
    targets = loss_targets(micro_batch.targets, num_next_tokens, prefixes)
    pointer_out = model.run_pointer(x, micro_batch, model.cfg.pointer_window)

    # The head, forward and backward.
    loss, dx = model.head_loss_and_grad(
        x,
        targets,
        micro_batch.loss_weights,
        optimizer.lm_head(),
        sampled_columns=micro_batch.sampled_columns,
        pointer_out=pointer_out,
    )
    # The rest of the backward.
    roots = [x]
    root_grads = [dx]
    if pointer_out is not None:
        roots.append(pointer_out.probs)
        root_grads.append(pointer_out.dprobs)
    with traced("backward"):
        torch.autograd.backward(roots, root_grads)
    looked_up_grads = {}
    for name, rows in looked_up.items():
        if rows.grad is not None:  # for n-grams it is None if no layer adds them
            looked_up_grads[name] = rows.grad
    return loss, looked_up_grads


def validate(
    model: GPT, loader: ValLoader, comm: Collectives, windows: TokenWindows, slices: int | None = None
) -> float:
    """Returns the mean of all slices' mean losses, the same however slices are spread over ranks.

    Optimizer.wait() must have been called since the last step, and GPT.use_rotary() for the windows' stage.
    slices: how many, from the first on; None: all. Rank 0 shows a progress bar.
    """
    slices = slices or model.cfg.val_slices
    losses = torch.zeros(slices, dtype=acc_dtype(model.cfg), device=model.device)
    # All ranks make the same number of rounds, some without a slice, because fetching n-grams is collective.
    own = range(comm.rank, padded(slices, comm.world_size), comm.world_size)
    for i in progress_bar(own, "validation", leave=False, disable=comm.rank > 0, delay=1):
        if i < slices:
            losses[i] = model.token_losses(move(loader.slice(i), losses.device), windows).mean()
        elif model.ngrams:
            model.ngrams.fetch(torch.empty(0, dtype=torch.int32))  # no rows
    return comm.all_reduce(losses).wait().mean().item()


# ============================================================================================================
# 6  Loop
# ============================================================================================================


class Training(NamedTuple):
    """Holds what the warm-up and the timed loop work with."""

    data: Dataset
    model: GPT
    optimizer: Optimizer
    val: ValLoader
    loader_comm: Collectives  # for the thread that builds batches


class Progress(NamedTuple):
    """Holds how far a run has come. A checkpoint contains it."""

    step: int = 0
    train_ms: float = 0.0
    position: Position = (0, 0)  # after `step` steps


class Result(NamedTuple):
    """Holds what train() returns for the log's closing lines."""

    val_loss: float  # at the end, rounded as in the log
    train_ms: float
    epochs: int  # the last one may be incomplete


class Checkpoints(NamedTuple):
    """Says which checkpoints a run writes."""

    folder: Path
    task: dict  # task_of()'s result
    steps: Container[int]  # after these steps, counted from 1


def train(
    training: Training,
    log: RunLog,
    start: Progress,
    checkpoints: Checkpoints | None = None,
    profiler: torch.profiler.profile | None = None,
) -> Result:
    """Trains from `start` on, against the clock.

    The clock stops during validation and saving, while threads go on building batches.
    """
    model, optimizer = training.model, training.optimizer
    cfg = model.cfg
    rank = optimizer.comm.rank
    train_shards = training.data.train
    losses = AsyncLoss()
    clock = Clock(start.train_ms)
    loader = TrainLoader(cfg, train_shards, rank, optimizer.comm.world_size, start.position)
    plans = (plan_step(cfg, step) for step in range(start.step, cfg.steps))
    batches = Prefetcher(loader, plans, training.loader_comm)
    if cfg.predicts_prefixes:  # on the clock, because the table is made from the data
        model.longest_prefix.copy_(prefix_table(training.data.vocabulary, cfg.padded_vocab))
    bar = progress_bar(total=cfg.steps, initial=start.step, unit="step", disable=rank > 0)

    for step in range(start.step, cfg.steps):
        if cfg.val_every and step % cfg.val_every == 0:
            plan = plan_step(cfg, step)
            model.use_rotary(plan.stage)
            log_validation(training, clock, losses, log, step, plan.windows)
        batch = batches.next()
        done = step + 1  # as the log counts
        losses.push(done, train_step(model, optimizer, batch, batches.peek))
        losses.poll()
        if profiler:
            profiler.step()
        ms = clock.ms()
        logged_step, logged_loss = losses.latest
        loss_text = ""
        if logged_step:  # on a GPU the newest loss is some steps old
            loss_text = f" train_loss:{logged_loss:.4f}@{logged_step}"
        times = f"train_time:{ms:.0f}ms step_avg:{ms / done:.2f}ms"
        log.print0(f"step:{done}/{cfg.steps} {times}{loss_text}", console=False)
        bar.set_postfix_str(loss_text, refresh=False)
        bar.update()
        if checkpoints and done in checkpoints.steps:
            with clock.paused() as stopped_ms:
                losses.poll()
                progress = Progress(done, stopped_ms, batch.position)._asdict()
                save_checkpoint(checkpoints.folder, checkpoints.task, progress, model, optimizer)
                log.print0(
                    f"checkpoint: after step {done}; the same command with --resume {log.path} continues"
                )
    optimizer.apply_averages()
    windows = window_tokens(cfg, cfg.val_windows)  # with the last stage's rotary tables
    val_loss, train_ms = log_validation(training, clock, losses, log, cfg.steps, windows)
    bar.close()
    loader.close()
    shard_number, *_ = batch.position
    epochs = shard_number // len(train_shards) + 1
    return Result(round(val_loss, 6), train_ms, epochs)


def log_validation(
    training: Training, clock: Clock, losses: AsyncLoss, log: RunLog, step: int, windows: TokenWindows
) -> tuple[float, float]:
    """Stops the clock, validates after `step` steps, and logs the loss. Returns the loss and the milliseconds
    of training so far.

    Raises UserError if the loss is not finite, so that no such model is saved.
    """
    model = training.model
    with clock.paused() as ms:
        losses.poll()
        training.optimizer.wait()
        loss = validate(model, training.val, training.optimizer.comm, windows)
        fix = "lower the learning rates" if step else "look for the cause in the model's forward"
        require(math.isfinite(loss), f"val_loss is {loss} at step {step}; {fix}")
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        log.print0(f"step:{step}/{model.cfg.steps} val_loss:{loss:.4f} {times}")
    return loss, ms


def warm_up(training: Training) -> None:
    """Runs a step of every kind, so that nothing is compiled on the clock, and device buffers exist. Then
    restores everything.
    """
    model, optimizer = training.model, training.optimizer
    cfg, comm = model.cfg, optimizer.comm
    before = training_state(model, optimizer)
    slices = min(cfg.val_slices, comm.world_size)
    loader = TrainLoader(cfg, training.data.train, comm.rank, comm.world_size)
    for steps in warmup_ranges(cfg):
        plans = [plan_step(cfg, step) for step in steps]
        batches = Prefetcher(loader, plans, training.loader_comm)
        for plan in plans:
            model.use_rotary(plan.stage)
            optimizer.wait()
            validate(model, training.val, comm, plan.windows, slices)
            loss = train_step(model, optimizer, batches.next(), batches.peek)
            AsyncLoss().push(plan.step, loss)  # allocates pinned memory
        if optimizer.ngrams:
            # The table is not in `before`: zeros restore it. They are needed after each range, because the
            # next one may begin at an earlier step than last_update says.
            for t in optimizer.ngrams.state_dict().values():
                t.zero_()
        optimizer.drop_grads()
    loader.close()
    optimizer.apply_averages()
    restore(before, model, optimizer)


def prepare(training: Training, resumed: dict, log: RunLog) -> Progress:
    """Warms up, and restores the checkpoint if there is one. Returns where training begins."""
    if training.model.cfg.warmup:
        began = time.perf_counter()
        log.print0("warm-up: a step of every kind, off the clock", file=False)
        warm_up(training)
        log.print0(f"warm-up: it took {time.perf_counter() - began:.1f} s and was undone")
    start = Progress()
    if resumed:
        restore(resumed, training.model, training.optimizer)
        start = Progress(resumed["step"], resumed["train_ms"], resumed["position"])
        resumed.clear()  # unmaps its files: mapped ones cannot be removed on a network drive
    # Garbage of building and warm-up is collected now, off the clock. What remains is not searched again.
    gc.collect()
    gc.freeze()
    return start


class Clock:
    """Measures the milliseconds of training, starting at `ms`. It stops inside `with clock.paused()`."""

    def __init__(self, ms: float = 0.0):
        self.began = self.synchronized() - ms / 1000

    def synchronized(self) -> float:
        """Waits until the device has finished all its work. Returns the time in seconds."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def ms(self) -> float:
        """Returns the milliseconds of training, without waiting for the device."""
        return 1000 * (time.perf_counter() - self.began)

    @contextlib.contextmanager
    def paused(self):
        """Waits for the device, and stops the clock inside the `with`. Yields the milliseconds so far."""
        stopped = self.synchronized()
        yield 1000 * (stopped - self.began)
        self.began += self.synchronized() - stopped


class AsyncLoss:
    """Reads the losses of steps without waiting for the device.

    latest: the newest (step, loss) that has arrived on the host; (0, None) before the first arrives.
    """

    def __init__(self):
        self.queue = []  # entries (step, loss on the host, event after its copy), oldest first
        self.latest = (0, None)

    def push(self, step: int, loss: Tensor) -> None:
        """Starts to copy a step's loss, 0-d, to the host."""
        arrived = None
        if loss.is_cuda:
            loss = loss.to("cpu", non_blocking=True)  # into pinned memory
            arrived = torch.cuda.Event()
            arrived.record()
        self.queue.append((step, loss, arrived))

    def poll(self) -> None:
        """Moves the losses that have arrived to `latest`. Raises UserError if one is not finite."""
        while self.queue:
            step, loss, arrived = self.queue[0]
            if arrived is not None and not arrived.query():
                break
            self.queue.pop(0)
            self.latest = (step, loss.item())
            require(loss.isfinite(), f"train_loss is {loss} at step {step}; lower the learning rates")


# ============================================================================================================
# 7  Model
# ============================================================================================================


# A term of a sum: a scale, or None for 1, and the stream (T, d) that it multiplies.
Term = tuple[Tensor | None, Tensor]
Gates = dict[tuple[str, int], Tensor]  # (T, columns) by use and layer; (1, columns) if constant


class MLPWeights(NamedTuple):
    fc: BankMatrix  # (F, d)
    proj: BankMatrix  # (F, d)
    fp8_operands: FP8Operands | None  # both matrices in FP8, if the MLP runs in FP8


class LayerWeights(NamedTuple):
    """Holds what one layer computes with. None: the layer does not use it."""

    qk: BankMatrix | None  # (2 H Dq, d): queries and keys
    v: BankMatrix | None  # (H Dv, d)
    out: BankMatrix | None  # (d, H Dv)
    # (T, d), added to the values: the tokens' value embeddings, or what mudd_connections() makes of them
    value_embed: Tensor | None
    ve_gate: Tensor | None  # (H, GATE_DIM); None: the value embeddings have no gate
    mlps: list[MLPWeights]
    scalars: dict[str, Tensor]  # by the names in LAYER_SCALARS, (T or 1, 1) each


class GPT(nn.Module):
    """The language model. Parameters have the shapes of `param_shapes` and are drawn from `seed`."""

    if typing.TYPE_CHECKING:  # parameters are registered and found by name

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(
        self,
        cfg: Config,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 0,
        backend: Backend | None = None,
    ):
        super().__init__()
        self.cfg = cfg
        self.backend = backend or TORCH_BACKEND
        self.device = torch.device(device)
        # The NgramTable or, outside training, any object with its fetch(). build() or the caller sets it.
        self.ngrams: typing.Any = None
        # Allocates for move(). It returns the same buffer for the same size: in training a micro-batch
        # overwrites the last one of its size, so equal shapes have equal addresses, which CUDA graphs need.
        self.micro_batch_buffer = cache(torch.empty)
        self.graphs = CUDAGraphs(cfg.cuda_graphs)
        self.loss_share = loss_share(cfg, world_size)
        self.gate_table = gate_table(cfg)
        self.lm_head_streams = list(lm_head_stream_weights(cfg))
        self.register_parameters(world_size)
        self.register_constants()
        self.fp8_state = None
        if self.backend.fp8 and cfg.fp8_mlp and "mlp_bank" in self.bank_names:
            self.fp8_state = FP8State(cfg, world_size, self.device)
        self.max_tokens = cfg.val_slice_tokens  # the longest sequence, in tokens
        for stage in cfg.stages:
            self.max_tokens = max(self.max_tokens, stage.batch_tokens // num_microbatches(cfg, world_size))
        self.rotary: dict[tuple, RotaryTables] = {}  # by rotary_key()
        self.rotary_stage = -1
        self.use_rotary(0)
        self.initialize(seed)

    def register_parameters(self, world_size: int) -> None:
        """Allocates the parameters that this model uses, as zeros."""
        cfg = self.cfg
        shapes = param_shapes(cfg, world_size)
        self.bank_names = []
        self.token_embeddings = []
        for spec in used_specs(cfg):
            dtype = dtype_of(cfg.dtype) if spec.dtype == "model" else acc_dtype(cfg)
            zeros = torch.zeros(shapes[spec.name], dtype=dtype, device=self.device)
            self.register_parameter(spec.name, nn.Parameter(zeros))
            if spec.kind == "bank":
                self.bank_names.append(spec.name)
            elif spec.rows_by == "inputs":
                self.token_embeddings.append(spec.name)
        # The name of the table that ngram_sums() reads, a parameter or Optimizer.ngrams.
        self.ngram_key = "bigram_embed" if "bigram_embed" in shapes else "ngrams"

    def register_constants(self) -> None:
        """Allocates tensors that are not trained, but follow from the config or data, or are drawn once."""
        cfg, device = self.cfg, self.device
        # N-grams that share a row of the table multiply it by different random signs: each sees the others'
        # shares as noise of mean zero (record 83).
        signs = torch.zeros(cfg.sign_rows, cfg.hashed_table.width, dtype=dtype_of(cfg.dtype), device=device)
        self.register_buffer("signs", signs)
        # Each token's longest prefix. Until train() copies prefix_table() here, no token has one.
        self.longest_prefix = torch.full((cfg.padded_vocab,), -1, device=device)
        self.copy_gate_column = torch.tensor([cfg.copy_gate_column], device=device)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Sets all parameters to their initial values, and draws the signs."""
        for spec in used_specs(self.cfg):
            value = initial_value(spec.name, self.cfg, seed)
            getattr(self, spec.name)[: len(value)].copy_(value)
        self.embed.copy_(self.lm_head.T)
        signs = torch.randint(2, self.signs.shape, generator=seeded("signs", seed)) * 2 - 1
        self.signs.copy_(signs)

    # ------------------------------------------------------------------------------------------- the forward

    @traced("forward")
    def look_up(self, micro_batch: MicroBatch, training: bool) -> dict[str, Tensor]:
        """Returns what a micro-batch's tokens look up, by table, for forward().

        A table of tokens gives each token's row, (T, ...); bigram_embed or the n-grams give sums of rows, (T,
        width). In training, rows of n-grams are in NgramTable.cache, and the backward leaves gradients in the
        `grad` of what the layers have read; add_looked_up_grads() adds these gradients to the tables. Outside
        training, rows of n-grams are fetched here.
        """
        found = {self.ngram_key: self.ngram_sums(micro_batch, training)}
        for name in self.token_embeddings:
            table = getattr(self, name)
            rows = F.embedding(micro_batch.inputs, table.flatten(1))
            found[name] = rows.unflatten(1, table.shape[1:])
        if training:
            found = {name: rows.detach().requires_grad_() for name, rows in found.items()}
        return found

    def ngram_sums(self, micro_batch: MicroBatch, training: bool) -> Tensor:
        """Returns the sum (T, width) of the rows of each token's n-grams, or bigram, times their signs.

        A hashed n-gram embeds a token together with those before it, so no layer has to learn to recognize
        frequent n-grams (PR 201).
        """
        ids = micro_batch.hashed_rows
        if self.ngram_key == "bigram_embed":
            rows = self.bigram_embed
        elif training:
            rows, ids = self.ngrams.cache, micro_batch.slots
        else:
            row_ids, ids = ids.unique(return_inverse=True)
            rows = self.ngrams.fetch(row_ids)
        sums = rows.new_empty(ids.size(1), rows.size(1), dtype=dtype_of(self.cfg.dtype))
        gather_rows(sums, rows, ids.int(), self.signs, micro_batch.sign_ids)
        return sums

    @traced("forward")
    def forward(
        self,
        looked_up: dict[str, Tensor],
        micro_batch: MicroBatch,
        windows: TokenWindows,
        banks: dict[str, Bank] | None = None,
        fp8_operands: FP8Operands | None = None,
    ) -> Tensor:
        """Runs all layers on what look_up() returned for a micro-batch. Returns the head's input (T, d).

        windows: tokens, by name. banks: Optimizer.banks(); without it, outside training steps, autograd holds
        the banks' gradients. With `fp8_operands`, from FP8State.begin_step, the MLPs run in FP8.
        """
        if banks is None:
            banks = {name: Bank(getattr(self, name)) for name in self.bank_names}
        sequence = micro_batch.cu_seqlens, micro_batch.max_seqlen
        return self.trunk(looked_up, sequence, windows, banks, fp8_operands)

    # Sizes and Python numbers that vary by step must be in DYNAMIC_ARGUMENTS, or each value is compiled anew.
    # Dense attention is compiled anew for each window anyway.
    @compiled
    def trunk(
        self,
        looked_up: dict[str, Tensor],
        sequence: tuple[Tensor, int],
        windows: TokenWindows,
        banks: dict[str, Bank],
        fp8_operands: FP8Operands | None,
    ) -> Tensor:
        """Runs all layers, as forward() says. Compiled, it is one graph, and its backward another.

        sequence: MicroBatch.cu_seqlens and .max_seqlen.
        """
        cfg = self.cfg
        embed = looked_up["embed"]
        T, d = embed.shape
        ngram = looked_up[self.ngram_key]  # (T, width)
        ngram = F.pad(ngram, (0, d - ngram.size(1)))  # (T, d)
        value_embeds: Sequence[Tensor] = ()  # (T, d) each
        if "value_embeds" in looked_up:
            value_embeds = looked_up["value_embeds"].unbind(1)
        cu_seqlens, max_seqlen = sequence
        sequences = {"plain": sequence, "paired": (2 * cu_seqlens, 2 * max_seqlen)}  # two rows per token
        smear_scalar, skip_scalar = self.scalars[-len(MODEL_SCALARS) :].unbind()  # in MODEL_SCALARS' order
        x0 = norm(smear_tokens(embed, self.smear_gate, smear_scalar))
        gates = self.compute_gates(UP_TO_SKIP, x0)
        x = x0
        if cfg.layers[0].ngram:
            x = weighted_sum([(None, x0), (gates["ngram", 0], ngram)])
        # Streams that later layers and lm_head_input() read.
        streams = {"start": x, "ngram": ngram}
        # Layers save these. One that no layer saves, such as "skip" without a layer skip_from, stays x.
        streams |= dict.fromkeys(("skip", "backout", "normed backout", "mudd", "mudd mlp"), x)
        for i, value in enumerate(value_embeds):
            streams[f"value {i}"] = value
        weights = self.layer_weights(banks, value_embeds, fp8_operands, T)
        for i, (layer, w) in enumerate(zip(cfg.layers, weights)):
            if i == cfg.skip_to:
                skip_weight = torch.sigmoid(skip_scalar) * gates["skip", i]
                x = weighted_sum([(None, x), (skip_weight, streams["skip"])])
            # Attention, x0 and n-grams: the first line of the formula at LAYER_SCALARS.
            added: list[Term] = []  # terms added to the stream before the MLPs
            if layer.attention:
                h = norm(x) if i <= cfg.backout_from else streams["normed backout"]
                mudd_terms: list[Term] = []
                # MUDD comes after h: it changes the stream, and what is added to the values, but not
                # attention's input h.
                if layer.mudd:
                    streams["mudd"] = x
                    x, w, mudd_terms = self.mudd_connections(x, w, streams)
                window = windows[layer.window]
                attended = self.attention_branch(i, h, w, gates, sequences[layer.attention], window)
                added = [attended, *mudd_terms]
            if layer.x0:
                added.append((gates["x0", i], x0))
            if layer.ngram and i > 0:
                added.append((gates["ngram", i], ngram))
            if added:
                x = weighted_sum([(w.scalars["resid_attention"], x), *added])
            # MLPs: the second line.
            mlp_outputs: list[Term] = []
            if layer.mlps or layer.mudd:
                mlp_input = norm(x)
                mlp_outputs = self.mlp_branch(mlp_input, w)  # none without MLPs
                if layer.mudd:
                    streams["mudd mlp"] = mlp_input
            x = weighted_sum([(w.scalars["resid_mlp"], x), *mlp_outputs])
            if i == cfg.skip_from:
                streams["skip"] = x
                gates |= self.compute_gates(AFTER_SKIP, x)
            if i == cfg.backout_from:
                streams["backout"] = x
                streams["normed backout"] = norm(x)
        lm_head_streams = [streams[name] for name in self.lm_head_streams]
        return lm_head_input(x, self.stream_weights(TO_LM_HEAD, x), lm_head_streams)

    def layer_weights(
        self, banks: dict[str, Bank], value_embeds: Sequence[Tensor], fp8_operands: FP8Operands | None, T: int
    ) -> list[LayerWeights]:
        """Returns each layer's part of the banks, the value embeddings (T, d) and the scalars.

        Each bank's matrices are in the order of the layers. vo_bank has a value and an output matrix per
        layer that attends, and mlp_bank has fc and proj per MLP. qk_bank or narrow_qk_bank has H matrices for
        each layer: their rows are first all queries', then all keys'. So layer 3 of the record preset, the
        first with wide heads, has matrices 0 .. 5 of qk_bank, and the first three are its queries'.
        """
        cfg = self.cfg
        remaining = {}
        for name, bank in banks.items():
            rows = bank.w.size(1)
            if name in ("qk_bank", "narrow_qk_bank"):
                rows *= cfg.heads  # a layer's H matrices, as one
            remaining[name] = bank.matrices(rows)
        remaining_value_embeds = iter(value_embeds)
        remaining_ve_gates = iter(self.ve_gate_bank.unbind() if hasattr(self, "ve_gate_bank") else ())
        remaining_fp8_operands = iter(fp8_operands.split() if fp8_operands else ())
        layers = []
        # Each next() takes what the layer has of a bank. A layer that lacks a part takes nothing.
        for layer, scalars in zip(cfg.layers, self.layer_scalars(T)):
            qk = v = out = value = ve_gate = None
            if layer.attention:
                qk = next(remaining["narrow_qk_bank" if layer.narrow_qk else "qk_bank"])
                v = next(remaining["vo_bank"])
                out = next(remaining["vo_bank"])
                if layer.narrow_v:  # only half of both matrices is used
                    v = v._replace(w=v.w[: cfg.dim // 2])
                    out = out._replace(w=out.w[:, : cfg.dim // 2])
                if layer.value:
                    value = next(remaining_value_embeds)
                    if not layer.mudd:
                        ve_gate = next(remaining_ve_gates)
            mlps = []
            for _ in range(layer.mlps):
                fc = next(remaining["mlp_bank"])
                proj = next(remaining["mlp_bank"])
                mlps.append(MLPWeights(fc, proj, next(remaining_fp8_operands, None)))
            layers.append(LayerWeights(qk, v, out, value, ve_gate, mlps, scalars))
        return layers

    def layer_scalars(self, T: int) -> list[dict[str, Tensor]]:
        """Returns each layer's scalars, (T or 1, 1), by their names.

        Compiled code repeats them for every token, so that one sum over the tokens gives the gradients of all
        scalars. Elsewhere they are (1, 1).
        """
        L = len(self.cfg.layers)
        columns = []
        for name in LAYER_SCALARS:
            param = getattr(self, name)
            if name == "scalars":
                param = param[: -len(MODEL_SCALARS)]
            columns.append(param.view(L, -1))
        table = torch.cat(columns, dim=1)  # (L, scalars)
        repeats = T if torch.compiler.is_compiling() else 1
        # One unbind for all, because compiled code would copy slices one by one.
        scalars = iter(table.view(-1, 1, 1).expand(-1, repeats, 1).unbind())
        return [{name: next(scalars) for name in LAYER_SCALAR_NAMES} for _ in range(L)]

    def mudd_connections(
        self, x: Tensor, w: LayerWeights, streams: dict[str, Tensor]
    ) -> tuple[Tensor, LayerWeights, list[Term]]:
        """Mixes earlier streams into a layer's input x (T, d), and into its values, by MUDD_OUTPUTS.

        Returns the layer's stream; its weights, with new values and with scalars for each token; and the
        terms to add to the stream with attention's output.
        """
        outputs = self.stream_weights(TO_LAYER, x)[:, :, None]  # (weights, T, 1)
        weights = dict(zip(MUDD_OUTPUTS, outputs.unbind()))
        start, backout = streams["start"], streams["backout"]
        left, right = w.value_embed.chunk(2, 1)
        value = torch.cat([weights["left value"] * left, weights["right value"] * right], 1)
        value = value + weighted_sum(
            [
                (weights["start to value"], start),
                (weights["backout to value"], backout),
                (weights["x to value"], x),
            ]
        )
        x = weighted_sum(
            [
                (1 + weights["x to input"], x),
                (weights["start to input"], start),
                (weights["backout to input"], backout),
            ]
        )
        added: list[Term] = [
            (weights["start to output"], start),
            (weights["ngram to output"], streams["ngram"]),
        ]
        by_token = {name: weights[name] for name in MUDD_SCALAR_NAMES}
        return x, w._replace(value_embed=value, scalars=w.scalars | by_token), added

    def attention_branch(
        self, i: int, h: Tensor, w: LayerWeights, gates: Gates, sequence: tuple[Tensor, int], window: int
    ) -> Term:
        """Runs layer i's attention on h (T, d). Returns the scale of its output, and its output (T, d).

        sequence: cu_seqlens and max_seqlen. Like the window, they count T tokens, or 2T rows of paired heads.
        """
        layer, heads, T = self.cfg.layers[i], self.cfg.heads, len(h)
        cos, sin, softmax_scale = self.rotary[rotary_key(layer)]
        qk, v = self.queries_keys_values(layer, h, w)  # (T, 2, H, Dq), (T, H, Dv)
        if layer.attention == "paired":
            q, k, values = pair_heads(qk, v, cos, sin)
        else:
            q, k = rotate(qk, cos[:T, None, None], sin[:T, None, None]).unbind(1)  # (T, H, Dq) each
            values = v
        if layer.key_shift:
            k = shift_keys(k)
        y = self.backend.attention(softmax_scale * q, k, values, *sequence, window)
        y = y.reshape(T, heads, -1)  # (T, H, Dv)
        if layer.xsa:
            y = without_own_value(y, v, gates["xsa", i])
        if layer.gate:
            # A head with nothing to say can shut its gate, instead of attending to the document's first token
            # as a sink (PR 117).
            y = y * gates["output", i][:, :, None]
        scale = w.scalars["out"] * w.scalars["post_attention"]
        return scale, linear(y.flatten(1), w.out)

    def queries_keys_values(self, layer: Layer, h: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """Returns normed queries and keys (T, 2, H, Dq), and values (T, H, Dv), computed from h (T, d)."""
        T, heads, D = len(h), self.cfg.heads, self.cfg.head_dim
        # Widths come from settings: with -1 compiled code would not know them.
        qk_dim = D // 2 if layer.narrow_qk else D
        v_dim = D // 2 if layer.narrow_v else D
        qk = linear(h, w.qk)
        v = linear(h, w.v)
        # Norms bound scores at high learning rates (record 5; Henry et al. 2020, arXiv:2010.04245). The norms
        # cancel the scalar "qkv" in q and k, so it acts on values only; record 92 applies it there, too. It
        # has the norms' shape, so that compiled code has one kernel for the backward of scalar and norms.
        scale = w.scalars["qkv"][..., None, None].expand(T, 2, heads, 1)
        qk = norm(weighted_sum([(scale, qk.view(T, 2, heads, qk_dim))]))
        v = weighted_sum([(w.scalars["qkv"], v)]).view(T, heads, v_dim)
        if w.value_embed is not None:
            # Value embeddings: a second embedding of the token is added to the values, so that the stream
            # need not carry the token up to this layer (records 14, 17; value residuals: Zhou et al. 2024,
            # arXiv:2410.17897). Their gate is computed from few channels (PR 186).
            added = w.value_embed.view(T, heads, D)[:, :, :v_dim]
            if w.ve_gate is not None:
                half = GATE_DIM // 2
                gate_input = torch.cat([h[:, :half], w.value_embed[:, :half]], dim=-1)  # (T, GATE_DIM)
                gate = 2 * torch.sigmoid(F.linear(gate_input, w.ve_gate))  # (T, H)
                added = gate[:, :, None] * added
            v = v + added
        return qk, v

    def mlp_branch(self, h: Tensor, w: LayerWeights) -> list[Term]:
        """Runs a layer's MLPs on h (T, d). Returns their outputs, each with its scale."""
        outputs: list[Term] = []
        dtype = h.dtype
        mlp_dtype = self.backend.mlp_dtype or dtype
        # The casts stay outside MLP.forward. Inside it, torch 2.11's generated backward would lose the
        # gradients of h, fc and proj.
        h = h.to(mlp_dtype)
        for fc, proj, fp8_operands in w.mlps:
            fc_w, proj_w = fc.w.to(mlp_dtype), proj.w.to(mlp_dtype)
            y = MLP.apply(h, (fc, proj), fc_w, proj_w, self.backend, fp8_operands)
            outputs.append((w.scalars["post_mlp"], y.to(dtype)))
        return outputs

    def compute_gates(self, which: int, u: Tensor) -> Gates:
        """Returns the gates that one of the two gate MLPs computes from u (T, d). Without mudd_gates they are
        constants.
        """
        gates = self.gate_table[which]
        if not gates:
            return {}
        columns = [gate.columns for gate in gates]
        biases = self.mudd_gate_b2[which, : sum(columns)]
        w1 = w2 = None
        if self.cfg.mudd_gates:
            w1 = self.mudd_gate_w1[which]
            w2 = self.mudd_gate_w2[which, : len(biases)]
        outputs = (self.mudd_gate_scale.to(u.dtype) * small_mlp(u, w1, w2, biases)).T  # (T, all columns)
        parts = outputs.split(columns, 1)
        return {(gate.use, gate.layer): part for gate, part in zip(gates, parts)}

    def stream_weights(self, which: int, u: Tensor) -> Tensor:
        """Returns the weights of streams that one of the two MLPs "mudd" computes from u (T, d): (k, T), or
        (k, 1) without Config.mudd_weights.

        TO_LM_HEAD: one weight per stream, with a bias, then mix_groups weights per stream, without a bias.
        """
        outputs = self.lm_head_streams if which == TO_LM_HEAD else MUDD_OUTPUTS
        biases = self.mudd_b2[which, : len(outputs)]
        if which == TO_LM_HEAD:
            biases = F.pad(biases, (0, self.cfg.mix_groups * len(biases)))
        w1 = w2 = None
        if self.cfg.mudd_weights:
            w1 = self.mudd_w1[which]
            w2 = self.mudd_w2[which, : len(biases)]
        return MUDD_SCALE * small_mlp(u, w1, w2, biases)

    # ---------------------------------------------------------------------------------- the head and its loss

    @traced("head")
    @torch.no_grad()
    def head_loss_and_grad(
        self,
        x: Tensor,
        targets: Tensor,
        loss_weights: Tensor,
        head: LMHead,
        sampled_columns: Tensor | None = None,
        pointer_out: PointerOutput | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the head's forward and backward together, in chunks of tokens:

            logits = x @ lm_head;  dx = dlogits @ lm_head.T;  lm_head's gradient += x.T @ dlogits

        x (T, d); targets (T, K) int64; loss_weights (K,). Memory holds one chunk's logits and their gradient
        at a time. lm_head's gradient is added to `head`, and rounded once per chunk, or twice with sampled
        columns: the product, then the sum.

        With `sampled_columns` (P,) int32, ascending, only these columns of lm_head are computed, as if the
        others did not exist: a sampled softmax without correction (Jean et al. 2015, arXiv:1412.2007; record
        92). Targets outside these columns do not count.

        Returns the weighted loss of all targets, summed over tokens, 0-d, at least fp32; and the gradient of
        x. The rest of the backward begins with this gradient and with pointer_out.dprobs, which is written
        here.
        """
        w = self.lm_head
        chunk_size = self.cfg.head_chunk
        if sampled_columns is not None:
            w = w.index_select(1, sampled_columns)  # (d, P)
            targets = index_in(targets, sampled_columns)
            if pointer_out is not None:
                copy_gate_column = index_in(pointer_out.copy_gate_column, sampled_columns)
                pointer_out = pointer_out._replace(copy_gate_column=copy_gate_column)
            chunk_size *= self.cfg.padded_vocab // len(sampled_columns)  # about the same number of logits
        fp8 = self.backend.fp8
        fp8_scale = 0.0  # scale of dlogits in FP8
        # Scales are fixed. fp8_matmul needs a row-major first factor and a column-major second one, so x and
        # w are kept in both layouts.
        if fp8:
            fp8_scale = FP8_DLOGITS_SCALE * self.loss_share
            x_scale = device_scalar(FP8_HEAD_X_SCALE, x.device)
            w_scale = device_scalar(FP8_HEAD_W_SCALE, x.device)
            dlogits_scale = device_scalar(fp8_scale, x.device)
            x8, x8_T = to_fp8_and_copy(x, FP8_HEAD_X_SCALE)
            w8, w8_T = to_fp8_and_copy(w, FP8_HEAD_W_SCALE)
        dx = torch.empty_like(x)
        losses = []
        for i in range(0, len(x), chunk_size):
            chunk = slice(i, i + chunk_size)
            if fp8:
                scales = x_scale, w_scale
                logits = fp8_matmul(x8[chunk], w8_T.T, scales, torch.float8_e4m3fn, fast=True)
            else:
                logits = x[chunk] @ w
            chunk_pointer = None if pointer_out is None else pointer_out.chunk(chunk)
            chunk_losses, dlogits, *transposed = self.backend.softcap_loss(
                logits, targets[chunk], loss_weights, fp8_scale, chunk_pointer, self.cfg.softcap
            )
            losses.append(chunk_losses)
            del logits  # before the next chunk's are computed
            if fp8:
                (dlogits_T,) = transposed
                fp8_matmul(dlogits, w8.T, (dlogits_scale, w_scale), dx.dtype, out=dx[chunk])
                head.add_product(x8_T[:, chunk].T, dlogits_T.T, (x_scale, dlogits_scale), sampled_columns)
            else:
                torch.mm(dlogits, w.T, out=dx[chunk])
                head.add_product(x[chunk], dlogits, (), sampled_columns)
        return torch.cat(losses).sum(), dx

    @compiled
    def pointer_inputs(self, x: Tensor) -> PointerInputs:
        """Returns the pointer's queries, keys and sink scores, computed from the head's inputs x (T, d).

        q and k are normed in at least fp32, and rounded once. Without norms, scores explode with some seeds
        (PR 379).
        """
        sink = self.pointer_sink
        qk = F.linear(x, self.pointer_bank.flatten(0, 1)).unflatten(1, (2, -1))  # (T, 2, pointer_dim)
        q, k = norm(upcast(qk)).unbind(1)
        q = (self.pointer_gain * q).to(x.dtype)
        k = k.to(x.dtype)
        return PointerInputs(q, k, upcast(q) @ sink * len(sink) ** -0.5)

    def run_pointer(self, x: Tensor, micro_batch: MicroBatch, window: int) -> PointerOutput | None:
        """Returns the pointer's probabilities for the head's inputs x (T, d); None if there is no pointer."""
        if not self.cfg.pointer_dim:
            return None
        q, k, sink_scores = self.pointer_inputs(x)
        probs = Pointer.apply(q, k, sink_scores, micro_batch, window, self.backend)
        return PointerOutput(probs, self.copy_gate_column, dprobs=torch.empty_like(probs))

    @torch.no_grad()
    def token_losses(self, micro_batch: MicroBatch, windows: TokenWindows) -> Tensor:
        """Returns -log p (T,) of every next token, in at least fp32 from the logits on. With a pointer, p is
        the mixture's.
        """
        cfg = self.cfg
        x = self.forward(self.look_up(micro_batch, training=False), micro_batch, windows)
        pointer_out = self.run_pointer(x, micro_batch, cfg.pointer_val_window)
        losses = []
        for i in range(0, len(x), cfg.head_chunk):
            chunk = slice(i, i + cfg.head_chunk)
            chunk_pointer = None if pointer_out is None else pointer_out.chunk(chunk)
            logits = x[chunk] @ self.lm_head
            losses.append(next_token_losses(logits, micro_batch.targets[chunk], chunk_pointer, cfg.softcap))
        return torch.cat(losses)

    @torch.no_grad()
    def next_token_probs(self, tokens: Sequence[int]) -> Tensor:
        """Returns the probabilities (vocab_size,), at least fp32, of the token after `tokens`. There is no
        cache: the whole text is computed again.

        Columns of padding keep their probability, as in the loss, so the result may sum to less than 1. With
        a pointer, the copy gate's column has no probability.
        """
        cfg = self.cfg
        text = np.array([*tokens, 0])  # 0: there is no target yet
        micro_batch = move(pack(make_micro_batch(text, EMPTY_INT32, len(tokens), cfg)), self.device)
        looked_up = self.look_up(micro_batch, training=False)
        x = self.forward(looked_up, micro_batch, window_tokens(cfg, cfg.val_windows))
        z = softcapped(x[-1:] @ self.lm_head, cfg.softcap)
        p = z.softmax(1)[0]
        if cfg.pointer_dim:
            pointer_inputs = self.pointer_inputs(x)
            p = all_mixed_probs(z, pointer_inputs, micro_batch, cfg.pointer_val_window, self.copy_gate_column)
        return p[: cfg.vocab_size]

    # -------------------------------------------------------------------------------------- rotary embedding

    def use_rotary(self, stage: int) -> None:
        """Sets up a stage's rotary tables, for each rotary_key() that layers have.

        Later tables overwrite the first stage's, so their addresses never change.
        """
        if stage == self.rotary_stage:
            return
        layers = {rotary_key(layer): layer for layer in self.cfg.layers if layer.attention}
        for key, layer in layers.items():
            new = rotary_tables(self.cfg, stage, layer, 2 * self.max_tokens, self.device)
            if key in self.rotary:
                torch._foreach_copy_(list(self.rotary[key]), list(new))
            else:
                self.rotary[key] = new
        self.rotary_stage = stage


def small_mlp(u: Tensor, w1: Tensor | None, w2: Tensor | None, biases: Tensor) -> Tensor:
    """Returns w2 gelu(w1 u) + biases, (k, T), for u (T, d), w1 (hidden, d), w2 (k, hidden). Without weights,
    returns the biases, (k, 1).

    MUDD: Xiao et al. 2025, arXiv:2502.12170, trimmed in record 81. Record 85 computes gates in the same way.
    """
    if w1 is None:
        return biases[:, None]
    return torch.addmm(biases[:, None], w2, F.gelu(F.linear(u, w1)).T)


# ============================================================================================================
# 8  Linear: products with a bank's matrices, whose backwards write the weights' gradients into main_grad
# ============================================================================================================


@compiled
def write_transpose(out: Tensor, x: Tensor) -> None:
    """Writes x^T, for x (m, n), to out (n, m). FP8 is copied as bytes: generated code would convert it."""
    if x.element_size() == 1:
        out, x = out.view(torch.uint8), x.view(torch.uint8)
    out.copy_(x.T)


@compiled
def add_columns(out: Tensor, columns: Tensor, x: Tensor) -> None:
    """Adds x (n, P) to distinct `columns` (P,) int32 of out (n, m)."""
    # On a GPU index_add_ uses atomics, which distinct columns do not need.
    if out.is_cuda or torch.compiler.is_compiling():
        out[:, columns.long()] += x
    else:
        out.index_add_(1, columns, x)


def write_grad(main_grad: Tensor, a: Tensor, b: Tensor, scales: Sequence[Tensor], accumulate: Tensor) -> None:
    """Writes a^T b to main_grad[:rows, :cols], for a (T, rows) and b (T, cols), or adds it if `accumulate`,
    a 0-d bool tensor on the CPU (see DenseParam).

    For y = x w^T: a = dy, b = x. For y = x w: a = x, b = dy. If a, b and main_grad have one dtype, the
    product is added inside the matmul and rounded once. If a and b are bf16 and main_grad is fp32, the
    product is rounded to bf16, then added. FP8 a and b are column-major, and a^T b times both scales is added
    in fp32.
    """
    out = main_grad[: a.size(1), : b.size(1)]
    if a.dtype == out.dtype:
        if accumulate:
            out.addmm_(a.T, b)
        else:
            torch.mm(a.T, b, out=out)
    elif a.element_size() > 1:  # bf16, into fp32
        if accumulate:
            out.add_(a.T @ b)
        else:
            out.copy_(a.T @ b)
    else:  # FP8
        if accumulate:
            out.add_(fp8_matmul(a.T, b, scales, torch.float32))
        else:
            fp8_matmul(a.T, b, scales, out.dtype, out=out)


# write_grad becomes an operation of torch's, so that a compiled backward can hold it. Its name contains the
# module's, so that copies of this script with different names can be imported in one process.
# torch.library.custom_op would take 0.1 ms more per call.
LIBRARY = torch.library.Library(__name__.replace(".", "_"), "FRAGMENT")
LIBRARY.define(
    "write_grad(Tensor(a!) main_grad, Tensor a, Tensor b, Tensor[] scales, Tensor accumulate) -> ()"
)
LIBRARY.impl("write_grad", write_grad, "CompositeExplicitAutograd")
torch.library.register_fake(f"{LIBRARY.ns}::write_grad", lambda *_: None, lib=LIBRARY)
write_grad_op = getattr(torch.ops, LIBRARY.ns).write_grad.default


class Bank(NamedTuple):
    """Holds a bank's weights, gradient buffer and accumulate flag."""

    w: Tensor  # (n, rows, cols)
    main_grad: Tensor | None = None  # like w; None: autograd keeps the gradient
    accumulate: Tensor | None = None  # DenseParam.accumulate

    def matrices(self, rows: int) -> Iterator[BankMatrix]:
        """Returns the bank's matrices in order or, with more `rows`, matrices of several of them, stacked."""
        # With one split, autograd builds the bank's gradient once. Separate slices would each make a gradient
        # as large as the bank.
        parts = self.w.flatten(0, 1).split(rows)
        whole = self.main_grad
        main_grads = len(parts) * [None] if whole is None else whole.flatten(0, 1).split(rows)
        return (BankMatrix(w, grad, self.accumulate) for w, grad in zip(parts, main_grads))


class BankMatrix(NamedTuple):
    """Holds one matrix's weights, gradient buffer and accumulate flag."""

    w: Tensor  # (rows, cols)
    # The matrix's part of Bank.main_grad. For a narrow w, write_grad() fills only a part.
    main_grad: Tensor | None = None
    accumulate: Tensor | None = None

    def deliver_grad(self, a: Tensor, b: Tensor, scales: Sequence[Tensor] = ()) -> Tensor | None:
        """Writes the weight's gradient, write_grad's a^T b, to main_grad, or returns it to autograd."""
        if self.main_grad is None:
            return fp8_matmul(a.T, b, scales, self.w.dtype) if scales else a.T @ b
        write = write_grad_op if torch.compiler.is_compiling() else write_grad
        write(self.main_grad, a, b, scales, self.accumulate)
        return None


class Linear(torch.autograd.Function):
    """Computes linear(). The weight w is passed beside its BankMatrix, because autograd sees only tensors."""

    @staticmethod
    def forward(ctx, x, matrix, w, transposed):
        ctx.matrix, ctx.transposed = matrix, transposed
        ctx.save_for_backward(x, w)
        return x @ w if transposed else F.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        if ctx.transposed:
            return F.linear(dy, w), None, ctx.matrix.deliver_grad(x, dy), None
        return dy @ w, None, ctx.matrix.deliver_grad(dy, x), None


def linear(x: Tensor, matrix: BankMatrix, transposed: bool = False) -> Tensor:
    """Returns x w^T (T, rows), for x (T, cols) and w (rows, cols) of a bank.

    With `transposed`, returns x w (T, cols), for x (T, rows). MLPs with another activation use linear() (see
    relu_square).
    """
    return Linear.apply(x, matrix, matrix.w, transposed)


# ============================================================================================================
# 9  Layers: norm, sums of streams, rotary embedding, attention
# ============================================================================================================


# Sections 9 to 13 give for each operation its formula, its form in plain torch and, if there is one, its
# Triton kernel with the function that launches it, which takes the plain form's arguments. The Backend
# (section 14) chooses between the two. norm, weighted_sum and rotate have no kernels: each has two forms in
# plain torch, and chooses one itself.

# ---- RMSNorm, sums of streams, rotary embedding ------------------------------------------------------------


def use_eager_form(x: Tensor) -> bool:
    """Returns whether x is fp32 or fp64 and the code is not compiled.

    norm, weighted_sum and rotate each have two forms, equal up to rounding: one for compiled or bf16 code,
    and an eager one with fewer passes over memory. If you edit one, edit both. In two places compiled code
    uses an eager form's Function for its cheaper backward: Norm in lm_head_input(), WeightedSum in
    weighted_sum().
    """
    return not torch.compiler.is_compiling() and x.element_size() > 2


NORM_EPS = 2.0**-23  # for every dtype


def norm(x: Tensor) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last axis: RMSNorm without weights (arXiv:1910.07467).

    The mean is taken in at least fp32.
    """
    if use_eager_form(x):  # both forms compute the same: edit both
        return Norm.apply(x)
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


class Norm(torch.autograd.Function):
    """Computes norm() with half the passes over memory of uncompiled rms_norm."""

    @staticmethod
    def forward(ctx, x):
        length = torch.linalg.vector_norm(upcast(x), dim=-1, keepdim=True)
        scale = (length.square() / x.size(-1) + NORM_EPS).rsqrt()
        y = cast(x * scale, x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, scale = ctx.saved_tensors
        along = upcast(dy * y).mean(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1).mul_(scale).to(y.dtype)


def weighted_sum(terms: Sequence[Term]) -> Tensor:
    """Sums scales times streams (T, d), from left to right.

    A scale is one number per token, (T, 1) or (1, 1); None means 1. Streams may have other shapes, such as
    groups of channels (T, groups, d / groups), with scales that broadcast to them. With learned scales
    of the stream, of its own output, of x0 and of the n-grams, a layer can use the input again (record 9).
    """
    if use_eager_form(terms[0][1]):
        return WeightedSum.apply(*chain(*terms))
    # Sum term by term, but with WeightedSum's backward: autograd's would store another copy of dy, in the
    # scale's dtype.
    scaled = [x if scale is None else WeightedSum.apply(scale, x) for scale, x in terms]
    return sum(scaled[1:], scaled[0])  # sum(scaled) would add 0 first


class WeightedSum(torch.autograd.Function):
    """Computes weighted_sum() in fewer passes over memory than with autograd's backward. Takes scale, stream,
    scale, ...
    """

    @staticmethod
    def forward(ctx, scale, x, *more):
        ctx.save_for_backward(scale, x, *more)
        out = x.clone() if scale is None else cast(scale * x, x.dtype)
        for scale, x in zip(more[::2], more[1::2]):
            if scale is None:
                out.add_(x)
            else:
                out.addcmul_(scale, x)
        return out

    @staticmethod
    def backward(ctx, dy):
        grads = []
        for scale, x in zip(ctx.saved_tensors[::2], ctx.saved_tensors[1::2]):
            if scale is None:
                grads += [None, dy]
            else:
                grads += [(dy.to(scale.dtype) * x).sum_to_size(scale.shape), (dy * scale).to(x.dtype)]
        return tuple(grads)


ROTARY_BASE = 1024  # before YaRN, the longest wavelength is 2 pi times this many positions
YARN_TURNS = (1, 32)  # turns in a window: below the first a frequency is stretched, above the second kept
YARN_SCALE = 0.2  # a new window multiplies the softmax scale by 1 + YARN_SCALE * log(new / old window)


class RotaryTables(NamedTuple):
    """Holds the rotary tables of all layers with one window and one width of heads."""

    cos: Tensor  # (positions, head_dim / 4)
    sin: Tensor
    scale: Tensor  # softmax scale, 0-d: code with a float would recompile for each value


def rotary_key(layer: Layer) -> tuple:
    """Returns what rotary_tables() depends on in a layer. Layers with the same key share tables.

    To add another embedding of positions, add a field of Layer, return it here, and branch in rotary_tables()
    or, where queries and keys are rotated, in GPT.attention_branch and pair_heads(). shift_keys() needs a
    half that is not rotated.
    """
    return layer.window, layer.narrow_qk


def rotary_tables(
    cfg: Config, stage: int, layer: Layer, num_positions: int, device: torch.device
) -> RotaryTables:
    """Computes cos, sin and the softmax scale of a layer, adapted at each change of its window so far.

    Rotary embedding: Su et al. 2021, arXiv:2104.09864. Half of each wide head is not rotated, to match
    content at any distance (record 17). Narrow heads are rotated whole. So both have head_dim / 4 angles per
    position. Plain heads use positions t, paired heads 2t and 2t + 1. YaRN keeps what was learned in short
    windows valid in longer ones (PR 122; Peng et al. 2023, arXiv:2309.00071).
    """
    exponents = torch.linspace(0, 1, cfg.head_dim // 4, dtype=acc_dtype(cfg), device=device)
    freq = (1 / ROTARY_BASE) ** exponents  # radians per position
    scale = cfg.narrow_attn_scale if layer.narrow_qk else cfg.attn_scale
    windows = [window_tokens(cfg, each.windows)[layer.window] for each in cfg.stages]
    for old, new in zip(windows[:stage], windows[1:]):  # each change of windows up to this stage
        turns = old * freq / (2 * math.pi)
        ratio = old / new
        least, most = YARN_TURNS
        keep = ((turns - least) / (most - least)).clamp(0, 1)
        freq = freq * (ratio + keep * (1 - ratio))
        scale *= YARN_SCALE * math.log(new / old) + 1
    positions = torch.arange(num_positions, dtype=freq.dtype, device=device)
    angles = positions[:, None] * freq
    dtype = dtype_of(cfg.dtype)
    return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype), freq.new_full((), scale))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first 2n numbers of x (..., D), given the angles' cos and sin (..., n).

    Each pair (a, b) of adjacent numbers becomes (cos a + sin b, cos b - sin a).
    """
    n = cos.size(-1)
    if use_eager_form(x):  # as complex numbers, in one pass
        phases = F.pad(torch.complex(cos, -sin), (0, x.size(-1) // 2 - n), value=1)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * phases).flatten(-2)
    rotated, passthrough = x[..., : 2 * n], x[..., 2 * n :]
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([cos * a + sin * b, cos * b - sin * a], dim=-1).flatten(-2)
    return torch.cat([rotated, passthrough], dim=-1)


def pair_heads(qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates paired heads. Returns their queries and keys (2T, H/2, Dq) and their values (2T, H/2, Dv).

    qk (T, 2, H, Dq), v (T, H, Dv); cos and sin cover 2T positions or more.

    Two heads share one sequence of twice the length. So each query sees both heads' keys and values: more to
    attend to for the same matmuls (PR 191). Memory (T, H, D) is read as 2T rows of H/2 heads: heads j and
    j + H/2 share sequence j, where token t has rows 2t and 2t + 1, in this order. But head h is rotated to
    position 2t + h mod 2. So with H = 6, as in the record, rows and positions agree in sequences 0 and 2, and
    are exchanged in sequence 1.
    """
    T, heads, _ = v.shape
    cos = cos[: 2 * T].view(T, 1, 1, 2, -1)
    sin = sin[: 2 * T].view(T, 1, 1, 2, -1)
    q, k = rotate(qk.unflatten(2, (-1, 2)), cos, sin).unbind(1)  # (T, H/2, 2, Dq) each
    q = q.reshape(2 * T, heads // 2, -1)
    k = k.reshape(2 * T, heads // 2, -1)
    return q, k, v.unflatten(1, (2, -1)).flatten(0, 1)  # a view: reshape() would copy v in compiled code


# ---- The smear, shifted keys, XSA, the last mix ------------------------------------------------------------


def smear_tokens(embed: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    """Adds to each token's embedding (T, d) a gated share of the previous one, even across documents.

    gate (1, GATE_DIM); scale 0-d. Without the smear, an attention head learns to look one token back (PR
    130).
    """
    share = scale * torch.sigmoid(F.linear(embed[1:, :GATE_DIM], gate))  # (T - 1, 1)
    return torch.cat([embed[:1], embed[1:] + share * embed[:-1]])


def shift_keys(k: Tensor) -> Tensor:
    """Takes the second half of each key (T, H, D) from the previous token, even across documents.

    Token 0 keeps its own. This lets one layer act as an induction head, which otherwise takes two layers: a
    query finds what followed an earlier copy of its token (PR 169). The second half is not rotated, so it
    matches content, not distance.
    """
    rotated, passthrough = k.chunk(2, dim=-1)
    return torch.cat([rotated, torch.cat([passthrough[:1], passthrough[:-1]])], dim=-1)


def without_own_value(y: Tensor, v: Tensor, xsa: Tensor) -> Tensor:
    """Removes from each head's output y the share tanh(xsa) of its component along the token's own value v.

    y, v (T, H, D); xsa (T or 1, H). This is exclusive self-attention (record 82): the residual stream holds
    the token's own content anyway.
    """
    # Upcast the products, not the factors: compiled code would keep fp32 copies of factors. It computes these
    # products in fp32 anyway.
    square = upcast(v.square()).sum(-1, keepdim=True)
    along = upcast(y * v).sum(-1, keepdim=True) / square.clamp_min(1e-8)
    return (y - xsa.tanh()[:, :, None] * along * v).to(y.dtype)


def lm_head_input(x: Tensor, weights: Tensor, streams: list[Tensor]) -> Tensor:
    """Returns the head's input: norm(x + the sum of weights times streams), for x and n streams (T, d).

    weights (n + n * groups, T or 1): first one weight per stream; then one per stream and group of channels,
    which is added to the stream's weight.
    """
    n = len(streams)
    by_stream, by_group = weights[:n], weights[n:].unflatten(0, (n, -1))  # (n, T), (n, groups, T)
    scales = (by_stream[:, None] + by_group).mT[..., None]  # (n, T, groups, 1)
    groups = scales.size(2)
    terms: list[Term] = [(None, x.unflatten(1, (groups, -1)))]  # (T, groups, d / groups)
    for scale, stream in zip(scales, streams):
        terms.append((scale, stream.unflatten(1, (groups, -1))))
    # Use Norm even when compiled: its backward needs only its result, while rms_norm's would run
    # weighted_sum() again.
    return Norm.apply(weighted_sum(terms).flatten(1))


# ---- Attention ---------------------------------------------------------------------------------------------

# Two forms of one formula follow: flash_attention (varlen and fa3 in Config.attention_impl) and
# dense_attention, which computes scores tile by tile. To change scores, edit dense_attention: the other calls
# a library.

QUERY_TILE = 32  # queries per tile; larger tiles compute more scores that the mask discards


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int
) -> Tensor:
    """Attends causally within documents: position i sees j of its document if 0 <= i - j <= window.

    q, already scaled, and k (T, H, Dq); v (T, H, Dv); cu_seqlens (n,) int32, document boundaries; max_seqlen
    bounds a document's length. Returns (T, H, Dv), computed in at least fp32.

    Queries are taken in tiles. Each tile meets its own keys and those of the whole tiles that hold the
    `window` positions before it: about T * (window + QUERY_TILE) scores instead of T * T.
    """
    T, H, _ = q.shape
    # Compiled code would ignore the cache, with a warning. It computes equal biases only once anyway.
    make_bias = tile_bias.__wrapped__ if torch.compiler.is_compiling() else tile_bias
    bias = make_bias(cu_seqlens, cu_seqlens._version, T, H, min(window, max_seqlen - 1, T - 1))
    return TiledAttention.apply(q, k, v, bias.to(torch.promote_types(q.dtype, torch.float32)))


def document_numbers(cu_seqlens: Tensor, T: int) -> Tensor:
    """Returns the document of each of T positions, (T,) int64, from 1: document i ends at cu_seqlens[i]."""
    pos = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, pos, right=True)


def first_seen(cu_seqlens: Tensor, T: int, window: int) -> Tensor:
    """Returns the first position that each of T positions sees, by document and window, (T,) int64."""
    positions = torch.arange(T, device=cu_seqlens.device)
    return torch.maximum(cu_seqlens[document_numbers(cu_seqlens, T) - 1], positions - window)


@lru_cache(4)  # layers of one kind share a bias
def tile_bias(cu_seqlens: Tensor, version: int, T: int, H: int, window: int) -> Tensor:
    """Returns the bias of TiledAttention's scores, (H * tiles, QUERY_TILE, keys): 0, or -inf where a query
    does not see the key.

    The keys of a tile are its own positions and, in whole tiles, the `window` or more before them. Positions
    from T on are padding and form a document of their own. version: cu_seqlens._version, because the cache
    does not compare a tensor's contents.
    """
    tile = QUERY_TILE
    positions = torch.arange(padded(T, tile), device=cu_seqlens.device)
    before = padded(window, tile)
    first = first_seen(cu_seqlens, len(positions), window).view(-1, tile, 1)  # (tiles, tile, 1)
    keys = F.pad(positions, (before, 0), value=-1).unfold(0, before + tile, tile).unsqueeze(1)
    # keys (tiles, 1, before + tile)
    seen = (first <= keys) & (keys <= positions.view(-1, tile, 1))
    return torch.where(seen, 0.0, -math.inf).repeat(H, 1, 1)


class TiledAttention(torch.autograd.Function):
    """Computes attention of q, k (T, H, Dq) and v (T, H, Dv), with tile_bias().

    Heads lie one after the other, each padded to whole tiles, so that one batch of products serves them all.
    The first tiles of a head therefore also have keys of the previous head, which the bias hides.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias):
        q_tiles = tiles_by_head(q, bias, QUERY_TILE)
        k_tiles = tiles_by_head(k, bias, bias.size(2))
        v_tiles = tiles_by_head(v, bias, bias.size(2))
        probs = torch.baddbmm(bias, q_tiles, k_tiles.mT).softmax(-1)
        ctx.save_for_backward(q_tiles, k_tiles, v_tiles, probs)
        return by_position(probs @ v_tiles, v)

    @staticmethod
    def backward(ctx, dy):
        q_tiles, k_tiles, v_tiles, probs = ctx.saved_tensors
        dy_tiles = tiles_by_head(dy, probs, QUERY_TILE)
        dscores = torch._softmax_backward_data(dy_tiles @ v_tiles.mT, probs, -1, probs.dtype)
        dq = by_position(dscores @ k_tiles, dy)
        dk = by_position(sum_tiles(dscores.mT @ q_tiles), dy)
        dv = by_position(sum_tiles(probs.mT @ dy_tiles), dy)
        return dq, dk, dv, None


def tiles_by_head(t: Tensor, like: Tensor, size: int) -> Tensor:
    """Returns tiles (H * tiles, size, D) of t (T, H, D), with the dtype and the number of tiles of `like`.

    A tile is QUERY_TILE rows of a head, preceded by the size - QUERY_TILE rows before them. Tiles overlap, so
    the result is a view. Rows before the first head and after T are zeros.
    """
    (T, H, D), before = t.shape, size - QUERY_TILE
    rows = like.new_zeros(before + len(like) * QUERY_TILE, D)
    rows[before:].view(H, -1, D)[:, :T].copy_(t.transpose(0, 1))
    return rows.unfold(0, size, QUERY_TILE).mT


def sum_tiles(x: Tensor) -> Tensor:
    """Sums the gradients x (tiles, keys, D) of overlapping tiles into rows (tiles * QUERY_TILE, D)."""
    n, keys, D = x.shape
    rows = x.new_zeros(keys + (n - 1) * QUERY_TILE, D)
    for i in range(0, keys, QUERY_TILE):
        rows[i : i + n * QUERY_TILE].view(n, QUERY_TILE, D).add_(x[:, i : i + QUERY_TILE])
    return rows[keys - QUERY_TILE :]


def by_position(rows: Tensor, like: Tensor) -> Tensor:
    """Returns rows, which lie head by head, as (T, H, D), with the T, H and dtype of `like`."""
    T, H, _ = like.shape
    return rows.view(H, -1, rows.size(-1))[:, :T].transpose(0, 1).to(like.dtype)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int
) -> Tensor:
    """Computes dense_attention by FlashAttention, which needs q, k and v of one width: narrower ones are
    padded with zeros.
    """
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and sets an environment variable

    v_dim = v.size(-1)
    head_dim = max(q.size(-1), v_dim)
    q, k, v = (F.pad(t, (0, head_dim - t.size(-1))) for t in (q, k, v))
    y = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=1.0, window_size=(window, 0)
    )  # type: ignore
    return y[:, :, :v_dim]  # type: ignore


# ============================================================================================================
# 10  FP8. Scales, casts, products.
#
# A number x is stored as its code round(x / scale), saturated at the format's largest number. So x is about
# code * scale. FP8 products sum over the last axis of both factors as they lie in memory, so most factors are
# needed in two layouts, x and x^T.
# ============================================================================================================


E4M3_MAX = 448.0  # more digits, for activations and weights
E5M2_MAX = 57344.0  # more range, for gradients

# The head's scales (records 19, 51, 92) are fixed, so that no step searches for a maximum. The largest e4m3
# number stands for x = 100 and w = 2. Logits are e4m3 with scale 1: rounding large ones does no harm, because
# the softcap flattens them. Gradients of logits have the scale FP8_DLOGITS_SCALE times loss_share().
FP8_HEAD_X_SCALE = 100 / E4M3_MAX
FP8_HEAD_W_SCALE = 2 / E4M3_MAX
FP8_DLOGITS_SCALE = 0.75 / 8 / E4M3_MAX  # record 92's, although the gradients are e5m2


@compiled
def to_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x / scale in `dtype`: rounded to nearest, saturated and contiguous."""
    fp8_max = torch.finfo(dtype).max
    x = (x.float() / scale).clamp(-fp8_max, fp8_max)
    return x.to(dtype, memory_format=torch.contiguous_format)


def cast_and_transpose(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns to_fp8() of x (..., n, m) and of its transpose."""
    return to_fp8(x, scale, dtype), to_fp8(x.mT, scale, dtype)


# Tile sizes, warps and pipeline stages are defined before each launch. The tiles of matmuls fit a thread
# block's shared memory: 99 KiB on consumer GPUs, 163 on the A100, 227 on the H100 and B200.
# bench/gpu/h200/1_tiles.txt lists what was tried on one H200.


@jit
def load_fp32(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@jit
def tile_offsets(rows, cols, M, N):
    """Returns the offsets of these rows and columns in a matrix (M, N), and a mask of existing ones."""
    offs = rows.to(tl.int64)[:, None] * N + cols[None, :]
    return offs, (rows[:, None] < M) & (cols[None, :] < N)


@jit
def store_fp8(codes, out, out_T, rows, cols, M, N, FP8_MAX: tl.constexpr):
    """Stores a tile of codes and its transpose in FP8, saturated.

    FP8 products need M to be a multiple of 16. Rounding M here tells the compiler, which then stores 16 bytes
    at once.

    The tile is converted twice, once for each store. This works around a fault of ptxas 12.8: if one
    conversion serves both stores, some bytes of the first may be transposed.
    """
    M = M // 16 * 16
    codes = tl.clamp(codes, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)  # a NaN stays visible
    offs, mask = tile_offsets(rows, cols, M, N)
    tl.store(out + offs, codes.to(out.dtype.element_ty), mask=mask)
    offs_T, mask_T = tile_offsets(cols, rows, N, M)
    # tl.where changes only values that are not stored. It keeps compilers from merging this conversion with
    # the first.
    codes_T = tl.trans(tl.where(mask, codes, 0.0).to(out.dtype.element_ty))
    tl.store(out_T + offs_T, codes_T, mask=mask_T)


# Scales are views of one array, so their alignment may differ. Without this option Triton would compile for
# each alignment.
@jit(do_not_specialize_on_alignment=["scale"])
def cast_and_transpose_kernel(x, scale, out, out_T, M, N, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr):
    """Converts a tile of x times 1 / scale. The product is exact if the scale is a power of 2. The scale of h
    is a power of 2; that of dy is one, too, if the number of micro-batches per rank is a power of 2.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = tile_offsets(rows, cols, M, N)
    codes = load_fp32(x + offs, mask) * (1 / tl.load(scale))
    store_fp8(codes, out, out_T, rows, cols, M, N, FP8_MAX)


CAST_TILES = dict(BLOCK=64, num_warps=4)


def triton_cast_and_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    out = x.new_empty(M, N, dtype=dtype)
    out_T = x.new_empty(N, M, dtype=dtype)
    grid = triton.cdiv(M, CAST_TILES["BLOCK"]), triton.cdiv(N, CAST_TILES["BLOCK"])
    fp8_max = int(torch.finfo(dtype).max)
    cast_and_transpose_kernel[grid](x.contiguous(), scale, out, out_T, M, N, fp8_max, **CAST_TILES)
    return out, out_T


def fp8_matmul(
    a: Tensor,
    b: Tensor,
    scales: Sequence[Tensor],
    dtype: torch.dtype,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Returns a b times both scales, in `out` if given, for FP8 a (n, k), row-major, b (k, m), column-major.

    Each scale is one fp32 number. At most one of a and b is e5m2. `fast` keeps fewer bits of the sums.
    """
    assert torch.float8_e4m3fn in (a.dtype, b.dtype)  # GPUs need one e4m3 factor
    return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=fast, out=out)  # type: ignore


def transposed_copy(x: Tensor) -> Tensor:
    """Returns a row-major copy (n, m) of x^T, for x (m, n)."""
    write_transpose(out := x.new_empty(x.T.shape), x)
    return out


def to_fp8_and_copy(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns x / scale (n, m) in e4m3, and its row-major transpose (m, n), a copy of the same bytes.

    The head uses this function, not Backend.cast_and_transpose.
    """
    x8 = to_fp8(x, scale, torch.float8_e4m3fn)
    return x8, transposed_copy(x8)


# ============================================================================================================
# 11  MLP. relu(h fc^T)^2 proj, with gradients written by hand; the same in FP8; the kernel of both.
# ============================================================================================================


class MLP(torch.autograd.Function):
    """Computes relu(h fc^T)^2 proj, for h (T, d), fc and proj (F, d).

    matrices: the BankMatrix of fc and that of proj, which take the gradients. fc_w and proj_w: their weights,
    as arguments that autograd sees.

    With `fp8_operands` all products are in FP8 (record 92): gradients in e5m2, all else in e4m3. Gradients
    pass straight through the roundings, except that da is 0 where square is rounded to 0.

    relu_square() says how to write another activation.
    """

    @staticmethod
    def forward(ctx, h, matrices, fc_w, proj_w, backend, fp8_operands):
        ctx.matrices, ctx.backend, ctx.fp8_operands = matrices, backend, fp8_operands
        if fp8_operands is None:
            square = backend.relu_square(h, fc_w)
            ctx.save_for_backward(h, square, fc_w, proj_w)
            return square @ proj_w
        scale = fp8_operands.scale
        h8, h8_T = backend.cast_and_transpose(h, scale("h"), torch.float8_e4m3fn)
        square8, square8_T = backend.relu_square_fp8(h8, fp8_operands)
        ctx.save_for_backward(h8_T, square8, square8_T)
        proj8_T = fp8_operands.weights_T[PROJ]
        return fp8_matmul(square8, proj8_T.T, (scale("square"), scale("proj")), h.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy):
        backend, fp8_operands = ctx.backend, ctx.fp8_operands
        fc, proj = ctx.matrices
        if fp8_operands is None:
            h, square, fc_w, proj_w = ctx.saved_tensors
            da = backend.relu_square_grad(dy, proj_w, square)
            dh = da @ fc_w
            dfc = fc.deliver_grad(da, h)
            dproj = proj.deliver_grad(square, dy)
            return dh, None, dfc, dproj, None, None
        h8_T, square8, square8_T = ctx.saved_tensors
        scale = fp8_operands.scale
        dy8, dy8_T = backend.cast_and_transpose(dy, scale("dy"), torch.float8_e5m2)
        da8, da8_T = backend.relu_square_fp8(dy8, fp8_operands, square8)
        fc8_T = fp8_operands.weights_T[FC]
        dh = fp8_matmul(da8, fc8_T.T, (scale("da"), scale("fc")), dy.dtype)
        dfc = fc.deliver_grad(da8_T.T, h8_T.T, (scale("da"), scale("h")))
        dproj = proj.deliver_grad(square8_T.T, dy8_T.T, (scale("square"), scale("dy")))
        return dh, None, dfc, dproj, None, None


def relu_square(h: Tensor, fc: Tensor) -> Tensor:
    """Returns relu(h fc^T)^2, (T, F), for h (T, d) and fc (F, d). Its gradient is written by hand, to save
    memory.

    The square does better than GELU at the same cost (record 5; Primer: So et al. 2021, arXiv:2109.08668).

    To try another activation without writing its gradient, put
    linear(act(linear(h, fc)), proj, transposed=True) into GPT.mlp_branch, and run with --set fp8_mlp=false
    bf16_mlp=false. That line has neither FP8 nor bf16_mlp, so the tests of FP8's MLPs fail.

    With a gradient by hand, the activation must be 0 for negative inputs and rise for positive ones, because
    relu_square_grad gets only the output. Edit relu_square and relu_square_grad; with FP8, also
    relu_square_fp8; and on a GPU, also relu_square_kernel, or run without that kernel.
    """
    return F.linear(h, fc).relu_().square()


def relu_square_grad(dy: Tensor, proj: Tensor, square: Tensor) -> Tensor:
    """Returns d(h fc^T) = 2 sqrt(square) (dy proj^T), for the result of relu_square (record 87); proj (F, d).

    The root is taken in at least fp32, except for bf16 on a CPU: there it is taken in bf16, which gives
    relu(h fc^T) exactly and takes half the time.
    """
    if square.dtype == torch.bfloat16 and not square.is_cuda:
        root = square.sqrt()
    else:
        # Not sqrt(): on CPUs with MKL it handles zeros one by one, which takes 15 times as long.
        root = upcast(square.clamp_min(torch.finfo(square.dtype).tiny)).rsqrt_().mul_(square)
    return (2 * dy @ proj.T).mul_(root)


# ---- The same in FP8 ---------------------------------------------------------------------------------------

# The MLPs' input h and the gradient dy of their output have fixed scales, too: |h| is at most the root of the
# width, 27.7 for 768. The other scales are delayed: margin * maximum of the previous step / the format's
# largest number. The margins differ, because from step to step activations change most, and weights least.
FP8_MLP_H_SCALE = 2**-4
FP8_MLP_DY_SCALE = 2**-6
FP8_ACT_MARGIN = 1.80
FP8_GRAD_MARGIN = 1.25
FP8_WEIGHT_MARGIN = 1.12
FP8_EXACT_STEPS = 17  # at first proj, from 0, grows by more than the factor FP8_WEIGHT_MARGIN in a step
FP8_MIN_AMAX = 1e-12  # weights' maxima are raised to this; below it square and da keep their scale


# The matrices of an MLP. relu_square_fp8 multiplies by fc in the forward, and by proj in the backward.
FC, PROJ = 0, 1
# Where FP8Operands.scales holds the scale of each tensor. Rows: the input, the weight and the result of
# relu_square_fp8. Columns: its product with fc, and that with proj.
INPUT, WEIGHT, RESULT = 0, 1, 2
FP8_SCALE_PLACES = {
    "h": (INPUT, FC),
    "dy": (INPUT, PROJ),
    "fc": (WEIGHT, FC),
    "proj": (WEIGHT, PROJ),
    "square": (RESULT, FC),
    "da": (RESULT, PROJ),
}
# For kernels: where the rows WEIGHT and RESULT begin in FP8Operands.scales, in units of SCALE_STEP. A row has
# two scales.
WEIGHT_ROW_AT = tl.constexpr(2 * WEIGHT)
RESULT_ROW_AT = tl.constexpr(2 * RESULT)


class FP8Operands(NamedTuple):
    """Holds the FP8 operands of one MLP or, with one more axis, (mlps, ...), of all MLPs.

    FP8State.begin_step() returns those of all MLPs, and split() takes them apart.

    square = relu(h fc^T)^2, y = square proj; d(h fc^T) = da = 2 sqrt(square) (dy proj^T).
    """

    weights: Tensor  # fc and proj (2, F, d), e4m3
    weights_T: Tensor  # (2, d, F)
    scales: Tensor  # (3, 2, 1, 1) fp32, indexed by FP8_SCALE_PLACES
    # (mlps, 2) fp32, always of all MLPs: maxima of square and |da| in this step so far
    amax: Tensor
    i: int = 0  # this MLP's row of amax

    def split(self) -> Iterator[FP8Operands]:
        """Yields the operands of each MLP. amax stays whole, because Inductor loses a view's offset if a
        Triton kernel writes through the view.
        """
        parts = zip(self.weights, self.weights_T, self.scales)
        for i, (weights, weights_T, scales) in enumerate(parts):
            yield FP8Operands(weights, weights_T, scales, self.amax, i)

    def amax_index(self, column: int) -> int:
        """Returns where in amax, flattened, this MLP's maximum of square (FC) or |da| (PROJ) is."""
        return 2 * self.i + column

    def scale(self, name: str) -> Tensor:
        """Returns the scale (1, 1) of "h", "dy", "fc", "proj", "square" or "da"."""
        return self.scales[FP8_SCALE_PLACES[name]]


@compiled
def convert_mlp_bank(out: list[Tensor], bank: Tensor, scales: Tensor, previous_amax: Tensor) -> None:
    """Converts a bank (2 mlps, F, d) of the matrices fc, proj, fc, ... for FP8 products (records 84, 89, 92).

    Writes FP8Operands.weights (mlps, 2, F, d) and .weights_T (mlps, 2, d, F) to `out`, and their scales to
    `scales` (mlps, 3, 2, 1, 1). A scale comes from the maximum in the previous step, `previous_amax` (mlps,
    2), with room for growth. Where previous_amax is 0, the scale is this step's maximum / E4M3_MAX,
    without a margin, rounded to the bank's dtype (compiled code may skip that rounding). This step's maxima
    then replace previous_amax.
    """
    weights = bank.unflatten(0, (-1, 2))
    amax = weights.abs().amax((2, 3)).float().clamp_min(FP8_MIN_AMAX)
    exact = (amax / E4M3_MAX).to(bank.dtype).float()
    delayed = previous_amax * (FP8_WEIGHT_MARGIN / E4M3_MAX)
    scale = torch.where(previous_amax > 0, delayed, exact)[:, :, None, None]
    scales[:, WEIGHT] = scale  # for fc and proj
    previous_amax.copy_(amax)
    torch._foreach_copy_(out, cast_and_transpose(weights, scale, torch.float8_e4m3fn))


class FP8State:
    """Holds the MLPs' weights in FP8 and their scales, from step to step, at fixed addresses.

    The scales of gradients are proportional to loss_share(), as losses are, so the FP8 numbers do not depend
    on the number of ranks.
    """

    def __init__(self, cfg: Config, world_size: int, device: torch.device):
        mlps = sum(layer.mlps for layer in cfg.layers)
        empty = partial(torch.empty, dtype=torch.float8_e4m3fn, device=device)
        # FP8Operands.weights and .weights_T of every MLP
        self.weights = [empty(mlps, 2, cfg.mlp_dim, cfg.dim), empty(mlps, 2, cfg.dim, cfg.mlp_dim)]
        dy_scale = FP8_MLP_DY_SCALE * loss_share(cfg, world_size)
        scales = torch.ones(3, 2, device=device)  # later, maxima set all scales but h's and dy's
        scales[FP8_SCALE_PLACES["h"]] = FP8_MLP_H_SCALE
        scales[FP8_SCALE_PLACES["dy"]] = dy_scale
        scales[FP8_SCALE_PLACES["da"]] = dy_scale
        # cuBLAS takes scales at multiples of 16 bytes only, so each scale is padded to four floats.
        scales = scales[:, :, None, None].repeat(mlps, 1, 1, 4, 1)  # (mlps, 3, 2, 4, 1)
        self.scales = scales[:, :, :, :1]  # FP8Operands.scales of every MLP
        self.amax = torch.zeros(mlps, 2, device=device)  # FP8Operands.amax
        self.weight_amax = torch.zeros(mlps, 2, device=device)  # maxima of fc and proj in the previous step
        per_amax = [FP8_ACT_MARGIN / E4M3_MAX, FP8_GRAD_MARGIN / E5M2_MAX]  # for square and da
        self.scale_per_amax = torch.tensor(per_amax, device=device)

    @torch.no_grad()
    def begin_step(self, bank: Tensor, exact: bool) -> FP8Operands:
        """Converts mlp_bank to FP8, for all forwards of a step. Returns the stacked FP8Operands, in the same
        memory at every step.

        exact: the weights' scales come from the weights as they are now, not from the previous step's maxima
        times a margin.
        """
        if exact:
            self.weight_amax.zero_()  # so convert_mlp_bank() takes this step's maxima
        convert_mlp_bank(self.weights, bank[: 2 * len(self.amax)], self.scales, self.weight_amax)
        weights, weights_T = self.weights
        return FP8Operands(weights, weights_T, self.scales, self.amax.zero_())

    def end_step(self, amax: Tensor) -> None:
        """Sets the next step's scales of each MLP's square and da from this step's maxima (mlps, 2).

        The maxima are over all ranks, so that scales do not depend on how micro-batches are distributed.
        """
        scales = self.scales[:, RESULT, :, 0, 0]  # (mlps, 2), for square and da
        # A maximum of 0, infinity or NaN leaves the scale unchanged. In step 0 all of da is 0, as proj is.
        is_known = (amax > FP8_MIN_AMAX) & (amax < math.inf)
        scales.copy_(torch.where(is_known, amax * self.scale_per_amax, scales))


def relu_square_fp8(
    x8: Tensor, operands: FP8Operands, square8: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the forward of relu_square in FP8 or, with square8, the backward.

    Forward: x8 is h (T, d) in e4m3; returns `square` in e4m3. Backward: x8 is dy (T, d) in e5m2; returns da
    in e5m2. Either is (T, F), with its transpose (F, T), and is first rounded to bf16. operands.amax keeps
    the larger of its entry and the result's maximum.
    """
    column = FC if square8 is None else PROJ
    x_scale, w_scale, out_scale = operands.scales[:, column]
    product = x8.float() @ operands.weights[column].float().T * (x_scale * w_scale)
    if square8 is None:
        result = product.bfloat16().relu_().square()
    else:
        square = square8.float() * operands.scales[RESULT, FC]
        result = (product * square.sqrt_().mul_(2)).bfloat16()
    amax = operands.amax.view(-1)[operands.amax_index(column)]
    amax.copy_(torch.maximum(amax, result.abs().max()))
    return cast_and_transpose(result.float() * out_scale.reciprocal(), 1.0, x8.dtype)


# ---- The kernel, for all forms -----------------------------------------------------------------------------


@jit
def matmul_tile(a, b, rows, cols, M, N, K, a_m, a_k, b_n, b_k, BLOCK_K: tl.constexpr):
    """Returns the tile at `rows` and `cols` of a b^T, for a (M, K) and b (N, K), summed in fp32.

    Rows beyond M and N wrap around, so loads stay inside a and b. The caller's mask drops their products.
    """
    k = tl.arange(0, BLOCK_K)
    left = a + (rows % M).to(tl.int64)[:, None] * a_m + k[None, :] * a_k
    right = b + (cols % N)[None, :] * b_n + k[:, None] * b_k
    total = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    for start in range(0, K, BLOCK_K):
        left_tile = tl.load(left, mask=k[None, :] < K - start, other=0.0)
        right_tile = tl.load(right, mask=k[:, None] < K - start, other=0.0)
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
        left += BLOCK_K * a_k
        right += BLOCK_K * b_k
    return total


@jit(do_not_specialize_on_alignment=["scales"])
def relu_square_kernel(
    a,
    b,
    square,
    out,
    out_T,
    scales,
    SCALE_STEP: tl.constexpr,
    amax,
    amax_index,
    M,
    N,
    K,
    a_m,
    a_k,
    b_n,
    b_k,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Computes a tile of out (M, N): of relu(a b^T)^2 or, with `square` (M, N), of 2 sqrt(square) (a b^T).

    a (M, K), b (N, K); a_m .. b_k are their strides. GROUP rows of tiles share operands in the L2 cache.
    FP8_MAX: the largest number of the result's format; with it out_T (N, M) is written, too. 0: no FP8, and
    no out_T, scales and amax.
    scales: FP8Operands.scales. In memory they are h, dy, fc, proj, square, da, each SCALE_STEP numbers after
    the one before. The forward reads h, fc and square, the backward the others and square.
    """
    i, j = tl.program_id(1), tl.program_id(0)
    i, j = tl.swizzle2d(i, j, tl.num_programs(1), tl.num_programs(0), GROUP)
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
    product = matmul_tile(a, b, rows, cols, M, N, K, a_m, a_k, b_n, b_k, BLOCK_K)
    offs, mask = tile_offsets(rows, cols, M, N)
    dtype = tl.bfloat16 if FP8_MAX else out.dtype.element_ty
    if FP8_MAX:
        column_scales = scales if square is None else scales + SCALE_STEP
        product *= tl.load(column_scales) * tl.load(column_scales + WEIGHT_ROW_AT * SCALE_STEP)  # of a and b
    if square is None:
        relu = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        result = relu * relu
    else:
        squares = load_fp32(square + offs, mask)
        if FP8_MAX:
            squares *= tl.load(scales + RESULT_ROW_AT * SCALE_STEP)  # the scale of the forward's out
        else:
            product = product.to(dtype).to(tl.float32)
        result = 2 * tl.sqrt(squares) * product
    result = result.to(dtype)
    if FP8_MAX:
        result = result.to(tl.float32)
        tl.atomic_max(amax + amax_index, tl.max(tl.abs(result)), sem="relaxed")  # exact in any order
        codes = result * (1 / tl.load(column_scales + RESULT_ROW_AT * SCALE_STEP))  # the scale of out
        store_fp8(codes, out, out_T, rows, cols, M, N, FP8_MAX)
    else:
        tl.store(out + offs, result, mask=mask)


RELU_SQUARE_TILES = {
    "small": dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, GROUP=8, num_warps=8, num_stages=4),
    "large": dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=3),
    "large fp8": dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, GROUP=8, num_warps=8, num_stages=3),
}


def launch_relu_square(
    a: Tensor,
    b: Tensor,
    square: Tensor | None,
    out: Tensor,
    out_T: Tensor | None = None,
    operands: FP8Operands | None = None,
    column: int = FC,
) -> None:
    """Launches relu_square_kernel, in FP8 if `operands` are given."""
    M, K = a.shape
    N = len(b)
    tiles = RELU_SQUARE_TILES["small"]
    if a.is_cuda and torch.cuda.get_device_capability(a.device)[0] in (9, 10):
        tiles = RELU_SQUARE_TILES["large" if operands is None else "large fp8"]
    grid = triton.cdiv(N, tiles["BLOCK_N"]), triton.cdiv(M, tiles["BLOCK_M"])
    fp8_arguments: dict = dict(scales=None, SCALE_STEP=0, amax=None, amax_index=0, FP8_MAX=0)
    if operands is not None:
        fp8_arguments = dict(
            scales=operands.scales,
            SCALE_STEP=operands.scales.stride(1),
            amax=operands.amax,
            amax_index=operands.amax_index(column),
            FP8_MAX=int(torch.finfo(out.dtype).max),
        )
    relu_square_kernel[grid](
        a,
        b,
        square,
        out,
        out_T,
        M=M,
        N=N,
        K=K,
        a_m=a.stride(0),
        a_k=a.stride(1),
        b_n=b.stride(0),
        b_k=b.stride(1),
        **fp8_arguments,
        **tiles,
    )


def triton_relu_square(h: Tensor, fc: Tensor) -> Tensor:
    out = h.new_empty(len(h), len(fc))
    launch_relu_square(h, fc, None, out)
    return out


def triton_relu_square_grad(dy: Tensor, proj: Tensor, square: Tensor) -> Tensor:
    out = dy.new_empty(len(dy), len(proj))
    launch_relu_square(dy, proj, square, out)
    return out


def triton_relu_square_fp8(
    x8: Tensor, operands: FP8Operands, square8: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    column = FC if square8 is None else PROJ
    w8 = operands.weights[column]
    out = x8.new_empty(len(x8), len(w8))
    out_T = x8.new_empty(len(w8), len(x8))
    launch_relu_square(x8, w8, square8, out, out_T, operands, column)
    return out, out_T


# ============================================================================================================
# 12  Loss. The softcapped cross-entropy, also of a mixture with the copy pointer; the pointer.
#
# With the copy pointer a token's probability is a mixture:
#
#     p = (1 - gate (1 - p_sink)) p_vocab + gate p_copy
#
#   p_vocab  the head's probability: the softmax among all columns but the copy gate's
#   gate     the softmax of the copy gate's column among all columns
#   p_copy   the pointer's probability: its weight on earlier positions that hold the token
#   p_sink   the pointer's weight on no position, which goes to the head
#
# In training, softcap_loss and its kernel compute the loss and its gradient. In validation, next_token_losses
# computes only the loss. For samples, all_mixed_probs computes the mixture's probabilities. To change the
# mixture, edit mix_with_pointer() and mix_with_pointer_grad(). To add a training term, such as a z-loss, edit
# softcap_loss, mixture_losses, the kernel and triton_softcap_loss. Pass the term's factor from
# head_loss_and_grad(), times loss_weights[0], so that the term is averaged over micro-batches as the loss is.
# ============================================================================================================


# ---- Targets; cross-entropy; the mixture with the pointer --------------------------------------------------


@compiled
def loss_targets(targets: Tensor, count: int, prefixes: Tensor | None) -> Tensor:
    """Returns the `count` tokens after each position, (T, count) int64; targets (T,) are the first column.
    -1: there is none. With `prefixes` (V,), one more column holds the next token's prefix.
    """
    columns = []
    for k in range(count):
        missing = min(k, len(targets))
        columns.append(F.pad(targets[k:], (0, missing), value=-1))
    if prefixes is not None:
        columns.append(prefixes[targets])
    return torch.stack(columns, dim=1)


@compiled
def index_in(ids: Tensor, columns: Tensor) -> Tensor:
    """Returns the index of each of `ids` int64 in ascending `columns` (P,) int32; -1: absent."""
    at = torch.searchsorted(columns.long(), ids).clamp_max(len(columns) - 1)
    return torch.where(columns[at] == ids, at, -1)


def mix_with_pointer(p_vocab, gate, not_gate, p_copy, p_sink):
    """Returns the mixture p, the head's part of p, and dp/dz_gate. Also called by the kernel.

    not_gate is 1 - gate, computed directly: the difference loses all digits when the gate is near 1. The
    arguments broadcast: one number per row or, for all tokens at once, p_vocab and p_copy (V,).
    """
    # (1 - gate (1 - p_sink)) p_vocab:
    p_head = p_vocab * (not_gate + gate * p_sink)
    gate_slope = gate * not_gate * (p_copy - p_vocab * (1 - p_sink))
    return p_head + gate * p_copy, p_head, gate_slope


def mix_with_pointer_grad(weight_over_p, p_vocab, gate, p_head, gate_slope):
    """Returns gradients of the loss -weight log p, given weight / p. Also called by the kernel.

    dp_copy, dp_sink: with respect to p_copy and p_sink.
    dz_gate_mixture: with respect to z, the softcapped logit, in the gate's column.
    dz_at_first, vocab_softmax_weight: with respect to z in any other column. There it is vocab_softmax_weight
    times the softmax without the gate's column, less dz_at_first if the column is the target's.
    """
    dp_copy = -weight_over_p * gate
    dp_sink = dp_copy * p_vocab
    dz_gate_mixture = -weight_over_p * gate_slope
    dz_at_first = weight_over_p * p_head
    vocab_softmax_weight = weight_over_p * (p_head + gate_slope)
    return dp_copy, dp_sink, dz_gate_mixture, dz_at_first, vocab_softmax_weight


def softcapped(logits: Tensor, cap: Softcap) -> Tensor:
    """Returns z, the capped logits, in at least fp32."""
    return cap.scale * softcap_sigmoid(logits, cap)


def softcap_sigmoid(logits: Tensor, cap: Softcap) -> Tensor:
    """Returns the capped logits divided by the cap's scale, in at least fp32."""
    return (upcast(logits) + cap.shift).div_(cap.span).sigmoid_()


class PointerOutput(NamedTuple):
    """Holds the copy pointer's probabilities for the next tokens of n positions."""

    # (2, n), at least fp32: p_copy, the probability of the sources that hold the next token; p_sink
    probs: Tensor
    copy_gate_column: Tensor  # (1,) int64: the head's column whose softmax is `gate`, the pointer's weight
    dprobs: Tensor  # (2, n): where softcap_loss writes the gradient of `probs`

    def chunk(self, chunk: slice) -> PointerOutput:
        return self._replace(probs=self.probs[:, chunk], dprobs=self.dprobs[:, chunk])


PROB_FLOOR = 1e-9  # added to the mixture's probabilities so that their logarithms are finite


def softcap_loss(
    logits: Tensor,
    targets: Tensor,
    loss_weights: Tensor,
    fp8_scale: float = 0.0,
    pointer_out: PointerOutput | None = None,
    cap: Softcap = SOFTCAP,
) -> tuple[Tensor, ...]:
    """Returns the loss of each row, a weighted sum of its targets' cross-entropies after the softcap, and the
    gradient of the losses' sum with respect to the logits.

        z = scale sigmoid((logits + shift) / span)
        loss = sum_k loss_weights[k] (log sum exp z - z[targets[k]])
        dz_j = (sum_k loss_weights[k]) softmax(z)_j - sum_k loss_weights[k] [j = targets[k]]

    With `pointer_out` the first target's loss is mixture_losses'.

    logits (n, V), or (n, P) with sampled columns, which targets then index; targets (n, K) int64, contiguous,
    -1: none; loss_weights (K,) in the losses' dtype. Losses (n,) are fp32 (fp64 for fp64 logits). The
    gradient has the logits' dtype. With `fp8_scale` it is e5m2 with that scale, saturating, and is returned
    twice: (n, V), and transposed.
    """
    # Work in place where possible: on a CPU memory traffic is the limit. Sums of exp(z) cannot overflow: see
    # Softcap.
    s = softcap_sigmoid(logits, cap)
    slope = cap.scale / cap.span  # dz/dlogits = slope s (1 - s)
    exp_z = (cap.scale * s).exp_()
    target_ids = targets.clamp_min(0)
    target_weights = (targets >= 0) * loss_weights
    target_s = s.gather(1, target_ids)
    target_z = cap.scale * target_s
    if pointer_out is None:
        sum_exp = exp_z.sum(dim=-1, keepdim=True)
        losses = target_weights * (sum_exp.log() - target_z)
        dz_per_exp_z = target_weights.sum(dim=-1, keepdim=True) / sum_exp
        dz_at_targets = target_weights
    else:
        losses, dz_per_exp_z, dz_at_targets, dz_gate = mixture_losses(
            exp_z, target_z, target_weights, pointer_out
        )
    grad = (1 - s).mul_(s).mul_(exp_z).mul_(slope * dz_per_exp_z)
    grad.scatter_add_(1, target_ids, -slope * dz_at_targets * target_s * (1 - target_s))
    if pointer_out is not None:
        gate_s = s[:, pointer_out.copy_gate_column]
        gate_grad = slope * dz_gate * gate_s * (1 - gate_s)
        grad.index_copy_(1, pointer_out.copy_gate_column, gate_grad)
    losses = losses.sum(dim=-1)
    if fp8_scale:
        return losses, *cast_and_transpose(grad, fp8_scale, torch.float8_e5m2)
    return losses, grad.to(logits.dtype)


def mixture_losses(
    exp_z: Tensor, target_z: Tensor, target_weights: Tensor, pointer_out: PointerOutput
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns softcap_loss's losses (n, K) with a pointer, and their gradient in three parts: dz_per_exp_z
    (n, 1), the factor of exp(z) in all columns but the gate's; dz_at_targets (n, K), which is subtracted at
    the targets; and dz_gate (n, 1), the gradient in the gate's column. Sets exp_z to 0 in the gate's column,
    and writes pointer_out.dprobs.

    The first target's loss is -weight log(p + PROB_FLOOR), where p is the mixture:

        p = p_head + gate p_copy,  p_head = (1 - gate (1 - p_sink)) p_vocab
        dp/dz_gate = gate (1 - gate) (p_copy - (1 - p_sink) p_vocab) = gate_slope
        dp/dz_j = p_head [j = target] - (p_head + gate_slope) (softmax without the gate)_j

    The losses of the other targets are as without the pointer. exp_z (n, V); target_z and target_weights (n,
    K).
    """
    gate_column = pointer_out.copy_gate_column
    exp_gate = exp_z[:, gate_column]
    exp_z.index_fill_(1, gate_column, 0)
    sum_vocab = exp_z.sum(dim=-1, keepdim=True)
    sum_exp = sum_vocab + exp_gate
    losses = target_weights * (sum_exp.log() - target_z)
    gate = exp_gate / sum_exp
    not_gate = sum_vocab / sum_exp
    p_copy, p_sink = pointer_out.probs[..., None]
    p_vocab = target_z[:, :1].exp() / sum_vocab
    p, p_head, gate_slope = mix_with_pointer(p_vocab, gate, not_gate, p_copy, p_sink)
    p = p + PROB_FLOOR
    first_weight = target_weights[:, :1]
    other_weights = target_weights.sum(dim=-1, keepdim=True) - first_weight
    losses[:, :1] = -first_weight * p.log()
    dp_copy, dp_sink, dz_gate_mixture, dz_at_first, vocab_softmax_weight = mix_with_pointer_grad(
        first_weight / p, p_vocab, gate, p_head, gate_slope
    )
    pointer_out.dprobs.copy_(torch.stack([dp_copy, dp_sink])[..., 0])
    dz_per_exp_z = vocab_softmax_weight / sum_vocab + other_weights / sum_exp
    dz_at_targets = torch.cat([dz_at_first, target_weights[:, 1:]], 1)
    dz_gate = other_weights * gate + dz_gate_mixture
    return losses, dz_per_exp_z, dz_at_targets, dz_gate


mix_with_pointer_in_kernel = jit(mix_with_pointer)
mix_with_pointer_grad_in_kernel = jit(mix_with_pointer_grad)
FLOOR = tl.constexpr(PROB_FLOOR)
LOG2_E = tl.constexpr(math.log2(math.e))  # exp2 takes half the instructions of exp


@jit
def load_sigmoid(logits, cols, V, SHIFT, PER_SPAN):
    """Returns softcap_sigmoid() of a row's logits in columns `cols`. Values beyond V are undefined."""
    x = tl.load(logits + cols, mask=cols < V).to(tl.float32)
    return 1 / (1 + tl.exp2((x + SHIFT) * (-PER_SPAN * LOG2_E)))


@jit
def softcap_loss_kernel(
    logits,
    targets,
    loss_weights,
    losses,
    grad,
    grad_T,
    n,
    V,
    logits_stride,
    pointer_probs,
    pointer_dprobs,
    copy_gate_column,
    pointer_stride,
    K: tl.constexpr,
    grad_max,
    grad_mul,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    PER_SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the losses and the gradient of ROWS rows, with softcap_loss's names and shapes.

    grad_T (V, n) or None; pointer_probs and pointer_dprobs (2, n), rows pointer_stride apart, or None.
    softmax_weight is dz_per_exp_z times the sum of exp(z). dz_at_first is the first of dz_at_targets.
    grad_mul times s (1 - s) is dz/dlogits, divided by fp8_scale if there is one.
    z lies in 0 .. SCALE, so exponentials need no maximum subtracted. Tile rows beyond the last row repeat it
    and write the same numbers.
    """
    tile_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    rows = tl.minimum(tile_rows, n - 1).to(tl.int64)
    offs = tl.arange(0, BLOCK)[None, :]
    logits += rows * logits_stride
    grad += rows * V
    targets += rows * K
    gate_col = -1  # no column
    if pointer_probs is not None:
        gate_col = tl.load(copy_gate_column).to(tl.int32)

    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + offs
        s = load_sigmoid(logits, cols, V, SHIFT, PER_SPAN)
        sums += tl.where((cols < V) & (cols != gate_col), tl.exp2(s * (SCALE * LOG2_E)), 0.0)
    sum_vocab = tl.sum(sums, 1, keep_dims=True)
    sum_exp = sum_vocab
    if pointer_probs is not None:
        exp_gate = tl.exp(load_sigmoid(logits, gate_col, V, SHIFT, PER_SPAN) * SCALE)
        sum_exp += exp_gate
    lse = tl.log(sum_exp)

    loss = 0.0
    other_weights = 0.0  # sum of the weights of targets not mixed with the pointer
    softmax_weight = 0.0  # factor of the softmax among all columns, in every column but the gate's
    for k in tl.static_range(K):
        target = tl.load(targets + k)
        z = load_sigmoid(logits, tl.maximum(target, 0), V, SHIFT, PER_SPAN) * SCALE
        weight = tl.load(loss_weights + k) * (target >= 0)
        if k > 0 or pointer_probs is None:
            loss += weight * (lse - z)
            other_weights += weight
        else:
            p_copy = tl.load(pointer_probs + rows)
            p_sink = tl.load(pointer_probs + pointer_stride + rows)
            gate = exp_gate / sum_exp
            not_gate = sum_vocab / sum_exp
            p_vocab = tl.exp(z) / sum_vocab
            p, p_head, gate_slope = mix_with_pointer_in_kernel(p_vocab, gate, not_gate, p_copy, p_sink)
            p += FLOOR
            loss -= weight * tl.log(p)
            dp_copy, dp_sink, dz_gate_mixture, dz_at_first, vocab_softmax_weight = (
                mix_with_pointer_grad_in_kernel(weight / p, p_vocab, gate, p_head, gate_slope)
            )
            tl.store(pointer_dprobs + rows, dp_copy)
            tl.store(pointer_dprobs + pointer_stride + rows, dp_sink)
            # The softmax without the gate's column is softmax / not_gate.
            softmax_weight = vocab_softmax_weight / not_gate
    tl.store(losses + rows, loss)

    softmax_weight += other_weights
    for start in range(0, V, BLOCK):
        cols = start + offs
        s = load_sigmoid(logits, cols, V, SHIFT, PER_SPAN)
        softmax = tl.exp2(s * (SCALE * LOG2_E) - lse * LOG2_E)
        dz = softmax_weight * softmax
        for k in tl.static_range(K):
            target_weight = tl.load(loss_weights + k) if k > 0 or pointer_probs is None else dz_at_first
            # A missing target, -1, is no column.
            dz -= tl.where(cols == tl.load(targets + k).to(tl.int32), target_weight, 0.0)
        if pointer_probs is not None:
            dz = tl.where(cols == gate_col, dz_gate_mixture + other_weights * softmax, dz)
        g = dz * (s * (1 - s) * grad_mul)
        g = tl.clamp(g, -grad_max, grad_max, propagate_nan=tl.PropagateNan.ALL)  # a NaN must stay visible
        tl.store(grad + cols, g.to(grad.dtype.element_ty), mask=cols < V)
        if grad_T is not None:
            g_T = tl.where(cols < V, g, 0.0).to(grad.dtype.element_ty)  # converted again: see store_fp8
            tl.store(grad_T + cols.to(tl.int64) * n + tile_rows, g_T, mask=(cols < V) & (tile_rows < n))


# One row's logits stay in the L2 cache for the second pass. FP8's transpose needs 32 rows, to store whole
# sectors of 32 bytes.
LOSS_TILES = {"row": dict(ROWS=1, BLOCK=2048, num_warps=8), "fp8": dict(ROWS=32, BLOCK=128, num_warps=8)}


def triton_softcap_loss(
    logits: Tensor,
    targets: Tensor,
    loss_weights: Tensor,
    fp8_scale: float = 0.0,
    pointer_out: PointerOutput | None = None,
    cap: Softcap = SOFTCAP,
) -> tuple[Tensor, ...]:
    n, V = logits.shape
    losses = logits.new_empty(n, dtype=torch.float32)
    if fp8_scale:
        grad = logits.new_empty(n, V, dtype=torch.float8_e5m2)
        grad_T = grad.new_empty(V, n)
        tiles = LOSS_TILES["fp8"]
    else:
        grad, grad_T = logits.new_empty(n, V), None
        tiles = LOSS_TILES["row"]
    pointer_arguments: dict = dict(
        pointer_probs=None, pointer_dprobs=None, copy_gate_column=None, pointer_stride=None
    )
    if pointer_out is not None:
        pointer_arguments = dict(
            pointer_probs=pointer_out.probs,
            pointer_dprobs=pointer_out.dprobs,
            copy_gate_column=pointer_out.copy_gate_column,
            pointer_stride=pointer_out.probs.stride(0),
        )
    softcap_loss_kernel[(triton.cdiv(n, tiles["ROWS"]),)](
        logits,
        targets,
        loss_weights,
        losses,
        grad,
        grad_T,
        n=n,
        V=V,
        logits_stride=logits.stride(0),
        **pointer_arguments,
        K=len(loss_weights),
        grad_max=torch.finfo(grad.dtype).max,
        grad_mul=cap.scale / cap.span / (fp8_scale or 1.0),
        SCALE=cap.scale,
        SHIFT=cap.shift,
        PER_SPAN=1 / cap.span,
        **tiles,
    )
    return (losses, grad) if grad_T is None else (losses, grad, grad_T)


@compiled
def next_token_losses(
    logits: Tensor,
    targets: Tensor,
    pointer_out: PointerOutput | None = None,
    cap: Softcap = SOFTCAP,
) -> Tensor:
    """Returns the losses -log p (n,) of targets (n,), in at least fp32, for logits (n, V). Without
    pointer_out p is the softmax after the softcap; with it, the mixture plus PROB_FLOOR.
    """
    z = softcapped(logits, cap)
    if pointer_out is None:
        return F.cross_entropy(z, targets, reduction="none")
    gate, not_gate, z = split_copy_gate(z, pointer_out.copy_gate_column)
    p_vocab = (-F.cross_entropy(z, targets, reduction="none")).exp()
    p_copy, p_sink = pointer_out.probs
    p, _, _ = mix_with_pointer(p_vocab, gate, not_gate, p_copy, p_sink)
    return -(p + PROB_FLOOR).log()


def all_mixed_probs(
    z: Tensor, inputs: PointerInputs, micro_batch: MicroBatch, window: int, copy_gate_column: Tensor
) -> Tensor:
    """Returns the probabilities (V,) of the token after the last position: the mixture of next_token_losses,
    for every token at once and without PROB_FLOOR. z (1, V): the last position's softcapped logits. inputs:
    those of all positions.
    """
    gate, not_gate, z = split_copy_gate(z, copy_gate_column)
    p_vocab = z.softmax(1)[0]
    last = len(inputs.q) - 1
    _, sources, scores, _ = next(pointer_tiles(inputs, micro_batch, window, last))
    p_pointer = torch.cat([inputs.sink_scores[last:], scores[0]]).softmax(0)
    p_sink, p_source = p_pointer[:1], p_pointer[1:]
    p_copy = torch.zeros_like(p_vocab).index_add_(0, micro_batch.inputs[sources], p_source)
    p, _, _ = mix_with_pointer(p_vocab, gate, not_gate, p_copy, p_sink)
    return p


def split_copy_gate(z: Tensor, copy_gate_column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the softmax (n,) of copy_gate_column in softcapped logits z (n, V), 1 minus it, and z with
    -inf in that column.
    """
    others = z.index_fill(1, copy_gate_column, -math.inf)
    log_odds = z[:, copy_gate_column][:, 0] - others.logsumexp(1)
    return torch.sigmoid(log_odds), torch.sigmoid(-log_odds), others


# ---- Copy pointer ------------------------------------------------------------------------------------------

# PR 379; pointer sentinel mixtures: Merity et al. 2016, arXiv:1609.07843. Each position i is a query that
# attends to a sink and to sources j, the positions strictly before i in its document and window. To change
# the score, edit pointer_tiles and pointer_grad. Then edit pointer_scores and pointer_grad_kernel, too, or
# run without the kernels.
#
#     score_ij = q_i k_j / sqrt(pointer_dim),   lse_i = log(exp sink_score_i + sum_j exp score_ij)
#     p_copy_i = sum_j exp(score_ij - lse_i) [token_j = target_i],   p_sink_i = exp(sink_score_i - lse_i)
#
# softcap_loss mixes p_copy with the head's probabilities. Neither depends on the other, so the pointer runs
# before the head. The pointer's backward begins with the gradients of p_copy and p_sink, from softcap_loss:
#
#     mean_i = p_copy_i dp_copy_i + p_sink_i dp_sink_i,   dsink_score_i = p_sink_i (dp_sink_i - mean_i)
#     dscore_ij = exp(score_ij - lse_i) ([token_j = target_i] dp_copy_i - mean_i)


POINTER_QUERIES = 256  # number of queries whose scores are in memory at once


class PointerInputs(NamedTuple):
    q: Tensor  # (T, pointer_dim)
    k: Tensor  # (T, pointer_dim)
    sink_scores: Tensor  # (T,), at least fp32


def pointer_tiles(
    inputs: PointerInputs, micro_batch: MicroBatch, window: int, first_query: int = 0
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields, for tiles of queries from first_query on: the slice of the queries; the slice of the sources
    that they may see; the scores (n, m), in at least fp32, -inf for unseen sources; and which sources hold
    the next token.
    """
    q, k, _ = inputs
    T, dim = q.shape
    first = first_seen(micro_batch.cu_seqlens, T, window)
    positions = torch.arange(T, device=q.device)
    for i in range(first_query, T, POINTER_QUERIES):
        queries = slice(i, i + POINTER_QUERIES)
        sources = slice(max(0, i - window), i + POINTER_QUERIES)
        seen = (first[queries, None] <= positions[sources]) & (positions[sources] < positions[queries, None])
        scores = upcast(q[queries]) @ upcast(k[sources]).T * dim**-0.5
        scores.masked_fill_(~seen, -math.inf)
        yield queries, sources, scores, micro_batch.inputs[sources] == micro_batch.targets[queries, None]


@torch.no_grad()
def pointer(inputs: PointerInputs, micro_batch: MicroBatch, window: int) -> tuple[Tensor, Tensor]:
    """Returns PointerOutput.probs (2, T), and lse (T,)."""
    sink_scores = inputs.sink_scores
    probs = sink_scores.new_empty(2, len(sink_scores))
    lse = torch.empty_like(sink_scores)
    for queries, _, scores, holds_target in pointer_tiles(inputs, micro_batch, window):
        lse[queries] = torch.logaddexp(scores.logsumexp(1), sink_scores[queries])
        probs[0, queries] = (scores.sub_(lse[queries, None]).exp_() * holds_target).sum(1)
    probs[1] = (sink_scores - lse).exp()
    return probs, lse


@torch.no_grad()
def pointer_grad(
    inputs: PointerInputs,
    micro_batch: MicroBatch,
    window: int,
    probs: Tensor,
    lse: Tensor,
    dprobs: Tensor,
) -> PointerInputs:
    """Returns the gradients of the inputs, given pointer()'s arguments and results, and dprobs (2, T), the
    gradient of its probabilities.
    """
    q, k, sink_scores = inputs
    scale = q.size(1) ** -0.5
    mean = (probs * dprobs).sum(0)
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k, dtype=sink_scores.dtype)
    for queries, sources, scores, holds_target in pointer_tiles(inputs, micro_batch, window):
        dscores = holds_target * dprobs[0, queries, None] - mean[queries, None]
        dscores *= scores.sub_(lse[queries, None]).exp_().mul_(scale)
        dq[queries] = dscores @ upcast(k[sources])
        dk[sources] += dscores.T @ upcast(q[queries])
    return PointerInputs(dq, dk.to(k.dtype), probs[1] * (dprobs[1] - mean))


class Pointer(torch.autograd.Function):
    """Computes PointerOutput.probs from PointerInputs, with the Backend's pointer() and pointer_grad()."""

    @staticmethod
    def forward(ctx, q, k, sink_scores, micro_batch, window, backend):
        probs, lse = backend.pointer(PointerInputs(q, k, sink_scores), micro_batch, window)
        ctx.save_for_backward(q, k, sink_scores, probs, lse)
        ctx.micro_batch, ctx.window, ctx.backend = micro_batch, window, backend
        return probs

    @staticmethod
    def backward(ctx, dprobs):
        q, k, sink_scores, probs, lse = ctx.saved_tensors
        inputs = PointerInputs(q, k, sink_scores)
        grads = ctx.backend.pointer_grad(inputs, ctx.micro_batch, ctx.window, probs, lse, dprobs)
        return grads.q, grads.k, grads.sink_scores, None, None, None


# The kernels never store scores: the backward computes them again (FlashAttention-2: arXiv:2307.08691). Tile
# rows beyond the last position repeat it and write the same numbers.


@jit
def pointer_scores(a, b, seen, DIM: tl.constexpr):
    """Returns the scores of tiles a and b, one of queries and one of keys; -inf where not `seen`."""
    scores = tl.dot(a, tl.trans(b), input_precision="ieee") * DIM**-0.5
    return tl.where(seen, scores, float("-inf"))


@jit
def pointer_kernel(
    q, k, first_sources, targets, tokens, sink_scores, out, T, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes p_copy, p_sink and lse, the rows of `out` (3, T), for a tile of queries.

    Sums are divided by exp(peak). The peak is the largest score so far, the sink's among them.
    """
    offs, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    rows = tl.minimum(tl.program_id(0) * BLOCK + offs, T - 1)
    q_tile = tl.load(q + rows.to(tl.int64)[:, None] * DIM + d)
    first = tl.load(first_sources + rows)
    target = tl.load(targets + rows)
    sink = tl.load(sink_scores + rows)
    peak = sink
    copy_sum = tl.zeros_like(sink)
    total = copy_sum + 1  # exp(sink - peak)
    for start in range(tl.min(first), tl.max(rows), BLOCK):
        cols = start + offs
        seen = (first[:, None] <= cols) & (cols < rows[:, None])
        cols = tl.minimum(cols, T - 1)
        k_tile = tl.load(k + cols.to(tl.int64)[:, None] * DIM + d)
        holds_target = target[:, None] == tl.load(tokens + cols)
        scores = pointer_scores(q_tile, k_tile, seen, DIM)
        old_peak = peak
        peak = tl.maximum(peak, tl.max(scores, 1))
        exp_scores = tl.exp(scores - peak[:, None])
        shrink = tl.exp(old_peak - peak)
        total = total * shrink + tl.sum(exp_scores, 1)
        copy_sum = copy_sum * shrink + tl.sum(tl.where(holds_target, exp_scores, 0.0), 1)
    lse = peak + tl.log(total)
    tl.store(out + rows, copy_sum / total)
    tl.store(out + T + rows, tl.exp(sink - lse))
    tl.store(out + 2 * T + rows, lse)


@jit
def pointer_grad_kernel(
    a,
    b,
    bounds,
    a_ids,
    b_ids,
    lse,
    mean,
    dp_copy,
    grad,
    T,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradient of a tile of a (T, DIM), given b (T, DIM).

    Without KEYS, a has the queries and b the keys, a_ids the queries' targets and b_ids the keys' tokens:
    query i sees the keys bounds[i] .. i - 1. With KEYS, a has the keys: key i is seen by the queries
    i + 1 .. bounds[i] - 1. lse, mean and dp_copy are always the queries'.
    """
    offs, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    rows = tl.minimum(tl.program_id(0) * BLOCK + offs, T - 1)
    a_offs = rows.to(tl.int64)[:, None] * DIM + d
    a_tile = tl.load(a + a_offs)
    bound = tl.load(bounds + rows)
    a_id = tl.load(a_ids + rows)
    first, end = (rows + 1, bound) if KEYS else (bound, rows)
    total = tl.zeros((BLOCK, DIM), tl.float32)
    for start in range(tl.min(first), tl.max(end), BLOCK):
        cols = start + offs
        seen = (first[:, None] <= cols) & (cols < end[:, None])
        cols = tl.minimum(cols, T - 1)
        b_tile = tl.load(b + cols.to(tl.int64)[:, None] * DIM + d)
        holds_target = a_id[:, None] == tl.load(b_ids + cols)
        scores = pointer_scores(a_tile, b_tile, seen, DIM)
        query_ids = cols[None, :] if KEYS else rows[:, None]
        dscores = tl.where(holds_target, tl.load(dp_copy + query_ids), 0.0) - tl.load(mean + query_ids)
        dscores *= tl.exp(scores - tl.load(lse + query_ids))
        total = tl.dot(dscores.to(b_tile.dtype), b_tile, total, input_precision="ieee")
    tl.store(grad + a_offs, total * DIM**-0.5)


POINTER_TILES = dict(BLOCK=64, num_warps=4, num_stages=3)


@compiled
def pointer_index_rows(tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, window: int) -> Tensor:
    """Returns the kernels' index rows, (4, T) int32: each query's first source; the end of each source's
    queries; tokens; targets. A query's sources end before it; a source's queries begin after it.
    """
    positions = torch.arange(len(tokens), device=tokens.device)
    documents = document_numbers(cu_seqlens, len(tokens))
    first = first_seen(cu_seqlens, len(tokens), window)
    end = torch.minimum(cu_seqlens[documents], positions + window + 1)
    return torch.stack([first, end, tokens, targets]).int()


def triton_pointer(inputs: PointerInputs, micro_batch: MicroBatch, window: int) -> tuple[Tensor, Tensor]:
    first, _, tokens, targets = pointer_index_rows(
        micro_batch.inputs, micro_batch.targets, micro_batch.cu_seqlens, window
    )
    q, k = inputs.q.contiguous(), inputs.k.contiguous()
    T, dim = q.shape
    out = inputs.sink_scores.new_empty(3, T)
    grid = (triton.cdiv(T, POINTER_TILES["BLOCK"]),)
    pointer_kernel[grid](q, k, first, targets, tokens, inputs.sink_scores, out, T, dim, **POINTER_TILES)
    return out[:2], out[2]


def triton_pointer_grad(
    inputs: PointerInputs,
    micro_batch: MicroBatch,
    window: int,
    probs: Tensor,
    lse: Tensor,
    dprobs: Tensor,
) -> PointerInputs:
    first, end, tokens, targets = pointer_index_rows(
        micro_batch.inputs, micro_batch.targets, micro_batch.cu_seqlens, window
    )
    q, k = inputs.q.contiguous(), inputs.k.contiguous()
    T, dim = q.shape
    mean = (probs * dprobs).sum(0)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    per_query = lse, mean, dprobs[0]
    kernel = pointer_grad_kernel[(triton.cdiv(T, POINTER_TILES["BLOCK"]),)]
    kernel(q, k, first, targets, tokens, *per_query, dq, T, KEYS=False, DIM=dim, **POINTER_TILES)
    kernel(k, q, end, tokens, targets, *per_query, dk, T, KEYS=True, DIM=dim, **POINTER_TILES)
    return PointerInputs(dq, dk, probs[1] * (dprobs[1] - mean))


# ============================================================================================================
# 13  Row sums. In the forward, gather_rows sums the rows that a position looks up. In the backward,
#     segment_sum_rows sums the positions' gradients by row.
# ============================================================================================================


@compiled
def gather_rows(
    out: Tensor, table: Tensor, ids: Tensor, signs: Tensor | None = None, sign_ids: Tensor | None = None
) -> None:
    """Writes to out[i] the sum over r of table[ids[r, i]], times signs[sign_ids[r, i]] if these are given.

    table (N, w); ids and sign_ids (R, n) int32; signs (rows, w); out (n, w). Terms are summed in the order of
    r, in at least fp32, and rounded once. Without signs this is torch's embedding_bag with mode="sum".
    """

    def term(r: int) -> Tensor:  # (n, w)
        rows = upcast(table[ids[r]])
        if sign_ids is None:
            return rows
        return rows * signs[sign_ids[r]]

    total = term(0)
    for r in range(1, len(ids)):
        total = total + term(r)
    out.copy_(total)


def segment_sum_rows(out: Tensor, grad: Tensor, segments: Segments, signs: Tensor | None = None) -> None:
    """Adds to out[ids[i]] the sum of grad[k] over the positions k of ids[i]. With `signs`, each gradient is
    first multiplied by its position's row of signs.

    out (N, ...), grad (T, ...). A row's gradients are summed in at least fp32, in the positions' order, and
    rounded once.
    """
    out = out.flatten(1)
    ids = segments.ids.long()
    dtype = torch.promote_types(out.dtype, torch.float32)
    by_row = grad.flatten(1)[segments.perm].to(dtype)
    if signs is not None and segments.sign_ids is not None:
        by_row *= signs[segments.sign_ids]
    sums = torch.segment_reduce(by_row, "sum", lengths=segments.offsets.diff().long(), unsafe=True)
    out.index_copy_(0, ids, (out[ids].to(dtype) + sums).to(out.dtype))


@jit
def segment_sum_rows_kernel(
    out,
    grad,
    ids,
    perm,
    offsets,
    sign_ids,
    signs,
    columns,
    grad_stride,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums a chunk of a row over the row's positions, in their order, with UNROLL loads in flight.

    All chunks of a row begin before those of the next row. In GPT-2's vocabulary frequent tokens have low
    ids, so the rows with the most positions begin first, and nothing waits for them at the end.
    """
    chunks = tl.cdiv(columns, BLOCK)
    i = tl.program_id(0) // chunks
    cols = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(offsets + i), tl.load(offsets + i + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    # This loop is unrolled, too: in long rows the next loads begin before all earlier ones have arrived.
    for start in tl.range(first, last, UNROLL, loop_unroll_factor=4):
        for k in tl.static_range(UNROLL):
            at = start + k
            pos = tl.load(perm + at, mask=at < last, other=0).to(tl.int64)
            mask = cols < tl.where(at < last, columns, 0)
            part = load_fp32(grad + pos * grad_stride + cols, mask)
            if sign_ids is not None:
                row = tl.load(sign_ids + at, mask=at < last, other=0).to(tl.int64)
                part *= load_fp32(signs + row * columns + cols, mask)
            total += part
    out_ptrs = out + tl.load(ids + i).to(tl.int64) * columns + cols
    total += load_fp32(out_ptrs, cols < columns)
    tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=cols < columns)


SEGMENT_SUM_TILES = dict(BLOCK=256, UNROLL=8, num_warps=2)


def triton_segment_sum_rows(
    out: Tensor, grad: Tensor, segments: Segments, signs: Tensor | None = None
) -> None:
    if not len(segments.ids):
        return
    out, grad = out.flatten(1), grad.flatten(1)
    columns = out.size(1)
    grid = (len(segments.ids) * triton.cdiv(columns, SEGMENT_SUM_TILES["BLOCK"]),)
    segment_sum_rows_kernel[grid](out, grad, *segments, signs, columns, grad.stride(0), **SEGMENT_SUM_TILES)


# ============================================================================================================
# 14  Backend. The choice of each operation's form; compilation; CUDA graphs.
# ============================================================================================================


class Backend(NamedTuple):
    """Holds a run's implementations of operations. Other operations, such as norm and add_columns, choose by
    themselves between forms that differ only in rounding. A function takes the arguments of its default.
    """

    attention: Callable = dense_attention
    relu_square: Callable = relu_square
    relu_square_grad: Callable = relu_square_grad
    relu_square_fp8: Callable = relu_square_fp8
    cast_and_transpose: Callable = cast_and_transpose
    softcap_loss: Callable = softcap_loss
    pointer: Callable = pointer
    pointer_grad: Callable = pointer_grad
    segment_sum_rows: Callable = segment_sum_rows
    fp8: bool = False  # Config.fp8; samples, with TORCH_BACKEND, have none
    mlp_dtype: torch.dtype | None = None  # dtype of the MLPs' products outside FP8; None: the model's


TORCH_BACKEND = Backend()

KERNELS: dict[str, dict[str, Callable]] = {  # the operations of each name in Config.kernels
    "relu_square": {
        "relu_square": triton_relu_square,
        "relu_square_grad": triton_relu_square_grad,
        "relu_square_fp8": triton_relu_square_fp8,
    },
    "cast_and_transpose": {"cast_and_transpose": triton_cast_and_transpose},
    "softcap_loss": {"softcap_loss": triton_softcap_loss},
    "pointer": {"pointer": triton_pointer, "pointer_grad": triton_pointer_grad},
    "segment_sum_rows": {"segment_sum_rows": triton_segment_sum_rows},
}
assert KERNELS.keys() == set(typing.get_args(Kernel))


def select_backend(cfg: Config, device: torch.device) -> Backend:
    """Returns the implementations that the config names. Activates FlashAttention-3 if it is one of them.

    Raises UserError for the first setting that cannot be honoured here, and says what to set instead. But
    cfg.bf16_mlp raises no error: it takes effect only for fp32 MLPs in plain torch on a CPU with AMX.
    """
    check_device(cfg, device)
    chosen: dict = {}
    for kernel in cfg.kernels:
        chosen |= KERNELS[kernel]
    if cfg.attention_impl != "dense":
        chosen["attention"] = flash_attention
    if cfg.attention_impl == "fa3":
        fix = "docs/gpus.md says how to get it; or use --set attention_impl=varlen"
        with user_error_on("FlashAttention-3 cannot be used", fix, Exception):
            torch.nn.attention.activate_flash_attention_impl("FA3")
    plain_mlp = cfg.dtype == "float32" and device.type == "cpu" and "relu_square" not in cfg.kernels
    if cfg.bf16_mlp and plain_mlp and torch.cpu._is_amx_tile_supported():
        chosen["mlp_dtype"] = torch.bfloat16
    return Backend(**chosen, fp8=cfg.fp8)


def configure_compiler(cfg: Config) -> Callable | None:
    """Returns the COMPILER for this config; None without cfg.compile."""
    if not cfg.compile:
        return None
    torch._dynamo.config.recompile_limit = 64  # graphs per function; the default is 8
    names = "|".join(DYNAMIC_ARGUMENTS)
    torch.compiler.config.dynamic_sources = rf"L\['({names})'\].*"

    @cache
    def compiler(function: Callable) -> Callable:
        autotune = function.__name__ not in WITHOUT_AUTOTUNING
        # Guards and AOTAutograd check sizes, so generated code need not.
        options: dict = {"size_asserts": False, "triton.autotune_pointwise": autotune}
        return torch.compile(function, fullgraph=True, options=options)

    return compiler


class CUDAGraphs:
    """Launches everything that a repeated call does on a GPU at once, as a CUDA graph.

    Two calls are the same if their arguments are equal: tensors by address and shape, all else by ==. The
    first call compiles and autotunes, the second is captured, and later ones replay the graph without any
    Python. So a replay can differ only in what tensors hold, and what changes on the host must be an
    argument. Results lie where the captured call's did, and last until the next replay.
    """

    def __init__(self, enabled: bool):
        self.pool = torch.cuda.graph_pool_handle() if enabled else None
        self.captured: dict[tuple, tuple | None] = {}  # a call's graph and results; None: called once

    def run(self, function: Callable, host_state: tuple, **arguments):
        """Returns function(**arguments). host_state: what the function reads on the host besides them."""
        call = partial(function, **arguments)
        if self.pool is None or TRACING:  # a trace shows the launches one by one
            return call()
        key_parts = [host_state, function]
        for x in tree_leaves(arguments):
            if isinstance(x, Tensor):
                x = x.data_ptr(), x.shape
            key_parts.append(x)
        key = tuple(key_parts)
        if key not in self.captured:
            self.captured[key] = None
            return call()
        if self.captured[key] is None:
            graph = torch.cuda.CUDAGraph()
            # thread_local: the thread that builds batches may page-lock memory during the capture.
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                results = call()
            self.captured[key] = graph, results
        graph, results = self.captured[key]
        graph.replay()
        return results


# ============================================================================================================
# 15  Collectives. Operations on tensors are asynchronous: each returns a Pending, whose wait() returns the
#    result. barrier() and from_rank_0() block.
# ============================================================================================================


# torch 2.13 renamed these two functions and warns about the old names, but 2.11 has only the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(NamedTuple):
    """Holds the result of a collective that is under way; wait() returns it."""

    result: Tensor
    handle: dist.Work | None = None
    finish: Callable[[Tensor], typing.Any] | None = None  # called with the result when it has arrived

    def wait(self) -> typing.Any:
        """Waits for the collective. Returns the result or, if there is a `finish`, what that returns."""
        if self.handle is not None:
            with traced("waiting"):
                self.handle.wait()
        return self.result if self.finish is None else self.finish(self.result)


def rank_order_mean(parts: Tensor) -> Tensor:
    """Returns the mean over the first axis of `parts` (n, ...); adds them to 0 in order, in at least fp32."""
    total = torch.zeros_like(parts[0], dtype=torch.promote_types(parts.dtype, torch.float32))
    for part in parts:
        total += part
    return total.div_(len(parts))


@dataclass
class Collectives:
    """Runs collectives of one process group; with one rank nothing is communicated.

    Every rank must make the same calls in the same order, from one thread. `name` and `label` say what a call
    sends. They are not used here: tests and benchmarks count calls by them.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")  # where the group's tensors must be

    def __post_init__(self):
        self.options = {"group": self.group, "async_op": True}

    def block(self, t: Tensor) -> Tensor:
        """Returns this rank's block of t's first axis, a view."""
        return t.chunk(self.world_size)[self.rank]

    def reduce_scatter(self, name: str, grad: Tensor, in_rank_order: bool = False) -> Pending:
        """Averages `grad` over ranks; each rank gets its own block of the mean.

        NCCL or gloo sums in grad's dtype and rounds at every hop. With `in_rank_order` the blocks go by
        all-to-all, the same traffic, and are summed in rank order; the result is in at least fp32. Otherwise,
        or with one rank, it has grad's dtype.
        """
        if self.world_size == 1:
            return Pending(grad)
        out = torch.empty_like(self.block(grad))
        if in_rank_order:
            parts = out.new_empty((self.world_size, *out.shape))
            handle = dist.all_to_all_single(parts.flatten(0, 1), grad, **self.options)
            return Pending(parts, handle, rank_order_mean)
        return Pending(out, _reduce_scatter(out, grad, op=dist.ReduceOp.AVG, **self.options))

    def all_to_all(
        self,
        label: str,
        name: str,
        rows: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        out: Tensor | None = None,
    ) -> Pending:
        """Sends rows (sum(input_splits), ...), by receiver; returns received rows, by sender, in `out`."""
        if self.world_size == 1:
            return Pending(rows if out is None else out.copy_(rows))
        if out is None:
            out = rows.new_empty((sum(output_splits), *rows.shape[1:]))
        return Pending(out, dist.all_to_all_single(out, rows, output_splits, input_splits, **self.options))

    def all_gather(self, name: str, t: Tensor) -> Pending:
        """Completes t, in which each rank has updated only its own block."""
        if self.world_size == 1:
            return Pending(t)
        return Pending(t, _all_gather(t, self.block(t), **self.options))

    def all_reduce(self, t: Tensor, op=dist.ReduceOp.SUM) -> Pending:
        return Pending(t, None if self.world_size == 1 else dist.all_reduce(t, op, **self.options))

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.from_rank_0(None)

    def from_rank_0(self, value):
        """Returns rank 0's small value when all ranks have called this. Blocks; not for the timed loop."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, self.group)
        return values[0]


# ============================================================================================================
# 16  Optimizer. It owns the parameters of section 17 and the table of n-grams, and runs their scatter, update
#    and gather in explicit orders. The state of training is here, too. In a step:
#
#                   ShardedParam's subclasses                   NgramTable
#    forward        wait: values are complete                   wait: the fetched rows are here
#    backward       LMHead.add_product, BankMatrix's            Optimizer.add_looked_up_grads
#                   deliver_grad, autograd for small ones,
#                   Optimizer.add_looked_up_grads for embeddings;
#                   then end_backward
#    scatter        scatter: the mean over ranks begins         scatter
#    update         update, by the mean; clear: a new sum       update; clear
#    gather         gather: all ranks get all blocks            start_fetch: rows for the next steps
# ============================================================================================================


class Optimizer:
    """Decides when each parameter is updated, and spreads the work over ranks: each rank scatters gradients,
    updates its own blocks and gathers parameters. UPDATE_RULES, and row_adam() for n-grams, compute updates.

    Gradients are exchanged in the order of `trainables`: the n-grams' first, the small parameters' last, the
    others' in the order of cfg.params. Updates follow update_order.

    Neither order changes the result, because each update reads only its own gradient and state, and the order
    in which ranks are summed does not depend on when a collective starts. embed's gradient is added before
    lm_head's is exchanged, and embed's values are copied after lm_head's are gathered.
    """

    def __init__(
        self, cfg: Config, tensors: dict[str, Tensor], comm: Collectives, backend: Backend | None = None
    ):
        self.cfg = cfg
        self.comm = comm
        self.backend = backend or TORCH_BACKEND
        self.params: dict[str, ShardedParam] = {}
        groups = defaultdict(list)
        for spec in used_specs(cfg):
            if spec.kind == "small":
                group_key = spec.optimizer, spec.dtype, spec.betas, spec.update_every, spec.reduction
                groups[group_key].append(spec)
            else:
                param_class = PARAM_CLASSES[spec.kind]
                self.params[spec.name] = param_class(spec, tensors[spec.name], cfg, comm, self.backend)
        for i, group in enumerate(groups.values()):
            # By name, because NCCL and gloo round a sum according to its place in the vector.
            group.sort(key=lambda spec: spec.name)
            parts = [tensors[spec.name] for spec in group]
            self.params[f"small_{i}"] = SmallParams(f"small_{i}", group, parts, cfg, comm)
        self.ngrams = make_ngram_table(cfg, comm, self.backend)
        self.trainables: dict[str, ShardedParam | NgramTable] = {}  # in the order of exchange
        if self.ngrams:
            self.trainables["ngrams"] = self.ngrams
        self.trainables.update(self.params)
        self.batch: Batch | None = None  # the batch that ensure_batch() got last
        self.routes: dict[str, RowRoutes] = {}  # that batch's routes, on the device
        self.last_plan: StepPlan | None = None  # last step's plan; its averages tick in the next step()

    @torch.no_grad()
    def ensure_batch(self, batch: Batch | None) -> None:
        """Copies a batch's routes to the device, and starts to fetch its rows of n-grams. Does nothing if
        that is done already, or if no batch is left (None). train_step() calls it when a step begins; a step
        that updates the n-grams has already called it for the next batch.
        """
        if batch is None or batch is self.batch:
            return
        self.batch, self.routes = batch, move(batch.routes, self.comm.device)
        if "ngrams" in self.routes:
            self.ngrams.start_fetch(self.routes["ngrams"])

    @traced("rows")
    @torch.no_grad()
    def add_looked_up_grads(
        self, looked_up_grads: dict[str, Tensor], segments: dict[str, Segments], signs: Tensor
    ) -> None:
        """Adds to tables' main_grads the gradients (T, ...) of what a micro-batch's positions have looked up.

        signs: the model's signs, by which rows of bigrams and n-grams were multiplied. Segments of other
        tables have no sign_ids, so these tables ignore them.
        """
        for name, grads in looked_up_grads.items():
            table = self.trainables[name]
            self.backend.segment_sum_rows(table.main_grad, grads, segments[table.rows_by], signs)

    def banks(self) -> dict[str, Bank]:
        """Returns the banks by name, for matrix products."""
        banks = {}
        for name, param in self.params.items():
            if isinstance(param, DenseParam) and param.spec.kind == "bank":
                banks[name] = param.bank()
        return banks

    def lm_head(self) -> LMHead:
        return typing.cast(LMHead, self.params["lm_head"])

    def accumulate_flags(self) -> tuple[bool, ...]:
        """Returns whether the next gradients of banks and lm_head are added to main_grad, or overwrite it.

        A backward reads these flags on the host, so a CUDA graph fits only one combination of them.
        """
        dense = [param for param in self.params.values() if isinstance(param, DenseParam)]
        return tuple(bool(param.accumulate) for param in dense)

    @torch.no_grad()
    def step(self, plan: StepPlan, next_batch: Callable[[], Batch | None] = lambda: None) -> None:
        """Updates what is due. After the n-grams' update, fetches the rows of n-grams of the next batch,
        `next_batch()`.

        wait() must have been called since the step before. Mean gradients exist only in this method, and only
        for this rank's blocks.
        """
        assert not any(trainable.in_flight for trainable in self.trainables.values())
        head = typing.cast(LMHead, self.params.get("lm_head"))
        embed = typing.cast(EmbeddingParam, self.params.get("embed"))
        # Set now, because ensure_batch() below replaces self.routes by the next batch's.
        for param in self.params.values():
            param.routes = self.routes.get(param.name)
        due = [trainable for trainable in self.trainables.values() if trainable.is_due(plan)]

        # Scatter. While embed is tied, it is neither updated nor cleared: add_grad_of() moves its gradient to
        # lm_head's.
        if plan.tied:
            due = [trainable for trainable in due if trainable is not embed]
            if head in due:
                head.add_grad_of(embed)
        pending_grads = {}
        for trainable in due:
            with traced(f"exchange {trainable.name}"):
                pending_grads[trainable.name] = trainable.scatter()

        self.tick()  # the averages of the step before, while gradients are on their way

        # Update, and gather.
        with traced("update"):
            for trainable in sorted(due, key=lambda trainable: trainable.update_order):
                grad = pending_grads.pop(trainable.name).wait()  # pop: its memory is free after the update
                with traced(f"update {trainable.name}"):
                    trainable.update(grad, plan)
                trainable.clear()
                if isinstance(trainable, NgramTable):
                    # The cache is free: fetch the next rows while parameters are updated.
                    self.ensure_batch(next_batch())
                else:
                    trainable.gather()
                if plan.tied and trainable is head:
                    head.copy_after_gather(embed)

        if plan.untie:
            head.untie(embed)
        self.last_plan = plan

    @torch.no_grad()
    def wait(self) -> None:
        """Waits for all gathers, and for the fetch of n-grams, that are under way."""
        for trainable in self.trainables.values():
            trainable.wait()

    def gather_all(self) -> None:
        for param in self.params.values():
            param.gather()
            param.wait()

    def tick(self) -> None:
        """Moves averages towards their parameters as they are at the end of the step before."""
        if self.last_plan is not None:
            for param in self.params.values():
                param.tick(self.last_plan.average_rates)

    @traced("averages")
    @torch.no_grad()
    def apply_averages(self) -> None:
        """Moves parameters towards their averages, by `blend`, after the last step."""
        self.wait()
        self.tick()
        for param in self.params.values():
            param.apply_averages()
        if untie_step(self.cfg) >= self.cfg.steps:  # still tied
            write_transpose(self.params["embed"].p, self.params["lm_head"].p)

    @torch.no_grad()
    def drop_grads(self) -> None:
        """Drops all gradients and fetched rows of n-grams, so that no update is pending."""
        self.wait()
        for trainable in self.trainables.values():
            trainable.drop_grad()
        self.batch = None
        self.last_plan = None


# ---- The state of training, for the warm-up and for checkpoints --------------------------------------------


def live_state(model: GPT, optimizer: Optimizer) -> dict:
    """Returns all tensors that training changes on this rank, except gradients and the table of n-grams. Also
    returns the signs, which a resumed run must share. Copies nothing.
    """
    optimizer.wait()
    others = {"signs": model.signs}
    if model.fp8_state:
        others |= {"fp8_scales": model.fp8_state.scales, "weight_amax": model.fp8_state.weight_amax}
    params = {name: param.state_dict() for name, param in optimizer.params.items()}
    return {"params": params, "others": others}


def training_state(model: GPT, optimizer: Optimizer) -> dict:
    """Returns a copy of live_state() in host memory."""
    return map_tensors(lambda t: t.to("cpu", copy=True), live_state(model, optimizer))


@torch.no_grad()
def restore(state: dict, model: GPT, optimizer: Optimizer) -> None:
    """Copies `state`, this rank's part, into the model and the optimizer, and gathers the parameters.

    Drops gradients. A checkpoint's state also has the number of steps and, if there is one, the table of
    n-grams.
    """
    live = live_state(model, optimizer)
    optimizer.drop_grads()
    if "ngrams" in state:
        live["ngrams"] = optimizer.ngrams.state_dict()
    # Both nests come from live_state(), so their leaves are in one order.
    for t, saved in zip(tree_leaves(live), tree_leaves({key: state[key] for key in live}), strict=True):
        t.copy_(saved)
    optimizer.gather_all()
    if state.get("step"):
        optimizer.last_plan = plan_step(model.cfg, state["step"] - 1)


# ============================================================================================================
# 17  Parameters. Each bank, each embedding, lm_head, and each vector of small parameters is one object. The
#    object owns the gradient, from the backward that adds to it to the gather of the updated values. Section
#    16 has a table of what is called when.
# ============================================================================================================


class RunningAverage(NamedTuple):
    """Holds the running average of a parameter's block that an entry of Config.averages asks for."""

    number: int  # its place in Config.averages and in StepPlan.average_rates
    settings: WeightAverage
    value: Tensor


class Trainable:
    """Anything that the optimizer updates: a parameter that is spread over ranks, or the table of n-grams.

    main_grad is the gradient, summed over micro-batches and steps from one update to the next. scatter()
    starts to average it over ranks, and update() updates this rank's block by the mean.
    """

    spec: ParamSpec | Ngrams
    name: str
    update_order: int
    comm: Collectives
    backend: Backend
    main_grad: Tensor | None  # None: autograd has the gradient, for a bank with Config.main_grad=false
    in_flight: Pending | None = None  # a gather or a fetch, until wait() is called

    def is_due(self, plan: StepPlan) -> bool:
        return plan.is_update_step(self.spec.update_every)

    def drop_grad(self) -> None:
        """Drops the gradient that has been summed since the last update."""
        self.main_grad.zero_()

    def clear(self) -> None:
        """Drops the gradient after an update. Unlike drop_grad(), it may leave rows alone that are 0."""
        self.drop_grad()

    def wait(self) -> None:
        """Waits for the gather or the fetch, if one is under way."""
        pending, self.in_flight = self.in_flight, None
        if pending:
            pending.wait()


class ShardedParam(Trainable):
    """Holds a parameter whose updates are spread over ranks: each rank updates its own block, and has the
    update rule's state and the averages of that block.

    main_grad has the parameter's shape and dtype; a bank has none with Config.main_grad=false. Subclasses
    differ in how gradients are added to main_grad, exchanged and cleared.
    """

    spec: ParamSpec
    # Of an embedding, in a step that updates it: where its touched rows go; on the device.
    routes: RowRoutes | None = None

    def __init__(
        self,
        spec: ParamSpec,
        p: Tensor,
        cfg: Config,
        comm: Collectives,
        backend: Backend | None = None,
    ):
        self.spec = spec
        self.p = p
        self.cfg = cfg
        self.comm = comm
        self.backend = backend or TORCH_BACKEND
        self.name = spec.name
        self.rows_by = spec.rows_by
        self.update_order = spec.update_order
        self.block = comm.block(p.detach())  # a view of the part of p that this rank updates
        self.rule = UPDATE_RULES[spec.optimizer]
        self.state = self.rule.init(self.block, spec, acc_dtype(cfg), comm.rank * len(self.block))
        self.averages = []
        for i, average in enumerate(cfg.averages):
            if spec.name in average.params and tick_rates(average, cfg.steps):
                value = torch.zeros_like(self.block, dtype=acc_dtype(cfg))
                self.averages.append(RunningAverage(i, average, value))
        p.requires_grad_(False)
        self.main_grad = torch.zeros_like(p)

    def end_backward(self) -> None:
        """Ends a micro-batch's backward: main_grad has its gradient."""
        tell_wrapper(self.p)

    def grad(self) -> Tensor:
        """Returns the gradient that this rank has summed."""
        return self.p.grad if self.main_grad is None else self.main_grad

    def scatter(self) -> Pending:
        """Starts to average the gradient over ranks. Each rank gets its block's mean."""
        return self.comm.reduce_scatter(self.name, self.grad(), self.spec.reduction == "fp32")

    def update(self, grad: Tensor, plan: StepPlan) -> None:
        """Updates the block by its mean gradient."""
        self.rule.update(self.block, grad, self.state, self.spec, plan, self.cfg)

    def gather(self) -> None:
        """Starts to gather all ranks' blocks into the parameter."""
        with traced(f"gather {self.name}"):
            self.in_flight = self.comm.all_gather(self.name, self.p.detach())

    def tick(self, rates: tuple[float, ...]) -> None:
        """Moves averages towards the block, by StepPlan.average_rates. Here and in apply_averages a bf16
        block is used as it is, without the lower 16 bits that ANVIL keeps in its state.
        """
        for average in self.averages:
            rate = rates[average.number]
            if rate:
                average.value.mul_(1 - rate).add_(self.block, alpha=rate)

    def apply_averages(self) -> None:
        """Moves the parameter towards its averages, then restores its norm if any average has keep_norm.
        Waits for the gather.

        Every write rounds to the parameter's dtype.
        """
        if not self.averages:
            return
        # In fp64, so that padding changes no digit.
        norm_of = partial(torch.linalg.vector_norm, dtype=torch.float64)
        before = norm_of(self.p.detach())
        for average in self.averages:
            self.block.copy_(self.block.to(average.value.dtype).lerp(average.value, average.settings.blend))
        self.gather()
        self.wait()
        if any(average.settings.keep_norm for average in self.averages):
            p = self.p.detach()
            after = norm_of(p)
            ratio = torch.where(after > 0, before / after, 1).to(acc_dtype(self.cfg))
            p.copy_(p * ratio[None])  # a 0-d factor would be rounded to the dtype of p

    def state_dict(self) -> dict:
        """Returns this rank's block, the rule's state and the averages. Copies nothing."""
        averages = [average.value for average in self.averages]
        return {"block": self.block, "state": self.state, "averages": averages}


class SmallParams(ShardedParam):
    """Holds small parameters with equal optimizer, betas, dtype, interval and reduction as parts of one
    vector. The vector is exchanged and updated, not the parameters. Autograd adds to each p.grad, which is a
    view of main_grad. state["muls"] has each entry's factors of the rate and of decay, from UpdateRule.muls.
    """

    def __init__(
        self,
        name: str,
        specs: list[ParamSpec],
        params: list[Tensor],
        cfg: Config,
        comm: Collectives,
    ):
        # Parts, and ranks' blocks, begin at multiples of 16 bytes, so that kernels can load 16 bytes at once.
        sizes = [padded(p.numel(), 8) for p in params]
        padding = -sum(sizes) % (8 * comm.world_size)
        vector = params[0].new_zeros(sum(sizes) + padding)
        super().__init__(replace(specs[0], name=name, lr_mul=1.0, wd_mul=1.0), vector, cfg, comm)
        values, grads = vector.split(sizes + [padding]), self.main_grad.split(sizes + [padding])
        for p, value, grad in zip(params, values, grads):
            value[: p.numel()].copy_(p.detach().flatten())
            p.data = value[: p.numel()].view_as(p)
            p.grad = grad[: p.numel()].view_as(p)
        muls = [self.rule.muls(spec) for spec in specs] + [(0.0, 0.0)]  # padding has factors of 0
        entry_muls = torch.tensor(muls, dtype=acc_dtype(cfg))
        entry_muls = entry_muls.repeat_interleave(torch.tensor(sizes + [padding]), 0)
        self.state["muls"] = comm.block(entry_muls).T.contiguous().to(vector.device)


class DenseParam(ShardedParam):
    """Holds a bank or lm_head: backwards of matrix products write its gradient directly to main_grad.

    accumulate: whether the next gradient is added to main_grad; the first one after an update overwrites it.
    It is a 0-d CPU tensor, because a bool would make torch.compile build two graphs.
    With cfg.main_grad=false a bank's main_grad is None, and autograd sums its gradient in p.grad.
    """

    def __init__(
        self,
        spec: ParamSpec,
        p: Tensor,
        cfg: Config,
        comm: Collectives,
        backend: Backend | None = None,
    ):
        super().__init__(spec, p, cfg, comm, backend)
        self.accumulate = torch.tensor(False)
        if spec.kind == "bank" and not cfg.main_grad:
            p.requires_grad_(True)
            self.main_grad = None

    def bank(self) -> Bank:
        """Returns the bank for the model's products."""
        w = self.p if self.main_grad is None else self.p.detach()
        return Bank(w, self.main_grad, self.accumulate)

    def end_backward(self) -> None:
        """Ends a micro-batch's backward: later gradients are added to its gradient."""
        self.accumulate.fill_(True)
        if self.main_grad is not None:
            tell_wrapper(self.p)

    def drop_grad(self) -> None:
        """Drops the gradient, but leaves main_grad as it is: the next product overwrites it."""
        self.p.grad = None
        self.accumulate.fill_(False)


class EmbeddingParam(ShardedParam):
    """Holds a table of rows for tokens or bigrams. Every rank has all rows. main_grad is 0 when a sum begins.

    With exchange=sparse, ranks exchange only the gradients of touched rows.
    """

    def take_row_grads(self) -> Tensor:
        """Returns a copy of the touched rows of main_grad, and zeroes them there."""
        rows = self.main_grad[self.routes.row_ids]
        self.main_grad.index_fill_(0, self.routes.row_ids.long(), 0)
        return rows

    def scatter(self) -> Pending:
        if self.spec.exchange == "reduce_scatter":
            return super().scatter()
        # Take the rows first: reduce_row_grads() writes their means to a part of the same main_grad.
        rows = self.take_row_grads()
        out = self.comm.block(self.main_grad)
        return reduce_row_grads(self.comm, self.backend, self.name, rows, self.routes, out)

    def clear(self) -> None:
        if self.spec.exchange == "reduce_scatter":
            super().clear()
        else:  # any rank may have touched these rows; all other rows of the block are 0
            touched = self.routes.segments.ids.long()
            self.comm.block(self.main_grad).index_fill_(0, touched, 0)


class LMHead(DenseParam):
    """Holds lm_head. Until the untie step embed is its transpose. In the steps until then:

    scatter   add_grad_of() moves embed's gradient here; embed itself is not due
    update    of lm_head alone
    gather    copy_after_gather(): embed waits for the same gather, and then copies the transpose
    at last   untie() copies the update rule's state, after all updates of the untie step. If the run ends
              tied, Optimizer.apply_averages() copies the transpose again
    """

    def add_product(
        self, a: Tensor, b: Tensor, scales: Sequence[Tensor] = (), columns: Tensor | None = None
    ) -> None:
        """Writes a^T b to main_grad, or adds it, as write_grad does.

        With distinct `columns` (cols,) int32, the rounded product is added to these columns of main_grad;
        main_grad is zeroed before the first product after an update.
        """
        if columns is None:
            write_grad(self.main_grad, a, b, scales, self.accumulate)
        else:
            if not self.accumulate:
                self.main_grad.zero_()
            product = self.main_grad.new_empty(a.size(1), b.size(1))
            write_grad(product, a, b, scales, torch.tensor(False))
            add_columns(self.main_grad, columns, product)
        self.accumulate.fill_(True)  # now, because this backward has more chunks

    def add_grad_of(self, embed: EmbeddingParam) -> None:
        """Adds embed's gradient, which is 0 outside the touched rows."""
        add_columns(self.main_grad, embed.routes.row_ids, embed.take_row_grads().T)

    def copy_after_gather(self, embed: EmbeddingParam) -> None:
        """Makes embed.wait() wait for this parameter's gather, too, and then copy its transpose to embed."""
        embed.in_flight = self.in_flight._replace(finish=partial(write_transpose, embed.p))

    def untie(self, embed: EmbeddingParam) -> None:
        """Lets embed train on its own, with this parameter's state, transposed and resharded."""
        for key, value in self.state.items():
            if value.dim():
                whole = torch.empty_like(self.p, dtype=value.dtype)
                self.comm.block(whole).copy_(value)
                whole = self.comm.all_gather(f"{self.name}.{key}", whole).wait()
                value = self.comm.block(whole.T)
            embed.state[key].copy_(value)


# Classes by ParamSpec.kind; SmallParams packs small parameters.
PARAM_CLASSES = {"bank": DenseParam, "head": LMHead, "embedding": EmbeddingParam}


def tell_wrapper(p: Tensor) -> None:
    """Tells a wrapper of the model, such as Megatron's, that main_grad has a parameter's gradient.

    Does nothing unless the wrapper has set the parameter's requires_grad and its attribute
    grad_added_to_main_grad. Then, by TransformerEngine's contract (its PR 2871), the attribute becomes True,
    and autograd gets an uninitialized gradient, so that hooks run; by the contract they drop it. Products'
    backwards do not do this, because a compiled backward gives all results at its end.
    """
    if hasattr(p, "grad_added_to_main_grad"):
        p.grad_added_to_main_grad = True
        torch.autograd.backward(p, torch.empty_like(p))


# ============================================================================================================
# 18  Update rules. They update one block in place, in at least fp32. Only ANVIL's orthogonalization and its
#    product with NorMuon's scales are in Config.bank_dtype. To add a rule, write init, update and, for small
#    parameters, muls; add an entry to UPDATE_RULES; and name it in entries of PARAMS. A bank's block is
#    whole matrices; a block of lm_head or an embedding is some of the rows.
# ============================================================================================================


class UpdateRule(NamedTuple):
    """Holds the functions with which an optimizer updates one block of a parameter.

    Gradients are of the loss, summed over tokens and over the steps since the last update, and averaged over
    micro-batches and ranks. ANVIL keeps the lower 16 bits of a bf16 block's fp32 numbers in its state
    (split_mantissa); Adam rounds to the block's dtype.

    The states of lm_head and embed must have the same keys, and all tensors except 0-d ones must have the
    block's shape, because untie() copies the state, transposed.
    """

    init: Callable  # (block, its ParamSpec, dtype of moments, index of its first row or matrix) -> state
    # (block, gradient, state, its ParamSpec, plan, cfg): updates block and state in place.
    update: Callable
    # ParamSpec -> factors of the step's size and of decay. For small parameters the factors are in
    # state["muls"], (2, n), and `update` must apply them: the spec that it gets has lr_mul and wd_mul 1.
    # None: the rule cannot update small parameters.
    muls: Callable | None = None
    unused: tuple[str, ...] = ()  # fields of ParamSpec that the rule does not read
    only_banks: bool = False  # the rule needs whole matrices


def adam_init(p: Tensor, spec: ParamSpec, dtype: torch.dtype, first_row: int) -> dict:
    return {
        "updates": torch.zeros((), dtype=torch.int32),
        "exp_avg": torch.zeros_like(p, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(p, dtype=dtype),
    }


def adam_muls(spec: ParamSpec) -> tuple[float, float]:
    """Returns a parameter's factors of adam()'s step_size and decay, from its lr_mul and wd_mul."""
    return spec.lr_mul, spec.lr_mul**2 * spec.wd_mul


def adam(p: Tensor, grad: Tensor, state: dict, spec: ParamSpec, plan: StepPlan, cfg: Config) -> None:
    """Updates p by Adam (Kingma, Ba 2015, arXiv:1412.6980); eps is added to the uncorrected root.

        exp_avg = beta1 exp_avg + (1 - beta1) grad,  exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) grad^2
        update = step_size exp_avg / (sqrt(exp_avg_sq) + eps)
        p = p - update - decay p [update p > 0],  decay = lr^2 adam_wd wd_mul interval_ratio

    In update t, step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t). beta1 and beta2 are ParamSpec.betas to the
    power of interval_ratio. Weight decay acts only where it has the direction of the update (cautious decay:
    Chen et al. 2025, arXiv:2510.12402).
    """
    updates = state["updates"].add_(1).item()
    interval_ratio = plan.interval_ratio(spec.update_every)
    beta1 = spec.betas[0] ** interval_ratio
    beta2 = spec.betas[1] ** interval_ratio
    lr = cfg.adam_lr * plan.lr_mul * spec.lr_mul
    step_size = lr * math.sqrt(1 - beta2**updates) / (1 - beta1**updates)
    decay = lr * lr * (cfg.adam_wd * spec.wd_mul * interval_ratio)
    dtype = state["exp_avg"].dtype
    tensors = {"p": p, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], "grad": grad}
    if "muls" in state:
        tensors["lr_mul"], tensors["decay_mul"] = state["muls"]
    # Flatten all tensors, so that code compiled for vectors of any length serves every parameter.
    vectors = {name: t.view(-1) for name, t in tensors.items()}
    hyper = dict(
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        step_size=host_scalar(step_size, dtype),
        decay=host_scalar(decay, dtype),
        eps=cfg.adam_eps,
    )
    if p.is_cuda:
        adam_update(**vectors, **hyper)
        return
    # On a CPU, update in parts, so that intermediate results stay in its cache.
    for parts in zip(*(vector.split(1 << 16) for vector in vectors.values())):
        adam_update(**dict(zip(vectors, parts)), **hyper)


@compiled
def adam_update(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    one_minus_beta1: float,
    beta2: float,
    step_size: Tensor,
    decay: Tensor,
    eps: float,
    lr_mul: float | Tensor = 1.0,
    decay_mul: float | Tensor = 1.0,
) -> None:
    """Computes adam()'s update of a vector, in the dtype of its state."""
    grad = grad.to(exp_avg.dtype)
    exp_avg.lerp_(grad, one_minus_beta1)
    exp_avg_sq.mul_(beta2).addcmul_((1 - beta2) * grad, grad)
    update = step_size * lr_mul * exp_avg / (exp_avg_sq.sqrt() + eps)
    p32 = p.to(exp_avg.dtype)
    p.copy_(p32 - update - decay * decay_mul * p32 * (update * p32 > 0))


# bf16 has 8 significant bits, so an update below about 1/512 of a weight is rounded away. ANVIL keeps the
# next 16 bits apart: matmuls read 16 bits, but training is that of fp32 weights (PR 190).


def merge_mantissa(high: Tensor, low: Tensor) -> Tensor:
    """Returns fp32 numbers from their upper 16 bits (bf16) and lower 16 bits (uint16)."""
    high = high.view(torch.int16).to(torch.int32)
    low = low.view(torch.int16).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split_mantissa(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Writes fp32 x into `high` (bf16, truncated) and `low` (uint16)."""
    bits = x.view(torch.int32)
    high.view(torch.int16).copy_(bits >> 16)
    low.view(torch.int16).copy_(bits)  # keeps the lower 16 bits


# ANVIL's Newton-Schulz iterations, as maps of singular values, x -> a x + b x^3 + c x^5 (record 92, PR 360).
# Each has its own coefficients. Together they bring singular values between 0.003 and 1 / 1.05 to within
# 0.5 % of 1; larger singular values diverge.
ANVIL_MAPS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def divide_by_norm(x: Tensor, A: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Returns matrices x (n, rows, cols) divided by `margin` times their norms, and the new Gram matrices.

    A: the Gram matrices of x. Their traces are the squared norms, so the norms need no pass over x.
    """
    trace = upcast(A.diagonal(dim1=-2, dim2=-1)).sum(-1)[:, None, None]
    divisor = margin * trace.sqrt() + 1e-6
    return (x / divisor).to(x.dtype), (A / divisor.square()).to(A.dtype)


def orthogonalize(x: Tensor, margin: float) -> Tensor:
    """Approximates the orthogonal polar factor of each matrix of x (n, rows, cols), in its dtype.

        x = x / (margin |x|);  then for each map (a, b, c):  A = x x^T,  x = a x + (b A + c A^2) x

    This holds for wide matrices. For tall ones A = x^T x, and x is multiplied from the right. In bf16 every
    product is summed in fp32 and rounded once.
    """
    tall = x.size(-2) > x.size(-1)
    for i, (a, b, c) in enumerate(ANVIL_MAPS):
        if tall:
            A = x.mT @ x
        else:
            A = x @ x.mT
        if i == 0:
            x, A = divide_by_norm(x, A, margin)
        B = torch.baddbmm(A, A, A.mT, beta=b, alpha=c)
        if tall:
            x = torch.baddbmm(x, x, B, beta=a)
        else:
            x = torch.baddbmm(x, B, x, beta=a)
    return x


def anvil_init(p: Tensor, spec: ParamSpec, dtype: torch.dtype, first_row: int) -> dict:
    n, rows, cols = p.shape
    cycle = spec.matrix_lr_mul or (1.0,)
    factors = [cycle[(first_row + i) % len(cycle)] for i in range(n)]
    mean_shape = (n, rows, 1) if rows >= cols else (n, 1, cols)
    state = {
        "fast_momentum": torch.zeros_like(p, dtype=dtype),
        "slow_momentum": torch.zeros_like(p, dtype=dtype),
        "second_moment": p.new_zeros(mean_shape, dtype=dtype),
        # On the device from the start, because a copy would make a step wait.
        "matrix_lr_mul": torch.tensor(factors, dtype=dtype, device=p.device).view(n, 1, 1),
    }
    if p.dtype == torch.bfloat16:
        state["mantissa"] = torch.zeros_like(p, dtype=torch.uint16)
    return state


def anvil(p: Tensor, grad: Tensor, state: dict, spec: ParamSpec, plan: StepPlan, cfg: Config) -> None:
    """Updates matrices p (n, rows, cols) by ANVIL (record 92, PR 360), which descends from Muon and NorMuon.

        x = normuon_variance_reduction(orthogonalize(nesterov_momentum(grad)))
        p = p - r x - decay r p [slow_momentum p >= 0],  r = lr * matrix_lr_mul

    slow_momentum and matrix_lr_mul are in the state. lr is bank_lr times the scheduled lr_mul,
    ParamSpec.lr_mul and sqrt(max(1, rows / cols)). decay = bank_wd wd_mul bank_lr plan.lr_mul, so decay r
    follows the square of the schedule.
    """
    dtype = state["slow_momentum"].dtype
    shape_mul = math.sqrt(max(1, p.size(-2) / p.size(-1)))
    lr = cfg.bank_lr * plan.lr_mul * spec.lr_mul * shape_mul
    decay = cfg.bank_wd * spec.wd_mul * cfg.bank_lr * plan.lr_mul
    anvil_update(
        p,
        grad,
        **state,
        cfg=cfg,
        fast_rate=host_scalar(1 - plan.fast_beta, dtype),
        fast_weight=host_scalar(plan.fast_weight, dtype),
        momentum=host_scalar(plan.momentum, dtype),
        lr=host_scalar(lr, dtype),
        decay=host_scalar(decay, dtype),
    )


@compiled  # as one graph: just launching the banks' products from Python would take milliseconds
def anvil_update(
    p: Tensor,
    grad: Tensor,
    fast_momentum: Tensor,
    slow_momentum: Tensor,
    second_moment: Tensor,
    matrix_lr_mul: Tensor,
    cfg: Config,
    fast_rate: Tensor,
    fast_weight: Tensor,
    momentum: Tensor,
    lr: Tensor,
    decay: Tensor,
    mantissa: Tensor | None = None,
) -> None:
    """Computes anvil()'s update. Arguments from the state have anvil_init's names."""
    x = nesterov_momentum(
        grad,
        fast_momentum,
        slow_momentum,
        slow_rate=cfg.slow_rate,
        fast_rate=fast_rate,
        fast_weight=fast_weight,
        momentum=momentum,
        dtype=dtype_of(cfg.bank_dtype),
    )
    x = orthogonalize(x, cfg.bank_margin)
    x = normuon_variance_reduction(x, second_moment, cfg.bank_beta2)
    apply_anvil(p, x, slow_momentum, matrix_lr_mul, lr, decay, mantissa)


def nesterov_momentum(
    grad: Tensor,
    fast_momentum: Tensor,
    slow_momentum: Tensor,
    slow_rate: float,
    fast_rate: Tensor,
    fast_weight: Tensor,
    momentum: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns Nesterov momentum in `dtype` (record 3; Jordan et al. 2024, kellerjordan.github.io/posts/muon).

        fast_momentum += fast_rate (grad - fast_momentum),  slow_momentum += slow_rate (grad - slow_momentum)
        mean = fast_weight fast_momentum + (1 - fast_weight) slow_momentum
        result = (1 - momentum) grad + momentum mean

    fast_momentum averages recent gradients, slow_momentum many more.
    """
    grad = grad.to(fast_momentum.dtype)
    # No lerp_ and no 1 - fast_weight: for arithmetic on CPU scalars alone Inductor generates a CPU kernel.
    fast_momentum.add_(fast_rate * (grad - fast_momentum))
    slow_momentum.add_(slow_rate * (grad - slow_momentum))
    # If fast_weight is 1, the mean is exactly fast_momentum.
    mean = fast_weight * fast_momentum + (slow_momentum - fast_weight * slow_momentum)
    return (grad + momentum * (mean - grad)).to(dtype)


def normuon_variance_reduction(x: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Divides the rows of x (n, rows, cols), or the columns of wide matrices, by their running root mean
    squares, and then restores each matrix's norm.

    Orthogonal updates still favour some neurons; the division evens them out (NorMuon: Li et al. 2025,
    arXiv:2510.05491; PRs 144, 168).
    """
    x32 = x.to(second_moment.dtype)
    axis = -1 if x.size(-2) >= x.size(-1) else -2
    mean = x32.square().mean(dim=axis, keepdim=True)
    second_moment.lerp_(mean, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm_before = (mean.sum(dim=(-2, -1), keepdim=True) * x.size(axis)).sqrt()
    norm_after = ((mean * scale.square()).sum(dim=(-2, -1), keepdim=True) * x.size(axis)).sqrt()
    return x * (scale * (norm_before / norm_after.clamp_min(1e-10))).to(x.dtype)


def apply_anvil(
    p: Tensor,
    x: Tensor,
    slow_momentum: Tensor,
    matrix_lr_mul: Tensor,
    lr: Tensor,
    decay: Tensor,
    mantissa: Tensor | None = None,
) -> None:
    """Subtracts r x + decay r p [slow_momentum p >= 0] from p; r = lr matrix_lr_mul, which is (n, 1, 1).

    `mantissa` makes a bf16 p fp32. Decay acts only where long-run gradients also shrink p, or are 0.
    """
    r = lr * matrix_lr_mul
    p32 = p if mantissa is None else merge_mantissa(p, mantissa)
    new = p32 - p32 * (slow_momentum * p32 >= 0) * decay * r - x.to(p32.dtype) * r
    if mantissa is None:
        p.copy_(new)
    else:
        split_mantissa(new, p, mantissa)


UPDATE_RULES = {
    "adam": UpdateRule(adam_init, adam, adam_muls, unused=("matrix_lr_mul",)),
    "anvil": UpdateRule(anvil_init, anvil, unused=("betas",), only_banks=True),
}


# ============================================================================================================
# 19  Touched rows. The tables in which tokens look up rows are the embeddings and the table of n-grams. Ranks
#    exchange only the gradients of rows that batches have read since the table's last update. But with
#    exchange=reduce_scatter they exchange the whole gradient of an embedding.
#
# Segments say which positions of a micro-batch have read a row. RowRoutes say which rank gets its gradient.
# (Section 5 has both.) A row's gradient, for example one of value_embeds, travels like this:
#
#   thread that       make_segments                  which rows each micro-batch reads, at which positions
#   builds batches    route_rows                     tells every owner which of its rows are touched
#   each backward     Optimizer.add_looked_up_grads  adds positions' gradients to their rows of main_grad
#   scatter           reduce_row_grads               sends the touched rows of main_grad, unchanged; the owner
#                                                    sums them in fp32, in rank order, in its block of
#                                                    main_grad
#   update            ShardedParam.update            Adam; then clear() zeroes the means' rows of main_grad
#
#       4 rows; rank 0 owns rows 0 and 1, rank 1 owns rows 2 and 3; g0 and g1 are their main_grads
#
#                          rank 0 touched 0, 3         rank 1 touched 1, 3
#       local row ids      1      ------->             <------- 1
#       row gradients      g0[3]  ------->             <------- g1[1]
#       mean               row 0 = g0[0] / 2           row 2 = 0
#                          row 1 = g1[1] / 2           row 3 = (g0[3] + g1[3]) / 2
#
# The owner's fp32 sum is rounded to main_grad's dtype, and then divided by the number of ranks. If the dtype
# is fp32, or the number of ranks is a power of 2, the mean has the same bits as the dense exchange with
# reduction=fp32, rounded to that dtype. Otherwise, in bf16, the division rounds once more. Section 20 has
# what n-grams add.
# ============================================================================================================


def make_segments(ids: Tensor, sign_ids: Tensor | None = None) -> Segments:
    """Returns the Segments of int32 ids, (T,) or (R, T); in (R, T) each r has its own range of ids."""
    by_id, perm = ids.flatten().sort(stable=True)
    distinct, counts = by_id.unique_consecutive(return_counts=True)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    if sign_ids is not None:
        sign_ids = sign_ids.flatten().index_select(0, perm)  # four times as fast as indexing
    if ids.ndim > 1:  # one list needs no remainder, which takes as long as half a sort
        perm %= ids.shape[-1]
    return Segments(distinct, perm.int(), offsets.int(), sign_ids)


# Functions that make the Segments of the rows that a micro-batch looks up, by ParamSpec.rows_by.
SEGMENT_MAKERS: dict[str, Callable[[MicroBatch], Segments]] = {
    "inputs": lambda micro_batch: make_segments(micro_batch.inputs),
    "hashed_rows": lambda micro_batch: make_segments(micro_batch.hashed_rows, micro_batch.sign_ids),
}


def ids_by_position(segments: Segments, shape: Sequence[int]) -> Tensor:
    """Returns the int32 list, (T,) or (R, T), that has ids[i] at every position of ids[i]. For segments of
    make_segments() this is the list that they were made of; with other ids in their place, it has those.
    """
    # make_segments() has sorted by row id, and each r has its own range of row ids, so entries come r by r.
    counts = np.diff(segments.offsets.numpy())
    by_id = int32(np.repeat(segments.ids.numpy(), counts)).view(shape)
    return torch.empty_like(by_id).scatter_(-1, segments.perm.view(shape).long(), by_id)


# ---- Exchange of touched rows' gradients -------------------------------------------------------------------


def route_embedding(comm: Collectives, spec: ParamSpec, num_rows: int, row_ids: np.ndarray) -> RowRoutes:
    """Routes the rows, given by their ids (n,), that this rank has touched in an embedding of num_rows rows.
    A rank's block consists of consecutive rows.

    With exchange=reduce_scatter the whole gradient is sent, so no rank needs to know what others have
    touched. The routes then only say which rows this rank has touched, and are made as for one rank.
    """
    if spec.exchange == "reduce_scatter":
        comm = Collectives(0, 1)
    owners, local_row_ids = np.divmod(row_ids, num_rows // comm.world_size)
    return route_rows(comm, spec.name, row_ids, owners, local_row_ids)


def route_rows(
    comm: Collectives, name: str, row_ids: np.ndarray, owners: np.ndarray, local_row_ids: np.ndarray
) -> RowRoutes:
    """Tells each row's owner that this rank has touched the row. Waits for the other ranks.

    row_ids (n,): distinct rows of the table `name`, in ascending order of their owners. owners (n,): the
    ranks that own them. local_row_ids (n,): their places in their owners' blocks.
    """
    input_splits = np.bincount(owners, minlength=comm.world_size).tolist()
    output_splits = input_splits
    arriving = int32(local_row_ids).to(comm.device)
    if comm.world_size > 1:
        ones = [1] * comm.world_size
        counts = torch.tensor(input_splits, device=comm.device)
        output_splits = comm.all_to_all("counts", name, counts, ones, ones).wait().tolist()
        arriving = comm.all_to_all("row ids", name, arriving, input_splits, output_splits).wait()
    arriving = arriving.cpu()
    return RowRoutes(input_splits, output_splits, int32(row_ids), arriving, make_segments(arriving))


def reduce_row_grads(
    comm: Collectives, backend: Backend, name: str, row_grads: Tensor, routes: RowRoutes, out: Tensor
) -> Pending:
    """Sends the gradients of touched rows, (sum(routes.input_splits), ...), unchanged to their owners. Each
    owner gets the means of its rows over ranks, in the rows routes.segments.ids of `out`, which must be 0
    before the call.

    Rows arrive in rank order, and are summed in this order, in at least fp32. The sum is rounded to out's
    dtype, then divided.
    """

    def mean(arrived: Tensor) -> Tensor:
        backend.segment_sum_rows(out, arrived, routes.segments)
        return out.div_(comm.world_size)  # all other rows are 0

    arriving = comm.all_to_all("gradient rows", name, row_grads, routes.input_splits, routes.output_splits)
    return arriving._replace(finish=mean)


# ============================================================================================================
# 20  N-grams. A table of hashed n-grams, of any size: no step takes time or memory in proportion to its rows.
#
# The table is updated after every step, or after every 2 or 4 steps (Ngrams.update_every). No row changes
# between updates. So the rows that the steps of an interval read are fetched once, before its first step, and
# their gradients return once, after its last step:
#
# 1. While earlier steps train, the thread that builds batches hashes n-grams to rows (hash_ngrams), finds the
#    distinct rows (make_segments), and tells their owners (route_interval).
# 2. start_fetch: owners send these rows, which are stored at slots of `cache`.
# 3. Each forward sums rows of `cache` (GPT.ngram_sums). After each backward Optimizer.add_looked_up_grads
#    adds their gradients to main_grad, at the same slots.
# 4. scatter, after the last step: gradients go to the owners, which take their means in rank order.
# 5. update: owners change their rows by row_adam. Then 2 is repeated for the next interval.
#
# Recommender systems, too, shard rows and look ahead at ids, so that no row is stale (TorchRec,
# arXiv:2207.07684; BagPipe, arXiv:2202.12429). Language models have had n-gram tables of this size in
# modded-nanogpt PRs 360 and 366 and nanochat PR 854.
# ============================================================================================================

# ---- Contexts ----------------------------------------------------------------------------------------------

# These contexts are not n-grams; they resemble those of compressors of the PAQ family (Mahoney 2005,
# mattmahoney.net/dc). Each function takes tokens (T,) uint32, and returns a uint32 number for each token.
# Equal contexts have equal numbers.

HASH_MULTIPLIER = 0x9E3779B1  # Knuth's odd multiplier, a prime near 2^32 / (golden ratio)
DOCUMENT_MULTIPLIER = np.uint32(0xC2B2AE35)  # another one
WORD_BYTES = np.zeros(2**16, bool)
WORD_BYTES[list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")] = True
WORD_BYTES[128:256] = True  # bytes of all other characters in UTF-8
NEWLINE = 10
COPY_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)


class SpanHash:
    """Hashes spans of tokens (T,) uint32. The hash of tokens a to b is the sum of tokens[i] M^(i - a + 1).

    M is HASH_MULTIPLIER. Hashes are modulo 2^32, as uint32 wraps. Each is computed from two running sums,
    whatever the span's length.
    """

    def __init__(self, tokens: np.ndarray):
        powers = np.cumprod(np.full(len(tokens), HASH_MULTIPLIER, np.uint32), dtype=np.uint32)  # M^(i + 1)
        self.sums = np.append(np.uint32(0), np.cumsum(tokens * powers, dtype=np.uint32))
        inverses = np.full(len(tokens) + 1, pow(HASH_MULTIPLIER, -1, 2**32), np.uint32)
        inverses[0] = 1
        self.inverses = np.cumprod(inverses, dtype=np.uint32)  # M^-i

    def __call__(self, first: np.ndarray) -> np.ndarray:
        """Returns the hashes (T,) uint32 of the spans from first[t] to t, empty if first[t] is t + 1."""
        return (self.sums[1:] - self.sums[first]) * self.inverses[first]


def word_context(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """Returns a hash of the word up to each token. All tokens outside words have the same hash."""
    first = np.where(WORD_BYTES[tokens], 0, np.arange(1, len(tokens) + 1))
    return SpanHash(tokens)(np.maximum.accumulate(first))


def above_context(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """Returns a hash of a pair: this token, and the token one line above the next one, in the same column.

    After the bytes of "abc", a newline and "x", the next byte is in column 1; above it is "b".
    """
    at = np.arange(len(tokens))
    ends_line = (tokens == NEWLINE) | (tokens == bos_id)
    line_start = np.maximum.accumulate(np.where(ends_line, at + 1, 0))  # start of the next token's line
    # The line break is at line_start - 1, and the token before it has the start of its own line.
    start_above = line_start[np.maximum(line_start - 2, 0)]
    above_at = start_above + (at + 1 - line_start)
    exists = (above_at < line_start) & (tokens[line_start - 1] == NEWLINE)
    above_token = np.where(exists, tokens[np.minimum(above_at, at)] + 1, 0)
    return (tokens + 1) * HASH_MULTIPLIER + above_token


def copy_context(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """Returns a hash of a pair: the token to copy, and a length. 0: there is no such token.

    `length` is the longest of COPY_LENGTHS for which the last `length` tokens occurred earlier in this
    document. The token to copy followed their latest earlier occurrence (PR 378 has it as an input, too).
    """
    at = np.arange(len(tokens))
    starts = tokens == bos_id
    document = np.cumsum(starts, dtype=np.uint32)
    document_start = np.maximum.accumulate(np.where(starts, at, 0))
    span_hash = SpanHash(tokens)
    numbers = np.zeros_like(tokens)
    for length in COPY_LENGTHS:
        spans = span_hash(np.maximum(at + 1 - length, 0)) + document * DOCUMENT_MULTIPLIER
        # The sort is stable. So in its order each span follows its latest earlier occurrence.
        span_order = np.argsort(spans, kind="stable")
        earlier, later = span_order[:-1], span_order[1:]
        found = (spans[earlier] == spans[later]) & (earlier + 1 - length >= document_start[earlier])
        earlier, later = earlier[found], later[found]
        numbers[later] = (tokens[earlier + 1] + 1) * HASH_MULTIPLIER + length
    return numbers


CONTEXTS = {"word": word_context, "above": above_context, "copy": copy_context}
assert CONTEXTS.keys() == set(typing.get_args(Context))


# ---- From tokens to rows -----------------------------------------------------------------------------------


def hash_ngrams(
    tokens: np.ndarray, ngrams: Ngrams, sign_rows: int, bos_id: int
) -> tuple[Tensor, Tensor | None]:
    """Returns the row ids of the n-grams that end at each token, (R, T) int32 for T tokens.

    Also returns the ids of their rows of signs, (R, T) int32, by a second hash, unless `sign_rows` is 0. Each
    of the R orders and contexts has a range of rows_per_order rows. For an order n, the first n - 1 positions
    end no whole n-gram, so they share the range's last row. The hash is a polynomial of the tokens, followed
    by the finalizer of MurmurHash3 (Appleby 2011), in uint32, which wraps. N-grams cross document starts,
    because masking them was slower and no better.
    """
    T = len(tokens)
    tokens = tokens.astype(np.uint32)
    hashes = np.empty((ngrams.rows_per_token, T), np.uint32)
    # After pass n, polynomial[t] = M^n tokens[t] + ... + M tokens[t - n + 1], where M is HASH_MULTIPLIER.
    polynomial = np.zeros(T, np.uint32)
    for n in range(1, max(ngrams.orders) + 1):
        polynomial[n - 1 :] += tokens[: max(0, T - n + 1)]
        polynomial *= HASH_MULTIPLIER
        if n in ngrams.orders:
            hashes[ngrams.orders.index(n)] = polynomial
    for i, context in enumerate(ngrams.contexts, len(ngrams.orders)):
        hashes[i] = CONTEXTS[context](tokens, bos_id)
    sign_ids = None
    if sign_rows:
        sign_hash = (hashes * 0x27D4EB2F) >> 16  # another odd factor
        sign_ids = int32((sign_hash * sign_rows) >> 16)  # 16 bits, scaled to 0 .. sign_rows - 1
    hashes ^= hashes >> 16
    hashes *= 0x85EBCA6B
    hashes ^= hashes >> 13
    hashes *= 0xC2B2AE35
    hashes ^= hashes >> 16
    last_row = ngrams.rows_per_order - 1  # a range's last row, for positions that end no whole n-gram
    hashes -= hashes // last_row * last_row  # hashes % last_row; NumPy's % is not vectorized
    for i, n in enumerate(ngrams.orders):
        hashes[i, : n - 1] = last_row
    hashes += np.arange(len(hashes), dtype=np.uint32)[:, None] * ngrams.rows_per_order
    return int32(hashes), sign_ids


# ---- Routes and slots --------------------------------------------------------------------------------------


def route_interval(comm: Collectives, batches: list[Batch]) -> list[Batch]:
    """Routes the rows of n-grams that the batches from one update to the next read. Returns these batches:
    the first has the routes, and all micro-batches have their slots.
    """
    distinct_rows = []  # row ids, one tensor per micro-batch
    for unrouted in batches:
        for micro_batch in unrouted.micro_batches:
            distinct_rows.append(micro_batch.segments["hashed_rows"].ids)
    merged = make_segments(torch.cat(distinct_rows))
    routes, slots_of_rows = route_ngrams(comm, merged.ids.numpy())
    # The rows' slots, repeated for each micro-batch that reads the row, in the order of distinct_rows.
    slots = ids_by_position(merged._replace(ids=slots_of_rows), (-1,))
    remaining = iter(slots.split([len(rows) for rows in distinct_rows]))
    routed = []
    for unrouted in batches:
        with_slots = []
        for micro_batch in unrouted.micro_batches:
            with_slots.append(assign_slots(micro_batch, next(remaining)))
        routed.append(unrouted._replace(micro_batches=with_slots))
    first, *others = routed
    return [first._replace(routes=first.routes | {"ngrams": routes}), *others]


def route_ngrams(comm: Collectives, row_ids: np.ndarray) -> tuple[RowRoutes, Tensor]:
    """Routes distinct rows of n-grams, given by their ids (n,). Row r belongs to rank r % world_size, and is
    row r // world_size of its block.

    Also returns the slot, (n,) int32, of each of row_ids: its place in the order of the routes.
    """
    owners = row_ids % comm.world_size
    owner_order = np.argsort(owners.astype(np.uint16), kind="stable")  # NumPy sorts 16 bits by radix
    slots = np.empty(len(row_ids), np.int32)
    slots[owner_order] = np.arange(len(row_ids), dtype=np.int32)
    row_ids = row_ids[owner_order]
    routes = route_rows(comm, "ngrams", row_ids, owners[owner_order], row_ids // comm.world_size)
    return routes, int32(slots)


def assign_slots(micro_batch: MicroBatch, slots: Tensor) -> MicroBatch:
    """Gives a micro-batch's n-grams their slots: slots[i], int32, is the slot of its i-th distinct row."""
    segments = micro_batch.segments["hashed_rows"]._replace(ids=slots)
    slots_by_position = ids_by_position(segments, micro_batch.hashed_rows.shape)
    all_segments = micro_batch.segments | {"hashed_rows": segments}
    return micro_batch._replace(slots=slots_by_position, segments=all_segments)


# ---- The table ---------------------------------------------------------------------------------------------


def ngram_sizes(cfg: Config, world_size: int) -> tuple[int, int]:
    """Returns how many rows of n-grams a rank touches at most between updates, and has in its block."""
    ranges = cfg.ngrams.rows_per_token
    rows = cfg.ngrams.rows_per_order
    tokens = max(stage.batch_tokens for stage in cfg.stages) // world_size
    touched = ranges * min(max(cfg.ngrams.update_every) * tokens, rows)
    block = math.ceil(ranges * rows / world_size)
    return touched, block


class NgramTable(Trainable):
    """Holds this rank's block of the table of n-grams, and a cache of the rows that this rank reads.

    There is one such table, called "ngrams" in the model, the optimizer, batches, saving and warm-up. To give
    each order its own rate, edit update() and row_adam(): row_id // rows_per_order tells the order, and
    row_id = local_row_id * world_size + rank.

    The table is not an nn.Parameter, so code that walks parameters does not copy, average or gather it.
    route_ngrams() decides which rank has which row. All rows are 0 at first.
    """

    spec: Ngrams
    name = "ngrams"
    rows_by = "hashed_rows"
    update_order = -1  # before all parameters, so that the next rows are fetched while parameters are updated

    def __init__(self, cfg: Config, comm: Collectives, backend: Backend | None = None):
        spec = self.spec = cfg.ngrams
        self.comm, self.device = comm, comm.device
        self.backend = backend or TORCH_BACKEND
        slots, block = ngram_sizes(cfg, comm.world_size)
        # By slot: the rows that steps read until the next update, and their gradients.
        zeros = partial(torch.zeros, dtype=dtype_of(spec.dtype), device=self.device)
        self.cache, self.main_grad = zeros(slots, spec.width), zeros(slots, spec.width)
        self.routes: RowRoutes | None = None  # routes of the rows in the cache, on the device
        self.block = zeros(block, spec.width)
        self.state = row_adam_init(self.block, acc_dtype(cfg))
        # A table of beta2^k, because on CPUs the last bit of pow() depends on a number's place in its vector.
        powers = spec.beta2 ** torch.arange(cfg.steps + 1).double()
        self.beta2_powers = powers.to(self.state["second_moment"])

    @traced("rows ngrams")
    def start_fetch(self, routes: RowRoutes) -> None:
        """Starts to fetch the rows that the steps up to the next update read. The rows travel along their
        gradients' routes in reverse: owners send them to slots 0, 1, ... of the cache, in owners' order.
        """
        self.routes = routes
        own = self.block.index_select(0, routes.local_row_ids)
        out = self.cache[: len(routes.row_ids)]
        self.in_flight = self.comm.all_to_all(
            "rows", self.name, own, routes.output_splits, routes.input_splits, out
        )

    @traced("rows ngrams")
    def scatter(self) -> Pending:
        """Starts to return gradient rows. The result is the mean gradient of each row that a rank touched."""
        segments = self.routes.segments
        distinct = len(segments.ids)
        # A buffer for all rows of the block would be as large as the block, so means go to rows 0, 1, ...
        mean_rows = torch.arange(distinct, dtype=torch.int32, device=self.device)
        routes = self.routes._replace(segments=segments._replace(ids=mean_rows))
        rows = self.main_grad[: len(routes.row_ids)]
        out = rows.new_zeros((distinct, self.spec.width), dtype=self.state["second_moment"].dtype)
        return reduce_row_grads(self.comm, self.backend, self.name, rows, routes, out)

    def update(self, grad: Tensor, plan: StepPlan) -> None:
        """Updates the rows that any rank has touched, with their mean gradients (n, width)."""
        local_row_ids = self.routes.segments.ids
        row_adam(self.block, local_row_ids, grad, self.state, self.beta2_powers, self.spec, plan)

    def clear(self) -> None:
        self.main_grad[: len(self.routes.row_ids)].zero_()

    @torch.no_grad()
    def fetch(self, row_ids: Tensor) -> Tensor:
        """Returns the table's rows (n, width) with these distinct ids (n,), outside training.

        Waits for the device. Every rank must call it equally often, because it communicates.
        """
        routes, slots = route_ngrams(self.comm, row_ids.cpu().numpy())
        own = self.block[routes.local_row_ids]
        received = self.comm.all_to_all(
            "rows outside training", self.name, own, routes.output_splits, routes.input_splits
        )
        return received.wait()[slots]

    def state_dict(self) -> dict:
        """Returns this rank's block and the rule's state, not copied."""
        return {"block": self.block} | self.state


def make_ngram_table(cfg: Config, comm: Collectives, backend: Backend | None = None) -> NgramTable | None:
    """Allocates this rank's part of the table; None without n-grams. Raises UserError if memory runs out."""
    if not cfg.ngrams.orders:
        return None
    fix = "lower ngrams.rows_per_order with --set, or use more processes on as many GPUs"
    # A GPU's allocator raises a RuntimeError, too.
    with user_error_on("the n-gram table does not fit in memory", fix, RuntimeError, MemoryError):
        return NgramTable(cfg, comm, backend)


# ---- Row Adam, the n-grams' update rule --------------------------------------------------------------------


ROW_EPS = 1e-10


def row_adam_init(table: Tensor, dtype: torch.dtype) -> dict:
    """Returns the rows' second moments, the times of their last updates, and the table's clock: the number of
    its updates, and the time of the last one, which is there to look at. The unit of time is the first update
    interval.
    """
    return {
        "second_moment": table.new_zeros(len(table), dtype=dtype),
        "last_update": table.new_zeros(len(table), dtype=torch.int32),
        "clock": torch.zeros(2, dtype=torch.int32),
    }


def row_adam(
    table: Tensor,
    local_row_ids: Tensor,
    grads: Tensor,
    state: dict,
    beta2_powers: Tensor,
    ngrams: Ngrams,
    plan: StepPlan,
) -> None:
    """Updates rows of a table (N, w), given their distinct local row ids (n,) int32 and gradients (n, w).

        moment = beta2^(now - last) moment + (1 - update_beta2) mean(grad^2),  last = now
        update = lr sqrt(1 - update_beta2^count) grad / (sqrt(moment) + eps)
        row = row - update - decay row [update row > 0],  decay = lr^2 wd interval_ratio

    with update_beta2 = beta2^interval_ratio. `now` is the time: steps divided by the first update interval.
    `now` is not the number of updates, because the time from the last early update to the first late one may
    be shorter than a late interval.

    A row has one second moment, of its gradient's mean square, as in the Adagrad (Duchi et al. 2011,
    jmlr.org/papers/v12/duchi11a.html) of DLRM (arXiv:1906.00091) and FBGEMM. There is no first moment. Bias
    correction counts the updates of the whole table, not of the row. So a row that is first touched late
    takes a step that is 1 / sqrt(1 - update_beta2) times as long as that of a row that is always touched.
    This is intended (PR 360). Decay is cautious, as in adam().
    """
    dtype = state["second_moment"].dtype
    interval_ratio = plan.interval_ratio(ngrams.update_every)
    count = state["clock"][0].item() + 1
    now = (plan.step + 1) // ngrams.update_every[0]
    state["clock"].copy_(torch.tensor([count, now]))
    update_beta2 = ngrams.beta2**interval_ratio
    lr = ngrams.lr * plan.lr_mul
    # With one row, or none, the code would be compiled again: sizes of 0 and 1 are constants to the compiler.
    update = row_adam_update if len(local_row_ids) > 1 else row_adam_update.__wrapped__  # type: ignore
    update(
        table,
        state["second_moment"],
        state["last_update"],
        local_row_ids,
        grads,
        beta2_powers,
        now=host_scalar(now, torch.int32),
        one_minus_update_beta2=host_scalar(1 - update_beta2, dtype),
        step_size=host_scalar(lr * math.sqrt(1 - update_beta2**count), dtype),
        decay=host_scalar(lr * lr * ngrams.wd * interval_ratio, dtype),
    )


@compiled
def row_adam_update(
    table: Tensor,
    second_moment: Tensor,
    last_update: Tensor,
    local_row_ids: Tensor,
    grads: Tensor,
    beta2_powers: Tensor,
    now: Tensor,
    one_minus_update_beta2: Tensor,
    step_size: Tensor,
    decay: Tensor,
) -> None:
    """Computes row_adam's arithmetic in the dtype of second_moment (N,), which is at least fp32.

    beta2_powers[k] is beta2^k.
    """
    ids = local_row_ids.long()
    decayed = beta2_powers[now - last_update[ids]] * second_moment[ids]
    moments = decayed + one_minus_update_beta2 * grads.square().mean(-1)
    second_moment.index_copy_(0, ids, moments)
    last_update.index_copy_(0, ids, torch.zeros_like(local_row_ids) + now)
    old = table[ids].to(grads.dtype)
    update = step_size * grads / (moments.sqrt() + ROW_EPS)[:, None]
    update += decay * old * (update * old > 0)
    table.index_copy_(0, ids, (old - update).to(table.dtype))


# ============================================================================================================
# 21  Data. Shards of tokens become micro-batches, the same for any number of ranks up to Config.microbatches.
#     In training each micro-batch begins with a document, and long documents are truncated.
# ============================================================================================================

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 1024


class ShardHeader(NamedTuple):
    """Holds what a shard's header says."""

    tokens: int
    vocab_size: int  # GPT-2's if the file has 0
    bos_id: int
    text_bytes: int  # size of the text that the tokens encode; 0: unknown


def read_header(path: Path) -> ShardHeader:
    """Reads and checks the header of a .bin shard: 256 int32, then `tokens` uint16, little-endian."""
    require(path.is_file(), f"{path}: not a regular file; remove it")
    words = np.fromfile(path, dtype="<i4", count=256).tolist()
    require(
        len(words) == 256
        and words[:2] == [SHARD_MAGIC, SHARD_VERSION]
        and path.stat().st_size == HEADER_BYTES + 2 * words[2],
        f"{path}: not a whole token shard of version {SHARD_VERSION}; delete it, and download or build it "
        "again",
    )
    tokens, vocab_size, bos_id, text_bytes = words[2:6]
    if vocab_size == 0:
        vocab_size = 50257
        bos_id = 50256
    return ShardHeader(tokens, vocab_size, bos_id, text_bytes)


def find_shards(folder: str, split: str) -> list[Path]:
    """Returns the sorted shards of a split (train or val). Names tell the split: NAME_train_000001.bin."""
    name = re.compile(rf"(?!\._).+_{split}_\d+\.bin")  # macOS keeps ._NAME beside NAME
    paths = sorted(path for path in Path(folder).glob("*.bin") if name.fullmatch(path.name))
    require(
        paths,
        f"no {split} shards (NAME_{split}_000000.bin) in {folder}: ./run.sh without --data gets a preset's; "
        "data/tokenize_text.py makes them from your text",
    )
    return paths


class Dataset(NamedTuple):
    """Holds a run's shards, whose headers match the config."""

    train: list[Path]
    val: list[Path]
    val_slices: int  # the config's, or fewer if the validation text is short
    bytes_per_token: float  # mean over the validation text; 0: unknown
    fingerprint: str
    vocabulary: Sequence[bytes] = ()  # each token's bytes, if a loss or samples need them


def open_dataset(cfg: Config) -> Dataset:
    """Finds the shards of cfg.data. Raises UserError if they do not match the config or are too short."""
    train = find_shards(cfg.data, "train")
    val = find_shards(cfg.data, "val")
    headers = {path: read_header(path) for path in train + val}
    for path, header in headers.items():
        require(
            header.vocab_size == cfg.vocab_size and header.bos_id == cfg.bos_id,
            f"{path}: its vocabulary has {header.vocab_size} tokens and bos_id {header.bos_id}, the config "
            f"{cfg.vocab_size} and {cfg.bos_id}; choose the matching --preset or --data",
        )
    train_tokens = sum(headers[path].tokens for path in train)
    val_tokens = sum(headers[path].tokens for path in val)
    batch_tokens = max(stage.batch_tokens for stage in cfg.stages)
    val_slices = (val_tokens - 1) // cfg.val_slice_tokens  # - 1: the last token is only a target
    require(
        val_slices >= 1 and train_tokens > batch_tokens,
        f"{cfg.data}: {val_tokens:,} tokens for validation and {train_tokens:,} for training; the run needs "
        f"more than {cfg.val_slice_tokens:,} and {batch_tokens:,}; add text, or lower val_slice_tokens and "
        "batch_tokens",
    )
    text_bytes = [headers[path].text_bytes for path in val]
    bytes_per_token = 0.0
    if all(text_bytes):
        bytes_per_token = sum(text_bytes) / val_tokens
    sizes = f"{train_tokens} training tokens in {len(train)} shards, {val_tokens} for validation"
    path = Path(cfg.data, "vocabulary.txt")
    vocabulary: Sequence[bytes] = ()
    if cfg.predicts_prefixes or (cfg.samples and path.exists()):
        vocabulary = read_vocabulary(path, cfg.vocab_size)
    hashed_paths = [*train, *val, path] if cfg.predicts_prefixes else train + val
    fingerprint = f"{dataset_hash(hashed_paths)} ({sizes})"
    return Dataset(train, val, min(val_slices, cfg.val_slices), bytes_per_token, fingerprint, vocabulary)


def read_vocabulary(path: Path, size: int) -> list[bytes]:
    """Returns the bytes of each of `size` tokens. Each has a line of hexadecimal digits, possibly empty."""
    settings = "--set samples=0 --set stages.*.prefix="
    fix = f"make it with the script in data/ that made the shards, or train without one: {settings}"
    with user_error_on(f"cannot read {path}", fix, OSError, ValueError):
        vocabulary = [bytes.fromhex(line) for line in path.read_text(encoding="ascii").splitlines()]
    require(len(vocabulary) == size, f"{path}: {len(vocabulary)} tokens, the config has {size}; {fix}")
    return vocabulary


def vocabulary_hash(cfg: Config) -> str:
    """Returns a hash of the data's vocabulary.txt; "" if the data has none."""
    path = Path(cfg.data, "vocabulary.txt")
    return dataset_hash([path]) if path.exists() else ""


def prefix_table(vocabulary: Sequence[bytes], rows: int) -> Tensor:
    """Returns the id of each token's longest proper prefix that is a token, (rows,) int64; -1: none."""
    ids = {token: i for i, token in enumerate(vocabulary) if token}
    table = [-1] * rows
    for token, i in ids.items():
        for n in range(1, len(token)):  # a longer prefix replaces a shorter one
            table[i] = ids.get(token[:n], table[i])
    return torch.tensor(table)


def dataset_hash(paths: list[Path]) -> str:
    """Hashes each file's name, size, and 64 blocks of 64 KiB spread evenly over it (all of a small file)."""
    digest = hashlib.sha256()
    block = 1 << 16
    for path in paths:
        size = path.stat().st_size
        digest.update(os.fsencode(f"{path.name} {size}\n"))
        with open(path, "rb") as file:
            for i in range(64):
                file.seek(max(0, size - block) * i // 63)
                digest.update(file.read(block))
    return digest.hexdigest()[:16]


class Shard(NamedTuple):
    tokens: np.ndarray  # uint16
    bounds: np.ndarray  # int64: positions of BOS tokens, and of the end
    # By max_doc_len: where each document begins, and where the last one ends, if all are truncated to it and
    # laid end to end; (documents + 1,) int64. They are kept from batch to batch, because a shard of FineWeb
    # has 150,000 documents.
    truncated_bounds: dict[int, np.ndarray]


def read_shard(path: Path, cfg: Config, count: int = -1) -> Shard:
    """Reads a shard, or up to `count` of its first tokens, into memory."""
    tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES, count=count)
    require(
        tokens.max(initial=0) < cfg.vocab_size,
        f"{path.name} has tokens outside the vocabulary of {cfg.vocab_size}: it is damaged, or another "
        "tokenizer's; build it again",
    )
    document_starts = np.flatnonzero(tokens == cfg.bos_id)
    return Shard(tokens, np.append(document_starts, len(tokens)), {})


def cu_seqlens_capacity(tokens: int) -> int:
    """Returns a length for cu_seqlens that is enough for most micro-batches of this size, so that its shape
    seldom changes.

    No result depends on it.
    """
    return max(64, padded(tokens // 384, 32))


def make_micro_batch(
    tokens: np.ndarray, ends: np.ndarray, max_doc_len: int, cfg: Config, attention_cap: int = 0
) -> MicroBatch:
    """Builds a MicroBatch from its T + 1 tokens, of any integer type, and the ends of all documents but the
    last.
    """
    T = len(tokens) - 1
    starts = np.append(0, ends)
    if attention_cap:
        documents = zip(starts, np.append(ends, T))
        starts = np.concatenate([np.arange(start, end, attention_cap) for start, end in documents])
        max_doc_len = min(max_doc_len, attention_cap)
    size = cu_seqlens_capacity(T)
    if len(starts) + 1 > size:
        size = padded(len(starts) + 1, 128)
    cu_seqlens = torch.full((size,), T, dtype=torch.int32)
    cu_seqlens.numpy()[: len(starts)] = starts
    hashed = cfg.hashed_table
    hashed_rows, sign_ids = hash_ngrams(tokens[:-1], hashed, cfg.sign_rows, cfg.bos_id)
    return MicroBatch(
        inputs=int32(tokens[:-1]),
        targets=int32(tokens[1:]).long(),
        hashed_rows=hashed_rows,
        sign_ids=sign_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_doc_len,
    )


COLUMN_STRIDE = 20011  # a prime


def choose_sampled_columns(needed: np.ndarray, count: int, vocab: int, offset: int) -> tuple[Tensor, int]:
    """Returns `count` columns of the head (ascending, int32), all needed ones and others, and the offset for
    the next call.

    The others are the first columns that are not needed in an interval of a fixed permutation of all columns.
    The interval begins at `offset`, and the next call's interval follows it. If an interval has too few, the
    others are spread over all columns (record 92). `vocab`, the number of columns, must not be a multiple of
    the prime COLUMN_STRIDE.
    """
    chosen = np.zeros(vocab, bool)
    chosen[needed] = True
    distinct = int(chosen.sum())
    require(
        distinct <= count, f"{distinct} distinct targets, {count} columns: raise stages.*.sampled_columns"
    )
    if missing := count - distinct:
        size = min(vocab, missing * 17 // 10 + 256)  # more than missing: some are chosen already
        others = np.arange(offset, offset + size) * COLUMN_STRIDE % vocab
        others = others[~chosen[others]]
        offset = (offset + size) % vocab
        if len(others) < missing:
            others = np.flatnonzero(~chosen)
            others = others[:: len(others) // missing]
        chosen[others[:missing]] = True
    return int32(np.flatnonzero(chosen)), offset


FIRST_READ = 1 << 23  # tokens of a run's first shard that the first batches wait for


class TrainLoader:
    """Cuts training shards into micro-batches. Rank r builds those with the numbers r, r + world_size, ...

    A micro-batch takes documents in order, each truncated to max_doc_len tokens, until it holds T + 1 tokens.
    The rest of a truncated document, and of the last one, is dropped. A batch that does not fit before the
    end of a shard starts over in the next one, which a thread reads meanwhile. After the last shard comes the
    first, as another epoch. `position`, from position(), resumes where an earlier loader on this rank stood.
    """

    def __init__(
        self,
        cfg: Config,
        paths: list[Path],
        rank: int,
        world_size: int,
        position: Position = (0, 0),
    ):
        self.cfg = cfg
        self.paths = paths
        self.num_microbatches = num_microbatches(cfg, world_size)
        self.own_numbers = range(rank, self.num_microbatches, world_size)
        # One thread reads the next shard. Another builds the next batches, in order. Each first
        # chooses its rank's GPU: a new thread has GPU 0, where page-locking memory would make a context.
        on_gpu = torch.cuda.is_initialized()
        use_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
        self.reader, self.builder = (ThreadPoolExecutor(1, initializer=use_gpu) for _ in range(2))
        self.shard_number, self.document, *self.offsets = position
        # The offset of each of this rank's micro-batches for choose_sampled_columns().
        self.offsets = self.offsets or [
            cfg.padded_vocab * m // self.num_microbatches for m in self.own_numbers
        ]
        # The clock is running, so the first batches wait only for the shard's first tokens. A batch that
        # needs later tokens, or more of the last document read, is taken from the whole shard.
        self.being_read = self._read(self.shard_number)  # while is_partial the present shard, then the next
        self.shard = read_shard(self._path(self.shard_number), cfg, FIRST_READ)
        self.is_partial = True

    def position(self) -> Position:
        """Returns where the next batch begins."""
        return self.shard_number, self.document, *self.offsets

    def _path(self, i: int) -> Path:
        return self.paths[i % len(self.paths)]

    def _read(self, i: int) -> Future:
        return self.reader.submit(read_shard, self._path(i), self.cfg)

    def _open_shard(self) -> None:
        """Opens the shard that the thread has read, and lets it read the next one. While is_partial, it has
        read the present one, now whole.
        """
        self.shard = self.being_read.result()
        self.is_partial = False
        self.being_read = self._read(self.shard_number + 1)

    def close(self) -> None:
        self.builder.shutdown()  # not cancelled: other ranks may wait for this one to build the same batch
        self.reader.shutdown(cancel_futures=True)

    def advance(self, batch_tokens: int, max_doc_len: int) -> list[int]:
        """Returns the first document of each micro-batch of the next batch, and of the batch after it. So
        micro-batch m takes documents from firsts[m] to firsts[m + 1] - 1.
        """
        # Tries at most the first tokens of the first shard, the whole of that shard, then every shard once.
        for _ in range(len(self.paths) + 2):
            if max_doc_len not in self.shard.truncated_bounds:
                lengths = np.minimum(np.diff(self.shard.bounds), max_doc_len)
                self.shard.truncated_bounds[max_doc_len] = np.append(0, np.cumsum(lengths))
            bounds = self.shard.truncated_bounds[max_doc_len]
            firsts = [self.document]
            while len(firsts) <= self.num_microbatches and firsts[-1] < len(bounds):
                # One token more than the inputs: the target of the last input.
                end = bounds[firsts[-1]] + batch_tokens // self.num_microbatches + 1
                firsts.append(int(np.searchsorted(bounds, end)))
            if firsts[-1] < len(bounds):  # else the shard ends within this batch
                self.document = firsts[-1]
                return firsts
            if not self.is_partial:
                self.shard_number += 1
                self.document = 0
            self._open_shard()
        raise UserError(
            f"no training shard holds a batch of {batch_tokens:,} tokens, with documents truncated to "
            f"{max_doc_len:,}; add shards that are larger or have more documents, or lower batch_tokens"
        )

    def micro_batches(self, plan: StepPlan) -> list[MicroBatch]:
        """Builds this rank's micro-batches of the next batch, and chooses their sampled columns."""
        cfg = self.cfg
        T = plan.batch_tokens // self.num_microbatches
        firsts = self.advance(plan.batch_tokens, plan.max_doc_len)
        micro_batches = []
        for local, number in enumerate(self.own_numbers):
            bounds = self.shard.bounds[firsts[number] : firsts[number + 1] + 1]
            lengths = np.minimum(np.diff(bounds), plan.max_doc_len)
            tokens = np.concatenate([self.shard.tokens[b : b + n] for b, n in zip(bounds, lengths)])[: T + 1]
            ends = np.cumsum(lengths)[:-1]
            micro_batch = make_micro_batch(tokens, ends, plan.max_doc_len, cfg, cfg.attention_cap)
            if plan.sampled_columns:
                needed = tokens[1:]
                if cfg.pointer_dim:
                    needed = np.append(needed, cfg.copy_gate_column)
                chosen, self.offsets[local] = choose_sampled_columns(
                    needed, plan.sampled_columns, cfg.padded_vocab, self.offsets[local]
                )
                micro_batch = micro_batch._replace(sampled_columns=chosen)
            micro_batches.append(micro_batch)
        return micro_batches


# ---- Batches, built and packed ahead -----------------------------------------------------------------------


def pack(nest):
    """Copies all tensors of a nest into one host buffer, so that one copy takes them to a GPU.

    If the process uses a GPU, the buffer is page-locked. torch reuses such memory once no tensor holds it and
    pending copies from it are finished.
    """
    sizes = [padded(t.nbytes, 16) for t in tree_leaves(nest) if isinstance(t, Tensor)]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    parts = iter(buffer.split(sizes))  # in the order in which tree_leaves and map_tensors visit the tensors

    def copied(t: Tensor) -> Tensor:
        part = next(parts)[: t.nbytes]
        return part.view(t.dtype).view(t.shape).copy_(t)

    return map_tensors(copied, nest)


def move(packed, device: torch.device, allocate: Callable = torch.empty):
    """Returns a nest from pack() on `device`. One copy, asynchronous to a GPU, moves its buffer into one that
    `allocate` returns. Each tensor then lies in the new buffer where it lay in the old one.
    """
    tensors = [t for t in tree_leaves(packed) if isinstance(t, Tensor)]
    if not tensors:
        return packed
    host = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    buffer = allocate(len(host), dtype=host.dtype, device=device).copy_(host, non_blocking=True)

    def moved(t: Tensor) -> Tensor:
        return buffer.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

    return map_tensors(moved, packed)


class Prefetcher:
    """Builds the planned steps' batches on a thread, some batches ahead of the one in use.

    Ranks tell each other which rows they touch, over `comm`, whose process group nothing else uses. When the
    first planned step begins, no table may have gradients that await an update: their rows are unknown here.
    """

    def __init__(self, loader: TrainLoader, plans: Iterable[StepPlan], comm: Collectives):
        self.loader, self.comm, self.cfg = loader, comm, loader.cfg
        self.shapes = param_shapes(self.cfg, 1)
        self.tables = [spec for spec in used_specs(self.cfg) if spec.kind == "embedding"]
        # By table: whether each row has been read since the table's last update.
        self.touched = {spec.name: np.zeros(self.shapes[spec.name][0], bool) for spec in self.tables}
        # A generator ends at its first error. So no later batch can begin an exchange here, which would be
        # matched with the failed batch's exchange on other ranks.
        self.batches = self._batches(plans)
        # Batches between two updates of n-grams are built together. So that next() seldom waits, the queue
        # holds those of the longest interval, and at least two.
        self.queue = [self._submit() for _ in range(max(2, *self.cfg.ngrams.update_every))]

    def _submit(self) -> Future:
        return self.loader.builder.submit(next, self.batches, None)

    def next(self) -> Batch | None:
        """Returns the next batch; None after the last."""
        batch = self.peek()
        self.queue.pop(0)
        self.queue.append(self._submit())
        return batch

    @traced("waiting batch")
    def peek(self) -> Batch | None:
        """Returns the batch that next() will return."""
        return self.queue[0].result()

    def _batches(self, plans: Iterable[StepPlan]) -> Iterator[Batch]:
        """Yields batches. Those from one update of n-grams to the next are built together, because their rows
        of n-grams are fetched together.
        """
        ngrams = self.cfg.ngrams
        interval_batches = []
        for plan in plans:
            interval_batches.append(self._build(plan))
            if not ngrams.orders or plan.is_update_step(ngrams.update_every):
                yield from self._finish(interval_batches)
                interval_batches = []
        if interval_batches:
            yield from self._finish(interval_batches)

    @traced("index")
    def _build(self, plan: StepPlan) -> Batch:
        """Builds an unpacked batch, with the routes of all tables that it updates except the n-grams."""
        loaded = self.loader.micro_batches(plan)
        share = loss_share(self.cfg, self.comm.world_size)
        loss_weights = share * torch.tensor(plan.loss_weights, dtype=acc_dtype(self.cfg))
        micro_batches = []
        for micro_batch in loaded:
            segments = {name: make(micro_batch) for name, make in SEGMENT_MAKERS.items()}
            micro_batch = micro_batch._replace(segments=segments, loss_weights=loss_weights)
            micro_batches.append(micro_batch)
        routes = {}
        for spec in self.tables:
            touched = self.touched[spec.name]
            for micro_batch in micro_batches:
                touched[micro_batch.segments[spec.rows_by].ids.numpy()] = True
            if plan.is_update_step(spec.update_every):
                routes[spec.name] = route_embedding(
                    self.comm, spec, self.shapes[spec.name][0], np.flatnonzero(touched)
                )
                touched[:] = False
        return Batch(plan, micro_batches, self.loader.position(), routes)

    @traced("index")
    def _finish(self, interval_batches: list[Batch]) -> list[Batch]:
        """Packs batches. Their rows of n-grams are fetched together, by routes that the first batch has."""
        if self.cfg.ngrams.orders:
            interval_batches = route_interval(self.comm, interval_batches)
        finished = []
        for unpacked in interval_batches:
            packed = []
            for micro_batch in unpacked.micro_batches:
                segments = pack(micro_batch.segments)
                packed.append(pack(micro_batch._replace(segments={}))._replace(segments=segments))
            finished.append(unpacked._replace(micro_batches=packed, routes=pack(unpacked.routes)))
        return finished


class ValLoader:
    """Holds the first val_slices * val_slice_tokens validation tokens, and the last target."""

    def __init__(self, cfg: Config, paths: list[Path]):
        self.cfg, need = cfg, cfg.val_slices * cfg.val_slice_tokens + 1
        self.tokens = np.concatenate([read_shard(path, cfg, need).tokens for path in paths])[:need]

    def slice(self, i: int) -> MicroBatch:
        """Builds slice i, packed."""
        T = self.cfg.val_slice_tokens
        tokens = self.tokens[i * T : (i + 1) * T + 1]
        starts = np.flatnonzero(tokens[:-1] == self.cfg.bos_id)
        max_doc_len = int(np.diff(starts, prepend=0, append=T).max())
        # Each start is the end of the document before. If BOS comes first, the first document is empty.
        return pack(make_micro_batch(tokens, starts, max_doc_len, self.cfg))


# ============================================================================================================
# 22  Overrides
# ============================================================================================================


class SettingType(NamedTuple):
    """Holds which values a setting can take, according to the annotation of its dataclass field."""

    type: type  # bool, int, float or str
    low: float = 0
    high: float = sys.float_info.max
    choices: tuple = ()  # if not empty, the only allowed values
    size: int | None = None  # length of a tuple, 0 for any length; None: not a tuple
    rescaled: str = ""  # how Config.length rescales the value: as "steps" or as a "rate"; "": not at all

    def parse(self, text: str, name: str):
        """Returns the value that --set name=text gives."""
        if self.size is not None:
            parts = [part for part in text.split(",") if part]
            require(self.size in (0, len(parts)), f"--set {name}={text}: give {self.size} values")
            item_type = self._replace(size=None)
            return tuple(item_type.parse(part, name) for part in parts)
        choices = {str(choice).lower(): choice for choice in self.choices}
        try:
            value = choices[text.lower()] if choices else self.type(text)
        except (KeyError, ValueError):
            number = "a whole number" if self.type is int else "a number"
            wanted = " or ".join(filter(None, choices)) or number
            raise UserError(f"--set {name}={text}: give {wanted}") from None
        end = "on" if self.high == sys.float_info.max else f"to {self.high:g}"
        require(self.allows(value), f"--set {name}={text}: give a number from {self.low:g} {end}")
        return value

    def allows(self, value) -> bool:
        """Returns whether the setting can have this value."""
        if self.size is not None:
            item_type = self._replace(size=None)
            return self.size in (0, len(value)) and all(item_type.allows(item) for item in value)
        if self.choices:
            return value in self.choices
        if self.type is str:
            return isinstance(value, str)
        is_number = isinstance(value, int) or self.type is float and isinstance(value, float)
        return is_number and self.low <= value <= self.high  # false for NaN


@cache
def setting_type(hint) -> SettingType:
    """Returns the SettingType of an annotation."""
    args = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return setting_type(args[0])._replace(size=0 if Ellipsis in args else len(args))
    if origin is Annotated:
        number, low, high, *rescaled = args
        return SettingType(number, low, high, rescaled=rescaled[0] if rescaled else "")
    if origin is Literal:
        return SettingType(type(args[0]), choices=args)
    return SettingType(hint, choices=(True, False) if hint is bool else ())


@cache  # get_type_hints evaluates all annotations at every call
def setting_hints(group_class) -> dict[str, typing.Any]:
    """Returns the annotations of a dataclass's fields, in order."""
    return typing.get_type_hints(group_class, globals(), include_extras=True)


def group_type(hint):
    """Returns the dataclass of a group of settings, or of a list of groups such as LAYERS; None for a single
    setting.
    """
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint if dataclasses.is_dataclass(hint) else None


def groups_by_name(value, name: str) -> dict[str, typing.Any]:
    """Returns groups of settings by their names in --set. Those of a list are name.0, name.1, or name.embed
    for a group that has a name. A single group has the name `name`.
    """
    if not isinstance(value, tuple):
        return {name: value}
    return {f"{name}.{getattr(group, 'name', i)}": group for i, group in enumerate(value)}


def flatten_settings(group, path: str = "") -> dict[str, tuple[typing.Any, SettingType]]:
    """Returns the value and the SettingType of every setting in a config, or in a part of one, by its name in
    --set, such as "stages.0.steps".
    """
    settings = {}
    for name, hint in setting_hints(group.__class__).items():
        value = getattr(group, name)
        if group_type(hint) is None:
            settings[path + name] = value, setting_type(hint)
            continue
        for part_name, part in groups_by_name(value, path + name).items():
            settings |= flatten_settings(part, f"{part_name}.")
    return settings


def replace_settings(group, values: dict[str, typing.Any], path: str = ""):
    """Returns a copy of a config, or of a part of one, with `values` by the names of flatten_settings()."""
    fields = {}
    for name, hint in setting_hints(group.__class__).items():
        value = getattr(group, name)
        if group_type(hint) is None:
            fields[name] = values.get(path + name, value)
            continue
        parts = [
            replace_settings(part, values, f"{part_name}.")
            for part_name, part in groups_by_name(value, path + name).items()
        ]
        fields[name] = tuple(parts) if isinstance(value, tuple) else parts[0]
    return type(group)(**fields)


# --set cannot change these: they name presets, tracks and parameters, or need code that matches.
FIXED_SETTINGS = ("preset", "track", "name", "kind", "rows_by")


def override(cfg: Config, setting: str) -> Config:
    """Returns `cfg` with one "name=value" applied.

    Dots reach into lists, by an entry's number, its name, or * for every entry: stages.0.steps=10,
    stages.*.windows.long=9, params.embed.lr_mul=2.
    """
    pattern, eq, text = setting.partition("=")
    require(eq, f"--set {setting}: write name=value")
    settings = flatten_settings(cfg)
    names = fnmatch.filter(settings, pattern)
    if not names:
        near = [*difflib.get_close_matches(pattern, settings), "another script"]
        file = Path(__file__).name
        raise UserError(f"--set {pattern}: {file} has no such setting; did you mean {', or '.join(near)}?")
    values = {}
    for name in names:
        require(
            name.split(".")[-1] not in FIXED_SETTINGS,
            f"--set {name}: it cannot be changed here; choose a --preset, or edit a copy of the script",
        )
        value_type = settings[name][1]
        values[name] = value_type.parse(text, name)
    new = replace_settings(cfg, values)
    return rescale(new, new.length / cfg.length)


def with_settings(cfg: Config, settings: Iterable[str]) -> Config:
    """Returns `cfg` with "name=value" settings applied in order."""
    for setting in settings:
        cfg = override(cfg, setting)
    return cfg


def rescale(cfg: Config, factor: float) -> Config:
    """Returns `cfg` with every Steps field times `factor`, and every TickRate changed so that an average
    forgets over `factor` times the number of ticks.
    """

    def scaled(steps: int) -> int:
        return max(1, round(steps * factor)) if steps else 0

    if factor == 1:
        return cfg
    values = {}
    for name, (value, value_type) in flatten_settings(cfg).items():
        if value_type.rescaled == "rate":
            values[name] = 1 - (1 - value) ** (1 / factor)
        elif value_type.rescaled == "steps" and isinstance(value, tuple):
            values[name] = tuple(scaled(steps) for steps in value)
        elif value_type.rescaled == "steps":
            values[name] = scaled(value)
    return replace_settings(cfg, values)


PRESETS = {cfg.preset: replace(rescale(cfg, cfg.length), length=1.0) for cfg in ALL_PRESETS}


# ============================================================================================================
# 23  Command line
# ============================================================================================================


def positive_int(text: str) -> int:
    """Parses a positive integer. Raises ValueError, which argparse reports in one line."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        Path(__file__).name,
        usage="./run.sh [SCRIPT.py] [options], or torchrun SCRIPT.py [options]; -h lists them",
        description="Trains a GPT-2-small-class language model against the clock. Start it with torchrun, "
        "one process per GPU (or a few without one). ./run.sh does that, and fetches the data first.",
        epilog="--set takes the fields of Config; dots reach into its lists: stages.0.lr_mul, "
        "stages.*.windows.long, params.embed.wd_mul. A run with --checkpoint-every, --resume or --profile "
        "belongs to the track `other`.",
        allow_abbrev=False,
    )
    preset = "record" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=preset, help="default here: %(default)s")
    parser.add_argument(
        "--name", default="", help="keep the log in records/TRACK/DATE_NAME/, not in records/TRACK/attempts/"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of initial weights, signs and samples (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="change settings, in order",
    )
    parser.add_argument("--data", help="folder of .bin shards (default: the preset's)")
    parser.add_argument("--save", help="file for the final weights and the config")
    parser.add_argument(
        "--checkpoint-every",
        type=positive_int,
        metavar="N",
        help=f"save all state beside the log every N steps, in multiples of {UPDATE_PERIOD}",
    )
    parser.add_argument(
        "--resume", help="log of a run to continue from its last checkpoint, with the same options"
    )
    parser.add_argument(
        "--profile",
        type=positive_int,
        nargs="?",
        const=8,
        metavar="N",
        help="trace the four steps after step N (without N: 8)",
    )
    parser.add_argument(
        "--check", type=positive_int, help="say whether that many processes could run this here"
    )
    return parser.parse_args(argv)


def read_settings(args: argparse.Namespace) -> Config:
    """Returns the preset with the command line's changes. Raises UserError for invalid options."""
    cfg = with_settings(PRESETS[args.preset], args.set)
    require("" not in (args.data, cfg.data), "--data: give a folder")
    is_set = any(setting.startswith("data=") for setting in args.set)
    given_twice = args.data and is_set and args.data != cfg.data
    require(not given_twice, f"--data {args.data} and --set data={cfg.data}: give one of them")
    is_name = ".." not in args.name and re.fullmatch(r"[\w.+=-]*(/baseline)?", args.name)
    require(is_name, f"--name {args.name!r}: give letters, digits and . _ + = - alone, without ..")
    is_rows = re.search(r"\.ngrams\d+$", args.save or "")
    require(not is_rows, f"--save {args.save}: a model's n-grams have such a name; give another")
    every = args.checkpoint_every
    require(
        not every or padded(every, UPDATE_PERIOD) < cfg.steps,
        f"--checkpoint-every {every}: the run has {cfg.steps} steps; give a smaller number",
    )
    return replace(cfg, data=os.path.relpath(args.data or cfg.data))  # so that the log holds no absolute path


# ============================================================================================================
# 24  Checks
# ============================================================================================================


def check_config(cfg: Config, world_size: int) -> None:
    """Raises UserError if settings would silently train something else, or fail with an unclear error."""
    check_values(cfg)
    check_processes(cfg, world_size)
    check_sizes(cfg)
    check_layers(cfg)
    check_stages(cfg)
    check_updates(cfg)
    if cfg.fp8:
        check_fp8(cfg, num_microbatches(cfg, world_size))


def check_values(cfg: Config) -> None:
    """Checks settings that have a choice of values, because the code may give them other values."""
    for name, (value, value_type) in flatten_settings(cfg).items():
        is_allowed = not value_type.choices or value_type.allows(value)
        require(is_allowed, f"{name}: its annotation does not allow {value!r}")


def check_processes(cfg: Config, world_size: int) -> None:
    """Checks that processes can share micro-batches and parameters, and micro-batches can share tokens."""
    count = num_microbatches(cfg, world_size)
    cannot_share = f"{world_size} processes cannot share"
    require(count % world_size == 0, f"{cannot_share} {count} micro-batches; change one of these numbers")
    shapes = param_shapes(cfg, world_size)
    for spec in used_specs(cfg):
        is_shared = spec.kind == "small" or shapes[spec.name][0] % world_size == 0
        require(is_shared, f"{cannot_share} the rows of {spec.name}; change one of these numbers")
    for i, stage in enumerate(cfg.stages):
        is_whole = stage.batch_tokens % count == 0
        require(is_whole, f"stages.{i}.batch_tokens: use a multiple of the {count} micro-batches")


def check_sizes(cfg: Config) -> None:
    """Checks the model's widths, its vocabulary and the table of n-grams."""
    head_multiple = 2 if any(layer.attention == "paired" for layer in cfg.layers) else 1
    fits = cfg.heads % head_multiple == 0 and cfg.head_dim % 4 == 0
    fits = fits and cfg.dim >= GATE_DIM and cfg.dim % cfg.mix_groups == 0
    require(
        fits,
        f"heads * head_dim must be {GATE_DIM} or more, and a multiple of mix_groups; heads even if some are "
        "paired; head_dim a multiple of 4",
    )
    require(cfg.vocab_size <= cfg.padded_vocab, "padded_vocab must not be below vocab_size")
    require(
        not cfg.pointer_dim or cfg.copy_gate_column < cfg.padded_vocab,
        "the copy pointer needs a column of the head: raise padded_vocab, or use --set pointer_dim=0",
    )
    orders = cfg.ngrams.orders
    orders_ok = len(set(orders)) == len(orders) and min(orders, default=2) >= 2
    require(
        orders_ok and cfg.ngrams.rows_per_token * cfg.ngrams.rows_per_order < 2**31,
        "ngrams.orders: give distinct numbers from 2 on; and fewer than 2^31 rows, contexts' too",
    )
    contexts = cfg.ngrams.contexts
    require(len(set(contexts)) == len(contexts), "ngrams.contexts: name each context once")
    require(
        cfg.vocab_size <= 257 or set(contexts) <= {"copy"},
        "ngrams.contexts: word and above are for bytes; with larger vocabularies use copy alone",
    )
    require(not orders or cfg.ngrams.width <= cfg.dim, "ngrams.width must not be above the model's width")


def check_layers(cfg: Config) -> None:
    """Checks that each layer has what its parts need, and that the skip goes to a later layer."""
    for i, layer in enumerate(cfg.layers):
        is_plain = layer.attention == "plain"
        needs_attention = layer.gate or layer.value or layer.narrow_qk or layer.narrow_v
        name = f"layers.{i}"
        require(
            is_plain or not (layer.key_shift or layer.xsa), f"{name}: key_shift and xsa need attention=plain"
        )
        key_shift_ok = not (layer.key_shift and layer.narrow_qk)
        require(
            key_shift_ok,
            f"{name}: key_shift moves the half of a key that is not rotated; narrow_qk leaves none",
        )
        can_attend = layer.attention or not needs_attention
        require(can_attend, f"{name}: gate, value, narrow_qk and narrow_v need attention=plain or paired")
        require(layer.value or not layer.mudd, f"{name}: mudd needs value=true")
        has_window = layer.window in vars(cfg.val_windows)
        require(has_window, f"{name}.window: the class Windows has no field {layer.window}")
    require(sum(layer.mudd for layer in cfg.layers) <= 1, "layers.*.mudd: only one layer can have it")
    require(
        cfg.skip_from < cfg.skip_to and cfg.backout_from < len(cfg.layers),
        "skip_from must be below skip_to, and backout_from the number of a layer",
    )


def check_stages(cfg: Config) -> None:
    require(cfg.steps, "stages.*.steps are all 0: there is nothing to train")
    for i, stage in enumerate(cfg.stages):
        require(stage.mtp and stage.mtp[0], f"stages.{i}.mtp: the first weight must not be 0")
        can_sample = cfg.padded_vocab % COLUMN_STRIDE or not any(stage.sampled_columns)
        require(can_sample, f"padded_vocab: a multiple of {COLUMN_STRIDE} cannot have sampled_columns")
        columns = max(stage.sampled_columns, default=0)
        require(columns <= cfg.padded_vocab, f"stages.{i}.sampled_columns: give numbers up to padded_vocab")


def check_updates(cfg: Config) -> None:
    """Checks how gradients are summed, how often parameters are updated, and which ones have averages."""
    has_fixed_grads = cfg.main_grad or not cfg.cuda_graphs
    require(
        has_fixed_grads,
        "autograd's gradients are new tensors, which CUDA graphs cannot have: with "
        "main_grad=false use cuda_graphs=false",
    )
    tied = [spec for spec in cfg.params if spec.name in ("lm_head", "embed")]
    require(
        {spec.update_every for spec in tied} in ({(1, 1)}, {(2, 2)}),
        "lm_head and embed are tied: give both params.*.update_every the same value, 1,1 or 2,2",
    )
    tied_rules = {spec.optimizer for spec in tied}
    require(len(tied_rules) == 1, "lm_head and embed are tied: give both params.*.optimizer the same value")
    intervals = [spec.update_every for spec in cfg.params]
    for early, late in [cfg.ngrams.update_every, *intervals]:
        require(
            early <= late,
            "ngrams.update_every, params.*.update_every: the second number must not be below the first",
        )
    for spec in cfg.params:
        can_exchange = spec.exchange == "reduce_scatter" or spec.kind == "embedding"
        require(can_exchange, f"params.{spec.name}.exchange: only tables can be sparse")
        is_looked_up = spec.rows_by or spec.kind != "embedding"
        require(is_looked_up, f"params.{spec.name}.rows_by: say which ids look up rows of an embedding")
        rules = ", ".join(UPDATE_RULES)
        require(spec.optimizer in UPDATE_RULES, f"params.{spec.name}.optimizer: give one of {rules}")
        rule = UPDATE_RULES[spec.optimizer]
        can_update = spec.kind == "bank" or not rule.only_banks
        require(can_update, f"params.{spec.name}.optimizer: only banks can have {spec.optimizer}")
        has_muls = spec.kind != "small" or rule.muls
        require(
            has_muls, f"params.{spec.name}.optimizer: {spec.optimizer} has no `muls` for small parameters"
        )
        for name in rule.unused:
            require(
                getattr(spec, name) == getattr(ParamSpec, name),
                f"params.{spec.name}.{name}: {spec.optimizer} reads none; give {getattr(ParamSpec, name)!r}",
            )
    known = {spec.name for spec in cfg.params if spec.kind != "small"}
    for i, average in enumerate(cfg.averages):
        require(average.offset < average.every, f"averages.{i}.offset: give a number below {average.every}")
        unknown = set(average.params) - known
        require(not unknown, f"averages.{i}.params: {unknown}: use names of banks, tables and lm_head")


def check_device(cfg: Config, device: torch.device) -> None:
    """Checks that the device and its software can do what the config names, and says what to set instead."""
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    too_old = capability < (8, 0)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernel_dtype = "float32" if interpreted else "bfloat16"
    lacks_kernels = triton is None or too_old and not interpreted
    require(
        not cfg.kernels or (not lacks_kernels and {cfg.dtype, cfg.bank_dtype} == {kernel_dtype}),
        "the kernels need the package triton, a GPU of compute capability 8.0 (A100, RTX 30) or newer, and "
        "dtype and bank_dtype bfloat16 (float32 if interpreted); use --preset cpu, or --set kernels=",
    )
    require(
        "pointer" not in cfg.kernels or cfg.pointer_dim in (0, 16, 32, 64, 128),
        "the pointer's kernel needs pointer_dim 16, 32, 64 or 128; use --set pointer_dim=128",
    )
    # dense_attention keeps its bias from layer to layer, and a CUDA graph would freeze it.
    has_graphs = on_gpu and cfg.attention_impl != "dense"
    require(
        has_graphs or not cfg.cuda_graphs, "CUDA graphs need a GPU and FlashAttention; use cuda_graphs=false"
    )
    require(
        cfg.attention_impl == "dense" or (not too_old and cfg.dtype == "bfloat16"),
        "FlashAttention needs a GPU of compute capability 8.0 (A100, RTX 30) or newer, and dtype "
        "bfloat16; use --set attention_impl=dense",
    )
    require(
        not cfg.fp8 or not on_gpu or capability >= (8, 9),
        "FP8 needs a GPU of compute capability 8.9 (RTX 40, H100) or newer; use --set fp8=false",
    )


def check_fp8(cfg: Config, count: int) -> None:
    """Checks the sizes of FP8 matrix products for batches of `count` micro-batches."""
    widest = int((E4M3_MAX * FP8_MLP_H_SCALE) ** 2)
    require(
        not cfg.fp8_mlp or cfg.dim <= widest,
        f"FP8's scale of the MLPs' input is for a model's width up to {widest}; use --set fp8_mlp=false",
    )
    for i, stage in enumerate(cfg.stages):
        widths = cfg.padded_vocab, cfg.dim, cfg.mlp_dim, cfg.head_chunk, stage.batch_tokens // count
        require(
            math.gcd(16, *widths, *stage.sampled_columns) == 16,
            f"stages.{i}: FP8 needs multiples of 16 in tokens of a micro-batch, sampled_columns, head_chunk, "
            "padded_vocab, mlp_dim and heads * head_dim; change them, or use --set fp8=false",
        )


# ============================================================================================================
# 25  Files
# ============================================================================================================


def differences(a: dict, b: dict) -> str:
    """Returns the names of the keys whose values differ; "" if there are none."""
    return ", ".join(key for key in a | b if a.get(key) != b.get(key))


def config_json(cfg: Config, **more) -> str:
    return json.dumps(dataclasses.asdict(cfg) | more)


# ---- The log -----------------------------------------------------------------------------------------------


class RunLog:
    """Writes the run's log file and its screen output. On a rank without a path it writes nothing.

    The file is line-buffered, so it holds every finished step, however the process ends.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self.file = None
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Mode "x": a run must not overwrite another run's log.
            self.file = open(path, "x", buffering=1, encoding="utf-8", errors="backslashreplace")

    def print0(self, text: str, console: bool = True, file: bool = True) -> None:
        """Prints a line from rank 0 to the screen, to the log file, or to both."""
        if self.file is None:
            return
        if file:
            with user_error_on(f"cannot write {self.path}", "make room on its disk", OSError):
                self.file.write(text + "\n")
        if console:
            tqdm.write(text)  # above the progress bar
            sys.stdout.flush()


def source_hash(source: bytes = SOURCE) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def describe_commit(script: Path, source: bytes) -> str:
    """Returns the repository's commit, with "(clean)" if the script in that commit is `source`, else with
    "(modified)". If git cannot name a commit, returns "unknown".
    """
    # With GIT_DIR, git would look into another repository.
    git_command = ["env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "git"]

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            [*git_command, *arguments], cwd=script.parent, stderr=subprocess.DEVNULL, text=True
        ).strip()

    try:
        commit = git("rev-parse", "HEAD")
        # Prints "MODE blob HASH NAME" or nothing. Without ./ a name that begins with a colon would be a
        # pattern.
        committed = git("ls-tree", "HEAD", f"./{script.name}")
    except subprocess.CalledProcessError:  # there is no commit, or no git, which env reports
        return "unknown"
    algorithm = "sha1" if len(commit) == 40 else "sha256"
    if hashlib.new(algorithm, b"blob %d\0" % len(source) + source).hexdigest() in committed:
        return f"{commit} (clean)"
    return f"{commit} (modified)"


def describe_cpu() -> str:
    """Returns the CPU's model, or its architecture where the system does not report the model."""
    with contextlib.suppress(OSError):  # only Linux has this file
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if model:
            return model[1]
    return platform.machine()


def describe_environment(
    device: torch.device, world_size: int, file: str = __file__, source: bytes = SOURCE
) -> list[str]:
    """Returns log lines about software, hardware, script and commit. They hold no absolute path."""
    script = Path(file).resolve()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = len(os.sched_getaffinity(0))  # the cores that this process may use
        hardware = f"{describe_cpu()} ({cores} cores, {torch.get_num_threads()} threads a process)"
    return [
        f"Running Python {sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda} on {hardware} "
        f"with world_size {world_size}",
        f"script: {script.name} (sha256 {source_hash(source)})",
        f"commit: {describe_commit(script, source)}",
    ]


def track_of(cfg: Config, world_size: int, args: argparse.Namespace) -> str:
    """Returns the preset's track if data, validation, target and number of micro-batches are the preset's and
    no option rules out a record; otherwise "other".
    """
    preset = PRESETS[cfg.preset]
    names = ("data", "val_slice_tokens", "val_slices", "target")
    same = all(getattr(cfg, name) == getattr(preset, name) for name in names)
    same = same and num_microbatches(cfg, world_size) == preset.microbatches
    cannot_be_record = args.checkpoint_every or args.resume or args.profile
    return cfg.track if same and not cannot_be_record else "other"


def name_run(args: argparse.Namespace, track: str, comm: Collectives, resumed: dict) -> tuple[Path, Path]:
    """Returns the path of the run's files, without a suffix, and the log's path. Rank 0 names the run."""
    # run.sh sets RUN_DATE, so that all its runs share a folder even if midnight passes.
    made = uuid.uuid4().hex[:12], os.environ.get("RUN_DATE", str(date.today()))
    run_id, today = comm.from_rank_0(made)
    if resumed:
        path = find_checkpoint(args.resume).parent.with_suffix("")  # RUN.checkpoint/stepN -> RUN
        require(
            not args.name or str(path.parent).endswith(f"_{args.name}"),
            f"--name {args.name}: {args.resume} is of a run of another name; leave --name out",
        )
        return path, path.with_suffix(f".from{resumed['step']}_{run_id}.txt")
    folder = f"{today}_{args.name}" if args.name else "attempts"
    path = Path("records", track, folder, f"seed{args.seed}_{run_id}")
    return path, path.with_suffix(".txt")


def begin_log(log: RunLog, args: argparse.Namespace, cfg: Config, data: Dataset, comm: Collectives) -> None:
    """Logs the script, the environment, the config and the data's fingerprint."""
    config = config_json(cfg, name=args.name, seed=args.seed)
    log.print0(f"{SOURCE.decode(errors='replace')}\n{'=' * 100}", console=False)
    log.print0("\n".join(describe_environment(comm.device, comm.world_size)))
    log.print0(f"config: {config}", console=False)
    log.print0(f"data: {data.fingerprint}")


# ---- Saved models ------------------------------------------------------------------------------------------


def output_file(name: str) -> Path:
    """Returns the file that writing `name` creates or replaces; for a symbolic link, its target.

    Raises UserError if something that must stay is there, such as a device, a folder or a text file.
    """
    target = Path(os.path.realpath(name))
    is_ours = not target.exists()
    if target.is_file():
        with open(target, "rb") as file:
            begin = file.read(999)  # enough to tell a model from other zip files
            file.seek(max(0, target.stat().st_size - 20))
            end = file.read()
        is_ours = not begin or begin[:2] == b"PK" and b'{"preset": ' in begin
        if re.fullmatch(r"\.ngrams\d+", target.suffix):
            is_ours |= re.fullmatch(rb"[0-9a-f]{20}", end) is not None  # the run's id and a CRC-32
    require(
        is_ours and os.access(target.parent, os.W_OK),
        f"--save cannot write {name}: give a new file, or a model, in a folder that can be written to",
    )
    return target


def save_model(path: str, model: GPT, run_id: str, comm: Collectives, fingerprint: str = "") -> None:
    """Saves full weights, without a world size's padding, and the config as JSON. Rank 0 writes `path`.

    Beside it every rank saves its rows of n-grams in PATH.ngrams0, PATH.ngrams1, ... Each of these files ends
    with the run's id and its rows' CRC-32. All ranks must call it. Files are renamed when all are complete,
    so older files stay until then.
    """
    written: list[Path] = []
    partial_suffix = f".{run_id}.partial"
    fix = f"make room, remove {path}*.partial, and train again, with --resume if there is a checkpoint"
    # torch.save raises RuntimeError when the disk is full.
    with user_error_on(f"cannot write {path}", fix, OSError, RuntimeError):
        if comm.rank == 0:
            weights = {"signs": model.signs.cpu()}
            for name, shape in param_shapes(model.cfg, 1).items():
                weights[name] = getattr(model, name)[: shape[0]].detach().cpu()
            config = config_json(model.cfg)
            saved = {"config": config, "id": run_id, "ranks": comm.world_size, "script": source_hash()}
            saved |= {"data": fingerprint, "vocabulary": vocabulary_hash(model.cfg)}
            weights_path = output_file(path)
            torch.save(saved | {"weights": weights}, f"{weights_path}{partial_suffix}")
            written.append(weights_path)
        if model.ngrams:
            rows_path = output_file(f"{path}.ngrams{comm.rank}")
            with open(f"{rows_path}{partial_suffix}", "wb") as file:
                crc = comm.rank  # so that exchanged files are noticed
                for rows in model.ngrams.block.split(1 << 14):  # avoids a copy of the whole block
                    data = rows.cpu().view(torch.uint8).numpy()
                    crc = zlib.crc32(data, crc)
                    file.write(data)
                file.write(f"{run_id}{crc:08x}".encode())
            written.append(rows_path)
    comm.barrier()  # all ranks have written
    for whole in written:
        os.replace(f"{whole}{partial_suffix}", whole)


# The names in a pickle of tensors, numbers and strings. weights_only also allows functions, such as
# bytearray, that take as much memory as a file demands.
PICKLED = re.compile(
    r"torch \w+|torch\.storage UntypedStorage|torch\._utils _rebuild_(tensor_v[23]|parameter)"
    r"|collections OrderedDict"
)


def read_saved(path: str | Path, fix: str) -> dict:
    """Reads a file of torch.save. Its tensors are memory-mapped. Raises UserError if the file is damaged, or
    could take more memory than its size.
    """
    with user_error_on(f"cannot read {path}", fix, Exception):  # the type depends on the damage
        with zipfile.ZipFile(path) as file:
            for entry in file.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{entry.filename} is compressed")
                if not entry.filename.lower().endswith(".pkl"):
                    continue
                for opcode, name, _ in pickletools.genops(file.read(entry)):
                    if "GLOBAL" in opcode.name and not PICKLED.fullmatch(f"{name}"):
                        raise ValueError(f"{entry.filename} calls {name}")
            damaged = file.testzip()  # torch.load verifies no checksums
            if damaged:
                raise ValueError(f"checksum of {damaged}")
        saved = torch.load(path, "cpu", mmap=True, weights_only=True)
        if not isinstance(saved, dict):
            raise ValueError("it was saved by another program")
        return saved


# ---- Checkpoints -------------------------------------------------------------------------------------------


# A checkpoint is a folder RUN.checkpoint/step00000120 beside the run's log, with one file per rank: rank0.pt,
# rank1.pt, ... The folder gets this name when all files are written, so a folder with such a name is
# complete, unless the machine itself failed.
CHECKPOINT = "step" + 8 * "[0-9]"


def checkpoint_folder(run: Path) -> Path:
    return run.with_suffix(".checkpoint")


def find_checkpoint(log: str) -> Path:
    """Returns the newest checkpoint of a run, given the run's log."""
    run = Path(log).name.split(".")[0]
    steps = sorted(Path(log).parent.glob(f"{run}.checkpoint/{CHECKPOINT}"))
    message = "it has no checkpoint; give the log of a run with --checkpoint-every that did not finish"
    require(steps, f"--resume {log}: {message}")
    return steps[-1]


def lock_checkpoints(folder: Path) -> None:
    """Locks the folder of a run's checkpoints while this process lives. Raises UserError if another process
    has locked it.

    Without the lock, a run that still goes on and one that resumes it would remove each other's checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"the run of {folder} still goes on; wait until it has ended") from None
    except OSError:  # this file system has no locks
        pass


def save_checkpoint(folder: Path, task: dict, progress: dict, model: GPT, optimizer: Optimizer) -> None:
    """Writes the checkpoint after progress["step"] steps into `folder`, and removes the previous one.

    All ranks must call it. Each rank writes its training_state(), its rows of n-grams, the task and the
    progress. A rank that fails never reaches the barrier below, so the previous checkpoint is not removed.
    """
    rank = optimizer.comm.rank
    state = training_state(model, optimizer) | {"task": task, "rank": rank} | progress
    if optimizer.ngrams:
        state["ngrams"] = optimizer.ngrams.state_dict()  # not a copy
    complete = folder / f"step{progress['step']:08d}"
    incomplete = complete.with_suffix(".partial")
    fix = "make room, in a folder that all machines see, and go on from the one before with --resume"
    # torch.save raises RuntimeError when the disk is full.
    with user_error_on(f"cannot write the checkpoint {complete}", fix, OSError, RuntimeError):
        incomplete.mkdir(parents=True, exist_ok=True)
        with open(incomplete / f"rank{rank}.pt", "wb") as file:
            torch.save(state, file)
    optimizer.comm.barrier()  # all ranks have written
    if rank == 0:
        incomplete.rename(complete)
        remove_checkpoints(folder, complete)


def remove_checkpoints(folder: Path, keep: Path | None = None) -> None:
    """Removes a run's checkpoints except `keep`. Other files in the folder stay."""
    for checkpoint in [*folder.glob(CHECKPOINT), *folder.glob(f"{CHECKPOINT}.partial")]:
        if checkpoint != keep:
            shutil.rmtree(checkpoint, ignore_errors=True)  # another machine may have it open


def read_checkpoint(args: argparse.Namespace, rank: int) -> dict:
    """Returns this rank's part of the checkpoint to resume from; without --resume, an empty dict."""
    if args.resume is None:
        return {}
    folder = find_checkpoint(args.resume)
    fix = f"use as many processes as before; if it is damaged, remove {folder}, and start again"
    path = folder / f"rank{rank}.pt"
    saved = read_saved(path, fix)
    is_ours = saved.get("rank") == rank and "task" in saved
    require(is_ours, f"{path} is no checkpoint, or another rank's; {fix}")
    return saved


def task_of(
    args: argparse.Namespace, cfg: Config, data: Dataset, world_size: int, mlp_dtype: torch.dtype | None
) -> dict:
    """Returns what must be the same to resume a run. mlp_dtype: the Backend's, which depends on the CPU."""
    task = dataclasses.asdict(replace(cfg, data=data.fingerprint, samples=0))
    others = {"processes": world_size, "script": zlib.crc32(SOURCE), "mlp_dtype": str(mlp_dtype)}
    return task | {"seed": args.seed} | others


def require_same_task(args: argparse.Namespace, task: dict, comm: Collectives, resumed: dict) -> None:
    """Raises UserError on ranks whose options, data, script or torch version differ from rank 0's, and if the
    checkpoint `resumed` is from another task.

    torchrun gives the ranks of a machine one command line, but each machine has its own. With different steps
    or data, ranks would wait for each other; with different rates, no log would describe what is trained.
    """
    launch = vars(args) | task | {"step": resumed.get("step"), "torch": torch.__version__}
    different = differences(launch, comm.from_rank_0(launch))
    require(not different, f"this rank differs from rank 0 in {different}; start all ranks alike")
    if resumed:
        different = differences(resumed["task"], task)
        require(
            not different, f"{args.resume} is of a run with another {different}; start it as that one was"
        )


# ============================================================================================================
# 26  Run
# ============================================================================================================

# How long a rank waits in a collective. If a rank is killed, torchrun ends the others at once. gloo also
# tells the killed rank's peers, but not always those that were just sending to it.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@user_error_on("cannot read RANK and WORLD_SIZE", "start with torchrun, or unset both", ValueError)
def init_process(device_kind: str = "gpu") -> tuple[int, int, torch.device]:
    """Returns this process's rank, the world size and the process's device, as torchrun's environment says.
    Without torchrun there is one rank. Makes the process's GPU the current one. device_kind: Config.device.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    require(
        0 <= rank < world_size, f"RANK={rank} and WORLD_SIZE={world_size}: start with torchrun, or unset both"
    )
    device = torch.device("cpu")
    if device_kind == "gpu" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        # Otherwise split-K matmuls would not sum in fp32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return rank, world_size, device


@user_error_on("cannot join other processes", "start with torchrun, or unset RANK and WORLD_SIZE", ValueError)
def join_processes(world_size: int, device: torch.device) -> None:
    """Joins the process group that torchrun's environment describes. With one rank there is no group."""
    if world_size == 1:
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)


def build(cfg: Config, backend: Backend, comm: Collectives, seed: int) -> tuple[GPT, Optimizer]:
    """Returns the model and its optimizer, which are the same on all ranks."""
    global COMPILER
    COMPILER = configure_compiler(cfg)
    model = GPT(cfg, comm.world_size, comm.device, seed, backend)
    optimizer = Optimizer(cfg, dict(model.named_parameters()), comm, backend)
    optimizer.gather_all()  # values drawn on other machines may differ in the last bits
    model.ngrams = optimizer.ngrams
    return model, optimizer


def log_remarks(cfg: Config, wanted_val_slices: int, backend: Backend, log: RunLog) -> None:
    """Logs where the run differs from its settings, and what the clock leaves out. wanted_val_slices: the
    setting; cfg.val_slices has what the data allow.
    """
    if cfg.val_slices < wanted_val_slices:
        slices = f"{cfg.val_slices} slices, not {wanted_val_slices}"
        log.print0(f"validation: on {slices}, because there is no more text")
    if backend.mlp_dtype:
        log.print0("this CPU has AMX: the MLPs' products are in bf16")
    log.print0("the clock leaves out the start, the warm-up, validation and checkpoints", file=False)


def trace_steps(args: argparse.Namespace, path: Path, start: int, steps: int):
    """Returns a context that profiles four steps of a run from step `start` to `steps`. Its step() must be
    called after each step.

    The four steps follow the one that --profile names, or are the last ones. Without --profile the context is
    empty. Sets TRACING.
    """
    global TRACING
    if not args.profile:
        return contextlib.nullcontext()
    TRACING = True
    first = max(1, min(args.profile, steps - 4) - start)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=first - 1, warmup=1, active=4, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        # Profile the thread that builds batches, too.
        experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True),
    )


def peak_memory() -> str:
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"peak memory allocated: {peak >> 20} MiB"


def log_closing(result: Result, steps: int, seed: int, data: Dataset, log: RunLog) -> None:
    """Logs the closing lines. The last one says that the run is complete."""
    log.print0(peak_memory())
    log.print0(f"val_loss: {result.val_loss:.6f}")
    log.print0(f"train_time_ms: {result.train_ms:.0f}")
    log.print0(f"steps: {steps}")
    log.print0(f"epochs: {result.epochs}")
    log.print0(f"seed: {seed}")
    if data.bytes_per_token:
        log.print0(f"val_loss_per_byte: {result.val_loss / data.bytes_per_token:.6f}")
    log.print0("complete: yes", console=False)


def print_samples(model: GPT, vocabulary: Sequence[bytes], seed: int, log: RunLog) -> None:
    """Prints cfg.samples texts that follow BOS, if there is a vocabulary.

    All ranks must call it, because each holds some rows of n-grams. It must be the last use of the model:
    from then on nothing is compiled, and no kernel runs.
    """
    if not vocabulary:
        return
    global COMPILER
    COMPILER = None  # nothing is compiled for these lengths
    model.backend = TORCH_BACKEND
    generator = seeded("samples", seed)
    for _ in range(model.cfg.samples):
        tokens = [model.cfg.bos_id]
        while len(tokens) <= 100:
            sharper = model.next_token_probs(tokens).cpu() ** (1 / 0.8)  # temperature 0.8
            tokens += sharper.multinomial(1, generator=generator).tolist()
        text = b"".join(vocabulary[token] for token in tokens).decode("utf-8", "replace")
        log.print0(f"sample: {text!r}", file=False)


def print_check(args: argparse.Namespace, cfg: Config, device: torch.device) -> None:
    """Carries out --check: prints that args.check processes can run this here, or raises UserError.

    Joins no process group and writes no file.
    """
    select_backend(cfg, device)
    read_checkpoint(args, rank=0)
    if args.data or cfg.data != PRESETS[args.preset].data:  # the preset's data may not be there yet
        open_dataset(cfg)
    track = track_of(cfg, args.check, args)
    slices = f"{cfg.val_slices} slices of {cfg.val_slice_tokens} tokens, vocabulary {cfg.vocab_size}"
    print(f"{args.check} processes can run this here, on the track {track}; validation: {slices}")


def run(args: argparse.Namespace) -> None:
    """Does what the command line says: reads settings, joins the processes, begins the log, builds, trains
    and saves.
    """
    cfg = read_settings(args)
    rank, world_size, device = init_process(cfg.device)
    check_config(cfg, args.check or world_size)
    if args.save is not None:
        output_file(args.save)
        output_file(f"{args.save}.ngrams{rank}")
    if args.check:
        print_check(args, cfg, device)
        return

    # Processes and data.
    join_processes(world_size, device)
    backend = select_backend(cfg, device)
    resumed = read_checkpoint(args, rank)
    data = open_dataset(cfg)
    wanted_val_slices = cfg.val_slices
    cfg = replace(cfg, val_slices=data.val_slices)

    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world_size > 1 else None
    comm = Collectives(rank, world_size, device=device)
    loader_comm = Collectives(rank, world_size, group)  # for the thread that builds batches

    # The log, if all ranks are alike.
    task = task_of(args, cfg, data, world_size, backend.mlp_dtype)
    require_same_task(args, task, comm, resumed)
    track = track_of(cfg, world_size, args)
    # name_run() is collective, so no log is started before all ranks have passed the checks above.
    path, log_path = name_run(args, track, comm, resumed)
    if rank == 0 and (args.checkpoint_every or resumed):
        lock_checkpoints(checkpoint_folder(path))
    log = RunLog(log_path if rank == 0 else None)
    begin_log(log, args, replace(cfg, track=track), data, comm)
    if resumed:
        log.print0(f"resumed: {path.name} after step {resumed['step']}")
    if args.profile:
        log.print0("profiled: yes", console=False)
    log.print0("=" * 100, console=False)
    log.print0(f"log: {log.path}", file=False)

    # Training.
    model, optimizer = build(cfg, backend, comm, args.seed)
    training = Training(data, model, optimizer, ValLoader(cfg, data.val), loader_comm)
    start = prepare(training, resumed, log)
    log_remarks(cfg, wanted_val_slices, backend, log)
    every = args.checkpoint_every or cfg.steps  # cfg.steps: the range below is empty
    checkpoint_steps = {padded(n, UPDATE_PERIOD) for n in range(every, cfg.steps, every)} - {cfg.steps}
    checkpoints = Checkpoints(checkpoint_folder(path), task, checkpoint_steps)
    trace = path.with_suffix(f".rank{rank}.trace.json.gz")
    with trace_steps(args, trace, start.step, cfg.steps) as profiler:
        result = train(training, log, start, checkpoints, profiler)

    # Results.
    log_closing(result, cfg.steps, args.seed, data, log)
    if track != "other":  # the target is for the track's text and validation
        side = "below" if result.val_loss < cfg.target else "not below"
        log.print0(f"target {cfg.target}: {side}; one run proves nothing", file=False)
    if args.save:
        run_id = path.name.rpartition("_")[2]
        save_model(args.save, model, run_id, comm, data.fingerprint)
    print_samples(model, data.vocabulary, args.seed, log)
    log.print0(f"log: {log.path}", file=False)
    if rank == 0:
        remove_checkpoints(checkpoints.folder)  # nothing is left to resume
        with contextlib.suppress(OSError):  # the folder was never made, or has other files
            checkpoints.folder.rmdir()
    if world_size > 1:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status. Errors that a user can fix are one line per rank."""
    args = parse_args(argv)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    rank = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    where = f"{Path(__file__).name}: error{rank}"
    try:
        if by_torchrun:
            elastic_record(run)(args)  # torchrun then ends with the error of the rank that failed first
        else:
            run(args)
        return 0
    except (UserError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        message = f"{where}: {error}"
    except Exception as error:  # torchrun's report has the traceback
        message = f"{where}: {error!r}" if by_torchrun else traceback.format_exc()
    tqdm.write(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it is None if it was closed, as by >&-
    sys.stderr = sys.stderr or open(os.devnull, "w")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also ends a process that waits in a collective
    # The screen's encoding may lack characters of a sample.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore
    status = main()
    with contextlib.suppress(OSError):  # the reader of the output may be gone
        sys.stdout.flush()
    os._exit(status)  # a thread may still wait for ranks that no longer answer; torchrun ends them
