"""Scope of a function: its variables, block by block, and which tokens of the C++ are accounted for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from .program import Function, Node, Program, line, text, under, walk
from .values import Type, Value
from .vocabulary import name_of


class NotTranslated(Exception):
    """An expression that has no translation here: why, and its line."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.line, self.why = line(node), why


@dataclass
class Variable:
    """A name of C++: the value that it has in Python, and what it stands for.

    Attributes:
        value: its Python, its type, and the range that it keeps.
        name: its name in Python.
        kernel: the expression of the kernel that it stands for.
        fixed: whether it keeps the value with which it is declared.
    """

    value: Value
    name: str = ""
    kernel: Node | None = None
    fixed: bool = False


@dataclass
class Scope:
    """Names known inside a function.

    Attributes:
        program: the files.
        frames: the variables of each block that is open, by their C++ names.
        types: what type names stand for: template parameters, aliases.
        notes: what a reader is to check about the statement under way.
        used: constants of the files that the Python needs.
        before: lines of Python that the statement under way needs before it.
        written: names that a call of the statement under way writes to, by reference.
        writer: that call, in Python, which gives its result and what it has written.
        changed: names that are assigned to after their declaration, anywhere in the function.
        request: gives the Python name of a function that is called, for the types of its template.
        file, space: where the function stands: its file, its namespaces.
        inner: writes a lambda before the statement under way, and gives its name.
        changes: the number of assignments inside of expressions.
    """

    program: Program
    frames: list[dict[str, Variable]] = field(default_factory=lambda: [{}])
    types: dict[str, Type] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    before: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    writer: str = ""
    changed: frozenset[str] = frozenset()
    request: Callable[[Function, Mapping[str, Type]], str] = lambda function, types: name_of(function.name)
    file: str = ""
    space: tuple[str, ...] = ()
    inner: Callable[[Node], Value] | None = None
    changes: int = 0
    _done: set[int] = field(default_factory=set)
    _names: set[str] = field(default_factory=set)

    def note(self, what: str) -> None:
        """Note something that a reader is to check."""
        if what not in self.notes:
            self.notes.append(what)

    def taken(self, code: str, node: Node) -> list[str]:
        """The names that the statement under way sets besides. Raises `NotTranslated` where `code` is more than the call."""
        written, self.written = self.written, []
        if written and code != self.writer:
            raise NotTranslated(node, f"{text(node)[:60]!r}: a number that is written to by reference here")
        return written

    def done(self, value: Value, node: Node) -> Value:
        """Result of a call that writes to its arguments, made before the statement under way; other values as they are."""
        if not self.written:
            return value
        code = f"{', '.join(self.taken(value.code, node))} = {value.code}"
        found = self.declare("result ", value.type)
        self.before.append(f"{found.name}, {code}")
        return found.value

    # --- names ---

    def find(self, name: str) -> Variable | None:
        """The variable of a C++ name, the innermost one."""
        return next((frame[name] for frame in reversed(self.frames) if name in frame), None)

    def declare(self, name: str, kind: Type, value: Value | None = None, *, fixed: bool = False) -> Variable:
        """A new variable: one that hides another has a name of its own in Python; `name ` is one of the Python alone."""
        while name.endswith(" ") and name in self.frames[-1]:
            name += " "
        spelled = plain = name_of(name.strip())
        visible = {one.name for frame in self.frames for one in frame.values()}
        visible |= (
            {name_of(one) for one in (*self.program.constants, *self.program.functions)}
            if len(self.frames) > 1
            else set()
        )
        count = 0
        while spelled in visible:
            count += 1
            spelled = f"{plain}_{count}"
        is_fixed = fixed or name not in self.changed
        if value is not None and kind.is_integer and is_fixed:
            made = Value(
                spelled, kind, low=max(value.low, kind.low), high=min(value.high, kind.high), sized=value.sized
            )
        else:
            made = Value(spelled, kind, low=kind.low, high=kind.high) if kind.is_integer else Value(spelled, kind)
        if value is not None and kind.kind in ("pointer", "dtype", "cursor"):
            made = Value(spelled, kind, element=value.element)
        if kind.kind == "options":
            made = Value(spelled, kind, options={"**": spelled})
        found = self.frames[-1][name] = Variable(made, spelled, fixed=is_fixed)
        return found

    # --- tokens ---

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Translate a text of its own inside, whose tokens are not those of the function."""
        done, self._done = self._done, set()
        try:
            yield
        finally:
            self._done = done

    def read(self, node: Node | None) -> None:
        """All tokens below a node are accounted for."""
        if node is not None:
            self._done |= {one.start_byte for one in leaves(node)}

    def is_read(self, node: Node) -> bool:
        """Return True if every token below a node is accounted for."""
        return all(one.start_byte in self._done or one.type in _WITHOUT_MEANING for one in leaves(node))

    def account(self, node: Node) -> None:
        """A node has been translated: each part of it, or `NotTranslated` of the first that nothing has read."""
        for child in node.children:
            if child.type == "comment" or self.is_read(child):
                continue
            if not child.is_named and (node.type, child.type) not in OPERATORS and node.type not in OF_OPERATORS:
                continue  # a bracket, a comma, a keyword: what handles this type of node has its meaning
            raise NotTranslated(child, f"{text(child)[:60]!r} in {' '.join(text(node).split())[:60]!r}")
        self.read(node)


# nodes whose tokens without a name say what is computed
OF_OPERATORS = frozenset(("binary_expression", "unary_expression", "assignment_expression", "update_expression",
                          "pointer_expression", "fold_expression"))  # fmt: skip
_WITHOUT_MEANING = frozenset(("comment", "(", ")", "{", "}", "[", "]", ",", ";"))
OPERATORS = frozenset((("for_statement", "..."), ("lambda_capture_specifier", "=")))


def leaves(node: Node) -> list[Node]:
    """The tokens below a node, in order; a comment is one."""
    if not node.children:
        return [node] if node.end_byte > node.start_byte else []
    return [leaf for child in node.children for leaf in leaves(child)]


def changed(body: Node) -> frozenset[str]:
    """The names that something below a node assigns to, or that it hands on so that they may be."""
    found = set()
    for node in walk(body):
        target = None
        if node.type == "assignment_expression":
            target = under(node, "left")
        elif node.type == "update_expression" or (node.type == "pointer_expression" and text(node).startswith("&")):
            target = under(node, "argument")
        elif node.type == "call_expression" and text(under(node, "function")).endswith("_back"):
            target = under(node, "function")  # a vector that grows
        while target is not None and target.type in (
            "subscript_expression",
            "field_expression",
            "parenthesized_expression",
            "pointer_expression",
        ):
            target = under(target, "argument") or next(iter(target.named_children), None)
        if target is not None:
            found.add(text(target))
        if node.type == "reference_declarator" and node.parent is not None and node.parent.type == "init_declarator":
            value = under(node.parent, "value")
            found.add(text(value))
        if node.type == "call_expression":  # a function of the files may take a reference
            given = under(node, "arguments")
            found |= {text(it) for it in given.named_children if it.type == "identifier"} if _is_plain(node) else set()
    return frozenset(found)


def _is_plain(node: Node) -> bool:
    return under(node, "function").type in ("identifier", "qualified_identifier", "template_function") and not any(
        one.type == "kernel_call_syntax" for one in walk(under(node, "function"))
    )
