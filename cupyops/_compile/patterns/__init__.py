"""Patterns that become operators of this library: in Dynamo's graph, and in the graphs that AOTAutograd makes of it.

Only what is measured as faster than what the backend generates stands here. A graph of Dynamo is sound: it has guards for
all that Python decided, so that a pattern in it holds for every call that reaches it. There a pattern decides what backward
is, and what it is given. In graphs of ATen calls, which have no mutation and all casts of autocast, it decides neither.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule

from ..._util import settings
from .attention import ATTENTION, attention
from .convolutions import added, in_blocks, moments
from .decoding import decoding
from .few_rows import linear_residual, linears, norm_gated
from .graph import calls
from .images import CONVOLUTIONS, MAX_POOL, batch_norm_relu, max_pool, patches
from .losses import linear_loss
from .products import gated_linear, in_full, linear_act
from .resampling import resampling

log = logging.getLogger("cupyops.compile")

PATTERNS: tuple[Callable[[Any], bool], ...] = (
    decoding,
    attention,
    batch_norm_relu,
    max_pool,
    patches,
    linear_loss,
    resampling,
)
OF_CALLS: tuple[Callable[[Any], bool], ...] = (
    *(gated_linear, linear_act, moments, added, in_blocks, in_full),
    *(norm_gated, linears, linear_residual),
)
BEGIN = (
    *ATTENTION,
    F.batch_norm,
    *MAX_POOL,
    *CONVOLUTIONS,
    F.cross_entropy,
    F.interpolate,
)  # calls that a graph with a pattern has


def apply(graph: GraphModule) -> GraphModule | None:
    """Replace the patterns that the graph has, in place. Returns the graph as it was; None where it has no pattern."""
    if not any(calls(node, *BEGIN) for node in graph.graph.nodes):
        return None
    before = GraphModule(graph, copy.deepcopy(graph.graph))
    before.meta = graph.meta
    found = _replaced(graph, PATTERNS)  # what is dead now may write in place, so AOTAutograd drops it, which knows
    return before if found else None


def apply_to_calls(graph: GraphModule) -> None:
    """Replace the patterns of ATen calls that a graph of AOTAutograd has, in place."""
    if _replaced(graph, OF_CALLS):
        graph.graph.eliminate_dead_code()
        graph.recompile()


def _replaced(graph: GraphModule, patterns: Sequence[Callable[[Any], bool]]) -> bool:
    """Replace patterns, each wherever it is; return whether there was one. One that fails is left, with a warning."""
    found = []
    for one in patterns:
        for node in list(graph.graph.nodes):
            try:
                found += [one.__name__] if one(node) else []
            except Exception as error:
                if settings.STRICT.read(default=False):
                    raise
                log.warning("pattern %s fails at %s: %s", one.__name__, node.format_node(), error)
    if found:
        graph.graph.lint()
        graph.recompile()
        log.info("patterns: %s", ", ".join(f"{name} x {found.count(name)}" for name in dict.fromkeys(found)))
    return bool(found)
