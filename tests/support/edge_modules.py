"""What other processes import: a module that holds every public operator, an author's operator, and kernels."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

import cupyops

put = cupyops.Kernel("__global__ void put(float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = 7; }", "put")


@cupyops.operator("cupyops_tests::doubled")
def doubled(x: Tensor) -> Tensor:
    """2 x."""
    return 2 * x


@cupyops.autotune(configs={"one": dict(block=32)})
def tuned(x, *, block):
    """x, by a configuration."""
    return x + block


squared = cupyops.elementwise("cupyops_tests::squared(T x) -> T y", "y = x * x")


class Everything(torch.nn.Module):
    """It holds all public functions, and calls what is defined here."""

    def __init__(self) -> None:
        super().__init__()
        public = {name: one for name, one in vars(cupyops.ops).items() if inspect.isfunction(one) and name[0] != "_"}
        self.public = public
        self.inner = {name: one for name, one in cupyops.operators().items() if name.startswith("cupyops::")}
        self.put, self.doubled, self.tuned, self.squared = put, doubled, tuned, squared
        self.nameless = cupyops.Kernel(
            "template <typename T> __global__ void put(T* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = 8; }",
            "put<T>",
            T=(torch.float32,),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with cupyops.simulate():
            y = torch.empty(4)
            self.put[1, 32](y, 4)
            self.nameless[1, 32](y[2:], 2, T=torch.float32)
        own = y, self.doubled(x), self.tuned(x), self.squared(x)
        return (*own, *(torch.tensor(one is getattr(cupyops, name)) for name, one in self.public.items()))
