"""The tag in torch.compiler's cache keys that says what our operators are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import cupyops
from cupyops._operator.derivation import cache_tag
from tests.support.processes import run_python

_MODULE = """
import torch
import cupyops
from helper import times

@cupyops.operator("edited::cubed")
def cubed(x: torch.Tensor) -> torch.Tensor:
    return times(x**3)

squared = cupyops.elementwise("edited::squared(T x) -> T y", "y = {factor} * x * x")
total = cupyops.reduction("edited::total(T x) -> T y", map="{factor} * x * x", reduce="a + b", identity="0")

@cupyops.operator("edited::joined")
def joined(x: list[torch.Tensor]) -> torch.Tensor:
    return {factor} * x[0] * x[0]
"""
_HELPER = "def times(x):\n    return {factor} * x\n"
_PROGRAM = """
import json
import sys
sys.path.insert(0, ".")
import torch
from edited import cubed, joined, squared, total

x = torch.tensor([1.0, 2.0], requires_grad=True)

def step(x):
    return cubed(x), squared(x), total(x, dim=0), joined([x])

outputs = torch.compile(step, fullgraph=True)(x)
found = [(y.tolist(), *(g.tolist() for g in torch.autograd.grad(y.sum(), x, retain_graph=True))) for y in outputs]
print(json.dumps([found, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def _run(folder: Path, factor: float) -> tuple[list, int]:
    (folder / "edited.py").write_text(_MODULE.format(factor=factor))
    (folder / "helper.py").write_text(_HELPER.format(factor=factor))
    (folder / "program.py").write_text(_PROGRAM)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_python("program.py", cwd=folder, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    found, hits = json.loads(done.stdout)
    return found, hits


def test_an_edit_is_seen_through_a_warm_cache(tmp_path):
    def expected(factor):
        square, slope = [factor, 4 * factor], [2 * factor, 4 * factor]
        return [
            [[factor, 8 * factor], [3 * factor, 12 * factor]], [square, slope], [5 * factor, slope], [square, slope],
        ]  # fmt: skip

    assert _run(tmp_path, 3.0) == (expected(3.0), 0)
    assert _run(tmp_path, 3.0) == (expected(3.0), 1)
    assert _run(tmp_path, 5.0) == (expected(5.0), 0)


def _tag_of(*sources: str) -> str:
    """The digest of the function `f` of a module of these lines."""
    scope: dict = {"__name__": "somebody", "torch": torch}
    exec("\n".join(sources), scope)
    return cache_tag._digest([scope["f"]])


@pytest.mark.parametrize(
    "before, after",
    [
        ("def f(x): return x * 2", "def f(x): return x * 3"),
        ("def f(x, by=2): return x * by", "def f(x, by=3): return x * by"),
        ("BY = 2\ndef f(x): return x * BY", "BY = 3\ndef f(x): return x * BY"),
        ("def g(x): return x\ndef f(x): return g(x)", "def g(x): return -x\ndef f(x): return g(x)"),
        ("f = (lambda by: lambda x: x * by)(2)", "f = (lambda by: lambda x: x * by)(3)"),
        ("def f(x): return x.sin()", "def f(x): return x.cos()"),
        (
            "class A:\n  def g(s, x): return x\na = A()\ndef f(x): return a.g(x)",
            "class A:\n  def g(s, x): return -x\na = A()\ndef f(x): return a.g(x)",
        ),
        ("W = torch.tensor([1.0])\ndef f(x): return x * W", "W = torch.tensor([2.0])\ndef f(x): return x * W"),
    ],
)
def test_what_a_function_computes_with_is_in_its_digest(before, after):
    assert _tag_of(before) != _tag_of(after)
    assert _tag_of(before) == _tag_of(before)
    assert _tag_of(before) == _tag_of("", "", before)  # not the line where it stands


def test_the_tag_stands_behind_that_of_the_user():
    config = torch.compiler.config
    graph = torch.compile(cupyops.relu, backend="aot_eager", fullgraph=True)
    try:
        with config.patch(cache_key_tag="mine"):
            graph(torch.ones(3))
            assert config.cache_key_tag.startswith("mine|cupyops:")
            torch._dynamo.reset()
            graph(torch.ones(4))
            assert config.cache_key_tag.count("cupyops:") == 1
            config.cache_key_tag = "another"
            torch._dynamo.reset()
            graph(torch.ones(3))
            assert config.cache_key_tag.startswith("another|cupyops:")
            config.cache_key_tag = "by torch.ops"
            torch._dynamo.reset()
            torch.compile(lambda x: torch.ops.cupyops.relu(x)[0], backend="aot_eager", fullgraph=True)(torch.ones(3))
            assert config.cache_key_tag.startswith("by torch.ops|cupyops:")
    finally:
        torch._dynamo.reset()


def test_importing_sets_no_tag():
    done = run_python(
        "-c", "import torch, cupyops; cupyops.relu; print([torch.compiler.config.cache_key_tag])", bare=True
    )
    assert done.stdout.strip() == "['']", done.stderr
