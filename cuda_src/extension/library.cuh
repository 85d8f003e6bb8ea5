// Types of the C++ library and of PyTorch's headers that kernels of C++ extensions use: pairs, tuples, arrays, complex
// numbers, aligned vectors, TensorInfo, the state of a generator of random numbers.
#pragma once

#include "extension/half.cuh"

namespace std {

template <typename A, typename B>
struct pair {
  using first_type = A;
  using second_type = B;
  A first;
  B second;
  pair() = default;
  __host__ __device__ constexpr pair(const A& a, const B& b) : first(a), second(b) {}
};
template <typename A, typename B>
__host__ __device__ constexpr pair<decay_t<A>, decay_t<B>> make_pair(A&& a, B&& b) {
  return pair<decay_t<A>, decay_t<B>>(a, b);
}

template <typename T, size_t N>
struct array {
  using value_type = T;
  T elements_[N ? N : 1];
  __host__ __device__ constexpr T& operator[](size_t i) { return elements_[i]; }
  __host__ __device__ constexpr const T& operator[](size_t i) const { return elements_[i]; }
  __host__ __device__ constexpr T* data() { return elements_; }
  __host__ __device__ constexpr const T* data() const { return elements_; }
  __host__ __device__ constexpr T* begin() { return elements_; }
  __host__ __device__ constexpr const T* begin() const { return elements_; }
  __host__ __device__ constexpr T* end() { return elements_ + N; }
  __host__ __device__ constexpr const T* end() const { return elements_ + N; }
  __host__ __device__ constexpr T& front() { return elements_[0]; }
  __host__ __device__ constexpr T& back() { return elements_[N - 1]; }
  __host__ __device__ static constexpr size_t size() { return N; }
  __host__ __device__ constexpr void fill(const T& value) {
    for (size_t i = 0; i < N; ++i) elements_[i] = value;
  }
};

template <typename... Ts>
struct tuple {};
template <typename T, typename... Rest>
struct tuple<T, Rest...> {
  T first_;
  tuple<Rest...> rest_;
  tuple() = default;
  __host__ __device__ constexpr tuple(const T& first, const Rest&... rest) : first_(first), rest_(rest...) {}
};
template <size_t I, typename... Ts>  // declared as CCCL declares it, which has specialisations of its own
struct tuple_element;
template <size_t I, typename T, typename... Rest>
struct tuple_element<I, tuple<T, Rest...>> : tuple_element<I - 1, tuple<Rest...>> {};
template <typename T, typename... Rest>
struct tuple_element<0, tuple<T, Rest...>> {
  using type = T;
};
template <typename A, typename B>
struct tuple_element<0, pair<A, B>> {
  using type = A;
};
template <typename A, typename B>
struct tuple_element<1, pair<A, B>> {
  using type = B;
};
template <size_t I, typename T>
using tuple_element_t = typename tuple_element<I, T>::type;
template <typename... Ts>
struct tuple_size;
template <typename... Ts>
struct tuple_size<tuple<Ts...>> : integral_constant<size_t, sizeof...(Ts)> {};
template <typename A, typename B>
struct tuple_size<pair<A, B>> : integral_constant<size_t, 2> {};
template <typename T, size_t N>
struct tuple_size<array<T, N>> : integral_constant<size_t, N> {};

template <size_t I, typename... Ts>
__host__ __device__ constexpr auto& get(tuple<Ts...>& of) {
  if constexpr (I == 0) {
    return of.first_;
  } else {
    return get<I - 1>(of.rest_);
  }
}
template <size_t I, typename... Ts>
__host__ __device__ constexpr const auto& get(const tuple<Ts...>& of) {
  if constexpr (I == 0) {
    return of.first_;
  } else {
    return get<I - 1>(of.rest_);
  }
}
template <size_t I, typename A, typename B>
__host__ __device__ constexpr auto& get(pair<A, B>& of) {
  if constexpr (I == 0) {
    return of.first;
  } else {
    return of.second;
  }
}
template <size_t I, typename A, typename B>
__host__ __device__ constexpr const auto& get(const pair<A, B>& of) {
  if constexpr (I == 0) {
    return of.first;
  } else {
    return of.second;
  }
}
// of a value that is given up, as `auto [a, b] = two();` asks for
template <size_t I, typename... Ts>
__host__ __device__ constexpr auto&& get(tuple<Ts...>&& of) {
  return static_cast<typename tuple_element<I, tuple<Ts...>>::type&&>(get<I>(of));
}
template <size_t I, typename A, typename B>
__host__ __device__ constexpr auto&& get(pair<A, B>&& of) {
  return static_cast<typename tuple_element<I, pair<A, B>>::type&&>(get<I>(of));
}
template <size_t I, typename T, size_t N>
__host__ __device__ constexpr T& get(array<T, N>& of) {
  return of[I];
}
template <typename... Ts>
__host__ __device__ constexpr tuple<decay_t<Ts>...> make_tuple(Ts&&... values) {
  return tuple<decay_t<Ts>...>(values...);
}

template <size_t Size, size_t Align = 16>
struct aligned_storage {
  struct alignas(Align) type { unsigned char bytes[Size]; };
};
template <size_t Size, size_t Align = 16>
using aligned_storage_t = typename aligned_storage<Size, Align>::type;

template <typename T>
__host__ __device__ constexpr const T& clamp(const T& value, const T& low, const T& high) {
  return value < low ? low : high < value ? high : value;
}
template <typename It, typename T>
__host__ __device__ void fill(It at, It end, const T& value) {
  for (; at != end; ++at) *at = value;
}
template <typename It, typename N, typename T>
__host__ __device__ It fill_n(It at, N count, const T& value) {
  for (N i = 0; i < count; ++i) *at++ = value;
  return at;
}
__device__ inline float modf(float x, float* whole) { return ::modff(x, whole); }
__device__ inline double modf(double x, double* whole) { return ::modf(x, whole); }
__device__ inline long lround(float x) { return ::lroundf(x); }
__device__ inline long lround(double x) { return ::lround(x); }

}  // namespace std

