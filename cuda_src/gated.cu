// y = f(gate) up
// grad_gate = grad_y up f'(gate)
// grad_up = grad_y f(gate)
//
// swiglu: f(x) = x s, s = sigmoid(x); f'(x) = s (1 + x (1 - s))
// geglu:  f is gelu, exact or by tanh: see gelu.cu
//
// Bytes per element: forward 3 x sizeof(T), backward 5 x sizeof(T). About 16 and 28 flops of swiglu, one exponential and one
// reciprocal each; 18 and 30 of exact geglu, 17 and 28 by tanh.
//
// Reached on an H200 (bf16, GB/s of those bytes, forward / backward; a copy: 4226): swiglu 8192x14336 4235 / 4262, 8192x2x14336
// 4254 / 4273, 67108x1000 4112 / 4167, 67108x2x1000 4082 / 4163, 16388x4095 4113 / 4187, 16388x2x4095 3997 / 3657,
// 3947580x2x17 3793 / 4132; geglu 8192x14336 4251 / 4233, by tanh 4240 / 4268. Lost: nothing but what a copy loses, by Nsight
// Compute the memory's throughput at 88 to 90% of its peak; in backward of packed rows of odd size (76%, with 77% of all
// cycles issuing): their two gradients begin at different places of a vector, so that one is passed on to the next lane, and
// each warp computes one vector in 32 again; those of a few columns go through shared memory instead.
// `function` says which f: a Function of common/elementwise/activations.cuh.
#include "gated/strided_rows.cuh"
#include "gated/shared_memory.cuh"

// Grid, block, who owns what: see gated_forward().
template <typename T>
__global__ void gated_fwd_strided_rows(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                                       const __grid_constant__ Rows shape, long long gate_stride, long long up_stride,
                                       int function) {
  gated_forward(gate, up, y, shape, gate_stride, up_stride, function);
}

// Grid, block, who owns what: see gated_backward().
template <typename T>
__global__ void gated_bwd_strided_rows(const T* __restrict__ grad_y, const T* __restrict__ gate,
                                       const T* __restrict__ up, T* __restrict__ grad_gate, T* __restrict__ grad_up,
                                       const __grid_constant__ Rows shape, long long gate_stride, long long up_stride,
                                       int function) {
  gated_backward(grad_y, gate, up, grad_gate, grad_up, shape, gate_stride, up_stride, function);
}

// Grid, block, shared memory: see shared_gated_forward().
template <typename T>
__global__ void __launch_bounds__(kSmallRows, sizeof(T) == 2 ? 5 : 4)
    gated_fwd_shared_memory(const T* __restrict__ x, T* __restrict__ y, const __grid_constant__ PackedRows rows,
                            int function) {
  shared_gated_forward(x, y, rows, function);
}

// Grid, block, shared memory: see shared_gated_backward().
template <typename T>
__global__ void __launch_bounds__(kSmallRows)
    gated_bwd_shared_memory(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x,
                            const __grid_constant__ PackedRows rows, int function) {
  if (function == kSilu) shared_gated_backward<Silu>(grad_y, x, grad_x, rows);
  else if (function == kGeluTanh) shared_gated_backward<GeluTanh>(grad_y, x, grad_x, rows);
  else shared_gated_backward<GeluExact>(grad_y, x, grad_x, rows);
}
