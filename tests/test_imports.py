"""Imports go one way, and importing costs nothing."""

import ast
import graphlib
import sys
from functools import cache
from pathlib import Path

import pytest
from processes import run_python

import cupyops

PACKAGE = Path(cupyops.__file__).parent

# Lower to higher. What is not named here stands where its imports put it.
CHAIN = [
    "errors", "_util", "_kernel.compile", "_kernel.launch", "_kernel.kernel", "_operator.derivation",
    "_dispatch _operator.operator", "_expression ops", "nn optim testing", "_warmup bench doctor", "cli",
]  # fmt: skip


def within(name, layers):
    """Whether a module is one of `layers`, or inside one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def files():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module(path):
    """`ops/relu.py` as "ops.relu", `ops/__init__.py` as "ops"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """The modules of the package that a file imports, lazily too, as parts: `from ..kernel import X` is ("kernel",)."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    package = here[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + tuple(
                    (node.module or "").split(".") if node.module else ()
                )
            elif (node.module or "").split(".")[0] == "cupyops":
                base = tuple(node.module.split(".")[1:])
            else:
                continue
            for alias in node.names:
                inside = PACKAGE.joinpath(*base, alias.name)
                yield (*base, alias.name) if inside.is_dir() or inside.with_suffix(".py").is_file() else base
        elif isinstance(node, ast.Import):
            yield from (
                tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.split(".")[0] == "cupyops"
            )


def external(path):
    """Top-level names of every other package that a file imports, lazily or not."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def name(path):
    return path.relative_to(PACKAGE).as_posix()


@cache
def graph():
    """What each module imports, by their names."""
    return {module(path): {".".join(target) for target in imported(path)} for path in files()}


def test_there_is_no_circle():
    graphlib.TopologicalSorter(graph()).prepare()  # raises CycleError, which names the modules


def test_no_module_imports_the_package_itself():
    assert not [name for name, targets in graph().items() if "" in targets]


@pytest.mark.parametrize("rank", range(1, len(CHAIN)), ids=lambda rank: CHAIN[rank - 1])
def test_lower_layers_do_not_know_higher_ones(rank):
    """Not by way of another module either."""
    higher = {part for names in CHAIN[rank:] for part in names.split()}
    seen, pending = set(), [name for name in graph() if within(name, CHAIN[rank - 1].split())]
    assert pending
    while pending:
        name = pending.pop()
        assert not within(name, higher), f"{CHAIN[rank - 1]} leads to {name}"
        seen.add(name)
        pending += graph().get(name, set()) - seen


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").glob("_[!_]*.py")), ids=lambda path: path.stem)
def test_operators_do_not_import_operators(path):
    """What several of them share is in a module of its own: below them, or beside them with a leading underscore."""
    others = [name for name in graph()[module(path)] if within(name, ["ops"])]
    assert not others


def test_one_module_imports_cupy():
    assert {name(path) for path in files() if {"cupy", "cupyx"} & set(external(path))} == {"_kernel/compile/backend.py"}


def test_the_command_line_s_packages_stay_in_the_command_line():
    """But for the progress bar of long work, which is there where rich is."""
    users = {name(path).partition("/")[0] for path in files() if {"rich", "typer"} & set(external(path))}
    assert users == {"cli", "_util"}


def test_the_simulator_could_be_a_package_of_its_own():
    """It needs NumPy and the standard library; of this package nothing but the base of its errors."""
    inside = [path for path in files() if name(path).startswith("simulator/")] + [PACKAGE / "simulator" / "__init__.py"]
    outside = {package for path in inside for package in external(path)} - sys.stdlib_module_names
    assert outside == {"numpy"}
    others = {target for path in inside for target in imported(path) if target[0] != "simulator"}
    assert others == {("errors",)}


def run(code):
    return run_python("-c", code, cwd=PACKAGE.parent, bare=True)


