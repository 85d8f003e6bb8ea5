"""Operators of the kinds that real kernels are: scratch, several launches, loops on the host, results whose size is in the
data, accumulation, structs that hold pointers, integer outputs, outputs without a gradient."""

import numpy as np
import pytest
import torch
from torch import Tensor

import cupyops
from cupyops import InputError, ceil_div
from cupyops.testing import check

CODE = """
struct Row { const float* values; const long long* order; int count; };

__global__ void mark(const float* x, int* flags, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) flags[i] = x[i] > 0;
}
__global__ void scan_step(const int* from, int* to, int by, int n) {  // inclusive, one step of log2(n)
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i] + (i >= by ? from[i - by] : 0);
}
__global__ void scatter(const int* flags, const int* places, long long* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && flags[i]) y[places[i] - 1] = i;
}
__global__ void accumulate(const float* x, const float* by, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += x[i] * by[0];
}
__global__ void gather_row(Row row, float* y) {
  if (threadIdx.x < row.count) y[threadIdx.x] = row.values[row.order[threadIdx.x]];
}
__global__ void centre(const float* x, float* y, float* mean, unsigned char* above, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i];
  if (threadIdx.x == 0) mean[0] = sum / n;
  if (threadIdx.x < n) {
    y[threadIdx.x] = x[threadIdx.x] - sum / n;
    above[threadIdx.x] = x[threadIdx.x] > sum / n;
  }
}
"""
mark, scan_step, scatter, accumulate, gather_row, centre_kernel = (
    cupyops.Kernel(CODE, name) for name in ("mark", "scan_step", "scatter", "accumulate", "gather_row", "centre")
)


@cupyops.operator("cupyops_kinds::positive_places", dtypes=torch.float32)
def positive_places(x: Tensor) -> Tensor:
    """Where x is positive: its size is in the data. Count, allocate, fill."""
    return (x > 0).nonzero().squeeze(1)


@positive_places.forward
def positive_places_forward(x):
    x, n = x.contiguous(), x.numel()
    flags, places, spare = (torch.empty(n, dtype=torch.int32, device=x.device) for _ in range(3))
    grid = ceil_div(n, 64), 64
    mark[grid](x, flags, n)
    places.copy_(flags)
    by = 1
    while by < n:  # a loop of launches over scratch tensors
        scan_step[grid](places, spare, by, n)
        places, spare, by = spare, places, 2 * by
    count = int(places[-1]) if n else 0
    y = torch.empty(count, dtype=torch.int64, device=x.device)
    if count:
        scatter[grid](flags, places, y, n)
    return y, ()


@positive_places.fake
def positive_places_fake(x):
    count = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(count, dtype=torch.int64), ()


class TestSizesInTheData:
    @pytest.mark.parametrize("n", [0, 1, 2, 63, 200])
    def test_values(self, n):
        torch.manual_seed(n)
        x = torch.randn(n)
        with cupyops.simulate(), cupyops.trace() as trace:
            for _ in range(4):
                found = positive_places(x)
        assert torch.equal(found, (x > 0).nonzero().squeeze(1)) and (not n or trace.routes() == {"simulator"})

    def test_compiled(self):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: 2 * positive_places(x), fullgraph=True, backend="aot_eager")
        with cupyops.simulate():
            for seed in range(3):
                torch.manual_seed(seed)
                x = torch.randn(40)
                assert torch.equal(compiled(x), 2 * (x > 0).nonzero().squeeze(1))

    def test_exported(self):
        class Model(torch.nn.Module):
            def forward(self, x):
                return positive_places(x)

        x = torch.randn(40)
        with cupyops.simulate():
            program = torch.export.export(Model(), (x,))
            assert torch.equal(program.module()(-x), (x < 0).nonzero().squeeze(1))

    def test_the_contract(self):
        rows = ["accuracy", "strided", "empty", "size_one", "deterministic", "fake_tensors", "guard_zones"]
        check(positive_places, [torch.randn(70)], only=rows, backends="simulator").raise_if_failed()


@cupyops.operator("cupyops_kinds::accumulate_", mutates=("y",), dtypes=torch.float32)
def accumulate_(y: Tensor, x: Tensor, by: Tensor) -> Tensor:
    """y += by * x."""
    return y.add_(by * x)


@accumulate_.forward
def accumulate_forward(y, x, by):
    accumulate[ceil_div(x.numel(), 64), 64](x.contiguous(), by, y, x.numel())
    return y, ()


