"""Writing of moves, loads, stores, atomics, calls of the device runtime, and what has no effect here."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UnsupportedInstruction
from ..memory import LOCAL_BASE, PARAMETER_BASE, SHARED_BASE
from .codegen import DTYPES, STORAGE, BlockWriter, elements, emits, size_of
from .function import Load
from .ptx import Instruction, Operand, Sink, Symbol, Vector

_SPACES = {
    "global": "global_space",
    "const": "global_space",
    "shared": "shared_space",
    "shared::cluster": "cluster_space",
    "local": "local_space",
    "param": "parameter_space",
    "": "generic_space",
}
_BASES = {"global": 0, "const": 0, "shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAMETER_BASE}
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))
_RELEASES = frozenset(("release", "acq_rel"))


def space_of(instruction: Instruction) -> str:
    """The state space that the modifiers name; "" for generic addresses."""
    for modifier in instruction.modifiers:
        name = modifier.split("::")[0]
        if name in _BASES:
            return name
    return ""


def _memory_of(instruction: Instruction) -> str:
    """Name of the machine's space through which an instruction reaches memory."""
    reaches_all = "shared::cluster" in instruction.modifiers
    return _SPACES["shared::cluster" if reaches_all else space_of(instruction)]


def kind_of(type_: str) -> str:
    """Type by which a value of a PTX type is loaded and stored: its signedness matters where it is widened."""
    return type_ if type_ in ("s8", "s16", "s32", "s64") else storage_of(type_)


def storage_of(type_: str) -> str:
    """Type that holds the bits of a value of a PTX type."""
    if type_ not in STORAGE:
        raise UnsupportedInstruction(f"the type .{type_}")
    return STORAGE[type_]


