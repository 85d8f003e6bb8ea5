"""Expressions of C whose tensors have indices: `slopes[h] * (k - q)`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..errors import InputError
from .syntax import NO_INDICES, Body
from .translation import Translation
from .values import GIVE, KNOWN, Value


@dataclass(frozen=True)
class Formula(Body):
    """One expression, `text` the assignment of it to the name that is `assigned`."""

    assigned: str = ""
    refused = tuple(one for one in Body.refused if one is not NO_INDICES)

    @classmethod
    def of(cls, assigned: str, expression: str) -> Formula:
        """The expression of an argument of that name. Raises `InputError` where it is more or less than one."""
        if not isinstance(expression, str) or not expression.strip():
            raise InputError(f"{assigned} is {expression!r}, expected an expression of C")
        formula = cls(f"attention.{assigned}", f"{assigned} = {expression.strip().removesuffix(';')}", assigned)
        if ";" in formula.clean[:-1] or "{" in formula.clean:
            raise formula.error(0, "expected one expression, without statements")
        return formula

    @cached_property
    def cuda(self) -> str:
        """CUDA text of the expression, in which a captured tensor is called with its indices."""
        return Body.cuda.func(self).replace("[", "(").replace("]", ")")  # type: ignore[attr-defined]

    @property
    def expression(self) -> Any:
        """The syntax tree of it."""
        statements = self.statements
        if len(statements) != 1 or type(statements[0]).__name__ != "Assignment" or statements[0].op != "=":
            raise self.error(0, "expected one expression, without statements")
        return statements[0].rvalue


class Indexed(Translation):
    """Translation in which the tensors of `indexed`, {name: (dimensions, C type)}, have indices."""

    def __init__(
        self,
        formula: Formula,
        given: Mapping[str, str],
        indexed: Mapping[str, tuple[int, str]],
        assigned: Mapping[str, str],
    ) -> None:
        self._indexed = indexed
        self.places: list[tuple[str, int, str]] = []  # a tensor, its dimension, the place that is the index there
        assert formula.expression is not None  # which raises where it is none
        super().__init__(formula, given, assigned)

    def _of_arrayref(self, node: Any) -> Value:
        if type(node.name).__name__ == "ArrayRef":
            raise self._error(node, "the indices of a tensor stand in one pair of brackets: write x[h, q]")
        name = node.name.name if type(node.name).__name__ == "ID" else ""
        if name not in self._indexed:
            raise self._error(
                node, f"{name or 'what has an index'} is no tensor with dimensions that is given as a keyword"
            )
        dims, ctype = self._indexed[name]
        nodes = node.subscript.exprs if type(node.subscript).__name__ == "ExprList" else [node.subscript]
        if len(nodes) != dims:
            raise self._error(node, f"{name} has {dims} dimensions, and {len(nodes)} indices here; give one for each")
        self.places += [(name, dim, one.name) for dim, one in enumerate(nodes) if type(one).__name__ == "ID"]
        indices = [self.expression(one) for one in nodes]
        if any(one.ctype in ("A", "double") for one in indices):
            raise self._error(node, f"an index of {name} is no integer; convert it, int(...)")
        codes = ", ".join(self._tensor(one).code for one in indices)
        return Value(f"at_({name}_0, aligned_ and (b_0, h_0, q_0, k_0), {codes})", ctype)

    def _of_id(self, node: Any) -> Value:
        if node.name in self._indexed:
            raise self._error(node, f"{node.name} is a tensor with dimensions; give indices, as {node.name}[h]")
        return super()._of_id(node)

    def _unknown(self, node: Any) -> InputError:
        names = ", ".join(name for name, one in self.scope.items() if one.value is not None)
        return self._error(node, f"{node.name!r} is none of {names}; give it as a keyword, {node.name}=...")

    def _error(self, node: Any, message: str) -> InputError:
        return super()._error(node, re.sub(f"; {re.escape(GIVE)}", "", message))


def at(x: Tensor, places: Sequence[Tensor] | bool, *indices: Tensor) -> Tensor:
    """The elements of `x` at indices that broadcast; one that is outside is that of the nearest element.

    Where the indices are places of scores themselves, counted from 0 on, the tensor is what it is, with its dimensions at
    theirs; False: they are not counted so.
    """
    counted = () if isinstance(places, bool) else tuple(places)
    dims = [next((dim for dim, place in enumerate(counted) if place is index), 4) for index in indices]
    fits = all(dim < 4 and size in (1, counted[dim].shape[dim]) for dim, size in zip(dims, x.shape))
    if fits and all(dim < after for dim, after in itertools.pairwise(dims)):
        shape = [1, 1, 1, 1]
        for dim, size in zip(dims, x.shape):
            shape[dim] = size
        return x.reshape(shape)
    return x[tuple(index.long().clamp(0, size - 1) for index, size in zip(indices, x.shape))]


def is_name(name: str) -> bool:
    """Return True if C leaves a name to authors of expressions."""
    return name not in KNOWN and name not in ("score", "mask", "s", "q", "k", "b", "h", "A", "T", "infer")
