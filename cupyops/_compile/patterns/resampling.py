"""interpolate with a gradient, in Dynamo's graph: each element of the gradient gathers what it is the sum of.

AOTAutograd decomposes it into an indexing of x, whose gradient sums into equal places: PyTorch sorts the indices for that,
which took 487 of the 532 ms of a Segformer's step on an H200; its own kernels for the gradient add with atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import argument, calls, is_sized, replaced, value_of

NAMES = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
NEAREST = {"nearest": "upsample_nearest{}d", "nearest-exact": "_upsample_nearest_exact{}d"}
LINEAR = {
    "linear": "upsample_linear{}d",
    "bilinear": "upsample_bilinear{}d",
    "bicubic": "upsample_bicubic{}d",
    "trilinear": "upsample_trilinear{}d",
}
MOST_TAPS = 24  # along a dimension of grad_y, for an element of x's gradient; with more PyTorch's kernel runs
SHIFT = 16  # bits of the fraction of a step


def resampling(node: Any) -> bool:
    """Interpolate x, which wants a gradient."""
    if not calls(node, F.interpolate):
        return False
    usual = None, None, None, "nearest", None, None, False
    x, size, scale, mode, align, recompute, antialias = (
        argument(node, k, name, default) for k, (name, default) in enumerate(zip(NAMES, usual))
    )
    given, result = value_of(x), value_of(node)
    if mode not in (*NEAREST, *LINEAR) or recompute or antialias or not isinstance(given, Tensor):
        return False
    if not given.requires_grad or result.dtype is not given.dtype or not is_sized(x, node):
        return False
    dims = given.dim() - 2
    size = None if size is None else [size] * dims if isinstance(size, int) else list(size)
    scale = None if scale is None else [float(scale)] * dims if isinstance(scale, (int, float)) else list(scale)
    with node.graph.inserting_before(node):
        new = node.graph.call_function(torch.ops.cupyops.interpolate.default, (x, size, scale, mode, align))
    return replaced(node, new)


@torch.library.custom_op("cupyops::interpolate", mutates_args=())
def interpolate(
    x: Tensor, size: list[int] | None, scale: list[float] | None, mode: str, align_corners: bool | None
) -> Tensor:
    """F.interpolate."""
    return F.interpolate(x, size, scale, mode, align_corners)


@torch.library.custom_op("cupyops::interpolate_backward", mutates_args=())
def interpolate_backward(
    grad_y: Tensor, input_size: list[int], scale: list[float] | None, mode: str, align_corners: bool | None
) -> Tensor:
    """Gradient of x."""
    dims = len(input_size) - 2
    name = (NEAREST.get(mode) or LINEAR[mode]).format(dims)
    corners = () if mode in NEAREST else (bool(align_corners),)
    backward = getattr(torch.ops.aten, f"{name}_backward")
    return backward(  # type: ignore[no-any-return]
        grad_y, list(grad_y.shape[2:]), input_size, *corners, *(scale or (None,) * dims)
    )


interpolate.register_fake(F.interpolate)


@interpolate_backward.register_fake
def _(grad_y: Tensor, input_size: Any, *_: Any) -> Tensor:
    is_last = grad_y.dim() == 4 and grad_y.is_contiguous(memory_format=torch.channels_last)
    return grad_y.new_empty(input_size).to(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def _output_size(x: Tensor, size: list[int] | None, scale: list[float] | None) -> list[int]:
    if size is not None:
        return size
    assert scale is not None
    return [int(n * factor) for n, factor in zip(x.shape[2:], scale)]


def _is_gathered(input_size: list[int], size: list[int], scale: Any, mode: str, align_corners: bool | None) -> bool:
    if mode == "bicubic" or mode in NEAREST or 0 in input_size or 0 in size:
        return False  # PyTorch's kernels of nearest are faster: 116 and 214 us against 305 and 252 on an H200
    scales: list[Any] = scale or [None] * len(size)
    return all(_window(*one, bool(align_corners))[2] <= MOST_TAPS for one in zip(input_size[2:], size, scales))


def decomposed(
    x: Tensor, size: list[int] | None, scale: list[float] | None, mode: str, align_corners: bool | None
) -> Any:
    """PyTorch's decomposition of the forward pass, which fuses with what is beside it."""
    size = _output_size(x, size, scale)
    if not _is_gathered(list(x.shape), size, scale, mode, align_corners):
        return NotImplemented
    function = torch._decomp.decomposition_table[getattr(torch.ops.aten, LINEAR[mode].format(len(size))).default]
    return function(x, size, bool(align_corners), *(scale or ()))


