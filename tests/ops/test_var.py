import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")


class TestVar(OperatorContract):
    function = staticmethod(cupyops.var)
    torch_function = staticmethod(torch.var)
    kernels = {
        *("var_fwd_thread_per_row", "var_fwd_registers", "var_fwd_fold", "var_fwd_finalize"),
        *("var_bwd_short_rows", "var_bwd_rows", "var_bwd_columns", "var_bwd_strided"),
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(7, 130))  # a line
        yield Sample(make(5, 133), 1)  # whose rows begin at any alignment
        yield Sample(make(259, 17), 1)  # several blocks of rows that a thread takes; half types' begin within a word
        yield Sample(make(5, 144), 1)  # rows in registers, several to a block in float32
        yield Sample(make(3, 1088), 1)  # one to a block
        yield Sample(make(40, 24), 0)  # columns in vectors
        yield Sample(make(3, 5, 16), (0, 2))  # rows in vectors
        yield Sample(make(3, 5, 7), (0, 2))  # not in vectors
        yield Sample(make(3, 2), 0)  # columns that end within a vector
        yield Sample(make(4, 3, 1), (0, 1), keepdim=True)  # rows, though what is kept lies within
        yield Sample(make(2, 520, 33), 1)  # columns not in vectors, in slabs
        yield Sample(make(19, 33), 0)  # columns whose rows begin at any alignment
        yield Sample(make(72, 256), 0)  # columns, more of them than a thread has at once

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), 1)
        yield Sample(make(4, 3, 2), (0, 2), keepdim=True)
        yield Sample(make(6, 7), dim=-2, correction=0)
        yield Sample(make(9), unbiased=False)


@pytest.mark.parametrize("arguments", [(), ((),), (True,), (False,), (1, False), (1, True, True), (0,), ((0, 1),)])
def test_the_spellings(device, arguments):
    x = torch.randn(4, 9, device=device)
    with cupyops.simulate():
        found = cupyops.var(x, *arguments)
    torch.testing.assert_close(found, torch.var(x, *arguments))


@pytest.mark.parametrize("correction", [0, 1, 2.5, 9])
@pytest.mark.parametrize("shape, dim", [((), None), ((), 0), ((0,), None), ((3, 0), 1), ((0, 3), 1), ((1, 1), (0, 1))])
def test_little_and_nothing(device, shape, dim, correction):
    x = torch.randn(shape, device=device)
    for keepdim in (False, True):
        options = dict(dim=dim, keepdim=keepdim, correction=correction)
        with cupyops.simulate():
            found = cupyops.var(x, **options)
        torch.testing.assert_close(found, torch.var(x, **options), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns, dim", [(21, 1), (40, 0), (40, 1), (400, 1)])
def test_nan_infinities_and_constants(device, columns, dim, dtype):
    x = torch.randn(9, columns, device=device, dtype=dtype)
    x[0, 3], x[1, 2], x[2, 0], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[:, 20], x[5] = 3.0, 3.0
    x[6, 0] = -torch.inf
    found, expected = [], []
    for values, library, leaf in ((found, cupyops, x), (expected, torch, x.double())):
        leaf.requires_grad_()
        with cupyops.simulate():
            y = library.var(leaf, dim)
            values += [one.double() for one in (y, *torch.autograd.grad(y.sum(), leaf))]
    torch.testing.assert_close(found, expected, rtol=max(torch.finfo(dtype).eps, 2e-6), atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_more_than_a_thread_has_at_once(device, dtype):
    """No sample: in float64 PyTorch's own result of so many is off by more than what a sample is allowed."""
    x = torch.randn(2, 8203, device=device).to(dtype).requires_grad_()
    found = []
    for function, leaf in ((cupyops.var, x), (torch.var, x.detach().double().requires_grad_())):
        with cupyops.simulate():
            y = function(leaf, 1)
            found.append([y.to(dtype), torch.autograd.grad(y, leaf, torch.full_like(y, 4096))[0].to(dtype)])
    torch.testing.assert_close(*found, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("shape, dim", [
    ((50, 13), 1), ((3, 5000), 1), ((3, 50000), 1), ((5000, 3), 0), ((5000, 16), 0), ((40, 8, 16), (0, 2)),
    ((17000, 2), 0),
])  # fmt: skip
def test_a_large_mean_does_not_cancel(device, shape, dim):
    x = 4096 + torch.randn(shape, device=device)
    with cupyops.simulate():
        found = cupyops.var(x, dim)
    torch.testing.assert_close(found.double(), torch.var(x.double(), dim), rtol=2e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, dim", [((3, 8203), 1), ((3, 8200), 1), ((8200, 3), 0), ((8200, 16), 0), ((20, 41, 10), (0, 2))]
)
def test_an_outlier_that_comes_first(device, shape, dim, dtype):
    """Half types are summed about the first element."""
    x = torch.randn(shape, device=device) + 100
    x[:, 0] = x[0] = 200
    x = x.to(dtype)
    with cupyops.simulate():
        found = cupyops.var(x, dim)
    torch.testing.assert_close(found, torch.var(x.double(), dim).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("shape, dim", [
    ((50, 13), 1), ((3, 101), 1), ((3, 1001), 1), ((3, 200), 1), ((3, 8000), 1), ((7, 70000), 1), ((40, 24), 0),
    ((19, 33), 0), ((17000, 2), 0), ((3, 5, 7), (0, 2)), ((3, 7, 5), 1),
])  # fmt: skip
def test_a_constant_has_none(device, shape, dim):
    """Exactly, though 0.1 times their number is rounded."""
    x = torch.full(shape, 0.1, device=device, requires_grad=True)
    with cupyops.simulate():
        y = cupyops.var(x, dim)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert not y.any() and not grad.any()


@pytest.mark.parametrize("message, change", [
    ("input", dict(input=None)), ("input", dict(input=torch.arange(3))), ("dim", dict(dim=2)),
    ("dim", dict(dim=(0, -2))), ("keepdim", dict(keepdim=1)), ("unbiased", dict(unbiased=1)),
    ("unbiased", dict(dim=True, unbiased=True)), ("correction", dict(correction="1")),
    ("correction", dict(unbiased=True, correction=1)),
])  # fmt: skip
def test_bad_arguments(message, change):
    with pytest.raises(cupyops.InputError, match=f"^{message} "):
        cupyops.var(**dict(input=torch.zeros(3, 4)) | change)
