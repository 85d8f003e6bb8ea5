"""Questions of patterns to a graph of ATen calls, and how they put an operator of this library into it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.fx import Node

from ..lowering import LIBRARIES
from .graph import is_sized as is_sized
from .graph import value_of as meta_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def is_call(node: Any) -> bool:
    """Return True if a node stays a call whatever is around it, so that its operands and results are in memory."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name in LIBRARIES or name.startswith("cupyops::") or isinstance(node.target, FunctionType)


def in_memory(node: Node) -> bool:
    """Return True if a call or the caller reads a value, or a view of it, from memory: no kernel then saves its store."""
    return any(
        user.op == "output" or is_call(user) or (user.target in VIEWS and in_memory(user)) for user in node.users
    )


def same(one: Any, other: Any) -> bool:
    """Return True if two nodes are one, or views or casts of one: graphs for inference have these for each reader."""
    if one is other or not isinstance(one, Node) or not isinstance(other, Node):
        return one is other or (not isinstance(one, Node) and not isinstance(other, Node) and one == other)
    if (
        one.target is not other.target
        or one.target not in (*VIEWS, aten._to_copy.default)
        or one.kwargs != other.kwargs
    ):
        return False
    return len(one.args) == len(other.args) and all(map(same, one.args, other.args))


def chain_before(node: Any) -> list[Node]:
    """A node, and what it is a view of, of rows of the same length, back to what is no view."""
    found = [node]
    while isinstance(found[-1], Node) and found[-1].target in VIEWS:
        before: Any = found[-1].args[0]
        if not is_sized(before, found[-1]) or meta_of(before).shape[-1] != meta_of(found[-1]).shape[-1]:
            break
        found.append(before)
    return found


def is_returned_at_most(node: Node, *users: Node) -> bool:
    """Return True if nothing but `users` reads a node, and the graph's caller."""
    return all(user in users or user.op == "output" for user in node.users)


def call(before: Node, op: Any, args: Sequence[Any]) -> list[Node]:
    """Call an operator or a function of this library before a node: nodes of its results and of what it saves."""
    graph = before.graph
    with graph.inserting_before(before):
        made = graph.call_function(op, tuple(args))
        made.meta["val"] = op(*torch.fx.map_arg(tuple(args), meta_of))
        results = [graph.call_function(operator.getitem, (made, k)) for k in range(len(made.meta["val"]))]
    for result, value in zip(results, made.meta["val"]):
        result.meta["val"] = value
    return results


def aten_call(before: Node, op: Any, *args: Any) -> Node:
    """Call a function of ATen before a node."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(op, args)
    made.meta["val"] = op(*torch.fx.map_arg(args, meta_of))
    return made


def serves(of: Any, args: Sequence[Any]) -> bool:
    """Return True if kernels of an operator of this library serve arguments of the graph."""
    return of.definition.why_not(of.definition.bind(torch.fx.map_arg(tuple(args), meta_of), {})) is None
