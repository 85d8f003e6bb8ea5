"""Each form of rope against complex numbers, and which is chosen."""

from functools import partial

import form_walk
import pytest
import torch
from contract import Make, Sample
from ops import test_rope

from cupyops._dispatch import rope
from cupyops._dispatch.core.gpu import gpu

CPU = torch.device("cpu")


def calls():
    for dtype in (torch.bfloat16, torch.float32):
        make, contract = Make(CPU, dtype), test_rope.TestRope()
        for size, pairs in ((32, 16), (48, 16), (7, 3)):
            for interleaved in (False, True):
                x = make(2, 3, 5, size)
                sample = Sample(x, *test_rope.tables(make, 6, pairs), interleaved=interleaved)
                yield partial(contract.compare, sample, repr(sample))
        sample = Sample(make(9, 32), *test_rope.tables(make, 9, 16))  # evenly spaced
        yield partial(contract.compare, sample, repr(sample))


@pytest.mark.parametrize("form", form_walk.names("rope"))
def test_every_form(form):
    form_walk.run("rope", form, calls())


def chosen(shape, pairs, interleaved=False, dtype=torch.float16, strides=None, boundary=8, positions=None, apart=None):
    strides = strides or torch.empty(shape, device="meta").stride()
    problem = rope.Problem(
        shape, strides, len(shape) - 2, positions, pairs, apart or pairs, boundary, interleaved, dtype
    )
    return rope.ROTATION.choose(problem, gpu(CPU)).name


def test_which_form():
    assert chosen((9, 64), 32) == "even"
    assert chosen((9, 64), 32, positions=(1,)) == "rows"
    assert chosen((2, 3, 9, 64), 32) == "rows"
    assert chosen((2, 3, 9, 64), 32, interleaved=True) == "heads"
    assert chosen((2, 3, 9, 64), 32, dtype=torch.float64, boundary=2) == "heads"
    assert chosen((2, 3, 9, 64), 32, apart=64) == "rows"
    assert chosen((2, 3, 9, 64), 32, apart=33) == "staged"  # rows of the tables are no whole vectors
    assert chosen((2, 3, 9, 62), 31) == "staged"
    assert chosen((2, 3, 9, 62), 31, strides=(5000, 1500, 100, 1)) == "heads"
    assert chosen((2, 3, 9, 64), 32, boundary=1) == "staged"  # off by one element
    assert chosen((2, 3, 9, 36), 18, interleaved=True) == "staged"  # eight bytes of neighbours
