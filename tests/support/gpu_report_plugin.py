"""`pytest -p gpu_report_plugin --gpu-report PATH` keeps the run's result in PATH; see tools/gpu_report.py."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_report.py"


def pytest_addoption(parser):
    parser.addoption("--gpu-report", type=Path, metavar="PATH", help="write the result of this run into PATH (JSON)")


def pytest_configure(config):
    # under xdist the workers have no report to write
    if config.option.gpu_report is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "gpu-report-recorder")


class Recorder:
    """Counts outcomes as they come; writes them at the end."""

    def __init__(self, config):
        self.config = config
        self.outcomes = {}  # test -> "passed", "failed" or "skipped"; the worst of its phases
        self.broken = []  # files that could not be collected

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_sessionfinish(self, exitstatus):
        failures = sorted([*self.broken, *(test for test, outcome in self.outcomes.items() if outcome == "failed")])
        if exitstatus not in (0, 1) and not failures:
            failures.append(f"the run itself: it ended with pytest's exit status {int(exitstatus)}")
        counts = {outcome: list(self.outcomes.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}
        counts["failed"] = len(failures)
        tool().write(self.config.option.gpu_report, self.run_name(), {**counts, "failures": failures})

    def run_name(self):
        """What was asked for: "tests" for a whole run, else the paths and the options that leave tests out."""
        options = self.config.option
        names = [self.relative(arg) for arg in self.config.args]
        if options.keyword:
            names.append(f"-k {options.keyword!r}")
        if options.markexpr not in ("", "gpu"):
            names.append(f"-m {options.markexpr!r}")
        if options.deselect or options.maxfail or any(getattr(options, name, False) for name in ("lf", "quick")):
            names.append("(part)")
        if shard := getattr(options, "shard", None):
            names.append(shard)
        return " ".join(names)

    def relative(self, arg):
        path, colons, test = arg.partition("::")
        path, root = Path(path).resolve(), self.config.rootpath
        return (path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)) + colons + test


def tool():
    spec = importlib.util.spec_from_file_location("gpu_report", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
