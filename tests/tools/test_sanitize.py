"""tools/sanitize.py reads what compute-sanitizer says, and stops at nothing that would make its table mean less."""

import contextlib
import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import cupyops
from cupyops._kernel.compile import compiler, source
from cupyops._kernel.kernel import FLOATING
from cupyops._simulate import Simulation
from cupyops.errors import SimulatorError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import gpu
import sanitize
from operator_samples import Make, operator_of, run, samples

NAMES = ["relu_fwd", "relu_bwd", "softmax_fwd"]

OUT_OF_BOUNDS = """
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at void elementwise<float>(T1 *, long)+0x50 in elementwise.cuh:31
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x710fdca00001 is out of bounds
=========         Device Frame: relu_fwd<float>(const float *, float *, long)+0x30 in relu.cu:12
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void softmax_fwd<float>(const float *, int)+0x90 in softmax.cu:41
=========     and Read access at void softmax_fwd<float>(const float *, int)+0x100 in softmax.cu:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BARRIER = """
========= COMPUTE-SANITIZER
========= Barrier error detected. Invalid arguments
=========     at __cuda_sm70_warpsync+0x30
=========     by thread (0,0,0) in block (0,0,0)
=========         Device Frame: void relu_bwd<double>(const double *)+0x3c0 in relu.cu:48
=========
========= ERROR SUMMARY: 1 error
"""
OF_OTHERS = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int)+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
"""
UNWRITTEN_RESULT = """
========= COMPUTE-SANITIZER
========= Host API memory access error at host access to 0x7f7fcdc01200 of size 400 bytes
=========     Uninitialized access at 0x7f7fcdc01300 on access by cudaMemcpy source
=========
========= ERROR SUMMARY: 1 error
"""
MORE_THAN_PRINTED = OUT_OF_BOUNDS.replace("1 error", "1,204 errors") + (
    "========= ERROR SUMMARY: 1,203 errors were not printed. Use --print-limit option to adjust the number\n"
)
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
REFUSED = (
    "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation\n=========\n"
    "========= ERROR SUMMARY: 1 error\n"
)


@pytest.mark.parametrize(
    ("tool", "output", "ours", "others", "counted"),
    [
        ("memcheck", OUT_OF_BOUNDS, 1, 0, 1),
        ("racecheck", RACE, 1, 0, 1),
        ("racecheck", RACE.replace("softmax_fwd<float>(const float *, int)", "wgmma::read(int)"), 1, 0, 1),
        ("racecheck", RACE.replace("softmax_fwd<float>(const", "wgmma::add_shares(const"), 0, 1, 1),
        ("racecheck", RACE.replace("softmax_fwd<float>(const float *, int)", "cutlass::Kernel<gemm>(T1)"), 0, 1, 1),
        ("synccheck", BARRIER, 1, 0, 1),
        ("initcheck", OF_OTHERS, 0, 1, 1),
        ("initcheck", UNWRITTEN_RESULT, 1, 0, 1),
        ("memcheck", MORE_THAN_PRINTED, 2, 0, 1204),
        ("memcheck", CLEAN, 0, 0, 0),
        ("racecheck", NO_RACE, 0, 0, 0),
        ("initcheck", OUT_OF_BOUNDS.replace("relu_fwd", "relu_fwd_of_another"), 0, 1, 1),
        ("memcheck", "softmax_fwd says hello\n" + CLEAN, 0, 0, 0),
        ("memcheck", "nothing of the kind\n", 0, 0, None),
        ("memcheck", "========= Internal Sanitizer Error: The Sanitizer didn't track the launch\n" + CLEAN, 1, 0, 0),
    ],
)
def test_outputs(tool, output, ours, others, counted):
    found = sanitize.findings(output, tool, NAMES)
    assert (len(found.ours), found.others, found.counted, found.refusal) == (ours, others, counted, "")


def test_a_report_is_kept_whole():
    (report,) = sanitize.findings(OUT_OF_BOUNDS, "memcheck", NAMES).ours
    assert report.startswith("Invalid __global__ write") and report.endswith("in relu.cu:12")


def test_a_refusal_is_no_error_of_ours():
    found = sanitize.findings(REFUSED, "memcheck", NAMES)
    assert found.refusal.startswith("Error: Device not supported") and not found.ours


