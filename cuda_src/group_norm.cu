// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)       over the m of a group
// y = xhat weight + bias                                                      weight and bias of the element's channel
//
// g = sum(grad_y),   h = sum(grad_y xhat)                                       over the s of each plane (n, channel, s)
// grad_x = rstd (grad_y weight - c2 - xhat c1),   c1 = sum(weight h) / m,   c2 = sum(weight g) / m        over the group
// grad_weight = sum(h),   grad_bias = sum(g)                                                                  over the n
//
// A group, channels of one image, is a row of neighbours. Where it fits a block, or the blocks of a cluster, it is read
// once: into registers where planes are whole packs of 16 bytes, else into shared memory. Else several blocks share it: a
// first pass leaves what each has found, the second combines that, from the end: what was read last is still in cache.
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); of groups too large to hold, 3 and 5. About 8 flops
// forward, 12 backward.
//
// Reached on an H200 (GB/s of the least of these bytes, forward / backward; a copy: 4251), G32 bf16: 32x512x32x32 2473 /
// 2172, 8x256x128x128 2174 / 2334, 32x512x31x33 1764 / 1999, 64x256x4095 2485 / 2553, 1024x64x7x7 G16 1137 / 1047. Lost:
// blocks load, wait for each other and store in turn; of small tensors, the start of launches.
#include "common/cluster.cuh"
#include "common/runs.cuh"

constexpr int kThreads = 256;
constexpr int kHeldThreads = 512;
constexpr int kFinished = 8;  // channels of a block that adds up their parts
constexpr int kMostFinishers = 128;

struct Groups {
  long long count, channels;  // groups of an image, channels of a group
  Divisor plane;  // by the elements of a channel

  __device__ __forceinline__ long long first(long long group) const { return group % count * channels; }
};

// A pack in a group: where in the group its first element would be, and which of its elements are there.
struct InGroup {
  int at, first, last;

  // f(c, from, to) for each channel c of the group that has elements there: those of from <= e < to, and others where it
  // is the only one, as it mostly is, and with ONE always.
  template <bool ONE, typename F> __device__ __forceinline__ void each_channel(const Groups& groups, F f) const {
    if constexpr (ONE) return f(groups.plane.divide(at), 0, 16);
    int c = groups.plane.divide(at + first), from = first, plane = int(groups.plane.divisor);
    int border = (c + 1) * plane - at;
    if (border >= last) return f(c, 0, 16);
#pragma unroll 1
    while (from < last) {
      f(c, from, min(border, last));
      from = border, border += plane, ++c;
    }
  }
};

template <typename T> __device__ __forceinline__ acc_t<T> parameter(const T* values, long long c, float otherwise) {
  return values ? to_acc(values[c]) : acc_t<T>(otherwise);
}

// A mean as rounded, and what that left out: in short groups that chance to be nearly constant it weighs, times rstd.
// Half types differ by more than that, and long groups too: there it is 0.
template <typename A> using Mean = Pair<A>;

// (x - mean) rstd weight + bias of a channel; with an infinite weight as PyTorch has it, x (rstd weight) and the rest. So
// half types always, whose mean is no more than a few thousand times what they differ from it by: it is one operation.
template <typename T> struct Affine {
  acc_t<T> mean, scale, shift;

  __device__ __forceinline__ Affine(Mean<acc_t<T>> mu, acc_t<T> rstd, const T* weight, const T* bias, long long c)
      : mean(mu.first), scale(rstd * parameter(weight, c, 1)), shift(parameter(bias, c, 0)) {
    if (sizeof(T) == 2 || !isfinite(scale)) shift -= mean * scale, mean = 0;
    else if (mu.second != acc_t<T>(0)) shift -= mu.second * scale;
  }
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const {
    return sizeof(T) == 2 ? fma(x, scale, shift) : (x - mean) * scale + shift;
  }
};

