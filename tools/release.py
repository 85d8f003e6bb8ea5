"""A release, step by step: what has to be so, what is built, and how it is published.

    python tools/release.py check      what is left to do; the exit code says whether anything is
    python tools/release.py build      sdist and wheel into dist/, each made twice and the same to the byte, and the docs
    python tools/release.py trial      the sdist of dist/ installed into a fresh environment, and tests of it run there
    python tools/release.py publish    all three, then the tag and the upload, by somebody who has the account

`publish` does nothing before all of `check` is so, shows its commands and asks. Standard library only, but for what builds:
`build` and `hatchling` (of the extra test), what `make docs` needs (docs), and twine, which `publish` alone needs. `trial`
downloads what cupyops depends on; with `--before torch==2.13.0` pip installs that first, as from a folder of CPU wheels.
"""

from __future__ import annotations

import argparse
import csv
import email
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "example.org"  # of the URL in pyproject.toml, until there is a public one
LARGEST = 5_000_000  # bytes of a distribution, which is source alone
# What runs in the trial, with nothing of the package but what is installed.
TRIED = (
    "tests/kernel/test_kernel.py",
    "tests/kernel/test_notebook.py",
    "tests/simulator/test_races.py",
    "tests/simulator/test_simulation.py",
    "tests/ops/test_relu.py",
    "tests/ops/test_layer_norm.py",
)
NEEDED = (
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "CITATION.cff",
)


def version(root: Path) -> str:
    """The one in `cupyops/__init__.py`, which the wheel has."""
    found = re.search(r'^__version__ = "([^"]+)"$', _read(root, "cupyops/__init__.py"), re.MULTILINE)
    if found is None:
        raise SystemExit("cupyops/__init__.py has no line __version__ = ...")
    return found[1]


