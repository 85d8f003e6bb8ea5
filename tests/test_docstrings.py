"""Every public function and class has a docstring, and each example in one does what it shows."""

import doctest
import importlib.util
import inspect
import sys

import numpy as np
import pytest
import torch

import cupyops
import cupyops.bench
import cupyops.integrations.transformers as integration
import cupyops.nn
import cupyops.optim
import cupyops.testing

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
