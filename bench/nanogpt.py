#!/usr/bin/env python3
"""Trains nanoGPT's recipe for a CPU and the `cpu` preset on Tiny Shakespeare, in turns, on this machine.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    python data/shakespeare.py
    python bench/nanogpt.py ../nanoGPT --runs 3 [--picture docs/shakespeare.png]

nanoGPT's recipe is the command of its README. Its time is that of 2,000 iterations without evaluations, at
the mean of those iterations that hold none. Its loss is the last that it prints, an estimate from 20 random
batches. Ours is a run of docs/shakespeare.md, with a validation after every 20 steps, which the clock leaves
out. Both losses are nats per character of the last tenth of the text. nanoGPT sees up to 64 characters before
each, ours as many as its windows allow.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from ablations import compare
from scripts import UserError, make_parser, new_figure, number, png, run_script, save_figure, tied
from shakespeare import place_of

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "data" / "shakespeare"
RECIPE = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
    "--lr_decay_iters=2000 --dropout=0.0"
).split()
# By nanoGPT's README, in about three minutes each.
PUBLISHED = {"nanoGPT on a CPU": 1.88, "nanoGPT on an A100": 1.4697}

Curve = list[tuple[float, float]]  # seconds of training, loss


def output_of(command: list[str], folder: Path) -> str:
    """Runs a command; returns what it printed. Its errors go to the screen. Raises UserError if it fails."""
    print(f"+ {' '.join(command)}", flush=True)
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        tied(command), cwd=folder, env=environment, stdout=subprocess.PIPE, encoding="utf-8"
    )
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed with status {done.returncode}; its errors are above")
    return done.stdout


def nanogpt(folder: Path, seed: int) -> Curve:
    """Trains nanoGPT's recipe, which saves a model. Its seed is always 1337."""
    with tempfile.TemporaryDirectory() as out:
        printed = output_of([sys.executable, *RECIPE, f"--out_dir={out}"], folder)
    losses = {}
    for step, loss in re.findall(r"^step (\d+): .*val loss (\S+)$", printed, re.M):
        losses[int(step)] = float(loss)
    times = []
    for step, ms in re.findall(r"^iter (\d+): .* time ([\d.]+)ms", printed, re.M):
        if int(step) not in losses:
            times.append(float(ms))
    seconds = mean(times) / 1000
    return [(step * seconds, loss) for step, loss in losses.items()]


def ours(folder: Path, seed: int) -> Curve:
    command = ["./run.sh", "--preset", "cpu", "--data", str(DATA), "--seed", str(seed)]
    command += ["--set", "heads=4", "mlp_dim=512", "length=1.1", "val_every=20"]
    printed = output_of(command, folder)
    found = re.findall(r"^step:\d+/\d+ val_loss:(\S+) train_time:(\d+)ms", printed, re.M)
    return [(int(ms) / 1000, float(loss)) for loss, ms in found]


def time_to(level: float, curve: Curve) -> float | None:
    """Returns the seconds until a loss of `level` or less; None: never."""
    for time, loss in curve:
        if loss <= level:
            return time
    return None


def join(numbers: Iterable[float], form: str) -> str:
    return " ".join(format(number, form) for number in numbers)


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    figure = new_figure(8, 5)
    ax = figure.subplots()
    for place, (label, runs) in enumerate(curves.items()):
        legend = f"{label}, measured"
        for curve in runs:
            times, losses = zip(*curve)
            ax.plot(times, losses, color=f"C{place}", marker=".", label=legend)
            legend = f"_{label}"  # the legend leaves out the others
    for label, loss in PUBLISHED.items():
        ax.axhline(loss, color="0.5", linestyle="--", linewidth=1)
        text = f"{label}, published: {loss}"
        ax.text(1, loss, text, transform=ax.get_yaxis_transform(), ha="right", va="bottom")
    ax.set(xlabel="training time, s", ylabel="validation loss, nats per character")
    ax.set(ylim=(1.4, 2.6), xlim=(0, None))
    ax.legend()
    save_figure(figure, path, dpi=120)


def run(args: argparse.Namespace) -> None:
    if not (args.nanogpt / "train.py").exists() or not (DATA / "input.txt").exists():
        raise UserError("clone nanoGPT, and run data/shakespeare.py first")
    folder = args.nanogpt.resolve()
    text = (DATA / "input.txt").read_bytes()
    copy = folder / "data" / "shakespeare_char" / "input.txt"
    place_of(text, copy).write_bytes(text)  # or prepare.py would download it
    output_of([sys.executable, "data/shakespeare_char/prepare.py"], folder)
    sides = {"nanoGPT's recipe": (nanogpt, folder), "the cpu preset": (ours, REPOSITORY)}
    curves: dict[str, list[Curve]] = defaultdict(list)
    for seed in range(args.runs):
        for label, (train, folder) in sides.items():
            curves[label].append(train(folder, seed))
            time, loss = curves[label][-1][-1]
            print(f"{label}: {loss:.4f} after {time:.1f} s", flush=True)
    rows = []
    for label, runs in curves.items():
        times = [curve[-1][0] for curve in runs]
        losses = [curve[-1][1] for curve in runs]
        means = [f"{mean(losses):.4f}", f"{mean(times):.1f}"]
        rows.append([label] + means + [join(losses, ".4f"), join(times, ".1f")])
    print("\n".join(compare.markdown_table(["", "loss", "seconds", "losses", "seconds of each"], rows)))
    level = mean(curve[-1][1] for curve in curves["nanoGPT's recipe"])
    reached = [time_to(level, curve) for curve in curves["the cpu preset"]]
    print(f"the cpu preset is at nanoGPT's mean loss, {level:.4f}, after (s): {reached}")
    if args.picture:
        draw(curves, args.picture)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("nanogpt.py", __doc__)
    parser.add_argument(
        "nanogpt", type=Path, help="folder of nanoGPT; its data/shakespeare_char gets the text"
    )
    parser.add_argument("--runs", type=number(int, 1), default=1, metavar="N", help="of each")
    parser.add_argument("--picture", type=png, metavar="FILE.png", help="draw all losses over time")
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
