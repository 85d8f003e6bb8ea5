"""Data flow of a host function: names that kernels read and write, and as which C types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .launches import Kernel
from .program import Function, Node, Program, bare, text, under, walk
from .vocabulary import DTYPES, dispatched, kind_of_type


@dataclass
class Use:
    """Use of a tensor by kernels: the C type of its elements, empty where it is not known, and whether they write."""

    element: str = ""
    written: bool = False

    @property
    def is_integer(self) -> bool:
        """True if its elements are integers or bools, which have no gradient."""
        return self.element in DTYPES and "float" not in DTYPES[self.element]

    @property
    def alignment(self) -> int:
        """Bytes read at once where elements are of a vector type, as `float4`; else 1."""
        match = re.fullmatch(r"(?:__)?([a-z_]+?)(?:16)?([248])", self.element)
        return 1 if match is None else min(16, _BYTES.get(match[1], 0) * int(match[2])) or 1


_BYTES = {"char": 1, "uchar": 1, "short": 2, "ushort": 2, "half": 2, "nv_bfloat": 2, "int": 4, "uint": 4, "float": 4}
_BYTES |= {"double": 8, "longlong": 8, "ulonglong": 8, "long": 8, "ulong": 8}


def launched(functions: Sequence[Function], program: Program) -> set[str]:
    """The names of the kernels that functions launch, themselves or through others."""
    nodes = (node for function in _reachable(functions, program) for node in walk(function.body))
    return {
        bare(text(node.parent).partition("<<<")[0])
        for node in nodes
        if node.type == "kernel_call_syntax" and node.parent is not None
    }


def dispatched_dtypes(functions: Sequence[Function], program: Program) -> list[str]:
    """The dtypes that each dispatch takes which functions reach, themselves or through others; none where there is none."""
    found: list[str] | None = None
    for function in _reachable(functions, program):
        for node in walk(function.body):
            if node.type == "call_expression" and "DISPATCH" in (name := text(under(node, "function"))):
                before = text(under(node, "arguments")).partition('"')[0].lstrip("( ").rstrip(", \n")
                dtypes = dispatched(name, before.rpartition(",")[0])
                if dtypes and not any("int" in one for one in dtypes):
                    found = dtypes if found is None else [one for one in found if one in dtypes]
    return found or []


def _reachable(functions: Sequence[Function], program: Program) -> Iterator[Function]:
    """Functions, and those that they call."""
    pending, seen = list(functions), set()
    while pending:
        function = pending.pop()
        if function.name not in seen:
            seen.add(function.name)
            yield function
            pending += [called for one in function.calls for called in program.named(one)]


def uses(
    function: Function, program: Program, kernels: Mapping[str, Kernel], within: frozenset[str] = frozenset()
) -> dict[str, Use]:
    """Return the use that kernels make of each name inside the function that reaches one."""
    found: dict[str, Use] = {}
    aliases = _aliases(function.body)
    for node in walk(function.body):
        if node.type != "call_expression":
            continue
        given = [one for one in under(node, "arguments").named_children if one.type != "comment"]
        for argument, use in zip(given, _of_call(node, program, kernels, within | {function.name})):
            name = _root(argument, aliases)
            if use is not None and name:
                one = found.setdefault(name, Use())
                one.element, one.written = one.element or use.element, one.written or use.written
    return found


def _of_call(node: Node, program: Program, kernels: Mapping[str, Kernel], within: frozenset[str]) -> list[Use | None]:
    """Return the use of each argument of a call; None for one that is no tensor."""
    called = text(under(node, "function"))
    name = bare(called.partition("<<<")[0])
    if any(one.type == "kernel_call_syntax" for one in walk(under(node, "function"))) or any(
        one.type == "kernel_call_syntax" for one in node.named_children
    ):
        return [_of_type(ctype) for ctype in kernels[name].types] if name in kernels else []
    given = len(under(node, "arguments").named_children)
    function = next((one for one in program.named(name) if len(one.parameters) >= given), None)
    if function is None or function.name in within:
        return []
    inner = uses(function, program, kernels, within)
    return [inner.get(one) if kind_of_type(ctype) == "tensor" else None for ctype, one in function.parameters]


def _of_type(ctype: str) -> Use | None:
    """`const float*`, `PackedTensorAccessor32<int64_t, 2>`: a kernel writes where it is not const."""
    if "Accessor" in ctype:
        element = ctype.partition("<")[2].partition(",")[0].strip()
        return Use(element, not ctype.lstrip().startswith("const"))
    if ctype.count("*") != 1:
        return None
    before = ctype.partition("*")[0]
    element = re.sub(r"\b(const|volatile|__restrict__)\b", " ", before).strip()
    return Use(element, re.search(r"\bconst\b", before) is None)


def _aliases(body: Node) -> dict[str, str]:
    """`auto p = x.data_ptr<float>()`: of each name that stands for a tensor's memory, the tensor."""
    found: dict[str, str] = {}
    for node in walk(body):
        if node.type == "init_declarator" and re.search(
            r"(data|data_ptr|accessor\w*)\s*(<[^;]*>)?\s*\(\)", text(under(node, "value"))
        ):
            declarator = under(node, "declarator")
            name = next((text(one) for one in walk(declarator) if one.type == "identifier"), "")
            found[name] = _root(under(node, "value"), found)
    return found


def _root(node: Node, aliases: Mapping[str, str]) -> str:
    """The tensor whose memory an argument is: the name with which the expression begins, past casts and templates."""
    inner = node
    while True:
        if inner.type == "identifier":
            return aliases.get(text(inner), text(inner))
        field = {
            "call_expression": "function",
            "field_expression": "argument",
            "cast_expression": "value",
            "pointer_expression": "argument",
            "subscript_expression": "argument",
            "binary_expression": "left",
        }.get(inner.type)
        if inner.type == "call_expression" and re.match(
            r"(reinterpret|static|const)_cast\b", text(under(inner, "function"))
        ):
            following = next(iter(under(inner, "arguments").named_children), None)
        elif inner.type in ("parenthesized_expression", "template_function"):
            following = next(iter(inner.named_children), None)
        else:
            following = None if field is None else under(inner, field)
        if following is None:
            return ""
        inner = following
