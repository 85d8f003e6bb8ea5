"""Scale and shift: the affine part of a normalization, as a layer of its own. torch.nn has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._scale_shift import scale_shift


class ScaleShift(torch.nn.Module):
    """y = x * weight + bias, with one learnable number of each for everything, or one for each feature.

    Args:
        num_features: None for a scalar weight and bias; an int or a shape for one per element of the last dimensions
            of the input.
        bias: False for no bias.
        device, dtype: of the parameters.

    Attributes:
        weight: shape `()`, `(num_features,)` or `num_features`; 1 to begin with.
        bias: the same shape, or None; 0 to begin with.

    Example:
        >>> cupyops.nn.ScaleShift(3)
        ScaleShift(3, bias=True)
    """

    __constants__ = ["num_features"]
    num_features: tuple[int, ...] | None

    def __init__(
        self,
        num_features: int | Sequence[int] | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = (num_features,) if isinstance(num_features, int) else tuple(num_features or ()) or None
        shape = self.num_features or ()
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0: the layer passes its input through."""
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return scale_shift(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        features = self.num_features
        shown = features[0] if features is not None and len(features) == 1 else features
        return f"{'scalar' if features is None else shown}, bias={self.bias is not None}"
