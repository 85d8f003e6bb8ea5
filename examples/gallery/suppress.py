"""A result whose size is in the data: candidates are kept where no better one lies near. Count, allocate, fill."""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
// Thread i owns keep[i]: whether no candidate with a higher score (of equals, an earlier one) lies within `radius`.
__global__ void mark(const float2* at, const float* score, int* keep, float radius, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int best = 1;
  for (int k = 0; k < n; ++k) {
    const float dx = at[k].x - at[i].x, dy = at[k].y - at[i].y;
    const bool better = score[k] > score[i] || (score[k] == score[i] && k < i);
    if (better && dx * dx + dy * dy <= radius * radius) best = 0;
  }
  keep[i] = best;
}

// One step of an inclusive sum in log2(n) of them.
__global__ void add_from(const int* from, int* to, int by, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i] + (i >= by ? from[i - by] : 0);
}

// Thread i owns the place of candidate i among those that are kept, if it is.
__global__ void fill(const int* keep, const int* places, long long* index, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && keep[i]) index[places[i] - 1] = i;
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::suppress", dtypes=torch.float32)
def suppress(at: Tensor, score: Tensor, radius: float) -> Tensor:
    """The numbers of the candidates `at` (n, 2) near which no other has a higher score, in order."""
    near = (at[:, None] - at[None]).square().sum(2) <= radius * radius
    earlier = torch.ones_like(near).tril(-1)
    better = (score[None] > score[:, None]) | ((score[None] == score[:, None]) & earlier)
    return (~(near & better).any(1)).nonzero().squeeze(1)


@suppress.forward
def _(at, score, radius):
    at, score = cupyops.contiguous(at, score)
    at, n = at if cupyops.aligned(at, 8) else at.clone(), len(score)
    keep, places, spare = (torch.empty(n, dtype=torch.int32, device=at.device) for _ in range(3))
    grid = cupyops.grid_1d(n, 128)
    kernels.mark[grid](at, score, keep, radius, n)
    places.copy_(keep)
    by = 1
    while by < n:
        kernels.add_from[grid](places, spare, by, n)
        places, spare, by = spare, places, 2 * by
    index = torch.empty(int(places[-1]) if n else 0, dtype=torch.int64, device=at.device)
    if len(index):
        kernels.fill[grid](keep, places, index, n)
    return index, ()


@suppress.fake
def _(at, score, radius):
    return at.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64), ()


def main() -> None:
    """The three hills of a picture, of which every point is a candidate."""
    gpu = torch.cuda.is_available()
    with nullcontext() if gpu else cupyops.simulate():
        device = "cuda" if gpu else "cpu"
        y, x = torch.meshgrid(torch.arange(10.0, device=device), torch.arange(30.0, device=device), indexing="ij")
        hills = [(6, 3, 1.0), (17, 6, 0.8), (25, 2, 0.6)]
        picture = sum(high * torch.exp(-(((x - cx) / 2) ** 2 + (y - cy) ** 2) / 4) for cx, cy, high in hills)
        at = torch.stack([x.flatten(), y.flatten()], 1)
        bright = (picture.flatten() > 0.3).nonzero().squeeze(1)
        peaks = bright[suppress(at[bright], picture.flatten()[bright], 6.0)].tolist()
        for row in range(10):
            marks = [" .:-=+*#"[min(7, int(7 * value))] for value in picture[row].tolist()]
            for peak in peaks:
                if peak // 30 == row:
                    marks[peak % 30] = "X"
            print("".join(marks).rstrip())
        print(f"{len(bright)} candidates, {len(peaks)} peaks: {[(peak % 30, peak // 30) for peak in peaks]}")


if __name__ == "__main__":
    main()
