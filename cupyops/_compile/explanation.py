"""`cupyops.explain_compile`: what `torch.compile(backend="cupyops")` makes of a call, and why."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from .._util.torch_private import tree_leaves
from ..errors import InputError
from .size import value_of
from .values import Value, is_read, walked

if TYPE_CHECKING:
    from .program import Program
    from .runner import Runner
    from .trace import Trace


@dataclass(frozen=True)
class CompiledKernel:
    """One launch of a compiled graph.

    Attributes:
        fused: calls of ATen that it computes, in the order of the graph; those of views and casts too.
        bytes: memory that it reads and writes at least: each element that it needs, once.
        grid, block: how many blocks, and threads of each.
        text: CUDA C.
    """

    fused: tuple[str, ...]
    bytes: int
    grid: tuple[int, ...]
    block: int
    text: str = field(repr=False)


@dataclass(frozen=True)
class LeftCall:
    """Calls that stay PyTorch's.

    Attributes:
        operator: overload, such as "aten.mm.default".
        count: number of calls.
        reason: why no kernel computes them.
    """

    operator: str
    count: int
    reason: str


@dataclass(frozen=True)
class CompiledGraph:
    """Result of compiling one graph.

    Attributes:
        kind: "forward", "backward", or "inference" of a graph without gradient.
        nodes: number of its nodes.
        kernels: launches in order.
        left: calls that stay PyTorch's.
        reason: why PyTorch runs all of it; empty where it does not.
        program: Python text of the function that runs it.
    """

    kind: str
    nodes: int
    kernels: tuple[CompiledKernel, ...]
    left: tuple[LeftCall, ...]
    reason: str
    program: str = field(repr=False)

    @property
    def bytes(self) -> int:
        """Memory that its kernels read and write at least."""
        return sum(kernel.bytes for kernel in self.kernels)

    def __str__(self) -> str:
        head = f"{self.kind} graph of {self.nodes} nodes"
        if self.reason:
            return f"{head}: PyTorch runs it, because of {self.reason}"
        distinct = len({kernel.text for kernel in self.kernels})
        calls = sum(one.count for one in self.left)
        lines = [
            f"{head}: {len(self.kernels)} kernels, {distinct} of them distinct, that move at least "
            f"{_megabytes(self.bytes)}; {calls} calls of other operators"
        ]
        for number, kernel in enumerate(self.kernels, 1):
            dims = " x ".join(f"{size:,}" for size in kernel.grid if size > 1 or kernel.grid == (size,)) or "1"
            lines.append(f"  kernel {number}: {_megabytes(kernel.bytes)}, grid {dims}, block {kernel.block}")
            lines.append(f"    {_counted(kernel.fused)}")
        lines += [f"  not fused: {one.operator} x {one.count}: {one.reason}" for one in self.left]
        return "\n".join(lines)


@dataclass(frozen=True)
class CompileExplanation:
    """Result of `explain_compile`; `print` it.

    Attributes:
        graphs: in the order in which they were compiled: a forward graph, its backward graph, ...
        breaks: why Dynamo broke the function into several graphs.
    """

    graphs: tuple[CompiledGraph, ...]
    breaks: tuple[str, ...]

    def __str__(self) -> str:
        lines = [str(one) for one in self.graphs] or ["Dynamo made no graph"]
        lines += [f"graph break: {reason}" for reason in self.breaks]
        return "\n".join(lines)


def explain_compile(
    function: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> CompileExplanation:
    """Explain `torch.compile(function, backend="cupyops")` for a call: kernels, what is fused, what stays PyTorch's.

    Needs no GPU: on CPU tensors the graphs are compiled as on a GPU, and run by PyTorch. Where PyTorch's operators differ
    between devices, as attention does, so do the graphs. The function is called once, with its effects, such as on the
    statistics of a BatchNorm; with parameters that require gradients the backward graph is made too, and not run.

    Args:
        function: a function or a module.
        args, kwargs: what it is called with.
        options: of the backend, as `torch.compile` takes them.

    Returns:
        CompileExplanation: prints as a list; `graphs` has the kernels, with their text, and the calls that are left.

    Raises:
        InputError: `function` cannot be called, or an option that there is not.

    Example:
        >>> found = cupyops.explain_compile(lambda x: torch.softmax(x * 2, -1), torch.ones(4, 8))
        >>> [kernel.fused[0] for kernel in found.graphs[0].kernels]
        ['mul']
    """
    if not callable(function):
        raise InputError(f"explain_compile: function is {function!r}, expected a function or a module")
    from torch._dynamo.utils import counters

    from . import runner
    from .backend import backend
    from .options import Options

    Options.of(None, options)
    found: list[Runner] = []

    def compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        runner.listeners.append(found.append)
        try:
            return backend(graph, inputs, options=options)
        finally:
            runner.listeners.remove(found.append)

    before = Counter(counters["graph_break"])
    # else the backward graph waits for a backward pass
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        torch.compile(_unknown(function), backend=compile)(*args, **kwargs)
    breaks = list(Counter(counters["graph_break"]) - before)
    return CompileExplanation(tuple(map(_graph, found)), tuple(one.strip().splitlines()[0] for one in breaks))


def _unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with another code object, by which Dynamo knows what it has compiled: it has seen nothing of this one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    of: Any = function if isinstance(function, FunctionType) else call
    copy = FunctionType(of.__code__.replace(), of.__globals__, of.__name__, of.__defaults__, of.__closure__)
    copy.__kwdefaults__ = of.__kwdefaults__
    return copy


def _graph(of: Runner) -> CompiledGraph:
    nodes = of.nodes
    program = of.make(of.symbols.hinted())
    if program is None:
        return CompiledGraph(of.kind, nodes, (), (), of.reason or "", "")
    left = tuple(LeftCall(name, count, reason) for (name, reason), count in Counter(program.left).most_common())
    return CompiledGraph(of.kind, nodes, tuple(_kernels(program)), left, "", program.source)


def _kernels(program: Program) -> list[CompiledKernel]:
    nodes = list(program.lowering.graph.graph.nodes)
    by_meta: dict[int, torch.fx.Node] = {}
    for node in nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            for meta in tree_leaves(node.meta.get("val")):
                if isinstance(meta, torch.Tensor):
                    by_meta.setdefault(id(meta), node)
    made = []
    for unit in program.schedule.units:
        kernel = getattr(unit, "kernel", None)
        if kernel is None or not any(value_of(store.buffer.numel) for store in kernel.outputs):
            continue
        traces = [one.trace for one in getattr(kernel, "kernels", [kernel])]
        fused = [_nodes(trace, by_meta) for trace in traces]
        order = [_shown(node) for of in fused for node in nodes if node in of]
        grid = tuple(map(value_of, kernel.grid if kernel.grid[1] > 1 else kernel.grid[:1]))
        made.append(CompiledKernel(tuple(order), sum(map(_bytes, traces)), grid, kernel.block, kernel.text))
    return made


def _shown(node: torch.fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removeprefix("prims.").split(".")[0]


def _nodes(trace: Trace, by_meta: Mapping[int, torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes whose values a kernel computes."""

    def computed(one: Value) -> bool:
        return one in trace.inside or not is_read(one)

    values = walked([store.value for store in trace.stores], computed)
    return {by_meta[id(one.meta)] for one in values if computed(one) and id(one.meta) in by_meta}


def _bytes(trace: Trace) -> int:
    """Elements that a kernel loads and stores, each once, in bytes."""
    total = sum(value_of(store.value.numel) * store.buffer.dtype.itemsize for store in trace.stores if store.needed)
    return total + sum(_loaded(trace, name) * buffer.dtype.itemsize for name, buffer in trace.buffers.items())


def _loaded(trace: Trace, name: str) -> int:
    """Return the largest number of elements loaded from a buffer: as many as the indices of its loads have values."""
    run = value_of(math.prod(trace.space.shape))
    loads = [one.data for code in trace.code.values() for one in code if one.what == "load"]
    offsets = [offset for _, buffer, offset, _ in loads if buffer.name == name]
    loaded = sum(min(run, math.prod(value_of(variable.size) for variable in offset.terms)) for offset in offsets)
    return min(loaded, value_of(trace.buffers[name].numel))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3f} MB" if count >= 1000 else f"{count} bytes"


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(names).items())


__all__ = ["CompileExplanation", "CompiledGraph", "CompiledKernel", "LeftCall", "explain_compile"]
