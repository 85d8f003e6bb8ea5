// layer_norm_lowered   y = layer_norm(x, weight, bias), rounded to a half type
// rms_norm_lowered     y = rms_norm(x, weight), rounded to a half type
// add_norm_lowered     summed = residual + x, and either of these of summed
//
// as autocast has them in front of a product of matrices: x, weight, bias and all gradients but grad_y are fp32, y and grad_y
// of a half type O. The equations are those of norm.cu, and the arithmetic is that of its kernels for fp32, so y is what they
// give, rounded: no copy is made of y, nor of grad_y. Bytes per element: forward 4 + 2, backward 4 + 2 + 4. In
// add_norm_lowered x is of O, as a product gives it, and residual and summed are fp32; the gradient of residual is that of
// summed with what comes by y, and grad_x is the same, rounded to O: forward 2 + 4 + 4 + 2, backward 2 + 4 + 4 + 4 + 2.
//
// The constants in capitals are defined by cupyops/_dispatch/norm_forms.py.
#include "norm/block_backward.cuh"
#include "norm/block_forward.cuh"

// Grid, block, shared memory and ownership are those of norm_block and norm_block_bwd, whose rows are here 4 vectors of each
// thread, and ALIGNED. The parameters are those of norm.cu: residual, summed and grad_summed are null; so are bias, mean and
// bias_partials unless CENTRED; weight, bias, grad_x and the partials may be. The partials become the gradients by
// norm_bwd_finalize of norm.cu.

template <typename O, bool CENTRED>
__global__ void __launch_bounds__(BLOCK_THREADS, CENTRED ? 1 : 0)
    norm_lowered_fwd(const float* __restrict__ x, const float* __restrict__ residual, const float* __restrict__ weight,
                     const float* __restrict__ bias, float* summed, O* __restrict__ y, float* __restrict__ mean,
                     float* __restrict__ rstd, long long rows, long long size, float eps, int stages) {
  Forward<float, O> to{x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, size, eps};
  if (!CENTRED) to.bias = nullptr, to.mean = nullptr;
  norm_block<CENTRED, 1, 4, true>(to, stages);
}

template <typename O, bool CENTRED>
__global__ void __launch_bounds__(BACKWARD_THREADS, 1)
    norm_lowered_bwd(const O* __restrict__ grad_y, const float* __restrict__ x, const float* __restrict__ weight,
                     const float* __restrict__ grad_summed, const float* __restrict__ mean,
                     const float* __restrict__ rstd, float* __restrict__ grad_x, float* __restrict__ weight_partials,
                     float* __restrict__ bias_partials, long long rows, long long size, int stages, bool late) {
  Backward<float, O> to{grad_y, x, weight, nullptr, mean, rstd, grad_x, weight_partials, bias_partials, rows, size};
  if (!CENTRED) to.mean = nullptr, to.bias_partials = nullptr;
  __shared__ typename BackwardAdder<CENTRED, 4, true, float>::Buffer buffer;
  norm_block_bwd<CENTRED, 2, 4, true>(to, stages, late, buffer);
}

// The same with a residual. Rows of forward go to registers, CENTRED or not, so that no shared memory is needed; grad_x, of O,
// or grad_residual may be null.

template <typename O, bool CENTRED>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    norm_lowered_add_fwd(const float* __restrict__ residual, const O* __restrict__ x, const float* __restrict__ weight,
                         const float* __restrict__ bias, float* __restrict__ summed, O* __restrict__ y,
                         float* __restrict__ mean, float* __restrict__ rstd, long long rows, long long size,
                         float eps) {
  Forward<float, O, O> to{residual, x, weight, bias, summed, y, mean, rstd, rows, size, eps};
  if (!CENTRED) to.bias = nullptr, to.mean = nullptr;
  using Adder = RowAdder<float, 1, false>;
  __shared__ typename Adder::Buffer buffer;
  Adder adder(buffer);
  norm_block_registers<CENTRED, 2, 4, true>(to, adder);
}

template <typename O, bool CENTRED>
__global__ void __launch_bounds__(BACKWARD_THREADS, 1)
    norm_lowered_add_bwd(const O* __restrict__ grad_y, const float* __restrict__ summed,
                         const float* __restrict__ weight, const float* __restrict__ grad_summed,
                         const float* __restrict__ mean, const float* __restrict__ rstd,
                         float* __restrict__ grad_residual, float* __restrict__ weight_partials,
                         float* __restrict__ bias_partials, O* __restrict__ grad_x, long long rows, long long size,
                         int stages, bool late) {
  Backward<float, O> to{grad_y,        summed,          weight,        grad_summed, mean, rstd,
                        grad_residual, weight_partials, bias_partials, rows,        size, grad_x};
  if (!CENTRED) to.mean = nullptr, to.bias_partials = nullptr;
  __shared__ typename BackwardAdder<CENTRED, 4, true, float>::Buffer buffer;
  norm_block_bwd<CENTRED, 3, 4, true>(to, stages, late, buffer);
}