// y of a pack of x.
template <bool ONE, typename T>
__device__ __forceinline__ Pack<T> normalised(const InGroup& place, const Groups& groups, long long group,
                                              const Pack<T>& x, const T* weight, const T* bias, Mean<acc_t<T>> mean,
                                              acc_t<T> rstd) {
  constexpr int W = kVecWidth<T>;
  acc_t<T> y[W] = {};
  const long long channel = groups.first(group);
  place.template each_channel<ONE>(groups, [&](int c, int from, int to) {
    const Affine<T> affine(mean, rstd, weight, bias, channel + c);
#pragma unroll
    for (int e = 0; e < W; ++e) y[e] = from <= e && e < to ? affine(x[e]) : y[e];
  });
  Pack<T> pack;
  round_to_words<T>(pack.word, 0, [&](int e) { return y[e]; });
  return pack;
}

// c2 and c1, of the sums over a group, c2 together with what xhat owes to the rest of the mean.
template <typename A> __device__ __forceinline__ Pair<A> means(Pair<A> sums, A size, Mean<A> mean, A rstd) {
  Pair<A> c{sums.first / size, sums.second / size};
  if (mean.second != A(0) && isfinite(c.second)) c.first -= mean.second * rstd * c.second;
  return c;
}

// rstd (grad_y weight - c2 - xhat c1) of a channel; half types have what all of it have in common computed once.
template <typename T> struct Gradient {
  using A = acc_t<T>;
  static constexpr bool kHalf = sizeof(T) == 2;
  A mean, rstd, weight, slope, rest;

  __device__ __forceinline__ Gradient(A mean, A rstd, Pair<A> c, A w)
      : mean(mean),
        rstd(rstd),
        weight(kHalf ? w * rstd : w),
        slope(kHalf ? -rstd * rstd * c.second : c.second),
        rest(kHalf ? -rstd * c.first - mean * slope : c.first) {}

  __device__ __forceinline__ A operator()(A grad_y, A x) const {
    if (kHalf) return grad_y * weight + fma(x, slope, rest);
    return rstd * (grad_y * weight - rest - (x - mean) * rstd * slope);
  }
};

// grad_x of a pack.
template <bool ONE, typename T>
__device__ __forceinline__ Pack<T> gradient(const InGroup& place, const Groups& groups, long long group,
                                            const Pack<T>& grad_y, const Pack<T>& x, const T* weight, acc_t<T> mean,
                                            acc_t<T> rstd, Pair<acc_t<T>> c) {
  constexpr int W = kVecWidth<T>;
  acc_t<T> grad_x[W] = {};
  const long long channel = groups.first(group);
  place.template each_channel<ONE>(groups, [&](int of, int from, int to) {
    const Gradient<T> gradient(mean, rstd, c, parameter(weight, channel + of, 1));
#pragma unroll
    for (int e = 0; e < W; ++e) grad_x[e] = from <= e && e < to ? gradient(grad_y[e], x[e]) : grad_x[e];
  });
  Pack<T> pack;
  round_to_words<T>(pack.word, 0, [&](int e) { return grad_x[e]; });
  return pack;
}

// What a group is normalised by, of sums about what is nearly its mean; of a mean that is small the more exact: see Centre.
template <bool EXACT, typename A>
__device__ __forceinline__ Mean<A> statistics(A about, Pair<A> centred, A size, A eps, A& rstd) {
  const auto of = Moments<A>::of(size, about, centred.first, centred.second);
  rstd = of.rstd(eps);
  if (fabs(about * rstd) < A(0.125)) return {about, A(0)};
  return {of.mean, EXACT ? (about - of.mean) + centred.first / size : A(0)};
}

// --- groups that are held, of planes that are whole packs: see rows.cuh; a row may be shared by the blocks of a cluster,
// along x ---

