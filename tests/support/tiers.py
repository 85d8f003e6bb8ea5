"""What of the tests runs: all; or, with `--changed`, all but what ran in full on the same sources (ran_in_full.py).

A test marked `in_full` is of an operator: of its parameter `operator` or `contract`, of its file, or of what `by=` makes of
its parameters. It runs where the operator has changed, of the operators in `always=` every time, and otherwise only where it
is drawn. Other tests of operators, those of `tests/ops`, `tests/optim` and `tests/dispatch`, always begin; where one comes
to launch a kernel of an operator that has not changed, or for which no time is left, it ends there as skipped. Each kernel
once, whatever has changed, is `tests/simulator/test_operators.py::test_each_kernel_once`.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

SEVEN = ("add", "cross_entropy", "embedding", "layer_norm", "linear", "max_pool2d", "sum")  # that differ in kind
SHARED = ("began", "changed_operators", "draw", "operators")  # what all processes of a run agree on
UNCHANGED = "ran in full on the same sources"
NO_TIME = "no time is left for all that has changed"
SLOW = (  # folders and files, some of whose tests take many seconds each; and one that forks, and so is before them
    "docs",
    "examples",
    "test_distributed.py",
    "test_forms_ab.py",
    "test_new.py",
    "test_pictures.py",
    "test_robustness.py",
    "test_wheel.py",
)
FOLDERS = ("ops", "optim", "dispatch")  # whose tests may launch what has changed alone

_bounded = pytest.StashKey[bool]()  # of an item: it begins only while there is time
_launching = pytest.StashKey[bool]()  # of an item: its operator has changed, and it may launch while there is time


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--changed", action="store_true", help="leave out what ran in full on the same sources")
    group.addoption("--drawn", type=float, default=3, metavar="PERCENT", help="how much of that is run anew even so")
    group.addoption("--draw", type=int, default=None, metavar="SEED", help="which; by default another each time")
    group.addoption("--until", type=float, default=None, metavar="SECONDS", help="begin nothing in full after that")
    group.addoption("--record", type=Path, metavar="PATH", help="write the table of what has run in full into PATH")
    group.addoption("--shard", default=None, metavar="I/N", help="of N parts, by operators and files, the I-th")


def configure(config: pytest.Config) -> None:
    """What all processes of a run are to agree on is found by the first, and told to its workers."""
    option = config.option
    if not (option.changed or option.record):
        return
    if hasattr(config, "workerinput"):
        vars(option).update(config.workerinput["tiers"])
        return
    import ran_in_full

    if option.record and (config.args != config.getini("testpaths") or option.keyword or option.markexpr):
        raise pytest.UsageError("--record is of a run of all tests: no paths, no -k, no -m")
    option.began = time.time()
    option.changed_operators, option.operators = ran_in_full.changed(), list(ran_in_full.operators())
    option.draw = random.randrange(10_000) if option.draw is None else option.draw
    config.pluginmanager.register(Tally(config), "tally-of-tiers")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not run, and put the rest in an order: what may run out of time is last (`in_order`)."""
    left: list[pytest.Item] = []
    if config.option.shard:
        part, parts = shard(config.option.shard)
        left += [item for item in items if place(item, parts) != part]
        items[:] = [item for item in items if place(item, parts) == part]
    if config.option.changed:
        changed = set(config.option.changed_operators)
        marked = [item for item in items if item.get_closest_marker("in_full")]
        if unknown := [item.nodeid for item in marked if operator_of(item) not in config.option.operators]:
            raise pytest.UsageError(f"{unknown[0]} is marked in_full, and of no operator")
        quiet = [item for item in marked if is_quiet(item, changed)]
        count = round(len(quiet) * config.option.drawn / 100)
        drawn = random.Random(config.option.draw).sample(sorted(quiet, key=lambda item: item.nodeid), count)

        out = set(quiet) - set(drawn)
        left += out
        for item in items:
            anew = operator_of(item) in changed
            item.stash[_bounded] = anew and item.get_closest_marker("in_full") is not None
            item.stash[_launching] = anew and item.path.parent.name in FOLDERS
        items[:] = in_order([item for item in items if item not in out], config)
    if left:
        config.hook.pytest_deselected(items=left)


