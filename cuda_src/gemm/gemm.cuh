// One tiled matrix multiplication for all: matmul, linear and conv2d differ in how operands are read (MatrixOperand, an
// image as its patches) and in what the Output adds, no more.
#pragma once

#include "gemm/fma.cuh"
#include "gemm/mma.cuh"

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

// The blocks whose registers are to fit an SM, for __launch_bounds__.
template <typename T, int TILE>
constexpr int kGemmBlocks = TILE == 256   ? 1
                            : TILE == 128 ? (sizeof(T) == 8 ? 1 : 2)
                            : TILE == 64  ? (sizeof(T) == 2   ? 4
                                             : sizeof(T) == 4 ? 3
                                                              : 2)
                                          : 6;

// Which tile, batch and share of k a block has. Tiles are taken in groups of 8 rows, so that the blocks that run at one
// time share rows of A and columns of B in the L2 cache.
struct GemmBlock {
  int m0, n0, batch, split, k_begin, k_end;

  __device__ __forceinline__ GemmBlock(const Gemm& gemm, int tile_m, int tile_n) {
    constexpr unsigned kGroup = 8;
    const unsigned tiles_m = (gemm.m + tile_m - 1) / tile_m;
    const unsigned tiles_n = (gemm.n + gemm.ones + tile_n - 1) / tile_n;
    const unsigned share = blockIdx.x / (tiles_m * tiles_n), index = blockIdx.x % (tiles_m * tiles_n);
    const unsigned group = index / (kGroup * tiles_n) * kGroup, within = index % (kGroup * tiles_n);
    const unsigned rows = min(kGroup, tiles_m - group);
    m0 = (group + within % rows) * tile_m;
    n0 = within / rows * tile_n;
    split = share % static_cast<unsigned>(gemm.splits);
    batch = share / static_cast<unsigned>(gemm.splits);
    k_begin = split * gemm.k_split;
    k_end = min(static_cast<long long>(k_begin) + gemm.k_split, gemm.k);
  }
};

// 16 bytes from global to shared memory, of which the first `bytes` are read and the others are zero.
__device__ __forceinline__ void copy_async16(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
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
// the loads of the next panel and commit() stores what waits in registers meanwhile. With ASYNC nothing waits: 16-byte
// copies go straight to shared memory, and what must be gathered is stored at once, since packing awaits it anyway.
template <typename T, typename Engine, int SIZE, typename Operand> struct PanelLoader {
  static constexpr int W = Engine::W, BK = Engine::BK, COUNT = SIZE * BK / W / Engine::THREADS;
  // From one chunk of a thread to its next, along i where chunks run along k, else along k.
  static constexpr int DISTANCE_I = Engine::THREADS / (BK / W), DISTANCE_K = Engine::THREADS / (SIZE / W);
  bool along_k;
  int i, k;  // within the panel; neighbouring threads read along the direction in which the operand is contiguous
  typename Operand::template Cursor<W, COUNT> cursor;
  Vec<T, W> chunks[COUNT];

  __device__ __forceinline__ PanelLoader(const Operand& operand, int i0, int k0)
      : along_k(operand.along_k),
        i(along_k ? threadIdx.x / (BK / W) : threadIdx.x % (SIZE / W) * W),
        k(along_k ? threadIdx.x % (BK / W) * W : threadIdx.x / (SIZE / W)),
        cursor(operand, i0 + i, k0 + k, along_k ? DISTANCE_I : DISTANCE_K) {}

  __device__ __forceinline__ void fetch(typename Engine::Element* panel) {
    const auto copy = [&](int j, const T* source, int count) {
      if constexpr (Engine::ASYNC) {
        copy_async16(Engine::template place<SIZE>(panel, along_k, chunk_i(j), chunk_k(j)), source, count * sizeof(T));
      } else {
        chunks[j] = count == W ? load_vec<T, W>(source) : load_part(source, count);
      }
    };
    const auto put = [&](int j, Vec<T, W> chunk) {
      if constexpr (Engine::ASYNC) {
        Engine::template store<SIZE>(panel, along_k, chunk_i(j), chunk_k(j), chunk);
      } else {
        chunks[j] = chunk;
      }
    };
    cursor.template visit<DISTANCE_I, DISTANCE_K>(copy, put);
    cursor.advance(BK);
  }

  // The same where the operand is plain, and along_k known: free of branches.
  template <bool ALONG_K> __device__ __forceinline__ void fetch_plain(typename Engine::Element* panel) {
    constexpr int DI = ALONG_K ? DISTANCE_I : 0, DK = ALONG_K ? 0 : DISTANCE_K;
    cursor.template visit_plain<ALONG_K, ALONG_K ? DISTANCE_I : DISTANCE_K>([&](int j, const T* source, int count) {
      copy_async16(Engine::template place<SIZE>(panel, ALONG_K, i + j * DI, k + j * DK), source, count * sizeof(T));
    });
    cursor.advance(BK);
  }

  __device__ __forceinline__ void commit(typename Engine::Element* panel) const {
    if constexpr (!Engine::ASYNC) {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) Engine::template store<SIZE>(panel, along_k, chunk_i(j), chunk_k(j), chunks[j]);
    }
  }

 private:
  __device__ __forceinline__ int chunk_i(int j) const { return along_k ? i + j * DISTANCE_I : i; }
  __device__ __forceinline__ int chunk_k(int j) const { return along_k ? k : k + j * DISTANCE_K; }

  static __device__ __forceinline__ Vec<T, W> load_part(const T* source, int count) {
    Vec<T, W> chunk;
#pragma unroll
    for (int e = 0; e < W; ++e) chunk.data[e] = e < count ? source[e] : from_acc<T>(0);
    return chunk;
  }
};

