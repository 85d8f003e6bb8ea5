"""C bodies: as the kernel has them, and as a syntax tree by pycparser.

In a body `float` and T are the type that the operator computes in: float, and double where T is double. So a literal 0.5
or 0.5f, and expf, are of that type too: nothing is drawn into double, and nothing in double is cut short.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from .._kernel.compile.source import UNREADABLE, strip_comments
from ..errors import InputError, MissingDependencyError

CONSTANTS = {"INFINITY": float("inf"), "NAN": float("nan"), "M_PI": 3.14159265358979323846, "M_E": 2.718281828459045}
_WITH_F = re.compile(
    "(exp|exp2|exp10|expm1|log|log2|log10|log1p|sqrt|rsqrt|cbrt|sin|cos|tan|asin|acos|atan|atan2|sinh|cosh|tanh|asinh|"
    "acosh|atanh|erf|erfc|lgamma|floor|ceil|trunc|rint|round|fabs|fmax|fmin|fmod|pow|hypot|copysign|fma|normcdf)f"
)
_TOKEN = re.compile(r'(?P<number>\.?\d(?:[eE][+-]|[\w.])*)|(?P<word>[A-Za-z_]\w*)|"(?:\\.|[^"\\])*"')
_CAST = re.compile(r"\b(A|T|double|int|bool)\s*(?=\()")
# Patterns of Python and C++ that are no C, and what to write instead.
_NOT_C = tuple(
    (re.compile(pattern), message)
    for pattern, message in (
        (
            r"\b(?:np|numpy|torch|math|cupy|cp|F)\s*\.\s*(\w+)",
            "functions of C have no module before them: write {0}(x)",
        ),
        (r"(?:\b[A-Za-z_]\w*)?\s*::\s*(\w+)", "functions have no namespace here: write {0}(x)"),
        (r"([\w)]\s*)\*\*(\s*[\w(-])", "C has no ** for powers: write x * x, or pow(x, n)"),
        (r"=[^;{}]*\bif\b[^;{}]*\belse\b", "a choice is written condition ? a : b"),
        (r"\b(and|or|not|True|False|None|lambda)\b", "{0} is a word of Python's; C has &&, ||, !, true and false"),
        (r":=", "an assignment is written ="),
    )
)
NO_INDICES = (
    re.compile(r"=[^;]*[\w)]\s*\["),
    "there are no indices here: a tensor's name stands for its element",
)
_HALVED = re.compile(r"[\w)]\s*//\s*(\d+\.?\d*|\w+)\s*;?\s*$")
_TYPES = (
    "typedef int A, T, bool, infer, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, size_t;"
)


@dataclass(frozen=True)
class Body:
    """A piece of C. `name` is what errors call it: "swish.forward"."""

    name: str
    text: str
    refused: ClassVar[tuple[tuple[re.Pattern[str], str], ...]] = (*_NOT_C, NO_INDICES)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip() or UNREADABLE.search(self.text):
            raise InputError(f"{self.name} is {self.text!r}, expected C such as 'y = 2 * x'")
        if "#" in self.clean:
            raise InputError(f"{self.name}: a line with # has no place in it; put it into preamble=")
        depth = 0
        for brace in re.findall(r"[{}]", self.clean):
            depth += 1 if brace == "{" else -1
            if depth < 0:
                break
        if depth:
            raise InputError(f"{self.name}: the braces do not match; write as many }} as {{")

    @cached_property
    def clean(self) -> str:
        """The text without comments, its last statement ended; lines stay where they are."""
        clean = strip_comments(self.text).rstrip()
        return clean if clean.endswith((";", "}")) else clean + ";"

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name that occurs."""
        return frozenset(match["word"] for match in _TOKEN.finditer(self.clean) if match["word"])

    @cached_property
    def cuda(self) -> str:
        """CUDA text of the body: `A` is the type computed in, and floating literals are of it."""
        return _rewritten(self.clean, lambda literal: f"A({literal})")

    @cached_property
    def statements(self) -> list[Any]:
        """The syntax tree. Raises `InputError` at what is no C."""
        try:
            from pycparser import c_parser
        except ImportError as error:
            raise MissingDependencyError(
                'C is translated to PyTorch by pycparser, which is not installed: pip install "cupyops[cuda12x]" '
                '(or "cupyops[cuda13x]" for CUDA 13)'
            ) from error
        self._refuse_python()
        text = _rewritten(self.clean, lambda literal: literal)
        text = re.sub(r"\bauto\b", "infer", _CAST.sub(r"(\1)", text))
        try:
            tree = c_parser.CParser().parse(f'{_TYPES}\nvoid body(void) {{\n#line 1 "{self.name}"\n{text}\n}}\n')
        except c_parser.ParseError as error:
            place = re.match(r"(.*?):(\d+):(?:\d+:)? *(.*)", str(error), re.DOTALL)
            line, why = (int(place[2]), place[3]) if place and place[1] == self.name else (0, str(error))
            why = why.removeprefix(f"{self.name}: ")
            raise self.error(line, f"not C that can be read: {why[:1].lower()}{why[1:]}") from None
        return list(tree.ext[-1].body.block_items or [])

    def _refuse_python(self) -> None:
        """Refuse Python and C++, which the parser would report in its own words or, in a comment, not at all."""
        for number, (line, clean) in enumerate(zip(self.text.splitlines(), self.clean.splitlines()), 1):
            for pattern, message in self.refused:
                if (match := pattern.search(clean)) is not None:
                    raise self.error(number, message.format(*match.groups(default="")))
            halved = _HALVED.search(line)
            if halved is not None and (halved[1][0].isdigit() or halved[1] in self.words):
                raise self.error(number, "// begins a comment in C; floor(a / b) is what it is in Python")

    def error(self, line: int, message: str) -> InputError:
        """An error that shows the line; 0 is none in particular."""
        lines = self.text.splitlines()
        line = line or int(len(lines) == 1)
        if not 0 < line <= len(lines):
            return InputError(f"{self.name}: {message}")
        return InputError(f"{self.name}:{line}: {message}\n  {line:>3} | {lines[line - 1].strip()}")


def _rewritten(text: str, literal: Callable[[str], str]) -> str:
    def token(match: re.Match[str]) -> str:
        number, word = match["number"], match["word"]
        if number is not None:
            return literal(number.rstrip("fF")) if is_floating(number) else number
        if word is None:
            return match.group()
        if word == "float":
            return "A"
        if word in CONSTANTS:
            return literal(word)
        return word[:-1] if _WITH_F.fullmatch(word) else word

    return _TOKEN.sub(token, text)


def is_floating(number: str) -> bool:
    """Return True if a literal is one of a floating-point type."""
    return not number.lower().startswith("0x") and re.search(r"[.eE]", number) is not None
