import numpy as np
import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample, assert_as_good_as_torch
from normalisations import KERNELS, compare_several_rows, gradients

import cupyops

NAN, INF = float("nan"), float("inf")

# one for each form: a thread for a row, lanes with a vector each, vectors of one warp, several vectors, a block, a cluster,
# shared memory or two passes

SIZES = [7, 24, 40, 69, 300, 1031, 16389, 32776]


class TestLayerNorm(OperatorContract):
    function = staticmethod(cupyops.layer_norm)
    torch_function = staticmethod(torch.nn.functional.layer_norm)
    kernels = KERNELS

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(530, 33), (33,), make(33), make(33))  # partials of several rows, rows off 16 bytes
        yield Sample(make(50, 69), (69,), make(69), make(69))
        yield from (Sample(make(5, size), (size,)) for size in (33, 64, 69, 1024))  # no gradient but grad_x
        yield Sample(make(9, 4, 64), [64], make(64), make(64))
        yield from (Sample(make(50, size), (size,), make(size), make(size)) for size in (24, 32, 40))
        yield Sample(make(5, 8), (8,))
        yield Sample(make(5, 32), (32,), bias=make(32))
        yield Sample(make(5, 300), (300,), bias=make(300))
        yield Sample(make(3, 6), (6,), None, make(6))
        yield Sample(make(5, 301), (301,))
        yield Sample(make(5, 1024), (1024,), make(1024).detach())
        yield Sample(make(9, 1031), (1031,), make(1031), make(1031))
        yield Sample(make(9, 2, 1024), (2, 1024), make(2, 1024))
        yield Sample(make(5, 16389), (16389,), make(16389), make(16389))
        yield Sample(make(2, 16389), (16389,), None, make(16389))
        # in shared memory
        yield from (Sample(make(2, size), (size,), make(size), make(size)) for size in (8197, 32783))
        # a tile has part of a vector, the end of the row: of a cluster, of a long row; by vectors
        for size in (71680 // make.dtype.itemsize - 1, 65535, 65544):
            yield Sample(make(2, size), (size,), make(size), make(size))
        wide = 32768 // make.dtype.itemsize  # on a GPU the widest block, whose statistics backward prefetches late
        yield from (Sample(make(2, wide), (wide,), weight) for weight in (None, make(wide)))
        yield Sample(make(0, 7), (7,), make(7), make(7))
        yield Sample(make(7, 0), (0,), make(0), make(0))

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), (5,), make(5), make(5))
        yield Sample(make(2, 2, 3), (2, 3), make(2, 3), make(2, 3), eps=0.1)
        yield Sample(make(3, 8), (8,), make(8))
        yield Sample(make(2, 7), [7])
        yield Sample(make(8), torch.Size([8]), make(8), make(8), 1e-3)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        x = make(2, 3, 4, 5).detach().to(memory_format=torch.channels_last)
        yield Sample(x.requires_grad_(), (4, 5), make(4, 5), make(4, 5))
        yield Sample(make(6).detach().expand(3, 6).requires_grad_(), (6,), make(1).detach().expand(6).requires_grad_())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(device, dtype, size):
    x = torch.randn(6, size).to(device, dtype)
    x[0, 3], x[1, 4], x[2, 5], x[3] = NAN, INF, -INF, 0.5
    weight, bias, grad_y = (torch.randn(s).to(device, dtype) for s in (size, size, x.shape))
    for rows in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)):
        args = (grad_y[rows], x[rows], weight, bias)
        ours = gradients(cupyops.layer_norm, *args)
        theirs = gradients(torch.nn.functional.layer_norm, *args)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.isnan(), b.isnan())
        if rows.start == 3:
            truth = gradients(torch.nn.functional.layer_norm, *(t.double() for t in args))
            torch.testing.assert_close(ours[0][0], bias, rtol=0, atol=0)  # a constant row is the bias
            for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
                assert_as_good_as_torch(a, b, c, what)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean_far_from_zero(device, dtype, size):
    """E[x^2] - mean^2 would have no correct digit here."""
    x = (1000 + torch.randn(3, size, dtype=torch.float64)).to(device, dtype)
    y = cupyops.layer_norm(x, (size,))
    truth = torch.nn.functional.layer_norm(x.double(), (size,))
    # an error of one ulp in the mean is 1000 / std ulp in xhat
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=4000 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one(device, dtype):
    x, weight, bias = (
        torch.randn(3, 1).to(device, dtype),
        torch.ones(1).to(device, dtype),
        torch.full((1,), 2.0).to(device, dtype),
    )
    y, grad_x, grad_weight, grad_bias = gradients(cupyops.layer_norm, torch.ones_like(x), x, weight, bias)
    assert (y == 2).all() and (grad_bias == 3).all()
    noise = 1000 * torch.finfo(dtype).eps  # of the reference: rstd is 316 here
    assert (grad_x.abs() < noise).all() and (grad_weight.abs() < noise).all()


