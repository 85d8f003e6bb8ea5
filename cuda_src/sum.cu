// y[k]    = sum over i of x[k, i]               sum
// y[k]    = (sum over i of x[k, i]) / divisor   mean, where the divisor is how many they are
// grad_x  = grad_y, for mean divided too, broadcast: a view, for which there is no kernel
//
// Any dimensions, any strides, without a copy: see common/reduction.cuh. Summed in acc_t<T>, divided once, rounded once.
// Bytes per element of x: sizeof(T). One addition.
// Reached on an H200 (GB/s of those bytes; a copy: 4251): 8192x8192 over 1 bf16 3065, 8192x8192 over 1 fp16 3093,
// 8192x8192 over 1 fp32 3531, 8192x8192 over 0 bf16 2705, 8192x8192 over 0 fp32 3364. Lost: the start of a small
// launch, and a second launch where a sum is cut.
#include "common/reduction.cuh"

template <typename A> struct SumRule {
  static __device__ __forceinline__ A identity_() { return A(0); }
  static __device__ __forceinline__ A combine_(A a, A b) { return a + b; }
};

// A result in T; or in acc_t<T>, where it is `wide`.
template <typename T> struct SumResult {
  SumRule<acc_t<T>> rule_;
  void* __restrict__ y;
  acc_t<T> divisor;
  bool wide;

  __device__ __forceinline__ void store_(acc_t<T> total, long long, long long at) const {
    if (wide) static_cast<acc_t<T>*>(y)[at] = total / divisor;
    else static_cast<T*>(y)[at] = from_acc<T>(total / divisor);
  }
};

template <typename T> struct SumUnit {
  using A = acc_t<T>;
  SumRule<A> rule_;
  const T* __restrict__ x;
  A* __restrict__ partial;  // [slabs x results], null where there is one slab
  long long results;
  SumResult<T> result;

  template <int K, typename V>
  __device__ __forceinline__ void map_(const Offsets<2>& from, const Offsets<1>& at, const V&, A (&mapped)[K]) const {
    const Vec<T, K> unit = load_vec<T, K>(x + from.at[0] + at.at[0]);
#pragma unroll
    for (int k = 0; k < K; ++k) mapped[k] = to_acc(unit.data[k]);
  }
  template <int K>
  __device__ __forceinline__ long long until_vector_(const Offsets<2>& from, long long begin, long long) const {
    return until_vector<K>(x + from.at[0] + begin);
  }
  __device__ __forceinline__ void store_(A value, long long slab, long long at) const {
    if (partial) partial[slab * results + at] = value;
    else result.store_(value, slab, at);
  }
};

// Grid, block: see fold().
template <typename T, int FORM>
__global__ void sum_fwd(const T* __restrict__ x, void* __restrict__ y, acc_t<T>* __restrict__ partial, bool wide,
                        acc_t<T> divisor, const __grid_constant__ Layout<2> kept,
                        const __grid_constant__ Layout<1> reduced, const __grid_constant__ Division division,
                        long long results) {
  const SumUnit<T> unit{{}, x, partial, results, {{}, y, divisor, wide}};
  fold<FORM, kVecWidth<T>, acc_t<T>>(unit, kept, reduced, division);
}

// Grid, block: see fold_slabs().
template <typename T>
__global__ void sum_finish(const acc_t<T>* __restrict__ partial, void* __restrict__ y, bool wide, acc_t<T> divisor,
                           long long slabs, long long results) {
  fold_slabs<acc_t<T>>(SumResult<T>{{}, y, divisor, wide}, partial, slabs, results);
}
