// What the kernels of decode_attention are told; which rows and keys a block has; where a key lies.
#pragma once

#include "common/core/fast_math.cuh"

namespace decode {

// group: heads of the queries that share one of the keys. rows: of the cache of a sequence, at most. window: how many keys
// before its own a query sees, below 0 for all. splits: blocks that share the keys of a sequence. block_size, blocks, table_row:
// rows of a block of a paged cache, how many blocks it has, and entries of a row of the table.
struct Sizes {
  int batches, queries, heads, kv_heads, group, width, rows, window, splits, block_size, blocks, table_row;
};

// In elements; the elements of a row are contiguous. batch: of the cache, or of a block of it where it is paged.
struct Strides { long long batch, row, head; };

// A block has ROWS rows of a head of the keys, row = query * group + head within the group. The steps of kStep keys go round the
// warps of all splits, so that all of the GPU reads neighbouring rows at a time: warp i of the block has the keys from
// `from` + kStep * i on, and again every `apart` ones, up to `to`. The queries of the block see none before `begin`. `length`:
// rows that the cache of the sequence has.
struct Work { int batch, kv_head, first_row, split, length, begin, from, apart, to; };

constexpr int kStep = 16;  // keys; a block of a paged cache has a multiple of it

template <bool MASKED, int ROWS, int WARPS> __device__ __forceinline__ Work work_of(const Sizes& s,
                                                                                    const int* lengths) {
  const int count = s.queries * s.group, tiles = (count + ROWS - 1) / ROWS;
  unsigned index = blockIdx.x;
  Work w;
  w.first_row = index % tiles * ROWS;
  index /= tiles;
  w.kv_head = index % s.kv_heads;
  index /= s.kv_heads;
  w.batch = index % s.batches;
  w.split = index / s.batches;
  w.length = lengths ? min(max(lengths[w.batch], 0), s.rows) : s.rows;
  const int before = w.length - s.queries;  // the keys before that of query 0
  const int first = w.first_row / s.group, last = min(count - 1, w.first_row + ROWS - 1) / s.group;
  w.to = MASKED ? w.length : max(0, before + last + 1);
  w.begin = MASKED || s.window < 0 ? 0 : min(w.to, max(0, before + first - s.window));
  w.from = (w.begin / kStep + w.split * WARPS) * kStep;
  w.apart = s.splits * WARPS * kStep;
  return w;
}

// The keys that a row sees are those from `begin` to `end`; with a mask those of them that it has, where the queries of the block
// have masks of their own.
struct Seen {
  int begin, end;
  const bool* mask;
  template <bool MASKED> __device__ __forceinline__ bool has(int key) const {
    return key >= begin && key < end && (!MASKED || mask == nullptr || mask[key]);
  }

  // Of N keys, the e-th of which is key_of(e) if bit e of `exists` is set: those that the row sees.
  template <bool MASKED, int N, typename Of> __device__ __forceinline__ unsigned among(unsigned exists,
                                                                                       Of key_of) const {
#pragma unroll
    for (int e = 0; e < N; ++e) exists &= ~(static_cast<unsigned>(key_of(e) < begin || key_of(e) >= end) << e);
    if constexpr (MASKED) {
      if (mask == nullptr) return exists;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if (exists >> e & 1 && !mask[key_of(e)]) exists &= ~(1u << e);
      }
    }
    return exists;
  }
};
template <bool MASKED>
__device__ __forceinline__ Seen seen_by(const Sizes& s, const Work& w, const bool* mask, const Strides& ms, int row) {
  if (row >= s.queries * s.group) return {0, 0, nullptr};
  if constexpr (MASKED) {
    const long long of = w.batch * ms.batch + row / s.group * ms.row;
    return {0, w.length, s.queries == 1 ? nullptr : mask + of};
  }
  const int own = w.length - s.queries + row / s.group;
  return {s.window < 0 ? 0 : own - s.window, own + 1, nullptr};
}

// The first key of SPAN ones, and which of them some row of the block sees: bit i says it of key + i.
struct Step {
  int key;
  unsigned seen;
};

