"""`python -m cupyops bench`: errors, exit codes, what is printed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from figures import results, row
from typer.testing import CliRunner

import cupyops
from cupyops.bench import Case, table
from cupyops.bench import run as running
from cupyops.bench.case import declared, files
from cupyops.cli.app import app
from cupyops.cli.bench import PEERS, TUNED

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = """
import torch, cupyops
from cupyops.bench import Case, table
def make(device, dtype):
    return (torch.randn(64, device=device, dtype=dtype, requires_grad=True),)
def cases():
    yield Case("relu", "64", torch.float32, make, OURS, torch.relu, forward_bytes=512, backward_bytes=768)
"""


def bench(*arguments, width=80):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": str(width)})


@pytest.fixture
def tiny(tmp_path):
    """A file of one case, of a function of ours."""

    def write(ours):
        path = tmp_path / "bench_tiny.py"
        path.write_text(TINY.replace("OURS", ours))
        return path

    return write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--folder", FOLDER], "no benchmark of 'nothing'"),
        (["absent.py"], "absent.py is no file"),
        (["relu", "--folder", FOLDER, "--against", "eager,jax"], "--against names jax; it can name eager, compile,"),
        (["relu", "--folder", FOLDER, "--only", "none of them"], "no case has 'none of them' in its name"),
        (["relu", "--folder", FOLDER, "--only", "("], "is no regular expression"),
        (["--folder", "/absent"], "there is no folder /absent"),
        (
            ["--from", "absent.csv"],
            "there is no file absent.csv; give the path of what --csv wrote, or one of cupyops's own",
        ),
        (["--from", "h100_models.csv"], "(figures of models are read with --models)"),
        (["--models", "--html", "x.html", "--only", "a"], "--models does not go with --only, --html"),
        (["--models", "--from", "absent.csv"], "there is no file absent.csv; give the path of what --csv wrote"),
        (["--models", "--from", "h200.csv"], "(results of operators are read without --models)"),
        (["--from", "absent.csv", "--dry-run"], "--from measures nothing"),
        (["relu", "--folder", FOLDER, "--compare", "absent.csv"], "there is no file absent.csv"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 2 and message in result.output


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench("relu", "--folder", FOLDER)
    assert result.exit_code == 2
    assert "no CUDA GPU" in result.output and "--dry-run" in result.output


def test_pictures_need_matplotlib_and_it_is_told_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = bench("--from", "absent.csv", "--html", "x.html")
    assert result.exit_code == 2 and 'pip install "cupyops[bench]"' in result.output


def test_a_dry_run_of_what_is_right_and_what_is_wrong(tiny):
    result = bench(tiny("cupyops.relu"), "--dry-run")
    assert result.exit_code == 0 and "1 small cases compared for 1 cases, 0 wrong" in result.output
    result = bench(tiny("lambda x: cupyops.relu(x) * 1.01"), "--dry-run")
    assert result.exit_code == 1 and "relu 64 float32: Failure" in result.output


def test_a_dry_run_of_nothing_is_an_error(tiny):
    path = tiny("cupyops.relu")
    path.write_text(path.read_text().replace("=512", "=5e9"))
    result = bench(path, "--dry-run")
    assert result.exit_code == 2 and "none of 1 cases has a small twin" in result.output


def test_the_dry_run_runs_the_kernels_in_the_simulator(tiny):
    with cupyops.simulate(), cupyops.trace() as trace:
        assert bench(tiny("cupyops.relu"), "--dry-run").exit_code == 0
    assert "simulator" in trace.routes()


def test_all_twins_are_right():
    """By the reference; in the simulator each operator's own tests say so. No peer's package is imported."""
    cases = declared(files([], FOLDER))
    assert not [str(case) for case in cases if case.same and case.twin() is None]
    compared, wrong, interrupted = running.dry_run(cases)
    assert wrong == [] and not interrupted
    assert set(compared) == {str(case.twin()) for case in cases if case.same}
    assert "liger_kernel" not in sys.modules


@pytest.fixture
def kept(tmp_path):
    """Results as a file."""

    def write(name, *rows):
        table.write(results(*rows), tmp_path / name)
        return tmp_path / name

    return write


def test_figures_of_a_file(kept):
    path = kept("x.csv", row(ours=10, eager=20, want=9000))
    result = bench("--from", path)
    assert result.exit_code == 0
    line = "relu 2^20 bfloat16 forward: ours 4,000 GB/s, eager 2,000, speed-up 2.00x, want 9000"
    assert line in result.output.splitlines()  # nothing is cut, in a log file neither
    wide = bench("--from", path, width=200).output
    assert line not in wide and "4,000" in wide and "2.00x" in wide and "speed-up" in wide


def test_a_wrong_result_exits_with_1(kept):
    wrong = row()
    wrong.figures, wrong.wrong = {}, {"ours": "Failure: off by 3 [red]"}
    result = bench("--from", kept("x.csv", wrong, row("b")))
    assert result.exit_code == 1
    assert "relu 2^20 bfloat16: Failure: off by 3 [red]" in result.output


def test_a_wrong_peer_does_not(kept):
    one = row(eager=20)
    one.wrong["liger"] = "ImportError: no module"
    result = bench("--from", kept("x.csv", one))
    assert result.exit_code == 0 and "liger: ImportError" in result.output


def test_compare(kept):
    old, new = kept("old.csv", row("a"), row("b"), row("c")), kept("new.csv", row("a"), row("b", ours=12))
    result = bench("--from", new, "--compare", old)
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert "b 2^20 bfloat16 forward takes 1.20 times as long as in" in output
    assert "c 2^20 bfloat16 backward is in" in output
    assert bench("--from", old, "--compare", old).exit_code == 0


def test_the_host_has_limits(tmp_path):
    made = results(row())
    made.host = {"no gradient": {"ours": 9.0, "torch": 3.0}, "gradient": {"ours": 9.0, "torch": 6.0}}
    table.write(made, tmp_path / "x.csv")
    result = bench("--from", tmp_path / "x.csv")
    assert result.exit_code == 1
    assert "host, no gradient: 9.00 us, at most 3.90 beside torch.relu's 3.00" in result.output
    assert "host, gradient: 9.00 us, at most" not in result.output


def test_pictures_and_page_of_a_file(kept, tmp_path):
    path = kept("x.csv", row(eager=20))
    assert bench("--from", path, "--html", tmp_path / "x.html", "--png", tmp_path / "png").exit_code == 0
    assert (tmp_path / "x.html").stat().st_size > 20_000
    assert sorted(one.suffix for one in (tmp_path / "png").iterdir()) == [".png"] * 5


def test_what_workers_say_is_told():
    """One that finds a failure, and one that falls."""
    code = "import sys; part = sys.argv[1]; print('failed in', part); sys.exit('fell' if part == '1/2' else 0)"
    said = running.in_processes([sys.executable, "-c", code], 2)
    assert said == ["failed in 0/2", "failed in 1/2", "process 2 of 2 ended with 1: fell"]


def test_a_worker_takes_every_so_manieth_case(monkeypatch):
    seen, called = [], []

    def compile_only(case):
        seen.append(case.size)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(running.measure, "compile_only", compile_only)
    monkeypatch.setattr(running.measure, "call_once", lambda case: called.append(case.size))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cases = declared([FOLDER / "bench_silu.py"])
    failures = running.compile_first(cases, 1, 2, ["eager", "compile"])
    assert seen == [case.size for case in cases[1::2]]
    assert failures[0] == f"{cases[1]}: torch.compile: RuntimeError: no compiler"
    assert called == [one.size for case in cases[1::2] for one in (case, case.beside) if one is not None]
    seen.clear()
    assert running.compile_first(cases, 1, 2, ["eager"]) == [] and seen == []


def test_our_kernels_are_called_once_forward_and_backward():
    case = Case(
        "silu", "8", torch.float32, lambda device, dtype: (torch.randn(8, requires_grad=True),),
        cupyops.silu, torch.nn.functional.silu, unit="us",
    )  # fmt: skip
    with cupyops.simulate(), cupyops.trace() as trace:
        running.measure.call_once(case)
    assert [one.kernel.partition("<")[0] for one in trace.launches()] == ["silu_fwd", "silu_bwd"]


@pytest.fixture
def measured(monkeypatch):
    """Without a GPU: each of the cases, which are functions, makes its row."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(running.timing, "GpuClock", lambda: None)
    monkeypatch.setattr(running.timing, "ceilings", lambda clock: {})
    monkeypatch.setattr(running, "machine", dict)
    monkeypatch.setattr(running.measure, "measure", lambda case, against, clock: case())


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # never waited for


