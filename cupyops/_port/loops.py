"""Loops and switches: as Python's own where they mean the same, else in the exact form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from . import values
from .expressions import assigned, children, condition, ctype, python
from .program import Node, text, under, walk
from .scope import NotTranslated, Scope, changed
from .values import INT, Type, Value


class Writer(Protocol):
    """Methods of a function's writer that a loop uses."""

    scope: Scope
    depth: int
    loops: list[Loop]

    def put(self, code: str, node: Node) -> None: ...

    def block(self, nodes: Sequence[Node]) -> None: ...

    def statement(self, node: Node) -> None: ...

    def inside(self, node: Node) -> None: ...

    def effect(self, node: Node) -> None: ...

    def asked(self, clause: Node, once: bool = False, read: Callable[[Node, Scope], Value] = condition) -> Value: ...


@dataclass
class Loop:
    """A loop that is under way: what it does before it begins anew, and whether it is a switch inside of it, or of none."""

    repeat: Callable[[Writer], None] | None
    is_switch: bool = False


def _body(writer: Writer, node: Node, loop: Loop, after: Callable[[], None] | None = None) -> None:
    """The body of a loop, and what follows it each time."""
    writer.loops.append(loop)
    writer.inside(node)
    writer.loops.pop()
    if after is not None:
        writer.depth += 1
        after()
        writer.depth -= 1


def for_statement(writer: Writer, node: Node) -> None:
    """`for (int i = 0; i < n; ++i)` is a range where neither `i` nor `n` changes inside; any other is a `while`."""
    begin, until, update = (under(node, one) for one in ("initializer", "condition", "update"))
    body = under(node, "body")
    writer.scope.frames.append({})
    if not _write_range(writer, begin, until, update, body, node):
        if begin is not None:
            writer.statement(begin) if begin.type == "declaration" else writer.effect(begin)
            writer.scope.read(begin)
        test = condition(until, writer.scope) if until is not None else Value("True", values.BOOL)

        def again(writer: Writer) -> None:
            if update is not None:
                writer.effect(update)

        writer.put(f"while {test.code}:", node)
        _body(writer, body, Loop(again), lambda: again(writer))
    writer.scope.frames.pop()
    writer.scope.read(node)


def _write_range(
    writer: Writer, begin: Node | None, until: Node | None, update: Node | None, body: Node, node: Node
) -> bool:
    """Write a loop that counts as a range, whose limits are taken once; return False for other loops."""
    scope = writer.scope
    if begin is None or until is None or update is None:
        return False
    if begin.type != "declaration" or until.type != "binary_expression":
        return False
    declared = begin.children_by_field_name("declarator")
    is_auto = under(begin, "type").type == "placeholder_type_specifier"
    if len(declared) != 1 or declared[0].type != "init_declarator" or is_auto:
        return False
    name = text(under(declared[0], "declarator"))
    sign, left, right = (text(under(until, "operator")), under(until, "left"), under(until, "right"))
    step = _step(writer, update, name)
    limits = {text(one) for one in walk(right) if one.type in ("identifier", "field_identifier")}
    inside = changed(body)
    calls = any(one.type == "call_expression" for one in walk(right))
    if text(left) != name or step is None or name in limits or (inside & ({name} | limits)):
        return False
    effects = any(one.type in ("call_expression", "assignment_expression") for one in walk(body))
    if calls and effects and not _is_size(right):
        return False
    named = (scope.find(text(one)) for one in walk(body) if one.type == "identifier")
    if any(one is not None and one.value.type.kind == "function" for one in named):
        return False  # a lambda, which may change what it captures
    up = sign in ("<", "<=")
    if sign not in ("<", "<=", ">", ">=") or (step > 0) != up:
        return False
    kind = ctype(under(begin, "type"), scope)
    if not kind.is_integer:
        return False
    first_value = under(declared[0], "value")
    if first_value.type == "initializer_list":  # `int i{0}`
        if len(children(first_value)) != 1:
            return False
        first_value = children(first_value)[0]
    start = assigned(python(first_value, scope), kind, node)
    end = python(right, scope)
    if not end.type.is_integer:
        return False
    to = values.common(values.promoted(start).type, values.promoted(end).type)
    if not to.signed and (start.low < 0 or end.low < 0 or not up):
        return False  # compared as unsigned numbers
    if sign in ("<=", ">="):
        end = values.computed("+" if up else "-", _wider(end), values.number(1, INT, "1"))
    low, high = (start.low, max(end.high - 1, start.low)) if up else (end.low + 1, start.high)
    found = scope.declare(name, kind, Value("", kind, low=low, high=high, sized=start.sized), fixed=True)
    first = "" if start.code == "0" and step == 1 else f"{start.code}, "
    by = "" if step == 1 else f", {step}"
    writer.put(f"for {found.value.code} in range({first}{end.code}{by}):", node)
    for one in (begin, until, update):
        scope.read(one)
    _body(writer, body, Loop(lambda _: None))
    return True


def _wider(value: Value) -> Value:
    """An integer with room for one more."""
    return replace(value, type=Type("int", 64)) if value.type.bits < 64 and value.type.signed else value


def _is_size(node: Node) -> bool:
    """Return True if the calls in a limit are of sizes of tensors, which what a loop computes does not change."""
    found = [text(under(one, "function")).rpartition(".")[2] for one in walk(node) if one.type == "call_expression"]
    return all(one in ("size", "numel", "dim") for one in found)