def test_double_backward_of_a_bias_without_weight(device):
    """PyTorch's own raises here, or takes the gradient of grad_bias for 0."""
    x, bias = (torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (6,)))
    assert torch.autograd.gradgradcheck(lambda x, bias: cupyops.layer_norm(x, (6,), None, bias), (x, bias))
    grads = torch.autograd.grad(cupyops.layer_norm(x, (6,), None, bias).pow(2).sum(), (x, bias), create_graph=True)
    ours = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), (x, bias))
    y = lambda x, bias: torch.nn.functional.layer_norm(x, (6,)) + bias
    grads = torch.autograd.grad(y(x, bias).pow(2).sum(), (x, bias), create_graph=True)
    theirs = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), (x, bias))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", SIZES)
def test_each_gradient_alone(device, size):
    """Only what is asked for is computed, by every form of the kernels."""
    tensors = [torch.randn(5, size, device=device), torch.randn(size, device=device), torch.randn(size, device=device)]
    grad_y = torch.randn(5, size, device=device)
    expected = gradients(torch.nn.functional.layer_norm, grad_y, *tensors)[1:]
    for wanted in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y = cupyops.layer_norm(leaves[0], (size,), *leaves[1:])
        found = torch.autograd.grad(y, [leaves[i] for i in wanted], grad_y)
        torch.testing.assert_close(found, tuple(expected[i] for i in wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_small_size(device, dtype):
    """Rows begin and end anywhere in a word, and have any number of those that are loaded together."""
    for size in (size for size in range(1, 128 // dtype.itemsize) if size * dtype.itemsize % 16):
        # of each row another element is large, so that a sum shows that misses one
        x, grad_y = ((torch.randn(size, size) + 30 * torch.eye(size)).to(device, dtype) for _ in range(2))
        args = (grad_y, x, torch.rand(size).to(device, dtype) + 0.5, torch.randn(size).to(device, dtype))
        with cupyops.simulate():
            ours = gradients(cupyops.layer_norm, *args)
        truth = gradients(torch.nn.functional.layer_norm, *(t.double() for t in args))
        close = {torch.bfloat16: 2, torch.float32: 64}[dtype] * torch.finfo(dtype).eps
        for found, expected in zip(ours, truth):
            torch.testing.assert_close(
                found.double(), expected, rtol=close, atol=close, msg=lambda text: f"{size}: {text}"
            )


def test_many_rows(device):
    """More rows than a grid's y or z may have, and than the grid's x is given: blocks stride."""
    x, weight, bias = torch.randn(70001, 3, device=device), torch.randn(3, device=device), torch.randn(3, device=device)
    args = (torch.randn_like(x), x, weight, bias)
    ours = gradients(cupyops.layer_norm, *args)
    theirs = gradients(torch.nn.functional.layer_norm, *args)
    truth = gradients(torch.nn.functional.layer_norm, *(t.double() for t in args))
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**20 + 1, 2049), (3, 2**30)], ids=str)
def test_more_than_2_31_elements(shape):
    needed = 6 * 2 * np.prod(shape, dtype=np.int64)
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"the GPU has less than {needed / 2**30:.0f} GiB")
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    weight, bias = (torch.randn(shape[1], device="cuda", dtype=torch.bfloat16) for _ in range(2))
    grad_y = torch.zeros_like(x)
    grad_y[-1] = torch.randn_like(x[-1])
    ours = gradients(cupyops.layer_norm, grad_y, x, weight, bias)
    theirs = gradients(torch.nn.functional.layer_norm, grad_y[-1:], x[-1:], weight, bias)
    torch.testing.assert_close(ours[0][-1:], theirs[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours[1][-1:], theirs[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours[2:], theirs[2:], rtol=2e-2, atol=2e-2)


def test_half_input_with_float_parameters_on_a_cpu():
    x, weight = torch.randn(3, 5).half(), torch.randn(5)
    y = cupyops.layer_norm(x, (5,), weight)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (5,), weight))


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        (([[1.0, 2.0]], (2,)), {}, "input"),
        ((torch.ones(2, 3, dtype=torch.int64), (3,)), {}, "input"),
        ((torch.ones(2, 3, dtype=torch.complex64), (3,)), {}, "input"),
        ((X, (4,)), {}, "input"),
        ((X, (1, 2, 3)), {}, "input"),
        ((X, (2, 2, 3)), {}, "input"),
        ((torch.ones(()), (1,)), {}, "input"),
        ((X, 3), {}, "normalized_shape"),
        ((X, ()), {}, "normalized_shape"),
        ((X, (3.0,)), {}, "normalized_shape"),
        ((X, (True,)), {}, "normalized_shape"),
        ((X, (-3,)), {}, "normalized_shape"),
        ((X, (3,), [1.0, 1.0, 1.0]), {}, "weight"),
        ((X, (3,), torch.ones(2)), {}, "weight"),
        ((X, (3,), torch.ones(1, 3)), {}, "weight"),
        ((X, (3,), torch.ones(3).half()), {}, "weight"),
        ((X, (3,), torch.ones(3, dtype=torch.int64)), {}, "weight"),
        ((X, (3,), torch.ones(3, device="meta")), {}, "weight"),
        ((X, (3,)), {"bias": torch.ones(())}, "bias"),
        ((X, (3,)), {"bias": torch.ones(3).double()}, "bias"),
        ((X.half(), (3,), torch.ones(3), torch.ones(3).half()), {}, "weight"),
        ((X, (3,)), {"eps": "1"}, "eps"),
        ((X, (3,)), {"eps": None}, "eps"),
    ],
)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^{culprit} is "):
        cupyops.layer_norm(*args, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_element(dtype):
    """Such a row is its own mean: y is the bias, and no gradient reaches x, not even a rounding's worth.

    PyTorch's own kernel for the CPU leaves that much.
    """
    x, weight, bias, grad_y = (torch.randn(shape).to("cuda", dtype) for shape in ((50, 1), (1,), (1,), (50, 1)))
    y, grad_x, *_ = gradients(cupyops.layer_norm, grad_y, x, weight, bias)
    assert torch.equal(y, bias.expand(50, 1)) and not grad_x.any()


@pytest.mark.parametrize("size", [33, 300])  # of short rows PyTorch makes NaN
def test_a_variance_that_overflows(size):
    """As in PyTorch such a row is 0, and so is its gradient: not NaN, of inf - inf."""
    x = Make("cpu", torch.float32)(2, size)
    with torch.no_grad():
        x[1, 3] = 1e30
    with cupyops.simulate():
        y = cupyops.layer_norm(x, (size,))
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y[1], torch.zeros(size)) and torch.equal(grad[1], torch.zeros(size))
    assert torch.equal(torch.nn.functional.layer_norm(x, (size,))[1], torch.zeros(size))


