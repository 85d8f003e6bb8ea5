"""Granules: the pieces of memory that something is remembered of.

They are as wide as the narrowest access so far. Most kernels move 16 bytes at a time where there is much to move.
"""

from __future__ import annotations

import numpy as np

COARSEST = 16  # bytes, of the widest access


class Granules:
    """Division of positions into granules.

    Args:
        finest: bytes of the narrowest access that the kernel may make.
    """

    def __init__(self, finest: int) -> None:
        self._finest = finest
        self.width, self.shift = COARSEST, COARSEST.bit_length() - 1

    def narrow(self, width: int) -> int:
        """Narrow granules to at most `width` bytes. Returns the number of pieces that each becomes, 1 where they stay."""
        width = max(width, self._finest)
        if width >= self.width:
            return 1
        pieces = self.width // width
        self.width, self.shift = width, width.bit_length() - 1
        return pieces

    def narrow_all(self) -> int:
        """Narrow granules as far as they can be."""
        return self.narrow(self._finest)

    def of(self, position: np.ndarray, width: int) -> np.ndarray:
        """The granules of accesses of `width` bytes, a column for each: NumPy's inner loops run over the accesses."""
        first = (position >> self.shift)[None]
        return first if width <= self.width else first + np.arange(width >> self.shift)[:, None]


def split(of_each: np.ndarray, pieces: int) -> np.ndarray:
    """Copy what was known of each granule to the pieces that it has become."""
    parts = np.empty((len(of_each), pieces), of_each.dtype)
    for number in range(pieces):  # np.repeat takes three times as long
        parts[:, number] = of_each
    return parts.reshape(-1)
