// Where the elements of a GEMM's operands and result lie. The structs are launch parameters: the host vectors them as
// 64-bit integers, field by field (cupyops/_dispatch/gemm/gemm.py).
#pragma once

#include "common/core/fast_divmod.cuh"
#include "common/core/vector.cuh"

// TILE names the tile of the result that a block owns: 32 x 32, 64 x 64, 128 x 128, or 128 x 256 for 256.
template <int TILE> constexpr int kTileM = TILE == 256 ? 128 : TILE;
template <int TILE> constexpr int kTileN = TILE;
template <typename T, int TILE>
constexpr int kGemmThreads = TILE == 32                                      ? 64
                             : TILE == 64 || (TILE == 128 && sizeof(T) == 2) ? 128
                                                                             : 256;

// Element (i, k) of matrix `batch`: i is the row of A, the column of B or the row of the result; k the other index. Where
// k counts (image, pixel) or (channel, tap) it is split in runs; a plain matrix is one run of all k.
struct Layout {
  long long stride_i, stride_k, stride_run, stride_batch, stride_batch_outer;
  Divisor run;
  long long along_k;  // whether vectors run along k (else along i)

  __device__ __forceinline__ long long offset(int i, int k) const {
    const int whole = run.divide(k);
    return i * stride_i + whole * stride_run + (k - whole * static_cast<int>(run.divisor)) * stride_k;
  }

  // Whether W elements from any (i, k) with k (or i) a multiple of W lie side by side, aligned as one access.
  template <typename T, int W> __device__ __forceinline__ bool vectors(const T* data, int size_k) const {
    const long long step = along_k ? stride_k : stride_i, other = along_k ? stride_i : stride_k;
    const bool one_run = run.divisor >= size_k;
    const bool runs_fit = one_run || (stride_run % W == 0 && (!along_k || run.divisor % W == 0));
    const bool aligned = reinterpret_cast<unsigned long long>(data) % (W * sizeof(T)) == 0;
    return aligned && step == 1 && other % W == 0 && runs_fit;
  }
};

// out[m, n] = sum over k of A[m, k] B[k, n], for each of a batch of matrices.
struct Gemm {
  long long m, n, k, batches;
  long long ones;               // 1: B has one more column, of ones, and its sums go to Output::column
  long long splits, k_split;    // k is summed in `splits` pieces of `k_split`, each by blocks of its own
  Divisor batch_inner;          // batch = (outer, inner): broadcast batches need two strides
  long long bias_along_m;
  Layout a, b, out;

  __device__ __forceinline__ long long batch_offset(const Layout& layout, int batch) const {
    const int outer = batch_inner.divide(batch);
    return outer * layout.stride_batch_outer +
           (batch - outer * static_cast<int>(batch_inner.divisor)) * layout.stride_batch;
  }
  // The row length of the workspace of partial sums: whole vectors of 8.
  __device__ __forceinline__ long long partial_row() const { return (n + ones + 7) / 8 * 8; }
};

