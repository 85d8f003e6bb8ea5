"""`torch.compile(model, backend="cupyops")`: from Dynamo's graph to programs, by way of AOTAutograd.

Dynamo traces the model and guards what it assumed. AOTAutograd makes graphs of ATen calls without mutation, forward and
backward, and decides what backward computes again. Each of them becomes a `Program`. A graph that this backend cannot make
one of is run by PyTorch, with a warning.
"""

from __future__ import annotations

import functools
import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .. import _simulate
from . import cudagraphs
from .decompositions import decompositions
from .lowering import Unsupported, device_of
from .options import Options, strict
from .program import Program
from .sizes import Sizes, Symbols

log = logging.getLogger("cupyops.compile")

EXACT = "cupyops_exact"  # in a graph's meta: what forward and backward both compute has the same bits
programs: list[Program] = []  # of this process, newest last, as `explain` shows them
LEAST_BUDGET = 1e-9  # of memory: with one of 0 PyTorch saves inputs alone, and never what must be saved
MOST_KEPT = 64
MOST_SIZES = 64  # for which a graph has programs


def backend(
    graph: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the function that `torch.compile` looks up under the name "cupyops".

    Raises:
        InputError: a mode or an option that this backend does not have.
    """
    chosen = Options.of(mode, options)
    held = cudagraphs.Held() if chosen.cudagraphs else None
    compiled = functools.partial(_compile, held=held, fixed=len(inputs))
    return aot_autograd(  # type: ignore[no-any-return]
        fw_compiler=functools.partial(compiled, kind="forward"),
        bw_compiler=functools.partial(compiled, kind="backward"),
        inference_compiler=functools.partial(compiled, kind="inference"),
        partition_fn=partition,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )(graph, inputs)


def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's min-cut partition, with one decision for both graphs on how they round.

    Backward computes some of forward's values again. Where values are compared, as in the gradient of a maximum, they must
    have forward's bits; so neither graph contracts multiplications with additions then, and halves are rounded as in eager.
    """
    exact = any(_compares_floats(node) for node in joint.graph.nodes)
    _save_what_would_change(joint)
    budget = max(config.activation_memory_budget, LEAST_BUDGET)
    with config.patch(activation_memory_budget=budget):
        parts = min_cut_rematerialization_partition(joint, *args, **kwargs)
    for part in parts:
        part.meta[EXACT] = exact
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


def _compares_floats(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.name not in ("aten::eq", "aten::ne"):
        return False
    metas = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in metas)


def _compile(
    graph: GraphModule, inputs: Sequence[Any], *, kind: str, held: cudagraphs.Held | None, fixed: int
) -> Callable[..., Any]:
    """The function that AOTAutograd calls for a graph, with a list of its inputs, which it empties."""
    graph.graph.eliminate_dead_code()
    runner = Runner(graph)
    if runner.device.type == "cuda" and not runner.symbols.places:
        runner.prepare(Sizes())
    run: Callable[..., Any] = runner
    if held is not None:
        run = held.wrap(runner, graph, inputs, kind=kind, fixed=fixed)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class Runner:
    """Runs a graph: its programs on a GPU or in the simulator, PyTorch on the CPU and where there is no program.

    Attributes:
        programs: program by the values of the graph's symbolic sizes; of a graph without symbols there is one, by ().
        reason: why PyTorch runs the graph, if it does.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.device = device_of(graph)
        self.symbols = Symbols(graph)
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.reason: str | None = None
        self._boxed_call = True

    def prepare(self, sizes: Sizes) -> None:
        """Make the program for sizes and compile its kernels; where that fails, PyTorch runs the graph from now on."""
        if len(self.programs) >= MOST_SIZES:
            self.reason = f"it was called with {MOST_SIZES} different sizes"
            log.warning("PyTorch runs a graph of %d nodes: %s", len(self.graph.graph.nodes), self.reason)
            return
        try:
            program = Program(self.graph, sizes, exact=self.graph.meta.get(EXACT, _has_comparison(self.graph)))
            if self.device.type == "cuda" and torch.cuda.is_available():
                major, minor = torch.cuda.get_device_capability(self.device)
                program.compile(f"sm_{major}{minor}")
        except Unsupported as reason:
            self.reason = str(reason)
            log.info("PyTorch runs a graph of %d nodes: %s", len(self.graph.graph.nodes), reason)
            return
        except Exception as error:
            self._fail(error)
            return
        self.programs[sizes.key] = program
        programs.append(program)
        del programs[:-MOST_KEPT]

    def _fail(self, error: Exception) -> None:
        if strict():
            raise error
        self.reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"the backend cupyops left a graph of {len(self.graph.graph.nodes)} nodes to PyTorch, which is right but slow: "
            f"{self.reason[:500]}. CUPYOPS_STRICT=1 raises this as an error, for a report",
            stacklevel=2,
        )

    def __call__(self, args: list[Any]) -> Any:
        if self.reason is not None or (self.device.type == "cpu" and not _simulate.simulating()):
            return self._by_pytorch(args)
        sizes = self.symbols.sizes(args)
        program = self.programs.get(sizes.key)
        if program is None:
            self.prepare(sizes)
            program = self.programs.get(sizes.key)
            if program is None:
                return self._by_pytorch(args)
        return program.run(args)

    def _by_pytorch(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return self.graph(*given)


def _has_comparison(graph: GraphModule) -> bool:
    return any(_compares_floats(node) for node in graph.graph.nodes)
