"""Lanes that stand at different copies of one warp-wide instruction, and execute it as one.

Where the compiler has unrolled a loop or copied a branch, the lanes that a mask names come to different places of the PTX.
By the PTX manual a lane waits until all lanes of its mask have executed the instruction with the same qualifiers and the
same mask; nothing is said of the place. So it does not matter when lanes that wait are found to have met: which instruction
of one lane goes with which of another follows from the lanes' own order of instructions.

A block's function is run once to learn the operands of its exchange, as far as the exchange and no further: the instructions
before it in the block are exchanges too, and write nothing but local variables. It is run again with the answer in hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..translate.function import CompiledBlock, Members
from .group import Group
from .state import State
from .warps import Warps

Run = Callable[[CompiledBlock, Group, "Prompter"], Any]


@dataclass(frozen=True, eq=False)
class Stand:
    """Threads that wait at a warp-wide instruction: a block's first, or the one after those that have been answered."""

    block: CompiledBlock
    group: Group
    answers: tuple[Any, ...] = ()

    @property
    def pc(self) -> int:
        """Instruction at which they wait."""
        return self.block.first + len(self.answers)

    def part(self, mask: np.ndarray) -> Stand:
        """Return the stand of some of the threads."""
        return Stand(self.block, self.group.subset(mask), tuple(_pick(answer, mask) for answer in self.answers))


class Asked(Exception):
    """A block's function has come to an exchange without an answer."""

    def __init__(self, name: str, operands: tuple[Any, ...]) -> None:
        super().__init__(name)
        self.name = name
        self.operands = operands


class Prompter:
    """Stands in for `Warps`: has the answers ready, one after the other, then raises `Asked`."""

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self._answers = list(answers)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def exchange(group: Group, *operands: Any) -> Any:
            if self._answers:
                return self._answers.pop(0)
            raise Asked(name, operands)

        return exchange


class Meetings:
    """Finds who has met, and executes their instruction."""

    def __init__(self, state: State, warps: Warps, run: Run) -> None:
        self._state = state
        self._warps = warps
        self._run = run

    def find(self, stands: list[Stand]) -> list[tuple[Stand, np.ndarray]]:
        """Stands at instructions of one kind, and which of their threads wait there with all live lanes of their masks."""
        kinds: dict[Any, list[Stand]] = {}
        for stand in stands:
            if names_lanes(stand.block.members):
                instruction = self._state.code.instructions[stand.pc]
                kinds.setdefault((instruction.opcode, instruction.modifiers), []).append(stand)
        for alike in kinds.values():
            if len(alike) == 1:
                continue  # lanes that meet at one place need none of this
            whole = self._whole(alike)
            if any(mask.any() for mask in whole):
                return [(stand, mask) for stand, mask in zip(alike, whole) if mask.any()]
        return []

    def _whole(self, stands: list[Stand]) -> list[np.ndarray]:
        groups = [stand.group for stand in stands]
        masks = [lanes_named(self._state, stand.block, stand.group) for stand in stands]
        mask = np.concatenate([group.spread(one, np.uint32) for group, one in zip(groups, masks)])
        warp, lane = (np.concatenate([group.get(name) for group in groups]) for name in ("warp", "laneid"))
        # one exchange for each mask that lanes of a warp name
        _, number = np.unique(warp.astype(np.uint64) << np.uint64(32) | mask, return_inverse=True)
        here = np.zeros(int(number.max()) + 1, np.uint32)
        np.bitwise_or.at(here, number, np.uint32(1) << lane)
        whole = self._state.live_lanes()[warp] & mask & ~here[number] == 0
        return np.split(whole, _bounds(groups))

    def hold(self, stands: list[Stand]) -> list[Stand]:
        """Executes the instruction at which all these threads stand; they have its results among their answers then."""
        asked = [self._ask(stand) for stand in stands]
        groups = [stand.group for stand in stands]
        threads = np.concatenate([group.threads for group in groups])
        order = np.argsort(threads)
        together = Group(groups[0].batch, threads[order], len(threads))
        operands = [_joined(groups, values, order) for values in zip(*(one.operands for one in asked))]
        result = getattr(self._warps, asked[0].name)(together, *operands)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        parts = np.split(place, _bounds(groups))
        return [
            Stand(stand.block, stand.group, (*stand.answers, _pick(result, part))) for stand, part in zip(stands, parts)
        ]

    def _ask(self, stand: Stand) -> Asked:
        try:
            self._run(stand.block, stand.group, Prompter(stand.answers))
        except Asked as asked:
            return asked
        raise AssertionError("no exchange where there is one")

    def run_on(self, stand: Stand) -> Any:
        """Run the block's function for threads that have their answers. Raises `Asked` at the next exchange."""
        return self._run(stand.block, stand.group, Prompter(stand.answers))


def names_lanes(members: Members | None) -> bool:
    """Return True if a mask says who takes part; else it is the whole warp or warpgroup, at one place."""
    return members is not None and (members.mask is not None or members.register is not None)


def lanes_named(state: State, block: CompiledBlock, group: Group) -> Any:
    """The lanes that each thread's instruction names, at the start of a block that gathers."""
    members = block.members
    if members is None or members.register is None:
        return np.uint32(0xFFFFFFFF if members is None or members.mask is None else members.mask)
    mask = state.registers[members.register]
    return mask[group.threads] if isinstance(mask, np.ndarray) and mask.ndim else mask


def _joined(groups: list[Group], values: tuple[Any, ...], order: np.ndarray) -> Any:
    """An operand of all groups, by thread; what is no value of threads (a mode, a place) is the first group's."""
    if not isinstance(values[0], (np.ndarray, np.generic)):
        return values[0]
    return np.concatenate([group.spread(value) for group, value in zip(groups, values)])[order]


def _pick(answer: Any, which: np.ndarray) -> Any:
    """Select some threads' part of the result of an exchange: an array, several, or nothing."""
    if isinstance(answer, tuple):
        return tuple(part[which] for part in answer)
    return None if answer is None else answer[which]


def _bounds(groups: list[Group]) -> np.ndarray:
    return np.cumsum([group.size for group in groups])[:-1]
