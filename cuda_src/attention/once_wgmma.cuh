// Attention backward by wgmma and TMA in one pass: the keys' role, which computes grad_q too.
#pragma once

#include "attention/backward_wgmma.cuh"

namespace attention {

// Besides, dS of 128 keys twice, and with BULK what TMA adds to grad_q for each warpgroup; of 64 keys dS and P once.
template <int TILE, int BN, bool BULK> constexpr int kMoreOnce = 2 * TILE * BN * 2 + BULK * 2 * 16384;
template <int D, int DV, int TILE, int BN, int STAGES, bool BULK>
struct OnceLayout : BackwardLayout<D, BN, STAGES, kMoreOnce<TILE, BN, BULK>, 2, DV, TILE> {
  using Base = BackwardLayout<D, BN, STAGES, kMoreOnce<TILE, BN, BULK>, 2, DV, TILE>;
  using Base::Base;
  __device__ __forceinline__ unsigned differences(int i) const {
    return this->base + Base::MORE_AT + i * TILE * BN * 2;
  }
  __device__ __forceinline__ unsigned weights() const { return differences(1); }
  __device__ __forceinline__ unsigned staged(int group) const { return differences(2) + group * 16384; }
};

// dS of both warpgroups is there; of the panel before, both have taken what they need.
constexpr int kBoth = 3;
constexpr int kWeights = 4;  // P is there

// dS of 16 queries, the j-th of a warpgroup's: as panels of 64 queries, with a line for each of 64 keys from `first` on.
__device__ __forceinline__ void put_four(unsigned to, int first, int j, const unsigned* four) {
  const int lane = threadIdx.x % 32, line = first + threadIdx.x / 32 % 4 * 16 + lane % 16;
  const unsigned chunk = (j % 4 * 2 + lane / 16) ^ line % 8;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + j / 4 * 128 * kLine +
                                                                                        line * kLine + chunk * 16),
               "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3])
               : "memory");
}

// Adds sums of 64 rows, which lie as the threads hold them, 8 columns after the other: see collect().
template <int N> __device__ __forceinline__ void add(float* to, const float (&d_q)[N]) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    asm volatile(
        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 512 * j + 4 * (threadIdx.x % 128)),
        "f"(d_q[4 * j]), "f"(d_q[4 * j + 1]), "f"(d_q[4 * j + 2]), "f"(d_q[4 * j + 3])
        : "memory");
  }
}

// What is added up of a group of heads that several blocks share: grad_k of each head, then grad_v, in whole tiles of 128 keys.
template <int D, int DV> struct Shared {
  float* sums;  // null where a block has all heads of a group
  const Sizes& sizes;

  __device__ __forceinline__ float* at(int columns, int batch, int head, int row) const {
    const int padded = (sizes.keys + 127) / 128 * 128, heads = sizes.heads / sizes.group;
    return sums + (static_cast<long long>(batch * heads + head) * padded + row) * columns;
  }
  template <typename Work> __device__ __forceinline__ float* keys(const Work& work, int row) const {
    return at(whole(D), work.batch, work.own_head, row);
  }
  template <typename Work> __device__ __forceinline__ float* values(const Work& work, int row) const {
    return at(whole(D), sizes.batches, 0, 0) + (at(whole(DV), work.batch, work.own_head, row) - sums);
  }
};

