"""Records of the last work of one kind at each granule of shared memory that goes on beside the threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from .granules import split

NONE = -1  # the series where there has been no such work


class Tickets:
    """Series, count and instruction (`knowledge.py`) of the last work at each granule."""

    def __init__(self, granules: int) -> None:
        self._series = np.full(granules, NONE, np.int32)
        self._count = np.zeros(granules, np.int32)
        self.pc = np.zeros(granules, np.int32)

    def split(self, pieces: int) -> None:
        """Split each granule into `pieces`, with the same past."""
        self._series, self._count, self.pc = (split(one, pieces) for one in (self._series, self._count, self.pc))

    def of(self, granule: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(series, count)."""
        return self._series.take(granule), self._count.take(granule)

    def note(self, granule: np.ndarray, series: Any, count: Any, pc: int | None = None) -> None:
        """Note work that begins there, or the count with which it will be over, once that is known."""
        self._series[granule], self._count[granule] = series, count
        if pc is not None:
            self.pc[granule] = pc

    def forget(self, granule: np.ndarray) -> None:
        """Forget the work at these places, since something else has come to them."""
        self._series[granule], self._count[granule] = NONE, 0
