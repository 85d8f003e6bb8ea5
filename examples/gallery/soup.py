"""A list of tensors: y = sum of w[k] * x[k], for lists of any length. With it several models are averaged into one."""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
struct Inputs { const float* at[16]; };
struct Outputs { float* at[16]; };

// Thread i owns y[i].
__global__ void soup_fwd(const __grid_constant__ Inputs xs, const float* w, float* y, int count, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += w[k] * xs.at[k][i];
  y[i] = sum;
}

// Thread i owns element i of every gradient that is wanted; the others are null.
__global__ void soup_bwd(const float* grad_y, const float* w, const __grid_constant__ Outputs grad_xs, int count, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (int k = 0; k < count; ++k)
    if (grad_xs.at[k]) grad_xs.at[k][i] = w[k] * grad_y[i];
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::soup")
def soup(xs: list[Tensor], w: Tensor) -> Tensor:
    """The sum of w[k] * xs[k], tensors of one shape."""
    return sum(w[k] * x for k, x in enumerate(xs))


@soup.forward
def _(xs, w):
    xs, w, y = [x.contiguous() for x in xs], w.contiguous(), torch.empty(xs[0].shape, device=w.device)
    given = cupyops.pointers(xs, dtype=torch.float32)
    kernels.soup_fwd[cupyops.grid_1d(y.numel())](given, w, y, count=len(xs), n=y.numel())
    return y, ()


@soup.backward
def _(saved, grad_y, xs, w, needs_grad):
    grad_y, w, n = grad_y.contiguous(), w.contiguous(), grad_y.numel()
    grad_xs = [torch.empty_like(grad_y) if need else None for need in needs_grad.xs]
    if any(needs_grad.xs):
        to = cupyops.pointers(grad_xs, written=True)
        kernels.soup_bwd[cupyops.grid_1d(n)](grad_y, w, to, len(xs), n)
    return grad_xs, torch.stack([(grad_y * x).sum() for x in xs]) if needs_grad.w else None


@soup.unsupported
def _(xs, w):
    alike = all(x.shape == xs[0].shape and x.dtype is w.dtype for x in xs)
    return None if alike and w.shape == (len(xs),) and len(xs) <= 16 else "other shapes or dtypes, or more than 16"


def main() -> None:
    """Three polynomials were each fitted to a third of the data; which mixture of them fits all of it?"""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with nullcontext() if gpu else cupyops.simulate():
        device = "cuda" if gpu else "cpu"
        x = torch.linspace(-1, 1, 60, device=device)
        features, target = torch.stack([x**p for p in range(4)], 1), torch.sin(3 * x)
        models = [
            torch.linalg.lstsq(features[s], target[s]).solution for s in torch.arange(60, device=device).split(20)
        ]
        w = torch.full((3,), 1 / 3, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([w], lr=0.05)
        for step in range(60):
            loss = (features @ soup(models, w) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, 59):
                bars = "  ".join(f"{'#' * max(0, round(20 * one)):<20}" for one in w.tolist())
                print(f"step {step:2}  error {loss.item():.4f}  {bars}")


if __name__ == "__main__":
    main()
