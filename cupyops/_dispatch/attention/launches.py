"""Attention forward and backward: the tensors as kernels read them, the form of the problem, its launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._util import torch_private
from ..._util.strides import aligned, is_dry
from ..core import ahead
from ..core.forms import Forms, Launch
from ..core.gpu import Gpu, gpu
from . import attention
from .attention import Gradients, MmaBackward, MmaForward
from .map import Maps, Masked, fits
from .once import VARIANT_FASTER, OnePass
from .once_mma import MmaOnce
from .wgmma import WgmmaBackward, WgmmaForward

FORWARD = Forms("attention", "forward", [WgmmaForward(), MmaForward()])
BACKWARD = Forms(
    "attention",
    "backward",
    [OnePass(), WgmmaBackward(), MmaOnce(), MmaBackward(64), MmaBackward(32), MmaBackward(16)],
)


class Variant(NamedTuple):
    """Launches by which a variant replaces those of plain kernels; the number of packed sequences, and the longest ones.

    of: the variant's launch in place of a plain one, by a map of the mask where there is one. starts: where sequences of
    queries, and of keys, begin, and where the last ends. masked: what makes maps. drops: weights are dropped at random.
    """

    of: Callable[[Launch[Any], Maps | None], Launch[Any]]
    packed: tuple[int, int, int] | None = None
    starts: tuple[Tensor, ...] = ()
    masked: Masked | None = None
    drops: bool = False

    def launch(self, launch: Launch[Any], problem: attention.Problem, device: torch.device) -> Launch[Any]:
        """Return the variant's launch in place of the plain kernel's."""
        maps = None
        if self.masked is not None and fits(problem, self.masked, launch.extra.blocks):
            maps = Maps(problem, self.masked, device)
        return self.of(launch, maps)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    low: int | None,
    high: int | None,
    scale: float | None,
    variant: Variant | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, lse) of tensors of four dimensions. sinks: a number for each head, of any floating-point dtype."""
    y = attention.empty_result(q, v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if is_dry(q):
        return y, lse
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    if variant is not None and variant.packed is not None:
        attention.clear(y, variant.starts[0], variant.packed[1], lse, sinks)
    q, k, v = (attention.readable(x) for x in (q, k, v))
    problem, card = _problem(q, k, v, y, low, high, variant), gpu(q.device)
    if variant is None and q.is_cuda and (q.requires_grad or k.requires_grad or v.requires_grad):
        needs = q.requires_grad, k.requires_grad, v.requires_grad
        ahead.compile_beside(_of_backward(problem, needs, card), ahead.arch_of(q.device))
    launch = FORWARD.launch(problem, card)
    launch = launch if variant is None else variant.launch(launch, problem, q.device)
    launch.extra.form.run(launch, q, k, v, y, lse, sinks, attention.scale_of(q, scale))
    return y, lse


def _of_backward(problem: attention.Problem, needs: tuple[bool, bool, bool], card: Gpu) -> list[Launch]:
    """Launches of backward for tensors and gradients that have the layout of forward's."""
    grads = problem.q, problem.k, problem.v
    problem = problem._replace(grads=grads, in_order=_in_order(problem, needs, None, card))
    launch = BACKWARD.launch(problem, card)
    return [launch, *launch.extra.launches]


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[int | None, int | None],
    scale: float | None,
    results: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    needs: tuple[bool, bool, bool],
    variant: Variant | None = None,
    into: Sequence[Tensor] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of q, k and v that are needed, for y and lse as forward returned them, and gradients laid out alike;
    written to `into` where that is given, for all three, with rows that begin at whole vectors. sinks: where their gradient
    is needed, the last one."""
    grad_q: Tensor | None
    grad_k: Tensor | None
    grad_v: Tensor | None
    if into is not None:
        grad_q, grad_k, grad_v = into
    else:
        grad_q = attention.empty(q) if needs[0] else None
        grad_k, grad_v = (attention.empty(x) for x in (k, v)) if any(needs[1:]) else (None, None)
    grad_sinks = None if sinks is None else sinks.new_empty(sinks.shape)
    if not is_dry(q):
        if variant is not None and variant.packed is not None:
            for grad, side in ((grad_q, 0), (grad_k, 1), (grad_v, 1)):
                if grad is not None:
                    attention.clear(grad, variant.starts[side], variant.packed[1 + side])
        q, k, v = (attention.readable(x) for x in (q, k, v))
        (y, lse), grad_y = results, grads[0]
        if not (attention.alike(y, grad_y) and aligned(y) and aligned(grad_y)):
            y, grad_y = (x.clone(memory_format=torch.contiguous_format) for x in (y, grad_y))
        card = gpu(q.device)
        beside = None if sinks is None else sinks.to(torch.float32).contiguous()
        problem = attention.with_gradients(_problem(q, k, v, y, *bounds, variant), grad_q, grad_k, grad_v)
        problem = problem._replace(in_order=_in_order(problem, needs, variant, card))
        of = Gradients(q, k, v, y, lse, grad_y, grads[1], grad_q, grad_k, grad_v, attention.scale_of(q, scale), beside)
        launch = BACKWARD.launch(problem, card)
        launch = launch if variant is None else variant.launch(launch, problem, q.device)
        of_rows = launch.extra.form.run(problem, launch, of)
        if sinks is not None:
            grad_sinks = of_rows.sum((0, 2)).to(sinks.dtype)
    return grad_q, grad_k if needs[1] else None, grad_v if needs[2] else None, grad_sinks


def _in_order(p: attention.Problem, needs: tuple[bool, bool, bool], variant: Variant | None, card: Gpu) -> str:
    if torch_private.deterministic():
        return "deterministic algorithms are asked for"
    if not all(needs):
        return "two passes leave out what is not needed"
    if variant is None or (card.capability == 9 and min(p.queries, p.keys) >= VARIANT_FASTER.get(p.d, math.inf)):
        return ""
    return "one pass was not measured to be faster for such scores"


def _problem(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, low: int | None, high: int | None, variant: Variant | None
) -> attention.Problem:
    found = attention.problem(q, k, v, y, low, high)
    if variant is None or variant.packed is None:
        return found
    return attention.packed(found, *variant.packed, low, high)
