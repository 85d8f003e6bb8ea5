import functools

import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops


@functools.wraps(F.avg_pool2d)
def by_torch(input, *args, **kwargs):
    """PyTorch's, of contiguous images on a GPU: of channels_last its gradient is another where windows overlap."""
    y = F.avg_pool2d(input.contiguous() if input.is_cuda else input, *args, **kwargs)
    last = input.is_cuda and input.dim() == 4 and not input.is_contiguous()
    return y.contiguous(memory_format=torch.channels_last) if last and is_channels_last(input) else y


def is_channels_last(x):
    return torch.empty_like(x).is_contiguous(memory_format=torch.channels_last)


class TestAvgPool2d(OperatorContract):
    function = staticmethod(cupyops.avg_pool2d)
    torch_function = staticmethod(by_torch)
    kernels = {f"avg_pool2d_{way}{form}" for way in ("fwd", "bwd") for form in ("_bands", "_nhwc", "_global")}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        for window in [(2,), (3, 1, 1), (3, 2, 1), (3,)]:  # in bands, all but the last
            yield Sample(make(2, 3, 11, 18), *window)
            yield Sample(channels_last(make(2, 3, 6, 7)), *window)
            yield Sample(channels_last(make(2, 8, 9, 7)), *window)  # channels in vectors
        yield Sample(make(1, 2, 5, 7), 2, ceil_mode=True)  # tiles that stick out
        yield Sample(make(5, 3, 7, 7), 7)  # a plane to a window
        yield Sample(make(2, 1, 30, 40), (30, 40), divisor_override=7)  # many threads to a plane
        yield Sample(make(1, 2, 160, 170), (160, 170))  # that does not fit into shared memory
        yield Sample(make(2, 5, 31, 13), (5, 3), (2, 4), (2, 1), ceil_mode=True)  # windows that stick out, gaps
        yield Sample(make(1, 1, 40, 20), 16, 7, 8, count_include_pad=False)
        yield Sample(make(1, 1, 2, 13000), (2, 3))  # a row that does not fit into shared memory

    def small_samples(self, make: Make):
        yield Sample(make(1, 3, 4, 8), 2)
        yield Sample(make(1, 2, 5, 6), 3, stride=1, padding=1, count_include_pad=False)
        yield Sample(make(2, 5, 4), (2, 3), stride=(2, 1), padding=(0, 1), ceil_mode=True, divisor_override=-3)
        yield Sample(channels_last(make(1, 3, 5, 4)), 2, stride=1, ceil_mode=True)


def channels_last(tensor):
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_special_values(device, include, last):
    """NaN and infinities stay in the windows that have them."""
    x = torch.randn(2, 4, 6, 7, device=device)
    x[0, 0, 2, 3], x[0, 1, 0, 0], x[1, 2, 5, 6] = float("nan"), float("inf"), -float("inf")
    x = (channels_last(x) if last else x).requires_grad_()
    y, expected = (f(x, 3, 2, 1, True, include) for f in (cupyops.avg_pool2d, by_torch))
    torch.testing.assert_close(y, expected, equal_nan=True)
    grads = [torch.autograd.grad(value, x, torch.ones_like(value))[0] for value in (y, expected)]
    torch.testing.assert_close(*grads)


def test_integers():
    x = torch.randint(0, 9, (1, 2, 4, 6))
    assert torch.equal(cupyops.avg_pool2d(x, 2), F.avg_pool2d(x, 2))


@pytest.mark.parametrize("length", range(1, 8))
def test_output_size(device, length):
    """The rules of ceil_mode and of the divisor, for every small geometry."""
    x = torch.randn(1, length, 3, device=device)
    for kernel in range(1, 5):
        for stride in range(1, 5):
            for padding in range(kernel // 2 + 1):
                for ceil_mode in (False, True):
                    for include in (False, True):
                        args = (kernel, 1), (stride, 1), (padding, 0), ceil_mode, include
                        if length + 2 * padding < kernel and not (ceil_mode and length + 2 * padding + stride > kernel):
                            with pytest.raises(cupyops.InputError, match="kernel_size"):
                                cupyops.avg_pool2d(x, *args)
                        else:
                            torch.testing.assert_close(cupyops.avg_pool2d(x, *args), F.avg_pool2d(x, *args))


@pytest.mark.parametrize(
    "message, change",
    [
        ("input", dict(input=None)),
        ("input", dict(input=torch.zeros(4, 4))),
        ("input", dict(input=torch.zeros(1, 0, 4, 4))),
        ("input", dict(input=torch.zeros(1, 2, 4, 4, dtype=torch.bool))),
        ("kernel_size", dict(kernel_size=0)),
        ("kernel_size", dict(kernel_size=5)),
        ("stride", dict(stride=(1, -1))),
        ("padding", dict(padding=2)),
        ("ceil_mode", dict(ceil_mode="yes")),
        ("count_include_pad", dict(count_include_pad=2)),
        ("divisor_override", dict(divisor_override=0)),
        ("divisor_override", dict(divisor_override=2.0)),
        ("divisor_override", dict(divisor_override=True)),
    ],
)
def test_bad_arguments(device, message, change):
    call = dict(input=torch.zeros(1, 2, 4, 4), kernel_size=2) | change
    call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with pytest.raises(cupyops.InputError, match=f"^{message} "):
        cupyops.avg_pool2d(**call)
