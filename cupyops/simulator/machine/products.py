"""Products of matrices under way (wgmma): what they still read, and whose sums are not there yet.

A warpgroup commits its products to groups and waits for those. Until then it may not read the sums, and nobody may overwrite
the operands in shared memory.
"""

from __future__ import annotations

import numpy as np

from ..errors import Race
from .beside import Reading
from .faults import fault
from .group import Group
from .knowledge import Series
from .spaces import Shared
from .state import State


class Products:
    """Products under way of a batch's warpgroups."""

    def __init__(self, state: State, shared: Shared) -> None:
        self._state, self._shared = state, shared
        batch = state.batch
        self._per_block = -(-batch.threads_per_block // 128)
        warp = np.arange(batch.warps)
        self._warpgroup_of = warp // batch.warps_per_block * self._per_block + warp % batch.warps_per_block // 4
        groups = batch.blocks * self._per_block
        self._committed, self._done = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
        self._fenced = np.zeros(groups, np.bool_)  # since the warpgroup has last committed, or waited
        # for the registers of a kernel that is watched, by warp: the product whose sum is there, and its instruction
        self._sums: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _warpgroups(self, group: Group) -> np.ndarray:
        """Numbers of the warpgroups of a group, which has them whole."""
        return self._warpgroup_of[group.get("warp")[::128]]

    # --- waiting ---

    def fence(self, group: Group) -> None:
        """wgmma.fence."""
        self._fenced[self._warpgroups(group)] = True

    def commit(self, group: Group) -> None:
        """wgmma.commit_group."""
        self._committed[self._warpgroups(group)] += 1
        self._fenced[self._warpgroups(group)] = False

    def wait(self, group: Group, allowed: int) -> None:
        """wgmma.wait_group."""
        warpgroups = self._warpgroups(group)
        done = np.maximum(self._done[warpgroups], self._committed[warpgroups] - allowed)
        self._done[warpgroups] = done
        self._fenced[warpgroups] = False
        if self._state.knowledge is not None:
            self._state.knowledge.learn(
                group.threads, np.repeat(self._series(warpgroups), 128), np.repeat(done, 128).astype(np.int32)
            )

    def _series(self, warpgroups: np.ndarray) -> np.ndarray:
        knowledge = self._state.knowledge
        assert knowledge is not None
        return np.array(
            [knowledge.series(Series.PRODUCTS, *divmod(one, self._per_block)) for one in warpgroups.tolist()]
        )

    # --- operands in shared memory ---

    def reads(self, group: Group, chunks: list[np.ndarray], start: np.ndarray, pc: int) -> None:
        """Note that a product reads these 16-byte chunks of the block memory from `start` on; one element a warpgroup."""
        warpgroups = self._warpgroups(group)
        number, series = warpgroups % self._per_block, self._series(warpgroups)
        count = (self._committed[warpgroups] + 1).astype(np.int32)
        assert self._shared.shadow is not None
        for one in np.unique(number):
            units = np.flatnonzero(number == one)
            position = np.concatenate([chunks[unit] + start[unit] for unit in units])
            of = np.repeat(units, [len(chunks[unit]) for unit in units])
            reading = Reading("a matrix product", group, 128, int(one), series, count, pc)
            self._shared.shadow.product_read(reading, position, of)

    # --- registers ---

    def check_fenced(self, group: Group, pc: int) -> None:
        """Registers that were touched before are ready only after wgmma.fence."""
        bad = ~self._fenced[self._warpgroups(group)]
        if bad.any() and self._state.check:
            what = "a matrix product takes registers that were accessed before it, with no wgmma.fence in between"
            raise fault(Race, self._state.listing, group, np.repeat(bad, 128), what, pc)

    def begin_sums(self, group: Group, registers: list[int], pc: int) -> None:
        """Note that a product adds to these registers."""
        warps = np.unique(group.get("warp"))
        for register in registers:
            number, begun = self._product_of(register)
            number[warps], begun[warps] = self._committed[self._warpgroup_of[warps]] + 1, pc

    def copy_sums(self, group: Group, to: list[int], from_: list[int]) -> None:
        """Registers are given the values of others, or new ones."""
        warps = np.unique(group.get("warp"))
        sources: list[int | None] = [*from_] or [None] * len(to)
        for register, source in zip(to, sources):
            if source is None and register not in self._sums:
                continue
            number, begun = self._product_of(register)
            if source is None:
                number[warps] = 0
            else:
                other, other_begun = self._product_of(source)
                number[warps], begun[warps] = other[warps], other_begun[warps]

    def read_sums(self, group: Group, registers: list[int], pc: int) -> None:
        """Check that products whose sums are read from these registers are over."""
        warp = group.get("warp")
        for register in registers:
            number, begun = self._product_of(register)
            bad = number[warp] > self._done[self._warpgroup_of[warp]]
            if bad.any() and self._state.check:
                what = "read of a matrix product's sum that may not be there yet, with no wgmma.wait_group in between"
                also = int(begun[warp[int(np.argmax(bad))]])
                raise fault(Race, self._state.listing, group, bad, what, pc, also=also)

    def _product_of(self, register: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._sums.get(register)
        if found is None:
            shape = self._state.batch.warps
            found = self._sums[register] = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        return found
