// What the splits of a sequence's keys have, added in their order.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/dependent_launch.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

constexpr int kMostSplits = 128, kMostThreads = 256;

// Each warp finds what every split counts, all of them loaded at once. Then `lanes` threads have a split at a time, the next ones
// the next; what each has added is added in their order.
template <typename T>
__device__ __forceinline__ void combine(const float* partial_y, const float* partial_lse, T* y, float* lse, int rows,
                                        int width, int splits, int lanes) {
  __shared__ float shares[kMostSplits];
  __shared__ float4 parts[kMostThreads];
  const float *lses = written_before(partial_lse), *ys = written_before(partial_y);
  const long long row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  float found[kMostSplits / 32], most = -infinity<float>(), total = 0;
#pragma unroll
  for (int i = 0; i < kMostSplits / 32; ++i) {
    const int split = 32 * i + lane;
    found[i] = split < splits ? lses[static_cast<long long>(split) * rows + row] : -infinity<float>();
    most = fmaxf(most, found[i]);
  }
#pragma unroll
  for (int apart = 16; apart; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
  const float base = base_of(most);
#pragma unroll
  for (int i = 0; i < kMostSplits / 32; ++i) {
    const float share = expf(found[i] - base);
    total += share;
    if (threadIdx.x < 32) shares[32 * i + lane] = share;
  }
#pragma unroll
  for (int apart = 16; apart; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);
  __syncthreads();

  const int column = threadIdx.x % lanes * 4, turns = blockDim.x / lanes;
  float4 sum = {0, 0, 0, 0};
  if (column < width) {
#pragma unroll 4
    for (int split = threadIdx.x / lanes; split < splits; split += turns) {
      const long long part = static_cast<long long>(split) * rows + row;
      const float4 x = *reinterpret_cast<const float4*>(ys + part * width + column);
      const float share = shares[split];
      sum.x += share * x.x, sum.y += share * x.y, sum.z += share * x.z, sum.w += share * x.w;
    }
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < lanes && column < width) {
    for (int turn = 1; turn < turns; ++turn) {
      const float4 x = parts[turn * lanes + threadIdx.x];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const float all[4] = {sum.x, sum.y, sum.z, sum.w};
    Vec<T, 4> result;
#pragma unroll
    for (int e = 0; e < 4; ++e) result.data[e] = from_acc<T>(total == 0 ? 0.0f : all[e] / total);
    store_vec<T, 4>(y + row * width + column, result);
  }
  if (threadIdx.x == 0) lse[row] = total == 0 ? -infinity<float>() : base + logf(total);
}

}  // namespace decode
