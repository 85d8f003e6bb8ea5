// Attention of the last queries of sequences to all keys of a cache, as decoding has it.
//
//   S = q k^T * scale, or softcap * tanh(q k^T * scale / softcap)   of query i of `queries` and the keys from
//                                                                   length - queries + i - window to length - queries + i
//   lse = log(sum(exp(S)))  of a row, -inf where no key is seen
//   y = exp(S - lse) v      0 where no key is seen
//
// With a mask a query sees the keys up to `length` that its row of bytes has, wherever it stands itself. A warp looks at the bytes of 32
// of its steps at a time, and asks for the keys and values that some row of the block sees.
//
// The keys of a sequence are split over blocks, each of which reads its part of the cache once for all heads of a group and all
// queries. What the splits have is added in their order by decode_attention_combine: no atomics, the same bits every time.
// Bytes: k and v once; a split leaves (D + 1) * 4 bytes of each row, which is little where it has many keys.
//
// Keys and values come through a pipeline of cp.async in shared memory, and the steps of all blocks lie beside each other: that
// keeps 144 to 192 KiB of a multiprocessor on their way, and its warps need not wait for one another.
//
// Reached on an H100 80GB, of the cache's bytes, TB/s, bf16: with nothing in the caches, and as calls of a CUDA graph; in
// brackets PyTorch's attention of whole caches and one query. A kernel that only reads as many bytes has 2.95 and 3.14 of
// 512 MiB, 2.74 and 3.07 of 256, 2.57 and 3.03 of 128, 1.98 and 2.65 of 32, 1.52 and 2.18 of 16: of little, the launch, the first
// answer of memory and the second kernel, 5 us here, take as long as the bytes.
//
//   sequences, keys of each     D = 64                         D = 128                        D = 256
//    1     8,192      0.84 (0.90), 1.13 (1.38)       1.20 (1.33), 1.69 (1.86)       1.14 (1.01), 1.47 (1.27)    heads in groups
//    1    32,768      1.73 (1.70), 2.28 (2.28)       2.12 (2.11), 2.57 (2.26)                                   of 4
//    4    32,768      2.47 (2.49), 2.79 (2.87)       2.79 (2.78), 2.96 (2.98)       2.75 (2.54), 2.93 (2.70)
//    1   131,072      2.47 (2.51), 2.77 (2.43)       2.78 (2.80), 2.97 (2.53)
//   64     8,192                                     3.03 (3.04), 3.07 (3.08)
//    4    16,384                                     2.91 (3.01), 2.98 (3.11)                                   each head alone
//
// On an H200, whose copy has 4.24, cold: 4 sequences of 32,768 keys 3.43 (3.46), 3.87 (3.95) and 3.87 (2.98), each head alone
// 4.15 (4.35); a kernel that only reads has 3.99 of 512 MiB, 3.74 of 256 and 3.34 of 128. So one query of whole caches is
// PyTorch's, up to D = 128.
// 64 heads that share one of the keys read the cache once for each tile of rows, from L2: 77 us of 4 sequences of 65,536 keys by
// 32 rows, 86 by 16 (74.6). Shares of neighbouring keys for each split, blocks in another order, and two to six steps ahead by one
// to four blocks of a multiprocessor gained 1% at most.
//
// Slower, and gone: the splits of a row as blocks of a cluster, which need no second kernel: 2.40 of 4 sequences of 32,768 keys,
// and of one of 8,192 with 28.0 us 1.5 us less; 64 rows of a group in one block: 92 us of 4 sequences of 65,536 keys that 64 heads
// share, by 16 rows 87; one block that adds up what all splits have, as the last of them: 6 us more than the second kernel. Hints
// to L2, which evicts first or reads 256 bytes, made no difference or took 4% more.
//
// Short caches on that H200, as calls of a CUDA graph: us with a mask, in brackets without. 640 keys of 1, 8, 32 and 64 sequences, 8
// heads of 64 in groups of 4: 8.2 (7.1), 11.4 (10.2), 21.9 (17.9) and 31.8 (27.5), whose bytes take 0.3, 2.5, 10 and 20. Three steps
// ahead by three blocks of a multiprocessor took 41.2 of the last, and the bytes of a mask one after another 45.2.
//
// fp32, of 512 MiB on that H200: 3.89, 3.91 and 3.83 TB/s where D = 64, 128 and 256 (torch.sum of as many bytes: 3.94), 4.23 of 1 GiB.
// Where all lanes shared a row, and each took every exponential, 16 products had 80 shuffles: 2.05, 3.11 and 3.48. Panels of 2 KiB,
// three ahead, and one to six blocks of a multiprocessor were as fast or slower.
#include "decode_attention/combine.cuh"
#include "decode_attention/fma.cuh"
#include "decode_attention/mma.cuh"

// Grid: splits * batches * kv_heads * tiles of ROWS rows, at most 2^31 - 1. Block: 32 * WARPS, of which BLOCKS run on a
// multiprocessor at one time. Shared memory: of each warp STAGES panels of k and of v, and the rows of q where ROWS * D > 2048; in
// their place afterwards what Finish has. A warp has every so manieth 16 keys.
template <typename T, int D, int ROWS, int WARPS, int STAGES, int BLOCKS, bool MASKED>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode_attention_fwd_mma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                             const int* __restrict__ lengths, const int* __restrict__ table,
                             const bool* __restrict__ mask, T* __restrict__ y, float* __restrict__ lse,
                             float* __restrict__ partial_y, float* __restrict__ partial_lse, float scale, float softcap,
                             decode::Strides qs, decode::Strides ks, decode::Strides vs, decode::Strides ms,
                             decode::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  decode::forward_mma<T, D, ROWS, WARPS, STAGES, MASKED>(
      q, k, v, lengths, table, mask, {y, lse, partial_y, partial_lse}, scale, softcap, qs, ks, vs, ms, sizes);
#endif
}

// Grid: the same of tiles of 4 rows. Block: the same. Shared memory: of each warp STAGES panels of k and of v, of 4 KiB; in their
// place afterwards what Finish has.
template <typename T, int D, int WARPS, int STAGES, int BLOCKS, bool MASKED>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode_attention_fwd_fma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                             const int* __restrict__ lengths, const int* __restrict__ table,
                             const bool* __restrict__ mask, T* __restrict__ y, float* __restrict__ lse,
                             float* __restrict__ partial_y, float* __restrict__ partial_lse, float scale, float softcap,
                             decode::Strides qs, decode::Strides ks, decode::Strides vs, decode::Strides ms,
                             decode::Sizes sizes) {
  decode::forward_fma<T, D, WARPS, STAGES, MASKED>(q, k, v, lengths, table, mask, {y, lse, partial_y, partial_lse},
                                                   scale, softcap, qs, ks, vs, ms, sizes);
}

// Grid: a block for each of `rows` rows, at most 2^31 - 1. Block: whole warps, at most 256 threads, a multiple of `lanes`, which
// have four columns each of all of them. splits: at most 128.
template <typename T>
__global__ void decode_attention_combine(const float* __restrict__ partial_y, const float* __restrict__ partial_lse,
                                         T* __restrict__ y, float* __restrict__ lse, int rows, int width, int splits,
                                         int lanes) {
  decode::combine(partial_y, partial_lse, y, lse, rows, width, splits, lanes);
}
