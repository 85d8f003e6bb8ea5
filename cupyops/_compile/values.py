"""Tensors of a graph as lazy values: code until something stores them.

A `Buffer` lies in memory. Each other value says how an element follows from elements of its operands; a `Store` marks one
that a kernel writes to memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .._util.torch_private import tree_leaves
from .index import Affine, Compute
from .size import about

Index = tuple[Affine, ...]
IndexMap = Callable[[Index, Compute], Index]

# C type in which an operator computes a dtype: halves in float, integers in their own width
COMPUTED = {
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.float32: "float",
    torch.float64: "double",
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
}
STORED = COMPUTED | {torch.float16: "f16", torch.bfloat16: "bf16"}
HALVES = (torch.float16, torch.bfloat16)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums of a dtype are kept."""
    return torch.float32 if dtype in HALVES else dtype


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Unit:
    """A step of a program. `order` is its place in the graph, `after` the steps that run before it."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.after: set[Unit] = set()


class Value:
    """A tensor of the graph. `meta` is its FakeTensor, where the graph has one."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        operands: Sequence[Any] = (),
        strides: Sequence[int] | None = None,
    ) -> None:
        self.dtype, self.operands = dtype, list(operands)
        self.shape: tuple[Any, ...] = tuple(shape)  # of ints, or of sizes
        self.strides: tuple[Any, ...] = tuple(strides) if strides is not None else dense_strides(self.shape)
        self.numel: Any = math.prod(self.shape)
        self.store: Store | None = None
        self.uses = 0
        self.meta: Any = None

    @property
    def computed(self) -> str:
        """C type of an element in registers."""
        return COMPUTED[self.dtype]

    @property
    def inputs(self) -> list[Value]:
        """Operands that are values; the others are Python numbers."""
        return [one for one in self.operands if isinstance(one, Value)]


