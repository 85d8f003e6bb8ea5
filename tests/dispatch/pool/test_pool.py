"""Each form of pooling against PyTorch, on every problem that it can compute; which is chosen, and for which GPU."""

from functools import partial

import form_walk
import pytest
import torch
from contract import Make, Sample
from ops import test_avg_pool2d, test_max_pool2d

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.pool import pool
from cupyops.ops import _avg_pool2d, _max_pool2d

CONTRACTS = {"max_pool2d": test_max_pool2d.TestMaxPool2d, "avg_pool2d": test_avg_pool2d.TestAvgPool2d}
WINDOWS = [(2,), (3, 1, 1), (3, 2, 1), (3, 3), ((2, 3), (1, 2), (1, 0))]
CPU = torch.device("cpu")


def calls(operator):
    for dtype in (torch.float16, torch.float32):
        make, contract = Make(CPU, dtype), CONTRACTS[operator]()
        for window in WINDOWS:
            for x in (make(2, 3, 7, 10), last(make(2, 8, 5, 6))):
                sample = Sample(x, *window)
                yield partial(contract.compare, sample, repr(sample))
        sample = Sample(make(3, 2, 4, 5), (4, 5))
        yield partial(contract.compare, sample, repr(sample))


def last(x):
    return x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()


FORMS = [(operator, form) for operator in CONTRACTS for form in form_walk.names(operator)]


@pytest.mark.parametrize("operator, form", FORMS)
def test_every_form(operator, form):
    form_walk.run(operator, form, calls(operator))


@pytest.mark.parametrize("operator, form", FORMS)
def test_forms_on_a_small_gpu(operator, form):
    """As of much work: whole bands of several planes, and threads that go down several rows."""
    with assume_gpu(multiprocessors=1, threads=1):
        form_walk.run(operator, form, calls(operator))


def problem(images=4, channels=8, size=(12, 12), window=(2, 2, 0), dtype=torch.float16, **options):
    kernel, stride, pad = window
    out = [(n + 2 * pad - kernel) // stride + 1 for n in size]
    geometry = (*size, *out, kernel, kernel, stride, stride, pad, pad, 1, 1)
    return pool.Problem(images, channels, geometry, dtype, **{"nhwc": False, "aligned": True, **options})


@pytest.mark.parametrize(
    "form, options",
    [
        ("bands", {}),
        ("bands", {"window": (3, 2, 1)}),
        ("scalar", {"window": (3, 3, 0)}),
        ("scalar", {"dtype": torch.float64}),
        ("scalar", {"places": torch.int64}),
        ("scalar", {"size": (4, 40000)}),  # a row of windows takes more shared memory than there is
        ("nhwc", {"nhwc": True}),
        ("scalar", {"nhwc": True, "channels": 7}),
        ("scalar", {"nhwc": True, "aligned": False}),
        ("scalar", {"nhwc": True, "places": torch.int64}),
        ("scalar", {"nhwc": True, "dtype": torch.float64}),
    ],
)
def test_which_form(form, options):
    given = problem(**options)
    assert [one.choose(given, gpu(CPU)).name for one in (_max_pool2d.FORWARD, _max_pool2d.BACKWARD)] == [form, form]
    if given.places is None:
        assert [one.choose(given, gpu(CPU)).name for one in (_avg_pool2d.FORWARD, _avg_pool2d.BACKWARD)] == [form, form]


@pytest.mark.parametrize("dtype, form", [(torch.float32, "global_plane"), (torch.float64, "scalar")])
def test_a_window_that_is_the_plane(dtype, form):
    assert _avg_pool2d.FORWARD.choose(problem(size=(7, 7), window=(7, 7, 0), dtype=dtype), gpu(CPU)).name == form


def test_a_larger_gpu_has_more_blocks():
    """Small work is divided among all multiprocessors, whatever their number."""
    grids = []
    for multiprocessors in (1, 8, 132):
        with assume_gpu(multiprocessors=multiprocessors):
            grids.append(_max_pool2d.FORWARD.launch(problem(places=torch.uint8, images=64), gpu(CPU)).grid)
    assert grids[0] < grids[1] < grids[2]


def test_a_form_that_cannot():
    message = "max_pool2d, forward: the form nhwc was asked for, but channels are no neighbours"
    with cupyops.simulate(), cupyops.use_form("max_pool2d:nhwc"), pytest.raises(cupyops.InputError, match=message):
        cupyops.max_pool2d(torch.zeros(1, 2, 4, 4), 2)
