// What of the C and C++ libraries kernels of C++ extensions use, for a compiler that has neither. Where CCCL's headers are
// included too, both can be: these names are in std, those in cuda::std.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#ifdef CUPYOPS_STDINT_OF_CCCL
#include <cuda/std/cstdint>
#else
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
#endif
typedef long long ssize_t;
typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;

#ifndef M_PI
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#define HUGE_VALF INFINITY
#define HUGE_VAL __longlong_as_double(0x7ff0000000000000LL)
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#endif
#ifndef DBL_MAX
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#endif
#ifndef CHAR_BIT
#define CHAR_BIT 8
#endif
#ifndef INT_MAX
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807L
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615ul
#define LLONG_MAX 9223372036854775807LL
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ull
#endif
#ifndef INT32_MAX
#define INT8_MAX 127
#define INT8_MIN (-128)
#define UINT8_MAX 255
#define INT16_MAX 32767
#define INT16_MIN (-32768)
#define UINT16_MAX 65535
#define INT32_MAX 2147483647
#define INT32_MIN (-INT32_MAX - 1)
#define UINT32_MAX 4294967295u
#define INT64_MAX 9223372036854775807LL
#define INT64_MIN (-INT64_MAX - 1)
#define UINT64_MAX 18446744073709551615ull
#define SIZE_MAX 18446744073709551615ull
#endif
#ifndef assert
#define assert(condition) ((condition) ? (void)0 : __trap())
#endif

