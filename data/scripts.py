"""What the scripts of this project share: command lines, errors of one line, and outputs.

An output may create a file, or replace a regular file that begins as this output does. A link is followed.
Anything else in its place ends a script before its work. Outputs appear when they are complete.
"""

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Those of requirements.txt.
PACKAGES = ("huggingface_hub", "matplotlib", "numpy", "safetensors", "scipy", "tiktoken", "torch", "tqdm")
PNG = rb"\x89PNG.*Matplotlib"  # how our pictures begin


class UserError(argparse.ArgumentTypeError):  # so argparse reports it, if it is of an option
    """Reports input that cannot be used. The message is one line: what is wrong, and what to do."""


# ---- Command lines -----------------------------------------------------------------------------------------


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Returns a script's parser, whose help is its docstring.

    From here on stdout shows characters that its encoding lacks as escapes, as stderr always does: texts and
    names of files may have any. And stderr is never None: progress bars could not begin.
    """
    if sys.stderr is None:  # closed, as by 2>&-
        sys.stderr = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, description=description, formatter_class=layout, allow_abbrev=False)


def number(kind: type, least: float, most: float = 1e9) -> Callable:
    """Returns an argparse type: a `kind` from `least` to `most`."""

    def parse(text: str):
        value = kind(text)
        if not least <= value <= most:  # so NaN is refused, too
            raise argparse.ArgumentTypeError(f"{text}: give a number from {least} to {most:g}")
        return value

    parse.__name__ = kind.__name__  # for argparse's own messages
    return parse


def run_script(
    run: Callable, parser: argparse.ArgumentParser, argv: list[str] | None, *errors: type[Exception]
) -> None:
    """Calls run(options). Errors that the user can fix, also `errors`, end the script with one line."""
    expected: tuple[type[Exception], ...] = (OSError, UserError, *errors)
    refuse_empty_values(parser, sys.argv[1:] if argv is None else argv)
    if argv is None:  # as Ctrl-C, so that what is unfinished is removed
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        run(parser.parse_args(argv))
    except BrokenPipeError:  # whoever read it, as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as Python itself does: what comes after `&&` needs the whole output
    except ModuleNotFoundError as error:
        sys.exit(f"{parser.prog}: {missing_package(error)}")
    except FileNotFoundError as error:
        sys.exit(f"{parser.prog}: there is no {error.filename}")
    except MemoryError:
        sys.exit(f"{parser.prog}: there is not enough memory")
    except expected as error:
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        sys.exit(130)


def refuse_empty_values(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Ends the script if an option has an empty value, as of a shell's variable that is not set."""
    for option, value in zip(words, [*words[1:], None]):
        if re.fullmatch("--[a-z-]+=", option) or option.startswith("--") and value == "":
            parser.error(f"{option} needs a value")


def missing_package(error: ModuleNotFoundError) -> str:
    """Returns a line on a package of requirements.txt that is not installed. Raises any other error."""
    package = (error.name or "").split(".")[0]
    if package not in PACKAGES:
        raise error
    return f"needs {package}, which this Python lacks: pip install -r requirements.txt"


def tied(command: list[str]) -> list[str]:
    """Returns `command`, whose process is killed when this script ends, even if this script is killed."""
    if sys.platform != "linux":
        return command
    # PR_SET_PDEATHSIG, which exec keeps.
    end_with_parent = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-c", end_with_parent, *command]


def require_distinct(files: list[Path]) -> None:
    """Raises UserError if a file is named twice, which would count it twice."""
    known = set()
    for path in files:
        if path.resolve() in known:
            raise UserError(f"{path} is named twice")
        known.add(path.resolve())


# ---- Outputs -----------------------------------------------------------------------------------------------


def target(path: str | Path, kind: bytes) -> Path:
    """Returns the file that an output to `path` creates or replaces: that which a link is to.

    kind: a regular expression for how such outputs begin. Raises UserError if anything else is there, or no
    folder for it.
    """
    path = Path(os.path.realpath(path))  # resolve() raises an error if links are a circle
    if path.is_file():
        with open(path, "rb") as file:
            is_free = bool(re.match(kind + rb"|\Z", file.read(4096), re.DOTALL))
    else:  # a folder, a device or a circle of links may be there
        is_free = path.parent.is_dir() and not os.path.lexists(path)
    if not is_free:
        raise UserError(f"{path}: another kind of file is there, or no folder for it; choose another place")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path.parent} cannot be written to; choose another place")
    return path


def png(text: str) -> Path:
    """Returns target() of a picture: an argparse type."""
    return target(text, PNG)


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder in `folder` for outputs that are not complete. It is removed at the end.

    An OSError that names no file, as that of a full disk, gets the name of `folder`.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", suffix=".tmp", dir=folder) as name:
            yield Path(name)
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


@contextlib.contextmanager
def replacing(path: str | Path, kind: bytes) -> Iterator[Path]:
    """Yields where to write an output to `path`, which appears there when the block ends without an error.

    Raises UserError before the block, as target() does.
    """
    path = target(path, kind)
    with unfinished(path.parent) as folder:
        yield folder / path.name
        os.replace(folder / path.name, path)


def new_figure(width: float, height: float):
    """Returns an empty figure of matplotlib, of a size in inches."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's needs a package that may not be here
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure, path: str | Path, **options) -> None:
    with replacing(path, PNG) as new:
        figure.savefig(new, format="png", **options)
