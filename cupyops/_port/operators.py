"""An operator of a forward and its backward: the two are paired by their names, and so are their arguments and results.

What names or types tell is written; where they leave something open it is marked, or raises until it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .expressions import python
from .flow import Use, dispatched_dtypes, launched, uses
from .launches import Kernel
from .program import Function, Node, Program, bare, text, under, walk
from .scope import NotTranslated, Scope
from .values import VOID, Type
from .vocabulary import DTYPES, kind_of_type, name_of, type_of

_WORDS = r"(?<=_)(cuda|gpu|cu|launcher|kernel|wrapper|fast)(?=_|$)"
_FORWARD = re.compile(rf"_?(forward|fwd|fw)(?=_|$)|{_WORDS}", re.IGNORECASE)
_BACKWARD = re.compile(rf"_?(backward|bwd|bw|grad)(?=_|$)|{_WORDS}", re.IGNORECASE)
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # of RoiAlignForwardCUDAKernelLauncher
_IS_BACKWARD = re.compile(r"backward|bwd|(^|_)bw(_|$)|(^|_)grad(_|$)", re.IGNORECASE)


def pairs(program: Program, order: Sequence[Function], file: str) -> list[tuple[str, str, str]]:
    """(name, forward, backward) of the operators: the functions that the bindings name, else those that nobody calls."""
    called = {name for one in order for name in one.calls}
    tops = [one.name for name in program.bound.values() for one in program.named(name)[:1] if one in order] or [
        one.name for one in order if one.called not in called
    ]
    takes = {one.name for one in order if any(kind_of_type(ctype) == "tensor" for ctype, _ in one.taken)}
    tops = [one for one in dict.fromkeys(tops) if one in takes]
    backwards = {_stem(name, _BACKWARD): name for name in tops if _is_backward(name)}
    found = []
    for forward in tops:
        if not _is_backward(forward):
            stem = _stem(forward, _FORWARD)
            name = stem or re.sub(r"_?(cuda|gpu|kernel)$", "", re.sub(r"\W", "_", file)) or "extension"
            found.append((f"{name}_op", forward, backwards.get(stem, "")))
    return found


def _is_backward(name: str) -> bool:
    return _IS_BACKWARD.search(_HUMPS.sub("_", name)) is not None


def _stem(name: str, pattern: re.Pattern[str]) -> str:
    found = pattern.sub("", _HUMPS.sub("_", name))
    return re.sub("_+", "_", pattern.sub("", re.sub("_+", "_", found))).strip("_").lower()


@dataclass
class Operator:
    """One operator as it is written: its lines, the arguments that it takes, what is left to do."""

    name: str
    forward: Function
    backward: Function | None
    program: Program
    kernels: Mapping[str, Kernel]
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: bool = False

    def __post_init__(self) -> None:
        self.uses = uses(self.forward, self.program, self.kernels)
        self.place = f"{self.forward.file}:{self.forward.body.start_point[0] + 1}"
        given = self.forward.taken
        results = returned(self.forward, self.program)
        self.outputs = [one if one != "?" else f"y{index}" for index, one in enumerate(results)]
        tensors = [name for ctype, name in given if kind_of_type(ctype) == "tensor"]
        self.allocated = [] if self.outputs else [one for one in tensors if self.uses.get(one, Use()).written]
        if self.allocated == tensors:
            self.allocated = []  # nothing would be left to compute them of: they are changed in place
        self.outputs = self.outputs or list(self.allocated)
        self.given = [name_of(name) for _, name in given]
        self.inputs = [(ctype, name_of(name)) for ctype, name in given if name not in self.allocated]

    @property
    def names(self) -> list[str]:
        """The arguments that the operator takes."""
        return [name for _, name in self.inputs]

    @property
    def tensors(self) -> list[str]:
        """Names of the inputs that are tensors."""
        return [name for ctype, name in self.inputs if kind_of_type(ctype) == "tensor"]

    @property
    def differentiable(self) -> list[str]:
        """Names of the tensors that kernels do not take as integers."""
        return [name for name in self.tensors if not self.uses.get(name, Use()).is_integer]

    def write(self) -> None:
        """The operator, its forward, and its backward where there is one."""
        backward = Backward(self, self.backward) if self.backward is not None else None
        saved = [] if backward is None else backward.saved
        self._head([] if backward is None else backward.ignored)
        self._unsupported([] if backward is None else backward.without)
        self._forward(saved)
        if backward is not None:
            self.lines += ["", "", *backward.lines]

    def note(self, what: str, place: str = "") -> str:
        """List something to be checked, and return the line that marks it."""
        self.problems.append(f"{place or self.place}: check: {what}")
        return f"    # check this ({place or self.place}): {what}"

    def need(self, what: str) -> str:
        """Return a placeholder for what the user has to give: it raises until it is replaced."""
        self.missing = True
        return f"_missing({what!r})"

    def _head(self, constant: Sequence[int]) -> None:
        signature = ", ".join(self._parameter(ctype, name) for ctype, name in self.inputs)
        count = len(self.outputs)
        returns = "torch.Tensor" if count < 2 else f"tuple[{', '.join(['torch.Tensor'] * count)}]"
        self.problems.append(f"{self.place}: to write: the reference of {self.name}, in PyTorch")
        self.lines += [
            f'@cupyops.operator("ported::{self.name}"{self._declared(constant)})',
            f"def {self.name}({signature}) -> {returns}:",
            f'    """{self.place}: what it means, in PyTorch: CPU tensors, double backward and torch.func take it."""',
            f'    raise NotImplementedError("write the reference of {self.name}: what {self.forward.name} computes, in '
            'PyTorch")',
            "",
            "",
        ]

    def _declared(self, constant: Sequence[int]) -> str:
        """Write the options of the operator that follow from the C++.

        The dtypes that it dispatches over; outputs whose gradient its backward does not take; and that a kernel adds by
        atomics, in an order that is another each time.
        """
        functions = [self.forward] + ([] if self.backward is None else [self.backward])
        names = launched(functions, self.program) & set(self.kernels)
        by_first = self.tensors[:1] == self.differentiable[:1]  # which is held to them too
        dtypes = [f"torch.{one}" for one in dispatched_dtypes(functions, self.program) if by_first]
        found = [f", dtypes=({', '.join(dtypes)})"] if dtypes else []
        found += (
            [f", nondifferentiable=({', '.join(map(str, constant))}{',' * (len(constant) == 1)})"] if constant else []
        )
        found += [', nondeterministic="atomicAdd"'] if any(self.kernels[one].atomics for one in names) else []
        return "".join(found)

    def _parameter(self, ctype: str, name: str) -> str:
        default = self.program.default(self.forward, name)
        return f"{name}: {annotation(ctype, self.program)}" + (f" = {default}" if default is not None else "")

    def _unsupported(self, without: Sequence[str]) -> None:
        """Write the `unsupported` role: without elements the grid of the C++ is empty, and CUDA refuses to launch it.

        So it is where a gradient is wanted that the C++ has not.
        """
        asked = " and ".join(
            f"{name}.numel()" if "optional" not in ctype else f"({name} is None or {name}.numel())"
            for ctype, name in self.inputs
            if name in self.tensors
        )
        self.lines += [
            f"@{self.name}.unsupported",
            f"def _({', '.join(self.names)}):",
            *(
                f'    if not cupyops.aligned({one}, {size}):\n        return "{one} is not aligned to {size} bytes"'
                for one in self.tensors
                if (size := self.uses.get(one, Use()).alignment) > 1
            ),
            *(
                [
                    f"    if {' or '.join(f'{one}.requires_grad' for one in without)}:",
                    f'        return "{self.backward.name} has no gradient of {", ".join(without)}"',
                ]
                if without and self.backward is not None
                else []
            ),
            f'    return None if {asked} else "tensors without elements"',
            "",
            "",
        ]

    def _forward(self, saved: Sequence[str]) -> None:
        self.lines += [f"@{self.name}.forward", f"def _({', '.join(self.names)}):"]
        call = f"{name_of(self.forward.name)}({', '.join(self.given)})"
        kept = f"({', '.join(saved)}{',' if len(saved) == 1 else ''})"
        self.lines += contiguous(self.tensors)
        if not self.outputs:
            what = f"{self.forward.name} returns nothing: allocate the outputs, or name what it changes, mutates=(...)"
            self.lines += [self.note(what), f"    raise NotImplementedError({f'{self.place}: {what}'!r})"]
            return
        if self.allocated:
            self._allocations()
            self.lines.append(f"    {call}")
        elif len(self.outputs) == 1 and not saved:
            self.lines += [f"    return {call}, ()"]
            return
        else:
            self.lines.append(f"    {', '.join(self.outputs)} = {call}")
        results = self.outputs[0] if len(self.outputs) == 1 else f"({', '.join(self.outputs)})"
        self.lines.append(f"    return {results}, {kept}")

    def _allocations(self) -> None:
        """Outputs that the caller hands in: their dtypes are those of the kernels, their shapes nobody says."""
        what = f"{self.forward.name} writes to {', '.join(self.allocated)}: give their shapes; one that it reads too is an "
        what += "argument, named in mutates=(...)"
        self.lines.append(self.note(what))
        like = next(iter(self.differentiable or self.tensors), "")
        device = f"{like}.device" if like else '"cuda"'
        for one in self.allocated:
            dtype = _dtype(self.uses[one], like)
            shape = self.need(f"the shape of {one}")
            self.lines.append(f"    {name_of(one)} = torch.zeros({shape}, dtype={dtype}, device={device})")


def annotation(ctype: str, program: Program) -> str:
    """The type of a parameter as PyTorch's schemas have it; empty for a type that they do not have."""
    kind = type_of(ctype) or type_of(program.aliases.get(re.sub(r"\bconst\b|[&\s]", "", ctype), ""))
    return "" if kind is None else _annotated(kind)


