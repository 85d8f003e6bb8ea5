"""The `__device__` and `__constant__` variables of a .cu file: names and C types from the text, sizes from the PTX."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..compile.source import Source
from .ctype import VARIABLE_DTYPES

_PTX = re.compile(
    r"^[ \t]*(?:\.(?:visible|weak|extern)\s+)*\.(?:const|global)\s+(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+\d+\s+)?"
    r"\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?",
    re.MULTILINE,
)
_OF_LIBRARY = re.compile(r"_ZN?K?(St|2at|3c10|4cuda|6thrust|3cub)")
_VARIABLE = re.compile(r"\b__(?:device|constant|managed)__\b")
_QUALIFIERS = re.compile(r"\b(?:__\w+__|static|extern|inline|volatile|const|constexpr)\b")


@dataclass(frozen=True)
class Symbol:
    """One variable of a module.

    Attributes:
        name: as C++ has it: `ns::scale`.
        symbol: as the cubin has it.
        size: in bytes.
        dtype: of one element; uint8 where the type is a struct, or one that the text does not tell.
        shape: of the array; () for a single value.
        constant: whether it is `const`, so that its value may be part of the code.
        marked: whether the text declares it with `__device__` or its like, and not the compiler a constant of the host's.
    """

    name: str
    symbol: str
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    constant: bool = False
    marked: bool = True

    @property
    def is_state(self) -> bool:
        """True if kernels or Python may change the variable: it is no constant, and none of a library."""
        return self.marked and not self.constant and _OF_LIBRARY.match(self.symbol) is None


def symbols(ptx: str, text: Source) -> dict[str, Symbol]:
    """The variables in the PTX that the text speaks of, by name; two of one name each by its symbol."""
    declared: dict[str, tuple[str, str, bool] | None] = {}
    found = []
    for kind, symbol, count in _PTX.findall(ptx):
        name = _plain(symbol)
        last = name.rpartition("::")[2]
        if last not in declared:
            declared[last] = _declaration(text.code, last)
        declaration = declared[last]
        if declaration is not None:
            size = int(re.sub(r"\D", "", kind)) // 8 * int(count or 1)
            found.append(_symbol(name, symbol, size, *declaration))
    names = Counter(one.name for one in found)
    return {one.name if names[one.name] == 1 else one.symbol: one for one in found}


def _plain(symbol: str) -> str:
    """`_ZN2ns5scaleE` as `ns::scale`. Unnamed namespaces, which have names that the compiler made up, are left out."""
    if not symbol.startswith("_Z"):
        return symbol
    rest, parts = re.sub(r"^_ZN?L?", "", symbol), []
    while (match := re.match(r"L?(\d+)", rest)) is not None:
        end = match.end() + int(match.group(1))
        parts.append(rest[match.end() : end])
        rest = rest[end:]
    return "::".join(part for part in parts if not re.match(r"_INTERNAL_|\d*_GLOBAL__N_", part))


def _declaration(code: Sequence[str], name: str) -> tuple[str, str, bool] | None:
    """(C type, brackets, whether it is const) of a variable: no type where it stands after another's value, or in a macro.

    None where no text has the name: a string or a table that the compiler has made.
    """
    is_there = False
    # it begins with the name, and not with \b, for which each place of a text would be tried
    pattern = re.compile(rf"{re.escape(name)}(?!\w)(?P<declared>\s*(?P<brackets>(?:\[[^\]]*\]\s*)*)(?=[=;{{,]))?")
    for piece in code:
        for match in pattern.finditer(piece):
            if re.match(r"\w", piece[match.start() - 1 : match.start()]):
                continue
            is_there = True
            head = None if match["declared"] is None else _head(piece, match.start())
            if head is not None:
                first = head.partition(",")[0] if "<" not in head else head  # of `float a[4], b`, what stands before a
                if first != head:
                    first = re.sub(r"\w+\s*(?:\[[^\]]*\]\s*)*$", "", first.rstrip())
                const = re.search(r"\bconst(expr)?\b", first) is not None and "*" not in first
                return " ".join(_QUALIFIERS.sub(" ", first).split()), match["brackets"], const
    return ("", "", False) if is_there else None


def _head(piece: str, end: int) -> str | None:
    """Text before the name of a variable that is declared there; None where none is."""
    start = max(piece.rfind(stop, 0, end) for stop in ";{}()=")
    head = piece[start + 1 : end]
    if start >= 0 and piece[start] in "(=":  # as of a default of a template's parameter
        head = head.partition(">")[2]
    head = head.lstrip(";{}>)")
    return head if _VARIABLE.search(head) else None


def _symbol(name: str, symbol: str, size: int, ctype: str, brackets: str, constant: bool) -> Symbol:
    dtype = VARIABLE_DTYPES.get(ctype)
    if dtype is None or size % dtype.itemsize:
        return Symbol(name, symbol, size, torch.uint8, (size,), constant, ctype != "")
    extents = re.findall(r"\[([^\]]*)\]", brackets)
    shape = tuple(int(extent) for extent in extents if extent.strip().isdecimal())
    count = size // dtype.itemsize
    if len(shape) != len(extents) or math.prod(shape) != count:  # an extent that is not written as a number
        shape = (count,)
    return Symbol(name, symbol, size, dtype, shape, constant)
