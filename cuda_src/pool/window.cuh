// Windows over planes, and how threads walk down their columns.
//
// Geometry in instructions is what limits pooling, not memory: so a thread keeps to one column, where all that concerns
// the columns is worked out once, and goes down its rows; a row that several windows share is looked at once. K and S, where
// they are not 0, are the size and stride of windows in both directions, undilated: then all of it is unrolled.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/core/fast_divmod.cuh"
#include "common/core/vector.cuh"

// The geometry: sizes of input and output planes, and kernel, stride, padding, dilation.
struct Window {
  int H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw;

  // The same with what the compiler knows: dilation if it is always 1; all of the window if K and S are not 0.
  template <int K, int S, bool DILATED> __device__ __forceinline__ Window known() const {
    if constexpr (K == 0) return {H, W, OH, OW, kh, kw, sh, sw, ph, pw, DILATED ? dh : 1, DILATED ? dw : 1};
    else return {H, W, OH, OW, K, K, S, S, ph, pw, 1, 1};
  }
};

// Windows that tile are specialised only where all lie inside.
template <int K, int S> constexpr bool kInside = K > 0 && K == S;

// A window in one direction: it begins at `start`, and of its taps `first` to `last` lie inside.
struct Taps {
  int start, first, last;

  __device__ __forceinline__ Taps(int o, int stride, int pad, int kernel, int dilation, int length)
      : start(o * stride - pad), first(0) {
    if (start < 0) first = dilation == 1 ? -start : (-start + dilation - 1) / dilation;
    const int room = length - 1 - start;
    last = min(kernel - 1, dilation == 1 ? room : room / dilation);
  }

  static __device__ __forceinline__ Taps down(const Window& p, int oh) { return Taps(oh, p.sh, p.ph, p.kh, p.dh, p.H); }
  static __device__ __forceinline__ Taps across(const Window& p, int ow) {
    return Taps(ow, p.sw, p.pw, p.kw, p.dw, p.W);
  }
};

// How many rows of windows a thread has under way, each of N planes.
template <int N> constexpr int kRowsAtOnce = N > 1 ? 1 : 2;

// Forward: done(oh, result) for the outputs first <= oh < last of a column. row(h, i, any) is what tap i of a window takes of
// row h, which may be outside if K; nothing unless `any`. into.fold(row) adds a row to those above it.
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
      Found results[ROWS];  // all before the first is stored: what is loaded may seem to be stored to
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

// The windows that cover a place in one direction, apart from dilation: first to last.
struct Covering {
  int first, last;

  __device__ __forceinline__ Covering(int place, int pad, int span, int count, const Divisor& stride) {
    const int end = place + pad, begin = end - span;  // windows start at one of begin + 1 ... end, counted from -pad
    first = begin < 0 ? 0 : stride.divide(begin) + 1;
    last = min(count - 1, stride.divide(end));
  }
};

// Backward: give(h, w, sum) for the elements of the tiles first <= row < last of a column of tiles. A tile is S x S elements
// from where window (row, column) begins, so parts of it may be outside; without K, it is the element (row, column).
// get(there, oh, column - u, u) is a window, one of no effect unless it is `there`; add(sum, window, i, j, h, w, first) adds
// what its tap (i, j) has of it to `sum`, 0 at first.
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
    decltype(get(true, 0, 0, 0)) near[M][M];  // [t][u]: of window (row - t, column - u)
    int windows[M], elements[S];  // rows in which there are any, in each column
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

// The rows of tiles, and of their elements and windows.
template <int K, int S> struct Tiles {
  int rows, columns;

  __device__ __forceinline__ explicit Tiles(const Window& p)
      : rows(K ? (p.H + p.ph + S - 1) / max(S, 1) : p.H), columns(K ? (p.W + p.pw + S - 1) / max(S, 1) : p.W) {}
};

// What the tiles first <= row < last of a plane are: elements of the rows top <= h < bottom, of which windows
// begin <= oh < end have some.
template <int K, int S> struct Extent {
  int top, bottom, begin, end;

  __device__ __forceinline__ Extent(const Window& p, const Divisor& sh, int first, int last) {
    if constexpr (K == 0) {
      const int span = (p.kh - 1) * p.dh + 1;
      top = first, bottom = last;
      begin = Covering(top, p.ph, span, p.OH, sh).first, end = Covering(bottom - 1, p.ph, span, p.OH, sh).last + 1;
    } else {
      top = max(first * S - p.ph, 0), bottom = min(last * S - p.ph, p.H);
      begin = max(first - (K - 1) / S, 0), end = min(last, p.OH);
    }
  }
};

// What offsets in a band, or in an image whose channels are neighbours, are computed in: less than 2^31 where K is known.
template <int K> struct OffsetOf { using type = int; };
template <> struct OffsetOf<0> { using type = long long; };
template <int K> using offset_t = typename OffsetOf<K>::type;

// --- contiguous planes: bands of them in shared memory ---

// How blocks share planes: `each` whole planes to a block, or a plane in count.divisor bands of `rows`. Of a block's threads,
// across.divisor are side by side, in `groups`; each group has strips of `strip` rows, strips.divisor of them in a band.
struct Bands {
  long long planes, each, rows, shared;  // shared: whether what a band needs fits into shared memory
  long long groups, strip;
  Divisor count, across, strips;
};

