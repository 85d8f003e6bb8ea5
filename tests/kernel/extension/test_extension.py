"""A C++ extension's .cu file as it is: what is left of it, what it may use, what its kernels compute."""

from pathlib import Path

import pytest
import torch

import cupyops
from cupyops._kernel.extension import device, text
from cupyops._kernel.extension.tokens import tokens

FILE = Path(__file__).parent / "scale_rows.cu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_is_taken_as_it_is(dtype):
    torch.manual_seed(0)
    ext = cupyops.extension(FILE)
    assert list(ext) == ["scale_rows_forward_kernel", "scale_rows_backward_kernel"]
    x, w = torch.randn(7, 5).to(dtype), torch.randn(5).to(dtype)
    y, grad_y = torch.empty_like(x), torch.randn(7, 5).to(dtype)
    grad_x, grad_w = torch.empty_like(x), torch.zeros(5)
    with cupyops.simulate():
        ext.scale_rows_forward_kernel[2, 64](x, w, y, scalar_t=dtype)
        ext.scale_rows_backward_kernel[1, 64](grad_y, x, w, grad_x, grad_w, 7, 5, scalar_t=dtype)
    exact = [one.double().requires_grad_() for one in (x, w)]
    truth = exact[0] * exact[1]
    truth.backward(grad_y.double())
    torch.testing.assert_close(y, truth.to(dtype))
    torch.testing.assert_close(grad_x, exact[0].grad.to(dtype))
    torch.testing.assert_close(grad_w, exact[1].grad.float())


def test_an_accessor_follows_the_strides_of_a_view():
    ext = cupyops.extension(FILE)
    x, w = torch.randn(5, 14)[:, ::2].t(), torch.randn(5)
    y = torch.empty(5, 7).t()
    with cupyops.simulate():
        ext.scale_rows_forward_kernel[1, 64](x, w, y, scalar_t=torch.float32)
    torch.testing.assert_close(y, x * w)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: x[0], "expected a tensor of 2 dimensions; this one has 1"),
        (lambda x: x.double(), "expected a tensor of torch.float32"),
        (lambda x: None, "expected a tensor of 2 dimensions"),
        (lambda x: x.numpy(), "expected a tensor of 2 dimensions"),
        (lambda x: torch.empty(1).expand(2**31 + 1, 1), "less than 2"),
    ],
)
def test_what_fits_no_accessor_is_refused_by_name(wrong, message):
    kernel = cupyops.extension(FILE).scale_rows_forward_kernel
    x, w = torch.randn(7, 5), torch.randn(5)
    with cupyops.simulate(), pytest.raises(cupyops.LaunchError, match=message) as caught:
        kernel[1, 64](wrong(x), w, torch.empty(7, 5), scalar_t=torch.float32)
    assert "argument 1 of 3" in str(caught.value)


def test_versions_are_raised_of_what_an_accessor_may_write():
    kernel = cupyops.Kernel(
        """
        #include <torch/extension.h>
        template <typename T> using Vector = torch::PackedTensorAccessor64<T, 1>;
        __global__ void copy_kernel(Vector<const float> x, Vector<float> y) {
          y[threadIdx.x] = x[threadIdx.x];
        }
        """,
        "copy_kernel",
        extension=True,
    )
    x, y = torch.randn(4), torch.zeros(4)
    before = x._version, y._version
    with cupyops.simulate():
        kernel[1, 4](x, y)
    assert (x._version, y._version) == (before[0], before[1] + 1)
    torch.testing.assert_close(y, x)


