"""What `make test` leaves out is what ran in full on the same sources, and nothing else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import ran_in_full
import tiers
import torch

import cupyops
from cupyops._kernel.compile import source

PACKAGE, ROOT = ran_in_full.PACKAGE, ran_in_full.ROOT


# --- digests ---

PYTHON = '''"""A module."""
import os
from a import (
    b,
)

def f(x):
    """A docstring."""
    # a comment
    return "# no comment" + x  # another
'''


def test_what_does_not_count_of_python():
    plain = ran_in_full._plain_python(PYTHON)
    assert plain == 'def f(x):\n    return "# no comment" + x'
    moved = (
        PYTHON.replace("from a import", "from z.a import").replace("A docstring", "Other words").replace("# an", "# n")
    )
    assert ran_in_full._plain_python("\n\n" + moved) == plain
    assert ran_in_full._plain_python(PYTHON.replace("+ x", "- x")) != plain


def test_a_folder_counts_with_what_it_is_named_after(monkeypatch):
    folders = ["tests", "tests/nn", "tests/operator", "tests/docs", "tests/cli"]
    assert set(folders) <= set(ran_in_full.folders())
    before = {name: ran_in_full.digest_of_folder(name) for name in folders}
    assert len(set(before.values())) == len(folders)
    changes = {
        PACKAGE / "nn" / "linear.py": "tests/nn",
        PACKAGE / "_operator" / "__init__.py": "tests/operator",
        ROOT / "docs" / "speed.md": "tests/docs",
        ROOT / "tests" / "cli" / "test_app.py": "tests/cli",
        ROOT / "pyproject.toml": "tests",
    }
    plain = ran_in_full._python
    for path, folder in changes.items():
        monkeypatch.setattr(ran_in_full, "_python", lambda at, path=path: plain(at) + "x" * (at == path))
        assert path.exists()
        assert [name for name in folders if ran_in_full.digest_of_folder(name) != before[name]] == [folder]


def test_what_does_not_count_of_cuda():
    text = '#include "a/b.cuh"\n// words\n__global__ void f(int* x) { /* more */\n  x[0] = 1; }\n'
    plain = ran_in_full._plain_cuda(text)
    assert plain == "__global__ void f(int* x) { x[0] = 1; }"
    assert ran_in_full._plain_cuda(text.replace("a/b", "c/b").replace("words", "others").replace("  x", "x")) == plain
    assert ran_in_full._plain_cuda(text.replace("= 1", "= 2")) != plain


def changed_by(monkeypatch, name, change):
    """The operators whose digest is another when a function of ran_in_full gives something else."""
    before = {operator: ran_in_full.digest.__wrapped__(operator) for operator in SOME}
    with monkeypatch.context() as patch:
        patch.setattr(ran_in_full, name, change(getattr(ran_in_full, name)))
        return {operator for operator in SOME if ran_in_full.digest.__wrapped__(operator) != before[operator]}


SOME = ("relu", "layer_norm", "rms_norm", "norm", "mean", "sgd", "grad_norm")


def edited(*path):
    """Python as it would be with one file edited."""
    return lambda read: lambda path_: read(path_) + ("edited" if path_ == ROOT.joinpath(*path) else "")


@pytest.mark.parametrize(
    ("path", "operators"),
    [
        ("cupyops/ops/_relu.py", {"relu"}),
        ("cupyops/ops/_layer_norm.py", {"layer_norm", "norm"}),
        ("cupyops/_dispatch/forms.py", set()),
        ("cupyops/_dispatch/shardings.py", set()),
        ("cupyops/optim/sgd.py", {"sgd"}),
        ("tests/ops/test_mean.py", {"mean"}),
        ("tests/support/contract.py", set()),
        ("tests/support/tiers.py", set()),
    ],
)
def test_python_counts_where_it_is_used(monkeypatch, path, operators):
    assert changed_by(monkeypatch, "_python", edited(path)) >= operators
    if not operators or path.startswith("cupyops/ops/_relu"):
        assert changed_by(monkeypatch, "_python", edited(path)) == operators


@pytest.mark.parametrize(
    ("word", "operators"),
    [("relu_fwd", {"relu"}), ("SHARED_MEMORY_THREADS", {"layer_norm", "norm", "rms_norm"}), ("sgd_step", {"sgd"})],
)
def test_cuda_counts_where_it_is_included(monkeypatch, word, operators):
    """An edit of each text that has a word in it."""
    change = lambda plain: lambda text: plain(text) + ("edited" if word in plain(text) else "")
    assert changed_by(monkeypatch, "_plain_cuda", change) == operators


def test_further_calls_count(monkeypatch):
    from simulator import cases

    before = ran_in_full.cases("embedding")
    assert any("indices_sorted" in text for text in before) and ran_in_full.cases("relu") != before
    monkeypatch.setitem(cases.FURTHER, "embedding", cases.gradients_clipped)
    assert ran_in_full.cases("embedding") != before


def test_all_that_there_is_counts_somewhere():
    """Each file of operators in a digest of one at least, or in that of the framework; all CUDA that kernels include."""
    operators = ran_in_full.operators()
    counted = set().union(*map(ran_in_full.python_of, operators)) | ran_in_full.framework_files()
    folders = [PACKAGE / name for name in ran_in_full.OPERATORS] + [
        ROOT / "tests" / name for name in ("ops", "dispatch")
    ]
    missing = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("*.py")} - {
        path.relative_to(ROOT).as_posix() for path in counted
    }
    # Muon launches nothing of ours, and three files are about many operators: tests of these always run whole
    apart = {"tests/dispatch/test_forms.py", "tests/dispatch/test_tf32.py"}
    apart |= {"cupyops/optim/muon.py", "cupyops/_dispatch/rare.py"}
    assert {name for name in missing if not name.endswith("__init__.py")} <= apart
    texts = set().union(*map(ran_in_full.cuda_of, operators))
    assert {path.read_text(encoding="utf-8") for path in source.cuda_src().glob("*.cu")} <= texts


def test_the_table(tmp_path):
    table = {"relu": ran_in_full.Ran("a", "b"), "gone": ran_in_full.Ran("c", "d"), "add": ran_in_full.Ran("e", "f")}
    ran_in_full.write(table, tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "part,digest,framework\nadd,e,f\nrelu,a,b\n"
    assert ran_in_full.read(tmp_path / "x.csv") == {name: table[name] for name in ("add", "relu")}
    assert ran_in_full.read(tmp_path / "absent.csv") == {}


# --- selection ---


PARTS = ["relu", "softmax", "sum", "tests/kernel", "tests/nn", "tests/ops", "tests/simulator"]


class Item:
    """A test as pytest has it."""

    def __init__(self, nodeid, config=None, mark=None, every_time=False, slow=False, **parameters):
        self.nodeid, self.config = nodeid, config or config_of()
        self.marks = {"in_full": mark, "every_time": every_time or None, "slow": slow or None}
        self.path = ROOT / "tests" / nodeid.partition("::")[0]
        self.stash, self.user_properties, self.callspec = pytest.Stash(), [], SimpleNamespace(params=parameters)

    def get_closest_marker(self, name):
        return self.marks.get(name)


def in_full(**options):
    return SimpleNamespace(kwargs=options)


def config_of(**options):
    workers = options.pop("workers", 1)
    defaults = dict(changed=True, drawn=0, draw=1, until=None, shard=None, began=0.0, changed_parts=[], record=None)
    option = SimpleNamespace(**defaults | {"parts": PARTS, "quick": 100} | options)
    left = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    return SimpleNamespace(option=option, hook=hook, left=left, workerinput={"workercount": workers})


def selected(config, *items):
    chosen = list(items)
    tiers.select(config, chosen)
    assert {*chosen, *config.left} == set(items)
    return [item.nodeid for item in chosen]


def test_what_has_changed_runs_and_before_what_is_quick():
    items = [
        Item("simulator/test_x.py::a", mark=in_full(), operator="softmax"),
        Item("simulator/test_x.py::b", mark=in_full(), operator="relu"),
        Item("simulator/test_x.py::c", mark=in_full(always=("sum",)), operator="sum"),
        Item("ops/test_relu.py::d", mark=in_full()),
        Item("ops/test_relu.py::f"),
        Item("kernel/test_y.py::e"),
    ]
    names = [item.nodeid for item in items]
    assert selected(config_of(changed=False), *items) == names
    assert selected(config_of(), *items) == [names[2], names[4], names[5]]
    found = selected(config_of(changed_parts=["relu"]), *items)
    assert found == [names[4], names[3], names[1], names[2], names[5]]
    assert selected(config_of(changed_parts=["softmax"]), *items) == [names[0], names[2], names[4], names[5]]


def test_a_folder_that_has_changed_runs_whole(monkeypatch):
    """Its slow tests while there is time, its quick ones after that; of others what is drawn, and what is asked for."""
    slow, quick = "nn/test_x.py::slow", "nn/test_x.py::quick"
    monkeypatch.setattr(tiers, "read_slow", lambda: {slow, "kernel/test_y.py::slow"})
    items = [Item(f"{name}[{i}]") for name in (slow, quick) for i in range(10)]
    items += [Item("kernel/test_y.py::slow[0]"), Item("kernel/test_y.py::slow[1]", every_time=True)]
    found = selected(config_of(changed_parts=["tests/nn"], quick=50), *items)
    assert found == [items[21].nodeid, *(item.nodeid for item in items[:20])]
    found = selected(config_of(changed_parts=["tests/kernel"], quick=50), *items)
    assert [name.partition("[")[0] for name in found] == [
        "kernel/test_y.py::slow",
        "kernel/test_y.py::slow",
        *5 * [quick],
    ]
    config = config_of(changed_parts=["tests/nn"], until=10.0)
    late = Item(f"{slow}[0]", config)
    selected(config, late)
    with pytest.raises(pytest.skip.Exception, match="no time is left"):
        tiers.check_time(late)
    assert late.user_properties == [("no time for", "tests/nn")]


@pytest.mark.parametrize(("cases", "run"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_half_of_the_cases_of_what_is_quick(cases, run):
    items = [Item(f"nn/test_x.py::{name}[{i}]") for name in "abc" for i in range(cases)]
    draws = {tuple(selected(config_of(quick=50, draw=seed), *items)) for seed in (*range(9), 1)}
    assert all(len(names) == 3 * run for names in draws) and (len(draws) > 1) == (cases > 1)
    assert {name for names in draws for name in names} == {item.nodeid for item in items}


def test_what_is_of_many_operators_runs_where_one_has_changed():
    items = [Item(f"dispatch/test_x.py::a[{i}]") for i in range(8)]
    counts = [
        len(selected(config_of(changed_parts=changed, quick=50), *items)) for changed in ([], ["tests/nn"], ["sum"])
    ]
    assert counts == [4, 4, 8]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_process_begins_with_what_is_slow_and_ends_with_what_is_quick(monkeypatch, workers):
    files = ["kernel/test_y.py", "docs/test_site.py", "ops/test_relu.py", "ops/test_sum.py"]
    slow = {f"docs/test_site.py::{i}" for i in range(60)}
    monkeypatch.setattr(tiers, "read_slow", lambda: slow)
    items = [Item(f"{file}::{i}", mark=in_full() if "ops" in file else None) for file in files for i in range(60)]
    for seed in (1, 2):
        config = config_of(changed_parts=["relu", "sum"], drawn=100, workers=workers, draw=seed)
        chosen = selected(config, *items)
        for part in range(workers):
            some = [name.partition("::")[0] for name in tiers.cut(chosen, part, workers)]
            last = ["ops/test_relu.py", "ops/test_sum.py"]
            fourth = 60 // workers
            slowest, bounded, quick = some[:fourth], some[fourth:-fourth], some[-fourth:]
            assert {*slowest} == {"docs/test_site.py"} and {*quick} == {"kernel/test_y.py"} and {*bounded} <= {*last}
    orders = {tuple(selected(config_of(changed_parts=["relu", "sum"], draw=seed), *items)) for seed in range(8)}
    assert len(orders) == 2  # of operators; the tests of one stay together


def test_what_is_drawn_of_the_rest_hangs_on_the_seed():
    items = [Item(f"simulator/test_x.py::{i}", mark=in_full(), operator="relu") for i in range(200)]
    first, again, other = (selected(config_of(drawn=5, draw=seed), *items) for seed in (1, 1, 2))
    assert first == again != other and len(first) == len(other) == 10
    assert selected(config_of(drawn=100), *items) == [item.nodeid for item in items]


def test_three_of_those_that_always_run():
    items = [Item(f"nn/test_x.py::{name}", mark=in_full(always=PARTS[:3] + ["a", "b"]), operator=name) for name in "ab"]
    items += [Item(f"nn/test_x.py::{name}", mark=in_full(always=PARTS[:3]), operator=name) for name in PARTS[:3]]
    runs = []
    for seed in range(20):
        config = config_of(draw=seed, parts=[*PARTS, "a", "b"])
        for item in items:
            item.config = config
        runs.append(selected(config, *items))
    assert all({item.nodeid for item in items[2:]} <= set(names) for names in runs)  # of three all
    assert {len(names) for names in runs} == {3, 4, 5} and len({tuple(names) for names in runs}) > 2


def test_marked_as_slow():
    items = [Item("nn/test_x.py::a", slow=True), Item("nn/test_x.py::b")]
    assert selected(config_of(), *items) == ["nn/test_x.py::b"]
    assert selected(config_of(changed_parts=["tests/nn"]), *items) == ["nn/test_x.py::a", "nn/test_x.py::b"]


def test_one_that_is_of_no_operator_is_an_error():
    with pytest.raises(pytest.UsageError, match="test_x.py::a is marked in_full, and of no operator"):
        selected(config_of(), Item("kernel/test_x.py::a", mark=in_full()))


def test_of_which_operator_a_test_is():
    contract = type("TestRelu", (), {"__module__": "tests.ops.test_relu"})
    of = tiers.operator_of
    assert of(Item("simulator/test_x.py::a", contract=contract)) == of(Item("ops/test_relu.py::a")) == "relu"
    by = in_full(by=lambda parameters: parameters["name"].upper())
    assert of(Item("x/test_x.py::a", mark=by, name="sum")) == "SUM"
    assert of(Item("kernel/test_relu.py::a", name="sum")) == ""


def test_parts_share_all_tests_and_split_no_operator():
    items = [Item(f"{folder}/test_{name}.py::a") for folder in ("ops", "kernel") for name in "abcdefgh"]
    items += [Item(f"simulator/test_x.py::{name}", mark=in_full(), operator=name) for name in "abcdefgh"]
    parts = [selected(config_of(changed=False, shard=f"{i}/3"), *items) for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(item.nodeid for item in items)
    for name in "abcdefgh":
        assert (
            len({tiers.place(item, 3) for item in (Item(f"ops/test_{name}.py::b"), Item("s/x.py", operator=name))}) == 1
        )
    for wrong in ("0/3", "4/3", "x", "1"):
        with pytest.raises(pytest.UsageError, match="shard"):
            tiers.shard(wrong)


def test_in_full_ends_with_the_time():
    config = config_of(changed_parts=["relu"], until=10.0)
    item, other = Item("ops/test_relu.py::a", config, in_full()), Item("ops/test_sum.py::b", config)
    selected(config, item, other)
    tiers.check_time(other)
    with pytest.raises(pytest.skip.Exception, match="no time is left"):
        tiers.check_time(item)
    assert item.user_properties == [("no time for", "relu")]
    config.option.until = None
    tiers.check_time(item)


# --- launches ---


@pytest.mark.parametrize(
    ("changed", "nodeid", "properties"),
    [
        (["relu"], "ops/test_relu.py::a", [("no time for", "relu")]),
        (["relu"], "dispatch/test_x.py::a", [("no time for", "relu")]),
        ([], "ops/test_relu.py::a", []),
    ],
)
def test_launches_end_with_the_time(monkeypatch, changed, nodeid, properties):
    config = config_of(changed_parts=changed, drawn=100, until=10.0)
    item = Item(nodeid, config)
    reason = "no time is left" if changed else "ran in full on the same sources"
    with monkeypatch.context() as patch, cupyops.simulate():
        tiers.launches_of_changed_alone(SimpleNamespace(node=item, config=config), patch)
        with pytest.raises(pytest.skip.Exception, match=reason):
            cupyops.relu(torch.ones(3))
    assert item.user_properties == properties


@pytest.mark.parametrize(
    ("changed", "nodeid", "drawn", "ends"),
    [
        ([], "ops/test_relu.py::a", 0, True),
        (["relu"], "ops/test_relu.py::a", 0, False),
        (["relu"], "dispatch/test_x.py::a", 0, False),
        ([], "dispatch/test_x.py::a", 0, True),
        ([], "dispatch/test_x.py::a", 100, False),
        ([], "nn/test_x.py::a", 0, False),
    ],
)
def test_a_test_ends_where_it_comes_to_what_has_not_changed(monkeypatch, changed, nodeid, drawn, ends):
    config = config_of(changed_parts=changed, drawn=drawn)
    with monkeypatch.context() as patch, cupyops.simulate():
        tiers.launches_of_changed_alone(SimpleNamespace(node=Item(nodeid, config), config=config), patch)
        if ends:
            with pytest.raises(pytest.skip.Exception, match="relu ran in full on the same sources"):
                cupyops.relu(torch.ones(3))
        else:
            assert cupyops.relu(torch.ones(3)).tolist() == [1, 1, 1]


def test_a_kernel_of_ones_own_is_no_concern_of_it(monkeypatch):
    config = config_of()
    put = cupyops.Kernel("__global__ void put(float* y) { y[threadIdx.x] = 2; }", "put")
    y = torch.zeros(2)
    with monkeypatch.context() as patch, cupyops.simulate():
        node = Item("ops/test_relu.py::a", config)
        tiers.launches_of_changed_alone(SimpleNamespace(node=node, config=config), patch)
        put[1, 2](y)
    assert y.tolist() == [2, 2]


# --- what is said and kept ---


class Terminal:
    def __init__(self):
        self.lines = []

    def write_line(self, line):
        self.lines.append(line)

    def section(self, title, **markup):
        self.lines.append(title)


def summary(monkeypatch, config, cut=(), status=0):
    tally = tiers.Tally(config)
    for name in cut:
        report = SimpleNamespace(user_properties=[("no time for", name)], when="teardown", skipped=True, longrepr="")
        report.nodeid, report.duration = "ops/test_x.py::a", 0.0
        tally.pytest_runtest_logreport(report)
    monkeypatch.setattr(ran_in_full, "read", lambda: {"sum": ran_in_full.Ran("old", "old")})
    monkeypatch.setattr(ran_in_full, "framework", lambda: "f")
    monkeypatch.setattr(ran_in_full, "now", lambda name: ran_in_full.Ran(f"{name} now", "f"))
    terminal = Terminal()
    tally.pytest_terminal_summary(terminal, status)
    return "\n".join(terminal.lines)


def test_it_is_said_loudly_when_time_ran_out(monkeypatch):
    said = summary(monkeypatch, config_of(changed_parts=["relu", "softmax"]), cut=["softmax", "softmax"])
    assert (
        "`make test-all` is due\n2 tests did not run, or not to their end" in said
        and "Not in full ran: softmax" in said
    )
    assert "changed since they ran in full: relu, softmax" in said and "--draw=1" in said
    assert "the framework has changed since 1 of 1 parts ran in full" in said
    assert "is due" not in summary(monkeypatch, config_of())


@pytest.mark.parametrize("status", [0, 1])
def test_what_ran_in_full_is_kept_where_all_passed(monkeypatch, tmp_path, status):
    path = Path(tmp_path / "x.csv")
    config = config_of(changed_parts=["relu", "softmax"], record=path)
    summary(monkeypatch, config, cut=["softmax"], status=status)
    monkeypatch.undo()
    assert path.exists() == (status == 0)
    if status == 0:
        assert ran_in_full.read(path) == {"relu": ("relu now", "f"), "sum": ("old", "old")}


def test_a_part_keeps_what_is_its_own(monkeypatch):
    monkeypatch.setattr(ran_in_full, "operators", lambda: tuple("abcdefgh"))
    monkeypatch.setattr(ran_in_full, "folders", lambda: ("tests/nn",))
    parts = [set(tiers.Tally(config_of(changed=False, shard=f"{i}/3")).whole()) for i in (1, 2, 3)]
    assert set().union(*parts) == set("abcdefgh") and sum(map(len, parts)) == 8
    assert set(tiers.Tally(config_of(changed=False)).whole()) == {*"abcdefgh", "tests/nn"}  # a folder is in several


@pytest.mark.parametrize("shard", [None, "1/4"])
def test_the_table_of_what_is_slow(monkeypatch, tmp_path, shard):
    """On average of its cases; one that was slow stays so until it is well below, or where it did not run."""
    monkeypatch.setattr(tiers, "read_slow", lambda: {"t::known", "t::quicker", "t::elsewhere"})
    tally = tiers.Tally(config_of(changed=False, shard=shard))
    each = {"t::known[0]": 0.4, "t::quicker[0]": 0.3, "t::new[0]": 1.2, "t::new[1]": 0.0, "t::quick": 0.4}
    for name, seconds in each.items():
        for when, part in (("setup", 0.25), ("call", 0.75)):
            report = SimpleNamespace(nodeid=name, duration=part * seconds, when=when, skipped=False)
            tally.pytest_runtest_logreport(SimpleNamespace(**vars(report), user_properties=[], longrepr=""))
    expected = {"t::known", "t::new", *(["t::elsewhere"] if shard else [])}
    assert tally.slow() == expected
    monkeypatch.undo()
    tiers.write_slow(expected, tmp_path / "slow.csv")
    assert tiers.read_slow(tmp_path / "slow.csv") == expected and tiers.read_slow(tmp_path / "no.csv") == set()
