"""Which tests a change of files may break, by who imports what.

A test file depends on itself, on the helpers in `tests` that it imports, on the files that it is named after and those that
it imports, and on what these import within one layer: `nn` within `nn`, `simulator` within `simulator`; operators (`ops`,
`optim`, `_dispatch`) and their CUDA are one layer. What is imported through another layer does not count, nor does a file
that more than sixty others of its layer import, directly or not: that is the framework, which all tests exercise. Standard
library only, so that it runs anywhere.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from imports import imported

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS, CUDA = ROOT / "cupyops", ROOT / "tests", ROOT / "cuda_src"

WIDELY = 60  # files of its layer may import one, directly or not, before it counts as framework
OPERATORS = ("ops", "optim", "_dispatch")  # the folders of the operators' layer
BELOW = ("_kernel", "_operator", "_util", "_simulate.py", "errors.py", "__init__.py")  # the layers below it
_CU_NAME = re.compile(r'"(\w+\.cu)"')
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def of_test_file(path: Path) -> frozenset[Path]:
    """The files that the tests of one file depend on."""
    return _closure([path], _helpers) | _closure({*_imported(path), *_namesakes(path)}, _same_layer)


@cache
def of_operator(operator: str) -> frozenset[Path]:
    """The files of an operator: its module, its .cu files, the modules that name these, and what all of them import."""
    own = {PACKAGE / "ops" / f"_{operator}.py", PACKAGE / "optim" / f"{operator}.py"}
    cuda = {path for path in CUDA.rglob("*.cu") if _begins_with(path.stem, operator)}
    names = {path.name for path in cuda}
    naming = {path for path in _python(PACKAGE) if _layer(path) == "operators" and names & set(_cu_names(path))}
    return _closure({path for path in own if path.is_file()} | cuda | naming, _without_kernels)


@cache
def modules() -> tuple[str, ...]:
    """The names of the operators and optimizers that have a module of their own."""
    files = [*(PACKAGE / "ops").glob("_[!_]*.py"), *(PACKAGE / "optim").glob("[!_]*.py")]
    return tuple(sorted(file.stem.removeprefix("_") for file in files))


def named_after(stem: str) -> str:
    """The operator with the longest name that a file's begins with, as `attention` of `attention_packed`; else ""."""
    return max((name for name in modules() if f"{stem}_".startswith(f"{name}_")), key=len, default="")


def _begins_with(stem: str, operator: str) -> bool:
    """True for the .cu files of an operator, as `conv2d_direct` of `conv2d`, and not those of a longer name's."""
    return f"{stem}_".startswith(f"{operator}_") and len(named_after(stem)) <= len(operator)


def framework() -> frozenset[Path]:
    """The files that all operators have in common: below their layer, or imported by most of it."""
    files = [*_python(PACKAGE), *CUDA.rglob("*.cu*")]
    return frozenset(path for path in files if _layer(path) in BELOW or _importers()[path] > WIDELY)


def of_folder(name: str) -> frozenset[Path]:
    """The files of the package that a folder of tests is named after."""
    places = PACKAGE / name, PACKAGE / f"_{name}"
    return frozenset(file for place in places for file in place.rglob("*.py"))


def _closure(files: Iterable[Path], step: Callable[[Path], Iterable[Path]]) -> frozenset[Path]:
    found: set[Path] = set()
    pending = list(files)
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += step(path)
    return frozenset(found)


# --- what a test file names ---


@cache
def _helpers(path: Path) -> tuple[Path, ...]:
    """The files of `tests` that one imports, without the framework among them."""
    return tuple(file for file in _direct_helpers(path) if _importers()[file] <= WIDELY)


@cache
def _direct_helpers(path: Path) -> tuple[Path, ...]:
    found = {_resolved(folder, name) for name in _absolute_imports(path) for folder in (TESTS / "support", TESTS)}
    return tuple(file for file in found if file is not None)


