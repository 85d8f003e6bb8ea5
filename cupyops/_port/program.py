"""A C++ extension's files, parsed: host functions, constants, bindings. The parser is tree-sitter's, of the extra `port`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._kernel.extension.device import closing
from .._kernel.extension.tokens import tokens
from ..errors import MissingDependencyError
from .preprocess import Preprocessor
from .vocabulary import name_of

Node = Any  # tree_sitter.Node, which is there where its wheel is


def parser() -> Any:
    """A parser of CUDA C++. Raises `MissingDependencyError` where tree-sitter is not installed."""
    try:
        import tree_sitter
        import tree_sitter_cuda
    except ImportError as error:
        raise MissingDependencyError(
            f'host code is read by tree-sitter, which does not import: {error}\n  pip install "cupyops[port]"'
        ) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cuda.language()))


def parsed(code: str, kind: str, at: Node | None = None) -> Node | None:
    """The first part of that type of a text, which begins on the line of a node; None where the text is no C++."""
    root = parser().parse(("\n" * (at.start_point[0] if at is not None else 0) + code).encode()).root_node
    return None if root.has_error else next((one for one in walk(root) if one.type == kind), None)


def text(node: Node | None) -> str:
    """The text of a node; empty for none."""
    return "" if node is None or node.text is None else node.text.decode("utf-8", "replace")


def under(node: Node, name: str) -> Node:
    """The part of a node that the grammar calls so; None for none."""
    return node.child_by_field_name(name)


def line(node: Node) -> int:
    """The line, from 1, on which a node begins."""
    return int(node.start_point[0]) + 1


def walk(node: Node) -> Iterator[Node]:
    """A node, and all below it."""
    yield node
    for child in node.named_children:
        yield from walk(child)


@dataclass
class Function:
    """A host function.

    Attributes:
        name, parameters: its name, and (C type, name) of what it takes.
        body, file, returns: where its statements are, in which file, and what it returns.
        defaults: those of its parameters, in Python.
        template: (name, whether it is a type) of the template parameters that its body uses: its Python takes them by name.
        types: the template parameters that are types, and that the types of its arguments tell; and their places.
        node: the whole definition.
        called: its name in C++, without namespaces: of overloads each has a name of its own in Python.
        space: the namespaces and structs in which it stands.
        pointees: the parameters that are pointers to one number, `int* n`, each call of which has `&n`: they are references.
    """

    name: str
    parameters: list[tuple[str, str]]
    body: Node
    file: str
    returns: str = ""
    defaults: dict[str, str] = field(default_factory=dict)
    template: list[tuple[str, bool]] = field(default_factory=list)
    types: dict[str, int] = field(default_factory=dict)
    node: Node = None
    called: str = ""
    space: tuple[str, ...] = ()
    pointees: frozenset[str] = frozenset()

    @property
    def launches(self) -> bool:
        """True if the function has a `<<<>>>`."""
        return any(node.type == "kernel_call_syntax" for node in walk(self.body))

    @property
    def calls(self) -> set[str]:
        """The names of the functions that it calls."""
        found = (under(node, "function") for node in walk(self.body) if node.type == "call_expression")
        return {bare(text(one)) for one in found}

    @property
    def taken(self) -> list[tuple[str, str]]:
        """(C type, name) of the parameters that its Python has: a launch finds its stream by itself."""
        return [(ctype, name) for ctype, name in self.parameters if not is_stream(ctype)]


@dataclass
class Program:
    """Parsed files of an extension.

    Attributes:
        functions: host functions by name.
        constants: the values of constants and of macros that have one, by name, with their places.
        macros: the places of macros that have a launch in them.
        bound: functions that the bindings name, by the name that Python has for them.
        defaults: what declarations and bindings say of the parameters of a function, in order; None for no default.
        broken: the first place of each file from which on it is no C++.
        overloads: the functions of each name, where there are several.
        aliases: what the names of types stand for.
        structs: the definitions of structs that inherit from none.
        enums: the names of each enumeration that has a name.
        taken: (file, line, name) of conditions on a name that nothing defines.
        plain: a kernel that is no template, by which variables of the device are found; empty where there is none.
    """

    functions: dict[str, Function] = field(default_factory=dict)
    constants: dict[str, tuple[str, str]] = field(default_factory=dict)
    macros: dict[str, str] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, list[str | None]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    overloads: dict[str, list[Function]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    structs: dict[str, Node] = field(default_factory=dict)
    enums: dict[str, list[str]] = field(default_factory=dict)
    taken: list[tuple[str, int, str]] = field(default_factory=list)
    plain: str = ""

    def default(self, function: Function, name: str) -> str | None:
        """The Python of a parameter's default; None where it has none."""
        found = function.defaults.get(name)
        return name_of(found) if found in self.constants else found

    def named(self, name: str) -> list[Function]:
        """The functions of a C++ name."""
        return self.overloads.get(name) or ([self.functions[name]] if name in self.functions else [])

    def own(self, spelled: str) -> list[Function]:
        """The functions of the files that a call may mean: not those of a library's namespace that is written."""
        found, written = self.named(bare(spelled)), qualifiers(spelled)
        of_library = written[:1] and written[0] in ("std", "at", "torch", "c10")
        return [one for one in found if not of_library or one.space[-len(written) :] == written]


