"""Operators whose kernels give other bits from call to call, and PyTorch's settings that ask for none of that."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import cupyops
from cupyops.testing import check

CODE = """
__global__ void scatter_add(const float* x, const long long* index, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&y[index[i]], x[i]);
}
__global__ void gather(const float* grad_y, const long long* index, float* grad_x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) grad_x[i] = grad_y[index[i]];
}
"""
kernel, gather = cupyops.Kernel(CODE, "scatter_add"), cupyops.Kernel(CODE, "gather")


def make(name, **options):
    """y[index[i]] += x[i], by atomics, over `size` sums."""

    @cupyops.operator(f"cupyops_atomics::{name}", dtypes=(torch.float32,), **options)
    def scattered(x: Tensor, index: Tensor, size: int) -> Tensor:
        return torch.zeros(size, dtype=x.dtype, device=x.device).index_add(0, index, x)

    @scattered.forward
    def forward(x, index, size):
        y = torch.zeros(size, dtype=x.dtype, device=x.device)
        kernel[cupyops.ceil_div(x.numel(), 8), 8](x.contiguous(), index.contiguous(), y, x.numel())
        return y, ()

    @scattered.backward
    def backward(saved, grad_y, index):
        grad_x = torch.empty(index.shape, dtype=grad_y.dtype, device=grad_y.device)
        gather[cupyops.ceil_div(index.numel(), 8), 8](grad_y.contiguous(), index.contiguous(), grad_x, index.numel())
        return grad_x

    return scattered


declared = make("declared", nondeterministic="atomicAdd of floats")
silent = make("silent")


@contextmanager
def deterministic(warn_only=False):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def sample():
    torch.manual_seed(0)
    return torch.randn(100, requires_grad=True), torch.randint(0, 3, (100,)), 3


def routes(function, *args):
    with cupyops.simulate(), cupyops.trace() as trace:
        function(*args)
    return [(one.route, one.note) for one in trace.records]


def test_the_reference_where_pytorch_asks_for_deterministic_algorithms():
    assert routes(declared, *sample())[0][0] == "simulator"
    with deterministic():
        ((route, note),) = routes(declared, *sample())
        assert route == "reference" and "its kernels are not: atomicAdd of floats" in note
        assert routes(silent, *sample())[0][0] == "simulator"


def test_recorded_plans_follow_the_setting():
    x, index, size = sample()
    expected = torch.zeros(3).index_add(0, index, x)
    with cupyops.simulate():
        for strict in (False, True, False, True):
            for _ in range(5):
                if strict:
                    with deterministic():
                        assert torch.equal(declared(x, index, size), expected)
                else:
                    torch.testing.assert_close(declared(x, index, size), expected)
        with deterministic(warn_only=True):
            for _ in range(5):
                with pytest.warns(UserWarning, match="deterministic implementation"):
                    declared(x, index, size)
        with deterministic(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(declared(x, index, size), expected)


def test_warn_only_warns_at_each_call_and_runs_the_kernels():
    args = sample()
    with deterministic(warn_only=True), warnings.catch_warnings(record=True) as caught, cupyops.simulate():
        warnings.simplefilter("always")
        for _ in range(5):
            torch.autograd.grad(declared(*args).sum(), args[0])
        assert routes(declared, *args)[0][0] == "simulator"
    told = [str(one.message) for one in caught if "deterministic" in str(one.message)]
    assert [("(forward)" in one, "(backward)" in one) for one in told] == [(True, False), (False, True)] * 5 + [
        (True, False)
    ]
    assert "atomicAdd of floats" in told[0] and "warn_only=True" in told[0]


def test_a_backward_of_a_forward_by_kernels_raises():
    args = sample()
    with cupyops.simulate():
        y = declared(*args)
        with deterministic(), pytest.raises(RuntimeError, match=r"declared \(backward\) does not have a deterministic"):
            y.sum().backward()


def test_compiled():
    torch._dynamo.reset()
    x, index, size = sample()
    compiled = torch.compile(lambda x: 2 * declared(x, index, size), fullgraph=True, backend="aot_eager")
    with cupyops.simulate():
        for strict in (False, True):
            torch.use_deterministic_algorithms(strict)
            try:
                y = compiled(x)
                (found,) = torch.autograd.grad(y.sum(), x)
            finally:
                torch.use_deterministic_algorithms(False)
            torch.testing.assert_close(y, 2 * torch.zeros(3).index_add(0, index, x))
            assert torch.equal(found, torch.full((100,), 2.0))


def test_check_tells_where_the_declaration_is_missing():
    rows = ["deterministic", "deterministic_algorithms", "accuracy"]
    report = check(silent, list(sample()), only=rows, backends="simulator")
    (failure,) = report.failures
    assert (
        failure.hazard == "deterministic"
        and "cupyops.operator('cupyops_atomics::silent', nondeterministic=...)" in (failure.reason)
    )
    report = check(declared, list(sample()), only=rows, backends="simulator")
    report.raise_if_failed()
    (row,) = [row for row in report.rows if row.hazard == "deterministic"]
    assert (row.verdict, row.reason) == ("n/a", "declared to be nondeterministic (atomicAdd of floats)")


def test_true_is_a_reason():
    op = make("true", nondeterministic=True)
    with deterministic():
        assert routes(op, *sample())[0][0] == "reference"


@pytest.mark.gpu
def test_on_a_gpu():
    x, index, size = (one.cuda() if torch.is_tensor(one) else one for one in sample())
    expected = torch.zeros(3, dtype=torch.float64, device="cuda").index_add(0, index, x.double()).float()
    for _ in range(5):
        torch.testing.assert_close(declared(x, index, size), expected)
    with deterministic():
        first = declared(x, index, size)
        assert all(torch.equal(declared(x, index, size), first) for _ in range(5))
