// Attention of half types, for each of a batch and each head; group heads of q share one of k and v.
//
//   forward    S = q k^T * scale      (queries x keys, of which a query i sees the keys from i + low to i + high)
//              lse = log(sum(exp(S)))  of a row, -inf where no key is seen
//              y = exp(S - lse) v      0 where no key is seen
//              with a sink, one more score of each row with which no value goes, lse = log(exp(sink) + sum(exp(S)))
//
//   backward   P = exp(S - lse), dP = grad_y v^T, delta = sum(grad_y * y) - grad_lse of a row, dS = P * (dP - delta)
//              grad_v = P^T grad_y, grad_k = dS^T q * scale, grad_q = dS k * scale
//              grad_sink = -sum(exp(sink - lse) * delta) of the rows of a head
//
// Backward is one kernel in two roles (and on Hopper, where a fixed order is not asked for, another, which passes once). A block owns rows of one side, and the rows of the other side pass by. S and dP are
// computed in both roles, seven products where five are needed: so nothing but the gradients is written, without atomics, and
// the bits are the same every time.
//
//            owned        passing       rows of S, P, dP, dS
//   KEYS     k, v         q, grad_y     keys       grad_k, grad_v
//   !KEYS    q, grad_y    k, v          queries    grad_q
//
// Products are of half types, summed in fp32; P and dS are rounded to the half type before theirs. For sm_80 and later.
// Bytes: each of q, k, v, y once where the others stay in L2; flops: 4 queries keys D forward, 14 backward, per head.
// On Hopper attention_wgmma.cu runs in its place.
//
// Reached on an H100, bf16, of 1,024 and 4,096 rows, D = 64 and 128, full and causal: 210 to 336 TFLOP/s forward and 147 to 202
// backward, 0.93 and 0.74 times as much as PyTorch's flash attention, which is by mma.sync too, in the geometric mean. Backward of
// that has five products and atomics where this has seven and none.
#include "attention/backward_mma.cuh"
#include "attention/clear.cuh"
#include "attention/forward_mma.cuh"
#include "attention/map.cuh"
#include "attention/prepare.cuh"

// Grid: a block for each tile of 16 * M * WARPS queries of each head, at most 2^31 - 1. Block: 32 * WARPS. Shared memory: the
// tile and two panels of BN rows of D. A warp owns 16 * M queries, and sums over the keys from the last to the first.
template <typename T, int D, int BN, int M, int WARPS, int BOUNDS>
__global__ void __launch_bounds__(32 * WARPS)
    attention_fwd_mma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y,
                      float* __restrict__ lse, const float* __restrict__ sinks, float scale, attention::Strides qs,
                      attention::Strides ks, attention::Strides vs, attention::Strides ys, attention::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  attention::forward_mma<T, D, BN, M, WARPS, BOUNDS>(q, k, v, y, lse, sinks, scale, qs, ks, vs, ys, sizes);
#endif
}

// Grid: LANES threads for each of sizes.padded rows of each head, in blocks of any whole warps. See attention::prepare.
template <typename T, int LANES>
__global__ void attention_bwd_prepare(const T* __restrict__ y, const T* __restrict__ grad_y,
                                      const float* __restrict__ lse, const float* __restrict__ grad_lse,
                                      const float* __restrict__ sinks, float* __restrict__ of_sinks,
                                      float* __restrict__ delta, float* __restrict__ lse2,
                                      float4* __restrict__ grad_sums, int columns, attention::Strides ys,
                                      attention::Sizes sizes) {
  attention::prepare<T, LANES>(y, grad_y, lse, grad_lse, sinks, of_sinks, delta, lse2, grad_sums, columns, ys, sizes);
}

// Grid: a block for each tile of 16 * WARPS rows of what is owned of each of its heads. Block: 32 * WARPS. Shared memory: two
// tiles and four panels of BN rows of D. A warp owns 16 rows, and sums in the order of the rows that pass, head after head of a
// group. out_second is not written by the role of the queries.
template <typename T, int D, int BN, int WARPS, bool KEYS, int BOUNDS>
__global__ void __launch_bounds__(32 * WARPS)
    attention_bwd_mma(const T* __restrict__ own_first, const T* __restrict__ own_second, const T* __restrict__ first,
                      const T* __restrict__ second, T* __restrict__ out_first, T* __restrict__ out_second,
                      const float* __restrict__ lse2, const float* __restrict__ delta, float scale,
                      const __grid_constant__ attention::RoleStrides strides, attention::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  attention::backward_mma<T, D, BN, WARPS, KEYS, BOUNDS>({own_first, own_second, first, second, out_first, out_second},
                                                         lse2, delta, scale, strides, sizes);
#endif
}

// Grid, block: any. starts: where each of the sequences begins, and where the last ends. `of` is in units of 16 bytes.
template <typename I>
__global__ void attention_clear(const I* __restrict__ starts, uint4* __restrict__ rows, float* __restrict__ lse,
                                const float* __restrict__ sinks, attention::Strides of, attention::Cleared cleared) {
  attention::clear(starts, rows, lse, sinks, of, cleared);
}

// Grid: a warp for each tile of `side` of each of the maps. Block: any whole warps.
__global__ void attention_map_lists(const unsigned char* __restrict__ cells, int* __restrict__ lists,
                                    const __grid_constant__ attention::Cells of,
                                    const __grid_constant__ attention::Side side) {
  attention::list(cells, lists, of, side);
}
