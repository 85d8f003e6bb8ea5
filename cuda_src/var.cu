// mean[k]      = (sum over i of x[k, i]) / n
// y[k]         = (sum over i of (x[k, i] - mean[k])^2) / (n - correction)
// grad_x[k, i] = slope[k] (x[k, i] - mean[k])
// slope        = grad_y 2 / (n - correction)
//
// Any dimensions and strides are reduced without a copy: see common/reduce/reduction.cuh. A thread takes a few elements about
// their own mean and merges them into what it has, of half types all about the first: E[x^2] - mean^2 would cancel. Rows of
// whole vectors of fp32, up to 32 KB, are in registers, and the mean comes first: see common/reduce/register_row.cuh; of short
// ones of other sizes a thread takes each: see common/tile/tiny_rows.cuh. Of a constant y is exactly 0. Bytes per element of
// x: forward sizeof(T), backward twice that. Forward takes about 4 operations on each element, backward two.
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 8192x8192 over 1 bf16 3243 / 3865, fp32
// 3867 / 3984; over 0 bf16 3169 / 3630, fp32 3669 / 3919; 65536x1000 over 1 bf16 3035 / 3789; 4095x4095 bf16 over 1 1895
// / 2946, over 0 1545 / 2529; over 1 bf16 4096x50257 3679 / 4057, 2097152x32 3307 / 3732, 1000003x17 2186 / 2917. Lost: the
// start of a launch, about 4 us; of fp32 over 0 a thread merges what it has of each of its columns every 8 rows.
#include "common/reduce/shifted_moments.cuh"
#include "common/reduce/reduce_backward.cuh"
#include "common/tile/tiny_rows.cuh"
#include "common/reduce/register_row.cuh"

// A share of a difference need not be exact.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

template <typename A> struct MomentsRule {
  static constexpr bool kEach = false;
  static __device__ __forceinline__ Moments<A> identity_() { return {}; }

  // A mean that is infinite stays so.
  static __device__ __forceinline__ A moved(A mean, A other, A share) {
    const A apart = other - mean;
    return isfinite(apart) ? mean + apart * share : mean + other;
  }
  static __device__ __forceinline__ Moments<A> combine_(const Moments<A>& a, const Moments<A>& b) {
    const A count = a.count + b.count, share = count > A(0) ? quotient(b.count, count) : A(0), apart = b.mean - a.mean;
    return {count, moved(a.mean, b.mean, share), a.square + b.square + apart * (apart * (a.count * share))};
  }

  // In pairs: where all are the same, exact for powers of two.
  template <int N> static __device__ __forceinline__ A total(const A (&values)[N]) {
    A sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = values[i];
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }

  // What is not there is 0.
  template <int U, int E, typename Number>
  static __device__ __forceinline__ void take_(Moments<A>& state, const A (&values)[U][E], int valid, int seen,
                                               Number) {
    const A added = A(valid * E), before = A(seen), all = added + before, each = A(1) / added, share = added / all;
    A sums[U], squares = A(0);
#pragma unroll
    for (int i = 0; i < U; ++i) sums[i] = total(values[i]);
    A about = mul_rn(total(sums), each);
    if (valid < U) {  // of other numbers it is rounded: the mean of a constant would not be that
      A left = A(0);
#pragma unroll
      for (int i = 0; i < U; ++i) {
#pragma unroll
        for (int e = 0; e < E; ++e) left += i < valid ? values[i][e] - about : A(0);
      }
      if (isfinite(left)) about += left * each;
    }
    const A apart = about - state.mean;
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (i >= valid) break;
#pragma unroll
      for (int e = 0; e < E; ++e) squares += (values[i][e] - about) * (values[i][e] - about);
    }
    state.square += squares + apart * (apart * (before * share));
    state.mean = moved(state.mean, about, share);
    state.count = all;
  }
};