def test_importing_imports_nothing_heavy_and_touches_no_device():
    """The modules that `import torch` loads itself are not ours to judge."""
    code = """
import sys, torch
before = set(sys.modules)
import cupyops, cupyops.nn, cupyops.optim
new = {module.split(".")[0] for module in set(sys.modules) - before}
assert not torch.cuda.is_initialized()
assert not [k for k in cupyops._kernel.kernel.kernels() if k._specialised], "a kernel was specialised"
assert not [m for m in sys.modules if m.startswith(("cupyops.cli", "cupyops.simulator"))]
print(*sorted(new))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    heavy = {
        "cupy", "rich", "typer", "matplotlib", "sklearn", "platformdirs", "triton", "pytest", "hypothesis",
        "elftools", "pygments",
    }  # fmt: skip
    assert not heavy & set(done.stdout.split())


LIBRARY = """
import sys, torch, cupyops
def loaded():
    return [one for one in sys.modules if one.startswith(("cupyops.ops", "cupyops.nn", "cupyops.optim"))]
assert not loaded(), loaded()
"""


@pytest.mark.parametrize(
    "asked",
    [
        "assert cupyops.relu(torch.tensor([-1.0])).item() == 0",
        "assert issubclass(cupyops.nn.GELU, torch.nn.GELU)",
        "assert issubclass(cupyops.optim.SGD, torch.optim.SGD)",
        "from cupyops import relu, swap",
        "from cupyops import *; assert gelu and swap and nn and optim and Kernel",
        "assert {'relu', 'swap', 'nn', 'Kernel', '__version__'} <= set(dir(cupyops))",
        "assert 'cupyops::relu' in cupyops.operators()",
        "from cupyops._kernel import kernel; from cupyops._kernel.compile import source;"
        "assert len(kernel.kernels(source.cuda_src())) > 100",
        "assert torch.ops.cupyops.relu and torch.ops.cupyops.softmax_backward",
        "with cupyops.use_form('softmax:two_pass'): pass",
        "assert torch.compile(lambda x: cupyops.relu(x), backend='eager', fullgraph=True)(torch.ones(1)).item() == 1",
        "assert torch.func.vmap(lambda x: cupyops.relu(x))(torch.ones(1)).item() == 1",
        "assert not hasattr(cupyops, 'nonsense')",
        "assert not hasattr(torch.ops.cupyops, 'nonsense')",
    ],
)
def test_the_library_is_loaded_when_it_is_first_asked_for(asked):
    done = run(f"{LIBRARY}{asked}\nassert loaded()")
    assert done.returncode == 0, done.stderr


def test_what_is_not_of_the_library_does_not_load_it():
    code = "cupyops.Kernel, cupyops.operator, cupyops.simulate, cupyops.trace, cupyops.elementwise, cupyops.graph\n"
    code += "hasattr(cupyops, '__wrapped__'), hasattr(cupyops, '_nothing')\nassert not loaded()"
    done = run(LIBRARY + code)
    assert done.returncode == 0, done.stderr


def test_threads_that_ask_first_at_once():
    code = """
import threading
names, found = ["relu", "swap", "nn", "softmax", "optim", "operators"], []
threads = [threading.Thread(target=lambda name=name: found.append(getattr(cupyops, name))) for name in names * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 24
"""
    done = run(LIBRARY + code)
    assert done.returncode == 0, done.stderr


def test_the_command_line_without_typer_says_what_to_install():
    code = """
import sys
sys.modules["typer"] = None
sys.argv = ["cupyops", "compile"]
import cupyops.cli
try:
    cupyops.cli.main()
except cupyops.MissingDependencyError as error:
    print(error)
"""
    done = run(code)
    assert 'pip install "cupyops[cli]"' in done.stdout, done.stderr


POSIX_ALONE = ["fcntl", "grp", "posix_ipc", "pwd", "resource", "termios", "tty"]  # modules that Windows has not


def test_nothing_of_posix_alone_is_needed():
    """As on Windows, which has neither these modules nor users' numbers: what they are asked for there is done without."""
    code = f"""
import os, sys
import numpy, torch, torch.utils.data, typer, typer.core, rich.console, rich.progress, rich.table
for name in {POSIX_ALONE}:
    sys.modules[name] = None
for name in ("getuid", "geteuid", "getgid", "fork", "register_at_fork", "chown", "fchmod"):
    if hasattr(os, name):
        delattr(os, name)
import cupyops, cupyops.nn, cupyops.optim, cupyops.bench, cupyops.cli.app, cupyops.doctor, cupyops.simulator, cupyops.testing
y = cupyops.softmax(torch.ones(2, 3, requires_grad=True), dim=-1)
y.sum().backward()
assert y.shape == (2, 3)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
