"""Lowering of a graph of ATen calls to lazy values, stores and the calls that stay PyTorch's.

Each call is looked up in `rules.RULES` by its overload. A rule names the arguments that it understands. A call stays what it
is, on tensors in memory, if another argument is off its default, if a tensor has a dtype, device or layout that kernels do
not know, or if the rule returns NotImplemented.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from .._util.torch_private import tree_leaves
from . import inplace, rules
from .builder import Builder, Result
from .kernel_group import Call
from .sizes import SYMBOLIC, Sizes
from .values import COMPUTED, Buffer, Constant, Pointwise, Value, names_of, tensors

log = logging.getLogger("cupyops.compile")


class Unsupported(Exception):
    """The whole graph is left to PyTorch; the text says why."""


DONATED = "cupyops_donated"  # in a graph's meta: names of placeholders whose memory the graph may overwrite
LIBRARIES = frozenset(
    f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
)
# arguments of which the FakeTensor of the result says all: shape, dtype, device, strides
IMPLIED = frozenset(
    ("size", "dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "requires_grad", "implicit")
)


class Name(str):
    """Name of something in the program that is no tensor that kernels know: a number, a list, a generator's state."""

    __slots__ = ()


def plain(tensor: torch.Tensor) -> bool:
    """Return True if kernels support the tensor's dtype and layout."""
    return (
        tensor.dtype in COMPUTED
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


class Lowering(Builder):
    """The values of a graph.

    Attributes:
        calls: the calls that stay PyTorch's, in order.
        stores: what kernels write; the scheduler may add to it.
        inputs: of each placeholder the `Buffer`, or the name of what is no tensor.
        outputs: what the graph returns: values, names (of type `Name`) and Python objects.
        exact: values that are computed twice, in forward and in backward, are compared, so they must have equal bits.
        left: (node, reason) of each call that stays PyTorch's.
    """

    def __init__(self, graph: GraphModule, sizes: Sizes | None = None, *, exact: bool = False) -> None:
        super().__init__(sizes or Sizes(), device_of(graph))
        self.graph, self.exact = graph, exact
        self.donated: set[str] = set()  # names of inputs that may be overwritten
        self.calls: list[Call] = []
        self.inputs: list[Buffer | Name] = []
        self.outputs: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.left: list[tuple[Node, str]] = []
        self.values: dict[Node, Any] = {}
        for self.order, node in enumerate(graph.graph.nodes):
            self.node = node
            try:
                self._lower(node)
            except Unsupported:
                raise
            except Exception as error:
                error.add_note(f"at {described(node)}")
                raise
        for one in self.outputs:
            if isinstance(one, Value):
                self.in_memory(one)

    def _lower(self, node: Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
        elif node.op == "get_attr":
            self.values[node] = self._attribute(node)
        elif node.op == "output":
            self.outputs = [self.get(one) for one in node.args[0]]  # type: ignore[union-attr]
        elif node.op == "call_function":
            self.values[node] = self._call(node)
        else:
            raise Unsupported(f"a node of kind {node.op}")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: Node) -> Any:
        meta = node.meta.get("val")
        name = f"a{len(self.inputs)}"
        if isinstance(meta, torch.Tensor) and self.sizes.knows(meta):
            buffer = self._buffer(name, meta)
            self.inputs.append(buffer)
            if node.name in self.graph.meta.get(DONATED, ()):
                self.donated.add(name)
            return buffer
        self.inputs.append(Name(name))
        if isinstance(meta, SYMBOLIC) and self.sizes.knows(meta):
            return self.sizes.number(meta)
        return Name(name)

    def _buffer(self, name: str, meta: torch.Tensor, unit: Call | None = None) -> Buffer:
        """A tensor in memory with the sizes and strides of a FakeTensor."""
        shape, strides = self.sizes.numbers(meta.shape), self.sizes.numbers(meta.stride())
        buffer = Buffer(name, shape, meta.dtype, strides, meta.device, unit)
        buffer.meta = meta
        return buffer

    def _attribute(self, node: Node) -> Any:
        value: Any = operator.attrgetter(str(node.target))(self.graph)
        name = f"self_{str(node.target).replace('.', '_')}"
        self.constants[name] = value
        if not isinstance(value, torch.Tensor):
            return Name(name)
        buffer = Buffer(name, tuple(value.shape), value.dtype, value.stride(), value.device)
        buffer.meta = node.meta.get("val", value)
        return buffer

    def get(self, argument: Any) -> Any:
        """An argument of a node with values in the place of nodes."""

        def given(one: Any) -> Any:
            if isinstance(one, Node):
                return self.values[one]
            return self.sizes.number(one) if isinstance(one, SYMBOLIC) and self.sizes.knows(one) else one

        return map_aggregate(argument, given)

    def _call(self, node: Node) -> Any:
        meta = node.meta.get("val")
        if node.target is operator.getitem:
            source = self.get(node.args[0])
            if isinstance(source, list):
                return source[node.args[1]]  # type: ignore[index]
        if isinstance(meta, SYMBOLIC) and self.sizes.knows(meta):
            return self.sizes.number(meta)
        found, reason = self._by_rule(node, meta)
        return self.external(reason) if found is None else found

    def _by_rule(self, node: Node, meta: Any) -> tuple[Any, str]:
        """(value, "") by the rule of the overload, or (None, why there is none)."""
        rule = rules.RULES.get(node.target)
        if rule is None:
            name = getattr(getattr(node.target, "_schema", None), "name", "")
            if name in LIBRARIES:
                return None, "computed by cuBLAS or cuDNN"
            known = name.startswith(("aten::", "prims::"))
            return None, "the backend has no kernel for it" if known else "an operator with kernels of its own"
        several = isinstance(meta, (tuple, list))
        metas = list(meta) if several else [meta]
        if not any(isinstance(one, torch.Tensor) for one in metas):
            return None, "its result is no tensor"
        arguments = [n.meta.get("val") for n in node.all_input_nodes]
        for one in (*metas, *arguments):
            if not self.sizes.knows(one):
                return None, "its size depends on data"
            if isinstance(one, torch.Tensor):
                if not plain(one):
                    return None, f"a tensor of {one.dtype}, layout {one.layout}"
                if one.device != self.device:
                    return None, f"a tensor on {one.device}"
        named = self._bind(node, rule)
        if isinstance(named, str):
            return None, named
        results = [
            Result(self.sizes.numbers(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in metas
        ]
        if not _writes(node) and all(isinstance(one, Result) and 0 in one.shape for one in results):
            nothing = [Constant(0, one.shape, one.dtype) for one in results]
            found: Any = nothing if several else nothing[0]
        else:
            found = rule(self, results if several else results[0], **named)
        if found is NotImplemented:
            return None, "arguments that its rule does not take"
        for one, of in zip(found if isinstance(found, list) else [found], metas):
            if isinstance(one, Value) and isinstance(of, torch.Tensor):
                self._check(node, one, of)
        return found, ""

    def _check(self, node: Node, value: Value, meta: torch.Tensor) -> None:
        if value.shape != self.sizes.numbers(meta.shape) or value.dtype != meta.dtype:
            raise AssertionError(
                f"{node.format_node()}: lowered to {value.dtype}{value.shape}, expected {meta.dtype}{tuple(meta.shape)}"
            )
        if not isinstance(value, Buffer) and value.meta is None:
            value.meta = meta
            value.strides = self.sizes.numbers(meta.stride())

    def _bind(self, node: Node, rule: Callable[..., Any]) -> dict[str, Any] | str:
        """The arguments that a rule names; a text, if another one is off its default."""
        accepted = _parameters(rule)
        named = {}
        for k, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            name = "x" if argument.name == "self" else argument.name
            if k < len(node.args):
                value = self.get(node.args[k])
            elif argument.name in node.kwargs:
                value = self.get(node.kwargs[argument.name])
            else:
                continue
            if name in accepted or "operands" in accepted:
                named[name] = value
            elif name in IMPLIED:
                continue
            elif value is not None and (not argument.has_default_value() or value != argument.default_value):
                return f"argument {argument.name}"
        return named

    # -- calls that stay -------------------------------------------------------------------------------------------

    def external(self, reason: str) -> Any:
        """The call of the current node itself."""
        node = self.node
        positional = self.get(node.args)
        if _writes(node) and node.target not in inplace.OVERWRITING.values():
            return self._overwrite(*positional)
        self.left.append((node, reason))
        log.debug("%s stays PyTorch's: %s", node.format_node(), reason)
        target = positional[0] if _writes(node) else None
        call = Call(node, self.order, positional, self.get(dict(node.kwargs)), serial=_is_serial(node), target=target)
        for one in tensors((call.args, call.kwargs)):
            self.in_memory(one)
        self.calls.append(call)
        aliases = _aliased(node, call)

        def made(meta: Any, path: tuple[int, ...]) -> Any:
            if isinstance(meta, torch.Tensor) and self.sizes.knows(meta):
                buffer = self._buffer(self.name("e"), meta, call)
                buffer.aliases = aliases
                call.outputs[path] = buffer
                return buffer
            if isinstance(meta, (tuple, list)):
                return [made(one, (*path, k)) for k, one in enumerate(meta)]
            name = Name(self.name("m"))
            call.outputs[path] = name
            return name

        return made(node.meta.get("val"), ())

    def _overwrite(self, x: Any, src: Any = None, *args: Any) -> Any:
        """PyTorch's own copy into an input that kernels do not write, from memory that nothing else changes."""
        node = self.node
        input_of_graph = isinstance(x, Buffer) and x.unit is None and any(x is one for one in self.inputs)
        if node.target is not torch.ops.aten.copy_.default or not input_of_graph or not isinstance(src, Value):
            raise Unsupported(f"{node.target} writes to a tensor")
        if plain(src.meta) and src.meta.device == self.device:
            src = Pointwise("{0}", [src], src.shape, src.dtype)
        elif not (isinstance(src, Buffer) and src.unit is not None and not src.aliases):
            raise Unsupported(f"{node.target} writes a tensor of {src.dtype} on {src.meta.device}")
        self.in_memory(src)
        self.calls.append(Call(node, self.order, [x, src], {}, serial=False, target=x))
        return x


@cache
def _parameters(rule: Callable[..., Any]) -> frozenset[str]:
    return frozenset(list(inspect.signature(rule).parameters)[2:])


def device_of(graph: GraphModule) -> torch.device:
    """The device whose tensors kernels compute: the first that is no CPU, else the CPU."""
    found = torch.device("cpu")
    for node in graph.graph.nodes:
        for meta in _flat(node.meta.get("val")):
            if meta.device.type != "cpu":
                return meta.device
            found = meta.device
    return found


def described(node: Node) -> str:
    """A node with the types and shapes of its tensors, for messages."""

    def shown(meta: Any) -> str:
        one = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _flat(meta))
        return one or type(meta).__name__

    given = ", ".join(f"{n.name}: {shown(n.meta.get('val'))}" for n in node.all_input_nodes)
    return f"{node.name} = {node.target}({given}) -> {shown(node.meta.get('val'))}"


def name_of(target: Any) -> str:
    """Overload that a node calls, or the name of a function of this library."""
    return f"cupyops.{target.__name__}" if isinstance(target, FunctionType) else str(target)


def _flat(meta: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(meta) if isinstance(one, torch.Tensor)]


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_serial(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        tags = target.tags
        if torch.Tag.nondeterministic_seeded in tags or target.namespace in ("_c10d_functional", "c10d_functional"):
            return True
    elif isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return node.is_impure()


def _aliased(node: Node, call: Call) -> frozenset[str]:
    """Names of the buffers whose memory the results of a call may share, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(one.alias_info is not None for one in schema.returns):
        return frozenset()
    return frozenset(name for leaf in call.leaves() for name in names_of(leaf))
