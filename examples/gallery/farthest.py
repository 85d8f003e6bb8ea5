"""A block that goes on until it has chosen all: of a cloud the points that lie farthest from those chosen before.

Farthest point sampling, as PointNet++ (Qi et al., 2017) thins a cloud; of equally far ones the first.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
constexpr int kThreads = 128;

// The block owns a cloud, its threads every 128th point of it; far[i] is the square of how far point i is from the chosen.
// A round: measure to the point chosen last, find the farthest of each thread, then of the block in a tree.
__global__ void __launch_bounds__(kThreads) farthest(const float* clouds, float* far, long long* chosen, int n, int count) {
  __shared__ float best[kThreads];
  __shared__ int which[kThreads];
  const float* at = clouds + 3LL * n * blockIdx.x;
  far += (long long)n * blockIdx.x;
  chosen += (long long)count * blockIdx.x;
  int last = 0;
  for (int k = 0; k < count; ++k) {
    if (threadIdx.x == 0) chosen[k] = last;
    float most = -1;
    int mine = n;
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const float x = at[3 * i] - at[3 * last], y = at[3 * i + 1] - at[3 * last + 1], z = at[3 * i + 2] - at[3 * last + 2];
      // rounded at each operation, as PyTorch's are, so that both choose the same point
      const float d = __fadd_rn(__fadd_rn(__fmul_rn(x, x), __fmul_rn(y, y)), __fmul_rn(z, z));
      const float now = k ? fminf(far[i], d) : d;
      far[i] = now;
      if (now > most) most = now, mine = i;
    }
    best[threadIdx.x] = most, which[threadIdx.x] = mine;
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x >= half) continue;
      const float other = best[threadIdx.x + half];
      const int there = which[threadIdx.x + half];
      if (other > best[threadIdx.x] || (other == best[threadIdx.x] && there < which[threadIdx.x]))
        best[threadIdx.x] = other, which[threadIdx.x] = there;
    }
    __syncthreads();
    last = which[0];
    __syncthreads();
  }
}
"""
kernel = cupyops.Kernel(CODE, "farthest")


@cupyops.operator("gallery::farthest", dtypes=torch.float32)
def farthest(clouds: Tensor, count: int) -> Tensor:
    """The numbers (clouds, count) of points of each cloud (clouds, n, 3), the first of which is point 0."""
    far = torch.full(clouds.shape[:2], float("inf"), dtype=clouds.dtype, device=clouds.device)
    chosen = [torch.zeros(len(clouds), dtype=torch.int64, device=clouds.device)]
    for _ in range(count - 1):
        away = (clouds - clouds.gather(1, chosen[-1][:, None, None].expand(-1, 1, 3))).square()
        far = torch.minimum(far, away[..., 0] + away[..., 1] + away[..., 2])
        chosen.append(far.argmax(1))
    return torch.stack(chosen, 1)


@farthest.forward
def _(clouds, count):
    clouds = clouds.contiguous()
    number, n, _ = clouds.shape
    far = clouds.new_empty(number, n)
    chosen = torch.empty(number, count, dtype=torch.int64, device=clouds.device)
    kernel[number, 128](clouds, far, chosen, n, count)
    return chosen, ()


@farthest.unsupported
def _(clouds, count):
    return None if clouds.dim() == 3 and clouds.shape[2] == 3 and 0 < count <= clouds.shape[1] else "other shapes"


def main() -> None:
    """A ring with a dense arc: points taken at random crowd there, the farthest ones go around."""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with nullcontext() if gpu else cupyops.simulate():
        angle = torch.cat([0.6 * torch.rand(240), 6.283 * torch.rand(60)])[torch.randperm(300)]
        ring = torch.stack([angle.cos(), angle.sin(), torch.zeros(300)], 1)[None].to("cuda" if gpu else "cpu")
        for name, taken in (("first", torch.arange(12)), ("farthest", farthest(ring, 12)[0].cpu())):
            turned = angle[taken].sort().values
            gap = torch.cat([turned.diff(), turned[:1] + 6.2832 - turned[-1:]]).max().item()
            rows = [[" "] * 41 for _ in range(13)]
            for x, y, _ in ring[0, taken.to(ring.device)].tolist():
                rows[round(6 - 6 * y)][round(20 + 20 * x)] = "o"
            print("\n".join("".join(row).rstrip() for row in rows))
            print(f"{name} 12 of 300: the largest gap is {gap:.2f}")


if __name__ == "__main__":
    main()
