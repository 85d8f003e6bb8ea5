"""`python -m cupyops compile`, on kernels of a user's module; that the built-in ones compile is tested elsewhere."""

import dataclasses
import json
import os
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

import cupyops
from cupyops._dispatch.core import rare
from cupyops._dispatch.core.forms import families
from cupyops._kernel import kernel
from cupyops._kernel.compile import compiler
from cupyops._kernel.compile.source import cuda_src
from cupyops.cli import jobs
from cupyops.cli.app import app

TEXT = """
template <typename T, int N> __global__ void shift(const T* x, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + T(N);
}
"""


@pytest.fixture
def shift(monkeypatch):
    """A kernel with four instances, the only one that the command finds."""
    made = cupyops.Kernel(TEXT, "shift<T, N>", T=(torch.float32, torch.float64), N=(1, 2))
    monkeypatch.setattr(kernel, "kernels", lambda: [made])
    return made


@pytest.fixture
def cubins(tmp_path, monkeypatch):
    """A folder of precompiled kernels, and a process that knows no other and has compiled nothing yet."""
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(tmp_path / "cubins"))
    monkeypatch.setattr(compiler, "_memory", {})
    return tmp_path / "cubins"


def command(*args):
    return CliRunner().invoke(app, ["compile", *map(str, args)], terminal_width=200)


def test_a_kernel_with_a_target_of_its_own(monkeypatch, cubins):
    """It is compiled for that, whichever name of the architecture is given; for others it is left out, and named."""
    own = cupyops.Kernel(TEXT, "shift<T, N>", T=(torch.float32,), N=(1,), arch="sm_90a")
    monkeypatch.setattr(kernel, "kernels", lambda: [own])
    assert "left out: shift, which is for sm_90a alone" in command("--arch", "sm_80", "--out", cubins).output
    assert list(cubins.iterdir()) == []
    result = command("--arch", "sm_80,sm_90", "--out", cubins)
    assert result.exit_code == 0 and "left out" not in result.output
    assert own.instance(T=torch.float32, N=1).binary("sm_90").origin == "precompiled"


def test_what_it_writes_is_what_a_launch_finds(shift, cubins):
    result = command("--arch", "sm_75,sm_80", "--out", cubins)
    assert result.exit_code == 0, result.output
    assert f"CUPYOPS_CUBIN_PATH={cubins}" in result.output.replace("\n", "")
    for arch in ("sm_75", "sm_80"):
        for name in ("shift<float, 1>", "shift<float, 2>", "shift<double, 1>", "shift<double, 2>"):
            binary = compiler.build(shift.source, name, arch, shift.options)
            assert binary.origin == "precompiled" and binary.path.parent == cubins
    assert compiler.build(shift.source, "shift<float, 1>", "sm_86").origin == "precompiled"  # sm_80's runs there
    assert compiler.build(shift.source, "shift<float, 1>", "sm_90").origin == "nvrtc"
    assert len(list(cubins.iterdir())) == 2 * 8  # a .cubin and a .json each, nothing left over


def test_float64_of_the_built_in_kernels_is_left_to_a_first_call(monkeypatch, cubins):
    """That of a user's own kernels is made, as of any dtype that they declare."""
    relu = [one for one in kernel.kernels(cuda_src()) if one.base == "relu_fwd"]
    monkeypatch.setattr(kernel, "kernels", lambda: relu)
    result = command("--arch", "sm_80", "--out", cubins)
    assert "left out: 1 for float64; a first call compiles them, and --fp64 makes them now" in result.output
    assert len(list(cubins.glob("*.cubin"))) == 3 and not list(cubins.glob("*double*"))
    assert compiler.build(relu[0].source, "relu_fwd<double>", "sm_80", relu[0].options).origin == "nvrtc"
    result = command("--arch", "sm_80", "--out", cubins, "--fp64")
    assert result.exit_code == 0 and "left out" not in result.output
    assert len(list(cubins.glob("*.cubin"))) == 4 and list(cubins.glob("*double*"))


