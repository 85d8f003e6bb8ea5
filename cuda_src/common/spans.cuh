// Elementwise over rows that are apart: each tensor is [rows x cols], its rows contiguous and a stride of its own apart.
// Tensors that are laid out alike are one row.
//
// Grid: ceil(rows * spans / blockDim.x), spans = spans_of(cols). Block: any, one dimension. A span is W neighbours in one
// row, a thread's own: from a 16-byte boundary of the output on, so that it is stored at once, and the first and the last
// of a row may be less. What lies otherwise in an input is read as the two aligned vectors that it straddles.
#pragma once

#include "common/divisor.cuh"
#include "common/vec.cuh"

// [rows x cols], and how many spans a row is.
struct Rows {
  long long rows, cols, spans;
  Divisor by_spans;  // where there are fewer than 2^31 spans in all
};

// The W elements of words that begin `bytes` behind the first of two vectors.
template <typename T> __device__ __forceinline__ uint4 straddled(uint4 a, uint4 b, int bytes) {
  unsigned word[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = bytes & 8 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; sizeof(T) <= 4 && i < 5; ++i) word[i] = bytes & 4 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; sizeof(T) == 2 && i < 4; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], bytes % 4 * 8);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename T> union Words {
  uint4 words;
  Vec<T, kVecWidth<T>> elements;
  __device__ __forceinline__ Words() {}
};

// Elements [col, col + W) of a row, of which those in [begin, end) are there. WHOLE: all, and aligned in every tensor.
template <typename T, bool WHOLE> struct Span {
  static constexpr int W = kVecWidth<T>;
  long long rows, row, cols, col;
  int begin, end;

  __device__ __forceinline__ Vec<T, W> load(const T* tensor, long long stride) const {
    const T* from = tensor + row * stride + col;
    if constexpr (WHOLE) {
      return load_vec<T, W>(from);
    } else {
      const int bytes = reinterpret_cast<unsigned long long>(from) & 15;
      const T *aligned = from - bytes / int(sizeof(T)), *past = tensor + (rows - 1) * stride + cols;
      Words<T> result;
      if (aligned >= tensor && aligned + (bytes ? 2 * W : W) <= past) {
        result.words = *reinterpret_cast<const uint4*>(aligned);
        if (bytes) result.words = straddled<T>(result.words, *reinterpret_cast<const uint4*>(aligned + W), bytes);
      } else {
#pragma unroll
        for (int k = 0; k < W; ++k) result.elements.data[k] = k >= begin && k < end ? from[k] : from_acc<T>(0);
      }
      return result.elements;
    }
  }

  __device__ __forceinline__ void store(T* tensor, long long stride, const Vec<T, W>& value) const {
    T* to = tensor + row * stride + col;
    if (WHOLE || (begin == 0 && end == W)) {
      store_vec<T, W>(to, value);
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

// work.at(span) for this thread's span, if it has one. `fit`: rows_fit() of every tensor; `out`, whose rows are a stride of
// its own apart, is stored to.
template <typename T, typename Work>
__device__ __forceinline__ void each_span(const Rows& shape, bool fit, const T* out, long long stride,
                                          const Work& work) {
  constexpr int W = kVecWidth<T>;
  const long long number = global_thread();
  long long row = 0;
  if (shape.rows > 1) {
    row = shape.by_spans.divisor ? shape.by_spans.divide(int(number)) : number / shape.spans;
    if (row >= shape.rows) return;
  }
  const long long col = (number - row * shape.spans) * W;
  if (fit && col + W <= shape.cols) {
    work.at(Span<T, true>{shape.rows, row, shape.cols, col, 0, W});
    return;
  }
  const int past = int(reinterpret_cast<unsigned long long>(out + row * stride) & 15) / int(sizeof(T));
  const long long first = col - past, left = shape.cols - first;
  if (left <= 0) return;
  work.at(Span<T, false>{shape.rows, row, shape.cols, first, first < 0 ? past : 0, left < W ? int(left) : W});
}
