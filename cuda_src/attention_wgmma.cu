// Attention of half types by Hopper's tensor cores (sm_90a): the equations are those of attention.cu.
//
// A block has a producer, one thread that has TMA fill rings of stages in shared memory, and consumer warpgroups, which multiply
// with wgmma. Results are stored through shared memory and TMA.
//
// Bytes, flops: as attention.cu.
//
// Reached on an H100, bf16, 16,384 tokens of 2,048 elements, TFLOP/s (in brackets what cuDNN has, which PyTorch takes):
//
//   rows     D    causal   forward     backward          rows     D    causal   forward     backward
//    512    128     no    479 (502)   308 (297)           512     64     no    354 (374)   257 (246)
//    512    128    yes    294 (315)   188 (170)           512     64    yes    202 (247)   148 (149)
//   1024    128     no    575 (589)   387 (417)          1024     64     no    416 (423)   332 (339)
//   1024    128    yes    433 (431)   292 (285)          1024     64    yes    279 (325)   223 (231)
//   4096    128     no    656 (661)   456 (552)          4096     64     no    525 (476)   411 (454)
//   4096    128    yes    617 (580)   427 (469)          4096     64    yes    462 (432)   348 (378)
//  16384    128     no    651 (650)   445 (558)         16384     64     no    545 (465)   411 (455)
//  16384    128    yes    666 (624)   453 (563)         16384     64    yes    533 (461)   392 (441)
//
// PyTorch's flash attention has 150 to 345 forward and 129 to 295 backward. 4,096 rows, causal, D = 128 with a variant: slopes 559
// and 407, where FlexAttention has 314 and 317. Backward above is the one in two roles, whose seven products give the same bits every
// time. In one pass of five products grad_q is added up in memory, in no order, as cuDNN has it; in the same run, TFLOP/s:
//
//   rows     D    causal   two roles   one pass   cuDNN      rows     D    causal   two roles   one pass   cuDNN
//   1024    128     no        349         402       360      1024     64     no        310         363       314
//   1024    128    yes        261         287       248      1024     64    yes        206         253       203
//   4096    128     no        440         543       516      4096     64     no        389         460       432
//   4096    128    yes        414         501       437      4096     64    yes        334         415       338
//  16384    128     no        457         561       550     16384     64     no        402         475       437
//  16384    128    yes        464         558       541     16384     64    yes        381         511       435
#include "attention/backward_wgmma.cuh"
#include "attention/forward_wgmma.cuh"
#include "attention/once_wgmma.cuh"

// Grid: as many blocks as run at one time, or one for each tile of 64 * CONSUMERS queries of each head, whichever are fewer.
// Block: 128 * (CONSUMERS + 1). Shared memory: two tiles, STAGES panels of BN keys and of values, 2 KiB. A warpgroup owns 64
// queries of a tile, and sums over the keys from the last to the first. counter: 0, from which blocks draw tiles; null where
// each takes every gridDim.x-th.
template <typename T, int D, int BN, int CONSUMERS, int STAGES, int BOUNDS>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_fwd_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                        const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap y,
                        float* __restrict__ lse, int* __restrict__ counter, float scale, const attention::Sizes sizes) {
  extern __shared__ char memory[];
  const attention::ForwardLayout<D, BN, CONSUMERS, STAGES> at(memory);
  at.begin();
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<CONSUMERS == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      attention::produce<D, BN, CONSUMERS, STAGES, BOUNDS>(at, q, k, v, counter, sizes);
    }
  } else {
    wgmma::take_registers<CONSUMERS == 2 ? 232 : 160>();
    attention::consume<T, D, BN, CONSUMERS, STAGES, BOUNDS>(at, y, lse, scale, sizes);
  }
}

// Grid: a block for each tile of 128 rows of what is owned of each of its heads. Block: 384. Shared memory: two tiles, twice
// STAGES panels of BN rows, 6 KiB. A warpgroup owns 64 rows, and sums in the order of the rows that pass, head after head of a
// group. The role of the queries takes no out_second: any map.
template <typename T, int D, int BN, int STAGES, bool KEYS, int BOUNDS>
__global__ void __launch_bounds__(384, 1)
    attention_bwd_wgmma(const __grid_constant__ TensorMap own_first, const __grid_constant__ TensorMap own_second,
                        const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second,
                        const __grid_constant__ TensorMap out_first, const __grid_constant__ TensorMap out_second,
                        const float* __restrict__ lse2, const float* __restrict__ delta, float scale,
                        const attention::Sizes sizes) {
  extern __shared__ char memory[];
  const attention::BackwardLayout<D, BN, STAGES> at(memory);
  const attention::RoleMaps given{own_first, own_second, first, second, out_first, out_second, lse2, delta};
  at.begin();
  const attention::Work<BN, KEYS, BOUNDS> work(sizes);
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<24>();
    if (threadIdx.x == 0) attention::produce<D, BN, STAGES, KEYS, BOUNDS>(at, work, given, sizes);
  } else {
    wgmma::take_registers<240>();
    attention::Gradient<T, D, BN, STAGES, KEYS, BOUNDS> gradient(at, work, given, scale, sizes);
    gradient.run();
    gradient.store(given, scale);
  }
}

// Grid: a block for each tile of 128 keys of each of their heads. Block: 384. Shared memory: two tiles, twice STAGES panels of BN
// queries, dS twice, 6 KiB, and with BULK 32 KiB. A warpgroup owns 64 keys, and sums grad_k and grad_v in the order of the queries
// that pass, head after head of a group; sums, 0 before, has grad_q added to it in no order.
template <typename T, int D, int BN, int STAGES, bool BULK, int BOUNDS>
__global__ void __launch_bounds__(384, 1)
    attention_bwd_once_wgmma(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                             const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap grad_y,
                             const __grid_constant__ TensorMap grad_k, const __grid_constant__ TensorMap grad_v,
                             const float* __restrict__ lse2, const float* __restrict__ delta, float* __restrict__ sums,
                             float scale, const attention::Sizes sizes) {
  extern __shared__ char memory[];
  const attention::OnceLayout<D, BN, STAGES, BULK> at(memory);
  const attention::RoleMaps given{k, v, q, grad_y, grad_k, grad_v, lse2, delta};
  at.begin();
  attention::Work<BN, true, BOUNDS> work(sizes);
  work.spread();
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<24>();
    if (threadIdx.x == 0) attention::produce<D, BN, STAGES, true, BOUNDS>(at, work, given, sizes);
  } else {
    wgmma::take_registers<240>();
    attention::OnePass<T, D, BN, STAGES, BULK, BOUNDS> gradient(at, work, given, sums, scale, sizes);
    gradient.run();
    gradient.store(given, scale);
  }
}

// Grid: a block for each 64 x 64 of the padded rows of each head. Block: 128. See attention::collect.
template <typename T, int D>
__global__ void attention_bwd_collect(const float4* __restrict__ sums, T* __restrict__ grad_q, float scale,
                                      attention::Strides to, attention::Sizes sizes) {
  attention::collect<T, D>(sums, grad_q, scale, to, sizes);
}
