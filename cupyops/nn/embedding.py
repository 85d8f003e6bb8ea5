"""Tables of vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._embedding import embedding
from .twin import Twin, parameter


class Embedding(Twin, torch.nn.Embedding):
    """Rows of a table by their numbers; as `torch.nn.Embedding`, by `cupyops.embedding`.

    Example:
        >>> cupyops.nn.Embedding(10, 4)(torch.tensor([[1, 2, 9]])).shape
        torch.Size([1, 3, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return embedding(
            input,
            parameter(self, "weight"),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
