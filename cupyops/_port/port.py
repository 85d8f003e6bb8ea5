"""The whole: which functions are translated, what is written around them, and the operator of a forward and its backward."""

from __future__ import annotations

import keyword
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from .._kernel.compile import declarations
from .._kernel.extension import text as extension_text
from ..errors import CupyopsError, InputError
from .expressions import python
from .launches import Kernel
from .program import Function, Program, bare, parser, read, walk
from .scope import NotTranslated, Scope
from .statements import Writer
from .vocabulary import kind_of_type, name_of


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
    program, ported = read(paths), Ported()
    kernels = _kernels(paths[0], options)
    order = _wanted(program)
    if not order:
        raise InputError(f"{paths[0].name}: no host function launches a kernel, expected one with <<<...>>>")
    used: set[str] = set()
    parts: list[str] = []
    for function in order:
        lines, found = _translated(function, program, kernels, ported)
        used |= found
        parts.append("\n".join(lines))
    helpers = _helpers(program, used, ported)
    pairs = _pairs(program, order)
    for name, forward, backward in pairs:
        parts.append(_operator(name, program.functions[forward], program.functions.get(backward), ported))
        ported.operators.append((name, forward, backward))
    stem = re.sub(r"\W", "_", paths[0].stem)
    ported.functions = [one.name for one in order]
    given = f", options={options!r}" if options else ""
    problems = "".join(f"\n    {one}" for one in ported.problems) or "\n    nothing"
    head = _HEAD.format(file=paths[0].name, problems=problems, source=source, given=given)
    if "math." in "".join([*helpers, *parts]):
        head = head.replace("import torch\n", "import math\n\nimport torch\n", 1)
    ported.files[f"{stem}.py"] = (
        "\n\n\n".join(["\n".join([head.rstrip(), *(["", *helpers] if helpers else [])]), *parts]) + "\n"
    )
    ported.files[f"test_{stem}.py"] = _tests(stem, paths[0].name, pairs, program)
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


def _kernels(path: Path, options: tuple[str, ...]) -> dict[str, Kernel]:
    extension = extension_text.load(path.resolve(), None, options)
    found = {}
    for full in extension.kernels:
        function = declarations.function(extension.source, full)
        template = [(one.name, one.is_type) for one in function.template if not one.has_default]
        try:
            types = [ctype for ctype, _ in function.parameters]
        except CupyopsError:
            types = []
        found[bare(full)] = Kernel(bare(full), template, types)
    return found


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
            scope.dtypes[name] = f"{name_of(name)}.dtype"
    writer = Writer(function, scope, kernels)
    writer.block(function.body.named_children)
    parameters = [name_of(name) for ctype, name in function.parameters if "cudaStream_t" not in ctype]
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


# --- operators -------------------------------------------------------------------------------------------------------

_FORWARD = re.compile(r"_?(forward|fwd|fw)(?=_|$)|(?<=_)(cuda|gpu|launcher|kernel|wrapper)(?=_|$)", re.IGNORECASE)
_BACKWARD = re.compile(
    r"_?(backward|bwd|bw|grad)(?=_|$)|(?<=_)(cuda|gpu|launcher|kernel|wrapper)(?=_|$)", re.IGNORECASE
)
_IS_BACKWARD = re.compile(r"backward|bwd|(^|_)bw(_|$)|(^|_)grad(_|$)", re.IGNORECASE)


def _pairs(program: Program, order: list[Function]) -> list[tuple[str, str, str]]:
    """(name, forward, backward) of the operators: the functions that the bindings name, else those that nobody calls."""
    names = {one.name for one in order}
    called = {name for one in order for name in one.calls}
    tops = [name for name in program.bound.values() if name in names] or [
        one.name for one in order if one.name not in called
    ]
    tops = list(dict.fromkeys(tops))
    stems = {_stem(name, _BACKWARD): name for name in tops if _IS_BACKWARD.search(name)}
    found = []
    for forward in tops:
        if not _IS_BACKWARD.search(forward):
            stem = _stem(forward, _FORWARD)
            found.append((f"{stem or 'extension'}_op", forward, stems.get(stem, "")))
    return found


def _stem(name: str, pattern: re.Pattern[str]) -> str:
    return re.sub("_+", "_", pattern.sub("", name)).strip("_").lower()


def _annotation(ctype: str) -> str:
    return {"tensor": "torch.Tensor", "int": "int", "float": "float"}.get(kind_of_type(ctype), "object")


