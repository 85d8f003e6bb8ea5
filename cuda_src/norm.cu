// layer_norm     xhat = (x - mean) rstd,   mean = sum(x) / n,   rstd = 1 / sqrt(sum((x - mean)^2) / n + eps)
//                y = xhat weight + bias
// rms_norm       xhat = x rstd,   rstd = 1 / sqrt(sum(x^2) / n + eps)
//                y = xhat weight
// add_rms_norm   summed = x + residual, rounded to T; then as rms_norm of summed
//
// over each row of n. The gradients, over a row, and over the rows those of the parameters; c2 is that of layer_norm alone:
//
//                grad_x = rstd (wg - c2 - xhat c1),   wg = grad_y weight,   c1 = sum(wg xhat) / n,   c2 = sum(wg) / n
//                grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)
//
// In add_rms_norm grad_x is that plus grad_summed, and grad_residual is the same.
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T), the parameters' gradients included; of add_rms_norm 4 x
// sizeof(T) each. Flops per element, forward / backward: layer_norm about 8 / 14, rms_norm 4 / 10, add_rms_norm 5 / 11.
//
// Reached on an H200: GB/s of those bytes, forward / backward, bf16 unless said otherwise; a copy reaches 4226.
//
//                    layer_norm     rms_norm       add_rms_norm
//     131072x1024    3934 / 3902
//     32768x4096     3938 / 3658    4047 / 3906    3998 / 4002
//     32768x4096                    4034 / 4124    4036 / 4186    fp32
//     8192x16384     3708 / 3853    3923 / 3890    4013 / 3959
//     131072x1000    3899 / 3653    3886 / 3719    3933 / 3819
//     32768x4095     3544 / 3427    3973 / 3426    3981 / 3637
//     16383x1001     2439 / 2222
//     2048x50257     2709 / 1718    3163 / 2131    3231 / 2429
//     1048576x64     3538 / 3738    3659 / 3816    3852 / 3873
//     1000003x17     2302 / 2052    2735 / 2174    3439 / 2496
//
// What is lost: layer_norm issues instructions in 70 to 78% of all cycles, forward and backward of aligned rows. In forward,
// 8192x16384 waits at the barriers of wide rows, of which a block holds one at a time; unaligned rows need one more launch,
// though its start is hidden; and the parameters of a long row come from L2. In backward, unaligned rows lose by their heads
// and tails: prefetched behind the vectors, rms_norm of 32768x4095 comes to 3604, but that of 2048x50257 to 1850. When the
// statistics of the next row are prefetched matters too: before the wait for this row, rms_norm of 8192x16384 comes to 3617,
// after it that of 32768x4096 to 3784; `late` takes the better. A row that is longer than shared memory holds is read
// twice.
//
// The constants in capitals, such as BLOCK_THREADS, are defined by cupyops/_dispatch/norm/norm.py, which launches these kernels.
#include "norm/block_backward.cuh"
#include "norm/block_forward.cuh"
#include "norm/shared_memory.cuh"
#include "norm/sub_warp.cuh"
#include "norm/thread_per_row.cuh"
#include "norm/two_pass_backward.cuh"
#include "norm/two_pass_forward.cuh"

// CENTRED: about the mean, as layer_norm is; the others are about 0. INPUTS: tensors of rows that forward reads, two with a
// residual; backward reads one more.
//
// Of norm_fwd_block: threads of a block, at most, and blocks of a multiprocessor, at least; 0: any number. layer_norm of half
// types is bound by latency: it gets fewer registers, and so more blocks, as far as it does without spills.
template <bool CENTRED, typename T, bool ALIGNED>
constexpr int kThreads = CENTRED && sizeof(T) == 2 ? (ALIGNED ? CENTRED_HALF_THREADS : 640) : BLOCK_THREADS;
template <bool CENTRED, typename T, bool ALIGNED>
constexpr int kBlocks = CENTRED ? (sizeof(T) == 2 ? (ALIGNED ? 3 : 2) : 1) : 0;

