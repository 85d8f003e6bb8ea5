"""What passes where no kernel ran says nothing of kernels: no row passes by it, and no report."""

from __future__ import annotations

import json

import pytest
import torch
import toys
from broken_operators import normal

import cupyops
from cupyops.testing import Hazard, OperatorTester, check

SOURCE = """
extern "C" __global__ void wrong(const int* x, int* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = 12345;
}
extern "C" __global__ void halve(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] / 2;
}
"""
WRONG, HALVE = cupyops.Kernel(SOURCE, "wrong"), cupyops.Kernel(SOURCE, "halve")
ONLY = ["accuracy", "storage_offset", "size_one"]


def inverse(**options):
    @cupyops.operator(toys.fresh(), **options)
    def op(x: torch.Tensor) -> torch.Tensor:
        return ~x

    @op.forward
    def _(x):
        y = torch.empty_like(x)
        if x.numel():
            WRONG[1, 32](x.contiguous(), y, x.numel())
        return y, ()

    return op


def halving():
    @cupyops.operator(toys.fresh(), dtypes=torch.float32)
    def op(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @op.forward
    def _(x):
        y = torch.empty_like(x)
        if x.numel():
            HALVE[cupyops.ceil_div(x.numel(), 256), 256](x.contiguous(), y, x.numel())
        return y, ()

    return op


def rows_of(report, backend="simulator"):
    return {row.hazard: (row.verdict, row.reason) for row in report.rows if row.backend == backend}


INTEGERS = torch.arange(7, dtype=torch.int32)


def test_a_wrong_kernel_of_integers_is_seen():
    report = check(inverse(), [INTEGERS], progress=False, shrink=False, backends=["reference", "simulator"])
    assert [(row.hazard, row.backend) for row in report.failures] == [("accuracy", "simulator")], f"\n{report}"
    assert "12345" in report.failures[0].reason


def test_one_that_never_runs_has_not_passed():
    op = inverse(dtypes=torch.float32)
    report = check(op, [INTEGERS], progress=False, backends=["reference", "simulator"])
    assert not report.failures and not report.passed
    assert {verdict for verdict, _ in rows_of(report).values()} == {"n/a"}
    assert rows_of(report)["accuracy"] == ("n/a", "no kernel ran: no kernel for torch.int32")
    assert report.summary().endswith("; not passed: no kernel was seen at work: no kernel for torch.int32")
    folded = [row for row in report.folded() if row.hazard.startswith("accuracy") and row.backend == "simulator"]
    assert [" more" in row.hazard for row in folded] == [True]
    with pytest.raises(AssertionError, match="no kernel was seen at work"):
        report.raise_if_failed()
    assert json.loads(report.to_json())["unseen"] == "no kernel for torch.int32"


def test_whoever_asks_for_the_reference_alone_asks_for_no_kernel():
    assert check(inverse(dtypes=torch.float32), [INTEGERS], progress=False, backends="reference", only=ONLY).passed


def test_a_row_whose_calls_take_the_reference_does_not_pass_by_the_plain_call():
    report = check(halving(), [normal(3, 5)], progress=False, only=["accuracy", "dtypes"], backends="simulator")
    assert rows_of(report) == {
        "accuracy": ("pass", ""),
        "dtypes": ("n/a", "no kernel ran here: these calls take the reference"),
    }
    assert report.passed


def test_where_an_error_or_nothing_is_right_no_launch_is_asked_for():
    """An empty call launches nothing, and is right; a sample call may be one."""
    report = check(halving(), [normal(3, 5)], progress=False, only=["empty", "meta_tensors"], backends="simulator")
    assert rows_of(report) == {"empty": ("pass", ""), "meta_tensors": ("pass", "")}
    OperatorTester(halving(), backends="simulator").test_forward([(0, 3)])


def test_an_operator_without_kernels_has_not_passed_unless_that_is_asked_for():
    @cupyops.operator(toys.fresh())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    report = check(triple, [normal(3)], only="accuracy", progress=False)
    if not torch.cuda.is_available():
        assert report.summary().endswith("; not passed: no kernel was seen at work: the operator has none")
    assert (
        not report.passed and check(triple, [normal(3)], only="accuracy", progress=False, backends="reference").passed
    )


def test_a_plain_function_is_judged_as_it_is():
    assert check(torch.relu, [normal(3)], reference=torch.relu, only="accuracy", progress=False).passed
    report = check(torch.relu, [normal(3)], reference=torch.relu, only="accuracy", backends="simulator", progress=False)
    assert not report.passed and rows_of(report)["accuracy"] == ("n/a", "no kernel ran: the call launches nothing")


@pytest.fixture
def interrupted_in_the_second(monkeypatch):
    def fine(case):
        pass

    def interrupts(case):
        raise KeyboardInterrupt

    backends = ("reference", "simulator", "gpu")
    made = {one.__name__: Hazard(one.__name__, "", one, backends, launches=False) for one in (fine, interrupts)}
    monkeypatch.setattr("cupyops.testing.checker.hazards", lambda: made)


def test_ctrl_c_leaves_the_rows_until_then(interrupted_in_the_second):
    with pytest.raises(KeyboardInterrupt) as found:
        check(torch.relu, [normal(3)], reference=torch.relu, progress=False)
    assert isinstance(found.value, cupyops.testing.Interrupted)
    report = found.value.report
    assert [(row.hazard, row.verdict) for row in report.rows] == [("fine", "pass")]
    assert report.interrupted and not report.passed
    assert str(found.value) == str(report) and report.summary().endswith("; not passed: interrupted")


def test_before_the_first_row(monkeypatch):
    def interrupts(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("cupyops.testing.checker._case", interrupts)
    with pytest.raises(
        cupyops.testing.Interrupted, match="0 passed, 0 failed, 0 not applicable; not passed: interrupted"
    ):
        check(torch.relu, [normal(3)], reference=torch.relu, progress=False)