def test_every_file_of_kernels_is_an_operators():
    files = {path.name for path in source.cuda_src().glob("*.cu")}
    assert {operator_of(file) for file in files} == {name for name, _ in samples()}
    several = {file for file in files if operator_of(file) != file.removesuffix(".cu")}
    assert {file: operator_of(file) for file in several} == {
        "attention_wgmma.cu": "attention",
        "batch_norm_nhwc.cu": "batch_norm",
        "batch_norm_act_nhwc.cu": "batch_norm_act",
        "conv2d_add_wgmma.cu": "conv2d",
        "conv2d_blocks.cu": "conv2d",
        "conv2d_direct.cu": "conv2d",
        "conv2d_moments_wgmma.cu": "conv2d",
        "fused_linear_cross_entropy_wgmma.cu": "fused_linear_cross_entropy",
        "gated_linear_wgmma.cu": "gated_linear",
        "group_norm_nhwc.cu": "group_norm",
        "group_norm_sub_warp.cu": "group_norm",
        "group_norm_two_pass.cu": "group_norm",
        "grouped_mm_wgmma.cu": "grouped_mm",
        "linear_act_wgmma.cu": "linear_act",
        "scaled_mm_wgmma.cu": "scaled_mm",
    }


def test_samples_reach_every_kernel(monkeypatch):
    """The forms that they ask for are there, and have no reason against them. Nothing is computed."""
    launched = set()
    monkeypatch.setattr(Simulation, "__call__", lambda self, kernel, *args: launched.add(kernel.name.partition("<")[0]))
    with cupyops.simulate("sm_90"), cupyops.never_slower(False):
        for dtype in FLOATING:
            for name, call in samples():
                with contextlib.suppress(SimulatorError):  # of what was not computed
                    assert run(call, Make(dtype)) or not call(Make(dtype)), name
    assert sorted({kernel.base for kernel in gpu.built_in()} - launched) == []


def test_samples_of_another_gpu():
    assert sanitize.run_samples("gemm_wgmma", "memcheck", [torch.float16], "cpu") == (0, [])


def test_kernels_are_found_by_the_names_that_the_compiler_gives_them():
    """The filter is a piece of the mangled name, which a kernel in a namespace or one declared extern "C" would not have."""
    for kernel in gpu.built_in():
        if kernel.base in ("relu_fwd", "sgd_step"):
            symbol = compiler.build(kernel.source, kernel.instances()[0], "sm_90", kernel.options).symbol
            assert f"{len(kernel.base)}{kernel.base}" in symbol


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_planted_faults_are_faults(tool):
    """The simulator notices each."""
    torch.use_deterministic_algorithms(False)  # which writes into every empty tensor
    with pytest.raises(SimulatorError, match=f"planted_for_{tool}"):
        sanitize.run_planted(tool, "cpu")


@pytest.mark.parametrize("values", [torch.arange(24.0).view(4, 6).t(), torch.arange(9.0)[1:], torch.arange(8)[::2]])
def test_placed_keeps_layout(values):
    copy = gpu.placed(values, "cpu")
    assert torch.equal(copy, values)
    assert (copy.stride(), copy.storage_offset()) == (values.stride(), values.storage_offset())
    assert copy.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()


