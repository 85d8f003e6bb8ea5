"""C++ expressions as Python: of tensors, integers and grids, as the host code of extensions has them.

What has no certain translation is kept as text inside a `NotTranslated`, with its line; what is likely, and not certain, is
noted, and the caller writes it beside the line as "check this".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .options import is_options, parts
from .program import Function, Node, bare, is_stream, text, walk
from .scope import NotTranslated, Scope, is_pointer, kind
from .vocabulary import (
    ATTRIBUTES,
    CEIL,
    DTYPES,
    FUNCTIONS,
    METHODS,
    OF_LAUNCHES,
    POINTERS,
    SIZES,
    STANDARD,
    TENSORS,
    dtype_of_constant,
    kind_of_type,
    name_of,
)

_NUMBER = re.compile(r"(0[xXbB][\da-fA-F']+|-?[\d.']+(?:[eE][+-]?\d+)?)([uUlLfF]*)")


def python(node: Node, scope: Scope) -> str:
    """The Python of an expression. Raises `NotTranslated`."""
    found = _BY_TYPE.get(node.type)
    if found is None:
        raise NotTranslated(node, f"{node.type.replace('_', ' ')}: {text(node)[:80]!r}")
    return found(node, scope)


def arguments(node: Node, scope: Scope) -> list[str]:
    """The Python of each argument of a call."""
    return [python(one, scope) for one in node.named_children if one.type != "comment"]


def _identifier(node: Node, scope: Scope) -> str:
    name, program = text(node), scope.program
    if name in scope.kinds:
        return name_of(name)
    if name in program.constants:
        scope.used.add(name)
    elif name in OF_LAUNCHES:
        return OF_LAUNCHES[name]
    elif name not in program.functions and name not in program.macros:
        raise NotTranslated(node, f"the name {name}, which the files do not define")
    return name_of(name)


def _number(node: Node, scope: Scope) -> str:
    match = _NUMBER.fullmatch(text(node))
    if match is None:
        raise NotTranslated(node, f"the number {text(node)}")
    digits = match[1].replace("'", "")
    if re.fullmatch(r"0[0-7]+", digits):
        return f"0o{digits[1:]}"
    return digits


def _string(node: Node, scope: Scope) -> str:
    return text(node)


def _parenthesized(node: Node, scope: Scope) -> str:
    inner = node.named_children[0]
    found = python(inner, scope)
    return found if inner.type in ("identifier", "call_expression", "number_literal") else f"({found})"


_SAME = {"+", "-", "*", "%", "<", ">", "<=", ">=", "==", "!=", "<<", ">>", "&", "|", "^"}


def _binary(node: Node, scope: Scope) -> str:
    sides = [node.child_by_field_name(side) for side in ("left", "right")]
    sign, (left, right) = text(node.child_by_field_name("operator")), (python(one, scope) for one in sides)
    kinds = [kind(one, scope) for one in sides]
    if sign in ("&&", "||"):
        left, right = (condition(one, scope) for one in sides)
        return f"{left} {'and' if sign == '&&' else 'or'} {right}"
    if sign == "/":
        if "float" in kinds or "tensor" in kinds:
            return f"{left} / {right}"
        if kinds != ["int", "int"] and not _rounds_up(*sides):
            scope.note(f"{left} / {right} is taken to be a division of integers")
        return f"{left} // {right}"
    if sign in ("+", "-") and is_pointer(sides[0], scope):
        scope.note(f"a pointer, {sign} {right}: elements of the flattened tensor")
        return f"{left}.flatten()[{right if sign == '+' else '-' + right}:]"
    if sign not in _SAME:
        raise NotTranslated(node, f"the operator {sign}")
    return f"{left} {sign} {right}"


def _rounds_up(left: Node, right: Node) -> bool:
    """Whether it is `(n + by - 1) / by`, which has a meaning for integers alone."""
    divided, by = ("".join(text(one).split()) for one in (left, right))
    return divided.endswith(f"+{by}-1)") or divided.startswith(f"({by}-1+")


def _unary(node: Node, scope: Scope) -> str:
    sign, inner = text(node)[0], python(node.child_by_field_name("argument"), scope)
    return f"not {condition(node.child_by_field_name('argument'), scope)}" if sign == "!" else f"{sign}{inner}"


def condition(node: Node, scope: Scope) -> str:
    """The Python of an expression that is true or false: of a pointer, whether there is one."""
    if kind(node, scope) == "tensor" and node.type in ("identifier", "call_expression"):
        return f"({python(node, scope)} is not None)"
    return python(node, scope)


def _pointer(node: Node, scope: Scope) -> str:
    raise NotTranslated(node, f"an address or what lies there: {text(node)[:60]!r}")


def _conditional(node: Node, scope: Scope) -> str:
    sides = (python(node.child_by_field_name(one), scope) for one in ("consequence", "alternative"))
    return "({} if {test} else {})".format(*sides, test=condition(node.child_by_field_name("condition"), scope))


def _cast(node: Node, scope: Scope) -> str:
    return _converted(node, text(node.child_by_field_name("type")), node.child_by_field_name("value"), scope)


def _converted(node: Node, ctype: str, value: Node, scope: Scope) -> str:
    found, to, of = python(value, scope), kind_of_type(ctype), kind(value, scope)
    if to == of or to == "tensor":
        if "*" in ctype and of != "tensor":
            raise NotTranslated(node, f"a pointer made of {text(value)[:60]!r}")
        return found
    if to in ("int", "float"):
        return f"{to}({found})"
    raise NotTranslated(node, f"a conversion to {ctype}")


def _list(node: Node, scope: Scope) -> str:
    found = arguments(node, scope)
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


def _field(node: Node, scope: Scope) -> str:
    of, name = node.child_by_field_name("argument"), text(node.child_by_field_name("field"))
    if kind(of, scope) == "dim3" and name in ("x", "y", "z"):
        return f"{python(of, scope)}[{'xyz'.index(name)}]"
    raise NotTranslated(node, f"the member {text(node)[:60]!r}")


def _subscript(node: Node, scope: Scope) -> str:
    of, index = node.child_by_field_name("argument"), node.child_by_field_name("indices")
    if is_pointer(of, scope):
        raise NotTranslated(node, f"an element behind a pointer: {text(node)[:60]!r}")
    return f"{python(of, scope)}[{', '.join(arguments(index, scope))}]"


def _qualified(node: Node, scope: Scope) -> str:
    dtype = dtype_of_constant(text(node))
    if dtype is not None:
        return f"torch.{dtype}"
    if bare(text(node)) in scope.program.constants:
        scope.used.add(bare(text(node)))
        return bare(text(node))
    raise NotTranslated(node, f"the name {text(node)}")


def _call(node: Node, scope: Scope) -> str:
    function, given = node.child_by_field_name("function"), node.child_by_field_name("arguments")
    if function.type == "field_expression":
        return _method(node, function, given, scope)
    name, base = text(function), bare(text(function))
    values = [one for one in given.named_children if one.type != "comment"]
    if re.match(r"(static|reinterpret|const)_cast\b", name):
        return _converted(node, name[name.index("<") + 1 : name.rindex(">")], values[0], scope)
    is_known = base in scope.program.functions or base in scope.program.macros
    if function.type == "primitive_type" or (base in DTYPES and not is_known):
        return _converted(node, name, values[0], scope)
    if base == "dim3":
        return _list(given, scope)
    if base in CEIL:
        return f"cupyops.ceil_div({', '.join(arguments(given, scope))})"
    if base == "GET_BLOCKS" and not is_known:  # ATen's, of blocks of CUDA_NUM_THREADS
        found = arguments(given, scope)
        return f"cupyops.ceil_div({found[0]}, {found[1] if len(found) > 1 else OF_LAUNCHES['CUDA_NUM_THREADS']})"
    if base in STANDARD and "torch" not in name:
        return _standard(node, base, name, values, scope)
    if base in TENSORS and "::" in name:
        return _allocation(base, values, scope)
    if base in FUNCTIONS and re.match(r"(at|torch)::", name):
        return f"torch.{base}({', '.join(arguments(given, scope))})"
    if is_options(node):
        return f"dict({options(node, scope)})"
    if is_known:
        scope.used.add(base)
        return f"{name_of(base)}({', '.join(_passed(node, values, scope.program.functions.get(base), scope))})"
    raise NotTranslated(node, f"the function {name[:60]}")


def _passed(node: Node, values: list[Node], function: Function | None, scope: Scope) -> list[str]:
    """The arguments of a call of a function of the files: without its stream, and with template arguments by name."""
    if function is None or len(values) > len(function.parameters):
        return [python(one, scope) for one in values]
    found = [python(one, scope) for one, (ctype, _) in zip(values, function.parameters) if not is_stream(ctype)]
    written = _template_arguments(node.child_by_field_name("function"))
    for place, (name, is_type) in enumerate(function.template):
        if name:
            given = template_argument(written[place], is_type, scope) if place < len(written) else None
            given = given or next(
                (
                    scope.dtypes.get(text(one), f"{python(one, scope)}.dtype")
                    for one, (ctype, _) in zip(values, function.parameters)
                    if re.search(rf"\b{name}\b[^<>]*\*", ctype)
                ),
                None,
            )
            if given is None:
                raise NotTranslated(node, f"the template parameter {name} of {function.name}, which is not written")
            found.append(f"{name_of(name)}={given}")
    return found


def _template_arguments(function: Node) -> list[Node]:
    written = next((one for one in walk(function) if one.type == "template_argument_list"), None)
    return [] if written is None else [one for one in written.named_children if one.type != "comment"]


def template_argument(node: Node, is_type: bool, scope: Scope) -> str:
    """The Python of a template argument: a dtype, or a value. Raises `NotTranslated`."""
    name, inner = text(node), node
    if not is_type:
        while inner.type == "type_descriptor" and inner.named_children:
            inner = inner.named_children[0]
        return _identifier(inner, scope) if inner.type == "type_identifier" else python(inner, scope)
    if scope.kinds.get(name) == "dtype":
        return name_of(name)
    if name in ("half", "__half", "__nv_bfloat16", "nv_bfloat16"):
        return repr({"half": "__half", "nv_bfloat16": "__nv_bfloat16"}.get(name, name))  # CUDA's own, not PyTorch's
    if name in DTYPES:
        return f"torch.{DTYPES[name]}"
    raise NotTranslated(node, f"the template argument {name}")


def _standard(node: Node, base: str, name: str, values: list[Node], scope: Scope) -> str:
    found = [python(one, scope) for one in values]
    if base in ("make_tuple", "tie"):
        return f"({', '.join(found)}{',' if len(found) == 1 else ''})"
    if base == "get":
        return f"{found[0]}[{name[name.index('<') + 1 : name.rindex('>')]}]"
    base = base.removesuffix("f") if base in ("ceilf", "floorf", "sqrtf", "powf") else base
    if base in ("min", "max", "abs", "pow"):
        return f"{base}({', '.join(found)})"
    return f"math.{base}({found[0]})"


def _method(node: Node, function: Node, given: Node, scope: Scope) -> str:
    of, method = function.child_by_field_name("argument"), bare(text(function.child_by_field_name("field")))
    if is_options(node, scope):
        return f"dict({options(node, scope)})"
    base, values = python(of, scope), arguments(given, scope)
    if of.type not in ("identifier", "call_expression", "field_expression", "subscript_expression"):
        base = f"({base})" if not base.startswith("(") else base
    if method in POINTERS:
        return base
    if method in ("has_value", "defined") and not values:
        return f"({base} is not None)"
    if method == "value" and not values:
        return base
    if method in ATTRIBUTES and not values:
        return f"{base}.{ATTRIBUTES[method]}"
    if method in SIZES | METHODS:
        return f"{base}.{method}({', '.join(values)})"
    if method == "index" and len(values) == 1:
        return f"{base}[{values[0]}]".replace('"..."', "...")
    raise NotTranslated(node, f"the method {method}")


def _allocation(base: str, values: list[Node], scope: Scope) -> str:
    given = [options(one, scope) if is_options(one, scope) else python(one, scope) for one in values]
    return f"torch.{base}({', '.join(filter(None, given))})"


def options(node: Node, scope: Scope) -> str:
    """Options as keyword arguments: `dtype=torch.int32, device=x.device`."""
    found = []
    for key, (value, form) in parts(node, scope).items():
        written = form if value is None else form.format(python(value, scope))
        found.append(f"**{written}" if key == "**" else f"{key}={written}")
    return ", ".join(found)


_BY_TYPE: Mapping[str, Callable[[Node, Scope], str]] = {
    "identifier": _identifier,
    "number_literal": _number,
    "string_literal": _string,
    "true": lambda node, scope: "True",
    "false": lambda node, scope: "False",
    "null": lambda node, scope: "None",
    "parenthesized_expression": _parenthesized,
    "binary_expression": _binary,
    "unary_expression": _unary,
    "pointer_expression": _pointer,
    "conditional_expression": _conditional,
    "cast_expression": _cast,
    "initializer_list": _list,
    "field_expression": _field,
    "subscript_expression": _subscript,
    "qualified_identifier": _qualified,
    "call_expression": _call,
}
