// loss_i = t_i log(t_i) - t_i x_i        t log(t) is 0 where t is 0; x is a log-probability, t a probability
//   log_target: e^t_i (t_i - x_i)
// y: loss_i (none), or the sum of all loss_i / divisor
// grad_x_i = -g_i t_i,                   grad_t_i = g_i (log(t_i) + t_i / t_i - x_i)    NaN where t is 0, as in PyTorch
//   log_target: grad_x_i = -g_i e^t_i,   grad_t_i = g_i (e^t_i (t_i - x_i) + e^t_i)
// g_i: grad_y_i (none), or grad_y / divisor
//
// Bytes per element: forward 2 x sizeof(T), and sizeof(T) more with no reduction; backward sizeof(T) for each of t, the
// gradients that are wanted and, for grad_t, x; sizeof(T) more with no reduction. One log or exp and about 4 flops.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 8192x32000 bf16 3194 / 2971,
// 4096x128256 bf16 3305 / 3011, 65536x1000 bf16 2674 / 2785, 16384x4095 bf16 2672 / 2797, 2048x50257 bf16 2918 /
// 2865. Lost: the logarithm, of each target in forward, and in half types the unpacking.
#include "common/exponential.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

// log, as exactly as terms of type T can show: for half types one instruction, off by 2^-22 where it is near 0.
template <typename T> __device__ __forceinline__ acc_t<T> log_for(acc_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.69314718055994531f;
  } else {
    return log(x);
  }
}

template <typename T, bool LOG, typename A = acc_t<T>> __device__ __forceinline__ A loss_of(A x, A t) {
  if constexpr (LOG) return exp_for<T>(t) * (t - x);
  // apart: 0 * x is NaN for an infinite x
  return (t == A(0) ? A(0) : t * log_for<T>(t)) - t * x;
}

template <typename T, bool LOG, typename A = acc_t<T>> __device__ __forceinline__ A slope_of_target(A x, A t) {
  if constexpr (LOG) {
    const A e = exp_for<T>(t);
    return e * (t - x) + e;
  }
  return (log_for<T>(t) - x) + t / t;
}

// What a thread owns of a tile of blockDim.x * W elements: W neighbours that are one access; or, where an address is off
// 16 bytes, every blockDim.x-th, so that a warp still reads neighbours, with as many bytes in flight.
template <typename T> struct Owned {
  static constexpr int W = kVecWidth<T>;
  long long first, n;
  int step;  // 1: neighbours

  __device__ __forceinline__ Owned(long long tile, long long n, bool aligned)
      : first(tile * blockDim.x * W + (aligned ? threadIdx.x * W : threadIdx.x)),
        n(n),
        step(aligned ? 1 : blockDim.x) {}

  __device__ __forceinline__ bool inside(int k) const { return first + (long long)k * step < n; }

  // `absent` in the place of what is past the end.
  __device__ __forceinline__ Vec<T, W> load(const T* from, T absent) const {
    if (step == 1 && inside(W - 1)) return load_vec<T, W>(from + first);
    Vec<T, W> value;
#pragma unroll
    for (int k = 0; k < W; ++k) value.data[k] = inside(k) ? from[first + (long long)k * step] : absent;
    return value;
  }

  __device__ __forceinline__ void store(T* to, Vec<T, W> value) const {
    if (step == 1 && inside(W - 1)) return store_vec<T, W>(to + first, value);
#pragma unroll
    for (int k = 0; k < W; ++k)
      if (inside(k)) to[first + (long long)k * step] = value.data[k];
  }
};

template <typename T> __device__ __forceinline__ long long tiles_of(long long n) {
  const long long tile = blockDim.x * kVecWidth<T>;
  return (n + tile - 1) / tile;
}

// No reduction. Grid: any, one dimension; a block strides over tiles, see Owned.
template <typename T, bool LOG>
__global__ void kl_div_fwd(const T* __restrict__ x, const T* __restrict__ target, T* __restrict__ y, long long n) {
  constexpr int W = kVecWidth<T>;
  const bool aligned = is_aligned16(x) && is_aligned16(target) && is_aligned16(y);
  const T absent = from_acc<T>(0);
  for (long long tile = blockIdx.x; tile < tiles_of<T>(n); tile += gridDim.x) {
    const Owned<T> mine(tile, n, aligned);
    const Vec<T, W> xs = mine.load(x, absent), ts = mine.load(target, absent);
    Vec<T, W> losses;
#pragma unroll
    for (int k = 0; k < W; ++k) losses.data[k] = from_acc<T>(loss_of<T, LOG>(to_acc(xs.data[k]), to_acc(ts.data[k])));
    mine.store(y, losses);
  }
}

// Grid: any, one dimension; block: a multiple of 32. A block adds the losses of the tiles of its stride in acc_t<T>, two
// tiles in flight, into its own place of `parts`.
template <typename T, bool LOG>
__global__ void kl_div_fwd_parts(const T* __restrict__ x, const T* __restrict__ target, acc_t<T>* __restrict__ parts,
                                 long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>, U = 2;
  __shared__ A shared[kWarp];
  const bool aligned = is_aligned16(x) && is_aligned16(target);
  const T absent = from_acc<T>(0);  // the loss of 0 and 0 is 0, of either form
  A sum = A(0);
  for (long long tile = blockIdx.x; tile < tiles_of<T>(n); tile += U * (long long)gridDim.x) {
    Vec<T, W> xs[U], ts[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const Owned<T> mine(tile + u * (long long)gridDim.x, n, aligned);
      xs[u] = mine.load(x, absent);
      ts[u] = mine.load(target, absent);
    }
    A ours = A(0);
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int k = 0; k < W; ++k) ours += loss_of<T, LOG>(to_acc(xs[u].data[k]), to_acc(ts[u].data[k]));
    }
    sum += ours;
  }
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Grid: 1. Block: one dimension, a multiple of 32. Adds `count` parts, in the same order every time.
template <typename T>
__global__ void kl_div_fwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ y, int count, acc_t<T> divisor) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  A sum = A(0);
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += parts[i];
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x == 0) *y = from_acc<T>(sum / divisor);
}

// Grid, block: as kl_div_fwd. Of the two gradients either may be null; x is read for grad_target alone. A divisor of 0 says
// that there is no reduction, and a grad_y for each element.
template <typename T, bool LOG>
__global__ void kl_div_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ target,
                           T* __restrict__ grad_x, T* __restrict__ grad_target, long long n, acc_t<T> divisor) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const bool each = divisor == A(0);
  const bool aligned = is_aligned16(x) && is_aligned16(target) && is_aligned16(grad_x) && is_aligned16(grad_target) &&
                       (!each || is_aligned16(grad_y));
  const T absent = from_acc<T>(0);
  const A shared_grad = each ? A(0) : to_acc(*grad_y) / divisor;
  for (long long tile = blockIdx.x; tile < tiles_of<T>(n); tile += gridDim.x) {
    const Owned<T> mine(tile, n, aligned);
    Vec<T, W> gs, xs, ts = mine.load(target, absent), to_x, to_target;
    if (each) gs = mine.load(grad_y, absent);
    if (grad_target) xs = mine.load(x, absent);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const A g = each ? to_acc(gs.data[k]) : shared_grad, t = to_acc(ts.data[k]);
      to_x.data[k] = from_acc<T>(-g * (LOG ? exp_for<T>(t) : t));
      if (grad_target) to_target.data[k] = from_acc<T>(g * slope_of_target<T, LOG>(to_acc(xs.data[k]), t));
    }
    if (grad_x) mine.store(grad_x, to_x);
    if (grad_target) mine.store(grad_target, to_target);
  }
}
