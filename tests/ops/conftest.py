"""What tests of several operators ask for."""

import contextlib

import pytest

import cupyops
from cupyops.testing import assume_gpu


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """A context in which the kernels run, and the device of the tensors."""
    if request.param == "gpu":
        return contextlib.nullcontext, "cuda"

    def simulated():
        stack = contextlib.ExitStack()
        stack.enter_context(assume_gpu(multiprocessors=2, shared=232448))
        stack.enter_context(cupyops.simulate("sm_90"))
        return stack

    return simulated, "cpu"