// A ring of stages in shared memory, each a panel of A and a panel of B.
template <typename Engine> struct Ring {
  using Element = typename Engine::Element;
  static constexpr int STAGE = Engine::PANEL_A + Engine::PANEL_B;
  Element *first, *stage;

  __device__ __forceinline__ explicit Ring(void* shared) : first(static_cast<Element*>(shared)), stage(first) {}
  __device__ __forceinline__ Element* a() const { return stage; }
  __device__ __forceinline__ Element* b() const { return stage + Engine::PANEL_A; }
  __device__ __forceinline__ void advance() {
    stage = stage == first + (Engine::STAGES - 1) * STAGE ? first : stage + STAGE;
  }
};

// While one stage is multiplied, the next ones are on their way: to registers or, with ASYNC, to shared memory.
template <typename Engine, typename LoaderA, typename LoaderB>
__device__ __forceinline__ void gemm_loop(Engine& engine, LoaderA& load_a, LoaderB& load_b, void* shared, int steps) {
  Ring<Engine> filled(shared), current(shared);
#pragma unroll 1
  for (int step = 1 - Engine::STAGES; step < steps; ++step) {  // the first steps only fill the ring
    if (step >= 0) {
      wait_async<Engine::STAGES - 2>();
      __syncthreads();  // this stage has arrived, and the one before it has been read by all: it can be filled again
    }
    const bool more = step + Engine::STAGES - 1 < steps;
    if (more) {
      load_a.fetch(filled.a());
      load_b.fetch(filled.b());
    }
    commit_async();
    if (step >= 0) {
      engine.multiply(current.a(), load_a.along_k, current.b(), load_b.along_k);
      current.advance();
    }
    if (more) {
      load_a.commit(filled.a());
      load_b.commit(filled.b());
    }
    filled.advance();
  }
}

