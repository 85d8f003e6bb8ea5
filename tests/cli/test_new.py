"""`python -m cupyops new`: what it writes works as it is, and it writes all of it or nothing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from processes import run_python
from toys import forget
from typer.testing import CliRunner

import cupyops
from cupyops._kernel import kernel
from cupyops._kernel.compile import compiler, source
from cupyops.cli import jobs, new
from cupyops.cli.app import app

# Of the contract, what asks most of a kernel's indexing; the files' own test tries all of it.
HAZARDS = ["accuracy", "strided", "misaligned", "tails", "empty"]
KINDS = list(new.KINDS)
ROOT = Path(cupyops.__file__).parent.parent


def command(*words):
    return CliRunner().invoke(app, ["new", *map(str, words)], env={"COLUMNS": "200"})


def written(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One operator of each kind."""
    folder = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        result = command(f"a_{kind}", "--kind", kind, "--dir", folder)
        assert result.exit_code == 0, result.output
    return folder


def test_the_files(folder):
    expected = [f"a_{kind}.{end}" for kind in KINDS for end in ("cu", "py")]
    expected += [f"{what}_a_{kind}.py" for kind in KINDS for what in ("test", "bench")]
    assert written(folder) == sorted(expected)
    for path in folder.iterdir():
        assert "$" not in path.read_text() and "placeholder" not in path.read_text()


def test_their_own_tests_pass(folder):
    """Those of values and gradients, in the simulator and for every dtype."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "values and simulator"]
    done = run_python(*words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{4 * len(KINDS)} passed" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_as_clang_format_would_have_them(kind):
    """Whatever the length of the name, on which it hangs where a line ends."""
    text = "\n".join(new._render(f"{kind}.cu", "n" * length, kind) for length in range(1, new._LONGEST + 1))
    words = [Path(sys.executable).with_name("clang-format"), f"--assume-filename={ROOT / 'cuda_src' / 'mine.cu'}"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
    assert done.stdout == text


@pytest.fixture(scope="module")
def imported(folder):
    """What imports a generated module; once, for each registers its operator."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    yield importlib.import_module
    sys.path[:] = before
    for kind in KINDS:
        for name in (f"a_{kind}", f"test_a_{kind}", f"bench_a_{kind}"):
            module = sys.modules.pop(name, None)
            if name == f"a_{kind}" and module is not None:
                forget(getattr(module, name))


@pytest.mark.parametrize("kind", KINDS)
def test_they_keep_the_contract(kind, imported):
    op = getattr(imported(f"a_{kind}"), f"a_{kind}")
    sample = [torch.randn(4, 33, requires_grad=True)]
    report = cupyops.testing.check(op, sample, backends="simulator", only=HAZARDS, shrink=False)
    report.raise_if_failed()
    assert report.passed


