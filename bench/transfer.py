#!/usr/bin/env python3
"""Compares published effects of techniques at the real scale with their effects in the small presets.

    python bench/transfer.py    # prints the tables of docs/transfer.md, draws its picture

TECHNIQUES has, for each technique, what was published, and the settings without and with it in both presets.
Its effect is the loss without it minus the loss with it, in thousandths of a nat, at equal steps: positive
means that it helps. docs/transfer.md says how effects are judged. The runs are in
bench/ablations/transfer_TRACK.jsonl. They were made with the script of commit 4a73373, and the settings are
those of that script. The patches fit that of commit 1cdcaab, whose `bench/transfer.py --run` makes the runs
again.
"""

import argparse
import json
import typing
from collections import defaultdict
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import ablations
from ablations import compare
from scripts import make_parser, new_figure, run_script, save_figure

HERE = Path(__file__).resolve().parent
TRACKS = "cpu", "words"
# Runs without this setting, the first ones, had the MLPs' products in bf16 where the CPU has AMX.
FP32 = "bf16_mlp=false"
# The label that runs of another form of the same settings have.
RENAMED = {"softcap.patch": "softcap.scale=30 softcap.shift=0", "as it is": ""}
MIN_PAIRS = 5  # with fewer an effect is not resolved
RESOLVED = 2.0  # standard errors

Group = Literal["optimizer", "architecture", "data and schedule", "vocabulary"]
Pair = tuple[str, str]  # the settings without and with a technique; "": the preset at first
# Losses by settings, and by what both sides of a pair must share: the seed, and the MLPs' products in fp32.
Losses = dict[str, dict[tuple[int, bool], float]]


class Technique(NamedTuple):
    name: str
    group: Group
    # A number: the technique lowers the loss by so many thousandths of a nat at equal steps. Text: what it
    # saved, often together with other changes; then only that it helps counts.
    published: float | str
    source: str  # a folder or pull request of the public speedrun
    both: Pair | None = None  # where the settings are the same in both tracks
    cpu: Pair | None = None
    words: Pair | None = None

    def pair(self, track: str) -> Pair | None:
        return self.both or getattr(self, track)


PLAIN_PAIRS = "layers.0.attention=plain layers.2.attention=plain layers.5.attention=plain"
ONE_WEIGHT = "stages.*.mtp=1"
LATER_TARGETS = "stages.0.mtp=1,0.5,0.25 stages.1.mtp=1,0.5"
WIDE = (
    "layers.*.narrow_qk=false layers.*.narrow_v=false layers.4.attention=plain layers.7.attention=plain "
    "layers.9.attention=paired"
)
OLD_OPTIMIZER = "polar_express.patch rails_step=100000 endings.*.window=0 params.value_embeds.every=2,2"
ONE_RATE = "stages.0.lr_mul={0} stages.1.lr_mul={0} stages.2.lr_mul={0}"
GROWING = "stages.0.batch_tokens=1024 stages.2.batch_tokens=3072 stages.3.batch_tokens=2304"
ANVIL2 = "2026-08-30_ANVIL2"

