"""The record of the GPU tests, tests/gpu_report.json: for each operator and each folder of tests what ran, on which code.

On a machine with a GPU `make test-gpu` runs the tests that need one and writes the record. `make gpu-report` says for which
operators and folders it holds: all passed, and the code that they depend on (dependents.py) is still the same. Standard
library only, so that it runs anywhere.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import io
import json
import platform
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import dependents

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
CODE = {"cuda_src": (".cu", ".cuh"), "cupyops": (".cu", ".cuh", ".py")}
LARGE, OP_DB = "large tensors", "op_db"  # what else ran of an operator, as "relu, op_db"
LITERAL = rb"""(?P<literal>"(?:\\.|[^"\\\n])*+"|'(?:\\.|[^'\\\n])+')"""
COMMENT_OR_LITERAL = re.compile(rb"//[^\n]*|/\*.*?\*/|" + LITERAL, re.DOTALL)
APART = rb"(?P<apart>(?<=\w)\s+(?=\w)|(?<=[^\w\s])\s+(?=[^\w\s]))"  # words, or signs
LITERAL_OR_SPACE = re.compile(LITERAL + rb"|" + APART + rb"|\s+")
DIRECTIVE = re.compile(rb"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)


def tree_sha256() -> str:
    """One digest over the name and the code of every source file of the package, in the order of their names."""
    found = ((path, kinds) for folder, kinds in CODE.items() for path in (ROOT / folder).rglob("*"))
    return _digest(path for path, kinds in found if path.suffix in kinds and path.is_file())


def code_of(part: str) -> str:
    """The digest of what an operator, or a folder as "tests/nn", depends on, without the framework."""
    name = part.partition(", ")[0]
    folder = name.removeprefix("tests").strip("/")
    files = dependents.of_folder(folder) if name.startswith("tests") else dependents.of_operator(name)
    return _digest(files)[:16]


@cache
def framework() -> str:
    """The digest of the code that all operators have in common."""
    return _digest(dependents.framework())[:16]


def _digest(files: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for name, path in sorted((path.relative_to(ROOT).as_posix(), path) for path in files):
        code = _code(path)
        sha.update(f"{name}\0{len(code)}\0".encode() + code)
    return sha.hexdigest()


def _code(path: Path) -> bytes:
    """A file without comments."""
    content = path.read_bytes().replace(b"\r\n", b"\n")
    return plain_python(content.decode()).encode() if path.suffix == ".py" else without_comments(content)


@cache
def without_comments(cuda: bytes) -> bytes:
    """CUDA C without comments and layout: what a kernel's head says of its speed is written after the run, and a formatter
    may have its way with lines."""
    bare = COMMENT_OR_LITERAL.sub(lambda found: found["literal"] or b" ", cuda)
    code = [LITERAL_OR_SPACE.sub(_as_close_as_may_be, part.strip()) for part in DIRECTIVE.split(bare)]
    directives = [found[0].rstrip() for found in DIRECTIVE.finditer(bare)]
    return b"\n".join(part for pair in zip(code, [*directives, b""]) for part in pair if part)


def _as_close_as_may_be(found: re.Match[bytes]) -> bytes:
    return found["literal"] or (b" " if found["apart"] else b"")


@cache
def plain_python(text: str) -> str:
    """Python without comments, docstrings and empty lines; as it stands where it is none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if "#" in text else ():
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in _statements(tree):
        body = getattr(node, "body", [])
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            _blank(lines, first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module, and all statements in it; not what they are made of, of which there is much more."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, ())
            pending += inner if isinstance(inner, list) else ()


def _blank(lines: list[str], node: ast.stmt) -> None:
    for index in range(node.lineno - 1, node.end_lineno or node.lineno):
        lines[index] = ""


def environment() -> dict[str, Any]:
    """The GPU, its driver and the versions that take part."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": None,
        "driver": _driver(),
        "python": platform.python_version(),
    }
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available():
        found["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found | {"torch": torch.__version__, "torch_cuda": torch.version.cuda} | _cupy()


def _driver() -> str | None:
    """The driver's version as the kernel module states it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _cupy() -> dict[str, Any]:
    installed = {d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}
    cupy = next((f"{name} {version}" for name, version in installed.items() if name.startswith("cupy-cuda")), None)
    try:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
    except Exception:  # no CuPy, or no NVRTC that loads: the report says so
        return {"cupy": cupy, "nvrtc": None}
    return {"cupy": cupy, "nvrtc": f"{major}.{minor}"}


def write(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Put what ran now into the report, in the place of what ran before of the same operators and folders."""
    previous, found = read(path), environment()
    runs = {} if previous is None else {name: run for name, run in previous["runs"].items() if "code" in run}
    on = {name: found.get(name) for name in ("date", "gpu", "torch")}
    for part, result in results.items():
        runs[part] = {"code": code_of(part), "framework": framework(), **on, **result}
    path.write_text(json.dumps({**found, "runs": dict(sorted(runs.items()))}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any] | None:
    """The report, or None where there is none that can be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return report if isinstance(report["runs"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holds(part: str, run: dict[str, Any]) -> bool:
    """True where the tests of a part passed on a GPU, and its code is the same."""
    return bool(run.get("gpu") and run["passed"]) and not run["failures"] and run.get("code") == code_of(part)


def problems(report: dict[str, Any] | None) -> list[str]:
    """Why the report does not vouch for the whole tree; nothing where it does."""
    if report is None:
        return ["there is no report; run `make test-gpu` on a machine with a GPU"]
    runs, found = report["runs"], []
    if missing := [name for name in wanted() if name not in runs]:
        found.append(f"never ran: {', '.join(missing)}")
    if empty := [part for part, run in runs.items() if not run.get("gpu") or not run["passed"] + run["failed"]]:
        found.append(f"nothing passed on a GPU: {', '.join(empty)}")
    if stale := [part for part, run in runs.items() if run.get("code") != code_of(part)]:
        found.append(f"changed since they ran: {', '.join(stale)}")
    if older := [part for part, run in runs.items() if run.get("framework") != framework()]:
        found.append(f"the framework has changed since {len(older)} of {len(runs)} ran")
    return found + [f"failed: {name}" for run in runs.values() for name in run["failures"]]


def wanted() -> list[str]:
    """The operators and optimizers that have a file of tests."""
    files = {*(dependents.TESTS / "ops").glob("test_*.py"), *(dependents.TESTS / "optim").glob("test_*.py")}
    return sorted({name for file in files if (name := dependents.named_after(file.stem.removeprefix("test_")))})


def main(path: Path = REPORT) -> int:
    """Print for what the report holds, and what is wrong with it; 0 where nothing is."""
    report = read(path)
    if report is not None:
        versions = ("python", "torch", "torch_cuda", "cupy", "nvrtc")
        print(f"last run: {report['date']}  {report['gpu']}, driver {report['driver']}")
        print(", ".join(f"{name} {report.get(name)}" for name in versions))
        good = [part for part, run in report["runs"].items() if holds(part, run)]
        print(f"holds for {len(good)} of {len(report['runs'])}: {', '.join(good) or 'nothing'}")
    found = problems(report)
    print("\n".join(found) if found else "fresh: this is the code that was tested")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
