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
#include "optim/adam.cuh"

// Grid: one block per chunk of each tensor, that is table.chunk_ends[tensors - 1]. Block: OPTIM_THREADS. A block owns one
// chunk of one tensor. `anchor` is one of the tensors, by which the launcher knows device and stream; the kernel goes by the
// table. Its last array points to the step of each tensor, a float on the device, already counted up, so that
// a CUDA graph counts; where that is null, all have `step`. lr_tensor, grad_scale, found_inf and clip are null or point to one
// number on the device.
template <typename T, bool AMSGRAD>
__global__ void __launch_bounds__(OPTIM_THREADS)
    adam_step(T* anchor, const __grid_constant__ Table<AMSGRAD ? 6 : 5> table, int tensors, acc_t<T> step, acc_t<T> lr,
              const acc_t<T>* lr_tensor, acc_t<T> rest1, acc_t<T> log_beta1, acc_t<T> beta2, acc_t<T> rest2,
              acc_t<T> log_beta2, acc_t<T> eps, acc_t<T> weight_decay, bool decoupled, bool maximize,
              const float* grad_scale, const float* found_inf, const acc_t<T>* clip) {
  using A = acc_t<T>;
  using Rule = Adam<T, AMSGRAD>;
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Chunk chunk = own_chunk<T>(table, tensors);
  const float* counted = static_cast<const float*>(table.arrays[Rule::kArrays][chunk.tensor]);
  const A t = counted != nullptr ? A(*counted) : step;
  const A rate = lr_tensor != nullptr ? *lr_tensor : lr;
  const Rule rule = adam_rule<T, AMSGRAD>(Gradient<T>(grad_scale, maximize, clip), t, rate, rest1, log_beta1, beta2,
                                          rest2, log_beta2, eps, weight_decay, decoupled);
  update<T>(table, chunk, rule);
}
