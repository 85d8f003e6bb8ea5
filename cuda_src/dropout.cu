// y = x m,  m = 1 / (1 - p) where bits >= p 2^32, else 0        NaN and infinities times 0 are NaN, as in PyTorch
// grad_x = grad_y m: the same kernel, which makes the same bits again
//
// The bits of element i, counted in the order of the tensor's dimensions whatever its layout, are word i % 4 of
// Philox4x32-7 (Salmon and others, 2011) with the seed for its key and i / 4 for its counter.
//
// Bytes per element: 2 x sizeof(T), either way. About 10 operations on integers, which is what
// half types are bound by: seven rounds, and the keys of the rounds once for all that a thread owns.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 134217728 bf16 3444 / 3450, 134217728
// fp16 3464 / 3471, 67108864 fp32 4159 / 4153, 134217727 bf16 3397 / 3399, 65536 bf16 52 / 52. Lost: in half types
// the integer arithmetic of Philox.
#include "common/broadcast.cuh"
#include "common/philox.cuh"

template <typename T> struct Drop {
  using A = acc_t<T>;
  unsigned long long seed;
  unsigned threshold;
  A scale;

  __device__ __forceinline__ T apply(T x, unsigned bits) const {
    return from_acc<T>(to_acc(x) * (bits >= threshold ? scale : A(0)));
  }

  __device__ __forceinline__ T apply_at(T x, long long i) const {
    const Philox four = philox(seed, i / 4);
    return apply(x, i & 2 ? (i & 1 ? four.word[3] : four.word[2]) : (i & 1 ? four.word[1] : four.word[0]));
  }
};

// Neighbours that a thread drops at once: whole fours, and whole vectors. It has kRuns such runs.
template <typename T> constexpr int kRun = kVecWidth<T> < 4 ? 4 : kVecWidth<T>;
constexpr int kRuns = 2;

// Grid: ceil(n / (blockDim.x * kRun<T> * kRuns)). Block: any, one dimension. y is dense. `flat`: x and y are contiguous, and
// a thread's runs are blockDim.x runs apart; else `layout` says where an element of y lies in x, and what its number is,
// and a thread owns every blockDim.x-th element of its block. y may be x.
template <typename T>
__global__ void dropout(const T* x, const long long* __restrict__ seed, T* y, const __grid_constant__ Layout<2> layout,
                        long long n, unsigned threshold, acc_t<T> scale, int flat) {
  constexpr int N = kRun<T>, W = kVecWidth<T>;
  const Drop<T> drop = {static_cast<unsigned long long>(*seed), threshold, scale};
  const long long first = blockIdx.x * (long long)blockDim.x * (N * kRuns), step = blockDim.x * N;
  if (!flat) {
    for (int k = 0; k < N * kRuns; ++k) {
      const long long i = first + k * blockDim.x + threadIdx.x;
      if (i >= n) return;
      const Offsets<2> from = locate(layout, i);
      y[i] = drop.apply_at(x[from.at[0]], from.at[1]);
    }
    return;
  }
  const long long at = first + threadIdx.x * N;
  if (is_aligned16(y) && at + (kRuns - 1) * step + N <= n) {
    const bool aligned = is_aligned16(x);
    Vec<T, W> values[kRuns][N / W];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const T* from = x + at + run * step + k;
        if (!aligned) values[run][k / W].data[k % W] = *from;
        else if (k % W == 0) values[run][k / W] = load_vec<T, W>(from);
      }
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const long long here = at + run * step;
#pragma unroll
      for (int k = 0; k < N; k += 4) {
        const Philox four = philox(drop.seed, (here + k) / 4);
#pragma unroll
        for (int j = k; j < k + 4; ++j) {
          T& value = values[run][j / W].data[j % W];
          value = drop.apply(value, four.word[j % 4]);
        }
      }
#pragma unroll
      for (int k = 0; k < N; k += W) store_vec<T, W>(y + here + k, values[run][k / W]);
    }
  } else {
    for (int run = 0; run < kRuns; ++run) {
      const long long here = at + run * step;
      for (long long i = here; i < here + N && i < n; ++i) y[i] = drop.apply_at(x[i], i);
    }
  }
}
