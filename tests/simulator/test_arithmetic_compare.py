"""Comparisons, selections, minima and maxima, by the definitions of the PTX ISA."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import test_arithmetic_reference as reference
from simulator.test_arithmetic_integer import DTYPES, draw_rows
from simulator.test_arithmetic_reference import (
    F32,
    F64,
    FORMATS,
    SETTINGS,
    Binary,
    Number,
    assert_codes,
    column,
    decode,
    is_nan,
    lists_of,
    product_of,
    round_to,
    run,
    signed,
)

from cupyops.simulator.arithmetic import combine, resolve

Compare = Callable[[Any, Any], bool]
ORDER: dict[str, Compare] = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
EQUALITY: dict[str, Compare] = {"eq": operator.eq, "ne": operator.ne}
UNSIGNED: dict[str, Compare] = dict(zip(["lo", "ls", "hi", "hs"], ORDER.values()))
COMBINE: dict[str, Compare] = {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": operator.ne}


def of_floats(name: str) -> Compare:
    """A comparison of numbers, with what it says of NaN."""
    if name in ("num", "nan"):
        return lambda a, b: (is_nan(a) or is_nan(b)) == (name == "nan")
    ordered = {**ORDER, **EQUALITY}
    unordered = name not in ordered
    compare = ordered[name.removesuffix("u") if unordered else name]
    return lambda a, b: unordered if is_nan(a) or is_nan(b) else compare(a, b)


FLOATING = [*ORDER, *EQUALITY, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


def taken(codes: list[int], form: Binary) -> np.ndarray:
    array = np.array(codes, form.dtype)
    return array.view(f"f{form.width // 8}") if form in (F32, F64) else array


def check_set(modifiers: tuple[str, ...], arguments: list[np.ndarray], holds: list[bool]) -> None:
    """setp, alone and with each combination, given what the comparison says of each lane."""
    operation = resolve("setp", modifiers, 3)
    assert operation is not None and operation.gives == ("b1", "b1")
    yes, no = run(operation.function, *arguments)
    assert yes.dtype == no.dtype == bool
    assert yes.tolist() == holds and no.tolist() == [not each for each in holds]
    flags = np.arange(len(holds)) % 3 == 0
    for name, join in COMBINE.items():
        combined = resolve("setp", (modifiers[0], name, *modifiers[1:]), 4)
        assert combined is not None and combined.takes[-1] == "b1"
        yes, no = run(combined.function, *arguments, flags)
        assert yes.tolist() == [bool(join(each, flag)) for each, flag in zip(holds, flags)]
        assert no.tolist() == [bool(join(not each, flag)) for each, flag in zip(holds, flags)]


@pytest.mark.parametrize("type_", ["u16", "u32", "u64", "s16", "s32", "s64"])
@SETTINGS
@given(st.data())
def test_integers(type_: str, data: st.DataObject):
    rows = draw_rows(data, (type_, type_))
    rows += [(a, a) for a, _ in rows]
    arguments = [column(rows, i, DTYPES[type_].type) for i in range(2)]
    for name, compare in {**ORDER, **EQUALITY, **(UNSIGNED if type_[0] == "u" else {})}.items():
        check_set((name, type_), arguments, [compare(*row) for row in rows])
    if type_[0] == "u":
        for name, compare in EQUALITY.items():
            check_set((name, "b" + type_[1:]), arguments, [compare(*row) for row in rows])


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("type_", list(FORMATS))
@SETTINGS
@given(st.data())
def test_floats(type_: str, name: str, data: st.DataObject):
    form = FORMATS[type_]
    zeros = [0, 1 << form.width - 1, form.infinity, form.infinity + 1]
    rows = product_of([*data.draw(lists_of(form, 8)), *zeros], [*data.draw(lists_of(form, 8)), *zeros])
    rows += [(a, a) for a, _ in rows[::12]]
    compare = of_floats(name)
    columns = [[row[i] for row in rows] for i in range(2)]
    holds = [compare(*[signed(decode(code, form)) for code in row]) for row in rows]
    check_set((name, type_), [taken(codes, form) for codes in columns], holds)
    if type_ not in ("f32", "f64"):
        words = [np.array(codes, np.uint16).view(np.uint32) for codes in columns]
        check_halves((name, type_ + "x2"), words, holds)
    if type_ in ("f16", "f32"):
        flat = [[signed(reference.flush(decode(code, form), form)) for code in row] for row in rows]
        check_set((name, "ftz", type_), [taken(codes, form) for codes in columns], [compare(*row) for row in flat])


def check_halves(modifiers: tuple[str, ...], words: list[np.ndarray], holds: list[bool]) -> None:
    """setp and set of two halves at a time."""
    operation = resolve("setp", modifiers, 3)
    assert operation is not None
    lower, upper = run(operation.function, *words)
    assert lower.tolist() == holds[::2] and upper.tolist() == holds[1::2]
    flags = np.arange(len(words[0])) % 3 == 0
    combined = resolve("setp", (modifiers[0], "xor", modifiers[1]), 4)
    assert combined is not None
    lower, upper = run(combined.function, *words, flags)
    assert lower.tolist() == [bool(a != b) for a, b in zip(holds[::2], flags)]
    assert upper.tolist() == [bool(a != b) for a, b in zip(holds[1::2], flags)]
    one = 0x3C00 if modifiers[1] == "f16x2" else 0x3F80
    for target, true in [("u32", 0xFFFF), ("s32", 0xFFFF), (modifiers[1], one)]:
        plain = resolve("set", (modifiers[0], target, modifiers[1]), 3)
        joined = resolve("set", (modifiers[0], "and", target, modifiers[1]), 4)
        assert plain is not None and joined is not None
        assert run(plain.function, *words).view(np.uint16).tolist() == [true * each for each in holds]
        result = run(joined.function, *words, flags).view(np.uint16).tolist()
        assert result == [true * (each and bool(flags[i // 2])) for i, each in enumerate(holds)]


@pytest.mark.parametrize("source", ["u16", "s32", "b64", "f16", "bf16", "f32", "f64"])
@SETTINGS
@given(st.data())
def test_set_writes_ones(source: str, data: st.DataObject):
    if source in FORMATS:
        form = FORMATS[source]
        rows = product_of(data.draw(lists_of(form, 10)), data.draw(lists_of(form, 10)))
        arguments = [taken([row[i] for row in rows], form) for i in range(2)]
        holds = [of_floats("neu")(*[signed(decode(code, form)) for code in row]) for row in rows]
        name = "neu"
    else:
        integer = source.replace("b", "u")
        rows = draw_rows(data, (integer, integer))
        arguments = [column(rows, i, DTYPES[integer].type) for i in range(2)]
        holds, name = [a != b for a, b in rows], "ne"
    targets = {"u32": np.uint32(2**32 - 1), "s32": np.uint32(2**32 - 1), "f32": np.float32(1)}
    targets |= {"f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}
    if source in ("f16", "bf16"):
        targets |= {"u16": np.uint16(0xFFFF), "s16": np.uint16(0xFFFF)}
    flags = np.arange(len(rows)) % 2 == 0
    for target, true in targets.items():
        plain, joined = resolve("set", (name, target, source), 3), resolve("set", (name, "or", target, source), 4)
        assert plain is not None and joined is not None
        result = run(plain.function, *arguments)
        assert result.dtype == true.dtype
        assert result.tolist() == [true.item() * each for each in holds]
        either = run(joined.function, *arguments, flags)
        assert either.tolist() == [true.item() * bool(each or flag) for each, flag in zip(holds, flags)]


def test_selection():
    a, b = np.arange(6, dtype=np.uint32), np.arange(10, 16, dtype=np.uint32)
    chosen = np.array([1, 0, 1, 0, 0, 1], bool)
    select = resolve("selp", ("b32",), 4)
    assert select is not None
    assert run(select.function, a, b, chosen).tolist() == [0, 11, 2, 13, 14, 5]
    floats = np.array([0.0, -0.0, -1.0, np.nan, 1.0, -1e-40], np.float32)
    by_float, flushed = resolve("slct", ("u32", "f32"), 4), resolve("slct", ("ftz", "u32", "f32"), 4)
    by_integer = resolve("slct", ("u32", "s32"), 4)
    assert by_float is not None and flushed is not None and by_integer is not None
    assert run(by_float.function, a, b, floats).tolist() == [0, 1, 12, 13, 4, 15]
    assert run(flushed.function, a, b, floats).tolist() == [0, 1, 12, 13, 4, 5]
    signs = np.array([0, -1, 5, -(2**31), 2**31 - 1, -7], np.int32)
    assert run(by_integer.function, a, b, signs).tolist() == [0, 11, 2, 13, 4, 15]


@pytest.mark.parametrize("type_", ["f32", "f64"])
@SETTINGS
@given(st.data())
def test_tests_of_floats(type_: str, data: st.DataObject):
    form = FORMATS[type_]
    codes = [0, 1, 1 << form.width - 1, form.infinity, form.infinity + 1, *data.draw(lists_of(form, 60))]
    magnitudes = [decode(code, form)[1] for code in codes]
    least = reference.two_to(form.bottom)
    expected: dict[str, Callable[[Any], bool]] = {
        "finite": lambda m: m < float("inf"),
        "infinite": lambda m: m == float("inf"),
        "number": lambda m: not is_nan(m),
        "notanumber": is_nan,
        "normal": lambda m: m == 0 or least <= m < float("inf"),
        "subnormal": lambda m: 0 < m < least,
    }
    for name, predicate in expected.items():
        operation = resolve("testp", (name, type_), 2)
        assert operation is not None
        assert run(operation.function, taken(codes, form)).tolist() == [predicate(m) for m in magnitudes], name


def extreme(name: str, nan: bool, *numbers: Number) -> Number:
    """-0 is less than +0; NaN counts for nothing, or for everything."""
    there = [number for number in numbers if not is_nan(number[1])]
    if not there or (nan and len(there) < len(numbers)):
        return 0, float("nan")
    pick = min if name == "min" else max
    return pick(there, key=lambda number: (signed(number), -number[0]))


FORMS = {
    "f32": [(), ("ftz",), ("NaN",), ("xorsign", "abs"), ("ftz", "NaN", "xorsign", "abs")],
    "f64": [()],
    "f16": [(), ("ftz",), ("NaN",), ("xorsign", "abs"), ("ftz", "NaN")],
    "bf16": [(), ("NaN",), ("NaN", "xorsign", "abs")],
}


@pytest.mark.parametrize("type_, modifiers", [(type_, each) for type_, forms in FORMS.items() for each in forms])
@pytest.mark.parametrize("name", ["min", "max"])
@SETTINGS
@given(st.data())
def test_extremes(name: str, type_: str, modifiers: tuple[str, ...], data: st.DataObject):
    form = FORMATS[type_]
    special = [0, 1 << form.width - 1, 1, form.infinity, form.infinity + 5]
    rows = product_of([*special, *data.draw(lists_of(form, 10))], [*special, *data.draw(lists_of(form, 10))])
    rows = rows[: len(rows) // 2 * 2]

    def exact(*row: int) -> int:
        numbers = [decode(code, form) for code in row]
        if "ftz" in modifiers:
            numbers = [reference.flush(number, form) for number in numbers]
        if "abs" not in modifiers:
            return round_to(extreme(name, "NaN" in modifiers, *numbers), form)
        magnitude = extreme(name, "NaN" in modifiers, *[(0, number[1]) for number in numbers])[1]
        return round_to((numbers[0][0] ^ numbers[1][0], magnitude), form)

    expected = [exact(*row) for row in rows]
    operation = resolve(name, (*modifiers, type_), 3)
    assert operation is not None
    arguments = [taken([row[i] for row in rows], form) for i in range(2)]
    assert_codes(run(operation.function, *arguments).view(form.dtype), expected, rows, form)
    if form.width == 16:
        packed = resolve(name, (*modifiers, type_ + "x2"), 3)
        assert packed is not None
        words = run(packed.function, *[each.view(np.uint32) for each in arguments])
        assert_codes(words.view(np.uint16), expected, rows)


@pytest.mark.parametrize("modifiers", [(), ("ftz",), ("NaN",), ("abs",), ("ftz", "NaN", "abs")])
@pytest.mark.parametrize("name", ["min", "max"])
@SETTINGS
@given(st.data())
def test_extremes_of_three(name: str, modifiers: tuple[str, ...], data: st.DataObject):
    special = [0, 1 << 31, F32.infinity + 5]
    rows = product_of(*[[*special, *data.draw(lists_of(F32, 4))] for _ in range(3)])
    expected = []
    for row in rows:
        numbers = [decode(code, F32) for code in row]
        if "ftz" in modifiers:
            numbers = [reference.flush(number, F32) for number in numbers]
        if "abs" in modifiers:
            numbers = [(0, number[1]) for number in numbers]
        expected.append(round_to(extreme(name, "NaN" in modifiers, *numbers), F32))
    operation = resolve(name, (*modifiers, "f32"), 4)
    assert operation is not None
    result = run(operation.function, *[taken([row[i] for row in rows], F32) for i in range(3)])
    assert_codes(result.view(np.uint32), expected, rows)


@pytest.mark.parametrize("type_", list(FORMATS))
@SETTINGS
@given(st.data())
def test_atomics_combine_floats(type_: str, data: st.DataObject):
    form = FORMATS[type_]
    rows = product_of(data.draw(lists_of(form, 12)), data.draw(lists_of(form, 12)))
    functions: dict[str, Callable[[Number, Number], Number]] = {
        "add": reference.add,
        "min": lambda a, b: extreme("min", False, a, b),
        "max": lambda a, b: extreme("max", False, a, b),
    }
    old, value = (taken([row[i] for row in rows], form) for i in range(2))
    for op, function in functions.items():
        expected = [round_to(function(*[decode(code, form) for code in row]), form) for row in rows]
        assert_codes(run(combine(op, type_), old, value).view(form.dtype), expected, rows, form)
        if form.width == 16:
            words = run(combine(op, type_ + "x2"), old.view(np.uint32), value.view(np.uint32))
            assert_codes(words.view(np.uint16), expected, rows)
    assert run(combine("exch", type_), old, value).tobytes() == value.tobytes()
