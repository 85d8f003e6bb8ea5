"""Neighbours in a window, and a gradient that is gathered: a pixel asks those that have read it; no atomics are needed.

The bilateral filter of Tomasi and Manduchi (1998): y[p] is the mean of x[q] over the window around p, with the weights
w = exp(-|p - q|^2 / (2 near^2) - (x[p] - x[q])^2 / (2 like^2)). It smooths, and leaves edges.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
__device__ float weight(int dx, int dy, float apart, float near, float like) {
  return expf(-(dx * dx + dy * dy) / (2 * near * near) - apart * apart / (2 * like * like));
}

// Thread (x, y) owns a pixel: the mean, and the sum of the weights, which backward divides by.
__global__ void bilateral_fwd(const float* image, float* mean, float* total, int radius, float near, float like, int height,
                              int width) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  const float here = image[y * width + x];
  float sum = 0, of = 0;
  for (int v = max(y - radius, 0); v <= min(y + radius, height - 1); ++v)
    for (int u = max(x - radius, 0); u <= min(x + radius, width - 1); ++u) {
      const float there = image[v * width + u], w = weight(u - x, v - y, there - here, near, like);
      sum += w * there, of += w;
    }
  mean[y * width + x] = sum / of, total[y * width + x] = of;
}

// Thread (x, y) owns grad[p]. As the centre of its window p moves every weight there; as a neighbour q it moves its own.
__global__ void bilateral_bwd(const float* grad_mean, const float* image, const float* mean, const float* total, float* grad,
                              int radius, float near, float like, int height, int width) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  const int p = y * width + x;
  const float here = image[p];
  float sum = 0;
  for (int v = max(y - radius, 0); v <= min(y + radius, height - 1); ++v)
    for (int u = max(x - radius, 0); u <= min(x + radius, width - 1); ++u) {
      const int q = v * width + u;
      const float apart = image[q] - here, w = weight(u - x, v - y, apart, near, like), slope = apart / (like * like);
      sum += grad_mean[p] / total[p] * w * (image[q] - mean[p]) * slope;
      sum += grad_mean[q] / total[q] * w * (1 + (here - mean[q]) * slope);
    }
  grad[p] = sum;
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::bilateral", dtypes=torch.float32)
def bilateral(image: Tensor, radius: int, near: float, like: float) -> Tensor:
    """The filtered image (height, width)."""
    height, width = image.shape
    y, x = (torch.arange(size, device=image.device) for size in image.shape)
    sum_, of = torch.zeros_like(image), torch.zeros_like(image)
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            inside = ((y + dy >= 0) & (y + dy < height))[:, None] & ((x + dx >= 0) & (x + dx < width))
            there = image[(y + dy).clamp(0, height - 1)[:, None], (x + dx).clamp(0, width - 1)]
            w = (
                torch.exp(-(dx * dx + dy * dy) / (2 * near * near) - (there - image).square() / (2 * like * like))
                * inside
            )
            sum_, of = sum_ + w * there, of + w
    return sum_ / of


def grid(image):
    return (cupyops.ceil_div(image.shape[1], 16), cupyops.ceil_div(image.shape[0], 8)), (16, 8)


@bilateral.forward
def _(image, radius, near, like):
    image = image.contiguous()
    mean, total = torch.empty_like(image), torch.empty_like(image)
    kernels.bilateral_fwd[grid(image)](image, mean, total, radius, near, like, *image.shape)
    return mean, (mean, total)


@bilateral.backward
def _(saved, grad_mean, image, radius, near, like):
    mean, total = saved
    grad_mean, image = cupyops.contiguous(grad_mean, image)
    grad = torch.empty_like(image)
    kernels.bilateral_bwd[grid(image)](grad_mean, image, mean, total, grad, radius, near, like, *image.shape)
    return grad


@bilateral.unsupported
def _(image, radius, near, like):
    return None if image.dim() == 2 and image.numel() else "no image"


def main() -> None:
    """Noise on two plates: the filter, and an image found by its gradient whose filtered one is nearer still."""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with nullcontext() if gpu else cupyops.simulate():
        clean = torch.full((10, 32), 0.2, device="cuda" if gpu else "cpu")
        clean[:, 16:] = 0.8
        noisy = clean + 0.08 * torch.randn(10, 32).to(clean.device)
        found = noisy.clone().requires_grad_()
        optimizer = torch.optim.SGD([found], lr=40.0)
        for _ in range(8):
            loss = (bilateral(found, 2, 1.5, 0.25) - clean).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shown = {"noisy": noisy, "filtered": bilateral(noisy, 2, 1.5, 0.25), "fitted": bilateral(found, 2, 1.5, 0.25)}
        for name, image in shown.items():
            print(f"{name}: error {(image - clean).square().mean().sqrt().item():.4f}")
            for row in image[4:7].tolist():
                print("".join(" .:-=+*#%@"[min(9, max(0, int(10 * value)))] for value in row))


if __name__ == "__main__":
    main()