def decomposed_backward(
    grad_y: Tensor, input_size: list[int], scale: list[float] | None, mode: str, align_corners: bool | None
) -> Any:
    """One dimension after the other, the outermost first, where neighbours in memory stay neighbours."""
    size = list(grad_y.shape[2:])
    if not _is_gathered(input_size, size, scale, mode, align_corners):
        return NotImplemented
    is_last = grad_y.dim() == 4 and grad_y.is_contiguous(memory_format=torch.channels_last)
    grad = grad_y.permute(0, 2, 3, 1) if is_last else grad_y  # in the order of memory, in which it is stored in between
    grad = grad.double() if grad.dtype is torch.float64 else grad.float()
    scales: list[Any] = scale or [None] * len(size)
    for k, (n, factor) in enumerate(zip(input_size[2:], scales)):
        grad = _summed(grad, k + (1 if is_last else 2), n, factor, bool(align_corners))
    grad = grad.to(grad_y.dtype)
    return grad.permute(0, 3, 1, 2) if is_last else grad


def _summed(grad: Tensor, dim: int, n: int, factor: float | None, align_corners: bool) -> Tensor:
    """Sum of the elements along a dimension of `grad` that one of n elements was used for, with their weights."""
    many = grad.shape[dim]
    step, first, taps = _window(n, many, factor, align_corners)
    position = _position(n, many, factor, align_corners)
    target = torch.arange(n, device=grad.device)
    start = (target * step + first) >> SHIFT
    total: Any = None
    for k in range(taps):
        at = start + k
        weight = (1 - (position(at.to(grad.dtype)) - target).abs()).clamp(min=0)
        weight = torch.where((at >= 0) & (at < many), weight, 0).to(grad.dtype)
        index: list[Tensor | None] = [None] * dim
        one = torch.ops.aten._unsafe_index(grad, [*index, at.clamp(0, many - 1)])
        one = one * weight.view(-1, *(1,) * (grad.dim() - dim - 1))
        total = one if total is None else total + one
    return total  # type: ignore[no-any-return]


def _position(n: int, many: int, factor: float | None, align_corners: bool) -> Callable[[Any], Any]:
    """The function of an element's number among many that says where it reads, among n: floats, of arrays or tensors."""
    if align_corners:
        step = (n - 1) / (many - 1) if many > 1 else 0.0
        return lambda at: (at * step).clip(0, n - 1)
    step = 1 / factor if factor else n / many
    return lambda at: ((at + 0.5) * step - 0.5).clip(0, n - 1)


@functools.cache
def _window(n: int, many: int, factor: float | None, align_corners: bool) -> tuple[int, int, int]:
    """(step, first, taps): `taps` elements of many from (i * step + first) >> SHIFT on hold all that read element i of n."""
    at, begin, end = np.arange(many), np.full(n, many), np.full(n, -1)
    for kind in (np.float32, np.float64):  # kernels compute places in either, which may differ by an element
        low = np.floor(_position(n, many, factor, align_corners)(at.astype(kind))).astype(np.int64)
        for place in (low, np.minimum(low + 1, n - 1)):
            np.minimum.at(begin, place, at)
            np.maximum.at(end, place, at)
    used = np.flatnonzero(end >= 0)
    step = (many << SHIFT) // n
    first = int(((begin[used] << SHIFT) - used * step).min())
    taps = int((end[used] - ((used * step + first) >> SHIFT)).max()) + 1
    return step, first, taps


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, scale, mode, align = inputs
    ctx.given = list(x.shape), scale, mode, align


def _backward(ctx: Any, grad_y: Tensor) -> Any:
    return interpolate_backward(grad_y, *ctx.given), None, None, None, None


interpolate.register_autograd(_backward, setup_context=_keep)
