// Kernels made of a line of C: any number of inputs and outputs of any types, walked by a Layout of broadcast.cuh.
#pragma once

#include "common/elementwise/broadcast.cuh"
#include "common/elementwise/sigmoid.cuh"

// NVRTC defines none of these. Double, as in <math.h>; the bodies convert them to the type that they compute in.
#ifndef INFINITY
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#endif
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif
#ifndef M_E
#define M_E 2.718281828459045
#endif

// What bodies call. In CUDA's own functions an integer beside a float may mean double, or be ambiguous.
namespace expression {

template <typename X> struct IsFloating { static constexpr bool value = false; };
template <> struct IsFloating<float> { static constexpr bool value = true; };
template <> struct IsFloating<double> { static constexpr bool value = true; };

// The type of a + b + ...: integers take that of the floating ones beside them.
template <typename... X> using sum_t = decltype((+X() + ...));

// The same where there is a floating one among them; else double, as in C.
template <bool FLOATING, typename S> struct FloatingOr { using type = S; };
template <typename S> struct FloatingOr<false, S> { using type = double; };
template <typename... X> using floating_t = typename FloatingOr<(IsFloating<X>::value || ...), sum_t<X...>>::type;

#define CUPYOPS_FUNCTION(name)                                            \
  template <typename... X> __device__ __forceinline__ auto name(X... x) { \
    using F = floating_t<X...>;                                           \
    return ::name(static_cast<F>(x)...);                                  \
  }
CUPYOPS_FUNCTION(exp)
CUPYOPS_FUNCTION(exp2)
CUPYOPS_FUNCTION(exp10)
CUPYOPS_FUNCTION(expm1)
CUPYOPS_FUNCTION(log)
CUPYOPS_FUNCTION(log2)
CUPYOPS_FUNCTION(log10)
CUPYOPS_FUNCTION(log1p)
CUPYOPS_FUNCTION(sqrt)
CUPYOPS_FUNCTION(rsqrt)
CUPYOPS_FUNCTION(cbrt)
CUPYOPS_FUNCTION(sin)
CUPYOPS_FUNCTION(cos)
CUPYOPS_FUNCTION(tan)
CUPYOPS_FUNCTION(asin)
CUPYOPS_FUNCTION(acos)
CUPYOPS_FUNCTION(atan)
CUPYOPS_FUNCTION(atan2)
CUPYOPS_FUNCTION(sinh)
CUPYOPS_FUNCTION(cosh)
CUPYOPS_FUNCTION(tanh)
CUPYOPS_FUNCTION(asinh)
CUPYOPS_FUNCTION(acosh)
CUPYOPS_FUNCTION(atanh)
CUPYOPS_FUNCTION(erf)
CUPYOPS_FUNCTION(erfc)
CUPYOPS_FUNCTION(lgamma)
CUPYOPS_FUNCTION(floor)
CUPYOPS_FUNCTION(ceil)
CUPYOPS_FUNCTION(trunc)
CUPYOPS_FUNCTION(rint)
CUPYOPS_FUNCTION(round)
CUPYOPS_FUNCTION(fabs)
CUPYOPS_FUNCTION(fmax)
CUPYOPS_FUNCTION(fmin)
CUPYOPS_FUNCTION(fmod)
CUPYOPS_FUNCTION(pow)
CUPYOPS_FUNCTION(hypot)
CUPYOPS_FUNCTION(copysign)
CUPYOPS_FUNCTION(fma)
CUPYOPS_FUNCTION(normcdf)
CUPYOPS_FUNCTION(isnan)
CUPYOPS_FUNCTION(isinf)
CUPYOPS_FUNCTION(isfinite)
CUPYOPS_FUNCTION(signbit)
#undef CUPYOPS_FUNCTION

template <typename X> __device__ __forceinline__ auto abs(X x) {
  const sum_t<X> value = x;
  if constexpr (IsFloating<X>::value) return ::fabs(value);
  else return value < 0 ? -value : value;
}

// As torch.maximum and torch.minimum: NaN wins. fmax and fmin drop it.
template <typename X, typename Y> __device__ __forceinline__ auto max(X x, Y y) {
  const sum_t<X, Y> a = x, b = y;
  return (a > b || a != a) ? a : b;
}
template <typename X, typename Y> __device__ __forceinline__ auto min(X x, Y y) {
  const sum_t<X, Y> a = x, b = y;
  return (a < b || a != a) ? a : b;
}

template <typename X> __device__ __forceinline__ auto sigmoid(X x) {
  return ::sigmoid(static_cast<floating_t<X>>(x)).s;
}

// As exactly as a result of 16 bits can show: the error of a number of fp32 is 10 ulp at most. Without branches, which would keep the
// compiler from computing several elements at a time.
namespace nearly {

template <typename X> __device__ __forceinline__ auto exp(X x) {
  using F = floating_t<X>;
  if constexpr (sizeof(F) == 4) return exp_for<__half>(static_cast<F>(x));
  else return ::exp(static_cast<F>(x));
}

template <typename X> __device__ __forceinline__ auto sigmoid(X x) {
  using F = floating_t<X>;
  if constexpr (sizeof(F) == 4) return sigmoid_for<__half>(static_cast<F>(x)).s;
  else return ::sigmoid(static_cast<F>(x)).s;
}

// Between 1/2 and 2 the error is 2^-22, else that of the result's last place.
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of small x a polynomial, whose error is below an ulp; else 1 - 2 / (e^2|x| + 1), with the sign of x.
__device__ __forceinline__ float tanh_of(float x) {
  const float size = fabsf(x), square = x * x, e = fast_exp2(size * 2.8853900817779268f);
  float small = fmaf(square, 0.01643758f, -0.05267181f);
  small = fmaf(square, small, 0.13320725f);
  small = fmaf(square, small, -0.33332947f);
  small = fmaf(size * square, small, size);
  return copysignf(size < 0.55f ? small : fmaf(-2.0f, fast_reciprocal(e + 1.0f), 1.0f), x);
}

template <typename X> __device__ __forceinline__ auto tanh(X x) {
  using F = floating_t<X>;
  if constexpr (sizeof(F) == 4) return tanh_of(static_cast<F>(x));
  else return ::tanh(static_cast<F>(x));
}

// The same: of small x a polynomial, else the logarithm of x + 1.
__device__ __forceinline__ float log1p_of(float x) {
  float small = fmaf(x, 0.15734637f, -0.18119348f);
  small = fmaf(x, small, 0.19945267f);
  small = fmaf(x, small, -0.24954057f);
  small = fmaf(x, small, 0.33333926f);
  small = fmaf(x, small, -0.50000354f);
  return fabsf(x) < 0.25f ? fmaf(x * x, small, x) : 0.6931471805599453f * fast_log2(x + 1.0f);
}

template <typename X> __device__ __forceinline__ auto log1p(X x) {
  using F = floating_t<X>;
  if constexpr (sizeof(F) == 4) return log1p_of(static_cast<F>(x));
  else return ::log1p(static_cast<F>(x));
}

}  // namespace nearly
}  // namespace expression

