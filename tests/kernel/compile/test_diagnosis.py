"""Compile errors as an author sees them: the line, a caret, and a hint where NVRTC's words name no cure."""

import re

import numpy as np
import pytest
import torch

import cupyops
from cupyops._kernel.compile import backend, compiler, diagnosis, hints, source
from cupyops.errors import CompileError

ARCH = "sm_80"
SCALE = """
template <typename T> __global__ void scale(const T* x, T* y, T factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * factor;
}
"""


def error_of(text, name="bad<float>", folder=None):
    with pytest.raises(CompileError) as caught:
        compiler.compile(source.load(text, folder), name, ARCH)
    return str(caught.value)


def assert_caret_under(message, excerpt, token):
    """In the excerpt shown, the caret stands under the first letter of `token`."""
    lines = message.splitlines()
    index = next(i for i, line in enumerate(lines) if re.match(r"\s+\d+ \| ", line) and line.endswith(excerpt))
    assert lines[index + 1].index("^") == lines[index].index(token), "\n".join(lines[index : index + 2])


@pytest.mark.parametrize("indent", ["", "    ", "\t\t", "  \t "])
def test_error_shows_file_line_excerpt_and_caret(tmp_path, indent):
    path = tmp_path / "bad.cu"
    path.write_text(
        f"// a comment\ntemplate <typename T>\n__global__ void bad(T* x) {{\n{indent}x[0] = undefined_thing + 1;\n}}\n"
    )
    message = error_of(path)
    assert message.startswith(f"bad.cu: kernel bad<float> does not compile for {ARCH}")
    assert 'bad.cu:4: error: identifier "undefined_thing" is undefined' in message
    assert_caret_under(message, "x[0] = undefined_thing + 1;", "undefined_thing")


def test_error_in_a_template_names_its_arguments():
    text = (
        'template <typename T, int N> __device__ T g(T x) { static_assert(N < 4, "N is too big"); return x; }\n'
        "template <typename T> __global__ void bad(T* x) {\n  x[0] = g<T, 5>(x[0]);\n}\n"
    )
    message = error_of(text)
    assert "kernel bad<float>" in message and 'static assertion failed with "N is too big"' in message
    assert "[with T=float, N=5]" in message


def test_each_error_has_its_place():
    message = error_of("__global__ void bad(float* x) {\n  x[0] = one;\n  x[1] = 2;\n  x[2] = three;\n}\n", "bad")
    assert "<text>.cu:2: error" in message and "<text>.cu:4: error" in message and "<text>.cu:3:" not in message
    assert_caret_under(message, "x[0] = one;", "one")
    assert_caret_under(message, "x[2] = three;", "three")


def test_error_in_an_included_header_names_the_header(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "h.cuh").write_text("#pragma once\n\n__device__ float h(float x) { return x + missing; }\n")
    message = error_of('#include "inner/h.cuh"\n__global__ void bad(float* x) { x[0] = h(x[0]); }\n', "bad", tmp_path)
    assert 'inner/h.cuh:3: error: identifier "missing" is undefined' in message
    assert_caret_under(message, "__device__ float h(float x) { return x + missing; }", "missing")


def test_a_missing_semicolon_belongs_to_the_line_before():
    message = error_of("__global__ void bad(float* x) {\n  x[0] = 1  // one\n\n  // two\n  x[1] = 2;\n}\n", "bad")
    assert '<text>.cu:5: error: expected a ";"' in message
    assert "\n  hint: a ; is missing at the end of line 2" in message
    message = error_of("__global__ void bad(float* x) {\n  x[0] = 1 x[1] = 2;\n}\n", "bad")
    assert 'expected a ";"' in message and "hint:" not in message


def test_what_is_told_is_not_told_again():
    """NVRTC's log follows where it says more: a warning, an error in a header that the text does not hold."""
    bad = "__global__ void bad(float* x) {\n  int unused;\n  x[0] = one;\n}\n"
    assert "NVRTC's log:" not in error_of(bad.replace("int unused;", ""), "bad")
    told, _, log = error_of(bad, "bad").partition("\n\nNVRTC's log:\n")
    assert told.count('identifier "one" is undefined') == 1 and "one" not in log
    assert log.startswith('  <text>.cu(2): warning #177-D: variable "unused" was declared but never referenced\n')

    log = 'cuda.h(7): error: no\n  text\n  ^\n\n1 error detected in the compilation of "bad.cu".'
    told = diagnosis.explain(source.load(bad), "bad", ARCH, log)
    assert "\ncuda.h:7: error: no\n" in told and told.endswith("NVRTC's log:\n  cuda.h(7): error: no\n    text\n    ^")


