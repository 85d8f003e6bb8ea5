// What a variant of attention does to scores: the text that is compiled around it has a struct for it, made of a line of C.
#pragma once

#include "attention/problem.cuh"
#include "common/core/philox.cuh"
#include "common/elementwise/dual.cuh"

namespace expression {

// softcap * tanh(s / softcap) by the tanh of the hardware, at most 2^-11 of itself from the right one, as half of fp16's unit is:
// the scores of a product in half types are as far off. A division and tanhf would take longer than the product.
__device__ __forceinline__ float tanh_of_hardware(float x) {
  asm("tanh.approx.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ __forceinline__ float softcapped_(float s, float softcap) {
  return softcap * tanh_of_hardware(s * (1 / softcap));
}
__device__ __forceinline__ Dual softcapped_(const Dual& s, const Dual& softcap) {
  const float t = tanh_of_hardware(s.value * (1 / softcap.value));
  return chain(s, softcap.value * t, 1 - t * t);
}

// A finite number whose multiple by log2(e) is none any more becomes the last one whose is: masks add the lowest number there is,
// and the weights of a row of such alone are equal. Infinities and NaN stay.
__device__ __forceinline__ float in_reach_(float x) {
  constexpr float kReach = 2.35e38f;
  return fabsf(x) > kReach && fabsf(x) < infinity<float>() ? copysignf(kReach, x) : x;
}
__device__ __forceinline__ Dual in_reach_(const Dual& s) { return {in_reach_(s.value), s.slope, s.moves}; }

}  // namespace expression

namespace attention {

// Where the places of captured tensors come from: of each, in turn, the size and the stride of every dimension; then the numbers,
// of which an integer is one, so that an instruction can read it where it lies. After these, where there is a map, its strides.
constexpr int kGiven = 48;
struct Given {
  long long sizes[kGiven], map[3];

  __device__ __forceinline__ double number(int at) const { return __longlong_as_double(sizes[at]); }
  __device__ __forceinline__ int integer(int at) const { return static_cast<int>(sizes[at]); }
};

// Weights are dropped at random, by their places alone, so that every role drops the same.
struct Dropout {
  unsigned long long seed;
  unsigned threshold;
  float scale;  // of what is kept

  // p: the probability that a weight is dropped.
  __device__ __forceinline__ Dropout(long long seed, double p)
      : seed(seed),
        threshold(static_cast<unsigned>(fmin(rint(p * 4294967296.0), 4294967295.0))),
        scale(p < 1 ? static_cast<float>(1 / (1 - p)) : 0) {}

  // Of N scores that a thread holds as a product of 8 columns after the other leaves them: rows `own` and own + 8, columns from
  // `other` on. KEYS: rows are keys, and columns queries. A draw has the four scores of queries 8 apart and keys 8 apart, which one
  // thread holds either way.
  template <bool KEYS, int N> __device__ __forceinline__ Kept<N> draw(int of, int own, int other) const {
    Kept<N> kept;
#pragma unroll
    for (int i = 0; i < N / 4; i += 2) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned mine = own / 16 * 8 + own % 8, at = other + 8 * i + j, theirs = at / 16 * 8 + at % 8;
        const unsigned long long q = KEYS ? theirs : mine, k = KEYS ? mine : theirs;
        const Philox four = philox(seed, q << 32 | k, of);
#pragma unroll
        for (int w = 0; w < 4; ++w) {  // of the query w / 2, and the key w % 2
          const int e = 4 * (i + (KEYS ? w / 2 : w % 2)) + 2 * (KEYS ? w % 2 : w / 2) + j;
          if (four.word[w] >= threshold) kept.bits[e / 32] |= 1u << e % 32;
        }
      }
    }
    return kept;
  }
};

__device__ __forceinline__ int nearest(int index, long long size) {
  return max(0, min(index, static_cast<int>(size) - 1));
}
__device__ __forceinline__ int nearest(long long index, long long size) {
  return static_cast<int>(index < 0 ? 0 : index < size ? index : size - 1);
}

// A captured tensor of N dimensions. An index that is outside is that of the nearest element, in any tile's corner too.
template <typename X, int N> struct Captured {
  const X* data;
  const long long* sizes;

  template <typename... I> __device__ __forceinline__ auto operator()(I... index) const {
    static_assert(sizeof...(I) == N, "an index for each dimension");
    long long at = 0;
    int dim = 0;
    ((at += nearest(index, sizes[2 * dim]) * sizes[2 * dim + 1], ++dim), ...);
    const auto found = to_body(data[at]);
    if constexpr (expression::IsFloating<decltype(found + 0)>::value) return static_cast<float>(found);
    else return found;
  }
};

// One of packed sequences: `queries` and `keys` have where each begins, and where the last ends. What is not within the tokens
// is no part of any. bottom: bounds are those of the diagonal on which the last query is at the last key.
template <typename Starts, typename KeyStarts>
__device__ __forceinline__ Sequence packed(Sizes sizes, int batch, const Starts& queries, const KeyStarts& keys,
                                           int tokens_q, int tokens_k, bool bottom) {
  const int query = nearest(queries(batch), tokens_q + 1), key = nearest(keys(batch), tokens_k + 1);
  sizes.queries = max(0, nearest(queries(batch + 1), tokens_q + 1) - query);
  sizes.keys = max(0, nearest(keys(batch + 1), tokens_k + 1) - key);
  const int apart = bottom ? sizes.keys - sizes.queries : 0;
  sizes.low += apart, sizes.high += apart;
  return {sizes, query, key};
}

// P and dS of a score, 0 in rows that there are none of, whatever the derivative is there.
struct Weights { float p, ds; };
template <typename Variant>
__device__ __forceinline__ Weights weights_of(const Variant& variant, float s, int b, int h, int q, int k, float lse2,
                                              float dp, float delta) {
  expression::Dual score(s, 1);
  if constexpr (Variant::kScores) score = variant.score(score, b, h, q, k);
  if (score.value == -infinity<float>() || lse2 == infinity<float>()) return {0, 0};
  const float p = fast_exp2(score.value * kLog2E - lse2);
  return {p, p * (dp - delta) * score.slope};
}

}  // namespace attention
