"""What `port` learns of the C++: sizes of gradients, missing gradients, dtypes, names; and files that are odd."""

import pytest
import torch

import cupyops
from cupyops._port.port import port
from cupyops._port.program import read

HEAD = "#include <torch/extension.h>\n"


def ported(tmp_path, code):
    path = tmp_path / "x.cu"
    path.write_bytes(code.encode())
    return port([path], str(path))


def loaded(found):
    scope = {"__name__": "x"}
    exec(compile(found.files["x.py"], "x.py", "exec"), scope)
    return scope


PICK = (
    HEAD
    + """
enum Kind { FIRST, SECOND = 4, THIRD };
#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), "on a GPU")
#define CHECK_INPUT(x) CHECK_CUDA(x)  // ; CHECK_CONTIGUOUS(x)
template <typename scalar_t, int K>
__global__ void pick_kernel(const scalar_t* x, const scalar_t* w, const int* at, scalar_t* y, scalar_t* seen, int n, int m) {
  CUDA_KERNEL_LOOP(i, n * m) {
    const int row = i / m, column = i % m;
    y[i] = x[at[row] * m + column] * w[row];
    if (!column) seen[row] = K;
  }
}
template <typename scalar_t>
__global__ void pick_grad_kernel(const scalar_t* g, const scalar_t* w, const int* at, scalar_t* gx, int n, int m) {
  CUDA_KERNEL_LOOP(i, n * m) gpuAtomicAdd(gx + at[i / m] * m + i % m, g[i] * w[i / m]);
}
template <typename scalar_t, int K>
void launch_pick(const scalar_t* x, const scalar_t* w, const int* at, scalar_t* y, scalar_t* seen, int n, int m,
                 cudaStream_t s) {
  pick_kernel<scalar_t, K><<<GET_BLOCKS(n * m), CUDA_NUM_THREADS, 0, s>>>(x, w, at, y, seen, n, m);
}
std::vector<at::Tensor> pick_forward(at::Tensor x, at::Tensor w, at::Tensor at) {
  CHECK_INPUT(x);
  TORCH_CHECK(w.size(0) == at.size(0), "a weight for each row")
  auto stream = at::cuda::getCurrentCUDAStream();
  auto y = torch::empty({at.size(0), x.size(1)}, x.options());
  auto seen = torch::empty({at.size(0)}, x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pick", ([&] {
    launch_pick<scalar_t, THIRD>(x.data_ptr<scalar_t>(), w.data_ptr<scalar_t>(), at.data_ptr<int>(), y.data_ptr<scalar_t>(),
        seen.data_ptr<scalar_t>(), at.size(0), x.size(1), stream);
  }));
  return {y, seen};
}
at::Tensor pick_backward(at::Tensor grad_y, at::Tensor w, at::Tensor at, int rows) {
  auto grad_x = torch::zeros({rows, grad_y.size(1)}, grad_y.options());
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(grad_y.scalar_type(), "pick_backward", ([&] {
    pick_grad_kernel<scalar_t><<<(grad_y.numel() + 127) / 128, 128>>>(grad_y.data_ptr<scalar_t>(), w.data_ptr<scalar_t>(),
        at.data_ptr<int>(), grad_x.data_ptr<scalar_t>(), at.size(0), grad_y.size(1));
  }));
  return grad_x;
}
"""
)


def pick(x, w, at):
    if at.dim() != 1 or w.shape != at.shape or x.dim() != 2:
        raise ValueError("rows of x, a weight for each")
    return x[at.long()] * w[:, None], torch.full_like(w, 5)


def finished(tmp_path):
    found = ported(tmp_path, PICK)
    start = 'raise NotImplementedError("write the reference'
    assert start in found.files["x.py"]
    found.files["x.py"] = found.files["x.py"].replace(start, 'return pick(x, w, at)  # ("')
    made = loaded(found)
    made["pick"] = pick
    return found, made