@pytest.mark.parametrize("end", [interrupt, terminate])
def test_an_interrupt_keeps_what_is_measured(measured, capsys, end):
    before = signal.getsignal(signal.SIGTERM)
    results = running.run([lambda: "first", end, lambda: "third"], ["eager"])
    assert results.rows == ["first"] and results.interrupted
    assert "interrupted: 1 of 3 cases" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        running.run([end], ["eager"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_measured_is_kept_on_the_way(measured, monkeypatch, tmp_path):
    path, found = tmp_path / "new" / "kept.csv", []
    monkeypatch.setattr(running, "KEPT_EVERY", 0.0)

    def look():
        found.append(len(table.read(path).rows))
        return row(f"relu {len(found)}", eager=20)

    running.run([lambda: row(eager=20), look, look], [], keep=lambda results: table.write(results, path))
    assert found == [1, 2] and [one.name for one in path.parent.iterdir()] == ["kept.csv"]


def test_tf32_is_off_and_then_as_before():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32

    def fall():
        assert not matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
        raise KeyError

    try:
        matmul.allow_tf32 = True
        with pytest.raises(KeyError), running._without_tf32():
            fall()
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


def test_what_torch_compile_is_asked_for(monkeypatch):
    """The tuned peer is measured where it is named, and says by its mode that it is tuned."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    relu = Case("relu", "4", torch.float32, lambda device, dtype: (torch.ones(4),), torch.relu, torch.relu)
    assert list(running.measure.compiled(relu, ["eager", "liger"])) == [] == asked
    assert list(running.measure.compiled(relu, PEERS)) == ["compile"]
    assert list(running.measure.compiled(relu, [*PEERS, TUNED])) == ["compile", TUNED]
    assert [options["mode"] for options in asked] == [None, None, "max-autotune-no-cudagraphs"]


def test_a_file_keeps_figures_that_did_not_move(tiny, measured, monkeypatch, kept):
    """What `--csv` names may have figures already; of another GPU they are not touched."""
    path, relu = kept("x.csv", row(ours=100), row("b")), tiny("cupyops.relu")
    before = path.read_text().splitlines()
    monkeypatch.setattr(running, "machine", lambda: {"gpu": "Made <up>"})
    monkeypatch.setattr(running.measure, "measure", lambda case, against, clock: row(ours=120))
    assert bench(relu, "--csv", path).exit_code == 0
    after = path.read_text().splitlines()
    assert [(a[:60], b[:60]) for a, b in zip(before, after) if a != b and ",ours,100," in a]
    assert [line for line in after if line.startswith("b,")] == [line for line in before if line.startswith("b,")]
    monkeypatch.setattr(running, "machine", lambda: {"gpu": "another"})
    result = bench(relu, "--csv", path)
    assert result.exit_code == 2 and "has figures of Made <up>" in result.output
    assert path.read_text().splitlines() == after


@pytest.mark.gpu
def test_a_run_on_a_gpu(tiny, tmp_path):
    result = bench(tiny("cupyops.relu"), "--against", "eager", "--host", "--csv", tmp_path / "x.csv")
    assert "relu 64 float32 forward: ours" in result.output, result.output
    (only,) = table.read(tmp_path / "x.csv").rows
    assert not only.wrong and only.compared
    assert set(only.figures) == {"ours", "eager"} and set(only.figures["ours"]) == {"forward", "backward"}
    assert 0.5 < only.figures["ours"]["forward"].us < 1000


def test_figures_of_the_built_in_operators_have_their_name_alone(tmp_path, monkeypatch):
    """From any folder; a file of that name that is there comes first."""
    monkeypatch.chdir(tmp_path)
    result = bench("--from", "h200.csv")
    assert result.exit_code == 0 and "On NVIDIA H200 cupyops is" in result.output
    models = bench("--models", "--from", "h100_models.csv", width=140)
    assert models.exit_code == 0 and "llama" in models.output
    (tmp_path / "h200.csv").write_text("mine")
    assert bench("--from", "h200.csv").exit_code == 2
