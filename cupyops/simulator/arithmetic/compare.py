"""Comparison and selection: setp, set, selp, slct, testp."""

from typing import Any

import numpy as np

from .finish import TINY32, flush32
from .half import finish, half_of
from .lanes import choose, lanes_of, split
from .operation import VIEWS, Function, Instruction, Operation, before, builds, uniform

_INTEGERS = "u16 u32 u64 s16 s32 s64"
_WORDS = "b16 b32 b64"
_FLOATS = "f16 bf16 f32 f64 f16x2 bf16x2"
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _either_is_nan(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


def _neither_is(function: Function) -> Function:
    return lambda a, b: ~function(a, b)


_EQUALITY: dict[str, Function] = {"eq": np.equal, "ne": np.not_equal}
_ORDER: dict[str, Function] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_FLOATING: dict[str, Function] = {
    **_ORDER,
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": _neither_is(np.greater_equal),
    "leu": _neither_is(np.greater),
    "gtu": _neither_is(np.less_equal),
    "geu": _neither_is(np.less),
    "num": _neither_is(_either_is_nan),
    "nan": _either_is_nan,
}


def _comparisons(name: str) -> dict[str, Function]:
    if name[0] == "b" and not name.startswith("bf"):
        return _EQUALITY
    if name[0] == "s":
        return {**_EQUALITY, **_ORDER}
    if name[0] == "u":
        return {**_EQUALITY, **_ORDER, **_UNSIGNED}
    return _FLOATING


def _comparison(instruction: Instruction) -> Function:
    """The comparison that is written, of operands as their type is viewed; two results for each word of two halves."""
    name, qualifiers = instruction.type, instruction.qualifiers
    compare = _comparisons(name).get(qualifiers[0] if qualifiers else "")
    can_flush = name in ("f16", "f16x2", "f32")
    instruction.check((3, 4), (*qualifiers[:1], *(("ftz",) if can_flush else ()), *_COMBINE))
    combined = len(set(_COMBINE) & set(qualifiers))
    if compare is None or combined != instruction.operands - 3:
        raise instruction.unsupported()
    ftz = instruction.has("ftz")
    if name in ("f32", "f64") or name not in _FLOATS.split():
        return before(flush32 if ftz else None, uniform(compare, "", 2)).function
    half, flush = half_of(name), finish(name, ftz=ftz)
    codes = uniform(lambda *operands: compare(*map(half.widen, operands)), "u16", 2)
    return before(flush, codes).function


def _combination(instruction: Instruction) -> Function | None:
    return next((_COMBINE[name] for name in instruction.qualifiers if name in _COMBINE), None)


@builds("setp", f"{_INTEGERS} {_WORDS} f16 bf16 f32 f64")
def set_predicates(instruction: Instruction) -> Operation:
    """The comparison and its complement, each combined with a predicate where one is given."""
    compare, combine = _comparison(instruction), _combination(instruction)
    view = VIEWS[instruction.type]

    def plain(a: Any, b: Any) -> Any:
        holds = compare(a, b)
        return holds, ~holds

    if combine is None:
        return Operation(plain, (view, view), ("b1", "b1"), first=compare)

    def combined(a: Any, b: Any, predicate: Any) -> Any:
        holds = compare(a, b)
        return combine(holds, predicate), combine(~holds, predicate)

    return Operation(combined, (view, view, "b1"), ("b1", "b1"))


@builds("setp", "f16x2 bf16x2")
def set_predicate_pair(instruction: Instruction) -> Operation:
    """The comparisons of the lower and of the upper halves, each combined with a predicate where one is given."""
    compare, combine = _comparison(instruction), _combination(instruction)

    def pair(a: Any, b: Any, *predicate: Any) -> Any:
        count = lanes_of(a, b)
        holds = compare(split(a, np.uint16, count or 1), split(b, np.uint16, count or 1))
        lower, upper = holds if count is None else np.ascontiguousarray(holds.reshape(-1, 2).T)
        if combine is None:
            return lower, upper
        return combine(lower, *predicate), combine(upper, *predicate)

    return Operation(pair, ("u32", "u32") + ("b1",) * (combine is not None), ("b1", "b1"))


_TRUE: dict[str, Any] = {
    "u16": np.uint16(0xFFFF),
    "u32": np.uint32(0xFFFFFFFF),
    "f32": np.float32(1),
    "f16": np.uint16(0x3C00),
    "bf16": np.uint16(0x3F80),
}


@builds("set")
def set_value(instruction: Instruction) -> Operation:
    """1.0 or all ones where the comparison holds, else 0; of each half where two are compared."""
    if len(instruction.types) != 2:
        raise instruction.unsupported()
    target, source = instruction.types
    if source.endswith("x2"):
        return _set_halves(instruction, target, source)
    known = {*_INTEGERS.split(), *_WORDS.split(), *_FLOATS.split()}
    targets = {"u32", "s32", "f32", "f16", "bf16"} | ({"u16", "s16"} if source in ("f16", "bf16") else set())
    if source not in known or target not in targets:
        raise instruction.unsupported()
    compare, combine = _comparison(instruction), _combination(instruction)
    true = _TRUE[target.replace("s", "u")]

    def value(a: Any, b: Any, *predicate: Any) -> Any:
        holds = compare(a, b)
        return choose(combine(holds, *predicate) if combine else holds, true, type(true)(0))

    view = VIEWS[source]
    return Operation(value, (view, view) + ("b1",) * (combine is not None), (VIEWS[target.replace("s", "u")],))


def _set_halves(instruction: Instruction, target: str, source: str) -> Operation:
    if target not in (source, "u32", "s32"):
        raise instruction.unsupported()
    compare, combine = _comparison(instruction), _combination(instruction)
    true = _TRUE[source.removesuffix("x2")] if target == source else _TRUE["u16"]

    def values(a: Any, b: Any, *predicate: Any) -> Any:
        count = lanes_of(a, b, *predicate)
        holds = compare(split(a, np.uint16, count or 1), split(b, np.uint16, count or 1))
        if combine:
            holds = combine(holds, *[np.repeat(each, 2) if np.ndim(each) else each for each in predicate])
        words = np.where(holds, true, np.uint16(0)).view(np.uint32)
        return words[0] if count is None else words

    return Operation(values, ("u32", "u32") + ("b1",) * (combine is not None), ("u32",))


@builds("selp", f"{_INTEGERS} {_WORDS} f32 f64")
def select_by_predicate(instruction: Instruction) -> Operation:
    """a where the predicate holds, else b."""
    instruction.check(4)
    view = VIEWS[instruction.type]
    return Operation(lambda a, b, predicate: choose(predicate, a, b), (view, view, "b1"), (view,))


@builds("slct")
def select_by_sign(instruction: Instruction) -> Operation:
    """a where c is at least 0 (-0 is, NaN is not), else b."""
    if len(instruction.types) != 2 or instruction.type not in ("s32", "f32"):
        raise instruction.unsupported()
    target, source = instruction.types
    if target not in {*_INTEGERS.split(), *_WORDS.split(), "f32", "f64"}:
        raise instruction.unsupported()
    instruction.check(4, ("ftz",) if source == "f32" else ())
    view = VIEWS[target]
    if instruction.has("ftz"):
        return Operation(lambda a, b, c: choose(flush32(c) >= 0, a, b), (view, view, source), (view,))
    return Operation(lambda a, b, c: choose(c >= 0, a, b), (view, view, source), (view,))


@builds("testp", "f32 f64")
def test(instruction: Instruction) -> Operation:
    """Test if a float is finite, infinite, a number, no number, normal (a zero too, says PTX) or subnormal."""
    tiny = TINY32 if instruction.type == "f32" else np.float64(2.0**-1022)
    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < tiny),
    }
    instruction.check(2, (), tests)
    return Operation(tests[instruction.qualifiers[0]], (instruction.type,), ("b1",))
