"""Attention in Dynamo's graph: masks that are known words, and heads that need not be repeated."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...ops._scaled_dot_product_attention import _sdpa
from .graph import are_written, argument, calls, constant, replaced, value_of

ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


def attention(node: Any) -> bool:
    """scaled_dot_product_attention: a constant mask that is causal becomes that word, repeated heads are not repeated.

    Models of transformers make their mask from positions, and repeat the heads of keys and values. With the mask in memory
    PyTorch's kernels are slow (an H200, 8 layers of 4 x 2048 tokens, 32 heads of 64: 17.8 ms a step, without it 4.9).
    """
    if not calls(node, *ATTENTION):
        return False
    query, key, value = (argument(node, k, name) for k, name in enumerate(("query", "key", "value")))
    mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    causal, scale = bool(argument(node, 5, "is_causal", False)), argument(node, 6, "scale")
    grouped = bool(argument(node, 7, "enable_gqa", False))
    of = value_of(query)
    if not isinstance(of, Tensor) or of.dim() != 4 or dropout:
        return False
    kind = _kind_of_mask(mask) if mask is not None else None
    if mask is not None and kind is None:
        return False
    causal = causal or kind == "causal"
    single = (key, value) if grouped else tuple(map(_repeated_heads, (key, value)))
    if None in single:
        single = key, value
    with node.graph.inserting_before(node):
        if _kernels_serve(query, single[0], single[1], causal, scale):
            named = {"causal": "top_left" if causal else None, "scale": scale}
            new = node.graph.call_function(ops.attention, (query, *single), named)
        elif mask is not None:
            named = {"is_causal": causal, "scale": scale, "enable_gqa": grouped}
            new = node.graph.call_function(F.scaled_dot_product_attention, (query, key, value), named)
        else:
            return False
    return replaced(node, new)


def _kernels_serve(query: Any, key: Any, value: Any, causal: bool, scale: Any) -> bool:
    """Return True if our kernels are measured at least as fast as PyTorch's, with backward if there is one."""
    values = [value_of(one) for one in (query, key, value)]
    if any(not isinstance(one, Tensor) or one.dtype not in (torch.float16, torch.bfloat16) for one in values):
        return False
    grouped = values[0].shape[1] != values[1].shape[1]
    with torch.set_grad_enabled(any(one.requires_grad for one in values)):
        return _sdpa.definition.refused((*values, None, 0.0, causal, scale, grouped)) is None


def _kind_of_mask(mask: Any) -> str | None:
    """ "causal" or "all" for a constant mask that sees the lower triangle, or everything."""
    found = constant(mask)
    if found is None or found.dtype is not torch.bool or found.dim() < 2:
        return None
    rows, columns = found.shape[-2:]
    if bool(found.all()):
        return "all"
    if rows != columns:
        return None
    lower = torch.ones(rows, columns, dtype=torch.bool, device=found.device).tril()
    return "causal" if bool((found == lower).all()) else None


def _repeated_heads(node: Any) -> Any:
    """x of `x[:, :, None].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)`."""
    if not calls(node, "reshape", torch.reshape):
        return None
    expanded = node.args[0]
    if not calls(expanded, "expand"):
        return None
    inserted = expanded.args[0]
    if not calls(inserted, operator.getitem):
        return None
    everything = slice(None, None, None)
    if inserted.args[1] != (everything, everything, None, everything, everything):
        return None
    x = inserted.args[0]
    one, many = value_of(x), value_of(node)
    if not (isinstance(one, Tensor) and isinstance(many, Tensor) and one.dim() == many.dim() == 4):
        return None
    same = one.shape[0] == many.shape[0] and one.shape[2:] == many.shape[2:] and many.shape[1] % one.shape[1] == 0
    return x if same and not are_written(node.graph, {node, expanded, inserted, x}) else None
