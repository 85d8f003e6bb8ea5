"""The types of parameters, read from the symbols that NVRTC gives."""

import re

import pytest

from cupyops._kernel.compile import compiler, mangled, source
from cupyops._kernel.compile.declarations import parameters
from cupyops.errors import CompileError

HALF = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
TRAITS = "template <typename T> struct Traits { typedef float type; T a[2]; };\n"
SPACE = "namespace n { struct A { int a; }; template <typename T> struct B { T b; }; }\n"

# the text, the kernel, what it takes
CASES = {
    "plain": ("__global__ void f(float* y, const int* x, long long n) {}", "f", "float*, const int*, long long"),
    "typedef": ("typedef float real; __global__ void f(real* y, const real* x) {}", "f", "float*, const float*"),
    "using": ("using P = const double*; __global__ void f(P x, P* y) {}", "f", "const double*, const double**"),
    "const typedef": ("typedef const int ci; __global__ void f(ci* x, ci n) {}", "f", "const int*, int"),
    "macro": ("#define real double\n__global__ void f(real* y) {}", "f", "double*"),
    "C": ('using real = float; extern "C" __global__ void f(real* y, int n) {}', "f", "float*, int"),
    "C block": ('typedef short s; extern "C" {\n__global__ void f(s* y) {}\n}', "f", "short*"),
    "pointers": (
        "__global__ void f(const float* const* x, float** y, float* const z, volatile int* w) {}",
        "f",
        "const float* const*, float**, float*, int*",
    ),
    "arrays": (
        "__global__ void f(float (*x)[3], const int (*y)[2][2], double z[]) {}",
        "f",
        "float*, const int*, double*",
    ),
    "built in": (
        "__global__ void f(bool* a, char* b, signed char* c, unsigned char* d, short* e, unsigned short* f, int* g, "
        "unsigned* h, long* i, unsigned long* j, long long* k, unsigned long long* l, void* m, size_t n) {}",
        "f",
        "bool*, char*, signed char*, unsigned char*, short*, unsigned short*, int*, unsigned int*, long*, unsigned long*, "
        "long long*, unsigned long long*, void*, unsigned long",
    ),
    "half": (
        HALF + "__global__ void f(half* x, __nv_bfloat16* y, half2* z) {}",
        "f",
        "__half*, __nv_bfloat16*, __half2*",
    ),
    "vectors": ("typedef float4 v; __global__ void f(v* x, const uint2* y) {}", "f", "float4*, const uint2*"),
    "template": (
        "template <typename T, int N> __global__ void f(const T* x, T* y, T n) {}",
        "f<double, 4>",
        "const double*, double*, double",
    ),
    "repeated": (
        SPACE
        + "template <typename T, bool B> __global__ void f(n::A* x, T o, n::A* y, T* z, const n::A* w, n::B<T>* v) {}",
        "f<n::A, true>",
        "n::A*, n::A, n::A*, n::A*, const n::A*, n::B<n::A>*",
    ),
    "namespaces": (
        "namespace a { namespace b { template <typename T> __global__ void f(T* x, const T* y) {} } }",
        "a::b::f<int>",
        "int*, const int*",
    ),
    "member type": (
        TRAITS + "template <typename T> __global__ void f(typename Traits<T>::type* x, Traits<T> t, T* y) {}",
        "f<double>",
        "float*, Traits<double>, double*",
    ),
    "decltype": (
        "template <int> struct A {}; template <typename T, int N> __global__ void f(decltype(T() + 1)* x, A<N + 1> a) {}",
        "f<float, 3>",
        "float*, A<4>",
    ),
    "pack": ("template <typename... T> __global__ void f(T*... x) {}", "f<float, int>", "float*, int*"),
    "of a template": (
        "template <typename T> struct V { T a[4]; };\n"
        "template <typename T, template <typename> class W> __global__ void f(W<T>* x, const W<T>* y, T* z) {}",
        "f<float, V>",
        "V<float>*, const V<float>*, float*",
    ),
    "alias of a pointer": (
        "template <typename T> using P = T*;\n"
        "template <typename T, template <typename> class W> __global__ void f(W<T> x, T* y) {}",
        "f<float, P>",
        "float*, float*",
    ),
    "internal": ("static __global__ void f(unsigned char* x) {}", "f", "unsigned char*"),
    "comment at the end": ('extern "C" __global__ void f(float* x) {}  // the end', "f", "float*"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("arch", ["sm_80", "compute_90"])
def test_what_the_compiler_understood(case, arch):
    text, name, expected = CASES[case]
    binary, _ = compiler.compile(source.load(text + "\n"), name, arch)
    assert binary.types == tuple(expected.split(", "))


UNKNOWN = ["f", "", "_Z", "_Z1", "_Z1fP", "_Z1fS5_", "_Z1fT_", "_Z1fIXplT0_Li1EEEvv", "_ZN1aE", "_Z1fq", "_Z1fR1a"]


@pytest.mark.parametrize("symbol", UNKNOWN)
def test_what_it_does_not_know_it_does_not_guess(symbol):
    assert mangled.parameters(symbol) is None


def test_no_parameters():
    assert mangled.parameters("_Z1fv") == ()


@pytest.mark.parametrize("case", CASES)
def test_what_was_asked_is_not_in_the_ptx(case):
    """The compiler is asked in the kernel's own program, by a kernel of which nobody is to see anything."""
    text, name, _ = CASES[case]
    binary, _ = compiler.compile(source.load(text + "\n"), name, "sm_80")
    assert "cupyops_types_" not in binary.ptx
    assert re.findall(r"\.entry\s+(\S+?)\(", binary.ptx).count(binary.symbol) == 1


@pytest.mark.parametrize("end", ["#if 0", "namespace more {} // \\", "/*", "template <int> struct S {};"])
def test_a_text_that_ends_otherwise(end):
    """A kernel whose symbol tells its types has them whatever follows; one that does not compile says why by itself."""
    text = source.load(f"__global__ void f(float* x, int n) {{}}\n{end}\n")
    if end.startswith(("#if", "/*")):
        with pytest.raises(CompileError, match="endif|comment"):
            compiler.compile(text, "f", "sm_80")
    else:
        assert compiler.compile(text, "f", "sm_80")[0].types == ("float*", "int")


def test_an_error_is_of_the_text_alone():
    with pytest.raises(CompileError) as caught:
        compiler.compile(source.load("__global__ void f(float* x) { y }\n"), "f", "sm_80")
    assert "cupyops_types_" not in str(caught.value) and 'identifier "y" is undefined' in str(caught.value)


def test_types_are_kept_with_the_kernel(tmp_path, monkeypatch):
    """Those of a kernel whose symbol does not tell: what is found in the cache knows as much as what is compiled."""
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "cache"))
    text = source.load('typedef float real; extern "C" __global__ void kept_types(real* y) {}\n')
    assert compiler.build(text, "kept_types", "sm_80").types == ("float*",)
    compiler._memory.clear()
    again = compiler.build(text, "kept_types", "sm_80")
    assert again.origin == "cache" and again.types == ("float*",)


