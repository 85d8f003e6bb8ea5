"""Which tests a run selects: by what git says, by who imports what, and by what is slow."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import dependents
import pytest
import selection
from dependents import CUDA, PACKAGE, ROOT, TESTS


@pytest.fixture
def git(tmp_path):
    """A function that runs git in a new repository with one commit on main."""

    def run(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run("init")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    run("add", ".")
    run("commit", "-m", "first")
    return run


def test_nothing_differs_on_main(git, tmp_path):
    assert selection.differing(root=tmp_path) == set()


def test_what_a_branch_changed_differs(git, tmp_path):
    """Committed or not, new or removed; not what main has changed since."""
    git("checkout", "-b", "branch")
    (tmp_path / "b c.py").write_text("b")
    git("add", ".")
    git("commit", "-m", "second")
    (tmp_path / "new.py").write_text("n")
    (tmp_path / "ignored.py").write_text("i")
    (tmp_path / "a.py").unlink()
    assert selection.differing(root=tmp_path) == {"a.py", "b c.py", "new.py"}
    assert selection.differing("HEAD", root=tmp_path) == {"a.py", "new.py"}
    git("stash", "--include-untracked")
    git("checkout", "main")
    (tmp_path / "other.py").write_text("o")
    git("add", ".")
    git("commit", "-m", "of main")
    git("checkout", "branch")
    assert selection.differing(root=tmp_path) == {"b c.py"}


def test_the_branch_of_the_origin_comes_before_the_local_one(git, tmp_path):
    first = git("rev-parse", "HEAD")
    (tmp_path / "a.py").write_text("changed")
    git("commit", "-am", "second")
    git("update-ref", "refs/remotes/origin/main", first)
    assert selection.differing(root=tmp_path) == {"a.py"}


def test_an_unknown_base_is_refused_and_no_repository_is_none(git, tmp_path):
    with pytest.raises(pytest.UsageError, match="no commit 'nowhere'"):
        selection.differing("nowhere", root=tmp_path)
    (tmp_path / ".git").rename(tmp_path / "git")
    assert selection.differing(root=tmp_path) == selection.differing("HEAD", root=tmp_path) == set()


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("ops/test_relu.py", "tests/ops/test_relu.py"),
        ("ops/test_relu.py", "cupyops/ops/_relu.py"),
        ("ops/test_relu.py", "cuda_src/relu.cu"),
        ("ops/test_attention_packed.py", "cupyops/ops/_attention.py"),  # by the longest name that its own begins with
        ("ops/test_rms_norm.py", "tests/support/normalisations.py"),
        ("tools/test_soak.py", "tools/soak.py"),
        ("test_readme.py", "README.md"),
        ("docs/test_pages.py", "docs/design.md"),
    ],
)
def test_a_test_file_depends_on(test, file):
    assert ROOT / file in dependents.of_test_file(TESTS / test) and (ROOT / file).is_file()


@pytest.mark.parametrize("file", ["cupyops/ops/_gelu.py", "cupyops/_operator/define.py", "tests/support/contract.py"])
def test_a_test_file_does_not_depend_on(file):
    """Neither on another operator, nor on the framework that all tests exercise."""
    assert ROOT / file not in dependents.of_test_file(TESTS / "ops/test_relu.py") and (ROOT / file).is_file()


def test_what_an_operator_depends_on():
    found = dependents.of_operator("softmax")
    assert {PACKAGE / "ops" / "_softmax.py", TESTS.parent / "cuda_src" / "softmax.cu"} <= found
    assert any(path.is_relative_to(CUDA / "common") for path in found)  # what its kernels include
    assert PACKAGE / "ops" / "_relu.py" not in found
    assert not [path for path in found if path.stem in ("forms", "gpu")]  # which choose every kernel
    assert {path.name for path in dependents.of_operator("gelu") if path.suffix == ".cu"} == {"gelu.cu"}


class Item:
    """As much of a test as selection asks for."""

    def __init__(self, nodeid, slow=None, gpu=False, of=None, **parameters):
        self.nodeid, self.path = nodeid, TESTS / nodeid.partition("::")[0]
        self.marks = {
            "slow": None if slow is None else SimpleNamespace(kwargs=slow),
            "gpu": gpu or None,
            "of_operator": of and SimpleNamespace(args=(of,)),
        }
        if parameters:
            self.callspec = SimpleNamespace(params=parameters)

    def get_closest_marker(self, name):
        return self.marks[name]

    def __repr__(self):
        return self.nodeid


def selected(items, **options):
    """The tests that are selected, in their order."""
    option = SimpleNamespace(**{"quick": True, "differing": [], "shard": None} | options)
    left = []
    config = SimpleNamespace(option=option, hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)))
    chosen = list(items)
    selection.select(config, chosen)
    assert {*chosen, *left} == {*items}
    return chosen


RELU = "ops/test_relu.py"


def test_slow_tests_run_of_what_differs_alone(monkeypatch):
    monkeypatch.setattr(selection, "read_slow", lambda: {"ops/test_gelu.py::named"})
    quick, marked = Item(f"{RELU}::quick"), Item(f"{RELU}::marked", slow={})
    named, on_gpu = Item("ops/test_gelu.py::named[1]"), Item(f"{RELU}::large", slow={}, gpu=True)
    items = [quick, marked, named, on_gpu]
    assert selected(items) == [on_gpu, quick]
    assert selected(items, differing=["tests/ops/test_relu.py"]) == [marked, on_gpu, quick]
    assert selected(items, differing=["tests/ops/test_gelu.py"]) == [named, on_gpu, quick]
    assert selected(items, quick=False) == [marked, named, on_gpu, quick]


def test_a_test_of_each_operator_is_concerned_by_the_operator_alone():
    file = "simulator/test_operators.py"
    relu, gelu = (Item(f"{file}::every[{name}]", slow={}, operator=name) for name in ("relu", "gelu"))
    found = Item(f"{file}::found", slow={}, of=lambda parameters: parameters["name"].lower(), name="RELU")
    assert selected([relu, gelu, found], differing=[f"tests/{file}"]) == []
    assert selected([relu, gelu, found], differing=["cupyops/ops/_relu.py"]) == [relu, found]


def test_a_marker_leaves_some_operators_quick():
    one, other = (Item(f"edges/test_x.py::a[{name}]", slow={"but": ("sum",)}, operator=name) for name in ("sum", "var"))
    own = Item("ops/test_sum.py::a", slow={"but": ("sum",)})
    assert selected([one, other, own]) == [one, own]


def test_the_operator_of_a_test():
    contract = type("TestSum", (), {"__module__": "ops.test_sum"})
    assert selection.operator_of(Item("simulator/test_operators.py::a", contract=contract)) == "sum"
    assert selection.operator_of(Item(f"{RELU}::a", operator=["no name"])) == "relu"


def test_shards_are_everything_once():
    items = [Item(f"simulator/test_x.py::{name}", operator=name) for name in "abcdefgh"] + [Item(f"{RELU}::a")]
    parts = [selected(items, quick=False, shard=f"{index}/3") for index in (1, 2, 3)]
    assert sorted(repr(item) for part in parts for item in part) == sorted(map(repr, items))
    assert len([part for part in parts if part]) > 1
    for wrong in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(pytest.UsageError, match="expected one such as 2/4"):
            selection.shard(wrong)


def test_the_table_names_no_slow_test_that_is_gone():
    """A method may be inherited: of a class the file alone is looked for."""

    def is_there(name):
        file, *_, function = name.split("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        return f"def {function}(" in text or (text and "::Test" in name)

    names = selection.read_slow()
    gone = sorted(name for name in names if not is_there(name))
    assert names and not gone, f"take these lines from {selection.SLOW_FILE.name}: {gone}"


def test_a_failure_is_told_at_once():
    """A run that is cut off has no summary."""
    lines = []
    terminal = SimpleNamespace(write_line=lambda text, **_: lines.append(text))
    plugins = SimpleNamespace(get_plugin=lambda name: terminal)
    reporter = selection.Reporter(SimpleNamespace(option=SimpleNamespace(quick=True), pluginmanager=plugins))
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="AssertionError: assert 1 == 2"))
    for failed, longrepr in ((True, crash), (True, "worker 'gw0' crashed"), (False, None)):
        report = SimpleNamespace(nodeid="a::b", when="call", user_properties=[], failed=failed, longrepr=longrepr)
        reporter.pytest_runtest_logreport(report)
    assert [line.strip() for line in lines] == [
        "FAILED a::b: AssertionError: assert 1 == 2",
        "FAILED a::b: worker 'gw0' crashed",
    ]


def test_what_was_slow_is_written(monkeypatch, tmp_path):
    """By CPU seconds of a case, on average; what did not run stays as it was."""
    monkeypatch.setattr(selection, "read_slow", lambda: {"a::was", "a::elsewhere"})
    reporter = selection.Reporter(SimpleNamespace())
    for name, seconds in [("a::slow[1]", 0.1), ("a::slow[2]", 4.0), ("a::was[1]", 0.1), ("a::quick", 0.9)]:
        for when in ("setup", "call", "teardown"):
            properties = [("cpu seconds", seconds)]
            report = SimpleNamespace(nodeid=name, when=when, user_properties=properties, failed=False)
            reporter.pytest_runtest_logreport(report)
    assert reporter.slow() == {"a::slow", "a::elsewhere"}
    selection.write_slow(reporter.slow(), tmp_path / "slow.csv")
    monkeypatch.undo()
    assert selection.read_slow(tmp_path / "slow.csv") == {"a::slow", "a::elsewhere"}
    assert selection.read_slow(Path(tmp_path / "absent.csv")) == set()
