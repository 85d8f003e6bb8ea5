"""C++ expressions as Python, with the types that C++ gives them: numbers, tensors, options, grids.

What has no translation raises `NotTranslated`, with its line; what is likely, and not certain, is noted, and the caller
writes it beside the line as "check this". Each part of an expression is accounted for: one that its handler has not read is
an error.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import replace

from . import structs, values
from .program import Node, bare, parsed, text, under, walk
from .scope import NotTranslated, Scope
from .values import BOOL, DTYPE, INT, OPTIONS, TENSOR, ULONG, Type, Value
from .vocabulary import (
    DTYPES,
    GUARDS,
    LIMITS,
    NUMBERS,
    OF_GPUS,
    OF_LAUNCHES,
    STREAMS,
    dtype_of_constant,
    name_of,
    type_of,
)


def python(node: Node, scope: Scope) -> Value:
    """The Python of an expression. Raises `NotTranslated`."""
    handler = EXPRESSIONS.get(node.type)
    if handler is None:
        raise NotTranslated(node, f"{node.type.replace('_', ' ')}: {text(node)[:80]!r}")
    try:
        found = handler(node, scope)
    except ValueError as error:
        raise NotTranslated(node, f"{text(node)[:60]!r}, of {error}") from None
    scope.account(node)
    return found


def children(node: Node) -> list[Node]:
    """The parts of a node that have a name, without comments."""
    return [one for one in node.named_children if one.type != "comment"]


def arguments(node: Node, scope: Scope) -> list[Value]:
    """Each argument of a call."""
    found = [python(one, scope) for one in children(node)]
    scope.account(node)
    return found


def ctype(node: Node, scope: Scope, what: str = "") -> Type:
    """The type that a node names. Raises `NotTranslated`."""
    spelled = what or text(node)
    seen = set()
    while (name := spelled.replace("const", " ").strip()) in scope.program.aliases and name not in seen:
        if name in scope.types:
            break
        seen.add(name)
        spelled = scope.program.aliases[name]
    found = type_of(spelled, scope.types)
    found = found or structs.kind_of(spelled, scope.program)
    if found is None:
        raise NotTranslated(node, f"the type {' '.join(spelled.split())[:60]}")
    scope.read(node)
    return found


def assigned(value: Value, to: Type, node: Node, *, lax: bool = False) -> Value:
    """A value as a variable of that type has it, or an argument, which may take it as it is. Raises `NotTranslated`."""
    if value.type == to and not value.loose:
        if to.kind == "struct":
            return structs.copied(value)
        return replace(value, code=value.lax, binds=values.CHOICE) if lax and value.lax else value
    if value.type.is_number and to.is_number:
        found = values.converted(value, to)
        assert found is not None
        return replace(found, code=found.lax, binds=values.CHOICE) if lax and found.lax else found
    if to.kind == "scalar" and value.type.is_number:
        return replace(value, code=value.lax or value.code, type=to)
    if value.type.kind == "scalar" and to.is_number:
        raise NotTranslated(node, f"{text(node)[:60]!r}: a number whose type a launch knows, where {to.kind} is wanted")
    if to.kind == "options" and value.type.kind in ("dtype", "device"):
        return Value(value.code, OPTIONS, options={value.type.kind: value.code})
    if to.kind == "optional":
        return value if value.type.kind in ("none", "optional") else assigned(value, to.of[0], node)
    if value.type.kind == "optional" and value.type.of[0] == to:
        return value
    if to.kind == "tuple" and any(
        one.is_number and one not in value.type.of[at : at + 1] for at, one in enumerate(to.of)
    ):
        raise NotTranslated(node, f"{text(node)[:60]!r}: the numbers of a {value.type}, where others are wanted")
    alike = {value.type.kind, to.kind}
    if value.type.kind == to.kind or alike in (
        {"pointer", "none"},
        {"tensor", "none"},
        {"list", "tuple"},
        {"status", "int"},
    ):
        return value
    if alike == {"pointer", "tensor"} or (value.type.kind == "tensor" and to.kind == "list"):
        return value
    raise NotTranslated(node, f"{text(node)[:60]!r}: of a {value.type}, where a {to} is wanted")


def condition(node: Node, scope: Scope) -> Value:
    """An expression that is true or false: of a pointer, whether there is one."""
    value = python(node, scope)
    try:
        return values.truth(value)
    except ValueError:
        raise NotTranslated(node, f"the condition {text(node)[:60]!r}, of a {value.type}") from None


def _identifier(node: Node, scope: Scope) -> Value:
    name, program = text(node), scope.program
    if (variable := scope.find(name)) is not None:
        if variable.kernel is not None:
            raise NotTranslated(node, f"the kernel {name} as a value")
        return variable.value
    if name in program.constants:
        return constant(node, name, scope)
    if name in OF_LAUNCHES:
        return values.number(OF_LAUNCHES[name], INT, str(OF_LAUNCHES[name]))
    if name in LIMITS:
        number, kind = LIMITS[name]
        code = repr(number) if math.isfinite(number) else f"math.{number}"
        return values.number(number, NUMBERS[kind], code)
    if name == "cudaSuccess":
        return Value("0", values.STATUS)
    if name in ("NULL", "nullptr", "None"):  # the last of torch::indexing
        return Value("None", values.NONE)
    raise NotTranslated(node, f"the name {name}, which the files do not define")


_NUMBER = re.compile(r"(-?)(0[xX][\da-fA-F']+|0[bB][01']+|[\d.']+(?:[eE][+-]?\d+)?)([uUlLfFzZ]*)")


def _number(node: Node, scope: Scope) -> Value:
    match = _NUMBER.fullmatch(text(node))
    if match is None:
        raise NotTranslated(node, f"the number {text(node)}")
    scope.read(node)
    negative, digits, suffix = match[1] == "-", match[2].replace("'", "").lower(), match[3].lower()
    hexadecimal = digits[:2].lower() in ("0x", "0b")
    if not hexadecimal and re.search(r"[.e]", digits):
        code = re.sub(r"\.(?=$|e)", ".0", digits) if not digits.startswith(".") else f"0{digits}"
        found = values.number(float(digits), values.FLOAT if "f" in suffix else values.DOUBLE, code)
        return values.unary("-", found) if negative else found
    octal = not hexadecimal and re.fullmatch(r"0[0-7]+", digits) is not None
    code = f"0o{digits[1:]}" if octal else digits
    value = int(code, 0)
    wide = [INT, *([values.UINT] if hexadecimal or octal else []), values.LONG, values.ULONG]
    wide = [one for one in wide if ("u" not in suffix or not one.signed) and ("l" not in suffix or one.bits == 64)]
    wide += [values.UINT, values.ULONG] if suffix == "u" else []
    fits = [one for one in sorted(wide, key=lambda one: one.bits) if value <= one.high]
    if not fits:
        raise NotTranslated(node, f"the number {text(node)}")
    return values.unary("-", values.number(value, fits[0], code)) if negative else values.number(value, fits[0], code)


def _string(node: Node, scope: Scope) -> Value:
    scope.read(node)
    parts = [node] if node.type != "concatenated_string" else children(node)
    return Value(repr("".join(_content(one, node) for one in parts)), values.STRING)


def _content(node: Node, whole: Node) -> str:
    try:
        return str(ast.literal_eval(re.sub(r"^(u8|[uUL])", "", text(node))))
    except (ValueError, SyntaxError):
        raise NotTranslated(whole, f"the text {text(whole)[:60]}") from None


def _character(node: Node, scope: Scope) -> Value:
    scope.read(node)
    return values.number(ord(_content(node, node)), NUMBERS["char"], str(ord(_content(node, node))))


def _parenthesized(node: Node, scope: Scope) -> Value:
    inner = children(node)
    if len(inner) != 1:
        raise NotTranslated(node, f"{text(node)[:60]!r}")
    return python(inner[0], scope)


def _binary(node: Node, scope: Scope) -> Value:
    operator = under(node, "operator")
    sides = [under(node, side) for side in ("left", "right")]
    sign = {"and": "&&", "or": "||"}.get(text(operator), text(operator))
    scope.read(operator)
    if sign in ("&&", "||"):
        return _logical(sign, *(condition(one, scope) for one in sides))
    left, right = (python(one, scope) for one in sides)
    if left.type.is_number and right.type.is_number:
        return values.computed(sign, left, right)
    kinds = {left.type.kind, right.type.kind}
    of_status = kinds == {"status"} or (kinds == {"status", "int"} and "0" in (left.code, right.code))
    if of_status and sign in ("==", "!="):
        return Value(str(sign == "=="), BOOL, truth=sign == "==")  # CUDA's errors are exceptions
    if sign in ("==", "!=") and "none" in kinds:
        there = left if right.type == values.NONE else right
        return Value(f"{there.at(values.COMPARE + 1)} is {'not ' * (sign == '!=')}None", BOOL, values.COMPARE)
    if sign in ("==", "!=") and len(kinds) == 1 and kinds <= {"dtype", "device", "string", "list", "kind of device"}:
        if (left.checked or right.checked or kinds == {"kind of device"}) and (tensor := left.element or right.element):
            return on_gpu(tensor, (left.checked or right.checked) == (sign == "=="))
        return Value(f"{left.at(values.COMPARE + 1)} {sign} {right.at(values.COMPARE + 1)}", BOOL, values.COMPARE, 0, 1)
    if (
        "tensor" in kinds
        and kinds <= {"tensor", "int", "float", "bool", "scalar"}
        and sign in (*values.COMPARISONS, *"+-*/%&|^")
    ):
        if sign == "%":
            raise NotTranslated(node, "the remainder of a tensor: PyTorch's has another sign in C++")
        binds = values.COMPARE if sign in values.COMPARISONS else values._BINDS[sign]
        extra = binds == values.COMPARE
        if sign == "/":
            left_code, right_code = values._sides(left, right, binds)
            return Value(f"{left_code} / {right_code}", TENSOR, binds)
        return Value(f"{left.at(binds + extra)} {sign} {right.at(binds + 1)}", TENSOR, binds)
    if sign in ("+", "-") and left.type.kind == "pointer" and right.type.is_integer:
        at = right if sign == "+" else values.unary("-", right)
        return replace(left, code=f"cpp.memory({left.code}, {at.code})", binds=values.ATOM)
    if sign in ("+", "-") and (found := cursor(left, right, sign)) is not None and left.type.kind == "cursor":
        return found
    if sign == "+" and kinds == {"string"}:
        return Value(f"{left.at(values.PLUS)} + {right.at(values.PLUS + 1)}", values.STRING, values.PLUS)
    raise NotTranslated(node, f"{sign} of a {left.type} and a {right.type}")


def _logical(sign: str, left: Value, right: Value) -> Value:
    """`a && b`; what is certain of CUDA's errors falls out of it."""
    decisive = sign == "||"
    for one, other in ((left, right), (right, left)):
        if one.truth is not None:
            return one if one.truth is decisive else other
    binds, word = (values.AND, "and") if sign == "&&" else (values.OR, "or")
    loose = any(one.loose or one.type.kind != "bool" for one in (left, right))
    return Value(
        f"{left.at(binds)} {word} {right.at(binds + 1)}", BOOL, binds, 0, 1, loose=loose,
        checked=left.checked and right.checked and sign == "&&",
    )  # fmt: skip


