"""Dispatch by recursive templates: which instance each number of a call reaches, found by following the templates."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .calls import named_value
from .expressions import children
from .preprocess import value
from .program import Function, Node, Program, bare, text, under, walk
from .scope import NotTranslated, Scope

Bound = int | str  # what a template parameter stands for: a number, or a type as it is written
Reached = list[str] | Node | None  # a method, its struct and template arguments; another statement; nothing


def is_recursive(function: Function) -> bool:
    """Return True for a function of a template that takes a template: its calls are followed, and it is not written."""
    return any(one.type == "template_template_parameter_declaration" for one in _parameters(function))


def _parameters(function: Function) -> list[Node]:
    """The template parameters of a function, or of its struct, without a pack."""
    holder = function.node.parent
    if holder is not None and holder.type == "field_declaration_list":
        holder = holder.parent.parent
    if holder is None or holder.type != "template_declaration":
        return []
    return [one for one in children(under(holder, "parameters")) if not one.type.startswith("variadic")]


def _names(function: Function) -> list[str]:
    return [text(one).split()[-1] for one in _parameters(function)]


def followed(node: Node, function: Function, scope: Scope) -> str:
    """One condition of C++ in the place of a call, `Dispatch<Functor, T, 1, 8>(n, x, y);`. Raises `NotTranslated`."""
    called, given = under(node, "function"), [text(one) for one in children(under(node, "arguments"))]
    written = children(under(called, "arguments")) if called.type == "template_function" else []
    parameters, count = _parameters(function), len(function.parameters) - 1  # without the pack
    if len(written) != len(parameters) or len(given) < count or not all(one.isidentifier() for one in given[:count]):
        raise NotTranslated(node, f"{text(node)[:60]!r}")
    of: dict[str, Bound] = {}
    for name, one, parameter in zip(_names(function), written, parameters):
        if (found := text(one)) and parameter.type == "parameter_declaration":
            number = named_value(one, scope)
            if number.low != number.high:
                raise NotTranslated(one, f"{found}, which is no constant, as a template argument")
            of[name] = int(number.low)
        else:
            of[name] = found
    numbers = [one for one in of.values() if isinstance(one, int)]
    bodies = [one.body for one in scope.program.functions.values() if is_recursive(one)]
    numbers += [int(text(one)) for body in bodies for one in walk(body) if text(one).isdigit()]
    every = sorted({one + by for one in numbers for by in range(-2, 3)})  # between these nothing changes
    path = _Path(scope.program, node)
    reached = {one: path.of(function, of, one) for one in itertools.product(every, repeat=count)}
    runs = {at: one for at, one in reached.items() if isinstance(one, list)}
    others = {one for at, one in reached.items() if at not in runs}
    limits = [(min(one), max(one)) for one in zip(*runs)]
    spelled = {(one[0], one[1], *(each for each in one[2:] if not each.isdigit())) for one in runs.values()}
    in_order = all(one[-count:] == [*map(str, at)] for at, one in runs.items())
    inside = {at for at in reached if all(low <= one <= high for one, (low, high) in zip(at, limits))}
    if len(others) != 1 or len(spelled) != 1 or not in_order or inside != set(runs):
        raise NotTranslated(node, f"a dispatch to other instances than one for each number: {text(node)[:60]!r}")
    method, struct, *types = spelled.pop()
    test = " && ".join(f"{low} <= {one} && {one} <= {high}" for one, (low, high) in zip(given, limits))
    code = f"if ({test}) {struct}<{', '.join([*types, *given[:count]])}>::{method}({', '.join(given[count:])});"
    if (other := others.pop()) is None:
        return code
    known = of | {name: one for (_, name), one in zip(function.parameters, given)}
    return f"{code} else " + re.sub(r"\b[A-Za-z_]\w*\b", lambda one: str(known.get(one[0], one[0])), text(other))


class _Call(NamedTuple):
    function: Function
    of: Mapping[str, Bound]
    numbers: Sequence[int]


@dataclass
class _Path:
    program: Program
    node: Node

    def of(self, function: Function, of: Mapping[str, Bound], numbers: Sequence[int]) -> Reached:
        """Follow a call of the function with these numbers to its end."""
        found: Reached | _Call = _Call(function, of, numbers)
        while isinstance(found, _Call):
            *names, pack = [name for _, name in found.function.parameters]
            known = dict(found.of) | dict(zip(names, found.numbers))
            found = self._statement(found.function.body, known, pack)
        return found

    def _statement(self, node: Node, known: Mapping[str, Bound], pack: str) -> Reached | _Call:
        inner = children(node)
        if node.type in ("compound_statement", "else_clause") and len(inner) <= 1:
            return self._statement(inner[0], known, pack) if inner else None
        if node.type == "if_statement":
            test = self._number(under(under(node, "condition"), "value"), known)
            branch = under(node, "consequence" if test else "alternative")
            return None if branch is None else self._statement(branch, known, pack)
        call = inner[0] if node.type == "expression_statement" and inner else node
        called = under(call, "function") if call.type == "call_expression" else None
        if called is None or called.type != "qualified_identifier" or under(called, "scope").type != "template_type":
            return node
        name, method = text(under(under(called, "scope"), "name")), text(under(called, "name"))
        given = [
            known.get(text(one), text(one)) if one.type == "type_descriptor" else self._number(one, known)
            for one in children(under(under(called, "scope"), "arguments"))
            if one.type != "parameter_pack_expansion"
        ]
        *numbers, last = children(under(call, "arguments"))
        if text(last) != f"{pack}...":
            raise NotTranslated(self.node, f"{text(call)[:60]!r} of a dispatch")
        if isinstance(struct := known.get(name), str) and not numbers:
            return [method, struct, *map(str, given)]
        function, of = self._chosen(name, method, given)
        return _Call(function, of, [self._number(one, known) for one in numbers])

    def _chosen(self, name: str, method: str, given: Sequence[Bound]) -> tuple[Function, dict[str, Bound]]:
        """The specialization that fits with the fewest parameters, and what these are."""
        fits = []
        for one in self.program.named(method):
            if not one.space or bare(one.space[-1]) != name:
                continue
            struct, names = under(one.node.parent.parent, "name"), _names(one)
            written = children(under(struct, "arguments")) if struct.type == "template_type" else []
            pattern = [text(each) for each in written if each.type != "parameter_pack_expansion"] or names
            of: dict[str, Bound] = {}
            if len(pattern) == len(given) and all(
                of.setdefault(spelled, each) == each if spelled in names else spelled == str(each)
                for spelled, each in zip(pattern, given)
            ):
                fits.append((len(names), one, of))
        fits.sort(key=lambda one: one[0])
        if not fits or (len(fits) > 1 and fits[0][0] == fits[1][0]):
            raise NotTranslated(self.node, f"which {name} a dispatch goes on to")
        return fits[0][1:]

    def _number(self, node: Node, known: Mapping[str, Bound]) -> int:
        """An expression of numbers. Raises `NotTranslated` for others."""
        try:
            return value(re.sub(r"\b[A-Za-z_]\w*", lambda one: str(known.get(one[0], one[0])), text(node)))
        except ValueError:
            raise NotTranslated(self.node, f"{text(node)[:60]!r} of a dispatch") from None
