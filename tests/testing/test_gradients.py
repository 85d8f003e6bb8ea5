"""Each hazard of gradients is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import eager, saving

import cupyops
from cupyops.testing import check

DOUBLE = """
__global__ void scaled_fwd(const float* x, const float* w, float* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * w[i];
}
"""


def with_gradient(y, change):
    """`y`, whose gradient is changed by `change` as it arrives in a plain call."""
    if eager(y) and y.requires_grad:
        y.register_hook(change)
    return y


def takes_one_number_for_all(x):
    return with_gradient(torch.sin(x), lambda grad: grad * 0.5 if grad.numel() > 1 and 0 in grad.stride() else grad)


def takes_gradient_laid_out_as_y(x):
    y = torch.sin(x)
    strides = [(size, stride) for size, stride in zip(y.shape, y.stride()) if size > 1]

    def read(grad):
        found = [(size, stride) for size, stride in zip(grad.shape, grad.stride()) if size > 1]
        return grad if found == strides or 0 in grad.stride() else grad.contiguous().flip(0)

    return with_gradient(y, read)


def reads_gradient_by_16_bytes(x):
    return with_gradient(torch.sin(x), lambda grad: grad if grad.data_ptr() % 16 == 0 else grad.flip(-1))


def reads_memory_as_it_lies(x):
    def read(grad):
        return torch._neg_view(grad).resolve_neg() if grad.is_neg() else grad

    return with_gradient(torch.sin(x), read)


def knows_tensors_alone(x):
    return with_gradient(torch.sin(x), lambda grad: grad if type(grad) is torch.Tensor else torch.zeros_like(grad))


def reads_conjugates(grad, x, w):
    """The gradient of x * w, of complex numbers, that takes the memory of a conjugate for it."""
    grad = grad.conj() if eager(grad) and grad.is_conj() else grad
    return grad * w.conj(), grad * x.conj()


def wrong_for_frozen_x(x, weight):
    y = x * weight
    frozen = x.is_floating_point() and not x.requires_grad
    return with_gradient(y, lambda grad: grad * 2) if frozen else y


class SinCos(torch.autograd.Function):
    """Does not expect that only one of its outputs is used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return torch.sin(x), torch.cos(x)

    @staticmethod
    def backward(ctx, grad_sin, grad_cos):
        (x,) = ctx.saved_tensors
        return grad_sin * torch.cos(x) - grad_cos * torch.sin(x)


def works_on_its_buffer_in_backward(x):
    calls = []

    def backward(grad):
        calls.append(None)
        return grad if len(calls) == 1 or grad.dtype is torch.float64 else grad * 2

    return with_gradient(torch.sin(x), backward)


