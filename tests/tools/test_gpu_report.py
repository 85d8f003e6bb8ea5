"""The GPU report vouches for a tree only where all of it was run, passed, and is unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_report_plugin import Recorder, tool
from processes import run_python

report = tool()
ROOT = Path(__file__).resolve().parents[2]
PASSED = {"passed": 3, "failed": 0, "skipped": 1, "failures": []}


@pytest.fixture
def tree(tmp_path):
    """A package in small."""
    for name in ("cuda_src/common/a.cuh", "cuda_src/b.cu", "cupyops/c.py", "cupyops/ops/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = '{name}';\n")
    (tmp_path / "tests" / "opdb").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def passed(tree):
    """The report of a whole run with a GPU."""
    path = tree / "report.json"
    for suite in report.suites(tree):
        report.write(path, suite, PASSED, tree)
    path.write_text(json.dumps({**json.loads(path.read_text()), "gpu": "a GPU"}))
    return path


def problems(path, tree):
    return report.problems(report.read(path), tree)


def test_fresh(tree, passed):
    assert problems(passed, tree) == []


@pytest.mark.parametrize("name", ["cuda_src/common/a.cuh", "cuda_src/b.cu", "cupyops/c.py", "cupyops/ops/d.py"])
def test_a_change_makes_it_stale(tree, passed, name):
    (tree / name).write_text("changed")
    assert [p.partition(":")[0] for p in problems(passed, tree)] == ["stale"]
    (tree / name).unlink()
    assert [p.partition(":")[0] for p in problems(passed, tree)] == ["stale"]


def test_comments_on_a_kernel_do_not_but_what_only_looks_like_one_does(tree, passed):
    path = tree / "cuda_src" / "b.cu"
    code = path.read_text()
    path.write_text(f"// reached: 4000 GB/s\n\n/* and why\n   not more */\n{code.rstrip()}  // a word\n")
    assert problems(passed, tree) == []
    path.write_text(code.replace("cuda_src", "//cuda_src"))
    assert problems(passed, tree)


def test_how_a_formatter_lays_a_kernel_out_does_not_but_what_lines_mean_does(tree, passed):
    path = tree / "cuda_src" / "b.cu"
    path.write_text('#define TWICE(x) \\\n  x + x\nint f(int a, int b) { return a - -b; }\nconst char* s = "a  b";\n')
    passed.write_text(json.dumps({**json.loads(passed.read_text()), "sha256": report.tree_sha256(tree)}))
    code = path.read_text()
    path.write_text(code.replace("int a, int b) { return", "int a,\n      int b) {\n\n  return"))
    assert problems(passed, tree) == []
    for old, new in (("- -b", "--b"), ('"a  b"', '"a b"'), ("\nint f", " int f"), ("int f", "intf")):
        path.write_text(code.replace(old, new))
        assert problems(passed, tree), new


def test_words_on_python_do_not_but_any_other_string_does(tree, passed):
    path = tree / "cupyops" / "c.py"
    code = path.read_text()
    path.write_text(f'"""What it is."""\n\n# why\n{code.rstrip()}  # a word\n')
    assert problems(passed, tree) == []
    path.write_text(f'{code}other = "# no comment"\n')
    assert problems(passed, tree)
    path.write_text(code.replace("'cupyops/c.py'", "'cupyops/d.py'"))
    assert problems(passed, tree)


def test_a_new_name_makes_it_stale_and_other_files_do_not(tree, passed):
    (tree / "cupyops" / "notes.txt").write_text("not code")
    (tree / "tests" / "test_x.py").write_text("not the package")
    assert problems(passed, tree) == []
    (tree / "cupyops" / "c.py").rename(tree / "cupyops" / "e.py")
    assert problems(passed, tree)


def test_missing_damaged_or_of_another_kind(tree):
    for content in (None, "", "{", "[]", '{"runs": 1}'):
        path = tree / "other.json"
        if content is not None:
            path.write_text(content)
        assert "there is no report" in problems(path, tree)[0]


def test_what_was_not_run_or_failed_is_named(tree):
    path = tree / "report.json"
    report.write(path, "tests", {"passed": 1, "failed": 1, "skipped": 0, "failures": ["tests/test_x.py::test_y"]}, tree)
    found = problems(path, tree)
    assert "failed in tests: tests/test_x.py::test_y" in found
    assert "tests/opdb was not run" in found
    report.write(path, "tests/opdb", {"passed": 0, "failed": 0, "skipped": 9, "failures": []}, tree)
    assert "no test of tests/opdb passed" in problems(path, tree)


def test_runs_of_the_same_code_are_kept_together_and_no_others(tree, passed):
    report.write(passed, "tests/ops", PASSED, tree)
    assert set(report.read(passed)["runs"]) == {"tests", "tests/opdb", "tests/ops"}
    report.write(passed, "tests", PASSED, tree)
    assert set(report.read(passed)["runs"]) == {"tests", "tests/opdb"}
    (tree / "cuda_src" / "b.cu").write_text("changed")
    report.write(passed, "tests", PASSED, tree)
    assert set(report.read(passed)["runs"]) == {"tests"}


def test_two_runs_are_all_of_the_tests(tree, passed):
    """Those of more than 2^31 elements, which have no room beside others, and the rest."""
    large, rest = report.LARGE
    report.write(passed, large, PASSED, tree)
    assert set(report.read(passed)["runs"]) == {large, "tests/opdb"}
    assert f"{rest} was not run" in problems(passed, tree)
    report.write(passed, rest, PASSED, tree)
    assert problems(passed, tree) == ["no GPU took part"]  # here
    report.write(passed, "tests", PASSED, tree)
    assert set(report.read(passed)["runs"]) == {"tests", "tests/opdb"}


def test_shards_are_all_of_the_tests_together(tree, passed):
    """As several GPUs run them, or one with little time; those of another number of shards are none of theirs."""
    large, rest = report.LARGE
    report.write(passed, large, PASSED, tree)
    for shard, missing in (("1/3", True), ("2/2", True), ("1/2", False)):
        report.write(passed, f"{rest} {shard}", PASSED, tree)
        assert (f"{rest} was not run" in problems(passed, tree)) == missing
    assert set(report.read(passed)["runs"]) == {large, f"{rest} 1/2", f"{rest} 2/2", "tests/opdb"}
    report.write(passed, f"{rest} 2/2", {**PASSED, "passed": 0}, tree)
    assert f"no test of {rest} 2/2 passed" in problems(passed, tree)
    report.write(passed, rest, PASSED, tree)
    assert set(report.read(passed)["runs"]) == {large, rest, "tests/opdb"}
    report.write(passed, "tests 1/2", PASSED, tree)
    assert set(report.read(passed)["runs"]) == {"tests 1/2", "tests/opdb"}


def pytest_run(folder, *args):
    """The report of a run of pytest in `folder`."""
    path = folder / "written.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    command = ["-m", "pytest", "-q", "-p", "gpu_report_plugin", "--gpu-report", path, *args]
    done = run_python(*command, cwd=folder, env=environment)
    assert path.is_file(), done.stdout + done.stderr
    return json.loads(path.read_text())


def test_what_the_plugin_writes(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = gpu: x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_few.py").write_text(
        """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 0
