#!/usr/bin/env python3
"""Checks that a script's losses and times are what its log says: a review of a record, by a machine.

    python records/referee.py [SCRIPT.py] [--preset cpu] [--log LOG]

Prints a row for each rule, and writes the rows to referee.txt: in LOG's folder, or without --log in
records/TRACK/attempts/. Exits with 1 if a rule is broken. A row ends with one of these:

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

import re
from pathlib import Path
from typing import NamedTuple

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
FILE_NAME = "referee.txt"
ROW = re.compile(r" ?(\d+)  (\S.*?)  +((?:ok|broken|not shown)\b.*)")


class Verdict(NamedTuple):
    """Holds what a referee.txt says."""

    script_hash: str  # sha256, 64 hexadecimal digits; "" if the file names none
    preset: str
    log: str  # the log's name; "" if there was none
    results: dict[str, str]  # by rule: "ok", "broken: ..." or "not shown: ..."

    @property
    def passed(self) -> bool:
        """Tells whether every rule is ok."""
        return all(self.results.get(rule, "").split(":")[0] == OK for rule in RULES)


def read_verdict(path: str | Path) -> Verdict:
    """Reads a referee.txt. Needs no torch. Raises OSError if there is none; damaged lines count as absent."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    script = re.search(r"^script: .* sha256 ([0-9a-f]{64})$", text, re.MULTILINE)
    preset = re.search(r"^preset: (\S+)$", text, re.MULTILINE)
    log = re.search(r"^log: (.+)$", text, re.MULTILINE)
    results = {}
    for line in text.splitlines():
        row = ROW.fullmatch(line)
        if row and row[2] in RULES:
            results[row[2]] = row[3]
    return Verdict(script[1] if script else "", preset[1] if preset else "", log[1] if log else "", results)