def test_an_operator_may_launch_one_and_is_made_in_full():
    kernel = cupyops.extension(FILE).scale_rows_forward_kernel

    @cupyops.operator("extension_tests::scaled")
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    @scaled.forward
    def _(x, w):
        y = torch.empty_like(x)
        kernel[1, 64](x, w, y, scalar_t=x.dtype)
        return y, ()

    with cupyops.simulate():
        for seed in range(5):
            torch.manual_seed(seed)
            x, w = torch.randn(3, 4), torch.randn(4)
            torch.testing.assert_close(scaled(x, w), x * w)
        with cupyops.trace() as trace:
            scaled(x, w)
    assert trace.routes() == {"simulator"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_such_files_use_of_headers(dtype):
    """Number types with their arithmetic, atomics, limits, traits, constants, of <cub/cub.cuh> no more than is there."""
    code = """
    #include <ATen/ATen.h>
    #include <c10/util/Half.h>
    #include <cmath>
    #include <cstdint>
    using namespace at;
    template <typename scalar_t>
    __global__ void everything(const scalar_t* x, scalar_t* y, scalar_t* sum, int n) {
      using acc_t = at::acc_type<scalar_t, true>;
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      acc_t value = static_cast<acc_t>(x[i]);
      std::conditional_t<std::is_same_v<acc_t, double>, double, float> two = 2;
      scalar_t half = x[i] / 2;
      half += x[i];
      y[i] = static_cast<scalar_t>(std::max(value * two, acc_t(-std::numeric_limits<float>::infinity())) + M_PI) + half;
      atomicAdd(sum, scalar_t(1));
    }
    """
    kernel = cupyops.Kernel(code, "everything<scalar_t>", extension=True)
    x, y, total = torch.linspace(-2, 2, 9).to(dtype), torch.empty(9, dtype=dtype), torch.zeros(1, dtype=dtype)
    with cupyops.simulate():
        kernel[1, 32](x, y, total, 9, scalar_t=dtype)
    rounded = lambda value: value.to(dtype).double()
    half = rounded(rounded(x.double() / 2) + x.double())
    torch.testing.assert_close(y, (rounded(x.double() * 2 + torch.pi) + half).to(dtype))
    assert total.item() == 9


@pytest.mark.parametrize("bits", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("named", ["template", "at::Half and at::BFloat16"])
def test_values_that_are_only_read(bits, named):
    """`__ldg` of PyTorch's half types gives every bit as it is in memory."""
    head, scalar = "template <typename scalar_t> ", "scalar_t"
    if named != "template":
        head, scalar = "", {torch.float16: "at::Half", torch.bfloat16: "at::BFloat16"}[bits]
    code = f"""
    #include <torch/extension.h>
    {head}__global__ void copied(const {scalar}* __restrict__ x, {scalar}* y, float* z, int n) {{
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      y[i] = __ldg(x + i);
      z[i] = static_cast<float>(__ldg(&x[i])) + __ldg(z + i);
    }}
    """
    x = torch.arange(2**16).to(torch.int16).view(bits)  # all that there are, NaN and infinity among them
    y, z = torch.empty_like(x), torch.ones(2**16)
    template = {"scalar_t": bits} if head else {}
    with cupyops.simulate():
        cupyops.extension(code).copied[2**7, 2**9](x, y, z, 2**16, **template)
    assert torch.equal(y.view(torch.int16), x.view(torch.int16))
    torch.testing.assert_close(z, x.float() + 1, equal_nan=True, rtol=0, atol=0)


def test_a_function_of_the_file_is_taken_before_ours():
    code = """
    #include <torch/extension.h>
    __device__ inline at::Half atomicAdd(at::Half* address, at::Half value) { *address = value * 3; return value; }
    __global__ void mine(at::Half* x) { atomicAdd(x, at::Half(2.0f)); }
    """
    x = torch.zeros(1, dtype=torch.float16)
    with cupyops.simulate():
        cupyops.extension(code).mine[1, 1](x)
    assert x.item() == 6


def test_lines_are_those_of_the_file():
    host = "#include <torch/extension.h>\nat::Tensor f(at::Tensor x) {\n  return x;\n}\n"
    code = host + "__global__ void k(float* x) {\n  x[0] = nothing;\n}\n"
    with cupyops.simulate(), pytest.raises(cupyops.CompileError, match=r"<text>.cu:6: error.*nothing"):
        cupyops.extension(code).k[1, 1](torch.zeros(1))


def test_what_a_kernel_cannot_have_is_named_with_its_line():
    code = "#include <thrust/unique.h>\n__global__ void k(float* x) {\n  thrust::unique(thrust::seq, x, x + 4);\n}\n"
    with cupyops.simulate(), pytest.raises(cupyops.CompileError, match=r"<text>.cu:3(.|\n)*thrust has host code"):
        cupyops.extension(code).k[1, 1](torch.zeros(4))
    missing = '#include <torch/extension.h>\n#include "their_helpers.h"\n__global__ void k(float* x) {}\n'
    with pytest.raises(cupyops.SourceError, match=r'<text>.cu:2: #include "their_helpers.h" not found'):
        list(cupyops.extension(missing))


def test_names_that_are_not_there_and_names_that_are_twice():
    ext = cupyops.extension(
        "namespace a { __global__ void f(float* x) { x[0] = 1; } __global__ void g(float* x) {} }\n"
        "namespace b { __global__ void f(float* x) { x[0] = 2; } }\n"
    )
    assert list(ext) == ["a::f", "a::g", "b::f"] and len(ext) == 3 and {"f", "g"} <= set(dir(ext))
    with pytest.raises(AttributeError, match="several kernels are called f: a::f, b::f"):
        ext.f  # noqa: B018
    with pytest.raises(cupyops.InputError, match="no kernel gg, expected one of: .*; did you mean g"):
        ext["gg"]
    x = torch.zeros(1)
    with cupyops.simulate():
        ext["b::f"][1, 1](x)
    assert x.item() == 2


def test_template_values_as_they_are_written():
    ext = cupyops.extension("template <typename T, int N = 2> __global__ void f(T* x) { x[0] = N; }\n")
    x = torch.zeros(1)
    with cupyops.simulate():
        ext.f[1, 1](x, T=torch.float32)
        assert x.item() == 2
        ext["f<T, N>"][1, 1](x, T=torch.float32, N=5)
        assert x.item() == 5
        ext["f<float, 7>"][1, 1](x)
    assert x.item() == 7


def test_a_number_of_an_enumeration_is_a_template_value():
    """Also by its name, and of an enumeration in a namespace."""
    ext = cupyops.extension(
        "enum Op { SUM, MEAN = 3 };\n"
        "namespace ns { enum class Kind { A = 1, B };\n"
        "template <typename T, Kind K, T V> __global__ void g(T* x) { x[0] = (int)K * 10 + V; } }\n"
        "template <typename scalar_t, Op OP, bool FLAG, int64_t N>\n"
        "__global__ void f(scalar_t* x) { x[0] = OP == MEAN ? N : FLAG; }\n"
    )
    x, at = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with cupyops.simulate():
        for op, expected in ((3, 7), (0, 1), ("MEAN", 7)):
            ext.f[1, 1](x, scalar_t=torch.float32, OP=op, FLAG=True, N=7)
            assert x.item() == expected
        ext["ns::g"][1, 1](at, T=torch.int32, K=2, V=4)
    assert at.item() == 24


THRUST = """
#include <thrust/execution_policy.h>
#include <thrust/scan.h>
#include <thrust/sort.h>
__global__ void k(const float* x, const float* w, float* y, long long* at, float* sums) {
  thrust::inclusive_scan(thrust::device, x, x + 9, y);
  thrust::exclusive_scan(thrust::device, x, x + 9, y + 9);
  thrust::copy(thrust::seq, x, x + 9, y + 18);
  thrust::inclusive_scan(thrust::seq, y + 18, y + 27, y + 18, thrust::maximum<float>());  // in place
  thrust::copy(x, x + 9, y + 27);
  thrust::exclusive_scan(y + 27, y + 36, y + 27, 5.0f);
  thrust::copy_n(thrust::seq, x, 9, y + 36);
  thrust::sort(thrust::seq, y + 36, y + 45);
  thrust::copy(x, x + 9, y + 45);
  thrust::sequence(thrust::seq, at, at + 9);
  thrust::sort_by_key(y + 45, y + 54, at, thrust::greater<float>());
  thrust::transform(x, x + 9, w, y + 54, thrust::multiplies<>());
  thrust::fill(thrust::seq, y + 63, y + 72, 2.0f);
  sums[0] = thrust::reduce(thrust::device, x, x + 9, 1.0f);
  sums[1] = thrust::reduce(x, x + 9);
  sums[2] = thrust::inner_product(thrust::seq, x, x + 9, w, 0.0f);
  sums[3] = thrust::transform_reduce(thrust::seq, x, x + 9, [](float a) { return a * a; }, 0.0f, thrust::plus<float>());
  sums[4] = *thrust::max_element(x, x + 9);
  sums[5] = thrust::min_element(thrust::seq, x, x + 9) - x;
  sums[6] = thrust::lower_bound(thrust::seq, y + 36, y + 45, x[3]) - (y + 36);
  sums[7] = thrust::count_if(x, x + 9, [](float a) { return a > 0; });
  thrust::inclusive_scan(thrust::seq, x, x, y + 71);  // of nothing
}
"""


def test_what_a_thread_calls_of_thrust():
    torch.manual_seed(0)
    x, w = torch.randn(9), torch.randn(9)
    y, at, sums = torch.empty(8, 9), torch.empty(9, dtype=torch.int64), torch.empty(8)
    with cupyops.simulate():
        cupyops.extension(THRUST).k[1, 1](x, w, y, at, sums)
    before = torch.cat([torch.zeros(1), x.double().cumsum(0)[:-1]])
    order = x.argsort(descending=True)
    rows = (x.double().cumsum(0), before, x.cummax(0).values, before + 5, x.sort().values, x[order], x * w, 2 + 0 * x)
    torch.testing.assert_close(y, torch.stack([one.float() for one in rows]))
    assert torch.equal(at, order)
    rank = (x < x[3]).sum()
    found = x.sum() + 1, x.sum(), x @ w, x @ x, x.max(), x.argmin(), rank, (x > 0).sum()
    torch.testing.assert_close(sums, torch.stack([one.float() for one in found]))


def test_headers_elsewhere_in_the_repository(tmp_path):
    """The message has the option that finds it; what an `#if` may leave out does not have to be there."""
    (tmp_path / "setup.py").touch()
    near, far = tmp_path / "csrc" / "cuda", tmp_path / "common" / "parts"
    near.mkdir(parents=True), far.mkdir(parents=True)
    (near / "x.cu").write_text(
        '#include "parts/far.h"\nusing namespace at::cuda::detail;\n'
        "__global__ void k(float* x) {\n#ifdef WITH_CUDA\n  x[0] = FAR;\n#endif\n}\n"
    )
    (far / "far.h").write_text('#define FAR 3\n#ifdef WITH_OTHER\n#include "other.h"\n#endif\n')
    (far / "other.h").write_text('#include "nowhere.h"\n')
    with pytest.raises(cupyops.SourceError, match="x.cu:1: .*not found") as caught:
        list(cupyops.extension(near / "x.cu"))
    option = f"-I{tmp_path / 'common'}"
    assert str(caught.value).endswith(f'it is in {far}, so give options=("{option}",), or --option')
    x = torch.zeros(1)
    with cupyops.simulate():
        cupyops.extension(near / "x.cu", options=(option,)).k[1, 1](x)
    assert x.item() == 3


SPLITS = {
    "a function": ("void f() { g(); }", ""),
    "a kernel": ("__global__ void k(int* x) { x[0] = 1; }", "__global__ void k(int* x) { x[0] = 1; }"),
    "braces in strings": ("void f() { s = \"}\"; c = '}'; /* } */ }\nint const N = 3;", "\nint const N = 3;"),
    "a raw string": ('void f() { s = R"x(} )" ")x"; }\nint const N = 3;', "\nint const N = 3;"),
    "an explicit instantiation": ("template void launch<float>(float*);", ""),
    "bindings": ('PYBIND11_MODULE(name, m) { m.def("f", &f); }', ""),
    "a macro of ours": (
        "#define DEVICE __device__\nDEVICE int f() { return 1; }",
        "#define DEVICE __device__\nDEVICE int f() { return 1; }",
    ),
    "constexpr": ("constexpr int f(int n) { return n; }", "constexpr int f(int n) { return n; }"),
    "a host struct": ("struct A { std::string name; int n; };", ""),
    "an alias of the host's": ("using T = at::Tensor;\nusing S = float;", "\nusing S = float;"),
    "directives inside host code": (
        "void f() {\n#ifdef A\n  g(); }\n#else\n  h(); }\n#endif\n",
        "\n#ifdef A\n\n#else\n\n#endif",
    ),
    "a default in a template": (
        "template <typename T, bool B = (1 > 0)>\n__global__ void k(T* x) {}",
        "template <typename T, bool B = (1 > 0)>\n__global__ void k(T* x) {}",
    ),
    "a constructor": (
        "struct P { int a; __device__ P(int b) : a{b} {} void host(std::vector<int> v) {} };",
        "struct P { int a; __device__ P(int b) : a{b} {}  };",
    ),
    "an array": ("__constant__ float table[2] = {1, 2};", "__constant__ float table[2] = {1, 2};"),
    "a macro without a semicolon": (
        "#define REGISTER(x)\nREGISTER(a)\n__device__ int f();",
        "#define REGISTER(x)\n\n__device__ int f();",
    ),
    "extern C": (
        'extern "C" {\nvoid f() {}\n__global__ void k(int* x) {}\n}',
        'extern "C" {\n\n__global__ void k(int* x) {}\n}',
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_what_is_left_of_a_text(case):
    code, expected = SPLITS[case]
    found = device.split(code).text
    assert [line.split() for line in found.splitlines()] == [
        line.split() for line in (expected or "").splitlines()
    ] or (not expected and not found.strip())
    assert found.count("\n") == code.count("\n")


def test_no_text_is_lost_by_the_tokenizer():
    code = FILE.read_text() + "\n'a' 0x1'0p-3f u8R\"(x)\" a<<<b>>>c \\\n @ \"open\n"
    at = 0
    for one in tokens(code):
        assert code[one.start : one.end] == one.text and one.start >= at
        at = one.end


def test_the_shipped_headers_are_in_the_key():
    """An edited prelude, or header of the file, compiles anew."""
    found = text.load(FILE, None, ()).source
    assert {"extension/prelude.cuh", "scale_rows.h"} <= set(found.includes)
