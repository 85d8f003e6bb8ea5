import functools

import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops

torch_max_pool2d = F._max_pool2d  # F.max_pool2d is this or its twin by `return_indices`, and shows no signature


def with_indices(function):
    """The same function with `return_indices`."""
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs, return_indices=True))


class TestMaxPool2d(OperatorContract):
    function = staticmethod(cupyops.max_pool2d)
    torch_function = staticmethod(torch_max_pool2d)
    differs = {("numbers", backend): "it takes return_indices, and ignores it" for backend in ("reference", "gpu")}
    kernels = {f"max_pool2d_{way}{form}" for way in ("fwd", "bwd") for form in ("_bands", "_nhwc")}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        for window in [(2,), (3, 1, 1), (3, 2, 1), (3,)]:  # in bands, all but the last
            yield Sample(make(2, 3, 11, 18), *window)
            yield Sample(channels_last(make(2, 3, 6, 7)), *window)
            yield Sample(channels_last(make(2, 8, 9, 7)), *window)  # channels in vectors
        yield Sample(make(1, 2, 5, 7), 2, ceil_mode=True)  # tiles that stick out
        yield Sample(make(1, 1, 2, 13000), (2, 3))  # a row that does not fit into shared memory
        yield Sample(make(2, 5, 31, 13), (5, 3), (2, 3), (2, 1), ceil_mode=True)
        yield Sample(make(1, 1, 40, 20), 16, 7, 8)  # the largest window whose place fits a byte

    def small_samples(self, make: Make):
        yield Sample(make(1, 3, 4, 8), 2)
        yield Sample(make(1, 2, 5, 6), 3, stride=1, padding=1)
        yield Sample(make(2, 5, 4), (2, 3), stride=(2, 1), padding=(0, 1), dilation=(3, 1), ceil_mode=True)
        yield Sample(channels_last(make(1, 3, 5, 4)), 2, stride=1, dilation=2)
        yield Sample(make(1, 1, 3, 2), 5, stride=1, padding=2)  # larger than its plane

    def layouts(self, make: Make):
        yield from super().layouts(make)
        for shape in [(2, 4, 6, 8), (2, 3, 5, 7), (1, 1, 4, 4), (2, 1, 4, 4), (2, 4, 2, 1), (3, 4, 1, 1), (1, 4, 2, 2)]:
            x = make(*shape)
            yield Sample(x, (min(2, shape[2]), min(2, shape[3])), 1, ceil_mode=True)
            yield Sample(channels_last(x), (min(2, shape[2]), 1))
            yield Sample(channels_last(x)[..., ::2], (min(2, shape[2]), 1))


class TestWithIndices(TestMaxPool2d):
    """Indices are compared exactly."""

    function = staticmethod(with_indices(cupyops.max_pool2d))
    torch_function = staticmethod(with_indices(F.max_pool2d))
    kernels = {"max_pool2d_fwd_nhwc", "max_pool2d_bwd_nhwc"}  # bands keep a byte for each place, and none of 64 bits

    def test_signature_is_torch_s(self):
        """That of the class above: `return_indices` is given here."""


def channels_last(tensor):
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def assert_same(x, *args, **kwargs):
    """Values, indices and gradients are PyTorch's, exactly."""
    for return_indices in (False, True):
        results = []
        for function in (cupyops.max_pool2d, F.max_pool2d):
            leaf = x.detach().requires_grad_()
            found = function(leaf, *args, **kwargs, return_indices=return_indices)
            found = found if return_indices else (found,)
            grad = torch.arange(found[0].numel(), device=x.device).view(found[0].shape).to(x.dtype)
            results.append((*(f.detach() for f in found), *torch.autograd.grad(found[0], leaf, grad)))
            assert found[0].requires_grad and not any(f.requires_grad for f in found[1:])
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def forms(x, device):
    yield x.to(device)
    yield x.to(device).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "window", [dict(kernel_size=2), dict(kernel_size=3, stride=1, padding=1), dict(kernel_size=2, stride=1)]
)
@pytest.mark.parametrize("channels", [3, 4])
def test_special_values(device, window, channels):
    """The last NaN of a window wins, -inf has a place too."""
    x = torch.randint(-1, 2, (2, channels, 4, 8)).float()
    x[torch.rand(x.shape) < 0.2] = float("nan")
    x[torch.rand(x.shape) < 0.2] = -float("inf")
    x[torch.rand(x.shape) < 0.1] = float("inf")
    x[0, 0] = -float("inf")
    # PyTorch's channels_last kernel on CUDA puts some of these gradients elsewhere than its other three do
    for form in forms(x, device) if device.type == "cpu" else [x.to(device)]:
        assert_same(form, **window)
    results = [cupyops.max_pool2d(form, **window, return_indices=True) for form in forms(x, device)]
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1)])
def test_of_equal_values_the_first_has_the_gradient(device, window):
    for form in forms(torch.zeros(1, 4, 4, 8), device):
        assert_same(form, **window)


