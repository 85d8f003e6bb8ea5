"""In place, by a loop of launches over two buffers: heat spreads over a plate, step by step."""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
// Thread (x, y) owns a point: it moves towards the mean of its neighbours. Outside of the plate it is as at the border.
__global__ void spread(const float* from, float* to, float rate, int height, int width) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  const float here = from[y * width + x];
  const float left = from[y * width + max(x - 1, 0)], right = from[y * width + min(x + 1, width - 1)];
  const float above = from[max(y - 1, 0) * width + x], below = from[min(y + 1, height - 1) * width + x];
  to[y * width + x] = here + rate * ((left + right + above + below) / 4 - here);
}
"""
spread = cupyops.Kernel(CODE, "spread")


def step(plate: Tensor, rate: float) -> Tensor:
    """One step, in PyTorch."""
    padded = torch.nn.functional.pad(plate[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    around = padded[1:-1, :-2] + padded[1:-1, 2:] + padded[:-2, 1:-1] + padded[2:, 1:-1]
    return plate + rate * (around / 4 - plate)


@cupyops.operator("gallery::diffuse_", mutates=("plate",), dtypes=torch.float32)
def diffuse_(plate: Tensor, steps: int, rate: float = 0.8) -> Tensor:
    """The plate (height, width) after some steps, in place."""
    found = plate.clone()  # whose gradient needs it as it was
    for _ in range(steps):
        found = step(found, rate)
    return plate.copy_(found)


def launch(plate, steps, rate):
    """The steps, to and fro between `plate` and a buffer."""
    (height, width), other = plate.shape, torch.empty_like(plate)
    grid = cupyops.ceil_div(width, 16), cupyops.ceil_div(height, 8)
    here, there = plate, other
    for _ in range(steps):
        spread[grid, (16, 8)](here, there, rate, height, width)
        here, there = there, here
    if here is not plate:
        plate.copy_(here)


@diffuse_.forward
def _(plate, steps, rate):
    launch(plate, steps, rate)
    return plate, ()


@diffuse_.backward
def _(saved, grad_y, steps, rate):
    grad_plate = grad_y.clone(memory_format=torch.contiguous_format)
    launch(grad_plate, steps, rate)  # what flows to a neighbour flows back from it: a step is its own transpose
    return grad_plate


@diffuse_.unsupported
def _(plate, steps, rate):
    return None if plate.dim() == 2 and plate.is_contiguous() else "a view, or no plate"


def main() -> None:
    """A hot spot and a cold one, and what is left of them."""
    gpu = torch.cuda.is_available()
    with nullcontext() if gpu else cupyops.simulate():
        plate = torch.zeros(8, 24, device="cuda" if gpu else "cpu")
        plate[2:4, 4:7], plate[4:7, 16:20] = 1.0, -1.0
        for steps in (0, 5, 20):
            diffuse_(plate, steps)
            print(f"{steps} more steps, heat {plate.sum().item():.3f}")
            for row in plate.tolist():
                print("".join("@%+- .:*#"[min(8, max(0, round(4 + 4 * value)))] for value in row).rstrip())


if __name__ == "__main__":
    main()
