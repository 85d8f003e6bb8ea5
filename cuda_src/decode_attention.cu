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
// Reached on an H100, of the cache's bytes a second, bf16, calls of a CUDA graph (in brackets PyTorch's attention of whole caches
// and one query), where a read alone has 2.97 TB/s from the host and 3.2 so:
//
//   sequences, keys of each     D = 64         D = 128        D = 256
//    1     8,192               1.21 (1.38)    1.48 (1.63)    1.34 (1.30)      heads in groups of 4
//    4    32,768               2.73 (2.94)    2.72 (3.06)    2.66 (2.75)
//   16    32,768               3.04 (3.13)    3.12 (3.21)    3.15 (2.91)
//    1   131,072               2.89 (2.93)    2.94 (3.07)    2.97 (2.72)      each head alone
//    4    32,768               2.90 (2.97)    3.05 (3.08)    3.02 (2.77)
//
// One block that adds up what all splits of its rows have, as the last of them, took 6 us longer than a second launch that begins
// early. Of four queries, and in fp32, this is 3.0 and 13 times as fast as PyTorch's.
#include "decode_attention/combine.cuh"
#include "decode_attention/fma.cuh"
#include "decode_attention/mma.cuh"

// Grid: splits * batches * kv_heads * tiles of 16 rows, at most 2^31 - 1. Block: 32 * WARPS, of which BLOCKS run on a
// multiprocessor at one time. Shared memory: of each warp STAGES panels of k and of v, and 16 rows of q where D > 128; in their
// place afterwards what Finish has. A warp has every so manieth 16 keys. With CLUSTER the splits are the blocks of a cluster,
// which leaves y and lse.
template <typename T, int D, int WARPS, int STAGES, int BLOCKS, bool CLUSTER>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode_attention_fwd_mma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                             const int* __restrict__ lengths, const int* __restrict__ table, T* __restrict__ y,
                             float* __restrict__ lse, float* __restrict__ partial_y, float* __restrict__ partial_lse,
                             float scale, float softcap, decode::Strides qs, decode::Strides ks, decode::Strides vs,
                             decode::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  decode::forward_mma<T, D, WARPS, STAGES, CLUSTER>(q, k, v, lengths, table, {y, lse, partial_y, partial_lse}, scale,
                                                    softcap, qs, ks, vs, sizes);
#endif
}

// Grid: the same of tiles of 4 rows. Block: 32 * WARPS. Shared memory: 2 * WARPS * 4 floats and 4 rows of D.
template <typename T, int D, int WARPS, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode_attention_fwd_fma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                             const int* __restrict__ lengths, const int* __restrict__ table, T* __restrict__ y,
                             float* __restrict__ lse, float* __restrict__ partial_y, float* __restrict__ partial_lse,
                             float scale, float softcap, decode::Strides qs, decode::Strides ks, decode::Strides vs,
                             decode::Sizes sizes) {
  decode::forward_fma<T, D, WARPS, STAGES>(q, k, v, lengths, table, {y, lse, partial_y, partial_lse}, scale, softcap, qs, ks,
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
