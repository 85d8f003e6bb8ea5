"""Which instance of a kernel template is meant: `relu_fwd<float>`, or `relu_fwd` and T=float32."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..ctype import C_NAMES
from ..errors import InputError
from ..signature import declared
from ..source import Source, strip_comments

_TOKENS = {str(dtype).removeprefix("torch."): name for dtype, name in C_NAMES.items()} | {
    "True": "true",
    "False": "false",
}


@dataclass(frozen=True)
class Instance:
    """A kernel with its template arguments."""

    base: str  # "relu_fwd"
    expression: str  # "relu_fwd<float>", as the compiler gets it
    types: dict[str, str]  # template parameter -> C++ text


def choose(source: Source, kernel: str, given: Sequence[str]) -> Instance:
    """`kernel` with the template arguments between its angle brackets, or with those of `--template NAME=VALUE`.

    Raises `InputError` where there is no such kernel, or arguments are missing or unknown.
    """
    match = re.fullmatch(r"\s*((?:\w+::)*(\w+))\s*(?:<(.*)>)?\s*", kernel, re.DOTALL)
    if match is None:
        raise InputError(f'KERNEL is {kernel!r}, expected "name" or "name<float, 4>"')
    qualified, base, inside = match.groups()
    takes = declared(source, base)
    parameters = template_parameters(source, base)
    if inside is not None:
        if given:
            raise InputError(f"KERNEL {kernel!r} names its template arguments; --template names them again")
        tokens = [token.strip() for token in split(inside)]
        return Instance(base, kernel.strip(), dict(zip((name for name, _ in parameters), tokens)))
    types = _named(base, [name for name, _ in parameters], given)
    missing = [name for name, has_default in parameters if name not in types and not has_default]
    if missing:
        names = ", ".join(name for name, _ in parameters)
        signature = ", ".join(f"{ctype} {name}" for ctype, name in takes)
        values = " ".join(f"--template {name}=..." for name in missing)
        raise InputError(
            f"{base} is a template: {', '.join(missing)} not given\n\n"
            f"signature: template <{names}> __global__ void {base}({signature})\n"
            f"example:   python -m cupyops simulate {source.name} {base} {values} ...\n"
            "--template: a dtype such as float32, a number, true or false, or C++ text"
        )
    listed = [types[name] for name, _ in parameters if name in types]
    return Instance(base, f"{qualified}<{', '.join(listed)}>" if listed else qualified, types)


def _named(base: str, names: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    types = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InputError(f"--template {text!r} is not of the form NAME=VALUE, such as T=float32")
        if name not in names:
            raise InputError(
                f"--template {text!r}: {base} has no template parameter {name}; it has {', '.join(names) or 'none'}"
            )
        types[name] = _TOKENS.get(value.removeprefix("torch."), value)
    return types


def template_parameters(source: Source, base: str) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of each template parameter of `__global__ ... base(...)`."""
    for text in (source.text, *source.includes.values()):
        clean = strip_comments(text)
        for kernel in re.finditer(rf"__global__[^;{{}}]*?\b{base}\s*\(", clean):
            head = re.search(r"\btemplate\s*<([^;{}]*)>[^;{}<>]*$", clean[: kernel.start()])
            if head is not None:
                return [_parameter(part) for part in split(head.group(1))]
    return []


def _parameter(text: str) -> tuple[str, bool]:
    declaration, equals, _ = text.partition("=")
    words = re.findall(r"\w+", declaration)
    return (words[-1] if words else "", bool(equals))


def split(text: str) -> list[str]:
    """The parts between the commas that stand outside all brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += {"<": 1, "(": 1, "[": 1, "{": 1, ">": -1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]
