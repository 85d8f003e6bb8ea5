"""Signatures, and C as PyTorch: each function and conversion as the kernel has it, and errors that show the line."""

import contextlib
import math

import numpy as np
import pytest
import torch

import cupyops
from cupyops._expression import references
from cupyops._expression.declaration import NAMESPACE, parse
from cupyops._expression.expressions import KNOWN
from cupyops._expression.syntax import Body
from cupyops._expression.values import FLOATING, FLOATING_TWO, TRUTH
from cupyops.errors import InputError


def translated(signature, text):
    """The reference of a body."""
    declaration = parse(signature)
    return references.forward(declaration, Body(f"{declaration.short}.forward", text))


def test_a_signature_in_all_its_parts():
    found = parse(
        "lib::f(bool[] mask, T x,\n  int64[] i, float scale = 1.5f, int k = 0x10, bool on=true) -> T y, half z"
    )
    assert found.name == "lib::f" and found.short == "f"
    assert [one.name for one in found.parameters] == ["mask", "x", "i", "scale", "k", "on"]
    assert [one.name for one in found.tensors] == ["x", "mask", "i"]  # that of type T tells dtype and device
    assert [one.dtype for one in found.tensors] == [None, torch.bool, torch.int64]
    assert [one.default for one in found.scalars] == [1.5, 16, True]
    assert [one.name for one in found.differentiable] == ["x"]
    assert [one.dtype for one in found.outputs] == [None, torch.float16]


def test_a_name_without_a_namespace():
    assert parse("f(T x) -> T y").name == f"{NAMESPACE}::f"


@pytest.mark.parametrize(
    "signature, said",
    [
        ("f(T x)", "expected the form"), (3, "expected the form"), ("f(float x) -> T y", "no parameter is of type T"),
        ("f(T x, what z) -> T y", "'what'"), ("f(T x, int8 z) -> T y", "int8[] z"),
        ("f(T x, float[] z) -> T y", "write T z"), ("f(T x) -> what y", "'what' is no type of a tensor"),
        ("f(T lambda) -> T y", "Python's own"), ("f(T double) -> T y", "cannot be a name in C"),
        ("f(T x, T x) -> T y", "declared twice"), ("f(T n) -> T y", "is kept for"),
        ("f(T x = 1) -> T y", "has no default"), ("f(T x) -> T y = 1", "has no default"),
        ("f(T x, float a = q) -> T y", "'q' is no default"),
        ("f(T x, float a = 1, int b) -> T y", "without a default"), ("f(T) -> T y", "cannot read 'T'"),
    ],
)  # fmt: skip
def test_a_signature_that_cannot_be_read(signature, said):
    with pytest.raises(InputError) as caught:
        parse(signature)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "c, cuda",
    [
        ("y = 0.5 * x", "y = A(0.5) * x;"),
        ("y = 1e-3f + .5F", "y = A(1e-3) + A(.5);"),
        ("float s = expf(x1)", "A s = exp(x1);"),
        ("y = erf(x) + erff(x)", "y = erf(x) + erf(x);"),
        ("y = x > 0 ? INFINITY : 2; // why", "y = x > 0 ? A(INFINITY) : 2;"),
        ("y = 0x1f + 10 + i2e3", "y = 0x1f + 10 + i2e3;"),
    ],
)
def test_literals_are_of_the_type_computed_in(c, cuda):
    assert Body("f.forward", c).cuda == cuda


X = torch.tensor([-2.5, -0.5, 0.0, 0.5, 1.5, 7.0])
I = torch.tensor([-7, -2, -1, 1, 3, 8])  # noqa: E741


