// A number with its derivative: a body of C computed with these gives the derivative beside the value, by forward
// differentiation. What PyTorch says where a function has none is said here.
#pragma once

#include "common/elementwise/expression.cuh"

namespace expression {

template <typename X> struct IsNumber { static constexpr bool value = IsFloating<X>::value; };
template <> struct IsNumber<bool> { static constexpr bool value = true; };
template <> struct IsNumber<int> { static constexpr bool value = true; };
template <> struct IsNumber<long> { static constexpr bool value = true; };
template <> struct IsNumber<long long> { static constexpr bool value = true; };

template <bool CONDITION> struct When {};
template <> struct When<true> { using type = int; };
template <typename X> using if_number_t = typename When<IsNumber<X>::value>::type;

// moves: whether it depends on what is differentiated by; if not, the slope is 0. The compiler knows it, but behind a branch.
struct Dual {
  float value, slope;
  bool moves;

  Dual() = default;
  __device__ __forceinline__ Dual(float value, float slope, bool moves = true)
      : value(value), slope(slope), moves(moves) {}
  template <typename X, if_number_t<X> = 0> __device__ __forceinline__ Dual(X x)
      : value(static_cast<float>(x)), slope(0), moves(false) {}
  template <typename X, if_number_t<X> = 0> __device__ __forceinline__ explicit operator X() const {
    return static_cast<X>(value);
  }
};

// f(x), of which the derivative is `slope`. Where x does not move, neither does f(x), though the derivative may be infinite.
__device__ __forceinline__ Dual chain(const Dual& x, float value, float slope) {
  return {value, x.moves ? slope * x.slope : 0, x.moves};
}
__device__ __forceinline__ Dual chain(const Dual& x, const Dual& y, float value, float by_x, float by_y) {
  return {value, (x.moves ? by_x * x.slope : 0) + (y.moves ? by_y * y.slope : 0), x.moves || y.moves};
}

__device__ __forceinline__ Dual operator+(const Dual& x) { return x; }
__device__ __forceinline__ Dual operator-(const Dual& x) { return {-x.value, -x.slope, x.moves}; }
__device__ __forceinline__ bool operator!(const Dual& x) { return x.value == 0; }

// Each of two numbers, of which one at least is a Dual.
#define CUPYOPS_OF_TWO(name, type)                                                                     \
  template <typename X, if_number_t<X> = 0> __device__ __forceinline__ type name(const Dual& x, X y) { \
    return name(x, Dual(y));                                                                           \
  }                                                                                                    \
  template <typename X, if_number_t<X> = 0> __device__ __forceinline__ type name(X x, const Dual& y) { \
    return name(Dual(x), y);                                                                           \
  }

__device__ __forceinline__ Dual operator+(const Dual& x, const Dual& y) {
  return {x.value + y.value, x.slope + y.slope, x.moves || y.moves};
}
__device__ __forceinline__ Dual operator-(const Dual& x, const Dual& y) {
  return {x.value - y.value, x.slope - y.slope, x.moves || y.moves};
}
__device__ __forceinline__ Dual operator*(const Dual& x, const Dual& y) {
  return chain(x, y, x.value * y.value, y.value, x.value);
}
__device__ __forceinline__ Dual operator/(const Dual& x, const Dual& y) {
  const float value = x.value / y.value;
  return chain(x, y, value, 1 / y.value, -value / y.value);
}
CUPYOPS_OF_TWO(operator+, Dual)
CUPYOPS_OF_TWO(operator-, Dual)
CUPYOPS_OF_TWO(operator*, Dual)
CUPYOPS_OF_TWO(operator/, Dual)

template <typename X> __device__ __forceinline__ Dual& operator+=(Dual& x, const X& y) { return x = x + y; }
template <typename X> __device__ __forceinline__ Dual& operator-=(Dual& x, const X& y) { return x = x - y; }
template <typename X> __device__ __forceinline__ Dual& operator*=(Dual& x, const X& y) { return x = x * y; }
template <typename X> __device__ __forceinline__ Dual& operator/=(Dual& x, const X& y) { return x = x / y; }
__device__ __forceinline__ Dual& operator++(Dual& x) { return x += 1; }
__device__ __forceinline__ Dual& operator--(Dual& x) { return x -= 1; }
__device__ __forceinline__ Dual operator++(Dual& x, int) { return ++x - 1; }
__device__ __forceinline__ Dual operator--(Dual& x, int) { return --x + 1; }

#define CUPYOPS_COMPARISON(op)                                                                             \
  __device__ __forceinline__ bool operator op(const Dual& x, const Dual& y) { return x.value op y.value; } \
  CUPYOPS_OF_TWO(operator op, bool)
CUPYOPS_COMPARISON(<)
CUPYOPS_COMPARISON(>)
CUPYOPS_COMPARISON(<=)
CUPYOPS_COMPARISON(>=)
CUPYOPS_COMPARISON(==)
CUPYOPS_COMPARISON(!=)
#undef CUPYOPS_COMPARISON

// name(x), whose derivative is an expression of x and y = name(x).
#define CUPYOPS_FUNCTION(name, derivative)                   \
  __device__ __forceinline__ Dual name(const Dual& number) { \
    const float x = number.value, y = name(x);               \
    return chain(number, y, derivative);                     \
  }
CUPYOPS_FUNCTION(exp, y)
CUPYOPS_FUNCTION(exp2, y * 0.6931471805599453f)
CUPYOPS_FUNCTION(exp10, y * 2.302585092994046f)
CUPYOPS_FUNCTION(expm1, y + 1)
CUPYOPS_FUNCTION(log, 1 / x)
CUPYOPS_FUNCTION(log2, 1.4426950408889634f / x)
CUPYOPS_FUNCTION(log10, 0.4342944819032518f / x)
CUPYOPS_FUNCTION(log1p, 1 / (x + 1))
CUPYOPS_FUNCTION(sqrt, 0.5f / y)
CUPYOPS_FUNCTION(rsqrt, -0.5f * y * y * y)
CUPYOPS_FUNCTION(sin, ::cosf(x))
CUPYOPS_FUNCTION(cos, -::sinf(x))
CUPYOPS_FUNCTION(tan, 1 + y * y)
CUPYOPS_FUNCTION(asin, ::rsqrtf(1 - x * x))
CUPYOPS_FUNCTION(acos, -::rsqrtf(1 - x * x))
CUPYOPS_FUNCTION(atan, 1 / (1 + x * x))
CUPYOPS_FUNCTION(sinh, ::coshf(x))
CUPYOPS_FUNCTION(cosh, ::sinhf(x))
CUPYOPS_FUNCTION(tanh, 1 - y * y)
CUPYOPS_FUNCTION(asinh, ::rsqrtf(x* x + 1))
CUPYOPS_FUNCTION(acosh, ::rsqrtf(x* x - 1))
CUPYOPS_FUNCTION(atanh, 1 / (1 - x * x))
CUPYOPS_FUNCTION(erf, 1.1283791670955126f * ::expf(-x * x))
CUPYOPS_FUNCTION(erfc, -1.1283791670955126f * ::expf(-x * x))
CUPYOPS_FUNCTION(sigmoid, y * (1 - y))
CUPYOPS_FUNCTION(normcdf, 0.3989422804014327f * ::expf(-0.5f * x * x))
CUPYOPS_FUNCTION(fabs, x > 0 ? 1 : x < 0 ? -1 : x)
CUPYOPS_FUNCTION(abs, x > 0 ? 1 : x < 0 ? -1 : x)
CUPYOPS_FUNCTION(floor, 0)
CUPYOPS_FUNCTION(ceil, 0)
CUPYOPS_FUNCTION(trunc, 0)
CUPYOPS_FUNCTION(rint, 0)
CUPYOPS_FUNCTION(round, 0)
#undef CUPYOPS_FUNCTION

#define CUPYOPS_TRUTH(name) \
  __device__ __forceinline__ bool name(const Dual& x) { return name(x.value); }
CUPYOPS_TRUTH(isnan)
CUPYOPS_TRUTH(isinf)
CUPYOPS_TRUTH(isfinite)
CUPYOPS_TRUTH(signbit)
#undef CUPYOPS_TRUTH

__device__ __forceinline__ Dual pow(const Dual& x, const Dual& y) {
  const float value = pow(x.value, y.value);
  const float by_x = y.value == 0 ? 0 : y.value * pow(x.value, y.value - 1);
  return chain(x, y, value, by_x, x.value == 0 && y.value >= 0 ? 0 : value * ::logf(x.value));
}
__device__ __forceinline__ Dual atan2(const Dual& x, const Dual& y) {
  const float square = x.value * x.value + y.value * y.value;
  return chain(x, y, atan2(x.value, y.value), y.value / square, -x.value / square);
}
__device__ __forceinline__ Dual fmod(const Dual& x, const Dual& y) {
  return chain(x, y, fmod(x.value, y.value), 1, -::truncf(x.value / y.value));
}
__device__ __forceinline__ Dual hypot(const Dual& x, const Dual& y) {
  const float value = hypot(x.value, y.value);
  return chain(x, y, value, x.value / value, y.value / value);
}
__device__ __forceinline__ Dual copysign(const Dual& x, const Dual& y) {
  const float value = copysign(x.value, y.value);
  return chain(x, value, x.value == 0 ? 0 : signbit(x.value) == signbit(y.value) ? 1 : -1);
}
__device__ __forceinline__ Dual fmax(const Dual& x, const Dual& y) {
  return x.value >= y.value || isnan(y.value) ? x : y;
}
__device__ __forceinline__ Dual fmin(const Dual& x, const Dual& y) {
  return x.value <= y.value || isnan(y.value) ? x : y;
}
__device__ __forceinline__ Dual max(const Dual& x, const Dual& y) {  // of two that are equal the mean
  const float slope = x.value == y.value ? 0.5f * (x.slope + y.slope) : x.value > y.value ? x.slope : y.slope;
  return {max(x.value, y.value), slope, x.moves || y.moves};
}
__device__ __forceinline__ Dual min(const Dual& x, const Dual& y) {
  const float slope = x.value == y.value ? 0.5f * (x.slope + y.slope) : x.value < y.value ? x.slope : y.slope;
  return {min(x.value, y.value), slope, x.moves || y.moves};
}
CUPYOPS_OF_TWO(pow, Dual)
CUPYOPS_OF_TWO(atan2, Dual)
CUPYOPS_OF_TWO(fmod, Dual)
CUPYOPS_OF_TWO(hypot, Dual)
CUPYOPS_OF_TWO(copysign, Dual)
CUPYOPS_OF_TWO(fmax, Dual)
CUPYOPS_OF_TWO(fmin, Dual)
CUPYOPS_OF_TWO(max, Dual)
CUPYOPS_OF_TWO(min, Dual)
#undef CUPYOPS_OF_TWO

template <typename X, typename Y, typename Z> __device__ __forceinline__ Dual fma_of(X x, Y y, Z z) {
  return Dual(x) * Dual(y) + Dual(z);
}
template <typename Y, typename Z> __device__ __forceinline__ Dual fma(Dual x, Y y, Z z) { return fma_of(x, y, z); }
template <typename X, typename Z> __device__ __forceinline__ Dual fma(X x, Dual y, Z z) { return fma_of(x, y, z); }
template <typename Z> __device__ __forceinline__ Dual fma(Dual x, Dual y, Z z) { return fma_of(x, y, z); }
template <typename X, typename Y> __device__ __forceinline__ Dual fma(X x, Y y, Dual z) { return fma_of(x, y, z); }
template <typename Y> __device__ __forceinline__ Dual fma(Dual x, Y y, Dual z) { return fma_of(x, y, z); }
template <typename X> __device__ __forceinline__ Dual fma(X x, Dual y, Dual z) { return fma_of(x, y, z); }
__device__ __forceinline__ Dual fma(Dual x, Dual y, Dual z) { return fma_of(x, y, z); }

}  // namespace expression
