// s = sigmoid(gate), f(gate) = gate s
// y = f(gate) up
// grad_gate = grad_y up s (1 + gate (1 - s))
// grad_up = grad_y f(gate)
//
// Bytes per element: forward 3 x sizeof(T), backward 5 x sizeof(T). About 16 and 28 flops, one exponential and one
// reciprocal each.
//
// Reached on an H200 (bf16, GB/s of those bytes, forward / backward; a copy: 4226): 8192x14336 4235 / 4262, 8192x2x14336
// 4254 / 4273, 67108x1000 4112 / 4167, 67108x2x1000 4082 / 4163, 16388x4095 4113 / 4187, 16388x2x4095 3997 / 3657,
// 3947580x2x17 3793 / 4132. Lost: nothing but what a copy loses, by Nsight Compute the memory's throughput at 88% of its
// peak; in backward of packed rows of odd size (76%, with 77% of all cycles issuing): their two gradients begin at
// different places of a vector, so that one is passed on to the next lane, and each warp computes one vector in 32 again;
// those of a few columns go through shared memory instead.
#include "gated/gated.cuh"
#include "gated/tiny_rows.cuh"
#include "common/elementwise/sigmoid.cuh"

struct Silu {
  template <typename T> static __device__ __forceinline__ acc_t<T> value(acc_t<T> x) {
    return times_sigmoid_for<T>(x, x);
  }

  template <typename T> static __device__ __forceinline__ Activation<acc_t<T>> at(acc_t<T> x) {
    const Sigmoid<acc_t<T>> sigma = sigmoid_for<T>(x);
    return {x * sigma.s, sigma.s * (acc_t<T>(1) + x * sigma.c)};
  }
};

// Grid, block, who owns what: see gated_forward().
template <typename T>
__global__ void swiglu_fwd(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                           const __grid_constant__ Rows shape, long long gate_stride, long long up_stride) {
  gated_forward<Silu>(gate, up, y, shape, gate_stride, up_stride);
}

// Grid, block, who owns what: see gated_backward().
template <typename T>
__global__ void swiglu_bwd(const T* __restrict__ grad_y, const T* __restrict__ gate, const T* __restrict__ up,
                           T* __restrict__ grad_gate, T* __restrict__ grad_up, const __grid_constant__ Rows shape,
                           long long gate_stride, long long up_stride) {
  gated_backward<Silu>(grad_y, gate, up, grad_gate, grad_up, shape, gate_stride, up_stride);
}

// Grid, block, shared memory: see gated_small_forward().
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    swiglu_fwd_small(const T* __restrict__ x, T* __restrict__ y, const __grid_constant__ SmallRows rows) {
  gated_small_forward<Silu>(x, y, rows);
}

// Grid, block, shared memory: see gated_small_backward().
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    swiglu_bwd_small(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x,
                     const __grid_constant__ SmallRows rows) {
  gated_small_backward<Silu>(grad_y, x, grad_x, rows);
}
