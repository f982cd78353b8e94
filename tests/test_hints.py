"""Tests that a failed test says what has changed and where to put the change."""

import re

import pytest

import conftest

FAILING = """
import pytest

@pytest.mark.pinned("the number of layers")
@pytest.mark.parametrize("layers", (11, 12, 13))
def test_layers(layers):
    assert layers == 11

@pytest.mark.forms("a kernel and its plain form")
def test_forms():
    assert False
"""


def test_a_failed_test_says_what_has_changed(tmp_path, capsys):
    """The hint is a line below the failures, once for all tests of the same."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    pinned\n    forms\n")
    (tmp_path / "test_failing.py").write_text(FAILING)
    options = "-q --tb=no -p no:cacheprovider -p no:xdist".split()
    assert pytest.main(options + [str(tmp_path)], plugins=[conftest]) == pytest.ExitCode.TESTS_FAILED
    printed = capsys.readouterr().out
    (pinned,) = re.findall("^the number of layers has changed: (.*)", printed, re.MULTILINE)
    assert "setting that `record` leaves off (docs/testing.md)" in pinned
    assert printed.count("\na kernel and its plain form differ: ") == 1
    assert "3 failed, 1 passed" in printed