namespace c10 {

template <typename T>
struct alignas(2 * sizeof(T)) complex {
  using value_type = T;
  T real_ = T(0), imag_ = T(0);
  complex() = default;
  __host__ __device__ constexpr complex(const T& real, const T& imag = T()) : real_(real), imag_(imag) {}
  template <typename U>
  __host__ __device__ constexpr explicit complex(const complex<U>& other) : real_(other.real_), imag_(other.imag_) {}
  __host__ __device__ constexpr T real() const { return real_; }
  __host__ __device__ constexpr T imag() const { return imag_; }
  __host__ __device__ constexpr void real(T value) { real_ = value; }
  __host__ __device__ constexpr void imag(T value) { imag_ = value; }
  __host__ __device__ constexpr complex& operator+=(const complex& b) { return *this = *this + b; }
  __host__ __device__ constexpr complex& operator-=(const complex& b) { return *this = *this - b; }
  __host__ __device__ constexpr complex& operator*=(const complex& b) { return *this = *this * b; }
  __host__ __device__ constexpr complex& operator/=(const complex& b) { return *this = *this / b; }
  __host__ __device__ constexpr complex operator-() const { return complex(-real_, -imag_); }
  __host__ __device__ constexpr complex operator+() const { return *this; }
  friend __host__ __device__ constexpr complex operator+(const complex& a, const complex& b) {
    return complex(a.real_ + b.real_, a.imag_ + b.imag_);
  }
  friend __host__ __device__ constexpr complex operator-(const complex& a, const complex& b) {
    return complex(a.real_ - b.real_, a.imag_ - b.imag_);
  }
  friend __host__ __device__ constexpr complex operator*(const complex& a, const complex& b) {
    return complex(a.real_ * b.real_ - a.imag_ * b.imag_, a.real_ * b.imag_ + a.imag_ * b.real_);
  }
  // Smith's quotient: with the larger part of b as the unit, so that the square of neither overflows
  friend __host__ __device__ constexpr complex operator/(const complex& a, const complex& b) {
    const T re = b.real_ < 0 ? -b.real_ : b.real_, im = b.imag_ < 0 ? -b.imag_ : b.imag_;
    if (re >= im) {
      if (re == 0 && im == 0) return complex(a.real_ / re, a.imag_ / im);
      const T ratio = b.imag_ / b.real_, scale = T(1) / (b.real_ + b.imag_ * ratio);
      return complex((a.real_ + a.imag_ * ratio) * scale, (a.imag_ - a.real_ * ratio) * scale);
    }
    const T ratio = b.real_ / b.imag_, scale = T(1) / (b.real_ * ratio + b.imag_);
    return complex((a.real_ * ratio + a.imag_) * scale, (a.imag_ * ratio - a.real_) * scale);
  }
  friend __host__ __device__ constexpr bool operator==(const complex& a, const complex& b) {
    return a.real_ == b.real_ && a.imag_ == b.imag_;
  }
  friend __host__ __device__ constexpr bool operator!=(const complex& a, const complex& b) { return !(a == b); }
};

// functions of complex numbers, in std and in thrust as well
#define CUPYOPS_OF_COMPLEX                                                               \
  template <typename T>                                                                  \
  __device__ inline T real(const c10::complex<T>& a) {                                   \
    return a.real_;                                                                      \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline T imag(const c10::complex<T>& a) {                                   \
    return a.imag_;                                                                      \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline T norm(const c10::complex<T>& a) {                                   \
    return a.real_ * a.real_ + a.imag_ * a.imag_;                                        \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline T abs(const c10::complex<T>& a) {                                    \
    return ::hypot(a.real_, a.imag_);                                                    \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline T arg(const c10::complex<T>& a) {                                    \
    return ::atan2(a.imag_, a.real_);                                                    \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline c10::complex<T> conj(const c10::complex<T>& a) {                     \
    return c10::complex<T>(a.real_, -a.imag_);                                           \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline c10::complex<T> polar(const T& r, const T& angle = T()) {            \
    return c10::complex<T>(r * ::cos(angle), r * ::sin(angle));                          \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline c10::complex<T> exp(const c10::complex<T>& a) {                      \
    const T r = ::exp(a.real_);                                                          \
    return c10::complex<T>(r * ::cos(a.imag_), r * ::sin(a.imag_));                      \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline c10::complex<T> log(const c10::complex<T>& a) {                      \
    return c10::complex<T>(::log(::hypot(a.real_, a.imag_)), ::atan2(a.imag_, a.real_)); \
  }                                                                                      \
  template <typename T>                                                                  \
  __device__ inline c10::complex<T> sqrt(const c10::complex<T>& a) {                     \
    const T r = ::hypot(a.real_, a.imag_);                                               \
    const T re = ::sqrt((r + a.real_) / 2), im = ::sqrt((r - a.real_) / 2);              \
    return c10::complex<T>(re, a.imag_ < 0 ? -im : im);                                  \
  }

}  // namespace c10
namespace c10_complex_math {
CUPYOPS_OF_COMPLEX
}
namespace c10 {  // for calls that name no namespace
using c10_complex_math::abs, c10_complex_math::arg, c10_complex_math::conj, c10_complex_math::exp,
    c10_complex_math::imag;
using c10_complex_math::log, c10_complex_math::norm, c10_complex_math::real, c10_complex_math::sqrt;
}  // namespace c10
namespace std {
using namespace c10_complex_math;
// of the same names as functions of std's own, which hide those of a namespace that is used
using c10_complex_math::abs;
using c10_complex_math::exp;
using c10_complex_math::log;
using c10_complex_math::sqrt;
}  // namespace std
namespace cub {}  // namespace cub
namespace thrust {
using c10::complex;
using namespace c10_complex_math;
using std::get;
using std::make_tuple;
using std::tuple;
}  // namespace thrust

namespace at {

struct PhiloxCudaState {
  PhiloxCudaState() = default;
  __host__ __device__ PhiloxCudaState(uint64_t seed, uint64_t offset) : seed_(seed), offset_(offset) {}
  uint64_t seed_ = 0, offset_ = 0;
};
namespace cuda {
namespace philox {
__host__ __device__ inline std::tuple<uint64_t, uint64_t> unpack(PhiloxCudaState state) {
  return std::tuple<uint64_t, uint64_t>(state.seed_, state.offset_);
}
}  // namespace philox

// An address with up to 25 sizes and strides. A launch packs one of a tensor, laid out as here.
namespace detail {
constexpr int MAX_TENSORINFO_DIMS = 25;
template <typename T, typename IndexType>
struct TensorInfo {
  T* data;
  IndexType sizes[MAX_TENSORINFO_DIMS];
  IndexType strides[MAX_TENSORINFO_DIMS];
  int dims;
  __host__ __device__ bool isContiguous() const { return dims == 1 && strides[0] == 1; }
};
// where element `linear`, counted along the last dimension first, lies
template <typename T, typename IndexType, int Dims>
struct IndexToOffset {
  __host__ __device__ static IndexType get(IndexType linear, const TensorInfo<T, IndexType>& info) {
    IndexType offset = 0;
    for (int i = (Dims > 0 ? Dims : info.dims) - 1; i > 0; --i) {
      offset += linear % info.sizes[i] * info.strides[i];
      linear /= info.sizes[i];
    }
    return offset + linear * info.strides[0];
  }
};
}  // namespace detail
}  // namespace cuda

namespace native {
namespace memory {
template <typename T, int N>
struct alignas(sizeof(T) * N) aligned_vector {
  T val[N];
};
}  // namespace memory
using memory::aligned_vector;
}  // namespace native

}  // namespace at
