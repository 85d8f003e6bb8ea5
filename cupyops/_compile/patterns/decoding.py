"""Attention of a few queries to a cache of keys and values, as a step of generation has it, in Dynamo's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...ops._decode_attention import _decode
from .attention import Attention
from .graph import replaced, value_of

MOST_ROWS = 32  # queries of the heads that share one of the keys, which a block has: so many read the cache once


def decoding(node: Any) -> bool:
    """scaled_dot_product_attention of a few queries, without a gradient: `decode_attention`.

    It reads a cache once, where PyTorch's, with a mask, has a copy of it for each of the heads that share it; and of a cache
    that is longer than what it holds it reads what the mask shows.
    """
    given = Attention.of(node)
    if given is None or given.causal:
        return False
    key, value = given.single_heads()
    if not _kernels_serve(given, key, value):
        return False
    graph, mask = node.graph, given.mask
    with graph.inserting_before(node):
        q, k, v = (graph.call_method("transpose", (one, 1, 2)) for one in (given.query, key, value))
        if mask is not None:
            if value_of(mask).dim() == 4:
                mask = graph.call_method("select", (mask, 1, 0))
            mask = graph.call_method("expand", (mask, value_of(given.query).shape[0], -1, -1))
        y = graph.call_function(ops.decode_attention, (q, k, v), {"mask": mask, "scale": given.scale})
        new = graph.call_method("transpose", (y, 1, 2))
    return replaced(node, new)


def _kernels_serve(given: Attention, key: Any, value: Any) -> bool:
    """Return True if the kernels compute this, and in one go over the cache; a whole one of single heads is PyTorch's."""
    tensors = query, k, v = [value_of(one) for one in (given.query, key, value)]
    if any(not isinstance(one, Tensor) or one.dim() != 4 or one.requires_grad for one in tensors):
        return False
    fixed = (*query.shape, k.shape[0], k.shape[1], k.shape[3])
    if any(not isinstance(size, int) for size in fixed):  # caches may have any number of rows, one for each call
        return False
    batch, heads, queries, _ = query.shape
    if k.shape[0] != batch or v.shape != k.shape or not k.shape[1] or heads % k.shape[1]:
        return False
    group = heads // k.shape[1]
    if given.mask is None:
        if queries > 1 or group == 1:
            return False
    elif not _is_of_all_heads(value_of(given.mask), queries, k.shape[2]):
        return False
    given_to = (*(_now(one).transpose(1, 2) for one in tensors), *[None] * 4, given.scale, None)
    return queries * group <= MOST_ROWS and _decode.definition.refused(given_to) is None


def _now(tensor: Tensor) -> Tensor:
    """Return a tensor with the sizes of this call in the place of symbols, so that to ask about it adds no guard."""
    if all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return tensor
    sizes, strides = (
        [size if isinstance(size, int) else size.node.hint for size in of] for of in (tensor.shape, tensor.stride())
    )
    return tensor.new_empty_strided(sizes, strides)


def _is_of_all_heads(mask: Any, queries: int, keys: int) -> bool:
    """Return True for a mask of bool, (queries, keys) or (batch, heads, queries, keys), that is the same for all heads."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape[-2:] != (queries, keys):
        return False
    return mask.dim() == 2 or (mask.dim() == 4 and (mask.shape[1] == 1 or mask.stride(1) == 0))
