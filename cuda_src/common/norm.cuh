// What the normalisations share: statistics of a row, and forward. CENTRED: about the mean, as layer_norm; else about 0,
// as rms_norm. backward is in norm_bwd.cuh.
//
// Of rows that are held, in registers or shared memory, mean and variance are of two passes; of longer ones each thread
// takes the moments of what it reads at a time.
#pragma once

#include "common/fetched.cuh"
#include "common/moments.cuh"
#include "common/row_sums.cuh"

constexpr int kHeldThreads = 512;  // of a row in shared memory

template <typename A> struct Statistics {
  A mean, rstd;

  template <bool CENTRED> __device__ __forceinline__ A centred(A x) const { return CENTRED ? x - mean : x; }
  template <bool CENTRED> __device__ __forceinline__ A xhat(A x) const { return centred<CENTRED>(x) * rstd; }
  template <bool CENTRED> __device__ __forceinline__ A y(A x, A weight, A bias) const {
    return CENTRED ? xhat<true>(x) * weight + bias : xhat<false>(x) * weight;
  }
};

// The moments of this thread's elements of a tile of packs get(k), whose pads are 0.
template <int UNROLL, int K, int W, bool VECTORS, typename Get>
__device__ __forceinline__ auto own_moments(const Tile<K, W, VECTORS>& tile, Get get) {
  constexpr int CHAINS = W < 4 ? W : 4;  // sums that do not wait for each other
  auto pack = get(0);
  using A = decltype(pack[0]);
  A first = A(0);
  int count = 0;
#pragma unroll
  for (int e = 0; e < W; ++e) first += pack[e];
  if constexpr (!VECTORS) tile.each_of(0, [&](int) { ++count; });
  const A about = VECTORS ? first / W : first / A(count ? count : 1);
  count = 0;
  Pair<A> sums[CHAINS] = {};
#pragma unroll(UNROLL)
  for (int k = 0; k < K; ++k) {
    if (k > 0) pack = get(k);
    tile.each_of(k, [&](int e) {
      const A apart = pack[e] - about;
      sums[e % CHAINS].first += apart, sums[e % CHAINS].second += apart * apart, ++count;
    });
  }
#pragma unroll
  for (int i = 1; i < CHAINS; ++i) sums[0] = sums[0] + sums[i];
  return Moments<A>::of(A(count), about, sums[0].first, sums[0].second);
}

// 1 / sqrt(value), of half types as exact as their precision asks.
template <typename T> __device__ __forceinline__ acc_t<T> rstd_of(acc_t<T> value) {
  if constexpr (sizeof(T) == 2) return rsqrtf(value);
  else return inverse_sqrt(value);
}

// A power of two, 1 / count or less than twice that: a sum of numbers so scaled stays in range.
template <typename A> __device__ __forceinline__ A scale_for(int count) {
  return __int_as_float((127 - 31 + __clz(count)) << 23);
}

// The mean of `count` numbers x from about = x_0 scale and the sum of x scale - about. It is in range where theirs is, and the
// least numbers lose no more than a bit.
template <typename A> __device__ __forceinline__ A mean_about(A about, A sum, A count, A scale) {
  return A(2) * (about * (A(0.5) / scale) + sum / (A(2) * count * scale));
}

// The tensors of forward. weight and bias may be null; residual and summed are null but in add_rms_norm, mean unless
// CENTRED.
template <typename T> struct Forward {
  const T *x, *residual, *weight, *bias;
  T *summed, *y;
  acc_t<T>*mean, *rstd;
  long long rows, size;
  acc_t<T> eps;

  __device__ __forceinline__ bool vectors() const {
    return vectors_fit<kVecWidth<T>>(size, x, residual, weight, bias, summed, y);
  }

  __device__ __forceinline__ void keep(long long row, const Statistics<acc_t<T>>& of) const {
    if (mean) mean[row] = of.mean;
    rstd[row] = of.rstd;
  }
};

// A factor or a summand for each column; without it, 1 or 0.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> load_parameter(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* parameter, int k,
                                                  float otherwise) {
  if (parameter) return load_per_column(tile, parameter, k, T());
  return Pack<T>::filled(from_acc<T>(otherwise));
}

