#!/usr/bin/env python3
"""Writes a saved model as a safetensors file, for other programs.

    python evals/export.py MODEL OUT.safetensors

Needs the package safetensors. The file holds all that the model computes with: its weights, its signs, and
its n-gram rows, if it has n-grams. Its metadata has one entry, "config": the config as JSON, which says what
the layers are. These are the tensors' names and shapes, which do not depend on the number of processes:

    embed (V, d), lm_head (d, V)        token embeddings, the head
    bigram_embed (rows, d)              rows of hashed bigrams; a model with n-grams has in their place:
    ngrams (orders * rows, width)       rows of each order, in turn
    signs (sign_rows, d or width)       -1 and 1, by which rows of bigrams or n-grams are multiplied
    value_embeds (V, tables, d)         token embeddings that layers add to their values
    qk_bank (layers * H, 2 D, d)        of each layer with attention: query rows (d, d), then key rows (d, d)
    narrow_qk_bank (layers * H, D, d)   of each with narrow heads instead: rows (d / 2, d) and (d / 2, d)
    vo_bank (layers * 2, d, d)          their value and output matrices, in turn
    mlp_bank (MLPs * 2, F, d)           of each MLP: fc, proj; it computes relu(h fc.T)^2 proj
    scalars (2 L + 2,)                  factors of each layer's QKV and output weight; the smear's, the skip's
    resid_lambdas, post_lambdas (L, 2)  factors of the stream and of the output, at attention and at the MLP
    smear_gate (1, 12), ve_gate_bank (tables, H, 12)    gates that read 12 channels
    mudd_w1, mudd_w2, mudd_b2           two MLPs: weights of the last layer's and of the head's connections
    mudd_gate_w1, _w2, _b2, _scale      two MLPs: gates of every token

V tokens, padded; d = H * D channels, H heads; L layers; F the MLPs' width. A tensor is absent if the config
switches off its part of the model. train_gpt.py says what each does.

The dtype is the config's `dtype` (bfloat16 in the `record` preset, float32 in the others) and that of ngrams
is `ngrams.dtype`; scalars, resid_lambdas, post_lambdas and mudd_gate_scale have at least float32. When the
file is written, every tensor's name, dtype and shape is printed.
"""

import argparse
import shutil

import torch

from generate import load_model, make_parser, run_script, tg
from scripts import replacing, target

EXPORT_BEGINS = rb'.{8}\{"__metadata__":\{"config":"\{\\"preset\\"'


def run(args: argparse.Namespace) -> None:
    with tg.user_error_on("this needs safetensors", "python -m pip install safetensors", ImportError):
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    model = load_model(args.model)
    tensors = {}
    for name, value in model.state_dict().items():
        tensors[name] = value.contiguous()
    if model.ngrams:  # reads the whole table into memory
        n = model.cfg.ngrams
        tensors["ngrams"] = model.ngrams.fetch(torch.arange(n.rows_per_token * n.rows_per_order))
    with tg.user_error_on(f"cannot write {args.out}", "choose another place", SafetensorError):
        with replacing(args.out, EXPORT_BEGINS) as path:
            save_file(tensors, path, {"config": tg.config_json(model.cfg)})
            shutil.copymode(args.model, path)  # safetensors lets nobody else read it
    for name, tensor in sorted(tensors.items()):
        print(f"{name:20} {str(tensor.dtype).removeprefix('torch.'):10} {tuple(tensor.shape)}")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("export.py", __doc__)
    parser.add_argument("out", type=lambda text: target(text, EXPORT_BEGINS), metavar="OUT.safetensors")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
