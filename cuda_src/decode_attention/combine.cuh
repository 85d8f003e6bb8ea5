// What the splits of a sequence's keys have, added in their order.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/dependent_launch.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

constexpr int kMostSplits = 128, kMostThreads = 256;

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

// By the block that is the last of a tile's splits to leave its rows: a warp has a row at a time.
template <int ROWS, int D, int WARPS, typename T>
__device__ __forceinline__ void combine_by_last(const Sizes& s, const Work& w, const Results<T>& to) {
  constexpr int kAtOnce = D < 128 ? 128 / D : 1, kVecs = D > 128 ? D / 128 : 1;  // splits, and vectors of a lane
  __shared__ float shares[WARPS][kMostSplits];
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* done = reinterpret_cast<unsigned*>(to.done) + blockIdx.x % (gridDim.x / s.splits);
    is_last = atomicInc(done, s.splits - 1) == s.splits - 1;  // which leaves 0 behind
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = min(ROWS, s.queries * s.group - w.first_row);
  const long long all = s.batches * static_cast<long long>(s.queries) * s.heads;
  for (int r = warp; r < rows; r += WARPS) {
    const long long row = result_of(s, w, w.first_row + r);
    const Shares of(s.splits, lane, [&](int split) { return __ldcg(to.partial_lse + split * all + row); });
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) shares[warp][32 * i + lane] = of.share[i];
    __syncwarp();
    float4 sum[kVecs] = {};
#pragma unroll 8
    for (int first = 0; first < s.splits; first += kAtOnce) {
      const int split = first + lane * 4 / D;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int column = 128 * i + lane * 4 % D;
        if (column >= s.width || split >= s.splits) continue;
        const float* from = to.partial_y + (split * all + row) * s.width + column;
        add_times(sum[i], shares[warp][split], __ldcg(reinterpret_cast<const float4*>(from)));
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if constexpr (kAtOnce == 2) {
        const auto other = [](float x) { return __shfl_xor_sync(~0u, x, 16); };
        add_times(sum[i], 1, {other(sum[i].x), other(sum[i].y), other(sum[i].z), other(sum[i].w)});
      }
      const int column = 128 * i + lane * 4 % D;
      if (column < s.width && lane * 4 < D) store_vec<T, 4>(to.y + row * s.width + column, of.result<T>(sum[i]));
    }
    if (lane == 0) to.lse[row] = of.lse();
    __syncwarp();  // nobody reads these shares any more
  }
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
  const Shares of(splits, threadIdx.x % 32,
                  [&](int split) { return lses[static_cast<long long>(split) * rows + row]; });
#pragma unroll
  for (int i = 0; i < kMostSplits / 32; ++i) {
    if (threadIdx.x < 32) shares[32 * i + threadIdx.x] = of.share[i];
  }
  __syncthreads();

  const int column = threadIdx.x % lanes * 4, turns = blockDim.x / lanes;
  float4 sum = {0, 0, 0, 0};
  if (column < width) {
#pragma unroll 4
    for (int split = threadIdx.x / lanes; split < splits; split += turns) {
      const long long part = static_cast<long long>(split) * rows + row;
      add_times(sum, shares[split], *reinterpret_cast<const float4*>(ys + part * width + column));
    }
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < lanes && column < width) {
    for (int turn = 1; turn < turns; ++turn) add_times(sum, 1, parts[turn * lanes + threadIdx.x]);
    store_vec<T, 4>(y + row * width + column, of.result<T>(sum));
  }
  if (threadIdx.x == 0) lse[row] = of.lse();
}

}  // namespace decode
