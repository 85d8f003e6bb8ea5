"""Approximate functions: the tables of the PTX ISA for special operands, and Python's functions for the others."""

import math
from collections.abc import Callable
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.test_arithmetic_reference import F32 as F32_FORMAT
from simulator.test_arithmetic_reference import SETTINGS, lists_of, run

from cupyops.simulator.arithmetic import resolve

TINY = 1e-40  # subnormal in float32
# The result for -inf, -1.5, -0, +0, +inf and NaN.
TABLES: dict[str, list[float]] = {
    "rcp": [-0.0, 1 / -1.5, -inf, inf, 0.0, nan],
    "sqrt": [nan, nan, -0.0, 0.0, inf, nan],
    "rsqrt": [nan, nan, -inf, inf, 0.0, nan],
    "sin": [nan, math.sin(-1.5), -0.0, 0.0, nan, nan],
    "cos": [nan, math.cos(-1.5), 1.0, 1.0, nan, nan],
    "lg2": [nan, nan, -inf, -inf, inf, nan],
    "ex2": [0.0, 2**-1.5, 1.0, 1.0, inf, nan],
    "tanh": [-1.0, math.tanh(-1.5), -0.0, 0.0, 1.0, nan],
}
SPECIAL = [-inf, -1.5, -0.0, 0.0, inf, nan]
# With .ftz, for -TINY and +TINY, each taken for a zero of its sign.
FLUSHED = {
    "rcp": [-inf, inf],
    "sqrt": [-0.0, 0.0],
    "rsqrt": [-inf, inf],
    "sin": [-0.0, 0.0],
    "cos": [1.0, 1.0],
    "lg2": [-inf, -inf],
    "ex2": [1.0, 1.0],
}
EXACT: dict[str, Callable[[float], float]] = {
    "rcp": lambda x: 1 / x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "lg2": math.log2,
    "ex2": lambda x: 2.0**x,
    "tanh": math.tanh,
}


def compute(name: str, modifiers: tuple[str, ...], *arguments: np.ndarray) -> np.ndarray:
    operation = resolve(name, modifiers, len(arguments) + 1)
    assert operation is not None
    return run(operation.function, *arguments)


