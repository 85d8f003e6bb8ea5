"""From the scores of all tests to one file: tests/conformance.csv, tests/conformance_gpu.csv."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from .known import WITHOUT_ANY_ENTRY

PROPERTY = "conformance"
TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tool(name: str) -> ModuleType:
    """A module of the folder of tools, which is no package."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """A pytest plugin: adds up what the tests count, and writes it at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backends: dict[str, dict[str, Any]] = {}
        self.failures: set[str] = set()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failures.add(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failures.add(report.nodeid)
        if report.when == "call":
            for name, counts in report.user_properties:
                if name == PROPERTY:
                    self.add(counts)

    def add(self, counts: dict[str, Any]) -> None:
        """One test's; a test that was skipped has counted nothing."""
        if not counts["suites"]:
            return
        backend = self.backends.setdefault(counts["backend"], {"about": counts["about"], "rows": {}})
        row = backend["rows"].setdefault(counts["row"], {"calls": 0, "launching": 0, "operators": [], "suites": {}})
        row["calls"] += counts["calls"]
        row["launching"] += counts["launching"]
        row["operators"] = sorted({*row["operators"], *counts["operators"]})
        for name, suite in counts["suites"].items():
            total = row["suites"].setdefault(name, {"passed": 0, "failed": 0, "differs": {}, "left_out": {}})
            for kind in ("passed", "failed"):
                total[kind] += suite[kind]
            for kind in ("differs", "left_out"):
                for reason, count in suite[kind].items():
                    total[kind][reason] = total[kind].get(reason, 0) + count

    def pytest_sessionfinish(self) -> None:
        report = tool("gpu_report")
        for backend in self.backends.values():
            backend["rows"] = dict(sorted(backend["rows"].items()))
        data = {
            "sha256": report.tree_sha256(),
            **report.environment(),
            "failures": sorted(self.failures),
            "without_entry": WITHOUT_ANY_ENTRY,
            "backends": dict(sorted(self.backends.items())),
        }
        tool("conformance").keep(self.path, data)
