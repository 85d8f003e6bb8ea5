// y = x m,  m = 1 / (1 - p) where bits >= p 2^32, else 0        NaN and infinities times 0 are NaN, as in PyTorch
// grad_x = grad_y m: the same kernel, which makes the same bits again
//
// The bits of element i, counted in the order of the tensor's dimensions whatever its layout, are word i % 4 of
// Philox4x32-10 (Salmon and others, 2011) with the seed for its key and i / 4 for its counter.
//
// Bytes per element: 2 x sizeof(T), either way. About 20 operations on integers.
//
// Reached on an H200: not measured yet.
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

// Elements of a thread: whole fours, and whole vectors.
template <typename T> constexpr int kDropped = kVecWidth<T> < 4 ? 4 : kVecWidth<T>;

// Grid: ceil(n / (blockDim.x * kDropped<T>)). Block: any, one dimension. y is dense. `flat`: x and y are contiguous, and
// each thread owns neighbours; else `layout` says where an element of y lies in x, and what its number is, and a thread
// owns every blockDim.x-th element of its block. y may be x.
template <typename T>
__global__ void dropout(const T* x, const long long* __restrict__ seed, T* y, const __grid_constant__ Layout<2> layout,
                        long long n, unsigned threshold, acc_t<T> scale, int flat) {
  constexpr int N = kDropped<T>, W = kVecWidth<T>;
  const Drop<T> drop = {static_cast<unsigned long long>(*seed), threshold, scale};
  const long long first = blockIdx.x * (long long)blockDim.x * N, at = first + threadIdx.x * N;
  if (!flat) {
    for (int k = 0; k < N; ++k) {
      const long long i = first + k * blockDim.x + threadIdx.x;
      if (i >= n) return;
      const Offsets<2> from = locate(layout, i);
      y[i] = drop.apply_at(x[from.at[0]], from.at[1]);
    }
  } else if (is_aligned16(y) && at + N <= n) {
    const bool aligned = is_aligned16(x);
    Vec<T, W> values[N / W];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (!aligned) values[k / W].data[k % W] = x[at + k];
      else if (k % W == 0) values[k / W] = load_vec<T, W>(x + at + k);
    }
#pragma unroll
    for (int k = 0; k < N; k += 4) {
      const Philox four = philox(drop.seed, (at + k) / 4);
#pragma unroll
      for (int j = k; j < k + 4; ++j)
        values[j / W].data[j % W] = drop.apply(values[j / W].data[j % W], four.word[j % 4]);
    }
#pragma unroll
    for (int k = 0; k < N; k += W) store_vec<T, W>(y + at + k, values[k / W]);
  } else {
    for (long long i = at; i < at + N && i < n; ++i) y[i] = drop.apply_at(x[i], i);
  }
}
