"""Integer arithmetic: sums, products, quotients, and the carry that runs through sums of several words.

Sums and low products are the same for signed and unsigned integers: they are computed unsigned, where NumPy wraps.
"""

from typing import Any

import numpy as np

from .lanes import choose, packed
from .operation import DTYPES, VIEWS, Function, Instruction, Operation, builds, uniform

_WORDS = "u16 u32 u64 s16 s32 s64"
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def unsigned(name: str) -> str:
    """The unsigned type of a type's width."""
    return "u" + name[1:]


def _clamp32(value: Any) -> Any:
    return np.minimum(np.maximum(value, np.int64(-(2**31))), np.int64(2**31 - 1)).astype(np.int32)


@builds("add sub", _WORDS)
def add(instruction: Instruction) -> Operation:
    """A sum or difference: wrapped, clamped (.sat, of s32), or with the carry that goes out (.cc)."""
    name = instruction.type
    function = np.add if instruction.opcode == "add" else np.subtract
    if instruction.has("cc"):
        return _with_carry(instruction, carry_in=False)
    instruction.check(3, ("sat",) if name == "s32" else ())
    if instruction.has("sat"):
        return uniform(lambda a, b: _clamp32(function(a, b, dtype=np.int64)), "s32", 2)
    return uniform(function, unsigned(name), 2)


@builds("addc subc", "u32 s32 u64 s64")
def add_with_carry(instruction: Instruction) -> Operation:
    """A sum or difference with the carry that comes in."""
    return _with_carry(instruction, carry_in=True)


def _with_carry(instruction: Instruction, carry_in: bool) -> Operation:
    if instruction.type.endswith("16"):
        raise instruction.unsupported()
    instruction.check(3, ("cc",))
    view, carry_out = unsigned(instruction.type), instruction.has("cc")
    function = sum_with_carry(instruction.opcode.startswith("sub"), carry_in, carry_out)
    return Operation(function, (view, view), (view,), carry_in, carry_out)


def sum_with_carry(subtracts: bool, carry_in: bool, carry_out: bool) -> Function:
    """a + b + carry, or a + ~b + carry, which is a - b where the carry is set; and the carry that goes out.

    So a carry of a difference says that nothing was borrowed. That is what an `addc` after a `sub.cc` reads, as in NVRTC's
    own divisions of 128 bits.
    """

    def apply(a: Any, b: Any, carry: Any = None) -> Any:
        if not carry_in:
            if subtracts:
                return (a - b, a >= b) if carry_out else a - b
            total = a + b
            return (total, total < a) if carry_out else total
        first = a + (~b if subtracts else b)
        total = np.add(first, carry, dtype=first.dtype)
        return (total, (first < a) | (total < first)) if carry_out else total

    return apply


@builds("add", "u16x2 s16x2")
def add_pair(instruction: Instruction) -> Operation:
    """Two sums of 16 bits."""
    instruction.check(3)
    return uniform(packed(np.add, np.uint16, np.uint32), "u32", 2)


def high_product(a: Any, b: Any) -> Any:
    """The upper half of a product."""
    if a.dtype.itemsize < 8:
        wide = DTYPES[_WIDER[("s" if a.dtype.kind == "i" else "u") + str(a.dtype.itemsize * 8)]]
        return (np.multiply(a, b, dtype=wide) >> wide.type(a.dtype.itemsize * 8)).astype(a.dtype)
    if a.dtype.kind == "u":
        return _high_product64(a, b)
    # A negative number is its unsigned reading less 2^64.
    high = _high_product64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - choose(a < 0, b, np.int64(0)) - choose(b < 0, a, np.int64(0))


def _high_product64(a: Any, b: Any) -> Any:
    a_low, a_high, b_low, b_high = a & _LOW32, a >> _SHIFT32, b & _LOW32, b >> _SHIFT32
    middle = a_high * b_low + ((a_low * b_low) >> _SHIFT32)
    other = a_low * b_high + (middle & _LOW32)
    return a_high * b_high + (middle >> _SHIFT32) + (other >> _SHIFT32)


def _product(instruction: Instruction) -> Operation:
    """.lo, .hi or .wide of a product."""
    name = instruction.type
    if instruction.has("lo"):
        return uniform(np.multiply, unsigned(name), 2)
    if instruction.has("hi"):
        return uniform(high_product, name, 2)
    if name not in _WIDER:
        raise instruction.unsupported()
    wide = DTYPES[_WIDER[name]]
    return Operation(lambda a, b: np.multiply(a, b, dtype=wide), (name, name), (_WIDER[name],))


@builds("mul", _WORDS)
def multiply(instruction: Instruction) -> Operation:
    """.lo, .hi or .wide of a product."""
    instruction.check(3, (), ("lo", "hi", "wide"))
    return _product(instruction)


@builds("mad", _WORDS)
def multiply_add(instruction: Instruction) -> Operation:
    """.lo, .hi or .wide of a product, and a third operand; .hi.sat of s32 clamps; .cc gives the carry out."""
    if instruction.has("cc"):
        return _multiply_add_carry(instruction, carry_in=False)
    can_saturate = instruction.type == "s32" and instruction.has("hi")
    instruction.check(4, ("sat",) if can_saturate else (), ("lo", "hi", "wide"))
    product = _product(instruction)
    compute, (given,) = product.function, product.gives
    if instruction.has("sat"):
        return uniform(lambda a, b, c: _clamp32(np.add(compute(a, b), c, dtype=np.int64)), "s32", 3)
    word = unsigned(given)
    dtype = DTYPES[word]
    return Operation(lambda a, b, c: compute(a, b).view(dtype) + c, (*product.takes, word), (word,))


