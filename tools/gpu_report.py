"""The record of a GPU test run, tests/gpu_report.json: who ran what, where, on which code, with what result.

Where there is a GPU, `make test-gpu` runs the tests that need one and writes the record. Anywhere else the record says
whether this tree is the one that passed: `make gpu-report`. Standard library only, so that it runs anywhere.
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
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
CODE = {"cuda_src": (".cu", ".cuh"), "cupyops": (".cu", ".cuh", ".py")}
SHARD = re.compile(r"(.*) (\d+)/(\d+)")
LITERAL = rb"""(?P<literal>"(?:\\.|[^"\\\n])*+"|'(?:\\.|[^'\\\n])+')"""
COMMENT_OR_LITERAL = re.compile(rb"//[^\n]*|/\*.*?\*/|" + LITERAL, re.DOTALL)
APART = rb"(?P<apart>(?<=\w)\s+(?=\w)|(?<=[^\w\s])\s+(?=[^\w\s]))"  # words, or signs
LITERAL_OR_SPACE = re.compile(LITERAL + rb"|" + APART + rb"|\s+")
DIRECTIVE = re.compile(rb"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)


def tree_sha256(root: Path = ROOT) -> str:
    """One digest over the name and the code of every source file of the package, in the order of their names."""
    sha = hashlib.sha256()
    files = [
        p for folder, kinds in CODE.items() for p in (root / folder).rglob("*") if p.suffix in kinds and p.is_file()
    ]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        code = plain_python(content.decode()).encode() if path.suffix == ".py" else without_comments(content)
        sha.update(f"{name}\0{len(code)}\0".encode() + code)
    return sha.hexdigest()


def without_comments(cuda: bytes) -> bytes:
    """CUDA C without comments and layout: what a kernel's head says of its speed is written after the run, and a formatter
    may have its way with lines."""
    bare = COMMENT_OR_LITERAL.sub(lambda found: found["literal"] or b" ", cuda)
    code = [LITERAL_OR_SPACE.sub(_as_close_as_may_be, part.strip()) for part in DIRECTIVE.split(bare)]
    directives = [found[0].rstrip() for found in DIRECTIVE.finditer(bare)]
    return b"\n".join(part for pair in zip(code, [*directives, b""]) for part in pair if part)


def _as_close_as_may_be(found: re.Match[bytes]) -> bytes:
    return found["literal"] or (b" " if found["apart"] else b"")


def plain_python(text: str, without: tuple[type[ast.stmt], ...] = ()) -> str:
    """Python without comments, docstrings, empty lines and statements of some kinds; as it stands where it is none."""
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
        if isinstance(node, without):
            _blank(lines, node)
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


LARGE = ("tests -k 'more_than_2'", "tests -k 'not more_than_2'")
"""The two runs that are all of tests: those of more than 2^31 elements have no room beside many others."""


def suites(root: Path = ROOT) -> list[str]:
    """The runs that a whole report has: all of tests, and op_db's, which wants a process of its own."""
    return ["tests", *(["tests/opdb"] if (root / "tests" / "opdb").is_dir() else [])]


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


def write(path: Path, run: str, result: dict[str, Any], root: Path = ROOT) -> None:
    """Put the result of `run` into the report. Other runs of the same code stay; a whole run replaces partial ones."""
    previous, sha256, whole = read(path), tree_sha256(root), suites(root)
    runs = previous["runs"] if previous is not None and previous["sha256"] == sha256 else {}
    part, shard = of_shard(run)
    if part in whole or part in LARGE:
        replaced = LARGE if part == "tests" else ("tests",) if part in LARGE else ()
        for name in list(runs):
            other, its = of_shard(name)
            of_others = other == part and its[1:] != shard[1:]  # the whole, or a shard of other shards
            if other not in (*whole, *LARGE) or other in replaced or of_others:
                del runs[name]
    report = {"sha256": sha256, **environment(), "runs": {**runs, run: result}}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def of_shard(run: str) -> tuple[str, tuple[int, ...]]:
    """Of "tests 1/4", as a run with `--shard=1/4` is named, ("tests", (1, 4)); of "tests", ("tests", ())."""
    found = SHARD.fullmatch(run)
    return (found[1], (int(found[2]), int(found[3]))) if found else (run, ())


def shards(runs: dict[str, Any], part: str) -> list[str]:
    """The names of the runs that are all of one: its own, or those of its shards, where there are all of them."""
    if part in runs:
        return [part]
    each = {of_shard(run): run for run in runs if of_shard(run)[0] == part}
    count = next((numbers[1] for _, numbers in each), 0)
    wanted = [(part, (number, count)) for number in range(1, count + 1)]
    return [each[one] for one in wanted] if all(one in each for one in wanted) else []


def read(path: Path) -> dict[str, Any] | None:
    """The report, or None where there is none that can be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return report if isinstance(report["runs"], dict) and isinstance(report["sha256"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def problems(report: dict[str, Any] | None, root: Path = ROOT) -> list[str]:
    """Why the report does not vouch for the tree; nothing where it does."""
    if report is None:
        return ["there is no report; run `make test-gpu` on a machine with a GPU"]
    found = []
    if report["sha256"] != tree_sha256(root):
        found.append("stale: cuda_src/ or cupyops/ changed since; run `make test-gpu` again")
    if not report["gpu"]:
        found.append("no GPU took part")
    for suite in suites(root):
        parts = LARGE if suite == "tests" and any(one in report["runs"] for one in LARGE) else (suite,)
        for part in parts:
            names = shards(report["runs"], part)
            if not names:
                found.append(f"{part} was not run")
            found += [f"no test of {name} passed" for name in names if not report["runs"][name]["passed"]]
    for run, result in report["runs"].items():
        found += [f"failed in {run}: {name}" for name in result["failures"]]
    return found


def main(path: Path = REPORT) -> int:
    """Print the report and what is wrong with it; 0 where nothing is."""
    report = read(path)
    if report is not None:
        versions = ("python", "torch", "torch_cuda", "cupy", "nvrtc")
        print(f"{report['date']}  {report['gpu']}, driver {report['driver']}")
        print(", ".join(f"{name} {report.get(name)}" for name in versions))
        for run, result in report["runs"].items():
            print(f"{run}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    found = problems(report)
    print("\n".join(found) if found else "fresh: this is the code that was tested")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
