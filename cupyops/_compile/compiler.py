"""Compiler of AOTAutograd's graphs: the passes over calls, then a `Runner`, with CUDA graphs around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import cudagraphs, fold, inplace, patterns
from .options import Options
from .runner import Kind, Runner

EXACT = "cupyops_exact"  # in a graph's meta: what forward and backward both compute has the same bits


class Compiler:
    """Makes what runs the graphs of AOTAutograd that one graph of Dynamo becomes."""

    def __init__(self, options: Options) -> None:
        self.options, self.held = options, cudagraphs.Held() if options.cudagraphs else None

    def lowered(self, graph: GraphModule) -> tuple[GraphModule, bool]:
        """The graph as it becomes a program, changed in place, and whether that rounds as eager PyTorch does."""
        with torch.no_grad(), torch._C._DisableAutocast():  # what is read again may be so in the middle of a call
            graph.graph.eliminate_dead_code()
            fold.apply(graph)
            exact = self.options.exact or graph.meta.get(EXACT, has_comparison(graph))
            if not exact:
                patterns.apply_to_calls(graph)  # which may move reads, so before anything is written in place
            inplace.apply(graph)
        return graph, exact

    def runner(self, graph: GraphModule, kind: Kind) -> Runner:
        """The runner of a graph."""
        lowered, exact = self.lowered(graph)
        return Runner(lowered, kind, exact=exact)

    def run(self, runner: Runner) -> Callable[..., Any]:
        """The function that AOTAutograd calls for a graph, with a list of its inputs, which it empties."""
        runner.prepare_early()
        run: Callable[..., Any] = runner
        if self.held is not None:
            if runner.facts is None:
                runner.facts = cudagraphs.facts(runner.graph, runner.kind)
            run = self.held.wrap(runner, runner.facts, kind=runner.kind)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def has_comparison(graph: GraphModule) -> bool:
    """Return True if floats are compared for equality somewhere in a graph."""
    return any(_compares_floats(node) for node in graph.graph.nodes)


def _compares_floats(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.name not in ("aten::eq", "aten::ne"):
        return False
    metas = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in metas)