// A consumer, a warpgroup: owns 64 keys. dS also goes through shared memory, since grad_q = dS k takes it of all 128 keys, with
// the queries as rows. BULK: what is added to grad_q goes by TMA, else from registers.
template <typename T, int D, int DV, int BN, int STAGES, bool BULK, int BOUNDS, typename Variant = Plain>
struct OnePass : Gradient<T, D, BN, STAGES, true, BOUNDS, Variant, OnceLayout<D, DV, 128, BN, STAGES, BULK>> {
  using Base = Gradient<T, D, BN, STAGES, true, BOUNDS, Variant, OnceLayout<D, DV, 128, BN, STAGES, BULK>>;
  using At = OnceLayout<D, DV, 128, BN, STAGES, BULK>;
  using Base::at, Base::work, Base::sizes, Base::group, Base::lane, Base::row, Base::group_row, Base::own_at,
      Base::ring;
  using Base::s, Base::dp, Base::d_first, Base::d_second, Base::p, Base::ds, Base::variant;
  // Of a panel of grad_q a warpgroup has 64 rows, or 64 columns, and of three panels of columns half of the one in between too.
  static constexpr int COLUMNS = whole(D), ROWS = BN / 64;
  static constexpr bool HALVES = COLUMNS == 192;
  static_assert(HALVES ? BN == 64 && !BULK : ROWS * COLUMNS == 128, "two warpgroups share a panel of grad_q");
  // There are no registers for P beside its rounded values, which a product in flight reads: it begins when dS is made.
  static constexpr bool LATE = BN == 128;
  // There are none for P beside dP: dS takes P as it was rounded, as the peers' does.
  static constexpr bool EARLY = D > 128 && !Base::BENDS && !Variant::kDrops;

  float* const sums;

  __device__ __forceinline__ OnePass(const At& at, const Work<BN, true, BOUNDS>& work, const RoleMaps& given,
                                     float* sums, float natural_scale, const Sizes& sizes, const Variant& variant = {})
      : Base(at, work, given, natural_scale, sizes, variant), sums(sums) {}

  __device__ __forceinline__ void run() {
    mbarrier::wait(at.owned(), 0);
    for (int i = 0, panel = work.begin + work.shift, in = 0, head = work.head * work.group; i < work.all; ++i) {
      step(panel, head, i % 2);
      if (++panel == work.end) panel = work.begin;
      if (++in == work.panels) in = 0, ++head;
    }
    if constexpr (BULK) {
      if (threadIdx.x % 128 == 0) tma::finish_stores();
    }
    named_barrier::sync(kBoth, 256);  // the other warpgroup reads k to the end, in whose place results are put
  }

