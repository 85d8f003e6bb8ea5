"""Every conversion, against fractions rounded by the definition."""

import math
from collections.abc import Callable
from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import test_arithmetic_reference as reference
from simulator.test_arithmetic_integer import DTYPES, check, clamp, draw_rows, values, wrap
from simulator.test_arithmetic_reference import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    FORMATS,
    ROUNDINGS,
    SETTINGS,
    TF32,
    Binary,
    Number,
    assert_codes,
    decode,
    is_nan,
    lists_of,
    round_to,
    run,
    signed,
)

from cupyops.simulator.arithmetic import resolve

INTEGERS = [f"{sign}{width}" for width in (8, 16, 32, 64) for sign in "us"]
FLOATS = list(FORMATS)
VIEWED = {**DTYPES, "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}


def limits(name: str) -> tuple[int, int]:
    width = int(name[1:])
    return (0, (1 << width) - 1) if name[0] == "u" else (-(1 << width - 1), (1 << width - 1) - 1)


def floats_as_taken(codes: list[int], form: Binary) -> np.ndarray:
    array = np.array(codes, form.dtype)
    return array.view(f"f{form.width // 8}") if form in (F32, F64) else array


def convert(modifiers: str, *arguments: np.ndarray) -> np.ndarray:
    operation = resolve("cvt", tuple(modifiers.split(".")), len(arguments) + 1)
    assert operation is not None
    assert [each.dtype for each in arguments] == [VIEWED[view] for view in operation.takes]
    result = run(operation.function, *arguments)
    assert result.dtype == VIEWED[operation.gives[0]]
    return result


def check_codes(
    modifiers: str, source: Binary, target: Binary, exact: Callable[[Number], int], codes: list[int]
) -> None:
    result = convert(modifiers, floats_as_taken(codes, source))
    expected = [exact(decode(code, source)) for code in codes]
    assert_codes(result.view(target.dtype), expected, [(code,) for code in codes], target)


@pytest.mark.parametrize("source", INTEGERS)
@SETTINGS
@given(st.data())
def test_integers_to_integers(source: str, data: st.DataObject):
    rows = draw_rows(data, (source,))
    for target in INTEGERS:
        check(f"cvt.{target}.{source}", (source,), target, lambda a: a, rows)
        check(f"cvt.sat.{target}.{source}", (source,), target, lambda a: clamp(a, *limits(target)), rows)


WHOLE: dict[str, Callable[[Fraction], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def near_integers(form: Binary) -> st.SearchStrategy[int]:
    """Codes of numbers near the ends of the integer types, near halves, and any."""
    ends = [Fraction(2) ** width for width in (0, 7, 8, 15, 16, 31, 32, 63, 64)]
    steps = [Fraction(n, 4) for n in range(-6, 7)]
    near = st.builds(
        lambda end, step, sign: round_to((sign, abs(end + step)), form, "rz"),
        st.sampled_from(ends),
        st.sampled_from(steps),
        st.integers(0, 1),
    )
    return near | reference.codes(form)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("rounding", list(WHOLE))
@SETTINGS
@given(st.data())
def test_floats_to_integers(rounding: str, source: str, data: st.DataObject):
    form = FORMATS[source]
    codes = data.draw(st.lists(near_integers(form), min_size=50, max_size=50))
    for target in INTEGERS:
        least, most = limits(target)

        def exact(code: int) -> int:
            number = decode(code, form)
            if is_nan(number[1]):
                return 1 << int(target[1:]) - 1 if source == "f64" or target[1:] == "64" else 0
            if number[1] == inf:
                return least if number[0] else most
            return clamp(WHOLE[rounding](signed(number)), least, most)

        result = convert(f"{rounding}.{target}.{source}", floats_as_taken(codes, form))
        assert result.tolist() == [wrap(exact(code), target) for code in codes], target


@SETTINGS
@given(st.data())
def test_floats_to_integers_flush(data: st.DataObject):
    codes = [1, 0x80000001, 0x7FFFFF, *data.draw(lists_of(F32, 30))]

    small = [code for code in codes if abs(signed(decode(code, F32))) < 1]
    result = convert("rpi.ftz.s32.f32", floats_as_taken(small, F32))
    assert result.tolist() == [int(signed(reference.flush(decode(code, F32), F32)) > 0) for code in small]


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@SETTINGS
@given(st.data())
def test_integers_to_floats(rounding: str, target: str, data: st.DataObject):
    form = FORMATS[target]
    for source in INTEGERS:
        numbers = data.draw(st.lists(values(source), min_size=40, max_size=40))
        precise = form.precision
        for shift in range(0, max(0, int(source[1:]) - precise - 1), 5):
            half = ((1 << precise) + 3 << 1 | 1) << shift
            numbers += [wrap(half + step, source) for step in (-1, 0, 1)]
        result = convert(f"{rounding}.{target}.{source}", np.array(numbers, DTYPES[source]))
        expected = [round_to((int(n < 0), Fraction(abs(n))), form, rounding) for n in numbers]
        assert_codes(result.view(form.dtype), expected, [(n,) for n in numbers], form)


@pytest.mark.parametrize("target", FLOATS)
@SETTINGS
@given(st.data())
def test_integers_to_floats_between_0_and_1(target: str, data: st.DataObject):
    form = FORMATS[target]
    numbers = data.draw(st.lists(values("s32"), min_size=60, max_size=60))
    result = convert(f"rn.sat.{target}.s32", np.array(numbers, np.int32))
    expected = [round_to((0, Fraction(clamp(n, 0, 1))), form) for n in numbers]
    assert_codes(result.view(form.dtype), expected, [(n,) for n in numbers], form)


def near_the_codes_of(target: Binary, source: Binary) -> st.SearchStrategy[int]:
    """Codes of the source half way between two codes of the target, a little beside them, or any."""

    def beside(code: int, step: int) -> int:
        sign, magnitude = decode(code, target)
        following = decode(code + 1, target)[1]
        if magnitude in (inf,) or is_nan(magnitude) or following == inf or is_nan(following):
            magnitude = following = Fraction(2) ** (target.top + 1) * (1 - Fraction(1, 1 << target.precision + 1))
        middle = round_to((sign, (magnitude + following) / 2), source)
        return (middle + step) % (1 << source.width)

    return st.builds(beside, reference.codes(target), st.integers(-1, 1)) | reference.codes(source)


def narrows(target: str, source: str) -> bool:
    """Whether a conversion loses anything, so that a rounding is written."""
    return FORMATS[target].precision < FORMATS[source].precision or {target, source} == {"f16", "bf16"}


@pytest.mark.parametrize(
    "target, source, rounding",
    [
        (target, source, rounding)
        for target in FLOATS
        for source in FLOATS
        for rounding in (ROUNDINGS if narrows(target, source) else [""])
        if target != source
    ],
)
@SETTINGS
@given(st.data())
def test_floats_to_floats(target: str, source: str, rounding: str, data: st.DataObject):
    form, given_form = FORMATS[target], FORMATS[source]
    codes = data.draw(st.lists(near_the_codes_of(form, given_form), min_size=50, max_size=50))
    prefix, rounding = (f"{rounding}.", rounding) if rounding else ("", "rn")
    check_codes(f"{prefix}{target}.{source}", given_form, form, lambda n: round_to(n, form, rounding), codes)

    def between_0_and_1(number: Number) -> int:
        return round_to(reference.clamp01(decode(round_to(number, form, rounding), form)), form)

    check_codes(f"{prefix}sat.{target}.{source}", given_form, form, between_0_and_1, codes)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_half_becomes_a_float32_and_comes_back(name: str):
    codes = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    wide = convert(f"f32.{name}", codes)
    same = (
        codes.view(np.float16).astype(np.float32) if name == "f16" else (codes.astype(np.uint32) << 16).view(np.float32)
    )
    numbers = ~np.isnan(same)
    assert np.array_equal(wide.view(np.uint32)[numbers], same.view(np.uint32)[numbers])
    assert (wide.view(np.uint32)[~numbers] == F32.nan).all()
    assert np.array_equal(convert(f"rn.{name}.f32", wide)[numbers], codes[numbers])


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("rounding", list(WHOLE))
@SETTINGS
@given(st.data())
def test_floats_made_whole(rounding: str, name: str, data: st.DataObject):
    form = FORMATS[name]

    def whole(number: Number) -> int:
        sign, magnitude = number
        if is_nan(magnitude) or magnitude == inf:
            return round_to(number, form)
        return round_to((sign, Fraction(abs(WHOLE[rounding](signed(number))))), form)

    codes = data.draw(st.lists(near_integers(form), min_size=60, max_size=60))
    check_codes(f"{rounding}.{name}.{name}", form, form, whole, codes)


@SETTINGS
@given(st.data())
def test_flushed_conversions(data: st.DataObject):
    singles = data.draw(lists_of(F32, 60))
    doubles = data.draw(st.lists(near_the_codes_of(F32, F64), min_size=60, max_size=60))
    tiny = [round_to((0, n * Fraction(2) ** -150), F64) for n in (1, 2, 3, 2**24 - 1, 2**24, 2**24 + 1)]
    check_codes("ftz.f64.f32", F32, F64, lambda n: round_to(reference.flush(n, F32), F64), singles)
    check_codes("rp.ftz.bf16.f32", F32, BF16, lambda n: round_to(reference.flush(n, F32), BF16, "rp"), singles)
    check_codes("ftz.f32.f32", F32, F32, lambda n: round_to(reference.flush(n, F32), F32), singles)

    def flushed(number: Number) -> int:
        return round_to(reference.flush(decode(round_to(number, F32), F32), F32), F32)

    check_codes("rn.ftz.f32.f64", F64, F32, flushed, doubles + tiny)


@pytest.mark.parametrize("flags", ["", ".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("rounding", ["rn", "rz"])
@pytest.mark.parametrize("target", ["f16", "bf16"])
@SETTINGS
@given(st.data())
def test_float32_to_one_and_two_halves(target: str, rounding: str, flags: str, data: st.DataObject):
    form = FORMATS[target]
    first, second = (data.draw(st.lists(near_the_codes_of(form, F32), min_size=60, max_size=60)) for _ in range(2))

    def exact(code: int) -> int:
        number = decode(code, F32)
        number = reference.clamp0(number) if "relu" in flags else number
        return round_to(number, form, rounding, "satfinite" in flags)

    one = convert(f"{rounding}{flags}.{target}.f32", floats_as_taken(first, F32))
    assert_codes(one, [exact(code) for code in first], [(code,) for code in first])
    two = convert(f"{rounding}{flags}.{target}x2.f32", floats_as_taken(first, F32), floats_as_taken(second, F32))
    rows = list(zip(first, second))
    assert_codes(two, [exact(a) << 16 | exact(b) for a, b in rows], rows)


@pytest.mark.parametrize(
    "modifiers", ["rna", "rna.satfinite", "rn", "rz", "rn.relu", "rn.satfinite", "rz.satfinite.relu"]
)
@SETTINGS
@given(st.data())
def test_tf32(modifiers: str, data: st.DataObject):
    flags = modifiers.split(".")
    codes = data.draw(st.lists(near_the_codes_of(TF32, F32), min_size=60, max_size=60))

    def exact(number: Number) -> int:
        if is_nan(number[1]):
            return F32.nan
        number = reference.clamp0(number) if "relu" in flags else number
        return round_to(number, TF32, flags[0], "satfinite" in flags) << 13

    check_codes(f"{modifiers}.tf32.f32", F32, F32, exact, codes)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name, form", [("e4m3x2", E4M3), ("e5m2x2", E5M2)])
@SETTINGS
@given(st.data())
def test_eight_bits(name: str, form: Binary, relu: str, data: st.DataObject):
    def exact(number: Number) -> int:
        return round_to(reference.clamp0(number) if relu else number, form, "rn", True)

    singles = [data.draw(st.lists(near_the_codes_of(form, F32), min_size=50, max_size=50)) for _ in range(2)]
    result = convert(f"rn.satfinite{relu}.{name}.f32", *[floats_as_taken(codes, F32) for codes in singles])
    rows = list(zip(*singles))
    assert_codes(result, [exact(decode(a, F32)) << 8 | exact(decode(b, F32)) for a, b in rows], rows)
    halves = data.draw(st.lists(near_the_codes_of(form, F16), min_size=50, max_size=50))
    result = convert(f"rn.satfinite{relu}.{name}.f16x2", np.array(halves, np.uint16).view(np.uint32))
    assert_codes(result.view(np.uint8), [exact(decode(code, F16)) for code in halves], [(code,) for code in halves])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name, form", [("e4m3x2", E4M3), ("e5m2x2", E5M2)])
def test_every_code_of_eight_bits(name: str, form: Binary, relu: bool):
    codes = np.arange(256, dtype=np.uint8)
    result = convert("rn" + ".relu" * relu + f".f16x2.{name}", codes.view(np.uint16))

    def exact(code: int) -> int:
        number = decode(code, form)
        return round_to(reference.clamp0(number) if relu else number, F16)

    assert_codes(result.view(np.uint16), [exact(code) for code in range(256)], [(code,) for code in range(256)])


@pytest.mark.parametrize("type_", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
@SETTINGS
@given(st.data())
def test_packed_integers(type_: str, data: st.DataObject):
    size = int(type_[1:])
    mask = (1 << size) - 1

    def pair(a: int, b: int) -> int:
        return (clamp(a, *limits(type_)) & mask) << size | clamp(b, *limits(type_)) & mask

    if size == 16:
        check(f"cvt.pack.sat.{type_}.s32", ("s32", "s32"), "u32", pair, draw_rows(data, ("s32", "s32")))
    else:
        names = ("s32", "s32", "u32")
        rows = draw_rows(data, names)
        check(f"cvt.pack.sat.{type_}.s32.b32", names, "u32", lambda a, b, c: pair(a, b) | c << 2 * size, rows)
