#!/usr/bin/env python3
"""Trains variants of a preset with paired seeds, and prints how their losses differ from the preset's.

    python bench/ablations.py "mudd_gates=false" --jobs 2
    python bench/ablations.py "bigrams: ngrams.orders=" \\
        "rate 0.5: ngrams.lr=0.5 ngrams.update_every=2,2" --jobs 2 --set length=0.5 val_slices=48

A variant is NAME=VALUE ..., in quotes, after a LABEL: if it is to have another name. A word that ends in .py
is a script to run in place of train_gpt.py; one that ends in .patch is a file, which `git apply` applies to a
copy of the script. The preset as it is comes first, and is what they are compared with. --set, after the
variants, has settings of all. They are applied before a variant's: with length=0.5 the whole schedule is half
as long, but stages.0.steps=40 of a variant means 40 steps. Every run is one process with one thread, so that
--jobs of them share a machine, and so its time is no measurement. All variants run with the first seed, then
all with the next. A run of the `cpu` or `words` preset takes up to two minutes.

A difference is the mean over seeds of (variant - baseline), with its standard error: seeds change the initial
weights, and the runs of one seed begin with the same. p is that of the paired t-test. A difference below two
standard errors is "not resolved", and decides nothing; one above is no proof: of three seeds, 18 % of
differences that are only noise pass two.

Runs are kept in --out, a JSON line each, and not repeated there with the same script, data, settings and
seed.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "records")]
import compare

import train_gpt as tg
from scripts import make_parser, number, target


class Variant(NamedTuple):
    label: str
    settings: list[str]
    files: list[str] = []  # a script, patches


def results_file(text: str) -> Path:
    """Returns the file of results of this name: an argparse type. Another kind of file is refused."""
    target(text, rb"\s*(\{|\Z)")
    return Path(text)


def parse_variant(text: str) -> Variant:
    """Parses "NAME=VALUE ..." or "LABEL: NAME=VALUE ...", in which words may be names of files."""
    label, _, rest = text.rpartition(":")
    files, settings = [], []
    for word in rest.split():
        if word.endswith((".py", ".patch")):
            files.append(word)
        else:
            settings.append(word)
    if not rest.strip() or not all("=" in setting for setting in settings):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE ... or LABEL: NAME=VALUE ...")
    if sum(file.endswith(".py") for file in files) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} names two scripts; give one")
    return Variant(label.strip() or rest.strip(), settings, files)


def script_of(files: list[str], script: Path, folder: Path) -> Path:
    """Returns the files' script, or else `script`; with patches a copy in `folder`. Raises UserError if one
    does not fit.
    """
    patches = []
    for file in files:
        if file.endswith(".patch"):
            patches.append(file)
        else:
            script = Path(file)
    script = script.resolve()
    if not patches:
        return script
    folder.mkdir()
    copy = folder / "train_gpt.py"  # the name that the patches give it
    copy.write_bytes(script.read_bytes())
    for patch in patches:
        command = ["git", "apply", str(Path(patch).resolve())]
        # Within a repository git would look for the file at the repository's top.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise compare.UserError(f"{patch} does not fit {script}: {run.stderr.strip()}")
    return copy


def start(script: Path, preset: str, settings: list[str], *options: str) -> str:
    """Runs the script; returns what it printed. Raises UserError with its error."""
    command = [sys.executable, str(script), "--preset", preset]
    command += options
    command += [f"--set={setting}" for setting in settings]
    run = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if run.returncode:
        errors = re.findall(r"^.*error.*$", run.stderr, re.M | re.I) or ["no error was printed"]
        raise compare.UserError(f"{' '.join(command)} failed: {errors[-1]}")
    return run.stdout


def train(script: Path, preset: str, settings: list[str], seed: int) -> dict:
    """Trains once; returns the loss and the log's path."""
    printed = start(script, preset, settings, "--seed", str(seed))
    logs = re.findall(r"^log:? +(.+\.txt)$", printed, re.M)
    # Relative to the script's folder; that of older scripts to this one.
    paths = []
    for log in logs:
        for path in (script.parent / log, Path(log)):
            if path.exists():
                paths.append(path)
    if not paths:
        raise compare.UserError(f"{script} has not printed the path of its log")
    path = os.path.relpath(paths[-1])
    (result,), _ = compare.read_log(path)
    # The last validation's, which val_loss leaves out if a small text was read twice.
    return {"loss": result.curve[-1][1], "log": path}


def data_of(preset: str, settings: list[str]) -> str:
    """Returns a hash of the shards that a run reads."""
    named = [setting[5:] for setting in settings if setting.startswith("data=")]
    folder = Path([tg.PRESETS[preset].data, *named][-1])  # the last counts
    return tg.dataset_hash(sorted(folder.glob("*.bin")))


