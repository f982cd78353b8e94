"""Skips tests where Triton's interpreter, which runs kernels in numpy without a GPU, does not work."""

import numpy as np
import pytest

import train_gpt as tg


def skip_without_interpreter():
    if tg.triton is None:
        pytest.skip("triton is not installed")
    triton, numpy = (tuple(map(int, package.__version__.split(".")[:2])) for package in (tg.triton, np))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip(
            "the interpreter of triton < 3.7 needs numpy < 2.4 (github.com/triton-lang/triton/issues/9171)"
        )