// Of half types a thread has sums about the first element that it meets, from which others are less than the square root of
// their number times the deviation: that rounds them by less than they are themselves.
struct HalfRule : MomentsRule<float> {
  struct Local {
    Centred<float> sums;
    float count;
  };
  static __device__ __forceinline__ Local identity_() { return {}; }

  template <int U, int E, typename Number>
  static __device__ __forceinline__ void take_(Local& local, const float (&values)[U][E], int valid, int seen, Number) {
    Centred<float>& sums = local.sums;
    if (seen == 0) sums.about = isfinite(values[0][0]) ? values[0][0] : 0.0f;
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (i >= valid) break;
#pragma unroll
      for (int e = 0; e < E; ++e) sums.add(values[i][e]);
    }
    local.count += float(valid * E);
  }
};

__device__ __forceinline__ Moments<float> settled(const HalfRule::Local& local) {
  Moments<float> of = local.sums.moments(local.count);
  if (!isfinite(of.mean)) of.square = of.mean * 0.0f;
  return of;
}

template <typename T> struct RuleOf { using type = MomentsRule<T>; };
template <> struct RuleOf<__half> { using type = HalfRule; };
template <> struct RuleOf<__nv_bfloat16> { using type = HalfRule; };

template <typename A> __device__ __forceinline__ A sum_lanes(A value, int lanes) {
  for (int half = lanes / 2; half > 0; half /= 2) value += shuffle_xor(value, half);
  return value;
}

// About the mean of all: no division at each step, as a merge of two has it. That mean is the first one and what the others
// differ from it by, of a constant exactly it.
template <typename A>
__device__ __forceinline__ Moments<A> fold_lanes(const MomentsRule<A>&, const Moments<A>& value, int lanes) {
  const A count = sum_lanes(value.count, lanes), share = count > A(0) ? value.count / count : A(0);
  const A first = __shfl_sync(kFullMask, value.mean, 0, lanes);
  A mean = first + sum_lanes((value.mean - first) * share, lanes);
  if (__any_sync(kFullMask, !isfinite(mean))) {
    const A infinite = sum_lanes(value.mean * share, lanes);
    mean = isfinite(mean) ? mean : infinite;
  }
  const A apart = value.mean - mean;
  return {count, mean, sum_lanes(value.square + apart * (apart * value.count), lanes)};
}

__device__ __forceinline__ Moments<float> fold_lanes(const HalfRule&, const Moments<float>& value, int lanes) {
  return fold_lanes(MomentsRule<float>(), value, lanes);
}

template <typename T> struct VarResult {
  using A = acc_t<T>;
  MomentsRule<A> rule_;
  T* __restrict__ y;
  A* __restrict__ mean;
  A freedom;  // n - correction

  __device__ __forceinline__ void store_(const Moments<A>& value, long long, long long at) const {
    y[at] = from_acc<T>(value.square / freedom);
    mean[at] = value.mean;
  }
};

template <typename T> struct VarUnit : Elements<T> {
  using State = Moments<acc_t<T>>;
  typename RuleOf<T>::type rule_;
  State* __restrict__ partial;  // [slabs x results], null where there is one slab
  long long results;
  VarResult<T> result;

  __device__ __forceinline__ void store_(const State& value, long long slab, long long at) const {
    if (partial) partial[slab * results + at] = value;
    else result.store_(value, slab, at);
  }
};

// Grid, block: see fold(). `partial` holds Moments<A>.
template <typename T, int FORM>
__global__ void CUPYOPS_FOLD var_fwd_fold(const T* __restrict__ x, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                                          acc_t<T>* __restrict__ partial, acc_t<T> freedom,
                                          const __grid_constant__ Layout<2> kept,
                                          const __grid_constant__ Layout<1> reduced,
                                          const __grid_constant__ Division division, long long results) {
  using State = Moments<acc_t<T>>;
  const VarUnit<T> unit{{x}, {}, reinterpret_cast<State*>(partial), results, {{}, y, mean, freedom}};
  fold<FORM, kVecWidth<T>>(unit, kept, reduced, division);
}

