"""Loops of a kernel over a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .size import about
from .values import Reduction, Store, is_column, layout, memory_order


@dataclass
class Space:
    """The shape that a kernel runs over: `batch`, `rows` and `columns` are its dimensions, outermost in memory first.

    Kinds:
        flat: pointwise, all of it is one row.
        row: results of reductions over a row are used in the same row, in stages; sums over rows are kept by blocks that
            have several rows each.
        column: reductions over rows alone, by tiles of columns; what follows from them is computed in the same kernel.
    """

    kind: Literal["flat", "row", "column"]
    shape: tuple[Any, ...]
    batch: list[int]
    rows: list[int]
    columns: list[int]

    def size(self, dims: Sequence[int]) -> Any:
        """Number of elements of some dimensions."""
        return math.prod(self.shape[d] for d in dims)

    @classmethod
    def of(cls, stores: Sequence[Store]) -> Space:
        """The space of the kernel that computes these stores."""
        reductions = [s.value for s in stores if isinstance(s.value, Reduction)]
        over_row = next((r for r in reductions if not is_column(r)), None)
        reduction = over_row or (reductions[0] if reductions else None)
        if reduction is None:
            return cls._flat(stores)
        source = reduction.source
        order = memory_order(layout(source))
        kept = [d for d in order if d not in reduction.dims]
        over = [d for d in order if d in reduction.dims]
        if over_row is not None:
            return cls("row", source.shape, [], kept, over)
        outer = [d for d in over if source.shape[d] > 1 or len(reduction.dims) == 1]
        first = min((order.index(d) for d in outer), default=0)
        batch = [d for d in kept if order.index(d) < first]
        return cls("column", source.shape, batch, over, [d for d in kept if order.index(d) > first])

    @classmethod
    def _flat(cls, stores: Sequence[Store]) -> Space:
        widest = max(stores, key=lambda s: about(s.value.numel))
        chosen = stores[0] if stores[0].value.numel == widest.value.numel else widest
        return cls("flat", chosen.value.shape, [], [], memory_order(chosen.layout))
