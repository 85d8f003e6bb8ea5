import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestAmax(OperatorContract):
    function = staticmethod(cupyops.amax)
    torch_function = staticmethod(torch.amax)
    kernels = {
        *("amax_fwd_thread_per_row", "amax_fwd_fold", "amax_fwd_finalize"),
        *("amax_bwd_masked_rows", "amax_bwd_rows", "amax_bwd_columns", "amax_bwd_strided"),
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(7, 130))  # a line
        yield Sample(make(5, 133), 1)  # whose rows begin at any alignment
        yield Sample(make(259, 17), 1)  # several blocks of rows that a thread takes; half types' begin within a word
        yield Sample(make(260, 24), 1)  # and of those that are whole vectors
        yield Sample(make(9, 40), 1)  # of more bits than a word has, in half types
        yield Sample(make(9, 49), 1)  # and no whole vectors
        yield Sample(make(9, 72), 1)  # short, but not as short
        yield Sample(make(40, 24), 0)  # columns in vectors
        yield Sample(make(3, 5, 16), (0, 2))  # rows in vectors
        yield Sample(make(3, 5, 7), (0, 2))  # not in vectors
        yield Sample(make(3, 2), 0)  # columns that end within a vector
        yield Sample(make(4, 3, 1), (0, 1), keepdim=True)  # rows, though what is kept lies within
        yield Sample(make(3, 7, 5), 1)  # columns not in vectors
        yield Sample(make(17000, 2), 0)  # in slabs
        yield Sample(make(19, 33), 0)  # columns whose rows begin at any alignment
        yield Sample(make(2, 8203), 1)  # more than a thread has at once

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), 1)
        yield Sample(make(4, 3, 2), (0, 2), keepdim=True)
        yield Sample(make(6, 7), dim=-2)
        yield Sample(make(9))


def run(function, x, dim):
    """(result, gradient) for a gradient of different numbers."""
    leaf = x.detach().requires_grad_()
    y = function(leaf, dim)
    grad = torch.arange(1, y.numel() + 1, device=y.device).to(y.dtype).view(y.shape)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
@pytest.mark.parametrize("shape", [(5, 33), (50, 7), (40, 24), (40, 32), (5, 150), (4000, 2)])
def test_ties_share_the_gradient(device, shape, dim):
    x = torch.randint(-3, 1, shape, device=device).float()
    with cupyops.simulate():
        found = run(cupyops.amax, x, dim)
    torch.testing.assert_close(found, run(torch.amax, x, dim))


@pytest.mark.parametrize("columns", [7, 12, 40])
@pytest.mark.parametrize("dim", [0, 1])
def test_nan_and_infinities(device, dim, columns):
    x = torch.randn(9, columns, device=device)
    x[0, 3], x[1, 2], x[2], x[:, 5], x[4, 1] = torch.nan, torch.inf, -torch.inf, -torch.inf, -torch.inf
    with cupyops.simulate():
        found = run(cupyops.amax, x, dim)
    torch.testing.assert_close(found, run(torch.amax, x, dim), equal_nan=True)


@pytest.mark.parametrize("shape, dim", [((), ()), ((), 0), ((0, 3), 1), ((1, 1), (0, 1)), ((0, 3), (1,))])
def test_little_and_nothing(device, shape, dim):
    x = torch.randn(shape, device=device)
    for keepdim in (False, True):
        with cupyops.simulate():
            found = cupyops.amax(x, dim, keepdim)
        torch.testing.assert_close(found, torch.amax(x, dim, keepdim), rtol=0, atol=0)


def test_integers_and_bools(device):
    for x in (torch.arange(12, device=device).view(3, 4), torch.rand(3, 4, device=device) > 0.5):
        assert torch.equal(cupyops.amax(x, 1), torch.amax(x, 1))


@pytest.mark.parametrize(
    "message, change",
    [
        ("input", dict(input=None)),
        ("input", dict(input=torch.zeros(0))),
        ("input", dict(input=torch.zeros(0, 3), dim=0)),
        ("input", dict(input=torch.zeros(3, dtype=torch.complex64))),
        ("input", dict(input=torch.zeros([1] * 65))),
        ("dim", dict(dim=2)),
        ("dim", dict(dim=None)),
        ("dim", dict(dim=(0, -2))),
        ("keepdim", dict(keepdim=1)),
    ],
)
def test_bad_arguments(message, change):
    with pytest.raises(cupyops.InputError, match=f"^{message} "):
        cupyops.amax(**dict(input=torch.zeros(3, 4)) | change)
