"""Structs that host code fills and hands to a kernel by value: `ctypes` structures, whose layout is C's."""

from __future__ import annotations

import keyword
import re
from dataclasses import replace

from .program import Node, Program, bare, text, under, walk
from .scope import NotTranslated, Variable
from .values import ATOM, Type, Value
from .vocabulary import DTYPES, type_of

_ALIGNED = re.compile(r"u?(char|short|int|long|longlong|float|double)[24]")  # to more than their members are
Member = tuple[Type, int, str]  # the type; the length of an array, else 0; torch's dtype of a pointer


def members(name: str, program: Program) -> dict[str, Member] | None:
    """The members of a struct by their names; None if it has others than numbers, pointers to them and arrays of them."""
    if (node := program.structs.get(name)) is None:
        return None
    found: dict[str, Member] = {}
    for one in under(node, "body").named_children:
        if one.type in _WITHOUT_LAYOUT and not re.search(r"\bvirtual\b|~|\boperator\s*=[^=]", text(one).split("{")[0]):
            continue
        if one.type != "field_declaration" or re.match(r"(virtual|mutable)\b", text(one)) or _is_bitfield(one):
            return None
        if text(one).startswith("static "):
            continue
        named = under(one, "type")
        spelled = text(under(named, "name") if named.type == "struct_specifier" else named)
        for declarator in one.children_by_field_name("declarator"):
            length, stars = 0, ""
            if declarator.type == "function_declarator":
                continue
            if declarator.type == "field_identifier" and spelled != name and members(spelled, program):
                if has_start(spelled, program) or keyword.iskeyword(text(declarator)) or _ALIGNED.fullmatch(spelled):
                    return None
                found[text(declarator)] = Type("struct", name=spelled), 0, ""
                continue
            if declarator.type == "array_declarator" and (size := under(declarator, "size")) is not None:
                count = program.constants.get(text(size), (text(size), ""))[0].removesuffix(")").rpartition("(")[2]
                declarator = under(declarator, "declarator")
                length = int(count) if count.isdigit() else 0
                stars = "" if length else "[]"
            elif declarator.type == "pointer_declarator":
                declarator, stars = under(declarator, "declarator"), "*"
                while declarator is not None and declarator.type != "field_identifier":
                    declarator = next((inner for inner in declarator.named_children), None)
            kind = type_of(spelled + stars)
            member = text(declarator)
            dtype = DTYPES.get(spelled, "") if stars == "*" else ""
            if kind is None or not (kind.is_number or dtype) or not member.isidentifier() or keyword.iskeyword(member):
                return None
            found[member] = kind, length, dtype
    return found or None


def defaults(name: str, program: Program) -> list[tuple[str, Node]]:
    """The members with a value of their own, `int n = 3;`, and these values."""
    fields = [one for one in _parts(name, program) if one.type == "field_declaration"]
    return [
        (text(under(one, "declarator")), value)
        for one in fields
        if not text(one).startswith("static ") and (value := under(one, "default_value")) is not None
    ]


def constructors(name: str, program: Program) -> list[Node]:
    """The constructors of a struct, also those that are declared alone."""
    return [one for one in _parts(name, program) if called(one) == name]


def has_start(name: str, program: Program) -> bool:
    """Return True if a new struct is not all zero, or not known to be: of constructors, or values of members."""
    of = members(name, program) or {}
    return bool(defaults(name, program) or constructors(name, program)) or any(
        kind.kind == "struct" and has_start(kind.name, program) for kind, _, _ in of.values()
    )


def method(name: str, spelled: str, program: Program) -> list[Node]:
    """The definitions of a struct's methods of that name."""
    return [one for one in _parts(name, program) if one.type == "function_definition" and called(one) == spelled]


def called(node: Node) -> str:
    """The name of a function that stands in a struct; empty for other parts."""
    declarator = under(node, "declarator")
    if node.type == "template_declaration":
        return next((found for one in node.named_children if (found := called(one))), "")
    if declarator is None or declarator.type != "function_declarator":
        return ""
    return text(under(declarator, "declarator"))


