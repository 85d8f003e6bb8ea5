"""What ran in full, on which sources: tests/ran_in_full.csv, a line for each operator and each folder of other tests.

A digest covers what an operator computes with and is tested by: its CUDA with all that it includes, its Python with what
that imports of `ops`, `optim` and `_dispatch`, its tests with their helpers. Comments, docstrings, layout, the names of
files and the lines that import them do not count, so that what is moved or explained anew has still run. All the rest (the
simulator, the launch, the contract of the tests) is the framework: one digest, on which a line says that the operator ran.

The digest of a folder, as tests/nn, covers its tests and what they are named after: cupyops/nn, cupyops/_nn or nn. That
of tests/ itself covers the files that lie there, and pyproject.toml.

    python tests/support/ran_in_full.py     what differs from what ran in full
"""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "ran_in_full.csv"
COLUMNS = ("part", "digest", "framework")
PACKAGE, TESTS = ROOT / "cupyops", ROOT / "tests"

sys.path[:0] = [path for path in map(str, (TESTS, TESTS / "support", ROOT / "tools")) if path not in sys.path]

from gpu_report import plain_python  # noqa: E402
from imports import imported  # noqa: E402
from operator_samples import operator_of  # noqa: E402

import cupyops.nn  # noqa: E402
import cupyops.optim  # noqa: E402
from cupyops._kernel import kernel  # noqa: E402
from cupyops._kernel.compile import source  # noqa: E402
from cupyops._warmup.reachable import kernels_of  # noqa: E402
from cupyops.errors import InputError  # noqa: E402

OPERATORS = ("ops", "optim", "_dispatch")  # folders of what an operator is made of
# of `_dispatch`, what is no operator's: how work is split over devices decides nothing of a kernel
SHARED = {PACKAGE / "_dispatch" / f"{name}.py" for name in ("__init__", "forms", "gpu", "cards", "shardings")}
APART = ("bench", "cli", "doctor", "nn")  # folders that no operator's test in full depends on
CONTRACT = {TESTS / "support" / f"{name}.py" for name in ("contract", "kept", "form_walk", "by_form")}
SELECTION = {TESTS / "support" / "tiers.py"}  # says which tests run, and nothing of what they do
CASES = {TESTS / "simulator" / f"{name}.py" for name in ("cases", "test_operators")}
_TEXTS = (".py", ".md", ".ipynb", ".cu", ".toml", ".html", ".js", ".css")
_CU = re.compile(r'"(\w+\.cu)"')
_IMPORT = re.compile(r"^[ \t]*#[ \t]*include[ \t]*\"[^\n]*", re.MULTILINE)


class Ran(NamedTuple):
    """On what an operator, or a folder, ran in full."""

    digest: str
    framework: str


def read(path: Path = TABLE) -> dict[str, Ran]:
    """The table; nothing where there is none."""
    if not path.is_file():
        return {}
    with open(path, encoding="utf-8", newline="") as file:
        return {line["part"]: Ran(line["digest"], line["framework"]) for line in csv.DictReader(file)}


def write(table: dict[str, Ran], path: Path = TABLE) -> None:
    """The table, in the order of names, of what there is."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows((name, *ran) for name, ran in sorted(table.items()) if name in parts())


@cache
def operators() -> tuple[str, ...]:
    """The names by which tests know operators: of .cu files, of files of `ops`, of tests of operators."""
    built_in = {operator_of(path.name) for path in source.cuda_src().glob("*.cu")}
    tested = {path.stem.removeprefix("test_") for path in (TESTS / "ops").glob("test_*.py")}
    return tuple(sorted(built_in | tested | {path.stem[1:] for path in (PACKAGE / "ops").glob("_[!_]*.py")}))


@cache
def folders() -> tuple[str, ...]:
    """The folders of tests, as "tests/nn", and "tests" for the files that lie there."""
    found = {path.parent.relative_to(TESTS).parts[:1] for path in TESTS.rglob("test_*.py")}
    return tuple(sorted("/".join(("tests", *names)) for names in found))


def parts() -> tuple[str, ...]:
    """All that runs in full or not: operators and folders."""
    return (*operators(), *folders())


@cache
def now(part: str) -> Ran:
    """The digests of the tree as it is."""
    return Ran(digest_of_folder(part) if part in folders() else digest(part), framework())


def changed() -> list[str]:
    """The operators and folders that have not run in full on what they are made of now."""
    table = read()
    return [name for name in parts() if name not in table or table[name].digest != now(name).digest]


def digest_of_folder(folder: str) -> str:
    """Of a folder's tests, and of what they are named after."""
    name = folder.removeprefix("tests").strip("/")
    if not name:
        return _digest(map(_python, [*TESTS.glob("test_*.py"), ROOT / "pyproject.toml"]))
    places = TESTS / name, PACKAGE / name, PACKAGE / f"_{name}", ROOT / name
    files = [path for place in places for path in place.rglob("*") if path.suffix in _TEXTS and path.is_file()]
    return _digest(map(_python, files))


@cache
def digest(operator: str) -> str:
    """Of all that one operator is made of and tested by."""
    return _digest([*map(_plain_cuda, cuda_of(operator)), *map(_python, python_of(operator)), *cases(operator)])


@cache
def framework() -> str:
    """Of what all operators have in common."""
    return _digest(map(_python, framework_files()))


