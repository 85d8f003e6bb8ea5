"""Attention in Dynamo's graph: masks that are known words, and heads that need not be repeated."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...ops._scaled_dot_product_attention import _sdpa
from .graph import are_written, argument, calls, constant, replaced, value_of

ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


class Attention(NamedTuple):
    """The arguments of a call of scaled_dot_product_attention without dropout, of tensors of four dimensions."""

    call: Any
    query: Any
    key: Any
    value: Any
    mask: Any
    causal: bool
    scale: Any
    grouped: bool

    @classmethod
    def of(cls, node: Any) -> Attention | None:
        """Read a call; return None for other nodes and other attention."""
        if not calls(node, *ATTENTION):
            return None
        query, key, value, mask = (
            argument(node, k, name) for k, name in enumerate(("query", "key", "value", "attn_mask"))
        )
        causal, scale = bool(argument(node, 5, "is_causal", False)), argument(node, 6, "scale")
        grouped = bool(argument(node, 7, "enable_gqa", False))
        of = value_of(query)
        if not isinstance(of, Tensor) or of.dim() != 4 or argument(node, 4, "dropout_p", 0.0):
            return None
        return cls(node, query, key, value, mask, causal, scale, grouped)

    def single_heads(self) -> tuple[Any, Any]:
        """Keys and values before their heads are repeated, where they are."""
        if self.grouped:
            return self.key, self.value
        key, value = (_repeated_heads(one, self.call) for one in (self.key, self.value))
        return (self.key, self.value) if key is None or value is None else (key, value)


def attention(node: Any) -> bool:
    """scaled_dot_product_attention: a constant mask that is causal becomes that word, repeated heads are not repeated.

    Models of transformers make their mask from positions, and repeat the heads of keys and values. With the mask in memory
    PyTorch's kernels are slow (an H200, 8 layers of 4 x 2048 tokens, 32 heads of 64: 17.8 ms a step, without it 4.9).
    """
    given = Attention.of(node)
    if given is None:
        return False
    kind = _kind_of_mask(given.mask) if given.mask is not None else None
    if given.mask is not None and kind is None:
        return False
    causal, scale = given.causal or kind == "causal", given.scale
    single = given.single_heads()
    with node.graph.inserting_before(node):
        if _kernels_serve(given.query, *single, causal, scale):
            named = {"causal": "top_left" if causal else None, "scale": scale}
            new = node.graph.call_function(ops.attention, (given.query, *single), named)
        elif given.mask is not None:
            named = {"is_causal": causal, "scale": scale, "enable_gqa": given.grouped}
            tensors = given.query, given.key, given.value
            new = node.graph.call_function(F.scaled_dot_product_attention, tensors, named)
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


def _repeated_heads(node: Any, user: Any) -> Any:
    """x of `x[:, :, None].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)`.

    None for others, and where something is written into x between its first view and the `user` of what is repeated.
    """
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
    return x if same and not are_written({node, expanded, inserted, x}, inserted, user) else None