@emits("mov")
def _mov(w: BlockWriter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    kind = storage_of(instruction.modifiers[-1])
    if isinstance(destination, Vector):
        _unpack(w, destination, source, size_of(kind))
    elif isinstance(source, Vector):
        _pack(w, destination, source, size_of(kind))
    else:
        expression, scalar = w.read_scalar(source, kind)
        w.write(destination, expression, kind, scalar=scalar, alias=True)


def _unpack(w: BlockWriter, destination: Vector, source: Operand, size: int) -> None:
    """mov.b32 {lo, hi}, r."""
    whole, part = f"u{8 * size}", f"u{8 * (size // len(destination.elements))}"
    expression, scalar = w.read_scalar(source, whole)
    name = w.temporary()
    w.emit(f"{name} = {expression}")
    for number, element in enumerate(destination.elements):
        shift = number * 8 * size_of(part)
        piece = f"({name} >> {w.constant(shift, whole)})" if shift else name
        w.write(element, f"{piece}.astype({part})", part, scalar=scalar)


def _pack(w: BlockWriter, destination: Operand, source: Vector, size: int) -> None:
    """mov.b32 r, {lo, hi}."""
    whole, part = f"u{8 * size}", f"u{8 * (size // len(source.elements))}"
    pieces = [w.read_scalar(element, part) for element in source.elements]
    shifted = [
        f"({expression}.astype({whole}) << {w.constant(number * 8 * size_of(part), whole)})"
        if number
        else f"{expression}.astype({whole})"
        for number, (expression, _) in enumerate(pieces)
    ]
    scalar = all(is_scalar for _, is_scalar in pieces)
    w.write(destination, f"({' | '.join(shifted)})", whole, scalar=scalar)


@emits("cvta")
def _cvta(w: BlockWriter, instruction: Instruction) -> None:
    """Between a space's own addresses and generic ones."""
    kind = STORAGE[instruction.modifiers[-1]]
    expression, scalar = w.read_scalar(instruction.operands[1], kind)
    base = _BASES[space_of(instruction)]
    if base:
        sign = "-" if "to" in instruction.modifiers else "+"
        expression = f"({expression} {sign} {w.constant(base, kind)})"
    w.write(instruction.operands[0], expression, kind, scalar=scalar, alias=not base)


@emits("isspacep")
def _isspacep(w: BlockWriter, instruction: Instruction) -> None:
    expression, scalar = w.read_scalar(instruction.operands[1], "u64")
    number = {"global": 0, "const": 0, "shared": 1, "local": 2, "param": 3}[instruction.modifiers[0].split("::")[0]]
    result = f"(({expression} >> {w.constant(60, 'u64')}) == {w.constant(number, 'u64')})"
    w.write(instruction.operands[0], result, "b1", scalar=scalar)


@emits("ld", "ldu")
def _ld(w: BlockWriter, instruction: Instruction) -> None:
    kind = kind_of(instruction.modifiers[-1])
    destinations = list(elements(instruction.operands[0]))
    source = instruction.operands[1]
    space = space_of(instruction)
    address, same_for_all = w.address_scalar(source)
    if space == "param" and same_for_all:
        for number, destination in enumerate(destinations):
            value = f"m.parameter(int({address}) + {number * size_of(kind)}, {kind}, {size_of(kind)})"
            w.write(destination, value, kind, scalar=True)
        return
    strong = bool(_STRONG & set(instruction.modifiers)) or w.is_compared(source)
    memory = _memory_of(instruction)
    what = w.bind(Load, DTYPES[kind], size_of(kind), len(destinations), w.pc, strong, "nc" in instruction.modifiers)
    w.masked(destinations, kind, lambda g, pick: f"m.{memory}.load({g}, {pick(address)}, {what})")


@emits("st")
def _st(w: BlockWriter, instruction: Instruction) -> None:
    kind = storage_of(instruction.modifiers[-1])
    address = w.address(instruction.operands[0])
    values = w.read_all(instruction.operands[1], kind)
    space, memory = space_of(instruction), _memory_of(instruction)
    if space == "const" or space == "param":
        raise UnsupportedInstruction(f"a store to .{space} memory")
    strong = bool(_STRONG & set(instruction.modifiers))
    if _RELEASES & set(instruction.modifiers):
        w.emit(f"m.fence(g, {w.pc}, releases=True)")
    barrier = w.address(instruction.operands[2]) if instruction.modifiers[0] == "async" else None

    def call(g: str, pick: Callable[[str], str]) -> str:
        picked = "".join(f"{pick(value)}, " for value in values)
        if barrier is not None:
            return f"m.bulk.send({g}, {pick(address)}, ({picked}), {kind}, {pick(barrier)}, {w.pc})"
        return f"m.{memory}.store({g}, {pick(address)}, ({picked}), {kind}, {size_of(kind)}, {w.pc}, {strong})"

    w.masked([], kind, call)


_ATOMIC = frozenset(("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"))


@emits("atom", "red")
def _atom(w: BlockWriter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    operation = next((m for m in modifiers if m in _ATOMIC), None)
    space = space_of(instruction)
    vector = any(m in ("v2", "v4", "v8") for m in modifiers)
    if operation is None or space == "local" or modifiers[-1] == "b128":
        raise UnsupportedInstruction(f"the instruction {instruction.name} is not covered")
    if "async" in modifiers:
        _red_async(w, instruction, operation)
        return
    operands = instruction.operands if instruction.opcode == "atom" else (Sink(), *instruction.operands)
    where = "cluster" if "shared::cluster" in modifiers else space
    type_ = modifiers[-1]
    kind = kind_of(type_)
    parts = elements(operands[2]) if vector else operands[2:]
    values = [w.read(operand, kind) for operand in parts]
    address = w.address(operands[1])
    wanted = any(w.wanted(element) for element in elements(operands[0]))
    if _RELEASES & set(modifiers):
        w.emit(f"m.fence(g, {w.pc}, releases=True)")

    def call(g: str, pick: Callable[[str], str]) -> str:
        picked = "".join(f"{pick(value)}, " for value in values)
        of, method = f"{where!r}, {operation!r}, {type_!r}", "update_side_by_side" if vector else "update"
        return f"m.atomics.{method}({g}, {of}, {pick(address)}, ({picked}), {kind}, {wanted}, {w.pc})"

    destinations = list(elements(operands[0])) if vector and instruction.opcode == "atom" else [operands[0]]
    w.masked(destinations if wanted else [], kind, call)


def _red_async(w: BlockWriter, instruction: Instruction, operation: str) -> None:
    """red.async [address], value, [mbarrier]: to the shared memory of a block of the cluster."""
    kind = kind_of(instruction.modifiers[-1])
    address, barrier = w.address(instruction.operands[0]), w.address(instruction.operands[2])
    value = w.read(instruction.operands[1], kind)
    reduction = f"({operation!r}, {instruction.modifiers[-1]!r})"

    def call(g: str, pick: Callable[[str], str]) -> str:
        return f"m.bulk.send({g}, {pick(address)}, ({pick(value)},), {kind}, {pick(barrier)}, {w.pc}, {reduction})"

    w.masked([], kind, call)


@emits("membar", "fence")
def _fence(w: BlockWriter, instruction: Instruction) -> None:
    wide = {"gl", "sys", "gpu", "cluster"} & set(instruction.modifiers)  # fence.mbarrier_init.release.cluster is one
    if wide or "cta" in instruction.modifiers:
        w.emit(f"m.fence(g, {w.pc}, {not wide})")
    if {"proxy", "async"} <= set(instruction.modifiers) and "global" not in instruction.modifiers:
        w.emit(f"m.fence_proxy(g, {w.pc})")


@emits("trap", "brkpt")
def _trap(w: BlockWriter, instruction: Instruction) -> None:
    w.emit(f"m.runtime.trap(g, {w.pc})")


@emits("call")
def _call(w: BlockWriter, instruction: Instruction) -> None:
    """A function of the device runtime; arguments and result lie in local memory."""
    name = instruction.modifiers[0]
    known = {"$no_function": 0, "vprintf": 3, "__assertfail": 5, "malloc": 2, "free": 1}
    if name not in known or len(instruction.operands) != known[name]:
        raise UnsupportedInstruction(f"a call of {name}, which the PTX does not define")
    places = []
    for operand in instruction.operands:
        assert isinstance(operand, Symbol)
        places.append(str(w.layout.address(operand.name)))
    w.emit(f"m.runtime.{name.strip('_$')}({', '.join(['g', *places, str(w.pc)])})")


@emits("prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "griddepcontrol", "pmevent")
def _nothing(w: BlockWriter, instruction: Instruction) -> None:
    """Write nothing: the instruction changes only when things happen."""


@emits("createpolicy")
def _createpolicy(w: BlockWriter, instruction: Instruction) -> None:
    w.write(instruction.operands[0], w.constant(0, "u64"), "u64", scalar=True)


@emits("mapa")
def _mapa(w: BlockWriter, instruction: Instruction) -> None:
    """The address of the same variable in another block of the cluster."""
    destination, source, rank = instruction.operands
    kind = STORAGE[instruction.modifiers[-1]]
    result = f"m.map_to_rank({w.read(source, kind)}, {w.read(rank, 'u32')}, {kind})"
    w.write(destination, result, kind)


@emits("getctarank")
def _getctarank(w: BlockWriter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    w.write(destination, f"m.rank_of(g, {w.read(source, STORAGE[instruction.modifiers[-1]])})", "u32")
