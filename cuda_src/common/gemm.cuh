// One tiled matrix multiplication for all: matmul, linear and conv2d differ in how operands are read (MatrixOperand, an
// image as its patches) and in what the Output adds, no more.
#pragma once

#include "common/gemm_fma.cuh"
#include "common/gemm_mma.cuh"

template <typename T> constexpr bool kTensorCores = false;
#if __CUDA_ARCH__ >= 750
template <> constexpr bool kTensorCores<__half> = true;
#endif
#if __CUDA_ARCH__ >= 800
template <> constexpr bool kTensorCores<__nv_bfloat16> = true;
#endif

template <typename T, int TILE, bool MMA> struct EngineFor { using type = FmaEngine<T, TILE>; };
template <typename T, int TILE> struct EngineFor<T, TILE, true> { using type = MmaEngine<T, TILE>; };
template <typename T, int TILE> using GemmEngine = typename EngineFor<T, TILE, kTensorCores<T>>::type;

// For __launch_bounds__: threads, and the blocks whose registers are to fit an SM.
template <int TILE> constexpr int kGemmThreads = TILE == 128 ? 256 : 128;
template <typename T, int TILE> constexpr int kGemmBlocks = (TILE == 128 ? 2 : 4) / (sizeof(T) == 8 ? 2 : 1);

// Which tile, batch and share of k a block has. Tiles are taken in groups of 8 rows, so that the blocks that run at one
// time share rows of A and columns of B in the L2 cache.
struct GemmBlock {
  int m0, n0, batch, split, k_begin, k_end;

  __device__ __forceinline__ GemmBlock(const Gemm& gemm, int tile) {
    constexpr unsigned kGroup = 8;
    const unsigned tiles_m = (gemm.m + tile - 1) / tile, tiles_n = (gemm.n + gemm.ones + tile - 1) / tile;
    const unsigned share = blockIdx.x / (tiles_m * tiles_n), index = blockIdx.x % (tiles_m * tiles_n);
    const unsigned group = index / (kGroup * tiles_n) * kGroup, within = index % (kGroup * tiles_n);
    const unsigned rows = min(kGroup, tiles_m - group);
    m0 = (group + within % rows) * tile;
    n0 = within / rows * tile;
    split = share % static_cast<unsigned>(gemm.splits);
    batch = share / static_cast<unsigned>(gemm.splits);
    k_begin = split * gemm.k_split;
    k_end = min(static_cast<long long>(k_begin) + gemm.k_split, gemm.k);
  }
};

__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#endif
}

__device__ __forceinline__ void commit_async() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the newest PENDING groups have arrived.
template <int PENDING> __device__ __forceinline__ void wait_async() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// One operand on its way from global to shared memory, in chunks of W elements, COUNT of them to a thread. fetch() starts
// the loads of a panel and commit() stores what waits in registers meanwhile. With ASYNC nothing waits: 16-byte copies go
// straight to shared memory, and what must be gathered is stored at once, since packing 16-bit elements awaits them anyway.
template <typename T, typename Engine, int TILE, typename Operand> struct PanelLoader {
  static constexpr int W = Engine::W, BK = Engine::BK, COUNT = TILE * BK / W / Engine::THREADS;
  const Operand& operand;
  Vec<T, W> chunks[COUNT];

  __device__ __forceinline__ explicit PanelLoader(const Operand& operand) : operand(operand) {}

  __device__ __forceinline__ void fetch(int i0, int k0, typename Engine::Element* panel) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      int i, k;
      position(j, i, k);
      const T* source = operand.template vector<W>(i0 + i, k0 + k);
      if constexpr (Engine::ASYNC) {
        if (source) {
          copy_async16(Engine::place(panel, operand.along_k, i, k), source);
        } else {
          Engine::store(panel, operand.along_k, i, k, operand.template gather<W>(i0 + i, k0 + k));
        }
      } else {
        chunks[j] = source ? load_vec<T, W>(source) : operand.template gather<W>(i0 + i, k0 + k);
      }
    }
  }

  __device__ __forceinline__ void commit(typename Engine::Element* panel) {
    if constexpr (!Engine::ASYNC) {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        int i, k;
        position(j, i, k);
        Engine::store(panel, operand.along_k, i, k, chunks[j]);
      }
    }
  }

 private:
  // Neighbouring threads read along the direction in which the operand is contiguous.
  __device__ __forceinline__ void position(int j, int& i, int& k) const {
    const int chunk = threadIdx.x + j * Engine::THREADS;
    i = operand.along_k ? chunk / (BK / W) : chunk % (TILE / W) * W;
    k = operand.along_k ? chunk % (BK / W) * W : chunk / (TILE / W);
  }
};