class KeepsData(torch.autograd.Function):
    """`.data` has a version counter of its own: PyTorch cannot see the change."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight.data)
        return x * weight

    @staticmethod
    def backward(ctx, grad_y):
        (weight,) = ctx.saved_tensors
        return grad_y * weight, None


def adds_to_grad_itself(x):
    def backward(grad):
        if x.is_leaf and x.grad is not None:
            x.grad.detach().add_(grad)
        return grad

    return with_gradient(x + 1, backward)


def wants_a_gradient_always(x):
    if not eager(x):
        return torch.sin(x)
    with torch.enable_grad():
        return torch.sin(x)


BROKEN = {
    "grad_expanded": Broken(takes_one_number_for_all, torch.sin, lambda: [normal(3, 11)]),
    "grad_strided": Broken(takes_gradient_laid_out_as_y, torch.sin, lambda: [normal(3, 11)]),
    "grad_misaligned": Broken(reads_gradient_by_16_bytes, torch.sin, lambda: [normal(3, 11)]),
    "grad_bits": Broken(reads_memory_as_it_lies, torch.sin, lambda: [normal(3, 11)]),
    "grad_subclass": Broken(knows_tensors_alone, torch.sin, lambda: [normal(3, 11)]),
    "partial_gradients": Broken(
        wrong_for_frozen_x, lambda x, weight: x * weight, lambda: [normal(3, 11), normal(11, seed=1)]
    ),
    "missing_grads": Broken(
        lambda x: SinCos.apply(x) if eager(x) else (torch.sin(x), torch.cos(x)),
        lambda x: (torch.sin(x), torch.cos(x)),
        lambda: [normal(3, 11)],
    ),
    "retained_graph": Broken(works_on_its_buffer_in_backward, torch.sin, lambda: [normal(3, 11)]),
    "changed_input": Broken(
        lambda x, weight: KeepsData.apply(x, weight) if eager(x, weight) else x * weight,
        lambda x, weight: x * weight,
        lambda: [normal(3, 11), normal(11, seed=1, requires_grad=False)],
    ),
    "accumulated_grads": Broken(adds_to_grad_itself, lambda x: x + 1, lambda: [normal(3, 11)]),
    "no_gradient_wanted": Broken(wants_a_gradient_always, torch.sin, lambda: [normal(3, 11)]),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)


def test_the_conjugate_bit_of_a_gradient():
    args = [torch.complex(normal(7, seed=n).detach(), normal(7, seed=n + 2).detach()).requires_grad_() for n in (0, 1)]
    found, sound = (
        check(function, args, reference=torch.mul, only="grad_bits", progress=False)
        for function in (saving(torch.mul, reads_conjugates), lambda x, w: w * x)
    )
    assert "with a conjugate bit" in found.failures[0].reason and sound.passed


@pytest.mark.parametrize("dim", [0, -1])
def test_a_gradient_expanded_along_one_dimension_alone(dim):
    def read(grad):
        return grad * 2 if grad.dim() and grad.stride(dim) == 0 and grad.unique().numel() > 1 else grad

    report = check(
        lambda x: with_gradient(torch.sin(x), read), [normal(3, 11)], reference=torch.sin, only="grad_expanded"
    )
    assert report.failures


@pytest.fixture
def wasteful():
    """An operator of two inputs whose backward computes both gradients whoever wants them."""
    kernel = cupyops.Kernel(DOUBLE, "scaled_fwd")

    @cupyops.operator("cupyops_tests::wasteful")
    def wasteful(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    def times(a, b):
        y = torch.empty_like(a)
        kernel[1, 64](a, b, y, y.numel())
        return y

    wasteful.forward(lambda x, weight: (times(x.contiguous(), weight.contiguous()), ()))
    wasteful.backward(lambda saved, grad_y, x, weight: (times(grad_y, weight), times(grad_y, x)))
    wasteful.unsupported(lambda x, weight: None if x.dtype is torch.float32 else "not float32")
    return wasteful


def test_a_gradient_that_nobody_wants(wasteful):
    report = check(
        wasteful, [normal(2, 5), normal(2, 5, seed=1)], only="partial_gradients", backends="simulator", shrink=False
    )
    (row,) = report.failures
    expected = (
        "where only input 0 of 2 wants a gradient: backward of cupyops_tests::wasteful computes the gradient of weight"
    )
    assert row.reason.startswith(expected)
    assert check(wasteful, [normal(2, 5), normal(2, 5)], only="partial_gradients", backends="reference").passed


def test_the_roles_are_put_back(wasteful):
    before = {name: op.definition.launch_backward for name, op in cupyops.operators().items()}
    check(wasteful, [normal(2, 5), normal(2, 5)], only="partial_gradients", backends="simulator", shrink=False)
    assert before == {name: op.definition.launch_backward for name, op in cupyops.operators().items()}


def test_softmax_of_a_constant_gradient_may_be_as_far_off_as_its_roundings():
    """The exact gradient is zero, and so may be PyTorch's."""

    def otherwise_rounded(x):
        y = torch.softmax(x, -1)
        return with_gradient(y, lambda grad: grad * (1 + 1e-7 * torch.linspace(-1, 1, grad.shape[-1])))

    report = check(otherwise_rounded, [normal(3, 16)], reference=lambda x: torch.softmax(x, -1), only="grad_expanded")
    assert report.passed, f"\n{report}"


def test_the_input_that_was_changed_is_named():
    broken = BROKEN["changed_input"]
    report = check(broken.function, broken.args(), reference=broken.reference, only="changed_input", shrink=False)
    assert report.failures[0].reason.startswith("tensor 1 changed before backward: gradient 0: error")


@pytest.mark.parametrize("args", [lambda: [normal(3, requires_grad=False)], lambda: [torch.arange(3)]])
def test_nothing_to_differentiate(args):
    report = check(torch.neg, args(), reference=torch.neg, only=list(BROKEN))
    assert {row.verdict for row in report.rows} == {"n/a"}
