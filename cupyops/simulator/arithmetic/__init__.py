"""The arithmetic of PTX in NumPy: `resolve` finds an instruction's operation, `combine` that of an atomic.

Integers are exact. So is every float result that PTX defines by a rounding: float16, bfloat16, float32 and float64,
subnormal numbers and overflow included. What PTX leaves to an approximation is computed in float64 and rounded once.
A result that is NaN is the hardware's (0x7fffffff, 0x7fff) except in float64, where payloads pass as the host has it.
Functions are to be called under `np.errstate(all="ignore")`.
"""

from . import bits, compare, convert, extreme, floating, integer, logic, quotient
from .combine import combine
from .operation import Instruction as _Instruction
from .operation import Operation
from .operation import lookup as _lookup
from .worst import worst as _worst

__all__ = ["Operation", "combine", "resolve"]

# Each registers what it builds.
_MODULES = (bits, compare, convert, extreme, floating, integer, logic, quotient)


def resolve(opcode: str, modifiers: tuple[str, ...], operands: int, worst: bool = False) -> Operation | None:
    """The operation of e.g. ("fma", ("rn", "f32"), 4): the modifiers as written, the operands with the destination.

    None for an opcode that is not arithmetic; UnsupportedInstruction for one that is, in a form not covered. A setp
    gives two values, for `p|q`, whether or not q is written. `worst`: approximations have the error that PTX allows.
    """
    operation = _lookup(opcode, modifiers, operands)
    if operation is None or not worst:
        return operation
    return _worst(_Instruction(opcode, modifiers, operands), operation) or operation
