// Attention of the last queries of sequences to all keys of a cache, as decoding has it.
//
//   S = q k^T * scale, or softcap * tanh(q k^T * scale / softcap)   of query i of `queries` and the keys from
//                                                                   length - queries + i - window to length - queries + i
//   lse = log(sum(exp(S)))  of a row, -inf where no key is seen
//   y = exp(S - lse) v      0 where no key is seen
//
// The keys of a sequence are split over blocks, each of which reads its part of the cache once for all heads of a group and all
// queries. What the splits have is added in their order by decode_attention_combine: no atomics, the same bits every time.
// Bytes: k and v once; a split leaves (D + 1) * 4 bytes of each row, which is little where it has many keys.
//
// Reached on an H100, of the cache's bytes a second, bf16, D = 128, 32 heads that share 8: 2.48 TB/s for 16 sequences of 8,192 keys,
// 2.75 for 64, 2.50 for one of 131,072, and 0.94 for one of 8,192; D = 256 2.36, fp32 2.34; a copy has 3.01. PyTorch's attention of
// whole caches and one query, where it has one, reads 1.05 to 1.4 times as fast (1.28 TB/s for one sequence of 8,192); of four
// queries, and in fp32, this is 3.0 and 13 times as fast.
#include "decode_attention/combine.cuh"
#include "decode_attention/fma.cuh"
#include "decode_attention/mma.cuh"

// Grid: splits * batches * kv_heads * tiles of 16 rows, at most 2^31 - 1. Block: 32 * WARPS. Shared memory: q, 16 rows of D + 32
// elements; in its place afterwards 2 * WARPS * 16 floats and 16 rows of D. A warp has every WARPS-th 16 keys, from the first on.
template <typename T, int D, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, D <= 128 ? 3 : 2)
    decode_attention_fwd_mma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                             const int* __restrict__ lengths, const int* __restrict__ table, T* __restrict__ y,
                             float* __restrict__ lse, float* __restrict__ partial_y, float* __restrict__ partial_lse,
                             float scale, float softcap, decode::Strides qs, decode::Strides ks, decode::Strides vs,
                             decode::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  decode::forward_mma<T, D, WARPS>(q, k, v, lengths, table, {y, lse, partial_y, partial_lse}, scale, softcap, qs, ks,
                                   vs, sizes);
#endif
}

// Grid: the same of tiles of 4 rows. Block: 32 * WARPS. Shared memory: 2 * WARPS * 4 floats and 4 rows of D.
template <typename T, int D, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
    decode_attention_fwd_fma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                             const int* __restrict__ lengths, const int* __restrict__ table, T* __restrict__ y,
                             float* __restrict__ lse, float* __restrict__ partial_y, float* __restrict__ partial_lse,
                             float scale, float softcap, decode::Strides qs, decode::Strides ks, decode::Strides vs,
                             decode::Sizes sizes) {
  decode::forward_fma<T, D, WARPS>(q, k, v, lengths, table, {y, lse, partial_y, partial_lse}, scale, softcap, qs, ks,
                                   vs, sizes);
}

// Grid: a block for each of `rows` rows, at most 2^31 - 1. Block: whole warps, at most 256 threads, a multiple of `lanes`, which
// have four columns each of all of them. splits: at most 128.
template <typename T>
__global__ void decode_attention_combine(const float* __restrict__ partial_y, const float* __restrict__ partial_lse,
                                         T* __restrict__ y, float* __restrict__ lse, int rows, int width, int splits,
                                         int lanes) {
  decode::combine(partial_y, partial_lse, y, lse, rows, width, splits, lanes);
}
