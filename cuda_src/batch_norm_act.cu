// z = xhat weight + bias + residual,   y = max(z, 0)            xhat, mean, rstd and the running statistics: see batch_norm.cu
//
// grad_residual = grad_z = grad_y where z > 0, else 0
// grad_x, grad_weight, grad_bias: batch_norm.cu's equations, of grad_z in the place of grad_y
//
// What follows batch_norm is computed in the passes that its own kernels have, by the same code (batch_norm/nchw_kernels.cuh,
// batch_norm/nhwc_kernels.cuh); the sum of a residual and the activation need none of their own. This file has the kernels
// for images, (n, c, s), batch_norm_act_nhwc.cu those for channels that lie side by side. batch_norm.cu's and
// batch_norm_nhwc.cu's contracts hold: grid, block and shared memory, who owns what, what may be null. Besides, everywhere:
//
//     every run of every tensor is whole vectors; others are PyTorch's
//     residual, which may be null, is added
//     relu: 0 for y = z
//     mask: a bit for each element of y (batch_norm/activated.cuh), which forward writes, unless it is null, and backward reads
//     grad_z, which may be null, is written with grad_x
//
// Where z > 0 could be read from y, 2 bytes an element of a half type in each pass, or be found from x again, for no bytes,
// but with three numbers of a channel for each column, and three instructions an element more in kernels that are bound by
// their instructions; and y tells it alone where there is a residual. A mask costs 1/8 byte to write and twice 1/8 to read.
//
// Bytes per element, of a half type, in two passes (apart: batch_norm, sum, relu): forward 6.1 (10), with a residual 8.1
// (16); backward 10.3 (16), with a residual 12.3 (16). About 10 flops forward, 10 backward.
//
// Python defines SEGMENT_THREADS, the most that a block of two passes has, and CLUSTER_THREADS.
#include "batch_norm/nchw_kernels.cuh"

// As batch_norm_fwd_nchw_cluster.
template <typename T>
__global__ void __launch_bounds__(CLUSTER_THREADS, 2)
    batch_norm_act_fwd_nchw_cluster(const T* __restrict__ x, const void* __restrict__ weight,
                                    const void* __restrict__ bias, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                                    acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var,
                                    Segments segments, int buffered, int wide, acc_t<T> momentum, acc_t<T> eps,
                                    const T* __restrict__ residual, unsigned char* __restrict__ mask, int relu) {
  nchw_cluster_forward<T, true, Activated<T>>(x, weight, bias, y, mean, rstd, running_mean, running_var, segments,
                                              buffered, wide, momentum, eps, {residual, mask, relu});
}

// As batch_norm_fwd_nchw: the second pass of training, after batch_norm_fwd_nchw_partials, or inference.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_act_fwd_nchw(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                            T* __restrict__ y, const acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ mean,
                            acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, Segments segments,
                            int wide, acc_t<T> momentum, acc_t<T> eps, const T* __restrict__ residual,
                            unsigned char* __restrict__ mask, int relu) {
  nchw_forward<T, true, Activated<T>>(x, weight, bias, y, partials, mean, rstd, running_mean, running_var, segments,
                                      wide, momentum, eps, {residual, mask, relu});
}

// As batch_norm_bwd_nchw_cluster.
template <typename T>
__global__ void __launch_bounds__(CLUSTER_THREADS, 2)
    batch_norm_act_bwd_nchw_cluster(const T* __restrict__ grad_y, const T* __restrict__ x,
                                    const void* __restrict__ weight, const acc_t<T>* __restrict__ mean,
                                    const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                                    void* __restrict__ grad_weight, void* __restrict__ grad_bias, Segments segments,
                                    int buffered, int wide, const unsigned char* __restrict__ mask,
                                    T* __restrict__ grad_z) {
  nchw_cluster_backward<T, true, MaskedGradients<T>>(grad_y, x, weight, mean, rstd, grad_x, grad_weight, grad_bias,
                                                     segments, buffered, wide, {mask, grad_z});
}

// As batch_norm_bwd_nchw_partials: the first pass of training.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_act_bwd_nchw_partials(const T* __restrict__ grad_y, const T* __restrict__ x,
                                     const void* __restrict__ weight, const acc_t<T>* __restrict__ mean,
                                     const acc_t<T>* __restrict__ rstd, const void* __restrict__ running_mean,
                                     const void* __restrict__ running_var, T* __restrict__ grad_x,
                                     acc_t<T>* __restrict__ partials, Segments segments, int wide, acc_t<T> eps,
                                     const unsigned char* __restrict__ mask) {
  nchw_backward_partials<T, true, MaskedGradients<T>>(grad_y, x, weight, mean, rstd, running_mean, running_var, grad_x,
                                                      partials, segments, wide, eps, {mask, nullptr});
}

// As batch_norm_bwd_nchw: the second pass of training.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_act_bwd_nchw(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                            const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                            const acc_t<T>* __restrict__ partials, T* __restrict__ grad_x,
                            void* __restrict__ grad_weight, void* __restrict__ grad_bias, Segments segments, int wide,
                            const unsigned char* __restrict__ mask, T* __restrict__ grad_z) {
  nchw_backward<T, true, MaskedGradients<T>>(grad_y, x, weight, mean, rstd, partials, grad_x, grad_weight, grad_bias,
                                             segments, wide, {mask, grad_z});
}
