"""Functions as exact as a result of 16 bits can show, beside PyTorch's in float64: they are computed in fp32."""

import math

import pytest
import torch

import cupyops

KERNEL = """
#include "common/elementwise/expression.cuh"
__global__ void nearly_{name}(const float* __restrict__ x, float* __restrict__ y, int n) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = expression::nearly::{name}(x[i]);
}}
"""
ULPS = 10  # a result of fp16 shows one in 8192


def numbers(least):
    """Of both signs, of every size; around the places where another formula begins."""
    sizes = torch.cat([torch.logspace(-30, 4, 3000), torch.linspace(0.2, 0.3, 500), torch.linspace(0.5, 0.6, 500)])
    both = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e38, -1.0])])
    return both[(both >= least) | both.isnan()]


@pytest.mark.parametrize("name, least", [("tanh", -math.inf), ("log1p", -1.0)])
def test_error(name, least, device):
    x = numbers(least).to(device)
    y, wanted = torch.empty_like(x), getattr(torch, name)(x.double())
    kernel = cupyops.Kernel(KERNEL.format(name=name), f"nearly_{name}")
    with cupyops.simulate() if device.type == "cpu" else cupyops.never_slower(False):
        kernel[-(-len(x) // 256), 256](x, y, len(x))
    known = wanted.isfinite()
    torch.testing.assert_close(y[~known].double(), wanted[~known], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.signbit()[known], wanted.signbit()[known])
    ulp = 2.0 ** (wanted[known].abs().clamp_min(2.0**-126).log2().floor() - 23)
    assert ((y[known] - wanted[known]).abs() / ulp).max() <= ULPS
