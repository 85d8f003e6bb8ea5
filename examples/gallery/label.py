"""Launches for as long as the data asks for more: each spot of a mask gets a number of its own, its connected component."""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
// Thread i owns the label of pixel i. At first that is its own number plus 1, and 0 outside of the mask.
__global__ void begin(const bool* mask, long long* labels, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) labels[i] = mask[i] ? i + 1 : 0;
}

// It becomes the least of its neighbours', then of the label that pixel has, which is a short cut through its component.
__global__ void spread(const long long* from, long long* to, int* changed, int height, int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= height * width) return;
  const int x = i % width, y = i / width;
  const long long before = from[i];
  long long least = before;
  if (before) {
    if (x > 0 && from[i - 1]) least = min(least, from[i - 1]);
    if (x < width - 1 && from[i + 1]) least = min(least, from[i + 1]);
    if (y > 0 && from[i - width]) least = min(least, from[i - width]);
    if (y < height - 1 && from[i + width]) least = min(least, from[i + width]);
    least = min(least, from[least - 1]);
    if (least != before) *changed = 1;  // all store the same
  }
  to[i] = least;
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::label", dtypes=torch.bool)
def label(mask: Tensor) -> Tensor:
    """For each pixel of a mask (height, width) the number of the first pixel of its component plus 1; outside 0."""
    height, width = mask.shape
    none = height * width + 1  # more than any
    labels = torch.where(mask, torch.arange(1, none, device=mask.device).view(height, width), none)
    while True:
        around = torch.nn.functional.pad(labels, (1, 1, 1, 1), value=none)
        beside = torch.minimum(around[1:-1, :-2], around[1:-1, 2:])
        least = torch.minimum(torch.minimum(beside, torch.minimum(around[:-2, 1:-1], around[2:, 1:-1])), labels)
        least = torch.where(mask, least, none)
        if torch.equal(least, labels):
            return torch.where(mask, labels, 0)
        labels = least


@label.forward
def _(mask):
    mask = mask.contiguous()
    here, there = (torch.empty(mask.shape, dtype=torch.int64, device=mask.device) for _ in range(2))
    grid = cupyops.grid_1d(mask.numel(), 128)
    kernels.begin[grid](mask, here, mask.numel())
    changed = torch.ones(1, dtype=torch.int32, device=mask.device)
    while changed.item():
        changed.zero_()
        kernels.spread[grid](here, there, changed, *mask.shape)
        here, there = there, here
    return here, ()


@label.fake
def _(mask):
    return torch.empty(mask.shape, dtype=torch.int64, device=mask.device), ()


@label.unsupported
def _(mask):
    return None if mask.dim() == 2 and mask.numel() else "no mask"


def main() -> None:
    """A spiral, a ring and what lies in it, each told apart."""
    gpu = torch.cuda.is_available()
    rows = [
        "##############  ########  ",
        "             #  #      #  ",
        "##########   #  #  ##  # #",
        "#        #   #  #  ##  # #",
        "#  #######   #  #      # #",
        "#            #  ######## #",
        "##############          ##",
    ]
    with nullcontext() if gpu else cupyops.simulate():
        mask = torch.tensor([[one == "#" for one in row] for row in rows], device="cuda" if gpu else "cpu")
        found = label(mask)
        names = {number: " ABCDEFGH"[k] for k, number in enumerate(found.unique().tolist())}
        for row in found.tolist():
            print("".join(names[number] for number in row).rstrip())
        sizes = {names[number]: (found == number).sum().item() for number in found.unique().tolist() if number}
        print(f"{len(sizes)} components: {', '.join(f'{name} of {size}' for name, size in sizes.items())}")


if __name__ == "__main__":
    main()
