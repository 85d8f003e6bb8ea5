"""What a kernel takes: the C signature of its text, the arguments checked against it, the parameters laid out."""

import struct

import numpy as np
import pytest
import torch

from cupyops._kernel.compile import compiler, source
from cupyops._kernel.compile.binary import Parameter
from cupyops._kernel.compile.declarations import function
from cupyops._kernel.launch import signature
from cupyops._kernel.launch.ctype import C_NAMES, c_token, vector_alignment
from cupyops._kernel.launch.signature import Argument
from cupyops.errors import CompileError, LaunchError


def declared(parameters):
    return function(source.load(f"__global__ void f({parameters}) {{}}\n"), "f").parameters


@pytest.mark.parametrize(("value", "token"), [
    (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"), (torch.float32, "float"),
    (torch.float64, "double"), (torch.int64, "long long"), (torch.uint8, "unsigned char"), (torch.bool, "bool"),
    (True, "true"), (False, "false"), (7, "7"), (-1, "-1"), ("Add", "Add"), ("::ns::Add_2", "::ns::Add_2"),
])  # fmt: skip
def test_tokens(value, token):
    assert c_token(value) == token


def test_the_dtype_table_is_what_the_compiler_says():
    """Each C type has the size of its dtype."""
    pairs = list(C_NAMES.items())
    checks = "".join(f"static_assert(sizeof({name}) == {dtype.itemsize});\n" for dtype, name in pairs)
    text = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{checks}__global__ void f(int* x) {{}}\n"
    compiler.compile(source.load(text), "f", "sm_80")


def test_vector_types_are_aligned_as_the_compiler_says():
    elements = ("char", "uchar", "short", "ushort", "int", "uint", "longlong", "ulonglong", "float", "double")
    names = [f"{element}{count}" for element in elements for count in range(1, 5)] + ["__half2", "__nv_bfloat162"]
    checks = "".join(f"static_assert(alignof({n}) == {vector_alignment(n)});\n" for n in names)
    text = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{checks}__global__ void f(int* x) {{}}\n"
    compiler.compile(source.load(text), "f", "sm_80")
    assert [vector_alignment(name) for name in ("float", "Pair", "float5", "float4x", "T")] == [1] * 5


@pytest.mark.parametrize("parameter", [
    "float* const x", "const float* const x", "const float* const __restrict__ x", "float* volatile x",
    "float*const x",
])  # fmt: skip
def test_pointers_that_are_const_themselves(parameter):
    """`float* const x` is a pointer as any other."""
    ((ctype, name),) = declared(parameter)
    assert ctype.endswith("*") and name == "x"
    (argument,) = signature.join("f", declared(parameter), [Parameter("u64", 8, 8)], {})
    assert argument.kind == "pointer" and argument.dtype is torch.float32


def test_count_differs_from_the_ptx():
    with pytest.raises(CompileError, match="declares 1 parameters, the PTX has 2"):
        signature.join("f", [("int", "n")], [Parameter("u32", 4, 4)] * 2, {})


C_TYPES = {
    # C type: (kind, least, greatest)
    "char": ("integer", -(2**7), 2**7 - 1),
    "signed char": ("integer", -(2**7), 2**7 - 1),
    "unsigned char": ("integer", 0, 2**8 - 1),
    "uint8_t": ("integer", 0, 2**8 - 1),
    "short": ("integer", -(2**15), 2**15 - 1),
    "unsigned short": ("integer", 0, 2**16 - 1),
    "int": ("integer", -(2**31), 2**31 - 1),
    "const int": ("integer", -(2**31), 2**31 - 1),
    "unsigned": ("integer", 0, 2**32 - 1),
    "unsigned int": ("integer", 0, 2**32 - 1),
    "const unsigned": ("integer", 0, 2**32 - 1),
    "uint32_t": ("integer", 0, 2**32 - 1),
    "long": ("integer", -(2**63), 2**63 - 1),
    "long long": ("integer", -(2**63), 2**63 - 1),
    "int64_t": ("integer", -(2**63), 2**63 - 1),
    "unsigned long long": ("integer", 0, 2**64 - 1),
    "size_t": ("integer", 0, 2**64 - 1),
    "uint64_t": ("integer", 0, 2**64 - 1),
}
TYPEDEFS = """typedef unsigned char uint8_t; typedef unsigned uint32_t; typedef long long int64_t;
typedef unsigned long long uint64_t; struct Three { char v[3]; };
template <typename T> struct Acc { using type = float; };
template <typename T> using acc_t = typename Acc<T>::type;
"""


def arguments(parameters, types=None, template=""):
    text = source.load(f"{TYPEDEFS}{template}__global__ void f({parameters}) {{}}\n")
    name = f"f<{', '.join(types.values())}>" if types else "f"
    binary, _ = compiler.compile(text, name, "sm_80")
    return signature.join("f", function(text, "f").parameters, binary.parameters, types or {})


def test_integers_have_their_c_ranges():
    found = arguments(", ".join(f"{ctype} p{i}" for i, ctype in enumerate(C_TYPES)))
    for argument, (ctype, (kind, low, high)) in zip(found, C_TYPES.items(), strict=True):
        assert (argument.kind, argument.range) == (kind, (low, high)), ctype
        for value in (low, high, 0, np.int8(1), True):
            assert signature.checked("f", [argument], [value], 0) == [int(value)]
            assert struct.unpack(f"<{argument.format}", struct.pack(f"<{argument.format}", value)) == (value,)
        for value in (low - 1, high + 1, 2**100, -(2**100)):
            with pytest.raises(
                LaunchError, match=rf"parameter `{ctype} p\d+` got .*expected an integer that fits {ctype}"
            ):
                signature.checked("f", [argument], [value], 0)
            with pytest.raises((struct.error, OverflowError)):
                struct.pack(f"<{argument.format}", value)


@pytest.mark.parametrize("ctype", ["bool", "const bool"])
def test_bool(ctype):
    (argument,) = arguments(f"{ctype} flag")
    assert argument.kind == "bool" and argument.format == "?"
    for value in (True, False, 1, 0, np.bool_(True)):
        assert signature.checked("f", [argument], [value], 0) == [bool(value)]
    with pytest.raises(LaunchError, match="expected"):
        signature.checked("f", [argument], ["yes"], 0)


@pytest.mark.parametrize(
    ("ctype", "letter"), [("float", "f"), ("double", "d"), ("acc_t<float>", "f"), ("const float", "f")]
)
def test_floats(ctype, letter):
    (argument,) = arguments(f"{ctype} scale")
    assert (argument.kind, argument.format) == ("float", letter)
    for value in (0.5, 3, True, np.float32(0.25), np.float64(0.125), np.int64(2), float("inf")):
        assert signature.checked("f", [argument], [value], 0) == [float(value)]
    for value in ("1.0", None, torch.ones(()), [1.0]):
        with pytest.raises(LaunchError, match="expected a number"):
            signature.checked("f", [argument], [value], 0)


def test_float_for_an_integer_is_refused():
    (argument,) = arguments("int n")
    for value in (1.0, np.float32(1), "1", None, torch.ones((), dtype=torch.int32)):
        with pytest.raises(LaunchError, match="parameter `int n` got .*expected an integer"):
            signature.checked("f", [argument], [value], 0)


@pytest.mark.parametrize(("ctype", "size"), [("Three", 3), ("__half", 2), ("int2", 8), ("float4", 16)])
def test_structs(ctype, size):
    header = "#include <cuda_fp16.h>\n"
    text = source.load(f"{header}{TYPEDEFS}__global__ void f({ctype} s) {{}}\n")
    binary, _ = compiler.compile(text, "f", "sm_80")
    (argument,) = signature.join("f", function(text, "f").parameters, binary.parameters, {})
    assert (argument.kind, argument.size, argument.format) == ("struct", size, f"{size}s")
    content = np.arange(size, dtype=np.uint8)
    assert signature.checked("f", [argument], [content], 0) == [content.tobytes()]
    assert signature.checked("f", [argument], [np.repeat(content, 2)[::2]], 0) == [content.tobytes()]
    wrong = [np.zeros(size + 1, np.uint8), np.zeros(size - 1, np.uint8), b"x" * size, None, torch.zeros(size)]
    if ctype == "__half":
        assert signature.checked("f", [argument], [1.5], 0) == [np.float16(1.5).tobytes()]
    else:
        wrong.append(1)
    for value in wrong:
        with pytest.raises(LaunchError, match=f"expected (a number, or )?a NumPy array of {size} bytes"):
            signature.checked("f", [argument], [value], 0)


@pytest.mark.parametrize(("ctype", "dtype"), [
    ("float*", torch.float32), ("const double*", torch.float64), ("double const*", torch.float64),
    ("const volatile int*", torch.int32), ("long long*", torch.int64), ("unsigned char*", torch.uint8),
    ("bool*", torch.bool), ("short*", torch.int16),
])  # fmt: skip
def test_what_pointers_point_to(ctype, dtype):
    (argument,) = arguments(f"{ctype} x")
    assert (argument.kind, argument.dtype, argument.format) == ("pointer", dtype, "Q")
    tensor = torch.zeros(3, dtype=dtype)
    assert signature.checked("f", [argument], [tensor], -1) == [tensor.data_ptr()]
    other = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(LaunchError, match=f"got a tensor of torch.complex64 on cpu, expected a tensor of {dtype}"):
        signature.checked("f", [argument], [other], -1)


@pytest.mark.parametrize("ctype", ["void*", "const float4*", "unsigned*", "float**", "Three*"])
def test_pointers_to_other_types_take_any_tensor(ctype):
    (argument,) = arguments(f"{ctype} x")
    assert argument.kind == "pointer" and argument.dtype is None
    for tensor in (torch.zeros(2), torch.zeros(2, dtype=torch.int32)):
        assert signature.checked("f", [argument], [tensor], -1) == [tensor.data_ptr()]


def test_template_types():
    types = {"T": "unsigned char", "B": "bool"}
    found = arguments("const T* x, T n, B flag, acc_t<T> eps", types, "template <typename T, typename B> ")
    pointer, number, flag, eps = found
    assert pointer.dtype is torch.uint8
    assert number.kind == "integer" and number.range == (0, 255)
    assert flag.kind == "bool" and eps.kind == "float"


@pytest.fixture(scope="module")
def scale():
    return arguments("const float* x, float* y, float factor, int n")


def test_count(scale):
    x = torch.zeros(1)
    expected = r"f: 3 arguments given, 4 declared \(const float\* x, float\* y, float factor, int n\)"
    with pytest.raises(LaunchError, match=expected):
        signature.checked("f", scale, [x, x, 1.0], -1)
    with pytest.raises(LaunchError, match=r"int n\); given: tensor of torch.float32, None, float; give one for each$"):
        signature.checked("f", scale, [x, None, 1.0], -1)
    with pytest.raises(LaunchError, match="5 arguments given, 4 declared"):
        signature.checked("f", scale, [x, x, 1.0, 1, 1], -1)


def test_swapped(scale):
    x = torch.zeros(1)
    with pytest.raises(LaunchError, match="f: argument 4 of 4, parameter `int n` got 4.0 .float., expected an integer"):
        signature.checked("f", scale, [x, x, 3, 4.0], -1)


def test_the_remedy_for_a_dtype():
    """Another instance of a template; a parameter of a fixed type leaves nothing but to convert."""
    fixed, free = arguments("const float* x, T* y", {"T": "int"}, "template <typename T> ")
    other = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(LaunchError, match=r"torch.float32: convert it with .to\(torch.float32\)$"):
        signature.checked("f", [fixed], [other], -1)
    with pytest.raises(
        LaunchError, match=r"torch.int32: launch with T=torch.float64 for this tensor, or allocate it as"
    ):
        signature.checked("f", [free], [other], -1)


def test_not_a_tensor(scale):
    for value in (np.zeros(1, np.float32), 123456, "x", [1.0]):
        with pytest.raises(LaunchError, match=r"parameter `const float\* x` got .*expected a tensor or None"):
            signature.checked("f", scale, [value, torch.zeros(1), 1.0, 1], -1)


def test_another_device(scale):
    with pytest.raises(LaunchError, match="expected a tensor on the device of the first"):
        signature.checked("f", scale, [torch.zeros(1), torch.zeros(1), 1.0, 1], 0)


def test_tensor_without_storage(scale):
    x = torch.zeros(3)
    x.untyped_storage().resize_(0)
    with pytest.raises(LaunchError, match="expected a tensor with storage of its own"):
        signature.checked("f", scale, [x, torch.zeros(3), 1.0, 1], -1)


def test_empty_tensor_may_be_null(scale):
    assert signature.checked("f", scale, [torch.empty(0), torch.zeros(3), 1.0, 0], -1)[0] == 0


def argument(kind, size, align=None, ctype="int"):
    return Argument("p", ctype, kind, size, align or size)


def test_layout_aligns_each_parameter():
    found = [
        argument("bool", 1), argument("integer", 8), argument("integer", 2), argument("struct", 3, 1),
        argument("float", 4), argument("struct", 128, 64), argument("pointer", 8), argument("float", 8),
    ]  # fmt: skip
    letters, offsets = signature.layout(found)
    assert offsets == [0, 8, 16, 18, 24, 64, 192, 200]
    assert struct.calcsize(letters) == 208
    packed = struct.pack(letters, True, -2, 3, b"abc", 1.5, b"m" * 128, 2**63, 2.5)
    assert struct.unpack_from("<q", packed, 8) == (-2,) and struct.unpack_from("<f", packed, 24) == (1.5,)
    assert packed[64:192] == b"m" * 128 and struct.unpack_from("<Qd", packed, 192) == (2**63, 2.5)


def test_layout_of_nothing():
    assert signature.layout([]) == ("<", [])


@pytest.mark.parametrize(
    "declared, remedy",
    [
        ("float* y", r"allocate it as torch.float32, since a copy by .to\(\) would take what the kernel writes"),
        ("const float* y", r"convert it with .to\(torch.float32\)$"),
    ],
)
def test_the_remedy_for_an_output_of_another_dtype(declared, remedy):
    with pytest.raises(LaunchError, match=remedy):
        signature.checked("f", arguments(declared), [torch.zeros(1, dtype=torch.float64)], -1)


@pytest.mark.parametrize("const", ["", "const "])
@pytest.mark.parametrize("given, ctype, dtype", [("bool", "unsigned char", "uint8"), ("uint8", "bool", "bool")])
def test_bools_and_bytes_are_views_of_each_other(const, given, ctype, dtype):
    x = torch.zeros(1, dtype=getattr(torch, given))
    with pytest.raises(LaunchError, match=rf"give its .view\(torch.{dtype}\), which is the same memory$"):
        signature.checked("f", arguments(f"{const}{ctype}* y"), [x], -1)


def test_the_remedy_for_the_address_of_an_output():
    x = torch.zeros(8)[1:]
    with pytest.raises(LaunchError, match=r"give its .clone\(\), or have the kernel read single elements$"):
        signature.checked("f", arguments("const float4* y"), [x], -1)
    with pytest.raises(LaunchError, match=r"allocate it as a tensor of its own"):
        signature.checked("f", arguments("float4* y"), [x], -1)