# fmt: off
TECHNIQUES = (
    # published as an effect at equal steps
    Technique("n-gram table, in place of a small table of bigrams", "vocabulary", 35.8, ANVIL2,
              ("ngrams.orders=", "")),
    Technique("four times as many n-gram rows", "vocabulary", 5.3, ANVIL2,
              ("ngrams.rows_per_order=16384", "")),
    Technique("averages at the end", "optimizer", 20.2, ANVIL2, ("endings.*.window=0", "")),
    Technique("the whole optimizer, against record 89's", "optimizer", 21.1, ANVIL2,
              (OLD_OPTIMIZER, "")),
    Technique("ANVIL's rule", "optimizer", 4.9, ANVIL2,
              ("polar_express.patch rails_step=100000", "")),
    Technique("mix of all streams by groups of channels, against five streams", "architecture", 6.1, ANVIL2,
              ("mix.patch mix_groups=1", "")),
    Technique("sampled softmax", "vocabulary", -2.4, ANVIL2, words=("stages.*.candidates=", "")),
    Technique("narrow heads, and attention in three layers fewer", "architecture", -6.9, ANVIL2,
              (WIDE, "")),
    Technique("connections by small MLPs", "architecture", 8.4, "2026-04-22_MuddFormer",
              ("mudd_connections=false", "")),
    Technique("gates by small MLPs", "architecture", 3.0, "2026-05-27",
              ("mudd_gates=false", "")),
    Technique("XSA", "architecture", 4.6, "2026-05-07",
              cpu=("", "layers.1.xsa=true layers.3.xsa=true"), words=("layers.*.xsa=false", "")),
    Technique("gates of value embeddings", "architecture", 4.0, "2025-12-29",
              ("value_gates.patch", "")),
    Technique("tokens normalized before hashing", "vocabulary", 2.0, "PR 375",
              words=("", "normalized_tokens.patch")),
    Technique("copy pointer", "architecture", 35.0, "PR 379",
              cpu=("", "pointer_dim=32"), words=("pointer_dim=0", "")),
    Technique("scale of the stream 1.1 at first", "architecture", 1.0, "2025-11-18",
              ("params.resid_lambdas.init=1", "")),
    # published as steps saved, with other changes
    Technique("table of hashed bigrams", "vocabulary", "165 steps", "2026-01-19",
              ("ngrams.orders= params.bigram_embed.lr_mul=0", "ngrams.orders=")),
    Technique("later targets", "data and schedule", "80 steps", "2025-12-22",
              cpu=(ONE_WEIGHT, ""), words=("", LATER_TARGETS)),
    Technique("paired heads", "architecture", "65 steps", "2026-01-07", (PLAIN_PAIRS, "")),
    Technique("growing batches", "data and schedule", "65 steps", "2025-11-29",
              cpu=("stages.*.batch_tokens=3464 " + ONE_RATE.format("1.5"), ""),
              words=(ONE_RATE.format("1.41"), GROWING)),
    Technique("head tied to the embedding at first", "vocabulary", "55 steps", "2025-12-19",
              ("tied_head.patch", "")),
    Technique("attention's output gates", "architecture", "55 steps", "PR 117",
              ("layers.*.gate=false", "")),
    Technique("key shift", "architecture", "50 steps", "2025-12-14",
              ("layers.*.key_shift=false", "")),
    Technique("asymmetric softcap", "vocabulary", "40 steps", "2025-12-26",
              ("softcap.scale=30 softcap.shift=0", "")),
    Technique("cautious decay of matrices", "optimizer", "40 steps", "2025-11-10",
              ("matrix_decay.patch", "")),
    Technique("cautious decay of Adam's parameters", "optimizer", "20 steps", "2025-12-18",
              ("adam_decay.patch", "")),
    Technique("skip from an early layer", "architecture", "20 steps", "2025-11-18",
              ("skip.patch", "")),
    Technique("prefix targets", "vocabulary", "15 steps", "PR 337",
              words=("", "stages.0.prefix=.25 stages.1.prefix=.20,.15,.10,.05")),
    Technique("Polar Express, against Newton-Schulz", "optimizer", "10 steps", "2025-09-29",
              ("newton_schulz.patch", "polar_express.patch")),
    Technique("smear", "architecture", "5 steps", "2025-09-18", ("smear.patch", "")),
    Technique("value embeddings", "architecture", "7 % of the time", "2024-12-04",
              ("layers.10.connections=false layers.*.value=false", "layers.10.connections=false")),
)
# fmt: on


class Effect(NamedTuple):
    mean: float  # of a technique, in thousandths of a nat
    error: float  # its standard error
    pairs: int

    @property
    def resolved(self) -> bool:
        return self.pairs >= MIN_PAIRS and abs(self.mean) > RESOLVED * self.error

    def __str__(self) -> str:
        text = f"{self.mean:+.1f} ± {self.error:.1f}"
        return text if self.resolved else f"{text} ?"


def runs_of(track: str) -> Path:
    return HERE / "ablations" / f"transfer_{track}.jsonl"


def read_losses(track: str) -> Losses:
    """Returns the losses of a track's runs."""
    losses: Losses = defaultdict(dict)
    path = runs_of(track)
    fix = "take the committed file again"
    with ablations.tg.user_error_on(
        f"{path} has a line that is no run", fix, ValueError, LookupError, TypeError
    ):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            settings, seed = entry["run"][-2:]
            label = RENAMED.get(entry["label"], entry["label"])
            losses[label][seed, FP32 in settings] = entry["loss"]
    return losses


def effect(pair: Pair | None, losses: Losses) -> Effect | None:
    """Returns a technique's effect in a track, from the runs that both sides have; None: not two."""
    if pair is None:
        return None
    without = losses.get(pair[0], {})
    with_it = losses.get(pair[1], {})
    losses_by_seed = {}  # one pair a seed: fp32, which is last, if both sides have that, too
    for run in sorted(without.keys() & with_it.keys()):
        losses_by_seed[run[0]] = (without[run], with_it[run])
    if len(losses_by_seed) < 2:
        return None
    losses_without, losses_with = zip(*losses_by_seed.values())
    mean, error, _ = ablations.paired(losses_without, losses_with)
    return Effect(1000 * mean, 1000 * error, len(losses_by_seed))


def all_effects() -> dict[str, dict[Technique, Effect]]:
    """Returns the effects in each track, as far as its file of runs has them."""
    effects = {}
    for track in TRACKS:
        if not runs_of(track).exists():
            continue
        losses = read_losses(track)
        effects[track] = {}
        for technique in TECHNIQUES:
            found = effect(technique.pair(track), losses)
            if found:
                effects[track][technique] = found
    return effects


def is_resolved(published: float | str) -> bool:
    """True if the sign of what was published counts."""
    return isinstance(published, str) or abs(published) >= 2


def agreement(found: dict[Technique, Effect]) -> tuple[int, int]:
    """Returns how many signs agree of the techniques that are resolved on both sides, and their number."""
    agree = 0
    count = 0
    for technique, effect in found.items():
        if is_resolved(technique.published) and effect.resolved:
            helped = isinstance(technique.published, str) or technique.published > 0
            agree += helped == (effect.mean > 0)
            count += 1
    return agree, count


