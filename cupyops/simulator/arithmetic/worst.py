"""Approximate instructions as inexact as the PTX manual lets them be.

The error has the size of the documented bound. Its sign is drawn by the upper bits of the operands, so one operand always
gives one result, and near operands err alike, as those of one entry of a table do: sums do not average the errors away.
Results that the manual tabulates (of zeros, infinities and NaN) stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .finish import flush32
from .formats import BF16, F16, Format, encode, widen_bf16, widen_f16
from .lanes import choose, packed
from .operation import Function, Instruction, Operation

_F32 = Format(precision=24, minimum=-126, maximum=127, largest=0, nan=0, width=32)
_F64 = Format(precision=53, minimum=-1022, maximum=1023, largest=0, nan=0, width=64)
_HIGH_WORD = replace(_F64, precision=21)  # of which rcp and rsqrt.approx.ftz.f64 give a result
_KEPT_BITS = 5  # of an operand's fraction: those that agree in them err in one direction

# An absolute error bound: of the (first) operand, the exact result and an ulp of that, all in float64.
Bound = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class _Limit:
    """A documented bound, and the values that the function cannot leave."""

    bound: Bound
    least: float = -np.inf
    most: float = np.inf
    keeps_sign: bool = True


def _ulps(count: float) -> Bound:
    return lambda a, exact, ulp: count * ulp


def _relative(error: float) -> Bound:
    return lambda a, exact, ulp: error * np.abs(exact)


def _absolute(error: float) -> Bound:
    return lambda a, exact, ulp: error


def _circular(a: Any, exact: Any, ulp: Any) -> Any:
    """sin and cos: beyond 100 pi the manual promises nothing."""
    magnitude = np.abs(a)
    return choose(magnitude <= 2 * np.pi, 2.0**-20.5, choose(magnitude <= 100 * np.pi, 2.0**-14.7, 2.0))


# (PTX ISA 8.x, floating-point instructions.) Of the float64 forms it has no figure: theirs are what an H200 was measured to
# do, a unit of the high word, or of the last place.
_LIMITS: dict[tuple[str, str], _Limit] = {
    ("rcp", "f32"): _Limit(_ulps(1)),
    ("div", "f32"): _Limit(_ulps(2)),
    ("sqrt", "f32"): _Limit(_relative(2.0**-23)),
    ("rsqrt", "f32"): _Limit(_relative(2.0**-22.9)),
    ("ex2", "f32"): _Limit(_ulps(2)),
    ("lg2", "f32"): _Limit(
        lambda a, exact, ulp: choose((a > 0.5) & (a < 2), 2.0**-22, np.abs(exact) * 2.0**-22), keeps_sign=False
    ),
    ("sin", "f32"): _Limit(_circular, -1.0, 1.0, keeps_sign=False),
    ("cos", "f32"): _Limit(_circular, -1.0, 1.0, keeps_sign=False),
    ("tanh", "f32"): _Limit(_relative(2.0**-11), -1.0, 1.0),
    ("ex2", "f16"): _Limit(_relative(2.0**-9.9)),
    ("ex2", "bf16"): _Limit(_relative(2.0**-7)),
    ("tanh", "f16"): _Limit(_absolute(2.0**-10.987), -1.0, 1.0),
    ("tanh", "bf16"): _Limit(_absolute(2.0**-8), -1.0, 1.0),
    ("rcp", "f64"): _Limit(_ulps(1)),
    ("rsqrt", "f64"): _Limit(_ulps(1)),
}


# by type: the format, to float64, and back
_TYPES: dict[str, tuple[Format, Function, Function]] = {
    "f32": (_F32, lambda value: value.astype(np.float64), lambda value: value.astype(np.float32)),
    "f64": (_F64, lambda value: value, lambda value: value),
    "f16": (F16, lambda code: widen_f16(code).astype(np.float64), lambda value: encode(value, F16).astype(np.uint16)),
    "bf16": (
        BF16,
        lambda code: widen_bf16(code).astype(np.float64),
        lambda value: encode(value, BF16).astype(np.uint16),
    ),
}

_EXACT: dict[str, Function] = {
    "rcp": lambda a: 1 / a,
    "div": np.divide,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def worst(instruction: Instruction, operation: Operation) -> Operation | None:
    """The operation with the documented error: its function takes the seed first. None if it is no approximation."""
    if not instruction.has("approx") and not instruction.has("full"):
        return None
    name, compute = instruction.type.removesuffix("x2"), operation.function
    limit, (form, widen, narrow) = _LIMITS[instruction.opcode, name], _TYPES[name]
    if name == "f64" and instruction.has("ftz"):
        form = _HIGH_WORD
    flush: Function = flush32 if name == "f32" and instruction.has("ftz") else lambda value: value
    is_logarithm = instruction.opcode == "lg2"
    salt = int.from_bytes(instruction.opcode.encode(), "little")

    def inexact(seed: int, result: Any, *operands: Any) -> Any:
        given = [widen(flush(operand)) for operand in operands]
        exact = result if name == "f64" else _EXACT[instruction.opcode](*given)
        found = flush(narrow(_moved(exact, given[0], _signs(operands, seed ^ salt, form), limit, form)))
        rounded = widen(result)
        is_tabulated = ~np.isfinite(rounded) | (rounded == 0) | ~np.isfinite(given[0]) | (given[0] == 0)
        if is_logarithm:
            is_tabulated &= given[0] != 1  # whose logarithm is zero, but not said to be exact
        return choose(is_tabulated, result, found)

    def apply(seed: int, *operands: Any) -> Any:
        results = compute(*operands)
        if instruction.type.endswith("x2"):
            return packed(lambda *parts: inexact(seed, *parts), np.uint16, np.uint32)(results, *operands)
        return inexact(seed, results, *operands)

    return replace(operation, function=apply, seeded=True)


def _signs(operands: tuple[Any, ...], seed: int, form: Format) -> Any:
    """True where the error is positive."""
    key = np.uint64(seed & (2**64 - 1))
    for operand in operands:
        bits = operand.view(f"u{operand.itemsize}").astype(np.uint64)
        key = _hash(key ^ (bits >> np.uint64(form.precision - 1 - _KEPT_BITS)))
    return (key & np.uint64(1)) != 0


def _moved(exact: Any, a: Any, upward: Any, limit: _Limit, form: Format) -> Any:
    """The number of the format that is farthest from the exact result, and not farther than the bound."""
    bound = limit.bound(a, exact, _ulp(exact, form))
    goal = exact + choose(upward, bound, -bound)
    ulp = _ulp(goal, form)
    moved = choose(upward, np.floor(goal / ulp), np.ceil(goal / ulp)) * ulp
    if limit.keeps_sign:
        moved = choose(exact > 0, np.maximum(moved, 0.0), np.minimum(moved, -0.0))
    largest = np.ldexp(2.0 - np.ldexp(1.0, 1 - form.precision), form.maximum)
    return np.clip(moved, max(limit.least, -largest), min(limit.most, largest))


def _ulp(value: Any, form: Format) -> Any:
    exponent = np.frexp(value)[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, form.minimum) - (form.precision - 1))


def _hash(key: Any) -> Any:
    """64 bits, each of which depends on all those of the key."""
    key = (key ^ (key >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    key = (key ^ (key >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return key ^ (key >> np.uint64(33))
