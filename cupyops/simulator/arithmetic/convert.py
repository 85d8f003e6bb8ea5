"""cvt between numbers of one register: integers, floats, and one into the other.

A float becomes an integer by a rounding (rni, rzi, rmi, rpi) and is clamped to what the integer type holds. NaN becomes
0, except that with float64 or a 64-bit integer it becomes the integer of which only the highest bit is set.
"""

from typing import Any

import numpy as np

from .convert_packed import alternative
from .exact import narrow, to_odd, toward, two_sum
from .finish import canonical, chain, flush32, relu32, saturate
from .formats import encode
from .half import HALVES
from .lanes import choose
from .operation import DTYPES, ROUNDINGS, VIEWS, Function, Instruction, Operation, builds

_F32, _F64, _U64 = np.float32, np.float64, np.uint64
_INTEGERS = {f"{sign}{width}" for sign in "us" for width in (8, 16, 32, 64)}
_FLOATS = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}  # bits of the significand
_TO_INTEGER: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@builds("cvt")
def convert(instruction: Instruction) -> Operation:
    """A conversion, by the kinds of its two types."""
    if len(instruction.types) == 2 and instruction.qualifiers[:1] != ("pack",):
        target, source = instruction.types
        if target in _INTEGERS and source in _INTEGERS:
            return _integer_to_integer(instruction, target, source)
        if target in _INTEGERS and source in _FLOATS:
            return _float_to_integer(instruction, target, source)
        if target in _FLOATS and source in _INTEGERS:
            return _integer_to_float(instruction, target, source)
        if target in _FLOATS and source in _FLOATS and instruction.operands == 2:
            return _float_to_float(instruction, target, source)
    return alternative(instruction)


def _integer_to_integer(instruction: Instruction, target: str, source: str) -> Operation:
    instruction.check(2, ("sat",))
    dtype = DTYPES[target]
    if target == source:
        return Operation(lambda a: a, (source,), (target,))
    if not instruction.has("sat"):
        return Operation(lambda a: a.astype(dtype), (source,), (target,))
    wanted, given = np.iinfo(dtype), np.iinfo(DTYPES[source])
    kind = DTYPES[source].type
    least, most = kind(max(wanted.min, given.min)), kind(min(wanted.max, given.max))
    return Operation(lambda a: np.minimum(np.maximum(a, least), most).astype(dtype), (source,), (target,))


def _float_to_integer(instruction: Instruction, target: str, source: str) -> Operation:
    instruction.check(2, ("ftz", "sat") if source == "f32" else ("sat",), _TO_INTEGER)
    to_whole = next(_TO_INTEGER[name] for name in instruction.qualifiers if name in _TO_INTEGER)
    dtype = DTYPES[target]
    keeps_nan = source == "f64" or dtype.itemsize == 8
    of_nan = _U64(1 << dtype.itemsize * 8 - 1 if keeps_nan else 0)
    clamp = clamp_to(dtype, of_nan)
    read = _chain_of(instruction, source)
    return Operation(lambda a: clamp(to_whole(read(a))), (VIEWS[source],), (target,))


def _chain_of(instruction: Instruction, source: str) -> Function:
    """Return the function that reads a source: to float32 or float64, flushed where .ftz says so."""
    widen = HALVES[source].widen if source in HALVES else None
    return chain(widen, flush32 if instruction.has("ftz") and source == "f32" else None) or (lambda a: a)


def clamp_to(dtype: np.dtype, of_nan: np.uint64) -> Function:
    """Whole numbers, in float32 or float64, as integers; NaN as the bits given."""
    limits = np.iinfo(dtype)
    nan = of_nan.astype(f"u{dtype.itemsize}").view(dtype)

    def clamp(whole: Any) -> Any:
        # The limit above is exact as the power of two that is one more.
        low, high = whole.dtype.type(limits.min), whole.dtype.type(2.0 ** (limits.bits - (limits.min < 0)))
        inside = (whole >= low) & (whole < high)
        result = choose(inside, whole, whole.dtype.type(0)).astype(dtype)
        if inside.all():
            return result
        result = choose(whole < low, dtype.type(limits.min), result)
        result = choose(whole >= high, dtype.type(limits.max), result)
        return choose(np.isnan(whole), nan, result)

    return clamp