def _not(value: Value) -> Value:
    if value.truth is not None:
        return Value(str(not value.truth), BOOL, truth=not value.truth)
    return Value(f"not {value.at(values.NOT)}", BOOL, values.NOT, 0, 1)


def _unary(node: Node, scope: Scope) -> Value:
    operator = under(node, "operator")
    sign, inner = {"not": "!"}.get(text(operator), text(operator)), under(node, "argument")
    scope.read(operator)
    if sign == "!":
        return _not(condition(inner, scope))
    value = python(inner, scope)
    if value.type == TENSOR and sign in "-~":
        return Value(f"{sign}{value.at(values.UNARY)}", TENSOR, values.UNARY)
    if value.code.startswith("cpp.limit(") and sign == "-" and "infinity" in value.code:
        return replace(value, code=f"-{value.code}", binds=values.UNARY)  # of a number with a fraction alone
    if not value.type.is_number:
        raise NotTranslated(node, f"{sign} of a {value.type}")
    return values.unary(sign, value)


def _pointer(node: Node, scope: Scope) -> Value:
    argument = under(node, "argument")
    if text(node).startswith("*"):
        if (found := _extreme(argument, scope)) is not None:
            scope.read(node)
            return found
        value = python(argument, scope)
        if value.type.is_number and argument.type == "identifier":  # of a parameter that is taken for a reference
            scope.read(node)
            return value
        if value.type.kind == "optional":
            scope.read(node)
            return replace(value, type=value.type.of[0])
        if value.type.kind == "pointer" and value.type.of[0].bits:
            scope.read(node)
            return typed(f"cpp.memory({value.code}, 0)[0].item()", value.type.of[0])
        if value.type.kind == "cursor":
            scope.read(node)
            return typed(f"{value.element}[{value.code}]", value.type.of[0])
    elif argument.type == "subscript_expression":  # `&p[n]`
        of = python(under(argument, "argument"), scope)
        given = arguments(under(argument, "indices"), scope)
        if of.type.kind == "pointer" and len(given) == 1 and given[0].type.is_integer:
            scope.read(node)
            return replace(of, code=f"cpp.memory({of.code}, {given[0].code})", binds=values.ATOM)
        if len(given) == 1 and (found := cursor(of, given[0])) is not None:
            scope.read(node)
            return found
    raise NotTranslated(node, f"an address or what lies there: {text(node)[:60]!r}")


