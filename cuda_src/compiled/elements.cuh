// What generated kernels are written in: elements of memory and registers, the arithmetic of PyTorch's operators on them, and
// reductions of a row of threads.
//
// Halves are computed in float. Integers wrap at their own width, as PyTorch's do: sums and products are of the unsigned type,
// since overflow of a signed one is undefined in C++. NaN wins in maximum and minimum.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

// --- memory and registers ---

struct bf16 { u16 x; };
struct f16 { u16 x; };
struct Exact { float x; };  // a float that is a bf16 as it stands
template <class T, int V> struct alignas(sizeof(T) * V > 16 ? 16 : sizeof(T) * V) Vector { T v[V]; };

template <class T> INLINE T load(T a) { return a; }
INLINE float load(bf16 a) { return __uint_as_float((u32)a.x << 16); }
INLINE float load(f16 a) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a.x));
  return r;
}

template <class T> struct Convert {
  template <class S> static INLINE T from(S a) { return (T)a; }
};
template <> struct Convert<bool> {
  template <class S> static INLINE bool from(S a) { return a != (S)0; }
};
template <> struct Convert<unsigned char> {  // of a float by way of a wide integer, as PyTorch has it
  template <class S> static INLINE unsigned char from(S a) { return (unsigned char)a; }
  static INLINE unsigned char from(float a) { return (unsigned char)(long long)a; }
  static INLINE unsigned char from(double a) { return (unsigned char)(long long)a; }
};
template <> struct Convert<bf16> {
  template <class S> static INLINE bf16 from(S a) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.x) : "f"((float)a));
    return r;
  }
  static INLINE bf16 from(Exact a) {
    bf16 r;
    r.x = (u16)(__float_as_uint(a.x) >> 16);
    return r;
  }
};
template <> struct Convert<f16> {
  template <class S> static INLINE f16 from(S a) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.x) : "f"((float)a));
    return r;
  }
};
template <class T, class S> INLINE T convert(S a) { return Convert<T>::from(a); }
template <class T, class S> INLINE T store(S a) { return Convert<T>::from(a); }
template <class T, class S> INLINE float rounded(S a) { return load(Convert<T>::from(a)); }  // to a half and back

template <class T> INLINE T infinity();
template <> INLINE float infinity() { return __int_as_float(0x7f800000); }
template <> INLINE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
template <class T> INLINE T nan_of();
template <> INLINE float nan_of() { return __int_as_float(0x7fc00000); }
template <> INLINE double nan_of() { return __longlong_as_double(0x7ff8000000000000ll); }

template <class T> INLINE T highest();
template <> INLINE float highest() { return infinity<float>(); }
template <> INLINE double highest() { return infinity<double>(); }
template <> INLINE bool highest() { return true; }
template <> INLINE unsigned char highest() { return 255; }
template <> INLINE signed char highest() { return 127; }
template <> INLINE short highest() { return 32767; }
template <> INLINE int highest() { return 2147483647; }
template <> INLINE long long highest() { return 9223372036854775807ll; }
template <class T> INLINE T lowest() { return (T)(-highest<T>() - (T)1); }
template <> INLINE float lowest() { return -infinity<float>(); }
template <> INLINE double lowest() { return -infinity<double>(); }
template <> INLINE bool lowest() { return false; }
template <> INLINE unsigned char lowest() { return 0; }

// --- arithmetic ---

