"""Patterns in Dynamo's graph that become operators of this library, before AOTAutograd sees it.

Only what is measured as faster than what the backend generates stands here. A graph of Dynamo is sound: it has guards for
all that Python decided, so that a pattern in it holds for every call that reaches it.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from .. import ops
from ..ops._scaled_dot_product_attention import _sdpa

log = logging.getLogger("cupyops.compile")

LARGEST_CONSTANT = 1 << 28  # elements of a mask that is computed while compiling
ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
MAX_POOL = (F.max_pool2d, torch.max_pool2d)
BEGIN = (*ATTENTION, F.batch_norm, *MAX_POOL)  # calls that a graph with a pattern has


def apply(graph: GraphModule) -> GraphModule | None:
    """Replace the patterns that the graph has, in place. Returns the graph as it was; None where it has no pattern."""
    if not any(_calls(node, *BEGIN) for node in graph.graph.nodes):
        return None
    before = GraphModule(graph, copy.deepcopy(graph.graph))
    before.meta = graph.meta
    found = [pattern.__name__ for pattern in PATTERNS for node in list(graph.graph.nodes) if pattern(node)]
    if found:  # what is dead now may write in place, so AOTAutograd drops it, which knows
        graph.graph.lint()
        graph.recompile()
        log.info("patterns: %s", ", ".join(f"{name} x {found.count(name)}" for name in dict.fromkeys(found)))
    return before if found else None


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _calls(node: Any, *targets: Any) -> bool:
    """Return True if a node calls one of the functions, or of the methods by their names."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def _argument(node: Any, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


# -- constants ---------------------------------------------------------------------------------------------------------