 private:
  __device__ __forceinline__ void step(int panel, int head, int buffer) {
    float d_q[32];
    mbarrier::wait(at.full(ring.stage), ring.phase);
    Passing now = {panel, head, true};
    if constexpr (Variant::kMaps) now = passing_at(at.entry(ring.stage));
    wgmma::fence();
    begin_across<T, D, BN, 128>(s, own_at, at.first(ring.stage));
    if constexpr (!EARLY) begin_across<T, DV, BN, 128>(dp, own_at + At::OWN, at.second(ring.stage));
    this->draw(now);
    if constexpr (Base::BENDS) {
      finish<0>(s), finish<0>(dp);
      this->mask(now), this->outside();
      this->drop();
      this->changed(now.head, now.panel * BN + lane % 4 * 2);
    } else {
      finish<!EARLY>(s);
      this->mask(now), this->outside();
      this->probabilities();
    }
    if constexpr (LATE && !Base::BENDS) {
      finish<0>(dp);
      this->drop();
      this->differences();
    }
    if constexpr (LATE) rounded();
    else this->weigh();
    wgmma::fence();
    if constexpr (EARLY) begin_across<T, DV, BN, 128>(dp, own_at + At::OWN, at.second(ring.stage));
    begin_along<T, DV, BN>(d_second, p, at.second(ring.stage));
    if constexpr (EARLY) {
      finish<1>(dp);
      put_differences_of_rounded(at.differences(buffer));
    } else if constexpr (!LATE && !Base::BENDS) {
      finish<1>(dp);
      this->drop();
      this->differences();
    }
    if constexpr (!LATE && !EARLY) round<T>(ds, dp);
    if constexpr (!EARLY) put_differences(at.differences(buffer));
    named_barrier::sync(kBoth, 256);
    if constexpr (EARLY) finish<0>(d_second);  // P's registers are free then
    wgmma::fence();
    const unsigned a = operand(at.differences(buffer) + (BN == 128 ? group * 128 * kLine : 0), 16);
    const unsigned b = operand(at.base + (ROWS == 1 ? group * (HALVES ? 2 : 1) * 128 * kLine : 0), 16);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      wgmma::Product<T, 64, true, true>::add(d_q, descriptor(a + j * kLine), descriptor(b + j * kLine), j > 0);
    }
    wgmma::end_group();
    if constexpr (EARLY) {
      const unsigned mine = operand(at.differences(buffer) + group * 64 * kLine, 16);
      const unsigned q = operand(at.first(ring.stage), BN * kLine);
#pragma unroll
      for (int j = 0; j < BN / 16; ++j) {
        wgmma::Product<T, D, false, true>::add(d_first, descriptor(mine + 2 * j), descriptor(q + j * kLine), 1);
      }
      wgmma::end_group();
    } else {
      begin_along<T, D, BN>(d_first, ds, at.first(ring.stage));
    }
    finish<1>(d_q);
    const long long of = static_cast<long long>(work.batch) * sizes.heads + now.head;
    float* const to = sums + (of * sizes.padded + now.panel * BN) * COLUMNS;
    add_panel(to + group * (HALVES ? 2 : 1) * 4096, d_q);
    if constexpr (HALVES) {
      float d_q_half[16];
      wgmma::fence();
      const unsigned half = operand(at.base + 128 * kLine + group * (kLine / 2), 16);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        wgmma::Product<T, 32, true, true>::add(d_q_half, descriptor(a + j * kLine), descriptor(half + j * kLine),
                                               j > 0);
      }
      wgmma::end_group();
      finish<0>(d_q_half);
      add(to + 4096 + group * 2048, d_q_half);
    }
    finish<0>(d_first);
    finish<0>(d_second);
    this->release(ring.stage);
    ring.advance();
  }

  // P and dS as half types before the product begins, so that their sums' registers are free: the compiler would round dS after
  // it, find too few of them, and have products wait for each other.
  __device__ __forceinline__ void rounded() {
    this->weigh();
    round<T>(ds, dp);
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) asm volatile("" : "+r"(ds[i]), "+r"(p[i])::"memory");
  }

  // dS of P as it was rounded, which leaves its registers at once.
  __device__ __forceinline__ void put_differences_of_rounded(unsigned to) const {
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
      unsigned four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 delta = this->of_columns(2 * j + i / 2, Base::ROW), both = unpack<T>(p[4 * j + i]);
        const float* of = dp + 8 * j + 2 * i;
        four[i] = pack<T>(both.x * (of[0] - delta.x), both.y * (of[1] - delta.y));
      }
      put_four(to, group * 64, j, four);
    }
    tma::fence_shared();
  }

  __device__ __forceinline__ void put_differences(unsigned to) const {
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) put_four(to, group * 64, j, ds + 4 * j);
    tma::fence_shared();
  }

  __device__ __forceinline__ void add_panel(float* to, const float (&d_q)[32]) const {
    if constexpr (BULK) {
      const unsigned from = at.staged(group);
      const int thread = threadIdx.x % 128;
      if (thread == 0) tma::wait_for_stores<0>();
      named_barrier::sync(1 + group, 128);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(from + 2048 * j + 16 * thread), "f"(d_q[4 * j]),
                     "f"(d_q[4 * j + 1]), "f"(d_q[4 * j + 2]), "f"(d_q[4 * j + 3])
                     : "memory");
      }
      tma::fence_shared();
      named_barrier::sync(1 + group, 128);
      if (thread == 0) {
        tma::add_line(to, from, 16384);
        tma::end_stores();
      }
    } else {
      add(to, d_q);
    }
  }
};

// The results of a warpgroup: by TMA, or added to those of the blocks that share its keys.
template <int D, int DV, typename Gradient>
__device__ __forceinline__ void leave(Gradient& gradient, const RoleMaps& maps, float* shared, float scale,
                                      const Sizes& sizes) {
  if (!shared) return gradient.store(maps, scale);
  const Shared<D, DV> to{shared, sizes};
  if (gradient.group_row >= sizes.keys) return;
  if constexpr (Gradient::FIRST_OUT) add(to.keys(gradient.work, gradient.group_row), gradient.d_first);
  if constexpr (Gradient::SECOND_OUT)
    gradient.scale_values(), add(to.values(gradient.work, gradient.group_row), gradient.d_second);
}

}  // namespace attention
