"""Every public function and class has a docstring, each example in one does what it shows, and all begin readably."""

import ast
import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cupyops
import cupyops.bench
import cupyops.integrations.transformers as integration
import cupyops.nn
import cupyops.optim
import cupyops.testing

PACKAGE = Path(cupyops.__file__).parent
# First words that mean something only beside the code: prepositions, interrogatives and pronouns.
RIDDLE = re.compile(
    r"(About|After|Along|As|At|Behind|Beside|By|For|From|In|Inside|Of|On|Over|Through|To|Under|Until|With|Within|Without"
    r"|How|What|When|Where|Whether|Which|Who|Whose|Why|Such|That|The same|Their|These|Those)(?=\s)"
    r"|(All|Both|Everything|None|Nothing|One)( of (it|them))?[.,:;]"
)
ADVICE = (
    "docstrings that tell nothing to a reader who has not seen the file; begin with a noun phrase in the field's terms "
    '("Number of stages of the shared-memory ring.", not "Of the ring.") or with a verb ("Return True if the offset `at` '
    'lies inside an #if block.", not "Whether it stands under an #if."):'
)
NAMES = {"cupyops": cupyops, "torch": torch, "np": np, "Tensor": torch.Tensor}


def public():
    """(name, object) of what `cupyops` and its public parts offer."""
    for module in (cupyops, cupyops.bench, cupyops.nn, cupyops.optim, cupyops.testing):
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                yield f"{module.__name__}.{name}", value
    for name in ("dpo", "grpo", "jsd", "kto", "orpo"):
        yield f"cupyops.nn.preference.{name}", getattr(cupyops.nn.preference, name)
    if importlib.util.find_spec("transformers"):
        yield "cupyops.integrations.transformers.register", integration.register
        yield "cupyops.integrations.transformers.callback", integration.callback


PUBLIC = dict(public())
EXAMPLES = [test for name, value in PUBLIC.items() for test in doctest.DocTestFinder().find(value, name, globs=NAMES)]


@pytest.mark.parametrize("name", PUBLIC)
def test_has_a_docstring(name):
    assert inspect.getdoc(PUBLIC[name])


@pytest.mark.parametrize("example", [test for test in EXAMPLES if test.examples], ids=lambda test: test.name)
def test_example(example):
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=sys.stdout.write)
    assert tried and not failed


@pytest.mark.parametrize("name", [name for name in dir(cupyops.ops) if inspect.isfunction(getattr(cupyops.ops, name))])
def test_operators_have_an_example(name):
    assert any(test.examples for test in EXAMPLES if test.name == f"cupyops.{name}")


def docstrings(path):
    """(line, docstring) of the module in a file, and of the classes, functions and attributes in it, private ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_begin_with_a_noun_or_a_verb():
    riddles = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert not riddles, "\n".join((ADVICE, *riddles))


@pytest.mark.parametrize(("text", "refused"), [
    ("Of the ring.", True), ("Those that matter.", True), ("The same of a row.", True), ("That of `x`.", True),
    ("Whether it fits.", True), ("What a kernel\ntakes.", True), ("For each row, a bit.", True), ("One.", True),
    ("All of them, of a batch.", True), ("Number of stages of the shared-memory ring.", False),
    ("Return True if the rows are aligned.", False), ("The sames of a row.", False),
    ("In-place addition.", False), ("One kernel of a file.", False),
])  # fmt: skip
def test_riddles_are_told_from_docstrings(text, refused):
    assert bool(RIDDLE.match(text)) is refused
