"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._linear import linear


class Linear(torch.nn.Linear):
    """y = x @ weight.T + bias; as `torch.nn.Linear`, by `cupyops.linear`.

    Example:
        >>> cupyops.nn.Linear(3, 2)(torch.zeros(4, 3)).shape
        torch.Size([4, 2])
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
