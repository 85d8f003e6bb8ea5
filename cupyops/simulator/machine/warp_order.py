"""Order of accesses among the warps of a block, where some of them have met without the others.

Barriers of the whole block need none of this. Named barriers, mbarriers, and fences with flags or locks order some warps
behind others: each warp knows until when it is ordered behind each other one of its block, and passes that on.

Moments are counted twice: by epochs of the block, for shared memory, and by time, for global memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .group import Batch

EPOCHS, TIMES = 0, 1


class Past(NamedTuple):
    """Accesses that lie behind some warps of each block, by block: until which moment, by the warp that made them."""

    blocks: np.ndarray
    until: np.ndarray  # (EPOCHS or TIMES, block, warp)


class WarpOrder:
    """Order within the blocks of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._known: np.ndarray | None = None  # (EPOCHS or TIMES, warp of the batch, warp of its block)
        self._learned = np.zeros((2, batch.warps), np.int64)  # when each warp last came to know something
        self._published: np.ndarray | None = None  # what fences have let others know, by block
        self.has_fenced = np.zeros(batch.warps, np.bool_)  # warps that have run a fence

    def __bool__(self) -> bool:
        return self._known is not None

    def nothing(self) -> np.ndarray:
        """Return room for the past of each block, with none in it."""
        return np.zeros((2, self._batch.blocks, self._batch.warps_per_block), np.int64)

    def past(self, threads: np.ndarray, epoch: np.ndarray, now: int) -> Past:
        """Return the past of these threads' warps, as of the end of the `epoch` of their blocks."""
        per_block, warps = self._batch.warps_per_block, np.unique(self._batch.per_thread["warp"][threads])
        block = warps // per_block
        until = np.zeros((2, len(warps), per_block), np.int64) if self._known is None else self._known[:, warps]
        until[EPOCHS, np.arange(len(warps)), warps % per_block] = epoch[block] + 1
        until[TIMES, np.arange(len(warps)), warps % per_block] = now
        starts = np.flatnonzero(np.concatenate(([True], block[1:] != block[:-1])))
        return Past(block[starts], np.maximum.reduceat(until, starts, axis=1))

    def learn(self, threads: np.ndarray, until: np.ndarray, epoch: np.ndarray, now: int) -> None:
        """Order what these threads' warps do next behind a past: `until` has that of each of their blocks.

        `epoch`: the one that begins for their blocks.
        """
        if self._known is None:
            self._known = np.zeros((2, self._batch.warps, self._batch.warps_per_block), np.int64)
        warps = np.unique(self._batch.per_thread["warp"][threads])
        block = warps // self._batch.warps_per_block
        self._known[:, warps] = np.maximum(self._known[:, warps], until[:, block])
        self._learned[EPOCHS, warps], self._learned[TIMES, warps] = epoch[block], now

    def publish(self, threads: np.ndarray, past: Past) -> None:
        """Let these threads run a fence: their past is there for those who meet them by atomics or flags."""
        if self._published is None:
            self._published = self.nothing()
        self._published[:, past.blocks] = np.maximum(self._published[:, past.blocks], past.until)
        self.has_fenced[self._batch.per_thread["warp"][threads]] = True

    def news(self, threads: np.ndarray) -> np.ndarray | None:
        """Return what fences have published, if there is something in it that the warps of these threads do not know."""
        if self._published is None:
            return None
        warps = np.unique(self._batch.per_thread["warp"][threads])
        published = self._published[TIMES, warps // self._batch.warps_per_block]
        if self._known is not None and not np.count_nonzero(published > self._known[TIMES, warps]):
            return None
        return self._published

    def ordered(
        self, unit: int, warp: np.ndarray, other: np.ndarray, moment: np.ndarray, now: np.ndarray | int
    ) -> np.ndarray:
        """Mask of accesses by a warp that are ordered behind one at `moment` by another one of its block.

        `warp` is a number in the batch, `other` one in the block; -1 stands for several, all of whom count as known that
        came before the warp last learned of anybody. What it has learned since `now`, when its access was, does not count.
        """
        assert self._known is not None
        learned = self._learned[unit][warp]
        return (moment < np.where(other < 0, learned, self._known[unit][warp, other])) & (learned <= now)
