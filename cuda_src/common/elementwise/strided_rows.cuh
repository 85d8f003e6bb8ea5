// Elementwise over strided rows: each tensor is [rows x cols], with contiguous rows that are a stride of its own apart.
// Tensors that are laid out alike are one row.
//
// Grid: ceil(rows * spans / blockDim.x). Block: any, one dimension. A thread owns a span: W neighbours in one row from a
// 16-byte boundary of the output on, so that it is stored at once; the first and the last of a row may be less. What lies
// otherwise in an input is read as the two aligned vectors that it straddles.
#pragma once

#include "common/core/fast_divmod.cuh"
#include "common/core/vector.cuh"

// [rows x cols], and how many spans a row is.
struct Rows {
  long long rows, cols, spans;
  Divisor by_spans;  // where there are fewer than 2^31 spans in all
};

// The 16 bytes from an address on that T may lie at, by the two or three aligned halves of a vector that they are in.
template <typename T> __device__ __forceinline__ uint4 load_across(const T* from) {
  const int bytes = reinterpret_cast<unsigned long long>(from) & 7;
  const uint2* halves = reinterpret_cast<const uint2*>(from - bytes / int(sizeof(T)));
  const uint2 a = halves[0], b = halves[1], c = sizeof(T) < 8 ? halves[2] : b;
  unsigned word[6] = {a.x, a.y, b.x, b.y, c.x, c.y};
#pragma unroll
  for (int i = 0; sizeof(T) <= 4 && i < 5; ++i) word[i] = bytes & 4 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; sizeof(T) == 2 && i < 4; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], bytes * 8);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// How a span lies in the tensors: as one aligned vector in each; across two, both in the tensor; or near an end of it.
enum Lie { kWhole, kAcross, kNearEnd };

// Elements [col, col + W) of a row, of which those in [begin, end) are there.
template <typename T, Lie LIE> struct Span {
  static constexpr int W = kVecWidth<T>;
  long long row, col;
  int begin, end;

  __device__ __forceinline__ Vec<T, W> load(const T* tensor, long long stride) const {
    const T* from = tensor + row * stride + col;
    if constexpr (LIE == kWhole) return load_vec<T, W>(from);
    Words<T> result;
    if constexpr (LIE == kAcross) {
      result.words = load_across(from);
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) result.elements.data[k] = k >= begin && k < end ? from[k] : from_acc<T>(0);
    }
    return result.elements;
  }

  __device__ __forceinline__ void store(T* tensor, long long stride, const Vec<T, W>& value) const {
    T* to = tensor + row * stride + col;
    if (LIE == kWhole || (begin == 0 && end == W)) {
      Words<T> all;
      all.elements = value;
      store16(to, all.words);
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) {
        if (k >= begin && k < end) to[k] = value.data[k];
      }
    }
  }
};

// Whether rows of T so far apart begin at 16-byte boundaries. A null pointer, and the stride of an only row, fit.
template <typename T> __device__ __forceinline__ bool rows_fit(const T* tensor, long long stride, long long rows) {
  return is_aligned16(tensor) && (rows == 1 || stride % kVecWidth<T> == 0);
}

// Which span a thread owns: of a row, from a column on if the row begins at a boundary. There may be no such row.
struct Own {
  long long row, col;

  template <typename T> static __device__ __forceinline__ Own of(const Rows& shape, long long number) {
    long long row = 0;
    if (shape.rows > 1) row = shape.by_spans.divisor ? shape.by_spans.divide(int(number)) : number / shape.spans;
    return {row, (number - row * shape.spans) * kVecWidth<T>};
  }
};

// work.at(span) for this thread's span, if it has one. FIT: rows_fit() of every tensor. `least`: the least of their strides.
// `out`, whose rows are a stride of its own apart, is stored to.
template <bool FIT, typename T, typename Work>
__device__ __forceinline__ void on_span(const Rows& shape, const Own& own, long long least, const T* out,
                                        long long stride, const Work& work) {
  constexpr int W = kVecWidth<T>;
  const long long rows = shape.rows, cols = shape.cols, row = own.row;
  if (row >= rows) return;
  if constexpr (FIT) {
    if (own.col + W <= cols) work.at(Span<T, kWhole>{row, own.col, 0, W});
    else if (own.col < cols) work.at(Span<T, kNearEnd>{row, own.col, 0, int(cols - own.col)});
  } else {
    const int past = int(reinterpret_cast<unsigned long long>(out + row * stride) & 15) / int(sizeof(T));
    const long long col = own.col - past;
    const int begin = col < 0 ? past : 0, end = cols - col < W ? int(cols - col) : W;
    if (end <= 0) return;
    // what lies before a row and behind it is the tensor's, if there are other rows there, and these are not too short
    const bool before = row > 0 ? least >= 2 * W : col >= W;
    const bool behind = row + 1 < rows ? least >= 2 * W : col + 2 * W <= cols;
    if (before && behind) work.at(Span<T, kAcross>{row, col, begin, end});
    else work.at(Span<T, kNearEnd>{row, col, begin, end});
  }
}
