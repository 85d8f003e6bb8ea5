// s = sigmoid(x) = 1 / (1 + e^-x)
// y = x s
// grad_x = grad_y s (1 + x (1 - s))
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T). About 6 and 10 flops in half types, one exponential and
// one reciprocal each; twice that in fp32.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): bf16, 2^27 elements, 4178 / 4278; 2^24 + 1,
// 3259 / 3488; fp16, 2^26, 3968; fp32, 2^26, 4139. Lost, of 2^24 elements: 4 of 20 us, the start of a launch; by Nsight
// Compute 39% of all cycles issue, and warps wait for memory.
#include "common/elementwise/elementwise.cuh"
#include "common/elementwise/sigmoid.cuh"

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y. y may be x.
template <typename T> __global__ void silu_fwd(const T* x, T* y, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [](A x) { return times_sigmoid_for<T>(x, x); }, y, x);
}

// Grid, block: see elementwise(). Reads the input: y = x s cannot be inverted.
template <typename T>
__global__ void silu_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  const auto gradient = [](A grad_y, A x) {
    const Sigmoid<A> sigma = sigmoid_for<T>(x);
    return grad_y * sigma.s * (A(1) + x * sigma.c);
  };
  elementwise<T>(n, gradient, grad_x, grad_y, x);
}
