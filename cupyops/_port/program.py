"""A C++ extension's files, parsed: host functions, constants, bindings. The parser is tree-sitter's, of the extra `port`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._kernel.compile.source import strip_comments
from .._kernel.extension.device import closing
from .._kernel.extension.tokens import tokens
from ..errors import MissingDependencyError

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


def text(node: Node | None) -> str:
    """The text of a node; empty for none."""
    return "" if node is None or node.text is None else node.text.decode("utf-8", "replace")


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
    """

    name: str
    parameters: list[tuple[str, str]]
    body: Node
    file: str
    returns: str = ""
    defaults: dict[str, str] = field(default_factory=dict)
    template: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def launches(self) -> bool:
        """Whether it has a `<<<>>>`."""
        return any(node.type == "kernel_call_syntax" for node in walk(self.body))

    @property
    def calls(self) -> set[str]:
        """The names of the functions that it calls."""
        found = (node.child_by_field_name("function") for node in walk(self.body) if node.type == "call_expression")
        return {bare(text(one)) for one in found}

    @property
    def taken(self) -> list[tuple[str, str]]:
        """(C type, name) of the parameters that its Python has: a launch finds its stream by itself."""
        return [(ctype, name) for ctype, name in self.parameters if not is_stream(ctype)]


@dataclass
class Program:
    """What the files of an extension have.

    Attributes:
        functions: host functions by name.
        constants: the values of constants and of macros that have one, by name, with their places.
        macros: macros with parameters: (parameters, what they stand for, place).
        bound: functions that the bindings name, by the name that Python has for them.
        defaults: what declarations and bindings say of the parameters of a function, in order; None for no default.
        broken: the first place of each file from which on it is no C++.
    """

    functions: dict[str, Function] = field(default_factory=dict)
    constants: dict[str, tuple[str, str]] = field(default_factory=dict)
    macros: dict[str, tuple[list[str], str, str]] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, list[str | None]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def is_stream(ctype: str) -> bool:
    """Whether a C type is that of a stream."""
    return re.search(r"cudaStream_t|CUDAStream", ctype) is not None


def bare(name: str) -> str:
    """A name without namespaces and template arguments."""
    return re.sub(r"<.*>", "", name, flags=re.DOTALL).rpartition("::")[2].strip()


def adding(code: str) -> set[str]:
    """The functions of device code that add by atomics, themselves or through others."""
    bodies: dict[str, set[str]] = {}
    for node in walk(parser().parse(code.encode()).root_node):
        declarator = node.child_by_field_name("declarator") if node.type == "function_definition" else None
        if declarator is not None:
            name = next((text(one) for one in walk(declarator) if one.type == "identifier"), "")
            bodies[name] = bodies.get(name, set()) | set(re.findall(r"\w+", text(node.child_by_field_name("body"))))
    found = {name for name, words in bodies.items() if any(re.search(r"[aA]tomic\w*Add", one) for one in words)}
    while more := {name for name, words in bodies.items() if name not in found and words & found}:
        found |= more
    return found


_MARKED = re.compile(r"__global__|__device__")
_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_BINDING = re.compile(r"PYBIND11_MODULE|TORCH_LIBRARY\w*|PYBIND11_PLUGIN")
_CHECK = re.compile(r"(TORCH|AT|C10)_(?!DISPATCH|LIBRARY|FORALL)[A-Z_]+|CHECK\w*|ASSERT\w*")
_DEFINES_KERNEL = re.compile(r"#\s*define\s+(\w+)\(.*\b__global__\b", re.DOTALL)
_GOES_ON = frozenset(
    (";", ",", ")", "]", "{", ".", "->", ":", "?", "=", "+", "-", "*", "/", "%", "<", ">", "&&", "||", "<<")
)


def read(paths: list[Path]) -> Program:
    """The files, in order, then the headers of their own that they include."""
    found, parse = Program(), parser()
    pending, seen = list(paths), {path.resolve() for path in paths}
    while pending:
        path = pending.pop(0)
        content = _terminated(path.read_bytes().decode("utf-8-sig", "replace"))
        root = parse.parse(content.encode()).root_node
        _gather(root, path.name, found)
        if (wrong := _error(root)) is not None:
            found.broken.append(f"{path.name}:{line(wrong)}")
        for spelled in _QUOTED.findall(content):
            folders = (path.parent, path.parent / "include", path.parent.parent / "include", path.parent.parent)
            header = next((one / spelled for one in folders if (one / spelled).is_file()), None)
            if header is not None and header.resolve() not in seen:
                seen.add(header.resolve())
                pending.append(header)
    for name, values in found.defaults.items():
        _give_defaults(found.functions.get(name), values)
    return found


def _error(root: Node) -> Node | None:
    """The first part that is no C++ to the parser; that may be one of the many macros, too."""
    node = root
    while node.has_error and not (node.is_error or node.is_missing):
        node = next((one for one in node.children if one.has_error or one.is_missing), None)
        if node is None:
            return root
    return node if node.is_error or node.is_missing else None


