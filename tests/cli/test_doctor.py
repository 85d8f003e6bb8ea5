"""`python -m cupyops doctor`: each fault is found and its remedy told; nothing that breaks breaks the doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cupyops
from cupyops import doctor
from cupyops._util import settings
from cupyops.cli.app import app
from cupyops.doctor import machine as gathering
from cupyops.doctor.finding import ABSENT, FAULT, OK, WARNING

GPU = {"name": "NVIDIA H200", "capability": [9, 0], "free": 100 << 30, "total": 139 << 30}
CACHE = {
    "root": "/home/me/.cache/cupyops",
    "folder": "/home/me/.cache/cupyops/nvrtc-12.9-12090",
    "why": "",
    "entries": 12,
    "bytes": 1 << 20,
    "free": 100 << 30,
}
PACKAGES = {
    "torch": "2.11.0", "cupy-cuda12x": "14.2.0", "nvidia-cuda-nvrtc-cu12": "12.9.86",
    "nvidia-cuda-runtime-cu12": "12.9.79", "nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cublas": "13.1.0", "rich": "15.0",
}  # fmt: skip
WELL = doctor.Machine(
    python=(3, 12, 1),
    torch=("2.11.0+cu130", "13.0"),
    packages=PACKAGES,
    requirements={
        "": ("numpy>=2", "torch>=2.11"),
        "cuda12x": ("cupy-cuda12x>=14", "nvidia-cuda-nvrtc-cu12>=12.8"),
        "cuda13x": ("cupy-cuda13x>=14", "nvidia-cuda-nvrtc<14,>=13"),
        "cli": ("rich>=13.7",),
        "dev": ("ruff",),
    },
    environ={"HOME": "/home/me"},
    seen={
        "torch, cupy": {"version": "14.2.0"},
        "nvrtc": {"version": [12, 9], "archs": ["sm_75", "sm_80", "sm_90"]},
        "headers": {"folder": "/site/nvidia/cuda_runtime/include", "version": 12090},
        "compile": {"arch": "sm_80", "bytes": 5000},
        "cache": CACHE,
        "simulator": {"elements": 1000},
        "driver": {"here": True, "cuda": 13000, "status": 0, "devices": 1},
        "gpus": {"gpus": [GPU]},
        "run on GPU 0": {"elements": 1000},
    },
)
ANOTHER = 'export CUPYOPS_CACHE_DIR="/var/tmp/cupyops-$(id -u)"'
NO_GPU = {"driver": {"here": False, "kernel_module": False}, "gpus": {"gpus": []}, "run on GPU 0": None}


def seen(**changes):
    """The healthy machine with other facts, or with a stage (None) that was not come to; `_` in a name for a space."""
    stages = dict(WELL.seen)
    for name, facts in changes.items():
        stages[name.replace("_", " ")] = facts
    return replace(WELL, seen={name: facts for name, facts in stages.items() if facts is not None})


def packages(**changes):
    """The healthy machine with other packages; None removes one, and `_` stands for a dash."""
    found = PACKAGES | {name.replace("_", "-"): version for name, version in changes.items()}
    return replace(WELL, packages={name: version for name, version in found.items() if version is not None})


def error(text):
    return {"error": text}


def rows(machine):
    return {finding.name: finding for finding in doctor.examine(machine)}


def command(monkeypatch, machine, *words):
    monkeypatch.setattr(doctor, "look", lambda: machine)
    return CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "100"})


def test_a_machine_that_is_well(monkeypatch):
    assert {finding.verdict for finding in doctor.examine(WELL)} == {OK}
    result = command(monkeypatch, WELL)
    assert result.exit_code == 0
    assert "GPU 0" in result.output and "NVIDIA H200, compute capability 9.0" in result.output


def test_no_gpu_is_no_fault(monkeypatch):
    machine = replace(seen(**NO_GPU), torch=("2.11.0+cpu", None))
    assert not [finding for finding in doctor.examine(machine) if finding.verdict == FAULT]
    assert rows(machine)["GPU"].verdict == ABSENT
    result = command(monkeypatch, machine)
    assert result.exit_code == 0
    assert "no GPU: the references and the simulator are used" in " ".join(result.output.split())


BROKEN = {
    "old Python": (replace(WELL, python=(3, 10, 2)), "Python", "install Python 3.11 or later, and cupyops in it"),
    "old torch": (replace(WELL, torch=("2.4.1", "12.4")), "PyTorch", 'pip install -U "torch>=2.11"'),
    "torch for the CPU": (
        replace(WELL, torch=("2.11.0+cpu", None)),
        "PyTorch",
        "pip uninstall -y torch && pip install torch==2.11.0",
    ),
    "torch too new for the driver": (
        seen(driver={"here": True, "cuda": 12080, "status": 0, "devices": 1}),
        "PyTorch",
        "update the GPU's driver to one for CUDA 13.0",
    ),
    "two CuPys": (
        packages(cupy_cuda11x="13.6.0"),
        "CuPy",
        'pip uninstall -y cupy-cuda11x cupy-cuda12x && pip install "cupyops[cuda13x]"',
    ),
    "CuPy beside its source build": (
        packages(cupy="14.2.0"),
        "CuPy",
        'pip uninstall -y cupy cupy-cuda12x && pip install "cupyops[cuda13x]"',
    ),
    "no CuPy on a GPU": (packages(cupy_cuda12x=None), "CuPy", 'pip install "cupyops[cuda13x]"'),
    "a CuPy that is not served": (
        packages(cupy_cuda12x=None, cupy_cuda11x="13.6.0"),
        "CuPy",
        'pip uninstall -y cupy-cuda11x && pip install "cupyops[cuda13x]"',
    ),
    "old CuPy": (packages(cupy_cuda12x="13.6.0"), "CuPy", 'pip install -U "cupy-cuda12x>=14"'),
    "CuPy without a cache": (
        seen(**{"torch, cupy": error("MissingDependencyError: ... set CUPY_CACHE_DIR to a folder")}),
        "CuPy",
        'export CUPY_CACHE_DIR="$(mktemp -d)"',
    ),
    "NVRTC does not load": (
        seen(nvrtc=error("MissingDependencyError: NVRTC does not load")),
        "NVRTC",
        "pip install --force-reinstall --no-deps nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12",
    ),
    "headers of another major": (
        seen(headers=error("no headers of CUDA 12 were found")),
        "CUDA headers",
        "pip install nvidia-cuda-runtime-cu12",
    ),
    "no builtins": (
        seen(compile=error("CompileError: failed to open libnvrtc-builtins.so.12.9")),
        "compile a kernel",
        "pip install --force-reinstall --no-deps nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12",
    ),
    "driver too old for NVRTC": (
        replace(
            seen(
                driver={"here": True, "cuda": 12080, "status": 0, "devices": 1},
                nvrtc={"version": [13, 0], "archs": ["sm_75", "sm_90"]},
            ),
            torch=("2.11.0+cu128", "12.8"),
        ),
        "driver",
        'pip uninstall -y cupy-cuda12x && pip install "cupyops[cuda12x]"',
    ),
    "driver in two versions": (
        seen(driver={"here": True, "cuda": 13000, "status": 803, "devices": 0}),
        "driver",
        "reboot the machine",
    ),
    "driver with an error of its own": (
        seen(driver={"here": True, "cuda": 13000, "status": 46, "devices": 0}),
        "driver",
        "reinstall the GPU's driver",
    ),
    "a container without its GPU": (
        seen(driver={"here": False, "kernel_module": True}),
        "driver",
        "docker run --gpus all ...   (or reinstall the GPU's driver)",
    ),
    "driver that hangs": (
        seen(driver=error("it hung: stopped after 120 seconds"), gpus=None),
        "driver",
        "reinstall the GPU's driver",
    ),
    "PyTorch fails on the GPUs": (
        seen(gpus=error("RuntimeError: no")),
        "GPU",
        "reboot the machine, or reinstall the GPU's driver",
    ),
    "a GPU that is too old": (
        seen(gpus={"gpus": [GPU | {"capability": [7, 0]}, GPU]}),
        "GPU 0",
        "name the other GPUs in CUDA_VISIBLE_DEVICES",
    ),
    "a GPU that NVRTC does not know": (
        seen(gpus={"gpus": [GPU | {"capability": [12, 0]}]}),
        "GPU 0",
        "pip install --upgrade nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12",
    ),
    "a kernel that fails": (
        seen(run_on_GPU_0=None, **{"run on GPU 0": error("LaunchError: illegal address")}),
        "run on GPU 0",
        "CUDA_VISIBLE_DEVICES=0 compute-sanitizer python -m cupyops.doctor.survey",
    ),
    "the simulator fails": (
        seen(simulator=error("SimulatorError: no")),
        "run in the simulator",
        "pip install --force-reinstall --no-deps cupyops",
    ),
    "a cache open to others": (
        seen(cache=CACHE | {"folder": None, "why": "others can write there (chmod go-w; it has mode 0777)"}),
        "kernel cache",
        "chmod go-w /home/me/.cache/cupyops",
    ),
    "a home that cannot be written": (
        seen(cache=CACHE | {"folder": None, "why": "it cannot be written"}),
        "kernel cache",
        ANOTHER,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_fault_and_its_remedy(case, monkeypatch):
    machine, name, remedy = BROKEN[case]
    found = rows(machine)[name]
    assert (found.verdict, found.remedy) == (FAULT, remedy)
    result = command(monkeypatch, machine)
    assert result.exit_code == 1
    assert f"  {remedy}\n" in result.output


LAME = {
    "torch newer than was tested": (
        replace(WELL, torch=("2.99.0", "12.8")),
        "PyTorch",
        'pip install "torch==2.13.*"',
    ),
    "no CuPy, no GPU": (
        replace(packages(cupy_cuda12x=None), seen=seen(**NO_GPU).seen, torch=("2.11.0+cpu", None)),
        "CuPy",
        'pip install "cupyops[cuda12x]"',
    ),
    "headers newer than NVRTC": (
        seen(nvrtc={"version": [12, 4], "archs": ["sm_75", "sm_90"]}),
        "CUDA headers",
        "pip install --upgrade nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12",
    ),
    "a full GPU": (
        seen(gpus={"gpus": [GPU | {"free": 1 << 20}]}),
        "GPU 0",
        "end other programs on this GPU; nvidia-smi lists them",
    ),
    "every GPU hidden": (
        replace(
            seen(driver={"here": True, "cuda": 13000, "status": 0, "devices": 0}, gpus={"gpus": []}),
            environ={"CUDA_VISIBLE_DEVICES": ""},
        ),
        "GPU",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "no cache at all": (seen(cache={"root": None, "folder": None}), "kernel cache", "pip install platformdirs"),
    "a full disk": (
        seen(cache=CACHE | {"free": 1 << 20}),
        "kernel cache",
        "python -m cupyops cache clean",
    ),
    "a setting misspelt": (
        replace(WELL, environ={"CUPYOPS_CACHEDIR": "/tmp"}),
        "CUPYOPS_CACHEDIR",
        "unset CUPYOPS_CACHEDIR",
    ),
}


@pytest.mark.parametrize("case", LAME)
def test_a_warning_and_its_remedy(case, monkeypatch):
    machine, name, remedy = LAME[case]
    found = rows(machine)[name]
    assert (found.verdict, found.remedy) == (WARNING, remedy)
    result = command(monkeypatch, machine)
    assert result.exit_code == 0
    assert f"  {remedy}\n" in result.output


SEVERAL = 'pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install "cupyops[cuda13x]"'


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch, cupy": error("ImportError: cannot open")},
        {"nvrtc": error("NVRTC does not load"), "headers": None, "compile": None},
        {"compile": error("CompileError: libnvrtc-builtins")},
        {"nvrtc": {"version": [12, 4], "archs": ["sm_75"]}},
    ],
)
def test_several_cupys_have_one_remedy(changes):
    """Whatever else they do: a command that installs another extra would bring the second one back."""
    machine = replace(
        packages(cupy_cuda13x="14.2.0", nvidia_cuda_nvrtc_cu12=None, nvidia_cuda_runtime_cu12=None),
        seen=seen(**changes).seen,
    )
    found = rows(machine)
    assert (found["CuPy"].verdict, found["CuPy"].remedy) == (FAULT, SEVERAL)
    assert {row.remedy for row in found.values() if "pip" in row.remedy} == {SEVERAL}


def test_nvrtc_of_a_later_cuda_is_upgraded_within_it():
    machine = seen(nvrtc={"version": [13, 0], "archs": ["sm_75", "sm_80"]}, headers=None)
    assert (
        rows(machine)["GPU 0"].remedy == 'pip install --upgrade "nvidia-cuda-nvrtc==13.*" "nvidia-cuda-runtime==13.*"'
    )


def test_a_cache_that_is_elsewhere_for_the_time_being():
    facts = CACHE | {"folder": "/tmp/cupyops-1000/nvrtc-12.9-12090", "why": "it cannot be written"}
    found = rows(seen(cache=facts))["kernel cache"]
    assert (found.verdict, found.remedy) == (WARNING, ANOTHER)
    assert found.found.startswith(
        "/home/me/.cache/cupyops: it cannot be written; kernels are kept in /tmp/cupyops-1000/"
    )


CHAINED = """Traceback (most recent call last):
  File "cupy/__init__.py", line 17, in <module>
    from cupy import _core
