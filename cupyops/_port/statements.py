"""C++ statements as lines of Python: declarations, checks, dispatch over dtypes, launches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .checks import is_check, refusals
from .expressions import arguments, condition, options, python
from .launches import Kernel, launch
from .options import is_options
from .program import Function, Node, bare, line, text, walk
from .scope import NotTranslated, Scope, kind
from .vocabulary import DTYPES, kind_of_type, name_of

_NOTHING = re.compile(
    r"(C10_CUDA_|AT_CUDA_|CUDA_|THCuda|CUDA|gpuErr|cuda)\w*(Check|CHECK|check|Launch|Error|LAUNCH_CHECK\w*|CHECK_ERRORS)\w*|"
    r"cudaGetLastError|cudaPeekAtLastError|cudaGetErrorString|(std::)?(printf|fprintf|exit|cout)|CHECK_LAST_ERROR"
)
_SYNCHRONISES = re.compile(r"cuda(Device|Stream|Thread)Synchronize")
_HOST_TYPE = re.compile(r"cudaStream_t|CUDAStream|Guard\b|cudaError_t|DeviceGuard|CUDAContext")


@dataclass
class Writer:
    """The lines of one function, and what was left out of it or is uncertain, with lines of the C++."""

    function: Function
    scope: Scope
    kernels: Mapping[str, Kernel]
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    depth: int = 1

    def put(self, code: str, node: Node) -> None:
        """A line, with what is to be checked about it."""
        notes, self.scope.notes = self.scope.notes, []
        pad = "    " * self.depth
        for note in notes:
            self.lines.append(f"{pad}# check this ({self.function.file}:{line(node)}): {note}")
            self.problems.append(f"{self.function.file}:{line(node)}: check: {note}")
        self.lines.append(pad + code)

    def fail(self, error: NotTranslated) -> None:
        """In the place of what has no translation."""
        place = f"{self.function.file}:{error.line}"
        self.scope.notes = []
        self.problems.append(f"{place}: not translated: {error.why}")
        self.lines.append("    " * self.depth + f"raise NotImplementedError({f'{place}: {error.why}'!r})")

    def comment(self, what: str) -> None:
        """A line that says what is left out on purpose."""
        self.lines.append("    " * self.depth + f"# {what}")

    # --- statements ---

    def block(self, nodes: Sequence[Node]) -> None:
        """Some statements, in order."""
        before = len(self.lines)
        for node in nodes:
            self.statement(node)
        if not any(one.strip() and not one.strip().startswith("#") for one in self.lines[before:]):
            self.lines.append("    " * self.depth + "pass")

    def statement(self, node: Node) -> None:
        """One statement."""
        try:
            getattr(self, f"_{node.type}", self._unknown)(node)
        except NotTranslated as error:
            self.fail(error)

    def _unknown(self, node: Node) -> None:
        raise NotTranslated(node, f"{node.type.replace('_', ' ')}: {text(node)[:80]!r}")

    def _comment(self, node: Node) -> None:
        pass

    def _compound_statement(self, node: Node) -> None:
        for one in node.named_children:
            self.statement(one)

    def _inside(self, node: Node) -> None:
        self.depth += 1
        self.block(node.named_children if node.type == "compound_statement" else [node])
        self.depth -= 1

    def _declaration(self, node: Node) -> None:
        ctype = text(node.child_by_field_name("type"))
        declarators = node.children_by_field_name("declarator")
        for one in declarators:  # they are names from here on, also where what they stand for has no translation
            inner = one.child_by_field_name("declarator") if one.type == "init_declarator" else one
            for name in (text(inside) for inside in walk(inner) if inside.type == "identifier"):
                self.scope.kinds.setdefault(name, "")
        if _HOST_TYPE.search(ctype) or "getCurrentCUDAStream" in text(node) or "getDevice" in text(node):
            return  # a launch finds device and stream itself
        if declarators and declarators[0].type == "function_declarator":
            if all("parameter" in one.type for one in walk(declarators[0]) if one.type.endswith("declaration")):
                self._grid_as_declared(node, ctype, declarators[0])
            return
        for one in declarators:
            if one.type == "init_declarator":
                self._variable(ctype, one.child_by_field_name("declarator"), one.child_by_field_name("value"), node)
            elif one.type == "identifier":
                self.scope.kinds[text(one)] = kind_of_type(ctype)  # its value comes later

    def _grid_as_declared(self, node: Node, ctype: str, declarator: Node) -> None:
        """`dim3 grid(n);`, which C++'s grammar may also read as the declaration of a function."""
        if not ctype.endswith("dim3"):
            raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
        name = text(declarator.child_by_field_name("declarator"))
        parts = [text(one) for one in declarator.child_by_field_name("parameters").named_children]
        if not all(re.fullmatch(r"\w+", part) for part in parts):
            raise NotTranslated(node, f"the grid {text(node)[:60]!r}")
        self.scope.kinds[name] = "dim3"
        self.put(f"{name_of(name)} = ({', '.join(map(name_of, parts))}{',' if len(parts) == 1 else ''})", node)

    def _variable(self, ctype: str, declarator: Node, value: Node, node: Node) -> None:
        is_pointer = declarator.type in ("pointer_declarator", "reference_declarator")
        names = [text(one) for one in walk(declarator) if one.type == "identifier"]
        if len(names) != 1 and declarator.type != "structured_binding_declarator":
            raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
        if declarator.type == "structured_binding_declarator":
            self.put(f"{', '.join(map(name_of, names))} = {python(value, self.scope)}", node)
            return
        name = names[0]
        if is_options(value):
            self.scope.kinds[name] = "options"
            self.put(f"{name_of(name)} = dict({options(value, self.scope)})", node)
            return
        if kind_of_type(ctype) == "dim3" or (value.type == "call_expression" and text(value).startswith("dim3")):
            found = python(value, self.scope) if value.type == "call_expression" else _tuple(value, self.scope)
            self.scope.kinds[name] = "dim3"
        elif value.type == "argument_list":
            if len(value.named_children) != 1:
                raise NotTranslated(node, f"the declaration {text(node)[:60]!r}")
            found = python(value.named_children[0], self.scope)
            self.scope.kinds[name] = kind_of_type(ctype)
            if self.scope.kinds[name] == "options":
                found = f"dict({'device' if re.search('device', found) else 'dtype'}={found})"
        else:
            found = python(value, self.scope)
            of = kind(value, self.scope)
            known = kind_of_type(ctype) if ctype != "auto" else of
            if known == "int" and of == "float":
                found = f"int({found})"
            elif known == "float" and of == "int":
                found = f"float({found})"
            self.scope.kinds[name] = "tensor" if is_pointer and declarator.type == "pointer_declarator" else known
            if is_pointer and declarator.type == "pointer_declarator" and ctype in DTYPES:
                self.scope.dtypes[name] = f"torch.{DTYPES[ctype]}"
        self.put(f"{name_of(name)} = {found}", node)

    def _expression_statement(self, node: Node) -> None:
        if not node.named_children:
            return
        inner = node.named_children[0]
        if inner.type == "call_expression":
            self._call(inner)
        elif inner.type == "assignment_expression":
            sign = text(inner.child_by_field_name("operator"))
            left, right = (inner.child_by_field_name(side) for side in ("left", "right"))
            if re.search(r"cuda\w+\(", text(right)) and not re.search(r"\.\w*cuda", text(right)):
                return  # err = cudaGetLastError()
            if sign == "/=" and kind(left, self.scope) == "int":
                sign = "//="
            self.put(f"{python(left, self.scope)} {sign} {python(right, self.scope)}", node)
        elif inner.type == "update_expression":
            self.put(f"{python(inner.child_by_field_name('argument'), self.scope)} {text(inner)[-1]}= 1", node)
        elif inner.type == "binary_expression" and re.match(r"std::c(out|err)", text(inner)):
            return
        else:
            self._unknown(inner)

    def _return_statement(self, node: Node) -> None:
        value = node.named_children[0] if node.named_children else None
        if value is None or (value.type == "number_literal" and self.function.returns == "int"):
            self.put("return", node)
            return
        self.put(f"return {python(value, self.scope)}", node)

    def _if_statement(self, node: Node, word: str = "if") -> None:
        asked = node.child_by_field_name("condition")
        inner = asked.child_by_field_name("value")
        if re.search(r"cudaSuccess|\berr\b|cudaError", text(asked)):
            return  # a launch raises by itself
        consequence, alternative = node.child_by_field_name("consequence"), node.child_by_field_name("alternative")
        test = condition(inner, self.scope)
        if test.endswith(".is_cuda") and word == "if":
            self.comment(f"{self.function.file}:{line(node)}: on a GPU, or in the simulator")
            self.statement(consequence)  # on the CPU an operator's reference is taken
            return
        self.put(f"{word} {test}:", node)
        self._inside(consequence)
        if alternative is not None:
            other = alternative.named_children[-1]
            if other.type == "if_statement":
                self._if_statement(other, "elif")
            else:
                self.put("else:", other)
                self._inside(other)

    def _for_statement(self, node: Node) -> None:
        begin, until, update = (node.child_by_field_name(one) for one in ("initializer", "condition", "update"))
        pattern = re.fullmatch(r"(?:\w+\s+)*(\w+)\s*=\s*(.+?)\s*;?", text(begin), re.DOTALL)
        limit = re.fullmatch(r"(\w+)\s*<\s*(.+)", text(until), re.DOTALL)
        if not (
            pattern
            and limit
            and pattern[1] == limit[1]
            and re.fullmatch(rf"\+\+{limit[1]}|{limit[1]}\+\+", text(update))
        ):
            raise NotTranslated(node, f"a loop that counts in another way: {text(node)[:60]!r}")
        value = next(one for one in walk(begin) if one.type == "init_declarator").child_by_field_name("value")
        self.scope.kinds[pattern[1]] = "int"
        start, end = python(value, self.scope), python(until.child_by_field_name("right"), self.scope)
        self.put(f"for {name_of(pattern[1])} in range({'' if start == '0' else start + ', '}{end}):", node)
        self._inside(node.child_by_field_name("body"))

    def _switch_statement(self, node: Node) -> None:
        asked = python(node.child_by_field_name("condition").child_by_field_name("value"), self.scope)
        word = "if"
        for case in node.child_by_field_name("body").named_children:
            if case.type == "comment":
                continue
            value = case.child_by_field_name("value")
            inside = [one for one in case.named_children if value is None or one.id != value.id]
            if (
                not inside
                or not re.search(r"\b(break|return|throw)\b[^}]*\}?\s*$", text(inside[-1]))
                and value is not None
            ):
                raise NotTranslated(case, f"a case without break: {text(case)[:60]!r}")
            body = [one for one in inside if one.type != "break_statement"]
            self.put(f"{word} {asked} == {python(value, self.scope)}:" if value is not None else "else:", case)
            self.depth += 1
            self.block(body)
            self.depth -= 1
            word = "elif"

    def _throw_statement(self, node: Node) -> None:
        message = next((text(one) for one in walk(node) if one.type == "string_literal"), '"refused"')
        self.put(f"raise ValueError({message})", node)

    # --- calls ---

    def _call(self, node: Node) -> None:
        function, given = node.child_by_field_name("function"), node.child_by_field_name("arguments")
        _name, base = text(function), bare(text(function))
        syntax = next((one for one in node.named_children if one.type == "kernel_call_syntax"), None)
        if syntax is None and function.type != "field_expression":
            syntax = next((one for one in function.named_children if one.type == "kernel_call_syntax"), None)
        if syntax is not None:
            self._launch(node, function, syntax, given)
        elif _SYNCHRONISES.search(base) or _NOTHING.fullmatch(base) or re.match(r"cuda(Func)?Set\w+", base):
            if re.match(r"cudaFuncSet", base):
                self.comment(
                    f"{self.function.file}:{line(node)}: {base} is not needed: a launch asks for its shared memory"
                )
        elif base.startswith(("AT_DISPATCH", "DISPATCH", "TORCH_DISPATCH")):
            self._dispatch(node, given)
        elif is_check(base):
            for condition, message in refusals(base, given, self.scope):
                self.put(f"if {condition}:", node)
                self.lines.append("    " * (self.depth + 1) + f"raise ValueError({message!r})")
        else:
            self.put(python(node, self.scope), node)

    def _dispatch(self, node: Node, given: Node) -> None:
        """AT_DISPATCH_...: one body for all dtypes, in which `scalar_t` is one of them."""
        values = [one for one in given.named_children if one.type != "comment"]
        lambdas = [one for one in walk(given) if one.type == "lambda_expression"]
        place = next((index for index, one in enumerate(values) if one.type == "string_literal"), 0)
        if not lambdas or not place:
            raise NotTranslated(node, f"a dispatch that is none of PyTorch's: {text(node)[:60]!r}")
        self.put(f"scalar_t = {python(values[place - 1], self.scope)}", node)
        self.scope.kinds["scalar_t"] = "dtype"
        for one in lambdas[0].child_by_field_name("body").named_children:
            self.statement(one)

    def _launch(self, node: Node, function: Node, syntax: Node, given: Node) -> None:
        called, values = launch(node, function, syntax, given, self.kernels, self.scope)
        self.put(f"{called}(", node)
        self.lines += ["    " * (self.depth + 1) + f"{value}," for value in values]
        self.lines.append("    " * self.depth + ")")


def _tuple(node: Node, scope: Scope) -> str:
    found = arguments(node, scope)
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"
