#!/usr/bin/env python3
"""Plots validation loss over training time: the pictures of README.md.

    cd bench/curves
    python ../loss_curves.py "cpu preset before n-grams=cpu.txt" "plain GPT=plain_gpt.txt" \\
        --line "4-gram=1.469" --line "5-gram=1.350" --out curves.png
    python ../loss_curves.py "with n-grams, 311 steps=ngrams.txt" "with bigrams, 431 steps=no_ngrams.txt" \\
        --line "4-gram=1.469" --line "5-gram=1.350" --out ngrams.png

Reads logs as records/compare.py does. --line draws a constant, like bench/ngram.py's losses. The logs are of
single runs that validated often, by --set val_every=20 and --val-every: it changes no digit of training.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "records"))
import compare


def parse_line(text: str) -> tuple[str, float]:
    label, _, value = text.rpartition("=")
    return label, float(value)


def plot(groups: list[compare.Group], lines: list[tuple[str, float]], path: str) -> None:
    """Writes a PNG of every group's mean loss over its mean time, and of the constant lines."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for group in groups:
        _, times, losses, _ = zip(*compare.mean_curve(group))
        ax.plot(times, losses, linewidth=2, label=f"{group.label}: {losses[-1]:.2f} after {times[-1]:.0f} s")
    for label, loss in lines:
        ax.axhline(loss, color="0.5", linestyle="--", linewidth=1)
        ax.annotate(
            f"{label} {loss:.2f}", (0, loss), (2, 3), textcoords="offset points", color="0.3", fontsize=9
        )
    ax.set(xlabel="training time on two CPU cores, s", ylabel="validation loss, nats per byte token")
    ax.set(ylim=(0.9, 3.0), xlim=(0, None))
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("logs", nargs="+", metavar="LABEL=LOG")
    parser.add_argument("--line", action="append", default=[], type=parse_line, metavar="LABEL=LOSS")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    args = parser.parse_args(argv)
    try:
        groups, errors = compare.read_groups(args.logs, None)
        if not errors:
            plot(groups, args.line, args.out)
    except (compare.UserError, OSError) as error:
        errors = [str(error)]
    if errors:
        sys.exit(f"loss_curves.py: {errors[0]}")


if __name__ == "__main__":
    main()
