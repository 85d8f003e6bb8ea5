// xhat = (x - mean) rstd,   mean = sum(x) / n,   rstd = 1 / sqrt(sum((x - mean)^2) / n + eps)        over each row of n
// y = xhat weight + bias
//
// grad_x = rstd (wg - c2 - xhat c1),   wg = grad_y weight,   c1 = sum(wg xhat) / n,   c2 = sum(wg) / n
// grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)                                          over the rows
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T), the parameters' gradients included; about 8 flops
// forward, 14 backward.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226), bf16: 131072x1024 3934 / 3902, 32768x4096
// 3938 / 3658, 8192x16384 3708 / 3853, 131072x1000 3899 / 3653, 32768x4095 3544 / 3427, 16383x1001 2439 / 2222,
// 2048x50257 2709 / 1718, 1048576x64 3538 / 3738, 1000003x17 2302 / 2052. Lost: instructions, which forward and backward
// of even rows issue in 70 to 78% of all cycles; in backward of odd rows their lone elements; of 8192x16384, in forward,
// the barriers of wide rows besides; of odd rows there one more launch, though its start is hidden, and parameters that of a
// long row come from L2; a row longer than shared memory holds is read twice.
#include "norm/shared_row.cuh"
#include "norm/row_forward.cuh"
#include "norm/row_backward.cuh"
#include "norm/sub_warp.cuh"
#include "norm/thread_per_row.cuh"
#include "norm/two_pass_forward.cuh"
#include "norm/two_pass_backward.cuh"

// Of layer_norm_fwd, at most; and blocks of a multiprocessor, at least. Half types are bound by latency: fewer registers,
// more blocks, as far as they do without memory.
template <typename T, bool ALIGNED> constexpr int kThreads = sizeof(T) == 2 ? (ALIGNED ? 512 : 640) : 1024;
template <typename T, bool ALIGNED> constexpr int kBlocks = sizeof(T) == 2 ? (ALIGNED ? 3 : 2) : 1;

// Grid, block, shared memory, ownership, parameters: see norm_rows(); weight and bias may be null.
template <typename T, int K, bool ALIGNED>
__global__ void __launch_bounds__(kThreads<T, ALIGNED>, kBlocks<T, ALIGNED>)
    layer_norm_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                   acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows, long long size,
                   acc_t<T> eps, int stages) {
  norm_rows<true, 1, K, ALIGNED>(Forward<T>{x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, size, eps}, stages);
}

// Grid, block, ownership: see norm_short(). weight and bias may be null.
template <typename T>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks)
    layer_norm_fwd_short(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                         T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows,
                         long long size, acc_t<T> eps) {
  norm_short<true, 1>(Forward<T>{x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, size, eps});
}

// Grid, block, shared memory, ownership: see norm_small(). weight and bias may be null.
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    layer_norm_fwd_small(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                         T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows,
                         long long size, acc_t<T> eps) {
  norm_small<true, 1>(Forward<T>{x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, size, eps});
}

// Grid, block, shared memory, ownership, parameters: see norm_held(). weight and bias may be null.
template <typename T>
__global__ void __launch_bounds__(kHeldThreads, 2)
    layer_norm_fwd_held(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows,
                        long long size, acc_t<T> eps) {
  norm_held<true, 1>(Forward<T>{x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, size, eps});
}

// Grid, block, ownership: see norm_wide(). weight and bias may be null.
template <typename T>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows,
                        long long size, acc_t<T> eps) {
  norm_wide<true>(Forward<T>{x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, size, eps});
}

// Grid, block, ownership: see shift_parameter(); blockIdx.z is 0 for the first parameter, 1 for another.
template <typename T>
__global__ void __launch_bounds__(256)
    layer_norm_fwd_shift(const T* __restrict__ one, const T* __restrict__ other, T* __restrict__ shifted,
                         T* __restrict__ other_shifted, long long size) {
  if (blockIdx.z == 0) shift_parameter(one, shifted, size);
  else shift_parameter(other, other_shifted, size);
}

// Grid, block, shared memory, ownership: see norm_rows_bwd(). weight, grad_x, weight_parts and bias_parts may be null.
template <typename T, int K, bool ALIGNED, bool PARAMETERS, bool LATE>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                   const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                   acc_t<T>* __restrict__ weight_parts, acc_t<T>* __restrict__ bias_parts, long long rows,
                   long long size, int stages) {
  norm_rows_bwd<true, PARAMETERS, 2, K, ALIGNED, LATE>(
      Backward<T>{grad_y, x, weight, nullptr, mean, rstd, grad_x, weight_parts, bias_parts, rows, size}, stages);
}

// Grid, block, ownership: see norm_short_bwd(). weight, grad_x, weight_parts and bias_parts may be null.
template <typename T>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks)
    layer_norm_bwd_short(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                         const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                         acc_t<T>* __restrict__ weight_parts, acc_t<T>* __restrict__ bias_parts, long long rows,
                         long long size) {
  norm_short_bwd<true, 2>(
      Backward<T>{grad_y, x, weight, nullptr, mean, rstd, grad_x, weight_parts, bias_parts, rows, size});
}

// Grid, block, shared memory, ownership: see norm_small_bwd(). weight, grad_x, weight_parts and bias_parts may be null.
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    layer_norm_bwd_small(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                         const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                         acc_t<T>* __restrict__ weight_parts, acc_t<T>* __restrict__ bias_parts, long long rows,
                         long long size) {
  norm_small_bwd<true, 2>(
      Backward<T>{grad_y, x, weight, nullptr, mean, rstd, grad_x, weight_parts, bias_parts, rows, size});
}

// Grid, block, ownership: see norm_wide_bwd(). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                        long long rows, long long size) {
  norm_wide_bwd<true>(Backward<T>{grad_y, x, weight, nullptr, mean, rstd, grad_x, nullptr, nullptr, rows, size});
}

// Grid, block, ownership: see norm_columns_bwd(). weight_parts or bias_parts may be null.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x, const acc_t<T>* __restrict__ mean,
                           const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ weight_parts,
                           acc_t<T>* __restrict__ bias_parts, long long rows, long long size) {
  norm_columns_bwd<true>(
      Backward<T>{grad_y, x, nullptr, nullptr, mean, rstd, nullptr, weight_parts, bias_parts, rows, size});
}

// Grid, block, ownership: see norm_sum_bwd(). grad_weight or grad_bias may be null.
template <typename T>
__global__ void __launch_bounds__(1024)
    layer_norm_bwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                       int count, long long size) {
  norm_sum_bwd<T>(parts, grad_weight, grad_bias, count, size);
}
