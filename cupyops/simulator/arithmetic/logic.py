"""Bitwise logic, shifts, funnel shifts and byte permutation."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .lanes import choose, spread
from .operation import DTYPES, VIEWS, Function, Instruction, Operation, builds, uniform

_U32, _U64 = np.uint32, np.uint64
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@builds("and or xor", "pred b16 b32 b64")
def logic(instruction: Instruction) -> Operation:
    """Combine two words or predicates bitwise."""
    instruction.check(3)
    return uniform(_LOGIC[instruction.opcode], VIEWS[instruction.type], 2)


@builds("not", "pred b16 b32 b64")
def complement(instruction: Instruction) -> Operation:
    """Invert a word or predicate."""
    instruction.check(2)
    return uniform(np.invert, VIEWS[instruction.type], 1)


@builds("cnot", "b16 b32 b64")
def logical_not(instruction: Instruction) -> Operation:
    """1 for zero, else 0."""
    instruction.check(2)
    dtype = DTYPES[VIEWS[instruction.type]]
    return uniform(lambda a: (a == 0).astype(dtype), VIEWS[instruction.type], 1)


# The functions of two bits, by truth table: bit 2 * a + b is the value for (a, b).
_OF_TWO: list[Callable[[Any, Any], Any]] = [
    lambda a, b: _U32(0),
    lambda a, b: ~(a | b),
    lambda a, b: ~a & b,
    lambda a, b: ~a,
    lambda a, b: a & ~b,
    lambda a, b: ~b,
    lambda a, b: a ^ b,
    lambda a, b: ~(a & b),
    lambda a, b: a & b,
    lambda a, b: ~(a ^ b),
    lambda a, b: b,
    lambda a, b: ~a | b,
    lambda a, b: a,
    lambda a, b: a | ~b,
    lambda a, b: a | b,
    lambda a, b: _U32(0xFFFFFFFF),
]


@cache
def _of_three(table: int) -> Function:
    """The function of three words with a truth table whose bit 4 * a + 2 * b + c is the value for (a, b, c)."""
    clear = sum((table >> (2 * i) & 1) << i for i in range(4))  # the table for a and b where c is 0
    filled = sum((table >> (2 * i + 1) & 1) << i for i in range(4))  # .. and where c is 1
    if clear == filled:
        return lambda a, b, c: _OF_TWO[clear](a, b)
    if clear == filled ^ 15:
        return lambda a, b, c: _OF_TWO[clear](a, b) ^ c
    if clear == 0:
        return lambda a, b, c: _OF_TWO[filled](a, b) & c
    if filled == 15:
        return lambda a, b, c: _OF_TWO[clear](a, b) | c
    if filled == 0:
        return lambda a, b, c: _OF_TWO[clear](a, b) & ~c
    if clear == 15:
        return lambda a, b, c: _OF_TWO[filled](a, b) | ~c
    return lambda a, b, c: _OF_TWO[clear](a, b) ^ (_OF_TWO[clear ^ filled](a, b) & c)


@builds("lop3", "b32")
def logic_of_three(instruction: Instruction) -> Operation:
    """Any bitwise function of three words; its truth table is the last operand, the same for all threads."""
    instruction.check(5)
    return uniform(lambda a, b, c, table: spread(_of_three(int(table) & 0xFF)(a, b, c), a, b, c), "u32", 4)


@builds("shl", "b16 b32 b64")
def shift_left(instruction: Instruction) -> Operation:
    """An amount beyond the width gives 0."""
    instruction.check(3)
    return _shift(instruction.type, np.left_shift)


@builds("shr", "b16 b32 b64 u16 u32 u64 s16 s32 s64")
def shift_right(instruction: Instruction) -> Operation:
    """An amount beyond the width gives 0, or the sign of a signed number."""
    instruction.check(3)
    return _shift(instruction.type, np.right_shift)


def _shift(name: str, function: Function) -> Operation:
    view = VIEWS[name]
    if view == "u32":
        return uniform(function, view, 2)
    dtype = DTYPES[view].type
    width = DTYPES[view].itemsize * 8

    def apply(a: Any, amount: Any) -> Any:
        # NumPy does what PTX asks with amounts beyond the width; it wants them in the type of the number.
        count = np.minimum(amount, _U32(width))
        return function(a, count.view(dtype) if width == 32 else count.astype(dtype))

    return Operation(apply, (view, "u32"), (view,))


@builds("shf", "b32")
def funnel_shift(instruction: Instruction) -> Operation:
    """The upper (.l) or lower (.r) half of the 64 bits (b, a), shifted; .wrap takes the amount modulo 32."""
    instruction.check(4, (), ("l", "r"), ("wrap", "clamp"))
    left, wrap = instruction.has("l"), instruction.has("wrap")

    def apply(a: Any, b: Any, amount: Any) -> Any:
        count = (amount & _U32(31) if wrap else np.minimum(amount, _U32(32))).astype(_U64)
        both = (b.astype(_U64) << _U64(32)) | a
        return (((both << count) >> _U64(32)) if left else both >> count).astype(_U32)

    return uniform(apply, "u32", 3)


# For each mode of prmt and each value of the two bits of its control: the source bytes, lowest first.
_PERMUTATIONS = {
    "f4e": ("0123", "1234", "2345", "3456"),
    "b4e": ("0765", "1076", "2107", "3210"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("0123", "1123", "2223", "3333"),
    "ecr": ("0000", "0111", "0122", "0123"),
    "rc16": ("0101", "2323", "0101", "2323"),
}


@builds("prmt")
def permute(instruction: Instruction) -> Operation:
    """Four of the eight bytes of (b, a), each chosen by four bits of c, or all of them by a mode and two bits of c."""
    if instruction.modifiers[:1] != ("b32",) or instruction.operands != 4 or len(instruction.modifiers) > 2:
        raise instruction.unsupported()
    if len(instruction.modifiers) == 1:
        return uniform(_permute, "u32", 3)
    rows = _PERMUTATIONS.get(instruction.modifiers[1])
    if rows is None:
        raise instruction.unsupported()
    selectors = np.array([sum(int(byte) << 4 * i for i, byte in enumerate(row)) for row in rows], _U32)
    return uniform(lambda a, b, c: _permute(a, b, selectors[c & _U32(3)]), "u32", 3)


def _permute(a: Any, b: Any, selector: Any) -> Any:
    if not np.ndim(selector):
        return spread(_permute_alike(a, b, int(selector)), a, b)
    both = (b.astype(_U64) << _U64(32)) | a
    result = _U32(0)
    for i in range(4):
        choice = (selector >> _U32(4 * i)) & _U32(15)
        byte = (both >> ((choice & _U32(7)) * _U32(8)).astype(_U64)).astype(_U32) & _U32(0xFF)
        signs = (byte >> _U32(7)) * _U32(0xFF)
        result = result | choose(choice >= 8, signs, byte) << _U32(8 * i)
    return result


def _permute_alike(a: Any, b: Any, selector: int) -> Any:
    """One selector for all threads: bytes of one source that move equally far are moved together."""
    result = _U32(0)
    moves: dict[tuple[int, int], int] = {}  # source and distance in bytes: the mask of what moves
    for i in range(4):
        choice = selector >> 4 * i & 15
        source, byte = divmod(choice & 7, 4)
        if choice & 8:
            word = b if source else a
            result = result | ((word >> _U32(8 * byte + 7)) & _U32(1)) * _U32(0xFF << 8 * i)
        else:
            moves[source, i - byte] = moves.get((source, i - byte), 0) | 0xFF << 8 * byte
    for (source, distance), mask in moves.items():
        word = (b if source else a) & _U32(mask)
        moved = word << _U32(8 * distance) if distance >= 0 else word >> _U32(-8 * distance)
        result = result | moved
    return result
