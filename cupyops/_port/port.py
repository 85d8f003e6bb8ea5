"""The whole: which functions are translated, what is written around them, and the operator of a forward and its backward."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._kernel.compile import declarations
from .._kernel.extension import text as extension_text
from ..errors import CupyopsError, InputError
from . import lambdas, structs
from .calls import written_to
from .expressions import constant_value
from .flow import Use
from .launches import Kernel
from .operators import Operator, annotation, pairs
from .program import Function, Program, adding, bare, is_stream, line, read, text, under
from .recursion import is_recursive
from .scope import Scope, changed
from .statements import Writer
from .values import DTYPE, FLOAT, INT, SCALAR, Type, Value
from .vocabulary import DTYPES, kind_of_type, name_of, type_of


@dataclass
class Ported:
    """Result of porting an extension.

    Attributes:
        files: the text of each file, by its name.
        functions: the functions that were translated.
        operators: (name, its forward, its backward or none) of each operator.
        problems: what could not be translated, and what is to be checked, with lines of the C++.
    """

    files: dict[str, str] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    operators: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def port(paths: list[Path], source: str, options: tuple[str, ...] = ()) -> Ported:
    """Translate the files; `source` is how the Python names the first, which has the kernels.

    Raises:
        InputError: no host function launches a kernel.
        SourceError: a header of the extension is not found.
        MissingDependencyError: tree-sitter is not installed.
    """
    try:
        return _ported(read(paths, options), paths, source, options)
    except RecursionError:
        raise InputError(
            f"{paths[0].name}: something is nested too deep in it to be read: take the expression, or the blocks, apart"
        ) from None


def _ported(program: Program, paths: list[Path], source: str, options: tuple[str, ...]) -> Ported:
    ported = Ported()
    kernels = _kernels(paths[0], options)
    program.plain = next((name for name, one in kernels.items() if not one.template and name.isidentifier()), "")
    order = _wanted(program)
    if not order:
        why = "".join(f"; {one}" for one in _hints(program))
        raise InputError(f"{paths[0].name}: no host function launches a kernel, expected one with <<<...>>>{why}")
    writing = _Writing(program, kernels, ported, {one.name for one in order})
    for function in order:
        if not function.types:
            writing.request(function, {})
    parts = writing.write()
    written_out = "\n".join(parts)
    made = [
        structs.definition(name, of)
        for name in program.structs
        if (of := structs.members(name, program)) and name in _structs(written_out, program)
    ]
    constants = _constants(program, writing.used, ported)
    stem = re.sub(r"\W", "_", paths[0].stem)
    operators = [
        Operator(name, program.functions[forward], program.functions.get(backward), program, kernels)
        for name, forward, backward in pairs(program, order, paths[0].stem)
        if _has_schema(program.functions[forward], program, ported)
    ]
    for one in operators:
        one.write()
        parts.append("\n".join(one.lines))
        ported.problems += one.problems
        ported.operators.append((one.name, one.forward.name, "" if one.backward is None else one.backward.name))
    if any(one.missing for one in operators):
        parts.append(_MISSING)
    if aliases := _aliases(program, order, operators):
        parts.append(aliases)
    ported.functions = [one.name for one in order]
    given = f", options={options!r}" if options else ""
    problems = "".join(f"\n    {one}" for one in ported.problems) or "\n    nothing"
    head = _HEAD.format(file=paths[0].name, problems=problems, source=source, given=given)
    written = "\n".join([*made, *constants, *parts])
    if modules := [one for one in ("ctypes", "math", "os", "sys", "time") if re.search(rf"\b{one}\.", written)]:
        imports = "".join(f"import {one}\n" for one in modules)
        head = head.replace("import torch\n", f"{imports}\nimport torch\n", 1)
    if made:
        head = head.replace("import torch\n", "import numpy as np\nimport torch\n", 1)
    if re.search(r"\bcpp\.", written):
        head = head.replace("import cupyops\n", "import cupyops\nfrom cupyops import cpp\n", 1)
    ported.files[f"{stem}.py"] = (
        "\n\n\n".join([head.rstrip(), *made, *(["\n".join(constants)] if constants else []), *parts]) + "\n"
    )
    ported.files[f"test_{stem}.py"] = _tests(stem, paths[0].name, operators)
    return ported


def _has_schema(function: Function, program: Program, ported: Ported) -> bool:
    """Return True if PyTorch has a type for each parameter of a function; else it is listed as no operator."""
    unknown = next((one for one, _ in function.taken if not annotation(one, program)), None)
    if unknown is not None:
        what = f"{function.name} is a function, and no operator: PyTorch has no schema for {' '.join(unknown.split())[:60]}"
        ported.problems.append(f"{function.file}:{function.body.start_point[0] + 1}: check: {what}")
    return unknown is None


_HEAD = '''\
"""Ported from {file} by `python -m cupyops port`. The kernels are those of that file, unchanged.