def read_results(path: Path) -> dict[tuple, float]:
    """Returns the losses of the runs in a file, by what makes a run. Raises UserError if a line has none."""
    done = {}
    if path.exists():
        for i, line in enumerate(path.read_bytes().splitlines(), 1):
            fix = "remove this line, or give another --out"
            with tg.user_error_on(f"{path}:{i} is no run", fix, ValueError, LookupError, TypeError):
                entry = json.loads(line)
                done[tuple(entry["run"]), entry.get("data")] = float(entry["loss"])
    return done


def paired(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean of losses - base, pair by pair, its standard error, and p; nan: undefined."""
    from scipy.stats import ttest_rel

    differences = [a - b for a, b in zip(losses, base, strict=True)]
    if len(set(differences)) == 1:  # one pair, or pairs without spread
        return differences[0], math.nan, math.nan
    error = stdev(differences) / math.sqrt(len(differences))
    return mean(differences), error, float(ttest_rel(losses, base).pvalue)


def table(losses: dict[str, list[float]]) -> str:
    """Returns a markdown table of means and differences; the first variant is the baseline."""
    labels = list(losses)
    base = labels[0]
    rows = [[base, f"{mean(losses[base]):.4f}", "", "", ""]]
    for label in labels[1:]:
        difference, error, p = paired(losses[label], losses[base])
        verdict = "resolved" if abs(difference) >= 2 * error else "not resolved"
        loss = f"{mean(losses[label]):.4f}"
        rows.append([label, loss, f"{difference:+.4f} +- {error:.4f}", f"{p:.3f}", verdict])
    return "\n".join(compare.markdown_table(["variant", "loss", "difference", "p", ""], rows))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("ablations.py", __doc__)
    parser.add_argument("variants", nargs="+", type=parse_variant, metavar="[LABEL:] NAME=VALUE ...")
    parser.add_argument("--script", type=Path, default=REPOSITORY / "train_gpt.py")
    parser.add_argument("--preset", default="cpu", choices=tg.PRESETS)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="common")
    parser.add_argument("--seeds", type=number(int, 1), default=3, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    parser.add_argument("--jobs", type=number(int, 1), default=1, metavar="N", help="runs at once")
    parser.add_argument("--out", type=results_file, default="ablations.jsonl")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("scipy") is None:
        parser.error("needs scipy, which this Python lacks: pip install -r requirements.txt")
    variants = [Variant("as it is", [])] + args.variants
    if len({variant.label for variant in variants}) < len(variants):
        parser.error("two variants have the same label")
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{table(train_all(args, variants, Path(folder)))}")
    except (compare.UserError, tg.UserError, OSError) as error:
        sys.exit(f"ablations.py: {error}")


def train_all(args: argparse.Namespace, variants: list[Variant], folder: Path) -> dict[str, list[float]]:
    """Trains all variants with all seeds; returns their losses by label. Patched scripts go to `folder`."""
    done = read_results(args.out)
    scripts = {}
    for i, variant in enumerate(variants):
        scripts[variant.label] = script_of(variant.files, args.script, folder / str(i))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for label, settings, _ in variants:
        if b'"--check"' in args.script.read_bytes():  # early records have no such option
            start(scripts[label], args.preset, args.common + settings, "--check", "1")  # before any run

    def run(seed: int, label: str, settings: list[str]) -> float:
        settings = args.common + settings
        digest = hashlib.sha256(scripts[label].read_bytes()).hexdigest()[:12]
        name = (digest, args.preset, " ".join(settings), seed), data_of(args.preset, settings)
        if name not in done:
            result = train(scripts[label], args.preset, settings, seed)
            row = json.dumps({"run": name[0], "data": name[1], "label": label} | result)
            with open(args.out, "a+") as file:
                file.seek(0)
                before = file.read()
                if before and not before.endswith("\n"):  # an editor may have left no end of line
                    file.write("\n")
                file.write(f"{row}\n")
            done[name] = result["loss"]
        if not math.isfinite(done[name]):
            raise compare.UserError(f"seed {seed}, {label}: the loss is {done[name]}")
        tqdm.write(f"{done[name]:.4f}  seed {seed}  {label}")
        return done[name]

    print(f"{len(seeds) * len(variants)} runs, {args.jobs} at once", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {}
        for seed in seeds:
            for label, settings, _ in variants:
                futures[seed, label] = pool.submit(run, seed, label, settings)
        try:
            for future in tqdm(as_completed(futures.values()), total=len(futures), unit="run"):
                future.result()
        except BaseException:  # an interrupt, too, ends the runs that wait
            pool.shutdown(cancel_futures=True)
            raise
    losses = {}
    for label, _, _ in variants:
        losses[label] = [futures[seed, label].result() for seed in seeds]
    return losses


if __name__ == "__main__":
    main()