// The part of a row that this block has, as tile and as place in the row.
template <int K, typename T> struct Held {
  static constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  Row tile;
  long long row, size, start;  // of a row; of the part, in it
  bool live;

  __device__ __forceinline__ Held(long long row, long long rows, long long size, int part)
      : tile(Row::at(row, rows, size, part)),
        row(row),
        size(size),
        start(part * (long long)Row::capacity()),
        live(row < rows) {}

  __device__ __forceinline__ bool any(int k) const { return tile.any(tile.index(k, 0)); }

  __device__ __forceinline__ void load(const T* tensor, Pack<T> (&packs)[K]) const {
    load_row(tile, tensor + row * size + start, from_acc<T>(0), packs);
  }
  __device__ __forceinline__ void store(T* tensor, int k, const Pack<T>& pack) const {
    T* to = tensor + row * size + start + tile.index(k, 0);
    store_words(to, pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  }
  // The channel that all of the block's packs are of; below 0 where there are several, or it would not pay to ask.
  __device__ __forceinline__ int channel(const Groups& groups) const {
    if (K < 4 || blockDim.y > 1) return -1;
    const int c = groups.plane.divide(int(start)), last = int(min(start + Row::capacity(), size)) - 1;
    return groups.plane.divide(last) == c ? c : -1;
  }
  __device__ __forceinline__ InGroup place(int k) const { return {int(start) + tile.index(k, 0), 0, W}; }
};

// Grid: ceil(rows / blockDim.y), or a cluster for each row. Block: (threads of a row, rows): see rows.cuh; K packs in each
// thread hold a row, or a block's part of it. mean and rstd are kept for backward, one of each for a row. weight and
// bias may be null.
template <typename T, int K>
__global__ void __launch_bounds__(K == 8 ? 256 : kHeldThreads, K == 8   ? 3
                                                               : K == 4 ? 2
                                                                        : 1)
    group_norm_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                   Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd, Groups groups, long long rows,
                   long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  constexpr int W = kVecWidth<T>;
  constexpr bool kExact = K == 1 && sizeof(T) != 2;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const Held<K, T> held(threads.group() * blockDim.y + threadIdx.y, rows, size, threads.part());
  Pack<T> packs[K];
  held.load(x, packs);
  const A sum = reduce_elements<Sum, K, W>([&](int k, int e) { return packs[k][e]; });  // what is not there is 0
  const A about = threads.template reduce<Sum>({sum, A(0)}).first / A(size);
  fold(packs);
  Pair<A> centred = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    held.tile.each_of(k, [&](int e) {
      const A one = packs[k][e] - about;
      centred.first += one, centred.second += one * one;
    });
  }
  centred = threads.template reduce<Sum>(centred);
  fold(packs);
  if (!held.live) return;
  A r;
  const Mean<A> mu = statistics<kExact>(about, centred, A(size), eps, r);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!held.any(k)) continue;
    const Pack<T> pack = normalised<true>(held.place(k), groups, held.row, packs[k], weight, bias, mu, r);
    held.store(y, k, pack);
  }
  if (threadIdx.x == 0 && held.start == 0) mean[held.row] = mu, rstd[held.row] = r;
}

// The sum over channel c of a row of what `packs` in shared memory hold, by `lanes` neighbouring threads of which this is
// number `lane`. The packs are `count`, of W elements, the first beginning at element `from` of the row.
template <int W, typename A>
__device__ __forceinline__ Pair<A> channel_sum(const Pair<A>* packs, int c, int plane, int from, int count, int lane,
                                               int lanes) {
  const auto first = [&](int c) { return min(max(c * plane - from, 0) / W, count); };
  const int high = first(c + 1);
  Pair<A> sums = {};
#pragma unroll 4
  for (int i = first(c) + lane; i < high; i += lanes) sums = sums + packs[i];
  for (int offset = lanes / 2; offset > 0; offset /= 2) sums = Sum()(sums, shuffle_xor(sums, offset));
  return sums;
}

