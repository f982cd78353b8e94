"""Tests the pages: links lead somewhere, programs have the options they are given, README.md is short."""

import re
import shlex

import pytest

from launch import ROOT

PAGES = ["records/README.md"]
for pattern in "*.md", "docs/*.md", "bench/**/*.md":
    PAGES += sorted(str(page.relative_to(ROOT)) for page in ROOT.glob(pattern))
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
COMMAND = re.compile(r"(?:\./|(?:python|torchrun)\b.*? )((?:\w+/)*\w+\.(?:py|sh))\b(.*)")


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def anchors(page):
    """Returns the names that GitHub gives to the page's headings."""
    names = set()
    for heading in re.findall(r"^#+ (.*)", read(page), re.MULTILINE):
        names.add(re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-"))
    return names


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for link in LINK.findall(read(page)):
        name, _, anchor = link.partition("#")
        target = ROOT / page
        if name:
            target = target.parent / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def commands(page):
    """Returns the page's indented commands that run our programs: a program, and the words after it."""
    text = read(page).replace("\\\n", " ")
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
    assert ("run.sh", ["--preset", "cpu"]) in commands("README.md")
    assert ("train_gpt.py", ["--preset", "record"]) in commands("docs/gpus.md")


@pytest.mark.parametrize("page", PAGES)
def test_options_of_commands(page):
    """Each program is there, and names each of its options."""
    for program, words in commands(page):
        source = read(program)
        if program == "run.sh":  # it gives options that it does not know to the script
            source += read("train_gpt.py")
        for word in words:
            if word.startswith("--"):
                option = re.escape(word.partition("=")[0])
                assert re.search(rf"{option}\b", source), f"{program} has no {word}"


def test_readme_is_short():
    """Without the table of records, which grows."""
    text = re.sub("(?s)<!-- leaderboard -->.*<!-- /leaderboard -->", "", read("README.md"))
    assert len(text.split()) <= 780
