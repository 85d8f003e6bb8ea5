"""Structs that host code fills and hands to a kernel by value: `ctypes` structures, whose layout is C's."""

from __future__ import annotations

import keyword
import re
from dataclasses import replace

from .program import Node, Program, bare, text
from .scope import NotTranslated
from .values import ATOM, Type, Value
from .vocabulary import DTYPES, type_of

Member = tuple[Type, int, str]  # the type; the length of an array, else 0; torch's dtype of a pointer


def members(name: str, program: Program) -> dict[str, Member] | None:
    """The members of a struct by their names; None if it has others than numbers, pointers to them and arrays of them."""
    if (node := program.structs.get(name)) is None:
        return None
    found: dict[str, Member] = {}
    for one in node.child_by_field_name("body").named_children:
        if one.type == "comment":
            continue
        if one.type != "field_declaration" or one.child_by_field_name("default_value") is not None:
            return None
        spelled = text(one.child_by_field_name("type"))
        for declarator in one.children_by_field_name("declarator"):
            length, stars = 0, ""
            if declarator.type == "array_declarator" and (size := declarator.child_by_field_name("size")) is not None:
                count = program.constants.get(text(size), (text(size), ""))[0].removesuffix(")").rpartition("(")[2]
                declarator = declarator.child_by_field_name("declarator")
                length = int(count) if count.isdigit() else 0
                stars = "" if length else "[]"
            elif declarator.type == "pointer_declarator":
                declarator, stars = declarator.child_by_field_name("declarator"), "*"
                while declarator is not None and declarator.type != "field_identifier":
                    declarator = next((inner for inner in declarator.named_children), None)
            kind = type_of(spelled + stars)
            member = text(declarator)
            dtype = DTYPES.get(spelled, "") if stars == "*" else ""
            if kind is None or not (kind.is_number or dtype) or not member.isidentifier() or keyword.iskeyword(member):
                return None
            found[member] = kind, length, dtype
    return found or None


def kind_of(spelled: str, program: Program) -> Type | None:
    """The type that a C++ type, or a reference to it, names, if it is a struct that host code may fill."""
    name = bare(re.sub(r"\b(const|struct)\b|&", " ", spelled))
    return Type("struct", name=name) if members(name, program) else None


def definition(name: str, of: dict[str, Member]) -> str:
    """The Python of a struct's type."""
    fields = "".join(f"        ({one!r}, ctypes.{_in_c(*member)}),\n" for one, member in of.items())
    return f'class _{name}(ctypes.Structure):\n    """C++\'s struct {name}."""\n\n    _fields_ = (\n{fields}    )'


def _in_c(kind: Type, length: int, dtype: str) -> str:
    names = {"float": {32: "float", 64: "double"}.get(kind.bits, ""), "bool": "bool"}
    number = "uint64" if dtype else names.get(kind.kind) or f"{'' if kind.signed else 'u'}int{kind.bits}"
    return f"c_{number}" + (f" * {length}" if length else "")


def empty(kind: Type) -> Value:
    """A new struct, all zero."""
    return Value(f"_{kind.name}()", kind)


def copied(value: Value) -> Value:
    """A struct as a variable of its own has it."""
    if value.code == f"_{value.type.name}()":
        return value
    return replace(value, code=f"type({value.code}).from_buffer_copy({value.code})")


def address(value: Value, dtype: str, node: Node) -> str:
    """The Python of a pointer as a member has it. Raises `NotTranslated`."""
    if value.type.kind == "none":
        return "0"
    if value.type.kind not in ("pointer", "tensor"):
        raise NotTranslated(node, f"a {value.type} as a pointer of a struct")
    return f"_address({value.code}, torch.{dtype})"


def passed(value: Value, spelled: str, node: Node) -> str:
    """The Python of a struct as the argument of a kernel. Raises `NotTranslated`."""
    if bare(re.sub(r"\b(const|struct)\b|&", " ", spelled)) != value.type.name:
        raise NotTranslated(node, f"the struct {value.type.name} where the kernel has {spelled or 'no type'}")
    return f"np.frombuffer({value.at(ATOM)}, np.uint8)"
