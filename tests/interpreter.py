"""Whether Triton's interpreter can be used here, which computes kernels with numpy, without a GPU."""
import numpy as np
import pytest

import train_gpt as tg


def skip_without_interpreter():
    if tg.triton is None:
        pytest.skip("the interpreter is triton's, which is not installed")
    triton, numpy = (tuple(map(int, package.__version__.split(".")[:2])) for package in (tg.triton, np))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("the interpreter of triton before 3.7 makes numbers of arrays of one element, which numpy refuses since 2.4 "
                    "(github.com/triton-lang/triton/issues/9171)")