def is_stream(ctype: str) -> bool:
    """Return True if a C type is that of a stream."""
    return re.search(r"cudaStream_t|CUDAStream", ctype) is not None


def bare(name: str) -> str:
    """A name without namespaces and template arguments."""
    return re.sub(r"<.*>", "", name, flags=re.DOTALL).rpartition("::")[2].strip()


def qualifiers(name: str) -> tuple[str, ...]:
    """The namespaces, or structs, that are written before a name."""
    return tuple(one for one in re.sub(r"<.*?>+(?=::)|<.*", "", name, flags=re.DOTALL).split("::")[:-1] if one)


def _space(node: Node) -> tuple[str, ...]:
    names = _space(node.parent) if node.parent is not None else ()
    inside = node.type in ("namespace_definition", "struct_specifier", "class_specifier")
    return (*names, *[one for one in text(under(node, "name")).split("::") if one]) if inside else names


def _once(found: dict[str, tuple[str, str]], name: str, value: str, place: str) -> None:
    """Record a constant: one that has other values elsewhere has no translation."""
    before = found.setdefault(name, (value, place))[0]
    if before != value and before != f"? {value}":
        found[name] = (f"? {before.removeprefix('? ')}", place)


def _alias(found: Program, name: str, of: str) -> None:
    """Record the alias of a type: one that stands for others elsewhere has no translation."""
    found.aliases[name] = of if found.aliases.get(name, of) == of else "?"


def _struct(found: Program, node: Node) -> None:
    """Record a struct: one whose name others have elsewhere has no translation."""
    name = text(under(node, "name"))
    found.structs[name] = node if text(found.structs.get(name, node)) == text(node) else None


def adding(code: str) -> set[str]:
    """The functions of device code that add by atomics, themselves or through others."""
    bodies: dict[str, set[str]] = {}
    for node in walk(parser().parse(code.encode()).root_node):
        declarator = under(node, "declarator") if node.type == "function_definition" else None
        if declarator is not None:
            name = next((text(one) for one in walk(declarator) if one.type == "identifier"), "")
            bodies[name] = bodies.get(name, set()) | set(re.findall(r"\w+", text(under(node, "body"))))
    found = {name for name, words in bodies.items() if any(re.search(r"[aA]tomic\w*Add", one) for one in words)}
    while more := {name for name, words in bodies.items() if name not in found and words & found}:
        found |= more
    return found


