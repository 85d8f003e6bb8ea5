// The kernels of ladder.py: each step of a ladder is the one before with one thing changed.
//
// Sizes are multiples of the tiles: these kernels show one idea each, and leave tails to those of cuda_src/.
#include "common/core/vector.cuh"

// --- one thread for one result ---

// y = a + b. Grid, block: a thread for each element.
__global__ void vector_add(const float* a, const float* b, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a[i] + b[i];
}

// y[h, w] = the sum of x[h + i, w + j] filter[i, j] over i, j < k. Grid, block: a thread for each result, w first.
__global__ void convolve(const float* x, const float* filter, float* y, int size, int k) {
  const int w = blockIdx.x * blockDim.x + threadIdx.x, h = blockIdx.y * blockDim.y + threadIdx.y;
  const int out = size - k + 1;
  if (h >= out || w >= out) return;
  float sum = 0;
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j < k; ++j) sum += x[(h + i) * size + w + j] * filter[i * k + j];
  }
  y[h * out + w] = sum;
}

// --- matrix product, c = a b, all n x n ---

// Neighbouring threads on neighbouring rows: each load of a warp touches 32 lines. Block: (16, 16).
__global__ void matmul_uncoalesced(const float* a, const float* b, float* c, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y * blockDim.y + threadIdx.y;
  float sum = 0;
  for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
  c[row * n + column] = sum;
}

// Neighbouring threads on neighbouring columns: a warp reads whole lines of b, and one number of a. Block: (32, 8).
__global__ void matmul_coalesced(const float* a, const float* b, float* c, int n) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
  c[row * n + column] = sum;
}