def _extreme(node: Node, scope: Scope) -> Value | None:
    """`*std::max_element(v.begin(), v.end())`, of a list of numbers."""
    match = re.fullmatch(r"(?:std::)?(max|min)_element\(\s*(\w+)\.begin\(\),\s*(\w+)\.end\(\)\s*\)", text(node))
    variable = scope.find(match[2]) if match is not None and match[2] == match[3] else None
    if match is None or variable is None or not variable.value.type.of or not variable.value.type.of[0].is_number:
        return None
    return typed(f"{match[1]}({variable.name})", variable.value.type.of[0])


def cursor(of: Value, at: Value, sign: str = "+") -> Value | None:
    """A pointer into an array of the host: an index of the list that `element` names. None for other pointers."""
    if of.type.kind == "list" and of.type.of and of.type.of[0].is_number and of.code.isidentifier():
        of = Value("0", Type("cursor", of=of.type.of), element=of.code)
    if of.type.kind != "cursor" or not at.type.is_integer:
        return None
    if of.code == "0" and sign == "+":
        return replace(of, code=at.code, binds=at.binds)
    return replace(of, code=f"{of.at(values.PLUS)} {sign} {at.at(values.PLUS + 1)}", binds=values.PLUS)


def _conditional(node: Node, scope: Scope) -> Value:
    test = condition(under(node, "condition"), scope)
    sides = [python(under(node, one), scope) for one in ("consequence", "alternative")]
    if test.truth is not None:
        return sides[0] if test.truth else sides[1]
    first, second = (_null(one, other) for one, other in (sides, sides[::-1]))
    if first.type.is_number and second.type.is_number and first.type != second.type:
        to = values.common(first.type, second.type)
        first, second = (assigned(values.promoted(one) if to.kind == "int" else one, to, node) for one in sides)
    elif (
        first.type.kind == "cursor"
        or first.type.kind != second.type.kind
        and not {first.type.kind, second.type.kind} & {"none", "optional"}
    ):
        raise NotTranslated(node, f"either a {first.type} or a {second.type}: {text(node)[:60]!r}")
    code = f"{first.at(values.CHOICE + 1)} if {test.at(values.CHOICE + 1)} else {second.at(values.CHOICE)}"
    kind = second.type if first.type == values.NONE else first.type
    return Value(
        code, kind, values.CHOICE, min(first.low, second.low), max(first.high, second.high),
        sized=first.sized and second.sized, element=first.element,
        loose=first.loose or second.loose,
    )  # fmt: skip


