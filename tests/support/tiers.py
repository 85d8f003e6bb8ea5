"""What of the tests runs: all; or, with `--changed`, in full only what did not run in full on the same sources.

Each test is of a part (ran_in_full.py): of an operator, or of its folder. One marked `in_full` is of the operator that is
its parameter `operator` or `contract`, that its file is named after, or that `by=` makes of its parameters; in `tests/ops`,
`tests/optim` and `tests/dispatch` others are of an operator too, or of many: of all that have changed.

Of a part that has changed all tests run; what may take long, in_full or slow, while there is time. Of the others run

- those marked `every_time`, such as each kernel once, and those in_full of three of the operators in `always=`, drawn;
- of those in_full and those that are slow (marked so, or in tests/slow.csv, as measured) one in a hundred, drawn;
- of each other test, which are quick, a fifth of the cases, drawn, one at least. In the three folders of operators they
  end, as skipped, where they come to launch a kernel that has not changed.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

SEVEN = ("add", "cross_entropy", "embedding", "layer_norm", "linear", "max_pool2d", "sum")  # that differ in kind
ALWAYS = 3  # of them, in each run
SHARED = ("began", "changed_parts", "draw", "parts")  # what all processes of a run agree on
TESTS = Path(__file__).resolve().parents[1]
SLOW_FILE = TESTS / "slow.csv"
SLOW = 0.5  # seconds that a case takes on average, at least, to be slow; one that was stays so above 0.7 of that
UNCHANGED = "ran in full on the same sources"
NO_TIME = "no time is left for all that has changed"
FORKING = ("test_robustness.py",)  # fork their process hundreds of times, which costs the more the more it holds
FOLDERS = ("ops", "optim", "dispatch")  # whose tests may launch what has changed alone

_bounded = pytest.StashKey[bool]()  # of an item: it begins only while there is time
_launching = pytest.StashKey[bool]()  # of an item: its operator has changed, and it may launch while there is time
_slow = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--changed", action="store_true", help="leave out what ran in full on the same sources")
    group.addoption("--drawn", type=float, default=1, metavar="PERCENT", help="how much of that is run anew even so")
    group.addoption("--quick", type=float, default=20, metavar="PERCENT", help="how many cases of each quick test run")
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
    option.changed_parts, option.parts = ran_in_full.changed(), list(ran_in_full.parts())
    option.draw = random.randrange(10_000) if option.draw is None else option.draw
    config.pluginmanager.register(Tally(config), "tally-of-tiers")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not run, and put the rest in an order: what has changed before what is quick (`in_order`)."""
    left: list[pytest.Item] = []
    if config.option.shard:
        part, parts = shard(config.option.shard)
        left += [item for item in items if place(item, parts) != part]
        items[:] = [item for item in items if place(item, parts) == part]
    if config.option.changed:
        changed, slow = set(config.option.changed_parts), read_slow()
        for item in items:
            if item.get_closest_marker("in_full") and operator_of(item) not in config.option.parts:
                raise pytest.UsageError(f"{item.nodeid} is marked in_full, and of no operator")
            anew, long = has_changed(item, changed), item.get_closest_marker("in_full") is not None
            item.stash[_slow] = function_of(item) in slow or item.get_closest_marker("slow") is not None
            item.stash[_bounded] = anew and (long or item.stash[_slow]) and not is_asked_for(item)
            item.stash[_launching] = anew and item.path.parent.name in FOLDERS
        out = left_out([item for item in items if not has_changed(item, changed) and not is_asked_for(item)], config)
        left += out
        items[:] = in_order([item for item in items if item not in out], config)
    if left:
        config.hook.pytest_deselected(items=left)


def has_changed(item: pytest.Item, changed: set[str]) -> bool:
    """Whether the part of a test has changed; for one of many operators, whether any operator has."""
    part = part_of(item)
    of_many = item.path.parent.name in FOLDERS and part.startswith("tests")
    return part in changed or of_many and any(not name.startswith("tests") for name in changed)


def is_asked_for(item: pytest.Item) -> bool:
    """Whether a test runs whatever has changed."""
    mark = item.get_closest_marker("in_full")
    if mark is None:
        return item.get_closest_marker("every_time") is not None or item.get_closest_marker("gpu") is not None
    always = sorted(mark.kwargs.get("always", ()))
    return operator_of(item) in random.Random(item.config.option.draw).sample(always, min(len(always), ALWAYS))


def left_out(items: list[pytest.Item], config: pytest.Config) -> set[pytest.Item]:
    """Of tests of what has not changed, those that are not drawn."""
    option = config.option
    long, quick = [], defaultdict[str, list[pytest.Item]](list)
    for item in items:
        takes_long = item.get_closest_marker("in_full") or item.stash[_slow]
        (long if takes_long else quick[function_of(item)]).append(item)
    out = {*long} - {*drawn(long, option.drawn, str(option.draw))}
    for name, cases in quick.items():
        out |= {*cases} - {*drawn(cases, option.quick, f"{option.draw} {name}", least=1)}
    return out


def drawn(items: list[pytest.Item], percent: float, seed: str, least: int = 0) -> list[pytest.Item]:
    """So much of some tests, the same for one seed."""
    count = max(round(len(items) * percent / 100), least)
    return random.Random(seed).sample(sorted(items, key=lambda item: item.nodeid), count)


