// y[k]         = max over i of x[k, i], NaN where one is; ties[k] = how many are the largest, 0 of NaN
// grad_x[k, i] = grad_y[k] (x[k, i] = y[k]) / ties[k]
//
// Any dimensions and strides are reduced without a copy: see common/reduce/reduction.cuh. As PyTorch's, the gradient where y is
// NaN is 0 / 0. Forward saves `ties` and where one of the largest is, so that of rows that have but one backward reads only its
// vector. Of rows of at most 64 elements and 128 bytes, which a thread takes (see common/tile/tiny_rows.cuh), forward saves a
// bit for each element that is the largest, and backward reads nothing of x.
// Bytes per element of x: forward sizeof(T), backward once that, and again what is tied. About three operations on each
// element; in rows of half types two elements are taken at once.
// Reached on an H200 (GB/s of x, in backward of twice that; a copy: 4226): 8192x8192 over 1 bf16 3359 / 6302, fp32 3659 /
// 7811; over 0 bf16 3034 / 3120, fp32 3648 / 7742; 4095x4095 bf16 over 1 2159 / 4000, over 0 1562 / 2527; over 1 bf16
// 65536x1000 3052 / 5511, 4096x50257 3720 / 6743, 2097152x32 3101 / 6336, 1000003x17 2030 / 3968. Lost:
// the start of a launch, about 4 us; of long bf16 rows one in sixteen has a tie and is read; over 0 each element is compared
// and counted by itself; of 32 columns a thread reads a whole row, so that a warp's loads are far apart.
#include "common/reduce/reduce_backward.cuh"
#include "common/tile/tiny_rows.cuh"

// The largest of some numbers, how many are that, and the number of one of them: of the element, in a line of its vector.
template <typename A> struct Top {
  A max, ties;
  unsigned where;
};

template <typename A> __device__ __forceinline__ Top<A> shuffle_down(const Top<A>& value, int offset) {
  return {shuffle_down(value.max, offset), shuffle_down(value.ties, offset), shuffle_down(value.where, offset)};
}

// +0 before -0, in any order.
template <typename A> __device__ __forceinline__ A larger(A a, A b) { return a == b && signbit(b) ? a : max_nan(a, b); }
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#endif

template <typename A> struct TopRule {
  static constexpr bool kEach = false;
  static __device__ __forceinline__ Top<A> identity_() { return {-infinity<A>(), A(0), 0}; }
  static __device__ __forceinline__ Top<A> combine_(const Top<A>& a, const Top<A>& b) {
    const A max = larger(a.max, b.max);
    const bool first = a.max == max, second = b.max == max;
    return {max, (first ? a.ties : A(0)) + (second ? b.ties : A(0)), second ? b.where : a.where};
  }

  // What is not there is -inf.
  template <int U, int E, typename Number>
  static __device__ __forceinline__ void take_(Top<A>& top, const A (&values)[U][E], int, int, Number number) {
    A best[U], max = top.max;
#pragma unroll
    for (int i = 0; i < U; ++i) {
      best[i] = values[i][0];
#pragma unroll
      for (int e = 1; e < E; ++e) best[i] = larger(best[i], values[i][e]);
      max = larger(max, best[i]);
    }
    top.ties = top.max == max ? top.ties : A(0);
    top.max = max;
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (best[i] == max) top.where = static_cast<unsigned>(number(i));
#pragma unroll
      for (int e = 0; e < E; ++e) top.ties += A(values[i][e] == max);
    }
  }
};

// Two neighbours of a half type.
template <typename T> struct Two;
template <> struct Two<__half> { using type = __half2; };
template <> struct Two<__nv_bfloat16> { using type = __nv_bfloat162; };