// A matrix read where it lies, by any strides. Elements outside are zero, so a tile may hang over the edge; index
// i == size_i reads as one where `ones` says so.
template <typename T> struct MatrixOperand {
  const T* data;
  const Layout& layout;
  int size_i, size_k;
  static constexpr bool ALONG_K = true, ALONG_I = true;  // the ways in which a plain one can lie
  bool ones, along_k, fits, plain;  // plain: one run of vectors

  // size_k is where this block's share of k ends; `ones` whether its tile has the column of ones.
  template <int W> static __device__ __forceinline__ MatrixOperand make(const T* data, const Gemm& gemm,
                                                                        const Layout& layout, int batch, int size_i,
                                                                        int size_k, bool ones = false) {
    data += gemm.batch_offset(layout, batch);
    const bool fits = layout.vectors<T, W>(data, gemm.k);
    const bool plain = fits && !ones && layout.run.divisor >= gemm.k;
    return {data, layout, size_i, size_k, ones, layout.along_k != 0, fits, plain};
  }

  // One thread's COUNT chunks of W elements of a panel: chunk j begins at (i, k + j * distance), or at (i + j * distance,
  // k) where chunks run along k. visit() hands each over: copy(j, source, count) if it lies side by side, of which `count`
  // elements are inside; put(j, chunk) if it had to be gathered. visit_plain() is all that a `plain` operand needs.
  template <int W, int COUNT> struct Cursor {
    const MatrixOperand& operand;
    const T* at;  // of use where the operand is plain
    int i, k;

    __device__ __forceinline__ Cursor(const MatrixOperand& operand, int i, int k, int)
        : operand(operand), at(operand.data + i * operand.layout.stride_i + k * operand.layout.stride_k), i(i), k(k) {}

    __device__ __forceinline__ void advance(int steps) {
      k += steps;
      at += steps * operand.layout.stride_k;
    }

    template <bool ALONG_K, int DISTANCE, typename Copy> __device__ __forceinline__ void visit_plain(Copy copy) const {
      const int left_i = operand.size_i - i, left_k = operand.size_k - k;
      const int count = min(max(ALONG_K ? left_k : left_i, 0), W), room = ALONG_K ? left_i : left_k;
      const long long step = DISTANCE * (ALONG_K ? operand.layout.stride_i : operand.layout.stride_k);
      const T* source = at;
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        copy(j, source, j * DISTANCE < room ? count : 0);
        source += step;
      }
    }

    template <int DISTANCE_I, int DISTANCE_K, typename Copy, typename Put>
    __device__ __forceinline__ void visit(Copy copy, Put put) const {
      if (operand.plain) {
        operand.along_k ? visit_plain<true, DISTANCE_I>(copy) : visit_plain<false, DISTANCE_K>(copy);
        return;
      }
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        const int at_i = operand.along_k ? i + j * DISTANCE_I : i, at_k = operand.along_k ? k : k + j * DISTANCE_K;
        const T* source = operand.template vector<W>(at_i, at_k);
        if (source) {
          copy(j, source, W);
        } else {
          put(j, operand.template gather<W>(at_i, at_k));
        }
      }
    }
  };

 private:
  // W elements from (i, k) on, if they can be read as one; null if they must be gathered.
  template <int W> __device__ __forceinline__ const T* vector(int i, int k) const {
    const bool inside = along_k ? (i < size_i && k + W <= size_k) : (i + W <= size_i && k < size_k);
    return fits && inside ? data + layout.offset(i, k) : nullptr;
  }

  template <int W> __device__ __forceinline__ Vec<T, W> gather(int i, int k) const {
    Vec<T, W> chunk;
    const int whole = layout.run.divide(k), run = layout.run.divisor;
    const long long step = along_k ? layout.stride_k : layout.stride_i,
                    wrap = layout.stride_run - run * layout.stride_k;
    const int inside = along_k ? (i < size_i ? size_k - k : 0) : (k < size_k ? size_i - i : 0);
    int left = run - (k - whole * run);
    long long at = layout.offset(i, k);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const bool one = ones && i + (along_k ? 0 : e) == size_i;
      chunk.data[e] = e < inside ? data[at] : from_acc<T>(one ? 1 : 0);
      at += step;
      if (along_k && --left == 0) {
        at += wrap;
        left = run;
      }
    }
    return chunk;
  }
};

// What is stored of sums and a bias, of W elements from (m, n) on along n: those numbers.
template <typename T> struct Rounded {
  template <int W> __device__ __forceinline__ Vec<T, W> operator()(int m, int n, const acc_t<T> (&z)[W], bool) const {
    Vec<T, W> packed;
#pragma unroll
    for (int e = 0; e < W; ++e) packed.data[e] = from_acc<T>(z[e]);
    return packed;
  }
};

