// PyTorch's half types: numbers of 16 bits that are computed with in fp32, and rounded at each operation.
#pragma once

#include "extension/standard.cuh"

namespace c10 {

struct alignas(2) Half {
  unsigned short x;

  struct from_bits_t {};
  Half() = default;
  __host__ __device__ constexpr Half(unsigned short bits, from_bits_t) : x(bits) {}
  __device__ Half(float value) : x(__half_as_ushort(__float2half(value))) {}
  __device__ Half(const __half& value) : x(__half_as_ushort(value)) {}
  __device__ operator float() const { return __half2float(native()); }
  __device__ operator __half() const { return native(); }
  __host__ __device__ static constexpr from_bits_t from_bits() { return from_bits_t(); }

 private:
  __device__ __half native() const { return __ushort_as_half(x); }
};

struct alignas(2) BFloat16 {
  unsigned short x;

  struct from_bits_t {};
  BFloat16() = default;
  __host__ __device__ constexpr BFloat16(unsigned short bits, from_bits_t) : x(bits) {}
  __device__ BFloat16(float value) : x(__bfloat16_as_ushort(__float2bfloat16(value))) {}
  __device__ BFloat16(const __nv_bfloat16& value) : x(__bfloat16_as_ushort(value)) {}
  __device__ operator float() const { return __bfloat162float(native()); }
  __device__ operator __nv_bfloat16() const { return native(); }
  __host__ __device__ static constexpr from_bits_t from_bits() { return from_bits_t(); }

 private:
  __device__ __nv_bfloat16 native() const { return __ushort_as_bfloat16(x); }
};

// through the cache of what is only read; found by its argument, as PyTorch's own are
__device__ inline Half __ldg(const Half* address) { return Half(::__ldg(&address->x), Half::from_bits()); }
__device__ inline BFloat16 __ldg(const BFloat16* address) {
  return BFloat16(::__ldg(&address->x), BFloat16::from_bits());
}

#define CUPYOPS_ARITHMETIC(T)                                                           \
  __device__ inline T operator+(const T& a, const T& b) { return float(a) + float(b); } \
  __device__ inline T operator-(const T& a, const T& b) { return float(a) - float(b); } \
  __device__ inline T operator*(const T& a, const T& b) { return float(a) * float(b); } \
  __device__ inline T operator/(const T& a, const T& b) { return float(a) / float(b); } \
  __device__ inline T operator-(const T& a) { return -float(a); }                       \
  __device__ inline T& operator+=(T& a, const T& b) { return a = a + b; }               \
  __device__ inline T& operator-=(T& a, const T& b) { return a = a - b; }               \
  __device__ inline T& operator*=(T& a, const T& b) { return a = a * b; }               \
  __device__ inline T& operator/=(T& a, const T& b) { return a = a / b; }               \
  CUPYOPS_WITH_FLOATING(T, float)                                                       \
  CUPYOPS_WITH_FLOATING(T, double)                                                      \
  CUPYOPS_WITH_INTEGER(T, int)                                                          \
  CUPYOPS_WITH_INTEGER(T, long long)
// with a wider type the result is of that type; with an integer it is of the half type
#define CUPYOPS_WITH_FLOATING(T, F)                                                           \
  __device__ inline F operator+(T a, F b) { return static_cast<F>(float(a)) + b; }            \
  __device__ inline F operator-(T a, F b) { return static_cast<F>(float(a)) - b; }            \
  __device__ inline F operator*(T a, F b) { return static_cast<F>(float(a)) * b; }            \
  __device__ inline F operator/(T a, F b) { return static_cast<F>(float(a)) / b; }            \
  __device__ inline F operator+(F a, T b) { return a + static_cast<F>(float(b)); }            \
  __device__ inline F operator-(F a, T b) { return a - static_cast<F>(float(b)); }            \
  __device__ inline F operator*(F a, T b) { return a * static_cast<F>(float(b)); }            \
  __device__ inline F operator/(F a, T b) { return a / static_cast<F>(float(b)); }            \
  __device__ inline F& operator+=(F& a, const T& b) { return a += static_cast<F>(float(b)); } \
  __device__ inline F& operator-=(F& a, const T& b) { return a -= static_cast<F>(float(b)); } \
  __device__ inline F& operator*=(F& a, const T& b) { return a *= static_cast<F>(float(b)); } \
  __device__ inline F& operator/=(F& a, const T& b) { return a /= static_cast<F>(float(b)); }
#define CUPYOPS_WITH_INTEGER(T, I)                                                 \
  __device__ inline T operator+(T a, I b) { return a + T(static_cast<float>(b)); } \
  __device__ inline T operator-(T a, I b) { return a - T(static_cast<float>(b)); } \
  __device__ inline T operator*(T a, I b) { return a * T(static_cast<float>(b)); } \
  __device__ inline T operator/(T a, I b) { return a / T(static_cast<float>(b)); } \
  __device__ inline T operator+(I a, T b) { return T(static_cast<float>(a)) + b; } \
  __device__ inline T operator-(I a, T b) { return T(static_cast<float>(a)) - b; } \
  __device__ inline T operator*(I a, T b) { return T(static_cast<float>(a)) * b; } \
  __device__ inline T operator/(I a, T b) { return T(static_cast<float>(a)) / b; }
CUPYOPS_ARITHMETIC(Half)
CUPYOPS_ARITHMETIC(BFloat16)
#undef CUPYOPS_ARITHMETIC
// of two of the same half type: CUDA's own type has such operators too, to which both convert; with others C++ has its own
#define CUPYOPS_COMPARISON(sign)                                                                             \
  template <typename T>                                                                                      \
  __device__ inline std::enable_if_t<std::is_same<T, Half>::value || std::is_same<T, BFloat16>::value, bool> \
  operator sign(const T& a, const T& b) {                                                                    \
    return float(a) sign float(b);                                                                           \
  }
CUPYOPS_COMPARISON(==)
CUPYOPS_COMPARISON(!=)
CUPYOPS_COMPARISON(<)
CUPYOPS_COMPARISON(<=)
CUPYOPS_COMPARISON(>)
CUPYOPS_COMPARISON(>=)
#undef CUPYOPS_COMPARISON
#undef CUPYOPS_WITH_FLOATING
#undef CUPYOPS_WITH_INTEGER

}  // namespace c10

