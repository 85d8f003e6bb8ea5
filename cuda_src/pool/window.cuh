// Windows over planes, and how a thread walks down a column of them.
//
// Pooling is limited by the instructions that geometry costs, not by memory. So a thread keeps to one column, computes what
// concerns the column once, and walks down its rows; a row that several windows share is read once. K and S are the size and
// the stride of windows in both directions, without dilation: with them everything is unrolled. Where K is 0, the geometry
// is known at run time alone.
#pragma once

#include "common/core/fast_divmod.cuh"
#include "common/core/vector.cuh"

// The geometry: sizes of input and output planes, then kernel, stride, padding and dilation, vertical and horizontal.
struct Window {
  int H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw;

  // The same with what the compiler may know: a dilation that is always 1, and the whole window if K and S are not 0.
  template <int K, int S, bool DILATED> __device__ __forceinline__ Window known() const {
    if constexpr (K == 0) return {H, W, OH, OW, kh, kw, sh, sw, ph, pw, DILATED ? dh : 1, DILATED ? dw : 1};
    else return {H, W, OH, OW, K, K, S, S, ph, pw, 1, 1};
  }
};

// Windows that do not overlap are specialised only where all of them lie inside the plane.
template <int K, int S> constexpr bool kInside = K > 0 && K == S;

// A window in one direction: it begins at `start`, and its taps `first` to `last` lie inside the plane.
struct Taps {
  int start, first, last;

  __device__ __forceinline__ Taps(int o, int stride, int pad, int kernel, int dilation, int length)
      : start(o * stride - pad), first(0) {
    if (start < 0) first = dilation == 1 ? -start : (-start + dilation - 1) / dilation;
    const int end = length - 1 - start;
    last = min(kernel - 1, dilation == 1 ? end : end / dilation);
  }

  static __device__ __forceinline__ Taps down(const Window& p, int oh) { return Taps(oh, p.sh, p.ph, p.kh, p.dh, p.H); }
  static __device__ __forceinline__ Taps across(const Window& p, int ow) {
    return Taps(ow, p.sw, p.pw, p.kw, p.dw, p.W);
  }
};

// How many rows of windows a thread computes before it stores the first, each of N channels.
template <int N> constexpr int kRowsAtOnce = N > 1 ? 1 : 2;

// Forward: calls done(oh, result) for the outputs first <= oh < last of a column. row(h, i, any) is the result of row h alone
// under tap i of a window: the row may lie outside the plane if K is known, and counts nothing unless `any`.
// result.fold(row) adds a row to the rows above it.
template <int K, int S, int ROWS, typename Row, typename Done>
__device__ __forceinline__ void windows_down(const Window& p, int first, int last, Row row, Done done) {
  if constexpr (K == 0) {
    for (int oh = first; oh < last; ++oh) {
      const Taps down = Taps::down(p, oh);
      auto result = row(down.start + down.first * p.dh, down.first, down.first <= down.last);
      for (int i = down.first + 1; i <= down.last; ++i) result.fold(row(down.start + i * p.dh, i, true));
      done(oh, result);
    }
  } else {
    using Found = decltype(row(0, 0, true));
    Found rows[K];
#pragma unroll
    for (int i = S; i < K; ++i) rows[i] = row(first * S - p.ph + i - S, i, true);
    const auto window = [&](int oh) {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        if (i + S < K) rows[i] = rows[i + S];
        else rows[i] = row(oh * S - p.ph + i, i, true);
      }
      Found result = rows[0];
#pragma unroll
      for (int i = 1; i < K; ++i) result.fold(rows[i]);
      return result;
    };
    int oh = first;
#pragma unroll 1
    for (; oh + ROWS <= last; oh += ROWS) {
      Found results[ROWS];  // all loads come before the first store, which the compiler would not move a load over
#pragma unroll
      for (int r = 0; r < ROWS; ++r) results[r] = window(oh + r);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) done(oh + r, results[r]);
    }
#pragma unroll 1
    for (; ROWS > 1 && oh < last; ++oh) {
      Found result = window(oh);
      done(oh, result);
    }
  }
}

// The windows that cover a place in one direction, from first to last; with dilation, some of them have no tap there.
struct Covering {
  int first, last;

