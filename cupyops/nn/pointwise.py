"""Convolutions of one tap of images in channels_last, with what their neighbours want of them.

The product that a normalisation over the batch reads leaves the moments of each channel, so that no pass over its result has
to find them. And where an image has another reader, as a residual connection is one, the gradient of the product adds what
that one gives, which autograd would do in a pass of its own.

All of this is for CUDA graphs, where the host's time does not count: by itself a step of ResNet-50 took 43 ms with it on
an H100's host, and 24 without, where the GPU needs 20 and 22.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.conv.pointwise_fused import ADDED, MOMENTS, add, measure, problem_of
from .._dispatch.core import library
from .._dispatch.core.forms import Launch, Library
from .._dispatch.core.gpu import gpu
from .._dispatch.gemm import gemm
from .._kernel.graph import capturing, warming
from .._kernel.kernel import executors
from .._util import torch_private
from .._util.arguments import autocast_dtype
from .._util.strides import aligned

_LAST = torch.channels_last
_GEOMETRY: Any = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # of torch.ops.aten.convolution_backward


def pointwise(conv: torch.nn.Conv2d, x: Tensor, measured: bool, shared: bool) -> tuple[Tensor, Tensor] | None:
    """A convolution's result, and its image for the next reader; None where none of this is faster, or can be,
    and where no graph is made.

    Args:
        conv: of exactly `cupyops.nn.Conv2d`, whose forward nobody would miss.
        x: the image.
        measured: whether a normalisation over the batch will ask for the moments of the result.
        shared: whether the image has another reader, to whom the second result is given.
    """
    if not (measured or shared) or is_dynamo_compiling() or not graphed() or type(x) is not Tensor:
        return None  # before the weight is read, which would be a node of a graph that torch.fx records
    weight = conv.weight
    if not _is_pointwise(conv, x, weight):
        return None
    card, filters = gpu(x.device), weight.shape[0]
    moments = MOMENTS.plan(problem_of(x, filters, False), card) if measured else _NONE
    added = ADDED.plan(problem_of(x, filters, True), card) if shared and x.requires_grad else _NONE
    if isinstance(moments, Library) and isinstance(added, Library):
        return None
    y, again, *found = _Pointwise.apply(x, weight, moments, added)
    if found[0] is not None:
        y._cupyops_moments = _Moments(_state(y), (found[0], found[1]))
    return y, x if again is None else again


_NONE = Library("not asked for")


def graphed() -> bool:
    """Return whether a CUDA graph is being captured, or a call before its capture runs."""
    return capturing() or warming()


def _is_pointwise(conv: torch.nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    if type(weight) is not torch.nn.Parameter:
        return False
    if x.dim() != 4 or x.dtype not in gemm.HALF or x.device.type not in executors or not torch.is_grad_enabled():
        return False
    if conv.bias is not None or conv.stride != (1, 1) or conv.padding not in ((0, 0), "valid", "same"):
        return False
    if conv.groups != 1 or weight.shape[1:] != (x.shape[1], 1, 1) or weight.device != x.device:
        return False
    under = autocast_dtype(x)
    if weight.dtype is not x.dtype and (weight.dtype is not torch.float32 or under is not x.dtype):
        return False
    if under not in (None, x.dtype) or not (x.requires_grad or weight.requires_grad):
        return False
    if not x.numel() or not x.is_contiguous(memory_format=_LAST) or not aligned(x) or not aligned(weight):
        return False
    return not (torch_private.functorch_active() or torch_private.forward_mode() or torch_private.dispatch_modes())


class _Pointwise(torch.autograd.Function):
    """The convolution; its image again, which is given back for another reader, where a launch adds what that one gives;
    and moments with their counts, where a launch leaves them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, moments: Launch[Any] | Library, added: Launch[Any] | Library
    ) -> Any:
        half = weight.to(x.dtype)
        filters = half.view(half.shape[:2])
        images, _, height, width = x.shape
        found: tuple[Any, Any] = None, None
        if isinstance(moments, Library):
            y = torch.conv2d(x, half)
        else:
            y = torch.empty((images, len(filters), height, width), dtype=x.dtype, device=x.device, memory_format=_LAST)
            found = measure(moments, x, filters, y)
            ctx.mark_non_differentiable(*found)
        ctx.save_for_backward(x, weight, half)
        ctx.added = added
        ctx.set_materialize_grads(False)
        return y, None if isinstance(added, Library) else x, *found

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, more: Tensor | None, *_: Any) -> Any:
        x, weight, half = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if grad_y is None:
            return more, None, None, None
        if torch.is_grad_enabled():
            of_image, of_weight = _differentiable(grad_y, x, weight)
            return of_image if more is None else of_image + more, of_weight, None, None
        grad_y = grad_y.contiguous(memory_format=_LAST)
        grad_x = _of_image(grad_y, x, half, more, ctx.added) if needs_x else None
        return grad_x, _of_weight(grad_y, x, weight, half) if needs_weight else None, None, None


def _differentiable(grad_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by functions that have gradients."""
    of = torch.ops.aten.convolution_backward(grad_y, x, weight.to(x.dtype), *_GEOMETRY, [True, True, False])
    return of[0], of[1].to(weight.dtype)


def _of_image(grad_y: Tensor, x: Tensor, half: Tensor, more: Tensor | None, added: Launch[Any] | Library) -> Tensor:
    if more is None or isinstance(added, Library) or not aligned(grad_y):
        grad_x: Tensor = torch.ops.aten.convolution_backward(grad_y, x, half, *_GEOMETRY, [True, False, False])[0]
        return grad_x if more is None else grad_x + more
    more = more.contiguous(memory_format=_LAST)
    grad_x = torch.empty_like(x, memory_format=_LAST)
    add(added, grad_y, half, more if aligned(more) else more.clone(), grad_x)
    return grad_x


def _of_weight(grad_y: Tensor, x: Tensor, weight: Tensor, half: Tensor) -> Tensor:
    """Compute the weight's gradient; for a wider weight as a float32 product, with no rounding or cast on the way."""
    if weight.dtype is x.dtype:
        found: Tensor = torch.ops.aten.convolution_backward(grad_y, x, half, *_GEOMETRY, [False, True, False])[1]
        return found
    grad_weight = torch.empty_like(weight)
    rows, pixels = (one.permute(0, 2, 3, 1).flatten(0, 2) for one in (grad_y, x))
    library.multiply_in_full(rows.T, pixels, grad_weight.view(weight.shape[:2]))
    return grad_weight


# --- what a convolution leaves for a normalisation --------------------------------------------------------------------


class _Moments:
    """The moments of a result, which lie in its `_cupyops_moments`; `of`: what it was: see `_state`."""

    __slots__ = ("given", "of")

    def __init__(self, of: tuple[Any, ...], given: tuple[Tensor, Tensor]) -> None:
        self.of, self.given = of, given

    def __reduce__(self) -> Any:
        return _nothing, ()  # a tensor is pickled and copied without them


def _nothing() -> None:
    return None


def moments_of(x: Any) -> tuple[Tensor, Tensor] | None:
    """The moments that a convolution has left with its result; None where there are none, or where it has changed since."""
    left: _Moments | None = getattr(x, "_cupyops_moments", None)
    if is_dynamo_compiling() or left is None or left.of != _state(x):
        return None
    return left.given


def _state(y: Tensor) -> tuple[Any, ...]:
    """Key of cached moments: version and memory of `y`, and the stream, since those made on another would need a wait."""
    return y._version, y.data_ptr(), torch_private.current_stream(y.device.index) if y.is_cuda else None
