"""The GPU report vouches for a tree only where all of it was run, passed, and is unchanged."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import dependents
import pytest
import selection
from gpu_report_plugin import pytest_collection_modifyitems, pytest_sessionfinish, tool
from processes import run_python

report = tool()
ROOT = Path(__file__).resolve().parents[2]
PASSED = {"passed": 3, "failed": 0, "skipped": 1, "failures": []}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package in small, with two operators."""
    texts = {
        "cuda_src/relu.cu": '#include "common/a.cuh"\nint relu;\n',
        "cuda_src/common/a.cuh": "int a;\n",
        "cuda_src/gelu.cu": "int gelu;\n",
        "cupyops/ops/_relu.py": 'name = "relu.cu"\n',
        "cupyops/ops/_gelu.py": 'name = "gelu.cu"\n',
        "cupyops/_kernel/launch.py": "launch = 1\n",
        "cupyops/nn/relu.py": "module = 1\n",
        "tests/ops/test_relu.py": "",
        "tests/ops/test_gelu.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    places = {"ROOT": "", "PACKAGE": "cupyops", "TESTS": "tests", "CUDA": "cuda_src"}
    for name, place in places.items():
        monkeypatch.setattr(dependents, name, tmp_path / place)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "environment", lambda: {"date": "today", "gpu": "a GPU", "driver": "1", "torch": "2"})
    forget()
    yield tmp_path
    forget()


def forget():
    """As a new process, which has read no file yet."""
    for function in [*vars(dependents).values(), report.framework]:
        getattr(function, "cache_clear", lambda: None)()


@pytest.fixture
def passed(tree):
    """The report of a whole run."""
    path = tree / "report.json"
    report.write(path, dict.fromkeys(["relu", "gelu", "relu, op_db", "tests/nn"], PASSED))
    return path


def problems(path):
    forget()
    return report.problems(report.read(path))


def test_fresh(passed):
    assert problems(passed) == []


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("cuda_src/relu.cu", ["relu", "relu, op_db"]),
        ("cuda_src/common/a.cuh", ["relu", "relu, op_db"]),
        ("cupyops/ops/_gelu.py", ["gelu"]),
        ("cupyops/nn/relu.py", ["tests/nn"]),
    ],
)
def test_a_change_makes_what_depends_on_it_stale(tree, passed, name, stale):
    (tree / name).write_text("changed")
    assert problems(passed) == [f"changed since they ran: {', '.join(stale)}"]
    assert [part for part, run in report.read(passed)["runs"].items() if not report.holds(part, run)] == stale


def test_a_change_of_the_framework_is_told_apart(tree, passed):
    (tree / "cupyops/_kernel/launch.py").write_text("changed")
    assert problems(passed) == ["the framework has changed since 4 of 4 ran"]


def test_comments_on_a_kernel_do_not_but_what_only_looks_like_one_does(tree, passed):
    path = tree / "cuda_src" / "gelu.cu"
    path.write_text("// reached: 4000 GB/s\n\n/* and why\n   not more */\nint gelu;  // a word\n")
    assert problems(passed) == []
    path.write_text('int gelu; const char* s = "//";\n')
    assert problems(passed)


def test_how_a_formatter_lays_a_kernel_out_does_not_but_what_lines_mean_does(tree, passed):
    path = tree / "cuda_src" / "gelu.cu"
    path.write_text('#define TWICE(x) \\\n  x + x\nint f(int a, int b) { return a - -b; }\nconst char* s = "a  b";\n')
    forget()
    report.write(passed, {"gelu": PASSED})
    code = path.read_text()
    path.write_text(code.replace("int a, int b) { return", "int a,\n      int b) {\n\n  return"))
    assert problems(passed) == []
    for old, new in (("- -b", "--b"), ('"a  b"', '"a b"'), ("\nint f", " int f"), ("int f", "intf")):
        path.write_text(code.replace(old, new))
        assert problems(passed), new


def test_words_on_python_do_not_but_any_other_string_does(tree, passed):
    path = tree / "cupyops" / "ops" / "_gelu.py"
    code = path.read_text()
    path.write_text(f'"""What it is."""\n\n# why\n{code.rstrip()}  # a word\n')
    assert problems(passed) == []
    path.write_text(f'{code}other = "# no comment"\n')
    assert problems(passed)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"runs": 1}'])
def test_missing_damaged_or_of_another_kind(tree, content):
    path = tree / "other.json"
    if content is not None:
        path.write_text(content)
    assert "there is no report" in problems(path)[0]


def test_a_report_of_the_older_form_holds_for_nothing(tree):
    path = tree / "report.json"
    path.write_text(json.dumps({"sha256": "0", "runs": {"tests": PASSED}}))
    assert "never ran: gelu, relu" in problems(path)
    report.write(path, {"relu": PASSED})
    assert set(report.read(path)["runs"]) == {"relu"}


def test_what_was_not_run_or_failed_is_named(tree, passed):
    failed = {"passed": 1, "failed": 1, "skipped": 0, "failures": ["tests/ops/test_relu.py::test_y"]}
    report.write(passed, {"relu": failed, "relu, op_db": {**PASSED, "passed": 0}})
    assert problems(passed) == ["nothing passed on a GPU: relu, op_db", "failed: tests/ops/test_relu.py::test_y"]
    assert not report.holds("relu", report.read(passed)["runs"]["relu"])


