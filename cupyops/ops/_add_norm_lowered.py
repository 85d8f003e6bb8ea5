"""add_norm_lowered: a residual sum of float32 and the norm behind it, whose result is of a half type."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch import norm, norm_arguments, norm_lowered, shardings
from .._operator.floating import operator
from .._util import torch_private


@operator("cupyops::add_norm_lowered", mixed=("x",), sharding=shardings.add_norm_lowered)
def _add_norm_lowered(
    residual: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    summed = (residual + x).contiguous()
    in_steps = torch_private.functorch_active() or torch_private.forward_mode()
    if centred:
        layer_norm = norm_arguments.layer_in_steps if in_steps else torch.nn.functional.layer_norm
        y = layer_norm(summed, normalized_shape, weight, bias, norm_arguments.rms_eps(eps, summed.dtype))
    else:
        rms_norm = norm_arguments.rms_in_steps if in_steps else torch.nn.functional.rms_norm
        y = rms_norm(summed, normalized_shape, weight, eps)
    return y.to(x.dtype), summed


@_add_norm_lowered.unsupported
def why_not(residual, x, normalized_shape, weight, bias, eps, centred):
    return norm_lowered.add_unserved(centred, *norm_arguments.split(residual, normalized_shape), residual, x.dtype)


@_add_norm_lowered.forward
def forward(residual, x, normalized_shape, weight, bias, eps, centred):
    rows, size = norm_arguments.split(residual, normalized_shape)
    residual, x, weight, bias = norm_lowered.at_boundaries(residual, x, weight, bias)
    y, summed = torch.empty_like(x), torch.empty_like(residual)
    rstd = residual.new_empty(rows)
    mean = torch.empty_like(rstd) if centred else None
    tensors = norm.Rows(residual, x, weight, bias, summed, y, mean, rstd)
    norm_lowered.add_forward(centred, tensors, rows, size, norm_arguments.rms_eps(eps, torch.float32))
    return (y, summed), (rstd,) if mean is None else (rstd, mean)


@_add_norm_lowered.backward(reads={"bias": ()})
def backward(saved, grad_y, grad_summed, summed, normalized_shape, weight, centred, needs_grad):
    rows, size = norm_arguments.split(summed, normalized_shape)
    grad_y, grad_summed, summed, weight = norm_lowered.at_boundaries(grad_y, grad_summed, summed, weight)
    rstd, mean = (*saved, None)[:2]
    grad = torch.empty_like(summed) if needs_grad.residual or needs_grad.x else None
    grad_x = torch.empty_like(grad_y) if needs_grad.x else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    grad_bias = summed.new_empty(normalized_shape) if needs_grad.bias else None
    tensors = norm.Gradients(grad_y, summed, weight, grad_summed, mean, rstd, grad, grad_weight, grad_bias)
    norm_lowered.add_backward(centred, tensors, grad_x, rows, size)
    return grad if needs_grad.residual else None, grad_x, grad_weight, grad_bias


@_add_norm_lowered.reference_backward
def reference_backward(saved, grad_y, grad_summed, summed, normalized_shape, weight, eps, centred, needs_grad):
    wide = torch.promote_types(summed.dtype, torch.float32)
    rows = tuple(range(-len(normalized_shape), 0))
    s, grad, half = summed.to(wide), grad_y.to(wide), grad_y.dtype
    apart = s - s.mean(rows, keepdim=True) if centred else s
    rstd = (apart.square().mean(rows, keepdim=True) + norm_arguments.rms_eps(eps, summed.dtype)).rsqrt()
    xhat, grad_weight, grad_bias = apart * rstd, None, None
    if needs_grad.weight:
        grad_weight = (grad * xhat).sum_to_size(weight.shape).to(weight.dtype)
    if needs_grad.bias:
        grad_bias = grad.sum_to_size(tuple(normalized_shape))
    grad = grad if weight is None else grad * weight.to(wide)
    along = xhat * (grad * xhat).mean(rows, keepdim=True)
    grad = (grad - grad.mean(rows, keepdim=True) if centred else grad) - along
    grad = (rstd * grad).to(summed.dtype) + grad_summed
    return grad, grad.to(half), grad_weight, grad_bias


@_add_norm_lowered.interface
def add_norm_lowered(
    residual: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """`summed = residual + x`, of float32 and a half type, and its norm, rounded to the half type.

    Nothing is checked: `swap` knows what it gives.

    Args:
        residual: of float32.
        x: of the shape of `residual`, of a half type.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: factors, of float32.
        bias: summands, of float32; of layer_norm alone.
        eps: as of the norm; that of rms_norm may be None.
        centred: whether the norm is layer_norm; else it is rms_norm.

    Returns:
        `(y, summed)`: the norm of the sum, of the dtype of `x`, and the sum, of float32; both contiguous.
    """
    return _add_norm_lowered(residual, x, normalized_shape, weight, bias, eps, centred)
