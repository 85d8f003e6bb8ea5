// grad    = grad / grad_scale                                  where a GradScaler has scaled it; written back
// g       = maximize ? -grad : grad
// c       = beta1 * exp_avg + (1 - beta1) * g
// param   = param - lr * weight_decay * param - lr * sign(c)   sign(0) and sign(NaN) are 0
// exp_avg = beta2 * exp_avg + (1 - beta2) * g
//
// All parameters of a device and dtype in one launch. Bytes per element: 5 x sizeof(T); at most 10 flops.
// Reached on an H200 (GB/s of those bytes; a copy: 4251): 24x2^22 bf16 4055, 24x2^22 fp32 4097. Lost: little.
#include "optim/multi_tensor.cuh"

// On param, grad and exp_avg.
template <typename T> struct Lion {
  using A = acc_t<T>;
  static constexpr int kArrays = 3;
  Gradient<T> gradient;
  A beta1, rest1, beta2, rest2;  // rest1 is 1 - beta1, rest2 is 1 - beta2
  A lr, keep;                    // keep is what the decay leaves of param

  __device__ __forceinline__ bool loads(int) const { return true; }
  __device__ __forceinline__ bool stores(int j) const { return j != 1 || gradient.scaled; }
  __device__ __forceinline__ void operator()(A (&x)[kArrays]) const {
    const A g = gradient(x[1]);
    const A c = fma(rest1, g, beta1 * x[2]);
    x[0] = fma(-lr, A((c > A(0)) - (c < A(0))), keep * x[0]);
    x[2] = fma(rest2, g, beta2 * x[2]);
  }
};

// Grid: one block per chunk of each tensor, that is table.chunk_ends[tensors - 1]. Block: OPTIM_THREADS. A block owns one
// chunk of one tensor. `anchor` is one of the tensors, by which the launcher knows device and stream; the kernel goes by the
// table. lr_tensor, grad_scale, found_inf and clip are null or point to one number on the device.
template <typename T>
__global__ void __launch_bounds__(OPTIM_THREADS)
    lion_step(T* anchor, const __grid_constant__ Table<3> table, int tensors, acc_t<T> lr, const acc_t<T>* lr_tensor,
              acc_t<T> beta1, acc_t<T> rest1, acc_t<T> beta2, acc_t<T> rest2, acc_t<T> weight_decay, bool maximize,
              const float* grad_scale, const float* found_inf, const acc_t<T>* clip) {
  using A = acc_t<T>;
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const A rate = lr_tensor != nullptr ? *lr_tensor : lr;
  const Lion<T> rule{Gradient<T>(grad_scale, maximize, clip), beta1, rest1, beta2, rest2, rate,
                     fma(-rate, weight_decay, A(1))};
  update<T>(table, own_chunk<T>(table, tensors), rule);
}