namespace std {

#define CUPYOPS_LIMITS(T, min_, lowest_, max_, epsilon_, infinity_, nan_)                      \
  template <>                                                                                  \
  struct numeric_limits<T> {                                                                   \
    static constexpr bool is_specialized = true;                                               \
    static constexpr bool is_integer = false;                                                  \
    static constexpr bool has_infinity = true;                                                 \
    __host__ __device__ static constexpr T min() { return T(min_, T::from_bits()); }           \
    __host__ __device__ static constexpr T lowest() { return T(lowest_, T::from_bits()); }     \
    __host__ __device__ static constexpr T max() { return T(max_, T::from_bits()); }           \
    __host__ __device__ static constexpr T epsilon() { return T(epsilon_, T::from_bits()); }   \
    __host__ __device__ static constexpr T infinity() { return T(infinity_, T::from_bits()); } \
    __host__ __device__ static constexpr T quiet_NaN() { return T(nan_, T::from_bits()); }     \
  };
CUPYOPS_LIMITS(c10::Half, 0x0400, 0xFBFF, 0x7BFF, 0x1400, 0x7C00, 0x7E00)
CUPYOPS_LIMITS(c10::BFloat16, 0x0080, 0xFF7F, 0x7F7F, 0x3C00, 0x7F80, 0x7FC0)
#undef CUPYOPS_LIMITS

#define CUPYOPS_UNARY(name)                                                  \
  __device__ inline c10::Half name(c10::Half x) { return ::name(float(x)); } \
  __device__ inline c10::BFloat16 name(c10::BFloat16 x) { return ::name(float(x)); }
CUPYOPS_UNARY(exp)
CUPYOPS_UNARY(log)
CUPYOPS_UNARY(sqrt)
CUPYOPS_UNARY(tanh)
CUPYOPS_UNARY(abs)
CUPYOPS_UNARY(floor)
CUPYOPS_UNARY(ceil)
CUPYOPS_UNARY(sin)
CUPYOPS_UNARY(cos)
#undef CUPYOPS_UNARY

}  // namespace std
