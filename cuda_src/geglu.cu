// y = gelu(gate) up                          gelu: exact or by tanh, see gelu.cu
// grad_gate = grad_y up gelu'(gate)
// grad_up = grad_y gelu(gate)
//
// Bytes per element: forward 3 x sizeof(T), backward 5 x sizeof(T). About 18 and 30 flops (none), 17 and 28 (tanh).
//
// Reached on an H200 (bf16, 8192x14336, GB/s of those bytes, forward / backward; a copy: 4226): none 4251 / 4233, tanh
// 4240 / 4268. Lost: nothing but what a copy loses, by Nsight Compute the memory's throughput at 89 to 90% of its peak,
// while 62 to 77% of all cycles issue. Packed rows of odd size: see swiglu.cu.
#include "gated/gated.cuh"
#include "gated/tiny_rows.cuh"
#include "common/elementwise/gelu.cuh"

// Grid, block, who owns what: see gated_forward().
template <typename T, bool TANH>
__global__ void geglu_fwd(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                          const __grid_constant__ Rows shape, long long gate_stride, long long up_stride) {
  gated_forward<Gelu<TANH>>(gate, up, y, shape, gate_stride, up_stride);
}

// Grid, block, who owns what: see gated_backward().
template <typename T, bool TANH>
__global__ void geglu_bwd(const T* __restrict__ grad_y, const T* __restrict__ gate, const T* __restrict__ up,
                          T* __restrict__ grad_gate, T* __restrict__ grad_up, const __grid_constant__ Rows shape,
                          long long gate_stride, long long up_stride) {
  gated_backward<Gelu<TANH>>(grad_y, gate, up, grad_gate, grad_up, shape, gate_stride, up_stride);
}

// Grid, block, shared memory: see gated_small_forward().
template <typename T, bool TANH>
__global__ void __launch_bounds__(kSmallRows)
    geglu_fwd_small(const T* __restrict__ x, T* __restrict__ y, const __grid_constant__ SmallRows rows) {
  gated_small_forward<Gelu<TANH>>(x, y, rows);
}

// Grid, block, shared memory: see gated_small_backward().
template <typename T, bool TANH>
__global__ void __launch_bounds__(kSmallRows)
    geglu_bwd_small(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x,
                    const __grid_constant__ SmallRows rows) {
  gated_small_backward<Gelu<TANH>>(grad_y, x, grad_x, rows);
}