def python_of(operator: str) -> set[Path]:
    """The modules of an operator and what they import of operators; its tests and their helpers."""
    names = {operator} | {one.__module__.rpartition("test_")[2] for one in contracts().get(operator, ())}
    code = _closure(path for name in names for path in _modules(name))
    tests = _closure(path for name in names for path in TESTS.glob(f"o*/test_{name}.py"))
    used = {path for path in code if path.parent.name == "_dispatch"}
    return code | tests | {path for path in (TESTS / "dispatch").glob("test_*.py") if used & set(_imports(path))}


@cache
def contracts() -> dict[str, list[type]]:
    """The tests of operators that launch the kernels of each operator's files, as twins do whose kernels are in one."""
    from simulator import cases as module

    return module.contracts()


def framework_files() -> set[Path]:
    """What all operators have in common: the rest of the package, and what their tests go by."""
    package = {path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in (*APART, *OPERATORS)}
    return {path for path in package | SHARED | CONTRACT | CASES if path.is_file()}


def cases(operator: str) -> list[str]:
    """What simulator/cases.py has for one operator: the function of its further calls, and those that it names."""
    from simulator import cases as module

    texts: dict[str, str] = {}
    pending: list[object] = [module.FURTHER.get(operator)]
    while pending:
        value = pending.pop()
        if isinstance(value, partial):
            given = [value.func, *value.args, *value.keywords.values()]
            texts[repr([one for one in given if not callable(one)])] = ""
            pending += given
        elif isinstance(value, FunctionType) and value.__module__ == module.__name__ and value.__name__ not in texts:
            texts[value.__name__] = _plain_python(inspect.getsource(value))
            pending += [vars(module).get(name) for name in _names(value.__code__)]
    return [f"{name}\0{text}" for name, text in texts.items()]


def _names(code: object) -> Iterator[str]:
    yield from getattr(code, "co_names", ())
    for constant in getattr(code, "co_consts", ()):
        yield from _names(constant)


def _modules(operator: str) -> set[Path]:
    """The module of an operator, and those that name a .cu file of its kernels."""
    own = {PACKAGE / "ops" / f"_{operator}.py", PACKAGE / "optim" / f"{operator}.py"}
    of_kernels = {
        path
        for folder in OPERATORS
        for path in (PACKAGE / folder).glob("*.py")
        if any(operator_of(name) == operator for name in _CU.findall(_text(path)))
    }
    return {path for path in own if path.is_file()} | of_kernels


def _closure(paths: Iterable[Path]) -> set[Path]:
    """Files, and what they import of operators and of the helpers of tests."""
    found: set[Path] = set()
    pending = list(paths)
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imports(path)
    return found


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    """What one file imports of operators, or a test of its helpers; one of tests/dispatch also of what it dispatches by."""
    if path.is_relative_to(PACKAGE):
        inside = {_resolved(PACKAGE, parts) for parts in imported(PACKAGE, path) if parts and parts[0] in OPERATORS}
        return tuple(inside - {None} - SHARED)
    names = {name for node in ast.walk(ast.parse(_text(path))) for name in _imported_names(node)}
    helpers = {_resolved(folder, name.split(".")) for name in names for folder in (TESTS / "support", TESTS)}
    code = {_resolved(PACKAGE, name.split(".")[1:]) for name in names if name.startswith("cupyops._dispatch.")}
    helpers |= code if path.parent.name == "dispatch" else set()
    return tuple(helpers - {None} - CONTRACT - CASES - SHARED - SELECTION)


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield str(node.module)


def _resolved(folder: Path, parts: Iterable[str]) -> Path | None:
    """The file of the longest beginning of a dotted name."""
    names = list(parts)
    for length in range(len(names), 0, -1):
        path = folder.joinpath(*names[:length]).with_suffix(".py")
        if path.is_file():
            return path
    return None


# --- what counts of a text ---


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _python(path: Path) -> str:
    return _plain_python(_text(path))


def _plain_python(text: str) -> str:
    """Python without comments, docstrings, imports and empty lines."""
    return plain_python(text, without=(ast.Import, ast.ImportFrom))


def cuda_of(operator: str) -> set[str]:
    """The texts of an operator's .cu files, of those of the kernels that it may launch, and of all that they include."""
    sources = {k.source.name: k.source for k in _kernels() if operator_of(k.source.name) == operator}
    for one in cupyops.operators().values():
        if one.reference.__module__ == f"cupyops.ops._{operator}":
            with suppress(InputError):  # it mentions none
                sources |= {k.source.name: k.source for k in kernels_of(one) if k in _kernels()}
    return {text for one in sources.values() for text in (one.text, *one.includes.values())}


@cache
def _kernels() -> tuple[cupyops.Kernel, ...]:
    return tuple(kernel.kernels(source.cuda_src()))


@cache
def _plain_cuda(text: str) -> str:
    """CUDA without comments, includes and layout."""
    return " ".join(_IMPORT.sub("", source.strip_comments(text)).split())


def _digest(texts: Iterable[str]) -> str:
    """Of texts, whatever their order."""
    each = sorted(hashlib.sha256(text.encode()).digest() for text in texts)
    return hashlib.sha256(b"".join(each)).hexdigest()[:16]


if __name__ == "__main__":
    print(*changed(), sep="\n")