ImportError: libcudart.so.12: cannot open shared object file

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "<string>", line 1, in <module>
ImportError:
================================================================
Failed to import CuPy.
================================================================
"""
SEVERAL_LINES = """a warning of a library
Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: first
  second
third
"""


@pytest.mark.parametrize(
    ("stderr", "first", "last"),
    [
        (CHAINED, "ImportError: libcudart.so.12: cannot open shared object file", "    from cupy import _core"),
        (SEVERAL_LINES, "ValueError: first", '  File "a.py", line 1, in <module>'),
        ("terminate called\n  what():  no\n", "terminate called", "  what():  no"),
        ("", "", ""),
    ],
)
def test_the_first_line_is_the_finding(stderr, first, last):
    lines = gathering._told(stderr).split("\n")
    assert (lines[0], lines[-1]) == (first, last)


def test_one_cause_is_one_fault():
    """What cannot be examined because of a fault is no fault of its own."""
    headers = seen(headers=error("none"), compile=error("none"), cache=error("none"), simulator=error("none"))
    assert {name for name, row in rows(headers).items() if row.verdict == FAULT} == {"CUDA headers"}
    nvrtc = seen(**{stage: error("none") for stage in ("nvrtc", "headers", "compile", "cache", "simulator")})
    assert {name for name, row in rows(nvrtc).items() if row.verdict == FAULT} == {"NVRTC"}
    cupy = seen(
        **{stage: error("none") for stage in ("torch, cupy", "nvrtc", "headers", "compile", "cache", "simulator")}
    )
    assert {name for name, row in rows(cupy).items() if row.verdict == FAULT} == {"CuPy"}


def test_a_misspelt_setting_is_guessed():
    found = rows(replace(WELL, environ={"CUPYOPS_CACHEDIR": "/tmp", "CUPYOPS_SIMULATE": "1"}))
    assert "did you mean CUPYOPS_CACHE_DIR?" in found["CUPYOPS_CACHEDIR"].found
    assert found["CUPYOPS_SIMULATE"].verdict == OK


def test_every_setting_that_is_read_is_known():
    """By the one parser: no other file looks for a variable of ours."""
    sources = list(Path(cupyops.__file__).parent.rglob("*.py"))
    read = {name for path in sources for name in re.findall(r"\bsettings\.([A-Z_]+)\.read\(", path.read_text())}
    read |= {name for path in sources for name in re.findall(r"\b(CUBIN_PATH)\.read\(", path.read_text())}
    assert {f"CUPYOPS_{name}" for name in read} == set(settings.ALL)
    assert not [path for path in sources if re.search(r"(environ|getenv)\b[^\n]*?\"CUPYOPS_\w", path.read_text())]


def test_mig_is_told():
    found = rows(seen(gpus={"gpus": [GPU | {"name": "NVIDIA H200 MIG 1g.18gb"}]}))["GPU 0"]
    assert found.verdict == OK and "a MIG slice" in found.found


@pytest.mark.parametrize("last", list(WELL.seen))
def test_wherever_the_survey_ends_there_is_a_report(last):
    """Its process died in that stage: the stage is at fault or said to be so, those after it are not examined."""
    lines = []
    for name in WELL.seen:
        if name == last:
            lines.append(json.dumps({"stage": name, "begun": True}))
            break
        lines.append(json.dumps({"stage": name, **WELL.seen[name]}))
    facts = gathering.read_survey(["noise", *lines], "it crashed: killed by signal 11")
    found = doctor.examine(replace(WELL, seen=facts))
    assert not [finding for finding in found if "examination itself" in finding.found]
    assert all(finding.remedy for finding in found if finding.verdict in (FAULT, WARNING))
    assert [finding for finding in found if finding.verdict == FAULT and "signal 11" in finding.found]


def test_a_survey_that_does_not_even_begin():
    assert gathering.read_survey([], "boom") == {"torch, cupy": {"error": "boom"}}


def test_an_examination_that_fails_is_a_fault_and_the_others_go_on():
    found = rows(seen(gpus={"gpus": [{}]}))
    assert found["gpus"].verdict == FAULT and "KeyError" in found["gpus"].found
    assert found["kernel cache"].verdict == OK


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("import time; print('begun', flush=True); time.sleep(60)", "it hung: stopped after 0.5 seconds"),
        ("import os; print('begun', flush=True); os.abort()", "it crashed: killed by signal 6"),
        ("print('begun', flush=True); 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_child_that_hangs_or_crashes(code, trouble):
    output, found = gathering._child(("-S", "-c", code), 0.5 if "sleep" in code else 30)
    assert output == "begun\n" and found.startswith(trouble)


def test_packages_are_those_on_the_path(tmp_path):
    for name, version in (
        ("cupy_cuda12x", "14.2.0"),
        ("CuPy-CUDA11x", "13.6.0"),
        ("nvidia_cuda_nvrtc_cu12", "12.9.86"),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "left_over.dist-info").mkdir()
    found = gathering.installed([str(tmp_path)])
    assert found == {"cupy-cuda12x": "14.2.0", "cupy-cuda11x": "13.6.0", "nvidia-cuda-nvrtc-cu12": "12.9.86"}
    assert rows(replace(WELL, packages=found))["CuPy"].verdict == FAULT


def test_the_requirements_are_those_of_the_package():
    stated = gathering.requirements()
    assert any(text.startswith("torch") for text in stated[""])
    assert any(text.startswith("cupy-cuda12x") for text in stated["cuda12x"])


def test_this_machine(tmp_path):
    """The whole of it, with its child processes, and a wrong setting that ends every other program at the import."""
    given = {"CUPYOPS_CACHE_DIR": str(tmp_path / "cache"), "CUPYOPS_DEBUG": "2", "CUPYOPS_SIMULATE": "sm90"}
    words = [sys.executable, "-m", "cupyops", "doctor", "--json"]
    result = subprocess.run(words, env=os.environ | given, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    for name in ("CUPYOPS_DEBUG", "CUPYOPS_SIMULATE"):
        assert found[name]["verdict"] == FAULT and f"{name} is {given[name]!r}, expected 1, on" in found[name]["found"]
    for name in ("CuPy", "compile a kernel", "run in the simulator"):
        assert found[name]["verdict"] == OK, found[name]
    assert str(tmp_path / "cache") in found["kernel cache"]["found"]


@pytest.mark.gpu
def test_this_machine_s_gpus():
    found = rows(doctor.look())
    assert found["driver"].verdict == OK, found["driver"]
    assert found["GPU 0"].verdict == OK, found["GPU 0"]
    assert found["run on GPU 0"].verdict == OK, found["run on GPU 0"]
