import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


def by_torch(input, weight, bias=None):
    return input * weight if bias is None else input * weight + bias


class TestScaleShift(OperatorContract):
    function = staticmethod(cupyops.scale_shift)
    torch_function = staticmethod(by_torch)
    kernels = {
        "scale_shift_fwd_params", "scale_shift_fwd_strided", "scale_shift_bwd_columns", "scale_shift_bwd_channels",
        "column_finalize",
    }  # fmt: skip

    def samples(self, make: Make):
        yield Sample(make(5, 7), make(7), make(7))  # the last dimension
        yield Sample(make(2, 3, 2, 5), make(3, 1, 1), make(3, 1, 1))  # per channel, of few neighbours
        yield Sample(make(9), make(), make())  # one number
        yield Sample(make(3, 4, 5), make(3, 1, 5), make(4, 5))  # dimensions that are apart
        yield Sample(make(37, 24), make(24), make(24))
        yield Sample(make(4, 3, 8), make(3, 8))
        yield Sample(make(2, 3, 4, 8), make(3, 1, 1), make(1, 3, 1, 1))  # of many
        yield Sample(make(3, 2, 5, 7), make(2, 1, 1), make(2, 1, 1))
        yield Sample(make(3, 40), make(3, 1))
        yield Sample(make(6, 40), make(1), make(40))  # weight and bias of different patterns
        yield Sample(make(3, 40), make(40), make(3, 1))
        yield Sample(make(3, 2, 5, 7), make(7), make(2, 1, 1))
        yield Sample(make(3, 2, 5, 7), make(2, 1, 1))
        yield Sample(make(6, 40), make(6, 1), bias=make(6, 40))
        yield Sample(make(6, 7), make(6, 7), make(7))
        yield Sample(make(7), make(3, 7), make(7))  # the input is broadcast
        yield Sample(make(), make(), make())
        yield Sample(make(0, 3), make(3), make(3))
        yield Sample(make(1, 3), make(3), make(1))

    def small_samples(self, make: Make):
        return (sample for sample in self.samples(make) if sample.args[0].numel() < 70)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        for shape in [(2, 8, 3, 5), (2, 8, 6, 6)]:
            x = make(*shape).detach().to(memory_format=torch.channels_last).requires_grad_()
            yield Sample(x, make(8, 1, 1), make(8, 1, 1))
            yield Sample(x, make(shape[-1]), make(8, 1, shape[-1]))
            yield Sample(x, make(8, 1, 1).detach().expand(8, *shape[-2:]).requires_grad_())
        yield Sample(make(1, 24).detach().expand(8, 24).requires_grad_(), make(24), make(24))


# (input, weight): several slabs, so that partial sums are added up; vectors and single elements; rows fewer than slabs
LARGE = [
    ((3001, 8), (8,)), ((3001, 17), (17,)), ((301, 320), (320,)), ((700, 37), (37,)), ((3, 5000), (5000,)),
    ((9001,), (1,)), ((12, 3, 40, 40), (3, 1, 1)), ((12, 3, 21, 21), (3, 1, 1)), ((400, 5, 3), (5, 1)),
    ((70, 260), (70, 1)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "factor"), LARGE, ids=str)
def test_long_sums(device, dtype, shape, factor):
    """Within the rounding of a sum in fp32 (fp64), and of one store; the sum in float64 is PyTorch's.

    Without kernels the products are rounded to the tensors' dtype, and are summed by PyTorch.
    """
    x, weight, bias, grad_y = (torch.randn(s, dtype=dtype, device=device) for s in (shape, factor, factor, shape))
    for misaligned in (False, True):
        if misaligned:
            x, grad_y = (torch.cat([t.flatten()[:1], t.flatten()])[1:].view(shape) for t in (x, grad_y))
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        grads = torch.autograd.grad(cupyops.scale_shift(*leaves), leaves, grad_y)
        wide = [t.double() for t in (x, weight, grad_y)]
        terms = (wide[2] * wide[0], wide[2])
        expected = (wide[2] * wide[1], *(t.sum_to_size(factor) for t in terms))
        sizes = (expected[0].abs(), *(t.abs().sum_to_size(factor) for t in terms))
        accumulator = torch.promote_types(dtype, torch.float32) if device.type == "cuda" else dtype
        rounding = torch.finfo(accumulator).eps
        for ours, exact, size in zip(grads, expected, sizes):
            bound = torch.finfo(dtype).eps * exact.abs() + 16 * rounding * size
            assert ((ours.double() - exact).abs() <= bound).all()


@pytest.mark.gpu
def test_fused_pass():
    """One pass and one sum of the partial sums: two launches for three gradients."""
    x, weight, bias = (torch.randn(s, device="cuda", requires_grad=True) for s in ((64, 96), (96,), (96,)))
    y = cupyops.scale_shift(x, weight, bias)
    with cupyops.trace() as trace:
        y.sum().backward()
    assert [r.kernel.partition("<")[0] for r in trace.launches()] == [
        "scale_shift_bwd_columns",
        "column_finalize",
    ]


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    x = torch.ones(2**16 + 1, 2**15 + 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for factor in ((x.shape[1],), (x.shape[0], 1), ()):
        weight, bias = (torch.full(factor, v, dtype=x.dtype, device="cuda", requires_grad=True) for v in (2.0, 1.0))
        y = cupyops.scale_shift(x, weight, bias)
        assert y.detach().amin().item() == y.detach().amax().item() == 3.0
        del y
        grads = torch.autograd.grad(cupyops.scale_shift(x, weight, bias), (x, weight, bias), torch.ones_like(x))
        assert grads[0].amin().item() == grads[0].amax().item() == 2.0
        count = x.numel() // max(weight.numel(), 1)
        for grad in grads[1:]:
            torch.testing.assert_close(grad, torch.full_like(grad, count))
        del grads


def test_special_values(device):
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42], device=device)
    y, expected = (f(odd, odd[:, None], odd) for f in (cupyops.scale_shift, by_torch))
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    x, weight = odd.repeat(2, 1).requires_grad_(), odd.clone().requires_grad_()
    ours, theirs = (
        torch.autograd.grad(f(x, weight, weight).sum(), (x, weight)) for f in (cupyops.scale_shift, by_torch)
    )
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float32), (torch.int64, torch.float32), (torch.float32, torch.int64)]
)
def test_mixed_dtypes(device, dtypes):
    x, weight, number = torch.ones(2, 3), torch.full((3,), 2.0), torch.tensor(2.0)
    for a, b in [(x, weight), (x, number), (number, x)]:
        a, b = a.to(device, dtypes[0]), b.to(device, dtypes[1])
        y, expected = cupyops.scale_shift(a, b, b), by_torch(a, b, b)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)


X = torch.ones(2, 3)
BAD = [
    ((None, X), "input"), ((X, 2.0), "weight"), ((X, X, 1), "bias"), ((X, torch.ones(2)), "weight of shape"),
    ((X, X, torch.ones(4)), "bias of shape"), ((X, torch.ones(3, device="meta")), "weight is on meta"),
    ((X, X, torch.ones(3, device="meta")), "bias is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "culprit"), BAD, ids=str)
def test_bad_input(args, culprit):
    with pytest.raises(cupyops.InputError, match=culprit):
        cupyops.scale_shift(*args)