@pytest.mark.parametrize(
    ("base", "arch", "left", "made"),
    [
        ("attention_fwd_mma", "sm_90", 28, 0),
        ("attention_fwd_mma", "sm_80", 0, 28),
        ("gemm_fwd", "sm_80", 8, 3),
        ("conv2d_fwd", "sm_90", 2, 3),
    ],
)
def test_what_few_programs_launch_is_named(monkeypatch, cubins, base, arch, left, made):
    """Attention by MMA where there is WGMMA, and products for which PyTorch's own are called."""
    kernels = [one for one in kernel.kernels(cuda_src()) if one.base == base]
    monkeypatch.setattr(kernel, "kernels", lambda: kernels)
    jobs = []

    def note(planned, *_):
        jobs[:] = planned
        return iter(())

    monkeypatch.setattr("cupyops.cli.jobs.run", note)
    result = command("--arch", arch, "--out", cubins)
    named = re.findall(r"left out: (\d+) of (?:attention|products) .* and --all makes them now", result.output)
    assert sum(map(int, named)) == left and len(jobs) == made and not any("double" in job.name for job in jobs)
    result = command("--arch", arch, "--out", cubins, "--all")
    assert "left out" not in result.output
    doubles = sum("double" in job.name for job in jobs)
    assert len(jobs) == left + made + doubles


def test_what_is_behind_pytorch_is_so_in_every_list():
    """A form that calls PyTorch, for half types whatever the problem, comes before; no other list may launch them."""
    behind = {
        (forms.family, forms.direction)
        for forms in families()
        for at, form in enumerate(forms.list)
        if {one.base for one in form.kernels() if one} & set(rare.BEHIND_PYTORCH)
        and not any(earlier.name in ("pytorch", "apart") for earlier in forms.list[:at])
    }
    assert behind == {
        ("conv2d", "backward"),
        ("conv2d", "backward_weight"),
    }  # of a forward that was not PyTorch's: of fp32
    assert set(rare.BESIDE_WGMMA + rare.BEHIND_PYTORCH) <= {one.base for one in kernel.kernels(cuda_src())}


def test_the_variable_is_one_that_a_shell_takes(shift, cubins):
    folder = cubins.with_name("my cubins")
    assert f"CUPYOPS_CUBIN_PATH='{folder}'" in command("--arch", "sm_80", "--out", folder).output.replace("\n", "")


def test_a_folder_that_is_made_is_one_that_launches_look_in(shift, cubins):
    """Whatever the umask."""
    before = os.umask(0)
    try:
        assert command("--arch", "sm_80", "--out", cubins).exit_code == 0
    finally:
        os.umask(before)
    assert cubins.stat().st_mode & 0o777 == 0o755
    assert shift.instance(T=torch.float32, N=1).binary("sm_80").origin == "precompiled"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners here")
def test_a_folder_that_launches_will_not_use_is_told(shift, cubins):
    cubins.mkdir()
    cubins.chmod(0o777)
    output = command("--arch", "sm_80", "--out", cubins).output.replace("\n", "")
    assert "Launches will not use them" in output and "0777" in output and f"chmod -R go-w {cubins}" in output
    assert "CUPYOPS_CUBIN_PATH=" not in output


def test_entries_are_reused_while_the_text_is_the_same(shift, cubins):
    assert command("--arch", "sm_80", "--out", cubins).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in cubins.iterdir()}
    assert command("--arch", "sm_80", "--out", cubins).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in cubins.iterdir()} == before
    damaged = next(cubins.glob("*.cubin"))
    damaged.write_bytes(b"not a cubin")
    assert command("--arch", "sm_80", "--out", cubins).exit_code == 0
    assert damaged.read_bytes()[:4] == b"\x7fELF"


