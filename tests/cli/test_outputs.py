"""What commands write: noticed before the run where it cannot be written, or would overwrite what the command reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from figures import results, row
from typer.testing import CliRunner

from cupyops.bench import table
from cupyops.cli import outputs, simulate
from cupyops.cli.app import app
from cupyops.errors import InputError

KERNEL = '#include "helper.cuh"\n__global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a kernel, what it includes, an array, and a module with an operator."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.cu").write_text(KERNEL)
    (tmp_path / "helper.cuh").write_text("#define FACTOR 2\n")
    np.save(tmp_path / "x.npy", np.ones(4, np.float32))
    (tmp_path / "mine.py").write_text("import cupyops\nk = cupyops.Kernel('k.cu', 'twice')\nrelu = cupyops.relu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def simulated(*more):
    return run("simulate", "k.cu", "twice", "--grid", 1, "--block", 4, "--arg", "@x.npy", *more)


def checked(*more):
    return run("check", "mine.py:relu", "--only", "accuracy", "--backend", "reference", *more)


def drawn(*more):
    table.write(results(row()), Path("figures.csv"))
    return run("bench", "--from", "figures.csv", *more)


def hard(link, to):
    os.link(to, link)


def soft(link, to):
    link.symlink_to(to)


def beside(link, to):
    link.symlink_to(Path("..") / to.parent.name / to.name)


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize("name", ["k.cu", "helper.cuh", "x.npy"])
@pytest.mark.parametrize("link", [None, soft, hard, beside])
def test_simulate_overwrites_no_input(folder, monkeypatch, option, name, link):
    """Under whatever name it is given."""
    monkeypatch.setattr(simulate, "_execute", None)
    output = Path(name)
    if link is not None:
        output = Path("link.html")
        link(output, folder / name)
    before = content(folder)
    result = simulated(option, output)
    assert result.exit_code == 2 and f"{option} is {str(output)!r}, which the command reads" in result.output
    assert content(folder) == before


def test_simulate_overwrites_no_built_in_kernel(folder):
    """The file that is meant need not be the one that is named."""
    from cupyops._kernel.compile.source import cuda_src

    before = (cuda_src() / "relu.cu").read_bytes()
    result = run(
        *("simulate", "relu.cu", "relu_fwd<float>", "--grid", 1, "--block", 32),
        *("--html", cuda_src() / "relu.cu"),
    )
    assert result.exit_code == 2 and "would overwrite" in result.output
    assert (cuda_src() / "relu.cu").read_bytes() == before


@pytest.mark.parametrize("option", ["--json", "--junit"])
@pytest.mark.parametrize("name", ["mine.py", "k.cu", "helper.cuh"])
def test_check_overwrites_no_input(folder, option, name):
    before = content(folder)
    result = checked(option, name)
    assert result.exit_code == 2 and f"{option} is {name!r}, which the command reads" in result.output
    assert {name: text for name, text in content(folder).items() if not name.endswith(".pyc")} == before


@pytest.mark.parametrize("option", ["--csv", "--html"])
def test_bench_overwrites_no_input(folder, option):
    pytest.importorskip("matplotlib")
    (folder / "link").symlink_to("figures.csv")
    for output in ("figures.csv", "link"):
        result = drawn(option, output)
        assert result.exit_code == 2 and f"{option} is {output!r}, which the command reads" in result.output
    table.write(results(row()), Path("old.csv"))
    assert drawn("--compare", "old.csv", "--csv", "old.csv").exit_code == 2
    (folder / "bench_mine.py").write_text("")
    assert "which the command reads" in run("bench", "bench_mine.py", "--csv", "bench_mine.py").output


def test_two_outputs_are_two_files(folder):
    (folder / "link").symlink_to("r")
    for command, options in ((simulated, ("--html", "--json")), (checked, ("--json", "--junit"))):
        for names in (("r", "r"), ("r", "./r"), ("r", "link")):
            result = command(options[0], names[0], options[1], names[1])
            assert result.exit_code == 2 and f"{options[0]} and {options[1]} both write 'r'" in result.output
    assert not (folder / "r").exists()


def test_an_earlier_report_is_overwritten(folder):
    for command, option in ((simulated, "--html"), (simulated, "--json"), (checked, "--json"), (checked, "--junit")):
        Path("r").write_text("of the day before")
        assert command(option, "r").exit_code == 0
        assert "of the day before" not in Path("r").read_text() != ""


NOWHERE = {
    "no folder": ("absent/r.html", "there is no folder 'absent'"),
    "a folder": (".", "a folder; expected a file"),
    "below a file": ("k.cu/r.html", "cannot be written"),
    "nothing can be made there": ("/proc/self/r.html", "cannot be written"),
    "too long": ("x" * 300, "cannot be written"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="for its /proc")
@pytest.mark.parametrize("case", NOWHERE)
@pytest.mark.parametrize(
    ("command", "option"),
    [(simulated, "--html"), (simulated, "--json"), (checked, "--json"), (checked, "--junit")],
)
def test_it_is_noticed_before_the_run(folder, monkeypatch, command, option, case):
    monkeypatch.setattr("cupyops.cli.simulate._execute", None)
    monkeypatch.setattr("cupyops.cli.check._report", None)
    path, said = NOWHERE[case]
    before = content(folder)
    result = command(option, path)
    assert result.exit_code == 2, result.exception
    assert f"{option} is {path!r}" in result.output and said in result.output and "Traceback" not in result.output
    assert content(folder) == before


@pytest.mark.skipif(sys.platform != "linux", reason="for its /proc")
@pytest.mark.parametrize(
    ("option", "path", "said"),
    [
        ("--csv", ".", "a folder; expected a file"),
        ("--csv", "k.cu/r.csv", "cannot be written"),
        ("--csv", "k.cu/a/r.csv", "'k.cu' is a file, expected a folder"),
        ("--csv", "/proc/self/a/r.csv", "'/proc/self' cannot be written"),
        ("--html", "/proc/self/r.html", "cannot be written"),
        ("--png", "k.cu", "'k.cu' is a file, expected a folder"),
        ("--png", "k.cu/a", "'k.cu' is a file, expected a folder"),
        ("--png", "/proc/self/a", "'/proc/self' cannot be written"),
    ],
)
def test_bench_notices_before_it_measures(folder, monkeypatch, option, path, said):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("cupyops.cli.bench.table.read", None)
    result = drawn(option, path)
    assert result.exit_code == 2, result.exception
    assert f"{option} is {path!r}" in result.output and said in result.output


def test_bench_makes_the_folders_of_its_files(folder):
    pytest.importorskip("matplotlib")
    result = drawn("--csv", "a/b/r.csv", "--html", "c/r.html", "--png", "d/e")
    assert result.exit_code == 0, result.output
    assert Path("a/b/r.csv").is_file() and Path("c/r.html").is_file() and list(Path("d/e").glob("*.png"))


@pytest.mark.skipif(sys.platform != "linux", reason="for its /proc")
@pytest.mark.parametrize("path", ["/proc/self", "/proc/self/cubins", "/proc/self/a/b"])
def test_folders_that_cannot_be_written(folder, monkeypatch, path):
    monkeypatch.setattr("cupyops.cli.compile._kernels", None)
    for words in (("compile", "mine.py", "--arch", "sm_80", "--out", path), ("new", "thing", "--dir", path)):
        result = run(*words)
        assert result.exit_code == 2, result.exception
        assert f"{words[-2]} is {path!r}: '/proc/self' cannot be written" in result.output


def test_what_is_there_stays_as_it_is(tmp_path):
    path = tmp_path / "r"
    path.write_text("old")
    before = path.stat().st_mtime_ns
    outputs.files({"--html": path, "--json": tmp_path / "new", "--junit": None})
    assert path.read_text() == "old" and path.stat().st_mtime_ns == before and os.listdir(tmp_path) == ["r"]


def test_a_link_that_leads_to_nothing(tmp_path):
    """It may be written through; nothing is left there, and the link stays."""
    link = tmp_path / "link"
    link.symlink_to("target")
    outputs.files({"--html": link})
    assert link.is_symlink() and os.listdir(tmp_path) == ["link"]


def test_a_file_that_may_not_be_written(tmp_path, monkeypatch):
    """For a user who is not root."""

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=r"--html is '.*r', which cannot be written: Permission denied"):
        outputs.files({"--html": tmp_path / "r"})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_devices_and_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    outputs.files({"--html": tmp_path / "pipe", "--json": Path("/dev/null")})


def test_inputs_are_listed_only_where_an_output_is_there(tmp_path):
    def listed():
        yield tmp_path / "absent"
        raise AssertionError

    outputs.files({"--html": tmp_path / "r"}, listed())
    (tmp_path / "r").write_text("")
    with pytest.raises(AssertionError):
        outputs.files({"--html": tmp_path / "r"}, listed())
