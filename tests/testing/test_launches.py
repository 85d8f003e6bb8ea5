"""Each hazard of launches is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import DOUBLE, doubling, eager

import cupyops
from cupyops.testing import check


@contextmanager
def in_other_words(kernel, x):
    try:
        yield
    except cupyops.CupyopsError:
        raise RuntimeError("something went wrong") from None


@contextmanager
def in_silence(kernel, x):
    with suppress(cupyops.CupyopsError):
        yield


def _on_default_stream(x):
    """Unless a graph is being captured, where another hazard would see it."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(x.device))


def on_default_stream(x):
    with _on_default_stream(x) if eager(x) else nullcontext():
        return 2 * x


class BackwardOnDefaultStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_y):
        with _on_default_stream(grad_y):
            return 2 * grad_y


def backward_on_default_stream(x):
    return BackwardOnDefaultStream.apply(x) if eager(x) else 2 * x


def looks_at_values(x):
    if eager(x) and x.numel():
        x.sum().item()
    return 2 * x


def measured_at_first(kernel, x):
    if x.is_cuda and not kernel._specialised:
        torch.cuda.synchronize()
    return nullcontext()


def _double(x):
    return 2 * x


def _sample():
    return [normal(3, 11)]


BROKEN = {
    "launch_error": Broken(doubling("in_other_words", DOUBLE, in_other_words), None, _sample, backends="simulator")
}
BROKEN_ON_GPU = {
    "launch_error": Broken(doubling("in_other_words_gpu", DOUBLE, in_other_words), None, _sample, backends="gpu"),
    "side_stream": Broken(on_default_stream, _double, _sample, backends="gpu"),
    "backward_stream": Broken(backward_on_default_stream, _double, _sample, backends="gpu"),
    "cuda_graph": Broken(looks_at_values, _double, _sample, backends="gpu"),
    "cuda_graph_first_call": Broken(doubling("measured", DOUBLE, measured_at_first), None, _sample, backends="gpu"),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)


@pytest.mark.gpu
@pytest.mark.parametrize("hazard", BROKEN_ON_GPU)
def test_caught_on_the_gpu(hazard):
    BROKEN_ON_GPU[hazard].assert_caught_by(hazard)


@pytest.mark.parametrize(
    "name, around, message",
    [
        ("words", in_other_words, "the error of the forward does not name cupyops_tests::words, double_fwd, (1, 1, 1)"),
        ("silence", in_silence, "no error from the forward, though a block of 2048 threads was asked for double_fwd"),
    ],
)
def test_a_launch_error_that_says_little(name, around, message):
    report = check(doubling(name, DOUBLE, around), _sample(), backends="simulator", only="launch_error", shrink=False)
    assert message in report.failures[0].reason, f"\n{report}"


def test_a_launch_error_in_the_backward():
    forward = iter([True] * 2)  # one that fails, one that does not
    around = lambda kernel, x: nullcontext() if next(forward, False) else in_silence(kernel, x)
    op = doubling("backward_only", DOUBLE, around)
    report = check(op, _sample(), backends="simulator", only="launch_error", shrink=False)
    assert "no error from the backward" in report.failures[0].reason, f"\n{report}"


def test_the_next_call_must_work():
    state = {"failed": False}

    @contextmanager
    def never_again(kernel, x):
        if state["failed"]:
            raise RuntimeError("still broken")
        try:
            yield
        except cupyops.CupyopsError:
            state["failed"] = True
            raise

    op = doubling("never_again", DOUBLE, never_again)
    report = check(op, _sample(), backends="simulator", only="launch_error", shrink=False)
    assert "still broken" in report.failures[0].reason, f"\n{report}"


@pytest.mark.gpu
def test_after_a_capture_that_failed_all_is_as_before():
    report = check(looks_at_values, _sample(), reference=_double, backends="gpu", only="cuda_graph", shrink=False)
    assert "cannot be captured" in report.failures[0].reason, f"\n{report}"
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(3, device="cuda").isfinite().all()
    assert check(_double, _sample(), reference=_double, backends="gpu", only="cuda_graph").passed


@pytest.mark.gpu
def test_kernels_stay_loaded():
    """The first call inside a capture leaves what was loaded before as it was."""
    y, op = torch.ones(5, device="cuda"), doubling("loaded")
    kernel = next(kernel for kernel in reversed(cupyops._kernel.kernel.kernels()) if kernel.base == "double_fwd")
    assert op(y).tolist() == [2] * 5
    before = dict(kernel._specialised), dict(kernel._table), kernel._fast
    assert check(op, _sample(), backends="gpu", only="cuda_graph_first_call").passed
    assert (dict(kernel._specialised), dict(kernel._table), kernel._fast) == before and op(y).tolist() == [2] * 5
