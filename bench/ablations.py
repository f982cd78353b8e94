#!/usr/bin/env python3
"""Trains variants of a preset with paired seeds. Prints how their losses differ, and what that is in time.

    python bench/ablations.py my_idea.py --tiny
    python bench/ablations.py my_idea.py "mudd_gates=false" --jobs 2
    python bench/ablations.py "bigrams: ngrams.orders=" \\
        "rate 0.5: ngrams.lr=0.5 ngrams.update_every=2,2" --jobs 2 --set length=0.5 val_slices=48

A variant is NAME=VALUE ..., in quotes, after a LABEL: if it is to have another name. A word that ends in .py
is a script to run in place of train_gpt.py; one that ends in .patch is a file, which `git apply` applies to a
copy of the script. The preset as it is comes first, and is what they are compared with. --set, after the
variants, has settings of all. They are applied before a variant's: with length=0.5 the whole schedule is half
as long, but stages.0.steps=40 of a variant means 40 steps. Every run is one process with one thread, so that
--jobs of them share a machine. All variants run with the first seed, then all with the next. A run of the
`cpu` or `words` preset takes up to two minutes. --tiny first: about ten steps of each variant, in some 20
seconds, show whether it runs. Their losses mean nothing and are not kept.

A difference is the mean over seeds of (variant - baseline), with its standard error: seeds change the initial
weights, and the runs of one seed begin with the same. p is that of the paired t-test. A difference with a p
of 0.05 or more is "not resolved", and decides nothing; one with a lower p is no proof: of 20 variants that
change nothing, one is resolved.

Runs are kept in --out, a JSON line each, and not repeated there with the same script, data, settings, seed,
PyTorch and CPU instructions.

Then come the times, unless --losses-only is given:

    its steps  the time of a variant's whole run, by steps and not by runs, divided by the baseline's. After
               2 steps of warm-up, 12 steps of each stage alternate between the two, in this process with one
               thread. They make 6 pairs of successive steps, since Adam updates after every second, and each
               pair of all stages, times the stages' steps, makes a ratio. Printed is the median of the 6, +-
               the distance of its quartiles / sqrt(6), about its standard error
    less time  until the variant has the loss that the baseline ends with. The baseline also runs with 0.8 of
               its steps. If that costs k nats, a lower loss by d is worth as many steps as the baseline needs
               for it, if its loss falls evenly over the logarithm of the steps: 0.8^(d / k) of them. Times
               the ratio above, this is the time. The 95 % interval is that of Student's t, from the errors of
               d / k, over seeds, and of the ratio. It does not count that the loss falls otherwise. If it
               goes from less to more, it decides nothing. Beyond k it is marked as extrapolated

So the slope k comes from whole runs of two lengths, and not from one run's curve, which falls faster at its
end because the learning rate does. Such an estimate chooses what to try with fewer steps. It proves nothing:
a record needs runs of both scripts side by side.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent import futures
from functools import reduce
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "records")]
import compare

import train_gpt as tg
from scripts import UserError, make_parser, number, run_script, target, tied
from worth import SHORTER, Side, import_copy, in_time, paired, time_ratios

TINY = ["length=0.05", "warmup=false", "val_slices=4", "samples=0"]
BASELINE = "as it is"
SHORT_BASELINE = f"{SHORTER} of the steps"

RUNNING: set[subprocess.Popen] = set()


class Variant(NamedTuple):
    label: str
    settings: list[str]
    files: list[str] = []  # a script, patches


def results_file(text: str) -> Path:
    """Returns the file of results of this name: an argparse type. Another kind of file is refused."""
    path = target(text, rb"\s*(\{|\Z)")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{path} cannot be written to; choose another place")
    return Path(text)


def parse_variant(text: str) -> Variant:
    """Parses "NAME=VALUE ..." or "LABEL: NAME=VALUE ...", in which words may be names of files."""
    label, _, rest = text.rpartition(":")
    files, settings = [], []
    for word in rest.split():
        if word.endswith((".py", ".patch")):
            if not Path(word).is_file():
                raise argparse.ArgumentTypeError(f"there is no {word}")
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
            raise UserError(f"{patch} does not fit {script}: {run.stderr.strip()}")
    if copy.read_bytes() == script.read_bytes():
        raise UserError(f"{', '.join(patches)}: no change of train_gpt.py; a patch must name this file")
    return copy


def start(script: Path, preset: str, settings: list[str], *options: str) -> str:
    """Runs the script; returns what it printed. Raises UserError with its error."""
    command = [sys.executable, str(script), "--preset", preset]
    command += options
    command += [f"--set={setting}" for setting in settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    pipe = subprocess.PIPE
    child = subprocess.Popen(tied(command), env=environment, stdout=pipe, stderr=pipe, encoding="utf-8")
    RUNNING.add(child)
    printed, complaints = child.communicate()
    RUNNING.discard(child)
    if child.returncode:
        errors = re.findall(r"^.*error.*$", complaints, re.M | re.I) or ["no error was printed"]
        places = re.findall(rf'File ".*?({re.escape(script.name)})", line (\d+)', complaints)
        place = " at {} line {}".format(*places[-1]) if places else ""
        raise UserError(f"{' '.join(command)} failed{place}: {errors[-1]}")
    return printed


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
        raise UserError(f"{script} has not printed the path of its log")
    path = os.path.relpath(paths[-1])
    (result,), _ = compare.read_log(path)
    # The last validation's, which val_loss leaves out if a small text was read twice.
    return {"loss": result.curve[-1][1], "log": path}


def last_value(name: str, settings: list[str], default: str) -> str:
    """Returns the value of a setting: the last one counts."""
    for setting in settings:
        if setting.startswith(f"{name}="):
            default = setting[len(name) + 1 :]
    return default


def without_length(settings: list[str]) -> list[str]:
    return [setting for setting in settings if not re.fullmatch(r"length=\S*", setting)]


def data_of(folder: str) -> str:
    """Returns a hash of the shards in a folder, and of their vocabulary, which a loss may need."""
    paths = [*sorted(Path(folder).glob("*.bin")), *Path(folder).glob("vocabulary.txt")]
    return tg.dataset_hash(paths)


def what_losses_are_of(script: Path, preset: str, settings: list[str]) -> dict:
    """Returns the settings on which a loss per token depends besides the model."""
    module = import_copy(script)
    cfg = reduce(module.override, settings, module.PRESETS[preset])
    return {name: getattr(cfg, name) for name in ("data", "vocab_size", "val_slices", "val_slice_tokens")}


def digest_of(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()[:12]


def require_unchanged(script: Path, digest: str) -> None:
    """Raises UserError if a script was edited in the meantime: its runs would be of two scripts."""
    if digest_of(script) != digest:
        raise UserError(f"{script} was edited while it ran; start again, with a copy to edit")


def read_results(path: Path) -> dict[tuple, float]:
    """Returns the losses of the runs in a file, by what makes a run. Raises UserError if a line has none."""
    done = {}
    if path.exists():
        for i, line in enumerate(path.read_bytes().splitlines(), 1):
            fix = "remove this line, or give another --out"
            with tg.user_error_on(
                f"{path}:{i} is no run", fix, ValueError, LookupError, TypeError, RecursionError
            ):
                entry = json.loads(line)
                run = tuple(entry["run"]), entry.get("data"), entry.get("on")
                loss = float(str(entry["loss"]))  # of true, which float() takes for 1, an error
                if done.setdefault(run, loss) != loss:
                    raise ValueError("an earlier line has another loss of the same run")
    return done


def table(losses: dict[str, list[float]]) -> str:
    """Returns a markdown table of means and differences; the first variant is the baseline."""
    labels = list(losses)
    base = labels[0]
    rows = [[base, f"{mean(losses[base]):.4f}", "", "", ""]]
    for label in labels[1:]:
        difference, error, p = paired(losses[label], losses[base])
        cells = [label, f"{mean(losses[label]):.4f}"]
        if len(losses[base]) == 1:
            cells += [f"{difference:+.4f}", "", "one seed: no error"]
        elif math.isnan(error):
            cells += [f"{difference:+.4f}", "", "no error: equal in all pairs"]
        else:
            verdict = "resolved" if p < 0.05 else "not resolved"
            cells += [f"{difference:+.4f} +- {error:.4f}", compare.show_p(p), verdict]
        rows.append(cells)
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
    parser.add_argument("--tiny", action="store_true", help="about ten steps of each: does it run?")
    parser.add_argument("--losses-only", action="store_true", help="no times, no runs of fewer steps")
    run_script(run, parser, argv, tg.UserError)


def run(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("scipy") is None:
        raise UserError("needs scipy, which this Python lacks: pip install -r requirements.txt")
    variants = [Variant(BASELINE, [])]
    timed = not args.tiny and not args.losses_only and has_check(args.script)
    if timed and args.seeds > 1:
        setting = f"length={last_value('length', args.common, '1')}"
        length = tg.override(tg.PRESETS[args.preset], setting).length
        variants.append(Variant(SHORT_BASELINE, [f"length={SHORTER * length:g}"]))
    variants += args.variants
    if len({variant.label for variant in variants}) < len(variants):
        raise UserError("two variants have the same label")
    if args.script.samefile(tg.__file__):  # another script may have other settings
        preset = reduce(tg.override, args.common, tg.PRESETS[args.preset])
        for label, settings, files in args.variants:
            try:
                changed = reduce(tg.override, settings, preset)
            except tg.UserError as error:
                raise UserError(f"{label}: {error} (a setting of a copy needs --script COPY.py)") from None
            if not files and changed == preset:
                raise UserError(f"{label}: it changes nothing, because the preset has these values")
    with tempfile.TemporaryDirectory() as folder:
        scripts = {}
        for i, variant in enumerate(variants):
            scripts[variant.label] = script_of(variant.files, args.script, Path(folder, str(i)))
        if args.tiny:
            args.common = TINY + without_length(args.common)
            variants = [each._replace(settings=without_length(each.settings)) for each in variants]
            args.seeds = 1
            args.out = Path(folder, "tiny.jsonl")
        losses = train_all(args, variants, scripts)
        if args.tiny:
            print("--tiny: they run; what they are worth needs whole runs")
            return
        print(f"\n{table(losses)}\nkept in {args.out}", flush=True)
        if args.seeds == 2:
            print("Two seeds resolve only differences of 13 standard errors, three those of 4.3.")
        share = last_value("length", args.common, "1")
        if float(share) < 1:
            print(f"These runs have {share} of the steps. Much of what helps them is gone in whole runs.")
        if not timed:
            return
        print("timing the steps, which takes minutes", flush=True)
        before = {label: digest_of(script) for label, script in scripts.items()}
        for label, settings, _ in args.variants:
            base = Side(scripts[BASELINE], args.common)
            ratios = time_ratios(args.preset, base, Side(scripts[label], args.common + settings))
            for timed_label in (BASELINE, label):
                require_unchanged(scripts[timed_label], before[timed_label])
            short = losses.get(SHORT_BASELINE, [])
            print(f"{label}: {in_time(losses[label], losses[BASELINE], short, ratios)}", flush=True)


def has_check(script: Path) -> bool:
    """Whether a script has --check. Early records do not, nor a `length`, nor what step_time.py needs."""
    return b'"--check"' in script.read_bytes()


def check_all(args: argparse.Namespace, variants: list[Variant], scripts: dict[str, Path]) -> dict[str, str]:
    """Returns the folder of each variant's data, by label. Raises UserError if variants cannot be compared,
    or if one cannot run.
    """
    folders = {}
    wanted = None
    for label, settings, _ in variants:
        settings = args.common + settings
        if not has_check(args.script):
            folders[label] = last_value("data", settings, tg.PRESETS[args.preset].data)
            continue
        start(scripts[label], args.preset, settings, "--check", "1")
        found = what_losses_are_of(scripts[label], args.preset, settings)
        folders[label] = found["data"]
        wanted = wanted or found  # the baseline's, which is the first
        if found != wanted:
            raise UserError(f"{label}: its losses are of other data or another validation; use --set for all")
    return folders


def train_all(
    args: argparse.Namespace, variants: list[Variant], scripts: dict[str, Path]
) -> dict[str, list[float]]:
    """Trains all variants with all seeds; returns their losses by label."""
    digests = {label: digest_of(script) for label, script in scripts.items()}
    done = read_results(args.out)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    folders = check_all(args, variants, scripts)

    def name_of(seed: int, label: str, settings: list[str]) -> tuple:
        """Returns what makes a run: another PyTorch or CPU rounds in another way."""
        run = digests[label], args.preset, " ".join(settings), seed
        on = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
        if torch.cpu._is_amx_tile_supported():
            on += ", AMX"
        return run, data_of(folders[label]), on

    def train_once(seed: int, label: str, settings: list[str]) -> float:
        settings = args.common + settings
        name = name_of(seed, label, settings)
        if name not in done:
            result = train(scripts[label], args.preset, settings, seed)
            require_unchanged(scripts[label], digests[label])
            row = json.dumps(dict(zip(("run", "data", "on"), name), label=label) | result)
            with open(args.out, "a+") as file:
                file.seek(0)
                before = file.read()
                if before and not before.endswith("\n"):  # an editor may have left no end of line
                    file.write("\n")
                file.write(f"{row}\n")
            done[name] = result["loss"]
        if not math.isfinite(done[name]):
            raise UserError(f"seed {seed}, {label}: the loss is {done[name]}")
        said = "it runs" if args.tiny else f"{done[name]:.4f}  seed {seed}"
        tqdm.write(f"{said}  {label}")
        return done[name]

    kept = 0
    for label, settings, _ in variants:
        kept += sum(name_of(seed, label, args.common + settings) in done for seed in seeds)
    known = f"; {kept} of them are there already" if kept else ""
    print(f"{len(seeds) * len(variants)} runs, {args.jobs} at once{known}", flush=True)
    pool = futures.ThreadPoolExecutor(args.jobs)
    runs = {}
    for seed in seeds:
        for label, settings, _ in variants:
            runs[seed, label] = pool.submit(train_once, seed, label, settings)
    try:
        for finished in tqdm(futures.as_completed(runs.values()), total=len(runs), unit="run"):
            finished.result()
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        left = [run for run in runs.values() if not run.cancelled()]
        while futures.wait(left, timeout=0.1).not_done:  # one of them may only now start its process
            for child in list(RUNNING):
                child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # after an error the other runs are finished, and kept
    losses = {}
    for label, _, _ in variants:
        losses[label] = [runs[seed, label].result() for seed in seeds]
    return losses


if __name__ == "__main__":
    # A shell may have told it to ignore the first.
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    main()
