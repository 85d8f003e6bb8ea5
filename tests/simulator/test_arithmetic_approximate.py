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
