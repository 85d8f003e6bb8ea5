"""Each hazard of devices and threads is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import eager

from cupyops.testing import check

NOTE: dict[str, torch.Tensor] = {}
OF_THREAD = threading.local()


def notes_on_one_sheet(x):
    if not eager(x):
        return 2 * x
    NOTE["x"] = x
    time.sleep(2e-2)  # in which another thread has its turn, on a busy machine too
    return 2 * NOTE.pop("x", x)


class RemembersInThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        OF_THREAD.factor = 2
        return 2 * x

    @staticmethod
    def backward(ctx, grad_y):
        return getattr(OF_THREAD, "factor", 1) * grad_y


def remembers_in_thread(x):
    return RemembersInThread.apply(x) if eager(x) else 2 * x


def on_the_cpu_after_all(x):
    return torch.empty(x.shape) if x.device.type == "meta" else 2 * x


def looks_at_one_device(x, weight):
    return x * (weight if weight.device == x.device else torch.ones_like(weight, device=x.device))


def on_the_current_device(x):
    return (2 * x).to("cuda") if eager(x) and x.is_cuda else 2 * x


def _double(x):
    return 2 * x


def _sample():
    return [normal(3, 11)]


BROKEN = {
    "second_thread": Broken(notes_on_one_sheet, _double, _sample),
    "backward_thread": Broken(remembers_in_thread, _double, _sample, backends="reference"),
    "meta_tensors": Broken(on_the_cpu_after_all, _double, _sample),
    "mixed_devices": Broken(looks_at_one_device, torch.mul, lambda: [normal(3, 11), normal(11, seed=1)]),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)


@pytest.mark.gpu
@pytest.mark.parametrize("hazard", ["second_thread", "meta_tensors", "mixed_devices"])
def test_caught_on_the_gpu(hazard):
    one = BROKEN[hazard]
    report = check(one.function, one.args(), reference=one.reference, backends="gpu", only=hazard, shrink=False)
    assert report.failures, f"\n{report}"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_is_caught():
    Broken(on_the_current_device, _double, _sample, backends="gpu").assert_caught_by("second_device")


def test_an_error_in_a_thread_is_found():
    main = threading.get_ident()

    def only_here(x):
        if threading.get_ident() != main:
            raise ValueError("not in this thread")
        return 2 * x

    report = check(only_here, _sample(), reference=_double, only="second_thread", shrink=False)
    assert "not in this thread" in report.failures[0].reason, f"\n{report}"


def test_what_the_reference_takes_from_another_device_may_be_taken():
    linear = torch.nn.functional.linear
    assert check(linear, [normal(3, 11), normal(5, 11)], reference=linear, only="mixed_devices").passed
