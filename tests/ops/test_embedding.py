import functools
import subprocess
import sys

import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu


@functools.wraps(F.embedding)
def by_torch(input, weight, *args, **kwargs):
    """PyTorch's, but that its CUDA kernels make no table without columns: that ends the process."""
    if weight.is_cuda and 0 in weight.shape:
        return F.embedding(input.cpu(), weight.cpu(), *args, **kwargs).to(weight.device)
    return F.embedding(input, weight, *args, **kwargs)


class TestEmbedding(OperatorContract):
    function = staticmethod(cupyops.embedding)
    torch_function = staticmethod(by_torch)
    kernels = {"embedding_fwd", "embedding_bwd_linked", "embedding_bwd"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make.integers(300, high=5), make(5, 40), 2)  # lists of several pieces
        yield Sample(make.integers(2, 61, high=500), make(500, 33), scale_grad_by_freq=True)
        yield Sample(make.integers(40, high=6), make(6, 16), scale_grad_by_freq=True)  # in vectors
        yield Sample(make.integers(5, high=50), make(50, 133))  # rows that are not short

    def small_samples(self, make: Make):
        yield Sample(make.integers(4, 5, high=7), make(7, 3))
        yield Sample(make.integers(9, high=4), make(4, 8), padding_idx=-2)
        yield Sample(make.integers(high=6), make(6, 5))


def gradients(function, indices, weight, **options):
    """(result, gradient of the weight) for a gradient of small numbers."""
    leaf = weight.detach().requires_grad_()
    y = function(indices, leaf, **options)
    grad = torch.arange(y.numel(), device=y.device).remainder(7).sub(3).to(y.dtype).view(y.shape)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [3, 8, 17, 133])
def test_large_tables(device, size, dtype):
    """A warp clears many short rows, a thread copies several vectors, however small the table is."""
    indices = torch.randint(0, 20, (30,), device=device) ** 2
    weight = torch.randn(400, size, device=device).to(dtype)
    with assume_gpu(multiprocessors=1, threads=64), cupyops.simulate():
        found = gradients(cupyops.embedding, indices, weight)
    torch.testing.assert_close(found, gradients(F.embedding, indices, weight))


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("by_freq", [False, True])
@pytest.mark.parametrize("counts", [[1], [31, 32, 33], [67], [3, 66, 67, 1], [200, 132, 2, 133], [700]])
def test_lists(device, counts, padding_idx, by_freq):
    """Short, long, and of several pieces, in any order of positions; linked and sorted: the same bits."""
    indices = torch.repeat_interleave(torch.arange(1, len(counts) + 1), torch.tensor(counts))
    indices = indices[torch.randperm(len(indices))].to(device)
    options = dict(padding_idx=padding_idx, scale_grad_by_freq=by_freq)
    for size in (4, 5):
        weight = torch.randn(len(counts) + 4, size, device=device)
        with cupyops.simulate():
            found = gradients(cupyops.embedding, indices, weight, **options)
            with cupyops.use_form("embedding:sorted"):
                again = gradients(cupyops.embedding, indices, weight, **options)
        torch.testing.assert_close(found, gradients(F.embedding, indices, weight, **options))
        torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_lists_of_many_lengths(device):
    """As many indices as a block's most positions are for: rows of zeros, and of 1 to about 900 positions."""
    indices = torch.rand(16384).pow(3).mul(6000).long().to(device)
    for size in (4, 5):
        weight = torch.randn(6000, size, device=device)
        with cupyops.simulate():
            found = gradients(cupyops.embedding, indices, weight)
            with cupyops.use_form("embedding:sorted"):
                again = gradients(cupyops.embedding, indices, weight)
        torch.testing.assert_close(found, gradients(F.embedding, indices, weight))
        torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_many_indices_are_sorted(device):
    indices, weight = torch.arange(33000, device=device).remainder(7), torch.randn(7, 1, device=device)
    with cupyops.simulate(), cupyops.trace() as trace:
        found = gradients(cupyops.embedding, indices, weight)
    assert [record.kernel.partition("<")[0] for record in trace.launches()] == [
        "embedding_fwd",
        "embedding_bwd_sorted",
        "embedding_bwd",
    ]
    torch.testing.assert_close(found, gradients(F.embedding, indices, weight))


@pytest.mark.parametrize("shape, table", [((0,), (3, 4)), ((2, 0), (0, 4)), ((3,), (5, 0)), ((), (1, 1))])
def test_little_and_nothing(device, shape, table):
    indices, weight = torch.zeros(shape, dtype=torch.int64, device=device), torch.randn(table, device=device)
    with cupyops.simulate():
        found = gradients(cupyops.embedding, indices, weight)
    torch.testing.assert_close(found, gradients(by_torch, indices, weight), rtol=0, atol=0)