def _operator(name: str, forward: Function, backward: Function | None, ported: Ported) -> str:
    """An operator with a reference that is to be written; what its roles pass on by name alone is marked."""
    inputs = [name_of(one) for ctype, one in forward.parameters if "cudaStream_t" not in ctype]
    signature = ", ".join(
        f"{name_of(one)}: {'bool' if 'bool' in ctype else _annotation(ctype)}"
        for ctype, one in forward.parameters
        if "cudaStream_t" not in ctype
    )
    outputs = _outputs(forward)
    place = f"{forward.file}:{forward.body.start_point[0] + 1}"
    ported.problems.append(f"{place}: to write: the reference of {name}, in PyTorch")
    returns = "torch.Tensor" if len(outputs) < 2 else f"tuple[{', '.join(['torch.Tensor'] * len(outputs))}]"
    lines = [
        f'@cupyops.operator("ported::{name}")',
        f"def {name}({signature}) -> {returns}:",
        f'    """{place}: what it means, in PyTorch: CPU tensors, double backward and torch.func take it."""',
        f'    raise NotImplementedError("write the reference of {name}: what {forward.name} computes, in PyTorch")',
        "",
        "",
        f"@{name}.forward",
        f"def _({', '.join(inputs)}):",
    ]
    if not outputs:
        ported.problems.append(f"{place}: check: {forward.name} returns nothing: it writes to its arguments")
        lines += [
            f"    # check this ({place}): it returns nothing, and writes to its arguments; allocate the outputs here",
            f"    raise NotImplementedError({f'{place}: allocate the outputs, call {forward.name}, return them'!r})",
        ]
    else:
        many = len(outputs) > 1
        lines.append(f"    outputs = {name_of(forward.name)}({', '.join(inputs)})")
        lines.append(f"    return {'tuple(outputs)' if many else 'outputs'}, ()")
    if backward is not None:
        lines += ["", "", *_backward(name, forward, backward, inputs, outputs, ported)]
    return "\n".join(lines)


def _outputs(function: Function) -> list[str]:
    """The names that it returns, `?` for what has none; empty where it returns no tensor."""
    returned = [one for one in walk(function.body) if one.type == "return_statement" and one.named_children]
    if not returned or function.returns in ("void", "int"):
        return []
    value = returned[-1].named_children[0]
    parts = [value]
    if value.type == "initializer_list":
        parts = value.named_children
    elif value.type == "call_expression" and re.search(
        r"make_tuple|tie", str(value.child_by_field_name("function").text)
    ):
        parts = value.child_by_field_name("arguments").named_children
    return [one.text.decode() if one.type == "identifier" else "?" for one in parts]


def _backward(
    name: str, forward: Function, backward: Function, inputs: list[str], outputs: list[str], ported: Ported
) -> list[str]:
    place = f"{backward.file}:{backward.body.start_point[0] + 1}"
    count = max(len(outputs), 1)
    grads = ["grad_y"] if count == 1 else [f"grad_y{index}" for index in range(count)]
    free = list(grads)
    given, unknown = [], []
    for ctype, one in backward.parameters:
        parameter = name_of(one)
        if parameter in inputs:
            given.append(parameter)
        elif free and kind_of_type(ctype) == "tensor" and re.match(r"d?_?grad|d(L|o)|g[a-z]?$|dout|top_diff", one):
            given.append(free.pop(0))
        else:
            unknown.append(one)
            given.append(f"_missing({one!r})")
    lines = [f"@{name}.backward", f"def _(saved, {', '.join([*grads, *inputs])}):"]
    if unknown:
        what = f"{backward.name} also takes {', '.join(unknown)}: give what forward computes of it, by `saved` or anew"
        ported.problems.append(f"{place}: check: {what}")
        lines.append(f"    # check this ({place}): {what}")
    what = "the order of its results, and which arguments have none: one gradient, or None, for each tensor of forward"
    ported.problems.append(f"{place}: check: {what}")
    lines.append(f"    # check this ({place}): {what}")
    lines.append(f"    return {name_of(backward.name)}({', '.join(given)})")
    if unknown:
        lines += ["", "", *textwrap.dedent('''\
            def _missing(name):
                raise NotImplementedError(f"backward needs {name}")''').split("\n")]  # fmt: skip
    return lines


def _tests(stem: str, file: str, pairs: list[tuple[str, str, str]], program: Program) -> str:
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
        "",
        "def test_nothing_is_left_to_check():",
        '    """Take each mark away when you have looked at its line."""',
        f'    left = [line for line in Path({stem}.__file__).read_text().splitlines() if "check this" in line]',
        "    assert not left",
    ]
    for name, forward, _ in pairs:
        samples = ", ".join(_sample(ctype, one) for ctype, one in program.functions[forward].parameters)
        lines += [
            "",
            "",
            '@pytest.mark.parametrize("backend", ["simulator", pytest.param("gpu", marks=pytest.mark.skipif('
            'not torch.cuda.is_available(), reason="no CUDA GPU"))])',
            f"def test_{keyword_free(name)}(backend):",
            "    # check this: arguments that the operator takes; this test fails until they are given",
            f'    args = pytest.fail("give the arguments of {name}: {samples}")',
            f"    cupyops.testing.check({stem}.{name}, args, backends=backend).raise_if_failed()",
        ]
    return "\n".join(lines) + "\n"


def keyword_free(name: str) -> str:
    """A name that Python can have."""
    return name + "_" if keyword.iskeyword(name) else name


def _sample(ctype: str, name: str) -> str:
    return f"{name} (a {kind_of_type(ctype) or ctype})"
