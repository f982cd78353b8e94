"""What bench/gpu/check.py has measured on a GPU, and what further work may save: for projection.py."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import train_gpt as tg

RENAMED = {"both_layouts": "cast_and_transpose", "attention": "varlen"}  # as projection.py has them
# Of a row's FLOPs those that projection.py counts: the kernel computes the scores twice, and their gradient.
COUNTED = {"pointer_grad": 0.5}


class Measurements:
    """What rows say. Of several rows of the same the last counts.

    copies: bytes/s, read and written. steps: by stage, what a step as one rank of 8 took alone: "device" and
    "host", in ms. points: pairs of work and rate by shape, of operations and of kinds of products; work is
    FLOPs, or bytes of what has none.
    """

    def __init__(self, paths: Iterable[Path]):
        self.copies = 0.0
        self.steps: dict[int, dict[str, float]] = {}
        self.points: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
        for path in paths:
            errors = ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError
            with tg.user_error_on(f"{path} has no rows", "give a rows.jsonl of check.py", *errors):
                for text in path.read_text().splitlines():
                    self.add(json.loads(text))

    def add(self, row: dict) -> None:
        what = row.get("what", "")
        numbers = row.get("numbers", {})
        step = re.fullmatch(r"stage (\d), (one rank of 8|plain)", what)
        rate = re.search(r"([\d.]+) (TFLOP|GB)/s", row.get("seen", ""))
        if step and "device" in numbers:
            self.steps[int(step[1])] = numbers
        elif "kind" in numbers:  # a product, or attention, alone
            seconds = numbers["ms"] / 1e3
            self.points[numbers["kind"]][what] = numbers["flops"], numbers["flops"] / seconds
        elif not rate:
            return
        elif what == "copies":
            self.copies = float(rate[1]) * 1e9
        elif row.get("ms") and "bfloat16" not in what:  # the record's logits are FP8
            name = RENAMED.get(row["operation"], row["operation"])
            per_second = float(rate[1]) * {"TFLOP": 1e12, "GB": 1e9}[rate[2]] * COUNTED.get(name, 1)
            self.points[name][what] = per_second * row["ms"][0] / 1e3, per_second

    def ms(self, name: str, work: float) -> float:
        """Returns the ms of an operation by the rate that was measured of as much work; 0 if none was."""
        if name not in self.points:
            return 0.0
        works, rates = zip(*sorted(self.points[name].values()))
        return 1e3 * work / float(np.interp(work, works, rates))

    def source(self, name: str, assumed: float) -> str:
        """Says where the rate of an operation or kind comes from: it was measured, or else is `assumed`."""
        points = self.points.get(name)
        if points:
            rates = [rate / 1e12 for _, rate in points.values()]
            return f"{name:<28}{min(rates):>10.3g} to {max(rates):.3g}, measured"
        kind = "measured" if name == "memory" else "assumed"
        return f"{name:<28}{assumed / 1e12:>10.3g}, {kind}"


Saving = Callable[[Any, float], float]  # an operation, an Op of projection.py, and its ms: to fewer ms


def faster(name: str, rate: float) -> Saving:
    """Makes what brings an operation to a rate: of FLOPs, or bytes of what has none, per second."""

    def saving(op: Any, ms: float) -> float:
        if op.name == name:
            return min(ms, 1e3 * (op.flops or op.nbytes) / rate)
        return ms

    return saving


def shorter(names: Container[str], share: float) -> Saving:
    """Makes what leaves this share of the time of operations, or of kinds of them."""

    def saving(op: Any, ms: float) -> float:
        if op.name in names or op.kind in names:
            return share * ms
        return ms

    return saving


# A copy's 3 TB/s, of which sums of rows and the head's loss have 30 to 40 %.
SAVINGS = {
    # Done, but not seen on a GPU: bench/gpu/README.md has the bytes.
    "layers' forward: 268 KB a token, not 281": shorter({"trunk"}, 268 / 281),
    "layers' backward: 458 KB a token, not 612": shorter({"layers backward"}, 458 / 612),
    # By a fit to the measured times: of value_embeds .23 ms in stage 2, not .55; of n-grams .33, as before.
    "sums of rows: long rows first, their loads ahead": shorter({"segment_sum_rows"}, 0.56 / 0.88),
    "MLPs' first products at 1000 TFLOP/s": faster("relu_square_fp8", 1e15),
    # By a kernel that would do both at once; all the layers' generated code reads and writes 800 KB a token.
    "50 KB a token less in norms and rotations": shorter({"trunk", "layers backward"}, 1 - 50 / 800),
    "the head's loss at 60 % of a copy": faster("softcap_loss", 0.6 * 3e12),
    "banks' products two at once": shorter({"bmm", "baddbmm"}, 0.5),
    "sums of rows at 60 % of a copy": faster("segment_sum_rows", 0.6 * 3e12),
    "3/4 of collectives hidden, not 1/2": shorter({"exchange"}, 0.5),
}
