"""Floating-point formats of few bits: encoding float64 in any of them, in any rounding, and decoding them again."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .lanes import choose

_EXPONENT64 = np.uint64(0x7FF0000000000000)
_MAGNITUDE64 = np.uint64(0x7FFFFFFFFFFFFFFF)
_U16, _U32, _U64 = np.uint16, np.uint32, np.uint64


@dataclass(frozen=True)
class Format:
    """A binary format: sign, exponent, fraction."""

    precision: int  # bits of the significand, the implicit one included
    minimum: int  # exponent of the smallest normal number
    maximum: int  # exponent of the largest
    largest: int  # the code of the largest finite number
    nan: int  # the code of the NaN that the hardware writes
    width: int = 16
    infinite: bool = True  # the code after the largest is infinity


F16 = Format(precision=11, minimum=-14, maximum=15, largest=0x7BFF, nan=0x7FFF)
BF16 = Format(precision=8, minimum=-126, maximum=127, largest=0x7F7F, nan=0x7FFF)
TF32 = Format(precision=11, minimum=-126, maximum=127, largest=0x3FBFF, nan=0x3FFFF, width=19)
E4M3 = Format(precision=4, minimum=-6, maximum=8, largest=0x7E, nan=0x7F, width=8, infinite=False)
E5M2 = Format(precision=3, minimum=-14, maximum=15, largest=0x7B, nan=0x7F, width=8)


def encode(value: Any, form: Format, rounding: str = "rn", finite: bool = False) -> Any:
    """The codes, in uint64, of float64 values: rn, rz, rm, rp, or rna (a tie goes away from zero).

    `finite`: what is beyond the largest finite number becomes that number. A value that was rounded to odd before
    is rounded as the exact one would be.
    """
    bits = value.view(_U64)
    negative = bits > _MAGNITUDE64
    magnitude = bits & _MAGNITUDE64
    bound = np.float64(2.0 ** (form.maximum + 1))
    code = _steps(np.minimum(magnitude, bound.view(_U64)).view(np.float64), form, rounding, negative)
    if finite or not form.infinite:
        code = np.minimum(code, _U64(form.largest))
    else:
        inward = _inward(rounding, negative)
        beyond = (magnitude >= bound.view(_U64)) & (magnitude < _EXPONENT64)
        code = choose(inward & beyond, _U64(form.largest), code)
    code = code | (negative.astype(_U64) << _U64(form.width - 1))
    return choose(magnitude > _EXPONENT64, _U64(form.nan), code)


def _inward(rounding: str, negative: Any) -> Any:
    """Return True, by lane, if the rounding goes toward zero."""
    return {"rz": np.bool_(True), "rm": ~negative, "rp": negative}.get(rounding, np.bool_(False))


def _steps(magnitude: Any, form: Format, rounding: str, negative: Any) -> Any:
    """The code of a magnitude: adding 2^52 ulps lets the float64 adder round to an ulp, and leaves their number."""
    floor = np.float64(2.0**form.minimum).view(_U64)
    exponent = np.maximum(magnitude.view(_U64) & _EXPONENT64, floor)
    anchor_bits = exponent + _U64((53 - form.precision) << 52)
    anchor = anchor_bits.view(np.float64)
    inward = _inward(rounding, negative)
    if rounding == "rna":
        # The half ulp is added without error, as the magnitude was a float32.
        magnitude = magnitude + (exponent - _U64(form.precision << 52)).view(np.float64)
        inward = np.bool_(True)
    total = magnitude + anchor
    steps = total.view(_U64) - anchor_bits
    if rounding != "rn":
        error = (total - anchor) - magnitude
        steps = steps - (inward & (error > 0)) + (~inward & (error < 0))
    return steps + (((exponent - floor) >> _U64(52)) << _U64(form.precision - 1))


def widen_f16(code: Any) -> Any:
    """float16 codes as float32: the bits moved into place are the value times 2^-112, infinities and NaN apart."""
    magnitude = ((code & _U16(0x7FFF)).astype(_U32) << _U32(13)).view(np.float32) * np.float32(2.0**112)
    special = magnitude >= np.float32(65536)
    bits = magnitude.view(_U32) | ((code & _U16(0x8000)).astype(_U32) << _U32(16))
    if special.any():
        bits = bits | special * _U32(0x7F800000)
    return bits.view(np.float32)


def widen_bf16(code: Any) -> Any:
    """bfloat16 codes as float32: their upper halves."""
    return (code.astype(_U32) << _U32(16)).view(np.float32)


def narrow_f16(value: Any) -> Any:
    """float32 rounded to nearest in float16, by the way of `_steps`: 2^23 ulps added."""
    bits = value.view(_U32)
    magnitude = bits & _U32(0x7FFFFFFF)
    bounded = np.minimum(magnitude, _U32(0x47800000))  # 65536: beyond the largest, and rounded to infinity
    exponent = np.maximum(bounded & _U32(0x7F800000), _U32(113 << 23))
    anchor = exponent + _U32(13 << 23)
    steps = (bounded.view(np.float32) + anchor.view(np.float32)).view(_U32) - anchor
    code = steps + ((exponent - _U32(113 << 23)) >> _U32(13)) | ((bits >> _U32(16)) & _U32(0x8000))
    return _with_nan(code.astype(_U16), value)


def narrow_bf16(value: Any) -> Any:
    """float32 rounded to nearest in bfloat16: half an ulp, less one bit where a tie must go down, carries upward."""
    bits = value.view(_U32)
    code = (bits + (_U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1)))) >> _U32(16)
    return _with_nan(code.astype(_U16), value)


def _with_nan(code: Any, value: Any) -> Any:
    """The canonical NaN where the float32 value is one."""
    if not np.isnan(np.maximum.reduce(value, initial=-np.inf) if np.ndim(value) else value):
        return code
    return choose(np.isnan(value), _U16(0x7FFF), code)


@cache
def _table(form: Format) -> Any:
    """The float16 code of each code of an eight-bit format."""
    codes = np.arange(256, dtype=_U16)
    fraction_bits = form.precision - 1
    fraction = (codes & _U16((1 << fraction_bits) - 1)).astype(np.float64)
    exponent = ((codes & _U16(0x7F)) >> _U16(fraction_bits)).astype(np.int64)
    significand = fraction / 2**fraction_bits + (exponent > 0)
    value = np.ldexp(significand, np.maximum(exponent, 1) - 1 + form.minimum)
    magnitude = codes & _U16(0x7F)
    if form.infinite:
        value[magnitude > form.largest] = np.inf
    result = value.astype(np.float16).view(_U16) | ((codes & _U16(0x80)) << _U16(8))
    result[magnitude > form.largest + form.infinite] = F16.nan
    return result


def decode8(code: Any, form: Format) -> Any:
    """Codes of an eight-bit format, in uint8, as float16 codes: each of them is one exactly."""
    return _table(form)[code]
