"""Index expressions: constants plus sums of loop variables times coefficients.

Views, permutations, slices, concatenations and padding are maps from an index of the result to an index of the operand, so
they vanish from the generated code. Division of an expression is exact where it can be; otherwise a loop variable is split
in two (`Split`) and the kernel is traced again, or the kernel computes the quotient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from .size import Number, about, at_most, divides, over, same

VariableKind = Literal["b", "r", "c", "p", "o"]  # batch, row, column, number of the part, computed by the kernel
Compute = Callable[["Affine", str, Number, Number], "Variable"]  # (expression, "/" or "%", divisor, bound) -> its value


class Split(Exception):
    """A loop variable is to become two, of which the inner one runs over `inner` values."""

    def __init__(self, variable: Variable, inner: Number) -> None:
        self.variable, self.inner = variable, inner


class Reject(Exception):
    """The stores cannot share a kernel; the text says why."""


class Variable:
    """An integer below `size` that a kernel knows by name."""

    __slots__ = ("kind", "name", "size")

    def __init__(self, name: str, size: Number, kind: VariableKind) -> None:
        self.name, self.size, self.kind = name, size, kind

    def __repr__(self) -> str:
        return f"{self.name}<{self.size}"


class Affine:
    """`const` plus coefficients times variables, integers or sizes. Immutable, equal by content."""

    __slots__ = ("_hash", "const", "terms")

    def __init__(self, terms: dict[Variable, Number] | None = None, const: Number = 0) -> None:
        self.terms = {v: c for v, c in (terms or {}).items() if not same(c, 0)}
        self.const = const
        self._hash = hash((const, frozenset((id(v), c) for v, c in self.terms.items())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Affine) and self.const == other.const and self.terms == other.terms

    def __add__(self, other: Affine | Number) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, self.const + other)
        terms = dict(self.terms)
        for v, c in other.terms.items():
            terms[v] = terms.get(v, 0) + c
        return Affine(terms, self.const + other.const)

    def __mul__(self, factor: Number) -> Affine:
        return Affine({v: c * factor for v, c in self.terms.items()}, self.const * factor)

    def __neg__(self) -> Affine:
        return self * -1

    @property
    def least(self) -> Number:
        """Lower bound over all values of the variables."""
        return self.const + sum(c * (v.size - 1) for v, c in self.terms.items() if c < 0)

    @property
    def most(self) -> Number:
        """Upper bound over all values of the variables."""
        return self.const + sum(c * (v.size - 1) for v, c in self.terms.items() if c > 0)

    def divmod(self, divisor: Number, compute: Compute) -> tuple[Affine, Affine]:
        """Quotient and remainder, exact where possible, else by `compute`.

        Raises:
            Split: it is exact after a loop variable has been split.
        """
        if divisor == 1:
            return self, Affine()
        multiple = {v: over(c, divisor) for v, c in self.terms.items()}
        rest = {v: c for v, c in self.terms.items() if multiple[v] is None}
        quotient = self.const // divisor
        least = Affine(rest, self.const - quotient * divisor)
        if all(at_most(1, c) for c in rest.values()) and at_most(0, least.const) and at_most(least.most + 1, divisor):
            return Affine({v: c for v, c in multiple.items() if c is not None}, quotient), least
        for v, c in rest.items():
            inner = over(divisor, c) if v.kind != "o" and at_most(1, c) else None
            if inner is not None and divides(inner, v.size) and at_most(2, inner) and at_most(inner + 1, v.size):
                raise Split(v, inner)
        bound = self.most // divisor + 1 if self.most >= 0 else 1
        return Affine({compute(self, "/", divisor, bound): 1}), Affine({compute(self, "%", divisor, divisor): 1})

    def text(self, names: dict[Variable, str] | None = None) -> str:
        """The expression in C."""
        parts = []
        for v, c in sorted(self.terms.items(), key=lambda term: -abs(about(term[1]))):
            name = (names or {}).get(v, v.name)
            parts.append(name if same(c, 1) else f"{name} * {c}")
        if not (parts and same(self.const, 0)):
            parts.append(str(self.const))
        return " + ".join(parts)

    def __repr__(self) -> str:
        return self.text()


def flatten(index: Sequence[Affine], shape: Sequence[Number]) -> Affine:
    """Position of an index in row-major order."""
    total, stride = Affine(), 1
    for coordinate, size in zip(reversed(index), reversed(shape)):
        total = total + coordinate * stride
        stride *= size
    return total


def unflatten(position: Affine, shape: Sequence[Number], compute: Compute) -> tuple[Affine, ...]:
    """Index of a position in row-major order."""
    found = []
    for k in range(len(shape) - 1, 0, -1):
        if shape[k] == 1:
            found.append(Affine())
        elif all(size == 1 for size in shape[:k]):
            found.append(position)
            position = Affine()
        else:
            position, rest = position.divmod(shape[k], compute)
            found.append(rest)
    if shape:
        found.append(position if shape[0] != 1 else Affine())
    return tuple(reversed(found))


def never(expression: Affine, operator: str, divisor: Number, bound: Number) -> Variable:
    """A `Compute` for divisions that are to be exact."""
    raise Reject("a division is not exact")
