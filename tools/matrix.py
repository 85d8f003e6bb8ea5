"""`make test-matrix`: each Python that is here, and what of cupyops works with it; writes tests/matrix.csv.

Of each Python that cupyops is for: whether pip finds wheels of all that it needs, whether every file of the package compiles
without a warning, and, where a CPU build of PyTorch can be had for it, whether a new environment of that one line installs,
imports, and passes tests of the framework, of an operator and of the simulator. What was not tried is "not tested", with no
guess. Interpreters are looked for on the path and among pyenv's; pip brings wheels, and never a CUDA build of PyTorch.
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
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COLUMNS = ("python", "torch", "numpy", "cupy", "wheels", "compiles", "imports", "tests")
UNTRIED = "not tested"
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


def wheels(version: str, extra: str) -> str:
    """Whether pip finds wheels for this Python of everything that the extra asks for; nothing is installed."""
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--target", target]
        asked = ["--only-binary", ":all:", "--python-version", version, *_requirements(extra)]
        return "yes" if subprocess.run([*command, *asked], capture_output=True).returncode == 0 else "no"


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


def row(version: str, extra: str, torch: str, tests: tuple[str, ...]) -> dict[str, str]:
    """What is so with one Python."""
    found = dict.fromkeys(COLUMNS, UNTRIED) | {"python": version, "wheels": wheels(version, extra)}
    python = interpreter(version)
    if python is None:
        return found
    compiled = subprocess.run([python, "-W", "error", "-c", WARNINGS, ROOT / "cupyops"], capture_output=True)
    found["compiles"] = "yes" if compiled.returncode == 0 else "no"
    with tempfile.TemporaryDirectory() as folder:
        inside = str(Path(folder) / "bin" / "python")
        pip = [inside, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([python, "-m", "venv", folder], check=True)
        # the CPU build alone: without one for this Python the rest is not tried
        if subprocess.run([*pip, "--only-binary", ":all:", torch], capture_output=True).returncode:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "pythons", nargs="*", default=PYTHONS, help="versions such as 3.12; by default all that cupyops is for"
    )
    parser.add_argument("--extra", default="cuda12x")
    parser.add_argument("--torch", default="torch==2.13.0+cpu", help="what pip is to install first: a CPU build")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    asked = parser.parse_args()
    kept = {one["python"]: one for one in read()} if KEPT.exists() else {}
    for version in asked.pythons:
        kept[version] = row(version, asked.extra, asked.torch, tuple(asked.tests))
        print(" | ".join(kept[version].values()), flush=True)
    with open(KEPT, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[version] for version in sorted(kept, key=lambda one: [*map(int, one.split("."))]))


if __name__ == "__main__":
    main()
