"""Checks of a convolution's arguments, and the shape and memory format of its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._util import arguments
from ..._util.strides import suggested_format
from ...errors import InputError
from ..gemm import gemm


def check_tensors(input: Tensor, weight: Tensor, bias: Tensor | None, groups: Any) -> None:
    """Images, filters and bias fit each other: dtypes, devices, numbers of channels."""
    arguments.tensor("input", input)
    arguments.tensor("weight", weight)
    arguments.optional_tensor("bias", bias)
    arguments.same_device(input=input, weight=weight, bias=bias)
    gemm.check_dtypes(input=input, weight=weight, bias=bias)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        arguments.fail("groups", groups, "an int of at least 1")
    if input.dim() not in (3, 4):
        arguments.fail("input", input, "shape (n, channels, h, w) or (channels, h, w)")
    sizes = weight.shape[:1] if weight.dim() == 4 and weight.shape[1] == 0 else weight.shape
    if weight.dim() != 4 or min(sizes) < 1:
        arguments.fail("weight", weight, "shape (out_channels, channels / groups, kernel_h, kernel_w), none of them 0")
    channels = input.shape[-3]
    if weight.shape[0] % groups:
        arguments.fail("weight", weight, f"a number of output channels that groups={groups} divides")
    if channels != weight.shape[1] * groups:
        raise InputError(
            f"input has shape {tuple(input.shape)}, {channels} channels, expected {weight.shape[1] * groups} to fit "
            f"weight of shape {tuple(weight.shape)} and groups={groups}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(
            f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},), the output channels of weight"
        )


def window(
    input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, list[int], list[int], list[int]]:
    """(input, stride, padding, dilation), as lists of two; padding "same" may pad `input` by a column and a row."""
    stride, dilation = arguments.ints("stride", stride, 2, 1), arguments.ints("dilation", dilation, 2, 1)
    if isinstance(padding, str):
        input, padding = _padding_by_name(input, weight, padding, stride, dilation)
    else:
        padding = arguments.ints("padding", padding, 2, 0)
    for extent, taps, p, d in zip(input.shape[-2:], weight.shape[2:], padding, dilation):
        if d * (taps - 1) + 1 > extent + 2 * p:
            raise InputError(
                f"weight has shape {tuple(weight.shape)}, expected a kernel (dilation {tuple(dilation)}) no larger than "
                f"the padded input: input has shape {tuple(input.shape)}, padding is {tuple(padding)}"
            )
    return input, stride, padding, dilation


def geometry(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[list[int], list[int], list[int]]:
    """(stride, padding, dilation), as lists of two, when all arguments have been checked; padding is no word."""
    check_tensors(input, weight, bias, groups)
    _, steps, pads, dilations = window(input, weight, stride, padding, dilation)
    return steps, pads, dilations


def output_size(size: Any, taps: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Height and width of the result."""
    sides = zip(size, taps, stride, padding, dilation)
    return [(extent + 2 * p - d * (k - 1) - 1) // s + 1 for extent, k, s, p, d in sides]


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the memory format of a convolution's output by cuDNN's rule, which has no channels_last for float64."""
    if x.dtype == torch.float64 and x.device.type == "cuda":
        return torch.contiguous_format
    last = torch.channels_last in (suggested_format(x), suggested_format(weight))
    return torch.channels_last if last else torch.contiguous_format


def _padding_by_name(input: Tensor, weight: Tensor, padding: str, stride: list[int], dilation: list[int]) -> Any:
    """(input, padding) for "valid" and "same"; the odd zero of "same" goes right and below, as PyTorch's."""
    arguments.choice("padding", padding, ("valid", "same"))
    if padding == "valid":
        return input, [0, 0]
    if max(stride) > 1:
        arguments.fail("stride", tuple(stride), 'stride 1, since padding is "same"')
    total = [d * (taps - 1) for taps, d in zip(weight.shape[2:], dilation)]
    if any(t % 2 for t in total):
        input = torch.nn.functional.pad(input, (0, total[1] % 2, 0, total[0] % 2))
    return input, [t // 2 for t in total]
