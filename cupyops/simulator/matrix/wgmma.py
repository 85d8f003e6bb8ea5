"""`wgmma.mma_async`: a warpgroup (four warps) multiplies 64 x k by k x n, B and perhaps A being in shared memory.

A descriptor says where an operand lies: rows are grouped by eight, or by the width of the swizzle, and two byte offsets
lead from group to group. The sums are as in `mma`: exact products, float64, one rounding; the hardware's may differ in
the last bits.
"""

import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from .formats import FORMATS, Format, accumulators, values
from .fragments import Fragment, by_quads
from .mma import dot, unsupported
from .swizzle import swizzled

_SPAN_OF_MODE = (0, 128, 64, 32)
_CHUNK = 16  # bytes that always stay together

# types of A and B -> k, and the types that D may have
_KNOWN: list[tuple[set[str], int, set[str]]] = [
    ({"f16"}, 16, {"f16", "f32"}),
    ({"bf16"}, 16, {"f32"}),
    ({"tf32"}, 8, {"f32"}),
    ({"e4m3", "e5m2"}, 32, {"f16", "f32"}),
    ({"s8", "u8"}, 32, {"s32"}),
]


@dataclass(frozen=True)
class Wgmma:
    """One `wgmma.mma_async` shape and its types."""

    n: int
    k: int
    d_registers: int
    d_type: str  # how each register is viewed: "f32", "u32" (two halves) or "s32"
    a_type: str  # element types
    b_type: str
    a_registers: int  # when A comes from registers
    d: Format = field(repr=False)
    saturate: bool = False

    def operand_addresses(self, descriptor: np.ndarray, rows: int, transposed: bool) -> np.ndarray:
        """(groups,) uint64 -> (groups, rows, k) int64: the byte address in shared memory of each element.

        A has 64 rows; B, given as n x k, has n. `transposed`: the rows, not k, run along consecutive bytes.
        """
        size = FORMATS[self.a_type].bits // 8
        if transposed and size != 2:
            raise unsupported("wgmma", ("mma_async",), f"a transposed operand of type {self.a_type}")
        fields = Descriptor(np.asarray(descriptor, np.uint64).reshape(-1))
        modes = np.unique(fields.mode)
        if len(modes) == 1:
            return _addresses(fields, _SPAN_OF_MODE[modes[0]], rows, self.k, size, transposed)
        result = np.empty((len(fields.mode), rows, self.k), np.int64)
        for mode in modes:
            here = fields.mode == mode
            some = Descriptor(fields.bits[here])
            result[here] = _addresses(some, _SPAN_OF_MODE[mode], rows, self.k, size, transposed)
        return result

    def compute(
        self,
        a: np.ndarray | list[np.ndarray],
        b: np.ndarray,
        d: list[np.ndarray],
        scale_d: np.ndarray,
        scale_a: int = 1,
        scale_b: int = 1,
    ) -> list[np.ndarray]:
        """D's new registers: scale_a A times scale_b B, plus D where `scale_d` holds.

        `a`: raw elements (groups, 64, k) as loaded from the addresses, or registers of (128 * groups,) uint32; `b`: raw
        elements (groups, n, k); `d`: registers of (128 * groups,); `scale_d`: (groups,) bool; the other two are 1 or -1.
        """
        left, right = self._left(a), FORMATS[self.b_type].decode(b)
        total = dot(left, right)
        if scale_a * scale_b < 0:
            total = -total
        sums = self._sums()
        before = sums.gather(values(d, self.d))
        total += np.where(np.reshape(scale_d, (-1, 1, 1)), before, 0.0)
        return accumulators(sums.scatter(total), self.d, self.saturate)

    def _left(self, a: np.ndarray | list[np.ndarray]) -> np.ndarray:
        held = FORMATS[self.a_type]
        if isinstance(a, np.ndarray):
            return held.decode(a)
        return by_quads(64, self.k, held.per_register, warps=4).gather(values(a, held))

    def _sums(self) -> Fragment:
        return by_quads(64, self.n, 2, warps=4)


