"""Convolutions with steps of images of few channels, as at the beginning of a ResNet: as convolutions of blocks of pixels.

cuDNN reads channels by vectors of eight, and pads three to that many. In blocks of 2 x 2 pixels the three are four times as
many, and a filter of 7 x 7 taps has 4 x 4: a convolution without steps, of half as many multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.gemm import HALF
from .._dispatch.gpu import gpu
from .._dispatch.image_blocks import CHANNELS, STEP, Side, blocks_of
from .._util import torch_private
from .._util.arguments import autocast_dtype

LEAST = 2**24  # elements of the result, of fewer it is not measured


def is_of_blocks(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """Return whether a convolution of a half type is measured to be faster so; no gradient of the image is to be wanted."""
    if x.dim() != 4 or x.requires_grad or not 0 < x.shape[1] < CHANNELS or conv.groups != 1 or conv.bias is not None:
        return False
    if conv.stride != (STEP, STEP) or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        return False
    if isinstance(conv.padding, str) or conv.kernel_size != (7, 7) or max(conv.padding) > 3:
        return False
    if weight.shape[1:] != (x.shape[1], *conv.kernel_size) or x.shape[2] % STEP or x.shape[3] % STEP:
        return False
    if (autocast_dtype(x) or x.dtype) not in HALF or x.dtype not in (*HALF, torch.float32) or is_dynamo_compiling():
        return False
    if not weight.is_contiguous(memory_format=torch.channels_last) or min(x.shape[2:]) < max(conv.kernel_size):
        return False
    if gpu(x.device).capability != 9 or x.shape[0] * weight.shape[0] * x.shape[2] * x.shape[3] < LEAST * STEP * STEP:
        return False
    return not (torch_private.functorch_active() or torch_private.forward_mode() or torch_private.dispatch_modes())


def of_blocks(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution, in channels_last."""
    dtype = autocast_dtype(x) or x.dtype
    assert not isinstance(conv.padding, str)
    (height, width), (down, across), (rows, columns) = x.shape[2:], conv.kernel_size, conv.padding
    sides = Side.of(height, down, rows), Side.of(width, across, columns)
    blocks = blocks_of(x.detach(), dtype, *sides)
    filters = _filters(weight, blocks.down, blocks.across, dtype)
    y = torch.nn.functional.conv2d(blocks.made.permute(0, 3, 1, 2), filters)
    with torch.no_grad():
        blocks.mend(filters, y)
    return y


def _filters(weight: Tensor, down: Side, across: Side, dtype: torch.dtype) -> Tensor:
    """Filters of blocks, in channels_last, with taps of zero where a block has more than they."""
    behind = [side.block_taps * STEP - side.taps - side.shift for side in (across, down)]
    wide = (across.shift, behind[0], down.shift, behind[1], 0, CHANNELS - weight.shape[1])
    taps = torch.nn.functional.pad(weight, wide).unflatten(3, (-1, STEP)).unflatten(2, (-1, STEP))
    lie = taps.permute(0, 2, 4, 3, 5, 1).to(dtype, memory_format=torch.contiguous_format)
    return lie.flatten(3).permute(0, 3, 1, 2)
