// y[k]         = max over i of x[k, i], NaN where one is; ties[k] = how many are the largest, 0 of NaN
// grad_x[k, i] = grad_y[k] (x[k, i] = y[k]) / ties[k]
//
// Any dimensions, any strides, without a copy: see common/reduction.cuh. As PyTorch's, the gradient where y is NaN is
// 0 / 0. Bytes per element of x: forward sizeof(T), backward twice that. Two comparisons; a product and a division.
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 8192x8192 over 1 bf16 1932 / 1242,
// 8192x8192 over 1 fp32 3161 / 2084, 4095x4095 over 1 bf16 984 / 329, 8192x8192 over 0 bf16 1993 / 1251, 8192x8192
// over 0 fp32 3314 / 2080. Lost: the fold of {max, ties} takes several instructions an element, and odd widths of
// backward go by single elements.
#include "common/reduction.cuh"

// The largest of some numbers, and how many are that.
template <typename A> struct Top { A max, ties; };

template <typename A> __device__ __forceinline__ Top<A> shuffle_down(const Top<A>& value, int offset) {
  return {shuffle_down(value.max, offset), shuffle_down(value.ties, offset)};
}

template <typename A> struct TopRule {
  static __device__ __forceinline__ Top<A> identity_() { return {-infinity<A>(), A(0)}; }
  static __device__ __forceinline__ Top<A> combine_(Top<A> a, Top<A> b) {
    const A max = a.max == b.max && signbit(b.max) ? a.max : max_nan(a.max, b.max);  // +0 before -0, in any order
    return {max, (a.max == max ? a.ties : A(0)) + (b.max == max ? b.ties : A(0))};
  }
};

template <typename T> struct TopResult {
  TopRule<acc_t<T>> rule_;
  T* __restrict__ y;
  acc_t<T>* __restrict__ ties;

  __device__ __forceinline__ void store_(Top<acc_t<T>> top, long long, long long at) const {
    y[at] = from_acc<T>(top.max);
    ties[at] = top.ties;
  }
};

template <typename T> struct TopUnit {
  using A = acc_t<T>;
  TopRule<A> rule_;
  const T* __restrict__ x;
  Top<A>* __restrict__ partial;  // [slabs x results], null where there is one slab
  long long results;
  TopResult<T> result;

  template <int K, typename V>
  __device__ __forceinline__ void map_(const Offsets<2>& from, const Offsets<1>& at, const V&,
                                       Top<A> (&mapped)[K]) const {
    const Vec<T, K> unit = load_vec<T, K>(x + from.at[0] + at.at[0]);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A value = to_acc(unit.data[k]);
      mapped[k] = {value, A(value == value)};
    }
  }
  template <int K>
  __device__ __forceinline__ long long until_vector_(const Offsets<2>& from, long long begin, long long) const {
    return until_vector<K>(x + from.at[0] + begin);
  }
  __device__ __forceinline__ void store_(Top<A> value, long long slab, long long at) const {
    if (partial) partial[slab * results + at] = value;
    else result.store_(value, slab, at);
  }
};

// Grid, block: see fold(). `partial` holds pairs.
template <typename T, int FORM>
__global__ void amax_fwd(const T* __restrict__ x, T* __restrict__ y, acc_t<T>* __restrict__ ties,
                         acc_t<T>* __restrict__ partial, const __grid_constant__ Layout<2> kept,
                         const __grid_constant__ Layout<1> reduced, const __grid_constant__ Division division,
                         long long results) {
  using A = acc_t<T>;
  const TopUnit<T> unit{{}, x, reinterpret_cast<Top<A>*>(partial), results, {{}, y, ties}};
  fold<FORM, kVecWidth<T>, Top<A>>(unit, kept, reduced, division);
}

// Grid, block: see fold_slabs().
template <typename T>
__global__ void amax_finish(const acc_t<T>* __restrict__ partial, T* __restrict__ y, acc_t<T>* __restrict__ ties,
                            long long slabs, long long results) {
  using A = acc_t<T>;
  fold_slabs<Top<A>>(TopResult<T>{{}, y, ties}, reinterpret_cast<const Top<A>*>(partial), slabs, results);
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
      const A chosen = A(to_acc(xs.data[k]) == to_acc(ys.data[k]));
      result.data[k] = from_acc<T>(to_acc(grads.data[k]) * chosen / counts.data[k]);
    }
    store_vec<T, K>(grad_x + to, result);
  }
};

// Grid, block: see pointwise(). y, grad_y and ties are expanded to the shape of x; grad_x is dense.
template <typename T>
__global__ void amax_bwd(const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ grad_y,
                         const acc_t<T>* __restrict__ ties, T* __restrict__ grad_x,
                         const __grid_constant__ Layout<4> layout, long long n) {
  constexpr int W = kVecWidth<T>;
  const bool fit = fits_vec<T, W>(x) && fits_vec<T, W>(y) && fits_vec<T, W>(grad_y) && fits_vec<T, W>(grad_x) &&
                   fits_vec<acc_t<T>, W>(ties);
  pointwise<false, W>(layout, n, fit, TopGradient<T>{x, y, grad_y, ties, grad_x, layout});
}
