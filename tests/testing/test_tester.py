"""`OperatorTester`: forward, backward and everything, over shapes and dtypes."""

from __future__ import annotations

import warnings

import pytest
import torch
from faulty_operators import DOUBLE, doubling, saving

import cupyops
from cupyops import InputError
from cupyops.testing import OperatorTester, Report, Tolerance, hazards
from cupyops.testing.tester import SHAPES

wrong_backward = saving(torch.relu, lambda grad_y, x: grad_y * (x > 0) * 1.01)


def wrong_when_long(x):
    return torch.relu(x) + (0.5 if x.dim() and x.shape[-1] > 4 else 0.0)


def wrong_in_half(x):
    return torch.relu(x) * (1.5 if x.dtype == torch.float16 else 1.0)


def wrong_when_transposed(x):
    return torch.relu(x) + (0.0 if x.is_contiguous() else 0.5)


def told(reports):
    """(call, dtypes of the hazards' rows...) of each report."""
    return [(report.call, [(row.hazard, row.backend, row.verdict) for row in report.rows]) for report in reports]


def test_a_sound_function():
    tester = OperatorTester(torch.relu, torch.relu)
    for reports in (tester.test_forward([(3, 5), (0, 3), ()]), tester.test_backward([(3, 5), (0, 3), ()])):
        assert all(isinstance(report, Report) and report.passed for report in reports)
        assert told(reports) == [
            (call, [("accuracy", "reference", "pass")]) for call in ("(3, 5):(5, 1)", "(0, 3):(3, 1)", "():()")
        ]


def test_an_operator_on_every_backend_that_is_here():
    (report,) = OperatorTester(cupyops.relu).test_backward([(3, 5)])
    assert [row.backend for row in report.rows][:2] == ["reference", "simulator"]
    (report,) = OperatorTester(cupyops.relu, backends="simulator").test_backward([(3, 5)])
    assert [row.backend for row in report.rows] == ["simulator"]


def test_forward_does_not_judge_gradients_and_backward_does():
    tester = OperatorTester(wrong_backward, torch.relu)
    tester.test_forward([(3, 5)])
    with pytest.raises(AssertionError, match="gradient 0: error"):
        tester.test_backward([(3, 5)])


def test_all_that_failed_is_raised_together():
    tester = OperatorTester(wrong_when_long, torch.relu)
    with pytest.raises(AssertionError) as caught:
        tester.test_forward([(3,), (5,), (2, 6)])
    reports = str(caught.value).split("\n\n")
    assert [report.splitlines()[0] for report in reports] == [
        "wrong_when_long((5,):(1,))  seed 0",
        "wrong_when_long((2, 6):(6, 1))  seed 0",
    ]
    assert all("reproduce: cupyops.testing.check(" in report for report in reports)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_the_dtype(dtype):
    seen = set()

    def watched(x):
        seen.add(x.dtype)
        return torch.relu(x)

    OperatorTester(watched, torch.relu).test_forward([(3,)], dtype)
    assert seen == {dtype}
    tester = OperatorTester(wrong_in_half, torch.relu)
    if dtype == torch.float16:
        with pytest.raises(AssertionError):
            tester.test_backward([(3,)], dtype)
    elif dtype.is_floating_point:
        tester.test_backward([(3,)], dtype)


def test_the_simulator_finds_a_broken_kernel():
    broken = doubling("tester_broken", DOUBLE.replace("2.0f", "2.5f"))
    tester = OperatorTester(broken, backends=["reference", "simulator"])
    with pytest.raises(AssertionError, match=r"accuracy  reference  pass\naccuracy  simulator  fail"):
        tester.test_forward([(3,)])


def test_several_tensors_are_not_the_same():
    tester = OperatorTester(torch.sub, torch.sub)
    (report,) = tester.test_backward([[(3, 5), (5,)]])
    assert report.call == "(3, 5):(5, 1), (5,):(1,)"
    assert [shape.call for shape in tester.test_forward([[(2,), (2,)], ((1,), (4,))])] == [
        "(2,):(1,), (2,):(1,)",
        "(1,):(1,), (4,):(1,)",
    ]
    with pytest.raises(AssertionError, match="error"):
        OperatorTester(torch.sub, torch.rsub).test_forward([[(3,), (3,)]])