// In two passes, the second of which finds what the mean of the first is off by. A mean that differs from an element by no
// more than what its sum was rounded is taken to be that: of a constant it is. Grid, block: see RegisterRow. Not for half
// types, whose elements would be unpacked twice.
template <typename T>
__global__ void __launch_bounds__(FOLD_THREADS, 3)
    var_fwd_registers(const T* __restrict__ x, T* __restrict__ y, T* __restrict__ mean, T freedom, long long rows,
                      long long size) {
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<T> shared[kWarp];
  const RegisterRow<T> row(x, rows, size);
  const T element = x[row.inside ? row.row * size : 0], count = T(int(size)), share = T(1) / count;
  const T part = row.sum_of([&](T value) { return value * share; });
  T about = row_reduce<Sum>(part, reinterpret_cast<T*>(shared));
  if (fabs(about - element) <= fabs(element) * T(sizeof(T) == 8 ? 0x1p-47 : 0x1p-18)) about = element;
  Pair<T> sums[W] = {};
#pragma unroll
  for (int k = 0; k < REGISTER_VECTORS; ++k) {
    row.tile.each_of(k, [&](int e) {
      const T apart = row.vectors[k][e] - about;
      sums[e].first += apart, sums[e].second += apart * apart;
    });
  }
  const Pair<T> all = row_reduce<Sum>(reduce_elements<Sum, 1, W>([&](int, int e) { return sums[e]; }), shared);
  if (threadIdx.x > 0 || !row.inside) return;
  Moments<T> of = Moments<T>::of(count, about, all.first, all.second);
  if (!isfinite(about)) of.mean = about;
  VarResult<T>{{}, y, mean, freedom}.store_(of, 0, row.row);
}

// Of a row, about its first element, from which others are less than the square root of their number times the deviation:
// that rounds no half type, and others go on about the mean.
template <typename T> __device__ __forceinline__ Moments<acc_t<T>> moments_of_row(const T* own, int size) {
  using A = acc_t<T>;
  const A count = A(size), share = A(1) / count;
  Centred<A> sums = {to_acc(own[0]), A(0), A(0)};
  const auto add = [&](A value, int) { sums.add(value); };
  each_of_row(own, size, add);
  A mean = sums.about + sums.sum * share;
  if (sizeof(T) > 2 || !isfinite(mean)) {
    if (!isfinite(mean)) {
      mean = A(0);
      each_of_row(own, size, [&](A value, int) { mean += value * share; });
    }
    sums = {mean, A(0), A(0)};
    each_of_row(own, size, add);
  }
  Moments<A> of = sums.moments(count);
  if (!isfinite(mean)) of.mean = mean;
  return of;
}

// Grid, block, shared memory: see fetch_row().
template <typename T>
__global__ void var_fwd_thread_per_row(const T* __restrict__ x, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                                       acc_t<T> freedom, long long rows, long long size) {
  const T* own = fetch_row(x, rows, int(size));
  if (own) VarResult<T>{{}, y, mean, freedom}.store_(moments_of_row(own, int(size)), 0, global_thread());
}

// Grid, block: see finalize_slabs().
template <typename T>
__global__ void var_fwd_finalize(const acc_t<T>* __restrict__ partial, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                                 acc_t<T> freedom, long long slabs, long long results) {
  using State = Moments<acc_t<T>>;
  const VarResult<T> result{{}, y, mean, freedom};
  finalize_slabs<State>(result, reinterpret_cast<const State*>(partial), slabs, results);
}

