import functools
import subprocess
import sys

import pytest
import torch
from contract import Make, OperatorContract, Sample, placed
from torch.nn import functional as F

import cupyops


@functools.wraps(F.nll_loss)
def torch_nll_loss(input, target, weight=None, **options):
    """PyTorch's, spared what it refuses: a weight that wants a gradient, on the CPU the gradient of a transposed input."""
    return F.nll_loss(input.contiguous(), target, None if weight is None else weight.detach(), **options)


class TestNllLoss(OperatorContract):
    function = staticmethod(cupyops.nll_loss)
    torch_function = staticmethod(torch_nll_loss)
    kernels = {"nll_loss_fwd", "loss_finalize", "nll_loss_bwd_strided", "nll_loss_bwd_rows"}

    differs = {
        ("indices", "gpu"): "one sample that is ignored: the mean is NaN, and 0 in PyTorch on a GPU alone",
        ("special_values", "gpu"): "one sample: a sum that begins with 0 is 0, where PyTorch has -0 on a GPU alone",
    }

    def samples(self, make: Make):
        make = log_probabilities(make)
        yield from self.small_samples(make)
        for reduction in ("none", "mean", "sum"):
            yield Sample(
                make(523, 3), make.integers(523, high=3), weights(make, 3), reduction=reduction, ignore_index=1
            )
        yield Sample(make(3, 5, 17, 11), make.integers(3, 17, 11, high=5), weights(make, 5))
        yield Sample(make(3, 4099), make.integers(3, high=4099))  # blocks of backward end within a row

    def small_samples(self, make: Make):
        make = log_probabilities(make)
        yield Sample(make(4, 7), make.integers(4, high=7))
        yield Sample(make(5), make.integers(high=5))
        for reduction in ("none", "mean", "sum"):
            yield Sample(make(6, 3), make.integers(6, high=3), weights(make, 3), ignore_index=2, reduction=reduction)
        yield Sample(make(2, 3, 5), make.integers(2, 5, high=3), reduction="none")
        yield Sample(make(2, 3, 2, 2), make.integers(2, 2, 2, high=3), weights(make, 3), ignore_index=0)
        yield Sample(make(2, 3, 1, 2, 2), make.integers(2, 1, 2, 2, high=3), reduction="sum")

    def layouts(self, make: Make):
        yield from super().layouts(make)
        channels_last = make(2, 3, 4, 5).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        yield Sample(channels_last, make.integers(2, 4, 5, high=3))
        yield Sample(channels_last, make.integers(2, 5, 4, high=3).transpose(1, 2), reduction="none")


def log_probabilities(make):
    """Makes negative values: a sum of both signs may nearly vanish, and then any order of adding is far off."""
    return Negative(make.device, make.dtype, make.requires_grad)


class Negative(Make):
    def __call__(self, *shape, low=-4.0, high=0.0):
        return super().__call__(*shape, low=low, high=high)


def weights(make, classes):
    return make(classes, low=0.1, high=1.0).detach()


def both(device, x, *args, **options):
    """(loss, gradient) of ours and of PyTorch."""
    for function in (cupyops.nll_loss, F.nll_loss):
        leaf = x.detach().to(device).requires_grad_()
        y = function(leaf, *args, **options)
        yield y.detach(), torch.autograd.grad(y.sum(), leaf)[0]


def assert_same(pair):
    ours, theirs = pair
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_everything_ignored(device, reduction):
    target = torch.full((3,), -100, device=device)
    assert_same(both(device, torch.randn(3, 4), target, reduction=reduction))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_special_values(device, reduction):
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), -0.0], [-float("inf"), 2.0]])
    assert_same(both(device, x, torch.tensor([0, 0, 0], device=device), reduction=reduction))
    assert_same(both(device, x, torch.tensor([1, 1, 1], device=device), reduction=reduction))
    zero = torch.tensor([0.0, 1.0], device=device)
    assert_same(both(device, x[1:], torch.tensor([0, 1], device=device), zero, reduction=reduction))


def test_weights_that_sum_to_zero(device):
    assert_same(
        both(device, torch.randn(2, 2), torch.tensor([0, 0], device=device), torch.tensor([0.0, 1.0], device=device))
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_integer_targets(device, dtype):
    x, target = torch.randn(4, 3, device=device), torch.tensor([2, 0, 1, 2], device=device)
    torch.testing.assert_close(cupyops.nll_loss(x, target.to(dtype)), F.nll_loss(x, target))


def test_single_target_of_shape_1(device):
    x, target = torch.randn(3, device=device), torch.tensor([1], device=device)
    torch.testing.assert_close(cupyops.nll_loss(x, target), F.nll_loss(x, target))


def test_deprecated_arguments(device):
    x, target = torch.randn(4, 3, device=device), torch.tensor([2, 0, 1, 2], device=device)
    for size_average in (None, True, False):
        for reduce in (None, True, False):
            if size_average is None and reduce is None:
                continue
            with pytest.warns(UserWarning, match="deprecated"):
                y = cupyops.nll_loss(x, target, size_average=size_average, reduce=reduce)
            with pytest.warns(UserWarning, match="deprecated"):
                expected = F.nll_loss(x, target, size_average=size_average, reduce=reduce)
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    "message, change",
    [
        ("input", dict(input=torch.ones(4, 3, dtype=torch.long))),
        ("input", dict(input=torch.tensor(1.0))),
        ("input", dict(input=None)),
        ("target", dict(target=None)),
        ("target has batch size 5, but input has 4", dict(target=torch.zeros(5, dtype=torch.long))),
        ("target", dict(target=torch.zeros(4))),
        ("target", dict(target=torch.zeros(4, dtype=torch.bool))),
        ("target", dict(target=torch.zeros(4, 3, dtype=torch.long))),
        ("target", dict(target=torch.zeros((), dtype=torch.long))),
        ("target", dict(target=torch.zeros(4, dtype=torch.long, device="meta"))),
        ("weight", dict(weight=torch.ones(4))),
        ("weight", dict(weight=torch.ones(3, 1))),
        ("weight", dict(weight=2.0)),
        ("weight", dict(weight=torch.ones(3).double())),
        ("weight", dict(weight=torch.ones(3, requires_grad=True))),
        ("weight", dict(weight=torch.ones(3, device="meta"))),
        ("reduction", dict(reduction="average")),
        ("reduction", dict(reduction=None)),
        ("ignore_index", dict(ignore_index=1.5)),
    ],
)
def test_bad_arguments(device, message, change):
    call = dict(input=torch.randn(4, 3), target=torch.zeros(4, dtype=torch.long)) | change
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.nll_loss(**{name: placed(value, device) for name, value in call.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [3, -1])
def test_target_out_of_range_on_a_gpu(bad):
    """It says which, and stops the kernel: after that the process has no use of the GPU, so it is one of its own."""
    program = f"""
import torch, cupyops
cupyops.nll_loss(torch.zeros(2, 3, device="cuda"), torch.tensor([0, {bad}], device="cuda"))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and f"target[1] is {bad}, expected ignore_index or a class in [0, 3)" in done.stdout
