"""The arguments of batch_norm and of what follows it: what they are to be, and how they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._util import arguments
from ..._util.strides import suggested_format
from ...errors import InputError

PARAMETERS = ("weight", "bias", "running_mean", "running_var")


def check(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> None:
    """Raise `InputError` unless these are arguments of batch_norm."""
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
        if value is not None and value.requires_grad:
            arguments.fail(name, value, "a tensor that requires no gradient")


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


def check_residual(input: Tensor, residual: Tensor) -> None:
    """Raise `InputError` unless a residual is as `input`."""
    arguments.floating("residual", residual)
    if residual.shape != input.shape:
        arguments.fail("residual", residual, f"a tensor of shape {tuple(input.shape)}, that of input")
    arguments.same_device(input=input, residual=residual)
    arguments.same_dtype(input=input, residual=residual)


def dense(x: Tensor) -> Tensor:
    """`x`, copied where it is neither contiguous nor channels_last."""
    return x if x.is_contiguous() else x.contiguous(memory_format=suggested_format(x))


def is_wide(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return True if a parameter is float32 while `x` has a half type."""
    return x.dtype.itemsize == 2 and any(p is not None and p.dtype == torch.float32 for p in parameters)
