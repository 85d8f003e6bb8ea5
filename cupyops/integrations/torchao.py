"""torchao: weights that it has quantised as `cupyops.quantized_linear` takes them.

`cupyops.swap(model)` needs none of it: it finds linear layers that `torchao.quantization.quantize_` has made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.gemm.quantized import MIDDLE
from ..errors import InputError
from ..nn._swap.quantized import held

__all__ = ["arguments"]


def arguments(weight: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weight, scale and zero point of `cupyops.quantized_linear` for a tensor of torchao.

    Those of `Int8WeightOnlyConfig` and `Float8WeightOnlyConfig` are the tensors that it holds. `Int4Tensor`, of
    `Int4WeightOnlyConfig` with the plain packing, has signed numbers and zero points among the weights: both are copied.

    Args:
        weight: an `Int8Tensor`, `Float8Tensor` or `Int4Tensor`, which leaves activations as they are.

    Returns:
        tuple of weight, scale and zero point, which is None for those of 8 bits.

    Raises:
        InputError: `weight` is of another class, packing or block size, or is to quantise activations too.

    Example:
        >>> layer = torch.nn.Linear(64, 32)  # doctest: +SKIP
        >>> torchao.quantization.quantize_(layer, torchao.quantization.Int8WeightOnlyConfig())  # doctest: +SKIP
        >>> y = cupyops.quantized_linear(x, *cupyops.integrations.torchao.arguments(layer.weight))  # doctest: +SKIP
    """
    if (found := held(weight)) is not None:
        zero_point = getattr(weight, "zero_point", None)
        if zero_point is None or not bool(zero_point.any()):
            return *found, None
    if type(weight).__name__ == "Int4Tensor" and type(weight).__module__.startswith("torchao."):
        plain = weight.act_pre_scale is None and weight.activation_dtype is torch.bfloat16 and weight.qdata.dim() == 2
        if plain:
            scale, offset = (one.t().float().contiguous() for one in (weight.scale, weight.zero_point))
            # (number + 8 - zero_point) scale = number scale + offset
            zero_point = MIDDLE - offset / scale if bool(offset.any()) else None
            return weight.qdata.view(torch.uint8) ^ 0x88, scale, zero_point
    raise InputError(
        f"weight is of {type(weight).__name__}, expected torchao's Int8Tensor or Float8Tensor, with scales for rows or for "
        "groups of a row, or its Int4Tensor, plain; without quantised activations"
    )