def test_a_window_outside_the_plane(device):
    """Padding and dilation can leave a window without elements: -inf, and no gradient."""
    for form in forms(torch.randn(1, 4, 2, 2), device):
        leaf = form.detach().requires_grad_()
        y = cupyops.max_pool2d(leaf, 2, padding=1, dilation=3)
        assert y.shape == (1, 4, 1, 1) and torch.isneginf(y).all()
        half = cupyops.max_pool2d(form, (2, 1), padding=(1, 0), dilation=(3, 1))  # outside in one direction
        assert half.shape == (1, 4, 1, 2) and torch.isneginf(half).all()
        with cupyops.simulate():  # which would notice a wild read
            assert torch.equal(cupyops.max_pool2d(form.cpu(), (2, 1), padding=(1, 0), dilation=(3, 1)), half.cpu())
        if device.type == "cuda":  # PyTorch's own CPU gradient writes outside its array here
            assert not torch.autograd.grad(y.sum(), leaf)[0].any()


@pytest.mark.parametrize("length", range(1, 9))
def test_output_size(device, length):
    """The rule of ceil_mode, for every small geometry."""
    x = torch.randn(1, length, 3, device=device)
    for kernel in range(1, 5):
        for stride in range(1, 5):
            for padding in range(kernel // 2 + 1):
                for dilation in (1, 2):
                    for ceil_mode in (False, True):
                        args = (kernel, 1), (stride, 1), (padding, 0), (dilation, 1), ceil_mode
                        try:
                            expected = F.max_pool2d(x, *args)
                        except RuntimeError:
                            with pytest.raises(cupyops.InputError, match="kernel_size"):
                                cupyops.max_pool2d(x, *args)
                        else:
                            torch.testing.assert_close(cupyops.max_pool2d(x, *args), expected, rtol=0, atol=0)


def test_a_window_too_large_for_a_byte(device):
    x = torch.randn(1, 2, 40, 40, device=device)
    assert_same(x, 17)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_integers(dtype):
    x = torch.randint(0, 9, (1, 2, 4, 6)).to(dtype)
    assert torch.equal(cupyops.max_pool2d(x, 2), F.max_pool2d(x, 2))


def test_stride_of_nothing_is_the_kernel(device):
    x = torch.randn(1, 2, 6, 6, device=device)
    for stride in (None, [], ()):
        assert torch.equal(cupyops.max_pool2d(x, 3, stride), F.max_pool2d(x, 3))


def test_the_input_is_not_kept(device):
    """Without indices asked for, backward needs the places of the maxima only."""
    if device.type == "cpu":
        pytest.skip("on the CPU the reference runs, and PyTorch's own backward keeps the input")
    x = torch.randn(1, 2, 4, 4, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cupyops.max_pool2d(x, 2)
    assert kept and all(t.dtype is torch.uint8 for t in kept)


@pytest.mark.parametrize(
    "message, change",
    [
        ("input", dict(input=None)),
        ("input", dict(input=torch.zeros(4, 4))),
        ("input", dict(input=torch.zeros(1, 1, 1, 4, 4))),
        ("input", dict(input=torch.zeros(1, 0, 4, 4))),
        ("input", dict(input=torch.zeros(1, 2, 0, 4))),
        ("input", dict(input=torch.zeros(1, 2, 4, 4, dtype=torch.bool))),
        ("input", dict(input=torch.zeros(1, 2, 4, 4, dtype=torch.complex64))),
        ("kernel_size", dict(kernel_size=0)),
        ("kernel_size", dict(kernel_size=(2, 2, 2))),
        ("kernel_size", dict(kernel_size=2.0)),
        ("kernel_size", dict(kernel_size=None)),
        ("kernel_size", dict(kernel_size=5)),
        ("kernel_size", dict(dilation=4)),
        ("stride", dict(stride=0)),
        ("stride", dict(stride=(1, -1))),
        ("padding", dict(padding=-1)),
        ("padding", dict(padding=2)),
        ("padding", dict(padding=(0, 2), dilation=3)),
        ("dilation", dict(dilation=0)),
        ("ceil_mode", dict(ceil_mode="yes")),
    ],
)
def test_bad_arguments(device, message, change):
    call = dict(input=torch.zeros(1, 2, 4, 4), kernel_size=2) | change
    call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with pytest.raises(cupyops.InputError, match=f"^{message} "):
        cupyops.max_pool2d(**call)