// The tensors, of which the compiler then knows those that an operator does not have.
template <bool CENTRED, int INPUTS, typename T> __device__ __forceinline__ Forward<T> tensors_of(Forward<T> to) {
  if (INPUTS == 1) to.residual = to.summed = nullptr;
  if (!CENTRED) to.bias = nullptr, to.mean = nullptr;
  return to;
}
template <bool CENTRED, int INPUTS, typename T> __device__ __forceinline__ Backward<T> tensors_of(Backward<T> to) {
  if (INPUTS == 1) to.grad_summed = nullptr;
  if (!CENTRED) to.mean = nullptr, to.bias_partials = nullptr;
  return to;
}

// --- forward: grid, block, shared memory and ownership are those of the function that a kernel calls -----------------------
//
// All take the same tensors: residual and summed are null but in add_rms_norm, bias and mean but in layer_norm; weight and bias
// may be null. What is no template parameter a kernel knows by what is null, as a tensor of no rows is too.

template <typename T, bool CENTRED>
__global__ void __launch_bounds__(kSmallRows)
    norm_fwd_thread_per_row(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                            const T* __restrict__ bias, T* summed, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                            acc_t<T>* __restrict__ rstd, long long rows, long long size, acc_t<T> eps) {
  const Forward<T> to{x, residual, weight, bias, summed, y, mean, rstd, rows, size, eps};
  norm_thread_per_row<CENTRED>(tensors_of<CENTRED, CENTRED ? 1 : 2>(to));
}

template <typename T, bool CENTRED>
__global__ void __launch_bounds__(SUB_WARP_THREADS, SUB_WARP_BLOCKS)
    norm_fwd_sub_warp(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                      const T* __restrict__ bias, T* summed, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                      acc_t<T>* __restrict__ rstd, long long rows, long long size, acc_t<T> eps) {
  const Forward<T> to{x, residual, weight, bias, summed, y, mean, rstd, rows, size, eps};
  if constexpr (CENTRED) norm_sub_warp<true, 1>(tensors_of<true, 1>(to));
  else if (residual) norm_sub_warp<false, 2>(tensors_of<false, 2>(to));
  else norm_sub_warp<false, 1>(tensors_of<false, 1>(to));
}

template <typename T, bool CENTRED, int INPUTS, int K, bool ALIGNED>
__global__ void __launch_bounds__(kThreads<CENTRED, T, ALIGNED>, kBlocks<CENTRED, T, ALIGNED>)
    norm_fwd_block(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                   const T* __restrict__ bias, T* summed, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                   acc_t<T>* __restrict__ rstd, long long rows, long long size, acc_t<T> eps, int stages) {
  const Forward<T> to{x, residual, weight, bias, summed, y, mean, rstd, rows, size, eps};
  norm_block<CENTRED, INPUTS, K, ALIGNED>(tensors_of<CENTRED, INPUTS>(to), stages);
}

template <typename T, bool CENTRED>
__global__ void __launch_bounds__(SHARED_MEMORY_THREADS, 2)
    norm_fwd_shared_memory(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                           const T* __restrict__ bias, T* summed, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                           acc_t<T>* __restrict__ rstd, long long rows, long long size, acc_t<T> eps) {
  const Forward<T> to{x, residual, weight, bias, summed, y, mean, rstd, rows, size, eps};
  using Adder = RowAdder<acc_t<T>, 1, false>;
  __shared__ typename Adder::Buffer buffer;
  Adder adder(buffer);
  if constexpr (CENTRED) norm_shared_memory<true, 1>(tensors_of<true, 1>(to), adder);
  else if (residual) norm_shared_memory<false, 2>(tensors_of<false, 2>(to), adder);
  else norm_shared_memory<false, 1>(tensors_of<false, 1>(to), adder);
}

template <typename T>
__global__ void __launch_bounds__(1024)
    norm_fwd_two_pass(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                      const T* __restrict__ bias, T* summed, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                      acc_t<T>* __restrict__ rstd, long long rows, long long size, acc_t<T> eps) {
  const Forward<T> to{x, residual, weight, bias, summed, y, mean, rstd, rows, size, eps};
  norm_two_pass(to);
}

// For a forward of unaligned rows: see shift_parameter(). blockIdx.z is 0 for a parameter, 1 for another, where there is one.
template <typename T>
__global__ void __launch_bounds__(SHIFT_THREADS)
    norm_fwd_shift(const T* __restrict__ one, const T* __restrict__ other, T* __restrict__ shifted_one,
                   T* __restrict__ shifted_other, long long size) {
  if (blockIdx.z == 0) shift_parameter(one, shifted_one, size);
  else shift_parameter(other, shifted_other, size);
}