def test_without_out_it_fills_the_cache(shift, cubins):
    assert command("--arch", "sm_80").exit_code == 0
    assert compiler.build(shift.source, "shift<float, 1>", "sm_80", shift.options).origin == "cache"


def test_the_summary_counts(shift, cubins):
    output = command("--arch", "sm_75,sm_80", "--out", cubins).output
    row = next(line for line in output.splitlines() if "<text>.cu" in line).split()
    size = sum(path.stat().st_size for path in cubins.glob("*.cubin"))
    # file, kernels, instances, cubins, reused, seconds, bytes
    assert row[:5] == ["<text>.cu", "1", "4", "8", "0"]
    assert row[6] == f"{size:,}"


def test_an_error_is_shown_in_full_and_the_others_compile(cubins, monkeypatch):
    text = "template <typename T> __global__ void broken(T* x) {\n  x[0] = typename T::missing();\n}"
    bad = cupyops.Kernel(text, "broken<T>", T=(torch.float32, torch.int64))
    good = cupyops.Kernel(TEXT, "shift<T, N>", T=(torch.float32,), N=(1,))
    monkeypatch.setattr(kernel, "kernels", lambda: [bad, good])
    result = command("--arch", "sm_80", "--out", cubins)
    assert result.exit_code == 1
    assert "<text>.cu:2: error:" in result.output
    assert "x[0] = typename T::missing();" in result.output
    assert "broken<float> for sm_80" in result.output and "broken<long long> for sm_80" in result.output
    assert "2 of 3 did not compile" in result.output
    assert [json.loads(path.read_text())["name"] for path in cubins.glob("*.json")] == ["shift<float, 1>"]