// g and h of each plane, (rows, channels, blocks of a cluster, 2), and grad_x. Grid and block: as group_norm_fwd; `lanes`
// threads, a power of two and no more than a row has, sum what packs hold of a channel. Shared memory: a pair for each
// pack that a block holds. weight and grad_x may be null.
template <typename T, int K>
__global__ void __launch_bounds__(K == 8 ? 256 : kHeldThreads, K == 8 ? 2 : 1)
    group_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                   const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                   acc_t<T>* __restrict__ sums, Groups groups, long long rows, long long size, int lanes) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  constexpr int W = kVecWidth<T>;
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  Pair<A>* shared = reinterpret_cast<Pair<A>*>(bytes);
  const Held<K, T> held(threads.group() * blockDim.y + threadIdx.y, rows, size, threads.part());
  const int channels = int(groups.channels), plane = int(groups.plane.divisor), count = K * blockDim.x;
  Pack<T> grads[K], inputs[K];
  held.load(grad_y, grads);
  held.load(x, inputs);
  const Mean<A> mu = held.live ? mean[held.row] : Mean<A>{};
  const A r = held.live ? rstd[held.row] : A(0);
  const Centre<T> centre(mu.first, r, mu.second);
  const auto sum = [&](int k) {
    Pair<A> own = {};
#pragma unroll
    for (int e = 0; e < W; ++e) own.first += grads[k][e], own.second += grads[k][e] * (inputs[k][e] - centre.about);
    return own;
  };
  Pair<A> total = {};
  const auto keep = [&](int c, Pair<A> own) {
    own = centre.moved(own), own.second *= r;
    A* to = sums + 2 * ((held.row * channels + c) * cluster_blocks() + threads.part());
    to[0] = own.first, to[1] = own.second;
    const A w = parameter(weight, groups.first(held.row) + c, 1);
    total = total + Pair<A>{w * own.first, w * own.second};
  };
  if (const int only = held.channel(groups); only >= 0) {
    Pair<A> own = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (held.any(k)) own = own + sum(k);
    }
    own = block_reduce<Sum>(own, shared);
    for (int c = threadIdx.x; c < channels; c += blockDim.x) keep(c, c == only ? own : Pair<A>{});
  } else {
    Pair<A>* packs = shared + threadIdx.y * count;
#pragma unroll
    for (int k = 0; k < K; ++k) packs[k * blockDim.x + threadIdx.x] = held.any(k) ? sum(k) : Pair<A>{};
    __syncthreads();
    const int lane = threadIdx.x % lanes, step = blockDim.x / lanes;
    for (int first = 0; first < channels; first += step) {
      const int c = first + threadIdx.x / lanes;
      const Pair<A> own = channel_sum<W>(packs, c, plane, int(held.start), c < channels ? count : 0, lane, lanes);
      if (lane == 0 && c < channels && held.live) keep(c, own);
    }
  }
  total = threads.template reduce<Sum>(total);
  if (!grad_x || !held.live) return;
  fold(grads), fold(inputs);
  const Pair<A> c = means(total, A(size), mu, r);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!held.any(k)) continue;
    const Pack<T> pack = gradient<true>(held.place(k), groups, held.row, grads[k], inputs[k], weight, mu.first, r, c);
    held.store(grad_x, k, pack);
  }
}

// --- groups that shared memory holds, of other planes ---
//
// Packs are cut by 16-byte boundaries on their way to shared memory and back; between, threads meet an element or two at a
// time, never of two channels. A plane is cut into pieces, each of LANES neighbouring threads:
//
//     |0.......|1.......|2...|0.......|1.......|2...|       three pieces of a plane, two planes of a group

struct Pieces {
  long long count, each, of_block;  // pieces of a group; elements of a piece but the last of a plane; pieces of a block
  Divisor of_plane;  // pieces of a plane
};