// y for pack k of the tile that begins with column `start`; y points to that.
template <bool CENTRED, int K, bool VECTORS, typename T>
__device__ __forceinline__ void store_normalised(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Forward<T>& to, T* y,
                                                 long long start, int k, const Pack<T>& x,
                                                 const Statistics<acc_t<T>>& of) {
  const Pack<T> w = load_parameter(tile, to.weight ? to.weight + start : nullptr, k, 1);
  const Pack<T> b = CENTRED ? load_parameter(tile, to.bias ? to.bias + start : nullptr, k, 0) : Pack<T>{};
  store_pack(tile, y, k, [&](int e) { return of.template y<CENTRED>(x[e], w[e], b[e]); });
}

template <int W, typename A> __device__ __forceinline__ A tree_sum(const A (&parts)[W]) {
  return reduce_elements<Sum, 1, W>([&](int, int e) { return parts[e]; });
}

template <typename T, typename F> __device__ __forceinline__ Pack<T> rounded(F f) {
  Pack<T> pack;
  round_to_words<T>(pack.word, 0, f);
  return pack;
}

template <typename T> __device__ __forceinline__ Pack<T> rounded_sum(const Pack<T>& a, const Pack<T>& b) {
  return rounded<T>([&](int e) { return a[e] + b[e]; });
}

// Of this thread's elements, the sum of the squares.
template <int K, int W, typename Get> __device__ __forceinline__ auto own_squares(Get get) {
  decltype(get(0)) packs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = get(k);
  return reduce_elements<Sum, K, W>([&](int k, int e) { return packs[k][e] * packs[k][e]; });
}

// The statistics of a row of packs get(k), whose pads are 0, and where `lone` of an element `alone` more, which else is 0.
template <bool CENTRED, int K, typename T, typename Get, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> statistics(const Tile<K, kVecWidth<T>, true>& tile, const Forward<T>& to,
                                                    Get get, Sums& sums, bool lone = false, A alone = A(0)) {
  constexpr int W = kVecWidth<T>;
  const A count = A(int(to.size));
  if constexpr (!CENTRED) {
    return {A(0), rstd_of<T>(sums.add(own_squares<K, W>(get) + alone * alone) / count + to.eps)};
  } else {
    const A scale = scale_for<A>(int(to.size));
    A parts[W] = {}, mean;
    if constexpr (K == 1) {  // about an element: of short rows that chance to be nearly constant the mean is then exact
      const Pack<T> x = get(0);
      const A about = __shfl_sync(kFullMask, x[0], 0, blockDim.x) * scale;
      tile.each_of(0, [&](int e) { parts[e] = fma(x[e], scale, -about); });
      if (lone) parts[0] += fma(alone, scale, -about);
      mean = mean_about(about, sums.add(tree_sum(parts)), count, scale);
    } else {
      parts[0] = alone * scale;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Pack<T> x = get(k);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[e], scale, parts[e]);
      }
      mean = sums.add(tree_sum(parts)) / (count * scale);
    }
#pragma unroll
    for (int e = 0; e < W; ++e) parts[e] = A(0);
    if (lone) parts[0] = (alone - mean) * (alone - mean);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> x = get(k);
      tile.each_of(k, [&](int e) {
        const A apart = x[e] - mean;
        parts[e] = fma(apart, apart, parts[e]);
      });
    }
    return {mean, rstd_of<T>(sums.add(tree_sum(parts)) / count + to.eps)};
  }
}

// As norm_rows: rows are fetched into shared memory, see Fetched, with as many stages as said.
template <int TENSORS, int K, typename T, typename Sums>
__device__ __forceinline__ void norm_rows_fetched(const Forward<T>& to, int stages, Sums& sums) {
  using Row = Tile<K, kVecWidth<T>, true>;
  const auto fetched = Fetched<TENSORS, K, T>::of_thread();
  const auto fetch = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    fetched.fetch(tile, to.x + row * to.size, stage, 0);
    if (TENSORS > 1) fetched.fetch(tile, to.residual + row * to.size, stage, 1);
  };
  const auto normalise = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    const long long at = row * to.size;
    if constexpr (TENSORS > 1) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Pack<T> sum = rounded_sum(fetched.get(stage, 0, k), fetched.get(stage, 1, k));
        store_words_of(tile, to.summed + at, k, sum.word);
        fetched.put(sum, stage, 0, k);
      }
    }
    const auto of = statistics<false>(tile, to, [&](int k) { return fetched.get(stage, 0, k); }, sums);