def function_of(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]


def read_slow(path: Path = SLOW_FILE) -> set[str]:
    """The tests whose cases take long; none where there is no table."""
    return set(path.read_text(encoding="utf-8").splitlines()[1:]) if path.is_file() else set()


def in_order(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Slow tests, then what may run out of time, one part after another in an order that is drawn, then all that is quick.

    Of several processes each begins with an equal part of all tests, side by side in this order, and takes of the others'
    when it is done: so each begins with what forks, what has changed gets the time that there is, and none has a long test
    at the end.
    """
    bounded = [item for item in items if item.stash.get(_bounded, False)]
    parts = sorted({part_of(item) for item in bounded})
    random.Random(config.option.draw).shuffle(parts)
    bounded.sort(key=lambda item: (parts.index(part_of(item)), item.nodeid))
    rest = [item for item in items if not item.stash.get(_bounded, False)]
    launching = [item for item in rest if item.stash.get(_launching, False)]
    rest = [item for item in rest if not item.stash.get(_launching, False)]
    forking = [item for item in rest if item.path.name in FORKING]
    rest = [item for item in rest if item.path.name not in FORKING]
    slow, quick = ([item for item in rest if item.stash.get(_slow, False) == is_slow] for is_slow in (True, False))
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    groups = forking, slow, launching, bounded, quick
    return [item for part in range(workers) for group in groups for item in cut(group, part, workers)]


def cut(group: list[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """One of some equal parts of a list."""
    return group[part * len(group) // parts : (part + 1) * len(group) // parts]


def in_full(*values: object, of: str | None = None) -> list[Any]:
    """Values of a test's parameter that are for runs in full: of the operator of its file, or of another."""
    mark = pytest.mark.in_full if of is None else pytest.mark.in_full(by=lambda parameters: of)
    return [pytest.param(value, marks=mark) for value in values]


def part_of(item: pytest.Item) -> str:
    """The operator that a test is of, else its folder of tests."""
    name = operator_of(item)
    if name in item.config.option.parts and (item.get_closest_marker("in_full") or item.path.parent.name in FOLDERS):
        return name
    return "/".join(("tests", *item.path.parent.relative_to(TESTS).parts[:1]))


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
        no_time(item, part_of(item))


def is_over(item: pytest.Item) -> bool:
    """Whether no time is left for what has changed."""
    until = item.config.option.until
    return until is not None and time.time() - item.config.option.began > until


def no_time(item: pytest.Item, part: str) -> NoReturn:
    """Ends a test as skipped, and says of which part it was."""
    item.user_properties.append(("no time for", part))
    pytest.skip(NO_TIME)


def launches_of_changed_alone(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> None:
    """Ends a test as skipped where it launches a kernel of an operator that ran in full and has not changed since, or of
    one that has where the time is over."""
    item, changed = request.node, set(request.config.option.changed_parts)
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
        self.seconds, self.cases = Counter[str](), Counter[str]()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        option = self.config.option
        node.workerinput["tiers"] = {name: getattr(option, name) for name in SHARED}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cut.update(
            name for key, name in report.user_properties if key == "no time for" and report.when == "teardown"
        )
        if report.when == "call" and not report.skipped:
            self.cases[report.nodeid.partition("[")[0]] += 1
        self.seconds[report.nodeid.partition("[")[0]] += report.duration
        self.quiet += report.skipped and UNCHANGED in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        import ran_in_full

        say, option = terminalreporter.write_line, self.config.option
        say(f"changed since they ran in full: {', '.join(option.changed_parts) or 'nothing'}")
        if option.changed:
            of_each = f"{option.drawn:g}% of what takes long, {option.quick:g}% of the cases of what is quick"
            say(f"of the rest ran {of_each}, drawn by --draw={option.draw}")
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
            say(f"the framework has changed since {older} of {len(known)} parts ran in full: `make test-all` runs all")
        if option.record and exitstatus == 0:
            table = known | {name: ran_in_full.now(name) for name in self.whole()}
            ran_in_full.write(table, option.record)
            if not option.changed:
                write_slow(self.slow(), option.record.with_name(SLOW_FILE.name))

    def whole(self) -> Iterator[str]:
        """The operators and folders all of whose tests ran in full here."""
        import ran_in_full

        option = self.config.option
        part, parts = shard(option.shard) if option.shard else (0, 1)
        for name in option.changed_parts if option.changed else ran_in_full.parts():
            here = int(hashlib.sha256(name.encode()).hexdigest(), 16) % parts == part
            if name not in self.cut and here and (parts == 1 or name not in ran_in_full.folders()):
                yield name

    def slow(self) -> set[str]:
        """The tests whose cases take long, as measured here; of others, as it was."""
        known = read_slow()
        limits = {name: SLOW * (0.7 if name in known else 1) for name in self.cases}
        found = {name for name, limit in limits.items() if self.seconds[name] / self.cases[name] >= limit}
        return found | {name for name in known if name not in self.cases and self.config.option.shard}


def write_slow(names: set[str], path: Path) -> None:
    """The table that `read_slow` reads."""
    path.write_text("\n".join(["test", *sorted(names)]) + "\n", encoding="utf-8")
