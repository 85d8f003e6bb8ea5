"""Cross-entropy of a linear layer's outputs, of which nothing else is computed: without all of them in memory."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ... import ops
from ..._kernel.kernel import HALF
from ...ops._fused_linear_cross_entropy import SCRATCH
from .graph import are_written, argument, calls, is_sized, replaced, value_of

LINEAR = (F.linear, torch._C._nn.linear)
VIEWS = ("view", "reshape", "flatten", "contiguous", torch.reshape, torch.flatten)
CASTS = ("float", "to")
WHOLE = slice(None, None, None)


def linear_loss(node: Any) -> bool:
    """cross_entropy of logits that nothing else reads, and that take more memory than the operator has of them at a time."""
    if not calls(node, F.cross_entropy):
        return False
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    usual = None, None, None, None, -100, None, "mean", 0.0
    logits, target, weight, average, ignored, reduce, reduction, smoothing = (
        argument(node, *one) for one in zip(range(8), names, usual)
    )
    if (
        not (weight is average is reduce is None)
        or reduction not in ("mean", "sum")
        or not _is_number(smoothing, ignored)
    ):
        return False
    chain = _chain(logits)
    if chain is None or not _fits(chain, logits, target):
        return False
    layer, graph, dtype = chain[-1], node.graph, value_of(chain[-1]).dtype
    given = [argument(layer, k, name) for k, name in enumerate(("input", "weight", "bias"))]
    with graph.inserting_before(node):
        x, *parameters = (one if one is None else graph.call_method("to", (one, dtype)) for one in given)
        width = value_of(given[0]).shape[-1]
        for one in reversed(chain[:-1]):
            if calls(one, operator.getitem):  # rows that are left out
                x = graph.call_method("reshape", (x, *value_of(one.args[0]).shape[:-1], width))
                x = graph.call_function(operator.getitem, (x, one.args[1]))
        x = graph.call_method("reshape", (x, -1, width))
        options = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing, "scratch": SCRATCH}
        loss = graph.call_function(ops.fused_linear_cross_entropy, (x, parameters[0], target, parameters[1]), options)
        loss = graph.call_method("to", (loss, value_of(node).dtype))
    return replaced(node, loss, *chain)


def _is_number(smoothing: Any, ignored: Any) -> bool:
    return isinstance(smoothing, (int, float)) and 0 <= smoothing <= 1 and isinstance(ignored, int)


def _chain(node: Any) -> list[Node] | None:
    """The logits, and what they are by views, casts and slices of rows, back to the linear layer; each with one reader."""
    found: list[Node] = []
    while isinstance(node, Node) and len(node.users) == 1:
        found.append(node)
        if calls(node, *LINEAR):
            return None if are_written({*found, *node.all_input_nodes}, node, None) else found
        before: Any = node.args[0] if node.args else None
        one, other = value_of(node), value_of(before)
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not one.dim() or not other.dim():
            return None
        if one.shape[-1] != other.shape[-1]:
            return None
        if calls(node, operator.getitem):
            index: Any = node.args[1]
            if not isinstance(index, tuple) or index[-1] != WHOLE or not all(_is_slice(k) for k in index):
                return None
            if len(index) != other.dim() and Ellipsis not in index:
                return None
        elif calls(node, *CASTS):
            if one.dtype not in (other.dtype, torch.float32) or one.device != other.device:
                return None
        elif not calls(node, *VIEWS):
            return None
        node = before
    return None


def _is_slice(index: Any) -> bool:
    ends = (index.start, index.stop, index.step) if isinstance(index, slice) else ()
    return index is Ellipsis or (isinstance(index, slice) and all(k is None or isinstance(k, int) for k in ends))


def _fits(chain: list[Node], logits: Any, target: Any) -> bool:
    """Return True if the loss is of rows of known sizes, in a half type, and gradients are wanted."""
    if not is_sized(chain[-1], logits, target, *chain[-1].all_input_nodes):
        return False
    made, logits, target = map(value_of, (chain[-1], logits, target))
    if made.dtype not in HALF or logits.dim() != 2 or target.dim() != 1 or target.dtype is not torch.int64:
        return False
    if not made.requires_grad or value_of(chain[-1].all_input_nodes[1]).dim() != 2:
        return False
    return made.numel() * made.element_size() > SCRATCH