  __device__ __forceinline__ Covering(int place, int pad, int span, int count, const Divisor& stride) {
    const int end = place + pad, begin = end - span;  // windows start at one of begin + 1 ... end, counted from -pad
    first = begin < 0 ? 0 : stride.divide(begin) + 1;
    last = min(count - 1, stride.divide(end));
  }
};

// Backward: calls give(h, w, sum) for the elements of the tiles first <= row < last of a column of tiles. A tile is the S x S
// elements from where window (row, column) begins, so parts of it may lie outside; if K is 0, it is the element (row, column).
// get(there, oh, column - u, u) loads the gradient of a window, or none unless the window is `there`;
// add(sum, window, i, j, h, w, first) adds to `sum` what goes to the window's tap (i, j), and sets it where it is the `first`.
template <int K, int S, int ROWS, typename Sum, typename Get, typename Add, typename Give>
__device__ __forceinline__ void tiles_down(const Window& p, const Divisor& sh, const Divisor& sw, int first, int last,
                                           int column, Get get, Add add, Give give) {
  if constexpr (K == 0) {
    const Covering across(column, p.pw, (p.kw - 1) * p.dw + 1, p.OW, sw);
    for (int row = first; row < last; ++row) {
      const Covering down(row, p.ph, (p.kh - 1) * p.dh + 1, p.OH, sh);
      Sum sum = {};
      for (int oh = down.first; oh <= down.last; ++oh) {
        const int below = row + p.ph - oh * p.sh, i = p.dh == 1 ? below : below / p.dh;
        if (i * p.dh != below) continue;
#pragma unroll 2
        for (int ow = across.first; ow <= across.last; ++ow) {
          const int right = column + p.pw - ow * p.sw, j = p.dw == 1 ? right : right / p.dw;
          if (j * p.dw == right) add(sum, get(true, oh, ow, 0), i, j, row, column, false);
        }
      }
      give(row, column, sum);
    }
  } else {
    constexpr int M = (K + S - 1) / S;
    decltype(get(true, 0, 0, 0)) near[M][M];  // [t][u]: window (row - t, column - u)
    int windows[M], elements[S];  // how many rows each column of windows, and of elements, has
#pragma unroll
    for (int u = 0; u < M; ++u) windows[u] = unsigned(column - u) < unsigned(p.OW) ? p.OH : 0;
#pragma unroll
    for (int b = 0; b < S; ++b) elements[b] = unsigned(column * S - p.pw + b) < unsigned(p.W) ? p.H : 0;
    const auto fetch = [&](int oh, int u) { return get(unsigned(oh) < unsigned(windows[u]), oh, column - u, u); };
#pragma unroll
    for (int t = 0; t + 1 < M; ++t) {
#pragma unroll
      for (int u = 0; u < M; ++u) near[t][u] = fetch(first - 1 - t, u);
    }
#pragma unroll ROWS
    for (int row = first; row < last; ++row) {
#pragma unroll
      for (int t = M - 1; t >= 0; --t) {
#pragma unroll
        for (int u = 0; u < M; ++u) near[t][u] = t > 0 ? near[t - (t > 0)][u] : fetch(row, u);
      }
#pragma unroll
      for (int a = 0; a < S; ++a) {
#pragma unroll
        for (int b = 0; b < S; ++b) {
          const int h = row * S - p.ph + a, w = column * S - p.pw + b;
          Sum sum = {};
          bool fresh = true;
#pragma unroll
          for (int i = a + (M - 1) * S; i >= a; i -= S) {
#pragma unroll
            for (int j = b + (M - 1) * S; j >= b; j -= S) {
              if (i < K && j < K) {
                add(sum, near[i / S][j / S], i, j, h, w, fresh);
                fresh = false;
              }
            }
          }
          if (unsigned(h) < unsigned(elements[b])) give(h, w, sum);
        }
      }
    }
  }
}

// How many tiles a plane has: rows and columns.
template <int K, int S> struct Tiles {
  int rows, columns;

  __device__ __forceinline__ explicit Tiles(const Window& p)
      : rows(K ? (p.H + p.ph + S - 1) / max(S, 1) : p.H), columns(K ? (p.W + p.pw + S - 1) / max(S, 1) : p.W) {}
};
