import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample, assert_as_good_as_torch
from normalisations import KERNELS, compare_pipelined, compare_several_rows, gradients

import cupyops

NAN, INF = float("nan"), float("inf")

# one for each form: a thread for a row, lanes with a vector each, vectors of one warp, several vectors, a block, a cluster,
# shared memory or two passes

SIZES = [7, 24, 40, 69, 300, 1031, 32776]
# PyTorch says so where the dtypes differ
mixed = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


class TestRmsNorm(OperatorContract):
    function = staticmethod(cupyops.rms_norm)
    torch_function = staticmethod(torch.nn.functional.rms_norm)
    kernels = KERNELS
    differs = {
        ("special_values", "gpu"): "PyTorch's CUDA kernel makes all of a row with an infinity NaN, its own formula not"
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(530, 33), (33,), make(33))  # partials of several rows, rows off 16 bytes
        yield from (Sample(make(50, size), (size,), make(size)) for size in (64, 69, 1031))
        yield from (Sample(make(5, size), (size,)) for size in (33, 64, 69, 301, 1024))  # no gradient but grad_x
        yield from (Sample(make(50, size), (size,), make(size)) for size in (24, 32, 40))
        yield Sample(make(5, 32), (32,))
        yield from (Sample(make(5, 8), (8,), weight) for weight in (None, make(8)))
        yield Sample(make(9, 2, 512), (2, 512), make(2, 512))
        yield from (Sample(make(2, size), (size,), make(size)) for size in (8197, 16389, 32783))  # in shared memory
        # a tile has part of a vector, the end of the row: of a cluster, of a long row; by vectors
        for size in (71680 // make.dtype.itemsize - 1, 65535, 65544):
            yield Sample(make(2, size), (size,), make(size))
        wide = 32768 // make.dtype.itemsize  # on a GPU the widest block, whose statistics backward prefetches late
        yield from (Sample(make(2, wide), (wide,), weight) for weight in (None, make(wide)))
        yield Sample(make(0, 7), (7,), make(7))
        yield Sample(make(7, 0), (0,), make(0))

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), (5,), make(5))
        yield Sample(make(2, 2, 3), (2, 3), make(2, 3), eps=0.1)
        yield Sample(make(2, 7), [7])
        yield Sample(make(8), torch.Size([8]), make(8), 1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(device, dtype, size):
    x = torch.randn(6, size).to(device, dtype)
    x[0, 3], x[1, 4], x[2, 5], x[3] = NAN, INF, -INF, 0.0
    weight, grad_y = (torch.randn(s).to(device, dtype) for s in (size, x.shape))
    for rows in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)):
        args = (grad_y[rows], x[rows], weight)
        ours = gradients(cupyops.rms_norm, *args)
        # on a CPU: PyTorch's CUDA kernel makes all of a row with an infinity NaN
        theirs = [t.to(device) for t in gradients(torch.nn.functional.rms_norm, *(t.cpu() for t in args))]
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.isnan(), b.isnan())
        if rows.start == 3:
            # the default of eps is that of the type computed in
            eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            exact = lambda x, shape, weight, eps=eps: torch.nn.functional.rms_norm(x, shape, weight, eps)
            truth = gradients(exact, *(t.double() for t in args))
            assert not ours[0][0].any()
            for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight")):
                assert_as_good_as_torch(a, b, c, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [None, 0.0, 0.5])
def test_eps(device, dtype, eps):
    """Beside values whose square is about that of the default."""
    x = (3e-4 * torch.randn(5, 12)).to(device, dtype)
    y, theirs = (f(x, (12,), eps=eps) for f in (cupyops.rms_norm, torch.nn.functional.rms_norm))
    torch.testing.assert_close(y, theirs)


def test_squares_that_overflow():
    """As in PyTorch such a row is 0."""
    x = Make("cpu", torch.float32)(2, 33)
    with torch.no_grad():
        x[1, 3] = 1e30
    with cupyops.simulate():
        y = cupyops.rms_norm(x, (33,))
        (grad,) = torch.autograd.grad(y.sum(), x)
    theirs = torch.nn.functional.rms_norm(x, (33,))
    assert torch.equal(y[1], theirs[1]) and torch.equal(grad[1], torch.autograd.grad(theirs.sum(), x)[0][1])


@mixed
def test_a_weight_of_another_dtype(device):
    """PyTorch takes it, by elementary operations; so do we, by the reference."""
    x, weight = torch.randn(3, 5, device=device).bfloat16(), torch.randn(5, device=device)
    y, theirs = (f(x, (5,), weight) for f in (cupyops.rms_norm, torch.nn.functional.rms_norm))
    assert y.dtype == theirs.dtype
    torch.testing.assert_close(y, theirs)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        (([[1.0, 2.0]], (2,)), {}, "input"),
        ((torch.ones(2, 3, dtype=torch.int64), (3,)), {}, "input"),
        ((X, (4,)), {}, "input"),
        ((X, 3), {}, "normalized_shape"),
        ((X, ()), {}, "normalized_shape"),
        ((X, (3,), torch.ones(2)), {}, "weight"),
        ((X, (3,), torch.ones(3, dtype=torch.int64)), {}, "weight"),
        ((X, (3,), torch.ones(3, device="meta")), {}, "weight"),
        ((X, (3,)), {"eps": "1"}, "eps"),
    ],
)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^{culprit} is "):
        cupyops.rms_norm(*args, **kwargs)


@pytest.mark.parametrize("size", [128, 1032])
def test_pipelined_rows(size):
    weight = torch.randn(size)
    compare_pipelined(lambda x: (cupyops.rms_norm(x, (size,), weight),), 1, size)


# lanes with a vector each, vectors of one warp, a block, in backward the widest block, aligned too, a cluster
@pytest.mark.parametrize(
    ("size", "arch"),
    [(40, "sm_80"), (69, "sm_80"), (1031, "sm_80"), (16384, "sm_80"), (16389, "sm_90"), (20489, "sm_90")],
)
def test_several_rows_of_a_block(size, arch):
    compare_several_rows(cupyops.rms_norm, torch.nn.functional.rms_norm, size, arch)
