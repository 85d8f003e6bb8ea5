"""Expressions of C as expressions of Python over torch. Every value has its C type, and conversions are written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import InputError
from . import functions
from .syntax import CONSTANTS, Body, is_floating
from .values import (
    ANY_TWO,
    DTYPES,
    FLOATING_TWO,
    FORMS,
    GIVE,
    KNOWN,
    RANK,
    SPELLED,
    TRUTH,
    Scope,
    Value,
    Variable,
    literal,
)


class Expressions:
    """The expressions of one body, in the scope of the moment. `lines` are the statements of the Python function so far."""

    def __init__(self, body: Body, scope: Scope) -> None:
        self.body, self.scope = body, scope
        self.lines: list[str] = []
        self._count = 0

    def expression(self, node: Any) -> Value:
        kind = type(node).__name__
        handle: Callable[[Any], Value] | None = getattr(self, f"_of_{kind.lower()}", None)
        if handle is None:
            raise self._error(node, f"an expression of this kind is not translated to PyTorch; {GIVE}")
        return handle(node)

    def _of_constant(self, node: Any) -> Value:
        text = node.value
        if node.type in ("string", "char"):
            raise self._error(node, f"{text} is no number")
        if is_floating(text):
            return literal(float(text.rstrip("lL")), "A")
        if text.lower().endswith("u") or "u" in text.lower()[-3:]:
            raise self._error(node, f"unsigned numbers are not translated to PyTorch; {GIVE}")
        digits = text.rstrip("lL")
        octal = len(digits) > 1 and digits.isdigit() and digits.startswith("0")
        value = int(digits, 8 if octal else 0)
        return Value(str(value), "int" if digits == text and value < 2**31 else "long long", True)

    def _of_id(self, node: Any) -> Value:
        if node.name in self.scope:
            value = self.scope[node.name].value
            if value is None:
                raise self._error(node, f"{node.name!r} is read before it is assigned in every case")
            return value
        if node.name in CONSTANTS:
            return literal(CONSTANTS[node.name], "A")
        if node.name in ("true", "false"):
            return Value(node.name.capitalize(), "bool", True)
        raise self._unknown(node)

    def _of_cast(self, node: Any) -> Value:
        declared = node.to_type.type
        names = getattr(getattr(declared, "type", None), "names", None)
        if names is None:
            raise self._error(node, f"a cast to a pointer is not translated to PyTorch; {GIVE}")
        return self._converted(self.expression(node.expr), self._ctype(node, names))

    def _of_unaryop(self, node: Any) -> Value:
        if node.op not in ("-", "+", "!", "~"):
            raise self._error(node, f"{node.op!r} inside an expression is not translated to PyTorch; {GIVE}")
        value = self.expression(node.expr)
        if node.op == "!":
            return self._negated(self._converted(value, "bool"))
        value = self._converted(value, self._common(value))
        if node.op == "~" and _floats(value):
            raise self._error(node, "~ is for integers")
        return self._operation("{0}" if node.op == "+" else f"({node.op}{{0}})", value.ctype, value)

    def _of_binaryop(self, node: Any) -> Value:
        return self._binary(node, node.op, self.expression(node.left), self.expression(node.right))

    def _binary(self, node: Any, op: str, left: Value, right: Value) -> Value:
        if op in ("&&", "||"):
            form = f"({{0}} {op[0]} {{1}})"
            return self._operation(form, "bool", self._converted(left, "bool"), self._converted(right, "bool"))
        ctype = self._common(left, right)
        if ctype in ("A", "double") and op in ("%", "&", "|", "^", "<<", ">>"):
            raise self._error(node, f"{op} is for integers" + ("; fmod is that of floats" if op == "%" else ""))
        left, right = self._converted(left, ctype), self._converted(right, ctype)
        if op in ("<", ">", "<=", ">=", "==", "!="):
            return self._operation(f"({{0}} {op} {{1}})", "bool", left, right)
        if op in ("/", "%") and ctype not in ("A", "double"):
            form = "c_.quotient({0}, {1})" if op == "/" else "c_.remainder({0}, {1})"
            return self._operation(form, ctype, self._tensor(left), self._tensor(right))
        return self._operation(f"({{0}} {op} {{1}})", ctype, left, right)

    def _of_ternaryop(self, node: Any) -> Value:
        condition = self._condition(node.cond)
        taken, other = (
            self._within(where, part)
            for where, part in ((condition, node.iftrue), (self._negated(condition), node.iffalse))
        )
        return self._selected(condition, taken, other)

    def _within(self, condition: Value, node: Any) -> Value:
        """An expression that is a branch. A plain name needs no guard: to select it is to guard it."""
        if type(node).__name__ in ("ID", "Constant"):
            return self.expression(node)
        with self._guarded(condition, node):
            return self.expression(node)

    def _condition(self, node: Any) -> Value:
        return self._keep("where", self._tensor(self._converted(self.expression(node), "bool")))

    def _negated(self, condition: Value) -> Value:
        if condition.is_literal:
            return Value(str(condition.code != "True"), "bool", True)
        return Value(f"(~{condition.code})", "bool")

    def _selected(self, condition: Value, first: Value, second: Value) -> Value:
        ctype = first.ctype if first.ctype == second.ctype else self._common(first, second)
        first, second = self._converted(first, ctype), self._converted(second, ctype)
        if first.is_literal and second.is_literal:
            first = self._tensor(first)
        return Value(f"c_.torch.where({condition.code}, {first.code}, {second.code})", ctype)

    def _of_funccall(self, node: Any) -> Value:
        name = getattr(node.name, "name", None)
        args = [self.expression(one) for one in (node.args.exprs if node.args is not None else [])]
        if name not in KNOWN:
            if name is None:
                raise self._error(node, "what is called is not the name of a function")
            known = ", ".join(sorted(KNOWN))
            raise self._error(node, f"the function {name!r} is not translated to PyTorch; {GIVE} (known are {known})")
        count = 3 if name == "fma" else 2 if name in FLOATING_TWO or name in ANY_TWO else 1
        if len(args) != count:
            raise self._error(node, f"{name} takes {count} argument{'s' * (count > 1)}, got {len(args)}")
        ctype = self._common(*args)
        if name not in ANY_TWO and name != "abs" and ctype not in ("A", "double"):
            ctype = "double"
        args = [self._converted(one, ctype) for one in args]
        if name == "fma":
            return self._operation("({0} * {1} + {2})", ctype, *args)
        if name != "pow" or args[0].is_literal == args[1].is_literal or args[1].code in _ROOTS:
            args = [self._tensor(one) for one in args]
        form = f"{FORMS[name]}({', '.join(f'{{{index}}}' for index in range(count))})"
        return self._operation(form, "bool" if name in TRUTH else ctype, *args)

    # --- values ---

    def _operation(self, form: str, ctype: str, *operands: Value) -> Value:
        """An operation on values of one type; on literals alone it is done here and now."""
        if not all(one.is_literal for one in operands):
            return Value(form.format(*(one.code for one in operands)), ctype)
        tensors = [self._tensor(one).code for one in operands]
        found = eval(form.format(*tensors), {"c_": functions, "A": torch.float64, "device_": "cpu"}).item()
        return literal(found, ctype)

    def _converted(self, value: Value, ctype: str) -> Value:
        if value.ctype == ctype:
            return value
        if value.is_literal:
            number = eval(value.code, {"c_": functions})
            if ctype in _WHOLE and isinstance(number, float):
                tensor = torch.tensor(number, dtype=torch.float32 if value.ctype == "A" else torch.float64)
                return literal(int(functions.integer(tensor, _WHOLE[ctype])), ctype)
            return literal({"bool": bool, "A": float, "double": float}.get(ctype, int)(number), ctype)
        if ctype == "bool":
            return Value(f"({value.code} != 0)", ctype)
        if ctype in _WHOLE and _floats(value):
            return Value(f"c_.integer({value.code}, {DTYPES[ctype]})", ctype)
        return Value(f"{value.code}.to({DTYPES[ctype]})", ctype)

    def _tensor(self, value: Value) -> Value:
        """The value, a literal as a tensor of no dimension."""
        if not value.is_literal:
            return value
        return Value(f"c_.number({value.code}, {DTYPES[value.ctype]}, device_)", value.ctype)

    def _common(self, *values: Value) -> str:
        """The usual arithmetic conversions: the widest type, at least int."""
        return max(("int", *(value.ctype for value in values)), key=RANK.__getitem__)

    def _ctype(self, node: Any, names: list[str]) -> str:
        try:
            return SPELLED[" ".join(names)]
        except KeyError:
            raise self._error(node, f"the type {' '.join(names)!r} is not translated to PyTorch; {GIVE}") from None

    # --- branches ---

    @contextmanager
    def _guarded(self, condition: Value, node: Any) -> Iterator[set[str]]:
        """Open the scope of a branch, in which the values read have a gradient only where it is taken."""
        outside = self.scope
        self.scope = {name: Variable(one.ctype, one.value) for name, one in outside.items()}
        guarded = set()
        for name in sorted(_names(node) & set(self.scope)):
            value = self.scope[name].value
            if value is not None and not value.is_literal and value.ctype in ("A", "double"):
                code = f"c_.guard({condition.code}, {value.code})"
                self.scope[name] = Variable(value.ctype, self._keep(name, Value(code, value.ctype)))
                guarded.add(name)
        try:
            yield guarded
        finally:
            self.scope = outside

    # --- names and errors ---

    def _keep(self, name: str, value: Value) -> Value:
        """The value under a new Python name."""
        self._count += 1
        self.lines.append(f"{name}_{self._count} = {value.code}")
        return Value(f"{name}_{self._count}", value.ctype)

    def _unknown(self, node: Any) -> InputError:
        return self._error(
            node,
            f"{node.name!r} is neither a parameter nor declared (there are {', '.join(self.scope)}); where the preamble "
            f"defines it, {GIVE}",
        )

    def _error(self, node: Any, message: str) -> InputError:
        return self.body.error(node.coord.line if node.coord is not None else 0, message)


# of Python numbers torch.pow takes a square root, which is NaN of -INFINITY; C's pow is INFINITY
_ROOTS = ("0.5", "-0.5")
_WHOLE = {"int": torch.int32, "long long": torch.int64}


def _floats(value: Value) -> bool:
    return value.ctype in ("A", "double")


def _names(node: Any) -> set[str]:
    """Every name inside a piece of the tree."""
    if node is None:
        return set()
    found = {node.name} if type(node).__name__ == "ID" else set()
    return found.union(*(_names(child) for _, child in node.children()))
