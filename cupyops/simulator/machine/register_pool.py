"""setmaxnreg: registers that warpgroups of a block give back, and that others take."""

from __future__ import annotations

import numpy as np

from ..errors import Deadlock, WarpFault
from .faults import fault
from .group import Group
from .state import State
from .warps import Warps

_REGISTERS = 65536  # of a multiprocessor, and at most of a block
_MOST = 255  # of a thread


class RegisterPool:
    """Register pool of each block of a batch.

    A block is launched with as many registers for each thread as .maxnreg says, or else with as many as there is room
    for: for the largest block of `__launch_bounds__`, and for as many of them as it wants on a multiprocessor.
    """

    def __init__(self, state: State, warps: Warps) -> None:
        self._state, self._warps = state, warps
        function = state.code.function
        threads = (function.max_threads or state.batch.warps_per_block * 32) * function.min_blocks
        self._first = function.registers_each or min(_MOST + 1, _REGISTERS // threads // 8 * 8)
        self._held = np.full(state.batch.warps, self._first)
        self._since = np.zeros(state.batch.warps, np.int64)  # the instruction that said so

    def set(self, group: Group, way: str, count: int, pc: int) -> None:
        """setmaxnreg.inc or .dec, by whole warpgroups."""
        listing = self._state.listing
        self._warps.check_whole(group, 128, pc)
        held = self._held[group.get("warp")]
        wrong = held > count if way == "inc" else held < count
        if wrong.any():
            first = int(held[int(np.argmax(wrong))])
            what = f"setmaxnreg.{way} to {count} registers by a warp that has {first}"
            raise fault(WarpFault, listing, group, wrong, what, pc)
        self._held[group.get("warp")], self._since[group.get("warp")] = count, pc

    def finish(self, group: Group) -> None:
        """Check, at the end of the kernel, that no block has asked for more registers than there are."""
        per_block = group.batch.warps_per_block
        held = self._held.reshape(-1, per_block)
        bad = held.sum(1) > self._first * per_block
        if not bad.any():
            return
        block = int(np.argmax(bad))
        most = block * per_block + int(np.argmax(held[block]))
        what = (
            f"setmaxnreg.inc waits for registers that are never given back: the block has {self._first * per_block * 32}, "
            f"and its warps ask for {int(held[block].sum()) * 32}"
        )
        counts = ", ".join(f"{int(one)}" for one in held[block, ::4])
        guilty, pc = group.get("warp") == most, int(self._since[most])
        detail = f"registers of each thread, by warpgroup: {counts}; {self._first} at launch"
        raise fault(Deadlock, self._state.listing, group, guilty, what, pc, detail=detail)
