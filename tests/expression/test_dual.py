"""Numbers with their derivative, in CUDA: each function of the language beside PyTorch's in float64."""

import pytest
import torch

import cupyops
from cupyops._expression.values import FORMS

F = torch.float64
OF_ONE = {
    name: getattr(torch, name, None)
    for name in [
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "floor", "ceil", "trunc",
        "abs",
    ]
} | {
    "rint": torch.round,
    "round": lambda x: torch.trunc(x + 0.5 * torch.sign(x)),
    "fabs": torch.abs,
    "exp10": lambda x: torch.pow(10.0, x),
    "normcdf": torch.special.ndtr,
}  # fmt: skip
OF_TWO = {name: getattr(torch, name) for name in ["pow", "fmax", "fmin", "atan2", "fmod", "hypot", "copysign"]} | {
    "max": torch.maximum,
    "min": torch.minimum,
}
OPERATORS = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "-x + !y": lambda x, y: -x,
    "x < y ? x : y * y": lambda x, y: torch.where(x < y, x, y * y),
    "x >= 2 ? x * 3 : 1": lambda x, y: torch.where(x >= 2, x * 3, 1.0),
    "2 * x - 1 / y": lambda x, y: 2 * x - 1 / y,
    "A(0.5) * x + 3": lambda x, y: 0.5 * x + 3,
    "x * (int)y": lambda x, y: x * y.trunc().detach(),
    "fma(x, y, 2)": lambda x, y: x * y + 2,
    "fma(3, y, x)": lambda x, y: 3 * y + x,
    "pow(x, 2)": lambda x, y: x**2,
    "pow(2, x)": lambda x, y: 2**x,
    "max(x, 1)": lambda x, y: x.clamp_min(1.0),
    "fmin(2, x)": lambda x, y: torch.fmin(torch.full_like(x, 2.0), x),
    "isnan(x) || signbit(x) ? 1 : x": lambda x, y: torch.where(x < 0, 1.0, x),
    "isinf(x / 0) && isfinite(x) ? x : y": lambda x, y: torch.where(x != 0, x, y),
}
CASES = (
    {f"{name}(x)": (lambda x, y, f=f: f(x)) for name, f in OF_ONE.items()}
    | {f"{name}(x, y)": f for name, f in OF_TWO.items()}
    | OPERATORS
)


@pytest.fixture(scope="module")
def computed():
    """(value, derivative by x, derivative by y) of each case, by one kernel."""
    functions = "\n".join(
        f"template <typename A> __device__ A case_{i}(A x, A y) {{ return {text}; }}" for i, text in enumerate(CASES)
    )
    lines = "\n".join(
        f"  put(case_{i}(Dual(a, 1), Dual(b)), case_{i}(Dual(a), Dual(b, 1)), out + {3 * i});"
        for i in range(len(CASES))
    )
    code = f"""
#include "common/elementwise/dual.cuh"
namespace expression {{
{functions}
__device__ void put(Dual by_x, Dual by_y, float* out) {{ out[0] = by_x.value, out[1] = by_x.slope, out[2] = by_y.slope; }}
__global__ void cases(const float* x, const float* y, float* out, int stride) {{
  const float a = x[threadIdx.x], b = y[threadIdx.x];
  out += threadIdx.x * stride;
{lines}
}}
}}  // namespace expression
"""
    points = [(0.3, 0.7), (1.7, 0.4), (2.5, -1.2), (0.6, 3.0), (-0.4, 1.5)]
    x, y = (torch.tensor(of) for of in zip(*points))
    out = torch.empty(len(points), len(CASES), 3)
    with cupyops.simulate("sm_80"):
        cupyops.Kernel(code, "expression::cases")[1, len(points)](x, y, out, 3 * len(CASES))
    return x, y, dict(zip(CASES, out.unbind(1)))


@pytest.mark.parametrize("text", CASES)
def test_values_and_derivatives(computed, text):
    x, y, found = computed
    wide = [one.to(F).requires_grad_() for one in (x, y)]
    value = CASES[text](*wide)
    grads = torch.autograd.grad(value.sum(), wide, allow_unused=True) if value.requires_grad else (None, None)
    expected = [value.detach(), *(torch.zeros(len(x), dtype=F) if one is None else one for one in grads)]
    for ours, right in zip(found[text].unbind(1), expected):
        torch.testing.assert_close(ours.to(F), right, rtol=3e-6, atol=3e-6, equal_nan=True)


def test_every_function_of_the_language():
    """Those that are not here are no part of what kernels differentiate."""
    assert {text.partition("(")[0] for text in CASES} >= set(FORMS) - {
        "lgamma", "isnan", "isinf", "isfinite", "signbit",
    }  # fmt: skip


def test_of_two_that_are_equal_the_mean():
    code = """
#include "common/elementwise/dual.cuh"
__global__ void equal(float* out) {
  using expression::Dual;
  out[0] = expression::max(Dual(1, 1), Dual(1)).slope, out[1] = expression::min(Dual(1, 1), 1).slope;
  out[2] = expression::abs(Dual(0, 1)).slope, out[3] = (0 * Dual(2, 1) + expression::sqrt(Dual(0))).slope;
}
"""
    out = torch.empty(4)
    with cupyops.simulate("sm_80"):
        cupyops.Kernel(code, "equal")[1, 1](out)
    assert out.tolist() == [0.5, 0.5, 0, 0]


def test_what_stands_still_and_what_is_flat():
    """An infinite derivative counts where a number moves, though its slope is 0, and nowhere else: as PyTorch has it."""
    code = """
#include "common/elementwise/dual.cuh"
__global__ void moving(float* out, float zero, float inf) {
  using expression::Dual;
  Dual x(inf, 1), still(zero), sum = still;
  sum += 2 * x, sum -= x, sum *= 3, sum /= 2;
  out[0] = (x * expression::sigmoid(x)).slope, out[1] = (x * still).slope, out[2] = (still + still / zero * 2).slope;
  out[3] = sum.slope, out[4] = (x++).value, out[5] = (--x).slope;
}
"""
    out = torch.empty(6)
    with cupyops.simulate("sm_80"):
        cupyops.Kernel(code, "moving")[1, 1](out, 0.0, float("inf"))
    x = torch.tensor(float("inf"), requires_grad=True)
    (silu,) = torch.autograd.grad(x * torch.sigmoid(x), x)
    torch.testing.assert_close(out, torch.tensor([silu.item(), 0.0, 0.0, 1.5, float("inf"), 1.0]), equal_nan=True)
