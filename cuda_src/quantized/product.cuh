// y = x w^T of few rows x and a weight of 8 or 4 bits, which is read once, 16 bytes a lane, and goes from there to tensor cores.
#pragma once

#include "common/core/types.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/hw/mma.cuh"
#include "quantized/weights.cuh"

namespace quantized {

constexpr int kOutputs = 16;  // rows of the weight that a block has: those of a fragment
constexpr int kPartial = 20;  // floats from one row of a warp's sums to the next, so that lanes meet no bank twice

// Scales, or zero points, of (rows of the weight, groups of k): of float or of T, whichever is not null; or none at all.
template <typename T> struct Factors {
  const float* wide;
  const T* half;
  long long row, group;

  __device__ __forceinline__ void wait() { wide = written_before(wide), half = written_before(half); }

  __device__ __forceinline__ bool exist() const { return wide != nullptr || half != nullptr; }

  // The bits at a place, so that nobody waits for them before `value`.
  __device__ __forceinline__ unsigned bits(long long at) const {
    if (wide != nullptr) return __ldg(reinterpret_cast<const unsigned*>(wide) + at);
    return __ldg(reinterpret_cast<const unsigned short*>(half) + at);
  }

  __device__ __forceinline__ float value(unsigned bits) const {
    if (wide != nullptr) return __uint_as_float(bits);
    const unsigned short low = bits;
    return to_acc(*reinterpret_cast<const T*>(&low));
  }
};

// `row_bytes` and `x_row`: from one row of the weight, and of x, to the next. `group`: of k, at most k.
struct Sizes {
  int m, n, k, group;
  long long row_bytes, x_row;
};

// Of a row of the weight nothing is read twice, and all that lies near soon: by this warp, or by its neighbours.
template <int WORDS> __device__ __forceinline__ void read_once(const unsigned char* from, unsigned (&words)[WORDS]) {
  if constexpr (WORDS == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  } else if constexpr (WORDS == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  }
}

// What a warp adds up: 16 rows of the weight with 8 TILES rows of x, over steps of k. Lane (g, t) = (lane / 4, lane % 4) reads
// BYTES of the rows g and g + 8 of the weight, and what goes with them of the row g of x: the four lanes of a row have a step
// among them. That is another order of k than mma's own, the same for both operands.
template <typename T, typename W, int TILES, int BYTES> struct Warp {
  static constexpr int WORDS = BYTES / 4, OF_LANE = BYTES * 8 / W::BITS, STEP = 4 * OF_LANE;
  static constexpr int AHEAD = TILES < 4 ? 4 : 2;  // steps that are asked for ahead; more would spill registers

  const T* x;
  const unsigned char* rows[2];
  long long at_scale[2], at_zero[2];  // of the group that is loaded next
  Factors<T> scale, zero;
  Sizes sizes;
  int m0, g, t, steps_of_group, load_end, finish_end;  // where the groups end that are loaded, and added up, in steps
  bool grouped;

  unsigned words[AHEAD][2][WORDS], factors[AHEAD][2][2];
  float sums[TILES][4] = {}, of_x[TILES][4] = {}, total[TILES][4] = {};

  __device__ __forceinline__ Warp(const T* x, const unsigned char* weight, const Factors<T>& scale,
                                  const Factors<T>& zero, const Sizes& sizes, int first)
      : scale(scale),
        zero(zero),
        sizes(sizes),
        m0(blockIdx.y * (8 * TILES)),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4),
        steps_of_group(sizes.group / STEP),
        grouped(sizes.group < sizes.k) {
    this->x = x + (m0 + g) * sizes.x_row + t * OF_LANE;
    const int group = grouped ? first / steps_of_group : 0;
    load_end = finish_end = (group + 1) * steps_of_group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows behind the last one are read as that, and not stored
      const int n = min(static_cast<int>(blockIdx.x) * kOutputs + g + 8 * half, sizes.n - 1);
      rows[half] = weight + n * sizes.row_bytes + t * BYTES;
      at_scale[half] = n * scale.row + group * scale.group, at_zero[half] = n * zero.row + group * zero.group;
    }
  }

  __device__ __forceinline__ bool is_inside(int step) const { return step * STEP + t * OF_LANE < sizes.k; }

  // Asks L2 for what `load` reads: right even where the grid before this one has not ended and writes the weight.
  __device__ __forceinline__ void announce(int step) const {
#if __CUDA_ARCH__ >= 900
    if (!is_inside(step)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(rows[half] + step * (4 * BYTES)));
    }
