"""`python -m cupyops` itself: its help, and what it does in poor terminals, in pipes and when it is interrupted."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python
from typer.testing import CliRunner

import cupyops
from cupyops import simulator
from cupyops._kernel import kernel
from cupyops._kernel.compile import source
from cupyops.cli import bench, check, jobs, streams
from cupyops.cli.app import app

DAY = ["new", "check", "simulate", "explain", "compile", "bench", "doctor"]
RELU = ["relu.cu", "relu_fwd<float>", "--grid", "1", "--block", "32", "--arg", "randn(32)", "--arg", "empty(32)"]
COMMANDS = {
    "help": ["--help"],
    "help of a command": ["check", "--help"],
    "doctor": ["doctor"],
    "simulate": ["simulate", *RELU, "--arg", "null", "--arg", "32"],
    "explain": ["explain", "relu", "--shape", "64x64", "--no-compile"],
    "check": ["check", "cupyops:relu", "--backend", "reference", "--only", "strided", "--verbose"],
    "new": ["new", "halved"],
}


def test_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"cupyops {cupyops.__version__}\n")


def test_the_help_is_in_the_order_of_a_day():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    listed = re.findall(r"^\W*([a-z]+)  ", result.output, re.MULTILINE)
    assert [name for name in listed if name in DAY] == DAY


@pytest.mark.parametrize("case", COMMANDS)
def test_a_narrow_terminal_of_ascii(case, tmp_path):
    """Nothing fails, nothing is cut off that a list can hold, and every byte is ASCII."""
    environ = {**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "ascii"}
    done = run_python("-m", "cupyops", *COMMANDS[case], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.isascii() and done.stderr.isascii() and "Traceback" not in done.stderr
    words = {"doctor": "run in the simulator", "simulate": "threads /warp: ", "check": "verdict: pass"}
    assert words.get(case, "") in text
    assert "~" not in re.sub(r"/\S*~\S*", "", text), "something was cut short"
    if "help" in case:
        assert max(map(len, text.splitlines())) <= 40


def test_a_character_that_is_not_there_has_a_stand_in():
    error = UnicodeEncodeError("ascii", "a…█日b", 1, 4, "ordinal not in range")
    assert streams._plainly(error) == ("~#?", 4)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE")
def test_a_pipe_that_closes_early(tmp_path):
    """As of `| head -1`: no traceback, and the files that were asked for are there."""
    read, write = os.pipe()
    os.close(read)
    files = [tmp_path / "r.html", tmp_path / "r.json"]
    done = subprocess.run(
        [sys.executable, "-m", "cupyops", *COMMANDS["simulate"], "--html", files[0], "--json", files[1]],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=Path(cupyops.__file__).parents[1],
        timeout=120,
    )
    os.close(write)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert all(file.stat().st_size > 1000 for file in files)


def test_reports_are_written_before_anything_is_shown(tmp_path, monkeypatch):
    def closed(*_, **__):
        raise SystemExit(1)  # as rich does of a broken pipe

    monkeypatch.setattr(check, "show", closed)
    monkeypatch.setattr(bench, "show", closed)
    words = ["check", "cupyops:relu", "--backend", "reference", "--only", "strided"]
    assert CliRunner().invoke(app, [*words, "--json", str(tmp_path / "r.json")]).exit_code == 1
    source = str(Path(cupyops.__file__).parents[1] / "benchmarks" / "results" / "h200.csv")
    assert CliRunner().invoke(app, ["bench", "--from", source, "--csv", str(tmp_path / "r.csv")]).exit_code == 1
    assert (tmp_path / "r.json").stat().st_size > 100 and (tmp_path / "r.csv").stat().st_size > 1000


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_an_interrupt_of_a_command_that_has_nothing_to_show(monkeypatch):
    monkeypatch.setattr("cupyops.cli.explain.run", interrupt)
    result = CliRunner().invoke(app, ["explain", "relu"])
    assert (result.exit_code, result.output) == (130, "interrupted\n")


def test_an_interrupted_compilation_tells_what_it_has_made(monkeypatch, tmp_path):
    def some(planned, folder, processes):
        yield jobs.Outcome(planned[0], 0.5, size=1000)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run", some)
    ours = kernel.kernels(source.cuda_src())  # and none that other tests have made
    monkeypatch.setattr(kernel, "kernels", lambda: ours)
    result = CliRunner().invoke(app, ["compile", "--arch", "sm_80", "--out", str(tmp_path)], env={"COLUMNS": "100"})
    planned = re.search(r"cubins to make: (\d+)", result.output)
    assert planned, result.output
    made = int(planned[1])
    assert result.exit_code == 130 and f"interrupted: {made - 1} of {made} are not made" in result.output
    assert "1,000" in result.output


def test_an_interrupted_dry_run_tells_what_it_has_compared(monkeypatch):
    from cupyops.bench import case, measure

    compared = []

    def compare(twin, device):
        if compared:
            raise KeyboardInterrupt
        return compared.append(twin) or True

    monkeypatch.setattr(measure, "compare", compare)
    folder = Path(cupyops.__file__).parents[1] / "benchmarks"
    assert case.files(["relu"], folder)
    result = CliRunner().invoke(app, ["bench", "relu", "--dry-run", "--folder", str(folder)])
    assert (
        result.exit_code == 130
        and "1 small cases compared for" in result.output
        and "interrupted: 1 of" in result.output
    )


def test_an_interrupted_simulation_tells_how_far_it_came(monkeypatch):
    def launch(self, *args, progress, **kwargs):
        progress(1, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator.Program, "launch", launch)
    result = CliRunner().invoke(app, COMMANDS["simulate"])
    assert (result.exit_code, result.output) == (130, "interrupted: 1 of 1 blocks have run\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_the_processes_that_compile_leave_an_interrupt_to_their_parent():
    before = signal.getsignal(signal.SIGINT)
    try:
        jobs._leave_interrupts_to_the_parent()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_sign_of_life_before_pytorch(tmp_path):
    """A bar of `check` in a terminal, before PyTorch is imported, which takes longer than anybody waits in the dark."""
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "cupyops", "check", "cupyops:relu"]
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(cupyops.__file__).parents[1]}",
        "TERM": "xterm",
    }
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=60, check=False)
    os.close(theirs)
    assert ended.returncode == 3
    assert b"importing PyTorch" in os.read(ours, 1000)


def test_the_end_looks_through_no_objects():
    """Python collects garbage when it ends, which after `check` took a second; all of it goes with the process."""
    program = """
import gc, sys
sys.argv = ["cupyops", "--version"]
from cupyops.cli import main
try:
    main()
finally:
    print(gc.get_freeze_count() > 20 * len(gc.get_objects()))
"""
    assert run_python("-c", program).stdout.splitlines() == [f"cupyops {cupyops.__version__}", "True"]
