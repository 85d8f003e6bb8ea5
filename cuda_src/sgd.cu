// grad   = grad / grad_scale                                   where a GradScaler has scaled it; written back
// g      = (maximize ? -grad : grad) + weight_decay * param
// buffer = first ? g : momentum * buffer + (1 - dampening) * g
// g      = nesterov ? g + momentum * buffer : buffer           without momentum g stays
// param  = param - lr * g
//
// All parameters of a device and dtype in one launch. Bytes per element: 3 x sizeof(T), 5 x sizeof(T) with momentum;
// at most 10 flops.
// Reached on an H200 (GB/s of those bytes; a copy: 4251): 24x2^22 bf16 4035, 24x2^22 fp32 4109. Lost: little.
#include "optim/multi_tensor.cuh"

// On param, grad and, with momentum, buffer.
template <typename T> struct Sgd {
  using A = acc_t<T>;
  static constexpr int kArrays = 3;
  Gradient<T> gradient;
  A lr, momentum, undamped, weight_decay;  // undamped is 1 - dampening
  bool has_momentum, first, nesterov;

  __device__ __forceinline__ bool loads(int j) const { return j < 2 || (has_momentum && !first); }
  __device__ __forceinline__ bool stores(int j) const {
    return j == 0 || (j == 1 && gradient.scaled) || (j == 2 && has_momentum);
  }
  __device__ __forceinline__ void operator()(A (&x)[kArrays]) const {
    A g = gradient(x[1]);
    if (weight_decay != A(0)) g = fma(weight_decay, x[0], g);  // not 0 * param, which an infinite param makes NaN
    if (has_momentum) {
      x[2] = first ? g : fma(undamped, g, momentum * x[2]);
      g = nesterov ? fma(momentum, x[2], g) : x[2];
    }
    x[0] = fma(-lr, g, x[0]);
  }
};

// Grid: one block per chunk of each tensor, that is table.chunk_ends[tensors - 1]. Block: OPTIM_THREADS. A block owns one
// chunk of one tensor. `anchor` is one of the tensors, by which the launcher knows device and stream; the kernel goes by the
// table. lr_tensor, grad_scale, found_inf and clip are null or point to one number on the device: they are read
// here, so that neither a changed learning rate nor a skipped step needs the host. Without momentum, buffers are null.
template <typename T>
__global__ void __launch_bounds__(OPTIM_THREADS)
    sgd_step(T* anchor, const __grid_constant__ Table<3> table, int tensors, acc_t<T> lr, const acc_t<T>* lr_tensor,
             acc_t<T> momentum, acc_t<T> undamped, acc_t<T> weight_decay, int first, int nesterov, int maximize,
             const float* grad_scale, const float* found_inf, const acc_t<T>* clip) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Chunk chunk = own_chunk<T>(table, tensors);
  const Sgd<T> rule{Gradient<T>(grad_scale, maximize != 0, clip),
                    lr_tensor != nullptr ? *lr_tensor : lr,
                    momentum,
                    undamped,
                    weight_decay,
                    table.arrays[2][chunk.tensor] != nullptr,
                    first != 0,
                    nesterov != 0};
  update<T>(table, chunk, rule);
}
