// Each pair (a, b) of the first `rotary` elements of a row is turned by the angle of the row's position p:
//
//     y_a = a cos[p, j] - b sin[p, j]
//     y_b = b cos[p, j] + a sin[p, j]
//
// Pair j is elements j and j + rotary / 2 (halves), or elements 2j and 2j + 1 (interleaved). Elements from `rotary` on are copied.
// grad_x is grad_y turned back: the same with -sin.
//
// Bytes per element: 2 x sizeof(T), either way; rows of cos and sin come from the caches. Three flops.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 4x32x4096x128 r128 bf16 3864 / 3875, fp32
// 4074 / 4051, 4x4096x32x128 r128 bshd bf16 3844 / 3859, 4x32x4096x128 r128 interleaved bf16 3668 / 3666, 4x32x4096x128
// r64 bf16 3556 / 3541, 4x32x4096x80 r80 bf16 3633 / 3642, 4x32x4096x126 r126 bf16 3410 / 3322, 128x1x32x128 r128 bshd
// bf16 4.1 and 4.1 us. Lost, by Nsight Compute, with the memory at 80% of its peak: halves of whole vectors are computed row by
// row, in the order of memory, and each head reads the tables again from L2, for which warps wait (by heads, which read them
// once: 3763). Other halves are computed by heads, since row by row single elements leave too few bytes in flight (1104).
// Where a thread would have fewer than 8 bytes at a time and rows are dense, they pass through shared memory, and warps wait
// for the barriers of three blocks on a multiprocessor.
#include "common/elementwise/broadcast.cuh"
#include "common/tile/tiny_rows.cuh"
#include "common/core/vector_load.cuh"

// Stops the program: a position out of range is never a wild read.
__device__ __forceinline__ void bad_position(long long at, long long position, long long positions) {
  printf("cupyops: positions, element %lld, is %lld, expected one in [0, %lld)\n", at, position, positions);
  __trap();
}

// Where `positions` is null, `at` is the position itself.
__device__ __forceinline__ long long position_at(const long long* positions, long long at, long long limit) {
  if (!positions) return at;
  const long long position = positions[at];
  if (position < 0 || position >= limit) bad_position(at, position, limit);
  return position;
}

template <typename T> __device__ __forceinline__ void turn(T& first, T& second, T cosine, T sine, acc_t<T> sign) {
  using A = acc_t<T>;
  const A a = to_acc(first), b = to_acc(second), c = to_acc(cosine), s = sign * to_acc(sine);
  first = from_acc<T>(a * c - b * s);
  second = from_acc<T>(b * c + a * s);
}

// Turns a vector of pairs whose elements are `half` apart; with `back`, by -angle.
template <typename T>
__device__ __forceinline__ void turn_vector(const T* x, const T* cosine, const T* sine, T* y, int half, int back) {
  constexpr int W = kVecWidth<T>;
  Vec<T, W> first = load_vec<T, W>(x), second = load_vec<T, W>(x + half);
  const auto cosines = load_vec<T, W>(cosine), sines = load_vec<T, W>(sine);
  const acc_t<T> sign = back ? -1 : 1;
#pragma unroll
  for (int k = 0; k < W; ++k) turn(first.data[k], second.data[k], cosines.data[k], sines.data[k], sign);
  store_whole(y, first);
  store_whole(y + half, second);
}

// Pairs (j, j + half), where halves and rows are whole vectors. Grid: ceil(rows / blockDim.y). Block: (x, y), any; the
// threads of a row share its vectors. y is dense; `layout` says where a row lies in x, and which position it has. cosine and
// sine are (limit, half), their rows `apart` elements from each other.
template <typename T>
__global__ void rope_rows(const T* __restrict__ x, const T* __restrict__ cosine, const T* __restrict__ sine,
                          const long long* __restrict__ positions, T* __restrict__ y, long long limit, long long apart,
                          int back, long long rows, int half, int size, const __grid_constant__ Layout<2> layout) {
  constexpr int W = kVecWidth<T>;
  const long long r = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (r >= rows) return;
  const Offsets<2> from = locate(layout, r);
  const long long angles = position_at(positions, from.at[1], limit) * apart;
  const T* row_x = x + from.at[0];
  T* row_y = y + r * size;
  for (int j = threadIdx.x * W; j < half; j += blockDim.x * W) {
    turn_vector(row_x + j, cosine + angles + j, sine + angles + j, row_y + j, half, back);
  }
  for (int i = 2 * half + threadIdx.x * W; i < size; i += blockDim.x * W) {
    store_whole(row_y + i, load_vec<T, W>(row_x + i));
  }
}

// `count` rows whose halves are 2^shift vectors. A row begins x_row elements behind the one before, its angles `angles` elements.
struct EvenRows {
  unsigned count, x_row, angles;
  int shift;
};

