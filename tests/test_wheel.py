"""The built wheel, installed where there is no source tree, has all that it needs: kernels, types, metadata."""

import json
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python

import cupyops
from cupyops._kernel.compile import source

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not in a source tree")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the sdist, as a release is; with the build backend that is installed, nothing downloaded."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment: the wheel of its own, PyTorch and CuPy those of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    interpreter = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    (site,) = folder.glob("[Ll]ib/**/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)
    # a plain path in a .pth is searched last, and its own .pth files, an editable cupyops among them, are not read
    parents = {Path(spec.origin).parent.parent for name in ("torch", "numpy", "cupy") if (spec := find_spec(name))}
    (site / "parents.pth").write_text("\n".join(map(str, parents)) + "\n")
    # CuPy looks for NVRTC's wheel in site-packages alone
    (site / "nvidia").mkdir()
    for wheel in (child for root in find_spec("nvidia").submodule_search_locations for child in Path(root).iterdir()):
        (site / "nvidia" / wheel.name).symlink_to(wheel)
    return interpreter


def run(python, folder, code):
    """What `code` prints as JSON, run in `folder` with no way to the source tree."""
    done = subprocess.run([python, "-I", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_wheel_carries_what_the_tree_has(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    cuda = {
        f"cupyops/cuda_src/{p.relative_to(ROOT / 'cuda_src').as_posix()}" for p in (ROOT / "cuda_src").rglob("*.cu*")
    }
    python = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cupyops").rglob("*.py")}
    templates = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cupyops").rglob("*.tmpl")}
    cases = {f"cupyops/_benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    figures = {f"cupyops/_benchmarks/results/{path.name}" for path in (ROOT / "benchmarks" / "results").glob("*.csv")}
    assert len(cuda) > 1 and templates and cases and figures
    assert cuda | python | templates | cases | figures | {"cupyops/py.typed"} <= names
    outside = {name for name in names if not name.startswith(("cupyops/", f"cupyops-{cupyops.__version__}.dist-info/"))}
    assert not outside


def test_it_is_imported_from_the_wheel_and_knows_every_operator(python, tmp_path):
    found = run(
        python,
        tmp_path,
        """
import importlib.metadata, json, cupyops, cupyops.nn, cupyops.optim
from cupyops._kernel.compile import source
print(json.dumps({"file": cupyops.__file__, "cuda": str(source.cuda_src()), "operators": sorted(cupyops.operators()),
                  "version": importlib.metadata.version("cupyops")}))
""",
    )
    assert not Path(found["file"]).is_relative_to(ROOT)
    assert Path(found["cuda"]).parent == Path(found["file"]).parent
    here = "import json, cupyops, cupyops.nn, cupyops.optim; print(json.dumps(sorted(cupyops.operators())))"
    assert found["operators"] == json.loads(run_python("-c", here).stdout)
    assert found["version"] == cupyops.__version__


@pytest.mark.slow
def test_it_computes_and_compiles_from_the_packaged_kernels(python, tmp_path):
    found = run(
        python,
        tmp_path,
        f"""
import json, os, torch
os.environ["CUPYOPS_CACHE_DIR"] = {str(tmp_path / "cache")!r}
import cupyops
from cupyops._kernel import kernel
from cupyops._kernel.compile import compiler
y = cupyops.relu(torch.tensor([-1.0, 2.0]))
relu = next(k for k in kernel.kernels() if k.base == "relu_fwd")
binary = compiler.build(relu.source, relu.instances()[0], "sm_90", relu.options)
print(json.dumps({{"y": y.tolist(), "text": str(relu.source.path), "includes": sorted(relu.source.includes),
                  "cubin": os.path.getsize(binary.path), "origin": binary.origin}}))
""",
    )
    assert found["y"] == [0.0, 2.0]
    assert not Path(found["text"]).is_relative_to(ROOT)
    assert found["includes"] == sorted(source.load("relu.cu").includes)
    assert found["origin"] == "nvrtc" and found["cubin"] > 0


@pytest.mark.slow
def test_who_has_the_wheel_can_measure_what_the_readme_says(python, tmp_path):
    """The declarations are found from any folder, and so are the figures kept."""
    found = run(
        python,
        tmp_path,
        """
import json
from cupyops.bench.case import declared, files, here
from cupyops.bench.table import read
cases = declared(files([], here()))
kept = read(here() / "results" / "h200.csv")
print(json.dumps({"folder": str(here()), "cases": [str(case) for case in cases], "kept": [row.name for row in kept.rows]}))
""",
    )
    assert not Path(found["folder"]).is_relative_to(ROOT)
    assert len(found["cases"]) > 300 and len(found["kept"]) > 300 and set(found["kept"]) <= set(found["cases"])


@pytest.mark.slow
def test_every_command_works_from_the_wheel(python, tmp_path):
    """Those of a newcomer's day, in the folder where the newcomer works; one process, since each imports PyTorch."""
    (tmp_path / "old.cu").write_text(
        """#include <torch/extension.h>
__global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty_like(x);
  int n = x.numel();
  twice<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
  return y;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""
    )
    commands = [
        "doctor",
        "new softabs",
        "new soft_package --package",
        "check softabs:softabs --only accuracy --backend simulator",
        "simulate softabs.cu softabs_fwd<float> --grid 1 --block 9 --arg randn(9) --arg empty(9) --arg 4 --arg 9 "
        "--html x.html",
        "explain layer_norm --shape 8x64 --dtype bfloat16 --arch sm_90 --no-compile",
        "port old.cu",
        "bench softabs --dry-run --folder .",
        "bench --from h200.csv",
        *(f"{name} --help" for name in ("new", "check", "simulate", "explain", "port", "compile", "bench", "doctor")),
    ]
    found = run(
        python,
        tmp_path,
        f"""
import json, os, sys
sys.path.insert(0, ".")
from typer.testing import CliRunner
from cupyops.cli.app import app
results = {{words: CliRunner().invoke(app, words.split()) for words in {commands!r}}}
print(json.dumps({{words: [one.exit_code, one.output[-2000:]] for words, one in results.items()}}))
""",
    )
    assert {words: output for words, (code, output) in found.items() if code} == {}
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"softabs.cu", "soft_package/pyproject.toml", "x.html", "old.py", "test_old.py"} <= written
