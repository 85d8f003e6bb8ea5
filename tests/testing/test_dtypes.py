"""Outputs and gradients of every dtype are compared: right ones pass, and one wrong element is found."""

from __future__ import annotations

import pytest
import torch
from broken_operators import normal
from faulty_operators import saving

from cupyops.testing import Failure, Tolerance, check
from cupyops.testing.tolerance import computable, largest

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.tensor([complex(value, -value) for value in values], dtype=torch.complex128).to(dtype)
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_is_judged(dtype):
    right, wrong = of([0.0, 1.0, 2.0], dtype), of([0.0, 1.0, 0.0], dtype)
    truth = right.to(torch.complex128) if dtype.is_complex else right.double() if dtype.is_floating_point else right
    Tolerance().judge(right, right.clone(), truth, "output")
    with pytest.raises(Failure, match=r"^output: .*at \[2"):
        Tolerance().judge(wrong, right, truth, "output")
    assert largest(right) == (1.0 if dtype is torch.bool else 2.0)
    assert computable(right).shape[:1] == right.shape


def test_the_error_of_complex_numbers_and_of_float8_is_in_units_of_their_own():
    x = of([1.0], torch.complex64)
    near, far = x * (1 + 0.5e-7), x + 1e-6j
    Tolerance().judge(near, x, x.to(torch.complex128), "y")
    with pytest.raises(Failure, match="PyTorch's own in complex64"):
        Tolerance().judge(far, x, x.to(torch.complex128), "y")
    truth = torch.tensor([1.05], dtype=torch.float64)
    y = truth.to(torch.float8_e4m3fn)
    Tolerance().judge(y, y, truth, "y")
    with pytest.raises(Failure, match="PyTorch's own in float8_e4m3fn"):
        Tolerance().judge(torch.tensor([2.0]).to(y.dtype), y, truth, "y")


def to_float8(x):
    return x.to(torch.float8_e4m3fn)


SOUND = {
    "bool": (lambda x: x > 0, lambda x: x.gt(0), lambda: [normal(3, 7)]),
    "bool in and out": (lambda x: ~x, torch.logical_not, lambda: [normal(9).detach() > 0]),
    "integers": (lambda x: ~x, torch.bitwise_not, lambda: [torch.arange(9, dtype=torch.int32)]),
    "spectrum": (lambda x: torch.fft.rfft(x), torch.fft.rfft, lambda: [normal(3, 8)]),
    "complex": (
        lambda x, w: x * w,
        torch.mul,
        lambda: [torch.complex(normal(7).detach(), normal(7, seed=n).detach()).requires_grad_() for n in (1, 2)],
    ),
    "float8": (to_float8, lambda x: x.to(torch.float8_e4m3fn), lambda: [normal(3, 7)]),
    "float8 weights": (
        lambda q, scale: scale * q.to(scale.dtype),
        lambda q, scale: q.to(scale.dtype) * scale,
        lambda: [normal(9).detach().to(torch.float8_e5m2), normal(1)],
    ),
    "int8 weights": (
        lambda q, scale: scale * q,
        lambda q, scale: q * scale,
        lambda: [torch.arange(-4, 5, dtype=torch.int8), normal(1)],
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_hazard_fails_of_what_is_right(name):
    function, reference, args = SOUND[name]
    report = check(function, args(), reference=reference, progress=False, shrink=False)
    assert report.passed, f"\n{report}"
    assert next(row for row in report.rows if row.hazard == "accuracy").verdict == "pass"


@pytest.mark.parametrize("name", [name for name in SOUND if "weights" not in name])
def test_accuracy_fails_of_what_is_wrong(name):
    _, reference, args = SOUND[name]

    def wrong(*given):
        y = reference(*given).clone()
        with torch.no_grad():
            y.view(-1)[-1:] = (
                y.view(-1)[-1:].to(torch.complex64 if y.is_complex() else torch.float32).sub(3).to(y.dtype)
            )
        return ~y if y.dtype is torch.bool else y

    report = check(wrong, args(), reference=reference, only="accuracy", progress=False, shrink=False)
    assert [row.hazard for row in report.failures] == ["accuracy"]
    assert any(words in report.failures[0].reason for words in ("differ", "is allowed"))


# the gradient as if the numbers were real
loses_the_conjugate = saving(torch.mul, lambda grad, x, w: (grad * w, grad * x))


def test_a_complex_gradient_that_is_not_conjugated_is_found():
    args = SOUND["complex"][2]()
    report = check(loses_the_conjugate, args, reference=torch.mul, only="accuracy", progress=False, shrink=False)
    assert "gradient 0" in report.failures[0].reason