def _null(value: Value, other: Value) -> Value:
    """`0` where the other side is a pointer."""
    return Value("None", values.NONE) if value.code == "0" and other.type.kind == "pointer" else value


def _cast(node: Node, scope: Scope) -> Value:
    return conversion(node, under(node, "type"), text(under(node, "type")), under(node, "value"), scope)


def conversion(node: Node, named: Node, spelled: str, inner: Node, scope: Scope) -> Value:
    """`static_cast<T>(value)`, `(T)value`, `T(value)`."""
    value, to = python(inner, scope), ctype(named, scope, spelled)
    if to == values.VOID:
        return value
    if value.type.is_number and to.is_number:
        found = values.converted(value, to)
        assert found is not None
        return found
    if to.kind == "pointer" and value.element == "torch.uint8" and to.of[0].bits:  # of malloc
        dtype = dtype_of_type(node, spelled.replace("*", " ").strip(), scope)
        return replace(value, code=f"{value.at(values.ATOM)}.view({dtype})", type=to, element=dtype)
    if to.kind == "pointer" and value.type.kind in ("pointer", "none"):
        return replace(value, type=to) if value.type.kind == "pointer" and to.of[0].bits else value
    if to.kind == "scalar" and value.type.is_number:
        return replace(value, code=value.lax or value.code, type=to)
    if value.type.kind == "scalar" and to.kind == "scalar":
        return value
    if to.kind == value.type.kind:
        return value
    if to.kind == "pointer":
        raise NotTranslated(node, f"a pointer made of {text(inner)[:60]!r}")
    raise NotTranslated(node, f"a conversion of a {value.type} to {spelled}")


