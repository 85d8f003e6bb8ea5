"""rms_norm: divide by the root of the mean square over the trailing dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.core.images import accumulator
from .._dispatch.norm import arguments as norm_arguments
from .._dispatch.norm import norm
from .._operator.floating import operator
from .._util import torch_private


@operator("cupyops::rms_norm", autocast=norm_arguments.RMS_AUTOCAST, sharding=shardings.rms_norm)
def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    if torch_private.functorch_active() or torch_private.forward_mode():
        return norm_arguments.rms_in_steps(x, normalized_shape, weight, eps)
    return torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)


@_rms_norm.unsupported
def why_not(x, normalized_shape, weight, eps):
    return norm_arguments.mixed(x, weight)


@_rms_norm.forward
def forward(x, normalized_shape, weight, eps):
    rows, size = norm_arguments.split(x, normalized_shape)
    x, weight = norm_arguments.contiguous(x, weight)
    y, rstd = torch.empty_like(x), x.new_empty(rows, dtype=accumulator(x.dtype))
    tensors = norm.Rows(x, weight=weight, y=y, rstd=rstd)
    norm.forward(norm.RMS_NORM, tensors, rows, size, norm_arguments.rms_eps(eps, x.dtype))
    return y, (rstd,)


@_rms_norm.backward
def backward(saved, grad_y, x, normalized_shape, weight, needs_grad):
    rows, size = norm_arguments.split(x, normalized_shape)
    grad_y, x, weight = norm_arguments.contiguous(grad_y, x, weight)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    tensors = norm.Gradients(grad_y, x, weight, rstd=saved[0], grad_x=grad_x, grad_weight=grad_weight)
    norm.backward(norm.RMS_NORM, tensors, rows, size)
    return grad_x, grad_weight


@_rms_norm.interface(twin=torch.nn.functional.rms_norm)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root mean square normalisation over the trailing dimensions; as `torch.nn.functional.rms_norm` (arXiv:1910.07467).

    Args:
        input: shape `(*, *normalized_shape)`; fp16, bf16, fp32 or fp64.
        normalized_shape: the trailing dimensions that are normalised together, at least one.
        weight: factors of shape `normalized_shape`, or None for 1.
        eps: added to the mean square; None for the machine epsilon of the type computed in: fp64's of fp64, else fp32's.

    Returns:
        Contiguous tensor of the shape and dtype of `input`.

    Raises:
        InputError: `input` is not a tensor of a floating-point dtype, its trailing dimensions are not `normalized_shape`,
            `weight` is not a floating-point tensor of that shape on the device of `input`, or `eps` is not a number.

    Example:
        >>> cupyops.rms_norm(torch.tensor([[1.0, 2.0, 2.0]]), (3,), torch.tensor([1.0, 1.0, 0.0]))
        tensor([[0.5774, 1.1547, 0.0000]])
    """
    shape, eps = norm_arguments.rms_checked(input, normalized_shape, weight, eps)
    return _rms_norm(input, shape, weight, eps)
