"""An instruction's arithmetic: what it takes, what it gives, and the table in which each is found by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UnsupportedInstruction

Function = Callable[..., Any]

# NumPy types as which operands of PTX types are viewed. Half-width floats travel as their bits: NumPy computes with float16
# slowly and has no bfloat16, so the functions widen them themselves.
VIEWS = {
    "pred": "b1",
    **{f"{sign}{width}": f"{sign}{width}" for sign in "us" for width in (8, 16, 32, 64)},
    **{f"b{width}": f"u{width}" for width in (8, 16, 32, 64)},
    "f16": "u16",
    "bf16": "u16",
    "f32": "f32",
    "f64": "f64",
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2"), "u32"),
    "tf32": "u32",
    "e4m3x2": "u16",
    "e5m2x2": "u16",
    "f32x2": "u64",
}

DTYPES: dict[str, np.dtype] = {
    "b1": np.dtype(bool),
    **{f"u{width}": np.dtype(f"uint{width}") for width in (8, 16, 32, 64)},
    **{f"s{width}": np.dtype(f"int{width}") for width in (8, 16, 32, 64)},
    **{f"f{width}": np.dtype(f"float{width}") for width in (16, 32, 64)},
}

ROUNDINGS = ("rn", "rz", "rm", "rp")
ANY_TYPE = ""


@dataclass(frozen=True)
class Operation:
    """Computation of an instruction: a function of NumPy arrays or scalars.

    The function never writes to its arguments; it returns a scalar when all of them are scalars, else an array. An
    argument may be returned as it is.
    """

    function: Function  # positional arguments as in `takes`; returns one value, or a tuple as long as `gives`
    takes: tuple[str, ...]  # how each source operand is viewed, as in VIEWS
    gives: tuple[str, ...]  # likewise for the destinations
    carry_in: bool = False  # the function's last argument is the carry flag
    carry_out: bool = False  # the function's last returned value is the carry flag
    seeded: bool = False  # the function's first argument is a seed, by which errors are drawn
    first: Function | None = None  # gives the first value alone, where that is less work


@dataclass(frozen=True)
class Instruction:
    """An opcode with its modifiers and its number of operands, destination included."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: int

    def __str__(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    @property
    def types(self) -> tuple[str, ...]:
        """The types at the end of the modifiers: ("f32",) of `add.rn.f32`, ("u32", "f16x2") of `set.lt.u32.f16x2`."""
        count = 0
        while count < len(self.modifiers) and self.modifiers[-1 - count] in VIEWS:
            count += 1
        return self.modifiers[len(self.modifiers) - count :]

    @property
    def qualifiers(self) -> tuple[str, ...]:
        """The modifiers before the types."""
        return self.modifiers[: len(self.modifiers) - len(self.types)]

    @property
    def type(self) -> str:
        return self.types[-1] if self.types else ANY_TYPE

    @property
    def rounding(self) -> str:
        """The rounding of the result: to nearest where none is written."""
        return next((name for name in self.qualifiers if name in ROUNDINGS), "rn")

    def has(self, qualifier: str) -> bool:
        return qualifier in self.qualifiers

    def check(self, operands: int | Iterable[int], allowed: Iterable[str] = (), *needed: Iterable[str]) -> None:
        """Refuse what is not understood: a qualifier outside `allowed`, none or two of one group of `needed`.

        The groups of `needed` are alternatives of which exactly one is written; they are allowed thereby.
        """
        counts = (operands,) if isinstance(operands, int) else tuple(operands)
        groups = [set(group) for group in needed]
        known = set(allowed).union(*groups)
        written = self.qualifiers
        understood = (
            self.operands in counts
            and set(written) <= known
            and len(set(written)) == len(written)
            and all(len(group & set(written)) == 1 for group in groups)
            and len(set(ROUNDINGS) & set(written)) <= 1
        )
        if not understood:
            raise self.unsupported()

    def unsupported(self) -> UnsupportedInstruction:
        return UnsupportedInstruction(f"the simulator does not know `{self}` with {self.operands} operands")


Builder = Callable[[Instruction], Operation]
_BUILDERS: dict[tuple[str, str], Builder] = {}
_OPCODES: set[str] = set()


def builds(opcodes: str, types: str = ANY_TYPE) -> Callable[[Builder], Builder]:
    """Register what builds these opcodes for these types (names separated by spaces; no types: whatever the types).

    An instruction of two types is found under both, joined by a point: "f32.f16".
    """

    def register(builder: Builder) -> Builder:
        for opcode in opcodes.split():
            _OPCODES.add(opcode)
            for name in types.split() or [ANY_TYPE]:
                _BUILDERS[opcode, name] = builder
        return builder

    return register


def lookup(opcode: str, modifiers: tuple[str, ...], operands: int) -> Operation | None:
    """The operation of an instruction, or None for an opcode that nobody registered."""
    if opcode not in _OPCODES:
        return None
    instruction = Instruction(opcode, modifiers, operands)
    builder = _BUILDERS.get((opcode, ".".join(instruction.types))) or _BUILDERS.get((opcode, ANY_TYPE))
    if builder is None:
        raise instruction.unsupported()
    return builder(instruction)


def uniform(function: Function, view: str, arity: int) -> Operation:
    """An operation whose operands and result are all viewed alike."""
    return Operation(function, (view,) * arity, (view,))


def after(operation: Operation, step: Function | None) -> Operation:
    """The operation, then `step` on its result."""
    if step is None:
        return operation
    compute = operation.function
    return replace(operation, function=lambda *arguments: step(compute(*arguments)))


def before(step: Function | None, operation: Operation) -> Operation:
    """The operation, with `step` on each of its operands first."""
    if step is None:
        return operation
    compute = operation.function
    return replace(operation, function=lambda *arguments: compute(*map(step, arguments)))
