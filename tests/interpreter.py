"""Whether Triton's interpreter can be used here, which computes kernels with numpy, without a GPU."""
from importlib.metadata import PackageNotFoundError, version

import pytest


def release(package):
    """Its version's first two numbers; None without it."""
    try:
        return tuple(int(number) for number in version(package).split(".")[:2])
    except PackageNotFoundError:
        return None


def skip_without_interpreter():
    triton = release("triton")
    if triton is None:
        pytest.skip("the interpreter is triton's, which is not installed")
    if triton < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("the interpreter of triton before 3.7 makes numbers of arrays of one element, which numpy refuses since 2.4 "
                    "(github.com/triton-lang/triton/issues/9171)")