// Tiles of 32 x 32 in shared memory: each number is loaded by a block once and used 32 times. Block: (32, 32).
__global__ void matmul_shared(const float* a, const float* b, float* c, int n) {
  __shared__ float of_a[32][32], of_b[32][32];
  const int row = blockIdx.y * 32 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; k += 32) {
    of_a[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    of_b[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
    for (int i = 0; i < 32; ++i) sum += of_a[threadIdx.y][i] * of_b[i][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

constexpr int kTile = 128, kDeep = 8, kEach = 8;  // of a block, of a step, of a thread

// 8 x 8 results in each thread: 16 loads from shared memory for 64 products. VECTORS: four numbers at a time, and a tile
// of a that is stored transposed, so that a thread's eight lie side by side. Block: 256.
template <bool VECTORS> __global__ void __launch_bounds__(256)
    matmul_registers(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int n) {
  __shared__ __align__(16) float of_a[kDeep][kTile], of_b[kDeep][kTile];
  const int t = threadIdx.x, row = t / 16 * kEach, column = t % 16 * kEach;
  const float* from_a = a + blockIdx.y * kTile * n;
  const float* from_b = b + blockIdx.x * kTile;
  float sums[kEach][kEach] = {};
  for (int k = 0; k < n; k += kDeep) {
    if constexpr (VECTORS) {
      const Vec<float, 4> of_row = load_vec<float, 4>(from_a + t / 2 * n + k + t % 2 * 4);
      for (int e = 0; e < 4; ++e) of_a[t % 2 * 4 + e][t / 2] = of_row.data[e];
      store_vec<float, 4>(&of_b[t / 32][t % 32 * 4], load_vec<float, 4>(from_b + (k + t / 32) * n + t % 32 * 4));
    } else {
      for (int i = t; i < kTile * kDeep; i += 256) {
        of_a[i % kDeep][i / kDeep] = from_a[i / kDeep * n + k + i % kDeep];
        of_b[i / kTile][i % kTile] = from_b[(k + i / kTile) * n + i % kTile];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      float left[kEach], right[kEach];
      if constexpr (VECTORS) {
#pragma unroll
        for (int e = 0; e < kEach; e += 4) {
          *reinterpret_cast<Vec<float, 4>*>(left + e) = load_vec<float, 4>(&of_a[i][row + e]);
          *reinterpret_cast<Vec<float, 4>*>(right + e) = load_vec<float, 4>(&of_b[i][column + e]);
        }
      } else {
#pragma unroll
        for (int e = 0; e < kEach; ++e) left[e] = of_a[i][row + e], right[e] = of_b[i][column + e];
      }
#pragma unroll
      for (int y = 0; y < kEach; ++y) {
#pragma unroll
        for (int x = 0; x < kEach; ++x) sums[y][x] += left[y] * right[x];
      }
    }
    __syncthreads();
  }
  float* to = c + (blockIdx.y * kTile + row) * n + blockIdx.x * kTile + column;
#pragma unroll
  for (int y = 0; y < kEach; ++y) {
#pragma unroll
    for (int x = 0; x < kEach; x += 4) {
      if constexpr (VECTORS)
        store_vec<float, 4>(to + y * n + x, Vec<float, 4>{sums[y][x], sums[y][x + 1], sums[y][x + 2], sums[y][x + 3]});
      else
        for (int e = 0; e < 4; ++e) to[y * n + x + e] = sums[y][x + e];
    }
  }
}

// Two neighbours of bf16, as one register.
__device__ __forceinline__ unsigned pair_at(const __nv_bfloat16* at) { return *reinterpret_cast<const unsigned*>(at); }

// sums += a b for 16 x 16 of a and 16 x 8 of b, the numbers spread over the lanes of a warp as the instruction has it.
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// bf16 on the tensor cores: a warp has 32 x 32 results, a block 64 x 64, from tiles in shared memory, that of b stored
// transposed. Block: 128.
__global__ void matmul_tensor_cores(const __nv_bfloat16* __restrict__ a, const __nv_bfloat16* __restrict__ b,
                                    float* __restrict__ c, int n) {
  constexpr int kPitch = 32 + 8;
  __shared__ __align__(16) __nv_bfloat16 of_a[64 * kPitch], of_b[64 * kPitch];
  const int t = threadIdx.x, warp = t / 32, group = t % 32 / 4, pair = t % 4 * 2;
  const int down = warp / 2 * 32, across = warp % 2 * 32;
  float sums[2][4][4] = {};
  for (int k = 0; k < n; k += 32) {
    for (int i = t; i < 64 * 4; i += 128) {
      const int row = i / 4, column = i % 4 * 8;
      store_vec<__nv_bfloat16, 8>(of_a + row * kPitch + column,
                                  load_vec<__nv_bfloat16, 8>(a + (blockIdx.y * 64 + row) * n + k + column));
    }
    for (int i = t; i < 32 * 8; i += 128) {
      const int row = i % 32, column = i / 32 * 8;
      const auto loaded = load_vec<__nv_bfloat16, 8>(b + (k + row) * n + blockIdx.x * 64 + column);
      for (int e = 0; e < 8; ++e) of_b[(column + e) * kPitch + row] = loaded.data[e];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; i += 16) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const __nv_bfloat16* from = of_a + (down + y * 16 + group) * kPitch + i + pair;
        const unsigned left[4] = {pair_at(from), pair_at(from + 8 * kPitch), pair_at(from + 8),
                                  pair_at(from + 8 * kPitch + 8)};
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const __nv_bfloat16* to = of_b + (across + x * 8 + group) * kPitch + i + pair;
          const unsigned right[2] = {pair_at(to), pair_at(to + 8)};
          multiply(sums[y][x], left, right);
        }
      }
    }
    __syncthreads();
  }
  for (int y = 0; y < 2; ++y) {
    for (int x = 0; x < 4; ++x) {
      float* to = c + (blockIdx.y * 64 + down + y * 16 + group) * n + blockIdx.x * 64 + across + x * 8 + pair;
      to[0] = sums[y][x][0], to[1] = sums[y][x][1];
      to[8 * n] = sums[y][x][2], to[8 * n + 1] = sums[y][x][3];
    }
  }
}

// --- sum: each block leaves one number, and a second launch of the same kernel adds those ---

// Neighbours are added first: half of each warp idles at every step. Block: 256, a thread for each number.
__global__ void sum_divergent(const float* x, float* y, long long n) {
  __shared__ float values[256];
  const int t = threadIdx.x;
  const long long i = blockIdx.x * 256LL + t;
  values[t] = i < n ? x[i] : 0;
  for (int step = 1; step < 256; step *= 2) {
    __syncthreads();
    if (t % (2 * step) == 0) values[t] += values[t + step];
  }
  if (t == 0) y[blockIdx.x] = values[0];
}

// Halves are added: the threads that work are whole warps, next to each other. Block: 256.
__global__ void sum_halves(const float* x, float* y, long long n) {
  __shared__ float values[256];
  const int t = threadIdx.x;
  const long long i = blockIdx.x * 256LL + t;
  values[t] = i < n ? x[i] : 0;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) values[t] += values[t + half];
  }
  if (t == 0) y[blockIdx.x] = values[0];
}

