"""Writes of a few elements into an input, as into a cache of keys and values, go there directly.

AOTAutograd makes graphs without mutation: `cache.index_copy_(...)` becomes a copy of the whole cache with the new elements,
and a `copy_` of all of that into the cache at the end of the graph. Both are undone here, if nothing reads the old cache.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

# operator that makes a new tensor -> the one that overwrites its first argument with it
OVERWRITING = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}


def apply(graph: GraphModule) -> None:
    """Let the operators of `OVERWRITING` overwrite the input whose new value they make, and drop the copies of it."""
    nodes = graph.graph
    for copy in nodes.find_nodes(op="call_function", target=aten.copy_.default):
        given, made = copy.args[:2]
        if isinstance(given, Node) and isinstance(made, Node) and _is_made_of(made, given, copy):
            made.target = OVERWRITING[made.target]  # type: ignore[index]
            copy.replace_all_uses_with(given)
            nodes.erase_node(copy)
    graph.recompile()


def _is_made_of(made: Node, given: Node, copy: Node) -> bool:
    """Return whether `made` is the input `given` with other elements, of which nothing else needs the old or the new."""
    if given.op != "placeholder" or made.target not in OVERWRITING or made.args[0] is not given:
        return False
    if set(given.users) != {made, copy} or made.all_input_nodes.count(given) != 1:
        return False
    if _leaves(made):
        return False
    old, new = given.meta.get("val"), made.meta.get("val")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.dtype == new.dtype and old.stride() == new.stride()


def _leaves(made: Node) -> bool:
    """Return True if the graph returns a tensor, or a view of it: that must not change with the input later."""
    for user in made.users:
        schema = getattr(user.target, "_schema", None)
        aliases = schema is not None and any(one.alias_info for one in schema.returns) and not schema.is_mutable
        if user.op == "output" or ((aliases or user.target is operator.getitem) and _leaves(user)):
            return True
    return False
