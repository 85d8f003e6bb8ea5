"""Every error says what was found and what to do: what is expected, what there is instead, or the thing to write or run.

The texts are read from the sources. What a text puts in is seen only where it is a constant of the module; the rest counts
as unsaid, so that the advice stands in the sentence itself and not in whatever happened to be inserted.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import cupyops

PACKAGE = Path(cupyops.__file__).parent
DO = (
    "add|call|cast|choose|compile|convert|declare|distribute|give|import|install|launch|leave|make|move|name|pass|put|raise|remove|"
    "rename|return|run|save|see|set|simulate|start|swap|take|try|use|wait|write"
)
ADVICE = re.compile(
    r"\bexpected\b|\bmust\b|\bpip install\b|\bsuch as\b|\bof the form\b|\bbegins with\b|\bLooked for:"
    r"|--\w[\w-]* (?:[A-Z]|compares)|\bneeds?\b|\ballows\b|\bat most\b"
    r"|\bcan (?:be|have|name)\b|\bthere (?:is|are) \{|\b(?:it|the cell|the device) has \{"
    rf"|(?:^|[;:,.]\s+|\b(?:and|or|only|to|target)\s+)(?:{DO})\b",
    re.IGNORECASE,
)
# Where all of the text is made elsewhere: by a function that has the sentence, or by the error that is passed on.
PASSED_ON = {
    ("_expression/syntax.py", "error"),
    ("_kernel/compile/compiler.py", "compile"),
    ("_kernel/compile/declarations.py", "parameters"),
    ("_kernel/compile/source.py", "_gather"),
    ("_kernel/kernel.py", "_configuration"),
    ("_kernel/launch/faults.py", "told"),
    ("_kernel/launch/signature.py", "_checked"),
    ("_kernel/launch/signature.py", "_in_memory"),
    ("_kernel/launch/specialised.py", "_without_a_tensor"),
    ("_kernel/launch/specialised.py", "refuse_dtypes"),
    ("_kernel/launch/template.py", "_value"),
    ("_operator/derivation/definition.py", "differentiable_backward"),
    ("_operator/derivation/definition.py", "run_forward"),
    ("_operator/derivation/replay.py", "explained"),
    ("_operator/derivation/schema.py", "typed_signature"),
    ("_warmup/explanation.py", "_called"),
    ("_warmup/instances.py", "_values"),
    ("cli/arguments.py", "_value"),
    ("cli/arguments.py", "values"),
    ("cli/bench.py", "_run"),
    ("cli/instance.py", "choose"),
    ("cli/simulate.py", "_built"),
    ("cli/simulate.py", "_values"),
}


# What the simulator finds in a kernel, or in the PTX of one: a finding, which says where and what, and not what to write.
FINDINGS = {
    *("UnsupportedInstruction", "InvalidPtx", "OutOfBounds", "Misaligned", "Uninitialized", "Race", "BarrierFault"),
    *("Deadlock", "WarpFault", "Trap", "DeviceAssert", "LimitError"),
}


@cache
def errors():
    """The names of the package's own kinds of error, but for findings."""
    kinds = {"CupyopsError"}
    found = [
        (node.name, node.bases) for path in sources() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    ]
    while more := {name for name, bases in found if {getattr(base, "id", "") for base in bases} & kinds} - kinds:
        kinds |= more
    return kinds - FINDINGS


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def name(path):
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def constants(module):
    """The strings that a module gives names to."""
    return {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def written(node, known):
    """The text of an expression; {} for what only a run can tell."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return written(node.value, known) if isinstance(node.value, ast.Name) else "{}"
    if isinstance(node, ast.Name):
        return known.get(node.id, "{}")
    if isinstance(node, ast.BinOp):
        return written(node.left, known) + written(node.right, known)
    return "{}"


@cache
def made(path):
    """(function, line, text) of each error that a file makes."""
    known, kinds = constants(tree(path)), errors()

    def walk(node, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if name in kinds and node.args:
            yield function, node.lineno, written(node.args[0], known)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    return list(walk(tree(path), ""))


def says_nothing(text):
    """Whether a text is all holes."""
    return len(re.sub(r"\{\}|\W", "", text)) < 4


@pytest.mark.parametrize("path", sources(), ids=name)
def test_every_error_says_what_to_do(path):
    texts = [(line, text) for function, line, text in made(path) if (name(path), function) not in PASSED_ON]
    silent = [f"{name(path)}:{line}: {text!r}" for line, text in texts if not ADVICE.search(text)]
    assert not silent, "say what is expected, or what to do:\n" + "\n".join(silent)


def test_errors_whose_text_is_made_elsewhere_are_known():
    """A new one is to have a sentence of its own, or a place in the table."""
    found = [(name(path), function, text) for path in sources() for function, _, text in made(path)]
    assert {(file, function) for file, function, text in found if says_nothing(text)} <= PASSED_ON
    assert {(file, function) for file, function, _ in found} >= PASSED_ON


def test_the_errors_are_found():
    assert sum(len(made(path)) for path in sources()) > 300
    assert {"InputError", "LaunchError", "TensorMapError"} <= errors()


@pytest.mark.parametrize(("text", "advises"), [
    ("x is {}, expected a tensor", True), ("grid {} is too large; take fewer blocks", True),
    ("there is no form {}; there are {}", True), ("{} cannot be read", False),
    ("no template parameter {}", False), ("{}: backward gave {} gradients for {} tensors", False),
])  # fmt: skip
def test_the_rule_itself(text, advises):
    assert bool(ADVICE.search(text)) == advises
