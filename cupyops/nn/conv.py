"""Convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import conv2d


class Conv2d(torch.nn.Conv2d):
    """2D convolution (cross-correlation); as `torch.nn.Conv2d`, by `cupyops.conv2d`.

    A `padding_mode` other than "zeros" pads with `torch.nn.functional.pad` first.

    Example:
        >>> cupyops.nn.Conv2d(1, 8, 3, padding=1)(torch.zeros(2, 1, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: str | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            input = torch.nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)