// The same for plain operands that go to tensor cores; and while 16 k are multiplied, the fragments of the next 16 are read,
// across the end of a stage too, so that the tensor cores wait at no barrier.
template <bool A_ALONG_K, bool B_ALONG_K, typename Engine, typename LoaderA, typename LoaderB>
__device__ __forceinline__ void gemm_loop_plain(Engine& engine, LoaderA& load_a, LoaderB& load_b, void* shared,
                                                int steps) {
  constexpr int STAGES = Engine::STAGES, PARTS = Engine::BK / 16;
  Ring<Engine> filled(shared), current(shared);
  const auto fetch_b = [&] {
    load_b.template fetch_plain<B_ALONG_K>(filled.b());
    commit_async();
    filled.advance();
  };
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) {  // past the last k, what is fetched is zero
    load_a.template fetch_plain<A_ALONG_K>(filled.a());
    fetch_b();
  }
  wait_async<STAGES - 2>();
  __syncthreads();
  engine.template read<A_ALONG_K, B_ALONG_K>(0, current.a(), current.b(), 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      if (part == PARTS - 1) {
        wait_async<STAGES - 2>();
        __syncthreads();  // the next stage has arrived, and this one has been read by all: it can be filled again
        current.advance();
      }
      engine.template read<A_ALONG_K, B_ALONG_K>((part + 1) % 2, current.a(), current.b(), (part + 1) % PARTS * 16);
      if (part == 0) load_a.template fetch_plain<A_ALONG_K>(filled.a());
      if (part == (PARTS > 2)) fetch_b();
      engine.multiply(part % 2);
    }
  }
  wait_async<0>();
}

// gemm_loop_plain for the operands' directions, of those that there are.
template <typename OperandA, typename OperandB, typename Engine, typename LoaderA, typename LoaderB>
__device__ __forceinline__ void gemm_loop_plain(Engine& engine, LoaderA& load_a, LoaderB& load_b, void* shared,
                                                int steps) {
  if constexpr (OperandB::ALONG_K) {
    if (load_a.along_k && load_b.along_k) gemm_loop_plain<true, true>(engine, load_a, load_b, shared, steps);
    if (!load_a.along_k && load_b.along_k) gemm_loop_plain<false, true>(engine, load_a, load_b, shared, steps);
  }
  if constexpr (OperandB::ALONG_I) {
    if (load_a.along_k && !load_b.along_k) gemm_loop_plain<true, false>(engine, load_a, load_b, shared, steps);
    if (!load_a.along_k && !load_b.along_k) gemm_loop_plain<false, false>(engine, load_a, load_b, shared, steps);
  }
}

// One tile of A B, kTileM x kTileN, by a whole block of kGemmThreads. Shared memory: the ring, sized by the host
// (cupyops/_dispatch/gemm/gemm.py). For the widest tile the host sees to it that both operands are plain.
// make_output() gives the Output: called at the end, so that it takes no registers before.
template <typename T, int TILE, typename OperandA, typename OperandB, typename MakeOutput>
__device__ __forceinline__ void gemm_tile(const GemmBlock& block, const OperandA& a, const OperandB& b,
                                          MakeOutput make_output) {
  using Engine = GemmEngine<T, TILE>;
  extern __shared__ __align__(16) unsigned char gemm_shared[];
  Engine engine;
  PanelLoader<T, Engine, kTileM<TILE>, OperandA> load_a(a, block.m0, block.k_begin);
  PanelLoader<T, Engine, kTileN<TILE>, OperandB> load_b(b, block.n0, block.k_begin);
  const int steps = (block.k_end - block.k_begin + Engine::BK - 1) / Engine::BK;
  if constexpr (Engine::ASYNC) {
    if (TILE == 256 || (a.plain && b.plain)) {
      gemm_loop_plain<OperandA, OperandB>(engine, load_a, load_b, gemm_shared, steps);
    } else {
      gemm_loop(engine, load_a, load_b, gemm_shared, steps);
    }
  } else {
    gemm_loop(engine, load_a, load_b, gemm_shared, steps);
  }
  __syncthreads();
  engine.write(make_output(), block.m0, block.n0, reinterpret_cast<acc_t<T>*>(gemm_shared));
}

// out = the sum of the partial sums of all splits, in a fixed order. Grid: ceil(elements / blockDim.x) with elements =
// batches * m * partial_row; block: (x, y), y > 1 where there are many splits: row r adds up the splits r, r + y, ...
// Shared memory: x * y values.
template <typename T, class Epilogue = Rounded<T>>
__device__ __forceinline__ void gemm_add_splits(const acc_t<T>* partial, T* data, const T* bias, T* column,
                                                const Gemm& gemm, Epilogue epilogue = {}) {
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
  Output<T, Epilogue>::template make<1>(data, nullptr, bias, column, gemm, batch, 0, epilogue)
      .put(within / row, within % row, sum);
}
