"""Views whose values are the conjugates or negatives of their memory, of which PyTorch only keeps a note."""

import pytest
import torch
from plan_samples import scaled
from torch import Tensor

import cupyops
from cupyops import Kernel
from cupyops.errors import LaunchError

READ = """
struct Complex { float re, im; };
__global__ void complexes(const Complex* x, float* y, int n) {
  for (int i = 0; i < n; i++) { y[2 * i] = x[i].re; y[2 * i + 1] = x[i].im; }
}
__global__ void floats(const float* x, float* y, int n) { for (int i = 0; i < n; i++) y[i] = x[i]; }
__global__ void writes(float* x, int n) { for (int i = 0; i < n; i++) x[i] += 1; }
__global__ void anything(const void* x, float* y, int n) { for (int i = 0; i < n; i++) y[i] = ((const float*)x)[i]; }
"""


def test_conjugates_are_what_a_kernel_reads():
    x, y = torch.tensor([1 + 2j]), torch.zeros(2)
    with cupyops.simulate():
        Kernel(READ, "complexes")[1, 1](x.conj(), y, 1)
        assert y.tolist() == [1, -2] and x.tolist() == [1 + 2j]
        Kernel(READ, "complexes")[1, 1](torch._neg_view(x.conj()), y, 1)
        assert y.tolist() == [-1, 2]


@pytest.mark.parametrize("kernel", ["floats", "anything"])
def test_negatives_are_what_a_kernel_reads(kernel):
    x, y = torch.tensor([1 + 2j, 3 - 4j]).conj().imag.clone(), torch.zeros(2)
    x = torch._neg_view(-x)
    assert x.is_neg()
    with cupyops.simulate():
        Kernel(READ, kernel)[1, 1](x, y, 2)
    assert y.tolist() == [-2, 4]


@pytest.mark.parametrize(
    ("view", "call"),
    [(lambda x: torch._neg_view(x), ".resolve_neg()"), (lambda x: torch.view_as_complex(x).conj(), ".resolve_conj()")],
)
def test_what_a_kernel_writes_to_is_refused(view, call):
    code = "__global__ void writes(void* x) { *(float*)x = 1; }\n"
    x = torch.zeros(2)
    with cupyops.simulate(), pytest.raises(LaunchError) as caught:
        Kernel(code, "writes")[1, 1](view(x))
    assert "writes: argument 1 of 1, parameter `void* x` got a view" in str(caught.value) and call in str(caught.value)
    assert x.tolist() == [0, 0]


def test_the_address_of_such_a_view_is_refused():
    with cupyops.simulate(), pytest.raises(LaunchError, match=r"resolve_conj\(\).resolve_neg\(\), which is a copy"):
        cupyops.address(torch.ones(2, dtype=torch.complex64).conj())


def test_too_many_arguments_are_told_first():
    with cupyops.simulate(), pytest.raises(LaunchError, match="4 arguments given, 3 declared"):
        Kernel(READ, "floats")[1, 1](torch.ones(2), torch.ones(2), 2, torch._neg_view(torch.ones(2)))


def test_a_view_that_forward_makes_is_no_part_of_a_plan():
    """What is launched is a copy, so a plan of addresses would read the memory."""
    floats = Kernel(READ, "floats")

    @cupyops.operator("cupyops_tests::negated_by_forward")
    def op(x: Tensor) -> Tensor:
        return -x

    @op.forward
    def forward(x):
        y = torch.empty_like(x)
        floats[1, 1](torch._neg_view(x), y, x.numel())
        return y, ()

    with cupyops.simulate():
        for value in range(1, 7):
            assert op(torch.full((3,), float(value))).tolist() == [-value] * 3


def test_a_gradient_through_the_registered_operator():
    op = scaled()
    with cupyops.simulate():
        x, grad = torch.ones(3, requires_grad=True), torch._neg_view(torch.full((3,), 3.0))
        (found,) = torch.autograd.grad(op._registration.op(x, 2.0)[0], x, grad)
    assert found.tolist() == [-6] * 3
