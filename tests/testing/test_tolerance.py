"""How far off a result may be: the model itself, at its borders."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from broken_operators import normal

from cupyops.testing import Call, Failure, Tolerance
from cupyops.testing.case import Case
from cupyops.testing.target import Target
from cupyops.testing.tolerance import largest, same_form, same_special_values

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ULPS = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 1.0, torch.float64: 16.0}


def judged(ours, theirs, truth, **options):
    """ "" where ours will do, else what is wrong with it."""
    try:
        Tolerance(**options.pop("tolerance", {})).judge(ours, theirs, truth, "y", **options)
    except Failure as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_twice_the_error_of_pytorch_and_the_units(dtype, steps):
    """The truth is 1, PyTorch so many steps above it; all numbers here are exact, so the border is."""
    eps = torch.finfo(dtype).eps
    truth = torch.tensor([1.0, 0.5], dtype=torch.float64)
    theirs = torch.tensor([1.0 + steps * eps, 0.5], dtype=dtype)
    allowed = 2 * steps + int(ULPS[dtype])
    within = torch.tensor([1.0 + allowed * eps, 0.5], dtype=dtype)
    outside = torch.tensor([1.0 + (allowed + 1) * eps, 0.5], dtype=dtype)
    assert Tolerance().allowed(theirs, truth) == allowed * eps
    assert judged(within, theirs, truth) == ""
    assert judged(outside, theirs, truth).startswith(
        f"y: error {(allowed + 1) * eps:.3g} where {allowed * eps:.3g} is allowed"
    )
    elsewhere = torch.tensor([1.0, 0.5 + allowed * eps], dtype=dtype)  # the largest value counts for all
    assert judged(elsewhere, theirs, truth) == ""


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_units_scale_with_the_largest_value(dtype):
    eps, scale = torch.finfo(dtype).eps, 2.0**-9
    truth = torch.tensor([scale], dtype=torch.float64)
    theirs = truth.to(dtype)
    assert Tolerance().units(dtype, scale) == ULPS[dtype] * eps * scale
    assert judged(theirs * (1 + ULPS[dtype] * eps), theirs, truth) == ""
    assert judged(theirs * (1 + (ULPS[dtype] + 1) * eps), theirs, truth) != ""


def test_of_zeros_the_smallest_normal_number_is_the_scale():
    truth = torch.zeros(3, dtype=torch.float64)
    theirs = torch.zeros(3)
    info = torch.finfo(torch.float32)
    allowed = info.eps * info.tiny
    assert Tolerance().allowed(theirs, truth) == allowed
    assert judged(torch.full((3,), allowed), theirs, truth) == ""
    assert judged(torch.full((3,), 2 * allowed), theirs, truth) != ""


def test_factor_and_units_can_be_chosen():
    eps = torch.finfo(torch.float32).eps
    truth, theirs = torch.ones(1, dtype=torch.float64), torch.tensor([1 + 2 * eps])
    ours = torch.tensor([1 + 7 * eps])
    assert judged(ours, theirs, truth) != ""
    assert judged(ours, theirs, truth, tolerance={"factor": 3.0}) == ""
    assert judged(ours, theirs, truth, tolerance={"ulps": {torch.float32: 3.0}}) == ""
    assert judged(ours, theirs, truth, tolerance={"factor": 0.0, "ulps": {torch.float32: 6.5}}) != ""
    assert Tolerance(ulps={}).units(torch.float32, 1.0) == eps  # one unit, for a dtype that is not named


def test_slack_and_an_error_let_pass():
    eps = torch.finfo(torch.float32).eps
    truth, theirs = torch.ones(1, dtype=torch.float64), torch.ones(1)
    ours = torch.tensor([1 + 4 * eps])
    assert Tolerance().excess(ours, theirs, truth) == 4
    assert judged(ours, theirs, truth, slack=4.0) == ""
    assert judged(ours, theirs, truth, slack=3.99) != ""
    assert judged(ours, theirs, truth, extra=4 * eps) == ""
    assert judged(ours, theirs, truth, extra=math.nextafter(4 * eps, 0)) != ""


def test_an_exact_result_has_no_excess():
    truth = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    assert Tolerance().excess(truth.float(), truth.float(), truth) == 0
    assert Tolerance().excess(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.float64)) == 0


def test_the_message_has_the_worst_place():
    truth = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    theirs = truth.float()
    ours = theirs.clone()
    ours[0, 1], ours[1, 0] = 2.5, 4.0
    assert judged(ours, theirs, truth) == (
        "y: error 1 where 4.77e-07 is allowed (PyTorch's own in float32: 0); at [1, 0] 4, PyTorch 3, exact 3"
    )


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], ""),
        ([1.0, NAN], [1.0, 2.0], "y: at [1] nan, PyTorch 2; 1 of 2 differ"),
        ([1.0, 2.0], [1.0, NAN], "y: at [1] 2, PyTorch nan; 1 of 2 differ"),
        ([INF, INF], [INF, -INF], "y: at [1] inf, PyTorch -inf; 1 of 2 differ"),
        ([NAN, NAN], [INF, -INF], "y: at [0] nan, PyTorch inf; 2 of 2 differ"),
        ([INF], [3e38], "y: at [0] inf, PyTorch 3e+38; 1 of 1 differ"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_infinities_stand_in_the_same_places(ours, theirs, message, dtype):
    a, b = (torch.tensor(values, dtype=dtype) for values in (ours, theirs))
    assert judged(a, b, b.double()) == message
    if not message:
        same_special_values(a, b, "y")


def test_beside_what_is_not_finite_the_rest_is_judged():
    theirs = torch.tensor([INF, NAN, 1.0])
    ours = torch.tensor([INF, NAN, 1.5])
    assert "error 0.5" in judged(ours, theirs, theirs.double())
    assert "at [2] 1.5, PyTorch 1" in judged(ours, theirs, theirs.double())
    assert largest(theirs) == 1.0
    assert largest(torch.tensor([NAN, INF])) == largest(torch.empty(0)) == 0.0


def test_where_nothing_is_finite_only_the_places_count():
    theirs = torch.tensor([INF, NAN])
    assert judged(theirs.clone(), theirs, theirs.double()) == ""


def test_where_pytorch_overflows_and_the_truth_does_not():
    """PyTorch's answer counts, since it is what is expected in that dtype."""
    theirs, truth = torch.tensor([INF, 1.0], dtype=torch.float16), torch.tensor([7e4, 1.0], dtype=torch.float64)
    assert judged(theirs.clone(), theirs, truth) == ""
    assert judged(torch.tensor([65504.0, 1.0], dtype=torch.float16), theirs, truth) != ""


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_the_same(dtype):
    theirs = torch.tensor([0, 1, 1]).to(dtype)
    ours = torch.tensor([0, 1, 0]).to(dtype)
    assert judged(theirs.clone(), theirs, theirs) == ""
    assert judged(ours, theirs, theirs).startswith("y: at [2] ")
    assert judged(ours, theirs, theirs, slack=1e9, extra=1e9) != ""
    assert Tolerance().units(dtype, 100.0) == 0.0


