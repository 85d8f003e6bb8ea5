// What a variant of attention does to scores: the text that is compiled around it has a struct for it, made of a line of C.
#pragma once

#include "attention/problem.cuh"
#include "common/elementwise/dual.cuh"

namespace attention {

// Where the places of captured tensors come from: of each, in turn, the size and the stride of every dimension; then the numbers.
// After these, where there is a map, its strides.
constexpr int kGiven = 48;
struct Given {
  long long sizes[kGiven], map[3];

  __device__ __forceinline__ double number(int at) const { return __longlong_as_double(sizes[at]); }
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
  const int query = max(0, min(static_cast<int>(queries(batch)), tokens_q));
  const int key = max(0, min(static_cast<int>(keys(batch)), tokens_k));
  sizes.queries = max(0, min(static_cast<int>(queries(batch + 1)), tokens_q) - query);
  sizes.keys = max(0, min(static_cast<int>(keys(batch + 1)), tokens_k) - key);
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
