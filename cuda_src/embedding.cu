// y[i]           = weight[indices[i]]
// grad_weight[r] = (sum over i with indices[i] = r of grad_y[i]) / d     d = 1, or how many they are; 0 for padding_idx
//
// Backward first makes a list of the positions that name each row. Up to 32768 indices are linked by atomics, in any order:
// short lists are put in order later, and for long lists blocks find the positions again, in order. More indices are sorted,
// by PyTorch. Then some blocks write rows of zeros; some add short lists, a thread a vector of columns; and some add long
// lists, which are cut into pieces of a fixed length: a block adds one, and the last block that ends adds the pieces' sums.
// The order is fixed, so the bits are the same every time.
//
// Bytes: forward the rows once in, once out; backward grad_y once in, grad_weight once out. Backward adds once per element
// of grad_y.
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226), 16384 indices: of 128256x4096 bf16 3714 /
// 4120, of 50257x768 bf16 2910 / 2661, fp32 3488 / 3348, of 50257x4095 bf16 3598 / 3255, of 50257x4096 3746 / 3817, of
// 1000003x17 205 / 1101; in backward of 50257x768 bf16 as often as words are 1726, one row alone 1550. Lost: in backward
// two launches before the one that moves the bytes; where a row is named often, the blocks that find its positions and
// add them; of odd rows loads that are waited for, in three rounds of a block where even rows take two. More of them
// under way at a time, or 16 bytes each, came out slower.
#include "embedding/lists.cuh"
#include "embedding/sums.cuh"

constexpr int kThreads = EMBEDDING_THREADS;  // of a block, at most
constexpr int kSlots = EMBEDDING_SLOTS;  // positions at which lists may begin, for a block, at most
constexpr int kAdded = EMBEDDING_LINKED_SLOTS * kListed;  // positions of all short lists of a block, at most

// Stops the program, as PyTorch's device assertion does: an index out of range is never a wild read.
__device__ __forceinline__ long long row_at(const long long* indices, long long position, long long rows) {
  const long long row = indices[position];
  if (row < 0 || row >= rows) {
    printf("cupyops: input[%lld] is %lld, expected a row of weight in [0, %lld)\n", position, row, rows);
    __trap();
  }
  return row;
}

// Copies a row to one that begins anywhere, in vectors of the latter (see Span), with U loads before the first store. The
// pointers are not __restrict__: the compiler would move loads behind stores.
template <int U, typename T, Lie LIE> __device__ __forceinline__ void copy_spans(const T* from, T* to, long long size) {
  constexpr int W = kVecWidth<T>;
  const int past = LIE == kWhole ? 0 : int(reinterpret_cast<unsigned long long>(to) & 15) / int(sizeof(T));
  const int step = blockDim.x;
  const long long spans = (size + past + W - 1) / W;
  const auto span = [&](long long s) {
    const long long col = s * W - past;
    return Span<T, LIE>{0, col, col < 0 ? past : 0, size - col < W ? int(size - col) : W};
  };
#pragma unroll 1
  for (long long s = threadIdx.x; s < spans; s += U * step) {
    Vec<T, W> loaded[U];
#pragma unroll
    for (int i = 0; i < U; ++i) loaded[i] = span(s + i * step < spans ? s + i * step : s).load(from, 0);
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (s + i * step < spans) span(s + i * step).store(to, 0, loaded[i]);
    }
  }
}

template <typename T, Lie LIE> __device__ __forceinline__ void copy_row(const T* from, T* to, long long size) {
  constexpr int W = kVecWidth<T>;
  const bool one = size + (LIE == kWhole ? 0 : W - 1) <= blockDim.x * (long long)W;  // a thread has one vector
  if (LIE == kNearEnd || one) copy_spans<1, T, LIE>(from, to, size);
  else copy_spans<4, T, LIE>(from, to, size);
}

// Grid: ceil(tokens / blockDim.y). Block: kThreads at most; threadIdx.x runs along a row of `size` elements. Rows of weight are
// `stride` apart. ALIGNED: all rows begin at 16-byte boundaries.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 4)
    embedding_fwd(const T* weight, const long long* __restrict__ indices, T* y, long long tokens, long long rows,
                  long long size, long long stride) {
  const long long token = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const long long row = row_at(indices, token, rows);
  const T* from = weight + row * stride;
  T* to = y + token * size;
  if constexpr (ALIGNED) {
    copy_row<T, kWhole>(from, to, size);
  } else if (row > 0 && row + 1 < rows && stride >= 2 * kVecWidth<T>) {  // the row lies inside weight
    copy_row<T, kAcross>(from, to, size);
  } else {
    copy_row<T, kNearEnd>(from, to, size);
  }
}

