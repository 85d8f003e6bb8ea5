"""Normalizations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import add_rms_norm, layer_norm, rms_norm


class LayerNorm(torch.nn.LayerNorm):
    """(x - mean) * rstd * weight + bias over the last dimensions; as `torch.nn.LayerNorm`, by `cupyops.layer_norm`.

    Example:
        >>> cupyops.nn.LayerNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """x * rstd * weight over the last dimensions; as `torch.nn.RMSNorm`, by `cupyops.rms_norm`.

    Example:
        >>> cupyops.nn.RMSNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)


class AddRMSNorm(torch.nn.RMSNorm):
    """A residual connection and the norm behind it, by `cupyops.add_rms_norm`; constructor and state of `torch.nn.RMSNorm`.

    Returns:
        `(y, summed)`: the normalised sum of `input` and `residual`, and the sum, which is the next residual.

    Example:
        >>> y, summed = cupyops.nn.AddRMSNorm(4)(torch.ones(2, 4), torch.ones(2, 4))
        >>> summed[0]
        tensor([2., 2., 2., 2.])
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(input, residual, self.normalized_shape, self.weight, self.eps)
