// The maximum of a row that is held in registers, and the sum of exp(x - max), with one exchange between warps.
#pragma once

#include "common/cluster.cuh"
#include "common/online.cuh"
#include "common/rows.cuh"

// Max and sum, as exact as a result of type O can show. All threads of the row take part; pads are -inf. Each warp sums
// for its own maximum, and the sums are scaled when they meet. packs are left folded: who needs an exponential again
// computes it again, since to keep it costs registers, and with them the blocks that overlap.
template <typename O, typename T, int K, typename Threads>
__device__ __forceinline__ Pair<acc_t<T>> online_row(Pack<T> (&packs)[K], Threads& threads) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  A top = -infinity<A>(), sum = A(0);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    top = Larger()(top, reduce_elements<Larger, 1, W>([&](int, int e) { return packs[k][e]; }));
  }
  top = threads.template over_lanes<Larger>(top);
  const A off = Online<O>::base(top);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    packs[k].fold();  // one pack after the other: unpacked at once they are too many registers
    sum += reduce_elements<Sum, 1, W>([&](int, int e) { return exp_for<O>(packs[k][e] - off); });
  }
  sum = threads.template over_lanes<Sum>(sum);
  fold(packs);
  return threads.over_warps(Pair<A>{top, sum}, [](Pair<A>, const Pair<A>* parts, int count) {
    const int lane = threadIdx.x % kWarp;
    A top = -infinity<A>(), sum = A(0);
    for (int i = lane; i < count; i += kWarp) top = Larger()(top, parts[i].first);
    top = warp_reduce<Larger>(top);
    const A off = Online<O>::base(top);
    for (int i = lane; i < count; i += kWarp) sum += parts[i].second * exp_for<O>(parts[i].first - off);
    return Pair<A>{top, warp_reduce<Sum>(sum)};
  });
}
