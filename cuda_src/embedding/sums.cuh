// Adds rows of grad_y to rows of grad_weight, in a fixed order. All threads of a block add a long list, or a piece of one; of
// short lists a thread adds a vector of columns.
#pragma once

#include "common/elementwise/strided_rows.cuh"

// The columns of a row of grad_weight that are one vector: from a 16-byte boundary on, and fewer at the ends of the row.
template <typename T, Lie LIE> __device__ __forceinline__ Span<T, LIE> columns_of(const T* to, int unit,
                                                                                  long long size) {
  constexpr int W = kVecWidth<T>;
  const int past = LIE == kWhole ? 0 : int(reinterpret_cast<unsigned long long>(to) & 15) / int(sizeof(T));
  const long long col = unit * (long long)W - past;
  return {0, col, col < 0 ? past : 0, size - col < W ? int(size - col) : W};
}

template <typename A, typename T, int W> __device__ __forceinline__ void add_to(Vec<A, W>& sum,
                                                                                const Vec<T, W>& value) {
#pragma unroll
  for (int k = 0; k < W; ++k) sum.data[k] += to_acc(value.data[k]);
}

template <typename T, Lie LIE, typename A, int W>
__device__ __forceinline__ void store_sum(T* to, const Span<T, LIE>& span, Vec<A, W> sum, int divisor) {
  if (divisor > 1) {
#pragma unroll
    for (int k = 0; k < W; ++k) sum.data[k] /= A(divisor);
  }
  Vec<T, W> rounded;
#pragma unroll
  for (int k = 0; k < W; ++k) rounded.data[k] = from_acc<T>(sum.data[k]);
  span.store(to, 0, rounded);
}

// What is added: rows of grad_y by their positions (GradRows), or the sums of pieces by their numbers (PieceSums).
template <typename T> struct GradRows {
  const T* grad_y;
  long long size;

  template <Lie LIE> __device__ __forceinline__ Vec<T, kVecWidth<T>> load(int position, long long,
                                                                          Span<T, LIE> columns) const {
    columns.row = position;
    return columns.load(grad_y, size);
  }
};

template <typename T> struct PieceSums {
  acc_t<T>* partials;
  long long pitch;

  template <Lie LIE> __device__ __forceinline__ Vec<acc_t<T>, kVecWidth<T>> load(int number, long long unit,
                                                                                 const Span<T, LIE>&) const {
    return load_vec<acc_t<T>, kVecWidth<T>>(partials + number * pitch + unit * kVecWidth<T>);
  }
};

// Adds to `sum` the rows number `first`, `first` + `step` and so on of a list.
template <int LOADS, Lie LIE, typename From, typename T, typename A, int W>
__device__ __forceinline__ void add_rows(Vec<A, W>& sum, const int* list, int first, int count, int step,
                                         const From& from, long long unit, const Span<T, LIE>& columns) {
  constexpr int U = LIE == kWhole ? LOADS : LIE == kAcross ? LOADS / 2 : 1;
#pragma unroll 1
  for (int i = first; i < count; i += U * step) {
    decltype(from.load(0, unit, columns)) rows[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {  // without a branch, in which the compiler would wait for each load
      rows[u] = from.load(list[i + u * step < count ? i + u * step : i], unit, columns);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) add_to(sum, rows[u]);
    }
  }
}

// Adds the rows of `list`, which is in shared memory, by all threads of a block: those in y share the rows, and their sums meet
// in `sums`, one of each thread. Stores to `partial`, or where that is null divided and rounded to a row of grad_weight.
template <typename T, Lie LIE, typename From>
__device__ __forceinline__ void add_up(T* to, acc_t<T>* partial, long long size, const int* list, int count,
                                       int divisor, Vec<acc_t<T>, kVecWidth<T>>* sums, const From& from) {
  constexpr int W = kVecWidth<T>;
#pragma unroll 1
  for (long long first = 0; columns_of<T, LIE>(to, first, size).end > 0; first += blockDim.x) {
    const long long unit = first + threadIdx.x;
    const Span<T, LIE> own = columns_of<T, LIE>(to, unit, size);
    const bool inside = own.end > 0;
    const Span<T, LIE> columns = inside ? own : columns_of<T, LIE>(to, first, size);
    Vec<acc_t<T>, W> sum = {};
    add_rows<8>(sum, list, threadIdx.y, count, blockDim.y, from, inside ? unit : first, columns);
    if (blockDim.y > 1) {
      __syncthreads();
      sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
      __syncthreads();
      if (threadIdx.y > 0) continue;
      for (int y = 1; y < blockDim.y; ++y) add_to(sum, sums[y * blockDim.x + threadIdx.x]);
    }
    if (!inside) continue;
    if (partial == nullptr) store_sum<T>(to, columns, sum, divisor);
    else store_vec<acc_t<T>, W>(partial + unit * W, sum);
  }
}

