"""batch_norm: normalise each channel over a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch import batch_norm as forms
from .._dispatch import shardings
from .._dispatch.batch_norm import Backward, Forward, problem_of
from .._dispatch.gpu import gpu
from .._dispatch.images import accumulator, contiguous, gradient_like, is_there
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import suggested_format
from ..errors import InputError

PARAMETERS = ("weight", "bias", "running_mean", "running_var")


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
    x = _dense(x)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[1], dtype=accumulator(x.dtype)) for _ in range(2))
    if is_there(x):
        weight, bias, new_mean, new_var = contiguous(weight, bias, running_mean, running_var)
        wide = _is_wide(x, weight, bias, new_mean, new_var)
        of = Forward(x, weight, bias, y, mean, rstd, new_mean, new_var, wide, momentum, eps)
        forms.run(forms.FORWARD, problem_of(x, y), gpu(x.device), of)
        for given, new in ((running_mean, new_mean), (running_var, new_var)):
            if new is not given:
                given.copy_(new)
    return y, (mean, rstd)


@_batch_norm.backward(reads={"bias": ()})
def backward(saved, grad_y, x, weight, bias, eps, needs_grad):
    return _gradients(forms.BACKWARD, grad_y, x, weight, bias, (*saved, None, None), eps, needs_grad)


def _gradients(directions, grad_y, x, weight, bias, statistics, eps, needs_grad):
    """grad_x, grad_weight and grad_bias, of mean, rstd, running_mean and running_var."""
    x = _dense(x)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    parameters = gradient_like(weight, needs_grad.weight, x), gradient_like(bias, needs_grad.bias, x)
    if is_there(x):
        weight, *statistics = contiguous(weight, *statistics)
        wide = _is_wide(x, weight, bias, *statistics[2:])
        of = Backward(grad_y, x, weight, *statistics, grad_x, *parameters, wide, eps)
        problem = problem_of(x, grad_y, grad_x, grad_x=grad_x is not None)
        forms.run(directions, problem, gpu(x.device), of)
    return grad_x, *parameters


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
    x = _dense(x)
    y = torch.empty_like(x)
    if is_there(x):
        weight, bias, running_mean, running_var = contiguous(weight, bias, running_mean, running_var)
        of = Forward(x, weight, bias, y, None, None, running_mean, running_var, _is_wide(x, running_mean), 0.0, eps)
        forms.run(forms.INFERENCE, problem_of(x, y), gpu(x.device), of)
    return y, ()


@_batch_norm_inference.backward(reads={"bias": ()})
def backward_inference(saved, grad_y, x, weight, bias, running_mean, running_var, eps, needs_grad):
    statistics = None, None, running_mean, running_var
    return _gradients(forms.INFERENCE_BACKWARD, grad_y, x, weight, bias, statistics, eps, needs_grad)


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
    _check(input, weight, bias, running_mean, running_var, bool(training), momentum, eps)
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is not None and value.requires_grad:
            arguments.fail(name, value, "a tensor that requires no gradient")
    if training:
        return _batch_norm(input, weight, bias, running_mean, running_var, float(momentum), float(eps))
    return _batch_norm_inference(input, weight, bias, running_mean, running_var, float(eps))


def _check(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> None:
    if input.dim() < 2:
        arguments.fail("input", input, "shape (n, channels, *)")
    given = zip(PARAMETERS, (weight, bias, running_mean, running_var))
    _check_parameters(input, {name: value for name, value in given if value is not None})
    for name, number in (("momentum", momentum), ("eps", eps)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            arguments.fail(name, number, "a number")
    if eps < 0 or (training and eps == 0):
        arguments.fail("eps", eps, "a number above 0" if training else "a number of at least 0")
    if training and input.numel() == input.shape[1]:
        arguments.fail("input", input, "more than 1 value per channel when training")
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is None and not training:
            arguments.fail(name, value, "a tensor, when not training")


def _check_parameters(input: Tensor, given: dict[str, Tensor]) -> None:
    wide = input.dtype.itemsize == 2 and all(value.dtype == torch.float32 for value in given.values())
    for name, value in given.items():
        arguments.floating(name, value)
        if value.dim() != 1 or value.shape[0] != input.shape[1]:
            arguments.fail(name, value, f"shape ({input.shape[1]},), the channels of input")
        arguments.same_device(input=input, **{name: value})
        if not wide and value.dtype != input.dtype:
            raise InputError(
                f"{name} is {value.dtype}, but input is {input.dtype}; expected one dtype, or beside a half type "
                "float32 for all of weight, bias, running_mean and running_var"
            )


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous(memory_format=suggested_format(x))


def _is_wide(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the parameters are float32 beside a half type."""
    return x.dtype.itemsize == 2 and any(p is not None and p.dtype == torch.float32 for p in parameters)
