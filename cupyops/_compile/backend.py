"""`torch.compile(model, backend="cupyops")`: from Dynamo's graph to programs, by way of AOTAutograd.

Dynamo traces the model and guards what it assumed. AOTAutograd makes graphs of ATen calls without mutation, forward and
backward, and decides what backward computes again. Each of them gets a `Runner`. A graph that this backend cannot make a
program of is run by PyTorch, with a warning.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from .._util import settings
from . import cudagraphs, patterns, saved
from .compiler import EXACT, Compiler, has_comparison
from .decompositions import decompositions
from .lowering import DONATED
from .options import Options
from .reuse import donated
from .runner import programs as programs

log = logging.getLogger("cupyops.compile")

LEAST_BUDGET = 1e-9  # of memory: with one of 0 PyTorch saves inputs alone, and never what must be saved


def backend(
    graph: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the function that `torch.compile` looks up under the name "cupyops".

    Raises:
        InputError: a mode or an option that this backend does not have.
    """
    chosen = Options.of(mode, options)
    before = patterns.apply(graph)
    try:
        return _traced(graph, inputs, chosen)
    except Exception as error:  # what follows a pattern may count on PyTorch's strides, say
        if before is None or settings.STRICT.read(default=False):
            raise
        log.warning("a graph is compiled without patterns, with which PyTorch cannot trace it: %s", error)
        return _traced(before, inputs, chosen)


def _traced(graph: GraphModule, inputs: Sequence[Any], chosen: Options) -> Callable[..., Any]:
    """The graph through AOTAutograd."""
    compiler = Compiler(chosen)
    with saved.kept(graph, inputs, compiler):
        return aot_autograd(  # type: ignore[no-any-return]
            fw_compiler=saved.compiling(compiler, "forward"),
            bw_compiler=saved.compiling(compiler, "backward"),
            inference_compiler=saved.compiling(compiler, "inference"),
            partition_fn=partition,
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )(graph, inputs)


backend.reset = cudagraphs.reset  # type: ignore[attr-defined]  # torch.compiler.reset() calls it


def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's min-cut partition, with one decision for both graphs on how they round.

    Backward computes some of forward's values again. Where values are compared, as in the gradient of a maximum, they must
    have forward's bits; so neither graph contracts multiplications with additions then, and halves are rounded as in eager.
    """
    exact = has_comparison(joint)
    _save_what_would_change(joint)
    budget = max(config.activation_memory_budget, LEAST_BUDGET)
    with config.patch(activation_memory_budget=budget):
        parts = min_cut_rematerialization_partition(joint, *args, **kwargs)
    for part in parts:
        part.meta[EXACT] = exact
    parts[1].meta[DONATED] = donated(*parts)
    return parts


def _save_what_would_change(joint: GraphModule) -> None:
    """Forbid backward to compute again what would be other numbers: draws, and what reads an input that forward overwrites.

    Draws in a checkpoint are computed again with forward's state of the generator, by PyTorch.
    """
    nodes = joint.graph.nodes
    for node in nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    descriptions = joint.graph.output_node().meta.get("desc") or ()
    overwritten = {one.mutated_input for one in descriptions if isinstance(one, InputMutationAOTOutput)}
    copied = {node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default}
    stack = [
        node for node in nodes if node in copied or node.op == "placeholder" and node.meta.get("desc") in overwritten
    ]
    while stack:
        for user in stack.pop().users:
            schema = getattr(user.target, "_schema", None)
            if user.target is operator.getitem or (schema and any(one.alias_info for one in schema.returns)):
                stack.append(user)  # a view, of the same memory
            elif user.op == "call_function":
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
