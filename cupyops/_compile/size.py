"""Sizes that a program is told at each call: polynomials of the symbols of a graph, in the place of its integers.

A `Size` is computed with as an int is. A decision that code takes on one, such as `size > 1`, is taken for the values of the
call that the program is made for, and kept as a condition: the program serves all calls for which its conditions hold. So
whatever code does with a size is right, and the worst that it can do is to make a program for few sizes. What is decided for
speed alone asks `about`, which is the same number for all values, and what has a form that is always right asks `at_most`,
`over` or `divides`: neither is a condition.

Written into a text, a size is a mark, in whose place `named` puts the name of a parameter or of a variable.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

log = logging.getLogger("cupyops.compile")

NOMINAL = 256  # what decisions for speed take a symbol for
LARGEST = 1 << 48  # no tensor has as many elements
MARK = re.compile(r"@(\d+)@")


_numbers = itertools.count()
_marked: WeakValueDictionary[int, Size | Real] = WeakValueDictionary()  # by their numbers; `Conditions` keep them alive


class Atom:
    """An integer that is known at each call: a symbol, or a quotient of sizes that is not exact. `text` is Python."""

    __slots__ = ("least", "most", "nominal", "number", "text", "value")

    def __init__(self, number: int, text: str, value: int, nominal: int, least: int, most: int) -> None:
        self.number, self.text, self.value, self.nominal = number, text, value, nominal
        self.least, self.most = least, most


Term = tuple[Atom, ...]  # a product


class Conditions:
    """Assumptions on the sizes of a program, and the marks of sizes in its texts.

    Attributes:
        texts: the conditions, in Python.
        shown: the sizes that stand in texts, with the numbers of their marks.
    """

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}
        self.shown: dict[Size | Real, int] = {}
        self.atoms: dict[Any, Atom] = {}

    def symbol(self, text: str, value: int, least: int = 0, most: int = LARGEST) -> Size:
        """A size of which nothing is known but its bounds."""
        atom = self._atom(text, text, value, min(max(NOMINAL, least), most), least, min(most, LARGEST))
        return Size(self, {(atom,): 1})

    def quotient(self, a: Size | int, b: Size | int) -> Size:
        """a // b, of which no part is exact."""
        if not b > 0:
            raise ZeroDivisionError(f"{text_of(a)} // {text_of(b)}, which is {value_of(b)}")
        low, high = (a.least, a.most) if isinstance(a, Size) else (a, a)
        if isinstance(b, int):
            low, high = low // b, high // b
        elif low >= 0:
            low = 0
        else:
            low, high = -LARGEST, LARGEST
        text = f"({text_of(a)} // ({text_of(b)}))"
        nominal = about(a) // max(about(b), 1)
        return Size(self, {(self._atom((a, b), text, value_of(a) // value_of(b), nominal, low, high),): 1})

    def _atom(self, key: Any, *what: Any) -> Atom:
        return self.atoms.setdefault(key, Atom(len(self.atoms), *what))

    def mark(self, size: Size | Real) -> str:
        """Return the mark of a size, which stands for it in a text."""
        if size not in self.shown:
            number = self.shown[size] = next(_numbers)
            _marked[number] = size
        return f"@{self.shown[size]}@"

    def assume(self, text: str, other: str, *, holds: bool) -> bool:
        """Keep the condition that holds, of one and its opposite."""
        self.texts[text if holds else other] = None
        return holds


class Size:
    """A polynomial with integer coefficients, of which one at least is not constant. Equal by content."""

    __slots__ = ("__weakref__", "_hash", "conditions", "terms")

    def __init__(self, conditions: Conditions, terms: dict[Term, int]) -> None:
        self.conditions, self.terms = conditions, terms
        self._hash = hash(frozenset(terms.items()))

    def _of(self, terms: dict[Term, int]) -> Size | int:
        left = {t: c for t, c in terms.items() if c}
        return Size(self.conditions, left) if any(left) else left.get((), 0)

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, (int, Size)):
            return NotImplemented
        terms = dict(self.terms)
        for t, c in _terms(other).items():
            terms[t] = terms.get(t, 0) + c
        return self._of(terms)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, Size)):
            return NotImplemented
        terms: dict[Term, int] = {}
        for t, c in self.terms.items():
            for u, d in _terms(other).items():
                both = tuple(sorted(t + u, key=lambda atom: atom.number))
                terms[both] = terms.get(both, 0) + c * d
        return self._of(terms)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1 if isinstance(other, (int, Size)) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __floordiv__(self, other: Any) -> Any:
        return _quotient(self, other) if isinstance(other, (int, Size)) else NotImplemented

    def __rfloordiv__(self, other: int) -> Any:
        return _quotient(other, self)

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other

    def __rmod__(self, other: int) -> Any:
        return other - other // self * self

    # -- bounds --------------------------------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """A lower bound for all values."""
        return max(self._bound(), self._shifted())

    @property
    def most(self) -> int:
        """An upper bound for all values."""
        return -(-self).least

    def _bound(self) -> int:
        """Add the lower bounds of the terms."""
        total = 0
        for t, c in self.terms.items():
            if any(atom.least < 0 for atom in t):
                ends = [atom.least for atom in t] + [atom.most for atom in t]
                total -= abs(c) * max(map(abs, ends)) ** len(t)
            else:
                total += c * math.prod(atom.least if c > 0 else atom.most for atom in t)
        return total

    def _shifted(self) -> int:
        """Write each atom as its lower bound plus a rest; without negative coefficients the constant term is a bound."""
        terms: dict[Term, int] = {}
        for t, c in self.terms.items():
            parts: dict[Term, int] = {(): c}
            for atom in t:
                more = {(*u, atom): d for u, d in parts.items()}
                parts = {u: d * atom.least for u, d in parts.items()}
                for u, d in more.items():
                    parts[u] = parts.get(u, 0) + d
            for u, d in parts.items():
                terms[u] = terms.get(u, 0) + d
        least = terms.pop((), 0)
        return least if all(c >= 0 for c in terms.values()) else -(LARGEST**4)

    # -- decisions, which become conditions ----------------------------------------------------------------------------

    def __lt__(self, other: Any) -> bool:
        return _positive(other - self)

    def __le__(self, other: Any) -> bool:
        return _positive(other - self + 1)

    def __gt__(self, other: Any) -> bool:
        return _positive(self - other)

    def __ge__(self, other: Any) -> bool:
        return _positive(self - other + 1)

    def __eq__(self, other: object) -> bool:
        """Decided for 0 and 1, which change what is right. Others are equal as polynomials: no code needs more."""
        if isinstance(other, Size):
            return self.terms == other.terms
        if not isinstance(other, int) or other not in (0, 1):
            return NotImplemented
        difference = self - other
        apart = math.gcd(*(c for t, c in difference.terms.items() if t))
        if difference.least > 0 or difference.most < 0 or difference.terms.get((), 0) % apart:
            return False
        text = text_of(self)
        return self.conditions.assume(f"{text} == {other}", f"{text} != {other}", holds=value_of(self) == other)

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """Return the value as a constant; the program is then for this value alone."""
        value = value_of(self)
        log.debug("%s is needed as a constant, %d", text_of(self), value, stack_info=True)
        self.conditions.assume(f"{text_of(self)} == {value}", "", holds=True)
        return value

    __int__ = __index__

    def __float__(self) -> float:
        return float(int(self))

    def __str__(self) -> str:
        return self.conditions.mark(self)

    __repr__ = __str__


class Real:
    """A floating-point number that follows from sizes. `text` is Python."""

    __slots__ = ("__weakref__", "conditions", "text", "value")

    def __init__(self, conditions: Conditions, text: str, value: float) -> None:
        self.conditions, self.text, self.value = conditions, text, value

    def __float__(self) -> float:
        self.conditions.assume(f"{self.text} == {self.value!r}", "", holds=True)
        return self.value

    def __str__(self) -> str:
        return self.conditions.mark(self)

    __repr__ = __str__


Number = int | Size


def _terms(number: Number) -> dict[Term, int]:
    return number.terms if isinstance(number, Size) else {(): number}


def _positive(number: Number) -> bool:
    if isinstance(number, int):
        return number > 0
    if number.least > 0 or number.most <= 0:
        return number.least > 0
    constant: Any = number.terms.get((), 0)
    rest: Any = number - constant
    texts = [f"{text_of(rest)} > {-constant}", f"{text_of(rest)} <= {-constant}"]
    if max(rest.terms.values()) < 0:
        texts = [f"{text_of(-rest)} <= {constant - 1}", f"{text_of(-rest)} > {constant - 1}"]
    return number.conditions.assume(*texts, holds=value_of(number) > 0)


def _quotient(a: Any, b: Any) -> Any:
    """a // b: the terms that b divides, and a quotient of the others."""
    whole, rest = 0, a
    exact = over(a, b)
    if exact is not None:
        return exact
    for t, c in _terms(a).items():
        term: Any = Size(a.conditions, {t: c}) if t else c
        part = over(term, b)
        if part is None and isinstance(b, int) and t:
            part = over(term - Size(term.conditions, {t: c % b}), b)
        if part is not None:
            whole, rest = whole + part, rest - part * b
    if isinstance(rest, int) and isinstance(b, int):
        return whole + rest // b
    for quotient in (0, -1):
        if at_most(b * quotient, rest) and at_most(rest + 1, b * (quotient + 1)):
            return whole + quotient
    conditions: Conditions = (rest if isinstance(rest, Size) else b).conditions
    return whole + conditions.quotient(rest, b)


def over(a: Number, b: Number) -> Any:
    """a / b where that is exact for all values, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    divisor, found = _terms(b), 0
    left: Any = a
    lead = max(divisor, key=_degree)
    while not (isinstance(left, int) and left == 0):
        terms = _terms(left)
        first = max(terms, key=_degree)
        rest = list(first)
        for atom in lead:
            if atom not in rest:
                return None
            rest.remove(atom)
        if not divisor[lead] or terms[first] % divisor[lead]:
            return None
        factor: Any = terms[first] // divisor[lead]
        if rest:
            factor = Size(left.conditions, {tuple(rest): factor})
        found, left = found + factor, left - factor * b
    return found


def _degree(term: Term) -> tuple[int, ...]:
    """The order of terms in which polynomials are divided."""
    return (len(term), *(atom.number for atom in term))


def same(a: Number, b: Number) -> bool:
    """Return True if two numbers are the same for all values; unlike `==` never a condition."""
    return isinstance(a, Size) == isinstance(b, Size) and a == b


def divides(divisor: Number, number: Number) -> bool:
    """Return True if a number is a multiple of `divisor` for all values."""
    return over(number, divisor) is not None


def at_most(a: Number, b: Number) -> bool:
    """Return True if a <= b for all values."""
    difference: Any = b - a
    return (difference.least if isinstance(difference, Size) else difference) >= 0


def about(number: Any) -> int:
    """A number for decisions on speed: the same for all values of the symbols."""
    return _evaluated(number, "nominal") if isinstance(number, Size) else number


def value_of(number: Any) -> Any:
    """The number in the call that the program is made for. What is decided by it holds for that call alone."""
    if isinstance(number, Real):
        return number.value
    return _evaluated(number, "value") if isinstance(number, Size) else number


def _evaluated(size: Size, what: str) -> int:
    return sum(c * math.prod(getattr(atom, what) for atom in t) for t, c in size.terms.items())


def ceiling(a: Any, b: Any) -> Any:
    """a / b rounded up."""
    return (a + (b - 1)) // b


def text_of(number: Any) -> str:
    """A number in Python."""
    if not isinstance(number, Size):
        return number.text if isinstance(number, Real) else repr(number)
    text = ""
    for t, c in sorted(number.terms.items(), key=lambda term: term[1] < 0):  # what is subtracted last
        sign = (" - " if c < 0 else " + ") if text else "-" * (c < 0)
        text += sign + " * ".join([*(atom.text for atom in t), *([str(abs(c))] if not t or abs(c) != 1 else [])])
    return f"({text})" if len(number.terms) > 1 else text


def named(texts: Iterable[str], name: Callable[[Size | Real], str]) -> list[str]:
    """Texts with names in the place of sizes, in the order in which these are first met."""
    return [MARK.sub(lambda found: name(_marked[int(found[1])]), text) for text in texts]
