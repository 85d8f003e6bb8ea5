"""tools/matrix.py: what it tries is told, and what it does not try is not guessed."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import matrix


def done(status, said=""):
    return subprocess.CompletedProcess([], status, said, "")


def test_a_python_that_is_not_here_is_not_tested(monkeypatch):
    monkeypatch.setattr(matrix, "interpreter", lambda version: None)
    monkeypatch.setattr(matrix, "wheels", lambda version, extra, releases: "2.11")
    found = matrix.row("3.14", "cuda12x", "torch", (), ["2.11.0"])
    assert found.pop("python") == "3.14" and found.pop("wheels") == "2.11" and set(found.values()) == {matrix.UNTRIED}


def test_without_a_cpu_build_of_pytorch_nothing_is_installed(monkeypatch):
    run = []

    def running(words, **_):
        run.append([str(word) for word in words])
        return done(1 if "torch==1+cpu" in words else 0)

    monkeypatch.setattr(matrix, "interpreter", lambda version: Path("python9"))
    monkeypatch.setattr(matrix, "wheels", lambda version, extra, releases: "none")
    monkeypatch.setattr(matrix.subprocess, "run", running)
    found = matrix.row("3.13", "cuda12x", "torch==1+cpu", (), ["2.11.0"])
    assert (found["wheels"], found["compiles"], found["imports"], found["tests"]) == (
        "none",
        "yes",
        *[matrix.UNTRIED] * 2,
    )
    assert len(run) == 3 and not any("[cuda12x" in word for words in run for word in words)


def test_what_passed_and_what_failed(monkeypatch):
    def running(words, **_):
        words = [str(word) for word in words]
        return done(0, "2.13.0 2.4.6 14.2.0\n" if "-c" in words else "...\n3 failed, 7 passed in 2.00s\n")

    monkeypatch.setattr(matrix, "interpreter", lambda version: Path("python9"))
    monkeypatch.setattr(matrix, "wheels", lambda version, extra, releases: "2.11")
    monkeypatch.setattr(matrix.subprocess, "run", running)
    found = matrix.row("3.11", "cuda12x", "torch", ("tests/util",), [])
    assert (found["torch"], found["cupy"], found["tests"]) == ("2.13.0", "14.2.0", "3 failed, 7 passed")


def test_this_python_is_found():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = matrix.interpreter(version)
    assert found is not None and found.is_file()
    assert matrix.interpreter("2.1") is None


def test_the_requirements_are_those_of_the_extra_with_the_command_line():
    names = {text.partition(">")[0].partition("<")[0] for text in matrix._requirements("cuda13x")}
    assert {"numpy", "torch", "cupy-cuda13x", "nvidia-cuda-nvrtc", "typer", "rich", "pycparser"} <= names
    assert not any(name.startswith("cupyops") for name in names)


def test_the_releases_are_the_newest_of_each_minor(monkeypatch):
    said = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.11.0, 2.10.1, 2.9.1\n"
    monkeypatch.setattr(matrix.subprocess, "run", lambda words, **_: done(0, said))
    assert matrix.releases("2.11") == ["2.11.0", "2.14.1", "2.15.0"]


@pytest.mark.parametrize(
    ("those", "said"), [({"2.11.0", "2.12.1"}, "2.11 to 2.12"), ({"2.12.1"}, "2.12"), (set(), "none")]
)
def test_the_wheels_are_of_those_releases_that_resolve(monkeypatch, those, said):
    def running(words, input, **_):
        assert "--python-version" in words and "cupy-cuda12x>=14" in input
        return done(0 if input.split()[0].removeprefix("torch==") in those else 1)

    monkeypatch.setattr(matrix.subprocess, "run", running)
    assert matrix.wheels("3.12", "cuda12x", ["2.11.0", "2.12.1"]) == said


def one(python, torch="not tested", wheels="not tested", tests="not tested"):
    return dict.fromkeys(matrix.COLUMNS, matrix.UNTRIED) | {
        "python": python, "torch": torch, "wheels": wheels, "tests": tests,
    }  # fmt: skip


def test_what_was_tried_stays_and_is_replaced_by_the_same_alone():
    rows = [one("3.11", "2.13.0", "2.11", "1 passed"), one("3.14")]
    rows = matrix.merged(rows, one("3.14", "2.14.1", tests="2 passed"))
    assert [row["tests"] for row in rows] == ["1 passed", "2 passed"]
    rows = matrix.merged(rows, one("3.14", wheels="2.15"))  # nothing could be run: what is known of wheels alone is new
    assert rows[1] == one("3.14", "2.14.1", "2.15", "2 passed")
    rows = matrix.merged(rows, one("3.11", "2.12.1", tests="3 passed"))
    assert [(row["torch"], row["wheels"]) for row in rows] == [
        ("2.12.1", "2.11"),
        ("2.13.0", "2.11"),
        ("2.14.1", "2.15"),
    ]
    assert matrix.merged(rows, one("3.11", "2.13.0", "2.15", "4 passed"))[1]["tests"] == "4 passed"
