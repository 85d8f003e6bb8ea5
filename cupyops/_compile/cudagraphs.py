"""CUDA graphs by PyTorch's own cudagraph trees, which manage memory, mutation and several graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

log = logging.getLogger("cupyops.compile")


class Held:
    """What the graphs of one compiled function share: the device, and whether forward became a CUDA graph."""

    def __init__(self) -> None:
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex

        self.index = BoxedDeviceIndex(None)
        self.enabled = True

    def wrap(
        self, run: Callable[..., Any], graph: GraphModule, inputs: Sequence[Any], *, kind: str, fixed: int
    ) -> Callable[..., Any]:
        """`run` as CUDA graphs, or itself, with the reason in the log, where there can be none.

        Args:
            run: what runs the graph: a function of a list of inputs, which it empties.
            graph: the graph, of which mutation, devices and operators are looked at.
            inputs: example inputs of the graph.
            kind: "forward", "backward" or "inference".
            fixed: number of inputs of Dynamo's graph.
        """
        from torch._dynamo.backends import cudagraphs as dynamo
        from torch._inductor import cudagraph_trees
        from torch._inductor.cudagraph_utils import get_placeholder_info
        from torch._inductor.utils import count_tangents, num_fw_fixed_arguments

        backward = kind == "backward"
        if backward and not self.enabled:
            return run
        number = count_tangents(graph) if backward else num_fw_fixed_arguments(fixed, len(inputs))
        reason = dynamo.check_for_skip(graph, number)
        if reason:
            log.warning("no CUDA graph of the %s graph: %s", kind, reason)
            self.enabled = False
            return self._running_backward(run) if backward else run
        self.index.set(dynamo.get_device_index(graph))
        return cudagraph_trees.cudagraphify_impl(  # type: ignore[no-any-return]
            run,
            list(inputs),
            list(range(number)),
            device_index=self.index.value,
            is_backward=backward,
            is_inference=kind == "inference",
            stack_traces=dynamo.get_stack_traces(graph),
            placeholders=get_placeholder_info(graph.graph),
            mutated_input_idxs=dynamo.find_input_mutations(graph.graph),
        )

    def _running_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Backward without a CUDA graph still tells the trees that it has begun, so that they end forward's generation."""
        from torch._inductor import cudagraph_trees

        manager = cudagraph_trees.get_manager(self.index.value or 0, create_if_none_exists=False)

        def backward(args: list[Any]) -> Any:
            if manager is not None:
                manager.set_to_running_backward()
            return run(args)

        return backward