// The elements of a tensor of `all`, from a 16-byte boundary on, that a block has, and may write.
template <typename T> struct Span {
  static constexpr int W = kVecWidth<T>;
  long long begin, end, all;

  // How far into a pack they begin.
  __device__ __forceinline__ int before() const { return int(begin) & (W - 1); }

  // f(pack, at) for the packs that hold them, dealt out over the block: the number, and where in the tensor it begins.
  template <typename F> __device__ __forceinline__ void each_pack(F f) const {
    const int packs = int(end - begin + before() + W - 1) / W;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < packs; i += blockDim.x * blockDim.y) {
      f(i, begin - before() + i * (long long)W);
    }
  }
  template <typename F> __device__ __forceinline__ void each_element(long long at, F f) const {
#pragma unroll 1
    for (int e = 0; e < W; ++e) {
      if (begin <= at + e && at + e < end) f(e);
    }
  }

  __device__ __forceinline__ void fetch(const T* tensor, uint4* room) const {
    each_pack([&](int i, long long at) {
      if (at + W <= all) return fetch16(room + i, tensor + at);
      each_element(at, [&](int e) { reinterpret_cast<T*>(room + i)[e] = tensor[at + e]; });
    });
  }
  __device__ __forceinline__ void store(T* tensor, const uint4* room) const {
    each_pack([&](int i, long long at) {
      if (at >= begin && at + W <= end) return store16(tensor + at, room[i]);
      each_element(at, [&](int e) { tensor[at + e] = reinterpret_cast<const T*>(room + i)[e]; });
    });
  }
};

// Neighbours in shared memory that make a word, of half types two, or the first of them alone.
template <typename T> struct Few {
  static constexpr int kMost = sizeof(T) == 2 ? 2 : 1;
  Vec<T, kMost> of;

  static __device__ __forceinline__ Few load(const T* from, int count) {
    Few few;
    if (count == kMost) few.of = load_vec<T, kMost>(from);
    else few.of.data[0] = *from;
    return few;
  }
  template <typename F> static __device__ __forceinline__ void store(T* to, int count, F f) {
    if (count == 1) *to = from_acc<T>(f(0));
    else if constexpr (kMost == 2) *reinterpret_cast<unsigned*>(to) = rounded_pair(f(0), f(1), T());
  }
  __device__ __forceinline__ acc_t<T> operator[](int e) const { return to_acc(of.data[e]); }
};

// What a thread has of a row by pieces.
template <typename T, int LANES> struct Share {
  const Pieces& pieces;
  int plane, first, last, lane;  // the block's pieces
  long long row, size;
  bool live;
  Span<T> span;

  template <typename Threads>
  __device__ __forceinline__ Share(const Threads& threads, const Pieces& pieces, const Groups& groups, long long rows,
                                   long long size)
      : pieces(pieces), plane(int(groups.plane.divisor)), size(size) {
    const long long above = threads.group() * blockDim.y, below = min(above + blockDim.y, rows);
    first = int(min(threads.part() * pieces.of_block, pieces.count));
    last = int(min(first + pieces.of_block, pieces.count));
    lane = threadIdx.x % LANES;
    row = above + threadIdx.y, live = row < rows;
    span = {above * size + start(first), (below - 1) * size + start(last), rows * size};
  }

  // Where in `room` the row would begin.
  __device__ __forceinline__ T* own(uint4* room) const {
    return reinterpret_cast<T*>(room) + (span.before() + row * size - span.begin);
  }

  __device__ __forceinline__ int channel(int piece) const { return pieces.of_plane.divide(piece); }
  __device__ __forceinline__ int start(int piece) const {
    const int c = channel(piece);
    return c * plane + (piece - c * int(pieces.of_plane.divisor)) * int(pieces.each);
  }

  // f(piece, channel, from, to) for each of this thread's pieces, equally often in all threads of a warp: some may be empty.
  template <typename F> __device__ __forceinline__ void each(F f) const {
    for (int next = first; next < last; next += blockDim.x / LANES) {
      const int piece = next + threadIdx.x / LANES, c = channel(piece), from = start(piece);
      f(piece, c, from, live && piece < last ? min(from + int(pieces.each), (c + 1) * plane) : 0);
    }
  }

  // use(i, count, load(i, count)) for the `count` elements from i on of this thread's part of a piece: as many as a word
  // has, but where the piece begins or ends within one. Several are loaded before any is used.
  template <typename Load, typename Use>
  __device__ __forceinline__ void elements(const T* own, int from, int to, Load load, Use use) const {
    constexpr int N = Few<T>::kMost, U = LANES == 32 ? 4 : 2, kStep = N * LANES;
    if (N > 1 && reinterpret_cast<unsigned long long>(own + from) % (N * sizeof(T)) != 0) {
      if (lane == 0 && from < to) use(from, 1, load(from, 1));
      ++from;
    }
    int i = from + N * lane;
#pragma unroll 1
    for (; i + (U - 1) * kStep + N <= to; i += U * kStep) {
      decltype(load(0, N)) values[U];
#pragma unroll
      for (int u = 0; u < U; ++u) values[u] = load(i + u * kStep, N);
#pragma unroll
      for (int u = 0; u < U; ++u) use(i + u * kStep, N, values[u]);
    }
#pragma unroll 1
    for (; i + N <= to; i += kStep) use(i, N, load(i, N));
    if (N > 1 && i < to) use(i, 1, load(i, 1));
  }
};