class Buffer(Value):
    """A tensor in memory, under a name of the program.

    `unit` computes it, None for an input; of an input that a kernel has written into, the store. `aliases` are names of the
    buffers whose memory it may share.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int],
        device: torch.device,
        unit: Unit | Store | None = None,
    ) -> None:
        super().__init__(shape, dtype, strides=strides)
        self.name, self.unit, self.device = name, unit, device
        self.aliases: frozenset[str] = frozenset()


class Constant(Value):
    """A tensor of one number."""

    def __init__(self, number: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        if dtype in HALVES:  # a float computes with it
            number = torch.tensor(number, dtype=torch.float64).to(dtype).item()
        self.number = number


class Range(Value):
    """`start + step * i`, of one dimension."""

    def __init__(self, start: Any, step: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.start, self.step = start, step


class Pointwise(Value):
    """An expression of C for each element: `text` has {0}, {1} for the operands, which are converted to `compute`.

    `heavy`: expensive enough to be stored when more elements than it has use it. `widens`: a cast and nothing else.
    `rounds`: the result is rounded to its dtype even where no kernel stores it.
    """

    def __init__(
        self,
        text: str,
        operands: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: Sequence[torch.dtype] | torch.dtype | None = None,
        *,
        heavy: bool = False,
        widens: bool = False,
        rounds: bool = False,
    ) -> None:
        super().__init__(shape, dtype, operands)
        given = compute if compute is not None else dtype
        self.compute = [given] * len(self.operands) if isinstance(given, torch.dtype) else list(given)
        self.text, self.heavy, self.widens, self.rounds = text, heavy, widens, rounds


class View(Value):
    """Elements of another value: `map` turns an index of this one into an index there.

    `alias`: in eager it shares the memory of its base, and its strides in the graph are strides there.
    """

    def __init__(self, base: Value, shape: Sequence[int], map: IndexMap, *, alias: bool = False) -> None:
        super().__init__(shape, base.dtype, [base])
        self.map, self.alias = map, alias

    @property
    def base(self) -> Value:
        """The value whose elements it shows."""
        return self.inputs[0]


class Concatenation(Value):
    """Values one after another along `dim`."""

    def __init__(self, parts: Sequence[Value], dim: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, parts)
        self.dim = dim


class Placed(Value):
    """The first operand at `low`, `low + step`, ... in a dimension, elsewhere the second operand."""

    def __init__(self, source: Value, dim: int, low: int, shape: Sequence[int], other: Value, step: int = 1) -> None:
        super().__init__(shape, other.dtype, [source, other])
        self.dim, self.low, self.step = dim, low, step


class Gather(Value):
    """Elements of `source` whose coordinate in `dim` is read from an index tensor.

    `map` turns an index of the result into an index of the index tensor, `place` (index, coordinate) into one of `source`.
    `wraps`: negative coordinates count from the end.
    """

    def __init__(
        self,
        source: Value,
        index: Value,
        shape: Sequence[int],
        size: int,
        map: Callable[[Index], Index],
        place: Callable[[Index, Affine], Index],
        wraps: bool = True,
    ) -> None:
        super().__init__(shape, source.dtype, [source, index])
        self.size, self.map, self.place, self.wraps = size, map, place, wraps


class OneHot(Value):
    """`base`, but `value` where the coordinate in `dim` equals the element of `index`, which has size 1 there."""

    def __init__(self, base: Value, dim: int, index: Value, value: Any) -> None:
        super().__init__(base.shape, base.dtype, [base, index, value])
        self.dim, self.value = dim, value


class Scattered(Value):
    """The elements of `source`, which a store writes to `target` where an index tensor says in dimension `dim`."""

    def __init__(self, source: Value, dim: int, index: Value, target: Buffer, *, wraps: bool) -> None:
        order = memory_order(target)
        dense = dense_strides([source.shape[d] for d in order])
        strides = [dense[order.index(d)] for d in range(len(order))]
        super().__init__(source.shape, source.dtype, [source, index], strides)
        self.dim, self.size, self.wraps = dim, target.shape[dim], wraps


class Reduction(Value):
    """`op` ("sum", "max", "min") of the operand over `dims`, none of which is kept.

    With `parts`, one result for each of as many groups of rows, which come first in its shape: a second reduction adds them.
    """

    def __init__(
        self, op: str, source: Value, dims: Sequence[int], dtype: torch.dtype, parts: int | None = None
    ) -> None:
        self.dims = tuple(dims)
        self.kept = tuple(s for d, s in enumerate(source.shape) if d not in self.dims)
        super().__init__(self.kept if parts is None else (parts, *self.kept), dtype, [source])
        self.op, self.parts = op, parts
        self.largest: Reduction | None = None  # of a sum of exponentials, the maximum that is subtracted

    @property
    def source(self) -> Value:
        """The value that is reduced."""
        return self.inputs[0]

    def set_parts(self, parts: int) -> None:
        """Fix the number of parts, once the kernel that computes them is known."""
        self.parts = parts
        self.shape = (parts, *self.kept)
        self.strides, self.numel = dense_strides(self.shape), math.prod(self.shape)


class Store:
    """A value that a kernel writes to `buffer`. `target`: the buffer is an input of the graph, which is overwritten."""

    def __init__(self, value: Value, order: int, name: str, device: torch.device, target: Buffer | None = None) -> None:
        self.value, self.order, self.target = value, order, target
        strides = dense_strides(value.shape) if overlaps(value) else value.strides
        self.buffer = target or Buffer(name, value.shape, value.dtype, strides, device)
        self.group: Unit | None = None
        self.needed = target is not None  # something outside of its kernel reads it
        self.overwrites = False  # the buffer is another's, which is dead
        self.layout = value if isinstance(value, Scattered) else self.buffer  # whose strides say how loops go
        if target is None:
            value.store = self


def memory_order(value: Value) -> list[int]:
    """Dimensions, outermost in memory first."""
    return sorted(range(len(value.shape)), key=lambda d: (-value.strides[d], d))


def is_dense(value: Value) -> bool:
    """Return True if the strides lay its elements out without gaps and overlaps."""
    step = 1
    for d in reversed([d for d in memory_order(value) if value.shape[d] != 1]):
        if value.strides[d] - step != 0:
            return False
        step *= value.shape[d]
    return True


def overlaps(value: Value) -> bool:
    """Return True if several elements lie in one place, as those of an expanded tensor do, or may do so."""
    step = 1
    for d in reversed([d for d in memory_order(value) if value.shape[d] != 1]):
        if value.strides[d] - step != 0 and value.strides[d] < step:  # equal sizes, as most are, make no condition
            return True
        step = value.strides[d] * value.shape[d]
    return False


def layout(value: Value) -> Value:
    """The value whose strides show the order in memory: itself, or the operand of its shape that it is made of."""
    if isinstance(value, (View, Pointwise)) and value.meta is None:
        same = [v for v in value.inputs if v.shape == value.shape and not isinstance(v, Constant)]
        return layout(same[0]) if same else value
    return value


def is_column(reduction: Reduction) -> bool:
    """Return True if the reduction is over rows: the innermost dimension in memory is kept."""
    if reduction.parts is not None:
        return True
    source = reduction.source
    order = [d for d in memory_order(layout(source)) if source.shape[d] > 1]
    return bool(order) and order[-1] not in reduction.dims


def broadcast(value: Value, shape: Sequence[int]) -> Value:
    """The value expanded to a shape."""
    shape = tuple(shape)
    if value.shape == shape:
        return value
    if isinstance(value, Constant):
        return Constant(value.number, shape, value.dtype)
    return expanded(value, shape)


def expanded(value: Value, shape: Sequence[int], *, alias: bool = False) -> View:
    """The value with dimensions of size 1 repeated and others in front."""
    lead = len(shape) - len(value.shape)

    def expand(index: Index, compute: Compute) -> Index:
        return tuple(Affine() if s == 1 else i for s, i in zip(value.shape, index[lead:]))

    return View(value, shape, expand, alias=alias)


def walked(values: Iterable[Value], enters: Callable[[Value], bool]) -> Iterator[Value]:
    """Yield each value once, and what those that `enters` holds for are computed from, operands in order."""
    stack, seen = list(values)[::-1], set()
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            if enters(one):
                stack += reversed(one.inputs)


def is_read(value: Value) -> bool:
    """Return True if a value lies in memory: it is an input, or something stores it."""
    return isinstance(value, Buffer) or value.store is not None


def leaves(value: Value) -> Iterator[Buffer | Store]:
    """The buffers and stores whose memory is read to compute a value."""
    for one in walked([value], lambda one: not is_read(one)):
        if isinstance(one, Buffer):
            yield one
        elif one.store is not None:
            yield one.store


def buffer_of(leaf: Buffer | Store) -> Buffer:
    """Buffer in which a leaf lies."""
    return leaf if isinstance(leaf, Buffer) else leaf.buffer


def names_of(leaf: Buffer | Store) -> tuple[str, ...]:
    """Names of the buffers that a leaf may share memory with, its own first."""
    buffer = buffer_of(leaf)
    return (buffer.name, *buffer.aliases)


def cost(value: Value, elements: int) -> tuple[int, bool]:
    """(number of tensors of at least half of `elements` that are read, whether something heavy is computed).

    A tensor that is read at several computed places counts as many times.
    """
    large = [v for v in walked([value], lambda one: not is_read(one)) if about(v.numel) * 2 > elements]
    computed = [v for v in large if not is_read(v)]
    gathers = sum(isinstance(v, Gather) for v in computed)
    return max(len(large) - len(computed), gathers), any(isinstance(v, Pointwise) and v.heavy for v in computed)


def tensors(tree: Any) -> Iterator[Value]:
    """The values in nested arguments of a call."""
    return (one for one in tree_leaves(tree) if isinstance(one, Value))


def viewed(value: Value) -> Value:
    """Return the value that a chain of views shows: the first that is no view, or that lies in memory."""
    while isinstance(value, View) and value.store is None:
        value = value.base
    return value