def a_tuple(found: list[Value], kind: str = "list") -> Value:
    """Several values."""
    of = tuple(one.type for one in found)
    if any(one.kind in ("index", "none") for one in of) or (kind == "list" and "'...'" in [one.code for one in found]):
        of, kind = (Type("index"),), "index"
    if kind == "list":
        of = (values.LONG if of and all(one.is_integer for one in of) else of[0],) if of else ()
    code = f"({', '.join(one.code for one in found)}{',' if len(found) == 1 else ''})"
    return Value(code, Type(kind, of=of))


def _list(node: Node, scope: Scope) -> Value:
    return a_tuple(arguments(node, scope))


def _field(node: Node, scope: Scope) -> Value:
    of, name = under(node, "argument"), under(node, "field")
    value = python(of, scope)
    scope.read(name)
    if value.type.kind == "properties" and text(name) in ("multiProcessorCount", *OF_GPUS):
        of_all = OF_GPUS.get(text(name))
        if isinstance(of_all, tuple):
            return Value(repr(of_all), Type("list", of=(INT,)))
        if of_all is not None:
            return values.number(of_all, ULONG if text(name) == "sharedMemPerBlock" else INT, str(of_all))
        return values.whole(f"cpp.multiprocessors({value.code})", low=1, high=1024)
    if value.type == values.DIM3 and text(name) in ("x", "y", "z"):
        return values.whole(f"{value.code}[{'xyz'.index(text(name))}]", values.UINT)
    if value.type.kind == "tuple" and text(name) in ("first", "second") and len(value.type.of) == 2:
        place = ("first", "second").index(text(name))
        return typed(f"{value.code}[{place}]", value.type.of[place])
    if value.type.kind == "struct":
        kind, length, dtype = (structs.members(value.type.name, scope.program) or {}).get(
            text(name), (values.VOID, 0, "")
        )
        if kind.is_number or kind.kind == "struct":
            code = f"{value.at(values.ATOM)}.{text(name)}"
            return Value(code, Type("list", of=(kind,))) if length else typed(code, kind)
    raise NotTranslated(node, f"the member {text(node)[:60]!r}")


def typed(code: str, kind: Type) -> Value:
    """A value of which nothing but its type is known."""
    return values.whole(code, kind) if kind.is_integer else Value(code, kind)