_ANNOTATIONS = {"tensor": "torch.Tensor", "pointer": "torch.Tensor", "int": "int", "float": "float", "scalar": "float"}
_ANNOTATIONS |= {"bool": "bool", "string": "str", "dtype": "torch.dtype", "device": "torch.device"}


def _annotated(kind: Type) -> str:
    inner = [_annotated(one) for one in kind.of]
    if kind.kind == "optional" and inner[0]:
        return f"{inner[0]} | None"
    if kind.kind == "list" and inner and kind.of[0].kind in ("tensor", "int", "float", "bool"):
        return f"list[{inner[0]}]"
    return _ANNOTATIONS.get(kind.kind, "")


def _dtype(use: Use, like: str) -> str:
    return f"torch.{DTYPES[use.element]}" if use.element in DTYPES or not like else f"{like}.dtype"


# what stands before or behind the name of that of which it is the gradient
_OF = re.compile(r"(?:d_?l_?d_?|grad_?|d_|d|g|(?:top|bottom)_)(\w+)|(\w+?)_?(?:grads?|diff)", re.IGNORECASE)
_OF_THE_OUTPUT = re.compile(
    r"(?:top_?|out(?:put)?_?)?(?:grad|diff)s?(?:_?(?:y|out|outputs?))?|d_?y|d_?out|g_?y|g", re.IGNORECASE
)


class Backward:
    """The backward role: from where each argument of the C++ function comes, and where its results go."""

    def __init__(self, operator: Operator, function: Function) -> None:
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


def _defined(function: Function, name: str, operator: Operator) -> str:
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
