"""Launches: the arguments of a kernel, and its template arguments, as they are written or as C++ deduces them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import structs
from .calls import grid, nothing, template_argument, template_arguments, visible
from .expressions import DTYPE_NAMES, assigned, children, python
from .program import Node, bare, text, under
from .scope import NotTranslated, Scope
from .values import ATOM, VOID, Value
from .vocabulary import DTYPES, type_of


@dataclass
class Kernel:
    """Signature of a kernel.

    Attributes:
        name: the name by which the extension has it.
        template: (name, whether it is a type) of each template parameter.
        types: the C types that it takes.
        atomics: whether it, or a device function that it calls, adds by atomics.
        space, others: its namespaces, and the kernels that share its name.
    """

    name: str
    template: Sequence[tuple[str, bool]]
    types: Sequence[str]
    atomics: bool = False
    space: tuple[str, ...] = ()
    others: list[Kernel] = field(default_factory=list)


def launch(
    node: Node, function: Node, syntax: Node, given: Node, kernels: Mapping[str, Kernel], scope: Scope
) -> tuple[str, list[str]]:
    """`ext.name[grid, block]`, and its arguments, of `name<T><<<grid, block>>>(...)`. Raises `NotTranslated`."""
    variable = scope.find(text(function))
    if variable is not None and variable.kernel is not None:  # `auto kernel = &name<T>;`
        scope.read(function)
        function = variable.kernel
        if function.type == "pointer_expression":
            function = under(function, "argument")
    name = bare(text(function).partition("<<<")[0])
    kernel = kernels.get(name)
    if kernel is None:
        raise NotTranslated(node, f"the launch of {name}, which is no kernel of the file")
    parts = children(syntax)
    shape = [grid(one, scope).code for one in parts[:2]]
    for one in parts[2:3]:
        shared = python(one, scope)
        if not shared.type.is_number:
            raise NotTranslated(one, f"{text(one)[:60]!r} as the size of shared memory")
        shape += [] if shared.code == "0" else [f"int({shared.code})" if shared.type.kind == "float" else shared.code]
    for one in parts[3:]:
        nothing(one, scope)
    nodes = children(given)
    found = [python(one, scope) for one in nodes]
    scope.read(given)
    kernel = _meant(node, function, kernel, found, scope)
    if kernel.types and len(kernel.types) < len(found):
        raise NotTranslated(node, f"{name} takes {len(kernel.types)} arguments, not {len(found)}")
    codes = [
        _argument(one, spelled, value) for one, spelled, value in zip(nodes, [*kernel.types, *[""] * len(nodes)], found)
    ]
    name = kernel.name
    written = f"ext.{name}" if name.isidentifier() and not keyword.iskeyword(name) else f"ext[{name!r}]"
    return f"{written}[{', '.join(shape)}]", [*codes, *_template(node, function, kernel, nodes, found, scope)]


def _meant(node: Node, function: Node, kernel: Kernel, found: Sequence[Value], scope: Scope) -> Kernel:
    """The kernel of a name that several have: by its namespace, then by its arguments. Raises `NotTranslated`."""
    fits = visible(text(function).partition("<<<")[0], [kernel, *kernel.others], scope)

    def element(value: Value) -> str:
        of = value.type.of[0] if value.type.kind == "pointer" else VOID
        known = f"torch.{DTYPE_NAMES.get((of.kind, of.bits, of.signed))}" if of.is_number else ""
        return value.element if value.element.startswith("torch.") else known

    def takes(one: Kernel) -> bool:
        plain = [re.sub(r"\bconst\b|[*&]|__restrict__", "", spelled).strip() for spelled in one.types]
        pairs = [(f"torch.{DTYPES[of]}", element(value)) for of, value in zip(plain, found) if of in DTYPES]
        return len(one.types) == len(found) and all(dtype == of for dtype, of in pairs if of)

    fits = [one for one in fits if takes(one)] if len(fits) > 1 else fits
    if len(fits) != 1:
        raise NotTranslated(node, f"which of the kernels {kernel.name} is launched")
    return fits[0]


def _argument(node: Node, spelled: str, value: Value) -> str:
    """An argument as a parameter of that type takes it: a launch rounds to float, and refuses what is too large."""
    if value.type.kind == "struct":
        return structs.passed(value, spelled, node)
    kind = type_of(spelled) if spelled else None
    if kind is None or not kind.is_number or not value.type.is_number:
        if value.type.kind in ("list", "tuple", "string", "options", "dtype", "device", "status", "guard", "cursor"):
            raise NotTranslated(node, f"a {value.type} as an argument of a kernel: {text(node)[:60]!r}")
        return value.lax or value.code
    if kind.kind == "float" or (kind.kind == "int" and value.type.kind == "int" and (kind.signed or value.low >= 0)):
        return value.lax or value.code
    return assigned(value, kind, node).code


def _template(
    node: Node, function: Node, kernel: Kernel, nodes: Sequence[Node], values: Sequence[Value], scope: Scope
) -> list[str]:
    """`scalar_t=x.dtype` for each template parameter: as it is written, else as C++ deduces it of the arguments."""
    given, found = template_arguments(function), []
    for index, (name, is_type) in enumerate(kernel.template):
        if index < len(given):
            value = template_argument(given[index], is_type, scope)
        else:
            value = _deduced(node, kernel, name, values)
        found.append(f"{name}={value}")
    scope.read(function)
    return found


def _deduced(node: Node, kernel: Kernel, name: str, values: Sequence[Value]) -> str:
    for spelled, value in zip(kernel.types, values):
        if re.search(rf"\b{name}\b", spelled) and ("*" in spelled or "Accessor" in spelled):
            return value.element or f"{value.at(ATOM)}.dtype"
    raise NotTranslated(node, f"the template parameter {name} of {kernel.name}, which is not written")
