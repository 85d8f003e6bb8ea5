"""C++ statements as lines of Python: declarations, checks, dispatch over dtypes, launches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from . import changes, loops, recursion, structs, values
from .calls import as_dict, assigned, attribute, dtype_of_type, made, nothing
from .checks import is_check, message, refusals
from .expressions import EXPRESSIONS, a_tuple, arguments, children, condition, ctype, cursor, python, typed
from .launches import Kernel, launch
from .program import Function, Node, bare, line, parsed, pointee, text, under, walk
from .scope import NotTranslated, Scope, Variable, changed
from .values import DIM3, DTYPE, OPTIONS, STATUS, TENSOR, VOID, Type, Value
from .vocabulary import ALIKE, EXCEPTIONS, SAME_DEVICE, dispatched, type_of


@dataclass
class Writer:
    """The lines of one function, and what was left out of it or is uncertain, with lines of the C++.

    Attributes:
        function, scope, kernels: what is translated, and what is known.
        lines, problems, depth: what is written.
        loops: of each loop around the statement, what stands before a `continue`.
        returns, outputs: the type of what the function returns, and the parameters that it returns besides.
        returned: in a lambda, the types of what it returns.
    """

    function: Function
    scope: Scope
    kernels: Mapping[str, Kernel]
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    depth: int = 1
    loops: list[loops.Loop] = field(default_factory=list)
    returns: Type | None = None
    outputs: Sequence[str] = ()
    returned: list[Type] | None = None

    def put(self, code: str, node: Node) -> None:
        """A line, with what is to be checked about it."""
        self.flush()
        notes, self.scope.notes = self.scope.notes, []
        pad = "    " * self.depth
        for note in notes:
            self.lines.append(f"{pad}# check this ({self.function.file}:{line(node)}): {note}")
            self.problems.append(f"{self.function.file}:{line(node)}: check: {note}")
        self.lines.append(pad + code)

    def flush(self) -> None:
        """Write the lines that the statement under way needs before it."""
        self.lines += ["    " * self.depth + one for one in self.scope.before]
        self.scope.before = []

    def fail(self, error: NotTranslated) -> None:
        """Write an error in place of what has no translation."""
        place = f"{self.function.file}:{error.line}"
        self.scope.notes, self.scope.written, self.scope.before = [], [], []
        self.problems.append(f"{place}: not translated: {error.why}")
        self.lines.append("    " * self.depth + f"raise NotImplementedError({f'{place}: {error.why}'!r})")

    def comment(self, what: str) -> None:
        """A line that says what is left out on purpose."""
        self.lines.append("    " * self.depth + f"# {what}")

    # --- statements ---

    def block(self, nodes: Sequence[Node]) -> None:
        """Write statements, in order, in a scope of their own."""
        before = len(self.lines)
        self.scope.frames.append({})
        for node in nodes:
            self.statement(node)
        self.scope.frames.pop()
        if not any(one.strip() and not one.strip().startswith("#") for one in self.lines[before:]):
            self.lines.append("    " * self.depth + "pass")

    def statement(self, node: Node) -> None:
        """One statement; each of its tokens is accounted for, as translated or as listed."""
        before = len(self.lines), len(self.problems), self.depth, len(self.scope.frames), len(self.loops)
        changes = self.scope.changes
        try:
            handler = STATEMENTS.get(node.type)
            if handler is None:
                raise NotTranslated(node, f"{node.type.replace('_', ' ')}: {' '.join(text(node).split())[:80]!r}")
            handler(self, node)
            if self.scope.written:
                raise NotTranslated(node, f"{text(node)[:60]!r}: a number that is written to by reference here")
            self.scope.account(node)
            self.flush()
            if sum(one.count(" := ") for one in self.lines[before[0] :]) != self.scope.changes - changes:
                raise NotTranslated(
                    node, f"an assignment inside of an expression: {' '.join(text(node).split())[:60]!r}"
                )
        except (NotTranslated, AttributeError, LookupError, StopIteration, ValueError) as error:
            if not isinstance(error, NotTranslated):
                error = NotTranslated(node, " ".join(text(node).split())[:80])  # a form that no handler expects
            self.scope.changes = changes
            lines, problems, self.depth, frames, depth = before
            del self.lines[lines:], self.problems[problems:], self.scope.frames[frames:], self.loops[depth:]
            self.fail(error)
            self.scope.read(node)
            if node.type == "declaration":
                self._unknown(node)

    def _unknown(self, node: Node) -> None:
        """The names of a declaration without a translation: what uses them has none either."""
        for one in node.children_by_field_name("declarator"):
            for name in [text(inner) for inner in walk(under(one, "declarator") or one) if inner.type == "identifier"]:
                if name not in self.scope.frames[-1]:
                    self.scope.declare(name, Type("unknown", name=f"{name}, whose declaration has no translation"))

    def _comment(self, node: Node) -> None:
        self.scope.read(node)

    def _compound_statement(self, node: Node) -> None:
        self.scope.frames.append({})
        for one in node.named_children:
            self.statement(one)
        self.scope.frames.pop()

    def inside(self, node: Node) -> None:
        """A statement under another."""
        self.depth += 1
        self.block(node.named_children if node.type == "compound_statement" else [node])
        self.depth -= 1

    # --- declarations ---

    def _declaration(self, node: Node) -> None:
        spelled = under(node, "type")
        declarators = node.children_by_field_name("declarator")
        fixed = [
            one for one in node.named_children if one.type == "type_qualifier" and text(one) in ("const", "constexpr")
        ]
        for one in node.named_children:  # a `static` that keeps one value is a variable like others
            if one in fixed or (one.type == "storage_class_specifier" and fixed):
                self.scope.read(one)
        for one in declarators:
            if one.type == "function_declarator":
                self._declared_as_function(node, spelled, one)
            elif one.type == "init_declarator":
                self._variable(spelled, under(one, "declarator"), under(one, "value"), one, node)
            else:
                self._empty(spelled, one, node)
            self.scope.read(one)

    def _declared_as_function(self, node: Node, spelled: Node, declarator: Node) -> None:
        """`dim3 grid(n);`, which C++'s grammar may also read as the declaration of a function: it is read as a value."""
        name, kind = text(under(declarator, "declarator")), ctype(spelled, self.scope)
        if kind.kind not in ("dim3", "guard", "list", "tensor", "options", "struct") and not kind.is_number:
            raise NotTranslated(node, f"the declaration {' '.join(text(node).split())[:60]!r}")
        given = text(under(declarator, "parameters"))
        if (value := parsed(f"auto found = made{given};", "call_expression", node)) is None:
            raise NotTranslated(node, f"the declaration {' '.join(text(node).split())[:60]!r}")
        with self.scope.elsewhere():
            if kind.kind == "guard":
                self._guard(name, under(value, "arguments"))
            else:
                self._initialised(name, kind, under(value, "arguments"), False, node)

    def _guard(self, name: str, value: Node) -> None:
        """A device or a stream, which a launch finds itself."""
        for one in children(value) if value.type in ("argument_list", "initializer_list") else [value]:
            nothing(one, self.scope)
        self.scope.read(value)
        self.scope.declare(name, Type("guard"))

    def _empty(self, spelled: Node, declarator: Node, node: Node) -> None:
        """A variable whose value comes later."""
        names = [text(one) for one in walk(declarator) if one.type == "identifier"]
        kind = self._kind(spelled, declarator)
        if declarator.type == "array_declarator":
            size = python(under(declarator, "size"), self.scope)
            name = text(under(declarator, "declarator"))
            kind = Type("list", of=kind.of)
            self._define(name, kind, made(node, kind, [size], [declarator], self.scope), node)
            return
        if len(names) != 1:
            raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
        if kind.kind == "stream":
            self._define(names[0], kind, Value('""', kind), node)
        elif kind.kind in ("tensor", "list", "string", "optional"):
            self._define(names[0], kind, made(node, kind, [], [], self.scope), node)
        elif kind == DIM3:
            self._define(names[0], kind, Value("(1, 1, 1)", DIM3), node)
        elif kind.kind == "struct":
            self._construct(names[0], kind, [], node)
        elif kind.kind == "tuple":
            raise NotTranslated(node, f"a tuple whose members come later: {text(node)[:60]!r}")
        else:
            variable = self.scope.declare(names[0], kind)
            variable.fixed = False
            inner = (one for one in walk(self.function.body) if one.type == "lambda_expression")
            if any(names[0] in changed(one) for one in inner):
                self.put(f"{variable.name} = None", node)  # for `nonlocal`
            elif kind.is_number and self._is_given(names[0]):
                self.put(f"{variable.name} = {'0.0' if kind.kind == 'float' else '0'}", node)
            if kind == STATUS:
                variable.value = Value("0", STATUS)

    def _is_given(self, name: str) -> bool:
        """Return True if a variable is handed to a function of the files, which may write to it before any other does."""
        return any(
            text(one).lstrip("& ") == name
            for call in walk(self.function.body)
            if call.type == "call_expression" and self.scope.program.named(bare(text(under(call, "function"))))
            for one in under(call, "arguments").named_children
        )

    def _kind(self, spelled: Node, declarator: Node) -> Type:
        stars = "*" * sum(one.type == "pointer_declarator" for one in walk(declarator))
        stars += "[]" * sum(one.type == "array_declarator" for one in walk(declarator))
        if spelled.type == "placeholder_type_specifier":
            self.scope.read(spelled)
            return Type("auto")
        return ctype(spelled, self.scope, text(spelled) + stars)

    def _variable(self, spelled: Node, declarator: Node, value: Node, whole: Node, node: Node) -> None:
        if any(one.type == "structured_binding_declarator" for one in walk(declarator)):
            self._unpacked([text(one) for one in walk(declarator) if one.type == "identifier"], value, node)
            self.scope.read(spelled)
            return
        names = [text(one) for one in walk(declarator) if one.type == "identifier"]
        kind = self._kind(spelled, declarator)
        name = names[0] if names else ""
        if declarator.type == "array_declarator":
            name, kind = text(under(declarator, "declarator")), Type("list", of=kind.of)
            elements = [assigned(one, kind.of[0], node).code for one in arguments(value, self.scope)]
            if under(declarator, "size") is not None:
                size = python(under(declarator, "size"), self.scope)
                if size.low != size.high or size.low < len(elements):
                    raise NotTranslated(node, f"the size of {text(declarator)[:60]!r}")
                elements += ["0.0" if kind.of[0].kind == "float" else "0"] * (int(size.low) - len(elements))
            self._define(name, kind, Value(f"[{', '.join(elements)}]", kind), node)
            return
        if len(names) != 1 and kind.kind != "auto":
            raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
        if kind.kind == "guard":
            self._guard(name, value)
            return
        if kind.kind == "argument":
            self._argument(name, value, node)
            return
        if kind.kind == "auto" and self._is_kernel(value):
            self.scope.declare(name, Type("kernel")).kernel = value
            self.scope.read(value)
            return
        is_reference = any(one.type == "reference_declarator" for one in walk(declarator))
        self._initialised(name, kind, value, is_reference, node)

    def _initialised(self, name: str, kind: Type, value: Node, is_reference: bool, node: Node) -> None:
        is_constant = any(one.type == "type_qualifier" and text(one) == "const" for one in node.named_children)
        if value.type in ("initializer_list", "argument_list") and kind.kind == "struct":
            if value.type == "argument_list" or structs.constructors(kind.name, self.scope.program):
                self._construct(name, kind, children(value), node)
            else:
                self._struct(name, kind, value, node)
            self.scope.read(value)
            return
        if value.type in ("argument_list", "initializer_list") and kind.kind not in ("auto", "list", "tuple"):
            given = arguments(value, self.scope)
            if value.type == "initializer_list" and kind == TENSOR or (kind == OPTIONS and len(given) != 1):
                raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
            if kind == OPTIONS:
                found = assigned(given[0], kind, node)
            else:
                given = given or ([values.number(0, kind, "0")] if kind.is_integer else [])
                found = made(node, kind, given, children(value), self.scope)
        elif value.type == "argument_list":
            found = made(node, kind, arguments(value, self.scope), children(value), self.scope)
        else:
            found = self._braced(value, kind, node) or python(value, self.scope)
            if kind == DIM3 and found.type.is_number:
                found = made(node, DIM3, [found], [value], self.scope)
            if found.type == DIM3 and kind.kind == "auto":
                kind = DIM3
        if found.type.kind in ("guard", "function", "properties") and kind.kind in ("auto", "guard", "properties"):
            known = self.scope.declare(name, found.type)
            known.value = known.value if found.type.kind == "guard" else found
            return
        if kind.kind == "auto":
            if found.type.kind in ("none", "void", "result"):
                raise NotTranslated(node, f"the type of {name}: {text(node)[:60]!r}")
            kind = found.type
        written = {text(value)} if is_constant else {text(value), name}
        if is_reference and written & self.scope.changed and found.type == kind:
            variable = self.scope.find(text(value)) if value.type == "identifier" else None
            if variable is None and name in written & self.scope.changed:
                raise NotTranslated(node, f"a reference that is written to: {text(node)[:60]!r}")
            if variable is not None:
                self.scope.frames[-1][name] = variable
                return
        if kind.kind == "pointer" and found.type.kind == "cursor" and kind.of == found.type.of:
            kind = found.type
        if kind.kind == "tuple" and found.type.kind == "list" and len(kind.of) == 0:
            kind = found.type
        self._define(name, kind, found if kind == DIM3 else assigned(found, kind, node), node)

    def _define(self, name: str, kind: Type, value: Value, node: Node) -> None:
        """`name = value`, of a new variable."""
        written = self.scope.taken(value.code, node)
        code = as_dict(value) if kind == OPTIONS else value.code
        if kind == DIM3 and value.type == DIM3:
            code = self._full(name, code)
        if (
            kind.kind == "list"
            and value.type.kind == "list"
            and kind.of
            and (re.fullmatch(r"\w+", code) or (name in self.scope.changed and code.startswith("(")))
        ):  # a vector of its own
            code = f"list({code})"
        if kind.kind == "list" and not kind.of and value.type.of:
            kind = value.type
        variable = self.scope.declare(name, kind, value)
        if kind == STATUS and code == "0" and not written:
            variable.value = value
            return
        if value.sized and kind.kind == "list":
            variable.value = replace(variable.value, sized=True)
        self.put(f"{', '.join([variable.value.code, *written])} = {code}", node)

    def _full(self, name: str, code: str) -> str:
        """A grid of which members are named has three of them."""
        members = any(
            one.type == "field_expression" and text(under(one, "argument")) == name for one in walk(self.function.body)
        )
        if not members or not code.startswith("("):
            return code
        count = _elements(code)
        return code if count == 3 else f"({', '.join([code[1:-1].rstrip(',').strip(), *['1'] * (3 - count)])})"

    def _unpacked(self, names: Sequence[str], value: Node, node: Node) -> None:
        found = python(value, self.scope)
        of = {"tuple": found.type.of, "list": found.type.of * len(names)}.get(found.type.kind, ())
        if len(of) != len(names):
            raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
        made_ = [self.scope.declare(name, kind).value.code for name, kind in zip(names, of)]
        self.put(f"{', '.join(made_)} = {found.code}", node)

    def _argument(self, name: str, value: Node, node: Node) -> None:
        """`TensorArg x_t{x, "x", 1};`, which checks of several tensors take."""
        given = children(value)
        if len(given) != 3:
            raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
        found = python(given[0], self.scope)
        self.scope.read(value)
        variable = self.scope.declare(name, Type("argument"))
        variable.value = Value(found.code, Type("argument"))

    def _is_kernel(self, value: Node) -> bool:
        inner = value
        if inner.type == "pointer_expression" and text(inner).startswith("&"):
            inner = under(inner, "argument")
        named = inner.type in ("identifier", "qualified_identifier", "template_function")
        return named and bare(text(inner)) in self.kernels and self.scope.find(text(inner)) is None

    def _alias_declaration(self, node: Node) -> None:
        """`using scalar = float;`, `typedef float scalar;`, `using acc_t = at::acc_type<scalar_t, true>;`"""
        self._alias(text(under(node, "name") or under(node, "declarator")), under(node, "type"), node)
        self.scope.read(node)

    def _alias(self, name: str, spelled: Node, node: Node) -> None:
        used = {text(one) for one in walk(spelled) if one.type == "type_identifier"}
        dtypes = any((variable := self.scope.find(one)) is not None and variable.value.type == DTYPE for one in used)
        if dtypes or self._is_template_argument(name):
            code = dtype_of_type(spelled, text(spelled), self.scope)
            variable = self.scope.declare(name, DTYPE)
            self.scope.types[name] = type_of(text(spelled), self.scope.types) or Type("scalar")
            self.put(
                f"{variable.value.code} = {code.removeprefix('(').removesuffix(')') if code.startswith('(') else code}",
                node,
            )
        else:
            self.scope.types[name] = ctype(spelled, self.scope)

    def _is_template_argument(self, name: str) -> bool:
        return any(
            text(one) == name
            for arguments_ in walk(self.function.body)
            if arguments_.type == "template_argument_list" and "_cast" not in text(arguments_.parent)[:20]
            for one in walk(arguments_)
        )

    def _using_declaration(self, node: Node) -> None:
        if not re.fullmatch(r"using\s+(namespace\s+)?((at|torch|std|c10)(::\w+)*|(at|torch)::Tensor)\s*;", text(node)):
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        self.scope.read(node)

    def _static_assert(self, node: Node) -> None:
        value = python(under(node, "condition"), self.scope)
        self.put(f"assert {value.code}", node)
        self.scope.read(node)

    # --- expressions as statements ---

    def _expression_statement(self, node: Node) -> None:
        inner = children(node)
        if inner:
            self.effect(inner[0])

    def effect(self, node: Node) -> None:
        """An expression whose value nobody takes."""
        if node.type == "call_expression":
            self._call(node)
        elif node.type == "assignment_expression":
            self._assignment(node)
        elif node.type == "update_expression":
            self._update(node)
        elif node.type == "comma_expression":
            for side in ("left", "right"):
                self.effect(under(node, side))
        elif node.type == "parenthesized_expression" and len(children(node)) == 1:
            self.effect(children(node)[0])
        elif node.type == "cast_expression" and text(under(node, "type")) == "void":
            python(under(node, "value"), self.scope)  # `(void)n`
        elif node.type == "delete_expression" and text(node).startswith("delete") and "[" in text(node):
            of = python(children(node)[0], self.scope)
            if of.type.kind != "cursor":
                raise NotTranslated(node, f"delete expression: {text(node)[:60]!r}")
        elif node.type == "binary_expression" and self._is_output(node):
            self._output(node)
        else:
            value = python(node, self.scope)
            self.put(value.code, node)
        self.scope.read(node)

    def _update(self, node: Node) -> None:
        sign = text(under(node, "operator"))
        self._set(under(node, "argument"), sign[0] + "=", values.number(1, values.INT, "1"), node)

    def _assignment(self, node: Node) -> None:
        left, right = (under(node, side) for side in ("left", "right"))
        sign = text(under(node, "operator"))
        if right.type == "assignment_expression" and sign == "=":  # a = b = c
            self._assignment(right)
            right = under(right, "left")
        if left.type == "call_expression" and re.fullmatch(r"(std::)?tie", text(under(left, "function"))):
            self._tied(left, right, node)
            return
        if sign == "=" and (variable := self.scope.find(text(left))) is not None and variable.value.type == OPTIONS:
            self.put(f"{variable.value.code} = {as_dict(assigned(python(right, self.scope), OPTIONS, node))}", node)
            self.scope.read(node)
            return
        self._set(left, sign, python(right, self.scope), node)
        self.scope.read(node)

    def _tied(self, left: Node, right: Node, node: Node) -> None:
        names = [python(one, self.scope) for one in children(under(left, "arguments"))]
        value = python(right, self.scope)
        if value.type.kind != "tuple" or [one.type.kind for one in names] != [one.kind for one in value.type.of]:
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        self.put(f"{', '.join(one.code for one in names)} = {value.code}", node)
        self.scope.read(node)

    def _set(self, left: Node, sign: str, right: Value, node: Node) -> None:
        """Write the assignment `left sign right`; the value is converted to the type of `left`."""
        while left.type == "parenthesized_expression" and len(children(left)) == 1:
            left = children(left)[0]
        if left.type == "pointer_expression" and text(pointee(left)) in self.function.pointees:
            self.scope.read(left)
            left = pointee(left)
        written = self.scope.taken(right.code, node)
        if written and (sign != "=" or left.type != "identifier"):
            raise NotTranslated(node, f"{text(node)[:60]!r}: a number that is written to by reference here")
        if left.type == "field_expression":
            self._member(left, sign, right, node)
            return
        if left.type == "subscript_expression" and self._set_counted(left, sign, right, node):
            return
        variable = self.scope.find(text(left)) if left.type == "identifier" else None
        if left.type == "identifier" and variable is None:
            raise NotTranslated(node, f"the name {text(left)}, which the files do not define")
        target = variable.value if variable is not None else python(left, self.scope)
        if left.type not in ("identifier", "subscript_expression", "pointer_expression"):
            raise NotTranslated(node, f"an assignment to {text(left)[:60]!r}")
        self.scope.read(left)
        if left.type in ("subscript_expression", "pointer_expression") and target.code.endswith("].item()"):
            value = right if sign == "=" else values.computed(sign.removesuffix("="), target, right)
            self.put(f"{target.code.removesuffix('.item()')} = {assigned(value, target.type, node).code}", node)
            return
        if target.type.kind == "kernel" or (variable is not None and variable.kernel is not None):
            raise NotTranslated(node, f"a kernel that is assigned: {text(node)[:60]!r}")
        if sign == "=":
            if target.type == STATUS and right.type == STATUS:
                return
            if target.type.kind == "cursor" and target.element != right.element:
                raise NotTranslated(node, f"a pointer to another array than before: {text(node)[:60]!r}")
            if target.type == DIM3 and right.type.is_number:
                right = made(node, DIM3, [right], [node], self.scope)
            found = right if target.type == DIM3 == right.type else assigned(right, target.type, node)
            if target.type.kind == right.type.kind == "list" and re.fullmatch(r"\w+", found.code):
                found = replace(found, code=f"list({found.code})")
            code = self._full(text(left), found.code) if target.type == DIM3 else found.code
            self.put(f"{', '.join([target.code, *written])} = {code}", node)
            return
        operator = sign.removesuffix("=")
        if target.type == TENSOR and operator in "+-*/" and (right.type == TENSOR or right.type.is_number):
            self.put(f"{target.code} {sign} {right.code}", node)
            return
        if target.type.kind == "cursor" and (found_ := cursor(target, right, operator)) is not None:
            self.put(f"{target.code} = {found_.code}", node)
            return
        if target.type.kind == "pointer" and operator in "+-" and right.type.is_integer:
            at = right if operator == "+" else values.unary("-", right)
            self.put(f"{target.code} = cpp.memory({target.code}, {at.code})", node)
            return
        if not target.type.is_number or not right.type.is_number:
            raise NotTranslated(node, f"{sign} of a {target.type} and a {right.type}")
        try:
            made_ = values.converted(values.computed(operator, target, right), target.type)
        except ValueError:
            raise NotTranslated(node, f"{sign} of a {target.type} and a {right.type}") from None
        assert made_ is not None
        prefix = f"{target.code} {operator} "
        binds = values._BINDS[operator]  # a mask behind the operation is for the whole of it
        plain = target.type.is_integer and made_.code.startswith(prefix) and right.binds > binds == made_.binds
        self.put(
            f"{target.code} {sign} {made_.code[len(prefix) :]}" if plain else f"{target.code} = {made_.code}", node
        )

    def _set_counted(self, left: Node, sign: str, right: Value, node: Node) -> bool:
        """`kept[count++] = i`: whether it is that; the count goes on afterwards."""
        index = children(under(left, "indices"))
        if len(index) != 1 or index[0].type != "update_expression" or not text(index[0]).endswith(("++", "--")):
            return False
        name = under(index[0], "argument")
        of = python(under(left, "argument"), self.scope)
        at = python(name, self.scope)
        if not of.type.of or not of.type.of[0].is_number or sign != "=":
            return False
        found = cursor(of, at)
        place = f"cpp.memory({of.code}, {at.code})[0]" if found is None else f"{found.element}[{found.code}]"
        self.put(f"{place} = {assigned(right, of.type.of[0], node).code}", node)
        self._set(name, text(index[0])[-1] + "=", values.number(1, values.INT, "1"), node)
        self.scope.read(left)
        return True

    def _member(self, left: Node, sign: str, right: Value, node: Node) -> None:
        of, name = under(left, "argument"), text(under(left, "field"))
        value = python(of, self.scope)
        self.scope.read(left)
        if value.type.kind == "struct":
            self._fill(value, name, sign, right, node)
            return
        if value.type != DIM3 or name not in ("x", "y", "z"):
            raise NotTranslated(node, f"the member {text(left)[:60]!r}")
        place = "xyz".index(name)
        target = values.whole(f"{value.code}[{place}]", values.UINT)
        found = right if sign == "=" else values.computed(sign.removesuffix("="), target, right)
        found = replace(found, code=f"int({found.code})") if found.type.kind == "float" else found
        parts = [found.code if at == place else f"{value.code}[{at}]" for at in range(3)]
        self.put(f"{value.code} = ({', '.join(parts)})", node)

    def _struct(self, name: str, kind: Type, given: Node, node: Node) -> None:
        """`Params p = {x, n};`, with the members in order, or with their names."""
        self._construct(name, kind, [], node)
        value = self.scope.frames[-1][name].value
        order = list(structs.members(kind.name, self.scope.program) or {})
        for index, one in enumerate(children(given)):
            member = order[index] if index < len(order) else ""
            if one.type == "initializer_pair":
                member, inner = (text(under(one, "designator")).lstrip("."), under(one, "value"))
                self.scope.read(under(one, "designator"))
            else:
                inner = one
            if inner.type == "initializer_list":
                for at, element in enumerate(children(inner)):
                    self._fill(value, member, "=", python(element, self.scope), node, at)
            else:
                self._fill(value, member, "=", python(inner, self.scope), node)
        self.scope.read(given)

    def _construct(self, name: str, kind: Type, nodes: Sequence[Node], node: Node) -> None:
        """`Params p(x, n);`: the members' own values, what the constructor gives them, and its body."""
        program = self.scope.program
        given = [python(one, self.scope) for one in nodes]
        if self.scope.written:
            raise NotTranslated(node, f"{text(node)[:60]!r}: a number that is written to by reference here")
        found = structs.constructors(kind.name, program)
        if len(given) == 1 and given[0].type == kind:
            self._define(name, kind, structs.copied(given[0]), node)
            return
        fits = [it for it in found if it.type == "function_definition" and len(structs.parameters(it)) == len(given)]
        if (found or nodes) and len(fits) != 1:
            raise NotTranslated(node, f"which constructor of {kind.name} is called: {text(node)[:60]!r}")
        self._define(name, kind, structs.empty(kind), node)
        value = self.scope.frames[-1][name].value
        own = structs.frame(value, program)
        taken = structs.parameters(fits[0]) if fits else []
        for one, (parameter, spelled) in zip(given, taken):
            if spelled in changed(fits[0]):
                raise NotTranslated(node, f"a constructor that changes {spelled}")
            one = assigned(one, self._kind(under(parameter, "type"), parameter), node)
            if not re.fullmatch(r"[\w.]+", one.code):
                self.put(f"{(kept := f'{name}_{spelled}')} = {one.code}", node)
                one = replace(one, code=kept, binds=values.ATOM, lax="")
                self.scope.frames[-1].setdefault(f"constructor {kept}", Variable(one, kept))
            own[spelled] = Variable(one, one.code)
        frames, self.scope.frames = self.scope.frames, [own]
        try:
            with self.scope.elsewhere():
                for member, inner in structs.defaults(kind.name, program):
                    self._fill(value, member, "=", python(inner, self.scope), node)
                if fits:
                    self._constructor(fits[0], value, node)
        finally:
            self.scope.frames = frames

    def _constructor(self, node: Node, value: Value, call: Node) -> None:
        """The initialisers of a constructor, in order, and its body, of assignments alone."""
        for one in node.named_children:
            for each in children(one) if one.type == "field_initializer_list" else []:
                member, *rest = children(each)
                inner = [part for part in children(rest[0]) if rest] if rest else []
                of = structs.members(value.type.name, self.scope.program) or {}
                length = of.get(text(member), (VOID, 0, ""))[1]
                if member.type != "field_identifier" or (not length and len(inner) > 1):
                    raise NotTranslated(call, f"the initialiser {text(each)[:60]!r}")
                for at, part in enumerate(inner):
                    self._fill(value, text(member), "=", python(part, self.scope), call, at if length else None)
        body = under(node, "body")
        for one in [] if body is None else children(body):
            if one.type != "expression_statement" or children(one)[0].type != "assignment_expression":
                raise NotTranslated(call, f"{text(one)[:60]!r} in a constructor")
            self.effect(children(one)[0])

    def _fill(self, value: Value, name: str, sign: str, right: Value, node: Node, at: int | None = None) -> None:
        """Assign to a member of a struct, or to the element `at` of one that is an array."""
        of = structs.members(value.type.name, self.scope.program) or {}
        kind, length, dtype = of.get(name, (VOID, 0, ""))
        if (at is None) == (length > 0) or (at or 0) >= max(length, 1) or (dtype and sign != "=") or kind == VOID:
            raise NotTranslated(node, f"the member {name} of {value.type.name}: {text(node)[:60]!r}")
        place = f"{value.code}.{name}" + ("" if at is None else f"[{at}]")
        if dtype:
            self.put(f"{place} = {structs.address(right, dtype, node)}", node)
            return
        if kind.kind == "struct" and right.type == kind and sign == "=":
            self.put(f"{place} = {right.code}", node)  # ctypes copies it
            return
        if not right.type.is_number or not kind.is_number:
            raise NotTranslated(node, f"a {right.type} as the member {name}: {text(node)[:60]!r}")
        found = right if sign == "=" else values.computed(sign.removesuffix("="), typed(place, kind), right)
        self.put(f"{place} = {assigned(found, kind, node).code}", node)

    # --- flow ---

    def _return_statement(self, node: Node) -> None:
        inner = children(node)
        outputs = [one.value.code for name in self.outputs if (one := self.scope.find(name)) is not None]
        if not inner:
            self.put(f"return {', '.join(outputs)}".rstrip(), node)
            return
        value = self._braced(inner[0], self.returns, node) or python(inner[0], self.scope)
        if self.scope.written:
            raise NotTranslated(node, f"{text(node)[:60]!r}: a number that is written to by reference here")
        if self.returned is not None:
            value = assigned(value, value.type, node)
            self.returned.append(value.type)
        if self.returns == VOID:
            self.put(value.code, node)
            self.put("return", node)
            return
        if self.returns is not None:
            value = assigned(value, self.returns, node)
        self.put(f"return {', '.join([value.code, *outputs])}", node)

    def _braced(self, value: Node, kind: Type | None, node: Node) -> Value | None:
        """Translate `{a, b}` where a struct or a tuple is wanted; None for others."""
        if value.type != "initializer_list" or kind is None:
            return None
        if kind.kind == "struct":
            self.scope.frames.append({})
            self._initialised("made ", kind, value, False, node)
            return self.scope.frames.pop()["made "].value
        given = children(value)
        if kind.kind != "tuple" or len(given) != len(kind.of):
            return None
        return a_tuple([assigned(python(one, self.scope), of, one) for one, of in zip(given, kind.of)], "tuple")

    def _if_statement(self, node: Node) -> None:
        self.scope.frames.append({})
        self._branches(node, "if")
        self.scope.frames.pop()

    def _branches(self, node: Node, word: str) -> None:
        clause = under(node, "condition")
        consequence, alternative = under(node, "consequence"), under(node, "alternative")
        if word == "if" and clause.type == "condition_clause" and _is_declaration(clause):
            test = self._declared(under(clause, "value"))
            self.scope.read(clause)
        else:
            test = self.asked(clause, word == "if")
        other = None if alternative is None else children(alternative)[-1]
        if test.truth is not None:  # of CUDA's errors, which are exceptions
            self.scope.read(node)
            taken = consequence if test.truth else other
            if word == "elif":
                if taken is not None:
                    self.put("else:", node)
                    self.inside(taken)
            elif taken is not None:
                self.statement(taken)
            return
        self.put(f"{word} {test.code}:", node)
        self.inside(consequence)
        if other is not None:
            if other.type == "if_statement" and under(under(other, "condition"), "initializer") is None:
                self._branches(other, "elif")
            else:
                self.put("else:", other)
                self.inside(other)
            self.scope.read(alternative)
        self.scope.read(consequence)

    def _declared(self, node: Node) -> Value:
        """A variable that a condition declares, `if (const char* env = getenv("NAME"))`: whether it is true, or there."""
        spelled, declarator, value = (under(node, part) for part in ("type", "declarator", "value"))
        self._variable(spelled, declarator, value, node, node)
        self.scope.read(node)
        name = next(text(one) for one in walk(declarator) if one.type == "identifier")
        variable = self.scope.frames[-1][name]
        if variable.value.type == values.STRING and text(declarator).startswith("*"):
            return Value(f"{variable.name} is not None", values.BOOL, values.COMPARE)
        return values.truth(variable.value)

    def asked(self, clause: Node, once: bool = False, read: Callable[[Node, Scope], Value] = condition) -> Value:
        """The condition of a statement; `once` where what it does before it is done once."""
        if clause.type == "condition_clause":
            inner = under(clause, "value")
            if under(clause, "initializer") is not None or inner is None:
                raise NotTranslated(clause, f"a condition with a declaration: {text(clause)[:60]!r}")
        else:
            inner = children(clause)[0]
        found = self.scope.done(read(inner, self.scope), clause)
        if self.scope.before and not once:
            raise NotTranslated(clause, f"{text(clause)[:60]!r}: a call that writes to its arguments here")
        self.scope.read(clause)
        return found

    def _continue_statement(self, node: Node) -> None:
        if not self.loops or self.loops[-1].repeat is None:
            raise NotTranslated(node, "continue outside of a loop")
        self.loops[-1].repeat(self)
        self.put("continue", node)

    def _break_statement(self, node: Node) -> None:
        if not self.loops or self.loops[-1].is_switch:
            raise NotTranslated(node, "a break inside of a case")
        self.put("break", node)

    def _throw_statement(self, node: Node) -> None:
        inner = children(node)
        if not inner:  # outside of a catch, where it ends the program
            self.put("raise SystemExit(134)", node)
            return
        if len(inner) == 1 and inner[0].type in ("string_literal", "concatenated_string"):
            self.put(f"raise RuntimeError({python(inner[0], self.scope).code})", node)
            return
        parts = {"call_expression": ("function", "arguments"), "compound_literal_expression": ("type", "value")}
        named = [under(inner[0], one) for one in parts.get(inner[0].type, ())] if inner else []
        if not named or text(named[0]) not in EXCEPTIONS:
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        called, given = named[0], arguments(named[1], self.scope)
        self.scope.read(node)
        self.put(f"raise {EXCEPTIONS[text(called)]}({', '.join(one.code for one in given)})", node)

    # --- calls ---

    def _call(self, node: Node) -> None:
        function, given = under(node, "function"), under(node, "arguments")
        spelled, base = text(function), bare(text(function))
        syntax = next((one for one in node.named_children if one.type == "kernel_call_syntax"), None)
        if syntax is None and function.type != "field_expression":
            syntax = next((one for one in function.named_children if one.type == "kernel_call_syntax"), None)
        own = self.scope.program.own(spelled)
        if syntax is not None:
            self._launch(node, function, syntax, given)
        elif len(own) == 1 and recursion.is_recursive(own[0]):
            one = parsed(f"void f() {{ {recursion.followed(node, own[0], self.scope)} }}", "if_statement", node)
            with self.scope.elsewhere():
                self.statement(one)
        elif own or function.type in ("lambda_expression", "parenthesized_expression", "field_expression"):
            self._called(node)
        elif base == "cudaSetDevice" or spelled in ("c10::cuda::set_device", "at::cuda::set_device"):
            for one in children(given):
                if one.type == "number_literal":
                    raise NotTranslated(node, f"{text(node)[:60]!r}: a device by its number")
                nothing(one, self.scope)
        elif base == "cudaGetDevice" and (device := self.scope.find(text(children(given)[-1]).lstrip("&"))) is not None:
            device.value = replace(device.value, type=Type("guard"))  # which streams and guards take, and nothing else
        elif base == "MaybeSetDevice" or base in SAME_DEVICE:
            self._of_devices(node, base, given)
        elif base in ("cudaFuncSetAttribute", "cudaFuncSetCacheConfig"):
            attribute(node, given, self.scope)
            self.comment(
                f"{self.function.file}:{line(node)}: {base} is not needed: a launch asks for its shared memory"
            )
        elif base.startswith(("AT_DISPATCH_", "TORCH_DISPATCH_")):
            self._dispatch(node, base, given)
        elif base in ALIKE:
            self._write_dtype_check(node, given)
        elif spelled in ("std::swap", "swap"):
            self._swap(node, given)
        elif base in ("AT_ERROR", "TORCH_ERROR"):
            self.scope.read(function)
            self.put(f"raise ValueError({message(arguments(given, self.scope))})", node)
        elif is_check(base):
            self.scope.read(function)
            for test, shown in refusals(node, base, given, self.scope):
                self.put(f"if {test}:", node)
                self.lines.append("    " * (self.depth + 1) + f"raise ValueError({shown})")
        elif spelled in ("printf", "std::printf", "fprintf"):
            self._printed(node, base, given)
        elif spelled in ("exit", "std::exit", "abort", "std::abort"):
            found = arguments(given, self.scope)
            self.put(f"raise SystemExit({', '.join(one.code for one in found) or '134'})", node)
        else:
            self._called(node)
        self.scope.read(node)

    def _swap(self, node: Node, given: Node) -> None:
        names = [one for each in children(given) if (one := self.scope.find(text(each))) is not None]
        if len(names) != 2 or names[0].value.type != names[1].value.type:
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        first, second = (one.name for one in names)
        self.scope.read(given)
        self.put(f"{first}, {second} = {second}, {first}", node)

    def _called(self, node: Node) -> None:
        value = python(node, self.scope)
        if written := self.scope.taken(value.code, node):
            if value.type != VOID:
                written = ["_", *written]
            self.put(f"{', '.join(written)} = {value.code}", node)
        elif value.type != STATUS or value.code != "0":
            self.put(value.code, node)

    def _of_devices(self, node: Node, base: str, given: Node) -> None:
        """Checks that tensors are on one GPU, as those of a launch have to be."""
        for part in _flat(given):
            variable = self.scope.find(text(part))
            if variable is None or variable.value.type.kind not in ("argument", "string"):
                if base == "MaybeSetDevice":
                    nothing(part, self.scope)
                elif part.type != "string_literal":
                    raise NotTranslated(node, f"{text(node)[:60]!r}")
        self.scope.read(given)

    def _write_dtype_check(self, node: Node, given: Node) -> None:
        """Checks that tensors have one dtype."""
        parts = _flat(given)
        found = [variable.value for one in parts if (variable := self.scope.find(text(one))) is not None]
        names = [one.code for one in found if one.type.kind == "argument"]
        if len(names) < 2 or len(found) + sum(one.type == "string_literal" for one in parts) != len(parts):
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        self.scope.read(given)
        self.put(f"if len({{{', '.join(f'{one}.dtype' for one in names)}}}) > 1:", node)
        self.lines.append(
            "    " * (self.depth + 1) + f"raise ValueError({(', '.join(names) + ' must have one dtype')!r})"
        )

    def _printed(self, node: Node, base: str, given: Node) -> None:
        nodes = children(given)
        stream = ""
        if base == "fprintf":
            if text(nodes[0]) not in ("stderr", "stdout"):
                raise NotTranslated(node, f"the file {text(nodes[0])[:60]}")
            stream = f", file=sys.{text(nodes[0])}"
            nodes = nodes[1:]
        found = [python(one, self.scope) for one in nodes]
        self.scope.read(given)
        plain = all(one.type.is_number or one.type.kind == "string" for one in found)
        if not found or found[0].type.kind != "string" or not plain:
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        shown = re.sub(r"%([-+ 0#]*\d*(?:\.\d+)?)(?:ll|l|z|h)?([a-zA-Z])", r"%\1\2", found[0].code)
        values_ = ", ".join(one.code for one in found[1:])
        self.put(f'print({shown}{f" % ({values_},)" if values_ else " % ()"}, end=""{stream})', node)

    def _is_output(self, node: Node) -> bool:
        inner = node
        while inner.type == "binary_expression" and text(under(inner, "operator")) == "<<":
            inner = under(inner, "left")
        variable = self.scope.find(text(inner))
        of_text = variable is not None and variable.value.type.kind == "stream"
        return of_text or re.fullmatch(r"(std::)?c(out|err)", text(inner)) is not None

    def _output(self, node: Node) -> None:
        """`std::cout << a << b;`"""
        parts: list[Node] = []
        inner = node
        while inner.type == "binary_expression":
            parts.insert(0, under(inner, "right"))
            inner = under(inner, "left")
        stream = ", file=sys.stderr" if text(inner).endswith("cerr") else ""
        if (variable := self.scope.find(text(inner))) is not None:  # a std::stringstream
            shown = [python(one, self.scope).code for one in parts]
            self.put(f"{variable.name} += ''.join(map(str, ({', '.join(shown)},)))", node)
            return
        found = ['"\\n"' if re.fullmatch(r"(std::)?endl", text(one)) else python(one, self.scope).code for one in parts]
        self.put(f'print({", ".join(found)}, sep="", end=""{stream})', node)
        self.scope.read(node)

    def _opened(self, node: Node, base: str, given: Node) -> tuple[Node, str]:
        """AT_DISPATCH_...: one body for all dtypes, in which `scalar_t` is one of them: the lambda, and the line before."""
        nodes = children(given)
        place = next(
            (index for index, one in enumerate(nodes) if one.type in ("string_literal", "concatenated_string")), 0
        )
        body = nodes[-1]
        while body.type == "parenthesized_expression":
            body = children(body)[0]
        dtypes = dispatched(base, ", ".join(text(one) for one in nodes[: max(place - 1, 0)]))
        if body.type != "lambda_expression" or not place or dtypes is None or len(nodes) != place + 2:
            raise NotTranslated(node, f"a dispatch that is none of PyTorch's: {text(node)[:60]!r}")
        if not re.fullmatch(r"\[\s*[&=]?\s*\]", text(under(body, "captures"))):
            raise NotTranslated(node, f"what a dispatch captures: {text(node)[:60]!r}")
        value = python(nodes[place - 1], self.scope)
        if value.type.kind not in ("dtype",):
            raise NotTranslated(node, f"a dispatch over a {value.type}: {text(nodes[place - 1])[:60]!r}")
        name = python(nodes[place], self.scope).code
        self.scope.frames.append({})
        template = "index_t" if base == "AT_DISPATCH_INDEX_TYPES" else "scalar_t"
        variable = self.scope.declare(template, DTYPE)
        self.scope.types[template] = Type("scalar")
        listed = ", ".join(f"torch.{one}" for one in dtypes)
        return body, f"{variable.value.code} = cpp.dispatched({value.code}, {name}, {listed})"

    def _dispatch(self, node: Node, base: str, given: Node) -> None:
        body, opening = self._opened(node, base, given)
        self.put(opening, node)
        if self.scope.inner is not None and any(one.type == "return_statement" for one in walk(body)):
            self.put(f"{self.scope.inner(body).code}()", node)  # of the lambda alone
        else:
            for one in under(body, "body").named_children:
                self.statement(one)
        self.scope.frames.pop()
        self.scope.read(node)

    def dispatched(self, node: Node) -> Value:
        """A dispatch as a value: that which its lambda returns."""
        body, opening = self._opened(node, bare(text(under(node, "function"))), under(node, "arguments"))
        self.scope.before.append(opening)
        assert self.scope.inner is not None
        found = self.scope.inner(body)
        self.scope.frames.pop()
        self.scope.read(node)
        return typed(f"{found.code}()", found.type.of[0])

    def _launch(self, node: Node, function: Node, syntax: Node, given: Node) -> None:
        called, values_ = launch(node, function, syntax, given, self.kernels, self.scope)
        self.scope.read(node)
        self.put(f"{called}(", node)
        self.lines += ["    " * (self.depth + 1) + f"{value}," for value in values_]
        self.lines.append("    " * self.depth + ")")


