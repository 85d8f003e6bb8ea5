"""tools/matrix.py: what it tries is told, and what it does not try is not guessed."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import matrix


def done(status, said=""):
    return subprocess.CompletedProcess([], status, said, "")


def test_a_python_that_is_not_here_is_not_tested(monkeypatch):
    monkeypatch.setattr(matrix, "interpreter", lambda version: None)
    monkeypatch.setattr(matrix, "wheels", lambda version, extra: "yes")
    found = matrix.row("3.14", "cuda12x", "torch", ())
    assert found.pop("python") == "3.14" and found.pop("wheels") == "yes" and set(found.values()) == {matrix.UNTRIED}


def test_without_a_cpu_build_of_pytorch_nothing_is_installed(monkeypatch):
    run = []

    def running(words, **_):
        run.append([str(word) for word in words])
        return done(1 if "torch==1+cpu" in words else 0)

    monkeypatch.setattr(matrix, "interpreter", lambda version: Path("python9"))
    monkeypatch.setattr(matrix, "wheels", lambda version, extra: "no")
    monkeypatch.setattr(matrix.subprocess, "run", running)
    found = matrix.row("3.13", "cuda12x", "torch==1+cpu", ())
    assert (found["wheels"], found["compiles"], found["imports"], found["tests"]) == (
        "no",
        "yes",
        *[matrix.UNTRIED] * 2,
    )
    assert len(run) == 3 and not any("[cuda12x" in word for words in run for word in words)


def test_what_passed_and_what_failed(monkeypatch):
    def running(words, **_):
        words = [str(word) for word in words]
        return done(0, "2.13.0 2.4.6 14.2.0\n" if "-c" in words else "...\n3 failed, 7 passed in 2.00s\n")

    monkeypatch.setattr(matrix, "interpreter", lambda version: Path("python9"))
    monkeypatch.setattr(matrix, "wheels", lambda version, extra: "yes")
    monkeypatch.setattr(matrix.subprocess, "run", running)
    found = matrix.row("3.11", "cuda12x", "torch", ("tests/util",))
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
