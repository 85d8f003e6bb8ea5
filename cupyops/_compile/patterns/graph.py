"""Questions that patterns ask of Dynamo's graph, and changes that they make to it."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Interpreter, Node

log = logging.getLogger("cupyops.compile")

LARGEST_CONSTANT = 1 << 28  # elements of a mask that is computed while compiling


def value_of(node: Any) -> Any:
    """FakeTensor, or list of them, that a node computes, in either kind of graph."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None


def is_sized(*nodes: Any) -> bool:
    """Return True if nodes are tensors whose sizes are numbers."""
    values = [value_of(node) for node in nodes]
    return all(isinstance(one, Tensor) and all(isinstance(n, int) for n in one.shape) for one in values)


def calls(node: Any, *targets: Any) -> bool:
    """Return True if a node calls one of the functions, or of the methods by their names."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def argument(node: Any, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def replaced(node: Any, new: Any, *before: Any) -> bool:
    """`new` in the place of a node, and of those before it that nothing else uses and that would still write."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    for one in (node, *before):
        node.graph.erase_node(one)
    return True


# -- constants ---------------------------------------------------------------------------------------------------------


def constant(node: Any) -> Tensor | None:
    """The value of a tensor that depends on no input, computed now; None if it depends on one."""
    meta = value_of(node)
    if not isinstance(meta, Tensor) or meta.numel() > LARGEST_CONSTANT:
        return None
    nodes, needed = node.graph.nodes, made_of([node])
    if not all(one.op in ("call_function", "call_method") and _is_deterministic(one) for one in needed):
        return None
    if are_written(needed, next(iter(nodes)), None):
        return None
    interpreter = Interpreter(node.graph.owning_module, garbage_collect_values=False)
    try:
        with unset_fake_temporarily(), torch.no_grad():
            for one in (one for one in nodes if one in needed):
                interpreter.env[one] = interpreter.run_node(one)
    except Exception as reason:
        log.debug("%s is no constant: %s", node.format_node(), reason)
        return None
    found = interpreter.env[node]
    return found if isinstance(found, Tensor) else None


OPERATORS = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift setitem"
IN_PLACE = {getattr(operator, name) for name in OPERATORS.split()}


def name_of(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def writes(node: Any) -> bool:
    """Return True if a call writes into a tensor that it is given."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return node.target in IN_PLACE
    in_place = name.endswith("_") and not name.endswith("__")
    special = name.startswith("__i") or name == "__setitem__"
    return in_place or special or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def are_written(nodes: set[Any], after: Any, before: Any) -> bool:
    """Return True if a call between two nodes writes into one of these tensors, or into what is made of one: a view, say."""
    between = itertools.takewhile(lambda one: one is not before, _following(after))
    return any(not nodes.isdisjoint(made_of(writer.all_input_nodes)) for writer in filter(writes, between))


def made_of(nodes: Iterable[Any]) -> set[Any]:
    """Return nodes, and all that they are computed from."""
    found: set[Any] = set()
    stack = list(nodes)
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += one.all_input_nodes
    return found


def _following(node: Any) -> Iterator[Any]:
    while node.op != "output":
        yield node
        node = node.next


def _is_deterministic(node: Any) -> bool:
    """Return True if a call always has the same result: it draws no numbers, and writes nowhere."""
    if writes(node):
        return False
    meta = value_of(node)
    symbolic = isinstance(meta, Tensor) and any(not isinstance(n, int) for n in meta.shape)
    return not symbolic and not any(
        word in name_of(node) for word in ("rand", "dropout", "bernoulli", "multinomial", "empty")
    )