def rank_correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns Spearman's correlation over the last axis; NaN where all of x or all of y are equal."""
    from scipy.stats import rankdata

    mean = (x.shape[-1] + 1) / 2
    x = rankdata(x, axis=-1) - mean
    y = rankdata(y, axis=-1) - mean
    with np.errstate(invalid="ignore"):
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def summary(track: str, found: dict[Technique, Effect]) -> list[str]:
    """Returns a track's figures: signs that agree with p, rank correlation, slope, signs by group."""
    from scipy.stats import binomtest, theilslopes

    agree, count = agreement(found)
    lines = [f"{track}: {agree} of {count} signs agree"]
    if count:
        lines[0] += f", p {binomtest(agree, count).pvalue:.2g}"
    numbers = [(t.published, e.mean) for t, e in found.items() if not isinstance(t.published, str)]
    if len(numbers) > 2:
        published, ours = np.array(numbers, float).T
        draws = np.random.default_rng(0).integers(len(ours), size=(10_000, len(ours)))
        low, high = np.nanquantile(rank_correlation(published[draws], ours[draws]), (0.025, 0.975))
        rank, slope = rank_correlation(published, ours), theilslopes(ours, published)
        lines += [
            f"Spearman's rank correlation over {len(ours)} techniques: {rank:.2f} ({low:.2f} to {high:.2f})",
            f"slope: {slope.slope:.2f} ({slope.low_slope:.2f} to {slope.high_slope:.2f})",
        ]
    for group in typing.get_args(Group):
        part = {technique: effect for technique, effect in found.items() if technique.group == group}
        agree, count = agreement(part)
        lines.append(f"{group}: {agree} of {count} signs agree, of {len(part)} techniques")
    return lines


def report(effects: dict[str, dict[Technique, Effect]]) -> str:
    """Returns the tables of docs/transfer.md."""
    rows = []
    for technique in TECHNIQUES:
        claim = technique.published
        if not isinstance(claim, str):
            claim = f"{claim:+.1f}"
        if not is_resolved(technique.published):
            claim += " ?"
        ours = [str(found.get(technique, "")) for found in effects.values()]
        rows.append([technique.name, technique.group, claim] + ours + [technique.source])
    head = ["technique", "group", "published"] + list(effects) + ["source"]
    lines = compare.markdown_table(head, rows)
    for track, found in effects.items():
        lines += [f"    {line}" for line in summary(track, found)]
        lines.append("")
    return "\n".join(lines).rstrip()


def draw(effects: dict[str, dict[Technique, Effect]], path: Path) -> None:
    """Draws published effects against ours, a point each with its standard error."""
    figure = new_figure(13, 5 * len(effects))
    groups = typing.get_args(Group)
    numbered = sorted((t.published, t) for t in TECHNIQUES if not isinstance(t.published, str))
    values = [published for published, _ in numbered]
    for ax, (track, found) in zip(figure.subplots(len(effects), squeeze=False)[:, 0], effects.items()):
        for number, (published, technique) in enumerate(numbered, 1):
            if technique in found:
                effect = found[technique]
                label = f"{number}  {technique.name.split(',')[0]} ({technique.group})"
                color = f"C{groups.index(technique.group)}"
                face = color if effect.resolved else "white"
                ax.errorbar(published, effect.mean, effect.error, fmt="o", capsize=3, color=color,
                            markerfacecolor=face, label=label)  # fmt: skip
                # Above the bar, on the side away from the nearer neighbour, so that numbers do not overlap.
                before, after = values[number - 2], values[number % len(values)]
                side = "right" if abs(after - published) < abs(published - before) else "left"
                ax.annotate(str(number), (published, effect.mean + effect.error), ha=side, va="bottom")
        # Both scales are linear near 0, and logarithmic beyond.
        ax.set_xscale("symlog", linthresh=5)
        ax.set_yscale("symlog", linthresh=5)
        ax.set_xticks([-10, -5, 0, 5, 10, 20, 40], [-10, -5, 0, 5, 10, 20, 40])
        ax.set_yticks([-20, -10, -5, 0, 5, 10, 20, 50, 100, 300], [-20, -10, -5, 0, 5, 10, 20, 50, 100, 300])
        ax.minorticks_off()
        ax.margins(0.1, 0.15)
        ax.axhline(0, color="0.6", linewidth=1)
        ax.axvline(0, color="0.6", linewidth=1)
        ax.set(title=f"the {track} preset", xlabel="published effect, thousandths of a nat")
        ax.set_ylabel("effect here, thousandths of a nat; bars: standard error")
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path, dpi=120)


def run(args: argparse.Namespace) -> None:
    effects = all_effects()
    print(report(effects))
    if effects:
        draw(effects, HERE.parent / "docs" / "transfer.png")


def main(argv: list[str] | None = None) -> None:
    run_script(run, make_parser("transfer.py", __doc__), argv)


if __name__ == "__main__":
    main()
