"""Linear layers of few rows in graphs of ATen calls, as a step of generation has them: they are bound by reading weights.

Layers of one input become one launch, the RMS norm in front of them and the sum behind them a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..._dispatch.gemm import few_rows, few_rows_layers
from .aten import VIEWS, aten, aten_call, call, is_sized, meta_of, same
from .products import Layer, layer_of


def linear_residual(node: Any) -> bool:
    """A linear layer of few rows, and what is added to it."""
    if node.target is not aten.add.Tensor or node.kwargs or not is_sized(node):
        return False
    for own, other in (node.args, node.args[::-1]):
        layer = layer_of(own)
        if layer is None or layer.is_read_beside(node) or not _is_added(other, own):
            continue
        x, weight, bias = map(meta_of, (layer.x, layer.weight, layer.bias))
        if not few_rows_layers.is_served(x, None, [weight], [bias]):
            continue
        residual = aten_call(node, aten.view.default, other, list(meta_of(layer.product).shape))
        args = layer.x, layer.weight, layer.bias, residual, "none", False
        (y,) = call(node, torch.ops.cupyops.linear_act.default, args)
        node.replace_all_uses_with(aten_call(node, aten.view.default, y, list(meta_of(node).shape)))
        node.graph.erase_node(node)
        return True
    return False


def _is_added(other: Any, own: Any) -> bool:
    """Return True if a sum is of two tensors that lie alike, so that the product's rows are those of the other."""
    one, two = meta_of(other), meta_of(own)
    if not isinstance(one, torch.Tensor) or other is own:
        return False
    return one.shape == two.shape and one.dtype is two.dtype and one.is_contiguous()


def linears(node: Any) -> bool:
    """Linear layers of one input of few rows, with the RMS norm in front of them if nothing else reads it."""
    first = layer_of(node) if node.target in (aten.mm.default, aten.addmm.default) else None
    if first is None or first.chain != [node] or meta_of(first.x).shape[0] > few_rows.MOST_ROWS:
        return False
    layers = [first, *_beside(first, node)]
    norm = Norm.of(first.x, [one.product for one in layers])
    weights, biases = [one.weight for one in layers], [one.bias for one in layers]
    of = [meta_of(one) for one in weights], [meta_of(one) for one in biases]
    if norm is not None and few_rows_layers.is_served(norm.rows_meta(), meta_of(norm.weight), *of):
        args: Any = norm.rows(node), norm.weight, norm.eps, weights, biases
    elif len(layers) > 1 and few_rows_layers.is_served(meta_of(first.x), None, *of):
        args = first.x, None, 0.0, weights, biases
    else:
        return False
    for layer, y in zip(layers, call(node, few_rows_layers.linears, args)):
        layer.product.replace_all_uses_with(y)
        node.graph.erase_node(layer.product)
    return True


def _beside(first: Layer, node: Any) -> Iterator[Layer]:
    """Other layers of the same input, whose weights and biases are inputs of the graph."""
    if not _are_inputs(first):
        return
    found, one = 1, node.next
    while one.op != "output" and found < few_rows.MOST_PARTS:
        layer = layer_of(one) if one.target in (aten.mm.default, aten.addmm.default) else None
        if layer is not None and layer.chain == [one] and _are_inputs(layer) and same(layer.x, first.x):
            yield layer
            found += 1
        one = one.next


def _are_inputs(layer: Layer) -> bool:
    return all(one is None or one.op == "placeholder" for one in (layer.weight, layer.bias))


def norm_gated(node: Any) -> bool:
    """An RMS norm that a gated layer of few rows alone reads."""
    if node.target is not torch.ops.cupyops.gated_linear.default or len(node.users) != 1:
        return False
    x, weight, up, activation, keep = _gated_arguments(node)
    norm = Norm.of(x, [node]) if up is not None and not keep else None
    if norm is None:
        return False
    if not few_rows_layers.is_gate_served(norm.rows_meta(), *map(meta_of, (norm.weight, weight, up))):
        return False
    args = norm.rows(node), norm.weight, norm.eps, weight, up, activation
    (y,) = call(node, few_rows_layers.gated_linear, args)
    (result,) = node.users
    result.replace_all_uses_with(y)
    node.graph.erase_node(result)
    node.graph.erase_node(node)
    return True


def _gated_arguments(node: Any) -> Any:
    x, weight, up, activation, *keep = node.args
    return x, weight, up, activation, keep[0] if keep else True


class Norm(NamedTuple):
    """An RMS norm as models of transformers write it: in float32, and the weight after the cast back.

    Attributes:
        x: what is normalised.
        weight: (features,).
        eps: what is added to the mean of the squares.
    """

    x: Node
    weight: Node
    eps: float

    def rows(self, before: Node) -> Node:
        """Return what is normalised as a matrix, a view before a node."""
        return aten_call(before, aten.view.default, self.x, list(self.rows_meta().shape))

    def rows_meta(self) -> torch.Tensor:
        """Return the FakeTensor of that matrix."""
        return meta_of(self.x).flatten(0, -2)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, node: Any, readers: list[Node]) -> Norm | None:
        """The norm whose result a node is, or is a view of, where only `readers` read it: its views, each by one or some."""
        scaled: Any = node
        while isinstance(scaled, Node) and scaled.target in VIEWS:
            scaled = scaled.args[0]
        if not isinstance(scaled, Node) or scaled.target is not aten.mul.Tensor or not _ends_in(scaled, set(readers)):
            return None
        for weight, normalised in (scaled.args, scaled.args[::-1]):
            found = _normalised(normalised)
            if found is None or not isinstance(weight, Node) or weight.op != "placeholder":
                continue
            x, eps = found
            of, by = meta_of(x), meta_of(weight)
            fits = by.shape == of.shape[-1:] and by.dtype is of.dtype is meta_of(scaled).dtype and of.is_contiguous()
            if fits:
                return cls(x, weight, eps)
        return None


def _ends_in(node: Node, readers: set[Node]) -> bool:
    """Return True if nothing but `readers` reads a node, or a view of it."""
    return all(one in readers or (one.target in VIEWS and _ends_in(one, readers)) for one in node.users)


def _normalised(node: Any) -> tuple[Node, float] | None:
    """(x, eps) of x * rsqrt(mean(x^2) + eps), in float32 and cast back."""
    node = _before(node, aten._to_copy.default) or node
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor or not is_sized(node):
        return None
    sides: Any = node.args
    for wide, root in (sides, sides[::-1]):
        shifted = _before(root, aten.rsqrt.default)
        mean = _before(shifted, aten.add.Tensor)
        square = _before(mean, aten.mean.dim)
        if square is None or mean.args[1:] != ([-1], True) or mean.kwargs or not isinstance(shifted.args[1], float):
            continue
        if square.target is not aten.pow.Tensor_Scalar or square.args != (wide, 2):
            continue
        if meta_of(wide).dtype is torch.float32:
            return _before(wide, aten._to_copy.default) or wide, shifted.args[1]
    return None


def _before(node: Any, target: Any) -> Any:
    """First argument of a call of `target`; None for other nodes."""
    return node.args[0] if isinstance(node, Node) and node.target is target else None
