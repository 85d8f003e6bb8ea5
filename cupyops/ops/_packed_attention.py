"""packed_attention: attention of queries, keys and values that are parts of one tensor, whose gradient is one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.attention import attention as kernels
from .._dispatch.attention import launches as attentions
from .._dispatch.attention.scores import attend, sees
from .._dispatch.core.gpu import gpu
from .._operator.define import operator
from .._util import torch_private


@operator("cupyops::packed_attention", dtypes=kernels.HALF, sharding="* -> BHND")
def _packed_attention(
    whole: Tensor, sizes: list[int], strides: list[int], offsets: list[int], is_causal: bool, scale: float | None
) -> Tensor:
    query, key, value = parts_of(whole, sizes, strides, offsets)
    if torch_private.functorch_active() or torch_private.forward_mode():
        return _in_steps(query, key, value, is_causal, scale)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


def parts_of(whole: Tensor, sizes: Sequence[int], strides: Sequence[int], offsets: Sequence[int]) -> list[Tensor]:
    """Views of a tensor, as its elements follow each other, by their sizes, strides and where each begins."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    flat = whole.contiguous().view(-1)
    return [flat.narrow(0, offset, span).as_strided(sizes, strides) for offset in offsets]


def are_all_of(whole: Tensor, sizes: Sequence[int], strides: Sequence[int], offsets: Sequence[int]) -> bool:
    """Return True if three adjacent parts of one layout make up a whole tensor and share no element."""
    one, two, three = sorted(offsets)
    if one or two != three - two or 3 * math.prod(sizes) != whole.numel():
        return False
    expected = 1
    for stride, size in sorted(zip((two, *strides), (3, *sizes))):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _in_steps(query, key, value, is_causal, scale):
    mask = sees((query.shape[2], key.shape[2]), None, 0, query.device) if is_causal else None
    return attend(query, key, value, mask, kernels.scale_of(query, scale))[0]


@_packed_attention.forward
def forward(whole, sizes, strides, offsets, is_causal, scale):
    y, lse = attentions.forward(*parts_of(whole, sizes, strides, offsets), None, 0 if is_causal else None, scale)
    return y, (lse,)


@_packed_attention.backward
def backward(saved, grad_y, whole, sizes, strides, offsets, is_causal, scale, y):
    grad = torch.empty_like(whole, memory_format=torch.contiguous_format)
    given, written = (parts_of(x, sizes, strides, offsets) for x in (whole, grad))
    bounds = None, 0 if is_causal else None
    attentions.backward(*given, bounds, scale, (y, *saved), (grad_y, None), (True, True, True), into=written)
    return grad


@_packed_attention.reference_backward
def reference_backward(saved, grad_y, whole, sizes, strides, offsets, is_causal, scale):
    """Differentiate through scores in memory: PyTorch's fused functions have no second derivative."""
    with torch.enable_grad():
        given = whole.view_as(whole) if whole.requires_grad else whole.detach().requires_grad_()
        y = _in_steps(*parts_of(given, sizes, strides, offsets), is_causal, scale)
    return torch.autograd.grad(y, given, grad_y, create_graph=True)


@_packed_attention.unsupported
def unsupported(whole, sizes, strides, offsets, is_causal, scale):
    if any(one % kernels.VECTOR for one in (*strides[:-1], *offsets)) or strides[-1] != 1:
        return "parts that do not begin at whole vectors"
    if not are_all_of(whole, sizes, strides, offsets):  # the gradient of what is left out is 0, of what is shared a sum
        return "parts that leave out elements, or share some"
    if 0 in sizes or not whole.is_contiguous():
        return "no elements, or a tensor that is not contiguous"
    return kernels.why_not(*parts_of(whole, sizes, strides, offsets), scale, gpu(whole.device))


@_packed_attention.interface
def packed_attention(
    whole: Tensor,
    sizes: list[int],
    strides: list[int],
    offsets: list[int],
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """`scaled_dot_product_attention` of three parts of a contiguous tensor that lie alike and share no element.

    Kernels serve where the parts are all of the tensor.

    Nothing is checked: `swap` knows what it gives.

    Args:
        whole: of a half type.
        sizes, strides: of each part, (batch, heads, rows, elements).
        offsets: where the queries, the keys and the values begin, in elements.
        is_causal: whether a row sees none that follow it.
        scale: of the scores; by default the root of the elements, inverted.
    """
    return _packed_attention(whole, sizes, strides, offsets, is_causal, scale)
