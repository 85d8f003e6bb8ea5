// y = x + alpha other
// grad_x = grad_y                 no launch: the same tensor
// grad_other = alpha grad_y       the same tensor where alpha = 1; where other is broadcast, the sum of that, by sum.cu
//
// Bytes per element: forward 3 x sizeof(T), fewer where an input is broadcast; grad_other 2 x sizeof(T), or
// sizeof(T) where it is summed. Two flops.
//
// Reached on an H200 (GB/s of those bytes, without those of an input that is broadcast, forward / backward; a copy: 4253),
// bf16: 32768x4096 + 4096 4149 / 3495, 32768x4095 + 4095 4103 / 3468, 32768x4096 + 32768x1 4095 / 3861, 64x256x56x56 +
// 256x1x1 3901 / 3200. Lost: in backward what sum.cu loses, which over the first dimension has a second launch.
#include "common/elementwise/broadcast.cuh"
#include "common/elementwise/elementwise.cuh"
#include "common/elementwise/broadcast_params.cuh"

// Grid, block: see elementwise(). All three are laid out alike; each thread owns a vector.
template <typename T>
__global__ void add_fwd_flat(const T* __restrict__ x, const T* __restrict__ other, T* __restrict__ y, acc_t<T> alpha,
                             long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [alpha](A x, A other) { return x + alpha * other; }, y, x, other);
}

// Grid, block: see broadcast_params(). x and y are dense and laid out alike; other is broadcast.
template <typename T, int FORM>
__global__ void add_fwd_params(const T* __restrict__ x, const T* __restrict__ other, T* __restrict__ y, acc_t<T> alpha,
                               const __grid_constant__ BroadcastParams params, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {other};
  broadcast_params<FORM, 1>(params, n, [alpha](A x, const A(&p)[1]) { return x + alpha * p[0]; }, y, x, in);
}

// Grid, block: see broadcast(). x and other have any strides, y is dense; each thread owns vectors of y.
template <typename T>
__global__ void add_fwd_strided(const T* __restrict__ x, const T* __restrict__ other, T* __restrict__ y, acc_t<T> alpha,
                                const __grid_constant__ Layout<2> layout, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {x, other};
  broadcast<T>(layout, n, [alpha](const A(&value)[2]) { return value[0] + alpha * value[1]; }, y, in);
}

// y = alpha x + value: the sum with a number, of alpha 1; and the gradient of other, of the value -0, which changes nothing.
// Grid, block: see elementwise().
template <typename T>
__global__ void add_number(const T* __restrict__ x, T* __restrict__ y, acc_t<T> alpha, acc_t<T> value, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [alpha, value](A x) { return alpha * x + value; }, y, x);
}
