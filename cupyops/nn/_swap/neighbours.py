"""Convolutions of one tap, told what reads their results and who else reads their images: see `cupyops.nn.pointwise`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import Module

from ... import nn
from ..._util import torch_private
from ..pointwise import pointwise

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def is_unheard(module: Module) -> bool:
    """Return whether nobody listens to a module, or has given it a forward of its own."""
    own = module.__dict__
    heard = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not (heard or "forward" in own or torch_private.module_hooks())


def convolved(conv: Any, norm: Any, x: Any) -> Any:
    """conv(x), which a normalisation reads."""
    return _convolved(conv, norm, x, False)[0]


def shared(conv: Any, norm: Any, x: Any) -> tuple[Any, Any]:
    """conv(x), which `norm` reads, if it is not None; and x for its other reader."""
    return _convolved(conv, norm, x, True)


def _convolved(conv: Any, norm: Any, x: Any, is_shared: bool) -> tuple[Any, Any]:
    if type(conv) is nn.Conv2d and is_unheard(conv):
        measured = type(norm) in NORMS and (norm.training or norm.running_mean is None)
        if (found := pointwise(conv, x, measured, is_shared)) is not None:
            return found
    return conv(x), x


def _is_pointwise(module: Any) -> bool:
    return (
        type(module) is nn.Conv2d and module.kernel_size == (1, 1) and module.stride == (1, 1) and module.bias is None
    )


def are_joined(conv: Any, norm: Any) -> bool:
    """Return whether a normalisation of ours that follows such a convolution can have its moments."""
    return type(norm) in NORMS and _is_pointwise(conv)


def read(module: Module, graph: fx.Graph, conv: fx.Node, normalised: Callable[..., Any]) -> None:
    """Have a convolution of one tap know what reads its result, and who else its image.

    `normalised`: what the graph calls for a normalisation together with what follows it.
    """
    if conv.op != "call_module" or len(conv.args) != 1 or conv.kwargs or not _is_pointwise(inside(module, conv)):
        return
    image: Any = conv.args[0]
    others = [user for user in image.users if user is not conv]
    is_shared = len(others) == 1 and conv < others[0] and _only_reads(module, others[0], image, normalised)
    norm = None
    for user in conv.users:
        if user.target is normalised and user.args[3] is conv:
            norm = str(user.args[0].target)  # type: ignore[union-attr]
        elif user.op == "call_module" and type(inside(module, user)) in NORMS:
            norm = str(user.target)
    if not is_shared and norm is None:
        return
    with graph.inserting_before(conv):
        given = graph.get_attr(str(conv.target)), None if norm is None else graph.get_attr(norm), image
        made = graph.call_function(shared if is_shared else convolved, given)
        if is_shared:
            y, again = (graph.call_function(operator.getitem, (made, at)) for at in range(2))
            others[0].replace_input_with(image, again)
            made = y
    conv.replace_all_uses_with(made)
    graph.erase_node(conv)


def _only_reads(module: Module, node: fx.Node, image: fx.Node, normalised: Callable[..., Any]) -> bool:
    """Return whether a node is a residual sum, or the call of a module, that does not change what it is given."""
    if node.target is normalised:
        return node.args[4] is image and node.args[3] is not image
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    reader = inside(module, node)
    first = next(iter(reader._modules.values()), None) if isinstance(reader, torch.nn.Sequential) else reader
    return isinstance(first, (torch.nn.Conv2d, torch.nn.AvgPool2d))


def inside(module: Module, node: fx.Node) -> Any:
    """The module that a node calls."""
    return module._modules.get(str(node.target))
