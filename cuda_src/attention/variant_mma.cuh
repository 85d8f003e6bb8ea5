// The kernels of attention.cu for a variant: grids, blocks and shared memory are theirs. The text that includes this defines
// attention::Variant, made of captured tensors and `given`.
#include "attention/backward_mma.cuh"
#include "attention/forward_mma.cuh"
#include "attention/once_mma.cuh"

template <typename T, int D, int BN, int M, int WARPS, int STAGES, int BOUNDS>
__global__ void __launch_bounds__(32 * WARPS)
    attention_fwd_mma_variant(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                              T* __restrict__ y, float* __restrict__ lse, const float* __restrict__ sinks, float scale,
                              attention::Strides qs, attention::Strides ks, attention::Strides vs,
                              attention::Strides ys, attention::Sizes sizes, const void* __restrict__ c0,
                              const void* __restrict__ c1, const void* __restrict__ c2, const void* __restrict__ c3,
                              const int* __restrict__ lists, const __grid_constant__ attention::Given given) {
#if __CUDA_ARCH__ >= 800
  attention::forward_mma<T, D, BN, M, WARPS, STAGES, BOUNDS>(q, k, v, y, lse, sinks, scale, qs, ks, vs, ys, sizes,
                                                             attention::Variant(c0, c1, c2, c3, lists, given));
#endif
}

template <typename T, int D, int BN, int WARPS, bool KEYS, int BOUNDS>
__global__ void __launch_bounds__(32 * WARPS)
    attention_bwd_mma_variant(const T* __restrict__ own_first, const T* __restrict__ own_second,
                              const T* __restrict__ first, const T* __restrict__ second, T* __restrict__ out_first,
                              T* __restrict__ out_second, const float* __restrict__ lse2,
                              const float* __restrict__ delta, float scale,
                              const __grid_constant__ attention::RoleStrides strides, attention::Sizes sizes,
                              const void* __restrict__ c0, const void* __restrict__ c1, const void* __restrict__ c2,
                              const void* __restrict__ c3, const int* __restrict__ lists,
                              const __grid_constant__ attention::Given given) {
#if __CUDA_ARCH__ >= 800
  attention::backward_mma<T, D, BN, WARPS, KEYS, BOUNDS>({own_first, own_second, first, second, out_first, out_second},
                                                         lse2, delta, scale, strides, sizes,
                                                         attention::Variant(c0, c1, c2, c3, lists, given));
#endif
}

template <typename T, int D, int BN, int M>
__global__ void __launch_bounds__(256, 1)
    attention_bwd_once_mma_variant(const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ q,
                                   const T* __restrict__ grad_y, T* __restrict__ grad_k, T* __restrict__ grad_v,
                                   const float* __restrict__ lse2, const float* __restrict__ delta,
                                   float* __restrict__ sums, float scale,
                                   const __grid_constant__ attention::RoleStrides strides,
                                   const __grid_constant__ attention::Sizes sizes, const void* __restrict__ c0,
                                   const void* __restrict__ c1, const void* __restrict__ c2,
                                   const void* __restrict__ c3, const int* __restrict__ lists,
                                   const __grid_constant__ attention::Given given) {
#if __CUDA_ARCH__ >= 800
  attention::once_mma<T, D, BN, M>({k, v, q, grad_y, grad_k, grad_v}, lse2, delta, sums, scale, strides, sizes,
                                   attention::Variant(c0, c1, c2, c3, lists, given));
#endif
}
