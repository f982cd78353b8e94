#!/usr/bin/env python3
"""Writes the table of the public records, and draws the pictures that show no record of ours.

    python records/pictures.py

The table is made of history.csv, and stands in records/README.md. The pictures are records/history.png and
those in bench/curves. A picture is drawn only if what it shows has changed. compare.py --update draws the
curves of our records.
"""

import argparse
import csv
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from compare import (
    HERE,
    Picture,
    clear,
    digest,
    draw_if_changed,
    markdown_table,
    read_groups,
    with_part,
    write_page,
)

from scripts import UserError, make_parser, new_figure, run_script, save_figure

CURVES = HERE.parent / "bench" / "curves"
# README.md's pictures in bench/curves: {label: log}, then target and constants, which bench/ngram.py printed.
# They are single runs that validated often, by --set val_every=20 and --val-every: training is the same.
PICTURES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "curves.png": ({"plain GPT with AdamW": "plain_gpt.txt", "cpu preset": "cpu.txt"}, ("training time, s",)),
    "ngrams.png": (
        {"with n-grams, 311 steps": "ngrams.txt", "with bigrams, 431 steps": "no_ngrams.txt"},
        ("step", "training time, s"),
    ),
}
LINES = [("4-gram", 1.469), ("5-gram", 1.350)]
# Public records that history.png names, and the name's place: points right of and above the mark.
NAMED = {
    1: ("llm.c", 8, -3),
    3: ("Muon", 8, 2),
    12: ("FlexAttention", 8, 2),
    21: ("timed by other rules from here on", 4, 12),
    53: ("several next tokens", 8, 2),
    92: ("sampled softmax, ANVIL", -150, -4),
}


class PublicRecord(NamedTuple):
    """Holds a line of history.csv."""

    number: str  # repeated: the same record, timed again
    minutes: str
    date: str
    change: str
    source: str


class History(NamedTuple):
    """Draws the public records' times over their dates."""

    rows: list[PublicRecord]

    @property
    def mark(self) -> str:
        return digest([History], self.rows, NAMED)

    def draw(self, path: Path) -> None:
        fig = new_figure(9, 5)
        from matplotlib.ticker import NullLocator

        ax: Any = fig.subplots()
        days = [date.fromisoformat(row.date) for row in self.rows]
        times = [float(row.minutes) for row in self.rows]
        ax.step(days, times, "C0", where="post", linewidth=1)
        drawn = set()
        for row, day, time in zip(self.rows, days, times):
            is_repeated = row.number in drawn
            ax.plot(day, time, "C0o", markersize=4, markerfacecolor="white" if is_repeated else "C0")
            if int(row.number) in NAMED and not is_repeated:
                name, right, above = NAMED[int(row.number)]
                text = f"{row.number}: {name}"
                ax.annotate(text, (day, time), xytext=(right, above), textcoords="offset points", fontsize=9)
            drawn.add(row.number)
        title = "Public NanoGPT speedrun: time to a validation loss of 3.28 on 8 H100s"
        ax.set(yscale="log", ylim=(0.5, 60), ylabel="time (logarithmic)", title=title)
        ax.set_yticks([0.5, 1, 2, 3, 5, 10, 20, 45])
        ax.yaxis.set(major_formatter="{x:g} min", minor_locator=NullLocator())
        clear(ax)
        save_figure(fig, path, metadata={"Source": self.mark})


def read_history() -> History:
    """Returns the public records, in order. Raises UserError if a line is none."""
    path = HERE / "history.csv"
    rows = []
    with open(path, encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines, None)  # the names of the columns
        for line in lines:
            try:
                row = PublicRecord._make(line)
                int(row.number), float(row.minutes), date.fromisoformat(row.date)  # as draw() reads them
            except (TypeError, ValueError) as error:
                raise UserError(f"{path}:{lines.line_num} is no record: {error}; mend the line") from None
            rows.append(row)
    return History(rows)


def read_pictures() -> dict[Path, Picture | History]:
    """Returns all pictures, by file. Raises UserError if a log cannot be read."""
    pictures: dict[Path, Picture | History] = {HERE / "history.png": read_history()}
    for name, (logs, over) in PICTURES.items():
        groups, errors = read_groups([f"{label}={CURVES / log}" for label, log in logs.items()], None)
        if errors:
            raise UserError(errors[0])
        pictures[CURVES / name] = Picture(groups, LINES, over)
    return pictures


def read_page() -> str:
    """Returns the text of records/README.md with the public records' table."""
    table = markdown_table(["#", "minutes", "date", "change", "source"], read_history().rows)
    return with_part(HERE / "README.md", "history", "\n".join(table))


def run(options: argparse.Namespace) -> None:
    pictures = read_pictures()
    page = read_page()
    write_page(HERE / "README.md", page)
    for path, picture in pictures.items():
        draw_if_changed(picture, path)


def main(argv: list[str] | None = None) -> None:
    run_script(run, make_parser("pictures.py", str(__doc__)), argv)


if __name__ == "__main__":
    main()
