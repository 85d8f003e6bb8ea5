"""Each form of embedding against PyTorch, and which is chosen."""

from functools import partial

import form_walk
import pytest
import torch
from contract import Make, Sample
from ops import test_embedding

from cupyops._dispatch import embedding
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.embedding import Problem

CPU = torch.device("cpu")


def calls():
    for dtype in (torch.bfloat16, torch.float32):
        make, contract = Make(CPU, dtype), test_embedding.TestEmbedding()
        for size in (8, 17):
            indices = torch.cat([make.integers(20, high=70), torch.full((40,), 3)])  # one list of several pieces
            sample = Sample(indices, make(71, size), 5)
            yield partial(contract.compare, sample, repr(sample))


@pytest.mark.parametrize("form", form_walk.names("embedding"))
def test_every_form(form):
    form_walk.run("embedding", form, calls())


@pytest.mark.parametrize("form", ["aligned", "unaligned"])
def test_forms_on_a_small_gpu(form):
    """As of much work: threads that copy several vectors, warps that clear many rows."""
    with assume_gpu(multiprocessors=1, threads=64):
        form_walk.run("embedding", form, calls())


@pytest.mark.parametrize(
    "dtype, aligned, form",
    [(torch.float16, True, "aligned"), (torch.float16, False, "unaligned"), (torch.float64, True, "unaligned")],
)
def test_which_form(dtype, aligned, form):
    problem = Problem(100, 50, 16, dtype, aligned)
    assert [one.choose(problem, gpu(CPU)).name for one in (embedding.FORWARD, embedding.BACKWARD)] == [form, form]


def test_which_lists():
    found = [
        embedding.LISTING.choose(Problem(count, 7, 1, torch.half, False), gpu(CPU)).name for count in (1 << 15, 33000)
    ]
    assert found == ["linked", "sorted"]


def test_sums_do_not_depend_on_the_gpu():
    """Long lists are cut into pieces by their number of positions alone."""
    assert embedding.lists_of(16384, True) == (128, 496, 32)
    assert embedding.lists_of(16384, False) == (128, 496, 1)