def parameters(node: Node) -> list[tuple[Node, str]]:
    """(Type, name) of each parameter of a function that stands in a struct. Raises `NotTranslated`."""
    found = []
    for one in under(under(node, "declarator"), "parameters").named_children:
        names = [text(inner) for inner in walk(one) if inner.type == "identifier"]
        if one.type != "parameter_declaration" or len(names) != 1 or "[" in text(one):
            raise NotTranslated(one, f"the parameter {text(one)[:60]!r}")
        found.append((one, names[0]))
    return found


def frame(value: Value, program: Program) -> dict[str, Variable]:
    """The names that a function of a struct has of it: `this`, and its members but for pointers."""
    of = members(value.type.name, program) or {}
    found = {"this": Variable(value, value.code)}
    for name, (kind, length, dtype) in of.items():
        if not dtype:
            code = f"{value.at(ATOM)}.{name}"
            inner = Value(code, Type("list", of=(kind,))) if length else Value(code, kind)
            inner = replace(inner, low=kind.low, high=kind.high) if kind.is_integer and not length else inner
            found[name] = Variable(inner, code)
    return found


def _parts(name: str, program: Program) -> list[Node]:
    return list(under(program.structs[name], "body").named_children)


_WITHOUT_LAYOUT = frozenset(
    ("comment", "function_definition", "declaration", "template_declaration", "access_specifier", "alias_declaration",
     "type_definition")
)  # fmt: skip


def kind_of(spelled: str, program: Program) -> Type | None:
    """The type that a C++ type, or a reference to it, names, if it is a struct that host code may fill."""
    name = bare(re.sub(r"\b(const|struct)\b|&", " ", spelled))
    return Type("struct", name=name) if members(name, program) else None


def definition(name: str, of: dict[str, Member]) -> str:
    """The Python of a struct's type."""
    fields = "".join(f"        ({one!r}, {_in_c(*member)}),\n" for one, member in of.items())
    return f'class _{name}(ctypes.Structure):\n    """C++\'s struct {name}."""\n\n    _fields_ = (\n{fields}    )'


def _in_c(kind: Type, length: int, dtype: str) -> str:
    if kind.kind == "struct":
        return f"_{kind.name}"
    names = {"float": {32: "float", 64: "double"}.get(kind.bits, ""), "bool": "bool"}
    number = "uint64" if dtype else names.get(kind.kind) or f"{'' if kind.signed else 'u'}int{kind.bits}"
    return f"ctypes.c_{number}" + (f" * {length}" if length else "")


def empty(kind: Type) -> Value:
    """A new struct, all zero."""
    return Value(f"_{kind.name}()", kind)


def copied(value: Value) -> Value:
    """A struct as a variable of its own has it."""
    if value.binds == ATOM and re.fullmatch(r"\w+\(.*\)", value.code, re.DOTALL):
        return value  # of a call, which has made it
    return replace(value, code=f"type({value.code}).from_buffer_copy({value.code})")


def address(value: Value, dtype: str, node: Node) -> str:
    """The Python of a pointer as a member has it. Raises `NotTranslated`."""
    if value.type.kind == "none":
        return "0"
    if value.type.kind not in ("pointer", "tensor"):
        raise NotTranslated(node, f"a {value.type} as a pointer of a struct")
    return f"cpp.address({value.code}, torch.{dtype})"


def passed(value: Value, spelled: str, node: Node) -> str:
    """The Python of a struct as the argument of a kernel. Raises `NotTranslated`."""
    if bare(re.sub(r"\b(const|struct)\b|&", " ", spelled)) != value.type.name:
        raise NotTranslated(node, f"the struct {value.type.name} where the kernel has {spelled or 'no type'}")
    return f"np.frombuffer({value.at(ATOM)}, np.uint8)"


def _is_bitfield(node: Node) -> bool:
    return any(one.type == "bitfield_clause" for one in node.named_children)