_MARKED = re.compile(r"__global__|__device__")
_BINDING = re.compile(r"PYBIND11_MODULE|TORCH_LIBRARY\w*|PYBIND11_PLUGIN")
_CHECK = re.compile(r"(TORCH|AT|C10)_(?!DISPATCH|LIBRARY|FORALL)[A-Z_]+|CHECK\w*|ASSERT\w*")
_GOES_ON = frozenset(
    (";", ",", ")", "]", "{", ".", "->", ":", "?", "=", "+", "-", "*", "/", "%", "<", ">", "&&", "||", "<<")
)


def read(paths: list[Path], options: tuple[str, ...] = ()) -> Program:
    """The files, in order, then the headers of their own that they include. `options` are `-I` and `-D`."""
    pre = _preprocessed(paths, options)
    found, parse = Program(), parser()
    for name in pre.constants:
        if name not in pre.expanded:
            macro = pre.constants[name]
            found.constants[name] = (macro.body, macro.place)
    given = [path.resolve() for path in paths]
    for path in [*given, *(one for one in pre.texts if one not in given)]:
        root = parse.parse(_terminated(pre.texts[path]).encode()).root_node
        _gather(root, path.name, found)
        if (wrong := _error(root)) is not None:
            found.broken.append(f"{path.name}:{line(wrong)}")
    _gather(parse.parse(_shipped("".join(pre.texts.values())).encode()).root_node, "headers", found)
    for name, values in found.defaults.items():
        for function in found.named(name):
            _give_defaults(function, values)
    _references(found)
    found.taken = list(dict.fromkeys(pre.taken))
    found.macros = {name: one.place for name, one in pre.macros.items() if "<<<" in one.body}
    return found


_VECTOR = re.compile(r"\b(?:make_)?((u?)(char|short|int|long|longlong|float|double)([1-4]))\b")
_GRIDS = """
namespace at { namespace cuda {
int getApplyBlockSize() { return 512; }
dim3 getApplyBlock(int most = 512) { return dim3(most); }
bool getApplyGrid(uint64_t total, dim3& grid, int device, int most = 512) {
  grid = dim3(std::min<uint64_t>((total + most - 1) / most, 2147483647));
  return true;
}
} }
"""


def _shipped(code: str) -> str:
    """C++ of the parts of CUDA's and PyTorch's headers that host code names: vector types, grids of ATen's loops."""
    parts = [_GRIDS] if "getApply" in code else []
    for name, unsigned, element, count in sorted(set(_VECTOR.findall(code))):
        spelled = "unsigned " * bool(unsigned) + element.replace("longlong", "long long")
        members = "xyzw"[: int(count)]
        taken = ", ".join(f"{spelled} {one}" for one in members)
        listed = ", ".join(members)
        parts.append(
            f"struct {name} {{ {spelled} {listed}; }};\n{name} make_{name}({taken}) {{ return {{{listed}}}; }}\n"
        )
    return "".join(parts)


def _references(found: Program) -> None:
    """Take `int* n` for `int& n` where the function has `*n` alone, and each call `&` of a variable."""
    calls: dict[str, list[Node]] = {}
    for one in found.functions.values():
        for call in walk(one.body):
            if call.type == "call_expression":
                given = [each for each in under(call, "arguments").named_children if each.type != "comment"]
                calls.setdefault(bare(text(under(call, "function"))), []).append(given)
    for one in found.functions.values():
        names = set()
        for place, (ctype, name) in enumerate(one.parameters):
            given = [each[place] for each in calls.get(one.called, ()) if place < len(each)]
            uses = [each for each in walk(one.body) if each.type == "identifier" and text(each) == name]
            if (
                re.fullmatch(r"[\w ]+\*", ctype)
                and given
                and all(re.fullmatch(r"&\s*\w+", text(each)) for each in given)
                and all(each.parent.type == "pointer_expression" and text(each.parent)[0] == "*" for each in uses)
            ):
                names.add(name)
        one.parameters = [(ctype.replace("*", "&") if name in names else ctype, name) for ctype, name in one.parameters]
        one.pointees = frozenset(names)


