// Attention of half types by Hopper's tensor cores (sm_90a): the equations are those of attention.cu.
//
// A block has a producer, one thread that has TMA fill rings of stages in shared memory, and consumer warpgroups, which multiply
// with wgmma. Results are stored through shared memory and TMA.
//
// Bytes, flops: as attention.cu.
//
// Reached on an H100, bf16, 16,384 tokens of 2,048 elements, TFLOP/s (in brackets what cuDNN has, which PyTorch takes); backward in
// one pass of five products, whose grad_q is added up in memory, in no order, as cuDNN has it:
//
//   rows     D    causal   forward     backward          rows     D    causal   forward     backward
//    512    128     no    505 (540)   314 (296)         512     64     no    372 (405)   294 (252)
//    512    128    yes    314 (342)   186 (171)         512     64    yes    248 (273)   172 (149)
//   1024    128     no    594 (620)   426 (420)        1024     64     no    430 (446)   387 (351)
//   1024    128    yes    458 (445)   310 (287)        1024     64    yes    346 (350)   277 (234)
//   4096    128     no    655 (663)   569 (555)        4096     64     no    513 (483)   488 (459)
//   4096    128    yes    622 (575)   520 (470)        4096     64    yes    498 (436)   469 (382)
//  16384    128     no    674 (683)   591 (585)       16384     64     no    552 (504)   517 (465)
//  16384    128    yes    671 (636)   621 (582)       16384     64    yes    559 (455)   553 (447)
//
// Packed sequences of random lengths, causal, in the mean of 4,096 rows (in brackets PyTorch's flash attention): D = 128 559 (295)
// forward and 406 (262) backward, D = 64 450 (267) and 313 (242). A window of 1,024 keys of 4,096: D = 128 519 (233) and 395 (231).
// Forward of 4,096 rows, full and causal, D = 256: 725 (cuDNN 733) and 634 (607), D = 96 559 (524) and 479 (434).
//
// How many times as fast as the faster of cuDNN and flash attention it is (of windows and packed sequences: as flash attention; at
// 192 as a mask in memory, and as one sequence after the other), in the geometric mean of 512, 1,024, 4,096 and 16,384 rows, forward
// and backward, where the faster one is taken (benchmarks/results/h100_attention_rows.csv):
//
//    D, of v    full          causal        4 heads share  window        packed
//    64         1.06  1.18    1.08  1.22    1.09  1.25     2.59  1.58    2.02  1.25
//    96         1.06  1.06    1.08  1.05    1.14  1.02     1.74  1.36    1.50  1.25
//    128        1.00  1.00    1.05  1.04    1.09  1.06     2.12  1.52    1.94  1.47
//    192, 128   1.12  1.61    1.08  1.15    1.11  1.17     5.47  7.03    1.85  4.16
//    256        1.02  1.13    1.04  1.03    1.10  1.02     1.66  1.35    1.66  1.05
//
// Of 4,096 rows, D = 128, causal, sinks take 0.6 us more of forward's 438 and 13 us more of backward's 1,370; slopes 56 and 47.
//
// Slower than cuDNN are forward of D = 256 up to 1,024 rows, causal (0.86 and 0.92) or full (0.96 at 512), and by up to 4% that of
// D = 128 where all keys are seen, and its backward. With results stored through shared memory, in the place of the queries, forward
// of D = 256 and 1,024 rows had 0.88 causal and 0.97 full, and of 192 0.97 where it has 1.07.
//
// PyTorch's flash attention has 155 to 338 forward. Backward in two roles, whose seven products give the same bits every time, had
// 0.75 to 0.91 of one pass in one run of an earlier form: 440 and 414 where one pass had 543 and 501 (4,096 rows, D = 128, full and
// causal), 206 and 381 where it had 253 and 511 (1,024 and 16,384 rows, D = 64, causal).
#include "attention/backward_wgmma.cuh"
#include "attention/forward_wgmma.cuh"
#include "attention/once_wgmma.cuh"
#include "attention/one_result_wgmma.cuh"

// Grid: as many blocks as run at one time, or one for each tile of 64 * CONSUMERS queries of each head, whichever are fewer.
// Block: 128 * (CONSUMERS + 1). Shared memory: two tiles, or one where D > 128, STAGES panels of BN keys and of values, 2 KiB. A
// warpgroup owns 64 queries of a tile, and sums over the keys from the last to the first. counter: 0, from which blocks draw
// tiles; null where each takes every gridDim.x-th. Results go by `y` where D <= 128, else to y_rows.
template <typename T, int D, int DV, int BN, int CONSUMERS, int STAGES, int BOUNDS>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_fwd_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                        const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap y,
                        T* __restrict__ y_rows, float* __restrict__ lse, const float* __restrict__ sinks,
                        int* __restrict__ counter, float scale, const attention::Strides ys,
                        const attention::Sizes sizes) {
  extern __shared__ char memory[];
  const attention::ForwardLayout<D, DV, BN, CONSUMERS, STAGES> at(memory);
  at.begin();
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<CONSUMERS == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      attention::produce<D, DV, BN, CONSUMERS, STAGES, BOUNDS>(at, q, k, v, counter, sizes);
    }
  } else {
    wgmma::take_registers<CONSUMERS == 2 ? 232 : 160>();
    attention::consume<T, D, DV, BN, CONSUMERS, STAGES, BOUNDS>(at, y, y_rows, ys, lse, sinks, scale, sizes);
  }
}

