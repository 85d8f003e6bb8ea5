"""group_norm: normalise groups of channels of each image."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.core.gpu import gpu
from .._dispatch.core.images import accumulator, contiguous, gradient_like, is_empty, is_there, spatial
from .._dispatch.group_norm import group_norm as forms
from .._operator.floating import operator
from .._util import arguments, torch_private
from .._util.strides import aligned, suggested_format
from ..errors import InputError


@operator("cupyops::group_norm", autocast="fp32", sharding=shardings.group_norm)
def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_format: bool = False
) -> Tensor:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # as in layer_norm: PyTorch's double backward asks for it
    if torch_private.functorch_active() or torch_private.forward_mode():
        return _in_steps(x, num_groups, weight, bias, eps)
    # no channels_last: on a CPU PyTorch 2.13 ends the process in its backward where x wants no gradient, and its variance
    # cancels
    flat = x.reshape(*x.shape[:2], spatial(x))
    y = torch.nn.functional.group_norm(flat, num_groups, weight, bias, eps).reshape(x.shape)
    return y.contiguous(memory_format=_memory_format(x, keeps_format))


def _in_steps(x, num_groups, weight, bias, eps):
    """Compute group_norm by elementary operations."""
    wide = x.double() if x.dtype is torch.float64 else x.float()
    grouped = wide.reshape(x.shape[0], num_groups, x.shape[1] // num_groups * spatial(x))
    centred = grouped - grouped.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    shape = (x.shape[1], *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)


@_group_norm.forward
def forward(x, num_groups, weight, bias, eps, keeps_format):
    memory = _memory_format(x, keeps_format)
    as_it_lies = _read_in(memory, x, num_groups)
    (x,) = _laid_out(as_it_lies, x)
    weight, bias = contiguous(weight, bias)
    y = torch.empty_like(x)
    rows = x.shape[0] * num_groups
    mean, rstd = (x.new_empty(shape, dtype=accumulator(x.dtype)) for shape in ((rows, 2), (rows,)))  # and its rounding
    if is_there(x):
        problem = forms.problem_of(x, num_groups, y, nhwc=as_it_lies is not torch.contiguous_format)
        forms.run_forward(problem, gpu(x.device), forms.Forward(x, weight, bias, y, mean, rstd, eps))
    return y.contiguous(memory_format=memory), (mean, rstd)


@_group_norm.backward(reads={"bias": ()})
def backward(saved, grad_y, x, num_groups, weight, bias, keeps_format, needs_grad):
    memory = _memory_format(x, keeps_format)
    as_it_lies = _read_in(memory, x, num_groups)
    grad_y, x = _laid_out(as_it_lies, grad_y, x)
    (weight,) = contiguous(weight)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight, grad_bias = gradient_like(weight, needs_grad.weight, x), gradient_like(bias, needs_grad.bias, x)
    if is_there(x):
        nhwc = as_it_lies is not torch.contiguous_format
        problem = forms.problem_of(x, num_groups, grad_y, grad_x, grad_x=grad_x is not None, nhwc=nhwc)
        of = forms.Backward(grad_y, x, weight, *saved, grad_x, grad_weight, grad_bias)
        forms.run_backward(problem, gpu(x.device), of)
    elif grad_weight is not None and is_empty(x) and x.shape[0]:
        grad_weight.fill_(float("nan"))  # images without pixels: 0 times their rstd, which is NaN
    return None if grad_x is None else grad_x.contiguous(memory_format=memory), grad_weight, grad_bias


def _read_in(memory: torch.memory_format, x: Tensor, num_groups: int) -> torch.memory_format:
    """Memory format in which kernels read and write: that of the result where a form takes it, else contiguous."""
    return memory if is_there(x) and forms.is_served(x, num_groups) else torch.contiguous_format


def _laid_out(memory: torch.memory_format, *tensors: Tensor) -> list[Tensor]:
    """Tensors of a memory format; with channels side by side they begin at 16 bytes, too."""
    found = [one.contiguous(memory_format=memory) for one in tensors]
    if memory is torch.contiguous_format:
        return found
    return [one if aligned(one) else one.clone(memory_format=memory) for one in found]


@_group_norm.unsupported
def unsupported(x, num_groups, weight, bias, eps, keeps_format):
    return forms.too_large(x, num_groups)


@_group_norm.interface(twin=torch.nn.functional.group_norm)
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalisation over groups of channels; as `torch.nn.functional.group_norm` (arXiv:1803.08494).

    Args:
        input: shape (n, channels, *); fp16, bf16, fp32 or fp64.
        num_groups: into which the channels are split.
        weight: factors of shape (channels,), or None for 1.
        bias: summands of shape (channels,), or None for 0.
        eps: added to the (biased) variance.

    Returns:
        Tensor of the shape and dtype of `input`; on a GPU contiguous, as PyTorch's. `cupyops.nn.GroupNorm` keeps
        channels_last.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype or device; `num_groups` does not divide the
            channels; a group is a single value.

    Example:
        >>> cupyops.group_norm(torch.tensor([[1.0, 3.0, 5.0, 9.0]]), 2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    _check(input, num_groups, weight, bias, eps)
    return _group_norm(input, num_groups, weight, bias, float(eps))


@_group_norm.replayed
def group_norm_alike(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """group_norm whose result has the memory format of `input`, on a GPU too: channels_last is read as it lies."""
    _check(input, num_groups, weight, bias, eps)
    return _group_norm(input, num_groups, weight, bias, float(eps), True)


def _check(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    arguments.floating("input", input)
    if input.dim() < 2:
        arguments.fail("input", input, "shape (n, channels, *)")
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, torch.SymInt)) or num_groups < 1:
        arguments.fail("num_groups", num_groups, "an int of at least 1")
    channels = input.shape[1]
    if channels % num_groups:
        arguments.fail("num_groups", num_groups, f"a divisor of the {channels} channels of input")
    if input.numel() and input.shape[0] * channels // num_groups * spatial(input) == 1:
        arguments.fail("input", input, "more than 1 value per channel")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        arguments.fail("eps", eps, "a number")
    given = {name: value for name, value in (("weight", weight), ("bias", bias)) if value is not None}
    for name, value in given.items():
        arguments.floating(name, value)
        if value.dim() != 1 or value.shape[0] != channels:
            arguments.fail(name, value, f"shape ({channels},), the channels of input")
        arguments.same_device(input=input, **{name: value})
    _check_dtypes(input, given)


def _check_dtypes(input: Tensor, given: dict[str, Tensor]) -> None:
    """One dtype for all; or, as in PyTorch, what autocast will cast, and on a CPU float32 parameters for a half type."""
    on_cpu = input.device.type == "cpu"
    if not on_cpu and arguments.autocast(input.device):
        return
    wide = on_cpu and input.dtype.itemsize == 2 and all(value.dtype == torch.float32 for value in given.values())
    for name, value in given.items():
        if not wide and value.dtype != input.dtype:
            raise InputError(f"{name} is {value.dtype}, but input is {input.dtype}; expected one dtype")


def _memory_format(x: Tensor, keeps: bool) -> torch.memory_format:
    """Return the memory format of the result: PyTorch keeps the input's on a CPU alone."""
    return suggested_format(x) if keeps or x.device.type == "cpu" else torch.contiguous_format
