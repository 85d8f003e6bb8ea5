// y = x + alpha other
// grad_x = grad_y                 (no launch: the same tensor)
// grad_other = alpha grad_y       (the same tensor where alpha = 1)
//
// Bytes per element: forward 3 x sizeof(T), fewer where an input is broadcast; grad_other 2 x sizeof(T). Two flops.
// The sums over broadcast dimensions are those of PyTorch's expand().
#include "common/broadcast.cuh"
#include "common/elementwise.cuh"

// Grid, block: see elementwise(). All three laid out alike; each thread owns whole vectors.
template <typename T>
__global__ void add_fwd(const T* __restrict__ x, const T* __restrict__ other, T* __restrict__ y, acc_t<T> alpha,
                        long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [alpha](A x, A other) { return x + alpha * other; }, y, x, other);
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
