"""min and max: of integers, of floats (where -0 is less than +0 and a NaN gives way), and of two in a word."""

from typing import Any

import numpy as np

from .finish import canonical, flush32
from .half import finish, for_type, half_of
from .lanes import choose, packed, repair
from .operation import VIEWS, Function, Instruction, Operation, after, before, builds, uniform

_BITS = {np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}
_HALVES = "f16 bf16 f16x2 bf16x2"


@builds("min max", "u16 u32 u64 s16 s32 s64")
def integer(instruction: Instruction) -> Operation:
    """.relu, of s32, clamps the result to at least 0."""
    name = instruction.type
    instruction.check(3, ("relu",) if name == "s32" else ())
    operation = uniform(np.minimum if instruction.opcode == "min" else np.maximum, name, 2)
    return after(operation, _relu_integer if instruction.has("relu") else None)


@builds("min max", "u16x2 s16x2")
def integer_pair(instruction: Instruction) -> Operation:
    """.relu, of s16x2, clamps each result to at least 0."""
    signed = instruction.type == "s16x2"
    instruction.check(3, ("relu",) if signed else ())
    part = np.int16 if signed else np.uint16
    extreme = uniform(np.minimum if instruction.opcode == "min" else np.maximum, "u32", 2)
    both = after(extreme, _relu_integer if instruction.has("relu") else None)
    return uniform(packed(both.function, part, np.uint32), "u32", 2)


def _relu_integer(value: Any) -> Any:
    return np.maximum(value, value.dtype.type(0))


def extreme_of(opcode: str, nan: bool) -> Function:
    """The minimum or maximum of two floats; `nan`: NaN if either is, else the other one.

    (NumPy's fmin and fmax treat a signalling NaN in one way in the middle of an array and in another at its end.)
    """
    pick, zero = (np.minimum, -0.0) if opcode == "min" else (np.maximum, 0.0)

    def extreme(a: Any, b: Any) -> Any:
        result = pick(a, b)
        bits = _BITS[result.dtype]
        zeros_of_two_signs = (a == b) & (a.view(bits) != b.view(bits))
        result = repair(result, zeros_of_two_signs, lambda *_: result.dtype.type(zero))
        if nan:
            return result
        return repair(result, np.isnan(result), lambda x, y: choose(np.isnan(x), y, x), a, b)

    return extreme


@builds("min max", "f64")
def double(instruction: Instruction) -> Operation:
    """float64, of which the number is taken where one of the two is NaN."""
    instruction.check(3)
    return uniform(extreme_of(instruction.opcode, nan=False), "f64", 2)


@builds("min max", "f32")
def single(instruction: Instruction) -> Operation:
    """Two or three float32 numbers, with .ftz, .NaN, .abs and .xorsign."""
    function = _float32(instruction, 3 if instruction.operands == 4 else 2)
    flush = flush32 if instruction.has("ftz") else None
    return before(flush, after(uniform(function, "f32", instruction.operands - 1), canonical))


def _float32(instruction: Instruction, sources: int) -> Function:
    extreme = extreme_of(instruction.opcode, instruction.has("NaN"))
    if sources == 3:
        instruction.check(4, ("ftz", "NaN", "abs"))
        if instruction.has("abs"):
            return lambda a, b, c: extreme(extreme(np.abs(a), np.abs(b)), np.abs(c))
        return lambda a, b, c: extreme(extreme(a, b), c)
    instruction.check(3, ("ftz", "NaN", "abs", "xorsign"))
    return _two_or_signed(instruction, extreme)


def _two_or_signed(instruction: Instruction, extreme: Function) -> Function:
    """.xorsign.abs: of the magnitudes, with the product of the signs. Neither comes alone."""
    if instruction.has("abs") != instruction.has("xorsign"):
        raise instruction.unsupported()
    if not instruction.has("abs"):
        return extreme

    def signed(a: Any, b: Any) -> Any:
        magnitude = extreme(np.abs(a), np.abs(b))
        return np.copysign(magnitude, np.copysign(magnitude.dtype.type(1), a) * np.copysign(magnitude.dtype.type(1), b))

    return signed


@builds("min max", _HALVES)
def half(instruction: Instruction) -> Operation:
    """float16 and bfloat16, one or two, with .NaN and .xorsign.abs, and .ftz of float16."""
    name = instruction.type
    instruction.check(3, ("NaN", "abs", "xorsign", *(("ftz",) if name.startswith("f16") else ())))
    extreme = _two_or_signed(instruction, extreme_of(instruction.opcode, instruction.has("NaN")))
    codes = before(finish(name, ftz=instruction.has("ftz")), uniform(half_of(name).lift(extreme), "u16", 2))
    return uniform(for_type(name, codes.function), VIEWS[name], 2)
