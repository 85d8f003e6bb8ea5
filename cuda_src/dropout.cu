// y = x m,  m = 1 / (1 - p) where bits >= p 2^32, else 0        NaN and infinities times 0 are NaN, as in PyTorch
// grad_x = grad_y m: the same kernel, which makes the same bits again
//
// The bits of element i, counted in the order of the tensor's dimensions whatever its layout, are word i % 4 of
// Philox4x32-7 (Salmon and others, 2011) with the seed for its key and i / 4 for its counter.
//
// Bytes per element: 2 x sizeof(T), either way. About 10 operations on integers: seven rounds for four elements.
#include "common/broadcast.cuh"
#include "common/philox.cuh"

template <typename T> struct Drop {
  using A = acc_t<T>;
  unsigned threshold;
  A scale;

  __device__ __forceinline__ T apply(T x, unsigned bits) const {
    return from_acc<T>(to_acc(x) * (bits >= threshold ? scale : A(0)));
  }
};

// Neighbours that a thread drops at once: whole fours, and whole vectors.
template <typename T> constexpr int kRun = kVecWidth<T> < 4 ? 4 : kVecWidth<T>;

// Grid: ceil(n / (blockDim.x * kRun<T>)). Block: any, one dimension. x and y are contiguous. A thread owns a run. y may be x.
template <typename T>
__global__ void dropout(const T* x, const long long* __restrict__ seed, T* y, long long n, unsigned threshold,
                        acc_t<T> scale) {
  constexpr int N = kRun<T>, W = kVecWidth<T>;
  const long long first = global_thread() * N;
  const Drop<T> drop = {threshold, scale};
  const bool whole = is_aligned16(x) && is_aligned16(y) && first + N <= n;
  Vec<T, W> values[N / W];
#pragma unroll
  for (int k = 0; k < N; k += W) {
    if (whole) values[k / W] = load_vec<T, W>(x + first + k);
  }
  const unsigned long long key = *seed;
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    const Philox four = philox(key, (first + k) / 4);
#pragma unroll
    for (int j = k; j < k + 4; ++j) {
      T& value = values[j / W].data[j % W];
      if (whole) value = drop.apply(value, four.word[j % 4]);
      else if (first + j < n) y[first + j] = drop.apply(x[first + j], four.word[j % 4]);
    }
  }
#pragma unroll
  for (int k = 0; k < N; k += W) {
    if (whole) store_vec<T, W>(y + first + k, values[k / W]);
  }
}

// Grid: ceil(n / (blockDim.x * kStrided)). Block: any, one dimension. The same for any layout: `layout` says where an element
// of the dense y lies in x, and what its number is. A thread owns kStrided elements, blockDim.x apart. y may be x.
constexpr int kStrided = 4;

template <typename T>
__global__ void dropout_strided(const T* x, const long long* __restrict__ seed, T* y,
                                const __grid_constant__ Layout<2> layout, long long n, unsigned threshold,
                                acc_t<T> scale) {
  const Drop<T> drop = {threshold, scale};
#pragma unroll 1
  for (int k = 0; k < kStrided; ++k) {
    const long long i = (blockIdx.x * (long long)kStrided + k) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const Offsets<2> from = locate(layout, i);
    const Philox four = philox(*seed, from.at[1] / 4);
    const int word = int(from.at[1] & 3);
    y[i] = drop.apply(x[from.at[0]], word & 2 ? (word & 1 ? four.word[3] : four.word[2]) : (word & 1 ? four.word[1] : four.word[0]));
  }
}
