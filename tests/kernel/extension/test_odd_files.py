"""Files that are written in other ways: each a right result, or an error that says what is wrong."""

import pytest
import torch

import cupyops

HEAD = "#include <torch/extension.h>\n"
KERNEL = "__global__ void add_kernel(float* x, int n) {\n  if (threadIdx.x < n) x[threadIdx.x] += 1;\n}\n"
HOST = "void add(at::Tensor x) { add_kernel<<<1, 256>>>(x.data_ptr<float>(), x.numel()); }\n"
FILE = HEAD + KERNEL + HOST
BODY = "{ if (threadIdx.x < n) x[threadIdx.x] += 1; }\n"

RIGHT = {
    "a byte order mark": "\ufeff" + FILE,
    "CRLF": FILE.replace("\n", "\r\n"),
    "CRLF in a macro": (
        HEAD + "#define ADD(x) \\\n  x += 1\n" + KERNEL.replace("x[threadIdx.x] += 1", "ADD(x[threadIdx.x])") + HOST
    ).replace("\n", "\r\n"),
    "a bracket that host code lacks": HEAD + KERNEL + "void add(at::Tensor x) { if (x.numel()) {\n",
    "extern C": HEAD + 'extern "C" ' + KERNEL + HOST,
    "an extern C block": HEAD + 'extern "C" {\n' + KERNEL + "}\n" + HOST,
    "a namespace without a name": HEAD + "namespace {\n" + KERNEL + "}\n" + HOST,
    "namespaces within": HEAD + "namespace a { namespace {\n" + KERNEL + "} }\n" + HOST,
    "launch bounds with expressions": (
        HEAD + "constexpr int B = 2;\n"
        "__global__ void __launch_bounds__(32 * (B > 1 ? 8 : 1), (B + 1) / 2) add_kernel(float* x, int n) " + BODY
    ),
    "launch bounds first": HEAD + "__launch_bounds__(256) __global__ void add_kernel(float* x, int n) " + BODY,
    "a macro for the mark": HEAD + "#define GLOBAL __global__ void\nGLOBAL add_kernel(float* x, int n) " + BODY + HOST,
    "a macro that defines kernels": (
        HEAD + "#define KERNEL(name, op) __global__ void name(float* x, int n) "
        "{ if (threadIdx.x < n) x[threadIdx.x] = x[threadIdx.x] op 1; }\n"
        "KERNEL(add_kernel, +)\nKERNEL(sub_kernel, -)\n" + HOST
    ),
    "a macro that pastes names": (
        HEAD + "#define DEFINE(name, type) \\\n  __global__ void name##_kernel(type* x, int n) { \\\n"
        "    if (threadIdx.x < n) x[threadIdx.x] += (type)1; \\\n  }\nDEFINE(add, float);\n" + HOST
    ),
    "chevrons in a string": HEAD + KERNEL + 'const char* how = R"x(__global__ void f(int) { f<<<1, 2>>>(3); } )x";\n',
    "a lambda of the host that launches": (
        HEAD
        + KERNEL
        + "void add(at::Tensor x) { auto go = [&](int n) { add_kernel<<<1, 2>>>(x.data_ptr<float>(), n); }; }\n"
    ),
    "defaults for all of a template": (
        HEAD + "template <typename T = float, int N = 1>\n__global__ void add_kernel(T* x, int n) "
        "{ if (threadIdx.x < n) x[threadIdx.x] += N; }\n"
    ),
    "blocks nested deep": HEAD + KERNEL + "void add(at::Tensor x) " + "{" * 1500 + "}" * 1500 + "\n",
}


@pytest.mark.parametrize("code", RIGHT.values(), ids=RIGHT)
def test_it_is_taken(tmp_path, code):
    path = tmp_path / "x.cu"
    path.write_bytes(code.encode())
    ext, x = cupyops.extension(path), torch.zeros(3)
    with cupyops.simulate():
        ext.add_kernel[1, 32](x, 2)
    assert x.tolist() == [1, 1, 0]


def test_half_types_as_pytorch_s_builds_have_them():
    code = HEAD + "__global__ void f(c10::Half* x) { __shared__ __half a[1]; a[0] = x[0]; x[1] = a[0]; }\n"
    x, option = torch.tensor([1.5, 0]).half(), "-D__CUDA_NO_HALF_CONVERSIONS__"
    with cupyops.simulate(), pytest.raises(cupyops.CompileError, match=option):
        cupyops.extension(code).f[1, 1](x)
    with cupyops.simulate():
        cupyops.extension(code, options=(option,)).f[1, 1](x)
    assert x.tolist() == [1.5, 1.5]


