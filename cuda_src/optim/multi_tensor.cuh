// One launch over many tensors of one dtype: a table of their addresses by value, and a block for each chunk of each tensor.
//
// OPTIM_THREADS, of a block, OPTIM_CHUNK_VECTORS, of a thread in a chunk, and OPTIM_TABLE_BYTES, of a launch's parameters, are
// defined by multi_tensor.py.
#pragma once

#include "common/core/vector.cuh"

constexpr int kUnroll = 2;  // vectors in flight per thread, of each array
template <typename T> constexpr int kChunk = OPTIM_THREADS * OPTIM_CHUNK_VECTORS * kVecWidth<T>;  // elements: 16 KB

// As many tensors of N arrays each as the parameters of a launch can name.
template <int N> constexpr int kTensors = OPTIM_TABLE_BYTES / (8 * N + 12);

// The tensors of one launch. Nothing is copied to the GPU beforehand, and a CUDA graph keeps the table. The sizes are those of
// arrays[0]; the others have as many elements, or whatever the kernel says.
template <int N> struct Table {
  void* arrays[N][kTensors<N>];
  long long sizes[kTensors<N>];
  int chunk_ends[kTensors<N>];  // how many chunks this tensor and all before it have
};

// What a block owns: `count` elements from `begin` on of one tensor.
struct Chunk {
  int tensor;
  long long begin;
  int count;
};

// The chunk of this block, or another: its tensor is the first whose chunk_end exceeds its number.
template <typename T, int N>
__device__ __forceinline__ Chunk own_chunk(const Table<N>& table, int tensors, int chunk = blockIdx.x) {
  int low = 0, high = tensors - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.chunk_ends[middle] > chunk) high = middle;
    else low = middle + 1;
  }
  const long long begin = (chunk - (low == 0 ? 0 : table.chunk_ends[low - 1])) * (long long)kChunk<T>;
  const long long left = table.sizes[low] - begin;
  return {low, begin, left < kChunk<T> ? int(left) : kChunk<T>};
}

// Changes units of W elements, from the begin-th up to the end-th, by a block of OPTIM_THREADS.
//
// A Rule has kArrays, which says how many arrays it works on; loads(j) and stores(j), which say whether it reads and writes
// array j; and rule(x), which changes x[0] ... x[kArrays - 1], the numbers at one place of each, in acc_t<T>.
template <int W, int UNROLL, typename T, typename Rule>
__device__ __forceinline__ void sweep(T* const (&arrays)[Rule::kArrays], int begin, int end, const Rule& rule) {
  constexpr int N = Rule::kArrays;
#pragma unroll 1  // what is in flight is unrolled within
  for (int first = begin + threadIdx.x; first < end; first += UNROLL * OPTIM_THREADS) {
    Vec<T, W> values[UNROLL][N];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int v = first + u * OPTIM_THREADS;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[u][j] = v < end && rule.loads(j) ? load_vec<T, W>(arrays[j] + v * W) : Vec<T, W>{};
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int v = first + u * OPTIM_THREADS;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        acc_t<T> x[N];
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = to_acc(values[u][j].data[k]);
        rule(x);
#pragma unroll
        for (int j = 0; j < N; ++j) values[u][j].data[k] = from_acc<T>(x[j]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (v < end && rule.stores(j)) store_vec<T, W>(arrays[j] + v * W, values[u][j]);
      }
    }
  }
}

// Changes a chunk by the rule: 16 bytes at a time where all its arrays begin at a multiple of 16, and the rest by elements.
template <typename T, typename Rule, int N>
__device__ __forceinline__ void update(const Table<N>& table, Chunk chunk, const Rule& rule) {
  constexpr int W = kVecWidth<T>;
  T* arrays[Rule::kArrays];
  bool all_aligned = true;
#pragma unroll
  for (int j = 0; j < Rule::kArrays; ++j) {
    arrays[j] = static_cast<T*>(table.arrays[j][chunk.tensor]) + chunk.begin;
    all_aligned = all_aligned && is_aligned16(arrays[j]);
  }
  const int vectors = all_aligned ? chunk.count / W : 0;
  sweep<W, kUnroll>(arrays, 0, vectors, rule);
  sweep<1, 2 * kUnroll>(arrays, vectors * W, chunk.count, rule);
}

// A gradient that a GradScaler may have scaled, and that is then written back unscaled; `sign` is -1 to maximize. `clip` is null or
// points to what the step alone multiplies it by, 1 at most: the gradient that is stored is not clipped.
template <typename T> struct Gradient {
  using A = acc_t<T>;
  A sign, unscale, factor;  // unscale is 1 / grad_scale
  bool scaled;

  __device__ __forceinline__ Gradient(const float* grad_scale, bool maximize, const A* clip)
      : sign(maximize ? -1 : 1),
        unscale(grad_scale != nullptr ? A(1) / A(*grad_scale) : A(1)),
        factor(clip != nullptr ? *clip : A(1)),
        scaled(grad_scale != nullptr) {}

  // Unscales grad in place, and returns what the rule goes on with: clipped, rounded as it is or would be stored, and with its
  // sign.
  __device__ __forceinline__ A operator()(A& grad) const {
    if (scaled) grad = to_acc(from_acc<T>(grad * unscale));
    return sign * (factor != A(1) ? to_acc(from_acc<T>(grad * factor)) : grad);
  }
};