// One TILE x TILE tile of A B, by a whole block of kGemmThreads<TILE>. Shared memory: a ring of STAGES panels of A and of
// B, sized by the host (_gemm.py). While one stage is multiplied, the next ones are on their way.
template <typename T, int TILE, typename OperandA, typename OperandB, typename Out>
__device__ __forceinline__ void gemm_tile(const GemmBlock& block, const OperandA& a, const OperandB& b,
                                          const Out& out) {
  using Engine = GemmEngine<T, TILE>;
  using Element = typename Engine::Element;
  constexpr int BK = Engine::BK, STAGES = Engine::STAGES;
  extern __shared__ __align__(16) unsigned char gemm_shared[];
  Element* ring = reinterpret_cast<Element*>(gemm_shared);
  const auto stage = [&](int step) { return ring + step % STAGES * (2 * Engine::PANEL); };

  Engine engine;
  PanelLoader<T, Engine, TILE, OperandA> load_a(a);
  PanelLoader<T, Engine, TILE, OperandB> load_b(b);
  const int steps = (block.k_end - block.k_begin + BK - 1) / BK;
  const auto fetch = [&](int step) {
    load_a.fetch(block.m0, block.k_begin + step * BK, stage(step));
    load_b.fetch(block.n0, block.k_begin + step * BK, stage(step) + Engine::PANEL);
  };
  const auto commit = [&](int step) {
    load_a.commit(stage(step));
    load_b.commit(stage(step) + Engine::PANEL);
  };

  for (int step = 1 - STAGES; step < steps; ++step) {  // the first steps only fill the ring
    if (step >= 0) {
      wait_async<STAGES - 2>();
      __syncthreads();  // this stage has arrived, and the one before it has been read by all: it can be filled again
    }
    const int next = step + STAGES - 1;
    if (next < steps) fetch(next);
    if (step >= 0) engine.multiply(stage(step), a.along_k, stage(step) + Engine::PANEL, b.along_k);
    if (next < steps) commit(next);
    commit_async();
  }
  __syncthreads();
  engine.write(out, block.m0, block.n0, reinterpret_cast<acc_t<T>*>(gemm_shared));
}

// out = the sum of the partial sums of all splits, in a fixed order. Grid: ceil(elements / blockDim.x) with elements =
// batches * m * partial_row; block: (x, y), y > 1 where there are many splits: row r adds up the splits r, r + y, ...
// Shared memory: x * y values.
template <typename T>
__device__ __forceinline__ void gemm_add_splits(const acc_t<T>* partial, T* data, const T* bias, T* column,
                                                const Gemm& gemm) {
  using A = acc_t<T>;
  extern __shared__ __align__(16) unsigned char gemm_shared[];
  A* shared = reinterpret_cast<A*>(gemm_shared);
  const long long element = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long row = gemm.partial_row(), matrix = gemm.m * row;
  const long long batch = element / matrix, within = element % matrix;
  const bool inside = batch < gemm.batches;
  A sum = 0;
  if (inside) {
    const A* first = partial + batch * gemm.splits * matrix + within;
#pragma unroll 4
    for (int split = threadIdx.y; split < gemm.splits; split += blockDim.y) sum += first[split * matrix];
  }
  shared[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
  for (int r = 1; r < blockDim.y; ++r) sum += shared[r * blockDim.x + threadIdx.x];
  Output<T>::template make<1>(data, nullptr, bias, column, gemm, batch, 0).put(within / row, within % row, sum);
}