// The same for rows that are evenly spaced and turn as a whole, at positions 0, 1, 2 ... (`positions` is null), such as one token, whose time is that of a
// launch. So little is read before the first load. Grid: a thread for each vector of a half. Block: ROPE_BLOCK.
template <typename T>
__global__ void __launch_bounds__(ROPE_BLOCK)
    rope_even(const T* __restrict__ x, const T* __restrict__ cosine, const T* __restrict__ sine,
              const long long* __restrict__ positions, T* __restrict__ y, long long limit, long long apart, int back,
              const __grid_constant__ EvenRows rows) {
  const unsigned thread = blockIdx.x * ROPE_BLOCK + threadIdx.x, r = thread >> rows.shift;
  if (r >= rows.count) return;
  const int half = kVecWidth<T> << rows.shift, j = thread * kVecWidth<T> & (half - 1);
  const long long row = r, angles = row * rows.angles + j;
  turn_vector(x + row * rows.x_row + j, cosine + angles, sine + angles, y + row * 2 * half + j, half, back);
}

// How the work of rope_heads() is divided: `heads` rows have one position, and a thread has `chunk` of them.
struct HeadGroups {
  long long rows, heads;
  long long x_stride, y_stride;  // from a head to the next
  int groups, chunk;  // groups of blockDim.y positions; heads of a thread
  int turned, units;  // units of a row that turn, and all units
  int apart, step;  // elements from the first of a pair to its second, and from a pair to the next
};

// A unit that turns: N elements of each half of a row, or N neighbours, or of any row two elements.
template <typename T, bool NEIGHBOURS, int N> struct Pairs {
  static constexpr int ANGLES = NEIGHBOURS ? N / 2 : N;
  Vec<T, N> first, second;

  __device__ __forceinline__ void load(const T* x, int apart) {
    first = load_vec<T, N>(x);
    if (!NEIGHBOURS) second = load_vec<T, N>(x + apart);
  }
  __device__ __forceinline__ void store(T* y, int apart) const {
    store_vec<T, N>(y, first);
    if (!NEIGHBOURS) store_vec<T, N>(y + apart, second);
  }
  __device__ __forceinline__ void turn_all(const Vec<T, ANGLES>& cosines, const Vec<T, ANGLES>& sines, acc_t<T> sign) {
#pragma unroll
    for (int k = 0; k < ANGLES; ++k) {
      T& low = NEIGHBOURS ? first.data[2 * k] : first.data[k];
      T& high = NEIGHBOURS ? first.data[2 * k + 1] : second.data[k];
      turn(low, high, cosines.data[k], sines.data[k], sign);
    }
  }
};

// A unit that is copied.
template <typename T, int N> struct Copied {
  Vec<T, N> all;

  __device__ __forceinline__ void load(const T* x, int) { all = load_vec<T, N>(x); }
  __device__ __forceinline__ void store(T* y, int) const { store_vec<T, N>(y, all); }
};

// Applies f to a unit of each of `heads` heads at x, and stores it to y; U units are loaded before the first is stored.
template <int U, typename Unit, typename T, typename F>
__device__ __forceinline__ void each_head(const HeadGroups& of, int heads, const T* x, T* y, F f) {
#pragma unroll 1
  for (int left = heads; left > 0; left -= U) {
    Unit unit[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u < left) unit[u].load(x + u * of.x_stride, of.apart);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u < left) f(unit[u]), unit[u].store(y + u * of.y_stride, of.apart);
    }
    x += U * of.x_stride, y += U * of.y_stride;
  }
}

// A row is [half | half | rest], or [2 half | rest]: first `turned` units of N pairs, or of N / 2 pairs of neighbours; then units
// of N elements of the rest. Grid: ceil(rows / blockDim.y) times the chunks of heads, chunks slowest. Block: (x, y), any. A
// thread has every blockDim.x-th unit of one position, in a chunk of its heads: it reads cos and sin once for all of them, and
// loads single elements of several heads before it stores the first.
// `layout` says where the first head of a position begins in x, which position it is, and where it begins in y. N divides the
// size of a row and of its parts and the strides of x, and all are aligned to it. The rest as in rope_rows().
template <typename T, bool NEIGHBOURS, int N>
__global__ void rope_heads(const T* __restrict__ x, const T* __restrict__ cosine, const T* __restrict__ sine,
                           const long long* __restrict__ positions, T* __restrict__ y, long long limit, long long apart,
                           int back, const __grid_constant__ HeadGroups heads, int half,
                           const __grid_constant__ Layout<3> layout) {
  constexpr int U = N * sizeof(T) >= 16 ? 1 : N > 1 ? 2 : 4;
  using Turning = Pairs<T, NEIGHBOURS, N>;
  const unsigned chunk = blockIdx.x / heads.groups;
  const long long r = (blockIdx.x - chunk * heads.groups) * (long long)blockDim.y + threadIdx.y;
  if (r >= heads.rows) return;
  const Offsets<3> from = locate(layout, r);
  const long long angles = position_at(positions, from.at[1], limit) * apart;
  const long long first = chunk * (long long)heads.chunk;
  const int here = static_cast<int>(min(heads.heads - first, (long long)heads.chunk));
  const T* row_x = x + from.at[0] + first * heads.x_stride;
  T* row_y = y + from.at[2] + first * heads.y_stride;
  const acc_t<T> sign = back ? -1 : 1;
  for (int unit = threadIdx.x; unit < heads.units; unit += blockDim.x) {
    if (unit < heads.turned) {
      const int at = unit * Turning::ANGLES, begin = at * heads.step;
      const auto cosines = load_vec<T, Turning::ANGLES>(cosine + angles + at);
      const auto sines = load_vec<T, Turning::ANGLES>(sine + angles + at);
      each_head<U, Turning>(heads, here, row_x + begin, row_y + begin,
                            [&](Turning& pairs) { pairs.turn_all(cosines, sines, sign); });
    } else {
      const int begin = 2 * half + (unit - heads.turned) * N;
      each_head<U, Copied<T, N>>(heads, here, row_x + begin, row_y + begin, [](Copied<T, N>&) {});
    }
  }
}

