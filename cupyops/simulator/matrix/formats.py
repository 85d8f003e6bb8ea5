"""The element types of the matrix units: how registers hold them, and what they are worth in float64.

Every product of two elements is exact in float64, and so is an integer sum of the lengths that occur here: one type of
arithmetic serves all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Format:
    """An element type. `raw` is how its bits are held (4- and 1-bit elements are held in bytes once they are split)."""

    name: str
    bits: int
    register: str  # how the register that holds it is viewed: "u32", "f32", "s32" or "f64"
    raw: type[np.generic]
    decode: Callable[[np.ndarray], np.ndarray]  # raw bits -> float64

    @property
    def per_register(self) -> int:
        """Number of elements that a register holds."""
        return 1 if self.register == "f64" else 32 // self.bits


REGISTER_DTYPES: dict[str, type[np.generic]] = {"u32": np.uint32, "f32": np.float32, "s32": np.int32, "f64": np.float64}


def _float32(raw: np.ndarray) -> np.ndarray:
    return raw.view(np.float32).astype(np.float64)


def _view_as(dtype: type[np.generic]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda raw: raw.view(dtype).astype(np.float64)


def _looked_up(table: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda raw: table[raw]


def _e4m3_values() -> np.ndarray:
    """Bias 7, no infinity: all ones below the sign is NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    subnormal = np.ldexp(mantissa / 8, -6)
    value = np.where(exponent == 0, subnormal, np.ldexp(1 + mantissa / 8, exponent - 7))
    value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code & 128, -value, value)


def _e5m2_values() -> np.ndarray:
    """The upper byte of a half."""
    return (np.arange(256, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float64)


def _signed_values(bits: int) -> np.ndarray:
    code = np.arange(1 << bits)
    return np.where(code < 1 << (bits - 1), code, code - (1 << bits)).astype(np.float64)


FORMATS = {
    known.name: known
    for known in (
        Format("f16", 16, "u32", np.uint16, _view_as(np.float16)),
        Format("bf16", 16, "u32", np.uint16, lambda raw: _float32(raw.astype(np.uint32) << np.uint32(16))),
        # the hardware ignores the low 13 bits of a tf32 operand
        Format("tf32", 32, "u32", np.uint32, lambda raw: _float32(raw & np.uint32(0xFFFFE000))),
        Format("f32", 32, "f32", np.uint32, _view_as(np.float32)),
        Format("f64", 64, "f64", np.uint64, _view_as(np.float64)),
        Format("s32", 32, "s32", np.uint32, _view_as(np.int32)),
        Format("e4m3", 8, "u32", np.uint8, _looked_up(_e4m3_values())),
        Format("e5m2", 8, "u32", np.uint8, _looked_up(_e5m2_values())),
        Format("s8", 8, "u32", np.uint8, _view_as(np.int8)),
        Format("u8", 8, "u32", np.uint8, _view_as(np.uint8)),
        Format("s4", 4, "u32", np.uint8, _looked_up(_signed_values(4))),
        Format("u4", 4, "u32", np.uint8, _looked_up(np.arange(16.0))),
        Format("b1", 1, "u32", np.uint8, _view_as(np.uint8)),
    )
}


def split(registers: list[np.ndarray], held: Format) -> np.ndarray:
    """Registers of n threads -> raw elements, (n, elements of a thread), in the order of the registers, low bits first."""
    packed = np.empty((len(registers[0]), len(registers)), registers[0].dtype)
    for number, register in enumerate(registers):
        packed[:, number] = register
    if held.bits >= 8:
        return packed.view(held.raw)
    octets = packed.view(np.uint8)
    if held.bits == 1:
        return np.unpackbits(octets, axis=-1, bitorder="little")
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)


def values(registers: list[np.ndarray], held: Format) -> np.ndarray:
    """Registers of n threads -> their elements in float64, (n, elements of a thread)."""
    return held.decode(split(registers, held))


def accumulators(results: np.ndarray, held: Format, saturate: bool = False) -> list[np.ndarray]:
    """The inverse for a type of accumulator: float64 (n, elements), rounded once, -> registers of n threads.

    Integers wrap around at 32 bits, or stay at the bound that they reach with `saturate`.
    """
    if held.name == "s32":
        exact = results.clip(INT32.min, INT32.max) if saturate else results
        narrow = exact.astype(np.int64).astype(np.int32)
    elif held.name == "f16":
        narrow = results.astype(np.float16).view(np.uint32)
    else:
        narrow = results.astype(REGISTER_DTYPES[held.register])
    return list(np.ascontiguousarray(narrow.T))
