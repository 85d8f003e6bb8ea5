"""Convolutions with steps of images of few channels, as at the beginning of a ResNet: as convolutions of blocks of pixels.

cuDNN reads channels by vectors of eight, and pads three to that many. In blocks of 2 x 2 pixels the three are four times as many,
and a filter of 7 x 7 taps has 4 x 4: a convolution without steps of a half as many multiplications.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.gpu import gpu
from .._dispatch.norm_lowered import of_autocast
from .._util import torch_private

FEW = 4  # channels, to which others are filled up
STEP = 2
LEAST = 2**24  # elements of the result, of fewer it is not measured


def is_of_blocks(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution is measured to be faster so, and no gradient of the image is wanted.

    On an H100 ResNet-50's first takes 0.55 of the time, forward and backward.
    """
    if x.dim() != 4 or x.requires_grad or not 0 < x.shape[1] < FEW or conv.groups != 1 or conv.bias is not None:
        return False
    if conv.stride != (STEP, STEP) or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        return False
    if isinstance(conv.padding, str) or conv.kernel_size not in ((7, 7), (5, 5)) or max(conv.padding) > 3:
        return False
    if weight.shape[1:] != (x.shape[1], *conv.kernel_size) or x.shape[2] % STEP or x.shape[3] % STEP:
        return False
    if not weight.is_contiguous(memory_format=torch.channels_last) or is_dynamo_compiling():
        return False
    if gpu(x.device).capability != 9 or x.shape[0] * weight.shape[0] * x.shape[2] * x.shape[3] < LEAST * STEP * STEP:
        return False
    return not (torch_private.functorch_active() or torch_private.forward_mode() or torch_private.dispatch_modes())


def of_blocks(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution."""
    dtype = of_autocast(x) or x.dtype
    places = [_Axis(size, taps, pad) for size, taps, pad in zip(x.shape[2:], conv.kernel_size, conv.padding)]  # type: ignore
    return torch.nn.functional.conv2d(_blocks(x, places, dtype), _filters(weight, places, dtype))


class _Axis:
    """Along one side of an image, in blocks: how many there are, how many zeros are before the first, and a filter's taps.

    Attributes:
        shift: taps of zero before the filter's first, which begins within a block.
    """

    def __init__(self, size: int, taps: int, pad: int) -> None:
        self.before = -(-pad // STEP)
        self.shift = self.before * STEP - pad
        self.taps = -(-(taps + self.shift) // STEP)
        self.behind = self.taps * STEP - taps - self.shift
        self.blocks = (size + 2 * pad - taps) // STEP + self.taps
        self.own = min(size // STEP, self.blocks - self.before)


def _blocks(x: Tensor, places: Any, dtype: torch.dtype) -> Tensor:
    """[n, channels of a block, blocks down, blocks across], in channels_last."""
    (down, across), (images, channels, *_) = places, x.shape
    with torch.no_grad():
        shape = images, down.blocks, across.blocks, STEP, STEP, FEW
        made = torch.zeros(shape, dtype=dtype, device=x.device)
        there = x[:, :, : down.own * STEP, : across.own * STEP].unflatten(3, (-1, STEP)).unflatten(2, (-1, STEP))
        room = made[:, down.before : down.before + down.own, across.before : across.before + across.own]
        room[..., :channels].copy_(there.permute(0, 2, 4, 3, 5, 1))
    return made.flatten(3).permute(0, 3, 1, 2)


def _filters(weight: Tensor, places: Any, dtype: torch.dtype) -> Tensor:
    """The same of filters, with taps of zero where a block has more."""
    down, across = places
    wide = (across.shift, across.behind, down.shift, down.behind, 0, FEW - weight.shape[1])
    taps = torch.nn.functional.pad(weight, wide).unflatten(3, (-1, STEP)).unflatten(2, (-1, STEP))
    lie = taps.permute(0, 2, 4, 3, 5, 1).to(dtype, memory_format=torch.contiguous_format)
    return lie.flatten(3).permute(0, 3, 1, 2)