def same(found: np.ndarray, expected: list[float], dtype: type = np.float32) -> None:
    """Equal bits, NaN the canonical one."""
    wanted = np.array(expected, dtype)
    if dtype is np.float32:
        wanted = np.where(np.isnan(wanted), np.uint32(0x7FFFFFFF).view(np.float32), wanted)
        assert [hex(bits) for bits in found.view(np.uint32)] == [hex(bits) for bits in wanted.view(np.uint32)]
    else:
        assert found.tolist() == pytest.approx(wanted.tolist(), rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", list(TABLES))
def test_special_operands(name: str):
    same(compute(name, ("approx", "f32"), np.array(SPECIAL, np.float32)), TABLES[name])
    if name in FLUSHED:
        flushed = compute(name, ("approx", "ftz", "f32"), np.array([*SPECIAL, -TINY, TINY], np.float32))
        same(flushed, [*TABLES[name], *FLUSHED[name]])


def test_tanh_passes_subnormal_numbers():
    tiny = np.array([-TINY, TINY], np.float32)
    same(compute("tanh", ("approx", "f32"), tiny), tiny.tolist())


def test_flushed_results():
    same(compute("ex2", ("approx", "ftz", "f32"), np.array([-126, -126.5, -140], np.float32)), [2.0**-126, 0.0, 0.0])
    same(
        compute("ex2", ("approx", "f32"), np.array([-126, -140, -149, -151], np.float32)),
        [2.0**-126, 2.0**-140, 2.0**-149, 0],
    )
    same(compute("rcp", ("approx", "ftz", "f32"), np.array([2.0**127, -(2.0**127)], np.float32)), [0.0, -0.0])


@pytest.mark.parametrize("name", list(EXACT))
@SETTINGS
@given(st.data())
def test_nearest_to_the_function(name: str, data: st.DataObject):
    """Within half an ulp and a little of the function in float64: nearer than what PTX promises."""
    codes = np.array(data.draw(lists_of(F32_FORMAT, 100)), np.uint32).view(np.float32)
    low = {"sqrt": 0.0, "rsqrt": 1e-45, "lg2": 1e-45}.get(name, -120.0)
    high = {"ex2": 120.0, "sin": 300.0, "cos": 300.0}.get(name, 1e30)
    floats = codes[(codes >= low) & (codes <= high) & (codes != 0) & (np.abs(codes) > 1e-37)]
    found = compute(name, ("approx", "f32"), floats).astype(np.float64)
    for x, y in zip(floats.tolist(), found.tolist()):
        expected = EXACT[name](x)
        assert abs(y - expected) <= 0.5001 * np.spacing(np.float32(abs(expected))) + 2.0**-150, x


def test_division_approximately():
    a = np.array([1, -1, inf, 6, 0, 3], np.float32)
    b = np.array([2.0**127, 2.0**127, 2.0**127, 3, 0, inf], np.float32)
    same(compute("div", ("approx", "f32"), a, b), [0.0, -0.0, nan, 2.0, nan, 0.0])
    same(compute("div", ("full", "f32"), a, b), [2.0**-127, -(2.0**-127), inf, 2.0, nan, 0.0])
    same(compute("div", ("full", "ftz", "f32"), a, b), [0.0, -0.0, inf, 2.0, nan, 0.0])
    limit = np.float32(2.0**126)
    same(
        compute("div", ("approx", "f32"), np.float32([1, 1]), np.array([limit, np.nextafter(limit, np.float32(inf))])),
        [2.0**-126, 0.0],
    )


def test_rough_inverses_of_float64():
    special = np.array([-inf, -1e-310, -0.0, 0.0, 1e-310, inf], np.float64)
    same(compute("rcp", ("approx", "ftz", "f64"), special), [-0.0, -inf, -inf, inf, inf, 0.0], np.float64)
    assert np.signbit(compute("rcp", ("approx", "ftz", "f64"), special)).tolist() == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    roots = compute("rsqrt", ("approx", "ftz", "f64"), special)
    same(roots, [nan, -inf, -inf, inf, inf, 0.0], np.float64)
    for name, exact in [("rcp", lambda x: 1 / x), ("rsqrt", lambda x: 1 / np.sqrt(x))]:
        assert compute(name, ("approx", "ftz", "f64"), np.array([nan])).view(np.uint64).tolist() == [0x7FFFFFFF00000000]
        x = np.random.default_rng(0).uniform(1e-3, 1e3, 200)
        found = compute(name, ("approx", "ftz", "f64"), x)
        assert not (found.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
        np.testing.assert_allclose(found, exact(x), rtol=2.0**-18)
    assert compute("rcp", ("approx", "ftz", "f64"), np.array([2.0**1023])).tolist() == [0.0]
    np.testing.assert_allclose(compute("rsqrt", ("approx", "f64"), x), 1 / np.sqrt(x), rtol=2.0**-51)
    same(compute("rsqrt", ("approx", "f64"), np.array([-0.0, 0.0, inf, -1.0])), [-inf, inf, 0.0, nan], np.float64)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_every_half(name: str, type_: str, packed: bool):
    codes = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    flags = ("approx", "ftz") if (name, type_) == ("ex2", "bf16") else ("approx",)
    operation = resolve(name, (*flags, type_ + "x2" * packed), 2)
    assert operation is not None
    found = run(operation.function, codes.view(np.uint32) if packed else codes).view(np.uint16)

    def value(bits: np.ndarray) -> np.ndarray:
        return (
            bits.view(np.float16).astype(np.float64)
            if type_ == "f16"
            else (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        )

    with np.errstate(all="ignore"):
        x, y = value(codes), value(found)
        if "ftz" in flags:
            x = np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)
        expected = np.exp2(x) if name == "ex2" else np.tanh(x)
        nans = np.isnan(x)
        assert (found[nans] == 0x7FFF).all() and not np.isnan(y[~nans]).any()
        assert (np.signbit(y) == np.signbit(expected))[~nans].all()
        largest = 65504.0 if type_ == "f16" else float(np.uint32(0x7F7F0000).view(np.float32))
        step, least = (2.0**-11, 2.0**-25) if type_ == "f16" else (2.0**-8, 2.0**-126 if "ftz" in flags else 2.0**-134)
        within = np.abs(y - expected) <= np.abs(expected) * step * 1.0001 + least
        too_large = expected > largest * (1 + step / 2)
        assert (within | too_large | (y == expected))[~nans].all()
        assert np.isinf(y[too_large]).all()


# The bounds of the PTX manual: of the operand and the exact result; ulps are those of the exact result.
BOUNDS: dict[tuple[str, str], Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    ("rcp", "f32"): lambda x, y, ulp: ulp,
    ("sqrt", "f32"): lambda x, y, ulp: np.abs(y) * 2.0**-23,
    ("rsqrt", "f32"): lambda x, y, ulp: np.abs(y) * 2.0**-22.9,
    ("ex2", "f32"): lambda x, y, ulp: 2 * ulp,
    ("lg2", "f32"): lambda x, y, ulp: np.where((x > 0.5) & (x < 2), 1, np.abs(y)) * 2.0**-22,
    ("sin", "f32"): lambda x, y, ulp: np.where(np.abs(x) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7),
    ("cos", "f32"): lambda x, y, ulp: np.where(np.abs(x) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7),
    ("tanh", "f32"): lambda x, y, ulp: np.abs(y) * 2.0**-11,
    ("ex2", "f16"): lambda x, y, ulp: np.abs(y) * 2.0**-9.9,
    ("tanh", "f16"): lambda x, y, ulp: np.full_like(y, 2.0**-10.987),
    ("ex2", "bf16"): lambda x, y, ulp: np.abs(y) * 2.0**-7,
    ("tanh", "bf16"): lambda x, y, ulp: np.full_like(y, 2.0**-8),
}


def numbers(name: str, type_: str) -> tuple[np.ndarray, np.ndarray]:
    """(operands in float64, each a normal number of the type with a normal result; their codes)."""
    low, high = {"sqrt": (1e-3, 1e3), "rsqrt": (1e-3, 1e3), "lg2": (1e-3, 1e3)}.get(name, (-8, 8))
    drawn = np.random.default_rng(0).uniform(low, high, 4000).astype(np.float32)
    drawn = np.concatenate([drawn, np.float32([-300, 250]) if name in ("sin", "cos") else drawn[:0]])
    if type_ == "f32":
        return drawn.astype(np.float64), drawn
    codes = (
        drawn.astype(np.float16).view(np.uint16) if type_ == "f16" else (drawn.view(np.uint32) >> 16).astype(np.uint16)
    )
    return value_of(codes, type_), codes


def value_of(codes: np.ndarray, type_: str) -> np.ndarray:
    if type_ == "f16":
        return codes.view(np.float16).astype(np.float64)
    if type_ == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return codes.astype(np.float64)


@pytest.mark.parametrize(("name", "type_"), list(BOUNDS))
def test_worst_is_as_wrong_as_the_manual_allows(name: str, type_: str):
    flags = ("approx", "ftz", type_) if (name, type_) == ("ex2", "bf16") else ("approx", type_)
    operation = resolve(name, flags, 2, worst=True)
    assert operation is not None and operation.seeded
    x, codes = numbers(name, type_)
    y = np.array([EXACT[name](value) for value in x])
    found = value_of(run(operation.function, 1, codes), type_)
    ulp = np.exp2(np.floor(np.log2(np.abs(y))) - {"f32": 23, "f16": 10, "bf16": 7}[type_])
    error, bound = np.abs(found - y), BOUNDS[name, type_](x, y, ulp)
    assert (error <= bound * (1 + 1e-9)).all()
    # nothing nearer to the bound is a number of the type, but where the function cannot go there
    free = (np.abs(y) < 0.99) | (name not in ("tanh", "sin", "cos"))
    assert (error > bound - 2 * ulp)[free & (bound < np.abs(y))].all()
    assert 0.3 < (found > y).mean() < 0.7
    assert found.tolist() == value_of(run(operation.function, 1, codes), type_).tolist()
    assert found.tolist() != value_of(run(operation.function, 2, codes), type_).tolist()
    if type_ != "f32":  # two in a word are as each alone
        both = resolve(name, (*flags[:-1], type_ + "x2"), 2, worst=True)
        assert both is not None
        assert value_of(run(both.function, 1, codes.view(np.uint32)).view(np.uint16), type_).tolist() == found.tolist()


@pytest.mark.parametrize("flags", [("approx",), ("approx", "ftz"), ("full",)])
def test_worst_quotients(flags: tuple[str, ...]):
    operation = resolve("div", (*flags, "f32"), 3, worst=True)
    assert operation is not None
    a, b = np.random.default_rng(0).uniform(-9, 9, (2, 1000)).astype(np.float32)
    exact = a.astype(np.float64) / b
    error = np.abs(run(operation.function, 0, a, b) - exact)
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (error <= 2 * ulp).all() and (error > 0.9 * ulp).all()


@pytest.mark.parametrize("name", list(TABLES))
def test_worst_keeps_what_the_manual_tabulates(name: str):
    operation = resolve(name, ("approx", "f32"), 2, worst=True)
    assert operation is not None
    found = run(operation.function, 5, np.array(SPECIAL, np.float32))
    kept = [number for number, value in enumerate(SPECIAL) if value != -1.5 or math.isnan(TABLES[name][number])]
    same(found[kept], [TABLES[name][number] for number in kept])


def test_worst_of_float64_is_a_unit_of_what_is_kept():
    x = np.random.default_rng(0).uniform(1, 100, 500)
    for name, flags, unit in [
        ("rcp", ("approx", "ftz"), 2**32),
        ("rsqrt", ("approx", "ftz"), 2**32),
        ("rsqrt", ("approx",), 1),
    ]:
        modifiers = (*flags, "f64")
        operation = resolve(name, modifiers, 2, worst=True)
        assert operation is not None
        moved = run(operation.function, 0, x).view(np.int64) - compute(name, modifiers, x).view(np.int64)
        assert set(np.abs(moved).tolist()) == {unit} and len(set(moved.tolist())) == 2


def test_what_is_no_approximation_has_no_error():
    for name, modifiers in [("rcp", ("rn", "f32")), ("sqrt", ("rn", "f32")), ("div", ("rn", "f64")), ("add", ("f32",))]:
        operation = resolve(name, modifiers, 3 if name in ("div", "add") else 2, worst=True)
        assert operation is not None and not operation.seeded
