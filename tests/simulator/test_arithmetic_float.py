"""Sums, products, quotients and roots of floats, in each rounding, against fractions rounded by the definition."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import test_arithmetic_reference as reference
from simulator.test_arithmetic_reference import (
    F32,
    F64,
    FORMATS,
    ROUNDINGS,
    SETTINGS,
    Binary,
    Number,
    assert_codes,
    column,
    decode,
    lists_of,
    product_of,
    round_to,
    run,
)

from cupyops.simulator.arithmetic import resolve

Exact = Callable[..., Number]
EXACT: dict[str, tuple[int, Exact]] = {
    "add": (2, reference.add),
    "sub": (2, lambda a, b, mode: reference.add(a, reference.negate(b), mode)),
    "mul": (2, lambda a, b, mode: reference.multiply(a, b)),
    "fma": (3, reference.fma),
    "mad": (3, reference.fma),
    "div": (2, lambda a, b, mode: reference.divide(a, b)),
    "rcp": (1, lambda a, mode: reference.divide((0, Fraction(1)), a)),
    "sqrt": (1, lambda a, mode: reference.root(a)),
}


def check(name: str, modifiers: tuple[str, ...], form: Binary, exact: Callable[..., int], rows: list[tuple[int, ...]]):
    """The operation on the rows of codes, against the code that `exact` makes of each."""
    operation = resolve(name, modifiers, len(rows[0]) + 1)
    assert operation is not None
    arguments = [column(rows, i, form.dtype) for i in range(len(rows[0]))]
    if form in (F32, F64):
        arguments = [each.view(f"f{form.width // 8}") for each in arguments]
    copies = [each.copy() for each in arguments]
    result = run(operation.function, *arguments)
    assert all(each.tobytes() == copy.tobytes() for each, copy in zip(arguments, copies))
    assert_codes(result.view(form.dtype), [exact(*row) for row in rows], rows, form)


def rounded(
    exact: Exact, form: Binary, mode: str, ftz: bool = False, last: Callable = lambda number: number
) -> Callable:
    """The code that a function of numbers gives."""

    def code(*row: int) -> int:
        numbers = [decode(each, form) for each in row]
        if ftz:
            numbers = [reference.flush(number, form) for number in numbers]
        result = decode(round_to(exact(*numbers, mode), form, mode), form)
        return round_to(last(reference.flush(result, form) if ftz else result), form)

    return code


def rows_of(data: st.DataObject, form: Binary, sources: int) -> list[tuple[int, ...]]:
    sizes = {1: (80,), 2: (12, 12), 3: (7, 7, 4)}[sources]
    return product_of(*[data.draw(lists_of(form, size)) for size in sizes])


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("name", list(EXACT))
@SETTINGS
@given(st.data())
def test_each_rounding(name: str, type_: str, mode: str, data: st.DataObject):
    sources, exact = EXACT[name]
    form = FORMATS[type_]
    check(name, (mode, type_), form, rounded(exact, form, mode), rows_of(data, form, sources))


def near_ties(data: st.DataObject, form: Binary) -> list[tuple[int, ...]]:
    """Factors whose product is half an ulp of c less a trace, too far below c for twice the precision to hold both."""
    half = 1 << form.precision - 1
    rows = []
    for _ in range(24):
        deviation = data.draw(st.integers(0, 3))
        subnormal = data.draw(st.booleans())
        ulp = form.bottom - form.precision + 1 if subnormal else data.draw(st.integers(form.bottom // 2, form.top // 2))
        whole = data.draw(st.integers(half >> 4, half - 1) if subnormal else st.integers(half, 2 * half - 1))
        # (half + d) (half - d) is half^2 - d^2.
        left = ulp // 2
        right = ulp - 1 - left - 2 * (form.precision - 1)
        factors = [((half + deviation), left), ((half - deviation), right)]
        signs = [data.draw(st.integers(0, 1)) for _ in range(2)]
        a, b = (round_to((sign, n * reference.two_to(e)), form) for sign, (n, e) in zip([signs[0], 0], factors))
        rows.append((a, b, round_to((signs[1], whole * reference.two_to(ulp)), form)))
    return rows


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("type_", ["f32", "f64"])
@SETTINGS
@given(st.data())
def test_fused_sums_that_nearly_tie(type_: str, mode: str, data: st.DataObject):
    """Where a sum that is rounded twice goes wrong, c being normal or not."""
    form = FORMATS[type_]
    rows = near_ties(data, form)
    exact = [reference.multiply(decode(a, form), decode(b, form)) for a, b, _ in rows]
    assert all(product[1] > 0 for product in exact)
    check("fma", (mode, type_), form, rounded(reference.fma, form, mode), rows)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("type_", ["f32", "f64"])
@SETTINGS
@given(st.data())
def test_sums_that_cancel(type_: str, mode: str, data: st.DataObject):
    """The sign of a sum that is zero, by its rounding."""
    form = FORMATS[type_]
    top, one = 1 << form.width - 1, form.bias << form.precision - 1
    numbers = [0, top, one, *data.draw(lists_of(form, 10))]
    rows = [pair for a in numbers for pair in ((a, a), (a, a ^ top), (a ^ top, a), (0, a), (a, top))]
    for name in ("add", "sub", "mul"):
        check(name, (mode, type_), form, rounded(EXACT[name][1], form, mode), rows)
    fused = [(a, one, b) for a, b in rows] + [(a, b, c) for a, b in rows for c in (0, top)]
    check("fma", (mode, type_), form, rounded(reference.fma, form, mode), fused)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("type_", ["f32", "f64"])
@SETTINGS
@given(st.data())
def test_fused_sums_near_zero(type_: str, mode: str, data: st.DataObject):
    """Products near the subnormal numbers, and near the smallest of them, with a c of that size or none."""
    form = FORMATS[type_]
    lowest = form.bottom - form.precision + 1
    significands = st.integers(1, 7) | st.integers(1 << form.precision - 1, (1 << form.precision) - 1)
    rows = []
    for _ in range(24):
        left = data.draw(st.integers(lowest // 2 - 40, lowest // 2 + 40))
        right = lowest - left + data.draw(st.integers(-3, form.precision + 3))
        pair = []
        for exponent in (left, right):
            significand = data.draw(significands)
            pair.append(round_to((0, significand * reference.two_to(exponent - significand.bit_length() + 1)), form))
        c = data.draw(st.sampled_from([0, 1, 2, 3]) | st.integers(0, 1 << form.precision + 1))
        sign = data.draw(st.integers(0, 1)) << form.width - 1
        rows.append((*pair, c | sign))
    check("fma", (mode, type_), form, rounded(reference.fma, form, mode), rows)
    check("mul", (mode, type_), form, rounded(EXACT["mul"][1], form, mode), [row[:2] for row in rows])


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_a_product_that_vanishes_is_not_zero(type_: str, mode: str):
    form = FORMATS[type_]
    top = 1 << form.width - 1
    rows = [(1 | sign, 1, c) for sign in (0, top) for c in (0, top, 1, top | 1)]
    check("fma", (mode, type_), form, rounded(reference.fma, form, mode), rows)


@pytest.mark.parametrize("modifiers", [("ftz",), ("sat",), ("ftz", "sat"), ("rz", "ftz"), ("rp", "sat")])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@SETTINGS
@given(st.data())
def test_float32_modifiers(name: str, modifiers: tuple[str, ...], data: st.DataObject):
    sources, exact = EXACT[name]
    mode = next((each for each in modifiers if each in ROUNDINGS), "rn")
    last = reference.clamp01 if "sat" in modifiers else lambda number: number
    written = modifiers if mode in modifiers else ("rn", *modifiers)
    expected = rounded(exact, F32, mode, "ftz" in modifiers, last)
    check(name, (*written, "f32"), F32, expected, rows_of(data, F32, sources))


@pytest.mark.parametrize("name", ["div", "rcp", "sqrt"])
@SETTINGS
@given(st.data())
def test_float32_quotients_that_flush(name: str, data: st.DataObject):
    sources, exact = EXACT[name]
    check(name, ("rn", "ftz", "f32"), F32, rounded(exact, F32, "rn", True), rows_of(data, F32, sources))


HALF_FORMS = [("f16", ()), ("f16", ("ftz",)), ("f16", ("sat",)), ("f16", ("ftz", "sat")), ("bf16", ())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("type_, modifiers", HALF_FORMS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@SETTINGS
@given(st.data())
def test_half_precision(name: str, type_: str, modifiers: tuple[str, ...], packed: bool, data: st.DataObject):
    sources, exact = EXACT[name]
    form = FORMATS[type_]
    last = reference.clamp01 if "sat" in modifiers else lambda number: number
    expected = rounded(exact, form, "rn", "ftz" in modifiers, last)
    rows = rows_of(data, form, sources)
    check_half(name, ("rn", *modifiers), type_, packed, expected, rows)


def check_half(
    name: str,
    modifiers: tuple[str, ...],
    type_: str,
    packed: bool,
    exact: Callable[..., int],
    rows: list[tuple[int, ...]],
):
    """As `check`, of codes or of words of two codes."""
    if not packed:
        return check(name, (*modifiers, type_), FORMATS[type_], exact, rows)
    operation = resolve(name, (*modifiers, type_ + "x2"), len(rows[0]) + 1)
    assert operation is not None and operation.takes == ("u32",) * len(rows[0])
    words = [column(rows, i, np.uint16).view(np.uint32) for i in range(len(rows[0]))]
    result = run(operation.function, *words)
    assert result.dtype == np.uint32
    assert_codes(result.view(np.uint16), [exact(*row) for row in rows], rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("type_", ["f16", "bf16"])
@SETTINGS
@given(st.data())
def test_half_fma_relu(type_: str, packed: bool, data: st.DataObject):
    form = FORMATS[type_]
    expected = rounded(reference.fma, form, "rn", last=lambda number: reference.clamp0(number))
    check_half("fma", ("rn", "relu"), type_, packed, expected, rows_of(data, form, 3))


@pytest.mark.parametrize("type_", ["f16", "bf16"])
@SETTINGS
@given(st.data())
def test_half_fused_sums_that_nearly_tie(type_: str, data: st.DataObject):
    """A c far below half an ulp of the product, whose own bits tie, or the product far below half an ulp of c."""
    form = FORMATS[type_]
    rows = []
    for _ in range(24):
        low = data.draw(st.integers(1, 3))
        a = round_to((0, Fraction((1 << form.precision - 1) + low)), form)
        b = round_to((0, Fraction((1 << form.precision - 1) + (1 << form.precision - 2))), form)
        tiny = reference.two_to(data.draw(st.integers(form.bottom - form.precision + 1, -form.precision)))
        scale = reference.two_to(-2 * form.precision + data.draw(st.integers(0, 6)))
        a = round_to((0, signed_value(a, form) * scale), form)
        rows.append((a, b, round_to((data.draw(st.integers(0, 1)), tiny), form)))
        c = round_to((0, Fraction(data.draw(st.integers(1 << form.precision - 1, (1 << form.precision) - 1)))), form)
        half = round_to(
            (
                data.draw(st.integers(0, 1)),
                Fraction(1, 2) + data.draw(st.integers(0, 1)) * reference.two_to(-form.precision),
            ),
            form,
        )
        rows.append((half, round_to((0, Fraction(1)), form), c))
    check("fma", ("rn", type_), form, rounded(reference.fma, form, "rn"), rows)


def signed_value(code: int, form: Binary) -> Any:
    return reference.signed(decode(code, form))


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("sat", [False, True])
@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
@SETTINGS
@given(st.data())
def test_mixed_precision(name: str, type_: str, sat: bool, mode: str, data: st.DataObject):
    sources, exact = EXACT[name]
    half = FORMATS[type_]
    sizes = (8, 8, 6) if sources == 3 else (16, 16)
    forms = [half] * (sources - 1) + [F32]
    rows = product_of(*[data.draw(lists_of(form, size)) for form, size in zip(forms, sizes)])
    operation = resolve(name, (mode, *(("sat",) if sat else ()), "f32", type_), sources + 1)
    assert operation is not None and operation.takes == ("u16",) * (sources - 1) + ("f32",)
    arguments = [column(rows, i, form.dtype) for i, form in enumerate(forms)]
    result = run(operation.function, *arguments[:-1], arguments[-1].view(np.float32))
    expected = []
    for row in rows:
        code = round_to(exact(*[decode(code, form) for code, form in zip(row, forms)], mode), F32, mode)
        expected.append(round_to(reference.clamp01(decode(code, F32)), F32) if sat else code)
    assert_codes(result.view(np.uint32), expected, rows)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@SETTINGS
@given(st.data())
def test_two_float32_in_a_word(name: str, data: st.DataObject):
    sources, exact = EXACT[name]
    rows = rows_of(data, F32, sources)
    operation = resolve(name, ("rz", "ftz", "f32x2"), sources + 1)
    assert operation is not None and operation.gives == ("u64",)
    result = run(operation.function, *[column(rows, i, np.uint32).view(np.uint64) for i in range(sources)])
    expected = rounded(exact, F32, "rz", True)
    assert_codes(result.view(np.uint32), [expected(*row) for row in rows], rows)


@pytest.mark.parametrize("type_", ["f16", "bf16", "f32", "f64"])
@SETTINGS
@given(st.data())
def test_signs(type_: str, data: st.DataObject):
    form = FORMATS[type_]
    rows = [(code,) for code in data.draw(lists_of(form, 100))]
    top = 1 << form.width - 1
    for name, expected in [("abs", lambda code: code & ~top), ("neg", lambda code: code ^ top)]:
        operation = resolve(name, (type_,), 2)
        assert operation is not None
        argument = column(rows, 0, form.dtype)
        result = run(operation.function, argument.view(f"f{form.width // 8}") if form in (F32, F64) else argument)
        assert_codes(result.view(form.dtype), [expected(*row) for row in rows], rows)
        if type_ in ("f16", "bf16"):
            both = resolve(name, (type_ + "x2",), 2)
            assert both is not None
            assert_codes(
                run(both.function, argument.view(np.uint32)).view(np.uint16), [expected(*row) for row in rows], rows
            )


@pytest.mark.parametrize("name", ["abs", "neg"])
@pytest.mark.parametrize("type_", ["f16", "f16x2", "f32"])
@SETTINGS
@given(st.data())
def test_signs_of_flushed_numbers(name: str, type_: str, data: st.DataObject):
    form = FORMATS[type_.removesuffix("x2")]
    rows = [(code,) for code in data.draw(lists_of(form, 100)) if not reference.is_nan(decode(code, form)[1])]
    rows = rows[: len(rows) // 2 * 2]
    operation = resolve(name, ("ftz", type_), 2)
    assert operation is not None
    view = {"f16": np.uint16, "f16x2": np.uint32, "f32": np.float32}[type_]
    result = run(operation.function, column(rows, 0, form.dtype).view(view))

    def expected(code: int) -> int:
        number = reference.flush(decode(code, form), form)
        return round_to(reference.negate(number) if name == "neg" else (0, number[1]), form)

    assert_codes(result.view(form.dtype), [expected(*row) for row in rows], rows)


@pytest.mark.parametrize("type_", ["f32", "f64"])
@SETTINGS
@given(st.data())
def test_copysign_takes_the_sign_of_the_first(type_: str, data: st.DataObject):
    form = FORMATS[type_]
    rows = product_of(data.draw(lists_of(form, 12)), data.draw(lists_of(form, 12)))
    top = 1 << form.width - 1
    operation = resolve("copysign", (type_,), 3)
    assert operation is not None
    floats = [column(rows, i, form.dtype).view(f"f{form.width // 8}") for i in range(2)]
    assert_codes(run(operation.function, *floats).view(form.dtype), [a & top | b & ~top for a, b in rows], rows)


@pytest.mark.parametrize(("rounding", "sign"), [("rm", -1), ("rp", 1)])
def test_a_quotient_is_flushed_before_it_is_rounded(rounding: str, sign: int):
    """As on a GPU: just below the normal numbers it is zero with .ftz, though rounding would lift it to the first."""
    least, divisor = np.float32(sign * 2.0**-126), np.nextafter(np.float32(1), np.float32(2))
    plain, flushed = (resolve("div", (rounding, *ftz, "f32"), 3) for ftz in ((), ("ftz",)))
    assert plain is not None and flushed is not None
    assert plain.function(least, divisor) == least
    zero = flushed.function(np.full(3, least), divisor)
    assert (zero == 0).all() and (np.signbit(zero) == (sign < 0)).all()
