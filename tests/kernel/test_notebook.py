"""%%cuda in IPython: a cell becomes kernels."""

import re

import pytest
import torch

import cupyops

InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
Config = pytest.importorskip("traitlets.config").Config

ADD = """
__global__ void add_one(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1;
}
"""
TWICE = """
template <typename T>
__global__ void twice(const T* x, T* y, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] + x[i];
}
"""
SCALE = """
#define MOST(warps) (32 * warps)
// __global__ void no_kernel(float* x) {}
template <typename T, int N>
__global__ void __launch_bounds__(MOST(8)) scale(const T* x, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = N * x[i];
}
"""


@pytest.fixture(scope="module")
def the_shell(tmp_path_factory):
    history = tmp_path_factory.mktemp("ipython")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(history))
        shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
        shell.run_line_magic("load_ext", "cupyops")
        yield shell
        shell.restore_sys_module_state()


@pytest.fixture
def shell(the_shell):
    """With nothing bound; kernels run in the simulator."""
    for name in ("add_one", "scale", "twice"):
        the_shell.user_ns.pop(name, None)
    with cupyops.simulate():
        yield the_shell


def run(shell, cell):
    """A cell that must work."""
    result = shell.run_cell(cell)
    result.raise_error()
    return result.result


def launched(kernel, x, **template):
    y = torch.empty_like(x)
    kernel[1, 64](x, y, len(x), **template)
    return y.tolist()


def test_a_kernel_by_its_name(shell, capsys):
    run(shell, "%%cuda" + ADD)
    assert capsys.readouterr() == ("", "")
    kernel = shell.user_ns["add_one"]
    assert isinstance(kernel, cupyops.Kernel) and kernel.base == "add_one"
    assert kernel._specialised, "not compiled yet"
    assert launched(kernel, torch.tensor([1.0, 2.0])) == [2.0, 3.0]
    run(shell, "import torch\nx = torch.ones(2)\ny = torch.empty(2)\nadd_one[1, 32](x, y, 2)")
    assert shell.user_ns["y"].tolist() == [2.0, 2.0]


def test_several_kernels_and_a_template(shell):
    run(shell, "%%cuda" + ADD + SCALE)
    x = torch.tensor([1.0, 2.0])
    assert launched(shell.user_ns["add_one"], x) == [2.0, 3.0]
    assert launched(shell.user_ns["scale"], x, T=torch.float32, N=3) == [3.0, 6.0]
    assert launched(shell.user_ns["scale"], x.double(), T=torch.float64, N=2) == [2.0, 4.0]
    assert "no_kernel" not in shell.user_ns


def test_a_template_of_types_is_compiled_for_float32(shell):
    run(shell, "%%cuda" + TWICE)
    assert list(shell.user_ns["twice"]._specialised) == [(torch.float32,)]
    run(shell, "%%cuda" + SCALE)
    assert not shell.user_ns["scale"]._specialised


def test_a_template_that_is_not_for_float32(shell, capsys):
    code = "#include <cuda_fp16.h>" + TWICE.replace("for (", 'static_assert(sizeof(T) == 2, "halves");\n  for (')
    assert shell.run_cell(f"%%cuda\n{code}").error_in_exec is not None
    assert "halves" in (out := capsys.readouterr().out) and "name what it is for: %%cuda twice<float16>" in out
    run(shell, f"%%cuda twice<float16>\n{code}")
    assert launched(shell.user_ns["twice"], torch.ones(2).half(), T=torch.float16) == [2.0, 2.0]


def test_float16_is_named_only_where_it_may_help(shell, capsys):
    """Not for a slip that no type mends; for what only halves have."""
    assert shell.run_cell("%%cuda" + TWICE.replace("x[i];", "x[i]")).error_in_exec is not None
    assert 'expected a ";"' in (out := capsys.readouterr().out) and "float16" not in out
    halves = "#include <cuda_fp16.h>" + TWICE.replace("for (", "const __half* only = x;\n  for (")
    assert shell.run_cell(f"%%cuda\n{halves}").error_in_exec is not None
    assert "name what it is for: %%cuda twice<float16>" in capsys.readouterr().out


