"""Tests bench/size.py on a known snippet."""

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
