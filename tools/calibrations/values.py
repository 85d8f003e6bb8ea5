"""Inputs: edge values, each with each, then random ones. Bits alone, so that nothing is lost on the way to a kernel."""

from __future__ import annotations

from functools import cache

import numpy as np

SIZE = 5888  # of each operand; a multiple of a block
_INTEGERS = 4096
_EDGES = {
    16: (0, 1, 2, 15, 16, 31, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF),
    32: (0, 1, 2, 7, 31, 32, 33, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF),
    64: (0, 1, 2, 31, 63, 64, 65, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
}
# (bits of the exponent, of the fraction)
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


@cache
def integers(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three operands: edge values each with each, then any bits, then small numbers, such as shifts are."""
    rng = np.random.default_rng(width)
    dtype = np.dtype(f"u{width // 8}")
    edges = np.array(_EDGES[width], dtype)
    grids = [part.reshape(-1) for part in np.meshgrid(edges, edges, edges)]
    rest = _INTEGERS - len(grids[0])
    random = rng.integers(0, 1 << width, (3, rest), np.uint64, endpoint=False) if width < 64 else _bits64(rng, rest)
    random[1:, : rest // 2] %= 80
    a, b, c = (np.concatenate([grid, part.astype(dtype)]) for grid, part in zip(grids, random))
    return a, b, c


def _bits64(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, (1 << 64) - 1, (3, count), np.uint64, endpoint=True)


def divisors(width: int) -> np.ndarray:
    """The second operand without zeros, by which PTX leaves division open."""
    b = integers(width)[1].copy()
    b[b == 0] = 3
    return b


@cache
def floats(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three operands of a format: special values each with each, numbers near one another, any bits."""
    exponent, fraction = FORMATS[name]
    width = 1 + exponent + fraction
    rng = np.random.default_rng(exponent * 100 + fraction)
    special = _special(exponent, fraction)
    grids = [part.reshape(-1) for part in np.meshgrid(special, special, special)]
    rest = SIZE - len(grids[0])
    random = _bits64(rng, rest) >> np.uint64(64 - width)
    near = rest // 2
    bias = (1 << exponent - 1) - 1
    exponents = rng.integers(bias - 6, bias + 6, (3, near)).astype(np.uint64)
    kept = (1 << fraction) - 1 | 1 << width - 1
    random[:, :near] = random[:, :near] & np.uint64(kept) | exponents << np.uint64(fraction)
    dtype = np.dtype(f"u{width // 8}")
    a, b, c = (np.concatenate([grid, part]).astype(dtype) for grid, part in zip(grids, random))
    return a, b, c


def _special(exponent: int, fraction: int) -> np.ndarray:
    """Zero, subnormal and normal numbers at their ends, one and its neighbours, infinity, NaN; of both signs."""
    one = ((1 << exponent - 1) - 1) << fraction
    infinity = ((1 << exponent) - 1) << fraction
    quiet = infinity | 1 << fraction - 1
    positive = [0, 1, (1 << fraction) - 1, 1 << fraction, one, one + 1, infinity - 1, infinity, quiet | 5]
    sign = 1 << exponent + fraction
    return np.array([*positive, *(x | sign for x in positive)], np.uint64)


def packed(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three operands of two halves each; the upper half is another element's."""
    a, b, c = (x.astype(np.uint32) for x in floats(name))
    pair = lambda x, step: x | np.roll(x, step) << np.uint32(16)  # noqa: E731
    return pair(a, 1), pair(b, 2), pair(c, 3)


@cache
def rounding(name: str) -> np.ndarray:
    """One operand for conversions: what `floats` has, and numbers around those that fit narrower types."""
    a, b, _ = floats(name)
    exponent, fraction = FORMATS[name]
    rng = np.random.default_rng(7)
    bias, dtype = (1 << exponent - 1) - 1, a.dtype
    ladder = np.clip(bias + rng.integers(-26, 68, SIZE), 0, (1 << exponent) - 1).astype(np.uint64) << np.uint64(
        fraction
    )
    few = min(fraction, 12)  # bits of the fraction: many land halfway
    tail = _bits64(rng, SIZE)
    bits = tail[0] >> np.uint64(64 - few) << np.uint64(fraction - few)
    sign = (tail[1] & np.uint64(1)) << np.uint64(exponent + fraction)
    every = np.concatenate([a, b[SIZE // 2 :], (ladder | bits | sign).astype(dtype)])
    return every[np.linspace(0, len(every) - 1, SIZE).astype(int)]


@cache
def dense(name: str, lowest: float | None = None, highest: float | None = None, size: int = 1 << 13) -> np.ndarray:
    """Numbers of every magnitude, of both signs; or evenly spaced from `lowest` to `highest`."""
    exponent, fraction = FORMATS[name]
    width = 1 + exponent + fraction
    dtype = np.dtype(f"u{width // 8}")
    if lowest is not None and highest is not None:
        even = np.linspace(lowest, highest, size)
        return even.astype("f4").view(np.uint32) if name == "f32" else even.view(np.uint64)
    if width == 16:
        return np.arange(1 << 16, dtype=np.uint16)
    step = (1 << width) // size
    rng = np.random.default_rng(5)
    return (np.arange(size, dtype=np.uint64) * np.uint64(step) + rng.integers(0, step, size, np.uint64)).astype(dtype)
