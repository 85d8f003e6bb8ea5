"""Normalizations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import layer_norm


class LayerNorm(torch.nn.LayerNorm):
    """(x - mean) * rstd * weight + bias over the last dimensions; as `torch.nn.LayerNorm`, by `cupyops.layer_norm`.

    Example:
        >>> cupyops.nn.LayerNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
