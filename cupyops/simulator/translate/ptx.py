"""Contents of a PTX text, a `Module`: variables, functions, and instructions with structured operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip


# --- operands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A register of the function."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A read-only register of the hardware, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer, or the bits of a float of 32 or 64 bits."""

    kind: str  # "int", "f32" or "f64"
    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or a parameter, or the name of a function or label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], with further operands inside the brackets where an instruction has them (tensor coordinates)."""

    base: Operand
    offset: int = 0
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, c}, or the (a, b) of a call."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """p|q: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """!p, as a source."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """_ : a destination nobody wants."""


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair | Negated | Sink


def registers_of(operands: Iterable[Operand]) -> list[str]:
    """`registers_in` of several operands, most of which are registers."""
    names: list[str] = []
    for operand in operands:
        if isinstance(operand, Register):
            names.append(operand.name)
        else:
            names.extend(registers_in(operand))
    return names


def registers_in(operand: Operand) -> Iterator[str]:
    """The names of all registers that an operand reads or writes."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Address):
        yield from registers_in(operand.base)
        for inner in operand.more:
            yield from registers_in(inner)
    elif isinstance(operand, Vector):
        for inner in operand.elements:
            yield from registers_in(inner)
    elif isinstance(operand, Pair):
        yield from registers_in(operand.first)
        yield from registers_in(operand.second)
    elif isinstance(operand, Negated):
        yield from registers_in(operand.operand)


# --- what a module holds -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the .cu file, and where the function it belongs to was inlined."""

    file: int
    line: int
    inlined_at: Place | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """@p or @!p."""

    register: str
    negated: bool


@dataclass(slots=True)
class Instruction:
    """One instruction; `line` counts the PTX text from 1."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None = None
    line: int = 0
    place: Place | None = None
    text: str = ""
    registers: tuple[list[str], list[str]] | None = None  # (written, read), found by `flow.registers` when it is final

    @property
    def name(self) -> str:
        """Full name of the instruction: `ld.global.nc.f32`."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(slots=True)
class Label:
    """A place to branch to."""

    name: str


@dataclass(slots=True)
class Variable:
    """A variable of a state space; `size` in bytes, 0 for `extern __shared__` memory."""

    space: str
    name: str
    type: str
    align: int
    size: int
    initial: tuple[str, ...] = ()


@dataclass(slots=True)
class Function:
    """A kernel (`entry`) or a device function."""

    name: str
    entry: bool
    parameters: list[Variable]
    results: list[Variable]
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction | Label] = field(default_factory=list)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of brx.idx
    max_threads: int | None = None
    min_blocks: int = 1  # of a multiprocessor, for which registers must be enough
    registers_each: int | None = None  # of a thread at launch
    required_block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] = (1, 1, 1)
    defined: bool = False


@dataclass(slots=True)
class Module:
    """One PTX text."""

    target: str = ""
    files: dict[int, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
