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
// 1000003x17 2443 / 3084. Lost, by Nsight Compute: in forward a launch that adds the parts, 4 us less 1 by overlap; of long
// rows nothing more, the memory's throughput being 93% of its peak; in backward 88%, as a copy has it.
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

// No reduction. Grid, block: see elementwise().
template <typename T, bool LOG>
__global__ void kl_div_fwd(const T* __restrict__ x, const T* __restrict__ target, T* __restrict__ y, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [](A x, A t) { return loss_of<T, LOG>(x, t); }, y, x, target);
}

// Grid: any, one dimension; block: a multiple of 32. A block adds the losses of its stride in acc_t<T>, kInFlight vectors of
// each input at once, into its own place of `parts`; an only block writes the result.
template <typename T, bool LOG>
__global__ void kl_div_fwd_parts(const T* __restrict__ x, const T* __restrict__ target, acc_t<T>* __restrict__ parts,
                                 T* __restrict__ y, long long n, acc_t<T> divisor) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>, kInFlight = 4;
  __shared__ A shared[kWarp];
  const long long vectors = is_aligned16(x) && is_aligned16(target) ? n / W : 0;
  A sum = A(0);
  for (long long tile = blockIdx.x; tile * blockDim.x * kInFlight < vectors; tile += gridDim.x) {
    Vec<T, W> xs[kInFlight], ts[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const long long v = (tile * kInFlight + u) * blockDim.x + threadIdx.x;
      xs[u] = v < vectors ? load_vec<T, W>(x + v * W) : Vec<T, W>{};  // the loss of 0 and 0 is 0, of either form
      ts[u] = v < vectors ? load_vec<T, W>(target + v * W) : Vec<T, W>{};
    }
    A ours = A(0);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
      for (int k = 0; k < W; ++k) ours += loss_of<T, LOG>(to_acc(xs[u].data[k]), to_acc(ts[u].data[k]));
    }
    sum += ours;
  }
  for (long long i = vectors * W + global_thread(); i < n; i += global_threads()) {
    sum += loss_of<T, LOG>(to_acc(x[i]), to_acc(target[i]));
  }
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) *y = from_acc<T>(sum / divisor);
  else parts[blockIdx.x] = sum;
}

// Grid: 1. Block: one dimension, a multiple of 32. Adds `count` parts, in the same order every time.
template <typename T>
__global__ void kl_div_fwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ y, int count, acc_t<T> divisor) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  A sum = A(0);
  const A* const of_blocks = written_before(parts);
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += of_blocks[i];
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x == 0) *y = from_acc<T>(sum / divisor);
}

// Grid, block: see elementwise(). A divisor of 0 says that there is no reduction, and a grad_y for each element. Of the two
// gradients either may be null; TARGET: grad_target is wanted, and x is read for it.
template <typename T, bool LOG, bool TARGET>
__global__ void kl_div_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ target,
                           T* __restrict__ grad_x, T* __restrict__ grad_target, long long n, acc_t<T> divisor) {
  using A = acc_t<T>;
  const auto to_x = [](A g, A t) { return -g * (LOG ? exp_for<T>(t) : t); };
  const auto to_target = [](A g, A x, A t) { return g * slope_of_target<T, LOG>(x, t); };
  if (divisor == A(0)) {
    if (grad_x) elementwise<T>(n, to_x, grad_x, grad_y, target);
    if constexpr (TARGET) elementwise<T>(n, to_target, grad_target, grad_y, x, target);
  } else {
    const A g = to_acc(*grad_y);  // divided once the others are on their way, too
    if (grad_x) elementwise<T>(n, [=](A t) { return to_x(g / divisor, t); }, grad_x, target);
    if constexpr (TARGET) {
      elementwise<T>(n, [=](A x, A t) { return to_target(g / divisor, x, t); }, grad_target, x, target);
    }
  }
}