// An element as a body takes it: half types in float, integers as they are.
template <typename X> __device__ __forceinline__ X to_body(X value) { return value; }
__device__ __forceinline__ float to_body(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_body(__nv_bfloat16 value) { return __bfloat162float(value); }

// The one rounding, at the store.
template <typename T, typename X> __device__ __forceinline__ T from_body(X value) { return static_cast<T>(value); }
template <> __device__ __forceinline__ __half from_body<__half>(float value) { return __float2half_rn(value); }
template <> __device__ __forceinline__ __half from_body<__half>(double value) { return __double2half(value); }
template <> __device__ __forceinline__ __nv_bfloat16 from_body<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_body<__nv_bfloat16>(double value) {
  return __double2bfloat16(value);
}

template <typename X, int W> __device__ __forceinline__ bool fits_vec(const X* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % sizeof(Vec<X, W>) == 0;
}

// W neighbours, or one number W times.
template <int W, typename X> __device__ __forceinline__ Vec<X, W> load_unit(const X* pointer, bool broadcast) {
  return broadcast ? splat<X, W>(*pointer) : load_vec<X, W>(pointer);
}

template <int N> __device__ __forceinline__ Offsets<N> everywhere(long long offset) {
  Offsets<N> offsets;
#pragma unroll
  for (int j = 0; j < N; ++j) offsets.at[j] = offset;
  return offsets;
}

// Grid: any, one dimension; ceil(n / (blockDim.x * layout.width)) blocks give each thread one unit. Each thread owns the
// vectors, then the single elements, of its grid-stride. unit.apply_<K>(from, to) works on K elements: those at `from` in
// the inputs, and from `to` on in the outputs, which are dense. Unless `all_aligned`, which the caller knows from the
// addresses, every element is on its own. FLAT: the inputs are laid out as the outputs are, and `layout` is not read.
template <bool FLAT, int W, int N, typename Unit>
__device__ __forceinline__ void pointwise(const Layout<N>& layout, long long n, bool all_aligned, const Unit& unit) {
  const long long vectors = (FLAT || layout.width == W) && all_aligned ? n / W : 0;
  for (long long v = global_thread(); v < vectors; v += global_threads()) {
    if constexpr (FLAT) unit.template apply_<W>(everywhere<N>(v * W), v * W);
    else unit.template apply_<W>(locate(layout, v), v * W);
  }
  for (long long i = vectors * W + global_thread(); i < n; i += global_threads()) {
    if constexpr (FLAT) {
      unit.template apply_<1>(everywhere<N>(i), i);
      continue;
    }
    const bool single = layout.width == 1;
    Offsets<N> from = locate(layout, single ? i : i / layout.width);
    const int lane = single ? 0 : static_cast<int>(i % layout.width);
#pragma unroll
    for (int j = 0; j < N; ++j) from.at[j] += layout.stride[j][0] == 0 ? 0 : lane;
    unit.template apply_<1>(from, i);
  }
}

// A gradient in T; or, where `wide` says that it is still to be summed, in acc_t<T>. Null is one that nobody wants.
template <typename T, int W>
__device__ __forceinline__ void store_gradient(void* __restrict__ gradient, bool wide, long long at,
                                               const Vec<acc_t<T>, W>& values) {
  if (gradient == nullptr) return;
  if (wide) {
    store_vec<acc_t<T>, W>(static_cast<acc_t<T>*>(gradient) + at, values);
    return;
  }
  Vec<T, W> rounded;
#pragma unroll
  for (int k = 0; k < W; ++k) rounded.data[k] = from_body<T>(values.data[k]);
  store_vec<T, W>(static_cast<T*>(gradient) + at, rounded);
}