// The sum over a block, in its thread 0: within warps by shuffles, then over warps.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  if (warp > 0) return value;
  value = lane < blockDim.x / 32 ? of_warp[lane] : 0;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// Registers are exchanged within a warp: two barriers fewer than steps. Block: 256.
__global__ void sum_warps(const float* x, float* y, long long n) {
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  const float sum = block_sum(i < n ? x[i] : 0);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// Each thread adds many numbers before it waits for any other; a grid that fills the GPU once. Block: 256.
__global__ void sum_strided(const float* __restrict__ x, float* __restrict__ y, long long n) {
  float sum = 0;
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += gridDim.x * 256LL) sum += x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// Four numbers in a load, UNROLL loads under way. n is a multiple of 4. Block: 256.
template <int UNROLL> __global__ void sum_vectors(const float* __restrict__ x, float* __restrict__ y, long long n) {
  const long long step = gridDim.x * 256LL, vectors = n / 4;
  float sums[UNROLL] = {};
  long long i = blockIdx.x * 256LL + threadIdx.x;
  for (; i + (UNROLL - 1) * step < vectors; i += UNROLL * step) {
    Vec<float, 4> values[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) values[u] = load_vec<float, 4>(x + (i + u * step) * 4);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      sums[u] += (values[u].data[0] + values[u].data[1]) + (values[u].data[2] + values[u].data[3]);
    }
  }
  for (; i < vectors; i += step) {
    const Vec<float, 4> value = load_vec<float, 4>(x + i * 4);
    sums[0] += (value.data[0] + value.data[1]) + (value.data[2] + value.data[3]);
  }
  for (int u = 1; u < UNROLL; ++u) sums[0] += sums[u];
  const float sum = block_sum(sums[0]);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// --- access: y[i] = x[where i leads], all of x once ---

// Neighbouring threads on numbers `stride` apart; in the end each is read once. n is a multiple of stride.
__global__ void read_strided(const float* __restrict__ x, float* __restrict__ y, int n, int stride) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i % (n / stride) * stride + i / (n / stride)];
}

// From `offset` on: where that is no multiple of 32, a warp touches one line more.
__global__ void read_offset(const float* __restrict__ x, float* __restrict__ y, int n, int offset) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i + offset < n) y[i] = x[i + offset];
}

// Where an index leads.
__global__ void read_indexed(const float* __restrict__ x, const int* __restrict__ index, float* __restrict__ y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[index[i]];
}

// Sixteen bytes a thread.
__global__ void read_vectors(const float* __restrict__ x, float* __restrict__ y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n / 4) store_vec<float, 4>(y + i * 4, load_vec<float, 4>(x + i * 4));
}

// Each thread reads `run` numbers of its own, one after the other: what a loop over an array becomes on a GPU.
__global__ void read_runs(const float* __restrict__ x, float* __restrict__ y, int n, int run) {
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * run;
  for (int i = first; i < first + run && i < n; ++i) y[i] = x[i];
}
