"""TensorOptions, taken apart: which keyword each option is, and the expression of its value, not yet in Python."""

from __future__ import annotations

import re

from .program import Node, bare, text
from .scope import NotTranslated, Scope
from .vocabulary import dtype_of_constant

Option = tuple[Node | None, str]  # an expression, and what is to be made of its Python; or Python as it is


def is_options(node: Node, scope: Scope | None = None) -> bool:
    """Whether an expression is one of TensorOptions."""
    if scope is not None and node.type == "identifier":
        return scope.kinds.get(text(node)) == "options"
    if scope is not None and node.type == "qualified_identifier":
        return dtype_of_constant(text(node)) is not None
    if node.type != "call_expression":
        return False
    function = node.child_by_field_name("function")
    if function.type == "field_expression":
        method = bare(text(function.child_by_field_name("field")))
        return method == "options" or (
            method in ("dtype", "device", "requires_grad", "layout", "memory_format")
            and is_options(function.child_by_field_name("argument"), scope)
        )
    return (
        re.fullmatch(r"((at|torch|c10)::)(dtype|device|TensorOptions|CUDA|requires_grad)|TensorOptions", text(function))
        is not None
    )


def parts(node: Node, scope: Scope) -> dict[str, Option]:
    """Options by their keywords; those of a variable by `**`."""
    if node.type == "identifier":
        return {"**": (node, "{}")}
    if node.type == "qualified_identifier":
        return {"dtype": (node, "{}")}
    function, given = node.child_by_field_name("function"), node.child_by_field_name("arguments").named_children
    if function.type != "field_expression":
        base = bare(text(function))
        if base == "TensorOptions":
            return _option(node, "dtype", given, scope) if given else {}
        if base == "CUDA":
            scope.note("allocated on the current GPU, as at::CUDA does")
            return {"dtype": (given[0], "{}"), "device": (None, '"cuda"')}
        return _option(node, base, given, scope)
    of, method = function.child_by_field_name("argument"), bare(text(function.child_by_field_name("field")))
    if method == "options":
        return {"dtype": (of, "{}.dtype"), "device": (of, "{}.device")}
    return parts(of, scope) | _option(node, method, given, scope)


def _option(node: Node, key: str, given: list[Node], scope: Scope) -> dict[str, Option]:
    if key == "requires_grad":
        return {}  # an operator's outputs have it of their inputs
    if key == "device" and "kCUDA" in text(given[0]):
        scope.note("allocated on the current GPU")
        return {"device": (None, '"cuda"')}
    if key == "device" and "kCPU" in text(given[0]):
        return {"device": (None, '"cpu"')}
    if key in ("dtype", "device"):
        return {key: (given[0], "{}")}
    raise NotTranslated(node, f"the option {key}")
