"""Tests the pages: links lead somewhere, programs have the options they are given, README.md is short."""

import re
import shlex
from pathlib import Path

import pytest

import train_gpt as tg

ROOT = Path(tg.__file__).resolve().parent
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("bench/**/*.md"))
PAGES += [ROOT / "records" / "README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:\./|(?:python|torchrun)\b.*? )((?:\w+/)*\w+\.(?:py|sh))\b(.*)")
# run.sh gives options that it does not know to the script.
PASSED_ON = {"run.sh": "train_gpt.py"}


def anchors(page):
    """Returns the names that GitHub gives to the page's headings."""
    names = set()
    for heading in re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE):
        kept = re.sub(r"[^\w\s-]", "", heading.lower())
        names.add(kept.replace(" ", "-"))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page
        if name:
            target = page.parent / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def commands(page):
    """Returns the page's indented commands that run our programs: a program, and the words after it."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in re.findall(r"^ {4,}(.*)", text, re.MULTILINE):
        for command in line.split(" && "):
            if command.startswith("cd "):
                break  # what follows runs in another folder
            match = COMMAND.match(command)
            if match:
                found.append((match[1], shlex.split(match[2], comments=True)))
    return found


def test_commands_are_found():
    found = commands(ROOT / "README.md") + commands(ROOT / "docs" / "gpus.md")
    assert ("records/compare.py", ["--update"]) in found
    assert ("train_gpt.py", ["--preset", "record"]) in found
    assert ("run.sh", ["--preset", "cpu"]) in found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_commands(page):
    """Each program is there, and names each of its options."""
    for program, words in commands(page):
        path = ROOT / program
        assert path.exists(), program
        source = path.read_text(encoding="utf-8")
        if program in PASSED_ON:
            source += (ROOT / PASSED_ON[program]).read_text(encoding="utf-8")
        for word in words:
            if word.startswith("--"):
                option = re.escape(word.partition("=")[0])
                assert re.search(rf"{option}\b", source), f"{program} has no {word}"


def test_readme_is_short():
    """Without the table of records, which grows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = text.split("<!-- leaderboard -->")
    _, after = rest.split("<!-- /leaderboard -->")
    assert len((before + after).split()) <= 675