// --- backward: the same; weight, grad_x, weight_partials and bias_partials may be null --------------------------------------
//
// grad_summed is null but in add_rms_norm, mean and bias_partials but in layer_norm. In add_rms_norm x is what forward calls
// summed.

template <typename T, bool CENTRED>
__global__ void __launch_bounds__(kSmallRows)
    norm_bwd_thread_per_row(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                            const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ mean,
                            const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                            acc_t<T>* __restrict__ weight_partials, acc_t<T>* __restrict__ bias_partials,
                            long long rows, long long size) {
  const Backward<T> to{grad_y, x, weight, grad_summed, mean, rstd, grad_x, weight_partials, bias_partials, rows, size};
  norm_thread_per_row_bwd<CENTRED>(tensors_of<CENTRED, CENTRED ? 1 : 2>(to));
}

template <typename T, bool CENTRED>
__global__ void __launch_bounds__(SUB_WARP_THREADS, SUB_WARP_BLOCKS)
    norm_bwd_sub_warp(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                      const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ mean,
                      const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x, acc_t<T>* __restrict__ weight_partials,
                      acc_t<T>* __restrict__ bias_partials, long long rows, long long size) {
  const Backward<T> to{grad_y, x, weight, grad_summed, mean, rstd, grad_x, weight_partials, bias_partials, rows, size};
  __shared__ __align__(16) acc_t<T> shared[kVecWidth<T> * SUB_WARP_THREADS];
  if constexpr (CENTRED) norm_sub_warp_bwd<true, 2>(tensors_of<true, 1>(to), shared);
  else if (grad_summed) norm_sub_warp_bwd<false, 3>(tensors_of<false, 2>(to), shared);
  else norm_sub_warp_bwd<false, 2>(tensors_of<false, 1>(to), shared);
}

template <typename T, bool CENTRED, int K, bool ALIGNED>
__global__ void __launch_bounds__(BACKWARD_THREADS, 1)
    norm_bwd_block(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                   const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ mean,
                   const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x, acc_t<T>* __restrict__ weight_partials,
                   acc_t<T>* __restrict__ bias_partials, long long rows, long long size, int stages, bool late) {
  const Backward<T> to{grad_y, x, weight, grad_summed, mean, rstd, grad_x, weight_partials, bias_partials, rows, size};
  __shared__ typename BackwardAdder<CENTRED, K, ALIGNED, acc_t<T>>::Buffer buffer;
  if constexpr (CENTRED) norm_block_bwd<true, 2, K, ALIGNED>(tensors_of<true, 1>(to), stages, late, buffer);
  else if (grad_summed) norm_block_bwd<false, 3, K, ALIGNED>(tensors_of<false, 2>(to), stages, late, buffer);
  else norm_block_bwd<false, 2, K, ALIGNED>(tensors_of<false, 1>(to), stages, late, buffer);
}

// grad_x alone.
template <typename T>
__global__ void __launch_bounds__(BACKWARD_THREADS)
    norm_bwd_two_pass(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                      const T* __restrict__ grad_summed, const acc_t<T>* __restrict__ mean,
                      const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x, long long rows, long long size) {
  const Backward<T> to{grad_y, x, weight, grad_summed, mean, rstd, grad_x, nullptr, nullptr, rows, size};
  norm_two_pass_bwd(to);
}

// The partials alone; weight_partials or bias_partials may be null.
template <typename T>
__global__ void __launch_bounds__(BACKWARD_THREADS)
    norm_bwd_strided(const T* __restrict__ grad_y, const T* __restrict__ x, const acc_t<T>* __restrict__ mean,
                     const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ weight_partials,
                     acc_t<T>* __restrict__ bias_partials, long long rows, long long size) {
  const Backward<T> to{grad_y, x, nullptr, nullptr, mean, rstd, nullptr, weight_partials, bias_partials, rows, size};
  norm_strided_bwd(to);
}

// grad_weight and grad_bias from the partials; one of them may be null.
template <typename T>
__global__ void __launch_bounds__(1024)
    norm_bwd_finalize(const acc_t<T>* __restrict__ partials, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                      int count, long long size) {
  norm_finalize<T>(partials, grad_weight, grad_bias, count, size);
}