// Which of some vectors are `max`: a bit for each element, of half types two compared at once.
template <typename T, int U, int K> __device__ __forceinline__ unsigned equal(const Vec<T, K> (&vectors)[U],
                                                                              acc_t<T> max) {
  unsigned mask = 0;
  if constexpr (sizeof(T) == 2) {
    using P = typename Two<T>::type;
    const T rounded = from_acc<T>(max);  // exact
#pragma unroll
    for (int i = 0; i < U * K; i += 16) {
      unsigned pairs = 0;  // the second elements' bits in the upper half
#pragma unroll
      for (int e = i; e < i + 16 && e < U * K; e += 2) {
        const P pair{vectors[e / K].data[e % K], vectors[e / K].data[e % K + 1]};
        pairs |= __heq2_mask(pair, P{rounded, rounded}) & (1u | 2u << 16) << (e - i);
      }
      mask |= ((pairs | pairs >> 16) & 0xffffu) << i;
    }
  } else {
#pragma unroll
    for (int e = 0; e < U * K; ++e) mask |= unsigned(to_acc(vectors[e / K].data[e % K]) == max) << e;
  }
  return mask;
}

template <typename T, int U, int K> __device__ __forceinline__ acc_t<T> largest(const Vec<T, K> (&vectors)[U]) {
  if constexpr (sizeof(T) == 2) {
    using P = typename Two<T>::type;
    P best{vectors[0].data[0], vectors[0].data[1]};
#pragma unroll
    for (int e = 2; e < U * K; e += 2)
      best = __hmax2_nan(best, P{vectors[e / K].data[e % K], vectors[e / K].data[e % K + 1]});
    return larger(to_acc(best.x), to_acc(best.y));
  } else {
    acc_t<T> best = to_acc(vectors[0].data[0]);
#pragma unroll
    for (int e = 1; e < U * K; ++e) best = larger(best, to_acc(vectors[e / K].data[e % K]));
    return best;
  }
}

// TopRule::take_() of whole vectors of a half type.
template <typename T, int U, int K, typename Number>
__device__ __forceinline__ void take_pairs(Top<float>& top, const Vec<T, K> (&vectors)[U], Number number) {
  const float max = larger(top.max, largest(vectors));
  const unsigned mask = equal(vectors, max);
  top.ties = (top.max == max ? top.ties : 0.0f) + float(__popc(mask));
  if (mask) top.where = static_cast<unsigned>(number((__ffs(mask) - 1) / K));
  top.max = max;
}

template <typename T> struct TopResult {
  TopRule<acc_t<T>> rule_;
  T* __restrict__ y;
  acc_t<T>* __restrict__ ties;
  unsigned* __restrict__ where;
  acc_t<T> count;  // of what is reduced

  __device__ __forceinline__ void store_(const Top<acc_t<T>>& top, long long, long long at) const {
    const bool none = top.max == -infinity<acc_t<T>>();  // as what was not there
    y[at] = from_acc<T>(top.max);
    ties[at] = none ? count : top.ties;
    where[at] = none ? 0 : top.where;
  }
};

template <typename T> struct TopUnit : Elements<T> {
  using State = Top<acc_t<T>>;
  TopRule<acc_t<T>> rule_;
  State* __restrict__ partial;  // [slabs x results], null where there is one slab
  long long results;
  long long period;  // rows side by side
  TopResult<T> result;

  static constexpr bool kTakesVectors = sizeof(T) == 2;
  template <int U, int K, typename Number>
  static __device__ __forceinline__ void take_vectors_(State& top, const Vec<T, K> (&loaded)[U], Number number) {
    if constexpr (kTakesVectors) take_pairs(top, loaded, number);
  }
  template <int K> static __device__ __forceinline__ Vec<T, K> none_() {
    return splat<T, K>(from_acc<T>(-infinity<acc_t<T>>()));
  }
  __device__ __forceinline__ void store_(State top, long long slab, long long at) const {
    if (period > 1) top.where = static_cast<unsigned>(top.where * period + at / (results / period));
    if (partial) partial[slab * results + at] = top;
    else result.store_(top, slab, at);
  }
};

