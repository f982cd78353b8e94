#!/usr/bin/env python3
"""Prints the validation losses of saved models, also on tokens that no run validates with.

    ./run.sh --save model.pt
    python bench/validation_loss.py model.pt [MODEL.pt ...] [--slices 128:161] [--data DIR]

Evaluates slices FIRST to END - 1 of the validation split, of val_slice_tokens each; the `cpu` preset's are
0:128, and what follows has decided nothing about it. By default they are those of the model's config, with
the data it names in this repository: if that is the run's (compare its fingerprint), the loss is the run's
too, up to the rounding of other numbers of processes. Losses are in nats per token.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as tg


def parse_slices(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:END, like 128:161")
    return int(first), int(end)


@torch.no_grad()
def validation_loss(path: str, slices: tuple[int, int] | None, data: str | None) -> tuple[float, str]:
    """Returns the mean loss over the slices, and what they are of. Raises tg.UserError."""
    model = tg.load_model(path)
    first, end = slices or (0, model.cfg.val_slices)
    cfg = replace(model.cfg, data=data or str(ROOT / model.cfg.data), val_slices=1)
    dataset = tg.open_dataset(cfg)
    have = (sum(tg.read_header(shard).tokens for shard in dataset.val) - 1) // cfg.val_slice_tokens
    if end > have:
        raise tg.UserError(
            f"{cfg.data} has {have} validation slices of {cfg.val_slice_tokens} tokens, not {end}"
        )
    loader = tg.ValLoader(replace(cfg, val_slices=end), dataset.val)
    windows = tg.window_tokens(cfg, cfg.val_windows)
    losses = [model.token_losses(loader.batch(i), windows).mean().item() for i in range(first, end)]
    return sum(losses) / len(losses), f"slices {first}:{end} of {dataset.fingerprint}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", nargs="+", metavar="MODEL.pt")
    parser.add_argument("--slices", type=parse_slices, metavar="FIRST:END")
    parser.add_argument("--data", metavar="DIR", help="default: that of the model's config")
    args = parser.parse_args(argv)
    losses = []
    for path in args.models:
        try:
            loss, what = validation_loss(path, args.slices, args.data)
        except (OSError, tg.UserError) as error:
            sys.exit(f"validation_loss.py: {error}")
        losses.append(loss)
        print(f"{loss:.4f}  {path}  {what}", flush=True)
    if len(losses) > 1:
        print(f"{sum(losses) / len(losses):.4f}  mean of {len(losses)} models")


if __name__ == "__main__":
    main()