namespace std {

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  __host__ __device__ constexpr operator T() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool B>
using bool_constant = integral_constant<bool, B>;

template <typename T>
struct remove_const {
  using type = T;
};
template <typename T>
struct remove_const<const T> {
  using type = T;
};
template <typename T>
struct remove_volatile {
  using type = T;
};
template <typename T>
struct remove_volatile<volatile T> {
  using type = T;
};
template <typename T>
struct remove_reference {
  using type = T;
};
template <typename T>
struct remove_reference<T&> {
  using type = T;
};
template <typename T>
struct remove_reference<T&&> {
  using type = T;
};
template <typename T>
struct remove_pointer {
  using type = T;
};
template <typename T>
struct remove_pointer<T*> {
  using type = T;
};
template <typename T>
using remove_const_t = typename remove_const<T>::type;
template <typename T>
using remove_volatile_t = typename remove_volatile<T>::type;
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <typename T>
struct remove_cv {
  using type = remove_const_t<remove_volatile_t<T>>;
};
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
struct decay {
  using type = remove_cv_t<remove_reference_t<T>>;
};
template <typename T>
using decay_t = typename decay<T>::type;

template <typename T, typename U>
struct is_same : false_type {};
template <typename T>
struct is_same<T, T> : true_type {};
template <typename T, typename U>
inline constexpr bool is_same_v = is_same<T, U>::value;

template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F>
struct conditional {
  using type = T;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;
template <typename...>
using void_t = void;

template <typename T>
struct is_floating_point
    : bool_constant<is_same<remove_cv_t<T>, float>::value || is_same<remove_cv_t<T>, double>::value> {};
template <typename T>
inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
struct is_integral
    : bool_constant<is_same<remove_cv_t<T>, bool>::value || is_same<remove_cv_t<T>, char>::value ||
                    is_same<remove_cv_t<T>, signed char>::value || is_same<remove_cv_t<T>, unsigned char>::value ||
                    is_same<remove_cv_t<T>, short>::value || is_same<remove_cv_t<T>, unsigned short>::value ||
                    is_same<remove_cv_t<T>, int>::value || is_same<remove_cv_t<T>, unsigned>::value ||
                    is_same<remove_cv_t<T>, long>::value || is_same<remove_cv_t<T>, unsigned long>::value ||
                    is_same<remove_cv_t<T>, long long>::value || is_same<remove_cv_t<T>, unsigned long long>::value> {};
template <typename T>
inline constexpr bool is_integral_v = is_integral<T>::value;
template <typename T>
struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <typename T>
inline constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <typename T>
struct is_signed : bool_constant<is_arithmetic<T>::value && (T(-1) < T(0))> {};
template <typename T>
inline constexpr bool is_signed_v = is_signed<T>::value;
template <typename T>
struct is_pointer : false_type {};
template <typename T>
struct is_pointer<T*> : true_type {};
template <typename T>
inline constexpr bool is_pointer_v = is_pointer<T>::value;

template <typename T>
__host__ __device__ constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
template <typename T>
__host__ __device__ constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <typename T>
__host__ __device__ constexpr T max(std::initializer_list<T> values) {
  T found = *values.begin();
  for (const T* one = values.begin(); one != values.end(); ++one) found = *one > found ? *one : found;
  return found;
}
template <typename T>
__host__ __device__ constexpr T min(std::initializer_list<T> values) {
  T found = *values.begin();
  for (const T* one = values.begin(); one != values.end(); ++one) found = *one < found ? *one : found;
  return found;
}
template <typename T>
__host__ __device__ void swap(T& a, T& b) {
  T held = a;
  a = b;
  b = held;
}

#define CUPYOPS_FUNCTIONAL(name, sign)                                                               \
  template <typename T = void>                                                                       \
  struct name {                                                                                      \
    __host__ __device__ constexpr auto operator()(const T& a, const T& b) const { return a sign b; } \
  };                                                                                                 \
  template <>                                                                                        \
  struct name<void> {                                                                                \
    template <typename A, typename B>                                                                \
    __host__ __device__ constexpr auto operator()(const A& a, const B& b) const {                    \
      return a sign b;                                                                               \
    }                                                                                                \
  };
CUPYOPS_FUNCTIONAL(plus, +)
CUPYOPS_FUNCTIONAL(minus, -)
CUPYOPS_FUNCTIONAL(multiplies, *)
CUPYOPS_FUNCTIONAL(divides, /)
CUPYOPS_FUNCTIONAL(modulus, %)
CUPYOPS_FUNCTIONAL(less, <)
CUPYOPS_FUNCTIONAL(greater, >)
CUPYOPS_FUNCTIONAL(less_equal, <=)
CUPYOPS_FUNCTIONAL(greater_equal, >=)
CUPYOPS_FUNCTIONAL(equal_to, ==)
CUPYOPS_FUNCTIONAL(bit_and, &)
CUPYOPS_FUNCTIONAL(bit_or, |)
CUPYOPS_FUNCTIONAL(bit_xor, ^)
#undef CUPYOPS_FUNCTIONAL

}  // namespace std

// C++ has these functions of integers too, as of doubles; NVRTC finds them ambiguous
#define CUPYOPS_OF_INTEGER(name)                                                \
  template <typename T>                                                         \
  __device__ inline std::enable_if_t<std::is_integral_v<T>, double> name(T x) { \
    return name(static_cast<double>(x));                                        \
  }
#define CUPYOPS_OF_INTEGERS(name)                                                                             \
  template <typename A, typename B>                                                                           \
  __device__ inline std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, double> name(A a, B b) { \
    return name(static_cast<double>(a), static_cast<double>(b));                                              \
  }
CUPYOPS_OF_INTEGER(acos)
CUPYOPS_OF_INTEGER(acosh)
CUPYOPS_OF_INTEGER(asin)
CUPYOPS_OF_INTEGER(asinh)
CUPYOPS_OF_INTEGER(atan)
CUPYOPS_OF_INTEGER(atanh)
CUPYOPS_OF_INTEGER(cbrt)
CUPYOPS_OF_INTEGER(ceil)
CUPYOPS_OF_INTEGER(cos)
CUPYOPS_OF_INTEGER(cosh)
CUPYOPS_OF_INTEGER(erf)
CUPYOPS_OF_INTEGER(erfc)
CUPYOPS_OF_INTEGER(exp)
CUPYOPS_OF_INTEGER(exp2)
CUPYOPS_OF_INTEGER(expm1)
CUPYOPS_OF_INTEGER(fabs)
CUPYOPS_OF_INTEGER(floor)
CUPYOPS_OF_INTEGER(lgamma)
CUPYOPS_OF_INTEGER(log)
CUPYOPS_OF_INTEGER(log10)
CUPYOPS_OF_INTEGER(log1p)
CUPYOPS_OF_INTEGER(log2)
CUPYOPS_OF_INTEGER(nearbyint)
CUPYOPS_OF_INTEGER(rint)
CUPYOPS_OF_INTEGER(round)
CUPYOPS_OF_INTEGER(sin)
CUPYOPS_OF_INTEGER(sinh)
CUPYOPS_OF_INTEGER(sqrt)
CUPYOPS_OF_INTEGER(tan)
CUPYOPS_OF_INTEGER(tanh)
CUPYOPS_OF_INTEGER(tgamma)
CUPYOPS_OF_INTEGER(trunc)
CUPYOPS_OF_INTEGERS(atan2)
CUPYOPS_OF_INTEGERS(fmax)
CUPYOPS_OF_INTEGERS(fmin)
CUPYOPS_OF_INTEGERS(fmod)
CUPYOPS_OF_INTEGERS(hypot)
CUPYOPS_OF_INTEGERS(pow)

namespace std {
// `#include <cmath>`: the names are CUDA's own
using ::abs, ::acos, ::acosh, ::asin, ::asinh, ::atan, ::atan2, ::atanh, ::cbrt, ::ceil, ::copysign, ::cos, ::cosh;
using ::erf, ::erfc, ::exp, ::exp2, ::expm1, ::fabs, ::floor, ::fma, ::fmax, ::fmin, ::fmod, ::frexp, ::hypot;
using ::int16_t, ::int32_t, ::int64_t, ::int8_t, ::isfinite, ::isinf, ::isnan, ::ldexp, ::lgamma, ::log, ::log10;
using ::log1p, ::log2, ::nearbyint, ::pow, ::remainder, ::rint, ::round, ::signbit, ::sin, ::sinh, ::size_t, ::sqrt;
using ::tan, ::tanh, ::tgamma, ::trunc, ::uint16_t, ::uint32_t, ::uint64_t, ::uint8_t;

template <typename T>
struct numeric_limits {
  static constexpr bool is_specialized = false;
};

#define CUPYOPS_LIMITS(T, lowest_, max_, digits_)                                \
  template <>                                                                    \
  struct numeric_limits<T> {                                                     \
    static constexpr bool is_specialized = true;                                 \
    static constexpr bool is_integer = true;                                     \
    static constexpr bool is_iec559 = false;                                     \
    static constexpr bool is_signed = lowest_ < 0;                               \
    static constexpr bool has_infinity = false;                                  \
    static constexpr int digits = digits_;                                       \
    __host__ __device__ static constexpr T min() noexcept { return lowest_; }    \
    __host__ __device__ static constexpr T lowest() noexcept { return lowest_; } \
    __host__ __device__ static constexpr T max() noexcept { return max_; }       \
    __host__ __device__ static constexpr T epsilon() noexcept { return 0; }      \
    __host__ __device__ static constexpr T infinity() noexcept { return 0; }     \
  };
CUPYOPS_LIMITS(bool, false, true, 1)
CUPYOPS_LIMITS(char, -128, 127, 7)
CUPYOPS_LIMITS(signed char, -128, 127, 7)
CUPYOPS_LIMITS(unsigned char, 0, 255, 8)
CUPYOPS_LIMITS(short, -32768, 32767, 15)
CUPYOPS_LIMITS(unsigned short, 0, 65535, 16)
CUPYOPS_LIMITS(int, -2147483647 - 1, 2147483647, 31)
CUPYOPS_LIMITS(unsigned, 0, 4294967295u, 32)
CUPYOPS_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L, 63)
CUPYOPS_LIMITS(unsigned long, 0, 18446744073709551615ul, 64)
CUPYOPS_LIMITS(long long, -9223372036854775807LL - 1, 9223372036854775807LL, 63)
CUPYOPS_LIMITS(unsigned long long, 0, 18446744073709551615ull, 64)
#undef CUPYOPS_LIMITS

template <>
struct numeric_limits<float> {
  static constexpr bool is_specialized = true;
  static constexpr bool is_integer = false;
  static constexpr bool is_iec559 = true;
  static constexpr bool is_signed = true;
  static constexpr bool has_infinity = true;
  static constexpr int digits = 24;
  __host__ __device__ static constexpr float min() noexcept { return 1.175494351e-38f; }
  __host__ __device__ static constexpr float lowest() noexcept { return -3.402823466e+38f; }
  __host__ __device__ static constexpr float max() noexcept { return 3.402823466e+38f; }
  __host__ __device__ static constexpr float epsilon() noexcept { return 1.192092896e-07f; }
  __host__ __device__ static constexpr float infinity() noexcept { return __builtin_bit_cast(float, 0x7f800000); }
  __host__ __device__ static constexpr float quiet_NaN() noexcept { return __builtin_bit_cast(float, 0x7fc00000); }
};
template <>
struct numeric_limits<double> {
  static constexpr bool is_specialized = true;
  static constexpr bool is_integer = false;
  static constexpr bool is_iec559 = true;
  static constexpr bool is_signed = true;
  static constexpr bool has_infinity = true;
  static constexpr int digits = 53;
  __host__ __device__ static constexpr double min() noexcept { return 2.2250738585072014e-308; }
  __host__ __device__ static constexpr double lowest() noexcept { return -1.7976931348623157e+308; }
  __host__ __device__ static constexpr double max() noexcept { return 1.7976931348623157e+308; }
  __host__ __device__ static constexpr double epsilon() noexcept { return 2.2204460492503131e-16; }
  __host__ __device__ static constexpr double infinity() noexcept {
    return __builtin_bit_cast(double, 0x7ff0000000000000LL);
  }
  __host__ __device__ static constexpr double quiet_NaN() noexcept {
    return __builtin_bit_cast(double, 0x7ff8000000000000LL);
  }
};

}  // namespace std
