#!/usr/bin/env python3
"""Measures the size of Python files: tokens without comments, characters, lines, long lines.

    python bench/size.py [--by-function] [FILE ...]

Tokens are those of Python's tokenizer, except comments, line breaks and indentation. A docstring is one
token; from Python 3.12 on an f-string is several. --by-function adds the largest functions, methods and
classes.
"""

import argparse
import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))
from scripts import UserError, make_parser, run_script

MAX_COLUMNS, SHOWN = 110, 20
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}


def token_lines(text: str) -> list[int]:
    """Returns the line number of every token that counts."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.start[0] for token in tokens if token.type not in LAYOUT]


def measure(text: str) -> tuple[int, int, int, int]:
    """Counts tokens, characters, lines, and lines over 110 columns."""
    lines = [line.rstrip("\n") for line in io.StringIO(text)]  # a form feed ends no line
    return len(token_lines(text)), len(text), len(lines), sum(len(line) > MAX_COLUMNS for line in lines)


def measure_definitions(text: str) -> list[tuple[int, str]]:
    """Returns (tokens, qualified name) of functions, methods and classes, the largest first."""
    lines = token_lines(text)
    sizes = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = child.lineno
                if child.decorator_list:
                    first = child.decorator_list[0].lineno
                tokens = sum(first <= line <= child.end_lineno for line in lines)
                sizes.append((tokens, prefix + child.name))
                name = f"{prefix}{child.name}."
            visit(child, name)

    visit(ast.parse(text), "")
    return sorted(sizes, key=lambda size: (-size[0], size[1]))


def run(args: argparse.Namespace) -> None:
    for file in args.files or [str(ROOT / "train_gpt.py")]:
        try:
            with tokenize.open(file) as source:  # in the encoding that it declares
                text = source.read()
            tokens, characters, lines, long_lines = measure(text)
            definitions = measure_definitions(text)
        except (OSError, ValueError, SyntaxError, RecursionError, tokenize.TokenError) as error:
            raise UserError(f"{file} is no Python source that can be measured: {error}") from None
        counts = f"{tokens} tokens, {characters} characters, {lines} lines, {long_lines} over"
        print(f"{file}: {counts} {MAX_COLUMNS} columns")
        if args.by_function:
            for size, name in definitions[:SHOWN]:
                print(f"{size:8} {name}")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("size.py", __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: train_gpt.py")
    parser.add_argument("--by-function", action="store_true", help="list the largest definitions too")
    run_script(run, parser, argv)


if __name__ == "__main__":
    main()