// Grid: a block for each tile of 128 rows of what is owned of each of its heads. Block: 384. Shared memory: two tiles, twice
// STAGES panels of BN rows, 6 KiB. A warpgroup owns 64 rows, and sums in the order of the rows that pass, head after head of a
// group. The role of the queries takes no out_second: any map.
template <typename T, int D, int DV, int BN, int STAGES, bool KEYS, int PART, int BOUNDS>
__global__ void __launch_bounds__(384, 1)
    attention_bwd_wgmma(const __grid_constant__ TensorMap own_first, const __grid_constant__ TensorMap own_second,
                        const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second,
                        const __grid_constant__ TensorMap out_first, const __grid_constant__ TensorMap out_second,
                        const float* __restrict__ lse2, const float* __restrict__ delta, float scale,
                        const attention::Sizes sizes) {
  extern __shared__ char memory[];
  using At = attention::BackwardLayout<D, BN, STAGES, 0, PART == attention::kOfValues ? 1 : 2, DV>;
  const At at(memory);
  const attention::RoleMaps given{own_first, own_second, first, second, out_first, out_second, lse2, delta};
  at.begin();
  const attention::Work<BN, KEYS, BOUNDS> work(sizes, sizes.group);
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<24>();
    if (threadIdx.x == 0) attention::produce<D, BN, STAGES, KEYS, BOUNDS, PART>(at, work, given, sizes);
  } else {
    wgmma::take_registers<240>();
    using attention::Plain;
    attention::Gradient<T, D, BN, STAGES, KEYS, BOUNDS, Plain, At, PART> gradient(at, work, given, scale, sizes);
    gradient.run();
    gradient.store(given, scale);
  }
}

// Grid: a block for each tile of TILE keys, and each `share` heads of the queries. Block: 384. Shared memory: two tiles, twice
// STAGES panels of BN queries, dS twice, or dS and P, 6 KiB, and with BULK 32 KiB. Of 128 keys a warpgroup owns 64, and sums grad_k
// and grad_v in the order of the queries that pass, head after head; of 64 keys, where rows are so wide that a thread has no registers
// for both, each warpgroup has one of the two. sums, 0 before, has grad_q added to it in no order, and so has `shared` what blocks
// of one group have of grad_k and grad_v; it is null where a block has the whole group.
template <typename T, int D, int DV, int TILE, int BN, int STAGES, bool BULK, int BOUNDS>
__global__ void __launch_bounds__(384, 1)
    attention_bwd_once_wgmma(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                             const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap grad_y,
                             const __grid_constant__ TensorMap grad_k, const __grid_constant__ TensorMap grad_v,
                             const float* __restrict__ lse2, const float* __restrict__ delta, float* __restrict__ sums,
                             float* __restrict__ shared, int share, float scale, const attention::Sizes sizes) {
  extern __shared__ char memory[];
  const attention::OnceLayout<D, DV, TILE, BN, STAGES, BULK> at(memory);
  const attention::RoleMaps given{k, v, q, grad_y, grad_k, grad_v, lse2, delta};
  at.begin();
  attention::Work<BN, true, BOUNDS, TILE> work(sizes, share);
  work.spread();
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<24>();
    if (threadIdx.x == 0) attention::produce<D, BN, STAGES, true, BOUNDS>(at, work, given, sizes);
  } else if constexpr (TILE == 64) {
    wgmma::take_registers<240>();
    if (threadIdx.x < 256) {
      attention::OneResult<T, D, DV, STAGES, BOUNDS, false> gradient(at, work, given, sums, scale, sizes);
      gradient.run();
      attention::leave<D, DV>(gradient, given, shared, scale, sizes);
    } else {
      attention::OneResult<T, D, DV, STAGES, BOUNDS, true> gradient(at, work, given, sums, scale, sizes);
      gradient.run();
      attention::leave<D, DV>(gradient, given, shared, scale, sizes);
    }
  } else {
    wgmma::take_registers<240>();
    attention::OnePass<T, D, DV, BN, STAGES, BULK, BOUNDS> gradient(at, work, given, sums, scale, sizes);
    gradient.run();
    attention::leave<D, DV>(gradient, given, shared, scale, sizes);
  }
}