def test_layouts_of_the_table(device):
    """A slice of wider rows, one row over and over, a transposed table; int32, and indices in any strides."""
    table = torch.randn(6, 12, device=device)
    indices = torch.tensor([[1, 5, 3], [0, 1, 1]], dtype=torch.int32, device=device)
    for weight in (table[:, 2:9], table[:1].expand(6, 12), torch.randn(12, 6, device=device).t(), table[::2]):
        for given in (indices.remainder(len(weight)), indices.remainder(len(weight)).t()):
            with cupyops.simulate():
                found = cupyops.embedding(given, weight)
            torch.testing.assert_close(found, F.embedding(given, weight), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_added_in_float32(device, dtype):
    indices, grad = torch.zeros(4000, dtype=torch.int64, device=device), torch.ones(4000, 8, dtype=dtype, device=device)
    weight = torch.zeros(2, 8, dtype=dtype, device=device, requires_grad=True)
    with cupyops.simulate():
        (found,) = torch.autograd.grad(cupyops.embedding(indices, weight), weight, grad)
    assert (found[0] == 4000).all() and (found[1] == 0).all()


def test_max_norm(device):
    """In place and without a gradient of its own, though the weight wants one; rows that are not named stay."""
    indices = torch.tensor([0, 2, 2, 1], device=device)
    weights = [torch.arange(12.0, device=device).view(4, 3).requires_grad_() for _ in range(2)]
    with cupyops.simulate():
        found = gradients_of(cupyops.embedding(indices, weights[0], max_norm=3.0, norm_type=1), weights[0])
    expected = gradients_of(F.embedding(indices, weights[1], max_norm=3.0, norm_type=1), weights[1])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*weights)
    assert torch.equal(weights[0][3].detach().cpu(), torch.tensor([9.0, 10.0, 11.0]))


def gradients_of(y, weight):
    return y.detach(), torch.autograd.grad(y.square().sum(), weight)[0]


def test_a_sparse_gradient(device):
    indices, weight = torch.tensor([1, 3, 1], device=device), torch.randn(5, 4, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(cupyops.embedding(indices, weight, sparse=True).sum(), weight)
    (expected,) = torch.autograd.grad(F.embedding(indices, weight, sparse=True).sum(), weight)
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_the_weight_may_change_before_backward(device):
    """The gradient does not depend on it."""
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    y = cupyops.embedding(torch.tensor([1, 1], device=device), weight)
    with torch.no_grad():
        weight.mul_(2)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert grad.sum(1).tolist() == [0, 8, 0, 0, 0]


@pytest.mark.parametrize(
    "message, change",
    [
        ("input", dict(input=None)),
        ("input", dict(input=torch.zeros(3))),
        ("input", dict(input=torch.zeros(3, dtype=torch.bool))),
        ("weight", dict(weight=None)),
        ("weight", dict(weight=torch.zeros(4))),
        ("weight", dict(weight=torch.zeros(4, 2, device="meta"))),
        ("weight", dict(weight=torch.zeros(4, 2, dtype=torch.complex64), max_norm=1.0)),
        ("padding_idx", dict(padding_idx=4)),
        ("padding_idx", dict(padding_idx=-5)),
        ("padding_idx", dict(padding_idx=1.0)),
        ("max_norm", dict(max_norm="1")),
        ("norm_type", dict(max_norm=1.0, norm_type=None)),
    ],
)
def test_bad_arguments(message, change):
    call = dict(input=torch.zeros(3, dtype=torch.int64), weight=torch.zeros(4, 2))
    with pytest.raises(cupyops.InputError, match=f"^{message} "):
        cupyops.embedding(**call | change)


@pytest.mark.parametrize("bad", [4, -1])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_an_index_out_of_range_on_the_cpu(bad, options):
    with pytest.raises(cupyops.InputError, match=r"^input\[\d+\] is -?\d+, expected a row of weight in \[0, \d+\)"):
        cupyops.embedding(torch.tensor([0, bad]), torch.zeros(4, 2), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [4, -1])
def test_an_index_out_of_range_on_a_gpu(bad):
    """It says which, and stops the kernel: after that the process has no use of the GPU, so it is one of its own."""
    program = f"""
import torch, cupyops
cupyops.embedding(torch.tensor([0, {bad}], device="cuda"), torch.zeros(4, 2, device="cuda"))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and f"input[1] is {bad}, expected a row of weight in [0, 4)" in done.stdout
