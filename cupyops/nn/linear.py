"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.norm_lowered import of_autocast
from ..ops._linear import linear, linear_lowered

# Whether float32 weights get their gradients, under autocast, from the product's float32 sums. It waits for a measurement.
WIDE_GRADIENTS = False


class Linear(torch.nn.Linear):
    """y = x @ weight.T + bias; as `torch.nn.Linear`, by `cupyops.linear`.

    Example:
        >>> cupyops.nn.Linear(3, 2)(torch.zeros(4, 3)).shape
        torch.Size([4, 2])
    """

    def forward(self, input: Tensor) -> Tensor:
        if WIDE_GRADIENTS and (half := _of_wide_gradients(self, input)) is not None:
            weight = self.weight
            return linear_lowered(input.to(half), weight, weight.detach().to(half), self.bias)
        return linear(input, self.weight, self.bias)


def _of_wide_gradients(module: Linear, input: Tensor) -> torch.dtype | None:
    """The half type to which autocast lowers a layer whose float32 weight is to get a gradient; None elsewhere."""
    weight, bias = module.weight, module.bias
    if not (isinstance(input, Tensor) and weight.requires_grad and torch.is_grad_enabled()):
        return None
    wide = all(one is None or (one.dtype is torch.float32 and one.device == input.device) for one in (weight, bias))
    if not wide or type(weight) not in (Tensor, torch.nn.Parameter) or input.shape[-1:] != weight.shape[1:]:
        return None
    return of_autocast(input) if input.dtype in (torch.float32, torch.float16, torch.bfloat16) else None