// Grid: ceil(count / blockDim.x). Block: kThreads. Makes lists with a stride of kListed, in any order; of a longer list it only
// notes the pieces. T does not matter.
template <typename T>
__global__ void embedding_bwd_linked(const long long* __restrict__ indices, int* zeros, int* scratch,
                                     long long padding_idx, long long rows, int count, int piece, int most) {
  const Lists to(zeros, scratch, rows, count, most);
  const int i = static_cast<int>(global_thread()), lane = threadIdx.x % kWarp;
  const int row = i < count && indices[i] != padding_idx ? static_cast<int>(indices[i]) : -1;
  const unsigned same = __match_any_sync(kFullMask, row);
  const int leader = __ffs(same) - 1;
  int list = 0, place = 0;
  if (lane == leader && row >= 0) {
    list = atomicCAS(to.first + row, 0, i + 1);
    list = list == 0 ? i : list - 1;
    place = atomicAdd(to.length + list, __popc(same));
  }
  list = __shfl_sync(kFullMask, list, leader);
  place = __shfl_sync(kFullMask, place, leader) + __popc(same & ((1u << lane) - 1));
  if (row < 0) return;
  if (place < kListed) to.lists[list * kListed + place] = i;
  if (place == kListed || (place > 0 && place % piece == 0)) to.pieces[atomicAdd(to.found, 1)] = {list, place / piece};
}

// Grid: ceil(count / blockDim.x). Block: kThreads. Makes lists with a stride of 1 from sorted indices, `keys`, and the position
// that each had, `order`. T does not matter.
template <typename T>
__global__ void embedding_bwd_sorted(const int* __restrict__ keys, const long long* __restrict__ order, int* zeros,
                                     int* scratch, long long padding_idx, long long rows, int count, int piece,
                                     int most) {
  const Lists to(zeros, scratch, rows, count, most);
  const int i = static_cast<int>(global_thread());
  if (i >= count) return;
  const int row = keys[i];
  to.lists[i] = static_cast<int>(order[i]);
  if (row == padding_idx || (i > 0 && keys[i - 1] == row)) return;
  const int length = end_of(keys, row, i, count) - i;
  to.first[row] = i + 1;
  to.length[i] = length;
  if (length <= kListed) return;
  const int pieces = (length + piece - 1) / piece, begin = atomicAdd(to.found, pieces);
  for (int which = 0; which < pieces; ++which) to.pieces[begin + which] = {i, which};
}