#endif
  }

  __device__ __forceinline__ void load(int slot, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_inside(step)) {
        read_once<WORDS>(rows[half] + step * (4ll * BYTES), words[slot][half]);
      } else {
#pragma unroll
        for (int word = 0; word < WORDS; ++word) words[slot][half][word] = 0;  // of which x has zeros
      }
    }
    if (!grouped) return;
    if (step == load_end) next_group();
    load_factors(slot);
  }

  __device__ __forceinline__ void next_group() {
    load_end += steps_of_group;
#pragma unroll
    for (int half = 0; half < 2; ++half) at_scale[half] += scale.group, at_zero[half] += zero.group;
  }

  __device__ __forceinline__ void load_factors(int slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[slot][half][0] = scale.bits(at_scale[half]);
      factors[slot][half][1] = zero.exist() ? zero.bits(at_zero[half]) : 0;
    }
  }

  __device__ __forceinline__ void multiply(int slot, int step) {
    const bool inside = is_inside(step);
    constexpr int OF_VECTOR = 8 / (32 / W::BITS);  // words that go with eight values of x
#pragma unroll
    for (int vector = 0; vector < OF_LANE / 8; ++vector) {
      unsigned a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int word = 0; word < OF_VECTOR; ++word) {
          unsigned pairs[W::PAIRS];
          W::template pairs<T>(words[slot][half][vector * OF_VECTOR + word], pairs);
#pragma unroll
          for (int j = 0; j < W::PAIRS; ++j) a[half][word * W::PAIRS + j] = pairs[j];
        }
      }
      multiply(a, x + step * STEP + 8 * vector, inside);
    }
  }

  // Moves sums of a group, of the steps from `begin` to before `end`, into the total, by its scale and zero point.
  __device__ __forceinline__ void finish(int slot, int begin, int end) {
    const float s[2] = {scale.value(factors[slot][0][0]), scale.value(factors[slot][1][0])};
    float z[2] = {0.0f, 0.0f};
    if (zero.exist()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) z[half] = zero.value(factors[slot][half][1]) - W::MIDDLE;
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * tile + 2 * t + i % 2;
        const bool finite = isfinite(of_x[tile][i]) && isfinite(s[i / 2]) && isfinite(z[i / 2]);
        total[tile][i] += finite || m0 + row >= sizes.m
                              ? s[i / 2] * (sums[tile][i] - z[i / 2] * of_x[tile][i])
                              : one_by_one(x + (row - g) * sizes.x_row - t * OF_LANE, rows[i / 2] - t * BYTES,
                                           begin * STEP, min(end * STEP, sizes.k), z[i / 2], s[i / 2]);
        sums[tile][i] = of_x[tile][i] = 0.0f;
      }
    }
  }

  // Steps from `first` to before `last`.
  __device__ __forceinline__ void run(int first, int last) {
    if (!grouped) load_factors(0);  // asked for before the weight, and needed behind all of it
#pragma unroll
    for (int slot = 0; slot < AHEAD; ++slot) {
      if (first + slot < last) load(slot, first + slot);
    }
    for (int begin = first; begin < last; begin += AHEAD) {
#pragma unroll
      for (int slot = 0; slot < AHEAD; ++slot) {
        const int step = begin + slot;
        if (step >= last) break;
        multiply(slot, step);
        if (grouped && (step + 1 == last || step + 1 == finish_end)) {
          finish(slot, max(first, finish_end - steps_of_group), step + 1);
          finish_end += steps_of_group;
        }
        if (step + AHEAD < last) load(slot, step + AHEAD);
      }
    }
    if (!grouped) finish(0, first, last);
  }

 private:
  // The sum of x (w - zero) scale from k = `begin` to before `end`, where one of them is infinite: it may be NaN where the sums of
  // their factors are not, and the other way round. Its arguments are values, as members whose address is taken lie in memory.
  static __device__ __noinline__ float one_by_one(const T* of, const unsigned char* row, int begin, int end, float zero,
                                                  float scale) {
    constexpr int OF_WORD = 32 / W::BITS;
    float sum = 0.0f;
    for (int k = begin; k < end; ++k) {
      unsigned pairs[W::PAIRS];
      W::template pairs<T>(*reinterpret_cast<const unsigned*>(row + k / OF_WORD * 4), pairs);
      const int at = k % OF_WORD, pair = W::APART == 1 ? at / 2 : at % W::APART;
      unsigned both = pairs[0];
#pragma unroll
      for (int j = 1; j < W::PAIRS; ++j) both = pair == j ? pairs[j] : both;
      const unsigned short bits = (W::APART == 1 ? at % 2 : at / W::APART) ? both >> 16 : both;
      sum += to_acc(of[k]) * ((to_acc(*reinterpret_cast<const T*>(&bits)) - zero) * scale);
    }
    return sum;
  }

  // Eight k of this lane, in fragments of two mma.
  __device__ __forceinline__ void multiply(const unsigned (&a)[2][4], const T* from, bool inside) {
    constexpr unsigned ones = Magic<T>::ONES;
    const bool shifted = zero.exist();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int row = m0 + 8 * tile + g;
      uint4 values = {0, 0, 0, 0};
      if (row < sizes.m && inside) values = *reinterpret_cast<const uint4*>(from + 8 * tile * sizes.x_row);
      unsigned b[4];
      order<W>(values, b);
#pragma unroll
      for (int part = 0; part < 4; part += 2) {
        mma<T>(sums[tile], {a[0][part], a[1][part], a[0][part + 1], a[1][part + 1]}, b[part], b[part + 1]);
        if (shifted) mma<T>(of_x[tile], {ones, ones, ones, ones}, b[part], b[part + 1]);
      }
    }
  }
};