To do, by lines of the C++:{problems}
"""

from __future__ import annotations

import torch

import cupyops

ext = cupyops.extension({source!r}{given})
'''


def _structs(written: str, program: Program) -> set[str]:
    """The structs that the functions make, and those that lie inside of them."""
    found = {name for name in program.structs if f"_{name}()" in written}
    for name in reversed(program.structs):
        if name in found:
            found |= {
                kind.name for kind, _, _ in (structs.members(name, program) or {}).values() if kind.kind == "struct"
            }
    return found


_MISSING = """\
def _missing(what):
    raise NotImplementedError(f"to be given: {what}")"""


def _kernels(path: Path, options: tuple[str, ...]) -> dict[str, Kernel]:
    extension = extension_text.load(path.resolve(), None, options)
    atomics = adding("\n".join([extension.source.text, *extension.source.includes.values()]))
    found, written = dict[str, Kernel](), path.read_text(encoding="utf-8", errors="replace")
    for full in extension.kernels:
        function, name, template, types = declarations.told(extension.source, full), bare(full), [], []
        if function is not None:  # else a macro defines it, and says what it takes
            template = [(one.name, one.is_type) for one in function.template if not one.has_default]
            with contextlib.suppress(CupyopsError):
                types = [ctype for ctype, _ in function.parameters]
        if (first := re.sub(r"_\d+$", "", name)) in found and not re.search(rf"\b{name}\b", written):
            name = first  # one of several, which the extension has named apart
        kernel = Kernel(full if name in found else bare(full), template, types, bare(full) in atomics)
        kernel.space = tuple(full.split("::")[:-1])
        if (before := found.setdefault(name, kernel)) is not kernel:
            before.others.append(kernel)
            before.name = "::".join([*before.space, bare(before.name)])
    return found


def _hints(program: Program) -> list[str]:
    """Say why there may be no function that launches."""
    found = [
        f"the launch in the macro {name} ({place}) is not read: write it into a function"
        for name, place in program.macros.items()
    ]
    found += [
        f"{one.name} ({one.file}) calls {called}, which is not read: write <<<...>>>"
        for one in program.functions.values()
        for called in sorted(one.calls)
        if re.fullmatch(r"cu(da)?Launch(Cooperative)?Kernel\w*", called)
    ]
    return found + [f"from {place} on it does not read as C++: is a bracket missing?" for place in program.broken]


def _wanted(program: Program) -> list[Function]:
    """The functions that launch, and those that call them or that they call, in the order of the files."""
    called = {
        name: {one.name for found in one_.calls for one in program.named(found)}
        for name, one_ in program.functions.items()
    }
    wanted = {name for name, one in program.functions.items() if one.launches}
    while more := {name for name, others in called.items() if name not in wanted and others & wanted}:
        wanted |= more
    while more := {one for name in wanted for one in called[name]} - wanted:
        wanted |= more
    return [one for name, one in program.functions.items() if name in wanted and not is_recursive(one)]


@dataclass
class _Writing:
    """The functions as they are written: each once for every set of types that its template is called with."""

    program: Program
    kernels: dict[str, Kernel]
    ported: Ported
    wanted: set[str]
    used: set[str] = field(default_factory=set)
    names: dict[tuple[str, tuple[Type, ...]], str] = field(default_factory=dict)
    pending: list[tuple[Function, dict[str, Type], str]] = field(default_factory=list)

    def request(self, function: Function, types: Mapping[str, Type]) -> str:
        """The Python name of a function, for these types of its template."""
        key = function.name, tuple(types.values())
        if key not in self.names:
            count = sum(name == function.name for name, _ in self.names)
            self.names[key] = name_of(function.name) + (f"_{count + 1}" if count else "")
            self.pending.append((function, dict(types), self.names[key]))
        return self.names[key]

    def write(self) -> list[str]:
        """The Python of each."""
        found = []
        while self.pending:
            found.append("\n".join(self._function(*self.pending.pop(0))))
        return found

    def _function(self, function: Function, types: dict[str, Type], name: str) -> list[str]:
        program, scope = self.program, Scope(self.program, types=dict(types), request=self.request, file=function.file)
        scope.space = function.space
        scope.changed = changed(function.body)
        writer = Writer(
            function,
            scope,
            self.kernels,
            outputs=[name for _, name in function.parameters if name in written_to(function)],
        )
        scope.inner = lambdas.reader(writer)
        for spelled, parameter in function.parameters:
            self._parameter(function, spelled, parameter, scope)
        taken = [scope.frames[0][one] for _, one in function.parameters]
        rounded = [one.name for one in taken if one.value.type == FLOAT and not one.value.lax]
        for parameter, is_type in function.template:
            if parameter:
                scope.declare(parameter, DTYPE if is_type else INT)
                if is_type:
                    scope.types[parameter] = SCALAR
        if function.returns != "auto":
            writer.returns = type_of(function.returns, scope.types) or structs.kind_of(function.returns, program)
        writer.block(function.body.named_children)
        parameters = [
            scope.frames[0][one].name + (f"={program.default(function, one)}" if one in function.defaults else "")
            for _, one in function.taken
        ]
        self.used |= {one for one in function.defaults.values() if one in program.constants}
        if template := [name_of(one) for one, _ in function.template if one]:
            parameters += ["*", *template]
        lines = [f"    {one} = cpp.to_float({one})" for one in rounded] + writer.lines
        if writer.outputs:
            last = f"    return {', '.join(scope.frames[0][one].name for one in writer.outputs)}"
            lines = [*lines, last] if not lines[-1].startswith("    return") else lines
            if function.called in program.bound.values():
                what = f"{function.called} returns {', '.join(writer.outputs)} besides: C++ writes to what is given for them"
                writer.problems.append(f"{function.file}:{function.body.start_point[0] + 1}: check: {what}")
        scope.read(function.body)
        writer.problems += _signature(function)
        place = f"{function.file}:{function.body.start_point[0] + 1}"
        self.ported.problems += [*writer.problems, *self._conditions(function)]
        self.used |= scope.used
        return [f"def {name}({', '.join(parameters)}):", f'    """{place}."""', *lines]

    def _parameter(self, function: Function, spelled: str, name: str, scope: Scope) -> None:
        """A parameter as the function has it: a float is rounded where it is computed with, as C++ rounds an argument."""
        aliases = {one: kind for one, what in self.program.aliases.items() if (kind := type_of(what)) is not None}
        templates = {one: SCALAR for one, is_type in function.template if one and is_type}
        kind = type_of(spelled, aliases | templates | scope.types) or structs.kind_of(spelled, self.program)
        kind = kind or Type("object", name=spelled)
        if is_stream(spelled):
            kind = Type("guard")
        variable = scope.declare(name, kind)
        if kind.kind == "pointer":
            element = re.sub(r"\bconst\b|\b__restrict__\b|[*&]", " ", spelled).strip()
            written = f"torch.{DTYPES[element]}" if element in DTYPES else f"{variable.value.code}.dtype"
            variable.value = replace(variable.value, element=written)
        if kind == FLOAT and name not in scope.changed:
            code = variable.value.code
            variable.value = Value(f"cpp.to_float({code})", FLOAT, lax=code)

    def _conditions(self, function: Function) -> list[str]:
        """Branches of `#if` that are left out, since nothing defines what they ask for."""
        first, last = function.node.start_point[0] + 1, function.node.end_point[0] + 1
        return [
            f"{file}:{line}: check: {name} is taken as not defined; give -D{name} where it is"
            for file, line, name in self.program.taken
            if file == function.file and first <= line <= last
        ]


_OF_SIGNATURE = ("comment", "storage_class_specifier", "type_qualifier", "noexcept")  # that mean nothing here


def _signature(function: Function) -> list[str]:
    """List parts of a signature that are not translated, such as attributes: all but types, a name and parameters."""
    found, node = list[str](), function.node
    while node is not None:
        parts = [under(node, field) for field in ("type", "declarator", "body", "parameters")]
        known = {one.id for one in parts if one is not None}
        for one in node.named_children:
            inside = one.type.endswith("declarator") or one.id in known
            if not inside and one.type not in _OF_SIGNATURE:
                found.append(f"{function.file}:{line(one)}: check: {text(one)[:60]!r} of {function.called} is left out")
        node = next((one for one in node.named_children if one.type.endswith("declarator")), None)
        node = None if node is None or node.type == "identifier" else node
    return found


def _constants(program: Program, used: set[str], ported: Ported) -> list[str]:
    """Constants of the files that the functions use, in Python."""
    found: dict[str, str] = {}
    pending = sorted(used)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        value, place = program.constants[name]
        scope = Scope(program)
        made = constant_value(name, value, scope)
        assert made is not None  # what has no translation is refused where it is used
        found.pop(name, None)
        found[name] = f"{name_of(name)} = {made.code}  # {place}"
        inner = sorted(scope.used - {name})
        for one in inner:
            found.pop(one, None)
        pending += inner
        ported.problems += [f"{place}: check: {note}" for note in scope.notes]
    return list(reversed(found.values()))


def _aliases(program: Program, order: list[Function], operators: list[Operator]) -> str:
    """The functions by the names that the bindings give them: what called the extension calls this module."""
    taken = {one.name for one in order} | {one.name for one in operators}
    found = [
        f"{name} = {name_of(one.name)}"
        for name, function in program.bound.items()
        for one in program.named(function)[:1]
        if one in order and name not in taken and name.isidentifier()
    ]
    return "\n".join(["# as the bindings name them", *found]) if found else ""


def _tests(stem: str, file: str, operators: list[Operator]) -> str:
    lines = [
        f'"""What was ported from {file}, against its reference; it fails until what is marked has been looked at."""',
        "",
        "from pathlib import Path",
        "",
        "import pytest",
        "import torch",
        "",
        "import cupyops",
        f"import {stem}",
        "",
        "# What is left as it was in the C++, hazard by hazard, and why. Add what you decide to leave so, take out what the",
        "# operator checks by now; `cupyops.testing.hazards()` has all of them.",
        "LEFT_OPEN: dict[str, dict[str, str]] = {",
        *(line for one in operators for line in _left_open(one)),
        "}",
        "",
        "",
        "def test_nothing_is_left_to_check():",
        '    """Take each mark away when you have looked at its line."""',
        f'    text = Path({stem}.__file__).read_text(encoding="utf-8")',
        '    left = [line for line in text.splitlines() if "check this" in line]',
        "    assert not left",
    ]
    for one in operators:
        name, samples = one.name, ", ".join(_sample(ctype, given, one) for ctype, given in one.inputs)
        lines += [
            "",
            "",
            '@pytest.mark.parametrize("backend", ["simulator", pytest.param("gpu", marks=pytest.mark.skipif('
            'not torch.cuda.is_available(), reason="no CUDA GPU"))])',
            f"def test_{name}(backend):",
            "    torch.manual_seed(0)  # the same arguments each time",
            "    # check this: arguments that the operator takes; this test fails until they are given",
            f'    args = pytest.fail("give the arguments of {name}: {samples}")',
            f'    cupyops.testing.check({stem}.{name}, args, backends=backend, skip=LEFT_OPEN["{name}"]).raise_if_failed()',
        ]
    return "\n".join(lines) + "\n"


def _left_open(operator: Operator) -> list[str]:
    """Write the entry of LEFT_OPEN for an operator: kernels do not check indices, so index tensors are listed there."""
    integers = [one for one in operator.tensors if operator.uses.get(one, Use()).is_integer]
    if not integers:
        return [f'    "{operator.name}": {{}},']
    why = f"kernels trust {', '.join(integers)}: values out of range are the caller's to avoid, as they were in the C++"
    return [f'    "{operator.name}": {{', f'        "indices": "{why}",', "    },"]


def _sample(ctype: str, name: str, operator: Operator) -> str:
    what = kind_of_type(ctype) or ctype
    if what == "tensor" and operator.uses.get(name, Use()).element in DTYPES:
        what = f"tensor of {DTYPES[operator.uses[name].element]}"
    return f"{name} (a {what})"