def _imported(path: Path) -> set[Path]:
    """The files of the package, and the tools, that a test file imports by name."""
    names = _absolute_imports(path)
    found = {_resolved(PACKAGE, name.removeprefix("cupyops.")) for name in names if name.startswith("cupyops.")}
    return {file for file in found | {_resolved(ROOT / "tools", name) for name in names} if file is not None}


def _namesakes(path: Path) -> Iterator[Path]:
    """What a test file, or its folder, is named after.

    `tests/ops/test_attention_packed.py` is named after `cupyops/ops/_attention.py`, `tests/tools/test_soak.py` after
    `tools/soak.py`, `tests/test_readme.py` after README.md, and every file of `tests/docs` after all of `docs`.
    """
    stem, folders = path.stem.removeprefix("test_"), path.parent.relative_to(TESTS).parts
    private = (f"_{name}" for name in folders[:1])
    for place in {PACKAGE.joinpath(*folders), PACKAGE.joinpath(*private, *folders[1:]), ROOT / "tools"}:
        fitting = [file for file in place.glob("*.py") if f"{stem}_".startswith(f"{file.stem.lstrip('_')}_")]
        yield from sorted(fitting, key=lambda file: len(file.stem.lstrip("_")))[-1:]
    yield from (file for file in ROOT.glob("*.md") if file.stem.lower() == stem)
    yield from _data(folders[0]) if folders and folders[0] != "tools" else ()


@cache
def _data(name: str) -> tuple[Path, ...]:
    """All files of a folder at the root, and those of a folder of the package that are not Python."""
    own = [file for file in (PACKAGE / name).rglob("*") if file.suffix not in (".py", ".pyc") and file.is_file()]
    return (*own, *(file for file in (ROOT / name).rglob("*") if file.is_file()))


@cache
def _absolute_imports(path: Path) -> tuple[str, ...]:
    """The dotted names that a file imports; of `from a import b` both `a.b` and `a`."""
    if path.suffix != ".py":
        return ()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return tuple(sorted(names))


def _resolved(folder: Path, name: str) -> Path | None:
    """The file of the longest beginning of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = folder.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


# --- what a file of the package imports within its layer ---


@cache
def _same_layer(path: Path) -> tuple[Path, ...]:
    """What a file imports or includes of its layer, without the framework."""
    return tuple(file for file in _direct(path) if _importers()[file] <= WIDELY)


def _without_kernels(path: Path) -> Iterable[Path]:
    """The same without .cu files: one module may name those of several operators."""
    return (file for file in _same_layer(path) if file.suffix != ".cu")


@cache
def _direct(path: Path) -> tuple[Path, ...]:
    if path.suffix in (".cu", ".cuh"):
        names = _INCLUDE.findall(path.read_text(encoding="utf-8"))
        return tuple(CUDA / name for name in names if (CUDA / name).is_file())
    if path.suffix != ".py" or not path.is_relative_to(PACKAGE):
        return ()
    modules = {_resolved(PACKAGE, ".".join(parts)) for parts in imported(PACKAGE, path) if parts}
    inside = {file for file in modules if file is not None and _layer(file) == _layer(path)}
    if _layer(path) == "operators":
        inside |= {file for name in _cu_names(path) for file in CUDA.rglob(name)}
    return tuple(inside)


@cache
def _importers() -> Counter[Path]:
    """Number of files of its layer that import each file, directly or not; of a helper, number of files of tests."""
    files = [*_python(PACKAGE), *CUDA.rglob("*.cu*")]
    counts = Counter(target for file in files for target in _closure([file], _direct))
    return counts + Counter(target for file in _python(TESTS) for target in _closure([file], _direct_helpers))


@cache
def _cu_names(path: Path) -> tuple[str, ...]:
    return tuple(_CU_NAME.findall(path.read_text(encoding="utf-8")))


@cache
def _python(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.rglob("*.py")))


def _layer(path: Path) -> str:
    if path.is_relative_to(CUDA):
        return "operators"
    first = path.relative_to(PACKAGE).parts[0]
    return "operators" if first in OPERATORS else first