@pytest.mark.parametrize("size", [3, 4, 5, 8, 24])
def test_rows_that_are_nearly_constant(size):
    """The mean is off by no more than its own rounding, and that by rstd is all that y is off by."""
    x = 1000 + torch.randn(500, size) / 16
    with cupyops.simulate():
        y = cupyops.layer_norm(x, (size,)).double()
    truth = torch.nn.functional.layer_norm(x.double(), (size,))
    rounding = 1.01 * 2**-15 * torch.rsqrt(x.double().var(1, keepdim=True, correction=0) + 1e-5)
    assert ((y - truth).abs() <= rounding + 8 * torch.finfo(torch.float32).eps * truth.abs()).all()


# lanes with a vector each, vectors of one warp, a block, a row in shared memory, in backward a cluster; and one of two
# halves of a block
@pytest.mark.parametrize(("size", "arch"), [
    (40, "sm_80"), (69, "sm_80"), (1031, "sm_80"), (16384, "sm_80"), (32773, "sm_80"), (16389, "sm_90"),
    (8197, "sm_90"), (8200, "sm_90"),
])  # fmt: skip
@pytest.mark.parametrize("offset", [0, 1])
def test_several_rows_of_a_block(size, arch, offset):
    compare_several_rows(cupyops.layer_norm, torch.nn.functional.layer_norm, size, arch, offset, parameters=2)


def test_architectures_in_turn():
    """What is planned for one that has clusters is for no other that the same process simulates."""
    x, weight, bias = (Make("cpu", torch.float32)(*shape).detach() for shape in [(2, 20000), (20000,), (20000,)])
    kernels = []
    for arch in ("sm_90", "sm_80", "sm_90"):
        with cupyops.simulate(arch), cupyops.trace() as trace:
            gradients(cupyops.layer_norm, torch.ones_like(x), x, weight, bias)
        kernels.append({record.kernel for record in trace.launches()})
    assert kernels[0] == kernels[2] != kernels[1]
    assert not any("bwd_two_pass" in name for name in kernels[0]) and any("bwd_two_pass" in name for name in kernels[1])
