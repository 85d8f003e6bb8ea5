"""Pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import max_pool2d


class MaxPool2d(torch.nn.MaxPool2d):
    """The largest value of each window; as `torch.nn.MaxPool2d`, by `cupyops.max_pool2d`.

    Example:
        >>> cupyops.nn.MaxPool2d(2)(torch.zeros(1, 3, 6, 6)).shape
        torch.Size([1, 3, 3, 3])
    """

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]  # with return_indices
        return max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            ceil_mode=self.ceil_mode,
            return_indices=self.return_indices,
        )
