"""An operator of a forward and its backward: the two are paired by their names, and so are their arguments and results.

What names or types tell is written; where they leave something open it is marked, or raises until it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .backward import Backward, contiguous, returned
from .flow import Use, dispatched_dtypes, launched, uses
from .launches import Kernel
from .program import Function, Program
from .values import Type
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