def test_arguments_and_keyword_arguments():
    tester = OperatorTester(
        torch.softmax, torch.nn.functional.softmax, arguments=lambda x: (x, 1), kwargs={"dtype": torch.float64}
    )
    (report,) = tester.test_backward([(3, 5)])
    assert report.call == "(3, 5):(5, 1), 1, dtype=torch.float64"


def test_a_shape_that_the_reference_refuses_is_no_success():
    tester = OperatorTester(torch.softmax, torch.softmax, arguments=lambda x: (x, 1))
    with pytest.raises(
        InputError, match="^the reference refuses: IndexError: .*; the sample call must be one that it takes$"
    ):
        tester.test_forward([(3, 5), (3,)])


def test_no_shapes_are_no_success():
    tester = OperatorTester(torch.relu, torch.relu)
    for attempt in (lambda: tester.test_forward([]), lambda: tester.test_all([]), lambda: tester.test_all(dtypes=[])):
        with pytest.raises(InputError, match="^shapes and dtypes are empty, expected some$"):
            attempt()


def test_a_function_without_a_reference_is_refused_at_once():
    with pytest.raises(InputError, match="give reference="):
        OperatorTester(wrong_backward)


def test_tolerance_and_seed():
    off = lambda x: torch.relu(x) * (1 + 4e-7)
    with pytest.raises(AssertionError, match="seed 3\n"):
        OperatorTester(off, torch.relu, seed=3).test_forward([(3,)])
    wide = Tolerance(ulps={torch.float32: 8.0})
    assert OperatorTester(off, torch.relu, tolerance=wide, seed=3).test_forward([(3,)])[0].seed == 3


def test_all_tries_every_dtype_for_accuracy_and_the_first_for_every_hazard():
    tester = OperatorTester(torch.relu, torch.relu)
    reports = tester.test_all([(3, 5), (7,)], [torch.float32, torch.float16], skip=["compile_dynamic", "export"])
    counts = [(report.call, len(report.rows)) for report in reports]
    short, long = "(7,):(1,)", "(3, 5):(5, 1)"
    assert counts == [
        (long, 1), (long, 1), (short, 1), (short, 1), *((call, len(hazards()) - 2) for call in (long, short)),
    ]  # fmt: skip


def test_all_finds_what_is_not_in_the_plain_call():
    tester = OperatorTester(wrong_when_transposed, torch.relu)
    tester.test_backward([(3, 5)])
    with pytest.raises(AssertionError, match="transposed +reference +fail"):
        tester.test_all([(3, 5)], [torch.float32], only=["strided", "transposed"])
    with pytest.raises(AssertionError, match="error .* where"):
        OperatorTester(wrong_in_half, torch.relu).test_all([(3, 5)], only="strided")


def test_the_usual_shapes_are_those_that_the_reference_takes():
    def calls(tester):
        reports = tester.test_all(dtypes=[torch.float32], only="accuracy")
        assert len(reports) == 2 * len({report.call for report in reports})
        return [report.call.partition(":")[0] for report in reports][: len(reports) // 2]

    assert calls(OperatorTester(torch.relu, torch.relu)) == [str(shape) for shape in SHAPES]
    with_dim_1 = OperatorTester(torch.softmax, torch.softmax, arguments=lambda x: (x, 1))
    assert calls(with_dim_1) == ["(3, 33)", "(2, 3, 4)", "(1, 1)", "(0, 3)"]
    assert len(calls(OperatorTester(cupyops.add, backends="reference"))) == len(SHAPES)


def test_a_function_that_takes_none_of_the_usual_shapes():
    tester = OperatorTester(torch.linalg.det, torch.linalg.det, arguments=lambda x: (x.view(11, 11, 11),))
    with pytest.raises(InputError, match=r"det takes none of \(7,\), .*; give test_all the shapes$"):
        tester.test_all()


class TestOfSomebody(OperatorTester):
    """Its methods are named as tests are; pytest is to leave it alone."""


def test_pytest_does_not_collect_it(request):
    collected = {node.name: node for node in request.node.getparent(pytest.Module).collect()}
    assert "OperatorTester" not in collected and "test_a_sound_function" in collected
    with warnings.catch_warnings(action="error"):
        assert collected["TestOfSomebody"].collect() == []