// Rows first <= r < last of `planes` planes from `plane` on.
struct Band {
  long long plane;
  int planes, first, last;

  __device__ __forceinline__ Band(const Bands& b, int height) {
    const int group = b.count.divide(blockIdx.x);
    first = int(blockIdx.x - group * int(b.count.divisor)) * int(b.rows);
    last = min(first + int(b.rows), height);
    plane = group * b.each;
    planes = int(min(b.each, b.planes - plane));
  }

  // f(plane of the band, first row, last row, column) for this thread's strips.
  template <typename F> __device__ __forceinline__ void each_strip(const Bands& b, int width, F f) const {
    const int group = b.across.divide(threadIdx.x), left = threadIdx.x - group * int(b.across.divisor);
    if (group >= b.groups) return;
    for (int strip = group; strip < planes * int(b.strips.divisor); strip += int(b.groups)) {
      const int at = b.strips.divide(strip);
      const int begin = first + (strip - at * int(b.strips.divisor)) * int(b.strip);
      const int end = min(begin + int(b.strip), last);
      for (int column = left; column < width; column += int(b.across.divisor)) f(at, begin, end, column);
    }
  }
};

// Where the element of a run that is at `run` lies behind a 16-byte boundary.
template <typename T> __device__ __forceinline__ int lead_of(const T* run) {
  return int(reinterpret_cast<unsigned long long>(run) / sizeof(T) % kVecWidth<T>);
}

// Room in shared memory for `count` elements that lie to 16-byte boundaries as those at `run` do: where the first is.
template <typename T> __device__ __forceinline__ T* take_room(uint4*& shared, const T* run, int count) {
  T* first = reinterpret_cast<T*>(shared) + lead_of(run);
  shared += ((lead_of(run) + count) * int(sizeof(T)) + 15) / 16;
  return first;
}

// The copy in shared memory of the run of `count` from element `first` of a tensor of `total`, on its way until
// wait_for_runs(). Packs at its ends are fetched with what is around them: of the tensor's ends alone, elements are.
template <typename T>
__device__ __forceinline__ const T* fetch_run(uint4*& shared, const T* tensor, long long total, long long first,
                                              int count) {
  constexpr int V = kVecWidth<T>;
  const T* run = tensor + first;
  T* held = take_room(shared, run, count);
  const int lead = lead_of(run), whole = ((lead + count + V - 1) & -V) - lead;
  const int begin = first >= lead ? -lead : V - lead, end = first + whole <= total ? whole : whole - V;
#pragma unroll 4
  for (int e = begin + int(threadIdx.x) * V; e < end; e += blockDim.x * V) fetch16(held + e, run + e);
  const int before = threadIdx.x, behind = max(max(begin, end), 0) + threadIdx.x;
  if (before < min(begin, count)) held[before] = run[before];
  if (behind < count) held[behind] = run[behind];
  return held;
}

__device__ __forceinline__ void wait_for_runs() {
  end_group();
  wait_for_groups<0>();
  __syncthreads();
}

// The reverse, of what take_room() gave and the block has filled: vectors, and one by one what is around them.
template <typename T> __device__ __forceinline__ void store_run(T* run, const T* held, int count) {
  constexpr int V = kVecWidth<T>;
  const int head = min((V - lead_of(run)) & (V - 1), count), body = (count - head) & -V, tail = count - head - body;
#pragma unroll 4
  for (int e = head + int(threadIdx.x) * V; e < head + body; e += blockDim.x * V) {
    *reinterpret_cast<uint4*>(run + e) = *reinterpret_cast<const uint4*>(held + e);
  }
  if (threadIdx.x < head) run[threadIdx.x] = held[threadIdx.x];
  if (threadIdx.x < tail) run[head + body + threadIdx.x] = held[head + body + threadIdx.x];
}

// Results of a block that it stores itself, by store_run(): of less than 4 bytes, which a warp has few whole sectors of.
template <typename T> constexpr bool kStaged = sizeof(T) < 4;

// Where threads put results of the run from `run` on.
template <typename T> __device__ __forceinline__ T* stage_run(uint4*& shared, T* run, int count) {
  if constexpr (kStaged<T>) return take_room(shared, run, count);
  else return run;
}

// --- channels last: each thread has V channels of a strip ---

// n = quotient * d + remainder; 64-bit division only where n asks for it.
__device__ __forceinline__ long long divide(long long n, const Divisor& d, int& remainder) {
  const long long quotient = n >> 31 == 0 ? d.divide(int(n)) : n / d.divisor;
  remainder = int(n - quotient * d.divisor);
  return quotient;
}

// How threads divide: vectors of channels, columns, strips of `strip` rows, images.
struct Cells {
  long long strip;
  Divisor vectors, width, strips;
};

// A thread's channels from c on, in a column of an image, from row `first` to `last`.
struct Cell {
  long long image;
  int c, column, first, last;

  __device__ __forceinline__ Cell(const Cells& cells, long long thread, int V, int height) {
    image = divide(divide(divide(thread, cells.vectors, c), cells.width, column), cells.strips, first);
    c *= V;
    first *= int(cells.strip);
    last = min(first + int(cells.strip), height);
  }
};
