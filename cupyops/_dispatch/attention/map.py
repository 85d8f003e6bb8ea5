"""Maps of the panels of keys that a tile of queries sees through a mask, and the reverse; made on the GPU at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from .attention import Blocks, Problem

BLOCK = 128
MOST = 1 << 27  # cells of a map: bytes, beside which the lists of a role take at most twice as many
attention_map_lists = Kernel("attention.cu", "attention_map_lists")


class Masked(NamedTuple):
    """Mask of a variant: a launch of the kernel that reads it, and whether it differs by batch and by head.

    look: of a grid; it is called with the cells, the sizes and where cells lie.
    """

    look: Callable[..., None]
    by_batch: bool
    by_head: bool

    def maps(self, p: Problem) -> tuple[int, int]:
        """Number of batches and of heads that have a map of their own."""
        return p.batches if self.by_batch else 1, p.heads if self.by_head else 1


def fits(p: Problem, masked: Masked, blocks: Blocks) -> bool:
    """Return True if a map is small enough to be made."""
    batches, heads = masked.maps(p)
    return batches * heads * ceil_div(p.queries, blocks.cell[0]) * ceil_div(p.keys, blocks.cell[1]) <= MOST


class Maps:
    """The maps of a call: cells are looked at once for each size, whichever roles have lists of them."""

    def __init__(self, p: Problem, masked: Masked, device: torch.device) -> None:
        self._problem, self._masked, self._device = p, masked, device
        self._cells: dict[tuple[int, int], tuple[Tensor, np.ndarray]] = {}

    def lists(self, blocks: Blocks) -> tuple[Tensor, tuple[int, int, int]]:
        """`struct Map`: for each tile the panels that it sees, and the strides of batch, head and tile."""
        p, (batches, heads) = self._problem, self._masked.maps(self._problem)
        if blocks.cell not in self._cells:
            self._cells[blocks.cell] = self._look(blocks.cell)
        cells, where = self._cells[blocks.cell]
        own, other = (p.keys, p.queries) if blocks.keys else (p.queries, p.keys)
        tiles, panels = ceil_div(own, blocks.rows), ceil_div(other, blocks.panel)
        found = torch.empty((batches, heads, tiles, panels + 1), dtype=torch.int32, device=self._device)
        side = blocks.rows, blocks.panel, tiles, panels, batches * heads, int(blocks.keys)
        warps = ceil_div(tiles * batches * heads, BLOCK // 32)
        attention_map_lists[warps, BLOCK](cells, found, where, np.array(side, dtype=np.int32))
        by_batch, by_head = found.stride(0) * self._masked.by_batch, found.stride(1) * self._masked.by_head
        return found, (by_batch, by_head, panels + 1)

    def _look(self, cell: tuple[int, int]) -> tuple[Tensor, np.ndarray]:
        p, (batches, heads) = self._problem, self._masked.maps(self._problem)
        down, across = ceil_div(p.queries, cell[0]), ceil_div(p.keys, cell[1])
        cells = torch.empty((batches, heads, down, across), dtype=torch.uint8, device=self._device)
        where = np.array((*cell, across, down, heads), dtype=np.int32)
        self._masked.look(cells.numel(), BLOCK, cells, p.sizes(), where)
        return cells, where