@accumulate_.backward
def accumulate_backward(saved, grad_y, x, by, needs_grad):
    return grad_y, by * grad_y if needs_grad.x else None, (x * grad_y).sum().reshape(1) if needs_grad.by else None


@accumulate_.unsupported
def accumulate_unsupported(y, x, by):
    return None if y.is_contiguous() and x.shape == y.shape else "a view"


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_accumulation(kernels):
    torch.manual_seed(0)
    start, x, by = (torch.randn(n, requires_grad=True) for n in (5, 5, 1))
    if not kernels:
        y = accumulate_(accumulate_(2 * start, x, by), x * x, by)
    else:
        with cupyops.simulate(), cupyops.trace() as trace:
            y = accumulate_(accumulate_(2 * start, x, by), x * x, by)
        assert trace.routes() == {"simulator"}
    expected = 2 * start + by * x + by * x * x
    torch.testing.assert_close(y, expected)
    found, wanted = (torch.autograd.grad(one.sin().sum(), (start, x, by)) for one in (y, expected))
    torch.testing.assert_close(found, wanted)


@cupyops.operator("cupyops_kinds::gather", dtypes=torch.float32)
def gather(x: Tensor, order: Tensor) -> Tensor:
    """x[order], by a struct that holds pointers and a number."""
    return x[order]


ROW = np.dtype([("values", np.uint64), ("order", np.uint64), ("count", np.int32)], align=True)


@gather.forward
def gather_forward(x, order):
    x, order = x.contiguous(), order.contiguous()
    y = torch.empty(order.shape, dtype=x.dtype, device=x.device)
    gather_row[1, 64](np.array((cupyops.address(x), cupyops.address(order), order.numel()), ROW), y)
    return y, ()


@gather.backward
def gather_backward(saved, grad_y, x, order):
    return torch.zeros_like(x).index_add_(0, order, grad_y)


def test_a_struct_that_holds_pointers():
    """Its addresses are asked for at each call, and of what torch.compile has no storage for they are 0."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, order: gather(x, order).square(), fullgraph=True, backend="aot_eager")
    kept = []
    with cupyops.simulate():
        for seed in range(5):
            torch.manual_seed(seed)
            x, order = torch.randn(7, requires_grad=True), torch.randperm(7)[:5]
            kept.append((x, order))
            torch.testing.assert_close(gather(x, order), x[order])
            torch.testing.assert_close(compiled(x, order), x[order].square())
        torch.testing.assert_close(torch.autograd.grad(gather(x, order).sin().sum(), x)[0], _grad(x, order))
        exported = torch.export.export(Gather(), (x.detach(), order))
        assert torch.equal(exported.module()(x.detach(), order), x[order].detach())


class Gather(torch.nn.Module):
    """Calls it."""

    def forward(self, x, order):
        return gather(x, order)


def _grad(x, order):
    return torch.autograd.grad(x[order].sin().sum(), x)[0]


@cupyops.operator("cupyops_kinds::centre", dtypes=torch.float32, nondifferentiable=(1,))
def centre(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x - mean, the mean as it is reported, and which are above it."""
    mean = x.mean()
    return x - mean, mean.detach().reshape(1), (x > mean).to(torch.uint8)


@centre.forward
def centre_forward(x):
    x = x.contiguous()
    y, mean = torch.empty_like(x), torch.empty(1, device=x.device)
    above = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    centre_kernel[1, 64](x, y, mean, above, x.numel())
    return (y, mean, above), ()


@centre.backward
def centre_backward(saved, grad_y, grad_mean, grad_above):
    return grad_y - grad_y.mean()


