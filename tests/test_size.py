"""Tests bench/size.py on a known snippet."""

import pytest

import size

SNIPPET = f'''# coding: latin-1
"""One token."""

x = [  # a comment in Fran\xe7ais
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
    path.write_text(SNIPPET, encoding="latin-1")
    size.main([str(path), "--by-function"])
    line = f"{path}: {tokens} tokens, {len(SNIPPET)} characters, 13 lines, 1 over 110 columns\n"
    assert capsys.readouterr().out == f"{line}      13 A\n      10 A.f\n"
    assert size.measure("a\n\fb\n")[2] == 2  # as wc counts


@pytest.mark.parametrize("raw", (b"def f(:\n", b"x = (\n", b"f" + 999 * b"()", b"\x1f\x8b\x08\xff"))
def test_what_is_no_python_gets_one_line(tmp_path, raw):
    (tmp_path / "a.py").write_bytes(raw)
    with pytest.raises(SystemExit) as error:
        size.main([str(tmp_path / "a.py")])
    assert str(error.value).startswith(f"size.py: {tmp_path}/a.py ") and "\n" not in str(error.value)
