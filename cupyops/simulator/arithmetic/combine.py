"""Results of atomics from the value in memory and the operand: the same arithmetic as that of the registers."""

import numpy as np

from ..errors import UnsupportedInstruction
from .lanes import choose, spread
from .operation import Function, lookup

_INTEGERS = ("u32", "s32", "u64", "s64")
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_WORDS = ("b32", "b64")
_TYPES = {
    "add": _INTEGERS + _FLOATS,
    "min": _INTEGERS + _FLOATS,
    "max": _INTEGERS + _FLOATS,
    "and": _WORDS,
    "or": _WORDS,
    "xor": _WORDS,
    "inc": ("u32",),
    "dec": ("u32",),
    "exch": (*_WORDS, *_INTEGERS, *_FLOATS),
}


def combine(op: str, type: str, flush: bool = False) -> Function:
    """The function of the old value and the operand that gives the new value, for an atomic such as ("add", "f16x2").

    `flush`: an addition of float32 in global memory, where subnormal operands and results become zeros.
    Values are viewed as the operands of `resolve`'s operations are; integers may come signed or unsigned for "add".
    """
    if type not in _TYPES.get(op, ()):
        raise UnsupportedInstruction(f"the simulator does not know the atomic `{op}.{type}`")
    if op in _OWN:
        return _OWN[op]
    rounding: tuple[str, ...] = ("rn",) if op == "add" and type in _FLOATS else ()
    if flush and op == "add" and type == "f32":
        rounding = ("rn", "ftz")
    operation = lookup(op, (*rounding, type), 3)
    assert operation is not None
    return operation.function


_OWN: dict[str, Function] = {
    "exch": lambda old, value: spread(value, old),
    "inc": lambda old, limit: choose(old >= limit, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, limit: choose((old == 0) | (old > limit), limit, old - np.uint32(1)),
}
