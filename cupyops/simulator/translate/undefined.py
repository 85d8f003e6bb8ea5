"""Registers whose value nothing may have written: where that can come from, and which others it reaches.

A register that some path reads before it writes it, a load of local memory that was never written, and a shuffle from a lane
outside of the mask give such values. Code may copy and compute with them as long as nothing comes of it: a fault is a store,
an address or a branch that depends on one.
"""

from __future__ import annotations

from collections.abc import Callable

from .flow import Block, member_mask, registers
from .ptx import Address, Immediate, Instruction, Register, Symbol

_FULL = 0xFFFFFFFF
_SPACES = frozenset(("global", "shared", "local", "param", "const"))


def find(blocks: list[Block], early: set[str], is_computed: Callable[[Instruction], bool]) -> frozenset[str]:
    """The registers that may hold one, from those that are read `early`; without regard to order.

    `is_computed`: the result is one if an operand is.
    """
    found, full = set(early), _full_masks(blocks)
    every = (instruction for block in blocks for instruction in block.instructions)
    # an array of the thread gets a generic address
    generic = any(one.opcode == "cvta" and "local" in one.modifiers and "to" not in one.modifiers for one in every)
    gives: dict[str, list[list[str]]] = {}  # what is computed from each register, or passed on by each variable
    variables: set[str] = set()
    for block in blocks:
        for instruction in block.instructions:
            written, read = registers(instruction)
            if _begins(instruction, full) or (generic and instruction.opcode == "ld" and is_generic(instruction)):
                found.update(written)
            elif variable := _passes(instruction):
                variables.add(variable)
                for name in [variable] if instruction.opcode == "ld" else read:
                    gives.setdefault(name, []).append(written or [variable])
            elif written and (instruction.opcode == "shfl" or is_computed(instruction)):
                for name in read:
                    gives.setdefault(name, []).append(written)
    waiting = list(found)
    while waiting:
        for written in gives.pop(waiting.pop(), ()):
            waiting += [name for name in written if name not in found]
            found.update(written)
    return frozenset(found - variables)


def _passes(instruction: Instruction) -> str:
    """The variable in local memory by which a call passes a value: what is read of it is as what was stored; "" for none."""
    if instruction.opcode not in ("ld", "st") or "local" not in instruction.modifiers:
        return ""
    address = instruction.operands[1 if instruction.opcode == "ld" else 0]
    return address.base.name if isinstance(address, Address) and isinstance(address.base, Symbol) else ""


def is_generic(instruction: Instruction) -> bool:
    """Return True for an access by an address of any space, which may be that of an array of the thread."""
    return not _SPACES.intersection(one.split("::")[0] for one in instruction.modifiers)


def _begins(instruction: Instruction, full: set[str]) -> bool:
    """Return True if the result may be undefined whatever the operands are. `full`: registers with the mask of all lanes."""
    if instruction.opcode != "shfl":
        return instruction.opcode == "ld" and "local" in instruction.modifiers and not _passes(instruction)
    mask = member_mask(instruction)
    if isinstance(mask, Register):
        return mask.name not in full
    return isinstance(mask, Immediate) and mask.value & _FULL != _FULL


def _full_masks(blocks: list[Block]) -> set[str]:
    """Registers that are written once, with the mask of all lanes."""
    writers: dict[str, list[Instruction]] = {}
    for block in blocks:
        for instruction in block.instructions:
            for name in registers(instruction)[0]:
                writers.setdefault(name, []).append(instruction)
    return {name for name, found in writers.items() if len(found) == 1 and _moves_full(found[0])}


def _moves_full(instruction: Instruction) -> bool:
    source = instruction.operands[-1]
    return instruction.opcode == "mov" and isinstance(source, Immediate) and source.value & _FULL == _FULL
