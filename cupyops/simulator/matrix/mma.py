"""`mma.sync`: a warp multiplies two small matrices that its registers hold, D = A B + C.

Products are exact; their sum with C is formed in float64 and rounded once to the type of D. The hardware aligns the
products and drops the bits that fall off, in an order of its own: its results may differ in the last bits. Integers are
exact: they wrap around, or stay at the bound with `.satfinite`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ..errors import UnsupportedInstruction
from .formats import FORMATS, Format, accumulators, split
from .fragments import Fragment, by_quads, quad_pairs_accumulator, quad_pairs_operand

Product = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (..., m, k) and (..., n, k) -> (..., m, n)

_HALF_SHAPES = {"m8n8k4", "m16n8k8", "m16n8k16"}
_DOUBLE_SHAPES = {"m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"}
_OCTET_SHAPES = {"m8n8k16", "m16n8k16", "m16n8k32"}
_NIBBLE_SHAPES = {"m8n8k32", "m16n8k32", "m16n8k64"}

# types of A and B -> shapes, and the types that C and D may have
_KNOWN: list[tuple[set[str], set[str], set[str]]] = [
    ({"f16"}, _HALF_SHAPES, {"f16", "f32"}),
    ({"bf16"}, {"m16n8k8", "m16n8k16"}, {"f32"}),
    ({"tf32"}, {"m16n8k4", "m16n8k8"}, {"f32"}),
    ({"f64"}, _DOUBLE_SHAPES, {"f64"}),
    ({"e4m3", "e5m2"}, {"m16n8k16", "m16n8k32"}, {"f16", "f32"}),
    ({"s8", "u8"}, _OCTET_SHAPES, {"s32"}),
    ({"s4", "u4"}, _NIBBLE_SHAPES, {"s32"}),
    ({"b1"}, {"m8n8k128", "m16n8k128", "m16n8k256"}, {"s32"}),
]


@dataclass(frozen=True)
class Operand:
    """One of A, B, C, D: its element type and where the lanes hold it."""

    held: Format
    fragment: Fragment

    @property
    def registers(self) -> int:
        return self.fragment.per_lane // self.held.per_register

    def load(self, registers: list[np.ndarray]) -> np.ndarray:
        """Registers, as the type says they are viewed -> (warps, rows, columns) in float64."""
        return self.held.decode(self.fragment.gather(split(registers, self.held)))


@dataclass(frozen=True)
class Mma:
    """One `mma.sync` shape and its types."""

    a_registers: int
    b_registers: int
    c_registers: int
    d_registers: int
    a_type: str  # how each register is viewed: "u32", "f32", "s32", "f64"
    b_type: str
    c_type: str
    d_type: str
    a: Operand = field(repr=False)
    b: Operand = field(repr=False)
    c: Operand = field(repr=False)
    d: Operand = field(repr=False)
    product: Product = field(repr=False)
    saturate: bool = False

    def compute(self, a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
        """D's registers. Every array is (32 * warps,), the lanes of a warp next to each other."""
        total = self.product(self.a.load(a), self.b.load(b))
        total += self.c.load(c)
        return accumulators(self.d.fragment.scatter(total), self.d.held, self.saturate)


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A times B, with B seen as n x k. On bits it counts the ones of their `and`."""
    return a @ b.swapaxes(-1, -2)


def count_of_xor(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Number of places where a row of A and a row of B differ, for rows of bits."""
    return a.sum(-1)[..., :, None] + b.sum(-1)[..., None, :] - 2 * dot(a, b)


@cache
def mma(modifiers: tuple[str, ...]) -> Mma:
    """The unit that `mma.<modifiers>` names, for example ("sync", "aligned", "m16n8k16", "row", "col", "f32", ...)."""
    shape, layouts, types, flags = _parse(modifiers)
    product, saturate = _arithmetic(types, flags, modifiers)
    return of_operands(*_operands(shape, layouts, types), product, saturate)


def of_operands(a: Operand, b: Operand, c: Operand, d: Operand, product: Product, saturate: bool) -> Mma:
    """The unit that multiplies such operands."""
    counts = (a.registers, b.registers, c.registers, d.registers)
    views = (a.held.register, b.held.register, c.held.register, d.held.register)
    return Mma(*counts, *views, a, b, c, d, product, saturate)


def unsupported(instruction: str, modifiers: tuple[str, ...], why: str = "") -> UnsupportedInstruction:
    """The error for an instruction of this family; `why` names what is wrong with it where that is known."""
    name = ".".join((instruction, *modifiers))
    return UnsupportedInstruction(f"{name} is not supported" + (f": {why}" if why else ""))


def _parse(modifiers: tuple[str, ...]) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """shape, the layouts of A and B, the types (d, a, b, c) and what else is there."""
    if modifiers[:2] != ("sync", "aligned"):
        raise unsupported("mma", modifiers)
    shape = next((m for m in modifiers if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    layouts = tuple(m for m in modifiers if m in ("row", "col"))
    types = tuple(m for m in modifiers if m in FORMATS)
    flags = tuple(m for m in modifiers[2:] if m not in (shape, "row", "col") and m not in FORMATS)
    if len(layouts) != 2 or len(types) != 4 or not _is_listed(shape, layouts, types):
        raise unsupported("mma", modifiers)
    return shape, layouts, types, flags


def _is_listed(shape: str, layouts: tuple[str, ...], types: tuple[str, ...]) -> bool:
    """Return True if the PTX ISA lists this shape with these types: (d, a, b, c)."""
    d, a, b, c = types
    if not any({a, b} <= operands and shape in shapes and {c, d} <= sums for operands, shapes, sums in _KNOWN):
        return False
    if shape == "m8n8k4" and a == "f16":
        return c == "f16" or d == "f32"
    return layouts == ("row", "col") and c == d


def _arithmetic(types: tuple[str, ...], flags: tuple[str, ...], modifiers: tuple[str, ...]) -> tuple[Product, bool]:
    a = types[1]
    if a == "b1" and flags in (("xor", "popc"), ("and", "popc")):
        return (count_of_xor if flags[0] == "xor" else dot), False
    if a in ("s8", "u8", "s4", "u4") and flags == ("satfinite",):
        return dot, True
    if flags or a == "b1":
        raise unsupported("mma", modifiers)
    return dot, False


def _operands(
    shape: str, layouts: tuple[str, ...], types: tuple[str, ...]
) -> tuple[Operand, Operand, Operand, Operand]:
    """A, B, C and D."""
    d, a, b, c = (FORMATS[name] for name in types)
    if shape == "m8n8k4" and a.name == "f16":
        fragments = [quad_pairs_operand(layouts[0] == "row"), quad_pairs_operand(layouts[1] == "col")]
        fragments += [quad_pairs_accumulator(held.name == "f16") for held in (c, d)]
    else:
        m, n, k = (int(number) for number in re.findall(r"\d+", shape))
        sums = by_quads(m, n, 2)
        fragments = [by_quads(m, k, a.per_register), by_quads(n, k, b.per_register), sums, sums]
    of_a, of_b, of_c, of_d = fragments
    return Operand(a, of_a), Operand(b, of_b), Operand(c, of_c), Operand(d, of_d)