def constant(node: Any) -> Tensor | None:
    """The value of a tensor that depends on no input, computed now; None if it depends on one."""
    meta = _value(node)
    if not isinstance(meta, Tensor) or meta.numel() > LARGEST_CONSTANT:
        return None
    needed: set[Any] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in needed:
            continue
        if one.op not in ("call_function", "call_method") or not _is_deterministic(one):
            return None
        needed.add(one)
        stack += one.all_input_nodes
    if _are_written(node.graph, needed):
        return None
    known: dict[Any, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for one in (one for one in node.graph.nodes if one in needed):
            args = torch.fx.map_arg(one.args, known.__getitem__)
            kwargs = torch.fx.map_arg(one.kwargs, known.__getitem__)
            try:
                if one.op == "call_method":
                    known[one] = getattr(args[0], one.target)(*args[1:], **kwargs)
                else:
                    known[one] = one.target(*args, **kwargs)
            except Exception as reason:
                log.debug("%s is no constant: %s", one.format_node(), reason)
                return None
    found = known[node]
    return found if isinstance(found, Tensor) else None


OPERATORS = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift setitem"
IN_PLACE = {getattr(operator, name) for name in OPERATORS.split()}


def _name(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _writes(node: Any) -> bool:
    """Return True if a call writes into a tensor that it is given."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return node.target in IN_PLACE
    in_place = name.endswith("_") and not name.endswith("__")
    special = name.startswith("__i") or name == "__setitem__"
    return in_place or special or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _are_written(graph: Any, nodes: set[Any]) -> bool:
    """Return True if the graph writes into one of these tensors, or into what is made of one and may be a view."""
    for writer in filter(_writes, graph.nodes):
        seen: set[Any] = set()
        stack = list(writer.all_input_nodes)
        while stack:
            one = stack.pop()
            if one in nodes:
                return True
            if one not in seen:
                seen.add(one)
                stack += one.all_input_nodes
    return False


def _is_deterministic(node: Any) -> bool:
    """Return True if a call always has the same result: it draws no numbers, and writes nowhere."""
    if _writes(node):
        return False
    meta = _value(node)
    symbolic = isinstance(meta, Tensor) and any(not isinstance(n, int) for n in meta.shape)
    return not symbolic and not any(
        word in _name(node) for word in ("rand", "dropout", "bernoulli", "multinomial", "empty")
    )


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(node: Any) -> bool:
    """scaled_dot_product_attention: a constant mask that is causal becomes that word, repeated heads are not repeated.

    Models of transformers make their mask from positions, and repeat the heads of keys and values. With the mask in memory
    PyTorch's kernels are slow (an H200, 8 layers of 4 x 2048 tokens, 32 heads of 64: 17.8 ms a step, without it 4.9).
    """
    if not _calls(node, *ATTENTION):
        return False
    query, key, value = (_argument(node, k, name) for k, name in enumerate(("query", "key", "value")))
    mask, dropout = _argument(node, 3, "attn_mask"), _argument(node, 4, "dropout_p", 0.0)
    causal, scale = bool(_argument(node, 5, "is_causal", False)), _argument(node, 6, "scale")
    grouped = bool(_argument(node, 7, "enable_gqa", False))
    of = _value(query)
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
    return _replaced(node, new)


def _kernels_serve(query: Any, key: Any, value: Any, causal: bool, scale: Any) -> bool:
    """Return True if our kernels are measured at least as fast as PyTorch's, with backward if there is one."""
    values = [_value(one) for one in (query, key, value)]
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
    if not _calls(node, "reshape", torch.reshape):
        return None
    expanded = node.args[0]
    if not _calls(expanded, "expand"):
        return None
    inserted = expanded.args[0]
    if not _calls(inserted, operator.getitem):
        return None
    everything = slice(None, None, None)
    if inserted.args[1] != (everything, everything, None, everything, everything):
        return None
    x = inserted.args[0]
    one, many = _value(x), _value(node)
    if not (isinstance(one, Tensor) and isinstance(many, Tensor) and one.dim() == many.dim() == 4):
        return None
    same = one.shape[0] == many.shape[0] and one.shape[2:] == many.shape[2:] and many.shape[1] % one.shape[1] == 0
    return x if same and not _are_written(node.graph, {node, expanded, inserted, x}) else None


def _replaced(node: Any, new: Any, *before: Any) -> bool:
    """`new` in the place of a node, and of those before it that nothing else uses and that would still write."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    for one in (node, *before):
        node.graph.erase_node(one)
    return True


# -- batch_norm, the sum behind it, and relu ---------------------------------------------------------------------------


def batch_norm_relu(node: Any) -> bool:
    """relu(batch_norm(x)) or relu(batch_norm(x) + y) in training, of images in channels_last.

    The kernels keep the mask of relu in bits, and read x as often as batch_norm alone does.
    """
    if not _is_relu(node) or len(node.args) < 1:
        return False
    norm, residual, between = node.args[0], None, []
    if _calls(norm, operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__iadd__"):
        between = [norm]
        sides = norm.args
        if len(sides) != 2 or norm.kwargs:
            return False
        first = next((s for s in sides if _is_batch_norm(s) and len(s.users) == 1), None)
        if first is None:
            return False
        residual = sides[1] if sides[0] is first else sides[0]
        norm = first
    if not _is_batch_norm(norm) or len(norm.users) != 1 or any(len(one.users) != 1 for one in between):
        return False
    x = _value(norm.args[0])
    given = [_argument(norm, k, name) for k, name in enumerate(NORM)]
    x_node, mean, var, weight, bias, training, momentum, eps = given
    if training is not True or weight is None or bias is None or not isinstance(momentum, float):
        return False
    if x.dim() != 4 or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous():
        return False
    if residual is not None:
        other = _value(residual)
        if not isinstance(other, Tensor) or other.shape != x.shape or other.dtype != x.dtype or residual is norm:
            return False
        if not other.is_contiguous(memory_format=torch.channels_last):
            return False
    with node.graph.inserting_before(node):
        new = node.graph.call_function(
            ops.batch_norm_act,
            (x_node, mean, var, weight, bias, True, momentum, eps),
            {"activation": "relu", "residual": residual},
        )
    return _replaced(node, new, *between, norm)


NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _is_batch_norm(node: Any) -> bool:
    return _calls(node, F.batch_norm) and isinstance(_value(node.args[0]), Tensor)


def _is_relu(node: Any) -> bool:
    return _calls(node, F.relu, torch.relu, "relu", "relu_")


def max_pool(node: Any) -> bool:
    """max_pool2d, whose backward is a gather here: on an H200 7 to 13 times as fast as PyTorch's, forward 2.4 to 5.3."""
    if not _calls(node, *MAX_POOL) or node.kwargs.get("return_indices"):
        return False
    x = _value(node.args[0])
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.requires_grad:
        return False
    node.target = ops.max_pool2d
    return True


PATTERNS: tuple[Callable[[Any], bool], ...] = (attention, batch_norm_relu, max_pool)
