"""The workflow of docs/ci.md: its steps, as the script that a runner makes of them, in a fresh folder without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs.pages import ROOT, blocks

pytestmark = pytest.mark.slow  # each starts processes that import PyTorch
PAGE = ROOT / "docs" / "ci.md"
WORKFLOW = ".github/workflows/kernels.yml"


@pytest.fixture
def fresh(tmp_path):
    """A folder with the page's files and nothing else."""
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if block.title is not None:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.body, encoding="utf-8")
    return tmp_path


def steps(folder):
    """Name -> script, of the steps that have one."""
    (job,) = yaml.safe_load((folder / WORKFLOW).read_text(encoding="utf-8"))["jobs"].values()
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


def run(folder):
    """Run the steps after the installation as a runner does: by one shell that stops at the first failure."""
    scripts = steps(folder)
    assert list(scripts) == ["install", "compile for each architecture", "test"]
    assert scripts.pop("install").splitlines()[-1] == 'pip install "cupyops[cuda12x]" pytest'
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", "\n".join(scripts.values())]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_the_script_passes(fresh):
    done = run(fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert (fresh / "build" / "tests.xml").is_file()
    # one for each architecture
    assert len(list((fresh / "build" / "cubins").rglob("*.cubin"))) == 4


def test_a_race_fails_it(fresh):
    path = fresh / "smooth.cu"
    path.write_text(path.read_text(encoding="utf-8").replace("  __syncthreads();\n", ""), encoding="utf-8")
    done = run(fresh)
    assert done.returncode == 1 and "Race: smooth: read shared memory that another thread has written" in done.stdout


def test_what_does_not_compile_fails_it(fresh):
    """Under a condition that no test comes to."""
    path = fresh / "smooth.cu"
    broken = "#if __CUDA_ARCH__ >= 900\nint broken = undeclared;\n#endif\n"
    path.write_text(broken + path.read_text(encoding="utf-8"), encoding="utf-8")
    done = run(fresh)
    assert done.returncode == 1 and 'identifier "undeclared" is undefined' in done.stdout + done.stderr
    assert "passed" not in done.stdout