def test_nothing_but_a_reference_is_left(tmp_path):
    """A size of backward is one of the gradient that it allocates; names, streams, templates and blocks are found."""
    found = ported(tmp_path, PICK)
    assert [one for one in found.problems if "to write" not in one] == []
    text = found.files["x.py"]
    assert "launch_pick(x, w, at, y, seen, at.size(0), x.size(1), scalar_t=scalar_t, K=THIRD)" in text
    assert "def launch_pick(x, w, at, y, seen, n, m, *, scalar_t, K):" in text
    assert "ext.pick_kernel[cpp.quotient(n * m + 1024 - 1, 1024), 1024" in text
    assert "grad_x = pick_backward(grad_y, w, at, x.size(0))" in text
    assert "must be contiguous" not in text  # what the macro says in a comment
    assert "raise ValueError('a weight for each row')" in text
    assert "dtypes=(torch.float32, torch.float64, torch.float16), nondifferentiable=(1,), nondeterministic=" in text
    assert "\nTHIRD = 5  # x.cu:3" in text


def test_it_keeps_the_contract(tmp_path):
    """Of check's hazards one is left out, of which the test that is written says why."""
    found, made = finished(tmp_path)
    assert "kernels trust at: values out of range are the caller's to avoid" in found.files["test_x.py"]
    assert "    torch.manual_seed(0)" in found.files["test_x.py"]  # what fails once fails again
    torch.manual_seed(0)
    x, w, at = torch.randn(5, 3, requires_grad=True), torch.rand(4), torch.tensor([4, 0, 0, 2], dtype=torch.int32)
    slow = ("compile_dynamic", "export", "opcheck", "many_rows")
    report = cupyops.testing.check(
        made["pick_op"], [x, w, at], backends="simulator", skip=("indices", *slow), progress=False
    )
    report.raise_if_failed()
    verdicts = {row.hazard: row.verdict for row in report.rows}
    for one in ("accuracy", "dtypes", "special_values", "autocast", "strided", "size_one", "tails", "gradient_penalty"):
        assert verdicts[one] == "pass", one


def test_a_gradient_that_the_extension_has_not_comes_from_the_reference(tmp_path):
    _, made = finished(tmp_path)
    torch.manual_seed(0)
    x, w = torch.randn(5, 3, requires_grad=True), torch.rand(4, requires_grad=True)
    at, grad_y = torch.tensor([4, 0, 0, 2], dtype=torch.int32), torch.randn(4, 3)
    expected = torch.autograd.grad(pick(x, w, at)[0], (x, w), grad_y)
    with cupyops.simulate(), cupyops.trace() as trace:
        y, seen = made["pick_op"](x, w, at)
        found = torch.autograd.grad(y, (x, w), grad_y)
    assert trace.routes() == {"reference"} and "has no gradient of w" in trace.records[0].note
    torch.testing.assert_close(found, expected)
    assert not seen.requires_grad
    with cupyops.simulate(), cupyops.trace() as trace:
        y, seen = made["pick_op"](x, w.detach(), at)
        (grad_x,) = torch.autograd.grad(y, x, grad_y)
    assert trace.routes() == {"simulator"}
    torch.testing.assert_close(grad_x, expected[0])
    assert seen.tolist() == [5] * 4 and not seen.requires_grad


KERNEL = "__global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }\n"
RUN = "void run(at::Tensor x) { %s }\n"
LAUNCH = "k<<<1, 256>>>(x.data_ptr<float>(), x.numel());"


@pytest.mark.parametrize(
    "body, said",
    [
        (LAUNCH.replace("x.numel()", "count"), "x.cu:3: not translated: the name count, which the files do not define"),
        ("int n = 1; auto go = [=] { return n; }; n = 2;" + LAUNCH, "x.cu:3: not translated: what a lambda captures"),
        ("auto f = &x; k<<<1, 2>>>(x.data_ptr<float>(), 3);", "x.cu:3: not translated: an address"),
        ("if (later(x)) " + LAUNCH, "x.cu:3: not translated: the function later"),
    ],
)
def test_what_is_not_known_is_said(tmp_path, body, said):
    found = ported(tmp_path, HEAD + KERNEL + RUN % body)
    assert any(said in one for one in found.problems), found.problems
    compile(found.files["x.py"], "x.py", "exec")