// As group_norm_fwd; a block has `of_block` pieces of a row, or all of blockDim.y rows. blockDim.x is a multiple of LANES.
// Shared memory: for the packs of a block. Tensors begin at 16-byte boundaries.
template <typename T, int LANES>
__global__ void __launch_bounds__(kHeldThreads, 3)
    group_norm_fwd_pieces(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                          T* __restrict__ y, Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                          Pieces pieces, Groups groups, long long rows, long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  constexpr bool kExact = sizeof(T) != 2;
  extern __shared__ uint4 kept[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const Share<T, LANES> share(threads, pieces, groups, rows, size);
  share.span.fetch(x, kept);
  end_group(), wait_for_groups<0>();
  __syncthreads();
  T* const own = share.own(kept);
  const auto load = [&](int i, int count) { return Few<T>::load(own + i, count); };
  A sum = A(0);
  share.each([&](int, int, int from, int to) {
    share.elements(own, from, to, load, [&](int, int count, const Few<T>& few) {
      for (int e = 0; e < count; ++e) sum += few[e];
    });
  });
  const A about = threads.template reduce<Sum>({sum, A(0)}).first / A(size);
  Pair<A> centred = {};
  share.each([&](int, int, int from, int to) {
    share.elements(own, from, to, load, [&](int, int count, const Few<T>& few) {
      for (int e = 0; e < count; ++e) {
        const A one = few[e] - about;
        centred.first += one, centred.second += one * one;
      }
    });
  });
  centred = threads.template reduce<Sum>(centred);
  A r;
  const Mean<A> mu = statistics<kExact>(about, centred, A(size), eps, r);
  share.each([&](int, int c, int from, int to) {
    if (from >= to) return;
    const Affine<T> affine(mu, r, weight, bias, groups.first(share.row) + c);
    share.elements(own, from, to, load, [&](int i, int count, const Few<T>& few) {
      Few<T>::store(own + i, count, [&](int e) { return affine(few[e]); });
    });
  });
  if (threadIdx.x == 0 && threads.part() == 0 && share.live) mean[share.row] = mu, rstd[share.row] = r;
  __syncthreads();
  share.span.store(y, kept);
}

// g and h of each piece, (rows, pieces, 2), and grad_x. Grid and block: as group_norm_fwd_pieces. Shared memory: for `most`
// packs of each tensor. weight and grad_x may be null.
template <typename T, int LANES>
__global__ void __launch_bounds__(kHeldThreads, 3)
    group_norm_bwd_pieces(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                          const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                          T* __restrict__ grad_x, acc_t<T>* __restrict__ sums, Pieces pieces, Groups groups,
                          long long rows, long long size, int most) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  extern __shared__ uint4 kept[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const Share<T, LANES> share(threads, pieces, groups, rows, size);
  share.span.fetch(grad_y, kept), share.span.fetch(x, kept + most);
  end_group(), wait_for_groups<0>();
  const Mean<A> mu = share.live ? mean[share.row] : Mean<A>{};
  const A r = share.live ? rstd[share.row] : A(0);
  const Centre<T> centre(mu.first, r, mu.second);
  __syncthreads();
  T *const grads = share.own(kept), *const inputs = share.own(kept + most);
  using Both = Pair<Few<T>>;
  const auto load = [&](int i, int count) {
    return Both{Few<T>::load(grads + i, count), Few<T>::load(inputs + i, count)};
  };
  Pair<A> total = {};
  share.each([&](int piece, int c, int from, int to) {
    Pair<A> own = {};
    share.elements(grads, from, to, load, [&](int, int count, const Both& few) {
      for (int e = 0; e < count; ++e) {
        own.first += few.first[e], own.second += few.first[e] * (few.second[e] - centre.about);
      }
    });
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) own = own + shuffle_xor(own, offset);
    if (share.lane > 0 || from >= to) return;
    own = centre.moved(own), own.second *= r;
    A* at = sums + 2 * (share.row * pieces.count + piece);
    at[0] = own.first, at[1] = own.second;
    const A w = parameter(weight, groups.first(share.row) + c, 1);
    total = total + Pair<A>{w * own.first, w * own.second};
  });
  total = threads.template reduce<Sum>(total);
  if (!grad_x) return;
  const Pair<A> of = means(total, A(size), mu, r);
  share.each([&](int, int c, int from, int to) {
    if (from >= to) return;
    const Gradient<T> gradient(mu.first, r, of, parameter(weight, groups.first(share.row) + c, 1));
    share.elements(grads, from, to, load, [&](int i, int count, const Both& few) {
      Few<T>::store(grads + i, count, [&](int e) { return gradient(few.first[e], few.second[e]); });
    });
  });
  __syncthreads();
  share.span.store(grad_x, kept);
}

