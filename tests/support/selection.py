"""Which tests run: all; or, with `--quick`, those that are quick, and the slow ones of files that differ from main.

A test is slow that is marked so or named in tests/slow.csv; every other is quick. What differs is what git says: this tree
against the commit where it left main, or `--base`. dependents.py says which tests a file concerns. A test that runs once for
each operator is concerned by the files of that operator alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS.parent / "tools"))

import dependents  # noqa: E402

SLOW_FILE = TESTS / "slow.csv"
SLOW = 1.0  # CPU seconds of a case, on average, from which a test is slow
SEVEN = ("add", "cross_entropy", "embedding", "layer_norm", "linear", "max_pool2d", "sum")  # operators of seven kinds
MAIN = ("origin/main", "main")
FORKING = ("test_robustness.py",)  # fork their process hundreds of times, which costs the more the more it holds


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--quick", action="store_true", help="leave out slow tests of files that do not differ from main")
    group.addoption(
        "--base", default="", metavar="COMMIT", help="with --quick: compare with this commit, not with main"
    )
    group.addoption("--shard", default=None, metavar="I/N", help="of N parts, by operators and files, the I-th")
    group.addoption("--measure", type=Path, metavar="PATH", help="write which tests were slow into PATH (CSV)")


def configure(config: pytest.Config) -> None:
    """The first process finds what differs; its workers are told."""
    option = config.option
    if hasattr(config, "workerinput"):
        option.differing = config.workerinput["differing"]
        return
    option.differing = sorted(differing(option.base)) if option.quick else []
    config.pluginmanager.register(Reporter(config), "reporter-of-selection")


def differing(base: str = "", root: Path = dependents.ROOT) -> set[str]:
    """The files, as paths below the root, that differ from the commit where this tree left `base`, or else main.

    None where git knows neither, as in a source archive, or answers nothing, as of a folder that another user owns.
    """
    if not _git(root, "rev-parse", "--verify", "HEAD"):
        return set()
    refs = [ref for ref in ((base,) if base else MAIN) if _git(root, "rev-parse", "--verify", "--quiet", ref)]
    if base and not refs:
        raise pytest.UsageError(f"--base: git knows no commit {base!r} here")
    since = _git(root, "merge-base", refs[0], "HEAD") if refs else []
    if not since:
        return set()
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", since[0].strip())
    return {*changed, *_git(root, "ls-files", "--others", "--exclude-standard", "-z")}


def _git(root: Path, *arguments: str) -> list[str]:
    """What git prints, without the separators; nothing where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [text for text in done.stdout.split("\0") if text]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not run; slow tests come first, so that no process has a long one at the end."""
    left: list[pytest.Item] = []
    if config.option.shard:
        part, parts = shard(config.option.shard)
        left += [item for item in items if place(item, parts) != part]
    slow_names = read_slow()
    slow = {item for item in items if is_slow(item, slow_names)}
    if config.option.quick:
        concerned = Concerned({dependents.ROOT / name for name in config.option.differing})
        left += [item for item in slow if not concerned(item) and not item.get_closest_marker("gpu")]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: (item.path.name not in FORKING, item not in slow))


def is_slow(item: pytest.Item, slow_names: set[str]) -> bool:
    """A test is slow by its name or a marker, but for the operators that the marker names."""
    mark = item.get_closest_marker("slow")
    if mark is not None and operator_of(item) in mark.kwargs.get("but", ()):
        return False
    return mark is not None or function_of(item) in slow_names


class Concerned:
    """Whether a test depends on a file that differs."""

    def __init__(self, files: set[Path]) -> None:
        self.files = files
        self.known: dict[str | Path, bool] = {}

    def __call__(self, item: pytest.Item) -> bool:
        key = parameter_operator(item) or item.path
        if key not in self.known:
            find: Callable[[Any], frozenset[Path]] = (
                dependents.of_test_file if isinstance(key, Path) else dependents.of_operator
            )
            self.known[key] = bool(self.files) and not self.files.isdisjoint(find(key))
        return self.known[key]


def parameter_operator(item: pytest.Item) -> str:
    """The operator that a test has as its parameter, for which it runs once; an empty name where it has none."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    mark = item.get_closest_marker("of_operator")
    if mark is not None:
        return str(mark.args[0](parameters))
    if "contract" in parameters:
        return str(parameters["contract"].__module__).rpartition("test_")[2]
    operator = parameters.get("operator")
    return operator if isinstance(operator, str) else ""


def operator_of(item: pytest.Item) -> str:
    """The operator of a test's parameter, or the one that its file is named after."""
    return parameter_operator(item) or item.path.stem.removeprefix("test_")


def part_of(item: pytest.Item) -> str:
    """The operator that a test is of, else its folder: what shards and the GPU report go by."""
    folders = item.path.relative_to(TESTS).parts[:-1]
    own = dependents.named_after(item.path.stem.removeprefix("test_")) if folders[:1] in (("ops",), ("optim",)) else ""
    return parameter_operator(item) or own or "/".join(("tests", *folders[:1]))


def function_of(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]


def slow(*values: object) -> list[Any]:
    """Values of a test's parameter for which it is slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def read_slow(path: Path = SLOW_FILE) -> set[str]:
    """The tests whose cases are slow; none where there is no table."""
    return set(path.read_text(encoding="utf-8").splitlines()[1:]) if path.is_file() else set()


def write_slow(names: set[str], path: Path) -> None:
    """The table that `read_slow` reads."""
    path.write_text("\n".join(["test", *sorted(names)]) + "\n", encoding="utf-8")


def shard(text: str) -> tuple[int, int]:
    """(index from 0, how many) of "2/4"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--shard is {text!r}, expected one such as 2/4")
    return int(found[1]) - 1, int(found[2])


def place(item: pytest.Item, parts: int) -> int:
    """The shard that a test is in: all tests of an operator, or of a folder, are in one."""
    return int(hashlib.sha256(part_of(item).encode()).hexdigest(), 16) % parts


def cpu_seconds() -> float:
    """Seconds that this process and the programs that it ran have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Keep how long a test computed, for `--measure`."""
    start = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu seconds", cpu_seconds() - start))


class Reporter:
    """In the process that reports: what was selected, what failed as soon as it has, and which tests were slow."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["differing"] = self.config.option.differing

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # a run that is cut off has no summary
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            terminal.write_line(f"\nFAILED {report.nodeid}: {reason.strip()[:300]}", red=True)
        if report.when == "teardown":
            taken = sum(value for name, value in report.user_properties if name == "cpu seconds")
            self.seconds[report.nodeid.partition("[")[0]].append(float(taken))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        option = self.config.option
        if option.quick:
            files = f"{len(option.differing)} files that differ from {option.base or 'main'}"
            terminalreporter.write_line(f"These are the quick tests, and the slow ones of {files}.")
        if option.measure is not None:
            write_slow(self.slow(), option.measure)

    def slow(self) -> set[str]:
        """The tests whose cases take long, as measured here; of others, as it was."""
        found = {name for name, taken in self.seconds.items() if sum(taken) / len(taken) >= SLOW}
        return found | {name for name in read_slow() if name not in self.seconds}