def test_each_kernel_of_a_macro_has_its_name():
    assert list(cupyops.extension(RIGHT["a macro that defines kernels"])) == ["add_kernel", "sub_kernel"]
    assert list(cupyops.extension(RIGHT["a macro that pastes names"])) == ["add_kernel"]


@pytest.mark.parametrize("code", ["", "\n \n", "// nothing", HEAD + "void add(at::Tensor x) { x.add_(1); }\n"])
def test_a_file_without_kernels_has_none(tmp_path, code):
    path = tmp_path / "x.cu"
    path.write_text(code)
    ext = cupyops.extension(path)
    assert list(ext) == []
    with pytest.raises(AttributeError, match="has no kernel add_kernel, expected one of: none, it has none"):
        ext.add_kernel  # noqa: B018


def test_kernels_of_one_name_are_told_apart():
    """By a number; a declaration has the name of what it declares, and a device function of that name is called."""
    declared = "__global__ void add_kernel(double* x, int n);\n"
    twice = "__device__ double add_kernel(double x) { return x * 2; }\n"
    other = KERNEL.replace("float", "double").replace("+= 1", "+= add_kernel(2.0)")
    ext = cupyops.extension(HEAD + KERNEL + declared + twice + other)
    assert list(ext) == ["add_kernel", "add_kernel_2"]
    x, y = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    with cupyops.simulate():
        ext.add_kernel[1, 32](x, 2)
        ext.add_kernel_2[1, 32](y, 2)
    assert x.tolist() == [1, 1, 0] and y.tolist() == [4, 4, 0]


@pytest.mark.parametrize(
    "content, said",
    [
        (FILE.encode() + b"\0", r"x.cu:\d+: '\\x00' has no place in CUDA C"),
        (b"// gr\xf6\n" + FILE.encode(), "is not UTF-8 text"),
        ((FILE + "}\n").encode(), "x.cu:6: error: expected a declaration"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, said):
    path = tmp_path / "x.cu"
    path.write_bytes(content)
    with cupyops.simulate(), pytest.raises(cupyops.CupyopsError, match=said):
        cupyops.extension(path).add_kernel[1, 32](torch.zeros(3), 2)


COMPARE = """
#include <torch/extension.h>
template <typename scalar_t>
__global__ void compare_kernel(const scalar_t* x, const scalar_t* y, scalar_t limit, int* found) {
  const scalar_t a = x[threadIdx.x], b = y[threadIdx.x];
  int bits = (a < b) | (a <= b) << 1 | (a > b) << 2 | (a >= b) << 3 | (a == b) << 4 | (a != b) << 5;
  bits |= (a < 0) << 6 | (a > 0.5f) << 7 | (0.5 >= b) << 8 | (a == 1) << 9 | (a < 1u) << 10 | (a < limit) << 11;
  found[threadIdx.x] = bits;
}
"""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_half_types_compare_as_numbers_do(dtype):
    kernel = cupyops.extension(COMPARE).compare_kernel
    x, y = torch.tensor([1.0, 2, torch.nan, -0.0, 0.25, -3]), torch.tensor([1.0, 1, 2, 0, 5, torch.inf])
    found = torch.zeros(6, dtype=torch.int32)
    with cupyops.simulate():
        kernel[1, 6](x.to(dtype), y.to(dtype), 0.5, found, scalar_t=dtype)
    each = [x < y, x <= y, x > y, x >= y, x == y, x != y, x < 0, x > 0.5, y <= 0.5, x == 1, x < 1, x < 0.5]
    assert found.tolist() == sum(one.int() << place for place, one in enumerate(each)).tolist()


SCALE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <typename T> __global__ void scale(T* x, const T by) { x[threadIdx.x] = (float)x[threadIdx.x] * (float)by; }
"""


@pytest.mark.parametrize("extension", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_number_for_a_half_parameter(dtype, extension):
    """It is rounded as PyTorch rounds it; what is no number is refused by name."""
    kernel = cupyops.Kernel(SCALE, "scale<T>", extension=extension)
    x = torch.arange(4).to(dtype)
    with cupyops.simulate():
        for _ in range(4):
            kernel[1, 4](x, 1.1, T=dtype)
        kernel[1, 4](x, 2, T=dtype)
        with pytest.raises(cupyops.LaunchError, match="argument 2 of 2, parameter .* got 'a' .*, expected a number"):
            kernel[1, 4](x, "a", T=dtype)
    y = torch.arange(4).to(dtype)
    for by in (1.1, 1.1, 1.1, 1.1, 2):
        y = (y.float() * torch.tensor(by, dtype=dtype).float()).to(dtype)
    assert torch.equal(x, y)
