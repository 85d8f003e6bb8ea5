"""Dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._dropout import dropout
from .twin import Twin


class Dropout(Twin, torch.nn.Dropout):
    """Elements become 0 at random while training; as `torch.nn.Dropout`, by `cupyops.dropout`.

    Example:
        >>> cupyops.nn.Dropout(0.5).eval()(torch.ones(2))
        tensor([1., 1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        if not self.training and type(input) is Tensor and 0 <= self.p <= 1:
            return input
        return dropout(input, self.p, self.training, self.inplace)
