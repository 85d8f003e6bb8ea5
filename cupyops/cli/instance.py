"""Instances of a kernel template, as the user names them: `relu_fwd<float>`, or `relu_fwd` and T=float32."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from .._kernel.compile.declarations import Function, functions, readable, split, told
from .._kernel.compile.source import Source
from .._kernel.launch.ctype import C_NAMES
from ..errors import InputError
from .words import near

_DTYPES = {str(dtype).removeprefix("torch."): name for dtype, name in C_NAMES.items()}
_TOKENS = _DTYPES | {"True": "true", "False": "false"}


@dataclass(frozen=True)
class Instance:
    """A kernel with its template arguments."""

    base: str  # "relu_fwd", with its namespaces
    expression: str  # "relu_fwd<float>", as the compiler gets it
    types: dict[str, str]  # template parameter -> C++ text


def choose(source: Source, file: str, kernel: str | None, given: Sequence[str]) -> Instance:
    """`kernel` with the template arguments between its angle brackets, or with those of `--template NAME=VALUE`.

    `file` is the source as the command line has it. Raises `InputError` where no kernel is named or there is none of that
    name, or where arguments are missing or unknown.
    """
    if kernel is None:
        listed = [f"  {_signature(one)}" for one in functions(source) if one.is_defined]
        raise InputError("\n".join([f"KERNEL not given; {source.name} has", *(listed or ["  no __global__ function"])]))
    match = re.fullmatch(r"\s*((?:\w+::)*(\w+))\s*(?:<(.*)>)?\s*", kernel, re.DOTALL)
    if match is None:
        raise InputError(f'KERNEL is {kernel!r}, expected "name" or "name<float, 4>"')
    qualified, base, inside = match.groups()
    found = told(source, base)
    template = () if found is None else found.template
    names = [one.name for one in template]
    if inside is not None:
        if given:
            raise InputError(f"KERNEL {kernel!r} names its template arguments; --template names them again")
        tokens = [_token(part.strip()) for part in split(inside)]
        return Instance(qualified, f"{qualified}<{', '.join(tokens)}>", dict(zip(names, tokens)))
    types = _types_by_name(base, names, given)
    missing = [one.name for one in template if one.name not in types and not one.has_default]
    if found is not None and missing:
        examples = {one.name: "float32" if one.is_type else "4" for one in template}
        values = " ".join(f"--template {name}={examples[name]}" for name in missing)
        raise InputError(
            f"{base} is a template: {', '.join(missing)} not given\n\n"
            f"signature: {_signature(found)}\n"
            f"example:   python -m cupyops simulate {shlex.quote(file)} {base} {values} --grid 4 --block 256 --arg ...\n"
            "--template: a dtype such as float32, a number, true or false, or C++ text"
        )
    listed = [types[name] for name in names if name in types]
    return Instance(qualified, f"{qualified}<{', '.join(listed)}>" if listed else qualified, types)


def types_known(chosen: Instance, message: str) -> str:
    """Suggestion where the compiler's message says that it does not know a template argument; else nothing."""
    for name, text in chosen.types.items():
        if f'identifier "{text}" is undefined' in message:
            known = list(dict.fromkeys([*_DTYPES, *C_NAMES.values()]))
            return (
                f"\n\n{name} is {text!r}{near(text, known)}\n  types: {', '.join(known)}, or one that the text defines"
            )
    return ""


def _signature(one: Function) -> str:
    template = f"template <{', '.join(parameter.name for parameter in one.template)}> " if one.template else ""
    takes = readable(one)
    inside = "..." if takes is None else ", ".join(f"{ctype} {name}" for ctype, name in takes)
    return f"{template}__global__ void {one.name}({inside})"


def _token(text: str) -> str:
    """A template argument as C++ has it."""
    return _TOKENS.get(text.removeprefix("torch."), text)


def _types_by_name(base: str, names: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    types = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InputError(f"--template {text!r} is not of the form NAME=VALUE, such as T=float32")
        if name not in names:
            raise InputError(
                f"--template {text!r}: {base} has no template parameter {name}; it has {', '.join(names) or 'none'}"
            )
        types[name] = _token(value)
    return types
