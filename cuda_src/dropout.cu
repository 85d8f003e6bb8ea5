// y = x m,  m = 1 / (1 - p) where bits >= p 2^32, else 0        NaN and infinities times 0 are NaN, as in PyTorch
// grad_x = grad_y m: the same kernel, which makes the same bits again
//
// The bits of element i, counted in the order of the tensor's dimensions whatever its layout, are word i % 4 of
// Philox4x32-7 (Salmon and others, 2011) with the seed for its key and i / 4 for its counter.
//
// Bytes per element: 2 x sizeof(T), either way. About 10 operations on integers: seven rounds for four elements, and the keys
// of the rounds once for all that a thread owns.
//
// DROPOUT_BLOCK, DROPOUT_RUNS_OF_HALVES, DROPOUT_ELEMENTS and PHILOX_ROUNDS are defined by _dropout.py.
//
// Reached on an H200 (GB/s of those bytes, forward and backward alike; a copy: 4251): 2^27 elements of bf16 4125, of fp16
// 4151, 2^26 of fp32 4164; 2^16 of bf16 in 4.2 us. Lost: the beginning and the end of a launch, 3 of 130 us; PyTorch's copy of
// as many bytes takes 128.5. The kernel itself takes 126, the memory's throughput at 85% of its peak, as in relu.
#include "common/elementwise/broadcast.cuh"
#include "common/core/philox.cuh"

template <typename T> struct Drop {
  using A = acc_t<T>;
  unsigned threshold;
  A scale;

  __device__ __forceinline__ T apply(T x, unsigned bits) const {
    return from_acc<T>(to_acc(x) * (bits >= threshold ? scale : A(0)));
  }
};

// Neighbours that a thread drops at once: whole vectors, and whole fours. It has kRuns<T> such runs, whose loads are all under
// way while the first bits are made.
template <typename T> constexpr int kRun = kVecWidth<T> < 4 ? 4 : kVecWidth<T>;
template <typename T> constexpr int kRuns = sizeof(T) == 2 ? DROPOUT_RUNS_OF_HALVES : 1;

// Grid: ceil(n / (DROPOUT_BLOCK * kRun<T> * kRuns<T>)). Block: DROPOUT_BLOCK. x and y are contiguous; y may be x. A thread's
// runs are DROPOUT_BLOCK runs apart.
template <typename T>
__global__ void __launch_bounds__(DROPOUT_BLOCK, 10)
    dropout_contiguous(const T* x, const long long* __restrict__ seed, T* y, unsigned threshold, acc_t<T> scale,
                       long long n) {
  constexpr int N = kRun<T>, W = kVecWidth<T>, RUNS = kRuns<T>, STEP = DROPOUT_BLOCK * N;
  const Drop<T> drop = {threshold, scale};
  const long long first = (blockIdx.x * (long long)(DROPOUT_BLOCK * RUNS) + threadIdx.x) * N;
  if (first + (RUNS - 1) * STEP + N > n || !is_aligned16(x) || !is_aligned16(y)) {
    for (int run = 0; run < RUNS; ++run) {
      for (int k = 0; k < N; k += 4) {
        const long long here = first + run * STEP + k;
        if (here >= n) return;
        const Philox four = philox(*seed, here / 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (here + j < n) y[here + j] = drop.apply(x[here + j], four.word[j]);
        }
      }
    }
    return;
  }
  Vec<T, W> values[RUNS][N / W];
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
#pragma unroll
    for (int k = 0; k < N; k += W) values[run][k / W] = load_vec<T, W>(x + first + run * STEP + k);
  }
  const unsigned long long key = *seed;
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    const long long here = first + run * STEP;
#pragma unroll
    for (int k = 0; k < N; k += 4) {
      const Philox four = philox(key, (here + k) / 4);
#pragma unroll
      for (int j = k; j < k + 4; ++j) {
        T& value = values[run][j / W].data[j % W];
        value = drop.apply(value, four.word[j % 4]);
      }
    }
#pragma unroll
    for (int k = 0; k < N; k += W) store_vec<T, W>(y + here + k, values[run][k / W]);
  }
}

// The same for any layout: `layout` says where an element of the dense y lies in x, and what its number is. Grid: ceil(n /
// (blockDim.x * DROPOUT_ELEMENTS)). Block: any, one dimension. A thread owns DROPOUT_ELEMENTS elements, blockDim.x apart. y
// may be x.
template <typename T>
__global__ void dropout_strided(const T* x, const long long* __restrict__ seed, T* y, unsigned threshold,
                                acc_t<T> scale, const __grid_constant__ Layout<2> layout, long long n) {
  const Drop<T> drop = {threshold, scale};
#pragma unroll 1
  for (int k = 0; k < DROPOUT_ELEMENTS; ++k) {
    const long long i = (blockIdx.x * (long long)DROPOUT_ELEMENTS + k) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const Offsets<2> from = locate(layout, i);
    const Philox four = philox(*seed, from.at[1] / 4);
    const int word = int(from.at[1] & 3);
    y[i] = drop.apply(x[from.at[0]],
                      word & 2 ? (word & 1 ? four.word[3] : four.word[2]) : (word & 1 ? four.word[1] : four.word[0]));
  }
}
