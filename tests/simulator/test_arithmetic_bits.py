"""Logic, shifts and bit fields against the PTX ISA's own pseudo code, bit by bit on Python's integers."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.test_arithmetic_integer import check, draw_rows, values, wrap
from simulator.test_arithmetic_reference import SETTINGS, product_of, run

from cupyops.simulator.arithmetic import resolve

ALL32 = 0xFFFFFFFF
small = st.one_of(st.integers(0, 70), st.integers(0, 300), values("u32"))


def rows_with_counts(data: st.DataObject, names: tuple[str, ...], counts: int) -> list[tuple[int, ...]]:
    """Rows of values, and of positions and lengths after them."""
    columns = [data.draw(st.lists(values(name), min_size=6, max_size=6)) for name in names]
    return product_of(*columns, *[data.draw(st.lists(small, min_size=8, max_size=8)) for _ in range(counts)])


@pytest.mark.parametrize("width", [16, 32, 64])
@SETTINGS
@given(st.data())
def test_logic(width: int, data: st.DataObject):
    name = f"u{width}"
    rows = draw_rows(data, (name, name))
    check(f"and.b{width}", (name, name), name, lambda a, b: a & b, rows)
    check(f"or.b{width}", (name, name), name, lambda a, b: a | b, rows)
    check(f"xor.b{width}", (name, name), name, lambda a, b: a ^ b, rows)
    singles = [(0,), *draw_rows(data, (name,))]
    check(f"not.b{width}", (name,), name, lambda a: ~a, singles)
    check(f"cnot.b{width}", (name,), name, lambda a: int(a == 0), singles)


def test_logic_of_predicates():
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    for name, expected in [("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0])]:
        operation = resolve(name, ("pred",), 3)
        assert operation is not None and operation.gives == ("b1",)
        assert run(operation.function, a, b).tolist() == expected
    operation = resolve("not", ("pred",), 2)
    assert operation is not None
    assert run(operation.function, a).tolist() == [True, True, False, False]


@pytest.mark.parametrize("width", [16, 32, 64])
@SETTINGS
@given(st.data())
def test_shifts(width: int, data: st.DataObject):
    for name in (f"u{width}", f"s{width}"):
        rows = rows_with_counts(data, (name,), 1)
        check(f"shr.{name}", (name, "u32"), name, lambda a, n: a >> min(n, width), rows)
    rows = rows_with_counts(data, (f"u{width}",), 1)
    check(f"shl.b{width}", (f"u{width}", "u32"), f"u{width}", lambda a, n: a << min(n, width), rows)
    check(f"shr.b{width}", (f"u{width}", "u32"), f"u{width}", lambda a, n: a >> min(n, width), rows)


@pytest.mark.parametrize("mode, amount", [("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))])
@SETTINGS
@given(st.data())
def test_funnel_shifts(mode: str, amount: Callable[[int], int], data: st.DataObject):
    rows, names = rows_with_counts(data, ("u32", "u32"), 1), ("u32",) * 3
    check(f"shf.l.{mode}.b32", names, "u32", lambda a, b, n: (b << 32 | a) << amount(n) >> 32, rows)
    check(f"shf.r.{mode}.b32", names, "u32", lambda a, b, n: (b << 32 | a) >> amount(n), rows)


@SETTINGS
@given(st.data())
def test_every_function_of_three_words(data: st.DataObject):
    operation = resolve("lop3", ("b32",), 5)
    assert operation is not None
    rows = [(0xF0, 0xCC, 0xAA), *draw_rows(data, ("u32",) * 3)[:40]]
    columns = [np.array([row[i] for row in rows], np.uint32) for i in range(3)]
    for table in range(256):
        result = run(operation.function, *columns, np.uint32(table))
        assert result.shape == (len(rows),) and result[0] & 0xFF == table
        for (a, b, c), found in zip(rows, result.tolist()):
            terms = [
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
            ]
            expected = 0
            for term in terms:
                expected |= term
            assert found == expected & ALL32, (hex(table), a, b, c)


def permuted(a: int, b: int, choices: list[int]) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    parts = []
    for choice in choices:
        byte = source[choice & 7]
        parts.append((0xFF if byte & 0x80 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(parts), "little")


@SETTINGS
@given(st.data())
def test_permutation_of_bytes(data: st.DataObject):
    rows = draw_rows(data, ("u32",) * 3)

    def exact(a: int, b: int, c: int) -> int:
        return permuted(a, b, [c >> 4 * i & 15 for i in range(4)])

    check("prmt.b32", ("u32",) * 3, "u32", exact, rows)
    operation = resolve("prmt", ("b32",), 4)
    assert operation is not None
    a, b = (np.array([row[i] for row in rows], np.uint32) for i in range(2))
    selectors = [0x5410, 0x7632, 0x3340, 0x0123, 0x4440, 0xBA98, 0x7531, 0x3210, *(row[2] for row in rows[:8])]
    for selector in selectors:
        result = run(operation.function, a, b, np.uint32(selector))
        assert result.tolist() == [exact(row[0], row[1], selector) for row in rows], hex(selector)


# As the PTX ISA lists them: for each value of the two bits, the bytes of the result from the highest to the lowest.
MODES = {
    "f4e": [(3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)],
    "b4e": [(5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)],
    "rc16": [(1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)],
}


@pytest.mark.parametrize("mode", list(MODES))
@SETTINGS
@given(st.data())
def test_permutation_modes(mode: str, data: st.DataObject):
    rows = draw_rows(data, ("u32",) * 3)
    check(f"prmt.b32.{mode}", ("u32",) * 3, "u32", lambda a, b, c: permuted(a, b, list(MODES[mode][c & 3][::-1])), rows)
    operation = resolve("prmt", ("b32", mode), 4)
    assert operation is not None
    for control in range(6):
        result = run(operation.function, np.uint32(0x33221100), np.uint32(0x77665544), np.uint32(control))
        expected = permuted(0x33221100, 0x77665544, list(MODES[mode][control & 3][::-1]))
        assert isinstance(result, np.uint32) and result == expected


@pytest.mark.parametrize("width", [32, 64])
@SETTINGS
@given(st.data())
def test_counted_and_reversed(width: int, data: st.DataObject):
    name = f"u{width}"
    rows = [(0,), ((1 << width) - 1,), *((1 << bit,) for bit in range(width)), *draw_rows(data, (name,))]
    rows += [((1 << bit) - 1,) for bit in range(width)]
    check(f"popc.b{width}", (name,), "u32", lambda a: a.bit_count(), rows)
    check(f"clz.b{width}", (name,), "u32", lambda a: width - a.bit_length(), rows)
    check(f"brev.b{width}", (name,), name, lambda a: int(f"{a:0{width}b}"[::-1], 2), rows)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@SETTINGS
@given(st.data())
def test_find_highest(type_: str, data: st.DataObject):
    top = int(type_[1:]) - 1
    rows = [(0,), (wrap(-1, type_),), *draw_rows(data, (type_,))]

    def highest(a: int) -> int:
        return (~a if a < 0 else a).bit_length() - 1

    check(f"bfind.{type_}", (type_,), "u32", highest, rows)
    check(f"bfind.shiftamt.{type_}", (type_,), "u32", lambda a: -1 if highest(a) < 0 else top - highest(a), rows)


def field_end(count: int, width: int) -> int:
    """What a GPU takes of a position or length: the low byte for 32 bits, as PTX says; for 64 bits all of it."""
    return count & 255 if width == 32 else min(count, 64)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@SETTINGS
@given(st.data())
def test_extracted_fields(type_: str, data: st.DataObject):
    top = int(type_[1:]) - 1

    def exact(a: int, position: int, length: int) -> int:
        position, length = field_end(position, top + 1), field_end(length, top + 1)
        sign = 0 if type_[0] == "u" or length == 0 else a >> min(position + length - 1, top) & 1
        bits = [a >> position + i & 1 if i < length and position + i <= top else sign for i in range(top + 1)]
        return sum(bit << i for i, bit in enumerate(bits))

    check(f"bfe.{type_}", (type_, "u32", "u32"), type_, exact, rows_with_counts(data, (type_,), 2))


@pytest.mark.parametrize("width", [32, 64])
@SETTINGS
@given(st.data())
def test_inserted_fields(width: int, data: st.DataObject):
    def exact(a: int, b: int, position: int, length: int) -> int:
        position, length = field_end(position, width), field_end(length, width)
        for i in range(length):
            if position + i < width:
                b = b & ~(1 << position + i) | (a >> i & 1) << position + i
        return b

    name = f"u{width}"
    check(f"bfi.b{width}", (name, name, "u32", "u32"), name, exact, rows_with_counts(data, (name, name), 2))


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@SETTINGS
@given(st.data())
def test_masks(mode: str, data: st.DataObject):
    def exact(a: int, b: int) -> int:
        a1, b1 = a & 31, b & 31
        mask0, mask1 = ~0 << a1, ~0 << a1 + b1
        overflows = a1 + b1 >= 32 or (mode == "clamp" and (a >= 32 or b >= 32))
        if mode == "clamp" and a >= 32:
            mask0 = 0
        if overflows:
            mask1 = 0
        elif b1 == 0:
            mask1 = ~0
        return mask0 & ~mask1

    counts = data.draw(st.lists(small, min_size=20, max_size=20))
    check(f"bmsk.{mode}.b32", ("u32", "u32"), "u32", exact, product_of(counts, [0, 1, 31, 32, *counts]))


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("type_", ["u32", "s32"])
@SETTINGS
@given(st.data())
def test_extended(type_: str, mode: str, data: st.DataObject):
    def exact(a: int, b: int) -> int:
        width = b & 31
        whole = b >= 32 and mode == "clamp"
        mask = 0 if whole else ~0 << width
        sign = width != 0 and not whole and type_ == "s32" and a >> (width - 1 & 31) & 1
        return a & ~mask | (mask if sign else 0)

    rows = [(a, n) for a, n in rows_with_counts(data, (type_,), 1)] + [(wrap(0xDEADBEEF, type_), n) for n in range(70)]
    check(f"szext.{mode}.{type_}", (type_, "u32"), type_, exact, rows)


@SETTINGS
@given(st.data())
def test_find_nth(data: st.DataObject):
    def exact(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else -1
        position, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
        while 0 <= position < 32:
            if mask >> position & 1:
                if count == 0:
                    return position
                count -= 1
            position += step
        return -1

    masks = data.draw(st.lists(values("u32"), min_size=10, max_size=10))
    offsets = [-40, -3, -2, -1, 0, 1, 2, 3, 32, -(2**31)]
    check(
        "fns.b32", ("u32", "u32", "s32"), "u32", exact, product_of([0xAAAAAAAA, *masks], [0, 1, 2, 3, 16, 31], offsets)
    )
