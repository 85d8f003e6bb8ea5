"""`make test-matrix`: each Python that is here, and what of cupyops works with it; writes tests/matrix.csv.

For each Python that cupyops supports: for which releases of PyTorch there are wheels of all it needs, whether every file of
the package compiles without a warning, and, where a CPU build of PyTorch can be had, whether a new environment of that one
line installs, imports, and passes tests of the framework, of an operator and of the simulator. What was not tried is "not
tested", with no guess. Interpreters are looked for on the path and among pyenv's. pip brings wheels, and never a CUDA build
of PyTorch; with `--torch system` the PyTorch that the interpreter has already is taken, as that of a Linux distribution.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "matrix.csv"
LEAST = "2.11"  # the oldest PyTorch that cupyops is for
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COLUMNS = ("python", "torch", "numpy", "cupy", "wheels", "compiles", "imports", "tests")
UNTRIED = "not tested"
SYSTEM = "system"
TESTS = ("tests/util", "tests/kernel/launch", "tests/simulator/test_launch.py", "tests/ops/test_relu.py")
WARNINGS = """
import pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    compile(path.read_bytes(), str(path), "exec")
"""


def interpreter(version: str) -> Path | None:
    """One of this version, on the path or of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    there = [found for name in (f"python{version}",) if (found := shutil.which(name))]
    for path in [sys.executable, *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True), *there]:
        done = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if done.stdout.strip() == version:
            return Path(path)
    return None


def wheels(version: str, extra: str, releases: list[str]) -> str:
    """Of which of PyTorch's releases there are wheels for this Python, with all that the extra asks for beside it.

    uv answers from metadata alone, so nothing is downloaded or installed.
    """
    found = []
    for release in releases:
        asked = "\n".join([f"torch=={release}", *_requirements(extra)])
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary", ":all:", "-"]
        done = subprocess.run([*command, "--python-version", version], input=asked, capture_output=True, text=True)
        if done.returncode == 0:
            found.append(_minor(release))
    if found and found == [_minor(release) for release in releases] and len(found) > 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(found) or "none"


def releases(least: str) -> list[str]:
    """The newest of each minor release of PyTorch, from `least` on, as pip lists them."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listed = re.search(r"^ *Available versions: (.*)$", said, re.MULTILINE)
    newest: dict[str, str] = {}
    for release in listed[1].split(", ") if listed else ():
        if re.fullmatch(r"[\d.]+", release) and _ordered(release) >= _ordered(least):
            newest.setdefault(_minor(release), release)
    return sorted(newest.values(), key=_ordered)


def _ordered(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _requirements(extra: str) -> Iterator[str]:
    """Of this tree, which itself has no wheel: its dependencies and those of the extra."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pending = [*project["dependencies"], *project["optional-dependencies"][extra]]
    for text in pending:
        if text.startswith("cupyops["):
            pending += project["optional-dependencies"][text.removeprefix("cupyops[").rstrip("]")]
        else:
            yield text


def row(version: str, extra: str, torch: str, tests: tuple[str, ...], releases: list[str]) -> dict[str, str]:
    """What is so with one Python."""
    found = dict.fromkeys(COLUMNS, UNTRIED) | {"python": version}
    if releases:
        found["wheels"] = wheels(version, extra, releases)
    python = interpreter(version)
    if python is None:
        return found
    compiled = subprocess.run([python, "-W", "error", "-c", WARNINGS, ROOT / "cupyops"], capture_output=True)
    found["compiles"] = "yes" if compiled.returncode == 0 else "no"
    with tempfile.TemporaryDirectory() as folder:
        inside = str(Path(folder) / "bin" / "python")
        pip = [inside, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([python, "-m", "venv", *(["--system-site-packages"] * (torch == SYSTEM)), folder], check=True)
        # the CPU build alone: without one for this Python the rest is not tried
        there = [inside, "-c", "import torch"] if torch == SYSTEM else [*pip, "--only-binary", ":all:", torch]
        if subprocess.run(there, capture_output=True).returncode:
            return found
        subprocess.run([*pip, f"{ROOT}[{extra},test]"], check=True, capture_output=True)
        versions = "import torch, numpy, cupy, cupyops; print(torch.__version__, numpy.__version__, cupy.__version__)"
        done = subprocess.run(
            [inside, "-W", "error::SyntaxWarning", "-c", versions], capture_output=True, text=True, cwd=folder
        )
        found["imports"] = "no" if done.returncode else "yes"
        if done.returncode == 0:
            found |= zip(("torch", "numpy", "cupy"), done.stdout.split())
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            words = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
            said = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environ)
            last = said.stdout.strip().splitlines()[-1]
            found["tests"] = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", last)) or last
    return found


def read(path: Path = KEPT) -> list[dict[str, str]]:
    """The rows that are kept."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def merged(kept: list[dict[str, str]], new: dict[str, str]) -> list[dict[str, str]]:
    """The rows with a new one in place of that of the same Python and PyTorch, in order.

    What was tried stays when nothing could be tried now; wheels are those of the last look.
    """
    others = [one for one in kept if one["python"] != new["python"]]
    same = [one for one in kept if one["python"] == new["python"] and one["torch"] not in (new["torch"], UNTRIED)]
    if new["wheels"] == UNTRIED:
        looked = [one["wheels"] for one in kept if one["python"] == new["python"]]
        new = new | {"wheels": looked[0] if looked else UNTRIED}
    same = [one | {"wheels": new["wheels"]} for one in same]
    if new["torch"] != UNTRIED or not same:
        same.append(new)
    return sorted([*others, *same], key=lambda one: (_ordered(one["python"]), one["torch"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "pythons", nargs="*", default=PYTHONS, help="versions such as 3.12; by default all that cupyops is for"
    )
    parser.add_argument("--extra", default="cuda12x")
    parser.add_argument(
        "--torch", default="torch==2.13.0+cpu", help=f"what pip is to install first: a CPU build; or {SYSTEM}"
    )
    parser.add_argument(
        "--no-wheels", action="store_true", help="keep what is known of wheels, and do not ask for them"
    )
    parser.add_argument("--tests", nargs="*", default=TESTS)
    asked = parser.parse_args()
    rows = read() if KEPT.exists() else []
    listed = [] if asked.no_wheels else releases(LEAST)
    for version in asked.pythons:
        new = row(version, asked.extra, asked.torch, tuple(asked.tests), listed)
        rows = merged(rows, new)
        print(" | ".join(new.values()), flush=True)
    with open(KEPT, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
