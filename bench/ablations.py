#!/usr/bin/env python3
"""Trains variants of a preset with paired seeds, and prints how their losses differ from the preset's.

    python bench/ablations.py --jobs 2 "mudd_gates=false"
    python bench/ablations.py --jobs 2 --common "stages.*.steps=40 val_slices=48" \\
        "bigrams: ngrams.orders=" "rate 0.5: ngrams.lr=0.5 ngrams.every=2"

A variant is NAME=VALUE ..., settings as for --set, after a LABEL: if it is to have another name. The preset
as it is comes first, and is what they are compared with. Every run is one process with one thread, so that
--jobs of them share a machine, and so its time is no measurement. All variants run with the first seed, then
all with the next. A run of the `cpu` preset takes two minutes, one of `words` four.

A difference is the mean over seeds of (variant - baseline), with its standard error: seeds change the initial
weights, and the runs of one seed begin with the same. p is that of the paired t-test. A difference below two
standard errors is "not resolved", and decides nothing; one above is no proof: of three seeds, 18 % of
differences that are only noise pass two.

Runs are kept in --out, a JSON line each, and not repeated there with the same script, settings and seed.
Begin another file after a change of the data.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "records"))
import compare


def parse_variant(text: str) -> tuple[str, list[str]]:
    """Returns (label, settings) of "NAME=VALUE ..." or "LABEL: NAME=VALUE ..."."""
    label, _, settings = text.rpartition(":")
    if not text.strip() or not all("=" in setting for setting in settings.split()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE ... or LABEL: NAME=VALUE ...")
    return label.strip() or settings, settings.split()


def start(script: Path, preset: str, settings: list[str], *options: str) -> str:
    """Runs the script; returns what it printed. Raises UserError with its error."""
    command = [sys.executable, str(script), "--preset", preset, *options, *(f"--set={s}" for s in settings)]
    run = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if run.returncode:
        errors = re.findall(r"^.*error.*$", run.stderr, re.M | re.I) or ["no error was printed"]
        raise compare.UserError(f"{' '.join(command)} failed: {errors[-1]}")
    return run.stdout


def train(script: Path, preset: str, settings: list[str], seed: int) -> dict:
    """Trains once; returns the loss and the log's path."""
    (log,) = re.findall(r"^log:? +(.+\.txt)$", start(script, preset, settings, "--seed", str(seed)), re.M)
    path = Path(log).resolve()
    (result,), _ = compare.read_log(str(path))
    return {"loss": result.val_loss, "log": str(path)}


def paired(losses: list[float], base: list[float]) -> tuple[float, float, float]:
    """Returns the mean of losses - base, pair by pair, its standard error, and p; nan: undefined."""
    from scipy.stats import ttest_rel

    differences = [a - b for a, b in zip(losses, base, strict=True)]
    mean, n = sum(differences) / len(differences), len(differences)
    if n < 2 or not math.isfinite(mean) or len(set(differences)) == 1:
        return mean, math.nan, math.nan
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    return mean, error, float(ttest_rel(losses, base).pvalue)


def table(losses: dict[str, list[float]]) -> str:
    """Returns a markdown table of means and differences; the first variant is the baseline."""
    base, *others = losses
    rows = [[base, f"{sum(losses[base]) / len(losses[base]):.4f}", "", "", ""]]
    for label in others:
        difference, error, p = paired(losses[label], losses[base])
        verdict = "resolved" if abs(difference) >= 2 * error else "not resolved"
        mean = sum(losses[label]) / len(losses[label])
        rows.append([label, f"{mean:.4f}", f"{difference:+.4f} +- {error:.4f}", f"{p:.3f}", verdict])
    return "\n".join(compare.markdown_table(["variant", "loss", "difference", "p", ""], rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("variants", nargs="+", type=parse_variant, metavar="[LABEL:] NAME=VALUE ...")
    parser.add_argument("--script", type=Path, default=REPOSITORY / "train_gpt.py")
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--common", default="", metavar="NAME=VALUE ...", help="settings of all variants")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once")
    parser.add_argument("--out", type=Path, default=Path("ablations.jsonl"))
    args = parser.parse_args(argv)
    variants = [("as it is", []), *args.variants]
    if len(dict(variants)) < len(variants):
        parser.error("two variants have the same label")

    script = hashlib.sha256(args.script.read_bytes()).hexdigest()[:12]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {tuple(entry["run"]): entry["loss"] for entry in map(json.loads, lines)}

    def run(seed: int, label: str, settings: list[str]) -> float:
        settings = args.common.split() + settings
        name = script, args.preset, " ".join(settings), seed
        if name not in done:
            result = train(args.script.resolve(), args.preset, settings, seed)
            with open(args.out, "a") as file:
                file.write(json.dumps({"run": name, "label": label} | result) + "\n")
            done[name] = result["loss"]
        tqdm.write(f"{done[name]:.4f}  seed {seed}  {label}")
        return done[name]

    try:
        for _, settings in variants:  # a misspelled one ends the program before any run
            start(args.script.resolve(), args.preset, args.common.split() + settings, "--check", "1")
    except compare.UserError as error:
        sys.exit(f"ablations.py: {error}")
    print(f"{len(seeds) * len(variants)} runs, {args.jobs} at once", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {(s, label): pool.submit(run, s, label, sets) for s in seeds for label, sets in variants}
        try:
            for future in tqdm(as_completed(futures.values()), total=len(futures), unit="run"):
                future.result()
        except BaseException as error:  # an interrupt, too, ends the runs that wait
            pool.shutdown(cancel_futures=True)
            if isinstance(error, compare.UserError):
                sys.exit(f"ablations.py: {error}")
            raise
    losses = {label: [futures[s, label].result() for s in seeds] for label, _ in variants}
    print(f"\n{table(losses)}")


if __name__ == "__main__":
    main()
