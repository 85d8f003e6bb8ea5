// Strips of images whose channels are neighbours: a thread owns V channels, side by side, of a strip of rows of a column.
// Contiguous planes are images of one channel.
#pragma once

#include "pool/window.cuh"

// The type of offsets in an image: less than 2^31 where K is known.
template <int K> struct OffsetOf { using type = int; };
template <> struct OffsetOf<0> { using type = long long; };
template <int K> using offset_t = typename OffsetOf<K>::type;

// n = quotient * d + remainder; divides in 64 bits only where n asks for it.
__device__ __forceinline__ long long divide(long long n, const Divisor& d, int& remainder) {
  const long long quotient = n >> 31 == 0 ? d.divide(int(n)) : n / d.divisor;
  remainder = int(n - quotient * d.divisor);
  return quotient;
}

// How threads divide images: vectors of channels (fastest), columns, strips of `strip` rows, images. `threads` in all.
struct Strips {
  long long threads, channels, strip;
  Divisor vectors, width, strips;
};

// A thread's strip: the channels from c on, in a column of an image, from row `first` to `last`.
struct Strip {
  long long image;
  int c, column, first, last;

  __device__ __forceinline__ Strip(const Strips& of, long long thread, int V, int height) {
    image = divide(divide(divide(thread, of.vectors, c), of.width, column), of.strips, first);
    c *= V;
    first *= int(of.strip);
    last = min(first + int(of.strip), height);
  }
};