def _terminated(code: str) -> str:
    """The text as C++ without its preprocessor reads it.

    Behind a check without a `;`, as its macro brings one of its own, there is one; macros that define kernels are blank.
    """
    every = tokens(code)
    found = [one for one in every if one.kind != "directive"]
    kernels = {match[1] for one in every if one.kind == "directive" and (match := _DEFINES_KERNEL.match(one.text))}
    parts, at = [], 0
    for index, one in enumerate(found[:-1]):
        if one.kind != "name" or found[index + 1].text != "(" or one.start < at:
            continue
        if one.text in kernels:
            end = found[closing(found, index + 1, len(found)) - 1].end
            parts += [code[at : one.start], re.sub(r"[^\r\n]", " ", code[one.start : end])]
            at = end
        if not _CHECK.fullmatch(one.text):
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
    """Those of a declaration or of the bindings, where they are as many as the parameters, and the last of them."""
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
        elif child.type == "preproc_def":
            name, value = text(child.child_by_field_name("name")), _value(child)
            if value:
                found.constants.setdefault(name, (value, f"{file}:{line(child)}"))
        elif child.type == "preproc_function_def":
            parameters = [text(one) for one in child.child_by_field_name("parameters").named_children]
            name = text(child.child_by_field_name("name"))
            found.macros.setdefault(name, (parameters, _value(child), f"{file}:{line(child)}"))
        elif child.type == "enumerator_list":
            _enumerators(child, file, found)
        elif child.type == "declaration" and "=" in text(child) and _declared(child, found):
            pass
        elif child.type == "declaration" and re.search(r"\bconst(expr)?\b", text(child)):
            for one in child.children_by_field_name("declarator"):
                if one.type == "init_declarator" and one.child_by_field_name("declarator").type == "identifier":
                    name, value = (text(one.child_by_field_name(part)) for part in ("declarator", "value"))
                    found.constants.setdefault(name, (value, f"{file}:{line(child)}"))
        elif child.type not in ("class_specifier", "struct_specifier"):
            _gather(child, file, found)


def _value(node: Node) -> str:
    """What a macro stands for, without comments."""
    return strip_comments(text(node.child_by_field_name("value"))).strip()


def _enumerators(node: Node, file: str, found: Program) -> None:
    """Each name of an enumeration, as a constant: its value, or one more than that of the name before."""
    value = ""
    for one in node.named_children:
        if one.type == "enumerator":
            given = text(one.child_by_field_name("value"))
            counted = str(int(value) + 1) if value.isdigit() else f"({value}) + 1" if value else "0"
            value = given or counted
            found.constants.setdefault(text(one.child_by_field_name("name")), (value, f"{file}:{line(one)}"))


def _function(node: Node, file: str, found: Program) -> None:
    declarator, body = node.child_by_field_name("declarator"), node.child_by_field_name("body")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator") or next(
            (one for one in declarator.named_children if "declarator" in one.type), None
        )
    if declarator is None or body is None:
        return
    name = bare(text(declarator.child_by_field_name("declarator")))
    head = text(node)[: body.start_byte - node.start_byte]
    if _BINDING.fullmatch(name):
        _bindings(body, found)
    elif "__host__" in head or not _MARKED.search(
        " ".join([head, *(found.constants[one][0] for one in re.findall(r"\w+", head) if one in found.constants)])
    ):
        returns = text(node.child_by_field_name("type"))
        parameters = [
            one for one in map(_parameter, declarator.child_by_field_name("parameters").named_children) if one
        ]
        function = found.functions.setdefault(
            name, Function(name, parameters, body, file, returns, template=_template(node, body))
        )
        given = declarator.child_by_field_name("parameters").named_children
        _give_defaults(
            function,
            [literal(text(one.child_by_field_name("default_value"))) for one in given if one.type != "comment"],
        )


def _template(node: Node, body: Node) -> list[tuple[str, bool]]:
    """The template parameters of a function that launches by them: those that stand in its template arguments."""
    if node.parent is None or node.parent.type != "template_declaration":
        return []
    used = {
        text(one) for arguments in walk(body) if arguments.type == "template_argument_list" for one in walk(arguments)
    }
    found = []
    for one in node.parent.child_by_field_name("parameters").named_children:
        names = [text(inner) for inner in walk(one) if inner.type in ("identifier", "type_identifier")]
        if names and names[-1] in used:
            found.append((names[-1], "type_parameter" in one.type))
        elif names:
            found.append(("", True))
    return found


def _declared(node: Node, found: Program) -> bool:
    """Whether it declares a function; its default arguments."""
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    given = declarator.child_by_field_name("parameters").named_children
    values = [literal(text(one.child_by_field_name("default_value"))) for one in given if one.type != "comment"]
    if any(values):
        found.defaults.setdefault(bare(text(declarator.child_by_field_name("declarator"))), values)
    return True


def _parameter(node: Node) -> tuple[str, str] | None:
    declarator = node.child_by_field_name("declarator")
    if declarator is None:
        return None
    name = next((text(one) for one in walk(declarator) if one.type == "identifier"), "")
    return (text(node)[: declarator.start_byte - node.start_byte] + text(declarator).replace(name, "")).strip(), name


def _bindings(body: Node, found: Program) -> None:
    for node in walk(body):
        if node.type != "call_expression" or not re.search(
            r"\.(def|impl)$", text(node.child_by_field_name("function"))
        ):
            continue
        given = node.child_by_field_name("arguments").named_children
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
