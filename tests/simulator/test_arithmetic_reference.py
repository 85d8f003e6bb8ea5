"""The reference of the arithmetic tests: numbers as fractions, rounded by the definition. Itself checked here.

A number is its sign (0 or 1) and its magnitude: a Fraction, `inf`, or `nan`.
"""

import itertools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Number = tuple[int, Fraction | float]
SETTINGS = settings(derandomize=True, deadline=None, max_examples=4)
ROUNDINGS = ["rn", "rz", "rm", "rp"]


@dataclass(frozen=True)
class Binary:
    """A format by its widths; `top` is the exponent of its largest number."""

    width: int
    precision: int
    top: int
    dtype: type
    nan: int
    infinite: bool = True

    @property
    def bottom(self) -> int:
        return 1 - self.bias

    @property
    def bias(self) -> int:
        return (1 << self.width - self.precision - 1) - 1

    @property
    def infinity(self) -> int:
        """The code after the largest finite one."""
        return (self.top - self.bottom + 2) << self.precision - 1 if self.infinite else 0x7F


F16 = Binary(16, 11, 15, np.uint16, 0x7FFF)
BF16 = Binary(16, 8, 127, np.uint16, 0x7FFF)
F32 = Binary(32, 24, 127, np.uint32, 0x7FFFFFFF)
F64 = Binary(64, 53, 1023, np.uint64, 0xFFF8000000000000)
TF32 = Binary(19, 11, 127, np.uint32, 0x3FFFF)
E4M3 = Binary(8, 4, 8, np.uint8, 0x7F, infinite=False)
E5M2 = Binary(8, 3, 15, np.uint8, 0x7F)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def decode(code: int, form: Binary) -> Number:
    """What a code stands for."""
    sign, magnitude = code >> form.width - 1, code & (1 << form.width - 1) - 1
    if magnitude > form.infinity or (magnitude == form.infinity and not form.infinite):
        return sign, nan
    if magnitude == form.infinity:
        return sign, inf
    exponent, fraction = divmod(magnitude, 1 << form.precision - 1)
    significand = fraction + (exponent > 0) * (1 << form.precision - 1)
    return sign, significand * two_to(max(exponent, 1) - form.bias - form.precision + 1)


def is_nan(magnitude: Fraction | float) -> bool:
    """`math.isnan` without the way through a float, which a large fraction does not fit."""
    return magnitude != magnitude