template <typename T> struct VarShare {
  using A = acc_t<T>;
  static constexpr bool kReads = true;
  A mean, slope;

  __device__ __forceinline__ void settle_(int) {}
  static __device__ __forceinline__ VarShare either_(bool first, const VarShare& a, const VarShare& b) {
    return {first ? a.mean : b.mean, first ? a.slope : b.slope};
  }
  __device__ __forceinline__ bool wants_(long long, int) const { return true; }
  __device__ __forceinline__ A of_(A value) const { return slope * (value - mean); }
  __device__ __forceinline__ T get_(T value) const { return from_acc<T>(of_(to_acc(value))); }
  __device__ __forceinline__ T rest_(long long) const { return {}; }
};

template <typename T> struct VarShares {
  const T* __restrict__ grad_y;
  const acc_t<T>* __restrict__ mean;
  acc_t<T> slope;  // of a gradient of 1

  __device__ __forceinline__ VarShare<T> operator()(long long result, int) const {
    return {mean[result], to_acc(grad_y[result]) * slope};
  }
};

// Grid, block: see backward_rows().
template <typename T>
__global__ void var_bwd_rows(const T* __restrict__ x, const T* __restrict__ grad_y, const acc_t<T>* __restrict__ mean,
                             T* __restrict__ grad_x, acc_t<T> slope, long long rows, long long size, int parts) {
  backward_rows(x, grad_x, rows, size, parts, VarShares<T>{grad_y, mean, slope});
}

// Grid, block: see backward_short_rows().
template <typename T>
__global__ void var_bwd_short_rows(const T* __restrict__ x, const T* __restrict__ grad_y,
                                   const acc_t<T>* __restrict__ mean, T* __restrict__ grad_x, acc_t<T> slope,
                                   long long rows, int size, bool aligned, const __grid_constant__ Divisor by_size) {
  backward_short_rows(x, grad_x, rows, size, aligned, by_size, VarShares<T>{grad_y, mean, slope});
}

// Grid, block: see backward_columns().
template <typename T>
__global__ void var_bwd_columns(const T* __restrict__ x, const T* __restrict__ grad_y,
                                const acc_t<T>* __restrict__ mean, T* __restrict__ grad_x, acc_t<T> slope,
                                long long rows, long long size, int period) {
  backward_columns(x, grad_x, rows, size, period, VarShares<T>{grad_y, mean, slope});
}

template <typename T> struct VarGradient {
  using A = acc_t<T>;
  const T* __restrict__ x;
  const T* __restrict__ grad_y;
  const A* __restrict__ mean;
  A slope;  // of a gradient of 1
  T* __restrict__ grad_x;
  const Layout<3>& layout;

  template <int K> __device__ __forceinline__ void apply_(const Offsets<3>& from, long long to) const {
    const Vec<T, K> xs = load_unit<K>(x + from.at[0], layout.stride[0][0] == 0);
    const Vec<T, K> grads = load_unit<K>(grad_y + from.at[1], layout.stride[1][0] == 0);
    const Vec<A, K> means = load_unit<K>(mean + from.at[2], layout.stride[2][0] == 0);
    Vec<T, K> result;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A own = to_acc(grads.data[k]) * slope;
      result.data[k] = from_acc<T>(own * (to_acc(xs.data[k]) - means.data[k]));
    }
    store_vec<T, K>(grad_x + to, result);
  }
};

// Grid, block: see pointwise(). grad_y and mean are expanded to the shape of x; grad_x is dense.
template <typename T>
__global__ void var_bwd_strided(const T* __restrict__ x, const T* __restrict__ grad_y,
                                const acc_t<T>* __restrict__ mean, T* __restrict__ grad_x, acc_t<T> slope,
                                const __grid_constant__ Layout<3> layout, long long n) {
  constexpr int W = kVecWidth<T>;
  const bool fit = fits_vec<T, W>(x) && fits_vec<T, W>(grad_y) && fits_vec<T, W>(grad_x) && fits_vec<acc_t<T>, W>(mean);
  pointwise<false, W>(layout, n, fit, VarGradient<T>{x, grad_y, mean, slope, grad_x, layout});
}