// Grid: `adders` blocks, then `listers` blocks, then ceil(rows / (batch * warps of a block)). Block: (x, y), kThreads at most,
// whole warps; x runs along a row. Shared memory: `piece` ints. Adders add the pieces of long lists, and the last adder of a
// list adds its pieces' sums. A lister adds the short lists that begin at `slots` positions. Of the other blocks, a warp has
// `batch` rows, and writes zeros to those that nothing names: at most kWarp rows, or if rows are short a multiple of kWarp
// rows, side by side. The function is long because its three kinds of blocks are one launch: they run beside each other.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 4)
    embedding_bwd(const T* __restrict__ grad_y, const long long* __restrict__ indices, int* zeros, int* scratch,
                  acc_t<T>* partials, T* __restrict__ grad_weight, bool by_freq, long long rows, long long size,
                  int count, int piece, int most, int adders, int listers, int slots, int batch, int stride) {
  constexpr int W = kVecWidth<T>;
  __shared__ __align__(32) Added added[kAdded];
  __shared__ unsigned bits[kLinked / kWarp];
  __shared__ int4 listed[kSlots];  // the lists of several: (first, length, where in `added`, row)
  __shared__ int listed_count, added_count;
  __shared__ bool is_last, is_near_end;
  extern __shared__ int list[];
  auto* sums = reinterpret_cast<Vec<acc_t<T>, W>*>(added);
  static_assert(sizeof(added) >= kThreads * sizeof(*sums), "one of each thread");
  const Lists lists(zeros, scratch, rows, count, most);
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int lane = thread % kWarp, warp = thread / kWarp, warps = threads / kWarp;
  const GradRows<T> given{grad_y, size};
  // a position of the list, which names its row
  const auto member = [&](int first) { return stride > 1 ? first : lists.lists[first]; };
  if (blockIdx.x < adders) {
    const long long pitch = ALIGNED ? size : (size / W + 2) * W;
    const PieceSums<T> piece_sums{partials, pitch};
#pragma unroll 1
    for (int number = blockIdx.x; number < *lists.found; number += adders) {
      const int first = lists.pieces[number].x, begin = lists.pieces[number].y * piece;
      const int length = lists.length[first], here = length - begin < piece ? length - begin : piece;
      const int pieces = (length + piece - 1) / piece, divisor = by_freq ? length : 1;
      const long long row = indices[member(first)];
      T* to = grad_weight + row * size;
      acc_t<T>* sum = pieces > 1 ? partials + number * pitch : nullptr;
      __syncthreads();
      if (stride > 1) find_positions(indices, count, int(row), begin, here, bits, list);
      else
        for (int i = thread; i < here; i += threads) list[i] = lists.lists[first + begin + i];
      __syncthreads();
      // a row that is neither the first nor the last lies inside grad_y
      if constexpr (ALIGNED) add_up<T, kWhole>(to, sum, size, list, here, divisor, sums, given);
      else if (list[0] > 0 && list[here - 1] + 1 < count && size >= 2 * W) {
        add_up<T, kAcross>(to, sum, size, list, here, divisor, sums, given);
      } else {
        add_up<T, kNearEnd>(to, sum, size, list, here, divisor, sums, given);
      }
      if (pieces == 1) continue;
      __threadfence();
      __syncthreads();
      if (thread == 0) is_last = atomicAdd(lists.done + first, 1) == pieces - 1;
      __syncthreads();
      if (!is_last) continue;
      __threadfence();
      for (int i = thread; i < *lists.found; i += threads) {
        if (lists.pieces[i].x == first) list[lists.pieces[i].y] = i;
      }
      __syncthreads();
      add_up<T, ALIGNED ? kWhole : kAcross>(to, nullptr, size, list, pieces, divisor, sums, piece_sums);
    }
    return;
  }
  if (blockIdx.x < adders + listers) {
    if (thread == 0) listed_count = added_count = 0, is_near_end = size < 2 * W;
    __syncthreads();
    const auto add = [&](int at, int position, int signed_row) {
      added[at] = {position, signed_row};
      if (position == 0 || position + 1 == count) is_near_end = true;
    };
    for (int slot = thread; slot < slots; slot += threads) {
      // most lists begin at one of the first positions, so a block takes some from everywhere; those in order, neighbours
      const int block = blockIdx.x - adders;
      const long long first = stride > 1 ? slot * (long long)listers + block : block * (long long)slots + slot;
      if (first >= count) break;
      const int length = lists.length[first], position = member(int(first)), row = int(indices[position]);
      if (length == 0 || length > kListed) continue;
      const int at = atomicAdd(&added_count, length);
      if (length == 1) add(at, position, row);
      else listed[atomicAdd(&listed_count, 1)] = make_int4(int(first), length, at, row);
    }
    __syncthreads();
    for (int i = warp; i < listed_count; i += warps) {  // in order
      const int first = listed[i].x, length = listed[i].y;
      const int position = lists.lists[first * stride + (lane < length ? lane : 0)];
      int before = 0;
      for (int other = 0; other < length; ++other) before += __shfl_sync(kFullMask, position, other) < position;
      if (lane < length) add(listed[i].z + before, position, before + 1 == length ? listed[i].w : ~listed[i].w);
    }
    __syncthreads();
    const auto begin_of = [&](int y) {  // as many positions for each, but whole lists
      int at = (y * added_count + int(blockDim.y) - 1) / int(blockDim.y);
      while (at > 0 && at < added_count && !added[at - 1].is_last()) ++at;
      return at;
    };
    const int begin = begin_of(threadIdx.y), end = begin_of(threadIdx.y + 1);
    const int units = int((size + W - 1) / W) + (ALIGNED ? 0 : 1);
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
      if constexpr (ALIGNED) {
        write_lists<T, kWhole>(grad_weight, size, unit, added, begin, end, by_freq, given);
      } else if (is_near_end && (unit < 2 || (unit + 2LL) * W > size)) {  // the vector may reach beyond grad_y
        write_lists<T, kNearEnd>(grad_weight, size, unit, added, begin, end, by_freq, given);
      } else {
        write_lists<T, kAcross>(grad_weight, size, unit, added, begin, end, by_freq, given);
      }
    }
    return;
  }
  const long long first = (blockIdx.x - adders - listers) * (long long)batch * warps + warp;
  if (batch >= kWarp) {
    constexpr int U = 4;
    const long long begin = first + warp * (batch - 1LL);
#pragma unroll 1
    for (int r = 0; r < batch; r += U * kWarp) {
      unsigned named[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const long long own = begin + r + u * kWarp + lane;
        named[u] = r + u * kWarp >= batch || own >= rows || lists.first[own] != 0;
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const unsigned all = __ballot_sync(kFullMask, named[u]);
        if (all != kFullMask) clear_rows(grad_weight + (begin + r + u * kWarp) * size, int(size), all, lane);
      }
    }
    return;
  }
  const long long own = first + lane * warps;
  const unsigned named = __ballot_sync(kFullMask, lane < batch && own < rows && lists.first[own] != 0);
  const int width = blockDim.x < kWarp ? blockDim.x : kWarp, at_once = kWarp / width;  // powers of two
#pragma unroll 1
  for (int r = lane / width; r < batch && first + r * warps < rows; r += at_once) {
    if (named >> r & 1) continue;
    T* to = grad_weight + (first + r * warps) * size;
    clear_row(to, size, lane & (width - 1), width);
  }
}
