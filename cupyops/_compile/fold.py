"""Numbers that a graph computes on the CPU from constants become constants, on the GPU where the GPU reads them.

Models write `x / torch.sqrt(torch.tensor(width))`: a tensor of one element on the CPU, which depends on no input. With it in
the graph there could be no CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Interpreter, Node


def apply(graph: GraphModule) -> None:
    """Replace them in place."""
    interpreter = Interpreter(graph, garbage_collect_values=False)
    known = interpreter.env
    with unset_fake_temporarily(), torch.no_grad():
        for node in graph.graph.nodes:
            if _is_number(node) and all(one in known for one in node.all_input_nodes):
                value = interpreter.run_node(node)
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    known[node] = value
    for number, (node, value) in enumerate(list(known.items())):
        devices = {_device(user) for user in node.users if user not in known}
        if len(devices) == 1 and (device := devices.pop()) is not None and device.type != "cpu":
            _put(graph, node, value, device, number, known)
    graph.graph.eliminate_dead_code()


def _is_number(node: Node) -> bool:
    meta = node.meta.get("val")
    if not isinstance(meta, Tensor) or meta.device.type != "cpu" or meta.dim():
        return False
    schema = getattr(node.target, "_schema", None)
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_call = node.op == "call_function" and schema is not None and not schema.is_mutable and not drawn
    return is_call or node.op == "get_attr"


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