// Grid, block: see fold(). `partial` holds Top<A>.
template <typename T, int FORM>
__global__ void CUPYOPS_FOLD amax_fwd_fold(const T* __restrict__ x, T* __restrict__ y, acc_t<T>* __restrict__ ties,
                                           unsigned* __restrict__ where, acc_t<T>* __restrict__ partial, acc_t<T> count,
                                           const __grid_constant__ Layout<2> kept,
                                           const __grid_constant__ Layout<1> reduced,
                                           const __grid_constant__ Division division, long long results) {
  Top<acc_t<T>>* tops = reinterpret_cast<Top<acc_t<T>>*>(partial);
  const TopUnit<T> unit{{x}, {}, tops, results, division.period, {{}, y, ties, where, count}};
  fold<FORM, kVecWidth<T>>(unit, kept, reduced, division);
}

// The largest of a row of at most 64 elements, and which are that: a bit for each.
template <typename A> struct Tops {
  A max;
  unsigned long long mask;
};

// Of a row at 16-byte boundaries, of `vectors` vectors.
template <typename T> __device__ __forceinline__ Tops<acc_t<T>> tops_of_vectors(const T* own, int vectors) {
  using A = acc_t<T>;
  constexpr int K = kVecWidth<T>, U = kVectorsAtOnce;
  Tops<A> tops = {-infinity<A>(), 0};
#pragma unroll 1
  for (int first = 0; first < vectors; first += U) {
    Vec<T, K> loaded[U];
#pragma unroll
    for (int i = 0; i < U; ++i) loaded[i] = load_once<K>(own + min(first + i, vectors - 1) * K);
#pragma unroll
    for (int i = 1; i < U; ++i) {
      if (first + i >= vectors) loaded[i] = TopUnit<T>::template none_<K>();
    }
    const A max = larger(tops.max, largest(loaded));
    tops.mask = (tops.max == max ? tops.mask : 0) | (unsigned long long)equal(loaded, max) << first * K;
    tops.max = max;
  }
  return tops;
}

// equal() of at most 32 elements in shared memory.
template <typename T>
__device__ __forceinline__ unsigned equal_of_row(const T* own, int size, acc_t<T> max) {
  unsigned mask = 0;  // from the uppermost bit down
  const auto take = [&](int e) { mask = mask >> 1 | unsigned(to_acc(own[e]) == max) << 31; };
  if constexpr (sizeof(T) == 2) {
    using P = typename Two<T>::type;
    const T rounded = from_acc<T>(max);  // exact
    const auto take_two = [&](int e) {
      const unsigned pair = __heq2_mask(*reinterpret_cast<const P*>(own + e), P{rounded, rounded});
      mask = mask >> 2 | ((pair & 0x80004000u) * 0x10001u & 0xc0000000u);
    };
    each_word_of_row(own, size, take, take_two);
  } else {
#pragma unroll 8
    for (int e = 0; e < size; ++e) take(e);
  }
  return mask >> (32 - size);
}

// Of a row in shared memory.
template <typename T> __device__ __forceinline__ Tops<acc_t<T>> tops_of_row(const T* own, int size) {
  acc_t<T> max = to_acc(own[0]);
  if constexpr (sizeof(T) == 2) {
    using P = typename Two<T>::type;
    P best{own[0], own[size - 1]};  // which may be none of a word's two
    const auto take_two = [&](int e) { best = __hmax2_nan(best, *reinterpret_cast<const P*>(own + e)); };
    each_word_of_row(own, size, [](int) {}, take_two);
    max = larger(to_acc(best.x), to_acc(best.y));
  } else {
#pragma unroll 8
    for (int e = 1; e < size; ++e) max = larger(max, to_acc(own[e]));
  }
  unsigned long long mask = equal_of_row(own, min(size, 32), max);
  if (size > 32) mask |= (unsigned long long)equal_of_row(own + 32, size - 32, max) << 32;
  return {max, mask};
}

