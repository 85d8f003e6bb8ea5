"""Launches: the arguments of a kernel, and its template arguments, as they are written or as C++ deduces them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .expressions import python, template_argument
from .program import Node, bare, text, walk
from .scope import NotTranslated, Scope
from .vocabulary import DTYPES


@dataclass
class Kernel:
    """What is known of a kernel.

    Attributes:
        name: its name, without namespaces.
        template: (name, whether it is a type) of each template parameter.
        types: the C types that it takes.
        atomics: whether it, or a device function that it calls, adds by atomics.
    """

    name: str
    template: Sequence[tuple[str, bool]]
    types: Sequence[str]
    atomics: bool = False


def launch(
    node: Node, function: Node, syntax: Node, given: Node, kernels: Mapping[str, Kernel], scope: Scope
) -> tuple[str, list[str]]:
    """`ext.name[grid, block]`, and its arguments, of `name<T><<<grid, block>>>(...)`. Raises `NotTranslated`."""
    name = bare(text(function).partition("<<<")[0])
    kernel = kernels.get(name)
    if kernel is None:
        raise NotTranslated(node, f"the launch of {name}, which is no kernel of the file")
    shape = [python(one, scope) for one in syntax.named_children[:3] if one.type != "comment"]
    if len(shape) == 3 and shape[2] == "0":
        shape.pop()
    nodes = [one for one in given.named_children if one.type != "comment"]
    values = [python(one, scope) for one in nodes]
    written = f"ext[{name!r}]" if keyword.iskeyword(name) else f"ext.{name}"
    return f"{written}[{', '.join(shape)}]", [*values, *_template(node, function, kernel, nodes, values, scope)]


def _template(
    node: Node, function: Node, kernel: Kernel, nodes: Sequence[Node], values: Sequence[str], scope: Scope
) -> list[str]:
    """`scalar_t=x.dtype` for each template parameter: as it is written, else as C++ deduces it of the arguments."""
    written = next((one for one in walk(function) if one.type == "template_argument_list"), None)
    given = [] if written is None else [one for one in written.named_children if one.type != "comment"]
    found = []
    for index, (name, is_type) in enumerate(kernel.template):
        if index < len(given):
            value = template_argument(given[index], is_type, scope)
        else:
            value = _deduced(node, kernel, name, nodes, values, scope)
        found.append(f"{name}={value}")
    return found


def _deduced(node: Node, kernel: Kernel, name: str, nodes: Sequence[Node], values: Sequence[str], scope: Scope) -> str:
    for ctype, given, value in zip(kernel.types, nodes, values):
        if not re.search(rf"\b{name}\b", ctype) or not ("*" in ctype or "Accessor" in ctype):
            continue
        element = re.search(r"(?:data\w*|accessor\w*)<\s*(?:const\s+)?([\w: ]+?)\s*[,>]", text(given))
        if element is not None and element[1] in DTYPES:
            return f"torch.{DTYPES[element[1]]}"
        return scope.dtypes.get(text(given), f"{value}.dtype")
    raise NotTranslated(node, f"the template parameter {name} of {kernel.name}, which is not written")