template <class T> struct Wrapping { typedef u32 Type; };
template <> struct Wrapping<long long> { typedef u64 Type; };
template <class T> INLINE T add(T a, T b) {
  typedef typename Wrapping<T>::Type U;
  return (T)((U)a + (U)b);
}
template <class T> INLINE T sub(T a, T b) {
  typedef typename Wrapping<T>::Type U;
  return (T)((U)a - (U)b);
}
template <class T> INLINE T mul(T a, T b) {
  typedef typename Wrapping<T>::Type U;
  return (T)((U)a * (U)b);
}
INLINE float add(float a, float b) { return a + b; }
INLINE double add(double a, double b) { return a + b; }
INLINE bool add(bool a, bool b) { return a || b; }
INLINE float sub(float a, float b) { return a - b; }
INLINE double sub(double a, double b) { return a - b; }
INLINE float mul(float a, float b) { return a * b; }
INLINE double mul(double a, double b) { return a * b; }
INLINE bool mul(bool a, bool b) { return a && b; }
INLINE float div(float a, float b) { return a / b; }
INLINE double div(double a, double b) { return a / b; }
template <class T> INLINE T neg(T a) { return sub((T)0, a); }
INLINE float neg(float a) { return -a; }
INLINE double neg(double a) { return -a; }
template <class T> INLINE T absolute(T a) { return a < 0 ? neg(a) : a; }
INLINE float absolute(float a) { return fabsf(a); }
INLINE double absolute(double a) { return fabs(a); }
template <class T> INLINE T square(T a) { return mul(a, a); }
template <class T> INLINE T sign(T a) { return (T)((a > 0) - (a < 0)); }
template <class T> INLINE T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <class T> INLINE T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <class T> INLINE T fmaximum(T a, T b) { return a > b || b != b ? a : b; }  // NaN loses
template <class T> INLINE T fminimum(T a, T b) { return a < b || b != b ? a : b; }
template <class T> INLINE T relu(T a) { return a > 0 || a != a ? a : (T)0; }
template <class T> INLINE T reciprocal(T a) { return (T)1 / a; }
template <class T> INLINE bool is_nan(T a) { return a != a; }
template <class T> INLINE bool is_inf(T a) { return false; }
INLINE bool is_inf(float a) { return fabsf(a) == infinity<float>(); }
INLINE bool is_inf(double a) { return fabs(a) == infinity<double>(); }
template <class T> INLINE bool sign_bit(T a) { return a < 0; }
INLINE bool sign_bit(bool a) { return false; }
INLINE bool sign_bit(float a) { return __float_as_int(a) < 0; }
INLINE bool sign_bit(double a) { return __double_as_longlong(a) < 0; }

// By as many bits as the type has, or by fewer than none: 0, or the sign.
template <class T> INLINE T shift_left(T a, T b) {
  typedef typename Wrapping<T>::Type U;
  return (T)b < 0 || b >= (T)(sizeof(T) * 8) ? (T)0 : (T)((U)a << b);
}
template <class T> INLINE T shift_right(T a, T b) {
  const int most = sizeof(T) * 8 - (lowest<T>() < 0 ? 1 : 0);
  if ((T)b < 0 || b >= (T)most) return lowest<T>() < 0 ? (T)(a >> (sizeof(T) * 8 - 1)) : (T)0;
  return (T)(a >> b);
}

// Division that rounds down, and its remainder, which has the sign of the divisor; as PyTorch computes them.
template <class T> INLINE T remainder_of(T a, T b) {
  if (b == (T)-1) return 0;  // the lowest integer by -1 would trap
  const T r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}
