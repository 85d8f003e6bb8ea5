import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestSum(OperatorContract):
    function = staticmethod(cupyops.sum)
    torch_function = staticmethod(torch.sum)
    kernels = {"sum_fwd_thread_per_row", "sum_fwd_registers", "sum_fwd_fold", "sum_fwd_finalize"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(7, 130))  # a line
        yield Sample(make(5, 133), 1)  # whose rows begin at any alignment
        yield Sample(make(259, 17), 1)  # several blocks of rows that a thread takes; half types' begin within a word
        yield Sample(make(5, 272), 1)  # rows in registers, several to a block in half types
        yield Sample(make(3, 1088), 1)  # one to a block
        yield Sample(make(40, 24), 0)  # columns in vectors
        yield Sample(make(3, 5, 16), (0, 2))  # rows in vectors
        yield Sample(make(3, 5, 7), (0, 2))  # not in vectors
        yield Sample(make(3, 7, 5), 1)  # columns not in vectors
        yield Sample(make(17000, 2), 0)  # in slabs
        yield Sample(make(19, 33), 0)  # columns whose rows begin at any alignment
        yield Sample(make(2, 8203), 1)  # more than a thread has at once

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), 1)
        yield Sample(make(4, 3, 2), (0, 2), keepdim=True)
        yield Sample(make(6, 7), dim=-2)
        yield Sample(make(9))


@pytest.mark.parametrize("function", ["sum", "mean"])
@pytest.mark.parametrize("shape, dim", [((), None), ((), 0), ((0,), None), ((3, 0), 1), ((0, 3), 1), ((1, 1), (0, 1))])
def test_little_and_nothing(device, function, shape, dim):
    x = torch.randn(shape, device=device)
    for keepdim in (False, True):
        with cupyops.simulate():
            found = getattr(cupyops, function)(x, dim, keepdim)
        torch.testing.assert_close(found, getattr(torch, function)(x, dim, keepdim), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", ["sum", "mean"])
@pytest.mark.parametrize("columns", [9, 400])
def test_nan_and_infinities(device, function, columns):
    x = torch.randn(4, columns, device=device)
    x[0, 3], x[1, 2], x[2, 0], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    with cupyops.simulate():
        found = getattr(cupyops, function)(x, 1)
    torch.testing.assert_close(found, getattr(torch, function)(x, 1), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", ["sum", "mean"])
def test_a_half_type_in_float32(device, function, dtype):
    """One rounding less; the gradient is of the input's dtype."""
    x = torch.randn(5, 9, device=device, dtype=dtype, requires_grad=True)
    with cupyops.simulate(), cupyops.trace() as trace:
        found = getattr(cupyops, function)(x, 1, dtype=torch.float32)
        (grad,) = torch.autograd.grad(found.sum(), x)
    assert trace.routes() == {"kernel"} or "simulator" in str(trace)
    expected = getattr(torch, function)(x, 1, dtype=torch.float32)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0], rtol=0, atol=0)


def test_integers_and_bools(device):
    for x in (torch.arange(12, device=device).view(3, 4), torch.rand(3, 4, device=device) > 0.5):
        assert torch.equal(cupyops.sum(x, 1), torch.sum(x, 1)) and cupyops.sum(x).dtype is torch.int64
        assert torch.equal(cupyops.mean(x, 1, dtype=torch.float32), torch.mean(x, 1, dtype=torch.float32))


@pytest.mark.parametrize("function", ["sum", "mean"])
def test_the_gradient_is_a_view(device, function):
    x = torch.randn(5, 9, device=device, requires_grad=True)
    with cupyops.simulate():
        (grad,) = torch.autograd.grad(getattr(cupyops, function)(x, 1).sum(), x)
    assert grad.stride(1) == 0


@pytest.mark.parametrize("function", ["sum", "mean"])
@pytest.mark.parametrize("message, change", [
    ("input", dict(input=None)), ("dim", dict(dim=2)), ("dim", dict(dim=(0, -2))), ("dim", dict(dim=0.5)),
    ("keepdim", dict(keepdim=1)), ("dtype", dict(dtype="float32")),
])  # fmt: skip
def test_bad_arguments(function, message, change):
    with pytest.raises(cupyops.InputError, match=f"^{message} "):
        getattr(cupyops, function)(**dict(input=torch.zeros(3, 4)) | change)


def test_the_mean_of_integers_is_refused():
    with pytest.raises(cupyops.InputError, match="^input "):
        cupyops.mean(torch.arange(3))
    with pytest.raises(cupyops.InputError, match="^dtype "):
        cupyops.mean(torch.zeros(3), dtype=torch.int64)