EXPRESSIONS |= {"update_expression": changes.update, "assignment_expression": changes.assignment}

STATEMENTS = {
    "comment": Writer._comment, "compound_statement": Writer._compound_statement, "declaration": Writer._declaration,
    "alias_declaration": Writer._alias_declaration, "type_definition": Writer._alias_declaration,
    "using_declaration": Writer._using_declaration, "static_assert_declaration": Writer._static_assert,
    "expression_statement": Writer._expression_statement, "return_statement": Writer._return_statement,
    "if_statement": Writer._if_statement, "for_statement": loops.for_statement, "for_range_loop": loops.for_range_loop,
    "while_statement": loops.while_statement, "do_statement": loops.do_statement,
    "switch_statement": loops.switch_statement, "continue_statement": Writer._continue_statement,
    "break_statement": Writer._break_statement, "throw_statement": Writer._throw_statement,
}  # fmt: skip


def _flat(given: Node) -> list[Node]:
    """The arguments of a call, and those of the lists among them."""
    return [part for one in children(given) for part in (children(one) if one.type == "initializer_list" else [one])]


def _is_declaration(clause: Node) -> bool:
    """Return True if a condition declares a variable, and does nothing else."""
    value = under(clause, "value")
    return value is not None and value.type == "declaration" and under(clause, "initializer") is None


def _elements(code: str) -> int:
    """Number of elements of a written tuple."""
    depth, count = 0, 1
    inner = code[1:-1].rstrip(", ")
    for one in inner:
        depth += (one in "([{") - (one in ")]}")
        count += one == "," and depth == 0
    return count
