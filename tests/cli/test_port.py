"""`python -m cupyops port`: what is written runs, and nothing is guessed in silence."""

from pathlib import Path

import pytest
import torch
from processes import run_python

import cupyops
from cupyops._port.expressions import python
from cupyops._port.port import port
from cupyops._port.program import Program, parser, walk
from cupyops._port.scope import NotTranslated, Scope
from cupyops._port.values import DIM3, FLOAT, INT, TENSOR, UINT
from cupyops.cli.port import run

FILE = Path(__file__).parents[1] / "kernel" / "extension" / "scale_rows.cu"


def loaded(folder, name):
    """The module that was written, read as an import of it would read it."""
    path = folder / f"{name}.py"
    scope = {"__name__": name, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope


def test_host_functions_compute_what_they_did(tmp_path, capsys):
    assert run([FILE], tmp_path, ()) == 0
    said = capsys.readouterr().out
    assert "operator scale_rows_op: scale_rows_forward, scale_rows_backward" in said
    assert "to write: the reference of scale_rows_op" in said and "not translated" not in said
    made = loaded(tmp_path, "scale_rows")
    torch.manual_seed(0)
    x, w = torch.randn(7, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    grad_y = torch.randn(7, 5)
    with cupyops.simulate():
        y = made["scale_rows_forward"](x.detach(), w.detach())
        grad_x, grad_w = made["scale_rows_backward"](grad_y, x.detach(), w.detach())
        assert made["scale_rows_forward"](torch.empty(0, 5), w.detach()).shape == (0, 5)
        with pytest.raises(ValueError, match="x and w must have as many columns"):
            made["scale_rows_forward"](x.detach(), w.detach()[:4])
        with pytest.raises(ValueError, match="x must be contiguous"):
            made["scale_rows_forward"](x.detach().t(), w.detach())
        with cupyops.trace() as trace:
            through = made["scale_rows_op"](x, w)
            through.backward(grad_y)
    assert trace.routes() == {"simulator"}
    found = x.grad, w.grad
    x.grad = w.grad = None
    (x * w).backward(grad_y)
    for one in (y, through.detach()):
        torch.testing.assert_close(one, (x * w).detach())
    for one in ((grad_x, grad_w), found):
        torch.testing.assert_close(one, (x.grad, w.grad))
    with pytest.raises(NotImplementedError, match="write the reference of scale_rows_op"):
        made["scale_rows_op"](x.detach(), w.detach())


def test_its_tests_fail_until_it_is_finished(tmp_path):
    assert run([FILE], tmp_path, ()) == 0
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "test_scale_rows.py", cwd=tmp_path)
    assert done.returncode == 1 and "test_nothing_is_left_to_check" in done.stdout


def test_what_is_there_is_never_written_over(tmp_path, capfd):
    (tmp_path / "scale_rows.py").write_text("mine")
    assert run([FILE], tmp_path, ()) == 2
    assert "would be overwritten" in capfd.readouterr().err and (tmp_path / "scale_rows.py").read_text() == "mine"
    assert run([tmp_path / "absent.cu"], tmp_path, ()) == 2
    assert run([tmp_path / "scale_rows.py"], tmp_path, ()) == 2


def ported(tmp_path, code):
    path = tmp_path / "x.cu"
    path.write_text(code)
    return port([path], "x.cu")


LAUNCH = "__global__ void k(float* x, int n) {} int twice(int& n) { n *= 2; return n; }"
LAUNCH += " struct Bits { int low : 3; }; struct Elsewhere { int n; Elsewhere(int n); };"
LAUNCH += " struct Changing { int n; void grow() { n += 1; } };\n"


@pytest.mark.parametrize(
    "body, said",
    [
        ("int n = 1; std::swap(n, later); k<<<1, 2>>>(x, n);", "x.cu:2: not translated: 'std::swap(n, later)'"),
        ("float* p = &x; k<<<1, 2>>>(p, 3);", "x.cu:2: not translated: an address"),
        ("cublasSgemm(handle); k<<<1, 2>>>(x, 3);", "x.cu:2: not translated: the function cublasSgemm"),
        ("thrust::sort(x, x + 3); k<<<1, 2>>>(x, 3);", "x.cu:2: not translated: the function thrust::sort"),
        ("other<<<1, 2>>>(x); k<<<1, 2>>>(x, 3);", "x.cu:2: not translated: the launch of other"),
        ("\nint n = 0; goto done; k<<<1, 2>>>(x, n); done: return;", "x.cu:3: not translated: goto statement"),
        ("static int n = 0; n += 1; k<<<1, 2>>>(x, n);", "x.cu:2: not translated: 'static'"),
        ("double d = 2; k<<<1, 2>>>(x, std::exp(1.0f));", "x.cu:2: check: std::exp(1.0f)"),
        ("int n = 1, m = 2; (n > 1 ? n : m) += 5; k<<<1, 2>>>(x, m);", "x.cu:2: not translated: an assignment to"),
        ("int n = 1; int m = twice(n) + n; k<<<1, 2>>>(x, m);", "a number that is written to by reference here"),
        ("Bits b; b.low = 9; k<<<1, 2>>>(x, b.low);", "x.cu:2: not translated: the type Bits"),
        ("Elsewhere e(3); k<<<1, 2>>>(x, e.n);", "x.cu:2: not translated: which constructor of Elsewhere is called"),
        ("Changing c{3}; c.grow(); k<<<1, 2>>>(x, c.n);", "x.cu:2: not translated: the method grow of the struct"),
        ("auto m = f(); k<<<m / 2, 2>>>(x, 3);", "x.cu:2: not translated: the function f"),
    ],
)
def test_what_is_not_certain_is_said_with_its_line(tmp_path, body, said):
    found = ported(tmp_path, LAUNCH + f"void run(float* x) {{ {body} }}\n")
    assert any(said in one for one in found.problems), found.problems
    written = found.files["x.py"]
    compile(written, "x.py", "exec")
    assert ("raise NotImplementedError('x.cu:" in written) if "not translated" in said else ("# check this" in written)


def test_a_template_has_a_function_for_each_type(tmp_path):
    code = (
        LAUNCH + "template <typename T> T half(T a) { return a / 2; }\n"
        "void run(float* x, int n, unsigned m, double d) { k<<<half(n) + half(m) + half(n), 2>>>(x, half(d) + n / 2); }\n"
    )
    found = ported(tmp_path, code)
    assert not [one for one in found.problems if "not translated" in one]
    text = found.files["x.py"]
    for one in ("return cpp.quotient(a, 2)", "return a // 2", "return a / 2"):
        assert text.count(one) == 1


EXPRESSIONS = {
    "(n + 255) / 256": "cpp.quotient(n + 255, 256)",  # the sign of n is not known
    "(u + 255) / 256": "(u + 255 & 0xffffffff) // 256",
    "(x.numel() + 255) / 256": "(x.numel() + 255) // 256",
    "1.5f * s / 2": "cpp.to_float(cpp.to_float(1.5 * s) / 2)",
    "static_cast<float>(n) / 2": "cpp.to_float(cpp.to_float(n) / 2)",
    "a && !b || n == 0x10u": "a and not b or n & 0xffffffff == 0x10",
    "n > 0 ? n : -1": "n if n > 0 else -1",
    "std::min(n, (int)4096L)": "min(n, 4096)",
    "THCCeilDiv(x.numel(), 512L)": "cupyops.ceil_div(x.numel(), 512)",
    "torch::zeros({n, x.size(0)}, x.options().dtype(torch::kInt32))": (
        "torch.zeros((n, x.size(0)), dtype=torch.int32, device=x.device)"
    ),
    "at::empty({n}, at::device(x.device()).dtype(at::ScalarType::Float))": (
        "torch.empty((n,), device=x.device, dtype=torch.float32)"
    ),
    "torch::full({n, 2}, -1.0f, x.options())": "torch.full((n, 2), -1.0, dtype=x.dtype, device=x.device)",
    "x.contiguous().data_ptr<float>()": "x.contiguous()",
    "x.data_ptr<float>() + 4": "cpp.memory(x, 4)",
    "std::make_tuple(x, x.sizes())": "(x, x.shape)",
    "std::get<1>(torch::sort(x))": "torch.sort(x)[1]",
    "blocks.x * threads.y": "blocks[0] * threads[1] & 0xffffffff",
    "dim3(n, 2)": "(n, 2)",
    "sizeof(float) * n": "4 * (n & 0xffffffffffffffff) & 0xffffffffffffffff",
    "x.is_cuda() && a": "(x.is_cuda or cupyops.simulating()) and a",
    "x.strides()": "x.stride()",
    "x.nbytes() / 2": "x.nbytes // 2",
    "at::empty({n}, x.type())": "torch.empty((n,), dtype=x.dtype, device=x.device)",
    "at::empty({n}, x.type().scalarType())": "torch.empty((n,), dtype=x.dtype)",
    "torch::zeros(x.sizes(), x.options(), at::MemoryFormat::ChannelsLast)": (
        "torch.zeros(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)"
    ),
}


def expression(code):
    """The Python of an expression of a few variables, and what is known of them."""
    scope = Scope(Program())
    kinds = {"n": INT, "s": FLOAT, "x": TENSOR, "blocks": DIM3, "threads": DIM3, "a": INT, "b": INT, "u": UINT}
    for name, kind in kinds.items():
        scope.declare(name, kind)
    root = parser().parse(f"auto found = {code};".encode()).root_node
    value = next(one for one in walk(root) if one.type == "init_declarator").child_by_field_name("value")
    return python(value, scope).code, scope


@pytest.mark.parametrize("code", EXPRESSIONS)
def test_an_expression_in_python(code):
    found, scope = expression(code)
    assert found == EXPRESSIONS[code]
    assert not scope.notes


@pytest.mark.parametrize(
    "code", ["*p", "&x", "x->y", "new int", "sizeof(y)", "x.frobnicate()", "y[0] = 1", "x++", "x % 2"]
)
def test_an_expression_that_has_none(code):
    with pytest.raises(NotTranslated):
        expression(code)


def test_dispatches_over_sizes_become_conditions(tmp_path):
    code = """
    #define DIV_UP(a, b) (((a) + (b) - 1) / (b))
    template <int N> __global__ void add_kernel(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += N; }
    void add(at::Tensor x, int n) {
      switch (n) {
        case 4: add_kernel<4><<<DIV_UP(n, 4), 32>>>(x.data_ptr<float>(), x.numel()); break;
        case 8: add_kernel<8><<<DIV_UP(n, 8), 32>>>(x.data_ptr<float>(), x.numel()); break;
        default: throw std::runtime_error("4 or 8");
      }
    }
    """
    for name, content in ported(tmp_path, code).files.items():
        (tmp_path / name).write_text(content)
    path = tmp_path / "x.py"
    path.write_text(path.read_text().replace("'x.cu'", repr(str(tmp_path / "x.cu"))))
    made = loaded(tmp_path, "x")
    x = torch.zeros(3)
    with cupyops.simulate():
        made["add"](x, 8)
        with pytest.raises(RuntimeError, match="4 or 8"):
            made["add"](x, 5)
    assert x.tolist() == [8, 8, 8]


WRITES = """
#include <torch/extension.h>
__device__ void add(float* at, float value) { atomicAdd(at, value); }
__global__ void nearest_kernel(int n, int m, const float* a, const float* b, float* far, int* at) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    far[i] = 1e30f;
    for (int j = 0; j < m; ++j) {
      const float d = (a[i] - b[j]) * (a[i] - b[j]);
      if (d < far[i]) { far[i] = d; at[i] = j; }
    }
  }
}
__global__ void nearest_grad_kernel(
    int n, const float* a, const float* b, const float* grad, const int* at, float* da, float* db) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float g = 2 * grad[i] * (a[i] - b[at[i]]);
    da[i] = g;
    add(db + at[i], -g);
  }
}
void nearest_launcher(int n, int m, at::Tensor a, at::Tensor b, at::Tensor far, at::Tensor at) {
  auto places = (int*)at.data_ptr<int>();
  nearest_kernel<<<1, 32>>>(n, m, a.data_ptr<float>(), b.data_ptr<float>(), far.data_ptr<float>(), places);
}
int nearest_forward(at::Tensor a, at::Tensor b, at::Tensor far, at::Tensor at, int unused = 3, bool quick = false) {
  TORCH_CHECK(a.dtype() == at::kFloat && b.scalar_type() == torch::kFloat32, "floats");
  nearest_launcher(a.size(0), b.size(0), a, b, far, at);
  return 1;
}
int nearest_backward(at::Tensor a, at::Tensor b, at::Tensor at, at::Tensor grad_far, at::Tensor grad_a, at::Tensor grad_b) {
  nearest_grad_kernel<<<1, 32>>>(a.size(0), a.data_ptr<float>(), b.data_ptr<float>(), grad_far.data_ptr<float>(),
      at.data_ptr<int>(), grad_a.data_ptr<float>(), grad_b.data_ptr<float>());
  return 1;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &nearest_forward);
  m.def("backward", &nearest_backward);
}
"""


def finished(tmp_path, code, edits):
    """The module of a port, after a few edits; each finds its place."""
    found = ported(tmp_path, code)
    text = found.files["x.py"].replace("'x.cu'", repr(str(tmp_path / "x.cu")))
    for old, new in edits.items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    (tmp_path / "x.py").write_text(text)
    return found, loaded(tmp_path, "x")


def nearest(a, b):
    far, at = (a[:, None] - b).square().min(1)
    return far, at.int()


def test_outputs_that_the_caller_hands_in(tmp_path):
    """Where a forward writes to its arguments, these are the outputs; backward finds them by their names."""
    edits = {
        "_missing('the shape of far')": "a.shape",
        "_missing('the shape of at')": "a.shape",
        'raise NotImplementedError("write the reference': 'return nearest(a, b)  # ("',
    }
    found, made = finished(tmp_path, WRITES, edits)
    made["nearest"] = nearest
    said = "\n".join(found.problems)
    assert "x.cu:25: check: nearest_forward writes to far, at: give their shapes" in said
    assert "x.cu:30: check: grad_a, grad_b: each as large as what it is the gradient of" in said
    assert len(found.problems) == 3 and "not translated" not in said
    text = found.files["x.py"]
    assert "def nearest_op(a: torch.Tensor, b: torch.Tensor, unused: int = 3, quick: bool = False) ->" in text
    assert "at = torch.zeros(_missing('the shape of at'), dtype=torch.int32, device=a.device)" in text
    assert "def nearest_forward(a, b, far, at, unused=3, quick=False):" in text
    assert 'nondeterministic="atomicAdd"' in text and "ValueError('floats')" in text
    assert made["forward"] is made["nearest_forward"] and made["backward"] is made["nearest_backward"]
    torch.manual_seed(0)
    a, b = torch.randn(9, 2)[:, 0].requires_grad_(), torch.randn(5, requires_grad=True)  # of which one has strides
    grad_far = torch.randn(9)
    with cupyops.simulate():
        far, at = made["nearest_op"](a, b)
        gradients = torch.autograd.grad(far, (a, b), grad_far)
    expected = (a[:, None] - b).square().min(1)
    torch.testing.assert_close(far, expected.values)
    assert torch.equal(at.long(), expected.indices)
    for one, other in zip(gradients, torch.autograd.grad(expected.values, (a, b), grad_far)):
        torch.testing.assert_close(one, other)
    with cupyops.simulate(), cupyops.trace() as trace:
        made["nearest_op"](a[:0], b)
    assert trace.routes() == {"reference"}


NAMED = """
#include <torch/extension.h>
template <typename scalar_t>
__global__ void blend_kernel(const float4* x, const scalar_t* w, scalar_t* y, scalar_t* mixed, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    mixed[i] = w[i] * w[i];
    y[i] = x[i].x + mixed[i];
  }
}
__global__ void blend_grad_kernel(const float* g, const float* mixed, const float* w, float* gw, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) gw[i] = 2 * g[i] * w[i];
}
std::vector<torch::Tensor> blend_cuda(torch::Tensor x, torch::Tensor w) {
  const int count = w.size(0);
  auto y = torch::empty_like(w);
  auto mixed = torch::empty_like(w);
  blend_kernel<float><<<1, 32>>>(reinterpret_cast<const float4*>(x.data_ptr<float>()), w.data_ptr<float>(),
      y.data_ptr<float>(), mixed.data_ptr<float>(), count);
  return {y, mixed};
}
std::vector<torch::Tensor> blend_forward(torch::Tensor x, torch::Tensor w, float eps) { return blend_cuda(x, w); }
torch::Tensor blend_backward(torch::Tensor grad_y, torch::Tensor mixed, torch::Tensor w, int count, int other) {
  auto grad_w = torch::empty_like(w);
  blend_grad_kernel<<<1, 32>>>(grad_y.data_ptr<float>(), mixed.data_ptr<float>(), w.data_ptr<float>(),
      grad_w.data_ptr<float>(), count);
  return grad_w;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("blend", &blend_forward, py::arg("x"), py::arg("w"), py::arg("eps") = 1e-5f);
  m.def("blend_backward", &blend_backward);
}
"""


def test_what_backward_takes_is_found_by_its_name(tmp_path):
    """Outputs are saved, gradients are those of what they are named after, sizes are what the forward calls so."""
    text = ported(tmp_path, NAMED).files["x.py"]
    assert (
        "def blend_op(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:"
        in text
    )
    assert "y, mixed = blend_forward(x, w, eps)\n    return (y, mixed), (mixed,)" in text
    assert "def _(saved, grad_y, grad_mixed, x, w, eps, needs_grad):" in text
    assert "also takes count, other: give" in text  # the forward has no such name itself
    assert "grad_w = blend_backward(grad_y, mixed, w, _missing('count'), _missing('other'))" in text
    assert "return None, grad_w if needs_grad.w else None" in text
    assert "if not cupyops.aligned(x, 16):" in text and "cupyops.aligned(w" not in text
    assert "blend = blend_forward" in text and "nondeterministic" not in text


def test_sizes_that_the_forward_has_under_the_same_name(tmp_path):
    code = NAMED.replace("float eps) { return", "float eps) { const int count = w.size(0); return")
    text = ported(tmp_path, code).files["x.py"]
    assert "check: count: taken to be what blend_forward has under these names" in text
    assert "\n    count = w.size(0)\n" in text and "_missing('other')" in text and "_missing('count')" not in text
