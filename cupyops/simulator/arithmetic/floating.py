"""add, sub, mul, fma, mad, div, rcp, sqrt, abs, neg and copysign of floating-point numbers of every width."""

from typing import Any

import numpy as np

from . import binary32, binary64
from .finish import canonical, chain, flush32, saturate
from .half import finish, for_type, half_of
from .lanes import packed
from .operation import ROUNDINGS, VIEWS, Function, Instruction, Operation, after, before, builds, uniform

_HALVES = "f16 bf16 f16x2 bf16x2"
_EXACT32 = {
    "add": binary32.add32,
    "sub": binary32.subtract32,
    "mul": binary32.multiply32,
    "fma": binary32.fma32_in,
    "mad": binary32.fma32_in,
    "div": binary32.divide32,
    "sqrt": binary32.root32,
    "rcp": lambda rounding: _reciprocal(binary32.divide32(rounding), np.float32(1)),
}
_EXACT64 = {
    "add": binary64.add64,
    "sub": binary64.subtract64,
    "mul": binary64.multiply64,
    "fma": binary64.fma64,
    "mad": binary64.fma64,
    "div": binary64.divide64,
    "sqrt": binary64.root64,
    "rcp": lambda rounding: _reciprocal(binary64.divide64(rounding), np.float64(1)),
}
_SOURCES = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "mad": 3, "sqrt": 1, "rcp": 1}
_ROUNDED = {"fma", "div", "sqrt", "rcp"}  # a rounding must be written


def _reciprocal(divide: Function, one: Any) -> Function:
    return lambda a: divide(one, a)


def _check(instruction: Instruction, allowed: tuple[str, ...]) -> int:
    """The number of sources, once the instruction is known to be well formed."""
    sources = _SOURCES[instruction.opcode]
    if instruction.opcode in _ROUNDED:
        instruction.check(sources + 1, allowed, ROUNDINGS)
    else:
        instruction.check(sources + 1, (*allowed, *ROUNDINGS))
    return sources


@builds("add sub mul fma mad", "f32")
def single(instruction: Instruction) -> Operation:
    """float32 in a rounding, with .ftz and .sat."""
    sources = _check(instruction, ("ftz", "sat"))
    return finished32(instruction, _EXACT32[instruction.opcode](instruction.rounding), sources)


def rounded32(instruction: Instruction) -> Operation:
    """div, rcp or sqrt of float32 in a rounding."""
    sources = _check(instruction, ("ftz",))
    function = _EXACT32[instruction.opcode](instruction.rounding)
    if instruction.opcode == "div" and instruction.has("ftz") and instruction.rounding in ("rm", "rp"):
        function = binary32.without_subnormal_quotients(function)
    return finished32(instruction, function, sources)


def finished32(instruction: Instruction, function: Function, sources: int) -> Operation:
    """A float32 function with what .ftz and .sat ask of its operands and of its result."""
    flush = flush32 if instruction.has("ftz") else None
    last = saturate if instruction.has("sat") else canonical
    return after(before(flush, uniform(function, "f32", sources)), chain(flush, last))


@builds("add sub mul fma", "f32x2")
def pair(instruction: Instruction) -> Operation:
    """Two float32 numbers in 64 bits."""
    sources = _check(instruction, ("ftz",))
    operation = finished32(instruction, _EXACT32[instruction.opcode](instruction.rounding), sources)
    return uniform(packed(operation.function, np.float32, np.uint64), "u64", sources)


@builds("add sub mul fma mad", "f64")
def double(instruction: Instruction) -> Operation:
    """float64 in a rounding."""
    sources = _check(instruction, ())
    return uniform(_EXACT64[instruction.opcode](instruction.rounding), "f64", sources)


def rounded64(instruction: Instruction) -> Operation:
    """div, rcp or sqrt of float64 in a rounding."""
    return double(instruction)


@builds("add sub mul", _HALVES)
def half_sum(instruction: Instruction) -> Operation:
    """float16 and bfloat16, one or two."""
    is_f16 = instruction.type.startswith("f16")
    instruction.check(3, ("rn", "ftz", "sat") if is_f16 else ("rn",))
    half = half_of(instruction.type)
    return _finished_half(instruction, half.lift(_EXACT32[instruction.opcode]("rn")), 2)


@builds("fma", _HALVES)
def half_fma(instruction: Instruction) -> Operation:
    """float16 and bfloat16, one or two, with .relu beside .ftz and .sat."""
    is_f16 = instruction.type.startswith("f16")
    instruction.check(4, ("ftz", "sat", "relu") if is_f16 else ("relu",), ("rn",))
    if instruction.has("sat") and instruction.has("relu"):
        raise instruction.unsupported()
    return _finished_half(instruction, half_of(instruction.type).fma, 3)


def _finished_half(instruction: Instruction, function: Function, sources: int) -> Operation:
    name, has = instruction.type, instruction.has
    flush = finish(name, ftz=has("ftz"))
    last = finish(name, ftz=has("ftz"), sat=has("sat"), relu=has("relu"))
    codes = after(before(flush, uniform(function, "u16", sources)), last)
    return uniform(for_type(name, codes.function), VIEWS[name], sources)


@builds("add sub fma", "f32.f16 f32.bf16")
def mixed(instruction: Instruction) -> Operation:
    """The product or first term in half precision, the last term and the result in float32."""
    sources = _check(instruction, ("sat",))
    function = _EXACT32[instruction.opcode](instruction.rounding)
    widen = half_of(instruction.type).widen
    last = saturate if instruction.has("sat") else canonical

    def apply(*operands: Any) -> Any:
        return last(function(*map(widen, operands[:-1]), operands[-1]))

    return Operation(apply, ("u16",) * (sources - 1) + ("f32",), ("f32",))


@builds("abs neg", "f32 f64")
def sign(instruction: Instruction) -> Operation:
    """The sign bit cleared or turned, of a NaN too."""
    single = instruction.type == "f32"
    instruction.check(2, ("ftz",) if single else ())
    function = np.abs if instruction.opcode == "abs" else np.negative
    return before(flush32 if instruction.has("ftz") else None, uniform(function, instruction.type, 1))


@builds("abs neg", _HALVES)
def half_sign(instruction: Instruction) -> Operation:
    """The sign bit cleared or turned, of each of one or two codes."""
    is_f16 = instruction.type.startswith("f16")
    instruction.check(2, ("ftz",) if is_f16 else ())
    view = VIEWS[instruction.type]
    if instruction.opcode == "abs":
        mask = np.uint16(0x7FFF) if view == "u16" else np.uint32(0x7FFF7FFF)
        operation = uniform(lambda code: np.bitwise_and(code, mask), view, 1)
    else:
        mask = np.uint16(0x8000) if view == "u16" else np.uint32(0x80008000)
        operation = uniform(lambda code: np.bitwise_xor(code, mask), view, 1)
    flush = finish(instruction.type, ftz=instruction.has("ftz"))
    return before(for_type(instruction.type, flush) if flush else None, operation)


@builds("copysign", "f32 f64")
def copysign(instruction: Instruction) -> Operation:
    """The second operand with the sign of the first."""
    instruction.check(3)
    return uniform(lambda a, b: np.copysign(b, a), instruction.type, 2)
