"""Each hazard of modes is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import eager

import cupyops
from cupyops.testing import check


def casts_what_autocast_leaves_alone(x):
    y = torch.sin(x)
    if torch.is_autocast_enabled(x.device.type):
        return y.to(torch.get_autocast_dtype(x.device.type))
    return y


def is_rough_when_deterministic(x):
    if not eager(x) or torch.is_deterministic_algorithms_warn_only_enabled():
        return torch.sin(x)
    return x - x**3 / 6 if torch.are_deterministic_algorithms_enabled() else torch.sin(x)


def differs_when_recomputed(x):
    in_backward = eager(x) and torch._C._current_graph_task_id() != -1
    return torch.sin(x + 1) if in_backward else torch.sin(x)


class KnowsAddress(torch.autograd.Function):
    """Finds what belongs to a saved tensor by its address."""

    @staticmethod
    def forward(ctx, x):
        ctx.address = x.data_ptr()
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        return grad_y * torch.cos(x) if x.data_ptr() == ctx.address else grad_y


@pytest.fixture(scope="module")
def arrays_to_tensors():
    """An operator whose public function forgets what it was given."""

    @cupyops.operator("cupyops_tests::arrays_to_tensors")
    def operator(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    @operator.interface(hands_on=True)
    def public(x: torch.Tensor) -> torch.Tensor:
        return operator(x if isinstance(x, torch.Tensor) else torch.as_tensor(x))

    return public


BROKEN = {
    "autocast": Broken(casts_what_autocast_leaves_alone, torch.sin, lambda: [normal(3, 11)]),
    "deterministic_algorithms": Broken(is_rough_when_deterministic, torch.sin, lambda: [normal(3, 11)]),
    "checkpoint": Broken(differs_when_recomputed, torch.sin, lambda: [normal(3, 11)]),
    "saved_tensors_hooks": Broken(
        lambda x: KnowsAddress.apply(x) if eager(x) else torch.sin(x), torch.sin, lambda: [normal(3, 11)]
    ),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)


def test_caught_arrays(arrays_to_tensors):
    Broken(arrays_to_tensors, None, lambda: [normal(3, 11)]).assert_caught_by("arrays")


def test_dtypes_under_autocast_are_told():
    report = check(casts_what_autocast_leaves_alone, [normal(3, 5)], reference=torch.sin, only="autocast", shrink=False)
    assert report.failures[0].reason == "under autocast to float16: outputs in float16, PyTorch's in float32"


def test_what_autocast_casts():
    """matmul is on PyTorch's list; whoever computes it by other means must cast himself."""
    args = [normal(3, 5), normal(5, 4, seed=1)]
    assert check(torch.matmul, args, reference=torch.matmul, only="autocast").passed
    by_sums = lambda a, b: (a[:, :, None] * b).sum(1)
    report = check(by_sums, args, reference=torch.matmul, only="autocast", shrink=False)
    assert "outputs in float32, PyTorch's in float16" in report.failures[0].reason


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_the_deterministic_mode_is_put_back(mode):
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        set_to = torch.get_deterministic_debug_mode()
        check(torch.sin, [normal(3, 5)], reference=torch.sin, only="deterministic_algorithms")
        assert torch.get_deterministic_debug_mode() == set_to
    finally:
        torch.set_deterministic_debug_mode(before)


def test_an_operator_that_refuses_to_be_deterministic():
    def refuses(x):
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("refuses does not have a deterministic implementation")
        return torch.sin(x)

    (row,) = check(refuses, [normal(3, 5)], reference=torch.sin, only="deterministic_algorithms").rows
    assert (row.verdict, row.reason) == ("n/a", "refused: refuses does not have a deterministic implementation")


def test_bits_that_differ_only_under_the_mode():
    noise = iter(range(1000))

    def uncertain(x):
        return torch.sin(x) + (next(noise) % 2) * 1e-8 * torch.are_deterministic_algorithms_enabled() * (x.abs() < 1e-3)

    x = torch.full((3,), 1e-4, requires_grad=True)
    (row,) = check(uncertain, [x], reference=torch.sin, only="deterministic_algorithms", shrink=False).rows
    assert row.verdict == "fail"


def test_arrays_are_for_operators(arrays_to_tensors):
    (row,) = check(torch.sin, [normal(3)], reference=torch.sin, only="arrays").rows
    assert row.reason == "a plain function, not a cupyops operator"
    (row,) = check(arrays_to_tensors, [normal(3)], only="arrays", shrink=False).rows
    assert row.reason == "a result is a Tensor, not a ndarray"


@pytest.mark.gpu
@pytest.mark.parametrize("hazard", [*BROKEN, "arrays"])
def test_sound_on_a_gpu(hazard):
    args = [normal(3, 37).detach().cuda().requires_grad_(), -1]
    report = check(cupyops.softmax, args, reference=torch.softmax, only=hazard, shrink=False)
    assert not report.failures, f"\n{report}"