def test_what_ran_again_takes_the_place_of_what_ran_before(tree, passed):
    (tree / "cuda_src/relu.cu").write_text("changed")
    forget()
    report.write(passed, {"relu": {**PASSED, "passed": 5}})
    assert problems(passed) == ["changed since they ran: relu, op_db"]
    report.write(passed, {"relu, op_db": PASSED})
    assert problems(passed) == [] and report.read(passed)["runs"]["relu"]["passed"] == 5


def test_without_a_gpu_nothing_holds(tree, passed, monkeypatch):
    monkeypatch.setattr(report, "environment", lambda: {"date": "today", "gpu": None})
    report.write(passed, {"gelu": PASSED})
    assert problems(passed) == ["nothing passed on a GPU: gelu"]


def run_tests(path, *arguments):
    """What pytest prints of the tests of two operators, whose GPU need not be there, and the report."""
    (path / "tests" / "ops").mkdir(parents=True, exist_ok=True)
    (path / "tests" / "opdb").mkdir(exist_ok=True)
    (path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = gpu: x\nnorecursedirs = opdb\n")
    (path / "tests" / "conftest.py").write_text(
        f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / "tests" / "support")!r}, {str(ROOT / "tools")!r}]
import selection
selection.TESTS = Path(__file__).parent
"""
    )
    body = """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_more_than_2_31(): pass
"""
    (path / "tests" / "ops" / "test_relu.py").write_text(body)
    (path / "tests" / "ops" / "test_gelu.py").write_text(
        body
        + """
def test_wrong(): assert 0
@pytest.fixture
def leaving(): yield; raise OSError
def test_teardown(leaving): pass
@pytest.mark.skip
def test_skipped(): pass
"""
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    command = ["-m", "pytest", "-q", "-p", "gpu_report_plugin", "--gpu-report", path / "written.json", *arguments]
    done = run_python(*command, cwd=path, env=environment)
    return done.stdout, (report.read(path / "written.json") or {"runs": {}})["runs"]


def test_what_the_plugin_writes(tmp_path):
    """Each operator's own result; the tests of more than 2^31 elements, which have no room beside others, apart."""
    said, runs = run_tests(tmp_path, "-m", "gpu", "-k", "not more_than_2", "-n", "2")
    assert set(runs) == {"relu", "gelu"}, said
    assert {"date", "gpu", "torch", "code", "framework"} <= set(runs["relu"])
    assert {name: runs["relu"][name] for name in PASSED} == {"passed": 1, "failed": 0, "skipped": 0, "failures": []}
    failures = [f"tests/ops/test_gelu.py::test_{name}" for name in ("teardown", "wrong")]
    assert {name: runs["gelu"][name] for name in PASSED} == {**PASSED, "passed": 1, "failed": 2, "failures": failures}
    said, runs = run_tests(tmp_path, "-m", "gpu", "-k", "more_than_2")
    assert set(runs) == {"relu", "gelu", "relu, large tensors", "gelu, large tensors"}, said


def test_an_interrupted_run_counts_for_what_has_ended(tmp_path):
    """The last test interrupts the run, in a part of its own."""
    body = "import pytest\npytestmark = pytest.mark.gpu\ndef test_interrupted(): raise KeyboardInterrupt\n"
    (tmp_path / "tests" / "optim").mkdir(parents=True)
    (tmp_path / "tests" / "optim" / "test_adam.py").write_text(body)
    said, runs = run_tests(tmp_path, "-m", "gpu", "-k", "not more_than_2")
    assert set(runs) == {"relu", "gelu"}, said


@pytest.mark.parametrize(
    "arguments",
    [["-k", "right"], ["-m", "not gpu"], ["--maxfail=1"], ["tests/ops/test_relu.py"], ["tests/nowhere.py"]],
    ids=" ".join,
)
def test_a_run_of_some_tests_leaves_the_report_as_it_was(tmp_path, arguments):
    said, runs = run_tests(tmp_path, *arguments)
    assert "The GPU report stays as it was: " in said and not runs


def test_only_what_the_report_does_not_hold_for_runs(tree, passed):
    """For one, that whose code has changed."""
    (tree / "cuda_src/relu.cu").write_text("changed")
    forget()
    items = [
        SimpleNamespace(name="test_a", path=tree / "tests" / "ops" / f"test_{name}.py", user_properties=[])
        for name in ("relu", "gelu")
    ]
    for item in items:
        item.get_closest_marker = lambda name: None
    left = []
    option = SimpleNamespace(gpu_report=passed, stale=True)
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "TESTS", tree / "tests")
        chosen = [*items]
        pytest_collection_modifyitems(SimpleNamespace(option=option, hook=hook), chosen)
    assert chosen == items[:1] and left == items[1:]
    for stale, status in ((True, 0), (False, 5)):  # where nothing is left to run
        session = SimpleNamespace(config=SimpleNamespace(option=SimpleNamespace(stale=stale)), exitstatus=5)
        pytest_sessionfinish(session)
        assert session.exitstatus == status


def test_as_a_program(tree, passed):
    """Its exit code is what `make gpu-report` goes by; a report of the tree in small does not hold for this one."""
    done = run_python(ROOT / "tools" / "gpu_report.py", passed, bare=True)
    assert done.returncode == 1
    assert "a GPU" in done.stdout and "holds for 0 of 4: nothing" in done.stdout and "changed since" in done.stdout
