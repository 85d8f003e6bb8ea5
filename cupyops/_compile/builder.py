"""The builder that rules of lowering use: pointwise values, stores, writes to inputs; and the table of rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .size import Real, Size, about
from .sizes import Sizes
from .values import (
    Buffer,
    Constant,
    Pointwise,
    Range,
    Reduction,
    Scattered,
    Store,
    Value,
    View,
    broadcast,
    cost,
    is_dense,
)

RULES: dict[Any, Callable[..., Any]] = {}  # of lowering, by overload


def rule(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of overloads."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


class Result(NamedTuple):
    """Shape and dtype of a result that a rule has to give."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Builder:
    """Values and stores of a graph, as far as it is lowered.

    Attributes:
        sizes: what its symbolic sizes are.
        device: whose tensors kernels compute.
        stores: what kernels write.
        node: the node that is lowered now, and `order` its place in the graph.
    """

    node: Node
    order: int

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.stores: list[Store] = []
        self.names = 0

    def name(self, hint: str) -> str:
        """A new name in the program."""
        self.names += 1
        return f"{hint}{self.names}"

    def in_memory(self, value: Value) -> None:
        """Store a value, or the base of a view."""
        base = value
        while isinstance(base, View) and base.store is None and _can_be_view(base):
            base = base.base
        if not isinstance(base, Buffer):
            self.store(base).needed = True

    def store(self, value: Value) -> Store:
        """The store of a value."""
        if value.store is None:
            self.stores.append(Store(value, self.order, self.name("b"), self.device))
        assert value.store is not None
        return value.store

    def write(self, target: Buffer, value: Value) -> None:
        """Overwrite an input of the graph at its end."""
        store = Store(value, self.order, "", self.device, target=target)
        self.stores.append(store)

    def scatter(self, target: Buffer, value: Scattered) -> Buffer:
        """Write elements into an input of the graph, whose old value nothing reads; return it as it is then."""
        store = Store(value, self.order, "", self.device, target=target)
        self.stores.append(store)
        after = Buffer(target.name, target.shape, target.dtype, target.strides, target.device, store)
        after.meta = target.meta
        return after

    # -- values ----------------------------------------------------------------------------------------------------

    def pointwise(
        self,
        result: Result,
        text: str,
        operands: Sequence[Any],
        compute: Sequence[torch.dtype] | torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        """An expression for each element, of operands that are broadcast; NotImplemented where one is no number."""
        made: list[Any] = []
        for one in operands:
            if isinstance(one, Value):
                made.append(broadcast(self.used(one, result.shape), result.shape))
            elif isinstance(one, (bool, int, float, Size, Real)):
                made.append(one)
            else:
                return NotImplemented
        value = Pointwise(text, made, result.shape, result.dtype, compute, **options)
        for one, dtype in zip(made, value.compute):
            if isinstance(one, int) and not dtype.is_floating_point and dtype is not torch.bool:
                limits = torch.iinfo(dtype)
                if not limits.min <= one <= limits.max:
                    return NotImplemented
        return value

    def used(self, value: Value, shape: Sequence[int] | None = None) -> Value:
        """Note that elements of a value are used, for each element of `shape`, by default its own.

        It is stored where computing it again would cost more than reading it.
        """
        base = value
        while isinstance(base, View) or (isinstance(base, Pointwise) and base.widens and base.store is None):
            base = base.inputs[0]  # what is stored is the narrow value
        if isinstance(base, (Buffer, Constant, Range)) or base.store is not None:
            return value
        base.uses += 1
        if isinstance(base, Reduction):
            self.store(base)
        elif about(math.prod(value.shape if shape is None else shape)) > about(base.numel):
            reads, heavy = cost(base, about(base.numel))
            if heavy or reads >= 3:
                self.store(base)
        elif base.uses > 1:
            reads, heavy = cost(base, about(base.numel))
            if reads + heavy >= 3:
                self.store(base)
        return value


def _can_be_view(view: View) -> bool:
    """Return True if a view is an `as_strided` of its base, with the strides that the graph has for both."""
    base = view.base
    return view.alias and view.meta is not None and (isinstance(base, (Buffer, View)) or is_dense(base))
