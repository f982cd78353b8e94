"""Tests bench/size.py on a known snippet."""

import subprocess
import sys

import pytest

import size

SNIPPET = f'''"""One token."""

x = [  # a comment
    1,
]


class A:
    @property
    def f(self):
        return "two words"
# {"-" * 110}
'''


def test_snippet(tmp_path, capsys):
    # The docstring; x = [ 1 , ]; class A :; @ property; def f ( self ) :; return and a string.
    tokens = 1 + 6 + 3 + 2 + 6 + 2
    path = tmp_path / "a.py"
    path.write_text(SNIPPET)
    size.main([str(path), "--by-function"])
    line = f"{path}: {tokens} tokens, {len(SNIPPET)} characters, 12 lines, 1 over 110 columns\n"
    assert capsys.readouterr().out == f"{line}      13 A\n      10 A.f\n"
    assert size.measure("x=[1,]") == (6, 6, 1, 0)
    assert size.measure("a\n\fb\n")[2] == 2  # as wc counts


def test_encodings_of_python(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    size.main([str(tmp_path / "a.py")])
    assert "a.py: 3 tokens, " in capsys.readouterr().out


@pytest.mark.parametrize("raw", (b"def f(:\n", b"x = (\n", b"\x1f\x8b\x08\xff"))
def test_what_is_no_python_gets_one_line(tmp_path, raw):
    (tmp_path / "a.py").write_bytes(raw)
    with pytest.raises(SystemExit) as error:
        size.main([str(tmp_path / "a.py")])
    assert str(error.value).startswith(f"size.py: {tmp_path}/a.py ") and "\n" not in str(error.value)


def test_a_reader_who_has_enough_ends_it_quietly():
    shell = f"PYTHONUNBUFFERED=1 {sys.executable} {size.__file__} --by-function | true"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert ended.stderr == ""