#pragma unroll
    for (int k = 0; k < K; ++k) store_normalised<false>(tile, to, to.y + at, 0, k, fetched.get(stage, 0, k), of);
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  };
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  each_fetched(first, threadIdx.y, stride, to.rows, stages == 2, fetch, normalise);
}

// The elements of `parameter` from number blockIdx.y on, to row blockIdx.y of `shifted`: what the packs of a row meet of
// which so many elements lie before a 16-byte boundary. Grid: (any, W); a row of `shifted` has whole packs, none fewer than
// all elements are. Block: any.
template <typename T> __device__ __forceinline__ void shift_parameter(const T* parameter, T* shifted, long long size) {
  constexpr int W = kVecWidth<T>;
  const long long packs = (size + W - 1) / W;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < packs;
       i += gridDim.x * (long long)blockDim.x) {
    Pack<T> pack = {};
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const long long from = i * W + e + blockIdx.y;
      if (from < size) pack.set(e, parameter[from]);
    }
    store_words(shifted + (blockIdx.y * packs + i) * W, pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  }
}

// *y = what is said of the thread's lone element, of `column`.
template <bool CENTRED, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void store_lone(const Forward<T>& to, T* y, int column, T x, const Statistics<A>& of) {
  const A w = to.weight ? to_acc(to.weight[column]) : A(1), b = CENTRED && to.bias ? to_acc(to.bias[column]) : A(0);
  *y = from_acc<T>(of.template y<CENTRED>(to_acc(x), w, b));
}

// K packs `step` elements apart, the first at `own`; 0 for those `left` elements or more behind that. Unless VECTORS they
// may be off 16-byte boundaries.
template <bool VECTORS, int K, typename T>
__device__ __forceinline__ void load_own(const T* own, int left, int step, Pack<T> (&packs)[K]) {
  if (VECTORS || is_aligned16(own)) {
#pragma unroll
    for (int k = 0; k < K; ++k) packs[k] = k * step < left ? load_aligned(own + k * step) : Pack<T>{};
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      packs[k] = {};
      if (k * step >= left) continue;
#pragma unroll
      for (int e = 0; e < kVecWidth<T>; ++e) packs[k].set(e, own[k * step + e]);
    }
  }
}

template <typename T> __device__ __forceinline__ void store_words(T* to, const Pack<T>& pack) {
  store_words(to, pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
}

// As norm_rows: rows in registers.
template <bool CENTRED, int TENSORS, int K, bool VECTORS, typename T, typename Sums>
__device__ __forceinline__ void norm_rows_loaded(const Forward<T>& to, Sums& sums) {
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  const int own = threadIdx.x * W, step = blockDim.x * W;
  const long long pitch = (to.size + W - 1) & -W;
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  for (long long row = first; row - threadIdx.y < to.rows; row += stride) {
    const Cut<W, VECTORS> cut(row, to.rows, to.size);
    const Row tile = Row::at(row, to.rows, cut.whole);
    const int left = tile.left - own;
    long long at = row * to.size + cut.head + own;
    fold_address(at);
    Pack<T> x[K];
    load_own<VECTORS>(to.x + at, left, step, x);
    const long long place = row * to.size + cut.column;
    T alone = from_acc<T>(0);
    if (cut.lone) alone = to.x[place];
    if constexpr (TENSORS > 1) {
      Pack<T> residual[K];
      load_own<VECTORS>(to.residual + at, left, step, residual);
      T* summed = to.summed + at;
      fold_address(summed);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        x[k] = rounded_sum(x[k], residual[k]);
        if (k * step < left) store_words(summed + k * step, x[k]);
      }
      if (cut.lone) to.summed[place] = alone = from_acc<T>(to_acc(alone) + to_acc(to.residual[place]));
    }
    const auto get = [&](int k) {
      x[k].fold();
      return x[k];
    };
    const auto of = statistics<CENTRED>(tile, to, get, sums, cut.lone, to_acc(alone));
    T* y = to.y + at;
    fold_address(y);
    const long long shifted = cut.head * pitch + own;
    const auto parameter = [&](const T* values, int k, float otherwise) {
      return values ? load_aligned(values + shifted + k * step) : Pack<T>::filled(from_acc<T>(otherwise));
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k * step >= left) continue;
      const Pack<T> w = parameter(to.weight, k, 1), b = CENTRED ? parameter(to.bias, k, 0) : Pack<T>{};
      store_words(y + k * step, rounded<T>([&](int e) { return of.template y<CENTRED>(x[k][e], w[e], b[e]); }));
    }
    if (cut.lone) store_lone<CENTRED>(to, to.y + place, cut.column, alone, of);
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  }
}

