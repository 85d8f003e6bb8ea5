"""batch_norm: normalise each channel over a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.batch_norm import batch_norm as forms
from .._dispatch.batch_norm.arguments import PARAMETERS, check, dense, is_wide
from .._dispatch.batch_norm.batch_norm import Forward, problem_of
from .._dispatch.core import shardings
from .._dispatch.core.gpu import gpu
from .._dispatch.core.images import accumulator, contiguous, is_there
from .._operator.floating import operator
from .._util import arguments


@operator(
    "cupyops::batch_norm", updates=("running_mean", "running_var"), mixed=PARAMETERS, sharding=shardings.batch_norm
)
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


@_batch_norm.forward
def forward(x, weight, bias, running_mean, running_var, momentum, eps):
    x = dense(x)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[1], dtype=accumulator(x.dtype)) for _ in range(2))
    if is_there(x):
        weight, bias, new_mean, new_var = contiguous(weight, bias, running_mean, running_var)
        wide = is_wide(x, weight, bias, new_mean, new_var)
        of = Forward(x, weight, bias, y, mean, rstd, new_mean, new_var, wide, momentum, eps)
        forms.run(forms.FORWARD, problem_of(x, y), gpu(x.device), of)
        for given, new in ((running_mean, new_mean), (running_var, new_var)):
            if new is not given:
                given.copy_(new)
    return y, (mean, rstd)


@_batch_norm.backward(reads={"bias": ()})
def backward(saved, grad_y, x, weight, bias, eps, needs_grad):
    return forms.gradients(forms.BACKWARD, grad_y, x, weight, bias, (*saved, None, None), eps, needs_grad)


@_batch_norm.unsupported
def unsupported(x, weight, bias, running_mean, running_var, momentum, eps):
    return forms.too_large(x)


@operator("cupyops::batch_norm_inference", mixed=PARAMETERS, sharding=shardings.batch_norm_inference)
def _batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    running_mean, running_var = running_mean.detach(), running_var.detach()
    return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)


@_batch_norm_inference.forward
def forward_inference(x, weight, bias, running_mean, running_var, eps):
    x = dense(x)
    y = torch.empty_like(x)
    if is_there(x):
        weight, bias, running_mean, running_var = contiguous(weight, bias, running_mean, running_var)
        of = Forward(x, weight, bias, y, None, None, running_mean, running_var, is_wide(x, running_mean), 0.0, eps)
        forms.run(forms.INFERENCE, problem_of(x, y), gpu(x.device), of)
    return y, ()


@_batch_norm_inference.backward(reads={"bias": ()})
def backward_inference(saved, grad_y, x, weight, bias, running_mean, running_var, eps, needs_grad):
    statistics = None, None, running_mean, running_var
    return forms.gradients(forms.INFERENCE_BACKWARD, grad_y, x, weight, bias, statistics, eps, needs_grad)


@_batch_norm_inference.unsupported
def unsupported_inference(x, weight, bias, running_mean, running_var, eps):
    return forms.too_large(x)


@_batch_norm.interface(twin=torch.nn.functional.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalisation of each channel; as `torch.nn.functional.batch_norm` (arXiv:1502.03167).

    Args:
        input: shape (n, channels, *); fp16, bf16, fp32 or fp64. Contiguous and channels_last are read as they are.
        running_mean, running_var: shape (channels,). In training they are updated in place, or None; else they are what is
            normalised by.
        weight: factors of shape (channels,), or None for 1.
        bias: summands of shape (channels,), or None for 0. These four are of the dtype of `input`, or all float32 beside a
            half type.
        training: normalise by the mean and (biased) variance of the batch.
        momentum: how far the running statistics move to the batch's mean and (unbiased) variance.
        eps: added to the variance.

    Returns:
        Tensor of the shape, dtype and memory format of `input`.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype or device; not training and without running
            statistics; training on a single value per channel.

    Example:
        >>> x = torch.tensor([[1.0, 5.0], [3.0, 9.0]])
        >>> cupyops.batch_norm(x, None, None, training=True)
        tensor([[-1.0000, -1.0000],
                [ 1.0000,  1.0000]])
    """
    arguments.floating("input", input)
    if input.dim() == 1 and input.numel() == 0:  # no channels: PyTorch takes that too
        return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    check(input, weight, bias, running_mean, running_var, bool(training), momentum, eps)
    if training:
        return _batch_norm(input, weight, bias, running_mean, running_var, float(momentum), float(eps))
    return _batch_norm_inference(input, weight, bias, running_mean, running_var, float(eps))