template <class T> INLINE T fmod_of(T a, T b) { return b == (T)-1 && (T)-1 < 0 ? (T)0 : (T)(a % b); }
template <class T> INLINE T trunc_divide(T a, T b) { return b == (T)-1 && (T)-1 < 0 ? neg(a) : (T)(a / b); }
template <class T> INLINE T floor_divide(T a, T b) {
  if (b == (T)-1 && (T)-1 < 0) return neg(a);
  const T q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? (T)(q - 1) : q;
}
template <class F> INLINE F float_remainder(F a, F b) {
  const F r = fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class F> INLINE F float_floor_divide(F a, F b) {
  if (b == 0) return a / b;
  const F r = fmod(a, b);
  F q = (a - r) / b;
  if (r != 0 && (r < 0) != (b < 0)) q -= 1;
  if (q == 0) return copysign((F)0, a / b);
  const F down = floor(q);
  return q - down > (F)0.5 ? down + 1 : down;
}
INLINE float remainder_of(float a, float b) { return float_remainder(a, b); }
INLINE double remainder_of(double a, double b) { return float_remainder(a, b); }
INLINE float fmod_of(float a, float b) { return fmodf(a, b); }
INLINE double fmod_of(double a, double b) { return fmod(a, b); }
INLINE float trunc_divide(float a, float b) { return truncf(a / b); }
INLINE double trunc_divide(double a, double b) { return trunc(a / b); }
INLINE float floor_divide(float a, float b) { return float_floor_divide(a, b); }
INLINE double floor_divide(double a, double b) { return float_floor_divide(a, b); }

// --- activations; fast_ ones are as exact as a half needs ---

INLINE float sigmoid(float a) { return 1.f / (1.f + expf(-a)); }
INLINE double sigmoid(double a) { return 1. / (1. + exp(-a)); }
template <class T> INLINE T silu(T a) { return a / (1 + exp(-a)); }
template <class T> INLINE T silu_gradient(T a) {
  const T s = sigmoid(a);
  return s * (1 + a * (1 - s));
}
template <class T> INLINE T gelu(T a) { return a * (T)0.5 * (1 + erf(a * (T)0.70710678118654752440)); }
template <class T> INLINE T gelu_gradient(T a) {
  const T density = exp(-(T)0.5 * a * a) * (T)0.39894228040143267794;
  return (T)0.5 * (1 + erf(a * (T)0.70710678118654752440)) + a * density;
}
template <class T> INLINE T gelu_tanh(T a) {
  return (T)0.5 * a * (1 + tanh((T)0.79788456080286535588 * (a + (T)0.044715 * a * a * a)));
}
template <class T> INLINE T gelu_tanh_gradient(T a) {
  const T t = tanh((T)0.79788456080286535588 * (a + (T)0.044715 * a * a * a));
  const T slope = (T)0.79788456080286535588 * (1 + 3 * (T)0.044715 * a * a);
  return (T)0.5 * (1 + t) + (T)0.5 * a * (1 - t * t) * slope;
}
INLINE float fast_exp(float a) { return __expf(a); }
INLINE float fast_div(float a, float b) {  // at most 2 units in the last place off, over the full range
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
INLINE float fast_sigmoid(float a) { return __fdividef(1.f, 1.f + __expf(-a)); }
INLINE float fast_silu(float a) { return a * fast_sigmoid(a); }
INLINE float fast_silu_gradient(float a) {
  const float s = fast_sigmoid(a);
  return s * (1 + a * (1 - s));
}
INLINE float fast_tanh(float a) {  // tanh itself near 0, where 1 - 2 / (e + 1) cancels
  return fabsf(a) < 0.25f ? tanhf(a) : 1.f - __fdividef(2.f, __expf(2.f * a) + 1.f);
}
// erfc(|a| / sqrt 2) / 2 = e * polynomial (Abramowitz and Stegun 7.1.26), with e = exp(-a a / 2)
INLINE float normal_tail(float a, float& e) {
  e = exp2f(-0.72134752044448170368f * a * a);
  const float t = __fdividef(1.f, 1.f + 0.23164189f * fabsf(a));
  return e * t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f))));
}
INLINE float fast_gelu(float a) {
  float e;
  const float q = normal_tail(a, e);
  return a * (a < 0 ? q : 1.f - q);
}
INLINE float fast_gelu_gradient(float a) {
  float e;
  const float q = normal_tail(a, e);
  return (a < 0 ? q : 1.f - q) + a * e * 0.39894228040143267794f;
}
INLINE float fast_gelu_tanh(float a) { return a * fast_sigmoid(1.59576912160573071176f * (a + 0.044715f * a * a * a)); }
INLINE float fast_gelu_tanh_gradient(float a) {
  const float t = 2.f * fast_sigmoid(1.59576912160573071176f * (a + 0.044715f * a * a * a)) - 1.f;
  const float slope = 0.79788456080286535588f * (1 + 0.134145f * a * a);
  return 0.5f * (1 + t) + 0.5f * a * (1 - t * t) * slope;
}

// --- indices ---

