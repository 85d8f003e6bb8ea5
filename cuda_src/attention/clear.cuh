// What no packed sequence has of a result: rows that are left over before, after, and beyond the longest that was promised.
#pragma once

#include "attention/problem.cuh"

namespace attention {

// Rows of heads, each of `vectors` times 16 bytes, become 0, and their lse, where there is one, -inf or the sink of their head.
// lse: (heads, tokens).
struct Cleared { int tokens, heads, vectors, sequences, longest; };

__device__ __forceinline__ void clear_rows(uint4* rows, float* lse, const float* sinks, const Strides& of,
                                           const Cleared& c, int begin, int end, int thread, int threads) {
  const long long all = static_cast<long long>(max(0, end - begin)) * c.heads * c.vectors;
  for (long long i = thread; i < all; i += threads) {
    const int vector = i % c.vectors, head = i / c.vectors % c.heads;
    const long long row = begin + i / c.vectors / c.heads;
    rows[row * of.row + head * of.head + vector] = make_uint4(0, 0, 0, 0);
    if (lse && vector == 0)
      lse[static_cast<long long>(head) * c.tokens + row] = sinks ? sinks[head] : -infinity<float>();
  }
}

template <typename I>
__device__ __forceinline__ void clear(const I* starts, uint4* rows, float* lse, const float* sinks, const Strides& of,
                                      const Cleared& c) {
  const auto start = [&](int sequence) { return max(0, min(static_cast<int>(starts[sequence]), c.tokens)); };
  for (int i = blockIdx.x; i < c.sequences; i += gridDim.x) {
    clear_rows(rows, lse, sinks, of, c, start(i) + c.longest, start(i + 1), threadIdx.x, blockDim.x);
  }
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  clear_rows(rows, lse, sinks, of, c, 0, start(0), thread, threads);
  clear_rows(rows, lse, sinks, of, c, start(c.sequences), c.tokens, thread, threads);
}

}  // namespace attention