@pytest.mark.parametrize(
    "c, expected",
    [
        ("y = i / 2", [-3, -1, 0, 0, 1, 4]),
        ("y = i % 3", [-1, -2, -1, 1, 0, 2]),
        ("y = i / 2.0", (I / 2).tolist()),
        ("y = 7 / 2 * x", (3 * X).tolist()),
        ("y = -7 / 2 + -7 % 3", [-4.0] * 6),
        ("y = (int)x", [-2, 0, 0, 0, 1, 7]),
        ("y = int(x) + 0.5", [-1.5, 0.5, 0.5, 0.5, 1.5, 7.5]),
        ("y = (x > 0) + (x > 1)", [0, 0, 0, 1, 2, 2]),
        ("y = !x", [0, 0, 1, 0, 0, 0]),
        ("y = x && i > 0 || x < -1", [1, 0, 0, 1, 1, 1]),
        ("y = round(x)", [-3, -1, 0, 1, 2, 7]),
        ("y = rint(x)", [-2, 0, 0, 0, 2, 7]),
        ("y = (i & 3) + (i << 1) + (~i ^ 1)", [(i & 3) + (i << 1) + (~i ^ 1) for i in I.tolist()]),
        ("bool b = x; y = b;", [1, 1, 0, 1, 1, 1]),
        ("auto b = i; b /= 2; b++; y = b;", [-2, 0, 1, 1, 2, 5]),
        ("double d = 0.1; y = d;", [0.1] * 6),
        ("y = 010 + 0x10 + true", [25] * 6),
        ("y = fma(x, 2, k)", (2 * X + 5).tolist()),
        ("int q = k / 2; { int q2 = q * q; y = q2; }", [4] * 6),
        ("if (x > 1) y = 1; else if (x > 0) { y = 2; } else y = 3;", [3, 3, 3, 2, 1, 1]),
        ("y = 0; if (x > 1) { y = k; k = 1; } y += k;", [5, 5, 5, 5, 6, 6]),
        ("y = x > 1 ? i : 0.5", [0.5, 0.5, 0.5, 0.5, 3, 8]),
        ("y = 1e300f * 1e300", [math.inf] * 6),
    ],
)
def test_means_what_it_means_in_c(c, expected):
    y = translated("f(T x, int64[] i, int k) -> T y", c)(X.double(), I, 5)
    torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float64))


def test_any_name_may_be_a_parameter_s():
    """Those of what the translation calls too."""
    f = translated(
        "number(T torch, int number, float device, T c, bool guard) -> T inf", "inf = round(torch) / c + number"
    )
    assert f(torch.tensor([4.5]), torch.tensor([0.0]), 1, 1.0, True).item() == math.inf


def test_halves_are_computed_in_float_and_rounded_once():
    f = translated("f(T x) -> T y", "float s = x * x; y = s / 300;")
    x = torch.tensor([300.0, 7.0], dtype=torch.float16)
    assert torch.equal(f(x), (x.float() ** 2 / 300).half())
    assert f(torch.tensor([0.1], dtype=torch.float64)).item() == 0.1 * 0.1 / 300


def test_a_result_has_the_whole_shape_and_memory_of_its_own():
    x, w = torch.randn(3, 1), torch.randn(4)
    y = translated("f(T x, T w) -> T y", "y = x")(x, w)
    assert torch.equal(y, x.expand(3, 4)) and y.is_contiguous()
    same = translated("f(T x) -> T y", "y = x")(x)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    "c",
    ["y = x > 0 ? log(x) : 0", "if (x > 0) { float r = log(x); y = r; } else y = 0;", "y = x <= 0 ? 0 : sqrt(x) / x"],
)
def test_a_branch_that_is_not_taken_has_no_gradient(c):
    """Not even an infinite one times 0."""
    x = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    f = translated("f(T x) -> T y", c)
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    assert grad[0] == 0 and grad[1].isfinite() and grad[1] != 0
    tangent = torch.func.jvp(f, (x.detach(),), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, grad)


EVERY = {name: f"{name}(x)" for name in (*FLOATING, *TRUTH)} | {name: f"{name}(x, w)" for name in FLOATING_TWO}
EVERY |= {"max": "max(x, w)", "min": "min(w, x)", "abs": "abs(x)", "fma": "fma(x, w, 0.25)"}


