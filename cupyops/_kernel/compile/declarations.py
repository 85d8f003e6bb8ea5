"""Declarations in a CUDA text: its `__global__` functions, their parameters, and their template parameters.

A text is gone through once, whatever is in it: a kernel's name is looked for from its `__global__` on, past no other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..._util.near import meant
from ...errors import CompileError, InputError
from .binary import Binary
from .source import Source, find, is_text, load, read, strip_comments

_MARK = re.compile(r"\b__global__\b")
_STEP = re.compile(r"\b([A-Za-z_]\w*+)\s*+\(|[;{}]|\b__global__\b")  # `name(`, or what ends a kernel's head
_BRACKET = re.compile(r"[();]|\b__global__\b")
_NO_NAME = re.compile(r"__\w+__|noexcept|requires")  # what else may stand before a parenthesis in a head
_END = re.compile(r"\s*+;")
_CLOSES = {"<": ">", "(": ")", "{": "}", "[": "]"}
_TEMPLATE = re.compile(r"\btemplate\s*+<")


class TemplateParameter(NamedTuple):
    """One parameter of a template: `typename T`, `int N = 4`."""

    name: str
    is_type: bool
    has_default: bool
    ctype: str = ""  # of a value


@dataclass(frozen=True)
class Function:
    """One `__global__` function, as it is defined or declared."""

    name: str
    template: tuple[TemplateParameter, ...]
    inside: str  # the text between its parentheses
    is_defined: bool

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """(C type, name) of each. Raises `InputError` for one that cannot be read."""
        return [_parameter(part) for part in split(self.inside) if part.strip() != "void"]


def functions(source: Source) -> list[Function]:
    """Every `__global__` function of the text, then of what it includes."""
    return [found for text in (source.text, *source.includes.values()) for found in _functions(text)]


def function(source: Source, name: str) -> Function:
    """The function of that name, as it is defined; its template parameters as they are given first, with the defaults.

    Raises `InputError`, which names those that there are.
    """
    same = _functions_named(source, name)
    defined = next((one for one in same if one.is_defined), None)
    if defined is None:
        names = ", ".join(sorted({one.name for one in functions(source)}))
        hint = "" if names else "; a kernel begins with `__global__ void`"
        raise InputError(f"{source.name} has no __global__ function {name}; it has {names or 'none'}{hint}")
    return replace(defined, template=next((one.template for one in same if one.template), ()))


def refuse_unknown(code: str | Path, name: str, beside: Path | None) -> None:
    """Raise `SourceError` where there is no such file, `InputError` where no text of it can have a kernel of this name.

    A macro may put a name together: where one does, nobody can tell before it is compiled.
    """
    short = _short(name)
    is_in = re.compile(rf"\b{re.escape(short)}\b|##", re.ASCII).search
    text = code if isinstance(code, str) and is_text(code) else read(find(code, beside))
    if is_in(text):
        return
    source = load(code, beside)
    if any(map(is_in, source.includes.values())):
        return
    names = sorted({one.name for one in functions(source)})
    hint = "" if names else "; a kernel begins with `__global__ void`"
    raise InputError(
        f"{source.name} has no __global__ function {name}; it has {', '.join(names) or 'none'}{hint}{meant(short, names)}"
    )


def told(source: Source, name: str) -> Function | None:
    """Find a kernel like `function`; None where only the compiler can tell, as a macro or another's header may define it.

    Raises `InputError` where the text has no such kernel, and nothing that could make it.
    """
    try:
        return function(source, name)
    except InputError:
        for text in (source.text, *source.includes.values()):
            if re.search(rf"\b{re.escape(_short(name))}\b|##|^[ \t]*#[ \t]*include[ \t]*<", text, re.MULTILINE):
                return None
        raise


def parameters(source: Source, name: str, binary: Binary) -> list[tuple[str, str]]:
    """(C type, name) of each parameter of a compiled kernel, as the text has them.

    Where they cannot be read there, because the text makes them with `#if` or macros, the types are the compiler's, and they
    are called by their places.

    Raises:
        CompileError: neither the text nor the compiler tells.
    """
    types, count = binary.types, len(binary.parameters)
    readings = list(
        filter(None, map(readable, sorted(_functions_named(source, name), key=lambda one: not one.is_defined)))
    )
    fitting = [reading for reading in readings if len(reading) == count]
    if (
        fitting
    ):  # of several kernels of the name, under `#if` or in namespaces, the one that is most like what was compiled
        return max(fitting, key=lambda one: sum(ctype == real for (ctype, _), real in zip(one, types or ())))
    if types is None:
        raise CompileError(_mismatch(source, name, readings, count))
    return [(ctype, f"argument_{number}") for number, ctype in enumerate(types, 1)]


def _mismatch(source: Source, name: str, readings: list[list[tuple[str, str]]], count: int) -> str:
    said = f"declares {len(readings[0])} parameters" if readings else "has parameters that cannot be read"
    return f"{source.name}: the text of {name} {said}, the PTX has {count}"


def readable(one: Function) -> list[tuple[str, str]] | None:
    """The parameters of a function as the text has them; None where they cannot be read there."""
    try:
        return None if "#" in one.inside else one.parameters
    except InputError:
        return None


def _functions_named(source: Source, name: str) -> list[Function]:
    """Functions of that name, in any namespace."""
    return [one for one in functions(source) if one.name == _short(name)]


def _short(name: str) -> str:
    return name.rpartition("::")[2]


def split(text: str) -> list[str]:
    """The parts between the commas that stand outside all brackets. In `(a > b)` the `>` closes nothing."""
    parts: list[str] = []
    start, opened = 0, [""]
    for match in re.finditer(r"[,<>(){}\[\]]", text):
        sign = match.group()
        if sign == "," and len(opened) == 1:
            parts.append(text[start : match.start()])
            start = match.end()
        elif sign in "<({[":
            opened.append(sign)
        elif sign in ")}]" or sign == ">" == _CLOSES.get(opened[-1]):
            while len(opened) > 1 and _CLOSES[opened.pop()] != sign:
                pass
    return [part for part in (*parts, text[start:]) if part.strip()]


@functools.lru_cache(maxsize=64)  # the kernels of a file are many, its text is one
def _functions(text: str) -> tuple[Function, ...]:
    return tuple(_scan_functions(strip_comments(text)))


def _scan_functions(text: str) -> Iterator[Function]:
    before = 0
    for mark in _MARK.finditer(text):
        heads = list(_heads(text, mark.end()))
        if heads:
            name = heads[-1][0]  # the macros and attributes before it may have parentheses too
            start, end = next(inside for other, *inside in heads if other == name)
            defined = _END.match(text, end + 1) is None
            yield Function(name, _template(text, before, mark.start()), text[start:end], defined)
        before = mark.end()


def _heads(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Each `name(...)` up to a kernel's body: the name, and where the inside of the parentheses begins and ends."""
    while (step := _STEP.search(text, at)) is not None and step[1] is not None:
        at = _closing(text, step.end())
        if _NO_NAME.fullmatch(step[1]) is None:
            yield step[1], step.end(), at


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one opened before `start`, or the end of the text."""
    depth = 1
    for match in _BRACKET.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match.group(), -depth)
        if depth == 0:
            return match.start()
    return len(text)


def _template(text: str, low: int, high: int) -> tuple[TemplateParameter, ...]:
    """The parameters of the template whose function has its `__global__` at `high`."""
    head = text[max(low, *(text.rfind(mark, low, high) for mark in ";{}")) : high]
    opening = _TEMPLATE.search(head)
    if opening is None:
        return ()
    return tuple(_template_parameter(part) for part in split(head[opening.end() : head.rfind(">")]))


def _template_parameter(text: str) -> TemplateParameter:
    declaration, equals, _ = text.partition("=")
    words = re.findall(r"\w+", declaration) or [""]
    is_type = words[0] in ("typename", "class")
    ctype = "" if is_type else declaration.rpartition(words[-1])[0].strip()
    return TemplateParameter(words[-1], is_type, bool(equals), ctype)


def _parameter(declaration: str) -> tuple[str, str]:
    """`const T* __restrict__ x` -> (`const T*`, `x`)."""
    words = " ".join(re.sub(r"\b__(restrict|grid_constant)__\b", " ", declaration).split())
    words = re.sub(r"\*( ?(const|volatile)\b)+(?=[^*]*$)", "*", words)  # what holds of the pointer itself
    words = re.sub(r"\( ?\* ?(\w+) ?\) ?(\[ ?\w* ?\] ?)+$", r"* \1", words)  # to arrays: `float (*x)[3]`
    match = re.search(r"\b(\w+) ?(\[ ?\w* ?\])?$", words)
    if match is None or not words[: match.start()].strip():  # a macro, or a type without a name
        raise InputError(f"cannot read the kernel parameter {words[:200]!r}; expected a type and a name")
    ctype = re.sub(r" ?[*&] ?", lambda one: one[0].strip(), words[: match.start()].strip())
    ctype = f"{ctype[:-1]}*" if ctype.endswith("&") else ctype  # a reference is given the address of an array, too
    return ctype + ("*" if match.group(2) else ""), match.group(1)
