"""What `check` does not hold against an operator: what PyTorch itself cannot, and what its declaration says."""

import torch

import cupyops
from cupyops.testing import check

HALVE = """
extern "C" __global__ void halve(const float* x, long long* places, float* y, float* seen, int n) {
  int i = threadIdx.x;
  if (i < n) { places[i] = i; y[i] = x[i] / 2; seen[i] = x[i] * x[i]; }
}
extern "C" __global__ void add(const float* g, float* grad, int n) {
  if (threadIdx.x < n) atomicAdd(grad + threadIdx.x, g[threadIdx.x] / 2);
}
"""
halve_kernel, add_kernel = cupyops.Kernel(HALVE, "halve"), cupyops.Kernel(HALVE, "add")


@cupyops.operator("cupyops_fair::halve", nondifferentiable=(2,), nondeterministic="atomicAdd")
def halve(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its first output has integers; the third has no gradient, though the reference's has one."""
    if x.dim() != 1:
        raise ValueError("one dimension")
    return torch.arange(x.numel()), x / 2, x.square()


@halve.unsupported
def _(x):
    return None if 0 < x.numel() <= 256 else "none, or too many"


@halve.forward
def _(x):
    x = cupyops.contiguous(x)
    places, y, seen = torch.empty_like(x, dtype=torch.int64), torch.empty_like(x), torch.empty_like(x)
    halve_kernel[1, 256](x, places, y, seen, x.numel())
    return (places, y, seen), ()


@halve.backward
def _(saved, grad_places, grad_y, grad_seen, x):
    grad_y, grad = cupyops.contiguous(grad_y), torch.zeros_like(x)
    add_kernel[1, 256](grad_y, grad, x.numel())
    return grad


def test_integers_first_outputs_cut_off_and_sums_without_denormals():
    torch.manual_seed(0)
    rows = ("accuracy", "opcheck", "special_values", "gradient_penalty")
    report = check(halve, [torch.randn(7, requires_grad=True)], only=rows, backends="simulator", progress=False)
    report.raise_if_failed()
    assert {row.hazard: row.verdict for row in report.rows} == dict.fromkeys(rows, "pass")


def test_of_small_numbers_no_more_is_let_pass():
    """What is let pass is what denormals come to: a forward that loses what is larger is found."""

    @cupyops.operator("cupyops_fair::cut", nondeterministic="atomicAdd")
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @cut.forward
    def _(x):
        x = cupyops.contiguous(x)
        places, y, seen = torch.empty_like(x, dtype=torch.int64), torch.empty_like(x), torch.empty_like(x)
        halve_kernel[1, 256](x, places, y, seen, x.numel())
        return torch.where(y.abs() < 1e-33, y + 1e-34, y), ()

    report = check(cut, [torch.randn(7)], only=("accuracy", "special_values"), backends="simulator", progress=False)
    assert {row.hazard: row.verdict for row in report.rows} == {"accuracy": "pass", "special_values": "fail"}


def test_a_reference_that_reads_data_cannot_be_mapped():
    @cupyops.operator("cupyops_fair::up_to")
    def up_to(x: torch.Tensor) -> torch.Tensor:
        return x * (1 if x.sum().item() > 0 else 2)

    report = check(up_to, [torch.rand(3, requires_grad=True)], only=("vmap", "vmap_of_grad"), backends="reference")
    assert {row.verdict for row in report.rows} == {"n/a"}
    assert all("the reference" in row.reason for row in report.rows)
