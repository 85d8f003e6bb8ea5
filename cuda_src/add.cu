// y = x + alpha other
// grad_x = grad_y                 (no launch: the same tensor)
// grad_other = alpha grad_y       (the same tensor where alpha = 1); where other is broadcast, the sum of that, by sum.cu
//
// Bytes per element: forward 3 x sizeof(T), fewer where an input is broadcast; grad_other 2 x sizeof(T), or
// sizeof(T) where it is summed. Two flops.
//
// Reached on an H200 (GB/s of those bytes, without those of an input that is broadcast, forward / backward; a copy: 4253),
// bf16: 32768x4096 + 4096 4149 / 3495, 32768x4095 + 4095 4103 / 3468, 32768x4096 + 32768x1 4095 / 3861, 64x256x56x56 +
// 256x1x1 3901 / 3200. Lost: in backward what sum.cu loses, over the first dimension a second launch.
#include "common/elementwise/broadcast.cuh"
#include "common/elementwise/elementwise.cuh"
#include "common/elementwise/broadcast_params.cuh"

// Grid, block: see elementwise(). All three laid out alike; each thread owns whole vectors.
template <typename T>
__global__ void add_fwd(const T* __restrict__ x, const T* __restrict__ other, T* __restrict__ y, acc_t<T> alpha,
                        long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [alpha](A x, A other) { return x + alpha * other; }, y, x, other);
}

// Grid, block: see spread_over(). `whole` and y are dense and laid out alike. OTHER: `whole` is other and `part` x.
template <typename T, bool OTHER, int FORM>
__global__ void add_fwd_spread(const T* __restrict__ whole, const T* __restrict__ part, T* __restrict__ y,
                               const __grid_constant__ Spread spread, acc_t<T> alpha, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {part};
  spread_over<FORM, 1>(
      spread, n, [alpha](A whole, const A(&p)[1]) { return OTHER ? p[0] + alpha * whole : whole + alpha * p[0]; }, y,
      whole, in);
}

// Grid, block: see broadcast(). x and other have any strides, y is dense; each thread owns whole vectors of y.
template <typename T>
__global__ void add_fwd_broadcast(const T* __restrict__ x, const T* __restrict__ other, T* __restrict__ y,
                                  const __grid_constant__ Layout<2> layout, acc_t<T> alpha, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {x, other};
  broadcast<T>(layout, n, [alpha](const A(&value)[2]) { return value[0] + alpha * value[1]; }, y, in);
}

// Grid, block: see elementwise(). `value` is alpha times a number.
template <typename T>
__global__ void add_scalar_fwd(const T* __restrict__ x, T* __restrict__ y, acc_t<T> value, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [value](A x) { return x + value; }, y, x);
}

// Grid, block: see elementwise().
template <typename T>
__global__ void add_bwd_other(const T* __restrict__ grad_y, T* __restrict__ grad_other, acc_t<T> alpha, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [alpha](A grad_y) { return alpha * grad_y; }, grad_other, grad_y);
}
