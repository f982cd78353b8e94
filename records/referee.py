#!/usr/bin/env python3
"""Checks that a script's losses and times are what its log says: a review of a record, by a machine.

    python records/referee.py [SCRIPT.py] [--preset cpu] [--log LOG]

Prints a row for each rule, and writes all to referee.txt: in LOG's folder, or without --log in
records/TRACK/attempts/. Exits with 1 unless all are ok, but for what a --log is needed for. A row ends with
one of these:

    ok                          what was seen follows the rule
    broken: WHAT AND WHERE      it does not
    not shown: WHY              the script lacks what the rule is shown with, or the rule needs a --log

referee.txt is text. Its first lines name what was checked, and a line for each rule follows:

    script: train_gpt.py sha256 HASH        all 64 digits, of the script's file
    preset: cpu
    log: seed0_0123456789ab.txt             only with --log

     1  causal                       ok
     2  a probability                broken: the probabilities ... sum to 1.02
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import tracks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "data"))
from scripts import UserError, make_parser, replacing, run_script, target

ROOT = Path(__file__).resolve().parent.parent

RULES = (
    "causal",
    "a probability",
    "targets are only looked up",
    "validation is not trained on",
    "the whole validation",
    "the track's constants",
    "each token once",
    "warm-up is undone",
    "the clock",
    "reproducible",
    "the log's script",
)
OK = "ok"
PRESETS = ["cpu", "words"]  # the others need GPUs
FILE_NAME = "referee.txt"


class Verdict(NamedTuple):
    """Holds what a referee.txt says."""

    script_hash: str  # sha256, 64 hexadecimal digits
    preset: str
    results: dict[str, str]  # by rule: "ok", "broken: ..." or "not shown: ..."

    @property
    def passed(self) -> bool:
        """Tells whether every rule is ok."""
        return all(self.results.get(rule, "").split(":")[0] == OK for rule in RULES)


def read_verdict(path: str | Path) -> Verdict:
    """Reads a referee.txt. Needs no torch. Raises OSError if there is none; what is damaged counts as ""."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    script = re.search(r"^script: .* sha256 ([0-9a-f]{64})$", text, re.MULTILINE)
    preset = re.search(r"^preset: (\S+)$", text, re.MULTILINE)
    results = dict(re.findall(r"^[ \d]\d  (\S.*?)  +(\S.*)$", text, re.MULTILINE))
    return Verdict(script[1] if script else "", preset[1] if preset else "", results)


def row(rule: str, result: str) -> str:
    return f"{RULES.index(rule) + 1:2}  {rule:30}{result}"


def table(results: dict[str, str]) -> str:
    return "".join(row(rule, results[rule]) + "\n" for rule in RULES)


def run(args: argparse.Namespace) -> None:
    """Prints each row when it is known, and writes all. Exits with 1 unless all are ok, or need a log."""
    # On a CPU, by one thread, the same steps give the same bits.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    import rules

    data = ROOT / tracks.TRACKS[args.preset]["data"]
    if not data.is_dir():
        raise UserError(f"{data} is not there; ./run.sh --preset {args.preset} makes it")
    head = f"script: {args.script.name} sha256 {hashlib.sha256(args.script.read_bytes()).hexdigest()}\n"
    head += f"preset: {args.preset}\n"
    folder = ROOT / "records" / args.preset / "attempts"
    if args.log is not None:
        if not args.log.is_file():
            raise UserError(f"--log: there is no {args.log}")
        head += f"log: {args.log.name}\n"
        folder = args.log.parent
    folder.mkdir(parents=True, exist_ok=True)
    target(folder / FILE_NAME, b"script: ")
    with tempfile.TemporaryDirectory() as runs:
        case = rules.Case(args.script, args.preset, Path(runs), data, args.log)
        print(f"referee.py: makes short runs of {args.script.name}, which takes minutes", flush=True)
        results = rules.judge(case)
    with replacing(folder / FILE_NAME, b"script: ") as new:
        new.write_text(head + "\n" + table(results), encoding="utf-8")
    print(f"wrote {folder / FILE_NAME}")
    sys.exit(not all(result.startswith(OK) or "by --log" in result for result in results.values()))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("referee.py", __doc__)
    add = parser.add_argument
    add("script", nargs="?", type=Path, default=ROOT / "train_gpt.py", metavar="SCRIPT.py")
    add("--preset", choices=PRESETS, default="cpu", help="default: %(default)s")
    add("--log", type=Path, help="of a run of the script")
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
