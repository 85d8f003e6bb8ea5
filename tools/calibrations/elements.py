"""Elements of matrices, as bits: small whole numbers, whose sums are exact in any order, and random ones."""

from __future__ import annotations

import numpy as np

BITS = {"b1": 1, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16, "tf32": 32, "f32": 32,
        "s32": 32, "f64": 64}  # fmt: skip
_SMALL_OCTETS = {"e4m3": (0, 0x38, 0x40, 0x44, 0x48), "e5m2": (0, 0x3C, 0x40, 0x42, 0x44)}  # 0 to 4


def whole(type_: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Whole numbers from -4 to 4; any bits for integer types, whose sums are exact anyhow."""
    if type_[0] in "sub" and type_ != "bf16":
        return any_bits(type_, shape, rng)
    numbers = rng.integers(-4, 5, shape)
    if type_ in _SMALL_OCTETS:
        codes = np.array(_SMALL_OCTETS[type_], np.uint8)[abs(numbers)]
        return codes | ((numbers < 0) * 0x80).astype(np.uint8)
    return encoded(numbers.astype(np.float64), type_)


def random(type_: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Normal numbers; of 8-bit floats any that are finite."""
    if type_ in _SMALL_OCTETS:
        codes = rng.integers(0, 0x7F if type_ == "e4m3" else 0x70, shape, np.uint8)
        return codes | (rng.integers(0, 2, shape, np.uint8) << np.uint8(7))
    if type_[0] in "sub" and type_ != "bf16":
        return any_bits(type_, shape, rng)
    return encoded(rng.standard_normal(shape), type_)


def any_bits(type_: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bits, in elements of a byte where the type has fewer."""
    return rng.integers(0, 1 << max(BITS[type_], 8), shape, np.uint64).astype(f"u{max(BITS[type_] // 8, 1)}")


def encoded(numbers: np.ndarray, type_: str) -> np.ndarray:
    """Numbers as bits of a type; bf16 by leaving off the lower half."""
    if type_ == "bf16":
        return (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    kind = {"f16": np.float16, "f64": np.float64}.get(type_, np.float32)
    return numbers.astype(kind).view(f"u{np.dtype(kind).itemsize}")
