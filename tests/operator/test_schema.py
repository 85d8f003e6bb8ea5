"""Every route holds what an operator declares: types of numbers, and which tensors change."""

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor

import cupyops
from cupyops.errors import CupyopsError, InputError

SOURCE = """
__global__ void doubled(float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) { x[i] *= 2; y[i] = x[i] * x[i]; }
}
__global__ void squared(float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = 4 * x[i] * x[i];
}
struct Two { float *x, *y; };
__global__ void doubled_of_two(Two two, int n) {
  int i = threadIdx.x;
  if (i < n) { two.x[i] *= 2; two.y[i] = two.x[i] * two.x[i]; }
}
__global__ void slope(const float* x, float* grad_y, float* grad_x, int n) {
  int i = threadIdx.x;
  if (i < n) { grad_y[i] *= 8; grad_x[i] = grad_y[i] * x[i]; }
}
"""
DOUBLED, SQUARED, SLOPE = (cupyops.Kernel(SOURCE, name) for name in ("doubled", "squared", "slope"))
OF_TWO = cupyops.Kernel(SOURCE, "doubled_of_two")


def _operator(name, forward, mutates=()):
    @cupyops.operator(f"cupyops_schema::{name}", mutates=mutates)
    def op(x: Tensor) -> Tensor:
        return 4 * x * x

    op.forward(forward)
    return op


def _by(kernel, copied=False):
    def forward(x):
        y = torch.empty_like(x)
        kernel[1, 32](x.clone() if copied else x, y, x.numel())
        return y, ()

    return forward


def _by_pointers(x):
    y = torch.empty_like(x)
    OF_TWO[1, 32](cupyops.pointers([x, y]), x.numel())
    return y, ()


def _by_pytorch(x):
    return x.mul_(2).square(), ()


WRITING = {"pointer": _by(DOUBLED), "pointers in a struct": _by_pointers}


@pytest.mark.parametrize("how", WRITING)
def test_a_forward_that_writes_what_it_does_not_declare(how):
    op = _operator(f"writes_{len(how)}", WRITING[how])
    with cupyops.simulate():
        for _ in range(4):  # also where a plan would be recorded
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            with pytest.raises(
                InputError, match=r"writes to x through .* x.clone\(\).* operator\(\.\.\., mutates=\('x',\)\)"
            ):
                op(x)
            assert x.tolist() == [1.0, 2.0]


def test_a_forward_that_changes_its_input_by_pytorch():
    op = _operator("by_pytorch", _by_pytorch)
    with cupyops.simulate(), pytest.raises(InputError, match=r"forward changes x in place.*work on x.clone\(\)"):
        op(torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("copied", [False, True])
def test_a_pointer_that_is_not_const_may_be_read(copied):
    op = _operator(f"reads_{copied}", _by(DOUBLED if copied else SQUARED, copied))
    with cupyops.simulate():
        for number in range(6):
            x = torch.tensor([1.0, 2.0 + number])
            assert op(x).tolist() == (4 * x * x).tolist()


def test_what_first_shows_later():
    """Twice nothing is nothing: a write is found while calls are recorded, too."""
    op = _operator("zeros", _by(DOUBLED))
    with cupyops.simulate():
        op(torch.zeros(2))
        with pytest.raises(InputError, match="writes to x"):
            op(torch.ones(2))


def test_a_backward_that_writes_its_gradient():
    op = _operator("backward", _by(SQUARED))

    @op.backward
    def backward(saved, grad_y, x):
        grad_x = torch.empty_like(x)
        SLOPE[1, 32](x, grad_y, grad_x, x.numel())
        return grad_x

    x, grad = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(2)
    with cupyops.simulate(), pytest.raises(InputError, match="writes to the gradient of an output"):
        torch.autograd.grad(op(x), x, grad)
    assert grad.tolist() == [1.0, 1.0]


@cupyops.operator("cupyops_schema::numbers")
def numbers(
    x: Tensor,
    n: int = 2,
    by: float = 1.0,
    flag: bool = False,
    name: str = "",
    most: int | None = None,
    sizes: list[int] = (),
    scales: list[float] | None = None,
) -> Tensor:
    return x * n * by


@numbers.forward
def _numbers(x, n, by, flag, name, most, sizes, scales):
    return x * n * by, ()


@pytest.mark.parametrize("route", ["reference", "kernels", "torch.func"])
@pytest.mark.parametrize(
    "given, message",
    [
        ({"n": 2.7}, "n is 2.7 (float), expected an int"),
        ({"n": "2"}, "n is '2' (str), expected an int"),
        ({"n": np.float32(2)}, "expected an int"),
        ({"by": "1"}, "by is '1' (str), expected a number"),
        ({"by": torch.tensor(1.0)}, "by is a tensor of shape (), torch.float32 on cpu, expected a number"),
        ({"flag": 2.0}, "flag is 2.0 (float), expected a bool"),
        ({"name": 3}, "name is 3 (int), expected a str"),
        ({"most": 1.5}, "most is 1.5 (float), expected an int or None"),
        ({"sizes": [1.5]}, "sizes is [1.5] (list), expected a list of ints"),
        ({"sizes": 3}, "sizes is 3 (int), expected a list of ints"),
        ({"sizes": None}, "sizes is None (NoneType), expected a list of ints"),
        ({"scales": ["1"]}, "scales is ['1'] (list), expected a list of numbers or None"),
    ],
)
def test_types_by_every_route(given, message, route):
    x = torch.ones(3)
    call = torch.func.vmap(lambda x: numbers(x, **given)) if route == "torch.func" else lambda x: numbers(x, **given)
    opened = cupyops.simulate() if route == "kernels" else contextlib.nullcontext()
    with opened, pytest.raises(CupyopsError) as error:
        call(x)
    assert message in str(error.value) and "cupyops_schema::numbers" in str(error.value)


@pytest.mark.parametrize(
    "given",
    [{"n": np.int64(3)}, {"n": True}, {"by": 2}, {"by": np.float32(2)}, {"flag": 1}, {"most": 3}]
    + [{"sizes": (1, 2)}, {"sizes": [np.int64(1)]}, {"sizes": torch.Size([2])}, {"scales": [1, 2.5]}, {"scales": None}],
)
def test_types_that_kernels_take(given):
    x = torch.ones(3)
    expected = numbers(x, **given)
    with cupyops.simulate():
        torch.testing.assert_close(numbers(x, **given), expected)