template <class T> INLINE T floor_quotient(T a, int b) {
  const T q = a / b;
  return a % b < 0 ? q - 1 : q;
}
template <class T> INLINE T floor_remainder(T a, int b) {
  const T r = a % b;
  return r < 0 ? r + b : r;
}
template <bool WRAPS, class T> INLINE long long checked_index(T a, long long size) {
  long long at = a;
  if (WRAPS && at < 0) at += size;
  if (at < 0 || at >= size) __trap();  // out of range: an error, and never a wild read
  return at;
}

// --- reductions ---

struct Sum {
  template <class T> static INLINE T of(T a, T b) { return add(a, b); }
  template <class T> static INLINE T idle(T) { return (T)0; }
};
struct Max {
  template <class T> static INLINE T of(T a, T b) { return maximum(a, b); }
  template <class T> static INLINE T idle(T a) { return a; }
};
struct Min {
  template <class T> static INLINE T of(T a, T b) { return minimum(a, b); }
  template <class T> static INLINE T idle(T a) { return a; }
};

struct Precise {
  template <class A> static INLINE A exponential(A a) { return exp(a); }
};
struct Fast {
  static INLINE float exponential(float a) { return fast_exp(a); }
  static INLINE double exponential(double a) { return exp(a); }
};

// top: the largest element so far, sum: that of exp(element - top); N more elements. A NaN stays in both.
template <class Exactness, int N, class A> INLINE void online(A& top, A& sum, const A (&a)[N]) {
  A largest = a[0];
#pragma unroll
  for (int j = 1; j < N; j++) largest = maximum(largest, a[j]);
  if (!(largest <= top)) {
    sum = sum == 0 ? (A)0 : sum * Exactness::exponential(top - largest);
    top = largest;
  }
  if (top == -infinity<A>()) return;
#pragma unroll
  for (int j = 0; j < N; j++) sum += Exactness::exponential(a[j] - top);
}

// over T neighbouring lanes of a warp
template <class Op, int T, class A> INLINE A reduce(A a) {
#pragma unroll
  for (int d = T / 2; d; d /= 2) a = Op::of(a, (A)__shfl_xor_sync(0xffffffffu, a, d));
  return a;
}

// over a block of T threads, more than a warp: one value of each warp through shared memory, narrow integers as wide ones
template <class A> struct Held { typedef A Type; };
template <> struct Held<bool> { typedef int Type; };
template <> struct Held<unsigned char> { typedef int Type; };
template <> struct Held<signed char> { typedef int Type; };
template <> struct Held<short> { typedef int Type; };
template <class Op, class A> INLINE void to_shared(A a, A* to) {
  typename Held<A>::Type* held = (typename Held<A>::Type*)to;
  a = reduce<Op, 32>(a);
  if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = a;
}
template <class Op, int T, class A> INLINE A from_shared(const A* from) {
  const typename Held<A>::Type* held = (const typename Held<A>::Type*)from;
  if (T <= 256) {
    A a = held[0];
#pragma unroll
    for (int w = 1; w < T / 32; w++) a = Op::of(a, (A)held[w]);
    return a;
  }
  const int w = threadIdx.x % 32;
  return reduce<Op, 32>(w < T / 32 ? (A)held[w] : Op::idle((A)held[0]));
}

// over the ROWS groups of T threads of a block, each with ITERATIONS times V columns; the first group has the result
template <class Op, int T, int V, int ROWS, int ITERATIONS, class A> INLINE void over_rows(A (&a)[ITERATIONS][V]) {
  __shared__ A held[ROWS][T * V];
  const int lane = threadIdx.x % T, team = threadIdx.x / T;
#pragma unroll
  for (int i = 0; i < ITERATIONS; i++) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; j++) held[team][j * T + lane] = a[i][j];
#pragma unroll
    for (int half = ROWS / 2; half; half /= 2) {
      __syncthreads();
      if (team < half) {
#pragma unroll
        for (int j = 0; j < V; j++) {
          held[team][j * T + lane] = Op::of(held[team][j * T + lane], held[team + half][j * T + lane]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < V; j++) a[i][j] = held[team][j * T + lane];
  }
}
