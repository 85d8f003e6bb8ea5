"""div, rcp, sqrt, rsqrt and the transcendental functions: in a rounding, or approximate.

What the hardware approximates is computed in float64 and rounded once, so it is nearer to the exact value than the
hardware is; zeros, infinities and NaN come out as the PTX ISA tabulates them.
"""

from typing import Any

import numpy as np

from .floating import finished32, rounded32, rounded64
from .formats import encode
from .half import finish, for_type, half_of
from .lanes import choose
from .operation import VIEWS, Function, Instruction, Operation, builds, uniform

_F32, _F64, _U64 = np.float32, np.float64, np.uint64
_TINY64 = _F64(2.0**-1022)
_HIGH_WORD = _U64(0xFFFFFFFF00000000)
_NAN_HIGH = _U64(0x7FFFFFFF00000000).view(_F64)  # the NaN of the .approx.ftz.f64 functions


def _via64(function: Function) -> Function:
    """A float64 function of float32, rounded to float32."""
    return lambda a: function(a.astype(_F64)).astype(_F32)


def _inverse_root(a: Any) -> Any:
    return np.divide(_F64(1), np.sqrt(a))


def _divide_approximately(a: Any, b: Any) -> Any:
    """a * (1 / b): the reciprocal of what is beyond 2^126 is so small that it counts as zero."""
    quotient = np.divide(a, b)
    magnitude = np.abs(b)
    vanishing = (magnitude > _F32(2.0**126)) & np.isfinite(b)
    if not vanishing.any():
        return quotient
    return choose(vanishing, a * np.copysign(_F32(0), b), quotient)


_APPROXIMATE: dict[str, Function] = {
    "rcp": lambda a: np.divide(_F32(1), a),
    "sqrt": np.sqrt,
    "rsqrt": _via64(_inverse_root),
    "ex2": _via64(np.exp2),
    "lg2": _via64(np.log2),
    "sin": _via64(np.sin),
    "cos": _via64(np.cos),
    "tanh": _via64(np.tanh),
}


@builds("rcp sqrt rsqrt ex2 lg2 sin cos tanh", "f32")
def function32(instruction: Instruction) -> Operation:
    """A function of float32, .approx or in a rounding."""
    if not instruction.has("approx"):
        if instruction.opcode not in ("rcp", "sqrt"):
            raise instruction.unsupported()
        return rounded32(instruction)
    instruction.check(2, () if instruction.opcode == "tanh" else ("ftz",), ("approx",))
    return finished32(instruction, _APPROXIMATE[instruction.opcode], 1)


@builds("div", "f32")
def divide32(instruction: Instruction) -> Operation:
    """A quotient of float32: .approx, .full, or in a rounding."""
    if not (instruction.has("approx") or instruction.has("full")):
        return rounded32(instruction)
    instruction.check(3, ("ftz",), ("approx", "full"))
    return finished32(instruction, _divide_approximately if instruction.has("approx") else np.divide, 2)


@builds("div sqrt", "f64")
def function64(instruction: Instruction) -> Operation:
    """A quotient or square root of float64, in a rounding."""
    return rounded64(instruction)


@builds("rcp rsqrt", "f64")
def inverse64(instruction: Instruction) -> Operation:
    """1/a in a rounding, and approximations of 1/a and 1/sqrt(a)."""
    if not instruction.has("approx"):
        if instruction.opcode == "rsqrt":
            raise instruction.unsupported()
        return rounded64(instruction)
    if instruction.opcode == "rsqrt" and not instruction.has("ftz"):
        instruction.check(2, (), ("approx",))
        return uniform(_inverse_root, "f64", 1)
    instruction.check(2, (), ("approx",), ("ftz",))
    exact = _inverse_root if instruction.opcode == "rsqrt" else lambda a: np.divide(_F64(1), a)
    return uniform(lambda a: _high_words(exact, a), "f64", 1)


def _high_words(function: Function, a: Any) -> Any:
    """A function of the upper 32 bits of a, of whose result the upper 32 bits are kept; subnormal numbers are zeros."""
    source = _flush64((a.view(_U64) & _HIGH_WORD).view(_F64))
    # A NaN of which only the lower half says so is an infinity when that half is gone.
    result = (_flush64(function(source)).view(_U64) & _HIGH_WORD).view(_F64)
    return choose(np.isnan(result), _NAN_HIGH, result)


def _flush64(value: Any) -> Any:
    return np.multiply(value, np.abs(value) >= _TINY64, dtype=_F64)


@builds("ex2 tanh", "f16 bf16 f16x2 bf16x2")
def half_function(instruction: Instruction) -> Operation:
    """2^a and tanh(a) in half precision; ex2 of bfloat16 is there with .ftz only."""
    name = instruction.type
    flushed = instruction.opcode == "ex2" and name.startswith("bf16")
    instruction.check(2, (), ("approx",), *([("ftz",)] if flushed else []))
    half = half_of(name)
    compute = np.exp2 if instruction.opcode == "ex2" else np.tanh
    flush = finish(name, ftz=flushed) or (lambda code: code)

    def apply(code: Any) -> Any:
        value = compute(half.widen(flush(code)).astype(_F64))
        return flush(encode(value, half.form).astype(np.uint16))

    return uniform(for_type(name, apply), VIEWS[name], 1)