def pointee(node: Node) -> Node:
    """The variable of `*n` and `(*n)`; another node as it is."""
    while (
        node is not None and node.type in ("parenthesized_expression", "pointer_expression") and text(node)[0] in "(*"
    ):
        node = under(node, "argument") or node.named_children[0]
    return node


def _preprocessed(paths: list[Path], options: tuple[str, ...]) -> Preprocessor:
    """Macros that are defined in several ways are found on the way: then the files are gone through once more."""
    expanded: set[str] = set()
    while True:
        pre = Preprocessor([Path(one[2:].strip()) for one in options if one.startswith("-I")], expanded=set(expanded))
        pre.define(options)
        for path in paths:
            pre.file(path)
        if pre.expanded == expanded:
            return pre
        expanded |= pre.expanded


def _error(root: Node) -> Node | None:
    """The first part that is no C++ to the parser; that may be one of the many macros, too."""
    node = root
    while node.has_error and not (node.is_error or node.is_missing):
        node = next((one for one in node.children if one.has_error or one.is_missing), None)
        if node is None:
            return root
    return node if node.is_error or node.is_missing else None


def _terminated(code: str) -> str:
    """The text as C++ without PyTorch's macros reads it: with a `;` behind a check, whose macro brings its own."""
    found = tokens(code)
    parts, at = [], 0
    for index, one in enumerate(found[:-1]):
        if one.kind != "name" or found[index + 1].text != "(" or one.start < at or not _CHECK.fullmatch(one.text):
            continue
        after = closing(found, index + 1, len(found))
        if (
            after < len(found)
            and found[after].text not in _GOES_ON
            and "\n" in code[found[after - 1].end : found[after].start]
        ):
            parts += [code[at : found[after - 1].end], ";"]
            at = found[after - 1].end
    return "".join([*parts, code[at:]])


def _give_defaults(function: Function | None, values: list[str | None]) -> None:
    """Set defaults from a declaration or the bindings, where it lists every parameter and has defaults at the end alone."""
    if function is None or len(values) != len(function.parameters):
        return
    given = [one is not None for one in values]
    if given == sorted(given):
        function.defaults |= {name: one for (_, name), one in zip(function.parameters, values) if one is not None}


