"""The backward of a port: what its arguments are in terms of the forward's, and of what its results are the gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from .expressions import python
from .flow import Use, uses
from .launches import Kernel
from .program import Function, Node, Program, bare, text, under, walk
from .scope import NotTranslated, Scope
from .values import VOID, Type
from .vocabulary import kind_of_type, name_of, type_of

# what stands before or behind the name of that of which it is the gradient
_OF = re.compile(r"(?:d_?l_?d_?|grad_?|d_|d|g|(?:top|bottom)_)(\w+)|(\w+?)_?(?:grads?|diff)", re.IGNORECASE)
_OF_THE_OUTPUT = re.compile(
    r"(?:top_?|out(?:put)?_?)?(?:grad|diff)s?(?:_?(?:y|out|outputs?))?|d_?y|d_?out|g_?y|g", re.IGNORECASE
)


class Forward(Protocol):
    """Parts of an operator that its backward uses."""

    name: str
    forward: Function
    program: Program
    kernels: Mapping[str, Kernel]
    outputs: list[str]

    @property
    def names(self) -> list[str]: ...

    @property
    def tensors(self) -> list[str]: ...

    @property
    def differentiable(self) -> list[str]: ...

    def note(self, what: str, place: str = "") -> str: ...

    def need(self, what: str) -> str: ...


class Backward:
    """The backward role: from where each argument of the C++ function comes, and where its results go."""

    def __init__(self, operator: Forward, function: Function) -> None:
        self.operator, self.function = operator, function
        self.place = f"{function.file}:{function.body.start_point[0] + 1}"
        self.uses = uses(function, operator.program, operator.kernels)
        outputs = operator.outputs
        self.grads = {one: f"grad_{one}" for one in outputs} if len(outputs) > 1 else dict.fromkeys(outputs, "grad_y")
        if not outputs:
            self.grads = {"": "grad_y"}
        self.saved: list[str] = []
        self.body: list[str] = []
        self.unknown: list[str] = []
        self.taken: dict[str, str] = {}  # what the forward has under the same name
        self.without: list[str] = []  # inputs of which it gives no gradient
        self.results = returned(function, operator.program)
        parameters = function.taken
        written = [name for ctype, name in parameters if self.uses.get(name, Use()).written]
        self.allocated = [] if self.results else written
        self.of = self._of_results()
        self.sizes = self._sizes()
        given = [self._argument(ctype, name) for ctype, name in parameters]
        self.ignored = self._ignored(given, parameters)
        self.lines = [
            f"@{operator.name}.backward",
            f"def _(saved, {', '.join([*self.grads.values(), *operator.names, 'needs_grad'])}):",
        ]
        if self.unknown:
            what = f"{function.name} also takes {', '.join(self.unknown)}: give what forward computes of it"
            self.lines.append(operator.note(what, self.place))
        self.lines += contiguous([*(one for one in self.grads.values() if one in given), *operator.tensors])
        if self.saved:
            self.lines.append(f"    {', '.join(self.saved)}{',' if len(self.saved) == 1 else ''} = saved")
        if self.taken:
            what = f"{', '.join(self.taken)}: taken to be what {operator.forward.name} has under these names"
            self.lines.append(operator.note(what, self.place))
            self.lines.append(f"    {', '.join(self.taken)} = {', '.join(self.taken.values())}")
        if self.allocated:
            what = f"{', '.join(self.allocated)}: each as large as what it is the gradient of, by its name"
            self.lines.append(operator.note(what, self.place))
        self.lines += self.body
        self._return(f"{name_of(function.name)}({', '.join(given)})")
        self.saved = [name_of(one) for one in self.saved]

    def _argument(self, ctype: str, name: str) -> str:
        operator, is_tensor = self.operator, kind_of_type(ctype) == "tensor"
        if name in self.allocated:
            return self._gradient(name)
        if name_of(name) in operator.names:
            return name_of(name)
        if is_tensor and name in operator.outputs:
            self.saved.append(name)
            return name_of(name)
        if is_tensor and (of := _gradient_of(name, self.grads)):
            return self.grads[of]
        if is_tensor and _OF_THE_OUTPUT.fullmatch(name) and len(self.grads) == 1:
            return next(iter(self.grads.values()))
        if not is_tensor and name in self.sizes:
            return self.sizes[name]
        if not is_tensor and (found := _defined(operator.forward, name, operator)):
            self.taken[name_of(name)] = found
            return name_of(name)
        self.unknown.append(name)
        return operator.need(name)

    def _of_results(self) -> list[str]:
        """Name for each result the input whose gradient it is; empty where names do not tell."""
        operator, results = self.operator, self.results or self.allocated
        of = [_gradient_of(one, operator.tensors) for one in results]
        if not all(of) and len(results) == 1 and len(operator.differentiable) == 1:
            of = list(operator.differentiable)  # there is no other
        return of if all(of) and len(set(of)) == len(of) else []

    def _sizes(self) -> dict[str, str]:
        """Arguments that are sizes of a gradient that it allocates, hence of the input: `n` of `zeros({b, c, n}, ...)`."""
        found: dict[str, str] = {}
        for node in walk(self.function.body):
            name = text(under(node, "declarator")) if node.type == "init_declarator" else ""
            value = under(node, "value") if name in self.results and self.of else None
            if value is None or value.type != "call_expression":
                continue
            shape = next(iter(under(value, "arguments").named_children), None)
            if shape is not None and shape.type == "initializer_list":
                of = self.of[self.results.index(name)]
                sizes = [one for one in shape.named_children if one.type != "comment"]
                found |= {
                    text(one): f"{of}.size({place})" for place, one in enumerate(sizes) if one.type == "identifier"
                }
        return found

    def _ignored(self, given: Sequence[str], parameters: Sequence[tuple[str, str]]) -> list[int]:
        """The places of outputs whose gradient it does not take: they have none."""
        kinds = {name: kind_of_type(ctype) for ctype, name in parameters}
        if any(kinds[one] == "tensor" for one in self.unknown) or not any(one in given for one in self.grads.values()):
            return []
        return [place for place, one in enumerate(self.grads.values()) if one not in given]

    def _gradient(self, name: str) -> str:
        """A gradient that the caller allocates: zeros of the shape of what it is the gradient of."""
        of = _gradient_of(name, self.operator.tensors)
        shape = f"torch.zeros_like({of})" if of else f"torch.zeros({self.operator.need(f'the shape of {name}')})"
        self.body.append(f"    {name_of(name)} = {shape}")
        return name_of(name)

    def _return(self, call: str) -> None:
        """Each result goes to the input whose name it has; where that does not tell, it is marked."""
        operator, inputs, of = self.operator, self.operator.tensors, self.of
        if self.allocated:
            self.lines.append(f"    {call}")
        if not of:
            what = "the order of its results, and which have none: one gradient, or None, for each tensor of forward"
            self.lines.append(operator.note(what, self.place))
            self.lines.append(f"    return {', '.join(map(name_of, self.allocated)) or call}")
            return
        names = dict(zip(of, map(name_of, self.allocated))) or {one: f"grad_{one}" for one in of}
        if not self.allocated:
            self.lines.append(f"    {', '.join(names.values())} = {call}")
        self.without = [one for one in operator.differentiable if one not in of]
        if self.without:
            what = f"{self.function.name} has no gradient of {', '.join(self.without)}"
            self.lines += [
                f"    if {' or '.join(f'needs_grad.{one}' for one in self.without)}:",
                f'        raise NotImplementedError("{what}")',
            ]
        found = {one: f"{name} if needs_grad.{one} else None" for one, name in names.items()}
        self.lines.append(f"    return {', '.join(found.get(one, 'None') for one in inputs)}")


def contiguous(tensors: Sequence[str]) -> list[str]:
    """A copy of what has strides, which the C++ refuses or does not see."""
    return [f"    {', '.join(tensors)} = cupyops.contiguous({', '.join(tensors)})"] if tensors else []


def returned(function: Function, program: Program) -> list[str]:
    """The names that it returns, `?` for what has none; empty where it returns no tensor."""
    statements = [one for one in walk(function.body) if one.type == "return_statement" and one.named_children]
    kind = type_of(function.returns)
    if not statements or (kind is not None and (kind == VOID or kind.is_number)):
        return []
    value = statements[-1].named_children[0]
    if value.type == "initializer_list":
        return [_name(one) for one in value.named_children]
    if value.type == "call_expression":
        called = text(under(value, "function"))
        if re.search(r"make_tuple|tie", called):
            return [_name(one) for one in under(value, "arguments").named_children]
        if (others := program.named(bare(called))) and bare(called) != function.called:
            return returned(others[0], program)
    return [_name(value)]


def _name(node: Node) -> str:
    return text(node) if node.type == "identifier" else "?"


def _simplify(name: str) -> str:
    return name.replace("_", "").lower()


def _gradient_of(name: str, names: Mapping[str, str] | Sequence[str]) -> str:
    """Return the name whose gradient this is, by its own: `grad_x`, `dL_dx`, `gx`, `x_grad`; empty for none."""
    known = {_simplify(one): one for one in names}
    rest = name
    while (match := _OF.fullmatch(rest.strip("_"))) is not None:
        rest = match[1] or match[2]
        if _simplify(rest) in known:
            return known[_simplify(rest)]
    return ""


def _defined(function: Function, name: str, operator: Forward) -> str:
    """Return the forward's value of a name, in terms of its arguments: a variable's, or that of an argument passed on."""
    for node in walk(function.body):
        value: Node | None = None
        if node.type == "init_declarator" and text(under(node, "declarator")) == name:
            value = under(node, "value")
        elif node.type == "call_expression":
            called = operator.program.named(bare(text(under(node, "function"))))
            given = [one for one in under(node, "arguments").named_children if one.type != "comment"]
            names = [one for _, one in called[0].parameters] if called else []
            value = given[names.index(name)] if name in names and len(given) == len(names) else None
        if value is None:
            continue
        scope = Scope(operator.program)
        for ctype, one in function.parameters:
            scope.declare(one, type_of(ctype) or Type("object"))
        try:
            found = python(value, scope).code
        except NotTranslated:
            continue
        words = {text(one) for one in walk(value) if one.type == "identifier"}
        if not (scope.notes or scope.used or "cpp." in found or {*map(name_of, words)} - set(operator.names)):
            return found
    return ""