@pytest.mark.parametrize("kind", KINDS)
def test_the_test_notices_a_mistake(kind, imported, monkeypatch):
    """A test that cannot fail is worth nothing: with another function to compare with, it does."""
    module = imported(f"test_a_{kind}")
    right = module.expected
    monkeypatch.setattr(module, "expected", lambda x: right(x) * 1.01)
    with pytest.raises(AssertionError):
        module.test_values_and_gradients("simulator", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_benchmark_compares_and_notices_a_mistake(kind, folder, imported, monkeypatch):
    """Without a GPU: the kernels, in the simulator."""
    words = ["bench", str(folder / f"bench_a_{kind}.py"), "--dry-run"]
    with cupyops.simulate(), cupyops.trace() as trace:
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "2 small cases compared for 4 cases, 0 wrong" in result.output
    assert {launch.kernel.partition("<")[0] for launch in trace.launches()} == {f"a_{kind}_fwd", f"a_{kind}_bwd"}
    op = getattr(imported(f"a_{kind}"), f"a_{kind}")
    monkeypatch.setattr(imported(f"a_{kind}"), f"a_{kind}", wrong(op))
    assert CliRunner().invoke(app, words).exit_code == 1


def wrong(op):
    """An operator that is off by a hundredth, with the right reference."""

    def call(x):
        return op(x) * 1.01

    call.reference = op.reference
    return call


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_benchmark_on_a_gpu(kind, folder, imported, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # a line for each figure
    imported(f"a_{kind}")
    path = folder / f"bench_a_{kind}.py"
    result = CliRunner().invoke(app, ["bench", str(path), "--against", "eager", "--only", "4096x1000 float32"])
    assert result.exit_code == 0 and f"a_{kind} 4096x1000 float32 backward: ours" in result.output


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    result = command("their_op", "--package", "--dir", folder)
    assert result.exit_code == 0, result.output
    return folder / "their_op"


def test_the_files_of_a_package(project):
    inside = [f"src/their_op/{name}" for name in ("__init__.py", "their_op.cu", "their_op.py")]
    outside = ["README.md", "benchmarks/bench_their_op.py", "pyproject.toml", "tests/test_their_op.py"]
    around = [".github/workflows/test.yml", ".gitignore", "LICENSE"]
    assert set(inside + outside + around) <= set(written(project))
    assert "Copyright (c) the authors of their_op\n" in (project / "LICENSE").read_text()


def test_the_workflow_of_a_package(project):
    """It installs what the project declares, in the order that spares PyTorch's CUDA build, and runs the tests."""
    text = (project / ".github/workflows/test.yml").read_text()
    workflow = yaml.safe_load(text)
    job = workflow["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert [command.split()[:3] for command in commands][-1] == ["python", "-m", "pytest"]
    assert "torch" in commands[0] and "whl/cpu" in commands[0] and '-e ".[test]"' in commands[1]
    assert job["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert declared["license"] == "MIT" and "test" in declared["optional-dependencies"]
    assert declared["requires-python"] == f">={job['strategy']['matrix']['python'][0]}"


def test_a_wheel_carries_the_kernels_text_and_binaries(project, tmp_path, monkeypatch):
    """Installed, it needs no NVRTC for what was compiled ahead, though git ignores that; for the rest it does."""
    cu = project / "src" / "their_op" / "their_op.cu"
    assert "cubins/" in (project / ".gitignore").read_text()
    cubins = cu.parent / "cubins"
    cubins.mkdir()
    made = kernel.Kernel(cu, "their_op_fwd<T>", T=(torch.float32,))
    (job,) = jobs.plan([made], ["sm_80"])
    assert not jobs.compile_one(job, cubins).error
    words = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(project)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    installed = tmp_path / "site" / "their_op"
    assert list((tmp_path / "site").glob("their_op-*.dist-info/licenses/LICENSE"))
    assert {"__init__.py", "their_op.py", "their_op.cu", f"cubins/{job.stem}.cubin", f"cubins/{job.stem}.json"} == set(
        written(installed)
    )
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "compile", None)
    binary = compiler.build(source.load(installed / "their_op.cu"), "their_op_fwd<float>", "sm_80")
    assert binary.origin == "precompiled" and binary.path.is_relative_to(installed)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("9lives", "expected a name of letters"),
        ("my-op", "expected a name of letters"),
        ("größe", "expected a name of letters"),
        ("_op", "expected a name of letters"),
        ("../op", "expected a name of letters"),
        ("class", "no Python keyword"),
        ("a" * 41, "NAME has 41 characters, expected 40 at most"),
        ("sum", "the generated code uses itself"),
        ("alike", "the generated code uses itself"),
        ("torch", "the generated code uses itself"),
        ("numpy", "which is a module already"),
        ("json", "which is a module already"),
        ("quantized", "a namespace of torch.ops already"),
    ],
)
def test_names_that_would_not_work(name, said, tmp_path):
    result = command("--dir", tmp_path, "--", name)
    assert result.exit_code == 2 and said in result.output, result.output
    assert written(tmp_path) == []


def test_a_kind_that_there_is_not(tmp_path):
    result = command("mine", "--kind", "matmul", "--dir", tmp_path)
    assert result.exit_code == 2
    assert "--kind is 'matmul', expected one of raw, elementwise, reduction" in result.output


def test_nothing_is_written_over(tmp_path):
    """All clashes are listed, a link that leads nowhere among them, and no other file is written."""
    (tmp_path / "mine.cu").write_text("my work")
    (tmp_path / "bench_mine.py").symlink_to(tmp_path / "absent")
    result = command("mine", "--dir", tmp_path)
    assert result.exit_code == 2
    assert "take another name, or another folder with --dir" in result.output
    assert result.output.splitlines()[1:] == [f"  {tmp_path / name}" for name in ("mine.cu", "bench_mine.py")]
    assert (tmp_path / "mine.cu").read_text() == "my work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench_mine.py", "mine.cu"]


