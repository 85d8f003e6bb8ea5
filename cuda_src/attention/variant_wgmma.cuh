// The kernels of attention_wgmma.cu for a variant: grids, blocks and shared memory are theirs. The text that includes this
// defines attention::Variant, made of captured tensors and `given`.
#include "attention/backward_wgmma.cuh"
#include "attention/forward_wgmma.cuh"
#include "attention/once_wgmma.cuh"
#include "attention/one_result_wgmma.cuh"

template <typename T, int D, int DV, int BN, int CONSUMERS, int STAGES, int BOUNDS>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_fwd_wgmma_variant(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                                const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap y,
                                T* __restrict__ y_rows, float* __restrict__ lse, const float* __restrict__ sinks,
                                int* __restrict__ counter, float scale, const attention::Strides ys,
                                const attention::Sizes sizes, const void* __restrict__ c0, const void* __restrict__ c1,
                                const void* __restrict__ c2, const void* __restrict__ c3, const int* __restrict__ lists,
                                const __grid_constant__ attention::Given given) {
  extern __shared__ char memory[];
  const attention::ForwardLayout<D, DV, BN, CONSUMERS, STAGES> at(memory);
  at.template clear<attention::Variant>(sizes);
  at.begin();
  const attention::Variant variant(c0, c1, c2, c3, lists, given);
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<CONSUMERS == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      attention::produce<D, DV, BN, CONSUMERS, STAGES, BOUNDS>(at, q, k, v, counter, sizes, variant);
    }
  } else {
    wgmma::take_registers<CONSUMERS == 2 ? 232 : 160>();
    attention::consume<T, D, DV, BN, CONSUMERS, STAGES, BOUNDS>(at, y, y_rows, ys, lse, sinks, scale, sizes, variant);
  }
}

template <typename T, int D, int DV, int BN, int STAGES, bool KEYS, int PART, int BOUNDS>
__global__ void __launch_bounds__(384, 1)
    attention_bwd_wgmma_variant(const __grid_constant__ TensorMap own_first,
                                const __grid_constant__ TensorMap own_second, const __grid_constant__ TensorMap first,
                                const __grid_constant__ TensorMap second, const __grid_constant__ TensorMap out_first,
                                const __grid_constant__ TensorMap out_second, const float* __restrict__ lse2,
                                const float* __restrict__ delta, float scale, const attention::Sizes whole,
                                const void* __restrict__ c0, const void* __restrict__ c1, const void* __restrict__ c2,
                                const void* __restrict__ c3, const int* __restrict__ lists,
                                const __grid_constant__ attention::Given given) {
  extern __shared__ char memory[];
  using At = attention::BackwardLayout<D, BN, STAGES, 0, PART == attention::kOfValues ? 1 : 2, DV>;
  const At at(memory);
  at.template clear<attention::Variant>(whole);
  const attention::RoleMaps maps{own_first, own_second, first, second, out_first, out_second, lse2, delta};
  at.begin();
  const attention::Variant variant(c0, c1, c2, c3, lists, given);
  attention::Work<BN, KEYS, BOUNDS> work(whole, whole.group);
  const auto sequence = attention::sequence_of(variant, whole, work.batch);
  const attention::Sizes& sizes = sequence.sizes;
  if constexpr (attention::Variant::kPacked) {
    work.look(sequence);
    if (work.own_row >= work.own_rows) return;
  }
  if constexpr (attention::Variant::kMaps) work.count(variant.map);
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<24>();
    if (threadIdx.x == 0) attention::produce<D, BN, STAGES, KEYS, BOUNDS, PART>(at, work, maps, sizes, variant);
  } else {
    wgmma::take_registers<240>();
    using attention::Variant;
    attention::Gradient<T, D, BN, STAGES, KEYS, BOUNDS, Variant, At, PART> gradient(at, work, maps, scale, sizes,
                                                                                    variant);
    gradient.run();
    gradient.store(maps, scale);
  }
}

template <typename T, int D, int DV, int TILE, int BN, int STAGES, bool BULK, int BOUNDS>
__global__ void __launch_bounds__(384, 1)
    attention_bwd_once_wgmma_variant(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                                     const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap grad_y,
                                     const __grid_constant__ TensorMap grad_k, const __grid_constant__ TensorMap grad_v,
                                     const float* __restrict__ lse2, const float* __restrict__ delta,
                                     float* __restrict__ sums, float* __restrict__ shared, int share, float scale,
                                     const attention::Sizes sizes, const void* __restrict__ c0,
                                     const void* __restrict__ c1, const void* __restrict__ c2,
                                     const void* __restrict__ c3, const int* __restrict__ lists,
                                     const __grid_constant__ attention::Given given) {
  extern __shared__ char memory[];
  const attention::OnceLayout<D, DV, TILE, BN, STAGES, BULK> at(memory);
  const attention::RoleMaps maps{k, v, q, grad_y, grad_k, grad_v, lse2, delta};
  at.begin();
  const attention::Variant variant(c0, c1, c2, c3, lists, given);
  attention::Work<BN, true, BOUNDS, TILE> work(sizes, share);
  work.spread();
  if constexpr (attention::Variant::kMaps) work.count(variant.map);
  if (threadIdx.x < 128) {
    wgmma::give_back_registers<24>();
    if (threadIdx.x == 0) attention::produce<D, BN, STAGES, true, BOUNDS>(at, work, maps, sizes, variant);
  } else if constexpr (TILE == 64) {
    wgmma::take_registers<240>();
    if (threadIdx.x < 256) {
      attention::OneResult<T, D, DV, STAGES, BOUNDS, false, attention::Variant> gradient(at, work, maps, sums, scale,
                                                                                         sizes, variant);
      gradient.run();
      attention::leave<D, DV>(gradient, maps, shared, scale, sizes);
    } else {
      attention::OneResult<T, D, DV, STAGES, BOUNDS, true, attention::Variant> gradient(at, work, maps, sums, scale,
                                                                                        sizes, variant);
      gradient.run();
      attention::leave<D, DV>(gradient, maps, shared, scale, sizes);
    }
  } else {
    wgmma::take_registers<240>();
    attention::OnePass<T, D, DV, BN, STAGES, BULK, BOUNDS, attention::Variant> gradient(at, work, maps, sums, scale,
                                                                                        sizes, variant);
    gradient.run();
    attention::leave<D, DV>(gradient, maps, shared, scale, sizes);
  }
}
