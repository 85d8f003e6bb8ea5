// summed = x + residual, rounded to T
// xhat = summed rstd,   rstd = 1 / sqrt(sum(summed^2) / n + eps)        over each row of n
// y = xhat weight
//
// grad_x = rstd (wg - xhat c1) + grad_summed,   wg = grad_y weight,   c1 = sum(wg xhat) / n; grad_residual is the same
// grad_weight = sum(grad_y xhat)                                        over the rows
//
// Bytes per element: forward 4 x sizeof(T), backward 4 x sizeof(T), grad_weight included; about 5 flops forward, 11
// backward.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226), bf16: 32768x4096 3998 / 4002, 8192x16384
// 4013 / 3959, 131072x1000 3933 / 3819, 32768x4095 3981 / 3637, 2048x50257 3231 / 2429, 1048576x64 3852 / 3873,
// 1000003x17 3439 / 2496; fp32: 32768x4096 4036 / 4186. Lost: in backward of odd rows, elements that are of no whole vector.
#include "norm/shared_row.cuh"
#include "norm/row_forward.cuh"
#include "norm/row_backward.cuh"
#include "norm/sub_warp.cuh"
#include "norm/thread_per_row.cuh"
#include "norm/two_pass_forward.cuh"
#include "norm/two_pass_backward.cuh"

// Grid, block, shared memory, ownership, weight: see norm_rows(); weight may be null.
template <typename T, int K, bool ALIGNED>
__global__ void __launch_bounds__(1024)
    add_rms_norm_fwd(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight, T* summed,
                     T* __restrict__ y, acc_t<T>* __restrict__ rstd, long long rows, long long size, acc_t<T> eps,
                     int stages) {
  norm_rows<false, 2, K, ALIGNED>(Forward<T>{x, residual, weight, nullptr, summed, y, nullptr, rstd, rows, size, eps},
                                  stages);
}

// Grid, block, ownership: see norm_short(). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks)
    add_rms_norm_fwd_short(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                           T* summed, T* __restrict__ y, acc_t<T>* __restrict__ rstd, long long rows, long long size,
                           acc_t<T> eps) {
  norm_short<false, 2>(Forward<T>{x, residual, weight, nullptr, summed, y, nullptr, rstd, rows, size, eps});
}

// Grid, block, shared memory, ownership: see norm_small(). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    add_rms_norm_fwd_small(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                           T* summed, T* __restrict__ y, acc_t<T>* __restrict__ rstd, long long rows, long long size,
                           acc_t<T> eps) {
  norm_small<false, 2>(Forward<T>{x, residual, weight, nullptr, summed, y, nullptr, rstd, rows, size, eps});
}

// Grid, block, shared memory, ownership, parameters: see norm_held(). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kHeldThreads, 2)
    add_rms_norm_fwd_held(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                          T* summed, T* __restrict__ y, acc_t<T>* __restrict__ rstd, long long rows, long long size,
                          acc_t<T> eps) {
  norm_held<false, 2>(Forward<T>{x, residual, weight, nullptr, summed, y, nullptr, rstd, rows, size, eps});
}

// Grid, block, ownership: see norm_wide(). weight may be null.
template <typename T>
__global__ void __launch_bounds__(1024)
    add_rms_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                          T* summed, T* __restrict__ y, acc_t<T>* __restrict__ rstd, long long rows, long long size,
                          acc_t<T> eps) {
  norm_wide<false>(Forward<T>{x, residual, weight, nullptr, summed, y, nullptr, rstd, rows, size, eps});
}

// Grid, block, ownership: see shift_parameter().
template <typename T>
__global__ void __launch_bounds__(256)
    add_rms_norm_fwd_shift(const T* __restrict__ weight, T* __restrict__ shifted_weight, long long size) {
  shift_parameter(weight, shifted_weight, size);
}

// Grid, block, shared memory, ownership: see norm_rows_bwd(). weight, grad_x and weight_parts may be null.
template <typename T, int K, bool ALIGNED, bool PARAMETERS, bool LATE>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    add_rms_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ summed, const T* __restrict__ weight,
                     const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                     acc_t<T>* __restrict__ weight_parts, long long rows, long long size, int stages) {
  norm_rows_bwd<false, PARAMETERS, 3, K, ALIGNED, LATE>(
      Backward<T>{grad_y, summed, weight, grad_summed, nullptr, rstd, grad_x, weight_parts, nullptr, rows, size},
      stages);
}

// Grid, block, ownership: see norm_short_bwd(). weight, grad_x and weight_parts may be null.
template <typename T>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks)
    add_rms_norm_bwd_short(const T* __restrict__ grad_y, const T* __restrict__ summed, const T* __restrict__ weight,
                           const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                           acc_t<T>* __restrict__ weight_parts, long long rows, long long size) {
  norm_short_bwd<false, 3>(
      Backward<T>{grad_y, summed, weight, grad_summed, nullptr, rstd, grad_x, weight_parts, nullptr, rows, size});
}

// Grid, block, shared memory, ownership: see norm_small_bwd(). weight, grad_x and weight_parts may be null.
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    add_rms_norm_bwd_small(const T* __restrict__ grad_y, const T* __restrict__ summed, const T* __restrict__ weight,
                           const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                           acc_t<T>* __restrict__ weight_parts, long long rows, long long size) {
  norm_small_bwd<false, 3>(
      Backward<T>{grad_y, summed, weight, grad_summed, nullptr, rstd, grad_x, weight_parts, nullptr, rows, size});
}

// Grid, block, ownership: see norm_wide_bwd(). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    add_rms_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ summed, const T* __restrict__ weight,
                          const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                          long long rows, long long size) {
  norm_wide_bwd<false>(
      Backward<T>{grad_y, summed, weight, grad_summed, nullptr, rstd, grad_x, nullptr, nullptr, rows, size});
}

// Grid, block, ownership: see norm_columns_bwd().
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    add_rms_norm_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ summed,
                             const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ weight_parts, long long rows,
                             long long size) {
  norm_columns_bwd<false>(
      Backward<T>{grad_y, summed, nullptr, nullptr, nullptr, rstd, nullptr, weight_parts, nullptr, rows, size});
}

// Grid, block, ownership: see norm_sum_bwd().
template <typename T>
__global__ void __launch_bounds__(1024)
    add_rms_norm_bwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ grad_weight, int count, long long size) {
  norm_sum_bwd<T>(parts, grad_weight, nullptr, count, size);
}
