import warnings

import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops

pytestmark = pytest.mark.filterwarnings("ignore:reduction:UserWarning")


class TestKLDiv(OperatorContract):
    function = staticmethod(cupyops.kl_div)
    torch_function = staticmethod(F.kl_div)
    kernels = {"kl_div_fwd_each", "kl_div_fwd_partials", "kl_div_fwd_finalize", "kl_div_bwd", "kl_div_bwd_target"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        for log in (False, True):  # several blocks, a tail
            yield Sample(make(3, 3000), target(make, log, 3, 3000).detach(), reduction="sum", log_target=log)
            yield Sample(make(3, 1501), target(make, log, 3, 1501), reduction="none", log_target=log)

    def small_samples(self, make: Make):
        yield Sample(make(4, 7), target(make, False, 4, 7), reduction="batchmean")
        yield Sample(make(3, 5), target(make, True, 3, 5), reduction="none", log_target=True)
        yield Sample(make(2, 3, 4), target(make, False, 3, 1), reduction="sum")
        yield Sample(make(1, 6), target(make, True, 5, 6), reduction="batchmean", log_target=True)
        yield Sample(make(), target(make, False), reduction="batchmean")


def target(make, log, *shape):
    return make(*shape) if log else make(*shape, low=0.1)


def results(function, x, t, **options):
    leaves = [x.detach().clone().requires_grad_(), t.detach().clone().requires_grad_()]
    y = function(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]


def assert_same(device, x, t, **options):
    ours, theirs = (results(f, x.to(device), t.to(device), **options) for f in (cupyops.kl_div, F.kl_div))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_mean(device):
    """Not a sample of the contract: it warns."""
    assert_same(device, torch.randn(2, 700), torch.rand(2, 700), reduction="mean")
    assert_same(device, torch.randn(3, 5), torch.randn(5), reduction="mean", log_target=True)


def test_mean_in_the_simulator():
    with cupyops.simulate():
        test_mean("cpu")


@pytest.mark.parametrize("log_target", [False, True])
def test_special_values(device, log_target):
    """Also a target of 0, which adds nothing, and one below 0, which has no logarithm."""
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-42, float("inf"), -float("inf"), float("nan"), 1e30])
    assert_same(device, *torch.meshgrid(odd, odd, indexing="ij"), reduction="none", log_target=log_target)


@pytest.mark.parametrize("log_target", [False, True])
def test_special_values_in_the_simulator(log_target):
    with cupyops.simulate():
        test_special_values("cpu", log_target)


def test_a_target_of_zero_adds_nothing(device):
    """No NaN comes from 0 * log(0), in the sum neither."""
    t = torch.tensor([[0.0, 1.0], [0.5, 0.5]], device=device)
    y = cupyops.kl_div(torch.zeros(2, 2, device=device), t, reduction="sum")
    torch.testing.assert_close(y, torch.tensor(-0.6931472, device=device))


def test_deprecated_arguments():
    x, t = torch.randn(3, 4), torch.rand(3, 4)
    for options in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(cupyops.kl_div(x, t, **options), F.kl_div(x, t, **options))


def test_mean_warns_and_nothing_else_does():
    x, t = torch.randn(3, 4), torch.rand(3, 4)
    with pytest.warns(UserWarning, match="batchmean") as caught:
        cupyops.kl_div(x, t)
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reduction in ("none", "sum", "batchmean"):
            cupyops.kl_div(x, t, reduction=reduction)


def test_mixed_dtypes(device):
    x, t = torch.randn(3, 4, device=device), torch.rand(3, 4, device=device, dtype=torch.float64)
    ours, theirs = (f(x, t, reduction="sum") for f in (cupyops.kl_div, F.kl_div))
    torch.testing.assert_close(ours, theirs)


def test_bad_input():
    x = torch.ones(2, 3)
    for bad in (None, 1.5, torch.arange(3)):
        with pytest.raises(cupyops.InputError, match="input"):
            cupyops.kl_div(bad, x, reduction="sum")
    for bad in (None, 1.5, torch.ones(2, 3, dtype=torch.int64), x.to(torch.complex64)):
        with pytest.raises(cupyops.InputError, match="target"):
            cupyops.kl_div(x, bad, reduction="sum")
    with pytest.raises(cupyops.InputError, match="broadcast"):
        cupyops.kl_div(x, torch.ones(2), reduction="sum")
    for bad in ("max", None, 1):
        with pytest.raises(cupyops.InputError, match="reduction"):
            cupyops.kl_div(x, x, reduction=bad)
