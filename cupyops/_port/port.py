"""The whole: which functions are translated, what is written around them, and the operator of a forward and its backward."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .._kernel.compile import declarations
from .._kernel.extension import text as extension_text
from ..errors import CupyopsError, InputError
from .expressions import python
from .flow import Use
from .launches import Kernel
from .operators import Operator, pairs
from .program import Function, Program, adding, bare, parser, read, walk
from .scope import NotTranslated, Scope
from .statements import Writer
from .vocabulary import DTYPES, kind_of_type, name_of


@dataclass
class Ported:
    """What was made of an extension.

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
        return _ported(read(paths), paths, source, options)
    except RecursionError:
        raise InputError(
            f"{paths[0].name}: something is nested too deep in it to be read: take the expression, or the blocks, apart"
        ) from None


def _ported(program: Program, paths: list[Path], source: str, options: tuple[str, ...]) -> Ported:
    ported = Ported()
    kernels = _kernels(paths[0], options)
    order = _wanted(program)
    if not order:
        why = "".join(f"; {one}" for one in _hints(program))
        raise InputError(f"{paths[0].name}: no host function launches a kernel, expected one with <<<...>>>{why}")
    used: set[str] = set()
    parts: list[str] = []
    for function in order:
        lines, found = _translated(function, program, kernels, ported)
        used |= found
        parts.append("\n".join(lines))
    helpers = _helpers(program, used, ported)
    stem = re.sub(r"\W", "_", paths[0].stem)
    operators = [
        Operator(name, program.functions[forward], program.functions.get(backward), program, kernels)
        for name, forward, backward in pairs(program, order, paths[0].stem)
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
    if "math." in "".join([*helpers, *parts]):
        head = head.replace("import torch\n", "import math\n\nimport torch\n", 1)
    ported.files[f"{stem}.py"] = (
        "\n\n\n".join(["\n".join([head.rstrip(), *(["", *helpers] if helpers else [])]), *parts]) + "\n"
    )
    ported.files[f"test_{stem}.py"] = _tests(stem, paths[0].name, operators)
    return ported


_HEAD = '''\
"""Ported from {file} by `python -m cupyops port`. The kernels are those of that file, unchanged.

To do, by lines of the C++:{problems}
"""

from __future__ import annotations

import torch

import cupyops

ext = cupyops.extension({source!r}{given})
'''


_MISSING = """\
def _missing(what):
    raise NotImplementedError(f"to be given: {what}")"""


def _kernels(path: Path, options: tuple[str, ...]) -> dict[str, Kernel]:
    extension = extension_text.load(path.resolve(), None, options)
    atomics = adding("\n".join([extension.source.text, *extension.source.includes.values()]))
    found = {}
    for full in extension.kernels:
        function = declarations.told(extension.source, full)
        if function is None:  # a macro defines it, and says what it takes
            found[bare(full)] = Kernel(bare(full), [], [], bare(full) in atomics)
            continue
        template = [(one.name, one.is_type) for one in function.template if not one.has_default]
        try:
            types = [ctype for ctype, _ in function.parameters]
        except CupyopsError:
            types = []
        found[bare(full)] = Kernel(bare(full), template, types, bare(full) in atomics)
    return found


def _hints(program: Program) -> list[str]:
    """Why there may be no function that launches."""
    found = [
        f"the launch in the macro {name} ({place}) is not read: write it into a function"
        for name, (_, value, place) in program.macros.items()
        if "<<<" in value
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
    wanted = {name for name, one in program.functions.items() if one.launches}
    while more := {name for name, one in program.functions.items() if name not in wanted and one.calls & wanted}:
        wanted |= more
    if not wanted:
        return []
    while (
        more := {name for one in wanted for name in program.functions[one].calls if name in program.functions} - wanted
    ):
        wanted |= more
    return [one for name, one in program.functions.items() if name in wanted]


def _translated(
    function: Function, program: Program, kernels: dict[str, Kernel], ported: Ported
) -> tuple[list[str], set[str]]:
    scope = Scope(program)
    for ctype, name in function.parameters:
        scope.kinds[name] = kind_of_type(ctype)
        if "*" in ctype:
            element = re.sub(r"\bconst\b|\b__restrict__\b|[*&]", " ", ctype).strip()
            scope.dtypes[name] = f"torch.{DTYPES[element]}" if element in DTYPES else f"{name_of(name)}.dtype"
    scope.kinds |= {name: "dtype" if is_type else "int" for name, is_type in function.template if name}
    writer = Writer(function, scope, kernels)
    writer.block(function.body.named_children)
    parameters = [
        name_of(name) + (f"={function.defaults[name]}" if name in function.defaults else "")
        for _, name in function.taken
    ]
    if template := [name_of(name) for name, _ in function.template if name]:
        parameters += ["*", *template]
    place = f"{function.file}:{function.body.start_point[0] + 1}"
    ported.problems += writer.problems
    return [f"def {name_of(function.name)}({', '.join(parameters)}):", f'    """{place}."""', *writer.lines], scope.used


def _helpers(program: Program, used: set[str], ported: Ported) -> list[str]:
    """Constants and macros of the file that the functions use, in Python."""
    found: dict[str, str] = {}
    pending = sorted(used)
    while pending:
        name = pending.pop()
        if name in found or name in program.functions:
            continue
        parameters: list[str] | None = None
        if name in program.macros:
            parameters, value, place = program.macros[name]
        elif name in program.constants:
            value, place = program.constants[name]
        else:
            continue
        scope = Scope(program, dict.fromkeys(parameters or (), "int"))
        found[name] = _helper(name, parameters, value, place, scope, ported)
        pending += sorted(scope.used - set(found))
    return list(reversed(found.values()))


def _helper(name: str, parameters: list[str] | None, value: str, place: str, scope: Scope, ported: Ported) -> str:
    root = parser().parse(f"auto found = {value.replace(chr(92), ' ')};".encode()).root_node
    node = next((one for one in walk(root) if one.type == "init_declarator"), None)
    try:
        if node is None or root.has_error:
            raise ValueError
        written = python(node.child_by_field_name("value"), scope)
    except (NotTranslated, ValueError) as error:
        why = error.why if isinstance(error, NotTranslated) else f"the macro {name}"
        ported.problems.append(f"{place}: not translated: {why}")
        return f"# {place}: {name} is not translated: {' '.join(value.split())}"
    ported.problems += [f"{place}: check: {note}" for note in scope.notes]
    notes = "".join(f"# check this ({place}): {note}\n" for note in scope.notes)
    if parameters is None:
        return f"{notes}{name} = {written}  # {place}"
    return f"\n\n{notes}def {name}({', '.join(parameters)}):  # {place}\n    return {written}"


def _aliases(program: Program, order: list[Function], operators: list[Operator]) -> str:
    """The functions by the names that the bindings give them: what called the extension calls this module."""
    taken = {one.name for one in order} | {one.name for one in operators}
    found = [
        f"{name} = {name_of(function)}"
        for name, function in program.bound.items()
        if function in {one.name for one in order} and name not in taken and name.isidentifier()
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
    """Of indices kernels know no bound: they read or write where these say."""
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
