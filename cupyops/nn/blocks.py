"""Convolutions with steps of images of few channels, as at the beginning of a ResNet: as convolutions of blocks of pixels.

cuDNN reads channels by vectors of eight, and pads three to that many. In blocks of 2 x 2 pixels the three are four times as
many, and a filter of 7 x 7 taps has 4 x 4: a convolution without steps, of half as many multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.conv.image_blocks import CHANNELS, STEP, Side, blocks_of
from .._dispatch.core.gpu import gpu
from .._dispatch.gemm.gemm import HALF
from .._util import torch_private
from .._util.arguments import autocast_dtype
from .._util.strides import is_dry

LEAST = 2**24  # elements of the result, of fewer it is not measured


def is_of_blocks(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """Return whether a convolution of a half type is measured to be faster so; no gradient of the image is to be wanted."""
    if x.dim() != 4 or x.requires_grad or conv.groups != 1 or conv.bias is not None:
        return False
    if conv.stride != (STEP, STEP) or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        return False
    if isinstance(conv.padding, str) or weight.shape[2:] != conv.kernel_size or is_dynamo_compiling():
        return False
    if not is_faster(x, weight, conv.padding, autocast_dtype(x) or x.dtype):
        return False
    return not (torch_private.functorch_active() or torch_private.forward_mode() or torch_private.dispatch_modes())


def is_faster(x: Tensor, weight: Tensor, padding: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a convolution with steps of a block, in a type `dtype`, is measured to be faster so."""
    if not 0 < x.shape[1] < CHANNELS or weight.shape[1:] != (x.shape[1], 7, 7) or max(padding) > 3:
        return False
    if x.shape[2] % STEP or x.shape[3] % STEP or min(x.shape[2:]) < 7:
        return False
    if dtype not in HALF or x.dtype not in (*HALF, torch.float32):
        return False
    if not weight.is_contiguous(memory_format=torch.channels_last) or gpu(x.device).capability != 9:
        return False
    return x.shape[0] * weight.shape[0] * x.shape[2] * x.shape[3] >= LEAST * STEP * STEP


def of_blocks(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution, in channels_last."""
    dtype = autocast_dtype(x) or x.dtype
    assert not isinstance(conv.padding, str)
    blocks = blocks_of(x.detach(), dtype, *_sides(x, weight, conv.padding))
    filters = _filters(weight, blocks.down, blocks.across, dtype)
    y = torch.nn.functional.conv2d(blocks.made.permute(0, 3, 1, 2), filters)
    with torch.no_grad():
        blocks.mend(filters, y)
    return y


def _sides(x: Tensor, weight: Tensor, padding: Sequence[int]) -> tuple[Side, Side]:
    down, across = map(Side.of, x.shape[2:], weight.shape[2:], padding)
    return down, across


def _filters(weight: Tensor, down: Side, across: Side, dtype: torch.dtype) -> Tensor:
    """Filters of blocks, in channels_last, with taps of zero where a block has more than they."""
    behind = [side.block_taps * STEP - side.taps - side.shift for side in (across, down)]
    wide = (across.shift, behind[0], down.shift, behind[1], 0, CHANNELS - weight.shape[1])
    taps = torch.nn.functional.pad(weight, wide).unflatten(3, (-1, STEP)).unflatten(2, (-1, STEP))
    lie = taps.permute(0, 2, 4, 3, 5, 1).to(dtype, memory_format=torch.contiguous_format)
    return lie.flatten(3).permute(0, 3, 1, 2)


# --- as calls of a compiled graph, which give lists of tensors: images and filters are of one half type ---


def conv2d_blocks(x: Tensor, weight: Tensor, padding: list[int]) -> list[Tensor]:
    """The convolution, in channels_last."""
    if gpu(x.device).capability != 9:  # the graph was made where it is
        return [torch.conv2d(x, weight, None, (STEP, STEP), padding).contiguous(memory_format=torch.channels_last)]
    down, across = _sides(x, weight, padding)
    if is_dry(x):
        return [x.new_empty((len(x), down.out, across.out, len(weight))).permute(0, 3, 1, 2)]
    blocks = blocks_of(x, weight.dtype, down, across)
    filters = _filters(weight, down, across, weight.dtype)
    y = torch.conv2d(blocks.made.permute(0, 3, 1, 2), filters)
    blocks.mend(filters, y)
    return [y]


def conv2d_blocks_weight(grad_y: Tensor, x: Tensor, weight: Tensor, padding: list[int]) -> list[Tensor]:
    """Gradient of its filters."""
    mask = [False, True, False]
    if gpu(x.device).capability != 9:
        geometry: Any = None, [STEP, STEP], padding, [1, 1], False, [0, 0], 1
        return [torch.ops.aten.convolution_backward(grad_y, x, weight, *geometry, mask)[1]]
    if is_dry(x):
        return [torch.empty_like(weight)]
    down, across = _sides(x, weight, padding)
    blocks = blocks_of(x, weight.dtype, down, across).made.permute(0, 3, 1, 2)
    filters = _filters(weight, down, across, weight.dtype)
    geometry = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    found = torch.ops.aten.convolution_backward(grad_y, blocks, filters, *geometry, mask)[1]
    taps = found.permute(0, 2, 3, 1).unflatten(3, (STEP, STEP, CHANNELS)).permute(0, 5, 1, 3, 2, 4)
    rows, columns = (slice(side.shift, side.shift + side.taps) for side in (down, across))
    grad = taps.flatten(4).flatten(2, 3)[:, : weight.shape[1], rows, columns]
    return [grad.contiguous(memory_format=torch.channels_last)]
