"""Operators whose tensors are integers, masks, complex numbers or float8: kernels run, in any order of parameters."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor

import cupyops
from cupyops import InputError, LaunchError

SOURCE = """
extern "C" __global__ void dequantize(const signed char* q, const float* scale, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = scale[0] * q[i];
}
extern "C" __global__ void invert(const int* x, int* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = ~x[i];
}
extern "C" __global__ void negate(const bool* x, bool* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = !x[i];
}
extern "C" __global__ void pick(const long long* index, const float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = x[index[i]];
}
// x times w, or times the conjugate of w
extern "C" __global__ void times(const float2* x, const float2* w, float2* y, int n, bool conjugate) {
  int i = threadIdx.x;
  if (i >= n) return;
  const float2 a = x[i], b = make_float2(w[i].x, conjugate ? -w[i].y : w[i].y);
  y[i] = make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}
// float8_e5m2 is the upper byte of a float16
extern "C" __global__ void widen(const unsigned char* q, const float* scale, float* y, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  float value;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"((unsigned short)(q[i] << 8)));
  y[i] = scale[0] * value;
}
"""
KERNELS = {name: cupyops.Kernel(SOURCE, name) for name in ("dequantize", "invert", "negate", "pick", "times", "widen")}


def ran(kernel: str, *args) -> Tensor:
    *inputs, y = args
    KERNELS[kernel][1, 32](*inputs, y, y.numel())
    return y


def floats(q: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=torch.float32, device=q.device)


def dequantize(scale_first: bool = False, **options) -> cupyops.Operator:
    def backward(saved, grad_y, q, scale, needs_grad):
        found = None, (grad_y * q).sum().reshape(scale.shape)
        return found[::-1] if scale_first else found

    if scale_first:

        @cupyops.operator(toys.fresh(), **options)
        def op(scale: Tensor, q: Tensor) -> Tensor:
            return q * scale

        op.forward(lambda scale, q: (ran("dequantize", q, scale, floats(q)), ()))
    else:

        @cupyops.operator(toys.fresh(), **options)
        def op(q: Tensor, scale: Tensor) -> Tensor:
            return q * scale

        op.forward(lambda q, scale: (ran("dequantize", q, scale, floats(q)), ()))
    op.backward(backward)
    return op


def of(reference, kernel: str) -> cupyops.Operator:
    op = cupyops.operator(toys.fresh())(reference)
    op.forward(lambda x: (ran(kernel, x, torch.empty_like(x)), ()))
    return op


def inverse(x: Tensor) -> Tensor:
    return ~x


def product() -> cupyops.Operator:
    @cupyops.operator(toys.fresh())
    def op(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    def times(x, w, conjugate):
        y = torch.empty_like(x)
        KERNELS["times"][1, 32](x, w, y, x.numel(), conjugate)
        return y

    op.forward(lambda x, w: (times(x, w, False), ()))
    op.backward(lambda saved, grad_y, x, w: (times(grad_y, w, True), times(grad_y, x, True)))
    return op


def launched(op, *args) -> Tensor:
    """The call by kernels alone."""
    with cupyops.trace() as trace:
        y = op(*args)
    assert trace.routes() == {"simulator"}, f"\n{trace}"
    return y


def complex_pair() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return tuple(torch.randn(5, dtype=torch.complex64, generator=source, requires_grad=True) for _ in range(2))


@pytest.fixture(autouse=True)
def simulated():
    with cupyops.simulate():
        yield


Q = torch.arange(-4, 4, dtype=torch.int8)


@pytest.mark.parametrize("scale_first", [False, True])
def test_int8_weights_and_their_scale_in_either_order(scale_first):
    op, scale = dequantize(scale_first), torch.tensor([0.5], requires_grad=True)
    args = (scale, Q) if scale_first else (Q, scale)
    launched(op, *args)
    for _ in range(5):  # the fourth is replayed
        y = op(*args)
        assert torch.equal(y, Q * 0.5)
        assert torch.autograd.grad(y.sum(), scale)[0].item() == -4.0


@pytest.mark.parametrize("x", [torch.arange(-3, 4, dtype=torch.int32), torch.tensor([True, False, True])], ids=str)
def test_an_operator_of_integers_or_masks_alone(x):
    op = of(inverse, "negate" if x.dtype is torch.bool else "invert")
    assert torch.equal(launched(op, x), ~x)
    for other in (x, x.flip(0), x, x.flip(0), x):
        assert torch.equal(op(other), ~other) and not op(other).requires_grad


def test_indices_first():
    @cupyops.operator(toys.fresh())
    def op(index: Tensor, x: Tensor) -> Tensor:
        return x[index]

    op.forward(lambda index, x: (ran("pick", index, x, floats(index)), ()))
    index, x = torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = launched(op, index, x)
    assert y.tolist() == [3.0, 1.0, 3.0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0, 0.0, 2.0]  # of the reference


def test_float8_weights_and_their_scale():
    @cupyops.operator(toys.fresh())
    def op(q: Tensor, scale: Tensor) -> Tensor:
        return q.to(scale.dtype) * scale

    op.forward(lambda q, scale: (ran("widen", q.view(torch.uint8), scale, floats(q)), ()))
    q, scale = torch.tensor([1.0, -1.75, 0.5]).to(torch.float8_e5m2), torch.tensor([4.0])
    for _ in range(5):
        assert op(q, scale).tolist() == [4.0, -7.0, 2.0]
    assert launched(op, q, scale).tolist() == [4.0, -7.0, 2.0]


@pytest.mark.parametrize("change", [lambda g: g, torch.conj, lambda g: torch._neg_view(-g), lambda g: g[:1].expand(5)])
@pytest.mark.parametrize("compiled", [False, True])
def test_complex_gradients_are_pytorchs(change, compiled):
    op, (x, w) = product(), complex_pair()
    call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    grad = change(complex_pair()[0].detach().roll(1))
    for _ in range(1 if compiled else 5):
        found, expected = (torch.autograd.grad(f(x, w), (x, w), grad) for f in (call, torch.mul))
        torch.testing.assert_close(found, expected)


def test_second_derivatives_of_complex_numbers():
    def second(f):
        x, w = complex_pair()
        (first,) = torch.autograd.grad(f(x, w).abs().sum(), x, create_graph=True)
        return torch.autograd.grad(first.abs().sum(), (x, w))

    torch.testing.assert_close(second(product()), second(torch.mul))


@pytest.mark.parametrize("bit, note", [(torch.conj, "conjugate bit"), (torch._neg_view, "negative bit")])
def test_bits_in_the_inputs_take_the_reference(bit, note):
    op, (x, w) = product(), complex_pair()
    with cupyops.trace() as trace:
        y = op(bit(x), w)
    assert [(one.route, one.note) for one in trace.records] == [("reference", note)]
    torch.testing.assert_close(y, bit(x) * w)


def test_compiled_and_exported():
    op, scale = dequantize(), torch.tensor([0.5], requires_grad=True)
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(Q, scale)
    assert torch.equal(y, Q * 0.5) and torch.autograd.grad(y.sum(), scale)[0].item() == -4.0


@pytest.mark.parametrize("q", [Q, Q.float().to(torch.float8_e4m3fn)], ids=["int8", "float8"])
def test_autocast_casts_what_autocast_is_for(q):
    """Neither integers nor float8, whose scale stands beside them; half types and float32 alone."""
    seen = []

    @cupyops.operator(toys.fresh(), autocast="lower")
    def op(q: Tensor, x: Tensor) -> Tensor:
        return q.to(x.dtype) * x

    @op.forward
    def _(q, x):
        seen.append((q.dtype, x.dtype))
        return torch.empty_like(x).copy_(q.to(x.dtype) * x), ()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(q, torch.ones(8)).dtype is torch.bfloat16
    assert seen == [(q.dtype, torch.bfloat16)]


def test_a_dtype_that_the_kernel_does_not_declare_is_an_error_of_its_launch():
    with pytest.raises(
        LaunchError, match=r"parameter `const int\* x` got a tensor of torch.int64 on cpu, expected a tensor of"
    ):
        of(inverse, "invert")(torch.arange(3))


def test_what_is_declared_in_so_many_words_takes_the_reference():
    op = dequantize(dtypes=(torch.int8, torch.float32))
    for q, scale, note in (
        (Q.int(), torch.ones(1), "no kernel for torch.int32"),
        (Q, torch.ones(1, dtype=torch.float64), "no kernel for torch.int8 with torch.float64"),
        (Q, torch.ones(1, dtype=torch.complex64), "no kernel for torch.int8 with torch.complex64"),
    ):
        with cupyops.trace() as trace:
            y = op(q, scale)
        assert [(one.route, one.note) for one in trace.records] == [("reference", note)]
        assert torch.equal(y, q * scale)
    assert torch.equal(launched(op, Q, torch.ones(1)), Q.float())


def test_usual_dtypes_are_not_mixed_behind_an_integer():
    @cupyops.operator(toys.fresh())
    def op(index: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return x[index] * w

    op.forward(lambda index, x, w: pytest.fail("of two dtypes"))
    with cupyops.trace() as trace:
        op(torch.tensor([0]), torch.ones(1), torch.ones(1, dtype=torch.float16))
    assert trace.records[0].note == "no kernel for torch.float32 with torch.float16"


def test_dtypes_that_are_none():
    with pytest.raises(InputError, match="dtypes has 'float32', expected dtypes such as torch.float32"):
        cupyops.operator(toys.fresh(), dtypes=["float32"])


@pytest.mark.parametrize("name", [name for name in cupyops.operators() if name.startswith("cupyops::")])
def test_the_librarys_own_declare_theirs(name):
    # attention's own are what its expressions may capture; it says itself that queries are of half types
    served = (
        (torch.float16, torch.bfloat16)
        if "product_attention" in name or name.endswith(("_fp32", "grouped_mm", "packed_attention"))
        else cupyops._kernel.kernel.FLOATING
    )
    served = (torch.float16, torch.bfloat16, torch.float32) if "decode_attention" in name else served
    if name.endswith("scaled_mm"):  # operands, then what scales and biases are of
        served = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32)
    if name.endswith("quantized_linear"):  # what is multiplied, scales, and weights
        served = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    assert cupyops.operators()[name].definition.dtypes == served