@builds("madc", "u32 s32 u64 s64")
def multiply_add_with_carry(instruction: Instruction) -> Operation:
    """.lo or .hi of a product, a third operand and the carry that comes in."""
    return _multiply_add_carry(instruction, carry_in=True)


def _multiply_add_carry(instruction: Instruction, carry_in: bool) -> Operation:
    if instruction.type.endswith("16"):
        raise instruction.unsupported()
    instruction.check(4, ("cc",), ("lo", "hi"))
    product, carry_out = _product(instruction), instruction.has("cc")
    word = unsigned(instruction.type)
    compute, dtype = product.function, DTYPES[word]
    add_up = sum_with_carry(False, carry_in, carry_out)

    def apply(a: Any, b: Any, c: Any, *carry: Any) -> Any:
        return add_up(compute(a, b).view(dtype), c, *carry)

    return Operation(apply, (*product.takes, word), (word,), carry_in, carry_out)


@builds("mul24 mad24", "u32 s32")
def multiply24(instruction: Instruction) -> Operation:
    """Bits 31..0 or 47..16 of a product of the low 24 bits, and a third operand; .hi.sat of s32 clamps."""
    name, has_sum = instruction.type, instruction.opcode == "mad24"
    can_saturate = has_sum and name == "s32" and instruction.has("hi")
    instruction.check(4 if has_sum else 3, ("sat",) if can_saturate else (), ("lo", "hi"))
    dtype, wide = DTYPES[name].type, DTYPES[_WIDER[name]].type
    shift = wide(16 if instruction.has("hi") else 0)

    def product(a: Any, b: Any) -> Any:
        low24 = [(operand << dtype(8)) >> dtype(8) for operand in (a, b)]
        return (np.multiply(*low24, dtype=wide) >> shift).astype(dtype)

    if not has_sum:
        return uniform(product, name, 2)
    if instruction.has("sat"):
        return uniform(lambda a, b, c: _clamp32(np.add(product(a, b), c, dtype=np.int64)), name, 3)
    return uniform(lambda a, b, c: product(a, b) + c, name, 3)


@builds("sad", _WORDS)
def absolute_difference(instruction: Instruction) -> Operation:
    """c + |a - b|."""
    instruction.check(4)
    return uniform(lambda a, b, c: c + choose(a < b, b - a, a - b), instruction.type, 3)


@builds("div", _WORDS)
def divide(instruction: Instruction) -> Operation:
    """A quotient toward zero; by zero (PTX leaves it to the machine) all bits are set."""
    instruction.check(3)
    return uniform(quotient, instruction.type, 2)


@builds("rem", _WORDS)
def remainder(instruction: Instruction) -> Operation:
    """Compute the rest of a beyond the quotient toward zero; by zero (PTX leaves it to the machine) it is a."""
    instruction.check(3)
    return uniform(lambda a, b: choose(b == 0, a, np.fmod(a, _not_zero(b))), instruction.type, 2)


def quotient(a: Any, b: Any) -> Any:
    """a / b toward zero, all bits set where b is zero, wrapped where it overflows."""
    divisor = _not_zero(b)
    if a.dtype.kind == "u":
        result = a // divisor
    else:
        word = DTYPES["u" + str(a.dtype.itemsize * 8)]
        magnitude = (np.abs(a).view(word) // np.abs(divisor).view(word)).view(a.dtype)
        result = choose((a < 0) != (divisor < 0), -magnitude, magnitude)
    return choose(b == 0, ~result.dtype.type(0), result)


def _not_zero(b: Any) -> Any:
    return choose(b == 0, b.dtype.type(1), b)


@builds("abs neg", "s16 s32 s64")
def sign(instruction: Instruction) -> Operation:
    """The most negative number is left as it is."""
    instruction.check(2)
    return uniform(np.abs if instruction.opcode == "abs" else np.negative, instruction.type, 1)


@builds("dp4a dp2a")
def dot_product(instruction: Instruction) -> Operation:
    """c + the products of four bytes with four bytes, or of two half words with the two lower or upper bytes."""
    two = instruction.opcode == "dp2a"
    instruction.check(4, (), *([("lo", "hi")] if two else []))
    if len(instruction.types) != 2 or not set(instruction.types) <= {"u32", "s32"}:
        raise instruction.unsupported()
    kinds = ["iu"[name == "u32"] for name in instruction.types]
    a_part, b_part = np.dtype(f"{kinds[0]}{2 if two else 1}"), np.dtype(f"{kinds[1]}1")
    first = 2 if instruction.has("hi") else 0

    def apply(a: Any, b: Any, c: Any) -> Any:
        a_parts = _parts(a, a_part)
        b_parts = _parts(b, b_part)[..., first : first + a_parts.shape[-1]]
        products = np.multiply(a_parts, b_parts, dtype=np.int64)
        return (products.sum(axis=-1) + c).astype(np.uint32)

    return uniform(apply, VIEWS["u32"], 3)


def _parts(word: Any, part: np.dtype) -> Any:
    """The parts of each word, along a last axis."""
    words = np.ascontiguousarray(word)
    parts = words.view(part).reshape(len(words), -1)
    return parts if np.ndim(word) else parts[0]