// What a warp takes in turn of the keys of its block, SPAN at a time: of each step of kStep keys all, and `w.to` or beyond after the
// last. With a mask it leaves out the steps in which no row of the block sees a key: it looks at 32 steps at a time.
template <bool MASKED, int SPAN> class Steps {
 public:
  __device__ __forceinline__ Steps(const Sizes& s, const Work& w, const bool* mask, const Strides& ms, int rows)
      : start(w.from + kStep * (threadIdx.x / 32)), apart(w.apart), to(w.to), pitch(ms.row) {
    const int first = w.first_row / s.group, last = min(s.queries * s.group - 1, w.first_row + rows - 1) / s.group;
    queries = last - first + 1;
    if constexpr (MASKED) masks = mask + w.batch * ms.batch + first * ms.row;
  }
  __device__ __forceinline__ Step next() {
    at += SPAN;
    if (SPAN == kStep || at % kStep == 0) begin_step();
    return {at, MASKED ? seen >> at % kStep : ~0u};
  }

 private:
  int at = -SPAN, start, apart, to, queries;
  long long pitch;
  const bool* masks;
  unsigned coming = 0, own = 0,
           seen = 0;  // of the 32 steps before `start`: those that are left, what is seen of step `lane`

  __device__ __forceinline__ void begin_step() {
    if constexpr (MASKED) {
      while (coming == 0 && start < to) look();
      at = to;
      if (coming == 0) return;
      const int step = __ffs(coming) - 1;
      coming &= coming - 1;
      at = start - (32 - step) * apart;
      seen = __shfl_sync(~0u, own, step);
    } else {
      at = start;
      start += apart;
    }
  }
  // Half a warp reads the bytes of a step, so that one vote tells what is seen of two. All bytes of a query are asked for before
  // one of them is looked at: behind the last key, the last again.
  __device__ __forceinline__ void look() {
    const int lane = threadIdx.x % 32, key = start + lane / 16 * apart + lane % kStep;
    unsigned any = 0;  // bit i: of this lane's key of two steps
    for (int query = 0; query < queries; ++query) {
      bool sees[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) sees[i] = masks[query * pitch + min(key + 2 * i * apart, to - 1)];
#pragma unroll
      for (int i = 0; i < 16; ++i) any |= static_cast<unsigned>(sees[i]) << i;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned of_two = __ballot_sync(~0u, any >> i & 1 && key + 2 * i * apart < to);
      if (lane / 2 == i) own = lane % 2 ? of_two >> 16 : of_two & 0xffff;
    }
    coming = __ballot_sync(~0u, own != 0);
    start += 32 * apart;
  }
};

// In which block of a paged cache the keys from `key` on lie, a multiple of kStep, as check_block() is told; 0 where it is not
// paged, and behind the last key.
__device__ __forceinline__ int block_of(const Sizes& s, const Work& w, const int* table, int key) {
  if (table == nullptr || key >= w.to) return 0;
  return table[w.batch * static_cast<long long>(s.table_row) + key / s.block_size];
}
__device__ __forceinline__ void check_block(const Sizes& s, const Work& w, const int* table, int key, int block) {
  if (table == nullptr || (block >= 0 && block < s.blocks)) return;
  printf("cupyops: block_table, element %lld, is %d, expected one in [0, %d)\n",
         w.batch * static_cast<long long>(s.table_row) + key / s.block_size, block, s.blocks);
  __trap();
}

// From where a sequence's cache begins to the row of `key`, which lies in `block` where it is paged: in elements.
__device__ __forceinline__ long long offset_of(const Sizes& s, const Strides& of, const Work& w, bool paged, int block,
                                               int key) {
  return paged ? block * of.batch + key % s.block_size * of.row : w.batch * of.batch + key * of.row;
}

// A score as the exponential takes it: scaled, capped, and times `unit`.
__device__ __forceinline__ float score_of(float product, float scale, float softcap, float unit) {
  return softcap > 0 ? softcap * tanhf(product * (scale / softcap)) * unit : product * (scale * unit);
}

// How exponentials are taken: by two instructions, of scores times log2(e), or as exactly as fp32 is.
struct Fast {
  static constexpr float kUnit = 1.4426950408889634f;
  static __device__ __forceinline__ float exp_of(float x) { return fast_exp2(x); }
  static __device__ __forceinline__ float log_of(float x) { return log2f(x); }
};
struct Exact {
  static constexpr float kUnit = 1.0f;
  static __device__ __forceinline__ float exp_of(float x) { return expf(x); }
  static __device__ __forceinline__ float log_of(float x) { return logf(x); }
};