def test_a_traceback_is_of_the_author_s_own_frames(shell, capsys):
    """Of a fault in the simulator, through autograd; other errors are IPython's to show."""
    run(shell, "%%cuda" + ADD)
    run(
        shell,
        """
import torch
import cupyops

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        add_one[1, 32](grad.contiguous(), torch.empty(2), 3)
""",
    )
    assert shell.run_cell("Function.apply(torch.ones(2, requires_grad=True)).sum().backward()").error_in_exec
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # colours
    assert out.count("File ") == 2 and "backward(ctx, grad)" in out and "just past the end of `x`" in out
    assert "/cupyops/" not in out and "/torch/" not in out
    assert isinstance(shell.run_cell("1 / 0").error_in_exec, ZeroDivisionError)
    assert "ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize("instance", ["scale<float32,4>", "scale<torch.float32,4>", "scale<float,4>"])
def test_instances_compiled_at_once(shell, instance):
    run(shell, f"%%cuda {instance}{SCALE}")
    assert list(shell.user_ns["scale"]._specialised) == [(torch.float32, 4)]


def test_running_again_replaces(shell):
    run(shell, "%%cuda" + ADD)
    before = shell.user_ns["add_one"]
    run(shell, "%%cuda" + ADD.replace("+ 1", "+ 5"))
    assert shell.user_ns["add_one"] is not before
    assert launched(shell.user_ns["add_one"], torch.ones(2)) == [6.0, 6.0]


def test_options(shell):
    run(shell, "%%cuda --option=-DSTEP=7 --option=--use_fast_math" + ADD.replace("+ 1", "+ STEP"))
    assert shell.user_ns["add_one"].options == ("-DSTEP=7", "--use_fast_math")
    assert launched(shell.user_ns["add_one"], torch.zeros(1)) == [7.0]


def test_includes_are_those_of_the_working_folder(shell, tmp_path, monkeypatch):
    (tmp_path / "step.cuh").write_text("#define STEP 3\n")
    monkeypatch.chdir(tmp_path)
    run(shell, '%%cuda\n#include "step.cuh"\n#include "common/core/types.cuh"' + ADD.replace("+ 1", "+ STEP"))
    assert launched(shell.user_ns["add_one"], torch.zeros(1)) == [3.0]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%cuda" + ADD.replace("x[i] + 1;", "x[i] + one;"), "<text>.cu:4: error: identifier \"one\" is undefined"),
        ("%%cuda" + TWICE.replace("n)", "m)"), "<text>.cu:4: error: identifier \"n\" is undefined"),
        ("%%cuda scale<float,2>" + SCALE.replace("N * x[i]", "x[i].no"), "<text>.cu:7: error: expression must have class"),
    ],
)  # fmt: skip
def test_a_compile_error_is_a_message(shell, capsys, cell, message):
    shell.user_ns |= {"add_one": "as before", "scale": "as before"}
    result = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, cupyops.CompileError)
    out, err = capsys.readouterr()
    assert message in out + err and "CompileError: <text>.cu" in out + err
    assert "Traceback" not in out + err and "magic.py" not in out + err
    assert shell.user_ns["add_one"] == shell.user_ns["scale"] == "as before"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("", "\nint x = 3;", "InputError: the cell has no __global__ function; write the kernel below"),
        ("", "\n__global__ void later(float* x);", "the cell has no __global__ function"),
        (" scale", SCALE, "%%cuda names 'scale'; it is scale<T, N>"),
        (" scale<float>", SCALE, "%%cuda names 'scale<float>'; it is scale<T, N>"),
        (" other<float>", SCALE, "%%cuda names 'other<float>'; the cell has scale<T, N>"),
        (" add_one<float>", ADD, "it is add_one"),
        (" --option=-arch=sm_90", ADD, "a kernel is compiled for the device"),
        (" --wrong", ADD, "UsageError: unrecognized arguments: --wrong"),
        ("", '\n#include "nowhere.cuh"' + ADD, 'SourceError: <text>.cu:2: #include "nowhere.cuh" not found'),
    ],
)
def test_other_mistakes_are_messages(shell, capsys, line, code, message):
    result = shell.run_cell(f"%%cuda{line}{code}")
    assert result.error_in_exec is not None
    out, err = capsys.readouterr()
    assert message in out + err and "Traceback" not in out + err


def test_help(shell):
    assert "CUDA C" in shell.find_cell_magic("cuda").__doc__


def test_unload(shell):
    shell.run_line_magic("unload_ext", "cupyops")
    try:
        assert shell.find_cell_magic("cuda") is None
    finally:
        shell.run_line_magic("load_ext", "cupyops")


@pytest.mark.gpu
def test_on_the_gpu(the_shell):
    run(the_shell, "%%cuda" + ADD)
    assert launched(the_shell.user_ns["add_one"], torch.ones(3, device="cuda")) == [2.0] * 3