FAKE = f"""#!{sys.executable}
import json, os, subprocess, sys, time
args = sys.argv[1:]
log = args[args.index("--log-file") + 1]
command = args[args.index("--log-file") + 2:]
here = os.path.dirname(os.path.abspath(__file__))
part = json.load(open(here + "/" + ("planted" if command[2] == "planted" else "part") + ".json"))
call = json.dumps([args, os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")]) + "\\n"
os.write(os.open(here + "/calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT), call.encode())  # at once: others write too
if part["log"]:
    with open(log, "w") as file:
        file.write(part["log"])
print(part["print"], flush=True)
if part["sleep"]:
    subprocess.run(["sleep", str(part["sleep"])])
status = subprocess.run(command).returncode if part["run"] else part["status"]
sys.exit(status)
"""
ENDED = json.dumps({"samples": 3, "kernels": ["relu_fwd<float>"]})


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(log=..., print=...)` for the operators; `fake("planted", ...)` for the planted faults."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(FAKE)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "console", Console(width=200))

    def plan(which="part", **part):
        defaults = {"log": "", "print": "", "sleep": 0, "run": False, "status": 0}
        (tmp_path / f"{which}.json").write_text(json.dumps(defaults | part))

    planted = OUT_OF_BOUNDS.replace("relu_fwd", "planted_for_memcheck") + RACE.replace(
        "softmax", "planted_for_initcheck"
    )
    plan("planted", log=planted, status=9)
    plan(log=CLEAN, print=ENDED)
    plan.calls = tmp_path / "calls"
    return plan


def sanitized(*args, status=0):
    done = CliRunner().invoke(sanitize.app, ["relu", "--device", "cpu", "--jobs", "2", *args])
    assert done.exit_code == status, done.output
    return done.output


def test_clean(fake, tmp_path):
    output = sanitized("--tool", "memcheck", "--dtype", "float32", "--json", str(tmp_path / "to" / "reports.json"))
    assert "memcheck, a planted fault: noticed" in output and "clean" in output
    assert "1 of the 2 kernels" in output and "not launched: relu_bwd<float>" in output
    planted, relu = json.loads((tmp_path / "to" / "reports.json").read_text())
    assert (planted["outcome"], relu["outcome"], relu["kernels"]) == ("errors", "clean", ["relu_fwd<float>"])


def test_what_is_asked_of_it(fake):
    sanitized("--tool", "memcheck", "--tool", "initcheck", "--dtype", "float16")
    calls = [json.loads(line) for line in fake.calls.read_text().splitlines()]
    assert len(calls) == 4 and all(caching == "1" for _, caching in calls)
    filters = {(args[1], "planted" in args): [arg for arg in args if arg.startswith("kns=")] for args, _ in calls}
    assert "kns=8relu_fwd" in filters["memcheck", False] and filters["initcheck", False] == []
    assert filters["memcheck", True] == ["kns=20planted_for_memcheck"]
    fake.calls.unlink()
    sanitized("--tool", "racecheck", "--dtype", "float16", status=1)  # the fake knows no fault for it
    assert all("kns=cutlass" in json.loads(line)[0] for line in fake.calls.read_text().splitlines())
    ports = [args[args.index("--port") + 1] for args, _ in calls if "planted" not in args]
    assert len(set(ports)) == 2


def test_samples_run_in_the_process_that_is_looked_at(fake):
    fake(log=CLEAN, run=True)
    assert "2 of the 2 kernels" in sanitized("--tool", "memcheck", "--dtype", "float32")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"log": OUT_OF_BOUNDS, "print": ENDED, "status": 9}, "1 errors"),
        ({"log": OUT_OF_BOUNDS, "status": 1}, "1 errors"),
        ({"log": CLEAN, "print": "Traceback: out of memory", "status": 1}, "Traceback: out of memory"),
        ({"log": "", "print": ENDED}, "no summary"),
        ({"log": CLEAN}, "failed"),
        ({"log": CLEAN, "print": ENDED, "status": 3}, "exit status 3"),
        ({"log": CLEAN, "print": json.dumps({"samples": 2, "kernels": []})}, "2 samples launched no kernel"),
        ({"log": REFUSED, "status": 1}, "Device not supported"),
    ],
)
def test_what_is_not_clean(fake, part, expected):
    fake(**part)
    assert expected in sanitized("--tool", "memcheck", status=1)


def test_no_sample_for_this_gpu(fake):
    fake(log=CLEAN, print=json.dumps({"samples": 0, "kernels": []}))
    assert "no sample" in sanitized("--tool", "memcheck")


def test_others_do_not_count(fake):
    fake(log=OF_OTHERS, print=ENDED, status=9)
    assert "1 set aside" in sanitized("--tool", "initcheck")


def test_the_time_runs_out(fake):
    fake(log=CLEAN, sleep=60)
    assert "timed out" in sanitized("--tool", "memcheck", "--limit", "0.5", status=1)
    assert "not run" in sanitized("--tool", "memcheck", "--minutes", "0", status=1)


@pytest.mark.parametrize("log", [CLEAN, OUT_OF_BOUNDS])
def test_a_planted_fault_that_is_not_noticed(fake, log):
    """Reports of something else do not make up for it."""
    fake("planted", log=log, print=ENDED)
    assert "prove nothing" in sanitized("--tool", "memcheck", status=1)


def test_it_does_not_run_here(fake):
    fake("planted", log=REFUSED, status=1)
    assert "does not run here: Error: Device not supported" in sanitized(status=2)


def test_it_is_absent(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize.shutil, "which", lambda name, path=None: None)
    assert "compute-sanitizer is not on the PATH" in sanitized(status=2)


def test_unknown_names():
    for args in (["--tool", "leakcheck"], ["--dtype", "int8"], ["planted"]):
        assert "expected one of" in sanitized(*args, status=2)
