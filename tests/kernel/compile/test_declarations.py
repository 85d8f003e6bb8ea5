"""What a CUDA text declares: kernels, what they take, their template parameters."""

import pytest

from cupyops._kernel.compile import source
from cupyops._kernel.compile.declarations import function, functions
from cupyops.errors import InputError


def declared(parameters, head="__global__ void f"):
    return function(source.load(f"{head}({parameters}) {{}}\n"), "f").parameters


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("float* x", ("float*", "x")),
        ("float *x", ("float*", "x")),
        ("float*x", ("float*", "x")),
        ("const float* __restrict__ x", ("const float*", "x")),
        ("const float*__restrict__ x", ("const float*", "x")),
        ("float const * x", ("float const*", "x")),
        ("unsigned long long n", ("unsigned long long", "n")),
        ("acc_t<T> eps", ("acc_t<T>", "eps")),
        ("Pair<float, 3> p", ("Pair<float, 3>", "p")),
        ("const Pair<T, (1, 2)>* p", ("const Pair<T, (1, 2)>*", "p")),
        ("float x[4]", ("float*", "x")),
        ("const int x[]", ("const int*", "x")),
        ("float x[N]", ("float*", "x")),
        ("float** x", ("float**", "x")),
        ("const __grid_constant__ TensorMap map", ("const TensorMap", "map")),
        ("ns::Type value", ("ns::Type", "value")),
    ],
)
def test_declarations(parameter, expected):
    assert declared(parameter) == [expected]
    assert declared(f"int before, {parameter}, int after")[1] == expected


@pytest.mark.parametrize("parameters", ["", "void", " "])
def test_no_parameters(parameters):
    assert declared(parameters) == []


def test_comments_and_lines():
    text = """
    const float* x,   // (rows, columns), the input
    /* the output,
       as large */ float* y,
    int n /* , int forgotten */
    """
    assert declared(text) == [("const float*", "x"), ("float*", "y"), ("int", "n")]


@pytest.mark.parametrize(
    "head",
    [
        "__global__ void f",
        "__global__ void\nf",
        'extern "C" __global__ void f',
        "static __global__ void f",
        "__global__ __launch_bounds__(256) void f",
        "__global__ void __launch_bounds__(256, 2) f",
        "__global__ void __launch_bounds__(kThreads * (1 + 1)) __cluster_dims__(2, 1, 1) f",
        "template <typename T, int N = 3> __global__ void f",
        "template <typename T>\n__global__ void f ",
    ],
)
def test_heads(head):
    assert declared("float* x, int n", head) == [("float*", "x"), ("int", "n")]


def test_the_right_kernel_of_several():
    text = source.load(
        "// __global__ void f(int wrong)\n"
        "__device__ float f_helper(float x) { return x; }\n"
        "__global__ void f_more(double* more) {}\n"
        "__global__ void f(float* right) { f_helper(1.0f); }\n"
        "__global__ void not_f(char* not_this) {}\n"
    )
    assert function(text, "f").parameters == [("float*", "right")]
    assert function(text, "f_more").parameters == [("double*", "more")]


def test_a_definition_goes_before_a_declaration():
    text = source.load("__global__ void f(float*, int);\n__global__ void f(float* x, int n) {}\n")
    assert function(text, "f").parameters == [("float*", "x"), ("int", "n")]


def test_kernels_in_included_files(tmp_path):
    (tmp_path / "f.cuh").write_text("__global__ void f(short* x) {}\n")
    assert function(source.load('#include "f.cuh"\n', tmp_path), "f").parameters == [("short*", "x")]


def test_unknown_kernel_names_those_there_are():
    text = source.load(
        "__global__ void one(int* x) {}\n__global__ void __launch_bounds__(32) two(int* x) {}\n"
        "__global__ __launch_bounds__(32) void three(int* x) {}\nvoid four();\n"
    )
    with pytest.raises(InputError, match="has no __global__ function zero; it has one, three, two"):
        function(text, "zero")
    with pytest.raises(InputError, match="it has none"):
        function(source.load("int x;\n"), "zero")


def names(text):
    return [one.name for one in functions(source.Source("f.cu", text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__global__ void f(int* x);", ["f"]),
        ("__global__ void f(int* x) {} __global__ void g(int* x) {}", ["f", "g"]),
        ("__global__ BOUNDS(256) void f(int* x) { h(x); }", ["f"]),
        ("__global__ void BOUNDS(256) __cluster_dims__(2, 1, 1) f(int* x) {}", ["f"]),
        ("__global__ void f(int* x) noexcept(true) {}", ["f"]),
        ("template <typename T> __global__ void f(T* x) requires (sizeof(T) == 4) {}", ["f"]),
        ("void __global__ f(int* x) {}", ["f"]),
        ("__global__ void f(int* x) { if (x) g(x); }", ["f"]),
        ("// __global__ void f(int* x) {}\n__device__ void g(int* x) {}", []),
        ("template __global__ void f<float>(float* x);", []),
        ("__global__ void f(int* x { x[0] = 1; }", ["f"]),
    ],
)
def test_names(text, expected):
    assert names(text) == expected


def test_what_is_defined_and_what_declared():
    text = source.load("__global__ void f(int* x);\n__global__ void g(int* x)\n{}\n")
    assert [(one.name, one.is_defined) for one in functions(text)] == [("f", False), ("g", True)]
    with pytest.raises(InputError, match="has no __global__ function f; it has f, g"):
        function(text, "f")


def test_a_head_that_stands_twice_is_read_the_first_time():
    text = "__global__ void\n#ifdef A\nf(int* x)\n#else\nf(int* x, int n)\n#endif\n{}\n"
    assert function(source.load(text), "f").parameters == [("int*", "x")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ()),
        ("template <typename T>", (("T", True, False, ""),)),
        ("template <class T, int N = 4>", (("T", True, False, ""), ("N", False, True, "int"))),
        ("template <typename T = Pair<int, 3>, Op F = less>", (("T", True, True, ""), ("F", False, True, "Op"))),
        ("template <int N = (4 > 3), typename... Ts>", (("N", False, True, "int"), ("Ts", True, False, ""))),
        ("template <typename T>\nstatic __launch_bounds__(256)", (("T", True, False, ""),)),
        ("template <typename T> struct S { T v; };\n", ()),
    ],
)
def test_template_parameters(template, expected):
    found = function(source.load(f"{template} __global__ void f(int* x) {{}}\n"), "f").template
    assert found == expected


def test_defaults_stand_in_the_declaration():
    text = "template <int N = 4> __global__ void f(int* x);\ntemplate <int N> __global__ void f(int* x) {}\n"
    assert function(source.load(text), "f").template == (("N", False, True, "int"),)