def test_a_consequence_is_told_where_there_is_no_cause():
    """A parameter that cannot be read makes the kernel none, says NVRTC next."""
    message = error_of("template <typename T> __global__ void bad(T* x, acc_t<T> b) {}\n")
    assert "acc_t is not a template" in message and "Name expression" not in message
    assert "Name expression" in error_of("__device__ void bad(float* x) {}\n", "bad")


def test_catastrophic_error():
    message = error_of('#error "stop here"\n__global__ void bad(float* x) {}\n', "bad")
    assert "<text>.cu:1: catastrophic error" in message and "stop here" in message


def test_warnings_are_not_errors():
    message = error_of("__global__ void bad(float* x) {\n  int unused;\n  x[0] = one;\n}\n", "bad")
    message, _, log = message.partition("NVRTC's log")
    assert "<text>.cu:2:" not in message and "<text>.cu:3: error" in message and "error" not in log


def test_name_expression_that_fits_no_kernel():
    message = error_of("template <typename T> __global__ void bad(T* x) {}\n", "worse<float>")
    assert "kernel worse<float> does not compile" in message and "worse" in message


def test_explain_survives_any_log():
    text = source.load(SCALE)
    for log in ("", "nonsense", "file.cu(999): error: x", "(1): error: y", "a(b)(3): error: z\n ^", "\0\n^^^"):
        assert diagnosis.explain(text, "scale<float>", ARCH, log).startswith("<text>.cu: kernel scale<float>")


def body(code, before=""):
    return f"{before}\n__global__ void bad(float* x) {{ {code} }}\n"


