"""Registers whose value nothing may have written: where that can come from, and which others it reaches.

A register that some path reads before it writes it, a load of local memory that was never written, and a shuffle from a lane
outside of the mask give such values. Code may copy and compute with them as long as nothing comes of it: a fault is a store,
an address or a branch that depends on one.
"""

from __future__ import annotations

from collections.abc import Callable

from .flow import Block, destination_operands, member_mask
from .ptx import Immediate, Instruction, registers_of

_FULL = 0xFFFFFFFF


def find(blocks: list[Block], early: set[str], is_computed: Callable[[Instruction], bool]) -> frozenset[str]:
    """The registers that may hold one, from those that are read `early`; without regard to order.

    `is_computed`: the result is one if an operand is.
    """
    found = set(early)
    waiting = []
    for block in blocks:
        for instruction in block.instructions:
            destinations, sources = destination_operands(instruction)
            if begins(instruction):
                found.update(registers_of(destinations))
            elif instruction.opcode == "shfl" or is_computed(instruction):
                waiting.append((registers_of(destinations), registers_of(sources)))
    while True:
        reached = [pair for pair in waiting if not found.isdisjoint(pair[1])]
        before = len(found)
        for destinations_, _ in reached:
            found.update(destinations_)
        if len(found) == before:
            return frozenset(found)


def begins(instruction: Instruction) -> bool:
    """Whether what it gives may be undefined, whatever its operands are."""
    if instruction.opcode == "shfl":
        mask = member_mask(instruction)
        return not isinstance(mask, Immediate) or mask.value & _FULL != _FULL
    return instruction.opcode == "ld" and "local" in instruction.modifiers
