"""Tests bench/size.py on a known snippet."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
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


def test_snippet():
    # The docstring; x = [ 1 , ]; class A :; @ property; def f ( self ) :; return and a string.
    tokens, lines = 1 + 6 + 3 + 2 + 6 + 2, SNIPPET.splitlines()
    assert size.measure(SNIPPET) == (tokens, len(SNIPPET), len(lines), 1)
    assert size.measure_definitions(SNIPPET) == [(13, "A"), (10, "A.f")]
    assert size.measure("x=[1,]") == (6, 6, 1, 0)


def test_output(tmp_path, capsys):
    path = tmp_path / "a.py"
    path.write_text(SNIPPET)
    size.main([str(path)])
    line = f"{path}: 20 tokens, {len(SNIPPET)} characters, 12 lines, 1 over 110 columns\n"
    assert capsys.readouterr().out == line
    size.main([str(path), "--by-function"])
    assert capsys.readouterr().out == f"{line}      13 A\n      10 A.f\n"
    size.main([])
    assert "train_gpt.py: " in capsys.readouterr().out