HINTS = {
    "stdint": (body("x[0] = 1;", "#include <cstdint>"), "leave the line out and write limits as numbers, uint32_t as"),
    "math": (
        body("x[0] = 1;", "#include <cmath>"),
        "leave the line out: printf, assert and the functions of <cmath> are",
    ),
    "vector": (body("x[0] = 1;", "#include <vector>"), "NVRTC compiles device code alone"),
    "driver": (body("x[0] = 1;", "#include <cuda.h>"), "<cuda.h> is the driver's interface for host code"),
    "curand": (body("x[0] = 1;", "#include <curand_kernel.h>"), "nvidia-curand-cu12 and nvidia-cuda-cccl-cu12"),
    "curand's names": (body("curandState s;"), "#include <curand_kernel.h>, with the wheels of cuRAND"),
    "all of cub": (
        body("x[0] = 1;", "#include <cub/cub.cuh>"),
        "which NVRTC cannot compile; include what the kernel needs",
    ),
    "groups": (body("x[0] = 1;", "#include <cooperative_groups.h>"), "nvidia-cuda-cccl-cu12"),
    "cub": (body("x[0] = 1;", "#include <cub/block/block_reduce.cuh>"), "whose folder is found where it is installed"),
    "thrust": (body("x[0] = 1;", "#include <thrust/sort.h>"), "thrust has host code"),
    "wmma": (body("x[0] = 1;", "#include <mma.h>"), "nvidia-cuda-nvcc-cu12 (nvidia-cuda-crt for CUDA 13)"),
    "wmma's names": (body("nvcuda::wmma::fill_fragment(x, 1);"), "#include <mma.h> is missing"),
    "pytorch": (body("x[0] = 1;", "#include <torch/extension.h>"), "PyTorch's C++ types are for host code"),
    "infinity": (body("x[0] = INFINITY;"), "does not define INFINITY; write __int_as_float(0x7f800000)"),
    "limit": (body("x[0] = FLT_MAX;"), "does not define FLT_MAX; write 3.402823466e+38f"),
    "type": (
        body("uint32_t i = 0;"),
        "does not define uint32_t; write unsigned int, or `typedef unsigned int uint32_t;`",
    ),
    "half": (body("__half h;"), "#include <cuda_fp16.h> is missing"),
    "bfloat16": (body("nv_bfloat16 h;"), "#include <cuda_bf16.h> is missing"),
    "a constant": (
        body("x[0] = BLOCK_SIZE;"),
        "if Python decides this constant, give define={'BLOCK_SIZE': ...} to Kernel or extension "
        "(--option=-DBLOCK_SIZE=... to simulate)",
    ),
    "a constant with bars": (
        body("x[0] = _N_;"),
        "if Python decides this constant, give define={'_N_': ...} to Kernel",
    ),
    "common": (body("x[0] = to_acc(x[0]);"), '#include "cupyops.cuh" is missing, which declares it'),
    "common type": (body("", "__global__ void one(Vec<float, 4>* x) {}"), '#include "cupyops.cuh" is missing'),
    "c10": (body("c10::Half h;"), "PyTorch's C++ types are for host code"),
    "std": (body("x[0] = std::max(x[0], x[1]);"), "write max without `std::`"),
    "numeric_limits": (body("x[0] = std::numeric_limits<float>::max();"), "NVRTC has no <limits>; write the number"),
    "vector type": (body("std::vector<float> v;"), "NVRTC has no C++ library"),
    "stream": (body("std::cout << x[0];"), "only printf prints from a kernel"),
    "rand": (body("x[0] = rand();"), "there is no random number of the host's"),
    "runtime": (body("cudaMalloc(&x, 8);"), "called by the host, not by a kernel"),
    "cg": (body("cooperative_groups::this_grid().sync();"), "#include <cooperative_groups.h> is missing"),
    "unmarked": (body("x[0] = g(x[0]);", "float g(float a) { return a; }"), "write __device__ before a function"),
    "host": (body("x[0] = g(x[0]);", "__host__ float g(float a) { return a; }"), "write __device__ before a function"),
    "main": (body("x[0] = 0;", "int main() { return 0; }"), "leave out host code, main() and functions with <<<...>>>"),
    "extern C": ('extern "C" {\ntemplate <int N> __global__ void bad(float* x) {}\n}\n', 'leave extern "C" out'),
    "not a kernel": ("__device__ void bad(float* x) {}\n", "a kernel begins with `__global__ void`"),
    "overloads": ("__global__ void bad(float* x) {}\n__global__ void bad(int* x) {}\n", "two kernels have this name"),
    "a template": ("template <typename T> __global__ void bad(T* x) {}\n", "the kernel is a template"),
    "returns": ("__global__ int bad(float* x) { return 1; }\n", "a kernel returns nothing"),
    "half operator": (
        "#include <cuda_fp16.h>\n__global__ void bad(__half* x) { x[0] = x[0] * 2.0; }\n",
        "convert first",
    ),
    "an index of three numbers": (body("x[0] = x[threadIdx];"), "have members: threadIdx.x"),
    "a size that the launch decides": (
        body("__shared__ float s[blockDim.x]; x[0] = s[0];"),
        "declare `extern __shared__ float s[]` and launch kernel[grid, block, bytes]",
    ),
    "const": (body("*y = 1;", "__device__ const float* y;"), "leave const out of a pointer that the kernel writes"),
    "a power": (body("x[0] = x[1] ** 2;"), "C has no ** for powers: write x * x"),
    "a brace": ("__global__ void bad(float* x) { x[0] = 1;\n", "a } is missing, most likely of the { that the log"),
    "a tensor": ("__global__ void bad(Tensor x) {}\n", "a kernel takes T*"),
    "literal": (
        body(
            "x[0] = larger(x[0], 1.0);", "template <typename A> __device__ A larger(A a, A b) { return a > b ? a : b; }"
        ),
        "write 1.0f, or T(1)",
    ),
    "shared": (
        body("__shared__ float s[20000]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[threadIdx.x ^ 1];"),
        "kernel[grid, block, bytes]",
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_hint(case, monkeypatch):
    monkeypatch.setattr(backend, "library_includes", lambda: ())  # as where those wheels are not installed
    text, hint = HINTS[case]
    message = error_of(text, "bad<1>" if "template <int" in text else "bad")
    told, _, log = message.partition("NVRTC's log:")
    assert re.search(rf"^  hint: .*{re.escape(hint)}", told, re.MULTILINE), message
    assert "hint:" not in log


def test_a_hint_is_given_once():
    message = error_of(body("uint32_t a = 1; x[0] = (uint32_t) x[1];"), "bad")
    assert message.count("  hint: ") == 1 and message.count('identifier "uint32_t" is undefined') == 2


def test_what_needs_no_hint_has_none():
    assert "hint:" not in error_of(body("x[0] = undefined_thing;"), "bad")
    larger = "template <typename A> __device__ A larger(A a, A b) { return a > b ? a : b; }"
    assert "hint:" not in error_of(body("x[0] = larger(x[0], x);", larger), "bad")


def test_a_kernel_that_is_not_there_names_those_that_are():
    text = (
        "// __global__ void commented(float* x) {}\n"
        "__global__ void __launch_bounds__(256, 2) one(float* x) {}\n"
        "template <typename T>\n__global__\nvoid two(T* x) {}\n"
    )
    message = error_of(text, "three")
    assert "asked for: three; the text has: one, two<typename T>\n" in message
    assert message.count("asked for: ") == 1 and "with its namespace before it" in message
    assert "the text has: no __global__ function" in error_of("__device__ int one;\n", "one")


REAL = {
    **dict.fromkeys(("INFINITY", "HUGE_VALF", "HUGE_VAL"), np.inf),
    "NAN": np.nan,
    **{f"FLT_{name.upper()}": getattr(np.finfo(np.float32), name) for name in ("max", "tiny", "eps")},
    **{f"DBL_{name.upper()}": getattr(np.finfo(np.float64), name) for name in ("max", "tiny", "eps")},
    "M_PI": np.pi,
    "M_PI_2": np.pi / 2,
    "M_E": np.e,
    "M_LN2": np.log(2),
    "M_LOG2E": 1 / np.log(2),
    "M_SQRT2": np.sqrt(2),
    "M_SQRT1_2": np.sqrt(0.5),
    "M_2_SQRTPI": 2 / np.sqrt(np.pi),
}
RENAMED = {"FLT_TINY": "FLT_MIN", "FLT_EPS": "FLT_EPSILON", "DBL_TINY": "DBL_MIN", "DBL_EPS": "DBL_EPSILON"}


def limit(name):
    """What <climits> and <cstdint> say: of `UINT16_MAX`, 65535."""
    kind, _, end = name.rpartition("_")
    widths = {"CHAR": 8, "INT": 32, "LONG": 64, "LLONG": 64, "SIZE": 64}
    unsigned = kind.startswith("U") or kind == "SIZE"
    kind = kind.removeprefix("U")
    bits = widths.get(kind) or int(kind.removeprefix("INT"))
    if end == "BIT":
        return bits
    return 2**bits - 1 if unsigned else 2 ** (bits - 1) - 1 if end == "MAX" else -(2 ** (bits - 1))


def test_the_constants_that_hints_write_out_have_their_values():
    """Each runs in the simulator: real numbers as doubles, integers as 64 bits."""
    real = {RENAMED.get(name, name): float(value) for name, value in REAL.items()}
    whole = {name: limit(name) for name in hints.CONSTANTS if name not in real}
    assert real.keys() | whole.keys() == hints.CONSTANTS.keys()
    stores = [f"y[{i}] = {hints.CONSTANTS[name]};" for i, name in enumerate(real)]
    stores += [f"z[{i}] = {hints.CONSTANTS[name]};" for i, name in enumerate(whole)]
    code = f"__global__ void constants(double* y, long long* z) {{\n{' '.join(stores)}\n}}\n"
    y, z = torch.empty(len(real), dtype=torch.float64), torch.empty(len(whole), dtype=torch.int64)
    with cupyops.simulate():
        cupyops.Kernel(code, "constants")[1, 1](y, z)
    for name, found, expected in zip(real, y.tolist(), real.values()):
        assert found == pytest.approx(expected, rel=1e-15, nan_ok=True), name
    assert dict(zip(whole, (value % 2**64 for value in z.tolist()))) == {n: v % 2**64 for n, v in whole.items()}


def test_the_types_and_functions_that_hints_name_are_there():
    sizes = {"ssize_t": (8, True), "intptr_t": (8, True), "uintptr_t": (8, False), "uint": (4, False)}
    sizes |= {"uchar": (1, False), "ushort": (2, False), "ulong": (8, False)}
    for name in hints.TYPES.keys() - sizes.keys():
        sizes[name] = int(re.sub(r"\D", "", name)) // 8, not name.startswith("u")
    lines = [f"namespace bare {{ {' '.join(f'using ::{name};' for name in sorted(hints.BUILT_IN))} }}"]
    for name, (size, signed) in sizes.items():
        kind = hints.TYPES[name]
        lines.append(
            f'static_assert(sizeof({kind}) == {size} && (({kind}) -1 < 0) == {str(signed).lower()}, "{name}");'
        )
    for name, header in hints.HEADERS.items():
        lines += [f"#include <{header}>", f"__device__ {name} a_{name};"]
    compiler.compile(source.load("\n".join(lines) + "\n__global__ void f(float* x) {}\n"), "f", "sm_90")


def test_the_names_of_common_are_there():
    """Each is found by its header; what a header needs it includes itself, and the names of all lie beside each other."""
    names = hints._common()
    assert {"acc_t", "from_acc", "global_thread", "block_reduce", "Pair", "kWarp", "Vec"} <= names.keys()
    assert names["sigmoid"] == "common/elementwise/sigmoid.cuh"  # not that of elementwise, which has one for more types
    by_header = {}
    for name, header in names.items():
        by_header.setdefault(header, []).append(f"using ::{name};")
    for header in ("cupyops.cuh", "common/elementwise/sigmoid.cuh", "common/reduce/welford.cuh"):
        text = f'#include "{header}"\nnamespace bare {{ {" ".join(by_header[header])} }}\n'
        compiler.compile(source.load(text + "__global__ void f(float* x) {}\n"), "f", ARCH)
