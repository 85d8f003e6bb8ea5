// grad_q in fp32, to which blocks add in no order: where its sums lie, how they are added, and how they are rounded.
#pragma once

#include "attention/problem.cuh"

namespace attention {

// Of 64 x 64 sums the 16 x 8 that one product of a warp has lie together, 8 columns after the other, and of each 8 columns four
// times 16 rows: as the threads hold them where four can be added at once, else so that neighbours add to neighbours.
__device__ __forceinline__ void add_four(float* fragment, const float* four) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(fragment + 4 * lane), "f"(four[0]),
               "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(fragment + 32 * e + lane, four[e]);
#endif
}
__device__ __forceinline__ float4 four_of(const float* fragment) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  return *reinterpret_cast<const float4*>(fragment + 4 * lane);
#else
  return {fragment[lane], fragment[32 + lane], fragment[64 + lane], fragment[96 + lane]};
#endif
}

// grad_q of 64 x 64 sums, `across` side by side: rounded, and turned through shared memory into whole lines.
template <typename T>
__device__ __forceinline__ void collect(const float* sums, T* grad_q, float scale, int across, const Strides& to,
                                        const Sizes& sizes) {
  __shared__ __align__(16) unsigned tile[64][36];  // of two values each; 4 more, so that eight rows meet no bank twice
  const int tiles = sizes.padded / 64 * across, in = blockIdx.x % tiles, of = blockIdx.x / tiles;
  const int first = in / across * 64, lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = warp * 16 + lane / 4;
  if (first >= sizes.queries) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = four_of(sums + blockIdx.x * 4096ll + j * 512 + warp * 128);
    tile[line][4 * j + lane % 4] = pack<T>(x.x * scale, x.y * scale);
    tile[line + 8][4 * j + lane % 4] = pack<T>(x.z * scale, x.w * scale);
  }
  __syncthreads();
  const int chunk = threadIdx.x % 8, column = in % across * 64 + chunk * 8;
  if (column >= sizes.width) return;
  T* const at = grad_q + of / sizes.heads * to.batch + of % sizes.heads * to.head + column;
#pragma unroll
  for (int i = threadIdx.x / 8; i < 64; i += 16) {
    if (first + i < sizes.queries) {
      *reinterpret_cast<uint4*>(at + (first + i) * to.row) = *reinterpret_cast<const uint4*>(&tile[i][4 * chunk]);
    }
  }
}

}  // namespace attention
