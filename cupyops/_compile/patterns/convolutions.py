"""Convolutions in graphs of ATen calls: of one tap, with what is beside them in one product; and of few channels in blocks
of pixels, as `cupyops.nn.blocks` has them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..._dispatch.conv.pointwise_fused import ADDED, MOMENTS, conv2d_add, conv2d_moments, problem_of
from ..._dispatch.core.forms import Library
from ..._dispatch.core.gpu import gpu
from ..._kernel.kernel import HALF
from ...nn.blocks import STEP, conv2d_blocks, conv2d_blocks_weight, is_faster
from ...ops._batch_norm_act import _batch_norm_act
from .aten import aten, call, in_memory, is_call, is_sized, meta_of

GEOMETRY = [1, 1], [0, 0], [1, 1], False, [0, 0], 1  # of a convolution of one tap


def moments(node: Any) -> bool:
    """batch_norm_act of a convolution, which leaves the moments, so that no pass has to find them."""
    conv: Any = node.args[0] if node.target is torch.ops.cupyops.batch_norm_act.default else None
    if not isinstance(conv, Node) or conv.target is not aten.convolution.default:
        return False
    x, weight, bias, *geometry = conv.args
    if bias is not None or tuple(geometry) != GEOMETRY or not _are_images(x, conv) or not _is_of_one_tap(weight, x):
        return False
    image = meta_of(x)
    if isinstance(MOMENTS.plan(problem_of(image, len(meta_of(weight)), False), gpu(image.device)), Library):
        return False
    y, *found = call(conv, conv2d_moments, (x, weight))
    conv.replace_all_uses_with(y)
    node.args = (*_batch_norm_act.definition.bind(node.args, {})[:-2], *found)
    node.graph.erase_node(conv)
    return True


def added(node: Any) -> bool:
    """A sum of gradients of an image, one of which a convolution gives: its product adds the other."""
    if node.target is not aten.add.Tensor or node.kwargs or not in_memory(node):
        return False
    for one, more in (node.args, node.args[::-1]):
        back: Any = one.args[0] if isinstance(one, Node) and one.target is operator.getitem else None
        if not isinstance(back, Node) or back.target is not aten.convolution_backward.default or one.args[1] != 0:
            continue
        args: Any = back.args
        grad_y, x, weight, _, *geometry, mask = args
        fits = tuple(geometry) == GEOMETRY and set(one.users) == {node} and _is_read(more)
        if not fits or not _are_images(grad_y, x, more) or not _is_of_one_tap(weight, x):
            continue
        image = meta_of(x)
        if meta_of(more).shape != image.shape or meta_of(more).dtype is not image.dtype:
            continue
        if isinstance(ADDED.plan(problem_of(image, len(meta_of(weight)), True), gpu(image.device)), Library):
            continue
        (result,) = call(node, conv2d_add, (grad_y, weight, more))
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)
        node.graph.erase_node(one)
        back.args = (*args[:-1], [False, *mask[1:]])
        back.meta["val"] = (None, *back.meta["val"][1:])
        return True
    return False


def in_blocks(node: Any) -> bool:
    """Convolution with steps of an image of few channels, as at the beginning of a ResNet, or its filters' gradient."""
    if node.target is aten.convolution.default:
        x, weight, bias, *geometry = node.args
        if bias is not None or not _is_of_blocks(x, weight, node, geometry):
            return False
        (result,) = call(node, conv2d_blocks, (x, weight, geometry[1]))
        node.replace_all_uses_with(result)
    elif node.target is aten.convolution_backward.default:
        grad_y, x, weight, _, *geometry, mask = node.args
        if mask != [False, True, False] or not _is_of_blocks(x, weight, grad_y, geometry):
            return False
        (result,) = call(node, conv2d_blocks_weight, (grad_y, x, weight, geometry[1]))
        for one in list(node.users):
            one.replace_all_uses_with(result)
            node.graph.erase_node(one)
    else:
        return False
    node.graph.erase_node(node)
    return True


def _is_of_blocks(x: Any, weight: Any, y: Any, geometry: list[Any]) -> bool:
    if (
        not is_sized(x, weight)
        or not _are_images(y)
        or meta_of(x).dim() != 4
        or meta_of(x).dtype is not meta_of(weight).dtype
    ):
        return False
    steps, padding, *rest = geometry
    if steps != [STEP, STEP] or rest != [[1, 1], False, [0, 0], 1] or len(padding) != 2:
        return False
    return is_faster(meta_of(x), meta_of(weight), padding, meta_of(x).dtype)


def _are_images(*nodes: Any) -> bool:
    """Return True if nodes are images of a half type in channels_last, of known sizes."""
    if not is_sized(*nodes):
        return False
    metas = [meta_of(node) for node in nodes]
    last = torch.channels_last
    return all(
        one.dim() == 4 and one.numel() and one.dtype in HALF and one.is_contiguous(memory_format=last) for one in metas
    )


def _is_of_one_tap(weight: Any, x: Any) -> bool:
    meta = meta_of(weight)
    return is_sized(weight) and meta.dtype is meta_of(x).dtype and meta.shape[1:] == (meta_of(x).shape[1], 1, 1)


def _is_read(node: Any) -> bool:
    """Return True if a value is in memory whoever reads it: an input, or a result of a call that stays one."""
    if not isinstance(node, Node):
        return False
    return node.op == "placeholder" or (node.target is operator.getitem and is_call(node.args[0]))