def test_a_pointer_is_a_condition(tmp_path):
    code = HEAD + KERNEL + "void run(float* x, const float* mask, int n) { if (mask && n > 2) k<<<1, 256>>>(x, n); }\n"
    made = loaded(ported(tmp_path, code))
    x, mask = torch.zeros(3), torch.zeros(3)
    with cupyops.simulate():
        made["run"](x, None, 3)
        assert x.tolist() == [0, 0, 0]
        made["run"](x, mask, 3)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "code, said",
    [
        ("", "no host function launches a kernel"),
        (HEAD + KERNEL, "no host function launches a kernel"),
        (
            HEAD + KERNEL + "void run(at::Tensor x) { if (x.numel()) {\n " + LAUNCH,
            "from x.cu:3 on it does not read as C++",
        ),
        (HEAD + KERNEL + "#define GO(x) " + LAUNCH + "\n", r"the launch in the macro GO \(x.cu:3\)"),
        (HEAD + KERNEL + RUN % "cudaLaunchKernel((void*)k, 1, 2, 0);", r"run \(x.cu\) calls cudaLaunchKernel"),
        (HEAD + KERNEL + RUN % ("int n = " + "(" * 3000 + "1" + ")" * 3000 + "; " + LAUNCH), "nested too deep"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, code, said):
    with pytest.raises(cupyops.InputError, match=said):
        ported(tmp_path, code)


@pytest.mark.parametrize(
    "code",
    [
        "\ufeff" + HEAD + KERNEL + RUN % LAUNCH,
        (HEAD + KERNEL + RUN % LAUNCH).replace("\n", "\r\n"),
        HEAD
        + "#define MAKE(name) __global__ void name##_(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }\n"
        "MAKE(k)\nMAKE(m)\n" + RUN % LAUNCH.replace("k<", "k_<"),
        HEAD + "template <typename T = float>\n" + KERNEL.replace("float", "T") + RUN % LAUNCH,
        HEAD + KERNEL.replace(" k(", " lambda(") + RUN % LAUNCH.replace("k<", "lambda<"),
        HEAD + KERNEL + "#define GO(x) " + LAUNCH + "\n" + RUN % "GO(x);",
        HEAD + KERNEL + RUN % ("auto go = [&](int n) { k<<<1, 256>>>(x.data_ptr<float>(), n); }; go(3);"),
        HEAD + KERNEL + RUN % ("auto f = &k; " + LAUNCH.replace("k<<<", "f<<<")),
        HEAD + KERNEL + RUN % ('TORCH_CHECK(x.numel() > 0, "not k<<<1, 2>>>(x)"); ' + LAUNCH),
    ],
    ids=[
        "a byte order mark",
        "CRLF",
        "a macro",
        "defaults",
        "a keyword",
        "a macro that launches",
        "a lambda that launches",
        "a kernel in a variable",
        "a string",
    ],
)
def test_odd_files_run(tmp_path, code):
    found = ported(tmp_path, code)
    assert not [one for one in found.problems if "not translated" in one]
    x = torch.zeros(3)
    with cupyops.simulate():
        loaded(found)["run"](x)
    assert x.tolist() == [1, 1, 1]


def test_a_large_file_is_read(tmp_path):
    many = "".join(f"void g{n}(at::Tensor x) {{ TORCH_CHECK(x.numel() > {n}); }}\n" for n in range(2_000))
    path = tmp_path / "x.cu"
    path.write_text(HEAD + KERNEL + many + RUN % LAUNCH)
    assert len(read([path]).functions) == 2_001
    assert list(cupyops.extension(path)) == ["k"]