def test_kernels_of_a_module_are_compiled_too(tmp_path, monkeypatch, cubins):
    (tmp_path / "their_kernels.cu").write_text(TEXT)
    (tmp_path / "their_kernels.py").write_text(
        "import cupyops, torch\nk = cupyops.Kernel('their_kernels.cu', 'shift<T, N>', T=(torch.int32,), N=(3,))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    every = kernel.kernels
    monkeypatch.setattr(kernel, "kernels", lambda: [k for k in every() if "their_kernels" in repr(k)])
    result = command("their_kernels", "--arch", "sm_80", "--out", cubins)
    assert result.exit_code == 0, result.output
    assert [json.loads(path.read_text())["name"] for path in cubins.glob("*.json")] == ["shift<int, 3>"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a package of one module, one .cu file and one kernel, and a module without kernels."""
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shift.cu").write_text(TEXT)
    (package / "inside.py").write_text(
        "import cupyops, torch\nk = cupyops.Kernel('shift.cu', 'shift<T, N>', T=(torch.int32,), N=(3,))\n"
    )
    (tmp_path / "without_kernels.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("their_package.inside", "their_package", "without_kernels"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["their_package.inside", "their_package/inside.py"])
def test_a_module_by_name_or_by_path(name, project, cubins):
    """Its kernels alone, not the built-in ones; a file in a package is imported as its part."""
    beside = project / "their_package" / "cubins"
    result = command(name, "--arch", "sm_80, sm_90a", "--out", beside, "--jobs", 1)
    assert result.exit_code == 0, result.output
    made = {(record["name"], record["arch"]) for record in map(json.loads, map(read, beside.glob("*.json")))}
    assert made == {("shift<int, 3>", "sm_80"), ("shift<int, 3>", "sm_90a")}
    assert "Launches find this folder without a setting" in result.output
    (k,) = (k for k in kernel.kernels() if k is sys.modules["their_package.inside"].k)
    assert compiler.build(k.source, "shift<int, 3>", "sm_80").path.parent == beside
    assert compiler.build(k.source, "shift<int, 3>", "sm_75").origin == "nvrtc", "what is not there is compiled"


def read(path):
    return path.read_text()


def test_a_path_that_is_another_module_already(project, cubins):
    (project / "json.py").touch()
    result = command("json.py")
    assert result.exit_code == 2 and "'json' is another module already" in result.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shift.cu", 'which is CUDA; give the Python module that declares Kernel("shift.cu", ...), such as shift.py'),
        ("without_kernel", "or a path such as src/kernels.py; did you mean without_kernels?"),
        ("without_kernel.py", "did you mean without_kernels.py?"),
        ("fails", "cannot import fails: ZeroDivisionError: division by zero\n  "),
        ("fails.py", "fails.py:2"),
        ("wants", "cannot import wants: ModuleNotFoundError: No module named 'absent_one'"),
    ],
)
def test_a_module_that_cannot_be_had(name, said, project, cubins):
    (project / "fails.py").write_text("\n1 / 0")
    (project / "wants.py").write_text("import absent_one")
    result = command(name)
    assert result.exit_code == 2 and said in result.output, result.output
    assert "Traceback" not in result.output


def test_an_out_that_is_a_file(project, shift, cubins):
    before = (project / "their_package" / "shift.cu").read_text()
    for out in ("their_package/shift.cu", "their_package/shift.cu/cubins"):
        result = command("--arch", "sm_80", "--out", out)
        assert result.exit_code == 2
        assert result.output == f"--out is {out!r}: 'their_package/shift.cu' is a file, expected a folder\n"
    assert (project / "their_package" / "shift.cu").read_text() == before


def test_a_module_without_kernels(project, cubins):
    result = command("without_kernels", "--arch", "sm_80")
    assert result.exit_code == 2 and "importing makes no cupyops.Kernel" in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--arch", "sm_1"], "--arch has 'sm_1'"),
        (["--arch", "sm_80a"], "--arch has 'sm_80a'"),
        (["--arch", "sm_90f"], "--arch has 'sm_90f'"),
        (["absent/kernels.py"], "MODULE 'absent/kernels.py': there is no such file"),
        (["--arch", "ninety"], "--arch has 'ninety'"),
        (["no.such.module"], "MODULE 'no.such.module' cannot be found"),
    ],
)
def test_bad_arguments(args, said, shift, cubins):
    result = command(*args)
    assert result.exit_code == 2
    assert said in result.output
    assert not cubins.exists()


def test_a_kernel_without_declared_values_is_named(cubins, monkeypatch):
    undeclared = cupyops.Kernel(TEXT, "shift<T, N>", T=(torch.float32,))
    monkeypatch.setattr(kernel, "kernels", lambda: [undeclared])
    result = command("--arch", "sm_80", "--out", cubins)
    assert result.exit_code == 2
    assert "no values declared for N" in result.output


@pytest.mark.filterwarnings("ignore:the kernel cache .* is not used:UserWarning")
def test_no_cache_that_can_be_written(shift, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = command("--arch", "sm_80")
    assert result.exit_code == 2
    assert "CUPYOPS_CACHE_DIR" in result.output


def test_a_plan_has_every_instance_once():
    one, same = (cupyops.Kernel(TEXT, "shift<T, N>", T=(torch.float32,), N=(1, 2)) for _ in range(2))
    other = cupyops.Kernel(TEXT, "shift<T, N>", options=("--use_fast_math",), T=(torch.float32,), N=(1,))
    planned = jobs.plan([one, same, other], ["sm_80", "sm_90"])
    assert len(planned) == 2 * (2 + 1)
    assert len({job.stem for job in planned}) == len(planned)


class Deadly:
    """Ends the process that receives it, as the system does where memory runs out."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_compiling_process_that_is_killed(shift, cubins, monkeypatch):
    planned = jobs.plan([shift], ["sm_80"])
    planned[0] = dataclasses.replace(planned[0], options=(Deadly(),))
    monkeypatch.setattr(jobs, "plan", lambda *_: planned)
    result = command("--arch", "sm_80", "--out", cubins, "--jobs", 2)
    assert result.exit_code == 1
    assert "one of 2 compiling processes was killed" in result.output and "--jobs 1" in result.output
