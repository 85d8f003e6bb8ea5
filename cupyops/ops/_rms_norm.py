"""rms_norm: divide by the root of the mean square over the trailing dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._dispatch import norms
from .._operator.operator import operator

_kernels = norms.kernels("rms_norm")


@operator("cupyops::rms_norm", autocast=norms.RMS_AUTOCAST)
def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return norms.rms_in_steps(x, normalized_shape, weight, eps)
    return torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)


@_rms_norm.unsupported
def _(x, normalized_shape, weight, eps):
    return norms.mixed(x, weight)


@_rms_norm.forward
def _(x, normalized_shape, weight, eps):
    rows, size = norms.split(x, normalized_shape)
    x, weight = norms.contiguous(x, weight)
    y, rstd = torch.empty_like(x), x.new_empty(rows, dtype=norms.acc(x.dtype))
    norms.forward(_kernels, (x,), (weight, y, rstd), rows, size, norms.rms_eps(eps, x.dtype))
    return y, (rstd,)


@_rms_norm.backward
def _(saved, grad_y, x, normalized_shape, weight, needs_grad):
    rows, size = norms.split(x, normalized_shape)
    grad_y, x, weight = norms.contiguous(grad_y, x, weight)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    norms.backward(_kernels, norms.Gradients((grad_y, x, weight), saved, grad_x, (grad_weight,)), rows, size)
    return grad_x, grad_weight


@_rms_norm.interface
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
    shape, eps = norms.rms_checked(input, normalized_shape, weight, eps)
    return _rms_norm(input, shape, weight, eps)
