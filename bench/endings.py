#!/usr/bin/env python3
"""Compares endings on one trajectory: trains once, then applies each ending to the same last weights.

    python bench/endings.py [--seed 0] [--set NAME=VALUE ...] "window 48: endings.0.rate=0.0408" \\
        "window 24: endings.0.window=48 endings.0.rate=0.08" "no norms: endings.0.keep_norm=false"

A variant is LABEL: NAME=VALUE ..., settings of `endings` as for --set, on top of the preset's. Between runs
of different seeds three pairs leave a standard error of some 0.005 nats; on one trajectory only the endings
differ. Prints the loss of the last weights as they are, and each ending's difference from it. One process of
one thread: a run of the `cpu` preset takes three minutes, an ending some seconds more.
"""

import argparse
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg
from ablations import parse_variant


class KeptOptimizer(tg.Optimizer):
    """Ticks all averages at the end of training, and leaves the parameters as they are."""

    def apply_endings(self) -> None:
        self.finish_gathers()
        self.tick(self.cfg.steps - 1)
        kept.append(self)


kept: list[tg.Optimizer] = []


def apply(optimizer: tg.Optimizer, rows: range) -> None:
    """Applies those rows of endings, whose last tick is done."""
    averages = optimizer.averages
    optimizer.averages = {key: average for key, average in averages.items() if key[0] in rows}
    optimizer.tick = lambda step: None  # type: ignore[method-assign]
    tg.Optimizer.apply_endings(optimizer)
    optimizer.averages = averages


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("variants", nargs="+", type=parse_variant, metavar="LABEL: NAME=VALUE ...")
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    base = reduce(tg.override, args.set, tg.PRESETS[args.preset])
    rows: dict[str, range] = {}
    endings: tuple[tg.Ending, ...] = ()
    for label, settings in args.variants:
        own = reduce(tg.override, settings, base).endings
        rows[label] = range(len(endings), len(endings) + len(own))
        endings += own
    cfg, exchange, RealOptimizer = (
        replace(base, endings=endings, warmup=False),
        tg.Exchange(0, 1),
        tg.Optimizer,
    )
    data, backend = tg.open_dataset(cfg), tg.select_backend(cfg, torch.device("cpu"))
    tg.Optimizer = KeptOptimizer  # type: ignore[misc]
    try:
        model, _ = tg.train(cfg, backend, exchange, tg.Exchange(0, 1), data, args.seed, tg.RunLog())
    finally:
        tg.Optimizer = RealOptimizer  # type: ignore[misc]
    optimizer, val = kept.pop(), tg.ValLoader(cfg, data.val)
    weights = tg.training_state(model, optimizer)["model"]

    def loss() -> float:
        return tg.validate(model, val, exchange, tg.window_tokens(cfg, cfg.val_windows))

    last = loss()
    print(f"{last:.4f}           the last weights", flush=True)
    for label, its_rows in rows.items():
        apply(optimizer, its_rows)
        print(f"{(now := loss()):.4f}  {now - last:+.4f}  {label}", flush=True)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])


if __name__ == "__main__":
    main()