// --- groups that are not ---

// Three numbers of `parts`, (rows, runs.parts, 3), for each block. Grid: rows x runs.parts. Block: a multiple of 32.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, Runs runs) {
  __shared__ Pair<acc_t<T>> shared[kWarp];
  const Part<T> part(runs, runs.segment(blockIdx.x), runs.part(blockIdx.x), x);
  const auto of = block_moments(part_moments(part, Source<T>{x}), part.elements(), shared);
  if (threadIdx.x == 0) store_moments(parts + 3 * (long long)blockIdx.x, of);
}

// As group_norm_fwd, of the parts that group_norm_moments left. Grid and block: the same.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, const acc_t<T>* __restrict__ parts, Mean<acc_t<T>>* __restrict__ mean,
                        acc_t<T>* __restrict__ rstd, Runs runs, Groups groups, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long row = runs.segment(block);
  const int number = runs.part(block);
  Moments<A> of = block_merge_parts(parts + 3 * row * runs.parts, int(runs.parts), shared);
  of.count = A(runs.size);
  const A r = of.rstd(eps);
  const Mean<A> mu = {of.mean, A(0)};
  if (number == 0 && threadIdx.x == 0) mean[row] = mu, rstd[row] = r;
  using P = Part<T>;
  const P part(runs, row, number, y);
  each_packs<true>(
      part,
      [&](const Place(&places)[P::kAtOnce], const Pack<T>(&packs)[1][P::kAtOnce]) {
#pragma unroll
        for (int u = 0; u < P::kAtOnce; ++u) {
          if (places[u].first == places[u].last) continue;
          const InGroup place{places[u].in_run, places[u].first, places[u].last};
          part.put(y, places[u], normalised<false>(place, groups, row, packs[0][u], weight, bias, mu, r));
        }
      },
      Source<T>{x});
}

