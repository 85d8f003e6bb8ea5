"""Index expressions: constants plus sums of loop variables times coefficients.

Views, permutations, slices, concatenations and padding are maps from an index of the result to an index of the operand, so
they vanish from the generated code. Division of an expression is exact where it can be; otherwise a loop variable is split
in two (`Split`) and the kernel is traced again, or the kernel computes the quotient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

VariableKind = Literal["b", "r", "c", "p", "o"]  # batch, row, column, number of the part, computed by the kernel
Compute = Callable[["Affine", str, int, int], "Variable"]  # (expression, "/" or "%", divisor, bound) -> its value


class Split(Exception):
    """A loop variable is to become two, of which the inner one runs over `inner` values."""

    def __init__(self, variable: Variable, inner: int) -> None:
        self.variable, self.inner = variable, inner


class Reject(Exception):
    """The stores cannot share a kernel; the text says why."""


class Variable:
    """An integer below `size` that a kernel knows by name."""

    __slots__ = ("kind", "name", "size")

    def __init__(self, name: str, size: int, kind: VariableKind) -> None:
        self.name, self.size, self.kind = name, size, kind

    def __repr__(self) -> str:
        return f"{self.name}<{self.size}"


class Affine:
    """`const` plus coefficients times variables. Immutable, equal by content."""

    __slots__ = ("_hash", "const", "terms")

    def __init__(self, terms: dict[Variable, int] | None = None, const: int = 0) -> None:
        self.terms = {v: c for v, c in (terms or {}).items() if c}
        self.const = const
        self._hash = hash((const, frozenset((id(v), c) for v, c in self.terms.items())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Affine) and self.const == other.const and self.terms == other.terms

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.const + other)
        terms = dict(self.terms)
        for v, c in other.terms.items():
            terms[v] = terms.get(v, 0) + c
        return Affine(terms, self.const + other.const)

    def __mul__(self, factor: int) -> Affine:
        return Affine({v: c * factor for v, c in self.terms.items()}, self.const * factor)

    def __neg__(self) -> Affine:
        return self * -1

    @property
    def least(self) -> int:
        """Lower bound over all values of the variables."""
        return self.const + sum(c * (v.size - 1) for v, c in self.terms.items() if c < 0)

    @property
    def most(self) -> int:
        """Upper bound over all values of the variables."""
        return self.const + sum(c * (v.size - 1) for v, c in self.terms.items() if c > 0)

    def divmod(self, divisor: int, compute: Compute) -> tuple[Affine, Affine]:
        """Quotient and remainder, exact where possible, else by `compute`.

        Raises:
            Split: it is exact after a loop variable has been split.
        """
        if divisor == 1:
            return self, Affine()
        multiple: dict[Variable, int] = {}
        rest: dict[Variable, int] = {}
        for v, c in self.terms.items():
            (multiple if c % divisor == 0 else rest)[v] = c
        quotient, remainder = divmod(self.const, divisor)
        if all(c > 0 for c in rest.values()) and remainder + sum(c * (v.size - 1) for v, c in rest.items()) < divisor:
            return Affine({v: c // divisor for v, c in multiple.items()}, quotient), Affine(rest, remainder)
        for v, c in rest.items():
            if v.kind != "o" and c > 0 and divisor % c == 0:
                inner = divisor // c
                if v.size % inner == 0 and v.size > inner > 1:
                    raise Split(v, inner)
        return (
            Affine({compute(self, "/", divisor, max(self.most, 0) // divisor + 1): 1}),
            Affine({compute(self, "%", divisor, divisor): 1}),
        )

    def text(self, names: dict[Variable, str] | None = None) -> str:
        """The expression in C."""
        parts = []
        for v, c in sorted(self.terms.items(), key=lambda term: -abs(term[1])):
            name = (names or {}).get(v, v.name)
            parts.append(name if c == 1 else f"{name} * {c}")
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)

    def __repr__(self) -> str:
        return self.text()


def flatten(index: Sequence[Affine], shape: Sequence[int]) -> Affine:
    """Position of an index in row-major order."""
    total, stride = Affine(), 1
    for coordinate, size in zip(reversed(index), reversed(shape)):
        total = total + coordinate * stride
        stride *= size
    return total


def unflatten(position: Affine, shape: Sequence[int], compute: Compute) -> tuple[Affine, ...]:
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


def never(expression: Affine, operator: str, divisor: int, bound: int) -> Variable:
    """A `Compute` for divisions that are to be exact."""
    raise Reject("a division is not exact")
