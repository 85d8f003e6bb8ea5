"""interpolate with a gradient, in Dynamo's graph: PyTorch's own kernels, forward and backward.

AOTAutograd decomposes it into an indexing of x, whose gradient sums into equal places: PyTorch sorts the indices for that,
which took 487 of the 532 ms of a Segformer's step on an H200.
"""

from __future__ import annotations

from typing import Any

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


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, scale, mode, align = inputs
    ctx.given = list(x.shape), scale, mode, align


def _backward(ctx: Any, grad_y: Tensor) -> Any:
    return interpolate_backward(grad_y, *ctx.given), None, None, None, None


interpolate.register_autograd(_backward, setup_context=_keep)