// Rows held by a block, each read once. Grid: any. Block: see rows.cuh; K packs of each thread are a row. TENSORS are x and,
// in add_rms_norm, residual. Threads own whole packs of y. mean and rstd are kept for backward, a number per row. VECTORS:
// whether all rows and tensors fit; about 0, shared memory is then as Fetched, with as many stages as said. Else rows go to
// registers, at least 2 W threads share one that is not of whole packs, only what is written must begin at 16-byte
// boundaries, and the parameters are as shift_parameter() leaves them.
template <bool CENTRED, int TENSORS, int K, bool VECTORS, typename T>
__device__ __forceinline__ void norm_rows(const Forward<T>& to, int stages) {
  using Sums = RowSums<acc_t<T>, 1, false>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  if constexpr (!CENTRED && VECTORS) norm_rows_fetched<TENSORS, K>(to, stages, sums);
  else norm_rows_loaded<CENTRED, TENSORS, K, VECTORS>(to, sums);
}

// As norm_rows unless VECTORS, for rows too long for registers: they wait in shared memory, 16 bytes for each pack, which
// each thread fills and reads for itself. Where all fits, the parameters are as they come. Block: kHeldThreads.
template <bool CENTRED, int TENSORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_held(const Forward<T>& to) {
  constexpr int W = kVecWidth<T>, K = 4;  // packs under way at a time
  constexpr int STEP = kHeldThreads * W;
  using Sums = RowSums<A, 1, false>;
  extern __shared__ uint4 held[];
  __shared__ typename Sums::Room room;
  Sums sums(room);
  T* mine = reinterpret_cast<T*>(held + threadIdx.x);
  const int own = threadIdx.x * W;
  const A count = A(int(to.size)), scale = scale_for<A>(int(to.size));
  const long long pitch = (to.size + W - 1) & -W;
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const Cut<W, false> cut(row, to.rows, to.size);
    const long long at = row * to.size + cut.head + own, place = row * to.size + cut.column;
    const int left = cut.whole - own;
    A parts[W] = {}, mean = A(0);
    T alone = from_acc<T>(0);
    if (cut.lone) alone = to.x[place];
    if (TENSORS > 1 && cut.lone) to.summed[place] = alone = from_acc<T>(to_acc(alone) + to_acc(to.residual[place]));
    for (int start = 0; start < left; start += K * STEP) {
      Pack<T> x[K], residual[K];
      load_own<false>(to.x + at + start, left - start, STEP, x);
      if (TENSORS > 1) load_own<false>(to.residual + at + start, left - start, STEP, residual);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (start + k * STEP >= left) break;
        if (TENSORS > 1) store_words(to.summed + at + start + k * STEP, x[k] = rounded_sum(x[k], residual[k]));
        *reinterpret_cast<uint4*>(mine + start + k * STEP) =
            make_uint4(x[k].word[0], x[k].word[1], x[k].word[2], x[k].word[3]);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[k][e], CENTRED ? scale : x[k][e], parts[e]);
      }
    }
    if constexpr (CENTRED) {
      parts[0] += to_acc(alone) * scale;
      mean = sums.add(tree_sum(parts)) / (count * scale);
#pragma unroll
      for (int e = 0; e < W; ++e) parts[e] = A(0);
#pragma unroll 4
      for (int start = 0; start < left; start += STEP) {
        const Pack<T> x = load_aligned(mine + start);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[e] - mean, x[e] - mean, parts[e]);
      }
    }
    if (cut.lone) parts[0] += (to_acc(alone) - mean) * (to_acc(alone) - mean);
    const Statistics<A> of = {mean, rstd_of<T>(sums.add(tree_sum(parts)) / count + to.eps)};
    const long long shifted = cut.head * pitch + own;
    for (int start = 0; start < left; start += K * STEP) {
      Pack<T> w[K], b[K];
      const auto load = [&](const T* values, Pack<T>(&packs)[K], float otherwise) {
        if (values) return load_own<true>(values + shifted + start, left - start, STEP, packs);
#pragma unroll
        for (int k = 0; k < K; ++k) packs[k] = Pack<T>::filled(from_acc<T>(otherwise));
      };
      load(to.weight, w, 1);
      if (CENTRED) load(to.bias, b, 0);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (start + k * STEP >= left) break;
        const Pack<T> x = load_aligned(mine + start + k * STEP);
        store_words(to.y + at + start + k * STEP,
                    rounded<T>([&](int e) { return of.template y<CENTRED>(x[e], w[k][e], b[k][e]); }));
      }
    }
    if (cut.lone) store_lone<CENTRED>(to, to.y + place, cut.column, alone, of);
    if (threadIdx.x == 0) to.keep(row, of);
  }
}

