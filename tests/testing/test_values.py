"""Hazards of values: each catches an operator with that fault alone."""

import pytest
import torch
from broken_operators import Broken, classes, normal

import cupyops
from cupyops.testing import check


def slightly_off(x):
    return torch.tanh(x) * (1 + 2.0**-10)


def adds_up_in_half(x):
    if x.dtype.itemsize > 2 or torch.is_autocast_enabled("cpu"):  # under autocast another hazard would tell of it too
        return x.sum(-1)
    total = torch.zeros_like(x[..., 0])
    for column in range(x.shape[-1]):
        total = total + x[..., column]
    return total


def returns_the_first_dtype(x, weight):
    return (x * weight).to(x.dtype) if x.dtype.is_floating_point else x * weight


def rounds_to_the_integers_it_was_given(x):
    return torch.sigmoid(x if x.dtype.is_floating_point else x.float()).to(x.dtype)


def drops_nan(x):
    return torch.fmax(x, torch.zeros((), dtype=x.dtype, device=x.device))


def flushes_denormals(x):
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0, x) * 0.5


def loses_the_sign_of_zero(x):
    return x * 0.5 + 0.0


def masks_rows_that_are_all_minus_infinity(x):
    return torch.where((x == -float("inf")).all(-1, keepdim=True), 0, torch.softmax(x, -1))


def overflows_in_the_middle(x):
    return (x.exp() / x.exp().sum(-1, keepdim=True)).contiguous()


def clamps_indices(x, index):
    return x.gather(-1, index.clamp(0, x.shape[-1] - 1))


HALVED = (lambda x: x * 0.5, lambda: [normal(3, 37)])
SOFTMAX = (lambda x: torch.softmax(x, -1), lambda: [normal(3, 37)])

BROKEN = {
    "accuracy": Broken(slightly_off, torch.tanh, lambda: [normal(3, 37)]),
    "dtypes": Broken(adds_up_in_half, lambda x: x.sum(-1), lambda: [normal(3, 200)]),
    "mixed_dtypes": Broken(returns_the_first_dtype, torch.mul, lambda: [normal(3, 37), normal(37, seed=1)]),
    "integer_inputs": Broken(rounds_to_the_integers_it_was_given, torch.sigmoid, lambda: [normal(3, 37)]),
    "special_values: NaN": Broken(drops_nan, torch.relu, lambda: [normal(3, 37)]),
    "special_values: denormals": Broken(flushes_denormals, *HALVED),
    "special_values: zero": Broken(loses_the_sign_of_zero, *HALVED),
    "special_values: masked row": Broken(masks_rows_that_are_all_minus_infinity, *SOFTMAX),
    "special_values: huge": Broken(overflows_in_the_middle, *SOFTMAX, also=("approximations",)),
    "indices": Broken(
        clamps_indices, lambda x, index: x.gather(-1, index), lambda: [normal(3, 37), classes(3, 5, high=37)]
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_caught(fault):
    BROKEN[fault].assert_caught_by(fault.partition(":")[0])


def test_float64_in_float_is_found():
    row = found(lambda x: torch.tanh(x.float()).to(x.dtype), torch.tanh, "dtypes")
    assert row.verdict == "fail" and row.reason.startswith("float64: output: error")


def test_memory_taken_for_another_dtype_is_found():
    """Where the reference refuses, an answer must be right all the same."""

    def reads_bits(x, weight):
        return x @ (weight if weight.dtype == x.dtype else weight.detach().view(torch.int16).to(x.dtype))

    args = [normal(3, 8), normal(8, 4, seed=1)]
    row = check(reads_bits, args, reference=torch.matmul, only="mixed_dtypes", shrink=False).rows[0]
    assert row.verdict == "fail" and "PyTorch refuses this" in row.reason


def test_a_refusal_is_no_failure():
    def only_float32(x):
        if x.dtype != torch.float32:
            raise TypeError(f"x is {x.dtype}, expected float32")
        return torch.tanh(x)

    row = found(only_float32, torch.tanh, "dtypes")
    assert row.verdict == "n/a"
    assert found(only_float32, torch.tanh, "integer_inputs").verdict == "pass"


def test_a_wild_read_is_no_refusal():
    """What the simulator finds in a kernel is a failure, though it is an error too."""
    source = """
    extern "C" __global__ void pick(const float* x, const long long* index, float* y, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = x[index[i]];
    }"""
    kernel = cupyops.Kernel(source, "pick")

    @cupyops.operator("test_values::pick")
    def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]

    @pick.forward
    def _(x, index):
        y = x.new_empty(index.shape)
        kernel[1, 32](x.contiguous(), index.contiguous(), y, index.numel())
        return y, ()

    args = [normal(7, requires_grad=False), classes(5, high=7)]
    report = check(pick, args, only="indices", backends="simulator", shrink=False)
    assert report.failures and "OutOfBounds" in report.failures[0].reason


def test_gradients_of_nan_and_of_infinity_are_free():
    """inf - inf may come of another order of the same product; the gradient of NaN is of no one's making."""
    row = found(lambda x: x * torch.sigmoid(x) * 1.0, torch.nn.functional.silu, "special_values")
    assert row.verdict == "pass", row.reason


def found(function, reference, hazard):
    return check(function, [normal(3, 37)], reference=reference, only=hazard, shrink=False).rows[0]
