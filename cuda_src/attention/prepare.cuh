// What both backwards need of the forward's results.
#pragma once

#include "attention/problem.cuh"

namespace attention {

// delta = sum(grad_y * y) - grad_lse of a row, and its LSE for exp2: +inf where no key is seen and beyond the last row, so that
// P is 0 there. LANES threads have a row, 16 bytes each. y and grad_y lie alike. grad_sums, `columns` of each row, becomes 0 where
// there is one. of_sinks: null, or of each row what it adds to the gradient of its head's sink.
template <typename T, int LANES>
__device__ __forceinline__ void prepare(const T* y, const T* grad_y, const float* lse, const float* grad_lse,
                                        const float* sinks, float* of_sinks, float* delta, float* lse2,
                                        float4* grad_sums, int columns, const Strides& ys, const Sizes& sizes) {
  const long long row = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES, query = row % sizes.padded;
  const int head = row / sizes.padded % sizes.heads;
  const long long batch = row / sizes.padded / sizes.heads;
  if (grad_sums && batch < sizes.batches) {  // in turn, so that a warp fills whole lines
    for (int i = lane; i < columns / 4; i += LANES) grad_sums[row * (columns / 4) + i] = make_float4(0, 0, 0, 0);
  }
  const bool inside = batch < sizes.batches && query < sizes.queries;
  float sum = 0;
  if (inside && lane * 8 < sizes.value_width) {
    const long long at = batch * ys.batch + head * ys.head + query * ys.row + lane * 8;
    const uint4 left = *reinterpret_cast<const uint4*>(y + at), right = *reinterpret_cast<const uint4*>(grad_y + at);
    const unsigned a[4] = {left.x, left.y, left.z, left.w}, b[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 first = unpack<T>(a[i]), second = unpack<T>(b[i]);
      sum += first.x * second.x + first.y * second.y;
    }
  }
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0 && batch < sizes.batches) {
    const long long of = (batch * sizes.heads + head) * sizes.queries + query;
    const float found = inside ? lse[of] : -infinity<float>();
    const bool seen = found != -infinity<float>();
    delta[row] = grad_lse && seen ? sum - grad_lse[of] : sum;
    lse2[row] = seen ? found * kLog2E : infinity<float>();
    if (of_sinks) {
      const float sink = sinks[head], weight = found == sink ? 1 : expf(sink - found);
      of_sinks[row] = inside ? weight * ((grad_lse ? grad_lse[of] : 0) - sum) : 0;
    }
  }
}

}  // namespace attention
