"""`pytest -p gpu_report_plugin --gpu-report PATH` keeps the run's result in PATH; see tools/gpu_report.py."""

import importlib
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PART, SIZE, NONE = "part of the GPU report", "tests of that part", {"passed": 0, "failed": 0, "skipped": 0}
KEYWORDS = ("", "more_than_2", "not more_than_2")  # -k of a run that is all of its kind


def pytest_addoption(parser):
    parser.addoption("--gpu-report", type=Path, metavar="PATH", help="write the result of this run into PATH (JSON)")
    parser.addoption("--stale", action="store_true", help="with --gpu-report: only that for which PATH does not hold")


def pytest_configure(config):
    # under xdist the workers have no report to write
    if config.option.gpu_report is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "gpu-report-recorder")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Each test tells the process that reports which part it is of; what holds is left out where that is asked for."""
    if config.option.gpu_report is None:
        return
    parts = [part_of(item) for item in items]
    sizes = Counter(parts)
    for item, part in zip(items, parts):
        item.user_properties += [(PART, part), (SIZE, sizes[part])]
    if config.option.stale:
        report = tool().read(config.option.gpu_report)
        good = {part for part, run in (report or {"runs": {}})["runs"].items() if tool().holds(part, run)}
        left = [item for item in items if dict(item.user_properties)[PART] in good]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def part_of(item):
    """The operator or folder, and which tests of it."""
    import selection

    tools = tool()
    kind = tools.LARGE if "more_than_2" in item.name else tools.OP_DB if item.path.parent.name == "opdb" else ""
    return ", ".join(filter(None, (selection.part_of(item), kind)))


def pytest_sessionfinish(session):
    """Where the report holds for everything, to run nothing is no failure."""
    if session.config.option.stale and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


class Recorder:
    """Counts outcomes as they come; writes them at the end, where the run was of all tests of a kind.

    Of a run that was interrupted, as by `timeout -s INT`, the parts count whose tests have all run.
    """

    def __init__(self, config):
        self.config = config
        self.outcomes = {}  # test -> "passed", "failed" or "skipped"; the worst of its phases
        self.parts = {}  # test -> its part
        self.sizes = {}  # part -> how many tests it has
        self.ended = Counter()  # part -> how many of them have run
        self.broken = []  # files that could not be collected

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        told = dict(report.user_properties)
        part = self.parts[report.nodeid] = told.get(PART, "tests")  # none where a process has died
        self.sizes[part] = told.get(SIZE, 0)
        self.ended[part] += report.when == "teardown"
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_terminal_summary(self, terminalreporter, exitstatus):
        if why := self.partial(exitstatus):
            return terminalreporter.write_line(f"The GPU report stays as it was: {why}.")
        results = self.results()
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            results = {part: result for part, result in results.items() if self.ended[part] == self.sizes[part] > 0}
        tool().write(self.config.option.gpu_report, results)

    def partial(self, exitstatus):
        """Why the run does not count."""
        option = self.config.option
        whole = {str(self.config.rootpath / name) for name in ("tests", "tests/opdb")}
        if exitstatus not in (0, 1, pytest.ExitCode.INTERRUPTED):
            return f"the run ended with pytest's exit status {int(exitstatus)}"
        if self.broken:
            return f"{', '.join(self.broken)} could not be collected"
        if not {str(Path(arg).resolve()) for arg in self.config.args} <= whole:
            return "only some paths ran"
        left_out = option.deselect or option.maxfail or any(getattr(option, name, False) for name in ("lf", "quick"))
        if option.keyword not in KEYWORDS or option.markexpr not in ("", "gpu") or left_out:
            return "only some tests ran"
        return ""

    def results(self):
        """Counts and failures of each part."""
        found = defaultdict(lambda: {**NONE, "failures": []})
        for test, outcome in self.outcomes.items():
            found[self.parts[test]][outcome] += 1
            if outcome == "failed":
                found[self.parts[test]]["failures"].append(test)
        return {part: {**result, "failures": sorted(result["failures"])} for part, result in found.items()}


def tool():
    """tools/gpu_report.py."""
    if "gpu_report" not in sys.modules:
        sys.path[:0] = [] if str(TOOLS) in sys.path else [str(TOOLS)]
        importlib.import_module("gpu_report")
    return sys.modules["gpu_report"]