def test_large_integers_are_shown_in_full():
    theirs = torch.tensor([2**53 + 1, 123456789])
    ours = torch.tensor([2**53, 123456789])
    assert judged(ours, theirs, theirs) == "y: at [0] 9007199254740992, PyTorch 9007199254740993; 1 of 2 differ"


def test_booleans_are_shown_as_such():
    a, b = torch.tensor([True, False]), torch.tensor([True, True])
    assert judged(a, b, b) == "y: at [1] False, PyTorch True; 1 of 2 differ"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_two_real_ones(dtype):
    theirs = torch.tensor([1 + 1j, 2 - 3j], dtype=dtype)
    truth = theirs.to(torch.complex128)
    assert judged(theirs.clone(), theirs, truth) == ""
    assert judged(theirs.conj().conj(), theirs, truth) == ""
    assert "at [1, 1] 3, PyTorch -3" in judged(theirs.conj(), theirs, truth)
    assert "at [0, 1] nan" in judged(torch.tensor([complex(1, NAN), 2 - 3j], dtype=dtype), theirs, truth)


def test_a_difference_of_form():
    x = torch.zeros(2, 3)
    assert judged(torch.zeros(3, 2), x, x.double()) == "y: shape (3, 2), PyTorch's is (2, 3)"
    assert judged(torch.zeros(6), x, x.double()) == "y: shape (6,), PyTorch's is (2, 3)"
    assert judged(x.half(), x, x.double()) == "y: dtype float16, PyTorch's is float32"
    assert judged(x.long(), x, x.double()) == "y: dtype int64, PyTorch's is float32"
    assert judged(x.to("meta"), x, x.double()) == "y: device meta, PyTorch's is cpu"
    assert judged(torch.zeros(0, 3), torch.zeros(0, 4), torch.zeros(0, 4)) == "y: shape (0, 3), PyTorch's is (0, 4)"
    same_form(x, x.t().contiguous().t(), "y")  # strides are another hazard's


def test_empty_tensors_and_single_numbers():
    for dtype in (torch.float32, torch.int64, torch.complex64):
        empty = torch.empty(0, 3, dtype=dtype)
        assert judged(empty.clone(), empty, empty) == ""
    one, other = torch.tensor(1.0), torch.tensor(1.5)
    assert judged(one, one, one.double()) == ""
    assert "at [] 1.5, PyTorch 1, exact 1" in judged(other, one, one.double())
    assert judged(torch.tensor(3), torch.tensor(4), torch.tensor(4)) == "y: at [] 3, PyTorch 4; 1 of 1 differ"


def test_tensors_that_want_a_gradient():
    x = normal(3)
    assert judged(x * 1.0, x * 1.0, x.double()) == ""
    assert "error" in judged(x + 1.0, x * 1.0, x.double())


