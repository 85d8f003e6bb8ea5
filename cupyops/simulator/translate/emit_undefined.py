"""Writing of what follows undefined values through a block: a flag beside each register that may hold one."""

from __future__ import annotations

from .codegen import TRACKERS, BlockWriter, elements
from .flow import destination_operands, registers
from .ptx import Address, Instruction, Operand, registers_of
from .undefined import is_generic

_STORES = frozenset(("st", "atom", "red"))
# what goes on with an undefined operand, and takes it for a value
_TAKES_ANY = frozenset(("wgmma", "elect", "call"))


def before(w: BlockWriter, instruction: Instruction) -> None:
    """Faults where an instruction makes something of an undefined value, else the flags of what it gives."""
    written, read = registers(instruction)
    if not w.touches_undefined(instruction, written, read):
        return
    _, sources = destination_operands(instruction)
    guard = instruction.guard.register if instruction.guard is not None else None
    if guard is not None and not w.is_computed(instruction) and (flag := w.undefined([guard])):
        w.emit(f"m.check_defined(g, {flag}, {w.pc}, 'guards an instruction by')")
    if what := _use(w, instruction, sources):
        verb, flag = what
        if guard is not None:
            flag = f"({flag}) & {w.guard()}"
        w.emit(f"m.check_defined(g, {flag}, {w.pc}, {verb!r})")
    if instruction.opcode == "shfl":
        return  # whose writer has the flags exchanged with the values
    for name in written:
        _set(w, name, _result(w, instruction, sources, name), guard)


def after(w: BlockWriter, instruction: Instruction) -> None:
    """An undefined value in local memory is as if nothing were there."""
    if instruction.opcode != "st" or not (space := _of_threads(instruction)):
        return
    address, value = instruction.operands
    for number, element in enumerate(getattr(value, "elements", (value,))):
        if flag := w.undefined(registers_of([element])):
            selected = f"({flag}) & {w.guard()}" if w.guard() else flag
            size = w.bytes_of(instruction)
            w.emit(f"m.{space}.forget(g, {w.address(address)}, {number * size}, {size}, {selected})")


def branch(w: BlockWriter, instruction: Instruction) -> None:
    """A way that depends on an undefined value."""
    names = registers_of(instruction.operands)
    if instruction.guard is not None:
        names.append(instruction.guard.register)
    if flag := w.undefined(names):
        w.emit(f"m.check_defined(g, {flag}, {w.pc}, 'branches on')")


def _use(w: BlockWriter, instruction: Instruction, sources: tuple[Operand, ...]) -> tuple[str, str] | None:
    """(verb, flag) of what the instruction makes of a value for good; None: nothing."""
    if w.is_computed(instruction) or instruction.opcode in _TAKES_ANY or instruction.opcode == "shfl":
        return None
    addresses = [operand for operand in sources if isinstance(operand, Address)]
    if flag := w.undefined(registers_of(addresses)):
        return "takes for an address", flag
    if instruction.opcode in ("ld", "ldu") or (instruction.opcode == "st" and "local" in instruction.modifiers):
        return None
    if flag := w.undefined(_parts(w, instruction, sources)):
        if instruction.opcode == "st" and (space := _of_threads(instruction)):
            flag = f"({flag}) & ~m.{space}.is_local(g, {w.address(instruction.operands[0])})"
        return ("stores" if instruction.opcode in _STORES else "computes with"), flag
    return None


def _of_threads(instruction: Instruction) -> str:
    """Name of the machine's space through which an instruction may reach an array of the thread; "" where it cannot."""
    if "local" in instruction.modifiers:
        return "local_space"
    return "generic_space" if is_generic(instruction) else ""


def _result(w: BlockWriter, instruction: Instruction, sources: tuple[Operand, ...], name: str) -> str:
    """Return an expression that tells if a result of an instruction is undefined, the register of this name."""
    if instruction.opcode == "ld" and (space := _of_threads(instruction)):
        names, size = [registers_of([one]) for one in elements(instruction.operands[0])], w.bytes_of(instruction)
        start, whole = (names.index([name]) * size, size) if w.is_computed_with(name) else (0, size * len(names))
        return f"m.{space}.unwritten(g, {w.address(instruction.operands[1])}, {start}, {whole})"
    if not w.is_computed(instruction):
        return "False"
    if instruction.opcode == "selp":
        yes, no, chooses = sources
        ways = [w.undefined(registers_of([one])) or "False" for one in (yes, no)]
        picked = f"np.where({w.read(chooses, 'b1')}, {ways[0]}, {ways[1]})"
        return f"{picked} | {flag}" if (flag := w.undefined(registers_of([chooses]))) else picked
    if instruction.name in ("and.pred", "or.pred"):
        return _short_circuit(w, instruction, sources)
    return w.undefined(_parts(w, instruction, sources)) or "False"


def _parts(w: BlockWriter, instruction: Instruction, sources: tuple[Operand, ...]) -> list[str]:
    """The registers that an instruction uses, without those parts of a vector that no instruction writes.

    NVRTC stores or packs a vector of which it knows some elements, and then stores the others, or takes the known ones out.
    """
    names = registers_of(sources)
    if instruction.opcode == "mov" or (instruction.opcode == "st" and len(names) > 2):
        return [name for name in names if w.is_written(name)] or names
    return names


def _short_circuit(w: BlockWriter, instruction: Instruction, sources: tuple[Operand, ...]) -> str:
    """Return the expression for `a && b`, in which an undefined b makes no difference where a is false."""
    first, second = (w.undefined(registers_of([one])) for one in sources)
    if not first and not second:
        return "False"
    says = "" if instruction.opcode == "and" else "~"
    one, other = (f"({says}{w.read(source, 'b1')})" for source in sources)
    left = f"({first} & ({other} | {second or 'False'}))" if first else "False"
    right = f"({second} & ({one} | {first or 'False'}))" if second else "False"
    return f"{left} | {right}"


def _set(w: BlockWriter, name: str, flag: str, guard: str | None) -> None:
    if not w.may_be_undefined(name):
        return
    if guard is None:
        w.set_undefined(name, flag)
        return
    old, own = w.undefined([name]), w.undefined([guard])
    picked = f"np.where({w.guard()}, {flag}, {old})"
    w.set_undefined(name, f"{picked} | {own}" if own else picked)


TRACKERS.update(before=before, after=after, branch=branch)
