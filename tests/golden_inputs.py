"""Provides inputs that several test files share: the golden fill, statistics, model and batch; token shards;
loaders, and the exchange that prefetches batches.

tests/golden/README.md defines the fill, the statistics, the model and the batch.
"""

import functools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

import train_gpt as tg
from configs import BASE
from tokenize_text import shard_header


def read_golden(name):
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


GOLDEN, GOLDEN92, GOLDEN_FP8 = map(read_golden, ("golden", "golden92", "golden_fp8"))
LOW = 0xFFFFFFFF
WORLD = 4  # ranks for which our banks are padded
ALONE = tg.Collectives(0, 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def hash_words(n, k):
    """Hashes an array n for stream k: uint64 below 2^32."""
    x = (n.astype(np.uint64) + (0x9E3779B9 * k & LOW)) & LOW
    x ^= x >> 16
    x = x * 0x85EBCA6B & LOW
    x ^= x >> 13
    x = x * 0xC2B2AE35 & LOW
    return x ^ x >> 16


def fill(shape, k, scale=1.0, offset=0.0):
    """Returns stream k as a float32 tensor."""
    words = hash_words(np.arange(int(np.prod(shape))), k)
    values = offset + scale * (words.astype(np.float64) / 2**31 - 1)
    return torch.from_numpy(values.astype(np.float32)).view(shape)


def stats(t):
    v = t.detach().double().flatten().numpy()
    weight = (np.arange(len(v), dtype=np.uint64) * 2654435761 & LOW) / 2**32 - 0.5
    return {"sum": v.sum(), "l2": np.sqrt((v * v).sum()), "wsum": (v * weight).sum()}


def distance(t, golden):
    """Returns the largest difference of t's statistics from golden ones, in units of the golden l2."""
    return max(abs(value - golden[key]) for key, value in stats(t).items()) / max(golden["l2"], 1e-30)


# fmt: off
FILL = {  # k, scale, offset
    "post_lambdas":    (1, .20, 1.00),
    "resid_lambdas":   (4, .10, 1.05),
    "scalars":         (5, .40, 0.60),
    "value_embeds":    (6, .50),
    "ve_gate_bank":    (8, .40),
    "qk_bank":         (9, .06),
    "narrow_qk_bank":  (9, .06),
    "vo_bank":        (10, .20),
    "mlp_bank":       (11, .05),
    "smear_gate":     (12, .50),
    "lm_head":        (14, .30),
    "embed":          (15, .30),
    "mudd_w1":        (17, .10),
    "mudd_w2":        (18, .15),
    "mudd_w2g":       (26, .15),
    "mudd_b2":        (19, 4.0, 1),
    "mudd_gate_w1":   (20, .20),
    "mudd_gate_w2":   (21, .30),
    "mudd_gate_b2":   (22, 4.0, 1),
    "mudd_gate_scale": (25, 0, .13),  # 0.13; the stream is of gradients
}
SIGN_STREAM, PREFIX_STREAM = 23, 24
# fmt: on


GOLDEN_KEYS = {  # the reference's names, where they are not ours
    "narrow_qk_bank": "qk_bank",
    "smear_gate": "smear_gate.weight",
    "lm_head": "lm_head.weight",
    "embed": "embed.weight",
    "mudd_gate_scale": "_mudd_gate_scale",
}


SLOTS = (0, 2, 5, 1, 8, 3, 10)  # the reference's order of the layers with attention
SLOT_OF = {layer: SLOTS.index(layer) for layer in sorted(SLOTS)}
GATE_COLUMNS = [*range(23)], [*range(12, 23), 27, 28]  # that are read, of the reference's

# The reference's numbers of the streams that the last mix reads, in our order.
MIX_ORDER = [0, 1, 2, 4, 3, 5, 7, 6, 8, 9]


def golden_shape(name):
    """Returns the shape of the reference's parameter that ours is a part of."""
    return GOLDEN92["a_model"]["param_shapes"][GOLDEN_KEYS.get(name, name)] or [1]


def golden_places(name, cfg):
    """Returns where our parameter's numbers are in the reference's, flattened, int64; -1: nowhere."""
    H, D = cfg.heads, cfg.head_dim
    shape = golden_shape(name)
    at = torch.arange(math.prod(shape)).view(shape)

    def halves_by_head(t):  # (d, d): rows of half heads, then of the others
        return t.view(H, 2, D // 2, -1).transpose(0, 1).reshape(t.shape)

    if name in ("qk_bank", "narrow_qk_bank"):
        narrow = name.startswith("narrow")
        slots = [slot for i, slot in SLOT_OF.items() if cfg.layers[i].narrow_qk == narrow]
        heads = at.view(len(SLOTS), 2 * H, D, -1)[slots]
        return heads[:, :, : D // 2 if narrow else D].reshape(tg.param_shapes(cfg, 1)[name])
    if name == "vo_bank":
        pairs = at.unflatten(0, (-1, 2))[[*SLOT_OF.values()]]
        for i, vo in zip(SLOT_OF, pairs):
            if cfg.layers[i].narrow_v:
                vo[0], vo[1] = halves_by_head(vo[0]), halves_by_head(vo[1].T).T
        return pairs.flatten(0, 1)
    if name == "mlp_bank":
        return at[[0, 1, 2, 3, 4, 5, 6, 8, 11, 9, 10]].flatten(0, 1)
    if name == "value_embeds":
        return at.view(4, cfg.padded_vocab, -1).permute(1, 0, 2)
    if name in ("mudd_gate_w2", "mudd_gate_b2"):
        rows = [row[columns] for row, columns in zip(at, GATE_COLUMNS)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    if name in ("mudd_w2", "mudd_b2"):
        at[1, :10] = at[1, MIX_ORDER]
    if name == "mudd_w2":
        at[1, 10:] = -1  # there ours has what follows
    if name == "mudd_w2g":
        return at[MIX_ORDER]
    return at[: tg.param_shapes(cfg, 1)[name][0]]


def reference_parts(name, t):
    """Returns the parts of our tensor, views, by the names of the reference's parameters in our layout."""
    if name != "mudd_w2":
        return {name: t}
    return {name: t[:, :14], "mudd_w2g": t[1, 10:].unflatten(0, (10, -1))}


def golden_layout(tensors, cfg):
    """Returns our tensors by name as the reference stores them, by its names; 0 where ours has nothing."""
    stored = {}
    for ours, tensor in tensors.items():
        for name, t in reference_parts(ours, tensor).items():
            whole = stored.setdefault(GOLDEN_KEYS.get(name, name), t.new_zeros(golden_shape(name)))
            at = golden_places(name, cfg)
            whole.view(-1)[at[at >= 0]] = t[: len(at)][at >= 0]
    return stored


BIGRAMS = replace(tg.RECORD, ngrams=tg.Ngrams())  # the record preset with bigram_embed


# Record 92 is the record preset without the pointer, for which PR 379 shortened the stages.
RECORD92 = replace(
    tg.RECORD,
    pointer_dim=0,
    stages=tuple(replace(stage, steps=n) for stage, n in zip(tg.RECORD.stages, (320, 361, 426, 67, 20))),
)


def tiny_config(dtype, **changes):
    settings = dict(
        vocab_size=512,
        padded_vocab=512,
        bos_id=511,
        bigram_vocab_size=2560,
        head_dim=32,
        head_chunk=24,
        mlp_dim=704,
        dtype=dtype,
        bank_dtype=dtype,
        window_unit=16,
        pointer_dim=0,
        microbatches=1,
        val_slice_tokens=64,
        stages=tuple(replace(stage, batch_tokens=64) for stage in tg.RECORD.stages),
    )
    return replace(BIGRAMS, **settings | changes)


def golden_signs(shape):
    """Returns the random signs, float32, of `shape` (rows, columns)."""
    return torch.where(fill(shape, SIGN_STREAM) < 0, -1.0, 1.0)


def golden_prefixes():
    """Returns a made-up prefix of each of 512 tokens, int64; -1 for none."""
    words = hash_words(np.arange(512), PREFIX_STREAM)
    return torch.from_numpy((words % 513).astype(np.int64) - 1)


def fill_model(model, tied):
    """Fills parameters, signs and prefixes. Parameters that the reference lacks keep their initial values."""
    with torch.no_grad():
        model.signs.copy_(golden_signs(model.signs.shape))
        model.longest_prefix.copy_(golden_prefixes())
        for name, p in model.named_parameters():
            for part, view in reference_parts(name, p).items():
                if part in FILL:
                    at = golden_places(part, model.cfg)
                    whole = fill(golden_shape(part), *FILL[part]).flatten()
                    view.zero_()[: len(at)] = torch.where(at < 0, 0, whole[at])  # padding is 0
        if tied:
            model.embed.copy_(model.lm_head.T)
    return model


def spec_of(name):
    """Returns the row of a parameter in the script's table."""
    (spec,) = [row for row in tg.PARAMS if row.name == name]
    return spec


def targets_of(model, batch, plan):
    return tg.loss_targets(batch.targets, len(plan.mtp), model.longest_prefix if plan.prefix else None)


def loss_weights(plan, model):
    return torch.tensor(plan.loss_weights, dtype=tg.acc_dtype(model.cfg))


def fp8_buffers(bank):
    """Returns what convert_mlp_bank writes to, for a bank (2n, F, d)."""
    shapes = bank.unflatten(0, (-1, 2)).shape, bank.mT.unflatten(0, (-1, 2)).shape
    return [torch.empty(shape, dtype=torch.float8_e4m3fn, device=bank.device) for shape in shapes]


def head_model(w, chunk, backend=tg.TORCH_BACKEND, loss_share=1.0):
    """Returns what head_loss_and_grad needs of a model whose head is w (d, V)."""
    cfg = replace(tg.RECORD, head_chunk=chunk, padded_vocab=w.size(1))
    return SimpleNamespace(cfg=cfg, lm_head=w, backend=backend, loss_share=loss_share)


def head_of(w):
    """Returns the LMHead of a matrix w (d, V), with zeros as its gradient so far."""
    return tg.LMHead(spec_of("lm_head"), w, BASE, ALONE)


def backward(model, batch, plan):
    """Runs a micro-batch forward and backward, which fills .grad. Returns the tensors that it looked up."""
    looked_up = model.look_up(batch, training=True)
    x = model.forward(looked_up, batch, plan.windows)
    head = head_of(model.lm_head)
    targets = targets_of(model, batch, plan)
    _, dx = model.head_loss_and_grad(x, targets, loss_weights(plan, model), head)
    x.backward(dx)
    model.lm_head.grad = head.main_grad
    return looked_up


def write_shard(path, tokens, vocab_size=0, bos_id=0, text_bytes=0):
    header = shard_header(len(tokens), vocab_size, bos_id, text_bytes)
    path.write_bytes(header + np.asarray(tokens, dtype="<u2").tobytes())
    return path


def train_loader(cfg, rank=0, world_size=1, position=(0, 0)):
    return tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world_size, position)


def val_loader(cfg):
    return tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"))


def training_of(model, optimizer, prefetch):
    """Returns what warm_up() and train() take, with the config's data."""
    cfg = model.cfg
    return tg.Training(tg.open_dataset(cfg), model, optimizer, val_loader(cfg), prefetch)


def batch_plan(batch_tokens, max_doc_len):
    """Returns the plan of a step with such a batch, without candidates."""
    return tg.plan_step(BASE, 0)._replace(batch_tokens=batch_tokens, max_doc_len=max_doc_len)


def random_documents(rng, count, vocab_size, bos_id, max_doc_len):
    """Draws about `count` tokens in documents of random lengths; some hold only a BOS token."""
    tokens = rng.integers(0, vocab_size - 1, count)
    tokens[tokens >= bos_id] += 1
    pos = 0
    while pos < count:
        tokens[pos] = bos_id
        pos += int(rng.integers(1, max_doc_len)) if rng.random() > 0.1 else 1
    return tokens


@functools.cache
def prefetch_group(world_size):
    """Returns a process group for the threads that build batches, one after the other. All ranks call it."""
    return dist.new_group(backend="gloo") if world_size > 1 else None


class CountingCollectives(tg.Collectives):
    """Counts the bytes that this rank sends, for each kind and parameter, if collectives go in rings."""

    def __post_init__(self):
        super().__post_init__()
        self.bytes_sent = Counter()

    def reduce_scatter(self, name, grad, in_rank_order=False):
        kind = "all_to_all" if in_rank_order else "reduce_scatter"
        self.bytes_sent[f"{kind} {name}"] += grad.nbytes * (self.world_size - 1) // self.world_size
        return super().reduce_scatter(name, grad, in_rank_order)

    def all_to_all(self, kind, name, rows, input_splits, output_splits, out=None):
        self.bytes_sent[f"{kind} {name}"] += rows.nbytes - rows.split(input_splits)[self.rank].nbytes
        return super().all_to_all(kind, name, rows, input_splits, output_splits, out)

    def all_gather(self, name, t):
        self.bytes_sent[f"all_gather {name}"] += t.nbytes * (self.world_size - 1) // self.world_size
        return super().all_gather(name, t)


def prefetch_exchange(rank, world_size):
    return CountingCollectives(rank, world_size, prefetch_group(world_size))


def tensors_of(nest):
    return [t for t in tree_leaves(nest) if isinstance(t, torch.Tensor)]


def flatten(nest):
    """Flattens a nest of dicts, lists and tuples to {"['layers'][3]['window']": "long", ...}."""
    return {keystr(path): value for path, value in tree_leaves_with_path(nest)}


def bits_of(value):
    """Returns a tensor's shape and bytes, any other value as it is."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return value.shape, value.unsqueeze(-1).view(torch.uint8).numpy().tobytes()
    return value


def same_bits(a, b):
    """Compares two nests of tensors and numbers bit by bit, NaN and -0 too."""
    return tree_map(bits_of, a) == tree_map(bits_of, b)
