"""What broken operators are made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import cupyops

DOUBLE = """
__global__ void double_fwd(const float* x, float* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
"""


def eager(*tensors: Tensor) -> bool:
    """Whether this is a plain call, on tensors that have memory: nothing traces, transforms or fakes them."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    return forward_ad._current_level < 0 and all(type(t) is Tensor and not t.is_meta for t in tensors)


def doubling(
    name: str,
    text: str = DOUBLE,
    around: Callable[[cupyops.Kernel, Tensor], AbstractContextManager[Any]] = lambda kernel, x: nullcontext(),
) -> cupyops.Operator:
    """An operator of one kernel, which backward launches too; each launch is made inside `around(kernel, x)`."""
    kernel = cupyops.Kernel(text, "double_fwd")

    @cupyops.operator(f"cupyops_tests::{name}")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def launch(x):
        y = torch.empty_like(x)
        x = x if x.stride() == y.stride() else torch.empty_like(y).copy_(x)
        with around(kernel, x):
            if x.numel():
                kernel[x.numel() // 128 + 1, 128](x, y, x.numel())
        return y

    double.forward(lambda x: (launch(x), ()))
    double.backward(lambda saved, grad_y: launch(grad_y))
    double.reference_backward(lambda saved, grad_y: 2 * grad_y)
    double.unsupported(lambda x: None if x.dtype == torch.float32 else "float32 only")
    return double
