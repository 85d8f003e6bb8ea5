"""What is known inside a function: of each name, and of each expression, the kind of its value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .program import Node, Program, bare, line, text
from .vocabulary import CEIL, FUNCTIONS, METHODS, POINTERS, REAL, SIZES, TENSORS, kind_of_type


class NotTranslated(Exception):
    """An expression that has no translation here: why, and its line."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.line, self.why = line(node), why


@dataclass
class Scope:
    """What is known of names inside a function: of each variable its kind ("int", "float", "tensor", "dim3", "options")."""

    program: Program
    kinds: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # of pointers, the Python of their element's dtype
    notes: list[str] = field(default_factory=list)  # of the statement under way
    used: set[str] = field(default_factory=set)  # constants and macros of the file

    def note(self, what: str) -> None:
        """Something that a reader is to check."""
        if what not in self.notes:
            self.notes.append(what)


def kind(node: Node, scope: Scope) -> str:
    """The kind of an expression; empty where it is not known."""
    if node.type == "parenthesized_expression":
        return kind(node.named_children[0], scope)
    if node.type == "number_literal":
        return "float" if re.search(r"[.]|^\d[^xX]*[eEfF]", text(node)) else "int"
    if node.type == "identifier":
        constant = scope.program.constants.get(text(node))
        if text(node) in scope.kinds or constant is None:
            return scope.kinds.get(text(node), "")
        return "int" if re.fullmatch(r"[\w\s()*+/<>-]+", constant[0]) and "." not in constant[0] else ""
    if node.type == "cast_expression":
        return kind_of_type(text(node.child_by_field_name("type")))
    if node.type == "unary_expression":
        return kind(node.child_by_field_name("argument"), scope)
    if node.type == "binary_expression":
        kinds = {kind(node.child_by_field_name(side), scope) for side in ("left", "right")}
        return next((one for one in ("tensor", "", "float", "int") if one in kinds), "")
    if node.type == "conditional_expression":
        return kind(node.child_by_field_name("consequence"), scope)
    if node.type == "field_expression":
        return "int" if kind(node.child_by_field_name("argument"), scope) == "dim3" else ""
    if node.type == "call_expression":
        return _kind_of_call(node, scope)
    return ""


def _kind_of_call(node: Node, scope: Scope) -> str:
    function = node.child_by_field_name("function")
    if function.type == "field_expression":
        method = bare(text(function.child_by_field_name("field")))
        if method in SIZES:
            return "int"
        return "options" if method == "options" else "tensor" if method in POINTERS | METHODS else ""
    name = text(function)
    if "static_cast" in name or "reinterpret_cast" in name:
        return kind_of_type(name)
    base = bare(name)
    if base in CEIL or base in ("min", "max"):
        kinds = [kind(one, scope) for one in node.child_by_field_name("arguments").named_children]
        return kinds[0] if kinds else ""
    if base in scope.program.functions:
        return kind_of_type(scope.program.functions[base].returns)
    if "torch" not in name and base in REAL:
        return "float"
    return "tensor" if base in TENSORS | FUNCTIONS and "::" in name else ""


def is_pointer(node: Node, scope: Scope) -> bool:
    """Whether an expression is an address, which Python has as the tensor that begins there."""
    if node.type == "identifier":
        return text(node) in scope.dtypes
    return (
        node.type == "call_expression"
        and bare(text(node.child_by_field_name("function")).rpartition(".")[2]) in POINTERS
    )
