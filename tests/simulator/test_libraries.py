"""Kernels that use CUDA's own libraries: cub, cooperative groups, and the barriers and pipelines of libcu++."""

import numpy as np
import pytest
from simulator.kit import run

from cupyops.simulator import Deadlock, Race, SimulatorError, WarpFault

SEEDS = pytest.mark.parametrize("seed", [None, 1])


def ints(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- cub ---

REDUCE = """
    #include <cub/block/block_reduce.cuh>
    struct Most { __device__ int operator()(int a, int b) const { return a > b ? a : b; } };
    __global__ void sums(const int* x, int* y) {
        using Reduce = cub::BlockReduce<int, 128>;
        __shared__ typename Reduce::TempStorage room;
        int i = blockIdx.x * 128 + threadIdx.x;
        int sum = Reduce(room).Sum(x[i]);
        BARRIER
        int most = Reduce(room).Reduce(x[i] ^ 5, Most());
        if (threadIdx.x == 0) { y[2 * blockIdx.x] = sum; y[2 * blockIdx.x + 1] = most; }
    }
"""


@SEEDS
def test_block_reduce(seed):
    """Its room may be used again behind a barrier only."""
    x, y = np.arange(384, dtype=np.int32) * 7 % 101, ints(6)
    run(REDUCE.replace("BARRIER", "__syncthreads();"), "sums", 3, 128, x, y, seed=seed)
    rows = x.reshape(3, 128)
    assert y.reshape(3, 2).tolist() == np.stack([rows.sum(1), (rows ^ 5).max(1)], 1).tolist()
    with pytest.raises(Race):
        run(REDUCE.replace("BARRIER", ""), "sums", 3, 128, x, y, seed=seed)


SCAN = """
    #include <cub/warp/warp_scan.cuh>
    __global__ void scan(const int* x, int* y) {
        using Scan = cub::WarpScan<int, WIDTH>;
        __shared__ typename Scan::TempStorage room[64 / WIDTH];
        int sum;
        Scan(room[OWN]).InclusiveSum(x[threadIdx.x], sum);
        y[threadIdx.x] = sum;
    }
"""


@SEEDS
@pytest.mark.parametrize("width", [32, 16, 12])
def test_warp_scan(width, seed):
    """Of a width that is no power of two it goes through shared memory, of which each group needs its own."""
    threads = 12 if width == 12 else 64
    x, y = np.arange(64, dtype=np.int32), ints(64)
    code = SCAN.replace("WIDTH", str(width))
    run(code.replace("OWN", f"threadIdx.x / {width}"), "scan", 1, threads, x, y, seed=seed)
    for start in range(0, threads, width):
        assert y[start : start + width].tolist() == x[start : start + width].cumsum().tolist()


SORT = """
    #include <cub/block/block_radix_sort.cuh>
    #include <cub/block/block_scan.cuh>
    __global__ void sort(unsigned* x, int* y) {
        using Sort = cub::BlockRadixSort<unsigned, 64, 4>;
        using Scan = cub::BlockScan<int, 64, cub::BLOCK_SCAN_WARP_SCANS>;
        __shared__ union { typename Sort::TempStorage sort; typename Scan::TempStorage scan; } room;
        unsigned v[4];
        for (int i = 0; i < 4; i++) v[i] = x[4 * threadIdx.x + i];
        Sort(room.sort).Sort(v);
        BARRIER
        for (int i = 0; i < 4; i++) x[4 * threadIdx.x + i] = v[i];
        int sum;
        Scan(room.scan).ExclusiveSum((int)(v[0] & 7), sum);
        y[threadIdx.x] = sum;
    }
"""


@SEEDS
def test_radix_sort_and_block_scan_in_one_room(seed):
    x, y = np.random.default_rng(0).integers(0, 2**32, 256, dtype=np.uint32), ints(64)
    wanted = np.sort(x)
    with pytest.raises(Race):
        run(SORT.replace("BARRIER", ""), "sort", 1, 64, x.copy(), y, seed=seed)
    run(SORT.replace("BARRIER", "__syncthreads();"), "sort", 1, 64, x, y, seed=seed)
    assert (x == wanted).all()
    assert y.tolist() == [0, *(wanted[::4] & 7).cumsum()[:-1].tolist()]


# --- cooperative groups ---

TILES = """
    #include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    namespace cg = cooperative_groups;
    __global__ void tiles(const int* x, int* y) {
        auto block = cg::this_thread_block();
        auto tile = cg::tiled_partition<8>(block);
        __shared__ int s[64];
        int i = block.thread_rank();
        s[i] = cg::reduce(tile, x[i], cg::plus<int>());
        tile.sync();
        int v = s[i ^ OTHER] + tile.meta_group_rank();
        auto four = cg::tiled_partition<4>(tile);
        v += 100 * four.shfl(i, 0) + 10000 * four.any(four.thread_rank() == 2);
        auto warp = cg::tiled_partition<32>(block);
        auto label = cg::labeled_partition(warp, i % 3);
        v += 100000 * label.size() + 10000000 * cg::binary_partition(warp, i % 32 < 5).num_threads();
        if (i % 3 == 0) {
            auto here = cg::coalesced_threads();
            v += 1000000000 * (here.thread_rank() == 0);
        }
        block.sync();
        y[i] = v;
    }
"""


@SEEDS
def test_partitions_of_cooperative_groups(seed):
    x, y, i = np.arange(64, dtype=np.int32), ints(64), np.arange(64)
    run(TILES.replace("OTHER", "7"), "tiles", 1, 64, x, y, seed=seed)
    labels = [sum(1 for j in range(k // 32 * 32, k // 32 * 32 + 32) if j % 3 == k % 3) for k in range(64)]
    wanted = np.repeat(x.reshape(8, 8).sum(1), 8) + i // 8 + 100 * (i // 4 * 4) + 10000
    wanted = wanted + 100000 * np.array(labels) + 10000000 * np.where(i % 32 < 5, 5, 27)
    wanted = wanted + 1000000000 * np.isin(i, [0, 33])
    assert y.tolist() == wanted.tolist()
    with pytest.raises(Race):  # of another tile
        run(TILES.replace("OTHER", "8"), "tiles", 1, 64, x, y, seed=seed)


def test_a_tile_of_which_some_threads_are_elsewhere():
    code = """
        #include <cooperative_groups.h>
        namespace cg = cooperative_groups;
        __global__ void part(int* y) {
            auto tile = cg::tiled_partition<16>(cg::this_thread_block());
            if (threadIdx.x < WHO) y[threadIdx.x] = tile.shfl_down(threadIdx.x, 1);
        }
    """
    y = ints(32)
    run(code.replace("WHO", "16"), "part", 1, 32, y)
    assert y[:15].tolist() == list(range(1, 16))
    with pytest.raises(WarpFault):
        run(code.replace("WHO", "10"), "part", 1, 32, y)


GRID = """
    #include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    __global__ void turn(int* x, int* y) {
        auto grid = cg::this_grid();
        x[grid.thread_rank()] = blockIdx.x;
        MEET
        y[grid.thread_rank()] = x[(grid.thread_rank() + blockDim.x) % grid.size()];
    }
"""


@SEEDS
def test_the_grid_meets(seed):
    x, y = ints(256), ints(256)
    run(GRID.replace("MEET", "grid.sync();"), "turn", 4, 64, x, y, cooperative=True, seed=seed)
    assert y.tolist() == np.repeat([1, 2, 3, 0], 64).tolist()
    with pytest.raises(Race):
        run(GRID.replace("MEET", "__syncthreads();"), "turn", 4, 64, x, y, cooperative=True, seed=seed)


CLUSTER = """
    #include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    __global__ void __cluster_dims__(2, 1, 1) counts(const int* x, int* y) {
        __shared__ int h[16];
        auto cluster = cg::this_cluster();
        if (threadIdx.x < 16) h[threadIdx.x] = 0;
        FIRST;
        int v = x[blockIdx.x * 64 + threadIdx.x] % 32;
        atomicAdd(cluster.map_shared_rank(h, v / 16) + v % 16, 1);
        LAST;
        if (threadIdx.x < 16) y[cluster.block_rank() * 16 + threadIdx.x] = h[threadIdx.x];
    }
"""


@SEEDS
def test_counts_in_the_shared_memory_of_a_cluster(seed):
    x, y, meet = np.arange(128, dtype=np.int32), ints(32), "cluster.sync()"
    run(CLUSTER.replace("FIRST", meet).replace("LAST", meet), "counts", 2, 64, x, y, arch="sm_90", seed=seed)
    assert (y == 4).all()
    for first, last in (("__syncthreads()", meet), (meet, "__syncthreads()")):
        with pytest.raises(Race):
            run(CLUSTER.replace("FIRST", first).replace("LAST", last), "counts", 2, 64, x, y, arch="sm_90", seed=seed)


# --- libcu++ ---

BARRIER = """
    #include <cuda/barrier>
    __global__ void meet(int* y) {
        using Barrier = cuda::barrier<cuda::thread_scope_block>;
        #pragma nv_diag_suppress static_var_with_dynamic_init
        __shared__ Barrier barrier;
        __shared__ int s[64];
        if (threadIdx.x == 0) init(&barrier, COUNT);
        __syncthreads();
        for (int round = 0; round < 3; round++) {
            s[threadIdx.x] = threadIdx.x + round;
            auto token = barrier.arrive();
            WAIT
            y[threadIdx.x] += s[63 - threadIdx.x];
            barrier.arrive_and_wait();
        }
    }
"""


@SEEDS
@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90"])
def test_a_barrier_of_the_library(arch, seed):
    y, wait = ints(64), "barrier.wait(cuda::std::move(token));"
    code = BARRIER.replace("COUNT", "blockDim.x").replace("WAIT", wait)
    run(code, "meet", 1, 64, y, arch=arch, seed=seed)
    assert y.tolist() == [3 * (63 - i) + 3 for i in range(64)]


@SEEDS
def test_a_barrier_of_the_library_that_is_not_waited_for(seed):
    with pytest.raises(Race, match="with no barrier in between"):
        run(BARRIER.replace("COUNT", "blockDim.x").replace("WAIT", ""), "meet", 1, 64, ints(64), seed=seed)


def test_a_barrier_of_the_library_that_waits_for_too_many():
    code = BARRIER.replace("COUNT", "blockDim.x + 1").replace("WAIT", "barrier.wait(cuda::std::move(token));")
    with pytest.raises(Deadlock):
        run(code, "meet", 1, 64, ints(64))


PIPELINE = """
    #include <cooperative_groups.h>
    #include <cuda/pipeline>
    namespace cg = cooperative_groups;
    __global__ void pipe(const int* x, int* y) {
        __shared__ alignas(16) int s[2][64];
        __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
        auto block = cg::this_thread_block();
        auto pipe = cuda::make_pipeline(block, &state);
        int sum = 0;
        for (int i = 0, ahead = 0; i < 4; i++) {
            for (; ahead < 4 && ahead < i + 2; ahead++) {
                pipe.producer_acquire();
                cuda::memcpy_async(block, s[ahead % 2], x + 64 * ahead, cuda::aligned_size_t<16>(256), pipe);
                pipe.producer_commit();
            }
            WAIT
            sum += s[i % 2][63 - threadIdx.x];
            pipe.consumer_release();
        }
        y[threadIdx.x] = sum;
    }
"""


@SEEDS
def test_a_pipeline_of_the_library(seed):
    x, y = np.arange(256, dtype=np.int32), ints(64)
    run(PIPELINE.replace("WAIT", "pipe.consumer_wait();"), "pipe", 1, 64, x, y, seed=seed)
    assert y.tolist() == x.reshape(4, 64).sum(0)[::-1].tolist()
    with pytest.raises(SimulatorError):
        run(PIPELINE.replace("WAIT", ""), "pipe", 1, 64, x, y, seed=seed)


COPY = """
    #include <cooperative_groups.h>
    #include <cooperative_groups/memcpy_async.h>
    namespace cg = cooperative_groups;
    __global__ void copy(const int* x, int* y) {
        __shared__ alignas(16) int s[256];
        auto block = cg::this_thread_block();
        cg::memcpy_async(block, s, x, sizeof(int) * 256);
        WAIT
        y[threadIdx.x] = s[255 - threadIdx.x];
    }
"""


@SEEDS
def test_memcpy_async_of_a_group(seed):
    x, y = np.arange(256, dtype=np.int32), ints(64)
    run(COPY.replace("WAIT", "cg::wait(block);"), "copy", 1, 64, x, y, seed=seed)
    assert y.tolist() == (255 - np.arange(64)).tolist()
    with pytest.raises(SimulatorError):
        run(COPY.replace("WAIT", "block.sync();"), "copy", 1, 64, x, y, seed=seed)
