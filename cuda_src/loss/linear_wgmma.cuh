// The epilogue of fused_linear_cross_entropy_wgmma.cu: of a tile of logits, each row's maximum, sum of exponentials and sum, and
// the logit of the row's target. The logits themselves are stored nowhere.
#pragma once

#include "common/reduce/online_softmax.cuh"
#include "gemm/wgmma.cuh"

// Where these go: `sums`, (max, sum of exp(x - max)), and `totals`, the sums of x, or null, are of [columns of tiles, rows],
// `picked`, x at the target, of [rows]. A target that is no class picks nothing.
struct LossParts {
  const long long* target;
  float2* sums;
  float *totals, *picked;
};

struct RowLosses : wgmma_gemm::Reduced {
  // A thread has two rows, eight apart, and of each the columns 2t and 2t + 1 of every eight; four neighbouring lanes have it all.
  template <typename T, class S> struct Rows {
    Online<T> online[2];
    float total[2];

    // Adds a piece of 64 rows, rounded as logits in memory would be; the first piece of these rows begins, the last ends.
    __device__ __forceinline__ void add(const wgmma_gemm::Problem<T>& p, const wgmma_gemm::Place& to, int piece,
                                        unsigned (&pairs)[S::PIECE / 4]) {
      const LossParts& parts = *static_cast<const LossParts*>(p.reduced);
      const int lane = threadIdx.x % 32, across = piece % S::ACROSS, column = to.column + across * S::PIECE;
      const int row = to.row + piece / S::ACROSS * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
      if (across == 0) {
        online[0] = online[1] = Online<T>();
        total[0] = total[1] = 0;
      }
      if (parts.totals) {  // beyond the last column products are zeros
#pragma unroll
        for (int c = 0; c < S::PIECE / 4; ++c) {
          const float2 pair = wgmma_gemm::unpacked<T>(pairs[c]);
          total[c % 2] += pair.x + pair.y;
        }
      }
      if (column + S::PIECE > p.n) cut(pairs, p.n - column - lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        online[i].template add<S::PIECE / 4>([&](int k) {
          const float2 pair = wgmma_gemm::unpacked<T>(pairs[k / 2 * 2 + i]);
          return k % 2 ? pair.y : pair.x;
        });
        if (row + 8 * i >= p.m) continue;
        const long long at = parts.target[row + 8 * i] - column;
        if (at >= 0 && at < S::PIECE && at % 8 / 2 == lane % 4) pick(pairs, int(at), i, parts.picked + row + 8 * i);
      }
      if (across == S::ACROSS - 1) end(parts, to.column / S::N, row, p.m);
    }

   private:
    // -inf behind `left` columns.
    static __device__ __forceinline__ void cut(unsigned (&pairs)[S::PIECE / 4], int left) {
      const unsigned nothing = wgmma_gemm::packed<T>(-infinity<float>(), -infinity<float>());
#pragma unroll
      for (int c = 0; c < S::PIECE / 4; ++c) {
        if (c / 2 * 8 >= left) pairs[c] = nothing;
        else if (c / 2 * 8 + 1 == left) pairs[c] = (pairs[c] & 0xffff) | (nothing & 0xffff0000);
      }
    }

    static __device__ __forceinline__ void pick(const unsigned (&pairs)[S::PIECE / 4], int at, int i, float* to) {
#pragma unroll
      for (int c = 0; c < S::PIECE / 8; ++c) {
        const float2 pair = wgmma_gemm::unpacked<T>(pairs[2 * c + i]);
        if (at / 8 == c) *to = at % 2 ? pair.y : pair.x;
      }
    }

    __device__ __forceinline__ void end(const LossParts& parts, int tile, int row, int rows) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = online[i].max;
        top = Larger()(top, __shfl_xor_sync(kAll, top, 1));
        top = Larger()(top, __shfl_xor_sync(kAll, top, 2));
        float sum = online[i].sum_for(top);
        sum += __shfl_xor_sync(kAll, sum, 1);
        sum += __shfl_xor_sync(kAll, sum, 2);
        total[i] += __shfl_xor_sync(kAll, total[i], 1);
        total[i] += __shfl_xor_sync(kAll, total[i], 2);
        if (threadIdx.x % 4 != 0 || row + 8 * i >= rows) continue;
        const long long at = static_cast<long long>(tile) * rows + row + 8 * i;
        parts.sums[at] = {top, sum};
        if (parts.totals) parts.totals[at] = total[i];
      }
    }

    static constexpr unsigned kAll = 0xffffffff;
  };
};
