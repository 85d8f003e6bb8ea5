"""Arguments are checked against what the compiler made of the text: typedefs, macros and conditions are resolved."""

import pytest
import torch

import cupyops
from cupyops import Kernel
from cupyops.errors import CompileError, InputError, LaunchError

REALS = {
    "typedef": "typedef float real; __global__ void f(real* y, int n) { y[0] = n; }\n",
    "using": "using real = float; __global__ void f(real* y, int n) { y[0] = n; }\n",
    "define": "#define real float\n__global__ void f(real* y, int n) { y[0] = n; }\n",
    "typedef of the pointer": "typedef float* reals; __global__ void f(reals y, int n) { y[0] = n; }\n",
    "C": 'typedef float real; extern "C" __global__ void f(real* y, int n) { y[0] = n; }\n',
    "to arrays": "typedef float row[3]; __global__ void f(row* y, int n) { y[0][0] = n; }\n",
    "declared so": "__global__ void f(float (*y)[3], int n) { y[0][0] = n; }\n",
    "by a macro": "#define KERNEL(T) __global__ void f(T* y, int n) { y[0] = n; }\nKERNEL(float)\n",
    "under a condition": "__global__ void f(\n#if 0\n  int* x, int n\n#else\n  float* y, int n\n#endif\n) { y[0] = n; }\n",
    "in a namespace": "namespace a { typedef float real; __global__ void f(real* y, int n) { y[0] = n; } }\n",
}


@pytest.mark.parametrize("case", REALS)
def test_the_dtype_is_checked(case):
    f, y = Kernel(REALS[case], "a::f" if "namespace" in case else "f"), torch.zeros(3)
    with cupyops.simulate():
        f[1, 1](y, 7)
        assert y.tolist() == [7, 0, 0]
        for dtype in (torch.float64, torch.float16, torch.int32, torch.complex64):
            with pytest.raises(
                LaunchError, match=r"parameter `float\* \w+` got a tensor of torch.\w+ on cpu, expected a tens"
            ):
                f[1, 1](torch.zeros(3, dtype=dtype), 7)
        with pytest.raises(LaunchError, match="expected an integer"):
            f[1, 1](y, 7.5)


def test_a_template_that_chooses_the_type():
    text = (
        "#include <cuda_fp16.h>\ntemplate <typename T> struct Sum { typedef float type; };\n"
        "template <typename T> __global__ void f(const T* x, typename Sum<T>::type* y) { y[0] = float(x[0]); }\n"
    )
    f, x, y = Kernel(text, "f<T>"), torch.full((2,), 3.0, dtype=torch.float16), torch.zeros(2)
    with cupyops.simulate():
        f[1, 1](x, y, T=torch.float16)
        assert y.tolist() == [3, 0]
        with pytest.raises(LaunchError, match=r"parameter `float\* y` got a tensor of torch.float16"):
            f[1, 1](x, y.half(), T=torch.float16)


def test_other_typedefs():
    """Alignment of a vector, range of an unsigned number, and what is not written."""
    text = (
        "typedef float4 vec; typedef unsigned int u32; typedef const float* readable;\n"
        "__global__ void f(readable x, vec* y, u32 n) { y[0].x = x[0] + n; }\n"
    )
    f, x, y = Kernel(text, "f"), torch.ones(4), torch.zeros(9)
    with cupyops.simulate():
        before = x._version, y._version
        f[1, 1](x, y, 2**32 - 1)
        assert (x._version, y._version) == (before[0], before[1] + 1)
        assert y[0] == 2**32
        with pytest.raises(LaunchError, match="address is a multiple of 16"):
            f[1, 1](x, y[1:], 1)
        with pytest.raises(LaunchError, match="an integer that fits unsigned int"):
            f[1, 1](x, y, -1)


def test_values_in_the_name():
    """As CuPy writes them."""
    text = "struct Add {}; template <typename T, int N, typename Op> __global__ void f(T* y) { y[0] = N; }\n"
    for name, template in (("f<float, 4, ::Add>", {}), ("f<float, N, Op>", {"N": 4, "Op": "Add"})):
        y = torch.zeros(1)
        with cupyops.simulate():
            Kernel(text, name)[1, 1](y, **template)
            assert y.item() == 4
            with pytest.raises(LaunchError, match="got a tensor of torch.int32"):
                Kernel(text, name)[1, 1](y.int(), **template)


@pytest.mark.parametrize("text", ["__global__ void f(float* y) {}\n", "int x;\n"])
def test_a_kernel_that_nothing_makes_is_missed_at_once(text):
    with pytest.raises(
        InputError, match=r"has no __global__ function g; it has (f|none; a kernel begins with `__global__)"
    ):
        Kernel(text, "g").instance()


def test_a_kernel_that_no_macro_makes_is_missed_by_the_compiler():
    text = "#define MAKE(name) __global__ void name##_kernel(float* x) {}\nMAKE(one)\n"
    with cupyops.simulate(), pytest.raises(CompileError, match='identifier "two_kernel" is undefined'):
        Kernel(text, "two_kernel")[1, 1](torch.zeros(1))


def test_half_without_its_header():
    text = "template <typename T> __global__ void f(T* x) {}\n"
    with cupyops.simulate(), pytest.raises(CompileError, match="hint: #include <cuda_fp16.h> is missing"):
        Kernel(text, "f<T>")[1, 1](torch.zeros(1).half(), T=torch.float16)
