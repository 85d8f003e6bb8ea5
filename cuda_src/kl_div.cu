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
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 8192x32000 bf16 4290 / 4159, fp32 4364 /
// 4231, with log_target bf16 4316 / 4168; 65536x1000 bf16 3534 / 3743, 16384x4095 3517 / 3818, 2048x50257 3848 / 4018,
// 1000003x17 2443 / 3084. What is lost, by Nsight Compute: in forward a launch of 4 us that adds the partials, of which the
// overlap hides one, and for long rows nothing more, since the memory's throughput is 93% of its peak; in backward it is
// 88%, as in a copy.
#include "common/elementwise/elementwise.cuh"
#include "common/core/fast_math.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/reduce/warp_block.cuh"

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

template <typename T, typename A = acc_t<T>> __device__ __forceinline__ A loss_of(A x, A t, bool log_target) {
  if (log_target) return exp_for<T>(t) * (t - x);
  // apart: 0 * x is NaN for an infinite x
  return (t == A(0) ? A(0) : t * log_for<T>(t)) - t * x;
}

template <typename T, typename A = acc_t<T>> __device__ __forceinline__ A slope_of_target(A x, A t, bool log_target) {
  if (log_target) {
    const A e = exp_for<T>(t);
    return e * (t - x) + e;
  }
  return (log_for<T>(t) - x) + t / t;
}

// No reduction. Grid, block: see elementwise().
template <typename T>
__global__ void kl_div_fwd_each(const T* __restrict__ x, const T* __restrict__ target, T* __restrict__ y, long long n,
                                bool log_target) {
  using A = acc_t<T>;
  const auto loss = [=](A x, A t) { return loss_of<T>(x, t, log_target); };
  elementwise<T>(n, loss, y, x, target);
}

// Grid: any size, one dimension; block: a multiple of 32. A thread loads IN_FLIGHT vectors of each input at once, and blocks
// stride over these tiles. A block adds its losses in acc_t<T> and writes the sum to its place in `partials`; a single block
// writes the result.
template <typename T>
__global__ void kl_div_fwd_partials(const T* __restrict__ x, const T* __restrict__ target,
                                    acc_t<T>* __restrict__ partials, T* __restrict__ y, long long n, acc_t<T> divisor,
                                    bool log_target) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ A shared[kWarp];
  const long long vectors = is_aligned16(x) && is_aligned16(target) ? n / W : 0;
  A sum = A(0);
  for (long long tile = blockIdx.x; tile * blockDim.x * IN_FLIGHT < vectors; tile += gridDim.x) {
    Vec<T, W> xs[IN_FLIGHT], ts[IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u) {
      const long long v = (tile * IN_FLIGHT + u) * blockDim.x + threadIdx.x;
      xs[u] = v < vectors ? load_vec<T, W>(x + v * W) : Vec<T, W>{};  // the loss of 0 and 0 is 0, of either form
      ts[u] = v < vectors ? load_vec<T, W>(target + v * W) : Vec<T, W>{};
    }
    A of_tile = A(0);
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u) {
#pragma unroll
      for (int k = 0; k < W; ++k) of_tile += loss_of<T>(to_acc(xs[u].data[k]), to_acc(ts[u].data[k]), log_target);
    }
    sum += of_tile;
  }
  for (long long i = vectors * W + global_thread(); i < n; i += global_threads()) {
    sum += loss_of<T>(to_acc(x[i]), to_acc(target[i]), log_target);
  }
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) *y = from_acc<T>(sum / divisor);
  else partials[blockIdx.x] = sum;
}

// Grid: 1. Block: one dimension, a multiple of 32. Adds `count` partials, in the same order every time.
template <typename T>
__global__ void kl_div_fwd_finalize(const acc_t<T>* __restrict__ partials, T* __restrict__ y, int count,
                                    acc_t<T> divisor) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  A sum = A(0);
  const A* const of_blocks = written_before(partials);
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += of_blocks[i];
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x == 0) *y = from_acc<T>(sum / divisor);
}

// Backward of x alone. Grid, block: see elementwise(). A divisor of 0 says that there is no reduction, and that grad_y has
// an element for each of x.
template <typename T>
__global__ void kl_div_bwd(const T* __restrict__ grad_y, const T* __restrict__ target, T* __restrict__ grad_x,
                           long long n, acc_t<T> divisor, bool log_target) {
  using A = acc_t<T>;
  const auto to_x = [=](A g, A t) { return -g * (log_target ? exp_for<T>(t) : t); };
  if (divisor == A(0)) {
    elementwise<T>(n, to_x, grad_x, grad_y, target);
  } else {
    const A g = to_acc(*grad_y);  // divided after the other loads have been issued
    elementwise<T>(n, [=](A t) { return to_x(g / divisor, t); }, grad_x, target);
  }
}

// Backward of the target, and of x where grad_x is not null. Grid, block, divisor: as of kl_div_bwd().
template <typename T>
__global__ void kl_div_bwd_target(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ target,
                                  T* __restrict__ grad_x, T* __restrict__ grad_target, long long n, acc_t<T> divisor,
                                  bool log_target) {
  using A = acc_t<T>;
  const auto to_x = [=](A g, A t) { return -g * (log_target ? exp_for<T>(t) : t); };
  const auto to_target = [=](A g, A x, A t) { return g * slope_of_target<T>(x, t, log_target); };
  if (divisor == A(0)) {
    if (grad_x) elementwise<T>(n, to_x, grad_x, grad_y, target);
    if (grad_target) elementwise<T>(n, to_target, grad_target, grad_y, x, target);
  } else {
    const A g = to_acc(*grad_y) / divisor;
    if (grad_x) elementwise<T>(n, [=](A t) { return to_x(g, t); }, grad_x, target);
    if (grad_target) elementwise<T>(n, [=](A x, A t) { return to_target(g, x, t); }, grad_target, x, target);
  }
}