def unlucky(x):
    """Off by six parts in 2^24, except that it is exact where the first value is 1."""
    off = 1 if x.dtype == torch.float64 or float(x.detach().flatten()[0]) == 1.0 else 1 + 6 * 2.0**-24
    return x * off


def case_of(function, x):
    return Case(Target(function, unlucky, None, "f"), Call(x), "reference", Tolerance())


def test_a_reference_that_is_exact_by_luck_is_asked_nearby():
    """As far off as the reference commonly is will do, and four times that will not."""
    lucky = torch.tensor([1.0, 1.9])
    for factor, sound in ((6, True), (12, True), (40, False)):
        case = case_of(lambda x, factor=factor: x * (1 + factor * 2.0**-24), lucky)
        theirs, truth = case.expected(case.call)
        ours = case.both_ways(case.call)
        with pytest.raises(Failure):
            case.compare(ours, theirs, truth, lenient=False)  # by this one call alone it is too far off
        if sound:
            case.judge(ours, case.call, lenient=False)
        else:
            with pytest.raises(Failure, match=r"error 4\.\d+e-06 where"):
                case.judge(ours, case.call, lenient=False)


def inexact(x):
    """Off by forty units in the last place of any dtype."""
    return x * (1 + 40 * torch.finfo(x.dtype).eps)


def test_in_float64_a_reference_has_the_units_that_it_has_in_float32():
    """Where it is the truth: what it is off by there, twice, and the sixteen units will do."""
    x = torch.tensor([1.0, 1.9], dtype=torch.float64)
    for units, sound in ((0, True), (-40, True), (130, True), (-80, False), (200, False)):
        ours = lambda x, units=units: x * (1 + units * torch.finfo(x.dtype).eps)
        case = Case(Target(ours, inexact, None, "f"), Call(x), "reference", Tolerance())
        with nullcontext() if sound else pytest.raises(Failure, match="error"):
            case.judge(case.both_ways(case.call), case.call, lenient=False)


def test_a_reference_that_has_no_float32():
    def only_float64(x):
        if x.dtype is not torch.float64:
            raise TypeError("no float32")
        return x

    x = torch.tensor([1.0, 1.9], dtype=torch.float64)
    for units, sound in ((16, True), (40, False)):
        ours = lambda x, units=units: x * (1 + units * torch.finfo(x.dtype).eps)
        case = Case(Target(ours, only_float64, None, "f"), Call(x), "reference", Tolerance())
        with nullcontext() if sound else pytest.raises(Failure, match="error"):
            case.judge(case.both_ways(case.call), case.call, lenient=False)


@pytest.mark.parametrize("factor, sound", [(1.0, True), (0.5, False)])
def test_what_equals_the_reference_has_its_error(factor, sound):
    rough = lambda x: x if x.dtype is torch.float64 else x + 2.0**-10
    case = Case(Target(rough, rough, None, "f"), Call(torch.tensor([1.0, 1.9])), "reference", Tolerance(factor))
    with nullcontext() if sound else pytest.raises(Failure, match="error"):
        case.judge(case.both_ways(case.call), case.call, lenient=False)


def test_luck_does_not_excuse_another_shape_or_nan():
    for function, message in ((lambda x: x[:1], "shape"), (lambda x: x * NAN, "nan")):
        case = case_of(function, torch.tensor([1.0, 1.9]))
        with pytest.raises(Failure, match=message):
            case.judge(case.both_ways(case.call), case.call, lenient=False)


def test_the_slack_of_a_plain_call_that_is_wrong():
    """Other hazards measure by it: eight times as far off as the plain call is let pass, more is not."""
    x = torch.tensor([1.0, 1.5])
    case = case_of(lambda x: x + 2.0**-10, x)
    units = 1.5 * torch.finfo(torch.float32).eps
    assert case.slack == {"output": pytest.approx(8 * 2.0**-10 / units, rel=1e-3)}
    assert case.excused("output") == pytest.approx(8 * 2.0**-10)
    plain = case.both_ways(case.call)
    for extra, sound in ((0.0, True), (6.9 * 2.0**-10, True), (7.1 * 2.0**-10, False)):
        plain.outputs = [x + 2.0**-10 + extra]
        if sound:
            case.compare(plain, *case.expected(case.call))
        else:
            with pytest.raises(Failure):
                case.compare(plain, *case.expected(case.call))
    with pytest.raises(Failure):
        case.judge(case.both_ways(case.call), case.call, lenient=False)


def test_a_variant_with_smaller_values_is_excused_as_much():
    """A fault of a constant size stays one fault, however small the variant's values."""
    case = case_of(lambda x: x + 0.5, torch.tensor([1.0, 1.5]))
    small = Call(torch.tensor([1e-30, 1e-30]))
    case.judge(case.both_ways(small), small)


def test_a_sound_plain_call_has_no_slack():
    case = case_of(lambda x: x.clone(), torch.tensor([1.0, 1.5]))
    assert case.slack == {"output": 1.0} and case.excused("output") == 0.0
