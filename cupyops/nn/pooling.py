"""Pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._avg_pool2d import avg_pool2d
from ..ops._max_pool2d import max_pool2d
from .twin import Twin


class AvgPool2d(Twin, torch.nn.AvgPool2d):
    """The average of each window; as `torch.nn.AvgPool2d`, by `cupyops.avg_pool2d`.

    Example:
        >>> cupyops.nn.AvgPool2d(2)(torch.zeros(1, 3, 6, 6)).shape
        torch.Size([1, 3, 3, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class MaxPool2d(Twin, torch.nn.MaxPool2d):
    """The largest value of each window; as `torch.nn.MaxPool2d`, by `cupyops.max_pool2d`.

    Example:
        >>> cupyops.nn.MaxPool2d(2)(torch.zeros(1, 3, 6, 6)).shape
        torch.Size([1, 3, 3, 3])
    """

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]  # with return_indices
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            ceil_mode=self.ceil_mode,
            return_indices=self.return_indices,
        )
