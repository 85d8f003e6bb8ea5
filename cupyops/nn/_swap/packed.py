"""Attention of queries, keys and values that are parts of one tensor, as a layer for all three gives them.

Of `q, k, v = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)` PyTorch puts the three gradients into one
tensor, and copies that to where the layer's result lies. Here each is written where it belongs, once: the three are no part
of the graph then, and nobody is told their gradients who asks after the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ..._dispatch.core import library
from ..._dispatch.core.gpu import gpu
from ..._kernel.kernel import executors
from ..._util import observed, torch_private
from ...ops._packed_attention import _packed_attention, are_all_of, packed_attention
from ...ops._scaled_dot_product_attention import _sdpa, scaled_dot_product_attention

# On an H100 a step of GPT-2 took 0.939 of what it takes without, and of ViT 0.931, by three copies where there is one now.
# What there may be between the layer's result and its parts. A hook that somebody has on the result of a module is on the
# layer's own node then, which `linear` of this library has and PyTorch's, a product with a view behind it, has not.
_WORDS = """View UnsafeView Permute Transpose Unbind Split SplitWithSizes Select Slice Squeeze Unsqueeze"""
_VIEWS = {f"{word}Backward0" for word in _WORDS.split()}
_LAYERS = {"LinearBackward", "LinearLoweredBackward"}
_DEEPEST = 8


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`cupyops.scaled_dot_product_attention`, which see."""
    whole, offsets = _whole(query, key, value)
    if whole is not None:
        sizes, strides = query.shape, query.stride()
        if attn_mask is None and not dropout_p and type(is_causal) is bool:
            found = _by_kernels(whole, (query, key, value), offsets, is_causal, options.get("scale"))
            if found is not None:
                return found
        query, key, value = _Parts.apply(whole, sizes, strides, offsets)
    elif attn_mask is None and not dropout_p and _is_pytorch(query, key, value, is_causal, options):
        return F.scaled_dot_product_attention(query, key, value, None, 0.0, is_causal, **options)
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _by_kernels(
    whole: Tensor, parts: tuple[Tensor, Tensor, Tensor], offsets: list[int], is_causal: bool, scale: float | None
) -> Tensor | None:
    """Attention with a gradient that kernels write where it belongs; None where they do not serve, or are slower."""
    if whole.device.type not in executors or torch_private.dispatch_modes():
        return None
    query = parts[0]
    sizes, strides = [*query.shape], [*query.stride()]
    key = (gpu(whole.device), whole.dtype, query.shape, query.stride(), *offsets, is_causal, scale)
    if (serves := _served.get(key)) is None:
        given = whole, sizes, strides, offsets, is_causal, scale
        reasons = (
            _packed_attention.definition.why_not(given),
            _sdpa.definition.why_not((*parts, None, 0.0, is_causal, scale, False)),
        )
        if len(_served) >= _MOST:
            _served.clear()
        serves = _served[key] = reasons == (None, None)
    return packed_attention(whole, sizes, strides, offsets, is_causal, scale) if serves else None


def _is_pytorch(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, options: dict[str, Any]) -> bool:
    """Return whether PyTorch's function is the faster without a gradient, so that it may be called at once."""
    if torch.is_grad_enabled() or type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    if not library.at_once(query):
        return False
    named = options.get("scale"), options.get("enable_gqa", False)
    known = query.shape, key.shape, value.shape, query.stride(), query.dtype, query.get_device(), is_causal, named
    if (found := _pytorchs.get(known)) is None:
        if len(_pytorchs) >= _MOST:
            _pytorchs.clear()
        reason = _sdpa.definition.why_not((query, key, value, None, 0.0, is_causal, *named))
        found = _pytorchs[known] = isinstance(reason, observed.Faster)
    return found


_pytorchs: dict[Any, bool] = {}  # by sizes, dtype, GPU and options
observed.call_when_settings_change(_pytorchs.clear)
_served: dict[Any, bool] = {}  # by GPU, dtype, sizes, strides, offsets and options
_MOST = 256


def _whole(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, list[int]]:
    """A layer's result that three tensors are all of, and where each begins in it; None where there is none such."""
    nothing: tuple[None, list[int]] = None, []
    if is_dynamo_compiling() or not torch.is_grad_enabled():
        return nothing
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return nothing
    whole = query._base
    if whole is None or key._base is not whole or value._base is not whole or type(whole) is not Tensor:
        return nothing
    if torch_private.functorch_active() or torch_private.forward_mode():
        return nothing
    if whole.is_leaf or not (query.requires_grad and key.requires_grad and value.requires_grad):
        return nothing
    if any(torch_private.has_gradient_hooks(one) for one in (query, key, value)):
        return nothing
    if not _are_parts(whole, query, key, value) or not all(_is_view(one, whole) for one in (query, key, value)):
        return nothing
    return whole, [int(one.storage_offset() - whole.storage_offset()) for one in (query, key, value)]


def _are_parts(whole: Tensor, *parts: Tensor) -> bool:
    """Return whether three tensors lie alike, one after the other, are all of a contiguous one, and share none of it."""
    sizes, strides = parts[0].shape, parts[0].stride()
    if any(part.shape != sizes or part.stride() != strides or part.dtype is not whole.dtype for part in parts):
        return False
    offsets = [int(part.storage_offset() - whole.storage_offset()) for part in parts]
    return whole.is_contiguous() and are_all_of(whole, sizes, strides, offsets)


def _is_view(part: Tensor, whole: Tensor) -> bool:
    """Return whether nothing but views is between a layer's result and a part of it."""
    node: Any = part.grad_fn
    for _ in range(_DEEPEST):
        if node is None or type(node).__name__ not in _VIEWS:
            break
        node = node.next_functions[0][0]
    return node is not None and node is whole.grad_fn and type(node).__name__ in _LAYERS


class _Parts(torch.autograd.Function):
    """Three parts of a tensor, by their sizes, strides and offsets."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: Any, strides: Any, offsets: Sequence[int]) -> Any:
        ctx.lie = whole.shape, strides, offsets
        there, start = whole.detach(), whole.storage_offset()
        return tuple(there.as_strided(sizes, strides, start + offset) for offset in offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, strides, offsets = ctx.lie
        first, second, third = sorted(range(3), key=offsets.__getitem__)
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)  # as the elements lie in memory
        place = sum(stride > offsets[second] - offsets[first] for stride in strides)
        parts = [grads[at].permute(order) for at in (first, second, third)]
        return torch.stack(parts, place).view(shape), None, None, None
