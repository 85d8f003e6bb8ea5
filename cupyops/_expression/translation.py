"""Translation of C to PyTorch: a body's syntax tree as the text of a Python function over torch.

Assignments become new names. Both branches of an `if` or `?:` are computed and one is selected; see `functions.guard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .expressions import Expressions
from .syntax import Body
from .values import GIVE, Scope, Value, Variable


class Translation(Expressions):
    """The translation of one body: `lines`, and the `result` of each name that it assigns."""

    def __init__(self, body: Body, given: Mapping[str, str], assigned: Mapping[str, str]) -> None:
        """`given`: C types of the names that have a value, `<name>_0`; `assigned`: of those that are to get one."""
        scope = {name: Variable(ctype, Value(f"{name}_0", ctype)) for name, ctype in given.items()}
        super().__init__(body, scope | {name: Variable(ctype, None) for name, ctype in assigned.items()})
        for statement in body.statements:
            self._statement(statement)
        for name in assigned:
            if self.scope[name].value is None:
                raise body.error(0, f"{name} is not assigned, or not in every case")

    def result(self, name: str) -> str:
        """The expression of an assigned name, a tensor."""
        value = self.scope[name].value
        assert value is not None
        return self._tensor(value).code

    def _statement(self, node: Any) -> None:
        kind = type(node).__name__
        handle: Callable[[Any], None] | None = getattr(self, f"_do_{kind.lower()}", None)
        if handle is None:
            if kind in _LOOPS:
                raise self._error(node, f"a {_LOOPS[kind]} is not translated to PyTorch; {GIVE}")
            raise self._error(node, f"not a statement that does anything here; {_FORMS}")
        handle(node)

    def _do_decl(self, node: Any) -> None:
        names = getattr(getattr(node.type, "type", None), "names", None)
        if type(node.type).__name__ != "TypeDecl" or names is None:
            raise self._error(node, f"a declaration other than of a plain variable is not translated; {GIVE}")
        if node.name in self.scope:
            raise self._error(node, f"{node.name!r} is declared already")
        value = None if node.init is None else self.expression(node.init)
        if names == ["infer"]:
            if value is None:
                raise self._error(node, f"auto {node.name} needs a value")
            ctype = value.ctype
        else:
            ctype = self._ctype(node, names)
        self.scope[node.name] = Variable(ctype, None)
        if value is not None:
            self._assign(node.name, value)

    def _do_assignment(self, node: Any) -> None:
        if type(node.lvalue).__name__ != "ID":
            raise self._error(node, f"assignment to something other than a name is not translated; {GIVE}")
        name = node.lvalue.name
        if name not in self.scope:
            raise self._unknown(node.lvalue)
        value = self.expression(node.rvalue)
        if node.op != "=":
            value = self._binary(node, node.op[:-1], self.expression(node.lvalue), value)
        self._assign(name, value)

    def _do_unaryop(self, node: Any) -> None:
        if node.op not in ("++", "--", "p++", "p--") or type(node.expr).__name__ != "ID":
            raise self._error(node, f"not a statement that does anything here; {_FORMS}")
        one = Value("1", "int", True)
        self._assign(node.expr.name, self._binary(node, node.op[-1], self.expression(node.expr), one))

    def _do_exprlist(self, node: Any) -> None:
        for part in node.exprs:
            self._statement(part)

    def _do_emptystatement(self, node: Any) -> None:
        pass

    def _do_compound(self, node: Any) -> None:
        outside = set(self.scope)
        for statement in node.block_items or []:
            self._statement(statement)
        for name in set(self.scope) - outside:
            del self.scope[name]

    def _do_if(self, node: Any) -> None:
        condition = self._condition(node.cond)
        before = self.scope
        taken = self._branch(condition, node.iftrue, before)
        other = self._branch(self._negated(condition), node.iffalse, before) if node.iffalse is not None else before
        self.scope = {}
        for name, variable in before.items():
            first, second = taken[name].value, other[name].value
            merged = first if first == second else None
            if merged is None and first is not None and second is not None:
                merged = self._keep(name, self._selected(condition, first, second))
            self.scope[name] = Variable(variable.ctype, merged)

    def _branch(self, condition: Value, node: Any, before: Scope) -> Scope:
        """The scope after a branch; what the branch only read is as it was."""
        with self._guarded(condition, node) as guarded:
            entered = dict(self.scope)
            self._do_compound(node) if type(node).__name__ == "Compound" else self._statement(node)
            after = self.scope
        return {
            name: before[name] if name in guarded and after[name] is entered[name] else after[name] for name in before
        }

    def _assign(self, name: str, value: Value) -> None:
        ctype = self.scope[name].ctype
        value = self._converted(value, ctype)
        self.scope[name] = Variable(ctype, value if value.is_literal else self._keep(name, value))


_FORMS = "expected assignments, declarations and if"
_LOOPS = {"For": "for loop", "While": "while loop", "DoWhile": "do loop", "Switch": "switch", "Return": "return"}
