// norm     = sqrt(sum of grad^2 over all gradients), or the largest |grad|
// grad     = grad * min(max_norm / (norm + 1e-6), 1)
//
// Bytes per element: sizeof(T) for the norm, 2 x sizeof(T) more where the gradients are scaled, none where they are not;
// 3 flops.
// Reached on an H200 (GB/s of two reads and a write, scaled; of a read, unclipped): 24x2^22 bf16 3663; 3074, 24x2^22 fp32
// 3829; 3739. Lost: three launches, each of which waits for the one before.
#include "optim/multi_tensor.cuh"
#include "common/reduce/warp_block.cuh"

// What elements become, how they are combined, and the norm of the result.
struct Squares {
  using Combine = Sum;
  template <typename A> static __device__ __forceinline__ A of(A x) { return x * x; }
  template <typename A> static __device__ __forceinline__ A norm(A sum) { return sqrt(sum); }
};
struct Largest {
  using Combine = Max;
  template <typename A> static __device__ __forceinline__ A of(A x) { return fabs(x); }
  template <typename A> static __device__ __forceinline__ A norm(A largest) { return largest; }
};

// Combines units of W elements of a chunk, from the begin-th up to the end-th, with what a thread has.
template <typename Norm, int W, int UNROLL, typename T>
__device__ __forceinline__ acc_t<T> combine(const T* grads, int begin, int end, acc_t<T> total) {
  typename Norm::Combine op;
#pragma unroll 1
  for (int first = begin + threadIdx.x; first < end; first += UNROLL * OPTIM_THREADS) {
    Vec<T, W> values[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int v = first + u * OPTIM_THREADS;
      values[u] = v < end ? load_vec<T, W>(grads + v * W) : Vec<T, W>{};
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int k = 0; k < W; ++k) total = op(total, Norm::of(to_acc(values[u].data[k])));
    }
  }
  return total;
}

// Grid: one block per chunk of each gradient, that is table.chunk_ends[tensors - 1], or fewer, which take the others in
// turn. Block: OPTIM_THREADS. A block owns partials[blockIdx.x].
template <typename Norm, typename T>
__device__ __forceinline__ void norm_partials(const Table<1>& table, int tensors, acc_t<T>* partials,
                                              acc_t<T>* shared) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  A total = A(0);
#pragma unroll 1
  for (int c = blockIdx.x; c < table.chunk_ends[tensors - 1]; c += gridDim.x) {
    const Chunk chunk = own_chunk<T>(table, tensors, c);
    const T* grads = static_cast<const T*>(table.arrays[0][chunk.tensor]) + chunk.begin;
    const int vectors = is_aligned16(grads) ? chunk.count / W : 0;
    total = combine<Norm, W, 4>(grads, 0, vectors, total);
    total = combine<Norm, 1, 4>(grads, vectors * W, chunk.count, total);
  }
  total = block_reduce<typename Norm::Combine>(total, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// Grid, block, who owns what: see norm_partials(). `largest`: of the largest |grad|.
template <typename T>
__global__ void __launch_bounds__(OPTIM_THREADS)
    grad_norm_partials(const T* anchor, const __grid_constant__ Table<1> table, int tensors, acc_t<T>* partials,
                       bool largest) {
  __shared__ acc_t<T> shared[kWarp];
  if (largest) norm_partials<Largest, T>(table, tensors, partials, shared);
  else norm_partials<Squares, T>(table, tensors, partials, shared);
}

template <typename Norm, typename A>
__device__ __forceinline__ void norm_of_partials(const A* partials, A* norm, int count, A* shared) {
  typename Norm::Combine op;
  A total = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) total = op(total, partials[i]);
  total = block_reduce<typename Norm::Combine>(total, shared);
  if (threadIdx.x == 0) *norm = Norm::norm(total);
}

// Grid: 1. Block: a multiple of 32. Combines all partials, in a fixed order, into norm[0].
template <typename A> __global__ void grad_norm_finalize(const A* partials, A* norm, int count, bool largest) {
  __shared__ A shared[kWarp];
  if (largest) norm_of_partials<Largest>(partials, norm, count, shared);
  else norm_of_partials<Squares>(partials, norm, count, shared);
}

// On grad.
template <typename T> struct Scaled {
  static constexpr int kArrays = 1;
  acc_t<T> coefficient;

  __device__ __forceinline__ bool loads(int) const { return true; }
  __device__ __forceinline__ bool stores(int) const { return true; }
  __device__ __forceinline__ void operator()(acc_t<T> (&x)[1]) const { x[0] *= coefficient; }
};

// Grid and block: as grad_norm_partials. Multiplies the gradients by the coefficient that the norm asks for; where that is
// 1, they are not even read. NaN is no number to stop at. The last chunks come first, since the cache still has them from
// the norm.
template <typename T>
__global__ void __launch_bounds__(OPTIM_THREADS) grad_norm_clip(T* anchor, const __grid_constant__ Table<1> table,
                                                                int tensors, acc_t<T> max_norm, const acc_t<T>* norm) {
  const acc_t<T> coefficient = max_norm / (*norm + acc_t<T>(1e-6));
  if (coefficient >= acc_t<T>(1)) return;
#pragma unroll 1
  for (int c = table.chunk_ends[tensors - 1] - 1 - blockIdx.x; c >= 0; c -= gridDim.x) {
    update<T>(table, own_chunk<T>(table, tensors, c), Scaled<T>{coefficient});
  }
}