def _read(root: Path, name: str) -> str:
    path = root / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _project(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(_read(root, "pyproject.toml"))["project"]
    return found


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


# --- what has to be so: each check yields what is left to do ------------------------------------------------------------


def versions(root: Path) -> Iterator[str]:
    """One version everywhere, of the form that pip orders."""
    here = version(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", here):
        yield f"__version__ is {here!r}, expected the form 1.2.3 or 1.2.3rc1"
    cited = re.search(r"^version: (.+)$", _read(root, "CITATION.cff"), re.MULTILINE)
    if cited is None or cited[1].strip("'\"") != here:
        yield f"CITATION.cff says {cited[1] if cited else 'nothing'!r}; write version: {here}"


def changelog(root: Path) -> Iterator[str]:
    """The newest section is of this version, dated, and has lines."""
    sections = re.split(r"^## ", _read(root, "CHANGELOG.md"), flags=re.MULTILINE)[1:]
    head, _, body = (sections[0] if sections else "").partition("\n")
    found = re.fullmatch(r"\[(.+)\] - (.+)", head.strip())
    if found is None or found[1] != version(root):
        yield f"CHANGELOG.md begins with {head.strip()!r}; write a section [{version(root)}]"
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", found[2]):
        yield f"CHANGELOG.md says {found[2]!r} of [{found[1]}]; write the date of the release, as 2026-01-31"
    if not re.search(r"^- ", body, re.MULTILINE):
        yield "the newest section of CHANGELOG.md has no lines"


def files(root: Path) -> Iterator[str]:
    """What a project of this kind has."""
    yield from (f"there is no {name}" for name in NEEDED if not _read(root, name).strip())


def urls(root: Path) -> Iterator[str]:
    """A public home, of which pyproject.toml alone knows."""
    for name, url in _project(root).get("urls", {}).items():
        if PLACEHOLDER in url:
            yield f"{name} in pyproject.toml is {url!r}, a placeholder; write where the repository is"


def published(root: Path) -> Iterator[str]:
    """Nothing that a user reads tells how to install what is not on an index."""
    read = ["README.md", "docs/*.md", "examples/**/*.ipynb", "cupyops/cli/templates/*"]
    paths = sorted(path.relative_to(root).as_posix() for pattern in read for path in root.glob(pattern))
    if found := [name for name in paths if re.search(r"not published yet|git\+URL", _read(root, name))]:
        yield f"these say that it is not published, or install it by git+URL: {', '.join(found)}"


def links(root: Path) -> Iterator[str]:
    """The README has pictures and links that work on the page of an index."""
    import readme

    text, url = _read(root, "README.md"), _project(root).get("urls", {}).get("Repository", "")
    try:
        text = readme.absolute(text, url, f"v{version(root)}")
    except ValueError as unknown:
        if count := len(list(readme.relative(text))):
            yield f"{count} links and pictures of README.md lead nowhere on the index: {unknown}"


def classifiers(root: Path) -> Iterator[str]:
    """Those of Python name the versions with which tests passed, and no others."""
    rows = csv.DictReader(_read(root, "tests/matrix.csv").splitlines())
    tested = {row["python"] for row in rows if "passed" in row["tests"] and "failed" not in row["tests"]}
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(_project(root).get("classifiers", [])))
    for one in sorted(tested ^ set(found)):
        said = "passed with it" if one in tested else "were not run with it, or failed"
        yield f"{'add' if one in tested else 'remove'} the classifier of Python {one}: tests {said} (tests/matrix.csv)"


def tree(root: Path) -> Iterator[str]:
    """All is committed, and the version is not tagged yet."""
    if not (root / ".git").exists():
        yield "this is no clone; release from one"
    elif _git(root, "status", "--porcelain"):
        yield "there are changes that are not committed"
    elif _git(root, "tag", "--list", f"v{version(root)}"):
        yield f"v{version(root)} is tagged already; raise __version__"


def gpu(root: Path) -> Iterator[str]:
    """The tests of the GPU passed on this very code."""
    done = subprocess.run([sys.executable, root / "tools" / "gpu_report.py"], capture_output=True, text=True)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines() or ["it failed"]
        yield f"make gpu-report: {last[-1]}"


CHECKS: dict[str, Callable[[Path], Iterator[str]]] = {
    "version": versions,
    "changelog": changelog,
    "files": files,
    "public URL": urls,
    "links of the README": links,
    "published": published,
    "classifiers": classifiers,
    "clean tree, new tag": tree,
    "GPU report": gpu,
}


def check(root: Path) -> bool:
    """Print each check, and what is left to do; returns whether nothing is."""
    ready = True
    for name, examine in CHECKS.items():
        left = list(examine(root))
        print(f"{'to do' if left else 'ok':<6} {name}")
        for line in left:
            print(f"         {line}")
        ready &= not left
    print("by hand: `make test-all` and `make test-gpu` on this commit, docs/conformance.md by `make conformance`")
    return ready


# --- what is built ------------------------------------------------------------------------------------------------------


def build(root: Path, out: Path) -> list[Path]:
    """Sdist and wheel into `out`: made twice, the same to the byte. Raises SystemExit where they are not, or are wrong."""
    out.mkdir(parents=True, exist_ok=True)
    if there := sorted(path.name for path in out.iterdir()):
        raise SystemExit(f"{out} holds {', '.join(there)}; remove it, so that nothing else is published")
    # of the commit, not of now
    environ = {"SOURCE_DATE_EPOCH": _git(root, "log", "-1", "--format=%ct") or "315532800", **os.environ}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    with tempfile.TemporaryDirectory() as again:
        for folder in (out, Path(again)):
            done = subprocess.run([*command, folder, root], capture_output=True, text=True, env=environ)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
        made = sorted(out.iterdir())
        differing = [path.name for path in made if path.read_bytes() != (Path(again) / path.name).read_bytes()]
    if differing:
        raise SystemExit(f"built twice, these differ: {', '.join(differing)}")
    if wrong := [line for path in made for line in examine(path, root)]:
        raise SystemExit("\n".join(wrong))
    for line in links(root):
        print(f"NOT TO BE PUBLISHED: {line}")
    for path in made:
        print(f"{path.name}  {path.stat().st_size:,} bytes  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return made


def examine(path: Path, root: Path) -> Iterator[str]:
    """What is wrong with a distribution: its version, its size, what it holds."""
    if path.stat().st_size > LARGEST:
        yield f"{path.name} has {path.stat().st_size:,} bytes, expected at most {LARGEST:,}"
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            metadata = email.message_from_bytes(wheel.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
    else:
        with tarfile.open(path) as sdist:
            names = sdist.getnames()
            inside = sdist.extractfile(next(n for n in names if n.count("/") == 1 and n.endswith("/PKG-INFO")))
            assert inside is not None
            metadata = email.message_from_bytes(inside.read())
    if metadata["Version"] != version(root):
        yield f"{path.name} is of version {metadata['Version']}, expected {version(root)}"
    if not any("LICENSE" in name for name in names):
        yield f"{path.name} has no LICENSE"
    if stray := [name for name in names if re.search(r"\.(pyc|cubin|so)$|(^|/)(\.git|\.venv|build)/", name)]:
        yield f"{path.name} has {', '.join(stray[:3])}, expected source alone"


def docs(root: Path) -> None:
    """The site, in which a broken link is an error; the Makefile alone says how it is built."""
    if subprocess.run(["make", "--no-print-directory", "docs", f"PYTHON={sys.executable}"], cwd=root).returncode:
        raise SystemExit("the docs do not build")


# --- whether it can be installed ---------------------------------------------------------------------------------------


def trial(out: Path, before: list[str]) -> None:
    """Install the sdist of `out` into a fresh environment, and run `TRIED` there. Raises SystemExit where that fails.

    The tests are those of the sdist. Its package is removed before they run, so that they can only find what was installed.
    """
    sdists = list(out.glob("*.tar.gz"))
    if len(sdists) != 1:
        raise SystemExit(f"{out} holds {len(sdists)} sdists, expected one: python tools/release.py build")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environ["CUPYOPS_CACHE_DIR"] = str(folder / "cache")

        def run(*words: object, where: Path = folder) -> None:
            print("$", shlex.join(map(str, words)))
            if status := subprocess.run(list(map(str, words)), cwd=where, env=environ).returncode:
                raise SystemExit(f"the trial failed with exit code {status}; nothing is to be published")

        for requirement in (*before, f"{sdists[0].resolve()}[cuda12x,test]"):
            run(python, "-m", "pip", "install", "--quiet", requirement)
        with tarfile.open(sdists[0]) as archive:
            archive.extractall(folder, filter="data")
        (source,) = (path for path in folder.iterdir() if (path / "PKG-INFO").is_file())
        shutil.rmtree(source / "cupyops")
        shutil.rmtree(source / "cuda_src")
        run(python, "-m", "cupyops", "--version")
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TRIED, where=source)
        run(python, "-m", "pip", "check")


# --- how it is published ------------------------------------------------------------------------------------------------


def publish(root: Path, out: Path, repository: str | None, before: list[str]) -> int:
    """Check, build, try, ask; then tag and upload. twine asks for the account, which nothing here knows."""
    if not check(root):
        print("\nnothing is published before all of that is done")
        return 1
    if importlib.util.find_spec("twine") is None:
        print("\npublishing needs twine: pip install twine")
        return 1
    made = build(root, out)
    docs(root)
    trial(out, before)
    where = ["--repository", repository] if repository else []
    commands = [
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)],
        ["git", "tag", "--annotate", f"v{version(root)}", "--message", f"cupyops {version(root)}"],
        [sys.executable, "-m", "twine", "upload", *where, *map(str, made)],
        ["git", "push", "origin", f"v{version(root)}"],
    ]
    print("\nto run:", *map(shlex.join, commands), sep="\n  ")
    if input("run them? [y/N] ").strip().lower() not in ("y", "yes"):
        return 1
    for command in commands:
        if status := subprocess.run(command, cwd=root).returncode:
            print(f"{shlex.join(command)} failed; what comes after it is not run")
            return status
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["check", "build", "trial", "publish"], nargs="?", default="check")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of distributions, by default dist")
    parser.add_argument("--repository", help="as twine knows it; by default the public index")
    parser.add_argument("--before", action="append", default=[], help="what pip installs first in the trial")
    asked = parser.parse_args()
    if asked.command == "check":
        return 0 if check(ROOT) else 1
    if asked.command == "build":
        build(ROOT, asked.out)
        docs(ROOT)
        return 0
    if asked.command == "trial":
        trial(asked.out, asked.before)
        return 0
    return publish(ROOT, asked.out, asked.repository, asked.before)


if __name__ == "__main__":
    sys.exit(main())
