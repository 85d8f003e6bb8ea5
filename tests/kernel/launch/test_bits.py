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


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input(requires_grad):
    op = scaled()
    with cupyops.simulate():
        for value in range(1, 7):
            plain = torch.full((3,), float(value), requires_grad=requires_grad)
            y = op(torch._neg_view(plain) if value % 2 else plain, 2.0)
            assert y.tolist() == [2 * value * (-1 if value % 2 else 1)] * 3


def test_a_gradient():
    """Before backward is recorded, while it is and afterwards; also in the middle of replays."""
    op = scaled()
    with cupyops.simulate():
        for step in range(12):
            x = torch.ones(3, requires_grad=True)
            grad = torch.full((3,), float(step))
            (found,) = torch.autograd.grad(op(x, 2.0), x, torch._neg_view(grad) if step % 3 else grad)
            assert found.tolist() == [2.0 * step * (-1 if step % 3 else 1)] * 3


def test_a_gradient_through_the_registered_operator():
    op = scaled()
    with cupyops.simulate():
        x, grad = torch.ones(3, requires_grad=True), torch._neg_view(torch.full((3,), 3.0))
        (found,) = torch.autograd.grad(op._registration.op(x, 2.0)[0], x, grad)
    assert found.tolist() == [-6] * 3


EVERY = (
    "relu", "silu", "gelu", "softmax", "log_softmax", "sum", "mean", "add", "matmul", "linear", "rms_norm", "swiglu",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_operators_of_the_library(name):
    """Inputs and gradients, against PyTorch's float64."""
    function = getattr(cupyops, name)
    more = {"softmax": (-1,), "log_softmax": (-1,)}.get(name, ())
    count = {"matmul": 2, "linear": 2, "add": 2, "rms_norm": 1, "swiglu": 2}.get(name, 1)
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(8, 8, generator=generator) for _ in range(count)]
    if name == "rms_norm":
        tensors.append(torch.randn(8, generator=generator))
        more = ()

    def run(values, turn, negate):
        leaves = [value.clone().requires_grad_() for value in values]
        given = [turn(leaf) for leaf in leaves]
        y = function(given[0], (8,), given[1]) if name == "rms_norm" else function(*given, *more)
        grad = torch.ones(y.shape, dtype=y.dtype) * 3
        return y, torch.autograd.grad(y, leaves, negate(grad))

    exact, exact_grads = run([value.double() for value in tensors], torch.neg, torch.neg)
    with cupyops.simulate():
        for _ in range(4):
            found, grads = run(tensors, torch._neg_view, torch._neg_view)
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
            for one, other in zip(grads, exact_grads):
                torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