// Rows of at most 64 elements, of which backward need not read any: masks[row] has the bits of those that are the largest,
// upper[row] the second 32 where there are more. Grid, block: kSmallRows threads, one for a row; shared memory, where rows
// are no whole vectors at 16-byte boundaries: see fetch_row().
template <typename T>
__global__ void amax_fwd_thread_per_row(const T* __restrict__ x, T* __restrict__ y, acc_t<T>* __restrict__ upper,
                                        unsigned* __restrict__ masks, acc_t<T> count, long long rows, long long size) {
  constexpr int K = kVecWidth<T>;
  const long long row = global_thread();
  Tops<acc_t<T>> tops;
  if (size % K == 0 && is_aligned16(x)) {
    if (row >= rows) return;
    tops = tops_of_vectors(x + row * size, int(size) / K);
    tops.mask &= ~0ull >> (64 - size);  // -inf, as what was not there
  } else {
    const T* own = fetch_row(x, rows, int(size));
    if (!own) return;
    tops = tops_of_row(own, int(size));
  }
  y[row] = from_acc<T>(tops.max);
  masks[row] = unsigned(tops.mask);
  if constexpr (sizeof(T) == 2) reinterpret_cast<unsigned*>(upper)[row] = unsigned(tops.mask >> 32);
  else upper[row] = 0;  // of 32 elements at most
}

// Grid, block: see finalize_slabs().
template <typename T>
__global__ void amax_fwd_finalize(const acc_t<T>* __restrict__ partial, T* __restrict__ y, acc_t<T>* __restrict__ ties,
                                  unsigned* __restrict__ where, acc_t<T> count, long long slabs, long long results) {
  using A = acc_t<T>;
  finalize_slabs<Top<A>>(TopResult<T>{{}, y, ties, where, count}, reinterpret_cast<const Top<A>*>(partial), slabs,
                         results);
}

// What a result's gradient is to the elements that are the largest and to the others. As PyTorch's: of NaN 0 / 0.
template <typename T> struct TopShare {
  static constexpr bool kReads = false;
  T max, chosen, other;
  bool tied;
  long long where;

  __device__ __forceinline__ bool wants_(long long at, int count) const {
    return tied || (at < where + kVecWidth<T> && where < at + count);
  }
  __device__ __forceinline__ T get_(T value) const { return to_acc(value) == to_acc(max) ? chosen : other; }
  __device__ __forceinline__ T rest_(long long at) const { return at == where ? chosen : other; }
};

template <typename T> struct TopShares {
  const T* __restrict__ y;
  const T* __restrict__ grad_y;
  const acc_t<T>* __restrict__ ties;
  const unsigned* __restrict__ where;

  __device__ __forceinline__ TopShare<T> operator()(long long result, int row) const {
    using A = acc_t<T>;
    const A grad = to_acc(grad_y[result]), count = ties[result];
    const A other = count == A(0) ? A(0) / count : grad * A(0), chosen = count == A(0) ? other : grad / count;
    return {y[result], from_acc<T>(chosen), from_acc<T>(other), count > A(1), (long long)where[result] - row};
  }
};

// Grid, block: see backward_rows(). Where one element alone is the largest, its vector is all that is read of x.
template <typename T>
__global__ void amax_bwd_rows(const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ grad_y,
                              const acc_t<T>* __restrict__ ties, const unsigned* __restrict__ where,
                              T* __restrict__ grad_x, long long rows, long long size, int parts) {
  backward_rows(x, grad_x, rows, size, parts, TopShares<T>{y, grad_y, ties, where});
}

// The same of the masks of amax_fwd_thread_per_row.
template <typename T> struct MaskedShare {
  using A = acc_t<T>;
  static constexpr bool kReads = false;
  A chosen, other;  // before settle_() the first is the result's gradient
  unsigned mask, upper;

  __device__ __forceinline__ void settle_(int at) {
    const int ties = __popc(mask) + __popc(upper);
    other = chosen * A(0);
    if (ties == 0) chosen = other = A(0) * infinity<A>();
    else if (ties > 1) chosen = sizeof(T) == 2 ? __fdividef(chosen, float(ties)) : chosen / A(ties);
    const unsigned long long both = mask | (unsigned long long)upper << 32;
    mask = at < 0 ? mask << -at : unsigned(both >> at);
  }
  static __device__ __forceinline__ MaskedShare either_(bool first, const MaskedShare& a, const MaskedShare& b) {
    return {first ? a.chosen : b.chosen, first ? a.other : b.other, a.mask | b.mask, 0};  // of the others each has none
  }
  __device__ __forceinline__ bool wants_(int, int) const { return false; }
  __device__ __forceinline__ A of_(A) const { return other; }
  __device__ __forceinline__ A rest_(int at) const { return mask >> at & 1 ? chosen : other; }
};

