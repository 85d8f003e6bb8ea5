// The maximum of a row that is in registers or shared memory, and the sum of exp(x - max), with one exchange between warps.
#pragma once

#include "common/hw/cluster.cuh"
#include "common/reduce/online_softmax.cuh"
#include "common/tile/row_tile.cuh"

__device__ __forceinline__ unsigned larger_words(unsigned a, unsigned b, __half) {
  unsigned c;
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ unsigned larger_words(unsigned a, unsigned b, __nv_bfloat16) {
  unsigned c;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// The maximum of K vectors. For half types, from sm_80 on, one instruction compares two numbers.
template <int K, typename T> __device__ __forceinline__ acc_t<T> largest(const Vector<T> (&vectors)[K]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2) {
    unsigned top = vectors[0].word[0];
#pragma unroll
    for (int i = 1; i < 4 * K; ++i) top = larger_words(top, vectors[i / 4].word[i % 4], T());
    return Larger()(unpack(top, 0, T()), unpack(top, 1, T()));
  }
#endif
  return reduce_elements<Larger, K, kVecWidth<T>>([&](int k, int e) { return vectors[k][e]; });
}

// Maximum and sum over all threads of a row, as exact as a result of type O can show. Each warp's sum is for its own
// maximum, and is scaled when the sums are added.
template <typename O, typename A, typename Threads>
__device__ __forceinline__ Pair<A> over_row(Pair<A> of_warp, Threads& threads) {
  return threads.over_warps(of_warp, [](Pair<A>, const Pair<A>* partials, int count) {
    const int lane = threadIdx.x % kWarp;
    A top = -infinity<A>(), sum = A(0);
    for (int i = lane; i < count; i += kWarp) top = Larger()(top, partials[i].first);
    top = warp_reduce<Larger>(top);
    const Exponential<O> exp(top);
    for (int i = lane; i < count; i += kWarp) sum += partials[i].second * exp(partials[i].first);
    return Pair<A>{top, warp_reduce<Sum>(sum)};
  });
}

// Maximum and sum of vectors that come a few at a time, and the function that computes their exponentials.
template <typename O> struct OnlineVectors : Online<O> {
  using A = acc_t<O>;
  QuickExponential<O> exp{-infinity<A>()};

  template <int K, typename T> __device__ __forceinline__ void add(const Vector<T> (&vectors)[K]) {
    const A most = largest(vectors);
    if (most > this->max) {
      const QuickExponential<O> larger(most);
      this->sum *= larger.of(this->max, exp);
      this->max = most, exp = larger;
    }
    this->sum += reduce_elements<Sum, K, kVecWidth<T>>([&](int k, int e) { return exp(vectors[k][e]); });
  }

  // The reduction over all threads of a row.
  template <typename Threads> __device__ __forceinline__ void reduce(Threads& threads) {
    this->sum /= exp.of_max();
    const A top = threads.template over_lanes<Larger>(this->max);
    const A sum = threads.template over_lanes<Sum>(this->sum_for(top));
    const Pair<A> all = over_row<O>(Pair<A>{top, sum}, threads);
    this->max = all.first, this->sum = all.second;
    exp = QuickExponential<O>(this->max);
  }
};

// Maximum and sum of vectors that are in registers, whose pads are -inf, and of one more element `alone` where `lone`. All
// threads of the row take part. The vectors are folded afterwards: an exponential that is needed again is computed again,
// since keeping it would cost registers, and with them the blocks that overlap.
template <typename O, typename T, int K, typename Threads, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> online_row(Vector<T> (&vectors)[K], Threads& threads, bool lone = false,
                                              A alone = A(0)) {
  A sum = A(0), most = largest(vectors);
  if (lone) most = Larger()(most, alone);
  const A top = threads.template over_lanes<Larger>(most);
  const Exponential<O> exp(top);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    vectors[k].fold();  // one vector after the other: unpacked at once they are too many registers
    sum += reduce_elements<Sum, 1, kVecWidth<T>>([&](int, int e) { return exp(vectors[k][e]); });
  }
  if (lone) sum += exp(alone);
  sum = threads.template over_lanes<Sum>(sum);
  fold(vectors);
  return over_row<O>(Pair<A>{top, sum}, threads);
}
