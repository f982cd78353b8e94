"""Skips tests where Triton's interpreter, which runs kernels in numpy without a GPU, does not work."""

import numpy as np
import pytest

import train_gpt as tg


def version_of(package):
    """Returns a package's major and minor version."""
    major, minor = package.__version__.split(".")[:2]
    return int(major), int(minor)


def skip_without_interpreter():
    if tg.triton is None:
        pytest.skip("triton is not installed")
    if version_of(tg.triton) < (3, 7) and version_of(np) >= (2, 4):
        pytest.skip(
            "the interpreter of triton < 3.7 needs numpy < 2.4 (github.com/triton-lang/triton/issues/9171)"
        )
