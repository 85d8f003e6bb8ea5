"""Images of few channels in blocks of pixels, as channels of a convolution without steps (cuda_src/conv2d_blocks.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..core.gpu import gpu
from ..gemm.gemm import HALF

STEP = 2
CHANNELS = 4  # of a pixel in a block
THREADS = 256
BLOCKS = 4  # of a multiprocessor, that mend

DEFINE = {"BLOCK_STEP": STEP, "BLOCK_CHANNELS": CHANNELS, "BLOCK_THREADS": THREADS}
conv2d_blocks = Kernel(
    "conv2d_blocks.cu", "conv2d_blocks<T, X>", define=DEFINE, T=HALF, X=(*HALF, torch.float32),
    where=lambda T, X: X in (T, torch.float32),
)  # fmt: skip
conv2d_blocks_mend = Kernel("conv2d_blocks.cu", "conv2d_blocks_mend<T>", define=DEFINE, T=HALF)


class Side(NamedTuple):
    """Geometry of blocks along one side of an image."""

    before: int  # blocks of zeros before those of the image, of which there are `own`; there are `blocks` in all
    own: int
    blocks: int
    shift: int  # taps of zero before a filter's first, which begins within a block
    taps: int  # of a filter; `block_taps`: the blocks that it sees
    block_taps: int
    out: int  # results

    @classmethod
    def of(cls, size: int, taps: int, pad: int) -> Side:
        """Return the side of an image whose size is whole blocks, for a convolution with steps of a block."""
        before = ceil_div(pad, STEP)
        shift = before * STEP - pad
        block_taps, out = ceil_div(taps + shift, STEP), (size + 2 * pad - taps) // STEP + 1
        blocks = out + block_taps - 1
        return cls(before, min(size // STEP, blocks - before), blocks, shift, taps, block_taps, out)

    @property
    def packed(self) -> np.ndarray:
        """`struct Side`."""
        return np.array(self[:6], dtype=np.int64)


class Blocks(NamedTuple):
    """An image in blocks."""

    made: Tensor  # [n, blocks down, blocks across, elements of a block]
    flag: Tensor  # whether there is a pixel that is not finite: 0 or 1, on the device
    down: Side
    across: Side

    def mend(self, filters: Tensor, y: Tensor) -> None:
        """Compute non-finite elements of a result in channels_last again, by the filters' own taps, without the zeros."""
        images, count, rows, columns = y.shape
        sizes = images, rows, columns, count, self.down.packed, self.across.packed
        grid = min(BLOCKS * gpu(y.device).multiprocessors, ceil_div(y.numel(), THREADS))
        conv2d_blocks_mend[grid, THREADS](self.made, filters, y, self.flag, *sizes, T=y.dtype)


def blocks_of(x: Tensor, dtype: torch.dtype, down: Side, across: Side) -> Blocks:
    """An image in blocks of a half type."""
    shape: Any = x.shape[0], down.blocks, across.blocks, STEP * STEP * CHANNELS
    made = torch.empty(shape, dtype=dtype, device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch = conv2d_blocks[ceil_div(shape[0] * shape[1] * shape[2], THREADS), THREADS]
    launch(x, made, flag, *x.shape[:2], *x.stride(), down.packed, across.packed, T=dtype, X=x.dtype)
    return Blocks(made, flag, down, across)
