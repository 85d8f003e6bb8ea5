// grad       = grad / grad_scale                               where a GradScaler has scaled it; written back
// g          = maximize ? -grad : grad
// param      = param - lr * weight_decay * param               decoupled, as AdamW; else g = g + weight_decay * param
// exp_avg    = exp_avg + (1 - beta1) * (g - exp_avg)
// exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
// largest    = max(largest, exp_avg_sq)                        with amsgrad; else exp_avg_sq itself
// param      = param - lr / (1 - beta1^step) * exp_avg / (sqrt(largest / (1 - beta2^step)) + eps)
//
// All parameters of a device and dtype in one launch. Bytes per element: 7 x sizeof(T), 9 x sizeof(T) with amsgrad;
// at most 20 flops, of which one square root and one quotient.
// Reached on an H200 (GB/s of those bytes; a copy: 4251): 24x2^22 bf16 4022, 24x2^22 fp32 4043. Lost: little; below
// some millions of elements the host's time.
#include "optim/multi_tensor.cuh"

// In float to 2 units in the last place, in a few instructions: of an update, that is far below a parameter's last place.
// The quotient is 0 where b exceeds 2^126, which no root does.
__device__ __forceinline__ float root(float a) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(a));
  return y;
}
__device__ __forceinline__ double root(double a) { return sqrt(a); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

// On param, grad, exp_avg, exp_avg_sq and, with amsgrad, the largest exp_avg_sq.
template <typename T, bool AMSGRAD> struct Adam {
  using A = acc_t<T>;
  static constexpr int kArrays = AMSGRAD ? 5 : 4;
  Gradient<T> gradient;
  A rest1, beta2, rest2;                      // rest1 is 1 - beta1, rest2 is 1 - beta2
  A step_size, unbias_root, eps;              // lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step)
  A keep, weight_decay;  // what decoupled decay leaves of param; the decay that is not decoupled

  __device__ __forceinline__ bool loads(int) const { return true; }
  __device__ __forceinline__ bool stores(int j) const { return j != 1 || gradient.scaled; }
  __device__ __forceinline__ void operator()(A (&x)[kArrays]) const {
    A g = gradient(x[1]);
    if (weight_decay != A(0)) g = fma(weight_decay, x[0], g);  // not 0 * param, which an infinite param makes NaN
    x[2] = fma(rest1, g - x[2], x[2]);
    x[3] = fma(rest2 * g, g, beta2 * x[3]);
    if constexpr (AMSGRAD) x[4] = max_nan(x[4], x[3]);
    const A scale = fma(root(x[kArrays - 1]), unbias_root, eps);
    x[0] = fma(-step_size, quotient(x[2], scale), keep * x[0]);
  }
};

// 1 - beta^step, without the cancellation of a beta near 1.
__device__ __forceinline__ float unbias(float log_beta, float step) { return -expm1f(step * log_beta); }
__device__ __forceinline__ double unbias(double log_beta, double step) { return -expm1(step * log_beta); }

// Grid: one block per chunk of each tensor, that is table.chunk_ends[tensors - 1]. Block: OPTIM_THREADS. A block owns one
// chunk of one tensor. `anchor` is one of the tensors, by which the launcher knows device and stream; the kernel goes by the
// table. Its last array points to the step of each tensor, a float on the device, already counted up, so that
// a CUDA graph counts; where that is null, all have `step`. lr_tensor, grad_scale and found_inf are null or point to one
// number on the device.
template <typename T, bool AMSGRAD>
__global__ void __launch_bounds__(OPTIM_THREADS)
    adam_step(T* anchor, const __grid_constant__ Table<AMSGRAD ? 6 : 5> table, int tensors, acc_t<T> step, acc_t<T> lr,
              const acc_t<T>* lr_tensor, acc_t<T> rest1, acc_t<T> log_beta1, acc_t<T> beta2, acc_t<T> rest2,
              acc_t<T> log_beta2, acc_t<T> eps, acc_t<T> weight_decay, bool decoupled, bool maximize,
              const float* grad_scale, const float* found_inf) {
  using A = acc_t<T>;
  using Rule = Adam<T, AMSGRAD>;
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Chunk chunk = own_chunk<T>(table, tensors);
  const float* counted = static_cast<const float*>(table.arrays[Rule::kArrays][chunk.tensor]);
  const A t = counted != nullptr ? A(*counted) : step;
  const A rate = lr_tensor != nullptr ? *lr_tensor : lr;
  const Rule rule{Gradient<T>(grad_scale, maximize),
                  rest1,
                  beta2,
                  rest2,
                  rate / unbias(log_beta1, t),
                  A(1) / sqrt(unbias(log_beta2, t)),
                  eps,
                  decoupled ? fma(-rate, weight_decay, A(1)) : A(1),
                  decoupled ? A(0) : weight_decay};
  update<T>(table, chunk, rule);
}
