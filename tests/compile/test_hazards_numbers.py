"""Hazards of numbers: widths of integers, rounding, NaN, infinities and zeros, reductions of nothing, ties, promotion."""

import pytest
import torch
import torch.nn.functional as F
from compiled import assert_as_eager, traced

import cupyops

INF, NAN = float("inf"), float("nan")
HALF = torch.bfloat16
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 88.0, -104.0, 1e30, -1e30, 1e-40]


def limits(dtype):
    """Numbers of an integer dtype: the lowest, the highest and what is around zero."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor(
        [low, low + 1, 0, 1, 2, 3, 7, high // 2, high - 1, high] + ([-1, -2, -7] if low else []), dtype=dtype
    )


def special(dtype=torch.float32, grad=False):
    return torch.tensor(SPECIAL, dtype=dtype, requires_grad=grad)


def rand(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 3)).to(dtype).requires_grad_(grad)


def pairs(dtype):
    a = limits(dtype)
    return a[:, None].expand(-1, len(a)).contiguous(), a[None].expand(len(a), -1).contiguous()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_each_integer_wraps_at_its_own_width_after_each_operation(dtype):
    def function(a, b):
        most = torch.iinfo(dtype).max
        wrapped = a + b, a - b, a * b, -a, a.abs(), a.square(), a - 5, a * most, torch.add(a, b, alpha=3)
        return (
            *wrapped,
            (a + b).long(),
            (a - b).float(),
            (a * b) > 0,
            (a - 1).sum(),
            (a + a).amax(),
            (a + most).double(),
        )

    assert_as_eager(function, [*pairs(dtype)], dynamo=False, bits=True)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_divided_shifted_and_rounded_as_integers(dtype):
    def function(a, b):
        divided = [op(a, n) for n in (1, 3, 7) for op in (torch.floor_divide, torch.remainder, torch.fmod)]
        divided += [torch.div(a, n, rounding_mode=mode) for n in (2, 5) for mode in ("trunc", "floor", None)]
        if dtype.is_signed:
            c = a | 1  # PyTorch's own division of the lowest integer by -1 ends the process on a CPU
            divided += [c // -1, c % -1, a // -3, a % -3, torch.fmod(a, -3), torch.div(c, -1, rounding_mode="trunc")]
        shifts = [a << 1, a >> 1, a << 7, a >> 7, b & 3, a | b, a ^ b, ~a]
        rounded = [a.floor(), a.ceil(), a.round(), a.trunc(), a.sign(), a.clamp(1, 3), torch.maximum(a, b)]
        return (
            *divided,
            *shifts,
            *rounded,
            a.isinf(),
            a.isnan(),
            a.signbit(),
            a.pow(2),
            a / b,
            a.bool(),
            a.float().exp(),
        )

    assert_as_eager(function, [*pairs(dtype)], dynamo=False, bits=False, factor=4)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts_by_negative_numbers_and_beyond_the_width(dtype):
    def function(a, b):
        numbers = [
            op(a, n) for n in (8, 16, 31, 32, 63, 64) for op in (torch.bitwise_left_shift, torch.bitwise_right_shift)
        ]
        return *numbers, a << b, a >> b, (a << b).long() + 1, (a >> b).float()

    by = torch.tensor([0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 100, 127], dtype=dtype)
    a = limits(dtype)[:, None].expand(-1, 12).contiguous()
    assert_as_eager(
        function, [a, by if dtype is torch.uint8 else torch.cat([by[:-2], -by[1:3]])], dynamo=False, bits=True
    )


@pytest.mark.parametrize("dtype", INTEGERS[1:], ids=str)
def test_the_lowest_integer_by_minus_one_wraps(dtype):
    def function(a):
        return a // -1, a % -1, torch.fmod(a, -1), torch.div(a, -1, rounding_mode="trunc")

    lowest = torch.full((3,), torch.iinfo(dtype).min, dtype=dtype)
    with cupyops.simulate():
        quotient, remainder, rest, truncated = traced(function)(lowest)
    assert torch.equal(quotient, lowest) and torch.equal(truncated, lowest)
    assert not remainder.any() and not rest.any()


def test_the_rounding_of_integers_is_a_tensor_of_its_own():
    def function(a):
        return a.floor(), a.ceil(), a.trunc()

    a = limits(torch.int32)
    with cupyops.simulate():
        results = traced(function)(a)
    assert len({one.data_ptr() for one in (a, *results)}) == 4


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_division_by_zero_is_pytorchs_error(dtype):
    a, zero = limits(dtype), torch.zeros((), dtype=dtype)
    for function in (torch.floor_divide, torch.remainder, lambda a, b: torch.div(a, b, rounding_mode="trunc")):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            function(a, zero)
        with cupyops.simulate(), pytest.raises(RuntimeError, match="ZeroDivisionError"):
            traced(lambda a, b, f=function: f(a + 1, b))(a, zero)


@pytest.mark.parametrize("of", ["one", "both"])
def test_a_subtraction_of_truth_is_pytorchs_error(of):
    function = lambda a: ((a > 0) if of == "both" else a + 1) - (a > 1)
    for call in (function, traced(function)):
        with cupyops.simulate(), pytest.raises(RuntimeError, match="Subtraction"):
            call(limits(torch.uint8))


@pytest.mark.parametrize("shape", [(7,), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_an_explicit_cast_to_a_half_rounds_and_overflows(dtype, shape):
    def function(x):
        big = x * 7e4
        return x.to(dtype).float() - x, big.to(dtype).float(), (x.to(dtype) + 0).float() * 3, x.to(dtype).double() / 3

    assert_as_eager(function, [rand(*shape, grad=False)], dynamo=False, bits=True)
    assert_as_eager(function, [rand(*shape)], dynamo=False)


def test_what_a_user_casts_within_autocast_rounds():
    def function(x, w):
        with torch.autocast("cpu", dtype=HALF):
            y = x @ w
            return y, x.to(torch.float16).float() - x, y.float() * 3

    assert_as_eager(function, [rand(4, 8), rand(8, 8)], eps=16)


def test_constants_of_halves_are_rounded():
    def function(x):
        constants = torch.full((5,), 0.1, dtype=HALF), torch.full((5,), 1 / 3, dtype=torch.float16)
        return *(x * one for one in constants), *(one.double() for one in constants), constants[0] * 3

    assert_as_eager(function, [rand(5, grad=False)], dynamo=False, bits=True)


@pytest.mark.parametrize("dtype", [torch.float16, HALF, torch.float32], ids=str)
def test_what_backward_computes_again_has_forwards_bits(dtype):
    """The gradient of a maximum compares with its elements; contracted or unrounded, none would be equal."""

    def function(x, w):
        y = (x * w + x * 0.3).tanh() * w
        return y.amax(-1), y.amin(0), torch.maximum(y, x * w + 0.1), (x * w + w).relu(), (x * w + w).clamp(-0.5, 0.5)

    assert_as_eager(function, [rand(6, 33, dtype=dtype), rand(33, dtype=dtype)], dynamo=False, eps=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floor_division_and_remainder_of_floats_are_by_fmod(dtype):
    a = torch.tensor(
        [1.0, INF, -5.0, 5.0, -5.0, 0.0, -0.0, 7.5, -7.5, NAN, 1e20, 3.0, -INF, 5.0, 1.0, -1.0], dtype=dtype
    )
    b = torch.tensor([0.1, 1.0, INF, INF, -INF, 2.0, 2.0, -2.5, 2.5, 1.0, 3.0, 0.0, 3.0, NAN, -0.1, 0.1], dtype=dtype)

    def function(a, b):
        by_number = a // 0.1, a % 0.1, a // -3.0, a % -3.0, a // INF, a % INF, torch.fmod(a, -0.1)
        return a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a / b, *by_number

    assert_as_eager(function, [a, b], dynamo=False, bits=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, HALF], ids=str)
def test_nan_wins_in_maxima_and_loses_in_fmax(dtype):
    rows = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, NAN], [2.0, 2.0, 1.0], [-INF, INF, 0.0]], dtype=dtype)

    def function(x, y):
        kept = F.relu(x), x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0), torch.maximum(x, y), torch.minimum(x, y)
        dropped = torch.fmax(x, y), torch.fmin(x, y), x.amax(-1), x.amin(-1), x.amax(0), x.max(), x.min()
        places = x.argmax(-1), x.argmin(0), x.argmax(), x.max(-1), x.min(0), x.isnan(), x.isinf(), x.nan_to_num(1.0)
        bounds = torch.clamp(x, y, y + 1), x.clamp(NAN, 1.0), x.clamp(1.0, -1.0)
        flat = [one for place in places for one in (place if isinstance(place, tuple) else [place])]
        return *kept, *dropped, *flat, *bounds

    assert_as_eager(function, [rows, rows.flip(0)], dynamo=False, bits=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF, torch.float16], ids=str)
def test_activations_of_nan_and_infinities(dtype):
    def function(x):
        found = F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh"), x.sigmoid(), x.tanh(), x.exp(), x.erf(), F.elu(x)
        more = F.softplus(x), F.hardswish(x), F.hardtanh(x), F.leaky_relu(x), F.mish(x), F.logsigmoid(x), x.expm1()
        return *found, *more, x.rsqrt(), x.log1p(), x.sqrt(), x.reciprocal(), x.square(), x.abs(), x.sign(), x.pow(3)

    assert_as_eager(function, [special(dtype, grad=True)], dynamo=False, eps=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF], ids=str)
def test_negative_zero_is_kept_and_lost_as_in_eager(dtype):
    def function(x, y):
        same = x * 1, x - 0, x / 1, -x, x * -1, x.neg().neg(), x.floor(), x.round(), x.trunc(), x.abs()
        lost = x + 0, x + 0.0, x * 0, x - x, 0 - x, x.sum(), x + y
        return (
            *same,
            *lost,
            torch.copysign(y, x),
            x.signbit(),
            x.reciprocal(),
            x / x,
            torch.where(x == 0, x, y),
            x.clone(),
        )

    x = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 0.3, -0.3], dtype=dtype)
    assert_as_eager(function, [x, x.flip(0)], dynamo=False, bits=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF], ids=str)
def test_literals_of_any_size(dtype):
    def function(x, i):
        large = x * 1e39, x + 1e300, x * -1e39, x * 1e-46, x * INF, x + -INF, x * NAN, x > 1e300, x < -1e39, x / 1e39
        whole = x * 0.1, x + 1 / 3, x * 123456789.123456789, x - 16777217, x * 2**40, x + 2**63, torch.rsub(x, 0.7)
        numbers = i + (2**63 - 1), i + -(2**63), i * 2**40, i > 2**62, i == -(2**63), i.clamp(max=2**62), i - 2**53 - 1
        return (
            *large,
            *whole,
            *numbers,
            torch.full((2,), 2**63 - 1),
            torch.full((3,), -(2**63)),
            x.masked_fill(x > 0, 1e30),
        )

    x = torch.tensor([1.0, -2.0, 0.0, 3.5], dtype=dtype)
    assert_as_eager(function, [x, torch.tensor([0, 1, -1, 2**62])], dynamo=False)


EMPTY = [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_reductions_of_nothing(shape):
    def function(x):
        dims = [(d, keep) for d in range(x.dim()) for keep in (False, True)]
        found = [x.sum(d, keepdim=k) for d, k in dims] + [x.prod(d, keepdim=k) for d, k in dims]
        found += [x.mean(d, keepdim=k) for d, k in dims] + [x.var(d, keepdim=k) for d, k in dims]
        found += [one for d, k in dims for one in torch.var_mean(x, d, keepdim=k)]
        found += [(x > 0).any(d) for d, _ in dims] + [(x > 0).all(d) for d, _ in dims] + [x.softmax(d) for d, _ in dims]
        found += [x.amax(d) for d in range(x.dim()) if x.shape[d]] + [x.logsumexp(d) for d, _ in dims]
        return (
            *found,
            x.sum(),
            x.mean(),
            x.prod(),
            (x > 0).any(),
            (x > 0).all(),
            x.sum() + 1,
            x.norm(),
            x.var(),
            x.std(),
        )

    assert_as_eager(function, [torch.zeros(shape, requires_grad=True)], dynamo=False)


@pytest.mark.parametrize("name", ["amax", "amin", "argmax", "argmin", "max"])
def test_what_nothing_has_no_value_of_is_pytorchs_error(name):
    function = lambda x: getattr(x * 2, name)(1)
    for call in (function, traced(function)):
        with cupyops.simulate(), pytest.raises((IndexError, RuntimeError), match="zero-size|non-zero size"):
            call(torch.zeros(3, 0))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4, 1), (1, 5)], ids=str)
def test_reductions_of_one_element_and_of_no_dimension(shape):
    def function(x):
        dims = [-1, 0] if x.dim() < 2 else [0, 1, -1]
        found = [f(d) for d in dims for f in (x.sum, x.mean, x.amax, x.softmax, x.logsumexp, x.cumsum, x.prod)]
        found += [x.sum(d, keepdim=True) for d in dims] + [x.var(d, correction=0) for d in dims]
        found += [x.var(d) for d in dims] + [x.sum(()), x.sum(), x.mean(), x.amax(()), x.max(), x.norm(), (x > 0).any()]
        return *found, torch.sum(x.int()), x.flip(dims[0]), x.unsqueeze(0) + 1, x.squeeze() * 2, x.std(correction=0)

    assert_as_eager(function, [rand(*shape)], dynamo=False)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("correction", [0, 1, 2.5, 3, 8, 12])
@pytest.mark.parametrize("shape,dim", [((4, 8), 1), ((8, 4), 0), ((3, 4, 2), (0, 2)), ((8, 64), 0)], ids=str)
def test_variances_with_any_correction(shape, dim, correction):
    def function(x):
        both = torch.var_mean(x, dim, correction=correction)
        constant = torch.ones_like(x).var(dim, correction=correction)
        return x.var(dim, correction=correction), *both, x.std(dim, correction=correction, keepdim=True), constant

    assert_as_eager(function, [rand(*shape, grad=False)], dynamo=False)


@pytest.mark.parametrize(
    "shape,dim", [((5, 700), 1), ((700, 5), 0), ((600, 96), 0), ((3, 2000), 1), ((40, 4, 8), (0, 2))], ids=str
)
def test_the_variance_of_what_is_far_from_zero_keeps_its_digits(shape, dim):
    def function(x):
        return x.var(dim), *torch.var_mean(x, dim), x.std(dim)

    near = rand(*shape, grad=False)
    outlier = near.clone()
    outlier.view(-1)[0] = 1e4  # where a sum about the first element would lose the others
    for x in (near + 1000, near * 1e-3 + 10, outlier):
        assert_as_eager(function, [x], dynamo=False)


@pytest.mark.parametrize(
    "shape,dim", [((3, 70000), 1), ((70000, 3), 0), ((4, 300), 1), ((2, 300, 4), (1, 2)), ((9000,), 0)], ids=str
)
def test_sums_are_kept_in_wide_types(shape, dim):
    def function(x, whole, few, truth):
        halves = x.half() * 0.01, x.bfloat16()
        found = [one.sum(dim) for one in halves] + [one.mean(dim) for one in halves]
        found += [whole.sum(dim), few.sum(dim), truth.sum(dim), truth.float().mean(dim), x.double().sum(dim)]
        found += [
            x.sum(dim, dtype=torch.float64),
            x.half().sum(dim, dtype=torch.float32),
            few.sum(dim, dtype=torch.int32),
        ]
        return (
            *found,
            few.float().mean(dim),
            whole.sum(),
            whole.sum(dim, dtype=torch.float32),
            truth.sum(dim, dtype=torch.uint8),
        )

    x = rand(*shape, grad=False)
    whole = (x * 1e8).to(torch.int32)
    arguments = [x, whole, torch.full(shape, 200, dtype=torch.uint8), x > 0]
    assert_as_eager(function, arguments, dynamo=False, eps=32)


ROWS = {
    "of minus infinity": lambda n: torch.full((2, n), -INF),
    "with a plus infinity": lambda n: torch.zeros(2, n).index_fill(1, torch.tensor([n // 2]), INF),
    "masked by -1e30": lambda n: torch.zeros(2, n).index_fill(1, torch.arange(n // 2), -1e30),
    "masked by minus infinity": lambda n: torch.randn(2, n).index_fill(1, torch.arange(n // 2 + 1), -INF),
    "with a NaN": lambda n: torch.zeros(2, n).index_fill(1, torch.tensor([0]), NAN),
    "with a NaN at the end": lambda n: torch.zeros(2, n).index_fill(1, torch.tensor([n - 1]), NAN),
}


@pytest.mark.parametrize("columns", [1, 5, 128, 9000])
@pytest.mark.parametrize("rows", ROWS)
def test_softmax_of_rows(rows, columns):
    def function(x):
        return F.softmax(x, -1), F.log_softmax(x, -1), torch.logsumexp(x, -1), F.softmax(x.half(), 1), F.softmax(x, 0)

    torch.manual_seed(0)
    assert_as_eager(function, [ROWS[rows](columns)], dynamo=False)


def test_gradients_at_ties_and_kinks():
    def function(x, y):
        ties = x.amax(0), x.amin(1), x.max(), torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), x.norm(dim=1)
        kinks = x.abs(), x.sign(), F.relu(x), x.clamp(-1, 1), x.clamp(min=1), F.hardtanh(x), F.leaky_relu(x), F.relu6(x)
        powers = x.abs().pow(0.5), x.pow(2), x.pow(0), x.pow(1.0), x.abs() ** y.abs(), F.hardshrink(x), F.softshrink(x)
        return (
            *ties,
            *kinks,
            *powers,
            F.smooth_l1_loss(x, y),
            F.l1_loss(x, y),
            F.huber_loss(x, y),
            x.norm(),
            x.abs().sum(),
        )

    x = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [2.0, -0.0, -1.0]])
    y = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 0.0, -1.0], [1.0, 0.0, 0.0], [0.0, 2.0, 1.0]])
    assert_as_eager(function, [x.requires_grad_(), y.requires_grad_()], dynamo=False)


def test_the_gradient_of_where_beside_a_branch_of_nan():
    def function(x):
        return torch.where(x > 0, x.log(), 0.0), torch.where(x > 0, x.sqrt(), x * 2), torch.where(x != 0, 1 / x, x)

    assert_as_eager(function, [torch.tensor([1.0, 0.0, -1.0, 4.0], requires_grad=True)], dynamo=False)


TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, HALF, torch.float32, torch.float64,
)  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_promotion_of_tensors_scalars_and_python_numbers(dtype):
    def function(x, *others):
        numbers = [True, 2] if dtype is torch.bool else [True, 2, -1, 0.5]
        found = [op(x, n) for n in (*others, *numbers) for op in (torch.add, torch.mul)]
        found += [x < n for n in (*others, *numbers)] + [x == n for n in (*others, *numbers)]
        found += [torch.where(x > 0, x, n) for n in (*others, *numbers)] + [
            x / n for n in others if n.dtype != torch.bool
        ]
        return (
            *found,
            *(torch.maximum(x, n) for n in others),
            *(n - x for n in others if torch.bool not in (n.dtype, dtype)),
        )

    x = torch.tensor([0, 1, 3, 100], dtype=dtype)
    others = [torch.tensor([1, 0, 2, 3], dtype=one) for one in TYPES] + [torch.tensor(2, dtype=one) for one in TYPES]
    assert_as_eager(function, [x, *others], dynamo=False, eps=2)


def test_comparisons_with_numbers_beyond_the_dtype():
    def function(a, b, x):
        unsigned = a > -1, a < 300, a == 256, a != -1, a >= 2.5, a + 300, a - 300
        return *unsigned, b > 2**40, b < -(2**35), b + 0.5, x > 2**24 + 1, x == 0.1, (a > 0) + 1, (a > 0) * 2.5

    assert_as_eager(function, [limits(torch.uint8), limits(torch.int32), special()], dynamo=False, bits=True)


def test_amax_of_truth_is_truth():
    def function(x):
        truth = x > 0
        return truth.amax(-1), truth.amin(0), truth.any(1), truth.all(), truth.max(), truth.min(), truth.amax((0, 1))

    x = torch.tensor([[1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]])
    assert_as_eager(function, [x], dynamo=False, bits=True)


@pytest.mark.parametrize(
    "dtype", [torch.float16, HALF, torch.float32, torch.float64, torch.int16, torch.int64], ids=str
)
def test_ranges_in_each_dtype(dtype):
    def function(x):
        whole = torch.arange(7, dtype=dtype), torch.arange(-3, 300, 7, dtype=dtype), torch.arange(9, 0, -2, dtype=dtype)
        parts = (
            (torch.arange(0.5, 4.0, 0.25, dtype=dtype), torch.arange(0, 1, 0.1, dtype=dtype))
            if dtype.is_floating_point
            else ()
        )
        return *(one + x for one in whole), *whole, *parts

    assert_as_eager(function, [torch.ones((), dtype=dtype)], dynamo=False)


def test_casts_between_floats_integers_and_truth():
    def function(x, i):
        whole = [x.to(one) for one in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)]
        narrow = [
            i.to(one) for one in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool, torch.float32, HALF)
        ]
        return *whole, *narrow, x.bool(), x.half().int(), (x * 0.3).long().float(), i.bool().float(), i.double()

    x = torch.tensor([0.0, -0.0, 0.9, -0.9, 3.7, -3.7, 100.5, -100.5])
    i = torch.tensor([0, 255, 256, -1, 2**31, -(2**31) - 1, 2**24 + 1, 2**62])
    assert_as_eager(function, [x, i], dynamo=False, bits=True)
