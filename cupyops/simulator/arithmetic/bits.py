"""Bits counted, found, reversed, and fields of them extracted, inserted and extended."""

from typing import Any

import numpy as np

from .lanes import choose, lanes_of
from .operation import DTYPES, VIEWS, Instruction, Operation, builds, uniform

_U32, _U64 = np.uint32, np.uint64
_NONE = _U32(0xFFFFFFFF)


def _width(view: str) -> int:
    return DTYPES[view].itemsize * 8


@builds("popc", "b32 b64")
def count_ones(instruction: Instruction) -> Operation:
    """Count the bits that are set."""
    instruction.check(2)
    view = VIEWS[instruction.type]
    if hasattr(np, "bitwise_count"):
        return Operation(lambda a: np.bitwise_count(a).astype(_U32), (view,), ("u32",))
    return Operation(_ones_by_halves, (view,), ("u32",))


def _ones_by_halves(a: Any) -> Any:
    """Count ones by adding neighbouring counts, in fields that grow; for NumPy before 2.0."""
    word = a.astype(_U64)
    masks = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
    for shift, mask in zip((1, 2, 4), masks):
        word = (word & _U64(mask)) + ((word >> _U64(shift)) & _U64(mask))
    return ((word * _U64(0x0101010101010101)) >> _U64(56)).astype(_U32)


def leading_zeros(a: Any) -> Any:
    """Count the clear bits above the highest set one; the width, where none is set."""
    if a.dtype.itemsize == 8:
        high = leading_zeros((a >> _U64(32)).astype(_U32))
        return choose(high < 32, high, _U32(32) + leading_zeros(a.astype(_U32)))
    return _U32(32) - np.frexp(a.astype(np.float64))[1].astype(_U32)


@builds("clz", "b32 b64")
def count_leading_zeros(instruction: Instruction) -> Operation:
    """Count the clear bits above the highest set one."""
    instruction.check(2)
    return Operation(leading_zeros, (VIEWS[instruction.type],), ("u32",))


@builds("bfind", "u32 u64 s32 s64")
def find_highest(instruction: Instruction) -> Operation:
    """The highest bit that is not the sign, or by .shiftamt how far it is from the top; all ones if there is none."""
    instruction.check(2, ("shiftamt",))
    name, from_top = instruction.type, instruction.has("shiftamt")
    word, top = DTYPES["u" + name[1:]], _U32(_width(name) - 1)

    def find(a: Any) -> Any:
        bits = (choose(a < 0, ~a, a) if name[0] == "s" else a).view(word)
        zeros = leading_zeros(bits)
        return choose(bits == 0, _NONE, zeros if from_top else top - zeros)

    return Operation(find, (name,), ("u32",))


@builds("brev", "b32 b64")
def reverse(instruction: Instruction) -> Operation:
    """The bits in the opposite order."""
    instruction.check(2)
    view = VIEWS[instruction.type]
    word = DTYPES[view].type
    groups = [(1, 0x55), (2, 0x33), (4, 0x0F)]
    masks = [(word(shift), word(int.from_bytes(bytes([mask]) * (_width(view) // 8), "big"))) for shift, mask in groups]

    def reversed_bits(a: Any) -> Any:
        for shift, mask in masks:
            a = ((a >> shift) & mask) | ((a & mask) << shift)
        return a.byteswap()

    return uniform(reversed_bits, view, 1)


def _low_ones(count: Any, word: Any) -> Any:
    """A mask of the lowest bits: NumPy's shift by the width or more leaves nothing, so that its complement is all."""
    return ~(~word(0) << count.astype(word))


@builds("bfe", "u32 u64 s32 s64")
def extract(instruction: Instruction) -> Operation:
    """The field of bits from a position, of a length, extended by its sign where the type is signed.

    Of position and length, 32-bit instructions take the low byte. PTX says so of 64-bit ones too; a GPU takes all of them.
    """
    instruction.check(4)
    name = instruction.type
    kind, word, width = DTYPES[name].type, DTYPES["u" + name[1:]].type, _width(name)

    def field(a: Any, position: Any, length: Any) -> Any:
        position, length = _ends(position, width), _ends(length, width)
        if name[0] == "u":
            return (a >> np.minimum(position, _U32(width)).astype(kind)) & _low_ones(length, word)
        # The field goes up against the top, from where an arithmetic shift brings it down with its sign.
        last = position + np.minimum(length, _U32(width) - position)
        up = (_U32(width) - last).astype(kind)
        down = up + np.minimum(position, last).astype(kind)
        return choose(length == 0, kind(0), (a << up) >> down)

    return Operation(field, (name, "u32", "u32"), (name,))


def _ends(count: Any, width: int) -> Any:
    """A position or a length, no longer than the width."""
    return np.minimum(count & _U32(0xFF) if width == 32 else count, _U32(width))


@builds("bfi", "b32 b64")
def insert(instruction: Instruction) -> Operation:
    """The lowest bits of a, as many as the length, into b from a position on."""
    instruction.check(5)
    view = VIEWS[instruction.type]
    word, width = DTYPES[view].type, _width(view)

    def inserted(a: Any, b: Any, position: Any, length: Any) -> Any:
        shift = _ends(position, width).astype(word)
        mask = _low_ones(_ends(length, width), word) << shift
        return b ^ ((b ^ (a << shift)) & mask)

    return Operation(inserted, (view, view, "u32", "u32"), (view,))


@builds("bmsk", "b32")
def mask(instruction: Instruction) -> Operation:
    """Ones from a position on, as many as the width; .wrap takes both modulo 32."""
    instruction.check(3, (), ("wrap", "clamp"))
    wrap = instruction.has("wrap")

    def ones(position: Any, width: Any) -> Any:
        if wrap:
            position, width = position & _U32(31), width & _U32(31)
        return _low_ones(width, _U32) << position

    return uniform(ones, "u32", 2)


@builds("szext", "u32 s32")
def extend(instruction: Instruction) -> Operation:
    """The lowest bits, as many as b, extended by sign or zeros; .wrap takes b modulo 32."""
    instruction.check(3, (), ("wrap", "clamp"))
    wrap, name = instruction.has("wrap"), instruction.type
    kind = DTYPES[name].type

    def extended(a: Any, width: Any) -> Any:
        width = width & _U32(31) if wrap else np.minimum(width, _U32(32))
        gap = (_U32(32) - width).astype(kind)
        return choose(width == 0, kind(0), (a << gap) >> gap)

    return Operation(extended, (name, "u32"), (name,))


@builds("fns", "b32")
def find_nth(instruction: Instruction) -> Operation:
    """The position of the n-th set bit of a mask, from a base upward (n > 0) or downward; all ones if there is none."""
    instruction.check(4)
    return Operation(_nth_set_bit, ("u32", "u32", "s32"), ("u32",))


def _nth_set_bit(word: Any, base: Any, offset: Any) -> Any:
    found = np.full(lanes_of(word, base, offset) or 1, _NONE)
    upward = offset >= 0
    left = np.maximum(np.abs(offset.astype(np.int64)), 1) + np.zeros(found.shape, np.int64)
    for step in range(32):
        position = choose(upward, base.astype(np.int64) + step, base.astype(np.int64) - step)
        inside = (position >= 0) & (position < 32) & ((offset != 0) | (step == 0))
        isset = inside & ((word >> (position & 31).astype(_U32)) & _U32(1)).astype(bool)
        left = left - isset
        found = choose(isset & (left == 0), position, found).astype(_U32)
    return found if lanes_of(word, base, offset) is not None else found[0]
