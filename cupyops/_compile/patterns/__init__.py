"""Patterns in Dynamo's graph that become operators of this library, before AOTAutograd sees it.

Only what is measured as faster than what the backend generates stands here. A graph of Dynamo is sound: it has guards for
all that Python decided, so that a pattern in it holds for every call that reaches it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule

from .attention import ATTENTION, attention
from .decoding import decoding
from .graph import calls
from .images import MAX_POOL, batch_norm_relu, max_pool

log = logging.getLogger("cupyops.compile")

PATTERNS: tuple[Callable[[Any], bool], ...] = (decoding, attention, batch_norm_relu, max_pool)
BEGIN = (*ATTENTION, F.batch_norm, *MAX_POOL)  # calls that a graph with a pattern has


def apply(graph: GraphModule) -> GraphModule | None:
    """Replace the patterns that the graph has, in place. Returns the graph as it was; None where it has no pattern."""
    if not any(calls(node, *BEGIN) for node in graph.graph.nodes):
        return None
    before = GraphModule(graph, copy.deepcopy(graph.graph))
    before.meta = graph.meta
    found = [pattern.__name__ for pattern in PATTERNS for node in list(graph.graph.nodes) if pattern(node)]
    if found:  # what is dead now may write in place, so AOTAutograd drops it, which knows
        graph.graph.lint()
        graph.recompile()
        log.info("patterns: %s", ", ".join(f"{name} x {found.count(name)}" for name in dict.fromkeys(found)))
    return before if found else None
