// Weights of 8 and of 4 bits as operands of tensor cores. What a 32-bit word of a row stands for becomes pairs of T, exactly: no
// scale is multiplied into them, so that nothing is rounded before the sums.
#pragma once

#include "common/core/types.cuh"

namespace quantized {

// Two T from the upper halves of two floats, of which the lower halves are zero: `low` and `high`, exactly, as bf16 is half a float.
template <typename T> __device__ __forceinline__ unsigned pair_of(float low, float high);
template <> __device__ __forceinline__ unsigned pair_of<__nv_bfloat16>(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
template <> __device__ __forceinline__ unsigned pair_of<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Integers from 0 to 2^bits of T's fraction, written into the low bits of a T whose last place is 1, and taken out by a difference.
// Constants are bits, since a conversion would be computed anew each time.
template <typename T> struct Magic;
template <> struct Magic<__half> {
  static constexpr unsigned BITS = 0x64006400u, ONES = 0x3c003c00u;  // 1024 twice, and 1
  static constexpr int MOST = 1023;
  static __device__ __forceinline__ unsigned minus(unsigned pair, unsigned less) {
    const __half2 found = __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&less));
    return *reinterpret_cast<const unsigned*>(&found);
  }
};
template <> struct Magic<__nv_bfloat16> {
  static constexpr unsigned BITS = 0x43004300u, ONES = 0x3f803f80u;  // 128 twice, and 1
  static constexpr int MOST = 127;
  static __device__ __forceinline__ unsigned minus(unsigned pair, unsigned less) {
    const __nv_bfloat162 found =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&less));
    return *reinterpret_cast<const unsigned*>(&found);
  }
};

// Takes what Magic's 1024 or 128 and a middle are from a pair of such sums.
template <typename T, int MIDDLE> __device__ __forceinline__ unsigned without_magic(unsigned pair) {
  return Magic<T>::minus(pair, Magic<T>::BITS + MIDDLE * 0x00010001u);
}

// Each has BITS of a number, and what MIDDLE is taken from it. `pairs` makes PAIRS pairs of a word; the numbers of a pair lie APART.

struct Int8 {
  static constexpr int BITS = 8, PAIRS = 2, APART = 1, MIDDLE = 0;

  template <typename T> static __device__ __forceinline__ void pairs(unsigned word, unsigned (&pairs)[PAIRS]) {
    word ^= 0x80808080u;  // from 0 to 255
    if constexpr (Magic<T>::MOST >= 255) {
      pairs[0] = without_magic<T, 128>(__byte_perm(word, Magic<T>::BITS, 0x5150));
      pairs[1] = without_magic<T, 128>(__byte_perm(word, Magic<T>::BITS, 0x5352));
    } else {
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) pairs[j] = pair_of<T>(number(word, 2 * j), number(word, 2 * j + 1));
    }
  }

 private:
  // By a float whose last place is 1.
  static __device__ __forceinline__ float number(unsigned word, int byte) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 + byte)) - 8388736.0f;
  }
};

struct E4M3 {
  static constexpr int BITS = 8, PAIRS = 2, APART = 1, MIDDLE = 0;

  template <typename T> static __device__ __forceinline__ void pairs(unsigned word, unsigned (&pairs)[PAIRS]) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
#if __CUDA_ARCH__ >= 890
      unsigned halves;  // which have all numbers of e4m3
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(word >> (16 * j))));
      if constexpr (Magic<T>::MOST >= 255) {
        pairs[j] = halves;
      } else {
        const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&halves));
        pairs[j] = pair_of<T>(wide.x, wide.y);
      }
#else
      pairs[j] = pair_of<T>(number(word >> (16 * j)), number(word >> (16 * j + 8)));
#endif
    }
  }

 private:
  // Exponent and fraction are those of a float that is 2^120 times smaller, which may have no leading 1 either.
  static __device__ __forceinline__ float number(unsigned byte) {
    const unsigned sign = (byte & 0x80u) << 24, rest = byte & 0x7fu;
    const unsigned wide = __float_as_uint(__uint_as_float(rest << 20) * 0x1p120f);
    return __uint_as_float(sign | (rest == 0x7fu ? 0x7fff0000u : wide));
  }
};

// From 0 to 15.
struct UInt4 {
  static constexpr int BITS = 4, PAIRS = 4, APART = 4, MIDDLE = 8;

  template <typename T> static __device__ __forceinline__ void pairs(unsigned word, unsigned (&pairs)[PAIRS]) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      pairs[j] = without_magic<T, MIDDLE>(((word >> (4 * j)) & 0x000f000fu) | Magic<T>::BITS);
    }
  }
};

// The eight values of x that go with two words of 8-bit numbers, or with one of 4-bit numbers, in the order of their pairs.
template <typename W> __device__ __forceinline__ void order(uint4 x, unsigned (&pairs)[4]) {
  if constexpr (W::APART == 1) {
    pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
  } else {
    pairs[0] = __byte_perm(x.x, x.z, 0x5410), pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410), pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  }
}

}  // namespace quantized