_LITERAL = re.compile(r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[fFlLuU]*")
_WORDS = {"true": "True", "false": "False", "True": "True", "False": "False", "None": "None", "nullptr": "None"}
_NOTHING = re.compile(r"(\w+::)*(nullopt|none\(\)|Tensor\(\))|(\w+::)*optional<.*>\(\)|\{\}")


def literal(value: str) -> str | None:
    """The Python of a default value of C++ that is a number, a truth value or nothing; None for any other."""
    value = value.strip()
    if match := _LITERAL.fullmatch(value):
        return match[1]
    return "None" if _NOTHING.fullmatch(value) else _WORDS.get(value)


def _gather(node: Node, file: str, found: Program) -> None:
    for child in node.named_children:
        if child.type == "function_definition":
            _function(child, file, found)
        elif child.type == "enum_specifier":
            _enumeration(child, text(under(child, "name")), file, found)
        elif child.type == "alias_declaration":
            _alias(found, *(text(under(child, part)) for part in ("name", "type")))
        elif child.type == "type_definition" and under(child, "declarator") is not None:
            name, of = (under(child, part) for part in ("declarator", "type"))
            if of.type == "enum_specifier":
                _enumeration(of, text(name), file, found)
            else:
                _alias(found, text(name), text(of))
        elif child.type == "declaration" and "=" in text(child) and _declared(child, found):
            pass
        elif child.type == "declaration" and re.search(r"\bconst(expr)?\b", text(child)):
            _constants(child, file, found)
        elif (
            child.type == "struct_specifier"
            and _static_methods(child, file, found)
            and node.type != "template_declaration"
        ):
            for one in walk(under(child, "body")) if under(child, "body") else ():
                if one.type == "struct_specifier" and under(one, "body") and under(one, "name"):
                    _struct(found, one)
            inherits = any(one.type == "base_class_clause" for one in child.named_children)
            if under(child, "body") is not None and not inherits:
                _struct(found, child)
        elif child.type not in ("class_specifier", "struct_specifier"):
            _gather(child, file, found)


def _static_methods(node: Node, file: str, found: Program) -> bool:
    """Read the functions of a struct that host code may call without one, `Name<T>::function(n)`; True."""
    body = under(node, "body")
    for one in [] if body is None else body.named_children:
        words = {text(inner) for inner in one.named_children if inner.type == "storage_class_specifier"}
        if one.type == "function_definition" and "static" in words:
            _function(one, file, found)
    return True


def _constants(node: Node, file: str, found: Program) -> None:
    """`const int n = 3;`: with a cast to its type, so that it keeps it."""
    ctype = text(under(node, "type"))
    for one in node.children_by_field_name("declarator"):
        if one.type == "init_declarator" and under(one, "declarator").type == "identifier":
            name, value = (text(under(one, part)) for part in ("declarator", "value"))
            cast = value if ctype == "auto" else f"static_cast<{ctype}>({value})"
            _once(found.constants, name, cast, f"{file}:{line(node)}")


def _enumeration(node: Node, name: str, file: str, found: Program) -> None:
    """Each name of an enumeration, as a constant: its value, or one more than that of the name before."""
    value, names = "", list[str]()
    scoped = f"{name}::" if any(one.type in ("class", "struct") for one in node.children) else ""
    listed = under(node, "body")
    for one in [] if listed is None else listed.named_children:
        if one.type == "enumerator":
            given = text(under(one, "value"))
            counted = str(int(value) + 1) if value.isdigit() else f"({value}) + 1" if value else "0"
            value = given or counted
            names.append(scoped + text(under(one, "name")))
            _once(found.constants, names[-1], value, f"{file}:{line(one)}")
    if name and names:
        found.enums.setdefault(name, names)
        found.aliases.setdefault(name, text(under(node, "base")) or "int")


def _function(node: Node, file: str, found: Program) -> None:
    declarator, body = under(node, "declarator"), under(node, "body")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = under(declarator, "declarator") or next(
            (one for one in declarator.named_children if "declarator" in one.type), None
        )
    if declarator is None or body is None:
        return
    name = bare(text(under(declarator, "declarator")))
    head = text(node)[: body.start_byte - node.start_byte]
    if _BINDING.fullmatch(name):
        _bindings(body, found)
    elif "__host__" in head or not _MARKED.search(
        " ".join([head, *(found.constants[one][0] for one in re.findall(r"\w+", head) if one in found.constants)])
    ):
        returns = text(under(node, "type"))
        pointers = under(node, "declarator")
        returns += "*" if pointers.type == "pointer_declarator" else ""
        parameters = [one for one in map(_parameter, under(declarator, "parameters").named_children) if one]
        space = (*_space(node), *qualifiers(text(under(declarator, "declarator"))))
        function = Function(name, parameters, body, file, returns, node=node, called=name, space=space)
        function.template, function.types = _template(node, body, parameters)
        _add(function, found)
        given = under(declarator, "parameters").named_children
        defaults = [text(under(one, "default_value")) for one in given if one.type != "comment"]
        _give_defaults(function, [literal(one) or (one if one in found.constants else None) for one in defaults])


def _add(function: Function, found: Program) -> None:
    """A function among those of its name: one with the parameters of another is that function again."""
    name, others = function.called, found.named(function.called)
    types = [re.sub(r"\bconst\b|\s", "", ctype) for ctype, _ in function.parameters]
    for one in others:
        same = types == [re.sub(r"\bconst\b|\s", "", ctype) for ctype, _ in one.parameters]
        if same and (one.space, text(one.body)) == (function.space, text(function.body)):
            return
    if others:
        found.overloads.setdefault(name, list(others)).append(function)
        function.name = f"{name}_{len(others) + 1}"
        while function.name in found.functions:
            function.name += "_"
    found.functions[function.name] = function


def _template(
    node: Node, body: Node, parameters: list[tuple[str, str]]
) -> tuple[list[tuple[str, bool]], dict[str, int]]:
    """The template parameters of a function.

    Those by which it launches, that stand in its template arguments, are arguments of its Python; types of numbers that it
    computes with are those of a call's arguments.
    """
    holder = node.parent
    if holder is not None and holder.type == "field_declaration_list":  # of a struct
        holder = holder.parent.parent
    if holder is None or holder.type != "template_declaration":
        return [], {}
    used = {
        text(one) for arguments in walk(body) if arguments.type == "template_argument_list" for one in walk(arguments)
    }
    found, types = list[tuple[str, bool]](), dict[str, int]()
    plain = {re.sub(r"\bconst\b|&|\s", "", ctype) for ctype, _ in parameters}
    for one in under(holder, "parameters").named_children:
        names = [text(inner) for inner in walk(one) if inner.type in ("identifier", "type_identifier")]
        is_type = "type_parameter" in one.type
        if is_type and names and names[-1] in plain and names[-1] not in used:
            types[names[-1]] = len(found)
            found.append(("", True))
        elif names and (names[-1] in used or not is_type):
            found.append((names[-1], is_type))
        elif names:
            found.append(("", True))
    return found, types


def _declared(node: Node, found: Program) -> bool:
    """Record the default arguments of a declared function; return False for other declarations."""
    declarator = under(node, "declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    given = under(declarator, "parameters").named_children
    values = [literal(text(under(one, "default_value"))) for one in given if one.type != "comment"]
    if any(values):
        found.defaults.setdefault(bare(text(under(declarator, "declarator"))), values)
    return True


def _parameter(node: Node) -> tuple[str, str] | None:
    declarator = under(node, "declarator")
    if declarator is None:
        return None
    name = next((text(one) for one in walk(declarator) if one.type == "identifier"), "")
    return (text(node)[: declarator.start_byte - node.start_byte] + text(declarator).replace(name, "")).strip(), name


def _bindings(body: Node, found: Program) -> None:
    for node in walk(body):
        if node.type != "call_expression" or not re.search(r"\.(def|impl)$", text(under(node, "function"))):
            continue
        given = under(node, "arguments").named_children
        names = [one for one in given if one.type == "string_literal"]
        target = next((bare(text(one).lstrip("&")) for one in given if one.type != "string_literal"), None)
        if names and target is not None:
            wrapped = re.search(r"(?:TORCH_FN|TORCH_BOX|wrap)\s*\(\s*&?\s*([\w:]+)", text(node))
            name = re.sub(r"\(.*|.*::", "", text(names[0]).strip('"'))
            function = found.bound.setdefault(name, bare(wrapped[1]) if wrapped else target)
            if values := _arguments(given, text(names[0]).strip('"')):
                found.defaults.setdefault(function, values)


def _arguments(given: list[Node], schema: str) -> list[str | None]:
    """The defaults that a binding gives, of each argument in order: `py::arg("n") = 1`, or a schema's `int n=1`."""
    found = [re.search(r'(?:arg\(\s*"\w+"\s*\)|"\w+"_a)\s*(?:=(.*))?$', text(one), re.DOTALL) for one in given]
    values = [literal(one[1] or "") for one in found if one is not None]
    if "(" in schema and not values:
        inside = schema[schema.index("(") + 1 : schema.rfind(")", 0, schema.rfind("->") if "->" in schema else None)]
        values = [literal(one.partition("=")[2]) for one in inside.split(",") if one.strip() and one.strip() != "*"]
    return values if any(values) else []