def two_to(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def round_to(number: Number, form: Binary, mode: str = "rn", finite: bool = False) -> int:
    """The code of a number, rounded; `finite`: what is too large becomes the largest finite number."""
    sign, magnitude = number
    if is_nan(magnitude):
        return form.nan
    largest = form.infinity - 1
    if magnitude == inf:
        code = largest if finite else form.infinity
    else:
        code = _round_magnitude(magnitude, form, mode, sign)
        if code > largest:
            stays = finite or mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
            code = largest if stays else form.infinity
    return code | sign << form.width - 1


def _round_magnitude(magnitude: Fraction, form: Binary, mode: str, sign: int) -> int:
    """The code, as if exponents had no end."""
    numerator, denominator = magnitude.numerator, magnitude.denominator
    exponent = numerator.bit_length() - denominator.bit_length() if numerator else form.bottom
    exponent = max(form.bottom, exponent - (magnitude < two_to(exponent)))
    steps, rest = divmod(magnitude / two_to(exponent - form.precision + 1), 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": rest > 0 and sign == 1,
        "rp": rest > 0 and sign == 0,
    }[mode]
    return int(steps) + up + (exponent - form.bottom << form.precision - 1)


def signed(number: Number) -> Fraction | float:
    return -number[1] if number[0] else number[1]


def number_of(value: Fraction, zero_sign: int) -> Number:
    return (int(value < 0), abs(value)) if value else (zero_sign, Fraction(0))


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    if is_nan(a[1]) or is_nan(b[1]) or (a[1] == b[1] == inf and a[0] != b[0]):
        return 0, nan
    if inf in (a[1], b[1]):
        return a if a[1] == inf else b
    zero_sign = a[0] if a[0] == b[0] else int(mode == "rm")
    return number_of(signed(a) + signed(b), zero_sign)


def negate(a: Number) -> Number:
    return 1 - a[0], a[1]


def multiply(a: Number, b: Number) -> Number:
    sign = a[0] ^ b[0]
    if is_nan(a[1]) or is_nan(b[1]) or {a[1], b[1]} == {0, inf}:
        return 0, nan
    if inf in (a[1], b[1]):
        return sign, inf
    return sign, a[1] * b[1]


def divide(a: Number, b: Number) -> Number:
    sign = a[0] ^ b[0]
    if is_nan(a[1]) or is_nan(b[1]) or a[1] == b[1] == inf or a[1] == b[1] == 0:
        return 0, nan
    if a[1] == inf or b[1] == 0:
        return sign, inf
    return sign, Fraction(0) if b[1] == inf else a[1] / b[1]


def root(a: Number) -> Number:
    """A square root to 2^-1200, and a little more where that is not all of it."""
    sign, magnitude = a
    if is_nan(magnitude) or (sign and magnitude != 0):
        return 0, nan
    if magnitude in (0, inf):
        return a
    scale = 1 << 1200
    square = magnitude * scale * scale
    whole = math.isqrt(square.numerator // square.denominator)
    return 0, Fraction(whole, scale) + (whole * whole != square) * Fraction(1, 2 * scale)


def fma(a: Number, b: Number, c: Number, mode: str = "rn") -> Number:
    return add(multiply(a, b), c, mode)


def flush(a: Number, form: Binary) -> Number:
    """A subnormal number as a zero of its sign."""
    return (a[0], Fraction(0)) if a[1] < two_to(form.bottom) else a


def clamp01(a: Number) -> Number:
    if is_nan(a[1]) or a[0]:
        return 0, Fraction(0)
    return 0, min(a[1], Fraction(1))


def clamp0(a: Number) -> Number:
    return (0, Fraction(0)) if a[0] and not is_nan(a[1]) else a


def codes(form: Binary) -> st.SearchStrategy[int]:
    """Bit patterns: any, and those of few bits, of many ones, near a power of two, special."""
    fraction_bits = form.precision - 1
    fractions = st.one_of(
        st.sampled_from([0, 1, 2, 3, (1 << fraction_bits) - 1, (1 << fraction_bits) - 2, 1 << fraction_bits - 1]),
        st.integers(0, fraction_bits).map(lambda bit: (1 << bit) & (1 << fraction_bits) - 1),
        st.integers(0, (1 << fraction_bits) - 1),
    )
    highest = (1 << form.width - form.precision) - 1
    near_one = st.integers(max(0, form.bias - form.precision - 2), min(highest, form.bias + form.precision + 2))
    exponents = st.one_of(near_one, st.sampled_from([0, 1, highest - 1, highest]), st.integers(0, highest))
    return st.builds(
        lambda sign, exponent, fraction: sign << form.width - 1 | exponent << fraction_bits | fraction,
        st.integers(0, 1),
        exponents,
        fractions,
    )


def lists_of(form: Binary, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(codes(form), min_size=size, max_size=size)


def product_of(*lists: list[int]) -> list[tuple[int, ...]]:
    """Each with each."""
    return list(itertools.product(*lists))


def column(rows: list[tuple[int, ...]], index: int, dtype: type) -> np.ndarray:
    return np.array([row[index] for row in rows], dtype)


def run(function: Callable, *arguments: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return function(*arguments)


def assert_codes(
    result: np.ndarray, expected: list[int], rows: list[tuple[int, ...]], form: Binary | None = None
) -> None:
    """Bits equal; any NaN of float64 for a NaN."""
    found = [int(bits) for bits in result]
    if form is F64:
        found = [F64.nan if is_nan(decode(bits, F64)[1]) else bits for bits in found]
    wrong = [(row, got, want) for row, got, want in zip(rows, found, expected) if got != want]
    assert len(found) == len(expected)
    assert not wrong, f"{len(wrong)} of {len(rows)}: " + "; ".join(
        f"{[hex(x) for x in row]} gives {got:#x}, not {want:#x}" for row, got, want in wrong[:3]
    )


@SETTINGS
@given(st.floats(width=64))
def test_decode_reads_doubles_as_python_does(value: float):
    (code,) = struct.unpack("<Q", struct.pack("<d", value))
    sign, magnitude = decode(code, F64)
    assert sign == (math.copysign(1, value) < 0)
    assert is_nan(magnitude) if math.isnan(value) else magnitude == abs(value)


@pytest.mark.parametrize("name, letter", [("f16", "e"), ("f32", "f")])
@SETTINGS
@given(st.floats(-65000, 65000) | st.floats(-1e-4, 1e-4) | st.floats(-1e-7, 1e-7))
def test_round_to_rounds_as_python_does(name: str, letter: str, value: float):
    number = int(math.copysign(1, value) < 0), Fraction(abs(value))
    assert round_to(number, FORMATS[name]).to_bytes(FORMATS[name].width // 8, "little") == struct.pack(
        "<" + letter, value
    )


@pytest.mark.parametrize("mode", [*ROUNDINGS, "rna"])
@SETTINGS
@given(codes(F32).map(lambda code: decode(code, F32)))
def test_rounding_brackets_the_number(mode: str, number: Number):
    if is_nan(number[1]) or number[1] == inf:
        return
    sign, magnitude = decode(round_to(number, F16, mode), F16)
    below, above = (decode(round_to(number, F16, each), F16) for each in ("rm", "rp"))
    assert signed(below) <= signed(number) <= signed(above)
    assert (sign, magnitude) in (below, above)
    if mode == "rn" and below[1] != inf and above[1] != inf:
        gaps = signed(number) - signed(below), signed(above) - signed(number)
        assert abs(signed((sign, magnitude)) - signed(number)) == min(gaps)
