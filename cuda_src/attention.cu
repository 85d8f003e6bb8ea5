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
// Backward has two ways. Where a fixed order is asked for it is one kernel in two roles: a block owns rows of one side, and the rows of
// the other side pass by. S and dP are computed in both roles, seven products where five are needed: so nothing but the gradients
// is written, without atomics, and the bits are the same every time.
//
//            owned        passing       rows of S, P, dP, dS
//   KEYS     k, v         q, grad_y     keys       grad_k, grad_v
//   !KEYS    q, grad_y    k, v          queries    grad_q
//
// Else it passes once, by the keys' role alone: grad_q = dS k is added up in memory in fp32, in no order, and rounded at the end.
//
// Products are of half types, summed in fp32; P and dS are rounded to the half type before theirs. For sm_80 and later.
// Bytes: each of q, k, v, y once where the others stay in L2, in one pass 8 for each element of grad_q besides; flops: 4 queries keys D
// forward, 10 or 14 backward, per head. On Hopper attention_wgmma.cu runs in its place.
//
// Reached on an H100, bf16, of 16,384 tokens in sequences of 512 to 16,384, D = 64, 96, 128 and 256, full, causal and with heads that
// share keys: 1.04 times as much as PyTorch's flash attention forward, which is by mma.sync too, and 1.09 times backward in one pass,
// in the geometric mean (D = 64: 1.10 and 1.08, 96: 1.00 and 1.12, 128: 1.06 and 1.08, 256: 1.01 and 1.08); in two passes 0.67.
// On an H200, with the shared memory of an A100, one pass has 1.13, 1.24, 1.11 and 1.13; with 99 KiB, D = 64 has 0.96, and two
// passes 0.87.
#include "attention/backward_mma.cuh"
#include "attention/clear.cuh"
#include "attention/forward_mma.cuh"
#include "attention/map.cuh"
#include "attention/once_mma.cuh"
#include "attention/prepare.cuh"

// Grid: a block for each tile of 16 * M * WARPS queries of each head, at most 2^31 - 1. Block: 32 * WARPS. Shared memory: the
// tile and, for each of STAGES, two panels of BN rows of D. A warp owns 16 * M queries, and sums over the keys from the last to the first.
template <typename T, int D, int BN, int M, int WARPS, int STAGES, int BOUNDS>
__global__ void __launch_bounds__(32 * WARPS)
    attention_fwd_mma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y,
                      float* __restrict__ lse, const float* __restrict__ sinks, float scale, attention::Strides qs,
                      attention::Strides ks, attention::Strides vs, attention::Strides ys, attention::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  attention::forward_mma<T, D, BN, M, WARPS, STAGES, BOUNDS>(q, k, v, y, lse, sinks, scale, qs, ks, vs, ys, sizes);
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

// Grid: a block for each tile of 64 * M keys of each of their heads. Block: 256. Shared memory: two tiles, four panels of BN rows of
// D, lse2 and delta of two, dS twice, and half of P. A warp owns 16 * M keys, and sums grad_k or grad_v in the order of the queries
// that pass, head after head of a group. sums, 0 before, has grad_q added to it in no order.
template <typename T, int D, int BN, int M>
__global__ void __launch_bounds__(256, 1)
    attention_bwd_once_mma(const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ q,
                           const T* __restrict__ grad_y, T* __restrict__ grad_k, T* __restrict__ grad_v,
                           const float* __restrict__ lse2, const float* __restrict__ delta, float* __restrict__ sums,
                           float scale, const __grid_constant__ attention::RoleStrides strides,
                           const __grid_constant__ attention::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  attention::once_mma<T, D, BN, M>({k, v, q, grad_y, grad_k, grad_v}, lse2, delta, sums, scale, strides, sizes);
#endif
}

// Grid: a block for each 64 x 64 of the padded rows of each head. Block: 128. See attention::collect.
template <typename T>
__global__ void attention_bwd_collect(const float* __restrict__ sums, T* __restrict__ grad_q, float scale, int across,
                                      attention::Strides to, attention::Sizes sizes) {
  attention::collect<T>(sums, grad_q, scale, across, to, sizes);
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
