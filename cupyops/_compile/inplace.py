"""Writes of a few elements into an input, as into a cache of keys and values, go there directly.

AOTAutograd makes graphs without mutation: `cache.index_copy_(...)` becomes a copy of the whole cache with the new elements,
and a `copy_` of all of that into the cache at the end of the graph. Both are undone here, if nothing reads the old cache.
"""

from __future__ import annotations

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
    if any(user.op == "output" for user in made.users):
        return False
    old, new = given.meta.get("val"), made.meta.get("val")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.dtype == new.dtype and old.stride() == new.stride()
