// batch_norm_act.cu's equations for channels that lie side by side, in the ways of batch_norm_nhwc.cu, whose contracts hold:
// grid, block, who owns what, what may be null. What is said of residual, relu, mask and grad_z there holds here too, and what
// it costs. The first pass of training, and what combines its partials, are batch_norm_nhwc.cu's and batch_norm.cu's.
#include "batch_norm/nhwc_kernels.cuh"

// As batch_norm_fwd_nhwc: the second pass of training, or inference.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_act_fwd_nhwc(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                            T* __restrict__ y, const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                            const void* __restrict__ running_mean, const void* __restrict__ running_var, long long rows,
                            long long size, long long channels, int pixels, int wide, acc_t<T> eps,
                            const T* __restrict__ residual, unsigned char* __restrict__ mask, int relu) {
  nhwc_forward<T, true, Activated<T>>(x, weight, bias, y, mean, rstd, running_mean, running_var, rows, size, channels,
                                      pixels, wide, eps, {residual, mask, relu});
}

// As batch_norm_fwd_nhwc_cluster.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_act_fwd_nhwc_cluster(const T* __restrict__ x, const void* __restrict__ weight,
                                    const void* __restrict__ bias, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                                    acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, long long rows,
                                    long long size, int wide, acc_t<T> momentum, acc_t<T> eps,
                                    const T* __restrict__ residual, unsigned char* __restrict__ mask, int relu) {
  nhwc_cluster_forward<T, Activated<T>>(x, weight, bias, y, mean, rstd, running_mean, running_var, rows, size, wide,
                                        momentum, eps, {residual, mask, relu});
}

// As batch_norm_bwd_nhwc_partials: the first pass of training.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_act_bwd_nhwc_partials(const T* __restrict__ grad_y, const T* __restrict__ x,
                                     const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                     const void* __restrict__ running_mean, const void* __restrict__ running_var,
                                     acc_t<T>* __restrict__ partials, long long rows, long long size,
                                     long long channels, int pixels, int wide, acc_t<T> eps,
                                     const unsigned char* __restrict__ mask) {
  nhwc_backward_partials<T, true, MaskedGradients<T>>(grad_y, x, mean, rstd, running_mean, running_var, partials, rows,
                                                      size, channels, pixels, wide, eps, {mask, nullptr});
}

// As batch_norm_bwd_nhwc: the second pass of training, of what batch_norm_bwd_finalize has left in `given`.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_act_bwd_nhwc(const T* __restrict__ grad_y, const T* __restrict__ x,
                            const ChannelGradient<T>* __restrict__ given, T* __restrict__ grad_x, long long rows,
                            long long size, long long channels, int pixels, const unsigned char* __restrict__ mask,
                            T* __restrict__ grad_z) {
  nhwc_backward<T, true, MaskedGradients<T>>(grad_y, x, given, grad_x, rows, size, channels, pixels, {mask, grad_z});
}

// As batch_norm_bwd_nhwc_inline.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_act_bwd_nhwc_inline(const T* __restrict__ grad_y, const T* __restrict__ x,
                                   const void* __restrict__ weight, const acc_t<T>* __restrict__ mean,
                                   const acc_t<T>* __restrict__ rstd, const acc_t<T>* __restrict__ partials,
                                   T* __restrict__ grad_x, void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                                   long long rows, long long size, long long channels, int pixels, int count, int wide,
                                   const unsigned char* __restrict__ mask, T* __restrict__ grad_z) {
  nhwc_backward_inline<T, MaskedGradients<T>>(grad_y, x, weight, mean, rstd, partials, grad_x, grad_weight, grad_bias,
                                              rows, size, channels, pixels, count, wide, {mask, grad_z});
}

// As batch_norm_bwd_nhwc_cluster.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_act_bwd_nhwc_cluster(const T* __restrict__ grad_y, const T* __restrict__ x,
                                    const void* __restrict__ weight, const acc_t<T>* __restrict__ mean,
                                    const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                                    void* __restrict__ grad_weight, void* __restrict__ grad_bias, long long rows,
                                    long long size, int wide, const unsigned char* __restrict__ mask,
                                    T* __restrict__ grad_z) {
  nhwc_cluster_backward<T, MaskedGradients<T>>(grad_y, x, weight, mean, rstd, grad_x, grad_weight, grad_bias, rows,
                                               size, wide, {mask, grad_z});
}
