"""Memory layouts: the strides that PyTorch's own operators give, without a copy where none is needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def restride(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """`tensor` with the given (dense) strides and no negative bit: itself if it is so, else one copy."""
    if tensor.stride() == strides and not tensor.is_neg():
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def alike(first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """An empty output for an elementwise kernel, then each input laid out as the output is.

    The output has the strides that PyTorch's elementwise operators give: those of the first input where it is dense
    (channels_last stays so), else dense in the same order of dimensions. Every tensor can then be read as a flat array.
    """
    output = torch.empty_like(first)
    if not others and first.is_contiguous():
        return output, first
    strides = output.stride()
    return (output, restride(first, strides), *[restride(tensor, strides) for tensor in others])