def in_order(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Slow files first, what may run out of time last, one operator after another in an order that is drawn.

    Of several processes each begins with an equal part of all tests, side by side in this order, and takes of the others'
    when it is done: so each part is in that order, and none is left at the end with a file of minutes.
    """
    bounded = [item for item in items if item.stash.get(_bounded, False)]
    operators = sorted({operator_of(item) for item in bounded})
    random.Random(config.option.draw).shuffle(operators)
    bounded.sort(key=lambda item: (operators.index(operator_of(item)), item.nodeid))
    rest = [item for item in items if not item.stash.get(_bounded, False)]
    launching = [item for item in rest if item.stash.get(_launching, False)]
    rest = [item for item in rest if not item.stash.get(_launching, False)]
    groups = [item for item in rest if is_slow(item)], [item for item in rest if not is_slow(item)], launching, bounded
    parts = getattr(config, "workerinput", {}).get("workercount", 1)
    return [item for part in range(parts) for group in groups for item in cut(group, part, parts)]


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is of a file some of whose tests take many seconds each."""
    return item.path.parent.name in SLOW or item.path.name in SLOW


def cut(group: list[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """One of some equal parts of a list."""
    return group[part * len(group) // parts : (part + 1) * len(group) // parts]


def in_full(*values: object, of: str | None = None) -> list[Any]:
    """Values of a test's parameter that are for runs in full: of the operator of its file, or of another."""
    mark = pytest.mark.in_full if of is None else pytest.mark.in_full(by=lambda parameters: of)
    return [pytest.param(value, marks=mark) for value in values]


def is_quiet(item: pytest.Item, changed: set[str]) -> bool:
    """Whether a test is one that runs in full, of an operator that has not changed."""
    mark = item.get_closest_marker("in_full")
    return mark is not None and (name := operator_of(item)) not in changed and name not in mark.kwargs.get("always", ())


def operator_of(item: pytest.Item) -> str:
    """The operator that a test is of; an empty name where it is of none or of many."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    mark = item.get_closest_marker("in_full")
    if mark is not None and (by := mark.kwargs.get("by")) is not None:
        return str(by(parameters))
    if "operator" in parameters and isinstance(parameters["operator"], str):
        return parameters["operator"]
    if "contract" in parameters:
        return str(parameters["contract"].__module__).rpartition("test_")[2]
    return item.path.stem.removeprefix("test_") if item.path.parent.name in ("ops", "optim") else ""


def shard(text: str) -> tuple[int, int]:
    """(index from 0, how many) of "2/4"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--shard is {text!r}, expected one such as 2/4")
    return int(found[1]) - 1, int(found[2])


def place(item: pytest.Item, parts: int) -> int:
    """The part that a test is in: all tests of an operator are in one."""
    name = operator_of(item) or item.path.name
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % parts


# --- while tests run ---


def check_time(item: pytest.Item) -> None:
    """A test in full does not begin when the time is over."""
    if item.stash.get(_bounded, False) and is_over(item):
        no_time(item, operator_of(item))


def is_over(item: pytest.Item) -> bool:
    """Whether no time is left for what has changed."""
    until = item.config.option.until
    return until is not None and time.time() - item.config.option.began > until


def no_time(item: pytest.Item, operator: str) -> NoReturn:
    """Ends a test as skipped, and says for which operator it was."""
    item.user_properties.append(("no time for", operator))
    pytest.skip(NO_TIME)


def launches_of_changed_alone(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> None:
    """Ends a test as skipped where it launches a kernel of an operator that ran in full and has not changed since, or of
    one that has where the time is over."""
    item, changed = request.node, set(request.config.option.changed_operators)
    if item.path.parent.name not in FOLDERS or item.get_closest_marker("in_full"):
        return
    anew = operator_of(item) in changed or chance(item) < request.config.option.drawn / 100
    from operator_samples import operator_of as of_kernel

    from cupyops._kernel.compile.source import cuda_src
    from cupyops._simulate import Simulation

    launch = Simulation.__call__

    def judged(simulation: Simulation, specialised: Any, *arguments: Any) -> Any:
        path = specialised.source.path
        if path is not None and path.parent == cuda_src():
            operator = of_kernel(path.name)
            over = is_over(item)
            if operator not in changed and (over or not anew):
                pytest.skip(f"{operator} {UNCHANGED}")
            if over:
                no_time(item, operator)
        return launch(simulation, specialised, *arguments)

    patch.setattr(Simulation, "__call__", judged)


def chance(item: pytest.Item) -> float:
    """A number in [0, 1) for a test and a seed."""
    return random.Random(f"{item.config.option.draw} {item.nodeid}").random()


# --- what is said of it, and kept ---


class Tally:
    """In the process that reports: what was left out, for want of time or of change; the table, where all passed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.cut, self.quiet = config, Counter[str](), 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        option = self.config.option
        node.workerinput["tiers"] = {name: getattr(option, name) for name in SHARED}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cut.update(
            name for key, name in report.user_properties if key == "no time for" and report.when == "teardown"
        )
        self.quiet += report.skipped and UNCHANGED in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        import ran_in_full

        say, option = terminalreporter.write_line, self.config.option
        say(f"changed since they ran in full: {', '.join(option.changed_operators) or 'no operator'}")
        if option.changed:
            say(f"of what has not changed {option.drawn:g}% ran anew, drawn by --draw={option.draw}")
        if self.quiet:
            say(f"{self.quiet} tests ended where they came to a kernel that has not changed")
        if self.cut:
            terminalreporter.section("`make test-all` is due", red=True, bold=True)
            say(
                f"{sum(self.cut.values())} tests did not run, or not to their end: no time was left for all that changed."
            )
            say(f"Each kernel ran once. Not in full ran: {', '.join(sorted(self.cut))}")
        known, framework = ran_in_full.read(), ran_in_full.framework()
        if older := sum(ran.framework != framework for ran in known.values()):
            say(
                f"the framework has changed since {older} of {len(known)} operators ran in full: `make test-all` runs all"
            )
        if option.record and exitstatus == 0:
            table = known | {name: ran_in_full.now(name) for name in self.whole()}
            ran_in_full.write(table, option.record)

    def whole(self) -> Iterator[str]:
        """The operators all of whose tests ran in full here."""
        import ran_in_full

        option = self.config.option
        part, parts = shard(option.shard) if option.shard else (0, 1)
        for name in option.changed_operators if option.changed else ran_in_full.operators():
            if name not in self.cut and int(hashlib.sha256(name.encode()).hexdigest(), 16) % parts == part:
                yield name