// The result: written as T where its layout says, plus a bias, by way of an epilogue; or, where k is split, as partial sums in a
// workspace [batch][split][m][partial_row].
template <typename T, class Epilogue = Rounded<T>> struct Output {
  using A = acc_t<T>;
  T* data;
  A* partial;
  const T* bias;
  T* column;
  const Layout& layout;
  int size_m, size_n;
  long long partial_row;
  bool along_n, bias_along_m, fits;
  Epilogue epilogue;

  template <int W> static __device__ __forceinline__ Output make(T* data, A* partial, const T* bias, T* column,
                                                                 const Gemm& gemm, int batch, int split,
                                                                 Epilogue epilogue = {}) {
    const int m = gemm.m;
    data += gemm.batch_offset(gemm.out, batch);
    if (partial) partial += (batch * gemm.splits + split) * m * gemm.partial_row();
    if (bias && gemm.bias_along_m) bias += static_cast<long long>(batch) * m;
    if (column) column += static_cast<long long>(batch) * m;
    return {data,
            partial,
            bias,
            column,
            gemm.out,
            m,
            static_cast<int>(gemm.n),
            gemm.partial_row(),
            partial || gemm.out.along_k,
            gemm.bias_along_m != 0,
            gemm.out.vectors<T, W>(data, gemm.n),
            epilogue};
  }

  // W sums from (m, n) on, along n or along m as along_n says.
  template <int W> __device__ __forceinline__ void store(int m, int n, const A (&sums)[W]) const {
    if (partial) {
      store_partial<W>(m, n, sums);
    } else if (fits && (along_n ? (m < size_m && n + W <= size_n) : (m + W <= size_m && n < size_n))) {
      A z[W];
#pragma unroll
      for (int e = 0; e < W; ++e) z[e] = add_bias(along_n ? m : m + e, along_n ? n + e : n, sums[e]);
      store_vec<T, W>(data + layout.offset(m, n), epilogue(m, n, z, true));
    } else {
#pragma unroll 1  // an epilogue is much code
      for (int e = 0; e < W; ++e) put(along_n ? m : m + e, along_n ? n + e : n, sums[e]);
    }
  }

  __device__ __forceinline__ void put(int m, int n, A sum) const {
    if (m >= size_m) return;
    if (n < size_n) {
      const A z[1] = {add_bias(m, n, sum)};
      data[layout.offset(m, n)] = epilogue(m, n, z, false).data[0];
    }
    if (n == size_n && column) column[m] = from_acc<T>(sum);
  }

 private:
  __device__ __forceinline__ A add_bias(int m, int n, A sum) const {
    return bias ? sum + to_acc(bias[bias_along_m ? m : n]) : sum;
  }

  // n is a multiple of W and rows are whole vectors: the padding at a row's end is written too, and never read as a sum.
  template <int W> __device__ __forceinline__ void store_partial(int m, int n, const A (&sums)[W]) const {
    if (m >= size_m || n >= partial_row) return;
    Vec<A, W> packed;
#pragma unroll
    for (int e = 0; e < W; ++e) packed.data[e] = sums[e];
    store_vec<A, W>(partial + m * partial_row + n, packed);
  }
};

// A warp's way to whole vectors: its lanes leave ROWS x COLUMNS sums in shared memory of the warp's own, with
// stage(corner, row length), and each takes W that lie side by side in the result.
template <int ROWS, int COLUMNS, int W, typename Out, typename Stage>
__device__ __forceinline__ void store_by_warp(const Out& out, int m0, int n0, typename Out::A* shared, Stage stage) {
  using A = typename Out::A;
  constexpr int ROW = COLUMNS + 4, LINES = ROWS * COLUMNS / W;
  A* corner = shared + threadIdx.x / 32 * (ROWS * ROW);
  stage(corner, ROW);
  __syncwarp();
#pragma unroll 1
  for (int line = threadIdx.x % 32; line < LINES; line += 32) {
    const int row = out.along_n ? line / (COLUMNS / W) : line % (ROWS / W) * W;
    const int column = out.along_n ? line % (COLUMNS / W) * W : line / (ROWS / W);
    A sums[W];
#pragma unroll
    for (int e = 0; e < W; ++e) sums[e] = corner[(row + (out.along_n ? 0 : e)) * ROW + column + (out.along_n ? e : 0)];
    out.template store<W>(m0 + row, n0 + column, sums);
  }
  __syncwarp();
}
