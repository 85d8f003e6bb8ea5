"""Checks of C++ as conditions of Python; what a launch of cupyops checks by itself is left out."""

from __future__ import annotations

import re

from .expressions import arguments, python
from .program import Node, Program, text
from .scope import Scope

_ASSERTS = re.compile(r"(TORCH_|AT_)(CHECK\w*|ASSERTM?|INTERNAL_ASSERT)|AT_ASSERT|assert|TORCH_CHECK_\w+")
_OWN = re.compile(r"CHECK\w*|IS_\w+|ASSERT\w*")
_LEFT = re.compile(r"is_cuda\(\)|device\(\)\s*\.\s*(type|is_cuda)\(\)|kCUDA")  # which a launch checks itself
_DTYPE = re.compile(  # of a constant, which a launch checks too: the signature of a kernel has it
    r"\s*!?\s*\w+\s*(\.|->)\s*(dtype|scalar_type|type)\(\)\s*(\.\s*scalarType\(\))?\s*==\s*((at|torch|c10)::)?(ScalarType::\w+|k\w+)\s*"
)
_SIGNS = {"EQ": "==", "NE": "!=", "GT": ">", "GE": ">=", "LT": "<", "LE": "<="}


def is_check(name: str) -> bool:
    """Whether a function or macro checks, by its name: PyTorch's, or one of the file."""
    return (_ASSERTS.fullmatch(name) or _OWN.fullmatch(name)) is not None


def refusals(name: str, given: Node, scope: Scope) -> list[tuple[str, str]]:
    """(what refuses, the message) of a call that checks; none where a launch checks the same."""
    return _of_pytorch(name, given, scope) if _ASSERTS.fullmatch(name) else _of_file(name, given, scope)


def _of_pytorch(name: str, given: Node, scope: Scope) -> list[tuple[str, str]]:
    """TORCH_CHECK and its kin."""
    values = [one for one in given.named_children if one.type != "comment"]
    if not values or _LEFT.search(text(values[0])) or all(map(_DTYPE.fullmatch, text(values[0]).split("&&"))):
        return []
    last = name.rpartition("_")[2]
    if last in _SIGNS:
        condition = f"{python(values[0], scope)} {_SIGNS[last]} {python(values[1], scope)}"
    else:
        condition = python(values[0], scope)
    message = "".join(re.sub(r'^"|"$', "", text(one)) for one in values[1:] if one.type == "string_literal")
    return [(f"not ({condition})", message or f"{condition} does not hold")]


def _of_file(name: str, given: Node, scope: Scope) -> list[tuple[str, str]]:
    """`CHECK_INPUT(x)`: contiguity, by what the macro stands for, else by its name; a launch checks devices and dtypes."""
    known = name in scope.program.macros
    if not re.search(r"CONTIGUOUS|contiguous|INPUT", " ".join(_words(name, scope.program) if known else [name])):
        return []
    return [(f"not {x}.is_contiguous()", f"{x} must be contiguous") for x in arguments(given, scope)[:1]]


def _words(macro: str, program: Program) -> set[str]:
    words: set[str] = set()
    pending = [macro]
    while pending:
        for word in re.findall(r"\w+", program.macros.get(pending.pop(), ([], "", ""))[1]):
            if word not in words and word != macro:
                words.add(word)
                pending.append(word)
    return words