def read(text, base, name=None):
    loaded = source.load(text)
    return parameters(loaded, base, compiler.compile(loaded, name or base, "sm_80")[0])


def test_names_are_those_of_the_text():
    assert read("__global__ void f(float (*x)[3], int n) {}\n", "f") == [("float*", "x"), ("int", "n")]


def test_of_several_kernels_of_a_name_the_one_that_was_compiled():
    text = (
        "#ifdef OTHER\n__global__ void f(double* other) {}\n#else\n__global__ void f(float* this_one) {}\n#endif\n"
        "namespace a { __global__ void f(float* x, int n) {} }\nnamespace b { __global__ void f(int* k) {} }\n"
    )
    assert read(text, "f") == [("float*", "this_one")]
    assert read(text, "a::f") == [("float*", "x"), ("int", "n")]
    assert read(text, "b::f") == [("int*", "k")]


@pytest.mark.parametrize(
    "text",
    [
        "__global__ void f(float* x,\n#ifdef OTHER\n  double* y\n#else\n  int n\n#endif\n) {}\n",
        "#define TAKES float *x, int n\n__global__ void f(TAKES) {}\n",
        "#define KERNEL(name, T) __global__ void name(T* x, int n) {}\nKERNEL(f, float)\n",
    ],
)
def test_what_cannot_be_read_is_called_by_its_place(text):
    assert read(text, "f") == [("float*", "argument_1"), ("int", "argument_2")]
