"""The sizes of a graph: numbers, and where it has symbols, polynomials of them.

A graph with dynamic sizes has symbols in its shapes. Those of its inputs are known at each call; those that data decides
(the number of elements that are not zero) never are, and what has them stays PyTorch's.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .size import LARGEST, Conditions, Real, Size, at_most, text_of

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {  # of sympy
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": lambda a, b: b if at_most(a, b) else max(a, b),
    "Min": lambda a, b: a if at_most(a, b) else min(a, b),
}
REALS = {"Add": " + ", "Mul": " * ", "FloatTrueDiv": " / ", "IntTrueDiv": " / ", "ToFloat": ""}


class Sizes:
    """The numbers of a graph in a program.

    Args:
        symbols: of the graph.
        values: of the symbols in the call that the program is made for.
        constant: the program is for these values alone, which are integers in it then.
    """

    def __init__(self, symbols: Symbols | None = None, values: Sequence[Any] = (), *, constant: bool = False) -> None:
        self.conditions = Conditions()
        self.places = symbols.places if symbols is not None else {}
        self.values = dict(zip(self.places, values))
        self.constant = constant
        self._found: dict[Any, Any] = {}
        bounds = symbols.bounds if symbols is not None else {}
        for symbol, value in self.values.items():
            if constant:
                self.conditions.assume(f"{symbol} == {value!r}", "", holds=True)
            elif isinstance(value, int):
                self._found[symbol] = self.conditions.symbol(str(symbol), value, *bounds[symbol])
            else:
                self._found[symbol] = Real(self.conditions, str(symbol), value)

    def knows(self, meta: Any) -> bool:
        """Return True if all numbers in a node's result follow from the symbols."""
        if isinstance(meta, torch.Tensor):
            return all(self.knows(n) for n in (*meta.shape, *meta.stride(), meta.storage_offset()))
        if isinstance(meta, (tuple, list)):
            return all(self.knows(one) for one in meta)
        if isinstance(meta, SYMBOLIC):
            return all(symbol in self.values for symbol in meta.node.expr.free_symbols)
        return True

    def number(self, value: Any) -> Any:
        """A number of the graph."""
        if not isinstance(value, SYMBOLIC):
            return value
        expression = value.node.expr
        if expression not in self._found:
            found = self._size(expression) if isinstance(value, torch.SymInt) else None
            if found is None and isinstance(value, torch.SymFloat) and not self.constant:
                found = self._real(expression)
            self._found[expression] = self._fixed(expression, PLAIN[type(value)]) if found is None else found
        return self._found[expression]

    def numbers(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Integers of the graph."""
        return tuple(self.number(n) for n in values)

    def _fixed(self, expression: Any, kind: Callable[[Any], Any]) -> Any:
        """The value of an expression, and the program is for these values of its symbols alone."""
        for symbol in expression.free_symbols:
            kind_of = int if isinstance(self._found.get(symbol), Size) else float
            if symbol in self._found:
                kind_of(self._found[symbol])
        return kind(expression.xreplace(self.values))

    def _size(self, expression: Any) -> Any:
        """An integer expression of sympy as a size; None for what has no such form."""
        if isinstance(self._found.get(expression), (int, Size)):
            return self._found[expression]
        if expression.is_Integer:
            return int(expression)
        name = type(expression).__name__
        parts = [self._size(one) for one in expression.args]
        if not parts or any(one is None for one in parts):
            return None
        if name in ("Pow", "PowByNatural") and isinstance(parts[1], int) and parts[1] > 0:
            return math.prod(parts[1] * parts[:1])
        if name in OPERATORS:
            return functools.reduce(OPERATORS[name], parts)
        return None

    def _real(self, expression: Any) -> Any:
        """A floating-point expression of sympy that Python computes at each call; None for what has no such form."""
        found = self._found.get(expression, self._size(expression))
        if found is not None:
            return found
        if expression.is_Float or expression.is_Rational:
            return float(expression)
        name, parts = type(expression).__name__, [self._real(one) for one in expression.args]
        if name == "Pow" and parts[1] == -1:
            name, parts = "FloatTrueDiv", [1.0, parts[0]]
        if name not in REALS or any(one is None for one in parts):
            return None
        text = f"float({REALS[name].join(f'({text_of(one)})' for one in parts)})"
        return Real(self.conditions, text, eval(text, {str(k): v for k, v in self.values.items()}))


class Symbols:
    """Places of a graph's symbols in its arguments.

    Attributes:
        places: symbol -> (argument, dimension, or None for a number).
        bounds: symbol -> (least, most), by the guards of Dynamo.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.places: dict[Any, tuple[int, int | None]] = {}
        self.bounds: dict[Any, tuple[int, int]] = {}
        self._hints: list[Any] = []
        for k, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            meta = node.meta.get("val")
            numbers = enumerate(meta.shape) if isinstance(meta, torch.Tensor) else [(None, meta)]
            for dim, number in numbers:
                if not isinstance(number, SYMBOLIC):
                    continue
                symbol = number.node.expr
                if symbol.is_Symbol and symbol not in self.places:
                    self.places[symbol] = k, dim
                    self.bounds[symbol] = _bounds(number)
                    self._hints.append(number.node.hint)  # type: ignore[union-attr]

    def values(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The values in the arguments of a call."""
        return tuple(args[k] if dim is None else args[k].shape[dim] for k, dim in self.places.values())

    def hinted(self) -> tuple[Any, ...]:
        """The values in the call that the graph was made for."""
        return tuple(self._hints)


def _bounds(number: Any) -> tuple[int, int]:
    found = number.node.shape_env.var_to_range.get(number.node.expr)
    if found is None or not isinstance(number, torch.SymInt):
        return -LARGEST, LARGEST
    least, most = (int(min(max(one, -LARGEST), LARGEST)) for one in (found.lower, found.upper))
    return least, most