// g and h of each part of a plane, (planes, runs.parts, 2). Grid: ceil(planes x runs.parts / blockDim.y), where several
// parts ask for a blockDim.y of 1. Block: (threads of a plane, planes): see rows.cuh.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const Mean<acc_t<T>>* __restrict__ mean,
                        const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ sums, Runs runs, long long channels,
                        long long planes) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long place = blockIdx.x * (long long)blockDim.y + threadIdx.y, plane = place / runs.parts;
  const bool live = plane < planes;
  Part<T> part(runs, plane, int(place % runs.parts), x);
  if (!live) part.begin = part.end = 0;
  const Mean<A> mu = live ? mean[plane / channels] : Mean<A>{};
  const Centre<T> centre(mu.first, live ? rstd[plane / channels] : A(0), mu.second);
  const Pair<A> of =
      centre.moved(row_reduce<Sum>(part_sums(part, Source<T>{grad_y}, Source<T>{x}, centre.about), shared));
  if (threadIdx.x == 0 && live) sums[2 * place] = of.first, sums[2 * place + 1] = of.second * rstd[plane / channels];
}

// grad_x of what group_norm_bwd_sums left, `count` parts for each plane. Grid and block: as group_norm_fwd_wide.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const acc_t<T>* __restrict__ sums, T* __restrict__ grad_x, Runs runs, Groups groups,
                        int count) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long row = runs.segment(block);
  const int all = int(groups.channels) * count;
  const long long first = row % groups.count * groups.channels;
  Pair<A> total = {};
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const A w = parameter(weight, first + i / count, 1), *at = sums + 2 * (row * all + i);
    total = total + Pair<A>{w * at[0], w * at[1]};
  }
  total = block_reduce<Sum>(total, shared);
  const Mean<A> mu = mean[row];
  const A r = rstd[row];
  const Pair<A> c = means(total, A(runs.size), mu, r);
  using P = Part<T>;
  const P part(runs, row, runs.part(block), grad_x);
  each_packs<true>(
      part,
      [&](const Place(&places)[P::kAtOnce], const Pack<T>(&packs)[2][P::kAtOnce]) {
#pragma unroll
        for (int u = 0; u < P::kAtOnce; ++u) {
          if (places[u].first == places[u].last) continue;
          const InGroup place{places[u].in_run, places[u].first, places[u].last};
          part.put(grad_x, places[u],
                   gradient<false>(place, groups, row, packs[0][u], packs[1][u], weight, mu.first, r, c));
        }
      },
      Source<T>{grad_y}, Source<T>{x});
}

// grad_weight and grad_bias of the sums of planes, (images, channels, count, 2), added in a fixed order. Grid:
// ceil(channels / kFinished). Block: (kFinished, a power of two, from 4 to kMostFinishers): channels by threadIdx.x, parts
// dealt out over threadIdx.y. Each gradient may be null.
template <typename T>
__global__ void __launch_bounds__(kFinished* kMostFinishers)
    group_norm_bwd_parameters(const acc_t<T>* __restrict__ sums, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                              long long images, long long channels, int count) {
  using A = acc_t<T>;
  constexpr int kLines = kWarp / kFinished;  // of a warp
  __shared__ Pair<A> shared[kMostFinishers / kLines][kFinished];
  const long long c = blockIdx.x * (long long)kFinished + threadIdx.x;
  Pair<A> own = {};
  for (int part = 0; c < channels && part < count; ++part) {
#pragma unroll 8
    for (long long image = threadIdx.y; image < images; image += blockDim.y) {
      const Vec<A, 2> at = load_vec<A, 2>(sums + 2 * ((image * channels + c) * count + part));
      own = own + Pair<A>{at.data[0], at.data[1]};
    }
  }
  const auto add_lines = [&] {
#pragma unroll
    for (int offset = kFinished; offset < kWarp; offset *= 2) own = own + shuffle_xor(own, offset);
  };
  add_lines();
  if (threadIdx.y % kLines == 0) shared[threadIdx.y / kLines][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y >= kLines) return;
  own = {};
  for (int warp = threadIdx.y; warp < blockDim.y / kLines; warp += kLines) own = own + shared[warp][threadIdx.x];
  add_lines();
  if (threadIdx.y > 0 || c >= channels) return;
  if (grad_weight) grad_weight[c] = from_acc<T>(own.second);
  if (grad_bias) grad_bias[c] = from_acc<T>(own.first);
}
