import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample, assert_as_good_as_torch
from normalisations import KERNELS, compare_pipelined

import cupyops


def add_then_norm(input, residual, normalized_shape, weight=None, eps=None):
    """The same of two operators of PyTorch's."""
    summed = (input + residual).contiguous()
    return torch.nn.functional.rms_norm(summed, normalized_shape, weight, eps), summed


class TestAddRmsNorm(OperatorContract):
    function = staticmethod(cupyops.add_rms_norm)
    torch_function = staticmethod(add_then_norm)
    kernels = KERNELS
    differs = {
        ("special_values", "gpu"): "PyTorch's CUDA kernel makes all of a row with an infinity NaN, its own formula not"
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(530, 33), make(530, 33), (33,), make(33))  # partials of several rows, off 16 bytes
        yield from (Sample(make(50, size), make(50, size), (size,), make(size)) for size in (64, 69, 1024))
        yield from (Sample(make(5, size), make(5, size), (size,)) for size in (33, 64, 69, 301, 1024))
        yield from (Sample(make(50, size), make(50, size), (size,), make(size)) for size in (24, 32, 40))
        yield Sample(make(5, 32), make(5, 32), (32,))
        yield from (Sample(make(5, 8), make(5, 8), (8,), weight) for weight in (None, make(8)))
        yield Sample(make(9, 1031), make(9, 1031), (1031,), make(1031))
        held = (8197, 16389, 32783)  # in shared memory
        yield from (Sample(make(2, size), make(2, size), (size,), make(size)) for size in held)
        for size in (65535, 65544):  # a tile has part of a vector, the end of the row; by vectors
            yield Sample(make(2, size), make(2, size), (size,), make(size))
        yield Sample(make(0, 7), make(0, 7), (7,), make(7))
        yield Sample(make(7, 0), make(7, 0), (0,), make(0))

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), make(3, 5), (5,), make(5))
        yield Sample(make(2, 2, 3), make(2, 2, 3), (2, 3), make(2, 3), eps=0.1)
        yield Sample(make(2, 7), make(2, 7), [7])


def gradients(function, grads, x, residual, weight):
    leaves = [t.detach().requires_grad_() for t in (x, residual, weight)]
    outputs = function(*leaves[:2], x.shape[1:], leaves[2])
    return *outputs, *torch.autograd.grad(outputs, leaves, [g.to(outputs[0].dtype) for g in grads])


@pytest.mark.parametrize("size", [1, 2, 7, 17, 30, 40, 61, 300, 1031, 8200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_both_results(dtype, size):
    """Forward and backward by the kernels, whose one gradient is that of both inputs."""
    tensors = [torch.randn(shape).to(dtype) for shape in ((5, size), (5, size), (size,))]
    grads = [torch.randn(5, size).to(dtype) for _ in range(2)]
    with cupyops.simulate():
        ours = gradients(cupyops.add_rms_norm, grads, *tensors)
    theirs = gradients(add_then_norm, grads, *tensors)
    summed = theirs[1].double()  # rounded before it is normalised
    eps = torch.finfo(torch.float32).eps
    truth = gradients(
        lambda x, r, shape, w: add_then_norm(x, r, shape, w, eps),
        [g.double() for g in grads],
        summed,
        torch.zeros_like(summed),
        tensors[2].double(),
    )
    assert torch.equal(ours[1], theirs[1])
    for a, b, c, what in zip(ours, theirs, truth, ("y", "summed", "grad_x", "grad_residual", "grad_weight")):
        assert_as_good_as_torch(a, b, c, what)
    assert torch.equal(ours[2], ours[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_apart(device, dtype):
    """What is added in place to one input's gradient is not added to the other's."""
    x, residual = (torch.randn(3, 8, device=device).to(dtype).requires_grad_() for _ in range(2))
    for _ in range(2):
        y, summed = cupyops.add_rms_norm(x, residual, (8,))
        (y + summed).sum().backward()
    once = x.grad.clone()
    residual.grad.zero_()
    assert torch.equal(x.grad, once)


def test_one_tensor_as_both(device):
    x = torch.randn(3, 8, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cupyops.add_rms_norm(x, x, (8,)), x)
    with cupyops.simulate():
        y, summed = cupyops.add_rms_norm(x, x, (8,))
        (grad,) = torch.autograd.grad(y.sum() + summed.sum(), x)
    theirs = add_then_norm(x, x, (8,))
    torch.testing.assert_close((y, summed), theirs)
    torch.testing.assert_close(grad, torch.autograd.grad(theirs[0].sum() + theirs[1].sum(), x)[0])


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        (([[1.0, 2.0]], X, (2,)), {}, "input"),
        ((X, torch.ones(3), (3,)), {}, "residual"),
        ((X, None, (3,)), {}, "residual"),
        ((X, torch.ones(2, 3).double(), (3,)), {}, "residual"),
        ((X, torch.ones(2, 3, device="meta"), (3,)), {}, "residual"),
        ((X, X, (4,)), {}, "input"),
        ((X, X, 3), {}, "normalized_shape"),
        ((X, X, (3,), torch.ones(2)), {}, "weight"),
        ((X, X, (3,)), {"eps": "1"}, "eps"),
    ],
)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^{culprit} is "):
        cupyops.add_rms_norm(*args, **kwargs)


@pytest.mark.parametrize("size", [128, 1032])
def test_pipelined_rows(size):
    weight = torch.randn(size)
    compare_pipelined(lambda x, residual: cupyops.add_rms_norm(x, residual, (size,), weight), 2, size)