class Descriptor:
    """The fields of matrix descriptors: addresses and offsets in bytes, each (groups,) int64."""

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits
        self.start = self._field(0, 14) << 4
        self.leading = self._field(16, 14) << 4
        self.stride = self._field(32, 14) << 4
        self.first_line = self._field(49, 3)  # the "base offset": the line of 128 bytes where the swizzle starts
        self.mode = self._field(62, 2)

    def _field(self, low: int, width: int) -> np.ndarray:
        return ((self.bits >> np.uint64(low)) & np.uint64((1 << width) - 1)).astype(np.int64)


def _addresses(fields: Descriptor, span: int, rows: int, k: int, size: int, transposed: bool) -> np.ndarray:
    along_rows, along_k = (_rows_contiguous if transposed else _k_contiguous)(span, rows, k, size)
    columns = np.stack([fields.leading, fields.stride, np.ones_like(fields.start)], axis=-1)
    address = fields.start[:, None, None] + (columns @ along_rows)[:, :, None] + (columns @ along_k)[:, None, :]
    return swizzled(address, span, fields.first_line[:, None, None])


@cache
def _k_contiguous(span: int, rows: int, k: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Multiples of the leading offset, the stride offset and single bytes, for each row and each place along k.

    Eight rows make a group, one stride offset from the next. Swizzled rows are `span` bytes apart, and the 32 bytes
    of a row follow each other; otherwise rows are cut into chunks of 16 bytes, one leading offset apart.
    """
    row, place = np.arange(rows), np.arange(k) * size
    pitch = span or _CHUNK
    by_row = _steps(np.zeros_like(row), row // 8, row % 8 * pitch)
    if span:
        return by_row, _steps(np.zeros_like(place), np.zeros_like(place), place)
    return by_row, _steps(place // _CHUNK, np.zeros_like(place), place % _CHUNK)


@cache
def _rows_contiguous(span: int, rows: int, k: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Multiples for rows that are consecutive in memory: lines of `span` bytes, one for each place along k.

    Eight lines make a group. The groups along k are one stride offset apart, those along the rows one leading offset;
    without a swizzle the two offsets change their parts.
    """
    place, column = np.arange(rows) * size, np.arange(k)
    pitch = span or _CHUNK
    groups = (place // pitch, np.zeros_like(place)), (np.zeros_like(column), column // 8)
    if not span:
        groups = groups[0][::-1], groups[1][::-1]
    return _steps(*groups[0], place % pitch), _steps(*groups[1], column % 8 * pitch)


def _steps(leading: np.ndarray, stride: np.ndarray, single: np.ndarray) -> np.ndarray:
    return np.stack([leading, stride, single]).astype(np.int64)


@cache
def wgmma(modifiers: tuple[str, ...]) -> Wgmma:
    """The unit that `wgmma.<modifiers>` names: ("mma_async", "sync", "aligned", "m64n128k16", "f32", "bf16", "bf16")."""
    if modifiers[:3] != ("mma_async", "sync", "aligned"):
        raise unsupported("wgmma", modifiers)
    rest = [m for m in modifiers[3:] if m != "satfinite"]
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", rest[0]) if len(rest) == 4 else None
    if not shape:
        raise unsupported("wgmma", modifiers)
    n, k, (d, a, b) = int(shape[1]), int(shape[2]), rest[1:]
    saturate = "satfinite" in modifiers
    if not _is_listed(n, k, d, a, b) or (saturate and d != "s32"):
        raise unsupported("wgmma", modifiers)
    held = FORMATS[d]
    return Wgmma(n, k, n // 2 // held.per_register, held.register, a, b, 4, held, saturate)


def _is_listed(n: int, k: int, d: str, a: str, b: str) -> bool:
    """Return True if the PTX ISA lists it. Integers have fewer widths: beyond 32 columns only multiples of 16."""
    if not any({a, b} <= operands and k == depth and d in sums for operands, depth, sums in _KNOWN):
        return False
    step = 16 if d == "s32" and n > 32 else 8
    return 8 <= n <= 256 and n % step == 0
