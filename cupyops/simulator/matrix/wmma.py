"""`wmma`: fragments are loaded from memory, multiplied and stored, and nothing says which lane holds what.

A kernel may only do the same to every element of a fragment, so that a layout of our own serves. It does not depend on
whether the matrix lies in memory by rows or by columns: only loads and stores look at that.
"""

import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from .formats import FORMATS, REGISTER_DTYPES, Format
from .fragments import by_lanes
from .mma import Mma, Operand, count_of_xor, dot, of_operands, unsupported

_SIXTEENS = {"m16n16k16", "m32n8k16", "m8n32k16"}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SPACES = ("global", "shared", "shared::cta")

# types of A and B -> shapes, and the types that C and D may have
_KNOWN: list[tuple[set[str], set[str], set[str]]] = [
    ({"f16"}, _SIXTEENS, {"f16", "f32"}),
    ({"bf16"}, _SIXTEENS, {"f32"}),
    ({"s8", "u8"}, _SIXTEENS, {"s32"}),
    ({"tf32"}, {"m16n16k8"}, {"f32"}),
    ({"f64"}, {"m8n8k4"}, {"f64"}),
    ({"s4", "u4"}, {"m8n8k32"}, {"s32"}),
    ({"b1"}, {"m8n8k128"}, {"s32"}),
]


@dataclass(frozen=True)
class WmmaMemory:
    """Transfer by `wmma.load` or `wmma.store`: each lane moves items of `item_bytes`, an element or (below 8 bits) words."""

    registers: int
    register_type: str  # how each register is viewed: "u32", "f32", "s32", "f64"
    item_bytes: int
    default_stride: int  # in elements, where the instruction names none
    row: np.ndarray = field(repr=False)  # of each lane's items: the coordinate that the stride multiplies ...
    column: np.ndarray = field(repr=False)  # ... and the one that runs along memory
    bits: int = field(repr=False)

    def offsets(self, stride: np.ndarray) -> np.ndarray:
        """(warps,) strides in elements -> (32 * warps, items) int64: byte offsets from the instruction's address."""
        elements = self.row * np.asarray(stride, np.int64).reshape(-1, 1, 1) + self.column
        return (elements * self.bits // 8).reshape(-1, self.row.shape[1])

    def pack(self, items: np.ndarray) -> list[np.ndarray]:
        """Items as loaded, (32 * warps, items) uint of `item_bytes` -> registers of (32 * warps,)."""
        packed = np.ascontiguousarray(items).view(REGISTER_DTYPES[self.register_type])
        return list(np.ascontiguousarray(packed.T))

    def unpack(self, registers: list[np.ndarray]) -> np.ndarray:
        """Registers -> items to be stored, (32 * warps, items) uint of `item_bytes`."""
        return np.stack(registers, axis=-1).view(_RAW[self.item_bytes])


@cache
def wmma_memory(modifiers: tuple[str, ...]) -> WmmaMemory:
    """The unit that `wmma.<modifiers>` names: ("load", "a", "sync", "aligned", "row", "m16n16k16", "global", "f16").

    Stores begin with ("store", "d", ...). The state space may be absent.
    """
    rest = [m for m in modifiers if m not in _SPACES]
    if len(rest) != 7 or tuple(rest[:2]) not in {("load", "a"), ("load", "b"), ("load", "c"), ("store", "d")}:
        raise unsupported("wmma", modifiers)
    which, layout, shape, kind = rest[1], rest[4], rest[5], rest[6]
    if rest[2:4] != ["sync", "aligned"] or layout not in ("row", "col") or not _has(shape, which, kind):
        raise unsupported("wmma", modifiers)
    if FORMATS[kind].bits < 8 and layout != {"a": "row", "b": "col"}[which]:
        raise unsupported("wmma", modifiers)
    return _memory(_operand(which, shape, FORMATS[kind]), by_rows=(layout == "row") != (which == "b"))


@cache
def wmma(modifiers: tuple[str, ...]) -> Mma:
    """The unit of `wmma.<modifiers>`: ("mma", "sync", "aligned", "row", "col", "m16n16k16", "f32", "f32"), and so on.

    It is used as the unit of `mma.sync` is.
    """
    words = [m for m in modifiers if m not in ("satfinite", "popc", "xor", "and", "rn")]
    flags = tuple(m for m in modifiers if m in ("satfinite", "popc", "xor", "and", "rn"))
    types = words[6:]
    if len(types) == 2:
        types = [types[0], "f16", "f16", types[1]]
    if words[:3] != ["mma", "sync", "aligned"] or len(types) != 4 or {*words[3:5]} - {"row", "col"}:
        raise unsupported("wmma", modifiers)
    shape = words[5]
    if not _multiplies(shape, types) or not _flags_fit(flags, types[1], words[3:5]):
        raise unsupported("wmma", modifiers)
    d, a, b, c = (_operand(which, shape, FORMATS[kind]) for which, kind in zip("dabc", types))
    return of_operands(a, b, c, d, count_of_xor if "xor" in flags else dot, "satfinite" in flags)


def _has(shape: str, which: str, kind: str) -> bool:
    """Return True if A, B (`which` "a", "b") or C and D of this shape may be of this type."""
    multiplied = which in ("a", "b")
    return any(shape in shapes and kind in (operands if multiplied else sums) for operands, shapes, sums in _KNOWN)


def _multiplies(shape: str, types: list[str]) -> bool:
    """Return True if the PTX ISA lists this shape with these types: [d, a, b, c]. A and B are of one type."""
    d, a, b, c = types
    return a == b and any(a in operands and shape in shapes and {c, d} <= sums for operands, shapes, sums in _KNOWN)


def _flags_fit(flags: tuple[str, ...], kind: str, layouts: list[str]) -> bool:
    if kind == "b1":
        return flags in (("xor", "popc"), ("and", "popc")) and layouts == ["row", "col"]
    if kind in ("s4", "u4") and layouts != ["row", "col"]:
        return False
    allowed = {"f64": ("rn",), "s8": ("satfinite",), "u8": ("satfinite",), "s4": ("satfinite",), "u4": ("satfinite",)}
    return flags in ((), allowed.get(kind, ()))


@cache
def _operand(which: str, shape: str, held: Format) -> Operand:
    """A (m x k), B (seen as n x k), C or D (m x n). Halves of A and B always fill eight registers, with repetitions."""
    m, n, k = (int(number) for number in re.findall(r"\d+", shape))
    rows, columns = {"a": (m, k), "b": (n, k)}.get(which, (m, n))
    copies = 16 * 32 // (rows * columns) if held.name == "f16" and which in ("a", "b") else 1
    return Operand(held, by_lanes(rows, columns, copies))


def _memory(operand: Operand, by_rows: bool) -> WmmaMemory:
    """`by_rows`: the rows of the fragment's matrix are contiguous in memory; otherwise its columns are."""
    rows, columns = operand.fragment.shape
    row, column = np.unravel_index(operand.fragment.place.reshape(32, -1), (rows, columns))
    if not by_rows:
        row, column, columns = column, row, rows
    held = operand.held
    together = held.per_register if held.bits < 8 else 1
    item_bytes = held.bits * together // 8
    row, column = row[:, ::together], column[:, ::together]
    return WmmaMemory(operand.registers, held.register, item_bytes, columns, row, column, held.bits)
