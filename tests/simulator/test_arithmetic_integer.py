"""Integer arithmetic against Python's integers."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.test_arithmetic_reference import SETTINGS, product_of, run

from cupyops.simulator.arithmetic import combine, resolve

TYPES = ["u16", "u32", "u64", "s16", "s32", "s64"]
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
DTYPES = {f"{sign}{width}": np.dtype(f"{'u' * (sign == 'u')}int{width}") for sign in "us" for width in (8, 16, 32, 64)}
DTYPES["b1"] = np.dtype(bool)


def wrap(value: int, name: str) -> int:
    """The value modulo 2^width, in the range of the type."""
    width = int(name[1:])
    value &= (1 << width) - 1
    return value - (1 << width) if name[0] == "s" and value >> width - 1 else value


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def values(name: str) -> st.SearchStrategy[int]:
    """Any, small ones, and those near powers of two and near the ends."""
    width = int(name[1:])
    near = st.builds(lambda bit, offset: (1 << bit) + offset, st.integers(0, width), st.integers(-2, 2))
    return st.one_of(st.integers(0, (1 << width) - 1), st.integers(-3, 3), near).map(lambda value: wrap(value, name))


def draw_rows(data: st.DataObject, names: tuple[str, ...]) -> list[tuple[int, ...]]:
    size = {1: 200, 2: 20, 3: 9, 4: 6, 5: 4}[len(names)]
    return product_of(*[data.draw(st.lists(values(name), min_size=size, max_size=size)) for name in names])


def check(
    instruction: str, names: tuple[str, ...], gives: str, exact: Callable[..., int], rows: list[tuple[int, ...]]
) -> None:
    """The operation on integers that are read as `names`, its result read as `gives`."""
    opcode, *modifiers = instruction.split(".")
    operation = resolve(opcode, tuple(modifiers), len(names) + 1)
    assert operation is not None
    arguments = []
    for index, (name, view) in enumerate(zip(names, operation.takes)):
        arguments.append(np.array([row[index] for row in rows], DTYPES[name]).view(DTYPES[view]))
    copies = [each.copy() for each in arguments]
    result = run(operation.function, *arguments)
    assert all(np.array_equal(each, copy) for each, copy in zip(arguments, copies))
    assert result.dtype == DTYPES[operation.gives[0]]
    found = result.view(DTYPES[gives]).tolist()
    expected = [wrap(exact(*row), gives) for row in rows]
    wrong = [(row, got, want) for row, got, want in zip(rows, found, expected) if got != want]
    assert not wrong, f"{instruction}: {len(wrong)} of {len(rows)}, such as {wrong[0]}"


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - b * quotient(a, b)


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "div": quotient,
    "rem": remainder,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("name", list(BINARY))
@SETTINGS
@given(st.data())
def test_of_two(name: str, type_: str, data: st.DataObject):
    check(f"{name}.{type_}", (type_, type_), type_, BINARY[name], draw_rows(data, (type_, type_)))


@pytest.mark.parametrize("type_", TYPES)
@SETTINGS
@given(st.data())
def test_products_and_sums_of_three(type_: str, data: st.DataObject):
    width = int(type_[1:])
    two = draw_rows(data, (type_, type_))
    three = draw_rows(data, (type_, type_, type_))
    check(f"mul.hi.{type_}", (type_,) * 2, type_, lambda a, b: a * b >> width, two)
    check(f"mad.lo.{type_}", (type_,) * 3, type_, lambda a, b, c: a * b + c, three)
    check(f"mad.hi.{type_}", (type_,) * 3, type_, lambda a, b, c: (a * b >> width) + c, three)
    check(f"sad.{type_}", (type_,) * 3, type_, lambda a, b, c: abs(a - b) + c, three)


@pytest.mark.parametrize("type_", list(WIDE))
@SETTINGS
@given(st.data())
def test_wide_products(type_: str, data: st.DataObject):
    wide = WIDE[type_]
    check(f"mul.wide.{type_}", (type_,) * 2, wide, lambda a, b: a * b, draw_rows(data, (type_, type_)))
    rows = draw_rows(data, (type_, type_, wide))
    check(f"mad.wide.{type_}", (type_, type_, wide), wide, lambda a, b, c: a * b + c, rows)


LEAST, MOST = -(2**31), 2**31 - 1


@SETTINGS
@given(st.data())
def test_saturation(data: st.DataObject):
    two, three = draw_rows(data, ("s32",) * 2), draw_rows(data, ("s32",) * 3)
    check("add.sat.s32", ("s32",) * 2, "s32", lambda a, b: clamp(a + b, LEAST, MOST), two)
    check("sub.sat.s32", ("s32",) * 2, "s32", lambda a, b: clamp(a - b, LEAST, MOST), two)
    check("mad.hi.sat.s32", ("s32",) * 3, "s32", lambda a, b, c: clamp((a * b >> 32) + c, LEAST, MOST), three)
    check("min.relu.s32", ("s32",) * 2, "s32", lambda a, b: max(0, min(a, b)), two)
    check("max.relu.s32", ("s32",) * 2, "s32", lambda a, b: max(0, a, b), two)


@pytest.mark.parametrize("type_", ["u32", "s32"])
@SETTINGS
@given(st.data())
def test_products_of_24_bits(type_: str, data: st.DataObject):
    def low(value: int) -> int:
        return wrap(value, type_[0] + "24")

    two, three = draw_rows(data, (type_,) * 2), draw_rows(data, (type_,) * 3)
    check(f"mul24.lo.{type_}", (type_,) * 2, type_, lambda a, b: low(a) * low(b), two)
    check(f"mul24.hi.{type_}", (type_,) * 2, type_, lambda a, b: low(a) * low(b) >> 16, two)
    check(f"mad24.lo.{type_}", (type_,) * 3, type_, lambda a, b, c: low(a) * low(b) + c, three)
    check(f"mad24.hi.{type_}", (type_,) * 3, type_, lambda a, b, c: (low(a) * low(b) >> 16) + c, three)
    if type_ == "s32":
        rows = three + [(a, b, c) for a, b, _ in three for c in (LEAST, MOST)]
        check(
            "mad24.hi.sat.s32",
            (type_,) * 3,
            type_,
            lambda a, b, c: clamp((low(a) * low(b) >> 16) + c, LEAST, MOST),
            rows,
        )


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
@SETTINGS
@given(st.data())
def test_signs(type_: str, data: st.DataObject):
    rows = draw_rows(data, (type_,))
    check(f"abs.{type_}", (type_,), type_, abs, rows)
    check(f"neg.{type_}", (type_,), type_, lambda a: -a, rows)


def halves(function: Callable[[int, int], int], type_: str) -> Callable[[int, int], int]:
    def apply(a: int, b: int) -> int:
        parts = [function(wrap(a >> shift, type_), wrap(b >> shift, type_)) & 0xFFFF for shift in (0, 16)]
        return parts[0] | parts[1] << 16

    return apply


@pytest.mark.parametrize("type_", ["u16", "s16"])
@SETTINGS
@given(st.data())
def test_two_in_a_word(type_: str, data: st.DataObject):
    halves_of_words = data.draw(st.lists(values("u16"), min_size=40, max_size=40))
    words = [low | high << 16 for low, high in zip(halves_of_words[::2], halves_of_words[1::2])]
    rows = product_of(words, words)
    functions: dict[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "min": min, "max": max}
    for name, function in functions.items():
        check(f"{name}.{type_}x2", ("u32", "u32"), "u32", halves(function, type_), rows)
    if type_ == "s16":
        check("min.relu.s16x2", ("u32", "u32"), "u32", halves(lambda a, b: max(0, min(a, b)), type_), rows)
        check("max.relu.s16x2", ("u32", "u32"), "u32", halves(lambda a, b: max(0, a, b), type_), rows)


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
@SETTINGS
@given(st.data())
def test_dot_products(a_type: str, b_type: str, data: st.DataObject):
    def parts(word: int, name: str, width: int) -> list[int]:
        return [wrap(word >> shift, f"{name[0]}{width}") for shift in range(0, 32, width)]

    def dot(a: list[int], b: list[int], c: int) -> int:
        return sum(x * y for x, y in zip(a, b)) + c

    rows = draw_rows(data, ("u32",) * 3)
    names, types = ("u32",) * 3, f"{a_type}.{b_type}"
    check(f"dp4a.{types}", names, "u32", lambda a, b, c: dot(parts(a, a_type, 8), parts(b, b_type, 8), c), rows)
    check(f"dp2a.lo.{types}", names, "u32", lambda a, b, c: dot(parts(a, a_type, 16), parts(b, b_type, 8)[:2], c), rows)
    check(f"dp2a.hi.{types}", names, "u32", lambda a, b, c: dot(parts(a, a_type, 16), parts(b, b_type, 8)[2:], c), rows)


# The carry of a difference is that of a + ~b + 1: set where nothing was borrowed, as the hardware has it.
CARRIED: dict[str, Callable[[int, int, int, int], int]] = {
    "add.cc": lambda a, b, c, width: a + b,
    "addc": lambda a, b, c, width: a + b + c,
    "addc.cc": lambda a, b, c, width: a + b + c,
    "sub.cc": lambda a, b, c, width: a - b + (1 << width),
    "subc": lambda a, b, c, width: a - b - (1 - c) + (1 << width),
    "subc.cc": lambda a, b, c, width: a - b - (1 - c) + (1 << width),
}


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", list(CARRIED))
@SETTINGS
@given(st.data())
def test_carry(name: str, type_: str, data: st.DataObject):
    unsigned, width = "u" + type_[1:], int(type_[1:])
    opcode, *flags = name.split(".")
    operation = resolve(opcode, (*flags, type_), 3)
    assert operation is not None
    assert (operation.carry_in, operation.carry_out) == (opcode.endswith("c"), "cc" in flags)
    rows = product_of(*[data.draw(st.lists(values(unsigned), min_size=16, max_size=16))] * 2, [0, 1])
    arguments = [np.array([row[i] for row in rows], DTYPES[unsigned]) for i in range(2)]
    if operation.carry_in:
        arguments.append(np.array([row[2] for row in rows], bool))
    results = run(operation.function, *arguments)
    total, carry = results if operation.carry_out else (results, None)
    expected = [CARRIED[name](*row, width) for row in rows]
    assert total.tolist() == [wrap(value, unsigned) for value in expected]
    if carry is not None:
        assert carry.dtype == bool
        assert carry.tolist() == [value >> width == 1 for value in expected]


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("part", ["lo", "hi"])
@pytest.mark.parametrize("opcode, cc", [("mad", True), ("madc", False), ("madc", True)])
@SETTINGS
@given(st.data())
def test_carry_of_products(opcode: str, cc: bool, part: str, type_: str, data: st.DataObject):
    unsigned, width = "u" + type_[1:], int(type_[1:])
    operation = resolve(opcode, (part, *(("cc",) if cc else ()), type_), 4)
    assert operation is not None
    assert (operation.carry_in, operation.carry_out) == (opcode == "madc", cc)
    rows = product_of(*[data.draw(st.lists(values(type_), min_size=7, max_size=7)) for _ in range(3)], [0, 1])
    arguments = [
        np.array([row[i] for row in rows], DTYPES[type_]).view(DTYPES[view]) for i, view in enumerate(operation.takes)
    ]
    carries = [np.array([row[3] for row in rows], bool)] if operation.carry_in else []
    results = run(operation.function, *arguments, *carries)
    total, carry = results if cc else (results, None)
    expected = []
    for a, b, c, flag in rows:
        product = a * b >> (width if part == "hi" else 0)
        expected.append(wrap(product, unsigned) + wrap(c, unsigned) + flag * operation.carry_in)
    assert total.tolist() == [wrap(value, unsigned) for value in expected]
    if carry is not None:
        assert carry.tolist() == [value >> width == 1 for value in expected]


def test_a_number_of_128_bits_is_added_with_carries():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 4, 50), dtype=np.uint32)
    words[:, :, ::3] = 0xFFFFFFFF
    first, middle, last = (
        resolve(name, (*flags, "u32"), 3) for name, flags in [("add", ("cc",)), ("addc", ("cc",)), ("addc", ())]
    )
    assert first is not None and middle is not None and last is not None
    low, carry = run(first.function, words[0, 0], words[1, 0])
    second, carry = run(middle.function, words[0, 1], words[1, 1], carry)
    third, carry = run(middle.function, words[0, 2], words[1, 2], carry)
    high = run(last.function, words[0, 3], words[1, 3], carry)
    for lane in range(50):
        a, b = (sum(int(words[i, k, lane]) << 32 * k for k in range(4)) for i in range(2))
        total = sum(int(part[lane]) << 32 * k for k, part in enumerate([low, second, third, high]))
        assert total == (a + b) % 2**128


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@SETTINGS
@given(st.data())
def test_atomics_combine_integers(type_: str, data: st.DataObject):
    rows = draw_rows(data, (type_, type_))
    old, value = (np.array([row[i] for row in rows], DTYPES[type_]) for i in range(2))
    functions: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: wrap(a + b, type_),
        "min": min,
        "max": max,
        "exch": lambda a, b: b,
    }
    for op, function in functions.items():
        assert run(combine(op, type_), old, value).tolist() == [function(*row) for row in rows], op


@SETTINGS
@given(st.data())
def test_atomics_count_and_combine_bits(data: st.DataObject):
    rows = draw_rows(data, ("u32", "u32"))
    old, value = (np.array([row[i] for row in rows], np.uint32) for i in range(2))
    functions: dict[tuple[str, str], Callable[[int, int], int]] = {
        ("inc", "u32"): lambda a, b: 0 if a >= b else a + 1,
        ("dec", "u32"): lambda a, b: b if a == 0 or a > b else a - 1,
        ("and", "b32"): lambda a, b: a & b,
        ("or", "b32"): lambda a, b: a | b,
        ("xor", "b32"): lambda a, b: a ^ b,
    }
    for (op, type_), function in functions.items():
        result = run(combine(op, type_), old, value)
        assert result.dtype == np.uint32
        assert result.tolist() == [function(*row) for row in rows], op