def _integer_to_float(instruction: Instruction, target: str, source: str) -> Operation:
    instruction.check(2, ("sat", "ftz") if target == "f32" else ("sat",), ROUNDINGS)
    rounding = instruction.rounding
    bits = np.iinfo(DTYPES[source]).bits - (source[0] == "s")
    exact_in_double = bits <= 53

    def to_double(a: Any) -> Any:
        if exact_in_double:
            return a.astype(_F64)
        # The upper part is a multiple of 2^32 of at most 32 bits, the lower one has 32: both are exact.
        upper = (a >> a.dtype.type(32)).astype(_F64) * _F64(2.0**32)
        return upper, (a & a.dtype.type(0xFFFFFFFF)).astype(_F64)

    def value(a: Any) -> Any:
        parts = to_double(a)
        if target == "f64":
            if exact_in_double:
                return parts
            total, error = two_sum(*parts)
            return toward(total, error, rounding)
        return store(parts if exact_in_double else to_odd(*two_sum(*parts)), target, rounding)

    if target in ("f32", "f64") and rounding == "rn":
        dtype = DTYPES[target]
        compute: Function = lambda a: a.astype(dtype)  # noqa: E731
    else:
        compute = value
    return Operation(_finished(instruction, target, compute), (source,), (VIEWS[target],))


def store(value: Any, target: str, rounding: str) -> Any:
    """A float64, exact or rounded to odd, in a narrower type."""
    if target == "f64":
        return value
    if target == "f32":
        return narrow(value, rounding)
    return encode(value, HALVES[target].form, rounding).astype(np.uint16)


def _finished(instruction: Instruction, target: str, compute: Function) -> Function:
    """A conversion with what .ftz, .sat and .relu ask of its result."""
    steps = [
        flush32 if instruction.has("ftz") and target == "f32" else None,
        saturate if instruction.has("sat") else None,
        relu32 if instruction.has("relu") else None,
    ]
    if target in HALVES:
        steps = [HALVES[target].lift(step) if step else None for step in steps]
    elif target == "f32" and not instruction.has("sat"):
        steps.append(canonical)
    last = chain(*steps)
    return compute if last is None else lambda a: last(compute(a))


def _float_to_float(instruction: Instruction, target: str, source: str) -> Operation:
    to_whole = next((_TO_INTEGER[name] for name in instruction.qualifiers if name in _TO_INTEGER), None)
    narrows = _FLOATS[target] < _FLOATS[source] or {target, source} == {"f16", "bf16"}
    flushes = ("ftz",) if "f32" in (target, source) else ()
    if target in HALVES and source == "f32" and (instruction.has("relu") or instruction.has("satfinite")):
        return alternative(instruction)
    if to_whole:
        instruction.check(2, (*flushes, "sat"), _TO_INTEGER)
        if target != source:
            raise instruction.unsupported()
    elif narrows:
        instruction.check(2, (*flushes, "sat"), ROUNDINGS)
    else:
        instruction.check(2, (*flushes, "sat", *ROUNDINGS))
    compute = _compute(instruction, target, source, to_whole)
    return Operation(_finished(instruction, target, compute), (VIEWS[source],), (VIEWS[target],))


def _compute(instruction: Instruction, target: str, source: str, to_whole: Function | None) -> Function:
    """The value read, made whole where that is asked, and stored."""
    rounding = instruction.rounding
    read = _chain_of(instruction, source)
    if target == source and not to_whole:
        return read if source in ("f32", "f64") else lambda a: a
    if target in HALVES and source != "f64" and rounding == "rn":
        put: Function = HALVES[target].narrow
    elif target == "f32" and source in HALVES:
        put = lambda value: value  # noqa: E731
    elif target == source:
        put = lambda value: value  # noqa: E731
    else:
        put = lambda value: store(value.astype(_F64), target, rounding)  # noqa: E731
    return lambda a: put(to_whole(read(a)) if to_whole else read(a))
