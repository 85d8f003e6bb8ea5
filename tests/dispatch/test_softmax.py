"""Each form of softmax and log_softmax computes what it says that it can, and is chosen where it is meant to be."""

import pytest
import torch
from contract import DTYPES
from ops.test_log_softmax import TestLogSoftmax as LogSoftmax
from ops.test_softmax import TestSoftmax as Softmax
from selection import slow
from softmaxes import form_cases

import cupyops
from cupyops._dispatch import softmaxes
from cupyops._dispatch.softmaxes import Problem
from cupyops.ops._softmax import BACKWARD, FORWARD

H200 = {"capability": 9, "multiprocessors": 132, "shared": 232448, "shared_total": 233472, "threads": 2048}


@pytest.mark.parametrize("contract", [Softmax, LogSoftmax])
@pytest.mark.parametrize("dtype", [*slow(torch.float16), *DTYPES[1:]], ids=str)
def test_every_form(contract, dtype):
    """Asked for by name, on problems of every kind; where backward needs more than forward, it may have another."""
    for form, *case in form_cases(dtype):
        with cupyops.simulate("sm_90"), cupyops.trace() as trace:
            contract().check_form(dtype, form, *case)
        kernels = [record.kernel for record in trace.launches()]
        assert kernels and all(f"_{form}<" in kernel for kernel in kernels), (form, case, kernels)


def chosen(forms, size, dtype=torch.bfloat16, inner=1, widen=False, aligned=True, gpu=H200):
    with cupyops.testing.assume_gpu(**gpu):
        of = softmaxes.gpu(torch.device("cpu"))
    problem = Problem(4096, size, inner, dtype, widen, aligned)
    return forms.choose(problem, of).name, forms.launch(problem, of)


@pytest.mark.parametrize(
    ("size", "options", "forward", "backward"),
    [
        (17, {}, "tiny_rows", "tiny_rows"),
        (16, {}, "sub_warp", "sub_warp"),
        (1000, {}, "block", "block"),
        (1000, {"aligned": False}, "two_pass", "two_pass"),
        (17, {"widen": True}, "block", "block"),
        (7, {"widen": True}, "two_pass", "block"),
        (50257, {}, "persistent", "persistent"),
        (50257, {"widen": True}, "two_pass", "two_pass"),
        (1 << 20, {}, "two_pass", "two_pass"),
        (50257, {"gpu": {"capability": 8, "shared": 101376, "shared_total": 102400}}, "persistent", "two_pass"),
        (17, {"inner": 3}, "two_pass", "two_pass"),
        (17, {"dtype": torch.float64}, "two_pass", "two_pass"),
    ],
)
def test_which_form(size, options, forward, backward):
    assert (chosen(FORWARD, size, **options)[0], chosen(BACKWARD, size, **options)[0]) == (forward, backward)


@pytest.mark.parametrize(
    ("size", "threads", "cluster"), [(36000, 512, None), (50257, 512, None), (131072, 1024, None), (200000, 1024, 2)]
)
def test_persistent_rows(size, threads, cluster):
    """Two blocks of 512 threads on a multiprocessor as long as they fit, then one, then a cluster."""
    _, launch = chosen(FORWARD, size)
    assert (launch.block, launch.cluster) == (threads, cluster)
    assert launch.grid == {512: 264, 1024: 132}[threads]
    assert launch.shared <= H200["shared"]


def test_a_form_says_why_not():
    with (
        cupyops.use_form("softmax:persistent"),
        cupyops.simulate(),
        pytest.raises(cupyops.InputError, match="persistent was asked for, but the elements of a row do not lie side"),
    ):
        cupyops.softmax(torch.randn(2, 3, 4), 1)