def _subscript(node: Node, scope: Scope) -> Value:
    of, index = under(node, "argument"), under(node, "indices")
    value, given = python(of, scope), arguments(index, scope)
    if value.type == TENSOR and all(one.type.is_integer for one in given):
        return Value(f"{value.at(values.ATOM)}[{', '.join(one.code for one in given)}]", TENSOR)
    if value.type.kind in ("list", "tuple") and len(given) == 1 and given[0].type.is_integer and value.type.of:
        if given[0].low < 0:
            scope.note(f"{text(node)}: a negative index counts from the end in Python")
        kind = value.type.of[0]
        found = typed(f"{value.at(values.ATOM)}[{given[0].code}]", kind)
        return replace(found, sized=True, low=0, high=values.SIZE_LIMIT) if value.sized else found
    if value.type.kind == "accessor" and len(given) == 1 and given[0].type.is_integer:
        inner = f"{value.code}[{given[0].code}]"
        if value.type.bits > 1:
            return Value(inner, replace(value.type, bits=value.type.bits - 1))
        return typed(f"{inner}.item()", value.type.of[0])
    if value.type.kind == "pointer" and len(given) == 1 and given[0].type.is_integer and value.type.of[0].bits:
        return typed(f"cpp.memory({value.code}, {given[0].code})[0].item()", value.type.of[0])
    if value.type.kind == "cursor" and len(given) == 1 and (at := cursor(value, given[0])) is not None:
        return typed(f"{at.element}[{at.code}]", value.type.of[0])
    raise NotTranslated(node, f"an element behind a pointer: {text(node)[:60]!r}")


def _qualified(node: Node, scope: Scope) -> Value:
    name = text(node)
    last = bare(name)
    scope.read(node)
    dtype = dtype_of_constant(name)
    if dtype is not None:
        return Value(f"torch.{dtype}", DTYPE)
    if re.fullmatch(r"(at|torch|c10)::(DeviceType::CUDA|Device::Type::CUDA|kCUDA)", name):
        return Value('"cuda"', Type("kind of device"), checked=True)
    if re.fullmatch(r"(at|torch|c10)::(DeviceType::CPU|kCPU)", name):
        return Value('"cpu"', Type("kind of device"))
    if re.fullmatch(r"(std|at|c10|torch)::(nullopt|indexing::None)", name):
        return Value("None", values.NONE)
    if re.fullmatch(r"(at|torch)::indexing::Ellipsis", name):
        return Value("...", Type("index"))
    formats = {"Contiguous": "torch.contiguous_format", "ChannelsLast": "torch.channels_last"}
    if re.fullmatch(r"(at|torch|c10)::(MemoryFormat|kStrided|k\w*)(::\w+)?", name) and last in formats:
        return Value(formats[last], Type("format"))
    for one in ("::".join(name.split("::")[-2:]), last):
        if one in scope.program.constants:
            return constant(node, one, scope)
    raise NotTranslated(node, f"the name {name}")


