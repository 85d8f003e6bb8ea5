"""add_rms_norm: a residual connection and the rms_norm behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.core.images import accumulator
from .._dispatch.norm import arguments as norm_arguments
from .._dispatch.norm import norm
from .._operator.floating import operator
from .._util import arguments, torch_private


@operator("cupyops::add_rms_norm", autocast=norm_arguments.RMS_AUTOCAST, sharding=shardings.add_rms_norm)
def _add_rms_norm(
    x: Tensor, residual: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    summed = (x + residual).contiguous()
    if torch_private.functorch_active() or torch_private.forward_mode():
        return norm_arguments.rms_in_steps(summed, normalized_shape, weight, eps), summed
    return torch.nn.functional.rms_norm(summed, normalized_shape, weight, eps), summed


@_add_rms_norm.unsupported
def why_not(x, residual, normalized_shape, weight, eps):
    return norm_arguments.mixed(x, weight)


@_add_rms_norm.forward
def forward(x, residual, normalized_shape, weight, eps):
    rows, size = norm_arguments.split(x, normalized_shape)
    x, residual, weight = norm_arguments.contiguous(x, residual, weight)
    y, summed = torch.empty_like(x), torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=accumulator(x.dtype))
    tensors = norm.Rows(x, residual, weight, summed=summed, y=y, rstd=rstd)
    norm.forward(norm.ADD_RMS_NORM, tensors, rows, size, norm_arguments.rms_eps(eps, x.dtype))
    return (y, summed), (rstd,)


@_add_rms_norm.backward
def backward(saved, grad_y, grad_summed, summed, normalized_shape, weight, needs_grad):
    rows, size = norm_arguments.split(summed, normalized_shape)
    grad_y, grad_summed, weight = norm_arguments.contiguous(grad_y, grad_summed, weight)
    grad = torch.empty_like(summed) if needs_grad.x or needs_grad.residual else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    tensors = norm.Gradients(grad_y, summed, weight, grad_summed, None, *saved, grad, grad_weight)
    norm.backward(norm.ADD_RMS_NORM, tensors, rows, size)
    return grad if needs_grad.x else None, grad if needs_grad.residual else None, grad_weight


@_add_rms_norm.reference_backward
def reference_backward(saved, grad_y, grad_summed, summed, normalized_shape, weight, eps, needs_grad):
    wide = torch.promote_types(summed.dtype, torch.float32)
    rows = tuple(range(-len(normalized_shape), 0))
    s, grad = summed.to(wide), torch.zeros_like(summed, dtype=wide) if grad_y is None else grad_y.to(wide)
    rstd = (s.square().mean(rows, keepdim=True) + norm_arguments.rms_eps(eps, summed.dtype)).rsqrt()
    xhat, grad_weight = s * rstd, None
    if needs_grad.weight:
        grad_weight = (grad * xhat).sum_to_size(weight.shape).to(weight.dtype)
    grad = grad if weight is None else grad * weight.to(wide)
    grad = (rstd * (grad - xhat * (grad * xhat).mean(rows, keepdim=True))).to(summed.dtype)
    grad = grad if grad_summed is None else grad + grad_summed
    return grad, grad, grad_weight


@_add_rms_norm.interface
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`summed = input + residual` and its `rms_norm`, in one kernel each way: what stands between a transformer's blocks.

    The sum is rounded to its dtype before it is normalised, so the results are those of the two operators. Under autocast
    both results are float32, as those of rms_norm are.

    Args:
        input: shape `(*, *normalized_shape)`; fp16, bf16, fp32 or fp64.
        residual: of the shape and dtype of `input`.
        normalized_shape: the trailing dimensions that are normalised together, at least one.
        weight: factors of shape `normalized_shape`, or None for 1.
        eps: as that of `rms_norm`.

    Returns:
        `(y, summed)`: `rms_norm(summed, normalized_shape, weight, eps)` and the sum, the next residual; both contiguous,
        of the shape and dtype of `input`.

    Raises:
        InputError: as `rms_norm`; or `residual` is not of the shape, dtype and device of `input`.

    Example:
        >>> y, summed = cupyops.add_rms_norm(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 2.0]), (3,))
        >>> y, summed
        (tensor([0.5774, 1.1547, 1.1547]), tensor([1., 2., 2.]))
    """
    shape, eps = norm_arguments.rms_checked(input, normalized_shape, weight, eps)
    _check_residual(input, residual)
    return _add_rms_norm(input, residual, shape, weight, eps)


def _check_residual(input: Tensor, residual: Tensor) -> None:
    norm_arguments.floating("residual", residual)
    if residual.shape != input.shape:
        arguments.fail("residual", residual, f"a tensor of shape {tuple(input.shape)}, that of input")
    arguments.same_device(input=input, residual=residual)
    arguments.same_dtype(input=input, residual=residual)
