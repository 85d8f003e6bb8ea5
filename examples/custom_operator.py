"""An operator of your own in one file: swish with a learnable beta, y = x * sigmoid(beta * x).

Its meaning in PyTorch, a piece of CUDA and two launches; gradients of gradients, torch.compile, autocast and the CPU come
with them. The program checks the gradients in float64 and then learns a beta back from examples.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import torch
import typer
from torch import Tensor

import cupyops

CODE = r"""
#include "cupyops.cuh"

// Thread i owns y[i]. sigmoid(z) = 1 / (1 + exp(-z))
template <typename T> __global__ void swish_fwd(const T* x, const T* beta, T* y, long long n) {
  const long long i = global_thread();
  if (i >= n) return;
  const acc_t<T> v = to_acc(x[i]);
  y[i] = from_acc<T>(v / (1 + exp(-to_acc(beta[0]) * v)));
}

// s = sigmoid(beta * x). Thread i owns grad_x[i] = grad_y * (s + beta * x * s * (1 - s)), and what x[i] adds to
// grad_beta: grad_y * x^2 * s * (1 - s).
template <typename T>
__global__ void swish_bwd(const T* grad_y, const T* x, const T* beta, T* grad_x, acc_t<T>* parts, long long n) {
  const long long i = global_thread();
  if (i >= n) return;
  const acc_t<T> g = to_acc(grad_y[i]), v = to_acc(x[i]), b = to_acc(beta[0]);
  const acc_t<T> s = 1 / (1 + exp(-b * v)), slope = v * s * (1 - s);
  grad_x[i] = from_acc<T>(g * (s + b * slope));
  parts[i] = g * v * slope;
}
"""

swish_fwd = cupyops.Kernel(CODE, "swish_fwd<T>")
swish_bwd = cupyops.Kernel(CODE, "swish_bwd<T>")


@cupyops.operator("custom_operator::swish")
def swish(x: Tensor, beta: Tensor) -> Tensor:
    """x * sigmoid(beta * x)."""
    return x * torch.sigmoid(beta * x)


@swish.forward
def _(x, beta):
    x = x.contiguous()
    y = torch.empty_like(x)
    swish_fwd[cupyops.ceil_div(x.numel(), 256), 256](x, beta, y, x.numel(), T=x.dtype)
    return y, ()


@swish.backward
def _(saved, grad_y, x, beta):
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    parts = torch.empty_like(x, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    swish_bwd[cupyops.ceil_div(x.numel(), 256), 256](grad_y, x, beta, grad_x, parts, x.numel(), T=x.dtype)
    return grad_x, parts.sum().to(beta.dtype).view_as(beta)


@swish.unsupported
def _(x, beta):
    return None if beta.numel() == 1 and beta.dim() == 0 else "beta is not one number"


def learn_beta(device: str, steps: int, trace: bool) -> float:
    """Learn back the beta that made some examples."""
    x = torch.randn(4096, device=device)
    target = swish(x, torch.tensor(2.0, device=device))
    beta = torch.nn.Parameter(torch.tensor(0.5, device=device))
    optimizer = cupyops.optim.SGD([beta], lr=2.0, momentum=0.5)
    for step in range(steps):
        with cupyops.trace() if trace and step == 0 else nullcontext() as seen:
            optimizer.zero_grad()
            loss = (swish(x, beta) - target).square().mean()
            loss.backward()
            optimizer.step()
        if seen is not None:
            typer.echo(str(seen))
        if step % 20 == 0 or step == steps - 1:
            typer.echo(f"step {step:3d}  loss {loss.item():.3e}  beta {beta.item():.4f}")
    return beta.item()


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels the first step ran.")] = False,
) -> None:
    """Check the operator, then train through it."""
    torch.manual_seed(seed)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(300, device=device, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(1.5, device=device, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(swish, (x, beta))
    torch.autograd.gradgradcheck(swish, (x[:20].detach().requires_grad_(), beta))
    if device.startswith("cuda"):
        by = "the kernels"
    else:
        by = "the kernels, in the simulator" if cupyops.simulating() else "the reference (no GPU in use)"
    typer.echo(f"gradients of {by} agree with finite differences in float64, and so do theirs")
    typer.echo(f"beta learnt: {learn_beta(device, steps, trace):.4f}, made with: 2")


if __name__ == "__main__":
    app()