// Writes zeros to a row of grad_weight, by `width` lanes.
template <typename T> __device__ __forceinline__ void clear_row(T* to, long long size, int lane, int width) {
  constexpr int W = kVecWidth<T>;
  const int before = -int(reinterpret_cast<unsigned long long>(to) / sizeof(T)) & (W - 1);  // the next boundary
  const long long head = before < size ? before : size, tail = head + ((size - head) & -W);
  for (long long i = lane; i < head; i += width) to[i] = from_acc<T>(0);
  for (long long i = tail + lane; i < size; i += width) to[i] = from_acc<T>(0);
#pragma unroll 4
  for (long long i = head + lane * W; i < tail; i += width * W) store16(to + i, {});
}

// Writes zeros to those of kWarp rows of grad_weight that are not `named`, by a warp. The rows together are whole vectors.
template <typename T> __device__ __forceinline__ void clear_rows(T* to, int size, unsigned named, int lane) {
  constexpr int W = kVecWidth<T>;
#pragma unroll 1
  for (int e = lane * W; e < kWarp * size; e += kWarp * W) {
    unsigned row = 0, here = 0;
    if (named != 0) {
      row = unsigned(e) / unsigned(size);
      here = named >> row & kFullMask >> (kWarp - 1 - (unsigned(e + W - 1) / unsigned(size) - row));
    }
    if (here == 0) {
      store16(to + e, {});
    } else {
#pragma unroll 1
      for (int k = e; k < e + W; ++k) {
        if (k == int(row + 1) * size) ++row;
        if (!(named >> row & 1)) to[k] = from_acc<T>(0);
      }
    }
  }
}

// A position, and the row that it names: ~row unless it is the last position of its list.
struct Added {
  int position, signed_row;

  __device__ __forceinline__ bool is_last() const { return signed_row >= 0; }
  __device__ __forceinline__ int row() const { return signed_row < 0 ? ~signed_row : signed_row; }
};

// Adds one vector of columns of the positions [begin, end) of `added`, and stores the sum of each list to its row of
// grad_weight. Loads go on across the ends of lists.
template <typename T, Lie LIE>
__device__ __forceinline__ void write_lists(T* grad_weight, long long size, int unit, const Added* added, int begin,
                                            int end, bool by_freq, const GradRows<T>& given) {
  constexpr int W = kVecWidth<T>, U = LIE == kWhole ? 8 : LIE == kAcross ? 4 : 1;
  Vec<acc_t<T>, W> sum = {};
  int length = 0;
#pragma unroll 1
  for (int first = begin; first < end; first += U) {
    Vec<T, W> rows[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {  // without a branch, in which the compiler would wait for each load
      const Added one = added[first + u < end ? first + u : first];
      const T* to = grad_weight + one.row() * size;
      const Span<T, LIE> columns = columns_of<T, LIE>(to, unit, size);
      const bool inside = LIE == kWhole || columns.col < size;
      rows[u] = given.load(one.position, unit, inside ? columns : columns_of<T, LIE>(to, 0, size));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u > 0 && first + u >= end) continue;
      const Added one = added[first + u];
      add_to(sum, rows[u]);
      ++length;
      if (!one.is_last()) continue;
      T* to = grad_weight + one.row() * size;
      const Span<T, LIE> columns = columns_of<T, LIE>(to, unit, size);
      if (LIE == kWhole || columns.col < size) store_sum<T>(to, columns, sum, by_freq ? length : 1);
      sum = {};
      length = 0;
    }
  }
}