// What is subtracted of scores, where the largest is `top`: of an infinite one nothing, so that exp(-inf - 0) is 0 and the sum of
// a row with inf is inf.
__device__ __forceinline__ float base_of(float top) { return fabsf(top) == infinity<float>() ? 0.0f : top; }

// Where a block leaves its rows: in y and lse, or as partial results of its split, in fp32. Rows are (batch, query, head).
template <typename T> struct Results {
  T* y;
  float* lse;
  float* partial_y;
  float* partial_lse;
};

// The row of the results that is row `at` of those that share a head of the keys.
__device__ __forceinline__ long long result_of(const Sizes& s, const Work& w, int at) {
  return (w.batch * static_cast<long long>(s.queries) + at / s.group) * s.heads + w.kv_head * s.group + at % s.group;
}

// What a block has of its ROWS rows when its warps are done, in shared memory: how large scores are and what exponentials add up
// to, for each warp and in all, and the sums of half of the warps at a time, PITCH for a row.
template <typename E, int ROWS, int D, int PITCH, int WARPS> struct Finish {
  static constexpr int kRegions = 2;
  float *tops, *totals, *whole, *sums;
  int rows;

  __device__ __forceinline__ Finish(float* shared, int rows) : tops(shared), rows(rows) {
    totals = tops + WARPS * ROWS, whole = totals + WARPS * ROWS, sums = whole + ROWS;
  }
  __device__ __forceinline__ float most(int of) const {
    float found = tops[of];
    for (int other = 1; other < WARPS; ++other) found = fmaxf(found, tops[other * ROWS + of]);
    return found;
  }

  // Adds up what the warps have, in their order. top, total: of the N rows of this thread, `row` of the block, over the keys of
  // the warp. add(sums, factors, rows, first) adds the thread's sums of the block's first `rows` rows, times a factor for each
  // of its own, to sums[ROWS][PITCH], or stores them there first.
  template <int N, typename Add>
  __device__ __forceinline__ void add_warps(const float (&top)[N], const float (&total)[N], const int (&row)[N],
                                            Add add) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < N; ++i) {  // several lanes store the same
      tops[warp * ROWS + row[i]] = top[i];
      totals[warp * ROWS + row[i]] = total[i];
    }
    __syncthreads();
    float factors[N];
#pragma unroll
    for (int i = 0; i < N; ++i) factors[i] = E::exp_of(top[i] - base_of(most(row[i])));
    if (threadIdx.x < rows) {
      const float base = base_of(most(threadIdx.x));
      float sum = 0;
      for (int other = 0; other < WARPS; ++other) {
        const int of = other * ROWS + threadIdx.x;
        sum += totals[of] * E::exp_of(tops[of] - base);
      }
      whole[threadIdx.x] = sum;
    }
    for (int turn = 0; turn < WARPS / kRegions; ++turn) {
      if (turn == warp / kRegions) add(sums + warp % kRegions * ROWS * PITCH, factors, rows, turn == 0);
      __syncthreads();
    }
  }

  // Stores the rows. Column c of the sums lies at place(c).
  template <typename T, typename Place>
  __device__ __forceinline__ void store(const Sizes& s, const Work& w, const Results<T>& to, Place place) const {
    const long long part = w.split * static_cast<long long>(s.batches) * s.queries * s.heads;
    if (threadIdx.x < rows) {
      const long long result = result_of(s, w, w.first_row + threadIdx.x);
      const float sum = whole[threadIdx.x];
      const float lse = sum == 0 ? -infinity<float>() : (base_of(most(threadIdx.x)) + E::log_of(sum)) / E::kUnit;
      (s.splits == 1 ? to.lse[result] : to.partial_lse[part + result]) = lse;
    }
    for (int i = threadIdx.x; i < rows * D; i += 32 * WARPS) {
      const int of = i / D, column = i % D, at = of * PITCH + place(column);
      if (column >= s.width) continue;
      float sum = sums[at];
      for (int region = 1; region < kRegions; ++region) sum += sums[region * ROWS * PITCH + at];
      const float y = whole[of] == 0 ? 0.0f : sum / whole[of];
      const long long result = result_of(s, w, w.first_row + of);
      if (s.splits == 1) to.y[result * s.width + column] = from_acc<T>(y);
      else to.partial_y[(part + result) * s.width + column] = y;
    }
  }
};

}  // namespace decode