// How the work of rope_staged() is divided. There are `times` runs of `rows` rows, and positions are the same in each run. A block
// has a tile of `each` rows of a run, one of `tiles`, in `chunk` runs, and turns `sharers` rows at a time. The elements of a pair
// are `apart` from each other, and pairs are `step` elements apart.
struct Tiles {
  long long rows, times;
  int each, sharers, apart, step, tiles, chunk;
};

// The rows of a position in the tables.
template <typename T> struct __align__(16) Angles { const T *cosines, *sines; };

// Rows that are dense in x too, but no whole vectors: a block copies its rows to shared memory, turns them there, and stores them
// in vectors, while the rows of its next run arrive. Grid: tiles x ceil(times / chunk). Block: ROPE_STAGED_THREADS, which is
// sharers x half or more. Shared memory: a block's rows, which together are whole vectors, twice. A thread has one pair of every
// sharers-th row, kPairs at most, and reads their angles once. `layout` is that of the rows of a run, as in rope_rows().
static_assert(ROPE_STAGED_THREADS == kSmallRows, "fetch_all() and store_all() are for so many threads");
template <typename T> constexpr int kPairs = ROPE_STAGED_BYTES_EACH / sizeof(T);
template <typename T>
__global__ void __launch_bounds__(ROPE_STAGED_THREADS, 3)
    rope_staged(const T* __restrict__ x, const T* __restrict__ cosine, const T* __restrict__ sine,
                const long long* __restrict__ positions, T* __restrict__ y, long long limit, long long apart, int back,
                const __grid_constant__ Tiles staged, int half, int size, const __grid_constant__ Layout<2> layout) {
  constexpr int ALL = kPairs<T>, U = 8;
  extern __shared__ uint4 dynamic[];
  __shared__ Angles<T> of_row[ROPE_STAGED_THREADS];
  T* const tiles = reinterpret_cast<T*>(dynamic);
  const unsigned group = blockIdx.x / staged.tiles;
  const long long begin = (blockIdx.x - group * staged.tiles) * (long long)staged.each;
  const int rows = static_cast<int>(min(staged.rows - begin, (long long)staged.each));
  const long long first_time = group * (long long)staged.chunk;
  const int times = static_cast<int>(min(staged.times - first_time, (long long)staged.chunk));
  const long long run = staged.rows * size;
  long long at = first_time * run + begin * size;
  fetch_all(tiles, x + at, rows * size);
  end_group();
  if (threadIdx.x < rows) {
    const long long angles = position_at(positions, locate(layout, begin + threadIdx.x).at[1], limit) * apart;
    of_row[threadIdx.x] = {cosine + angles, sine + angles};
  }
  __syncthreads();
  const int sharers = staged.sharers, sharer = threadIdx.x / unsigned(half), j = threadIdx.x - sharer * half;
  const int left = sharer < sharers ? rows - sharer : 0;  // of every sharers-th row
  T cosines[ALL], sines[ALL];
  each_of<ALL>(left, sharers, [&](int i) {
    const Angles<T> angles = of_row[sharer + i * sharers];
    cosines[i] = __ldg(angles.cosines + j), sines[i] = __ldg(angles.sines + j);
  });
  const acc_t<T> sign = back ? -1 : 1;
  const int pitch = sharers * size, buffer = staged.each * size;
#pragma unroll 1
  for (int time = 0; time < times; ++time, at += run) {
    T* const tile = tiles + time % 2 * buffer;
    wait_for_groups<0>();
    __syncthreads();
    if (time + 1 < times) fetch_all(tiles + (time + 1) % 2 * buffer, x + at + run, rows * size);
    end_group();
#pragma unroll
    for (int first = 0; first < ALL; first += U) {
      T* const pairs = tile + sharer * size + j * staged.step + first * pitch;
      T low[U], high[U];
      each_of<U>(left - first * sharers, sharers,
                 [&](int u) { low[u] = pairs[u * pitch], high[u] = pairs[u * pitch + staged.apart]; });
      each_of<U>(left - first * sharers, sharers, [&](int u) {
        turn(low[u], high[u], cosines[first + u], sines[first + u], sign);
        pairs[u * pitch] = low[u], pairs[u * pitch + staged.apart] = high[u];
      });
    }
    __syncthreads();
    store_all(y + at, tile, rows * size);
  }
}
