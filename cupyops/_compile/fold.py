"""Numbers that a graph computes on the CPU from constants become constants, on the GPU where the GPU reads them.

Models write `x / torch.sqrt(torch.tensor(width))`: a tensor of one element on the CPU, which depends on no input. With it in
the graph there could be no CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node


def apply(graph: GraphModule) -> None:
    """Replace them in place."""
    known: dict[Any, Tensor] = {}
    for node in graph.graph.nodes:
        if _is_number(node) and all(one in known for one in node.all_input_nodes):
            value = _computed(graph, node, known)
            if value is not None:
                known[node] = value
    for number, (node, value) in enumerate(known.items()):
        devices = {_device(user) for user in node.users if user not in known}
        if len(devices) == 1 and (device := devices.pop()) is not None and device.type != "cpu":
            _put(graph, node, value, device, number, known)
    graph.graph.eliminate_dead_code()


def _is_number(node: Node) -> bool:
    meta = node.meta.get("val")
    if (
        not isinstance(meta, Tensor)
        or meta.device.type != "cpu"
        or meta.dim()
        or node.op not in ("get_attr", "call_function")
    ):
        return False
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    drawn = torch.Tag.nondeterministic_seeded in tags
    return node.op == "get_attr" or (schema is not None and not schema.is_mutable and not drawn)


def _computed(graph: GraphModule, node: Node, known: dict[Any, Tensor]) -> Tensor | None:
    if node.op == "get_attr":
        value = getattr(graph, str(node.target), None)
        return value if isinstance(value, Tensor) and not isinstance(value, torch._subclasses.FakeTensor) else None
    args: Any = torch.fx.map_arg(node.args, known.__getitem__)
    kwargs: Any = torch.fx.map_arg(node.kwargs, known.__getitem__)
    with unset_fake_temporarily(), torch.no_grad():
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value if isinstance(value, Tensor) else None


def _device(user: Node) -> torch.device | None:
    """The device of what a call computes, where it computes one tensor."""
    meta = user.meta.get("val")
    return meta.device if user.op == "call_function" and isinstance(meta, Tensor) else None


def _put(graph: GraphModule, node: Node, value: Tensor, device: torch.device, number: int, known: Any) -> None:
    """A constant in the place of a node, for all that reads it on the device."""
    name = f"_number{number}"
    with unset_fake_temporarily():
        graph.register_buffer(name, value.to(device), persistent=False)
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
    constant.meta["val"] = node.meta["val"].to(device)
    node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in known)
