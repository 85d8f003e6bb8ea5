"""Products with what follows them in their epilogue, in graphs of ATen calls.

AOTAutograd has decided before what backward is given, so no pattern has it keep more: where it is given a product, the
epilogue stores that too.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..._dispatch.core.library import product_in_full
from ..._dispatch.gemm.epilogues import is_activation_worth_it, is_gate_worth_it
from ..._kernel.kernel import HALF
from ...ops._gated_linear import _gated_linear
from ...ops._linear_act import _linear_act
from .aten import (
    VIEWS,
    aten,
    aten_call,
    call,
    chain_before,
    in_memory,
    is_returned_at_most,
    is_sized,
    meta_of,
    same,
    serves,
)


class Layer(NamedTuple):
    """A linear layer: its product with views behind it, the last first, and what it multiplies."""

    chain: list[Node]
    x: Node
    weight: Node
    bias: Node | None

    @property
    def product(self) -> Node:
        return self.chain[-1]

    def read_by(self, reader: Node) -> list[tuple[Node, Node]]:
        """The product and its views, each with what is to read it on the way to `reader`."""
        return list(zip(self.chain, [reader, *self.chain]))

    def is_read_beside(self, reader: Node) -> bool:
        """Return True if something else reads the product, or a view of it."""
        return any(user is not after for one, after in self.read_by(reader) for user in one.users)


def linear_act(node: Any) -> bool:
    """An activation of a linear layer, whose result something reads from memory anyway."""
    name = _activation(node)
    layer = layer_of(node.args[0]) if name is not None else None
    if layer is None or not in_memory(node):
        return False
    kept = layer.is_read_beside(node)
    args = layer.x, layer.weight, layer.bias, None, name, kept
    if kept and name == "relu":  # which keeps its result alone
        return False
    if not is_activation_worth_it(meta_of(layer.x), meta_of(layer.weight), str(name)) or not serves(_linear_act, args):
        return False
    y, *z = call(layer.product, torch.ops.cupyops.linear_act.default, args)
    return _put(node, y, layer, z)


def gated_linear(node: Any) -> bool:
    """act(linear(x)) * linear(x), of two layers without a bias or of the halves of one."""
    if node.target is not aten.mul.Tensor or not in_memory(node):
        return False
    for act, up in (node.args, node.args[::-1]):
        name = _activation(act)
        if name in (None, "relu") or set(act.users) != {node} or not isinstance(up, Node) or up is act:
            continue
        gate: Any = act.args[0]
        if _of_two(node, act, gate, up, name) or _of_one(node, act, gate, up, name):
            return True
    return False


def _of_two(node: Any, act: Any, gate: Any, up: Any, name: Any) -> bool:
    first, second = layer_of(gate), layer_of(up)
    if first is None or second is None or first.product is second.product or not same(first.x, second.x):
        return False
    layers = (first, act), (second, node)
    alone = all(is_returned_at_most(one, after) for layer, reader in layers for one, after in layer.read_by(reader))
    if not alone or first.bias is not None or second.bias is not None:
        return False
    if meta_of(first.weight).shape != meta_of(second.weight).shape:
        return False
    kept = any(layer.is_read_beside(reader) for layer, reader in layers)
    args = first.x, first.weight, second.weight, name, kept
    features = meta_of(first.weight).shape[0]
    if not is_gate_worth_it(meta_of(first.x), features, name) or not serves(_gated_linear, args):
        return False
    y, *z = call(node, torch.ops.cupyops.gated_linear.default, args)
    node.replace_all_uses_with(aten_call(node, aten.view.default, y, list(meta_of(node).shape)))
    end = node.graph.output_node()
    for k, (layer, reader) in enumerate(reversed(layers)):  # the graph's caller alone reads what is behind the operator
        node.graph.erase_node(reader)
        for one in layer.chain:
            if one.users:
                part = aten_call(end, aten.select.int, z[0], 0, 1 - k)
                one.replace_all_uses_with(aten_call(end, aten.view.default, part, list(meta_of(one).shape)))
            node.graph.erase_node(one)
    return True


def _of_one(node: Any, act: Any, gate: Any, up: Any, name: Any) -> bool:
    halves = gate.args[0] if gate.target is operator.getitem else None
    if not isinstance(halves, Node) or halves.target is not aten.split.Tensor or up.args[:1] != (halves,):
        return False
    layer = layer_of(halves.args[0])
    if layer is None or layer.bias is not None or (gate.args[1], up.args[1]) != (0, 1):
        return False
    features = meta_of(layer.weight).shape[0] // 2
    dim = halves.args[2] if len(halves.args) > 2 else 0
    if dim not in (-1, meta_of(node).dim() - 1) or meta_of(gate).shape[-1] != features or len(meta_of(halves)) != 2:
        return False
    kept = (
        layer.is_read_beside(halves)
        or set(halves.users) != {gate, up}
        or set(gate.users) != {act}
        or set(up.users) != {node}
    )
    args = layer.x, layer.weight, None, name, kept
    if not is_gate_worth_it(meta_of(layer.x), features, name) or not serves(_gated_linear, args):
        return False
    y, *z = call(layer.product, torch.ops.cupyops.gated_linear.default, args)
    return _put(node, y, layer, z)


def in_full(node: Any) -> bool:
    """Gradient in float32 under autocast, as of a parameter, which the product gives in float32 at once."""
    if node.target is not aten._to_copy.default or not is_sized(node) or meta_of(node).dtype is not torch.float32:
        return False
    given, found = meta_of(node.args[0]), meta_of(node)
    if not any(user.op == "output" for user in node.users) or not is_sized(node.args[0]):
        return False
    if given.stride() != found.stride() or given.device != found.device:
        return False
    chain = [node.args[0]]
    while chain[-1].target in (*VIEWS, aten.t.default) and len(chain[-1].users) == 1:
        chain.append(chain[-1].args[0])
    product = chain[-1]
    if product.target is not aten.mm.default or len(product.users) != 1 or meta_of(product).dtype not in HALF:
        return False
    (result,) = call(node, product_in_full, product.args)
    for view in reversed(chain[:-1]):
        result = aten_call(node, view.target, result, *view.args[1:])
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return True


def _put(node: Any, y: Node, layer: Layer, z: list[Node]) -> bool:
    """An operator's result in the place of a node, and the product that it has stored, if it has, in the layer's place."""
    node.replace_all_uses_with(aten_call(layer.product, aten.view.default, y, list(meta_of(node).shape)))
    node.graph.erase_node(node)
    if z:
        layer.product.replace_all_uses_with(z[0])
    return True


ACTIVATIONS: dict[Any, str] = {aten.relu.default: "relu", aten.silu.default: "silu"}


def _activation(node: Any) -> str | None:
    """Name of the activation that a node is, of a half type."""
    if not isinstance(node, Node) or not is_sized(node) or meta_of(node).dtype not in HALF:
        return None
    if node.target is aten.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}[str(node.kwargs.get("approximate", "none"))]
    return ACTIVATIONS.get(node.target)


TURNS = ((aten.t.default,), (aten.permute.default, [1, 0]))


def layer_of(node: Any) -> Layer | None:
    """The linear layer whose result a node is, or is a view of."""
    x: Any
    turned: Any
    bias: Any
    weight: Any
    chain = chain_before(node)
    product: Any = chain[-1]
    if not isinstance(product, Node) or product.kwargs:
        return None
    if product.target is aten.mm.default:
        (x, turned), bias = product.args, None
    elif product.target is aten.addmm.default:
        bias, x, turned = product.args
    else:
        return None
    if not isinstance(turned, Node) or (turned.target, *turned.args[1:]) not in TURNS:
        return None
    weight = turned.args[0]
    given = [one for one in (x, weight, bias) if one is not None]
    if not is_sized(product, *given) or (bias is not None and meta_of(bias).dim() != 1):
        return None
    return Layer(chain, x, weight, bias)