@pytest.mark.parametrize(("more", "named"), [(["--dir", "mine.cu"], "mine.cu"), (["--package"], "mine")])
def test_a_folder_that_is_a_file(more, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(named).write_text("my work")
    result = command("mine", *more)
    assert result.exit_code == 2
    assert result.output == f"--dir is {named!r}: {named!r} is a file, expected a folder\n"
    assert written(tmp_path) == [named]


def test_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    result = command("mine", "--dir", tmp_path / "file" / "deep")
    assert result.exit_code == 2 and f"'{tmp_path / 'file'}' is a file, expected a folder" in result.output


def test_nothing_is_half_written(tmp_path, monkeypatch):
    """A disk that is full at the third file: the others, and the folders made for them, are gone again."""
    true_open, opened = open, []

    def full(path, mode="r", *args, **kwargs):
        if mode == "x":
            opened.append(path)
            if len(opened) == 3:
                raise OSError(28, "No space left on device", str(path))
        return true_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(new, "open", full, raising=False)
    result = command("mine", "--package", "--dir", tmp_path / "deep" / "down")
    assert result.exit_code == 2 and "No space left" in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_to_type_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = command("mine").output.split("next:\n")[1].splitlines()
    assert lines == [
        "  python -m pytest test_mine.py",
        "  python -m cupyops check mine:mine",
        "  python -m cupyops bench bench_mine.py",
    ]
    lines = command("mine2", "--package", "--dir", "a b").output.split("next:\n")[1].splitlines()
    assert lines == [
        "  cd 'a b/mine2'",
        '  pip install -e ".[test]"',
        "  python -m pytest",
        "  python -m cupyops compile src/mine2/mine2.py --arch sm_80,sm_90 --out src/mine2/cubins",
    ]


def test_every_template_is_used():
    names = {path.name.removesuffix(".tmpl") for path in (Path(new.__file__).parent / "templates").glob("*.tmpl")}
    shared = {
        "test.py", "bench.py", "init.py", "pyproject.toml", "README.md", "LICENSE", "gitignore", "ci.yml",
        "metadata.json",
    }  # fmt: skip
    assert names == shared | {f"{kind}.{end}" for kind in KINDS for end in ("cu", "py")}


_LOAD = """
import sys
import torch
import cupyops
{load}
x = torch.linspace(-1, 1, 9)
with cupyops.simulate(), cupyops.trace() as trace:
    y = module.soft_relu(x)
assert trace.routes() == {{"simulator"}} and torch.allclose(y, (x + (x * x + 4).sqrt()) / 2)
assert module.__name__ == "soft_relu_1" and "site-packages" not in module.__file__
"""
# what the loader does of a variant's folder
_AS_THE_LOADER = """
import importlib.util, json
from pathlib import Path
variant = Path("soft_relu/build/torch-universal")
about = json.loads((variant / "metadata.json").read_text())
path = variant / about["name"].replace("-", "_") / "__init__.py"
spec = importlib.util.spec_from_file_location(about["id"], path)
module = sys.modules[about["id"]] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
_BY_THE_LOADER = """
from pathlib import Path
from kernels import get_local_kernel
module = get_local_kernel(Path("soft_relu"))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    result = command("soft_relu", "--package", "--hub", "--dir", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("load", [_AS_THE_LOADER, _BY_THE_LOADER], ids=["steps", "kernels"])
def test_a_package_that_the_loader_of_kernels_takes(hub, load):
    if load == _BY_THE_LOADER:
        pytest.importorskip("kernels")  # with all that it needs more than the rest of the tests together
    done = run_python("-c", _LOAD.format(load=load), cwd=hub)
    assert done.returncode == 0, done.stderr


def test_its_own_tests_and_its_wheel_find_the_same_files(hub):
    project = tomllib.loads((hub / "soft_relu" / "pyproject.toml").read_text())
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    (path,) = project["tool"]["pytest"]["ini_options"]["pythonpath"]
    assert (hub / "soft_relu" / package / "soft_relu.cu").is_file()
    assert package == f"{path}/soft_relu" and "get_local_kernel" in (hub / "soft_relu" / "README.md").read_text()
    done = run_python("-m", "pytest", "-q", "-k", "values", "-p", "no:cacheprovider", cwd=hub / "soft_relu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [(("mine", "--hub"), "give --package too"), (("Mine", "--package", "--hub"), "expected lower case")],
)
def test_refusals_of_the_layout(tmp_path, args, message):
    result = command(*args, "--dir", tmp_path)
    assert result.exit_code == 2 and message in " ".join(result.output.split()) and not list(tmp_path.iterdir())