// See norm_wide: one row, read twice, the second time from its end: what was read last is still in cache.
template <bool CENTRED, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> norm_wide_row(const Forward<T>& to, long long row, Moments<A>* shared) {
  using Part = Tile<K, kVecWidth<T>, VECTORS>;
  const int parts = Part::count(to.size);
  Pack<T> packs[K], residual[K];
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  const auto load = [&](const Part& part, long long at, bool again) {
    const bool summed = VECTORS && again && to.residual;  // else packs have what other blocks may be about to write
    load_row(part, (summed ? to.summed : to.x) + at, from_acc<T>(0), packs);
    if (!to.residual || summed) return;
    load_row(part, to.residual + at, from_acc<T>(0), residual);
#pragma unroll
    for (int k = 0; k < K; ++k) packs[k] = rounded_sum(packs[k], residual[k]);
  };
  const auto store_sum = [&](const Part& part, int c) {
#pragma unroll
    for (int k = 0; k < K; ++k) store_words_of(part, to.summed + row * to.size + start(c), k, packs[k].word);
  };
  const auto get = [&](int k) { return packs[k]; };
  A squares = A(0);
  Moments<A> moments = {};
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c), false);
    if (VECTORS && to.residual) store_sum(part, c);
    if constexpr (CENTRED) moments.merge(own_moments<K>(part, get));
    else squares += own_squares<K, kVecWidth<T>>(get);
  }
  Statistics<A> of;
  if constexpr (CENTRED) {
    const Moments<A> all = block_merge(moments, shared);
    of = {all.mean, all.rstd(to.eps)};
  } else {
    of = {A(0), inverse_sqrt(block_reduce<Sum>(squares, &shared->count) / to.size + to.eps)};
  }
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c), true);
    if (!VECTORS && to.residual) store_sum(part, c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_normalised<CENTRED>(part, to, to.y + row * to.size + start(c), start(c), k, packs[k], of);
    }
  }
  return of;
}

// As norm_rows, for rows too long to be held, whose parameters are as they come. Block: (a multiple of 32, 1).
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_wide(const Forward<T>& to) {
  __shared__ Moments<acc_t<T>> shared[kWarp];
  const bool vectors = to.vectors();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const auto of =
        vectors ? norm_wide_row<CENTRED, 4, true>(to, row, shared) : norm_wide_row<CENTRED, 2, false>(to, row, shared);
    if (threadIdx.x == 0) to.keep(row, of);
  }
}
