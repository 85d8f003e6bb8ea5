"""Mistakes that are common in kernels, one at a time in an operator that is right: each is found, and it has no alarm."""

import pytest
import torch
from broken_operators import normal

import cupyops
from cupyops.testing import check

CODE = """
__global__ void total(const float* x, float* y, int n) {
  __shared__ float s[64];
  const long long r = blockIdx.x;
  const int t = threadIdx.x;
  float v = 0;
  for (int i = t; i < n; i += 64) v += x[r * n + i];
  s[t] = v;
  __syncthreads();
  if (t < 32) {
    v = s[t] + s[t + 32];
    for (int h = 16; h; h /= 2) v += __shfl_down_sync(0xffffffff, v, h);
    if (t == 0) y[r] = v;
  }
}
"""
# what is changed in the kernels, or in the operator around them, and the hazards of which one tells
MISTAKES = {
    "no barrier": ("__syncthreads();", "", ["accuracy"]),
    "past the end of shared memory": ("s[t + 32]", "s[t + 33]", ["accuracy"]),
    "a sum that nobody has cleared": ("y[r] = v", "y[r] += v", ["accuracy"]),
    "some lanes of the warp alone": ("t < 32", "t < min(n, 32)", ["tails", "size_one"]),
    "as many columns as the sample has": ("i < n; i += 64) v", "i < min(n, 128); i += 64) v", ["tails"]),
    "rows counted in 16 bits": ("long long r =", "short r =", ["many_rows"]),
    "rows along y": ("r = blockIdx.x", "r = blockIdx.y", ["many_rows"]),
    "the input as if it were dense": ("x.contiguous()", "x", ["strided", "transposed"]),
    "rows of no columns": ("if y.numel()", "if x.numel()", ["empty"]),
    "one result for all calls of a size": (
        "torch.empty(size)",
        "kept.setdefault(size, torch.empty(size))",
        ["calls_between"],
    ),
}
OPERATOR = """
def forward(x):
    x, size = x.contiguous(), tuple(map(int, x.shape[:-1]))
    y = torch.empty(size)
    if y.numel():
        total[(1, y.numel()) if "blockIdx.y" in code else y.numel(), 64](x, y, x.shape[-1])
    return y, (x,)
def backward(saved, grad_y):
    return grad_y.unsqueeze(-1).expand_as(saved[0]).contiguous()
"""


def operator(right="", wrong=""):
    assert right in CODE + OPERATOR
    code, names = CODE.replace(right, wrong) if right else CODE, {"torch": torch, "kept": {}}
    names |= {"total": cupyops.Kernel(code, "total", strided=True), "code": code}
    exec(OPERATOR.replace(right, wrong) if right else OPERATOR, names)

    @cupyops.operator(f"cupyops_broken_kernels::total_{len(cupyops.operators())}", dtypes=torch.float32)
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    total.forward(names["forward"])
    total.backward(names["backward"])
    total.unsupported(lambda x: None if x.dim() else "a number")
    return total


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    right, wrong, hazards = MISTAKES[mistake]
    report = check(operator(right, wrong), [normal(5, 70)], only=hazards, backends="simulator", shrink=False)
    assert {row.hazard for row in report.failures} == set(hazards), f"\n{report}"


def test_the_operator_without_mistakes():
    report = check(operator(), [normal(5, 70)], shrink=False)
    assert report.passed, f"\n{report}"
    assert [row.verdict for row in report.rows if row.hazard == "many_rows"] == ["n/a", "pass"]
