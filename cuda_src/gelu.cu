// none:  y = x Phi(x),                   Phi(x) = (1 + erf(x / sqrt 2)) / 2
//        grad_x = grad_y (Phi(x) + x phi(x)),  phi(x) = e^(-x^2 / 2) / sqrt(2 pi)
// tanh:  y = x s,  s = (1 + tanh u) / 2 = sigmoid(2u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
//        grad_x = grad_y (s + x (ds/du) (du/dx)),  ds/du = 2 s (1 - s),  du/dx = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T). About 15 and 25 flops either way.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4252): bf16, 2^27 elements, none 3995 / 4282, tanh
// 4162 / 4277; fp16, 2^26, none 3989 / 4143, tanh 4013 / 4135; fp32, 2^26, none 4155 / 4246, tanh 4188 / 4277. Lost,
// forward (none): twice the instructions of a copy that waits for memory.
#include "common/elementwise/elementwise.cuh"
#include "common/elementwise/gelu.cuh"

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y.
template <typename T> __global__ void gelu_fwd(const T* __restrict__ x, T* __restrict__ y, long long n, bool tanh) {
  using A = acc_t<T>;
  if (tanh) elementwise<T>(n, [](A x) { return Gelu<true>::template value<T>(x); }, y, x);
  else elementwise<T>(n, [](A x) { return Gelu<false>::template value<T>(x); }, y, x);
}

// Grid, block: see elementwise(). Reads the input: gelu falls and then rises, so y does not tell x.
template <typename T>
__global__ void gelu_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x, long long n,
                         bool tanh) {
  using A = acc_t<T>;
  if (tanh) {
    elementwise<T>(n, [](A g, A x) { return g * Gelu<true>::template at<T>(x).slope; }, grad_x, grad_y, x);
  } else {
    elementwise<T>(n, [](A g, A x) { return g * Gelu<false>::template at<T>(x).slope; }, grad_x, grad_y, x);
  }
}
