"""CUDA graphs by PyTorch's own cudagraph trees, which manage memory, mutation and several graphs.

The trees are Inductor's; what they need to know of a graph is found here. Which inputs stay where they are: parameters and
buffers, and in backward what forward saved. Which inputs are written: the trees allow that of those that stay where they
are, and of what another CUDA graph has made; a call that writes to any other input runs without a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

log = logging.getLogger("cupyops.compile")

STATIONARY = "cupyops_stationary"  # in a graph's meta: what stationary() says of it


class Facts(NamedTuple):
    """Answers to what the trees ask about a graph, pickled with its runner: a later process need not read the graph.

    Attributes:
        reason: why there is no CUDA graph of it, or "". The rest is empty then.
        device: index of the GPU.
        still: indices of the inputs that stay where they are.
        written: indices of the inputs that are written.
        constants: tensors that the graph itself holds.
        placeholders: what PyTorch's messages say of the inputs.
        traces: the line of each output, for such messages.
    """

    reason: str
    device: int = 0
    still: Sequence[int] = ()
    written: tuple[int, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    placeholders: Sequence[Any] = ()
    traces: Sequence[str | None] = ()


def facts(graph: GraphModule, kind: str) -> Facts:
    """Read what the trees need to know of a "forward", "backward" or "inference" graph."""
    from torch._dynamo.backends import cudagraphs as dynamo

    if reason := unfit(graph):
        return Facts(reason)

    from torch._inductor.cudagraph_utils import get_placeholder_info
    from torch._inductor.utils import count_tangents

    return Facts(
        "",
        dynamo.get_device_index(graph),
        # what forward saved lies in its CUDA graph
        range(count_tangents(graph)) if kind == "backward" else stationary(graph),
        tuple(sorted(dynamo.find_input_mutations(graph.graph))),
        constants(graph),
        get_placeholder_info(graph.graph),
        dynamo.get_stack_traces(graph),
    )


class Held:
    """State that the graphs of one compiled function share.

    Attributes:
        device: index of the device of forward's CUDA graph; None where there is none.
    """

    def __init__(self) -> None:
        self.device: int | None = None

    def wrap(self, run: Callable[..., Any], facts: Facts, *, kind: str) -> Callable[..., Any]:
        """`run` as CUDA graphs, or itself, with the reason in the log, where there can be none.

        Args:
            run: what runs the graph: a function of a list of inputs, which it empties.
            facts: of the graph.
            kind: "forward", "backward" or "inference".
        """
        backward = kind == "backward"
        if backward and self.device is None:
            return run
        if facts.reason:
            log.warning("no CUDA graph of the %s graph: %s", kind, facts.reason)
            return self._running_backward(run) if backward else run

        from torch._inductor.compile_fx import cudagraphify

        if not backward:
            self.device = facts.device
        return cudagraphify(  # type: ignore[no-any-return]
            run,
            facts.still,
            device_index=facts.device,
            is_backward=backward,
            is_inference=kind == "inference",
            stack_traces=list(facts.traces),
            constants=facts.constants,
            placeholders=facts.placeholders,
            mutated_input_idxs=facts.written,
        )

    def _running_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Backward without a CUDA graph still tells the trees that it has begun, so that they end forward's generation."""
        from torch._inductor import cudagraph_trees

        device = self.device

        def backward(args: list[Any]) -> Any:
            assert device is not None
            manager = cudagraph_trees.get_manager(device, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
            return run(args)

        return backward


def unfit(graph: GraphModule) -> str:
    """Return why a graph cannot be a CUDA graph (CPU tensors, several devices, calls that read data on the host), or ""."""
    from torch._dynamo.backends import cudagraphs as dynamo
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    reason = check_multiple_devices_or_any_cpu_nodes(dynamo.get_device_node_mapping(graph))
    if reason:
        return str(reason).removeprefix("skipping cudagraphs due to ")
    node = get_first_incompatible_cudagraph_node(graph)
    return f"{node.format_node()} cannot be captured" if node is not None else ""


def stationary(graph: GraphModule) -> Sequence[int]:
    """The inputs of a forward graph that stay where they are from call to call: parameters, buffers, marked tensors.

    AOTAutograd knows them while it makes the graph; of one that is read from its cache, the graph does.
    """
    if STATIONARY in graph.meta:
        return graph.meta[STATIONARY]  # type: ignore[no-any-return]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(metadata.static_input_indices) if metadata is not None else ()


def constants(graph: GraphModule) -> tuple[torch.Tensor, ...]:
    """Tensors that the graph itself holds."""
    found = (getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr"))
    return tuple(one for one in found if isinstance(one, torch.Tensor))


def reset() -> None:
    """Forget all CUDA graphs, as `torch.compiler.reset()` does."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()
