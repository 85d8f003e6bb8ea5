// Attention of half types by Hopper's tensor cores (sm_90a): the equations are those of attention.cu.
//
// A block has a producer, one thread that has TMA fill rings of stages in shared memory, and consumer warpgroups, which multiply
// with wgmma. Results are stored through shared memory and TMA.
//
// Bytes, flops, and what is not measured yet: as attention.cu.
#include "attention/backward_wgmma.cuh"
#include "attention/forward_wgmma.cuh"

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
