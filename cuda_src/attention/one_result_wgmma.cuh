// Attention backward by wgmma and TMA in one pass of rows that are too wide for two results in a thread's registers.
#pragma once

#include "attention/once_wgmma.cuh"

namespace attention {

// A consumer, a warpgroup, where rows are so wide that there are no registers for two results: both have the same 64 keys, one
// P and grad_v, which it gives P to the other, and that one dS and grad_k; of grad_q = dS k each has half of the columns.
template <typename T, int D, int DV, int STAGES, int BOUNDS, bool VALUES, typename Variant = Plain>
struct OneResult : Gradient<T, D, 64, STAGES, true, BOUNDS, Variant, OnceLayout<D, DV, 64, 64, STAGES, false>,
                            VALUES ? kOfValues : kOfKeys> {
  static constexpr int BN = 64, COLUMNS = whole(D);
  static constexpr bool HALVES = COLUMNS == 192;  // three panels of columns
  static_assert(HALVES || COLUMNS == 256, "two warpgroups share the columns of grad_q");
  using At = OnceLayout<D, DV, 64, BN, STAGES, false>;
  using Base = Gradient<T, D, BN, STAGES, true, BOUNDS, Variant, At, VALUES ? kOfValues : kOfKeys>;
  using Base::at, Base::work, Base::sizes, Base::group, Base::lane, Base::row, Base::group_row, Base::own_at,
      Base::ring;
  using Base::s, Base::dp, Base::d_first, Base::d_second, Base::p, Base::ds, Base::variant;

  float* const sums;

  __device__ __forceinline__ OneResult(const At& at, const Work<BN, true, BOUNDS, 64>& work, const RoleMaps& given,
                                       float* sums, float natural_scale, const Sizes& sizes,
                                       const Variant& variant = {})
      : Base(at, work, given, natural_scale, sizes, variant), sums(sums) {}

  __device__ __forceinline__ void run() {
    mbarrier::wait(at.owned(), 0);
    for (int i = 0, panel = work.begin + work.shift, in = 0, head = work.head * work.group; i < work.all; ++i) {
      step(panel, head);
      if (++panel == work.end) panel = work.begin;
      if (++in == work.panels) in = 0, ++head;
    }
    named_barrier::sync(kBoth, 256);  // the other warpgroup reads k to the end, in whose place results are put
  }

 private:
  __device__ __forceinline__ void step(int panel, int head) {
    mbarrier::wait(at.full(ring.stage), ring.phase);
    Passing now = {panel, head, true};
    if constexpr (Variant::kMaps) now = passing_at(at.entry(ring.stage));
    wgmma::fence();
    if constexpr (VALUES || Base::BENDS) begin_across<T, D, BN, 64>(s, own_at, at.first(ring.stage));
    if constexpr (!VALUES) begin_across<T, DV, BN, 64>(dp, own_at + At::OWN, at.second(ring.stage));
    this->draw(now);
    if constexpr (VALUES || Base::BENDS) {
      finish<0>(s);
      this->mask(now), this->outside();
    }
    if constexpr (Base::BENDS) {
      if constexpr (!VALUES) finish<0>(dp), this->drop();
      this->changed(now.head, now.panel * BN + lane % 4 * 2);
    } else if constexpr (VALUES) {
      this->probabilities();
    }
    if constexpr (VALUES) {
      round<T>(p, s);
      if constexpr (!Base::BENDS) give_weights();
      named_barrier::arrive(kWeights, 256);
      this->weigh();
      wgmma::fence();
      begin_along<T, DV, BN>(d_second, p, at.second(ring.stage));
    } else {
      named_barrier::sync(kWeights, 256);
      if constexpr (!Base::BENDS) {
        take_weights();
        finish<0>(dp);
        this->drop();
        differences();
      } else {
        round<T>(ds, dp);
      }
#pragma unroll
      for (int j = 0; j < BN / 16; ++j) put_four(at.differences(0), 0, j, ds + 4 * j);
      tma::fence_shared();
      wgmma::fence();
      begin_along<T, D, BN>(d_first, ds, at.first(ring.stage));
    }
    named_barrier::sync(kBoth, 256);
    float* const to =
        sums +
        ((static_cast<long long>(work.batch) * sizes.heads + now.head) * sizes.padded + now.panel * BN) * COLUMNS;
    if constexpr (HALVES) {
      add_product<64>(to, group * 128);
      add_product<32>(to, 64 + group * 32);
    } else {
      add_product<128>(to, group * 128);
    }
    this->release(ring.stage);
    ring.advance();
  }

  // Of grad_q N columns from `column` on; what was in flight before is complete then.
  template <int N> __device__ __forceinline__ void add_product(float* to, int column) {
    float d_q[N / 2];
    wgmma::fence();
    const unsigned a = operand(at.differences(0), 16);
    const unsigned b = operand(at.base + column / 64 * 64 * kLine + column % 64 * 2, 64 * kLine);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wgmma::Product<T, N, true, true>::add(d_q, descriptor(a + j * kLine), descriptor(b + j * kLine), j > 0);
    }
    wgmma::end_group();
    if constexpr (VALUES) finish<0>(d_second);
    else finish<0>(d_first);
    finish<0>(d_q);
    add(to + column * 64, d_q);
  }

  // P as a thread has it, for the same thread of the other warpgroup.
  __device__ __forceinline__ void give_weights() const {
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at.weights() + 2048 * j + threadIdx.x % 128 * 16),
                   "r"(p[4 * j]), "r"(p[4 * j + 1]), "r"(p[4 * j + 2]), "r"(p[4 * j + 3])
                   : "memory");
    }
  }
  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(p[4 * j]), "=r"(p[4 * j + 1]), "=r"(p[4 * j + 2]), "=r"(p[4 * j + 3])
                   : "r"(at.weights() + 2048 * j + threadIdx.x % 128 * 16)
                   : "memory");
    }
  }

  // ds = dS of P as it was rounded.
  __device__ __forceinline__ void differences() {
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
      const float2 delta = this->of_columns(i, Base::ROW);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 both = unpack<T>(p[2 * i + r]);
        const int e = 4 * i + 2 * r;
        ds[2 * i + r] = pack<T>(both.x * (dp[e] - delta.x), both.y * (dp[e + 1] - delta.y));
      }
    }
  }
};

}  // namespace attention
