"""Inputs of the tests that several files share: the golden numbers' fill, statistics, tiny model and batch (their words are in
golden/README.md), and a writer of token shards."""
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import train_gpt as tg

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
LOW = 0xFFFFFFFF


def hash_words(n, k):
    """h(n, k) for an array n, as uint64 below 2^32."""
    x = (n.astype(np.uint64) + (0x9E3779B9 * k & LOW)) & LOW
    x ^= x >> 16
    x = x * 0x85EBCA6B & LOW
    x ^= x >> 13
    x = x * 0xC2B2AE35 & LOW
    return x ^ x >> 16


def fill(shape, k, scale=1.0, offset=0.0):
    """Stream k in a float32 tensor."""
    words = hash_words(np.arange(int(np.prod(shape))), k)
    return torch.from_numpy((offset + scale * (words.astype(np.float64) / 2**31 - 1)).astype(np.float32)).view(shape)


def stats(t):
    v = t.detach().double().flatten().numpy()
    weight = (np.arange(len(v), dtype=np.uint64) * 2654435761 & LOW) / 2**32 - 0.5
    return {"sum": v.sum(), "abs": np.abs(v).sum(), "l2": np.sqrt((v * v).sum()), "wsum": (v * weight).sum()}


def distance(t, golden):
    """Of the statistics of t from golden ones: the largest difference in units of the golden l2."""
    own = stats(t)
    return max(abs(own[key] - golden[key]) for key in ("sum", "l2", "wsum")) / max(golden["l2"], 1e-30)


FILL = {  # k, scale, offset
    "post_lambdas": (1, .20, 1.00), "x0_lambdas": (2, .20, .10), "bigram_lambdas": (3, .10, .15), "resid_lambdas": (4, .10, 1.05),
    "scalars": (5, .40, .60), "value_embeds": (6, .50, 0), "attn_gate_bank": (7, .40, 0), "ve_gate_bank": (8, .40, 0),
    "qk_bank": (9, .06, 0), "vo_bank": (10, .20, 0), "mlp_bank": (11, .05, 0), "smear_gate": (12, .50, 0), "skip_gate": (13, .50, 0),
    "lm_head": (14, .30, 0), "embed": (15, .30, 0), "bigram_embed": (16, .40, 0)}


def golden_key(name):
    """The reference's name of a parameter."""
    return name + ".weight" if name in ("smear_gate", "skip_gate", "lm_head", "embed", "bigram_embed") else name


WORLD = 4  # ranks for which our banks are padded as the reference's are: one MLP layer of padding, no other


def golden_layout(name, t):
    """Our tensor of a parameter as the reference stores it: value_embeds table after table, not token after token."""
    return t.permute(1, 0, 2).flatten(0, 1) if name == "value_embeds" else t


def our_layout(name, t, cfg):
    tables = sum(layer.value is not None for layer in cfg.layers)
    return t.view(tables, cfg.padded_vocab, cfg.dim).permute(1, 0, 2) if name == "value_embeds" else t


def parameter_stream(name, k, scale, offset, cfg):
    """Stream k for a parameter, filled in the reference's layout, in ours."""
    shape = tg.param_shapes(cfg, WORLD)[name]
    if name == "value_embeds":
        shape = (shape[0] * shape[1], shape[2])
    return our_layout(name, fill(shape, k, scale, offset), cfg)


def tiny_config(dtype, **changes):
    return replace(
        tg.RECORD, vocab_size=512, padded_vocab=512, start_token=511, bigram_rows=2560, head_dim=32, mlp_dim=768, dtype=dtype,
        polar_dtype=dtype, window_unit=16, slices=1, val_slice_tokens=64, val_slices=1,
        stages=tuple(replace(stage, tokens=64) for stage in tg.RECORD.stages), **changes)


def fill_model(model, tied=True):
    with torch.no_grad():
        for name, (k, scale, offset) in FILL.items():
            getattr(model, name).copy_(parameter_stream(name, k, scale, offset, model.cfg))
        if tied:
            model.embed.copy_(model.lm_head.T)
    return model


def tiny_batch(rank=0):
    """64 tokens in three documents. Its hash at position 1 happens to be the reference's too (see test_golden)."""
    j = np.arange(65) + 1000 * rank
    tokens = (31 * j * j + 7 * j) % 500
    starts = [0, 4, 57] if rank == 0 else [0, 52, 55]
    tokens[starts] = 511
    room = tg.Room(tiny_config("float32"), 64, 8, False)
    return tg.make_micro_batch(tokens.astype(np.uint16), np.array(starts[1:]), 64, 8, 2560, room)


def backward(model, batch, now, rows=None, grads=None):
    """A micro-batch forward and backward; its loss, summed over tokens. Without `grads` all by autograd."""
    x = model.activations(batch, now.short, now.long, rows, grads)
    loss, begin = model.head(x, batch.targets, now.mtp, (grads or {}).get("lm_head", tg.TO_AUTOGRAD))
    torch.autograd.backward(*zip(*begin))
    return loss


def next_batch(loader, tokens, longest):
    """A training batch of any size, in memory of its own."""
    T = tokens // loader.slices
    rooms = [tg.Room(loader.cfg, T, loader.cfg.doc_slots or tg.doc_slots(T), False) for _ in range(loader.slices // loader.world)]
    return loader.batch(tokens, longest, rooms)


def write_shard(path, tokens, vocab_size=0, start_token=0, text_bytes=0):
    header = np.zeros(256, dtype="<i4")
    header[:6] = tg.MAGIC, tg.VERSION, len(tokens), vocab_size, start_token, text_bytes
    Path(path).write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return Path(path)


def random_documents(rng, count, vocab_size, start_token, longest=200):
    """About `count` tokens of documents of random lengths, some of them only a start token."""
    tokens = rng.integers(0, vocab_size - 1, count)
    tokens[tokens >= start_token] += 1
    at = 0
    while at < count:
        tokens[at] = start_token
        at += int(rng.integers(1, longest)) if rng.random() > 0.1 else 1
    return tokens