@pytest.fixture
def broken(): raise OSError
def test_setup(broken): pass
@pytest.fixture
def leaving(): yield; raise OSError
def test_teardown(leaving): pass
@pytest.mark.skip
def test_skipped(): pass
"""
    )
    (tmp_path / "tests" / "test_unreadable.py").write_text("import nothing_of_this_name\n")
    written = pytest_run(tmp_path, "-m", "gpu", "--continue-on-collection-errors")
    assert written["sha256"] == report.tree_sha256(ROOT)
    assert {"date", "gpu", "driver", "python", "torch", "torch_cuda", "cupy", "nvrtc"} <= set(written)
    names = [
        *(f"tests/test_few.py::test_{name}" for name in ("setup", "teardown", "wrong")),
        "tests/test_unreadable.py",
    ]
    assert written["runs"] == {"tests": {"passed": 1, "failed": 4, "skipped": 1, "failures": names}}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "tests"),
        ({"keyword": "right"}, "tests -k 'right'"),
        ({"markexpr": "not gpu"}, "tests -m 'not gpu'"),
        ({"maxfail": 1}, "tests (part)"),
        ({"quick": True}, "tests (part)"),
        ({"shard": "1/4"}, "tests 1/4"),
        ({"shard": "1/4", "keyword": "right"}, "tests -k 'right' 1/4"),
    ],
)
def test_a_run_of_a_part_has_another_name(tmp_path, options, name):
    asked = dict.fromkeys(("keyword", "markexpr", "deselect", "lf", "maxfail"), "") | options
    config = SimpleNamespace(option=SimpleNamespace(**asked), args=[str(tmp_path / "tests")], rootpath=tmp_path)
    assert Recorder(config).run_name() == name


def test_as_a_program(tree, passed):
    """Its exit code is what `make gpu-report` goes by; a report of the tree in small is not one of this tree."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), str(passed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "stale" in done.stdout and "a GPU" in done.stdout
    content = json.loads(passed.read_text())
    runs = dict.fromkeys(report.suites(ROOT), PASSED)
    passed.write_text(json.dumps({**content, "sha256": report.tree_sha256(ROOT), "runs": runs}))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "fresh" in done.stdout