def _sizeof(node: Node, scope: Scope) -> Value:
    named = under(node, "type") or under(node, "value")
    spelled = text(named).strip("() ")
    scope.read(node)
    variable = scope.find(spelled)
    if variable is not None and variable.value.type.kind == "dtype":
        return values.whole(f"{variable.value.code}.itemsize", values.ULONG, low=1, high=16)
    kind = variable.value.type if variable is not None else ctype(named, scope, spelled)
    if kind.kind == "pointer":
        return values.number(8, values.ULONG, "8")
    if kind.is_number:
        size = max(kind.bits // 8, 1)
        return values.number(size, values.ULONG, str(size))
    members = set((structs.members(kind.name, scope.program) or {}).values()) if kind.kind == "struct" else set()
    if len(members) == 1 and (of := members.pop())[0].is_number and not of[1]:  # as those of float4
        size = len(structs.members(kind.name, scope.program) or {}) * max(of[0].bits // 8, 1)
        return values.number(size, values.ULONG, str(size))
    if spelled in DTYPES and "16" in DTYPES[spelled]:
        return values.number(2, values.ULONG, "2")
    raise NotTranslated(node, f"the size of {spelled}")


def _new(node: Node, scope: Scope) -> Value:
    """`new int[n]`: a list, of which the value is the place of its first element."""
    declarator, given = under(node, "declarator"), under(node, "arguments")
    kind = ctype(under(node, "type"), scope)
    length = python(under(declarator, "length"), scope) if declarator is not None else None
    if not kind.is_number or length is None or not length.type.is_integer or given is not None:
        raise NotTranslated(node, f"new expression: {text(node)[:60]!r}")
    scope.read(node)
    variable = scope.declare("memory ", Type("list", of=(kind,)))
    zero = "0.0" if kind.kind == "float" else "0"
    scope.before.append(f"{variable.name} = [{zero}] * {length.at(values.TIMES + 1)}")
    return Value("0", Type("cursor", of=(kind,)), element=variable.name)


def _lambda(node: Node, scope: Scope) -> Value:
    if scope.inner is None:
        raise NotTranslated(node, f"lambda expression: {text(node)[:60]!r}")
    return scope.inner(node)


def on_gpu(tensor: str, there: bool = True) -> Value:
    """`x.is_cuda()`, or else `x.is_cpu()`: in the simulator a tensor is one of a GPU."""
    found = Value(f"{tensor}.is_cuda or cupyops.simulating()", BOOL, values.OR, 0, 1, checked=True)
    return found if there else _not(found)


def constant(node: Node, name: str, scope: Scope) -> Value:
    """A constant of the files, which the Python has under the same name. Raises `NotTranslated`."""
    value, place = scope.program.constants[name]
    found = constant_value(name, value, scope)
    if found is None:
        what = f"{value!r} in {place}" if not value.startswith("? ") else "which has several values"
        raise NotTranslated(node, f"the name {name}, {what}")
    scope.read(node)
    scope.used.add(name)
    return replace(found, code=name_of(name), binds=values.ATOM, lax="")


def constant_value(name: str, value: str, scope: Scope) -> Value | None:
    """Return the value of a constant of the files; None where it has no translation."""
    if (node := parsed(f"auto found = {value};", "init_declarator")) is None:
        return None
    others = {one: what for one, what in scope.program.constants.items() if one != name}
    inner = Scope(replace(scope.program, constants=others), types=scope.types)
    try:
        found = (_map if re.match(r"static_cast<(std::)?(unordered_)?map<", value) else python)(
            under(node, "value"), inner
        )
    except NotTranslated:
        return None
    scope.used |= inner.used
    return found if found.type.is_number or found.type.kind in ("string", "map") else None


def _map(node: Node, scope: Scope) -> Value:
    """A constant `std::map`, as a dict."""
    listed_ = next((one for one in walk(node) if one.type == "initializer_list"), None)
    if listed_ is None:
        raise NotTranslated(node, f"{text(node)[:60]!r}")
    rows = [arguments(one, scope) for one in children(listed_)]
    kinds = {tuple(one.type for one in row) for row in rows}
    if len(kinds) != 1 or len(rows[0]) != 2:
        raise NotTranslated(node, f"{text(node)[:60]!r}")
    inner = ", ".join(f"{key.code}: {value.code}" for key, value in rows)
    return Value(f"{{{inner}}}", Type("map", of=tuple(one.type for one in rows[0])))


# --- what calls share ---


def nothing(node: Node, scope: Scope) -> None:
    """Accept an expression for a device or a stream, which a launch finds itself; else raise `NotTranslated`."""
    if node.type == "identifier" and scope.find(text(node)) is not None:
        variable = scope.find(text(node))
        if variable is not None and variable.value.type.kind in ("guard", "tensor", "device", "pointer"):
            scope.read(node)
            return
    elif text(node) in ("0", "true", "false", "cudaEventDefault", "cudaEventDisableTiming", "cudaStreamNonBlocking"):
        scope.read(node)
        return
    elif text(node) == "at::globalContext().lazyInitCUDA()" or (
        node.type == "pointer_expression" and (known := scope.find(text(under(node, "argument")))) is not None
        and known.value.type.kind == "guard"
    ):  # fmt: skip
        scope.read(node)
        return
    elif node.type == "initializer_list" or (node.type == "argument_list" and not children(node)):
        if not children(node):
            scope.read(node)
            return
    elif node.type == "call_expression":
        function, given = under(node, "function"), children(under(node, "arguments"))
        if function.type == "field_expression" and not given and text(under(function, "field")) in (
            "device", "get_device", "index", "stream", "device_index",
        ):  # fmt: skip
            nothing(under(function, "argument"), scope)
            scope.read(node)
            return
        if function.type != "field_expression" and bare(text(function)) in STREAMS | GUARDS:
            for one in [] if text(node) == "THCState_getCurrentStream(state)" else given:
                nothing(one, scope)
            scope.read(node)
            return
        if function.type == "template_function" and text(function).startswith("static_cast") and len(given) == 1:
            nothing(given[0], scope)
            scope.read(node)
            return
    elif node.type in ("cast_expression", "parenthesized_expression"):
        nothing(under(node, "value") or children(node)[0], scope)
        scope.read(node)
        return
    elif node.type == "subscript_expression":
        nothing(under(node, "argument"), scope)
        scope.read(node)
        return
    raise NotTranslated(node, f"{text(node)[:60]!r}, where a device or a stream is expected")


def dtype_of_type(node: Node, name: str, scope: Scope) -> str:
    """The Python of the dtype that a C++ type is: `float`, `scalar_t`. Raises `NotTranslated`."""
    name = " ".join(re.sub(r"\bconst\b|\btypename\b", " ", name).split())
    if (variable := scope.find(name)) is not None and variable.value.type == DTYPE:
        return variable.value.code
    seen = set()
    while name in scope.program.aliases and name not in seen:
        seen.add(name)
        name = scope.program.aliases[name]
    if match := re.fullmatch(
        r"(?:\w+::)*(?:acc_type|opmath_type|AccumulateType|OpMathType)<([\w: ]+)(?:,\s*true)?>(?:::type)?", name
    ):
        inner = dtype_of_type(node, match[1], scope)
        return f"(torch.float64 if {inner} == torch.float64 else torch.float32)"
    if name in ("half", "__half", "__nv_bfloat16", "nv_bfloat16"):
        return repr({"half": "__half", "nv_bfloat16": "__nv_bfloat16"}.get(name, name))  # CUDA's own, not PyTorch's
    if name in DTYPES:
        return f"torch.{DTYPES[name]}"
    kind = type_of(name)
    if kind is not None and kind.is_number and (spelled := DTYPE_NAMES.get((kind.kind, kind.bits, kind.signed))):
        return f"torch.{spelled}"
    raise NotTranslated(node, f"the template argument {name[:60]}")


DTYPE_NAMES = {
    ("int", 32, True): "int32", ("int", 64, True): "int64", ("int", 16, True): "int16", ("int", 8, True): "int8",
    ("int", 8, False): "uint8", ("int", 32, False): "uint32", ("int", 64, False): "uint64", ("bool", 1, True): "bool",
    ("float", 32, True): "float32", ("float", 64, True): "float64",
}  # fmt: skip


# by the type of a node; calls.py adds what is called
EXPRESSIONS: dict[str, Callable[[Node, Scope], Value]] = {
    "identifier": _identifier, "this": _identifier, "qualified_identifier": _qualified, "number_literal": _number,
    "string_literal": _string, "concatenated_string": _string, "char_literal": _character,
    "raw_string_literal": lambda node, scope: _raw(node, scope),
    "true": lambda node, scope: replace(_literal(node, scope, "True", BOOL), low=1, high=1),
    "false": lambda node, scope: replace(_literal(node, scope, "False", BOOL), low=0, high=0),
    "null": lambda node, scope: _literal(node, scope, "None", values.NONE), "parenthesized_expression": _parenthesized,
    "binary_expression": _binary, "unary_expression": _unary, "pointer_expression": _pointer, "field_expression": _field,
    "conditional_expression": _conditional, "cast_expression": _cast, "initializer_list": _list, "new_expression": _new,
    "subscript_expression": _subscript, "sizeof_expression": _sizeof, "lambda_expression": _lambda,
}  # fmt: skip


def _literal(node: Node, scope: Scope, code: str, kind: Type) -> Value:
    scope.read(node)
    return Value(code, kind)


def _raw(node: Node, scope: Scope) -> Value:
    scope.read(node)
    return Value(repr("".join(text(one) for one in children(node) if one.type == "raw_string_content")), values.STRING)
