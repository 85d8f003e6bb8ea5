// What the splits of a sequence's keys have, added in their order.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/dependent_launch.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

constexpr int kMostSplits = 128, kMostThreads = 256, kFirst = 4;

// What every split of a row counts: exp(lse - base), of 32 i + lane in share[i]; their sum in every lane.
struct Shares {
  float share[kMostSplits / 32], base, total;

  template <typename Read> __device__ __forceinline__ Shares(int splits, int lane, Read lse_of) {
    float most = -infinity<float>();
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      share[i] = 32 * i + lane < splits ? lse_of(32 * i + lane) : -infinity<float>();
      most = fmaxf(most, share[i]);
    }
#pragma unroll
    for (int apart = 16; apart; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    base = base_of(most), total = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) total += share[i] = expf(share[i] - base);
#pragma unroll
    for (int apart = 16; apart; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);
  }
  __device__ __forceinline__ float lse() const { return total == 0 ? -infinity<float>() : base + logf(total); }
  template <typename T> __device__ __forceinline__ Vec<T, 4> result(float4 sum) const {
    const float all[4] = {sum.x, sum.y, sum.z, sum.w};
    Vec<T, 4> y;
#pragma unroll
    for (int e = 0; e < 4; ++e) y.data[e] = from_acc<T>(total == 0 ? 0.0f : all[e] / total);
    return y;
  }
};

__device__ __forceinline__ void add_times(float4& sum, float share, float4 x) {
  sum.x += share * x.x, sum.y += share * x.y, sum.z += share * x.z, sum.w += share * x.w;
}

// Each warp finds what every split counts, all of them loaded at once. Then `lanes` threads have a split at a time, the next ones
// the next; what each has added is added in their order.
template <typename T>
__device__ __forceinline__ void combine(const float* partial_y, const float* partial_lse, T* y, float* lse, int rows,
                                        int width, int splits, int lanes) {
  __shared__ float shares[kMostSplits];
  __shared__ float4 parts[kMostThreads];
  const float *lses = written_before(partial_lse), *ys = written_before(partial_y);
  const long long row = blockIdx.x;
  const int column = threadIdx.x % lanes * 4, turns = blockDim.x / lanes, mine = threadIdx.x / lanes;
  const auto load = [&](int split) {
    const long long part = static_cast<long long>(split) * rows + row;
    return column < width && split < splits ? *reinterpret_cast<const float4*>(ys + part * width + column) : float4{};
  };
  float4 first[kFirst];  // which come while it is found what they count
#pragma unroll
  for (int i = 0; i < kFirst; ++i) first[i] = load(mine + i * turns);
  const Shares of(splits, threadIdx.x % 32,
                  [&](int split) { return lses[static_cast<long long>(split) * rows + row]; });
#pragma unroll
  for (int i = 0; i < kMostSplits / 32; ++i) {
    if (threadIdx.x < 32) shares[32 * i + threadIdx.x] = of.share[i];
  }
  __syncthreads();

  float4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kFirst; ++i) add_times(sum, mine + i * turns < splits ? shares[mine + i * turns] : 0, first[i]);
#pragma unroll 4
  for (int split = mine + kFirst * turns; split < splits; split += turns) add_times(sum, shares[split], load(split));
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < lanes && column < width) {
    for (int turn = 1; turn < turns; ++turn) add_times(sum, 1, parts[turn * lanes + threadIdx.x]);
    store_vec<T, 4>(y + row * width + column, of.result<T>(sum));
  }
  if (threadIdx.x == 0) lse[row] = of.lse();
}

}  // namespace decode
