// y = gelu(x + bias)                 bias over the last dimension; gelu as in gelu.cu
// grad_x = grad_y gelu'(x + bias)
// grad_bias = sum grad_x             over the rows, of the unrounded products
//
// Bytes per element: forward 2 x sizeof(T) (bias stays in the caches), backward 3 x sizeof(T): one pass reads grad_y and x,
// writes grad_x and leaves partial sums. About 26 flops.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4252): 16384x4096 bf16 3765 / 3530, tanh 3808 /
// 3523, 16384x4095 bf16 3749 / 3575. A thread keeps the bias of its columns and goes through four vectors one
// by one; four under way, in twice the registers, reach 3491. Lost: gelu's arithmetic (gelu alone, of 16384x4095: 3627);
// in backward the second launch.
#include "common/elementwise/broadcast.cuh"
#include "common/reduce/column.cuh"
#include "common/elementwise/gelu.cuh"
#include "common/elementwise/broadcast_params.cuh"

template <typename T> __device__ __forceinline__ acc_t<T> gelu(acc_t<T> x, bool tanh) {
  return tanh ? Gelu<true>::template value<T>(x) : Gelu<false>::template value<T>(x);
}

// Grid, block: see broadcast_params(). x and y are dense and laid out alike.
template <typename T, int FORM>
__global__ void bias_gelu_fwd_params(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, bool tanh,
                                     const __grid_constant__ BroadcastParams params, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {bias};
  const auto f = [=](A x, const A(&p)[1]) { return gelu<T>(x + p[0], tanh); };
  broadcast_params<FORM, 1>(params, n, f, y, x, in);
}

// Grid, block: see broadcast(). x has any strides, bias those of its expansion to the shape of x; y is dense.
template <typename T>
__global__ void bias_gelu_fwd_strided(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, bool tanh,
                                      const __grid_constant__ Layout<2> layout, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {x, bias};
  broadcast<T>(layout, n, [=](const A(&v)[2]) { return gelu<T>(v[0] + v[1], tanh); }, y, in);
}

template <typename T> struct BiasGelu {
  using A = acc_t<T>;
  static constexpr int SUMS = 1;
  bool tanh;

  __device__ __forceinline__ A operator()(A grad_y, A x, A bias, A (&term)[1]) const {
    const A at = x + bias;
    return term[0] = grad_y * (tanh ? Gelu<true>::template at<T>(at).slope : Gelu<false>::template at<T>(at).slope);
  }
};

// Grid, block, partial: see sum_columns(). grad_x and grad_bias are null where nobody wants them; grad_bias is only asked
// that: column_finalize writes it.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, kColumnBlocks<T>)
    bias_gelu_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ bias,
                          T* __restrict__ grad_x, const T* grad_bias, acc_t<T>* __restrict__ partial,
                          const __grid_constant__ Columns columns, bool tanh) {
  sum_columns<1, T>(columns, BiasGelu<T>{tanh}, grad_y, x, bias, grad_x, partial, grad_bias != nullptr);
}