template <typename T> struct MaskedShares {
  using A = acc_t<T>;
  const T* __restrict__ grad_y;
  const A* __restrict__ upper;
  const unsigned* __restrict__ masks;
  bool two;  // words of a row's mask

  __device__ __forceinline__ MaskedShare<T> operator()(long long result, int) const {
    const unsigned more = two ? reinterpret_cast<const unsigned*>(upper)[result] : 0;
    return {to_acc(grad_y[result]), A(0), masks[result], more};
  }
};

// Grid, block: see backward_short_rows().
template <typename T>
__global__ void amax_bwd_masked_rows(const T* __restrict__ x, const T* __restrict__ grad_y,
                                     const acc_t<T>* __restrict__ upper, const unsigned* __restrict__ masks,
                                     T* __restrict__ grad_x, long long rows, int size, bool aligned,
                                     const __grid_constant__ Divisor by_size) {
  backward_short_rows(x, grad_x, rows, size, aligned, by_size, MaskedShares<T>{grad_y, upper, masks, size > 32});
}

// Grid, block: see backward_columns().
template <typename T>
__global__ void amax_bwd_columns(const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ grad_y,
                                 const acc_t<T>* __restrict__ ties, const unsigned* __restrict__ where,
                                 T* __restrict__ grad_x, long long rows, long long size, int period) {
  backward_columns(x, grad_x, rows, size, period, TopShares<T>{y, grad_y, ties, where});
}

template <typename T> struct TopGradient {
  using A = acc_t<T>;
  const T* __restrict__ x;
  const T* __restrict__ y;
  const T* __restrict__ grad_y;
  const A* __restrict__ ties;
  T* __restrict__ grad_x;
  const Layout<4>& layout;

  template <int K> __device__ __forceinline__ void apply_(const Offsets<4>& from, long long to) const {
    const Vec<T, K> xs = load_unit<K>(x + from.at[0], layout.stride[0][0] == 0);
    const Vec<T, K> ys = load_unit<K>(y + from.at[1], layout.stride[1][0] == 0);
    const Vec<T, K> grads = load_unit<K>(grad_y + from.at[2], layout.stride[2][0] == 0);
    const Vec<A, K> counts = load_unit<K>(ties + from.at[3], layout.stride[3][0] == 0);
    Vec<T, K> result;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A grad = to_acc(grads.data[k]), count = counts.data[k];
      const A other = count == A(0) ? A(0) / count : grad * A(0);
      result.data[k] = from_acc<T>(to_acc(xs.data[k]) == to_acc(ys.data[k]) ? grad / count : other);
    }
    store_vec<T, K>(grad_x + to, result);
  }
};

// Grid, block: see pointwise(). y, grad_y and ties are expanded to the shape of x; grad_x is dense.
template <typename T>
__global__ void amax_bwd_strided(const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ grad_y,
                                 const acc_t<T>* __restrict__ ties, T* __restrict__ grad_x,
                                 const __grid_constant__ Layout<4> layout, long long n) {
  constexpr int W = kVecWidth<T>;
  const bool fit = fits_vec<T, W>(x) && fits_vec<T, W>(y) && fits_vec<T, W>(grad_y) && fits_vec<T, W>(grad_x) &&
                   fits_vec<acc_t<T>, W>(ties);
  pointwise<false, W>(layout, n, fit, TopGradient<T>{x, y, grad_y, ties, grad_x, layout});
}
