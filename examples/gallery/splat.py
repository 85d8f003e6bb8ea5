"""Accumulation by atomics: points are added into an image, whichever thread comes first. Other bits at each call."""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
// Thread i owns point i, and adds its weight to the four pixels around it, by how near they are.
__global__ void splat_fwd(const float2* at, const float* weight, float* image, int points, int height, int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= points) return;
  const int x = int(floorf(at[i].x)), y = int(floorf(at[i].y));
  const float fx = at[i].x - x, fy = at[i].y - y;
  for (int k = 0; k < 4; ++k) {
    const int px = x + (k & 1), py = y + (k >> 1);
    const float share = (k & 1 ? fx : 1 - fx) * (k >> 1 ? fy : 1 - fy);
    if (px >= 0 && px < width && py >= 0 && py < height) atomicAdd(&image[py * width + px], weight[i] * share);
  }
}

// Thread i owns grad_weight[i]: no atomics, for each point reads.
__global__ void splat_bwd(const float2* at, const float* grad_image, float* grad_weight, int points, int height, int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= points) return;
  const int x = int(floorf(at[i].x)), y = int(floorf(at[i].y));
  const float fx = at[i].x - x, fy = at[i].y - y;
  float sum = 0;
  for (int k = 0; k < 4; ++k) {
    const int px = x + (k & 1), py = y + (k >> 1);
    const float share = (k & 1 ? fx : 1 - fx) * (k >> 1 ? fy : 1 - fy);
    if (px >= 0 && px < width && py >= 0 && py < height) sum += share * grad_image[py * width + px];
  }
  grad_weight[i] = sum;
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::splat", dtypes=torch.float32, nondeterministic="atomicAdd of floats")
def splat(at: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """An image into which each point adds its weight, shared among the four pixels around it; `at` has (x, y)."""
    low, image = at.detach().floor(), weight.new_zeros(height * width)
    for dx in (0, 1):
        for dy in (0, 1):
            x, y = low[:, 0].long() + dx, low[:, 1].long() + dy
            share = (1 - (at.detach() - low - at.new_tensor([dx, dy])).abs()).prod(1)
            inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
            place = (y * width + x).where(inside, 0)
            image = image.index_add(0, place, (weight * share).where(inside, 0))
    return image.view(height, width)


@splat.forward
def _(at, weight, height, width):
    at, weight = cupyops.contiguous(at, weight)
    at = at if cupyops.aligned(at, 8) else at.clone()
    image = torch.zeros(height, width, device=weight.device)
    kernels.splat_fwd[cupyops.grid_1d(len(weight))](at, weight, image, len(weight), height, width)
    return image, ()


@splat.backward
def _(saved, grad_y, at, weight):
    at, grad_y = cupyops.contiguous(at, grad_y)
    at, grad_weight = at if cupyops.aligned(at, 8) else at.clone(), torch.empty(weight.shape, device=weight.device)
    kernels.splat_bwd[cupyops.grid_1d(len(weight))](at, grad_y, grad_weight, len(weight), *grad_y.shape)
    return None, grad_weight  # places are taken to be fixed


def main() -> None:
    """How bright is each of 150 points, if together they draw a ring?"""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with nullcontext() if gpu else cupyops.simulate():
        device = "cuda" if gpu else "cpu"
        height, width = 9, 18
        y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
        radius = ((x - 8.5) / 2).hypot(y - 4.0)
        target = torch.exp(-((radius - 3) ** 2))
        at = torch.rand(150, 2, device=device) * torch.tensor([width - 1.0, height - 1.0], device=device)
        weight = torch.zeros(150, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for step in range(40):
            loss = (splat(at, weight, height, width) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, 39):
                print(f"step {step:2}  error {loss.item():.4f}")
        for row in splat(at, weight, height, width).tolist():
            print("".join(" .:*#"[min(4, max(0, round(4 * value)))] for value in row).rstrip())


if __name__ == "__main__":
    main()
