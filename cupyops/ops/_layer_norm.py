"""layer_norm: normalise over the trailing dimensions."""

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


@operator("cupyops::layer_norm", autocast="fp32", sharding=shardings.layer_norm)
def _layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # without it, PyTorch's double backward loses what depends on bias
    if torch_private.functorch_active() or torch_private.forward_mode():
        return norm_arguments.layer_in_steps(x, normalized_shape, weight, bias, eps)
    return torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)


@_layer_norm.forward
def forward(x, normalized_shape, weight, bias, eps):
    rows, size = norm_arguments.split(x, normalized_shape)
    x, weight, bias = norm_arguments.contiguous(x, weight, bias)
    y = torch.empty_like(x)
    mean = x.new_empty(rows, dtype=accumulator(x.dtype))
    rstd = torch.empty_like(mean)
    tensors = norm.Rows(x, weight=weight, bias=bias, y=y, mean=mean, rstd=rstd)
    norm.forward(norm.LAYER_NORM, tensors, rows, size, eps)
    return y, (mean, rstd)


@_layer_norm.backward(reads={"bias": ()})
def backward(saved, grad_y, x, normalized_shape, weight, needs_grad):
    rows, size = norm_arguments.split(x, normalized_shape)
    grad_y, x, weight = norm_arguments.contiguous(grad_y, x, weight)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    grad_bias = x.new_empty(normalized_shape) if needs_grad.bias else None
    tensors = norm.Gradients(grad_y, x, weight, None, *saved, grad_x, grad_weight, grad_bias)
    norm.backward(norm.LAYER_NORM, tensors, rows, size)
    return grad_x, grad_weight, grad_bias


@_layer_norm.interface(twin=torch.nn.functional.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the trailing dimensions; as `torch.nn.functional.layer_norm` (arXiv:1607.06450).

    Args:
        input: shape `(*, *normalized_shape)`; fp16, bf16, fp32 or fp64.
        normalized_shape: the trailing dimensions that are normalised together, at least one.
        weight: factors of shape `normalized_shape`, or None for 1.
        bias: summands of shape `normalized_shape`, or None for 0.
        eps: added to the (biased) variance.

    Returns:
        Contiguous tensor of the shape and dtype of `input`.

    Raises:
        InputError: `input` is not a tensor of a floating-point dtype, its trailing dimensions are not `normalized_shape`,
            or `weight` or `bias` is not of that shape and of the dtype and device of `input`.

    Example:
        >>> cupyops.layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,))
        tensor([[-1.2247,  0.0000,  1.2247]])
    """
    norm_arguments.floating("input", input)
    shape = norm_arguments.shape(normalized_shape, input)
    eps = norm_arguments.number("eps", eps)
    for name, parameter in (("weight", weight), ("bias", bias)):
        norm_arguments.parameter(name, parameter, shape, input)
    _check_dtypes(input, weight, bias)
    return _layer_norm(input, shape, weight, bias, eps)


def _check_dtypes(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """One dtype for all; or, as in PyTorch, what autocast will cast, and on a CPU float32 parameters for a half type."""
    if input.device.type != "cpu" and arguments.autocast(input.device):
        return
    given = {name: p for name, p in (("weight", weight), ("bias", bias)) if p is not None}
    if (
        input.device.type == "cpu"
        and input.dtype.itemsize == 2
        and all(p.dtype == torch.float32 for p in given.values())
    ):
        return
    arguments.same_dtype(input=input, **given)
