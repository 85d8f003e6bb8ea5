"""C++ expressions as Python: of tensors, integers and grids, as the host code of extensions has them.

What has no certain translation is kept as text inside a `NotTranslated`, with its line; what is likely, and not certain, is
noted, and the caller writes it beside the line as "check this".
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .program import Node, Program, bare, line, text

DTYPES = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "int32_t": "int32",
    "int64_t": "int64",
    "long": "int64",
    "long long": "int64",
    "short": "int16",
    "int16_t": "int16",
    "int8_t": "int8",
    "uint8_t": "uint8",
    "unsigned char": "uint8",
    "bool": "bool",
    "at::Half": "float16",
    "c10::Half": "float16",
    "torch::Half": "float16",
    "half": "float16",
    "__half": "float16",
    "at::BFloat16": "bfloat16",
    "c10::BFloat16": "bfloat16",
    "__nv_bfloat16": "bfloat16",
}
_SCALARS = {
    "Float": "float32", "Double": "float64", "Int": "int32", "Long": "int64", "Half": "float16", "BFloat16": "bfloat16",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "Float32": "float32", "Float64": "float64", "Int32": "int32", "Int64": "int64", "Float16": "float16", "UInt8": "uint8",
    "Int16": "int16", "Int8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64", "F32": "float32", "F64": "float64",
}  # fmt: skip
_POINTERS = frozenset(
    [
        "data",
        "data_ptr",
        "const_data_ptr",
        "mutable_data_ptr",
        "packed_accessor",
        "packed_accessor32",
        "packed_accessor64",
        "generic_packed_accessor",
    ]
)
_SIZES = frozenset(["size", "numel", "dim", "stride", "element_size", "nbytes", "itemsize", "storage_offset"])
_ATTRIBUTES = {
    "sizes": "shape",
    "scalar_type": "dtype",
    "dtype": "dtype",
    "type": "dtype",
    "device": "device",
    "is_cuda": "is_cuda",
}
_METHODS = frozenset(
    [
        "contiguous",
        "is_contiguous",
        "to",
        "view",
        "reshape",
        "transpose",
        "permute",
        "sum",
        "mean",
        "max",
        "min",
        "fill_",
        "zero_",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "clone",
        "t",
        "select",
        "narrow",
        "index_select",
        "gather",
        "scatter_",
        "add_",
        "mul_",
        "sub_",
        "div_",
        "add",
        "mul",
        "sub",
        "div",
        "exp",
        "log",
        "sqrt",
        "abs",
        "clamp",
        "copy_",
        "flatten",
        "repeat",
        "strides",
        "detach",
        "masked_select",
        "nonzero",
        "sort",
        "topk",
        "cumsum",
        "argsort",
        "item",
        "cpu",
        "cuda",
        "index_put_",
        "scatter_add_",
        "matmul",
        "mm",
        "bmm",
        "requires_grad",
        "any",
        "all",
        "floor",
        "ceil",
        "tile",
        "chunk",
        "split",
        "unbind",
        "flip",
        "size",
    ]
)
_TENSORS = frozenset(
    ["zeros", "empty", "ones", "zeros_like", "empty_like", "ones_like", "full", "full_like", "rand", "randn", "arange"]
)
_FUNCTIONS = frozenset(
    [
        "sort",
        "gather",
        "cat",
        "stack",
        "sum",
        "max",
        "min",
        "matmul",
        "mm",
        "bmm",
        "exp",
        "log",
        "sqrt",
        "abs",
        "where",
        "cumsum",
        "index_select",
        "unique",
    ]
)
_REAL = frozenset(["ceil", "floor", "sqrt", "pow", "log", "log2", "exp", "ceilf", "floorf", "sqrtf", "powf"])
_CEIL = frozenset(["THCCeilDiv", "ceil_div", "ATenCeilDiv"])
_NUMBER = re.compile(r"(0[xXbB][\da-fA-F']+|-?[\d.']+(?:[eE][+-]?\d+)?)([uUlLfF]*)")


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


def name_of(identifier: str) -> str:
    """A C++ name as Python can have it."""
    return identifier + "_" if keyword.iskeyword(identifier) else identifier


def kind_of_type(ctype: str) -> str:
    """The kind of what a C++ type declares."""
    plain = re.sub(r"\b(const|static|constexpr|volatile|std::)\b|&", " ", ctype).strip()
    if "*" in plain or re.search(r"\bTensor\b", plain):
        return "tensor"
    if re.search(r"\b(float|double)\b", plain):
        return "float"
    if re.search(r"\bdim3\b", plain):
        return "dim3"
    if re.search(r"\b(int|long|short|unsigned|size_t|u?int\d+_t|bool)\b", plain):
        return "int"
    return "options" if "TensorOptions" in plain else ""


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
        if method in _SIZES:
            return "int"
        return "options" if method == "options" else "tensor" if method in _POINTERS | _METHODS else ""
    name = text(function)
    if "static_cast" in name or "reinterpret_cast" in name:
        return kind_of_type(name)
    base = bare(name)
    if base in _CEIL or base in ("min", "max"):
        kinds = [kind(one, scope) for one in node.child_by_field_name("arguments").named_children]
        return kinds[0] if kinds else ""
    if base in scope.program.functions:
        return kind_of_type(scope.program.functions[base].returns)
    if "torch" not in name and base in _REAL:
        return "float"
    return "tensor" if base in _TENSORS | _FUNCTIONS and "::" in name else ""


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
    name = text(node)
    if name not in scope.kinds and name in scope.program.constants:
        scope.used.add(name)
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
        return f"{left} {'and' if sign == '&&' else 'or'} {right}"
    if sign == "/":
        if "float" in kinds or "tensor" in kinds:
            return f"{left} / {right}"
        if kinds != ["int", "int"]:
            scope.note(f"{left} / {right} is taken to be a division of integers")
        return f"{left} // {right}"
    if sign in ("+", "-") and _is_pointer(sides[0], scope):
        scope.note(f"a pointer, {sign} {right}: elements of the flattened tensor")
        return f"{left}.flatten()[{right if sign == '+' else '-' + right}:]"
    if sign not in _SAME:
        raise NotTranslated(node, f"the operator {sign}")
    return f"{left} {sign} {right}"


def _is_pointer(node: Node, scope: Scope) -> bool:
    if node.type == "identifier":
        return text(node) in scope.dtypes
    return (
        node.type == "call_expression"
        and bare(text(node.child_by_field_name("function")).rpartition(".")[2]) in _POINTERS
    )


def _unary(node: Node, scope: Scope) -> str:
    sign, inner = text(node)[0], python(node.child_by_field_name("argument"), scope)
    return f"not {inner}" if sign == "!" else f"{sign}{inner}"


def _pointer(node: Node, scope: Scope) -> str:
    raise NotTranslated(node, f"an address or what lies there: {text(node)[:60]!r}")


def _conditional(node: Node, scope: Scope) -> str:
    parts = (python(node.child_by_field_name(one), scope) for one in ("consequence", "condition", "alternative"))
    return "({} if {} else {})".format(*parts)


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
    if _is_pointer(of, scope):
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


def dtype_of_constant(name: str) -> str | None:
    """`torch::kFloat32`, `at::ScalarType::Float` -> float32; None for what is no dtype."""
    last = bare(name)
    if last.startswith("k") and last[1:] in _SCALARS:
        return _SCALARS[last[1:]]
    return _SCALARS.get(last) if "ScalarType" in name else None


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
    if base in _CEIL:
        return f"cupyops.ceil_div({', '.join(arguments(given, scope))})"
    if (
        base
        in (
            "min",
            "max",
            "make_tuple",
            "get",
            "ceil",
            "tie",
            "sqrt",
            "floor",
            "abs",
            "pow",
            "log2",
            "log",
            "exp",
            "ceilf",
            "floorf",
            "sqrtf",
            "powf",
        )
        and "torch" not in name
    ):
        return _standard(node, base, name, values, scope)
    if base in _TENSORS and "::" in name:
        return _allocation(base, values, scope)
    if base in _FUNCTIONS and re.match(r"(at|torch)::", name):
        return f"torch.{base}({', '.join(arguments(given, scope))})"
    if is_options(node):
        return f"dict({options(node, scope)})"
    if is_known:
        scope.used.add(base)
        return f"{name_of(base)}({', '.join(arguments(given, scope))})"
    raise NotTranslated(node, f"the function {name[:60]}")


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
    if is_options(node):
        return f"dict({options(node, scope)})"
    base, values = python(of, scope), arguments(given, scope)
    if of.type not in ("identifier", "call_expression", "field_expression", "subscript_expression"):
        base = f"({base})" if not base.startswith("(") else base
    if method in _POINTERS:
        return base
    if method in ("has_value", "defined") and not values:
        return f"({base} is not None)"
    if method == "value" and not values:
        return base
    if method in _ATTRIBUTES and not values:
        return f"{base}.{_ATTRIBUTES[method]}"
    if method in _SIZES | _METHODS:
        return f"{base}.{method}({', '.join(values)})"
    if method == "index" and len(values) == 1:
        return f"{base}[{values[0]}]".replace('"..."', "...")
    raise NotTranslated(node, f"the method {method}")


def _allocation(base: str, values: list[Node], scope: Scope) -> str:
    given = [options(one, scope) if is_options(one, scope) else python(one, scope) for one in values]
    return f"torch.{base}({', '.join(filter(None, given))})"


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


def options(node: Node, scope: Scope) -> str:
    """Options as keyword arguments: `dtype=torch.int32, device=x.device`."""
    return ", ".join(f"{key}={value}" if key != "**" else f"**{value}" for key, value in _options(node, scope).items())


def _options(node: Node, scope: Scope) -> dict[str, str]:
    if node.type == "identifier":
        return {"**": name_of(text(node))}
    if node.type == "qualified_identifier":
        return {"dtype": python(node, scope)}
    function, given = node.child_by_field_name("function"), node.child_by_field_name("arguments").named_children
    if function.type != "field_expression":
        base = bare(text(function))
        if base == "TensorOptions":
            return _option(node, "dtype", given, scope) if given else {}
        if base == "CUDA":
            scope.note("allocated on the current GPU, as at::CUDA does")
            return {"dtype": python(given[0], scope), "device": '"cuda"'}
        return _option(node, base, given, scope)
    of, method = function.child_by_field_name("argument"), bare(text(function.child_by_field_name("field")))
    if method == "options":
        x = python(of, scope)
        return {"dtype": f"{x}.dtype", "device": f"{x}.device"}
    return _options(of, scope) | _option(node, method, given, scope)


def _option(node: Node, key: str, given: list[Node], scope: Scope) -> dict[str, str]:
    if key == "requires_grad":
        return {}  # an operator's outputs have it of their inputs
    if key == "device" and "kCUDA" in text(given[0]):
        scope.note("allocated on the current GPU")
        return {"device": '"cuda"'}
    if key == "device" and "kCPU" in text(given[0]):
        return {"device": '"cpu"'}
    if key in ("dtype", "device"):
        return {key: python(given[0], scope)}
    raise NotTranslated(node, f"the option {key}")


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
