// Which panels of keys a tile of queries sees by the mask of a variant, and which tile's queries a panel of keys: see Map.
#pragma once

#include "attention/problem.cuh"

namespace attention {

// What there is of a mask in a cell of so many queries and keys, of which `across` lie side by side for the keys, and `down` one
// below the other for the queries. heads: how many the mask tells apart.
struct Cells { int rows, columns, across, down, heads; };

constexpr int kSeen = 1, kUnseen = 2;  // some score of a cell, of those within bounds

// A block has a cell, its warps have every fourth query of it.
template <typename Variant>
__device__ __forceinline__ void look(unsigned char* cells, const Sizes& sizes, const Cells& c, const Variant& variant) {
  const int cell = blockIdx.x / c.across, of = cell / c.down, head = of % c.heads, batch = of / c.heads;
  const int first_query = cell % c.down * c.rows, first_key = blockIdx.x % c.across * c.columns;
  const int last_query = min(first_query + c.rows, sizes.queries), last_key = min(first_key + c.columns, sizes.keys);
  int found = 0;
  for (int q = first_query + threadIdx.x / 32; q < last_query; q += blockDim.x / 32) {
    const int begin = max(first_key, keys_begin<2>(sizes, q)), end = min(last_key, keys_end<2>(sizes, q));
    for (int k = begin + threadIdx.x % 32; k < end; k += 32) found |= variant.seen(batch, head, q, k) ? kSeen : kUnseen;
  }
  const int seen = __syncthreads_or(found & kSeen), unseen = __syncthreads_or(found & kUnseen);
  if (threadIdx.x == 0) cells[blockIdx.x] = (seen ? kSeen : 0) | (unseen ? kUnseen : 0);
}

// A role's list of a tile of `rows` of one side: which panels of `panel` of the other it has to do with. `others`: how many there are.
struct Side { int rows, panel, tiles, others, maps, keys; };

// A warp has a tile. Cells that lie in part in a tile or a panel count.
__device__ __forceinline__ void list(const unsigned char* cells, int* lists, const Cells& c, const Side& side) {
  const int lane = threadIdx.x % 32;
  const long long of = blockIdx.x * static_cast<long long>(blockDim.x / 32) + threadIdx.x / 32;
  if (of >= static_cast<long long>(side.tiles) * side.maps) return;
  const int tile = of % side.tiles, own = side.keys ? c.columns : c.rows, other = side.keys ? c.rows : c.columns;
  const int own_cells = side.keys ? c.across : c.down, other_cells = side.keys ? c.down : c.across;
  const int own_step = side.keys ? 1 : c.across, other_step = side.keys ? c.across : 1;
  const unsigned char* from = cells + of / side.tiles * c.down * c.across;
  int* to = lists + of * (side.others + 1);
  const int begin = tile * side.rows / own, end = min((tile * side.rows + side.rows + own - 1) / own, own_cells);
  int count = 0;
  for (int first = 0; first < side.others; first += 32) {
    const int panel = first + lane, at = panel * side.panel;
    int found = 0;
    if (panel < side.others) {
      for (int x = at / other; x < min((at + side.panel + other - 1) / other, other_cells); ++x) {
        for (int y = begin; y < end; ++y) {
          found |= from[static_cast<long long>(y) * own_step + static_cast<long long>(x) * other_step];
        }
      }
    }
    const unsigned some = __ballot_sync(~0u, found & kSeen);
    if (found & kSeen) {
      to[1 + count + __popc(some & ((1u << lane) - 1))] = 2 * panel + (found & kUnseen ? 1 : 0);
    }
    count += __popc(some);
  }
  if (lane == 0) *to = count;
}

}  // namespace attention