class TestOutputsWithoutAGradient:
    """What is declared is so on every route, as integers are."""

    def outcome(self, function, x):
        y, mean, above = function(x)
        assert y.requires_grad and not mean.requires_grad and not above.requires_grad
        return y, mean, above, *torch.autograd.grad(y.square().sum() + (3 * mean).sum(), x)

    @pytest.mark.parametrize("route", ["reference", "kernels", "compiled", "compiled kernels"])
    def test_on_every_route(self, route):
        torch._dynamo.reset()
        x = torch.randn(9, requires_grad=True)
        function = torch.compile(centre, fullgraph=True, backend="aot_eager") if "compiled" in route else centre
        if "kernels" in route:
            with cupyops.simulate():
                found = [self.outcome(function, x) for _ in range(5)][-1]  # a plan at last
        else:
            found = self.outcome(function, x)
        y = x - x.mean()
        torch.testing.assert_close(found, (y, x.mean().detach().reshape(1), (y > 0).byte(), *_gradient(y, x)))

    def test_of_which_the_reference_says_otherwise(self):
        @cupyops.operator("cupyops_kinds::halves", nondifferentiable=(1,))
        def halves(x: Tensor) -> tuple[Tensor, Tensor]:
            return x / 2, x / 4

        x = torch.ones(3, requires_grad=True)
        first, second = halves(x)
        assert first.requires_grad and not second.requires_grad
        assert not torch.func.grad(lambda x: halves(x)[1].sum())(x).any()

    def test_the_contract(self):
        rows = ["accuracy", "double_backward", "missing_grads", "opcheck", "export", "vmap_of_grad"]
        x = torch.randn(9, requires_grad=True)
        check(centre, [x], only=rows, backends=["reference", "simulator"]).raise_if_failed()

    @pytest.mark.parametrize("wrong", [(2,), (-1,), ("mean",)])
    def test_refusals(self, wrong):
        with pytest.raises(InputError, match="nondifferentiable has .*, expected places of outputs: 0, 1"):

            @cupyops.operator("cupyops_kinds::wrong", nondifferentiable=wrong)
            def wrong_(x: Tensor) -> tuple[Tensor, Tensor]: ...


def _gradient(y, x):
    return torch.autograd.grad(y.square().sum(), x)


def test_what_works_in_place_is_checked_on_copies():
    """Its calls can then be repeated, as every hazard does."""
    y, x, by = torch.randn(6), torch.randn(6, requires_grad=True), torch.randn(1, requires_grad=True)
    before = y.clone()
    rows = ["accuracy", "special_values", "no_gradient_wanted", "gradcheck", "export", "make_fx", "checkpoint", "vmap"]
    report = check(accumulate_, [y, x, by], only=rows, backends=["reference", "simulator"])
    report.raise_if_failed()
    assert torch.equal(y, before)
    assert {row.verdict for row in report.rows if row.hazard == "vmap"} == {"n/a"}


def test_an_accumulation_that_is_wrong_fails():
    @cupyops.operator("cupyops_kinds::twice_", mutates=("y",), dtypes=torch.float32)
    def twice_(y: Tensor, x: Tensor) -> Tensor:
        return y.add_(x)

    @twice_.forward
    def forward(y, x):
        for _ in range(2):
            accumulate[ceil_div(x.numel(), 64), 64](x, torch.ones(1), y, x.numel())
        return y, ()

    assert not check(twice_, [torch.randn(6), torch.randn(6)], only="accuracy", backends="simulator").passed


@pytest.mark.parametrize("by_kernels", [True, False])
def test_lists_of_numbers(by_kernels):
    """Empty ones too, which torch.compile takes for lists of tensors when it asks for gradients."""

    @cupyops.operator(f"cupyops_tests::numbers_{by_kernels}")
    def plus_all(x: Tensor, numbers: list[float]) -> Tensor:
        return x * (sum(numbers) + 1)

    if by_kernels:

        @plus_all.backward
        def backward(saved, grad_y, x, numbers):
            return grad_y * (sum(numbers) + 1)

    compiled = torch.compile(lambda x, numbers: plus_all(x, numbers).sin(), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, requires_grad=True)
    for numbers in ([], [2.0], [1.0, 2.0]):
        (expected,) = torch.autograd.grad((x * (sum(numbers) + 1)).sin().sum(), x)
        for function in (compiled, lambda x, numbers: plus_all(x, numbers).sin()):
            torch.testing.assert_close(torch.autograd.grad(function(x, numbers).sum(), x)[0], expected)


LOSSES = {
    "nll_loss": torch.nn.functional.nll_loss,
    "cross_entropy": torch.nn.functional.cross_entropy,
    "multi_margin_loss": torch.nn.functional.multi_margin_loss,
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_backward_compiles_for_every_size(name, reduction):
    """What torch.compile asks of the reference is done as PyTorch does it elsewhere, whose rules below autograd differ."""

    @cupyops.operator(f"cupyops_kinds::{name}_{reduction}")
    def op(x: Tensor, target: Tensor) -> Tensor:
        return LOSSES[name](x, target, reduction=reduction)

    op.forward(lambda x, target: (op.reference(x, target), ()))
    torch._dynamo.reset()
    compiled = torch.compile(op, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (5, 8):
        x, target = torch.randn(rows, 7, requires_grad=True), torch.arange(rows) % 7
        y, expected = compiled(x, target), op.reference(x, target)
        torch.testing.assert_close(y, expected)
        weights = torch.rand(expected.shape)
        ours, theirs = (torch.autograd.grad(one, x, weights) for one in (y, expected))
        torch.testing.assert_close(ours, theirs)
