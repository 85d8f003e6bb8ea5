"""What broken operators are made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
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


@pytest.fixture(autouse=True)
def memory_as_it_comes():
    """The tests' own NaN in every `torch.empty`, and their deterministic algorithms, would find what hazards must find."""
    torch.use_deterministic_algorithms(False)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills


def eager(*tensors: Tensor) -> bool:
    """Whether this is a plain call, on tensors that have memory: nothing traces, transforms or fakes them."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    return forward_ad._current_level < 0 and all(type(t) is Tensor and not t.is_meta for t in tensors)


def saving(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """`forward` of tensors, which are saved for backward; `backward(grad_y, *tensors)` makes their gradients."""

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx, grad_y):
            return backward(grad_y, *ctx.saved_tensors)

    return Saving.apply


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
