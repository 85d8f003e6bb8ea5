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


def find(blocks: list[Block], early: set[str], is_computed: Callable[[Instruction], bool]) -> frozenset[str]:
    """The registers that may hold one, from those that are read `early`; without regard to order.

    `is_computed`: the result is one if an operand is.
    """
    found, full = set(early), _full_masks(blocks)
    gives: dict[str, list[list[str]]] = {}  # what is computed from each register
    for block in blocks:
        for instruction in block.instructions:
            written, read = registers(instruction)
            if _begins(instruction, full):
                found.update(written)
            elif written and (instruction.opcode == "shfl" or is_computed(instruction)):
                for name in read:
                    gives.setdefault(name, []).append(written)
    waiting = list(found)
    while waiting:
        for written in gives.pop(waiting.pop(), ()):
            waiting += [name for name in written if name not in found]
            found.update(written)
    return frozenset(found)


def loads_local(instruction: Instruction) -> bool:
    """Return True for a load from an array of the thread; local memory through which calls pass values is always written."""
    if instruction.opcode != "ld" or "local" not in instruction.modifiers:
        return False
    source = instruction.operands[1]
    return isinstance(source, Address) and not isinstance(source.base, Symbol)


def _begins(instruction: Instruction, full: set[str]) -> bool:
    """Return True if the result may be undefined whatever the operands are. `full`: registers with the mask of all lanes."""
    if instruction.opcode != "shfl":
        return loads_local(instruction)
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
