"""Knowledge of each thread about work beside the threads, copies and products of matrices: what of it is over.

Such work is counted in series: the phases of an mbarrier, the groups of copies that a thread has committed, the groups of
products of a warpgroup. A thread learns how far a series has come by waiting for it, and passes on what it knows at every
barrier that it comes through. Work that a thread does not know to be over may still be under way, in whatever order the
threads happen to run here.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from .group import Batch, Group

LATER = 2**31 - 1  # the count of what is not over yet


class Series(Enum):
    """Kinds of counted work. The values say by which wait a thread learns of it."""

    PHASES = "wait for the mbarrier that it reports to"
    STORES = "cp.async.bulk.wait_group"
    PRODUCTS = "wgmma.wait_group"


class Knowledge:
    """Knowledge of all threads of a batch, each about its own cluster."""

    def __init__(self, batch: Batch, cluster_size: int) -> None:
        self._batch, self._cluster_size = batch, cluster_size
        self._numbers: dict[tuple[Series, int, int], int] = {}
        self._room = np.zeros((16, batch.threads), np.int32)

    @property
    def _known(self) -> np.ndarray:
        return self._room[: len(self._numbers)]

    def series(self, kind: Series, block: int, number: int) -> int:
        """The series of an mbarrier (by its offset), a thread or a warpgroup (by its number in the block)."""
        key = kind, block % self._cluster_size, number
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._numbers)
            if found == len(self._room):
                self._room = np.concatenate([self._room, np.zeros_like(self._room)])
        return found

    def name(self, series: int) -> tuple[Series, int, int]:
        """The kind, the rank of the block in its cluster, and the number."""
        return list(self._numbers)[series]

    def learn(self, threads: np.ndarray, series: int | np.ndarray, count: int | np.ndarray) -> None:
        """Note that threads have waited until `count` of the series were over. Arrays have an element for each thread."""
        self._room[series, threads] = np.maximum(self._room[series, threads], count)

    def unaware(self, threads: np.ndarray, series: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Mask of threads that do not know that `count` of the series are over. All broadcast."""
        return self._room[series, threads] < count

    def least(self, threads: np.ndarray, each: int, series: np.ndarray) -> np.ndarray:
        """Least knowledge among every `each` threads of these series: (series, number of such)."""
        return self._room[series][:, threads].reshape(len(series), -1, each).min(2)

    # --- how it spreads ---

    def told(self, threads: np.ndarray) -> np.ndarray:
        """Return what these threads, of one cluster, know together."""
        return self._known[:, threads].max(1)

    def tell(self, threads: np.ndarray, told: np.ndarray) -> None:
        """Add to what these threads know what others have told them."""
        rows = self._room[: len(told)]
        rows[:, threads] = np.maximum(rows[:, threads], told[:, None])

    def meet(self, together: int) -> None:
        """Share the knowledge of the threads of every `together` blocks, which have met."""
        if not self._numbers:
            return
        rows = self._known.reshape(len(self._numbers), -1, together * self._batch.threads_per_block)
        rows[:] = rows.max(2, keepdims=True)

    def meet_in_warps(self, group: Group, mask: np.ndarray) -> None:
        """The threads of each warp in a group have met that name one mask."""
        if not self._numbers:
            return
        warp = group.get("warp")
        if (mask != mask[0]).any():
            meetings = warp.astype(np.uint64) << np.uint64(32) | mask
            for one in np.unique(meetings):
                threads = group.threads[meetings == one]
                self.tell(threads, self.told(threads))
            return
        starts = np.flatnonzero(np.concatenate(([True], warp[1:] != warp[:-1])))
        most = np.maximum.reduceat(self._known[:, group.threads], starts, axis=1)
        self._known[:, group.threads] = np.repeat(most, np.diff([*starts, len(warp)]), axis=1)


def merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge the knowledge of both; the longer one knows of series that are newer."""
    if len(one) < len(other):
        one, other = other, one
    result = one.copy()
    result[: len(other)] = np.maximum(result[: len(other)], other)
    return result
