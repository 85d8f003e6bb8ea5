"""batch_norm_act of an input whose moments the kernel that made it has left."""

from __future__ import annotations

from torch import Tensor

from .._dispatch.batch_norm.arguments import check
from .._dispatch.gemm.linear import wants_gradient
from ..ops._batch_norm_act import _batch_norm_act


def batch_norm_act_measured(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    moments: tuple[Tensor, Tensor],
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`batch_norm_act` in training, of an input in channels_last whose moments are there already.

    Args:
        moments: of parts of the pixels: mean and sum of squares of each channel, [parts, channels, 2]; and how many pixels
            each part has. Both of float32. The other arguments are as of `batch_norm_act`.
    """
    check(input, weight, bias, running_mean, running_var, True, momentum, eps)
    keep = activation is not None and wants_gradient(input, weight, bias, residual)
    of = input, weight, bias, residual, running_mean, running_var, float(momentum), float(eps)
    return _batch_norm_act(*of, activation is not None, keep, *moments)