def test_every_function_is_that_of_the_kernel():
    """In one kernel, fp32 and special values; also of integers, where C computes in double."""
    assert set(EVERY) == KNOWN
    names = [f"y{index}" for index in range(len(EVERY))]
    outputs = ", ".join(f"T {name}" for name in names)
    body = "; ".join(f"{name} = {call}" for name, call in zip(names, EVERY.values()))
    body += "; z = pow(x, 2) + pow(2, w) + max(x, 1) + sqrt(k) + log(7) + min(k, 2)"
    op = cupyops.elementwise(f"every(T x, T w, int k) -> {outputs}, T z", body, dtypes=torch.float32)
    special = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -1.0, 3.0, -7.25, math.inf, -math.inf, math.nan]
    x = torch.tensor(special).repeat_interleave(len(special))
    w = torch.tensor(special).repeat(len(special))
    expected = op(x, w, 3)
    with cupyops.simulate():
        found = op(x, w, 3)
    for name, ours, theirs in zip([*EVERY, "integers"], found, expected):
        assert torch.allclose(ours, theirs, rtol=3e-6, atol=1e-6, equal_nan=True), name


@pytest.mark.parametrize("exponent", ["0.5", "-0.5", "2", "3", "-1", "-2", "0.0", "1.5", "0.25 + 0.25"])
def test_a_power_is_that_of_c(exponent):
    """Also of an exponent of which PyTorch takes a root: a number in the text means what it means in a tensor."""
    op = cupyops.elementwise("power(T x) -> T y", f"y = pow(x, {exponent})", dtypes=torch.float32)
    x = torch.tensor([-math.inf, math.inf, math.nan, -2.0, -0.0, 0.0, 1.0, 4.0], requires_grad=True)
    truth = torch.pow(x.detach().double(), torch.full_like(x, eval(exponent), dtype=torch.double)).float()
    outcomes = []
    for where in (contextlib.nullcontext(), cupyops.simulate()):
        with where:
            y = op(x)
            torch.testing.assert_close(y, truth, equal_nan=True)
            assert torch.equal(y.signbit()[~truth.isnan()], truth.signbit()[~truth.isnan()])
            outcomes += torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(*outcomes, equal_nan=True)


@pytest.mark.parametrize(
    "c, said",
    [
        ("y = x;\nz = 1;", "f.forward:2: 'z' is neither a parameter nor declared (there are x, y)"),
        ("y = x;\ny = sin(z);", "  2 | y = sin(z);"),
        ("y = sine(x)", "the function 'sine'"),
        ("y = pow(x)", "pow takes 2 arguments, got 1"),
        ("y = x % 2", "% is for integers; fmod"),
        ("if (x > 0) y = 1;", "y is not assigned, or not in every case"),
        ("float s; y = s;", "'s' is read before it is assigned"),
        ("y = x +", "not C that can be read"),
        ("y = x }", "braces do not match"),
        ("for (int i = 0; i < 3; ++i) y = x;", "a for loop is not translated to PyTorch; give reference="),
        ("unsigned u = 1; y = u;", "the type 'unsigned'"),
        ("y = 1u", "unsigned numbers"),
        ("float x = 1; y = x;", "'x' is declared already"),
        ("x + 1", "not a statement that does anything"),
        ("float a[2]; y = x;", "other than of a plain variable"),
        ("*x = 1", "assignment to something other than a name"),
        ("y = *x", "'*' inside an expression"),
        ("y = (float*)x", "cast to a pointer"),
        ("y = 'c'", "is no number"),
        ("#define y 1", "preamble="),
        ("", "expected C"),
        (None, "expected C"),
    ],
)
def test_what_cannot_be_translated_is_told_at_the_definition(c, said):
    with pytest.raises(InputError) as caught:
        translated("f(T x) -> T y", c)
    assert said in str(caught.value)


def test_numbers_are_any_that_python_has():
    f = cupyops.elementwise("numbers(T x, float s, int k = 2, bool on = false) -> T y", "y = on ? x * s : x * k")
    x = torch.ones(2)
    assert f(x, np.float32(3.0), on=np.bool_(True)).tolist() == [3, 3] and f(x, 1, np.int64(4)).tolist() == [4, 4]
    for bad, said in (
        (lambda: f(x, "s"), "s is 's' (str), expected a number"),
        (lambda: f(x, 1.0, 0.5), "k is 0.5 (float), expected an integer"),
        (lambda: f(x, 1.0, 2**31), "expected an integer of 32 bits"),
        (lambda: f(x, 1.0, 1, 1), "on is 1 (int), expected a bool"),
        (lambda: f(x, 10**400), "expected a number that fits double"),
    ):
        with pytest.raises(InputError) as caught:
            bad()
        assert said in str(caught.value)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 's'"):
        f(x)
