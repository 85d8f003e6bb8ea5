// y = max(x, 0)            NaN stays NaN, as in PyTorch
// grad_x = grad_y  where y > 0, else 0
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); no arithmetic to speak of.
#include "common/elementwise.cuh"

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y.
template <typename T> __global__ void relu_fwd(const T* __restrict__ x, T* __restrict__ y, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [](A x) { return x <= A(0) ? A(0) : x; }, y, x);
}

// Grid, block: see elementwise(). Reads the output, so that the input need not be kept.
template <typename T>
__global__ void relu_bwd(const T* __restrict__ grad_y, const T* __restrict__ y, T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [](A grad_y, A y) { return y <= A(0) ? A(0) : grad_y; }, grad_x, grad_y, y);
}