def _step(writer: Writer, update: Node, name: str) -> int | None:
    """Step by which the update counts; None where it does something else."""
    if update.type == "update_expression" and text(under(update, "argument")) == name:
        return 1 if text(under(update, "operator")) == "++" else -1
    if update.type == "assignment_expression" and text(under(update, "left")) == name:
        sign, right = text(under(update, "operator")), text(under(update, "right"))
        if sign in ("+=", "-=") and right.isdigit() and int(right):
            return int(right) if sign == "+=" else -int(right)
    return None


def for_range_loop(writer: Writer, node: Node) -> None:
    """`for (auto& x : tensors)`."""
    names = [text(one) for one in walk(under(node, "declarator")) if one.type == "identifier"]
    body = under(node, "body")
    value = python(under(node, "right"), writer.scope)
    if value.type.kind != "list" or not value.type.of or len(names) != 1:
        raise NotTranslated(node, f"a loop over a {value.type}: {text(node)[:60]!r}")
    by_reference = any(one.type == "reference_declarator" for one in walk(node)) and "const" not in text(node)[:40]
    if by_reference and names[0] in changed(body):
        raise NotTranslated(node, f"a loop that writes to what it goes over: {text(node)[:60]!r}")
    for one in node.named_children:
        if one.type != "compound_statement" and one.id != body.id:
            writer.scope.read(one)
    writer.scope.frames.append({})
    found = writer.scope.declare(names[0], value.type.of[0])
    writer.put(f"for {found.value.code} in {value.code}:", node)
    _body(writer, body, Loop(lambda _: None))
    writer.scope.frames.pop()
    writer.scope.read(node)


def while_statement(writer: Writer, node: Node) -> None:
    """`while (test)`."""
    test = writer.asked(under(node, "condition"))
    writer.put(f"while {test.code}:", node)
    _body(writer, under(node, "body"), Loop(lambda _: None))
    writer.scope.read(node)


def do_statement(writer: Writer, node: Node) -> None:
    """`do ... while (test);`, of which that of a macro, `while (0)`, runs once."""
    body, clause = under(node, "body"), under(node, "condition")
    if text(clause).strip("() ") in ("0", "false") and not any(
        one.type in ("break_statement", "continue_statement") for one in walk(body)
    ):
        writer.statement(body)
        writer.scope.read(node)
        return

    def again(writer: Writer) -> None:
        test = values.truth(condition(clause, writer.scope))
        writer.put(f"if not {test.at(values.NOT)}:", clause)
        writer.depth += 1
        writer.put("break", clause)
        writer.depth -= 1

    writer.put("while True:", node)
    _body(writer, body, Loop(again), lambda: again(writer))
    writer.scope.read(node)


_LEAVES = ("break_statement", "return_statement", "throw_statement", "continue_statement")


def switch_statement(writer: Writer, node: Node) -> None:
    """A switch as conditions; a case that goes on into the next has that one's statements, too."""
    asked = writer.asked(under(node, "condition"), once=True, read=python)
    if not asked.type.is_integer and asked.type.kind != "dtype":
        raise NotTranslated(node, f"a switch over a {asked.type}: {text(node)[:60]!r}")
    body = under(node, "body")
    code = asked.code
    cases = [one for one in children(body) if one.type == "case_statement"]
    if len(cases) != len(children(body)):
        raise NotTranslated(node, f"a switch with more than cases: {text(node)[:60]!r}")
    if asked.binds < values.ATOM or "(" in code:
        spelled = writer.scope.declare("chosen ", asked.type).value.code
        writer.put(f"{spelled} = {code}", node)
        code = spelled
    writer.loops.append(Loop(writer.loops[-1].repeat if writer.loops else None, is_switch=True))
    word = "if"
    pending: list[Node] = []
    default: int | None = None
    for index, case in enumerate(cases):
        value = under(case, "value")
        if value is None:
            default = index
            pending = []  # what falls into the default takes it anyway
            continue
        pending.append(value)
        if not _statements(case):
            continue
        tests = [python(one, writer.scope).code for one in pending]
        test = f"{code} == {tests[0]}" if len(tests) == 1 else f"{code} in ({', '.join(tests)})"
        writer.put(f"{word} {test}:", case)
        _case(writer, cases, index)
        word, pending = "elif", []
    if default is not None:  # wherever it stands
        if pending:
            raise NotTranslated(pending[0], f"a case of nothing: {text(pending[0])[:60]!r}")
        writer.put("if True:" if word == "if" else "else:", cases[default])
        _case(writer, cases, default)
    for one in cases:
        if (value := under(one, "value")) is not None and not writer.scope.is_read(value):
            python(value, writer.scope)
        writer.scope.read(one)
    writer.loops.pop()
    writer.scope.read(node)


def _statements(case: Node) -> list[Node]:
    value = under(case, "value")
    return [one for one in children(case) if value is None or one.id != value.id]


def _case(writer: Writer, cases: Sequence[Node], index: int) -> None:
    """The statements from a case on, up to its break."""
    found: list[Node] = []
    for case in cases[index:]:
        statements = _statements(case)
        if len(statements) == 1 and statements[0].type == "compound_statement":
            statements = children(statements[0])
        found += statements
        if statements and _ends(statements[-1]):
            break
    if found and found[-1].type == "break_statement":
        writer.scope.read(found.pop())
    writer.depth += 1
    writer.block(found)
    writer.depth -= 1


def _ends(node: Node) -> bool:
    """Return True if control never passes the end of a statement."""
    if node.type == "compound_statement":
        inner = children(node)
        return bool(inner) and _ends(inner[-1])
    if node.type == "if_statement":
        other = under(node, "alternative")
        return other is not None and _ends(under(node, "consequence")) and _ends(children(other)[-1])
    return node.type in _LEAVES
