"""Order of accesses among the lanes of a warp, where __syncwarp() named only some of them.

As long as every __syncwarp() of a warp is of all its lanes, the last one says it all, and nothing is kept here.
"""

from __future__ import annotations

import numpy as np

_LANES = 32


class LaneOrder:
    """Order within the warps of a batch in which some lanes have met without the others."""

    def __init__(self) -> None:
        # by warp: for each lane (row) the moment until when it is ordered behind each other one (column)
        self._known: dict[int, np.ndarray] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def meet(self, warp: int, lanes: np.ndarray, moment: int, all_met: int) -> None:
        """Note that lanes have met at `moment`; all lanes of the warp did last at `all_met`."""
        known = self._known.setdefault(warp, np.full((_LANES, _LANES), all_met, np.int64))
        together = known[lanes].max(0)
        together[lanes] = moment
        known[lanes] = together

    def meet_whole(self, warps: np.ndarray) -> None:
        """Forget the order within these warps, all of whose lanes have met."""
        for warp in warps.tolist() if self._known else ():
            self._known.pop(warp, None)

    def unordered(self, warp: np.ndarray, lane: np.ndarray, other: np.ndarray, moment: np.ndarray) -> np.ndarray:
        """Mask of lanes that have not met another one of their warp since the moment of that one's access.

        `other`: -1 where it is several, of whom the one that the lane has met last counts.
        """
        found = np.zeros(moment.shape, np.bool_)
        for one in np.unique(warp).tolist():
            known = self._known.get(one)
            if known is not None:
                here = warp == one
                single = known[lane[here], other[here]]
                found[here] = moment[here] >= np.where(other[here] < 0, known[lane[here]].max(1), single)
        return found

    def partial(self, warp: np.ndarray) -> np.ndarray:
        """Mask of warps in which lanes have met without others since all of them did."""
        return np.isin(warp, list(self._known))