template <typename T, typename W, int TILES, int BYTES>
__device__ __forceinline__ void product(const T* x, const unsigned char* weight, const Factors<T>& scale,
                                        const Factors<T>& zero, const T* bias, T* y, const Sizes& sizes,
                                        float* partial) {
  using Own = Warp<T, W, TILES, BYTES>;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int steps = (sizes.k + Own::STEP - 1) / Own::STEP, share = (steps + warps - 1) / warps;
  const int first = min(steps, warp * share), last = min(steps, first + share);
  Own own(x, weight, scale, zero, sizes, first);
  let_next_grid_begin();
  for (int step = first; step < min(last, first + Own::AHEAD); ++step) own.announce(step);
  own.x = written_before(own.x), bias = written_before(bias);
  own.scale.wait(), own.zero.wait();
  own.run(first, last);

  const int lane_m = 2 * own.t, lane_n = own.g;
  float* mine = partial + warp * (8 * TILES * kPartial);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[(8 * tile + lane_m + i % 2) * kPartial + lane_n + i / 2 * 8] = own.total[tile][i];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < 8 * TILES * kOutputs; at += blockDim.x) {
    const int m = own.m0 + at / kOutputs, n = blockIdx.x * kOutputs + at % kOutputs;
    if (m >= sizes.m || n >= sizes.n) continue;
    float sum = 0.0f;
    for (int other = 0; other < warps; ++other) {
      sum += partial[(other * (8 * TILES) + at / kOutputs) * kPartial + at % kOutputs];
    }
    if (bias != nullptr) sum += to_acc(bias[n]);
    y[m * static_cast<long long>(sizes.n) + n] = from_acc<T>(sum);
  }
}

}  // namespace quantized
